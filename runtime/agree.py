"""What the ranks decide together: that they have the same flags, data and weights, and when to stop."""
import contextlib
import math
import os
import statistics
import sys
import time
import traceback

from runtime import launch  # isort: skip (before torch: it sets how idle threads wait)
import torch

import parallel
from config import Outcome, typed
from corpus import samples
from corpus.shards import verify_once
from corpus.tokenizer import prompt_tokenizer
from cost.memory import check_memory
from interface import files
from interface.layout import check_layout
from interface.terminal import say
from ops import fp8
from ops.checksum import checksum
from optim import VOTES
from runtime import profiles, session, watch

STOP_FILE = "stop"
# Why a run stops early: one vote each. Of several reasons the first counts.
REASONS = (*(number.name for number in session.STOPPING), f"the file {STOP_FILE}", "max-minutes")
assert len(REASONS) == VOTES
PROMPT = ("cpu",)  # devices whose sums the host reads at once


@contextlib.contextmanager
def started(argv=None):
    """Surround a run of these flags: give (Config, World, Watch) when all ranks have started with equal ones.
    argv: by default this program's. At the end the ranks part, also where the run leaves by SystemExit."""
    parsed = session.signals.parsed if argv is None else None
    cfg, wrong = parsed or session.parse_flags(sys.argv[1:] if argv is None else argv)
    launch.deterministic(cfg.deterministic)
    timeout = cfg.timeout if cfg.pdb < 0 else launch.NO_TIMEOUT
    with watch.Watch(session.signals.rank, timeout) as watchdog:
        # Only the watchdog ends a run that hangs. A timeout of gloo or NCCL would keep counting
        # while the run is suspended.
        world = launch.launch(launch.NO_TIMEOUT, quiet=wrong is not None)
        watchdog.started(world)
        code = Outcome.DONE
        try:
            with world.everyone.input():
                if wrong is not None:
                    raise ValueError(wrong)
                compare(world, vars(cfg), "start all ranks with the same flags")
            if cfg.pdb >= 0:
                profiles.attach_pdb(world, cfg.pdb)
            yield cfg, world, watchdog
        except SystemExit as leaving:  # everyone.input() has printed why
            traceback.clear_frames(leaving.__traceback__)  # they may hold process groups
            code = leaving.code
        finally:
            files.unlock()
        launch.shutdown(world)
    if code:
        raise SystemExit(int(code))


def compare(world, values, cure):
    """Raise ValueError if a value of {name: value} differs from rank 0's. Collective over the world."""
    texts = {name: repr(value) for name, value in values.items()}
    theirs = world.everyone.broadcast(texts)  # a few words per value, from rank 0 to all, over the world
    for name, text in texts.items():
        if text != theirs.get(name):
            raise ValueError(f"rank {world.rank} has {typed(name)} {text}, rank 0 has {theirs.get(name)}; "
                             f"{cure}")


def make_mesh(cfg, world):
    """Return the run's mesh. ValueError: the flags do not fit these ranks."""
    check_layout(cfg, world.size)
    return parallel.make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)


def open_data(cfg, world, mesh):
    """Return what a run reads: (train, val, vocab_size, identity, tokenizer). Collective.
    identity: words that other data would change. tokenizer: None if the run prints no samples of text."""
    if world.local_rank == 0 and cfg.data != "synthetic":
        for folder in samples.parse_blend(cfg.data):
            verify_once(folder)  # once per node
    train, val, vocab_size, identity = samples.open_data(cfg)
    tokenizer = prompt_tokenizer(cfg)
    check_memory(cfg, mesh, vocab_size, world)
    fp8.check_device(cfg, world.device)
    compare(world, {"data with the tokens": identity}, "give all ranks the same data")
    return train, val, vocab_size, identity, tokenizer


# When to stop

def start_copy(tensor):
    """Start to copy a small tensor to the host. Return (copy, the event after which it is complete)."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, torch.get_device_module(tensor.device).current_stream().record_event()


class Stop:
    """When to stop before the last step: after a signal on any rank, if the file OUT/stop appears, or before
    --max-minutes have passed. The votes of all ranks are summed in each step, with the statistics
    (Optimizer.stats). On a GPU the host reads the sums of the step before."""

    def __init__(self, max_minutes):
        self.limit = max_minutes * 60 or math.inf  # seconds
        self.file = None  # None: this rank looks for no file
        self.started = time.monotonic()
        self.longest_step = 0.0  # seconds, so far
        self.longest_save = 0.0  # likewise
        self.sums = None  # the votes' sums of this step, (6,); None if no statistics were summed
        self.copied = None  # on a GPU (copy of those of the step before on the host, event)

    def watch_file(self, out):
        """From now on, on one rank, `touch OUT/stop` stops the run. What is there stopped an earlier run."""
        self.file = out / STOP_FILE
        if os.path.lexists(self.file):
            self.file.unlink()
            say(f"removed {self.file}, which was there before this start")

    def votes(self, device):
        """Return this rank's votes for REASONS, () fp64 each: 1.0 where it knows the reason, else 0.0."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return [zero + 1 if is_reason else zero for is_reason in self.reasons()]

    def reasons(self):
        """Return, for each of REASONS, whether this rank knows it."""
        is_asked = self.file is not None and os.path.lexists(self.file)  # False if the disk does not answer
        reserve = 3 * self.longest_step + 2 * self.longest_save  # so the save is over in time
        is_late = time.monotonic() - self.started + reserve > self.limit
        return [*(session.signals.number == number for number in session.STOPPING), is_asked, is_late]

    def poll(self, world, begun, longest_save):
        """Return why to stop, of REASONS, or None; the same on all ranks. begun: when this step began.
        longest_save: seconds, so far."""
        now = time.monotonic()
        self.longest_save = longest_save
        self.longest_step = max(self.longest_step, now - begun)
        before = self.copied
        self.copied = None
        found = [False] * VOTES  # also in a step that was skipped, which has no statistics
        if world.size == 1:
            found = self.reasons()
        elif self.sums is not None and self.sums.device.type in PROMPT:
            found = self.sums.tolist()
        elif self.sums is not None:
            self.copied = start_copy(self.sums)
        if before is not None:
            copy, event = before
            event.synchronize()  # the host waits for the step before at most
            found = copy.tolist()
        self.sums = None
        steps = 1 if self.copied is None else 2  # the votes of a step are read in this one or in the next
        session.signals.leaves = now + steps * (now - begun) + self.longest_save
        return next((reason for reason, asked in zip(REASONS, found, strict=True) if asked), None)


# Replicas. Memory and links flip bits, and a wrong sum makes replicas drift apart without an error. So every
# --check-every steps, ranks that must hold equal parameters compare hashes of them.

def replica_differences(model, mesh):
    """Return one line per parameter that differs between such ranks, the same list on all. Collective."""
    parts = {f"blocks.{i}": block for i, block in model.blocks.items()}
    parts.update((name, module) for name, module in model.named_children() if name != "blocks")
    held = {}  # {axis whose ranks hold the same tensor: {tensor's name: its hash}}
    for part, module in parts.items():
        model.provide_weights(module)  # weights may be on their way; ZeRO-3 gathers them
        for name, p in module.named_parameters(part):
            held.setdefault(p.reduction_axis, {})[name] = checksum(p)
    for name, t in model.named_buffers():  # the routers' biases: equal on a whole stage
        held.setdefault("stage", {})[name] = checksum(t)

    lines = []
    for axis_name, tensors in sorted(held.items()):
        axis = getattr(mesh, axis_name)
        mine = torch.stack([*tensors.values()])  # (n, 2)
        hashes = axis.all_gather(mine).view(axis.size, -1, 2)  # 2 n int64 from each rank to all
        for i, name in enumerate(tensors):
            found = [tuple(hash) for hash in hashes[:, i].tolist()]
            right = statistics.mode(found)  # what most hold, of equally many the first
            wrong = [rank for rank, its in zip(axis.ranks, found, strict=True) if its != right]
            if axis.rank == 0 and wrong:
                other = axis.ranks[found.index(right)]
                lines.append(f"{name} on {watch.format_ranks(wrong)} differs from rank {other}")

    found = mesh.world.everyone.gather(lines)  # a few lines, or none, from each rank, over the world
    return [line for part in found for line in part]

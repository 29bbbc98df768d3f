"""What the ranks decide together: that they have the same flags, code and data, and when to stop early.

    same_start      all ranks have the same flags and the same code
    compare         a value that differs between ranks is wrong input
    read_together   if one rank cannot read something, no rank goes on
    read_by_first   rank 0 reads for all; verify_data_first: the files of --data
    Stop            a signal on any rank, the file OUT/stop, or --max-minutes
"""
import contextlib
import dataclasses
import hashlib
import math
import os
import sys
import time
from pathlib import Path

import torch

from corpus.shards import parse_blend, verify
from fast.host_buffers import start_copy
from interface.command_line import one_line
from interface.terminal import clock, say
from optim import VOTES
from runtime import launch, session, watch

ROOT = Path(__file__).resolve().parent.parent
STOP_FILE = "stop"
# Why a run stops early: one vote each. Of several reasons the first counts.
REASONS = (*(number.name for number in session.STOPPING), f"the file {STOP_FILE}", "max-minutes")
assert len(REASONS) == VOTES
LARGE = 5  # GB, which take about as many seconds to read
LOOK_EVERY = 1.0  # seconds between two looks at OUT/stop


def same_start(world, cfg, wrong):
    """End all ranks with one line and code 2 if flags are wrong on any rank, or flags or code differ.

    cfg, wrong: from session.parse_flags(). Collective over the world.
    """
    with launch.exit_together(world):
        text = world.tree.first(wrong)  # a short text of the lowest rank that has one, over the world
        if text is not None:
            texts = world.tree.gather_objects(wrong)  # a short text per rank, over the world
            ranks = [rank for rank, other in enumerate(texts) if other == text]
            if len(ranks) < world.size:
                text = f"{watch.format_ranks(ranks)} only: {text}"
            raise ValueError(text)

        flags = {f"--{name.replace('_', '-')}": repr(value)
                 for name, value in dataclasses.asdict(cfg).items()}
        compare(world, flags, "start all ranks with the same flags")
        code = {"torch": torch.__version__, **loaded_files()}
        compare(world, code, "give all ranks the same code")


def loaded_files():
    """Return {path below the root: a hash of its text} of our files that this process has loaded."""
    hashes = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if "site-packages" in file or not file.endswith(".py"):
            continue
        if not Path(file).is_absolute():  # some of torch's are not
            continue
        path = Path(file).resolve()
        if path.is_relative_to(ROOT):
            hashes[path.relative_to(ROOT).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return hashes


def compare(world, values, cure):
    """Raise ValueError, on all ranks, if a value of {name: str} differs between ranks.

    Names that only some ranks have are not compared. Collective over the world: each rank sends a digest, and
    sends the values, too, only if the digests differ.
    """
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
    first = world.tree.broadcast_object(digest)  # 32 bytes of rank 0 to all, over the world
    if not world.tree.any(digest != first):  # one bool from each rank, over the world
        return
    everyone = world.tree.gather_objects(values)  # a few words per value and rank, over the world
    common = set.intersection(*map(set, everyone))
    for name in sorted(common):
        ranks_with = {}  # {value: ranks}
        for rank, theirs in enumerate(everyone):
            ranks_with.setdefault(theirs[name], []).append(rank)
        if len(ranks_with) > 1:
            raise ValueError(f"{_describe_difference(name, ranks_with)}; {cure}")


def _describe_difference(name, ranks_with):
    """Return "rank 1 has NAME VALUE, ranks 0, 2 have NAME VALUE", for at most four values.

    ranks_with: {value: ranks}. The value that the fewest ranks have comes first.
    """
    parts = []
    for value, ranks in sorted(ranks_with.items(), key=lambda item: len(item[1])):
        verb = "has" if len(ranks) == 1 else "have"
        parts.append(f"{watch.format_ranks(ranks)} {verb} {name} {value}")
    if len(parts) > 4:
        parts = [*parts[:4], "..."]
    return ", ".join(parts)


def read_together(tree, read, *args):
    """Return read(*args) of this rank, or raise ValueError on all ranks if one of them cannot read.

    The weights are sent next, and no rank must wait for one that has failed. Collective over the tree.
    """
    result = wrong = None
    try:
        result = read(*args)
    except (ValueError, OSError) as e:
        wrong = one_line(e)
    text = tree.first(wrong)  # a short text of the lowest rank that has one, over the world
    if text:
        raise ValueError(text)
    return result


def read_by_first(tree, read, *args):
    """Return read(*args) of rank 0, which alone calls it, or raise its ValueError, on all ranks.

    The result is small enough for the host's tree. Collective over the tree.
    """
    result = wrong = None
    if tree.rank == 0:
        try:
            result = read(*args)
        except (ValueError, OSError) as e:
            wrong = one_line(e)
    result, wrong = tree.broadcast_object((result, wrong))  # what rank 0 read, to all, over the world
    if wrong:
        raise ValueError(wrong)
    return result


def verify_data_first(tree, spec):
    """Verify the data sets of --data on rank 0, before the other nodes look at them.

    They find its record, .verified.json, and need not read the files of a shared disk again. Collective over
    the tree.
    """
    folders = [] if spec == "synthetic" else [folder for folder, _ in parse_blend(spec)]
    for folder in folders:
        if tree.rank == 0:
            announce_reading(Path(folder))
        read_by_first(tree, verify, folder)


def announce_reading(folder):
    """Print a line if the files of a data set are large and were not verified here before."""
    with contextlib.suppress(OSError):
        gigabytes = sum(path.stat().st_size for path in folder.glob("*.bin")) / 1e9
        if gigabytes > LARGE and not (folder / ".verified.json").exists():
            say(f"reads {gigabytes:,.0f} GB of {folder} to compare their sha256, once: about "
                f"{clock(gigabytes)}")


class Stop:
    """When to stop before the last step: after a signal on any rank, if the file OUT/stop appears, or before
    --max-minutes have passed.

    The step under way is always finished. Each rank votes for the reasons that it knows, and the votes of all
    ranks are summed in each step, with the statistics (Optimizer.stats). So the ranks agree, and nothing else
    is sent. On a GPU the host reads the sums of the step before, which it need not wait for.
    """

    def __init__(self, max_minutes):
        self.limit = max_minutes * 60  # seconds; 0: none
        self.file = None  # None: this rank looks for no file
        self.looked = -math.inf  # when it looked last
        self.is_asked = False  # the file was there
        self.started = time.monotonic()
        self.longest_step = 0.0  # seconds, so far
        self.longest_save = 0.0
        self.constants = None  # 0.0 and 1.0, () fp64 each, on the device
        self.sums = None  # (copy of the votes' sums on the host, event) of this step
        self.sums_before = None  # of the step before

    def watch_file(self, out):
        """From now on `touch OUT/stop` stops the run, where no signal reaches the ranks. Only one rank
        needs to look. A file that is already there has stopped an earlier run, and is removed.
        """
        self.file = out / STOP_FILE
        if os.path.lexists(self.file):
            try:
                self.file.unlink()
            except OSError as e:
                raise ValueError(f"{self.file} would stop this run and cannot be removed: {e.strerror}; "
                                 "remove it, or give another --out") from e
            say(f"removed {self.file}, which was there before this start")

    def step_took(self, seconds):
        self.longest_step = max(self.longest_step, seconds)

    def save_took(self, seconds):
        self.longest_save = max(self.longest_save, seconds)

    def votes(self, device):
        """Return this rank's votes for REASONS, () fp64 each: 1.0 where it knows the reason, else 0.0."""
        if self.constants is None:
            zero = torch.zeros((), dtype=torch.float64, device=device)
            self.constants = zero, zero + 1
        return [self.constants[is_reason] for is_reason in self._reasons()]

    def count(self, sums):
        """Take the sums of all ranks' votes of this step, (6,)."""
        self.sums = start_copy(sums)

    def poll(self, world):
        """Return why to stop: a signal's name, "the file stop", "max-minutes", or None to go on; the same on
        all ranks.

        The time for three more steps and two saves is kept in reserve. If no statistics were summed in this
        step, because it was skipped, this is collective over the world.
        """
        sums = self.sums
        before = self.sums_before
        self.sums = None
        self.sums_before = sums
        if world.size == 1:
            found = self._reasons()
        elif sums is None:
            bits = sum(1 << i for i, is_reason in enumerate(self._reasons()) if is_reason)
            asked = world.tree.either(bits)  # six bits from each rank to all, over the world
            found = [asked >> i & 1 for i in range(VOTES)]
        else:
            _, event = sums
            found = self._read(sums if event is None else before)
        return next((reason for reason, asked in zip(REASONS, found, strict=True) if asked), None)

    def _read(self, copied):
        """Return the sums of a step as a list. Without a copy, of the first step on a GPU, they are 0."""
        if copied is None:
            return [0.0] * VOTES
        sums, event = copied
        if event is not None:
            event.synchronize()  # the host waits for the step before at most
        return sums.tolist()

    def _reasons(self):
        """Return, for each of REASONS, whether this rank knows it."""
        by_signal = [session.signals.number == number for number in session.STOPPING]
        return [*by_signal, self._file_is_there(), self._is_late()]

    def _file_is_there(self):
        """Whether OUT/stop appeared. This rank looks once per second at most: a shared disk may be slow."""
        now = time.monotonic()
        if self.file is not None and now - self.looked >= LOOK_EVERY:
            self.looked = now
            self.is_asked = self.is_asked or os.path.lexists(self.file)  # False if the disk does not answer
        return self.is_asked

    def _is_late(self):
        if not self.limit:
            return False
        elapsed = time.monotonic() - self.started
        reserve = 3 * self.longest_step + 2 * self.longest_save
        return elapsed + reserve > self.limit

"""What a run needs to go on after it was stopped: its state, its parts of the weights, and who writes them.

    State, save, load, dump_grads     where the run is; checkpoint.py knows only tensors and their names
    prepare_out_dir, find_checkpoint  the directory of the run, and which checkpoint in it is used
    settle                            after all was checked: rename what an earlier run left there
    init_from                         --init-from: start from another run's weights; experts from a dense one
    Saver                             writes checkpoints in the background
"""
import dataclasses
import json
import math
import secrets
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import checkpoint
from config import Outcome, pad_vocab
from fast.host_buffers import HostBuffers
from interface import files
from interface.command_line import one_line
from interface.files import warn
from ops.checksum import checksum, refuse_not_finite
from ops.flat import shards
from parallel import Axis
from runtime.agree import read_together
from runtime.launch import exit_together
from skip import Ranges

# -----------------------------------------------------------------------------
# where the run is

@dataclasses.dataclass
class State:
    """Where the run is. Data order, learning rate and randomness are functions of these numbers and the
    flags, so nothing else has to be saved beside the tensors."""
    step: int = 0       # completed steps, skipped ones included
    samples: int = 0    # sequences consumed
    skipped: int = 0    # steps skipped: asked for by --train-range-to-skip, and spikes
    nan_steps: int = 0  # steps not taken because loss or gradient norm was not finite
    data: str = ""      # identity of the token files
    skip: list = dataclasses.field(default_factory=list)  # ends of the ranges to skip
    # [(loss, gradient norm)] of the last accepted steps
    window: list = dataclasses.field(default_factory=list)
    streak: int = 0     # steps in a row that were not taken: spikes and non-finite ones
    vocab_size: int = 0  # of the model, without padding
    # {step, val_loss} of the lowest validation loss so far; its checkpoint is kept beside the newest ones
    best: dict = dataclasses.field(default_factory=dict)
    changed: dict = dataclasses.field(default_factory=dict)  # {flag: [before, now]} at this start; not saved

    def evaluated(self, loss):
        """Remember the validation loss of this step if it is the lowest so far -> loss."""
        if loss < self.best.get("val_loss", math.inf):
            self.best = {"step": self.step, "val_loss": loss}
        return loss

    def best_name(self):
        return f"step_{self.best.get('step', 0):06d}"

    def save_best(self, cfg):  # -> whether this step's validation loss is a reason to save it
        return cfg.keep_best and cfg.save_every > 0 and self.best.get("step") == self.step


# what a resume does with a flag that differs from the checkpoint's. not listed: printed, then it goes on.
# refused, because they fix the names and shapes of the tensors:
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "seq_len", "norm", "norm_eps", "mlp",
         "pos", "bias", "tied", "objective", "n_experts", "n_shared_experts")
VOCABULARY = "wte.weight", "head.weight", "mlm.bias"  # their rows are symbols and padding
# refused unless --resume-changed names it: the weights would be another function, or the data come in another
# order. seq_len with RoPE only, which has no tensor of that length
MEANING = ("data", "seed", "vocab_size", "seq_len", "norm", "rope_base", "top_k", "router",
           "router_bias_rate", "capacity_factor", "drop_policy")
# not mentioned, because they say nothing about the training:
SILENT = ("out", "preset", "init_from", "log_every", "eval_every", "eval_iters", "save_every", "keep",
          "keep_best", "resume", "resume_changed", "max_minutes", "timeout", "check_every", "plot", "prompt",
          "train_range_to_skip", "profile", "trace", "timers", "wandb", "pdb", "dump_grads")
NEEDS = {**dict.fromkeys(("top_k", "router", "router_bias_rate", "capacity_factor", "aux_coef", "z_coef",
                          "ep_slack"), "n_experts"), "drop_policy": "capacity_factor"}  # no effect without


def save(cfg, mesh, dp, opt, saver, state):
    """Start to write step_N/, every rank its part; saver.wait() says whether it was committed."""
    if not saver.wait() and saver.failed == state.best.get("step"):
        state.best = {}  # lost: the next evaluation is the lowest
    where = {k: v for k, v in dataclasses.asdict(state).items() if k != "changed"}
    where["best"] = state.best if cfg.keep_best else {}
    meta = {**where, "seed": cfg.seed, "adam_t": int(opt.adam_t()), "scaler": opt.scaler(),
            "world": mesh.world.size, "shape": {k: getattr(cfg, k) for k in SHAPE},
            "flags": dataclasses.asdict(cfg)}
    opt.snapshot_done = saver.start(state.step, shards(dp, opt), meta)


def allowed_changes(cfg):
    """-> the flags that --resume-changed names. ValueError: one is none that it can allow."""
    names = [name.strip().lstrip("-").replace("-", "_") for name in cfg.resume_changed.split(",")]
    if wrong := next((name for name in names if name and name not in MEANING), None):
        raise ValueError(f"--resume-changed {wrong.replace('_', '-')}: give flags among "
                         f"{', '.join(MEANING).replace('_', '-')}; no other one needs it or could change")
    return names


def changed_flags(cfg, path, meta, world, data_id, vocab_size):
    """-> {flag: [the checkpoint's value, cfg's]} where they differ, if it matters to the training. meta: of
    the checkpoint; an older one has not all flags. ValueError: --resume-changed has to allow it."""
    now = {**json.loads(json.dumps(dataclasses.asdict(cfg))), "ranks": world, "data": data_id}
    try:
        before = {**meta["shape"], **meta.get("flags", {}), "seed": meta["seed"], "ranks": meta["world"],
                  "data": meta["data"], "vocab_size": meta.get("vocab_size") or vocab_size}
        now["vocab_size"] = vocab_size or before["vocab_size"]
        for flags in (before, now):
            if not flags.get("global_batch", 1):  # one micro-batch per replica: it follows from the layout
                replica = flags["tp"] * flags["pp"] * flags.get("cp", 1)
                flags["global_batch"] = flags["micro_batch"] * (flags["ranks"] // replica)
    except (KeyError, TypeError, ZeroDivisionError) as e:
        raise ValueError(f"checkpoint {path}: its meta is no run's ({e!r}); {checkpoint.HINT}") from None
    # values of a file are printed: no escape codes for the terminal
    before = {k: v.encode("unicode_escape").decode() if isinstance(v, str) else v for k, v in before.items()}
    changed = {name: [before[name], value] for name, value in now.items()
               if before.get(name, value) != value and name not in SILENT
               and (name != "rope_base" or cfg.pos == "rope")
               and (name not in NEEDS or getattr(cfg, NEEDS[name]))}
    for name in MEANING:
        if name in changed and name not in allowed_changes(cfg):
            flag, (there, here) = name.replace("_", "-"), changed[name]
            what, fix = ("other data,", "its --data") if name == "data" else (flag, f"--{flag} {there}")
            raise ValueError(f"checkpoint {path} was trained with {what} {there}, this run has {here}; give "
                             f"{fix}, or --resume-changed {flag} to go on with {here}")
    return changed


def check_shape(cfg, path, shape, may_differ=()):
    """ValueError, with all flags to give, where the checkpoint's model has another shape than cfg's."""
    shape = {"norm_eps": 1e-5, **shape}  # older checkpoints do not name it
    apart = {key.replace("_", "-"): (there, getattr(cfg, key, None)) for key, there in shape.items()
             if there != getattr(cfg, key, None) and key not in may_differ}
    if apart:
        there, here = (", ".join(f"{flag} {values[i]}" for flag, values in apart.items()) for i in (0, 1))
        fix = " ".join(f"--{flag} {values[0]}" for flag, values in apart.items())
        raise ValueError(f"checkpoint {path} has {there}, the flags say {here}; give {fix}")


def load(cfg, dp, opt, path, data_id, vocab_size=0):
    """Fill weights, Adam moments and counters from a checkpoint of any layout -> State. ValueError: the
    checkpoint belongs to another model, to other data, or to flags that --resume-changed does not name."""
    index = checkpoint.read_index(path)
    meta = index["meta"]
    if "shape" not in meta:
        raise ValueError(f"checkpoint {path} holds no state of a run; give a step_N of an --out directory")
    if not any(name.startswith("exp_avg/") for name in index["tensors"]):
        raise ValueError(f"checkpoint {path} holds weights alone, no moments, as an imported model does; "
                         f"give --init-from {path} to start from it")
    check_shape(cfg, path, meta["shape"], ("norm", *["seq_len"] * (cfg.pos == "rope")))
    changed = changed_flags(cfg, path, meta, dp.mesh.world.size, data_id, vocab_size)
    read_together(dp.mesh.world, checkpoint.load, path, shards(dp, opt, owned_only=False), index)
    opt.set_adam_t(meta["adam_t"])
    opt.set_scaler(meta["scaler"])
    opt.masters_to_model()
    where = {f.name: meta[f.name] for f in dataclasses.fields(State) if f.name in meta}
    return State(**{**where, "data": data_id, "vocab_size": vocab_size, "changed": changed})


def dump_grads(path, mesh, dp, opt, vocab_size):
    """--dump-grads: write one safetensors file with NAME, the weight before the update, and grad/NAME, the
    reduced, unclipped gradient, both at full size without padding. Collective over the world."""
    vectors = {"": opt.masters, "grad/": [opt.unscale(g.to(m.dtype)) for m, g in
                                          zip(opt.masters, opt.grads, strict=True)]}
    parts, rank, ranks = Path(path).with_suffix(".parts"), mesh.world.rank, mesh.world.size
    done = checkpoint.save(parts, 1, rank, ranks, shards(dp, opt, vectors), {}, run_id=run_id(mesh.world))
    if rank == 0:
        from safetensors.torch import save_file
        full = checkpoint.full_tensors(done)
        for name, t in full.items():
            if name.split("/")[-1] in VOCABULARY and t.size(0) == pad_vocab(vocab_size):
                full[name] = t[:vocab_size].contiguous()
        save_file(full, path)
        shutil.rmtree(parts)


# -----------------------------------------------------------------------------
# the directory of the run, and the checkpoint to start from

def run_id(axis):
    """-> a short random word, the same on all ranks of the axis and on no other run's. Collective."""
    # from the system's randomness: the run's own generators must not advance
    return axis.broadcast_object(secrets.token_hex(4))  # one short string from the first rank to all


def prepare_out_dir(cfg, world, out):
    """Claim --out, until files.unlock(), and remove what a killed save left behind -> find_checkpoint().
    Paths that cannot be written are refused. Collective over the world."""
    with exit_together(world), files.must_write(out):
        allowed_changes(cfg)
        if world.rank == 0:
            # a requeued job may start before the last processes of the stopped one have ended
            files.lock(out, min(files.LOCK_WAIT, cfg.timeout / 2) if cfg.resume == "auto" else 0)
            checkpoint.recover(out)
            is_here = not out.is_absolute() and Path.cwd().is_relative_to(out.resolve())
            if is_here and holds_other_run(cfg, out):
                raise ValueError(f"--out {out} holds another run and is the working directory, which cannot "
                                 "be renamed; give another --out, or --resume auto to go on")
    with exit_together(world), files.must_write(cfg.dump_grads, "--dump-grads"):
        if world.rank == 0 and cfg.dump_grads:
            (folder := Path(cfg.dump_grads).parent).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    return find_checkpoint(cfg, world, out)


def holds_other_run(cfg, out):
    return cfg.resume == "none" and ((out / "metrics.jsonl").exists() or bool(checkpoint.steps(out)))


def settle(cfg, world, out, state, found):
    """Nothing was refused: rename what an earlier run has in --out and this one must not count, a whole run
    or checkpoints of later steps. SystemExit(0) where no step is left to do. Collective over the world."""
    if found is not None and state.step >= cfg.steps:
        if world.rank == 0:
            print(f"{out if cfg.resume == 'auto' else found} has all its {state.step} steps; give a larger "
                  "--steps to go on, or another --out", flush=True)
        raise SystemExit(Outcome.DONE)
    with exit_together(world), files.must_write(out):
        if world.rank == 0 and holds_other_run(cfg, out):
            print(f"{out} held another run: it is now {files.move_aside(out)}\n(train.py --list shows all "
                  "runs; --resume auto would have gone on with it)", flush=True)
        elif world.rank == 0 and found and (moved := checkpoint.archive_later(out, state.step)):
            print(f"going on from {found}: later checkpoints are now {', '.join(moved)}", flush=True)
    if world.axis.any(world.rank == 0 and not (out / state.best_name()).is_dir()):
        state.best = {}  # no checkpoint to keep: the run goes on in another directory, or it was removed


def find_checkpoint(cfg, world, out):
    """-> path of the checkpoint that --resume asks for, the same on all ranks, or None to start at step 0.
    Every rank verifies its share of the checksums. A damaged checkpoint is named, and with --resume auto the
    one before it is tried. Collective over the world."""
    if cfg.resume == "none":
        return None
    paths = found = damage = None
    with exit_together(world):
        if world.rank == 0:
            paths = checkpoint.steps(out) if cfg.resume == "auto" else [Path(cfg.resume)]
            if cfg.resume != "auto":
                checkpoint.read_index(cfg.resume)  # a path that does not exist: say so before all wait for it
    paths = world.axis.broadcast_object(paths)  # a few paths from rank 0, over the world
    for path in paths:
        reports = world.axis.gather_objects(checkpoint.damage(path, world.rank, world.size))
        damage = next((r for r in reports if r), None)  # of one short string per rank, over the world
        if damage is None:
            found = path
            break
        if world.rank == 0 and path != paths[-1]:
            print(f"nanoshard: {damage}; trying the one before it", file=sys.stderr, flush=True)
    with exit_together(world):
        if paths and found is None:
            hint = f"; no other in {out} is sound, --resume none starts a new run" * (cfg.resume == "auto")
            raise ValueError(damage + hint)
    return found


def start_from(found, skip, model, opt, data_id):
    """Go on from the checkpoint `found`, or start with equal replicas (found None; with --init-from, from
    another run's weights) -> (State, skip.Ranges). skip: of the flags; those of the checkpoint join.
    Collective; ValueError: the checkpoint does not fit."""
    cfg, is_main = model.cfg, model.mesh.world.rank == 0
    if found is None:
        broadcast_and_verify(model)
        opt.masters_from_model()
        if cfg.init_from:
            said = init_from(model, opt, cfg.init_from)
            print(said if is_main else "", end="\n" * is_main, flush=True)
        state = State(data=data_id, vocab_size=model.vocab_size)
    else:
        state = load(cfg, opt.dp, opt, found, data_id, model.vocab_size)
        for name, (before, now) in state.changed.items() if is_main else ():
            print(f"resume: {name.replace('_', '-')} {before} -> {now}", flush=True)
        warning = skip.too_late(state.step, Ranges(state.skip))
        if is_main and warning:
            print(warning, file=sys.stderr, flush=True)
        skip = Ranges([*skip.ends(), *state.skip])  # a resume inside a range goes on skipping it
    state.skip = skip.ends()
    return state, skip


@torch.no_grad()
def broadcast_and_verify(model):
    """Replicas start equal: the first rank that holds a parameter sends it, then each checks its own."""
    for name, p in model.named_parameters():
        axis = getattr(model.mesh, p.reduce)
        if axis.size == 1 or p.untyped_storage().nbytes() == 0:  # ZeRO-3: no other rank holds the same slice
            continue
        axis.broadcast(p.data)  # one parameter, first replica to all, over its reduction axis
        mine = checksum(p).view(1, 2)
        for rank, theirs in zip(axis.ranks, axis.all_gather(mine), strict=True):  # two int64, over the axis
            assert torch.equal(theirs, mine[0]), f"{name} on rank {rank} differs after the broadcast"


def init_from(model, opt, path):
    """--init-from: load the weights of a checkpoint, or of a run's newest, and nothing else. Rows of symbols
    that it lacks keep their random start. From a dense model every expert gets the MLP and routers keep their
    random start (sparse upcycling, arXiv:2212.05055). -> one line that says so. ValueError: no fit."""
    world, cfg = model.mesh.world, model.cfg
    if not (Path(path) / "index.json").exists():
        path = next(iter(checkpoint.steps(path)), path)
    path = world.broadcast_object(path)  # that run may still save: rank 0's choice
    index = read_together(world, checkpoint.check, path, world.rank, world.size)  # each a share of it
    meta, shape = index["meta"], index["meta"].get("shape")
    if not shape:
        raise ValueError(f"--init-from {path} holds no weights of a run; give its --out directory or step_N")
    upcycles = cfg.n_experts > 0 and not shape["n_experts"]
    if upcycles and shape["bias"]:
        raise ValueError(f"--init-from {path} is a dense model with biases, and experts have none to take "
                         "them; give a model without bias, or train without --n-experts")
    check_shape(cfg, path, shape, (*["n_experts", "n_shared_experts"] * upcycles,
                                   *["seq_len"] * (cfg.pos == "rope")))
    symbols = meta.get("vocab_size") or min(index["tensors"]["wte.weight"]["shape"][0], model.vocab_size)
    if symbols > model.vocab_size or cfg.objective == "mlm" and symbols < model.vocab_size:  # [MASK]
        raise ValueError(f"--init-from {path} has a vocabulary of {symbols}, the data {model.vocab_size}; "
                         f"prepare the data with that run's tokenizer, or give --vocab-size {symbols}")
    requested, matrices = [], sum(p.expert for p in model.parameters())
    for name, own, full, where in shards(opt.dp, opt, {"": opt.masters}, owned_only=False):
        if name in VOCABULARY:
            rows = own[:max(0, symbols - where[0])]
            requested.append((name, rows, (pad_vocab(symbols), *full[1:]), where))
        elif not upcycles or ".moe." not in name:
            requested.append((name, own, full, where))
        elif len(full) == 3:  # (E, rows, columns) of w1, w2 or w3: a rectangle of one or several experts
            dense = name.replace(".moe.", ".mlp.") + ".weight"
            requested += [(dense, part, full[1:], where[1:]) for part in own]
    read_together(world, checkpoint.load, path, requested, index)
    opt.masters_to_model()
    new = model.vocab_size - symbols
    said = (f"upcycled {path}: each of {cfg.n_experts} experts starts as that model's MLP ({matrices} expert "
            "matrices on this rank), routers start fresh" if upcycles else
            f"starts from the weights of {path}, with a fresh optimizer")
    before = meta.get("flags", {})
    now = {k: getattr(cfg, k) for k in MEANING if k in before and k not in ("data", "seed", "vocab_size")}
    changed = [f"{name.replace('_', '-')} {one_line(before[name])} -> {value}" for name, value in now.items()
               if before[name] != value and (name not in NEEDS or getattr(cfg, NEEDS[name]) and not upcycles)]
    return "; ".join([said, *[f"{new} symbols are new"] * (new > 0), *changed])


# -----------------------------------------------------------------------------
# saving in the background
#
#     start()   main thread: wait for the save before, copy the shards to host buffers, start the thread
#     thread    writes rank_R.safetensors; rank 0's waits for all ranks' files, then renames the directory
#     wait()    main thread: join, and learn whether all ranks succeeded; before the next save and at the end
#
# the checkpoint holds the values at start(): on a GPU the copy runs on its own stream beside the next forward
# and backward, and the optimizer waits for it before its update. the thread calls no collective: those of two
# threads would get mixed up. a save that fails leaves older checkpoints as they are, and training goes on

MAX_FAILURES = 3  # failed saves in a row that end the run


class Saver:
    """root: the run's directory. axis: all ranks, each of which saves its part; None: this rank alone. keep:
    newest checkpoints to keep, 0 for all. timeout: seconds to wait for another rank's part. run_id: see
    run_id()."""

    def __init__(self, root, axis=None, keep=0, timeout=600.0, run_id="0"):
        self.root, self.axis, self.run_id = Path(root), axis or Axis("world"), run_id
        self.keep, self.timeout = keep, timeout
        self.host, self.job, self.failures, self.failed = HostBuffers(), None, 0, None
        self.saved, self.seconds = 0, 0.0  # step of the last save that was committed; the longest save so far

    def start(self, step, shards, meta):
        """Start to save; arguments as of checkpoint.save -> event after which the tensors may change (None:
        now)."""
        self.wait()
        copies, copied = self.host.copy(shards)
        self.job = Job(self, step, copies, copied, meta)
        return copied

    def wait(self):
        """Wait for the save that is under way on all ranks -> False if it failed. SystemExit(1) after
        MAX_FAILURES failures in a row. Collective over the axis."""
        if self.job is None:
            return True
        job = self.job
        job.part_done.wait()
        # one integer, over the axis: if a part will never come, rank 0's thread need not wait for it
        job.stop = self.axis.any(job.error is not None)
        job.thread.join()
        self.job = None
        failed = self.axis.any(job.error is not None)  # one integer, over the axis: rank 0's commit too
        if not failed:
            self.failures, self.saved, self.seconds = 0, job.step, max(self.seconds, job.seconds)
            return True
        if self.axis.rank == 0:
            shutil.rmtree(job.tmp, ignore_errors=True)
        self.failures, self.failed = self.failures + 1, job.step
        if self.failures == MAX_FAILURES:
            if self.axis.rank == 0:
                warn(f"{MAX_FAILURES} saves in a row failed, the last at step {job.step}, and the run ends; "
                     f"{self.newest()}; free space, repair the directory or the flags, then --resume auto")
            raise SystemExit(Outcome.FAILED)
        return False

    def newest(self):
        path = next(iter(checkpoint.steps(self.root)), None)
        return f"the newest checkpoint is {path}" if path else f"{self.root} holds no checkpoint yet"


class Job:
    """One save of one rank, in a thread. copied: event after which the copies are complete, or None."""

    def __init__(self, saver, step, copies, copied, meta):
        self.saver, self.step, self.copies, self.copied, self.meta = saver, step, copies, copied, meta
        self.tmp = saver.root / f"step_{step:06d}.{saver.run_id}.tmp"
        self.part_done, self.error, self.stop, self.seconds = threading.Event(), None, False, 0.0
        self.thread = threading.Thread(target=self.run, name="saver", daemon=True)
        self.thread.start()

    def run(self):
        started, s = time.monotonic(), self.saver
        try:
            if self.copied is not None:
                self.copied.synchronize()
            refuse_not_finite(self.copies)
            checkpoint.write_part(self.tmp, s.axis.rank, self.copies)
            self.part_done.set()
            if s.axis.rank == 0:
                checkpoint.commit(self.tmp, self.step, s.axis.size, self.meta, s.timeout, lambda: self.stop)
        except Exception as e:  # any exception: wait() must learn of it
            self.error = e
            self.report()
        self.part_done.set()
        if s.axis.rank == 0 and s.keep and self.error is None:
            try:
                checkpoint.prune(s.root, s.keep, self.meta.get("best", {}).get("step"))
            except OSError as e:  # one checkpoint too many: the save itself is good
                warn(f"an old checkpoint could not be removed: {e}")
        self.seconds = time.monotonic() - started

    def report(self):
        """Print one line from one rank: the first that creates the file `failed`; if none can, rank 0."""
        try:
            self.tmp.mkdir(parents=True, exist_ok=True)  # nothing was written yet where a value is wrong
            (self.tmp / "failed").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            if self.saver.axis.rank:
                return
        warn(f"step {self.step} was not saved: {self.error} (rank {self.saver.axis.rank}); "
             f"training goes on, {self.saver.newest()}")

"""What a run needs to go on after it was stopped: its state, and each rank's parts of the weights.

The ranks fail together: the caller stands in everyone.input().
"""
import dataclasses
import math
import os
import secrets
import shutil
import time
from pathlib import Path

import torch

import checkpoint
from config import SHAPE, Outcome, flags_of_kind, pad_vocab
from interface import files
from interface.paths import is_run
from interface.terminal import one_line, say
from ops.split_master import whole
from optim import learning_rate
from runtime.init_from import VOCABULARY, changed_flags, init_from, load_base
from runtime.pieces import first_sound, load_pieces, own_pieces
from runtime.saver import Saver
from skip import skipped_ranges

# What --out must not hold besides a run: prepared data, other runs, models of other programs, sources
FOREIGN = "*_[0-9]*.bin", "*/metrics.jsonl", "*.safetensors", "*.md", "*.py", ".git"
SCHEDULE = {"steps", "lr", "min_lr", "warmup", "lr_schedule", "decay_steps", "decay_ratio"}


# Where the run is

@dataclasses.dataclass
class State:
    """Where the run is: data order, learning rate and randomness follow from these numbers and the flags."""
    step: int = 0       # completed steps, skipped ones included
    samples: int = 0    # sequences consumed
    skipped: int = 0    # steps skipped: those of --train-range-to-skip, and spikes
    nan_steps: int = 0  # steps not taken because loss or gradient norm was not finite
    data: str = ""      # identity of the token files
    skip: list = dataclasses.field(default_factory=list)  # ends of the ranges to skip
    # [(loss, gradient norm)] of the last accepted steps
    window: list = dataclasses.field(default_factory=list)
    streak: int = 0     # steps in a row that were not taken: spikes and non-finite ones
    vocab_size: int = 0  # of the model, without padding
    # {step, val_loss} of the lowest validation loss so far; its checkpoint is kept, like the newest ones
    best: dict = dataclasses.field(default_factory=dict)
    # --lora: {path, hash} of the checkpoint that the frozen weights are from
    base: dict = dataclasses.field(default_factory=dict)
    changed: dict = dataclasses.field(default_factory=dict)  # {flag: [before, now]} at this start; not saved

    def evaluated(self, loss):
        """Remember a validation loss if it is the lowest so far. Return it."""
        if loss < self.best.get("val_loss", math.inf):
            self.best = {"step": self.step, "val_loss": loss}
        return loss

    def best_name(self):
        """The name of the checkpoint with the lowest validation loss."""
        return f"step_{self.best.get('step', 0):06d}"


def save(cfg, mesh, data_parallel, opt, saver, state):
    """Start to write step_N/; every rank writes its part. saver.wait() says whether it was committed."""
    if not saver.wait() and saver.step == state.best.get("step"):
        state.best = {}  # lost: the next evaluation is the lowest
    flags = dataclasses.asdict(cfg)
    meta = {**dataclasses.asdict(state), "seed": cfg.seed, "adam_t": int(opt.adam.step_count),
            "scaler": opt.scaler(), "world": mesh.world.size,
            "shape": {name: flags[name] for name in SHAPE}, "flags": flags}
    del meta["changed"]
    if not cfg.keep_best:
        meta["best"] = {}
    opt.snapshot_done = saver.start(state.step, own_pieces(data_parallel, opt), meta)


def load(cfg, data_parallel, opt, path, data_id, vocab_size=0):
    """Fill weights, moments and counters from a checkpoint of any layout. Return the State. ValueError: the
    checkpoint belongs to another model, to other data, or to flags that --resume-changed does not name."""
    index = checkpoint.read_index(path)
    meta = index["meta"]
    if not any(name.startswith("exp_avg/") for name in index["tensors"]):
        raise ValueError(f"checkpoint {path} holds weights alone, no moments, as an imported model does; "
                         f"give --init-from {path} to start from it")
    world = data_parallel.mesh.world
    changed = changed_flags(cfg, path, meta, world.size, data_id, vocab_size)
    # A change that --resume-changed allows may leave tensors unused, such as the bias of a router or a norm.
    unused = index["tensors"] if changed.keys() & set(flags_of_kind("meaning")) else ()
    load_pieces(world, path, index, own_pieces(data_parallel, opt, owned_only=False), unused)
    opt.adam.step_count.fill_(meta["adam_t"])
    opt.set_scaler(meta.get("scaler"))
    opt.masters_to_model()
    where = {field.name: meta[field.name] for field in dataclasses.fields(State) if field.name in meta}
    where.update(data=data_id, vocab_size=vocab_size, changed=changed)
    return State(**where)


def dump_grads(path, world, data_parallel, opt, vocab_size):
    """For --dump-grads: write one new safetensors file. NAME is the weight before the update, grad/NAME the
    reduced, unclipped gradient, both at full size without padding. Collective over the world.
    """
    grads = [opt.unscale(grad.to(master.dtype)) for master, grad in zip(opt.masters, opt.grads, strict=True)]
    found = own_pieces(data_parallel, opt, {"": opt.masters, "grad/": grads})
    found = [(name, whole(piece).cpu(), *place) for name, piece, *place in found]
    folder = Path(f"{path}.{run_id(world.everyone)}.parts")  # new: all in it is this function's
    try:
        with world.everyone.input():
            step = checkpoint.save(folder, 1, found, {}, world.rank, world.size)
            if world.rank == 0:
                full = checkpoint.full_tensors(step)
                for name, tensor in full.items():
                    if name.split("/")[-1] in VOCABULARY and tensor.size(0) == pad_vocab(vocab_size):
                        full[name] = tensor[:vocab_size]
                checkpoint.write_safetensors(folder / "full", full)
                os.rename(folder / "full", path)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


# The directory of the run, and the checkpoint to start from

def run_id(everyone):
    """Return a short random word, the same on all ranks and on no other run's. Collective."""
    return everyone.broadcast(secrets.token_hex(4))


def prepare_out_dir(cfg, world, out):
    """Claim --out, until files.unlock(), and remove what a killed save left behind. Return the checkpoint to
    go on from, or None to start at step 0. Collective. Paths that cannot be written are refused.
    """
    paths = []
    if world.rank == 0:
        # A requeued job may start before the last processes of the stopped one have ended.
        wait = min(files.LOCK_WAIT, cfg.timeout / 2) if cfg.resume == "auto" else 0
        files.lock(out, wait)
        checkpoint.recover(out)
        foreign = [path.name for pattern in FOREIGN for path in out.glob(pattern)]
        if foreign and not is_run(out):
            raise ValueError(f"--out {out} is no run, and holds {foreign[0]}, which no run may damage; "
                             f"give a new folder, such as --out {out / 'run'}")
        if cfg.resume == "auto":
            paths = [str(path) for path in checkpoint.steps(out)]
        elif cfg.resume != "none":
            paths = [cfg.resume]
    paths = world.everyone.broadcast(paths)  # those that rank 0 sees
    found = first_sound(world.everyone, paths, "; --resume none starts a new run")
    if world.rank == 0 and cfg.dump_grads and found is None:  # a resumed run does not write it again
        path = Path(cfg.dump_grads)
        if os.path.lexists(path):
            raise ValueError(f"--dump-grads {path} is there already and stays; give a new file")
        path.parent.mkdir(parents=True, exist_ok=True)
    world.everyone.barrier()
    return found


def settle(cfg, world, out, state, found):
    """Rename what an earlier run left in --out and this one must not count, after all checks. Return a Saver.
    Collective over the world. SystemExit(0): no step is left to do.
    """
    if found is not None and state.step >= cfg.steps:
        if world.rank == 0:
            say(f"{out if cfg.resume == 'auto' else found} has all its {state.step} steps; give a larger "
                "--steps to go on, or --resume none to start anew")
        raise SystemExit(Outcome.DONE)
    if world.rank == 0 and found is not None and found.resolve().is_relative_to(out.resolve()):
        set_later_aside(out, state.step, found)
    elif world.rank == 0 and is_run(out):
        set_run_aside(out, cfg.init_from)
    if world.everyone.any(world.rank == 0 and not (out / state.best_name()).is_dir()):
        state.best = {}  # no checkpoint to keep: the run goes on in another directory, or it was removed
    return Saver(out, world.everyone, cfg.keep, cfg.timeout, run_id(world.everyone))


def set_later_aside(out, step, found):
    """Rename the checkpoints of later steps, and copy the rows."""
    later = [path for path in checkpoint.steps(out) if checkpoint.step_of(path) > step]
    for name in ("metrics.jsonl", "experts.jsonl", "notes.jsonl"):
        if later and (out / name).exists():  # first: a kill between the two loses no row
            copy = files.set_aside(out / name, f"{name}.aside", shutil.copy2)
            say(f"going on from {found}: all rows until now are also in {copy}")
    for path in later:
        say(f"{path} is now {files.set_aside(path, f'{path.name}.aside')}")


def set_run_aside(out, init_from):
    """Rename the run in --out."""
    folder = out.resolve()  # where OUT is a symbolic link, it stays
    for name, path in (("the working directory", ""), ("--init-from", init_from)):
        if Path(path).resolve().is_relative_to(folder):
            raise ValueError(f"--out {out} holds another run, which would be renamed, and {name} is in "
                             f"it; give another --out, such as --out {out}-tuned")
    new = files.set_aside(folder, f"{folder.name}.{time.strftime('%Y-%m-%d_%H%M')}")
    files.lock(out)
    say(f"{out} held another run: it is now {new} (--resume auto goes on from checkpoints)")


# The start

def start_from(found, model, opt, data_id):
    """Go on from the checkpoint `found`, or start with equal replicas, perhaps with another run's weights.
    When it goes on, these do not count: a job script can give both --init-from and --resume auto.
    Return the State. Collective; ValueError: the checkpoint does not fit.
    """
    cfg = model.cfg
    skip = skipped_ranges(cfg.train_range_to_skip)
    if found is None:
        if cfg.lora and not cfg.init_from:
            raise ValueError(f"--lora {cfg.lora} fine-tunes a model that is there: give --init-from RUN, a "
                             "run or what convert.py import wrote")
        make_replicas_equal(model)
        opt.masters_from_model()
        said = []
        if cfg.init_from:
            said = [init_from(model, opt, cfg.init_from)]
        state = State(data=data_id, vocab_size=model.vocab_size, base=model.base)
    else:
        state = load(cfg, opt.data_parallel, opt, found, data_id, model.vocab_size)
        if cfg.lora:
            load_base(model, state.base, cfg.init_from)
            state.base = model.base
        said = [f"resume: {name.replace('_', '-')} {before} -> {now}"
                for name, (before, now) in state.changed.items()]
        if state.changed.keys() & SCHEDULE == {"steps"}:
            before, now = state.changed["steps"]
            old, new = (learning_rate(dataclasses.replace(cfg, steps=n), state.step) for n in (before, now))
            if old != new:
                said.append(f"resume: lr {old:.3g} -> {new:.3g}, as it decays until step {now}; "
                            f"--decay-steps {before} keeps its curve")
        if cfg.dump_grads or cfg.init_from and not cfg.lora:
            said.append(f"goes on from {found}: --init-from and --dump-grads are for a start, and not used")
        skip = sorted({*skip, *skipped_ranges(state.skip)})  # a resume inside a range goes on skipping it
    if model.mesh.world.rank == 0:
        for line in said:
            say(one_line(line))
    state.skip = [end for pair in skip for end in pair]
    return state


@torch.no_grad()
def make_replicas_equal(model):
    """The first holder of each tensor sends it to the others: on another CPU they may have drawn others."""
    for p in model.parameters():
        if p.untyped_storage().nbytes() > 0:
            getattr(model.mesh, p.reduction_axis).broadcast(p.data)  # one tensor, over the ranks that hold it
    for bucket in model.data_parallel.buckets:
        if bucket.flat.untyped_storage().nbytes() == 0:  # ZeRO-3
            bucket.replicas.broadcast(bucket.own)  # one slice, over the ranks that hold it

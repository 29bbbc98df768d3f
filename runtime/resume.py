"""What a run needs to go on after it was stopped: its state, and each rank's parts of the weights.

    State, save, load, dump_grads     where the run is; checkpoint.py knows only tensors and their names
    prepare_out_dir, find_checkpoint  the directory of the run, and which checkpoint in it is used
    settle                            after all checks: rename what an earlier run left there
    start_from                        resume, or start with equal replicas
    init_from                         --init-from: start from another run's weights; experts from a dense run

runtime/saver.py writes checkpoints in the background.
"""
import dataclasses
import difflib
import json
import math
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import torch

import checkpoint
from config import SHAPE, SILENT, Config, Outcome, flags_of_kind, has_effect, pad_vocab, unknown_flags
from interface import files
from interface.files import load_json
from interface.paths import is_run
from interface.tensor_file import write_safetensors
from interface.terminal import complain, one_line, say
from ops.checksum import checksum
from ops.split_master import whole
from runtime import base_weights
from runtime.changed_flags import (
    allowed_changes,
    changed_flags,
    check_shape,
    flexible_shapes,
    refuse_unknown,
)
from runtime.pieces import own_pieces
from runtime.read_checkpoint import check_together, load_tensors, newest_under, sent_index
from runtime.saver import Saver
from skip import Ranges

VOCABULARY = "wte.weight", "head.weight", "mlm.bias"  # their rows are symbols and padding


# -----------------------------------------------------------------------------
# Where the run is

@dataclasses.dataclass
class State:
    """Where the run is.

    Data order, learning rate and randomness are functions of these numbers and the flags, so nothing else has
    to be saved with the tensors.
    """
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
        """Remember the validation loss of this step if it is the lowest so far. Return the loss."""
        if loss < self.best.get("val_loss", math.inf):
            self.best = {"step": self.step, "val_loss": loss}
        return loss

    def best_name(self):
        """Return the name of the checkpoint with the lowest validation loss."""
        return f"step_{self.best.get('step', 0):06d}"


def save(cfg, mesh, data_parallel, opt, saver, state):
    """Start to write step_N/; every rank writes its part. saver.wait() says whether it was committed."""
    is_written = saver.wait()
    if not is_written and saver.failed == state.best.get("step"):
        state.best = {}  # lost: the next evaluation is the lowest
    meta = dataclasses.asdict(state)
    del meta["changed"]
    if not cfg.keep_best:
        meta["best"] = {}
    meta["seed"] = cfg.seed
    meta["adam_t"] = int(opt.adam.step_count)
    meta["scaler"] = opt.scaler()
    meta["world"] = mesh.world.size
    meta["shape"] = {name: getattr(cfg, name) for name in SHAPE}
    meta["flags"] = dataclasses.asdict(cfg)
    opt.snapshot_done = saver.start(state.step, own_pieces(data_parallel, opt), meta)


def load(cfg, data_parallel, opt, path, data_id, vocab_size=0):
    """Fill weights, moments and counters from a checkpoint of any layout. Return the State.

    ValueError: the checkpoint belongs to another model, to other data, or to flags that --resume-changed does
    not name.
    """
    index = sent_index(data_parallel.mesh.world.everyone, path)
    meta = index["meta"]
    if "shape" not in meta:
        raise ValueError(f"checkpoint {path} holds no state of a run; give a step_N of an --out directory")
    if not any(name.startswith("exp_avg/") for name in index["tensors"]):
        raise ValueError(f"checkpoint {path} holds weights alone, no moments, as an imported model does; "
                         f"give --init-from {path} to start from it")
    check_shape(cfg, path, meta["shape"], ["norm", *flexible_shapes(meta["shape"])])
    check_optimizer(cfg, path, meta)
    changed = changed_flags(cfg, path, meta, data_parallel.mesh.world.size, data_id, vocab_size)
    # A change that --resume-changed allows may leave tensors unused, such as the bias of a router or a norm.
    unused = index["tensors"] if changed.keys() & set(flags_of_kind("meaning")) else ()
    pieces = own_pieces(data_parallel, opt, owned_only=False)
    load_tensors(data_parallel.mesh.world, path, index, pieces, unused)
    opt.adam.step_count.fill_(meta["adam_t"])
    opt.set_scaler(meta.get("scaler"))
    opt.masters_to_model()
    where = {field.name: meta[field.name] for field in dataclasses.fields(State) if field.name in meta}
    where.update(data=data_id, vocab_size=vocab_size, changed=changed)
    return State(**where)


def dump_grads(path, world, data_parallel, opt, vocab_size):
    """For --dump-grads: write weights and gradients as one safetensors file. Collective over the world.

    NAME is the weight before the update, grad/NAME the reduced, unclipped gradient, both at full size without
    padding.
    """
    grads = [opt.unscale(grad.to(master.dtype)) for master, grad in zip(opt.masters, opt.grads, strict=True)]
    pieces = own_pieces(data_parallel, opt, {"": opt.masters, "grad/": grads})
    pieces = [(name, whole(piece).cpu(), *place) for name, piece, *place in pieces]
    path = Path(path)
    parts = path.with_name(f"{path.name}.{run_id(world.everyone)}.parts")
    tmp = parts / "step_000001.tmp"
    with world.everyone.input(), files.must_write(path, "--dump-grads"):
        if world.rank == 0:
            parts.mkdir()  # the folder is new: all in it is this function's
    try:
        with world.everyone.input(), files.must_write(path, "--dump-grads"):
            checkpoint.write_part(tmp, world.rank, pieces)
        with world.everyone.input(), files.must_write(path, "--dump-grads"):
            if world.rank == 0:
                checkpoint.commit(tmp, 1, {}, checkpoint.Writers(size=world.size))
                write_full(parts, path, vocab_size)
    finally:
        if world.rank == 0:
            shutil.rmtree(parts, ignore_errors=True)


def write_full(parts, path, vocab_size):
    """Write the tensors of the checkpoint in `parts`, at full size without padding, as a new file.

    FileExistsError: a file of this name came there since the start; it is not replaced.
    """
    full = checkpoint.full_tensors(parts / "step_000001")
    for name, tensor in full.items():
        if name.split("/")[-1] in VOCABULARY and tensor.size(0) == pad_vocab(vocab_size):
            full[name] = tensor[:vocab_size]
    write_safetensors(parts / "full.safetensors", full)
    path.touch(exist_ok=False)
    os.replace(parts / "full.safetensors", path)


# -----------------------------------------------------------------------------
# Flags that differ from the checkpoint's: config.flag() says what each difference means

def check_optimizer(cfg, path, meta):
    """Raise ValueError if the checkpoint was written with another --optimizer: its moments would not fit."""
    there = meta.get("flags", {}).get("optimizer", Config.optimizer)  # An older checkpoint does not name it.
    if there != cfg.optimizer:
        raise ValueError(f"checkpoint {path} holds the moments of --optimizer {there}, this run has "
                         f"{cfg.optimizer}; give --optimizer {there}, or --init-from {path} in place of "
                         "--resume to start from its weights alone")


def run_id(everyone):
    """Return a short random word, the same on all ranks and on no other run's. Collective."""
    # It comes from the system's randomness, because the run's own generators must not advance.
    return everyone.broadcast(secrets.token_hex(4))  # one short string from the first rank to all


def prepare_out_dir(cfg, world, out):
    """Claim --out, until files.unlock(), and remove what a killed save left behind.

    Return find_checkpoint(). Paths that cannot be written are refused. Collective over the world.
    """
    with world.everyone.input(), files.must_write(out):
        if not out.resolve().name:
            raise ValueError(f"--out {out} is no folder for a run; give a new one, such as --out out/mine")
        allowed_changes(cfg)
        if world.rank == 0:
            # A requeued job may start before the last processes of the stopped one have ended.
            wait = min(files.LOCK_WAIT, cfg.timeout / 2) if cfg.resume == "auto" else 0
            files.lock(out, wait)
            checkpoint.recover(out)
            refuse_foreign_folder(out)
            is_here = not out.is_absolute() and Path.cwd().is_relative_to(out.resolve())
            if is_here and holds_other_run(cfg, out):
                raise ValueError(f"--out {out} holds another run and is the working directory, which cannot "
                                 "be renamed; give another --out, or --resume auto to go on")
    found = find_checkpoint(cfg, world, out)
    with world.everyone.input(), files.must_write(cfg.dump_grads, "--dump-grads"):
        if world.rank == 0 and cfg.dump_grads and found is None:  # a resumed run does not write it again
            path = Path(cfg.dump_grads)
            if os.path.lexists(path):
                raise ValueError(f"--dump-grads {path} is there already and stays; give a new file")
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
    return found


def refuse_foreign_folder(out):
    """ValueError: --out was no run before, and holds prepared data, several runs, or sources."""
    if is_run(out):
        return
    where = f"--out {out} holds"
    if any(out.glob("*_[0-9]*.bin")):
        raise ValueError(f"{where} prepared data, which a run would damage; give another --out")
    for folder in sorted(out.glob("*/metrics.jsonl")):
        raise ValueError(f"{where} other runs, such as {folder.parent.name}; give a folder in it, such as "
                         f"--out {out / 'new'}")
    for source in sorted([*out.glob("*.py"), *out.glob("*.md"), *out.glob(".git")]):
        raise ValueError(f"{where} {source.name}, which is no file of a run; give a new folder, such as "
                         f"--out {out / 'run'}")


def holds_other_run(cfg, out):
    """Whether --out has the files of a run that this one does not continue.

    With --resume auto, or from a checkpoint of another folder, a command that was stopped before its first
    checkpoint begins again, and writes its rows again. Another command would lose them.
    """
    if cfg.resume == "none":
        return is_run(out)
    if cfg.resume != "auto":
        if Path(cfg.resume).resolve().is_relative_to(out.resolve()):
            return False
        if checkpoint.steps(out):
            return True
    has_rows = (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0
    return has_rows and not checkpoint.steps(out) and has_other_flags(cfg, out)


def has_other_flags(cfg, out):
    """Whether the run in --out has other flags than cfg, of those that change what it computes."""
    try:
        saved = load_json(out / "config.json")
    except (OSError, ValueError):
        return True
    if not isinstance(saved, dict):
        return True
    now = json.loads(json.dumps(dataclasses.asdict(cfg)))
    return any(saved.get(name, value) != value for name, value in now.items() if name not in SILENT)


def settle(cfg, world, out, state, found):
    """Rename what an earlier run left in --out and this one must not count, after all checks. This is a whole
    run, or checkpoints of later steps. Return the run's Saver. Collective over the world.
    SystemExit(0): no step is left to do.
    """
    if found is not None and state.step >= cfg.steps:
        if world.rank == 0:
            say(f"{out if cfg.resume == 'auto' else found} has all its {state.step} steps; give a larger "
                "--steps to go on, or another --out")
        raise SystemExit(Outcome.DONE)
    with world.everyone.input(), files.must_write(out):
        if world.rank == 0:
            set_aside(cfg, out, state, found)
    if world.everyone.any(world.rank == 0 and not (out / state.best_name()).is_dir()):
        state.best = {}  # no checkpoint to keep: the run goes on in another directory, or it was removed
    return Saver(out, world.axis, cfg.keep, cfg.timeout, run_id(world.everyone))


def set_aside(cfg, out, state, found):
    """Rename the run in --out if this one does not continue it, or else its checkpoints of later steps."""
    if holds_other_run(cfg, out):
        if cfg.init_from and Path(cfg.init_from).resolve().is_relative_to(out.resolve()):
            raise ValueError(f"--init-from {cfg.init_from} is in --out {out}, which this run would rename; "
                             f"give another --out, such as --out {out}-tuned")
        could_go_on = cfg.resume == "none" and checkpoint.steps(out)
        say(f"{out} held another run: it is now {files.move_aside(out)}")
        if could_go_on:
            say("(train.py --list shows all runs; --resume auto would have gone on with it)")
    elif found is not None:
        copies = []
        if any(checkpoint.step_of(path) > state.step for path in checkpoint.steps(out)):
            copies = files.copy_rows(out)  # first: a kill between the two loses none
        moved = checkpoint.archive_later(out, state.step)
        if moved:
            say(f"going on from {found}: later checkpoints are now {', '.join(moved)}")
        if copies:
            say(f"(all rows until now are also in {', '.join(copies)})")


def find_checkpoint(cfg, world, out):
    """Return the path of the checkpoint that --resume asks for, or None to start at step 0.

    The path is the same on all ranks, and every rank verifies its share of the checksums. A damaged
    checkpoint is named, and with --resume auto the one before it is tried. Collective over the world.
    """
    if cfg.resume == "none":
        return None
    paths = None
    with world.everyone.input():
        if world.rank == 0 and cfg.resume == "auto":
            paths = checkpoint.steps(out)
        elif world.rank == 0:
            meant = difflib.get_close_matches(cfg.resume, ("auto", "none"), 1)
            if meant and not Path(cfg.resume).exists():
                raise ValueError(f"--resume {cfg.resume} is no checkpoint; perhaps --resume {meant[0]} is "
                                 "meant")
            paths = [Path(cfg.resume)]
            checkpoint.read_index(cfg.resume)  # a path that does not exist: say so before all wait for it
        if world.rank == 0 and not paths:
            say(f"--resume auto: {out} has no checkpoint, so the run starts at step 1")
    names = world.everyone.broadcast([str(path) for path in paths or ()])  # a few, over the world
    paths = [Path(name) for name in names]
    found = damage = None
    for path in paths:
        try:
            check_together(world.everyone, path)
            found = path
            break
        except ValueError as e:
            damage = str(e)
        if world.rank == 0 and path != paths[-1]:
            files.warn(f"{damage}; trying the one before it")
    with world.everyone.input():
        if paths and found is None:
            if cfg.resume == "auto":
                damage += f"; no other in {out} is sound, --resume none starts a new run"
            raise ValueError(damage)
    return found


def start_from(found, skip, model, opt, data_id):
    """Go on from the checkpoint `found`, or start with equal replicas. Return (State, skip.Ranges).

    found: None at step 0; with --init-from the run then starts from another run's weights. They are not read
    again when it goes on, so a job script can give both --init-from and --resume auto.
    skip: the Ranges of the flags; those of the checkpoint are added.
    Collective; ValueError: the checkpoint does not fit.
    """
    cfg = model.cfg
    is_main = model.mesh.world.rank == 0
    if found is None:
        if cfg.lora and not cfg.init_from:
            raise ValueError(f"--lora {cfg.lora} fine-tunes a model that is there: give --init-from RUN, a "
                             "run or what convert.py import wrote")
        broadcast_and_verify(model)
        opt.masters_from_model()
        if cfg.init_from:
            said = init_from(model, opt, cfg.init_from)
            if is_main:
                say(said)
        state = State(data=data_id, vocab_size=model.vocab_size, base=model.base)
    else:
        state = load(cfg, opt.data_parallel, opt, found, data_id, model.vocab_size)
        if cfg.lora:
            base_weights.load_base(model, state.base, cfg.init_from)
            state.base = model.base
        warning = skip.too_late(state.step, Ranges(state.skip))
        if is_main:
            if cfg.init_from and not cfg.lora:
                say(f"goes on from {found}: --init-from {cfg.init_from} is for a start")
            if cfg.dump_grads:
                say(f"goes on from {found}: --dump-grads {cfg.dump_grads} is for a start, so it is not "
                    "written")
            for name, (before, now) in state.changed.items():
                say(f"resume: {name.replace('_', '-')} {before} -> {now}")
            if warning:
                complain(warning)
        skip = Ranges([*skip.ends(), *state.skip])  # a resume inside a range goes on skipping it
    state.skip = skip.ends()
    return state, skip


@torch.no_grad()
def broadcast_and_verify(model):
    """Make replicas start equal: the first holder of a tensor sends it, then each rank checks its own."""
    for name, tensor, axis in weights_at_rest(model):
        if axis.size == 1:
            continue
        axis.broadcast(tensor)  # one tensor, first replica to all, over the ranks that hold it
        mine = checksum(tensor).view(1, 2)
        for rank, theirs in zip(axis.ranks, axis.all_gather(mine), strict=True):  # two int64, over the axis
            assert torch.equal(theirs, mine[0]), f"{name} on rank {rank} differs after the broadcast"


def weights_at_rest(model):
    """Yield (name, tensor, Axis of the ranks that hold the same): parameters, or the slices of ZeRO-3."""
    for name, p in model.named_parameters():
        if p.untyped_storage().nbytes() > 0:
            yield name, p.data, getattr(model.mesh, p.reduction_axis)
    for bucket in model.data_parallel.buckets:
        if bucket.flat.untyped_storage().nbytes() == 0:
            yield f"the slice with {bucket.names[0]}", bucket.own, bucket.replicas


# -----------------------------------------------------------------------------
# --init-from

def init_from(model, opt, path):
    """For --init-from: load the weights of a checkpoint, or of a run's newest one, and nothing else.

    Rows of symbols that the checkpoint lacks keep their random start. From a dense model, every expert gets
    the MLP, and routers keep their random start (sparse upcycling, arXiv:2212.05055).
    Return one line that says so. Collective; ValueError: the checkpoint does not fit.
    """
    world = model.mesh.world
    found = newest_under(world, path)
    try:
        return start_from_weights(model, opt, found)
    except ValueError:  # on all ranks
        # A run that goes on may have removed it (--keep): then the newest one of this time is taken.
        newer = newest_under(world, path)
        if newer == found or world.everyone.broadcast(Path(found).exists()):
            raise
        return start_from_weights(model, opt, newer)


def start_from_weights(model, opt, path):
    """Load the weights of the checkpoint at path for init_from(), and return its line."""
    world = model.mesh.world
    cfg = model.cfg
    check_together(world.everyone, path)
    index = sent_index(world.everyone, path)
    shape = index["meta"].get("shape")
    if not shape:
        raise ValueError(f"--init-from {path} holds no weights of a run; give its --out directory or step_N")
    upcycles = cfg.n_experts > 0 and not shape["n_experts"]
    check_source(cfg, path, shape, upcycles)
    symbols = count_symbols(model, path, index)
    if cfg.lora:
        said = base_weights.start(model, opt, path, index)
        return "; ".join([said, *changed_meanings(cfg, index["meta"].get("flags", {}), upcycles)])
    # The checkpoint's moments are not read. A router's bias is not a weight: its rate may differ here.
    unused = [name for name in index["tensors"] if "/" in name or name.endswith(".router.bias")]
    load_tensors(world, path, index, weights_to_read(opt, symbols, upcycles), unused)
    opt.masters_to_model()
    said = f"starts from the weights of {path}, with a fresh optimizer"
    if upcycles:
        matrices = sum(p.expert for p in model.parameters())
        said = (f"upcycled {path}: each of {cfg.n_experts} experts starts as that model's MLP ({matrices} "
                "expert matrices on this rank), routers start fresh")
    notes = [said]
    if model.vocab_size > symbols:
        notes.append(f"{model.vocab_size - symbols} symbols are new")
    return "; ".join(notes + changed_meanings(cfg, index["meta"].get("flags", {}), upcycles))


def check_source(cfg, path, shape, upcycles):
    """Raise ValueError unless a model of this shape can be the start of cfg's.

    upcycles: whether that model is dense and cfg's has experts.
    """
    if upcycles and shape["bias"]:
        raise ValueError(f"--init-from {path} is a dense model with biases, and experts have none to take "
                         "them; give a model without bias, or train without --n-experts")
    refuse_unknown(path, unknown_flags(shape))
    may_differ = flexible_shapes(shape)
    if cfg.lora and not shape.get("lora"):
        may_differ.append("lora")
    if upcycles:
        may_differ += ["n_experts", "n_shared_experts"]
    check_shape(cfg, path, shape, may_differ)


def count_symbols(model, path, index):
    """Return how many symbols the vocabulary of a checkpoint has. ValueError: this model has fewer."""
    symbols = index["meta"].get("vocab_size")
    if not symbols:  # an older checkpoint: it says no more than the rows, padding included
        symbols = min(index["tensors"]["wte.weight"]["shape"][0], model.vocab_size)
    # The last symbol of a masked language model is [MASK], so no new symbols can follow.
    is_cut = model.cfg.objective == "mlm" and symbols < model.vocab_size
    if symbols > model.vocab_size or is_cut:
        raise ValueError(f"--init-from {path} has a vocabulary of {symbols}, the data {model.vocab_size}; "
                         f"prepare the data with that run's tokenizer, or give --vocab-size {symbols}")
    if model.cfg.lora and symbols < model.vocab_size:
        raise ValueError(f"--init-from {path} has a vocabulary of {symbols}, the data {model.vocab_size}, "
                         "and --lora trains no embedding; first give the base the new symbols, by a run "
                         "without --lora, with --steps 1 --lr 0")
    return symbols


def weights_to_read(opt, symbols, upcycles):
    """Return this rank's rectangles of another run's weights, for checkpoint.load.

    symbols: the number in that run's vocabulary. upcycles: whether that run is dense and this model has
    experts.
    """
    requested = []
    for name, own, full, where in own_pieces(opt.data_parallel, opt, {"": opt.masters}, owned_only=False):
        if name in VOCABULARY:
            rows = own[:max(0, symbols - where[0])]
            requested.append((name, rows, (pad_vocab(symbols), *full[1:]), where))
        elif not upcycles or ".moe." not in name:
            requested.append((name, own, full, where))
        elif len(full) == 3:  # (E, rows, columns) of w1, w2 or w3: a rectangle of one or several experts
            dense = name.replace(".moe.", ".mlp.") + ".weight"
            for part in own:
                requested.append((dense, part, full[1:], where[1:]))
    return requested


def changed_meanings(cfg, before, upcycles):
    """Return "flag there -> here" for the flags that make the same weights compute something else now.

    before: the flags of the run that wrote the weights. A flag of experts says nothing about a dense model.
    """
    source = dataclasses.replace(cfg, n_experts=0, capacity_factor=0.0) if upcycles else cfg
    said = []
    for name in flags_of_kind("meaning"):
        if name == "vocab_size" or name not in before or not has_effect(name, source):
            continue
        was = before[name]
        if isinstance(was, list):  # of several numbers, in JSON
            was = tuple(was)
        if was != getattr(cfg, name):
            said.append(f"{name.replace('_', '-')} {one_line(was)} -> {getattr(cfg, name)}")
    return said

"""Where the run is, and which part of it this rank saves and loads.

The optimizer's slices are runs of flat buckets; here they become rectangles of globally named tensors, which
is all that checkpoint.py knows. Loading fills the same views in place, whatever layout wrote them.
"""
import dataclasses
import math
import os
import secrets
import shutil
import sys
import zlib
from pathlib import Path

import torch

import checkpoint
from model import padded
from runtime.launch import agreed
from runtime.saver import Saver


def pieces(dp, opt, vectors=None, owned=True):
    """[(name, view, full shape, offset)] of this rank's weights and Adam moments, or of the given {prefix:
    per-bucket slices}. owned: only what this rank answers for: all ranks together hold each element once."""
    if vectors is None:
        state = [opt.adam.state[m] for m in opt.masters]
        vectors = {"": opt.masters, **{f"{k}/": [s[k] for s in state] for k in ("exp_avg", "exp_avg_sq")}}
    out = []
    for prefix, slices in vectors.items():
        for b, own in zip(dp.buckets, slices, strict=True):
            for name, p, start in zip(b.names, b.params, b.starts, strict=True):
                if owned and b.shards == 1 and zlib.crc32(name.encode()) % b.axis.size != b.axis.rank:
                    continue  # replicated: the name says which replica writes it
                low, high = max(start, b.mine.start), min(start + p.numel(), b.mine.stop)
                for offset, size in checkpoint.rectangles(p.shape, low - start, high - start):
                    n = math.prod(size)
                    where = tuple(o + q for o, q in zip(offset, p.offset, strict=True))
                    out.append((prefix + name, own[low - b.mine.start:][:n].view(size), p.full_shape, where))
                    low += n
    if "" in vectors and vectors[""] is opt.masters:  # what is not trained but steers: the routers' bias
        for name, t in dp.buffers.items():
            if not owned or zlib.crc32(name.encode()) % dp.stage.size == dp.stage.rank:
                out.append((name, t, tuple(t.shape), (0,) * t.ndim))
    return out


def dump(path, mesh, dp, opt, vocab_size):
    """--dump-grads: NAME the weight before the update, grad/NAME the summed, unclipped gradient; unpadded."""
    vectors = {"": opt.masters, "grad/": [opt.unscaled(g.to(m.dtype)) for m, g in
                                          zip(opt.masters, opt.grads, strict=True)]}
    aside, rank, ranks = Path(path).with_suffix(".parts"), mesh.world.rank, mesh.world.size
    token = mesh.world.broadcast_object(new_token())  # a short word from rank 0, over the world
    done = checkpoint.save(aside, 1, rank, ranks, pieces(dp, opt, vectors), {}, token=token)
    if mesh.world.rank == 0:
        from safetensors.torch import save_file
        whole = checkpoint.full_tensors(done)
        for name, t in whole.items():
            if name.split("/")[-1] in ("wte.weight", "head.weight") and t.size(0) == padded(vocab_size):
                whole[name] = t[:vocab_size].contiguous()
        save_file(whole, path)
        shutil.rmtree(aside)


@dataclasses.dataclass
class State:
    """Where the run is. Data order, learning rate and randomness are functions of these and the flags."""
    step: int = 0       # completed steps, skipped ones included
    samples: int = 0    # sequences consumed
    skipped: int = 0    # steps skipped on request, and spikes
    nan_steps: int = 0  # steps not taken because a gradient was not finite
    data: str = ""      # which token files
    skip: list = dataclasses.field(default_factory=list)  # ends of the ranges to skip
    # [(loss, gradient norm)] of the last accepted steps
    window: list = dataclasses.field(default_factory=list)
    streak: int = 0     # steps in a row not taken: spikes and non-finite ones


SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "seq_len", "norm", "mlp", "pos", "bias",
         "tied", "n_experts", "n_shared_experts")


def save(cfg, mesh, dp, opt, saver, state):
    """Begin to write step_N/, each rank its part; saver.wait() says whether it was committed."""
    meta = {**dataclasses.asdict(state), "seed": cfg.seed, "adam_t": int(opt.adam_t()),
            "scaler": opt.scaler(), "world": mesh.world.size, "shape": {k: getattr(cfg, k) for k in SHAPE}}
    opt.saving = saver.start(state.step, pieces(dp, opt), meta)


def same_shape(cfg, path, shape, free=()):
    """ValueError, with the flag to give, where the checkpoint's model is another. free: flags that may
    differ."""
    for key, there in shape.items():
        if there != getattr(cfg, key) and key not in free:
            flag = key.replace("_", "-")
            raise ValueError(f"checkpoint {path} has {flag} {there}, the flags say {getattr(cfg, key)}; "
                             f"give --{flag} {there}")


def load(cfg, dp, opt, path, data_id):
    """Fill weights, moments, counters from a checkpoint -> State. ValueError: another model's or data's."""
    index = checkpoint.read_index(path)
    meta = index["meta"]
    if "shape" not in meta:
        raise ValueError(f"checkpoint {path} holds no state of a run; give a step_N of an --out directory")
    same_shape(cfg, path, meta["shape"])
    if meta["data"] != data_id:
        raise ValueError(f"checkpoint {path} was trained on other data ({meta['data']}) than --data holds "
                         f"({data_id}); give its --data, or start a new --out")
    checkpoint.load(path, pieces(dp, opt, owned=False), index)
    opt.set_adam_t(meta["adam_t"])
    opt.set_scaler(meta["scaler"])
    opt.publish()
    return State(**{f.name: meta[f.name] for f in dataclasses.fields(State) if f.name in meta})


# -----------------------------------------------------------------------------
# which checkpoint to go on from, and who writes the next

def new_token():
    return secrets.token_hex(4)  # from the system: the run's own generators must not notice


def find_resume(cfg, world, out):
    """-> (the checkpoint to go on from or None, a Saver), one choice on all ranks; they share the checksums.
    A damaged one is named and the one before it used; a fresh start moves an older run's directory aside."""
    candidates = []
    with agreed(world):
        if world.rank == 0:
            checkpoint.clean(out)
            if cfg.resume == "none" and ((out / "metrics.jsonl").exists() or checkpoint.steps(out)):
                names = (out.with_name(f"{out.name}.{i}") for i in range(1, 10**6))
                aside = next(p for p in names if not p.exists())
                os.rename(out, aside)
                print(f"{out} held another run: it is now {aside} (--resume auto goes on)", flush=True)
            candidates = {"none": [], "auto": checkpoint.steps(out)}.get(cfg.resume, [Path(cfg.resume)])
            if cfg.resume not in ("none", "auto"):
                checkpoint.read_index(cfg.resume)  # no such directory: said before all wait for it
    # a few paths and a word from rank 0, over the world
    candidates, token = world.axis.broadcast_object((candidates, new_token()))
    found = None
    for path in candidates:
        faults = world.axis.gather_objects(checkpoint.fault(path, world.rank, world.size))
        fault = next((f for f in faults if f), None)  # one short string per rank, over the world
        if fault is None:
            found = path
            break
        if world.rank == 0 and path != candidates[-1]:
            print(f"nanoshard: {fault}; trying the one before it", file=sys.stderr, flush=True)
    with agreed(world):
        if candidates and found is None:
            rest = f"; no other in {out} is sound, --resume none starts anew" if cfg.resume == "auto" else ""
            raise ValueError(fault + rest)
        if world.rank == 0 and found is not None:
            moved = checkpoint.set_aside(out, checkpoint.read_index(found)["step"])
            if moved:
                print(f"going on from {found}: later checkpoints are now {', '.join(moved)}", flush=True)
    return found, Saver(out, world.rank, world.size, cfg.keep, cfg.timeout, token, world.axis.any)


def upcycle(model, opt, path):
    """--init-from: a dense checkpoint's weights; its MLP goes into every expert, the router stays fresh
    (sparse upcycling, arXiv:2212.05055). -> one line that says so. ValueError when the shapes differ."""
    world = model.mesh.world
    index = checkpoint.check(path, world.rank, world.size)  # each rank a share of the checksums
    shape, cfg = index["meta"].get("shape"), model.cfg
    if not shape or shape["n_experts"] or shape["bias"]:
        raise ValueError(f"--init-from {path} is not a run of a dense model without bias: n-experts must be "
                         "0 there, and experts have no biases to take theirs")
    same_shape(cfg, path, shape, ("n_experts", "n_shared_experts", *["seq_len"] * (cfg.pos == "rope")))
    wanted, copied, buckets = [], 0, list(zip(opt.masters, opt.dp.buckets, strict=True))
    wide = [b.flat.to(m.dtype) for m, b in buckets]  # the model in the masters' precision
    for w, (m, b) in zip(wide, buckets, strict=True):
        w[b.mine].copy_(m)
        for name, p, start in zip(b.names, b.params, b.starts, strict=True):
            own = w[start:start + p.numel()].view_as(p)
            if p.expert:
                dense = name.replace(".moe.", ".mlp.") + ".weight"
                wanted += [(dense, own[i], p.full_shape[1:], (0, 0)) for i in range(p.size(0))]
                copied += 1
            elif ".moe." not in name:
                wanted.append((name, own, p.full_shape, p.offset))
    checkpoint.load(path, wanted, index)
    with torch.no_grad():
        for w, (m, b) in zip(wide, buckets, strict=True):
            b.flat.copy_(w), m.copy_(w[b.mine])
    return (f"upcycled {path}: each of {cfg.n_experts} experts starts as that model's MLP "
            f"({copied} expert matrices on this rank), routers start fresh")

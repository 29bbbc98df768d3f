"""Where the run is, and which part of it this rank saves and loads.

The optimizer's slices are runs of flat buckets; here they become rectangles of globally named tensors, which is all that
checkpoint.py knows. Loading fills the same views in place, whatever layout wrote them.
"""
import dataclasses
import math
import shutil
import zlib
from pathlib import Path

import torch.distributed as dist

import checkpoint
from model import padded
from skip import Ranges

def pieces(dp, opt, vectors=None, owned=True):
    """[(name, view, full shape, offset)] of this rank's weights and Adam moments, or of the given {prefix: per-bucket
    slices}. owned: only what this rank answers for, so that all ranks together hold each element once."""
    if vectors is None:
        state = [opt.adam.state[m] for m in opt.masters]
        vectors = {"": opt.masters, "exp_avg/": [s["exp_avg"] for s in state], "exp_avg_sq/": [s["exp_avg_sq"] for s in state]}
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
    """--dump-grads: NAME is the weight before the update, grad/NAME the reduced, unclipped gradient; whole, unpadded."""
    vectors = {"": opt.masters, "grad/": [opt.unscaled(m.grad) for m in opt.masters]}
    aside = Path(path).with_suffix(".parts")
    done = checkpoint.save(aside, 1, mesh.world.rank, mesh.world.size, pieces(dp, opt, vectors), {})
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
    skipped: int = 0    # steps skipped on request
    nan_steps: int = 0  # steps not taken because a gradient was not finite
    data: str = ""      # which token files
    skip: list = dataclasses.field(default_factory=list)  # ends of the ranges to skip


SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "seq_len", "norm", "mlp", "pos", "bias", "tied",
         "n_experts", "n_shared_experts")


def save(cfg, mesh, dp, opt, out, state):
    """Every rank writes its part of step_N/; returns when it is committed."""
    meta = {**dataclasses.asdict(state), "seed": cfg.seed, "adam_t": int(opt.adam_t()), "scaler": opt.scaler(),
            "world": mesh.world.size, "shape": {k: getattr(cfg, k) for k in SHAPE}}
    checkpoint.save(out, state.step, mesh.world.rank, mesh.world.size, pieces(dp, opt), meta, cfg.keep)
    if mesh.world.size > 1:
        dist.barrier()  # nobody trains on before the commit


def load(cfg, dp, opt, path, data_id):
    """Fill weights, moments and counters from a checkpoint -> State. ValueError when it is another model's or data's."""
    index = checkpoint.read_index(path)
    meta = index["meta"]
    for key, there in meta["shape"].items():
        if there != getattr(cfg, key):
            flag = key.replace("_", "-")
            raise ValueError(f"checkpoint {path} has {flag} {there}, the flags say {getattr(cfg, key)}; "
                             f"give --{flag} {there}")
    if meta["data"] != data_id:
        raise ValueError(f"checkpoint {path} was trained on other data ({meta['data']}) than --data holds ({data_id}); "
                         "give its --data, or start a new --out")
    checkpoint.load(path, pieces(dp, opt, owned=False), index)
    opt.set_adam_t(meta["adam_t"])
    opt.set_scaler(meta["scaler"])
    opt.publish()
    return State(**{f.name: meta[f.name] for f in dataclasses.fields(State)})


def upcycle(model, opt, path):
    """--init-from: a dense checkpoint's weights; its MLP goes into every expert, router and shared experts stay fresh
    (sparse upcycling, arXiv:2212.05055). -> one line that says so. ValueError when the shapes differ."""
    index = checkpoint.read_index(path)
    wanted, copied = [], 0
    for name, p in model.named_parameters():
        if p.expert:
            dense = name.replace(".moe.", ".mlp.") + ".weight"
            wanted += [(dense, p.data[i], p.full_shape[1:], (0, 0)) for i in range(p.size(0))]
            copied += 1
        elif ".moe." not in name:
            wanted.append((name, p.data, p.full_shape, p.offset))
    checkpoint.load(path, wanted, index)
    opt.reload()
    return (f"upcycled {path}: each of {model.cfg.n_experts} experts starts as that model's MLP "
            f"({copied} expert matrices on this rank), routers start fresh")

"""Checkpoints of --lora: they hold the adapters alone, and name the checkpoint whose weights are frozen."""
import dataclasses
import hashlib
import json
from pathlib import Path

import checkpoint
from config import Config


def reference(path, index):
    """Return what a checkpoint of adapters says of its base: its path, and a hash of what it holds."""
    content = json.dumps([index["tensors"], index["files"]], sort_keys=True).encode()
    return {"path": str(Path(path).resolve()), "hash": hashlib.blake2b(content, digest_size=16).hexdigest()}


def base_path(base, moved_to=""):
    """Return where the base of this reference() is: there, or in moved_to, a checkpoint or a run.
    FileNotFoundError, with the fix: nowhere."""
    path = Path(base["path"])
    places = [path]
    if moved_to:
        places += [*checkpoint.steps(moved_to), Path(moved_to)]
    for place in places:
        is_there = (place / "index.json").exists()
        if is_there and reference(place, checkpoint.read_index(place))["hash"] == base["hash"]:
            return place
    raise FileNotFoundError(f"the base of these adapters, {path}, is not there, or has other weights; put it "
                            "back, or a link to where it is, or tell train.py that with --init-from")


def check_import(given, step):
    """Return the index of the checkpoint `step` of the run or checkpoint `given`, as a base of adapters."""
    newest = checkpoint.latest(given)
    if step != newest:
        raise ValueError(f"--base {given} has {step.name}, of the lowest validation loss, and {newest.name}, "
                         f"the newest; say to which of them the adapters belong, such as --base {newest}")
    index = checkpoint.check(step)
    if index["meta"]["shape"].get("lora"):
        raise ValueError(f"--base {step} holds adapters itself; give {index['meta']['base']['path']}")
    return index


def adapter_names(name):
    """Return the names of A and B of a matrix, such as blocks.0.attn.wq.weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora.A", f"{layer}.lora.B"


class Merged(checkpoint.Reader):
    """A Reader of W + scale B A. own: a Reader of A and B, of a run with --lora and the flags cfg."""

    def __init__(self, own, base, cfg):
        weights = {name: entry for name, entry in base.index["tensors"].items() if "/" not in name}
        super().__init__(own.path, {**own.index, "tensors": weights})
        self.own = own
        self.base = base
        self.cfg = cfg
        self.scale = cfg.lora_alpha / cfg.lora

    def fill(self, name, out, full, offset):
        import torch
        a_name, b_name = adapter_names(name)
        if a_name not in self.own.index["tensors"] or not out.numel():
            self.base.fill(name, out, full, offset)
            return
        # The sum is rounded once, to the dtype of out.
        dtype = torch.promote_types(out.dtype, torch.float32)
        merged = torch.empty(out.shape, dtype=dtype)
        self.base.fill(name, merged, full, offset)
        rows, columns = (slice(at, at + n) for at, n in zip(offset, out.shape, strict=True))
        a = self.own.whole(a_name).to(dtype)[:, columns]
        b = self.own.whole(b_name).to(dtype)[rows]
        out.copy_(merged.addmm_(b, a, alpha=self.scale))


def open_merged(cfg, own):
    """Return (Config, Reader) of the whole model whose adapters `own`, a Reader, holds. cfg: of the run."""
    path = base_path(own.index["meta"]["base"])
    merged = Merged(own, checkpoint.Reader(path, checkpoint.check(path)), cfg)
    return dataclasses.replace(cfg, lora=0, lora_alpha=Config.lora_alpha), merged

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
    """Return where a checkpoint of the content of the base is. FileNotFoundError, with the fix: nowhere.

    base: its reference(). It may be in a run that train.py has renamed, RUN.DATE_stepN, because another one
    began; or it is moved_to, or a checkpoint of the run moved_to.
    """
    path = Path(base["path"])
    run = path.parent
    places = [path, *run.parent.glob(f"{run.name}.*/{path.name}")]
    if moved_to:
        places += [*checkpoint.steps(moved_to), Path(moved_to)]
    for place in [place for place in places if (place / "index.json").exists()]:
        if reference(place, checkpoint.read_index(place))["hash"] == base["hash"]:
            return place
    raise FileNotFoundError(f"the base of these adapters, {path}, is not there, or has other weights; put it "
                            "back, or a link to where it is, or tell train.py that with --init-from")


def check_import(given, step):
    """Return the index of the checkpoint `step` of the run or checkpoint `given`, as a base of adapters.

    ValueError: it holds adapters itself, or training would have started from another one, the newest.
    """
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
    """A Reader of W + scale B A, where `own`, a Reader, holds A and B, and of the base's other tensors.

    cfg: of the run with --lora.
    """

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
        rank = self.own.index["tensors"][a_name]["shape"][0]
        a_columns = torch.empty((rank, out.shape[1]), dtype=dtype)
        b_rows = torch.empty((out.shape[0], rank), dtype=dtype)
        self.own.fill(a_name, a_columns, (rank, full[1]), (0, offset[1]))
        self.own.fill(b_name, b_rows, (full[0], rank), (offset[0], 0))
        merged.addmm_(b_rows, a_columns, alpha=self.scale)
        out.copy_(merged)


def open_merged(cfg, own):
    """Return (Config, Reader) of the whole model whose adapters `own`, a Reader, holds. cfg: of the run."""
    path = base_path(own.index["meta"]["base"])
    merged = Merged(own, checkpoint.Reader(path, checkpoint.check(path)), cfg)
    return dataclasses.replace(cfg, lora=0, lora_alpha=Config.lora_alpha), merged

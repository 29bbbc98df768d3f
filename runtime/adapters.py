"""Checkpoints of --lora: they hold the adapters alone, and name the checkpoint whose weights are frozen.

    reference, check_base   which checkpoint the base is: its path, and a hash of its content
    open_merged             such a checkpoint, read as if it held a whole model
"""
import dataclasses
import glob
import hashlib
import json
from pathlib import Path

import checkpoint
from config import Config


def content_hash(index):
    """Return a hash of what a checkpoint holds: of its tensors' places and its files' checksums."""
    content = json.dumps([index["tensors"], index["files"]], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def reference(path, index):
    """Return what a checkpoint of adapters says of its base, the checkpoint at path."""
    return {"path": str(Path(path).resolve()), "hash": content_hash(index)}


def check_base(path, index, base):
    """Raise ValueError unless the checkpoint at path is the base that the adapters were trained on.

    base: the reference() of that one.
    """
    if content_hash(index) != base["hash"]:
        was = "had there" if str(path) == base["path"] else f"had in {base['path']}"
        raise ValueError(f"{path} has other weights than the base of these adapters {was}; give the same "
                         "weights: train.py with --init-from, or put the base, or a link to it, back there")


def is_base(path, base):
    """Whether there is a checkpoint at path whose content is that of the base. base: its reference()."""
    try:
        return content_hash(checkpoint.read_index(path)) == base["hash"]
    except (OSError, ValueError):
        return False


def check_import(given, step):
    """Return the index of the checkpoint `step`, to which adapters from elsewhere shall belong.

    given: that checkpoint, or the run of which it has the lowest validation loss. ValueError: it holds
    adapters itself, or training would have started from another checkpoint of the run, its newest.
    """
    newest = step if Path(given) == step else checkpoint.newest(Path(given))
    if step != newest:
        raise ValueError(f"--base {given} has {step.name}, of the lowest validation loss, and {newest.name}, "
                         f"the newest; say to which of them the adapters belong, such as --base {newest}")
    index = checkpoint.check(step)
    if index["meta"]["shape"].get("lora"):
        raise ValueError(f"--base {step} holds adapters itself, on top of {index['meta']['base']['path']}; "
                         "give that, or another whole model")
    return index


def base_path(base, moved_to=""):
    """Return where the base is. FileNotFoundError, with the fix: it is not there.

    moved_to: a checkpoint, or a run, in which it is looked for first. Of its checkpoints it is the one with
    the same content. If there is none, there and in the old place, check_base() will refuse the newest.
    Without moved_to it may be in a run that train.py has renamed, RUN.DATE_stepN, because another one began.
    """
    if not base:
        raise ValueError("these adapters do not say on which weights they were trained; start anew with "
                         "--resume none")
    path = Path(base["path"])
    if moved_to:
        inside = checkpoint.steps(moved_to) or [Path(moved_to)]
        same = [found for found in (*inside, path) if is_base(found, base)]
        return same[0] if same else inside[0]
    if not is_base(path, base):
        run = path.parent
        for renamed in sorted(run.parent.glob(f"{glob.escape(run.name)}.*")):
            if is_base(renamed / path.name, base):
                return renamed / path.name
    if not (path / "index.json").is_file():
        raise FileNotFoundError(f"the base of these adapters, {path}, is not there; put it back, or a link "
                                "to where it is now, or tell train.py that with --init-from")
    return path


# -----------------------------------------------------------------------------
# Adapters and their base, read as one model

def adapter_names(name):
    """Return the names of A and B of a matrix, such as blocks.0.attn.wq.weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora.A", f"{layer}.lora.B"


class Merged(checkpoint.Reader):
    """A Reader of W + scale B A, where `own` holds A and B, and of the base's other tensors.

    own, base: Readers. own.index["meta"] says which step this is. cfg: of the run with --lora.
    """

    def __init__(self, own, base, cfg):
        weights = {name: entry for name, entry in base.index["tensors"].items() if "/" not in name}
        super().__init__(own.path, {**own.index, "tensors": weights})
        self.own = own
        self.base = base
        self.cfg = cfg
        self.scale = cfg.lora_alpha / cfg.lora

    def open_all(self):
        self.own.open_all()
        self.base.open_all()
        return self

    def fill(self, name, out, full, offset):
        """Copy into out the rectangle of its shape at offset of tensor `name`, whose full shape is `full`."""
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
    """Return (Config, Reader) of the whole model whose adapters a checkpoint of --lora holds.

    cfg: of the run. own: a Reader of the checkpoint. ValueError, OSError: it has no base, or another.
    """
    base = own.index["meta"].get("base")
    path = base_path(base)
    index = checkpoint.check(path)
    check_base(path, index, base)
    merged = Merged(own, checkpoint.Reader(path, index), cfg)
    return dataclasses.replace(cfg, lora=0, lora_alpha=Config.lora_alpha), merged.open_all()

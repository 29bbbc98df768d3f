"""What a run with --lora starts from: the base's weights, which stay as they are, and adapters.

runtime/adapters.py says how a checkpoint of adapters names its base.
"""
from pathlib import Path

from ddp import frozen_parameters
from interface.terminal import say
from runtime.adapters import base_path, check_base, reference
from runtime.agree import read_by_first
from runtime.pieces import bucket_pieces, own_pieces
from runtime.read_checkpoint import check_together, load_tensors, sent_index


def start(model, opt, path, index):
    """Start from the checkpoint at path: it is the base, or it holds adapters and names their base.

    Return a line that says which. Collective; ValueError: the base is not there, or is another.
    """
    if not index["meta"]["shape"].get("lora"):
        load_base(model, reference(path, index))
        return f"adapters start on top of {path}, which stays as it is"
    unused = [name for name in index["tensors"] if "/" in name]
    pieces = own_pieces(opt.data_parallel, opt, {"": opt.masters}, owned_only=False)
    load_tensors(model.mesh.world, path, index, pieces, unused)
    opt.masters_to_model()
    load_base(model, index["meta"]["base"])
    return f"starts from the adapters of {path}, with a fresh optimizer, on top of {model.base['path']}"


def load_base(model, base, moved_to=""):
    """Fill the weights that --lora freezes. Collective; ValueError: the base is not there, or is another.

    base: its reference(). moved_to: --init-from, where the base is now if that is another place.
    """
    world = model.mesh.world
    path = Path(read_by_first(world.everyone, lambda: str(base_path(base, moved_to))))
    if moved_to and world.rank == 0 and not path.resolve().is_relative_to(Path(moved_to).resolve()):
        say(f"the base of these adapters is {path}: --init-from {moved_to} is for a start")
    check_together(world.everyone, path)
    index = sent_index(world.everyone, path)
    check_base(path, index, base)
    unused = [name for name in index["tensors"] if "/" in name]
    load_tensors(world, path, index, frozen_pieces(model), unused)
    model.base = reference(path, index)


def frozen_pieces(model):
    """Return [(name, weight, full shape, offset)] of this rank's share of what --lora leaves as it is."""
    pieces = []
    sliced = set()
    for bucket in model.data_parallel.frozen_buckets:
        pieces += bucket_pieces(bucket, bucket.own, "", owned_only=False)
        sliced.update(bucket.names)
    for name, p in frozen_parameters(model):
        if name not in sliced:
            pieces.append((name, p.data, p.full_shape, p.offset))
    return pieces

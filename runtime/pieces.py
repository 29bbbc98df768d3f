"""Where the elements of a rank's slices are in the full tensors: what it saves, and what it reads."""
import math
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

import checkpoint
from config import ceil_div


def rectangles(shape, begin, end):
    """Cut elements begin..end-1 of a row-major tensor into rectangles [(offset, size)], in order.

    ZeRO's slices are such runs of elements: they begin and end in the middle of rows. There are at
    most 2 ndim - 1 rectangles.
    """
    if begin >= end:
        return []
    if len(shape) == 0:
        return [((), ())]
    row = math.prod(shape[1:])  # elements
    first = ceil_div(begin, row)  # the first row that is whole
    last = end // row  # the row after the last that is whole
    if first > last:  # All elements are inside one row.
        return in_row(shape, last, begin, end)
    found = in_row(shape, first - 1, begin, first * row)
    if first < last:
        zeros = [0] * (len(shape) - 1)
        found.append(((first, *zeros), (last - first, *shape[1:])))
    return found + in_row(shape, last, last * row, end)


def in_row(shape, row, begin, end):
    start = row * math.prod(shape[1:])
    inner = rectangles(shape[1:], begin - start, end - start)
    return [((row, *offset), (1, *size)) for offset, size in inner]


class Piece(NamedTuple):
    """A rectangle of a full tensor, and a view of this rank's memory that holds it."""
    name: str
    view: torch.Tensor
    full_shape: tuple
    offset: tuple


def own_pieces(data_parallel, opt, vectors=None, owned_only=True):
    """Return this rank's Pieces of the weights and moments, or of the given vectors.

    vectors: {prefix of the names: a slice per bucket, or None where there is none}. The views share memory
    with the optimizer: filling them loads a checkpoint. owned_only leaves out what another rank saves.
    """
    if vectors is None:
        vectors = {"": opt.masters}
        for moment, slices in opt.moments().items():
            vectors[f"{moment}/"] = slices
    pieces = []
    for prefix, slices in vectors.items():
        for bucket, own in zip(data_parallel.buckets, slices, strict=True):
            if own is not None:
                pieces += bucket_pieces(bucket, own, prefix, owned_only)
    if vectors.get("") is opt.masters:  # The routers' biases are not trained, but they are saved.
        stage = data_parallel.mesh.stage
        for name, buffer in data_parallel.buffers.items():
            if not owned_only or chosen_rank(name, stage) == stage.rank:
                pieces.append(Piece(name, buffer, tuple(buffer.shape), (0,) * buffer.ndim))
    return pieces


def bucket_pieces(bucket, own, prefix, owned_only):
    """Return the Pieces of own, this rank's slice of a vector over a bucket's elements."""
    pieces = []
    for name, p, start in zip(bucket.names, bucket.params, bucket.starts, strict=True):
        if owned_only and chosen_rank(name, bucket.replicas) != bucket.replicas.rank:
            continue  # another replica saves it
        begin = max(start, bucket.own_slice.start)
        end = min(start + p.numel(), bucket.own_slice.stop)
        position = begin - bucket.own_slice.start
        for offset, size in rectangles(p.shape, begin - start, end - start):
            n = math.prod(size)
            view = own[position:position + n].view(size)
            offset = tuple(map(sum, zip(offset, p.offset, strict=True)))
            pieces.append(Piece(prefix + name, view, p.full_shape, offset))
            position += n
    return pieces


def chosen_rank(name, axis):
    """Return the rank of the axis that saves what all its ranks hold, by a hash of the name."""
    return zlib.crc32(name.encode()) % axis.size


# -----------------------------------------------------------------------------
# All ranks read a checkpoint

def damage(everyone, path):
    """Return what is wrong with a checkpoint, or None. Each file is verified by one rank. Collective."""
    is_there = everyone.any(everyone.rank == 0 and Path(path).exists())  # one bool, from rank 0 to all
    until = time.monotonic() + 30  # NFS shows a new folder late
    while is_there and not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.1)
    return everyone.first(checkpoint.damage(path, everyone.rank, everyone.size))  # a short text


def load_pieces(world, path, index, requested, unused=()):
    """Fill this rank's rectangles `requested` from a checkpoint. Collective over the world.

    unused: names of the checkpoint's tensors that no rank need ask for.
    ValueError: a tensor is missing or damaged, or no rank asks for it.
    """
    own = {name for name, *_ in requested} | set(unused)
    names = sorted(index["tensors"])
    asked = world.everyone.maximum([int(name in own) for name in names])  # a digit per tensor, over the world
    others = [name for name, is_asked in zip(names, asked, strict=True) if is_asked]
    checkpoint.load(path, requested, index, others)
    world.everyone.barrier()  # no rank goes on to a collective of the device if another could not read

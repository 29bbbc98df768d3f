"""Where the elements of a rank's slices are in the full tensors: what it saves, and what it reads."""
import collections
import math
import time
import zlib
from pathlib import Path

import numpy as np

import checkpoint
from interface.terminal import warn

# A rectangle of a full tensor; view: this rank's memory that holds it
Piece = collections.namedtuple("Piece", "name view full_shape offset")


def rectangles(shape, begin, end):
    """Cut elements begin..end-1 of a row-major tensor into rectangles [(offset, size)], in order.

    ZeRO's slices are such runs of elements: they begin and end in the middle of rows. There are at
    most 2 ndim - 1 rectangles.
    """
    found = []
    while begin < end:
        block = math.prod(shape)  # the largest block that begins here and ends in time
        offset = tuple(map(int, np.unravel_index(begin, shape)))
        size = shape
        for axis, length in enumerate(shape):
            block //= length
            count = min(length - offset[axis], (end - begin) // block)
            if begin % block == 0 and count > 0:
                size = (*[1] * axis, count, *shape[axis + 1:])
                break
        found.append((offset, size))
        begin += math.prod(size)
    return found


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
            if not owned_only or saves(name, stage):
                pieces.append(Piece(name, buffer, tuple(buffer.shape), (0,) * buffer.ndim))
    return pieces


def bucket_pieces(bucket, own, prefix, owned_only):
    """Return the Pieces of own, this rank's slice of a vector over a bucket's elements."""
    pieces = []
    mine = bucket.own_slice
    for name, p, start in zip(bucket.names, bucket.params, bucket.starts, strict=True):
        if owned_only and not saves(name, bucket.replicas):
            continue
        position = max(start, mine.start)
        for offset, size in rectangles(tuple(p.shape), position - start, min(p.numel(), mine.stop - start)):
            after = position + math.prod(size)
            view = own[position - mine.start:after - mine.start].view(size)
            where = tuple(a + b for a, b in zip(offset, p.offset, strict=True))
            pieces.append(Piece(prefix + name, view, p.full_shape, where))
            position = after
    return pieces


def saves(name, axis):
    """Whether this rank, of an axis whose ranks all hold the same, saves it: a hash of the name decides."""
    return zlib.crc32(name.encode()) % axis.size == axis.rank


# All ranks read a checkpoint

def first_sound(everyone, paths, hint=""):
    """Return the first sound checkpoint of the paths, or None if there are no paths. Each rank verifies some
    files. Collective; ValueError, which ends with the hint: all are damaged."""
    for path in paths:
        until = time.monotonic() + 30
        while not Path(path).exists() and time.monotonic() < until:
            time.sleep(0.1)  # rank 0 sees it, but NFS shows a new folder late
        wrong = everyone.first(checkpoint.damage(path, everyone.rank, everyone.size))  # a short text
        if wrong is None:
            return Path(path)
        if path == paths[-1]:
            raise ValueError(wrong + hint)
        if everyone.rank == 0:
            warn(f"{wrong}; trying the one before it")
    return None


def load_pieces(world, path, index, requested, unused=()):
    """Fill this rank's rectangles `requested` from a checkpoint. unused: tensors that no rank need ask for.
    Collective over the world. ValueError: a tensor is missing, or no rank asks for it."""
    reader = checkpoint.Reader(path, index)
    for piece in requested:
        reader.fill(*piece)
    own = {name for name, *_ in requested} | set(unused)
    names = sorted(index["tensors"])
    asked = world.everyone.maximum([int(name in own) for name in names])  # a digit per tensor, over the world
    if 0 in asked:
        raise ValueError(f"checkpoint {path} holds {names[asked.index(0)]}, for which this model has no "
                         "place; it needs the flags, and the code, of the run that wrote it")

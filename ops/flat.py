"""The flat buffers of ddp.py: gradients on their way in, and the rectangles of tensors in a slice.

    padded_elements             the length of a buffer that is cut into slices
    accumulate, copy_gradients  add or copy gradients into a buffer
    sum_slices                  the sum of several ranks' gradients, which fast/peer.py has copied
    sums_of_squares             of slices: for the norm of the gradient
    rectangles, own_pieces      where a slice's elements are in the full tensors: for checkpoints
"""
import math
import zlib
from typing import NamedTuple

import torch

from config import ceil_div
from ops import backend

COPY_ALONE = 2**22  # a gradient of at least this many elements has a copy kernel of its own
CONVERT_ALONE = 2**18  # a gradient of at least this many elements is converted by Triton
BLOCK = 2048  # elements whose squares a program of the Triton kernel sums at once
TIMES = 4  # how many times it does so
ALIGNMENT = 128  # each slice begins at a multiple of this, so that loads are aligned


def padded_elements(n, n_slices):
    """Return the length of a buffer for n elements that is cut into `n_slices` aligned slices."""
    if n_slices == 1:
        return n
    multiple = ALIGNMENT * n_slices
    return ceil_div(n, multiple) * multiple


# -----------------------------------------------------------------------------
# Gradients

def accumulate(total, grad, first):
    """Add grad, in the model's dtype, to total (fp32); if first, overwrite what is there."""
    converts = grad.dtype != total.dtype and grad.numel() >= CONVERT_ALONE and grad.is_contiguous()
    if backend.use_triton(grad) and converts:
        from ops import kernels  # torch's own conversion reaches a third of the bandwidth
        blocks = ceil_div(grad.numel(), 4096)
        kernels.accumulate[(blocks,)](grad, total, grad.numel(), ADD=not first, BLOCK=4096,
                                      num_warps=8)
    elif first:
        total.copy_(grad)
    else:
        total.add_(grad)


def copy_gradients(pairs):
    """Copy gradients into their windows of a flat buffer. pairs: [(window, gradient or None)].

    A gradient of None is zero. One kernel copies all small gradients; for a large one, a copy by
    itself is twice as fast.
    """
    small_windows = []
    small_grads = []
    for window, grad in pairs:
        if grad is None:
            window.zero_()
        elif grad.numel() >= COPY_ALONE:
            window.copy_(grad)
        else:
            small_windows.append(window)
            small_grads.append(grad)
    if small_grads:
        torch._foreach_copy_(small_windows, small_grads)


def sum_slices(total, own, others):
    """Set total (n,) fp32 to own (n,) plus each of others (ranks, n), both in the model's dtype."""
    if backend.use_triton(own) and own.dtype != total.dtype:
        from ops import kernels
        blocks = ceil_div(own.numel(), 2048)
        kernels.sum_slices[(blocks,)](own, others, total, own.numel(), RANKS=len(others),
                                      BLOCK=2048, num_warps=4)
        return
    total.copy_(own)
    for part in others:
        total.add_(part)


def sums_of_squares(slices):
    """Return the sum of squares of each slice, (k,) fp64, by Triton.

    Torch's norms read at half the bandwidth.
    """
    from ops import kernels
    parts = [ceil_div(piece.numel(), TIMES * BLOCK) for piece in slices]
    # Each slice has a row for the sums of its parts, in fp32. Rows begin at multiples of ALIGNMENT
    # elements, so Triton compiles one kernel for all of them.
    width = ceil_div(max(parts), ALIGNMENT) * ALIGNMENT
    sums = torch.zeros(len(slices), width, device=slices[0].device)
    for piece, row, n_parts in zip(slices, sums, parts, strict=True):
        if n_parts:
            kernels.sum_squares[(n_parts,)](piece, row, piece.numel(), TIMES=TIMES, BLOCK=BLOCK,
                                            num_warps=8)
    return sums.sum(1, dtype=torch.float64)


# -----------------------------------------------------------------------------
# Slices as rectangles of tensors

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
    """Return the rectangles of elements begin..end-1, all of which are in one row of the tensor."""
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

    vectors: {prefix of the names: a slice per bucket, or None where a bucket has none}. The views
    share memory with the optimizer: filling them loads a checkpoint. owned_only leaves out what
    another rank saves, so that over all ranks every element is there once.
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
    for name, p, start in zip(bucket.names, bucket.params, bucket.starts(), strict=True):
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

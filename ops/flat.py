"""The flat buffers of parallel.py: which parameters share one, gradients on their way into them, and which
rectangles of tensors a rank's slices are."""
import math
import zlib
from collections import Counter

import torch

from ops import backend

COPY_ALONE = 2**22  # elements from which a gradient is copied by a kernel of its own
BUCKET_ELEMENTS = 16_000_000  # a bucket is closed when it has this many


def assign_buckets(named_parameters, zero=0, bucket_elements=BUCKET_ELEMENTS):
    """-> [(axis name, decayed, names, parameters)] of each bucket, in the order in which backward fills them.
    Backward reaches the last layers first, so buckets are filled in reverse. Vectors (norms, biases) have
    buckets of their own: they are not decayed, and one bucket is one tensor of the optimizer. From ZeRO-2 on
    a bucket of matrices ends where a block does: their gradients come almost at once, and a second bucket
    would wait for its slot. ZeRO-3 gathers block by block: there it ends with every block."""
    full, filling, elements, block = [], {}, Counter(), ""  # filling: (axis name, decayed): names, parameters

    def close(key):
        full.append((*key, *filling.pop(key)))
        del elements[key]
    for name, p in reversed(list(named_parameters)):
        if zero > 1 and block != (block := ".".join(name.split(".")[:2])):
            for key in [k for k, n in elements.items() if k[1] and (zero == 3 or n >= bucket_elements)]:
                close(key)
        key = p.reduce, uses_weight_decay(p)
        names, params = filling.setdefault(key, ([], []))
        names.append(name)
        params.append(p)
        elements[key] += p.numel()
        if elements[key] >= bucket_elements and not (zero > 1 and key[1]):
            close(key)
    return full + [(*key, names, params) for key, (names, params) in filling.items()]


def uses_weight_decay(p):
    """Weight decay is for matrices only, never for norms, biases, vectors: by shape, not by class."""
    return p.ndim >= 2


def padded_elements(n, shards):
    """-> length of n elements cut into so many slices, which begin at multiples of 128: aligned loads."""
    return -(-n // (128 * shards)) * 128 * shards if shards > 1 else n


def accumulate(total, g, first):
    """total (fp32) = g of the model's dtype if first, else += g. A copy needs no zeroing before it."""
    if backend.use_triton(g) and g.dtype != total.dtype and g.numel() >= 2**18 and g.is_contiguous():
        from ops import kernels  # torch's own conversion reaches a third of the memory's speed
        kernels.accumulate[(-(-g.numel() // 4096),)](g, total, g.numel(), ADD=not first, BLOCK=4096,
                                                     num_warps=8)
    elif first:
        total.copy_(g)
    else:
        total.add_(g)


def copy_gradients(pairs):
    """pairs: [(window of the flat buffer, gradient or None)]; a gradient of None is zero. One kernel copies
    all small ones; a copy by itself is twice as fast for a large one."""
    small = [(out, g) for out, g in pairs if g is not None and g.numel() < COPY_ALONE]
    if small:
        torch._foreach_copy_(*zip(*small, strict=True))
    for out, g in pairs:
        if g is None:
            out.zero_()
        elif g.numel() >= COPY_ALONE:
            out.copy_(g)


def sum_shards(total, own, others):
    """total (n,) fp32 = own (n,) + each of others (ranks, n), both of the model's dtype."""
    if backend.use_triton(own) and own.dtype != total.dtype:
        from ops import kernels
        n = own.numel()
        kernels.sum_shards[(-(-n // 2048),)](own, others, total, n, RANKS=len(others), BLOCK=2048,
                                             num_warps=4)
        return
    total.copy_(own)
    for part in others:
        total.add_(part)


def rectangles(shape, a, b):
    """Cut elements a..b-1 of a row-major tensor into rectangles -> [(offset, size)], at most 2 ndim - 1, in
    the order of the elements. ZeRO's slices are such runs: they start and end in the middle of rows."""
    if a >= b:
        return []
    if len(shape) == 0:
        return [((), ())]
    row = math.prod(shape[1:])
    out = []
    first, last = -(-a // row), b // row  # whole rows
    if first > last:  # inside one row
        return [((last, *o), (1, *s)) for o, s in rectangles(shape[1:], a - last * row, b - last * row)]
    if a < first * row:
        out += [((first - 1, *o), (1, *s)) for o, s in rectangles(shape[1:], a - (first - 1) * row, row)]
    if first < last:
        out.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < b:
        out += [((last, *o), (1, *s)) for o, s in rectangles(shape[1:], 0, b - last * row)]
    return out


def shards(dp, opt, vectors=None, owned_only=True):
    """-> [(name, view, full shape, offset)]: this rank's rectangles of the weights and Adam moments, or of
    the given {prefix: a slice per bucket}. The views share memory with the optimizer: filling them loads.
    owned_only: leave out what another rank saves; over all ranks every element is then there once.
    The optimizer's slices are runs of flat buckets; rectangles() cuts a run into rectangles."""
    if vectors is None:
        state = [opt.adam.state[m] for m in opt.masters]
        vectors = {"": opt.masters, **{f"{k}/": [s[k] for s in state] for k in opt.adam.moments}}
    out = []
    for prefix, slices in vectors.items():
        for b, own in zip(dp.buckets, slices, strict=True):
            for name, p, start in zip(b.names, b.params, b.starts, strict=True):
                if owned_only and b.shards == 1 and zlib.crc32(name.encode()) % b.axis.size != b.axis.rank:
                    continue  # every replica holds it whole: a hash of the name chooses the one that saves it
                low, high = max(start, b.shard.start), min(start + p.numel(), b.shard.stop)
                for offset, size in rectangles(p.shape, low - start, high - start):
                    n = math.prod(size)
                    where = tuple(o + q for o, q in zip(offset, p.offset, strict=True))
                    out.append((prefix + name, own[low - b.shard.start:][:n].view(size), p.full_shape, where))
                    low += n
    if "" in vectors and vectors[""] is opt.masters:  # the routers' biases: not trained, but state
        for name, t in dp.buffers.items():
            if not owned_only or zlib.crc32(name.encode()) % dp.mesh.stage.size == dp.mesh.stage.rank:
                out.append((name, t, tuple(t.shape), (0,) * t.ndim))
    return out

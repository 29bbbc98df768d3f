"""What --optimizer muon adds to a step: bytes sent, memory and seconds; nothing with AdamW alone.

Which rank owns which matrix comes from muon.py itself.
"""
from collections import Counter

from cost.parameters import element_bytes, muon_buckets
from cost.step_time import STREAM, matmul_seconds, ring_bandwidth, stride_of
from model import DTYPES
from muon import BATCH_ELEMENTS, ITERATIONS, iteration_dtype, length_of, owned_matrices
from ops.flat import padded_elements

# Bytes per element of a rank's slices that the update moves more than AdamW's 30, in a 16-bit model. They are
# counted in the code of muon.py: 46 for the momentum and the direction, 14 around the iteration, 40 for the
# master and the weight.
UPDATE_BYTES = 100 - 30


def iteration_bytes(cfg):
    """Return the bytes of a number while matrices are orthogonalised."""
    return iteration_dtype(DTYPES[cfg.dtype]).itemsize


def shares(cfg, mesh, vocab_size):
    """Yield (shard, elements of this rank's slices, [Matrices of each rank]) of Muon's buckets, by axis."""
    for name, buckets in muon_buckets(cfg, mesh, vocab_size).items():
        shard = getattr(mesh, name).sharing(cfg.zero).shard
        lengths = [padded_elements(bucket.elements, shard.size) // shard.size for bucket in buckets]
        shapes = [bucket.matrices for bucket in buckets]
        yield shard, sum(lengths), owned_matrices(shapes, lengths, shard.size)


def muon_elements(cfg, mesh, vocab_size):
    """Return the number of elements whose momentum this rank keeps."""
    return sum(elements for _, elements, _ in shares(cfg, mesh, vocab_size))


def muon_traffic(cfg, mesh, vocab_size):
    """Return {axis name: bytes that this rank sends in an update}.

    Over the shard of a bucket, under ZeRO, the elements of matrices go to their owners, and updates come
    back. Over tp, matrices that tp cuts have all-reduces of their Gram matrices and of their norms.
    """
    nbytes = iteration_bytes(cfg)
    _, norm_bytes = element_bytes(cfg)
    sent = Counter()
    for shard, _, owned in shares(cfg, mesh, vocab_size):
        rank = shard.rank
        for owner, matrices in enumerate(owned):
            for matrix in matrices:
                if owner == rank:
                    away = sum(length_of(part) for there, part in matrix.parts.items() if there != rank)
                else:
                    away = length_of(matrix.parts[rank]) if rank in matrix.parts else 0
                sent[shard.name] += away * nbytes
        for matrix in owned[rank]:
            if matrix.cut is not None:
                side = matrix.shape[1 - matrix.cut]
                summed = ITERATIONS * side * side * nbytes + norm_bytes
                sent["tp"] += 2 * (mesh.tp.size - 1) / mesh.tp.size * summed
    return sent


def workspace_bytes(cfg, mesh, vocab_size):
    """Return the bytes that Muon's update needs for a moment, when no activations are left.

    There are the vector of directions, under ZeRO twice more what is sent and received, and about five
    tensors of the largest batch of matrices.
    """
    most = 0
    for _, elements, owned in shares(cfg, mesh, vocab_size):
        batches = Counter()
        for matrix in max(owned, key=len):
            batches[matrix.shape] += matrix.shape[0] * matrix.shape[1]
        batch = min(max(batches.values()), BATCH_ELEMENTS)
        vectors = 3 if len(owned) > 1 else 1
        most = max(most, vectors * elements + 5 * batch)
    return most * iteration_bytes(cfg)


def muon_seconds(cfg, mesh, gpu, vocab_size):
    """Return the seconds by which Muon's update takes longer than AdamW's, on the busiest rank.

    Its sums over tp are counted with the other messages of tp.
    """
    seconds = 0.0
    sent = muon_traffic(cfg, mesh, vocab_size)
    for shard, elements, owned in shares(cfg, mesh, vocab_size):
        seconds += elements * UPDATE_BYTES / (STREAM * gpu.hbm)
        if shard.size > 1:
            seconds += sent[shard.name] / ring_bandwidth(shard, stride_of(shard, mesh), gpu)
        shapes = Counter(oriented(matrix) for matrix in max(owned, key=sum_work))
        for (side, other), count in shapes.items():
            products = 2 * matmul_seconds(side, side, other, gpu, count)
            seconds += ITERATIONS * (products + matmul_seconds(side, side, side, gpu, count))
    return seconds


def oriented(matrix):
    """Return (side of the Gram matrix, other side) of a Matrix on this rank."""
    rows, columns = matrix.shape
    if matrix.cut is None:
        return min(rows, columns), max(rows, columns)
    return (columns, rows) if matrix.cut == 0 else (rows, columns)


def sum_work(matrices):
    """Return the work of several matrices."""
    return sum(matrix.work for matrix in matrices)

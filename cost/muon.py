"""What --optimizer muon adds to a step: bytes sent, memory and seconds; nothing with AdamW alone.

Which rank owns which matrix comes from muon.py itself.
"""
from collections import Counter

from cost.parameters import element_bytes, muon_buckets
from cost.step_time import STREAM, matmul_seconds, ring_bandwidth, stride_of
from ddp import padded_elements
from model import DTYPES
from muon import batches_of, iteration_dtype, length_of, owned_matrices, steps_per_gram

# Bytes per element of a rank's slices that the update moves more than AdamW's 30, in a 16-bit model: 14 for
# the momentum and the direction, 6 for the norms, 12 for the master and the weight. What the products read
# and write is part of their time.
UPDATE_BYTES = 32 - 30
SORT_BYTES = 8  # bytes per element that are copied before and after the two all_to_all


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
                side, other = matrix.sides
                summed = len(steps_per_gram(side, other)) * side * side * nbytes + norm_bytes
                sent["tp"] += 2 * (mesh.tp.size - 1) / mesh.tp.size * summed
    return sent


def workspace_bytes(cfg, mesh, vocab_size):
    """Return the bytes that Muon's update needs for a moment, when no activations are left.

    There are the vector of directions, under ZeRO twice more what is sent and received, and what the
    iteration of a batch of matrices needs.
    """
    most = 0
    for _, elements, owned in shares(cfg, mesh, vocab_size):
        matrices = max(owned, key=len)
        batches = batches_of(matrices, elements)
        vectors = 3 if len(owned) > 1 else 1
        needed = max((len(batch) * matrices[batch[0]].workspace for batch in batches), default=0)
        most = max(most, vectors * elements + needed)
    return most * iteration_bytes(cfg)


def muon_seconds(cfg, mesh, gpu, vocab_size):
    """Return the seconds by which Muon's update takes longer than AdamW's, on the busiest rank.

    Its sums over tp are counted with the other messages of tp.
    """
    seconds = 0.0
    sent = muon_traffic(cfg, mesh, vocab_size)
    for shard, elements, owned in shares(cfg, mesh, vocab_size):
        seconds += elements * UPDATE_BYTES / (STREAM * gpu.hbm)
        if cfg.dtype == "bf16":  # Muon's masters stay as they are, so its update does not save these bytes.
            seconds += elements * 2 / (STREAM * gpu.hbm)
        if cfg.moments_dtype == "bf16":  # Muon's momenta stay as they are, too.
            seconds += elements * 8 / (STREAM * gpu.hbm)
        if shard.size > 1:
            seconds += elements * SORT_BYTES / (STREAM * gpu.hbm)
            seconds += sent[shard.name] / ring_bandwidth(shard, stride_of(shard, mesh), gpu)
        shapes = Counter(matrix.sides for matrix in max(owned, key=sum_work))
        for (side, other), count in shapes.items():
            for n_steps in steps_per_gram(side, other):
                seconds += matmul_seconds(side, side, other, gpu, count)  # the Gram matrix
                seconds += (4 * n_steps - 3) * matmul_seconds(side, side, side, gpu, count)
                seconds += matmul_seconds(side, other, side, gpu, count)  # the polynomials times the matrix
    return seconds


def sum_work(matrices):
    """Return the work of several matrices."""
    return sum(matrix.work for matrix in matrices)

"""The bytes that a rank sends in one optimizer step, collective by collective, before it runs.

parallel.Axis counts the same bytes while a model trains. A run prints both after its first step.
"""
from collections import Counter

from cost.parameters import micro_batches
from model import DTYPES
from muon import iteration_dtype, length_of, steps_per_gram
from optim import VOTES, StepStats
from zero import uses_slot


def traffic(rank, batch):
    """Return {axis name: bytes that a Rank sends in a step of `batch` sequences}, if experts are balanced."""
    cfg = rank.cfg
    num_micro_batches = micro_batches(cfg, rank.mesh, batch)
    sent = Counter({axis: nbytes for axis, (nbytes, _) in reductions(rank, batch).items()})
    sent["tp"] += num_micro_batches * tensor_parallel_bytes(rank)
    sent["cp"] += num_micro_batches * rank.blocks * context_parallel_bytes(rank)
    if cfg.n_experts:
        sent["ep"] += num_micro_batches * rank.blocks * dispatch_bytes(rank)
    if cfg.router_bias_rate > 0:
        # moe.update_router_bias: an all-reduce of E fp64 counts per layer and step
        sent["stage"] += 2 * rank.mesh.stage.ring * rank.blocks * cfg.n_experts * 8
    # an activation to the next stage, its gradient to the stage before
    messages = 2 * cfg.pp_chunks - rank.has_embedding - rank.has_head
    sent["pp"] += num_micro_batches * messages * rank.split_rows * cfg.n_embd * rank.weight_bytes
    sent.update(muon_bytes(rank))
    sent["world"] += 2 * rank.mesh.world.ring * 8 * (len(StepStats._fields) + VOTES)  # Optimizer.stats, fp64
    return {axis: nbytes for axis, nbytes in sent.items() if nbytes}


def share_between_nodes(axis, node_of):
    """Return the share of the bytes sent over an axis that leave this node, in the mean over its ranks here.

    node_of: a function from a rank to its node. Over ep, rows go to all others alike; over pp, to the stages
    before and after; over the others, in a ring, to the next rank.
    """
    places = [node_of(rank) for rank in axis.ranks]
    here = places[axis.rank]
    if axis.name == "ep":
        reached = places[:axis.rank] + places[axis.rank + 1:]
    elif axis.name == "pp":
        reached = places[max(0, axis.rank - 1):axis.rank] + places[axis.rank + 1:axis.rank + 2]
    else:
        after = places[1:] + places[:1]
        reached = [following for place, following in zip(places, after, strict=True) if place == here]
    return sum(place != here for place in reached) / max(1, len(reached))


def bytes_between_nodes(mesh, sent, node_of):
    """Return how many of the bytes of `sent`, {axis name: bytes}, leave the node of this rank."""
    return sum(nbytes * share_between_nodes(mesh.axes()[name], node_of) for name, nbytes in sent.items())


# One micro-batch, forward and backward

def tensor_parallel_bytes(rank):
    cfg = rank.cfg
    # Attention and the MLP gather and scatter (B*T, C) once each. Backward does both adjoints.
    calls = rank.blocks * ((8 if rank.hidden else 4) + _recomputed_calls(rank))
    # The head's gather and the embedding's scatter, with the adjoint. With adapters nothing is trained before
    # the first block's gather, so two adjoints are left out.
    calls += 2 * rank.has_head
    if not cfg.lora:
        calls += 2 * rank.has_embedding
    nbytes = calls * rank.rows * cfg.n_embd * rank.weight_bytes
    if rank.has_head:  # cross-entropy over the vocabulary: all-reduces of a maximum and two sums per row
        nbytes += 2 * 3 * rank.head_rows * rank.sum_bytes
    nbytes += rank.blocks * router_bytes(rank)
    if cfg.qk_norm == "all":  # all-reduce of two sums per row, and of their gradients
        times = 2 if cfg.recompute == "none" else 3
        nbytes += rank.blocks * times * 2 * 2 * rank.rows * rank.sum_bytes
    return rank.mesh.tp.ring * nbytes


def _recomputed_calls(rank):
    """Return a block's gathers and scatters that run again, up to the last tensor that backward needs."""
    cfg = rank.cfg
    if cfg.recompute == "none":
        return 0
    if cfg.n_experts:  # attention's two; the shared experts' gather
        return 3 if rank.hidden and cfg.recompute == "full" else 2
    # A norm behind the MLP needs what the last scatter gives.
    return 3 if cfg.norm_place == "before" else 4


def context_parallel_bytes(rank):
    cfg = rank.cfg
    # Of one block: all keys and values, under --recompute again in backward, and their gradients.
    gathered = cfg.micro_batch * cfg.seq_len * 2 * rank.kv * rank.weight_bytes
    calls = 2 if cfg.recompute == "none" else 3
    return rank.mesh.cp.ring * (calls * gathered + router_bytes(rank))


def router_bytes(rank):
    """Of MoE.route: all-reduces of how often each expert was chosen and, of documents, of the real rows."""
    cfg = rank.cfg
    rows = 8 if cfg.n_experts and cfg.doc_mask == "on" else 0  # int64
    return 2 * (cfg.n_experts * rank.sum_bytes + rows)


def dispatch_bytes(rank):
    """Of one layer of experts: rows go there and back, in forward, backward and a second forward."""
    cfg = rank.cfg
    trips = 6 if cfg.recompute == "full" else 4
    counts = 0 if cfg.capacity_factor else 8 * cfg.n_experts  # dropless: E int64 say how many rows come
    return rank.mesh.ep.ring * (trips * rank.expert_rows() * cfg.n_embd * rank.weight_bytes + counts)


# One step: gradients and weights, and Muon's matrices

def reductions(rank, batch=0):
    """Return {axis name: (bytes of gradients and weights, collectives)} of a step of `batch` sequences.

    ZeRO-1 all-gathers weights in the place of gradients. ZeRO-2 reduces in every micro-batch, and ZeRO-3 also
    gathers in each. Peer copies carry gradients in the model's dtype. With --shard, all this stays in the
    shards, and the replicas all-reduce their slices once.
    """
    cfg = rank.cfg
    num_micro_batches = micro_batches(cfg, rank.mesh, batch)
    parts = rank.gathered()
    by_axis = {}
    for bucket in rank.trained:
        by_axis.setdefault(bucket.axis, []).append(bucket)

    found = {}
    for name, buckets in by_axis.items():
        axis = getattr(rank.mesh, name)
        shard, replicas = axis.sharing(cfg.zero)
        n = sum(rank.padded(bucket) for bucket in buckets)
        if shard.size > 1:
            is_copied = rank.gradient_kind(buckets[0]) == "copied"
            grad_bytes = rank.weight_bytes if is_copied else rank.sum_bytes
            times = num_micro_batches if cfg.zero > 1 and uses_slot(axis) else 1
            # ZeRO-3 gathers the embedding, the last block and the head once in a micro-batch, the other
            # blocks in forward and again in backward.
            of_zero_3 = sum(part[name] for part in parts + parts[1:cfg.n_layer])
            of_zero_1 = sum(rank.padded(bucket) for bucket in buckets if not rank.is_sharded(bucket))
            gathered = of_zero_1 + num_micro_batches * of_zero_3
            nbytes = shard.ring * (n * grad_bytes * times + gathered * rank.weight_bytes)
            found[shard.name] = nbytes, 2 * len(buckets)
        if replicas.size > 1:
            nbytes = 2 * replicas.ring * n / shard.size * rank.sum_bytes
            found[replicas.name] = nbytes, len(buckets)
    return found


def muon_bytes(rank):
    """Return {axis name: bytes that Muon sends in an update}.

    Under ZeRO the elements of matrices go to their owners, and updates come back. Over tp, matrices that it
    cuts have all-reduces of their Gram matrices and of their norms.
    """
    nbytes = iteration_dtype(DTYPES[rank.cfg.dtype]).itemsize
    sent = Counter()
    for shard, _, owned in rank.muon_shares():
        for owner, matrices in enumerate(owned):
            for matrix in matrices:
                for holder, part in matrix.parts.items():
                    if holder != owner and shard.rank in (holder, owner):
                        sent[shard.name] += length_of(part) * nbytes
        for matrix in owned[shard.rank]:
            if matrix.cut is not None:
                side, other = matrix.sides
                summed = len(steps_per_gram(side, other)) * side * side * nbytes + rank.sum_bytes
                sent["tp"] += 2 * rank.mesh.tp.ring * summed
    return sent

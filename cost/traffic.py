"""Bytes that a rank sends in one optimizer step, collective by collective, before it runs.

parallel.Axis counts the same bytes, by the same formulas of ring algorithms, while a model trains: a test
compares the two, and a run prints both after its first step.
"""
from collections import Counter
from typing import NamedTuple

from cost.parameters import (
    element_bytes,
    expert_rows,
    head_rows,
    held_layers,
    kv_width,
    local_buckets,
    local_parameters,
    micro_batches,
    rank_tokens,
    sharded_parameters,
    unwidened_gradients,
)
from cost.step_time import expected_choice
from ops.flat import padded_elements
from optim import StepStats
from zero import uses_slot


def traffic(cfg, mesh, vocab_size, batch, choice=None):
    """-> {axis name: bytes that this rank sends in an optimizer step of `batch` sequences}; the experts' rows
    as if they were balanced. choice: the run's fast.choose.Choice, by default the expected one."""
    blocks, is_first, is_last = held_layers(cfg, mesh)
    rows, micro = rank_tokens(cfg, mesh) // mesh.tp.size, micro_batches(cfg, mesh, batch)
    sent = Counter({axis: r.gradients + r.weights
                    for axis, r in reductions(cfg, mesh, vocab_size, choice, batch).items()})
    sent["tp"] += micro * tensor_parallel_bytes(cfg, mesh, is_first, is_last, blocks)
    sent["cp"] += micro * blocks * context_parallel_bytes(cfg, mesh)
    if cfg.n_experts:
        sent["ep"] += micro * blocks * dispatch_bytes(cfg, mesh)
    if cfg.router_bias_rate > 0:  # moe.update_router_bias: an all-reduce of E fp64 counts per layer and step
        share = 2 * (mesh.stage.size - 1) / mesh.stage.size
        sent["stage"] += share * blocks * cfg.n_experts * 8
    # pipeline: an activation to the next stage, its gradient to the stage before
    messages = 2 * cfg.pp_chunks - is_first - is_last
    sent["pp"] += micro * messages * rows * cfg.n_embd * element_bytes(cfg)[0]
    statistics = 8 * len(StepStats._fields)  # bytes of fp64 that Optimizer.stats all-reduces
    sent["world"] += 2 * (mesh.world.size - 1) / mesh.world.size * statistics
    return {axis: b for axis, b in sent.items() if b}


def tensor_parallel_bytes(cfg, mesh, is_first, is_last, blocks):
    """Bytes that a rank of `blocks` blocks sends over tp for one micro-batch, both ways."""
    weight, wide = element_bytes(cfg)
    rows = rank_tokens(cfg, mesh)  # (B*T, C) on every tp rank when gathered
    mlp = not cfg.n_experts or cfg.n_shared_experts > 0
    recompute = {"none": 0, "selective": 2 if cfg.n_experts else 3, "full": 3 if mlp else 2}[cfg.recompute]
    # attention and MLP gather and scatter (B*T, C) once each, and backward does both adjoints. recomputation
    # stops at the last tensor that backward needs: before the last branch's scatter
    calls = (8 if mlp else 4) + recompute
    ends = 2 * is_first + 2 * is_last  # the embedding's scatter, the head's gather, and their adjoints
    sent = (blocks * calls + ends) * rows * cfg.n_embd * weight
    if is_last:  # cross-entropy over the vocabulary: all-reduces of a maximum and two sums per row
        sent += 2 * 3 * head_rows(cfg, mesh) * wide
    sent += blocks * 2 * cfg.n_experts * wide  # all-reduce of the router's counts
    return (mesh.tp.size - 1) / mesh.tp.size * sent


def context_parallel_bytes(cfg, mesh):
    """Bytes that a rank sends over cp for one block and one micro-batch: keys and values of whole sequences
    are gathered, once more under --recompute full, and their gradients are reduce-scattered."""
    weight, wide = element_bytes(cfg)
    gathered = cfg.micro_batch * cfg.seq_len * 2 * kv_width(cfg, mesh) * weight
    counts = 2 * cfg.n_experts * wide  # all-reduce of the router's counts
    return (mesh.cp.size - 1) / mesh.cp.size * ((3 if cfg.recompute == "full" else 2) * gathered + counts)


def dispatch_bytes(cfg, mesh):
    """Bytes that a rank sends over ep for one layer of experts and one micro-batch, both ways: rows go to the
    experts and back in forward, in backward and, under --recompute full, in the second forward."""
    trips = 6 if cfg.recompute == "full" else 4
    rows = expert_rows(cfg, rank_tokens(cfg, mesh) // mesh.tp.size)
    counts = 0 if cfg.capacity_factor else 8 * cfg.n_experts  # dropless: E int64 tell how many rows come
    return (mesh.ep.size - 1) / mesh.ep.size * (trips * rows * cfg.n_embd * element_bytes(cfg)[0] + counts)


class Reduction(NamedTuple):
    """The sums over one axis in a step, and what follows them."""
    gradients: float  # bytes sent while the last backward runs; from ZeRO-2 on, while every backward runs
    weights: float    # bytes sent while the next forward runs: ZeRO-1's all-gathers
    calls: int        # collectives of each kind, one per bucket
    last: float       # share of the bucket that leaves last and is needed first, which nothing can hide


def reductions(cfg, mesh, vocab_size, choice=None, batch=0):
    """-> {axis name: Reduction}. An all-reduce is a reduce-scatter and an all-gather of gradients; ZeRO-1
    all-gathers weights in the place of gradients; peer copies carry gradients in the model's dtype; ZeRO-2
    reduces in every micro-batch of the step of `batch` sequences, ZeRO-3 also gathers in each."""
    choice = choice or expected_choice(cfg, mesh)
    (weight, grad), micro = element_bytes(cfg), micro_batches(cfg, mesh, batch)
    _, copied = unwidened_gradients(mesh, local_parameters(cfg, mesh, vocab_size), choice)
    (sharded, parts), out = sharded_parameters(cfg, mesh, vocab_size), {}
    for axis, buckets in local_buckets(cfg, mesh, vocab_size).items():
        size = getattr(mesh, axis).size
        n = sum(padded_elements(bucket, size if cfg.zero else 1) for bucket in buckets)
        sent = (size - 1) / size * n  # elements
        if cfg.zero:
            times = micro if cfg.zero > 1 and uses_slot(getattr(mesh, axis)) else 1
            # ZeRO-3: in a micro-batch the embedding, the last block and the head come once, the others twice
            gathered = sum(part[axis] * (2 if 0 < i < cfg.n_layer else 1) for i, part in enumerate(parts))
            received = n - sharded[axis] + micro * gathered
            moved = sent * (weight if axis in copied else grad) * times, sent / n * received * weight
        else:
            moved = 2 * sent * grad, 0
        out[axis] = Reduction(*moved, len(buckets), buckets[-1] / n)
    return out

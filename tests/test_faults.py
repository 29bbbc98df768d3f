"""Planted faults: one thing goes wrong, and a comparison must fail. There is one for each mechanism: a sum
over the wrong ranks, a division, a slice of another rank, a wait that is left out, a mask, a seed.

faults.py says how they are planted. They train on without an error; a layout is compared with one process,
and one process with plain_muon.py. Where a larger project had such a fault, its thread stands in the name.
test_other_faults.py has those that other comparisons find. At the end: the tester's own tests.
"""
import contextlib
import dataclasses
import functools
import os
import re
import time
from unittest import mock

import pool
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from faults import (
    CP,
    DP,
    EP,
    ONE,
    PP,
    TP,
    ZERO,
    ZERO2,
    ZERO3,
    assert_caught,
    balance_loss_of_this_rank,
    constant,
    group,
    local_norm,
    nothing,
    planted,
    run_with_faults,
    with_faults,
)
from pool import run_ranks
from shared import EOD
from test_layouts import cases

from corpus.samples import document_places
from ddp import DataParallel
from interface.layout import stage_layers
from parallel import CompletedWork, gather_rows, make_mesh, scatter_rows

TP4, CHUNKS, TP_EP = (4, dict(tp=4)), (2, dict(pp=2, pp_chunks=2)), (2, dict(tp=2, ep=2, zero=1))
PP_DP, PP_ZERO, SHARD = (4, dict(pp=2)), (4, dict(pp=2, zero=1)), (4, dict(zero=1, shard=2))
RECOMPUTED, CP_PP = (2, dict(recompute="full")), (4, dict(cp=2, pp=2))

# -----------------------------------------------------------------------------
# Functions that are called in the place of others: the loss and its division

def other_coordinates(original, cfg, mesh, *args, **ranks):
    """A function of (cfg, mesh, ...) as if this rank had other coordinates, such as dp=0."""
    axes = {name: dataclasses.replace(getattr(mesh, name), rank=rank) for name, rank in ranks.items()}
    return original(cfg, dataclasses.replace(mesh, **axes), *args)


def tokens_of_this_rank(original, source, first, count, device):
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return size * original(source, first + rank * (count // size), count // size, device)


def tokens_times(original, model, data_parallel, batches, n_trained, *args, factor):
    return original(model, data_parallel, batches, n_trained * factor, *args)


def token_count(factor):
    """Return the fault that divides the loss by `factor` times the number of tokens."""
    return "pipeline.forward_backward", functools.partial(tokens_times, factor=factor)


def divided_after_backward(original, model, data_parallel, batches, n_trained, *args):
    return original(model, data_parallel, batches, 1, *args) / n_trained


def mean_of_means(original, model, data_parallel, batches, n_trained, *args):
    forward = model.forward
    parts = len(batches) * model.mesh.dp.size

    def mean(x, y):
        loss, router_loss = forward(x, y)
        return loss * n_trained / ((y >= 0).sum() * parts), router_loss

    with mock.patch.object(model, "forward", mean):
        return original(model, data_parallel, batches, n_trained, *args)


# Sums, norms, updates

def always_last(original, model, data_parallel, *args):
    always = property(lambda self: True, lambda self, completes: None)
    with mock.patch.object(DataParallel, "completes_grads", always, create=True):
        return original(model, data_parallel, *args)


def reduce_and_wait(original, bucket):
    original(bucket)
    bucket.sum_handle.wait()


def scaled_at_each_addition(original, bucket, i):
    original(bucket, i)
    bucket.grad_windows[i].div_(2)


def experts_of_first_rank(original, bucket):
    return 0.0 if bucket.axis.name == "edp" and torch.distributed.get_rank() else original(bucket)


def doubled_experts(original, bucket):
    original(bucket)
    if bucket.axis.name == "edp":
        bucket.grad.mul_(2)


def stats_of_all_tp_losses(original, optimizer, loss, *args):
    return original(optimizer, loss * optimizer.data_parallel.mesh.tp.size, *args)


def zeros_of_padding(original, optimizer):
    with contextlib.ExitStack() as stack:
        for bucket in optimizer.data_parallel.buckets:
            stack.enter_context(mock.patch.object(bucket, "filled", bucket.flat.numel()))
        return original(optimizer)


def clipped_by_local_norm(original, optimizer, lr, grad_norm):
    return original(optimizer, lr, local_norm(optimizer))


def never_clips(original, optimizer, lr, grad_norm):
    return original(optimizer, lr, torch.zeros_like(grad_norm))


# First weights

def draw_of_this_rank(original, shape, std, key, device):
    return original(shape, std, f"{key}/{torch.distributed.get_rank()}", device)


def numbered_from_its_stage(original, shape, std, key, device):
    """normal_from_key as if the blocks of every stage, of which each has one, began with number 0."""
    return original(shape, std, re.sub(r"blocks\.\d+", "blocks.0", key), device)


def first_share(original, p, *args, **kwargs):
    """initial_weights of the first rank, whichever share of the tensor this rank has."""
    with mock.patch.object(p, "offset", (0,) * p.ndim):
        return original(p, *args, **kwargs)


# ZeRO, and shares within groups

def first_slice(original, bucket, rank, n):
    return original(bucket, 0, n)


def given_at_once(original, slot, bucket):
    slot.user = bucket


def free_nothing(original, bucket):
    bucket.wait_weights()


class LateWork:
    """The handle of a collective that starts only when it is waited for."""

    def __init__(self, start):
        self.start = start

    def wait(self):
        self.start().wait()


def late_gather(original, bucket):
    own = bucket.own.clone()
    bucket.flat.fill_(torch.nan)
    bucket.own.copy_(own)

    def start():
        original(bucket)
        return bucket.gather_handle
    bucket.gather_handle = LateWork(start)


# The all-gather of the weights overlaps with other work: reading the weights too early is a race, and a test
# may miss it. With this change, which is no fault, the all-gather starts only when it is waited for.
LATE = "ddp.Bucket.start_gather", late_gather


def move_without_waiting(original, zero, part, backward=False):
    with mock.patch.object(DataParallel, "provide_weights") if backward else contextlib.nullcontext():
        original(zero, part, backward)


def no_sum_over_replicas(original, axis, *args, **kwargs):
    return CompletedWork() if axis.name.endswith(".replicas") else original(axis, *args, **kwargs)


def slice_of_the_replica(original, bucket, rank, n):
    return original(bucket, bucket.replicas.rank % bucket.n_slices, n)


# Tensor and context parallelism, and the model

def target_of_first_rank(original, ctx, logits, target, axis):
    return original(ctx, logits, target, dataclasses.replace(axis, rank=0))


def masked_as_word(original, ctx, logits, target, axis):
    return original(ctx, logits, target.clamp(min=0), axis)


def without_padding(original, logits, target, vocab_size, axis):
    return original(logits, target, logits.size(1) * axis.size, axis)


def bias_on_every_rank(original, layer, x):
    return scatter_rows(F.linear(x, layer.weight, layer.bias), layer.tp)


def next_kv_head(original, attention, cfg, mesh, *args):
    original(attention, cfg, mesh, *args)
    head = mesh.tp.rank % cfg.n_kv_head
    attention.wk.rows = attention.wv.rows = slice(head * attention.D, (head + 1) * attention.D)


def repeated_grad(original, ctx, grad):
    return torch.cat([grad] * ctx.axis.size), None


def own_rows(original, ctx, grad):
    return grad.chunk(ctx.axis.size)[ctx.axis.rank], None


def own_part_alone(original, x, axis):
    return x * axis.size


def keys_of_next_rank(original, q, k, v, cfg, axis, **options):
    """attend_segments whose queries see the keys that those of the next rank see."""
    return original(q, k, v, cfg, dataclasses.replace(axis, rank=(axis.rank + 1) % axis.size), **options)


def segments_by_rank(original, x, axis):
    return gather_rows(x, axis)


def causal_segments(original, q, k, v, cfg, axis, **options):
    return original(q, k, v, dataclasses.replace(cfg, objective="causal"), axis, **options)


def one_piece(original, model, t, cache, device):
    """GPT._positions as if each rank of cp had one piece of the sequence."""
    return slice(t * model.mesh.cp.rank, t * model.mesh.cp.rank + t)


def places_of_own_segments(original, *args):
    return [(x, y, document_places(x, EOD)) for x, y, _ in original(*args)]


def other_masks(original, block, *args):
    with mock.patch("model.draws_random_numbers", return_value=False):
        return original(block, *args)


def alone(original, x, cut=None, axis=None, **rest):
    """muon.orthogonalise of each rank's share by itself: blockwise."""
    return original(x, cut, **rest)


def one_matrix(original, params):
    return [((p.numel() // p.size(-1), p.size(-1)), tuple(p.full_shape[-2:])) for p in params]


# Stages and chunks

def neighbouring_stages(original, cfg, pp):
    return stage_layers(cfg, pp.size * cfg.pp_chunks)[pp.rank * cfg.pp_chunks:][:cfg.pp_chunks]


def newest_first(original, ring, n, forward, backward):
    waiting = []

    def noted(i, chunk, hidden):
        waiting.append((i, chunk))
        return forward(i, chunk, hidden)

    return original(ring, n, noted, lambda i, chunk, grad: backward(*waiting.pop(), grad))


def received_too_early(original, ring, op):
    received = original(ring, op)
    return None if received is None else torch.zeros_like(received)


def first_layer(original, attention, cfg, mesh, layer):
    original(attention, cfg, mesh, 0)


def without_places(original, model, tokens, targets=None, places=None, hidden=None, **options):
    return original(model, tokens, targets, None if hidden is not None else places, hidden, **options)


# Experts

def not_over(original, axis, x, *op, name):
    """Axis.all_reduce, except over the axis `name`: there, it returns x unchanged."""
    return x if axis.name == name else original(axis, x, *op)


def all_rows_of_later_ranks(original, layer, x, places=None):
    if places is not None and layer.mesh.tp.rank:
        places = places.clamp(min=1)
    return original(layer, x, places)


def doubled_router_loss(original, model, *args, **kwargs):
    out, router_loss = original(model, *args, **kwargs)
    return out, 2 * router_loss


def no_router_gradient(original, *args, **kwargs):
    out, router_loss = original(*args, **kwargs)
    return out, router_loss.detach()


def gates_of_own_experts(original, layer, x, gates, plan):
    """MoE.experts in which a gate has a gradient only if its expert is on this rank."""
    rank = layer.dispatcher.ep.rank
    start = sum(plan.send[:rank])
    is_own = torch.zeros(gates.numel(), dtype=torch.bool)
    is_own[plan.perm[start:start + plan.send[rank]]] = True
    return original(layer, x, torch.where(is_own.view_as(gates), gates, gates.detach()), plan)


def own_block_alone(original, ctx, grad):
    grad, *others = original(ctx, grad)
    for rank, block in enumerate(grad.split(ctx.send)):
        if rank != ctx.axis.rank:
            block.zero_()
    return grad, *others


def garbage_in_empty_slots(original, ctx, x, perm, inv_perm, K=1):
    out = original(ctx, x, perm, inv_perm, K)
    return out.masked_fill((perm >= K * x.size(0)).unsqueeze(1), torch.nan)


def capacity_of_two_ranks(original, cfg, n):
    return original(cfg, 2 * n)


def plan_by_sender(original, dispatcher, *args):
    plan = original(dispatcher, *args)
    rows = torch.arange(plan.by_expert.numel())
    return plan._replace(by_expert=rows, by_sender=rows)


# -----------------------------------------------------------------------------
# Layouts

FAULTS = {  # name: (family, (ranks, layout), faults as arguments of planted)
    # The loss and its division
    "the same data on every dp rank": (
        "llama", DP, ("corpus.samples.micro_batches", functools.partial(other_coordinates, dp=0))),
    "Megatron-LM #7452: the loss divided by local numbers of tokens": (
        "llama-masked", DP, ("corpus.samples.trained_tokens", tokens_of_this_rank)),
    "torchtitan #2206: the mean of each micro-batch's mean": (
        "llama-masked", DP, ("pipeline.forward_backward", mean_of_means)),
    "torchtitan #2972: a pipeline divides the logged loss alone": (
        "llama", PP, ("pipeline.several_stages", divided_after_backward)),
    "AReaL #1273: a pipeline divides once more by its micro-batches": ("llama", PP, token_count(4)),
    "Megatron-LM #906: the loss lacks one factor of its divisor": ("llama", CP, token_count(1 / 2)),
    # Sums of gradients
    "pytorch #144530: no gradient summed over the replicas": (
        "llama", DP, ("ddp.Bucket.start_sum", nothing), ("ddp.Bucket.wait_sum", nothing)),
    "picotron #5: gradients sent before the last micro-batch of 1F1B": (
        "llama", PP_DP, ("pipeline.several_stages", always_last), ("ddp.Bucket.start_sum", reduce_and_wait)),
    "torchtitan #1733: the total rescaled at each accumulation": (
        "llama", PP, ("ddp.Bucket.take", scaled_at_each_addition)),
    "VeOmni #1115: gradients summed over dp without cp": (
        "llama", CP, group("stage", "dp"), group("dpcp", "dp")),
    "Megatron-LM #844: a tied gradient summed over the stages of one replica": (
        "gpt2", PP_ZERO, group("tied", "pp")),
    "what tp does not cut not summed over tp": ("dropless", TP, group("stage", "dp")),
    "sharded weights summed over the stage": ("llama", TP, group("dp", "stage")),
    "Megatron-LM #1628: experts summed over the ranks of the dense weights": (
        "dropless", TP, group("edp", "dp")),
    "pytorch #160285: experts' gradients times a number of ranks": (
        "dropless", EP, ("ddp.Bucket.wait_sum", doubled_experts)),
    # Numbers of a step, norms, the update
    "loss counted by every tp rank": ("llama", TP, ("optim.Optimizer.stats", stats_of_all_tp_losses)),
    "padding counted as zero gradients": ("llama", ZERO, ("optim.Optimizer.num_zeros", zeros_of_padding)),
    "Megatron-LM #7228: a weight counted by a wrong number of ranks in the norm": (
        "gpt2", PP, ("ddp.Bucket.count_factor", functools.partial(constant, value=1))),
    "Megatron-LM #5916: experts of later tp ranks left out of the norm": (
        "capacity", TP_EP, ("ddp.Bucket.count_factor", experts_of_first_rank)),
    "torchtitan #596: a rank clips by its own norm": (
        "llama", PP, ("optim.Optimizer.step", clipped_by_local_norm)),
    "weight decay on norms": (
        "llama", ONE, ("ddp.uses_weight_decay", functools.partial(constant, value=True))),
    "no clipping": ("llama", ONE, ("optim.Optimizer.step", never_clips)),
    "Muon: each share orthogonalised alone": ("muon-llama", TP, ("muon.orthogonalise", alone)),
    "Muon: the experts of a layer are one matrix": ("muon-dropless", EP, ("muon.shapes_of", one_matrix)),
    "Muon: updates stay with the owner": ("muon-llama", ZERO, ("muon.WholeMatrices.hand_back", nothing)),
    # First weights
    "torchtitan #166: replicas that start from other weights": (
        "llama", DP, ("model.normal_from_key", draw_of_this_rank)),
    "torchtitan #514: every stage draws from the same seed": (
        "llama", PP, ("model.normal_from_key", numbered_from_its_stage)),
    "torchtitan #1750: tp ranks draw equal shares": ("llama", TP, ("model.initial_weights", first_share)),
    "all ranks start with the same experts": ("dropless", EP, ("model.initial_weights", first_share)),
    # ZeRO
    "weights read before they arrive": ("llama", ZERO, LATE, ("ddp.Bucket.wait_weights", nothing)),
    "every rank updates the first slice": ("llama", ZERO, ("ddp.Bucket.slice_of_rank", first_slice)),
    "the last micro-batch is not waited for": ("llama", ZERO2, ("zero.SlotBucket.wait_sum", nothing)),
    "a slot is given on before its sum was taken out": ("llama", ZERO2, ("zero.Slot.give_to", given_at_once)),
    "weights from before the step, used after it": (
        "qwen3", ZERO3, ("zero.ShardedBucket.free", free_nothing)),
    "backward does not wait for the weights": (
        "qwen3", ZERO3, LATE, ("zero.ZeRO3.move_to_part", move_without_waiting)),
    "summed over the shard only": ("llama", SHARD, ("parallel.Axis.start_all_reduce", no_sum_over_replicas)),
    "the slice of a rank's replica": ("llama", SHARD, ("ddp.Bucket.slice_of_rank", slice_of_the_replica)),
    # Tensor parallelism
    "targets at the wrong vocabulary offset": (
        "llama", TP, ("layers._VocabCrossEntropy.forward", target_of_first_rank)),
    "a masked target counts": ("gpt2-masked", TP, ("layers._VocabCrossEntropy.forward", masked_as_word)),
    "vocabulary padding takes probability": ("llama", TP, ("layers.vocab_cross_entropy", without_padding)),
    "row-linear bias added by every tp rank": (
        "gpt2-masked", TP, ("layers.RowLinear.forward", bias_on_every_rank)),
    "a replicated kv head of other query heads": (
        "qwen2", TP4, ("attention.Attention.__init__", next_kv_head)),
    "nanotron #172: of the input's gradient only the rank's own rows are right": (
        "llama", TP, ("parallel._ScatterRows.backward", repeated_grad)),
    "torchtitan #1878: the gradient of gathered rows not summed": (
        "llama", TP, ("parallel._GatherRows.backward", own_rows)),
    "the mean square of a rank's own heads": ("olmo2", TP, ("parallel.sum_over_ranks", own_part_alone)),
    # Context parallelism
    "the keys of another cp rank's queries": ("llama", CP, ("attention.attend_segments", keys_of_next_rank)),
    "gathered keys in the order of the ranks": ("llama", CP, ("parallel.gather_segments", segments_by_rank)),
    "the causal mask is left on over cp": ("bert", CP, ("attention.attend_segments", causal_segments)),
    "Megatron-LM #560: positions of cp ranks": ("llama", CP, ("model.GPT._positions", one_piece)),
    "documents of a rank's own tokens": (
        "llama-documents", CP_PP, ("corpus.samples.micro_batches", places_of_own_segments)),
    # The pipeline
    "backward of the newest micro-batch": ("llama", PP, ("pipeline.Ring.walk", newest_first)),
    "a rank's stages side by side": ("llama", CHUNKS, ("pipeline.rank_layers", neighbouring_stages)),
    "messages read before they arrive": ("llama", CHUNKS, ("pipeline.Ring.receive", received_too_early)),
    "the layers of a stage counted from 0": (
        "windows", (2, dict(pp=2, zero=1)), ("attention.Attention.__init__", first_layer)),
    "later stages without documents": ("llama-documents", CP_PP, ("model.GPT.forward", without_places)),
    "OLMo-core #828: recomputed dropout draws other masks": (
        "llama-dropout", RECOMPUTED, ("model.Block.maybe_recompute", other_masks)),
    # Experts
    "Megatron-LM #5047: the router's loss scaled": (
        "dropless", TP, ("model.GPT.forward", doubled_router_loss)),
    "Automodel #1408: the router's loss has no gradient": (
        "dropless", EP, ("model.GPT.forward", no_router_gradient)),
    "balance loss of a tp rank's own tokens": (
        "dropless", TP, ("moe.MoE.balance_loss", balance_loss_of_this_rank)),
    "transformers #48687: the gates' gradients of ep ranks not summed": (
        "dropless", EP, ("moe.MoE.experts", gates_of_own_experts)),
    "Automodel #1260: rows get no gradient from other ranks' experts": (
        "dropless", EP, ("parallel._AllToAll.backward", own_block_alone)),
    "transformers #48205: rows that nobody wrote": (
        "capacity", EP, ("ops.permute.Permute.forward", garbage_in_empty_slots)),
    "router bias updated with this rank's loads only": (
        "sigmoid", EP, ("parallel.Axis.all_reduce", functools.partial(not_over, name="stage"))),
    "capacity computed from all ranks' rows": (
        "capacity", TP, ("moe.expert_capacity", capacity_of_two_ranks)),
    "padding that one rank does not know": (
        "dropless-padded", (4, dict(tp=2, ep=2)), ("moe.MoE.route", all_rows_of_later_ranks)),
    "rows stay sorted by sender, dropless": ("dropless", EP, ("moe.AllToAll.plan", plan_by_sender)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    family, place, *faults = FAULTS[name]
    assert_caught(family, place, *faults)


def test_the_runs_without_faults_are_in_the_table():
    """... of test_layouts.py, where they pass. What makes a race show is no fault."""
    passing = [(family, n, layout) for family, n, _, layout, is_quick in cases() if is_quick]
    for family, (n, layout), *_ in FAULTS.values():
        assert n == 1 or (family, n, layout) in passing, (family, layout)
    for run in ("llama", ONE), ("gpt2", ONE), ("llama", ZERO, LATE), ("qwen3", ZERO3, LATE):
        run_with_faults(*run)()


# -----------------------------------------------------------------------------
# The tester's own tests: planting

def wrong_rank(world):
    if world.rank == world.size - 1:
        make_mesh(world, groups=False)


def identical(original, *args, **kwargs):
    return original(*args, **kwargs)


def test_a_fault_that_nothing_comes_to_is_an_error():
    fault = "parallel.make_mesh", identical
    with pytest.raises(AssertionError, match="nothing has called parallel.make_mesh"), planted(*fault):
        pass
    with pytest.raises(AssertionError, match="no rank has called layers.vocab_embedding"):
        run_ranks(2, with_faults, [("layers.vocab_embedding", nothing)], wrong_rank)
    run_ranks(2, with_faults, [fault], wrong_rank)  # one rank is enough


# The pool: a rank that raises, dies or hangs fails its own call, with a message, and no other

def total(world):
    t = torch.full((1000,), 1.0 + world.rank)
    dist.all_reduce(t)
    return t[0].item()


def fails(world, how):
    """Rank 1 raises, dies or hangs while the others wait in a collective."""
    if world.rank == 1:
        if how == "raises":
            raise KeyError("the first rank's partner")
        if how == "dies":
            os._exit(7)
        time.sleep(1000)
    return total(world)


@pytest.mark.parametrize("how,words", [
    ("raises", "KeyError: \"the first rank's partner\""), ("dies", "its worker died, exit code 7"),
    ("hangs", "its worker was killed by the pool")])
def test_a_rank_that_fails_fails_its_call_alone(how, words, monkeypatch):
    if how == "hangs":
        monkeypatch.setattr(pool, "LIMIT", 1)
    with pytest.raises(AssertionError, match=words):
        run_ranks(3, fails, how)
    monkeypatch.undo()
    assert run_ranks(3, total) == [6.0] * 3

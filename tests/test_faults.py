"""Planted faults: each changes one thing in our code inside the worker processes, and a comparison must fail.

A fault is planted by name, (function, what is called in its place), wherever that reaches it; else by text,
(function, a piece of its source, the faulty piece). See `planted`.

The faults are those that larger projects shipped (a sum over the wrong ranks, a second division, clipping by
the local norm, ...), each written as one wrong line. Three comparisons detect them:
    layouts        every layout against one process         faults in what several ranks do
    plain PyTorch  one process against a plain loop         faults that a layout and its reference share
    large logits   the vocabulary-parallel loss at 1e4      faults that moderate numbers do not show
"""
import contextlib
import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest
import test_sample
import torch
import torch.nn.functional as F
from faults import (
    BERT,
    DP,
    GPT2,
    LLAMA,
    MOE,
    ONE_STAGE,
    PP,
    SEVERAL_STAGES,
    TP,
    ZERO,
    constant,
    group,
    not_over,
    nothing,
    other_coordinates,
    router_loss_weight,
    run_with_faults,
    with_faults,
)
from pool import run_ranks

from ddp import DataParallel
from interface.layout import stage_layers
from parallel import Axis, gather_rows, make_mesh, scatter_rows
from vocab import vocab_cross_entropy
from zero import ShardedBucket

ONE, ZERO2, ZERO3, CP = (1, dict()), (2, dict(zero=2)), (2, dict(zero=3)), (2, dict(cp=2))  # ranks, layout
TP4, DP_TP, EP, CHUNKS = (4, dict(tp=4)), (4, dict(tp=2)), (2, dict(ep=2)), (2, dict(pp=2, pp_chunks=2))
FOUR = dict(LLAMA, n_layer=4)


# -----------------------------------------------------------------------------
# Functions that are called in the place of others: gradients, norms, statistics

def grad_average(original, bucket):
    """Bucket.wait_grads that averages."""
    original(bucket)
    bucket.grad.div_(bucket.axis.size)


def always_last(original, data_parallel, completes_grads):
    """DataParallel.announce_backward that announces the last micro-batch each time."""
    original(data_parallel, completes_grads=True)


def reduce_and_wait(original, bucket):
    """Bucket.start_sum that waits: a bucket that is reduced too early is then wrong in every run."""
    original(bucket)
    bucket.reduce_handle.wait()


def tokens_times(original, model, data_parallel, batches, n_trained, *args, factor):
    """forward_backward that divides the loss by another number of tokens."""
    return original(model, data_parallel, batches, n_trained * factor, *args)


def token_count(factor):
    """Return the fault that divides the loss by `factor` times the number of tokens."""
    return "pipeline.forward_backward", functools.partial(tokens_times, factor=factor)


def local_norm(optimizer):
    """Return the norm of this rank's own gradients, ()."""
    return optimizer.sum_of_squares(optimizer.grads).sqrt()


def stats_of_local_norm(original, optimizer, *args):
    """Optimizer.stats with the norm of this rank's own gradients."""
    return original(optimizer, *args)._replace(grad_norm=local_norm(optimizer))


def divisor_by_local_norm(original, optimizer, grad_norm):
    """Optimizer.divisor of this rank's own gradients."""
    return original(optimizer, local_norm(optimizer))


def stats_of_all_tp_losses(original, optimizer, loss, *args):
    """Optimizer.stats that adds up the loss of every tp rank."""
    return original(optimizer, loss * optimizer.data_parallel.mesh.tp.size, *args)


def one_replica(original, bucket):
    """Bucket.count_factor as if the bucket were on one rank of its axis."""
    return 1 / bucket.axis.size


def overwriting_accumulate(original, total, grad, first):
    """ops.flat.accumulate that takes every gradient for the first."""
    original(total, grad, first=True)


# -----------------------------------------------------------------------------
# Tensor, sequence and context parallelism, and the model

def repeated_grad(original, ctx, grad):
    """_ScatterRows.backward without the all-gather."""
    return torch.cat([grad] * ctx.axis.size), None


def grad_times_ranks(original, ctx, grad):
    """_ScatterRows.backward that sums twice."""
    grad, _ = original(ctx, grad)
    return grad * ctx.axis.size, None


def own_rows(original, ctx, grad):
    """_GatherRows.backward without the sum."""
    return grad.chunk(ctx.axis.size)[ctx.axis.rank], None


def without_maximum(original, axis, x, *op):
    """Axis.all_reduce that only knows sums."""
    return x if op else original(axis, x)


def target_of_first_rank(original, ctx, logits, target, axis):
    """_VocabCrossEntropy.forward as if every rank had the first words of the vocabulary."""
    return original(ctx, logits, target, dataclasses.replace(axis, rank=0))


def without_padding(original, logits, target, vocab_size, axis):
    """vocab_cross_entropy to which the vocabulary's padding are words."""
    return original(logits, target, logits.size(1) * axis.size, axis)


def mirrored_rows(original, tokens, weight, axis):
    """vocab_embedding with the rows of another rank."""
    return original(tokens, weight, dataclasses.replace(axis, rank=axis.size - 1 - axis.rank))


def positions_of_first_tp_rank(original, model, *args):
    """GPT._add_positions as if every tp rank had the first rows."""
    mesh = dataclasses.replace(model.mesh, tp=dataclasses.replace(model.mesh.tp, rank=0))
    with mock.patch.object(model, "mesh", mesh):
        return original(model, *args)


def bias_on_every_rank(original, layer, x):
    """RowLinear.forward that adds the bias before the sum."""
    return scatter_rows(F.linear(x, layer.weight, layer.bias), layer.tp)


def next_kv_head(original, attention, cfg, mesh, *args):
    """Attention.__init__ with the key/value heads dealt out one by one."""
    original(attention, cfg, mesh, *args)
    head = mesh.tp.rank % cfg.n_kv_head
    attention.kv_rows = slice(head * attention.D, (head + 1) * attention.D)


def draw_of_this_rank(original, shape, std, key, device):
    """normal_from_key with another key on each rank."""
    return original(shape, std, f"{key}/{torch.distributed.get_rank()}", device)


def one_piece(original, model, t, cache, device):
    """GPT._positions as if each rank of cp had one piece of the sequence."""
    return slice(t * model.mesh.cp.rank, t * model.mesh.cp.rank + t)


def first_positions(original, model, t, cache, device):
    """GPT._positions that start at 0 on every rank."""
    return slice(0, t)


def upper_left_mask(original, n_queries, n_keys):
    """lower_right_mask whose first query sees the first key only."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril()


def gathered_keys_alone(original, kv, axis):
    """gather_segments of keys (t, B, g, D); the values next to them are this rank's own, repeated."""
    keys, values = kv.chunk(2, dim=2)
    return torch.cat([original(keys, axis), values.repeat(axis.size, 1, 1, 1)], dim=2)


def segments_by_rank(original, x, axis):
    """gather_segments that leaves the segments in the order of the ranks."""
    return gather_rows(x, axis)


def causal_segments(original, q, k, v, cfg, axis, **options):
    """attend_segments with the causal mask."""
    return original(q, k, v, dataclasses.replace(cfg, objective="causal"), axis, **options)


def masked_rows_of_one_rank(original, x, targets, cp):
    """MaskedHead.masked_rows as if the rank had its share of every sequence's masked tokens."""
    return original(x, targets, dataclasses.replace(cp, size=1))


def reduced_elsewhere(original, head, *args, name, group):
    """MaskedHead.__init__ that sums the gradient of one parameter over another group."""
    original(head, *args)
    head.get_parameter(name).reduction_axis = group


# -----------------------------------------------------------------------------
# Stages and chunks

def neighbouring_stages(original, cfg, pp):
    """rank_layers with the stages of a rank one after the other."""
    return stage_layers(cfg, pp.size * cfg.pp_chunks)[pp.rank * cfg.pp_chunks:][:cfg.pp_chunks]


def piece_of_targets(original, cfg, mesh, source, first, count, device):
    """micro_batches in which each cp rank has one piece of the targets, not two segments."""
    uncut = dataclasses.replace(mesh, cp=Axis("cp"))
    whole = original(cfg, uncut, source, first, count, device)
    batches = original(cfg, mesh, source, first, count, device)
    return [(x, y.chunk(2, 1)[mesh.cp.rank]) for (x, _), (_, y) in zip(batches, whole, strict=True)]


def embedding_again(original, model, tokens, targets=None, places=None, hidden=None, chunk=0):
    """GPT.forward whose tied last rank adds the embedding to the input of its first chunk."""
    if hidden is not None and chunk == 0 and model.wte is not None:
        positions = model._positions(tokens.size(1), None, tokens.device)
        hidden = hidden + model._embed(tokens, positions)
    return original(model, tokens, targets, places, hidden, chunk=chunk)


def receive_at_once(original, ring, op):
    """Ring.receive that does not wait for the message."""
    received, _ = ring.inbox.pop(op, (None, None))
    return received


# -----------------------------------------------------------------------------
# ZeRO

class LateWork:
    """The handle of a collective that starts only when it is waited for."""

    def __init__(self, start):
        self.start = start

    def wait(self):
        self.start().wait()


def late_gather(original, comm, bucket):
    """Comm.start_gather that starts when it is waited for."""
    return LateWork(lambda: original(comm, bucket))


def garbage_in(bucket):
    """Give a ShardedBucket memory for its weights, with NaN in it."""
    bucket.storage.resize_(bucket.nbytes)
    bucket.flat.fill_(torch.nan)


def poisoned_fetch(original, bucket):
    """ShardedBucket.fetch into memory that holds NaN until the weights have come.

    The memory that ZeRO-3 takes for weights on their way is often what it freed, with the same bits in it.
    """
    if not bucket.is_whole():
        garbage_in(bucket)
        bucket.gather_handle = bucket.comm.start_gather(bucket)


def grads_of_first_slice(original, optimizer, cfg, data_parallel):
    """Optimizer.__init__ with the gradients of every bucket's first slice."""
    original(optimizer, cfg, data_parallel)
    first = [bucket.grad[:bucket.master.numel()] for bucket in data_parallel.buckets]
    optimizer.__class__ = type("Faulty", (type(optimizer),), {"grads": first})


def average_of_slice(original, comm, bucket):
    """SlotComm.add_to_total that averages."""
    bucket.grad[bucket.own_slice].div_(bucket.axis.size)
    original(comm, bucket)


def last_sum(original, comm, bucket):
    """SlotComm.add_to_total that forgets earlier micro-batches."""
    bucket.grad_total.zero_()
    original(comm, bucket)


def sum_of_first_slice(original, comm, bucket):
    """SlotComm.add_to_total of the first slice on every rank."""
    bucket.grad[bucket.own_slice].copy_(bucket.grad[:bucket.grad_total.numel()].clone())
    original(comm, bucket)


def given_at_once(original, slot, bucket):
    """Slot.give_to that does not take out the sum of the last user."""
    slot.user = bucket


def free_nothing(original, bucket):
    """ShardedBucket.free that keeps the memory."""
    bucket.wait_for_weights()


def nothing_fetched_in_backward(original, zero, part, backward=False):
    """ZeRO3.move_to_part whose weights in backward are garbage."""
    def fetch(bucket):
        if not bucket.is_whole():
            garbage_in(bucket)
    with mock.patch.object(ShardedBucket, "fetch", fetch) if backward else contextlib.nullcontext():
        original(zero, part, backward)


def move_without_waiting(original, zero, part, backward=False):
    """ZeRO3.move_to_part that does not wait for the weights in backward."""
    with mock.patch.object(DataParallel, "provide_weights") if backward else contextlib.nullcontext():
        original(zero, part, backward)


def move_one_part_late(original, zero, part, backward=False):
    """ZeRO3.move_to_part that moves to the part that backward has just left."""
    original(zero, part + 1 if backward else part, backward)


# ZeRO-1's all-gather of the weights overlaps with other work: reading the weights too early is a race, and a
# test may miss it. With this change, which is no fault, the all-gather starts only when it is waited for.
LATE = ("ddp.Comm.start_gather", late_gather)
POISON = ("zero.ShardedBucket.fetch", poisoned_fetch)


# -----------------------------------------------------------------------------
# The faults

FAULTS = {  # name: (model, (ranks, layout), a fault as arguments of planted[, more faults])
    # sums of gradients
    "sharded weights summed over the stage": (
        LLAMA, TP, *group("dp", "stage")),
    "norm weights not summed over tp": (
        LLAMA, TP, *group("stage", "dp")),
    "norm weights not summed over dp": (
        LLAMA, DP_TP, *group("stage", "tp")),
    "gradients averaged, not summed": (
        LLAMA, DP, "ddp.Bucket.wait_grads", grad_average),
    "loss divided by the local tokens": (
        LLAMA, DP, *token_count(1 / 2)),  # of 2 ranks
    "tied embedding not summed over the stages": (
        GPT2, PP, *group("tied", "dp")),
    "bucket reduced after the first micro-batch": (
        LLAMA, DP, "ddp.DataParallel.announce_backward", always_last,
        ("ddp.Bucket.start_sum", reduce_and_wait)),
    "same data on every dp rank": (
        LLAMA, DP, "corpus.batches.micro_batches", functools.partial(other_coordinates, dp=0)),
    # norm and clipping
    "norm of the local shard": (
        LLAMA, ZERO, "optim.Optimizer.stats", stats_of_local_norm),
    "norm counts replicated weights once per rank": (
        LLAMA, TP, "ddp.Bucket.count_factor", functools.partial(constant, value=1)),
    "clip by the local norm": (
        LLAMA, TP, "optim.Optimizer.divisor", divisor_by_local_norm),
    "bucket padding counted as zero gradients": (
        LLAMA, ZERO, "optim.Optimizer.num_zeros", "- padding", ""),
    "loss counted by every tp rank": (
        LLAMA, TP, "optim.Optimizer.stats", stats_of_all_tp_losses),
    # Tensor and sequence parallelism
    "scatter_rows backward without the all-gather": (
        LLAMA, TP, "parallel._ScatterRows.backward", repeated_grad),
    "scatter_rows backward sums twice": (
        LLAMA, TP, "parallel._ScatterRows.backward", grad_times_ranks),
    "gather_rows backward without the sum": (
        LLAMA, TP, "parallel._GatherRows.backward", own_rows),
    "softmax with the local maximum": (
        LLAMA, TP, "parallel.Axis.all_reduce", without_maximum),
    "targets at the wrong vocabulary offset": (
        LLAMA, TP, "vocab._VocabCrossEntropy.forward", target_of_first_rank),
    "vocabulary padding takes probability": (
        LLAMA, TP, "vocab.vocab_cross_entropy", without_padding),
    "embedding rows of another rank": (
        LLAMA, TP, "vocab.vocab_embedding", mirrored_rows),
    "every tp rank embeds the first rank's positions": (
        GPT2, TP4, "model.GPT._add_positions", positions_of_first_tp_rank),
    "row-linear bias added by every tp rank": (
        GPT2, TP, "layers.RowLinear.forward", bias_on_every_rank),
    "a replicated kv head of other query heads": (
        LLAMA, TP4, "attention.Attention.__init__", next_kv_head),
    "each shard draws its own weights": (
        LLAMA, TP, "model.normal_from_key", draw_of_this_rank),
    # pipeline
    "backward of the newest micro-batch": (
        LLAMA, PP, SEVERAL_STAGES, "awaiting_backward.pop((i, chunk))", "awaiting_backward.popitem()[1]"),
    "last stage's loss not divided": (
        LLAMA, PP, SEVERAL_STAGES, "out / n_trained", "out / len(batches)"),
    "loss of one stage not divided": (LLAMA, DP, ONE_STAGE, "loss / n_trained", "loss / len(batches)"),
    # chunks: interleaved stages
    "a rank's stages side by side": (
        FOUR, CHUNKS, "pipeline.rank_layers", neighbouring_stages),
    "every chunk through the first one's blocks": (
        FOUR, CHUNKS, "model.GPT.forward", "range(first, end)", "range(*self.chunks[0])"),
    "a tied last rank embeds again": (
        dict(GPT2, n_layer=4), CHUNKS, "model.GPT.forward", embedding_again),
    "balance loss divided by the chunks": (
        dict(MOE, n_layer=4), CHUNKS, *router_loss_weight(1 / 2)),  # of 2 chunks
    "messages read before they arrive": (
        FOUR, CHUNKS, "pipeline.Ring.receive", receive_at_once,
        ("pipeline.Ring.start_exchange", ".new_empty(", ".new_zeros(")),
    "bucket reduced before a chunk's last micro-batch": (
        FOUR, (4, dict(pp=2, pp_chunks=2)), SEVERAL_STAGES,
        "backwards_done[chunk] ==", "sum(backwards_done) >=",
        ("ddp.Bucket.start_sum", reduce_and_wait)),
    # ZeRO-1
    "weights not gathered": (
        LLAMA, ZERO, "ddp.DataParallel.on_updated", nothing),
    "forward does not wait for the weights": (
        LLAMA, ZERO, *LATE, ("ddp.DataParallel.provide_weights", nothing)),
    "weights read before they arrive": (
        LLAMA, ZERO, *LATE, ("ddp.Bucket.wait_for_weights", nothing)),
    "every rank steps the first slice": (
        LLAMA, ZERO, "optim.Optimizer.__init__", "bucket.master for",
        "bucket.flat[:bucket.flat.numel() // bucket.n_slices] for"),
    "every slice stepped with the first slice's gradient": (
        LLAMA, ZERO, "optim.Optimizer.__init__", grads_of_first_slice),
    # ZeRO-2
    "slices averaged, not summed": (
        LLAMA, ZERO2, "zero.SlotComm.add_to_total", average_of_slice),
    "only the last micro-batch is kept": (
        LLAMA, ZERO2, "zero.SlotComm.add_to_total", last_sum),
    "the last micro-batch is not waited for": (
        LLAMA, ZERO2, "zero.SlotBucket.wait_grads", "self.finish_reduce()", "pass"),
    "a slot is given on before its sum was taken out": (
        MOE, ZERO2, "zero.Slot.give_to", given_at_once),
    "another bucket's gradients stay in the padding": (
        MOE, ZERO2, "zero.SlotBucket.start_sum", "self.grad[self.filled:].zero_()", "pass"),
    "every rank keeps the first slice's sum": (
        LLAMA, ZERO2, "zero.SlotComm.add_to_total", sum_of_first_slice),
    # ZeRO-3
    "weights gathered before the step, used after it": (
        LLAMA, ZERO3, "zero.ShardedBucket.free", free_nothing),
    "backward does not gather again": (
        LLAMA, ZERO3, "zero.ZeRO3.move_to_part", nothing_fetched_in_backward),
    "backward does not wait for the weights": (
        LLAMA, ZERO3, *LATE, POISON, ("zero.ZeRO3.move_to_part", move_without_waiting)),
    "backward gathers a part too late": (
        LLAMA, ZERO3, *LATE, POISON, ("zero.ZeRO3.move_to_part", move_one_part_late)),
    "norm of slices counted as of replicas": (
        LLAMA, ZERO3, "ddp.Bucket.count_factor", one_replica),
    # context parallelism
    "positions as if each cp rank had one piece": (
        LLAMA, CP, "model.GPT._positions", one_piece),
    "learned positions of the first cp rank": (
        GPT2, CP, "model.GPT._positions", first_positions),
    "targets as if each cp rank had one piece": (
        LLAMA, CP, "corpus.batches.micro_batches", piece_of_targets),
    "mask off by one segment": (
        LLAMA, CP, "attention.attend_segments", "(axis.rank + 1) *", "(axis.rank + 2) *"),
    "mask aligned at the first key": (
        LLAMA, CP, "attention.lower_right_mask", upper_left_mask),
    "keys gathered, values not": (
        LLAMA, CP, "parallel.gather_segments", gathered_keys_alone),
    "gathered keys in the order of the ranks": (
        LLAMA, CP, "parallel.gather_segments", segments_by_rank),
    "gradients of keys and values not summed over cp": (
        LLAMA, CP, "parallel._GatherRows.backward", own_rows),
    "sharded weights summed over dp only": (
        LLAMA, (4, dict(cp=2)), *group("dpcp", "dp")),
    "tied embedding summed without cp": (
        GPT2, (4, dict(cp=2, pp=2)), *group("tied", "pp")),
    "loss divided by the tokens of all cp ranks as if they were others": (
        LLAMA, CP, *token_count(2)),
    "balance loss's counts not summed over cp": (
        MOE, CP, "parallel.Axis.all_reduce", functools.partial(not_over, name="cp")),
    # experts
    "experts summed over dp": (
        MOE, EP, *group("edp", "dp")),
    "the same experts on every ep rank": (
        MOE, EP, "model.initial_weights", "p.offset[0] + ", ""),
    "balance loss not divided by dp": (
        MOE, DP, *router_loss_weight(2)),
    "balance loss's counts not summed over tp": (
        MOE, TP, "moe.MoE.router_loss", "tp.all_reduce(chosen", "(chosen"),
    # dropout
    "the same dropout on every dp rank": (
        dict(LLAMA, dropout=0.2), DP, "pipeline.dropout_seeds",
        functools.partial(other_coordinates, dp=0)),
    # masked language model
    "the bias on the logits not summed over dp": (
        BERT, DP, "model.MaskedHead.__init__",
        functools.partial(reduced_elsewhere, name="bias", group="tp")),
    "the head's dense layer not summed over tp": (
        BERT, TP, "model.MaskedHead.__init__",
        functools.partial(reduced_elsewhere, name="dense.weight", group="dp")),
    "the tied head of the last stage is a copy": (
        BERT, PP, *group("tied", "dp")),
    "the causal mask is left on over cp": (
        BERT, CP, "attention.attend_segments", causal_segments),
    "a head for the masked tokens that a rank of cp has on average": (
        BERT, CP, "model.MaskedHead.masked_rows", masked_rows_of_one_rank),
    # These faults change every layout alike: only the comparison with plain PyTorch detects them
    "weight decay on norms": (
        LLAMA, ONE, "ddp.uses_weight_decay", functools.partial(constant, value=True)),
    "micro-batches overwrite each other": (
        LLAMA, ONE, "ops.flat.accumulate", overwriting_accumulate),
    "loss not divided by the number of micro-batches": (
        LLAMA, ONE, *token_count(1 / 2)),  # of 2 micro-batches
    "no clipping": (
        LLAMA, ONE, "optim.Optimizer.divide_gradients", nothing),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    base, place, *faults = FAULTS[name]
    more = [fault for fault in faults if isinstance(fault, tuple)]
    first = faults[:len(faults) - len(more)]
    check = run_with_faults(base, place, [first, *more])
    with pytest.raises(AssertionError):
        check()


CONTROLS = {str((base, place)): (base, place) for base, place, *_ in FAULTS.values()}


@pytest.mark.parametrize("key", CONTROLS, ids=lambda key: str(list(CONTROLS).index(key)))
def test_runs_without_faults_pass(key):
    run_with_faults(*CONTROLS[key])()


def test_a_delayed_all_gather_is_no_fault():
    run_with_faults(LLAMA, ZERO, [LATE])()
    run_with_faults(LLAMA, ZERO3, [LATE, POISON])()
    run_with_faults(GPT2, ONE)()


def raise_error(world):
    raise ZeroDivisionError


def test_faults_are_removed_after_an_error():
    fault = "ddp.uses_weight_decay", functools.partial(constant, value=True)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(1, with_faults, [fault], raise_error)
    run_with_faults(LLAMA, ONE)()


def test_generation_detects_a_chunk_that_caches_nothing():
    fault = "generate.next_logits", "cache=cache,", "cache=cache if chunk == 0 else Cache(),"
    family = test_sample.FAMILIES["llama"]
    (want,) = run_ranks(1, test_sample.texts, family)
    layout = dict(family, pp=2, pp_chunks=2)
    assert want not in run_ranks(2, with_faults, [fault], test_sample.texts, layout)


def loss_of_large_logits(world, words):
    """Return the loss of large logits, and this rank's gradient.

    The exponentials of these logits overflow unless the maximum is subtracted first.
    """
    tp = make_mesh(world, tp=world.size).tp
    z, target = large_logits(words)
    z = z.chunk(tp.size, dim=1)[tp.rank].clone().requires_grad_()
    loss = vocab_cross_entropy(z, target, words, tp)
    loss.backward()
    return loss.item(), z.grad


def large_logits(words):
    rng = torch.Generator().manual_seed(words)
    z = 1e4 * torch.randn(6, 128, generator=rng, dtype=torch.float64)
    return z, torch.randint(words, (6,), generator=rng)


def run_large_logits(n, words, faults=()):
    """The loss over n tp ranks -> check(): AssertionError if loss or gradient differ from F.cross_entropy."""
    z, target = large_logits(words)
    z.requires_grad_()
    F.cross_entropy(z[:, :words], target, reduction="sum").backward()
    want = F.cross_entropy(z[:, :words], target, reduction="sum").item()
    losses, grads = zip(*run_ranks(n, with_faults, faults, loss_of_large_logits, words), strict=True)

    def check():
        np.testing.assert_allclose(losses, want, rtol=1e-12)
        torch.testing.assert_close(torch.cat(grads, dim=1), z.grad, rtol=0, atol=1e-12)
    return check


def test_cross_entropy_of_large_logits():
    run_large_logits(2, 100)()
    run_large_logits(2, 60)()  # the second rank holds only padding
    where = "vocab._VocabCrossEntropy.forward"
    for words, fault in [(100, (where, "logits.max(dim=1).values", "torch.zeros_like(logits[:, 0])")),
                         (60, (where, "masked_fill(~mine, 0)", "mul(mine)"))]:  # -inf * 0
        check = run_large_logits(2, words, [fault])
        with pytest.raises(AssertionError):
            check()

"""Planted faults in dense models: one thing goes wrong on the ranks, and a comparison must fail.

faults.py says how they are planted. There is one for each mechanism: a sum over the wrong ranks, a slice of
another rank, a wait that is left out, a mask, a seed. test_moe_faults.py has those of the experts,
test_peers_faults.py those that larger projects reported. Three comparisons detect the faults here:
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
    CP,
    DP,
    GPT2,
    LLAMA,
    ONE,
    PP,
    TP,
    ZERO,
    ZERO2,
    ZERO3,
    assert_caught,
    constant,
    controls,
    group,
    nothing,
    other_coordinates,
    planted,
    run_with_faults,
    with_faults,
)
from pool import run_ranks

from ddp import DataParallel
from interface.layout import stage_layers
from layers import vocab_cross_entropy
from parallel import gather_rows, make_mesh, scatter_rows
from pipeline import Cache

TP4, CHUNKS = (4, dict(tp=4)), (2, dict(pp=2, pp_chunks=2))
FOUR = dict(LLAMA, n_layer=4)


# -----------------------------------------------------------------------------
# Functions that are called in the place of others: sums, statistics, updates

def stats_of_all_tp_losses(original, optimizer, loss, *args):
    return original(optimizer, loss * optimizer.data_parallel.mesh.tp.size, *args)


def zeros_of_padding(original, optimizer):
    with contextlib.ExitStack() as stack:
        for bucket in optimizer.data_parallel.buckets:
            stack.enter_context(mock.patch.object(bucket, "filled", bucket.flat.numel()))
        return original(optimizer)


def never_clips(original, optimizer, lr, grad_norm):
    return original(optimizer, lr, torch.zeros_like(grad_norm))


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


def move_without_waiting(original, zero, part, backward=False):
    with mock.patch.object(DataParallel, "provide_weights") if backward else contextlib.nullcontext():
        original(zero, part, backward)


# The all-gather of the weights overlaps with other work: reading the weights too early is a race, and a test
# may miss it. With this change, which is no fault, the all-gather starts only when it is waited for.
LATE = "ddp.Bucket.start_gather", late_gather


# -----------------------------------------------------------------------------
# Tensor and context parallelism, and the model

def maximum_of_zero(original, axis, x, *op):
    """Axis.all_reduce whose maximum is zero."""
    return x.zero_() if op else original(axis, x)


def target_of_first_rank(original, ctx, logits, target, axis):
    """_VocabCrossEntropy.forward as if every rank had the first words of the vocabulary."""
    return original(ctx, logits, target, dataclasses.replace(axis, rank=0))


def without_padding(original, logits, target, vocab_size, axis):
    """vocab_cross_entropy to which the vocabulary's padding are words."""
    return original(logits, target, logits.size(1) * axis.size, axis)


def bias_on_every_rank(original, layer, x):
    """RowLinear.forward that adds the bias before the sum."""
    return scatter_rows(F.linear(x, layer.weight, layer.bias), layer.tp)


def next_kv_head(original, attention, cfg, mesh, *args):
    """Attention.__init__ with the key/value heads dealt out one by one."""
    original(attention, cfg, mesh, *args)
    head = mesh.tp.rank % cfg.n_kv_head
    attention.wk.rows = attention.wv.rows = slice(head * attention.D, (head + 1) * attention.D)


def keys_of_next_rank(original, q, k, v, cfg, axis, **options):
    """attend_segments whose queries see the keys that those of the next rank see."""
    return original(q, k, v, cfg, dataclasses.replace(axis, rank=(axis.rank + 1) % axis.size), **options)


def segments_by_rank(original, x, axis):
    """gather_segments that leaves the segments in the order of the ranks."""
    return gather_rows(x, axis)


def causal_segments(original, q, k, v, cfg, axis, **options):
    """attend_segments with the causal mask."""
    return original(q, k, v, dataclasses.replace(cfg, objective="causal"), axis, **options)


# -----------------------------------------------------------------------------
# Stages and chunks

def neighbouring_stages(original, cfg, pp):
    """rank_layers with the stages of a rank one after the other."""
    return stage_layers(cfg, pp.size * cfg.pp_chunks)[pp.rank * cfg.pp_chunks:][:cfg.pp_chunks]


def newest_first(original, ring, n, forward, backward):
    """Ring.walk whose backwards take the newest micro-batch."""
    waiting = []

    def noted(i, chunk, hidden):
        waiting.append((i, chunk))
        return forward(i, chunk, hidden)

    return original(ring, n, noted, lambda i, chunk, grad: backward(*waiting.pop(), grad))


def received_too_early(original, ring, op):
    """Ring.receive that returns the memory as it is before the message comes."""
    received = original(ring, op)
    return None if received is None else torch.zeros_like(received)


def cached_by_first_chunk(original, model, tokens, cache=None, chunk=0, **options):
    """GPT.forward of which only the first chunk remembers keys and values."""
    return original(model, tokens, cache=Cache() if chunk else cache, chunk=chunk, **options)


# -----------------------------------------------------------------------------
# The faults

FAULTS = {  # name: (model, (ranks, layout), faults as arguments of planted)
    # Data, sums, norms
    "the same data on every dp rank": (
        LLAMA, DP, ("corpus.samples.micro_batches", functools.partial(other_coordinates, dp=0))),
    "sharded weights summed over the stage": (LLAMA, TP, group("dp", "stage")),
    "loss counted by every tp rank": (LLAMA, TP, ("optim.Optimizer.stats", stats_of_all_tp_losses)),
    "padding counted as zero gradients": (LLAMA, ZERO, ("optim.Optimizer.num_zeros", zeros_of_padding)),
    # Tensor parallelism
    "targets at the wrong vocabulary offset": (
        LLAMA, TP, ("layers._VocabCrossEntropy.forward", target_of_first_rank)),
    "vocabulary padding takes probability": (LLAMA, TP, ("layers.vocab_cross_entropy", without_padding)),
    "row-linear bias added by every tp rank": (GPT2, TP, ("layers.RowLinear.forward", bias_on_every_rank)),
    "a replicated kv head of other query heads": (LLAMA, TP4, ("attention.Attention.__init__", next_kv_head)),
    # The pipeline
    "backward of the newest micro-batch": (LLAMA, PP, ("pipeline.Ring.walk", newest_first)),
    "a rank's stages side by side": (FOUR, CHUNKS, ("pipeline.rank_layers", neighbouring_stages)),
    "messages read before they arrive": (FOUR, CHUNKS, ("pipeline.Ring.receive", received_too_early)),
    # ZeRO
    "weights read before they arrive": (LLAMA, ZERO, LATE, ("ddp.Bucket.wait_weights", nothing)),
    "every rank updates the first slice": (LLAMA, ZERO, ("ddp.Bucket.slice_of_rank", first_slice)),
    "the last micro-batch is not waited for": (LLAMA, ZERO2, ("zero.SlotBucket.wait_sum", nothing)),
    "a slot is given on before its sum was taken out": (LLAMA, ZERO2, ("zero.Slot.give_to", given_at_once)),
    "weights from before the step, used after it": (LLAMA, ZERO3, ("zero.ShardedBucket.free", free_nothing)),
    "backward does not wait for the weights": (
        LLAMA, ZERO3, LATE, ("zero.ZeRO3.move_to_part", move_without_waiting)),
    # Context parallelism
    "the keys of another cp rank's queries": (LLAMA, CP, ("attention.attend_segments", keys_of_next_rank)),
    "gathered keys in the order of the ranks": (LLAMA, CP, ("parallel.gather_segments", segments_by_rank)),
    "the causal mask is left on over cp": (BERT, CP, ("attention.attend_segments", causal_segments)),
    # These faults change every layout alike: only the comparison with plain PyTorch detects them
    "weight decay on norms": (
        LLAMA, ONE, ("ddp.uses_weight_decay", functools.partial(constant, value=True))),
    "no clipping": (LLAMA, ONE, ("optim.Optimizer.step", never_clips)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    base, place, *faults = FAULTS[name]
    assert_caught(base, place, *faults)


@pytest.mark.parametrize("base,place", controls(FAULTS))
def test_runs_without_faults_pass(base, place):
    run_with_faults(base, place)()


def test_a_delayed_all_gather_is_no_fault():
    run_with_faults(LLAMA, ZERO, [LATE])()
    run_with_faults(LLAMA, ZERO3, [LATE])()
    run_with_faults(GPT2, ONE)()


def test_generation_detects_a_chunk_that_caches_nothing():
    fault = "model.GPT.forward", cached_by_first_chunk
    family = test_sample.FAMILIES["llama"]
    (want,) = run_ranks(1, test_sample.texts, family)
    layout = dict(family, pp=2, pp_chunks=2)
    assert want not in run_ranks(2, with_faults, [fault], test_sample.texts, layout)


# -----------------------------------------------------------------------------
# Planting itself

def wrong_rank(world):
    """Call make_mesh on the last rank alone; the others call nothing."""
    if world.rank == world.size - 1:
        make_mesh(world, groups=False)


def raise_error(world):
    raise ZeroDivisionError


def identical(original, *args, **kwargs):
    return original(*args, **kwargs)


def test_a_fault_that_nothing_comes_to_is_an_error():
    fault = "parallel.make_mesh", identical
    with pytest.raises(AssertionError, match="nothing has called parallel.make_mesh"), planted(*fault):
        pass
    with pytest.raises(AssertionError, match="no rank has called layers.vocab_embedding"):
        run_ranks(2, with_faults, [("layers.vocab_embedding", nothing)], wrong_rank)
    run_ranks(2, with_faults, [fault], wrong_rank)  # one rank is enough


def test_faults_are_removed_after_an_error():
    fault = "ddp.uses_weight_decay", functools.partial(constant, value=True)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(1, with_faults, [fault], raise_error)
    run_with_faults(LLAMA, ONE)()


# -----------------------------------------------------------------------------
# Large logits

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


def run_large_logits(words, *faults):
    """The loss over 2 tp ranks -> check(): AssertionError if loss or gradient differ from F.cross_entropy."""
    z, target = large_logits(words)
    z.requires_grad_()
    want = F.cross_entropy(z[:, :words], target, reduction="sum")
    want.backward()
    losses, grads = zip(*run_ranks(2, with_faults, faults, loss_of_large_logits, words), strict=True)

    def check():
        np.testing.assert_allclose(losses, want.item(), rtol=1e-12)
        torch.testing.assert_close(torch.cat(grads, dim=1), z.grad, rtol=0, atol=1e-12)
    return check


def test_cross_entropy_of_large_logits():
    run_large_logits(100)()
    run_large_logits(60)()  # the second rank holds only padding
    check = run_large_logits(100, ("parallel.Axis.all_reduce", maximum_of_zero))
    with pytest.raises(AssertionError):
        check()

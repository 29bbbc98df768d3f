"""Planted faults: each changes one thing in our code inside the worker processes, and a comparison must fail.

A fault is planted by name, (function, what is called in its place), wherever that reaches it; else by text,
(function, a piece of its source, the faulty piece). See `planted`.

The faults are those that larger projects shipped (a sum over the wrong ranks, a second division, clipping by
the local norm, ...), each written as one wrong line. Three comparisons detect them:
    layouts        every layout against one process         faults in what several ranks do
    plain PyTorch  one process against a plain loop         faults that a layout and its reference share
    large logits   the vocabulary-parallel loss at 1e4      faults that moderate numbers do not show
"""
import functools

import numpy as np
import pytest
import test_sample
import torch
import torch.nn.functional as F
from faults import (
    BALANCE,
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
    nothing,
    run_with_faults,
    with_faults,
)
from pool import run_ranks

from model import vocab_cross_entropy
from parallel import make_mesh

ONE, ZERO2, ZERO3, CP = (1, dict()), (2, dict(zero=2)), (2, dict(zero=3)), (2, dict(cp=2))  # ranks, layout
TP4, DP_TP, EP, CHUNKS = (4, dict(tp=4)), (4, dict(tp=2)), (2, dict(ep=2)), (2, dict(pp=2, pp_chunks=2))
FOUR = dict(LLAMA, n_layer=4)


# -----------------------------------------------------------------------------
# Functions that are called in the place of others

def one_replica(original, bucket):
    """Bucket.replica_weight as if the bucket were on one rank of its axis."""
    return 1 / bucket.axis.size


def grad_average(original, bucket):
    """Bucket.wait_grads that averages."""
    original(bucket)
    bucket.grad.div_(bucket.axis.size)


def reduce_and_wait(original, bucket):
    """Bucket.start_reduce that waits: a bucket that is reduced too early is then wrong in every run."""
    original(bucket)
    bucket.reduce_handle.wait()


def local_divisor(original, optimizer, grad_norm):
    """Optimizer.divisor of this rank's own gradients."""
    return original(optimizer, sum(grad.norm() ** 2 for grad in optimizer.grads) ** 0.5)


def poisoned_fetch(original, bucket):
    """ShardedBucket.fetch into memory that holds NaN until the weights have come.

    The memory that ZeRO-3 takes for weights on their way is often what it freed, with the same bits in it.
    """
    if not bucket.is_whole():
        bucket.storage.resize_(bucket.nbytes)
        bucket.flat.fill_(torch.nan)
        bucket.gather_handle = bucket.comm.start_gather(bucket)


class LateWork:
    """The handle of a collective that starts only when it is waited for."""

    def __init__(self, start):
        self.start = start

    def wait(self):
        self.start().wait()


def late_gather(original, comm, bucket):
    """Comm.start_gather that starts when it is waited for."""
    return LateWork(lambda: original(comm, bucket))


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
        LLAMA, DP, "train.Step.gradients", "* mesh.dp.size * cfg.micro", "* cfg.micro"),
    "tied embedding not summed over the stages": (
        GPT2, PP, *group("tied", "dp")),
    "bucket reduced after the first micro-batch": (
        LLAMA, DP, ONE_STAGE, "i == len(batches) - 1", "i == 0",
        ("ddp.Bucket.start_reduce", reduce_and_wait)),
    "same data on every dp rank": (
        LLAMA, DP, "train.micro_batches", "first + mesh.dp.rank * n", "first + 0 * n"),
    # norm and clipping
    "norm of the local shard": (
        LLAMA, ZERO, "optim.Optimizer.stats", "self.unscale(sums[1].sqrt())", "grad_squares.sqrt()"),
    "norm counts replicated weights once per rank": (
        LLAMA, TP, "ddp.Bucket.replica_weight", functools.partial(constant, value=1)),
    "clip by the local norm": (
        LLAMA, TP, "optim.Optimizer.divisor", local_divisor),
    "bucket padding counted as zero gradients": (
        LLAMA, ZERO, "optim.Optimizer.num_zeros", "- padding", ""),
    "loss counted by every tp rank": (
        LLAMA, TP, "optim.Optimizer.stats", "loss.double() / self.dp.mesh.tp.size", "loss.double()"),
    # tensor and sequence parallelism
    "scatter_rows backward without the all-gather": (
        LLAMA, TP, "parallel._ScatterRows.backward", "ctx.axis.all_gather(grad)",
        "torch.cat([grad] * ctx.axis.size)"),
    "scatter_rows backward sums twice": (
        LLAMA, TP, "parallel._ScatterRows.backward", "ctx.axis.all_gather(grad)",
        "ctx.axis.all_gather(grad) * ctx.axis.size"),
    "gather_rows backward without the sum": (
        LLAMA, TP, "parallel._GatherRows.backward", "ctx.axis.reduce_scatter(grad)",
        "grad.chunk(ctx.axis.size)[ctx.axis.rank]"),
    "softmax with the local maximum": (
        LLAMA, TP, "model._VocabCrossEntropy.forward",
        "axis.all_reduce(largest, MAX)", "pass"),
    "targets at the wrong vocabulary offset": (
        LLAMA, TP, "model._VocabCrossEntropy.forward", "low = axis.rank * logits.size(1)", "low = 0"),
    "vocabulary padding takes probability": (
        LLAMA, TP, "model.vocab_cross_entropy", "low = axis.rank * logits.size(1)", "low = 0"),
    "embedding rows of another rank": (
        LLAMA, TP, "model.vocab_embedding", "axis.rank * weight", "(axis.size - 1 - axis.rank) * weight"),
    "every tp rank embeds the first rank's positions": (
        GPT2, TP4, "model.GPT._add_positions", "torch.arange(first, first + n,", "torch.arange(n,"),
    "row-linear bias added by every tp rank": (
        GPT2, TP, "model.RowLinear.forward", "y = scatter_rows(partial_sum, self.tp)",
        "return scatter_rows(F.linear(x, self.weight, self.bias), self.tp)"),
    "a replicated kv head of other query heads": (
        LLAMA, TP4, "model.Attention.__init__", "tp.rank * G // tp.size", "tp.rank % G"),
    "each shard draws its own weights": (
        LLAMA, TP, "model.init_weights", '{seed}/{name}"', '{seed}/{name}/{p.offset}"'),
    # pipeline
    "backward of the newest micro-batch": (
        LLAMA, PP, SEVERAL_STAGES, "awaiting_backward.pop((i, chunk))",
        "awaiting_backward.popitem()[1]"),
    "last stage's loss not divided": (
        LLAMA, PP, SEVERAL_STAGES, "out / tokens", "out / len(batches)"),
    "loss of one stage not divided": (LLAMA, DP, ONE_STAGE, "loss / tokens", "loss / len(batches)"),
    # chunks: interleaved stages
    "a rank's stages side by side": (
        FOUR, CHUNKS, "pipeline.rank_layers", "[pp.rank::pp.size]",
        "[pp.rank * cfg.pp_chunks:][:cfg.pp_chunks]"),
    "every chunk through the first one's blocks": (
        FOUR, CHUNKS, "model.GPT.forward", "range(first, end)", "range(*self.chunks[0])"),
    "a tied last rank embeds again": (
        dict(GPT2, n_layer=4), CHUNKS, "model.GPT.forward", "if first == 0 else",
        "if first == 0 else hidden + self._embed(tokens, positions) if chunk == 0 and self.wte is not None "
        "else"),
    "balance loss divided by the chunks": (
        dict(MOE, n_layer=4), CHUNKS, SEVERAL_STAGES, BALANCE, f"{BALANCE} / len(model.chunks)"),
    "messages read before they arrive": (
        FOUR, CHUNKS, "pipeline.Ring.receive", "while not exchange.arrived", "while False",
        ("pipeline.Ring.start_exchange", "self.like.new_empty(", "self.like.new_zeros(")),
    "bucket reduced before a chunk's last micro-batch": (
        FOUR, (4, dict(pp=2, pp_chunks=2)), SEVERAL_STAGES,
        "backwards_done[chunk] ==", "sum(backwards_done) >=",
        ("ddp.Bucket.start_reduce", reduce_and_wait)),
    # ZeRO-1
    "weights not gathered": (
        LLAMA, ZERO, "ddp.DataParallel.on_updated", nothing),
    "forward does not wait for the weights": (
        LLAMA, ZERO, *LATE, ("ddp.DataParallel.provide_weights", nothing)),
    "weights read before they arrive": (
        LLAMA, ZERO, *LATE, ("ddp.Bucket.wait_for_weights", nothing)),
    "every rank steps the first slice": (
        LLAMA, ZERO, "optim.Optimizer.__init__", "bucket.master for",
        "bucket.flat[:bucket.flat.numel() // bucket.shards] for"),
    "every slice stepped with the first slice's gradient": (
        LLAMA, ZERO, "optim.Optimizer.__init__", "bucket.total", "bucket.grad[:bucket.master.numel()]"),
    # ZeRO-2
    "slices averaged, not summed": (
        LLAMA, ZERO2, "zero.SlotComm.add_sum", "bucket.grad[bucket.shard]",
        "bucket.grad[bucket.shard] / bucket.axis.size"),
    "only the last micro-batch is kept": (
        LLAMA, ZERO2, "zero.SlotComm.add_sum", "bucket.total.add_(part)", "bucket.total.copy_(part)"),
    "the last micro-batch is not waited for": (
        LLAMA, ZERO2, "zero.SlotBucket.wait_grads", "self.take_sum()", "pass"),
    "a slot is given on before its sum was taken out": (
        MOE, ZERO2, "zero.Slot.give_to", "self.user.take_sum()", "pass"),
    "another bucket's gradients stay in the padding": (
        MOE, ZERO2, "zero.SlotBucket.start_reduce", "self.grad[self.used:].zero_()", "pass"),
    "every rank keeps the first slice's sum": (
        LLAMA, ZERO2, "zero.SlotComm.add_sum", "bucket.grad[bucket.shard]",
        "bucket.grad[:bucket.total.numel()]"),
    # ZeRO-3
    "weights gathered before the step, used after it": (
        LLAMA, ZERO3, "zero.ShardedBucket.free", "self.storage.resize_(0)", "pass"),
    "backward does not gather again": (
        LLAMA, ZERO3, "zero.ZeRO3.move_to_part", "bucket.fetch()",
        "bucket.fetch() if not backward else bucket.is_whole() or "
        "(bucket.storage.resize_(bucket.nbytes), bucket.flat.fill_(torch.nan))"),
    "backward does not wait for the weights": (
        LLAMA, ZERO3, *LATE, POISON,
        ("zero.ZeRO3.move_to_part", "super().provide_weights(module)", "super()")),
    "backward gathers a part too late": (
        LLAMA, ZERO3, *LATE, POISON, ("zero.ZeRO3.provide_weights", "part - 1", "part")),
    "norm of slices counted as of replicas": (
        LLAMA, ZERO3, "ddp.Bucket.replica_weight", one_replica),
    # context parallelism
    "positions as if each cp rank had one piece": (
        LLAMA, CP, "model.GPT._positions", "cp.own_chunks(torch.arange(t * cp.size, device=device), 0)",
        "slice(t * cp.rank, t * cp.rank + t)"),
    "learned positions of the first cp rank": (
        GPT2, CP, "model.GPT._positions", "if cp.size == 1 or", "if True or"),
    "targets as if each cp rank had one piece": (
        LLAMA, CP, "corpus.shards.micro_batches", "mesh.cp.own_chunks(y, 1)",
        "y.chunk(2, 1)[mesh.cp.rank]"),
    "mask off by one chunk": (
        LLAMA, CP, "model.attend_chunks", "(axis.rank + 1) *", "(axis.rank + 2) *"),
    "mask aligned at the first key": (
        LLAMA, CP, "model.attend_up_to", "lower_right_mask(queries.size(2), end)",
        "torch.ones(queries.size(2), end, dtype=torch.bool).tril()"),
    "keys gathered, values not": (
        LLAMA, CP, "model.attend_chunks", ".permute(1, 2, 0, 3).chunk(2, dim=1)",
        ".permute(1, 2, 0, 3).chunk(2, dim=1)[0], v.repeat(1, 1, axis.size, 1)"),
    "gathered keys in the order of the ranks": (
        LLAMA, CP, "parallel.gather_chunks", "chunks[0::2] + chunks[::-2]", "chunks"),
    "gradients of keys and values not summed over cp": (
        LLAMA, CP, "parallel._GatherRows.backward", "ctx.axis.reduce_scatter(grad)",
        "grad.chunk(ctx.axis.size)[ctx.axis.rank]"),
    "sharded weights summed over dp only": (
        LLAMA, (4, dict(cp=2)), *group("dpcp", "dp")),
    "tied embedding summed without cp": (
        GPT2, (4, dict(cp=2, pp=2)), *group("tied", "pp")),
    "loss divided by the tokens of all cp ranks as if they were others": (
        LLAMA, CP, "train.Step.gradients", "* mesh.dp.size * cfg.micro", "* mesh.dpcp.size * cfg.micro"),
    "balance loss's counts not summed over cp": (
        MOE, CP, "moe.MoE.balancing_losses", "cp.all_reduce(total)", "total"),
    # experts
    "experts summed over dp": (
        MOE, EP, *group("edp", "dp")),
    "the same experts on every ep rank": (
        MOE, EP, "model.init_weights", "{p.offset[0] + i}", "{i}"),
    "balance loss not divided by dp": (
        MOE, DP, ONE_STAGE, BALANCE, "router_loss / len(batches)"),
    "balance loss's counts not summed over tp": (
        MOE, TP, "moe.MoE.balancing_losses", "tp.all_reduce(chosen", "(chosen"),
    # dropout
    "the same dropout on every dp rank": (
        dict(LLAMA, dropout=0.2), DP, "pipeline.dropout_seeds", "mesh.dp.rank * n_micro_batches", "0"),
    # masked language model
    "the bias on the logits not summed over dp": (
        BERT, DP, "model.MaskedHead.__init__", "if cfg.bias else None",
        "if cfg.bias else None; self.bias.reduce = 'tp'"),
    "the head's dense layer not summed over tp": (
        BERT, TP, "model.MaskedHead.__init__", "shard=False)",
        "shard=False); self.dense.weight.reduce = 'dp'"),
    "the tied head of the last stage is a copy": (
        BERT, PP, *group("tied", "dp")),
    "the causal mask is left on over cp": (
        BERT, CP, "model.Attention.attend", "self.mesh.cp, self.causal", "self.mesh.cp, True"),
    "a head for the masked tokens that a rank of cp has on average": (
        BERT, CP, "model.MaskedHead.masked_rows", "n_masked(t * cp.size)", "n_masked(t)"),
    # faults of every layout: only the comparison with plain PyTorch detects them
    "weight decay on norms": (
        LLAMA, ONE, "ddp.uses_weight_decay", functools.partial(constant, value=True)),
    "micro-batches overwrite each other": (
        LLAMA, ONE, "ops.flat.accumulate", "total.add_(", "total.copy_("),
    "loss not divided by the number of micro-batches": (
        LLAMA, ONE, "train.Step.gradients", "len(batches) * mesh", "mesh"),
    "no clipping": (
        LLAMA, ONE, "optim.Optimizer.divide_gradients", nothing),
}


# -----------------------------------------------------------------------------
# comparing


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
    """-> loss, this rank's gradient of logits whose exponentials overflow without subtracting the maximum."""
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
    where = "model._VocabCrossEntropy.forward"
    for words, fault in [(100, (where, "logits.max(dim=1).values", "torch.zeros_like(logits[:, 0])")),
                         (60, (where, "masked_fill(~mine, 0)", "mul(mine)"))]:  # -inf * 0
        check = run_large_logits(2, words, [fault])
        with pytest.raises(AssertionError):
            check()

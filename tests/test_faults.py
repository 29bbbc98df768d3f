"""Planted faults: each changes one thing in our code inside the worker processes, and a comparison must fail.

A fault is planted by name, (function, what is called in its place), wherever that reaches it; else by text,
(function, a piece of its source, the faulty piece). See `planted`.

The faults are those that larger projects shipped (a sum over the wrong ranks, a second division, clipping by
the local norm, ...), each written as one wrong line. Three comparisons detect them:
    layouts        every layout against one process         faults in what several ranks do
    plain PyTorch  one process against a plain loop         faults that a layout and its reference share
    large logits   the vocabulary-parallel loss at 1e4      faults that moderate numbers do not show
After them: replicas after 20 steps, an fp16 overflow on one rank, dropout and recomputation.
"""
import contextlib
import functools
import importlib
import inspect
import json
import types
from operator import attrgetter
from unittest import mock

import numpy as np
import pytest
import test_layouts
import test_sample
import torch
import torch.nn.functional as F
from pool import run_ranks
from test_layouts import compare, run

import train
from config import Config
from corpus.shards import Synthetic
from model import GPT, init_weights, vocab_cross_entropy
from optim import learning_rate
from parallel import make_mesh
from runtime.launch import World

LLAMA, GPT2, MOE, BERT = (
    dict(base, micro_batch=2, n_layer=2)
    for base in (test_layouts.LLAMA, test_layouts.GPT2, test_layouts.MOE, test_layouts.BERT))


PACKAGES = "ops", "fast", "runtime", "corpus", "cost", "interface"


def sequences(n, layout):
    """-> sequences per step, in micro-batches of 2: two of them on every dp rank, four with two stages."""
    return 4 * (n // layout.get("tp", 1) // layout.get("cp", 1))


# -----------------------------------------------------------------------------
# planting

def find(where):
    """Return the function that has this name, also that of a property or under a decorator."""
    parts = where.split(".")
    depth = 2 if parts[0] in PACKAGES else 1
    module = importlib.import_module(".".join(parts[:depth]))
    found = attrgetter(".".join(parts[depth:]))(module)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found)


def planted(where, *fault):
    """Plant a fault in the function `where`, however other modules have imported it.

    By name: planted(where, replacement). Calls of the function become replacement(original, *arguments).
    By text: planted(where, old, new) replaces a piece of the function's source.
    """
    return replaced(where, *fault) if callable(fault[0]) else edited(where, *fault)


@contextlib.contextmanager
def edited(where, old, new):
    """Replace `old` by `new` in the source of the function `where`."""
    function = find(where)
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{where} contains {old!r} {source.count(old)} times: rewrite this fault"
    source = source.replace(old, new)
    if source[0] == " ":
        source = "class _:\n" + source  # A method stands in a class, so that super() works.
    codes = [compile(source, f"fault in {where}", "exec")]
    while codes[0].co_name != function.__name__:
        codes[:1] = [c for c in codes[0].co_consts if inspect.iscode(c)]
    original, function.__code__ = function.__code__, codes[0]
    try:
        yield
    finally:
        function.__code__ = original


@contextlib.contextmanager
def replaced(where, replacement):
    """Call replacement(original, *arguments) in the place of the function `where`.

    The function object stays, because other modules may hold it: only its code is exchanged.
    """
    function = find(where)
    assert not function.__code__.co_freevars, f"{where} is a closure: plant this fault by text"
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(before[0], function.__globals__, function.__name__, before[1])
    original.__kwdefaults__ = before[2]
    name = f"_replacement_of_{function.__name__}"
    function.__globals__[name] = functools.partial(replacement, original)
    code = {}
    exec(f"def {function.__name__}(*args, **kwargs): return {name}(*args, **kwargs)", code)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = code[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        del function.__globals__[name]


# Functions that are called in the place of others. They are of this module because they travel to the ranks.

def nothing(original, *args, **kwargs):
    """Leave the call out."""


def other_group(original, mesh, tp_dim, *args, of, instead):
    """parallel.reduction_group with another answer where it is `of`."""
    group = original(mesh, tp_dim, *args)
    return instead if group == of else group


def constant(original, *args, value):
    return value


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


def with_faults(world, faults, fn, *args):
    """fn on this rank with the faults planted. They are removed afterwards, also after an error."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(planted(*fault))
        return fn(world, *args)


# ZeRO-1's all-gather of the weights overlaps with other work: reading the weights too early is a race, and a
# test may miss it. With this change, which is no fault, the all-gather starts only when it is waited for.
LATE = ("ddp.Comm.start_gather", late_gather)
POISON = ("zero.ShardedBucket.fetch", poisoned_fetch)
GROUP = "parallel.reduction_group"


def group(of, instead):
    """The fault that sums the gradients of one group over another."""
    return GROUP, functools.partial(other_group, of=of, instead=instead)


ONE, DP, ZERO, PP = (1, dict()), (2, dict()), (2, dict(zero=1)), (2, dict(pp=2))  # ranks, layout
ZERO2, ZERO3 = (2, dict(zero=2)), (2, dict(zero=3))
TP, TP4, DP_TP, EP = (2, dict(tp=2)), (4, dict(tp=4)), (4, dict(tp=2)), (2, dict(ep=2))
CP = (2, dict(cp=2))

CHUNKS, FOUR = (2, dict(pp=2, pp_chunks=2)), dict(LLAMA, n_layer=4)

ONE_STAGE, SEVERAL_STAGES = "pipeline.one_stage", "pipeline.several_stages"
BALANCE = "balance_loss / (len(batches) * model.mesh.dp.size)"

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
        LLAMA, PP, SEVERAL_STAGES, "in_flight.pop((i, chunk))",
        "in_flight.popitem()[1]"),
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
        MOE, DP, ONE_STAGE, BALANCE, "balance_loss / len(batches)"),
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

def plain_pytorch(flags, batch):
    """Train as one rank's run() does, by a loop that shares only model and learning rate with train.py
    -> (stats of each step, {name: full array}, None), as test_layouts.reference()."""
    cfg = Config(**flags)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    model = GPT(cfg, make_mesh(World(rank=0, size=1)), cfg.vocab_size).double()
    init_weights(model, cfg.seed)
    named = dict(model.named_parameters())
    vectors = {n for n in named if "norm" in n or n.endswith("bias")}
    adam = torch.optim.AdamW([dict(params=[p for n, p in named.items() if n not in vectors]),
                              dict(params=[p for n, p in named.items() if n in vectors], weight_decay=0.0)],
                             betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    stats, want = [], {}
    for step in range(1, test_layouts.STEPS + 1):
        x, y = source.batch((step - 1) * batch, batch)
        adam.zero_grad()
        loss = model(x, y)[0] / y.numel()
        loss.backward()
        want.update({f"step {step} grad {n}": p.grad.numpy().copy() for n, p in named.items()})
        zeros = sum((p.grad == 0).sum().item() for p in named.values())
        size = torch.cat([p.detach().flatten() for p in named.values()]).norm().item()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), cfg.clip).item()
        stats.append([loss.item(), norm, zeros, size])
        for group in adam.param_groups:
            group["lr"] = learning_rate(cfg, step)
        adam.step()
    for n, p in named.items():
        want["end " + n] = p.detach().numpy()
        want.update({f"end {k}/{n}": adam.state[p][k].numpy() for k in ("exp_avg", "exp_avg_sq")})
    return stats, want, None


def run_with_faults(base, place, faults=(), batch=None):
    """Train with the faults -> check(): AssertionError if the results differ from one rank's. The run is over
    before check() is called, so a run that crashes does not count as a fault that was caught."""
    n, layout = place
    batch = batch or sequences(n, layout)
    chunks = test_layouts.capacity_ranks(base, layout)
    want = plain_pytorch(base, batch) if n == 1 else test_layouts.reference(dict(base), batch, *chunks)
    results = run_ranks(n, with_faults, faults, run, dict(base, **layout), batch)

    def check():
        with mock.patch.object(test_layouts, "run_ranks", lambda *job: results), \
                mock.patch.object(test_layouts, "reference", lambda *job: want):
            compare(base, n, batch, **layout)
    return check


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


@pytest.mark.parametrize("fault", [
    ("zero.ZeRO3.move_to_part", "backward or is_head", "is_head"),
    ("zero.ZeRO3.move_to_part", "bucket not in wanted:", "bucket not in wanted and backward:")],
    ids=["backward fetches the wrong part ahead", "forward frees nothing"])
def test_weights_in_memory_that_should_not_be_there(fault):
    results = run_ranks(2, with_faults, [fault], test_layouts.parts_alive, LLAMA)
    with pytest.raises(AssertionError, match="are whole, not"):
        test_layouts.check_parts(results, 2, False)


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


# -----------------------------------------------------------------------------
# replicas after many steps

def run_20(world, flags, batch):
    with mock.patch.object(test_layouts, "STEPS", 20):
        return run(world, flags, batch)


def assert_replicas_equal(results):
    """Assert that all ranks' copies of a shard have the same bits -> number of shards with several copies."""
    found = {}
    for seen in results:
        for name, local in seen["replicas"].items():
            found.setdefault((name, seen["offsets"][name][1]), []).append(local)
    for (name, _), copies in found.items():
        for copy in copies:
            error = np.abs(copy - copies[0]).max()
            assert copy.tobytes() == copies[0].tobytes(), f"replicas of {name} differ by {error}"
    return sum(len(copies) > 1 for copies in found.values())


@pytest.mark.parametrize("base,n,layout", [
    (LLAMA, 4, dict(tp=2)), (LLAMA, 4, dict(tp=2, zero=1)), (GPT2, 2, dict(pp=2)),
    (GPT2, 4, dict(pp=2, zero=1)), (dict(LLAMA, n_kv_head=1), 2, dict(tp=2)),
    (MOE, 4, dict(tp=2, ep=2, zero=1)), (MOE, 4, dict(cp=2, ep=2, zero=1)),
], ids=["dp2tp2", "dp2tp2zero1", "pp2tied", "dp2pp2tiedzero1", "tp2kv1", "dp2tp2ep2zero1", "dp2cp2ep2zero1"])
def test_replicas_have_equal_bits_after_20_steps(base, n, layout):
    results = run_ranks(n, run_20, dict(base, **layout, dtype="fp32", steps=20), sequences(n, layout))
    assert assert_replicas_equal(results) > 0, "no shard is on several ranks"
    losses = [row[0] for row in results[0]["stats"]]
    assert len(set(losses)) == 20 and np.isfinite(losses).all()


def test_a_drifting_replica_is_detected():
    fault = group("stage", "dp")
    results = run_ranks(2, with_faults, [fault], run_20, dict(LLAMA, tp=2, dtype="fp32", steps=20), 4)
    with pytest.raises(AssertionError, match="replicas of .*norm"):
        assert_replicas_equal(results)


# -----------------------------------------------------------------------------
# fp16: an overflow on one rank

OVERFLOW_STEP = 3


def run_with_overflow(world, flags, out):
    """A run of train.py; in OVERFLOW_STEP one element of one gradient of the last rank is infinite
    -> for each step (weights, moments and Adam's t are unchanged, the step is refused, loss scale)."""
    seen = []

    class StepWithOverflow(train.Step):
        def __call__(self, batches, number, *rest):
            model, dp, opt = self.model, self.dp, self.opt

            def state():
                model.provide_weights(model)
                moments = [s for m in opt.masters for s in opt.adam.state[m].values()]
                return [t.clone() for t in (*opt.masters, *moments, *(b.flat for b in dp.buckets))]
            before = state()
            p = next(model.parameters())
            hook = p.register_hook(
                lambda g: g.flatten().index_fill(0, torch.tensor(5), torch.inf).view_as(g)
                if number == OVERFLOW_STEP and world.rank == world.size - 1 else g)
            stats, found_inf = super().__call__(batches, number, *rest)
            hook.remove()
            same = [torch.equal(a, b) for a, b in zip(before, state(), strict=True)]
            seen.append((all(same), bool(found_inf), opt.loss_scale.item()))
            return stats, found_inf

    flags = dict(flags, dtype="fp16", data="synthetic", out=out, steps=5, log_every=1,
                 eval_every=0, save_every=0, plot=False, global_batch=sequences(world.size, flags))
    with mock.patch.object(train, "Step", StepWithOverflow), mock.patch("signal.signal"):
        train.Run(Config(**flags), world).train()
    return seen


def assert_step_refused_everywhere(results, out):
    for seen in results:
        same, refused, scale = zip(*seen, strict=True)
        assert refused == (False, False, True, False, False)
        assert same == refused
        assert scale == (65536, 65536, 32768, 32768, 32768)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["nan_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert [row["loss_scale"] for row in rows] == [65536, 65536, 32768, 32768, 32768]


@pytest.mark.parametrize("n,layout", [DP, TP, PP, ZERO], ids=str)
def test_overflow_on_one_rank_skips_the_step_on_all(n, layout, tmp_path):
    results = run_ranks(n, run_with_overflow, dict(LLAMA, **layout), str(tmp_path / "run"))
    assert_step_refused_everywhere(results, tmp_path / "run")


def test_overflow_decided_by_each_rank_alone_is_detected(tmp_path):
    fault = ("optim.Optimizer.step", "~torch.isfinite(grad_norm)",
             "~torch.isfinite(sum(g.sum() for g in self.grads))")
    flags, out = dict(LLAMA, zero=1), tmp_path / "run"
    results = run_ranks(2, with_faults, [fault], run_with_overflow, flags, str(out))
    with pytest.raises(AssertionError):
        assert_step_refused_everywhere(results, out)


# -----------------------------------------------------------------------------
# dropout

@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_over_dp_equals_one_rank(family):
    base = dict(LLAMA if family == "llama" else GPT2, dropout=0.2)
    compare(base, 2, 8)
    compare(base, 2, 8, zero=1)


def assert_same_bits(results, others):
    for seen, other in zip(results, others, strict=True):
        assert seen["stats"] == other["stats"], "losses and norms"
        for (name, a, *_), (_, b, *_) in zip(seen["shards"], other["shards"], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("n,layout", [TP, PP, (4, dict(tp=2, pp=2, zero=1))], ids=str)
def test_recompute_repeats_the_dropout(n, layout):
    """Every gradient and moment has the same bits with recomputation and without; dropout has an effect."""
    flags, batch = dict(LLAMA, **layout, dropout=0.2), sequences(n, layout)
    stored = run_ranks(n, run, flags, batch)
    for what in ("full", "selective"):
        assert_same_bits(run_ranks(n, run, dict(flags, recompute=what), batch), stored)
    if n == 2:
        without = run_ranks(n, run, dict(flags, dropout=0.0), batch)
        assert without[0]["stats"][0][0] != stored[0]["stats"][0][0]
    fault = ("model.Block.with_recompute", "self.dropout > 0", "False")
    other = run_ranks(n, with_faults, [fault], run, dict(flags, recompute="full"), batch)
    with pytest.raises(AssertionError):
        assert_same_bits(other, stored)

"""Deliberate faults: each one edits a line of ours inside the workers, and the layout comparison must fail.

A comparison that passes is worth what it can see. The faults are those of the issue trackers of our peers (a sum over the
wrong ranks, a second division, a clip from the local norm, ...), written as the line they would be. Three things look:
    the layouts   every layout against one process            faults that one process does not have
    plain         one process against ten lines of PyTorch    faults that every layout would share with its reference
    sharp         vocabulary-parallel loss on huge logits     what moderate numbers cannot show
"""
import contextlib
import importlib
import inspect
import json
from operator import attrgetter
from unittest import mock

import numpy as np
import pytest
import test_layouts
import torch
import torch.nn.functional as F
from pool import run_ranks
from test_layouts import GPT2, LLAMA, check, reference, run

import train
from config import Config
from data import Synthetic
from launch import World
from model import GPT, initialise
from parallel import make_mesh, vocab_cross_entropy

LLAMA, GPT2 = (dict(family, micro_batch=2) for family in (LLAMA, GPT2))


# -----------------------------------------------------------------------------
# planting

@contextlib.contextmanager
def planted(where, old, new):
    """Inside, the function `where` runs with `old` replaced by `new` in its source, however it was imported."""
    module, _, path = where.partition(".")
    function = inspect.unwrap(attrgetter(path)(importlib.import_module(module)))
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{where} has {source.count(old)} times {old!r}: plant this fault anew"
    source = ("class _:\n" if source[0] == " " else "") + source.replace(old, new)  # a method may say super()
    codes = [compile(source, f"fault in {where}", "exec")]
    while codes[0].co_name != function.__name__:
        codes[:1] = [c for c in codes[0].co_consts if inspect.iscode(c)]
    right, function.__code__ = function.__code__, codes[0]
    try:
        yield
    finally:
        function.__code__ = right


def with_faults(world, edits, fn, *args):
    with contextlib.ExitStack() as stack:
        for edit in edits:
            stack.enter_context(planted(*edit))
        return fn(world, *args)


# ZeRO-1's weights travel while others compute, so reading too early is a race. This loses it always: they leave when waited for
LATE = ("parallel.Bucket.send_weights",
        "self.gather = all_gather_single(self.flat, self.flat[self.mine], group=self.axis.group, async_op=True)",
        "self.gather = type('Late', (), {'wait': lambda _: "
        "all_gather_single(self.flat, self.flat[self.mine], group=self.axis.group)})()")

DP, ZERO, TP, TP4, PP = (2, dict()), (2, dict(zero=1)), (2, dict(tp=2)), (4, dict(tp=4)), (2, dict(pp=2))
DP_TP, ONE = (4, dict(tp=2)), (1, dict())

FAULTS = {  # name: (model, (ranks, layout), where, the line, the fault) with more (where, line, fault) after it
    # the sums
    "sharded weights summed over the stage": (LLAMA, TP, "parallel.parameter", 'else "dp")', 'else "stage")'),
    "norm weights not summed over tp": (LLAMA, TP, "parallel.parameter", '("stage" if', '("dp" if'),
    "norm weights not summed over dp": (LLAMA, DP_TP, "parallel.parameter", '("stage" if', '("tp" if'),
    "gradients averaged, not summed": (
        LLAMA, DP, "parallel.Bucket.finish", "self.work.wait()", "self.work.wait(), self.grad.div_(self.axis.size)"),
    "loss divided by the local tokens": (LLAMA, DP, "train.train_step", "* mesh.dp.size * cfg.micro", "* cfg.micro"),
    "tied embedding not summed over the stages": (
        GPT2, PP, "model.GPT.__init__", 'reduce="tied" if tied_copy else None', "reduce=None"),
    "bucket reduced after the first micro-batch": (
        LLAMA, DP, "pipeline.forward_backward", "dp.last = done == n", "dp.last = done == 1"),
    "same data on every dp rank": (LLAMA, DP, "train.micro_batches", "first + mesh.dp.rank * n", "first + 0 * n"),
    # norm and clipping
    "norm of the own shard": (
        LLAMA, ZERO, "optim.Optimizer.totals", "dist.all_reduce(total, group=self.world.group)",
        "own = total[1].clone(); dist.all_reduce(total, group=self.world.group); total[1] = own"),
    "norm counts replicated weights tp times": (
        LLAMA, TP, "parallel.Bucket.__init__", "1 / (axis.size // self.shards)", "1"),
    "clip by the local norm": (
        LLAMA, TP, "optim.Optimizer.step", "((grad_norm + 1e-6) /",
        "((sum(m.grad.norm() ** 2 for m in self.masters) ** 0.5 + 1e-6) /"),
    "bucket padding counted as zero gradients": (
        LLAMA, ZERO, "optim.Optimizer.totals", "g.numel() - padding -", "g.numel() -"),
    "loss counted by every tp rank": (LLAMA, TP, "optim.Optimizer.totals", "loss.double() / self.tp.size", "loss.double()"),
    # tensor and sequence parallelism
    "scatter_rows backward without the all-gather": (
        LLAMA, TP, "parallel._ScatterRows.backward", "all_gather(g, ctx.axis)", "torch.cat([g] * ctx.axis.size)"),
    "scatter_rows backward sums again": (
        LLAMA, TP, "parallel._ScatterRows.backward", "all_gather(g, ctx.axis)", "all_gather(g, ctx.axis) * ctx.axis.size"),
    "gather_rows backward without the sum": (
        LLAMA, TP, "parallel._GatherRows.backward", "reduce_scatter(g, ctx.axis)", "g.chunk(ctx.axis.size)[ctx.axis.rank]"),
    "softmax with the local maximum": (
        LLAMA, TP, "parallel._VocabCrossEntropy.forward", "dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)", "pass"),
    "targets at the wrong vocabulary offset": (
        LLAMA, TP, "parallel._VocabCrossEntropy.forward", "low = axis.rank * z.size(1)", "low = 0"),
    "vocabulary padding takes probability": (
        LLAMA, TP, "parallel.vocab_cross_entropy", "low = axis.rank * logits.size(1)", "low = 0"),
    "embedding of another rank's words": (
        LLAMA, TP, "parallel.vocab_embedding", "axis.rank * weight", "(axis.size - 1 - axis.rank) * weight"),
    "positions of the first rank's rows": (GPT2, TP4, "model.GPT._embed", "arange(self.mesh.tp.rank * n, (self.mesh.tp.rank + 1) * n",
                                           "arange(0, n"),
    "row-linear bias added by every tp rank": (
        GPT2, TP, "model.RowLinear.forward", "y = scatter_rows(F.linear(x, self.weight), self.tp)",
        "return scatter_rows(F.linear(x, self.weight, self.bias), self.tp)"),
    "replicated kv: the wrong head": (
        LLAMA, TP4, "model.Attention.__init__", "mesh.tp.rank * G // mesh.tp.size + i", "mesh.tp.rank % G + i"),
    "each shard draws its own weights": (LLAMA, TP, "model.initialise", "{seed}/{name}", "{seed}/{name}/{p.offset}"),
    # pipeline
    "backward of the newest micro-batch": (LLAMA, PP, "pipeline.forward_backward", "flying.pop(0)", "flying.pop()"),
    "activations' gradient not sent on": (
        LLAMA, PP, "pipeline.forward_backward", "link.swap(link.prev, send=grad, receive=i", 
        "link.swap(link.prev, send=grad * 0, receive=i"),
    # ZeRO-1
    "weights not gathered": (LLAMA, ZERO, "parallel.DataParallel.send_weights", "bucket.send_weights()", "pass"),
    "forward does not wait for the weights": (
        LLAMA, ZERO, *LATE, ("parallel.DataParallel.arrive", "bucket.arrive()", "pass")),
    "weights read before they arrive": (LLAMA, ZERO, *LATE, ("optim.Optimizer.wait", "b.arrive()", "pass")),
    "every rank steps the first slice": (
        LLAMA, ZERO, "optim.Optimizer.__init__", "own = b.flat[b.mine]", "own = b.flat[:b.flat.numel() // b.shards]"),
    "every slice stepped with the first one's gradient": (
        LLAMA, ZERO, "optim.Optimizer.__init__", "b.grad[b.mine]", "b.grad[:m.numel()]"),
    # dropout
    "the same dropout on every dp rank": (
        dict(LLAMA, dropout=0.2), DP, "train.train_step", "micro = mesh.dp.rank * len(batches) + i", "micro = i"),
    # shared by every layout: only the plain loop sees these
    "weight decay on norms": (LLAMA, ONE, "parallel.decays", "p.ndim >= 2", "True"),
    "micro-batches overwrite each other": (LLAMA, ONE, "parallel.Bucket.add", "add_(p.grad)", "copy_(p.grad)"),
    "loss of each micro-batch a mean": (LLAMA, ONE, "train.train_step", "len(batches) * mesh", "mesh"),
    "clipping forgotten": (LLAMA, ONE, "optim.Optimizer.step", "m.grad.div_(divide)", "pass"),
}
BATCH = 8  # sequences per step, micro-batch 2: on two dp ranks each has two micro-batches, on two stages there are four


def plain(flags, batch):
    """What run() finds, by a loop with nothing of ours but the model and the learning rate: totals, {name: whole array}."""
    cfg, steps = Config(**flags), test_layouts.STEPS
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    model = GPT(cfg, make_mesh(World(rank=0, size=1, local_rank=0, local_size=1, launcher="test")), cfg.vocab_size).double()
    for p in model.parameters():
        p.used = cfg.vocab_size
    initialise(model, cfg.seed)
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if "norm" not in n and not n.endswith("bias")]
    vectors = [p for n, p in named.items() if "norm" in n or n.endswith("bias")]
    adam = torch.optim.AdamW([dict(params=matrices), dict(params=vectors, weight_decay=0.0)],
                             betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    totals, want = [], {}
    for step in range(1, steps + 1):
        x, y = source.batch((step - 1) * batch, batch)
        adam.zero_grad()
        loss = model(x, y) / y.numel()
        loss.backward()
        want.update({f"step {step} grad {n}": p.grad.numpy().copy() for n, p in named.items()})
        before = torch.cat([p.detach().reshape(-1) for p in named.values()]).norm().item()
        zeros = sum((p.grad == 0).sum().item() for p in named.values())
        totals.append([loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).item(), zeros, before])
        for group in adam.param_groups:
            group["lr"] = train.learning_rate(cfg, step)
        adam.step()
    for n, p in named.items():
        want["end " + n] = p.detach().numpy()
        want.update({f"end {k}/{n}": adam.state[p][k].numpy() for k in ("exp_avg", "exp_avg_sq")})
    return totals, want


def judge(base, place, edits):
    """Run with the edits planted; -> what is wrong with the result. A fault that only crashes is not caught by comparing."""
    n, layout = place
    results = run_ranks(n, with_faults, edits, run, dict(base, **layout), BATCH)
    check(base, results, *(plain(base, BATCH) if n == 1 else reference(base, BATCH)))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    base, place, where, old, new, *more = FAULTS[name]
    n, layout = place
    results = run_ranks(n, with_faults, [(where, old, new), *more], run, dict(base, **layout), BATCH)
    want = plain(base, BATCH) if n == 1 else reference(base, BATCH)
    with pytest.raises(AssertionError) as caught:
        check(base, results, *want)
    print(f"CAUGHT {name} | {n} ranks {layout} | {str(caught.value).strip()}")

"""Experts over ep through symmetric memory (fast/symm_mem.py) beside all_to_all, ZeRO-1 by copies between
GPUs (fast/buckets.py) beside gloo, and the size of the experts' buffers (fast.graph.BufferSizer).

The ranks' buffers are shared memory here (shared.py), so a missing barrier is really missing.
"""
import contextlib
import dataclasses
import functools
import io
import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from pool import run_ranks
from shared import LateRank, SharedBuffer
from test_moe import TINY, block, block_over_ep, gpu_branches, owned, tokens, whole_layer

import moe
import train
from config import Config
from corpus.samples import Synthetic, micro_batches
from ddp import BUCKET_ELEMENTS, Bucket
from fast import buckets, choose, graph, padded, symm_mem
from fast.buckets import PEER
from fast.graph import GraphedStep
from optim import Optimizer
from parallel import Axis, make_mesh
from zero import LEVELS


def through_symmetric_memory(world, *args):
    with gpu_branches(), mock.patch.object(moe.AllToAll, "plan", None), \
            mock.patch.object(symm_mem, "SymmetricBuffer", SharedBuffer):
        return block_over_ep(world, *args)


@pytest.mark.parametrize("flags", [dict(top_k=1), dict(top_k=2, mlp="gelu")], ids=["swiglu", "gelu"])
@pytest.mark.parametrize("kind, slack", [("plain", 2.0), ("skewed", 4.0)])
def test_symmetric_memory_gives_the_results_of_one_rank(kind, slack, flags):
    """Static shapes over ep, with garbage in every row that nobody wrote."""
    want = run_ranks(4, block_over_ep, 1, flags, kind)
    for ep in (2, 4):
        got = run_ranks(4, through_symmetric_memory, ep, flags, kind, slack)
        for (mine, _), (theirs, _) in zip(got, want, strict=True):
            for name, a in mine.items():
                np.testing.assert_allclose(a, theirs[name], rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("ep, E, rank", [(2, 4, 1), (4, 64, 0), (3, 9, 2), (8, 384, 5)])
def test_the_layout_of_buffers_written_out_as_loops(ep, E, rank):
    counts, e, rows = torch.randint(0, 9, (ep, E)), E // ep, 10_000
    starts, ends = [], []
    for owner in range(ep):
        row = 0
        for expert in range(owner * e, (owner + 1) * e):
            for sender in range(ep):
                if sender == rank:
                    starts.append(owner * rows + row)
                row += counts[sender, expert].item()
            if owner == rank:
                ends.append(row)
    found = symm_mem.layout_of_buffers(counts, rank, rows)
    assert [numbers.tolist() for numbers in found] == [starts, ends]


# -----------------------------------------------------------------------------
# Whole steps

def three_steps(world, flags, slack=0.0, late=False, without="", peer_copies=False,
                bucket_elements=BUCKET_ELEMENTS):
    """Take three training steps.

    slack: 0 for the plain step; otherwise the --ep-slack of a GraphedStep, which captures nothing during its
    first graph.WARMUP_STEPS steps. late: whether the last rank is kept behind. without: the function whose
    barrier is left out. peer_copies: whether PEER's buckets move gradients and weights.

    Return the StepStats of each step, the pieces of this rank, how many steps were done again, and how many
    rows the buffers then hold.
    """
    cfg, device = Config(**flags), torch.device("cpu")
    if slack:
        cfg = dataclasses.replace(cfg, ep_slack=slack)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
    source, stats, sizer = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), [], None
    with contextlib.ExitStack() as stack:
        def patch(*args):
            stack.enter_context(mock.patch.object(*args))
        cut = {zero: functools.partial(kind, bucket_elements=bucket_elements)
               for zero, kind in LEVELS.items()}
        stack.enter_context(mock.patch.dict(train.LEVELS, cut))
        for module in (symm_mem, buckets):
            patch(module, "SymmetricBuffer", SharedBuffer)
        if slack:
            patch(choose, "static_shapes", lambda *_: True)
        choice = choose.choose(cfg, mesh, device)
        assert choice.graph == bool(slack) and not choice.peer_copies and not choice.single_microbatch
        choice = choice._replace(peer_copies=peer_copies, single_microbatch=peer_copies)
        model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, device, choice=choice)
        assert all((type(bucket) in PEER.values()) == (peer_copies and bucket.n_slices > 1)
                   for bucket in data_parallel.buckets)
        same = [bucket.grad.dtype == bucket.flat.dtype for bucket in data_parallel.buckets]
        assert not peer_copies or all(same)
        step = graph.make_step(train.Step(cfg, model, data_parallel, opt), choice)
        if slack:
            assert isinstance(step, GraphedStep) and len(step.eager_buckets) == peer_copies
            sizer = step.sizer
        if sizer:
            sizer.wait = 2  # They may shrink after the second step.
        keeper = LateRank(mesh.world) if late else None
        stack.enter_context(mock.patch.multiple(SharedBuffer, late=keeper, without=without))
        if late:
            for name in ("start_all_reduce", "all_gather"):
                patch(Axis, name, keeper.counted(getattr(Axis, name)))
        for number in range(1, 4):
            batches = micro_batches(cfg, mesh, source, (number - 1) * 8, 8, device)
            stats.append(torch.stack(step(batches, number)[0]).tolist())
        model.provide_weights(model)
        if sizer and choice.symm_mem:
            assert {layer.dispatcher.buffers.rows.rows for layer in sizer.layers} == {sizer.rows}
        if late:
            keeper.begin()  # the last rank need not stay behind any more
    return stats, owned(data_parallel, opt), sizer and sizer.n_retries, sizer and sizer.rows


plain = {}


def plain_steps(n, flags, steps=three_steps):
    """Return what n ranks compute without what is tested here. Equal arguments are computed once."""
    key = n, steps.__name__, *sorted(flags.items())
    if key not in plain:
        plain[key] = run_ranks(n, steps, flags)
    return plain[key]


def assert_equal_steps(got, want):
    """Statistics and pieces of three_steps() on every rank."""
    for (stats, mine, *_), (expected, theirs, *_) in zip(got, want, strict=True):
        np.testing.assert_allclose(stats, expected, rtol=1e-10)
        for (name, a, *_), (_, b, *_) in zip(mine["pieces"], theirs["pieces"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)


def steps_are_equal(got, want):
    try:
        assert_equal_steps(got, want)
    except AssertionError:
        return False
    return True


# -----------------------------------------------------------------------------
# Several nodes: messages of a fixed size (fast/padded.py)

def padded_block(world, ep, flags, kind, slack):
    """A block over ep whose messages have room for `slack` times the balanced rows; 0: exact messages.
    Return output, gradients of x and of the parameters, rows needed and in use."""
    mesh = make_mesh(world, ep=ep)
    layer = block(mesh, aux_coef=0.3, **flags)
    if slack:
        layer.dispatcher = padded.PaddedAllToAll(layer.cfg, mesh)
    x = (tokens(kind, layer).detach() + 0.01 * (1 + world.rank)).requires_grad_()
    layer.dispatcher.rows_in_use = in_use = int(slack * x.size(0) * layer.K)
    with mock.patch.object(moe.AllToAll, "plan", None) if slack else contextlib.nullcontext():
        y, router_loss = whole_layer(layer, x)
    (y.square().sum() + router_loss).backward()
    tensors = (y.detach(), x.grad, *(p.grad for p in layer.parameters()))
    return [t.numpy() for t in tensors if t is not None], layer.dispatcher.rows_needed.item(), in_use


def padded_block_of_a_gpu(world, *args):
    with gpu_branches():
        return padded_block(world, *args)


@pytest.mark.parametrize("flags", [dict(top_k=1), dict(top_k=2, mlp="gelu")], ids=["swiglu", "gelu"])
def test_messages_of_a_fixed_size_give_the_results_of_exact_ones(flags):
    """Empty experts, and one expert that gets everything; garbage where a grouped product leaves some."""
    for kind, ep in (("plain", 2), ("skewed", 4)):
        exact = run_ranks(4, padded_block, ep, flags, kind, 0.0)
        fixed = run_ranks(4, padded_block_of_a_gpu, ep, flags, kind, float(ep))
        for (got, needed, in_use), (want, *_) in zip(fixed, exact, strict=True):
            assert 0 < needed <= in_use and len(got) == len(want) > 4
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def padded_steps(world, flags, slack):
    plan, made = padded.PaddedAllToAll.plan, []
    with mock.patch.object(choose, "peer_access", lambda *_: False), mock.patch.object(
            padded.PaddedAllToAll, "plan", lambda self, *args: made.append(plan(self, *args)) or made[-1]):
        steps = three_steps(world, flags, slack)
    assert any(plan.send is None for plan in made)  # messages of a fixed size
    return steps


@pytest.mark.parametrize("steps, layout", [
    (three_steps, dict(ep=2, tp=2, zero=1)), (padded_steps, dict(ep=2, zero=1, tp=2)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (three_steps, dict(ep=4)), (three_steps, dict(ep=2, zero=1)), (padded_steps, dict(ep=4))))],
    ids=lambda value: value.__name__ if callable(value) else str(value))
def test_a_step_that_overflowed_is_done_again(steps, layout):
    """Of buffers in symmetric memory, and of messages of a fixed size."""
    flags = dict(TINY, **layout)
    want = plain_steps(4, flags)
    for slack, retried in ((1.0, True), (float(layout["ep"]), False)):
        got = run_ranks(4, steps, flags, slack)
        assert len({rows for *_, rows in got}) == 1  # the same on all ranks
        assert all((n_retries > 0) == retried for *_, n_retries, _ in got)
        assert_equal_steps(got, want)


# -----------------------------------------------------------------------------

@pytest.mark.parametrize("without", ["", "forward", "backward", "publish"])
def test_a_late_rank_is_waited_for(without):
    """Without one of the barriers the results are wrong, or NaN, for which the step is done again."""
    flags = dict(TINY, ep=2, top_k=1)
    want = plain_steps(2, flags)
    got = run_ranks(2, three_steps, flags, 2.0, True, without)
    right = steps_are_equal(got, want) and not any(n_retries for *_, n_retries, _ in got)
    assert right == (not without)


# -----------------------------------------------------------------------------
# ZeRO by copies between GPUs

def peer_steps(world, flags, slack=0.0, late=False, without=""):
    """three_steps(), gradients and weights of many small buckets carried by PEER's."""
    with contextlib.ExitStack() as stack:
        for kind, name in ((Optimizer, "step"), (Bucket, "copy_gradients")):
            stack.enter_context(mock.patch.object(kind, name, late_function(getattr(kind, name))))
        return three_steps(world, flags, slack, late, without, peer_copies=True, bucket_elements=300)


def late_function(function):
    """The function, before which SharedBuffer.late keeps the last rank behind."""
    def called_late(self, *args):
        if SharedBuffer.late is not None:
            SharedBuffer.late.fall_behind()
        return function(self, *args)
    return called_late


def gloo_steps(world, flags):
    return three_steps(world, flags, bucket_elements=300)


@pytest.mark.parametrize("layout", [
    dict(ep=2), dict(shard=2),
    *(pytest.param(layout, marks=pytest.mark.long) for layout in (dict(), dict(tp=2), dict(cp=2)))], ids=str)
def test_gradients_and_weights_by_copies_between_gpus(layout):
    """Without a graph (slack 0) each bucket's weights set out when it is stepped; with one only the
    embedding's do. At slack 1.0 a step of experts is done again."""
    flags = dict(TINY, zero=1, micro_batch=2 * layout.get("tp", layout.get("cp", 1)), **layout)
    want = plain_steps(4, flags, gloo_steps)
    for slack in (0.0, 1.0, 4.0) if "ep" in layout else (0.0, 1.0):
        got = run_ranks(4, peer_steps, flags, slack)
        for *_, n_retries, _ in got:
            assert bool(n_retries) == (slack == 1.0 and "ep" in layout)
        assert_equal_steps(got, want)


@pytest.mark.parametrize("layout", [
    dict(zero=2, ep=2), dict(zero=3, tp=2),
    *(pytest.param(layout, marks=pytest.mark.long) for layout in (
        dict(zero=2), dict(zero=3), dict(zero=3, ep=2, cp=2), dict(zero=2, shard=2), dict(zero=3, shard=2)))],
    ids=str)
def test_zero_2_and_3_by_copies_between_gpus(layout):
    """Two micro-batches a step; two slots for many small buckets."""
    flags = dict(TINY, micro_batch=layout.get("tp", 1) * layout.get("cp", 1), **layout)
    assert_equal_steps(run_ranks(4, peer_steps, flags), plain_steps(4, flags, gloo_steps))


@pytest.mark.parametrize("layout, without", [
    *itertools.product([dict(zero=1), dict(zero=1, shard=2)], ["", "start_sum", "start_gather"]),
    *itertools.product([dict(zero=3)], ["", "start_reduce", "start_gather"])], ids=str)
def test_a_rank_whose_gradients_are_late_is_waited_for(layout, without):
    size = 2 * layout.get("shard", 1)
    flags = dict(TINY, micro_batch=8 // size, **layout)
    want = plain_steps(size, flags, gloo_steps)
    got = run_ranks(size, peer_steps, flags, 0.0, True, without)
    assert steps_are_equal(got, want) == (not without)


# -----------------------------------------------------------------------------
# Which GPUs reach each other's memory

def reach_on_hosts(world, names):
    with mock.patch.object(choose.socket, "gethostname", lambda: names[world.rank]):
        mesh = make_mesh(world, ep=2)
        return choose.peer_access(mesh, mesh.ep, torch.device("cpu"))


@pytest.mark.parametrize("names, answer", [("aaaa", True), ("aabb", True), ("aaab", False), ("abab", False)])
def test_all_ranks_know_whether_any_group_spans_two_hosts(names, answer):
    assert run_ranks(4, reach_on_hosts, names) == [answer] * 4


def reach_on_gpus(world, gpus, access, broken):
    def share(*_):
        if world.rank == broken:
            raise ValueError("cannot reach")
    mesh, said = make_mesh(world, ep=2), io.StringIO()
    with mock.patch.multiple(torch.cuda, device_count=lambda: 4, can_device_access_peer=lambda *_: access), \
            mock.patch.multiple(symm_mem, SymmetricBuffer=share), \
            contextlib.redirect_stdout(said):
        return choose.peer_access(mesh, mesh.ep, torch.device("cuda", gpus[world.rank])), said.getvalue()


@pytest.mark.parametrize("gpus, access, broken, answer, words", [
    ((0, 1, 2, 3), True, None, True, ""),
    ((0, 0, 1, 1), True, None, False, "cannot access"),
    ((0, 1, 2, 3), False, None, False, "cannot access"), ((0, 1, 2, 3), True, 2, False, ""),
    ((0, 5, 2, 3), True, None, False, "cannot access")])
def test_all_ranks_know_whether_gpus_reach_each_other(gpus, access, broken, answer, words):
    """Two processes of one GPU, GPUs without peer access, a GPU that another process does not see, an
    allocation that fails. Rank 0 says why."""
    answers, (said, *others) = zip(*run_ranks(4, reach_on_gpus, gpus, access, broken), strict=True)
    assert answers == (answer,) * 4 and others == [""] * 3
    assert words in said and said.count("\n") == bool(words)

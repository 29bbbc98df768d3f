"""Experts over ep with static shapes (moe.plan_windows, graph.Rooms) beside messages of exactly their rows.

The ranks' windows are shared memory here (shared.py), so what is missing without a barrier is really missing.
"""
import dataclasses
import functools
from types import SimpleNamespace as Some
from unittest import mock

import numpy as np
import pytest
import torch
from pool import run_ranks
from runs import TINY as RUN
from runs import session
from shared import SharedWindow
from test_moe import TINY, as_on_a_gpu, on_ranks, owned

import moe
import train
from config import Config
from corpus.data import Synthetic
from fast import graph as graph_
from fast import near as near_
from fast import window
from fast.graph import Rooms
from optim import Optimizer
from parallel import DataParallel, make_mesh


def through_windows(world, *args):
    with as_on_a_gpu(), mock.patch.object(moe.MoE, "plan_dropless", None), \
            mock.patch.object(window, "Window", SharedWindow):
        return on_ranks(world, *args)


@pytest.mark.parametrize("flags", [dict(top_k=1), dict(top_k=2, mlp="gelu"), dict(capacity_factor=0.5)],
                         ids=["swiglu", "gelu", "capacity"])
@pytest.mark.parametrize("kind, slack", [("plain", 2.0), ("skewed", 4.0)])
def test_windows_give_the_same(kind, slack, flags):
    """Static shapes over ep, with garbage in every row that holds nothing."""
    want = run_ranks(4, on_ranks, 1, flags, kind)
    for ep in (2, 4):
        got = run_ranks(4, through_windows, ep, flags, kind, slack)
        for (mine, _), (theirs, _) in zip(got, want, strict=True):
            for name, a in mine.items():
                np.testing.assert_allclose(a, theirs[name], rtol=0, atol=1e-11, err_msg=name)


def with_a_graph(world, flags, slack, nap=0.0, without=""):
    """Three steps as train.py does them with a CUDA graph: up to graph.WARM steps it records nothing."""
    cfg = Config(**flags)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    model, dp, opt = train.build(cfg, mesh, cfg.vocab_size, torch.device("cpu"))
    source, totals, graph = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), [], None
    if slack:
        with mock.patch.object(train, "static_shapes", lambda *_: True), \
                mock.patch.object(window, "Window", SharedWindow):
            graph = train.recorded(dataclasses.replace(cfg, ep_slack=slack), mesh, model, dp, opt)
        if graph.rooms:  # open at once
            graph.rooms.every, graph.rooms.steps, graph.rooms.slack = 2, 0, graph.rooms.limit
        mock.patch.multiple(SharedWindow, nap=nap, without=without).start()
    for step in range(1, 4):
        batches = train.micro_batches(cfg, mesh, source, (step - 1) * 8, 8, torch.device("cpu"))
        totals.append(train.train_step(cfg, mesh, model, dp, opt, batches, step, True, graph)[0].tolist())
    opt.wait()
    mock.patch.stopall()
    rooms = graph and graph.rooms
    return totals, owned(dp, opt), rooms and rooms.redone, rooms and rooms.slack


def capacity_with_a_graph(world, flags):
    pushes = []
    with as_on_a_gpu(), mock.patch.object(SharedWindow, "late", lambda self: pushes.append(1)):
        return with_a_graph(world, flags, 1.0)[:2], len(pushes)


@pytest.mark.parametrize("layout", [dict(ep=4), dict(ep=2, tp=2, zero=1)], ids=str)
def test_a_capacity_through_windows(layout):
    flags = dict(TINY, capacity_factor=0.75, top_k=2, **layout)
    want = run_ranks(4, with_a_graph, flags, 0)
    got = run_ranks(4, capacity_with_a_graph, flags)
    for ((totals, mine), pushes), (expected, theirs, *_) in zip(got, want, strict=True):
        assert pushes > 0
        np.testing.assert_allclose(totals, expected, rtol=1e-10)
        for (name, a, *_), (_, b, *_) in zip(mine["pieces"], theirs["pieces"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("layout", [dict(ep=4), dict(ep=2, zero=1), dict(ep=2, tp=2, zero=1)], ids=str)
def test_a_step_whose_rows_did_not_fit_is_done_again(layout):
    flags = dict(TINY, **layout)
    want = run_ranks(4, with_a_graph, flags, 0)
    for slack, again in ((1.0, True), (float(layout["ep"]), False)):
        got = run_ranks(4, with_a_graph, flags, slack)
        assert len({slack for *_, slack in got}) == 1  # chosen alike
        for (totals, mine, redone, room), (expected, theirs, *_) in zip(got, want, strict=True):
            assert (redone > 0) == again and 0 <= room <= layout["ep"]
            np.testing.assert_allclose(totals, expected, rtol=1e-10)
            for (name, a, *_), (_, b, *_) in zip(mine["pieces"], theirs["pieces"], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("without", ["", "forward", "backward", "offer"])
def test_a_rank_that_is_late_is_waited_for(without):
    """5 ms late before whatever it does. Without one of the barriers other results come out, or NaN, for
    which the step is done again."""
    flags = dict(TINY, ep=2, top_k=1)
    want = run_ranks(2, with_a_graph, flags, 0)
    got = run_ranks(2, with_a_graph, flags, 2.0, 0.005, without)
    same = True
    for (totals, mine, redone, _), (expected, theirs, *_) in zip(got, want, strict=True):
        same = same and not redone and np.allclose(totals, expected, rtol=1e-10)
        for (_, a, *_), (_, b, *_) in zip(mine["pieces"], theirs["pieces"], strict=True):
            same = same and np.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert same == (not without)


def test_rooms_follow_the_need():
    """100 copies of a rank: what the fullest needed and a tenth, closed above the limit."""
    layer = Some(need=torch.zeros((), dtype=torch.int64))
    cfg, one = Some(micro_batch=1, seq_len=100, top_k=1), Some(size=1)
    with mock.patch.object(moe, "layers", lambda model: {0: layer}), \
            mock.patch.object(graph_, "open_windows"):
        rooms = Rooms(Some(cfg=cfg, mesh=Some(world=one, tp=one, ep=Some(size=4))), 2.5, every=2)

    def after(*needs, void=False):
        for need in needs:
            rooms.need.fill_(max(need, rooms.need.item()))
            changed = rooms.changed(void)
        return changed, round(rooms.slack, 3)
    assert rooms.slack == 0 and after(200) == (True, 2.2)  # the first step tells
    assert after(100) == (False, 2.2)  # then only every second
    assert after(150) == (True, 1.65)  # the largest of both
    assert after(100, 140) == (False, 1.65)  # 1.54 is not worth a new recording
    assert after(170, void=True) == (True, 2.244)  # a fifth more than 1.87: it grows
    assert after(225, void=True) == (True, 2.5)
    assert after(230, void=True) == (True, 0.0)  # 2.53 is over the limit
    assert after(300, 240) == (False, 0.0)
    assert after(100, 100) == (True, 1.1)
    assert after(10, 10) == (False, 1.1)


def fetching(world, flags, slack=0, nap=0.0, without=""):
    """with_a_graph(), gradients and weights of many small buckets on the way of near.NearBucket."""
    def late(self, *args):
        SharedWindow.late(Some(axis=self.world, nap=SharedWindow.nap))
        return step(self, *args)
    step, buckets = Optimizer.step, []
    with mock.patch.object(train, "DataParallel", functools.partial(near_parallel, buckets)), \
            mock.patch.object(near_, "Window", SharedWindow), \
            mock.patch.object(Optimizer, "step", late), \
            mock.patch.multiple(SharedWindow, nap=nap, without=without):
        totals, mine, redone, _ = with_a_graph(world, flags, slack, nap, without)
    return totals, mine, buckets, redone


def in_small_buckets(world, flags):
    with mock.patch.object(train, "DataParallel", functools.partial(DataParallel, bucket_elements=300)):
        return with_a_graph(world, flags, 0)


def near_parallel(buckets, *args, once, near, **more):
    dp = DataParallel(*args, once=True, near=functools.partial(near_.NearBucket, near_.Lane()),
                      bucket_elements=300, **more)
    buckets += [(type(b).__name__, b in dp.early) for b in dp.buckets]
    return dp


@pytest.mark.parametrize("layout", [dict(), dict(tp=2), dict(ep=2)], ids=str)
def test_gradients_and_weights_through_windows(layout):
    """Without a graph (slack 0) each bucket leaves when it is stepped; with one only the embedding's does,
    and with 1.0 a step is done again."""
    flags = dict(TINY, zero=1, micro_batch=2 * layout.get("tp", 1), **layout)
    want = run_ranks(4, in_small_buckets, flags)
    for slack in (0, 1.0, 4.0) if "ep" in layout else (0, 1.0):
        got = run_ranks(4, fetching, flags, slack)
        for (totals, mine, buckets, redone), (expected, theirs, *_) in zip(got, want, strict=True):
            assert buckets.count(("NearBucket", True)) == 1 and buckets.count(("NearBucket", False)) > 4
            assert bool(redone) == (slack == 1.0 and "ep" in layout)
            np.testing.assert_allclose(totals, expected, rtol=1e-10)
            for (name, a, *_), (_, b, *_) in zip(mine["pieces"], theirs["pieces"], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("without", ["", "add_up", "send_weights"])
def test_a_rank_whose_gradients_are_late_is_waited_for(without):
    flags = dict(TINY, zero=1, micro_batch=4)
    want, same = run_ranks(2, in_small_buckets, flags), True
    got = run_ranks(2, fetching, flags, 0, 0.005, without)
    for (totals, mine, *_), (expected, theirs, *_) in zip(got, want, strict=True):
        same = same and np.allclose(totals, expected, rtol=1e-10)
        for (_, a, *_), (_, b, *_) in zip(mine["pieces"], theirs["pieces"], strict=True):
            same = same and np.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert same == (not without)


def no_way(world, argv):
    with mock.patch.object(train, "static_shapes", lambda *_: True):
        return session(world, argv)


def test_gpus_without_a_way_to_each_other_are_named(tmp_path):
    """A CPU has no symmetric memory either: one line, exit code 2."""
    argv = [*RUN, "--n-experts=4", "--top-k=1", "--ep=2", f"--out={tmp_path}", "--steps=2"]
    results = run_ranks(2, no_way, argv)
    assert [r["code"] for r in results] == [2, 2]
    said = results[0]["err"].splitlines()
    assert len(said) == 1 and "cannot reach each other's memory" in said[0]
    assert "--no-cuda-graph --zero 0" in said[0]


def near(world, names):
    with mock.patch.object(window.socket, "gethostname", lambda: names[world.rank]):
        mesh = make_mesh(world, ep=2)
        return window.together(mesh, mesh.ep, torch.device("cpu"))


@pytest.mark.parametrize("names, answer", [("aaaa", True), ("aabb", True), ("aaab", False), ("abab", False)])
def test_all_ranks_know_whether_any_group_spans_two_nodes(names, answer):
    assert run_ranks(4, near, names) == [answer] * 4


def on_gpus(world, gpus, reach, broken):
    def opens(*_):
        if world.rank == broken:
            raise ValueError("no way")
    mesh = make_mesh(world, ep=2)
    with mock.patch.multiple(torch.cuda, device_count=lambda: 4, can_device_access_peer=lambda *_: reach), \
            mock.patch.object(window, "Window", opens):
        return window.together(mesh, mesh.ep, torch.device("cuda", gpus[world.rank]))


@pytest.mark.parametrize("gpus, reach, broken, answer", [
    ((0, 1, 2, 3), True, None, True), ((0, 1, 0, 1), True, None, True), ((0, 0, 1, 1), True, None, False),
    ((0, 1, 2, 3), False, None, False), ((0, 1, 2, 3), True, 2, False), ((0, 5, 2, 3), True, None, False)])
def test_all_ranks_know_whether_gpus_reach_each_other(gpus, reach, broken, answer):
    """Two processes of one GPU, GPUs without a way, one that another does not see, a window that fails."""
    assert run_ranks(4, on_gpus, gpus, reach, broken) == [answer] * 4

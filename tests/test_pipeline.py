"""The schedules of pipeline.py without a model: no rank waits for ever, the bubble is what is promised,
messages pair by their order alone, and plan.py's picture, bubble and memory are those of the schedule.
"""
import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import pipeline
from config import Config
from cost.memory import blocks_in_flight
from cost.parameters import rank_mesh, stage_mesh
from cost.step_time import bubble
from interface.layout import stage_layers
from pipeline import rank_layers, schedule, timetable
from plan import draw_schedule, timeline
from runtime.launch import CollectiveLog

SIZES = [(p, v, m) for p in (1, 2, 3, 4) for v in (1, 2, 3) for m in range(1, 2 * p + 2)]


def simulate(p, v, m, forward=1, backward=2):
    """Return the time that a step takes, or 0 if ranks wait for each other for ever.

    Every rank does its ops in order, each as soon as its input is there.
    """
    todo, free, ends = [schedule(rank, p, v, m) for rank in range(p)], [0] * p, {}
    while any(todo):
        before = len(ends)
        for rank, ops in enumerate(todo):
            while ops:
                kind, i, chunk = ops[0]
                stage, step = chunk * p + rank, 1 if kind == "F" else -1
                needs = [(kind, i, stage - step)] * (0 <= stage - step < p * v)
                needs += [("F", i, stage)] * (kind == "B")
                if not all(op in ends for op in needs):
                    break
                begin = max([free[rank], *(ends[op] for op in needs)])
                free[rank] = ends[kind, i, stage] = begin + (forward if step > 0 else backward)
                ops.pop(0)
        if len(ends) == before:
            return 0
    return max(free)


def messages(table, p, v):
    """Return [[(sender, receiver, op that was done)] of each time] of a timetable."""
    out = []
    for now in table.values():
        sent = []
        for rank, (kind, i, chunk) in ((r, op) for r, op in enumerate(now) if op):
            stage = chunk * p + rank + (1 if kind == "F" else -1)
            sent += [(rank, stage % p, (kind, i, chunk))] * (0 <= stage < p * v)
        out.append(sent)
    return out


def rendezvous(p, v, m, forward, backward):
    """Return the time of a step whose messages must meet, as NCCL's do.

    A batch of messages is over once all its receivers have begun it, too. A rank's next batch waits for that,
    but an op only waits for the batch that brings its input.
    """
    table = timetable(p, v, m)
    clock, network, arrived = [0] * p, [0] * p, {}
    for now, sent in zip(table.values(), messages(table, p, v), strict=True):
        for rank, op in enumerate(now):
            if op:
                begin = max(clock[rank], arrived.get((rank, op), 0))
                clock[rank] = begin + (forward if op[0] == "F" else backward)
        begun, over = [max(pair) for pair in zip(clock, network, strict=True)], [0] * p
        for a, b, (kind, i, chunk) in sent:
            there = (chunk * p + a + (1 if kind == "F" else -1)) // p
            arrived[b, (kind, i, there)] = done = max(begun[a], begun[b])
            over[a], over[b] = max(over[a], done), max(over[b], done)
        network = [max(pair) for pair in zip(network, over, strict=True)]
    return max(clock)


# -----------------------------------------------------------------------------
# Who does what when

def test_no_rank_waits_for_ever_and_the_bubble_is_what_is_promised():
    for (p, v, m), (f, b) in itertools.product(SIZES, ((1, 1), (1, 2), (1, 3))):
        time, work = simulate(p, v, m, f, b), v * m * (f + b)
        assert time, f"p {p} v {v} m {m}: ranks wait for each other"
        if v == 1 or m % p == 0:
            assert time == work + (p - 1) * (f + b), (p, v, m)  # (p - 1) / (v m) of the work
        else:  # at most the time of a whole last group
            assert work + (p - 1) * (f + b) <= time <= simulate(p, v, -(-m // p) * p, f, b), (p, v, m)
        if (f, b) == (1, 2):
            assert bubble(p, v, m) == pytest.approx(time / work - 1, abs=1e-12)
            assert max(timetable(p, v, m)) == time


def test_every_rank_does_every_op_once_and_a_backward_after_its_forward():
    for p, v, m in SIZES:
        want = Counter(itertools.product("FB", range(m), range(v)))
        for rank in range(p):
            ops = schedule(rank, p, v, m)
            at = {op: i for i, op in enumerate(ops)}
            assert Counter(ops) == want
            assert all(at["F", i, c] < at["B", i, c] for i, c in itertools.product(range(m), range(v)))
            assert Counter(schedule(rank, p, v, m, backward=False)) == Counter(
                op for op in want if op[0] == "F")


def test_one_chunk_is_1f1b():
    for p, m in itertools.product(range(1, 7), range(1, 12)):
        for rank in range(p):
            w = min(p - rank - 1, m)
            steady = [op for i in range(w, m) for op in (("F", i, 0), ("B", i - w, 0))]
            assert schedule(rank, p, 1, m) == [*(("F", i, 0) for i in range(w)), *steady,
                                               *(("B", i, 0) for i in range(m - w, m))]


def test_the_schedule_of_rank_1_of_2_with_two_chunks():
    ops = " ".join(f"{kind}{i}{'ab'[chunk]}" for kind, i, chunk in schedule(1, 2, 2, 4))
    assert ops == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


# -----------------------------------------------------------------------------
# Which stage has which blocks

def test_stages_of_a_rank_lie_pp_apart():
    cfg = Config(n_layer=8, pp_chunks=2)
    assert [rank_layers(cfg, SimpleNamespace(rank=r, size=2)) for r in range(2)] == [
        [(0, 1), (4, 7)], [(1, 4), (7, 8)]]
    assert stage_layers(Config(n_layer=6, pp_layers="1,3,2"), 3) == [(0, 1), (1, 4), (4, 6)]
    cfg = dataclasses.replace(cfg, pp_layers="3,1,2,2")
    assert rank_layers(cfg, SimpleNamespace(rank=1, size=2)) == [(3, 4), (6, 8)]
    with pytest.raises(ValueError, match="n-layer 3 is less than .* = 4, .*; try --n-layer 4"):
        stage_layers(Config(n_layer=3, pp_chunks=2), 4)


def test_stages_are_balanced_with_embedding_and_head():
    counts = {(n, pp): [end - first for first, end in stage_layers(Config(n_layer=n), pp)]
              for n in range(1, 9) for pp in range(1, min(n, 4) + 1)}
    for (n, pp), blocks in counts.items():
        def fullest(blocks):  # embedding and head count as a block each
            return max(b + (s == 0) + (s == len(blocks) - 1) for s, b in enumerate(blocks))
        assert sum(blocks) == n and min(blocks) >= 1
        others = (c for c in itertools.product(range(1, n + 1), repeat=pp) if sum(c) == n)
        assert fullest(blocks) == min(map(fullest, others)), f"{n} blocks over {pp} stages: {blocks}"
    # Any split can read a checkpoint, but plans and memory were measured with these splits
    assert (counts[6, 2], counts[6, 4], counts[4, 2], counts[4, 4]) == ([3, 3], [1, 2, 2, 1], [2, 2], [1] * 4)
    assert (counts[5, 2], counts[7, 3], counts[8, 4]) == ([3, 2], [2, 3, 2], [1, 3, 3, 1])
    assert stage_layers(Config(n_layer=6), 4) == [(0, 1), (1, 3), (3, 5), (5, 6)]


# -----------------------------------------------------------------------------
# Messages

def walk(rank, p, v, m, backward=True):
    """Walk a timetable with a network that only writes down -> ([(peer, op sent)], [(peer, op received for)],
    ops in the order in which they ran with what they got)."""
    sends, receives, ran, ring = [], [], [], None

    def batch(ops):
        peers = [(peer, way) for way, _, peer, _ in ops]
        assert len(set(peers)) == len(peers), "two messages one way to one peer: their order would count"
        for way, tensor, peer, _ in ops:
            (sends if way == "send" else receives).append((peer, tensor))
        return []

    def run(kind):
        def op(i, chunk, received):
            ran.append((kind, i, chunk, received))
            return torch.tensor([i, chunk, kind == "F"])
        return op
    stub = SimpleNamespace(isend="send", irecv="receive", P2POp=lambda *args: args, batch_isend_irecv=batch)
    axis = dataclasses.replace(rank_mesh(p, rank, pp=p).pp, calls=CollectiveLog())
    model = SimpleNamespace(mesh=SimpleNamespace(pp=axis, tp=SimpleNamespace(size=1)), chunks=[None] * v,
                            cfg=SimpleNamespace(n_embd=1), parameters=lambda: iter([torch.zeros(1)]))
    with mock.patch.object(pipeline, "dist", stub):
        ring = pipeline.Ring(model, 1)
        ring.walk(m, run("F"), run("B") if backward else None)
    assert not ring.inbox and not ring.in_flight
    sent = [(peer, ("FB"[not t[2]], int(t[0]), int(t[1]))) for peer, t in sends]
    return sent, [(peer, id(t)) for peer, t in receives], ran


def check_pairs(p, v, m):
    """Between any two ranks the k-th message sent is the k-th received: it reaches the op that needs it."""
    walks = [walk(rank, p, v, m) for rank in range(p)]
    for a, b in itertools.permutations(range(p), 2):
        sent = [op for peer, op in walks[a][0] if peer == b]
        arrives = [tensor for peer, tensor in walks[b][1] if peer == a]
        used = {id(got): (kind, i, chunk) for kind, i, chunk, got in walks[b][2] if got is not None}
        assert len(sent) == len(arrives)
        for (kind, i, chunk), tensor in zip(sent, arrives, strict=True):
            stage = chunk * p + a + (1 if kind == "F" else -1)
            assert used.get(tensor) == (kind, i, stage // p) and stage % p == b
    for rank, (_, _, ran) in enumerate(walks):  # only the first stage and the last get nothing
        for kind, _, chunk, got in ran:
            assert (got is None) == (chunk * p + rank == (0 if kind == "F" else p * v - 1))


def test_messages_pair_by_their_order_alone():
    for p, v, m in ((2, 1, 3), (2, 2, 4), (2, 2, 3), (2, 3, 2), (3, 2, 4), (4, 2, 8)):
        check_pairs(p, v, m)


def test_batches_that_wait_for_both_sides_cost_no_time():
    for (p, v, groups), b in itertools.product(((2, 1, 4), (2, 2, 4), (3, 3, 2), (4, 2, 3), (8, 2, 2)),
                                               (1, 1.5, 2)):
        m = p * groups
        assert rendezvous(p, v, m, 1, b) == pytest.approx((v * m + p - 1) * (1 + b)), (p, v, m, b)


# -----------------------------------------------------------------------------
# Plans

def test_the_picture():
    assert draw_schedule(timeline(2, 1, 3), 2, 1) == [
        "  rank 0   F0 F1       B0--- F2 B1---    B2---",
        "  rank 1      F0 B0--- F1 B1--- F2 B2---"]
    assert draw_schedule(timeline(2, 2, 2), 2, 2) == [
        "  rank 0   F0a F1a F0b F1b         B0b----     B1b---- B0a---- B1a----",
        "  rank 1       F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a----"]


def test_activations_in_flight_are_those_of_the_whole_schedule():
    for p, v, m in SIZES:
        cfg = Config(n_layer=p * v + 2, pp_chunks=v, micro_batch=1, global_batch=m)
        for rank in range(p):
            mesh = stage_mesh(dataclasses.replace(cfg, pp=p), p, rank)
            sizes, held, most = [b - a for a, b in rank_layers(cfg, mesh.pp)], 0, 0
            for kind, _, chunk in schedule(rank, p, v, m):
                held += sizes[chunk] * (1 if kind == "F" else -1)
                most = max(most, held)
            assert blocks_in_flight(cfg, mesh) == most
            assert v > 1 or most == sizes[0] * min(p - rank, m)

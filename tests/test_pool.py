"""The pool itself: a worker that dies or hangs fails its own call, with a message, and no other."""
import os
import threading
import time

import pool
import pytest
import torch
import torch.distributed as dist
from pool import run_ranks

from parallel import make_mesh


def total(world, x=1.0):
    t = torch.full((1000,), x + world.rank)
    if world.size > 1:
        dist.all_reduce(t)
    return t[0].item(), os.getpid()


def values(n, x=1.0):
    return [value for value, _ in run_ranks(n, total, x)]


def dies(world, where):
    if world.rank == 1 and where == "at once":  # the others may not be past init_process_group
        os._exit(7)
    dist.barrier()
    if world.rank == 1:
        os._exit(7)
    return total(world)


@pytest.mark.parametrize("where", ["at once", "while the others wait in a collective"])
def test_a_worker_that_dies_fails_its_call_alone(where, monkeypatch):
    if where == "at once":  # gloo looks for it for a while: that those ranks are killed is fine
        monkeypatch.setattr(pool, "AFTER_FAILURE", 2)
    before = [pid for _, pid in run_ranks(3, total)]
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1: its worker died, exit code 7") as e:
        run_ranks(3, dies, where)
    assert time.monotonic() - began < pool.LIMIT, "nothing ended the others' collective"
    assert "rank 0: Traceback" in str(e.value) or where == "at once", "the others' tracebacks are of use"
    after = run_ranks(3, total)
    assert [value for value, _ in after] == [6.0] * 3
    kept = [pid == was for (_, pid), was in zip(after, before, strict=True)]
    assert kept == [True, False, True] or where == "at once" and not kept[1]


def test_a_worker_that_died_between_two_calls_is_replaced():
    run_ranks(2, total)
    pool.workers[0].process.kill()
    pool.workers[0].process.join()
    with pytest.warns(UserWarning, match=r"rank 0 died, exit code -9 \(SIGKILL\), between two calls"):
        assert values(2) == [3.0] * 2


def raises(world, wait):
    if world.rank == 1:
        raise KeyError("the first rank's partner")
    if wait:
        dist.barrier()
    return world.rank


@pytest.mark.parametrize("wait", [False, True], ids=["alone", "while the others wait in a collective"])
def test_a_rank_that_raises_fails_the_call_with_its_traceback(wait):
    with pytest.raises(AssertionError, match="KeyError: \"the first rank's partner\"") as e:
        run_ranks(3, raises, wait)
    assert "rank 1: Traceback" in str(e.value) and "in raises" in str(e.value)
    assert ("rank 0: Traceback" in str(e.value)) == wait
    assert values(3) == [6.0] * 3


def hangs(world, who):
    if world.rank == who:
        time.sleep(1000)
    if who == 0:
        raise KeyError("at once")
    return world.rank


@pytest.mark.parametrize("who,limit", [(1, "LIMIT"), (0, "AFTER_FAILURE")])
def test_a_worker_that_does_not_answer_is_killed_and_replaced(monkeypatch, who, limit):
    """Nobody fails: the bound of the call. Another rank fails: the shorter bound after it."""
    assert values(2) == [3.0] * 2
    monkeypatch.setattr(pool, limit, 1)
    with pytest.raises(AssertionError, match=rf"rank {who}: its worker was killed by the pool after"):
        run_ranks(2, hangs, who)
    monkeypatch.undo()
    assert values(2) == [3.0] * 2


def cannot_be_sent(world):
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_fails_the_call():
    _, worker = run_ranks(1, total)[0]
    with pytest.raises(AssertionError, match="cannot pickle '_thread.lock'"):
        run_ranks(1, cannot_be_sent)
    assert run_ranks(1, total) == [(1.0, worker)]


def spoils_the_destruction(world, how):
    def broken(*_):
        if how == "raises":
            raise RuntimeError("still in use")
        os._exit(9)
    dist.destroy_process_group = broken
    return world.rank


@pytest.mark.parametrize("how,said", [("raises", "still in use"), ("dies", "exit code 9")])
def test_a_group_that_cannot_be_destroyed_costs_the_worker_not_the_result(how, said):
    with pytest.warns(UserWarning, match=rf"rank [01]: after its result, its worker (.|\n)*{said}"):
        assert run_ranks(2, spoils_the_destruction, how) == [0, 1]
    assert values(2) == [3.0] * 2


held = []


def holds_groups(world):
    """A mesh in a cycle, as a model has it; and one that nobody ever lets go of."""
    mesh = make_mesh(world, tp=2)
    cycle = [mesh]
    cycle.append(cycle)
    held.append(mesh)
    return dist.is_initialized()


def group_is_gone(world):
    return not dist.is_initialized()


def test_the_group_is_destroyed_before_the_answer():
    pids = [pid for _, pid in run_ranks(4, total)]
    assert run_ranks(4, holds_groups) == [True] * 4
    assert run_ranks(4, holds_groups) == [True] * 4  # the first call's stores are still open
    assert run_ranks(1, group_is_gone) == [True]
    assert [pid for _, pid in run_ranks(4, total)] == pids, "a worker died"


def spin(reader, writer):
    writer.close()
    while not reader.poll():  # until the test closes the other end, or dies
        pass


def test_quick_calls_beside_busy_neighbours():
    """A worker that leaves its group early makes another one wait in vain until a limit ends the call. All
    calls end with their values and their workers, and pool.COLLECTIVE says how long they may take."""
    pids = [pid for _, pid in run_ranks(4, total)]
    reader, writer = pool.context.Pipe(duplex=False)
    neighbours = [pool.context.Process(target=spin, args=(reader, writer), daemon=True) for _ in range(2)]
    for p in neighbours:
        p.start()
    try:
        for i in range(20):
            n = 2 + i % 3
            got = run_ranks(n, total, float(i))
            assert got == [(n * i + n * (n - 1) / 2, pid) for pid in pids[:n]]
    finally:
        writer.close()
        for p in neighbours:
            p.join()

"""What the ranks tell each other through their store: processes that are forked, without process groups."""
import contextlib
import io
import sys
from datetime import timedelta

import pytest
from pool import context

from runtime.everyone import Everyone

WAIT = timedelta(seconds=60)  # a loaded machine takes seconds to connect


def rank_main(rank, size, pipe, port, function, args):
    """In a new process: send (exit code or exception, result, stderr) of function(everyone, *args)."""
    from torch.distributed import TCPStore
    store = None
    if size > 1:
        store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=WAIT, wait_for_workers=False)
        if rank == 0:
            pipe.send(store.port)
    code = result = None
    everyone = Everyone(rank, size, store)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            result = function(everyone, *args)
            everyone.part()
        except SystemExit as e:
            code = int(e.code)
        except RuntimeError as e:
            code = str(e)
    pipe.send((code, result, stderr.getvalue()))
    sys.exit(0)  # at once: rank 0's store closes with it


def on_ranks(size, function, *args):
    pipes = [context.Pipe() for _ in range(size)]
    ranks = []
    port = 0
    for rank, (ours, theirs) in enumerate(pipes):
        ranks.append(context.Process(target=rank_main, args=(rank, size, theirs, port, function, args)))
        ranks[-1].start()
        if rank == 0 and size > 1:
            assert ours.poll(120)
            port = ours.recv()
    found = [ours.recv() for ours, _ in pipes if ours.poll(120)]
    for rank in ranks:
        rank.join()
    return found


def speak(own):
    rank = own.rank
    return [own.any(rank == 5), own.any(False), own.maximum([rank, -rank]),
            own.first(rank if rank in (3, 4) else None), own.first(None),
            own.gather(f"{rank}" * 9999), own.broadcast({"of": rank})]


@pytest.mark.parametrize("size", [1, 6])
def test_every_rank_hears_the_same(size):
    for rank, (code, said, _) in enumerate(on_ranks(size, speak)):
        assert code is None and said == [
            size > 5, False, [size - 1, 0], 3 if size > 3 else None, None,
            [f"{rank}" * 9999 for rank in range(size)], {"of": 0}], rank


def start(own, wrong, place):
    def read(here):
        if own.rank in wrong and here == place:
            raise OSError(f"rank {own.rank}\n cannot read")

    with own.input():
        read("before the first word")
        own.any(False)
        with own.input():
            read("inside")
        own.broadcast("a path")
        read("after the last word")
    return "goes on"


@pytest.mark.parametrize("size,wrong,place", [
    (3, {0}, "before the first word"), (3, {1, 2}, "before the first word"), (3, {2}, "inside"),
    (3, {0, 1, 2}, "after the last word"), (3, {2}, "after the last word"), (3, set(), ""),
    (1, {0}, "inside"), (1, set(), "")], ids=str)
def test_wrong_input_on_any_set_of_ranks_ends_all_with_one_line(size, wrong, place):
    for rank, (code, result, err) in enumerate(on_ranks(size, start, wrong, place)):
        first = wrong and rank == min(wrong)
        assert code == (2 if wrong else None) and result == (None if wrong else "goes on")
        assert err == (f"nanoshard: rank {rank} cannot read\n" if first else ""), (rank, err)


def differ(own):
    own.barrier() if own.rank == 0 else own.any(True)


def test_ranks_that_say_different_things_are_named():
    for code, _, _ in on_ranks(3, differ):
        assert code == "mismatch over the world: one rank is in any, another in barrier"


def rank_0_leaves(own):
    own.barrier()  # rank 1 has connected
    if own.rank == 0:
        sys.exit(7)
    own.barrier()


def test_a_rank_learns_at_once_that_rank_0_is_gone():
    first, second = on_ranks(2, rank_0_leaves)
    assert first[0] == 7 and second[0], second

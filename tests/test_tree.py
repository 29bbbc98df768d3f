"""The tree over which the ranks' programs agree: its shape for thousands of ranks, and what is said."""
import socket
import threading

import pytest

from interface import tree
from interface.tree import Tree, children_of, grow, parent_of


class Store(dict):
    """A store for threads: get() waits for set()."""

    def __init__(self):
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self[key] = value
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self, 20), key
            return self[key]


def on_threads(size, width, function):
    """Return [function(tree) of each rank], each on a thread of its own; an exception counts as one."""
    store, results = Store(), [None] * size
    trees = [Tree(rank, size) for rank in range(size)]

    def run(own):
        try:
            grow(store, own, width, "127.0.0.1", 20)
            results[own.rank] = function(own)
        except Exception as e:
            results[own.rank] = e
            own.close()  # as the end of its process would, so that the others do not wait for it

    threads = [threading.Thread(target=run, args=(own,)) for own in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for own in trees:
        own.close()
    return results


@pytest.mark.parametrize("size, width", [(1, 1), (2, 1), (7, 8), (8, 4), (100, 12), (4096, 8), (4096, 4),
                                         (5000, 7), (4096, 64)])
def test_all_ranks_hang_on_rank_0_and_none_has_many_connections(size, width):
    children = {rank: children_of(rank, size, width) for rank in range(size)}
    assert sorted(child for below in children.values() for child in below) == list(range(1, size))
    assert all(parent_of(child, width) == rank for rank, below in children.items() for child in below)
    assert max(map(len, children.values())) < width + 3 * 6
    for rank in range(0, size, 97):
        hops = 0
        while rank:
            rank, hops = parent_of(rank, width), hops + 1
        assert hops <= 7


def test_the_largest_message_of_4096_ranks_goes_through_rank_0_with_little():
    """At the start, rank 0 sends all hosts to each of its children, and gets them in parts."""
    everyone = {rank: (f"nid{rank // 8:06d}", rank % 8, "0,1,2,3,4,5,6,7") for rank in range(4096)}
    children = len(children_of(0, 4096, 8))
    assert children == 20 and (1 + children) * len(tree._packed("all-gather", everyone)) < 10e6


def speak(own):
    rank = own.rank
    return [own.any(rank == 5), own.any(False), own.either(1 << rank), own.maximum([rank, -rank]),
            own.first(rank if rank in (3, 4) else None), own.first(None),
            own.union({"all": rank, rank: "own", "late": rank} if rank >= 4 else {"all": rank}),
            own.gather_objects(f"{rank}" * 2000), own.collect(rank), own.broadcast_object((rank, "said")),
            own.barrier()]


@pytest.mark.parametrize("size, width", [(1, 1), (9, 4), (6, 1)])
def test_every_rank_hears_the_same(size, width):
    everyone = [f"{rank}" * 2000 for rank in range(size)]
    found = 3 if size > 3 else None
    for rank, said in enumerate(on_threads(size, width, speak)):
        united = {"all": 0} | {late: "own" for late in range(4, size)} | ({"late": 4} if size > 4 else {})
        assert said == [size > 5, False, 2**size - 1, [size - 1, 0], found, None, united, everyone,
                        list(range(size)) if rank == 0 else None, (0, "said"), None], rank


def test_a_rank_that_is_gone_or_elsewhere_is_named():
    def leaves(own):
        if own.rank == 2:
            return own.close()
        return own.any(False)

    results = on_threads(4, 2, leaves)
    assert "rank 2 was closed by peer" in str(results[0]), results
    results = on_threads(2, 2, lambda own: own.any(False) if own.rank else own.barrier())
    assert "mismatch over the world: rank 0 is in barrier, rank 1 in any" in str(results[0]), results


@pytest.mark.parametrize("wrong", [{0}, {8}, {3, 5}, set(range(9))], ids=str)
@pytest.mark.parametrize("word", ["barrier", "broadcast_object", "gather_objects", "first"])
def test_wrong_input_of_some_ranks_reaches_all_whatever_they_say(wrong, word):
    """Each learns of the lowest of these ranks."""
    def speak(own):
        own.any(False)
        if own.rank in wrong:
            own.fail(f"of rank {own.rank}")
        getattr(own, word)(*[own.rank] * (word != "barrier"))
        return "goes on"

    lowest = min(wrong)
    for said in on_threads(9, 4, speak):
        assert isinstance(said, tree.WrongInput) and said.args == ((lowest, f"of rank {lowest}"),), said


def test_a_rank_that_cannot_be_reached_is_named_with_the_way_out():
    store = Store()
    store.set("tree", '["secret", 2]')
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("tree/0", f'["127.0.0.1", {port}]')
    with pytest.raises(ValueError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port} .*IFNAME"):
        grow(store, Tree(1, 2), 2, "127.0.0.1", 5)


def test_a_stranger_is_no_child(monkeypatch):
    """Somebody who finds the port, but does not know the secret, gets no answer and takes nobody's place."""
    monkeypatch.setattr(tree, "HELLO_WAIT", 0.2)
    server, said = socket.create_server(("127.0.0.1", 0)), []
    strangers = [socket.create_connection(server.getsockname()) for _ in range(3)]
    strangers[0].sendall(tree.HELLO.pack(b"0" * 32, 1))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n")
    child = socket.create_connection(server.getsockname())
    child.sendall(tree.HELLO.pack(b"s" * 32, 1))
    own = Tree(0, 2)
    tree._accept(server, own, {1}, "s" * 32, 5)
    assert own.children[1].getpeername() == child.getsockname()
    for stranger in strangers:
        stranger.settimeout(5)
        said.append(stranger.recv(1))
    assert said == [b""] * 3
    own.close()
    for connection in (*strangers, child):
        connection.close()

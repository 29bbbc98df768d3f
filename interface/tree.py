"""What the ranks' programs tell each other: a few bytes, over a tree of connections between their hosts.

Collectives of the device's process groups move tensors. What is said here needs none: whether all ranks have
read their files, a path that rank 0 chose, the most memory of any rank. Ranks are numbered node by node, and
the first rank of a node leads it. With 8 ranks on a node:

        0  leads node 0, and the tree
        |-- 1 2 3 4 5 6 7                 the other ranks of its node
        |-- 8  leads node 1
        |   `-- 9 10 11 12 13 14 15
        |-- 16, 24                        leaders of nodes 2 and 3
        |-- 32 leads node 4
        |   |-- 33 34 35 36 37 38 39
        |   `-- 40, 48, 56                leaders of nodes 5, 6 and 7
        `-- 64, 96, 128, 256, 384, ...    of nodes 8, 12, 16, 32, 48, ...

The parent of a leader is the leader of the node whose number, written to the base 4, has its last digit other
than 0 cleared. So of 4,096 ranks none has more than 20 connections, and a word from any rank is with all
others after twelve messages one after another. Values go up the tree, where each rank combines its children's
with its own, and the result goes down. A tree of one rank needs no connections.
"""
import json
import pickle
import secrets
import socket
import struct
import zlib
from collections import Counter
from typing import NamedTuple

FAN_OUT = 4
MOST_LOCAL = 64  # ranks with one leader; a larger node has several
LONG = 4096  # bytes; a longer message is compressed
HEADER = struct.Struct("<?Q")  # whether it is compressed, and its bytes
HELLO = struct.Struct("<32sQ")  # a child's first words: the secret, and its rank
HELLO_WAIT = 10.0  # seconds until a connection must have said them


def parent_of(rank, width):
    """Return the parent of a rank other than 0. width: the number of ranks of a leader, itself included."""
    if rank % width:
        return rank - rank % width
    node = rank // width
    place = 1
    while node // place % FAN_OUT == 0:
        place *= FAN_OUT
    digit = node // place % FAN_OUT
    return (node - digit * place) * width


def children_of(rank, size, width):
    """Return the ranks whose parent this rank is."""
    if rank % width:
        return []
    found = list(range(rank + 1, min(rank + width, size)))
    node = rank // width
    place = 1
    while place * width < size and node // place % FAN_OUT == 0:
        leaders = [(node + digit * place) * width for digit in range(1, FAN_OUT)]
        found += [leader for leader in leaders if leader < size]
        place *= FAN_OUT
    return found


class Wrong(NamedTuple):
    """What a rank says in the place of its next word if its input is wrong."""
    rank: int
    text: str


class WrongInput(Exception):
    """Raised on every rank if the input of some rank is wrong. args: the Wrong of the lowest such rank."""


class Tree:
    """This rank's place in the tree, and what the ranks say over it. Each method is collective.

    calls: this rank's runtime.launch.CollectiveLog, which the watchdog reads.
    RuntimeError: another rank is gone, or is in another method. WrongInput: another rank is in fail().
    """

    def __init__(self, rank=0, size=1, calls=None):
        self.rank = rank
        self.size = size
        self.calls = calls
        self.name = "world"  # for the watchdog
        self.sent = Counter()  # no bytes are counted
        self.parent = {}  # rank: its connection; empty on rank 0
        self.children = {}

    def any(self, flag):
        """Whether flag is true on any rank. Every rank gets the same answer."""
        return self.either(int(bool(flag))) != 0

    def either(self, bits):
        """Return the bitwise or of an integer of each rank, on every rank."""
        return self._together("any", bits, lambda ours, theirs: ours | theirs)

    def maximum(self, numbers):
        """Return the maxima, place by place, of each rank's list of numbers, on every rank."""
        return self._together("maximum", list(numbers), lambda ours, theirs: [*map(max, ours, theirs)])

    def first(self, value):
        """Return the value of the lowest rank whose value is not None, or None; on every rank."""
        own = None if value is None else (self.rank, value)
        found = self._together("first", own, _lower)
        return None if found is None else found[1]

    def union(self, entries):
        """Return all entries of the ranks' dicts, on every rank. Of equal keys the lowest rank's counts."""
        own = {key: (self.rank, value) for key, value in entries.items()}
        found = self._together("union", own, _united)
        return {key: value for key, (_, value) in found.items()}

    def gather_objects(self, value):
        """Return the values of all ranks as a list, on every rank. value: small and picklable."""
        values = self._together("all-gather", {self.rank: value}, _joined)
        return [values[rank] for rank in range(self.size)]

    def collect(self, value):
        """Return the values of all ranks as a list on rank 0, and None on the others."""
        values = self._up("gather", {self.rank: value}, _joined)
        return [values[rank] for rank in range(self.size)] if self.rank == 0 else None

    def fail(self, text):
        """Raise WrongInput on all ranks, whatever the others say next: the input of this rank is wrong."""
        self._together("wrong input", Wrong(self.rank, text), min)

    def broadcast_object(self, value):
        """Return the value of rank 0, on every rank. value: picklable."""
        return self._together("broadcast", value if self.rank == 0 else None, lambda ours, theirs: ours)

    def barrier(self):
        """Wait until all ranks have arrived here."""
        self._together("barrier", 0, max)

    # -------------------------------------------------------------------------
    # Messages

    def _record(self, kind):
        if self.calls is not None:
            self.calls.record(self, kind)

    def _together(self, kind, value, combine):
        result = self._down(kind, self._up(kind, value, combine))
        if isinstance(result, Wrong):
            raise WrongInput(result)
        return result

    def _up(self, kind, value, combine):
        """Return, on rank 0, combine() of the values of all ranks; on another rank, of those below it."""
        if self.size > 1:
            self._record(kind)
        for rank, connection in self.children.items():
            theirs = self._receive(connection, kind, rank)
            wrong = [word for word in (value, theirs) if isinstance(word, Wrong)]
            value = min(wrong) if wrong else combine(value, theirs)
        for rank, connection in self.parent.items():
            self._send(connection, _packed(kind, value), rank)
        return value

    def _down(self, kind, value):
        """Return rank 0's value, on every rank."""
        for rank, connection in self.parent.items():
            value = self._receive(connection, kind, rank)
        if self.children:
            message = _packed(kind, value)
            for rank, connection in self.children.items():
                self._send(connection, message, rank)
        return value

    def _send(self, connection, message, rank):
        try:
            connection.sendall(message)
        except OSError as e:
            raise RuntimeError(f"the connection to rank {rank} was closed by peer ({e})") from None

    def _receive(self, connection, kind, rank):
        try:
            is_compressed, n_bytes = HEADER.unpack(_read(connection, HEADER.size))
            message = _read(connection, n_bytes)
        except TimeoutError:
            raise RuntimeError(f"rank {rank} sent nothing in {connection.gettimeout():g} s, in {kind} "
                               "over the world") from None
        except OSError as e:
            raise RuntimeError(f"the connection to rank {rank} was closed by peer ({e})") from None
        theirs, value = pickle.loads(zlib.decompress(message) if is_compressed else message)
        if theirs != kind and not isinstance(value, Wrong) and kind != "wrong input":
            raise RuntimeError(f"mismatch over the world: rank {self.rank} is in {kind}, "
                               f"rank {rank} in {theirs}")
        return value

    # -------------------------------------------------------------------------
    # Connections

    def connections(self):
        """Return this rank's sockets."""
        return [*self.children.values(), *self.parent.values()]

    def ports(self):
        """Return the ports of this rank's ends of its connections."""
        return {connection.getsockname()[1] for connection in self.connections()}

    def close(self):
        """Close the connections. Not collective: call barrier() first."""
        for connection in self.connections():
            connection.close()
        self.parent = {}
        self.children = {}


def grow(store, tree, local_size, address, timeout=None):
    """Connect the ranks: the children of each rank connect to it. Collective.

    store: has set and get, and is the same on all ranks. Its trust is the tree's: who reads the secret in it
    can pose as a rank. local_size: the number of ranks on this node; rank 0's counts. address: of this host,
    by which the other ranks reach it. timeout: seconds that a rank waits for another, or None.
    ValueError: this rank cannot reach another one.
    """
    if tree.rank == 0:
        store.set("tree", json.dumps([secrets.token_hex(16), min(local_size, MOST_LOCAL)]))
    secret, width = json.loads(store.get("tree"))
    expected = set(children_of(tree.rank, tree.size, width))
    server = None
    if expected:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), backlog=len(expected), family=family)
        store.set(f"tree/{tree.rank}", json.dumps([address, server.getsockname()[1]]))
    if tree.rank > 0:
        parent = parent_of(tree.rank, width)
        host, port = json.loads(store.get(f"tree/{parent}"))
        try:
            connection = _prepared(socket.create_connection((host, port), timeout), timeout)
            connection.sendall(HELLO.pack(secret.encode(), tree.rank))
        except OSError as e:
            raise ValueError(
                f"rank {tree.rank} cannot reach rank {parent} at {host}:{port} ({e}); let GLOO_SOCKET_IFNAME "
                "name the interface by which the nodes reach each other") from None
        tree.parent = {parent: connection}
    if server is not None:
        _accept(server, tree, expected, secret, timeout)


def _accept(server, tree, expected, secret, timeout):
    """Accept a connection of each expected child, and of nobody else."""
    with server:
        server.settimeout(timeout)
        while expected:
            connection, _ = server.accept()
            try:
                connection.settimeout(HELLO_WAIT)
                said, rank = HELLO.unpack(_read(connection, HELLO.size))
            except OSError:
                connection.close()
                continue
            if rank not in expected or not secrets.compare_digest(said, secret.encode()):
                connection.close()
                continue
            expected.remove(rank)
            tree.children[rank] = _prepared(connection, timeout)


def _prepared(connection, timeout):
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read(connection, n_bytes):
    """Return exactly so many bytes. ConnectionError: the other end is closed."""
    parts = bytearray(n_bytes)
    view = memoryview(parts)
    while len(view):
        received = connection.recv_into(view)
        if received == 0:
            raise ConnectionError("end of the stream")
        view = view[received:]
    return bytes(parts)


def _packed(kind, value):
    message = pickle.dumps((kind, value))
    is_compressed = len(message) > LONG
    if is_compressed:
        message = zlib.compress(message, 1)
    return HEADER.pack(is_compressed, len(message)) + message


def _lower(ours, theirs):
    """Return the pair (rank, value) of the lower rank; None stands for no pair."""
    pairs = [pair for pair in (ours, theirs) if pair is not None]
    return min(pairs, key=lambda pair: pair[0], default=None)


def _united(ours, theirs):
    """Return the entries of two dicts of pairs (rank, value). Of equal keys the lower rank's is kept."""
    for key, pair in theirs.items():
        ours[key] = _lower(ours.get(key), pair)
    return ours


def _joined(ours, theirs):
    ours.update(theirs)
    return ours

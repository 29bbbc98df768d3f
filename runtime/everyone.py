"""What the ranks' programs tell each other: a few words, through the TCPStore by which they met.

Each rank writes its word under a key of its own; rank 0 reads them all, combines them and writes an answer.
Words are JSON and never pickled: who reaches the store's port can write there, and must not run code.
"""
import collections
import contextlib
import json

from config import Outcome
from interface.terminal import complain, one_line

WRONG = "wrong input"


class Everyone:
    """This rank among all ranks. Each method is collective, and its values are what JSON holds.

    store: a torch.distributed.TCPStore of its own; None for a single rank. calls: a CollectiveLog.
    RuntimeError: the ranks are in different methods, or rank 0 is gone, whose end closes the store.
    """
    name = "world"  # for the watchdog

    def __init__(self, rank=0, size=1, store=None, calls=None):
        self.rank = rank
        self.size = size
        self.store = store
        self.calls = calls
        self.turn = 0
        self.sent = collections.Counter()  # no bytes are counted

    def gather(self, value):
        """Return the values of all ranks as a list, on every rank."""
        return self._together("gather", value, list)

    def any(self, flag):
        return self._together("any", bool(flag), any)

    def maximum(self, numbers):
        """Return the maxima, place by place, of each rank's list of numbers."""
        return self._together("maximum", list(numbers), lambda lists: [*map(max, *lists, lists[0])])

    def first(self, value):
        """Return the value of the lowest rank whose value is not None, or None."""
        return self._together("first", value, lambda values: next((x for x in values if x is not None), None))

    def broadcast(self, value):  # rank 0's
        return self._together("broadcast", value if self.rank == 0 else None, lambda values: values[0])

    def barrier(self):
        self._together("barrier", None, len)

    def part(self):
        """Wait for all ranks for the last time: rank 0's process, which holds the store, ends last."""
        self.barrier()
        self._wait_until_read()

    @contextlib.contextmanager
    def input(self):
        """End all ranks with exit code 2, and one line from one of them, if on any rank
        the body raises ValueError or OSError: wrong flags or files.

        It says so in the place of its next word, so the others learn of it where they next speak, or at the
        end. Before a collective of the device, the body must say something, for example barrier().
        """
        try:
            yield
        except (ValueError, OSError) as e:
            self._together(WRONG, one_line(e), list)
        self.barrier()  # no rank goes on before all are here

    def _together(self, kind, value, combine):
        """Return combine([value of rank 0, value of rank 1, ...]), computed on rank 0, on every rank."""
        if self.calls is not None and self.size > 1:
            self.calls.record(self, kind)
        self.turn += 1
        words = [f"everyone/{self.turn}/{rank}" for rank in range(1, self.size)]
        word = json.dumps((kind, value))  # of one rank, too: values have the same types on all
        if self.rank > 0:
            self.store.set(words[self.rank - 1], word)
            answer = self.store.get(f"everyone/{self.turn}")
            self.store.delete_key(words[self.rank - 1])
        elif words:
            answer = _answer([word, *self.store.multi_get(words)], combine)
            self.store.set(f"everyone/{self.turn}", answer)
            self.store.delete_key(f"everyone/{self.turn - 1}")  # all are in this turn: they have read it
        else:
            answer = _answer([word], combine)

        wrong, kinds, result = json.loads(answer)
        if wrong and wrong[0][0] == self.rank:
            complain(f"nanoshard: {wrong[0][1]}")
        if wrong or len(kinds) > 1:
            self._wait_until_read()  # rank 0 may end now, and then a launcher ends the others
        if wrong:
            raise SystemExit(Outcome.WRONG_INPUT)
        if len(kinds) > 1:
            raise RuntimeError(f"mismatch over the world: one rank is in {kinds[0]}, another in {kinds[1]}")
        return result

    def _wait_until_read(self):
        """On rank 0, wait until the others have read the last answer."""
        read = [f"everyone/{self.turn}/{rank}/read" for rank in range(1, self.size)]
        if self.rank > 0:
            self.store.set(read[self.rank - 1], "")
        elif read:
            self.store.multi_get(read)


def _answer(words, combine):
    """Return as JSON [(rank, text)] of wrong input, the methods that the ranks are in, and the result."""
    said = [json.loads(word) for word in words]
    wrong = [(rank, value) for rank, (kind, value) in enumerate(said) if kind == WRONG]
    kinds = sorted({kind for kind, _ in said})
    result = combine([value for _, value in said]) if len(kinds) == 1 else None
    return json.dumps((wrong, kinds, result))

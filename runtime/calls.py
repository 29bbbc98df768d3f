"""What each rank notes about its collectives, so that a hang can be explained."""
from collections import Counter


class CollectiveLog:
    """The collectives that this rank has started, which the watchdog reports when a run hangs.

    started: {axis: number of collectives}. last: (kind, axis, (shape, dtype)) of the newest one, or None.
    """

    def __init__(self):
        self.started = Counter()
        self.last = None
        self.on_next_collective = None  # called once, where this rank's own work in a step ends

    def record(self, kind, axis, tensor=None):
        """Note that this rank is about to start a collective, for example an "all-reduce" of tensor."""
        callback = self.on_next_collective
        if callback is not None:
            self.on_next_collective = None
            callback()

        self.started[axis] += 1
        contents = None if tensor is None else (tensor.shape, tensor.dtype)
        self.last = (kind, axis, contents)

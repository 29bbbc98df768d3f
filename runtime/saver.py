"""Saving in the background: training goes on while a checkpoint is written.

On a GPU the copy runs on its own stream during the next forward and backward, and the optimizer waits for it
before its update. The thread calls no collective, because those of two threads would get mixed up.
"""
import threading
import time

import torch

import checkpoint
from config import Outcome
from interface.terminal import one_line, warn
from ops.accelerator import stream_module
from ops.checksum import refuse_not_finite
from ops.split_master import SplitMaster, whole

MAX_FAILURES = 3  # failed saves in a row that end the run


class Saver:
    """Writes the checkpoints of a run, one after another, each in a thread.

    everyone: all ranks, each of which saves its part. keep: the number of newest checkpoints to keep, or 0
    for all. timeout: see checkpoint.commit. run_id: see checkpoint.save.
    """

    def __init__(self, root, everyone, keep=0, timeout=600.0, run_id="0"):
        self.root = root
        self.everyone = everyone
        self.keep = keep
        self.timeout = timeout
        self.run_id = run_id
        self.thread = None
        self.saved = 0       # step of the last save that was committed
        self.failures = 0    # saves in a row that failed
        self.seconds = 0.0   # the longest save so far
        self.buffers = {}    # host memory of each piece, used by every save
        self.stream = None   # on which a GPU copies the pieces

    def start(self, step, pieces, meta):
        """Start to save, and return an event after which the tensors may change (None: now)."""
        begun = time.monotonic()
        self.wait()
        copies, copied = self.copy(pieces)
        self.step = step
        self.tmp = self.root / f"step_{step:06d}.{self.run_id}.tmp"
        self.part_done = threading.Event()
        self.error = None
        self.gives_up = False  # a part of another rank will never come
        self.thread = threading.Thread(target=self.write, args=(copies, copied, meta, begun), daemon=True)
        self.thread.start()
        return copied

    def copy(self, pieces):
        """Return (pieces with copies on the host, the event after which they are complete, or None)."""
        module = stream_module(pieces[0][1].device) if pieces else None
        if module is None:
            return [(name, self.host_copy(i, t), *place) for i, (name, t, *place) in enumerate(pieces)], None
        self.stream = self.stream or module.Stream()
        self.stream.wait_stream(module.current_stream())  # the step's update comes first
        with module.stream(self.stream):
            copies = [(name, self.host_copy(i, t), *place) for i, (name, t, *place) in enumerate(pieces)]
            return copies, self.stream.record_event()

    def host_copy(self, key, tensor):
        """Return a copy of a tensor in the memory of this key. A SplitMaster stays one."""
        if isinstance(tensor, SplitMaster):
            own = self.host_copy((key, "own"), tensor.own)
            return SplitMaster(own, self.host_copy((key, "low"), tensor.low))
        has_stream = self.stream is not None
        if key not in self.buffers:
            self.buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_stream)
        return self.buffers[key].copy_(tensor, non_blocking=has_stream)

    def write(self, copies, copied, meta, begun):
        """Write this rank's part; on rank 0, commit and remove what --keep does not keep. In the thread."""
        rank = self.everyone.rank
        try:
            if copied is not None:
                copied.synchronize()
            pieces = [(name, whole(piece), *place) for name, piece, *place in copies]
            refuse_not_finite(pieces)
            checkpoint.write_part(self.tmp, rank, pieces)
            self.part_done.set()
            if rank == 0:
                checkpoint.commit(self.tmp, self.step, meta, self.everyone.size, self.timeout,
                                  lambda: self.gives_up)
                if self.keep:
                    checkpoint.prune(self.root, self.keep, meta.get("best", {}).get("step"))
        except Exception as e:  # any exception: wait() must learn of it
            self.error = f"{one_line(e)} (rank {rank})"
        self.part_done.set()
        self.seconds = max(self.seconds, time.monotonic() - begun)

    def wait(self):
        """Wait for the save that is under way. Return False if it failed on any rank. Collective.

        SystemExit(1): MAX_FAILURES saves in a row failed.
        """
        if self.thread is None:
            return True
        self.part_done.wait()
        error = self.everyone.first(self.error)  # a short text of the lowest rank that has one
        self.gives_up = error is not None
        self.thread.join()
        self.thread = None
        error = error or self.everyone.first(self.error)  # rank 0's commit, too
        if error is None:
            self.saved = self.step
            self.failures = 0
            return True
        self.failures += 1
        if self.everyone.rank == 0:
            checkpoint.discard(self.tmp)
            warn(f"step {self.step} was not saved: {error}; training goes on, and ends after {MAX_FAILURES} "
                 "failures in a row")
        if self.failures == MAX_FAILURES:
            raise SystemExit(Outcome.FAILED)
        return False

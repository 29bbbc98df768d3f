"""Saving in the background: training goes on while a checkpoint is written.

    start()   main thread: wait for the save before, copy the pieces to host buffers, start the thread
    thread    writes rank_R.safetensors; rank 0's waits for all ranks' lists, then renames the directory
    wait()    main thread: join, and learn whether all ranks succeeded; called before each save and at the end

The checkpoint holds the values at start(): on a GPU the copy runs on its own stream during the next forward
and backward, and the optimizer waits for it before its update. The thread calls no collective, because the
collectives of two threads would get mixed up. A save that fails leaves older checkpoints as they are, and
training goes on.
"""
import threading
import time
from pathlib import Path

import torch

import checkpoint
from config import Outcome
from interface.terminal import warn
from ops.accelerator import stream_module
from ops.checksum import refuse_not_finite
from ops.split_master import SplitMaster, whole
from parallel import Axis
from runtime.everyone import Everyone

MAX_FAILURES = 3  # failed saves in a row that end the run


class Saver:
    """Writes the checkpoints of a run, one after another, each in a thread.

    root: the run's directory. keep: the number of newest checkpoints to keep, or 0 for all.
    axis: all ranks, each of which saves its part; None: this rank alone.
    timeout: seconds to wait for another rank's part. run_id: see resume.run_id().
    """

    def __init__(self, root, axis=None, keep=0, timeout=600.0, run_id="0"):
        self.root = Path(root)
        self.axis = axis or Axis("world", everyone=Everyone())
        self.keep = keep
        self.run_id = run_id
        self.writers = checkpoint.Writers(self.axis.rank, self.axis.size, run_id, timeout)
        self.host = HostBuffers()
        self.job = None      # the Job under way
        self.failures = 0    # saves in a row that failed
        self.failed = None   # step of the last failed save
        self.saved = 0       # step of the last save that was committed
        self.seconds = 0.0   # the longest save so far

    def start(self, step, pieces, meta):
        """Start to save; the arguments are those of checkpoint.save.

        Return the event after which the tensors may change (None: now).
        """
        self.wait()
        copies, copied = self.host.copy(pieces)
        self.job = Job(self, step, copies, copied, meta)
        return copied

    def wait(self):
        """Wait for the save that is under way on all ranks. Return False if it failed.

        Collective over the axis. SystemExit(1): MAX_FAILURES saves in a row failed.
        """
        if self.job is None:
            return True
        job = self.job
        job.part_done.wait()
        # one integer, over the axis: if a part will never come, rank 0's thread need not wait for it
        job.stop = self.axis.everyone.any(job.error is not None)
        job.thread.join()
        self.job = None
        failed = self.axis.everyone.any(job.error is not None)  # over the axis: rank 0's commit too
        if not failed:
            self.failures = 0
            self.saved = job.step
            self.seconds = max(self.seconds, job.seconds)
            return True
        if self.axis.rank == 0:
            checkpoint.discard(job.tmp)
        self.failures += 1
        self.failed = job.step
        if self.failures == MAX_FAILURES:
            if self.axis.rank == 0:
                warn(f"{MAX_FAILURES} saves in a row failed, the last at step {job.step}, and the run ends; "
                     f"{self.newest()}; free space, repair the directory or the flags, then --resume auto")
            raise SystemExit(Outcome.FAILED)
        return False

    def newest(self):
        """Return a sentence that names the newest checkpoint."""
        path = next(iter(checkpoint.steps(self.root)), None)
        return f"the newest checkpoint is {path}" if path else f"{self.root} holds no checkpoint yet"


class Job:
    """One save of one rank, in a thread. copied: the event after which the copies are complete, or None."""

    def __init__(self, saver, step, copies, copied, meta):
        self.saver = saver
        self.step = step
        self.copies = copies
        self.copied = copied
        self.meta = meta
        self.tmp = saver.root / f"step_{step:06d}.{saver.run_id}.tmp"
        self.part_done = threading.Event()
        self.error = None
        self.stop = False   # a part of another rank will never come
        self.seconds = 0.0  # that it took
        self.thread = threading.Thread(target=self.run, name="saver", daemon=True)
        self.thread.start()

    def run(self):
        """Write this rank's part; on rank 0, commit and remove what --keep does not keep."""
        started = time.monotonic()
        writers = self.saver.writers
        try:
            if self.copied is not None:
                self.copied.synchronize()
            pieces = [(name, whole(piece), *place) for name, piece, *place in self.copies]
            refuse_not_finite(pieces)
            checkpoint.write_part(self.tmp, writers.rank, pieces)
            self.part_done.set()
            if writers.rank == 0:
                checkpoint.commit(self.tmp, self.step, self.meta, writers, lambda: self.stop)
        except Exception as e:  # any exception: wait() must learn of it
            self.error = e
            self.report()
        self.part_done.set()
        if writers.rank == 0 and self.saver.keep and self.error is None:
            try:
                checkpoint.prune(self.saver.root, self.saver.keep, self.meta.get("best", {}).get("step"))
            except OSError as e:  # one checkpoint too many is left; the save itself is good
                warn(f"an old checkpoint could not be removed: {e}")
        self.seconds = time.monotonic() - started

    def report(self):
        """Print one line from one rank: the first that creates the file `failed`, or rank 0 if none can."""
        rank = self.saver.writers.rank
        try:
            self.tmp.mkdir(parents=True, exist_ok=True)  # nothing was written yet where a value is wrong
            (self.tmp / "failed").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            if rank:
                return
        warn(f"step {self.step} was not saved: {self.error} (rank {rank}); "
             f"training goes on, {self.saver.newest()}")


class HostBuffers:
    """Host memory for the pieces of one rank, allocated once and used by every save.

    Where a stream copies, the memory is pinned; then torch rounds each piece up to a power of two.
    """

    def __init__(self):
        self.buffers = {}  # number of a piece, or of a part of it: its host tensor
        self.stream = None

    def copy(self, pieces):
        """Copy the tensors of [(name, tensor, full shape, offset)] to the host.

        Return the same list with the copies, and an event after which the tensors may change. The event is
        None if the copies are already complete.
        """
        module = stream_module(pieces[0][1].device) if pieces else None
        if module is None:
            return self.copies(pieces), None

        self.stream = self.stream or module.Stream()
        self.stream.wait_stream(module.current_stream())  # the step's update comes first
        with module.stream(self.stream):
            copies = self.copies(pieces)
            return copies, self.stream.record_event()

    def copies(self, pieces):
        return [(name, self.host_copy(i, tensor), *place) for i, (name, tensor, *place) in enumerate(pieces)]

    def host_copy(self, key, tensor):
        """Return a copy of a tensor in the memory of this key. A SplitMaster stays one."""
        if isinstance(tensor, SplitMaster):
            own = self.host_copy((key, "own"), tensor.own)
            return SplitMaster(own, self.host_copy((key, "low"), tensor.low))
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = self.stream is not None
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self.buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=self.stream is not None)

"""Save while training goes on: a copy to host memory, then a thread of each rank writes its part.

    start()   main thread: wait for the save before, copy the pieces to reused host buffers, start the thread
    thread    writes rank_R.safetensors; rank 0's waits for all ranks' files, renames. No collective here
    wait()    main thread: join, agree over all ranks if it went well; before the next save and at the end

What is saved is what was true at start(): on a GPU the copy runs on its own stream beside the next forward
and backward, and the optimizer waits for it before it changes anything. A save that fails leaves the older
checkpoints as they are and training goes on; the third in a row ends the run.
"""
import shutil
import sys
import threading
import time
from pathlib import Path

import torch

import checkpoint

PATIENCE = 3  # failed saves in a row that end the run


def say(text):
    print("nanoshard: " + " ".join(text.split()), file=sys.stderr, flush=True)  # one line always


class Saver:
    """root: the run's directory. agree(bad) -> True if bad on any rank. token: see checkpoint.save."""

    def __init__(self, root, rank=0, writers=1, keep=0, timeout=600.0, token="0", agree=bool):
        self.root, self.rank, self.writers, self.keep, self.timeout = Path(root), rank, writers, keep, timeout
        self.token, self.agree, self.host = token, agree, HostCopy()
        self.job, self.failed, self.saved, self.seconds = None, 0, 0, 0.0

    def start(self, step, pieces, meta):
        """Begin to save; arguments as of checkpoint.save -> event after which pieces may change."""
        self.wait()
        copies, copied = self.host.take(pieces)
        self.job = Job(self, step, copies, copied, meta)
        return copied

    def wait(self):
        """Until the save in flight is over on all ranks -> False if it failed, exit 1 at the third."""
        if self.job is None:
            return True
        job = self.job
        job.part_done.wait()
        job.stop = self.agree(job.error is not None)  # a part will not come: rank 0 need not wait for it
        job.thread.join()
        self.job = None
        failed = self.agree(job.error is not None)  # the commit, on rank 0
        if not failed:
            self.failed, self.saved, self.seconds = 0, job.step, max(self.seconds, job.seconds)
            return True
        if self.rank == 0:
            shutil.rmtree(job.tmp, ignore_errors=True)
        self.failed += 1
        if self.failed == PATIENCE:
            if self.rank == 0:
                say(f"{PATIENCE} saves in a row failed, the last at step {job.step}, and the run ends; "
                    f"{self.newest()}; make room or mend the directory, then --resume auto")
            raise SystemExit(1)
        return False

    def newest(self):
        path = next(iter(checkpoint.steps(self.root)), None)
        return f"the newest checkpoint is {path}" if path else f"{self.root} holds no checkpoint yet"


class Job:
    """One save of one rank, in its own thread."""

    def __init__(self, saver, step, pieces, copied, meta):
        self.saver, self.step, self.pieces, self.copied, self.meta = saver, step, pieces, copied, meta
        self.tmp = saver.root / f"step_{step:06d}.{saver.token}.tmp"
        self.part_done, self.error, self.stop, self.seconds = threading.Event(), None, False, 0.0
        self.thread = threading.Thread(target=self.run, name="saver", daemon=True)
        self.thread.start()

    def run(self):
        began, s = time.monotonic(), self.saver
        try:
            if self.copied is not None:
                self.copied.synchronize()
            checkpoint.write_part(self.tmp, s.rank, self.pieces)
            self.part_done.set()
            if s.rank == 0:
                checkpoint.commit(self.tmp, self.step, s.writers, self.meta, s.timeout, lambda: self.stop)
        except Exception as e:  # whatever it is, the training thread must hear of it
            self.error = e
            self.report()
        self.part_done.set()
        if s.rank == 0 and s.keep and self.error is None:
            try:
                checkpoint.prune(s.root, s.keep)
            except OSError as e:  # too many checkpoints are no failed save
                say(f"an old checkpoint stays: {e}")
        self.seconds = time.monotonic() - began

    def report(self):
        """One line from one rank: from the first that leaves its mark; where nobody can, from rank 0."""
        try:
            (self.tmp / "failed").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            if self.saver.rank:
                return
        say(f"step {self.step} was not saved: {self.error} (rank {self.saver.rank}); "
            f"training goes on, {self.saver.newest()}")


class HostCopy:
    """Host memory for one rank's pieces, taken once, used by every save. Pinned where a GPU copies."""
    CHUNK = 1 << 30  # bytes; torch's pinned allocator rounds up to a power of two, so ask for one

    def __init__(self):
        self.buffers, self.stream = {}, None

    def take(self, pieces):
        """[(name, tensor, full shape, offset)] -> (the same of copies, event: the tensors may change)."""
        cuda = any(t.is_cuda for _, t, _, _ in pieces)
        if not cuda:
            return [(n, self.buffer(i, t).copy_(t), *place) for i, (n, t, *place) in enumerate(pieces)], None
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())  # the step's update comes first
        with torch.cuda.stream(self.stream):
            copies = [(n, self.buffer(i, t).copy_(t, non_blocking=True), *place)
                      for i, (n, t, *place) in enumerate(pieces)]
            return copies, self.stream.record_event()

    def buffer(self, i, t):
        """The host tensor for piece i."""
        if i not in self.buffers or self.buffers[i].shape != t.shape or self.buffers[i].dtype != t.dtype:
            self.buffers[i] = self.room(t.numel() * t.element_size(), t.is_cuda).view(t.dtype).view(t.shape)
        return self.buffers[i]

    def room(self, n, pinned):
        """(n,) bytes, aligned: from the open chunk, or from a new one."""
        if not pinned:
            return torch.empty(n, dtype=torch.uint8)
        if n > self.left:
            self.chunk = torch.empty(max(n, self.CHUNK), dtype=torch.uint8, pin_memory=True)
            self.left = self.chunk.numel()
        at = self.chunk.numel() - self.left
        self.left = max(0, self.left - -(-n // 64) * 64)
        return self.chunk[at:at + n]

    left = 0

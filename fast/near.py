"""Gradients and weights between the GPUs of one node, without NCCL: the two collectives of ZeRO-1 as plain
copies between windows (window.py).

    gradients  each rank fetches its own slice from all others and adds up: a reduce-scatter
    weights    each rank fetches the others' slices from them: an all-gather

The GPU's copy engines carry them beside forward and backward, while NCCL's kernels take multiprocessors from
those. And the gradients travel as backward made them, in the model's dtype, half the bytes of fp32; they are
added up in fp32 where they arrive, which is the same sum.
"""
import contextlib

import torch

from fast.window import Window
from ops.fused import add_up
from parallel import Bucket, CompletedWork


class Lane:
    """A stream for copies between windows, beside the one that computes; on a CPU nothing runs beside.
    staged: where they come in, used by one after the other."""

    def __init__(self):
        self.stream, self.staged = None, None

    def reserve(self, n, like):
        """Before any recording: room for n elements."""
        if self.stream is None and like.is_cuda:
            self.stream = torch.cuda.Stream(like.device, priority=-1)
        if self.staged is None or self.staged.numel() < n:
            self.staged = like.new_empty(n)

    @contextlib.contextmanager
    def behind(self):
        """What is launched inside runs on the lane, after all that was launched before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def mark(self):
        """-> whose wait() lets the computing stream wait for all that is on the lane by now."""
        return CompletedWork() if self.stream is None else self.stream.record_event()


class NearBucket(Bucket):
    """parallel.Bucket for ZeRO-1 and one micro-batch per step, whose axis' GPUs reach each other's memory.
    A window is written anew only after opt.totals' all-reduce, which no rank passes before all have fetched.
    """

    def __init__(self, lane, *args, **more):
        self.lane = lane
        super().__init__(*args, **more)

    def memory(self, drawn, dtype):
        self.weights, self.gradients = (Window(self.axis, 1, drawn.numel(), dtype, drawn.device)
                                        for _ in range(2))
        flat, grad = self.weights.mine[0].zero_(), self.gradients.mine[0].zero_()
        self.lane.reserve(drawn.numel() // self.shards * (self.shards - 1), flat)
        return flat, grad, torch.zeros_like(drawn[self.mine])

    def others(self):
        return [(self.axis.rank + i) % self.axis.size for i in range(1, self.axis.size)]

    def add_up(self):
        self.axis.record("reduce-scatter", self.grad, self.axis.ring_bytes(self.grad))
        with self.lane.behind():
            self.gradients.barrier()  # all are complete
            own = self.total.numel()
            parts = self.lane.staged[:own * (self.shards - 1)].view(-1, own)  # (size-1, n/size)
            for part, rank in zip(parts, self.others(), strict=True):  # n/size from each, over the axis
                part.copy_(self.gradients.all[rank][0, self.mine])
            add_up(self.total, self.grad[self.mine], parts)
            return self.lane.mark()

    def send_weights(self):
        self.axis.record("all-gather", self.flat, self.axis.ring_bytes(self.flat))
        with self.lane.behind():
            self.weights.barrier()  # all have stepped
            for rank in self.others():  # n/size weights from each, over the axis
                theirs = self.span(rank, self.flat.numel())
                self.flat[theirs].copy_(self.weights.all[rank][0, theirs])
            self.gather = self.lane.mark()

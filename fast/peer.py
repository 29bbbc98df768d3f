"""ZeRO's gradients and weights between the GPUs of one node, without NCCL: plain copies between symmetric
buffers (fast/symm_mem.py).

    gradients  each rank copies its own slice from all others and adds them up: a reduce-scatter
    weights    each rank copies the others' slices from them: an all-gather

The GPU's copy engines carry them while forward and backward run; NCCL's kernels would take multiprocessors
from those. The gradients travel in the model's dtype, as backward made them, half the bytes of fp32; each
rank adds them up in fp32. That is the sum of fp32 gradients: under ZeRO-1 there is one micro-batch, so
nothing is added on a rank; ZeRO-2 and 3 send every micro-batch's.
"""
import contextlib

import torch

from ddp import Comm
from fast.symm_mem import SymmetricBuffer
from ops.accelerator import stream_module
from ops.flat import sum_shards
from parallel import CompletedWork
from zero import Slot


class CopyStream:
    """A stream for copies between GPUs, beside the one that computes; on a CPU copies run in line.
    module: torch's for this kind of device; recv_buffer: where the others' gradients arrive, shared by all
    buckets in turn."""

    def __init__(self):
        self.module = self.stream = self.recv_buffer = None

    def reserve(self, n, like):
        """Make room for n elements; before any graph is captured."""
        self.module = stream_module(like.device)
        if self.stream is None and self.module is not None:
            self.stream = self.module.Stream(like.device, priority=-1)
        if self.recv_buffer is None or self.recv_buffer.numel() < n:
            self.recv_buffer = like.new_empty(n)

    @contextlib.contextmanager
    def side_stream(self):
        """Operations issued inside run on the copy stream, after all issued so far on the compute stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            yield

    def record_event(self):
        """-> a handle; its wait() makes the compute stream wait for everything issued so far on this one."""
        return CompletedWork() if self.stream is None else self.stream.record_event()


class PeerComm(Comm):
    """ddp.Comm for ZeRO-1 with one micro-batch per step, on an axis whose GPUs reach each other's
    memory. The others copy from gradients before their grad sync ends, and from weights in their forward;
    both precede the all-reduce of Optimizer.stats, and this rank overwrites its buffers only after it. One
    instance per bucket; all share a CopyStream."""

    def __init__(self, stream, grad_dtype):
        super().__init__(grad_dtype)
        self.stream = stream

    def allocate(self, axis, shard, weights, dtype):
        n = weights.numel()
        self.weights, self.gradients = (SymmetricBuffer(axis, 1, n, dtype, weights.device) for _ in range(2))
        flat, grad = self.weights.local[0].zero_(), self.gradients.local[0].zero_()
        total = torch.zeros_like(weights[shard])
        self.stream.reserve(n - total.numel(), flat)
        return flat, grad, total

    def start_reduce(self, bucket):
        axis, grad, total = bucket.axis, bucket.grad, bucket.total
        axis.record("reduce-scatter", grad, axis.ring_bytes(grad))
        with self.stream.side_stream():
            self.gradients.barrier()  # the gradients of all ranks are complete
            n = total.numel()
            parts = self.stream.recv_buffer[:n * (bucket.shards - 1)].view(-1, n)  # (size-1, n/size)
            for part, rank in zip(parts, others(axis), strict=True):  # n/size from each, over the axis
                part.copy_(self.gradients.peers[rank][0, bucket.shard])
            sum_shards(total, grad[bucket.shard], parts)
            return self.stream.record_event()

    def start_gather(self, bucket):
        axis, flat = bucket.axis, bucket.flat
        axis.record("all-gather", flat, axis.ring_bytes(flat))
        with self.stream.side_stream():
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in others(axis):  # n/size weights from each, over the axis
                theirs = bucket.shard_slice(rank, flat.numel())
                flat[theirs].copy_(self.weights.peers[rank][0, theirs])
            return self.stream.record_event()


class PeerSlot(Slot):
    """A zero.Slot that the other ranks of the stage read."""

    def __init__(self, n, dtype, device, axis):
        self.memory = SymmetricBuffer(axis, 1, n, dtype, device)
        self.buffer, self.user = self.memory.local[0], None


class PeerSlotComm(PeerComm):
    """zero.SlotComm on such an axis, for any number of micro-batches. What the others copy weights from is a
    buffer of its own, this rank's slice: flat of a zero.ShardedBucket comes and goes. It too is overwritten
    only after Optimizer.stats, and before that every rank has used what it copied."""

    def __init__(self, stream):
        super().__init__(stream, None)

    def new_slot(self, n, dtype, device, axis):
        return PeerSlot(n, dtype, device, axis)

    def allocate(self, axis, shard, weights, dtype):
        n = weights.numel()
        total = torch.zeros_like(weights[shard])
        self.weights = SymmetricBuffer(axis, 1, total.numel(), dtype, weights.device)
        self.own, flat = self.weights.local[0], torch.zeros_like(weights, dtype=dtype)
        self.stream.reserve(n - total.numel(), flat)
        return flat, self.slot.buffer[:n], total

    def keep(self, own):
        return self.own.copy_(own)

    def start_reduce(self, bucket):
        axis, total, memory = bucket.axis, bucket.total, self.slot.memory
        axis.record("reduce-scatter", bucket.grad, axis.ring_bytes(bucket.grad))
        with self.stream.side_stream():
            memory.barrier()  # the gradients of all ranks are complete
            n = total.numel()
            parts = self.stream.recv_buffer[:n * (bucket.shards - 1)].view(-1, n)  # (size-1, n/size)
            for part, rank in zip(parts, others(axis), strict=True):  # n/size from each, over the axis
                theirs = memory.peers[memory.axis.ranks.index(axis.ranks[rank])]
                part.copy_(theirs[0, bucket.shard])
            memory.barrier()  # all ranks have copied: the slot may be overwritten
            added = total if bucket.is_first else torch.empty_like(total)
            sum_shards(added, bucket.grad[bucket.shard], parts)
            if added is not total:
                total.add_(added)
            return self.stream.record_event()

    def add_sum(self, bucket):
        """start_reduce() has done it."""

    def start_gather(self, bucket):
        axis, flat = bucket.axis, bucket.flat
        axis.record("all-gather", flat, axis.ring_bytes(flat))
        with self.stream.side_stream():
            if bucket.own is not self.own:
                self.own.copy_(bucket.own)
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in (axis.rank, *others(axis)):  # n/size weights from each, over the axis
                flat[bucket.shard_slice(rank, flat.numel())].copy_(self.weights.peers[rank][0])
            return self.stream.record_event()


def others(axis):
    """The other ranks of the axis; each rank begins with its neighbour, so that no GPU serves all at once."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]

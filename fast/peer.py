"""ZeRO's gradients and weights between the GPUs of one node, without NCCL: plain copies between symmetric
buffers (fast/symm_mem.py).

    gradients  each rank copies its own slice from all others and adds up the copies: a reduce-scatter
    weights    each rank copies the others' slices from them: an all-gather

The GPU's copy engines carry the data while forward and backward run. NCCL's kernels would take
multiprocessors away from forward and backward. The gradients travel in the model's dtype, as backward made
them, which is half the bytes of fp32, and each rank adds them up in fp32. The result equals the sum of fp32
gradients: ZeRO-1 has only one micro-batch, so no rank adds gradients in the model's dtype; ZeRO-2 and 3 send
every micro-batch's gradients.

    CopyStream                 where the copies run
    PeerComm                   ddp.Comm by copies, for ZeRO-1
    PeerSlot, PeerSlotComm     zero.Slot and zero.SlotComm by copies, for ZeRO-2 and 3
"""
import contextlib
from typing import NamedTuple

import torch

from ddp import Comm
from fast.symm_mem import SymmetricBuffer
from ops.accelerator import stream_module
from ops.flat import sum_slices
from parallel import CompletedWork
from zero import Slot


class CopyStream:
    """A stream for copies between GPUs, next to the stream that computes. On a CPU, copies run in line.

    module: torch's module for this kind of device. recv_buffer: where the others' gradients arrive; all
    buckets use it in turn.
    """

    def __init__(self):
        self.module = None
        self.stream = None
        self.recv_buffer = None

    def reserve(self, n, like):
        """Make room for n elements, before any graph is captured. like: a tensor of the dtype and device."""
        self.module = stream_module(like.device)
        if self.stream is None and self.module is not None:
            self.stream = self.module.Stream(like.device, priority=-1)
        if self.recv_buffer is None or self.recv_buffer.numel() < n:
            self.recv_buffer = like.new_empty(n)

    @contextlib.contextmanager
    def side_stream(self):
        """Run operations on the copy stream, after all those issued so far on the compute stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            yield

    def record_event(self):
        """Return a handle. Its wait() makes the compute stream wait for all operations issued so far on this
        one."""
        return CompletedWork() if self.stream is None else self.stream.record_event()

    def copy_slices(self, bucket, gradients):
        """Copy the other ranks' gradients of this rank's slice. Return (size - 1, n/size), in recv_buffer.

        gradients: those of each rank of the bucket's shard, by rank, (1, n) or longer.
        """
        slice_size = bucket.grad_total.numel()  # n/size
        parts = self.recv_buffer[:slice_size * (bucket.n_slices - 1)].view(-1, slice_size)
        for part, rank in zip(parts, others(bucket.shard), strict=True):  # n/size from each, over the shard
            part.copy_(gradients[rank][0, bucket.own_slice])
        return parts


def others(axis):
    """Return the other ranks of the axis, the neighbour first, so that no GPU serves all ranks at once."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]


class SumHandle(NamedTuple):
    """The handle of a bucket's sum: by copies over the shard, then by NCCL over the replicas."""
    copied: object
    replica_sum: object

    def wait(self):
        self.copied.wait()
        self.replica_sum.wait()


class PeerComm(Comm):
    """ddp.Comm for ZeRO-1 with one micro-batch per step, where the axis' GPUs reach each other's memory.

    The other ranks copy from this rank's gradients before their grad sync ends, and from its weights in their
    forward. Both copies precede the all-reduce of Optimizer.stats, and this rank overwrites its buffers only
    after that all-reduce. There is one instance per bucket; all instances share a CopyStream.
    """

    def __init__(self, stream, grad_dtype):
        super().__init__(grad_dtype)
        self.stream = stream

    def allocate(self, shard, own_slice, weights, dtype):
        n = weights.numel()
        self.weights = SymmetricBuffer(shard, 1, n, dtype, weights.device)
        self.gradients = SymmetricBuffer(shard, 1, n, dtype, weights.device)
        flat = self.weights.local[0].zero_()
        grad = self.gradients.local[0].zero_()
        grad_total = torch.zeros_like(weights[own_slice])
        self.stream.reserve(n - grad_total.numel(), flat)
        return flat, grad, grad_total

    def start_reduce(self, bucket):
        axis = bucket.shard
        axis.calls.record(axis, "reduce-scatter", bucket.grad, axis.ring * bucket.grad.nbytes)
        with self.stream.side_stream():
            self.gradients.barrier()  # the gradients of all ranks are complete
            parts = self.stream.copy_slices(bucket, self.gradients.peers)
            sum_slices(bucket.grad_total, bucket.grad[bucket.own_slice], parts)
            replica_sum = self.start_replica_sum(bucket)  # in fp32, over NCCL
        return SumHandle(self.stream.record_event(), replica_sum)

    def start_gather(self, bucket):
        axis = bucket.shard
        flat = bucket.flat
        axis.calls.record(axis, "all-gather", flat, axis.ring * flat.nbytes)
        with self.stream.side_stream():
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in others(axis):  # n/size weights from each, over the axis
                theirs = bucket.slice_of_rank(rank, flat.numel())
                flat[theirs].copy_(self.weights.peers[rank][0, theirs])
            return self.stream.record_event()


class PeerSlot(Slot):
    """A zero.Slot that the other ranks of the stage's shard read."""

    def __init__(self, n, dtype, device, axis):
        self.memory = SymmetricBuffer(axis, 1, n, dtype, device)
        self.buffer = self.memory.local[0]
        self.user = None

    def peers(self, axis):
        """Return the slot of each rank of an axis within the stage's shard, by rank."""
        return [self.memory.peers[self.memory.axis.ranks.index(rank)] for rank in axis.ranks]


class PeerSlotComm(Comm):
    """zero.SlotComm where the axis' GPUs reach each other's memory, for any number of micro-batches.

    The others copy weights from a buffer that holds this rank's slice, because the memory of a
    zero.ShardedBucket's flat comes and goes. This buffer, too, is overwritten only after Optimizer.stats. By
    then every rank has used its copies.
    """

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def new_slot(self, n, model_dtype, device, axis):
        return PeerSlot(n, model_dtype, device, axis)

    def allocate(self, shard, own_slice, weights, dtype):
        n = weights.numel()
        grad_total = torch.zeros_like(weights[own_slice])
        self.weights = SymmetricBuffer(shard, 1, grad_total.numel(), dtype, weights.device)
        self.own = self.weights.local[0]
        flat = torch.zeros_like(weights, dtype=dtype)
        self.stream.reserve(n - grad_total.numel(), flat)
        return flat, self.slot.buffer[:n], grad_total

    def keep(self, own):
        return self.own.copy_(own)

    def start_reduce(self, bucket):
        axis = bucket.shard
        axis.calls.record(axis, "reduce-scatter", bucket.grad, axis.ring * bucket.grad.nbytes)
        with self.stream.side_stream():
            self.slot.memory.barrier()  # the gradients of all ranks are complete
            parts = self.stream.copy_slices(bucket, self.slot.peers(axis))
            self.slot.memory.barrier()  # all ranks have copied: the slot may be overwritten
            own = bucket.grad[bucket.own_slice]
            if bucket.total_is_empty:
                sum_slices(bucket.grad_total, own, parts)
            else:
                new_sum = torch.empty_like(bucket.grad_total)
                sum_slices(new_sum, own, parts)
                bucket.grad_total.add_(new_sum)
            return self.stream.record_event()

    def add_to_total(self, bucket):
        """Do nothing: start_reduce() has added the sum."""

    def start_gather(self, bucket):
        axis = bucket.shard
        flat = bucket.flat
        axis.calls.record(axis, "all-gather", flat, axis.ring * flat.nbytes)
        with self.stream.side_stream():
            if bucket.own is not self.own:
                self.own.copy_(bucket.own)
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in (axis.rank, *others(axis)):  # n/size weights from each, over the axis
                flat[bucket.slice_of_rank(rank, flat.numel())].copy_(self.weights.peers[rank][0])
            return self.stream.record_event()

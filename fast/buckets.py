"""Buckets whose numbers travel with less waiting: each replaces methods of a bucket of ddp.py or zero.py.

The buckets with Peer in their name copy between symmetric buffers (fast/symm_mem.py), without NCCL:

    gradients  each rank copies its own slice from all others and adds up the copies: a reduce-scatter
    weights    each rank copies the others' slices from them: an all-gather

The GPU's copy engines carry the data, while NCCL's kernels would take multiprocessors from forward and
backward. Gradients travel in the model's dtype, as backward made them, and are added up in fp32.
"""
import contextlib
from functools import cache
from typing import NamedTuple

import torch

from config import ceil_div
from ddp import Bucket
from fast.symm_mem import SymmetricBuffer
from ops import backend
from ops.accelerator import stream_module
from parallel import CompletedWork
from zero import ShardedBucket, Slot, SlotBucket

CONVERT_ALONE = 2**18  # a gradient of at least this many elements is converted by Triton


class KernelBucket(Bucket):
    """A Bucket on a GPU. torch's own conversion to fp32 reaches a third of the bandwidth."""

    def take(self, i):
        grad = self.params[i].grad
        total = self.grad_windows[i]
        converts = grad.dtype != total.dtype and grad.numel() >= CONVERT_ALONE and grad.is_contiguous()
        if not (converts and backend.use_triton(grad)):
            super().take(i)
            return
        launch_sum(grad, grad, total, 0, not self.untouched[i])
        self.params[i].grad = None
        self.untouched[i] = False


class CopyBucket(Bucket):
    """A Bucket of one rank, with one micro-batch per step, so that nothing is added to a gradient."""

    def allocate(self, weights):
        self.grad = torch.zeros_like(self.flat)
        self.grad_total = self.grad[self.own_slice]
        self.grad_windows = self.windows(self.grad)

    def take(self, i):
        assert self.untouched[i], "a second micro-batch would be added in the model's dtype"
        self.untouched[i] = False

    def start_sum(self):
        self.copy_gradients()
        self.sum_handle = CompletedWork()


class LoneBucket(CopyBucket):
    """A CopyBucket of one parameter. Nothing is copied: grad is p.grad, another tensor in each step."""

    def allocate(self, weights):
        """Make no buffer."""

    def reset(self):
        super().reset()
        self.grad = None  # its memory is free during forward
        self.grad_total = None

    def start_sum(self):
        p, = self.params
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.grad = grad.flatten()  # a view
        self.grad_total = self.grad
        p.grad = None
        self.sum_handle = CompletedWork()


# Copies between GPUs

@cache
def copy_stream(device):
    return CopyStream(device)


class CopyStream:
    """A stream for copies between GPUs, next to the stream that computes. On a CPU, copies run in line."""

    def __init__(self, device):
        self.module = stream_module(device)
        self.stream = None if self.module is None else self.module.Stream(device, priority=-1)
        self.recv_buffer = None  # where the others' gradients arrive; all buckets use it in turn

    def reserve(self, n, like):
        """Make room for n elements, before any graph is captured. like: a tensor of the dtype and device."""
        if self.recv_buffer is None or self.recv_buffer.numel() < n:
            self.recv_buffer = like.new_empty(n)

    @contextlib.contextmanager
    def side_stream(self):
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            yield

    def record_event(self):
        return CompletedWork() if self.stream is None else self.stream.record_event()

    def copy_slices(self, bucket, gradients):
        """Copy the others' `gradients` of this rank's slice. Return (size - 1, n/size), in recv_buffer."""
        slice_size = bucket.grad_total.numel()  # n/size
        parts = self.recv_buffer[:slice_size * (bucket.n_slices - 1)].view(-1, slice_size)
        for part, rank in zip(parts, others(bucket.shard), strict=True):  # n/size from each, over the shard
            part.copy_(gradients[rank][0, bucket.own_slice])
        return parts


def others(axis):
    """Return the other ranks of the axis, the neighbour first, so that no GPU serves all ranks at once."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]


def sum_slices(total, own, others, add=False):
    """Set total (n,) fp32 to own (n,) plus each of others (ranks, n). add: plus what total was."""
    if backend.use_triton(own) and own.dtype != total.dtype:
        launch_sum(own, others, total, len(others), add)
        return
    new = own.to(total.dtype)
    for part in others:
        new = new + part
    total.copy_(total + new if add else new)


def launch_sum(own, others, total, ranks, add):
    from ops import kernels
    n = own.numel()
    kernels.sum_slices[(ceil_div(n, 4096),)](own, others, total, n, RANKS=ranks, ADD=add, BLOCK=4096,
                                             num_warps=8)


class SumHandle(NamedTuple):
    copied: object       # by copies, over the shard
    replica_sum: object  # by NCCL, over the replicas

    def wait(self):
        self.copied.wait()
        self.replica_sum.wait()


class PeerBucket(CopyBucket):
    """A CopyBucket of ZeRO-1 whose shard's GPUs reach each other's memory.

    The others copy from this rank's gradients before their grad sync ends, and from its weights in their
    forward: before the all-reduce of Optimizer.stats, after which this rank overwrites its buffers.
    """

    def allocate(self, weights):
        n = weights.numel()
        dtype = self.flat.dtype
        self.weights = SymmetricBuffer(self.shard, 1, n, dtype, weights.device)
        self.gradients = SymmetricBuffer(self.shard, 1, n, dtype, weights.device)
        self.flat = self.weights.local[0].zero_()
        self.grad = self.gradients.local[0].zero_()
        self.grad_windows = self.windows(self.grad)
        self.grad_total = torch.zeros_like(weights[self.own_slice])
        self.copies = copy_stream(weights.device)
        self.copies.reserve(n - self.grad_total.numel(), self.flat)

    def start_sum(self):
        self.copy_gradients()
        self.shard.calls.record(self.shard, "reduce-scatter", self.grad, self.shard.ring * self.grad.nbytes)
        with self.copies.side_stream():
            self.gradients.barrier()  # the gradients of all ranks are complete
            parts = self.copies.copy_slices(self, self.gradients.peers)
            sum_slices(self.grad_total, self.grad[self.own_slice], parts)
            # SUM of n/size numbers in fp32, over the replicas; without --shard they are this rank
            replica_sum = self.replicas.start_all_reduce(self.grad_total)
        self.sum_handle = SumHandle(self.copies.record_event(), replica_sum)

    def start_gather(self):
        self.shard.calls.record(self.shard, "all-gather", self.flat, self.shard.ring * self.flat.nbytes)
        with self.copies.side_stream():
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in others(self.shard):  # n/size weights from each, over the shard
                theirs = self.slice_of_rank(rank, self.flat.numel())
                self.flat[theirs].copy_(self.weights.peers[rank][0, theirs])
            self.gather_handle = self.copies.record_event()


class PeerSlot(Slot):
    """A zero.Slot that the other ranks of the stage's shard read."""

    def __init__(self, n, flat, axis):
        self.memory = SymmetricBuffer(axis, 1, n, flat.dtype, flat.device)
        self.buffer = self.memory.local[0]
        self.user = None

    def peers(self, axis):
        """Return the slot of each rank of an axis within the stage's shard, by rank."""
        return [self.memory.peers[self.memory.axis.ranks.index(rank)] for rank in axis.ranks]


class PeerSlotBucket(SlotBucket):
    """A SlotBucket whose shard's GPUs reach each other's memory, for any number of micro-batches."""
    slot_class = PeerSlot

    def allocate(self, weights):
        super().allocate(weights)
        n = self.grad_total.numel()
        self.weights = SymmetricBuffer(self.shard, 1, n, self.flat.dtype, weights.device)
        self.shown = self.weights.local[0]  # the others copy it: a ShardedBucket's flat comes and goes
        self.copies = copy_stream(weights.device)
        self.copies.reserve(weights.numel() - n, self.flat)

    def start_reduce(self):
        self.shard.calls.record(self.shard, "reduce-scatter", self.grad, self.shard.ring * self.grad.nbytes)
        with self.copies.side_stream():
            self.slot.memory.barrier()  # the gradients of all ranks are complete
            parts = self.copies.copy_slices(self, self.slot.peers(self.shard))
            self.slot.memory.barrier()  # all ranks have copied: the slot may be overwritten
            own = self.grad[self.own_slice]
            sum_slices(self.grad_total, own, parts, not self.total_is_empty)
            self.sum_handle = self.copies.record_event()

    def add_to_total(self):
        """Do nothing: start_reduce() has added the sum."""

    def start_gather(self):
        self.shard.calls.record(self.shard, "all-gather", self.flat, self.shard.ring * self.flat.nbytes)
        with self.copies.side_stream():
            if self.own is not self.shown:  # After Optimizer.stats, every rank has used its copies.
                self.shown.copy_(self.own)
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in (self.shard.rank, *others(self.shard)):  # n/size weights from each, over the shard
                theirs = self.slice_of_rank(rank, self.flat.numel())
                self.flat[theirs].copy_(self.weights.peers[rank][0])
            self.gather_handle = self.copies.record_event()


class PeerShardedBucket(PeerSlotBucket, ShardedBucket):
    def kept_slice(self):
        return self.shown.copy_(self.own)


# The class by which copies between GPUs replace another
PEER = {Bucket: PeerBucket, SlotBucket: PeerSlotBucket, ShardedBucket: PeerShardedBucket}

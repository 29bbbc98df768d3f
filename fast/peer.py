"""ZeRO's gradients and weights between the GPUs of one node, without NCCL: plain copies to and from symmetric
buffers (fast/symm_mem.py).

    gradients  each rank gets its own slice from all others and adds up what came: a reduce-scatter
    weights    each rank copies the others' slices from them: an all-gather

The GPU's copy engines carry almost all of the data while forward and backward run. NCCL's kernels would take
multiprocessors away from forward and backward. The gradients travel in the model's dtype, as backward made
them, which is half the bytes of fp32, and each rank adds them up in fp32. The result equals the sum of fp32
gradients: ZeRO-1 has only one micro-batch, so no rank adds gradients in the model's dtype; ZeRO-2 and 3 send
every micro-batch's gradients.

    CopyStream                 where the copies run
    Arrival, ReplicaSum        the handles of gradients that the others send
    PeerComm                   ddp.Comm by copies, for ZeRO-1
    PeerSlot, PeerSlotComm     zero.Slot and zero.SlotComm by copies, for ZeRO-2 and 3
"""
import collections
import contextlib

import torch

from ddp import Comm
from fast.symm_mem import SymmetricBuffer
from ops.accelerator import stream_module
from ops.flat import copy_gradients, sum_slices
from parallel import CompletedWork
from zero import Slot

SEND_ALONE = 2**15  # elements: a copy engine carries such a part of a gradient, one kernel all smaller ones
KEPT = 2  # buckets whose gradients keep their memory while they are sent


class CopyStream:
    """A stream for copies between GPUs, next to the stream that computes. On a CPU, copies run in line.

    module: torch's module for this kind of device. recv_buffer: where the others' gradients arrive under
    ZeRO-2 and 3; all buckets use it in turn.
    """

    def __init__(self):
        self.module = None
        self.stream = None
        self.recv_buffer = None
        self.sending = collections.deque()  # (handle, gradients that copies may still read)
        self.expected = collections.defaultdict(list)  # {ranks: Arrivals for which nobody has waited}

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

    def keep_while_sending(self, gradients):
        """Keep the memory of gradients that the copies issued so far read.

        The compute stream waits for the copies of the bucket before the last KEPT ones, whose memory it gets
        back. They have long been done. release() gives back the memory of the last ones.
        """
        self.sending.append((self.record_event(), gradients))
        if len(self.sending) > KEPT:
            handle, _ = self.sending.popleft()
            handle.wait()

    def release(self):
        """Make the compute stream wait for all copies issued so far, and give back what they have read.

        Each step does so once its gradients are summed. A handle that was kept until the next step could
        not be waited for in there: if that step is captured as a CUDA graph, the handle is not part of it.
        """
        if self.sending:
            self.record_event().wait()
            self.sending.clear()

    def meet(self, buffer):
        """Return a handle. Its wait() waits until all that the axis' ranks have sent so far is here."""
        with self.side_stream():
            buffer.barrier()
            return self.record_event()

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


class Arrival:
    """The handle of a bucket's gradients that all ranks of an axis send to this one.

    The ranks meet when the first handle is waited for, after backward. This one barrier serves all buckets
    that the same ranks have sent before it. A barrier for each bucket would make a GPU wait each time for the
    slowest one.
    """

    def __init__(self, stream, received):
        self.stream = stream
        self.received = received
        self.handle = None
        self.expected = stream.expected[tuple(received.axis.ranks)]
        self.expected.append(self)

    def wait(self):
        if self.handle is None:
            handle = self.stream.meet(self.received)
            for arrival in self.expected:
                arrival.handle = handle
            self.expected.clear()
        self.handle.wait()
        self.stream.release()


class ReplicaSum:
    """The handle of a bucket's sum over the replicas, which follows the sum over the shard (--shard)."""

    def __init__(self, stream, handle):
        self.stream = stream
        self.handle = handle

    def wait(self):
        self.handle.wait()
        self.stream.release()


class PeerComm(Comm):
    """ddp.Comm for ZeRO-1 with one micro-batch per step, where the axis' GPUs reach each other's memory.

    Each rank writes its gradients of a slice into the memory of the rank that updates the slice, from where
    backward made them. There grad_total has a row for each rank, and the optimizer adds up the rows. With
    --shard they are added up here, before the sum over the replicas.

    No rank waits before it writes. The others have read their rows for the last time in Optimizer.step, or
    with --shard before the sum over the replicas, and this rank begins a bucket only after their new weights,
    or, if the step was vetoed, after the all-reduce of Optimizer.stats. The others have copied from this
    rank's weights by the end of their forward, and this rank overwrites these only after that all-reduce.
    There is one instance per bucket; all instances share a CopyStream.
    """

    def __init__(self, stream, grad_dtype, has_replicas=False):
        super().__init__(grad_dtype)
        self.stream = stream
        self.has_replicas = has_replicas

    def allocate(self, shard, own_slice, weights, dtype):
        n = weights.numel()
        self.weights = SymmetricBuffer(shard, 1, n, dtype, weights.device)
        self.received = SymmetricBuffer(shard, shard.size, n // shard.size, dtype, weights.device)
        flat = self.weights.local[0].zero_()
        rows = self.received.local.zero_()  # (ranks, n/size). Nobody writes into the padding.
        self.received.barrier()  # no gradient comes before the zeros
        self.stream.reserve(0, flat)
        return flat, None, torch.zeros_like(weights[own_slice]) if self.has_replicas else rows

    def collect(self, bucket):
        """Send all p.grad of a bucket, each part to the rank of its slice."""
        with self.stream.side_stream():
            copy_gradients(self.parts(bucket), alone=SEND_ALONE)
        self.stream.keep_while_sending([p.grad for p in bucket.params])
        for p in bucket.params:
            p.grad = None

    def parts(self, bucket):
        """Return [(where it goes, part of a p.grad or None)]. A part is 1-D."""
        axis = bucket.shard
        grads = [None if p.grad is None else p.grad.flatten() for p in bucket.params]
        parts = []
        for rank in (*others(axis), axis.rank):
            row = self.received.peers[rank][axis.rank]
            theirs = bucket.slice_of_rank(rank, bucket.flat.numel())
            for p, grad, start in zip(bucket.params, grads, bucket.starts(), strict=True):
                begin = max(start, theirs.start)
                end = min(start + p.numel(), theirs.stop)
                if begin < end:
                    part = None if grad is None else grad[begin - start:end - start]
                    parts.append((row[begin - theirs.start:end - theirs.start], part))
        return parts

    def start_reduce(self, bucket):
        axis = bucket.shard
        rows = self.received.local
        axis.record("reduce-scatter", rows, axis.ring_bytes(rows))  # n numbers, as collect() has sent them
        if not self.has_replicas:
            return Arrival(self.stream, self.received)
        with self.stream.side_stream():
            self.received.barrier()  # the gradients of all ranks are complete
            sum_slices(bucket.grad_total, rows[0], rows[1:])
            return ReplicaSum(self.stream, self.start_replica_sum(bucket))  # in fp32, over NCCL

    def start_gather(self, bucket):
        axis = bucket.shard
        flat = bucket.flat
        axis.record("all-gather", flat, axis.ring_bytes(flat))
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
        axis.record("reduce-scatter", bucket.grad, axis.ring_bytes(bucket.grad))
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
        axis.record("all-gather", flat, axis.ring_bytes(flat))
        with self.stream.side_stream():
            if bucket.own is not self.own:
                self.own.copy_(bucket.own)
            self.weights.barrier()  # all ranks have stepped their slices
            for rank in (axis.rank, *others(axis)):  # n/size weights from each, over the axis
                flat[bucket.slice_of_rank(rank, flat.numel())].copy_(self.weights.peers[rank][0])
            return self.stream.record_event()

"""Rows to the experts and back without messages: each rank writes into the memory of the other GPUs.

all_to_all needs row counts on the host, and a CUDA graph cannot capture a host read. One-sided writes (MPI-3,
chapter 11) need barriers instead: before a rank reads what others wrote, and before it overwrites what others
may still read.

A destination `dst` counts rows over all ranks: rank * rows + the row in that rank's buffer. -1 means none.
"""
import weakref
from typing import NamedTuple

import torch

from moe import AllToAll
from ops.permute import Unpermute, queue_by_expert, unpermute


class SymmetricBuffer:
    """A buffer of this rank that all ranks of an axis address. They allocate together.

    local: this rank's (rows, width). peers: the same for every rank of the axis, by rank.
    """

    instances = weakref.WeakSet()  # all buffers of this process

    def __init__(self, axis, rows, width, dtype, device):
        import torch.distributed._symmetric_memory as symmetric
        self.axis = axis
        self.rows = rows
        try:
            self.local = symmetric.empty(rows, width, dtype=dtype, device=device)
            self.handle = symmetric.rendezvous(self.local, axis.group)
        except RuntimeError as e:
            why = str(e).splitlines()[0]
            if "out of memory" in why:
                raise
            raise ValueError(f"the GPUs of {axis.name} {axis.size} cannot reach each other's memory ({why}); "
                             "try --no-cuda-graph --zero 0") from None
        SymmetricBuffer.instances.add(self)
        self.peers = [self.handle.get_buffer(r, (rows, width), dtype) for r in range(axis.size)]
        self.peer_ptrs = torch.tensor([w.data_ptr() for w in self.peers], device=device)

    def barrier(self):
        """Make the ranks of the axis wait for each other, on the GPU: what they wrote is visible to all."""
        self.axis.calls.record(self.axis, "barrier")
        self.handle.barrier()

    def record(self, kind, dst):
        """Count the bytes as if destinations were balanced: only the GPU knows how many rows go where."""
        row = self.local.size(1) * self.local.element_size()
        self.axis.calls.record(self.axis, kind, self.local, self.axis.ring * dst.numel() * row)

    def put(self, x, dst, K=1):
        """Write row c // K of x (n, width) to dst[c], c < n*K. Readers need a barrier first."""
        self.record("put", dst)
        if x.device.type != "cpu":
            from ops import kernels
            kernels.put[(dst.numel(),)](x.contiguous(), dst, self.peer_ptrs, self.rows, x.size(1), K=K,
                                        BLOCK=512, num_warps=2)
            return
        for rank, theirs in enumerate(self.peers):
            mask = (dst >= 0) & (dst // self.rows == rank)
            theirs[dst[mask] % self.rows] = x[mask.nonzero().squeeze(1) // K]

    def get(self, dst):
        """Return the rows (N, width) of dst (N,), zeros where it is -1."""
        self.record("get", dst)
        out = self.local.new_empty(dst.numel(), self.local.size(1))
        if out.device.type != "cpu":
            from ops import kernels
            kernels.get[(dst.numel(),)](out, dst, self.peer_ptrs, self.rows, out.size(1), BLOCK=512,
                                        num_warps=2)
            return out
        out.zero_()
        for rank, theirs in enumerate(self.peers):
            mask = (dst >= 0) & (dst // self.rows == rank)
            out[mask] = theirs[dst[mask] % self.rows]
        return out

    def publish(self, x):
        """Let the others read this rank's rows x (R, width), R <= rows."""
        self.local[:x.size(0)].copy_(x)
        self.barrier()


def bytes_allocated():
    return sum(buffer.local.nbytes for buffer in SymmetricBuffer.instances)


# Rows to the experts and back: each way is the adjoint of the other, like Permute and Unpermute

class Buffers(NamedTuple):
    """The buffers of one expert layer.

    A buffer is overwritten only when its readers are known to be done: `rows` after the next exchange of
    counts, which each rank joins after reading, the other two after a barrier on another buffer.
    """
    rows: SymmetricBuffer     # rows for this rank's experts arrive here; the layer's own: backward reads them
    results: SymmetricBuffer  # results leave from here, in backward the rows' gradients; shared by all layers
    grads: SymmetricBuffer    # the results' gradients arrive here; shared by all layers


class SendRows(torch.autograd.Function):
    """Copy row c // K of x (n, C) to dst[c]. Return (limit, C): the rows that arrived here, by expert."""

    @staticmethod
    def forward(ctx, x, dst, K, limit, buffers):
        ctx.save_for_backward(dst)
        ctx.K = K
        ctx.buffers = buffers
        buffers.rows.put(x, dst, K)
        buffers.rows.barrier()
        return buffers.rows.local[:limit]

    @staticmethod
    def backward(ctx, grad):
        (dst,) = ctx.saved_tensors
        results = ctx.buffers.results
        results.publish(grad)
        grad = results.get(dst)  # (N, C)
        if ctx.K > 1:
            order = torch.arange(grad.size(0), device=grad.device)
            grad = unpermute(grad, order, ctx.K)
        return grad, None, None, None, None


class ReturnRows(torch.autograd.Function):
    """Send the experts' results y (R, C) back to the ranks of their rows. Return (N, C), this rank's."""

    @staticmethod
    def forward(ctx, y, dst, buffers):
        ctx.save_for_backward(dst)
        ctx.limit = y.size(0)
        ctx.buffers = buffers
        buffers.results.publish(y)
        return buffers.results.get(dst)

    @staticmethod
    def backward(ctx, grad):
        (dst,) = ctx.saved_tensors
        grads = ctx.buffers.grads
        grads.put(grad, dst)
        grads.barrier()
        return grads.local[:ctx.limit], None, None


class SymmMemPlan(NamedTuple):
    dst: torch.Tensor   # (N,) where each copy goes: rank * rows + row, -1 if it has no place
    ends: torch.Tensor  # (e,) where each local expert's rows end in this rank's buffer


def layout_of_buffers(counts, rank, rows):
    """Return starts (E,), where this rank's copies begin, and ends (e,), where each local expert's rows end.

    counts (ep, E): each rank's copies for each expert. A buffer of `rows` rows holds the copies for its
    owner's experts by expert, then by sender.
    """
    ep, E = counts.shape
    by_owner = counts.T.reshape(ep, E)  # (ep, e*ep): by owner, by local expert and sender
    stops = by_owner.cumsum(1)
    first_rows = rows * torch.arange(ep, device=counts.device).unsqueeze(1)  # (ep, 1)
    starts = (stops - by_owner + first_rows).view(E, ep)[:, rank]
    return starts, stops[rank].view(-1, ep)[:, -1]


class SymmMem(AllToAll):
    """Dropless without asking the host. A step with more than rows_in_use rows overflows: see GraphedStep."""
    buffers = None
    rows_in_use = 0  # of each buffer, the same on every rank; 0: the plain dispatcher is used

    def plan(self, expert_ids, gates):
        if self.rows_in_use == 0 or not torch.is_grad_enabled():
            return super().plan(expert_ids, gates)
        expert = expert_ids.flatten()
        place, counts = queue_by_expert(expert, self.E)
        # E counts from each rank to all, over ep
        counts = self.ep.all_gather(counts).view(-1, self.E)
        starts, ends = layout_of_buffers(counts, self.ep.rank, self.buffers.rows.rows)
        torch.maximum(self.rows_needed, ends[-1], out=self.rows_needed)
        dst = starts[expert] + place
        buffer_end = (expert // self.e + 1) * self.buffers.rows.rows
        return SymmMemPlan(torch.where(dst < buffer_end, dst, -1), ends.clamp(max=self.rows_in_use))

    def dispatch(self, x, plan):
        if not isinstance(plan, SymmMemPlan):
            return super().dispatch(x, plan)
        return SendRows.apply(x, plan.dst, self.K, self.rows_in_use, self.buffers)  # (rows_in_use, C)

    def combine(self, y, gates, plan):
        if not isinstance(plan, SymmMemPlan):
            return super().combine(y, gates, plan)
        y = ReturnRows.apply(y, plan.dst, self.buffers)  # (N, C): the copies come back in the order they left
        order = torch.arange(y.size(0), device=y.device)
        return Unpermute.apply(y, gates, order, order)


def allocate(layers, rows):
    w = layers[0].w1
    shape = layers[0].mesh.ep, rows, w.size(2), w.dtype, w.device
    results = SymmetricBuffer(*shape)
    grads = SymmetricBuffer(*shape)
    for layer in layers:
        layer.dispatcher.buffers = Buffers(SymmetricBuffer(*shape), results, grads)

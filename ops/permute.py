"""Rows to the experts and back: a counting sort by expert, and the copying of rows.

A row has K copies, one for each expert that it visits: copy c is choice c % K of row c // K. With
K = 2, copies 0 and 1 are of row 0, copies 2 and 3 of row 1. Copies stand in slots, sorted by
expert:
    perm (slots,)     the copy in each slot; N = n*K where the slot is empty
    inv_perm (N,)     the slot of each copy; `slots` where the copy was dropped
Only with a capacity can slots be empty and copies be dropped: `padded` says whether they can.
Moving rows to the slots and moving them back are adjoint operations. So all four directions are
gathers by perm or by inv_perm, and no kernel needs atomics.
"""
from typing import NamedTuple

import torch

from config import ceil_div
from ops import backend

# -----------------------------------------------------------------------------
# Who stands where: a stable counting sort by expert, two kernels instead of torch's six

class SortedCopies(NamedTuple):
    perm: torch.Tensor      # (N,) the copy in each slot
    inv_perm: torch.Tensor  # (N,) the slot of each copy
    counts: torch.Tensor    # (E,) the copies of each expert
    ends: torch.Tensor      # (E,) int32, where each expert's slots end


def sort_by_expert(expert, E):
    """Sort the copies by expert: expert (N,) int64 of each copy -> SortedCopies.

    The sort is stable. In plain torch: perm = expert.argsort(stable=True), inv_perm is its inverse,
    counts = bincount(expert), and ends = counts.cumsum(0).
    """
    place, cumulative = place_within_expert(expert, E)
    N = expert.numel()
    if not backend.use_triton(expert):
        counts = cumulative[:, -1].contiguous()
        ends = counts.cumsum(0)
        inv_perm = slots_from_places(expert, place, cumulative, ends - counts, E, N)
        perm = invert_permutation(inv_perm)
        return SortedCopies(perm, inv_perm, counts, ends.to(torch.int32))

    from ops import kernels
    perm = torch.empty_like(expert)
    inv_perm = torch.empty_like(expert)
    counts = expert.new_empty(E)
    ends = torch.empty(E, dtype=torch.int32, device=expert.device)
    tile, wide = sort_tile_size(E)
    tiles = cumulative.size(1)
    kernels.sort_copies[(tiles,)](expert, place, cumulative, perm, inv_perm, counts, ends, N, tiles,
                                  E=E, WIDE=wide, BLOCK=tile, num_warps=4 if wide <= 64 else 8)
    return SortedCopies(perm, inv_perm, counts, ends)


def invert_permutation(perm):
    """Return where each number of perm stands: (N,) -> (N,)."""
    numbers = torch.arange(perm.numel(), device=perm.device)
    return torch.empty_like(perm).scatter_(0, perm, numbers)


def occupants(slot, slots):
    """Return the copy in each slot, (slots,), or N in an empty slot.

    slot (N,): the slot of each copy, or `slots` if the copy has none.
    """
    copies = torch.arange(slot.numel(), device=slot.device)
    # The last entry is for the copies without a slot.
    empty = slot.new_full((slots + 1,), slot.numel())
    return empty.scatter_(0, slot, copies)[:slots]


def sort_tile_size(E):
    """Return how many copies one program of place_within_expert counts, and E's next power of two.

    The program's table of (copies, E) must fit into a multiprocessor.
    """
    wide = backend.next_power_of_2(E)
    return max(8, min(128, 16384 // wide)), wide


def place_within_expert(expert, E):
    """Count, the first half of the sort: expert (N,) int64 -> place (N,), cumulative (E, tiles).

    On a GPU, each program counts one tile of consecutive copies. On a CPU there is one tile, all
    copies. place: how many earlier copies of the same tile have the same expert, which is the
    copy's place in its expert's queue. cumulative: the number of copies for each expert in the
    tiles 0..i.
    """
    N = expert.numel()
    if not backend.use_triton(expert):
        # No operation of torch counts earlier equal elements. A stable sort
        # puts the copies of an expert side by side, in their order. A copy's place is its distance
        # from the first one.
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=E)
        start = counts.cumsum(0) - counts
        return invert_permutation(order) - start[expert], counts.unsqueeze(1)

    from ops import kernels
    tile, wide = sort_tile_size(E)
    tiles = ceil_div(N, tile)
    place = torch.empty(N, dtype=torch.int32, device=expert.device)
    counts = torch.empty(E, tiles, dtype=torch.int32, device=expert.device)
    warps = 4 if wide <= 64 else 8
    kernels.place_within_expert[(tiles,)](expert, place, counts, N, tiles, E=E, WIDE=wide,
                                          BLOCK=tile, num_warps=warps)
    return place, counts.cumsum(1)


def slots_from_places(expert, place, cumulative, start, experts, rows):
    """Place, the second half of the sort: return slot (N,), where each copy goes.

    slot = start[expert] + the expert's copies in earlier tiles + place. start (E,): where each
    expert's copies begin. For fast/symm_mem.py and fast/padded.py there are several buffers of
    `rows` rows, each for `experts` experts, and a slot beyond the end of its buffer is -1.
    Elsewhere one buffer of N rows holds all E experts, and no slot is -1.
    """
    if not backend.use_triton(expert):
        slot = start[expert] + place
        # With one buffer of N rows, buffer_end is N, and every slot is below it.
        buffer_end = (expert // experts + 1) * rows
        return torch.where(slot < buffer_end, slot, -1)

    from ops import kernels
    slot = torch.empty_like(expert)
    E, tiles = cumulative.shape
    tile, _ = sort_tile_size(E)
    kernels.slots_from_places[(tiles,)](expert, place, cumulative, start, slot, expert.numel(),
                                        rows, tiles, EXPERTS=experts, BLOCK=tile, num_warps=4)
    return slot


def assign_slots(expert, priority, E, capacity):
    """Give the `capacity` slots of each expert to the copies that come first.

    expert (N,) of each copy; priority (N,), a permutation of the copies: the order in which they
    are served.
    Return perm (E*capacity,), inv_perm (N,), and how many copies found no slot, ().
    """
    N = expert.numel()
    slots = E * capacity
    wanted = expert[priority]  # (N,) in the order of the priority
    place, cumulative = place_within_expert(wanted, E)
    zeros = torch.zeros_like(cumulative[:, 0])
    queue = slots_from_places(wanted, place, cumulative, zeros, E, N)  # (N,) place in the queue
    slot = torch.where(queue < capacity, wanted * capacity + queue, slots)
    inv_perm = torch.empty_like(slot).scatter_(0, priority, slot)
    perm = torch.full((slots + 1,), N, device=priority.device).scatter_(0, slot, priority)[:slots]
    return perm, inv_perm, (queue >= capacity).sum()


def layout_from_counts(counts, rank, rows, limit, needed):
    """Lay out the owners' buffers: counts (ep, E) int64, each rank's copies for each expert.

    An owner's experts receive their copies in a buffer of `rows` rows, sorted by expert, then by
    sender. Return starts (E,), where this rank's copies begin, counted as owner * rows + row; and
    ends (e,) int32, where each local expert's rows end in this rank's own buffer, at most `limit`.
    needed () int64 becomes max(needed, rows that come to this rank).
    """
    ep, E = counts.shape
    if not backend.use_triton(counts):
        by_owner = counts.T.reshape(ep, E)  # (ep, e*ep): by owner, by local expert and sender
        stops = by_owner.cumsum(1)
        torch.maximum(needed, stops[rank, -1], out=needed)
        first_rows = rows * torch.arange(ep, device=counts.device).unsqueeze(1)  # (ep, 1)
        starts = stops - by_owner + first_rows
        ends = stops[rank].view(-1, ep)[:, -1].clamp(max=limit)
        return starts.view(E, ep)[:, rank].contiguous(), ends.to(torch.int32)

    from ops import kernels
    starts = counts.new_empty(E)
    ends = torch.empty(E // ep, dtype=torch.int32, device=counts.device)
    _, wide = sort_tile_size(E)
    kernels.layout_from_counts[(ep,)](counts, starts, ends, needed, rank, rows, limit,
                                      EP=ep, E=E, WIDE=wide, num_warps=4)
    return starts, ends


# -----------------------------------------------------------------------------
# Moving rows

class Permute(torch.autograd.Function):
    """Copy row i of x to every slot that holds one of its K copies: (n, C) -> (slots, C)."""

    @staticmethod
    def forward(ctx, x, perm, inv_perm, K=1, padded=False):
        ctx.save_for_backward(inv_perm)
        ctx.K = K
        ctx.padded = padded
        return permute(x, perm, K, padded)

    @staticmethod
    def backward(ctx, grad):
        inv_perm, = ctx.saved_tensors
        return unpermute(grad, inv_perm, ctx.K, ctx.padded), None, None, None, None


class Unpermute(torch.autograd.Function):
    """Sum the K copies of each row, each times its gate: (slots, C), gates (n, K) -> (n, C)."""

    @staticmethod
    def forward(ctx, y, gates, perm, inv_perm, padded=False):
        ctx.save_for_backward(y, gates, perm)
        ctx.padded = padded
        return unpermute(y, inv_perm, gates.size(1), padded, gates)

    @staticmethod
    def backward(ctx, grad):
        y, gates, perm = ctx.saved_tensors
        grad_y, grad_gates = unpermute_backward(y, gates, perm, ctx.padded, grad)
        return grad_y, grad_gates, None, None, None


def rows_or_zeros(x, index, padded):
    """Return rows of x (m, ...) by index. If padded, an index of m or more stands for zeros."""
    if not padded:
        return x[index]
    rows = x[index.clamp(max=x.size(0) - 1)]
    outside = (index >= x.size(0)).view(-1, *[1] * (x.ndim - 1))
    return rows.masked_fill(outside, 0)


def permute(x, perm, K, padded):
    """Return the row of each slot's copy: x (n, C), perm (slots,) int64 -> (slots, C).

    Row r of x has the copies r K to r K + K - 1. perm says which copy stands in each slot.
    If padded, a slot whose perm is n*K gets zeros.
    """
    if not backend.use_triton(x) or not x.numel():
        return rows_or_zeros(x, perm // K, padded)

    from ops import kernels
    slots = perm.numel()
    n, C = x.shape
    out = x.new_empty(slots, C)
    kernels.permute[(slots,)](x.contiguous(), perm, out, n * K, C, K=K, BLOCK=512, num_warps=2)
    return out


def unpermute(y, inv_perm, K, padded, gates=None):
    """Return the sum of each row's K copies, each times its gate: y (slots, C) -> (n, C).

    inv_perm (n*K,) int64, gates (n, K). If padded, a copy whose inv_perm is `slots` adds nothing.
    """
    if not backend.use_triton(y) or not y.numel():
        copies = rows_or_zeros(y, inv_perm, padded).unflatten(0, (-1, K))  # (n, K, C)
        if gates is not None:
            copies = copies * gates.unsqueeze(2)
        return copies.sum(1)

    from ops import kernels
    n = inv_perm.numel() // K
    slots, C = y.shape
    out = y.new_empty(n, C)
    # In the place of a missing tensor the kernel gets y, and does not read it.
    factors = y if gates is None else gates.contiguous()
    kernels.unpermute[(n,)](y.contiguous(), factors, inv_perm, out, slots, C, K=K,
                            GATED=gates is not None, BLOCK=512, num_warps=2)
    return out


def unpermute_backward(y, gates, perm, padded, grad):
    """Return the gradients of unpermute's y (slots, C) and gates (n, K), for grad (n, C)."""
    K = gates.size(1)
    if not backend.use_triton(y) or not y.numel():
        rows = permute(grad, perm, K, padded)  # (slots, C)
        of_slot = (y * rows).sum(1)  # (slots,) gradient of the slot's gate
        grad_gates = y.new_zeros(gates.numel() + 1)  # the last one is for empty slots: perm is n*K
        grad_gates = grad_gates.scatter_(0, perm, of_slot)[:-1].view_as(gates)
        gate = rows_or_zeros(gates.flatten(), perm, padded)  # (slots,)
        return rows * gate.unsqueeze(1), grad_gates

    from ops import kernels
    slots, C = y.shape
    grad_y = torch.empty_like(y)
    grad_gates = torch.zeros_like(gates)
    kernels.unpermute_backward[(slots,)](y.contiguous(), gates.contiguous(), perm,
                                         grad.contiguous(), grad_y, grad_gates, gates.numel(), C,
                                         K=K, BLOCK=512, num_warps=2)
    return grad_y, grad_gates

"""Rows to the experts and back: a counting sort by expert, and the copies of rows that it asks for.

A row has K copies, one for each expert that it visits: copy c is choice c % K of row c // K. Copies stand in
slots, sorted by expert:
    perm (slots,)     the copy in each slot; N = n*K where the slot is empty
    inv_perm (N,)     the slot of each copy; `slots` where the copy was dropped
Only with a capacity can slots be empty and copies be dropped: `padded` says so. Moving rows there and back
are adjoint, so all four directions are gathers by perm or by inv_perm, and no kernel needs atomics.
"""
import torch

from ops import backend

# -----------------------------------------------------------------------------
# who stands where: a stable counting sort by expert, two kernels where torch's sort launches six

def sort_by_expert(expert, E):
    """expert (N,) int64 of each copy -> perm (N,), inv_perm (N,), counts (E,): a stable sort by expert.
    Plainly: perm = expert.argsort(stable=True), inv_perm its inverse, counts = bincount(expert)."""
    rank, cumulative = rank_within_expert(expert, E)
    counts = cumulative[:, -1].contiguous()
    inv_perm = slots_from_ranks(expert, rank, cumulative, counts.cumsum(0) - counts, E, expert.numel())
    return invert_permutation(inv_perm), inv_perm, counts


def invert_permutation(perm):
    """perm (N,) -> (N,), where each of its numbers stands."""
    return torch.empty_like(perm).scatter_(0, perm, torch.arange(perm.numel(), device=perm.device))


def occupants(slot, slots):
    """slot (N,) of each copy, `slots` if it has none -> (slots,) the copy in each slot, N in an empty one."""
    none, copies = slot.new_full((slots + 1,), slot.numel()), torch.arange(slot.numel(), device=slot.device)
    return none.scatter_(0, slot, copies)[:slots]


def sort_block_size(E):
    """-> copies that one program of rank_within_expert counts: their (copies, E) table must fit into a
    multiprocessor; and E rounded up to a power of two."""
    wide = 1 << (E - 1).bit_length()
    return max(8, min(128, 16384 // wide)), wide


def rank_within_expert(expert, E):
    """The counting half of the sort. expert (N,) int64 of each copy -> rank (N,): how many earlier copies of
    the same block have the same expert; cumulative (E, blocks): copies for each expert in blocks 0..b."""
    N = expert.numel()
    if not backend.use_triton(expert):  # one block
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=E)
        slot = torch.empty_like(expert).scatter_(0, order, torch.arange(N, device=expert.device))
        return slot - (counts.cumsum(0) - counts)[expert], counts.unsqueeze(1)
    from ops import kernels
    block, wide = sort_block_size(E)
    blocks = -(-N // block)
    rank = torch.empty(N, dtype=torch.int32, device=expert.device)
    counts = torch.empty(E, blocks, dtype=torch.int32, device=expert.device)
    kernels.rank_within_expert[(blocks,)](expert, rank, counts, N, blocks, E=E, WIDE=wide, BLOCK=block,
                                          num_warps=4 if wide <= 64 else 8)
    return rank, counts.cumsum(1)


def slots_from_ranks(expert, rank, cumulative, start, experts, rows):
    """The placing half. -> slot (N,) = start[expert] + copies in earlier blocks + rank in the block. start
    (E,): where each expert's copies begin. Each buffer of `rows` rows holds `experts` experts; a slot beyond
    the end of its buffer is -1."""
    if not backend.use_triton(expert):
        slot = start[expert] + rank
        return torch.where(slot < (expert // experts + 1) * rows, slot, -1)
    from ops import kernels
    slot, blocks = torch.empty_like(expert), cumulative.size(1)
    kernels.slots_from_ranks[(blocks,)](expert, rank, cumulative, start, slot, expert.numel(), rows, blocks,
                                        EXPERTS=experts, BLOCK=sort_block_size(len(cumulative))[0],
                                        num_warps=4)
    return slot


def assign_capacity_slots(expert, priority, E, capacity):
    """Each expert has `capacity` slots, for the copies that come first. expert (N,) of each copy; priority
    (N,), a permutation of the copies, first come first. -> perm (E*capacity,), inv_perm (N,), () how many
    copies found no slot."""
    N, slots, wanted = expert.numel(), E * capacity, expert[priority]
    rank, cumulative = rank_within_expert(wanted, E)
    queue = slots_from_ranks(wanted, rank, cumulative, torch.zeros_like(cumulative[:, 0]), E, N)  # (N,) place
    slot = torch.where(queue < capacity, wanted * capacity + queue, slots)
    inv_perm = torch.empty_like(slot).scatter_(0, priority, slot)
    perm = torch.full((slots + 1,), N, device=priority.device).scatter_(0, slot, priority)[:slots]
    return perm, inv_perm, (queue >= capacity).sum()


def layout_from_counts(counts, rank, rows, limit, needed):
    """counts (ep, E) int64: each rank's copies for each expert. The owner of an expert receives them in a
    buffer of `rows` rows, by expert, then by sender. -> starts (E,): where this rank's copies begin, counted
    as owner * rows + row; offs (e,) int32: where each local expert's rows end in this rank's own buffer,
    `limit` at most. needed () int64 becomes max(needed, rows that come to this rank)."""
    ep, E = counts.shape
    if not backend.use_triton(counts):
        by_owner = counts.T.reshape(ep, E)  # (owner, e*ep): counts by local expert, then by sender
        stops = by_owner.cumsum(1)
        torch.maximum(needed, stops[rank, -1], out=needed)
        starts = stops - by_owner + rows * torch.arange(ep, device=counts.device).unsqueeze(1)
        offs = stops[rank].view(-1, ep)[:, -1].clamp(max=limit)
        return starts.view(E, ep)[:, rank].contiguous(), offs.to(torch.int32)
    from ops import kernels
    starts, offs = counts.new_empty(E), torch.empty(E // ep, dtype=torch.int32, device=counts.device)
    kernels.layout_from_counts[(ep,)](counts, starts, offs, needed, rank, rows, limit, EP=ep, E=E,
                                      WIDE=sort_block_size(E)[1], num_warps=4)
    return starts, offs


# -----------------------------------------------------------------------------
# moving rows

class Permute(torch.autograd.Function):
    """Copy row i of x (n, C) to every slot that holds one of its K copies. -> (slots, C)"""

    @staticmethod
    def forward(ctx, x, perm, inv_perm, K=1, padded=False):
        ctx.save_for_backward(inv_perm)
        ctx.K, ctx.padded = K, padded
        return permute(x, perm, K, padded)

    @staticmethod
    def backward(ctx, g):
        return unpermute(g, *ctx.saved_tensors, ctx.K, ctx.padded), None, None, None, None


class Unpermute(torch.autograd.Function):
    """Sum the K copies of each row, each times its gate p. (slots, C), (n, K) -> (n, C)"""

    @staticmethod
    def forward(ctx, y, p, perm, inv_perm, padded=False):
        ctx.save_for_backward(y, p, perm)
        ctx.K, ctx.padded = p.size(1), padded
        return unpermute(y, inv_perm, ctx.K, padded, p)

    @staticmethod
    def backward(ctx, g):
        return *unpermute_backward(*ctx.saved_tensors, ctx.K, ctx.padded, g), None, None, None


def gather_rows_or_zero(x, index, padded):
    """Rows of x (m, ...) by index; if padded, an index of m or more stands for a row of zeros."""
    if not padded:
        return x[index]
    outside = index >= x.size(0)
    return x[index.clamp(max=x.size(0) - 1)].masked_fill(outside.view(-1, *[1] * (x.ndim - 1)), 0)


def permute(x, perm, K, padded):
    """x (n, C), perm (slots,) int64 -> (slots, C): row perm // K of x; if padded, zeros where perm is n*K."""
    if not backend.use_triton(x) or not x.numel():
        return gather_rows_or_zero(x, perm // K, padded)
    from ops import kernels
    out = x.new_empty(perm.numel(), x.size(1))
    kernels.permute[(perm.numel(),)](x.contiguous(), perm, out, x.size(0) * K, x.size(1), K=K, BLOCK=512,
                                     num_warps=2)
    return out


def unpermute(y, inv_perm, K, padded, p=None):
    """y (slots, C), inv_perm (n*K,) int64, gates p (n, K) -> (n, C): the sum of each row's K copies, each
    times its gate; if padded, a copy whose inv_perm is `slots` counts nothing."""
    if not backend.use_triton(y) or not y.numel():
        copies = gather_rows_or_zero(y, inv_perm, padded).unflatten(0, (-1, K))  # (n, K, C)
        return (copies if p is None else copies * p.unsqueeze(2)).sum(1)
    from ops import kernels
    out = y.new_empty(inv_perm.numel() // K, y.size(1))
    kernels.unpermute[(out.size(0),)](y.contiguous(), y if p is None else p.contiguous(), inv_perm, out,
                                      y.size(0), y.size(1), K=K, GATED=p is not None, BLOCK=512, num_warps=2)
    return out


def unpermute_backward(y, p, perm, K, padded, g):
    """The gradients of unpermute's y (slots, C) and p (n, K), for g (n, C)."""
    if not backend.use_triton(y) or not y.numel():
        rows = permute(g, perm, K, padded)  # (slots, C)
        dp = y.new_zeros(p.numel() + 1).scatter_(0, perm, (y * rows).sum(1))[:-1]  # empty slots: perm is n*K
        return rows * gather_rows_or_zero(p.flatten(), perm, padded).unsqueeze(1), dp.view_as(p)
    from ops import kernels
    dy, dp = torch.empty_like(y), torch.zeros_like(p)
    y, p = y.contiguous(), p.contiguous()
    kernels.unpermute_backward[(perm.numel(),)](y, p, perm, g.contiguous(), dy, dp, p.numel(), y.size(1), K=K,
                                                BLOCK=512, num_warps=2)
    return dy, dp

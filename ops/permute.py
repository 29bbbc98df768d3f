"""Rows to the experts and back: a sort of the rows' copies by expert, and the copying of rows.

A row has K copies, one for each expert that it visits: copy c is choice c % K of row c // K. With
K = 2, copies 2 and 3 are of row 1. Copies stand in slots, sorted by expert:
    perm (slots,)     the copy in each slot; N = n*K where the slot is empty
    inv_perm (N,)     the slot of each copy; `slots` where the copy was dropped
Only with a capacity can slots be empty and copies be dropped. Moving rows to the slots and moving
them back are each other's gradient. So all four directions are gathers by perm or inv_perm, and no
kernel needs atomics.
"""
import torch

from ops import backend


def sort_by_expert(expert, E):
    """Sort the copies by expert, and those of one expert by number: expert (N,) int64 of each copy.

    Return perm (N,), inv_perm (N,), each expert's number of copies (E,), where its slots end (E,).
    """
    if backend.use_triton(expert):  # On a GPU, bincount would wait for the host.
        from ops import kernels
        return kernels.counting_sort(expert, E)
    perm = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=E)
    inv_perm = invert(perm, expert.numel())  # the inverse of a permutation
    return perm, inv_perm, counts, counts.cumsum(0)


def queue_by_expert(expert, E):
    """Return each copy's place in the queue of its expert, (N,), and the queues' lengths, (E,)."""
    _, inv_perm, counts, ends = sort_by_expert(expert, E)
    return inv_perm - (ends - counts)[expert], counts


def invert(slot, slots):
    """Return the copy in each slot, (slots,), N where it is empty. slot (N,): of each copy."""
    copies = torch.arange(slot.numel(), device=slot.device)
    empty = slot.new_full((slots + 1,), slot.numel())  # the last is for copies without a slot
    return empty.scatter_(0, slot, copies)[:slots]


class Permute(torch.autograd.Function):
    """Copy row i of x to every slot that holds one of its K copies: (n, C) -> (slots, C)."""

    @staticmethod
    def forward(ctx, x, perm, inv_perm, K=1):
        ctx.save_for_backward(inv_perm)
        ctx.K = K
        return permute(x, perm, K)

    @staticmethod
    def backward(ctx, grad):
        inv_perm, = ctx.saved_tensors
        return unpermute(grad, inv_perm, ctx.K), None, None, None


class Unpermute(torch.autograd.Function):
    """Sum the K copies of each row, each times its gate: (slots, C), gates (n, K) -> (n, C)."""

    @staticmethod
    def forward(ctx, y, gates, perm, inv_perm):
        ctx.save_for_backward(y, gates, perm)
        return unpermute(y, inv_perm, gates.size(1), gates)

    @staticmethod
    def backward(ctx, grad):
        return *unpermute_backward(*ctx.saved_tensors, grad), None, None


def rows_or_zeros(x, index):
    """Return rows of x (m, ...) by index. The index m stands for a row of zeros."""
    zeros = x.new_zeros(1, *x.shape[1:])
    return torch.cat([x, zeros])[index]


def permute(x, perm, K):
    """Return the row of each slot's copy, zeros for an empty slot: x (n, C), perm -> (slots, C)."""
    if not backend.use_triton(x) or not x.numel():
        return rows_or_zeros(x, perm // K)

    from ops import kernels
    n, C = x.shape
    slots = perm.numel()
    out = x.new_empty(slots, C)
    kernels.permute[(slots,)](x.contiguous(), perm, out, n * K, C, K=K, BLOCK=512, num_warps=2)
    return out


def unpermute(y, inv_perm, K, gates=None):
    """Return the sum of each row's K copies, each times its gate: y (slots, C) -> (n, C)."""
    if not backend.use_triton(y) or not y.numel():
        copies = rows_or_zeros(y, inv_perm).unflatten(0, (-1, K))  # (n, K, C)
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


def unpermute_backward(y, gates, perm, grad):
    """Return the gradients of unpermute's y (slots, C) and gates (n, K), for grad (n, C)."""
    K = gates.size(1)
    if not backend.use_triton(y) or not y.numel():
        rows = permute(grad, perm, K)  # (slots, C)
        of_slot = (y * rows).sum(1)  # (slots,) gradient of the slot's gate
        grad_gates = y.new_zeros(gates.numel() + 1)  # the last one is for empty slots: perm is n*K
        grad_gates = grad_gates.scatter_(0, perm, of_slot)[:-1].view_as(gates)
        gate = rows_or_zeros(gates.flatten(), perm)  # (slots,)
        return rows * gate.unsqueeze(1), grad_gates

    from ops import kernels
    slots, C = y.shape
    grad_y = torch.empty_like(y)
    grad_gates = torch.zeros_like(gates)
    kernels.unpermute_backward[(slots,)](y.contiguous(), gates.contiguous(), perm,
                                         grad.contiguous(), grad_y, grad_gates, gates.numel(), C,
                                         K=K, BLOCK=512, num_warps=2)
    return grad_y, grad_gates

"""The way of one rank's rows to its experts, their SwiGLU and the way back, as one function.

The reference is MoE.experts in moe.py: dispatch, the experts' products, combine. There the gate multiplies
the expert's result. Here it multiplies before the second matrix, in the kernel of SwiGLU, which finds a
slot's gate by perm. So the way back is a plain sum, the results need not be kept, and a gate's gradient is
the product of two rows that backward's kernel has read anyway. Over several ranks a second all_to_all would
have to carry the gates, so there the gate multiplies at home.
"""
import torch

from ops.activations import weighted_silu_mul, weighted_silu_mul_backward
from ops.grouped_mm import experts_mm, experts_wgrad
from ops.permute import permute, unpermute


class RoutedSwiGLU(torch.autograd.Function):
    """The sum of gate * expert(row) over a row's K choices: x (n, C), gates (n, K) -> (n, C)

    w1, w3 (e, F, C), w2 (e, C, F). perm (N,), inv_perm (N,) and ends (e,) int32 are those of moe.LocalPlan.
    """

    @staticmethod
    def forward(ctx, x, gates, w1, w3, w2, perm, inv_perm, ends):
        K = gates.size(1)
        gates = gates.contiguous()
        rows = permute(x, perm, K, False)  # (N, C), by expert
        gate = experts_mm(rows, w1.transpose(1, 2), ends)  # (N, F)
        up = experts_mm(rows, w3.transpose(1, 2), ends)  # (N, F)
        ctx.save_for_backward(rows, gates, gate, up, w1, w3, w2, perm, inv_perm, ends)
        h = weighted_silu_mul(gate, up, gates.view(-1), perm)  # (N, F)
        y = experts_mm(h, w2.transpose(1, 2), ends)  # (N, C)
        return unpermute(y, inv_perm, K, False)

    @staticmethod
    def backward(ctx, grad):
        rows, gates, gate, up, w1, w3, w2, perm, inv_perm, ends = ctx.saved_tensors
        K = gates.size(1)
        grad_y = permute(grad, perm, K, False)  # (N, C), by expert
        # weighted_silu_mul_backward computes h again and writes it over its gradient.
        h = experts_mm(grad_y, w2, ends)  # until the next line, the gradient of h
        grad_gate, grad_up, grad_gates = weighted_silu_mul_backward(h, gate, up, gates.view(-1), perm)
        grad_w2 = experts_wgrad(grad_y, h, ends)

        grad_rows = experts_mm(grad_gate, w1, ends, (grad_up, w3))
        grad_x = unpermute(grad_rows, inv_perm, K, False)
        grad_w1 = experts_wgrad(grad_gate, rows, ends)
        grad_w3 = experts_wgrad(grad_up, rows, ends)
        return grad_x, grad_gates.view_as(gates), grad_w1, grad_w3, grad_w2, None, None, None

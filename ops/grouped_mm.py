"""The experts' matrix products: each row times the matrix of its own expert.

Rows stand by expert, and offs (e,) says where each expert's rows end (the argument of torch's grouped_mm).
With a capacity every expert has the same number of rows: x is (e, rows, I), offs is None, then bmm.
"""
import functools

import torch
import torch.nn.functional as F

from ops import backend
from ops.activations import silu_mul, silu_mul_backward


@functools.cache
def has_grouped_mm(device):
    """Whether torch's grouped_mm is one kernel on this GPU: on Hopper and Blackwell. Elsewhere torch reads
    the row counts on the host."""
    return (device.type == "cuda" and hasattr(F, "grouped_mm")
            and torch.cuda.get_device_capability(device)[0] in (9, 10))


def one_kernel_shapes(dtype, *widths):
    """Whether grouped_mm takes matrices of these widths: bf16, rows of a multiple of 16 bytes."""
    return dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)


def use_grouped_mm(x, w):
    """Whether x times w (e, O, I) runs as one kernel that asks the host nothing."""
    return x.is_cuda and has_grouped_mm(x.device) and one_kernel_shapes(x.dtype, *w.shape[1:])


def grouped_mm(x, w, offs):
    """Row r of x (R, I) times the matrix of the expert whose rows it stands among: w (e, O, I), offs (e,) ->
    (R, O). torch's grouped_mm for bf16 on the GPU: one kernel, no synchronisation. Elsewhere an explicit
    loop, the reference. With a capacity: offs None, x (e, rows, I) -> (e, rows, O)."""
    if offs is None:
        return torch.bmm(x, w.transpose(1, 2))
    if x.size(0) == 0:
        return F.linear(x, w[0])  # no token chose this rank: zero rows, and a gradient of zero
    if use_grouped_mm(x, w):
        return F.grouped_mm(x, w.transpose(1, 2), offs=offs.to(torch.int32))
    return grouped_mm_loop(x, w, offs)


def grouped_mm_loop(x, w, offs):
    """grouped_mm, one expert after the other; rows after the last expert's are zero."""
    ends = offs.tolist()  # sync point on a GPU
    runs = zip([0, *ends[:-1]], ends, strict=True)
    unused = x.new_zeros(x.size(0) - ends[-1], w.size(1))
    return torch.cat([*(F.linear(x[a:b], w[i]) for i, (a, b) in enumerate(runs)), unused])


# -----------------------------------------------------------------------------
# the experts' SwiGLU MLP as one function: its gradients come out in the parameters' own layout, and nothing
# is copied or added that need not be

class SwiGLUExperts(torch.autograd.Function):
    """x (R, C) by expert with offs (e,) int32, or (e, rows, C) with offs None; w1, w3 (e, F, C), w2 (e, C, F)
    -> like x; rows after the last expert's are undefined. bf16 on the GPU: torch's grouped_mm, or bmm.
    out (at least R, C): the tensor that receives the result and, in backward, the gradient of x; or None.
    The branch below its call in moe.MoE.ffn is the reference."""

    @staticmethod
    def forward(ctx, x, w1, w3, w2, offs, out):
        ctx.offs, ctx.out = offs, out
        a, b = (experts_mm(x, w.transpose(1, 2), offs) for w in (w1, w3))  # (R, F) each
        n_valid = None if offs is None else offs[-1]
        h = silu_mul(a.flatten(0, -2), b.flatten(0, -2), n_valid).view_as(a)
        ctx.save_for_backward(x, a, b, w1, w3, w2)
        y = experts_mm(h, w2.transpose(1, 2), offs)
        return y if out is None else add_rows(y, None, out, n_valid)

    @staticmethod
    def backward(ctx, dy):
        x, a, b, w1, w3, w2 = ctx.saved_tensors
        offs, dy = ctx.offs, dy.contiguous()
        n_valid = None if offs is None else offs[-1]
        h = experts_mm(dy, w2, offs)  # the gradient of h, and after the next line h itself
        da, db = silu_mul_backward(*(t.flatten(0, -2) for t in (h, a, b)), n_valid, recompute=True)
        da, db, dw2 = da.view_as(a), db.view_as(a), experts_wgrad(dy, h, offs)
        dx, dx3 = experts_mm(da, w1, offs), experts_mm(db, w3, offs)
        dx = dx.add_(dx3) if ctx.out is None else add_rows(dx, dx3, ctx.out, n_valid)
        return dx, experts_wgrad(da, x, offs), experts_wgrad(db, x, offs), dw2, None, None


def experts_mm(x, w, offs):
    """Each expert's rows times its matrix: (R, I), (e, I, O) -> (R, O)"""
    return torch.bmm(x, w) if offs is None else F.grouped_mm(x, w, offs=offs)


def experts_wgrad(g, x, offs):
    """Each expert's weight gradient: (R, O), (R, I) -> (e, O, I); zero for an expert without rows."""
    return torch.bmm(g.transpose(1, 2), x) if offs is None else F.grouped_mm(g.t(), x, offs=offs)


def add_rows(a, b, out, n_valid):
    """out[:n_valid] = a (R, C), plus b if it is not None -> out[:R]; rows from n_valid () int32 on are left
    as they were."""
    if backend.use_triton(a):
        from ops import kernels
        kernels.add_rows[(a.size(0),)](a, a if b is None else b, out, n_valid, a.size(1), BOTH=b is not None,
                                       BLOCK=512, num_warps=2)
    else:
        out[:n_valid] = a[:n_valid] if b is None else a[:n_valid] + b[:n_valid]
    return out[:a.size(0)]

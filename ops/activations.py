"""What the MLP and each expert does between its matrices: GELU, SwiGLU. --mlp NAME takes ACTIVATIONS[NAME].

SwiGLU is h = silu(gate) * up. Where gate and up come out of one matrix product side by side, plain autograd
would compute the two gradients separately and then concatenate them; here they are written in place.
"""
import torch
import torch.nn.functional as F

from ops import backend


def gelu(x):
    """The tanh form, as in GPT-2 (arXiv:1606.08415, section 2). Under torch.compile it is written as x times
    a sigmoid, which is the same function with one exponential instead of a tanh of many branches."""
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    return F.gelu(x, approximate="tanh")


def swiglu(gate, up=None):
    """gate and up (..., f), or both side by side in gate (R, 2f) -> silu(gate) * up, (..., f)"""
    if up is None and backend.use_triton(gate):
        return _SwiGLU.apply(gate)
    gate, up = gate.chunk(2, dim=1) if up is None else (gate, up)
    return F.silu(gate) * up


# --mlp -> function of w1's product; where the name is in GATED, of the products of w1 and w3: the MLP gives
# them side by side, an expert one by one. a new name also goes into the list at `mlp` in config.py
ACTIVATIONS = {"swiglu": swiglu, "gelu": gelu}
GATED = {"swiglu"}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return silu_mul(y)

    @staticmethod
    def backward(ctx, dh):
        return silu_mul_backward(dh.contiguous(), *ctx.saved_tensors)


def silu_mul(gate, up=None, n_valid=None):
    """gate and up (R, f), or both side by side in gate (R, 2f) -> (R, f). No autograd. On a GPU only the
    first n_valid () int32 rows are written; the others hold nothing."""
    if not backend.use_triton(gate):
        gate, up = gate.chunk(2, dim=1) if up is None else (gate, up)
        return F.silu(gate) * up
    from ops import kernels
    f = gate.size(1) // (2 if up is None else 1)
    h = torch.empty(gate.size(0), f, dtype=gate.dtype, device=gate.device)
    up_ptr, valid_ptr = gate if up is None else up, gate if n_valid is None else n_valid
    kernels.swiglu[(gate.size(0),)](gate, up_ptr, h, valid_ptr, f, PACKED=up is None,
                                    LIMITED=n_valid is not None, BLOCK=1024, num_warps=4)
    return h


def silu_mul_backward(dh, gate, up=None, n_valid=None, recompute=False):
    """-> the gradients of gate and up as a pair, or of both side by side as one tensor. recompute: h is
    written in the place of dh, so that it need not be kept from forward."""
    if backend.use_triton(gate):
        from ops import kernels
        d_gate, d_up = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        up_ptr, d_up_ptr = (gate, dh) if up is None else (up, d_up)
        valid_ptr = gate if n_valid is None else n_valid
        kernels.swiglu_backward[(gate.size(0),)](
            gate, up_ptr, dh, d_gate, d_up_ptr, valid_ptr, dh.size(1), PACKED=up is None,
            LIMITED=n_valid is not None, RECOMPUTE=recompute, BLOCK=1024, num_warps=4)
        return d_gate if up is None else (d_gate, d_up)
    a, b = gate.chunk(2, dim=1) if up is None else (gate, up)
    s = torch.sigmoid(a)
    pair = dh * b * s * (1 + a * (1 - s)), dh * a * s
    if recompute:
        dh.copy_(a * s * b)
    return torch.cat(pair, dim=1) if up is None else pair

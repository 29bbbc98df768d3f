"""LayerNorm or RMSNorm of rows that go on as they are, as the residual stream of a block does.

In x + f(norm(x)) the rows x have two gradients. On a GPU one kernel computes the norm's, adds that of x
itself, and sums the weight's over the rows. It computes mean and scale again, so only x is kept.
"""
import torch
import torch.nn.functional as F

from config import ceil_div
from ops import backend

ROW_BYTES = 16_384  # at most: six rows must fit into the 99 KiB of a small GPU's multiprocessor


def fits(width, dtype):
    return backend.next_power_of_2(width) * dtype.itemsize <= ROW_BYTES


def input_and_rms_norm(x, gain, bias, eps):
    return InputAndNorm.apply(x, gain, bias, eps, False)


def input_and_layer_norm(x, gain, bias, eps):
    return InputAndNorm.apply(x, gain, bias, eps, True)


# By the name that layers.NORMS gives
KERNELS = {"rms": input_and_rms_norm, "layer": input_and_layer_norm}


def launch(width):
    """Return (programs at most, options) of kernels.norm_backward: what was fastest on an H200."""
    columns = backend.next_power_of_2(width)
    if columns == width:
        rows = max(1, 4096 // columns)
        warps = max(4, columns // 1024)
        programs = 2 * 132  # 132 multiprocessors of an H200; alike on every GPU, for the same sums over rows
    else:
        rows = 1
        warps = max(2, columns // 512)
        programs = 8 * 132
    return programs, {"ROWS": rows, "BLOCK": columns, "STAGES": 3, "num_warps": warps}


class InputAndNorm(torch.autograd.Function):
    """The rows x (n, C) themselves, and their norm (n, C): weight (C,), bias (C,) or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, is_layer_norm):
        ctx.save_for_backward(x.contiguous(), weight)
        ctx.has_bias = bias is not None
        ctx.eps = eps
        ctx.is_layer_norm = is_layer_norm
        if is_layer_norm:
            y = F.layer_norm(x, weight.shape, weight, bias, eps)
        else:
            y = F.rms_norm(x, weight.shape, weight, eps)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx, grad_x, grad_y):
        from ops import kernels
        x, weight = ctx.saved_tensors
        n, C = x.shape
        most, options = launch(C)
        programs = min(most, ceil_div(n, options["ROWS"]))
        out = torch.empty_like(x)
        # Each program sums over its rows. The first of these sums are the weight's, the second the bias's.
        n_sums = 2 if ctx.has_bias else 1
        sums = torch.empty(n_sums, programs, C, dtype=torch.float32, device=x.device)
        kernels.norm_backward[(programs,)](
            x, weight, grad_y.contiguous(), grad_x.contiguous(), out, sums, n, C,
            EPS=ctx.eps, CENTRED=ctx.is_layer_norm, BIAS=ctx.has_bias, **options)
        sums = sums.sum(1).to(weight.dtype)  # (n_sums, C)
        grad_bias = sums[1] if ctx.has_bias else None
        return out, sums[0], grad_bias, None, None

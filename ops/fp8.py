"""--fp8: a layer whose three products, forward and both of backward, take numbers of 8 bits.

Activations and weights are e4m3 (4 bits of exponent, 3 of mantissa), gradients of outputs are e5m2, which has
a wider range (arXiv:2209.05433). A tensor has one scale, of its largest absolute value. It is a power of two,
so all but the smallest numbers are rounded in the same way whatever the scale is, also on a rank of tp.

On an NVIDIA GPU in bf16, quantise() is a Triton kernel and scaled_product() is torch's product of fp8. The
twins round to the same fp8 numbers, and multiply in the layer's dtype.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from config import ceil_div
from ops import backend

FORWARD = torch.float8_e4m3fn  # of activations and weights
BACKWARD = torch.float8_e5m2  # of the gradients of outputs

# A scale brings the largest absolute value of a tensor to between 2^TOP and 2^(TOP+1), which a format holds.
TOP = {FORWARD: 7, BACKWARD: 14}
LEAST = 20  # the least exponent of a scale as fp32 stores it: 2^-107, whose inverse fp32 still holds

TALL, WIDE = 64, 64  # a tile of the kernel


class Quantised(NamedTuple):
    """A matrix (R, C) in fp8: it is about scale * rows."""
    rows: torch.Tensor | None     # (R, C)
    columns: torch.Tensor | None  # (C, R), its transpose
    scale: torch.Tensor           # (), fp32


def linear(x, weights, bias=None):
    """Return x W^T + bias, (n, O): x (n, I), W (O, I) is the matrices `weights`, one below the other."""
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, bias, *weights)):
        return _Linear.apply(x, bias, *weights)
    y, _, _ = rounded_product(x, bias, weights, transposed=False)
    return y


def rounded_product(x, bias, weights, transposed):
    x8 = quantise([x], FORWARD, transposed=transposed)
    w8 = quantise(weights, FORWARD)
    y = scaled_product((x8.rows, x8.scale), (w8.rows, w8.scale), x.dtype, bias, fast_sums=True)
    return y, x8, w8


class _Linear(torch.autograd.Function):
    """linear(). Only x in fp8 is kept. Backward rounds the weights again, so that ZeRO-3 can free them."""

    @staticmethod
    def forward(ctx, x, bias, *weights):
        trains_weights = any(ctx.needs_input_grad[2:])
        y, x8, w8 = rounded_product(x, bias, weights, trains_weights)
        ctx.save_for_backward(x8.columns, x8.scale, w8.scale, *weights)
        return y

    @staticmethod
    def backward(ctx, grad):  # (n, O)
        x_columns, x_scale, w_scale, *weights = ctx.saved_tensors
        needs_x, needs_bias, *needs_weights = ctx.needs_input_grad
        grad8 = quantise([grad], BACKWARD, rows=needs_x, transposed=any(needs_weights))
        grad_x = grad_bias = None
        grad_weights = [None] * len(weights)
        if needs_x:
            # The compiler would compute in forward, and keep, whatever depends on the weights alone.
            scale = torch.where(torch.isnan(grad8.scale), grad8.scale, w_scale)
            w8 = quantise(weights, FORWARD, scale, rows=False, transposed=True)
            grad_x = scaled_product((grad8.rows, grad8.scale), (w8.columns, w8.scale), grad.dtype)  # (n, I)
        if needs_bias:
            grad_bias = grad.sum(0)
        if any(needs_weights):
            grad_w = scaled_product((grad8.columns, grad8.scale), (x_columns, x_scale), grad.dtype)  # (O, I)
            grad_weights = grad_w.split([w.size(0) for w in weights])
        return grad_x, grad_bias, *grad_weights


def scale_of(largest, form):
    """Return the scale of a tensor whose largest absolute value is `largest`, () -> () fp32."""
    largest = largest.float()
    exponent = largest.view(torch.int32) >> 23  # as fp32 stores it: 127 more than the exponent
    power = (exponent - TOP[form]).clamp(min=LEAST) << 23
    return torch.where(torch.isfinite(largest), power.view(torch.float32), torch.nan)  # refuses the step


def quantise(parts, form, scale=None, *, rows=True, transposed=False):
    """Return the Quantised of matrices (R_i, C), one below the other. rows, transposed: what to write."""
    parts = [part.contiguous() for part in parts]
    if scale is None:
        largest = torch.stack([part.abs().amax() for part in parts]).amax()
        scale = scale_of(largest, form)
    if uses_kernel(scale, parts[0].dtype):
        return quantise_triton(parts, form, scale, rows, transposed)
    whole = (torch.cat(parts).float() * (1 / scale)).to(form)  # (R, C)
    return Quantised(whole if rows else None, whole.t().contiguous() if transposed else None, scale)


def uses_kernel(scale, dtype):
    """Whether products in dtype run as fp8 products. check_device() has refused GPUs that have none."""
    return backend.use_triton(scale) and dtype == torch.bfloat16


def quantise_triton(parts, form, scale, rows, transposed):
    from ops import kernels
    height = sum(part.size(0) for part in parts)
    width = parts[0].size(1)
    by_rows = torch.empty(height, width, dtype=form, device=scale.device) if rows else None
    by_columns = torch.empty(width, height, dtype=form, device=scale.device) if transposed else None
    first = 0
    for part in parts:
        grid = (ceil_div(part.size(0), TALL), ceil_div(width, WIDE))
        # In the place of a missing tensor the kernel gets `scale`, and does not write it.
        kernels.quantise[grid](
            part, scale, by_rows if rows else scale, by_columns if transposed else scale,
            part.size(0), width, first, height, ROWS=rows, TRANSPOSED=transposed, TALL=TALL, WIDE=WIDE,
            num_warps=4)
        first += part.size(0)
    return Quantised(by_rows, by_columns, scale)


def scaled_product(left, right, dtype, bias=None, fast_sums=False):
    """Return a b^T + bias, (m, n). left: a (m, k) in fp8, and its scale. right: b (n, k), and its scale.

    fast_sums: Hopper then keeps about 14 bits of them (arXiv:2412.19437, section 3.3.2).
    """
    a, a_scale = left
    b, b_scale = right
    if uses_kernel(a_scale, dtype):
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, bias, out_dtype=dtype,
                                use_fast_accum=fast_sums)
    return F.linear(a.to(dtype) * a_scale.to(dtype), b.to(dtype) * b_scale.to(dtype), bias)


def check_device(cfg, device):
    if not cfg.fp8 or device.type == "cpu":
        return
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if not is_nvidia or torch.cuda.get_device_capability(device) < (8, 9) or cfg.dtype != "bf16":
        raise ValueError("--fp8 on a GPU needs --dtype bf16 and NVIDIA's capability 8.9 or more, such as an "
                         "H100's; leave out --fp8")

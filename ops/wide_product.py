"""The router's product, whose result is in at least fp32: x @ w.T of a 16-bit model.

The plain way widens x and w and multiplies. On a GPU, that writes and reads a copy of x in fp32, in forward
and again in backward. But a product of two bf16 numbers is exact in fp32, and torch.mm with out_dtype adds
such products up in fp32.
"""
import torch


def wide_product(x, w):
    """Return x @ w.T in at least fp32: x (n, C), w (E, C) of the same dtype -> (n, E)."""
    if use_wide_mm(x):
        return WideProduct.apply(x, w)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ w.to(wide).T


def use_wide_mm(x):
    """Whether torch multiplies bf16 factors into fp32 on this device, also under torch.compile.

    It does on NVIDIA's GPUs, since torch 2.10.
    """
    is_nvidia = x.device.type == "cuda" and torch.version.hip is None
    return is_nvidia and x.dtype == torch.bfloat16 and torch.__version__ >= (2, 10)


def mm_fp32(a, b):
    """Return a @ b in fp32: bf16 a (m, k), b (k, n) -> (m, n)."""
    if use_wide_mm(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class WideProduct(torch.autograd.Function):
    """x @ w.T in fp32: bf16 x (n, C), w (E, C) -> (n, E)

    Backward multiplies with the gradient as a sum of two bf16 numbers, which hold 16 of its 24 bits. TF32, in
    which the plain way multiplies, holds 11.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return mm_fp32(x, w.T)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        E = w.size(0)
        high = grad.to(x.dtype)
        low = (grad - high).to(x.dtype)
        both = torch.cat([high, low], 1)  # (n, 2E)
        grad_x = both @ torch.cat([w, w])  # (n, C)
        halves = mm_fp32(both.T, x)  # (2E, C)
        return grad_x, (halves[:E] + halves[E:]).to(w.dtype)

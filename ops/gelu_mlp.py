"""An MLP with GELU whose matrix products compute GELU and its gradient, too.

On Hopper GPUs cuBLASLt computes both where a product writes its result anyway. Elsewhere torch's functions do
the same, one after the other.
"""
import torch
import torch.nn.functional as F

from ops import backend, cublas_lt


def is_possible(cfg, device):
    """Whether an MLP computes so: --fp8 and --lora multiply otherwise, and biases gained nothing."""
    if cfg.mlp != "gelu" or cfg.bias or cfg.fp8 or cfg.lora or cfg.recompute == "selective":
        return False
    return cfg.dtype == "bf16" and backend.is_hopper(device) and cublas_lt.library() is not None


@torch.library.custom_op("nanoshard::product_gelu", mutates_args=())
def product_gelu(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gelu(z) and z = x w^T, (n, F) each: x (n, C), w (F, C)."""
    plan = cublas_lt.plan_for(x, w, cublas_lt.GELU_AUX, transposed=True)
    if plan is None:
        z = x @ w.T
        return F.gelu(z, approximate="tanh"), z
    z = x.new_empty(x.size(0), w.size(0))
    hidden = torch.empty_like(z)
    plan.multiply(x, w, hidden, z)
    return hidden, z


@product_gelu.register_fake
def _(x, w):
    z = x.new_empty(x.size(0), w.size(0))
    return torch.empty_like(z), z


@torch.library.custom_op("nanoshard::product_gelu_backward", mutates_args=())
def product_gelu_backward(grad: torch.Tensor, w: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the gradient of z (n, F), where y = gelu(z) w^T: w (C, F), and grad (n, C) is that of y."""
    plan = cublas_lt.plan_for(grad, w, cublas_lt.DGELU)
    if plan is None:
        return torch.ops.aten.gelu_backward(grad @ w, z, approximate="tanh")
    out = torch.empty_like(z)
    plan.multiply(grad, w, out, z)
    return out


@product_gelu_backward.register_fake
def _(grad, w, z):
    return torch.empty_like(z)


class GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2):
        hidden, z = product_gelu(x, w1)  # (n, F) each
        ctx.save_for_backward(x, w1, w2, z, hidden)
        return hidden @ w2.T

    @staticmethod
    def backward(ctx, grad):
        x, w1, w2, z, hidden = ctx.saved_tensors
        grad = grad.contiguous()
        grad_z = product_gelu_backward(grad, w2, z)  # (n, F)
        return grad_z @ w1, grad_z.T @ x, grad.T @ hidden


def products(x, w1, w2):  # torch 2.11 compiles this call, but not GeluMLP.apply as a module's attribute
    """Return y (n, C) = gelu(x w1^T) w2^T: x (n, C), w1 (F, C), w2 (C, F)."""
    return GeluMLP.apply(x, w1, w2)

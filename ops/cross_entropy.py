"""The head and its cross-entropy as one function.

The logits are written once, read once, and overwritten by their gradient, up to a factor per row that is
known only at the end of the row. In backward, that factor multiplies the small results.
"""
import torch
import torch.nn.functional as F

from ops import backend
from ops.cublas_lt import multiply

IGNORE = -100  # a target that takes no part: its loss is 0, its gradient exactly 0
ROWS_AT_ONCE = 1024  # of the torch twin, which computes in fp32


def cross_entropy_rows(z, target, used):
    """Return losses (R,) and scales (R,) in fp32. z (R, V), the logits, becomes (softmax - onehot) / scale.

    The first `used` columns are tokens. target (R,). A target of IGNORE has the loss 0 and the scale 0.
    """
    # The kernel stores exponentials in z, and the range of fp16 is too short for them.
    if not backend.use_triton(z) or z.dtype == torch.float16:
        parts = zip(z.split(ROWS_AT_ONCE), target.split(ROWS_AT_ONCE), strict=True)
        losses, scales = zip(*[cross_entropy_rows_torch(*part, used) for part in parts], strict=True)
        return torch.cat(losses), torch.cat(scales)
    from ops import kernels
    loss, scale = torch.empty(2, z.size(0), dtype=torch.float32, device=z.device)
    kernels.cross_entropy[(z.size(0),)](z, target, loss, scale, used, z.size(1), ROWS=2, BLOCK=2048,
                                        num_warps=4)
    return loss, scale


def cross_entropy_rows_torch(z, target, used):
    """cross_entropy_rows in torch. Its scale is 1, or 0 for a target that takes no part."""
    trained = target != IGNORE
    index = target.clamp(min=0).unsqueeze(1)  # (R, 1)
    logits = z[:, :used].to(torch.promote_types(z.dtype, torch.float32))
    loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")

    grad = logits.softmax(1)
    grad.scatter_add_(1, index, -torch.ones_like(grad[:, :1]))
    z[:, :used] = grad.to(z.dtype)
    z[:, used:] = 0
    return loss, trained.to(loss.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies in nats, (), in at least fp32. A target of IGNORE adds nothing."""

    @staticmethod
    def forward(ctx, x, w, target, used, bias=None):  # x (R, C), w (V, C), target (R,), bias (V,)
        z = multiply(x, w.T) if bias is None else F.linear(x, w, bias)  # (R, V)
        loss, scale = cross_entropy_rows(z, target, used)
        ctx.save_for_backward(x, w, z, scale)
        ctx.has_bias = bias is not None
        return loss.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        x, w, z, scale = ctx.saved_tensors  # z holds (softmax - onehot) / scale
        scale = grad_loss * scale  # (R,)
        grad_x = multiply(z, w)  # (R, C)
        grad_x.mul_(scale.unsqueeze(1))

        grad_w = None
        if ctx.needs_input_grad[1]:
            # Without `out`, a bf16 x times the fp32 scale would be a tensor in fp32.
            scaled_x = torch.mul(x, scale.unsqueeze(1), out=torch.empty_like(x))
            grad_w = multiply(z.T, scaled_x)

        grad_bias = None
        if ctx.has_bias:
            grad_bias = z.T @ scale.to(z.dtype)
        return grad_x, grad_w, None, None, grad_bias

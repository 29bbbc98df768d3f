"""The head and its cross-entropy as one function, so that the logits are written once.

At a vocabulary of 128,256 the logits of 16,384 tokens take 4.2 GB in bf16. Autograd writes them, a fp32 copy,
the softmax and its gradient. Here they are written once, read once, and overwritten by their gradient, up to
a factor per row that is known only at the end of the row. That factor, and the gradient of the loss,
multiply the small results of backward instead.
"""
import torch
import torch.nn.functional as F

from ops import backend

IGNORE = -100  # a target that takes no part: its loss is 0, its gradient exactly 0


def cross_entropy_rows(z, target, used):
    """z (R, V) logits of which the first `used` columns are tokens, target (R,) -> losses (R,) and scales
    (R,), fp32; z becomes (softmax - onehot) / scale. Loss and scale of a target IGNORE are 0."""
    if not backend.use_triton(z) or z.dtype == torch.float16:  # fp16's range is too short for exponentials
        parts = [cross_entropy_rows_torch(*part, used)  # in fp32, so not all rows at once
                 for part in zip(z.split(1024), target.split(1024), strict=True)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    from ops import kernels
    loss, scale = torch.empty(2, z.size(0), dtype=torch.float32, device=z.device)
    kernels.cross_entropy[(z.size(0),)](z, target, loss, scale, used, z.size(1), ROWS=2, BLOCK=2048,
                                        num_warps=4)
    return loss, scale


def cross_entropy_rows_torch(z, target, used):
    """The torch twin of the kernel; its scale is one, or 0 for a target that takes no part."""
    trained, index = target != IGNORE, target.clamp(min=0).unsqueeze(1)
    wide = z[:, :used].to(torch.promote_types(z.dtype, torch.float32))
    lse = wide.logsumexp(1)  # (R,)
    loss = (lse - wide.gather(1, index).squeeze(1)).masked_fill(~trained, 0)
    p = (wide - lse.unsqueeze(1)).exp_()
    p.scatter_add_(1, index, -torch.ones_like(p[:, :1]))
    z[:, :used] = p.to(z.dtype)
    z[:, used:] = 0
    return loss, trained.to(loss.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """x (R, C), w (V, C), target (R,) int64, used <= V tokens -> () sum of the cross-entropy in nats, in at
    least fp32; a target IGNORE adds nothing."""

    @staticmethod
    def forward(ctx, x, w, target, used):
        z = F.linear(x, w)  # (R, V)
        loss, scale = cross_entropy_rows(z, target, used)
        ctx.save_for_backward(x, w, z, scale)
        return loss.sum()

    @staticmethod
    def backward(ctx, g):
        x, w, z, scale = ctx.saved_tensors  # z holds (softmax - onehot) / scale
        scale = (g * scale).unsqueeze(1)  # (R, 1)
        return (z @ w).mul_(scale), z.T @ torch.mul(x, scale, out=torch.empty_like(x)), None, None

"""The head and its cross-entropy as one function, which computes its gradients in forward.

So the logits live for some rows at a time. They are written once, read once, and overwritten by their
gradient, up to a factor per row that is known only at the end of the row and multiplies the small results.
"""
import torch
import torch.nn.functional as F

from ops import backend
from ops.products import multiply

IGNORE = -100  # a target that takes no part: its loss is 0, its gradient exactly 0
ROWS_AT_ONCE = 1024  # of the torch twin, which computes in fp32; a block is a multiple
LOGITS_BYTES = 2**30  # of a block's logits, about


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


def rows_per_block(vocab, element_bytes):
    """Return how many rows of logits (rows, vocab) there are at once."""
    blocks = LOGITS_BYTES // (vocab * element_bytes * ROWS_AT_ONCE)
    return ROWS_AT_ONCE * max(1, blocks)


def scale_rows(x, scale, out):
    """Write the rows of x (R, C), each times its factor in scale (R,), to out (R, C), which may be x."""
    # Without `out`, a bf16 tensor times the fp32 scale would be a tensor in fp32.
    torch.mul(x, scale.unsqueeze(1), out=out)


def add_to_total(total, a, b):
    """Return a b, (m, n), or with a total their sum in its memory."""
    if total is None:
        product = multiply(a, b)
        return product.float() if product.dtype == torch.float16 else product
    if total.dtype == a.dtype:
        return total.addmm_(a, b)
    return total.add_(multiply(a, b))


def linear_cross_entropy(x, w, target, used, bias=None, losses=cross_entropy_rows):
    """Return the sum of the cross-entropies in nats, (), in at least fp32. A target of IGNORE adds nothing.

    x (R, C), w (V, C), target (R,), bias (V,). The first `used` of the V logits are tokens. losses: a
    function like cross_entropy_rows. The gradient of w is summed over blocks of rows, and rounded to w's
    dtype after each (fp16: summed in fp32).
    """
    return LinearCrossEntropy.apply(x, w, target, used, bias, losses, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target, used, bias, losses, has_backward):
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        grad_x = torch.empty_like(x) if has_backward else None
        grad_w = grad_bias = None
        n = rows_per_block(w.size(0), w.element_size())
        if w.dtype == torch.float16:
            n = ROWS_AT_ONCE  # the product of more rows, which no loss scale lessens, can be out of range
        for start in range(0, x.size(0), n):
            block = slice(start, start + n)
            rows = x[block]
            z = multiply(rows, w.T) if bias is None else F.linear(rows, w, bias)  # (rows, V)
            loss, scale = losses(z, target[block], used)
            total += loss.sum()
            # z holds (softmax - onehot) / scale.
            if has_backward:
                scale_rows(multiply(z, w), scale, out=grad_x[block])
            if has_backward and ctx.needs_input_grad[1]:
                scaled = torch.empty_like(rows)
                scale_rows(rows, scale, out=scaled)
                grad_w = add_to_total(grad_w, z.T, scaled)
            if has_backward and bias is not None:
                part = z.T @ scale.to(z.dtype)  # (V,)
                grad_bias = part if grad_bias is None else grad_bias + part
            del z  # before the next ones are made
        ctx.save_for_backward(grad_x, grad_w, grad_bias)
        return total

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, grad_w, grad_bias = ctx.saved_tensors
        for grad in (grad_x, grad_w):
            if grad is not None:
                scale_rows(grad, grad_loss.expand(grad.size(0)), out=grad)
        if grad_bias is not None:
            grad_bias.mul_(grad_loss)
        return grad_x, grad_w, None, None, grad_bias, None, None

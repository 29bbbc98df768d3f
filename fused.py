"""Head and cross-entropy in one autograd function: the logits are written once and read twice.

At 128,256 words the logits of 16,384 tokens are 4.2 GB in bf16. Plain autograd writes them, their fp32 copy, the softmax
and its gradient. Here one kernel reads a row (it stays in the cache between its two passes), leaves the loss, and puts
softmax - onehot where the logits were; the scalar that backward brings is applied to the small matrices beside it.
cross_entropy_rows_torch is the kernel's slow twin; tests and CPUs use it.
"""
import torch
import torch.nn.functional as F


def _kernel():
    """Compiled on first use: a laptop has no triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(z_ptr, target_ptr, loss_ptr, used, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        z_ptr += row * width
        target = tl.load(target_ptr + row)
        cols = tl.arange(0, BLOCK)
        # pass 1: running maximum and sum of exponentials, one pair per lane, joined at the end
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, used, BLOCK):
            z = tl.load(z_ptr + start + cols, mask=start + cols < used, other=-float("inf")).to(tl.float32)
            new = tl.maximum(top, z)
            # a lane that has seen no word yet has top = new = -inf: its difference is taken as 0
            total = total * tl.exp(tl.where(new == top, 0.0, top - new)) + tl.where(z == -float("inf"), 0.0, tl.exp(z - new))
            top = new
        best = tl.max(top, axis=0)
        lse = best + tl.log(tl.sum(total * tl.exp(top - best), axis=0))
        tl.store(loss_ptr + row, lse - tl.load(z_ptr + target).to(tl.float32))
        # pass 2: softmax - onehot in the place of the logits, zero in the padding
        for start in range(0, width, BLOCK):
            at = start + cols
            z = tl.load(z_ptr + at, mask=at < used, other=-float("inf")).to(tl.float32)
            g = tl.exp(z - lse) - tl.where(at == target, 1.0, 0.0)
            tl.store(z_ptr + at, g.to(z_ptr.dtype.element_ty), mask=at < width)

    return kernel


_compiled = []


def cross_entropy_rows(z, target, used):
    """z (N, V) logits of which `used` columns are words, target (N,) -> (N,) fp32 losses; z becomes softmax - onehot."""
    if not z.is_cuda:
        return cross_entropy_rows_torch(z, target, used)
    if not _compiled:
        _compiled.append(_kernel())
    loss = torch.empty(z.size(0), dtype=torch.float32, device=z.device)
    _compiled[0][(z.size(0),)](z, target, loss, used, z.size(1), BLOCK=4096, num_warps=8)
    return loss


def cross_entropy_rows_torch(z, target, used):
    wide = z[:, :used].to(torch.promote_types(z.dtype, torch.float32))
    lse = wide.logsumexp(1)  # (N,)
    loss = lse - wide.gather(1, target.unsqueeze(1)).squeeze(1)
    p = (wide - lse.unsqueeze(1)).exp_()
    p.scatter_add_(1, target.unsqueeze(1), -torch.ones_like(p[:, :1]))
    z[:, :used] = p.to(z.dtype)
    z[:, used:] = 0
    return loss


class LinearCrossEntropy(torch.autograd.Function):
    """x (N, C), w (V, C), target (N,) int64, used <= V words -> () sum of the cross-entropy in nats, fp32."""

    @staticmethod
    def forward(ctx, x, w, target, used):
        z = F.linear(x, w)  # (N, V)
        loss = cross_entropy_rows(z, target, used).sum()
        ctx.save_for_backward(x, w, z)
        return loss

    @staticmethod
    def backward(ctx, g):
        x, w, z = ctx.saved_tensors  # z is softmax - onehot
        return g.to(x.dtype) * (z @ w), z.T @ (g.to(x.dtype) * x), None, None

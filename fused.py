"""Where plain autograd moves large tensors too often: the head with its cross-entropy, and SwiGLU.

Each has a Triton kernel (kernels.py, on a GPU) and a torch twin here, which tests compare and CPUs use.
"""
import torch
import torch.nn.functional as F


def on_gpu(x):
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


# -----------------------------------------------------------------------------
# head and cross-entropy. at 128,256 words the logits of 16,384 tokens are 4.2 GB in bf16; plain autograd writes them, an
# fp32 copy, the softmax and its gradient. here they are written once, read once, and overwritten by softmax - onehot; the
# scalar that backward brings is applied to the small matrices beside them

def cross_entropy_rows(z, target, used):
    """z (N, V) logits of which `used` columns are words, target (N,) -> (N,) fp32 losses; z becomes softmax - onehot."""
    if not on_gpu(z):
        return cross_entropy_rows_torch(z, target, used)
    import kernels
    loss = torch.empty(z.size(0), dtype=torch.float32, device=z.device)
    kernels.cross_entropy[(z.size(0),)](z, target, loss, used, z.size(1), ROWS=4, BLOCK=2048, num_warps=8)
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
    """x (N, C), w (V, C), target (N,) int64, used <= V words -> () sum of the cross-entropy in nats, at least fp32."""

    @staticmethod
    def forward(ctx, x, w, target, used):
        z = F.linear(x, w)  # (N, V)
        loss = cross_entropy_rows(z, target, used).sum()
        ctx.save_for_backward(x, w, z)
        return loss

    @staticmethod
    def backward(ctx, g):
        x, w, z = ctx.saved_tensors  # z is softmax - onehot by now
        return g.to(x.dtype) * (z @ w), z.T @ (g.to(x.dtype) * x), None, None


# -----------------------------------------------------------------------------
# SwiGLU of the glued product y = gate | up. autograd would make the gradients of the two halves and then copy them together

def swiglu_torch(y, p=None):
    gate, up = y.chunk(2, dim=-1)
    h = F.silu(gate) * up
    return h if p is None else h * p.unsqueeze(-1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, p):
        import kernels
        ctx.save_for_backward(y, p)
        h = y.new_empty(y.size(0), y.size(1) // 2)
        if len(y):
            kernels.swiglu[(len(y),)](y, y if p is None else p, h, h.size(1), GATED=p is not None, BLOCK=1024, num_warps=4)
        return h

    @staticmethod
    def backward(ctx, dh):
        import kernels
        y, p = ctx.saved_tensors
        dh, dy = dh.contiguous(), torch.empty_like(y)
        dp = None if p is None else torch.empty_like(p)
        if len(y):
            some = y if p is None else p
            kernels.swiglu_backward[(len(y),)](y, some, dh, dy, some if p is None else dp, dh.size(1), GATED=p is not None,
                                               BLOCK=1024, num_warps=4)
        return dy, dp


def swiglu(y, p=None):
    """y (R, 2f) = gate | up -> silu(gate) * up (R, f), each row times p (R,) if given."""
    return _SwiGLU.apply(y, p) if on_gpu(y) else swiglu_torch(y, p)

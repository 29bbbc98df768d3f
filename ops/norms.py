"""LayerNorm or RMSNorm, also of rows that go on as they are, as the residual stream of a block does.

In x + f(norm(x)) the rows x have two gradients. Autograd computes the norm's, sums the weight's gradient over
all rows in another pass, and adds the gradient of x itself in a third. On a GPU one kernel does all this: it
reads x and both gradients once, and writes one. It computes a row's mean and scale again, so only x is kept.
With --lora, whose norms are frozen, it sums the weight's gradient for nobody.

Forward has a kernel, too: in rows of 384 numbers torch's takes four times as long as a copy. torch's compiler
joins the norm with what is around it, so compiled blocks leave it to the compiler. A norm whose input does
not go on, such as the last one of a model, has the same kernels unless it is compiled itself.
"""
import torch
import torch.nn.functional as F

from config import ceil_div
from ops import backend, tiles


def has_kernel(x):
    """Whether the kernels serve x: rows (n, C), and no tensor of more dimensions."""
    if x.ndim != 2 or not x.is_contiguous() or not backend.use_triton(x):
        return False
    return tiles.norm_fits(x.size(1), x.element_size())


def norm(x, weight, bias, eps, is_layer_norm):
    """Return the norm of the rows x (n, C), by the kernel. weight (C,); bias (C,) or None."""
    from ops import kernels
    n, C = x.shape
    options = tiles.norm_forward(C)
    out = torch.empty_like(x)
    kernels.norm_forward[(ceil_div(n, options["ROWS"]),)](
        x, weight, weight if bias is None else bias, out, n, C,
        EPS=eps, CENTRED=is_layer_norm, BIAS=bias is not None, **options)
    return out


class InputAndNorm(torch.autograd.Function):
    """The rows x (n, C) themselves, and their norm (n, C).

    weight (C,). bias (C,), which only a LayerNorm can have, or None.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps, is_layer_norm):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.eps = eps
        ctx.is_layer_norm = is_layer_norm
        if not torch.compiler.is_compiling():
            y = norm(x, weight, bias, eps, is_layer_norm)
        elif is_layer_norm:
            y = F.layer_norm(x, weight.shape, weight, bias, eps)
        else:
            y = F.rms_norm(x, weight.shape, weight, eps)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx, grad_x, grad_y):
        from ops import kernels
        x, weight = ctx.saved_tensors
        n, C = x.shape
        most, options = tiles.norm(C)
        programs = min(most, ceil_div(n, options["ROWS"]))
        out = torch.empty_like(x)
        # Each program sums over its rows. The first of these sums are the weight's, the second the bias's.
        n_sums = 2 if ctx.has_bias else 1
        sums = torch.empty(n_sums, programs, C, dtype=torch.float32, device=x.device)
        kernels.norm_backward[(programs,)](
            x, weight, grad_y.contiguous(), grad_x.contiguous(), out, sums, n, C,
            EPS=ctx.eps, CENTRED=ctx.is_layer_norm, BIAS=ctx.has_bias, **options)
        grad_weight, grad_bias = sum_programs(sums, weight.dtype)
        return out, grad_weight, grad_bias, None, None


def sum_programs(sums, dtype):
    """Return the gradients of weight and bias, (C,) each, in a dtype: sums (1 or 2, programs, C) in fp32.

    With one kind of sums there is no bias, and the second is None.
    """
    from ops import kernels
    n_sums, programs, C = sums.shape
    totals = torch.empty(n_sums, C, dtype=dtype, device=sums.device)
    options = tiles.SUM_PROGRAMS
    kernels.sum_programs[(ceil_div(C, options["BLOCK"]), n_sums)](sums, totals, programs, C, **options)
    return totals[0], totals[1] if n_sums == 2 else None

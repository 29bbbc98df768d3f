"""What the MLP and each expert compute between their matrices: SwiGLU, GEGLU, GELU or squared ReLU: --mlp."""
import torch
import torch.nn.functional as F

from ops import backend


def gelu(x):
    """GELU in its tanh form, as in GPT-2 (arXiv:1606.08415). ops/gelu_mlp.py has it, too: change both."""
    if torch.compiler.is_compiling():
        # The same function, with one exponential instead of a tanh of many branches.
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    return F.gelu(x, approximate="tanh")


def relu2(x):
    """Squared ReLU, arXiv:2109.08668."""
    return F.relu(x).square()


def swiglu(gate, up=None):
    """Return silu(gate) * up, (..., f). gate and up are (..., f), or side by side in gate (R, 2f)."""
    if up is None:
        gate, up = gate.chunk(2, dim=1)
    return F.silu(gate) * up


def geglu(gate, up=None):
    """Return gelu(gate) * up, (..., f), arXiv:2002.05202: gate and up as in swiglu."""
    if up is None:
        gate, up = gate.chunk(2, dim=1)
    return gelu(gate) * up


# --mlp NAME takes ACTIVATIONS[NAME], a function of the product with w1. A name in GATED takes the products
# with w1 and w3: the MLP gives them side by side, an expert as two arguments.
# A new name also goes into the list at `mlp` in config.py.
ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "gelu": gelu, "relu2": relu2}
GATED = {"swiglu", "geglu"}


# --compile leaves these two whole, and --recompute full may run the first again.
@torch.library.custom_op("nanoshard::swiglu", mutates_args=())
def swiglu_by_kernel(pair: torch.Tensor) -> torch.Tensor:
    """swiglu of gate and up side by side, (R, 2f)."""
    return silu_mul(pair.contiguous())  # The kernel goes over rows.


@torch.library.custom_op("nanoshard::swiglu_backward", mutates_args=())
def swiglu_backward(grad_h: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    return silu_mul_backward(grad_h.contiguous(), pair.contiguous())


swiglu_by_kernel.register_fake(lambda pair: pair.new_empty(pair.size(0), pair.size(1) // 2))
swiglu_backward.register_fake(lambda grad_h, pair: pair.new_empty(pair.shape))
swiglu_by_kernel.register_autograd(
    lambda ctx, grad_h: swiglu_backward(grad_h, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def silu_mul(gate, up=None, n_valid=None):
    """swiglu without autograd, of contiguous tensors. A GPU writes only the first n_valid () int32 rows."""
    if not backend.use_triton(gate):
        return swiglu(gate, up)
    from ops import kernels
    packed = up is None
    limited = n_valid is not None
    *outer, width = gate.shape
    if packed:
        width = width // 2
    h = gate.new_empty(*outer, width)
    rows = h.numel() // width
    # In the place of a missing tensor the kernel gets `gate`, and does not read it.
    kernels.swiglu[(rows,)](
        gate, gate if packed else up, h, n_valid if limited else gate, width,
        PACKED=packed, LIMITED=limited, BLOCK=1024, num_warps=4)
    return h


def silu_mul_backward(grad_h, gate, up=None, n_valid=None, recompute=False):
    """Return the gradients of gate and up: a pair, or one tensor where they stand side by side in gate."""
    if not backend.use_triton(gate):
        return silu_mul_backward_torch(grad_h, gate, up, recompute)
    from ops import kernels
    packed = up is None
    limited = n_valid is not None
    width = grad_h.size(-1)
    rows = grad_h.numel() // width
    grad_gate = torch.empty_like(gate)
    grad_up = None if packed else torch.empty_like(up)
    kernels.swiglu_backward[(rows,)](
        gate, gate if packed else up, grad_h, grad_gate, grad_h if packed else grad_up,
        n_valid if limited else gate, width,
        PACKED=packed, LIMITED=limited, RECOMPUTE=recompute, BLOCK=1024, num_warps=4)
    return grad_gate if packed else (grad_gate, grad_up)


def silu_mul_backward_torch(grad_h, gate, up, recompute):
    packed = up is None
    if packed:
        gate, up = gate.chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad_h * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad_h * gate * sigmoid
    if recompute:
        grad_h.copy_(gate * sigmoid * up)  # h, which need not be kept from forward
    if packed:
        return torch.cat([grad_gate, grad_up], dim=1)
    return grad_gate, grad_up

"""The experts' matrix products: each row times the matrix of its own expert.

Rows stand by expert, x (R, I), and ends (e,) says where each expert's rows end. Rows after the last expert's
are undefined in a result. With a capacity x is (e, rows, I), ends is None, and bmm multiplies.

Four ways give the same product: in bf16 torch's grouped_mm on Hopper and Blackwell, or quack-kernels on
Hopper; ops/product_kernels.py on other GPUs and dtypes; and a loop over the experts, which asks the host how
many rows each expert has.
"""
import functools

import torch
import torch.nn.functional as F

from ops import backend
from ops.activations import silu_mul, silu_mul_backward

# Tiles of product_kernels.py, by architecture (others take sm80's) and bytes of an element: (ROWS, COLUMNS,
# DEPTH, warps, stages) of the product, then of the weights' gradient. bench/moe_layer.py --tune times more.
TILES = {
    ("sm80", 2): ((128, 128, 32, 4, 4), (128, 128, 32, 4, 4)),
    ("sm80", 4): ((64, 64, 32, 4, 3), (64, 64, 32, 4, 3)),
    ("sm90", 2): ((128, 256, 64, 8, 4), (128, 128, 32, 4, 4)),
    ("hip", 2): ((128, 128, 32, 8, 2), (128, 128, 32, 8, 2)),
}
quack = None  # the library's functions, where fast/choose.py takes them
PROGRAMS_PER_SM = 2  # at least what runs at once, so that no program waits for the slowest one


def use_torch(x, shape):
    """Whether torch's grouped_mm is one kernel for x and matrices of a shape. Elsewhere it asks the host."""
    # AMD's MI250X and MI300X report capability 9, too.
    if x.dtype != torch.bfloat16 or x.device.type != "cuda" or torch.version.hip is not None:
        return False
    is_new = torch.cuda.get_device_capability(x.device)[0] in (9, 10) and hasattr(F, "grouped_mm")
    return is_new and all(width % 8 == 0 for width in shape)


def use_quack(x):
    """Whether quack-kernels multiplies the rows x (R, I). It keeps a plan for every R, for ever.

    So not the rows of messages with exact sizes, of which one in 128 has such an R.
    """
    return quack is not None and x.size(0) % 128 == 0


def use_grouped_mm(x, w):
    """Whether x times w (e, O, I) runs as one kernel that asks the host nothing."""
    return use_torch(x, w.shape[1:]) or backend.use_triton(x)


def grouped_mm(x, w, ends):
    """Multiply each row of x (R, I) by the matrix of its expert in w (e, O, I): (R, O)."""
    if ends is None:
        return torch.bmm(x, w.transpose(1, 2))
    if use_grouped_mm(x, w) and x.numel():
        return GroupedMM.apply(x, w, row_bounds(ends))
    return grouped_mm_loop(x, w, ends)


def grouped_mm_loop(x, w, ends):
    """grouped_mm, one expert after the other. Rows after the last expert's are zero."""
    ends = ends.tolist()  # sync point on a GPU
    outputs = []
    begin = 0
    for i, end in enumerate(ends):
        outputs.append(F.linear(x[begin:end], w[i]))
        begin = end
    outputs.append(x.new_zeros(x.size(0) - begin, w.size(1)))
    return torch.cat(outputs)


def row_bounds(ends):  # (e,) -> (e+1,) int32: expert i has the rows bounds[i] to bounds[i+1]
    return None if ends is None else F.pad(ends.to(torch.int32), (1, 0))


# One kernel each, of torch, of quack-kernels or of ops/

def experts_mm(x, w, bounds):
    """Multiply each expert's rows by its matrix: x (R, I), w (e, I, O), bounds (e+1,) -> (R, O)"""
    if bounds is None:
        return torch.bmm(x, w)
    e, I, O = w.shape
    if use_torch(x, (O, I)):  # w is contiguous, or the transpose of a contiguous one
        if use_quack(x):
            return quack.gemm(x, w, cu_seqlens_m=bounds, tuned=False)
        return F.grouped_mm(x, w, offs=bounds[1:])
    from ops import product_kernels
    y = x.new_empty(x.size(0), O)
    tile, _ = pointer_tiles(x.device, x.element_size())
    rows, columns, depth, warps, stages = tile
    programs = PROGRAMS_PER_SM * multiprocessors(x.device)
    product_kernels.grouped_mm[(programs,)](
        x.contiguous(), w, bounds[1:], y, I, O, *w.stride(), programs, E=e, WIDE=backend.next_power_of_2(e),
        EVEN=I % depth == 0, PRECISION=precision(x), ROWS=rows, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages)
    return y


def experts_wgrad(grad, x, bounds):
    """Return each expert's weight gradient, zero without rows: grad (R, O), x (R, I) -> (e, O, I)"""
    if bounds is None:
        return torch.bmm(grad.transpose(1, 2), x)
    O, I = grad.size(1), x.size(1)
    if use_torch(x, (O, I)):
        if use_quack(x):
            return quack.gemm(grad.t(), x, cu_seqlens_k=bounds, tuned=False)
        return F.grouped_mm(grad.t(), x, offs=bounds[1:])
    from ops import product_kernels
    e = bounds.numel() - 1
    grad_w = x.new_empty(e, O, I)
    _, tile = pointer_tiles(x.device, x.element_size())
    rows, columns, depth, warps, stages = tile
    programs = PROGRAMS_PER_SM * multiprocessors(x.device)
    product_kernels.grouped_wgrad[(programs,)](
        grad.contiguous(), x.contiguous(), bounds[1:], grad_w, O, I, programs, E=e, PRECISION=precision(x),
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages)
    return grad_w


@functools.cache
def pointer_tiles(device, size):
    name = "hip" if torch.version.hip else device.type
    if name == "cuda":
        name = f"sm{torch.cuda.get_device_capability(device)[0]}0"
    return TILES.get((name, size)) or TILES["sm80", size]


@functools.cache
def multiprocessors(device):
    if device.type == "cpu":
        return 2  # Triton's interpreter
    gpu = torch.get_device_module(device).get_device_properties(device)
    # Intel's GPUs have subslices instead of multiprocessors.
    return getattr(gpu, "multi_processor_count", 0) or gpu.gpu_subslice_count


def precision(x):
    exact = torch.get_float32_matmul_precision() == "highest"
    return "tf32" if x.dtype == torch.float32 and not exact else "ieee"  # AMD takes tf32 for fp32 alone


class GroupedMM(torch.autograd.Function):
    """grouped_mm in one kernel: x (R, I), w (e, O, I), bounds (e+1,) int32 -> (R, O)"""

    @staticmethod
    def forward(ctx, x, w, bounds):
        ctx.save_for_backward(x, w, bounds)
        return experts_mm(x, w.transpose(1, 2), bounds)

    @staticmethod
    def backward(ctx, grad):
        x, w, bounds = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = experts_mm(grad, w, bounds)
        grad_w = experts_wgrad(grad, x, bounds)
        return grad_x, grad_w, None


class SwiGLUExperts(torch.autograd.Function):
    """The experts' SwiGLU MLP on a GPU. The lines below the call in moe.MoE.ffn are the reference."""

    @staticmethod
    def forward(ctx, x, w1, w3, w2, ends):  # x (R, C), w1 and w3 (e, F, C), w2 (e, C, F)
        ctx.bounds = bounds = row_bounds(ends)
        gate = experts_mm(x, w1.transpose(1, 2), bounds)  # (R, F)
        up = experts_mm(x, w3.transpose(1, 2), bounds)  # (R, F)
        n_valid = None if bounds is None else bounds[-1]
        h = silu_mul(gate, up, n_valid)
        ctx.save_for_backward(x, gate, up, w1, w3, w2)
        return experts_mm(h, w2.transpose(1, 2), bounds)  # (R, C)

    @staticmethod
    def backward(ctx, grad_y):
        x, gate, up, w1, w3, w2 = ctx.saved_tensors
        bounds = ctx.bounds
        n_valid = None if bounds is None else bounds[-1]
        grad_y = grad_y.contiguous()

        # silu_mul_backward computes h again and writes it over its gradient.
        h = experts_mm(grad_y, w2, bounds)  # until the next line, the gradient of h
        grad_gate, grad_up = silu_mul_backward(h, gate, up, n_valid, recompute=True)
        grad_w2 = experts_wgrad(grad_y, h, bounds)

        grad_x = experts_mm(grad_gate, w1, bounds)
        grad_x += experts_mm(grad_up, w3, bounds)
        grad_w1 = experts_wgrad(grad_gate, x, bounds)
        grad_w3 = experts_wgrad(grad_up, x, bounds)
        return grad_x, grad_w1, grad_w3, grad_w2, None

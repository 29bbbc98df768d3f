"""The experts' matrix products: each row times the matrix of its own expert.

Rows stand by expert, and ends (e,) says where each expert's rows end (torch's grouped_mm calls it offs).
With a capacity every expert has the same number of rows: then x is (e, rows, I), ends is None, and bmm
multiplies.

Four ways give the same product: the Triton kernels of ops/tma_kernels.py in bf16 on Hopper, torch's
grouped_mm in bf16 on Blackwell and for Hopper's gradients of weights from few rows, the Triton kernels of
ops/product_kernels.py on every other GPU and dtype, and a loop over the experts, the reference. Only the loop
asks the host how many rows each expert has.
"""
import functools
import importlib.util

import torch
import torch.nn.functional as F

from ops import backend, tiles
from ops.activations import silu_mul, silu_mul_backward
from ops.tiles import next_power_of_2

# Tiles of ops/product_kernels.py, by architecture and bytes of an element: (ROWS, COLUMNS, DEPTH, warps,
# stages) of the product, then of the weights' gradient. Others than the architectures here take sm80's.
# bench/moe_layer.py --tune times many tiles and prints the fastest on this GPU.
TILES = {
    ("sm80", 2): ((128, 128, 32, 4, 4), (128, 128, 32, 4, 4)),
    ("sm80", 4): ((64, 64, 32, 4, 3), (64, 64, 32, 4, 3)),
    ("sm90", 2): ((128, 256, 64, 8, 4), (128, 128, 32, 4, 4)),
    ("sm90", 4): ((64, 64, 32, 4, 3), (64, 64, 32, 4, 3)),
    ("hip", 2): ((128, 128, 32, 8, 2), (128, 128, 32, 8, 2)),
}
PROGRAMS_PER_SM = 2  # at least what runs at once, so that no program waits for the slowest one


@functools.cache
def has_grouped_mm(device):
    """Whether torch's grouped_mm is one kernel on this GPU, which holds on NVIDIA's Hopper and Blackwell.

    Elsewhere torch reads the row counts on the host.
    """
    # AMD's MI250X and MI300X report capability 9, too.
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def use_torch(x, w):
    """Whether torch's grouped_mm multiplies x by w (e, O, I): bf16, with rows of a multiple of 16 bytes."""
    if x.dtype != torch.bfloat16 or not has_grouped_mm(x.device):
        return False
    return all(width % 8 == 0 for width in w.shape[1:])


@functools.cache
def has_tma(device):
    """Whether Triton loads tiles through descriptors on this GPU in one instruction: Hopper.

    Blackwell has that, too, but was not measured.
    """
    if not has_grouped_mm(device) or not backend.is_hopper(device):
        return False
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def use_tma(x, w):
    """Whether ops/tma_kernels.py multiplies x by w (e, O, I). Its rows must begin where torch's must, too."""
    return use_torch(x, w) and backend.use_triton(x) and has_tma(x.device)


def use_grouped_mm(x, w):
    """Whether x times w (e, O, I) runs as one kernel that asks the host nothing."""
    return use_torch(x, w) or backend.use_triton(x)


def grouped_mm(x, w, ends):
    """Multiply each row of x (R, I) by the matrix of its expert in w (e, O, I): (R, O).

    ends (e,): where each expert's rows end. Rows after the last expert's are undefined.
    With a capacity ends is None: x (e, rows, I) -> (e, rows, O).
    """
    if ends is None:
        return torch.bmm(x, w.transpose(1, 2))
    if x.size(0) == 0:
        # No token chose this rank's experts: zero rows, and a gradient of zero.
        return F.linear(x, w[0])
    if use_grouped_mm(x, w):
        return GroupedMM.apply(x, w, ends.to(torch.int32))
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


# -----------------------------------------------------------------------------
# One kernel each, of torch or of ops/

def experts_mm(x, w, ends, plus=None, out=None):
    """Multiply each expert's rows by its matrix: x (R, I), w (e, I, O), ends (e,) int32 -> (R, O)

    w is contiguous, or the transpose of a contiguous one. plus: None, or another such pair x, w, whose
    product is added; its w is laid out as the first one. Our kernels add it in fp32, torch rounds both
    products before. out: None, or a contiguous tensor (at least R, O) that receives the rows that experts
    have; its other rows stay as they are. With a capacity ends is None: x (e, rows, I) -> (e, rows, O),
    without out.
    """
    assert plus is None or plus[1].stride() == w.stride()
    assert out is None or (ends is not None and out.is_contiguous())
    if ends is None:
        y = torch.bmm(x, w)
        return y if plus is None else y.baddbmm_(*plus)
    if use_torch(x, w) and not use_tma(x, w):
        y = F.grouped_mm(x, w, offs=ends)
        if plus is not None:
            y += F.grouped_mm(*plus, offs=ends)
        return y if out is None else copy_rows(y, out, ends[-1])

    y = x.new_empty(x.size(0), w.size(2)) if out is None else out[:x.size(0)]
    pairs = [(x, w)] if plus is None else [(x, w), plus]
    multiply = multiply_by_tma if use_tma(x, w) else multiply_by_pointers
    multiply([(rows.contiguous(), matrices) for rows, matrices in pairs], ends, y)
    return y


# A kernel gets one pair in the place of a second one that is missing, and does not read it.

def multiply_by_pointers(pairs, ends, y):
    """Write the product of one pair of x (R, I) and w (e, I, O), or the sum of two, into y (R, O)."""
    from ops import product_kernels
    x, w = pairs[0]
    e, I, O = w.shape
    tile, _ = pointer_tiles(x.device, x.element_size())
    rows, columns, depth, warps, stages = tile
    programs = PROGRAMS_PER_SM * multiprocessors(x.device)
    product_kernels.grouped_mm[(programs,)](
        x, w, *pairs[-1], ends, y, I, O, *w.stride(), programs, E=e, WIDE=next_power_of_2(e),
        TWO=len(pairs) == 2, EVEN=I % depth == 0, PRECISION=precision(x), ROWS=rows, COLUMNS=columns,
        DEPTH=depth, num_warps=warps, num_stages=stages)


def multiply_by_tma(pairs, ends, y):
    """multiply_by_pointers through descriptors."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ops import tma_kernels
    e, I, O = pairs[0][1].shape
    by_column = pairs[0][1].stride(1) == 1
    launch = tiles.product(e, O, by_column, two=len(pairs) == 2)
    factors = []
    for x, w in (pairs[0], pairs[-1]):
        factors.append(TensorDescriptor.from_tensor(x, launch.first))
        factors.append(TensorDescriptor.from_tensor(w.mT if by_column else w, launch.second))
    programs = launch.programs * multiprocessors(y.device)
    tma_kernels.grouped_mm[(programs,)](*factors, ends, y, I, O, programs, **launch.options)


def experts_wgrad(grad, x, ends):
    """Return each expert's weight gradient: grad (R, O), x (R, I) -> (e, O, I)

    The gradient of an expert without rows is zero.
    """
    if ends is None:
        return torch.bmm(grad.transpose(1, 2), x)
    like = grad.new_empty(0, grad.size(1), x.size(1))
    by_tma = use_tma(x, like) and has_many_rows(x, ends)
    if use_torch(x, like) and not by_tma:
        return F.grouped_mm(grad.t(), x, offs=ends)
    grad_w = x.new_empty(ends.numel(), *like.shape[1:])
    write = wgrad_by_tma if by_tma else wgrad_by_pointers
    write(grad.contiguous(), x.contiguous(), ends, grad_w)
    return grad_w


def has_many_rows(x, ends):
    """Whether experts have so many of the rows x (R, I) that Triton makes their gradients faster than torch.

    R is the size of a buffer, where rows come from other ranks. It may differ after a resume, so
    --deterministic always takes torch.
    """
    is_free = not torch.are_deterministic_algorithms_enabled()
    return is_free and x.size(0) >= tiles.WGRAD_ROWS * ends.numel()


def wgrad_by_tma(grad, x, ends, grad_w):
    """Write the gradients of grad (R, O) and x (R, I) into grad_w (e, O, I), through descriptors."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ops import tma_kernels
    e, O, I = grad_w.shape
    launch = tiles.weight_gradient(e)
    programs = launch.programs * multiprocessors(x.device)
    tma_kernels.grouped_wgrad[(programs,)](
        TensorDescriptor.from_tensor(grad, launch.first), TensorDescriptor.from_tensor(x, launch.second),
        ends, grad_w, O, I, programs, **launch.options)


def wgrad_by_pointers(grad, x, ends, grad_w):
    """wgrad_by_tma on every GPU."""
    from ops import product_kernels
    e, O, I = grad_w.shape
    _, tile = pointer_tiles(x.device, x.element_size())
    rows, columns, depth, warps, stages = tile
    programs = PROGRAMS_PER_SM * multiprocessors(x.device)
    product_kernels.grouped_wgrad[(programs,)](
        grad, x, ends, grad_w, O, I, programs, E=e, PRECISION=precision(x), ROWS=rows, COLUMNS=columns,
        DEPTH=depth, num_warps=warps, num_stages=stages)


@functools.cache
def pointer_tiles(device, size):
    """Return this device's entry of TILES for elements of `size` bytes: two tiles."""
    name = "hip" if torch.version.hip else device.type
    if name == "cuda":
        name = f"sm{torch.cuda.get_device_capability(device)[0]}0"
    return TILES.get((name, size)) or TILES["sm80", size]


@functools.cache
def multiprocessors(device):
    """Return how many multiprocessors a GPU has. A persistent kernel starts programs for each of them."""
    if device.type == "cpu":
        return 2  # Triton's interpreter
    gpu = torch.get_device_module(device).get_device_properties(device)
    # Intel's GPUs have subslices instead of multiprocessors.
    return getattr(gpu, "multi_processor_count", 0) or gpu.gpu_subslice_count


def precision(x):
    """Return how tl.dot multiplies fp32: as torch's own products do.

    AMD's compiler takes no "tf32" for other dtypes.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    return "tf32" if x.dtype == torch.float32 and not exact else "ieee"


class GroupedMM(torch.autograd.Function):
    """grouped_mm in one kernel: x (R, I), w (e, O, I), ends (e,) int32 -> (R, O)"""

    @staticmethod
    def forward(ctx, x, w, ends):
        ctx.save_for_backward(x, w, ends)
        return experts_mm(x, w.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx, grad):
        x, w, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = experts_mm(grad, w, ends)
        grad_w = experts_wgrad(grad, x, ends)
        return grad_x, grad_w, None


# -----------------------------------------------------------------------------
# The experts' SwiGLU MLP as one function. Its gradients come out in the parameters' own layout, and nothing
# is copied or added without need.

class SwiGLUExperts(torch.autograd.Function):
    """The experts' SwiGLU MLP on a GPU: x (R, C) by expert with ends (e,) int32 -> (R, C)

    With a capacity ends is None and x is (e, rows, C). w1, w3 (e, F, C), w2 (e, C, F). Rows after the last
    expert's are undefined. out: None, or a tensor (at least R, C) that receives the result and, in backward,
    the gradient of x. The lines below the call in moe.MoE.ffn are the reference.
    """

    @staticmethod
    def forward(ctx, x, w1, w3, w2, ends, out):
        ctx.ends = ends
        ctx.out = out
        gate = experts_mm(x, w1.transpose(1, 2), ends)  # (R, F)
        up = experts_mm(x, w3.transpose(1, 2), ends)  # (R, F)
        n_valid = last_end(ends)
        h = silu_mul(gate.flatten(0, -2), up.flatten(0, -2), n_valid).view_as(gate)
        ctx.save_for_backward(x, gate, up, w1, w3, w2)
        return experts_mm(h, w2.transpose(1, 2), ends, out=out)  # (R, C)

    @staticmethod
    def backward(ctx, grad_y):
        x, gate, up, w1, w3, w2 = ctx.saved_tensors
        ends = ctx.ends
        n_valid = last_end(ends)
        grad_y = grad_y.contiguous()

        # silu_mul_backward computes h again and writes it over its gradient.
        h = experts_mm(grad_y, w2, ends)  # until the next line, the gradient of h
        grad_gate, grad_up = silu_mul_backward(
            h.flatten(0, -2), gate.flatten(0, -2), up.flatten(0, -2), n_valid, recompute=True)
        grad_gate = grad_gate.view_as(gate)
        grad_up = grad_up.view_as(up)
        grad_w2 = experts_wgrad(grad_y, h, ends)

        grad_x = experts_mm(grad_gate, w1, ends, (grad_up, w3), ctx.out)
        grad_w1 = experts_wgrad(grad_gate, x, ends)
        grad_w3 = experts_wgrad(grad_up, x, ends)
        return grad_x, grad_w1, grad_w3, grad_w2, None, None


def last_end(ends):
    """Return the number of rows that experts have, () int32 on the device; None where ends is None."""
    return None if ends is None else ends[-1]


def copy_rows(x, out, n_valid):
    """Write x (R, C) into the first n_valid rows of out, and return out[:R].

    n_valid () int32. The other rows of out stay as they were.
    """
    if backend.use_triton(x):
        from ops import kernels
        kernels.copy_rows[(x.size(0),)](x, out, n_valid, x.size(1), BLOCK=512, num_warps=2)
    else:
        out[:n_valid] = x[:n_valid]
    return out[:x.size(0)]

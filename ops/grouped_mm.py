"""The experts' matrix products: each row times the matrix of its own expert.

Rows stand by expert, and offs (e,) says where each expert's rows end (the argument of torch's grouped_mm).
With a capacity every expert has the same number of rows: x is (e, rows, I), offs is None, then bmm.

Three ways give the same product: torch's grouped_mm where that is one kernel (bf16 on Hopper and Blackwell),
the Triton kernels of ops/kernels.py on every other GPU and dtype, and a loop over experts, the reference. The
loop alone asks the host how many rows each expert has.
"""
import functools

import torch
import torch.nn.functional as F

from ops import backend
from ops.activations import silu_mul, silu_mul_backward

# tiles of the Triton kernels by architecture and bytes of an element: ROWS, COLUMNS, DEPTH, warps, stages of
# the product and of the weights' gradient. an architecture that is not here takes sm80's.
# bench/moe_layer.py --tune measures many and prints the line of this GPU
TILES = {
    ("sm80", 2): ((128, 128, 32, 4, 4), (128, 128, 32, 4, 4)),
    ("sm80", 4): ((64, 64, 32, 4, 3), (64, 64, 32, 4, 3)),
    ("sm90", 2): ((128, 256, 64, 8, 4), (128, 128, 32, 4, 4)),
    ("sm90", 4): ((64, 64, 32, 4, 3), (64, 64, 32, 4, 3)),
    ("hip", 2): ((128, 128, 32, 8, 2), (128, 128, 32, 8, 2)),
}
PROGRAMS_PER_SM = 2  # at least as many as run at once, so that none waits for the slowest


@functools.cache
def has_grouped_mm(device):
    """Whether torch's grouped_mm is one kernel on this GPU: on NVIDIA's Hopper and Blackwell. Elsewhere torch
    reads the row counts on the host. AMD's MI250X and MI300X report capability 9, too."""
    return (device.type == "cuda" and torch.version.hip is None and hasattr(F, "grouped_mm")
            and torch.cuda.get_device_capability(device)[0] in (9, 10))


def use_torch(x, w):
    """Whether torch's grouped_mm multiplies x by w (e, O, I): bf16, rows of a multiple of 16 bytes."""
    return (x.dtype == torch.bfloat16 and has_grouped_mm(x.device)
            and all(width % 8 == 0 for width in w.shape[1:]))


def use_grouped_mm(x, w):
    """Whether x times w (e, O, I) runs as one kernel that asks the host nothing."""
    return use_torch(x, w) or backend.use_triton(x)


def grouped_mm(x, w, offs):
    """Row r of x (R, I) times the matrix of the expert whose rows it stands among: w (e, O, I), offs (e,) ->
    (R, O); rows after the last expert's are undefined. With a capacity: offs None, x (e, rows, I) -> (e,
    rows, O)."""
    if offs is None:
        return torch.bmm(x, w.transpose(1, 2))
    if x.size(0) == 0:
        return F.linear(x, w[0])  # no token chose this rank: zero rows, and a gradient of zero
    if use_grouped_mm(x, w):
        return GroupedMM.apply(x, w, offs.to(torch.int32))
    return grouped_mm_loop(x, w, offs)


def grouped_mm_loop(x, w, offs):
    """grouped_mm, one expert after the other; rows after the last expert's are zero."""
    ends = offs.tolist()  # sync point on a GPU
    runs = zip([0, *ends[:-1]], ends, strict=True)
    unused = x.new_zeros(x.size(0) - ends[-1], w.size(1))
    return torch.cat([*(F.linear(x[a:b], w[i]) for i, (a, b) in enumerate(runs)), unused])


# -----------------------------------------------------------------------------
# one kernel each, asked of two libraries

def experts_mm(x, w, offs):
    """Each expert's rows times its matrix: x (R, I), w (e, I, O) of any strides, offs (e,) int32 -> (R, O)"""
    if offs is None:
        return torch.bmm(x, w)
    if use_torch(x, w):
        return F.grouped_mm(x, w, offs=offs)
    from ops import kernels
    (rows, columns, depth, warps, stages), _ = tiles(x.device, x.element_size())
    (e, I, O), programs = w.shape, n_programs(x.device)
    y = x.new_empty(x.size(0), O)
    kernels.grouped_mm[(programs,)](
        x.contiguous(), w, offs, y, I, O, *w.stride(), programs, E=e, WIDE=next_power_of_2(e),
        EVEN=I % depth == 0, PRECISION=precision(x), ROWS=rows, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages)
    return y


def experts_wgrad(g, x, offs):
    """Each expert's weight gradient: (R, O), (R, I) -> (e, O, I); zero for an expert without rows."""
    if offs is None:
        return torch.bmm(g.transpose(1, 2), x)
    (O, I), e = (g.size(1), x.size(1)), offs.numel()
    if use_torch(x, g.new_empty(0, O, I)):
        return F.grouped_mm(g.t(), x, offs=offs)
    from ops import kernels
    _, (rows, columns, depth, warps, stages) = tiles(x.device, x.element_size())
    programs = n_programs(x.device)
    dw = x.new_empty(e, O, I)
    kernels.grouped_wgrad[(programs,)](
        g.contiguous(), x.contiguous(), offs, dw, O, I, programs, E=e, PRECISION=precision(x), ROWS=rows,
        COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages)
    return dw


@functools.cache
def tiles(device, size):
    """-> this device's entry of TILES for elements of `size` bytes."""
    name = "hip" if torch.version.hip else device.type
    if name == "cuda":
        name = f"sm{torch.cuda.get_device_capability(device)[0]}0"
    return TILES.get((name, size)) or TILES["sm80", size]


@functools.cache
def n_programs(device):
    """-> how many programs of a persistent kernel are started."""
    if device.type == "cpu":
        return 3  # Triton's interpreter
    gpu = torch.get_device_module(device).get_device_properties(device)
    return PROGRAMS_PER_SM * (getattr(gpu, "multi_processor_count", 0) or gpu.gpu_subslice_count)  # Intel's


def precision(x):
    """-> how tl.dot multiplies fp32: as torch's own products do. AMD takes no tf32 for other dtypes."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return "tf32" if x.dtype == torch.float32 and not exact else "ieee"


def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


class GroupedMM(torch.autograd.Function):
    """grouped_mm in one kernel: x (R, I), w (e, O, I), offs (e,) int32 -> (R, O)"""

    @staticmethod
    def forward(ctx, x, w, offs):
        ctx.save_for_backward(x, w, offs)
        return experts_mm(x, w.transpose(1, 2), offs)

    @staticmethod
    def backward(ctx, dy):
        (x, w, offs), dy = ctx.saved_tensors, dy.contiguous()
        return experts_mm(dy, w, offs), experts_wgrad(dy, x, offs), None


# -----------------------------------------------------------------------------
# the experts' SwiGLU MLP as one function: its gradients come out in the parameters' own layout, and nothing
# is copied or added that need not be

class SwiGLUExperts(torch.autograd.Function):
    """x (R, C) by expert with offs (e,) int32, or (e, rows, C) with offs None; w1, w3 (e, F, C), w2 (e, C, F)
    -> like x; rows after the last expert's are undefined. On a GPU.
    out (at least R, C): the tensor that receives the result and, in backward, the gradient of x; or None.
    The lines below its call in moe.MoE.ffn are the reference."""

    @staticmethod
    def forward(ctx, x, w1, w3, w2, offs, out):
        ctx.offs, ctx.out = offs, out
        a, b = (experts_mm(x, w.transpose(1, 2), offs) for w in (w1, w3))  # (R, F) each
        n_valid = None if offs is None else offs[-1]
        h = silu_mul(a.flatten(0, -2), b.flatten(0, -2), n_valid).view_as(a)
        ctx.save_for_backward(x, a, b, w1, w3, w2)
        y = experts_mm(h, w2.transpose(1, 2), offs)
        return y if out is None else add_rows(y, None, out, n_valid)

    @staticmethod
    def backward(ctx, dy):
        x, a, b, w1, w3, w2 = ctx.saved_tensors
        offs, dy = ctx.offs, dy.contiguous()
        n_valid = None if offs is None else offs[-1]
        h = experts_mm(dy, w2, offs)  # the gradient of h, and after the next line h itself
        da, db = silu_mul_backward(*(t.flatten(0, -2) for t in (h, a, b)), n_valid, recompute=True)
        da, db, dw2 = da.view_as(a), db.view_as(a), experts_wgrad(dy, h, offs)
        dx, dx3 = experts_mm(da, w1, offs), experts_mm(db, w3, offs)
        dx = dx.add_(dx3) if ctx.out is None else add_rows(dx, dx3, ctx.out, n_valid)
        return dx, experts_wgrad(da, x, offs), experts_wgrad(db, x, offs), dw2, None, None


def add_rows(a, b, out, n_valid):
    """out[:n_valid] = a (R, C), plus b if it is not None -> out[:R]; rows from n_valid () int32 on are left
    as they were."""
    if backend.use_triton(a):
        from ops import kernels
        kernels.add_rows[(a.size(0),)](a, a if b is None else b, out, n_valid, a.size(1), BOTH=b is not None,
                                       BLOCK=512, num_warps=2)
    else:
        out[:n_valid] = a[:n_valid] if b is None else a[:n_valid] + b[:n_valid]
    return out[:a.size(0)]

"""One MoE layer, forward and backward, compared with a dense MLP of the same FLOPs: bench/moe_layer.py

    dense           the dense SwiGLU, compiled
    dropless        our layer: routing, sort, grouped matrix products, as this GPU runs them
    same, pointers  the same by ops/product_kernels.py, the Triton kernels of other GPUs
    capacity 1.0    our layer with a capacity (bmm)
    loop            the loop over experts that the tests compare with

Our layer is timed as a CUDA graph, too, which is how train.py runs it. --tune looks for this GPU's line of
TILES in ops/grouped_mm.py instead.
"""
import contextlib
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from common import read_flags, start
from runtime.launch import World

import torch
import torch.nn as nn
from timing import gpu_milliseconds, graphed

import moe
from config import Config
from interface.command_line import wrong_input
from model import DTYPES
from ops import grouped_mm
from ops.activations import swiglu
from parallel import make_mesh

VARIANTS = (  # label, capacity factor, what is off
    ("dropless", 0.0, ""), ("same, pointers", 0.0, "use_torch"), ("capacity 1.0", 1.0, ""))
SHAPES = {  # tokens, experts, hidden width, width, top-k; ms of torch's grouped_mm, compiled, on an H200
    "W2": (16384, 64, 1792, 512, 1, 1.051),
    "top-8": (16384, 64, 1408, 2048, 8, 14.14),
}

# The tiles that --tune tries: rows, columns, depth, warps, stages.
CANDIDATES = [(rows, columns, depth, warps, stages)
              for rows, columns, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4),
                                           (128, 128, 8), (64, 256, 4), (128, 256, 8), (256, 128, 8))
              for depth, stages in ((32, 3), (32, 4), (64, 3), (64, 4))]


@dataclass(frozen=True)
class Flags:
    shapes: tuple[Literal[tuple(SHAPES)], ...] = tuple(SHAPES)  # which of these layers
    tune: bool = False  # time the Triton kernels with many tiles instead, for ops/grouped_mm.py
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # of --tune


class Dense(nn.Module):
    """SwiGLU as wide as the experts that a token visits."""

    def __init__(self, C, F):
        super().__init__()
        self.w13, self.w2 = nn.Linear(C, 2 * F, bias=False), nn.Linear(F, C, bias=False)

    def forward(self, x):
        return self.w2(swiglu(self.w13(x)))


def moe_layer(cfg, mesh, device):
    """Return train.py's MoE layer of cfg with random bf16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    with device:
        layer = moe.MoE(cfg, mesh)
    torch.set_default_dtype(torch.float32)
    for p in layer.parameters():
        p.data.normal_(0, 0.02)
    return layer


def forward(layer, x):
    """x (n, C) -> (output (n, C), balance loss ())."""
    gates, expert_ids, router_loss = layer.route(x)
    return layer(x, gates, expert_ids), router_loss


def compiled(cfg, device):
    """Return a layer on one rank, its routing compiled as train.py compiles it, and its forward pass."""
    layer = moe_layer(cfg, make_mesh(World()), device)
    layer.route = torch.compile(layer.route, fullgraph=True)
    return layer, lambda x: forward(layer, x)


def forward_backward(layer, f, x, g):
    """Return a function that runs f(x) and its backward pass with the gradient g of the output."""
    def run():
        out = f(x)
        if isinstance(out, tuple):  # the experts return their balance loss, too
            torch.autograd.backward(out, [g, torch.ones_like(out[1])])
        else:
            out.backward(g)
        x.grad = None
        for p in layer.parameters():
            p.grad = None
    return run


@contextlib.contextmanager
def turned_off(name):
    """Within this context the answer to a question of ops/grouped_mm.py, such as use_torch, is no."""
    if not name:
        yield
        return
    with mock.patch.object(grouped_mm, name, lambda *_: False):
        yield


def measure(name, device):
    """Print the rows of one shape."""
    T, E, F, C, K, peer = SHAPES[name]
    x = torch.randn(T, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(T, C, device=device, dtype=torch.bfloat16)

    def experts(factor):
        return Config(n_experts=E, top_k=K, n_embd=C, ffn_hidden=F, capacity_factor=factor, n_layer=24,
                      dtype="bf16")

    dense = torch.compile(Dense(C, F * K).to(device, torch.bfloat16))
    print(f"{name}: {T} tokens, {E} experts x {F}, width {C}, top-{K}; torch's grouped_mm, compiled, took "
          f"{peer} ms on an H200")
    print(f"  dense, compiled          {gpu_milliseconds(forward_backward(dense, dense, x, g)):8.3f} ms",
          flush=True)
    for label, factor, off in VARIANTS:
        cfg = experts(factor)
        with turned_off(off):
            run = forward_backward(*compiled(cfg, device), x, g)
            eager = gpu_milliseconds(run)
            replay = gpu_milliseconds(graphed(run))
        print(f"  {label:14s} {eager:8.3f} ms, as a CUDA graph {replay:8.3f} ms", flush=True)
    with mock.patch.object(grouped_mm, "use_grouped_mm", lambda *_: False), \
            mock.patch.object(moe, "use_grouped_mm", lambda *_: False):
        loop = gpu_milliseconds(forward_backward(*compiled(experts(0.0), device), x, g), 3)
    print(f"  loop over experts        {loop:8.3f} ms")


def tune(name, dtype, device):
    """Print the milliseconds of the experts' products and of their weight gradient, the fastest tile first.

    The tiles are those of CANDIDATES that this GPU can run.
    """
    from triton.runtime.errors import OutOfResources
    T, E, F, C, K, _ = SHAPES[name]
    shapes = (T * K, C), (T * K, F), (E, F, C)
    x, g, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in shapes)
    ends = torch.bincount(torch.randint(E, (T * K,)), minlength=E).cumsum(0).to(device)
    bounds = grouped_mm.row_bounds(ends)
    flop = 2 * T * K * C * F

    def products():  # forward; the gradient of x
        grouped_mm.experts_mm(x, w.transpose(1, 2), bounds)
        grouped_mm.experts_mm(g, w, bounds)

    def gradient():
        grouped_mm.experts_wgrad(g, x, bounds)
    for f, n in ((products, 2), (gradient, 1)):
        print(f"{name} {dtype}, {f.__name__}: {gpu_milliseconds(f):.3f} ms today; rows, columns, depth, "
              "warps, stages:", flush=True)
        times = []
        for tile in CANDIDATES:
            with mock.patch.object(grouped_mm, "use_torch", lambda *_: False), \
                    mock.patch.object(grouped_mm, "pointer_tiles", lambda *_, tile=tile: (tile, tile)), \
                    contextlib.suppress(OutOfResources):
                times.append((gpu_milliseconds(f), tile))
        for ms, tile in sorted(times)[:8]:
            print(f"  {ms:8.3f} ms {n * flop / ms / 1e9:6.0f} TFLOP/s  {tile}", flush=True)


def main(argv=None):
    flags = read_flags(Flags, argv, "moe_layer.py", "Time one MoE layer, forward and backward, and a "
                       "dense MLP of the same FLOPs. Needs a GPU.")
    with wrong_input():
        if not torch.cuda.is_available():
            raise ValueError("bench/moe_layer.py needs a GPU with CUDA graphs")
    for name in flags.shapes:
        if flags.tune:
            tune(name, DTYPES[flags.dtype], torch.device("cuda", 0))
        else:
            measure(name, torch.device("cuda", 0))


if __name__ == "__main__":
    start(main)

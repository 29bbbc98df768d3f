"""One MoE layer, forward and backward, beside a dense MLP of the same FLOPs: python bench/moe_layer.py

The rows are the dense SwiGLU, compiled; our layer, dropless (routing, sort, grouped matrix products) and with
a capacity (bmm), each also as a CUDA graph, which is how train.py runs it; the loop over experts that the
tests compare with.
"""
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from common import read_flags, start
from runtime.launch import World

import torch
import torch.nn as nn
from timing import gpu_milliseconds, graphed

import moe
from config import Config, wrong_input
from ops import grouped_mm
from ops.activations import swiglu
from parallel import make_mesh

SHAPES = {  # tokens, experts, hidden width, width, top-k; ms of torch's grouped_mm, compiled, on an H200
    "W2": (16384, 64, 1792, 512, 1, 1.051),
    "top-8": (16384, 64, 1408, 2048, 8, 14.14),
}


@dataclass(frozen=True)
class Flags:
    shapes: tuple[Literal[tuple(SHAPES)], ...] = tuple(SHAPES)  # which of these layers


class Dense(nn.Module):
    """SwiGLU as wide as the experts that a token visits."""

    def __init__(self, C, F):
        super().__init__()
        self.w13, self.w2 = nn.Linear(C, 2 * F, bias=False), nn.Linear(F, C, bias=False)

    def forward(self, x):
        return self.w2(swiglu(self.w13(x)))


def moe_layer(cfg, mesh, device, dispatcher=moe.plain_dispatcher):
    """-> train.py's MoE layer of cfg with random bf16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    with device:
        layer = moe.MoE(cfg, mesh, None, dispatcher)
    torch.set_default_dtype(torch.float32)
    for p in layer.parameters():
        p.data.normal_(0, 0.02)
    return layer


def forward(layer, x):
    """x (n, C) -> (output (n, C), balance loss ()), without recomputation."""
    return layer(x, lambda f, *args: f(*args))


def compiled(cfg, device):
    """-> the forward pass of a layer on one rank, its routing compiled as train.py compiles it."""
    layer = moe_layer(cfg, make_mesh(World()), device)
    layer.route = torch.compile(layer.route, fullgraph=True)
    return layer, lambda x: forward(layer, x)


def forward_backward(layer, f, x, g):
    """-> a function that runs f(x) and its backward pass with the gradient g of the output."""
    def run():
        out = f(x)
        if isinstance(out, tuple):  # experts return their balance loss too
            torch.autograd.backward(out, [g, torch.ones_like(out[1])])
        else:
            out.backward(g)
        x.grad = None
        for p in layer.parameters():
            p.grad = None
    return run


def measure(name, device):
    """Print the rows of one shape."""
    T, E, F, C, K, peer = SHAPES[name]
    x = torch.randn(T, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(T, C, device=device, dtype=torch.bfloat16)

    def experts(factor):
        return Config(n_experts=E, top_k=K, n_embd=C, ffn_hidden=F, capacity_factor=factor, n_layer=24)

    dense = torch.compile(Dense(C, F * K).to(device, torch.bfloat16))
    print(f"{name}: {T} tokens, {E} experts x {F}, width {C}, top-{K}; torch's grouped_mm, compiled, took "
          f"{peer} ms on an H200")
    print(f"  dense, compiled          {gpu_milliseconds(forward_backward(dense, dense, x, g)):8.3f} ms",
          flush=True)
    for label, factor in (("dropless", 0.0), ("capacity 1.0", 1.0)):
        run = forward_backward(*compiled(experts(factor), device), x, g)
        eager = gpu_milliseconds(run)
        replay = gpu_milliseconds(graphed(run))
        print(f"  {label:14s} {eager:8.3f} ms, as a CUDA graph {replay:8.3f} ms", flush=True)
    with mock.patch.object(grouped_mm, "use_grouped_mm", lambda *_: False), \
            mock.patch.object(moe, "use_grouped_mm", lambda *_: False):
        loop = gpu_milliseconds(forward_backward(*compiled(experts(0.0), device), x, g), 3)
    print(f"  loop over experts        {loop:8.3f} ms")


def main(argv=None):
    flags = read_flags(Flags, argv, "moe_layer.py", "Time one MoE layer, forward and backward, beside a "
                       "dense MLP of the same FLOPs. Needs a GPU.")
    with wrong_input():
        if not torch.cuda.is_available():
            raise ValueError("bench/moe_layer.py needs a GPU")
    for name in flags.shapes:
        measure(name, torch.device("cuda"))


if __name__ == "__main__":
    start(main)

"""One MoE layer, forward and backward, beside a dense MLP of the same FLOPs: python bench/moe_layer.py

Rows: the dense SwiGLU, compiled; ours dropless (routing, sort, grouped GEMM), capacity (bmm), each also as a
CUDA graph, which is how train.py runs them; the loop over experts that the tests trust. REFERENCE.md gives
the peers' figures.
"""
import argparse
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])  # bench/ and the root: starts from anywhere

import torch
import torch.nn as nn
from speed import milliseconds

import moe
from config import Config
from ops.fused import swiglu
from parallel import make_mesh
from runtime.launch import World

SHAPES = {  # tokens, experts, hidden width, width, top-k; the best of the peers and our goal, ms
    "W2": (16384, 64, 1792, 512, 1, 1.051, 0.90),
    "top-8": (16384, 64, 1408, 2048, 8, 14.14, 13.5),
}


class Dense(nn.Module):
    """SwiGLU as wide as the experts that a token visits."""

    def __init__(self, C, F):
        super().__init__()
        self.w13, self.w2 = nn.Linear(C, 2 * F, bias=False), nn.Linear(F, C, bias=False)

    def forward(self, x):
        return self.w2(swiglu(self.w13(x)))


def both_ways(layer, x, g):
    def run():
        out = layer(x)
        if isinstance(out, tuple):  # experts return their balancing loss too
            torch.autograd.backward(out, [g, torch.ones_like(out[1])])
        else:
            out.backward(g)
        x.grad = None
        for p in layer.parameters():
            p.grad = None
    return run


def graphed(run):
    """run, recorded once and replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def experts(T, E, F, C, K, factor, device):
    cfg = Config(n_experts=E, top_k=K, n_embd=C, ffn_hidden=F, capacity_factor=factor, n_layer=24)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        layer = moe.MoE(cfg, make_mesh(World()), None)
    torch.set_default_dtype(torch.float32)
    for p in layer.parameters():
        p.data.normal_(0, 0.02)
    layer.route = torch.compile(layer.route, fullgraph=True)
    forward = layer.forward
    layer.forward = lambda x: forward(x, lambda f, *args: f(*args))
    return layer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("nanoshard: bench/moe_layer.py needs a GPU")
    device = torch.device("cuda")
    for name in args.shapes:
        T, E, F, C, K, peer, goal = SHAPES[name]
        x = torch.randn(T, C, device=device, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(T, C, device=device, dtype=torch.bfloat16)
        dense = torch.compile(Dense(C, F * K).to(device, torch.bfloat16))
        print(f"{name}: {T} tokens, {E} experts x {F}, width {C}, top-{K}; best peer {peer} ms, "
              f"goal {goal} ms")
        print(f"  dense, compiled          {milliseconds(both_ways(dense, x, g)):8.3f} ms", flush=True)
        for label, factor in (("dropless", 0.0), ("capacity 1.0", 1.0)):
            run = both_ways(experts(T, E, F, C, K, factor, device), x, g)
            eager = milliseconds(run)
            replay = milliseconds(graphed(run))
            print(f"  {label:14s} {eager:8.3f} ms, as a CUDA graph {replay:8.3f} ms", flush=True)
        fast, moe.fast = moe.fast, lambda *_: False
        loop = milliseconds(both_ways(experts(T, E, F, C, K, 0.0, device), x, g), 3)
        print(f"  loop over experts        {loop:8.3f} ms")
        moe.fast = fast


if __name__ == "__main__":
    main()

"""Milliseconds of one optimizer step, from shapes and an explicit efficiency model. plan.py prints them.

step = (micro-batches + stages - 1) * slowest stage's micro-batch + what reductions do not hide + optimizer
Each constant below is named with where it was measured. None is fitted to the layout being judged.
"""
import math
from typing import NamedTuple

SIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class Gpu(NamedTuple):
    """peak FLOP/s dense bf16; hbm B/s; memory bytes; sms; sustained: fraction of peak of a matrix product
    without tails; tail: waves lost per product; link, net: B/s per GPU of a ring inside a node, and between
    nodes; node: GPUs."""
    peak: float
    hbm: float
    memory: float
    sms: int
    sustained: float
    tail: float
    link: float
    net: float
    node: int = 8


# h200, h100: ceilings measured in 2026-11 on h200. bf16 8192^3 687 TFLOP/s, 16384x512x1792 495-605,
# 16384x512x128256 587-683; ring 300-340 GB/s, hbm 4.28 TB/s copied (h100: of its 3.35 TB/s the same share).
# net: 8 x 400 Gb/s per node, 80 % of it.
# a100: sustained, tail and link (what tensor parallelism gets, nothing hidden) from 17 rows of BLOOM's
# planning table with other models, 12288, 13312 and 13824 wide (tests/test_plan.py lists them): the best of a
# grid, 4.6 % rms. They are that cluster and software of 2022; for others, too low. net: assumed 4 x 100 Gb/s
# per node of 8, 80 % of it.
GPUS = {
    "a100-40": Gpu(312e12, 1.30e12, 39.4 * 2**30, 108, 0.8, 2.0, 80e9, 5e9),
    "a100-80": Gpu(312e12, 1.70e12, 79.1 * 2**30, 108, 0.8, 2.0, 80e9, 5e9),
    "h100": Gpu(989e12, 2.99e12, 79.1 * 2**30, 132, 0.735, 0.5, 320e9, 40e9),
    "h200": Gpu(989e12, 4.28e12, 139.8 * 2**30, 132, 0.735, 0.5, 320e9, 40e9),
}
TILE = 128, 256  # output tile of cuBLAS' large kernels
RAMP = 64  # elements of the inner dimension until a tile's pipeline is full
ATTENTION = 0.34  # of peak, causal FLOPs: cuDNN SDPA forward + backward, 340 TFLOP/s on h200
TOUCHES = 3  # times a kept tensor passes through memory outside matrix products: written, read, its gradient
LATENCY = 20e-6  # s per collective: 18 us at 1 MB on h200
LAUNCH = {True: 0.2e-3, False: 0.5e-3}  # s of host per block, compiled or not, where no CUDA graph replays
ADAM = 30  # bytes per parameter stepped: gradient, master, two moments read, three of them and bf16 written


def waves(m, n, count, sms):
    """Output tiles of `count` products (m, n) over the multiprocessors: (waves, whole waves)."""
    tiles = count * math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    return count * m * n / (TILE[0] * TILE[1]) / sms, max(1, math.ceil(tiles / sms))


def product(m, n, k, gpu, count=1):
    """Seconds of `count` products (m, k) x (k, n): full tiles' rate, less the last wave and the tail."""
    used, whole = waves(m, n, count, gpu.sms)
    rate = gpu.peak * gpu.sustained * k / (k + RAMP) * used / (whole + gpu.tail)
    return 2 * count * m * n * k / rate


def products(cfg, mesh):
    """-> [(m, n, k, count)] of one block's matrix products on this rank, one micro-batch."""
    tp, C, rows = mesh.tp.size, cfg.n_embd, cfg.micro_batch * cfg.seq_len
    kv = max(cfg.n_kv_head // tp, 1) * (C // cfg.n_head)
    glued = 2 if cfg.mlp == "swiglu" else 1
    out = [(rows, C // tp + 2 * kv, C, 1), (rows, C, C // tp, 1)]
    hidden = cfg.n_shared_experts * cfg.ffn_hidden if cfg.n_experts else cfg.ffn_hidden
    if hidden:
        out += [(rows, glued * hidden // tp, C, 1), (rows, C, hidden // tp, 1)]
    if cfg.n_experts:
        e = cfg.n_experts // mesh.ep.size
        each = math.ceil(rows / tp * cfg.top_k * mesh.ep.size / cfg.n_experts * (cfg.capacity_factor or 1))
        out += [(each, cfg.ffn_hidden, C, e)] * glued + [(each, C, cfg.ffn_hidden, e)]
    return out


def ring(axis, stride, gpu):
    """B/s along an axis whose ranks lie `stride` apart: inside a node, or over the network."""
    return gpu.link if axis.size * stride <= gpu.node else gpu.net


def stage_time(cfg, mesh, layers, kept, vocab, gpu, sent, micro):
    """Seconds of one micro-batch, on this stage, both ways. kept: bytes one block leaves for backward."""
    tp, rows = mesh.tp.size, cfg.micro_batch * cfg.seq_len
    again = 4 / 3 if cfg.recompute == "full" else 1
    count = layers[1] - layers[0]
    block = 3 * sum(product(m, n, k, gpu, c) for m, n, k, c in products(cfg, mesh)) * again
    block += 6 * rows * cfg.seq_len * cfg.n_embd / tp / (ATTENTION * gpu.peak) * again  # causal: half of 12
    block += TOUCHES * kept / gpu.hbm * again
    head = 0.0
    if layers[1] == cfg.n_layer:
        head = 3 * product(rows, vocab // tp, cfg.n_embd, gpu)
        head += 3 * rows * vocab / tp * SIZE[cfg.dtype] / gpu.hbm  # the cross-entropy reads, reads, writes
    static = (mesh.pp.size == 1 and cfg.recompute == "none" and cfg.dropout == 0
              and not (cfg.n_experts and not cfg.capacity_factor and mesh.ep.size > 1))  # graph.static_shapes
    launches = LAUNCH[cfg.compile] * count * again * (2 if cfg.n_experts else 1)
    host = 0 if static and cfg.cuda_graph else launches
    device = count * block + head
    calls = {"tp": 8 * count, "ep": 5 * count if cfg.n_experts else 0, "pp": 2}
    strides = {"tp": 1, "ep": 1, "pp": mesh.stage.size}
    moved = sum(sent.get(name, 0) / micro / ring(getattr(mesh, name), strides[name], gpu)
                + LATENCY * calls[name] * (getattr(mesh, name).size > 1) for name in calls)
    return max(device, host) + moved


def step_time(cfg, mesh, micro, slowest, owned, reductions, gpu):
    """-> {part: seconds} of a step. slowest: seconds of the slowest stage's micro-batch; owned: parameters
    this rank steps; reductions: {axis: bytes} of gradients and weights, hidden by half a micro-batch."""
    strides = {"dp": mesh.tp.size, "stage": 1, "edp": mesh.ep.size, "tied": mesh.tp.size}
    whole = sum(b / ring(getattr(mesh, a), strides[a], gpu) for a, b in reductions.items())
    return {"compute": micro * slowest, "bubble": (mesh.pp.size - 1) * slowest,
            "reduce": max(0.0, whole - slowest / 2) + LATENCY * (whole > 0),
            "optimizer": owned * ADAM / gpu.hbm}

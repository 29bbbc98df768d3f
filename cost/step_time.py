"""Milliseconds of one optimizer step, from shapes and an explicit efficiency model. plan.py prints them.

step = (micro-batches + stages - 1) * slowest stage's micro-batch + gradients to fp32 + what communication
       compute does not hide + optimizer
Each constant below is named with where it was measured: ceilings, single kernels, traces. None is fitted to a
step's milliseconds on H200; tests/test_plan.py compares with 24 measured steps.
"""
import math
from typing import NamedTuple

SIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class Gpu(NamedTuple):
    """peak FLOP/s dense bf16; hbm B/s; memory bytes; sms; sustained: fraction of peak of a matrix product
    without tails; tail: waves lost per product; link, net: B/s per GPU inside a node, and between nodes;
    rails: GPUs of a node with a network adapter each, through all of which a ring leaves; node: GPUs."""
    peak: float
    hbm: float
    memory: float
    sms: int
    sustained: float
    tail: float
    link: float
    net: float
    rails: int = 1
    node: int = 8


# h200, h100: ceilings measured in 2026-11 on h200. bf16 8192^3 687 TFLOP/s, 16384x512x1792 495-605,
# 16384x512x128256 587-683; ring 300-340 GB/s, hbm 4.28 TB/s copied (h100: of its 3.35 TB/s the same share).
# net: 8 x 400 Gb/s per node, 80 % of it: assumed, nothing beyond a node was measured.
# a100: sustained, tail and link (what tensor parallelism gets, nothing hidden) from 17 rows of BLOOM's
# planning table with other models, 12288, 13312 and 13824 wide (tests/test_plan.py lists them): the best of a
# grid, 4.6 % rms (5.0 with the parts of a step added since). They are that cluster and software of 2022; for
# others, too low. net: assumed 4 x 100 Gb/s per node of 8, 80 % of it; rails 1, as when net was set: with 4,
# BLOOM's layout comes 5th of 17, not 3rd.
GPUS = {
    "a100-40": Gpu(312e12, 1.30e12, 39.4 * 2**30, 108, 0.8, 2.0, 80e9, 5e9),
    "a100-80": Gpu(312e12, 1.70e12, 79.1 * 2**30, 108, 0.8, 2.0, 80e9, 5e9),
    "h100": Gpu(989e12, 2.99e12, 79.1 * 2**30, 132, 0.735, 0.5, 320e9, 40e9, 8),
    "h200": Gpu(989e12, 4.28e12, 139.8 * 2**30, 132, 0.735, 0.5, 320e9, 40e9, 8),
}
TILE = 128, 256  # output tile of cuBLAS' large kernels
RAMP = 64  # elements of the inner dimension until a tile's pipeline is full
GROUPED = 0.5  # of peak, experts: 445 TFLOP/s at 1024 rows each, less the time of the weights' bytes
ATTENTION = 0.34  # of peak, causal FLOPs: cuDNN SDPA forward + backward, 340 TFLOP/s on h200 at 2048 tokens
SHORT = 0.2 / 1024  # ... per token where sequences are short: 200 TFLOP/s at 1024, G2's trace
TOUCHES = 3  # times a kept tensor passes through memory outside matrix products: written, read, its gradient
STREAM = 0.95  # of hbm, kernels over flat buffers: AdamW 4.17, gradients to fp32 4.0 of 4.28 TB/s
ADAM = 34  # bytes per parameter stepped: AdamW 30 (gradient, master, two moments read, three of them and bf16
# written), the norm of the gradient 4; 30 where the gradient is bf16
GAP = 63e-6  # s per block between kernels that a CUDA graph replays: 1,223 kernels, 1.5 ms in W1's trace
LAUNCH = {True: 0.2e-3, False: 0.5e-3}  # s of host per block, compiled or not, where no CUDA graph replays
SYNC = 1e-3  # s per block that a GPU idles where rows go to experts without windows: W2b's trace
LATENCY = 20e-6  # s per collective: 18 us at 1 MB on h200
HOP = 1.9e-6, 4e-6  # s per rank of a ring, inside a node and over the network: NCCL's own table, LL128
ALL_TO_ALL = 0.78  # of link: 250 GB/s in blocks of 67 MB
HIDDEN = 0.5  # of what compute and communication could overlap: 0.504 ms beside 1.865 ms took 2.125 together
COPIED = 0.85  # ... where copy engines carry it: 1.936 together
ENTROPY = 0.82  # of hbm, cross-entropy: 2.43 ms for W1's 8.4 GB
# experts' rows: the fullest of `ep` ranks has 1 + SKEW sqrt((ep - 1) / E) times its share, by the deviation
# of a sum of E / ep of E loads. from the rooms at step 200 and 300 of W2b on real tokens, 1.1 times the need:
# 1.79 and 1.77 for ep 4, 1.54 and 1.56 for ep 2 (SKEW 2.8 to 3.4). that is the worst layer; the mean layer
# has about a third of the excess, if loads are normal (the largest of 4 is 1.03 deviations, of 24 layers x 4
# ranks 2.5)
SKEW = 3.05
PUSH = 0.9  # of link: windows, 280 to 320 GB/s in both directions' kernels


def dropless(cfg, mesh):
    return cfg.n_experts > 0 and not cfg.capacity_factor and mesh.ep.size > 1


def fullest(cfg, mesh, worst=False):
    """Rows of the fullest ep rank over the mean: in the mean layer, or in the worst."""
    if not dropless(cfg, mesh):
        return 1.0
    excess = SKEW * math.sqrt((mesh.ep.size - 1) / cfg.n_experts)
    return min(1 + excess * (1 if worst else 1 / 3), mesh.ep.size)


def room(cfg, mesh):
    """Rows in use where graph.Rooms settle, over the balanced; 0: more than --ep-slack, so they close."""
    wanted = min(1.1 * fullest(cfg, mesh, worst=True), mesh.ep.size)
    return wanted if wanted <= cfg.ep_slack else 0.0


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


def forward_products(cfg, mesh, gpu):
    """Seconds of one block's matrix products; of the experts on the fullest rank."""
    listed, out = products(cfg, mesh), 0.0
    dense = len(listed) - (3 if cfg.mlp == "swiglu" else 2) * (cfg.n_experts > 0)
    for i, (m, n, k, count) in enumerate(listed):
        grouped = 2 * count * m * n * k / (GROUPED * gpu.peak) * fullest(cfg, mesh)
        out += grouped if i >= dense and not cfg.capacity_factor else product(m, n, k, gpu, count)
        out += (i >= dense) * count * n * k * SIZE[cfg.dtype] / gpu.hbm  # each weight is read for few rows
    return out


def ring(axis, stride, gpu):
    """B/s along an axis whose ranks lie `stride` apart: inside a node, or over the network, where those in
    one node put their adapters together."""
    if axis.size * stride <= gpu.node:
        return gpu.link
    return min(gpu.link, gpu.net * max(1, gpu.rails // stride))


def hops(axis, stride, gpu):
    """Seconds until one element has been around an axis' ring."""
    outer = math.ceil(axis.size * stride / gpu.node) - 1
    return HOP[0] * max(0, axis.size - 1 - outer) + HOP[1] * min(outer, axis.size - 1)


def stage_time(cfg, mesh, layers, kept, vocab, gpu, sent, micro, static):
    """Seconds of one micro-batch, on this stage, both ways. kept: bytes one block leaves for backward;
    sent: bytes per axis and step, the experts' rows balanced; static: whether a CUDA graph replays them."""
    tp, rows = mesh.tp.size, cfg.micro_batch * cfg.seq_len
    again = 4 / 3 if cfg.recompute == "full" else 1
    count = layers[1] - layers[0]
    block = 3 * forward_products(cfg, mesh, gpu)
    rate = min(ATTENTION, SHORT * cfg.seq_len) * gpu.peak
    block += 6 * rows * cfg.seq_len * cfg.n_embd / tp / rate  # causal: half of 12
    block += TOUCHES * kept / gpu.hbm + GAP * (2 if cfg.n_experts else 1)  # twice: a guess, not in a trace
    head = 0.0
    if layers[1] == cfg.n_layer:
        head = 3 * product(rows, vocab // tp, cfg.n_embd, gpu)
        # cross-entropy: reads, writes; over tp 14 passes in fp32 (parallel.vocab_cross_entropy)
        head += rows * vocab / tp * (2 * SIZE[cfg.dtype] / ENTROPY if tp == 1 else 14 * 4) / gpu.hbm
    loose = dropless(cfg, mesh)
    through = static and 1 < mesh.ep.size <= gpu.node and cfg.dtype == "bf16"  # windows
    space = room(cfg, mesh) if loose and through else 0.0
    # over ep: rows into order by expert and back, besides what is kept, both read and written, gradients too.
    # seen missing when W2a had come out 10.2 % short; it is 0.8 of those 7.5 ms
    slots = rows / tp * cfg.top_k * (cfg.capacity_factor or fullest(cfg, mesh))
    if cfg.n_experts and cfg.mlp == "swiglu":  # h, not kept: written, read, and both again in backward
        block += 4 * slots * cfg.ffn_hidden * SIZE[cfg.dtype] / gpu.hbm
    if mesh.ep.size > 1:
        block += 8 * slots * cfg.n_embd * SIZE[cfg.dtype] / gpu.hbm
    waits = loose and not space
    host = LAUNCH[cfg.compile] * count * again * (2 if cfg.n_experts else 1) * (waits or not static)
    device = count * (block * again + SYNC * waits) + head
    calls = {"tp": 8 * count, "ep": 5 * count if cfg.n_experts else 0, "pp": 2}
    near = {"pp": mesh.pp.size * mesh.stage.size <= gpu.node, "ep": mesh.ep.size <= gpu.node}
    pushed = space or through and not loose
    rates = {"tp": ring(mesh.tp, 1, gpu), "pp": gpu.link if near["pp"] else gpu.net,
             "ep": gpu.link * (PUSH if pushed else ALL_TO_ALL) if near["ep"] else gpu.net}
    more = {"ep": fullest(cfg, mesh)}
    moved = sum(sent.get(name, 0) / micro * more.get(name, 1) / rates[name]
                + LATENCY * calls[name] * (getattr(mesh, name).size > 1) for name in calls)
    return max(device, host) + moved


def step_time(cfg, mesh, micro, slowest, local, owned, lone, near, reductions, gpu):
    """-> {part: seconds} of a step. slowest: seconds of the slowest stage's micro-batch; local, owned:
    parameters of this rank, those that it steps; lone: those with a gradient that is not widened; near:
    {axis: those whose gradients travel through windows}; reductions: {axis: (bytes of gradients, under the
    last backward; of weights, under the first forward; collectives each; the share that nothing hides: the
    last bucket to leave, the first to come)}."""
    strides = {"dp": mesh.tp.size, "stage": 1, "edp": mesh.ep.size, "tied": mesh.tp.size}
    exposed = 0.0
    for way, under in ((0, 2 / 3), (1, 1 / 3)):
        whole = tail = 0.0
        for name, (*moved, calls, last) in reductions.items():
            axis, stride = getattr(mesh, name), strides[name]
            if moved[way]:
                trips = LATENCY + hops(axis, stride, gpu)
                transfer = moved[way] / ring(axis, stride, gpu)
                whole, tail = whole + transfer + calls * trips, tail + transfer * last + trips
        exposed += whole - (COPIED if near else HIDDEN) * min(whole - tail, slowest * under)
    weight, grad = SIZE[cfg.dtype], max(4, SIZE[cfg.dtype])
    widen = local * (weight + grad + (micro - 1) * (weight + 2 * grad))
    widen -= (lone + sum(near.values())) * (grad - weight)
    for name, n in near.items():  # the ranks' slices, added up
        widen += n * (weight + grad / getattr(mesh, name).size)
    widen /= STREAM * gpu.hbm
    return {"compute": micro * slowest, "bubble": (mesh.pp.size - 1) * slowest, "gradients": widen,
            "reduce": exposed, "optimizer": (owned * ADAM - lone * 4) / (STREAM * gpu.hbm)}

"""Milliseconds of one optimizer step, from shapes and an explicit efficiency model. plan.py prints them.

    step = (1 + bubble) * micro-batches * micro-batch of the slowest rank
           + gradients to fp32 + communication that compute does not hide + optimizer

Beside each constant stands where it was measured: ceilings, single kernels, traces. None is fitted to the
milliseconds of a step on H200; tests/test_plan.py compares with 24 measured steps.
"""
import math
from typing import NamedTuple

import torch

from config import pad_vocab
from cost.parameters import (
    element_bytes,
    expert_rows,
    head_rows,
    held_layers,
    kv_width,
    micro_batches,
    owned_parameters,
    rank_tokens,
    unwidened_gradients,
)
from fast.choose import choose, needs_row_limit
from ops.accelerator import device_name
from ops.activations import GATED
from pipeline import timetable


class Gpu(NamedTuple):
    """What one kind of GPU and its cluster can do."""
    peak: float       # FLOP/s, dense bf16
    hbm: float        # B/s of its own memory
    memory: float     # bytes that a process can have
    sms: int          # multiprocessors
    sustained: float  # fraction of the peak that a matrix product reaches, its tail apart
    tail: float       # waves lost per matrix product
    link: float       # B/s per GPU inside a node
    net: float        # B/s per GPU between nodes
    rails: int = 1    # GPUs of a node that have a network adapter each; a ring uses all of them
    node: int = 8     # GPUs of a node


# h200, h100: ceilings measured on h200. bf16 8192^3 687 TFLOP/s, 16384x512x1792 495-605, 16384x512x128256
# 587-683; ring 300-340 GB/s, hbm 4.28 TB/s copied (h100: the same share of its 3.35 TB/s). net: 8 x 400 Gb/s
# per node, 80 % of it: assumed, nothing beyond a node was measured.
# a100: sustained, tail and link (what tensor parallelism gets, nothing hidden) from 17 rows of BLOOM's
# planning table with other models, 12288, 13312 and 13824 wide (tests/test_plan.py lists them): the best of a
# grid, 4.6 % rms (5.0 with the parts of a step that were added later). They describe that cluster and its
# software of 2022 and are too low for others. net: assumed 4 x 100 Gb/s per node of 8, 80 % of it; rails 1,
# as when net was chosen: with 4, BLOOM's layout comes 5th of 17, not 3rd.
GPUS = {
    "a100-40": Gpu(312e12, 1.30e12, 39.4 * 2**30, 108, 0.8, 2.0, 80e9, 5e9),
    "a100-80": Gpu(312e12, 1.70e12, 79.1 * 2**30, 108, 0.8, 2.0, 80e9, 5e9),
    "h100": Gpu(989e12, 2.99e12, 79.1 * 2**30, 132, 0.735, 0.5, 320e9, 40e9, 8),
    "h200": Gpu(989e12, 4.28e12, 139.8 * 2**30, 132, 0.735, 0.5, 320e9, 40e9, 8),
}
NODE = min(gpu.node for gpu in GPUS.values())

TILE = 128, 256  # output tile of cuBLAS' large kernels
RAMP = 64  # elements of the inner dimension until a tile's pipeline is full
GROUPED = 0.5  # of peak, experts: 445 TFLOP/s at 1024 rows each, less the time of the weights' bytes
ATTENTION = 0.34  # of peak, causal FLOPs: cuDNN SDPA forward + backward, 340 TFLOP/s on h200 at 2048 tokens
SHORT = 0.2 / 1024  # the same per token of short sequences: 200 TFLOP/s at 1024, G2's trace
TOUCHES = 3  # times a saved tensor passes through memory outside matrix products: write, read, gradient
STREAM = 0.95  # of hbm, kernels over flat buffers: AdamW 4.17, gradients to fp32 4.0 of 4.28 TB/s
# bytes per parameter that is stepped: AdamW 30 (gradient, master, two moments read, the last three and bf16
# weights written), the norm of the gradient 4; 30 where the gradient is bf16
ADAM = 34
GAP = 63e-6  # s per block between the kernels of a CUDA graph: 1,223 kernels, 1.5 ms in W1's trace
LAUNCH = {True: 0.2e-3, False: 0.5e-3}  # s of host per block, compiled or not, without a CUDA graph
SYNC = 1e-3  # s per block that a GPU idles in dropless all_to_all: W2b's trace
LATENCY = 20e-6  # s per collective: 18 us at 1 MB on h200
HOP = 1.9e-6, 4e-6  # s per rank of a ring, inside a node and over the network: NCCL's own table, LL128
ALL_TO_ALL = 0.78  # of link: 250 GB/s in blocks of 67 MB
HIDDEN = 0.5  # of the possible overlap of compute and NCCL: 0.504 ms beside 1.865 ms took 2.125 together
COPIED = 0.85  # the same where copy engines carry the bytes: 1.936 together
ENTROPY = 0.82  # of hbm, cross-entropy: 2.43 ms for W1's 8.4 GB
# the experts' rows: the fullest of `ep` ranks has 1 + SKEW sqrt((ep - 1) / E) times the mean, the deviation
# of a sum of E / ep of E loads. from the row limits, 1.1 times the need, on which W2b had settled on real
# tokens at steps 200 and 300: 1.79 and 1.77 for ep 4, 1.54 and 1.56 for ep 2 (SKEW 2.8 to 3.4). that is the
# worst layer. the mean layer has about a third of the excess, if loads are normal (the largest of 4 is 1.03
# deviations, of 24 layers x 4 ranks 2.5)
SKEW = 3.05
PUT = 0.9  # of link: rows through symmetric memory, 280 to 320 GB/s in both directions' kernels


def peak_flops(device):
    """The dense bf16 peak of a torch.device, FLOP/s; None where GPUS does not know it."""
    name = device_name(device).lower()
    return next((gpu.peak for key, gpu in GPUS.items() if key.split("-")[0] in name), None)


def expected_choice(cfg, mesh, node=NODE):
    """-> the fast.choose.Choice of a run on GPUs where only those of one node, `node` of them, reach each
    other's memory."""
    return choose(cfg, mesh, torch.device("cuda"), lambda mesh, axis, device: axis.size <= node)


# -----------------------------------------------------------------------------
# compute

def max_load_factor(cfg, mesh, worst=False):
    """Rows of the fullest ep rank over the mean: in the mean layer, or in the worst one."""
    if not needs_row_limit(cfg, mesh):
        return 1.0
    excess = SKEW * math.sqrt((mesh.ep.size - 1) / cfg.n_experts)
    return min(1 + excess * (1 if worst else 1 / 3), mesh.ep.size)


def row_limit_factor(cfg, mesh):
    """Rows at which the limit of a CUDA graph's buffers settles, over the balanced number (fast/graph.py);
    0: more than --ep-slack, so there is no graph."""
    wanted = min(1.1 * max_load_factor(cfg, mesh, worst=True), mesh.ep.size)
    return wanted if wanted <= cfg.ep_slack else 0.0


def waves(m, n, count, sms):
    """-> (waves, whole waves) of the output tiles of `count` products (m, n) over the multiprocessors."""
    tiles = count * math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    return count * m * n / (TILE[0] * TILE[1]) / sms, max(1, math.ceil(tiles / sms))


def matmul_seconds(m, n, k, gpu, count=1):
    """Seconds of `count` products (m, k) x (k, n): rate of full tiles, less last wave and tail."""
    used, whole = waves(m, n, count, gpu.sms)
    rate = gpu.peak * gpu.sustained * k / (k + RAMP) * used / (whole + gpu.tail)
    return 2 * count * m * n * k / rate


def matmul_shapes(cfg, mesh):
    """-> ([(m, n, k, count)] of the dense matrix products of one block on this rank, those of its experts),
    for one micro-batch forward."""
    tp, C, F, rows = mesh.tp.size, cfg.n_embd, cfg.ffn_hidden, rank_tokens(cfg, mesh)
    gates = 2 if cfg.mlp in GATED else 1
    dense = [(rows, C // tp + 2 * kv_width(cfg, mesh), C, 1), (rows, C, C // tp, 1)]
    hidden = cfg.n_shared_experts * F if cfg.n_experts else F
    if hidden:
        dense += [(rows, gates * hidden // tp, C, 1), (rows, C, hidden // tp, 1)]
    if not cfg.n_experts:
        return dense, []
    each = math.ceil(expert_rows(cfg, rows // tp) * mesh.ep.size / cfg.n_experts)  # rows of one expert
    e = cfg.n_experts // mesh.ep.size
    return dense, [(each, F, C, e)] * gates + [(each, C, F, e)]


def forward_matmuls(cfg, mesh, gpu):
    """Seconds of one block's matrix products; the experts' on the rank with the most rows."""
    dense, experts = matmul_shapes(cfg, mesh)
    out = sum(matmul_seconds(m, n, k, gpu, count) for m, n, k, count in dense)
    for m, n, k, count in experts:
        grouped = 2 * count * m * n * k / (GROUPED * gpu.peak) * max_load_factor(cfg, mesh)
        out += matmul_seconds(m, n, k, gpu, count) if cfg.capacity_factor else grouped
        out += count * n * k * element_bytes(cfg)[0] / gpu.hbm  # each weight is read for few rows
    return out


def block_seconds(cfg, mesh, gpu, saved):
    """Seconds of the kernels of one block, forward and backward of one micro-batch. saved: bytes that it
    keeps for backward."""
    tp, rows, weight = mesh.tp.size, rank_tokens(cfg, mesh), element_bytes(cfg)[0]
    out = 3 * forward_matmuls(cfg, mesh, gpu)
    # causal: half of 12. without that mask a query meets as many keys as in a sequence twice as long
    keys = cfg.seq_len * (2 if cfg.objective == "mlm" else 1)
    out += 6 * rows * keys * cfg.n_embd / tp / (min(ATTENTION, SHORT * keys) * gpu.peak)
    out += TOUCHES * saved / gpu.hbm + GAP * (2 if cfg.n_experts else 1)  # twice: a guess, not in a trace
    routed = expert_rows(cfg, rows // tp) * max_load_factor(cfg, mesh) if cfg.n_experts else 0
    if cfg.mlp == "swiglu":  # h, which is not kept: written, read, and both again in backward
        out += 4 * routed * cfg.ffn_hidden * weight / gpu.hbm
    if mesh.ep.size > 1:
        # rows into order by expert and back, besides what is kept: read and written, gradients too. found
        # missing when W2a had come out 10.2 % short; it is 0.8 of those 7.5 ms
        out += 8 * routed * cfg.n_embd * weight / gpu.hbm
    return out


def head_seconds(cfg, mesh, gpu, vocab_size):
    """Seconds of the head and the cross-entropy, forward and backward of one micro-batch."""
    tp, rows, v = mesh.tp.size, head_rows(cfg, mesh), pad_vocab(vocab_size) // mesh.tp.size
    # cross-entropy: reads and writes logits; over tp 14 passes in fp32 (parallel.vocab_cross_entropy)
    passes = 2 * element_bytes(cfg)[0] / ENTROPY if tp == 1 else 14 * 4
    dense = matmul_seconds(rows, cfg.n_embd, cfg.n_embd, gpu) if cfg.objective == "mlm" else 0
    return 3 * (matmul_seconds(rows, v, cfg.n_embd, gpu) + dense) + rows * v * passes / gpu.hbm


# -----------------------------------------------------------------------------
# communication

def ring_bandwidth(axis, stride, gpu):
    """B/s along the ring of an axis whose ranks are `stride` apart: a link inside a node; over the network,
    the adapters of all its ranks that share a node."""
    if axis.size * stride <= gpu.node:
        return gpu.link
    return min(gpu.link, gpu.net * max(1, gpu.rails // stride))


def ring_latency(axis, stride, gpu):
    """Seconds until one element has been around the ring of an axis."""
    between_nodes = math.ceil(axis.size * stride / gpu.node) - 1
    return HOP[0] * max(0, axis.size - 1 - between_nodes) + HOP[1] * min(between_nodes, axis.size - 1)


def communication_seconds(cfg, mesh, gpu, blocks, sent, direct):
    """Seconds of one micro-batch's messages over tp, cp, ep and pp, both ways, which compute does not hide.
    sent: {axis: bytes of the micro-batch}, experts' rows balanced; direct: these use symmetric memory."""
    calls = {"tp": 8 * blocks, "cp": 2 * blocks, "ep": 5 * blocks if cfg.n_experts else 0,
             "pp": 2 * cfg.pp_chunks}
    rates = {"tp": ring_bandwidth(mesh.tp, 1, gpu), "cp": ring_bandwidth(mesh.cp, mesh.tp.size, gpu),
             "ep": gpu.link * (PUT if direct else ALL_TO_ALL) if mesh.ep.size <= gpu.node else gpu.net,
             "pp": gpu.link if mesh.pp.size * mesh.stage.size <= gpu.node else gpu.net}
    busiest = {"ep": max_load_factor(cfg, mesh)}
    return sum(sent.get(axis, 0) * busiest.get(axis, 1) / rates[axis]
               + LATENCY * calls[axis] * (getattr(mesh, axis).size > 1) for axis in calls)


def exposed_seconds(mesh, gpu, reductions, slowest, overlap):
    """Seconds of the sums of gradients and the gathers of weights that compute does not hide. reductions:
    {axis name: cost.traffic.Reduction}; slowest: seconds of the micro-batches beside which they are sent, of
    which backward is 2/3; overlap: which part of what could be hidden is hidden."""
    tp, exposed = mesh.tp.size, 0.0
    strides = {"dp": tp, "dpcp": tp, "stage": 1, "edp": mesh.ep.size, "tied": tp}
    for kind, beside in (("gradients", 2 / 3), ("weights", 1 / 3)):
        whole = tail = 0.0
        for name, reduction in reductions.items():
            axis, stride, moved = getattr(mesh, name), strides[name], getattr(reduction, kind)
            if moved:
                trip = LATENCY + ring_latency(axis, stride, gpu)
                transfer = moved / ring_bandwidth(axis, stride, gpu)
                whole += transfer + reduction.calls * trip
                tail += transfer * reduction.last + trip
        exposed += whole - overlap * min(whole - tail, slowest * beside)
    return exposed


# -----------------------------------------------------------------------------
# the step

def stage_time(cfg, mesh, gpu, vocab_size, block, sent):
    """Seconds of one micro-batch on this rank's stages, both ways. block: a cost.memory.BlockActivations;
    sent: {axis name: bytes that this rank sends in a step}, experts' rows balanced."""
    choice, varying = expected_choice(cfg, mesh, gpu.node), needs_row_limit(cfg, mesh)
    (blocks, _, is_last), micro = held_layers(cfg, mesh), micro_batches(cfg, mesh)
    recompute = 4 / 3 if cfg.recompute == "full" else 1
    limit = row_limit_factor(cfg, mesh) if varying and choice.graph else 0.0
    waits = varying and not limit  # all_to_all asks the host how many rows travel
    direct = choice.symm_mem and not waits
    head = head_seconds(cfg, mesh, gpu, vocab_size) if is_last else 0.0
    again = 2 * (block.saved - block.remains) / gpu.hbm if cfg.recompute == "selective" else 0  # a guess
    device = blocks * (block_seconds(cfg, mesh, gpu, block.saved) * recompute + again + SYNC * waits) + head
    launches = blocks * recompute * (2 if cfg.n_experts else 1) * (waits or not choice.graph)
    per_micro = {axis: nbytes / micro for axis, nbytes in sent.items()}
    if limit and not direct:
        per_micro["ep"] *= limit / max_load_factor(cfg, mesh)  # of a fixed size, the rest is zeros
    return (max(device, LAUNCH[cfg.compile] * launches)
            + communication_seconds(cfg, mesh, gpu, blocks, per_micro, direct))


def bubble(p, v, m):
    """Time that p ranks idle, over the time that they work, in a step of m micro-batches in v chunks."""
    if v == 1 or m % p == 0:
        return (p - 1) / (v * m)
    return max(timetable(p, v, m)) / (3 * v * m) - 1


def step_time(cfg, mesh, gpu, slowest, local, reductions):
    """-> {part: seconds} of an optimizer step. slowest: seconds of the slowest rank's micro-batch; local:
    {axis: parameters of this rank} (cost.parameters); reductions: {axis: Reduction} (cost.traffic)."""
    weight, grad = element_bytes(cfg)
    count, micro = sum(local.values()), micro_batches(cfg, mesh)
    alone, copied = unwidened_gradients(mesh, local, expected_choice(cfg, mesh, gpu.node))
    to_fp32 = count * (weight + grad + (micro - 1) * (weight + 2 * grad))
    to_fp32 -= (alone + sum(copied.values())) * (grad - weight)
    for axis, n in copied.items():  # the slices that came from the other ranks are added up
        times = micro if cfg.zero > 1 else 1
        to_fp32 += n * (weight + grad / getattr(mesh, axis).size) * times
    adam = owned_parameters(cfg, mesh, local) * ADAM - alone * 4
    return {"compute": micro * slowest,
            "bubble": bubble(mesh.pp.size, cfg.pp_chunks, micro) * micro * slowest,
            "gradients": to_fp32 / (STREAM * gpu.hbm),
            "reduce": exposed_seconds(mesh, gpu, reductions, slowest * (micro if cfg.zero > 1 else 1),
                                      COPIED if copied else HIDDEN),
            "optimizer": adam / (STREAM * gpu.hbm)}

"""The milliseconds of one optimizer step, from shapes and an explicit model of efficiency.

    step = (1 + bubble) * micro-batches * micro-batch of the slowest rank
           + gradients to fp32 + communication that compute does not hide + optimizer

The comment beside each constant says where it was measured: ceilings, single kernels, traces. None of
them was fitted to the milliseconds of a step on H200 but where it says so.
"""
import math

import torch

from config import pad_vocab
from cost.gpus import GPUS, NODE, kind_of
from cost.parameters import (
    attended_length,
    dense_hidden,
    element_bytes,
    expert_rows,
    head_rows,
    held_layers,
    kv_width,
    local_trained,
    micro_batches,
    muon_shares,
    n_slices,
    owned_parameters,
    query_columns,
    rank_tokens,
    uncopied_gradients,
    unwidened_gradients,
)
from fast.choose import choose, needs_row_limit
from ops.accelerator import device_name
from ops.activations import GATED
from pipeline import timetable

# -----------------------------------------------------------------------------
# What was measured

# Matrix products
RAMP = 64  # elements of the inner dimension until a tile's pipeline is full
MISALIGNED = 0.78  # of a product's rate, a width that is no multiple of 64: 14,400 over 8, in BLOOM's table
GROUPED = 0.5  # of peak, experts: 445 TFLOP/s at 1024 rows each, less the time of the weights' bytes

# Other kernels
ATTENTION = 0.34  # of peak, causal FLOPs: cuDNN SDPA both ways, 340 TFLOP/s on h200 at 2048 tokens
SHORT = 0.2 / 1024  # the same per token of short sequences: 200 TFLOP/s at 1024, in G2's trace
LONG = 2048, 8192  # tokens between which the rate grew by 1.35 with heads of 128, and by 1.06 with 64
GROWTH = 0.16  # exponent: for all heads the rate at 8192 tokens is 1.25 times that at 2048
# With cp a segment of queries meets the keys of all segments before it. cuDNN does not take that mask.
# SEGMENT and its growth were fitted to the two rows with --cp of bench/README.md, segments of 4096 and 16384.
SEGMENT = 0.18  # of peak
SEGMENTS = 4096, 16384  # tokens of a segment, between which the rate grows
SEGMENT_GROWTH = 0.25  # exponent: the rate at 16384 tokens is 1.41 times that at 4096
TOUCHES = 3  # times a saved tensor passes through memory outside products: write, read, gradient
STREAM = 0.95  # of hbm, kernels over flat buffers: AdamW 4.17, gradients to fp32 4.0 of 4.28 TB/s
# Bytes per parameter that is stepped. AdamW moves 30: it reads gradient, master and two moments, and
# writes the last three and bf16 weights. The norm of the gradient reads 4 more. If the gradient is bf16,
# both together move 30.
ADAM = 34
ENTROPY = 0.82  # of hbm, cross-entropy: 2.43 ms for W1's 8.4 GB

# Messages
LATENCY = 20e-6  # s per collective: 18 us at 1 MB on h200
HOP_IN_NODE = 1.9e-6  # s per rank of a ring inside a node: NCCL's own table, LL128
HOP_BETWEEN_NODES = 4e-6  # the same over the network
ALL_TO_ALL = 0.78  # of link: 250 GB/s in blocks of 67 MB
PUT = 0.9  # of link: rows through symmetric memory, 280 to 320 GB/s in both directions' kernels
HIDDEN = 0.5  # of the possible overlap of compute and NCCL: 0.504 ms beside 1.865 ms took 2.125
COPIED = 0.85  # the same where copy engines carry the bytes: it took 1.936

# The host
GAP = 63e-6  # s per block between the kernels of a CUDA graph: 1,223 kernels, 1.5 ms in W1's trace
KERNEL_GAP = 1.5e-3 / 1223  # s between two of these kernels
LAUNCH = {True: 0.2e-3, False: 0.5e-3}  # s of host per block, compiled or not, without a CUDA graph
# The fullest of `ep` ranks has 1 + SKEW sqrt((ep - 1) / E) times the mean number of rows: the deviation
# of a sum of E / ep of E loads. SKEW comes from the row limits, 1.1 times the need, on which W2b had
# settled on real tokens at steps 200 and 300. That is the worst layer. The mean layer has about a third of
# the excess, if loads are normal: the largest of 4 is 1.03 deviations above the mean, of 24 x 4 it is 2.5.
SKEW = 3.05
# While routing is young it is uneven: of the rows that the fullest rank could have beyond its share, (ep - 1)
# times the mean number, it has this part in the mean layer. In steps 30 to 60 of W2b on text it was 0.43 for
# 2 ranks, and 0.42 for 4 and for 8 (bench/results/young-loads-h100.jsonl). In some step and layer the fullest
# rank had all rows but a few, so the row limits then stand at all rows.
UNEVEN = 0.425
MOST_UNEVEN = 8  # ranks: the largest ep for which the loads were summed


def peak_flops(device):
    """Return the dense bf16 peak of a torch.device in FLOP/s; None if GPUS does not know it."""
    kind = kind_of(device_name(device), 0)  # the peak does not depend on the memory
    return GPUS[kind].peak if kind else None


def expected_choice(cfg, mesh, node=NODE):
    """Return the fast.choose.Choice of a run on GPUs, of which `node` reach each other's memory."""
    return choose(cfg, mesh, torch.device("cuda"), lambda mesh, axis, device: axis.size <= node)


# -----------------------------------------------------------------------------
# The experts' rows, over the balanced number

def max_load_factor(cfg, mesh, worst=False, uneven=False):
    """Return the rows of the fullest ep rank over the mean: in the mean layer, or in the worst one.

    uneven: while routing is young, not what it settles to.
    """
    if not needs_row_limit(cfg, mesh):
        return 1.0
    most_excess = mesh.ep.size - 1
    settled_excess = SKEW * math.sqrt(most_excess / cfg.n_experts)
    if not worst:
        settled_excess /= 3
    if uneven:
        young_excess = most_excess if worst else UNEVEN * most_excess
        return 1 + max(settled_excess, young_excess)
    return 1 + min(settled_excess, most_excess)


def row_limit_factor(cfg, mesh, uneven=False):
    """Return the rows at which the buffers of a CUDA graph settle (fast/graph.py)."""
    return min(1.1 * max_load_factor(cfg, mesh, worst=True, uneven=uneven), mesh.ep.size)


def allocated_row_factor(cfg, mesh):
    """Return the rows for which there are buffers.

    They begin at --ep-slack, and grow if a step needs more, which is while routing is young. Over more ranks
    than it was measured on, those are counted that it settles to.
    """
    is_measured = mesh.ep.size <= MOST_UNEVEN
    return max(min(cfg.ep_slack, mesh.ep.size), row_limit_factor(cfg, mesh, uneven=is_measured))


# -----------------------------------------------------------------------------
# Matrix products

def waves(m, n, count, gpu):
    """Return how many waves the output tiles of `count` products (m, n) fill, and how many they take.

    Each multiprocessor of the GPU computes one tile of a wave. The tiles are those of gpu.tiles that take the
    least time.
    """
    best = 0.0
    for height, width in gpu.tiles:
        tiles = count * math.ceil(m / height) * math.ceil(n / width)
        filled = count * m * n / (height * width) / gpu.sms
        taken = max(1, math.ceil(tiles / gpu.sms))
        rate = filled / (taken + gpu.tail)
        if rate > best:
            best = rate
            used = filled
            whole = taken
    return used, whole


def matmul_seconds(m, n, k, gpu, count=1):
    """Return the seconds of `count` products (m, k) x (k, n).

    Their rate is that of full tiles, less the empty part of the last wave and the tail.
    """
    used, whole = waves(m, n, count, gpu)
    rate = gpu.peak * gpu.sustained * k / (k + RAMP) * used / (whole + gpu.tail)
    if n % 64 or k % 64:
        rate *= MISALIGNED
    return 2 * count * m * n * k / rate


def matmul_shapes(cfg, mesh):
    """Return the matrix products of one block on this rank, for the forward of one micro-batch.

    They are two lists of (m, n, k, count), for matmul_seconds: the dense ones, and the experts'.
    """
    tp, C = mesh.tp.size, cfg.n_embd
    rows = rank_tokens(cfg, mesh)
    gates = 2 if cfg.mlp in GATED else 1
    hidden = dense_hidden(cfg)
    q = query_columns(cfg) // tp
    dense = [(rows, q + 2 * kv_width(cfg, mesh), C, 1),  # wq, wk, wv
             (rows, C, q, 1)]  # wo
    if hidden:
        dense.append((rows, gates * hidden // tp, C, 1))  # w1, w3
        dense.append((rows, C, hidden // tp, 1))  # w2
    if not cfg.n_experts:
        return dense, []

    F = cfg.ffn_hidden
    e = cfg.n_experts // mesh.ep.size
    rows_of_one = math.ceil(expert_rows(cfg, rows // tp) * mesh.ep.size / cfg.n_experts)
    experts = [(rows_of_one, F, C, e) for _ in range(gates)]
    experts.append((rows_of_one, C, F, e))
    return dense, experts


def product_seconds(cfg, mesh, gpu, load=1.0):
    """Return the seconds of one block's matrix products, forward and backward of one micro-batch.

    --recompute full runs the forward once more. A weight that is not trained has no gradient. load: rows of
    this rank's experts over the balanced number.
    """
    weight_bytes, _ = element_bytes(cfg)
    dense, experts = matmul_shapes(cfg, mesh)
    passes = 2 if cfg.lora else 3
    if cfg.recompute == "full":
        passes += 1
    seconds = sum(matmul_seconds(*shape, gpu, count) for *shape, count in dense)
    if cfg.fp8:
        seconds /= gpu.fp8
    for m, n, k, count in experts:
        if cfg.capacity_factor:
            seconds += matmul_seconds(m, n, k, gpu, count)
        else:
            seconds += 2 * count * m * n * k / (GROUPED * gpu.peak) * load
        seconds += count * n * k * weight_bytes / gpu.hbm  # each weight is read for few rows
    return passes * seconds


# -----------------------------------------------------------------------------
# Other kernels

def attention_seconds(cfg, mesh, gpu):
    """Return the seconds of one block's attention, forward and backward of one micro-batch."""
    keys = attended_length(cfg)
    if cfg.objective == "mlm":
        keys *= 2  # without the causal mask a query meets as many keys as in a sequence twice as long
    ceiling = ATTENTION
    begin, end = LONG
    growth = GROWTH
    length = keys
    if mesh.cp.size > 1:
        ceiling = SEGMENT
        begin, end = SEGMENTS
        growth = SEGMENT_GROWTH
        length = cfg.seq_len / (2 * mesh.cp.size)
    rate = min(ceiling, SHORT * keys) * (min(max(length, begin), end) / begin) ** growth
    flops = 6 * rank_tokens(cfg, mesh) * keys * query_columns(cfg) / mesh.tp.size  # causal: half of 12
    return flops / (rate * gpu.peak)


def other_seconds(cfg, mesh, gpu, saved, load=1.0):
    """Return the seconds of what a block computes besides its products with whole matrices, both ways.

    saved: bytes that the block keeps for backward.
    """
    weight_bytes, _ = element_bytes(cfg)
    n = rank_tokens(cfg, mesh) // mesh.tp.size
    seconds = attention_seconds(cfg, mesh, gpu) + TOUCHES * saved / gpu.hbm
    seconds += GAP * (2 if cfg.n_experts else 1)  # twice for experts: a guess, not in a trace
    if not cfg.compile:  # torch's kernels go over a block's rows more often: bench/ladder.py's W1, G2, W2b
        passes = 12 if cfg.norm == "layer" else 47
        seconds += passes * (2 * n * cfg.n_embd * weight_bytes / gpu.hbm + KERNEL_GAP)
    dense, _ = matmul_shapes(cfg, mesh)
    for rows, outputs, inputs, _ in dense:
        if cfg.lora:  # six narrow products and two sums go over a matrix' inputs and outputs
            seconds += 6 * rows * (outputs + inputs) * weight_bytes / gpu.hbm
        if cfg.fp8:  # numbers are rounded: the largest is looked for, each is read and written both ways
            seconds += (6 * rows * (outputs + inputs) + 8 * outputs * inputs) / (STREAM * gpu.hbm)
    if cfg.n_experts:
        routed = expert_rows(cfg, n) * load * weight_bytes
        if cfg.mlp == "swiglu":
            # The hidden layer is not kept: it is written and read, and both again in backward.
            seconds += 4 * routed * cfg.ffn_hidden / gpu.hbm
        if mesh.ep.size > 1:
            # Rows are put into order by expert and back: read and written, gradients too.
            seconds += 8 * routed * cfg.n_embd / gpu.hbm
    return seconds


def head_seconds(cfg, mesh, gpu, vocab_size):
    """Return the seconds of the head and the cross-entropy, forward and backward of one micro-batch."""
    rows = head_rows(cfg, mesh)
    v = pad_vocab(vocab_size) // mesh.tp.size
    products = matmul_seconds(rows, v, cfg.n_embd, gpu)
    if cfg.objective == "mlm":
        products += matmul_seconds(rows, cfg.n_embd, cfg.n_embd, gpu)
    if mesh.tp.size == 1 and not cfg.logit_softcap:
        weight_bytes, _ = element_bytes(cfg)
        passes = 2 * weight_bytes / ENTROPY  # the cross-entropy reads and writes logits
    else:
        passes = 14 * 4  # 14 passes in fp32 (layers.vocab_cross_entropy)
    times = 2 if cfg.lora else 3
    return times * products + rows * v * passes / gpu.hbm


# -----------------------------------------------------------------------------
# Waiting: for messages, whose time is bytes over the rate of a ring and latencies, and in a pipeline

def ring_bandwidth(axis, stride, gpu):
    """Return the B/s along the ring of an axis whose ranks are `stride` apart.

    Inside a node this is a link. Over the network it is the adapters of all ranks that share a node.
    """
    if axis.size * stride <= gpu.node:
        return gpu.link
    return min(gpu.link, gpu.net * max(1, gpu.rails // stride))


def stride_of(axis, mesh):
    """Return how far the neighbours on an axis that sums gradients are apart, in ranks."""
    tp = mesh.tp.size
    name, _, part = axis.name.partition(".")
    if part == "replicas":
        return axis.ranks[1] - axis.ranks[0]
    return {"dp": tp, "dpcp": tp, "stage": 1, "edp": mesh.ep.size, "tied": tp}[name]


def ring_latency(axis, stride, gpu):
    """Return the seconds until one element has been around the ring of an axis."""
    between_nodes = math.ceil(axis.size * stride / gpu.node) - 1
    in_nodes = max(0, axis.size - 1 - between_nodes)
    return HOP_IN_NODE * in_nodes + HOP_BETWEEN_NODES * min(between_nodes, axis.size - 1)


def communication_seconds(cfg, mesh, gpu, blocks, sent, direct):
    """Return the seconds of one micro-batch's messages over tp, cp, ep and pp, both ways.

    Compute does not hide them. sent: {axis name: bytes of the micro-batch}, the experts' rows those of the
    fullest rank. direct: the experts' rows use symmetric memory.
    """
    ep_rate = gpu.net
    if mesh.ep.size <= gpu.node:
        ep_rate = gpu.link * (PUT if direct else ALL_TO_ALL)
    pp_rate = gpu.link if mesh.pp.size * mesh.stage.size <= gpu.node else gpu.net
    messages = {  # axis name: (B/s, calls)
        "tp": (ring_bandwidth(mesh.tp, 1, gpu), 8 * blocks),
        "cp": (ring_bandwidth(mesh.cp, mesh.tp.size, gpu), 2 * blocks),
        "ep": (ep_rate, 5 * blocks if cfg.n_experts else 0),
        "pp": (pp_rate, 2 * cfg.pp_chunks)}

    seconds = 0.0
    for axis, (rate, calls) in messages.items():
        latency = LATENCY * calls if getattr(mesh, axis).size > 1 else 0
        seconds += sent.get(axis, 0) / rate + latency
    return seconds


def exposed_seconds(mesh, gpu, reductions, slowest, overlap):
    """Return the seconds of the sums of gradients and gathers of weights that compute does not hide.

    reductions: {axis name: cost.traffic.Reduction}. slowest: seconds of the micro-batches during
    which they are sent; backward is 2/3 of these. overlap: the part of what could be hidden that is.
    """
    axes = mesh.axes()
    exposed = 0.0
    for kind, share in (("gradients", 2 / 3), ("weights", 1 / 3)):
        whole = 0.0
        tail = 0.0
        for name, reduction in reductions.items():
            nbytes = getattr(reduction, kind)
            if not nbytes:
                continue
            stride = stride_of(axes[name], mesh)
            trip = LATENCY + ring_latency(axes[name], stride, gpu)
            transfer = nbytes / ring_bandwidth(axes[name], stride, gpu)
            whole += transfer + reduction.calls * trip
            tail += transfer * reduction.last + trip
        exposed += whole - overlap * min(whole - tail, slowest * share)
    return exposed


def bubble(ranks, chunks, num_micro_batches):
    """Return the time that pipeline ranks idle in a step, over the time that they work."""
    work = chunks * num_micro_batches
    if chunks == 1 or num_micro_batches % ranks == 0:
        return (ranks - 1) / work
    return max(timetable(ranks, chunks, num_micro_batches)) / (3 * work) - 1


# -----------------------------------------------------------------------------
# The step

def stage_time(cfg, mesh, gpu, vocab_size, block, sent, *, uneven=False):
    """Return the seconds of one micro-batch on this rank's stages, both ways.

    block: a cost.memory.BlockActivations. sent: {axis name: bytes that this rank sends in a step},
    with the experts' rows balanced. uneven: while routing is young.
    """
    choice = expected_choice(cfg, mesh, gpu.node)
    held = held_layers(cfg, mesh)
    load = max_load_factor(cfg, mesh, uneven=uneven)
    # --recompute full runs the forward once more, a third of all but the products, which say it themselves.
    times = 4 / 3 if cfg.recompute == "full" else 1
    per_block = product_seconds(cfg, mesh, gpu, load)
    per_block += times * other_seconds(cfg, mesh, gpu, block.saved, load)
    if cfg.recompute == "selective":
        per_block += 2 * (block.saved - block.remains) / gpu.hbm  # a guess
    device = held.blocks * per_block
    if held.has_head:
        device += head_seconds(cfg, mesh, gpu, vocab_size)

    # Without a graph the host launches kernels, and all_to_all asks it how many rows travel.
    host = 0.0
    if not choice.graph:
        host = LAUNCH[cfg.compile] * held.blocks * times * (2 if cfg.n_experts else 1)

    per_micro_batch = {axis: nbytes / micro_batches(cfg, mesh) for axis, nbytes in sent.items()}
    if "ep" in per_micro_batch:
        per_micro_batch["ep"] *= load
        if needs_row_limit(cfg, mesh) and choice.graph and not choice.symm_mem:
            # Messages have a fixed size: zeros fill what the rows leave.
            per_micro_batch["ep"] *= row_limit_factor(cfg, mesh, uneven) / load
    messages = communication_seconds(cfg, mesh, gpu, held.blocks, per_micro_batch, choice.symm_mem)
    return max(device, host) + messages


def step_time(cfg, mesh, gpu, vocab_size, slowest, reductions):
    """Return {part: seconds} of an optimizer step.

    slowest: seconds of the slowest rank's micro-batch. reductions: {axis name: Reduction} (cost.traffic).
    """
    num_micro_batches = micro_batches(cfg, mesh)
    choice = expected_choice(cfg, mesh, gpu.node)
    local = local_trained(cfg, mesh, vocab_size)
    alone, copied = unwidened_gradients(mesh, local, choice)
    weight_bytes, sum_bytes = element_bytes(cfg)
    summed = _bytes_of_sums(cfg, mesh, local, alone, copied)
    summed -= 2 * weight_bytes * uncopied_gradients(cfg, mesh, vocab_size, choice)

    # From ZeRO-2 on gradients are sent in every micro-batch, before that in the last one.
    beside = slowest * num_micro_batches if cfg.zero > 1 else slowest
    reduce = exposed_seconds(mesh, gpu, reductions, beside, COPIED if copied else HIDDEN)

    compute = num_micro_batches * slowest
    gradients = summed / (STREAM * gpu.hbm)
    # Each backward adds its gradients to the sums, and the next stage waits for that, too.
    idle = bubble(mesh.pp.size, cfg.pp_chunks, num_micro_batches) * (compute + gradients)
    update = owned_parameters(cfg, mesh, local) * adam_bytes(cfg) - alone * 4
    return {"compute": compute,
            "bubble": idle,
            "gradients": gradients,
            "reduce": reduce,
            "optimizer": update / (STREAM * gpu.hbm) + muon_seconds(cfg, mesh, gpu, vocab_size)}


def adam_bytes(cfg):
    """Return the bytes per parameter that AdamW moves."""
    _, sum_bytes = element_bytes(cfg)
    nbytes = ADAM
    if cfg.dtype == "bf16":  # A master is the 16 bits that a weight lacks.
        nbytes -= 2
    if cfg.moments_dtype == "bf16":  # Two moments are read and written, each with 2 bytes.
        nbytes -= 4 * (sum_bytes - 2)
    return nbytes


def muon_seconds(cfg, mesh, gpu, vocab_size):
    """Return the seconds of Muon's products on the busiest rank, beyond what AdamW would take."""
    seconds = 0.0
    for _, _, owned in muon_shares(cfg, mesh, vocab_size):
        work = max(sum(matrix.work for matrix in matrices) for matrices in owned)
        seconds += 2 * work / (gpu.peak * gpu.sustained)
    return seconds


def _bytes_of_sums(cfg, mesh, local, alone, copied):
    """Return the bytes that move through memory while a step's gradients are summed in fp32.

    alone, copied: cost.parameters.unwidened_gradients.
    """
    weight_bytes, sum_bytes = element_bytes(cfg)
    num_micro_batches = micro_batches(cfg, mesh)
    # The first micro-batch reads the gradient and writes the sum. The others read the sum, too.
    first = weight_bytes + sum_bytes
    later = weight_bytes + 2 * sum_bytes
    nbytes = sum(local.values()) * (first + (num_micro_batches - 1) * later)
    nbytes -= (alone + sum(copied.values())) * (sum_bytes - weight_bytes)
    # The slices that came from the other ranks are added up.
    times = num_micro_batches if cfg.zero > 1 else 1
    for axis, n in copied.items():
        nbytes += n * (weight_bytes + sum_bytes / n_slices(cfg, mesh, axis)) * times
    return nbytes

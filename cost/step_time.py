"""The milliseconds of one optimizer step, from shapes and an explicit model of efficiency.

    step = (1 + bubble) * micro-batches * micro-batch of the slowest rank
           + gradients to fp32 + communication that compute does not hide + optimizer

The comment beside each constant says where it was measured; "fitted" says that a step's time was used.
"""
import math

from cost.gpus import GPUS, kind_of
from cost.parameters import attended_length, micro_batches
from fast.choose import needs_row_limit
from ops.accelerator import device_name
from ops.activations import GATED
from pipeline import timetable

# Matrix products
TILE = 128, 256  # rows and columns of a result that a multiprocessor computes in cuBLAS' large kernels
RAMP = 64  # elements of the inner dimension until a tile's pipeline is full
MISALIGNED = 0.78  # of a product's rate, a width that is no multiple of 64: 14,400 over 8, in BLOOM's table
ADAPTED = 2.3  # passes of a frozen weight with adapters, which has no gradient: fitted to the row with --lora
GROUPED = 0.5  # of peak, experts: 445 TFLOP/s at 1024 rows each, less the time of the weights' bytes

# Other kernels
ATTENTION = 0.34  # of peak, causal FLOPs: cuDNN SDPA both ways, 340 TFLOP/s on h200 at 2048 tokens
SHORT = 0.2 / 1024  # the same per token of short sequences: 200 TFLOP/s at 1024, in G2's trace
LONG = 2048, 8192  # tokens between which the rate grew by 1.35 with heads of 128, and by 1.06 with 64
GROWTH = 0.16  # exponent: for all heads the rate at 8192 tokens is 1.25 times that at 2048
# With cp, where cuDNN does not take the mask: fitted to the two rows with --cp of bench/README.md
SEGMENT = 0.18  # of peak, segments of 4096 tokens
SEGMENTS = 4096, 16384  # tokens of a segment, between which the rate grows
SEGMENT_GROWTH = 0.25  # exponent: the rate at 16384 tokens is 1.41 times that at 4096
KERNEL_GAP = 1.5e-3 / 1223  # s between two kernels of a CUDA graph: W1's trace
TOUCHES = 3  # times a saved tensor passes through memory outside products: write, read, gradient
ADAM = 32  # bytes per parameter: the gradient twice; two moments, and weight with master, both ways

# Messages
LATENCY = 20e-6  # s per collective: 18 us at 1 MB on h200
HOP = 2.16e-6  # s per rank of a ring: in NCCL's table 1.9 us inside a node and 4 us over the network
HIDDEN = 0.5  # of the possible overlap of compute and NCCL: 0.504 ms beside 1.865 ms took 2.125

# The fullest of `ep` ranks has 1 + SKEW sqrt((ep - 1) / E) times the mean number of rows in the mean layer, a
# third of the excess in the worst layer: the row limits on which W2b had settled on text after 200 steps.
SKEW = 1.02
# While routing is young the mean layer's fullest rank has this part of the rows beyond its share, and that of
# the worst layer all: W2b on text, steps 30 to 60 (bench/results/young-loads-h100.jsonl).
UNEVEN = 0.425
MOST_UNEVEN = 8  # ranks: the largest ep for which the loads were summed


def peak_flops(device):
    """Return the dense bf16 peak of a torch.device in FLOP/s; None if GPUS does not know it."""
    kind = kind_of(device_name(device), 0)  # the peak does not depend on the memory
    return GPUS[kind].peak if kind else None


# The experts' rows, over the balanced number

def max_load_factor(cfg, mesh, uneven=False):
    """Return the rows of the fullest ep rank over the mean, in the mean layer. uneven: of young routing."""
    if not needs_row_limit(cfg, mesh):
        return 1.0
    most = mesh.ep.size - 1
    excess = SKEW * math.sqrt(most / cfg.n_experts)
    if uneven:
        excess = max(excess, UNEVEN * most)
    return 1 + min(excess, most)


def allocated_row_factor(cfg, mesh):
    """Return the rows for which there are buffers: over up to MOST_UNEVEN ranks all of them."""
    return min(max(cfg.ep_slack, MOST_UNEVEN), mesh.ep.size)


# Matrix products

def waves(m, n, count, gpu):
    """Return how many waves, a tile on each multiprocessor, `count` products (m, n) fill, and take."""
    height, width = TILE
    tiles = count * math.ceil(m / height) * math.ceil(n / width)
    return count * m * n / (height * width) / gpu.sms, max(1, math.ceil(tiles / gpu.sms))


def matmul_seconds(m, n, k, gpu, count=1):
    """Return the seconds of `count` products (m, k) x (k, n)."""
    used, whole = waves(m, n, count, gpu)
    rate = gpu.peak * gpu.sustained * k / (k + RAMP) * used / (whole + gpu.tail)
    if n % 64 or k % 64:
        rate *= MISALIGNED
    return 2 * count * m * n * k / rate


def matmul_shapes(rank):
    """Return the (m, n, k, count) of one block's products in a micro-batch's forward: dense, the experts'."""
    cfg = rank.cfg
    C = cfg.n_embd
    gates = 2 if cfg.mlp in GATED else 1
    dense = [(rank.rows, rank.q + 2 * rank.kv, C, 1),  # wq, wk, wv
             (rank.rows, C, rank.q, 1)]  # wo
    if rank.hidden:
        dense.append((rank.rows, gates * rank.hidden, C, 1))  # w1, w3
        dense.append((rank.rows, C, rank.hidden, 1))  # w2
    if not cfg.n_experts:
        return dense, []

    F = cfg.ffn_hidden
    e = cfg.n_experts // rank.mesh.ep.size
    rows_of_one = math.ceil(rank.expert_rows() * rank.mesh.ep.size / cfg.n_experts)
    return dense, [*[(rows_of_one, F, C, e)] * gates, (rows_of_one, C, F, e)]


def product_seconds(rank, gpu, load):
    """Return the seconds of one block's matrix products of a micro-batch, both ways."""
    cfg = rank.cfg
    dense, experts = matmul_shapes(rank)
    passes = ADAPTED if cfg.lora else 3
    if cfg.recompute == "full":
        passes += 1
    seconds = sum(matmul_seconds(*shape, gpu, count) for *shape, count in dense)
    if cfg.fp8:
        seconds /= gpu.fp8
    for m, n, k, count in experts:
        seconds += 2 * count * m * n * k / (GROUPED * gpu.peak) * load
        seconds += count * n * k * rank.weight_bytes / gpu.hbm  # each weight is read for few rows
    return passes * seconds


# Other kernels

def attention_seconds(rank, gpu):
    """Return the seconds of one block's attention, forward and backward of one micro-batch."""
    cfg = rank.cfg
    keys = attended_length(cfg)
    rate = min(ATTENTION, SHORT * keys) * growth(keys, LONG, GROWTH)
    if rank.mesh.cp.size > 1:
        rate = SEGMENT * growth(cfg.seq_len / (2 * rank.mesh.cp.size), SEGMENTS, SEGMENT_GROWTH)
    return 6 * rank.rows * keys * rank.q / (rate * gpu.peak)  # causal: half of 12


def growth(length, limits, exponent):
    begin, end = limits
    return (min(max(length, begin), end) / begin) ** exponent


def other_seconds(rank, gpu, saved):
    """Return the seconds of all else in a block, both ways. saved: bytes that it keeps for backward."""
    cfg = rank.cfg
    seconds = attention_seconds(rank, gpu) + TOUCHES * saved / gpu.hbm
    if not cfg.compile:  # torch's kernels go over a block's rows more often: measured for W1, G2, W2b
        passes = 12 if cfg.norm == "layer" else 47
        seconds += passes * (2 * rank.split_rows * cfg.n_embd * rank.weight_bytes / gpu.hbm + KERNEL_GAP)
    return seconds


def head_seconds(rank, gpu):
    """Return the seconds of the head and the cross-entropy, forward and backward of one micro-batch."""
    cfg = rank.cfg
    rows = rank.head_rows
    products = matmul_seconds(rows, rank.vocab, cfg.n_embd, gpu)
    passes = 14 * 4  # 14 passes in fp32 (layers.vocab_cross_entropy)
    if rank.mesh.tp.size == 1 and not cfg.logit_softcap:
        passes = 2 * rank.weight_bytes  # the cross-entropy reads and writes logits
    times = 2 if cfg.lora else 3
    return times * products + rows * rank.vocab * passes / gpu.hbm


# Waiting: for messages, whose time is bytes over the rate of a ring and latencies, and in a pipeline

def ring_bandwidth(axis, stride, gpu):
    """Return the B/s along the ring of an axis whose ranks are `stride` apart."""
    if axis.size * stride <= gpu.node:
        return gpu.link
    # the adapters of all ranks that share a node
    return min(gpu.link, gpu.net * max(1, gpu.rails // stride))


def communication_seconds(rank, gpu, sent):
    """Return the seconds of one micro-batch's messages, {axis name: bytes}, which compute does not hide."""
    mesh = rank.mesh
    ep_rate = gpu.link if mesh.ep.size <= gpu.node else gpu.net
    pp_rate = gpu.link if mesh.pp.size * mesh.stage.size <= gpu.node else gpu.net
    messages = {  # axis name: (B/s, calls)
        "tp": (ring_bandwidth(mesh.tp, 1, gpu), 8 * rank.blocks),
        "cp": (ring_bandwidth(mesh.cp, mesh.tp.size, gpu), 2 * rank.blocks),
        "ep": (ep_rate, 5 * rank.blocks if rank.cfg.n_experts else 0),
        "pp": (pp_rate, 2 * rank.cfg.pp_chunks)}
    return sum(sent.get(axis, 0) / rate + LATENCY * calls
               for axis, (rate, calls) in messages.items() if getattr(mesh, axis).size > 1)


def exposed_seconds(mesh, gpu, reductions, beside):
    """Return the seconds of the sums of gradients and gathers of weights that compute does not hide.

    reductions: those of cost.traffic. beside: seconds of the micro-batches during which they are sent.
    """
    whole = 0.0
    for name, (nbytes, calls) in reductions.items():
        axis = mesh.axes()[name]
        rate = ring_bandwidth(axis, axis.ranks[1] - axis.ranks[0], gpu)
        whole += nbytes / rate + calls * (LATENCY + HOP * (axis.size - 1))
    return whole - HIDDEN * min(whole, beside)


def bubble(ranks, chunks, num_micro_batches):
    """Return the time that pipeline ranks idle in a step, over the time that they work."""
    idle = 3 * (ranks - 1)  # a forward takes 1, a backward 2
    rest = num_micro_batches % ranks
    if chunks > 1 and rest:  # The last group is not full; how many there are before it does not matter.
        few = min(num_micro_batches, 2 * ranks + rest)
        idle = max(timetable(ranks, chunks, few)) - 3 * chunks * few
    return idle / (3 * chunks * num_micro_batches)


# The step

def stage_time(rank, gpu, saved, sent, *, uneven=False):
    """Return the seconds of one micro-batch on this rank's stages, both ways.

    saved: bytes that a block keeps for backward. sent: those of traffic(). uneven: while routing is young.
    """
    cfg = rank.cfg
    load = max_load_factor(cfg, rank.mesh, uneven=uneven)
    # --recompute full runs the forward once more, a third of all but the products, which say it themselves.
    times = 4 / 3 if cfg.recompute == "full" else 1
    seconds = rank.blocks * (product_seconds(rank, gpu, load) + times * other_seconds(rank, gpu, saved))
    if rank.has_head:
        seconds += head_seconds(rank, gpu)

    per_micro_batch = {axis: nbytes / micro_batches(cfg, rank.mesh) for axis, nbytes in sent.items()}
    if "ep" in per_micro_batch:
        per_micro_batch["ep"] *= load
    return seconds + communication_seconds(rank, gpu, per_micro_batch)


def step_time(rank, gpu, slowest, reductions):
    """Return {part: seconds} of a step. slowest: seconds of the slowest rank's micro-batch."""
    cfg = rank.cfg
    num_micro_batches = micro_batches(cfg, rank.mesh)
    compute = num_micro_batches * slowest
    # Each micro-batch reads the gradients and writes the sums, and all but the first read the sums, too.
    touched = num_micro_batches * (rank.weight_bytes + 2 * rank.sum_bytes) - rank.sum_bytes
    gradients = sum(bucket.elements for bucket in rank.trained) * touched / gpu.hbm
    # Each backward adds its gradients to the sums, and the next stage waits for that, too.
    idle = bubble(rank.mesh.pp.size, cfg.pp_chunks, num_micro_batches) * (compute + gradients)
    # From ZeRO-2 on gradients are sent in every micro-batch, before that in the last one.
    beside = compute if cfg.zero > 1 else slowest
    muon = 0  # products on the busiest rank
    for _, _, owned in rank.muon_shares():
        muon += max(sum(matrix.work for matrix in matrices) for matrices in owned)
    return {"compute": compute,
            "bubble": idle,
            "gradients": gradients,
            "reduce": exposed_seconds(rank.mesh, gpu, reductions, beside),
            "optimizer": rank.owned() * ADAM / gpu.hbm + 2 * muon / (gpu.peak * gpu.sustained)}

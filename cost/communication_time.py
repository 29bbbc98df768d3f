"""The part of a step in which ranks wait: for messages, whose time is bytes over the rate of a ring and
latencies, and in a pipeline for each other.

The comment beside each constant says where it was measured.
"""
import math

from pipeline import timetable

LATENCY = 20e-6  # s per collective: 18 us at 1 MB on h200
HOP_IN_NODE = 1.9e-6  # s per rank of a ring inside a node: NCCL's own table, LL128
HOP_BETWEEN_NODES = 4e-6  # the same over the network
ALL_TO_ALL = 0.78  # of link: 250 GB/s in blocks of 67 MB
PUT = 0.9  # of link: rows through symmetric memory, 280 to 320 GB/s in both directions' kernels
HIDDEN = 0.5  # of the possible overlap of compute and NCCL: 0.504 ms beside 1.865 ms took 2.125
COPIED = 0.85  # the same where copy engines carry the bytes: it took 1.936


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
            axis = axes[name]
            stride = stride_of(axis, mesh)
            trip = LATENCY + ring_latency(axis, stride, gpu)
            transfer = nbytes / ring_bandwidth(axis, stride, gpu)
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

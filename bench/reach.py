"""What the ranks of a run reach: which GPUs, whose memory, over which network, and each other how fast.

bench/doctor.py calls these checks. A check returns (status, text, fix). The checks that take a world are
collective over it.
"""
import contextlib
import ctypes.util
import io
import socket
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fast.choose import peer_access
from ops.accelerator import ask
from ops.backend import TRITON_DEVICES
from ops.grouped_mm import use_grouped_mm

SHOW_ALL = "show each rank all GPUs: srun --gpus-per-node=N --gpu-bind=none, or scripts/gpu_order.sh"
LINK_BYTES = 4 << 20, 32 << 20  # of a message between two ranks, on CPUs and on GPUs
SLOW_LINK = 0.5  # of the median: a slower link is a WARN


def gpus_seen(world):
    """Does each process of this node see all of its GPUs? Collective."""
    mine = None
    if world.device.type != "cpu":
        properties = ask(world.device, "get_device_properties")
        identity = str(getattr(properties, "uuid", world.device.index))
        mine = world.device.index, identity, torch.accelerator.device_count()
    host = socket.gethostname()
    told = world.everyone.gather((host, mine))  # a few words per rank, over the world
    here = [row for there, row in told if there == host]
    return habit(here) if None not in here else ("OK", "no GPU to share", "")


def habit(rows):
    """Return which habit the site has in showing GPUs to ranks, and what it means for a run.

    rows: (index, UUID, number of GPUs seen) of a node's ranks.
    """
    indices, names, counts = zip(*rows, strict=True)
    if len(set(names)) < len(names):
        return "FAIL", f"{len(names)} ranks use {len(set(names))} GPUs", \
            f"start {len(set(names))} ranks per node, or show each its own"
    if len(set(indices)) < len(names) or max(indices) >= min(counts):
        return "WARN", "each rank sees GPUs of its own only: slower steps with experts", SHOW_ALL
    return "OK", f"each rank sees the same {min(counts)}", ""


def fast_paths(world):
    """Which of the fast paths does this machine have, and why not the others? Collective."""
    if world.device.type == "cpu":
        return "OK", "none on a CPU: torch's operations, a loop over the experts, gloo", ""
    on, off = [], []

    def tell(name, has, why):
        (on if has else off).append(name if has else f"{name} ({why})")

    cuda = dist.get_default_backend_for_device(world.device) == "nccl"  # CUDA or HIP
    triton = world.device.type in TRITON_DEVICES
    w = torch.empty(2, 64, 64, dtype=torch.bfloat16, device=world.device)
    tell("grouped matmul in one kernel", use_grouped_mm(w[0], w), "a loop over the experts")
    tell("Triton kernels", triton, "not installed, or not for this device: torch's operations")
    tell("CUDA graph", cuda, "NVIDIA's and AMD's alone")
    reached = True
    if not cuda or world.n_nodes > 1 or world.size == 1:
        why = "start this with the ranks of one node to know" if cuda else "NVIDIA's and AMD's alone"
        tell("symmetric memory", False, why)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as said:  # rank 0 prints why not
            reached = peer_access(SimpleNamespace(world=world.axis), world.axis, world.device)
        why = said.getvalue().removeprefix("note: ").partition(": NCCL")[0]
        tell("symmetric memory", reached, why or "its first allocation failed")
    text = "; without ".join(", ".join(names) for names in (on or ["none"], off) if names)
    if triton and reached:
        return "OK", text, ""
    return "WARN", text, SHOW_ALL if triton else "pip install triton"


def network(env, nccl=True, system=Path("/sys/class"), find=ctypes.util.find_library):
    """Would NCCL use sockets on a machine with a fabric?

    env: the environment. find: a function that gives the file of a library, or None. NCCL itself speaks to
    InfiniBand. It needs a plugin for Slingshot (cxi) and EFA.
    """
    fabric = [f"{kind}/{p.name}" for kind in ("infiniband", "cxi") for p in sorted((system / kind).glob("*"))]
    if not fabric:
        return "OK", "no fabric in /sys/class (infiniband, cxi): TCP sockets", ""
    names = ", ".join(fabric)
    if not nccl:
        return "OK", f"{names}; gloo and MPI choose for themselves", ""
    if env.get("NCCL_NET") == "Socket":
        return "WARN", f"{names}, but NCCL_NET=Socket", "unset NCCL_NET"
    folders = [Path(folder) for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    plugin = env.get("NCCL_NET_PLUGIN") or find("nccl-net") or next(
        (str(p) for folder in folders for p in sorted(folder.glob("lib[nr]ccl-net*.so*"))), None)
    if plugin:
        return "OK", f"{names}, NCCL's plugin {plugin}", ""
    if all(name.startswith(("cxi/", "infiniband/efa")) for name in fabric):
        return "WARN", f"{names}, but NCCL has no plugin for it: sockets", "put the folder of " \
            "aws-ofi-nccl's libnccl-net.so on LD_LIBRARY_PATH (the site's module, " \
            "scripts/polaris_nccl.sh); then NCCL_DEBUG=INFO says NET/OFI"
    if find("ibverbs") is None:
        return "WARN", f"{names}, but no libibverbs: NCCL uses sockets", \
            "install rdma-core (libibverbs1), in the container too; then NCCL_DEBUG=INFO says NET/IB"
    return "OK", f"{names}, NCCL's own InfiniBand", ""


def partners(rank, size):
    """Return the rank with which `rank` exchanges in each turn, 1, 2, 4, ... away; None: it pauses.

    So 4,096 ranks need 12 turns, where all pairs would need 4,095.
    """
    others = [rank ^ 1 << k for k in range((size - 1).bit_length())]
    return [other if other < size else None for other in others]


def link_rates(world, repeats=5):
    """Return {(a, b): bytes per second each way} of the pairs of partners(), a < b. Collective.

    The rate is that of the fastest of `repeats` exchanges. In each turn all pairs exchange at once, as in
    training.
    """
    size = LINK_BYTES[world.device.type != "cpu"]
    mine, theirs = (torch.ones(size, dtype=torch.uint8, device=world.device) for _ in range(2))
    rates = {}
    for other in partners(world.rank, world.size):
        world.everyone.barrier()
        times = []
        for _ in range(0 if other is None else repeats):
            began = time.perf_counter()
            ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
            for work in dist.batch_isend_irecv(ops):  # one message each way
                work.wait()
            if world.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)
        if times and world.rank < other:
            rates[world.rank, other] = size / min(times)
    together = {}
    own = [(*pair, rate) for pair, rate in rates.items()]
    for part in world.everyone.gather(own):  # a number per pair, over the world
        for rank, other, rate in part:
            together[rank, other] = rate
    return together


def links(rates, hosts):
    """Which pair of ranks is slow for its kind, within a node or between two nodes?

    rates: what link_rates() returns. hosts: the host of each rank.
    """
    kinds = {}
    for pair, rate in rates.items():
        kinds.setdefault(len({hosts[r] for r in pair}), {})[pair] = rate
    parts, worst = [], (1.0, None)
    for nodes, of_kind in sorted(kinds.items()):
        median = statistics.median(of_kind.values())
        pair = min(of_kind, key=of_kind.get)
        share = of_kind[pair] / median
        where, ranks = "between" if nodes > 1 else "within", f"ranks {pair[0]} and {pair[1]}"
        slowest = (f"median {median / 1e9:.3g} GB/s, slowest {ranks} with {of_kind[pair] / 1e9:.3g}, "
                   f"{1 - share:.0%} less")
        parts.append(f"{len(of_kind)} {where} nodes: {slowest}" if len(of_kind) > 1 else
                     f"{ranks}, {where} nodes: {median / 1e9:.3g} GB/s")
        worst = min(worst, (share, pair), key=lambda x: x[0])
    share, pair = worst
    if share >= SLOW_LINK:
        return "OK", "; ".join(parts), ""
    where = " and ".join(dict.fromkeys(hosts[r] for r in pair))
    return "WARN", "; ".join(parts), f"run it again; if ranks {pair[0]} and {pair[1]} stay slow, leave out " \
        f"{where} and tell the site (NCCL_DEBUG=INFO shows what they use)"

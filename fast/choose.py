"""Which of the fast ways a run takes: one function, asked by train.py before it builds and by plan.py before
anything runs.

A run's speed is chosen once, from its flags, its mesh and what its GPUs can do. Everything chosen here has a
plain twin that gives the same numbers: the step without a graph (train.py), all_to_all (moe.py), NCCL
(parallel.py), gradients summed in fp32 (parallel.py).
"""
import socket
from typing import NamedTuple

import torch

import moe
from ddp import Comm
from fast import symm_mem
from fast.padded import PaddedAllToAll
from fast.peer import CopyStream, PeerComm, PeerSlotComm
from model import DTYPES
from ops import backend
from zero import SlotComm, uses_slot


class Choice(NamedTuple):
    """What of fast/ a run uses."""
    graph: bool              # forward, backward and gradient sums are replayed as one CUDA graph
    symm_mem: bool           # rows reach the experts of other ranks through symmetric memory, not all_to_all
    peer_copies: bool        # ZeRO's gradients and weights travel as copies between the GPUs of a node
    single_microbatch: bool  # bf16 gradients to which nothing is added: they need no fp32 sum

    def dispatcher(self, cfg):
        """-> dispatcher(cfg, mesh), which makes each expert layer's token dispatcher."""
        if self.symm_mem:
            return symm_mem.SymmMemCapacity if cfg.capacity_factor else symm_mem.SymmMem
        dropless = cfg.ep > 1 and not cfg.capacity_factor  # a graph needs messages of a fixed size
        return PaddedAllToAll if self.graph and dropless else moe.plain_dispatcher

    def comm(self, cfg):
        """-> comm(axis), which makes the Comm of a bucket that is reduced over axis."""
        stream = CopyStream()

        def comm_for(axis):
            if cfg.zero > 1 and uses_slot(axis):
                return PeerSlotComm(stream) if self.peer_copies else SlotComm()
            if self.uses_peer_copies(axis):
                return PeerComm(stream, DTYPES[cfg.dtype])
            return Comm(DTYPES[cfg.dtype] if self.keeps_grad_dtype(axis) else None)
        return comm_for

    def uses_peer_copies(self, axis):
        """Whether a bucket reduced over axis travels by copies between GPUs."""
        return self.peer_copies and axis.size > 1

    def keeps_grad_dtype(self, axis):
        """Whether a bucket's gradients stay in the model's dtype: nothing is added, and NCCL sums none."""
        return self.single_microbatch and (axis.size == 1 or self.peer_copies)


def choose(cfg, mesh, device, reach=None):
    """-> Choice for this run. reach(mesh, axis, device) -> bool says whether the GPUs of each group of an
    axis reach each other's memory; default peer_access, which all ranks must call together."""
    reach = reach or peer_access
    bf16 = cfg.dtype == "bf16" and device.type != "cpu"
    single = bf16 and cfg.global_batch in (0, cfg.micro_batch * mesh.dp.size)
    peer = ((single if cfg.zero == 1 else bf16 and cfg.zero > 1) and mesh.pp.size == 1
            and mesh.stage.size > 1 and has_cuda_api(device) and reach(mesh, mesh.stage, device))
    graph = static_shapes(cfg, mesh, device)
    one_sided = graph and cfg.n_experts > 0 and mesh.ep.size > 1 and reach(mesh, mesh.ep, device)
    return Choice(graph, one_sided, peer, single)


def has_cuda_api(device):
    """Whether the device has CUDA's or HIP's graphs and peer access; torch's symmetric memory needs these."""
    return device.type == "cuda"


def static_shapes(cfg, mesh, device):
    """Whether every step launches the same kernels on the same shapes (rows by symmetric memory)."""
    if cfg.n_experts and not grouped_mm_possible(cfg, device):
        return False  # without kernels the loop over experts and the counting sort read counts on the host
    # ZeRO-2, 3 and selective recomputation were never captured; masks drawn again would stand elsewhere
    return (has_cuda_api(device) and cfg.cuda_graph and not cfg.timers and mesh.pp.size == 1 and cfg.zero < 2
            and (cfg.recompute == "none" or cfg.recompute == "full" and cfg.dropout == 0)
            and (cfg.ep_slack > 0 or not needs_row_limit(cfg, mesh)))


def needs_row_limit(cfg, mesh):
    """Whether only the GPUs know how many rows reach a rank's experts: dropless, over several ranks."""
    return cfg.n_experts > 0 and cfg.capacity_factor == 0 and mesh.ep.size > 1


def grouped_mm_possible(cfg, device):
    """Whether each of the experts' products is one kernel. plan.py's device has no index."""
    here = device.index is None or device.type in backend.TRITON_DEVICES
    return here and DTYPES[cfg.dtype] in backend.DTYPES


HIDDEN = ("note: the processes of {} see different GPUs and cannot be shown all of the node's: NCCL is used, "
          "which takes longer; docs/signals.md, 'Which GPUs a process sees', says how to show them")
NO_ACCESS = "note: the GPUs of {} cannot access each other's memory: NCCL is used (nvidia-smi topo -p2p r)"


def peer_access(mesh, axis, device):
    """Whether the ranks of each group of axis reach each other's memory: they are on one host, each on a
    GPU of its own that all of them see, with peer access, and a first allocation succeeds. On a CPU: whether
    they are on one host. Collective over the world; the same answer on all ranks."""
    world, gpu = mesh.world, device.index  # None: a CPU
    seen = range(torch.cuda.device_count() if gpu is not None else 0)
    reachable = [p for p in seen if p == gpu or torch.cuda.can_device_access_peer(gpu, p)]
    # a few words from each rank to all, over the world
    told = world.gather_objects((axis.ranks[0], socket.gethostname(), gpu, len(seen), reachable))
    for group in {group for group, *_ in told}:
        hosts, gpus, counts, reached = zip(*(rest for first, *rest in told if first == group), strict=True)
        if len(set(hosts)) > 1:
            return False
        # an index that two ranks have, or that one does not know, means another GPU to each process
        hidden = gpu is not None and (len(set(gpus)) < len(gpus) or max(gpus) >= min(counts))
        if hidden or (gpu is not None and any(set(gpus) - set(r) for r in reached)):
            if world.rank == 0:
                print((HIDDEN if hidden else NO_ACCESS).format(f"{axis.name} {axis.size}"), flush=True)
            return False
    opened = True
    if gpu is not None:
        try:
            symm_mem.SymmetricBuffer(axis, 1, 128, torch.float32, device)
        except ValueError:
            opened = False
    return all(world.gather_objects(opened))

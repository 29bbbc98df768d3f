"""Whether a model fits into the memory that these ranks have."""
import contextlib
import dataclasses
import os
from pathlib import Path

import torch

from cost.memory import GIB, memory, state_bytes
from fast.choose import choose
from interface.files import warn
from interface.nearest import fits
from ops.accelerator import total_memory

PROCESS = 0.25 * GIB  # Python with torch


def check_memory(cfg, mesh, vocab_size, world):
    """Raise ValueError, with numbers, if weights, gradients and optimizer state exceed this rank's memory.

    On a CPU, where the kernel kills a process that takes too much, the activations are counted, too. On a GPU
    they are not: what passes may still be too large, and torch says so.
    """
    choice = choose(cfg, mesh, world.device, lambda *_: True)  # at best: no rank is asked what it can reach

    def need(stage):
        pp = dataclasses.replace(mesh.pp, rank=stage)
        return sum(state_bytes(cfg, dataclasses.replace(mesh, pp=pp), vocab_size, choice).values())

    needed = need(mesh.pp.rank)
    if world.device.type == "cpu":  # the ranks of a node share its memory; the others need this much at least
        needed += (world.local_size - 1) * min(need(stage) for stage in range(mesh.pp.size))
        have = host_memory()
        who = f"with {ranks_here(world)}"
        check_activations(cfg, mesh, vocab_size, world, needed)
    else:
        have = total_memory(world.device)
        who = f"on {world.device} of rank {world.rank}"
    if needed > have > 0:
        raise ValueError(f"weights, gradients and optimizer state alone take {needed / GIB:,.1f} GiB {who}, "
                         f"which has {have / GIB:,.1f} GiB; try {larger_zero(cfg, mesh)}--tp {2 * cfg.tp} or "
                         f"--pp {2 * cfg.pp} on more devices, or a smaller --n-embd")


def activation_bytes(cfg, mesh, vocab_size):
    """Return the bytes that this process and its step take on a CPU besides the state, at least.

    A tiny model of 96 sequences was counted at 1.3 GiB and took 1.5.
    """
    parts = memory(cfg, mesh, vocab_size, choose(cfg, mesh, torch.device("cpu")))
    # Without a fused kernel there are the logits, their softmax and its gradient.
    return PROCESS + parts["activations"] + 3 * parts["logits"]


def check_activations(cfg, mesh, vocab_size, world, state):
    """Raise ValueError if a step and its state, bytes, do not fit into a node's memory; warn if they may not.

    The ranks of the node hold as much as this one. The --micro-batch to try fits the layout, too.
    """
    have = host_memory()
    needed = state + world.local_size * activation_bytes(cfg, mesh, vocab_size)
    if needed <= have or state > have:
        free = available_memory()
        if world.local_rank == 0 and state <= have and 0 < free < needed:
            warn(f"a step takes about {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB of this node are "
                 "free: the kernel may kill the run; a smaller --micro-batch takes less")
        return
    hint = "try --recompute full, or a smaller --seq-len or --n-embd"
    size = cfg.micro_batch // 2
    while size:
        smaller = dataclasses.replace(cfg, micro_batch=size)
        total = state + world.local_size * activation_bytes(smaller, mesh, vocab_size)
        if total <= 0.8 * have and fits(smaller, world.size):
            hint = f"try --micro-batch {size}"
            break
        size //= 2
    raise ValueError(f"a step of --micro-batch {cfg.micro_batch} sequences of {cfg.seq_len} tokens takes "
                     f"about {needed / GIB:,.1f} GiB with {ranks_here(world)}, "
                     f"which has {have / GIB:,.1f} GiB; {hint}")


def ranks_here(world):
    """Return in words how many ranks share the memory of this node."""
    return "1 rank on this node" if world.local_size == 1 else f"{world.local_size} ranks on this node"


def available_memory(path="/proc/meminfo"):
    """Return the bytes that processes of this machine may take now, or 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def larger_zero(cfg, mesh):
    """Return the --zero, and a comma, that would share out more; "" if there is none."""
    if mesh.dpcp.size == 1:  # there are no replicas to share with
        return ""
    if 0 < cfg.shard < mesh.dpcp.size:
        return "a larger --shard, "
    if not cfg.zero:
        return "--zero 1, "
    if cfg.zero < 3 and mesh.pp.size == 1:
        return "--zero 3, "
    return ""


def host_memory(groups="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """Return the bytes that the processes of this node may use together.

    They are those of the machine, or of a control group that this process is in (a container, a batch job).
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # not Linux
        for line in Path(groups).read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds not in ("", "memory"):
                continue
            file = "memory.limit_in_bytes" if kinds else "memory.max"  # versions 1 and 2
            folder = Path(root, kinds, name.lstrip("/"))
            for group in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    limits.append(int((group / file).read_text()))
    return min(limits)

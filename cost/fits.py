"""Whether a model fits into the memory that these ranks have."""
import contextlib
import dataclasses
import os
from pathlib import Path

from cost.memory import GIB, state_bytes
from fast.choose import choose
from ops.accelerator import total_memory


def check_memory(cfg, mesh, vocab_size, world):
    """Raise ValueError, with numbers, if weights, gradients and optimizer state exceed this rank's memory.

    Activations are not counted: what passes may still be too large.
    """
    choice = choose(cfg, mesh, world.device, lambda *_: True)  # at best: no rank is asked what it can reach

    def need(stage):
        pp = dataclasses.replace(mesh.pp, rank=stage)
        return sum(state_bytes(cfg, dataclasses.replace(mesh, pp=pp), vocab_size, choice).values())

    needed = need(mesh.pp.rank)
    if world.device.type == "cpu":  # the ranks of a node share its memory; the others need this much at least
        needed += (world.local_size - 1) * min(need(stage) for stage in range(mesh.pp.size))
        have = host_memory()
        who = f"with {world.local_size} ranks on this node"
    else:
        have = total_memory(world.device)
        who = f"on {world.device} of rank {world.rank}"
    if needed > have > 0:
        raise ValueError(f"weights, gradients and optimizer state alone take {needed / GIB:,.1f} GiB {who}, "
                         f"which has {have / GIB:,.1f} GiB; try {larger_zero(cfg, mesh)}--tp {2 * cfg.tp} or "
                         f"--pp {2 * cfg.pp} on more devices, or a smaller --n-embd")


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

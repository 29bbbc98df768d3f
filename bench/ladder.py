"""What each fast part brings: the step of W1, G2 and W2b with one part after the other turned off.

    torchrun --nproc-per-node 4 bench/ladder.py                      (or mpiexec; python on one GPU)
    python bench/ladder.py W1 --switches graph head

    graph          the step is not replayed as a CUDA graph: the host launches each kernel
    Triton         the torch twins of ops/ in the place of the Triton kernels; experts lose the graph, too
    compile        no torch.compile
    peer copies    NCCL moves gradients, weights and the experts' rows
    fused head     head, softmax and loss as autograd composes them
    algorithms     products by the algorithms that cuBLAS chooses, unmeasured
    all            none of these

Each row turns off one part of the whole, the last row all of them. A switch is left out where the workload
does not use the part. A row is the median of the second half of the steps on the slowest rank, and is printed
when it is measured. A row that fails on one GPU, for want of memory for example, says why, and the next one
follows. On a CPU each workload is a tiny model of the same kind, and only compile is there.
"""
import collections
import contextlib
import dataclasses
import gc
import statistics
import sys
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from common import read_flags, start
from runtime.launch import launch, shutdown

import torch
import torch.nn.functional as F
from speed import LAYOUTS, WORKLOADS, forget_memory
from training import Training
from tyro.conf import Positional

import fast.choose
from fast.choose import choose
from interface.command_line import parse
from ops import backend
from ops.cross_entropy import IGNORE
from parallel import make_mesh

NAMES = ("graph", "triton", "compile", "peer-copies", "head", "algorithms")
TINY = ("--n-layer 2 --n-embd 32 --n-head 2 --n-kv-head 2 --ffn-hidden 64 --seq-len 32 --vocab-size 256 "
        "--micro-batch 2 --dtype fp32")


@dataclass(frozen=True)
class Flags:
    workloads: Positional[tuple[Literal[tuple(WORKLOADS)], ...]] = ("W1", "G2", "W2b")  # of bench/speed.py
    switches: tuple[Literal[NAMES], ...] = NAMES  # which parts are turned off
    steps: int = 40  # steps of each row; the second half counts

    RANGES = {"steps": (4, 10**6)}


class PlainHead:
    """ops.cross_entropy.LinearCrossEntropy as autograd composes it."""

    @staticmethod
    def apply(x, w, target, used, bias=None):
        logits = F.linear(x, w, bias)[:, :used]
        logits = logits.to(torch.promote_types(x.dtype, torch.float32))
        return F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)


def workload(name, world):
    """Return the Config of a workload of bench/speed.py on these ranks."""
    layout = ""
    if world.size > 1:
        layout = LAYOUTS.get(name, "--zero 1").format(gpus=world.size)
    tiny = TINY if world.device.type == "cpu" else ""
    experts = f"--n-experts {max(4, world.size)}" if tiny and "moe" in WORKLOADS[name] else ""
    return parse([*WORKLOADS[name].split(), *layout.split(), *tiny.split(), *experts.split()],
                 data="synthetic")


def parts_in_use(cfg, world):
    """Return the names of the switches that change something for this Config. Collective over the world."""
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, n_experts=cfg.n_experts, cp=cfg.cp)
    choice = choose(cfg, mesh, world.device)
    in_use = {"graph": choice.graph,
              "triton": world.device.type in backend.TRITON_DEVICES,
              "compile": cfg.compile,
              "peer-copies": choice.peer_copies or choice.symm_mem,
              "head": world.device.type != "cpu" and mesh.tp.size == 1,
              "algorithms": choice.measured}
    return [name for name in NAMES if in_use[name]]


@contextlib.contextmanager
def turned_off(names):
    """Within this context, the parts `names` are off. Yield what Training() is not to choose."""
    not_chosen = {"graph": ("graph",), "peer-copies": ("peer_copies", "symm_mem"),
                  "algorithms": ("measured",)}
    with contextlib.ExitStack() as stack:
        if "triton" in names:
            stack.enter_context(mock.patch.object(backend, "TRITON_DEVICES", ()))
        if "head" in names:
            stack.enter_context(mock.patch.object(fast.choose, "LinearCrossEntropy", PlainHead))
        yield [field for name in names for field in not_chosen.get(name, ())]


def milliseconds(cfg, world, off, steps):
    """Return (ms of a step on the slowest rank, whether the step is a graph) with the parts `off` off."""
    gc.collect()
    forget_memory(world.device)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what was compiled has the parts of the row before
    if "compile" in off:
        cfg = dataclasses.replace(cfg, compile=False)
    with turned_off(off) as without, world.everyone.input():
        training = Training(cfg, world, without)
        times, *_ = training.run(steps)
    [ms] = world.everyone.maximum([statistics.median(times[steps // 2:])])  # one number from each rank to all
    return ms, training.graph


def ladder(cfg, world, switches, steps):
    """Yield (what is off, ms, whether the step is a graph), the whole first; (what is off, why, None)."""
    in_use = [name for name in parts_in_use(cfg, world) if name in switches]
    rungs = [("nothing", [])] + [(name, [name]) for name in in_use]
    if len(in_use) > 1:
        rungs.append(("all", in_use))
    for title, off in rungs:
        yield title, *measured(cfg, world, off, steps)


def measured(cfg, world, off, steps):
    """Return what milliseconds() does, or (why, None) if it fails on a single GPU.

    The ranks of several GPUs would wait for the one that failed. Its exception ends them.
    """
    try:
        return milliseconds(cfg, world, off, steps)
    except Exception as e:  # for want of memory, or what a compiler lacks
        if world.size > 1:
            raise
        return f"failed: {' '.join(str(e).split())}"[:200], None


def head_of(name):
    """Return the first line of a workload's ladder."""
    return f"{name:6}{'off':>12}{'ms':>10}{'of all on':>11}  graph"


def line_of(title, ms, is_graph, whole):
    """Return the line of a row. whole: ms of the row with all parts on, or None if it failed."""
    if is_graph is None:
        return f"{'':6}{title:>12}  {ms}"
    share = f"{ms / whole:11.2f}" if whole else f"{'-':>11}"
    return f"{'':6}{title:>12}{ms:10.2f}{share}  {'yes' if is_graph else 'no'}"


def show(name, rows):
    """Print a workload's ladder, each row as it comes."""
    print(head_of(name), flush=True)
    whole = None
    for title, ms, is_graph in rows:
        if title == "nothing" and is_graph is not None:
            whole = ms
        print(line_of(title, ms, is_graph, whole), flush=True)


def main(argv=None):
    flags = read_flags(Flags, argv, "ladder.py [WORKLOAD...]", "Time train.py's step with one fast part "
                       "after the other turned off: a table for each workload.")
    world = launch(timeout=300)
    for name in flags.workloads:
        with world.everyone.input():
            cfg = workload(name, world)
        rows = ladder(cfg, world, flags.switches, flags.steps)
        if world.rank == 0:
            show(name, rows)
        else:
            collections.deque(rows, maxlen=0)  # the other ranks measure, and print nothing
    shutdown(world)


if __name__ == "__main__":
    start(main)

"""The layout matrix on this host's GPUs: torchrun ... bench/gpu_matrix.py [PART...] [--portable]

1) fp64        every layout of tests/test_layouts.py for this number of GPUs, over NCCL, equals one
               GPU to 1e-10 in losses, norms, every gradient, every parameter and moment
2) fp32, bf16  the losses of the same layouts equal those of one GPU within rounding
3) replicas    after 20 bf16 steps replicas hold the same bits, and a second run holds them too
4) graph       20 bf16 steps as one CUDA graph give the losses of 20 steps without a graph
5) sync        the MoE layer never synchronises GPU and host, torch.cuda.set_sync_debug_mode
               says: with a capacity, dropless on one rank, and dropless over all ranks through
               symmetric memory

--portable: experts multiply by our Triton kernels also in bf16 on Hopper; in fp32 they always do.
"""
import sys
from dataclasses import dataclass
from typing import Literal

from common import ROOT, read_flags, start
from runtime.launch import World, exit_together, launch, shutdown

import torch
from moe_layer import forward, moe_layer
from training import Training
from tyro.conf import Positional

sys.path.insert(0, str(ROOT / "tests"))

import numpy as np
import test_layouts as matrix

import moe
from config import PRESETS, Config
from fast import symm_mem
from fast.choose import Choice, has_cuda_api
from ops import grouped_mm
from ops.checksum import checksum
from parallel import make_mesh

FAMILIES = {"llama": matrix.LLAMA, "gpt2": matrix.GPT2, "dropless": matrix.MOE, "capacity": matrix.CAPACITY,
            "bert": matrix.BERT}
# 16 wide heads: the GPU's attention and grouped kernels need rows of a multiple of 16 bytes
SHAPE = dict(n_embd=64, ffn_hidden=96)
PARTS = ("fp64", "fp32", "bf16", "replicas", "graph", "sync")
STEPS = 20


@dataclass(frozen=True)
class Flags:
    parts: Positional[tuple[Literal[PARTS], ...]] = PARTS  # which of these checks, in any order; default: all
    portable: bool = False  # experts multiply by our Triton kernels, as on GPUs that torch has no kernel for


def check_layouts(world, dtype):
    """Compare every layout of this world size with one rank -> (layouts, worst relative error). The error is
    that of any element under fp64, of the losses under bf16."""
    layouts = [(family, batch, layout) for family in FAMILIES
               for n, batch, layout in (matrix.MOE_LAYOUTS if "n_experts" in FAMILIES[family]
                                        else matrix.LAYOUTS)
               if n == world.size]
    layouts += [(family, batch, layout) for family, n, batch, layout in matrix.CP_LAYOUTS if n == world.size]
    worst = 0.0
    for family, batch, layout in layouts:
        if world.rank == 0:
            print(f"  {dtype} {family} {layout}", flush=True)
        base = dict(FAMILIES[family], **SHAPE, micro_batch=2, dtype=dtype)
        want = matrix.run(World(device=world.device), base, batch, *matrix.capacity_ranks(base, layout))
        seen = matrix.run(world, dict(base, **layout), batch)
        results = world.axis.gather_objects(seen)  # small models: what each rank knows, over the world
        if world.rank == 0:
            error = worst_error(f"{family} {layout}", base, want, seen, results)
            worst = max(worst, error)
    return len(layouts), worst


def worst_error(name, flags, want, seen, results):
    """-> the worst error of a layout, relative to tests/test_layouts.scale; AssertionError where it is too
    large. want: one rank's run, seen: rank 0's, results: those of all ranks."""
    expected, got = np.array(want["stats"]), np.array(seen["stats"])
    if flags["dtype"] != "fp64":
        error = np.abs(got[:, 0] / expected[:, 0] - 1).max()
        assert error < 1e-2, f"{name}: losses {got[:, 0]} and {expected[:, 0]}"
        return error
    np.testing.assert_allclose(got[:, [0, 1, 3]], expected[:, [0, 1, 3]], rtol=1e-10, err_msg=name)
    whole, pieces, worst = matrix.assemble([want]), matrix.assemble(results), 0.0
    for tensor, t in whole.items():
        error = np.abs(pieces[tensor] - t).max() / matrix.scale(tensor, t, flags)
        assert error < 1e-10, f"{name} {tensor}: {error}"
        worst = max(worst, error)
    return worst


def fitting(world, layouts):
    """-> [(family, flags)] of the layouts whose axes divide the number of ranks, 16 sequences per step in
    micro-batches of 2; under ZeRO also in one micro-batch, the case in which gradients and weights travel as
    peer-to-peer copies."""
    out = []
    for family, layout in layouts:
        if all(world.size % layout.get(axis, 1) == 0 for axis in ("tp", "cp", "pp", "ep")):
            flags = dict(FAMILIES[family], **SHAPE, dtype="bf16", ep_slack=1.5, global_batch=16,
                         data="synthetic", **layout)
            dp = world.size // layout.get("tp", 1) // layout.get("cp", 1) // layout.get("pp", 1)
            sizes = (2, 16 // dp) if layout.get("zero") else (2,)
            out += [(family, dict(flags, micro_batch=size)) for size in sizes]
    return out


def weights_of(training):
    """-> {name: (ranks that hold the same, checksum)} of the weights; of ZeRO-3 this rank's slices, which
    nobody else holds."""
    if training.cfg.zero == 3:
        return {b.names[0]: ((training.mesh.world.rank,), checksum(b.own).tolist())
                for b in training.dp.buckets}
    return {name: (getattr(training.mesh, p.reduce).ranks, checksum(p).tolist())
            for name, p in training.model.named_parameters()}


def replicas_and_repeats(world):
    """Train layouts with replicas, each twice -> parameters compared. AssertionError: the bits of a parameter
    differ between two ranks that hold it, or between the two runs."""
    checked = 0
    layouts = (("llama", {}), ("llama", dict(zero=1)), ("llama", dict(tp=2, zero=1)),
               ("gpt2", dict(pp=2)), ("dropless", dict(ep=4)),
               ("dropless", dict(ep=2, zero=1)), ("capacity", dict(tp=2, ep=4)),
               ("llama", dict(cp=2, zero=1)), ("dropless", dict(cp=2, ep=2)), ("llama", dict(zero=2)),
               ("llama", dict(zero=3)), ("dropless", dict(zero=3)), ("dropless", dict(ep=2, zero=3)))
    for family, flags in fitting(world, layouts):
        prints = []
        for _ in range(2):
            training = Training(Config(**flags), world, graph=False)
            training.run(STEPS)
            prints.append(weights_of(training))
        ranks = world.axis.gather_objects(prints[0])  # two integers per parameter, over the world
        for name, (group, bits) in prints[0].items():
            for r in group:
                assert ranks[r][name][1] == bits, (f"{family} {flags}: {name} differs between ranks "
                                                   f"{world.rank} and {r}")
                checked += 1
        assert prints[0] == prints[1], f"{family} {flags}: two runs differ"
    return checked


def graphs(world):
    """Train layouts with and without a CUDA graph -> (runs, worst relative difference of a loss, steps that
    were redone because buffers overflowed)"""
    worst, redone = 0.0, 0
    layouts = fitting(world, (
        ("llama", {}), ("llama", dict(zero=1)), ("gpt2", dict(tp=2, zero=1)), ("capacity", dict(ep=4)),
        ("llama", dict(recompute="full")), ("gpt2", dict(dropout=0.2)),
        ("gpt2", dict(tp=2, zero=1, dropout=0.2)), ("dropless", dict(ep=2, recompute="full")),
        ("dropless", dict(zero=1)), ("dropless", dict(ep=4)), ("dropless", dict(ep=2, zero=1)),
        ("dropless", dict(ep=4, zero=1)), ("gpt2", dict(cp=2, zero=1, dropout=0.2)),
        ("dropless", dict(cp=2, ep=2)), ("bert", dict(zero=1)), ("bert", dict(tp=2)),
        ("bert", dict(cp=2))))
    for family, flags in layouts:
        seen = []
        for graph in (False, True):
            training = Training(Config(**flags), world, graph=graph)
            seen.append(np.array([training.step(training.batches(), full=True).item() for _ in range(STEPS)]))
        redone += training.overflows()[0] or 0
        error = np.abs(seen[1] / seen[0] - 1).max()
        assert error < 1e-2, f"{family} {flags}: {seen}"
        worst = max(worst, error)
    return len(layouts), worst, redone


def no_hidden_sync(world):
    """Run the MoE layer in a mode in which torch raises RuntimeError when the host waits for the GPU."""
    for factor, ep in ((0.0, 1), (1.0, 1), (0.0, world.size)):
        cfg = Config(**dict(PRESETS["moe-4b"], capacity_factor=factor, ep=ep))
        one = World(device=world.device)
        dispatcher = Choice(True, True, False, False).dispatcher(cfg) if ep > 1 else moe.plain_dispatcher
        mesh = make_mesh(world, ep=ep) if ep > 1 else make_mesh(one)
        layer = moe_layer(cfg, mesh, world.device, dispatcher)
        if ep > 1:
            symm_mem.allocate([layer], ep * 16384)
            layer.dispatcher.rows_in_use = ep * 16384
        x = torch.randn(16384, cfg.n_embd, device=world.device, dtype=torch.bfloat16, requires_grad=True)
        for i in range(3):
            torch.cuda.set_sync_debug_mode("error" if i == 2 else "default")  # the first two warm up
            y, aux = forward(layer, x)
            torch.autograd.backward([y, aux], [torch.ones_like(y), None])
        torch.cuda.set_sync_debug_mode("default")


def main(argv=None):
    flags = read_flags(Flags, argv, "gpu_matrix.py [PART...]", __doc__)
    world = launch(timeout=40)
    with exit_together(world):
        if world.size == 1 or world.device.type == "cpu":
            raise ValueError("gpu_matrix.py needs several GPUs; the CPU's matrix is tests/test_layouts.py")
        if {"graph", "sync"} & set(flags.parts) and not has_cuda_api(world.device):
            raise ValueError(f"graph and sync need CUDA, the device is {world.device.type}; try "
                             "gpu_matrix.py fp64 bf16 replicas")
    say = print if world.rank == 0 else lambda *a, **k: None
    if flags.portable:
        grouped_mm.use_torch = lambda x, w: False
    for dtype in ("fp64", "fp32", "bf16"):
        if dtype in flags.parts:
            n, worst = check_layouts(world, dtype)
            say(f"{dtype}: {n} layouts of {world.size} ranks equal one rank, worst error {worst:.1e}",
                flush=True)
    if "replicas" in flags.parts:
        n = sum(world.axis.gather_objects(replicas_and_repeats(world)))  # one number per rank, over the world
        say(f"{STEPS} bf16 steps: {n} comparisons of replicated parameters, all equal to the bit; "
            "two runs as well", flush=True)
    if "graph" in flags.parts:
        n, worst, redone = graphs(world)
        say(f"{STEPS} bf16 steps as a CUDA graph: {n} runs, losses within {worst:.1e} of those without; "
            f"{redone} steps redone because buffers overflowed", flush=True)
    if "sync" in flags.parts:
        no_hidden_sync(world)
        say("no synchronisation in the MoE layer: capacity, dropless ep 1, "
            f"dropless ep {world.size} through symmetric memory", flush=True)
    shutdown(world)


if __name__ == "__main__":
    start(main)

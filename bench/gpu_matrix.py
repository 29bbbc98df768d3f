"""The layout matrix on this host's GPUs: torchrun ... bench/gpu_matrix.py [PART...] [--portable]

1) fp64        every layout of tests/test_layouts.py for this number of GPUs, over NCCL, equals one
               GPU to 1e-10 in losses, norms, every gradient, every parameter and moment
2) fp32, bf16  the losses of the same layouts equal those of one GPU within rounding
3) replicas    after 20 bf16 steps replicas hold the same bits, and a second run holds them too
4) graph       20 bf16 steps as one CUDA graph give the losses of 20 steps without a graph
5) flash       with windows and documents, fp32 steps through the flash kernel (fast/flex.py)
               give the losses of steps through the mask, with and without --compile, each rank
               by itself
6) attention   with flash-attn-4 (fast/flash.py), bf16 steps give the losses of steps with torch's
               attention
7) quack       with products by quack-kernels, bf16 steps give the losses of steps with torch's
8) sync        the MoE layer never synchronises GPU and host, torch.cuda.set_sync_debug_mode
               says: with a capacity, dropless on one rank, and dropless over all ranks through
               symmetric memory

--portable: experts multiply by our Triton kernels also in bf16 on Hopper; in fp32 they always do.
Without CUDA the parts that need it say that they are left out.
"""
import sys
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from common import ROOT, gather_objects, read_flags, start
from runtime.launch import World, launch, shutdown

import torch
from moe_layer import forward, moe_layer
from training import Documents, Training, portable
from tyro.conf import Positional

sys.path.insert(0, str(ROOT / "tests"))

import equality
import numpy as np
import test_layouts as matrix

from config import Config
from fast import symm_mem
from fast.choose import has_cuda_api
from interface.presets import PRESETS
from ops import products
from ops.checksum import checksum
from parallel import make_mesh

FAMILIES = {"llama": matrix.LLAMA, "gpt2": matrix.GPT2, "dropless": matrix.MOE, "capacity": matrix.CAPACITY,
            "bert": matrix.BERT}
# The flags of today's models, for the step as a graph
HEAD_NORMS = dict(qk_norm="head", mlp="relu2", logit_softcap=15.0, rope_scaling=(4.0, 0.5, 2.0, 8.0))
NORMS_AFTER = dict(qk_norm="all", norm_place="after")
# 16 wide heads: the GPU's attention and grouped kernels need rows of a multiple of 16 bytes
SHAPE = dict(n_embd=64, ffn_hidden=96)
PARTS = ("fp64", "fp32", "bf16", "replicas", "graph", "flash", "attention", "quack", "sync")
STEPS = 20
LAYER = PRESETS["moe-4b"]  # of sync: the flags of its layer, and how many rows go through it
ROWS = 16384

REPLICATED = (
    ("llama", {}), ("llama", dict(zero=1)), ("llama", dict(tp=2, zero=1)),
    ("gpt2", dict(pp=2)), ("dropless", dict(ep=4)),
    ("dropless", dict(ep=2, zero=1)), ("capacity", dict(tp=2, ep=4)),
    ("llama", dict(cp=2, zero=1)), ("dropless", dict(cp=2, ep=2)), ("llama", dict(zero=2)),
    ("llama", dict(zero=3)), ("dropless", dict(zero=3)), ("dropless", dict(ep=2, zero=3)),
    ("llama", dict(zero=1, shard=2)), ("dropless", dict(ep=2, zero=2, shard=2)),
    ("llama", dict(zero=3, shard=2)), ("llama", dict(tp=2, zero=3, shard=1)),
    ("dropless", dict(zero=1, moments_dtype="bf16")))

CAPTURED = (
    ("llama", {}), ("llama", dict(zero=1)), ("gpt2", dict(tp=2, zero=1)), ("capacity", dict(ep=2)),
    ("llama", dict(moments_dtype="bf16")),
    ("llama", dict(recompute="full")), ("gpt2", dict(dropout=0.2)),
    ("gpt2", dict(bias=False)), ("gpt2", dict(bias=False, tp=2, zero=1)),  # on Hopper GELU in the products
    ("gpt2", dict(tp=2, zero=1, dropout=0.2)), ("dropless", dict(ep=2, recompute="full")),
    ("dropless", dict(zero=1)), ("dropless", dict(ep=4)), ("dropless", dict(ep=2, zero=1)),
    ("dropless", dict(ep=4, zero=1)), ("gpt2", dict(cp=2, zero=1, dropout=0.2)),
    ("dropless", dict(cp=2, ep=2)), ("bert", dict(zero=1)), ("bert", dict(tp=2)),
    ("bert", dict(cp=2)), ("llama", dict(zero=1, shard=2)), ("dropless", dict(ep=2, zero=1, shard=2)),
    ("llama", dict(zero=1, **HEAD_NORMS)), ("llama", dict(tp=2, zero=1, **NORMS_AFTER)))

MASKED = (  # windows, and whether the samples have documents: more than one of the kernel's blocks of 128
    (dict(window=200), False), (dict(window=200, full_every=2), True), (dict(), True))
UNMASKED = (  # heads of 64 and of 128, causal, and BERT's of 64
    ("llama", {}), ("llama", dict(n_head=2, n_kv_head=1)), ("bert", {}))
# Of products by quack-kernels. The matrix's own learning rate lets losses jump, which magnifies rounding.
LARGER = dict(n_embd=256, ffn_hidden=512, seq_len=256, lr=1e-3)
BY_QUACK = (  # a layout with copies between GPUs, products with GELU, and experts
    ("llama", dict(zero=1)), ("gpt2", dict(bias=False, tp=2, zero=1)), ("dropless", dict(ep=2, zero=1)))
COMPILED = (False, True)
MEAN = 100  # tokens of a document


@dataclass(frozen=True)
class Flags:
    parts: Positional[tuple[Literal[PARTS], ...]] = PARTS  # which of these checks, in any order; default: all
    portable: bool = False  # experts multiply by our Triton kernels, as on GPUs that torch has no kernel for


def say_begun(world, what):
    """Print what begins, on one rank, so that a run that is cut off has said how far it came."""
    if world.rank == 0:
        print(f"  {what}", flush=True)


# -----------------------------------------------------------------------------
# Layouts (fp64, fp32, bf16): a layout computes what one rank computes

def layouts_of(size):
    """Return [(family, sequences per step, layout)]: tests/test_layouts.py's layouts for `size` ranks."""
    return [(family, batch, layout) for family, n, batch, layout, _ in matrix.cases()
            if n == size and family in FAMILIES and "n_layer" not in layout]


def check_layouts(world, dtype):
    """Compare every layout of this world size with one rank, and return a line about it.

    Its worst relative error is that of any element in fp64, of a loss in the other dtypes.
    """
    layouts = layouts_of(world.size)
    if not layouts:
        return f"{dtype}: left out, no layout of the table has this number of ranks, {world.size}"

    worst = 0.0
    for family, batch, layout in layouts:
        say_begun(world, f"{dtype} {family} {layout}")
        base = dict(FAMILIES[family], **SHAPE, micro_batch=2, dtype=dtype)
        want = matrix.run(World(device=world.device), base, batch, *equality.capacity_ranks(base, layout))
        seen = matrix.run(world, dict(base, **layout), batch)
        results = gather_objects(world, seen)  # small models: what each rank knows, over the world
        if world.rank == 0:
            error = worst_error(f"{family} {layout}", base, want, seen, results)
            worst = max(worst, error)
    return f"{dtype}: {len(layouts)} layouts of {world.size} ranks equal one rank, worst error {worst:.1e}"


def worst_error(name, flags, want, seen, results):
    """Return the worst error of a layout, relative to equality.scale.

    want: the run of one rank, seen: that of rank 0, results: those of all ranks.
    AssertionError: the error is too large.
    """
    expected, got = np.array(want["stats"]), np.array(seen["stats"])
    if flags["dtype"] != "fp64":
        error = np.abs(got[:, 0] / expected[:, 0] - 1).max()
        assert error < 1e-2, f"{name}: losses {got[:, 0]} and {expected[:, 0]}"
        return error

    found = equality.errors(equality.assemble(results), equality.assemble([want]), flags)
    for what, error in (equality.stats_errors(seen, want) | found).items():
        assert error < 1e-10, f"{name} {what}: {error}"
    return max(found.values())


# -----------------------------------------------------------------------------
# Replicas, and the step as a CUDA graph: train.py's own step, 20 times

def fitting(world, layouts):
    """Return [(name, flags)] of the layouts whose axes divide the number of ranks.

    A step has 16 sequences in micro-batches of 2. Under ZeRO the layout comes a second time with one
    micro-batch, the case in which gradients and weights travel as copies between GPUs.
    """
    fits = []
    for family, layout in layouts:
        if any(world.size % layout.get(axis, 1) for axis in ("tp", "cp", "pp", "ep")):
            continue
        if world.size // layout.get("tp", 1) % layout.get("shard", 1):
            continue
        flags = dict(FAMILIES[family], **SHAPE, dtype="bf16", ep_slack=1.5, global_batch=16,
                     data="synthetic", **layout)
        dp = world.size // layout.get("tp", 1) // layout.get("cp", 1) // layout.get("pp", 1)
        sizes = (2, 16 // dp) if layout.get("zero") else (2,)
        fits += [(f"{family} {layout}, micro-batches of {size}", dict(flags, micro_batch=size))
                 for size in sizes]
    return fits


def weights_of(training):
    """Return {name: (ranks that hold the same, checksum)} of the weights.

    Under ZeRO-3 these are this rank's slices, which its replicas hold, too: with --shard there are some.
    """
    if training.cfg.zero == 3:
        me = training.mesh.world.rank
        found = {}
        for bucket in training.data_parallel.buckets:
            group = bucket.replicas.ranks if bucket.replicas.size > 1 else (me,)
            found[bucket.names[0]] = group, checksum(bucket.own).tolist()
        return found
    return {name: (getattr(training.mesh, p.reduction_axis).ranks, checksum(p).tolist())
            for name, p in training.model.named_parameters()}


def check_replicas(world):
    """Train layouts with replicas, each twice, and return a line about it.

    AssertionError: the bits of a parameter differ between two ranks that hold it, or between the runs.
    """
    checked = 0
    for name, flags in fitting(world, REPLICATED):
        say_begun(world, f"replicas {name}")
        prints = []
        for _ in range(2):
            training = Training(Config(**flags), world, without=["graph"])
            training.run(STEPS)
            prints.append(weights_of(training))
        ranks = gather_objects(world, prints[0])  # two integers per parameter, over the world
        for parameter, (group, bits) in prints[0].items():
            for r in group:
                assert ranks[r][parameter][1] == bits, (f"{name}: {parameter} differs between ranks "
                                                        f"{world.rank} and {r}")
                checked += 1
        assert prints[0] == prints[1], f"{name}: two runs differ"
    n = sum(world.everyone.gather(checked))  # one number per rank, over the world
    return (f"{STEPS} bf16 steps: {n} comparisons of replicated parameters, all equal to the bit; "
            "two runs as well")


def crowded(batches):
    """Return micro-batches whose tokens are all the same, which go to the same experts: buffers overflow."""
    return [(torch.zeros_like(tokens), *others) for tokens, *others in batches]


def check_graphs(world):
    """Train layouts with and without a CUDA graph, and return a line about it.

    AssertionError: a loss differs by more than rounding.
    """
    if not has_cuda_api(world.device):
        return f"graph: left out, {world.device.type} has no CUDA graphs"
    worst, redone = 0.0, 0
    layouts = fitting(world, CAPTURED)
    for name, flags in layouts:
        say_begun(world, f"graph {name}")
        seen = []
        for graph in (False, True):
            training = Training(Config(**flags), world, [] if graph else ["graph"])
            losses = []
            for number in range(1, STEPS + 1):
                batches = training.batches()
                if number == STEPS - 1:
                    batches = crowded(batches)
                losses.append(training.step(batches, full=True).item())
            seen.append(np.array(losses))
        redone += training.overflows()[0] or 0
        worst = max(worst, difference(seen[1], seen[0], name, 1e-2, 1e-2))
    return (f"{STEPS} bf16 steps as a CUDA graph: {len(layouts)} runs, losses within {worst:.1e} of those "
            f"without; {redone} steps redone because buffers overflowed")


def difference(losses, expected, what, first=1e-4, most=2e-2):
    """Return by how much losses differ, relative. AssertionError: by more than first or most.

    The first loss shows rounding itself: 4e-6 on an H200 with flash-attn-4. The steps magnify it.
    """
    error = np.abs(losses / expected - 1)
    assert error[0] < first and error.max() < most, f"{what}: {losses} and {expected}"
    return error.max()


# -----------------------------------------------------------------------------
# Windows and documents: the flash kernel and the mask. Without them: flash-attn-4 and torch's attention

def losses_of(world, flags, has_documents, without, kernel="flex"):
    """Return the losses of STEPS steps of one rank, and whether its attention has the kernel.

    If it should have the kernel and does not, it takes no step.
    """
    training = Training(Config(**flags), World(device=world.device), without)
    has_kernel = getattr(training.model.blocks["0"].attn, kernel) is not None
    if not without and not has_kernel:
        return np.array([]), False
    if has_documents:
        training.source = Documents(training.vocab, training.cfg.seq_len, training.cfg.seed, MEAN)
    losses = [training.step(training.batches(), full=True).item() for _ in range(STEPS)]
    return np.array(losses), has_kernel


def check_flash(world):
    """Train with the flash kernel and with the mask, and return a line about it.

    AssertionError: a loss differs by more than rounding.
    """
    base = dict(FAMILIES["llama"], **SHAPE, seq_len=512, micro_batch=2, dtype="fp32", lr=3e-3, warmup=1,
                data="synthetic")
    worst = 0.0
    for masked, has_documents in MASKED:
        for is_compiled in COMPILED:
            flags = dict(base, **masked, compile=is_compiled)
            torch._dynamo.reset()  # else what differs between two runs would be compiled for all values
            losses, has_kernel = losses_of(world, flags, has_documents, [])
            if not has_kernel:
                return f"flash: left out, no flash kernel takes a mask here ({world.device.type})"
            expected, _ = losses_of(world, flags, has_documents, ["flex"])
            # On a CPU it is 1e-7, and a window that is a quarter too wide gives 1e-4 to 6e-4.
            worst = max(worst, difference(losses, expected, str(flags), 5e-5, 5e-5))
    return (f"{STEPS} fp32 steps through the flash kernel: {len(MASKED) * len(COMPILED)} runs, losses within "
            f"{worst:.1e} of those through the mask")


def of_library(family, **flags):
    """Return flags for which flash-attn-4 has kernels."""
    return dict(FAMILIES[family], **dict(SHAPE, n_embd=256), seq_len=512, micro_batch=2, dtype="bf16",
                lr=1e-3, warmup=1, data="synthetic") | flags


def check_attention(world):
    """Train with flash-attn-4 and with torch's attention, and return a line about it.

    AssertionError: a loss differs by more than the rounding of bf16.
    """
    worst = 0.0
    for family, heads in UNMASKED:
        flags = of_library(family, **heads)
        losses, has_kernel = losses_of(world, flags, False, [], "flash")
        if not has_kernel:
            return f"attention: left out, flash-attn-4 is not taken here ({world.device.type})"
        expected, _ = losses_of(world, flags, False, ["flash"], "flash")
        worst = max(worst, difference(losses, expected, f"{family} {heads}"))
    return (f"{STEPS} bf16 steps with flash-attn-4: {len(UNMASKED)} runs, losses within {worst:.1e} of those "
            "with torch's attention")


# -----------------------------------------------------------------------------
# Products by quack-kernels

def check_quack(world):
    """Train layouts with products by quack-kernels and by torch, and return a line about it.

    AssertionError: a loss differs by more than the rounding of bf16.
    """
    worst = 0.0
    layouts = fitting(world, BY_QUACK)
    for name, flags in layouts:
        say_begun(world, f"quack {name}")
        losses = []
        for without in ([], ["quack"]):
            torch._dynamo.reset()
            training = Training(Config(**{**flags, **LARGER}, compile=True), world, without)
            if not without and not training.quack:
                return f"quack: left out, quack-kernels is not taken here ({world.device.type})"
            # The library also takes these small products.
            with mock.patch.multiple(products, TILES=0, TILES_OF_SUM=0):
                steps = [training.step(training.batches()).item() for _ in range(STEPS)]
            losses.append(np.array(steps))
        worst = max(worst, difference(*losses, name))
    return (f"{STEPS} bf16 steps with quack-kernels: {len(layouts)} runs, losses within {worst:.1e} of those "
            "with torch's products")


# -----------------------------------------------------------------------------
# Hidden synchronisations: the host never waits for the GPU

def check_sync(world):
    """Run the MoE layer where torch sees hidden synchronisations, and return a line about it.

    RuntimeError: the host waited for the GPU.
    """
    if not has_cuda_api(world.device):
        return "sync: left out, torch sees hidden synchronisations under CUDA alone"
    for factor in (0.0, 1.0):
        run_layer(one_rank_layer(world, factor), ROWS, world.device)
    line = "no synchronisation in the MoE layer: capacity, dropless ep 1"
    if world.size == 1:
        return line
    run_layer(symmetric_layer(world), ROWS, world.device)
    return f"{line}, dropless ep {world.size} through symmetric memory"


def one_rank_layer(world, capacity_factor):
    """Return a MoE layer that has all of its experts on this rank."""
    cfg = Config(**dict(LAYER, capacity_factor=capacity_factor))
    return moe_layer(cfg, make_mesh(World(device=world.device)), world.device)


def symmetric_layer(world):
    """Return a dropless MoE layer with experts on all ranks; rows reach them through symmetric memory."""
    cfg = Config(**dict(LAYER, capacity_factor=0.0, ep=world.size))
    layer = moe_layer(cfg, make_mesh(world, ep=world.size), world.device)
    with world.device:
        layer.dispatcher = symm_mem.SymmMem(cfg, layer.mesh)
    symm_mem.allocate([layer], world.size * ROWS)
    layer.dispatcher.rows_in_use = world.size * ROWS
    return layer


def run_layer(layer, rows, device):
    """Go forward and backward three times. The first two warm up, torch watches the third."""
    x = torch.randn(rows, layer.cfg.n_embd, device=device, dtype=torch.bfloat16, requires_grad=True)
    for mode in ("default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        y, router_loss = forward(layer, x)
        torch.autograd.backward([y, router_loss], [torch.ones_like(y), None])
    torch.cuda.set_sync_debug_mode("default")


# -----------------------------------------------------------------------------

# By the name of the part; the others are dtypes of check_layouts()
CHECKS = {"replicas": check_replicas, "graph": check_graphs, "flash": check_flash,
          "attention": check_attention, "quack": check_quack, "sync": check_sync}


def main(argv=None):
    flags = read_flags(Flags, argv, "gpu_matrix.py [PART...]", __doc__)
    world = launch(timeout=40)
    if flags.portable:
        portable()
    for part in PARTS:
        if part in flags.parts:
            line = CHECKS[part](world) if part in CHECKS else check_layouts(world, part)
            if world.rank == 0:
                print(line, flush=True)
    shutdown(world)


if __name__ == "__main__":
    start(main)

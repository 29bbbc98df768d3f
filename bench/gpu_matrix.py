"""The layout matrix on the GPUs present: torchrun ... bench/gpu_matrix.py [fp64 bf16 replicas graph sync]

1) fp64 over the real collectives (nccl): every layout of tests/test_layouts.py for this world size against
   one rank, 1e-10 in losses, norms, every gradient, every parameter and moment
2) bf16: the same layouts within rounding of one rank's bf16
3) 20 bf16 steps, twice: replicas hold the same bits, and both runs do
4) 20 bf16 steps as one CUDA graph give the losses of 20 steps without
5) torch.cuda.set_sync_debug_mode("error") around the MoE layer: capacity mode, dropless ep 1 and dropless
   over all ranks through windows never synchronise
"""
import os.path
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import numpy as np
import test_layouts as matrix
import torch
import torch.distributed as dist

import moe
import train
from config import PRESETS, Config
from corpus.data import Synthetic
from fast.window import open_windows
from parallel import checksum, make_mesh
from runtime.launch import World, launch, shutdown

FAMILIES = {"llama": matrix.LLAMA, "gpt2": matrix.GPT2, "dropless": matrix.MOE, "capacity": matrix.CAPACITY}


def everywhere(world, value):
    out = [None] * world.size
    dist.all_gather_object(out, value)  # small models: what each rank knows, over the world
    return out


def alone(world):
    return World(device=world.device)


def check_layouts(world, dtype):
    """Every layout of this world size -> (checked, worst error). fp64: of any element; bf16: of losses."""
    layouts = [(family, batch, layout) for family in FAMILIES
               for n, batch, layout in (matrix.MOE_LAYOUTS if "n_experts" in FAMILIES[family]
                                        else matrix.LAYOUTS)
               if n == world.size]
    worst = 0.0
    for family, batch, layout in layouts:
        # 16 wide heads: the GPU's attention and grouped kernels want rows of 16 bytes
        if world.rank == 0:
            print(f"  {dtype} {family} {layout}", flush=True)
        base = dict(FAMILIES[family], micro_batch=2, dtype=dtype, n_embd=64, ffn_hidden=96)
        chunks = layout.get("tp", 1) if base.get("capacity_factor") else 1
        want = matrix.run(alone(world), base, batch, chunks)
        seen = matrix.run(world, dict(base, **layout), batch)
        results = everywhere(world, seen)
        if world.rank == 0:
            expected, got = np.array(want["totals"]), np.array(seen["totals"])
            if dtype == "fp64":
                np.testing.assert_allclose(got[:, [0, 1, 3]], expected[:, [0, 1, 3]], rtol=1e-10,
                                           err_msg=f"{family} {layout}")
                whole, pieces = matrix.assemble([want]), matrix.assemble(results)
                for name, t in whole.items():
                    error = np.abs(pieces[name] - t).max() / max(1e-4, np.abs(t).max())
                    worst = max(worst, error)
                    assert error < 1e-10, f"{family} {layout} {name}: {error}"
            else:
                error = np.abs(got[:, 0] / expected[:, 0] - 1).max()
                worst = max(worst, error)
                assert error < 1e-2, f"{family} {layout}: losses {got[:, 0]} against {expected[:, 0]}"
    return len(layouts), worst


def fitting(world, layouts):
    """-> [(family, flags)] of the layouts whose axes divide the ranks that there are; batches of 16 samples
    as micro-batches of 2, and under ZeRO as one, so that gradients and weights travel through windows too."""
    out = []
    for family, layout in layouts:
        if all(world.size % n == 0 for n in layout.values()):
            flags = dict(FAMILIES[family], dtype="bf16", n_embd=64, ffn_hidden=96, ep_slack=1.5,
                         global_batch=16, **layout)
            dp = world.size // layout.get("tp", 1) // layout.get("pp", 1)
            sizes = (2, 16 // dp) if layout.get("zero") else (2,)
            out += [(family, dict(flags, micro_batch=size)) for size in sizes]
    return out


def replicas_and_repeats(world):
    """20 bf16 steps of layouts with replicas, each twice: the bits of every parameter on every rank."""
    checked = 0
    layouts = (("llama", {}), ("llama", dict(zero=1)), ("llama", dict(tp=2, zero=1)),
               ("gpt2", dict(pp=2)), ("dropless", dict(ep=4)),
               ("dropless", dict(ep=2, zero=1)), ("capacity", dict(tp=2, ep=4)))
    for family, flags in fitting(world, layouts):
        cfg = Config(**flags)
        prints = []
        for _ in range(2):
            mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
            model, dp, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
            source = Synthetic(cfg.vocab_size, cfg.seq_len, 0)
            for step in range(1, 21):
                batches = train.micro_batches(cfg, mesh, source, (step - 1) * 16, 16, world.device)
                train.train_step(cfg, mesh, model, dp, opt, batches, step)
            opt.wait()
            prints.append({name: (getattr(mesh, p.reduce).ranks, checksum(p).tolist())
                           for name, p in model.named_parameters()})
        ranks = everywhere(world, prints[0])
        for name, (group, bits) in prints[0].items():
            for r in group:
                assert ranks[r][name][1] == bits, (f"{family} {flags}: {name} differs between ranks "
                                                   f"{world.rank} and {r}")
                checked += 1
        assert prints[0] == prints[1], f"{family} {flags}: two runs differ"
    return checked


def graphs(world):
    """-> (layouts, worst relative difference of a loss, steps done again for want of room)"""
    layouts, worst, redone = (("llama", {}), ("llama", dict(zero=1)), ("gpt2", dict(tp=2, zero=1)),
                              ("capacity", dict(ep=4)), ("dropless", dict(zero=1)), ("dropless", dict(ep=4)),
                              ("dropless", dict(ep=2, zero=1)), ("dropless", dict(ep=4, zero=1))), 0.0, 0
    layouts = fitting(world, layouts)
    for family, flags in layouts:
        cfg = Config(**flags)
        seen = []
        for recorded in (False, True):
            mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
            model, dp, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
            graph = train.recorded(cfg, mesh, model, dp, opt) if recorded else None
            source, losses = Synthetic(cfg.vocab_size, cfg.seq_len, 0), []
            for step in range(1, 21):
                batches = train.micro_batches(cfg, mesh, source, (step - 1) * 16, 16, world.device)
                totals, _ = train.train_step(cfg, mesh, model, dp, opt, batches, step, graph=graph)
                losses.append(totals[0].item())
            seen.append(np.array(losses))
        redone += graph.rooms.redone if graph.rooms else 0
        error = np.abs(seen[1] / seen[0] - 1).max()
        assert error < 1e-2, f"{family} {flags}: {seen}"
        worst = max(worst, error)
    return len(layouts), worst, redone


def no_hidden_sync(world):
    for factor, ep in ((0.0, 1), (1.0, 1), (0.0, world.size)):
        cfg = Config(**dict(PRESETS["moe-4b"], capacity_factor=factor, ep=ep))
        torch.set_default_dtype(torch.bfloat16)
        with world.device:
            layer = moe.MoE(cfg, make_mesh(world, ep=ep) if ep > 1 else make_mesh(alone(world)), None)
        torch.set_default_dtype(torch.float32)
        if ep > 1:
            layer.room = ep * 16384
            open_windows([layer], layer.room, world.device)
        for p in layer.parameters():
            p.data.normal_(0, 0.02)
        x = torch.randn(16384, cfg.n_embd, device=world.device, dtype=torch.bfloat16, requires_grad=True)
        for i in range(3):
            torch.cuda.set_sync_debug_mode("error" if i == 2 else "default")  # two rounds to warm up
            y, aux = layer(x, lambda f, *args: f(*args))
            torch.autograd.backward([y, aux], [torch.ones_like(y), None])
        torch.cuda.set_sync_debug_mode("default")


def main():
    world = launch(timeout=40)
    if world.size == 1 or world.device.type != "cuda":
        raise SystemExit("nanoshard: this needs several GPUs; the CPU's matrix is tests/test_layouts.py")
    say = print if world.rank == 0 else lambda *a, **k: None
    parts = sys.argv[1:] or ["fp64", "bf16", "replicas", "graph", "sync"]
    for dtype in ("fp64", "bf16"):
        if dtype in parts:
            n, worst = check_layouts(world, dtype)
            say(f"{dtype}: {n} layouts of {world.size} ranks equal one rank, worst error {worst:.1e}",
                flush=True)
    if "replicas" in parts:
        n = everywhere(world, replicas_and_repeats(world))
        say(f"20 bf16 steps: {sum(n)} comparisons of replicated parameters, all equal to the bit; "
            "two runs as well", flush=True)
    if "graph" in parts:
        n, worst, redone = graphs(world)
        say(f"20 bf16 steps as a CUDA graph: {n} runs, losses within {worst:.1e} of those without; "
            f"{redone} steps done again for want of room", flush=True)
    if "sync" in parts:
        no_hidden_sync(world)
        say("no synchronisation in the MoE layer: capacity, dropless ep 1, "
            f"dropless ep {world.size} through windows", flush=True)
    shutdown(world)


if __name__ == "__main__":
    main()

"""The reference workloads on the GPUs present, against the peers' figures and this machine's ceilings.

    torchrun --nproc-per-node 4 bench/speed.py W1 W2b G2 --json bench/results/4gpu.json   (or mpiexec)

Median of the last 30 of 60 steps, compilation and warm-up apart; train.py's own step on synthetic tokens.
TFLOP/s by both counts (REFERENCE.md's formula: attention whole, and halved for causality). More flags of
train.py: --flags "W2b: --ep 2".
"""
import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root: starts from anywhere

import torch
import torch.distributed as dist

import train
from config import check_layout, parse
from fast.window import in_use
from model import count_parameters, flops_per_token
from parallel import make_mesh
from runtime.launch import launch, shutdown
from runtime.log import peak_flops

WORKLOADS = {  # flags of train.py; G2 as nanoGPT trains it: no bias, no dropout
    "W1": "dense-210m",
    "W2a": "moe-4b --capacity-factor 1.0",
    "W2b": "moe-4b",
    "W3": "smol-1.7b --ffn-hidden 5632",
    "W3-8192": "smol-1.7b",
    "G2": "gpt2 --no-bias --micro-batch 64 --global-batch 0 --vocab-size 50304",
    "G2-32": "gpt2 --no-bias --micro-batch 32 --global-batch 0 --vocab-size 50304",
    "WP": "wordplay --vocab-size 65",
}
LAYOUTS = {"W2a": "--ep 4 --zero 1", "W2b": "--ep 4 --zero 1", "default": "--zero 1"}  # on four GPUs
PEERS = {  # tokens/s per GPU on the same H200s, REFERENCE.md: best peer, what ours must reach, by GPUs
    ("W1", 1): ("HF", 256.6e3, 400e3), ("W1", 4): ("torchtitan", 271.1e3, 390e3),
    ("W2b", 4): ("HF, no ep", 124.9e3, 240e3), ("W2a", 4): ("Megatron", 41.4e3, 240e3),
    ("W3", 4): ("torchtitan", 48.96e3, 57e3), ("W3-8192", 4): ("HF", 37.4e3, 47e3),
    ("G2", 1): ("nanoGPT", 535.6e3, 620e3), ("G2", 4): ("nanoGPT", 505.7e3, 605e3),
    ("G2-32", 4): ("nanoGPT", 478.2e3, 570e3), ("WP", 4): ("nanoGPT", 692.5e3, 820e3),
}


def milliseconds(f, n=20):
    """Mean of n calls after three, by events."""
    for _ in range(3):
        f()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n


def ceilings(world):
    """What this machine does today: matrix product, copy, all-reduce."""
    a, b = (torch.randn(8192, 8192, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    out = {"matmul_tflops": 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9}
    x, y = (torch.empty(2**30, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    out["copy_tb_s"] = 2 * x.numel() * 2 / milliseconds(lambda: y.copy_(x)) / 1e9
    if world.size > 1:
        x = x[:2**27]  # 256 MB
        ms = milliseconds(lambda: dist.all_reduce(x))
        out["all_reduce_gb_s"] = 2 * (world.size - 1) / world.size * x.numel() * 2 / ms / 1e6
    return out


def show_profile(world, step, n=3, rows=30):
    """Where the time of a step goes on rank 0: kernels by their own time, what they sum to, what the host
    needs."""
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n):
        step()
    host = (time.perf_counter() - began) / n * 1e3
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / n * 1e3
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as p:
        for _ in range(n):
            step()
        torch.cuda.synchronize()
    if world.rank == 0:
        kernels = sorted(((e.self_device_time_total / n / 1e3, e.count / n, e.key) for e in p.key_averages()
                          if e.self_device_time_total > 0), reverse=True)
        print(f"  step {wall:.1f} ms, host {host:.1f} ms, kernels sum to {sum(k[0] for k in kernels):.1f} ms")
        for ms, count, key in kernels[:rows]:
            print(f"  {ms:8.3f} ms x {count:5.0f}  {key[:100]}", flush=True)


def run(world, name, flags, steps, profile=False):
    cfg = parse(flags.split() + ["--data=synthetic"] * ("--data" not in flags))
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    check_layout(cfg, mesh, batch)
    source, _, vocab, _ = train.open_data(cfg, world)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model, dp, opt = train.build(cfg, mesh, vocab, world.device)
    graph = train.recorded(cfg, mesh, model, dp, opt)
    marks, first, losses = [], None, []
    for step in range(1, steps + 1):
        batches = train.micro_batches(cfg, mesh, source, (step - 1) * batch, batch, world.device)
        totals, _ = train.train_step(cfg, mesh, model, dp, opt, batches, step, False, graph)
        if step == 1 or step == steps:
            losses.append(totals[0].item())
            first = first or time.perf_counter() - began
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
    marks[-1].synchronize()
    if profile:
        show_profile(world, lambda: train.train_step(cfg, mesh, model, dp, opt, batches, steps, False, graph))
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)][-min(30, steps // 2):-1]
    slow = torch.tensor([statistics.median(times), torch.cuda.max_memory_reserved() / 2**30,
                         torch.cuda.max_memory_allocated() / 2**30])
    if world.size > 1:
        dist.all_reduce(slow, dist.ReduceOp.MAX)  # three numbers on the host: the slowest, the fullest
    ms, reserved, allocated = slow.tolist()
    rooms = graph and graph.rooms
    tokens = batch * cfg.seq_len / world.size
    full, causal = (tokens * f / ms / 1e9 for f in flops_per_token(cfg, vocab))
    peer, theirs, goal = PEERS.get((name, world.size), ("none", None, None))
    rate = tokens / ms * 1e3
    return {"workload": name, "flags": flags, "gpus": world.size, "ms": ms, "tok_s_gpu": rate, "tflops": full,
            "tflops_causal": causal, "mfu": full * 1e12 / (peak_flops(world.device) or float("nan")),
            "reserved_gib": reserved, "allocated_gib": allocated, "first_step_s": first, "loss": losses,
            "parameters": count_parameters(cfg, vocab)["total"], "graph": graph is not None, "peer": peer,
            "windows_gib": in_use() / 2**30,
            "redone": rooms and rooms.redone, "slack": rooms and rooms.slack,
            "ratio_to_peer": rate / theirs if theirs else None,
            "ratio_to_goal": rate / goal if goal else None,
            "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--flags", default="", help="flags of train.py in the place of the default layout")
    parser.add_argument("--profile", action="store_true", help="also a step's kernels, by time, on rank 0")
    parser.add_argument("--json", default="", help="file to which each result is appended, a line each")
    args = parser.parse_args()
    world = launch(timeout=300)
    if world.device.type != "cuda":
        raise SystemExit("nanoshard: bench/speed.py needs a GPU")
    machine = ceilings(world)
    if world.rank == 0:
        print("ceilings: " + ", ".join(f"{k} {v:.1f}" for k, v in machine.items()), flush=True)
    for name in args.workloads:
        layout = args.flags or (LAYOUTS.get(name, LAYOUTS["default"]) if world.size > 1 else "")
        r = run(world, name, f"{WORKLOADS[name]} {layout}".strip(), args.steps, args.profile)
        gc.collect()
        torch._dynamo.reset()  # the next workload's shapes are new ones, not changed ones
        if world.rank == 0:
            ratio = "" if r["ratio_to_peer"] is None else (f"; {r['ratio_to_peer']:.2f} x {r['peer']}, "
                                                           f"{r['ratio_to_goal']:.2f} of the goal")
            beside = f" and {r['windows_gib']:.1f} of windows" if r["windows_gib"] else ""
            again = "" if r["slack"] is None else (f", {r['redone']} steps done again, "
                                                   f"room {r['slack']:.2f} x balanced")
            print(f"{name} ({r['flags']}): {r['ms']:.2f} ms, {r['tok_s_gpu'] / 1e3:.1f} k tok/s/GPU, "
                  f"{r['tflops']:.0f} TFLOP/s ({r['tflops_causal']:.0f} causal), MFU {100 * r['mfu']:.1f} %, "
                  f"{r['tflops_causal'] / machine['matmul_tflops']:.2f} of the matmul ceiling, "
                  f"{r['reserved_gib']:.1f} GiB{beside}, first step {r['first_step_s']:.1f} s"
                  f"{again}{ratio}", flush=True)
            if args.json:
                with open(args.json, "a") as f:
                    f.write(json.dumps({**r, **machine}) + "\n")
    shutdown(world)


if __name__ == "__main__":
    main()

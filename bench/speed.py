"""The workloads of bench/README.md on this host's GPUs, beside its ceilings.

    torchrun --nproc-per-node 4 bench/speed.py W1 W2b G2 --json bench/results/4gpu.jsonl   (or mpiexec)
    python bench/speed.py W2b --flags "--data data/stdlib"                                 (one GPU)

A row is the median of steps 30 to 60 on the slowest rank. Compilation and the first steps do not count. With
experts, whose routing is uneven at first, it is also that of steps 300 to 330. The step is train.py's own, on
synthetic tokens. TFLOP/s are counted twice: with attention in full, as Megatron-LM's papers do, and halved
for causality.
"""
import collections
import dataclasses
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import read_flags, start
from runtime.launch import launch, shutdown

import torch
import torch.distributed as dist
from timing import gpu_milliseconds, synchronize
from training import Training, gpu_memory, portable
from tyro.conf import Positional

from cost.gpus import kind_of
from cost.parameters import count_parameters, flops_per_token
from cost.step_time import peak_flops
from interface.command_line import parse
from interface.terminal import say
from ops.accelerator import device_name, total_memory
from plan import estimate

LLAMA_8B = ("llama-3.2-1b --n-layer 32 --n-embd 4096 --ffn-hidden 14336 --no-tied --rope-scaling 8 1 4 8192 "
            "--vocab-size 128256")  # Llama 3.1 8B
WORKLOADS = {  # flags of train.py; G2 as nanoGPT trains it: no bias, no dropout
    "W1": "dense-210m",
    "W2a": "moe-4b --capacity-factor 1.0",
    "W2b": "moe-4b",
    "W3": "smol-1.7b --ffn-hidden 5632",
    "W3-8192": "smol-1.7b",
    "1B": "llama-3.2-1b",  # adapters in the place of all weights: --flags "--lora 16"
    "7B": "llama-7b --micro-batch 2",  # two GPUs of 141 GB
    # Two GPUs of 141 GB also hold `--flags "--zero 3 --recompute selective"`, by plan.py.
    "8B": f"{LLAMA_8B} --seq-len 8192 --micro-batch 1 --recompute full",
    "G2": "gpt2 --no-bias --micro-batch 64 --global-batch 0 --vocab-size 50304",
    "G2-32": "gpt2 --no-bias --micro-batch 32 --global-batch 0 --vocab-size 50304",
    "WP": "wordplay --vocab-size 65",
    "BERT": "bert-345m",
    "SC": "shakespeare-char --vocab-size 65",
}
LAYOUTS = {  # on several GPUs; others: --zero 1
    "W2a": "--ep {gpus} --zero 1", "W2b": "--ep {gpus} --zero 1", "7B": "--zero 3",
    "8B": "--zero 3"}


@dataclass(frozen=True)
class Flags:
    # W1 W2a W2b W3 W3-8192 1B 7B 8B G2 G2-32 WP BERT SC
    workloads: Positional[tuple[Literal[tuple(WORKLOADS)], ...]]
    # steps of each workload, of which the last half count, at most 30; default: 60, with experts 330, of
    # which steps 30 to 60 (young routing) and 300 to 330 (settled) count
    steps: int = 0
    flags: str = ""  # flags of train.py for all workloads, in place of the default layout
    portable: bool = False  # experts multiply by our Triton kernels, as on GPUs that torch has no kernel for
    profile: bool = False  # also print the kernels of a step on rank 0, the slowest first
    json: str = ""  # file to which each result is appended, one line each

    RANGES = {"steps": (0, 10**6)}

    def check(self):
        if 0 < self.steps < 4:
            raise ValueError(f"--steps {self.steps} is not at least 4; try --steps 60")
        if not self.workloads:
            raise ValueError(f"name at least one workload of {', '.join(WORKLOADS)}")


def join_value(argv, flag):
    """Turn [..., flag, value, ...] into [..., flag=value, ...]: the value may begin with dashes itself."""
    argv = list(argv)
    if flag in argv[:-1]:
        i = argv.index(flag)
        argv[i:i + 2] = [f"{flag}={argv[i + 1]}"]
    return argv


def ceilings(world):
    """Measure the speed of this machine today: matrix product, copy, all-reduce."""
    a, b = (torch.randn(8192, 8192, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    out = {"matmul_tflops": 2 * 8192**3 / gpu_milliseconds(lambda: a @ b) / 1e9}
    x, y = (torch.empty(2**30, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    out["copy_tb_s"] = 2 * x.numel() * 2 / gpu_milliseconds(lambda: y.copy_(x)) / 1e9
    if world.size > 1:
        x = x[:2**27]  # 256 MB
        ms = gpu_milliseconds(lambda: dist.all_reduce(x))
        out["all_reduce_gb_s"] = 2 * (world.size - 1) / world.size * x.numel() * 2 / ms / 1e6
    return out


def show_profile(world, step, n=3, rows=30):
    """Print where the time of a step goes on rank 0.

    It prints the kernels by their own time, the sum of all kernels, and the time in which the host launches
    the step.
    """
    step()
    synchronize(world.device)
    began = time.perf_counter()
    for _ in range(n):
        step()
    host = (time.perf_counter() - began) / n * 1e3
    synchronize(world.device)
    wall = (time.perf_counter() - began) / n * 1e3
    activities = torch.profiler.supported_activities() - {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as p:
        for _ in range(n):
            step()
        synchronize(world.device)
    if world.rank == 0:
        kernels = sorted(((e.self_device_time_total / n / 1e3, e.count / n, e.key) for e in p.key_averages()
                          if e.self_device_time_total > 0), reverse=True)
        print(f"  step {wall:.1f} ms, host {host:.1f} ms, kernels sum to {sum(k[0] for k in kernels):.1f} ms")
        for ms, count, key in kernels[:rows]:
            print(f"  {ms:8.3f} ms x {count:5.0f}  {key[:77]}", flush=True)


def counted_steps(steps, has_experts):
    """Return (steps to take, [(first, last)]: which of them count). steps: --steps."""
    if steps:
        return steps, [(steps - min(30, steps // 2), steps)]
    return (330, [(30, 60), (300, 330)]) if has_experts else (60, [(30, 60)])


def window(world, first, last, times, paths):
    """Return what the steps after `first` up to `last` show: the slowest rank's median, and their paths.

    times, paths: of all steps (Training.run).
    """
    median = statistics.median(times[first:last - 1] or times[first:last])
    [ms] = world.everyone.maximum([median])  # one number from each rank to all, over the world
    counts = collections.Counter(paths[first:last])
    shares = {path: n / (last - first) for path, n in sorted(counts.items())}
    return {"steps": [first, last], "ms": ms, "paths": shares}


def planned_ms(cfg, world, vocab):
    """Return the milliseconds of a step that plan.py expects here; None for a GPU that it does not know.

    cfg: a Config with a global batch. vocab: the number of symbols, before padding.
    """
    gpu = kind_of(device_name(world.device), total_memory(world.device) / 2**30)
    return estimate(cfg, world.size, gpu, vocab)["ms"] if gpu else None


def forget_memory(device):
    """Return what torch's allocator keeps, and count its maxima from here on."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
        torch.get_device_module(device).reset_peak_memory_stats()


def measure(world, name, train_flags, steps, profile=False, *, make=Training):
    """Train one workload and return its row: time of the slowest rank, memory of the fullest.

    The row's `ms` and what follows from it are those of the first window. On a CPU, where torch counts no
    memory, the row has none. make(cfg, world): what trains (bench/peer_cell.py has other trainers).
    """
    with world.everyone.input():
        cfg = parse(train_flags.split(), data="synthetic")
        forget_memory(world.device)
        training = make(cfg, world)
    steps, counted = counted_steps(steps, cfg.n_experts > 0)
    times, losses, first_step, paths = training.run(steps)
    if profile:
        batches = training.batches()
        show_profile(world, lambda: training.step(batches))
    memory = gpu_memory(world.device) or (0, 0, 0)  # torch counts none on a CPU
    allocated, reserved, symmetric = memory
    # Two numbers from each rank to all, over the world.
    reserved, allocated = world.everyone.maximum([reserved, allocated])
    windows = [window(world, first, last, times, paths) for first, last in counted]
    planned = planned_ms(dataclasses.replace(cfg, global_batch=training.batch), world, training.vocab)
    ms = windows[0]["ms"]
    redone, slack = training.overflows()
    tokens = training.batch * cfg.seq_len / world.size
    full, causal = (tokens * f / ms / 1e9 for f in flops_per_token(cfg, training.vocab))
    return {"workload": name, "flags": train_flags, "gpus": world.size, "ms": ms, "planned_ms": planned,
            "tok_s_gpu": tokens / ms * 1e3, "tflops": full, "tflops_causal": causal,
            "mfu": full * 1e12 / (peak_flops(world.device) or float("nan")),
            "reserved_gib": reserved, "allocated_gib": allocated, "windows_gib": symmetric,
            "first_step_s": first_step, "loss": losses,
            "parameters": count_parameters(cfg, training.vocab)["total"],
            "graph": training.graph, "attention": training.attention, "quack": training.quack,
            "redone": redone, "slack": slack,
            "windows": windows,
            "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}


def times_of(windows):
    """Return the milliseconds of each window in words, and how many of its steps were no graphs."""
    words = []
    for w in windows:
        first, last = w["steps"]
        others = "".join(f", {share:.0%} {path}" for path, share in w["paths"].items() if path != "graph")
        words.append(f"{w['ms']:.2f} ms in steps {first} to {last}{others}")
    return "; ".join(words)


def show(r, machine):
    """Print a row of measure(), folded."""
    beside = f" and {r['windows_gib']:.1f} of symmetric memory" if r["windows_gib"] else ""
    planned = "" if r["planned_ms"] is None else f" (plan.py: {r['planned_ms']:.2f} ms)"
    redone = "" if r["slack"] is None else (f", {r['redone']} steps redone, "
                                            f"buffers {r['slack']:.2f} x balanced")
    say(f"{r['workload']} ({r['flags']}): {times_of(r['windows'])}{planned}, "
        f"{r['tok_s_gpu'] / 1e3:.1f} k tok/s/GPU, "
        f"{r['tflops']:.0f} TFLOP/s ({r['tflops_causal']:.0f} causal), MFU {100 * r['mfu']:.1f} %, "
        f"{r['tflops_causal'] / machine['matmul_tflops']:.2f} of the matmul ceiling, "
        f"{r['reserved_gib']:.1f} GiB{beside}, first step {r['first_step_s']:.1f} s{redone}")


def main(argv=None):
    argv = join_value(sys.argv[1:] if argv is None else argv, "--flags")
    flags = read_flags(Flags, argv, "speed.py WORKLOAD...", "Time train.py's step on the workloads. "
                       "Needs a GPU.")
    world = launch(timeout=300)
    with world.everyone.input():
        if world.device.type == "cpu":
            raise ValueError("bench/speed.py needs a GPU")
        if flags.portable:
            portable()
        if flags.json and world.rank == 0:
            Path(flags.json).touch()  # a wrong path is reported now, not after the measurement
    machine = ceilings(world)
    if world.rank == 0:
        print("ceilings: " + ", ".join(f"{k} {v:.1f}" for k, v in machine.items()), flush=True)
    for name in flags.workloads:
        layout = LAYOUTS.get(name, "--zero 1").format(gpus=world.size) if world.size > 1 else ""
        layout = flags.flags or layout
        row = measure(world, name, f"{WORKLOADS[name]} {layout}".strip(), flags.steps, flags.profile)
        gc.collect()
        torch._dynamo.reset()  # else it would compile the next workload for varying shapes
        if world.rank == 0:
            show(row, machine)
            if flags.json:
                with open(flags.json, "a") as f:
                    f.write(json.dumps({**row, **machine}) + "\n")
    shutdown(world)


if __name__ == "__main__":
    start(main)

"""Does this machine train? python bench/smoke.py, or the same under mpiexec, torchrun and srun, without data.

    1) one line per node               runtime/launch.py: launcher, ranks, device, backend
    2) sums over all ranks             the smallest collective and a large one, with known answers
    3) all-reduces of growing size     how fast the ranks exchange data: eight rows, 1 KiB to 16 MiB
    4) 100 steps of a small MLP        our own data parallelism (parallel.py), random data, Adam; a plot of dt
    5) files in --out                  metrics.jsonl, a plot per metric, a profile, an offline wandb run

It prints fewer than 50 lines on one node.

The test follows ezpz.test_dist (github.com/saforem2/ezpz, July 2024). dt, dtf and dtb are the times of
a step, of forward and of backward that the device took.
"""
import time

BEGAN = time.perf_counter()  # before torch: importing it is a good part of the whole run
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import read_flags, start
from runtime.launch import launch, shutdown

import torch
import torch.distributed as dist
from timing import slowest

import plot
from config import Outcome
from ddp import DataParallel
from interface.terminal import say
from ops.checksum import checksum
from optim import AdamW
from parallel import MAX, make_mesh
from runtime.profiles import end_profile, start_profile
from runtime.timing import Stopwatch

WIDTHS = (128, 1024, 512, 256, 128)
METRICS = ("loss", "sps", "dt", "dtf", "dtb")
LARGE = 1 << 24, 5 << 26  # elements of the large sum, in fp32, on CPUs and on GPUs: 64 MiB and 1.25 GiB
SIZES = [2**10 * 4**i for i in range(8)]  # bytes, 1 KiB to 16 MiB


@dataclass(frozen=True)
class Flags:
    iters: int = 100  # optimizer steps
    batch: int = 64  # samples per rank and step
    lr: float = 1e-3  # Adam's learning rate
    seed: int = 0  # of the weights; the data of rank r has seed + r
    log_every: int = 25  # iterations between printed lines
    out: Path = Path("out/smoke")  # folder of the files left behind
    wandb: Literal["off", "offline", "online"] = "offline"  # Weights & Biases, from rank 0

    RANGES = {"iters": (1, 10**9), "batch": (1, 2**20)}


def check_sum(world):
    """Sum the rank numbers over all ranks. RuntimeError: a rank does not get n (n - 1) / 2."""
    want = world.size * (world.size - 1) // 2
    total = world.axis.all_reduce(torch.tensor(world.rank, device=world.device)).item()  # one number, world
    if total != want:  # an uncaught exception on one rank ends all ranks
        raise RuntimeError(f"rank {world.rank}: all_reduce of rank ids gives {total} and not {want}")
    if world.rank == 0:
        print(f"all_reduce of rank ids 0..{world.size - 1}: {total}, expected {want}: ok")


def check_large_sum(world):
    """Sum one large buffer over all ranks, and compare every element. RuntimeError: some are wrong.

    On a fabric, sums above 1 GB have been wrong without a word.
    """
    if world.size == 1:
        return
    n = LARGE[world.device.type != "cpu"]
    pattern = torch.arange(n, dtype=torch.int32, device=world.device).remainder_(1021).float()
    total = pattern + world.rank
    world.axis.all_reduce(total)  # SUM of n numbers, over the world
    want = pattern * world.size + world.size * (world.size - 1) / 2  # whole numbers, which fp32 holds exactly
    wrong = (total != want).sum().item()
    if wrong:
        raise RuntimeError(f"rank {world.rank}: {wrong:,} of {n:,} numbers are wrong in a sum of "
                           f"{4 * n / 2**30:.2f} GiB; try NCCL_ALGO=Ring, and tell the site")
    if world.rank == 0:
        print(f"all_reduce of {4 * n / 2**30:.2f} GiB: all {n:,} sums as expected: ok")


def bandwidth(world, iters=5):
    """Print the time of an all-reduce, a row per size. collectives.py does this for every collective."""
    if world.size == 1:
        return
    if world.rank == 0:
        print("all_reduce, bytes         us    algbw    busbw GB/s")
    for size in SIZES:
        x = torch.zeros(size // 4, device=world.device)
        dist.all_reduce(x)  # SUM of size / 4 numbers, over the world: the warm-up at this size
        took = slowest(world, lambda x=x: dist.all_reduce(x), iters)  # the same
        algbw = size / took / 1e9
        busbw = algbw * 2 * (world.size - 1) / world.size  # the traffic on one link
        if world.rank == 0:
            print(f"{size:17d} {1e6 * took:10.0f} {algbw:8.3f} {busbw:8.3f}", flush=True)


def build(world, mesh, flags):
    """Return (model, data_parallel, adam). All replicas start with the weights of rank 0."""
    torch.manual_seed(flags.seed)
    layers = []
    for n_in, n_out in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1]).to(world.device)
    for p in model.parameters():
        p.reduction_axis = "dp"  # gradients are summed over the replicas: here, all ranks
        world.axis.broadcast(p.data)  # one parameter from rank 0 to all
    data_parallel = DataParallel(model, mesh)
    return model, data_parallel, AdamW(data_parallel, betas=(0.9, 0.999), decay=0.0)


def train(world, model, data_parallel, adam, flags, report=lambda row: None):
    """Train the model to repeat its input; return a row of METRICS per iteration, also given to report()."""
    data = torch.Generator(world.device).manual_seed(flags.seed + world.rank)
    one, zero = (torch.full((), x, dtype=torch.float32, device=world.device) for x in (1.0, 0.0))
    watch = Stopwatch(world.device)

    def step(update=True):
        x = torch.rand(flags.batch, WIDTHS[0], device=world.device, generator=data)  # (B, 128)
        start = watch.mark()
        # The one rule: divide once, here. Gradients are then plain sums over the replicas.
        loss = (model(x) - x).square().sum() / world.size
        middle = watch.mark()
        data_parallel.reset()
        loss.backward()  # a full bucket is reduced while the layers before it still compute
        data_parallel.finish_grad_sync()
        if update:
            # Gradients are divided by one, and none of them is inf or nan.
            adam.step(flags.lr, one, zero)
        return loss.detach(), start, middle, watch.mark()

    step(update=False)  # warm-up: the first use makes threads, kernels and connections; nothing is learned
    rows = []
    for i in range(1, flags.iters + 1):
        loss, start, middle, end = step()
        times = [watch.ms(start, end), watch.ms(start, middle), watch.ms(middle, end)]  # sync point
        times = torch.tensor(times, device=world.device) / 1e3
        world.axis.all_reduce(loss)  # SUM of one number, over the world: squared error of a mean batch
        world.axis.all_reduce(times, MAX)  # 3 numbers, over the world: the slowest rank's
        dt, dtf, dtb = times.tolist()
        sps = flags.batch * world.size / dt  # samples per second of all ranks together
        rows.append({"iter": i, "loss": loss.item(), "sps": sps, "dt": dt, "dtf": dtf, "dtb": dtb})
        report(rows[-1])
    return rows


def replicas_equal(model, mesh):
    """Whether every rank holds the same bits, as it must after training."""
    mine = torch.stack([checksum(p) for p in model.parameters()])  # (n_params, 2)
    both = torch.stack([mine, -mine])  # the maximum of -x is minus the minimum of x
    mesh.dp.all_reduce(both, MAX)  # four int64 per parameter, over dp
    return torch.equal(both[0], -both[1])


# -----------------------------------------------------------------------------
# The files left behind. Each needs an optional package. A missing package costs a line.

def plots(rows, out):
    """Draw a plot per metric as OUT/METRIC.txt; dt, which shows a slow machine, also in the terminal."""
    sys.stdout.reconfigure(errors="replace")  # plots are unicode; an ascii terminal gets question marks
    try:
        for name in METRICS:
            series = [(name, "", [(row["iter"], row[name]) for row in rows if math.isfinite(row[name])])]
            text = plot.draw(f"{name} by iter", series, (80, 13))
            (out / f"{name}.txt").write_text(text, encoding="utf-8")
            if name == "dt":
                print(text, end="", flush=True)
    except ImportError:
        print("plotext is not installed: no plot", flush=True)


def to_wandb(rows, flags, ranks):
    """Log all rows at once, after the ranks have left: whatever happens here, no rank waits for it."""
    try:
        import wandb
        run = wandb.init(project="nanoshard-smoke", dir=flags.out, mode=flags.wandb,
                         config={"ranks": ranks, "batch": flags.batch, "lr": flags.lr, "seed": flags.seed},
                         settings=wandb.Settings(silent=True, console="off", init_timeout=20))
        for row in rows:
            run.log(row, step=row["iter"])
        run.finish()
        print(f"wandb: {flags.wandb} run in {flags.out}/wandb", flush=True)
    except ImportError:
        print("wandb is not installed: no run recorded (pip install wandb, or --wandb off)", flush=True)
    except Exception as e:  # no account, no network: the test itself has passed
        say(f"wandb: {' '.join(str(e).split())}; going on without it")


def run(world, flags):
    """Return the rows, whether all ranks hold the same weights, and the seconds of training."""
    first, mesh = world.rank == 0, make_mesh(world)
    with world.everyone.input():
        if first:
            flags.out.mkdir(parents=True, exist_ok=True)
            metrics = open(flags.out / "metrics.jsonl", "w")
    check_sum(world)
    check_large_sum(world)
    bandwidth(world)

    def report(row):
        if first:
            metrics.write(json.dumps(row) + "\n")
            if row["iter"] in (1, flags.iters) or row["iter"] % flags.log_every == 0:
                say("iter={iter} loss={loss:.6g} sps={sps:.4g} dt={dt:.6f} dtf={dtf:.6f} dtb={dtb:.6f}"
                    .format(**row))

    profiler = start_profile(first)
    model, data_parallel, adam = build(world, mesh, flags)
    began = time.perf_counter()
    rows = train(world, model, data_parallel, adam, flags, report)
    took = time.perf_counter() - began
    end_profile(profiler, flags.out)
    if first:
        metrics.close()
    return rows, replicas_equal(model, mesh), took


def main(argv=None):
    flags = read_flags(Flags, argv, "smoke.py", "Test if this machine trains: collectives, and a small MLP "
                       "on random data. mpiexec, torchrun or srun start several ranks of it.")
    world = launch()
    rows, same, took = run(world, flags)
    shutdown(world)  # the other ranks end here; only rank 0 has more to do
    trains = same and math.isfinite(rows[-1]["loss"])
    if world.rank == 0:
        plots(rows, flags.out)
        if flags.wandb != "off":
            to_wandb(rows, flags, world.size)
        say(f"loss {rows[0]['loss']:.6g} -> {rows[-1]['loss']:.6g} in {flags.iters} iterations; "
            f"weights of {world.size} rank(s) are {'equal bit for bit' if same else 'DIFFERENT'}; "
            f"more plots in {flags.out}")
        say(f"{'ok: this machine trains' if trains else 'NOT ok: see the line above'}; "
            f"training {took:.2f} s, whole run {time.perf_counter() - BEGAN:.2f} s")
    if not same:
        return Outcome.REPLICAS_DIFFER
    return Outcome.DONE if trains else Outcome.FAILED


if __name__ == "__main__":
    start(main)

"""Does this machine train? python bench/smoke.py, the same under mpiexec, torchrun and srun; no data needed.

    1) one line per node           launch.py: launcher, ranks, device, backend
    2) a sum over all ranks        the smallest collective: its answer is known
    3) sums of growing size        how fast the ranks talk: eight rows, 1 KiB to 16 MiB
    4) 100 steps of a small MLP    our own data parallelism (parallel.py), random data, Adam; a plot of dt
    5) what is left in --out       metrics.jsonl, a plot per metric, a profile, an offline wandb run

Under 40 lines on one node.

After ezpz.test_dist (github.com/saforem2/ezpz, talk of July 2024), with one difference: its dt, dtf, dtb were
the times to *launch* the work, ours are the times the device took.
"""
import argparse
import contextlib
import difflib
import json
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()  # before torch: importing it is a good part of the whole run
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root: starts from anywhere

import torch
import torch.distributed as dist

from optim import AdamW
from parallel import DataParallel, checksum, make_mesh
from runtime.launch import agreed, env_rank, launch, shutdown

WIDTHS = (128, 1024, 512, 256, 128)
METRICS = ("loss", "sps", "dt", "dtf", "dtb")
SIZES = [2**10 * 4**i for i in range(8)]  # bytes, 1 KiB to 16 MiB


class Parser(argparse.ArgumentParser):
    """argparse that speaks once: one line, from one rank, exit code 2."""

    def error(self, message):
        words = [w for w in message.split() if w.startswith("--")] if "unrecognized" in message else []
        near = [m for w in words for m in difflib.get_close_matches(w, self._option_string_actions, 1)]
        hint = f"; perhaps you meant {' '.join(near)}" if near else ""
        if env_rank() == 0:
            print(f"nanoshard: {message}{hint} ({self.prog} --help lists all flags)", file=sys.stderr)
        raise SystemExit(2)

    def print_help(self, file=None):
        if env_rank() == 0:
            super().print_help(file)


def at_least_one(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def parse(argv=None):
    p = Parser("smoke.py", allow_abbrev=False, description="smoke test: a small MLP, random data")
    p.add_argument("--iters", type=at_least_one, default=100, help="optimizer steps (default 100)")
    p.add_argument("--batch", type=at_least_one, default=64, help="samples per rank and step (default 64)")
    p.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate (default 1e-3)")
    p.add_argument("--seed", type=int, default=0, help="of the weights; data of rank r: seed + r (default 0)")
    p.add_argument("--log-every", type=at_least_one, default=25, help="iterations between lines (default 25)")
    p.add_argument("--out", type=Path, default=Path("out/smoke"), help="folder (default out/smoke)")
    p.add_argument("--wandb", choices=("off", "offline", "online"), default="offline", help="default offline")
    return p.parse_args(argv)


def check_sum(world):
    """Every rank sends its number, every rank must get n (n - 1) / 2."""
    total, want = torch.tensor(world.rank, device=world.device), world.size * (world.size - 1) // 2
    if world.size > 1:
        dist.all_reduce(total)  # SUM of one number, over the world
    if total.item() != want:  # an uncaught exception on one rank ends them all
        raise RuntimeError(f"rank {world.rank}: all_reduce of rank ids gives {total.item()} and not {want}")
    if world.rank == 0:
        print(f"all_reduce of rank ids 0..{world.size - 1}: {total.item()}, expected {want}: ok")


def bandwidth(world, iters=5):
    """A row per size: what an all-reduce of it takes. collectives.py measures every collective so."""
    if world.size == 1:
        return
    if world.rank == 0:
        print("all_reduce, bytes         us    algbw    busbw GB/s")
    sync = torch.accelerator.synchronize if world.device.type != "cpu" else lambda: None
    for size in SIZES:
        x = torch.zeros(size // 4, device=world.device)
        dist.all_reduce(x)  # SUM of size / 4 numbers, over the world: warm-up at this size
        sync()  # sync point: start together
        began = time.perf_counter()
        for _ in range(iters):
            dist.all_reduce(x)  # the same
        sync()  # sync point: a true time needs the work to be over
        took = torch.tensor((time.perf_counter() - began) / iters, device=world.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)  # one number, over the world: the slowest rank's
        took = took.item()
        algbw = size / took / 1e9
        busbw = algbw * 2 * (world.size - 1) / world.size  # what one link carries
        if world.rank == 0:
            print(f"{size:17d} {1e6 * took:10.0f} {algbw:8.3f} {busbw:8.3f}", flush=True)


def build(world, mesh, args):
    """-> (model, dp, adam); all replicas hold the weights of rank 0."""
    torch.manual_seed(args.seed)
    layers = []
    for n_in, n_out in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1]).to(world.device)
    for p in model.parameters():
        p.reduce = "dp"  # gradients are summed over the replicas: here, all ranks
        if world.size > 1:
            dist.broadcast(p.data, 0)  # one parameter from rank 0 to all
    dp = DataParallel(model, mesh)
    flat = [bucket.flat for bucket in dp.buckets]  # all weights live in a few flat tensors: Adam sees those
    adam = AdamW(flat, [0.0] * len(flat), betas=(0.9, 0.999))
    for w in flat:
        adam.state[w] = {"step": torch.zeros((), device=world.device),
                         "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
    return model, dp, adam


def now(device):
    """A moment in the device's own time: an event in its queue, the host's clock on a CPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds(a, b):
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def train(world, model, dp, adam, args, report=lambda row: None):
    """-> one row of METRICS per iteration. The model learns to repeat its input."""
    data = torch.Generator(world.device).manual_seed(args.seed + world.rank)
    one, zero = (torch.full((), x, dtype=torch.float32, device=world.device) for x in (1.0, 0.0))

    def step(update=True):
        x = torch.rand(args.batch, WIDTHS[0], device=world.device, generator=data)  # (B, 128)
        start = now(world.device)
        # the one rule of parallel.py: divided once, here; gradients are then plain sums over the replicas
        loss = (model(x) - x).square().sum() / world.size
        middle = now(world.device)
        dp.begin()
        loss.backward()  # a full bucket leaves while the layers before it still compute
        dp.finish()
        if update:
            # gradients divided by one, none of them bad
            adam.step([bucket.grad for bucket in dp.buckets], args.lr, one, zero)
        end = now(world.device)
        return loss.detach(), start, middle, end

    step(update=False)  # warm up: threads, kernels, connections are made on the first use; nothing is learned
    rows = []
    for i in range(1, args.iters + 1):
        loss, start, middle, end = step()
        if world.device.type != "cpu":
            end.synchronize()  # sync point: a true time needs the work to be over
        times = [seconds(start, end), seconds(start, middle), seconds(middle, end)]
        times = torch.tensor(times, device=world.device)
        if world.size > 1:
            dist.all_reduce(loss)  # SUM of one number, over the world: squared error of a mean batch
            dist.all_reduce(times, dist.ReduceOp.MAX)  # 3 numbers, over the world: the slowest rank's
        dt, dtf, dtb = times.tolist()
        sps = args.batch * world.size / dt  # samples per second, all ranks together
        rows.append({"iter": i, "loss": loss.item(), "sps": sps, "dt": dt, "dtf": dtf, "dtb": dtb})
        report(rows[-1])
    return rows


def replicas_equal(model, mesh):
    """After training every rank must hold the same bits."""
    mine = torch.stack([checksum(p) for p in model.parameters()])  # (n_params, 2)
    both = torch.stack([mine, -mine])  # the maximum of -x is minus the minimum of x
    if mesh.dp.size > 1:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.dp.group)  # four int64 per parameter, over dp
    return torch.equal(both[0], -both[1])


# -----------------------------------------------------------------------------
# what is left behind: optional packages, each may be missing

@contextlib.contextmanager
def profiled(out):
    """pyinstrument around the body -> OUT/profile.txt and profile.html."""
    try:
        from pyinstrument import Profiler
    except ImportError:
        print("pyinstrument is not installed: no profile (pip install pyinstrument)", flush=True)
        yield
        return
    with Profiler() as profiler:
        yield
    (out / "profile.txt").write_text(profiler.output_text(unicode=True, color=False), encoding="utf-8")
    (out / "profile.html").write_text(profiler.output_html(), encoding="utf-8")


def plots(rows, out):
    """A plot per metric as OUT/METRIC.txt; dt, the one that tells of a slow machine, also in the terminal."""
    try:
        import plotext as plt
    except ImportError:
        print("plotext is not installed: no plots (pip install 'plotext<6')", flush=True)
        return
    sys.stdout.reconfigure(errors="replace")  # plots are unicode; an ascii terminal gets question marks
    for name in METRICS:
        plt.clear_figure()
        plt.theme("clear")
        plt.plot_size(80, 13)
        plt.plot([r["iter"] for r in rows], [r[name] for r in rows], marker="braille")
        plt.title(f"{name} by iter")
        text = plt.uncolorize(plt.build()).rstrip()
        (out / f"{name}.txt").write_text(text + "\n", encoding="utf-8")  # save_fig may write to $HOME
        if name == "dt":
            print(text, flush=True)


def to_wandb(rows, args, ranks):
    """All rows at once, after the ranks have parted: whatever happens here, nobody waits for it."""
    try:
        import wandb
        run = wandb.init(project="nanoshard-smoke", dir=args.out, mode=args.wandb,
                         config={"ranks": ranks, "batch": args.batch, "lr": args.lr, "seed": args.seed},
                         settings=wandb.Settings(silent=True, console="off", init_timeout=20))
        for row in rows:
            run.log(row, step=row["iter"])
        run.finish()
        print(f"wandb: {args.wandb} run in {args.out}/wandb", flush=True)
    except ImportError:
        print("wandb is not installed: no run recorded (pip install wandb, or --wandb off)", flush=True)
    except Exception as e:  # no account, no disk, an outage: the test itself has passed
        print(f"wandb: {' '.join(str(e).split())}; going on without it", flush=True)


def run(world, args):
    """-> (rows, do all ranks hold the same weights, seconds of training)"""
    first, mesh = world.rank == 0, make_mesh(world)
    with agreed(world):
        if first:
            args.out.mkdir(parents=True, exist_ok=True)
            metrics = open(args.out / "metrics.jsonl", "w")
    check_sum(world)
    bandwidth(world)

    def report(row):
        if first:
            metrics.write(json.dumps(row) + "\n")
            if row["iter"] in (1, args.iters) or row["iter"] % args.log_every == 0:
                print("iter={iter} loss={loss:.6g} sps={sps:.4g} dt={dt:.6f} dtf={dtf:.6f} dtb={dtb:.6f}"
                      .format(**row), flush=True)

    with profiled(args.out) if first else contextlib.nullcontext():
        model, dp, adam = build(world, mesh, args)
        began = time.perf_counter()
        rows = train(world, model, dp, adam, args, report)
        took = time.perf_counter() - began
    if first:
        metrics.close()
    return rows, replicas_equal(model, mesh), took


def main(argv=None):
    args = parse(argv)
    world = launch()
    rows, same, took = run(world, args)
    shutdown(world)  # the ranks part here; the rest is rank 0's
    if world.rank == 0:
        plots(rows, args.out)
        if args.wandb != "off":
            to_wandb(rows, args, world.size)
        print(f"loss {rows[0]['loss']:.6g} -> {rows[-1]['loss']:.6g} in {args.iters} iterations; "
              f"weights of {world.size} rank(s) are {'equal bit for bit' if same else 'DIFFERENT'}; "
              f"more plots in {args.out}")
        print(f"training {took:.2f} s, whole run {time.perf_counter() - BEGAN:.2f} s", flush=True)
    if not same:
        raise SystemExit(44)  # the code for replicas that differ


if __name__ == "__main__":
    main()

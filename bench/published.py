"""Ours on the shapes for which others published a speed: their figures beside ours, never as a ratio.

    python bench/published.py                                  (all shapes, on all GPUs of this machine)
    python bench/published.py llama-8b smollm-1.7b --gpus 2
    python bench/published.py --plan --gpus 8 --gpu h100       (which layout would run; needs no GPU)
    python bench/published.py gpt2-124m --tiny --gpus 2        (a rehearsal on a CPU)

Their figures are from other machines, other numbers of GPUs and sometimes another precision: each stands with
its hardware, its precision and its source, also where it is ahead. Ours trains in bf16 with fp32 master
weights, and with --fp8 where they had numbers of 8 bits and this GPU multiplies them. plan.py's search
chooses our layout among those whose predicted memory fits, for the batch per GPU that they had. If none fits,
it searches again with --split-masters, and what fits in no layout is named with the GiB that it needs. Each
shape runs in processes of its own.
"""
import dataclasses
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from common import ROOT, read_flags, start
from runtime.launch import launch, shutdown

import torch
from peers import REHEARSAL, finish, gpus_here, laid_out, refuse_launchers, result_of, set_by_signals
from speed import LLAMA_8B, join_value, measure
from tyro.conf import Positional

import plan
from cost.gpus import GPUS, kind_of
from cost.plan_flags import PlanFlags
from interface.command_line import parse
from ops.accelerator import device_name, total_memory
from runtime import visible
from runtime.launcher import bare_environment

MARGIN = 0.92  # of a GPU's memory, which a layout may take by its prediction
NEAR = 1.02  # a layout's predicted time over the fastest one's: what is nearer counts as equal
TINY = ("--n-layer 2 --n-embd 32 --n-head 2 --n-kv-head 2 --head-dim 16 --ffn-hidden 64 --seq-len 32 "
        "--vocab-size 256 --dtype fp32 --no-compile")
FOUNDRY, BRIDGE = "LLM-Foundry", "Megatron Bridge"
MPT_PAGE = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
BRIDGE_PAGE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html"
NANOCHAT = "https://github.com/karpathy/nanochat"
MPT = "gpt2 --no-bias --seq-len 2048 --vocab-size 50368"


def mpt(layers, width, heads):
    """Return the flags of an MPT model."""
    return (f"{MPT} --n-layer {layers} --n-embd {width} --n-head {heads} --n-kv-head {heads} "
            f"--ffn-hidden {4 * width}")


def nanochat(depth):
    """Return the flags of a model as wide and deep as nanochat's d24: 64 times the depth, heads of 128."""
    width = 64 * depth
    heads = width // 128
    return (f"dense-210m --mlp relu2 --qk-norm head --vocab-size 32768 --optimizer muon --n-layer {depth} "
            f"--n-embd {width} --n-head {heads} --n-kv-head {heads} --ffn-hidden {4 * width}")


class Shape(NamedTuple):
    """A model and a batch for which somebody published a speed."""
    name: str
    flags: str       # of train.py: the model and the length of its sequences
    sequences: int   # per GPU and step, as they had them
    who: str
    tok_s: float     # tokens per second and GPU that they published; 0: they published something else
    hardware: str
    precision: str
    note: str
    source: str


H100 = "8 H100"
GRAND_TETON = "8 H100 of 96 GB, 500 W"
LLAMA_8K = f"{LLAMA_8B} --seq-len 8192"
SHAPES = [
    Shape("gpt2-124m", "gpt2 --vocab-size 50304", 64, "llm.c", 463e3, H100, "bf16",
          "10 B tokens in 45 minutes", "https://github.com/KellerJordan/modded-nanogpt"),
    Shape("gpt2-1558m", "gpt2 --n-layer 48 --n-embd 1600 --n-head 25 --n-kv-head 25 --ffn-hidden 6400 "
          "--vocab-size 50304", 128, "llm.c", 46.8e3, H100, "bf16",
          "C and CUDA; 1,048,576 tokens in 2.80 s", "https://github.com/karpathy/llm.c/discussions/677"),
    Shape("mpt-760m", mpt(24, 1536, 12), 48, FOUNDRY, 63147, H100, "bf16", "FSDP; 34.9 % MFU", MPT_PAGE),
    Shape("mpt-1b", mpt(24, 2048, 16), 14, FOUNDRY, 45455, H100, "bf16", "FSDP; 41.8 % MFU", MPT_PAGE),
    Shape("mpt-3b", mpt(32, 2560, 20), 30, FOUNDRY, 24142, "16 H100", "bf16", "FSDP; 43.7 % MFU", MPT_PAGE),
    Shape("mpt-7b", mpt(32, 4096, 32), 6, FOUNDRY, 10643, H100, "bf16", "FSDP; 46.4 % MFU", MPT_PAGE),
    Shape("llama-8b", LLAMA_8K, 2, "torchtitan", 6667, GRAND_TETON, "bf16",
          "FSDP, selective recomputation", TITAN),
    Shape("llama-8b-float8", LLAMA_8K, 2, "torchtitan", 8532, GRAND_TETON, "float8",
          "FSDP, selective recomputation", TITAN),
    Shape("llama-8b-bridge", LLAMA_8K, 2, BRIDGE, 14451, "DGX-H100", "FP8",
          "release 25.11; their batch is another one", BRIDGE_PAGE),
    Shape("llama-8b-32k", f"{LLAMA_8B} --seq-len 32768", 1, "torchtitan", 3890, GRAND_TETON, "float8",
          "FSDP 8, full recomputation", TITAN),
    Shape("llama-8b-64k", f"{LLAMA_8B} --seq-len 65536 --cp 2", 1, "torchtitan", 2540, GRAND_TETON, "float8",
          "FSDP 4, cp 2, full recomputation", TITAN),
    Shape("llama-8b-128k", f"{LLAMA_8B} --seq-len 131072 --cp 4", 1, "torchtitan", 1071, GRAND_TETON,
          "float8", "FSDP 2, cp 4, full recomputation", TITAN),
    Shape("d24", nanochat(24), 32, "nanochat", 100.0e3, H100, "bf16",
          "as d26; no page of the repository has this figure", NANOCHAT),
    Shape("d26", nanochat(26), 32, "nanochat", 78.8e3, H100, "bf16",
          "theirs also has value embeddings and windows", f"{NANOCHAT}/blob/master/dev/LOG.md"),
    Shape("d26-fp8", nanochat(26), 32, "nanochat", 92.5e3, H100, "FP8",
          "theirs also has value embeddings and windows", f"{NANOCHAT}/blob/master/dev/LOG.md"),
    Shape("smollm-1.7b", "smol-1.7b", 4, "picotron", 0, H100, "bf16", "nearly 50 % MFU, at a batch not named",
          "https://github.com/huggingface/picotron"),
    Shape("qwen3-30b-a3b", "qwen3-30b-a3b --seq-len 4096", 8, BRIDGE, 5275, "16 H100", "FP8",
          "release 25.11; 121 TFLOP/s; their batch is another one", BRIDGE_PAGE),
]
NAMES = tuple(shape.name for shape in SHAPES)


@dataclass(frozen=True)
class Flags:
    shapes: Positional[tuple[Literal[NAMES], ...]] = NAMES  # whose published figures are looked up
    gpus: int = 0  # GPUs that take part; default: all of this machine
    gpu: Literal[("", *GPUS)] = ""  # kind of GPU for the plan; default: the one found here
    steps: int = 10  # of each shape; the last half counts, at most 30
    plan: bool = False  # only say which layout would run, by prediction
    tiny: bool = False  # a rehearsal, also on a CPU: tiny models in fp32, nothing compiled, plain layouts
    cell_seconds: int = 300  # a shape that takes longer is ended
    limit: int = 0  # seconds for the whole table, after which shapes are ended and left out; 0 is none
    markdown: bool = False  # print the table for a page
    json: str = ""  # file to which each shape is appended, one line each
    cell: str = ""  # used by the program itself: flags of train.py that these ranks time

    RANGES = {"gpus": (0, 1024), "steps": (4, 10**6), "cell_seconds": (1, 10**6), "limit": (0, 10**6)}

    def check(self):
        if self.cell:
            return
        refuse_launchers("published.py")
        device, shown = ("cpu", []) if self.plan else gpus_here(self.tiny)
        if device != "cpu" and self.gpus > len(shown):
            raise ValueError(f"--gpus {self.gpus} is more than the {len(shown)} of this machine")
        if self.plan and not (self.gpu and self.gpus):
            raise ValueError("--plan needs the GPUs that it plans for; try --gpus 8 --gpu h100")
        if self.json:
            Path(self.json).touch()


# -----------------------------------------------------------------------------
# The layout

def kind_of_gpu():
    """Return the name in GPUS of this machine's accelerators.

    ValueError: the planner does not know them.
    """
    device = torch.accelerator.current_accelerator()
    kind = kind_of(device_name(device), total_memory(device) / 2**30)
    if not kind:
        raise ValueError(f"plan.py does not know {device_name(device)}; give the nearest of "
                         f"{', '.join(GPUS)} by --gpu")
    return kind


def on_gpu(shape, gpu):
    """Return a shape. It gets --fp8 if they had numbers of 8 bits and this kind of GPU multiplies them."""
    if shape.precision == "bf16" or gpu not in GPUS or not GPUS[gpu].fp8:
        return shape
    return shape._replace(flags=f"{shape.flags} --fp8")


def config(shape, gpus):
    """Return the Config of a shape with their batch per GPU; a sequence that cp cuts is shared by cp GPUs."""
    cfg = parse(shape.flags.split(), PlanFlags, data="synthetic")
    return dataclasses.replace(cfg, global_batch=max(1, shape.sequences * gpus // cfg.cp))


def choose(shape, gpus, gpu):
    """Return (flags of train.py with the fastest layout that fits, its plan), or (words, None)."""
    cfg = config(shape, gpus)
    if gpus % cfg.cp:
        return f"needs {cfg.cp} GPUs or a multiple", None
    needed = []
    for masters in ("", "--split-masters"):
        cfg = dataclasses.replace(cfg, split_masters=bool(masters))
        plans = plans_of(cfg, gpus, gpu)
        fits = [found for found in plans if found["memory"] <= MARGIN * found["capacity_gib"]]
        if fits:
            best = plainest(fits)
            return " ".join(filter(None, (shape.flags, masters, layout_flags(best["layout"])))), best
        needed += plans
    least = min(needed, key=lambda found: found["memory"])
    return (f"does not fit: needs {least['memory'] / MARGIN:.0f} GiB on each of {gpus} GPUs, with "
            f"--split-masters ({gpu} has {least['capacity_gib']:.1f})"), None


def plans_of(cfg, gpus, gpu):
    """Return what plan.py predicts of each layout."""
    vocab = plan.vocabulary(cfg)
    return [plan.estimate(layout, gpus, gpu, vocab) for layout in candidates(cfg, gpus, gpu)]


def plainest(plans):
    """Return the fastest of plans. One whose step can be a CUDA graph goes before those as fast without.

    plan.py does not count what the host takes to launch kernels, and on one GPU all ZeRO levels are the same.
    """
    least = min(found["ms"] for found in plans)
    near = [found for found in plans if found["ms"] <= NEAR * least]

    def order(found):
        layout = found["layout"]
        no_graph = layout["zero"] > 1 or layout["pp"] > 1 or layout["recompute"] == "selective"
        return no_graph, found["ms"], layout["zero"]

    return min(near, key=order)


def candidates(cfg, gpus, gpu):
    """Yield the layouts of plan.py's search, and those with micro-batches of other sizes that fill the batch.

    The search tries powers of two. Some batches, such as 14 and 30 sequences per GPU, have better divisors.
    """
    for layout in plan.layouts(cfg, gpus, gpu):
        yield layout
        if layout.micro_batch == 1:
            whole = layout.global_batch * layout.tp * layout.cp * layout.pp // gpus
            for size in plan.divisors(whole):
                if size & (size - 1):  # no power of two
                    yield dataclasses.replace(layout, micro_batch=size)


def layout_flags(layout):
    """Return the flags of train.py for a plan's layout."""
    return " ".join(f"--{name.replace('_', '-')} {layout[name]}" for name in plan.LAYOUT)


# -----------------------------------------------------------------------------
# What is run and printed

class Clock:
    """When the program must be done: at the end of --limit, or when it is asked to end."""

    def __init__(self, limit):
        self.limit = limit
        self.ends = time.monotonic() + limit if limit else float("inf")
        self.cut = threading.Event()  # set when this program is asked to end

    def left_out(self):
        """Return why no more shapes are started, or ""."""
        if self.cut.is_set():
            return "left out: this program was asked to end"
        return f"left out: --limit {self.limit} is over" if self.ends <= time.monotonic() else ""


def time_shape(shape, train_flags, gpus, device, flags, *, clock):
    """Return the row of bench/speed.py's kind of a shape, or {"why"}: it runs in processes of its own."""
    if why := clock.left_out():
        return {"why": why}
    if flags.tiny:
        train_flags = f"{train_flags} {TINY} --micro-batch 1 --global-batch {gpus}"
    ranks = []
    if gpus > 1:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    env = bare_environment()
    env.setdefault("OMP_NUM_THREADS", "1" if device == "cpu" else "8")
    if device != "cpu":
        _, shown = gpus_here(False)
        env[visible.VARIABLE] = ",".join(shown[:gpus])
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "row"), Path(folder, "log")
        command = [sys.executable, *ranks, str(ROOT / "bench/published.py"), shape.name,
                   "--steps", str(flags.steps), "--json", str(file), f"--cell={train_flags}"]
        seconds = min(flags.cell_seconds, clock.ends - time.monotonic())
        with log.open("w") as out:
            in_time = finish(command, env, out, seconds, row=file, cut=clock.cut)
        return result_of(file, log, in_time, seconds, clock.cut)


def run_cell(flags):
    """Time one shape on these ranks, and write its row."""
    world = launch(timeout=300, quiet=True)
    row = measure(world, flags.shapes[0], flags.cell, flags.steps)
    if world.rank == 0:
        Path(flags.json).write_text(json.dumps(row))
    shutdown(world)


def run_shape(shape, gpus, gpu, device, flags, *, clock):
    """Plan a shape, run it unless only the plan is asked for, and return what is known of ours."""
    known = {"gpus": gpus, "gpu": gpu}
    if flags.tiny:
        train_flags, found = shape.flags, None
        if config(shape, gpus).cp > gpus:
            return {**known, "why": f"needs {config(shape, gpus).cp} ranks"}
    else:
        train_flags, found = choose(shape, gpus, gpu)
        if found is None:
            return {**known, "why": train_flags}
        known |= {"layout": found["layout"], "predicted_ms": found["ms"], "predicted_gib": found["memory"],
                  "predicted_tok_s": found["tok_s_gpu"]}
    if flags.plan:
        return {**known, "train": train_flags, "why": "not run: --plan"}
    ours = time_shape(shape, train_flags, gpus, device, flags, clock=clock)
    return {**known, "train": train_flags, "ours": ours}


def words(row):
    """Return what of a row's layout is not 1 or 0, as in "dp2 zero1 mbs8", and how numbers are stored."""
    layout = row["layout"]
    short = {"micro_batch": "mbs", "pp_chunks": "chunks", "recompute": "recompute "}
    said = []
    for name in ("dp", *plan.LAYOUT):
        plain = name == "global_batch" or layout[name] in (1, 0, "none")
        if name == "micro_batch" or not plain or (name == "zero" and layout[name]):
            said.append(f"{short.get(name, name)}{layout[name]}")
    said += [flag for flag in ("--fp8", "--split-masters") if flag in row["train"].split()]
    return " ".join(said)


def line_of(row):
    """Return one shape in words."""
    ours = row.get("ours", row)
    head = f"{row['name']} on {row['gpus']} {row['gpu']}"
    if "layout" in row:
        head += (f", {words(row)} (predicted {row['predicted_tok_s']:,.0f} tokens/s per GPU, "
                 f"{row['predicted_gib']:.0f} GiB)")
    if "why" in ours:
        return f"{head}: {ours['why']}"
    first, last = ours["loss"]
    return (f"{head}: {ours['tok_s_gpu']:,.0f} tokens/s per GPU, {ours['ms']:.1f} ms, "
            f"{ours['tflops']:.0f} TFLOP/s, {ours['reserved_gib']:.1f} GiB, loss {first:.3f} -> {last:.3f}, "
            f"{ours['parameters']:,} parameters")


def table(rows):
    """Return the lines of the table: ours, and theirs with what they had."""
    lines = [["shape", "ours: tokens/s per GPU", "on", "layout", "theirs", "who", "on", "precision", "note"]]
    for row in rows:
        ours = row.get("ours", row)
        rate = f"{ours['tok_s_gpu']:,.0f}" if "why" not in ours else ours["why"].split(":")[0]
        theirs = f"{row['tok_s']:,.0f}" if row["tok_s"] else "-"
        layout = words(row) if "layout" in row else "-"
        lines.append([row["name"], rate, f"{row['gpus']} {row['gpu']}", layout, theirs, row["who"],
                      row["hardware"], row["precision"], row["note"]])
    return lines


def run_all(gpus, gpu, device, flags, clock):
    """Run the shapes in the order in which they are named, say how each went, and return their rows."""
    shapes = {shape.name: shape for shape in SHAPES}
    rows, ran = [], {}
    for name in flags.shapes:
        shape = on_gpu(shapes[name], gpu)
        same = shape.flags, shape.sequences
        if same not in ran:  # several have published a speed for it
            ran[same] = run_shape(shape, gpus, gpu, device, flags, clock=clock)
        rows.append({**shape._asdict(), **ran[same]})
        print(line_of(rows[-1]), flush=True)
        if flags.json:
            with open(flags.json, "a") as f:
                f.write(json.dumps(rows[-1]) + "\n")
    return rows


def main(argv=None):
    argv = join_value(sys.argv[1:] if argv is None else argv, "--cell")
    flags = read_flags(Flags, argv, "published.py [SHAPE...]", "Time ours on the shapes for which others "
                       "published a speed, and print their figures beside it.")
    if flags.cell:
        return run_cell(flags)
    device, shown = ("cpu", []) if flags.plan else gpus_here(flags.tiny)
    gpus = flags.gpus or max(1, len(shown))
    gpu = flags.gpu or ("cpu" if device == "cpu" else kind_of_gpu())
    clock = Clock(flags.limit)
    with set_by_signals(clock.cut):
        rows = run_all(gpus, gpu, device, flags, clock)
    print("\nours in bf16 with fp32 masters, and products in 8 bits where the layout says --fp8; theirs are "
          "of other machines, as they published them")
    if flags.tiny:
        print(REHEARSAL)
    print(laid_out(table(rows), flags.markdown))
    for source in dict.fromkeys(f"{row['who']}: {row['source']}" for row in rows):
        print(source)
    return 1 if clock.cut.is_set() else 0


if __name__ == "__main__":
    start(main)

"""Which layout is fastest here? Train with every layout of a list for a few steps, and print one table.

    python bench/layouts.py smol-1.7b --ranks 4 --layouts "dp4; tp2; tp4; pp2; pp4; zero1; tp2,zero1"

    1) the list     check each layout, and predict its memory and time as plan.py does; a refused one says why
    2) one layout   train.py's own build and step on forked ranks: time of the slowest, memory of the fullest
    3) the table    a line when a layout is done; then all rows, the fastest first; --json has more of each

Do not start it with torchrun or mpiexec: it starts the ranks of this host itself, new ones for each layout.
A rank that runs out of memory leaves the other ranks in a collective that no process can leave. Here all
ranks of a failed layout are killed, and the next layout starts. The ranks are forks of this process, so torch
is imported once, and only a rank touches a GPU. All rows train on the same global batch, so their sec/it can
be compared. They start from the same weights and data, so the loss after the last step must agree, too.
"""
import dataclasses
import json
import multiprocessing as mp
import re
import signal
import socket
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

from common import start
from runtime.launch import World, launch

import torch
import torch._dynamo  # for --compile, once for all ranks; _inductor would touch CUDA, and nothing could fork
from training import Training, gpu_memory

from config import Config, Outcome, check
from cost.gpus import GPUS, kind_of
from cost.parameters import count_parameters, flops_per_token
from interface.command_line import parse, wrong_input
from interface.files import must_write
from interface.layout import check_layout
from ops.accelerator import device_name, total_memory
from parallel import make_mesh
from plan import estimate, memory
from runtime.launcher import as_torchrun, started_by

FLAG = {"tp": "tp", "cp": "cp", "pp": "pp", "chunks": "pp_chunks", "ep": "ep", "zero": "zero",
        "mbs": "micro_batch"}
COLUMNS = {  # title: (key of the row, format)
    " dp": ("dp", "d"), "tp": ("tp", "d"), "cp": ("cp", "d"), "pp": ("pp", "d"),
    "ep": ("ep", "d"), "zero": ("zero", "d"), "mbs": ("mbs", "d"), "mem GiB": ("mem", ".2f"),
    "plan GiB": ("predicted", ".2f"), "  sec/it": ("seconds", ".4f"), "plan s/it": ("predicted_s", ".4f"),
    "tok/s/GPU": ("tok_s_gpu", ".0f"), "TFLOP/s": ("tflops", ".3g"), "    loss": ("loss", ".5f"),
}


# -----------------------------------------------------------------------------
# 1) the list

@dataclass(frozen=True)
class Flags(Config):
    layouts: str = ""  # "dp4; tp2,zero1; mbs2,recompute": of dp tp cp pp chunks ep zero mbs, or recompute
    ranks: int = 0  # processes; 0: one per GPU, 2 without a GPU
    steps: int = 12  # of each layout; the first third is warm-up
    limit: float = 180.0  # seconds until a layout is given up
    gpu: Literal[("", *GPUS)] = ""  # GPU whose time is predicted; default: the one found here
    json: Path | None = None  # write the rows to this file, after each layout

    RANGES = {"ranks": (0, 1024), "limit": (1, 10**6), "steps": (3, 10**6)}


def read_flags(argv):
    """Return Flags, whose model and batch all layouts share. ValueError: what is wrong."""
    launcher, size = started_by()
    if launcher != "single":
        raise ValueError(f"layouts.py starts its ranks itself; without {launcher}: bench/layouts.py ... "
                         f"--ranks {size}")
    cfg = parse(argv, Flags, "layouts.py", "Train with every layout of --layouts for a few steps on this "
                "host: a table of time and memory.", steps=Flags.steps, data="synthetic")
    if not cfg.layouts:
        raise ValueError('--layouts LIST is missing, such as --layouts "dp4; tp2,pp2; zero1"')
    ranks = cfg.ranks or count_devices() or 2
    batch = cfg.global_batch or 4 * cfg.micro_batch * ranks  # 4 micro-batches per stage if pp is all ranks
    return dataclasses.replace(cfg, ranks=ranks, data="synthetic", global_batch=batch)


def count_devices():
    """Return how many accelerators this host has.

    NVML counts those of CUDA, because a process that used CUDA cannot fork.
    """
    kind = torch.accelerator.current_accelerator()  # what torch was built for, whether or not one is here
    return torch.get_device_module(kind).device_count() if kind else 0


def layout(text, cfg):
    """Return (Config, the given dp or 0) of a layout such as "tp2,zero1". ValueError: an item is none."""
    flags, dp = {}, 0
    for item in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(r"(dp|tp|cp|pp|chunks|ep|zero|mbs)(\d+)", item)
        if item == "recompute":
            flags["recompute"] = "full"
        elif not found or found[1] == "zero" and int(found[2]) > 3:
            raise ValueError(f"no layout item {item!r}; try dp4 tp2 cp2 pp2 chunks2 ep2 zero1 mbs2 recompute")
        elif found[1] == "dp":
            dp = int(found[2])
        else:
            flags[FLAG[found[1]]] = int(found[2])
    return dataclasses.replace(cfg, **flags), dp


def plan_row(text, cfg, ranks):
    """Return (Config, row), or (None, row) with a note that says why train.py refuses this layout."""
    row = {"layout": text.strip()}
    vocab = cfg.vocab_size or 256  # as train.open_data has it for synthetic data
    try:
        cfg, dp = layout(text, cfg)
        check(cfg)
        meshes = [make_mesh(World(rank=r, size=ranks), cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp,
                            n_experts=cfg.n_experts, shard=cfg.shard, groups=False) for r in range(ranks)]
        fits = meshes[0].dp.size
        row.update(nodes=1, size=count_parameters(cfg, vocab)["total"] / 1e9, dp=fits, tp=cfg.tp, cp=cfg.cp,
                   pp=cfg.pp, ep=cfg.ep, zero=cfg.zero, mbs=cfg.micro_batch, gbs=cfg.global_batch,
                   recompute=cfg.recompute)
        if dp not in (0, fits):
            raise ValueError(f"dp {dp} * tp {cfg.tp} * cp {cfg.cp} * pp {cfg.pp} are not {ranks} ranks; "
                             f"try dp{fits}")
        check_layout(cfg, meshes[0], cfg.global_batch)
        row["predicted"] = max(sum(memory(cfg, mesh, vocab).values()) for mesh in meshes) / 2**30
    except ValueError as e:
        return None, {**row, "note": f"refused: {e}"}
    return cfg, row


def predict(cfg, row, ranks, gpu):
    """Add plan.py's time of a step to the row."""
    if cfg is not None and gpu:
        row["predicted_s"] = estimate(cfg, ranks, gpu, cfg.vocab_size or 256)["ms"] / 1e3


# -----------------------------------------------------------------------------
# 2) one layout

def rank_main(cfg, rank, ranks, port, say, pipe):
    """Run a forked rank: send its numbers or the reason why it has none, then wait to be killed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    as_torchrun(rank, ranks, port)
    try:
        pipe.send(measure(cfg, launch(cfg.timeout, quiet=not say)))
    except Exception as e:  # any failure: the next layout runs
        text = " ".join(str(e).split()) or type(e).__name__
        full = isinstance(e, MemoryError) or re.search("out of memory|n't allocate|ALLOC_FAILED", text)
        pipe.send(f"{'out of memory' if full else type(e).__name__} on rank {rank}: {text[:200]}")
    while True:
        time.sleep(60)


def measure(cfg, world):
    """Return {ms, loss, mem, reserved, gpu} of this rank, after cfg.steps steps."""
    times, losses, *_ = Training(cfg, world).run(cfg.steps)
    row = {"ms": statistics.median(times[cfg.steps // 3:]), "loss": losses[1]}
    if found := gpu_memory(world.device):
        allocated, reserved, windows = found
        row.update(mem=allocated + windows, reserved=reserved + windows,
                   gpu=kind_of(device_name(world.device), total_memory(world.device) / 2**30))
    return row


def run_layout(cfg, ranks, limit, say):
    """Fork the ranks, wait for their answers, kill them, and return {numbers} or {note}.

    After one has failed, the others have one more second.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # the kernel picks a free port
        port = s.getsockname()[1]
    context, end = mp.get_context("fork"), time.monotonic() + limit
    processes, pipes = [], []
    answers = {}  # rank -> its numbers, or the text of its failure
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = (cfg, rank, ranks, port, say, theirs)
            process = context.Process(target=rank_main, args=job, daemon=True)
            process.start()
            processes.append(process)
            theirs.close()  # the rank holds the only writing end: if it dies, recv() raises EOFError
            pipes.append(ours)
        failed = []
        while len(answers) < ranks:
            ready = wait([p for r, p in enumerate(pipes) if r not in answers], max(0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join()
                    answers[rank] = f"rank {rank} died with exit code {processes[rank].exitcode}"
            failed = [text for text in answers.values() if isinstance(text, str)]
            # Another rank may be about to name the cause: a broken connection is noticed before its cause.
            if failed:
                end = min(end, time.monotonic() + 1)
        if failed:
            return {"note": min(failed, key=lambda t: ("out of memory" not in t, "died with exit" not in t))}
        if len(answers) < ranks:
            missing = ", ".join(str(r) for r in range(ranks) if r not in answers)
            return {"note": f"given up after {limit:g} s, waiting for rank {missing}"}
        # The time is that of the slowest rank, the memory that of the fullest.
        return {key: max(row[key] for row in answers.values()) for key in answers[0]}
    finally:
        for process in processes:
            process.kill()
            process.join()


# -----------------------------------------------------------------------------
# 3) the table

def line(row):
    """Return a row of the table as text. A layout's name that is too long goes on below the row."""
    cells = (f"{format(row[key], form) if key in row else '-':>{len(name)}}"
             for name, (key, form) in COLUMNS.items())
    return textwrap.fill(f"{' '.join(cells)}  {row['layout']}", 100, subsequent_indent=60 * " ")


def outcome(row):
    """Return what became of a layout, in lines of 100 columns."""
    text = f"{row['seconds']:.4f} s per step" if "seconds" in row else row["note"]
    if "note" in row and "predicted" in row:
        text += f" (planned: {row['predicted']:.2f} GiB)"
    return textwrap.fill(f"{row['layout']}: {text}", 100, subsequent_indent="    ")


def table(rows):
    """Print the table, the fastest first, and below it the layouts that did not run, in the list's order."""
    print(f"{' '.join(COLUMNS)}  layout")
    for row in sorted(rows, key=lambda row: row.get("seconds", float("inf"))):
        print(line(row) if "seconds" in row else outcome(row), flush=True)


def sweep(flags):
    """Run every layout of flags, print a row for each, and return the rows and the name of the GPU."""
    rows, configs = [], []
    gpu = flags.gpu
    for text in filter(str.strip, flags.layouts.split(";")):
        cfg, row = plan_row(text, flags, flags.ranks)
        if cfg is not None:
            row.update(run_layout(cfg, flags.ranks, flags.limit, say=not any(configs)))
        if "ms" in row:
            row["seconds"] = row.pop("ms") / 1e3
            row["tok_s_gpu"] = cfg.global_batch * cfg.seq_len / row["seconds"] / flags.ranks
            row["tflops"] = row["tok_s_gpu"] * flops_per_token(cfg, cfg.vocab_size or 256)[0] / 1e12
        found = row.pop("gpu", "")
        gpu = gpu or found
        rows.append(row)
        configs.append(cfg)
        for pair in zip(configs, rows, strict=True):  # all rows: the first may fail before a GPU is named
            predict(*pair, flags.ranks, gpu)
        print(outcome(row), flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows, gpu


def main(argv=None):
    with wrong_input():
        flags = read_flags(sys.argv[1:] if argv is None else argv)
        if flags.json:
            with must_write(flags.json, "--json"):
                flags.json.touch()  # a wrong path is reported now, not after the measurement
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through finally: no rank stays behind
    began = time.monotonic()
    rows, gpu = sweep(flags)
    size = max((row.get("size", 0) for row in rows), default=0)
    plan_for = f"plan.py's for {gpu}" if gpu else "plan.py's"
    print(f"\n{flags.preset}, {round(1e9 * size):,} parameters, {len(rows)} layouts in "
          f"{time.monotonic() - began:.0f} s, {flags.ranks} ranks, {flags.steps} steps of "
          f"{flags.global_batch} sequences\nsec/it of the slowest rank, memory of the fullest, TFLOP/s per "
          f"GPU; plan is {plan_for}\n")
    table(rows)
    return Outcome.DONE if any("seconds" in row for row in rows) else Outcome.FAILED


if __name__ == "__main__":
    start(main)

"""Which layout is fastest here? Every layout of a list, trained for a few steps, as one table.

    python bench/layouts.py smol-1.7b --ranks 4 --layouts "dp4; tp2; tp4; pp2; pp4; zero1; tp2,zero1"

    1) the list     each layout checked, memory and time predicted by plan.py; a refused one says why
    2) one layout   train.py's own build and step on forked ranks: time of the slowest, memory of the fullest
    3) the table    a row as soon as it is known; sorted at the end, in the form of BLOOM's planning document

Not for torchrun or mpiexec: it starts the ranks of this host itself, anew for every layout. A rank that is
out of memory leaves its neighbours inside a collective from which no process comes back; here all ranks of a
failed layout are killed and the next one starts. The ranks are forks of this process: torch is imported once,
and a GPU is first touched in a rank. All rows take the same global batch, so sec/it compares, and start from
the same weights and data: the loss after the last step must agree too.
"""
import argparse
import dataclasses
import json
import multiprocessing as mp
import re
import signal
import socket
import statistics
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root: starts from anywhere

import torch
import torch._dynamo  # for --compile: once, not per rank. _inductor would touch CUDA: no fork after that

import train
from config import check, check_layout, parse
from cost.step_time import GPUS
from fast.window import in_use
from model import count_parameters, flops_per_token
from parallel import make_mesh
from plan import estimate, memory
from runtime.launch import World, as_torchrun, launch, started_by
from runtime.log import Stopwatch

FLAG = {"tp": "tp", "pp": "pp", "ep": "ep", "zero": "zero", "mbs": "micro_batch"}
COLUMNS = {  # title: (key of the row, format)
    "nodes": ("nodes", "d"), "size": ("size", ".3f"), "dp": ("dp", "d"), "tp": ("tp", "d"), "pp": ("pp", "d"),
    "ep": ("ep", "d"), "zero": ("zero", "d"), "mbs": ("mbs", "d"), "gbs": ("gbs", "d"),
    "mem GiB": ("mem", ".2f"), "reserved": ("reserved", ".2f"), "plan GiB": ("predicted", ".2f"),
    "sec/it": ("seconds", ".4f"), "plan s/it": ("predicted_s", ".4f"), "tok/s/GPU": ("tok_s_gpu", ".0f"),
    "TFLOP/s/GPU": ("tflops", ".3g"), "loss": ("loss", ".5f"),
}


# -----------------------------------------------------------------------------
# 1) the list

def wrong(message):
    print(f"nanoshard: {message}", file=sys.stderr)
    raise SystemExit(2)


def arguments(argv):
    """-> (own flags, Config of the model and batch that all layouts share)"""
    p = argparse.ArgumentParser("layouts.py", allow_abbrev=False,
                                usage="layouts.py [PRESET] --layouts LIST [flags]",
                                description="sweep of layouts on this host; other flags as for train.py")
    p.error = wrong
    p.add_argument("--layouts", required=True, help='such as "dp4; tp2,pp2; zero1,mbs2; recompute": dp tp pp '
                   "ep zero mbs with a number, recompute; dp is what tp and pp leave")
    p.add_argument("--ranks", type=int, default=0, help="processes (default: one per GPU, 2 without)")
    p.add_argument("--steps", type=int, default=12, help="of each layout; a third is warm-up (default 12)")
    p.add_argument("--limit", type=float, default=180, help="seconds before a layout is given up (180)")
    p.add_argument("--gpu", choices=GPUS, default="", help="whose time is predicted (default: the one found)")
    p.add_argument("--json", type=Path, help="write the rows here, after each")
    args, rest = p.parse_known_args(argv)
    launcher, size = started_by()
    if launcher != "single":
        wrong(f"layouts.py starts its ranks itself; without {launcher}: bench/layouts.py ... --ranks {size}")
    args.ranks = args.ranks or torch.cuda.device_count() or 2  # this asks NVML: who touched CUDA cannot fork
    if min(args.ranks, args.limit) <= 0 or args.steps < 3:
        wrong("--ranks and --limit must be positive, --steps at least 3")
    cfg = parse(rest)
    batch = cfg.global_batch or 4 * cfg.micro_batch * args.ranks  # pp as deep as the ranks fills 4 times
    return args, dataclasses.replace(cfg, steps=args.steps, data="synthetic", global_batch=batch)


def layout(text, cfg):
    """ "tp2,zero1" -> (Config, dp asked for or 0) """
    flags, dp = {}, 0
    for item in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(r"(dp|tp|pp|ep|zero|mbs)(\d+)", item)
        if item == "recompute":
            flags["recompute"] = "full"
        elif not found or item.startswith("zero") and item not in ("zero0", "zero1"):
            raise ValueError(f"no layout item {item!r}; try dp4, tp2, pp2, ep2, zero1, mbs2 or recompute")
        elif found[1] == "dp":
            dp = int(found[2])
        else:
            flags[FLAG[found[1]]] = int(found[2])
    return dataclasses.replace(cfg, **flags), dp


def plan_row(text, cfg, ranks):
    """-> (Config or None, row); the row's note says why there is no Config."""
    row = {"layout": text.strip()}
    vocab = cfg.vocab_size or 256  # of synthetic data, as train.open_data says
    try:
        cfg, dp = layout(text, cfg)
        check(cfg)
        places = [World(rank=r, size=ranks) for r in range(ranks)]
        meshes = [make_mesh(place, cfg.tp, cfg.pp, cfg.ep, False, cfg.n_experts) for place in places]
        fits = meshes[0].dp.size
        row.update(nodes=1, size=count_parameters(cfg, vocab)["total"] / 1e9, dp=fits, tp=cfg.tp, pp=cfg.pp,
                   ep=cfg.ep, zero=cfg.zero, mbs=cfg.micro_batch, gbs=cfg.global_batch,
                   recompute=cfg.recompute)
        if dp not in (0, fits):
            raise ValueError(f"dp {dp} * tp {cfg.tp} * pp {cfg.pp} are not {ranks} ranks; try dp{fits}")
        check_layout(cfg, meshes[0], cfg.global_batch)
        row["predicted"] = max(sum(memory(cfg, mesh, vocab).values()) for mesh in meshes) / 2**30
    except ValueError as e:
        return None, {**row, "note": f"refused: {e}"}
    return cfg, row


def kind(name, gib):
    """A device's name and memory -> its name in cost.GPUS, or "" where plan.py does not know it."""
    found = [k for k in GPUS if k.split("-")[0] in name.lower()]
    return min(found, key=lambda k: abs(GPUS[k].memory / 2**30 - gib), default="")


def predict(cfg, row, ranks, gpu):
    if cfg is not None and gpu:
        row["predicted_s"] = estimate(cfg, ranks, gpu, cfg.vocab_size or 256)["ms"] / 1e3


# -----------------------------------------------------------------------------
# 2) one layout

def rank_main(cfg, rank, ranks, port, say, pipe):
    """A forked rank: sends its numbers or why it has none, then waits to be killed, unseen by the others."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    as_torchrun(rank, ranks, port)
    try:
        pipe.send(measure(cfg, launch(cfg.timeout, quiet=not say)))
    except Exception as e:  # whatever it is, the next layout runs
        text = " ".join(str(e).split()) or type(e).__name__
        full = isinstance(e, MemoryError) or re.search("out of memory|n't allocate|ALLOC_FAILED", text)
        pipe.send(f"{'out of memory' if full else type(e).__name__} on rank {rank}: {text[:200]}")
    while True:
        time.sleep(60)


def measure(cfg, world):
    """-> {ms, loss, mem, reserved, gpu} of this rank. The loop of train.py without its log."""
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    source, _, vocab, _ = train.open_data(cfg, world)
    model, dp, opt = train.build(cfg, mesh, vocab, world.device)
    graph = train.recorded(cfg, mesh, model, dp, opt)
    watch = Stopwatch(world.device)
    marks = [watch.mark()]
    for step in range(1, cfg.steps + 1):
        first = (step - 1) * cfg.global_batch
        batches = train.micro_batches(cfg, mesh, source, first, cfg.global_batch, world.device)
        totals, _ = train.train_step(cfg, mesh, model, dp, opt, batches, step, False, graph)
        marks.append(watch.mark())
    opt.wait()
    times = [watch.ms(a, b) for a, b in zip(marks, marks[1:], strict=False)]
    row = {"ms": statistics.median(times[cfg.steps // 3:]), "loss": totals[0].item()}
    if world.device.type == "cuda":
        row.update(mem=(torch.cuda.max_memory_allocated() + in_use()) / 2**30,
                   reserved=(torch.cuda.max_memory_reserved() + in_use()) / 2**30,
                   gpu=kind(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / 2**30))
    return row


def run_layout(cfg, ranks, limit, say):
    """Fork the ranks, hear from all or from the first that failed, kill them -> {numbers} or {note}."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # the kernel names a free port
        port = s.getsockname()[1]
    context, end = mp.get_context("fork"), time.monotonic() + limit
    processes, pipes, heard = [], [], {}  # heard: rank -> its numbers, or the text of its failure
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = (cfg, rank, ranks, port, say, theirs)
            process = context.Process(target=rank_main, args=job, daemon=True)
            process.start()
            processes.append(process)
            theirs.close()  # the rank holds the only writing end: should it die, we read the end of the file
            pipes.append(ours)
        while len(heard) < ranks:
            ready = wait([p for r, p in enumerate(pipes) if r not in heard], max(0, end - time.monotonic()))
            if not ready:
                missing = ", ".join(str(r) for r in range(ranks) if r not in heard)
                return {"note": f"given up after {limit:g} s, waiting for rank {missing}"}
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    heard[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join()
                    heard[rank] = f"rank {rank} died with exit code {processes[rank].exitcode}"
            failed = [text for text in heard.values() if isinstance(text, str)]
            if failed:
                return {"note": min(failed, key=lambda text: "out of memory" not in text)}
        return {key: max(row[key] for row in heard.values()) for key in heard[0]}  # slowest and fullest rank
    finally:
        for process in processes:
            process.kill()
            process.join()


# -----------------------------------------------------------------------------
# 3) the table

def line(row):
    cells = (f"{format(row[key], form) if key in row else '-':>{max(5, len(name))}}"
             for name, (key, form) in COLUMNS.items())
    notes = [s for s in ("recompute" if row.get("recompute") == "full" else "", row.get("note", "")) if s]
    return f"| {' | '.join(cells)} | {row['layout']}{': ' * bool(notes)}{', '.join(notes)}"


def table(rows):
    """Fastest first; what did not run last, in the order asked for."""
    head = [f"{name:>5}" for name in COLUMNS]
    print(f"| {' | '.join(head)} | layout\n|{'|'.join('-' * (len(h) + 1) + ':' for h in head)}|---")
    for row in sorted(rows, key=lambda row: row.get("seconds", float("inf"))):
        print(line(row), flush=True)


def main(argv=None):
    try:
        args, cfg = arguments(sys.argv[1:] if argv is None else argv)
    except ValueError as e:
        wrong(e)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through finally: no rank stays behind
    rows, configs, began, ran = [], [], time.monotonic(), 0
    table([])
    for text in filter(str.strip, args.layouts.split(";")):
        this, row = plan_row(text, cfg, args.ranks)
        if this is not None:
            row.update(run_layout(this, args.ranks, args.limit, say=ran == 0))
            ran += 1
        if "ms" in row:
            row["seconds"] = row.pop("ms") / 1e3
            row["tok_s_gpu"] = this.global_batch * this.seq_len / row["seconds"] / args.ranks
            row["tflops"] = row["tok_s_gpu"] * flops_per_token(this, this.vocab_size or 256)[0] / 1e12
        found = row.pop("gpu", "")
        args.gpu = args.gpu or found
        rows.append(row)
        configs.append(this)
        for pair in zip(configs, rows, strict=True):  # the first may have failed before a GPU was named
            predict(*pair, args.ranks, args.gpu)
        print(line(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    took = time.monotonic() - began
    print(f"\n{cfg.preset}, {len(rows)} layouts in {took:.0f} s, {args.ranks} ranks, {args.steps} steps: "
          "size in 1e9 parameters, sec/it of the slowest rank, memory of the fullest, in GiB; plan: plan.py's"
          + f", for {args.gpu}" * bool(args.gpu) + "\n")
    table(rows)
    return 0 if any("seconds" in row for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

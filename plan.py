"""What a layout will cost, before it runs: parameters, memory per rank, bytes sent, milliseconds, days.

    python plan.py bloom-176b --gpus 384 --gpu a100-80 --tp 4 --pp 12 --zero 1 --recompute full --tokens 366e9
    python plan.py smol-1.7b --gpus 8 --gpu h200 --search
    python plan.py dense-210m --zero 1 --scaling 1,2,4,8,64,512

    1) the plan of one layout, from cost/: parameters.py, traffic.py, memory.py, step_time.py
    2) what of its shapes leaves a GPU idle
    3) many layouts: the search, weak scaling
    4) the command line, and what it prints
"""
import dataclasses
import itertools
import json
import math
import re
import string
import sys
import textwrap
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Literal

from config import Config, pad_vocab
from corpus.rampup import batch_size
from corpus.shards import load_blend_meta
from cost.memory import GIB, memory, saved_activations
from cost.parameters import (
    count_parameters,
    flops_per_token,
    held_layers,
    local_parameters,
    micro_batches,
)
from cost.step_time import (
    GPUS,
    bubble,
    expected_choice,
    matmul_shapes,
    max_load_factor,
    row_limit_factor,
    stage_time,
    step_time,
    waves,
)
from cost.traffic import reductions, traffic
from fast.choose import needs_row_limit
from interface.command_line import parse, wrong_input
from interface.layout import check_layout
from parallel import make_mesh
from pipeline import timetable

# -----------------------------------------------------------------------------
# 1) the plan of one layout

@cache
def _mesh(gpus, rank, tp, pp, ep, n_experts, cp):
    world = SimpleNamespace(rank=rank, size=gpus, calls=None)
    return make_mesh(world, tp, pp, ep, cp=cp, n_experts=n_experts, groups=False)


def stage_mesh(cfg, gpus, stage):
    """The mesh as the first rank of a pipeline stage sees it, without process groups."""
    return _mesh(gpus, stage * (gpus // cfg.pp), cfg.tp, cfg.pp, cfg.ep, cfg.n_experts, cfg.cp)


def check_gpus(cfg, gpus):
    """-> (cfg with its global batch, rank 0's mesh); ValueError where train.py would refuse this layout."""
    mesh = stage_mesh(cfg, gpus, 0)
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    check_layout(cfg, mesh, batch)
    return dataclasses.replace(cfg, global_batch=batch), mesh


def estimate(cfg, gpus, gpu, vocab):
    """-> {name: plain numbers} of one layout on `gpus` GPUs of the kind `gpu` (cost.step_time.GPUS): memory
    of the fullest stage, time of the slowest. vocab: symbols, before padding; cfg: with a global batch."""
    # of stages that differ only in their position the first has the most micro-batches in flight: it counts
    alike = {}
    for stage in range(cfg.pp):
        alike.setdefault(held_layers(cfg, stage_mesh(cfg, gpus, stage)), []).append(stage)
    meshes = [stage_mesh(cfg, gpus, stages[0]) for stages in alike.values()]
    chip = GPUS[gpu]
    choice = expected_choice(cfg, meshes[0], chip.node)
    parts = max((memory(cfg, mesh, vocab, choice) for mesh in meshes), key=lambda parts: sum(parts.values()))
    used = sum(parts.values())
    sent = [traffic(cfg, mesh, vocab, cfg.global_batch, choice) for mesh in meshes]
    block = saved_activations(cfg, meshes[0], max_load_factor(cfg, meshes[0]), choice)
    seconds = [stage_time(cfg, mesh, chip, vocab, block, moved)
               for mesh, moved in zip(meshes, sent, strict=True)]
    by_stage = {s: t * 1e3 for stages, t in zip(alike.values(), seconds, strict=True) for s in stages}
    largest = max(meshes, key=lambda mesh: sum(local_parameters(cfg, mesh, vocab).values()))
    local = local_parameters(cfg, largest, vocab)
    step = step_time(cfg, largest, chip, max(seconds), local, reductions(cfg, largest, vocab, choice))
    total, tokens = sum(step.values()), cfg.global_batch * cfg.seq_len
    full, causal = flops_per_token(cfg, vocab)
    count = count_parameters(cfg, vocab)
    flags = ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "micro_batch", "global_batch", "recompute")
    return {"layout": {"gpus": gpus, "dp": meshes[0].dp.size, **{k: getattr(cfg, k) for k in flags}},
            "parameters": {"vocabulary": vocab, "total": count["total"], "embedding": count["embedding"],
                           "active": count["matmul"], "per_rank": sum(local.values())},
            "memory_gib": {k: b / GIB for k, b in parts.items()}, "memory": used / GIB,
            "fits": used <= chip.memory, "capacity_gib": chip.memory / GIB,
            "flops": {"full": full * tokens, "causal": causal * tokens},
            "traffic_mb": {k: max(s.get(k, 0) for s in sent) / 1e6 for k in sorted(set().union(*sent))},
            "ms_parts": {k: s * 1e3 for k, s in step.items()}, "ms": total * 1e3,
            "tok_s_gpu": tokens / total / gpus, "tflops": full * tokens / total / gpus / 1e12,
            "mfu": full * tokens / total / gpus / chip.peak,
            "stage_ms": [by_stage[stage] for stage in sorted(by_stage)]}


def batch_schedule(samples, full, ramp=()):
    """-> {batch: number of steps with it} of a run that consumes at least `samples` sequences."""
    done, steps = 0, Counter()
    while done < samples:
        batch, until = batch_size(done, full, ramp), samples
        if batch < full:  # up to where the next stage starts
            start, increment, over = ramp
            stages, next_stage = (full - start) // increment, (batch - start) // increment + 1
            until = min(samples, -(-next_stage * over // stages))
        steps[batch] += -(-(until - done) // batch)
        done += -(-(until - done) // batch) * batch
    return steps


def training_cost(cfg, plan, vocab):
    """-> {steps, days, gpu_hours} of --tokens; a step of the batch ramp costs what a plan of its own batch
    costs. plan: what estimate returned for a layout of cfg, a PlanFlags."""
    layout = dict(plan["layout"])
    gpus, full = layout.pop("gpus"), layout["global_batch"]
    del layout["dp"]
    steps = batch_schedule(math.ceil(cfg.tokens / cfg.seq_len), full, cfg.rampup_batch_size)
    ms = {batch: plan["ms"] if batch == full else
          estimate(dataclasses.replace(cfg, **{**layout, "global_batch": batch}), gpus, cfg.gpu, vocab)["ms"]
          for batch in steps}
    hours = sum(n * ms[batch] for batch, n in steps.items()) / 3.6e6
    return {"steps": sum(steps.values()), "days": hours / 24, "gpu_hours": hours * gpus}


def vocabulary(cfg):
    """Symbols that train.py would take: the flag's, 256 of synthetic data, the data's, or GPT-2's; [MASK]."""
    mask = int(cfg.objective == "mlm")
    if cfg.vocab_size or cfg.data == "synthetic":
        return cfg.vocab_size or 256 + mask
    try:
        return load_blend_meta(cfg.data)["vocab_size"] + mask
    except OSError:
        return 50257 + mask


# -----------------------------------------------------------------------------
# 2) warnings

def shape_warnings(cfg, mesh, gpu, vocab):
    """-> lines: which of a layout's matrix shapes leave a GPU's multiprocessors idle."""
    D, tp, sms, out = cfg.n_embd // cfg.n_head, cfg.tp, GPUS[gpu].sms, []
    widths = {"n-embd": cfg.n_embd, "head dim": D, f"ffn-hidden / tp {tp}": cfg.ffn_hidden // tp}
    for name, n in widths.items():
        if n % 8:
            out.append(f"{name} is {n}, no multiple of 8: slower kernels; try {-(-n // 8) * 8}")
        elif n % 64 and name != "head dim":
            out.append(f"{name} is {n}, no multiple of 64: tiles are partly empty; try {-(-n // 64) * 64}")
        elif n % 128 and name != "head dim":
            out.append(f"{name} is {n}, no multiple of 128, the edge of a tile; try {-(-n // 128) * 128}")
    if D % 64:
        out.append(f"head dim {D}: attention kernels pad it to {-(-D // 64) * 64}")
    if vocab % 128:
        out.append(f"the vocabulary {vocab} is padded to {pad_vocab(vocab)} rows")
    dense, experts = matmul_shapes(cfg, mesh)
    for m, n, count in dict.fromkeys((m, n, count) for m, n, _, count in dense + experts):
        used, whole = waves(m, n, count, sms)
        if used / whole < 0.8:
            out.append(f"wave quantisation: {count} x ({m}, {n}) fill {used:.2f} of {whole} waves of {sms} "
                       f"multiprocessors: {100 * (1 - used / whole):.0f} % idle")
    if cfg.n_kv_head % tp:
        out.append(f"tp {tp} exceeds n-kv-head {cfg.n_kv_head}: key/value weights are replicated, "
                   f"{tp // cfg.n_kv_head} ranks compute each head")
    return out


def layout_warnings(cfg, mesh, gpu, stage_ms):
    """-> lines: where GPUs of a layout wait for each other or for the host. stage_ms: of each stage."""
    node, out = GPUS[gpu].node, []
    mean = sum(stage_ms) / len(stage_ms)
    if max(stage_ms) > 1.05 * mean:
        out.append(f"stages of unequal work: the slowest takes {max(stage_ms) / mean:.2f} times the mean "
                   f"({', '.join(f'{s:.0f}' for s in stage_ms)} ms)")
    idle = bubble(cfg.pp, cfg.pp_chunks, micro_batches(cfg, mesh))
    if idle >= 1 / 4:
        chunks = next((v for v in (2, 4) if v > cfg.pp_chunks and cfg.n_layer >= v * cfg.pp), None)
        out.append(f"{micro_batches(cfg, mesh)} micro-batches over {cfg.pp} ranks: the pipeline idles "
                   f"{100 * idle / (1 + idle):.0f} %" + f"; try --pp-chunks {chunks}" * bool(chunks))
    choice = expected_choice(cfg, mesh, node)
    if choice.graph and needs_row_limit(cfg, mesh) and not row_limit_factor(cfg, mesh):
        need = row_limit_factor(dataclasses.replace(cfg, ep_slack=cfg.ep), mesh)
        out.append(f"rows to the fullest of {cfg.ep} ranks: {need:.1f} times the balanced number expected, "
                   f"more than --ep-slack {cfg.ep_slack}, so no CUDA graph; try --ep-slack {math.ceil(need)}")
    if cfg.ep > node:
        out.append(f"ep {cfg.ep} reaches over the node's {node} GPUs: rows travel by all_to_all on the slow "
                   f"network, not through symmetric memory; try --ep {node}")
    if cfg.tp > node:
        out.append(f"tp {cfg.tp} reaches over the node's {node} GPUs, on the slow network")
    elif cfg.cp * cfg.tp > node:
        out.append(f"cp {cfg.cp} * tp {cfg.tp} reaches over the node's {node} GPUs: keys and values of whole "
                   "sequences pass the slow network in each layer")
    return out


def warnings(cfg, plan, gpu, vocab):
    """-> lines: what of this layout leaves a GPU idle, and whether it does not fit."""
    mesh = stage_mesh(cfg, plan["layout"]["gpus"], 0)
    out = shape_warnings(cfg, mesh, gpu, vocab) + layout_warnings(cfg, mesh, gpu, plan["stage_ms"])
    if not plan["fits"]:
        out.append(f"does not fit: {plan['memory']:.1f} of {plan['capacity_gib']:.1f} GiB; try --search")
    return out


# -----------------------------------------------------------------------------
# 3) many layouts

SHORTEST_CHUNK = 2048  # positions per rank below which the search cuts no sequence: cp is for long ones


def layouts(cfg, gpus, gpu):
    """Yield cfg with each layout that train.py accepts on `gpus` GPUs, all with one global batch. cp: cfg's
    if that is above 1, else all that leave a rank SHORTEST_CHUNK positions of each sequence."""
    batch = cfg.global_batch or cfg.micro_batch * gpus
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
    tps = [t for t in divisors if 128 % t == 0 and t <= GPUS[gpu].node]
    cps = [c for c in divisors if c == 1 or cfg.seq_len // c >= SHORTEST_CHUNK] if cfg.cp == 1 else [cfg.cp]
    pps = [p for p in divisors if p <= cfg.n_layer]
    for tp, cp, pp in itertools.product(tps, cps, pps):
        stage = gpus // pp
        if stage % (tp * cp):
            continue
        eps = [e for e in divisors if stage % e == 0 and cfg.n_experts % e == 0] if cfg.n_experts else [1]
        sizes = [2**i for i in range(8) if batch % (2**i * (stage // (tp * cp))) == 0]
        chunks = [v for v in (1, 2) if v == 1 or pp > 1 and pp * v <= cfg.n_layer]
        for ep, mbs, *rest in itertools.product(eps, sizes, ("none", "selective", "full"), range(4),
                                                 chunks):
            more = dict(zip(("recompute", "zero", "pp_chunks"), rest, strict=True), cp=cp, global_batch=batch)
            this = dataclasses.replace(cfg, tp=tp, pp=pp, ep=ep, micro_batch=mbs, **more)
            try:
                this, _ = check_gpus(this, gpus)
            except ValueError:
                continue
            yield this


def search(cfg, gpus, gpu, vocab):
    """-> plans of all layouts that the GPU's memory holds, fastest first."""
    plans = [estimate(this, gpus, gpu, vocab) for this in layouts(cfg, gpus, gpu)]
    return sorted((plan for plan in plans if plan["fits"]), key=lambda plan: plan["ms"])


def scaling(cfg, counts, gpu, vocab):
    """-> plans of one layout on each number of GPUs, with the same work per GPU; dp grows. ep is at most the
    ranks of a stage; of a model with experts the ep that is fastest follows where it is another one."""
    found = []
    for gpus in counts:
        batch = cfg.global_batch * gpus // counts[0]
        ranks = gpus // cfg.pp
        eps = [math.gcd(cfg.ep, ranks)]
        if cfg.n_experts:
            eps += [e for e in range(1, ranks + 1) if ranks % e == cfg.n_experts % e == 0 and e != eps[0]]
        plans = []
        for ep in eps:
            this, _ = check_gpus(dataclasses.replace(cfg, ep=ep, global_batch=batch), gpus)
            plans.append(estimate(this, gpus, gpu, vocab))
        found.append(plans[0])
        best = min((p for p in plans if p["fits"]), key=lambda p: p["ms"], default=plans[0])
        found += [best] if best is not plans[0] else []
    for plan in found:
        plan["efficiency"] = plan["tok_s_gpu"] / found[0]["tok_s_gpu"]
    return found


# -----------------------------------------------------------------------------
# 4) the command line

@dataclasses.dataclass(frozen=True)
class PlanFlags(Config):
    """The flags of train.py describe what runs; these describe where, and what is wanted to be known."""
    gpus: int = 1  # GPUs in all
    gpu: Literal[tuple(GPUS)] = "h200"  # kind of GPU
    tokens: float = 0.0  # tokens to train on: prints the steps and days that they take; 0 prints none
    search: bool = False  # rank every layout that fits into memory, fastest first
    scaling: str | None = None  # numbers of GPUs such as 1,8,64: a plan for each, with the same work per GPU
    json: bool = False  # print the numbers as JSON

    RANGES = {"gpus": (1, 2**17), "tokens": (0, 10**18)}


ABOUT = ("Predict what a training run will cost before it runs: parameters, memory, bytes sent and "
         "milliseconds per step.")


def arguments(argv):
    """-> (PlanFlags, [numbers of GPUs of --scaling]); ValueError: one line that says what is wrong"""
    cfg = parse(argv, cls=PlanFlags, prog="plan.py", about=ABOUT)
    if cfg.scaling is None:
        return cfg, []
    counts = [int(n) if re.fullmatch(" *[0-9]{1,7} *", n) else 0 for n in cfg.scaling.split(",")]
    if not 1 <= min(counts) <= max(counts) <= 2**17:
        raise ValueError(f"--scaling takes numbers of GPUs such as 1,2,4,8, not {cfg.scaling!r}")
    return cfg, counts


def print_table(title, rows):
    """rows: lists of strings, equally long; the first column is aligned left, the others right."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(["", row[0].ljust(widths[0]), *cells[1:]]))


def draw_schedule(p, v, m, width=100):
    """-> lines: what each of p pipeline ranks does when, F and B with their micro-batch of m and, of v > 1
    chunks, their chunk a, b, ... A backward takes twice as long as a forward."""
    table, unit = timetable(p, v, m), len(f"F{m - 1} ") + (v > 1)
    rows = [[" " * unit] * max(table) for _ in range(p)]
    for time, ops in table.items():
        for row, (kind, i, chunk) in ((row, op) for row, op in zip(rows, ops, strict=True) if op):
            name = f"{kind}{i}" + string.ascii_lowercase[chunk % 26] * (v > 1)
            row[time - 1] = name.ljust(unit)
            if kind == "B":
                row[time - 2:time] = name.ljust(2 * unit - 1, "-") + " ", ""
    lines = [f"  rank {rank:<4}" + "".join(row).rstrip() for rank, row in enumerate(rows)]
    return [line if len(line) <= width else f"{line[:width - 4]} ..." for line in lines]


def print_schedule(cfg, micro):
    """The picture of one step of `micro` micro-batches, with the part of the time in which ranks idle."""
    p, v = cfg.pp, cfg.pp_chunks
    chunks = f" in {v} chunks" * (v > 1)
    print(f"\nschedule of {micro} micro-batches{chunks} over {p} ranks, predicted bubble "
          f"{100 * bubble(p, v, micro):.1f} % of the work:")
    print(*draw_schedule(p, v, micro), sep="\n")


def print_plan(cfg, plan):
    """One layout, as tables. plan: estimate's, with warnings' and training_cost's entries."""
    flags = ", ".join(f"{k} {v}" for k, v in plan["layout"].items() if k != "gpus")
    print(textwrap.fill(f"{cfg.preset} on {cfg.gpus} {cfg.gpu}: {flags}", 100, subsequent_indent="    "))
    print_table("parameters", [(k, f"{n:,}") for k, n in plan["parameters"].items()])
    print_table(f"memory of the fullest rank, GiB of {plan['capacity_gib']:.1f}",
                [(k, f"{b:.2f}") for k, b in plan["memory_gib"].items()] + [("sum", f"{plan['memory']:.2f}")])
    moved = [(k, f"{b:,.1f}") for k, b in plan["traffic_mb"].items()]
    print_table("sent per rank and step, MB", moved or [("none", "0")])
    print_table("milliseconds per step, expected", [(k, f"{ms:,.1f}") for k, ms in plan["ms_parts"].items()]
                + [("sum", f"{plan['ms']:,.1f}")])
    print_table("work", [("FLOPs per step, full attention", f"{plan['flops']['full']:.4g}"),
                         ("FLOPs per step, causal", f"{plan['flops']['causal']:.4g}"),
                         ("TFLOP/s per GPU", f"{plan['tflops']:.1f}"), ("MFU", f"{100 * plan['mfu']:.1f} %"),
                         ("tokens/s per GPU", f"{plan['tok_s_gpu']:,.0f}")])
    if cfg.pp > 1:
        print_schedule(cfg, micro_batches(cfg, stage_mesh(cfg, cfg.gpus, 0)))
    if cfg.tokens:
        ramp = ", with the ramp" * bool(cfg.rampup_batch_size)
        print_table(f"{cfg.tokens:.3g} tokens{ramp}",
                    [("steps", f"{plan['steps']:,}"), ("days", f"{plan['days']:,.2f}"),
                     ("GPU-hours", f"{plan['gpu_hours']:,.0f}")])
    for line in plan["warnings"]:
        print(textwrap.fill(f"warning: {line}", 100, subsequent_indent="    ", break_on_hyphens=False))


def print_search(cfg, plans):
    """A table of search's plans."""
    few = "; the first 20" if len(plans) > 20 else ""
    print(f"{cfg.preset} on {cfg.gpus} {cfg.gpu}: {len(plans)} layouts fit{few}")
    names = {**{k: k for k in ("dp", "cp", "tp", "pp")}, "pp_chunks": "chunks", "ep": "ep", "zero": "zero",
             "micro_batch": "mbs", "recompute": "recompute"}
    rows = [("#", *names.values(), "GiB", "ms", "TFLOP/s/GPU", "days")]
    for i, plan in enumerate(plans[:20], 1):
        days = f"{plan['days']:,.2f}" if cfg.tokens else "-"
        rows.append((str(i), *(str(plan["layout"][n]) for n in names), f"{plan['memory']:.1f}",
                     f"{plan['ms']:,.1f}", f"{plan['tflops']:.1f}", days))
    print_table("fastest first", rows)


def print_scaling(cfg, plans):
    """A table of scaling's plans."""
    print(f"{cfg.preset}, zero {cfg.zero}, micro-batches of {cfg.micro_batch}: "
          f"predicted for {cfg.gpu}, nodes of {GPUS[cfg.gpu].node}")
    rows = [("GPUs", "dp", "ep", "GiB", "ms", "of it exposed sums", "ms/sample", "tok/s/GPU", "efficiency")]
    for p in plans:
        rows.append((f"{p['layout']['gpus']}", f"{p['layout']['dp']}", f"{p['layout']['ep']}",
                     f"{p['memory']:.1f}" + " too many" * (not p["fits"]), f"{p['ms']:.1f}",
                     f"{p['ms_parts']['reduce']:.1f}", f"{p['ms'] / p['layout']['global_batch']:.2f}",
                     f"{p['tok_s_gpu']:,.0f}",
                     f"{100 * p['efficiency']:.1f} %"))
    print_table("weak scaling", rows)


@wrong_input()
def main(argv=None):
    cfg, counts = arguments(sys.argv[1:] if argv is None else argv)
    vocab = vocabulary(cfg)
    if counts:
        plans = scaling(cfg, counts, cfg.gpu, vocab)
    elif cfg.search:
        cfg = dataclasses.replace(cfg, pp_layers="")  # each layout has its own balance
        plans = search(cfg, cfg.gpus, cfg.gpu, vocab)
        if not plans:
            raise ValueError(f"no layout of {cfg.preset} on {cfg.gpus} {cfg.gpu} fits; try more --gpus")
    else:
        cfg, _ = check_gpus(cfg, cfg.gpus)
        plans = [estimate(cfg, cfg.gpus, cfg.gpu, vocab)]
        plans[0]["warnings"] = warnings(cfg, plans[0], cfg.gpu, vocab)
    for plan in plans:
        plan.update({} if counts else training_cost(cfg, plan, vocab))
    if cfg.json:
        print(json.dumps(plans if cfg.search or counts else plans[0], indent=1))
    elif counts:
        print_scaling(cfg, plans)
    elif cfg.search:
        print_search(cfg, plans)
    else:
        print_plan(cfg, plans[0])


if __name__ == "__main__":
    main()

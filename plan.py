"""What a layout will cost, before it runs: parameters, memory per rank, bytes sent, milliseconds, days.

    python plan.py bloom-176b --gpus 384 --gpu a100-80 --tp 4 --pp 12 --zero 1 --recompute full --tokens 366e9
    python plan.py smol-1.7b --gpus 8 --gpu h200 --search
    python plan.py dense-210m --zero 1 --scaling 1,2,4,8,64,512
    python plan.py smol-1.7b --gpus 8 --pp 4 --serve

    1) the plan of one layout, from cost/: parameters, memory, traffic, step_time; what leaves a GPU idle
    2) many layouts: the search, weak scaling
    3) the tables of a terminal
    4) the program; with --serve a page in the browser draws a plan
"""
import dataclasses
import itertools
import json
import math
import string
import sys
import typing
from collections import Counter

import interface.packages  # noqa: F401  isort: skip (it says in one line which package is missing)
from cost.plan_flags import PlanFlags, arguments
from interface.command_line import wrong_input

if __name__ == "__main__":  # --help and wrong flags are answered before torch is imported.
    with wrong_input():
        arguments(sys.argv[1:])

from config import ceil_div, head_width, typed
from corpus.samples import open_data
from cost.gpus import GPUS
from cost.memory import GIB, memory, saved_activations
from cost.parameters import Rank, count_parameters, flops_per_token, micro_batches, stage_mesh
from cost.step_time import MOST_UNEVEN, bubble, matmul_shapes, stage_time, step_time, waves
from cost.traffic import bytes_between_nodes, reductions, traffic
from fast.choose import needs_row_limit
from interface.layout import check_layout
from interface.presets import PRESETS
from interface.serve import Server
from pipeline import DURATION, timetable

# 1) The plan of one layout

LAYOUT = ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard", "micro_batch", "global_batch", "recompute")


def check_gpus(cfg, gpus):
    """Return (cfg with its global batch, rank 0's mesh). ValueError: train.py would refuse this layout."""
    dp = check_layout(cfg, gpus)
    batch = cfg.global_batch or cfg.micro_batch * dp
    return dataclasses.replace(cfg, global_batch=batch), stage_mesh(cfg, gpus, 0)


def estimate(cfg, gpus, gpu, vocab, uneven=False):
    """Return {name: plain numbers} of one layout: memory of the fullest stage, time of the slowest.

    cfg: with its global batch. vocab: before padding. uneven: the time is that of the experts' young routing,
    not of what it settles to. ValueError: the GPU has no product that the flags ask for.
    """
    chip = GPUS[gpu]
    if cfg.fp8 and not chip.fp8:
        raise ValueError(f"--fp8: {gpu} cannot multiply fp8 numbers; leave out --fp8")
    ranks = {}  # of stages with equal parts of the model the first: it has the most micro-batches in flight
    kinds = []  # of each stage
    for stage in range(cfg.pp):
        rank = Rank(cfg, stage_mesh(cfg, gpus, stage), vocab, node=chip.node)
        kinds.append((rank.blocks, rank.has_embedding, rank.has_head))
        ranks.setdefault(kinds[-1], rank)
    first = ranks[kinds[0]]
    fullest = max(map(memory, ranks.values()), key=lambda parts: sum(parts.values()))
    used = sum(fullest.values())

    saved, _ = saved_activations(first)
    sent = Counter()  # of the stage that sends the most over an axis
    between = 0
    seconds = {}  # of a micro-batch
    for kind, rank in ranks.items():
        sent_here = traffic(rank, cfg.global_batch)
        sent |= sent_here
        between = max(between, bytes_between_nodes(rank.mesh, sent_here, lambda rank: rank // chip.node))
        seconds[kind] = stage_time(rank, chip, saved, sent_here, uneven=uneven)

    largest = max(ranks.values(), key=Rank.parameters)
    step = step_time(largest, chip, max(seconds.values()), reductions(largest))
    total = sum(step.values())
    tokens = cfg.global_batch * cfg.seq_len
    full, causal = flops_per_token(cfg, vocab)
    count = count_parameters(cfg, vocab)
    per_gpu = full * tokens / total / gpus
    return {
        "layout": {"gpus": gpus, "dp": first.mesh.dp.size, **{name: getattr(cfg, name) for name in LAYOUT}},
        "parameters": {"vocabulary": vocab, "total": count["total"], "embedding": count["embedding"],
                       "active": count["matmul"], "per_rank": largest.parameters()},
        "memory_gib": {part: nbytes / GIB for part, nbytes in fullest.items()},
        "memory": used / GIB, "fits": used <= chip.memory, "capacity_gib": chip.memory / GIB,
        "flops": {"full": full * tokens, "causal": causal * tokens},
        "traffic_mb": {axis: nbytes / 1e6 for axis, nbytes in sorted(sent.items())},
        "between_nodes_mb": between / 1e6,
        "ms_parts": {part: seconds * 1e3 for part, seconds in step.items()}, "ms": total * 1e3,
        "tok_s_gpu": tokens / total / gpus, "tflops": per_gpu / 1e12, "mfu": per_gpu / chip.peak,
        "stage_ms": [seconds[kind] * 1e3 for kind in kinds]}


def idle_warnings(rank, gpu, stage_ms):
    """Return what of a layout leaves a GPU idle, a line each. stage_ms: of each stage."""
    cfg = rank.cfg
    widths = {"n-embd": cfg.n_embd, f"ffn-hidden / tp {cfg.tp}": cfg.ffn_hidden // cfg.tp,
              "head dim": head_width(cfg)}
    lines = [f"{name} is {n}, no multiple of 64: slower kernels; try {ceil_div(n, 64) * 64}"
             for name, n in widths.items() if n % 64]
    dense, experts = matmul_shapes(rank)
    for m, n, count in dict.fromkeys((m, n, count) for m, n, _, count in dense + experts):
        used, whole = waves(m, n, count, gpu)
        if used / whole < 0.8:
            lines.append(f"wave quantisation: {count} x ({m}, {n}) fill {used:.2f} of {whole} waves of "
                         f"{gpu.sms} multiprocessors: {100 * (1 - used / whole):.0f} % idle")
    if cfg.n_kv_head % cfg.tp:
        lines.append(f"tp {cfg.tp} exceeds n-kv-head {cfg.n_kv_head}: key/value weights are replicated, "
                     f"{cfg.tp // cfg.n_kv_head} ranks compute each head")
    for name, ranks in ((f"ep {cfg.ep}", cfg.ep), (f"cp {cfg.cp} * tp {cfg.tp}", cfg.cp * cfg.tp)):
        if ranks > gpu.node:
            lines.append(f"{name} reaches over the node's {gpu.node} GPUs, on the slow network")
    slowest = max(stage_ms) * len(stage_ms) / sum(stage_ms)
    if slowest > 1.05:
        lines.append(f"stages of unequal work: the slowest takes {slowest:.2f} times the mean")
    return lines


def training_cost(cfg, plan):
    """Return {"steps", "days", "gpu_hours"} of --tokens in whole global batches: a ramp takes more steps."""
    steps = math.ceil(cfg.tokens / cfg.seq_len / cfg.global_batch)
    hours = steps * plan["ms"] / 3.6e6
    return {"steps": steps, "days": hours / 24, "gpu_hours": hours * cfg.gpus}


def vocabulary(cfg):
    """Return the number of symbols: that of --vocab-size, of the data set, or GPT-2's."""
    if cfg.vocab_size or not cfg.data:
        return cfg.vocab_size or 50257
    return open_data(cfg)[2]


# 2) Many layouts

SHORTEST_SHARE = 2048  # positions per rank: the search does not cut a sequence into shorter shares


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(cfg, gpus, gpu):
    """Yield cfg with each layout that train.py accepts on `gpus` GPUs, all with one global batch."""
    batch = cfg.global_batch or cfg.micro_batch * gpus
    sizes = divisors(gpus)
    node = GPUS[gpu].node
    tp_sizes = [tp for tp in sizes if tp <= node]
    cp_sizes = [cfg.cp]
    if cfg.cp == 1:
        cp_sizes = [cp for cp in sizes if cp == 1 or cfg.seq_len // cp >= SHORTEST_SHARE]
    ep_sizes = sizes if cfg.n_experts else [1]

    for tp, cp, pp in itertools.product(tp_sizes, cp_sizes, sizes):
        if gpus % (tp * cp * pp):
            continue
        replicas = gpus // (tp * pp)
        shares = [(zero, 0) for zero in range(4)]
        # ZeRO shares among all replicas or, with --shard, among those of a node.
        inside = max(size for size in divisors(replicas) if size == 1 or size * tp <= node)
        if 1 < inside < replicas:
            shares += [(zero, inside) for zero in (1, 2, 3)]
        for ep, micro_batch, recompute, (zero, shard), pp_chunks in itertools.product(
                ep_sizes, (1, 2, 4, 8, 16, 32, 64, 128), ("none", "selective", "full"), shares, (1, 2)):
            layout = dataclasses.replace(cfg, tp=tp, cp=cp, pp=pp, ep=ep, micro_batch=micro_batch,
                                         recompute=recompute, zero=zero, shard=shard, pp_chunks=pp_chunks,
                                         global_batch=batch)
            try:
                check_gpus(layout, gpus)
            except ValueError:
                continue
            yield layout


def search(cfg, vocab):
    """Return the plans of all layouts that the GPU's memory holds, fastest first. ValueError: none."""
    cfg = dataclasses.replace(cfg, pp_layers="")  # each layout has its own balance
    found = list(layouts(cfg, cfg.gpus, cfg.gpu))
    print(f"{len(found):,} layouts are tried", file=sys.stderr, flush=True)
    plans = []
    for layout in found:
        plan = estimate(layout, cfg.gpus, cfg.gpu, vocab)
        if plan["fits"]:
            plans.append({**plan, **training_cost(layout, plan)})
    if not plans:
        raise ValueError(f"no layout of {cfg.preset} on {cfg.gpus} {cfg.gpu} fits; try more --gpus")
    return sorted(plans, key=lambda plan: plan["ms"])


def scaling(cfg, counts, gpu, vocab):
    """Return the plans of one layout on each number of GPUs, with the same work per GPU; dp grows."""
    plans = []
    for gpus in counts:
        ep = math.gcd(cfg.ep, gpus // cfg.pp)  # the ranks of a stage
        batch = cfg.global_batch * gpus // counts[0]
        layout, _ = check_gpus(dataclasses.replace(cfg, ep=ep, global_batch=batch), gpus)
        plans.append(estimate(layout, gpus, gpu, vocab))
        plans[-1]["efficiency"] = plans[-1]["tok_s_gpu"] / plans[0]["tok_s_gpu"]
    return plans


# 3) The tables of a terminal

def print_table(title, rows):
    """Print lists of strings: the first column is aligned left, the others right."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(["", first.ljust(widths[0]), *cells]))


def print_numbers(title, numbers, form):
    print_table(title, [(name, form.format(number)) for name, number in numbers.items()])


def timeline(ranks, chunks, num_micro_batches):
    """Return what ranks do when: [{rank, begin, end, kind, micro_batch, chunk}]. A forward takes 1."""
    drawn = []
    for end, ops in timetable(ranks, chunks, num_micro_batches).items():
        for rank, op in enumerate(ops):
            if op is not None:
                drawn.append({"rank": rank, "begin": end - DURATION[op.kind], "end": end, **op._asdict()})
    return drawn


def schedule(cfg):
    """Return the timeline of a pipeline and its numbers, or None where there is one stage."""
    if cfg.pp == 1:
        return None
    count = micro_batches(cfg, stage_mesh(cfg, cfg.gpus, 0))
    return {"ranks": cfg.pp, "chunks": cfg.pp_chunks, "micro_batches": count,
            "idle": bubble(cfg.pp, cfg.pp_chunks, count),
            "ops": timeline(cfg.pp, cfg.pp_chunks, min(count, 24))}  # more would be too narrow to read


def draw_schedule(ops, ranks, chunks, width=100):
    """Return a line per rank: F0 and B0 are both ways of micro-batch 0, F0a its forward through chunk a."""
    unit = max(len(f"F{op['micro_batch']} ") for op in ops) + (chunks > 1)  # columns of a forward
    rows = [[" "] * unit * max(op["end"] for op in ops) for _ in range(ranks)]
    for op in ops:
        name = f"{op['kind']}{op['micro_batch']}"
        if chunks > 1:
            name += string.ascii_lowercase[op["chunk"] % 26]
        begin = unit * op["begin"]
        end = unit * op["end"]
        fill = " " if op["kind"] == "F" else "-"
        rows[op["rank"]][begin:end] = name.ljust(end - begin - 1, fill) + " "

    lines = [f"  rank {rank:<4}" + "".join(row).rstrip() for rank, row in enumerate(rows)]
    return [line if len(line) <= width else f"{line[:width - 4]} ..." for line in lines]


def print_schedule(cfg):
    drawn = schedule(cfg)
    idle = drawn["idle"]
    in_chunks = f" in {cfg.pp_chunks} chunks" if cfg.pp_chunks > 1 else ""
    print(f"\nschedule of {drawn['micro_batches']} micro-batches{in_chunks} over {cfg.pp} ranks:")
    print(f"  predicted bubble {100 * idle:.1f} % of the work: the ranks idle "
          f"{100 * idle / (1 + idle):.1f} % of the step")
    print("\n".join(draw_schedule(drawn["ops"], drawn["ranks"], cfg.pp_chunks)))


def print_plan(cfg, plan):
    flags = ", ".join(f"{name} {plan['layout'][name]}" for name in ("dp", *LAYOUT))
    print(f"{cfg.preset} on {cfg.gpus} {cfg.gpu}: {flags}")
    counted = "" if cfg.vocab_size or cfg.data else " with GPT-2's vocabulary; --data DIR counts that of DIR"
    print_numbers(f"parameters{counted}", plan["parameters"], "{:,}")
    print_numbers(f"memory of the fullest rank, GiB of {plan['capacity_gib']:.1f}",
                  {**plan["memory_gib"], "sum": plan["memory"]}, "{:.2f}")
    sent = dict(plan["traffic_mb"])
    if cfg.gpus > GPUS[cfg.gpu].node:
        sent["of it to other nodes"] = plan["between_nodes_mb"]
    print_numbers("sent per rank and step, MB", sent or {"none": 0}, "{:,.1f}")
    ms = {**plan["ms_parts"], "sum": plan["ms"]}
    if plan["ms_uneven"] is not None:
        ms["sum while routing is uneven"] = plan["ms_uneven"]
    print_numbers("milliseconds per step, expected", ms, "{:,.1f}")
    print_table("work", [("FLOPs per step, full attention", f"{plan['flops']['full']:.4g}"),
                         ("FLOPs per step, causal", f"{plan['flops']['causal']:.4g}"),
                         ("TFLOP/s per GPU", f"{plan['tflops']:.1f}"),
                         ("MFU", f"{100 * plan['mfu']:.1f} %"),
                         ("tokens/s per GPU", f"{plan['tok_s_gpu']:,.0f}")])
    if cfg.pp > 1:
        print_schedule(cfg)
    if cfg.tokens:
        rows = [("steps of a global batch", f"{plan['steps']:,}"), ("days", f"{plan['days']:,.2f}"),
                ("GPU-hours", f"{plan['gpu_hours']:,.0f}")]
        print_table(f"{cfg.tokens:.3g} tokens", rows)
    for line in plan["warnings"]:
        print(f"warning: {line}")


def print_search(cfg, plans):
    print(f"{cfg.preset} on {cfg.gpus} {cfg.gpu}: {len(plans)} layouts fit; the first {min(20, len(plans))}")
    columns = {"dp": "dp", "cp": "cp", "tp": "tp", "pp": "pp", "pp_chunks": "chunks", "ep": "ep",
               "zero": "zero", "shard": "shard", "micro_batch": "mbs", "recompute": "recompute"}
    rows = [("#", *columns.values(), "GiB", "ms", "TFLOP/s/GPU", "days")]
    for i, plan in enumerate(plans[:20], 1):
        flags = [str(plan["layout"][name]) for name in columns]
        days = f"{plan['days']:,.2f}" if cfg.tokens else "-"
        rows.append((str(i), *flags, f"{plan['memory']:.1f}", f"{plan['ms']:,.1f}", f"{plan['tflops']:.1f}",
                     days))
    print_table("fastest first", rows)


def print_scaling(cfg, plans):
    rows = [("GPUs", "dp", "ep", "GiB", "ms", "of it exposed sums", "ms/sample", "tok/s/GPU", "efficiency")]
    for plan in plans:
        layout = plan["layout"]
        gib = f"{plan['memory']:.1f}" + ("" if plan["fits"] else " too many")
        rows.append((str(layout["gpus"]), str(layout["dp"]), str(layout["ep"]), gib, f"{plan['ms']:.1f}",
                     f"{plan['ms_parts']['reduce']:.1f}", f"{plan['ms'] / layout['global_batch']:.2f}",
                     f"{plan['tok_s_gpu']:,.0f}", f"{100 * plan['efficiency']:.1f} %"))
    print_table(f"weak scaling of {cfg.preset}, predicted for {cfg.gpu}", rows)


# 4) The program, and the form of its page, which interface/plan.html draws

FORM = {  # the flags that the page asks for, in groups
    "where": ("gpus", "gpu", "tokens"),
    "layout": ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard"),
    "training": ("micro_batch", "global_batch", "seq_len", "recompute", "dtype", "fp8", "optimizer", "lora"),
    "model": ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "vocab_size", "mlp", "norm", "pos",
              "tied"),
    "experts": ("n_experts", "top_k", "n_shared_experts", "capacity_factor")}


def page_settings(cfg):
    """Return what the page begins with. fields: {group: {flag: its values, none where any number is one}}."""
    choices = {name: ("false", "true") if field.type is bool else typing.get_args(field.type)
               for name, field in PlanFlags.__dataclass_fields__.items()}
    fields = {group: {typed(name): choices[name] for name in names} for group, names in FORM.items()}
    return {"fields": fields, "presets": list(PRESETS), "words": filled(cfg)["words"]}


def filled(cfg):
    """Return the words of a command line that gives these flags, and {flag: value} of the form."""
    usual = PlanFlags(**{**PRESETS[cfg.preset], "preset": cfg.preset, "data": ""})
    asked = sum(FORM.values(), ())
    words = [cfg.preset]
    for name in dict.fromkeys([*asked, *vars(cfg)]):
        value = getattr(cfg, name)
        if value != getattr(usual, name) and name not in ("serve", "port", "config"):
            words += [typed(name), *map(str, value if isinstance(value, tuple) else [value])]
    values = {typed(name): str(getattr(cfg, name)).lower() for name in asked}
    return {"words": words, "values": {"preset": cfg.preset, **values}}


def plan_one(cfg, vocab):
    """Return (cfg with its global batch, the plan of its layout with all that is printed)."""
    cfg, mesh = check_gpus(cfg, cfg.gpus)
    plan = estimate(cfg, cfg.gpus, cfg.gpu, vocab)
    plan["ms_uneven"] = None  # where a rank waits for the one with the most rows, and that was measured
    if needs_row_limit(cfg, mesh) and cfg.ep <= MOST_UNEVEN:
        plan["ms_uneven"] = estimate(cfg, cfg.gpus, cfg.gpu, vocab, uneven=True)["ms"]
    plan["warnings"] = idle_warnings(Rank(cfg, mesh, vocab), GPUS[cfg.gpu], plan["stage_ms"])
    if not plan["fits"]:
        plan["warnings"].append(
            f"does not fit: {plan['memory']:.1f} of {plan['capacity_gib']:.1f} GiB; try --search")
    plan.update(training_cost(cfg, plan))
    return cfg, plan


def answer(asked):
    """Return the plan of the words that the page of --serve sends, as JSON. ValueError: they are wrong."""
    flags, _ = arguments(asked["words"])
    cfg, plan = plan_one(flags, vocabulary(flags))
    return [json.dumps({"plan": plan, "schedule": schedule(cfg), **filled(flags)})]


@wrong_input()
def main(argv=None):
    """Print a plan. SystemExit(2) after one line on stderr: wrong input."""
    cfg, counts = arguments(sys.argv[1:] if argv is None else argv)
    if cfg.serve:
        Server("127.0.0.1", cfg.port).run(answer, page_settings(cfg), "plan.html")
        return
    vocab = vocabulary(cfg)
    if counts:
        found = scaling(cfg, counts, cfg.gpu, vocab)
        print_found = print_scaling
    elif cfg.search:
        found = search(cfg, vocab)
        print_found = print_search
    else:
        cfg, found = plan_one(cfg, vocab)
        print_found = print_plan
    if cfg.json:
        print(json.dumps(found, indent=1))
    else:
        print_found(cfg, found)


if __name__ == "__main__":
    raise SystemExit(main())

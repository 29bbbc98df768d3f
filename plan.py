"""What a layout will cost, before it runs: parameters, memory per rank, bytes sent, milliseconds, days.

    python plan.py bloom-176b --gpus 384 --gpu a100-80 --tp 4 --pp 12 --zero 1 --recompute full --tokens 366e9
    python plan.py smol-1.7b --gpus 8 --gpu h200 --search
    python plan.py dense-210m --zero 1 --scaling 1,2,4,8,64,512

    0) memory    footprint.py
    1) traffic   what parallel.py sends, collective by collective
    2) the plan  with cost.py's milliseconds; what the shapes waste; the search over layouts; weak scaling
"""
import argparse
import dataclasses
import json
import math
import signal
import sys
from collections import Counter
from types import SimpleNamespace

from config import batch_schedule, check, check_layout, parse
from corpus.data import load_meta
from cost.memory import (
    GIB,
    graphed,
    kept,
    local_parameters,
    lone,
    memory,
    micro_batches,
    near,
    spans,
    windows,
)
from cost.step_time import GPUS, SIZE, dropless, fullest, products, room, stage_time, step_time, waves
from model import count_parameters, flops_per_token, padded
from parallel import Axis, Mesh, make_mesh

# -----------------------------------------------------------------------------
# 1) traffic

def traffic(cfg, mesh, vocab_size, batch, windows=True):
    """-> {axis name: bytes that this rank sends per optimizer step}, by ring algorithms; experts balanced.
    windows: whether GPUs reach each other's memory. parallel.Axis.sent measures the same."""
    weight, wide = SIZE[cfg.dtype], max(4, SIZE[cfg.dtype])
    micro = micro_batches(cfg, mesh, batch)
    rows = cfg.micro_batch * cfg.seq_len  # (B*T, C) on every tp rank when gathered
    first, last = spans(cfg, mesh.pp.size)[mesh.pp.rank]
    blocks, again = last - first, cfg.recompute == "full"
    out = Counter({name: both[0] + both[1] for name, both
                   in reductions(cfg, mesh, vocab_size, windows).items()})
    # tensor parallelism: attention and MLP each gather and scatter (B*T, C), backward does both adjoints.
    # recomputing stops at the last tensor backward needs, before a branch's scatter where no branch follows
    t = (mesh.tp.size - 1) / mesh.tp.size
    shared = cfg.n_experts and cfg.n_shared_experts
    calls = 8 if not cfg.n_experts or shared else 4
    calls += again * (3 if not cfg.n_experts or shared else 2)
    ends = 2 * (first == 0) + 2 * (last == cfg.n_layer)  # embedding: scatter; head: gather; again in backward
    out["tp"] += t * micro * (blocks * calls + ends) * rows * cfg.n_embd * weight
    if last == cfg.n_layer:  # cross-entropy: the maximum, and two sums, over the vocabulary
        out["tp"] += t * micro * 2 * 3 * rows * wide
    if cfg.n_experts:
        E, K, n = cfg.n_experts, cfg.top_k, rows / mesh.tp.size
        out["tp"] += t * micro * blocks * 2 * E * wide  # the router's counts
        away = (mesh.ep.size - 1) / mesh.ep.size
        slots = E * min(math.ceil(n * K / E * cfg.capacity_factor), n) if cfg.capacity_factor else n * K
        # there and back, forward, backward and again; dropless sends E counts before
        out["ep"] += away * micro * blocks * (slots * cfg.n_embd * weight * (6 if again else 4)
                                              + (0 if cfg.capacity_factor else 8 * E))
    # pipeline: one activation forwards, one gradient backwards
    neighbours = (first > 0) + (last < cfg.n_layer)
    out["pp"] += micro * neighbours * rows // mesh.tp.size * cfg.n_embd * weight
    out["world"] += 2 * (mesh.world.size - 1) / mesh.world.size * 4 * 8  # loss and norms: four fp64
    return {name: b for name, b in out.items() if b}


def reductions(cfg, mesh, vocab_size, windows=True):
    """-> {axis: (bytes of gradients, of weights, collectives each, share of the last)}: an all-reduce is a
    reduce-scatter and an all-gather of fp32; ZeRO-1 gathers weights instead; through windows gradients
    travel in the model's dtype."""
    weight, grad = SIZE[cfg.dtype], max(4, SIZE[cfg.dtype])
    out, close = {}, near(cfg, mesh, local_parameters(cfg, mesh, vocab_size)) if windows else {}
    for name, buckets in local_parameters(cfg, mesh, vocab_size, buckets=True).items():
        size, n = getattr(mesh, name).size, sum(buckets)
        each = (size - 1) / size * n
        there = weight if name in close else grad
        moved = (each * there, each * weight) if cfg.zero else (2 * each * grad, 0)
        out[name] = *moved, len(buckets), buckets[-1] / n
    return out


# -----------------------------------------------------------------------------
# 2) the plan

def place(cfg, gpus, stage):
    """The mesh as the first rank of a stage sees it, without groups."""
    each = gpus // cfg.pp
    dp = each // cfg.tp
    size = dict(world=gpus, dp=dp, tp=cfg.tp, pp=cfg.pp, ep=cfg.ep, edp=each // cfg.ep, stage=each, tied=1)
    if stage in (0, cfg.pp - 1):
        size["tied"] = dp * min(2, cfg.pp)
    return Mesh(**{name: Axis(name, stage if name == "pp" else 0, n) for name, n in size.items()})


def check_gpus(cfg, gpus):
    """-> (cfg with its global batch, its mesh); ValueError where train.py would refuse this layout."""
    world = SimpleNamespace(rank=0, size=gpus, calls=None)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, False, cfg.n_experts)
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    check_layout(cfg, mesh, batch)
    return dataclasses.replace(cfg, global_batch=batch), mesh


def estimate(cfg, gpus, gpu, vocab):
    """-> everything about one layout, of the fullest and of the slowest stage, as plain numbers."""
    # stages alike but for their place count once: the first of them has the most micro-batches in flight
    alike = {}
    for s, (first, last) in enumerate(spans(cfg, cfg.pp)):
        alike.setdefault((last - first, first == 0, last == cfg.n_layer), []).append(s)
    stages = [place(cfg, gpus, ranks[0]) for ranks in alike.values()]
    micro, every = micro_batches(cfg, stages[0]), spans(cfg, cfg.pp)
    layers = [every[mesh.pp.rank] for mesh in stages]
    parts = max((memory(cfg, mesh, vocab) for mesh in stages), key=lambda parts: sum(parts.values()))
    chip, static = GPUS[gpu], graphed(cfg, stages[0])
    block = kept(cfg, stages[0], fullest(cfg, stages[0]))[0]
    sent = [traffic(cfg, mesh, vocab, cfg.global_batch) for mesh in stages]
    each = [stage_time(cfg, mesh, span, block, padded(vocab), chip, bytes_, micro, static)
            for mesh, span, bytes_ in zip(stages, layers, sent, strict=True)]
    by_stage = [(s, ms * 1e3) for ranks, ms in zip(alike.values(), each, strict=True) for s in ranks]
    local = [local_parameters(cfg, mesh, vocab) for mesh in stages]
    most = max(range(len(stages)), key=lambda s: sum(local[s].values()))
    owned = sum(n / (getattr(stages[most], name).size if cfg.zero else 1) for name, n in local[most].items())
    sums = reductions(cfg, stages[most], vocab)
    alone, close = (f(cfg, stages[most], local[most]) for f in (lone, near))
    parts_s = step_time(cfg, stages[most], micro, max(each), sum(local[most].values()), owned, alone, close,
                        sums, chip)
    seconds, tokens = sum(parts_s.values()), cfg.global_batch * cfg.seq_len
    full, causal = flops_per_token(cfg, vocab)
    total = count_parameters(cfg, vocab)
    flags = ("tp", "pp", "ep", "zero", "micro_batch", "global_batch", "recompute")
    return {"layout": {"gpus": gpus, "dp": stages[0].dp.size, **{k: getattr(cfg, k) for k in flags}},
            "parameters": {"vocabulary": vocab, "total": total["total"], "embedding": total["embedding"],
                           "active": total["matmul"], "per_rank": max(sum(c.values()) for c in local)},
            "memory_gib": {k: b / GIB for k, b in parts.items()}, "memory": sum(parts.values()) / GIB,
            "fits": sum(parts.values()) <= chip.memory, "capacity_gib": chip.memory / GIB,
            "flops": {"full": full * tokens, "causal": causal * tokens},
            "traffic_mb": {k: max(s.get(k, 0) for s in sent) / 1e6 for k in sorted(set().union(*sent))},
            "ms_parts": {k: s * 1e3 for k, s in parts_s.items()}, "ms": seconds * 1e3,
            "tok_s_gpu": tokens / seconds / gpus, "tflops": full * tokens / seconds / gpus / 1e12,
            "mfu": full * tokens / seconds / gpus / chip.peak, "stage_ms": [ms for _, ms in sorted(by_stage)]}


def warnings(cfg, plan, gpu, vocab):
    """-> lines: what of these shapes leaves a GPU idle."""
    mesh, sms, out = place(cfg, plan["layout"]["gpus"], 0), GPUS[gpu].sms, []
    D, tp = cfg.n_embd // cfg.n_head, cfg.tp
    local = {"n-embd": cfg.n_embd, "head dim": D, f"ffn-hidden / tp {tp}": cfg.ffn_hidden // tp}
    for name, n in local.items():
        if n % 8:
            out.append(f"{name} is {n}, no multiple of 8: slower kernels; try {-(-n // 8) * 8}")
        elif n % 64 and name != "head dim":
            out.append(f"{name} is {n}, no multiple of 64: tiles are partly empty; try {-(-n // 64) * 64}")
        elif n % 128 and name != "head dim":
            out.append(f"{name} is {n}, no multiple of 128, the edge of a tile; try {-(-n // 128) * 128}")
    if D % 64:
        out.append(f"head dim {D}: attention kernels pad it to {-(-D // 64) * 64}")
    if vocab % 128:
        out.append(f"the vocabulary {vocab} is padded to {padded(vocab)} rows")
    for m, n, count in dict.fromkeys((m, n, count) for m, n, _, count in products(cfg, mesh)):
        used, whole = waves(m, n, count, sms)
        if used / whole < 0.8:
            out.append(f"wave quantisation: {count} x ({m}, {n}) fill {used:.2f} of {whole} waves of {sms} "
                       f"multiprocessors: {100 * (1 - used / whole):.0f} % idle")
    if cfg.n_kv_head % tp:
        out.append(f"tp {tp} exceeds n-kv-head {cfg.n_kv_head}: key/value weights are replicated, "
                   f"{tp // cfg.n_kv_head} ranks compute each head")
    stages = plan["stage_ms"]
    if max(stages) > 1.05 * sum(stages) / len(stages):
        ratio = max(stages) / sum(stages) * len(stages)
        out.append(f"stages of unequal work: the slowest takes {ratio:.2f} times the mean "
                   f" ({', '.join(f'{s:.0f}' for s in stages)} ms)")
    micro = micro_batches(cfg, mesh)
    if cfg.pp > 1 and micro < 4 * cfg.pp:
        out.append(f"{micro} micro-batches over {cfg.pp} stages: the pipeline idles "
                   f"{100 * (cfg.pp - 1) / (micro + cfg.pp - 1):.0f} %")
    if windows(cfg, mesh) and dropless(cfg, mesh) and not room(cfg, mesh):
        need = room(dataclasses.replace(cfg, ep_slack=cfg.ep), mesh)
        out.append(f"rows to the fullest of {cfg.ep} ranks: {need:.1f} times the balanced expected, more than"
                   f" --ep-slack {cfg.ep_slack}, so no CUDA graph; try --ep-slack {math.ceil(need)}")
    if dropless(cfg, mesh) and graphed(cfg, mesh) and cfg.ep > GPUS[gpu].node:
        out.append(f"ep {cfg.ep} reaches over the node's {GPUS[gpu].node} GPUs: rows travel in messages, not"
                   f" through windows, so no CUDA graph; try --ep {GPUS[gpu].node}")
    if tp > GPUS[gpu].node:
        out.append(f"tp {tp} reaches over the node's {GPUS[gpu].node} GPUs, on the slow network")
    if not plan["fits"]:
        out.append(f"does not fit: {plan['memory']:.1f} of {plan['capacity_gib']:.1f} GiB; try --search")
    return out


def search(cfg, gpus, gpu, vocab):
    """Every layout that train.py accepts and the GPU holds -> plans, fastest first. One global batch."""
    batch, found = cfg.global_batch or cfg.micro_batch * gpus, []
    divisors = [d for d in range(1, gpus + 1) if gpus % d == 0]
    tps = [t for t in divisors if 128 % t == 0 and t <= GPUS[gpu].node]
    pps = [p for p in divisors if p <= cfg.n_layer]
    sizes = [2**i for i in range(8)]
    for tp, pp in ((t, p) for t in tps for p in pps if gpus % (t * p) == 0):
        stage = gpus // pp
        eps = [e for e in divisors if stage % e == 0 and cfg.n_experts % e == 0] if cfg.n_experts else [1]
        for ep in eps:
            for mbs in sizes:
                if batch % (mbs * (stage // tp)):
                    break
                for recompute in ("none", "full"):
                    for zero in (0, 1):
                        this = dataclasses.replace(
                            cfg, tp=tp, pp=pp, ep=ep, micro_batch=mbs, recompute=recompute, zero=zero,
                            global_batch=batch)
                        try:
                            check_layout(this, place(this, gpus, 0), batch)
                        except ValueError:
                            continue
                        plan = estimate(this, gpus, gpu, vocab)
                        if plan["fits"]:
                            found.append(plan)
    return sorted(found, key=lambda plan: plan["ms"])


def scaling(cfg, counts, gpu, vocab):
    """Plans of one layout on that many GPUs, each with the work it has on the first number; dp grows. ep is
    capped by the ranks there are, and of models with experts the ep that is fastest follows where it differs.
    """
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


def budget(cfg, plan, args, vocab):
    """--tokens -> {steps, days, gpu_hours}; a step of the ramp costs what its own batch costs."""
    at = plan["layout"]
    steps = batch_schedule(math.ceil(args.tokens / cfg.seq_len), at["global_batch"], cfg.rampup_batch_size)
    this = dataclasses.replace(cfg, **{k: v for k, v in at.items() if k not in ("gpus", "dp")})
    ms = {batch: plan["ms"] if batch == at["global_batch"] else
          estimate(dataclasses.replace(this, global_batch=batch), args.gpus, args.gpu, vocab)["ms"]
          for batch in steps}
    hours = sum(n * ms[batch] for batch, n in steps.items()) / 3.6e6
    return {"steps": sum(steps.values()), "days": hours / 24, "gpu_hours": hours * args.gpus}


def vocabulary(cfg):
    """What train.py would take: the flag's, the data's, synthetic's 256. Without data, GPT-2's."""
    if cfg.vocab_size or cfg.data == "synthetic":
        return cfg.vocab_size or 256
    try:
        return load_meta(cfg.data)["vocab_size"]
    except OSError:
        return 50257


def arguments(argv):
    """-> (own flags, Config)"""
    p = argparse.ArgumentParser("plan.py", allow_abbrev=False, add_help=False)
    p.error = lambda message: (_ for _ in ()).throw(ValueError(message))
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--gpu", choices=GPUS, default="h200")
    p.add_argument("--tokens", type=float, default=0)
    p.add_argument("--search", action="store_true")
    p.add_argument("--scaling", default="")
    p.add_argument("--json", action="store_true")
    args, rest = p.parse_known_args(argv)
    if {"-h", "--help"} & set(rest):
        print(f"python plan.py [PRESET] --gpus N --gpu {{{','.join(GPUS)}}} [--tokens T: steps, days for T]\n"
              "    [--search: rank every layout that fits] [--scaling 1,8,64: with the same work per GPU]\n"
              "    [--json] [flags of train.py, see its --help]")
        raise SystemExit(0)
    try:
        args.scaling = [int(n) for n in args.scaling.split(",") if n]
    except ValueError:
        args.scaling = [0]
    if min(args.scaling, default=1) < 1:
        raise ValueError("--scaling takes numbers of GPUs, 1,2,4,8")
    if args.gpus < 1 or args.tokens < 0:
        raise ValueError(f"--gpus {args.gpus} must be at least 1 and --tokens {args.tokens:g} not negative")
    cfg = parse(rest)
    check(cfg)
    return args, cfg


def table(title, rows):
    print(f"\n{title}")
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [c.rjust(w) for c, w in zip(row, wide, strict=True)]
        print("  ".join(["", row[0].ljust(wide[0]), *cells[1:]]))


def show(cfg, plan, args, vocab):
    at = plan["layout"]
    flags = ", ".join(f"{k} {v}" for k, v in at.items() if k != "gpus")
    print(f"{cfg.preset} on {args.gpus} {args.gpu}: {flags}")
    table("parameters", [(k, f"{n:,}") for k, n in plan["parameters"].items()])
    table(f"memory of the fullest rank, GiB of {plan['capacity_gib']:.1f}",
          [(k, f"{b:.2f}") for k, b in plan["memory_gib"].items()] + [("sum", f"{plan['memory']:.2f}")])
    moved = [(k, f"{b:,.1f}") for k, b in plan["traffic_mb"].items()]
    table("sent per rank and step, MB", moved or [("none", "0")])
    table("milliseconds per step, expected", [(k, f"{ms:,.1f}") for k, ms in plan["ms_parts"].items()]
          + [("sum", f"{plan['ms']:,.1f}")])
    table("work", [("FLOPs per step, full attention", f"{plan['flops']['full']:.4g}"),
                   ("FLOPs per step, causal", f"{plan['flops']['causal']:.4g}"),
                   ("TFLOP/s per GPU", f"{plan['tflops']:.1f}"), ("MFU", f"{100 * plan['mfu']:.1f} %"),
                   ("tokens/s per GPU", f"{plan['tok_s_gpu']:,.0f}")])
    if args.tokens:
        ramp = ", with the ramp" * bool(cfg.rampup_batch_size)
        table(f"{args.tokens:.3g} tokens{ramp}",
              [("steps", f"{plan['steps']:,}"), ("days", f"{plan['days']:,.2f}"),
               ("GPU-hours", f"{plan['gpu_hours']:,.0f}")])
    for line in plan["warnings"]:
        print(f"warning: {line}")


def ranking(cfg, plans, args):
    few = "; the first 20" if len(plans) > 20 else ""
    print(f"{cfg.preset} on {args.gpus} {args.gpu}: {len(plans)} layouts fit{few}")
    names = ("dp", "tp", "pp", "ep", "zero", "micro_batch", "recompute")
    rows = [("#", *("mbs" if n == "micro_batch" else n for n in names), "GiB", "ms", "TFLOP/s/GPU", "days")]
    for i, plan in enumerate(plans[:20], 1):
        days = f"{plan['days']:,.2f}" if args.tokens else "-"
        rows.append((str(i), *(str(plan["layout"][n]) for n in names), f"{plan['memory']:.1f}",
                     f"{plan['ms']:,.1f}", f"{plan['tflops']:.1f}", days))
    table("fastest first", rows)


def curve(cfg, plans, args):
    print(f"{cfg.preset}, zero {cfg.zero}, micro-batches of {cfg.micro_batch}: "
          f"predicted for {args.gpu}, nodes of {GPUS[args.gpu].node}")
    rows = [("GPUs", "dp", "ep", "GiB", "ms", "of it exposed sums", "tok/s/GPU", "efficiency")]
    for p in plans:
        rows.append((f"{p['layout']['gpus']}", f"{p['layout']['dp']}", f"{p['layout']['ep']}",
                     f"{p['memory']:.1f}" + " too many" * (not p["fits"]), f"{p['ms']:.1f}",
                     f"{p['ms_parts']['reduce']:.1f}", f"{p['tok_s_gpu']:,.0f}",
                     f"{100 * p['efficiency']:.1f} %"))
    table("weak scaling", rows)


def main(argv=None):
    try:
        args, cfg = arguments(sys.argv[1:] if argv is None else argv)
        vocab = vocabulary(cfg)
        if args.scaling:
            plans = scaling(cfg, args.scaling, args.gpu, vocab)
        elif args.search:
            cfg = dataclasses.replace(cfg, pp_layers="")  # each layout has its own balance
            plans = search(cfg, args.gpus, args.gpu, vocab)
            if not plans:
                raise ValueError(f"no layout of {cfg.preset} on {args.gpus} {args.gpu} fits; try more --gpus")
        else:
            cfg, _ = check_gpus(cfg, args.gpus)
            plans = [estimate(cfg, args.gpus, args.gpu, vocab)]
            plans[0]["warnings"] = warnings(cfg, plans[0], args.gpu, vocab)
    except ValueError as e:
        print(f"nanoshard: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    for plan in plans:
        plan.update({} if args.scaling else budget(cfg, plan, args, vocab))
    if args.json:
        print(json.dumps(plans if args.search or args.scaling else plans[0], indent=1))
    elif args.scaling:
        curve(cfg, plans, args)
    elif args.search:
        ranking(cfg, plans, args)
    else:
        show(cfg, plans[0], args, vocab)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    main()

"""What a layout will cost, before it runs: parameters, memory per rank, bytes sent, milliseconds, days.

    python plan.py bloom-176b --gpus 384 --gpu a100-80 --tp 4 --pp 12 --zero 1 --recompute full --tokens 366e9
    python plan.py smol-1.7b --gpus 8 --gpu h200 --search
    python plan.py dense-210m --zero 1 --scaling 1,2,4,8,64,512
    python plan.py smol-1.7b --gpus 8 --pp 4 --serve

    1) the plan of one layout, from cost/: parameters, traffic, memory, step_time, idle
    2) many layouts: the search, weak scaling
    3) the command line; cost/plan_tables.py prints what is found, and a page in the browser draws it
"""
import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":  # It says what to type where numpy or torch is not installed.
    from interface.packages import check_packages
    check_packages()

from cost.plan_flags import arguments
from interface.command_line import wrong_input

if __name__ == "__main__":  # --help and wrong flags are answered before torch is imported.
    with wrong_input():
        PARSED = arguments(sys.argv[1:])

from config import ceil_div
from corpus.samples import batch_size, load_blend_meta, settled_doc_mask
from cost import plan_page
from cost.advice import idle_warnings
from cost.gpus import GPUS, gpu_for
from cost.memory import GIB, memory, saved_activations
from cost.muon import muon_seconds
from cost.parameters import (
    count_parameters,
    flops_per_token,
    held_layers,
    local_parameters,
    micro_batches,
    stage_mesh,
)
from cost.plan_tables import print_plan, print_scaling, print_search
from cost.step_time import (
    MOST_UNEVEN,
    expected_choice,
    max_load_factor,
    stage_time,
    step_time,
)
from cost.traffic import bytes_between_nodes, reductions, traffic
from fast.choose import needs_row_limit
from interface.layout import check_layout
from interface.serve import Server
from interface.terminal import say

# -----------------------------------------------------------------------------
# 1) The plan of one layout

LAYOUT = ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard", "micro_batch", "global_batch", "recompute")
MOST_OPERATIONS = 10**6  # forwards of a schedule


def check_gpus(cfg, gpus):
    """Return (cfg with its global batch, rank 0's mesh).

    ValueError: train.py would refuse this layout.
    """
    mesh = stage_mesh(cfg, gpus, 0)
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    check_layout(cfg, mesh, batch)
    cfg = dataclasses.replace(cfg, global_batch=batch)
    operations = micro_batches(cfg, mesh) * cfg.pp * cfg.pp_chunks
    if cfg.pp > 1 and operations > MOST_OPERATIONS:
        raise ValueError(f"a step of {operations:,} forwards (micro-batches * pp * pp-chunks) is too long, "
                         f"the most are {MOST_OPERATIONS:,}; give a smaller --global-batch, or a larger "
                         "--micro-batch")
    return cfg, mesh


def _groups_of_stages(cfg, gpus):
    """Return lists of pipeline stages: the stages of one list hold equal parts of the model.

    Such stages differ only in their position. The first of them has the most micro-batches in flight, so it
    stands for all.
    """
    groups = {}
    for stage in range(cfg.pp):
        held = held_layers(cfg, stage_mesh(cfg, gpus, stage))
        groups.setdefault(held, []).append(stage)
    return list(groups.values())


def estimate(cfg, gpus, gpu, vocab, uneven=False):
    """Return {name: plain numbers} of one layout: memory of the fullest stage, time of the slowest.

    cfg: a Config with a global batch. gpus: the number of GPUs. gpu: their kind, a name in
    cost.gpus.GPUS. vocab: the number of symbols, before padding. uneven: the time is that of the experts'
    young routing, not of what it settles to. ValueError: see gpu_for.
    """
    chip = gpu_for(cfg, gpu)
    groups = _groups_of_stages(cfg, gpus)
    meshes = [stage_mesh(cfg, gpus, stages[0]) for stages in groups]
    choice = expected_choice(cfg, meshes[0], chip.node)

    candidates = [memory(cfg, mesh, vocab, choice) for mesh in meshes]
    fullest = max(candidates, key=lambda parts: sum(parts.values()))
    used = sum(fullest.values())
    sent = [traffic(cfg, mesh, vocab, cfg.global_batch, choice) for mesh in meshes]
    between = [bytes_between_nodes(mesh, sent_here, lambda rank: rank // chip.node)
               for mesh, sent_here in zip(meshes, sent, strict=True)]

    block = saved_activations(cfg, meshes[0], max_load_factor(cfg, meshes[0], uneven=uneven), choice)
    of_stage = {}  # seconds of a micro-batch on each stage
    for stages, mesh, sent_here in zip(groups, meshes, sent, strict=True):
        seconds = stage_time(cfg, mesh, chip, vocab, block, sent_here, uneven=uneven)
        of_stage.update(dict.fromkeys(stages, seconds))

    largest = max(meshes, key=lambda mesh: sum(local_parameters(cfg, mesh, vocab).values()))
    local = local_parameters(cfg, largest, vocab)
    step = step_time(cfg, largest, chip, vocab, max(of_stage.values()),
                     reductions(cfg, largest, vocab, choice))

    step["optimizer"] += muon_seconds(cfg, largest, chip, vocab)

    total = sum(step.values())
    tokens = cfg.global_batch * cfg.seq_len
    full, causal = flops_per_token(cfg, vocab)
    count = count_parameters(cfg, vocab)
    return {
        "layout": {"gpus": gpus, "dp": meshes[0].dp.size, **{name: getattr(cfg, name) for name in LAYOUT}},
        "parameters": {"vocabulary": vocab, "total": count["total"], "embedding": count["embedding"],
                       "active": count["matmul"], "per_rank": sum(local.values())},
        "memory_gib": {part: nbytes / GIB for part, nbytes in fullest.items()},
        "memory": used / GIB, "fits": used <= chip.memory, "capacity_gib": chip.memory / GIB,
        "flops": {"full": full * tokens, "causal": causal * tokens},
        "traffic_mb": _largest_traffic(sent), "between_nodes_mb": max(between) / 1e6,
        "ms_parts": {part: seconds * 1e3 for part, seconds in step.items()}, "ms": total * 1e3,
        "tok_s_gpu": tokens / total / gpus,
        "tflops": full * tokens / total / gpus / 1e12,
        "mfu": full * tokens / total / gpus / chip.peak,
        "stage_ms": [of_stage[stage] * 1e3 for stage in range(cfg.pp)]}


def uneven_ms(cfg, gpus, gpu, vocab):
    """Return the milliseconds of a step while the routing of experts is young and uneven.

    None: no rank waits for the one with the most rows, or young routing was not measured over so many ranks.
    For the arguments see estimate.
    """
    if not needs_row_limit(cfg, stage_mesh(cfg, gpus, 0)) or cfg.ep > MOST_UNEVEN:
        return None
    return estimate(cfg, gpus, gpu, vocab, uneven=True)["ms"]


def _largest_traffic(sent):
    """Return {axis name: MB of the stage that sends the most}. sent: {axis name: bytes} of each stage."""
    axes = sorted(set().union(*sent))
    return {axis: max(stage.get(axis, 0) for stage in sent) / 1e6 for axis in axes}


def batch_schedule(samples, full, ramp=()):
    """Return {batch: number of steps with it} of a run that consumes at least `samples` sequences.

    full: --global-batch. ramp: --rampup-batch-size.
    """
    steps = Counter()
    done = 0
    while done < samples:
        batch = batch_size(done, full, ramp)
        until = samples
        if batch < full:
            until = min(samples, _end_of_ramp_phase(batch, full, ramp))
        count = ceil_div(until - done, batch)
        steps[batch] += count
        done += count * batch
    return steps


def _end_of_ramp_phase(batch, full, ramp):
    """Return the sequences after which the batch ramp leaves this batch."""
    start, increment, samples = ramp
    stages = (full - start) // increment
    next_stage = (batch - start) // increment + 1
    return ceil_div(next_stage * samples, stages)


def training_cost(cfg, plan, vocab):
    """Return {"steps", "days", "gpu_hours"} of --tokens.

    A step of the batch ramp costs what a plan of its own batch costs. plan: what estimate returned for
    a layout of cfg, a PlanFlags.
    """
    layout = {name: plan["layout"][name] for name in LAYOUT}
    gpus = plan["layout"]["gpus"]
    full = layout["global_batch"]
    samples = math.ceil(cfg.tokens / cfg.seq_len)
    steps = batch_schedule(samples, full, cfg.rampup_batch_size)
    ms = 0
    for batch, count in steps.items():
        of_this_batch = plan
        if batch != full:
            smaller = dataclasses.replace(cfg, **{**layout, "global_batch": batch})
            of_this_batch = estimate(smaller, gpus, cfg.gpu, vocab)
        ms += count * of_this_batch["ms"]
    hours = ms / 3.6e6
    return {"steps": sum(steps.values()), "days": hours / 24, "gpu_hours": hours * gpus}


def warnings(cfg, plan, gpu, vocab):
    """Return a line for each cause that leaves a GPU idle, and one if the layout does not fit."""
    mesh = stage_mesh(cfg, plan["layout"]["gpus"], 0)
    lines = idle_warnings(cfg, mesh, gpu, vocab, plan["stage_ms"])
    if not plan["fits"]:
        lines.append(f"does not fit: {plan['memory']:.1f} of {plan['capacity_gib']:.1f} GiB; try --search")
    return lines


GPT2_SYMBOLS = 50257


def from_data(cfg):
    """Return (cfg with the --doc-mask of its data, number of symbols, where that number is from).

    It is the flag's or the preset's, or else that of --data. Without data it is that of GPT-2's vocabulary.
    A masked language model adds [MASK] to the symbols of the data.
    """
    mask = 1 if cfg.objective == "mlm" else 0
    symbols, source = GPT2_SYMBOLS + mask, "GPT-2's; --data DIR or --vocab-size says another"
    if cfg.data == "synthetic":
        symbols, source = 256 + mask, "synthetic data"
    elif cfg.data:
        try:
            symbols, source = load_blend_meta(cfg.data)["vocab_size"] + mask, cfg.data
            cfg = dataclasses.replace(cfg, doc_mask=settled_doc_mask(cfg.data, cfg.doc_mask))
        except OSError:
            source = f"GPT-2's, because {cfg.data} is not there; --vocab-size says another"
    if cfg.vocab_size:
        return cfg, cfg.vocab_size, "--vocab-size, or the preset's"
    return cfg, symbols, source


# -----------------------------------------------------------------------------
# 2) Many layouts

SHORTEST_SHARE = 2048  # positions per rank: the search does not cut a sequence into shorter shares


def divisors(n):
    """Return all divisors of n, smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(cfg, gpus, gpu):
    """Yield cfg with each layout that train.py accepts on `gpus` GPUs, all with one global batch.

    cp is that of cfg if it is above 1, or else any size that leaves each rank at least SHORTEST_SHARE
    positions of a sequence.
    """
    batch = cfg.global_batch or cfg.micro_batch * gpus
    sizes = divisors(gpus)
    tp_sizes = [tp for tp in sizes if 128 % tp == 0 and tp <= GPUS[gpu].node]
    cp_sizes = [cfg.cp]
    if cfg.cp == 1:
        cp_sizes = [cp for cp in sizes if cp == 1 or cfg.seq_len // cp >= SHORTEST_SHARE]
    pp_sizes = [pp for pp in sizes if pp <= cfg.n_layer]

    for tp, cp, pp in itertools.product(tp_sizes, cp_sizes, pp_sizes):
        stage_ranks = gpus // pp
        if stage_ranks % (tp * cp):
            continue
        dp = stage_ranks // (tp * cp)
        options = itertools.product(_ep_sizes(cfg, stage_ranks), _micro_batch_sizes(batch, dp),
                                    ("none", "selective", "full"), _shares(tp, dp * cp, GPUS[gpu].node),
                                    _chunk_counts(cfg, pp))
        for ep, micro_batch, recompute, (zero, shard), pp_chunks in options:
            layout = dataclasses.replace(cfg, tp=tp, cp=cp, pp=pp, ep=ep, micro_batch=micro_batch,
                                         recompute=recompute, zero=zero, shard=shard, pp_chunks=pp_chunks,
                                         global_batch=batch)
            try:
                layout, _ = check_gpus(layout, gpus)
            except ValueError:
                continue
            yield layout


def _ep_sizes(cfg, stage_ranks):
    """Return the sizes of ep that divide the ranks of a stage and the experts."""
    if not cfg.n_experts:
        return [1]
    return [ep for ep in divisors(stage_ranks) if cfg.n_experts % ep == 0]


def _micro_batch_sizes(batch, dp):
    """Return the sizes of micro-batches, powers of two up to 128, that fill a batch on dp replicas."""
    return [2**i for i in range(8) if batch % (2**i * dp) == 0]


def _shares(tp, replicas, node):
    """Return the pairs (zero, shard): all replicas share, or those of a node if they are on several."""
    pairs = [(zero, 0) for zero in range(4)]
    inside = max(size for size in divisors(replicas) if size == 1 or size * tp <= node)
    if 1 < inside < replicas:
        pairs += [(zero, inside) for zero in (1, 2, 3)]
    return pairs


def _chunk_counts(cfg, pp):
    """Return the possible numbers of chunks on a rank of the pipeline."""
    if pp > 1 and 2 * pp <= cfg.n_layer:
        return [1, 2]
    return [1]


def search(cfg, gpus, gpu, vocab):
    """Return the plans of all layouts that the GPU's memory holds, fastest first; print its progress."""
    found = list(layouts(cfg, gpus, gpu))
    print(f"{len(found):,} layouts are tried", file=sys.stderr, flush=True)
    plans = [estimate(layout, gpus, gpu, vocab) for layout in found]
    return sorted((plan for plan in plans if plan["fits"]), key=lambda plan: plan["ms"])


def scaling(cfg, counts, gpu, vocab):
    """Return the plans of one layout on each number of GPUs, with the same work per GPU; dp grows.

    ep is the largest divisor of cfg's ep that divides the ranks of a stage. In a model with experts, the plan
    with the fastest ep follows, if that ep is different.
    """
    found = []
    for gpus in counts:
        batch = cfg.global_batch * gpus // counts[0]
        stage_ranks = gpus // cfg.pp
        own = math.gcd(cfg.ep, stage_ranks)
        others = [ep for ep in _ep_sizes(cfg, stage_ranks) if ep != own] if cfg.n_experts else []
        layout, _ = check_gpus(dataclasses.replace(cfg, ep=own, global_batch=batch), gpus)
        plans = [estimate(layout, gpus, gpu, vocab)]
        for ep in others:
            with contextlib.suppress(ValueError):  # train.py would refuse an ep that nobody asked for.
                layout, _ = check_gpus(dataclasses.replace(cfg, ep=ep, global_batch=batch), gpus)
                plans.append(estimate(layout, gpus, gpu, vocab))
        fastest = min((plan for plan in plans if plan["fits"]), key=lambda plan: plan["ms"], default=plans[0])
        found.append(plans[0])
        if fastest is not plans[0]:
            found.append(fastest)
    for plan in found:
        plan["efficiency"] = plan["tok_s_gpu"] / found[0]["tok_s_gpu"]
    return found


# -----------------------------------------------------------------------------
# 3) The command line

def plan_one(cfg, vocab):
    """Return (cfg with its global batch, the plan of its layout with all that is printed)."""
    cfg, _ = check_gpus(cfg, cfg.gpus)
    plan = estimate(cfg, cfg.gpus, cfg.gpu, vocab)
    plan["ms_uneven"] = uneven_ms(cfg, cfg.gpus, cfg.gpu, vocab)
    plan["warnings"] = warnings(cfg, plan, cfg.gpu, vocab)
    plan.update(training_cost(cfg, plan, vocab))
    return cfg, plan


def plan_many(cfg, vocab):
    """Return the plans of all layouts that fit. ValueError: none does."""
    cfg = dataclasses.replace(cfg, pp_layers="")  # each layout has its own balance
    plans = search(cfg, cfg.gpus, cfg.gpu, vocab)
    if not plans:
        raise ValueError(f"no layout of {cfg.preset} on {cfg.gpus} {cfg.gpu} fits; try more --gpus")
    for plan in plans:
        plan.update(training_cost(cfg, plan, vocab))
    return plans


def answer(asked):
    """Return the plan of the words that the page of --serve sends, as JSON. ValueError: they are wrong."""
    words = asked["words"]
    if {"-h", "--help", "--help-all"} & set(words):
        raise ValueError("--help is for the terminal; leave it out")
    cfg, counts = arguments([*words, "--json"])
    if counts or cfg.search:
        raise ValueError("--search and --scaling are for the terminal; leave them out")
    cfg, vocab, _ = from_data(cfg)
    cfg, plan = plan_one(cfg, vocab)
    return [json.dumps({"plan": plan, "schedule": plan_page.schedule(cfg)})]


@wrong_input()
def main(argv=None, parsed=None):
    """Print a plan. parsed: arguments(argv), where that was done already."""
    cfg, counts = parsed or arguments(sys.argv[1:] if argv is None else argv)
    if cfg.serve:
        Server("127.0.0.1", cfg.port).run(answer, plan_page.settings(cfg), "plan.html", {"words": [str]})
        return
    cfg, vocab, source = from_data(cfg)
    if not cfg.json:
        say(f"vocabulary of {vocab:,} symbols: {source}")
    if counts:
        found = scaling(cfg, counts, cfg.gpu, vocab)
        print_found = print_scaling
    elif cfg.search:
        found = plan_many(cfg, vocab)
        print_found = print_search
    else:
        cfg, found = plan_one(cfg, vocab)
        print_found = print_plan
    if cfg.json:
        print(json.dumps(found, indent=1))
    else:
        print_found(cfg, found)


if __name__ == "__main__":
    raise SystemExit(main(parsed=PARSED))

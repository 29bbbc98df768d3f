"""Does a layout compute what one process computes? What to run after a change of the model or of a layer.

    mpiexec -n 4 python bench/equal_one.py tiny-moe --tp 2 --ep 2 --zero 1 --data synthetic
    torchrun --nproc-per-node 4 bench/equal_one.py tiny --pp 2 --cp 2 --data synthetic

The flags are train.py's. Rank 0 trains the model alone for a few steps. Then all ranks train it in the layout
that the flags describe, from the same weights, on the same sequences. Both are in fp64. A table has the worst
difference of each parameter's gradients and of its weights and moments at the end, relative to the largest
element of the tensor. The last line is the verdict. Exit codes: 0 equal, 1 not equal, 2 wrong input.

A small model shows the same faults as a large one: take few layers and a small width.
"""
import dataclasses
import math
import sys
from dataclasses import dataclass

from common import check_ranks, gather_objects, one_rank_speaks, start
from runtime.launch import NO_TIMEOUT, World, launch, shutdown

import equality

from config import Config, Outcome
from corpus.samples import open_data
from interface.command_line import parse
from interface.layout import command
from parallel import make_mesh

ONE_PROCESS = dict(tp=1, cp=1, pp=1, ep=1, pp_chunks=1, pp_layers="", zero=0, shard=0, recompute="none")
SHOWN = 4  # names in the verdict


@dataclass(frozen=True)
class Flags(Config):
    """train.py's flags say what runs; these say how it is compared."""
    compared_steps: int = 3  # optimizer steps that both runs take
    # the largest difference of equal runs, relative to the tensor's largest element
    tolerance: float = 1e-10

    RANGES = {"compared_steps": (1, 10**6), "tolerance": (0, 1)}


def read_flags(argv):
    """Return (Flags, Config): the Config is the layout's, in fp64. One rank reports wrong flags."""
    with one_rank_speaks():
        flags = parse(sys.argv[1:] if argv is None else argv, Flags, "equal_one.py", __doc__)
        if flags.init_from:
            raise ValueError("both runs start from drawn weights; leave out --init-from")
        values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Config)}
        return flags, Config(**{**values, "dtype": "fp64", "compile": False})


def check(cfg, world, argv=None):
    """Return (Config with the number of sequences in a step, vocabulary size, source).

    ValueError: there is nothing to prove, or the layout does not fit.
    """
    check_ranks(cfg, world, "equal_one.py", argv)
    if world.size == 1:
        again = command(2, sys.argv[1:] if argv is None else argv, program="bench/equal_one.py")
        raise ValueError(f"one process has no layout to compare; start 2: {again}")
    if cfg.dropout and cfg.tp * cfg.cp * cfg.pp > 1:
        raise ValueError("ranks of tp, cp and pp draw other dropout masks than one process; add --dropout 0")
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
    batch = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    source, _, vocab_size, _ = open_data(cfg)
    return dataclasses.replace(cfg, global_batch=batch), vocab_size, source


def both_runs(cfg, vocab_size, source, world, steps):
    """Return (what one process saw, [what each rank of the layout saw]); the first is None but on rank 0."""
    want = None
    with world.everyone.input():
        if world.rank == 0:
            one = dataclasses.replace(cfg, **ONE_PROCESS)
            chunks, cp = equality.capacity_ranks(vars(cfg), vars(cfg))
            want = equality.train_steps(World(device=world.device), one, vocab_size, source, cfg.global_batch,
                                        steps, chunks=chunks, cp=cp)
    with world.everyone.input():
        seen = equality.train_steps(world, cfg, vocab_size, source, cfg.global_batch, steps)
    return want, gather_objects(world, seen)  # a small model: what each rank knows, over the world


# -----------------------------------------------------------------------------
# What rank 0 prints

def is_small(error, tolerance):
    """Whether an error is within the tolerance; NaN is not."""
    return error <= tolerance


def worst(values):
    """Return the largest of the errors, NaN if one of them is NaN, 0 if there is none."""
    values = list(values)
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=0.0)


def table(found):
    """Return the lines of the table. found: {name: error} of equality.errors()."""
    names = [name.removeprefix("end ") for name in found if name.startswith("end ") and "/" not in name]
    width = max(map(len, names))
    lines = [f"{'parameter':{width}}  gradient   weights   moments"]
    for name in sorted(names, key=in_order):
        gradients = [e for key, e in found.items() if key.startswith("step ") and key.split()[3] == name]
        moments = [e for key, e in found.items() if key.startswith("end ") and key.endswith(f"/{name}")]
        columns = [worst(gradients), found[f"end {name}"], worst(moments)]
        lines.append(f"{name:{width}}  " + "  ".join(f"{value:8.1e}" for value in columns))
    return lines


def in_order(name):
    """Return the key that sorts block 10 behind block 2."""
    return [part.zfill(4) if part.isdigit() else part for part in name.split(".")]


def first_fault(stats, found, tolerance):
    """Return in words where the runs differ first, or "" if they are equal.

    A gradient comes before what is computed from it, and the gradients of the first step come before those
    that see its weights.
    """
    differing = {name: error for name, error in found.items() if not is_small(error, tolerance)}
    steps = sorted({int(name.split()[1]) for name in differing if name.startswith("step ")})
    if steps:
        prefix = f"step {steps[0]} grad "
        total = sum(name.startswith(prefix) for name in found)
        where = {name.removeprefix(prefix): e for name, e in differing.items() if name.startswith(prefix)}
        said = f"step {steps[0]}: {len(where)} of {total} gradients differ: {shown(where)}"
        if steps[0] == 1:
            return said
        return f"{said}; those of step {steps[0] - 1} are equal, so look at norm, clipping and optimizer"
    for name, error in stats.items():
        if not is_small(error, tolerance):
            return f"equal gradients, but the {name} differs by {error:.1e}"
    if differing:
        return f"equal gradients, but other weights or moments: {shown(differing)}"
    return ""


def shown(errors):
    """Return the names with the largest errors, and how many more there are."""
    largest = sorted(errors, key=lambda name: -errors[name])[:SHOWN]
    said = ", ".join(f"{name} by {errors[name]:.1e}" for name in largest)
    more = len(errors) - SHOWN
    return f"{said} and {more} more" if more > 0 else said


def judge(cfg, want, results, tolerance):
    """Print the table and the verdict. Return Outcome.DONE, or Outcome.FAILED for different runs."""
    ranks = len(results)
    try:
        whole = equality.assemble(results)
        found = equality.errors(whole, equality.assemble([want]), vars(cfg))
        stats = worst_stats(want, results)
        print("\n".join(table(found)))
        print(", ".join(f"{name} {error:.1e}" for name, error in stats.items()))
        fault = first_fault(stats, found, tolerance)
        if not fault:
            equality.check_replicas(results, whole)
    except AssertionError as error:
        fault = str(error)
    if fault:
        print(f"NOT EQUAL: {ranks} ranks and one process: {fault}", flush=True)
        return Outcome.FAILED
    error = worst([*stats.values(), *found.values()])
    print(f"equal: {ranks} ranks and one process differ by at most {error:.1e} "
          f"in {len(want['stats'])} steps of {cfg.global_batch} sequences", flush=True)
    return Outcome.DONE


def worst_stats(want, results):
    """Return the worst of stats_errors() over the ranks, by name."""
    rows = [equality.stats_errors(seen, want) for seen in results]
    return {name: worst(row[name] for row in rows) for name in rows[0]}


def main(argv=None):
    flags, cfg = read_flags(argv)
    world = launch(NO_TIMEOUT)
    with world.everyone.input():
        cfg, vocab_size, source = check(cfg, world, argv)
    want, results = both_runs(cfg, vocab_size, source, world, flags.compared_steps)
    outcome = judge(cfg, want, results, flags.tolerance) if world.rank == 0 else None
    outcome = world.everyone.broadcast(outcome)  # one number, over the world
    shutdown(world)
    return int(outcome)


if __name__ == "__main__":
    start(main)

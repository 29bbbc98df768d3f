"""The nearest configuration that fits everything at once: what to type in the place of flags that do not fit.

    fix         the changes of the flags after which every check passes, and the command that starts them
    with_fix    a context that ends the message of a misfit with them
    needed      how many ranks the flags ask for
    command     the command line that starts a number of ranks

A check says what is wrong first, and one thing to try, which may lead to the next misfit. The search here
mends one misfit after the other, and then asks whether other changes of up to three flags at once are
smaller, by the ratio of the numbers. Where both lead nowhere, it takes flags of the preset. So a fix that is
printed is complete: the same checks say that it fits.
"""
import contextlib
import heapq
import itertools
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

from config import (
    RANGES,
    Config,
    ceil_div,
    check_adapters,
    check_experts,
    check_heads,
    check_masked_model,
    check_sharing,
)
from interface.layout import balanced_counts, check_layout, check_ranks, near_ramps
from interface.presets import PRESETS

CHANGE = 0.4     # what another changed flag costs, in the units of a ratio's logarithm
MOST_TRIES = 10_000
MOST_VALUES = (64, 16, 8)  # how many values of a flag are tried where one, two, three flags change
# What a change costs: its ratio's logarithm times this. A layout changes first: the model stays the same.
LAYOUT = {"tp": 0.3, "cp": 0.3, "pp": 0.3, "ep": 0.3, "pp_chunks": 0.3}
WEIGHTS = {
    "n_embd": 1.0, "n_head": 1.0, "n_kv_head": 1.0, "ffn_hidden": 1.0, "seq_len": 1.0, "n_layer": 2.0,
    "micro_batch": 1.0, "global_batch": 1.0, "top_k": 1.0, "n_experts": 1.0, **LAYOUT,
}
# Another word in the place of one: its cost.
WORDS = {
    "zero": {1: 0.2, 2: 0.1, 0: 0.3}, "recompute": {"full": 0.1}, "router": {"softmax": 0.3, "sigmoid": 0.6},
    "pos": {"learned": 1.2},
}
SEVERAL = 3  # flags: where more must change, the line says so


# -----------------------------------------------------------------------------
# Whether flags fit

def needed(flags):
    """Return the least number of ranks on which the layout of the flags is possible."""
    stage = flags.tp * flags.cp
    if flags.zero and flags.shard:
        stage = math.lcm(stage, flags.tp * flags.shard)
    return flags.pp * math.lcm(stage, flags.ep)


def sizes(flags, ranks):
    """Return the sizes of a mesh of `ranks` ranks. ValueError: the ranks do not divide."""
    dp = check_ranks(ranks, flags.tp, flags.pp, flags.ep, flags.n_experts, flags.cp, shard=flags.shard)
    named = {"world": ranks, "stage": ranks // flags.pp, "dp": dp, "tp": flags.tp, "cp": flags.cp,
             "pp": flags.pp, "ep": flags.ep}
    return SimpleNamespace(**{name: SimpleNamespace(size=size) for name, size in named.items()})


def check_all(flags, ranks):
    """Raise the ValueError of the checks of model and layout if flags do not fit each other and the ranks."""
    check_heads(flags)
    if flags.objective == "mlm":
        check_masked_model(flags)
    check_experts(flags)
    check_adapters(flags)
    check_sharing(flags)
    mesh = sizes(flags, ranks)
    check_layout(flags, mesh, flags.global_batch or flags.micro_batch * mesh.dp.size)


def fits(flags, ranks):
    """Whether all of check_all() passes. ranks: None is the number that the flags ask for."""
    try:
        check_all(flags, ranks or needed(flags))
    except ValueError:
        return False
    return True


# -----------------------------------------------------------------------------
# The search

def candidates(flags, ranks):
    """Return {flag: [(cost, value)]}, cheapest first: what each flag might be instead."""
    found = {}
    for name, weight in WEIGHTS.items():
        value = getattr(flags, name)
        if not value or name == "top_k" and not flags.n_experts or name in LAYOUT and value == 1:
            continue
        low, high = RANGES[name]
        values = {v for v in values_near(flags, name, ranks) if max(1, low) <= v <= high and v != value}
        found[name] = sorted((weight * abs(math.log(v / value)), v) for v in values)
    if not flags.n_experts and (flags.ep > 1 or flags.n_shared_experts):  # flags of experts, and no expert
        found["n_experts"] = sorted((0.1 * abs(math.log(v / 8)), v) for v in {8, flags.ep, 2 * flags.ep})
    for name, costs in WORDS.items():
        value = getattr(flags, name)
        if (name, value) not in (("recompute", "none"), ("zero", 0)):
            found[name] = sorted((cost, word) for word, cost in costs.items() if word != value)
    if flags.rampup_batch_size:
        dp = ceil_div(ranks or needed(flags), flags.tp * flags.pp * flags.cp)
        unit = flags.micro_batch * dp
        found["rampup_batch_size"] = near_ramps(flags.global_batch or unit, flags.rampup_batch_size, unit)
    if flags.shard:
        if not flags.zero:
            found["zero"] = [(0.1, 1)]
        smaller = range(1, min(flags.shard, 1024))
        near = sorted((0.1 * abs(math.log(size / flags.shard)), size) for size in smaller)
        found["shard"] = [*near[:8], (0.5, 0)]
    stages = flags.pp * flags.pp_chunks
    if flags.pp_layers and stages <= flags.n_layer:
        found["pp_layers"] = [(0.1, ",".join(map(str, balanced_counts(flags.n_layer, stages))))]
    return found


def values_near(flags, name, ranks):
    """Return values near that of a flag: all near a small one, near a large one multiples of what must divide
    it."""
    value = getattr(flags, name)
    if name in LAYOUT:
        return {size for size in range(1, 2 * value + 1) if (ranks or 64) % size == 0}
    if value <= 32:
        return set(range(1, 2 * value + 1))
    ranks = ranks or needed(flags)
    units = {1, 2, 4, 8, 16, 32, 64, 128, flags.n_head, 2 * flags.n_head, flags.n_kv_head, flags.tp,
             2 * flags.cp, 2 * flags.cp * flags.tp, flags.micro_batch, flags.micro_batch * ranks, flags.pp,
             flags.ep, ceil_div(flags.micro_batch * ranks, flags.tp * flags.pp * flags.cp)}
    values = set()
    for unit in units:
        below = value // unit * unit
        values |= {below - unit, below, below + unit}
    return values


def search(flags, ranks):
    """Return {flag: value}, the cheapest changes after which the flags fit; {} if the preset does not fit.

    flags: a Config. ranks: their number, or None if it may follow from the flags. A flag whose value is None
    is to be left out.
    """
    cost, found = one_after_the_other(flags, ranks)
    return cheapest(flags, ranks, cost, found) or of_preset(flags, ranks)


def one_after_the_other(flags, ranks):
    """Return (cost, changes) of as many flags as it takes, each of which mends the first misfit.

    The cheapest changes so far are tried first. What a check says, without its numbers, tells misfits apart.
    The changes are {} and their cost is infinite if there are none.
    """
    own = vars(flags)
    tries = itertools.count()
    order = itertools.count()  # of equal costs, because dicts have none
    heap = [(0.0, next(order), {})]
    while heap:
        cost, _, changes = heapq.heappop(heap)
        changed = SimpleNamespace(**{**own, **changes})
        wrong = kind_of_misfit(changed, ranks)
        if not wrong:
            return cost, changes
        for name, values in candidates(changed, ranks).items():
            if name in changes:
                continue
            seen = {wrong}
            for extra, value in values:
                if next(tries) > MOST_TRIES:
                    return math.inf, {}
                kind = kind_of_misfit(SimpleNamespace(**{**vars(changed), name: value}), ranks)
                if kind not in seen:  # the nearest value that leads there
                    seen.add(kind)
                    heapq.heappush(heap, (cost + extra + CHANGE, next(order), {**changes, name: value}))
    return math.inf, {}


def kind_of_misfit(flags, ranks):
    """Return what misfit() says, without the numbers and what is to be tried."""
    first_part = misfit(flags, ranks).split(";")[0]
    return re.sub("[0-9]+", "0", first_part)


def of_preset(flags, ranks):
    """Return {flag: the preset's value} of the flags that must go back to it; {} if the preset does not fit.

    A value that cannot be typed, such as that of an empty list, is None: the flag is left out.
    """
    own = vars(flags)
    preset = vars(Config(**PRESETS[flags.preset]))
    apart = {name: value for name, value in preset.items() if own[name] != value}
    if not fits(SimpleNamespace(**{**own, **apart}), ranks):
        return {}
    for name in list(apart):
        kept = {other: value for other, value in apart.items() if other != name}
        if fits(SimpleNamespace(**{**own, **kept}), ranks):
            apart = kept
    return {name: None if value in ("", (), -1) else value for name, value in apart.items()}


def applied(flags, changes):
    """Return the flags with the changes of search()."""
    values = {}
    for name, value in changes.items():
        values[name] = getattr(Config, name) if value is None else value
    return SimpleNamespace(**{**vars(flags), **values})


def cheapest(flags, ranks, best_cost, best):
    """Return the cheapest changes of at most three flags, or `best` if none costs less than best_cost."""
    own = vars(flags)
    found = candidates(flags, ranks)
    tries = itertools.count()

    def extend(changes, cost, left, depth, most):
        nonlocal best_cost, best
        for i, name in enumerate(left):
            for extra, value in found[name][:most]:
                total = cost + extra + CHANGE
                if total + CHANGE * (depth - 1) >= best_cost or next(tries) > MOST_TRIES:
                    break
                changed = {**changes, name: value}
                if depth > 1:
                    extend(changed, total, left[i + 1:], depth - 1, most)
                elif fits(SimpleNamespace(**{**own, **changed}), ranks):
                    best_cost, best = total, changed

    for depth, most in enumerate(MOST_VALUES, 1):
        extend({}, 0.0, list(found), depth, most)
    return best


# -----------------------------------------------------------------------------
# What is said

def as_flags(changes):
    """Return {flag: value} as it is typed. A flag whose value is None is to be left out."""
    typed = [" ".join([f"--{name.replace('_', '-')}", *words_of(value)])
             for name, value in changes.items() if value is not None]
    without = [f"--{name.replace('_', '-')}" for name, value in changes.items() if value is None]
    if without:
        typed.append(f"without {', '.join(without)}")
    return " ".join(typed)


def words_of(value):
    """Return the words in which the value of a flag is typed."""
    return [str(part) for part in value] if isinstance(value, tuple | list) else [str(value)]


def command(ranks, argv, starter="mpiexec", program="train.py", nodes=1):
    """Return the command that starts a program on `ranks` ranks. starter: torchrun, srun, or any other.

    nodes: the number of nodes. torchrun is typed on each of them, and HOST is the name of the first.
    """
    program = shlex.join([program, *argv])
    if starter == "torchrun" and nodes > 1 and ranks % nodes == 0:
        return (f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:29500 {program}")
    if starter == "torchrun":
        return f"torchrun --nproc-per-node {ranks} {program}"
    if starter == "srun":
        return f"srun -n {ranks} python {program}"
    return f"{' '.join(['mpiexec', *flags_of_openmpi(ranks)])} -n {ranks} python {program}"


def flags_of_openmpi(ranks):
    """Return the flags without which the mpiexec of the PATH would refuse to start `ranks` ranks here.

    Open MPI refuses root, and more ranks than cores. Other MPIs do neither, and do not know these flags.
    """
    found = shutil.which("mpiexec")
    if found is None:
        return []
    path = Path(found).resolve()
    is_named = re.search("orterun|prterun|openmpi", path.name)
    if not is_named and (path.name not in ("mpiexec", "mpirun") or not (path.parent / "ompi_info").exists()):
        return []
    flags = []
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if isinstance(ranks, int) and ranks > (os.cpu_count() or 1):
        flags.append("--oversubscribe")
    return flags


def change_words(argv, changes):
    """Return argv with the values of {flag: value} in the place of its own. None: without the flag."""
    argv = list(argv)
    for name, value in changes.items():
        flag = f"--{name.replace('_', '-')}"
        kept = []
        dropped = 0  # of the words that follow
        for i, word in enumerate(argv):
            if dropped:
                dropped -= 1
            elif word.replace("_", "-") == flag:
                dropped = count_values(name, argv[i + 1:])
            elif word.partition("=")[0].replace("_", "-") != flag:
                kept.append(word)
        argv = kept
        if value is not None:
            argv += [flag, *words_of(value)]
    return argv


def count_values(name, words):
    """Return how many of the words behind a flag are its values: those of train.py's, and one of others."""
    default = getattr(Config, name, None)
    if isinstance(default, bool):
        return int(words[:1] != [] and words[0].lower() in ("true", "false"))
    if isinstance(default, tuple):
        return len(list(itertools.takewhile(lambda word: not word.startswith("--"), words)))
    return min(1, len(words))


def fix(flags, ranks=None):
    """Return the flags to type in the place of those that do not fit, or "" if none near do."""
    return as_flags(search(flags, ranks))


@contextlib.contextmanager
def with_fix(flags, ranks=None, again=None, argv=None):
    """End the message of a misfit, a ValueError of the body, with the nearest flags that fit everything.

    again: a function that returns the command for another number of ranks, for ranks that do not divide.
    argv: the words of train.py, where `ranks` is not known yet and one process may have been started.
    """
    try:
        yield
    except ValueError as e:
        said = misfit(flags, ranks)
        if said != str(e):  # something else is wrong
            raise
        what, _, _ = said.partition("; ")
        fixes = []
        if again is not None and "ranks do not divide" in what:
            others = sorted(range(1, 2 * ranks + 1), key=lambda n: abs(math.log(n / ranks)))
            fixes = [f"start {n}: {again(n)}" for n in others if fits(flags, n)][:1]
        changes = search(flags, ranks)
        enough = needed(applied(flags, changes))
        is_started = argv is None or enough == 1
        is_of_preset = not changes.keys() & candidates(flags, ranks).keys()
        if len(changes) == 1 and is_of_preset and is_started and "; try --" not in said:
            raise  # the message says it better: what to leave out
        if changes:
            fixes.append(f"try {as_flags(changes)}")
        if len(changes) > SEVERAL:
            what = f"several flags do not fit: {what}"
        if changes and not is_started:
            fixes[-1] += f", on {enough} ranks: {command(enough, change_words(argv, changes))}"
        elif argv is not None and len(changes) > SEVERAL:
            fixes[-1] += f": {shlex.join(['python', 'train.py', *change_words(argv, changes)])}"
        if not fixes:
            raise ValueError(f"{what}; no flags that are near fit {ranks} ranks, start another number of them"
                             ) from None
        raise ValueError(f"{what}; {'; or '.join(fixes)}") from None


def misfit(flags, ranks):
    """Return what check_all() says is wrong, or ""."""
    try:
        check_all(flags, ranks or needed(flags))
    except ValueError as e:
        return str(e)
    return ""


def check_alone(flags, argv, program="train.py"):
    """Raise ValueError if one process is started for a layout of several ranks: say what starts them."""
    ranks = needed(flags)
    if ranks == 1:
        return
    asked = {name: getattr(flags, name) for name in ("tp", "cp", "pp", "ep", "shard")
             if getattr(flags, name) > 1}
    what = f"{as_flags(asked)} needs {ranks} ranks, and one process is started"
    wrong = misfit(flags, ranks)
    if wrong:
        changes = search(flags, None)
        if not changes:
            raise ValueError(wrong)
        wrong, _, _ = wrong.partition("; ")
        argv = change_words(argv, changes)
        ranks = needed(applied(flags, changes))
        what = f"{what}, where {wrong}"
    raise ValueError(f"{what}; start {ranks}: {command(ranks, argv, program=program)}")

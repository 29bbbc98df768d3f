"""The floor of a step: what its kernels take, and what they would take alone and without gaps.

    python bench/floor.py W1 G2 W3-8192 W2b --json floor.jsonl
    torchrun --nproc-per-node 2 bench/floor.py W1 G2 W3-8192         (or mpiexec)

    measured   the kernels of train.py's own step by kind, from a trace of three steps; `gaps` is what they
               leave of the step's time, and less than nothing where they run side by side
    floor      each product and each attention as fast as this machine runs it alone (repeated in a CUDA
               graph, the best of cuBLAS, cuBLASLt and the latter's other algorithms, and for experts of
               torch's and our kernels); every other element once at the rate of a copy; no gaps; what ranks
               send each other is hidden
    fused      the floor if activations and cross-entropy cost no pass through memory, because the products
               beside them compute them
    under load the floor's products, attention and bytes one after the other for --seconds, as a step does
               them: a GPU at its limit of power lowers its clock

Products and attention have the shapes and numbers of one step without compilation. The bytes follow from the
Config (passes() has the list). After the kinds, the products that take most time are printed, with their rate
alone. On an H200, for workloads with a peer and a goal (PEERS in speed.py, GOALS in peers.py), the last line
says above which of the floors the goal lies. Of several ranks, the one whose floor is highest speaks: the
others wait for it. On a CPU, each workload is a tiny model of the same kind that is not compiled, and the
operations of torch take the place of kernels.
"""
import collections
import dataclasses
import gc
import json
import math
import re
import statistics
import sys
import time
import timeit
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from common import read_flags, start
from runtime.launch import launch, shutdown

import torch
from ladder import workload
from peers import GOALS
from speed import PEERS, WORKLOADS, ceilings, forget_memory
from timing import gpu_milliseconds, graphed, synchronize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from training import Training
from tyro.conf import Positional

from config import head_width, pad_vocab
from cost.gpus import kind_of
from cost.parameters import (
    dense_hidden,
    expert_rows,
    head_rows,
    local_parameters,
    owned_parameters,
    rank_tokens,
)
from fast import experts
from fast.products import fastest
from interface.command_line import one_line
from ops import cublas_lt, gelu_mlp, grouped_mm
from ops.accelerator import device_name, total_memory
from ops.activations import GATED
from ops.backend import is_hopper
from ops.products import product
from parallel import make_mesh

KINDS = ("products", "attention", "cross-entropy", "activations", "elementwise", "rows", "optimizer",
         "sent", "copies", "other", "gaps")
RULES = (  # the first pattern that a kernel's name contains, in any case, tells its kind
    ("sent", "nccl|ptop|barrier|^put$|^get$|sum_slices|c10d"),
    ("products", "^triton_tem|^nvjet|^sm90_xmma_gemm"),  # also with GELU, by ops/cublas_lt.py
    ("activations", "^triton_poi.*sigmoid"),  # the compiler's kernels, whose names list what they join
    ("elementwise", "^triton_"),
    ("attention", "sdpa|flash|fmha|dot_product|cudnn::fusion|^nanoshard::attention"),
    ("cross-entropy", "cross_entropy|log_softmax|logsumexp"),
    ("activations", "swiglu|gelu|silu"),
    ("optimizer", "adam|muon|sum_squares|multi_tensor|lpnorm|accumulate|foreach"),
    ("products", "gemm|nvjet|cutlass|grouped|splitk|gemv|::(add|b|badd)?mm$"),
    ("rows", "permute|sort|place_|slots_|layout_from|scan|index|gather|scatter|embedding|histogram"),
    ("copies", "memcpy|memset|copy|fill|cat|zero"),
    ("elementwise", "elementwise|norm|reduce|add|mul|sum|scale"),
)
NAMES = {"floor": "floor", "fused": "fused floor"}  # of lines, in the verdict
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
OUR_ATTENTION = {"attention", "attention_backward"}  # fast/flash.py
ADAM = 30  # bytes of a parameter that the gradient's norm and AdamW move, where the gradient is bf16
MOST_COPIED = 2**27  # numbers that under_load() copies at once: more than fits into a cache
LENGTHS = 4096  # it copies multiples of so many
STEPS_BEFORE = 10  # steps before that of which products and attention are noted


@dataclass(frozen=True)
class Flags:
    workloads: Positional[tuple[Literal[tuple(WORKLOADS)], ...]] = ("W1", "G2", "W3-8192", "W2b")
    steps: int = 16  # steps before the trace; the second half is timed
    repeat: int = 20  # how often a product runs in its graph
    seconds: float = 4.0  # for which the floor's work runs under load
    top: int = 4  # products that are printed, those that take most time first
    json: str = ""  # file to which each workload is appended, one line each, with all kernels and products

    RANGES = {"steps": (4, 10**6), "repeat": (1, 10**4), "seconds": (0.001, 600), "top": (0, 10**4)}


# -----------------------------------------------------------------------------
# What the step's kernels take

def kind_of_kernel(name):
    """Return to which of KINDS a kernel belongs, by its name."""
    for kind, pattern in RULES:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


class HostTimes(TorchDispatchMode):
    """Adds up how long the host is in each of torch's operations. ms: {operation: ms}.

    torch's profiler, which could tell it, ended some runs of two CPU ranks in a fault (torch 2.13).
    """

    def __init__(self):
        super().__init__()
        self.ms = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.ms[func.name()] += (time.perf_counter() - began) * 1e3
        return result


def traced(world, step, n=3):
    """Return {kernel: ms of a step} of n steps; on a CPU, of torch's operations."""
    step()
    synchronize(world.device)
    if world.device.type == "cpu":
        with HostTimes() as times:
            for _ in range(n):
                step()
        return {name: ms / n for name, ms in times.ms.items()}
    activities = torch.profiler.supported_activities() - {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(n):
            step()
        synchronize(world.device)
    times = collections.Counter()
    for event in trace.key_averages():
        times[event.key] += event.self_device_time_total / n / 1e3
    return {name: ms for name, ms in times.items() if ms > 0}


def measured(cfg, world, steps):
    """Return (ms of a step, {kernel: ms of a step}, symbols) of the workload as train.py trains it."""
    training = Training(cfg, world)
    times, *_ = training.run(steps)
    batches = training.batches()
    kernels = traced(world, lambda: training.step(batches))
    return statistics.median(times[steps // 2:]), kernels, training.vocab


def by_kind(ms, kernels):
    """Return {kind: ms}; `gaps` is what the kernels leave of the step."""
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, took in kernels.items():
        kinds[kind_of_kernel(name)] += took
    kinds["gaps"] = ms - sum(kinds.values())
    return kinds


# -----------------------------------------------------------------------------
# Products and attention alone

def keep(x):
    """Return what is kept of an argument: a copy of a tensor with its strides, or the argument itself."""
    if not isinstance(x, torch.Tensor):
        return x
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    numbers = x.detach().as_strided((last + 1,), (1,), x.storage_offset()).clone()
    return numbers.as_strided(x.shape, x.stride())


def form(x):
    """Return the shape of a tensor as a word: 8x16, and 8x16' if its rows are not contiguous."""
    turned = x.dim() > 1 and x.stride(-1) != 1
    return "x".join(map(str, x.shape)) + ("'" if turned else "")


class Operations(TorchDispatchMode):
    """Notes each product and each attention of what runs inside, with its arguments.

    found: {key: [kind, operation, args, kwargs, how often]}. Calls with arguments of the same forms are one
    entry, with the numbers of the first of them: how long a product takes depends on its numbers, too.
    """

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        kind = "products" if name in PRODUCTS else None
        if "dot_product" in name or name in OUR_ATTENTION:
            kind = "attention"
        if kind is not None:
            self.note(kind, func, args, kwargs)
        return func(*args, **kwargs)

    def note(self, kind, func, args, kwargs):
        """Count a call, and keep its arguments if there was none of this form."""
        key = str((func, tree_map(text_of, args), tree_map(text_of, kwargs)))
        if key not in self.found:
            self.found[key] = [kind, func, tree_map(keep, args), tree_map(keep, kwargs), 0]
        self.found[key][-1] += 1


def text_of(x):
    """Return an argument as a word of an entry's key: of a tensor its form alone."""
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {tuple(x.shape)} {x.stride()}"
    return repr(x)


def operations(cfg, world):
    """Return the Operations of a step, which runs without compilation and without a graph.

    GELU runs after the product, in a kernel of its own, so that the product can be noted.
    """
    with mock.patch.object(gelu_mlp, "fits", lambda cfg: False):
        training = Training(dataclasses.replace(cfg, compile=False), world, ("graph", "quack"))
    with experts_by_torch():
        training.run(STEPS_BEFORE)
        batches = training.batches()
        with Operations() as noted:
            training.step(batches)
    synchronize(world.device)
    return noted.found


def experts_by_torch():
    """Within this context, torch multiplies experts' rows where it can: its calls can be noted."""
    return mock.patch.object(grouped_mm, "use_tma", lambda x, w: False)


def alone(world, f, repeat):
    """Return the ms of one call of f on this rank, repeated `repeat` times in a CUDA graph.

    On a CPU the host calls it. Ranks have calls of their own, so nobody waits for another one here.
    """
    if world.device.type == "cpu":
        f()
        return min(timeit.repeat(f, number=1, repeat=3)) * 1e3

    def calls():
        for _ in range(repeat):
            f()

    return gpu_milliseconds(graphed(calls), 2) / repeat


def best_alone(world, entry, repeat):
    """Return (ms, call) of an entry of Operations: what one call takes alone, in the way that is fastest."""
    times = [(alone(world, way, repeat), way) for way in ways(world, entry)]
    return min(times, key=lambda timed: timed[0])


def ways(world, entry):
    """Return functions without arguments, each of which does what an entry of Operations does."""
    kind, func, args, kwargs, _ = entry

    def call():
        return func(*args, **kwargs)

    if kind == "attention" or world.device.type != "cuda":
        return [call]
    name = func.overloadpacket.__name__
    if name == "_grouped_mm":
        return [call, *(experts_way(by, args, kwargs) for by in multipliers(world.device, *args, **kwargs))]
    found = [by_library(library, call) for library in ("cublas", "cublaslt")]
    if name == "mm" and len(args) == 2 and is_hopper(world.device) and cublas_lt.library() is not None:
        found.append(by_fastest_algorithm(*args))
    return found


def by_library(library, call):
    """Return a function that calls `call`, in which torch multiplies by a library: cublas or cublaslt."""
    def way():
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            return call()
        finally:
            torch.backends.cuda.preferred_blas_library(before)
    return way


def by_fastest_algorithm(a, b):
    """Return a function that multiplies a by b as a run does that measures its products first."""
    product(a, b)  # makes the Plan for such matrices
    for shape, plan in cublas_lt.plans.items():
        if shape.words() not in cublas_lt.choices:
            cublas_lt.choices[shape.words()] = fastest(plan) or ""
            plan.choose(cublas_lt.choices[shape.words()])
    return lambda: product(a, b)


def experts_way(multiplier, args, kwargs):
    """Return a function that does what torch's _grouped_mm does of args, by the kernels of a run."""
    return lambda: experts_product(multiplier, *args, **kwargs)


def multipliers(device, x, w, offs, *_, **__):
    """Return who else multiplies what torch's _grouped_mm gets: ours, and quack-kernels if it is here."""
    found = [grouped_mm]
    if is_hopper(device) and not experts.QUACK.problem:
        rows = x.size(0) if w.dim() == 3 else w.size(0)
        found.append(experts.QuackProducts(offs, rows))
    return found


def experts_product(multiplier, x, w, offs, *_, **__):
    """Compute what torch's _grouped_mm does of the same arguments, by the kernels of a run."""
    if w.dim() == 3:
        return multiplier.experts_mm(x, w, offs)
    return multiplier.experts_wgrad(x.t(), w, offs)  # x is the gradient's transpose


def operands(entry):
    """Return the two matrices of a product."""
    return [x for x in entry[2] if isinstance(x, torch.Tensor) and x.is_floating_point()][-2:]


def flops(entry):
    """Return the floating-point operations of one call of a product."""
    a, b = operands(entry)
    batch = a.shape[0] if len(a.shape) == 3 else 1
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


def all_alone(world, found, repeat):
    """Return a row for each entry of Operations: {what, kind, count, ms, tflops}, by its time in a step.

    ms is of one call, and None where the operation cannot run alone. Also return the fastest functions, with
    their counts: [(call, count)].
    """
    rows = []
    calls = []
    for entry in found.values():
        kind, func, args, _, count = entry
        what = " ".join(form(x) for x in args if isinstance(x, torch.Tensor) and x.is_floating_point())
        row = {"what": f"{func.overloadpacket.__name__} {what}", "kind": kind, "count": count, "ms": None}
        try:
            row["ms"], call = best_alone(world, entry, repeat)
            calls.append((call, count))
        except Exception as e:  # an operation that a graph cannot record, or whose arguments were made up
            row["what"] += f": failed, {one_line(e)[:80]}"
        if kind == "products" and row["ms"]:
            row["tflops"] = flops(entry) / row["ms"] / 1e9
        rows.append(row)
        forget_memory(world.device)
    rows.sort(key=lambda row: -row["count"] * (row["ms"] or 0))
    return rows, calls


# -----------------------------------------------------------------------------
# The rest, by its bytes

def passes(cfg, mesh, vocab, device):
    """Return {kind: elements that a step reads or writes}, each tensor once per kernel that it needs.

    Of a norm with the sum of the residual stream, forward reads two tensors and writes two, and backward
    reads three and writes one. Rotation reads and writes queries and keys, both ways. A gated activation of f
    columns reads 2f and writes f, and in backward reads 3f and writes 2f. GELU in a product writes its
    argument, and in backward reads it. The cross-entropy reads and writes the logits once. Experts' rows are
    gathered and added up, both ways. The embedding is read, and its gradient written.
    """
    n = rank_tokens(cfg, mesh)
    C = cfg.n_embd
    V = pad_vocab(vocab)
    routed = expert_rows(cfg, n) if cfg.n_experts else 0

    norms = (16 * cfg.n_layer + 5) * n * C  # two in each block, and the last one without a sum
    turned = 0
    if cfg.pos == "rope":
        turned = 4 * (cfg.n_head + cfg.n_kv_head) * head_width(cfg) * n
    hidden = dense_hidden(cfg) * n + cfg.ffn_hidden * routed
    of_activation = 5
    if cfg.mlp in GATED:
        of_activation = 8
    elif gelu_mlp.is_possible(cfg, device):
        of_activation = 2
    experts = (4 * n + 5 * routed) * C if routed else 0
    return {"elementwise": norms + cfg.n_layer * turned,
            "activations": cfg.n_layer * of_activation * hidden,
            "cross-entropy": 2 * head_rows(cfg, mesh) * V,
            "rows": cfg.n_layer * experts + 3 * n * C + V * C}


def floors(cfg, world, vocab, rows, copy_tb_s):
    """Return {kind: ms} of the floor. rows: from all_alone(). copy_tb_s: this machine's copy."""
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, n_experts=cfg.n_experts, cp=cfg.cp)
    kinds = dict.fromkeys(KINDS, 0.0)
    for row in rows:
        kinds[row["kind"]] += row["count"] * (row["ms"] or 0)
    width = 2 if cfg.dtype in ("bf16", "fp16") else 4
    for kind, elements in passes(cfg, mesh, vocab, world.device).items():
        kinds[kind] += elements * width / copy_tb_s / 1e9
    updated = owned_parameters(cfg, mesh, local_parameters(cfg, mesh, vocab))
    kinds["optimizer"] += updated * ADAM / copy_tb_s / 1e9
    return kinds


def fused(floor):
    """Return the floor without the passes of activations and cross-entropy."""
    return {**floor, "activations": 0.0, "cross-entropy": 0.0}


def under_load(world, calls, floor, copy_tb_s, seconds):
    """Return the ms of the floor's work where one part follows the other, without a pause, for some seconds.

    The first half of the time brings the GPU to its limit of power, and the second half is measured.
    calls: from all_alone(). What else the floor has are bytes; they are copied. Each rank works alone.
    """
    copied = 1e9 * copy_tb_s * sum(floor[kind] for kind in KINDS if kind not in ("products", "attention"))
    n_copies = math.ceil(copied / 4 / MOST_COPIED)  # of numbers in bf16, each of them read and written
    length = math.ceil(copied / 4 / n_copies / LENGTHS) * LENGTHS
    source = torch.randn(length, dtype=torch.bfloat16, device=world.device)
    target = torch.empty_like(source)
    work = in_turn([*calls, (lambda: target.copy_(source), n_copies)])

    def all_work():
        for call in work:
            call()

    if world.device.type == "cpu":
        return alone(world, all_work, 1)
    run = graphed(all_work)
    n = math.ceil(seconds / 2 * 1e3 / gpu_milliseconds(run, 1))
    gpu_milliseconds(run, n)
    return gpu_milliseconds(run, n)


def in_turn(calls):
    """Return a list in which each call of [(call, count)] stands as often as it counts, evenly spread."""
    places = [((i + 0.5) / count, n) for n, (_, count) in enumerate(calls) for i in range(count)]
    return [calls[n][0] for _, n in sorted(places)]


# -----------------------------------------------------------------------------
# A workload

def examine(world, name, flags, copy_tb_s):
    """Return what is printed and written of one workload."""
    cfg = workload(name, world)
    if world.device.type == "cpu":
        cfg = dataclasses.replace(cfg, compile=False)  # torch's operations are to be told apart
    found = operations(cfg, world)
    fresh(world)
    ms, kernels, vocab = measured(cfg, world, flags.steps)
    fresh(world)
    rows, calls = all_alone(world, found, flags.repeat)
    floor = floors(cfg, world, vocab, rows, copy_tb_s)
    loaded = under_load(world, calls, floor, copy_tb_s, flags.seconds)
    return {"workload": name, "gpus": world.size, "ms": ms, "copy_tb_s": copy_tb_s,
            "goal": goal_ms(name, cfg, world),
            "measured": by_kind(ms, kernels), "floor": floor, "fused": fused(floor),
            "under_load": loaded,
            "alone": rows, "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:60])}


def goal_ms(name, cfg, world):
    """Return the ms of a step that reaches its goal beside the best peer; None without peer, goal or H200.

    The peers' speeds (speed.PEERS) are those of H200s in earlier leases.
    """
    key = (name, world.size)
    if world.device.type == "cpu" or key not in PEERS or key not in GOALS:
        return None
    if kind_of(device_name(world.device), total_memory(world.device) / 2**30) != "h200":
        return None
    _, tokens_per_s = PEERS[key]
    return cfg.micro_batch * cfg.seq_len / (tokens_per_s * GOALS[key]) * 1e3


def fresh(world):
    """Give back what the last model held, and what was compiled for it."""
    gc.collect()
    forget_memory(world.device)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def verdict(goal, bounds):
    """Return in words above which of the floors {name: ms} the goal lies, in ms; the highest is told."""
    highest_first = sorted(bounds.items(), key=lambda item: -item[1])
    for name, bound in highest_first:
        if goal >= bound:
            return f"goal {goal:.1f} ms: {goal - bound:.1f} above the {name} of {bound:.1f}"
    return f"goal {goal:.1f} ms: {bound - goal:.1f} below the {name} of {bound:.1f}"


def show(result, top):
    """Print a workload: its kinds, its largest products and the verdict."""
    print(f"{result['workload']:9}" + "".join(f"{kind[:9]:>10}" for kind in KINDS) + f"{'sum':>10}")
    bounds = {"floor under load": result["under_load"]}
    for line in ("measured", "floor", "fused"):
        kinds = result[line]
        total = sum(kinds.values())
        print(f"{line:9}" + "".join(f"{kinds[kind]:10.2f}" for kind in KINDS) + f"{total:10.2f}")
        if line != "measured":
            bounds[NAMES[line]] = total
    print(f"under load the floor's work takes {result['under_load']:.2f} ms")
    failed = [row for row in result["alone"] if row["ms"] is None]
    for row in failed:
        print(f"  {row['count']:4} x {row['what']}")
    for row in [row for row in result["alone"] if row["ms"]][:top]:
        rate = f", {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        print(f"  {row['count']:4} x {row['ms']:.4f} ms alone{rate}: {row['what']:.70}")
    if failed:
        print("  the floors are too low: they lack what failed")
    elif result["goal"]:
        print("  " + verdict(result["goal"], bounds))
    sys.stdout.flush()


def main(argv=None):
    flags = read_flags(Flags, argv, "floor.py [WORKLOAD...]", "Split a step by kinds of kernels, "
                       "and compute what it would take if each kernel ran as fast as it does alone.")
    world = launch(timeout=300)
    copy_tb_s = ceilings(world)["copy_tb_s"] if world.device.type != "cpu" else 0.01
    for name in flags.workloads:
        try:
            result = examine(world, name, flags, copy_tb_s)
        except torch.OutOfMemoryError as e:
            if world.size > 1:
                raise  # the other ranks would wait for this one
            print(f"{name}: {one_line(e)[:150]}", flush=True)
            continue
        # A row goes from each rank to all, over the world.
        results = world.tree.gather_objects(result)
        if world.rank == 0:
            report(max(results, key=lambda of_rank: sum(of_rank["floor"].values())), flags)
    shutdown(world)


def report(result, flags):
    """Print what was found of a workload, and append it to --json."""
    show(result, flags.top)
    if flags.json:
        with open(flags.json, "a") as f:
            f.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    start(main)

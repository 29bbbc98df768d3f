"""Which algorithm multiplies each of a run's matrices: the one that is fastest on this machine.

cuBLAS chooses by rules. Measured on an H100, another of its algorithms is 4 to 12 % faster for half of the
products of GPT-2 and Llama. So before a step becomes a CUDA graph, its products are measured with the
algorithms that the library proposes (ops/cublas_lt.py).

Algorithms may add in another order, and round differently then. So all ranks take what the lowest rank that
measured a product chose. The run's folder keeps the choices, in products.json, and a resumed run takes them
from its first step on. A product with a bias, a vector, is left to cuBLAS.
"""
import contextlib
import functools
import json
import statistics
from pathlib import Path

import torch

from ops import backend, cublas_lt
from ops.accelerator import device_name, free_memory, side_stream
from ops.cublas_lt import product, sum_with_product
from ops.gelu_mlp import product_gelu, product_gelu_backward

FILE = "products.json"
FLOPS = 1e12  # of the calls that are timed together: about 2 ms
MOST_CALLS = 64  # of small products, which the host launches one by one before they are a graph
FIRST_ROUNDS = 2  # with all algorithms
LAST_ROUNDS = 6  # with the fastest FINALISTS of them
FINALISTS = 3
MARGIN = 0.01  # torch multiplies where nothing is faster by this part


def is_possible(cfg, device):
    """Whether the products of a run on this torch device can be measured. plan.py's device has no index."""
    if device.index is None or not fits(cfg) or cublas_lt.library() is None:
        return False
    return backend.is_hopper(device)


def fits(cfg):
    return cfg.dtype == "bf16" and not cfg.deterministic


class FastProducts:
    """What multiplies in a run. everyone: the ranks; folder: that of the run, or None. Collective."""

    def __init__(self, everyone, device, folder=None):
        self.everyone = everyone
        self.device = device
        self.path = None if folder is None else Path(folder, FILE)
        cublas_lt.settings.measured = True
        kept = self.load() if everyone.rank == 0 else None
        cublas_lt.choices.update(self.everyone.broadcast(kept))  # rank 0 tells all others

    def load(self):
        """Return the choices in the run's folder: {words of a Shape: the name of an algorithm}."""
        if self.path is None:
            return {}
        try:
            kept = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        is_same = isinstance(kept, dict) and [kept.get(key) for key in ("gpu", "cublaslt")] == self.made_for()
        found = kept.get("products") if is_same else None
        return found if isinstance(found, dict) else {}

    def made_for(self):
        return [device_name(self.device), cublas_lt.version()]

    def choose(self):
        """Measure all products that have no choice yet, on any rank, and let all ranks choose the same."""
        measured = {}
        for shape, plan in list(cublas_lt.plans.items()):
            if shape.words() not in cublas_lt.choices:
                found = fastest(plan)
                torch.cuda.empty_cache()  # of the next product's memory
                if found is not None:
                    measured[shape.words()] = found
        chosen = self.everyone.union(measured)  # a few words from each rank to all, over the world
        if not chosen:
            return
        cublas_lt.choices.update(chosen)
        for shape, plan in cublas_lt.plans.items():
            if shape.words() in chosen:
                plan.choose(chosen[shape.words()])
        if self.everyone.rank == 0 and self.path is not None:
            self.save()

    def save(self):
        gpu, version = self.made_for()
        kept = {"gpu": gpu, "cublaslt": version, "products": cublas_lt.choices}
        with contextlib.suppress(OSError):  # then the next run measures again
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(kept, indent=1))
            unfinished.replace(self.path)


def fastest(plan):
    """Return the name of the algorithm that is fastest for a Plan, "" if it is torch's."""
    if bytes_needed(plan.shape) > free_memory(plan.shape.device):
        return None  # too little memory for measuring
    before = plan.chosen
    try:
        candidates = make_candidates(plan)
        by_torch = [candidate for candidate in candidates if candidate.proposal is None]
        proposed = [candidate for candidate in candidates if candidate.proposal is not None]
        if not by_torch:
            return ""  # There is nothing to compare with.
        take_turns(candidates, FIRST_ROUNDS)
        finalists = sorted(proposed, key=Candidate.milliseconds)[:FINALISTS]
        take_turns(by_torch + finalists, LAST_ROUNDS)
    except torch.OutOfMemoryError:  # Another process has taken it.
        return None
    finally:
        plan.chosen = before
    best = min(by_torch + finalists, key=Candidate.milliseconds)
    is_faster = best.milliseconds() < (1 - MARGIN) * by_torch[0].milliseconds()
    return best.proposal.name() if is_faster else ""


def make_candidates(plan):
    """Return a Candidate for torch's way, and one for each proposal of a Plan that the GPU can run."""
    call = example(plan.shape)
    stream = side_stream(plan.shape.device)  # of all measurements: on each, torch's cuBLAS keeps memory
    stream.wait_stream(torch.cuda.current_stream(plan.shape.device))  # which makes the matrices
    pool = torch.cuda.graph_pool_handle()
    found = []
    with torch.cuda.stream(stream):
        for proposal in (None, *plan.proposals):
            plan.chosen = proposal
            try:
                call()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # the library has refused it
                continue
            stream.synchronize()
            found.append(Candidate(plan, call, pool))
    return found


class Candidate:
    """Calls of one algorithm, as a CUDA graph: the host may take longer than the GPU for a single call."""

    def __init__(self, plan, call, pool):
        self.proposal = plan.chosen
        self.times = []
        shape = plan.shape
        calls = min(max(1, int(FLOPS / (2 * shape.m * shape.k * shape.n))), MOST_CALLS)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool)  # of all such graphs, which run one after the other
        try:
            for _ in range(calls):
                call()
        finally:
            self.graph.capture_end()

    def run(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(begin.elapsed_time(end))

    def milliseconds(self):
        return statistics.median(self.times)


def take_turns(candidates, rounds):
    """Time candidates in turn, so that the clock of the GPU is the same for all; forget earlier times."""
    for candidate in candidates:
        candidate.times.clear()
    for _ in range(rounds):
        for candidate in candidates:
            candidate.run()


def bytes_needed(shape):
    """Return how many bytes measuring may take: the matrices, and what one call keeps and another writes."""
    numbers = 5 * shape.m * shape.n
    # Factors with the gaps between their strides
    numbers += shape.a.stride * (shape.k if shape.a.by_column else shape.m)
    numbers += shape.b.stride * (shape.n if shape.b.by_column else shape.k)
    return 2 * numbers + 2 * cublas_lt.MOST_WORKSPACE


def example(shape):
    """Return a function without arguments that does a product of a Shape, on random matrices."""
    generator = torch.Generator(shape.device).manual_seed(0)  # That of dropout stays as it is.
    a = random_matrix(shape.m, shape.k, shape.a, generator)
    b = random_matrix(shape.k, shape.n, shape.b, generator)
    if shape.epilogue == cublas_lt.GELU_AUX:
        return lambda: product_gelu(a, b.T)
    if shape.epilogue == cublas_lt.PRODUCT_ONLY and not shape.adds:
        return lambda: product(a, b)

    contiguous = cublas_lt.Factor(by_column=False, stride=shape.n)
    other = random_matrix(shape.m, shape.n, contiguous, generator)
    if shape.epilogue == cublas_lt.DGELU:
        return lambda: product_gelu_backward(a, b, other)
    return lambda: sum_with_product(other, a, b)


def random_matrix(rows, width, factor, generator):
    contiguous, other = (rows, width) if factor.by_column else (width, rows)
    memory = torch.randn(other, factor.stride, dtype=torch.bfloat16, device=generator.device,
                         generator=generator)
    matrix = memory[:, :contiguous]
    return matrix.T if factor.by_column else matrix


def compile_products(on):
    """Let what torch.compile compiles from here on multiply by ops/cublas_lt.py, or by torch."""
    from torch._dynamo import reset
    from torch._inductor import config
    ours = products_by_shape()
    before = config.post_grad_custom_post_pass
    now = ours if on else None
    if before not in (None, ours) or before is now:
        return  # somebody has set a pass of their own
    config.post_grad_custom_post_pass = now
    reset()  # What was compiled otherwise is compiled again.


@functools.cache
def products_by_shape():
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    of_torch = torch.ops.aten
    ours = {of_torch.mm.default: torch.ops.nanoshard.product.default,
            of_torch.addmm.default: torch.ops.nanoshard.sum_with_product.default}

    class ProductsByShape(CustomGraphPass):
        def __call__(self, graph):
            for node in graph.nodes:
                if node.target in ours and not node.kwargs and is_served(node):
                    node.target = ours[node.target]

        def uuid(self):
            return get_hash_for_files((__file__,))

    return ProductsByShape()


def is_served(node):
    """Whether a product of the compiler's graph is in bf16, and what it adds to, if anything, is a matrix."""
    values = [argument.meta.get("val") for argument in node.args]
    return all(x is not None and x.dtype == torch.bfloat16 and x.dim() == 2 for x in values)

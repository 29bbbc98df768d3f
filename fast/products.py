"""Which algorithm multiplies each of a run's matrices: the one that is fastest on this machine.

cuBLAS chooses by rules. On an H100 another of its algorithms is 4 to 12 % faster for half of the products of
GPT-2 and Llama. So before a step becomes a CUDA graph, its products are measured with the algorithms that
cuBLASLt proposes. They may add in another order, so all ranks take what the lowest rank that measured a
product chose. A product with a bias, a vector, is left to cuBLAS.
"""
import functools
import statistics

import torch

from ops import backend, cublas_lt
from ops.accelerator import side_stream
from ops.cublas_lt import product, sum_with_product
from ops.gelu_mlp import product_gelu, product_gelu_backward

FLOPS = 1e12  # of the calls that are timed together: about 2 ms
MOST_CALLS = 64  # of small products, which the host launches one by one before they are a graph
ROUNDS = 6  # in which each algorithm is timed once
MARGIN = 0.01  # torch multiplies where nothing is faster by this part


def is_possible(cfg, device):
    """Whether the products of a run on this torch device can be measured. plan.py's device has no index."""
    if device.index is None or cfg.dtype != "bf16" or cfg.deterministic:
        return False
    return backend.is_hopper(device) and cublas_lt.library() is not None


def choose_products(everyone):
    """Measure all products that have no choice yet; all ranks then choose the same. Collective."""
    measured = {}
    for shape, plan in list(cublas_lt.plans.items()):
        if str(shape) not in cublas_lt.choices:
            measured[str(shape)] = fastest(plan)
            torch.cuda.empty_cache()  # of the next product's memory
    cublas_lt.choices.update(everyone.union(measured))  # a few words from each rank to all, over the world
    for plan in cublas_lt.plans.values():
        plan.choose()


def fastest(plan):
    """Return the name of the algorithm that is fastest for a Plan, "" if it is torch's."""
    try:
        candidates = make_candidates(plan)
    except torch.OutOfMemoryError:
        return ""
    if None not in candidates:
        return ""  # torch itself has failed: there is nothing to compare with
    times = {name: [] for name in candidates}
    for _ in range(ROUNDS):  # in turn, so that the clock of the GPU is the same for all
        for name, graph in candidates.items():
            times[name].append(milliseconds(graph))
    medians = {name: statistics.median(of_one) for name, of_one in times.items()}
    by_torch = medians.pop(None)
    best = min(medians, key=medians.get, default="")
    return best if medians.get(best, by_torch) < (1 - MARGIN) * by_torch else ""


def make_candidates(plan):
    """Return {name: captured calls} of torch's way, None, and of each proposal that the GPU can run."""
    shape = plan.shape
    call = example(shape, plan.device)
    n_calls = min(max(1, int(FLOPS / (2 * shape.m * shape.k * shape.n))), MOST_CALLS)
    stream = side_stream(plan.device)  # of all measurements: on each, torch's cuBLAS keeps memory
    stream.wait_stream(torch.cuda.current_stream(plan.device))  # which makes the matrices
    pool = torch.cuda.graph_pool_handle()  # of all these graphs, which run one after the other
    before = plan.chosen
    found = {}
    with torch.cuda.stream(stream):
        for proposal in (None, *plan.proposals):
            plan.chosen = proposal
            try:
                call()
            except RuntimeError:  # the library has refused it, or memory is too small
                continue
            stream.synchronize()
            found[proposal and proposal.name()] = captured(call, n_calls, pool)
    plan.chosen = before
    return found


def captured(call, n_calls, pool):
    """Return calls as a CUDA graph: the host may take longer than the GPU for a single call."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool)
    try:
        for _ in range(n_calls):
            call()
    finally:
        graph.capture_end()
    return graph


def milliseconds(graph):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def example(shape, device):
    """Return a function without arguments that does a product of a Shape, on random matrices."""
    generator = torch.Generator(device).manual_seed(0)  # That of dropout stays as it is.
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
    now = products_by_shape() if on else None
    if config.post_grad_custom_post_pass is not now:
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

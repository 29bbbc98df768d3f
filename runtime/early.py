"""What brings a run's first step earlier. It changes no number.

    begin            before torch is imported: it starts what goes on beside the imports
    wake             what a GPU does only once, in a thread, while the host makes the model
    kernels_of       the kernels of ops/ that fast/ahead.py compiles
    first_step_ends  everything is as usual again

Two thirds of the time to the first step belong to Python: it imports torch and torch's compiler, which traces
the model. Meanwhile the GPU and all cores but one have nothing to do. So four things go on beside that:
    a process compiles the run's Triton kernels into Triton's cache (fast/ahead.py)
    another compiles those of flash-attn-4 and quack-kernels, if no run with these flags has done it before
    a thread starts the CUDA driver, while torch is imported
    a thread lets the GPU load the libraries of products and attention, while the compiler is imported
And the garbage collector rests: imports and tracing make a million objects that stay, and the collector looks
at them again and again.

This file does not import torch at its top. A part that fails is left out: it only costs time.
"""
import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import sys
import threading
from pathlib import Path

from config import draws_random_numbers, pad_vocab
from fast import ahead
from interface.packages import version_of
from ops import tiles
from runtime import launcher

RARELY = (20_000, 50, 1000)  # gc.set_threshold; Python's own (700, 10, 10) look at new objects 850 times
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # the kernels know no fp64
MULTIPROCESSORS = 132  # of most Hopper GPUs; any number that 16 does not divide gives the same kernel
NVIDIA = Path("/dev/nvidiactl")  # is there where a process can reach an NVIDIA GPU

# The last two are their compiler and what loads a kernel.
LIBRARIES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
SOURCES_OF_KERNELS = ("fast/experts.py", "fast/flash.py", "fast/library_kernels.py")  # ours, which call them
# The flags that decide which kernels of libraries a run launches.
FLAGS_OF_KERNELS = (
    "kernels", "dtype", "deterministic", "micro_batch", "seq_len", "tp", "cp", "ep",
    "objective", "dropout", "doc_mask", "window", "full_every",
    "n_layer", "n_embd", "n_head", "n_kv_head", "head_dim",
    "n_experts", "top_k", "capacity_factor", "mlp", "ffn_hidden")


class Start:
    """What goes on beside the start of this process."""

    def __init__(self):
        self.thresholds = None  # those of the garbage collector, while it rests
        self.threads = []


start = Start()


def begin(cfg):
    """Start what goes on beside the import of torch. cfg: a Config, or None for wrong flags."""
    start.thresholds = gc.get_threshold()
    gc.set_threshold(*RARELY)
    if cfg is None or not NVIDIA.exists():
        return
    is_first = launcher.is_first_of_node()
    compile_for_libraries(cfg, is_first)
    launched_by, _ = launcher.started_by()
    if launched_by == "single":  # Ranks choose first which GPUs they see: runtime/visible.py.
        if cfg.compile:
            launcher.share_kernels()  # before the thread, because the driver reads the environment
        run_beside(start_driver)
    elif cfg.compile:
        return  # torch's compiler gives each GPU a cache of its own: it would not find what is compiled here.
    if is_first:
        compile_kernels(kernels_of(cfg))


def first_step_ends():
    """Let the garbage collector work as before, and wait for the threads: no graph may be captured beside
    them."""
    if start.thresholds is not None:
        gc.set_threshold(*start.thresholds)
        start.thresholds = None
    for thread in start.threads:
        thread.join()
    start.threads.clear()
    for process in ahead.started:
        process.poll()  # Usually it has ended, and its entry in the process table goes.


def run_beside(function, *args):
    """Call a function in a thread. Whatever it raises, the run does without it."""
    def call():
        with contextlib.suppress(Exception):
            function(*args)
    thread = threading.Thread(target=call, name=function.__name__, daemon=True)
    thread.start()
    start.threads.append(thread)


def start_driver():
    """Start the CUDA driver and make the context that torch will use, without torch."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)


def wake(cfg, device):
    """In a program, let a GPU load what products and attention need, beside the host's work.

    cuDNN's attention takes numbers from the GPU's generator, so nothing begins where a step draws from it.
    """
    is_program = start.thresholds is not None
    draws = cfg is None or draws_random_numbers(cfg)
    if is_program and not draws and device.type != "cpu" and NVIDIA.exists():
        run_beside(first_product_and_attention, device)


def first_product_and_attention(device):
    """Multiply and attend once, forward and backward: one head of 128 for 128 tokens."""
    import torch
    import torch.nn.functional as F
    torch.accelerator.set_device_index(device.index)  # Each thread has a current GPU of its own.
    x = torch.zeros(128, 128, dtype=torch.bfloat16, device=device)
    q = (x @ x).view(1, 1, 128, 128).requires_grad_()
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


# -----------------------------------------------------------------------------
# Kernels

def kernels_of(cfg):
    """Return [(name, arguments, options)]: kernels of ops/ that a run with these flags launches.

    In the place of a tensor stands the name of its dtype, and of a descriptor that name with the tile. Of a
    number, Triton's key holds only its type and whether 16 divides it. The list has what each dense model
    needs, and the experts' products, which take longest. Their other kernels and those of Muon are left out,
    and compile when they are first launched. tests/test_early.py compares it with a step.
    """
    if cfg.dtype not in DTYPES:
        return []
    weight = DTYPES[cfg.dtype]
    found = []
    is_fused = cfg.tp == 1 and not cfg.logit_softcap  # as in model.py
    if is_fused and cfg.vocab_size and cfg.dtype != "fp16":  # as in cross_entropy_rows
        arguments = [weight, "int64", "float32", "float32", cfg.vocab_size, pad_vocab(cfg.vocab_size)]
        found.append(("kernels.cross_entropy", arguments, {"ROWS": 2, "BLOCK": 2048, "num_warps": 4}))
    for grad in dict.fromkeys([weight, "float32"]):  # the gradients keep their dtype, or are summed in fp32
        moment = "bfloat16" if cfg.moments_dtype == "bf16" else "float32"
        arguments = ["float32", grad, moment, moment, weight, "float32", 0.9, 0.1, 0.05, 1e-8, 16]
        options = {"OUT": weight != "float32", "SPLIT": cfg.split_masters, "BLOCK": 2048, "num_warps": 8}
        if cfg.split_masters:
            arguments[0] = "int16"  # the low bits
            arguments[4] = "int16"  # the bits of the weights
        found.append(("kernels.adamw", arguments, options))
        options = {"TIMES": 4, "BLOCK": 2048, "num_warps": 8}  # flat.sums_of_squares
        found.append(("kernels.sum_squares", [grad, "float32", 16, 16, 16], options))
    sums = []  # of 16-bit gradients in fp32: whether the kernel adds
    if weight != "float32" and (cfg.global_batch or cfg.dtype == "fp16"):
        sums = [False, True] if cfg.global_batch else [False]
    for add in sums:
        options = {"ADD": add, "BLOCK": 4096, "num_warps": 8}
        found.append(("kernels.accumulate", [weight, "float32", 16], options))
    if cfg.mlp == "swiglu" and not cfg.n_experts:
        width = cfg.ffn_hidden // cfg.tp
        options = {"PACKED": True, "LIMITED": False, "BLOCK": 1024, "num_warps": 4}
        found.append(("kernels.swiglu", [weight] * 4 + [width], options))
        found.append(("kernels.swiglu_backward", [weight] * 6 + [width], {**options, "RECOMPUTE": False}))
    if weight == "bfloat16" and cfg.n_experts and cfg.mlp == "swiglu" and not cfg.capacity_factor:
        found += products_of_experts(cfg)
    return found


def products_of_experts(cfg):
    """Return those of ops/tma_kernels.py, as ops/routed_experts.py and ops/grouped_mm.py launch them."""
    C = cfg.n_embd
    F = cfg.ffn_hidden
    E = cfg.n_experts // cfg.ep
    if C % 8 or F % 8:  # the rows of a descriptor begin at multiples of 16 bytes
        return []
    # Forward takes the matrices turned, backward as they are. In the last product backward adds two.
    products = ((C, F, True, False), (F, C, True, False), (C, F, False, False), (F, C, False, True))
    found = []
    for I, O, by_column, two in products:
        launch = tiles.product(E, O, by_column, two)
        found.append(on_hopper("grouped_mm", launch, I, O, pairs=2))
    rows = cfg.micro_batch * cfg.seq_len // (cfg.cp * cfg.tp) * cfg.top_k  # in the mean also with --ep
    if rows >= tiles.WGRAD_ROWS * E and not cfg.deterministic:
        launch = tiles.weight_gradient(E)
        found += [on_hopper("grouped_wgrad", launch, F, C), on_hopper("grouped_wgrad", launch, C, F)]
    return [kernel for i, kernel in enumerate(found) if kernel not in found[:i]]


def on_hopper(name, launch, first, second, pairs=1):
    """Return the entry of kernels_of for a kernel with a tiles.Launch and two widths."""
    factors = pairs * [["bfloat16", *launch.first], ["bfloat16", *launch.second]]
    widths = [16 if width % 16 == 0 else 8 for width in (first, second)]
    arguments = [*factors, "int32", "bfloat16", *widths, launch.programs * MULTIPROCESSORS]
    return f"tma_kernels.{name}", arguments, launch.options


def compile_kernels(kernels):
    """Start a process that compiles kernels into Triton's cache, where Triton is installed."""
    if kernels and importlib.util.find_spec("triton") is not None:
        ahead.start("triton", json.dumps(kernels))


def compile_for_libraries(cfg, is_first):
    """Start a process that compiles the kernels of libraries, where no run of these flags has done it.

    is_first: whether this process does it. The other ranks of its node only wait.
    """
    if cfg.kernels == "plain" or cfg.dtype != "bf16":
        return
    folder = launcher.keep_library_kernels()
    if folder is None:
        return
    flags = json.dumps({name: getattr(cfg, name) for name in FLAGS_OF_KERNELS})
    sources = [(ahead.HOME / path).read_text() for path in SOURCES_OF_KERNELS]
    state = json.dumps([flags, sources, launcher.folders_of_kernels(), sys.version_info[:2],
                        *map(version_of, LIBRARIES)])
    name = hashlib.sha256(state.encode()).hexdigest()[:16]
    ended = Path(folder) / f"{name}.ended"
    if ended.exists():
        return
    if is_first:
        if not ahead.start("libraries", flags, str(ended)):
            return
        with contextlib.suppress(OSError):  # Without this file no rank waits.
            ahead.begun(ended).touch()
    ahead.awaited.append(ended)

"""runtime/early.py and fast/ahead.py: what goes on beside the start of a run."""
import gc
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import plot
import train
from config import pad_vocab
from fast import ahead
from model import DTYPES
from ops import backend, grouped_mm, tiles
from ops.cross_entropy import cross_entropy_rows, scale_rows
from runtime import early, launcher
from runtime.launch import World
from runtime.launcher import bare_environment
from train import Step, build

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--data=synthetic", "--n-layer=1", "--n-embd=32", "--n-head=2", "--n-kv-head=1", "--ffn-hidden=48",
         "--seq-len=32", "--micro-batch=2", "--no-compile"]


def flags(*words):
    """Return the Config of a small model with kernels for its dtype."""
    return plot.parse_or_list([*words[:1], *SMALL, *words[1:]])


@pytest.fixture
def program(monkeypatch):
    """early.start of a program whose threads and process are not started: {name: arguments} instead."""
    begun = {}
    monkeypatch.setattr(early, "start", early.Start())
    monkeypatch.setattr(early, "NVIDIA", ROOT)
    monkeypatch.setattr(early, "run_beside", lambda function, *args: begun.update({function.__name__: args}))
    monkeypatch.setattr(early, "compile_kernels", lambda kernels: begun.update(kernels=kernels))
    monkeypatch.setattr(early, "compile_for_libraries", lambda cfg, is_first: None)
    before = gc.get_threshold()
    yield begun
    gc.set_threshold(*before)


def test_the_collector_rests_until_the_first_step_is_done(program):
    before = gc.get_threshold()
    early.begin(flags("dense-210m"))
    assert gc.get_threshold() == early.RARELY
    early.wake(flags("dense-210m"), torch.device("cpu"))
    early.first_step_ends()
    assert gc.get_threshold() == before
    assert program.keys() == {"start_driver", "kernels"}, "a CPU is not woken"


def test_only_the_first_process_of_a_node_compiles(program, monkeypatch):
    """... and of several, none starts the driver before it knows which GPUs it may see."""
    for rank, local_rank in (0, 0), (1, 1), (2, 0):
        monkeypatch.setattr(launcher, "detect",
                            lambda env, i=rank, j=local_rank: launcher.Start("torchrun", i, 4, j, 2))
        program.clear()
        early.begin(flags("dense-210m"))
        assert program.keys() == ({"kernels"} if local_rank == 0 else set()), rank
        program.clear()
        early.begin(replace(flags("dense-210m"), compile=True))
        assert not program, "torch's compiler moves the cache of each rank"


@pytest.mark.parametrize("dropout,woken", [("0", True), ("0.1", False)])
def test_a_gpu_is_woken_where_nothing_draws_from_its_generator(dropout, woken, program):
    cfg = flags("dense-210m", "--dropout", dropout)
    early.begin(cfg)
    early.wake(cfg, torch.device("meta"))
    early.wake(None, torch.device("meta"))  # wrong flags
    assert ("first_product_and_attention" in program) == woken


def test_a_notebook_is_left_alone(monkeypatch):
    monkeypatch.setattr(early, "start", early.Start())
    before = gc.get_threshold()
    early.wake(flags("dense-210m"), torch.device("meta"))
    early.first_step_ends()
    assert gc.get_threshold() == before and early.start.threads == []


def test_a_part_that_fails_is_left_out(monkeypatch):
    monkeypatch.setattr(early, "start", early.Start())
    early.run_beside(Path("/no/such/file").read_text)
    early.first_step_ends()


def test_torch_is_not_imported():
    code = "import sys; from runtime import early; assert 'torch' not in sys.modules, 'seconds'"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_folder_of_the_kernels(monkeypatch, tmp_path):
    """What the user names stays; without a name it is in the compiler's folder, for every GPU."""
    for name, expected in (("TRITON_CACHE_DIR", tmp_path), ("TORCHINDUCTOR_CACHE_DIR", tmp_path / "triton")):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        monkeypatch.setenv(name, str(tmp_path))
        launcher.share_kernels()
        assert launcher.os.environ["TRITON_CACHE_DIR"] == str(expected)
        monkeypatch.delenv(name)


def test_the_row_of_the_first_step_says_when_it_was_done(tmp_path):
    """In a program, counted from its start by the system."""
    command = [sys.executable, "train.py", "tiny", *SMALL, "--steps=2", "--log-every=1", "--eval-every=0",
               "--save-every=0", "--no-plot", f"--out={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["ms"] / 1e3 < first["first_step_s"] < 120 and "first_step_s" not in second


CALLS = """
import json, runpy, sys

from runtime import early

sys.path.insert(0, "")
sys.argv = sys.argv[1:]
calls = []


def record(name):
    real = getattr(early, name)

    def call(*args):
        run = next((frame.f_locals["self"] for frame in frames() if "number" in frame.f_locals), None)
        calls.append([name, "torch" in sys.modules, run and run.state.step])
        return real(*args)
    setattr(early, name, call)


def frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


for name in ("begin", "wake", "first_step_ends"):
    record(name)
runpy.run_path("train.py", run_name="__main__")
print(json.dumps(calls), file=sys.stderr)
"""


@pytest.mark.parametrize("flags", [
    pytest.param([], id="a step"),
    pytest.param(["--train-range-to-skip", "1", "1"], id="a skipped step", marks=pytest.mark.long)])
def test_train_py_calls_what_is_here(flags, tmp_path):
    """begin() comes before torch is imported; first_step_ends() after the first step, skipped or not."""
    argv = ["train.py", "tiny", *SMALL, "--steps=2", "--eval-every=0", "--save-every=0", "--no-plot",
            f"--out={tmp_path}", *flags]
    done = subprocess.run([sys.executable, "-c", CALLS, *argv], cwd=ROOT, check=True, capture_output=True,
                          text=True)
    assert json.loads(done.stderr.splitlines()[-1]) == [
        ["begin", False, None], ["wake", True, None], ["first_step_ends", True, 1],
        ["first_step_ends", True, None]]


# -----------------------------------------------------------------------------
# Kernels. Their keys are Triton's own; nothing is launched. conftest.py lets this process interpret kernels,
# so another process compares the keys.

CASES = [["dense-210m"], ["dense-210m", "--split-masters"],
         ["dense-210m", "--moments-dtype=bf16"], ["dense-210m", "--dtype=fp32"],
         ["dense-210m", "--global-batch=4"], ["gpt2", "--vocab-size=300"], ["dense-210m", "--dtype=fp16"],
         ["gpt2", "--vocab-size=300", "--no-bias", "--norm-eps=1e-3"], ["dense-210m", "--bias"],
         ["dense-210m", "--norm-place=after"]]


def keys(launch):
    """Return {(kernel, key)} of what `launch` launches, for a GPU of capability 90."""
    from triton.runtime import driver, jit

    from fast.ahead import Driver
    found = set()

    def note(kernel, *args, grid, warmup, **options):
        *_, binder = kernel.device_caches[0]
        _, specialization, options = binder(*args, debug=False, **options)
        found.add((kernel.fn.__name__, str(specialization), str(sorted(options.items()))))
    jit.JITFunction.run = note
    driver.set_active(Driver(90))
    launch()
    return found


def two_steps(cfg):
    """Do two steps on a CPU that passes for a GPU, and launch the head's kernels, which a CPU does not."""
    mesh = train.make_mesh(World(), 1, 1, 1)
    choice = train.choose(cfg, mesh, torch.device("cpu"))
    choice = choice._replace(single_microbatch=cfg.dtype == "bf16" and not cfg.global_batch)
    step = Step(cfg, *build(cfg, mesh, cfg.vocab_size, torch.device("cpu"), choice=choice))
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    for number in (1, 2):
        step([(tokens, tokens)] * (2 if cfg.global_batch else 1), number)
    logits = torch.zeros(64, pad_vocab(cfg.vocab_size), dtype=DTYPES[cfg.dtype])
    cross_entropy_rows(logits, tokens.reshape(-1), cfg.vocab_size)
    rows = torch.zeros(64, cfg.n_embd, dtype=DTYPES[cfg.dtype])
    scale_rows(rows, torch.ones(64), rows)


def list_kernels(cfg):
    from fast.ahead import with_tensors
    for name, arguments, options in early.kernels_of(cfg):
        module, function = name.split(".")
        kernel = getattr(importlib.import_module(f"ops.{module}"), function)
        kernel[(1,)](*with_tensors(arguments), **options)


def compare(words):
    """Every kernel that a step launches is in the list, and of the others only those of other layouts."""
    cfg = replace(flags(*words), compile=False)
    launched = keys(lambda: two_steps(cfg))
    listed = keys(lambda: list_kernels(cfg))
    assert len(launched) > 1 and launched <= listed, (words, launched - listed)
    in_vain = {name for name, *_ in listed - launched}
    assert in_vain <= {"adamw", "sum_squares", "accumulate"}, (words, in_vain)
    compiled = {kernel for kernel, *_ in early.kernels_of(replace(cfg, compile=True))}
    assert "kernels.norm_forward" not in compiled  # torch's compiler makes one of its own
    masked = {kernel for kernel, *_ in early.kernels_of(replace(cfg, compile=True, objective="mlm"))}
    assert ("kernels.norm_forward" in masked) == tiles.norm_fits(cfg.n_embd, 4)  # BERT's head is not compiled


def compare_all():
    backend.use_triton = lambda x: x.dtype in backend.DTYPES
    for words in CASES:
        compare(words)
    tiles.NORM_BYTES = 16  # too wide a model for the kernel of norms
    compare(CASES[0])


def without_interpreter(function, monkeypatch):
    """Call a function of this file in a process that compiles kernels and does not interpret them."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = f"import sys; sys.path[:0] = ['.', 'tests']; import test_early; test_early.{function}()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LEAST_SHARED_MEMORY = 99 * 1024  # bytes of a block, of GPUs of capability 8.6, 8.9 and 12.0


def compile_norms():
    """The kernels of each width and dtype that they serve fit into a multiprocessor's memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ops import kernels
    for width, itemsize in ((768, 2), (1024, 4), (4096, 4), (5120, 2), (8192, 2)):
        assert tiles.norm_fits(width, itemsize)
        for function, options in ((kernels.norm_forward, tiles.norm_forward(width)),
                                  (kernels.norm_backward, tiles.norm(width)[1])):
            warps = options.pop("num_warps")
            constants = {**options, "EPS": 1e-5, "CENTRED": True, "BIAS": True}
            numbers = [name for name in function.arg_names if name not in constants]
            kinds = dict.fromkeys(numbers, "*bf16" if itemsize == 2 else "*fp32")
            if "sums_ptr" in kinds:
                kinds["sums_ptr"] = "*fp32"
            kinds |= {"rows": "i32", "width": "i32"} | dict.fromkeys(constants, "constexpr")
            aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(numbers))}
            source = ASTSource(fn=function, signature=kinds, constexprs=constants, attrs=aligned)
            kernel = triton.compile(source, GPUTarget("cuda", 89, 32), {"num_warps": warps})
            shared = kernel.metadata.shared
            assert shared <= LEAST_SHARED_MEMORY, (function, width, itemsize, shared)


@pytest.mark.long
def test_the_kernels_of_norms_fit_into_small_gpus(monkeypatch):
    pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")
    without_interpreter("compile_norms", monkeypatch)


def test_the_kernels_that_a_step_launches_are_compiled(monkeypatch):
    pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")
    without_interpreter("compare_all", monkeypatch)


EXPERTS = [["moe-4b", "--n-experts=8", "--n-embd=512", "--ffn-hidden=1792"],
           ["moe-4b", "--n-experts=2", "--n-embd=1152", "--ffn-hidden=1000", "--seq-len=4096"],
           ["moe-4b", "--n-experts=4", "--ep=2", "--n-embd=256", "--ffn-hidden=1408"],
           ["moe-4b", "--n-experts=8", "--ep=2", "--n-embd=512", "--ffn-hidden=1792"],
           ["moe-4b", "--n-experts=2", "--tp=2", "--n-embd=512", "--ffn-hidden=1792", "--micro-batch=1"]]


def experts_step(cfg):
    """Forward and backward of the experts of one rank on a CPU that passes for a Hopper GPU."""
    e = cfg.n_experts // cfg.ep
    tokens = cfg.micro_batch * cfg.seq_len // cfg.tp  # of this rank
    rows = tokens * cfg.top_k  # What the other ranks of ep send is as much as what they get, in the mean.
    grouped_mm.use_torch = grouped_mm.use_tma = lambda x, w: True
    grouped_mm.F.grouped_mm = lambda x, w, offs: None  # the weights' gradient, where experts have few rows
    grouped_mm.multiprocessors = lambda device: 132
    x, grad = (torch.zeros(rows, width, dtype=torch.bfloat16) for width in (cfg.n_embd, cfg.ffn_hidden))
    w1, w2 = (torch.zeros(e, *shape, dtype=torch.bfloat16)
              for shape in ((cfg.ffn_hidden, cfg.n_embd), (cfg.n_embd, cfg.ffn_hidden)))
    ends = torch.zeros(e, dtype=torch.int32)
    grouped_mm.experts_mm(x, w1.mT, ends)
    grouped_mm.experts_mm(grad, w2.mT, ends)
    grouped_mm.experts_mm(x, w2, ends)
    grouped_mm.experts_mm(grad, w1, ends, (grad, w1))
    grouped_mm.experts_wgrad(grad, x, ends)
    grouped_mm.experts_wgrad(x, grad, ends)


def compare_experts():
    for words in EXPERTS:
        cfg = flags(*words)
        launched = keys(lambda cfg=cfg: experts_step(cfg))
        listed = {key for key in keys(lambda cfg=cfg: list_kernels(cfg)) if key[0].startswith("grouped_")}
        assert len(launched) > 2 and launched == listed, (words, launched ^ listed)


def test_the_experts_products_are_compiled(monkeypatch):
    pytest.importorskip("triton.tools.tensor_descriptor", reason="this Triton has no descriptors")
    without_interpreter("compare_experts", monkeypatch)
    assert not early.products_of_experts(flags("moe-4b", "--n-embd=516", "--n-head=3", "--n-kv-head=3"))


class NvidiasDriver:
    """libcuda.so of a machine with one GPU of capability 8.6; `code` is what its functions return."""

    def __init__(self, code):
        self.code, self.is_ready = code, False

    def cuInit(self, flags):
        self.is_ready = flags == 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert self.is_ready and device == 0
        value._obj.value = {75: 8, 76: 6}[attribute]
        return self.code


def test_the_driver_says_the_capability(monkeypatch):
    monkeypatch.setattr(ahead.ctypes, "CDLL", lambda name: NvidiasDriver(0))
    assert ahead.capability_of_gpu() == 86
    monkeypatch.setattr(ahead.ctypes, "CDLL", lambda name: NvidiasDriver(100))
    with pytest.raises(OSError, match="sees no GPU"):
        ahead.capability_of_gpu()


def test_other_gpus_compile_no_kernels_of_hopper(monkeypatch):
    compiled = []
    monkeypatch.setattr(ahead, "compile_kernel", lambda *kernel: compiled.append(kernel[0]))
    monkeypatch.setattr(ahead, "fork", lambda function, *kernel: compiled.append(kernel[0]) if kernel else 0)
    monkeypatch.setattr(ahead.os, "waitpid", lambda *_: None)
    monkeypatch.setattr("triton.runtime.driver.set_active", lambda driver: None)
    kernels = early.kernels_of(replace(flags("moe-4b"), vocab_size=256))
    for capability, there in ((90, True), (80, False), (100, False)):
        compiled.clear()
        ahead.compile_all(kernels, capability)
        assert ("tma_kernels.grouped_mm" in compiled) == there and "kernels.adamw" in compiled


def test_a_process_compiles_them_into_the_cache(monkeypatch, tmp_path):
    pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")
    cfg = replace(flags("dense-210m"), vocab_size=256, split_masters=True)
    kernels = [kernel for kernel in early.kernels_of(cfg) if kernel[0] != "kernels.swiglu_backward"]
    code = ("import json, sys; from fast import ahead; ahead.capability_of_gpu = lambda: 90; "
            "ahead.compile_driver = lambda: None; ahead.compile_launcher = lambda _: None; ahead.main()")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-c", code, "triton", json.dumps(kernels)], cwd=ROOT, check=True)
    compiled = {path.stem for path in tmp_path.glob("*/*.cubin")}
    assert compiled == {"swiglu", "cross_entropy", "adamw", "sum_squares", "norm_forward",
                        "norm_backward", "scale_rows", "sum_programs"}


def test_the_process_ends_without_a_driver():
    if early.NVIDIA.exists():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, "fast/ahead.py", "triton", "[]"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode != 0 and "libcuda" in process.stderr


# -----------------------------------------------------------------------------
# Variables that torch reads at the start

@pytest.mark.parametrize("ranks,name,value,why", [
    (1, "TORCH_LOGS", "nonsense", "Invalid log settings"),
    (1, "TORCH_LOGS", "+dynamo,no.module", "No module named 'no'"),
    (2, "TORCH_DISTRIBUTED_DEBUG", "nonsense", "must be OFF, INFO, or DETAIL"),
    pytest.param(2, "GLOO_SOCKET_IFNAME", "nonsense", "no network interface nonsense with an address",
                 marks=pytest.mark.long)])
def test_a_variable_that_torch_does_not_understand_is_one_line(ranks, name, value, why, tmp_path):
    command = [sys.executable, ROOT / "train.py", "tiny", "--data=synthetic", f"--out={tmp_path}"]
    if ranks > 1:
        command = [Path(sys.executable).with_name("mpiexec"), "-n", str(ranks), *command]
    env = {**bare_environment(), name: value}
    job = subprocess.run(command, capture_output=True, text=True, env=env)
    assert job.returncode == 2 and job.stderr.count("\n") == 1, job.stderr
    assert f"{name}={value} in the environment" in job.stderr
    assert why in job.stderr and "unset it" in job.stderr
    assert list(tmp_path.iterdir()) == []

"""fast/library_kernels.py, and what starts it: kernels of libraries are compiled beside the start of a run.

No library and no GPU is needed. The stubs of test_flash.py and test_experts_library.py note what they are
asked for, and a process of its own gets packages that write it down.
"""
import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_experts_library
import test_flash
import torch
from faults import planted
from runs import TINY, session
from test_model import MESH
from torch._subclasses.fake_tensor import FakeTensor

from attention import Attention
from config import FLAGS, Config
from fast import ahead, experts, flash, library_kernels
from fast.experts import QUACK
from fast.flash import FLASH_ATTN
from interface.command_line import parse
from parallel import Axis
from runtime import early, launcher
from runtime.launch import World

ROOT = Path(__file__).resolve().parents[1]
CACHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR")
DENSE = Config(n_embd=256, n_head=4, ffn_hidden=192, seq_len=128, micro_batch=2, dtype="bf16")
EXPERTS = replace(DENSE, n_experts=4, top_k=2)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """Nothing is started or awaited, and the user has said nothing about kernels but where they are kept."""
    monkeypatch.setattr(ahead, "started", [])
    monkeypatch.setattr(ahead, "awaited", [])
    monkeypatch.setattr(early, "start", early.Start())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in CACHES:
        monkeypatch.setenv(name, "")  # So monkeypatch unsets it after the test if it is unset now.
        monkeypatch.delenv(name)


# -----------------------------------------------------------------------------
# runtime/early.py and runtime/launcher.py

@pytest.fixture
def node(monkeypatch):
    """A node where quack seems installed: its packages, versions, and what ahead.start is called with."""
    node = SimpleNamespace(packages={"quack"}, versions={}, starts=[])
    monkeypatch.setattr(early.importlib.util, "find_spec", lambda name: name in node.packages or None)
    monkeypatch.setattr(early, "version_of", lambda package: node.versions.get(package, ""))
    monkeypatch.setattr(ahead, "start", lambda *arguments: not node.starts.append(arguments))
    return node


def ended_of(cfg):
    """Return the file for which a rank waits that starts nothing. Afterwards nothing is awaited."""
    early.compile_for_libraries(cfg, is_first=False)
    ended, = ahead.awaited
    ahead.awaited.clear()
    return ended


def test_the_first_process_of_a_node_starts_it_and_the_others_wait(node, tmp_path):
    """Where the file is there, nobody starts or awaits anything."""
    ended = ended_of(EXPERTS)
    assert node.starts == [] and ended.parent == tmp_path / "libraries" and not any(ended.parent.iterdir())
    early.compile_for_libraries(EXPERTS, is_first=True)
    (task, flags, file), = node.starts
    assert task == "libraries" and file == str(ended) and ahead.awaited == [ended]
    assert ahead.begun(ended).exists()
    assert json.loads(flags) == {name: getattr(EXPERTS, name) for name in early.FLAGS_OF_KERNELS}
    ended.touch()
    for is_first in (True, False):
        early.compile_for_libraries(EXPERTS, is_first)
    assert len(node.starts) == len(ahead.awaited) == 1


def test_nobody_waits_where_no_process_can_be_started(node, monkeypatch):
    monkeypatch.setattr(ahead, "start", lambda *arguments: False)
    early.compile_for_libraries(EXPERTS, is_first=True)
    assert ahead.awaited == []


@pytest.mark.parametrize("change, packages, is_started", [
    ({}, {"quack"}, True), ({}, set(), False), (dict(kernels="plain"), {"quack"}, False),
    (dict(dtype="fp32"), {"quack"}, False), (dict(dtype="fp16"), {"quack"}, False)], ids=str)
def test_nothing_is_started_for_a_run_without_the_libraries(change, packages, is_started, node):
    node.packages = packages
    early.compile_for_libraries(replace(EXPERTS, **change), is_first=True)
    assert len(node.starts) == len(ahead.awaited) == is_started


def test_the_name_of_the_file_says_what_decides(node, monkeypatch):
    """Flags of kernels decide, and the versions of libraries and of Python. Other flags change nothing."""
    names = [ended_of(EXPERTS).name]
    assert ended_of(replace(EXPERTS, seed=7, steps=9, out="elsewhere")).name == names[0]
    for flag in early.FLAGS_OF_KERNELS:
        value = getattr(EXPERTS, flag)
        other = f"not {value}" if isinstance(value, str) else value + 1
        if flag != "dtype":  # A run in another dtype asks for nothing.
            names.append(ended_of(replace(EXPERTS, **{flag: other})).name)
    for package in ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        node.versions = {package: "4.1"}
        names.append(ended_of(EXPERTS).name)
    node.versions = {}
    monkeypatch.setattr(early, "sys", SimpleNamespace(version_info=(3, 99, 1)))
    names.append(ended_of(EXPERTS).name)
    monkeypatch.setenv("QUACK_CACHE_DIR", "elsewhere")
    names.append(ended_of(EXPERTS).name)
    for source in early.SOURCES_OF_KERNELS:
        monkeypatch.setattr(early, "SOURCES_OF_KERNELS", (source,))
        names.append(ended_of(EXPERTS).name)
    assert len(set(names)) == len(names) == len(early.FLAGS_OF_KERNELS) + 9


def test_every_run_on_a_gpu_asks_for_it(monkeypatch):
    """A rank asks for it, too, also with --compile. Only the first rank of each node starts it."""
    asked = []
    monkeypatch.setattr(early, "gc", SimpleNamespace(get_threshold=tuple, set_threshold=lambda *_: None))
    monkeypatch.setattr(early, "compile_kernels", lambda kernels: None)
    monkeypatch.setattr(early, "compile_for_libraries", lambda cfg, is_first: asked.append((cfg, is_first)))
    compiled = replace(EXPERTS, compile=True)
    for rank, local_rank in (0, 0), (1, 1), (2, 0):
        start = launcher.Start("torchrun", rank, 4, local_rank, 2)
        monkeypatch.setattr(launcher, "detect", lambda env, start=start: start)
        for gpu in (ROOT, ROOT / "no such file"):
            monkeypatch.setattr(early, "NVIDIA", gpu)
            early.begin(EXPERTS)
            early.begin(compiled)
        assert asked == [(EXPERTS, local_rank == 0), (compiled, local_rank == 0)]
        asked.clear()


@pytest.mark.parametrize("users", [{}, *({name: "the user's"} for name in CACHES)], ids=str)
def test_the_folder_of_the_kernels(users, node, monkeypatch, tmp_path):
    """flash-attn-4's own cache is on. What the user has set stays."""
    locked = []
    monkeypatch.setattr(launcher.fcntl, "flock", lambda file, how: locked.append((file.mode, how)))
    folder = str(tmp_path / "libraries")
    expected = dict(zip(CACHES, ("1", folder, folder), strict=True)) | users
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    is_on = CACHES[0] not in users
    assert launcher.keep_library_kernels() == (folder if is_on else None)
    assert locked == [("a+", fcntl.LOCK_SH | fcntl.LOCK_NB)] and os.listdir(folder) == []
    assert {name: os.environ[name] for name in CACHES} == expected
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(tmp_path / "of all"))
    monkeypatch.setattr(launcher, "user_name", lambda: "me")
    launcher.keep_library_kernels()
    assert (tmp_path / "of all/torchinductor_me/libraries").is_dir()


def without_locks(*_):
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("fault", ["the folder cannot be made", "its file system knows no locks"])
def test_nothing_is_kept_where_it_cannot_be(fault, node, monkeypatch, tmp_path):
    """flash-attn-4 would give up after waiting for a lock, and end the run."""
    if fault == "the folder cannot be made":
        (tmp_path / "libraries").write_text("a file")
    else:
        monkeypatch.setattr(launcher.fcntl, "flock", without_locks)
    assert launcher.keep_library_kernels() is None
    assert not os.environ.keys() & set(CACHES)
    early.compile_for_libraries(EXPERTS, is_first=True)
    assert node.starts == [] and ahead.awaited == []


def test_every_program_that_launches_keeps_its_kernels(monkeypatch, tmp_path):
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack/__init__.py").touch()
    code = f"import os, runtime.launch; print(os.environ.keys() >= set({CACHES}))"
    is_installed = importlib.util.find_spec("quack") is not None
    for path, keeps in ((tmp_path, True), (tmp_path / "none", is_installed)):
        monkeypatch.setenv("PYTHONPATH", str(path))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == str(keeps)


# -----------------------------------------------------------------------------
# fast/ahead.py

@pytest.mark.parametrize("at, ends, seconds", [
    (3, [], 3), (3, [1, 99], 3), (99, [7, 2, 5], 7), (99, [], 60), (99, [1, 99], 60)])
def test_how_long_a_rank_waits(at, ends, seconds, monkeypatch, tmp_path):
    """It waits until the file is there, which is at the second `at`, or until all processes that it started
    have ended, or for a minute. A rank that started none waits for another rank's process."""
    ended = tmp_path / "ended"
    slept = []  # Each sleep takes a second.

    def sleep(seconds):
        assert seconds <= 0.1
        slept.append(1)
        if len(slept) == at:
            ended.touch()
    monkeypatch.setattr(ahead, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 100 + len(slept)))
    for end in ends:
        ahead.started.append(SimpleNamespace(poll=lambda end=end: 0 if len(slept) >= end else None))
    ahead.wait_for_libraries()
    ahead.awaited.append(ended)
    ahead.wait_for_libraries()
    assert slept == [], "no file is awaited, or nobody has begun"
    ahead.begun(ended).touch()
    ahead.awaited.append(ended)
    for _ in range(2):
        ahead.wait_for_libraries()
        assert len(slept) == seconds and ahead.awaited == []
    ended.touch()
    ahead.awaited.append(ended)
    ahead.wait_for_libraries()
    assert len(slept) == seconds and ahead.LONGEST_WAIT == 60


def test_attention_waits_before_it_calls_the_library(asked, monkeypatch):
    seen = []
    monkeypatch.setattr(ahead, "wait_for_libraries", lambda: seen.append(len(asked)))
    _, heads = test_flash.heads(4, 2)
    with stubs():
        flash.attention(*(x.detach().transpose(1, 2) for x in heads), True)
    assert seen == [0] and len(asked) == 1


def test_a_process_that_cannot_be_started_is_left_out(monkeypatch):
    """The first step asks the other processes for their exit codes."""
    begun = []

    def popen(command, **options):
        if "fails" in command:
            raise OSError("no more processes")
        begun.append((command, *options.values()))
        return SimpleNamespace(poll=lambda: begun.append("poll"))
    monkeypatch.setattr(ahead, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=0))
    assert ahead.start("libraries", "{}", "ended") and not ahead.start("fails")
    early.first_step_ends()
    command = [sys.executable, str(ROOT / "fast/ahead.py"), "libraries", "{}", "ended"]
    assert begun == [(command, 0, 0, 0), "poll"]


def pretend_gpu(monkeypatch, capability):
    """A GPU of 114 multiprocessors, whose number the driver tells as its attribute 16."""
    monkeypatch.setattr(ahead, "capability_of_gpu", lambda: capability)
    monkeypatch.setattr(ahead, "attributes_of_gpu", lambda *numbers: [{16: 114}[i] for i in numbers])


@pytest.mark.parametrize("capability, end", [
    (90, 0), (90, 1), (90, -9), (90, KeyboardInterrupt), (90, subprocess.TimeoutExpired),
    (90, "the job ends"), (80, 0), (100, 0)])
def test_a_hopper_gets_its_kernels(capability, end, monkeypatch, tmp_path):
    """The file is written where all ended well, and nobody is at it any more. All processes end with it."""
    ended = tmp_path / "ended"
    runs = []
    killed = []
    handlers = {}

    def wait(seconds):
        assert seconds == ahead.LONGEST_WAIT and not ended.exists() and ahead.begun(ended).exists()
        if end == "the job ends":
            handlers[signal.SIGTERM](signal.SIGTERM, None)
        if isinstance(end, int):
            return end
        raise end("env", seconds) if end is subprocess.TimeoutExpired else end

    def popen(command, **options):
        runs.append((command, options))
        return SimpleNamespace(wait=wait, pid=7)
    pretend_gpu(monkeypatch, capability)
    monkeypatch.setattr(ahead, "subprocess", SimpleNamespace(Popen=popen))
    monkeypatch.setattr(ahead.os, "killpg", lambda *what: killed.append(what))
    monkeypatch.setattr(ahead.os, "nice", lambda more: None)
    monkeypatch.setattr(sys, "argv", ["ahead.py", "libraries", "FLAGS", str(ended)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(ahead.signal, "signal", lambda number, handler: handlers.update({number: handler}))
    ahead.begun(ended).touch()
    with contextlib.suppress(KeyboardInterrupt, SystemExit, subprocess.TimeoutExpired):
        ahead.main()
    program = ["env", "CUDA_VISIBLE_DEVICES=", "CUTE_DSL_ARCH=sm_90a", "QUACK_ARCH=90",
               "FLASH_ATTENTION_ARCH=sm_90", "FLASH_ATTENTION_NUM_SMS=114", "PYTHONSAFEPATH=",
               sys.executable, "-m", "fast.library_kernels", "FLAGS"]
    options = dict(cwd=ROOT, start_new_session=True)
    assert runs == ([(program, options)] if capability == 90 else [])
    assert killed == ([(7, signal.SIGKILL)] if capability == 90 else [])
    assert ended.exists() == (capability == 90 and end == 0) and not ahead.begun(ended).exists()


# -----------------------------------------------------------------------------
# fast/library_kernels.py: the calls are those of a run

@contextlib.contextmanager
def stubs():
    """Both libraries are installed in the versions that were tried. Stubs take their place."""
    faults = [test_flash.ON_A_CPU, *test_experts_library.ON_A_CPU,
              ("fast.libraries.Library.version", lambda original, library: library.tested)]
    with contextlib.ExitStack() as stack:
        for module in (test_flash, test_experts_library):
            module.forget()
            stack.callback(module.forget)
        for fault in faults:
            stack.enter_context(planted(*fault))
        yield stack


@pytest.fixture
def asked(monkeypatch):
    """The set of what the stubs are asked for."""
    found = set()

    def forward(q, k, v, causal, return_lse):
        found.add(("forward", q.shape, k.shape, v.shape, causal))
        return test_flash.forward(q, k, v, causal, return_lse)

    def backward(*args, causal, **gradients):
        *_, log_sum_exp = args
        shapes = [x.shape for x in (*args, *gradients.values())]
        found.add(("backward", *shapes, log_sum_exp.dtype, causal))
        test_flash.backward(*args, causal, **gradients)

    def product(a, b, out, config, **bounds):
        (name, ends), = bounds.items()
        layouts = [(x.shape, x.stride().index(1)) for x in (a, b, out)]  # which dimension is contiguous
        found.add((name, ends.shape, ends.dtype, *layouts, config))
        test_experts_library.product(a, b, out, config=config, **bounds)
    monkeypatch.setattr(test_flash.LIBRARY, "_flash_attn_fwd", forward)
    monkeypatch.setattr(test_flash.LIBRARY, "_flash_attn_bwd", backward)
    monkeypatch.setattr(test_experts_library.LIBRARY.gemm_tuned, "fn", product)
    return found


@pytest.mark.parametrize("objective, n_kv_head, few, many", [
    ("causal", 1, 64 * 176, 2048), ("mlm", 4, 2**24, 16)])
def test_the_calls_are_those_of_a_run(objective, n_kv_head, few, many, asked, monkeypatch, tmp_path):
    """They have the shapes, layouts and tiles of a session on a CPU. Some tiles need all of its 64 rows."""
    monkeypatch.setattr(experts, "FEW_NUMBERS", few)
    monkeypatch.setattr(experts, "MANY_TERMS", many)
    flags = [*TINY, f"--objective={objective}", "--n-head=4", f"--n-kv-head={n_kv_head}", "--n-embd=192",
             "--ffn-hidden=176", "--n-experts=4", "--top-k=2", "--steps=1", f"--out={tmp_path}"]
    with stubs() as stack:
        stack.enter_context(planted("fast.libraries.Library.is_taken", lambda *_: True))
        for fault in test_experts_library.OURS_ON_A_CPU:
            stack.enter_context(planted(*fault))
        said = session(World(), flags)
    assert said["code"] == 0, said["err"]
    by_run = set(asked)
    asked.clear()
    cfg = parse(flags)
    with stubs():
        for call in library_kernels.attention_calls(cfg) + library_kernels.product_calls(cfg):
            library_kernels.compile_call(*call)
    assert asked == by_run and len(asked) == 7
    assert len({(name, tile) for name, *_, tile in asked if name.startswith("cu")}) == 5


@pytest.mark.parametrize("heads_of_keys", [1, 2, 4])
def test_a_rank_of_several_has_its_share(heads_of_keys):
    """It has the heads and rows of tp 2 and the experts of ep 2, and at least one head of keys."""
    cfg = replace(EXPERTS, tp=2, ep=2, n_kv_head=heads_of_keys, top_k=1)
    layer = Attention(cfg, replace(MESH, tp=Axis("tp", size=2)))
    of_keys = (2, 128, layer.g, 64)
    for _, shapes, is_causal in library_kernels.attention_calls(cfg):
        assert shapes == [(2, 128, layer.h, 64), of_keys, of_keys] and is_causal
    rows = (128, 256)
    hidden = (128, 192)
    assert [shapes for _, shapes, _ in library_kernels.product_calls(cfg)] == [
        (rows, (2, 192, 256)), (hidden, (2, 256, 192)), (rows, (2, 256, 192)), (rows, hidden), (hidden, rows)]


@pytest.mark.parametrize("cp, tp, rows", [(1, 1, 1024), (2, 1, 512), (1, 2, 512), (2, 2, 256)])
def test_the_balanced_rows_of_a_rank(cp, tp, rows):
    """Two choices for each of 4 x 128 tokens, which the ranks of cp and tp share."""
    cfg = replace(EXPERTS, micro_batch=4, cp=cp, tp=tp)
    assert experts.balanced_rows(cfg) == rows


def test_tensors_have_no_memory_and_a_failure_ends_nothing():
    given = []

    def fails(tensors, number):
        given.extend((type(x), x.shape, x.dtype, x.device.type, number) for x in tensors)
        raise RuntimeError("the library finds no GPU")
    library_kernels.compile_call(fails, [(2**20, 2**20), (3,)], 5)
    assert given == [(FakeTensor, shape, torch.bfloat16, "cuda", 5) for shape in ((2**20, 2**20), (3,))]


def test_the_flags_that_decide_are_listed(monkeypatch):
    """compile_all reads these. If one were missing, runs with different kernels would have one file."""
    read = set()
    waited = []

    class Recorder(Config):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)
    windows = [dict(), dict(window=8), dict(window=8, full_every=2)]
    recorders = [Recorder(**{**vars(cfg), **change}) for cfg in (DENSE, EXPERTS) for change in windows]
    read.clear()
    monkeypatch.setattr(library_kernels, "fork", lambda function, *call: len(call))
    monkeypatch.setattr(library_kernels.os, "waitpid", lambda pid, options: waited.append(pid))
    for recorder in recorders:
        with stubs():
            library_kernels.compile_all(recorder)
    with stubs(), planted("fast.flash.library", test_flash.broken):
        library_kernels.compile_all(DENSE)
    assert read & FLAGS.keys() == set(early.FLAGS_OF_KERNELS)
    assert len(waited) == 2 * (2 + 0 + 2) + 3 * 5 + 0, "no full layer, or no library: no attention"


PACKAGES = {  # on the disk, for processes
    "noted.py": """
import json, os
def note(name, *tensors):
    kinds = sorted({f"{x.dtype} {x.device.type}" for x in tensors})
    gpu = os.environ["CUDA_VISIBLE_DEVICES"] + os.environ["FLASH_ATTENTION_NUM_SMS"]
    with open(os.environ["NOTED"], "a") as file:
        file.write(json.dumps([name, kinds, gpu]) + "\\n")
""",
    "flash_attn/cute/__init__.py": "",
    "flash_attn/cute/interface.py": """
from noted import note
def _flash_attn_fwd(q, k, v, causal, return_lse):
    note("forward", q, k, v)
    return q, None
def _flash_attn_bwd(q, k, v, out, grad, log_sum_exp, causal, dq, dk, dv):
    note("backward", q, k, v, out, grad, dq, dk, dv)
""",
    "quack/gemm_config.py": "GemmConfig = dict",
    "quack/gemm_interface.py": """
from noted import note
class gemm_tuned:
    def fn(a, b, out, config, **bounds):
        note(*bounds, a, b, out)
        raise RuntimeError("no GPU")
"""}
ATTENTION = ["forward", "backward"]
PRODUCTS = 3 * ["cu_seqlens_m"] + 2 * ["cu_seqlens_k"]


@pytest.mark.parametrize("kernels, quack, calls", [
    ("auto", QUACK.tested, [*ATTENTION, *PRODUCTS]),
    pytest.param("auto", "9.9", ATTENTION, marks=pytest.mark.long), ("plain", QUACK.tested, [])])
def test_the_kernels_of_moe_4b(kernels, quack, calls, monkeypatch, tmp_path):
    """Only the versions that were tried compile them, also where Python does not trust this folder."""
    versions = {"flash_attn_4": FLASH_ATTN.tested, "quack_kernels": quack}
    metadata = {f"{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"
                for name, version in versions.items()}
    for name, text in {**PACKAGES, **metadata, "calls": ""}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name, value in dict(PYTHONPATH=tmp_path, PYTHONSAFEPATH=1, NOTED=tmp_path / "calls").items():
        monkeypatch.setenv(name, str(value))
    cfg = parse(["moe-4b", "--n-embd=256", "--ffn-hidden=192", f"--kernels={kernels}"], data="synthetic")
    flags = json.dumps({name: getattr(cfg, name) for name in early.FLAGS_OF_KERNELS})
    pretend_gpu(monkeypatch, 90)
    monkeypatch.setattr(sys, "argv", ["ahead.py", "libraries", flags, str(tmp_path / "ended")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(ahead.os, "nice", lambda more: None)
    ahead.main()
    found = sorted(map(json.loads, (tmp_path / "calls").read_text().splitlines()))
    assert found == [[name, ["torch.bfloat16 cuda"], "114"] for name in sorted(calls)]

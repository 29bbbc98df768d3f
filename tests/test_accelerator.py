"""A run on an accelerator that is not CUDA: a stand-in with the name of Intel's, "xpu", whose memory is the
CPU's. Where code asks torch.cuda on it, or a CUDA-only way is chosen, the run fails or differs.
"""
import contextlib
import dataclasses
import sys
import time
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pool import ROOT, run_ranks
from runs import TINY, final, rows, session
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(ROOT / "bench"))

import doctor

from config import Config
from cost.step_time import peak_flops
from fast.choose import Choice, choose
from ops import accelerator, backend
from parallel import make_mesh
from runtime.launch import World, print_node

XPU, CPU = torch.device("xpu", 0), torch.device("cpu")
NAME = "Intel(R) Data Center GPU Max 1550"


class StandIn(TorchFunctionMode):
    """Tensors say that they are on XPU, and what is asked to be there is made on the CPU.

    Host tensors are marked: those that are made without a device, or copied to the CPU. Where one meets a
    tensor on XPU, the operation fails as it would on an accelerator.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func == torch.Tensor.device.__get__:
            return CPU if is_on_host(args[0]) else XPU
        if func == torch.Tensor.pin_memory:
            return args[0]
        if func == torch.device:
            return func(*args, **kwargs)
        if func not in TAKES_BOTH:
            check_devices(func, tensors)
        result = func(*map(here, args), **{k: here(v) for k, v in kwargs.items() if k != "pin_memory"})
        on_host = lands_on_host(func, args, kwargs, tensors)
        if any(result is x for x in tensors) and on_host != is_on_host(result):
            result = result.clone()  # a copy from one device to the other
        for x in tree_leaves(result):
            if on_host and isinstance(x, torch.Tensor):
                x.is_on_host = True
        return result


# These read a tensor on one device and write to one on another, and an index may be on the host.
TAKES_BOTH = {torch.Tensor.copy_, torch.Tensor.data.__set__, torch.Tensor.__getitem__,
              torch.Tensor.__setitem__}


def is_on_host(tensor):
    return getattr(tensor, "is_on_host", False)


def check_devices(func, tensors):
    """RuntimeError where host tensors meet others; a host tensor of no dimensions may meet any."""
    on_host = {is_on_host(x) for x in tensors if x.dim() > 0}
    if len(on_host) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {XPU} and {CPU}")


def lands_on_host(func, args, kwargs, tensors):
    """Whether the result of func is in host memory: it was asked to be, or all that it comes from is."""
    asked = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
    if asked:
        return asked[0] == CPU
    if func == torch.Tensor.cpu or (func == torch.Tensor.to and "cpu" in args):
        return True
    if func in TAKES_BOTH:
        return is_on_host(tensors[0])
    return all(map(is_on_host, tensors))


def here(value):
    return CPU if isinstance(value, torch.device) else value


class Event:
    """On the CPU's clock; what counts is who calls what."""

    def __init__(self, device=None, enable_timing=False):
        assert device in (None, XPU)

    def record(self, stream=None):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3

    def synchronize(self):
        seen["synchronize"] += 1

    def wait(self, stream=None):
        seen["wait"] += 1


class Generator(torch.Generator):
    def __new__(cls, device=None):
        return super().__new__(cls)


class Stream:
    def __init__(self, device=None, priority=0):
        seen["stream"] += 1

    def wait_stream(self, other):
        seen["wait_stream"] += 1

    def record_event(self):
        return Event()


seen = Counter()
MODULE = SimpleNamespace(  # what torch.xpu has, of it what the house asks
    Stream=Stream, Event=Event, current_stream=Stream, stream=lambda stream: contextlib.nullcontext(),
    get_device_name=lambda device: NAME, device_count=lambda: 1,
    max_memory_allocated=lambda device: 2**30, max_memory_reserved=lambda device: 3 * 2**30,
    get_device_properties=lambda device: SimpleNamespace(total_memory=64 * 2**30),
    mem_get_info=lambda device: (60 * 2**30, 64 * 2**30))


batch_isend_irecv = torch.distributed.batch_isend_irecv


def on_the_cpu(operations):
    """Messages to neighbours: gloo serves the CPU alone, and torch asks the group for the tensors' device."""
    with torch._C.DisableTorchFunction():
        return batch_isend_irecv(operations)


run_backward = torch.autograd._engine_run_backward


def in_stand_in(*args, **kwargs):
    """A backward pass: torch leaves the stand-in before it calls one, and what recomputes would miss it."""
    with StandIn():
        return run_backward(*args, **kwargs)


@contextlib.contextmanager
def stand_in():
    """torch has an accelerator: XPU."""
    real = torch.get_device_module
    modules = mock.patch.object(torch, "get_device_module",
                                lambda device: MODULE if device.type == "xpu" else real(device))
    names = mock.patch.multiple(torch, Event=Event, Generator=Generator)
    devices = mock.patch.multiple(torch.accelerator, is_available=lambda: True, device_count=lambda: 1,
                                  current_accelerator=lambda check_available=False: torch.device("xpu"))
    neighbours = mock.patch.object(torch.distributed, "batch_isend_irecv", on_the_cpu)
    backward = mock.patch.object(torch.autograd, "_engine_run_backward", in_stand_in)
    kernels = mock.patch.object(backend, "TRITON_DEVICES", ())
    with modules, names, devices, neighbours, backward, kernels, StandIn():
        yield


def session_on_xpu(world, argv):
    """runs.session where this rank's device is the stand-in -> (its result, how often streams and events
    were used)"""
    seen.clear()
    with stand_in():
        result = session(dataclasses.replace(world, device=XPU), argv)
    return result, {**seen, "products": torch.get_float32_matmul_precision()}


@pytest.mark.parametrize("ranks,flags", [(2, ["--zero=1"]), (1, ["--dtype=bf16", "--n-experts=4", "--top-k=1",
                                                                 "--global-batch=2"])],
                         ids=["zero1", "experts"])
def test_a_run_is_that_of_the_cpu(ranks, flags, tmp_path):
    """Saved beside the steps, timed by events, its memory logged; MFU is left out: the chip is unknown."""
    argv = [*TINY, "--steps=4", "--save-every=2", "--keep=0", "--timers", *flags, "--out"]
    results = run_ranks(ranks, session_on_xpu, [*argv, str(tmp_path / "xpu")])
    expected = run_ranks(ranks, session, [*argv, str(tmp_path / "cpu")])
    for (result, used), want in zip(results, expected, strict=True):
        assert result["code"] == want["code"] == 0, result["err"] + want["err"]
        # Two saves: each on one stream of its own, which waits for the update, and the next update for it
        assert used["wait_stream"] == 2 and used["wait"] == 1 and used["synchronize"] > 2
        assert used["products"] == ("highest" if ranks == 2 else "high")  # fp32 stays fp32
    assert " forward=" in results[0][0]["out"]
    got, want = rows(tmp_path / "xpu", ()), rows(tmp_path / "cpu", ())
    for a, b in zip(got, want, strict=True):
        assert a.keys() - {"mfu"} == b.keys() and a["mem_gb"] == 3.0 != b["mem_gb"] and a["ms"] > 0
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5 if ranks == 2 else 1e-3)
    (x, meta_x), (y, meta_y) = final(tmp_path / "xpu", 2), final(tmp_path / "cpu", 2)
    assert meta_x["samples"] == meta_y["samples"] and x.keys() == y.keys()
    if ranks == 2:  # the head is computed by another function, so not to the bit
        assert max((x[n] - y[n]).abs().max() for n in x) < 1e-4


def test_no_way_is_chosen_that_only_cuda_has():
    """Not even asked: neither a graph nor what goes through another GPU's memory."""
    cfg = Config(dtype="bf16", zero=1, ep=2, n_experts=4, global_batch=0)
    mesh = make_mesh(World(size=2), ep=2, groups=False)
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)):  # it asks the driver
        choice = choose(cfg, mesh, torch.device("cuda", 0), lambda *_: True)
    assert choice._replace(graph=True).peer_copies
    choice = choose(cfg, mesh, XPU, lambda *_: pytest.fail("asked for peer access"))
    assert choice == Choice(False, False, False, single_microbatch=True)


def test_the_device_by_name_and_memory(capsys):
    world = World(device=XPU)
    with stand_in():
        print_node(world)
        assert capsys.readouterr().out.split(" ranks here, ")[1].startswith(f"{NAME}, torch ")
        for ranks, nodes, words in ((1, 1, "uses 1 of 4 GPUs"), (4, 2, "uses 2 of 4 GPUs"), (4, 1, None)):
            several = World(size=ranks, device=XPU, nodes=tuple(i % nodes for i in range(ranks)))
            with mock.patch.object(torch.accelerator, "device_count", lambda: 4), \
                    mock.patch("torch.distributed.get_backend", lambda: "xccl"):
                print_node(several)
            _, *more = capsys.readouterr().out.splitlines()
            assert more == ([f"  {words}"] if words else [])
        assert doctor.device(world) == ("OK", f"1 x {NAME}, 60 of 64 GiB free", "")
        with mock.patch.object(torch.accelerator, "device_count", lambda: 3), mock.patch.object(
                doctor, "free_memory", lambda device: ((60, 60, 9)[device.index] * 2**30, 2**36)):
            assert ", 60 60 9 of 64 GiB free: another process uses it" in doctor.device(world)[1]
        assert accelerator.total_memory(XPU) == 2**36 and peak_flops(XPU) == 419e12

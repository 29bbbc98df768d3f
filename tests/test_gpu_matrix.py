"""bench/gpu_matrix.py, whose checks need several GPUs, rehearsed on a CPU with fewer layouts and steps:

    every part        one rank and two, as the program runs them without CUDA
    a stand-in        test_accelerator.py's, where a tensor in host memory is an error as it is on a GPU
    CUDA's branches   the step as a graph, symmetric memory, the watch for hidden synchronisations
    what must fail    a wrong layout, replicas that differ, runs that differ
"""
import contextlib
import dataclasses
import io
import itertools
import sys
from unittest import mock

import pytest
import torch
from faults import planted
from pool import ROOT, run_ranks
from shared import SharedBuffer
from test_accelerator import XPU, stand_in
from test_flex import CHOSEN, wider_window
from test_graph import graphs_on_a_cpu

sys.path.insert(0, str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import gpu_matrix
import test_experts_library
import test_flash

import fast.graph
from fast import experts, symm_mem
from ops import cublas_lt
from runtime.launch import World

CHECK_LAYOUTS, LAYOUTS_OF = gpu_matrix.check_layouts, gpu_matrix.layouts_of
FAMILIES = gpu_matrix.FAMILIES  # all of them: small() leaves three
FAMILY = {"fp64": "capacity", "fp32": "llama", "bf16": "dropless"}  # whose layouts make test compares


@contextlib.contextmanager
def small(steps=2):
    """Fewer layers, layouts and steps, so that each part takes a second."""
    tables = mock.patch.multiple(
        gpu_matrix.matrix, STEPS=2, LAYOUTS=[(2, 4, dict(pp=2))],
        MOE_LAYOUTS=[(2, 4, dict(tp=2, ep=2, zero=1))], CP_LAYOUTS=[("capacity", 2, 4, dict(cp=2))])
    parts = mock.patch.multiple(
        gpu_matrix, STEPS=steps, SHARDED=(), SHAPE=dict(gpu_matrix.SHAPE, n_layer=2),
        REPLICATED=(("capacity", dict(tp=2)), ("dropless", dict(zero=3, split_masters=True))),
        CAPTURED=(("llama", dict(zero=1, split_masters=True)), ("dropless", dict(ep=2)),
                  *gpu_matrix.CAPTURED[-2:]),
        MEASURED=(("llama", dict(zero=1)),), LARGER={})
    few = {name: gpu_matrix.FAMILIES[name] for name in ("llama", "dropless", "capacity")}
    with tables, parts, mock.patch.object(gpu_matrix, "FAMILIES", few):
        yield


def layouts_of_one_family(world, dtype):
    """gpu_matrix.check_layouts with the layouts of the dtype's FAMILY alone."""
    def layouts_of(size):
        return [layout for layout in LAYOUTS_OF(size) if layout[0] == FAMILY[dtype]]
    with mock.patch.object(gpu_matrix, "layouts_of", layouts_of):
        return CHECK_LAYOUTS(world, dtype)


def rehearsed(world, check_layouts, *argv):
    """Return what gpu_matrix.main prints on this rank."""
    said = io.StringIO()
    ranks = mock.patch.multiple(gpu_matrix, launch=lambda **options: world, shutdown=lambda world: None,
                                check_layouts=check_layouts)
    with small(), ranks, contextlib.redirect_stdout(said):
        gpu_matrix.main(list(argv))
    return said.getvalue()


def results_and_what_began(said):
    """Return the lines of the parts, and those in which the parts say which of their runs begins."""
    lines = said.splitlines()
    return [line for line in lines if line[0] != " "], [line for line in lines if line[0] == " "]


@pytest.mark.long
@pytest.mark.parametrize("check_layouts, numbers", [
    (layouts_of_one_family, (2, 1, 1)), (CHECK_LAYOUTS, (4, 4, 4))],
    ids=["a family for each dtype", "all families"])
def test_every_part_runs_on_two_ranks_of_a_cpu(check_layouts, numbers):
    first, second = run_ranks(2, rehearsed, check_layouts)
    assert second == ""
    lines, begun = results_and_what_began(first)
    assert {line.split()[0] for line in begun} == {"fp64", "fp32", "bf16", "replicas", "graph", "products",
                                                  "measured"}
    for line, dtype, n in zip(lines, ("fp64", "fp32", "bf16"), numbers, strict=False):
        assert line.startswith(f"{dtype}: {n} layouts of 2 ranks equal one rank, worst error ")
    assert lines[3].startswith("2 bf16 steps: ") and lines[3].endswith("; two runs as well")
    assert lines[4].startswith("graph: left out, cpu has no CUDA graphs; ")
    assert lines[5] == "flash: left out, no flash kernel takes a mask here (cpu)"
    assert lines[6] == "attention: left out, flash-attn-4 is not taken here (cpu)"
    assert lines[7] == "products: left out, quack-kernels is not taken here (cpu)"
    assert lines[8] == "measured: left out, no such products here (cpu)"
    assert lines[9].startswith("sync: left out, torch sees hidden synchronisations under CUDA alone; ")
    assert len(lines) == 10


def test_one_rank_has_no_layouts():
    (said,) = run_ranks(1, rehearsed, CHECK_LAYOUTS, "sync", "graph", "fp64")
    (layouts, graph, sync), begun = results_and_what_began(said)
    assert begun and all(line.startswith("  graph ") for line in begun)
    assert layouts == "fp64: left out, no layout of the table has this number of ranks, 1"
    assert graph.startswith("graph: left out") and sync.startswith("sync: left out")


# -----------------------------------------------------------------------------
# Tensors on an accelerator

def layouts_on_a_stand_in(world):
    with small(), stand_in():
        return gpu_matrix.check_layouts(dataclasses.replace(world, device=XPU), "fp64")


def test_no_tensor_of_the_layouts_stays_on_the_host():
    """The reference's too: an index in host memory is an error there, as it is on a GPU."""
    line, _ = run_ranks(2, layouts_on_a_stand_in)
    assert line.startswith("fp64: 4 layouts of 2 ranks equal one rank, worst error ")


def test_the_stand_in_refuses_a_host_tensor_where_a_gpu_does():
    with stand_in():
        x = torch.zeros(3, 2, device=XPU)
        index = torch.arange(3)
        assert (x.device, index.device, index.to(XPU).device) == (XPU, torch.device("cpu"), XPU)
        assert x.cpu().device == x.to("cpu").device == torch.device("cpu")
        for operation in (lambda: x.index_copy(0, index, x), lambda: x + torch.ones(3, 2),
                          lambda: torch.cat([x, torch.ones(3, 2)])):
            with pytest.raises(RuntimeError, match="on the same device, found xpu:0 and cpu"):
                operation()
        assert x.index_copy(0, index.to(XPU), x).device == XPU
        assert x[index].device == (x + torch.ones(())).device == XPU
        with XPU:
            assert torch.arange(3).device == XPU


# -----------------------------------------------------------------------------
# CUDA's branches

def graphs(world):
    seen = {"captures": 0, "replays": 0, "first": 0}
    with small(steps=5), graphs_on_a_cpu(seen), \
            mock.patch.object(gpu_matrix, "has_cuda_api", lambda device: True):
        return gpu_matrix.check_graphs(world), seen


def test_steps_are_captured_and_replayed():
    for line, seen in run_ranks(2, graphs):
        assert line.startswith("5 bf16 steps as a CUDA graph: 7 runs, losses within ")
        assert "; 0 steps redone" not in line, line
        assert seen["captures"] > 1 and seen["replays"] > 1


def watched_layers(world):
    """Return the line of check_sync, and the modes that torch was told to watch in."""
    modes = []
    shape = dict(gpu_matrix.LAYER, **gpu_matrix.SHAPE)
    with mock.patch.multiple(gpu_matrix, LAYER=shape, ROWS=64, has_cuda_api=lambda device: True), \
            mock.patch.object(symm_mem, "SymmetricBuffer", SharedBuffer), \
            mock.patch.object(torch.cuda, "set_sync_debug_mode", modes.append):
        return gpu_matrix.check_sync(world), modes


def test_synchronisations_are_watched_in_the_third_pass():
    for size in (1, 2):
        for line, modes in run_ranks(size, watched_layers):
            assert line.endswith("dropless ep 2 through symmetric memory") == (size == 2)
            assert modes == ["default", "default", "error", "default"] * (size + 1)


# -----------------------------------------------------------------------------
# Kernels that compute something else

def negative(original, *args, **options):
    """A function that returns the negative result."""
    return -original(*args, **options)


# -----------------------------------------------------------------------------
# The flash kernel, which torch computes here without a compiler

def flash_on_a_cpu(*faults):
    with contextlib.ExitStack() as stack:
        for fault in (*CHOSEN, *faults):
            stack.enter_context(planted(*fault))
        stack.enter_context(small())
        stack.enter_context(mock.patch.object(gpu_matrix, "COMPILED", (False,)))
        return gpu_matrix.check_flash(World())


@pytest.mark.long
def test_the_flash_kernel_has_the_losses_of_the_mask():
    assert flash_on_a_cpu().startswith("2 fp32 steps through the flash kernel: 3 runs, losses within ")


def test_a_flash_kernel_that_sees_other_keys_is_found():
    with pytest.raises(AssertionError, match="'window': 200"):
        flash_on_a_cpu(("fast.flex.pair_rule", wider_window))


@pytest.fixture
def flash_attn():
    """Torch in the place of flash-attn-4."""
    with planted(*test_flash.CHOSEN), planted(*test_flash.ON_A_CPU), small(), \
            mock.patch.object(gpu_matrix, "FAMILIES", FAMILIES):
        yield


@pytest.mark.long
def test_flash_attn_4_has_the_losses_of_torchs_attention(flash_attn):
    assert gpu_matrix.check_attention(World()).startswith("2 bf16 steps with flash-attn-4: 3 runs, losses ")


def test_another_attention_is_found(flash_attn):
    fault = "fast.flash.FlashAttention.__call__", negative
    with planted(*fault), pytest.raises(AssertionError, match="llama"):
        gpu_matrix.check_attention(World())


@contextlib.contextmanager
def quack(steps=2):
    """Loops over the experts in the place of quack-kernels, and of our kernels."""
    with contextlib.ExitStack() as stack:
        for fault in (test_experts_library.CHOSEN, *test_experts_library.ON_A_CPU,
                      *test_experts_library.OURS_ON_A_CPU):
            stack.enter_context(planted(*fault))
        stack.enter_context(small(steps))
        # Fewer tokens than on a GPU: some CPUs take long for products in bf16.
        stack.enter_context(mock.patch.object(gpu_matrix, "MULTIPLIED", ((128, 256), (192, 512))))
        yield


def products_by_quack(world):
    """Return what the check says, how often the library multiplied, and how often it did over ranks."""
    library = test_experts_library.LIBRARY
    over_ranks = []

    class Seen(experts.QuackProductsOverRanks):
        def experts_mm(self, *args, **options):
            over_ranks.append(library.calls)
            return super().experts_mm(*args, **options)
    before = library.calls
    seen = {"captures": 0, "replays": 0, "first": 0}
    steps = 2 if world.size == 1 else 5  # Over ranks the first steps have messages of their exact size.
    # One rank alone has the large shape: a CPU can take minutes for it in bf16.
    shapes = gpu_matrix.MULTIPLIED if world.size == 1 else gpu_matrix.MULTIPLIED[:1]
    with (quack(steps), graphs_on_a_cpu(seen), mock.patch.object(gpu_matrix, "MULTIPLIED", shapes),
          mock.patch.object(experts, "QuackProductsOverRanks", Seen)):
        line = gpu_matrix.check_products(world)
    return line, library.calls - before, len(over_ranks)


@pytest.mark.long
@pytest.mark.parametrize("n, runs", [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_quack_has_the_losses_of_our_products(n, runs):
    """With two ranks also where rows come from the other one."""
    for line, calls, over_ranks in run_ranks(n, products_by_quack):
        steps = 2 if n == 1 else 5
        assert line.startswith(f"{steps} bf16 steps with quack-kernels: {runs} runs, losses within "), line
        assert calls > 0 and (over_ranks > 0) == (n == 2)


def test_another_product_is_found():
    fault = "fast.experts.QuackProducts.experts_mm", negative
    with quack(), planted(*fault), pytest.raises(AssertionError, match="'ffn_hidden': 128"):
        gpu_matrix.check_products(World())


class Measured(gpu_matrix.Training):
    """A Training that says that its products were measured, and that one has the algorithm `name`."""
    name = "a"

    def build(self, without):
        super().build(without)
        self.measured = "measured" not in without
        cublas_lt.choices["8 x 8 x 8"] = self.name


@contextlib.contextmanager
def measured(name):
    with (small(), mock.patch.object(gpu_matrix, "Training", Measured),
          mock.patch.object(Measured, "name", name),
          mock.patch.object(fast.graph, "compile_blocks", lambda model: None)):
        yield
    cublas_lt.forget()


def measured_on(world, of_each):
    with measured(of_each[world.rank]):
        try:
            return gpu_matrix.check_measured(world)
        except AssertionError as e:
            return f"AssertionError: {e}"


def test_ranks_that_measure_choose_the_same():
    for line in run_ranks(2, measured_on, "aa"):
        assert line.startswith("2 bf16 steps with measured products, 2 of them by other algorithms: 2 runs, ")
    for line in run_ranks(2, measured_on, "ab"):
        assert line.startswith("AssertionError: llama {'zero': 1}, micro-batches of 2: [{'8 x 8 x 8': 'a'}, ")


# -----------------------------------------------------------------------------
# What must fail

def wrong_layout(world):
    """One rank stands for two, but drops its rows as one."""
    with small(), mock.patch.object(gpu_matrix.equality, "capacity_ranks", lambda base, layout: (1, 1)):
        return layouts_of_one_family(world, "fp64")


def wrong_weights(world):
    """The second rank's weights differ from the first's."""
    prints = gpu_matrix.weights_of

    def weights_of(training):
        weights = prints(training)
        return {name: (ranks, [world.rank, *bits]) for name, (ranks, bits) in weights.items()}
    with small(), mock.patch.object(gpu_matrix, "weights_of", weights_of):
        return gpu_matrix.check_replicas(world)


def wrong_repetition(world):
    """Each run ends with other weights."""
    prints, runs = gpu_matrix.weights_of, itertools.count()

    def weights_of(training):
        run = next(runs)
        return {name: (ranks, [run, *bits]) for name, (ranks, bits) in prints(training).items()}
    with small(), mock.patch.object(gpu_matrix, "weights_of", weights_of):
        return gpu_matrix.check_replicas(world)


@pytest.mark.parametrize("fault, said", [
    (wrong_layout, "capacity {'tp': 2, "), (wrong_weights, "differs between ranks 0 and 1"),
    (wrong_repetition, "two runs differ")])
def test_a_fault_is_named(fault, said):
    with pytest.raises(AssertionError) as failure:
        run_ranks(2, fault)
    assert said in str(failure.value)

"""bench/gpu_matrix.py, whose checks need several GPUs, rehearsed on a CPU with fewer layouts and steps."""
import contextlib
import dataclasses
import io
import sys
from unittest import mock

import pytest
from pool import ROOT, run_ranks
from test_accelerator import XPU, stand_in
from test_graph import graphs_on_a_cpu

sys.path.insert(0, str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import gpu_matrix


@contextlib.contextmanager
def small(steps=2):
    """Fewer layers, layouts and steps, so that each part takes a second."""
    tables = mock.patch.multiple(
        gpu_matrix.matrix, STEPS=2,
        LAYOUTS=[(2, dict(pp=2), "llama", ""), (2, dict(tp=2, ep=2, zero=1), "dropless capacity", "")])
    parts = mock.patch.multiple(
        gpu_matrix, STEPS=steps, SHAPE=dict(gpu_matrix.SHAPE, n_layer=2),
        REPLICATED=(("dropless", dict(zero=3)),), CAPTURED=(("dropless", dict(ep=2)),),
        MEASURED=(("llama", dict(zero=1)),), LARGER={})
    few = {name: gpu_matrix.FAMILIES[name] for name in ("llama", "capacity", "dropless")}
    with tables, parts, mock.patch.object(gpu_matrix, "FAMILIES", few):
        yield


def rehearsed(world, *parts):
    """Return the lines that gpu_matrix.main prints on this rank."""
    said = io.StringIO()
    ranks = mock.patch.multiple(gpu_matrix, launch=lambda **options: world, shutdown=lambda world: None)
    with small(), ranks, contextlib.redirect_stdout(said):
        gpu_matrix.main(list(parts))
    return said.getvalue().splitlines()


def test_every_part_runs_on_two_ranks_of_a_cpu():
    lines, others = run_ranks(2, rehearsed)
    assert others == []
    results = [line for line in lines if not line.startswith("  ")]  # and the others say what begins
    assert len(results) == len(gpu_matrix.PARTS)
    for line, part in zip(results, gpu_matrix.PARTS, strict=True):
        if part in ("fp64", "fp32", "bf16"):
            assert line.startswith(f"{part}: 3 layouts of 2 ranks equal one rank, worst error ")
        elif part == "replicas":
            assert line.startswith("2 bf16 steps: ") and line.endswith("; two runs as well")
        else:
            assert line.startswith(f"{part}: left out, ")


def layouts_on_a_stand_in(world):
    with small(), stand_in():
        return gpu_matrix.check_layouts(dataclasses.replace(world, device=XPU), "fp64")


def test_no_tensor_of_the_layouts_stays_on_the_host():
    """The reference's too: an index in host memory is an error there, as it is on a GPU."""
    line, _ = run_ranks(2, layouts_on_a_stand_in)
    assert line.startswith("fp64: 3 layouts of 2 ranks equal one rank, worst error ")


def graphs(world):
    seen = {"captures": 0, "replays": 0, "first": 0}
    with small(steps=5), graphs_on_a_cpu(seen), \
            mock.patch.object(gpu_matrix, "has_cuda_api", lambda device: True):
        return gpu_matrix.check_graphs(world), seen


def test_steps_are_captured_and_replayed():
    for line, seen in run_ranks(2, graphs):
        assert line.startswith("5 bf16 steps as a CUDA graph: ") and "; 0 steps redone" not in line, line
        assert seen["captures"] >= 1 and seen["replays"] >= 1


# -----------------------------------------------------------------------------
# What must fail

def wrong_layout(world):
    """One rank stands for two, but drops its rows as one."""
    with small(), mock.patch.object(gpu_matrix.equality, "capacity_ranks", lambda base, layout: (1, 1)):
        return gpu_matrix.check_layouts(world, "fp64")


def wrong_weights(world):
    """The second rank's weights differ from the first's."""
    prints = gpu_matrix.weights_of

    def weights_of(training):
        weights = prints(training)
        return {name: (ranks, [world.rank, *bits]) for name, (ranks, bits) in weights.items()}
    with small(), mock.patch.object(gpu_matrix, "REPLICATED", (("llama", {}),)), \
            mock.patch.object(gpu_matrix, "weights_of", weights_of):
        return gpu_matrix.check_replicas(world)


@pytest.mark.parametrize("fault, said", [
    (wrong_layout, "capacity {'tp': 2, "), (wrong_weights, "differs between ranks 0 and 1")])
def test_a_fault_is_named(fault, said):
    with pytest.raises(AssertionError) as failure:
        run_ranks(2, fault)
    assert said in str(failure.value)

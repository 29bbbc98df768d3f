"""The bench folder: collectives by hand equal the library's, the smoke test's numbers equal plain torch's,
every program has the same kind of command line, and gpu_matrix.py is rehearsed on a CPU."""
import contextlib
import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from pool import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import collectives
import gpu_matrix
import smoke
from test_compile import tracing
from test_graph import graphs_on_a_cpu

from parallel import make_mesh


def every_collective(world, tp):
    """Compare by hand, library and formula on every axis, for the first and the last root -> comparisons."""
    mesh, done = make_mesh(world, tp=tp), 0
    for axis in {a.ranks: a for a in (mesh.world, mesh.dp, mesh.tp) if a.size > 1}.values():
        for name, fn in collectives.HAND.items():
            rooted = {"root": axis.size - 1} if name in ("reduce", "broadcast", "scatter") else {}
            for count, root in ((axis.size, {}), (axis.size * 1000, {}), (axis.size * 7, rooted)):
                x, want = collectives.answer(name, axis, count, world.device, **root)
                theirs = collectives.library(name, x.clone(), axis, **root)
                ours = fn(x, axis, **root)
                if want is not None:  # a reduce is defined at its root only
                    torch.testing.assert_close(ours, want, rtol=0, atol=0)
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
                    done += 1
        uneven = torch.full((axis.size * 3 + 1,), 1.0 + axis.rank)  # does not divide by the ranks
        total = axis.size * (axis.size + 1) / 2
        torch.testing.assert_close(collectives.all_reduce(uneven, axis), torch.full_like(uneven, total))
    return done


@pytest.mark.parametrize("n,tp", [(2, 1), (3, 1), (4, 2)])
def test_collectives_by_hand_equal_the_librarys(n, tp):
    axes = 3 if tp > 1 else 1
    assert min(run_ranks(n, every_collective, tp)) >= axes * 6 * 3


def mesh_and_a_wrong_one(world):
    """run(), also with an all-to-all that moves nothing -> (good before, table, rows, right, lines)"""
    said, flags = [], collectives.Flags(tp=2, sizes=("64",), iters=1)
    good = collectives.run(world, flags, said.append)[2]
    original = collectives.HAND["all-to-all"]
    collectives.HAND["all-to-all"] = lambda x, axis: x
    try:
        return good, *collectives.run(world, flags, said.append), said
    finally:
        collectives.HAND["all-to-all"] = original


def test_mesh_experiment_factors_and_a_wrong_collective():
    good, table, rows, right, said = run_ranks(4, mesh_and_a_wrong_one)[0]
    assert good and not right
    assert table["dp"] == {(0, 2): [2, 2], (1, 3): [4, 4]} and table["tp"] == {(0, 1): [1, 1], (2, 3): [5, 5]}
    assert {(r["collective"], r["version"]) for r in rows if not r["ok"]} == {("all-to-all", "hand")}
    assert any("WRONG" in line for line in said) and "axis" in said[0] and "dp     [0, 2] [1, 3]" in said[2]
    factor = {r["collective"]: r["busbw"] / r["algbw"] for r in rows if r["ranks"] == 4}
    assert factor == pytest.approx({"all-reduce": 1.5, "reduce": 1, "broadcast": 1, "all-gather": .75,
                                    "reduce-scatter": .75, "scatter": .75, "all-to-all": .75})


SMOKE = smoke.Flags(iters=4, batch=8, seed=3)


def in_fp64(argument, fn):
    """fn(argument) in fp64: Adam would turn a gradient of rounding errors into a full step."""
    torch.set_default_dtype(torch.float64)
    try:
        return fn(argument)
    finally:
        torch.set_default_dtype(torch.float32)


def smoked(world):
    """Return losses, final weights, whether all replicas are equal, whether the time is positive."""
    mesh = make_mesh(world)
    model, data_parallel, adam = smoke.build(world, mesh, SMOKE)
    rows = smoke.train(world, model, data_parallel, adam, SMOKE)
    weights = [p.detach().clone() for p in model.parameters()]
    return [r["loss"] for r in rows], weights, smoke.replicas_equal(model, mesh), rows[0]["dt"] > 0


def plain(ranks):
    """Return losses and weights of one process with torch's own Adam on the batches of all ranks."""
    torch.manual_seed(SMOKE.seed)
    w = smoke.WIDTHS
    layers = [m for a, b in zip(w, w[1:], strict=False) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=SMOKE.lr)
    data = [torch.Generator().manual_seed(SMOKE.seed + r) for r in range(ranks)]
    losses = []
    for i in range(SMOKE.iters + 1):  # the first is the warm-up, which must not learn
        x = torch.cat([torch.rand(SMOKE.batch, 128, generator=g) for g in data])
        loss = (model(x) - x).square().sum() / ranks
        optimizer.zero_grad()
        loss.backward()
        if i:
            optimizer.step()
            losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("n", [1, 3])
def test_smoke_trains_as_plain_torch_does(n):
    want, weights = in_fp64(n, plain)
    for losses, ours, same, timed in run_ranks(n, in_fp64, smoked):
        assert losses == pytest.approx(want, rel=1e-12) and same and timed
        for a, b in zip(ours, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def one_differs(world):
    model = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, 1.0 + (world.rank == 1))
    torch.nn.init.zeros_(model.bias)
    return smoke.replicas_equal(model, make_mesh(world))


def large_sum(world, wrong_rank):
    """Return what smoke.py says of a large sum in which one rank gets one wrong number, or None."""
    right = type(world.axis).all_reduce

    def all_reduce(axis, x, *how):
        right(axis, x, *how)
        x[len(x) // 2] += world.rank == wrong_rank
        return x

    with mock.patch.object(type(world.axis), "all_reduce", all_reduce):
        try:
            smoke.check_large_sum(world)
        except RuntimeError as error:
            return str(error)


def test_smoke_sees_one_wrong_number_of_a_large_sum():
    assert run_ranks(2, large_sum, -1) == [None, None]
    right, wrong = run_ranks(2, large_sum, 1)
    assert right is None
    assert wrong.startswith("rank 1: 1 of 16,777,216 numbers are wrong in a sum of 0.06 GiB")


def test_smoke_sees_replicas_that_differ():
    assert run_ranks(2, one_differs) == [False, False]


def test_smoke_under_mpiexec(tmp_path):
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this python (pip install mpich mpi4py)")
    flags = ["--iters", "5", "--log-every", "1", "--wandb", "off", "--out", "deep/er"]
    done = subprocess.run([mpiexec, "-n", "2", sys.executable, ROOT / "bench/smoke.py", *flags],
                          cwd=tmp_path, capture_output=True, text=True, timeout=240)
    text, n = done.stdout, r"[0-9.e+]+"
    assert done.returncode == 0, done.stderr
    assert text.count("[node ") == 1 and "all_reduce of rank ids 0..1: 1, expected 1: ok" in text
    assert re.findall(rf"^iter=(\d+) loss={n} sps={n} dt={n} dtf={n} dtb={n}$", text, re.M) == list("12345")
    assert "equal bit for bit" in text and "\nok: this machine trains" in text and len(text.splitlines()) < 50
    table = re.findall(rf"^ +(\d+) +\d+ +({n}) +({n})$", text, re.M)
    assert [int(size) for size, *_ in table] == smoke.SIZES and len(table) == 8
    assert all(algbw == busbw for _, algbw, busbw in table)  # 2 (n - 1) / n is 1 for two ranks
    training, whole = map(float, re.search(r"trains; training (\S+) s, whole run (\S+) s\n$", text).groups())
    assert 0 < training < whole  # no limits: a busy machine is no fault
    out = tmp_path / "deep/er"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["iter"] for r in rows] == [1, 2, 3, 4, 5] and rows[-1]["loss"] < rows[0]["loss"]
    assert all(r["dtf"] <= r["dt"] <= (r["dtf"] + r["dtb"]) * 1.00001 for r in rows)
    assert re.search(r"^the hottest lines.*\n +[\d.]+ s  \w+.*\.py:\d+ \w+$", text, re.M)
    done = subprocess.run([sys.executable, ROOT / "bench/smoke.py", *flags[4:], "--lr=1000", "--iters=30"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "\nNOT ok: " in done.stdout  # its loss is not finite


PROGRAMS = ("collectives", "doctor", "equal_one", "gpu_matrix", "moe_layer", "oracles", "peer_cell", "peers",
            "scaling", "smoke", "speed")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help_and_one_line_for_a_wrong_flag(name, capsys):
    program = importlib.import_module(name)
    words = {"peer_cell": ["W1", "ours"]}.get(name, [])  # missing ones are told first
    for argv, code in ((["--help"], 0), ([*words, "--no-such-flag"], 2)):
        with pytest.raises(SystemExit) as end:
            program.main(argv)
        assert end.value.code == code
    said, errors = capsys.readouterr()
    assert said.startswith(f"usage: {name}.py")
    assert errors.count("\n") == 1 and "--no-such-flag" in errors and f"{name}.py --help" in errors


# -----------------------------------------------------------------------------
# gpu_matrix.py, whose checks need several GPUs, with fewer layouts and steps

@contextlib.contextmanager
def small(steps=2):
    """Fewer layers, layouts and steps, so that each part takes a second."""
    tables = mock.patch.multiple(
        gpu_matrix.matrix, STEPS=2,
        LAYOUTS=[(2, dict(pp=2), "llama", ""), (2, dict(tp=2, ep=2, zero=1), "dropless capacity", "")])
    parts = mock.patch.multiple(
        gpu_matrix, STEPS=steps, SHAPE=dict(gpu_matrix.SHAPE, n_layer=2),
        REPLICATED=(("dropless", dict(zero=3)),), CAPTURED=(("dropless", dict(ep=2)),),
        BY_QUACK=(("llama", dict(zero=1)),), LARGER={})
    few = {name: gpu_matrix.FAMILIES[name] for name in ("llama", "capacity", "dropless")}
    with tables, parts, mock.patch.object(gpu_matrix, "FAMILIES", few):
        yield


def rehearsed(world, *parts):
    said = io.StringIO()
    ranks = mock.patch.multiple(gpu_matrix, launch=lambda **options: world, shutdown=lambda world: None)
    with small(), tracing(), ranks, contextlib.redirect_stdout(said):
        gpu_matrix.main(list(parts))
    return said.getvalue().splitlines()


def test_every_part_runs_on_two_ranks_of_a_cpu():
    """fp32 and bf16 are fp64's function with another dtype."""
    parts = [part for part in gpu_matrix.PARTS if part not in ("fp32", "bf16")]
    lines, others = run_ranks(2, rehearsed, *parts)
    assert others == []
    fp64, replicas, *on_gpus = [line for line in lines if not line.startswith("  ")]  # which say what begins
    assert fp64.startswith("fp64: 3 layouts of 2 ranks equal one rank, worst error ")
    assert replicas.startswith("2 bf16 steps: ") and replicas.endswith("; two runs as well")
    assert [line.split(": left out, ")[0] for line in on_gpus] == parts[2:]


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

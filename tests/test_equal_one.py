"""bench/equal_one.py on the ranks of the pool: equal layouts, planted faults that it names; and
tutorial/plain.py, which computes what train.py computes, on one rank and in its layouts, to 1e-10.
"""
import contextlib
import functools
import inspect
import io
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import balance_loss_of_this_rank, constant, group, nothing, with_faults
from pool import ROOT, run_ranks
from test_layouts import STEPS, reference

sys.path.append(str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import equal_one
import equality

from config import Config
from fast.choose import choose
from interface.command_line import parse
from model import DTYPES
from ops import backend
from parallel import make_mesh
from runtime.launch import World
from tutorial import plain

SHAPE = ["--data=synthetic", "--n-layer=2", "--n-head=2", "--n-embd=16", "--ffn-hidden=24", "--seq-len=8",
         "--vocab-size=100", "--micro-batch=2", "--clip=0.05"]
MOE = ["tiny-moe", *SHAPE, "--n-experts=4"]


def verdict(world, argv):
    out, err = io.StringIO(), io.StringIO()
    ranks = mock.patch.multiple(equal_one, launch=lambda timeout: world, shutdown=lambda world: None)
    with ranks, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = equal_one.main(argv)
        except SystemExit as leaving:
            code = int(leaving.code)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def run(n, argv, *faults):
    """Return rank 0's result on n ranks. The other ranks print nothing, and end with the same code."""
    first, *others = run_ranks(n, with_faults, faults, verdict, argv)
    for other in others:
        assert other == {"code": first["code"], "out": "", "err": ""}
    return first


@pytest.mark.parametrize("argv", [
    [*MOE, "--tp=2", "--ep=2", "--zero=1", "--capacity-factor=0.75", "--top-k=1", "--dtype=bf16",
     "--global-batch=4"],
    ["tiny", *SHAPE, "--pp=2", "--zero=2", "--tied", "--global-batch=4", "--recompute=full"]],
    ids=["moe", "pp"])
def test_equal_layouts(argv):
    result = run(2, argv)
    assert result["code"] == 0, result
    *table, numbers, last = result["out"].splitlines()
    assert table[0].split() == ["parameter", "gradient", "weights", "moments"]
    names = [line.split()[0] for line in table[1:]]
    assert "blocks.1.attn.wq.weight" in names and len(set(names)) == len(names) > 15
    assert max(float(word) for line in table[1:] for word in line.split()[1:]) < 1e-12
    assert numbers.startswith("loss ")
    assert last.startswith("equal: 2 ranks and one process differ by at most ")
    assert last.endswith(" in 3 steps of 4 sequences")


def test_one_process_has_no_axis_of_a_layout():
    axes = {*inspect.signature(make_mesh).parameters} - {"world", "n_experts", "groups"}
    assert axes == {"tp", "pp", "ep", "cp", "shard"} and axes <= equal_one.ONE_PROCESS.keys()


def test_fp64_takes_no_fast_way_on_gpus():
    """Of what fast/choose.py chooses, only the graph is left, and train_steps() makes none."""
    flags = dict(zero=1, window=8, compile=False, n_embd=64, n_head=2, n_kv_head=2, micro_batch=2)
    mesh = make_mesh(World(size=4), groups=False)
    for dtype, is_fast in ("bf16", True), ("fp64", False):
        cfg = Config(**flags, dtype=dtype)
        choice = choose(cfg, mesh, torch.device("cuda"), lambda mesh, axis, device: True)
        assert (choice.peer_copies, choice.flex) == (is_fast, is_fast), dtype
        assert (DTYPES[dtype] in backend.DTYPES) == is_fast, dtype
    _, cfg = equal_one.read_flags(["tiny", "--data=synthetic", "--compile"])
    assert cfg.dtype == "fp64" and not cfg.compile


FAULTS = {  # the layout, the faults, what the verdict names
    "norm weights not summed over tp": (
        ["tiny", *SHAPE, "--tp=2"], [group("stage", "dp")],
        "step 1 grad norm.weight: elements held 2 to 2 times, in 30 of 126 tensors"),
    "balance loss of a tp rank's own tokens": (
        [*MOE, "--tp=2"], [("moe.MoE.balance_loss", balance_loss_of_this_rank)],
        "step 1: 18 of 23 gradients differ: blocks.0.moe.router.weight by"),
    "new weights not sent": (
        ["tiny", *SHAPE, "--zero=1", "--compared-steps=1"], [("ddp.Bucket.after_update", nothing)],
        "rank 0 computes with other weights wte.weight than it owns"),
    "norm counts replicated weights once per rank": (
        ["tiny", *SHAPE, "--tp=2"], [("ddp.Bucket.count_factor", functools.partial(constant, value=1))],
        "those of step 1 are equal, so look at norm, clipping and optimizer"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    argv, faults, named = FAULTS[name]
    result = run(2, argv, *faults)
    last = result["out"].splitlines()[-1]
    assert result["code"] == 1 and last.startswith("NOT EQUAL: 2 ranks and one process: ")
    assert named in last


def test_a_number_that_is_none_is_not_equal():
    assert equal_one.worst([0.0, float("nan"), 1.0]) != equal_one.worst([0.0])
    assert not equal_one.is_small(equal_one.worst([0.0, float("nan"), 1.0]), 1e-10)
    assert "loss differs by nan" in equal_one.first_fault({"loss": float("nan")}, {}, 1e-10)


def test_an_element_that_nobody_owns_is_not_equal():
    seen = {"pieces": [("end w", equality.np.zeros(2), (3,), (0,))]}
    with pytest.raises(AssertionError, match="end w: elements held 0 to 1 times, in 1 of 1 tensors"):
        equality.assemble([seen])


# -----------------------------------------------------------------------------
# tutorial/plain.py

# A small model and a clipped gradient, for plain.py and for train.py
SMALL = dict(C=32, D=8, HIDDEN=48, T=16, B=2, WARMUP=1, CLIP=0.1)
FLAGS = dict(n_embd=32, ffn_hidden=48, seq_len=16, micro_batch=2, warmup=1, clip=0.1, vocab_size=256,
             steps=STEPS, dtype="fp64")


def train_plainly(world, layout):
    """Return plain.train()'s rows, and {name: (weight, gradient)} of this rank, as numpy."""
    if world.size == 1:  # plain.py has its collectives on one rank, too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.multiple(plain, **SMALL), contextlib.redirect_stdout(io.StringIO()):
            rows, weights = plain.train(**layout, steps=STEPS)
    finally:
        torch.set_default_dtype(torch.float32)
    return rows, {name: (p.detach().numpy(), p.grad.numpy()) for name, p in weights.items()}


def share(whole, shape, rank):
    for dim, size in enumerate(shape):
        parts = whole.shape[dim] // size
        if parts > 1:
            return np.split(whole, parts, dim)[rank % parts]
    return whole


@pytest.mark.parametrize("n,layout", [
    (4, dict(tp=2, pp=2)), (4, dict(ep=2, pp=2, experts=8)),
    *(pytest.param(*place, marks=pytest.mark.long) for place in (
        (1, dict()), (1, dict(experts=8)), (4, dict(tp=2)), (4, dict(pp=2)), (4, dict(ep=4, experts=8)),
        (4, dict(ep=2, experts=8))))], ids=str)
def test_plain_equals_train(n, layout):
    stats, want, _ = reference(dict(FLAGS, n_experts=layout.get("experts", 0)), 8, 1)
    names = set()
    for rank, (rows, weights) in enumerate(run_ranks(n, train_plainly, layout)):
        np.testing.assert_allclose(rows, np.array(stats)[:, :2], rtol=1e-10)  # loss, gradient norm
        for name, found in weights.items():
            for key, got in zip((f"end {name}", f"step {STEPS} grad {name}"), found, strict=True):
                expected = share(want[key], got.shape, rank)
                error = np.abs(got - expected).max() / np.abs(want[key]).max()
                assert error <= 1e-10, f"rank {rank}, {key}: {error}"
        names |= weights.keys()
    gradients = f"step {STEPS} grad "
    assert names == {key.removeprefix(gradients) for key in want if key.startswith(gradients)}
    assert stats[0][1] > 2 * SMALL["CLIP"], "clipping must be active"


def test_the_model_and_its_training_are_those_of_tiny():
    cfg = parse(["tiny", "--data=synthetic"])
    of_flags = dict(L="n_layer", H="n_head", G="n_kv_head", C="n_embd", HIDDEN="ffn_hidden", K="top_k",
                    T="seq_len", AUX="aux_coef", LR="lr", WEIGHT_DECAY="weight_decay", CLIP="clip",
                    BETA1="beta1", BETA2="beta2", SEED="seed")
    for name, flag in of_flags.items():
        assert getattr(plain, name) == getattr(cfg, flag), name

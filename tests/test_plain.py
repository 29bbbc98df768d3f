"""tutorial/plain.py computes what train.py computes: on one rank and in its layouts, in fp64, to 1e-10."""
import contextlib
import io
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from test_layouts import STEPS, reference

from interface.command_line import parse
from tutorial import plain

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
    """Return the part of this shape that a rank has. Ranks side by side hold the parts in order."""
    for dim, size in enumerate(shape):
        parts = whole.shape[dim] // size
        if parts > 1:
            return np.split(whole, parts, dim)[rank % parts]
    return whole


@pytest.mark.parametrize("n,layout", [
    (1, dict()), (4, dict(tp=2)), (2, dict(pp=2)), (4, dict(pp=2)), (4, dict(tp=2, pp=2)),
    (1, dict(experts=8)), (4, dict(ep=4, experts=8)), (4, dict(ep=2, pp=2, experts=8)),
    (4, dict(ep=2, experts=8))], ids=str)
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


def what_the_program_prints(world, argv):
    printed = io.StringIO()
    try:
        with mock.patch.multiple(plain, **SMALL), contextlib.redirect_stdout(printed):
            plain.main(argv)
    finally:
        torch.set_default_dtype(torch.float32)
    return printed.getvalue()


def test_a_line_per_step():
    (text,) = run_ranks(1, what_the_program_prints, ["--steps=2"])
    losses = [line.split()[:2] for line in text.splitlines()]
    assert [step for step, _ in losses] == ["step=1/2", "step=2/2"]
    stats, _, _ = reference(dict(FLAGS, n_experts=0), 8, 1)
    assert losses[0][1] == f"loss={stats[0][0]:.10f}"

"""Dropout: where it is and how much, in training only; which masks ranks, stages, micro-batches and steps
draw, and which runs are a CUDA graph. Equal results over dp and under recompute: tests/test_faults.py.
"""
import dataclasses
import hashlib
import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faults import GPT2, LLAMA, PP, TP, planted, sequences
from pool import run_ranks
from test_layouts import compare, run
from test_model import FORMS, WIDE, built, check_against_the_written_out_model, family, randomize

import train
from config import Config
from corpus.samples import Synthetic, micro_batches
from fast.choose import choose
from parallel import make_mesh
from pipeline import generate
from runtime.launch import World

P = 0.3
FACTORS = {"embedding": 1.5, "residual": 1.5, "attention": 2.0}  # stand for the masks: they leave traces
REAL_DROPOUT, REAL_ATTENTION = F.dropout, F.scaled_dot_product_attention


def traced_dropout(x, p, training):
    assert p == P
    return x * FACTORS["residual"] if training else x


def traced_attention(*args, dropout_p, **kwargs):
    return REAL_ATTENTION(*args, **kwargs) * {0.0: 1.0, P: FACTORS["attention"]}[dropout_p]


@pytest.mark.parametrize("name", FORMS)
def test_dropout_is_at_each_of_its_places_in_training_only(name):
    """On the embedding, attention weights and what each half of a block adds: once and with p, forward and
    backward, also under recompute; nowhere in eval mode."""
    cfg = Config(**{**WIDE, **FORMS[name], "dropout": P})
    with mock.patch.object(F, "dropout", traced_dropout), \
            mock.patch.object(F, "scaled_dot_product_attention", traced_attention):
        check_against_the_written_out_model(cfg, lambda place, x: x * FACTORS[place])


@pytest.mark.parametrize("name", ["llama", "gpt2", "softmax"])
def test_generated_text_is_without_dropout(name):
    texts = []
    for p in (0.0, 0.5):
        model, _, _ = built(Config(**{**WIDE, **FORMS[name], "dropout": p}))
        randomize(model)
        texts.append(generate(model.train(), [1, 2, 3], 12, temperature=0))
        assert model.training
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


# -----------------------------------------------------------------------------
# Masks: a mask is a function of the generator's state, which is noted whenever one is drawn

SHAPE = dict(WIDE, n_layer=2, dropout=P, micro_batch=2, vocab_size=60)
MOE = dict(SHAPE, n_experts=4, top_k=2)
STEPS, BATCH = (1, 2), 8


def masks(world, flags):
    """Forward and backward of two steps -> [(step, generator's state as a hash)] of each mask drawn here."""
    from torch.nn.attention.bias import CausalBias  # its import takes longer than torch's
    cfg, drawn = Config(**flags), []
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    step = train.Step(cfg, *train.build(cfg, mesh, cfg.vocab_size, world.device))

    def note(p):
        assert p == P
        drawn.append((number, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()))

    def dropout(x, p, training):
        note(p * training)
        return REAL_DROPOUT(x, p, training)

    def attention(*args, dropout_p, **kwargs):
        note(dropout_p)
        if isinstance(args[-1], CausalBias):  # it would not know the mock
            args = *args[:-1], args[-1]._materialize()
        return REAL_ATTENTION(*args, dropout_p=dropout_p, **kwargs)
    with mock.patch.object(F, "dropout", dropout), \
            mock.patch.object(F, "scaled_dot_product_attention", attention):
        for number in STEPS:
            torch.manual_seed(world.rank)  # what was drawn before must not matter
            step.gradients(micro_batches(cfg, mesh, source, 0, BATCH, world.device), number)
    return drawn


@pytest.mark.parametrize("n,layout", [(2, {}), (4, dict(tp=2)), (4, dict(tp=2, pp=2)), (2, dict(MOE, ep=2)),
                                      (4, dict(tp=2, cp=2))],
                         ids=["dp2", "dp2tp2", "tp2pp2", "moe-ep2", "tp2cp2"])
def test_no_two_masks_are_equal(n, layout):
    """Every rank has its own sequences, rows, heads or layers; a mask depends on no number of ranks but those
    that split its sequence or its layers."""
    flags = {**SHAPE, **layout}
    ranks = run_ranks(n, masks, flags)
    stages, tp, cp = (layout.get(axis, 1) for axis in ("pp", "tp", "cp"))
    micro = BATCH // 2 // (n // stages // tp // cp)
    # Each block draws a mask for each of its two residual branches and one for attention. Under cp, attention
    # draws one for each of its two chunks. The first stage also draws one for the embedding.
    places = [(2 + min(cp, 2)) * SHAPE["n_layer"] // stages + (rank < n // stages) for rank in range(n)]
    assert [len(drawn) for drawn in ranks] == [len(STEPS) * micro * each for each in places]
    drawn = [mask for rank in ranks for mask in rank]
    assert len({state for _, state in drawn}) == len(drawn)
    if (stages, tp, cp) == (1, 1, 1):
        alone, = run_ranks(1, masks, {**flags, "ep": 1})  # all micro-batches, all experts
        assert sorted(drawn) == sorted(alone)
    again = run_ranks(n, masks, {**flags, "recompute": "full"})  # also in the order of 1F1B
    for kept, twice in zip(ranks, again, strict=True):
        assert set(kept) == set(twice) and len(twice) > 1.5 * len(kept), "the same masks, drawn again"


def seeds(world, seed, steps, n):
    """Return the seeds that train.Step gives its generator, without a model.

    They are {(seed, rank, step, number of the chunk and micro-batch): the generator's seed}.
    """
    out, drawn, cfg = {}, [], Config(dropout=P, seed=seed, pp_chunks=2)
    model = SimpleNamespace(mesh=make_mesh(world, tp=2, pp=2, groups=False, cp=2), blocks={})
    step = train.Step(cfg, model, mock.Mock(), mock.Mock())

    def no_forward(model, data_parallel, batches, tokens, scale, seeds, set_seed):
        for chunk, i in itertools.product(range(2), range(len(batches))):
            set_seed(seeds[chunk][i])
    with mock.patch.object(train, "forward_backward", no_forward):
        for number in steps:
            step.gradients([None] * n, number, drawn.append)
            out.update({(seed, world.rank, number, i): drawn[i] for i in range(2 * n)})
            assert len(drawn) == 2 * n, "one seed for each chunk and micro-batch"
            drawn.clear()
    return out


def test_no_two_seeds_are_equal():
    """16 ranks, two runs' seeds, steps of three micro-batches; numbers whose digits could run together."""
    found = {}
    for rank, seed in itertools.product(range(16), (1, 11)):
        found.update(seeds(World(rank=rank, size=16), seed, [*range(1, 30), 111, 1111], 3))
    assert len(found) == 16 * 2 * 31 * 2 * 3 and len(set(found.values())) == len(found)


def one_number_for_tp_and_cp(original, cfg, mesh, *args):
    """dropout_seeds that add the ranks of tp and cp up: (0, 1) and (1, 0) are the same."""
    tp = dataclasses.replace(mesh.tp, size=1)
    return original(cfg, dataclasses.replace(mesh, tp=tp), *args)


def test_equal_seeds_of_ranks_of_one_sequence_are_detected():
    with planted("pipeline.dropout_seeds", one_number_for_tp_and_cp):
        found = {}
        for rank in range(4):
            found.update(seeds(World(rank=rank, size=8), 1, [1], 1))
    assert len(set(found.values())) < len(found)


@family
def test_dropout_is_seeded_by_step_and_micro_batch(cfg):
    cfg = dataclasses.replace(cfg, dropout=0.3)
    batch = Synthetic(cfg.vocab_size, cfg.seq_len, 1).batch(0, 2)
    losses = []
    for step, micro in [(1, 1), (1, 1), (2, 1), (1, 2)]:
        model, data_parallel, opt = built(cfg)
        torch.manual_seed(len(losses))  # whatever was drawn before must not matter
        stats, _ = train.Step(cfg, model, data_parallel, opt)([batch] * micro, step)
        losses.append(stats.loss.item())
    assert losses[0] == losses[1] and len(set(losses)) == 3, "the second micro-batch has a mask of its own"


# -----------------------------------------------------------------------------
# Ranks and recomputation

@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_over_dp_equals_one_rank(family):
    base = dict(LLAMA if family == "llama" else GPT2, dropout=0.2)
    compare(base, 2, 8)
    compare(base, 2, 8, zero=1)


def assert_same_bits(results, others):
    for seen, other in zip(results, others, strict=True):
        assert seen["stats"] == other["stats"], "losses and norms"
        for (name, a, *_), (_, b, *_) in zip(seen["pieces"], other["pieces"], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("n,layout", [TP, PP, (4, dict(tp=2, pp=2, zero=1))], ids=str)
def test_recompute_repeats_the_dropout(n, layout):
    """Every gradient and moment has the same bits with recomputation and without; dropout has an effect."""
    flags, batch = dict(LLAMA, **layout, dropout=0.2), sequences(n, layout)
    stored = run_ranks(n, run, flags, batch)
    for what in ("full", "selective"):
        assert_same_bits(run_ranks(n, run, dict(flags, recompute=what), batch), stored)
    if n == 2:
        without = run_ranks(n, run, dict(flags, dropout=0.0), batch)
        assert without[0]["stats"][0][0] != stored[0]["stats"][0][0]


# -----------------------------------------------------------------------------
# Which runs are a CUDA graph. Masks under a graph: tests/test_graph.py

STATIC = dict(n_layer=2, n_head=2, n_embd=64, ffn_hidden=64, vocab_size=100, dtype="bf16")


@pytest.mark.parametrize("flags", [{}, dict(n_experts=4, ep=2, zero=1),
                                   dict(n_experts=4, capacity_factor=1.0)], ids=["dense", "ep2", "capacity"])
def test_dropout_and_recompute_each_have_a_cuda_graph_but_not_both(flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # it asks the driver
    cfg = Config(**{**STATIC, **flags})
    mesh = make_mesh(World(rank=0, size=2), ep=cfg.ep, groups=False)

    def graph(cfg, mesh=mesh, device="cuda:0"):
        choice = choose(cfg, mesh, torch.device(device), reach=lambda *_: True)
        assert choice.graph or not choice.symm_mem
        return choice.graph
    for change in ({}, dict(dropout=0.5), dict(recompute="full"), dict(global_batch=64)):
        assert graph(dataclasses.replace(cfg, **change)), change
    for change in (dict(dropout=1e-6, recompute="full"), dict(timers=True), dict(cuda_graph=False)):
        assert not graph(dataclasses.replace(cfg, **change)), change
    assert not graph(cfg, device="cpu") and (cfg.ep > 1 or not graph(cfg, make_mesh(
        World(rank=0, size=2), pp=2, groups=False)))

"""Every layout equals one rank: train.py's own model, step and optimizer, fp64, three steps, clipping active.

Each rank returns the pieces it owns. Every element of a tensor must be in exactly one rank's piece, and all
numbers must equal one rank's to 1e-10: losses, gradient norms, every gradient of every step, every parameter
and moment at the end; relative to the tensor's largest element, but for key biases: see bench/equality.py.
"""
import dataclasses
import sys

import numpy as np
import pytest
import torch
from pool import ROOT, run_ranks
from shared import Masked

sys.path.append(str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import equality
from equality import assemble, capacity_ranks

from config import Config
from corpus import masked
from corpus.samples import Synthetic

LLAMA = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=24, vocab_size=100, seq_len=8,
             norm="rms", mlp="swiglu", pos="rope", bias=False, tied=False, dtype="fp64", clip=0.05, lr=1e-2,
             warmup=0, steps=10, weight_decay=0.1)
GPT2 = dict(LLAMA, n_kv_head=4, norm="layer", mlp="gelu", pos="learned", bias=True, tied=True)
MOE = dict(LLAMA, n_experts=8, capacity_factor=0.0, top_k=2, aux_coef=0.02, z_coef=1e-3)
BERT = dict(GPT2, objective="mlm", seq_len=20)  # 3 tokens of a sequence are masked
CAPACITY = dict(MOE, capacity_factor=0.75, top_k=1)
SIGMOID = dict(MOE, router="sigmoid", router_bias_rate=0.01, n_shared_experts=1, mlp="gelu", bias=True)
STEPS = 3


def mask_synthetic(vocab_size, seq_len, seed):
    """Synthetic samples for --objective mlm; the last symbol of the vocabulary is [MASK]."""
    return masked.Masked(Synthetic(vocab_size - 1, seq_len, seed), seed)


def run(world, flags, batch, chunks=1, cp=1, kind=Synthetic):
    """Train STEPS steps on synthetic tokens -> what equality.train_steps returns of this rank."""
    cfg = Config(**flags, global_batch=batch)
    kind = mask_synthetic if cfg.objective == "mlm" else kind
    source = kind(cfg.vocab_size, cfg.seq_len, cfg.seed)
    return equality.train_steps(world, cfg, cfg.vocab_size, source, batch, STEPS, chunks=chunks, cp=cp)


references = {}


def reference(flags, batch, chunks, cp=1, kind=Synthetic):
    """Return (stats of each step, {name: full array}, expert statistics) of one rank.

    Equal arguments are computed once.
    """
    key = (tuple(sorted(flags.items())), batch, chunks, cp, kind)
    if key not in references:
        (seen,) = run_ranks(1, run, flags, batch, chunks, cp, kind)
        references[key] = seen["stats"], assemble([seen]), seen.get("experts")
    return references[key]


def compare(base, n, batch, kind=Synthetic, **layout):
    """Run the model `base` over a layout of n ranks and compare everything it computes with one rank."""
    stats, want, experts = reference(dict(base), batch, *capacity_ranks(base, layout), kind)
    results = run_ranks(n, run, dict(base, **layout), batch, 1, 1, kind)
    for seen in results:
        for name, error in equality.stats_errors(seen, {"stats": stats}).items():
            assert error <= 1e-10, f"{name}: {error}"
        # Softmax ignores a shift, so the gradient of the key bias is zero up to rounding. How many of its
        # elements are exactly zero may differ.
        zeros = np.array(seen["stats"])[:, 2] - np.array(stats)[:, 2]
        assert np.abs(zeros).max() <= (64 if base["bias"] else 0), "zero gradients"
        assert seen["stats"] == results[0]["stats"]  # equal bits on every rank: all take the same decisions
    for layer, row in (experts or {}).items():  # load, dropped, aux, z, entropy: as logged, on every rank
        assert not base["capacity_factor"] or row["dropped"] > 0, "nothing was dropped"
        for seen in results:
            for key, value in row.items():
                np.testing.assert_allclose(seen["experts"][layer][key], value, rtol=1e-10,
                                           err_msg=f"layer {layer} {key}")
    got = assemble(results)
    for name, error in equality.errors(got, want, base).items():
        assert error <= 1e-10, f"{name}: {error}"
    equality.check_replicas(results, got)
    assert stats[0][1] > 2 * base["clip"], "clipping must be active"


LAYOUTS = [  # ranks, sequences per step, layout; micro-batch 2
    (2, 4, dict()), (4, 16, dict()), (2, 8, dict(zero=1)), (4, 8, dict(zero=1)),
    (2, 2, dict(tp=2)), (4, 4, dict(tp=4)), (4, 8, dict(tp=2)), (4, 8, dict(tp=2, zero=1)),
    (2, 2, dict(pp=2)), (2, 8, dict(pp=2, zero=1)), (4, 12, dict(pp=4)), (4, 8, dict(pp=2, zero=1)),
    (4, 6, dict(tp=2, pp=2)), (8, 12, dict(tp=2, pp=2)), (8, 12, dict(tp=2, pp=2, zero=1)),
    (8, 8, dict(tp=4, zero=1)), (4, 8, dict(pp=2, zero=2)), (2, 8, dict(zero=3)), (4, 8, dict(tp=2, zero=3)),
    (2, 6, dict(pp=2, pp_chunks=2)), (8, 16, dict(tp=2, pp=2, pp_chunks=2, zero=1)),
]


def on_families(layouts, first, second):
    """Return parameters (family, ranks, sequences, layout). make long has most of those on 8 ranks."""
    return [pytest.param(family, *row, marks=marks(family == first, row[0], row[2]),
                         id=f"{row}-{family}".replace(" ", ""))
            for row in layouts for family in (first, second)]


def marks(is_first, n, layout):
    """Return the marks of a layout. make test has those on 8 ranks that cut in the most ways.

    Layouts on 4 ranks have the same axes in pairs.
    """
    return [] if n < 8 or is_first and len(layout) >= 4 else [pytest.mark.long]


@pytest.mark.parametrize("family,n,batch,layout", on_families(LAYOUTS, "llama", "gpt2"))
def test_layout_equals_one_rank(family, n, batch, layout):
    base = dict(LLAMA if family == "llama" else GPT2, micro_batch=2)
    compare(base, n, batch, **layout)


BERT_LAYOUTS = [("bert", 4, dict(tp=2, zero=1)), ("bert", 2, dict(pp=2)), ("bert", 4, dict(tp=2, pp=2)),
                ("bert", 2, dict(zero=2)), ("bert", 4, dict(tp=2, zero=3)),
                ("bert", 4, dict(pp=2, pp_chunks=2, zero=1)), ("llama", 2, dict(tp=2)),
                ("moe", 4, dict(tp=2, ep=2)), ("moe", 2, dict(ep=2, zero=1, recompute="full")),
                # Sequences of 20 tokens have segments of 5; a rank has up to 3 masked tokens of each sequence
                ("bert", 2, dict(cp=2)), ("bert", 4, dict(cp=2, tp=2, zero=3)),
                ("llama", 4, dict(cp=2, pp=2)),
                ("moe", 4, dict(cp=2, ep=4, zero=1, recompute="full")),
                ("bert", 2, dict(cp=2, recompute="selective"))]


# `make long` has those that cut in one way.
@pytest.mark.parametrize("family,n,layout", [
    pytest.param(*row, marks=[] if len(row[2]) > 1 else [pytest.mark.long]) for row in BERT_LAYOUTS],
    ids=lambda x: str(x).replace(" ", ""))
def test_masked_language_model_layout_equals_one_rank(family, n, layout):
    base = dict(bert=BERT, llama=dict(LLAMA, objective="mlm", seq_len=20), moe={**MOE, **BERT})[family]
    compare(dict(base, micro_batch=2), n, 8, **layout)


# Sequences of 8 tokens have segments of 2 or, over 4 ranks, of 1. These layouts combine cp with tp, pp, zero
# and dp.
CP_LAYOUTS = [("llama", 2, 4, dict(cp=2)), ("gpt2", 4, 4, dict(cp=4)), ("gpt2", 4, 4, dict(cp=2, tp=2)),
              ("llama", 4, 8, dict(cp=2, zero=1)), ("gpt2", 4, 8, dict(cp=2, pp=2)),
              ("llama", 8, 4, dict(cp=2, tp=2, pp=2, zero=1)), ("llama", 4, 8, dict(cp=2, recompute="full")),
              ("dropless", 4, 8, dict(cp=2, ep=4)), ("capacity", 4, 8, dict(cp=2, ep=2, zero=1)),
              ("capacity", 8, 4, dict(cp=2, tp=2, pp=2, ep=4, zero=1)), ("dropless", 4, 4, dict(cp=4, ep=2)),
              ("gpt2", 4, 8, dict(cp=2, zero=2)), ("dropless", 4, 8, dict(cp=2, ep=2, zero=3)),
              ("llama", 8, 6, dict(cp=2, tp=2, pp=2, pp_chunks=2))]


@pytest.mark.parametrize("family,n,batch,layout", [
    pytest.param(*row, marks=marks(row[0] != "llama", row[1], row[3])) for row in CP_LAYOUTS],
    ids=lambda x: str(x).replace(" ", ""))
def test_context_parallel_layout_equals_one_rank(family, n, batch, layout):
    base = dict(llama=LLAMA, gpt2=GPT2, dropless=MOE, capacity=CAPACITY)[family]
    compare(dict(base, micro_batch=2), n, batch, **layout)


MOE_LAYOUTS = [
    (2, 4, dict(ep=1)), (2, 4, dict(ep=2)), (4, 8, dict(ep=2, zero=1)), (4, 8, dict(ep=4)),
    (2, 4, dict(tp=2)), (2, 4, dict(tp=2, ep=2, zero=1)), (4, 8, dict(tp=2, ep=2)),
    (4, 8, dict(tp=2, ep=4, zero=1)), (2, 6, dict(pp=2)),
    (4, 8, dict(pp=2, ep=2, zero=1)), (4, 6, dict(pp=2, tp=2, ep=2)), (8, 12, dict(pp=2, tp=2, ep=4, zero=1)),
    (2, 8, dict(zero=2)), (2, 8, dict(zero=3)), (4, 8, dict(tp=2, ep=2, zero=3)),
    (4, 8, dict(pp=2, pp_chunks=2, ep=2, zero=1)),
]


@pytest.mark.parametrize("family,n,batch,layout", on_families(MOE_LAYOUTS, "dropless", "capacity"))
def test_moe_layout_equals_one_rank(family, n, batch, layout):
    compare(dict(MOE if family == "dropless" else CAPACITY, micro_batch=2), n, batch, **layout)


# Every rank and every micro-batch has a different number of trained tokens
MASKED_LAYOUTS = [
    ("llama", 2, 8, dict()), ("gpt2", 2, 4, dict(tp=2)), ("llama", 2, 8, dict(pp=2)),
    ("gpt2", 2, 4, dict(cp=2)), ("dropless", 2, 8, dict(ep=2)), ("llama", 2, 8, dict(zero=2)),
    ("dropless", 4, 8, dict(tp=2, ep=2, zero=3)), ("gpt2", 4, 8, dict(cp=2, pp=2, zero=1))]


@pytest.mark.parametrize("family,n,batch,layout", MASKED_LAYOUTS, ids=lambda x: str(x).replace(" ", ""))
def test_unequal_numbers_of_trained_tokens_equal_one_rank(family, n, batch, layout):
    base = dict(llama=LLAMA, gpt2=GPT2, dropless=MOE)[family]
    compare(dict(base, micro_batch=2), n, batch, Masked, **layout)


def test_moe_variants_equal_one_rank():
    compare(dict(CAPACITY, drop_policy="position", top_k=2, micro_batch=2), 4, 8, tp=2, ep=2, zero=1)
    compare(dict(SIGMOID, micro_batch=2), 4, 8, tp=2, ep=4)
    compare(dict(SIGMOID, micro_batch=2), 4, 8, pp=2, ep=2, zero=1)
    compare(dict(MOE, router="softmax-topk", micro_batch=2), 4, 8, ep=4, recompute="full")
    compare(dict(SIGMOID, micro_batch=2), 4, 8, tp=2, ep=4, recompute="selective")
    compare(dict(CAPACITY, micro_batch=2), 4, 8, pp=2, tp=2, ep=2, recompute="full")


@pytest.mark.long
@pytest.mark.parametrize("base", [MOE, CAPACITY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("layout", [dict(ep=8), dict(ep=8, zero=1), dict(tp=2, ep=8),
                                    dict(tp=4, ep=8, zero=1)], ids=str)
def test_moe_on_eight_ranks_equals_one_rank(base, layout):
    compare(dict(base, micro_batch=2), 8, 16, **layout)


def test_pp_layers_and_recompute_equal_one_rank():
    compare(dict(LLAMA, micro_batch=2), 4, 8, pp=2, pp_layers="1,3", recompute="full", zero=1)
    compare(dict(GPT2, micro_batch=2), 4, 8, tp=2, recompute="full")
    six = dict(GPT2, n_layer=6, micro_batch=2)
    compare(six, 2, 8, pp=2, pp_chunks=2, pp_layers="1,2,1,2", recompute="full")
    compare(six, 3, 8, pp=3, pp_chunks=2)


def test_one_kv_head_under_tp_equals_one_rank():
    compare(dict(LLAMA, n_kv_head=1, micro_batch=2), 2, 4, tp=2, zero=1)
    compare(dict(LLAMA, n_kv_head=1, micro_batch=2), 4, 4, tp=4)


def test_layout_flags_are_fields_of_the_config_and_the_default_dtype_is_fp32():
    assert {"tp", "pp", "zero", "pp_layers", "recompute"} <= {f.name for f in dataclasses.fields(Config)}
    assert torch.get_default_dtype() == torch.float32

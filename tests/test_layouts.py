"""Every layout equals one rank: train.py's own model, step and optimizer, fp64, three steps, clipping active.

Each rank returns the pieces it owns. Every element of a tensor must be in exactly one rank's piece, and all
numbers must equal one rank's to 1e-10: losses, gradient norms, every gradient of every step, every parameter
and moment at the end; relative to the tensor's largest element, but for key biases: see bench/equality.py.
"""
import sys

import numpy as np
import pytest
import torch
from pool import ROOT, run_ranks
from shared import Documents, Masked, Padded

sys.path.append(str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import equality
from equality import assemble, capacity_ranks

from config import Config
from corpus import masked
from corpus.samples import Synthetic

STEPS = 3

# -----------------------------------------------------------------------------
# Models

LLAMA = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=24, vocab_size=100, seq_len=8,
             norm="rms", mlp="swiglu", pos="rope", bias=False, tied=False, dtype="fp64", clip=0.05, lr=1e-2,
             warmup=0, steps=10, weight_decay=0.1)
GPT2 = dict(LLAMA, n_kv_head=4, norm="layer", mlp="gelu", pos="learned", bias=True, tied=True)
BERT = dict(GPT2, objective="mlm", seq_len=20)  # 3 tokens of a sequence are masked
EXPERTS = dict(n_experts=8, capacity_factor=0.0, top_k=2, aux_coef=0.02, z_coef=1e-3)
MOE = dict(LLAMA, **EXPERTS)
CAPACITY = dict(MOE, capacity_factor=0.75, top_k=1)
SIGMOID = dict(MOE, router="sigmoid", router_bias_rate=0.01, n_shared_experts=1, mlp="gelu", bias=True)
QWEN3 = dict(LLAMA, head_dim=6, qk_norm="head")
OLMO2 = dict(LLAMA, qk_norm="all", norm_place="after")
WINDOWS = dict(LLAMA, window=3, full_every=2, no_rope_every=2)
NANOCHAT = dict(LLAMA, window=3, qk_norm="head", mlp="relu2", logit_softcap=0.5)
GEMMA3 = dict(LLAMA, norm="rms1p", mlp="geglu", norm_place="both", qk_norm="head", embed_scale=True,
              window=3, full_every=2, window_rope_base=20.0, tied=True)

FAMILIES = {
    "llama": LLAMA, "gpt2": GPT2, "bert": BERT, "dropless": MOE, "capacity": CAPACITY, "sigmoid": SIGMOID,
    "one-kv-head": dict(LLAMA, n_kv_head=1),
    "position": dict(CAPACITY, drop_policy="position", top_k=2),
    "softmax-topk": dict(MOE, router="softmax-topk"),
    # The flags of today's models
    "qwen3": QWEN3, "olmo2": OLMO2, "windows": WINDOWS, "nanochat": NANOCHAT, "gemma3": GEMMA3,
    "qwen2": dict(LLAMA, qkv_bias=True),
    "llama3": dict(LLAMA, rope_scaling=(4.0, 0.5, 2.0, 8.0)),
    "qwen3-experts": dict(QWEN3, **EXPERTS),
    "olmo2-experts": dict(OLMO2, **EXPERTS, window=3),
    # Masked language models
    "llama-mlm": dict(LLAMA, objective="mlm", seq_len=20),
    "experts-mlm": dict(BERT, **EXPERTS),
    # Each rank and each micro-batch has another number of trained tokens
    "llama-masked": LLAMA, "gpt2-masked": GPT2, "dropless-masked": MOE,
    # Each document attends to itself alone
    "llama-documents": LLAMA, "gpt2-documents": GPT2, "windows-documents": WINDOWS,
    "nanochat-documents": NANOCHAT, "experts-documents": MOE,
    # Each window ends with padding, which takes no part in routing
    "dropless-padded": MOE, "capacity-padded": CAPACITY,
    "llama-dropout": dict(LLAMA, dropout=0.2), "gpt2-dropout": dict(GPT2, dropout=0.2)}
# The learning rate of Muon's matrices differs from AdamW's, so that a confusion shows. Under tp 2, the halves
# of w1, w2 and w3 are long.
FAMILIES.update({f"muon-{name}": dict(FAMILIES[name], optimizer="muon", momentum=0.9, muon_lr_factor=1.5)
                 for name in ("llama", "gpt2", "dropless", "bert")})
FAMILIES["muon-llama"]["ffn_hidden"] = 48


def source_of(family):
    """Return the class of the samples, which the last word of a family's name tells."""
    sources = {"masked": Masked, "documents": Documents, "padded": Padded}
    return sources.get(family.split("-")[-1], Synthetic)


def flags_of(family, layout=None):
    """Return a family's flags for one rank: two blocks, or as many as the stages of the layout need."""
    layout = layout or {}
    stages = layout.get("pp", 1) * layout.get("pp_chunks", 1)
    return dict(FAMILIES[family], micro_batch=2, n_layer=layout.get("n_layer", 4 if stages > 2 else 2))


def sequences(n, layout):
    """Return the sequences of a step: two micro-batches on each replica; one pipeline alone has four."""
    stages = layout.get("pp", 1)
    replicas = n // stages // layout.get("tp", 1) // layout.get("cp", 1)
    return max(4 * replicas, 8 if stages > 1 else 4)


# -----------------------------------------------------------------------------
# Comparisons

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
    """Return (stats of each step, {name: full array}, expert statistics) of one rank, with Muon or LoRA those
    of plain_muon.py. Equal arguments are computed once.
    """
    key = (tuple(sorted(flags.items())), batch, chunks, cp, kind)
    if key not in references and (flags.get("optimizer") == "muon" or flags.get("lora")):
        import plain_muon  # which imports this module
        kind = mask_synthetic if flags.get("objective") == "mlm" else kind
        references[key] = plain_muon.reference(flags, batch, kind)
    elif key not in references:
        (seen,) = run_ranks(1, run, flags, batch, chunks, cp, kind)
        references[key] = seen["stats"], assemble([seen]), seen.get("experts")
    return references[key]


def check(base, results, want):
    """Assert that what all ranks have seen is what one rank has, as reference() returns it."""
    stats, arrays, experts = want
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
    for name, error in equality.errors(got, arrays, base).items():
        assert error <= 1e-10, f"{name}: {error}"
    equality.check_replicas(results, got)
    assert stats[0][1] > 2 * base["clip"], "clipping must be active"


def compare(base, n, batch, kind=Synthetic, **layout):
    """Run the model `base` over a layout of n ranks and compare everything it computes with one rank."""
    want = reference(dict(base), batch, *capacity_ranks(base, layout), kind)
    check(base, run_ranks(n, run, dict(base, **layout), batch, 1, 1, kind), want)


# -----------------------------------------------------------------------------
# The table

# Ranks, layout, families of make test, further families of make long. Those of Muon are wherever the family
# is that they are made of.
LAYOUTS = [
    (2, dict(), "llama llama-masked", "gpt2 dropless capacity llama-dropout gpt2-dropout"),
    (4, dict(), "", "llama gpt2"),
    (2, dict(zero=1), "llama muon-llama", "gpt2 llama-dropout gpt2-dropout"),
    (2, dict(zero=2), "llama", "gpt2 bert dropless capacity llama-masked"),
    (2, dict(zero=3), "dropless qwen3",
     "gemma3 llama gpt2 capacity qwen2 windows llama3 llama-documents"),
    (4, dict(zero=1), "", "llama gpt2"),
    (2, dict(recompute="full"), "llama-dropout", ""),
    (2, dict(recompute="selective"), "", "llama-dropout"),
    (2, dict(zero=2, recompute="full"), "gemma3", ""),
    # Tensor parallelism; over four ranks two of them share a key head
    (2, dict(tp=2), "llama gpt2-masked dropless capacity olmo2 muon-llama",
     "gpt2 llama-mlm llama-documents"),
    (4, dict(tp=4), "qwen2 gpt2", "one-kv-head llama qwen3 olmo2 nanochat"),
    (4, dict(tp=2), "", "llama gpt2"),
    (4, dict(tp=2, zero=1), "bert muon-llama", "llama gpt2"),
    (2, dict(tp=2, zero=1), "one-kv-head", ""),
    (2, dict(tp=2, recompute="selective"), "windows", "qwen3 olmo2 llama-documents"),
    (4, dict(tp=4, recompute="selective"), "", "gemma3"),
    (4, dict(tp=2, recompute="full"), "gpt2", ""),
    (4, dict(tp=2, zero=3), "llama", "nanochat gpt2 bert olmo2 llama-documents"),
    (8, dict(tp=4, zero=1), "", "llama gpt2"),
    (8, dict(tp=4, zero=3, recompute="full"), "", "one-kv-head"),
    # The pipeline
    (2, dict(pp=2), "llama gpt2", "bert dropless capacity llama-masked windows"),
    (2, dict(pp=2, zero=1), "windows", "llama gpt2 windows-documents"),
    (4, dict(pp=2, zero=1), "gpt2", "llama"),
    (4, dict(pp=2, zero=2), "llama", "gpt2"),
    (4, dict(pp=4), "gpt2", "llama"),
    (4, dict(pp=2), "llama", "gpt2"),
    (4, dict(tp=2, pp=2), "gpt2-documents", "llama gpt2 bert olmo2 llama3 gemma3 nanochat qwen2"),
    (2, dict(pp=2, pp_chunks=2), "llama muon-gpt2", "gpt2"),
    (2, dict(pp=2, pp_chunks=2, batch=6), "", "llama gpt2 llama-documents"),  # a group that is not whole
    (4, dict(pp=2, pp_chunks=2, zero=1), "", "bert"),
    (4, dict(pp=2, n_layer=4, pp_layers="1,3", recompute="full", zero=1), "", "llama"),
    (2, dict(pp=2, n_layer=6, pp_chunks=2, pp_layers="1,2,1,2", recompute="full"), "gpt2", ""),
    (3, dict(pp=3, n_layer=6, pp_chunks=2), "", "gpt2"),
    (8, dict(tp=2, pp=2), "", "llama gpt2"),
    (8, dict(tp=2, pp=2, zero=1), "", "llama gpt2"),
    (8, dict(tp=2, pp=2, pp_chunks=2, zero=1), "", "llama gpt2"),
    # Context parallelism: sequences of 8 tokens have segments of 2 or, over 4 ranks, of 1
    (2, dict(cp=2), "llama bert", "gpt2-masked llama3 gemma3"),
    (4, dict(cp=4), "windows", "gpt2 llama-documents windows-documents"),
    (4, dict(cp=2, tp=2), "windows-documents", "gpt2 qwen3 nanochat gpt2-documents nanochat-documents"),
    (4, dict(cp=2, tp=2, zero=3), "", "bert"),
    (4, dict(cp=2, tp=2, recompute="full"), "", "olmo2"),
    (4, dict(cp=2, zero=1), "", "llama llama-documents"),
    (4, dict(cp=2, zero=2), "gpt2", "muon-bert gpt2-documents"),
    (4, dict(cp=2, pp=2), "llama-documents", "gpt2 llama-mlm"),
    (4, dict(cp=2, pp=2, zero=1), "", "gpt2-masked"),
    (4, dict(cp=2, pp=2, recompute="full"), "", "windows windows-documents"),
    (4, dict(cp=2, recompute="full"), "", "llama"),
    (2, dict(cp=2, recompute="selective"), "bert", ""),
    (8, dict(cp=2, tp=2, pp=2, zero=1), "", "llama"),
    (8, dict(cp=2, tp=2, pp=2, pp_chunks=2, batch=6), "", "llama"),
    # Experts
    (2, dict(ep=2), "dropless capacity sigmoid muon-dropless", "dropless-masked"),
    (2, dict(tp=2, ep=2, zero=1), "capacity", "dropless"),
    (4, dict(ep=2, zero=1), "", "dropless capacity"),
    (4, dict(ep=4), "capacity-padded", "capacity dropless"),
    (2, dict(ep=2, zero=1, recompute="full"), "experts-mlm", ""),
    (4, dict(ep=4, recompute="full"), "softmax-topk", ""),
    (4, dict(tp=2, ep=2), "dropless-padded",
     "olmo2-experts dropless capacity qwen3-experts experts-mlm experts-documents"),
    (4, dict(tp=4, ep=2), "", "olmo2-experts"),
    (4, dict(tp=2, ep=2, zero=1), "position", ""),
    (4, dict(tp=2, ep=4), "", "sigmoid"),
    (4, dict(tp=2, ep=4, recompute="selective"), "sigmoid", ""),
    (4, dict(tp=2, ep=4, zero=1), "", "dropless capacity"),
    (4, dict(tp=2, ep=2, zero=3), "capacity", "muon-dropless dropless dropless-masked"),
    (4, dict(pp=2, ep=2, zero=1), "", "dropless capacity sigmoid"),
    (4, dict(pp=2, tp=2, ep=2), "", "dropless capacity"),
    (4, dict(pp=2, tp=2, ep=2, recompute="full"), "", "capacity"),
    (4, dict(pp=2, ep=2, recompute="selective"), "", "olmo2-experts experts-documents"),
    (4, dict(pp=2, ep=2, recompute="full"), "", "dropless-padded"),
    (4, dict(pp=2, pp_chunks=2, ep=2, zero=1), "dropless", "capacity"),
    (4, dict(cp=2, ep=4), "", "dropless"),
    (4, dict(cp=4, ep=2), "dropless", ""),
    (4, dict(cp=2, ep=2, zero=1), "", "capacity"),
    (4, dict(cp=2, ep=2, zero=3), "", "dropless"),
    (4, dict(cp=2, ep=4, zero=1, recompute="full"), "olmo2-experts",
     "experts-mlm experts-documents dropless-padded"),
    (8, dict(pp=2, tp=2, ep=4, zero=1), "", "dropless capacity"),
    (8, dict(cp=2, tp=2, pp=2, ep=4, zero=1), "capacity", ""),
    (8, dict(ep=8), "", "dropless capacity"), (8, dict(ep=8, zero=1), "", "dropless capacity"),
    (8, dict(tp=2, ep=8), "", "dropless capacity"), (8, dict(tp=4, ep=8, zero=1), "", "dropless capacity"),
    (8, dict(tp=2, ep=2, zero=3), "", "dropless"),
    (8, dict(ep=4, zero=3, recompute="full"), "", "capacity"),
    # --shard: groups of neighbours share, and the groups are replicas of each other
    (2, dict(zero=3, shard=1), "", "llama"),
    (4, dict(zero=1, shard=2), "llama", ""), (4, dict(zero=2, shard=2), "", "llama"),
    (4, dict(zero=3, shard=2), "", "gpt2"), (4, dict(zero=3, shard=1), "", "llama"),
    (4, dict(tp=2, zero=1, shard=1), "", "gpt2"), (4, dict(cp=2, zero=2, shard=2), "", "llama"),
    (4, dict(pp=2, zero=1, shard=1), "", "gpt2"), (8, dict(pp=2, zero=1, shard=2), "", "gpt2"),
    (8, dict(pp=2, zero=2, shard=2), "", "gpt2"), (8, dict(pp=2, pp_chunks=2, zero=1, shard=2), "", "llama"),
    (8, dict(tp=2, cp=2, zero=3, shard=1), "", "llama"), (8, dict(cp=2, zero=3, shard=4), "", "llama"),
    (8, dict(tp=2, zero=3, shard=2), "", "llama"), (8, dict(tp=2, zero=2, shard=2), "", "llama"),
    (4, dict(ep=2, zero=1, shard=2), "", "dropless"), (4, dict(ep=4, zero=2, shard=2), "dropless", ""),
    (4, dict(tp=2, ep=2, zero=3, shard=1), "", "capacity"), (8, dict(ep=2, zero=2, shard=4), "", "sigmoid"),
    (8, dict(tp=2, ep=2, zero=3, shard=2), "", "dropless"),
    (8, dict(cp=2, ep=4, zero=1, shard=2), "", "capacity"),
    (4, dict(ep=2, zero=2, shard=2), "", "dropless"),
    (8, dict(ep=2, zero=3, shard=2, recompute="full"), "", "dropless")]


def cases():
    """Return the table's (family, ranks, sequences, layout, whether make test has it)."""
    found = []
    for n, layout, short, more in LAYOUTS:
        muons = [f"muon-{family}" for family in (short + " " + more).split() if f"muon-{family}" in FAMILIES]
        further = sorted({*more.split(), *muons} - {*short.split()})
        flags = {flag: value for flag, value in layout.items() if flag != "batch"}
        batch = layout.get("batch", sequences(n, layout))
        found += [(family, n, batch, flags, True) for family in short.split()]
        found += [(family, n, batch, flags, False) for family in further]
    return found


@pytest.mark.parametrize("family,n,batch,layout", [
    pytest.param(*case, marks=[] if is_quick else [pytest.mark.long],
                 id=f"{case[0]}-{case[1]}-{case[3]}".replace(" ", ""))
    for *case, is_quick in cases()])
def test_a_layout_equals_one_rank(family, n, batch, layout):
    compare(flags_of(family, layout), n, batch, source_of(family), **layout)


def test_every_family_is_in_the_table():
    assert {family for family, *_ in cases()} == FAMILIES.keys()
    assert torch.get_default_dtype() == torch.float32

"""The flags of today's models, in every layout and with a cache; faults in them are found.

tests/test_model.py compares each with the model that is written out in plain_model.py.
"""

import pytest
import torch
from faults import PP, TP, assert_caught, planted
from runs import TINY, session
from test_layouts import LLAMA, MOE, compare
from test_model import check_against_the_written_out_model, random_model, without_cache

from config import Config, check
from pipeline import Cache, generate
from runtime.launch import World

SHORT = dict(LLAMA, n_layer=2, micro_batch=2)
FORMS = {
    "qwen3": dict(SHORT, head_dim=6, qk_norm="head"),
    "qwen2": dict(SHORT, qkv_bias=True),
    "olmo2": dict(SHORT, qk_norm="all", norm_place="after"),
    "llama3": dict(SHORT, rope_scaling=(4.0, 0.5, 2.0, 8.0)),
    "windows": dict(SHORT, window=3, full_every=2, no_rope_every=2),
    "gemma3": dict(SHORT, norm="rms1p", mlp="geglu", norm_place="both", qk_norm="head", embed_scale=True,
                   window=3, full_every=2, window_rope_base=20.0, tied=True),
    "nanochat": dict(SHORT, window=3, qk_norm="head", mlp="relu2", logit_softcap=0.5),
}
ROUTED = {flag: MOE[flag] for flag in ("n_experts", "capacity_factor", "top_k", "aux_coef", "z_coef")}
WITH_EXPERTS = {"experts": dict(FORMS["olmo2"], **ROUTED, window=3),
                "qwen3 moe": dict(FORMS["qwen3"], **ROUTED)}
LAYOUTS = [  # form, ranks, sequences, layout; with tp 4 two ranks share a key head
    ("qwen3", 4, 4, dict(tp=4)), ("qwen3", 2, 4, dict(tp=2, recompute="selective")),
    ("qwen3", 2, 4, dict(zero=3)), ("qwen3", 4, 4, dict(tp=2, cp=2)),
    ("qwen2", 4, 4, dict(tp=4)), ("qwen2", 4, 4, dict(tp=2, pp=2)), ("qwen2", 2, 4, dict(zero=3)),
    ("olmo2", 4, 4, dict(tp=4)), ("olmo2", 4, 8, dict(tp=2, zero=3)), ("olmo2", 4, 4, dict(tp=2, pp=2)),
    ("olmo2", 4, 4, dict(tp=2, cp=2, recompute="full")), ("olmo2", 2, 4, dict(tp=2, recompute="selective")),
    ("llama3", 2, 4, dict(cp=2)), ("llama3", 4, 4, dict(tp=2, pp=2)),
    ("windows", 4, 4, dict(cp=4)), ("windows", 4, 4, dict(cp=2, pp=2, recompute="full")),
    ("windows", 2, 4, dict(pp=2, zero=1)), ("windows", 2, 4, dict(tp=2, recompute="selective")),
    ("nanochat", 4, 4, dict(tp=2, cp=2)), ("nanochat", 4, 8, dict(tp=2, zero=3)),
    ("gemma3", 4, 4, dict(tp=2, pp=2)), ("gemma3", 2, 4, dict(cp=2)), ("gemma3", 2, 4, dict(zero=3)),
    ("gemma3", 4, 4, dict(tp=4, recompute="selective")), ("gemma3", 2, 4, dict(zero=2, recompute="full")),
    ("experts", 4, 4, dict(tp=2, ep=2)), ("experts", 4, 8, dict(cp=2, ep=4, zero=1, recompute="full")),
    ("experts", 4, 4, dict(tp=4, ep=2)), ("experts", 4, 4, dict(pp=2, ep=2, recompute="selective")),
    ("qwen3 moe", 4, 4, dict(tp=2, ep=2)), ("nanochat", 4, 4, dict(tp=4)),
    ("nanochat", 4, 4, dict(tp=2, pp=2)), ("windows", 2, 4, dict(zero=3)), ("llama3", 2, 4, dict(zero=3))]


FEW = [0, 5, 7, 10, 12, 14, 16, 19, 20, 22, 25, 29]  # of LAYOUTS; make long has all


@pytest.mark.parametrize("form,n,batch,layout", [
    pytest.param(*row, marks=[] if i in FEW else [pytest.mark.long], id=f"{row[0]}-{row[1]}-{row[3]}")
    for i, row in enumerate(LAYOUTS)])
def test_a_layout_equals_one_rank(form, n, batch, layout):
    compare({**FORMS, **WITH_EXPERTS}[form], n, batch, **layout)


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_of_keys_changes_nothing(form):
    """Past the end of the window, and in pieces of several lengths."""
    model = random_model(Config(**FORMS[form]))
    assert generate(model, [3, 10], 20, temperature=0) == without_cache(model, [3, 10], 20)
    tokens = torch.randint(100, (1, 8), generator=torch.Generator().manual_seed(2))
    cache, pieces = Cache(), []
    with torch.no_grad():
        for piece in tokens.split([1, 3, 1, 1, 2], dim=1):
            pieces.append(model(piece, cache=cache)[0])
            cache.length += piece.size(1)
        torch.testing.assert_close(torch.cat(pieces), model(tokens)[0], rtol=0, atol=1e-12)


# -----------------------------------------------------------------------------
# Faults

def own_part_alone(original, x, axis):
    return x * axis.size


def first_layer(original, attention, cfg, mesh, layer):
    """Attention.__init__ that takes each layer for the first."""
    original(attention, cfg, mesh, 0)


FAULTS = {  # name: (form, (ranks, layout), a fault as arguments of planted)
    "the mean square of a rank's own heads": ("olmo2", TP, ("parallel.sum_over_ranks", own_part_alone)),
    "the layers of a stage counted from 0": ("windows", PP, ("attention.Attention.__init__", first_layer)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_layout_is_found(name):
    form, place, fault = FAULTS[name]
    assert_caught(FORMS[form], place, fault)


# -----------------------------------------------------------------------------
# On one rank: faults against the model that is written out, refusals

def norm_of_the_sum(original, block, x, *args):
    """Block.compute with its last norm after the sum."""
    x, y = block.attention_half(x, *args)
    return block.norm2(x + block.mlp(y)), None


def angles_of_windows(original, *args):
    """GPT._rotation by the windows' base in every layer."""
    found = original(*args)
    return {False: found[True], True: found[True]}


PLAIN_FAULTS = {  # name: (form, a fault as arguments of planted)
    "every layer turns by the windows' base": ("gemma3", "model.GPT._rotation", angles_of_windows),
    "the norm after the sum": ("olmo2", "model.Block.compute", norm_of_the_sum),
}


@pytest.mark.parametrize("name", PLAIN_FAULTS)
def test_a_fault_in_the_formula_is_found(name):
    form, *fault = PLAIN_FAULTS[name]
    cfg = Config(**FORMS[form])
    check_against_the_written_out_model(cfg)
    with planted(*fault), pytest.raises(AssertionError):
        check_against_the_written_out_model(cfg)


@pytest.mark.parametrize("flags,words", [
    (dict(rope_scaling=(8.0, 1.0, 4.0)), "--rope-scaling 8.0 1.0 4.0 must be FACTOR LOW HIGH LENGTH"),
    (dict(rope_scaling=(8.0, 4.0, 1.0, 8192.0)), "--rope-scaling 8.0 4.0 1.0 8192.0 must be"),
    (dict(bias=True, qkv_bias=True), "leave out --qkv-bias"),
    (dict(objective="mlm", window=3), "leave out --window"),
    (dict(head_dim=5), "head dim 5 is odd")], ids=lambda x: str(x)[:30])
def test_what_no_model_can_have_is_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        check(Config(**flags))


def test_a_run_with_a_window_says_that_it_is_a_mask():
    ran = session(World(), [*TINY, "--window=4", "--full-every=2", "--steps=1"])
    assert ran["code"] == 0 and "--window 4: its layers attend through a mask" in ran["out"], ran

"""bench/one_rule.py derives every group of every layout of the tests, and refuses wrong groups and faults.

No ranks are started here. make test has a few cases of each kind, make long the whole sweeps, whose figures
`pytest -s` prints.
"""
import contextlib
import dataclasses
import functools
import sys
import time
from unittest import mock

import pytest
import test_faults
import test_layouts
import test_lora
import test_model_flags
import test_moe_faults
import test_muon
import torch.nn.functional as F
from faults import group, nothing, planted
from pool import ROOT
from test_layouts import BERT, CAPACITY, GPT2, LLAMA, MOE, SIGMOID

import model
from config import Config
from parallel import Mesh, parameter, scatter_rows

sys.path.append(str(ROOT / "bench"))
import one_rule

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "dropless": MOE, "capacity": CAPACITY, "sigmoid": SIGMOID,
            "bert": BERT, "bert-llama": dict(LLAMA, objective="mlm", seq_len=20), "bert-moe": {**MOE, **BERT}}
OTHERS = [("llama", 4, dict(pp=2, pp_layers="1,3", recompute="full", zero=1)),
          ("gpt2", 3, dict(n_layer=6, pp=3, pp_chunks=2)), ("llama", 4, dict(n_kv_head=1, tp=4)),
          ("sigmoid", 4, dict(tp=2, ep=4)), ("sigmoid", 4, dict(pp=2, ep=2, zero=1)),
          ("sigmoid", 4, dict(tp=2, ep=4, recompute="selective")),
          ("dropless", 4, dict(router="softmax-topk", ep=4, recompute="full")),
          ("dropless", 8, dict(ep=8)), ("capacity", 8, dict(tp=4, ep=8, zero=1)),
          # Layouts for which no test starts ranks: axes of 3, 5 and 6, and many ranks.
          ("llama", 6, dict(zero=1)), ("gpt2", 12, dict(tp=2, pp=2)), ("dropless", 12, dict(tp=2, ep=4)),
          ("gpt2", 15, dict(pp=3, zero=2)), ("llama", 64, dict(tp=4, cp=2, pp=2, zero=1)),
          ("dropless", 64, dict(tp=2, cp=2, ep=8, zero=3)), ("capacity", 48, dict(tp=2, pp=4, ep=2, zero=2)),
          ("gpt2", 64, dict(tp=4, pp=4, zero=1)), ("bert", 64, dict(tp=2, cp=2, pp=2, zero=2)),
          ("llama", 6, dict(cp=3, seq_len=12, micro_batch=4)),
          # A norm of each head's queries, or of all heads together, with one head on each rank.
          ("llama", 8, dict(tp=4, qk_norm="head")), ("llama", 8, dict(tp=4, qk_norm="all", n_kv_head=1)),
          ("llama", 4, dict(tp=4, zero=3, n_kv_head=1))]
MUON, LORA = test_muon.BASES, test_lora.BASES
FORMS = {**test_model_flags.FORMS, **test_model_flags.WITH_EXPERTS}
OTHERS_OF_FORMS = [
    (FORMS["nanochat"], 64, dict(tp=2, cp=2, pp=2, zero=1)), (FORMS["gemma3"], 64, dict(tp=4, cp=2, zero=3)),
    (FORMS["qwen3 moe"], 64, dict(tp=2, cp=2, ep=8, zero=2)), (FORMS["olmo2"], 15, dict(zero=2)),
    (FORMS["qwen2"], 6, dict(cp=3, seq_len=12)), (FORMS["windows"], 8, dict(tp=2, zero=3, shard=2)),
    (dict(FORMS["nanochat"], optimizer="muon"), 8, dict(tp=2, zero=2)),
    (dict(FORMS["qwen3 moe"], optimizer="muon"), 8, dict(tp=2, ep=2, zero=3, shard=2)),
    (dict(FORMS["windows"], lora=3), 8, dict(cp=2, zero=3)),
    (dict(FORMS["gemma3"], lora=3), 8, dict(tp=2, pp=2, zero=1)),
    (dict(FORMS["qwen3"], lora=3), 8, dict(tp=2, zero=1, shard=2))]
OTHERS_OF_MUON = [
    ("llama", 6, dict(zero=1)), ("llama", 3, dict(zero=2)), ("llama", 4, dict(tp=4, zero=1, n_kv_head=1)),
    ("gpt2", 12, dict(tp=2, pp=2, zero=2)), ("moe", 12, dict(tp=2, ep=4)), ("moe", 8, dict(tp=2, ep=8)),
    ("llama", 64, dict(tp=4, cp=2, pp=2, zero=1)), ("moe", 64, dict(tp=2, cp=2, ep=8, zero=3)),
    ("bert", 64, dict(tp=2, cp=2, pp=2, zero=2)), ("llama", 8, dict(tp=2, zero=1, shard=2)),
    ("llama", 8, dict(tp=2, cp=2, zero=3, shard=1)), ("moe", 8, dict(tp=2, ep=2, zero=3, shard=2)),
    ("moe", 8, dict(cp=2, ep=4, zero=1, shard=2)), ("llama", 4, dict(zero=2, shard=2, dtype="bf16")),
    ("moe", 4, dict(tp=2, ep=2, zero=3, dtype="fp16")), ("gpt2", 8, dict(tp=2, zero=1, recompute="full"))]
OTHERS_OF_LORA = [
    ("qwen", 6, dict(zero=1)), ("qwen", 4, dict(pp=2, pp_chunks=2, n_layer=4)),
    ("gpt2", 12, dict(tp=2, pp=2)), ("one head", 8, dict(tp=4, zero=3)),
    ("qwen", 8, dict(tp=2, zero=3, shard=2)), ("qwen", 8, dict(cp=2, zero=3, shard=2, dtype="bf16")),
    ("qwen", 64, dict(tp=2, cp=2, pp=2, zero=2)), ("bert", 64, dict(tp=2, cp=2, pp=2, zero=1)),
    ("one head", 64, dict(tp=4, cp=2, zero=3, shard=4))]


def layouts():
    """Return [(family, ranks, layout)]: all layouts of test_layouts.py, and OTHERS."""
    found = [(family, ranks, layout) for ranks, _, layout in test_layouts.LAYOUTS
             for family in ("llama", "gpt2")]
    for family, ranks, layout in test_layouts.BERT_LAYOUTS:
        found.append((family if family == "bert" else f"bert-{family}", ranks, layout))
    found += [(family, ranks, layout) for family, ranks, _, layout in test_layouts.CP_LAYOUTS]
    found += [(family, ranks, layout) for ranks, _, layout in test_layouts.MOE_LAYOUTS
              for family in ("dropless", "capacity")]
    return found + OTHERS


def layouts_of_muon():
    """Return [(model, ranks, layout)]: all layouts of test_muon.py, and more."""
    found = [(MUON[name], ranks, layout) for name, ranks, _, layout in test_muon.EVERY_LAYOUT]
    return found + [(MUON[name], ranks, layout) for name, ranks, layout in OTHERS_OF_MUON]


def layouts_of_lora():
    """Return [(model, ranks, layout)]: all layouts of test_lora.py, and more."""
    found = [(LORA[name], ranks, layout) for name, ranks, _, layout in test_lora.LAYOUTS]
    return found + [(LORA[name], ranks, layout) for name, ranks, layout in OTHERS_OF_LORA]


def layouts_of_forms():
    """Return [(model, ranks, layout)]: all layouts of test_model_flags.py, and more."""
    found = [(FORMS[form], ranks, layout) for form, ranks, _, layout in test_model_flags.LAYOUTS]
    return found + OTHERS_OF_FORMS


def config(family, ranks, layout):
    """Return a Config with two micro-batches of 2 sequences on each dp rank."""
    base = FAMILIES[family] if isinstance(family, str) else family
    cfg = Config(**{"micro_batch": 2, **base, **layout})
    replicas = ranks // (cfg.tp * cfg.cp * cfg.pp)
    return dataclasses.replace(cfg, global_batch=2 * cfg.micro_batch * replicas)


def check_layout(family, ranks, layout):
    """Assert that each group follows."""
    verdict = one_rule.derive(config(family, ranks, layout), ranks)
    assert verdict.right, f"{family} {ranks} {layout}: {verdict.refused}"
    assert verdict.rows


FEW = [("llama", 4, dict(tp=2, zero=1)), ("gpt2", 2, dict(pp=2, zero=1)), ("dropless", 4, dict(tp=2, ep=4)),
       ("gpt2", 4, dict(cp=2, zero=3)), (test_muon.TWO["llama"], 4, dict(tp=2, zero=1)),
       (MUON["moe"], 8, dict(tp=2, ep=2, zero=3, shard=2, n_layer=1)), (LORA["qwen"], 4, dict(tp=2, zero=3)),
       ("bert", 64, dict(tp=2, cp=2, pp=2, zero=2, n_layer=2)), OTHERS_OF_FORMS[0],
       (FORMS["qwen3 moe"], 4, dict(tp=2, ep=2, n_layer=1))]


@pytest.mark.parametrize("case", FEW, ids=lambda case: str(case[1:]).replace(" ", ""))
def test_every_group_follows(case):
    check_layout(*case)


SMALL = ["tiny", "--n-layer", "1", "--ranks", "4", "--tp", "2"]


@pytest.mark.parametrize("flags", [["--optimizer=muon", "--zero=1"], ["--lora=2", "--zero=3"],
                                   ["--split-masters", "--zero=1"], ["--split-masters", "--zero=3"]], ids=str)
def test_the_command_follows_muon_lora_and_split_masters(flags, capsys):
    """In bf16, where masters and directions have memory of their own."""
    assert one_rule.main([*SMALL, "--dtype=bf16", *flags]) == 0
    said = capsys.readouterr().out
    assert "groups follow from the step, 4 ranks" in said and said.endswith("right\n")
    assert "not followed" not in said
    if "--lora=2" in flags:
        table = dict(line.split()[::3] for line in said.splitlines() if "lora" in line)
        assert table["blocks.0.attn.wq.lora.A"] == table["blocks.0.attn.wo.lora.B"] == "stage"
        assert table["blocks.0.attn.wq.lora.B"] == table["blocks.0.attn.wo.lora.A"] == "dp"


@pytest.mark.parametrize("flags,fix", [
    ("--ep=3 --n-experts=6", "2"), ("--ep=3 --n-experts=12", "2"), ("--ep=3 --n-experts=9", "1"),
    ("--ep=4 --n-experts=12 --ranks=12 --cp=3 --tp=1", "3"),
    ("--ep=9 --n-experts=18 --ranks=18", "6")])
def test_the_nearest_ep_with_common_digits_is_suggested(flags, fix, capsys):
    """Typed in, the suggestion works."""
    argv = ["tiny-moe", "--n-layer=1", "--ranks=6", "--tp=2", "--n-head=6", "--n-kv-head=6", "--n-embd=24",
            "--seq-len=132", *flags.split()]
    with pytest.raises(SystemExit):
        one_rule.main(argv)
    said = capsys.readouterr().err
    assert said.endswith(f"; try --ep {fix}\n"), said
    assert one_rule.main([*argv, f"--ep={fix}"]) == 0


@pytest.mark.parametrize("wrong,fix", [
    ("--ranks 6 --tp 4", "--tp 2"), ("--global-batch 9", "--micro-batch 2 --global-batch 16"),
    ("--np 8 --tp 2", "python one_rule.py tiny --n-layer 1 --tp 2 --ranks 8"),
    ("--ranks 36 --cp 3 --zero 3 --shard 2 --ep 2", "--ep 1 --shard 1"),
    ("--ranks 36 --cp 3 --zero 3 --shard 4 --ep 4", "--ep 3 --shard 3")])
def test_what_is_proposed_is_accepted(wrong, fix, capsys):
    base = "tiny --n-layer 1"
    if "--ep" in wrong:
        base = "tiny-moe --n-layer 1 --n-head 6 --n-kv-head 6 --n-embd 24 --seq-len 144 --n-experts 36"
    argv = [*base.split(), *wrong.split()]
    with pytest.raises(SystemExit):
        one_rule.main(argv)
    said = capsys.readouterr().err
    assert said.endswith(f" {fix}\n"), said
    if fix.startswith("python"):
        assert one_rule.main(fix.split()[2:]) == 0
    else:
        assert one_rule.main([*argv, *fix.split()]) == 0


def test_both_at_once_are_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as left:
        one_rule.main([*SMALL, "--optimizer=muon", "--lora=2"])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and "--optimizer muon is for whole matrices" in said.err


@pytest.mark.long
def test_every_layout_of_the_tests_is_accepted():
    began = time.monotonic()
    cases = layouts()
    for case in cases:
        check_layout(*case)
    print(f"\n{len(cases)} layouts, no false alarm, {time.monotonic() - began:.0f} s")


@pytest.mark.long
@pytest.mark.parametrize("cases", [layouts_of_forms, layouts_of_muon, layouts_of_lora])
def test_every_layout_of_forms_muon_and_lora_is_accepted(cases):
    began = time.monotonic()
    for case in cases():
        check_layout(*case)
    print(f"\n{cases.__name__}: {len(cases())}, no false alarm, {time.monotonic() - began:.0f} s")


# -----------------------------------------------------------------------------
# Wrong groups

def wrong_groups(cfg, ranks):
    """Return [(group, another one)]: each group that a parameter of the first stage has, each wrong one."""
    mesh = one_rule.mesh_of(cfg, ranks, 0)
    names = {row.declared for row in one_rule.derive(cfg, ranks, [0]).rows}
    pairs = []
    for name in sorted(names):
        right = getattr(mesh, name).ranks
        seen = {right}
        for other in ("pp", "tp", "cp", "dp", "ep", "edp", "dpcp", "stage", "tied", "world"):
            axis = getattr(mesh, other)
            if axis.ranks not in seen:
                pairs.append((name, other))
            seen.add(axis.ranks)
    return pairs


def check_wrong_group(cfg, ranks, right, wrong):
    """Assert that each parameter of the group is named, with the group over which it must be summed."""
    with planted(*group(right, wrong)):
        try:
            verdict = one_rule.derive(cfg, ranks, [0])
        except RuntimeError:  # a slot has no such number of slices: the step itself cannot be done
            return False
    named = named_group(verdict, cfg, ranks, right, wrong)
    assert all(row.declared != right for row in verdict.rows if row not in named)
    return True


def named_group(verdict, cfg, ranks, right, wrong):
    """Return the rows of wrong groups. Assert that they name the right one, or one with the same ranks."""
    mesh = one_rule.mesh_of(cfg, ranks, 0)
    named = [row for row in verdict.rows if not row.right]
    assert named and {row.declared for row in named} == {wrong}
    for row in named:
        follows = (0,) if row.follows == "none" else getattr(mesh, row.follows).ranks
        assert follows == getattr(mesh, right).ranks, row
    return named


def test_a_wrong_group_is_named():
    cfg = config("dropless", 4, dict(tp=2, ep=4, n_layer=1))
    pairs = wrong_groups(cfg, 4)
    assert {name for name, _ in pairs} == {"dp", "edp", "stage"}
    for pair in pairs[::3]:
        assert check_wrong_group(cfg, 4, *pair)


@pytest.mark.long
def test_every_wrong_group_is_named():
    began = time.monotonic()
    named = []
    for family, ranks, layout in layouts():
        cfg = config(family, ranks, layout)
        named += [check_wrong_group(cfg, ranks, *pair) for pair in wrong_groups(cfg, ranks)]
    print(f"\n{sum(named)} of {len(named)} wrong groups are named, in the others the step itself fails, "
          f"{time.monotonic() - began:.0f} s")
    assert sum(named) > 0.9 * len(named)


# -----------------------------------------------------------------------------
# Changes such as those of docs/change-it.md: a layer gets a new parameter, whose gradient is summed over ...

def with_parameter(original, module, *args, make, axis, **kwargs):
    """An __init__ that gives the layer a parameter `extra`. axis: another group for it, or None."""
    original(module, *args, **kwargs)
    mesh = next(arg for arg in args if isinstance(arg, Mesh))
    module.extra = make(module, mesh)
    if axis is not None:
        module.extra.reduction_axis = axis


def scaled_result(original, module, *args, **kwargs):
    return original(module, *args, **kwargs) * module.extra


def scaled_input(original, module, x):
    return original(module, x * module.extra)


def scaled_queries(original, module, *args):
    q, k, v = original(module, *args)
    return q * module.extra, k, v


def shifted_result(original, module, *args):
    return original(module, *args) + module.extra


def of_width(layer, mesh):
    return parameter((16,), mesh)


def of_inputs(layer, mesh):
    return parameter((layer.weight.size(1) * mesh.tp.size,), mesh, tp_dim=0)


def of_head(attention, mesh):
    return parameter((attention.D,), mesh)


def of_heads(attention, mesh):
    return parameter((attention.h * mesh.tp.size, 1, 1), mesh, tp_dim=0)


def of_experts(layer, mesh):
    return parameter((layer.E, 1, 16), mesh, expert=True)


def of_choices(router, mesh):
    return parameter((router.weight.size(0),), mesh)


MOE_4, DENSE_4 = (4, dict(tp=2, ep=2, n_layer=1)), (4, dict(tp=2, n_layer=1))
CHANGES = {  # name: (family, (ranks, layout), class, method, what it does, make, the group, a wrong one)
    "a second scale of each norm": (
        "llama", DENSE_4, "model.Norm", "forward", scaled_result, of_width, "stage", "dp"),
    "a scale of what a block adds": (
        "llama", DENSE_4, "model.RowLinear", "forward", scaled_result, of_width, "stage", "dp"),
    "a gate of each head's result": (
        "gpt2", DENSE_4, "model.Attention", "attend_own_heads", scaled_result, of_heads, "dp", "stage"),
    "a gate in front of the output projection": (
        "llama", DENSE_4, "model.RowLinear", "forward", scaled_input, of_inputs, "dp", "stage"),
    "the weight of a norm of each query": (
        "llama", DENSE_4, "model.Attention", "project", scaled_queries, of_head, "stage", "dp"),
    "a temperature of each head": (
        "llama", DENSE_4, "model.Attention", "project", scaled_queries, of_heads, "dp", "stage"),
    "a scale of the embedding": (
        "llama", DENSE_4, "model.GPT", "_embed", scaled_result, of_width, "stage", "tp"),
    "a scale in the head of BERT": (
        "bert", DENSE_4, "model.MaskedHead", "forward", scaled_result, of_width, "stage", "dp"),
    "a bias of each expert": (
        "capacity", MOE_4, "moe.MoE", "ffn", shifted_result, of_experts, "edp", "stage"),
    "a bias of the router's logits": (
        "dropless", MOE_4, "moe.Router", "forward", shifted_result, of_choices, "stage", "dp"),
}


def verdict_of_change(name, axis):
    """Derive the groups of a changed model. axis: over which group the new gradients are summed, or None."""
    family, (ranks, layout), where, method, what, make, *_ = CHANGES[name]
    init = functools.partial(with_parameter, make=make, axis=axis)
    with mock.patch.dict(model.VECTOR_STARTS, extra=1.0), planted(f"{where}.__init__", init), \
            planted(f"{where}.{method}", what):
        return one_rule.derive(config(family, ranks, layout), ranks)


def check_change(name):
    """Assert that the right group is accepted, and that a wrong one is named with the right one."""
    right, wrong = CHANGES[name][-2:]
    verdict = verdict_of_change(name, None)
    assert verdict.right, verdict.refused
    assert any(row.name.endswith("extra") and row.declared == right for row in verdict.rows)
    family, (ranks, layout), *_ = CHANGES[name]
    cfg = config(family, ranks, layout)
    named = named_group(verdict_of_change(name, wrong), cfg, ranks, right, wrong)
    assert all(row.name.endswith("extra") for row in named)


@pytest.mark.parametrize("name", [name if name == "a bias of each expert" else
                                  pytest.param(name, marks=pytest.mark.long) for name in CHANGES])
def test_a_new_parameter_in_a_wrong_group_is_named(name):
    check_change(name)


# -----------------------------------------------------------------------------
# The planted faults of test_faults.py, test_moe_faults.py, test_muon.py and test_lora.py, and more

# What no Mark shows: a factor, an offset, an order, a mask, the choice of rows or words by a rank's number.
UNSEEN = {
    "gradients averaged, not summed",
    "loss divided by the local tokens",
    "bucket padding counted as zero gradients",
    "loss counted by every tp rank",
    "scatter_rows backward sums twice",
    "targets at the wrong vocabulary offset",
    "vocabulary padding takes probability",
    "embedding rows of another rank",
    "every tp rank embeds the first rank's positions",
    "a replicated kv head of other query heads",
    "each shard draws its own weights",
    "backward of the newest micro-batch",
    "last stage's loss not divided",
    "loss of one stage not divided",
    "a tied last rank embeds again",
    "balance loss divided by the chunks",
    "slices averaged, not summed",
    "only the last micro-batch is kept",
    "another bucket's gradients stay in the padding",
    "every rank keeps the first slice's sum",
    "positions as if each cp rank had one piece",
    "learned positions of the first cp rank",
    "targets as if each cp rank had one piece",
    "mask off by one segment",
    "mask aligned at the first key",
    "gathered keys in the order of the ranks",
    "loss divided by the tokens of all cp ranks as if they were others",
    "balance loss not divided by dp",
    "the causal mask is left on over cp",
    "a head for the masked tokens that a rank of cp has on average",
    "weight decay on norms",
    "micro-batches overwrite each other",
    "loss not divided by the number of micro-batches",
    "no clipping",
    "experts: expert gradients ep times too large",
    "experts: expert gradients averaged over edp",
    "experts: the gradient norm skips experts",
    "experts: balance loss not divided by dp",
    "experts: balance loss lost on all stages except the last",
    "experts: balance and z-loss averaged over this tp rank's tokens",
    "experts: capacity computed from all tp ranks' rows",
    "experts: rows stay sorted by sender, dropless",
    "experts: rows stay sorted by sender, capacity",
    "experts: rows come back sorted by expert, capacity",
    "experts: only one rank's experts are saved",
    "experts: experts are saved without their offset",
    "muon: the next Gram matrix lacks a polynomial",
    "muon: only the last polynomial reaches the matrix",
    "muon: the scale of the share's shape",
    "muon: momentum is updated afterwards",
    "muon: no look ahead",
    "muon: matrices in blocks do not decay",
    "muon: decay in place of AdamW's group",
    "muon: AdamW's learning rate",
    "muon: parts of matrices in another order",
    "lora: the scale is forgotten",
    "lora: the base is not frozen",
    "lora: A starts as another matrix on each rank",
}


def slices_as_they_are(original, matrices, vector):
    """WholeMatrices.collect that sends nothing: each rank goes on with its own slices."""
    found = vector.new_zeros(sum(matrices.received))
    n = min(len(found), len(vector))
    found[:n] = vector[:n]
    return found


def adapter_after_the_sum(original, layer, x):
    """RowLinear.forward that adds its own part of the adapter's sum to a row that is whole."""
    y = scatter_rows(F.linear(x, layer.weight), layer.tp)
    return y + layer.lora(x).chunk(layer.tp.size)[layer.tp.rank]


TP, ZERO = (4, dict(tp=2)), (4, dict(zero=1))
LLAMA_MUON, MOE_MUON = test_muon.TWO["llama"], test_muon.TWO["moe"]
GRAM = "axis.all_reduce(symmetric_mm(*factors))"
WIDE = dict(LLAMA_MUON, n_kv_head=1)  # wk and wv are whole on all ranks of tp 2.
MORE_FAULTS = {  # name: (model, (ranks, layout), where, what is planted)
    "muon: slices orthogonalised as if they were matrices": (
        LLAMA_MUON, ZERO, "muon.WholeMatrices.collect", slices_as_they_are),
    "muon: slices orthogonalised as if they were matrices, ZeRO-3": (
        MOE_MUON, (4, dict(ep=2, zero=3)), "muon.WholeMatrices.collect", slices_as_they_are),
    "muon: norms summed over tp, not their squares": (
        LLAMA_MUON, TP, "muon.normalised", "axis.all_reduce(squared_norms(x))",
        "axis.all_reduce(squared_norms(x).sqrt()).square()"),
    "muon: only the first Gram matrix is summed": (
        LLAMA_MUON, TP, "muon.orthogonalise", GRAM, GRAM.replace("axis", "(ALONE if i else axis)")),
    "muon: Gram matrices summed over dp": (
        LLAMA_MUON, TP, "muon.Muon.__init__", "data_parallel.mesh.tp", "data_parallel.mesh.dp"),
    "muon: Gram matrices of whole matrices summed over tp": (
        WIDE, TP, "muon.WholeMatrices.orthogonalise_batch",
        "ALONE if matrix.cut is None else self.tp", "self.tp"),
    "muon: updates stay with the owner, ZeRO-2 with experts": (
        MOE_MUON, (4, dict(ep=2, zero=2)), "muon.WholeMatrices.hand_back", nothing),
    "muon: parts of matrices sent over the whole group, not over the shard": (
        LLAMA_MUON, (8, dict(zero=1, shard=2)), "muon.WholeMatrices.collect",
        "self.axis.all_to_all", "self.buckets[0].axis.all_to_all"),
    "muon: new weights not gathered": (
        LLAMA_MUON, ZERO, "muon.Muon.step", "self.data_parallel.on_updated(group.buckets[i])", ""),
    "lora: a row layer adds its adapter after the sum": (
        LORA["gpt2"], TP, "layers.RowLinear.forward", adapter_after_the_sum),
    "lora: each tp rank draws its own adapters": (
        LORA["qwen"], TP, "model.initial_weights", 'f"{seed}/{name}"',
        'f"{seed}/{name}/{model.mesh.tp.rank}"'),
}


def all_faults():
    """Return {name: (model, (ranks, layout), [faults])}."""
    found = {}
    of_experts = {f"experts: {name}": fault for name, fault in test_moe_faults.LAYOUT_FAULTS.items()}
    for name, (base, place, *faults) in {**test_faults.FAULTS, **of_experts}.items():
        more = [fault for fault in faults if isinstance(fault, tuple)]
        found[name] = base, place, [tuple(faults[:len(faults) - len(more)]), *more]
    for name, (family, (ranks, _, layout), fault) in test_muon.FAULTS.items():
        found[f"muon: {name}"] = test_muon.TWO[family], (ranks, layout), [fault]
    for name, fault in test_lora.FAULTS.items():
        found[f"lora: {name}"] = LORA["qwen"], (2, dict(tp=2)), [fault]
    for name, (base, place, *fault) in MORE_FAULTS.items():
        found[name] = base, place, [fault]
    return found


def is_refused(name):
    """Whether a planted fault is refused, or gives a wrong group."""
    base, (ranks, layout), faults = all_faults()[name]
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(planted(*fault))
        return not one_rule.derive(config(base, ranks, layout), ranks).right


SOME = ["softmax with the local maximum", "row-linear bias added by every tp rank",
        "scatter_rows backward without the all-gather", "experts summed over dp",
        "a slot is given on before its sum was taken out", "clip by the local norm",
        "experts: gradients of the rows not sent back", "weights not gathered",
        "muon: each share orthogonalised alone", "muon: the norm is not summed over tp",
        "muon: the Gram matrix is not summed over tp", "muon: the Gram matrix of the side that is cut",
        "muon: slices orthogonalised as if they were matrices", "muon: updates stay with the owner",
        "lora: the factor that is not cut is not summed over tp",
        "lora: a row layer adds its adapter after the sum"]


@pytest.mark.parametrize("name", SOME)
def test_a_fault_is_refused(name):
    assert is_refused(name)


@pytest.mark.long
def test_all_faults_but_those_that_no_mark_shows_are_refused():
    began = time.monotonic()
    names = list(all_faults())
    refused = {name for name in names if is_refused(name)}
    assert set(names) - refused == UNSEEN
    print(f"\n{len(refused)} of {len(names)} faults refused, {time.monotonic() - began:.0f} s")

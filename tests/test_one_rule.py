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
import test_moe_faults
from faults import group, planted
from pool import ROOT
from test_layouts import BERT, CAPACITY, GPT2, LLAMA, MOE, SIGMOID

import model
from config import Config
from parallel import Mesh, parameter

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
          ("llama", 6, dict(cp=3, seq_len=12, micro_batch=4))]


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
       ("gpt2", 4, dict(cp=2, zero=3)), ("bert", 64, dict(tp=2, cp=2, pp=2, zero=2, n_layer=2))]


@pytest.mark.parametrize("case", FEW, ids=lambda case: str(case).replace(" ", ""))
def test_every_group_follows(case):
    check_layout(*case)


@pytest.mark.long
def test_every_layout_of_the_tests_is_accepted():
    began = time.monotonic()
    cases = layouts()
    for case in cases:
        check_layout(*case)
    print(f"\n{len(cases)} layouts, no false alarm, {time.monotonic() - began:.0f} s")


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
# The planted faults of test_faults.py and test_moe_faults.py

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
}


def all_faults():
    """Return {name: (model, (ranks, layout), [faults])}."""
    found = {}
    of_experts = {f"experts: {name}": fault for name, fault in test_moe_faults.LAYOUT_FAULTS.items()}
    for name, (base, place, *faults) in {**test_faults.FAULTS, **of_experts}.items():
        more = [fault for fault in faults if isinstance(fault, tuple)]
        found[name] = base, place, [tuple(faults[:len(faults) - len(more)]), *more]
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
        "experts: gradients of the rows not sent back", "weights not gathered"]


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

"""bench/one_rule.py derives every group of every layout of the tests, and refuses wrong groups and faults.

No ranks are started here. make test has a few cases of each kind, make long the whole sweeps, whose figures
`pytest -s` prints.
"""
import dataclasses
import sys
import time

import pytest
import test_layouts
from faults import group, planted
from pool import ROOT
from test_layouts import BERT, CAPACITY, GPT2, LLAMA, MOE, SIGMOID

from config import Config

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
        verdict = one_rule.derive(cfg, ranks, [0])
    mesh = one_rule.mesh_of(cfg, ranks, 0)
    named = [row for row in verdict.rows if not row.right]
    assert named and {row.declared for row in named} == {wrong}
    for row in named:
        follows = (0,) if row.follows == "none" else getattr(mesh, row.follows).ranks
        assert follows == getattr(mesh, right).ranks, row
    assert all(row.declared != right for row in verdict.rows)


def test_a_wrong_group_is_named():
    cfg = config("dropless", 4, dict(tp=2, ep=4, n_layer=1))
    pairs = wrong_groups(cfg, 4)
    assert {name for name, _ in pairs} == {"dp", "edp", "stage"}
    for pair in pairs[::3]:
        check_wrong_group(cfg, 4, *pair)


@pytest.mark.long
def test_every_wrong_group_is_named():
    began = time.monotonic()
    tried = 0
    for family, ranks, layout in layouts():
        cfg = config(family, ranks, layout)
        for pair in wrong_groups(cfg, ranks):
            check_wrong_group(cfg, ranks, *pair)
            tried += 1
    print(f"\n{tried} wrong groups of {tried} named, {time.monotonic() - began:.0f} s")

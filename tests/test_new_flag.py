"""A new flag of the model says what its author forgot: what it is to a checkpoint, the planner, the export.

Every field of Config is declared by flag().
"""
import dataclasses
import json
import typing

import pytest
import torch

import config
import train
from config import Config, flags_of_kind, typed
from corpus.masked import Masked
from corpus.samples import Synthetic
from cost.parameters import Rank, count_parameters, stage_mesh
from interface.presets import GPT2
from model import GPT
from parallel import make_mesh
from pipeline import dropout_seeds, rank_layers
from plan import estimate
from runtime.init_from import changed_flags, check_source, refuse_other_model
from runtime.launch import World

ONE = make_mesh(World(), groups=False)

# -----------------------------------------------------------------------------
# declarations

def test_every_flag_says_what_it_is():
    kinds = {"shape", "meaning", "data", "free", "silent"}
    both = {"seq_len", "norm", "norm_place"}  # of which some values' tensors fit each other
    assert set(flags_of_kind("shape")) & set(flags_of_kind("meaning")) == both
    names = [name for kind in kinds for name in flags_of_kind(kind)]
    assert sorted(names) == sorted([*config.FLAGS, *both])
    for name, said in config.FLAGS.items():
        assert said["needs"].partition("=")[0] in {"", *config.FLAGS}, name
        numbers = (int, float, float | None, tuple[int, ...], tuple[float, ...])
        assert Config.__annotations__[name] not in numbers or said["within"], f"{name} has no range"


# -----------------------------------------------------------------------------
# Runs of another version

@pytest.mark.parametrize("kind", ["shape", "flags"])
def test_a_checkpoint_with_a_flag_that_is_not_known_is_refused(kind):
    """Unless it is off there, or --resume-changed names it."""
    cfg = Config(preset="tiny")
    meta = {"shape": {}, "flags": dataclasses.asdict(cfg), "seed": cfg.seed, "world": 1, "data": "hash"}
    meta = json.loads(json.dumps(meta))

    def changed(value, **flags):
        meta[kind]["parallel_block"] = value
        now = dataclasses.replace(cfg, resume="auto", **flags)
        return changed_flags(now, "step_1", meta, 1, "hash", 300)

    words = "--parallel-block True .this run: no such flag.*--resume-changed parallel-block, which"
    with pytest.raises(ValueError, match=words):
        changed(True, resume_changed="seed")
    assert changed(True, resume_changed="parallel-block") == {}
    assert changed(False) == {}
    refuse_other_model(cfg, "step_1", {"parallel_block": True})  # which leaves it to the others
    with pytest.raises(ValueError, match="--norm-eps 1e-05 .this run: 1e-06"):  # one that names none has 1e-5
        refuse_other_model(dataclasses.replace(cfg, norm_eps=1e-6), "step_1", {"n_layer": 4})
    with pytest.raises(ValueError, match="--parallel-block True .this run: no such flag"):
        check_source(cfg, "step_1", {"bias": False, "parallel_block": True}, False)


def test_what_a_model_draws_beside_dropout_is_seeded_for_each_micro_batch(monkeypatch):
    """A reader's router draws numbers, and names its flag in draws_random_numbers()."""
    cfg = Config(preset="tiny")
    assert not train.Step(cfg, None, None, None).draws_random_numbers
    monkeypatch.setattr(train, "draws_random_numbers", lambda cfg: True)
    assert train.Step(cfg, None, None, None).draws_random_numbers
    seeds = [*dropout_seeds(cfg, ONE, 1, 2)[0], *dropout_seeds(cfg, ONE, 2, 2)[0]]
    assert len(set(seeds)) == 4


# -----------------------------------------------------------------------------
# the planner

OF_MODEL = list(dict.fromkeys(flags_of_kind("shape") + flags_of_kind("meaning")))
BASES = {
    "llama": dict(n_head=8, n_kv_head=4),
    "gpt2": dict(GPT2, n_head=8, n_kv_head=8),
    "bert": dict(GPT2, objective="mlm", n_head=8, n_kv_head=8),
    "mlm": dict(objective="mlm", n_head=8, n_kv_head=4),
    "window": dict(n_head=8, n_kv_head=4, window=9),
    "lora": dict(n_head=8, n_kv_head=4, lora=2),
    "experts": dict(n_head=8, n_kv_head=4, n_experts=4),
    "capacity": dict(n_head=8, n_kv_head=4, n_experts=4, capacity_factor=1.25, router="sigmoid")}
# Another value of each number. Of a switch or a choice the test takes every other value by itself.
NUMBERS = {"n_layer": 3, "n_head": 16, "n_kv_head": 2, "n_embd": 64, "ffn_hidden": 96, "seq_len": 32,
           "norm_eps": 1e-6, "n_experts": 8, "n_shared_experts": 2, "vocab_size": 300, "rope_base": 500.0,
           "top_k": 1, "capacity_factor": 1.5, "router_bias_rate": 0.5, "head_dim": 24,
           "rope_scaling": (2.0, 0.5, 2.0, 16.0), "no_rope_every": 1, "window": 5, "full_every": 1,
           "logit_softcap": 2.0, "window_rope_base": 77.0, "lora": 3, "lora_alpha": 64.0, "aux_coef": 0.5,
           "z_coef": 0.5}


def other_values(name, value):
    field = next(f for f in dataclasses.fields(Config) if f.name == name)
    if typing.get_origin(field.type) is typing.Literal:
        return [other for other in typing.get_args(field.type) if other != value]
    if field.type is bool:
        return [not value]
    assert name in NUMBERS, f"{typed(name)} changes the model: give NUMBERS another value of it"
    return [NUMBERS[name]]


def changed_models(name):
    """Yield (name of a base, its Config, the same with another value of one flag)."""
    for base, flags in BASES.items():
        start = Config(**flags, vocab_size=100, micro_batch=2, global_batch=4)
        for value in other_values(name, getattr(start, name)):
            cfg = dataclasses.replace(start, **{name: value})
            if cfg.n_experts or not cfg.n_shared_experts:  # check() refuses the others
                yield base, start, cfg


def built_parameters(cfg, mesh):
    with torch.device("meta"):
        model = GPT(cfg, mesh, cfg.vocab_size, rank_layers(cfg, mesh.pp))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", OF_MODEL)
def test_the_planner_counts_the_parameters_of_each_rank(name):
    """On one rank they are those of the whole model. Over tp and pp each stage has what its ranks build."""
    for base, _, cfg in changed_models(name):
        what = f"with {typed(name)} {getattr(cfg, name)} and a model like {base}; mend cost/parameters.py"
        counted = Rank(cfg, ONE, cfg.vocab_size).parameters()
        assert counted == count_parameters(cfg, cfg.vocab_size)["total"], what
        cfg = dataclasses.replace(cfg, tp=2, pp=3, ep=2 if cfg.n_experts else 1)
        for stage in range(3):
            mesh = stage_mesh(cfg, 6, stage)
            counted = Rank(cfg, mesh, cfg.vocab_size).parameters()
            assert counted == built_parameters(cfg, mesh), f"{what}: stage {stage}"


# The flags of the model that cost/ counts: parameters, work, rows or moments; and those that cost nothing
COUNTED = ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "vocab_size", "seq_len", "norm", "mlp",
           "pos", "bias", "tied", "objective", "n_experts", "top_k", "capacity_factor", "router_bias_rate",
           "n_shared_experts", "head_dim", "qk_norm", "qkv_bias", "window", "full_every", "logit_softcap",
           "norm_place", "lora")
COSTS_NOTHING = ("norm_eps", "rope_base", "rope_scaling", "no_rope_every", "drop_policy", "router",
                 "window_rope_base", "embed_scale", "lora_alpha")


@pytest.mark.parametrize("name", OF_MODEL)
def test_the_planner_knows_what_a_flag_of_the_model_costs(name):
    """What is counted changes some number of a plan. What costs nothing changes none."""
    assert (name in COUNTED) != (name in COSTS_NOTHING), (
        f"count in cost/ what {typed(name)} costs, and put it into COUNTED or COSTS_NOTHING above")
    changed = False
    for _, *models in changed_models(name):
        before, after = (estimate(cfg, 2, "h200", cfg.vocab_size) for cfg in models)
        changed = changed or before != after
    assert changed == (name in COUNTED), f"whether {typed(name)} changes a plan: {changed}"


# -----------------------------------------------------------------------------
# A flag is read, whatever the other flags are

def trained(cfg):
    cfg = dataclasses.replace(cfg, lr=0.1, warmup=0, global_batch=2)
    model, data_parallel, opt = train.build(cfg, make_mesh(World()), cfg.vocab_size, torch.device("cpu"))
    matrices = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.ndim >= 2]
    start = {n: p.detach().clone() for n, p in matrices}
    source = Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    if cfg.objective == "mlm":
        source = Masked(Synthetic(cfg.vocab_size - 1, cfg.seq_len, 1), 1)
    step = train.Step(cfg, model, data_parallel, opt)
    for number in (1, 2):
        step([source.batch(2 * number, 2)], number)
    for n, p in matrices:  # The decay alone moves each.
        assert not torch.equal(p, start[n]), f"{n} stays as it starts with --optimizer {cfg.optimizer}"
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SMALL = dict(n_layer=1, n_embd=32, ffn_hidden=32, seq_len=16)


WEIGHTS = [name for name in flags_of_kind("free") if name.endswith("_coef")]  # of the router's losses


@pytest.mark.parametrize(
    "name", [*flags_of_kind("meaning"), *WEIGHTS, "optimizer", "lr_schedule", "qk_norm"])
def test_no_model_ignores_a_flag(name):
    """AssertionError: two values of a flag that says nothing about sizes train some model alike."""
    results = {}  # of each base: [(value, weights)]
    for base, *models in changed_models(name):
        before, after = (dataclasses.replace(cfg, **{**SMALL, name: getattr(cfg, name)}) for cfg in models)
        try:
            config.check(after)
        except ValueError:  # which says that such a model cannot have the flag
            continue
        if not config.has_effect(name, after):
            continue
        if base not in results:
            results[base] = [(getattr(before, name), trained(before))]
        value, weights = getattr(after, name), trained(after)
        for other, theirs in results[base]:
            assert weights.shape != theirs.shape or not torch.equal(weights, theirs), (
                f"{typed(name)} {value} is ignored in a model like {base}, it trains as {other}: read it "
                "there, or refuse it in check() of config.py")
        results[base].append((value, weights))
    assert results, f"no model of BASES in tests/test_new_flag.py can have {typed(name)}"

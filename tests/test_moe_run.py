"""Runs with experts.

    checkpoints    save in one layout, load in another; upcycling a dense model
    recompute      routes once, also with equal scores
    flags          what is refused; parameters and operations counted
    files          what a run with experts writes and prints
"""
import contextlib
import dataclasses
import io
import json
import math
import signal
from unittest import mock

import numpy as np
import pytest
import test_layouts
import torch
from pool import run_ranks
from test_layouts import SIGMOID, assemble
from test_moe import ALONE, TINY, block, owned, whole_layer

import model as model_module
import moe
import train
from config import Config, check
from corpus.samples import Synthetic
from cost.parameters import count_parameters, flops_per_token
from interface.command_line import parse
from interface.layout import check_layout
from model import GPT, initial_weights
from ops.split_master import whole
from parallel import make_mesh
from runtime import launch, resume
from runtime.launch import World
from runtime.saver import Saver


def train_steps(cfg, mesh, steps, path=None, start=None):
    """Train `steps` steps on synthetic data. start: the checkpoint to load; path: the folder to save in
    Return (model, data_parallel, opt, stats of each step)."""
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, torch.device("cpu"))
    at = 0
    if start:
        at = resume.load(cfg, data_parallel, opt, start, "synthetic").step
        model.provide_weights(model)
    source, stats = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), []
    train_step = train.Step(cfg, model, data_parallel, opt)
    for step in range(at + 1, at + steps + 1):
        batches = train.micro_batches(cfg, mesh, source, (step - 1) * 8, 8, torch.device("cpu"))
        stats.append(torch.stack(train_step(batches, step)[0]).tolist())
    model.provide_weights(model)
    if path:
        saver = Saver(path, mesh.world.everyone)
        state = resume.State(at + steps, 8 * (at + steps), data="synthetic")
        resume.save(cfg, mesh, data_parallel, opt, saver, state)
        assert saver.wait()
    return model, data_parallel, opt, stats


def save_in_layout(world, flags, path):
    cfg = Config(**flags)
    _, data_parallel, opt, _ = train_steps(cfg, make_mesh(world, cfg.tp, cfg.pp, cfg.ep), 2, path)
    return owned(data_parallel, opt)


def load_in_layout(world, flags, path):
    cfg = Config(**flags)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    _, data_parallel, opt, _ = train_steps(cfg, mesh, 0, start=path)
    loaded = owned(data_parallel, opt)
    *_, stats = train_steps(cfg, mesh, 1, start=path)
    return dict(loaded, stats=stats)


LAYOUT_CHANGES = [  # ranks and layout that save, ranks and layout that load
    (4, dict(ep=4, zero=1), 4, dict(tp=2, ep=2)), (4, dict(pp=2, ep=2), 2, dict(tp=2, ep=1, zero=1))]


def check_load_in_other_layouts(n, layout, m, other, tmp_path):
    """Save in one layout; load in it, in another and on one rank: equal bits, and an equal next step."""
    base = dict(SIGMOID, n_layer=2, micro_batch=2)  # with a router bias, which is saved too
    saved = assemble(run_ranks(n, save_in_layout, dict(base, **layout), tmp_path))
    next_steps = []
    for ranks, flags in ((n, layout), (m, other), (1, {})):
        results = run_ranks(ranks, load_in_layout, dict(base, **flags), tmp_path / "step_000002")
        loaded = assemble(results)
        assert loaded.keys() == saved.keys()
        for name, t in saved.items():
            assert t.tobytes() == loaded[name].tobytes(), f"{name} after loading with {flags}"
        next_steps.append(results[0]["stats"])
    assert saved["blocks.1.moe.router.bias"].any()
    for stats in next_steps[1:]:
        for i in (0, 1, 3):  # loss, gradient norm, parameter norm
            assert math.isclose(stats[0][i], next_steps[0][0][i], rel_tol=1e-12), f"{stats}, {next_steps[0]}"


@pytest.mark.parametrize("n,layout,m,other", LAYOUT_CHANGES, ids=str)
def test_saved_in_one_layout_loads_in_another(n, layout, m, other, tmp_path):
    check_load_in_other_layouts(n, layout, m, other, tmp_path)


DENSE = dict(test_layouts.LLAMA, n_layer=2, micro_batch=2)


def upcycled_parameters(world, flags, path):
    """Return the message of upcycling, and this rank's parameters."""
    cfg = Config(**DENSE, **flags)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    message = resume.init_from(model, opt, path)
    opt.masters_to_model(), model.provide_weights(model)  # changes nothing if upcycling updated the masters
    return message, {n: p.detach().numpy() for n, p in model.named_parameters()}


def upcycled_masters(world, flags, path):
    """Return {"pieces": the fp32 masters that this rank owns} of an upcycled bf16 model."""
    cfg = Config(**dict(DENSE, dtype="bf16", n_experts=4, **flags))
    model, data_parallel, opt = train.build(cfg, make_mesh(world, ep=cfg.ep), cfg.vocab_size, world.device)
    resume.init_from(model, opt, path)
    assert all(torch.equal(whole(m).to(b.own.dtype), b.own) for m, b in
               zip(opt.masters, data_parallel.buckets, strict=True))
    return owned(data_parallel, opt)


@pytest.mark.parametrize("n, flags", [(1, {}), (2, dict(ep=2, zero=1)), (2, dict(zero=3))])
def test_upcycled_masters_keep_the_checkpoints_digits(n, flags, tmp_path):
    dense, *_ = train_steps(Config(**DENSE), ALONE, 2, tmp_path)
    weights = {name: p.detach().numpy() for name, p in dense.named_parameters()}
    got = assemble(run_ranks(n, upcycled_masters, flags, tmp_path / "step_000002"))
    np.testing.assert_allclose(got["wte.weight"], weights["wte.weight"], rtol=1e-6)
    for expert in got["blocks.0.moe.w1"]:
        np.testing.assert_allclose(expert, weights["blocks.0.mlp.w1.weight"], rtol=1e-6)


def test_upcycling_copies_the_mlp_into_every_expert(tmp_path):
    dense, *_ = train_steps(Config(**DENSE), ALONE, 2, tmp_path)
    path, weights = tmp_path / "step_000002", {n: p.detach().numpy() for n, p in dense.named_parameters()}
    for n, flags in ((1, {}), (4, dict(ep=2, zero=1, tp=2))):
        flags = dict(n_experts=4, n_shared_experts=1, **flags)
        for message, parameters in run_ranks(n, upcycled_parameters, flags, path):
            assert "\n" not in message and "each of 4 experts starts as that model's MLP" in message
            for name, p in parameters.items():
                if name.split(".")[-1] in ("w1", "w2", "w3"):
                    for expert in p:
                        np.testing.assert_array_equal(expert, weights[name.replace("moe", "mlp") + ".weight"])
    assert "each of 1 experts" in upcycled_parameters(World(), dict(n_experts=1, top_k=1), path)[0]
    cfg = Config(**DENSE, n_experts=4, router="softmax-topk")  # gates sum to one: the same function
    model, _, opt = train.build(cfg, ALONE, cfg.vocab_size, torch.device("cpu"))
    resume.init_from(model, opt, path)
    x, _ = Synthetic(cfg.vocab_size, cfg.seq_len, 1).batch(0, 2)
    torch.testing.assert_close(model(x)[0], dense(x)[0], rtol=0, atol=1e-12)
    layer = block(n_experts=4, n_embd=16, ffn_hidden=24, top_k=2)  # softmax: sum of the gates * the dense MLP
    for name in ("w1", "w3", "w2"):
        getattr(layer, name).data.copy_(torch.from_numpy(weights[f"blocks.0.mlp.{name}.weight"]))
    h = torch.randn(8, 16, dtype=torch.float64)
    want = layer.route(h)[0].sum(1, keepdim=True) * dense.blocks["0"].mlp(h)
    torch.testing.assert_close(whole_layer(layer, h)[0], want, rtol=0, atol=1e-12)


def test_a_start_from_damaged_weights_is_refused(tmp_path):
    train_steps(Config(**DENSE), ALONE, 2, tmp_path)
    path = next((tmp_path / "step_000002").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} differs from its crc32"):
        upcycled_parameters(World(), {}, tmp_path / "step_000002")


@pytest.mark.parametrize("there,here,words", [
    ({}, dict(ffn_hidden=32), "ffn-hidden"), ({}, dict(n_head=8), "n-head"), ({}, dict(mlp="gelu"), "mlp"),
    ({}, dict(n_layer=3), "n-layer"), (dict(bias=True), dict(bias=True), "biases"),
    (dict(n_experts=8), {}, "--n-experts 8")], ids=str)
def test_upcycling_from_another_shape_is_refused_in_one_line(there, here, words, tmp_path):
    train_steps(Config(**dict(DENSE, **there)), ALONE, 1, tmp_path)
    cfg = Config(**dict(DENSE, n_experts=4, **here))
    model, _, opt = train.build(cfg, ALONE, cfg.vocab_size, torch.device("cpu"))
    with pytest.raises(ValueError, match=words) as e:
        resume.init_from(model, opt, tmp_path / "step_000001")
    assert "\n" not in str(e.value)


def stats_and_routings(recompute, **flags):
    """One step -> {layer: its statistics}, number of calls of route(), stats of the step."""
    cfg = Config(**dict(TINY, recompute=recompute, **flags))
    calls = []
    route = moe.MoE.route
    with mock.patch.object(moe.MoE, "route", lambda self, x: calls.append(1) or route(self, x)):
        model, *_, stats = train_steps(cfg, ALONE, 1)
    return {i: layer.stats for i, layer in moe.moe_layers(model).items()}, len(calls), stats


@pytest.mark.parametrize("flags", [
    dict(), dict(capacity_factor=0.5), dict(router="sigmoid", router_bias_rate=0.1)], ids=str)
def test_recompute_routes_once(flags):
    plain, n_calls, stats = stats_and_routings("none", **flags)
    recomputed, n_calls_recomputed, stats_recomputed = stats_and_routings("full", **flags)
    assert n_calls == n_calls_recomputed == 2 * 4  # layers, micro-batches
    for i, s in recomputed.items():
        assert torch.equal(s, plain[i])
        assert s[:8].sum() == 8 * TINY["seq_len"] * TINY["top_k"]  # each copy is counted once
    assert stats_recomputed == stats


def test_recompute_with_tied_routing():
    def zero_routers(p, name, model, seed):
        weights = initial_weights(p, name, model, seed)
        return weights.zero_() if name.endswith("router.weight") else weights
    with mock.patch.object(model_module, "initial_weights", zero_routers):
        plain, _, stats = stats_and_routings("none", aux_coef=0.0)
        recomputed, _, stats_recomputed = stats_and_routings("full", aux_coef=0.0)
    assert stats_recomputed == stats and all(torch.equal(s, plain[i]) for i, s in recomputed.items())
    assert recomputed[0][2:8].sum() == 0  # all tokens went to experts 0 and 1


@pytest.mark.parametrize("argv,words", [
    ("tiny-moe --router softmax-topk --top-k 1", "--router softmax-topk with --top-k 1"),
    ("tiny-moe --top-k 9", "--top-k 8"), ("tiny --ep 2", "--n-experts 8"),
    ("tiny --n-shared-experts 1", "--n-experts 8"), ("tiny-moe --router-bias-rate 0.1", "--router sigmoid"),
    ("tiny-moe --init-from a --resume b", "one of them"),
    ("tiny-moe --capacity-factor -1", "at least 0"), ("tiny-moe --top-k 0", "at least 1")])
def test_wrong_expert_flags_are_refused(argv, words):
    with pytest.raises(ValueError) as e:
        parse(argv.split())
    assert words in str(e.value) and "\n" not in str(e.value)


INDIVISIBLE = [(4, dict(ep=3)), (8, dict(ep=8, n_experts=4)), (6, dict(ep=6)), (8, dict(tp=2, pp=2, ep=8))]


@pytest.mark.parametrize("n,flags", INDIVISIBLE, ids=str)
def test_ep_that_does_not_divide_is_refused_with_one_that_does(n, flags):
    cfg = Config(**dict(dict(n_experts=8), **flags))

    def layout(cfg):
        check(cfg)
        mesh = make_mesh(World(rank=0, size=n), cfg.tp, cfg.pp, cfg.ep, groups=False)
        check_layout(cfg, mesh, cfg.micro_batch * mesh.dp.size)
    with pytest.raises(ValueError, match=r"divide.*; try --ep \d+$") as e:
        layout(cfg)
    layout(dataclasses.replace(cfg, ep=int(str(e.value).split()[-1])))


def test_flops_count_the_experts_that_a_token_visits():
    def cost(**flags):
        return flops_per_token(Config(**flags), 256)[0]
    one = 6 * Config().n_layer * 3 * Config().n_embd * Config().ffn_hidden
    assert cost() == cost(n_experts=8, top_k=1) == cost(n_experts=64, top_k=1, capacity_factor=1.25)
    assert cost(n_experts=8, top_k=2) - cost() == one
    assert cost(n_experts=8, top_k=1, n_shared_experts=1) - cost() == one


def meta_parameters(cfg, vocab):
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(cfg, ALONE, vocab).parameters())


@pytest.mark.parametrize("flags", [
    dict(), dict(mlp="gelu", bias=True, norm="layer", tied=True, pos="learned"),
    dict(n_shared_experts=2, bias=True), dict(n_shared_experts=1, mlp="gelu"),
    dict(router="sigmoid", router_bias_rate=0.1)], ids=str)
def test_count_parameters_is_the_model(flags):
    cfg = Config(n_experts=8, **flags)
    assert count_parameters(cfg, 100)["total"] == meta_parameters(cfg, 100)


def test_parameters_of_moe_4b():
    cfg = parse(["moe-4b"])
    assert count_parameters(cfg, cfg.vocab_size)["total"] == meta_parameters(cfg, cfg.vocab_size)
    assert round(count_parameters(cfg, cfg.vocab_size)["total"] / 1e9, 3) == 4.376


SHORT = "--data synthetic --n-embd 32 --ffn-hidden 32 --seq-len 16 --micro-batch 2 --eval-every 0"


def train_main(world, argv):
    """train.main() on the pool's ranks -> its standard output."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as stdout, \
            mock.patch.object(launch, "launch", lambda *_, **__: world), \
            mock.patch.object(launch, "shutdown"), \
            mock.patch.object(launch, "started_by", lambda: ("torchrun", world.size)):
        train.main(argv.split())
        stdout.seek(0)
    for s, handler in handlers.items():
        signal.signal(s, handler)  # the pool ends its processes by SIGTERM, which train.main() catches
    return stdout.read()


def test_files_and_output_of_a_run_with_experts(tmp_path):
    argv = (f"tiny-moe {SHORT} --n-layer 2 --steps 3 --log-every 1 --save-every 0 --ep 2 "
            f"--capacity-factor 1.0 --z-coef 0.001 --out {tmp_path}/run")
    stdout, quiet = run_ranks(2, train_main, argv)
    out = tmp_path / "run"
    rows, layers = ([json.loads(line) for line in (out / name).read_text().splitlines()]
                    for name in ("metrics.jsonl", "experts.jsonl"))
    assert not quiet
    assert [r["step"] for r in rows] == [r["step"] for r in layers] == [1, 2, 3]
    for row, each in zip(rows, layers, strict=True):
        assert sorted(each["layers"]) == ["0", "1"]
        for layer in each["layers"].values():
            assert math.isclose(sum(layer["load"]), 1) and len(layer["load"]) == 8
            assert 0 < layer["entropy"] <= math.log(8) + 1e-6 and 0 < layer["dropped"] < 1
            assert 0.9 < layer["aux"] < 8 and 3.9 < layer["z"] < 5  # log(8)^2 = 4.3 for a new router
        for key, name in (("aux_loss", "aux"), ("z_loss", "z"), ("dropped", "dropped")):
            assert math.isclose(row[key], sum(layer[name] for layer in each["layers"].values()) / 2)
        heaviest = max(max(layer["load"]) for layer in each["layers"].values())
        assert math.isclose(row["expert_load_max"], 8 * heaviest)
    bars = (out / "expert_load.txt").read_text()
    assert bars.count("\nexpert ") == 8 and "heaviest layer" in bars and bars in stdout + "\n"


def test_init_from(tmp_path):
    short, start = f"{SHORT} --n-layer 1 --steps 1 --no-plot", f"{tmp_path}/dense/step_000001"
    run_ranks(1, train_main, f"tiny {short} --out {tmp_path}/dense")
    argv = f"tiny-moe {short} --ep 2 --init-from {start} --out {tmp_path}/moe"
    stdout, _ = run_ranks(2, train_main, argv)
    assert stdout.count(f"starts from the weights of {start}") == stdout.count("each of 8 experts") == 1
    assert "expert load" not in stdout and (tmp_path / "moe/expert_load.txt").exists()  # --no-plot

"""The experts against a loop over tokens, which is written from the papers and shares no line with moe.py.
"""
import contextlib
import dataclasses
import itertools
import math
import typing
from unittest import mock

import numpy as np
import pytest
import test_layouts
import torch
import torch.nn.functional as F
from pool import run_ranks
from test_layouts import MOE, assemble

import moe
import train
from config import Config, check
from corpus.samples import Synthetic
from fast import symm_mem
from fast.choose import Choice
from interface.layout import check_layout
from model import MLP
from ops import grouped_mm
from ops.split_master import whole
from parallel import make_mesh
from runtime import resume
from runtime.launch import World
from runtime.saver import Saver

ALONE = make_mesh(World(rank=0, size=1))
SMALL = dict(n_experts=8, n_embd=6, ffn_hidden=5, n_head=1, n_kv_head=1)
TINY = dict(MOE, n_layer=2, micro_batch=2)


# -----------------------------------------------------------------------------
# The loop over tokens, and a block that is compared with it

def route_token(logits, K, kind, bias=None):
    """One token's logits (E,) -> its K experts, best first (ties: lowest number), and their gates (K,)."""
    if kind == "sigmoid":
        score = logits.sigmoid()
        rank = (score if bias is None else score + bias).tolist()
    else:
        score = logits.exp() / logits.exp().sum()
        rank = logits.tolist()
    ids = sorted(range(len(rank)), key=lambda i: (-rank[i], i))[:K]
    p = torch.stack([score[i] for i in ids])
    if kind == "softmax-topk":
        chosen = torch.stack([logits[i] for i in ids]).exp()
        p = chosen / chosen.sum()
    if kind == "sigmoid" and K > 1:
        p = p / p.sum()
    return ids, p


def loop_over_tokens(x, router, expert, K, kind, bias=None, factor=0.0, policy="probs", shared=None):
    """Return output (T, C), balance loss, z-loss, {(token, expert)} dropped,
    [tokens per expert, without the bias]."""
    T, E = len(x), len(router)
    logits = [router @ x[t] for t in range(T)]
    chosen = [route_token(row, K, kind, bias) for row in logits]
    dropped = set()
    for i in range(E if factor else 0):
        queue = [(t, p[ids.index(i)].item()) for t, (ids, p) in enumerate(chosen) if i in ids]
        if policy == "probs":
            queue.sort(key=lambda entry: (-entry[1], entry[0]))
        dropped |= {(t, i) for t, _ in queue[min(math.ceil(T * K / E * factor), T):]}
    out = []
    for t in range(T):
        y = torch.zeros_like(x[t]) if shared is None else shared(x[t])
        for i, p in zip(*chosen[t], strict=True):
            if (t, i) not in dropped:
                y = y + p * expert(i, x[t])
        out.append(y)
    visits, share = [0] * E, [0.0] * E
    for row in logits:
        s = row.sigmoid() if kind == "sigmoid" else row.exp()
        for i in range(E):
            share[i] = share[i] + s[i] / s.sum()
        for i in route_token(row, K, kind)[0]:
            visits[i] += 1
    aux = E / (K * T**2) * sum(s * c for s, c in zip(share, visits, strict=True))
    z = sum(row.exp().sum().log() ** 2 for row in logits) / T
    return torch.stack(out), aux, z, dropped, visits


def block(mesh=ALONE, **flags):
    """A MoE block in fp64 with seeded weights, the same in every layout."""
    cfg = Config(**dict(SMALL, **flags))
    shared = MLP(cfg, ALONE, cfg.n_shared_experts * cfg.ffn_hidden) if cfg.n_shared_experts else None
    layer = moe.MoE(cfg, mesh, shared).double()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            full = torch.randn(p.full_shape, dtype=torch.float64, generator=rng)
            p.copy_(full[test_layouts.equality.slices(p.offset, p.shape)])
    return layer


def tokens(kind, layer, T=10):
    """Return x (T, C). Set the router's weights for plain, skewed (the same K for all) or tied routing."""
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(T, layer.cfg.n_embd, dtype=torch.float64, generator=rng)
    weight = layer.router.weight.data
    if kind == "skewed":
        x[:, 0] = 1.0
        weight.mul_(0.05)[:, 0] = -torch.arange(float(layer.E)).double()
    if kind == "ties":  # small whole numbers: exact logits, equal rows, a row of zeros
        x.copy_(torch.randint(-1, 2, x.shape, generator=rng))
        x[2], x[5:8] = 0.0, x[4]
        weight.copy_(torch.randint(-1, 2, weight.shape, generator=rng))
        weight[3] = weight[1]
    return x.requires_grad_()


def whole_layer(layer, x):
    """What a block does with its experts: x (n, C) -> output (n, C), router loss ()."""
    gates, expert_ids, router_loss = layer.route(x)
    return layer(x, gates, expert_ids), router_loss


def assert_equals_loop(layer, x, what):
    """Assert that a block's output, losses, dropped copies and gradients equal the loop's.
    Return [tokens per expert], number of dropped copies."""
    cfg, weight = layer.cfg, layer.router.weight
    mlp = layer.shared

    def expert(i, row):
        h = layer.w1[i] @ row
        return layer.w2[i] @ (F.gelu(h, approximate="tanh") if layer.w3 is None
                              else h * h.sigmoid() * (layer.w3[i] @ row))

    def shared(row):
        h = mlp.w1.weight @ row
        return mlp.w2.weight @ (F.gelu(h, approximate="tanh") if mlp.w3 is None
                                else h * h.sigmoid() * (mlp.w3.weight @ row))

    bias = None if layer.router.bias is None else layer.router.bias.double()
    y, router_loss = whole_layer(layer, x)
    want, balance, z, dropped, visits = loop_over_tokens(
        x, weight, expert, cfg.top_k, cfg.router, bias, cfg.capacity_factor, cfg.drop_policy,
        shared if mlp else None)
    losses = cfg.aux_coef * balance + cfg.z_coef * z
    seed = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    inputs = {"x": x, **dict(layer.named_parameters())}
    ours, theirs = (torch.autograd.grad((out * seed).sum() + loss, list(inputs.values()), allow_unused=True)
                    for out, loss in ((y, router_loss), (want, losses)))
    pairs = {"output": (y, want), "aux": (router_loss, losses),
             **{f"gradient of {n}": (a, torch.zeros_like(a) if b is None else b)
                for n, a, b in zip(inputs, ours, theirs, strict=True)}}
    for name, (a, b) in pairs.items():
        error = (a - b).abs().max().item()
        assert error <= 1e-12 * max(1.0, b.abs().max().item()), f"{what}: {name} differs by {error}"
    count = layer.dispatcher.n_dropped.item()
    assert count == len(dropped), f"{what}: {count} copies dropped, {len(dropped)} in the loop"
    return visits, len(dropped)


MODES = [dict(), *(dict(capacity_factor=c, drop_policy=p) for c, p in (
    (0.5, "probs"), (8.0, "probs"), (0.3, "position")))]

ROUTERS = [(router, K) for router in ("softmax", "softmax-topk", "sigmoid", "sigmoid bias")
           for K in (1, 2, 4) if (router, K) != ("softmax-topk", 1)]  # check() refuses this combination


def test_every_router_has_a_plain_twin():
    """If this fails, a new value of --router is not among ROUTERS, and route_token does not compute it."""
    values = typing.get_args(Config.__annotations__["router"])
    assert {router.split()[0] for router, _ in ROUTERS} == set(values)


@pytest.mark.parametrize("router,K", ROUTERS)
def test_block_equals_the_loop_over_tokens(router, K):
    for kind in ("plain", "skewed", "ties"):
        for mode in MODES:
            layer = block(router=router.split()[0], top_k=K, router_bias_rate=0.1 * ("bias" in router),
                          aux_coef=0.3, z_coef=0.1, n_shared_experts=int(K == 4),
                          mlp="gelu" if kind == "plain" and K == 2 else "swiglu", **mode)
            if layer.router.bias is not None:
                layer.router.bias.copy_(torch.tensor([0.25, -0.25, 0.5, 0, 0, 0.125, -0.5, 0]))
            x = tokens(kind, layer)
            visits, dropped = assert_equals_loop(layer, x, f"{kind} {mode}")
            if kind == "skewed":  # all tokens choose the same K experts
                assert visits == [10] * K + [0] * (8 - K)
                capacity = math.ceil(10 * K / 8 * mode["capacity_factor"]) if mode else 10
                assert "bias" in router or dropped == K * max(0, 10 - capacity)


# -----------------------------------------------------------------------------
# The losses

@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("router", ["softmax", "softmax-topk", "sigmoid"])
def test_balance_loss_is_1_when_balanced_E_over_K_when_collapsed(router, K):
    layer = block(router=router, top_k=K, aux_coef=1.0, n_embd=8)
    layer.router.weight.data.copy_(torch.eye(8))
    v = torch.linspace(2, -2, 8, dtype=torch.float64)
    balanced = torch.stack([v.roll(i) for i in range(8)])  # each expert is the first choice of one token
    torch.testing.assert_close(whole_layer(layer, balanced)[1].item(), 1.0, rtol=0, atol=1e-14)
    collapsed = torch.full((16, 8), -50.0, dtype=torch.float64)
    collapsed[:, :K] = 50.0  # the other experts' probabilities are of the order of exp(-100)
    torch.testing.assert_close(whole_layer(layer, collapsed)[1].item(), 8 / K, rtol=0, atol=1e-13)


@pytest.mark.parametrize("n, K, E, factor, rows", [
    (100, 2, 4, 1.1, 55), (1000, 6, 8, 1.1, 825), (100, 2, 4, 1.25, 63), (10, 1, 4, 1e-3, 1),
    (4, 2, 2, 9.0, 4)])
def test_the_capacity_is_exact(n, K, E, factor, rows):
    """In floats 100 * 2 / 4 * 1.1 is more than 55. No expert takes more rows than there are."""
    assert moe.expert_capacity(Config(top_k=K, n_experts=E, capacity_factor=factor), n) == rows


def owned(data_parallel, opt, vectors=None):
    """Return {"pieces": what this rank owns}, as assemble() takes it."""
    return {"pieces": [(name, whole(t).numpy().copy(), full, offset)
                       for name, t, full, offset in resume.own_pieces(data_parallel, opt, vectors)]}


@pytest.mark.parametrize("flags", [
    dict(top_k=2), dict(top_k=2, router="sigmoid", router_bias_rate=0.1, n_shared_experts=1),
    dict(top_k=2, capacity_factor=1.0), dict(top_k=1, capacity_factor=1.0, drop_policy="position")],
    ids=["softmax", "sigmoid", "probs", "position"])
def test_the_layer_without_its_padding(flags):
    layer = block(aux_coef=0.5, z_coef=0.1, **flags)
    x = tokens("skewed", layer, T=12)
    real = torch.ones(12, dtype=torch.bool)
    real[[3, 4, 5, 10, 11]] = False
    seed = torch.randn(12, layer.cfg.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    seed[~real] = 0.0

    found = []
    for rows, places in ((x, real.long().view(2, 6)), (x[real], None)):
        for total in (layer.stats, layer.dispatcher.n_dropped):
            total.zero_()
        gates, expert_ids, router_loss = layer.route(rows, places)
        if places is None:  # as many places for each expert as all rows have
            factor = layer.cfg.capacity_factor * len(x) / len(rows)
            layer.dispatcher.cfg = dataclasses.replace(layer.cfg, capacity_factor=factor)
        y = layer(rows, gates, expert_ids)
        seeds = seed if places is not None else seed[real]
        grad_x, = torch.autograd.grad((y * seeds).sum() + router_loss, x)
        y = y[real] if places is not None else y
        found.append([router_loss, layer.stats.clone(), layer.dispatcher.n_dropped.clone(), y, grad_x])
    for ours, alone in zip(*found, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-12, atol=1e-13)
    assert not found[0][-1][~real].any(), "padding has a gradient"
    assert flags.get("capacity_factor", 0) == 0 or found[0][2] > 0, "nothing was dropped"


def test_router_bias_moves_towards_balance():
    layer = block(router="sigmoid", router_bias_rate=0.01)
    model = torch.nn.Module()
    model.blocks = {"0": mock.Mock(moe=layer)}
    layer.stats[:8].copy_(torch.tensor([12.0, 1, 5, 5, 5, 4, 4, 4]))  # 5 is their mean; their median is 4
    moe.update_router_bias(model, 0.01, torch.zeros(()))
    expected = torch.tensor([-0.01, 0.01, 0, 0, 0, 0.01, 0.01, 0.01])
    torch.testing.assert_close(layer.router.bias.float(), expected)
    moe.update_router_bias(model, 0.01, torch.ones(()))  # a refused step leaves the bias unchanged
    torch.testing.assert_close(layer.router.bias.float(), expected)


# -----------------------------------------------------------------------------
# The ranks

def block_over_ep(world, ep, flags, kind, slack=0.0):
    """A block over ep; each rank has rows of its own. slack: symmetric memory with buffers for so many times
    the balanced rows -> {output, gradient of x, gradients summed over the ranks}, rows received."""
    mesh = make_mesh(world, ep=ep)
    one_sided = Choice(graph=True, symm_mem=True, peer_copies=False, single_microbatch=False)
    layer, rows = block(mesh, aux_coef=0.3, **flags), []
    x = (tokens(kind, layer).detach() + 0.01 * (1 + world.rank)).requires_grad_()
    if slack:
        one_sided.install_dispatcher(layer)
        layer.dispatcher.rows_in_use = int(slack * x.size(0) * layer.K)
        symm_mem.allocate([layer], layer.dispatcher.rows_in_use + 3)
    ffn = layer.ffn
    layer.ffn = lambda x, *more: rows.append(x.size(0)) or ffn(x, *more)
    y, router_loss = whole_layer(layer, x)
    (y.square().sum() + router_loss).backward()
    assert not slack or layer.dispatcher.rows_needed <= layer.dispatcher.rows_in_use
    grads = {}
    for name, p in layer.named_parameters():
        whole = torch.zeros(p.full_shape, dtype=torch.float64)
        if p.grad is not None:
            whole[test_layouts.equality.slices(p.offset, p.shape)] = p.grad
        if world.size > 1:
            torch.distributed.all_reduce(whole)
        grads[name] = whole.numpy()
    return {"y": y.detach().numpy(), "x": x.grad.numpy(), **grads}, rows[0]


@pytest.mark.parametrize("mode", [dict(), dict(capacity_factor=0.5)], ids=["dropless", "capacity"])
@pytest.mark.parametrize("kind", ["skewed", "plain"])
def test_every_ep_gives_the_same_output_and_gradients(kind, mode):
    want = run_ranks(4, block_over_ep, 1, mode, kind)
    for ep in (2, 4):
        got = run_ranks(4, block_over_ep, ep, mode, kind)
        for (mine, _), (theirs, _) in zip(got, want, strict=True):
            for name, a in mine.items():
                np.testing.assert_allclose(a, theirs[name], rtol=0, atol=1e-11, err_msg=name)
        if kind == "skewed" and not mode:  # experts 0 and 1 get all rows, the other ranks receive none
            assert [rows for _, rows in got] == {2: [40, 0, 40, 0], 4: [80, 0, 0, 0]}[ep]


class GroupedGemmWithGarbage(torch.autograd.Function):
    """torch's grouped GEMM, forward and backward: rows past the last offset hold what was in memory."""

    @staticmethod
    def forward(ctx, x, w, offs):
        assert offs.dtype == torch.int32
        ctx.save_for_backward(x, w, offs)
        offs = [0, *offs.tolist()]
        if w.ndim == 2:  # (O, R), (R, I) -> (e, O, I)
            return torch.stack([x[:, a:b] @ w[a:b] for a, b in itertools.pairwise(offs)])
        y = torch.full((x.size(0), w.size(2)), torch.nan, dtype=x.dtype)
        for i, (a, b) in enumerate(itertools.pairwise(offs)):
            y[a:b] = x[a:b] @ w[i]
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, offs = ctx.saved_tensors
        mm = GroupedGemmWithGarbage.apply
        return mm(g, w.transpose(1, 2), offs), mm(x.t(), g, offs), None


@contextlib.contextmanager
def gpu_branches():
    """Take the branches that a GPU takes, with a grouped GEMM that leaves garbage."""
    def mm(x, w, offs):
        return GroupedGemmWithGarbage.apply(x, w, offs)
    with mock.patch.object(moe, "use_grouped_mm", lambda x, w: True), \
            mock.patch.object(grouped_mm, "use_grouped_mm", lambda x, w: True), \
            mock.patch.object(grouped_mm, "use_torch", lambda x, w: True), \
            mock.patch.object(F, "grouped_mm", mm, create=True):
        yield


@pytest.mark.parametrize("mode", [dict(), dict(capacity_factor=0.5)], ids=["dropless", "capacity"])
@pytest.mark.parametrize("kind", ["plain", "skewed"])
def test_gpu_branches_equal_the_loop_over_tokens(kind, mode):
    with gpu_branches():
        layer = block(top_k=2, aux_coef=0.3, **mode)
        assert_equals_loop(layer, tokens(kind, layer), f"{kind} {mode}")


# -----------------------------------------------------------------------------
# Recompute

def train_steps(cfg, steps, path=None):
    """Train `steps` steps on synthetic data in one process. path: the folder to save in, or None
    Return (model, stats of each step)."""
    model, data_parallel, opt = train.build(cfg, ALONE, cfg.vocab_size, torch.device("cpu"))
    source, stats = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), []
    train_step = train.Step(cfg, model, data_parallel, opt)
    for step in range(1, steps + 1):
        batches = train.micro_batches(cfg, ALONE, source, (step - 1) * 8, 8, torch.device("cpu"))
        stats.append(torch.stack(train_step(batches, step)[0]).tolist())
    if path:
        saver = Saver(path, ALONE.world.everyone)
        state = resume.State(steps, 8 * steps, data="synthetic")
        resume.save(cfg, ALONE, data_parallel, opt, saver, state)
        assert saver.wait()
    return model, stats


def stats_and_routings(recompute, **flags):
    cfg = Config(**dict(TINY, recompute=recompute, **flags))
    calls = []
    forward = moe.Router.forward
    with mock.patch.object(moe.Router, "forward", lambda *args: calls.append(1) or forward(*args)):
        model, stats = train_steps(cfg, 1)
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


# -----------------------------------------------------------------------------
# Upcycling a dense model

DENSE = dict(test_layouts.LLAMA, n_layer=2, micro_batch=2)


def upcycled_parameters(world, flags, path):
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


@pytest.mark.parametrize("n, flags", [(2, dict(ep=2, zero=1)), (2, dict(zero=3))])
def test_upcycled_masters_keep_the_checkpoints_digits(n, flags, tmp_path):
    dense, _ = train_steps(Config(**DENSE), 2, tmp_path)
    weights = {name: p.detach().numpy() for name, p in dense.named_parameters()}
    got = assemble(run_ranks(n, upcycled_masters, flags, tmp_path / "step_000002"))
    np.testing.assert_allclose(got["wte.weight"], weights["wte.weight"], rtol=1e-6)
    for expert in got["blocks.0.moe.w1"]:
        np.testing.assert_allclose(expert, weights["blocks.0.mlp.w1.weight"], rtol=1e-6)


def test_upcycling_copies_the_mlp_into_every_expert(tmp_path):
    dense, _ = train_steps(Config(**DENSE), 2, tmp_path)
    path, weights = tmp_path / "step_000002", {n: p.detach().numpy() for n, p in dense.named_parameters()}
    for n, flags in ((1, {}), (4, dict(ep=2, zero=1, tp=2))):
        flags = dict(n_experts=4, n_shared_experts=1, **flags)
        for message, parameters in run_ranks(n, upcycled_parameters, flags, path):
            assert "\n" not in message
            for name, p in parameters.items():
                if name.split(".")[-1] in ("w1", "w2", "w3"):
                    for expert in p:
                        np.testing.assert_array_equal(expert, weights[name.replace("moe", "mlp") + ".weight"])
    upcycled_parameters(World(), dict(n_experts=1, top_k=1), path)
    cfg = Config(**DENSE, n_experts=4, router="softmax-topk")  # gates sum to one: the same function
    model, _, opt = train.build(cfg, ALONE, cfg.vocab_size, torch.device("cpu"))
    resume.init_from(model, opt, path)
    x, _ = Synthetic(cfg.vocab_size, cfg.seq_len, 1).batch(0, 2)
    torch.testing.assert_close(model(x)[0], dense(x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("there,here,words", [
    ({}, dict(ffn_hidden=32), "ffn-hidden"), (dict(bias=True), dict(bias=True), "biases"),
    (dict(n_experts=8), {}, "--n-experts 8")], ids=str)
def test_upcycling_from_another_shape_is_refused_in_one_line(there, here, words, tmp_path):
    train_steps(Config(**dict(DENSE, **there)), 1, tmp_path)
    cfg = Config(**dict(DENSE, n_experts=4, **here))
    model, _, opt = train.build(cfg, ALONE, cfg.vocab_size, torch.device("cpu"))
    with pytest.raises(ValueError, match=words) as e:
        resume.init_from(model, opt, tmp_path / "step_000001")
    assert "\n" not in str(e.value)


# -----------------------------------------------------------------------------
# Runs

@pytest.mark.parametrize("n,flags", [
    (4, dict(ep=3)), (8, dict(ep=8, n_experts=4)), (8, dict(tp=2, pp=2, ep=8))], ids=str)
def test_ep_that_does_not_divide_is_refused(n, flags):
    cfg = Config(**dict(dict(n_experts=8), **flags))
    check(cfg)
    with pytest.raises(ValueError, match="divide"):
        check_layout(cfg, n)

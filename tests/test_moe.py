"""The experts against a loop over tokens, which is written from the papers and shares no line with moe.py.

    the loop       output and every gradient in fp64, every router, both modes, skewed and tied routing
    the losses     their scale, what they depend on, and that every layout gives the same gradient
    the ranks      every ep gives the same results, a rank without a token, garbage rows, equal bits

test_moe_run.py has the tests of runs with experts.
"""
import contextlib
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
from shared import one_process_model
from test_layouts import MOE, assemble

import moe
import parallel
import train
from config import Config
from corpus.samples import Synthetic
from fast import symm_mem
from fast.choose import Choice
from model import MLP
from ops import grouped_mm
from ops.split_master import whole
from parallel import make_mesh
from pipeline import forward_backward
from runtime import resume
from runtime.launch import World

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
    (0.5, "probs"), (1.0, "probs"), (8.0, "probs"), (0.3, "position"), (1.25, "position")))]


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


def test_ties_go_to_the_lowest_expert_and_the_earlier_row():
    for policy in ("probs", "position"):
        for router in ("softmax", "sigmoid", "softmax-topk"):
            layer = block(router=router, top_k=2, capacity_factor=1.0, drop_policy=policy)
            layer.router.weight.data.zero_()
            x = torch.randn(8, 6, dtype=torch.float64)
            p, ids, _ = layer.route(x)
            assert ids.tolist() == [[0, 1]] * 8
            plan = layer.dispatcher.plan(ids, p)
            kept = plan.inv_perm.view(8, 2) < 8 * moe.expert_capacity(layer.cfg, 8)
            assert kept.tolist() == [[True, True]] * 2 + [[False, False]] * 6  # capacity 8*2/8 = 2 rows


# -----------------------------------------------------------------------------
# The losses

def aux_of(x, **flags):
    """Return balance loss of x, the router's gradient, the layer's statistics, number of dropped copies."""
    layer = block(**dict(dict(aux_coef=1.0), **flags))
    layer.router.weight.data.zero_()[:, :6] = torch.eye(8, 6, dtype=torch.float64)
    y, router_loss = whole_layer(layer, x)
    router_loss.backward()
    return router_loss.item(), layer.router.weight.grad, layer.stats, layer.dispatcher.n_dropped.item()


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


def test_balance_loss_does_not_depend_on_the_capacity():
    x = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    router_loss, grad, stats, _ = aux_of(x)
    for factor in (0.25, 1.0, 4.0):
        for policy in ("probs", "position"):
            same_aux, g, s, dropped = aux_of(x, capacity_factor=factor, drop_policy=policy)
            assert same_aux == router_loss and torch.equal(g, grad) and torch.equal(s, stats)
            assert (dropped > 0) == (factor < 4)


def test_z_loss_is_the_mean_square_of_logsumexp():
    x = torch.randn(16, 6, dtype=torch.float64)
    layer = block(aux_coef=0.0, z_coef=0.5)
    logits = x @ layer.router.weight.T
    torch.testing.assert_close(whole_layer(layer, x)[1], 0.5 * torch.logsumexp(logits, 1).square().mean())
    layer.router.weight.data.zero_()
    torch.testing.assert_close(whole_layer(layer, x)[1].item(), 0.5 * math.log(8) ** 2)


class SameBatch:
    """A data source whose micro-batches are all equal: the mean over any number of them is that of one."""
    has_documents = False

    def __init__(self, cfg):
        self.pair = Synthetic(cfg.vocab_size, cfg.seq_len, 1).batch(0, cfg.micro_batch)

    def batch(self, first, n):
        return self.pair


def aux_gradient(world, layout, n):
    """Return {"pieces": this rank's gradients} of n micro-batches with the cross-entropy times zero."""
    cfg = Config(**TINY, **layout)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    forward = model.forward

    def without_cross_entropy(*args, **kwargs):
        out, router_loss = forward(*args, **kwargs)
        return (out * 0.0 if model.has_head else out), router_loss
    with mock.patch.object(model, "forward", without_cross_entropy):
        count = n * cfg.micro_batch * mesh.dp.size
        batches = train.micro_batches(cfg, mesh, SameBatch(cfg), 0, count, world.device)
        data_parallel.reset()
        forward_backward(model, data_parallel, batches, 1)
        data_parallel.finish_grad_sync()
    return owned(data_parallel, opt, {"": opt.grads})


def owned(data_parallel, opt, vectors=None):
    """Return {"pieces": what this rank owns}, as assemble() takes it."""
    return {"pieces": [(name, whole(t).numpy().copy(), full, offset)
                       for name, t, full, offset in resume.own_pieces(data_parallel, opt, vectors)]}


AUX_LAYOUTS = [(1, 2, {}), (2, 1, {}), (2, 2, dict(tp=2)), (2, 2, dict(pp=2)),
               (4, 2, dict(tp=2, ep=4, zero=1))]


def check_aux_gradient(n, micro_batches, layout):
    """Compare a layout with autograd on the bare model: one micro-batch, nothing divided, nothing summed."""
    model = one_process_model(Config(**TINY))
    model(*SameBatch(model.cfg).pair)[1].backward()
    want = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    got = assemble(run_ranks(n, aux_gradient, layout, micro_batches))
    assert want["blocks.0.moe.router.weight"].norm() > 1e-6
    for name, g in want.items():
        error = (torch.from_numpy(got[name]) - g).abs().max().item()
        scale = max(1e-3, g.abs().max().item())
        assert error <= 1e-12 * scale, f"{name}: the balance loss's gradient is wrong by {error}"


@pytest.mark.parametrize("n,micro_batches,layout", AUX_LAYOUTS, ids=str)
def test_aux_gradient_alone_is_the_same_in_every_layout(n, micro_batches, layout):
    check_aux_gradient(n, micro_batches, layout)


def test_router_bias_moves_towards_balance():
    layer = block(router="sigmoid", router_bias_rate=0.01)
    model = torch.nn.Module()
    model.blocks = {"0": mock.Mock(moe=layer)}
    layer.stats[:8].copy_(torch.tensor([9.0, 1, 5, 5, 5, 5, 5, 5]))
    moe.update_router_bias(model, 0.01, torch.zeros(()))
    torch.testing.assert_close(layer.router.bias.float(), torch.tensor([-0.01, 0.01, 0, 0, 0, 0, 0, 0]))
    moe.update_router_bias(model, 0.01, torch.ones(()))  # a refused step leaves the bias unchanged
    torch.testing.assert_close(layer.router.bias.float(), torch.tensor([-0.01, 0.01, 0, 0, 0, 0, 0, 0]))


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


def all_to_all_of_no_rows(world):
    mesh = make_mesh(world, ep=2)
    x = torch.empty(0, 3, requires_grad=True)
    y = parallel.all_to_all(x, mesh.ep, [0, 0], [0, 0])
    y.sum().backward()
    one = torch.full((1 + world.rank, 2), float(world.rank), requires_grad=True)
    receive = [[0, 0], [1, 2]][world.rank]  # rank 1 receives all rows
    z = parallel.all_to_all(one, mesh.ep, [0, 1 + world.rank], receive)
    (z * 2).sum().backward()
    return tuple(y.shape), tuple(x.grad.shape), z.detach()[:, 0].tolist(), one.grad.tolist()


def test_all_to_all_of_zero_rows():
    first, second = run_ranks(2, all_to_all_of_no_rows)
    assert first == ((0, 3), (0, 3), [], [[2.0, 2.0]])
    assert second == ((0, 3), (0, 3), [0.0, 1.0, 1.0], [[2.0, 2.0]] * 2)


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


def run_gpu_branches(world, flags):
    with gpu_branches():
        return test_layouts.run(world, flags, 8)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_garbage_rows_of_a_grouped_gemm_do_not_spread(mlp):
    for n, layout in ((1, {}), (4, dict(ep=4))):
        flags = dict(TINY, mlp=mlp, **layout)
        want = run_ranks(n, test_layouts.run, flags, 8)
        for mine, theirs in zip(run_ranks(n, run_gpu_branches, flags), want, strict=True):
            torch.testing.assert_close(mine["stats"], theirs["stats"], rtol=1e-12, atol=0)
            assert all(math.isfinite(v) for row in mine["stats"] for v in row)


@pytest.mark.parametrize("mode", [dict(), dict(capacity_factor=0.5)], ids=["dropless", "capacity"])
@pytest.mark.parametrize("kind", ["plain", "skewed"])
def test_gpu_branches_equal_the_loop_over_tokens(kind, mode):
    with gpu_branches():
        layer = block(top_k=2, aux_coef=0.3, **mode)
        assert_equals_loop(layer, tokens(kind, layer), f"{kind} {mode}")


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no F.grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 0, 0, 5], [0, 8, 0, 0], [2, 2, 2, 2], [0, 0, 0, 8]], ids=str)
def test_grouped_gemm_of_torch_is_as_exact_as_a_loop_over_experts(dtype, sizes):
    rng = torch.Generator().manual_seed(7)
    x, w, g = (torch.randn(s, dtype=torch.float64, generator=rng) for s in ((8, 16), (4, 24, 16), (8, 24)))
    offs = torch.tensor(sizes).cumsum(0)

    def results(matmul, dtype):
        a, b = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        y = matmul(a, b)
        return [t.double() for t in (y, *torch.autograd.grad(y, (a, b), g.to(dtype)))]
    true = results(lambda a, b: grouped_mm.grouped_mm_loop(a, b, offs), torch.float64)
    slow = results(lambda a, b: grouped_mm.grouped_mm_loop(a, b, offs), dtype)
    fast = results(lambda a, b: F.grouped_mm(a, b.transpose(1, 2), offs=offs.to(torch.int32)), dtype)
    for t, s, f in zip(true, slow, fast, strict=True):  # the tolerance is twice the loop's rounding error
        assert (f - t).abs().max() <= 2 * (s - t).abs().max()
        assert torch.equal(f[t == 0], t[t == 0])  # an expert without rows has gradient zero, not garbage


def test_grouped_mm_without_rows():
    x, w = torch.empty(0, 16, requires_grad=True), torch.randn(4, 24, 16, requires_grad=True)
    y = grouped_mm.grouped_mm(x, w, torch.zeros(4, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, 24) and x.grad.shape == (0, 16) and not w.grad.any()


@pytest.mark.parametrize("factor", [0.0, 0.75], ids=["dropless", "capacity"])
def test_two_runs_give_the_same_bits(factor):
    flags = dict(TINY, ep=2, dtype="fp32", capacity_factor=factor)
    one, two = (run_ranks(2, test_layouts.run, flags, 8) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert a["stats"] == b["stats"] and len(a["pieces"]) == len(b["pieces"])
        for (name, s, _, _), (_, t, _, _) in zip(a["pieces"], b["pieces"], strict=True):
            assert s.tobytes() == t.tobytes(), name

"""fp16: a run equals the fp32 run of the same layout but for rounding; the loss scale, its counter, a resume.

A wrong factor of 65536, or of 2, hides from Adam's update, which does not depend on the gradients' size. It
shows in the gradient norm, the clipped moments and the dumped gradients. At the end: the other two sums that
must be wider than their terms, the cross-entropy of bf16 logits and the norm on a CPU.
"""
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pool import run_ranks
from runs import go, rows, same
from safetensors.torch import load_file
from test_layouts import GPT2, LLAMA, MOE, SIGMOID, assemble, equality

import checkpoint
import moe
import train
from config import Config
from corpus.samples import Synthetic
from layers import vocab_cross_entropy
from ops.split_master import whole
from parallel import make_mesh
from runtime.launch import World
from runtime.resume import State, own_pieces
from skip import Guard

STEPS, SCALE = 3, 65536.0
# Updates are small, so that the two runs stay near each other
DENSE, TIED, EXPERTS, BIASED = (dict(base, n_layer=2, micro_batch=2, lr=1e-4)
                                for base in (LLAMA, GPT2, MOE, SIGMOID))
EXPERTS.update(aux_coef=1.0, z_coef=0.3)  # their gradients are then as large as the cross-entropy's


def fixed_choice(scores, K):
    """In the place of moe.stable_top_k: rounding must not send a token to another expert."""
    n, E = scores.shape
    return (torch.arange(n)[:, None] ** 2 + 3 * torch.arange(K)) % E


def train_in(world, dtype, flags, batch):
    """STEPS steps -> {stats, pieces, experts} of this rank; gradients as the optimizer gets them."""
    cfg = Config(**dict(flags, dtype=dtype), global_batch=batch)
    mesh, source = make_mesh(world, cfg.tp, cfg.pp, cfg.ep), Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    seen, step = {"stats": [], "pieces": [], "experts": []}, train.Step(cfg, model, data_parallel, opt)

    def keep(prefix, vectors):
        pieces = own_pieces(data_parallel, opt, vectors)
        seen["pieces"] += [(prefix + name, equality.to_numpy(t), *at) for name, t, *at in pieces]

    with mock.patch.object(moe, "stable_top_k", fixed_choice):
        for number in range(1, STEPS + 1):
            batches = train.micro_batches(cfg, mesh, source, (number - 1) * batch, batch, world.device)
            step.before_update = lambda n: keep(f"gradient {n} ", {"": map(opt.unscale, opt.grads)})
            stats, refused = step(batches, number)
            assert not refused, "no step may overflow"
            seen["stats"].append(torch.stack(stats).tolist())
            if cfg.n_experts:
                seen["experts"].append(moe.expert_stats(model, batch // cfg.micro_batch))
    model.provide_weights(model)
    keep(f"end {dtype} ", None)
    for m, b in zip(opt.masters, data_parallel.buckets, strict=True):
        assert torch.equal(whole(m).to(b.flat.dtype), b.flat[b.own_slice]), "the model has them rounded"
    assert opt.scaler() == ([SCALE, STEPS] if dtype == "fp16" else None)
    return seen


def near(got, want, share, what):
    """Assert that the root mean square of the difference is at most this share of want's."""
    got, want = np.asarray(got, float), np.asarray(want, float)
    off, size = (np.sqrt(np.square(x).mean()) for x in (got - want, want))
    assert off <= share * size, f"{what}: off by {off / size:.3g}, at most {share:g} is rounding"


RUNS = {  # name: (model, ranks, layout)
    "dense": (DENSE, 1, {}), "recompute": (DENSE, 1, dict(recompute="full")),
    "zero 1": (DENSE, 2, dict(zero=1)), "tp 2": (DENSE, 2, dict(tp=2)), "pp 2": (TIED, 2, dict(pp=2)),
    "moe": (EXPERTS, 1, {}), "moe tp 2": (EXPERTS, 2, dict(tp=2)),
    "moe pp 2": (EXPERTS, 2, dict(pp=2)), "moe ep 2": (EXPERTS, 2, dict(ep=2, zero=1)),
    "router bias": (BIASED, 2, dict(ep=2))}


@pytest.mark.parametrize("name", RUNS)
def test_fp16_equals_fp32_but_for_rounding(name):
    base, n, layout = RUNS[name]
    wide, half = (run_ranks(n, train_in, dtype, dict(base, **layout), 8) for dtype in ("fp32", "fp16"))
    a, b = np.array(wide[0]["stats"]), np.array(half[0]["stats"])
    near(b[:, 0], a[:, 0], 1e-4, "loss")
    near(b[:, 1], a[:, 1], 5e-3, "gradient norm")
    near(b[:, 3], a[:, 3], 1e-6, "norm of the masters")
    np.testing.assert_allclose(b[:, 2], a[:, 2], atol=64, err_msg="zero gradients")
    assert (a[:, 1] > 2 * base["clip"]).all(), "clipping must be active"
    want, got = assemble(wide), assemble(half)
    for name, t in want.items():
        if "wk.bias" in name:
            continue  # its gradient is zero but for rounding
        kind, other = name.split("/")[0], name.replace("end fp32", "end fp16")
        if not name.startswith("gradient 1") and kind.startswith("gradient"):
            share = 0.05  # the weights have begun to differ
        else:
            share = {"end fp32 exp_avg": 0.04, "end fp32 exp_avg_sq": 0.08}.get(kind, 0.01)
        near(got[other], t, share, name)
    for one, two in zip(wide[0]["experts"], half[0]["experts"], strict=True):
        for layer in one:
            for key, value in one[layer].items():
                np.testing.assert_allclose(two[layer][key], value, rtol=5e-3, err_msg=f"{layer} {key}")


def test_the_router_losses_have_a_gradient_that_counts():
    """Else the comparison above could not see that fp16 leaves their scale out."""
    grads = [assemble(run_ranks(1, train_in, "fp16", dict(EXPERTS, **flags), 8))
             for flags in ({}, dict(aux_coef=0.0), dict(z_coef=0.0))]
    whole, *without = (g["gradient 1 blocks.0.moe.router.weight"] for g in grads)
    for other in without:
        assert np.linalg.norm(whole - other) > 0.2 * np.linalg.norm(whole)


@pytest.mark.parametrize("n,flags", [
    (1, ["--n-experts=4", "--top-k=4", "--aux-coef=1"]), (2, ["--zero=1"])], ids=str)
def test_dumped_gradients_and_logged_numbers_are_unscaled(n, flags, tmp_path):
    for dtype in ("fp32", "fp16"):
        go(n, tmp_path / dtype, *flags, "--steps=1", f"--dtype={dtype}",
           f"--dump-grads={tmp_path / dtype}.st")
    want, got = (load_file(tmp_path / f"{dtype}.st") for dtype in ("fp32", "fp16"))
    assert want.keys() == got.keys() and {n.split("/")[0] for n in got} > {"grad"}
    for name, t in want.items():
        assert got[name].dtype == torch.float32 and got[name].shape == t.shape
        near(got[name], t, 0.01 if name.startswith("grad/") else 0, name)
    (a,), (b,) = rows(tmp_path / "fp32"), rows(tmp_path / "fp16")
    assert b["loss_scale"] == SCALE and "loss_scale" not in a
    for key in ("loss", "grad_norm", "param_norm", *["aux_loss", "z_loss"] * (n == 1)):
        assert b[key] == pytest.approx(a[key], rel=5e-3), key
    norm = torch.cat([t.flatten() for name, t in got.items() if name.startswith("grad/")]).norm()
    assert b["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


# -----------------------------------------------------------------------------
# The loss scale

def small_steps(dtype="fp16", **flags):
    """Return cfg, optimizer, step(number, bad=False): a step whose gradient holds an infinity if bad."""
    cfg = Config(**dict(DENSE, dtype=dtype, **flags))
    model, data_parallel, opt = train.build(cfg, make_mesh(World()), cfg.vocab_size, torch.device("cpu"))
    source, train_step = Synthetic(cfg.vocab_size, cfg.seq_len, 1), train.Step(cfg, model, data_parallel, opt)
    gradients = train_step.gradients

    def step(number, bad=False):
        def poisoned(*args, **kwargs):
            loss = gradients(*args, **kwargs)
            opt.grads[0][3] = torch.inf
            return loss
        train_step.gradients = poisoned if bad else gradients
        return train_step([source.batch(2 * number, 2)], number)[1].item()
    return cfg, opt, step


def test_the_scale_doubles_after_2000_good_steps_and_halves_at_an_overflow():
    _, opt, step = small_steps()
    assert opt.scaler() == [SCALE, 0]
    opt.set_scaler([1024.0, 1997])
    assert [(step(n), opt.scaler()) for n in (1, 2, 3)] == \
        [(0, [1024, 1998]), (0, [1024, 1999]), (0, [2048, 0])]
    moments = [t.clone() for t in opt.adam.state[opt.masters[0]].values()]
    assert [(step(n, bad=True), opt.scaler()) for n in (4, 5)] == [(1, [1024, 0]), (1, [512, 0])]
    assert all(torch.equal(*pair) for pair in
               zip(moments, opt.adam.state[opt.masters[0]].values(), strict=True))
    assert (step(6), opt.scaler(), opt.adam.step_count) == (0, [512, 1], 4)


def test_only_fp16_has_a_scale():
    for dtype in ("bf16", "fp32", "fp64"):
        _, opt, step = small_steps(dtype)
        opt.set_scaler([8.0, 5])  # of a run in fp16 that goes on in another dtype
        step(1)
        assert opt.scaler() is None and opt.loss_scale is None
    _, opt, _ = small_steps()
    opt.set_scaler(None)  # the other way round
    assert opt.scaler() == [SCALE, 0]


@pytest.mark.parametrize("scale", [1.0, 2.0**17])
def test_no_number_but_rounding_depends_on_the_scale(scale):
    """Moments after two steps with another scale in each: unscaled before they are mixed."""
    (_, one, step), (_, other, step_other) = small_steps(), small_steps()
    other.set_scaler([scale, 1999])  # doubles after the first step
    for number in (1, 2):
        assert step(number) == step_other(number) == 0
    assert other.loss_scale == 2 * scale
    for a, b in zip(one.masters, other.masters, strict=True):
        for key, share in (("exp_avg", 0.05), ("exp_avg_sq", 0.1)):
            near(other.adam.state[b][key], one.adam.state[a][key], share, key)


def test_the_guard_allows_for_the_overflows_that_find_the_scale():
    """16 halvings bring 65536 down to 1; after them fp16 has the patience of every dtype."""
    for dtype, patience in (("fp16", 24), ("bf16", 8), ("fp32", 8)):
        guard = Guard(Config(dtype=dtype), World(), State())
        for number in range(1, patience + 1):
            guard.refused_flags.append((number, torch.ones(())))
            assert guard.count_refused() == (number == patience), dtype
        assert guard.refused_range == (1, patience)


OVERFLOWS = {2: "nan", 3: "nan", 6: "nan"}
SCALES = [65536, 32768, 16384, 16384, 16384, 8192, 8192]  # logged after each step


@pytest.mark.parametrize("n,flags", [
    (1, []), (2, ["--zero=1", "--n-experts=4", "--router=sigmoid", "--router-bias-rate=0.01"])], ids=str)
def test_a_resumed_fp16_run_equals_the_uninterrupted_one(n, flags, tmp_path):
    """Scale and counter too. An overflow changes neither weights nor moments nor the routers' bias."""
    flags = [*flags, "--dtype=fp16", "--decay-steps=7", "--save-every=4"]
    whole = go(n, tmp_path / "whole", *flags, "--steps=7", plan=OVERFLOWS)
    go(n, tmp_path / "half", *flags, "--steps=4", plan=OVERFLOWS)
    assert checkpoint.check(tmp_path / "half/step_000004")["meta"]["scaler"] == [16384, 1]
    go(n, tmp_path / "half", *flags, "--steps=7", "--resume=auto", plan=OVERFLOWS)
    same(tmp_path / "whole", tmp_path / "half", 7)
    assert rows(tmp_path / "whole") == rows(tmp_path / "half")
    for out in ("whole", "half"):
        assert checkpoint.check(tmp_path / out / "step_000007")["meta"]["scaler"] == [8192, 1]
    assert [r["loss_scale"] for r in rows(tmp_path / "half")] == SCALES
    assert [r["nan_steps"] for r in rows(tmp_path / "half")] == [0, 1, 2, 2, 2, 3, 3]
    state = [s["state"] for s in whole["steps"]]  # before each step
    assert state[1] == state[2] == state[3] and state[5] == state[6] and len(set(state)) == 4


# -----------------------------------------------------------------------------
# Other sums that are wider than their terms

def cross_entropy_of_a_share(world, logits, target, used):
    """Return the loss of this rank's columns of the logits with the other ranks', its gradient."""
    mesh = make_mesh(world, tp=world.size)
    own = logits.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    loss = vocab_cross_entropy(own, target, used, mesh.tp)
    (3 * loss).backward()
    return loss.dtype, loss.item(), own.grad


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cross_entropy_of_16_bit_logits_is_computed_in_fp32(dtype, n):
    rng = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(96, 128, generator=rng)).to(dtype)
    target, used = torch.randint(0, 100, (96,), generator=rng), 100
    wide = logits.double()[:, :used].requires_grad_()
    want = F.cross_entropy(wide, target, reduction="sum")
    (3 * want).backward()
    results = run_ranks(n, cross_entropy_of_a_share, logits, target, used)
    for kind, loss, _ in results:
        assert kind == torch.float32 and loss == pytest.approx(want.item(), rel=1e-6)
    grad = torch.cat([g for *_, g in results], 1).double()
    assert not grad[:, used:].any()
    # The gradient is rounded to the logits' dtype at the end only; fp16's smallest number is 6e-8
    torch.testing.assert_close(grad[:, :used], wide.grad, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_norms_on_a_cpu_are_summed_in_fp64():
    cfg = Config(n_layer=1, n_head=1, n_kv_head=1, n_embd=128, ffn_hidden=8, seq_len=8, vocab_size=8192)
    _, data_parallel, opt = train.build(cfg, make_mesh(World()), cfg.vocab_size, torch.device("cpu"))
    for g, m in zip(opt.grads, opt.masters, strict=True):
        g.fill_(0.1), m.fill_(0.3)
    n = sum(b.filled for b in data_parallel.buckets)
    assert max(g.numel() for g in opt.grads) > 2**20
    stats = opt.stats(torch.tensor(1.5))
    for norm, value in ((stats.grad_norm, np.float32(0.1)), (stats.param_norm, np.float32(0.3))):
        assert norm.item() == pytest.approx(float(value) * n**0.5, rel=1e-7)
    assert (stats.loss.item(), stats.num_zeros.item()) == (1.5, 0)
    few = opt.stats(torch.tensor(1.5), full=False)
    assert few.grad_norm == stats.grad_norm and few.num_zeros == few.param_norm == 0

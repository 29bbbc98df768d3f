"""The update: the learning rate, AdamW, clipping, gradients that are not finite, which weights decay; and
numbers shorter than fp32.

A wrong factor of 65536, or of 2, hides from Adam's update, which does not depend on the gradients' size. It
shows in the gradient norm, the clipped moments and the dumped gradients.
"""
import dataclasses
import math
import signal
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from faults import local_norm, planted, with_faults
from pool import run_ranks
from runs import TINY, assert_resume_is_equal, final, go, optimizer_as_planned, refused, rows, same, session
from safetensors.torch import load_file
from shared import parameters
from test_layouts import GPT2, LLAMA, MOE, SIGMOID, assemble, equality
from test_model import FAMILIES, built, steps

import checkpoint
import moe
import train
from config import LARGEST_BF16_DECAY, Config
from corpus.samples import Synthetic
from interface.command_line import parse
from ops.split_master import whole
from optim import AdamW, learning_rate
from parallel import make_mesh
from runtime.launch import World
from runtime.resume import State, own_pieces
from skip import Guard

# -----------------------------------------------------------------------------
# The learning rate

def test_the_learning_rate_of_every_kind_of_schedule():
    """Written out beside optim.learning_rate: warm-up, cosine, what follows, and the defaults."""
    for warmup, decay, total, low in ((4, 0, 12, None), (0, 10, 30, 0.0), (3, 3, 9, 0.05), (7, 20, 9, 0.3)):
        cfg = Config(lr=0.5, warmup=warmup, decay_steps=decay, steps=total, min_lr=low)
        end, low = decay or total, 0.05 if low is None else low
        for t in range(1, 40):
            if t <= warmup:
                want = 0.5 * t / warmup
            else:
                x = min(1.0, (t - warmup) / (end - warmup)) if end > warmup else 1.0
                want = low + (0.5 - low) * (1 + math.cos(math.pi * x)) / 2
            assert learning_rate(cfg, t) == pytest.approx(want, rel=1e-12), (cfg, t)


WSD = {  # (warmup, steps, decay_steps, decay_ratio, min_lr): tenths of --lr 1.0 in steps 1, 2, ...
    (2, 10, 0, 0.4, 0.0): [5, 10, 10, 10, 10, 10, 7.5, 5, 2.5, 0, 0, 0],
    (2, 10, 0, 0.4, None): [5, 10, 10, 10, 10, 10, 7.75, 5.5, 3.25, 1, 1],
    (0, 99, 5, 0.4, 0.4): [10, 10, 10, 7, 4, 4, 4],
    (4, 8, 0, 1.0, 0.0): [2.5, 5, 7.5, 10, 7.5, 5, 2.5, 0],
    (1, 4, 0, 0.0, 0.0): [10, 10, 10, 10],
    (5, 4, 0, 0.5, 0.0): [2, 4, 6, 8],
}


def test_warmup_stable_decay_by_hand():
    for (warmup, total, decay, ratio, low), tenths in WSD.items():
        cfg = Config(lr=1.0, lr_schedule="wsd", warmup=warmup, steps=total, decay_steps=decay, min_lr=low,
                     decay_ratio=ratio)
        rates = [learning_rate(cfg, step) for step in range(1, len(tenths) + 1)]
        assert rates == pytest.approx([x / 10 for x in tenths], rel=1e-12, abs=1e-15), cfg


def test_a_run_stopped_in_its_stable_part_goes_on_bit_for_bit(tmp_path):
    """Stopped as --max-minutes stops it. In the stable part a run can also be made longer."""
    flags = ["--lr-schedule=wsd", "--decay-ratio=0.5", "--save-every=8", "--steps=8"]
    go(1, tmp_path / "whole", *flags)
    go(1, tmp_path / "half", *flags, plan={3: signal.SIGTERM}, code=85)
    go(1, tmp_path / "half", *flags, "--resume=auto")
    same(tmp_path / "whole", tmp_path / "half", 8)
    rates = [row["lr"] for row in rows(tmp_path / "half")]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.00775, 0.0055, 0.00325, 0.001], rel=1e-12)
    made = go(1, tmp_path / "half", *flags[:-1], "--steps=12", f"--resume={tmp_path}/half/step_000003")
    assert "steps 8 -> 12" in made["out"]
    assert [row["lr"] for row in rows(tmp_path / "half")][2:6] == [0.01] * 4


# -----------------------------------------------------------------------------
# AdamW

def adamw_of(p, decay, betas, kind=AdamW, **options):
    bucket = SimpleNamespace(master=p, own=p, decayed=True, optimizer="adamw", after_update=lambda: None)
    return bucket, kind(SimpleNamespace(buckets=[bucket]), betas, decay, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_is_torchs(decay, dtype):
    """Bits of torch's own class: bias corrections from t, epsilon, decoupled decay, the divisor; with
    --moments-dtype bf16 its fp32 moments are rounded by hand after each step."""
    rng = torch.Generator().manual_seed(1)
    p = torch.randn(500, generator=rng)
    q = torch.nn.Parameter(p.clone())
    theirs = torch.optim.AdamW([q], lr=0.1, betas=(0.8, 0.93), eps=1e-8, weight_decay=decay, fused=True)
    bucket, ours = adamw_of(p, decay, (0.8, 0.93), moments_dtype=dtype)
    for step in range(1, 6):
        q.grad = 1e-7 * torch.randn(500, generator=rng)
        theirs.param_groups[0]["lr"] = lr = 0.1 / step
        bucket.grad_total = 4 * q.grad
        ours.step(lr, torch.tensor(4.0), torch.zeros(()))
        bucket.grad_total = torch.full((500,), torch.nan)
        ours.step(lr, torch.ones(()), torch.ones(()))  # refused
        theirs.step()
        for moment in AdamW.moments:
            state = theirs.state[q][moment]
            state.copy_(state.to(dtype))
            kept = ours.state[p][moment]
            assert kept.dtype == dtype and torch.equal(kept.float(), state)
        assert torch.equal(p, q.data)
    assert ours.eps == 1e-8 and ours.step_count == 5


def clipped(clip):
    cfg = Config(n_layer=1, n_embd=16, ffn_hidden=16, seq_len=8, dtype="fp64", clip=clip, vocab_size=50)
    model, data_parallel, opt = built(cfg)
    stats, refused = train.Step(cfg, model, data_parallel, opt)([Synthetic(50, 8, 1).batch(0, 2)], 1)
    assert refused == 0
    return stats.grad_norm.item(), torch.cat([opt.adam.state[m]["exp_avg"] for m in opt.masters])


def test_clipping_scales_down_to_the_norm_and_never_up():
    norm, free = clipped(0.0)
    for clip, factor in ((norm / 3, norm / 3 / (norm + 1e-6)), (norm * 1.001, 1.0), (norm * 50, 1.0)):
        seen, moments = clipped(clip)
        assert seen == norm, "the norm is that before clipping"
        torch.testing.assert_close(moments, free * factor, rtol=1e-9, atol=0)
    assert free.norm().item() == pytest.approx(0.1 * norm, rel=1e-9), "1 - beta1 of the gradient"


@pytest.mark.parametrize("optimizer,dtype,bad", [
    ("adamw", "fp32", math.nan), ("adamw", "fp32", math.inf), ("adamw", "fp32", -math.inf),
    ("adamw", "bf16", math.nan), ("adamw", "fp64", math.nan), ("muon", "fp32", math.inf),
    ("muon", "bf16", math.nan), ("muon", "fp16", math.nan)])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer, dtype, bad):
    """Weights, all moments, Adam's own t: not one bit; the next step is taken as if it had not been. fp16
    halves its loss scale, which changes no bit of what comes after it."""
    cfg = dataclasses.replace(FAMILIES["llama"], dtype=dtype, weight_decay=0.5, optimizer=optimizer)
    model, data_parallel, opt = built(cfg)
    steps(cfg, model, data_parallel, opt, [1])

    def everything():
        moments = [t for moment in opt.moments().values() for t in moment if t is not None]
        tensors = *map(whole, opt.masters), *moments, *model.parameters()
        return [t.detach().clone() for t in tensors]

    def poison(original, data_parallel):
        original(data_parallel)
        bucket = [bucket for bucket in data_parallel.buckets if bucket.optimizer == optimizer][-1]
        bucket.grad_total[0] = bad

    before = everything()
    with planted("ddp.DataParallel.finish_grad_sync", poison):
        [(stats, refused)] = steps(cfg, model, data_parallel, opt, [2])
    assert refused.item() == 1 and not torch.isfinite(stats.grad_norm) and opt.adam.step_count == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    [(stats, refused)] = steps(cfg, model, data_parallel, opt, [3])
    assert refused.item() == 0 and opt.adam.step_count == 2
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    twin, *rest = built(cfg)
    if dtype == "fp16":
        rest[-1].loss_scale /= 2
    steps(cfg, twin, *rest, [1, 3])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_norms_on_a_cpu_are_summed_in_fp64():
    cfg = Config(n_layer=1, n_head=1, n_kv_head=1, n_embd=128, ffn_hidden=8, seq_len=8, vocab_size=8192)
    _, data_parallel, opt = built(cfg)
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


# -----------------------------------------------------------------------------
# fp16 beside fp32

SCALE = 65536.0
# Updates are small, so that the two runs stay near each other
DENSE, TIED, EXPERTS, BIASED = (dict(base, n_layer=2, micro_batch=2, lr=1e-4)
                                for base in (LLAMA, GPT2, MOE, SIGMOID))
EXPERTS.update(aux_coef=1.0, z_coef=0.3)  # their gradients are then as large as the cross-entropy's


def fixed_choice(scores, K):
    """In the place of moe.stable_top_k: rounding must not send a token to another expert."""
    n, E = scores.shape
    return (torch.arange(n)[:, None] ** 2 + 3 * torch.arange(K)) % E


def train_in(world, dtype, flags, batch):
    """Three steps -> {stats, pieces, experts} of this rank; gradients as the optimizer gets them."""
    cfg = Config(**dict(flags, dtype=dtype), global_batch=batch)
    mesh, source = make_mesh(world, cfg.tp, cfg.pp, cfg.ep), Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    seen, step = {"stats": [], "pieces": [], "experts": []}, train.Step(cfg, model, data_parallel, opt)

    def keep(prefix, vectors):
        pieces = own_pieces(data_parallel, opt, vectors)
        seen["pieces"] += [(prefix + name, equality.to_numpy(t), *at) for name, t, *at in pieces]

    with mock.patch.object(moe, "stable_top_k", fixed_choice):
        for number in (1, 2, 3):
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
    assert opt.scaler() == ([SCALE, 3] if dtype == "fp16" else None)
    return seen


def near(got, want, share, what):
    """Assert that the root mean square of the difference is at most this share of want's."""
    got, want = np.asarray(got, float), np.asarray(want, float)
    off, size = (np.sqrt(np.square(x).mean()) for x in (got - want, want))
    assert off <= share * size, f"{what}: off by {off / size:.3g}, at most {share:g} is rounding"


RUNS = {  # name: (model, ranks, layout)
    "zero 1": (DENSE, 2, dict(zero=1)), "pp 2": (TIED, 2, dict(pp=2)), "moe tp 2": (EXPERTS, 2, dict(tp=2)),
    "router bias": (BIASED, 2, dict(ep=2)),
    "recompute": (DENSE, 1, dict(recompute="full")), "tp 2": (DENSE, 2, dict(tp=2)), "moe": (EXPERTS, 1, {}),
    "moe pp 2": (EXPERTS, 2, dict(pp=2)), "moe ep 2": (EXPERTS, 2, dict(ep=2, zero=1))}


@pytest.mark.parametrize("name", parameters(RUNS, ["pp 2", "moe tp 2"]))
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


def test_dumped_gradients_and_logged_numbers_are_unscaled(tmp_path):
    for dtype in ("fp32", "fp16"):
        go(1, tmp_path / dtype, "--n-experts=4", "--top-k=4", "--aux-coef=1", "--steps=1", f"--dtype={dtype}",
           f"--dump-grads={tmp_path / dtype}.st")
    want, got = (load_file(tmp_path / f"{dtype}.st") for dtype in ("fp32", "fp16"))
    assert want.keys() == got.keys() and {n.split("/")[0] for n in got} > {"grad"}
    for name, t in want.items():
        assert got[name].dtype == torch.float32 and got[name].shape == t.shape
        near(got[name], t, 0.01 if name.startswith("grad/") else 0, name)
    (a,), (b,) = rows(tmp_path / "fp32"), rows(tmp_path / "fp16")
    assert b["loss_scale"] == SCALE and "loss_scale" not in a
    for key in ("loss", "grad_norm", "param_norm", "aux_loss", "z_loss"):
        assert b[key] == pytest.approx(a[key], rel=5e-3), key
    norm = torch.cat([t.flatten() for name, t in got.items() if name.startswith("grad/")]).norm()
    assert b["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


# The loss scale

def small_steps(dtype="fp16"):
    """Return optimizer, step(number, bad=False): a step whose gradient holds an infinity if bad."""
    cfg = Config(**dict(DENSE, dtype=dtype))
    model, data_parallel, opt = built(cfg)
    source, train_step = Synthetic(cfg.vocab_size, cfg.seq_len, 1), train.Step(cfg, model, data_parallel, opt)
    gradients = train_step.gradients

    def step(number, bad=False):
        def poisoned(*args, **kwargs):
            loss = gradients(*args, **kwargs)
            opt.grads[0][3] = torch.inf
            return loss
        train_step.gradients = poisoned if bad else gradients
        return train_step([source.batch(2 * number, 2)], number)[1].item()
    return opt, step


def test_the_scale_doubles_after_2000_good_steps_and_halves_at_an_overflow():
    opt, step = small_steps()
    assert opt.scaler() == [SCALE, 0]
    opt.set_scaler([1024.0, 1997])
    assert [(step(n), opt.scaler()) for n in (1, 2, 3)] == \
        [(0, [1024, 1998]), (0, [1024, 1999]), (0, [2048, 0])]
    moments = [t.clone() for t in opt.adam.state[opt.masters[0]].values()]
    assert [(step(n, bad=True), opt.scaler()) for n in (4, 5)] == [(1, [1024, 0]), (1, [512, 0])]
    assert all(torch.equal(*pair) for pair in
               zip(moments, opt.adam.state[opt.masters[0]].values(), strict=True))
    assert (step(6), opt.scaler(), opt.adam.step_count) == (0, [512, 1], 4)


@pytest.mark.parametrize("scale", [1.0, 2.0**17])
def test_no_number_but_rounding_depends_on_the_scale(scale):
    """Moments after two steps with another scale in each: unscaled before they are mixed."""
    (one, step), (other, step_other) = small_steps(), small_steps()
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
        assert guard.given_up == (1, patience)


def test_a_resumed_fp16_run_equals_the_uninterrupted_one(tmp_path):
    """Scale and counter too. An overflow changes neither weights nor moments nor the routers' bias."""
    overflows = {2: "nan", 3: "nan", 6: "nan"}
    flags = ["--zero=1", "--n-experts=4", "--router=sigmoid", "--router-bias-rate=0.01", "--dtype=fp16",
             "--decay-steps=7", "--save-every=4"]
    uninterrupted = go(2, tmp_path / "whole", *flags, "--steps=7", plan=overflows)
    go(2, tmp_path / "half", *flags, "--steps=4", plan=overflows)
    assert checkpoint.check(tmp_path / "half/step_000004")["meta"]["scaler"] == [16384, 1]
    go(2, tmp_path / "half", *flags, "--steps=7", "--resume=auto", plan=overflows)
    same(tmp_path / "whole", tmp_path / "half", 7)
    assert rows(tmp_path / "whole") == rows(tmp_path / "half")
    for out in ("whole", "half"):
        assert checkpoint.check(tmp_path / out / "step_000007")["meta"]["scaler"] == [8192, 1]
    logged = rows(tmp_path / "half")
    assert [r["loss_scale"] for r in logged] == [65536, 32768, 16384, 16384, 16384, 8192, 8192]
    assert [r["nan_steps"] for r in logged] == [0, 1, 2, 2, 2, 3, 3]
    state = [s["state"] for s in uninterrupted["steps"]]  # before each step
    assert state[1] == state[2] == state[3] and state[5] == state[6] and len(set(state)) == 4


def run_with_overflow(out, *flags, faults=()):
    """Two ranks; in step 3 the last one's gradient is not finite. Assert that all refuse this step alone."""
    argv = [*TINY, f"--out={out}", "--dtype=fp16", "--steps=5", "--save-every=0", *flags]
    for seen in run_ranks(2, with_faults, faults, session, argv, {3: "nan"}):
        states = [step["state"] for step in seen["steps"]]
        assert states[2] == states[3] and len(set(states)) == 4
        assert [step["adam_t"] for step in seen["steps"]] == [0, 1, 2, 2, 3]
    assert [row["nan_steps"] for row in rows(out)] == [0, 0, 1, 1, 1]
    assert [row["loss_scale"] for row in rows(out)] == [65536, 65536, 32768, 32768, 32768]


@pytest.mark.parametrize("layout", ["--pp=2", "--zero=1"])
def test_overflow_on_one_rank_skips_the_step_on_all(layout, tmp_path):
    run_with_overflow(tmp_path / "run", layout)


def step_by_own_norm(original, optimizer, lr, grad_norm):
    return original(optimizer, lr, local_norm(optimizer))


def scale_by_own_norm(original, optimizer, lr, grad_norm):
    """fairseq2 #1374: each rank has its own loss scale."""
    is_refused = (~torch.isfinite(local_norm(optimizer))).float()
    update_scale = torch._amp_update_scale_

    def update_by_own_norm(scale, tracker, _, *factors):
        return update_scale(scale, tracker, is_refused, *factors)
    with mock.patch.object(torch, "_amp_update_scale_", update_by_own_norm):
        return original(optimizer, lr, grad_norm)


@pytest.mark.parametrize("fault", [step_by_own_norm, scale_by_own_norm])
def test_overflow_decided_by_each_rank_alone_is_detected(fault, tmp_path):
    with pytest.raises(AssertionError, match="^(assert|At index)"):
        run_with_overflow(tmp_path / "run", "--zero=1", faults=[("optim.Optimizer.step", fault)])


# -----------------------------------------------------------------------------
# Moments in bf16. test_kernels.py compares the Triton kernel with AdamW.step

BF16 = ["--moments-dtype=bf16"]
MOMENTS = "exp_avg/", "exp_avg_sq/"


def error_of_rounding(beta2):
    """Return the relative error (rms) of 1,000 second moments in bf16, after 1,000 normal gradients each."""
    rng = torch.Generator().manual_seed(1)
    wide = torch.zeros(1000)
    narrow = torch.zeros(1000, dtype=torch.bfloat16)
    for _ in range(1000):
        squares = torch.randn(1000, generator=rng).square()
        wide += (1 - beta2) * (squares - wide)
        narrow = (narrow.float() + (1 - beta2) * (squares - narrow.float())).bfloat16()
    return ((narrow.float() - wide) / wide).square().mean().sqrt().item()


def test_up_to_the_largest_factor_errors_of_rounding_are_small():
    """A factor nearer to one is refused."""
    assert error_of_rounding(0.95) < 0.01 and error_of_rounding(LARGEST_BF16_DECAY) < 0.015
    assert error_of_rounding(0.99) > 0.03
    for flag in ("--beta1", "--beta2"):
        argv = ["tiny", "--data=synthetic", flag, "0.99"]
        refused(train.main, [*argv, *BF16], "at most 0.98")
        parse(argv)


LAYOUTS = {  # name: (ranks, flags)
    "zero 3": (2, ["--zero=3"]), "pp 2, tied": (2, ["--pp=2", "--tied"]),
    "muon, zero 1": (2, ["--optimizer=muon", "--zero=1"]),
    "dp 2": (2, []), "zero 1": (2, ["--zero=1"]), "zero 2": (2, ["--zero=2"]), "tp 2": (2, ["--tp=2"]),
    "ep 2, zero 1": (2, ["--n-experts=4", "--ep=2", "--zero=1"])}


@pytest.mark.parametrize("name", parameters(LAYOUTS, ["zero 3", "muon, zero 1"]))
def test_a_layout_is_one_process(name, tmp_path):
    """After three steps moments are within two steps of bf16, and weights within what that moves them."""
    n, flags = LAYOUTS[name]
    layout = ("--zero", "--tp", "--pp", "--ep")
    model = [flag for flag in flags if not flag.startswith(layout)]
    common = [*BF16, "--steps=3", "--save-every=3"]
    go(1, tmp_path / "one", *common, *model)
    go(n, tmp_path / "many", *common, *flags)
    expected, _ = final(tmp_path / "one", 3)
    found, _ = final(tmp_path / "many", 3)
    assert expected.keys() == found.keys()
    for row, other in zip(rows(tmp_path / "one"), rows(tmp_path / "many"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=2e-5)
    for key, tensor in expected.items():
        if key.startswith(MOMENTS):
            assert tensor.dtype == found[key].dtype == torch.bfloat16
            # Cancelled sums of gradients can be nearly zero, and their last digits are of no meaning.
            least = 1e-3 * tensor.float().abs().max().item()
            torch.testing.assert_close(found[key], tensor, rtol=2**-6, atol=least)
        else:
            torch.testing.assert_close(found[key].float(), tensor.float(), rtol=0, atol=5e-3)


@pytest.mark.parametrize("n, flags", [
    (2, ["--zero=1", "--dtype=bf16"]), pytest.param(2, ["--zero=3"], marks=pytest.mark.long)])
def test_a_resume_is_equal_to_the_bit(n, flags, tmp_path):
    assert_resume_is_equal(n, tmp_path, *BF16, *flags)


def test_a_checkpoint_opens_with_the_other_dtype(tmp_path):
    """Wide moments are rounded when they are read, and bf16 ones are widened. The resume says so, and a step
    later the moments are near those of a run that goes on as it was."""
    go(1, tmp_path / "wide", "--steps=2", "--save-every=2")
    go(1, tmp_path / "narrow", *BF16, "--steps=2", "--save-every=2")
    for source, flags, same_flags, words in (("wide", BF16, [], "moments-dtype fp32 -> bf16"),
                                             ("narrow", [], BF16, "moments-dtype bf16 -> fp32")):
        resumed = [f"--resume={tmp_path / source / 'step_000002'}", "--steps=3", "--save-every=3"]
        said = go(2, tmp_path / f"other {source}", *flags, "--zero=1", *resumed)
        go(1, tmp_path / f"same {source}", *same_flags, *resumed)
        assert words in said["out"]
        found, _ = final(tmp_path / f"other {source}", 3)
        expected, _ = final(tmp_path / f"same {source}", 3)
        dtype = torch.bfloat16 if flags else torch.float32
        for key, tensor in found.items():
            if key.startswith(MOMENTS):
                assert tensor.dtype == dtype != expected[key].dtype
                least = 1e-3 * expected[key].float().abs().max().item()
                torch.testing.assert_close(tensor.float(), expected[key].float(), rtol=2**-6, atol=least)


@pytest.mark.parametrize("flags", [["--dtype=bf16"], ["--dtype=fp64"], ["--dtype=bf16", "--optimizer=muon"]])
def test_memory_is_as_planned(flags):
    optimizer_as_planned(*BF16, *flags)

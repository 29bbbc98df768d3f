"""The update: the learning rate, AdamW, clipping, gradients that are not finite, and which weights decay."""
import dataclasses
import json
import math
import signal
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from faults import DP, LLAMA, PP, TP, ZERO, local_norm, planted, sequences, with_faults
from pool import run_ranks
from runs import go, rows, same
from test_model import FAMILIES, MOE, built, steps

import optim
import train
from config import Config
from corpus.samples import Synthetic
from ops.split_master import whole
from optim import AdamW, learning_rate
from parallel import make_mesh
from runtime.launch import World

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


def test_learning_rate():
    cfg = Config(lr=1e-3, min_lr=1e-4, warmup=10, steps=110)
    rate = {s: learning_rate(cfg, s) for s in range(1, 200)}
    assert (
        rate[1] == pytest.approx(1e-4) and rate[5] == pytest.approx(5e-4) and rate[10] == pytest.approx(1e-3)
    )
    assert rate[60] == pytest.approx(5.5e-4) and rate[35] == pytest.approx(
        1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2
    )
    assert all(rate[s] > rate[s + 1] for s in range(10, 110))
    assert all(rate[s] == pytest.approx(1e-4) for s in range(110, 200))
    later = dataclasses.replace(cfg, steps=1000, decay_steps=110)  # a longer run, the same schedule
    assert all(learning_rate(later, s) == rate[s] for s in rate)
    assert learning_rate(dataclasses.replace(cfg, min_lr=None), 110) == pytest.approx(1e-4)  # lr / 10
    assert learning_rate(dataclasses.replace(cfg, min_lr=0.0), 110) == 0
    assert learning_rate(dataclasses.replace(cfg, warmup=0), 1) == pytest.approx(1e-3, rel=1e-3)


WSD = {  # (warmup, steps, decay_steps, decay_ratio, min_lr): tenths of --lr 1.0 in steps 1, 2, ...
    (2, 10, 0, 0.4, 0.0): [5, 10, 10, 10, 10, 10, 7.5, 5, 2.5, 0, 0, 0],
    (2, 10, 0, 0.4, None): [5, 10, 10, 10, 10, 10, 7.75, 5.5, 3.25, 1, 1],
    (0, 99, 5, 0.4, 0.4): [10, 10, 10, 7, 4, 4, 4],
    (4, 8, 0, 1.0, 0.0): [2.5, 5, 7.5, 10, 7.5, 5, 2.5, 0],
    (1, 4, 0, 0.0, 0.0): [10, 10, 10, 10],
    (5, 4, 0, 0.5, 0.0): [2, 4, 6, 8],
}


def check_wsd():
    for (warmup, total, decay, ratio, low), tenths in WSD.items():
        cfg = Config(lr=1.0, lr_schedule="wsd", warmup=warmup, steps=total, decay_steps=decay, min_lr=low,
                     decay_ratio=ratio)
        rates = [learning_rate(cfg, step) for step in range(1, len(tenths) + 1)]
        assert rates == pytest.approx([x / 10 for x in tenths], rel=1e-12, abs=1e-15), cfg


def test_warmup_stable_decay_by_hand():
    check_wsd()


def a_step_late(original, cfg, step):
    """learning_rate of the step before."""
    return original(cfg, max(1, step - 1))


def test_a_late_decay_is_found():
    with planted("optim.learning_rate", a_step_late), pytest.raises(AssertionError):
        check_wsd()


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
    """Return a bucket that is the tensor p, and the AdamW of it alone."""
    bucket = SimpleNamespace(master=p, own=p, decayed=True, optimizer="adamw", after_update=lambda: None)
    data_parallel = SimpleNamespace(buckets=[bucket])
    return bucket, kind(data_parallel, betas, decay, **options)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_is_torchs(decay):
    """Bits of torch's own class: bias corrections from t, epsilon, decoupled decay, the divisor."""
    rng = torch.Generator().manual_seed(1)
    p = torch.randn(50, generator=rng)
    q = torch.nn.Parameter(p.clone())
    theirs = torch.optim.AdamW([q], lr=0.1, betas=(0.8, 0.93), eps=1e-8, weight_decay=decay, fused=True)
    bucket, ours = adamw_of(p, decay, (0.8, 0.93))
    for step in range(1, 5):
        q.grad = 1e-7 * torch.randn(50, generator=rng)
        theirs.param_groups[0]["lr"] = lr = 0.1 / step
        bucket.grad_total = 4 * q.grad
        ours.step(lr, torch.tensor(4.0), torch.zeros(()))
        theirs.step()
        torch.testing.assert_close(p, q.data, rtol=1e-6, atol=0)
    assert ours.eps == 1e-8 and ours.step_count == 4


def clipped(clip):
    """Return gradient norm, first moments after one step with --clip."""
    cfg = Config(n_layer=1, n_embd=16, ffn_hidden=16, seq_len=8, dtype="fp64", clip=clip, vocab_size=50)
    model, data_parallel, opt = train.build(cfg, make_mesh(World()), 50, torch.device("cpu"))
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, dtype):
    """Weights, both moments, Adam's own t: not one bit; the next step is taken as if it had not been."""
    cfg = dataclasses.replace(FAMILIES["llama"], dtype=dtype, weight_decay=0.5)
    model, data_parallel, opt = built(cfg)
    steps(cfg, model, data_parallel, opt, [1])

    def everything():
        return [t.detach().clone() for m in opt.masters for t in (whole(m), *opt.adam.state[m].values())] + [
            p.detach().clone() for p in model.parameters()
        ]

    before, finish = everything(), data_parallel.finish_grad_sync

    def poisoned():
        finish()
        data_parallel.buckets[-1].grad[0] = bad

    data_parallel.finish_grad_sync = poisoned
    [(stats, refused)] = steps(cfg, model, data_parallel, opt, [2])
    assert refused.item() == 1 and not torch.isfinite(stats.grad_norm) and opt.adam.step_count == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    data_parallel.finish_grad_sync = finish
    [(stats, refused)] = steps(cfg, model, data_parallel, opt, [3])
    assert refused.item() == 0 and opt.adam.step_count == 2
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    twin, twin_dp, twin_opt = built(cfg)
    steps(cfg, twin, twin_dp, twin_opt, [1, 3])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_adamw_equals_the_paper():
    """The slow oracle: clipping and decoupled decay written out beside the fused kernel on flat buckets."""
    cfg = dataclasses.replace(FAMILIES["gpt2"], dtype="fp64", clip=0.05, weight_decay=0.3)
    model, data_parallel, opt = built(cfg)
    w = {n: p.detach().clone() for n, p in model.named_parameters()}
    m, v = ({n: torch.zeros_like(p) for n, p in w.items()} for _ in range(2))
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    for t in range(1, 4):
        grads = {}
        step = train.Step(cfg, model, data_parallel, opt)
        step.before_update = lambda _, g=grads: g.update(
            {n: x.clone() for b in data_parallel.buckets
             for n, x in zip(b.names, b.grad_windows, strict=True)})
        stats, _ = step([source.batch(4 * t, 2), source.batch(4 * t + 2, 2)], t)
        lr = learning_rate(cfg, t)
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        torch.testing.assert_close(stats.grad_norm, norm, rtol=1e-12, atol=0)
        assert norm > cfg.clip
        for n, g in grads.items():
            g = g * (cfg.clip / (norm + 1e-6))
            m[n] = cfg.beta1 * m[n] + (1 - cfg.beta1) * g
            v[n] = cfg.beta2 * v[n] + (1 - cfg.beta2) * g * g
            w[n] = w[n] * (1 - lr * (cfg.weight_decay if g.ndim > 1 else 0))
            w[n] = w[n] - lr * (m[n] / (1 - cfg.beta1**t)) / ((v[n] / (1 - cfg.beta2**t)).sqrt() + 1e-8)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.data, w[n], rtol=1e-9, atol=1e-11, msg=n)


# -----------------------------------------------------------------------------
# Which weights decay

LAYER = {
    "llama": ["norm1.weight", "norm2.weight"],
    "gpt2": [
        "norm1.weight",
        "norm1.bias",
        "norm2.weight",
        "norm2.bias",
        "attn.wq.bias",
        "attn.wk.bias",
        "attn.wv.bias",
        "attn.wo.bias",
        "mlp.w1.bias",
        "mlp.w2.bias",
    ],
}
NEVER = {
    name: {f"blocks.{i}.{p}" for i in (0, 1) for p in LAYER[name]} | {"norm.weight"} for name in FAMILIES
}
NEVER["gpt2"] |= {"norm.bias"}
NEVER["moe"] = NEVER["llama"]
MATRICES = ["attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w1", "mlp.w2"]
ALWAYS = {
    "llama": {f"blocks.{i}.{p}.weight" for i in (0, 1) for p in [*MATRICES, "mlp.w3"]}
    | {"wte.weight", "head.weight"},
    "gpt2": {f"blocks.{i}.{p}.weight" for i in (0, 1) for p in MATRICES} | {"wte.weight", "wpe.weight"},
}
EXPERTS = ["router.weight", "w1", "w2", "w3", "shared.w1.weight", "shared.w2.weight", "shared.w3.weight"]
ALWAYS["moe"] = {n for n in ALWAYS["llama"] if ".mlp." not in n} | {
    f"blocks.{i}.moe.{p}" for i in (0, 1) for p in EXPERTS
}


@pytest.mark.parametrize("name", [*FAMILIES, "moe"])
def test_only_matrices_decay(name):
    """By name, and by what a step with zero gradients does: matrices shrink by lr * weight_decay."""
    cfg = dataclasses.replace(FAMILIES.get(name, MOE), weight_decay=0.5, min_lr=1e-2)
    model, data_parallel, opt = built(cfg)
    decayed = {n: b.decayed for b in data_parallel.buckets for n in b.names}
    assert {n for n, yes in decayed.items() if yes} == ALWAYS[name]
    assert {n for n, yes in decayed.items() if not yes} == NEVER[name]
    assert decayed.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for p in model.parameters():  # biases start at zero, which would hide a decay
            p.add_(0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    data_parallel.reset()
    data_parallel.finish_grad_sync()  # no backward: all gradients are zero
    assert opt.step(cfg.lr, torch.ones(())).item() == 0
    for n, p in model.named_parameters():
        want = before[n] * (1 - cfg.lr * cfg.weight_decay) if n in ALWAYS[name] else before[n]
        torch.testing.assert_close(p.data, want, rtol=1e-6, atol=0, msg=n)
    assert not torch.equal(model.wte.weight, before["wte.weight"])


# -----------------------------------------------------------------------------
# fp16: an overflow on one rank

OVERFLOW_STEP = 3


def run_with_overflow(world, flags, out):
    """A run of train.py; in OVERFLOW_STEP one element of one gradient of the last rank is infinite
    Return for each step (weights, moments and Adam's t are unchanged, the step is refused, loss scale)."""
    seen = []

    class StepWithOverflow(train.Step):
        def __call__(self, batches, number, *rest):
            model, data_parallel, opt = self.model, self.data_parallel, self.opt

            def state():
                model.provide_weights(model)
                moments = [s for m in opt.masters for s in opt.adam.state[m].values()]
                flats = [b.flat for b in data_parallel.buckets]
                return [t.clone() for t in (*map(whole, opt.masters), *moments, *flats)]
            before = state()
            p = next(model.parameters())
            hook = p.register_hook(
                lambda g: g.flatten().index_fill(0, torch.tensor(5), torch.inf).view_as(g)
                if number == OVERFLOW_STEP and world.rank == world.size - 1 else g)
            stats, refused = super().__call__(batches, number, *rest)
            hook.remove()
            same = [torch.equal(a, b) for a, b in zip(before, state(), strict=True)]
            seen.append((all(same), bool(refused), opt.loss_scale.item()))
            return stats, refused

    flags = dict(flags, dtype="fp16", data="synthetic", out=out, steps=5, log_every=1,
                 eval_every=0, save_every=0, plot=False, global_batch=sequences(world.size, flags))
    with mock.patch.object(train, "Step", StepWithOverflow), mock.patch("signal.signal"):
        train.train(train.Run(Config(**flags), world, mock.Mock()))
    return seen


def assert_step_refused_everywhere(results, out):
    for seen in results:
        same, refused, scale = zip(*seen, strict=True)
        assert refused == (False, False, True, False, False)
        assert same == refused
        assert scale == (65536, 65536, 32768, 32768, 32768)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["nan_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert [row["loss_scale"] for row in rows] == [65536, 65536, 32768, 32768, 32768]


@pytest.mark.parametrize("n,layout", [DP, TP, PP, ZERO], ids=str)
def test_overflow_on_one_rank_skips_the_step_on_all(n, layout, tmp_path):
    results = run_ranks(n, run_with_overflow, dict(LLAMA, **layout), str(tmp_path / "run"))
    assert_step_refused_everywhere(results, tmp_path / "run")


def step_by_own_norm(original, optimizer, lr, grad_norm):
    """Optimizer.step that judges this rank's own gradients."""
    return original(optimizer, lr, local_norm(optimizer))


def test_overflow_decided_by_each_rank_alone_is_detected(tmp_path):
    fault = ("optim.Optimizer.step", step_by_own_norm)
    flags, out = dict(LLAMA, zero=1), tmp_path / "run"
    results = run_ranks(2, with_faults, [fault], run_with_overflow, flags, str(out))
    with pytest.raises(AssertionError):
        assert_step_refused_everywhere(results, out)


def test_the_norm_of_a_million_gradients_is_exact():
    cfg = Config(n_layer=1, n_embd=16, ffn_hidden=16, seq_len=8, vocab_size=50_000)
    _, data_parallel, opt = train.build(cfg, make_mesh(World()), 50_000, torch.device("cpu"))
    for bucket in data_parallel.buckets:
        bucket.grad_total.normal_(generator=torch.Generator().manual_seed(0))
    want = torch.cat([grad.double() for grad in opt.grads]).square().sum().sqrt()
    torch.testing.assert_close(opt.stats(torch.zeros(())).grad_norm, want, rtol=1e-6, atol=0)


def test_after_an_error_the_default_dtype_is_fp32(monkeypatch):
    def refuse(*_, **__):
        assert torch.get_default_dtype() == torch.float64
        raise ValueError
    monkeypatch.setattr(train, "GPT", refuse)
    with pytest.raises(ValueError):
        train.build(Config(dtype="fp64"), make_mesh(World()), 100, torch.device("cpu"))
    assert torch.get_default_dtype() == torch.float32


def test_an_update_waits_for_the_copies_of_a_save():
    """Else the checkpoint has weights of the next step."""
    waited = []
    opt = optim.Optimizer.__new__(optim.Optimizer)
    opt.snapshot_done = SimpleNamespace(wait=lambda: waited.append("copies"))
    with pytest.raises(AttributeError, match="cfg"):  # the update begins
        opt.step(0.1, torch.tensor(1.0))
    assert waited == ["copies"]

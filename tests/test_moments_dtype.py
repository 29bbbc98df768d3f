"""--moments-dtype bf16: AdamW's moments are rounded to bf16 after each update; runs, layouts and checkpoints.

test_kernels.py compares the Triton kernel with AdamW.step.
"""
import pytest
import torch
from runs import assert_resume_is_equal, final, go, optimizer_as_planned, refused, rows
from test_optim import adamw_of

import train
from config import LARGEST_BF16_DECAY
from interface.command_line import parse
from optim import AdamW

BF16 = ["--moments-dtype=bf16"]
MOMENTS = "exp_avg/", "exp_avg_sq/"


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_is_torchs_adamw_with_rounded_moments(decay):
    """The oracle is torch.optim.AdamW, whose fp32 moments are rounded by hand after each step."""
    rng = torch.Generator().manual_seed(1)
    start = torch.randn(500, generator=rng)
    expected = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    found = start.clone()
    bucket, ours = adamw_of(found, decay, (0.9, 0.95), moments_dtype=torch.bfloat16)
    unrounded = start.clone()
    wide_bucket, wide = adamw_of(unrounded, decay, (0.9, 0.95))
    for _ in range(5):
        expected.grad = torch.randn(500, generator=rng)
        bucket.grad_total = wide_bucket.grad_total = expected.grad
        for optimizer in ours, wide:
            optimizer.step(0.1, torch.ones(()), torch.zeros(()))
        theirs.step()
        state = theirs.state[expected]
        for moment in AdamW.moments:
            state[moment].copy_(state[moment].bfloat16())
            kept = ours.state[found][moment]
            assert kept.dtype == torch.bfloat16 and torch.equal(kept.float(), state[moment])
        assert torch.equal(found, expected)
    assert not torch.equal(found, unrounded), "without rounding the weights are others"


def test_a_refused_update_changes_no_bit():
    p = torch.ones(50)
    bucket, adam = adamw_of(p, 0.1, (0.9, 0.95), moments_dtype=torch.bfloat16)
    bucket.grad_total = torch.randn(50)
    adam.step(0.1, torch.ones(()), torch.zeros(()))
    before = [p.clone()] + [adam.state[p][moment].clone() for moment in AdamW.moments]
    bucket.grad_total = torch.full((50,), float("nan"))
    adam.step(0.1, torch.ones(()), torch.ones(()))
    after = [p] + [adam.state[p][moment] for moment in AdamW.moments]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -----------------------------------------------------------------------------
# Factors that rounding would lose

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
    assert error_of_rounding(0.95) < 0.01 and error_of_rounding(LARGEST_BF16_DECAY) < 0.015
    assert error_of_rounding(0.99) > 0.03


@pytest.mark.parametrize("flag", ["--beta1", "--beta2"])
def test_a_factor_nearer_to_one_is_refused(flag):
    argv = ["tiny", "--data=synthetic", flag, "0.99"]
    refused(train.main, [*argv, *BF16], "--moments-dtype fp32")
    parse(argv)


# -----------------------------------------------------------------------------
# Runs

LAYOUTS = {  # name: (ranks, flags)
    "dp 2": (2, []),
    "zero 1": (2, ["--zero=1"]),
    "zero 2": (2, ["--zero=2"]),
    "zero 3": (2, ["--zero=3"]),
    "tp 2": (2, ["--tp=2"]),
    "pp 2, tied": (2, ["--pp=2", "--tied"]),
    "muon, zero 1": (2, ["--optimizer=muon", "--zero=1"]),
    "ep 2, zero 1": (2, ["--n-experts=4", "--ep=2", "--zero=1"])}


@pytest.mark.parametrize("name", LAYOUTS)
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
    n_rounded = 0
    for key, tensor in expected.items():
        if key.startswith(MOMENTS):
            assert tensor.dtype == found[key].dtype == torch.bfloat16
            n_rounded += tensor.numel()
            # Cancelled sums of gradients can be nearly zero, and their last digits are of no meaning.
            least = 1e-3 * tensor.float().abs().max().item()
            torch.testing.assert_close(found[key], tensor, rtol=2**-6, atol=least)
        else:
            torch.testing.assert_close(found[key].float(), tensor.float(), rtol=0, atol=5e-3)
    assert n_rounded > 1000


@pytest.mark.parametrize("n, flags", [(1, []), (2, ["--zero=1", "--dtype=bf16"]),
                                      (2, ["--zero=3"])])
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


# -----------------------------------------------------------------------------
# Memory

@pytest.mark.parametrize("flags", [[], ["--dtype=fp32"], ["--dtype=fp64"], ["--optimizer=muon"]])
def test_memory_is_as_planned(flags):
    optimizer_as_planned("--dtype=bf16", *BF16, *flags)

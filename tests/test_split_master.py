"""Masters of a bf16 model as bf16 weights and 16 low bits; runs, layouts and checkpoints with them.

One master of 65,536 loses a unit of its last binary digit. So a run is compared with one of whole masters
within a few such units, and a resume is compared to the bit. test_kernels.py has the kernel.
"""
import numpy as np
import pytest
import torch
from faults import nothing, with_faults
from pool import run_ranks
from runs import TINY, assert_resume_is_equal, final, go, optimizer_as_planned, rows, session
from shared import parameters
from test_layouts import MOE, equality

import train
from config import Config
from ops.split_master import SplitMaster, joined, low_bits, whole
from parallel import make_mesh
from runtime.launch import World
from runtime.resume import make_replicas_equal, own_pieces

BF16 = ["--dtype=bf16", "--warmup=0", "--lr=1e-3"]
WHOLE = [("ddp.has_split_master", nothing)]  # a fault, with which a run keeps fp32 masters


# -----------------------------------------------------------------------------
# The bits

def every_upper_half():
    """Return fp32 numbers with each sign, exponent and upper digit, and the lower halves that matter."""
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF])
    bits = (torch.arange(2**16)[:, None] << 16) + lower
    masters = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).flatten().view(torch.float32)
    rounded = masters.to(torch.bfloat16)
    return masters[torch.isfinite(rounded)]


def test_all_bits_are_kept_but_at_equal_distance():
    masters = every_upper_half()
    own = masters.to(torch.bfloat16)
    again = joined(own, low_bits(masters, own))
    moved = again.view(torch.int32) - masters.view(torch.int32)
    is_tie = masters.view(torch.int32) & 0xFFFF == 0x8000
    assert len(masters) > 650_000 and is_tie.sum() > 65_000
    assert (moved[is_tie].abs() == 1).all() and (moved[~is_tie] == 0).all()
    assert torch.equal(again.to(torch.bfloat16).view(torch.int16), own.view(torch.int16)), "it rounds to own"


def test_what_was_read_can_be_written():
    masters = every_upper_half()
    split = SplitMaster.of(masters.to(torch.bfloat16), masters)
    read = whole(split)
    split.copy_(read)
    assert torch.equal(whole(split).view(torch.int32), read.view(torch.int32))


def test_low_bits_that_belong_to_another_weight_do_not_change_it():
    """As after a broadcast of weights: with any low bits, a master rounds to own, unless that is zero."""
    own = every_upper_half().to(torch.bfloat16).unique()
    own = own[own.isfinite() & (own.abs() < 1e38) & (own != 0)]
    for low in (-2**15 + 1, -1, 0, 1, 2**15 - 1):
        read = joined(own, torch.full(own.shape, low, dtype=torch.int16))
        assert torch.equal(read.to(torch.bfloat16), own), low


# -----------------------------------------------------------------------------
# Runs

LAYOUTS = {  # name: (ranks, flags)
    "one process": (1, []),
    "micro-batches": (1, ["--global-batch=8"]),
    "dp 2": (2, []),
    "zero 1": (2, ["--zero=1"]),
    "zero 2": (2, ["--zero=2"]),
    "zero 3": (2, ["--zero=3"]),
    "zero 3, shard 2": (4, ["--zero=3", "--shard=2", "--micro-batch=1"]),
    "tp 2": (2, ["--tp=2"]),
    "pp 2, tied": (2, ["--pp=2", "--tied"]),
    "cp 2": (2, ["--cp=2"]),
    "ep 2, zero 1": (2, ["--n-experts=4", "--ep=2", "--zero=1"]),
    "lora": (1, ["--lora=4"]),
    "upcycled, ep 2, zero 3": (2, ["--n-experts=4", "--ep=2", "--zero=3"]),
    "new symbols, zero 1": (2, ["--vocab-size=150", "--zero=1"]),
    "muon": (1, ["--optimizer=muon"]),
    "muon, zero 1": (2, ["--optimizer=muon", "--zero=1"])}


def units_apart(a, b):
    """Return by how many units of their last digit fp32 tensors differ, as (n,) int64."""
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


@pytest.fixture(scope="module")
def base_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    go(1, out, "--steps=1", "--save-every=1", *BF16)
    return out


@pytest.mark.parametrize("name", parameters(LAYOUTS, [
    "one process", "zero 1", "zero 3, shard 2", "ep 2, zero 1", "upcycled, ep 2, zero 3", "muon, zero 1"]))
def test_a_run_is_that_of_whole_masters(name, tmp_path, request):
    """After three steps: all but a few of a thousand masters are equal, and those are a few units apart."""
    n, flags = LAYOUTS[name]
    flags = [*flags, "--steps=3", "--save-every=3"]
    if name.partition(",")[0] in ("lora", "upcycled", "new symbols"):
        flags.append(f"--init-from={request.getfixturevalue('base_run')}")
    run_ranks(n, with_faults, WHOLE, session, [*TINY, f"--out={tmp_path / 'whole'}", *BF16, *flags])
    go(n, tmp_path / "split", *BF16, *flags)
    expected, meta = final(tmp_path / "whole", 3)
    found, split_meta = final(tmp_path / "split", 3)
    assert expected.keys() == found.keys() and split_meta["adam_t"] == meta["adam_t"] == 3
    for row, other in zip(rows(tmp_path / "whole"), rows(tmp_path / "split"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert other["param_norm"] == pytest.approx(row["param_norm"], rel=1e-9)
    n_masters = 0
    n_different = 0
    for key, tensor in expected.items():
        if "/" in key or tensor.dtype != torch.float32:
            continue
        apart = units_apart(found[key], tensor)
        assert apart.max() <= 64, (key, apart.max())
        n_masters += tensor.numel()
        n_different += (apart > 0).sum()
    assert n_different <= n_masters / 500, (n_different, n_masters)


@pytest.mark.parametrize("n, flags", [
    (2, ["--optimizer=muon", "--zero=2"]), *(pytest.param(*place, marks=pytest.mark.long) for place in (
        (1, []), (2, ["--zero=1"]), (2, ["--zero=3"])))])
def test_a_resume_is_equal_to_the_bit(n, flags, tmp_path):
    assert_resume_is_equal(n, tmp_path, *BF16, *flags)


def test_a_checkpoint_has_fp32_masters_that_other_layouts_keep(tmp_path):
    go(1, tmp_path / "a", *BF16, "--steps=2", "--save-every=2")
    tensors, _ = final(tmp_path / "a", 2)
    assert tensors["wte.weight"].dtype == torch.float32
    assert not torch.equal(tensors["wte.weight"], tensors["wte.weight"].to(torch.bfloat16).float())
    resumed = [f"--resume={tmp_path / 'a' / 'step_000002'}", "--steps=3", "--save-every=1", "--lr=0"]
    go(2, tmp_path / "b", *BF16, *resumed, "--zero=3")
    found, _ = final(tmp_path / "b", 3)
    for name in tensors:
        if "/" not in name:
            assert torch.equal(found[name], tensors[name]), name


def test_a_checkpoint_of_whole_masters_is_read(tmp_path):
    """... with at most a unit of the last digit lost."""
    run_ranks(1, with_faults, WHOLE, session, [*TINY, f"--out={tmp_path / 'a'}", *BF16, "--steps=2",
                                               "--save-every=2"])
    tensors, _ = final(tmp_path / "a", 2)
    go(1, tmp_path / "b", *BF16, f"--resume={tmp_path / 'a' / 'step_000002'}", "--steps=3", "--save-every=1",
       "--lr=0")
    found, _ = final(tmp_path / "b", 3)
    for name in tensors:
        if "/" not in name:
            assert units_apart(found[name], tensors[name]).max() <= 1, name


# -----------------------------------------------------------------------------
# Memory

@pytest.mark.parametrize("flags", [[], ["--zero=1"], ["--optimizer=muon"]])
def test_memory_is_as_planned(flags):
    opt = optimizer_as_planned(*BF16, *flags)
    n_split = sum(isinstance(master, SplitMaster) for master in opt.masters)
    assert 0 < n_split <= len(opt.masters) and (n_split < len(opt.masters)) == (opt.muon is not None)


# -----------------------------------------------------------------------------
# Replicas, and a fault

def masters_after_different_draws(world):
    cfg = Config(**dict(MOE, dtype="bf16"))
    model, data_parallel, opt = train.build(cfg, make_mesh(world), cfg.vocab_size, world.device)
    if world.rank:
        for master in opt.masters:
            master.copy_(whole(master) * (1 + 1e-5))
    make_replicas_equal(model)
    opt.masters_from_model()
    pieces = own_pieces(data_parallel, opt, {"": opt.masters}, owned_only=False)
    return [equality.to_numpy(whole(piece.view)) for piece in pieces]


@pytest.mark.parametrize("faults, is_equal", [([], True),
                                              ([("optim.Optimizer.masters_from_model", nothing)], False)])
def test_replicas_start_with_equal_low_bits(faults, is_equal):
    one, two = run_ranks(2, with_faults, faults, masters_after_different_draws)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True)) == is_equal


def test_a_weight_of_zero_is_no_nan():
    """Where a broadcast wrote zero beside negative low bits."""
    cfg = Config(**dict(MOE, dtype="bf16"))
    _, _, opt = train.build(cfg, make_mesh(World()), cfg.vocab_size, torch.device("cpu"))
    for master in opt.masters:
        master.own.zero_()
        master.low.fill_(-5)
    opt.masters_from_model()
    assert all((whole(master) == 0).all() for master in opt.masters)

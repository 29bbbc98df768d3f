"""Which samples a step reads: --rampup-batch-size, Megatron's schedule; resume; layouts."""
import dataclasses
import re

import pytest
from runs import go, rows, same

from config import Config
from corpus.samples import batch_size
from interface.layout import check_layout

RAMP = ["--global-batch=8", "--rampup-batch-size", 4, 2, 16]


def megatron(samples, full, start, increment, over):
    per_increment = over / ((full - start) // increment)
    if samples > over:
        return full
    return start + int(samples / per_increment) * increment


def test_the_schedule_is_megatrons():
    bloom = (2048, (192, 16, 9_765_625))
    for full, ramp in ((384, (32, 32, 2_000)), bloom, (16, (4, 4, 7)), (8, (4, 2, 16))):
        for samples in [*range(0, 3000, 13), 10**6, 9_765_625, 10**8]:
            assert batch_size(samples, full, ramp) == megatron(samples, full, *ramp)
    assert [batch_size(s, 8, (4, 2, 16)) for s in (0, 7, 8, 15, 16, 99)] == [4, 4, 6, 6, 8, 8]
    assert batch_size(5, 8) == batch_size(5, 8, (8, 4, 100)) == 8


@pytest.mark.parametrize("full,ramp,unit", [
    (32, (4, 8, 100), 4), (8, (16, 4, 100), 4), (16, (4, 4, 100), 8), (16, (8, 4, 100), 8),
    (64, (5, 7, 100), 8)])
def test_every_stage_is_checked_before_the_first_step(full, ramp, unit):
    cfg = Config(micro_batch=unit, rampup_batch_size=ramp, global_batch=full)
    with pytest.raises(ValueError, match=f"--rampup-batch-size .* micro-batch . dp = {unit}; try ") as e:
        check_layout(cfg, 1)
    fix = re.search(r"try --rampup-batch-size (\d+) (\d+) 100$", str(e.value))
    check_layout(dataclasses.replace(cfg, rampup_batch_size=(int(fix[1]), int(fix[2]), 100)), 1)


def test_a_ramp_with_a_resume_and_a_skipped_step_logs_the_right_numbers(tmp_path):
    flags = [*RAMP, "--steps=8", "--save-every=3", "--train-range-to-skip", 2, 2]
    whole = go(1, tmp_path / "a", *flags)
    go(1, tmp_path / "b", *flags[:-5], "--steps=3", "--save-every=3", "--decay-steps=8", *flags[-3:])
    go(1, tmp_path / "b", *flags, "--resume=auto", "--decay-steps=8")
    table = rows(tmp_path / "a")
    assert [r["global_batch"] for r in table] == [4, 4, 6, 6, 8, 8, 8, 8]
    assert [r["samples"] for r in table] == [4, 8, 14, 20, 28, 36, 44, 52]
    assert [r["tokens"] for r in table] == [16 * r["samples"] for r in table]
    assert [s["first"] for s in whole["steps"]] == [0, 4, 8, 14, 20, 28, 36, 44]
    assert table[1]["skip_reason"] == "range" and rows(tmp_path / "b") == table
    same(tmp_path / "a", tmp_path / "b", 8)
    timed = rows(tmp_path / "a", ())
    assert timed[3]["ms_per_sample"] == pytest.approx(timed[3]["ms"] / 6)


def test_one_and_two_ranks_train_alike_through_the_ramp(tmp_path):
    flags = ["--global-batch=8", "--rampup-batch-size", 4, 4, 12, "--steps=5", "--dtype=fp64"]
    one, two = go(1, tmp_path / "a", *flags), go(2, tmp_path / "b", *flags, "--zero=1")
    assert len(one["steps"]) == len(two["steps"]) == 5
    for a, b in zip(rows(tmp_path / "a"), rows(tmp_path / "b"), strict=True):
        assert a["global_batch"] == b["global_batch"] and a["loss"] == pytest.approx(b["loss"], rel=1e-10)

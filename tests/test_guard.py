"""Refused steps: the detector, what a refused step changes, agreement of the ranks, resume, giving up.
Then: a full disk, an outage of wandb; a run in a notebook.
"""
import io
import json
import math
import random
import re
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import torch
from pool import run_ranks
from runs import TINY, go, rows, same

import skip
import train
from config import Config
from interface.files import sound_rows
from runtime import log
from runtime.launch import World
from runtime.resume import State
from skip import Guard, give_up_message, spike_reason

SMALL = 16  # WINDOW of these runs: the detector is active after 8 steps


def small_window(world, argv, plan=None, at=0, last_rank_only=False):
    """runs.session with a short window and, at step `at`, a loss 9 times too large."""
    gradients = train.Step.gradients

    def jump(self, batches, number, *args, **kwargs):
        loss = gradients(self, batches, number, *args, **kwargs)
        return loss * 9 if number == at and (not last_rank_only or world.rank == world.size - 1) else loss

    with mock.patch.object(skip, "WINDOW", SMALL), mock.patch.object(train.Step, "gradients", jump):
        return runs.session(world, argv, plan)


def go_small(n, out, *flags, plan=None, code=0, at=0, last_rank_only=False):
    """runs.go with small_window() as the session."""
    results = run_ranks(n, small_window, [*TINY, f"--out={out}", *map(str, flags)], plan, at, last_rank_only)
    assert [r["code"] for r in results] == [code] * n, results[0]["err"] + results[0]["out"]
    return results[0]


def refused_steps(values, sigma=6.0):
    """[(loss, norm)] of each step -> the steps (from 0) that are refused, and the state afterwards."""
    state, out = State(), []
    guard = Guard(Config(skip_spikes=sigma), World(), state)
    for step, (loss, norm) in enumerate(values):
        vetoed = guard.veto(torch.tensor([loss, norm, 0.0, 0.0], dtype=torch.float64))
        refused = torch.tensor(float(not math.isfinite(loss + norm)))
        guard.refused_flags.append((step, None if vetoed else refused))
        guard.count_refused()
        if vetoed or refused:
            out.append(step)
    return out, state


def stream(n):
    """Return [(loss, gradient norm)] of n steps of a healthy run."""
    rng = random.Random(0)
    losses = [2 + 3 * math.exp(-i / 300) + rng.gauss(0, 0.03) for i in range(n)]
    return [(loss, 0.5 + abs(rng.gauss(0, 0.1))) for loss in losses]


def test_detector_finds_the_spikes_and_nothing_else():
    values = stream(1000)
    for step in (200, 201, 202):
        values[step] = values[step][0] * 2, values[step][1]
    values[300] = math.nan, math.nan
    values[600] = values[600][0], 2.0  # a spike of the norm, and no loss is so small
    found, state = refused_steps(values)
    assert found == [200, 201, 202, 300, 600]  # none of the steps after the NaN
    assert state.skipped == 4 and state.nan_steps == 1 and state.streak == 0
    assert len(state.window) == skip.WINDOW and state.window[-3:] == values[-3:]
    assert json.loads(json.dumps(state.window)) == [list(v) for v in state.window]  # as in a checkpoint


def test_detector_waits_for_half_a_window_and_ignores_tiny_deviations():
    flat = [(1.0, 1.0)] * 64
    assert spike_reason(flat[:63], 9.0, 1.0, 6) is None
    assert spike_reason(flat, 1.0 + 6 * 1.4826e-3 - 1e-6, 1.0, 6) is None  # at least 0.1 % of the median
    assert "loss 1.01 > 1 + 6 * 0.001483" in spike_reason(flat, 1.01, 1.0, 6)
    assert "gradient norm" in spike_reason(flat, 1.0, 1.01, 6)
    with_outlier = [(1 + i % 5 / 100, 1.0) for i in range(79)] + [(50.0, 1.0)]  # its mean is no median
    assert spike_reason(with_outlier, 1.10, 1.0, 6) is None
    assert spike_reason(with_outlier, 1.11, 1.0, 6) == "spike: loss 1.11 > 1.02 + 6 * 0.01483"


def test_a_lasting_jump_of_the_loss_is_refused_until_the_run_gives_up():
    found, state = refused_steps([*stream(100), *[(50.0, 1.0)] * 8])
    assert found == list(range(100, 108)) and state.streak == skip.MAX_REFUSED


def test_the_message_names_a_checkpoint_and_a_range_to_skip():
    paths = [Path(f"out/x/step_{s:06d}") for s in (1005, 1000, 900, 800)]
    text = give_up_message(paths, 1000, 1008, "spike", 5000)
    assert "steps 1000 to 1008" in text
    assert text.endswith("--resume out/x/step_000900 --train-range-to-skip 950 1150, or a lower --lr")
    without = give_up_message([Path("out/x/step_000002")], 2, 50, "spike", 5000)
    assert "the same command with --train-range-to-skip 1 152," in without
    short = give_up_message(paths, 1000, 1008, "spike", 1150)  # 1,000 + 150: no step would be left
    assert "--train-range-to-skip 950 1008," in short


# --skip-spikes=20: the window of 16 steps is short, and the loss of these runs falls fast
MOE = ["--n-experts=4", "--router=sigmoid", "--router-bias-rate=0.01"]


@pytest.mark.parametrize("n,layout", [
    (2, ["--tp=2", *MOE]), (2, ["--pp=2"]),
    *(pytest.param(*place, marks=pytest.mark.long) for place in ((1, []), (2, ["--zero=1"])))], ids=str)
def test_a_refused_spike_equals_a_skipped_range(tmp_path, n, layout):
    """Equal bits: weights, both moments, Adam's t, router bias, and the learning rate of later steps."""
    common = ["--steps=16", "--save-every=16", *layout]
    got = go_small(n, tmp_path / "a", *common, "--skip-spikes=20", at=12)
    go_small(n, tmp_path / "b", *common, "--train-range-to-skip", 12, 12)
    same(tmp_path / "a", tmp_path / "b", 16)
    a, b = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert re.fullmatch("spike: loss .* --step 12", a[11].pop("skip_reason"))
    assert b[11].pop("skip_reason") == "range"
    a[11] = {k: v for k, v in a[11].items() if k in b[11] or k == "loss"}  # a spike has statistics
    assert a == b and "loss" not in a[11] and a[-1]["skipped"] == 1 and len(got["steps"]) == 16


def test_a_spike_on_one_rank_is_refused_on_all_and_logged_regardless_of_log_every(tmp_path):
    """Of a range, too, each step has its row and its line."""
    flags = "--steps=14", "--log-every=10", "--skip-spikes=20", "--train-range-to-skip", 3, 4
    said = go_small(2, tmp_path, *flags, at=12, last_rank_only=True)["out"]
    table = {r["step"]: r for r in rows(tmp_path)}
    assert list(table) == [1, 3, 4, 10, 12, 14] and said.count("(range)") == 2
    assert [step for step, row in table.items() if "skip_reason" in row] == [3, 4, 12]
    assert table[12]["spike_loss"] > 4 * table[10]["loss"] and "spike_grad_norm" in table[12]


def test_a_resumed_run_restores_the_detectors_window(tmp_path):
    flags = ["--steps=16", "--save-every=8", "--skip-spikes=20"]
    go_small(2, tmp_path / "a", *flags, at=13)
    go_small(2, tmp_path / "b", *flags, at=13, plan={12: int(signal.SIGUSR1)}, code=85)
    go_small(2, tmp_path / "b", *flags, "--resume=auto", at=13)
    same(tmp_path / "a", tmp_path / "b", 16)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    meta = runs.final(tmp_path / "b", 16)[1]
    assert len(meta["window"]) == 15 and meta["skipped"] == 1


@pytest.mark.parametrize("sigma", [0, 20])
def test_nan_on_one_rank_refuses_one_step(tmp_path, sigma):
    go_small(2, tmp_path, "--steps=20", f"--skip-spikes={sigma}", plan={9: "nan"})
    table = rows(tmp_path)
    assert [r["step"] for r in table if "skip_reason" in r] == [9]  # and no later step
    assert table[8]["skip_reason"].startswith("not finite: ") and table[-1]["nan_steps"] == 1


@pytest.mark.parametrize("sigma", [20, pytest.param(0, marks=pytest.mark.long)])
def test_eight_refused_steps_in_a_row_end_the_run(tmp_path, sigma):
    bad = {step: "nan" for step in range(7, 20)}
    flags = ["--steps=30", "--save-every=3", f"--skip-spikes={sigma}"]
    got = go_small(2, tmp_path, *flags, plan=bad, code=42)
    assert rows(tmp_path)[-1]["step"] == 14
    assert "steps 7 to 14 were not taken (not finite: " in got["err"]
    assert f"--resume {tmp_path}/step_000006 --train-range-to-skip 7 14, or" in got["err"]
    fix = [f"--resume={tmp_path}/step_000006", "--train-range-to-skip", 7, 19]
    go_small(2, tmp_path, *flags, *fix, plan=bad)
    assert rows(tmp_path)[-1]["step"] == 30 and rows(tmp_path)[-1]["nan_steps"] == 0


def test_a_run_that_gave_up_unseen_is_not_saved_when_it_is_stopped(tmp_path):
    """Its steps are counted when a signal stops it: a script must not requeue it."""
    bad = {**dict.fromkeys(range(2, 10), "nan"), 10: int(signal.SIGUSR1)}
    go(2, tmp_path, "--steps=30", "--log-every=30", "--save-every=30", plan=bad, code=42)
    assert not list(tmp_path.glob("step_*"))


def test_refused_steps_that_are_counted_late_still_end_the_run():
    """The flags of 20 steps are read in one call, the streak in the middle; later calls report it, too."""
    guard = Guard(Config(), World(), State(step=20))
    guard.refused_flags = [(step, torch.tensor(float(3 <= step <= 10))) for step in range(1, 21)]
    assert guard.count_refused() and guard.given_up == (3, 10)
    guard.refused_flags = [(21, torch.tensor(0.0))]
    assert guard.count_refused() and guard.given_up == (3, 10)
    assert guard.state.nan_steps == 8 and guard.state.streak == 0


def test_an_injected_spike_changes_one_steps_targets(tmp_path):
    x = torch.arange(6).view(2, 3)
    ((a, b),) = skip.corrupt_targets([(x, x + 1)])
    assert torch.equal(a, x) and b.count_nonzero() == 0
    go(1, tmp_path / "a", "--steps=6", "--save-every=0")
    go(1, tmp_path / "b", "--steps=6", "--save-every=0", "--inject-spike=4")
    differs = [r["step"] for r, q in zip(rows(tmp_path / "a"), rows(tmp_path / "b"), strict=True) if r != q]
    assert differs == [4, 5, 6]


# -----------------------------------------------------------------------------
# A full disk, --wandb without a network

@pytest.mark.parametrize("frees", [True, False])
def test_a_full_disk_loses_no_row_and_is_one_line(frees, tmp_path, capsys, monkeypatch):
    """No file ends in a part of a row. At its end a run tries again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run_log = log.Log(tmp_path, {"steps": 4})
    run_log.row(step=1, loss=1.0, lr=0.1)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, hard))  # room for a part of a row
        for step in (2, 3, 4):
            run_log.row(step=step, loss=1.0, lr=0.1)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "rows wait in memory" in said
        assert (tmp_path / "metrics.jsonl").stat().st_size == size  # no part of a row
        if frees:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        run_log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    steps = [row["step"] for row in sound_rows(tmp_path / "metrics.jsonl")]
    assert steps == ([1, 2, 3, 4] if frees else [1])
    assert frees or (tmp_path / "metrics.jsonl").stat().st_size == size
    assert ("is not complete" in capsys.readouterr().err) == (not frees)


class StandIn:
    """The part of wandb that log.py calls. on_init: what goes wrong there. bad: the steps that fail."""

    class CommError(Exception):
        pass

    def __init__(self, on_init=None, bad=()):
        self.on_init, self.bad = on_init, bad
        self.errors = SimpleNamespace(CommError=StandIn.CommError)
        self.calls, self.steps = [], []
        self.settings = SimpleNamespace(project=None, run_name=None, root_dir=Path.cwd(), mode="online")

    def Settings(self, **settings):
        return settings

    def setup(self, settings=None):
        return self

    def init(self, **call):
        self.calls.append(call)
        if self.on_init and call["mode"] == "online":
            self.on_init()
        return SimpleNamespace(log=self.log, finish=lambda: self.log({"step": "finish"}, "finish"),
                               url="https://w/1" if call["mode"] == "online" else None)

    def log(self, row, step):
        if step in self.bad:
            raise ZeroDivisionError("division by zero")
        assert row["step"] == step
        self.steps.append(step)


def tracked(out, wandb, mode, monkeypatch):
    """The rows of a run of four steps with --wandb: its steps in metrics.jsonl."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_log = log.Log(out, {"steps": 4}, wandb=mode)
    for step in range(1, 5):
        run_log.row(step=step, lr=0.1)
    run_log.close()
    return [r["step"] for r in sound_rows(out / "metrics.jsonl")]


def no_answer():
    raise StandIn.CommError("no such host\nConsider increasing init_timeout")


def test_wandb_gets_each_row_and_all_starts_of_a_run_are_one(tmp_path, monkeypatch, capfd):
    wandb = StandIn()
    for _ in range(2):
        assert tracked(tmp_path, wandb, "online", monkeypatch) == [1, 2, 3, 4]
    assert wandb.steps == 2 * [1, 2, 3, 4, "finish"]
    first, second = wandb.calls
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text() and first["resume"] == "allow"
    assert (first["project"], first["name"], first["mode"]) == ("nanoshard", tmp_path.name, "online")
    said = capfd.readouterr()
    assert said.out.startswith("wandb: https://w/1\n") and said.err == ""
    # The variables of wandb
    wandb.settings = SimpleNamespace(project="mine", run_name="hello", root_dir="/there", mode="disabled")
    tracked(tmp_path, wandb, "online", monkeypatch)
    call = wandb.calls[-1]
    assert (call["project"], call["name"]) == ("mine", "hello")
    assert (call["dir"], call["mode"]) == ("/there", "disabled")


def test_an_outage_of_wandb_is_one_line(tmp_path, monkeypatch, capfd):
    offline = StandIn(no_answer)
    for name, wandb, *words in (
            ("a", None, "pip install wandb", "going on without it"),
            ("b", StandIn(bad=[1]), "division by zero", "going on without it"),
            ("d", StandIn(bad=["finish"]), "division by zero", "going on without it"),
            ("c", offline, "no answer within 10 s, so it is recorded offline (no such host")):
        assert tracked(tmp_path / name, wandb, "online", monkeypatch) == [1, 2, 3, 4]
        err = capfd.readouterr().err
        assert err.count("\n") == 1 and all(part in err for part in words), err
    assert offline.steps == [1, 2, 3, 4, "finish"]


def test_damaged_lines_are_removed(tmp_path):
    """NUL bytes, no utf-8, rows that are none, a cut row: in each file that a run appends to."""
    damage = b'\0\0\0\n5\n[]\n{}\n\xff\xfe\n{"step": 2'
    kept = {"metrics.jsonl": [0, 1, 3], "experts.jsonl": [0, 1, 3], "history.jsonl": [0, 1, 2]}
    for name in kept:
        (tmp_path / name).write_bytes(b'{"step": 0}\n{"step": 1, "loss": 1.0}\n' + damage)
    run_log = log.Log(tmp_path, {"steps": 4}, resumed=2)
    run_log.row(step=3, loss=1.0, lr=0.1)
    run_log.experts.add({"step": 3, "layers": {}})
    run_log.close()
    for name, steps in kept.items():
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == steps


def test_a_guard_that_refuses_no_step_changes_no_bit(tmp_path):
    go(1, tmp_path / "a", "--steps=6", "--save-every=6")
    go(1, tmp_path / "b", "--steps=6", "--save-every=6", "--skip-spikes=6", "--check-every=1")
    same(tmp_path / "a", tmp_path / "b", 6)


# -----------------------------------------------------------------------------
# A notebook

def test_a_run_in_a_notebook_prints_and_gives_back_what_it_took(tmp_path, monkeypatch):
    """Its sys.stdout has no file descriptor. A refusal is one line without the frames that tyro draws."""
    streams = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    stop = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = [signal.getsignal(s) for s in stop]
    train.main([*TINY, "--steps=2", "--data=synthetic", f"--out={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as refused:
        train.main(["tiny", "--stepz", "3"])
    assert refused.value.code == 2 and [signal.getsignal(s) for s in stop] == handlers
    assert (sys.stdout, sys.stderr) == streams
    assert "step=2/" in streams[0].getvalue() and "done after step 2" in streams[0].getvalue()
    said = streams[1].getvalue()
    assert said.count("\n") == 1 and said.startswith("nanoshard: Unrecognized options: --stepz"), said

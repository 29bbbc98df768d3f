"""Faults that raise no exception: runs that hang, slow ranks, replicas that drift apart."""
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import torch
from pool import ROOT, context, run_ranks
from runs import SHAPE, TINY, rows

import train
from config import Config, Outcome
from ops import checksum
from parallel import make_mesh
from runtime import agree, watch

TIMEOUT = 2.0  # the ranks' --timeout from the fault on; until then PATIENT holds, so a slow start is no hang
PATIENT = 200.0
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:/usr/bin")
FAULTS = {  # name: (the line of the last rank, a part of the verdict)
    "sleep": (r"  rank 1: .*in sleep_for_ever \(misbehave\.py", "rank 1 began fewer collectives"),
    "stop": ("nanoshard: hung: .*rank 1 did not answer", "suspended, gone")}


def misbehave(fault, out, n=1, steps=1000000):
    launcher = [MPIEXEC, "-n", str(n)] if n > 1 else []
    script = ROOT / "tests/drills/misbehave.py"
    command = [*launcher, sys.executable, "-u", script, fault, f"3,{TIMEOUT:g}", *SHAPE, "--data=synthetic",
               "--micro-batch=2", "--eval-every=0", "--no-plot", "--log-every=1", "--save-every=0",
               f"--steps={steps}", f"--timeout={PATIENT:g}", f"--out={out}/run"]
    with open(out / "printed", "w") as printed:
        return subprocess.Popen(command, stdout=printed, stderr=printed)


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    if MPIEXEC is None:
        pytest.skip("no mpiexec beside this python")
    jobs = {}
    for fault in FAULTS:
        out = tmp_path_factory.mktemp(fault)
        jobs[fault] = out, misbehave(fault, out, n=2)
    return {fault: (job.wait(240), (out / "printed").read_text(), out / "run/hang")
            for fault, (out, job) in jobs.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hang_is_reported_with_every_stack_and_ended(hung, fault):
    code, text, folder = hung[fault]
    where, cause = FAULTS[fault]
    assert code == Outcome.HUNG, text
    assert text.count("nanoshard: hung: ") == 1 and cause in text and "  rank 0: step 3, in " in text, text
    assert re.search(f"^{where}", text, re.M), text
    assert re.search("^nanoshard: host of rank 1: ", text, re.M), text
    stacks = {path.name: path.read_text() for path in folder.glob("*/rank_*.txt")}
    assert "ddp.py" in stacks["rank_00000.txt"], stacks
    assert "misbehave.py" in stacks.get("rank_00001.txt", "misbehave.py" if fault != "sleep" else "")
    # The process itself measures the time from the fault to the report
    silent = float(re.search(r"no progress for ([\d.]+) s \(--timeout 2\)", text)[1])
    assert TIMEOUT <= silent < PATIENT


def test_a_suspended_run_goes_on_and_sigusr2_writes_stacks(tmp_path):
    job = misbehave("none", tmp_path)

    def wait_for(count, what):
        end = time.monotonic() + PATIENT
        while count() < what:
            assert time.monotonic() < end and job.poll() is None, (tmp_path / "printed").read_text()
            time.sleep(0.05)

    def done():  # a row may be half written
        path = tmp_path / "run/metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0
    wait_for(done, 4)  # the third step has the short limit
    job.send_signal(signal.SIGSTOP)
    time.sleep(2 * TIMEOUT + 1.5)
    before = done()
    job.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # the watchdog's thread has run; it would have written its report
    wait_for(done, before + 10)
    assert not (tmp_path / "run/hang").exists()
    job.send_signal(signal.SIGUSR2)
    wait_for(lambda: "most recent call first" in (tmp_path / "printed").read_text(), True)
    wait_for(done, done() + 10)
    job.send_signal(signal.SIGTERM)
    code, text = job.wait(PATIENT), (tmp_path / "printed").read_text()
    assert code == Outcome.STOPPED and "stopped by SIGTERM" in text and "hung" not in text, text
    assert "SIGTERM: finishes this step, saves and leaves, in about 0:0" in text, text
    assert "train.py" in text.partition("Thread 0x")[2], text


def start_that_hangs(output):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    watch.Watch(0, 0.5)
    ctypes.PyDLL(None).sleep(100)  # as MPI_Init may, it holds the interpreter's lock


def test_a_start_that_hangs_in_c_is_ended_with_its_stacks(tmp_path):
    held = context.Process(target=start_that_hangs, args=(tmp_path / "said",))
    held.start()
    held.join(120)
    said = (tmp_path / "said").read_text()
    assert held.exitcode == 1 and "Timeout" in said and "in start_that_hangs" in said, said


# -----------------------------------------------------------------------------
# The verdict on the reports that ranks write

def report(step, begun, last, place="wait (parallel.py:1 finish)"):
    axes = {"world": [0, 1, 2, 3], "dp": [0, 1, 2, 3]}
    return {"step": step, "what": "", "silent": 5.0, "place": place, "begun": begun, "last": last,
            "axes": axes}


REDUCE = "last collective 30 over dp: all-reduce of (4,) torch.float32"


def test_verdict_names_the_late_rank_its_host_and_groups_the_others():
    """scripts/restart.sh reads the lines of the hosts."""
    hosts = ["n0", "n0", "n1", "n1"]
    reports = {r: report(7, {"dp": 30, "world": 9}, REDUCE) for r in range(4)}
    text = watch.verdict(reports, 4, 5, hosts)
    assert "all ranks began as many collectives: do they differ below?" in text and "host of" not in text
    reports[2] = report(7, {"dp": 29, "world": 9}, "last collective 9 over world", "read (data.py:9)")
    text = watch.verdict(reports, 4, 5, hosts)
    assert "rank 2 began fewer collectives than the others" in text
    assert f"\n  ranks 0, 1, 3: step 7, in wait (parallel.py:1 finish), {REDUCE}\n" in text
    assert "\n  rank 2: step 7, in read (data.py:9), last collective 9 over world\n" in text
    assert text.endswith("\nnanoshard: host of rank 2: n1")
    del reports[3]
    assert "rank 3 did not answer" in watch.verdict(reports, 4, 5)


def test_the_rank_that_is_furthest_behind_is_late():
    """Stages may start different numbers of collectives over pp."""
    reports = {r: report(7, {"dp": 30, "world": 9, "pp": 10 + r}, REDUCE) for r in range(4)}
    assert watch.late_ranks(reports) == []
    reports[1] = report(7, {"dp": 29, "world": 9}, REDUCE)
    reports[3] = report(2, {"dp": 30, "world": 2}, "")
    assert watch.late_ranks(reports) == [3]


# -----------------------------------------------------------------------------
# Slow ranks

class SteppedClock:
    """A Stopwatch whose time passes only where the test says so, in milliseconds."""
    now = 0.0

    def __init__(self, device):
        pass

    def mark(self):
        return SteppedClock.now

    def ms(self, begin, end):
        return end - begin


def session_with_slow_rank(world, argv, ms):
    real = train.micro_batches

    def slow(*args):
        SteppedClock.now += 20.0
        if world.rank == world.size - 1:
            SteppedClock.now += ms
        return real(*args)
    with mock.patch.object(train, "micro_batches", slow), mock.patch.object(watch, "Stopwatch", SteppedClock):
        return runs.session(world, argv)


def test_a_slow_rank_is_named(tmp_path):
    argv = [*TINY, f"--out={tmp_path}", "--steps=12", "--log-every=3", "--save-every=0"]
    got = run_ranks(2, session_with_slow_rank, argv, 50.0)
    last = rows(tmp_path, ())[-1]
    assert (last["slowest_rank"], last["step_ms_min"], last["step_ms_max"]) == (1, 20.0, 70.0)
    assert not (tmp_path / "hang").exists()
    assert "slow rank 1: 70.0 ms of its own per step, the median" in got[0]["out"], got[0]["out"]


def test_a_slow_rank_is_compared_within_its_stage_and_named_one_time_after_three_intervals(capsys):
    mesh = SimpleNamespace(world=SimpleNamespace(calls=None, size=8), stage=SimpleNamespace(size=4))
    s = watch.Stragglers(mesh, torch.device("cpu"))
    equal, slow = [10.0] * 4 + [30.0] * 4, [10.0] * 4 + [30.0] * 3 + [40.0]
    for ms in (slow, slow, equal, slow, slow):
        s.say_slow(ms)
    assert capsys.readouterr().out == ""
    s.say_slow(slow)
    said = capsys.readouterr().out
    assert said.startswith("slow rank 7: 40.0 ms of its own per step, the median of its stage is 30.0")
    for ms in (slow, *3 * [[100.0, 100.0, 100.0, 103.0] * 2], *3 * [[0.1, 0.1, 0.1, 1.5] * 2]):
        s.say_slow(ms)
    assert said.count("\n") == 1 and capsys.readouterr().out == ""


# -----------------------------------------------------------------------------
# Replicas

def session_with_flipped_bit(world, argv, at, which):
    build, micro_batches, seen = train.build, train.micro_batches, {"step": 0}

    def keep(*args):
        seen["built"] = build(*args)
        return seen["built"]

    def flip(*args):
        seen["step"] += 1
        if seen["step"] == at and world.rank == world.size - 1:
            p = dict(seen["built"][0].named_parameters())[which]
            p.data.view(-1).view(torch.int32)[3] ^= 1 << 12
        return micro_batches(*args)
    with mock.patch.object(train, "build", keep), mock.patch.object(train, "micro_batches", flip):
        return runs.session(world, argv)


@pytest.mark.parametrize("n,layout,which,message", [
    (2, [], "blocks.1.attn.wo.weight", "rank 1 differs from rank 0"),
    (3, ["--global-batch=6"], "blocks.0.norm1.weight", "rank 2 differs from rank 0"),
    (2, ["--tp=2"], "norm.weight", "rank 1 differs from rank 0")], ids=str)
def test_one_changed_bit_on_one_replica_ends_the_run(tmp_path, n, layout, which, message):
    argv = [*TINY, f"--out={tmp_path}", "--steps=9", "--check-every=4", "--save-every=4", *layout]
    results = run_ranks(n, session_with_flipped_bit, argv, 6, which)
    assert [r["code"] for r in results] == [Outcome.REPLICAS_DIFFER] * n, results[0]["err"]
    assert rows(tmp_path)[-1]["step"] == 8 and not (tmp_path / "step_000008").exists()
    lines = results[0]["err"].splitlines()
    assert lines[0].endswith("replicas differ after step 8")
    assert f"gave up after step 8: {tmp_path}/ holds step_000004" in results[0]["out"]
    assert lines[1] == f"{which} on {message}" and len(lines) == 2


def changed_names(world, layout, family):
    """Change one bit of each parameter and buffer in turn, on the last rank -> {name: (ranks that hold the
    same elements, the lines of replica_differences)}."""
    cfg = Config(n_layer=2, n_embd=16, n_head=2, n_kv_head=2, ffn_hidden=32, seq_len=8, **layout, **family)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep)
    model, *_ = train.build(cfg, mesh, 64, world.device)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = mesh.world.everyone.gather({n: list(getattr(t, "offset", (0,))) for n, t in own.items()})
    seen = {"nothing": ([], agree.replica_differences(model, mesh))}
    for name in sorted(held[-1]):
        bits = own[name].data.view(-1).view(torch.int32) if world.rank == world.size - 1 else None
        if bits is not None:
            bits[-1] ^= 1
        alike = [r for r, names in enumerate(held) if names.get(name) == held[-1][name]]
        seen[name] = alike, agree.replica_differences(model, mesh)
        if bits is not None:
            bits[-1] ^= 1
    return seen


SIGMOID = dict(n_experts=4, router="sigmoid", router_bias_rate=0.1)


@pytest.mark.parametrize("n,layout,family", [
    (2, dict(tp=2), SIGMOID), (4, dict(tp=2, ep=2), SIGMOID), (2, dict(pp=2), dict(tied=True, bias=True)),
    (2, dict(zero=1), {})], ids=str)
def test_every_tensor_is_compared_among_all_ranks_that_hold_it(n, layout, family):
    """Parameters over their own axes, the routers' biases over the whole stage."""
    results = run_ranks(n, changed_names, layout, family)
    assert all(seen == results[0] for seen in results), "every rank has the same list"
    alone = 0
    for name, (alike, lines) in results[0].items():
        said = f"{name} on rank {n - 1} differs from {watch.format_ranks(alike[:1])}"
        assert lines == [said] * (len(alike) > 1), alike
        alone += len(alike) <= 1
    assert any("router.bias" in name for name in results[0]) == ("n_experts" in family)
    assert len(results[0]) > alone, "no tensor is on several ranks"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_checksum_in_parts_equals_that_of_the_whole(dtype, monkeypatch):
    t = torch.randn(1003, generator=torch.Generator().manual_seed(1)).to(dtype)
    v = t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]).long()
    want = [v.sum().item(), (v * (2 * torch.arange(1003) + 1)).sum().item()]
    assert checksum.checksum(t).tolist() == want
    monkeypatch.setattr(checksum, "BLOCK", 64)
    assert checksum.checksum(t).tolist() == want

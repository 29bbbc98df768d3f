"""Faults that raise no exception: runs that hang, slow ranks, replicas that drift apart.

The hangs are whole runs of two ranks that end themselves; they run at the same time. The rest uses the pool.
"""
import json
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
import torch.distributed as dist
from pool import ROOT, context, run_ranks
from runs import SHAPE, TINY, rows
from torch.utils._python_dispatch import TorchDispatchMode

import parallel
import train
from config import Config, Outcome
from corpus.samples import Synthetic
from ops import checksum
from parallel import make_mesh
from runtime import agree, guardian, hang, launcher, timing, watch
from runtime.everyone import Everyone
from runtime.launch import CollectiveLog, World

TIMEOUT = 2.0  # the ranks' --timeout from the fault on; until then PATIENT holds, so a slow start is no hang
PATIENT = 200.0
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:/usr/bin")
FAULTS = {  # name: (where the report says the last rank is, a part of the verdict)
    "sleep": ("in sleep_for_ever (misbehave.py", "they wait for rank 1"),
    "mismatch": ("over world: broadcast of (3,) float32", "they wait for rank 0"),
    "held": ("no report: a C call holds the interpreter", "rank 1 did not answer"),
}


def run_rank(rank, folder, fault, argv):
    """In a new process: train.main as rank 0 or 1, until it ends itself; its output goes to a file."""
    misbehave = into_a_file(f"{folder}/printed.{rank}")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    calls = CollectiveLog()
    everyone = Everyone(rank, 2, store, calls)
    launcher.env_rank = lambda: rank
    train.agree.launch.launch = lambda *_, **__: World(rank=rank, size=2, calls=calls, everyone=everyone)
    misbehave.main(fault, 5, argv, TIMEOUT)


def run_alone(folder, argv, seconds):
    """In a new process: train.main as the only rank, whose --timeout is `seconds` from the second step on."""
    into_a_file(f"{folder}/printed").main("none", 2, argv, seconds)


def into_a_file(path):
    """Send this process's output to a file. Return the module misbehave."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/drills")]
    printed = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1), os.dup2(printed, 2)
    import misbehave
    return misbehave


def misbehave(fault, step, seconds, argv):
    """The command of tests/drills/misbehave.py."""
    script = ROOT / "tests/drills/misbehave.py"
    return [sys.executable, "-u", script, fault, f"{step},{seconds:g}", f"--timeout={PATIENT:g}", *argv]


def suspend(out):
    """A run of one rank, stopped for longer than the watchdog waits, then continued; SIGUSR2; SIGTERM.
    Return (exit code, its output, its file of stacks)"""
    limit = 2 * TIMEOUT
    argv = [*TINY, f"--out={out}/run", "--steps=1000000", "--save-every=0", f"--timeout={PATIENT:g}"]
    job = context.Process(target=run_alone, args=(out, argv, limit))
    job.start()

    def wait_for_rows(n):
        end = time.monotonic() + PATIENT
        while not (out / "run/metrics.jsonl").exists() or len(rows(out / "run")) < n:
            assert time.monotonic() < end and job.is_alive(), (out / "printed").read_text()
            time.sleep(0.05)
        return len(rows(out / "run"))
    def stacks():
        return "".join(path.read_text() for path in (out / "run/hang").glob("*.txt"))
    wait_for_rows(4)  # the third step has the short limit
    for _ in range(3):
        os.kill(job.pid, signal.SIGSTOP)
        time.sleep(limit + 6)  # and the grace of misbehave.py: faulthandler's alarm has passed
        done = wait_for_rows(2)
        os.kill(job.pid, signal.SIGCONT)
        wait_for_rows(done + 10)  # the watchdog's thread has run by then
        time.sleep(0.5 * limit)
        if "suspended for" in stacks():
            break  # Else the watchdog's thread was stopped just when it set the alarm again.
    os.kill(job.pid, signal.SIGUSR2)
    wait_for_rows(wait_for_rows(2) + 1)
    os.kill(job.pid, signal.SIGTERM)
    job.join(PATIENT)
    text = (out / "printed").read_text()
    return job.exitcode, text, stacks()


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """Return {fault: (exit codes, output, OUT/hang)}; "mpi" is the fault `sleep` under mpiexec."""
    started, ended = {}, {}
    for fault in [*FAULTS, *["mpi"] * bool(MPIEXEC)]:
        out = tmp_path_factory.mktemp(fault)
        argv = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--steps=400", "--eval-every=0", "--no-plot",
                "--save-every=0", f"--timeout={PATIENT:g}", f"--out={out}/run"]
        if fault == "mpi":
            command = [MPIEXEC, "-n", "2", *misbehave("sleep", 5, TIMEOUT, argv)]
            processes = [subprocess.Popen(command, stderr=subprocess.STDOUT,
                                          stdout=open(out / "printed.0", "w"))]
        else:
            processes = [context.Process(target=run_rank, args=(r, str(out), fault, argv)) for r in (0, 1)]
            for p in processes:
                p.start()
        started[fault] = out, processes
    ended["suspended"] = suspend(tmp_path_factory.mktemp("suspended"))
    for fault, (out, processes) in started.items():
        codes = [p.wait(240) if fault == "mpi" else p.join(240) or p.exitcode for p in processes]
        ended[fault] = codes, "".join(p.read_text() for p in sorted(out.glob("printed.*"))), out / "run/hang"
    return ended


def stacks_of_ranks(folder):
    """Return [stacks of rank 0, of rank 1] as soon as guardian.py has brought them to the node's file."""
    end = time.monotonic() + PATIENT
    while True:
        text = "".join(path.read_text() for path in folder.glob("node_00000.*.txt"))
        pieces = re.split(r"^--- rank (\d+)\n", text, flags=re.M)[1:]
        by_rank = list(zip(pieces[::2], pieces[1::2], strict=True))
        stacks = ["".join(text for of, text in by_rank if of == rank) for rank in "01"]
        if all(stacks):
            return stacks
        assert time.monotonic() < end, text
        time.sleep(0.05)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hang_is_reported_with_every_stack_and_ended(hung, fault):
    codes, text, folder = hung[fault]
    where, cause = FAULTS[fault]
    assert codes == [Outcome.HUNG, -signal.SIGKILL if fault == "held" else Outcome.HUNG], text
    assert text.count("nanoshard: hung: ") == 1 and cause in text and "  rank 0: step 5, in " in text, text
    assert re.search(rf"^  rank 1: .*{re.escape(where)}", text, re.M), text
    stacks = stacks_of_ranks(folder)
    assert "ddp.py" in stacks[0] and "misbehave.py" in stacks[1], stacks
    # The process itself measures the time from the fault to the report
    silent = float(re.search(r"no progress for ([\d.]+) s \(--timeout 2\)", text)[1])
    assert TIMEOUT <= silent < PATIENT


@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec beside this python")
def test_a_hang_under_mpiexec_has_the_same_exit_code(hung):
    (code,), text, folder = hung["mpi"]
    assert code == Outcome.HUNG and text.count("they wait for rank 1") == 1, text
    (path,) = folder.glob("*.jsonl")  # of both ranks of this node
    assert sorted(json.loads(line)["rank"] for line in path.read_text().splitlines()) == [0, 1]


def test_a_suspended_run_goes_on_and_sigusr2_writes_stacks(hung):
    code, text, stacks = hung["suspended"]
    assert code == Outcome.STOPPED and "stopped by SIGTERM" in text and "hung" not in text, text
    *_, last = stacks.split("suspended for ")
    # A thread that is not Python's may get the signal: then no thread is the "Current thread".
    assert "of no hang" in last and "train.py" in last and "hread 0x" in last, stacks


def test_ranks_of_a_node_write_their_stacks_into_one_file(tmp_path):
    """In one piece each, also what came just before the end; a rank that writes none makes no file."""
    for rank, text in ((3, "stack of 3\n"), (4, "stack of 4\n"), (5, "")):
        files = hang.HangFiles(rank)
        beside = hang.Guardian(60, files.private, rank)  # it looks when it is told something, and at the end
        files.open(tmp_path / "hang", "run", node=1)
        beside.collect_into(files.path(".txt"))
        files.stacks.write(text)
        files.stacks.flush()
        beside.close()
        files.close()
    (path,) = (tmp_path / "hang").iterdir()
    assert path.name == "node_00001.run.txt"
    assert path.read_text() == "--- rank 3\nstack of 3\n--- rank 4\nstack of 4\n"


def test_what_is_being_written_is_collected_when_it_is_whole(tmp_path):
    with open(tmp_path / "private", "a") as private:
        collector = guardian.Collector(os.open(tmp_path / "private", os.O_RDONLY), 0)
        collector.path = str(tmp_path / "hang/node.txt")
        for text in ("first half, ", "second half\n"):
            private.write(text)
            private.flush()
            collector.collect()
            assert not (tmp_path / "hang").exists()
    collector.collect()
    collector.collect()
    os.close(collector.stacks)
    assert (tmp_path / "hang/node.txt").read_text() == "--- rank 0\nfirst half, second half\n"


# -----------------------------------------------------------------------------
# The verdict on the reports that ranks write

def report(step, begun, last, place="wait (parallel.py:1 finish)", axes=None):
    axes = axes or {"world": [0, 1, 2, 3], "dp": [0, 1, 2, 3]}
    return {"step": step, "what": "", "silent": 5.0, "place": place, "begun": begun, "last": last,
            "axes": axes}


def test_verdict_names_the_late_rank_and_groups_the_others():
    reports = {r: report(7, {"dp": 30, "world": 9}, ["dp", "all-reduce of (4,) float32"]) for r in range(4)}
    reports[2] = report(7, {"dp": 29, "world": 9}, ["world", "all-reduce of (2,) int64"], "read (data.py:9)")
    text = watch.verdict(reports, 4, 5)
    assert "rank 2 began 29 collectives over dp, others 30: they wait for rank 2" in text
    assert "\n  ranks 0-1, 3: step 7, in wait" in text and "\n  rank 2: step 7, in read (data.py:9)" in text
    reports[1]["begun"]["dp"], reports[1]["last"] = 30, ["dp", "all-gather of (4,) float32"]
    reports[2] = report(7, {"dp": 30, "world": 9}, ["dp", "all-reduce of (4,) float32"])
    text = watch.verdict(reports, 4, 5)
    assert "mismatch over dp: " in text and "all-gather" in text
    del reports[3]
    assert "rank 3 did not answer" in watch.verdict(reports, 4, 5)


def test_verdict_names_the_rank_that_is_furthest_behind():
    axes = {"dp": [0, 1, 2, 3], "world": [0, 1, 2, 3]}
    reports = {r: report(7, {"dp": 30, "world": 9}, ["dp", "all-reduce of (4,) float32"]) for r in range(4)}
    reports[1] = report(7, {"dp": 29, "world": 9}, ["dp", "all-reduce of (4,) float32"], axes=axes)
    reports[3] = report(2, {"dp": 30, "world": 2}, ["world", "all-reduce of (2,) int64"], axes=axes)
    assert "rank 3 began 2 collectives over world, others 9" in watch.verdict(reports, 4, 5)


def test_verdict_names_the_hosts_to_leave_out():
    """scripts/restart.sh reads the lines. Ranks whose programs differ are on no bad host."""
    hosts = ["n0", "n0", "n1", "n1"]
    reports = {r: report(7, {"dp": 30}, ["dp", "all-reduce of (4,) float32"]) for r in range(4)}
    assert "host of" not in watch.verdict(reports, 4, 5, hosts)
    reports[1] = report(7, {"dp": 30}, ["dp", "all-gather of (4,) float32"])
    assert "mismatch" in (text := watch.verdict(reports, 4, 5, hosts)) and "host of" not in text
    reports[1] = report(7, {"dp": 29}, ["dp", "all-reduce of (4,) float32"])
    assert watch.verdict(reports, 4, 5, hosts).endswith("\nnanoshard: host of rank 1: n0")
    del reports[2], reports[3]
    assert watch.verdict(reports, 4, 5, hosts).endswith("\nnanoshard: host of ranks 2-3: n1")


def test_stages_may_start_different_numbers_of_collectives():
    axes = {0: {"world": [0, 1], "dp": [0]}, 1: {"world": [0, 1], "dp": [1]}}
    reports = {r: report(3, {"pp": 10 + r, "world": 4}, ["pp", "receive"], axes=axes[r]) for r in (0, 1)}
    assert "all ranks began the same collectives" in watch.verdict(reports, 2, 5)


def test_a_healthy_run_reports_no_hang_and_logs_times_per_rank(tmp_path):
    results = run_ranks(2, runs.session, [*TINY, f"--out={tmp_path}", "--steps=4", "--check-every=1",
                                          "--zero=1", "--save-every=0", "--timeout=30"])
    assert [r["code"] for r in results] == [0, 0] and not (tmp_path / "hang").exists()
    assert {"step_ms_min", "step_ms_max", "slowest_rank"} <= rows(tmp_path, ())[-1].keys()


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
    """runs.session whose last rank needs so many milliseconds more than the others to load a step's data."""
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
    assert "slow rank 1: 70.0 ms of its own per step, the median" in got[0]["out"], got[0]["out"]


def report_of(rank, begun):
    """What rank of four stages with a tied embedding reports: the ranks of its axes, what it has begun."""
    seen = SimpleNamespace(heartbeat=lambda *_: None)
    watch.Watch.set_mesh(seen, make_mesh(World(rank=rank, size=4), pp=4, groups=False))
    return {"axes": seen.axes, "begun": begun}


def test_the_late_rank_is_named_beside_a_tied_embedding():
    """The stages between the first and the last have no part in its sums."""
    ends, between = {"world": 7, "tied": 30}, {"world": 7}
    reports = {0: report_of(0, ends), 1: report_of(1, between), 2: report_of(2, {"world": 6}),
               3: report_of(3, ends)}
    assert watch.late_ranks(reports) == ([2], "world", 6, 7)


def test_a_stopwatch_measures_a_pause():
    clock = timing.Stopwatch(torch.device("cpu"))
    begin = clock.mark()
    time.sleep(0.02)
    assert clock.ms(begin, clock.mark()) >= 20 and clock.ms(begin, begin) == 0


def test_nothing_is_timed_while_a_cuda_graph_is_recorded(monkeypatch):
    calls = SimpleNamespace(on_next_collective=None)
    mesh = SimpleNamespace(world=SimpleNamespace(calls=calls, size=2), stage=SimpleNamespace(size=2))
    s = watch.Stragglers(mesh, torch.device("cpu"))
    s.cuda = True
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        s.begin()
        calls.on_next_collective()
        assert len(s.spans) == (not capturing)


def test_a_slow_rank_is_compared_within_its_stage_and_named_one_time_after_three_intervals():
    mesh = SimpleNamespace(world=SimpleNamespace(calls=None, size=8), stage=SimpleNamespace(size=4))
    s = watch.Stragglers(mesh, torch.device("cpu"))
    equal, slow = [10.0] * 4 + [30.0] * 4, [10.0] * 4 + [30.0] * 3 + [40.0]
    assert [s.flag_slow(ms) for ms in (slow, slow, equal, slow, slow)] == [[]] * 5
    (line,) = s.flag_slow(slow)
    assert line.startswith("slow rank 7: 40.0 ms of its own per step, the median of its stage is 30.0")
    for ms in (slow, [10.0, 11.0] * 4, [0.1, 0.1, 0.1, 1.5] * 2):
        assert s.flag_slow(ms) == []


# -----------------------------------------------------------------------------
# Replicas

def session_with_flipped_bit(world, argv, at, which):
    """runs.session in which one bit of one weight changes on the last rank, before step `at`."""
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
    (3, ["--global-batch=6"], "blocks.0.norm1.weight", "rank 2 differs from ranks 0-1"),
    (2, ["--tp=2"], "norm.weight", "rank 1 differs from rank 0")], ids=str)
def test_one_changed_bit_on_one_replica_ends_the_run(tmp_path, n, layout, which, message):
    argv = [*TINY, f"--out={tmp_path}", "--steps=9", "--check-every=4", "--save-every=4", *layout]
    results = run_ranks(n, session_with_flipped_bit, argv, 6, which)
    assert [r["code"] for r in results] == [Outcome.REPLICAS_DIFFER] * n, results[0]["err"]
    assert rows(tmp_path)[-1]["step"] == 8 and not (tmp_path / "step_000008").exists()
    lines = results[0]["err"].splitlines()
    assert lines[0].endswith(f"replicas differ after step 8; the newest checkpoint is {tmp_path}/step_000004")
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
        others = watch.format_ranks(alike[:-1]) if len(alike) > 1 else None
        if len(alike) == 2:  # two equal groups: the lower rank is taken to be right
            others = f"rank {alike[0]}"
        assert lines == [f"{name} on rank {n - 1} differs from {others}"] * (len(alike) > 1), alike
        alone += len(alike) <= 1
    assert any("router.bias" in name for name in results[0]) == ("n_experts" in family)
    assert len(results[0]) > alone, "no tensor is on several ranks"


def test_the_smaller_group_of_replicas_is_reported():
    hashes = [[1, 2], [1, 2], [1, 3], [1, 2]]
    assert agree.describe_mismatch("w", hashes, (0, 2, 4, 6)) == "w on rank 4 differs from ranks 0, 2, 6"
    assert agree.describe_mismatch("w", [[1, 2], [1, 2]], (0, 1)) is None
    assert agree.differences_message([f"w{i}" for i in range(20)], 5, []).endswith("w7\n... and 12 more")


def compare_with_gathers_under_way(world):
    """A ZeRO-1 step whose all-gather of the weights runs only when it is waited for -> the replicas'
    differences, compared without that wait and with it."""
    start = parallel.Axis.start_all_gather

    def at_wait(axis, out, x, wait=False):
        if wait:
            return start(axis, out, x, wait)
        x = x.clone()
        return SimpleNamespace(wait=lambda: start(axis, out, x, wait=True))
    cfg = Config(n_layer=1, n_embd=16, n_head=2, n_kv_head=2, ffn_hidden=32, seq_len=8, zero=1, micro_batch=1,
                 warmup=0)
    mesh, source = make_mesh(world), Synthetic(64, cfg.seq_len, cfg.seed)
    model, data_parallel, opt = train.build(cfg, mesh, 64, world.device)
    with mock.patch.object(parallel.Axis, "start_all_gather", at_wait):
        batches = train.micro_batches(cfg, mesh, source, 0, 2, world.device)
        train.Step(cfg, model, data_parallel, opt)(batches, 1)
        with mock.patch.object(model, "provide_weights", lambda *args: None):
            stale = agree.replica_differences(model, mesh)
        return stale, agree.replica_differences(model, mesh)


def test_replicas_are_compared_after_the_all_gather_of_the_weights():
    for stale, differences in run_ranks(2, compare_with_gathers_under_way):
        assert stale and differences == []


class AllocatedBytes(TorchDispatchMode):
    """Records the memory that operations allocate: {address: bytes}. A view allocates none."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage()
        self.bytes[storage.data_ptr()] = max(storage.nbytes(), self.bytes.get(storage.data_ptr(), 0))
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_checksum_in_parts_equals_that_of_the_whole(dtype, monkeypatch):
    t = torch.randn(1003, generator=torch.Generator().manual_seed(1)).to(dtype)
    v = t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]).long()
    want = [v.sum().item(), (v * (2 * torch.arange(1003) + 1)).sum().item()]
    assert checksum.checksum(t).tolist() == want
    monkeypatch.setattr(checksum, "BLOCK", 64)
    with AllocatedBytes() as allocated:
        got = checksum.checksum(t)
    allocated.bytes.pop(t.untyped_storage().data_ptr())  # views of t
    assert got.tolist() == want and max(allocated.bytes.values()) == 64 * 8


def test_a_stopped_guardian_does_not_keep_a_finished_run():
    watchdog = watch.Watch(0, 600.0)
    os.kill(watchdog.guardian.process.pid, signal.SIGSTOP)
    t0 = time.monotonic()
    with watchdog:
        pass
    assert time.monotonic() - t0 < PATIENT


def test_once_all_ranks_have_started_a_hang_is_no_missing_rank():
    with watch.Watch(0, 600.0) as watchdog:
        watchdog.joining("MPI_Init", 2)
        assert watchdog.phase.waits_in == ("MPI_Init", 2) and watchdog.phase.limit == 600.0
        watchdog.joining("", 2)
        assert watchdog.phase.waits_in is None and watchdog.phase.limit == 1200.0


# -----------------------------------------------------------------------------
# The watchdog without its thread

@pytest.fixture
def quiet_watch(monkeypatch):
    """A Watch that was made without its thread and its guardian; its alarms are written down."""
    alarms = []
    monkeypatch.setattr(watch.faulthandler, "dump_traceback_later",
                        lambda seconds, file: alarms.append(("stacks", seconds)))
    guardian = SimpleNamespace(allow=lambda seconds: alarms.append(("guardian", seconds)))
    monkeypatch.setattr(watch.hang, "Guardian", lambda tick, stacks, rank: guardian)
    monkeypatch.setattr(watch.threading, "Thread", lambda **named: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    return watch.Watch(3, 32.0), alarms


def test_the_alarms_of_the_watchdog_are_set_at_once(quiet_watch):
    dog, alarms = quiet_watch
    assert (dog.grace, dog.tick) == (8.0, 1.0)
    assert alarms == [("stacks", 64.0 + 4.0), ("guardian", 64.0 + 16.0)]
    assert dog.alarm == 1000.0 + 64.0 + 4.0


def test_the_guardian_waits_for_a_report(quiet_watch, monkeypatch):
    """A report sleeps for at most 2 graces. Beside other work it takes longer, and is not to be killed."""
    dog, alarms = quiet_watch
    monkeypatch.setattr(watch.os, "_exit", alarms.append)
    monkeypatch.setattr(dog, "_report_hang", lambda: alarms.append("report"))
    dog._report_and_exit()
    assert alarms[2:] == [("guardian", 5 * dog.grace), "report", watch.Outcome.HUNG]


@pytest.mark.parametrize("rank,naps", [(0, [8.0, 4.0]), (3, [8.0, 8.0])])
def test_the_lowest_rank_leaves_first_after_a_hang(rank, naps, quiet_watch, monkeypatch, capfd):
    """mpiexec kills the others then. MPICH's ends with the code of the lowest rank, which must not be 9."""
    dog, _ = quiet_watch
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    dog.rank = rank
    report = dog._report()
    others = {other: report for other in (0, 3)}
    dog.files = SimpleNamespace(folder=None, write=lambda *texts: None, read_node=lambda: others,
                                read_all=lambda: others)
    dog._report_hang()
    assert slept == naps
    assert ("hung" in capfd.readouterr().err) == (rank == 0)


@pytest.mark.parametrize("gap,forgiven", [(2.9, False), (3.1, True)])
def test_time_in_which_a_process_did_not_run_is_forgiven(gap, forgiven, quiet_watch, monkeypatch):
    dog, _ = quiet_watch
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    times = iter([1000.0 + gap + dog.tick])

    def wait(tick):
        now[0] = next(times, now[0])
        return len(waits) == 2 or waits.append(tick)

    waits = [None]
    dog.stopping = SimpleNamespace(wait=wait)
    dog._watch()
    assert dog.last == 1000.0 + (gap if forgiven else 0.0)


def test_ranks_that_miss_another_speak_one_after_the_other(quiet_watch, monkeypatch, capsys):
    dog, _ = quiet_watch
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    dog.joining("MPI_Init", 8)
    dog._report_missing_ranks()
    dog.rank = 100
    dog._report_missing_ranks()
    assert slept == [pytest.approx(0.9), 8.0]
    assert "rank 3 of 8 waited 0 s in MPI_Init: a rank did not start" in capsys.readouterr().err


def test_a_guardian_leaves_no_process_behind():
    files = hang.HangFiles(0)
    beside = hang.Guardian(0.1, files.private, 0)
    beside.close()
    assert beside.process.returncode is not None

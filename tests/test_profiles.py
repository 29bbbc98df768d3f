"""--pdb: the chosen rank stops in pdb at two pipes, the others wait. --trace: what it says and writes, and no
handle of a collective outlives torch's profiler."""
import gc
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch
import torch.distributed as dist
from pool import ROOT, run_ranks
from test_launch import BIN, FLAGS, clean_env

from interface.command_line import parse
from runtime import profiles
from runtime.resume import State

sys.path.insert(0, str(ROOT / "bench"))

import training


def read(stream, end):
    """Return what comes from a stream, up to the word `end`."""
    text = ""
    while end not in text:
        data = os.read(stream.fileno(), 1 << 16).decode()
        assert data, text
        text += data
    return text


@pytest.mark.long
def test_the_chosen_rank_stops_and_the_others_wait(tmp_path):
    argv = [BIN / "mpiexec", "-n", "2", sys.executable, ROOT / "train.py", *FLAGS,
            f"--out={tmp_path}/run", "--timeout=2", "--pdb=1"]
    env = {**clean_env(), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env)
    said = read(run.stdout, "/in\n")
    assert "rank 1 of 2 stops in pdb, the others wait" in said
    command = re.search(r"type: (cat (\S+)/out & cat > \S+/in)", said)
    folder = Path(command[2])
    assert folder.stat().st_mode & 0o777 == 0o700
    terminal = subprocess.Popen(["sh", "-c", command[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    read(terminal.stdout, "(Pdb) ")
    assert not folder.exists()
    # Typed ahead; longer than --timeout: neither the watchdog nor the process group ends the waiting rank
    for typed in (b"p 'I am', run.world.rank, run.first_step\n", b"cfg.seq_len + 1000\n"):
        terminal.stdin.write(typed)
    terminal.stdin.flush()
    answers = read(terminal.stdout, "1016\n")
    assert "('I am', 1, 1)" in answers
    time.sleep(4.5)
    terminal.stdin.write(b"c\n")
    terminal.stdin.flush()
    said = run.stdout.read().decode()
    assert run.wait() == 0 and "done after step 6" in said, said
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 6
    terminal.stdin.close()
    assert terminal.wait(60) == 0


def test_trace_says_where_it_is_and_how_to_look_at_it(tmp_path, capfd):
    """... once, over three steps; the last line names it, and a profile that is there."""
    run = SimpleNamespace(step=torch.zeros(1).add_, cfg=SimpleNamespace(steps=12), state=State(),
                          out=tmp_path, model=None, data_parallel=SimpleNamespace(buckets_of={None: []}))
    step = profiles.traced(run)
    for _ in range(12):
        step(1)
    said = capfd.readouterr()
    assert said.out == f"trace: {tmp_path}/trace.json; open it in https://ui.perfetto.dev\n"
    assert "USDT" not in said.err, "torch prints lines of its own"
    steps = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if e["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}  # from 0


def test_a_traced_run_of_few_steps_ends_cleanly(tmp_path):
    """Where the interpreter ends while the profiler records, the process would die."""
    argv = [sys.executable, ROOT / "train.py", *FLAGS, "--steps=3", "--trace", "--out", tmp_path]
    assert subprocess.run(argv, cwd=tmp_path).returncode == 0


def works_below(root):
    """Return all handles of torch's collectives that root leads to, but for what functions reach."""
    found = []
    todo = [root]
    seen = {}  # objects by id; they stay alive, so that no id comes twice
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, dist.Work):
            found.append(thing)
        todo += gc.get_referents(thing)
    return found


def handles_of_a_traced_step(world, flags, folder):
    run = training.Training(parse([*runs.TINY, *flags]), world)
    run.out = folder / str(world.rank)
    step = profiles.traced(run)
    for _ in range(2):
        step(run.batches())  # run() would wait for the weights
    step.stop()
    return [len(works_below(run))]


@pytest.mark.parametrize("ranks,flags", [
    (2, ["--zero=1"]), (2, ["--zero=3"]), (2, ["--pp=2"]), (2, ["--n-experts=2", "--ep=2", "--zero=1"]),
    (4, ["--zero=2", "--shard=2", "--global-batch=8"])])
def test_no_handle_outlives_a_traced_step(ranks, flags, tmp_path):
    """One that is freed after torch's profiler ended some processes in a fault (gloo, torch 2.13)."""
    work = dist.Work()
    assert works_below(SimpleNamespace(handles=[work])) == [work]  # one would be found
    assert run_ranks(ranks, handles_of_a_traced_step, flags, tmp_path) == [[0]] * ranks

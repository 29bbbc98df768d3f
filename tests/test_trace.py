"""--trace: what it says and writes, and that no handle of a collective outlives torch's profiler."""
import gc
import json
import sys
import types
from types import SimpleNamespace

import pytest
import runs
import torch
import torch.distributed as dist
from pool import ROOT, run_ranks

from interface.command_line import parse
from runtime import profiles
from runtime.resume import State

sys.path.insert(0, str(ROOT / "bench"))

import training


def test_trace_says_where_it_is_and_how_to_look_at_it(tmp_path, capfd):
    """... once, over three steps; the last line names it, and a profile that is there."""
    run = SimpleNamespace(step=torch.zeros(1).add_, cfg=SimpleNamespace(steps=12), state=State(),
                          out=tmp_path, model=None, data_parallel=SimpleNamespace(buckets_of={None: []}))
    run.cfg.steps = 2
    assert profiles.traced(run) is run.step
    assert "and this run takes 2: there is no trace" in capfd.readouterr().out
    run.cfg.steps = 12
    step = profiles.traced(run)
    for _ in range(12):
        step(1)
    said = capfd.readouterr()
    assert said.out == f"trace: {tmp_path}/trace.json; open it in https://ui.perfetto.dev\n"
    assert "USDT" not in said.err, "torch prints lines of its own"
    steps = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
             if e["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}  # from 0


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


def handles_of_a_traced_step(world, flags):
    """Return how many handles are left when the profiler hears that a step is over."""
    run = training.Training(parse([*runs.TINY, *flags]), world)
    for _ in range(2):
        run.step(run.batches())  # run() would wait for the weights
    profiles.wait_for_all_weights(run.model, run.data_parallel)
    return [len(works_below(run))]


@pytest.mark.parametrize("ranks,flags", [
    (2, []), (2, ["--zero=1"]), (2, ["--zero=2"]), (2, ["--zero=3"]), (2, ["--pp=2"]),
    (2, ["--n-experts=2", "--ep=2", "--zero=1"]), (4, ["--zero=2", "--shard=2", "--global-batch=8"])])
def test_no_handle_outlives_a_traced_step(ranks, flags):
    """One that is freed after torch's profiler ended some processes in a fault (gloo, torch 2.13)."""
    assert run_ranks(ranks, handles_of_a_traced_step, flags) == [[0]] * ranks


def test_a_handle_is_found():
    work = dist.Work()
    assert works_below(SimpleNamespace(handles=[work])) == [work]

"""train.py with a step recorded as a CUDA graph, on a CPU: recording runs the step, a replay runs it again
on the recorded tensors. What a real graph adds is bench/gpu_matrix.py's.
"""
import contextlib
from unittest import mock

import pytest
import torch
from pool import run_ranks
from runs import TINY, rows, same, session
from shared import SharedWindow

import train
from fast import graph, window
from runtime.stragglers import Stragglers

MOE = ["--n-experts=4", "--top-k=1", "--aux-coef=0.01", "--ep=2"]


@contextlib.contextmanager
def recording(seen):
    """torch.cuda's graphs for CPU tensors. seen: recordings, replays, first collectives recorded."""
    made, capturing = [], False

    class Recorded(graph.Graph):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    def replay():
        seen["replays"] += 1
        made[-1].output = made[-1].f(made[-1].inputs)

    @contextlib.contextmanager
    def capture(_):
        nonlocal capturing
        seen["recordings"] += 1
        capturing = True
        yield
        capturing = False

    class AsOnGpu(Stragglers):
        def begin(self):
            self.cuda = True
            super().begin()
            first = self.world.calls.on_next_collective

            def watched():
                before = len(self.spans)
                first()
                assert len(self.spans) == before + (not capturing)  # a recorded event has no time
                seen["first"] += capturing
            self.world.calls.on_next_collective = watched
    patches = [(train, "static_shapes", lambda *_: True), (window, "Window", SharedWindow),
               (train, "Graph", Recorded), (train, "Stragglers", AsOnGpu), (torch.cuda, "graph", capture),
               (torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=replay)),
               (torch.cuda, "synchronize", lambda: None),
               (torch.cuda, "is_current_stream_capturing", lambda: capturing)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def recorded(world, argv):
    seen = {"recordings": 0, "replays": 0, "first": 0}
    with recording(seen):
        return session(world, argv), seen


@pytest.mark.parametrize("flags", [[], ["--zero=1"], ["--zero=1", *MOE], ["--zero=1", "--ep-slack=1", *MOE]],
                         ids=["ddp", "zero1", "experts", "experts-without-room"])
def test_a_run_with_a_graph_is_the_run_without(flags, tmp_path):
    """Logged every step, evaluated, checked, saved, a range skipped, resumed: weights, moments, every row."""
    common = [*TINY, "--lr=1e-3", *flags, "--eval-every=3", "--eval-iters=2", "--check-every=2",
              "--save-every=6", "--decay-steps=14", "--train-range-to-skip", "8", "9", "--out"]
    plain = run_ranks(2, session, [*common, str(tmp_path / "plain"), "--steps=14"])
    assert [r["code"] for r in plain] == [0, 0], plain[0]["err"]
    replays = 3 - ("--ep=2" in flags)  # three to warm up; experts take the first step without windows
    for steps, more in ((6, []), (14, ["--resume=auto"])):  # 14: two are skipped
        argv = [*common, str(tmp_path / "graph"), f"--steps={steps}", *more]
        for result, seen in run_ranks(2, recorded, argv):
            assert result["code"] == 0, result["err"]
            if "--ep-slack=1" not in flags:
                assert seen == {"recordings": 1, "replays": replays, "first": 1}
    same(tmp_path / "plain", tmp_path / "graph", 14)
    assert rows(tmp_path / "plain") == rows(tmp_path / "graph")


@pytest.mark.skipif("not config.getoption('--slow')", reason="a minute of compilation: pytest --slow")
@pytest.mark.parametrize("flags", [["--tp=2"], ["--ep=2", "--n-experts=4", "--top-k=1"]], ids=["tp2", "ep2"])
def test_compiled_is_eager(flags, tmp_path):
    for out in ("eager", "compiled"):
        argv = [*TINY, *flags, "--steps=3", "--save-every=0", "--dtype=fp64", "--prompt=",
                f"--out={tmp_path / out}", *["--compile"] * (out == "compiled")]
        assert [r["code"] for r in run_ranks(2, session, argv)] == [0, 0]
    for a, b in zip(rows(tmp_path / "eager"), rows(tmp_path / "compiled"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-8)

"""What a person sees around a run: its first lines and its last, streams that fail, refusals that leave
nothing."""
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool import ROOT
from runs import TINY, session

import plan
from config import Outcome
from interface import terminal
from runtime import log
from runtime.launch import World
from runtime.resume import State

# -----------------------------------------------------------------------------
# The first lines of a run, and the last

def test_the_time_left_and_the_closing_line_leave_out_the_first_row(tmp_path, monkeypatch, capsys):
    """The first row of a start also counts what is compiled."""
    now = iter([1000.0, 1112.0])
    monkeypatch.setattr("time.time", lambda: next(now))
    run_log = log.Log(tmp_path, {"steps": 400})
    for step, ms in ((1, 9999.0), (100, 240.0), (200, 230.0), (400, 950.0)):
        run_log.row(step=step, ms=ms, tok_s=17e3)
    left = [line.partition("left=")[2] for line in capsys.readouterr().out.splitlines()]
    assert left == ["", "1:12", "0:46", ""]
    assert run_log.speed() == "400 steps in 1:52, median 240 ms, 17,000 tok/s"


@pytest.mark.parametrize("flags, said", [
    (["--top-k=3"], "--top-k 3 has no effect without --n-experts"),
    (["--momentum=0.9"], "--momentum 0.9 has no effect without --optimizer muon"),
    (["--rope-scaling", "8", "1", "4", "64", "--pos=learned"],
     "--rope-scaling (8.0, 1.0, 4.0, 64.0) has no effect without --pos rope"),
    (["--top-k=1", "--n-experts=2"], ""), (["tiny-moe"], "")])
def test_a_flag_that_changes_nothing_is_named_and_the_run_goes_on(flags, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "17.server")
    got = session(World(), [*flags, *TINY, "--steps=1", "--save-every=0", f"--out={tmp_path / 'run'}"])
    assert got["code"] == 0
    lines = [line.strip() for line in got["out"].splitlines() if "has no effect" in line]
    assert lines == ([said] if said else [])
    assert json.loads((tmp_path / "run/config.json").read_text())["job"] == "17.server"


def test_a_run_that_is_done_says_what_can_be_typed_next(tmp_path, monkeypatch, capsys):
    config = {"data": "data/stdlib", "objective": "causal"}
    run = SimpleNamespace(out=tmp_path, outcome=Outcome.DONE, stop_reason=None, state=State(step=400),
                          cfg=SimpleNamespace(report=False), saver=SimpleNamespace(saved=400))

    def said(**changes):
        run.log_file = SimpleNamespace(begun={"config": {**config, **changes}})
        log.report_ending(run)
        return [line.partition(":")[2].strip() for line in capsys.readouterr().out.splitlines()[1:]]

    monkeypatch.setattr(log.signals, "parsed", (None, None))
    (tmp_path / "report.html").touch()
    curves = f"python plot.py {tmp_path}"
    page = f"{tmp_path}/report.html, in a browser"
    assert said() == [f"python sample.py {tmp_path}", curves, page]
    assert said(data="synthetic") == said(objective="mlm") == [curves, page]


# -----------------------------------------------------------------------------
# Streams that are full, left or closed, and what a terminal is sent of a text of others

EVIL = "\x1b]0;title\x07 \x9b31m \u202e back\rover\x7f"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_no_control_characters_of_a_text(monkeypatch):
    escaped = r"\x1b]0;title\x07 \x9b31m \u202e back\rover\x7f"
    for stream, said in ((Terminal(), escaped), (io.StringIO(), EVIL)):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.show(EVIL)
        terminal.show("für\t日本\u200d\n")
        assert stream.getvalue() == f"{said}für\t日本\u200d\n"


def test_a_run_goes_on_where_its_stream_lacks_a_character():
    raw = io.BytesIO()
    stream = terminal.Stream(io.TextIOWrapper(raw, "latin-1"))
    for text in ("\u00e9", "\u65e5", "e"):
        stream.write(text)
    stream.flush()
    assert raw.getvalue() == b"\xe9?e"


ENDS = {  # redirection: (exit code of plot.py, words on its stderr)
    ">/dev/full": (2, "nanoshard: [Errno 28] No space left on device\n"),
    "| true": (141, ""),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_well_whatever_its_streams_are(how, tmp_path):
    rows = "".join(f'{{"step": {i}, "loss": {i}}}\n' for i in range(1, 9))
    (tmp_path / "metrics.jsonl").write_text(rows)
    line = f"{sys.executable} {ROOT}/plot.py {tmp_path} {how}; exit ${{PIPESTATUS[0]}}"
    job = subprocess.run(["bash", "-c", line], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (job.returncode, job.stderr) == ENDS[how]


# -----------------------------------------------------------------------------
# plan.py

def test_a_plan_does_not_depend_on_what_lies_in_data(monkeypatch, capsys):
    monkeypatch.setattr(plan, "open_data", lambda cfg: (None, None, 77, ""))
    plan.main(["gpt2"])
    assert " counts that of DIR\n  vocabulary       50,257\n" in capsys.readouterr().out
    plan.main(["gpt2", "--data", "data/chars"])
    assert "parameters\n  vocabulary          77\n" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# Before anything else

@pytest.mark.parametrize("program", ["train", "prepare", "plan", "checkpoint", "bench/doctor"])
def test_a_program_without_its_packages_says_what_to_type(program):
    """-S leaves out the packages of an environment, as where none is activated."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    old = ("import runpy, sys; sys.version_info = 3, 10; sys.path.append('bench'); "
           f"runpy.run_path('{program}.py', run_name='__main__')")
    for words, said in (["-S", f"{program}.py"], "python has no numpy"), (["-c", old], "is Python "):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"nanoshard: this {said}")

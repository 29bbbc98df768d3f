"""Streams of programs that are closed, full or left, and what a terminal is sent of a file's text."""
import fcntl
import io
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from forks import run_forks
from pool import ROOT
from test_borders import write_foreign

import convert
from interface import streams, terminal
from interface.command_line import wrong_input
from runtime import limits

EVIL = "\x1b]0;title\x07 \x9b31m \u202e back\rover\x7f"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [streams.Printed, streams.Stream])
def test_a_terminal_gets_no_control_characters_of_a_text(kind, monkeypatch):
    escaped = r"\x1b]0;title\x07 \x9b31m \u202e back\rover\x7f"
    for stream, said in ((Terminal(), escaped), (io.StringIO(), EVIL)):
        monkeypatch.setattr(sys, "stdout", stream)
        guard = kind("stdout")
        print(EVIL, "für\t日本\n", end="")
        guard.close()
        assert sys.stdout is stream and stream.getvalue() == f"{said} für\t日本\n"


def test_a_program_sends_a_terminal_no_control_characters(monkeypatch, capsys):
    """Also a text that nothing has cleaned before, such as a sample; and a line of wrong input."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit), wrong_input():
        print(EVIL)
        print(EVIL, file=sys.stderr)
        raise ValueError(EVIL)
    for stream in (out, err):
        assert not {*"\x1b\x07\x9b\r\x7f\u202e"} & {*stream.getvalue()} and "title" in stream.getvalue()
    assert sys.stdout is out and sys.stderr is err


@pytest.mark.parametrize("encoding,said", [("ascii", "|'.: +- ? ?"), ("latin-1", "|'.: +- é ?")])
def test_a_stream_without_the_characters_of_a_plot_gets_one_in_ascii(encoding, said, monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with streams.guarded():
        print("\u2502\u2811\u28c0\u28a3 \u253c\u2500 é \u65e5", end="")
    assert raw.getvalue().decode(encoding) == said


def test_a_plot_is_drawn_on_an_ascii_terminal(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {i}}}\n' for i in range(1, 9)))
    job = subprocess.run([sys.executable, ROOT / "plot.py", tmp_path], capture_output=True, text=True,
                         env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (job.returncode, job.stderr) == (0, "") and job.stdout.isascii()
    assert "+----" in job.stdout and "..''" in job.stdout and "?" not in job.stdout


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return a folder and {(program, redirection): its process}, all at once."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "run").mkdir()
    rows = [json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(9)]
    (folder / "run/metrics.jsonl").write_text("".join(rows))
    (folder / "text").write_text("some words of a text\n" * 300)
    commands = {"plot": f"plot.py {folder}/run",
                "prepare": f"prepare.py {folder}/text --name {{}} --out {folder} --tokenizer char"}
    started = {}
    for number, how in enumerate(ENDS):
        for name, command in commands.items():
            line = f"{sys.executable} {ROOT}/{command.format(f'd{number}')} {how}; exit ${{PIPESTATUS[0]}}"
            started[name, how] = subprocess.Popen(["bash", "-c", line], text=True,
                                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                  stderr=subprocess.PIPE)
    return folder, started


ENDS = {  # redirection: (exit code of plot.py, words on its stderr, words on that of prepare.py)
    ">/dev/full": (2, "stdout cannot be written: [Errno 28]", "stdout: [Errno 28]"),
    "2>/dev/full >/dev/full": (2, "", ""),
    ">&-": (0, "stdout is closed; what is printed there is lost", "stdout is closed; what is"),
    "2>&-": (0, "", ""),
    "<&-": (0, "", ""),
    "| true": (0, "", ""),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_well_whatever_its_streams_are(how, jobs):
    """plot.py, whose result is what it prints, ends with 2 where that is lost; prepare.py goes on."""
    folder, started = jobs
    code, *words = ENDS[how]
    for name, say, want in (("plot", words[0], code), ("prepare", words[1], 0)):
        out, err = started[name, how].communicate(timeout=240)
        assert started[name, how].returncode == want and say in err, (name, err)
        assert "Traceback" not in err and "ignored" not in err and err.count("\n") <= 1, (name, err)
        if how == "2>&-":
            assert "nanoshard" not in out
    assert (folder / f"d{list(ENDS).index(how)}/meta.json").exists()


LOST = {  # redirection: (exit code of a program whose result is what it prints, its line on stderr)
    ">/dev/full": (2, "nanoshard: stdout cannot be written: [Errno 28] No space left on device; free "
                      "space there, or send it elsewhere"),
    ">&-": (0, "nanoshard: stdout is closed; what is printed there is lost"),
}
RESULTS = {"plan": "plan.py tiny", "checkpoint": "checkpoint.py show {}",
           "sample": "sample.py {} --prompt so", "chat": "sample.py {} --chat"}

@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_is_lost_is_one_line(tmp_path):
    convert.main(["import", str(write_foreign(tmp_path / "theirs")), "--out", str(tmp_path / "model")])
    (tmp_path / "typed").write_text("some\nsome\n")
    cases = [(name, how) for name in RESULTS for how in LOST]
    jobs = []
    for number, (name, how) in enumerate(cases):
        program, *words = RESULTS[name].format(tmp_path / "model").split()
        words += ["--max-new-tokens=4"] * (program == "sample.py")
        jobs.append(([f"{ROOT}/{program}", *words], f"{tmp_path}/typed",
                     "/dev/full" if how == ">/dev/full" else "", f"{tmp_path}/{number}"))
    codes = run_forks(jobs, modules=["torch.nn.attention.bias", "checkpoint", "pipeline", "plan", "sample"])
    for number, (case, code) in enumerate(zip(cases, codes, strict=True)):
        said = (tmp_path / str(number)).read_text().splitlines()
        said = [line for line in said if "the newest checkpoint" not in line]  # sample.py says which it takes
        assert (code, said) == (LOST[case[1]][0], [LOST[case[1]][1]]), (case, code, said)


def test_behind_mpiexec_lines_have_the_width_of_its_terminal(monkeypatch):
    """... to which mpiexec writes. Each line asks again, and leaves no file open."""
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 20, 77, 0, 0))
    reading, writing = os.pipe()
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(leader, "rb"), open(follower, "rb"), open(reading, "rb"), open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "__stdout__", stdout)
        monkeypatch.setattr(terminal, "_stream_of_launcher", lambda number: os.ttyname(follower))
        before = limits.open_now()
        assert terminal.columns() == 77
        assert limits.open_now() == before

"""Streams of programs that are full, left or closed, and what a terminal is sent of a text of others."""
import io
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT

from interface import terminal
from interface.command_line import wrong_input

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


def test_a_stream_takes_characters_that_its_encoding_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1"))
    with wrong_input():
        print("é 日", end="")
    assert raw.getvalue().decode("latin-1") == "é ?"


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

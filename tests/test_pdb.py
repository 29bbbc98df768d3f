"""--pdb RANK in a terminal: the chosen rank stops in pdb, the others wait, the run continues."""
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pool import ROOT
from test_launch import BIN, FLAGS, clean_env

from interface.command_line import parse
from train import main


class Terminal:
    """A command in a pseudo terminal: read() returns its output, type() sends a line."""

    def __init__(self, command):
        self.fd, slave = pty.openpty()
        self.job = subprocess.Popen([*map(str, command)], stdin=slave, stdout=slave, stderr=slave,
                                    env={**clean_env(), "OMP_NUM_THREADS": "1"}, start_new_session=True)
        os.close(slave)
        os.set_blocking(self.fd, False)
        self.text = ""

    def read(self, pattern, seconds=240):
        """Return the output since the last read(), up to the pattern; None: up to the end of the command."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                data = os.read(self.fd, 1 << 16)
                self.text += data.decode(errors="replace").replace("\r", "")
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the last process has closed the terminal
                data = b""
            if pattern and (m := re.search(pattern, self.text)):
                output, self.text = self.text[:m.end()], self.text[m.end():]
                return output
            if self.job.poll() is not None and pattern is None:
                return self.text
        self.job.kill()
        raise AssertionError(f"no {pattern!r} in:\n{self.text}")

    def type(self, line):
        os.write(self.fd, f"{line}\n".encode())


START = {"mpiexec": [BIN / "mpiexec", "-n", 2, sys.executable],
         "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", 2]}


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_the_chosen_rank_stops_and_the_others_wait(launcher, tmp_path):
    t = Terminal([*START[launcher], ROOT / "train.py", *FLAGS, f"--out={tmp_path}", "--timeout=2", "--pdb=1"])
    assert "rank 1 of 2 stops in pdb, the others wait" in t.read(r"\(Pdb\) ")
    t.type("p 'I am', run.world.rank, run.first_step")
    assert re.search(r"\('I am', 1, 1\)", t.read(r"\(Pdb\) "))
    time.sleep(2.5)  # longer than --timeout: neither the watchdog nor the process group ends the waiting rank
    t.type("cfg.seq_len + 1000")
    assert "1016" in t.read(r"\(Pdb\) ")
    t.type("c")
    rest = t.read(None)
    assert t.job.returncode == 0 and "done after step 6" in rest, rest
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_rank_that_does_not_exist_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as e:
        main([*FLAGS, f"--out={tmp_path}", "--pdb=3"])
    assert e.value.code == 2 and "--pdb 3: the ranks are 0 to 0" in capsys.readouterr().err
    assert parse([]).pdb == -1 and not Path(tmp_path, "metrics.jsonl").exists()

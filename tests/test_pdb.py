"""--pdb RANK: the chosen rank stops in pdb at a socket, the others wait, the run continues."""
import os
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

START = {"mpiexec": [BIN / "mpiexec", "-n", "2", sys.executable],
         "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]}


def read(stream, end):
    """Return what comes from a stream, up to the word `end`."""
    text = ""
    while end not in text:
        data = os.read(stream.fileno(), 1 << 16).decode()
        assert data, text
        text += data
    return text


@pytest.mark.long
@pytest.mark.parametrize("launcher", START)
def test_the_chosen_rank_stops_and_the_others_wait(launcher, tmp_path):
    argv = [*START[launcher], ROOT / "train.py", *FLAGS, f"--out={tmp_path}/run", "--timeout=2", "--pdb=1"]
    env = {**clean_env(), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env)
    said = read(run.stdout, "/socket\n")
    assert "rank 1 of 2 stops in pdb, the others wait" in said
    command = re.search(r"type: python (-m runtime.profiles (\S+)/socket)", said)
    folder = Path(command[2])
    assert folder.stat().st_mode & 0o777 == 0o700
    terminal = subprocess.Popen([sys.executable, *command[1].split()], cwd=ROOT, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE)
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
    assert terminal.wait(60) == 0


def test_a_rank_that_does_not_exist_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as e:
        main([*FLAGS, f"--out={tmp_path}", "--pdb=3"])
    assert e.value.code == 2 and "--pdb 3: the ranks are 0 to 0" in capsys.readouterr().err
    assert parse([]).pdb == -1 and not Path(tmp_path, "metrics.jsonl").exists()

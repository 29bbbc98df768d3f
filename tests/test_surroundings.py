"""What surrounds a run, in one process: the launcher's variables, MPI's answer, streams, signals, the ramp.

Stand-ins take the place of other ranks and of signals.
"""
import contextlib
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from config import Config
from interface.layout import check_batch
from runtime import launch, session

# -----------------------------------------------------------------------------
# The batch and its ramp

@pytest.mark.parametrize("full,ramp,wrong", [
    (16, (4, 4, 100), ""), (16, (16, 4, 100), ""), (1500, (500, 1, 10), ""), (8, (), ""),
    (1502, (500, 1, 10), ""), (16, (20, 4, 100), "whole increments"), (16, (4, 5, 100), "whole increments")])
def test_a_ramp_reaches_the_batch_in_whole_increments(full, ramp, wrong):
    with pytest.raises(ValueError, match=wrong) if wrong else contextlib.nullcontext():
        check_batch(Config(micro_batch=1, rampup_batch_size=ramp), 1, full)


# -----------------------------------------------------------------------------
# How the ranks start

def test_one_process_is_told_how_many_its_layout_needs(monkeypatch, capsys):
    monkeypatch.setattr(launch, "started_by", lambda: ("single", 1))
    with pytest.raises(SystemExit):
        session.parse_flags(["--tp=2"])
    assert "--tp 2 needs 2 ranks: mpiexec -n 2" in capsys.readouterr().err


def test_the_first_host_of_a_slurm_step_is_where_the_ranks_meet(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: SimpleNamespace(stdout="n1\nn2\n"))
    monkeypatch.setattr(launch.fcntl, "ioctl", lambda *args: bytes(20) + bytes([10, 0, 0, 9]))
    assert launch._slurm_address(1) == ("127.0.0.1", 20219) and launch._slurm_address(2) == ("n1", 20219)
    assert launch._address(2) == "10.0.0.9"  # hsn0's, on Slingshot machines
    monkeypatch.setenv("MASTER_ADDR", "n7")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert launch._slurm_address(2) == ("n7", 1234) and launch._address(2) == "n7"


@pytest.mark.parametrize("written,node,ranks,n_nodes", [
    ("1,2", 0, 1, 2), ("1,2", 1, 2, 2), ("4(x2),3", 1, 4, 3), ("4(x2),3", 2, 3, 3), ("2", 0, 2, 1)])
def test_each_node_of_a_step_has_its_own_number_of_ranks(written, node, ranks, n_nodes, monkeypatch):
    env = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "0",
           "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": written}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    start = launch.detect(env)
    assert start.local_size == ranks
    assert launch._place(start, None) == (12, ranks, node, n_nodes)


def test_the_line_of_a_node_is_shown_at_once(monkeypatch):
    """A launcher's ranks write to pipes: what is not flushed is not seen while a run hangs."""
    out = io.TextIOWrapper(io.BufferedWriter(io.BytesIO()))
    monkeypatch.setattr(sys, "stdout", out)
    launch.print_node(launch.World(rank=2, size=4, local_size=2, node=1, n_nodes=2, launcher="hydra"))
    shown = out.buffer.raw.getvalue().decode()
    assert shown.startswith("[node 2/2 ") and "hydra: 2 of 4 ranks here, cpu" in shown and shown[-1] == "\n"


@pytest.mark.parametrize("launcher,rank,size,found", [
    ("hydra", 1, 4, "world"), ("pals", 1, -1, "world"), ("srun", 1, 4, "world"), ("srun", 1, 2, None),
    ("srun", 0, 4, None), ("hydra", 0, 4, "error"), ("hydra", 1, 2, "error"), ("pals", 0, -1, "error")])
def test_mpi_and_the_launcher_agree_on_rank_and_size(launcher, rank, size, found, monkeypatch):
    world = SimpleNamespace(rank=1, size=4)
    monkeypatch.setattr(launch, "_mpi", lambda: SimpleNamespace(COMM_WORLD=world))
    start = launch.Start(launcher, rank, size, 0, 1)
    if found == "error":
        with pytest.raises(ValueError, match=f"started rank {rank} of {size} but mpi4py sees 1 of 4"):
            launch._mpi_world(start)
    else:
        assert launch._mpi_world(start) is (world if found else None)


# -----------------------------------------------------------------------------
# How they end

class Left(Exception):
    """os._exit() of a stand-in."""


def leave(code):
    raise Left(code)


@pytest.mark.parametrize("error,code,said", [
    (RuntimeError("broken\x1b[31m"), 1, "Traceback (most recent call last):\n"),
    (RuntimeError("Connection closed by peer"), 1, "nanoshard: rank 3 lost a peer (Connection closed by")])
@pytest.mark.parametrize("has_mpi", [True, False])
def test_an_exception_is_said_and_ends_all_ranks(error, code, said, has_mpi, monkeypatch):
    aborted = []
    comm = SimpleNamespace(Abort=aborted.append) if has_mpi else None
    err = io.StringIO()
    monkeypatch.setattr(sys, "excepthook", None)
    monkeypatch.setattr(sys, "__stderr__", err)
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", leave)
    launch.end_all_on_exception(3, comm)
    with pytest.raises(Left) as leaving:
        try:
            raise error
        except Exception as e:
            sys.excepthook(type(e), e, e.__traceback__)
    lost = "lost a peer" in said
    assert leaving.value.args == (code,) and aborted == ([code] if has_mpi and not lost else [])
    assert err.getvalue().startswith(said) and "\x1b" not in err.getvalue()
    assert "Traceback" not in said or err.getvalue().endswith("RuntimeError: broken\\x1b[31m\n")

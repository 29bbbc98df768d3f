"""What surrounds a run, in one process: the launcher's variables, MPI's answer, streams, signals, the ramp.

Stand-ins take the place of other ranks and of signals.
"""
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool import ROOT

from config import Config
from interface.files import ChangedFile
from interface.layout import check_batch, check_ramp
from runtime import abort, address, launch, launcher, mpi, session
from runtime.launcher import bare_environment

# -----------------------------------------------------------------------------
# The batch and its ramp

@pytest.mark.parametrize("full,ramp,wrong", [
    (16, (4, 4, 100), ""), (16, (16, 4, 100), ""), (1500, (500, 1, 10), ""), (8, (), ""),
    (1502, (500, 1, 10), ""), (16, (20, 4, 100), "whole increments"), (16, (4, 5, 100), "whole increments")])
def test_a_ramp_reaches_the_batch_in_whole_increments(full, ramp, wrong):
    def check():
        check_ramp(full, ramp, 1)
        check_batch(Config(micro_batch=1, rampup_batch_size=ramp), 1, full)

    if not wrong:
        check()
        return
    with pytest.raises(ValueError, match=wrong):
        check()
    with pytest.raises(ValueError, match=wrong):
        check_batch(Config(micro_batch=1, rampup_batch_size=ramp), 1, full)


# -----------------------------------------------------------------------------
# How the ranks start

def test_one_process_is_told_how_many_its_layout_needs(monkeypatch, capsys):
    monkeypatch.setattr(launcher, "started_by", lambda: ("single", 1))
    with pytest.raises(SystemExit):
        session.parse_flags(["--tp=2"])
    assert "--tp 2 needs 2 ranks: mpiexec -n 2" in capsys.readouterr().err


@pytest.mark.parametrize("names,host", [("n1 n2\n", "n1"), ("n1\n", "127.0.0.1"), ("\n", None)])
def test_the_first_host_of_a_slurm_step_is_where_the_ranks_meet(names, host, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: SimpleNamespace(stdout=names))
    if host is None:
        with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST=n\[1-2\] .* names no host"):
            launch._slurm_address(1)
        return
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert launch._slurm_address(len(names.split())) == (host, 20000 + 7 * 31 + 2)
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert launch._slurm_address(len(names.split())) == (host, 29501)


def test_what_scontrol_says_is_repeated_with_a_fix(monkeypatch):
    for name, value in {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}.items():
        monkeypatch.setenv(name, value)

    def run(command, **how):
        raise subprocess.CalledProcessError(1, command, stderr="scontrol: error: a\nscontrol: fatal: b\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=r"failed \(scontrol: fatal: b\): set SLURM_CONF, or .* mpiexec"):
        launch._slurm_address(2)


@pytest.mark.parametrize("host,n_nodes", [("127.0.0.1", 1), ("localhost", 2)])  # localhost: all interfaces
def test_a_port_that_another_program_has_is_one_line(host, n_nodes, capsys):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of {host}, .* is taken: set MASTER_PORT"):
            launch._listen(host, port, n_nodes)
    assert "Errno" not in capsys.readouterr().err


def test_ranks_of_one_node_meet_on_loopback(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    assert (launch._address(1), launch._address(2)) == ("127.0.0.1", "10.0.0.7")


@pytest.mark.parametrize("name", ["torchrun", "srun", "hydra"])
def test_a_name_without_an_address_is_said_before_anybody_waits(name, monkeypatch, capsys):
    """Under MPI rank 0 speaks, and the others end with it; otherwise each rank has the name for itself."""
    def unknown(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    def waits(*args, **how):
        raise AssertionError("a rank waits for a host that is not there")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(launch, "_slurm_address", lambda n_nodes: ("nohost", 29500))
    monkeypatch.setattr(launch.dist, "rendezvous", waits)
    monkeypatch.setattr(launch.dist, "TCPStore", waits)
    monkeypatch.setenv("MASTER_ADDR", "nohost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    sent = []
    for rank in (0, 1):
        comm = None
        if name == "hydra":  # what rank 0 sends arrives at rank 1
            comm = SimpleNamespace(bcast=lambda value: sent.append(value) or sent[0])
        with pytest.raises(SystemExit) as e, launcher.wrong_environment():
            launch._store(name, comm, rank, 2, None)
        said = capsys.readouterr().err
        assert e.value.code == 2
        assert said.startswith("nanoshard: nohost has no address here") or (comm and rank == 1 and not said)


def test_the_last_port_is_65535():
    launcher.check_site("torchrun", {"MASTER_PORT": "65535", "SLURM_NODEID": "70000"})
    for name, port in (("torchrun", 65536), ("srun", 65536), ("srun", 0)):
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} .* is no port"):
            launcher.check_site(name, {"MASTER_PORT": str(port)})


def test_the_step_of_an_interactive_shell_has_a_number_of_ten_digits():
    """The step of salloc's shell has the number 4294967290, and a federation numbers its jobs so high."""
    ids = {"SLURM_JOB_ID": "4294967295", "SLURM_STEP_ID": "4294967290", "SLURM_NODEID": "0"}
    rank = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert launcher.detect({**ids, **rank}) == ("srun", 0, 1, 0, 1)


@pytest.mark.parametrize("written,node,ranks,n_nodes", [
    ("1,2", 0, 1, 2), ("1,2", 1, 2, 2), ("4(x2),3", 1, 4, 3), ("4(x2),3", 2, 3, 3), ("2", 0, 2, 1)])
def test_each_node_of_a_step_has_its_own_number_of_ranks(written, node, ranks, n_nodes, monkeypatch):
    env = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "0",
           "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": written}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    start = launcher.detect(env)
    assert start.local_size == ranks
    assert launch._place(start, None) == (12, ranks, node, n_nodes)


def test_the_watchdog_knows_that_a_rank_waits_in_mpi(monkeypatch, capsys):
    waits = []

    def world(name, rank, size):
        assert waits == [("MPI_Init", 4)]
        raise ValueError("no MPI")

    monkeypatch.setattr(mpi, "world", world)
    with pytest.raises(SystemExit):
        start = launcher.Start("hydra", 1, 4, 1, 2)
        launch._join(start, 9.0, lambda where, size: waits.append((where, size)))
    assert capsys.readouterr().err == "nanoshard: no MPI\n"


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
    monkeypatch.setattr(mpi, "init", lambda: SimpleNamespace(COMM_WORLD=world))
    if found == "error":
        with pytest.raises(ValueError, match=f"started rank {rank} of {size} but mpi4py sees 1 of 4"):
            mpi.world(launcher, rank, size)
    else:
        assert mpi.world(launcher, rank, size) is (world if found else None)


# -----------------------------------------------------------------------------
# How they end

class Left(Exception):
    """os._exit() of a stand-in."""


def leave(code):
    raise Left(code)


@pytest.mark.parametrize("error,code,said", [
    (RuntimeError("broken\x1b[31m"), 1, "Traceback (most recent call last):\n"),
    (ChangedFile("a.bin was cut"), 2, "nanoshard: rank 3: a.bin was cut\n"),
    (RuntimeError("Connection closed by peer"), 1, "nanoshard: rank 3 lost a peer (Connection closed by")])
@pytest.mark.parametrize("has_mpi", [True, False])
def test_an_exception_is_said_and_ends_all_ranks(error, code, said, has_mpi, monkeypatch):
    aborted = []
    comm = SimpleNamespace(Abort=aborted.append) if has_mpi else None
    err = io.StringIO()
    monkeypatch.setattr(sys, "excepthook", None)
    monkeypatch.setattr(sys, "__stderr__", err)
    monkeypatch.setattr(abort.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", leave)
    abort.end_all_on_exception(3, comm)
    with pytest.raises(Left) as leaving:
        try:
            raise error
        except Exception as e:
            sys.excepthook(type(e), e, e.__traceback__)
    lost = "lost a peer" in said
    assert leaving.value.args == (code,) and aborted == ([code] if has_mpi and not lost else [])
    assert err.getvalue().startswith(said) and "\x1b" not in err.getvalue()
    assert "Traceback" not in said or err.getvalue().endswith("RuntimeError: broken\\x1b[31m\n")


# -----------------------------------------------------------------------------
# Streams


# -----------------------------------------------------------------------------
# sample.py --chat

@pytest.mark.skipif(sys.platform != "linux", reason="another system asks for an address in another way")
def test_the_address_of_an_interface_and_of_a_route():
    """The second is one to which others can send, not that of a socket without a route."""
    assert address.of_interface("lo") == "127.0.0.1"
    store = SimpleNamespace(host="127.0.0.1", port=1)
    assert address.on_route(store, "lo") == "127.0.0.1" and address.on_route(store, "") != "0.0.0.0"


@pytest.mark.parametrize("ranks,name,value,why", [
    (1, "TORCH_LOGS", "nonsense", "Invalid log settings"),
    (1, "TORCH_LOGS", "+dynamo,no.module", "No module named 'no'"),
    (2, "TORCH_DISTRIBUTED_DEBUG", "nonsense", "must be OFF, INFO, or DETAIL"),
    pytest.param(2, "GLOO_SOCKET_IFNAME", "nonsense", "no network interface nonsense with an address",
                 marks=pytest.mark.long)])
def test_a_variable_that_torch_does_not_understand_is_one_line(ranks, name, value, why, tmp_path):
    command = [sys.executable, ROOT / "train.py", "tiny", "--data=synthetic", f"--out={tmp_path}"]
    if ranks > 1:
        command = [Path(sys.executable).with_name("mpiexec"), "-n", str(ranks), *command]
    env = {**bare_environment(), name: value}
    job = subprocess.run(command, capture_output=True, text=True, env=env)
    assert job.returncode == 2 and job.stderr.count("\n") == 1, job.stderr
    assert f"{name}={value} in the environment" in job.stderr
    assert why in job.stderr and "unset it" in job.stderr
    assert list(tmp_path.iterdir()) == []

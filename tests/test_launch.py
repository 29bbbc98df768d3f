"""Every launcher is recognised; python, mpiexec and torchrun train alike; one exception ends all ranks.
Ranks that were started differently, signals, streams that fail, the address that the store listens on."""
import json
import os
import runpy
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import torch
from pool import ROOT, context, run_ranks
from runs import SHAPE, TINY, assert_refused, refused, rows

import train
from corpus import samples
from runtime import launch, session
from runtime.launch import started_by

BIN = Path(sys.executable).parent
# Every process in an sbatch script of 2 tasks sees these, whatever starts it (recorded on a real Slurm)
SLURM_BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2",
    "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODELIST": "n0"}
SRUN = {
    **SLURM_BATCH, "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_ID": "0"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}
PALS = {"PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2", "PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2",
        "PMI_LOCAL_SIZE": "4"}
PALS_PMIX = {"PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2", "PMIX_RANK": "6"}
TORCHRUN = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
CRAY = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
PROXY_STEP = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}

ENVIRONMENTS = {  # name: (environment, launcher, rank, size, local rank)
    "nothing": ({}, "single", 0, 1, 0),
    "torchrun": (TORCHRUN, "torchrun", 2, 4, 0),
    "pals": (PALS, "pals", 6, 8, 2),
    "pals, PALS_PMI=pmix: no PMI_SIZE, mpi4py gives the size": (PALS_PMIX, "pals", 6, -1, 2),
    "open mpi": (OPENMPI, "openmpi", 3, 4, 1),
    "mpich hydra": (HYDRA, "hydra", 1, 2, 1),
    "cray aprun": (CRAY, "cray", 5, 8, 1),
    "srun": (SRUN, "srun", 5, 8, 1),
    "srun --mpi=pmi2: PMI_RANK but no local rank": (
        {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, "srun", 5, 8, 1),
    "srun --mpi=cray_shasta": ({**SRUN, **CRAY}, "cray", 5, 8, 1),
    "python in a batch script: SLURM_NTASKS is not its own size": (SLURM_BATCH, "single", 0, 1, 0),
    "mpiexec in a batch script": ({**SLURM_BATCH, **HYDRA}, "hydra", 1, 2, 1),
    "mpiexec in a batch script, its proxy a step of one task": (
        {**PROXY_STEP, **HYDRA}, "hydra", 1, 2, 1),
    "torchrun, one agent per node by srun": ({**SRUN, **TORCHRUN}, "torchrun", 2, 4, 0),
    "torchrun under mpiexec": ({**HYDRA, **TORCHRUN}, "torchrun", 2, 4, 0),
    "RANK alone, left in a shell": ({"RANK": "3", "MASTER_ADDR": "n0"}, "single", 0, 1, 0),
    "WORLD_SIZE alone, as some containers set it": ({"WORLD_SIZE": "8"}, "single", 0, 1, 0),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_rank_and_size_are_read_from_the_launchers_variables(name):
    env, *want = ENVIRONMENTS[name]
    assert started_by({"PATH": "/bin", **env}) == tuple(want)


@pytest.mark.parametrize("env,words", [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 in the environment has no LOCAL_RANK"),
    ({**HYDRA, "PMI_SIZE": "two"}, "'two'")], ids=["half of torchrun's", "letters"])
def test_an_environment_that_can_start_no_rank_is_one_line(env, words, monkeypatch):
    for key, text in env.items():
        monkeypatch.setenv(key, text)
    refused(session.parse_flags, ["--steps=1"], words)


def test_where_the_ranks_of_several_nodes_meet(monkeypatch):
    monkeypatch.setattr(launch.fcntl, "ioctl", lambda *args: bytes(20) + bytes([10, 0, 0, 9]))
    assert launch._own_address() == "10.0.0.9"  # hsn0's, on Slingshot machines


def test_the_nodes_of_a_world():
    env = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3", "GROUP_RANK": "2"}
    with mock.patch.dict(os.environ, env):
        assert launch._node("srun", None) == (1, 3) and launch._node("torchrun", None)[0] == "2"
    world = launch.World(rank=4, size=6, nodes=(0, 1, 1, 0, 1, 1))
    assert (world.n_nodes, world.local_size) == (2, 4)


@pytest.mark.parametrize("launcher,rank,size,found", [
    ("hydra", 1, 4, "world"), ("pals", 1, -1, "world"), ("srun", 1, 4, "world"), ("srun", 1, 2, None),
    ("srun", 0, 4, None), ("hydra", 0, 4, "error"), ("hydra", 1, 2, "error"), ("pals", 0, -1, "error")])
def test_mpi_and_the_launcher_agree_on_rank_and_size(launcher, rank, size, found, monkeypatch):
    world = SimpleNamespace(rank=1, size=4)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    monkeypatch.setenv("PMI_FD", "3")
    monkeypatch.setattr(os.path, "exists", lambda path: path.endswith("mpich"))
    start = launch.Start(launcher, rank, size)
    if found == "error":
        with pytest.raises(ValueError, match=f"started rank {rank} of {size} but mpi4py sees 1 of 4"):
            launch._mpi_world(start)
    else:
        assert launch._mpi_world(start) is (world if found else None)
    assert os.environ.pop("MPIR_CVAR_CH4_NETMOD", None) == ("ofi" if launcher == "srun" else None)


# -----------------------------------------------------------------------------
# Ranks that were not started alike

def session_of_each(world, argvs):
    return runs.session(world, argvs[world.rank])


UNLIKE = {  # name: (the flags of each rank, what the line says)
    "lr": ([[f"--lr={lr}", "--global-batch=6"] for lr in (1e-3, 2e-3, 1e-3)],
           "rank 1 has --lr 0.002, rank 0 has 0.001; start all ranks with the same flags"),
    "layout": ([["--tp=2"], []], "rank 1 has --tp 1, rank 0 has 2"),
    "data": ([[], ["--data=elsewhere"]], "rank 1 has --data 'elsewhere', rank 0 has 'synthetic'"),
    "wrong on one": ([[], ["--config=x"]], "No such file or directory: 'x'"),
    "wrong on all": ([["--n-head=3"]] * 2, "nanoshard: n-embd 16 does not divide by n-head 3"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_with_different_flags_end_together_before_the_first_step(name, tmp_path):
    flags, line = UNLIKE[name]
    argvs = [[*TINY, "--steps=2", f"--out={tmp_path / 'run'}", *own] for own in flags]
    results = run_ranks(len(flags), session_of_each, argvs)
    assert all(r["code"] == 2 and not r["steps"] for r in results)
    (said,) = [r for r in results if r["err"]]
    assert_refused(said, line)
    assert not (tmp_path / "run").exists()


@pytest.mark.long  # "wrong on one" above is the same without a launcher
def test_a_rank_that_alone_sees_wrong_files_ends_the_others(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    (tmp_path / "0/c.json").write_text("{}")
    argv = [BIN / "mpiexec", "-n", "2", "bash", "-c", 'cd $PMI_RANK; exec "$@"', "bash", sys.executable,
            ROOT / "train.py", *FLAGS, "--config=c.json"]
    ended = subprocess.run(argv, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=100)
    assert_refused({"code": ended.returncode, "err": ended.stderr}, "No such file or directory: 'c.json'")


def session_with_other_data(world, argv):
    real = samples.open_data
    with mock.patch.object(samples, "open_data", lambda *a: (*real(*a)[:3], ["one", "two"][world.rank])):
        return runs.session(world, argv)


def test_ranks_with_different_data_end_together(tmp_path):
    argv = [*TINY, "--steps=2", f"--out={tmp_path / 'run'}"]
    assert_refused(run_ranks(2, session_with_other_data, argv)[1],
                   "rank 1 has --data with the tokens 'two', rank 0 has 'one'")


# -----------------------------------------------------------------------------
# The real launchers

FLAGS = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--global-batch=8", "--lr=1e-2", "--warmup=2",
         "--steps=6", "--log-every=1", "--eval-every=0", "--save-every=0", "--no-plot"]


def clean_env():
    """Return the environment without a launcher's variables: pytest itself may run under one."""
    prefixes = ("PMI", "MPI", "OMPI", "PALS", "SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_",
                "TORCHELASTIC", "HYD")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}


def run_alone(words, output=""):
    """In a new process that has imported torch: run a program. Its output goes into a file, or to nobody:
    stdout is a pipe whose reader has gone, as `| head` leaves it, and stderr a full disk."""
    os.environ.clear()
    os.environ.update(clean_env())
    reader, out = os.pipe()
    os.close(reader)
    err = os.open("/dev/full", os.O_WRONLY)
    if output:
        out = err = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")

    def words(name):
        return [str(ROOT / "train.py"), *FLAGS, f"--out={folder / name}", f"--dump-grads={folder / name}.st"]

    launchers = {"hydra": [BIN / "mpiexec", "-n", "2", sys.executable, *words("hydra")],
                 "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *words("torchrun")]}
    jobs = {}  # at the same time: torchrun needs only one core at first
    for name, command in launchers.items():
        jobs[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env=clean_env())
    alone = context.Process(target=run_alone, args=(words("single"), str(folder / "said")))
    alone.start()
    ended = {}
    for name, job in jobs.items():
        said = job.communicate(timeout=240)[0]
        ended[name] = job.returncode, said
    alone.join(240)
    ended["single"] = alone.exitcode, (folder / "said").read_text()
    return folder, ended


def test_python_mpiexec_and_torchrun_train_alike(trained):
    """With the same global batch: every loss, and --dump-grads' weights and gradients, to 1e-5 in fp32."""
    from safetensors.torch import load_file
    folder, ended = trained
    losses, dumps = {}, {}
    for name, (code, said) in ended.items():
        out = folder / name
        assert code == 0, said
        n = 1 if name == "single" else 2
        assert f" {name}: {n} of {n} ranks here" in said and said.count("[node 1/1 ") == 1
        assert "Traceback" not in said, said
        assert json.loads((out / "config.json").read_text())["launcher"] == name
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = torch.tensor([[r["loss"], r["grad_norm"]] for r in metrics], dtype=torch.float64)
        dumps[name] = load_file(folder / f"{name}.st")
    assert losses["single"].shape == (6, 2) and losses["single"][-1, 0] < losses["single"][0, 0] - 0.01
    want = dumps["single"]
    assert len(want) == 2 * 21
    assert want["wte.weight"].shape == want["grad/head.weight"].shape == (100, 16)  # without padding
    for name in ("hydra", "torchrun"):
        torch.testing.assert_close(losses[name], losses["single"], rtol=1e-5, atol=0)
        assert dumps[name].keys() == want.keys()
        for key, t in want.items():
            assert t.dtype == torch.float32 and (key[:5] != "grad/" or t.any()), key
            torch.testing.assert_close(dumps[name][key], t, rtol=1e-5, atol=1e-5 * t.abs().max().item(),
                                       msg=key)


CRASH = """
import sys, time
import train
def broken(self, *args):
    if self.model.mesh.world.rank == 1:
        raise RuntimeError("the rank that breaks")
    time.sleep(1000)  # the other rank waits in no collective, so nothing tells it of the exception
train.Step.__call__ = broken
train.main(sys.argv[1:])
"""


def test_an_exception_on_one_rank_ends_all_ranks(tmp_path):
    """Two ranks over MPICH's OFI over tcp, which sends only inside of MPI's functions, also on one host."""
    (tmp_path / "crash.py").write_text(CRASH)
    command = [BIN / "mpiexec", "-n", "2", sys.executable, tmp_path / "crash.py", *FLAGS]
    env = {**clean_env(), "PYTHONPATH": str(ROOT), "MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}
    crashed = subprocess.run([*command, f"--out={tmp_path / 'run'}"], capture_output=True, text=True,
                             timeout=240, env=env)
    assert " hydra: " in crashed.stdout, crashed
    assert crashed.returncode not in (0, 2, 85)
    assert "RuntimeError: the rank that breaks" in crashed.stderr and "in broken" in crashed.stderr
    # PyTorch wraps sys.excepthook, and would repeat on stderr, with this prefix, what the hook wrote
    assert crashed.stderr.count("Traceback") == 1 and "[rank1]:" not in crashed.stderr


def test_deterministic_is_set_before_the_device(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: sys.exit(9))
    for flags, want in ([], (False, None)), (["--deterministic"], (True, ":4096:8")):
        with pytest.raises(SystemExit, match="9"):
            train.main(["tiny", "--data=synthetic", *flags])
        assert torch.are_deterministic_algorithms_enabled() is want[0]
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == want[1]
    torch.use_deterministic_algorithms(False)


# -----------------------------------------------------------------------------
# Who may reach the store

def listeners():
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A":
                found[int(port, 16)] = address
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")
def test_on_one_node_the_store_listens_on_loopback_alone():
    one = SimpleNamespace(bcast=lambda value: value, size=1, Iprobe=lambda: None)
    store, another = (launch._meet(launch.Start("hydra", 0, 2), one, 1, timedelta(seconds=20)) for _ in "ab")
    assert listeners()[store.port] == listeners()[another.port] == "0100007F"
    other = SimpleNamespace(bcast=lambda _: (store.host, store.port), size=1, Iprobe=lambda: None)
    client = launch._meet(launch.Start("hydra", 1, 2, 1), other, 1, timedelta(seconds=20))
    client.set("key", "value")
    assert store.get("key") == b"value"


# -----------------------------------------------------------------------------
# Signals and streams

def session_with_ignored_signal(world, argv, at):
    mine = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    result = runs.session(world, argv, {at: int(signal.SIGHUP), at + 1: int(signal.SIGINT)})
    signal.signal(signal.SIGHUP, mine)
    return result


def test_an_ignored_signal_stays_ignored(tmp_path):
    (got,) = run_ranks(1, session_with_ignored_signal, [*TINY, "--steps=9", f"--out={tmp_path}"], 2)
    assert got["code"] == 85 and "stopped by SIGINT after step 3" in got["out"]


def test_a_second_interrupt_leaves_at_once_and_a_copy_of_the_first_does_not(capfd, monkeypatch):
    signals = session.Signals()
    signals.can_save = True
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", sys.exit)
    said = []
    term, interrupt = signal.SIGTERM, signal.SIGINT  # after 0.1 and 0.2 s: the launcher's copy of the same
    for seconds, number in ((0, term), (0.1, term), (31, interrupt), (31.2, interrupt)):
        now[0] = 1000.0 + seconds
        signals._handle(number)
        said.append(capfd.readouterr().err.count("finishes this step, saves and leaves"))
    assert said == [1, 0, 1, 0] and signals.number == signal.SIGTERM
    now[0] += 1
    with pytest.raises(SystemExit) as e:
        signals._handle(signal.SIGINT)
    assert e.value.code == session.INTERRUPTED and "a second SIGINT" in capfd.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="waits in the C library")
def test_a_signal_while_a_start_is_inside_a_c_call():
    """As in MPI_Init, or while ranks wait for each other: Python runs no handler of the main thread there."""
    code = ("import ctypes; from runtime.session import signals; signals.catch(); "
            "mutex = ctypes.create_string_buffer(64); "
            "lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); print('ready', flush=True); "
            "lock(mutex)")
    inside = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=clean_env(), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert inside.stdout.readline() == "ready\n"
    inside.send_signal(signal.SIGTERM)
    try:
        said = inside.communicate(timeout=20)[1]
    finally:
        inside.kill()
    assert inside.returncode == 85 and "stopped by SIGTERM during start-up" in said, said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_stream_that_fails_never_ends_a_run(tmp_path):
    words = [str(ROOT / "train.py"), *FLAGS, f"--out={tmp_path}/run"]
    unheard = context.Process(target=run_alone, args=(words,))
    unheard.start()
    unheard.join(240)
    assert unheard.exitcode == 0 and len(rows(tmp_path / "run")) == 6

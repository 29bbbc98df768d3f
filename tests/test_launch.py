"""Every launcher is recognised; python, mpiexec and torchrun train alike; one exception ends all ranks.
Ranks that were started differently, GPUs that a process was shown alone, signals, streams that fail, the
address that the store listens on."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import torch
from forks import become
from pool import ROOT, context, run_ranks
from runs import SHAPE, TINY, assert_refused, rows

import train
from corpus import samples
from runtime import agree, launch, session
from runtime.launch import VISIBLE, detect

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
INTEL = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
         "I_MPI_MPIRUN": "mpirun"}
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
CYCLIC = {**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
          "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
SALLOC = {k: v for k, v in SLURM_BATCH.items() if "PROCID" not in k}
PROXY_STEP = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}

ENVIRONMENTS = {  # name: (environment, launcher, rank, size, local rank, local size)
    "nothing": ({}, "single", 0, 1, 0, 1),
    "torchrun": (TORCHRUN, "torchrun", 2, 4, 0, 2),
    "pals": (PALS, "pals", 6, 8, 2, 4),
    "pals, PALS_PMI=pmix: no PMI_SIZE, mpi4py gives the size": (PALS_PMIX, "pals", 6, -1, 2, 1),
    "open mpi": (OPENMPI, "openmpi", 3, 4, 1, 2),
    "mpich hydra": (HYDRA, "hydra", 1, 2, 1, 2),
    "intel mpi": (INTEL, "hydra", 3, 4, 1, 2),
    "cray aprun": (CRAY, "cray", 5, 8, 1, 4),
    "srun": (SRUN, "srun", 5, 8, 1, 4),
    "srun, uneven nodes": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1"}, "srun", 5, 8, 1, 3),
    "srun --mpi=pmi2: PMI_RANK but no local rank": (
        {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, "srun", 5, 8, 1, 4),
    "srun -m cyclic: rank 2 is the second of its node": (CYCLIC, "srun", 2, 4, 1, 2),
    "srun --mpi=cray_shasta": ({**SRUN, **CRAY}, "cray", 5, 8, 1, 4),
    "python in a batch script: SLURM_NTASKS is not its own size": (SLURM_BATCH, "single", 0, 1, 0, 1),
    "python in an salloc shell": (SALLOC, "single", 0, 1, 0, 1),
    "mpiexec in a batch script": ({**SLURM_BATCH, **HYDRA}, "hydra", 1, 2, 1, 2),
    "mpiexec in a batch script, its proxy a step of one task": (
        {**PROXY_STEP, **HYDRA}, "hydra", 1, 2, 1, 2),
    "open mpi in a batch script": ({**SLURM_BATCH, **OPENMPI}, "openmpi", 3, 4, 1, 2),
    "torchrun, one agent per node by srun": ({**SRUN, **TORCHRUN}, "torchrun", 2, 4, 0, 2),
    "torchrun under mpiexec": ({**HYDRA, **TORCHRUN}, "torchrun", 2, 4, 0, 2),
    "RANK alone, left in a shell": ({"RANK": "3", "MASTER_ADDR": "n0"}, "single", 0, 1, 0, 1),
    "WORLD_SIZE alone, as some containers set it": ({"WORLD_SIZE": "8"}, "single", 0, 1, 0, 1),
    "RANK and WORLD_SIZE of a single process": ({"RANK": "0", "WORLD_SIZE": "1"}, "single", 0, 1, 0, 1),
    "PMI_RANK alone": ({"PMI_RANK": "1"}, "single", 0, 1, 0, 1),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_rank_and_size_are_read_from_the_launchers_variables(name):
    env, *want = ENVIRONMENTS[name]
    assert detect({"PATH": "/bin", **env}) == tuple(want)


CANNOT_BE = {  # name: (environment, what is said)
    "rank of another world": ({**TORCHRUN, "RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
    "rank below 0": ({**TORCHRUN, "RANK": "-1"}, "RANK=-1"),
    "half of torchrun's": ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 in the environment has no LOCAL_RANK"),
    "letters": ({**HYDRA, "PMI_SIZE": "two"}, "describe no rank: unset them, or start the ranks with mpi"),
    "node of srun": ({**SRUN, "SLURM_NODEID": "x"}, "start the ranks with srun"),
    "pals without its size": ({**PALS_PMIX, "PALS_RANKID": "-6"}, "PALS_RANKID=-6"),
}


@pytest.mark.parametrize("name", CANNOT_BE)
def test_an_environment_that_can_start_no_rank_is_one_line(name, monkeypatch, capsys):
    """Of the parser of flags, where each program of several ranks begins, and of launch()."""
    env, say = CANNOT_BE[name]
    for key, text in env.items():
        monkeypatch.setenv(key, text)
    for start in (lambda: session.parse_flags(["--steps=1"]), launch.launch):
        with pytest.raises(SystemExit) as e:
            start()
        assert_refused({"code": e.value.code, "err": capsys.readouterr().err}, say)


# -----------------------------------------------------------------------------
# Ranks that were not started alike

def session_of_each(world, argvs, files=None):
    """runs.session, in which each rank has a node, flags and loaded files of its own."""
    with mock.patch.object(launch, "env_rank", lambda: world.rank), \
            mock.patch.object(launch, "started_by", lambda: ("hydra", world.size)), \
            mock.patch.object(launch, "is_one_node", lambda: False), \
            mock.patch.object(agree, "loaded_files", lambda: files[world.rank] if files else {}):
        return runs.session(world, argvs[world.rank])


UNLIKE = {  # name: (the flags of each rank, what the line says)
    "lr": ([[f"--lr={lr}", "--global-batch=6"] for lr in (1e-3, 2e-3, 1e-3)],
           "rank 1 has --lr 0.002, rank 0 has --lr 0.001; start all ranks with the same flags"),
    "layout": ([["--tp=2"], []], "rank 1 has --tp 1, rank 0 has --tp 2"),
    "data": ([[], ["--data=elsewhere"]], "rank 1 has --data 'elsewhere', rank 0 has --data 'synthetic'"),
    "wrong on one": ([[], ["--config=x"]], "nanoshard: rank 1: x is not there; give the --out"),
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


def test_ranks_with_different_code_or_data_end_together(tmp_path):
    argv = [*TINY, "--steps=2", f"--out={tmp_path / 'run'}"]
    files = [{"model.py": "aa", "only_here.py": "bb"}, {"model.py": "cc"}]
    assert_refused(run_ranks(2, session_of_each, [argv] * 2, files)[0],
                   "rank 1 has model.py cc, rank 0 has model.py aa")
    same = [{"model.py": "aa", "only_here.py": "bb"}, {"model.py": "aa"}]
    assert [r["code"] for r in run_ranks(2, session_of_each, [argv] * 2, same)] == [0, 0]
    assert_refused(run_ranks(2, session_with_other_data, argv)[0],
                   "rank 1 has --data with the tokens two, rank 0 has --data with the tokens one")


def session_with_other_data(world, argv):
    """runs.session, in which one path leads to other tokens on each rank."""
    real = samples.open_data
    with mock.patch.object(samples, "open_data", lambda *a: (*real(*a)[:3], ["one", "two"][world.rank])):
        return runs.session(world, argv)


def test_our_files_are_compared_and_no_others():
    files = agree.loaded_files()
    assert {"train.py", "model.py", "runtime/agree.py", "tests/pool.py"} <= files.keys()
    assert not any(name.startswith(("torch/", "/")) or "site-packages" in name for name in files)


# -----------------------------------------------------------------------------
# The real launchers

PMI = {  # what Slurm's pmi2 plugin answers MPICH, recorded on a real Slurm
    "init": "response_to_init rc=0 pmi_version=1 pmi_subversion=1", "get_appnum": "appnum rc=0 appnum=-1",
    "get_maxes": "maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024", "put": "put_result rc=0",
    "get_my_kvsname": "my_kvsname rc=0 kvsname=1.0", "barrier_in": "barrier_out rc=0",
    "finalize": "finalize_ack rc=0"}
FLAGS = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--global-batch=8", "--lr=1e-2", "--warmup=2",
         "--steps=6", "--log-every=1", "--eval-every=0", "--save-every=0", "--no-plot"]


def clean_env():
    """Return the environment without a launcher's variables: pytest itself may run under one."""
    prefixes = ("PMI", "MPI", "OMPI", "PALS", "SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_",
                "TORCHELASTIC", "HYD")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}


SEEN = """
import os, sys
import train
from runtime import launch
launch._cuda_is_untouched = lambda: True
import torch
torch.cuda.device_count = lambda: 2
select, start = launch.select_device, launch.launch
def recorded(local, local_size, own=None):
    global mine
    mine = own, os.environ[launch.VISIBLE]
    return select(local, local_size)
def started(*args, **how):
    world = start(*args, **how)
    assert world.timeout.total_seconds() == launch.NO_TIMEOUT  # parallel.make_mesh gives it to each group
    os.write(1, f"{world.launcher} {world.everyone.gather((world.shown, *mine))}\\n".encode())
    return world
launch.select_device, launch.launch = recorded, started
train.main(sys.argv[1:])
"""


def run_alone(words, output):
    """In a new process that has imported torch: run a program, with its output in a file."""
    os.environ.clear()
    os.environ.update(clean_env())
    become(words, ("/dev/null", output, output))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return (folder, {launcher: (exit code, output)}) of the same run under each launcher.

    Under mpiexec each rank is shown one GPU.
    """
    folder = tmp_path_factory.mktemp("trained")
    (folder / "seen.py").write_text(SEEN)

    def words(name, program=ROOT / "train.py"):
        return [str(program), *FLAGS, f"--out={folder / name}", f"--dump-grads={folder / name}.st"]

    rank = [sys.executable, *words("hydra", folder / "seen.py")]
    shown = ["-n", "1", "-env", VISIBLE]
    launchers = {"hydra": [BIN / "mpiexec", *shown, "1", *rank, ":", *shown, "0", *rank],
                 "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *words("torchrun")]}
    jobs = {}  # at the same time: torchrun needs only one core at first
    for name, command in launchers.items():
        jobs[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env={**clean_env(), "PYTHONPATH": str(ROOT)})
    alone = context.Process(target=run_alone, args=(words("single"), str(folder / "said")))
    alone.start()
    ended = {}
    for name, job in jobs.items():
        said = job.communicate(timeout=240)[0]
        ended[name] = job.returncode, said
    alone.join(240)
    ended["single"] = alone.exitcode, (folder / "said").read_text()
    return folder, ended


def meet_over_pmi2(client, env, result):
    """In a new process: join the ranks, and write to the file `result` who they are."""
    os.environ.clear()
    os.environ.update({**clean_env(), **env, "PMI_FD": str(client.fileno())})
    world = launch.launch(100, quiet=True)
    result.write_text(repr(world.everyone.gather([world.rank, world.node, world.launcher])))
    launch.shutdown(world)


@pytest.mark.skipif(not os.path.exists(f"{sys.prefix}/lib/mpich"), reason="another MPI than pip's MPICH")
def test_addresses_of_mpi_fit_into_a_message_of_slurms_pmi2(tmp_path):
    """Slurm reads 1,024 bytes of a message. Two ranks on two nodes, and a server that answers like Slurm."""
    stored, lengths, both = {"PMI_process_mapping": "(vector,(0,2,1))"}, [], threading.Barrier(2)

    def serve(rank_end):
        while line := rank_end.recv(65536).decode():
            words = dict(word.split("=", 1) for word in line.split())
            lengths.append(len(line))
            if words["cmd"] == "put":
                stored[words["key"]] = words["value"]
            if words["cmd"] == "barrier_in":
                both.wait(60)
            value = stored.get(words.get("key"))
            answer = PMI.get(words["cmd"]) or f"get_result rc={0 if value else 1} value={value}"
            rank_end.sendall(f"cmd={answer}\n".encode())

    ranks = []
    for rank in range(2):
        server, client = socket.socketpair()
        env = {**SRUN, "PMI_RANK": str(rank), "PMI_SIZE": "2",
               "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0",
               "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": "127.0.0.1"}
        ranks.append(context.Process(target=meet_over_pmi2, args=(client, env, tmp_path / str(rank))))
        ranks[-1].start()
        client.close()
        threading.Thread(target=serve, args=[server], daemon=True).start()
    try:
        for job in ranks:
            job.join(240)
        assert [job.exitcode for job in ranks] == [0, 0]
    finally:
        for job in ranks:
            job.kill()
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "[[0, 0, 'srun'], [1, 1, 'srun']]"
    assert any("-allgather" in key for key in stored) and max(lengths) < 200


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


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """Two ranks over MPICH's OFI over tcp, also on one host. Rank 1 raises in its first step."""
    folder = tmp_path_factory.mktemp("crashed")
    (folder / "crash.py").write_text(CRASH)
    t0 = time.monotonic()
    command = [BIN / "mpiexec", "-n", "2", sys.executable, folder / "crash.py", *FLAGS]
    env = {**clean_env(), "PYTHONPATH": str(ROOT), "MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}
    job = subprocess.run([*command, f"--out={folder / 'run'}"], capture_output=True, text=True, timeout=240,
                         env=env)
    print(f"an exception on rank 1 ended both ranks {time.monotonic() - t0:.1f} s after the start, "
          f"exit code {job.returncode}")
    return job


def test_ranks_start_over_an_mpi_that_sends_only_inside_of_its_functions(crashed):
    """Rank 0 sends where to meet, and waits there: without that, no rank would reach its first step."""
    assert " hydra: " in crashed.stdout and "the rank that breaks" in crashed.stderr, crashed


def test_an_exception_on_one_rank_ends_all_ranks(crashed):
    assert crashed.returncode not in (0, 2, 85)
    assert "RuntimeError: the rank that breaks" in crashed.stderr and "in broken" in crashed.stderr
    # PyTorch wraps sys.excepthook, and would repeat on stderr, with this prefix, what the hook wrote
    assert crashed.stderr.count("Traceback") == 1 and "[rank1]:" not in crashed.stderr


def set_before_launch(flags, result):
    """In a new process: write to the file `result` what train.py has set just before it uses the device."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    launch.launch = lambda *_, **__: sys.exit(9)
    try:
        train.main(["tiny", "--data=synthetic", *flags])
    except SystemExit as e:
        settings = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        result.write_text(repr((e.code, *settings)))


@pytest.mark.parametrize("flags,want", [(["--deterministic"], (9, True, ":4096:8")), ([], (9, False, None))])
def test_deterministic_is_set_before_the_first_kernel(tmp_path, flags, want):
    p = context.Process(target=set_before_launch, args=(flags, tmp_path / "result"))
    p.start()
    p.join(240)
    assert p.exitcode == 0 and (tmp_path / "result").read_text() == repr(want)


# -----------------------------------------------------------------------------
# Which GPUs each process sees

def see_all(world, shown, hosts, started, in_cgroup):
    """show_all_gpus with stand-ins for the driver."""
    count = 1 if in_cgroup == world.rank else len(set(",".join(map(str, shown)).split(",")))
    with mock.patch.dict(os.environ), mock.patch.object(
            launch.socket, "gethostname", lambda: hosts[world.rank]), mock.patch.object(
            launch, "_cuda_is_untouched", lambda: world.rank != started), mock.patch.object(
            torch.cuda, "device_count", lambda: count):
        os.environ.pop(VISIBLE, None)
        if shown[world.rank] is not None:
            os.environ[VISIBLE] = shown[world.rank]
        _, own = launch.show_all_gpus(world.everyone, world.local_rank)
        return own, os.environ.get(VISIBLE)


PAIRS = ["0,1", "0,1", "2,3", "2,3"]


@pytest.mark.parametrize("shown, hosts, started, in_cgroup, want", [
    ("3210", "aaaa", None, None, [(r, "3,2,1,0") for r in range(4)]),
    ("0101", "aabb", None, None, [(0, "0,1"), (1, "0,1")] * 2),
    (PAIRS, "aaaa", None, None, [(r, "0,1,2,3") for r in range(4)]),
    ("0123", "aaaa", None, 2, [(0, "0,1,2,3"), (1, "0,1,2,3"), (None, "2"), (3, "0,1,2,3")]),
    ("01", "aa", 1, None, [(None, "0"), (None, "1")]),
    (("0", None), "aa", None, None, [(None, "0"), (None, None)]),
    ("00", "aa", None, None, [(None, "0"), (None, "0")]),
    (("0,1", "0,1"), "aa", None, None, [(None, "0,1")] * 2),
    (("MIG-a", "MIG-b"), "aa", None, None, [(None, "MIG-a"), (None, "MIG-b")])])
def test_every_process_sees_the_gpus_of_its_node(shown, hosts, started, in_cgroup, want):
    """One node, two nodes, two ranks on each pair, a cgroup that hides the others from rank 2, CUDA
    initialised on rank 1 before, a rank without the variable, one GPU for both, all seen already, MIG."""
    assert run_ranks(len(shown), see_all, shown, hosts, started, in_cgroup) == want


def test_ranks_of_mpiexec_are_shown_all_gpus_before_the_device_is_chosen(trained):
    code, said = trained[1]["hydra"]
    shown = [line for line in said.splitlines() if line.startswith("hydra [")]
    assert code == 0 and shown == ["hydra [['1', 0, '1,0'], ['0', 1, '1,0']]"] * 2, said


# -----------------------------------------------------------------------------
# Who may reach the store

def listeners():
    """{port: address in hex} of what this machine listens on."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A":
                found[int(port, 16)] = address
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")
def test_on_one_node_the_store_listens_on_loopback_alone(capfd):
    one = SimpleNamespace(bcast=lambda value: value, size=1, Iprobe=lambda: None)
    store = launch._meet(launch.Start("hydra", 0, 2, 0, 2), one, 1, timedelta(seconds=20))
    assert listeners()[store.port] == "0100007F"
    other = SimpleNamespace(bcast=lambda _: (store.host, store.port), size=1, Iprobe=lambda: None)
    client = launch._meet(launch.Start("hydra", 1, 2, 1, 2), other, 1, timedelta(seconds=20))
    client.set("key", "value")
    assert store.get("key") == b"value" and capfd.readouterr().err == ""
    everywhere = launch._listen("localhost", 0, 2)
    assert everywhere.getsockname()[0] == "0.0.0.0"
    (line,) = capfd.readouterr().err.splitlines()
    assert "localhost is no address" in line and "listens on all interfaces" in line
    everywhere.close()
    with launch._listen("127.0.0.2", 0, 1) as s:
        assert s.getsockname()[0] == "127.0.0.2"


# -----------------------------------------------------------------------------
# Signals and streams

def session_with_handlers(world, argv, at):
    """runs.session with SIGHUP ignored, which gets SIGHUP, then SIGINT -> (its result, handlers as before)"""
    mine = signal.signal(signal.SIGINT, lambda *_: None), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(s) for s in session.STOPPING]
    result = runs.session(world, argv, {at: int(signal.SIGHUP), at + 1: int(signal.SIGINT)})
    after = [signal.getsignal(s) for s in session.STOPPING]
    signal.signal(signal.SIGINT, mine[0]), signal.signal(signal.SIGHUP, mine[1])
    return result, before == after


def test_an_ignored_signal_stays_ignored_and_handlers_are_put_back(tmp_path):
    for _ in range(2):  # in one process: nothing of the first run is left
        ((result, same),) = run_ranks(1, session_with_handlers, [*TINY, "--steps=9", f"--out={tmp_path}"], 2)
        assert result["code"] == 85 and "stopped by SIGINT after step 3" in result["out"] and same


def test_every_signal_is_answered_and_a_second_interrupt_leaves_at_once(capfd, monkeypatch):
    signals = session.Signals()
    signals.can_save = True
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    said = []
    term, interrupt = signal.SIGTERM, signal.SIGINT  # after 0.1 and 0.2 s: the launcher's copy of the same
    for seconds, number in ((0, term), (0.1, term), (30, term), (31, interrupt), (31.2, interrupt)):
        now[0] = 1000.0 + seconds
        if seconds == 30:
            signals.leaves = time.monotonic() + 90.0
        signals._answer(number)
        said.append(capfd.readouterr().err.removeprefix("nanoshard: "))
    goes = "finishes this step, saves and leaves"
    assert said == [f"SIGTERM: {goes}, however long the first step takes\n", "",
                    f"SIGTERM: {goes}, in about 1:30\n",
                    f"SIGINT: {goes}, in about 1:29; again: leaves at once, without saving\n", ""]
    assert signals.number == signal.SIGTERM
    now[0] += 1
    with pytest.raises(SystemExit) as e:
        signals._answer(signal.SIGINT)
    assert e.value.code == session.INTERRUPTED and "a second SIGINT" in capfd.readouterr().err


LISTENS = """import ctypes, os, signal, threading
from runtime import session
session.signals.__enter__()
session.signals.answer_in_a_thread()
threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
ctypes.CDLL(None).pause()
ctypes.CDLL(None).sleep(100)
"""


def test_a_signal_ends_a_process_whose_main_thread_is_in_c():
    """As in MPI_Init, or on a GPU until the end of a step."""
    command = [sys.executable, "-c", LISTENS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 85 and done.stderr.count("\n") == 1 and "stopped by SIGTERM" in done.stderr


def catches(pid, number):
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_signal_during_start_up_and_ranks_that_never_start(tmp_path):
    """Two starts at the same time: SIGTERM while torch is imported; a rank 1 that never calls MPI_Init."""
    command = [sys.executable, ROOT / "train.py", *FLAGS, f"--out={tmp_path / 'run'}", "--timeout=4"]
    alone = subprocess.Popen([BIN / "mpiexec", "-n", "1", *command, ":", "-n", "1", "sleep", "200"],
                             stderr=open(tmp_path / "alone", "w"), env=clean_env())
    early = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_env())
    while not catches(early.pid, signal.SIGTERM):
        time.sleep(0.01)
    early.send_signal(signal.SIGTERM)
    said = early.communicate(timeout=60)[1].splitlines()
    assert early.returncode == 85 and len(said) == 1 and "SIGTERM during start-up" in said[0], said
    code, said = alone.wait(timeout=120), (tmp_path / "alone").read_text()
    assert code in (43, 9), code  # 9: of the signal with which mpiexec ends the other process
    assert said.count("nanoshard: ") == 1 and "Traceback" not in said, said
    assert re.search("rank 0 waited ([89]|1[0-9]) s at the start, in .*: did all ranks start?", said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_stream_that_fails_never_ends_a_run(tmp_path):
    command = " ".join(map(str, [sys.executable, ROOT / "train.py", *FLAGS]))
    line = f"{command} --out {tmp_path}/run 2> /dev/full | head -1; exit ${{PIPESTATUS[0]}}"
    env = {**clean_env(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0 and len(rows(tmp_path / "run")) == 6, done.stderr
    assert "Traceback" not in done.stderr and len(done.stdout.splitlines()) == 1


# -----------------------------------------------------------------------------
# How threads wait

def test_idle_threads_sleep():
    """launch.py, which says how torch's threads wait, needs no torch, and every program imports it before."""
    code = ("import sys; from runtime import launch; "
            "print('torch' in sys.modules, launch.os.environ['OMP_WAIT_POLICY'])")
    env = {name: value for name, value in clean_env().items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "False PASSIVE\n", done.stderr
    for path in [ROOT / "train.py", ROOT / "sample.py", *ROOT.glob("bench/*.py")]:
        text = path.read_text()
        ours = re.search(r"^ *from (common|runtime|runtime\.launch) import", text, re.M)
        first = re.search(r"^ *(import|from) torch", text, re.M)
        if ours and first and "launch" in text:
            assert ours.start() < first.start(), path

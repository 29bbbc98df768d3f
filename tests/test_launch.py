"""Every launcher is recognised; python, mpiexec and torchrun train alike; one exception ends all ranks."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pool import ROOT, context
from runs import SHAPE

import train
from runtime.launch import LAUNCHERS, detect

BIN = Path(sys.executable).parent
# what every process inside an sbatch script of 2 tasks sees, whoever started it (recorded on a real Slurm)
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
    "PMI_RANK alone": ({"PMI_RANK": "1"}, "single", 0, 1, 0, 1),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_rank_and_size_are_read_from_the_launchers_variables(name):
    env, *want = ENVIRONMENTS[name]
    assert detect({"PATH": "/bin", **env}) == tuple(want)


def test_every_launcher_is_covered():
    assert {want[0] for _, *want in ENVIRONMENTS.values()} == {*LAUNCHERS, "single"}


# -----------------------------------------------------------------------------
# the real launchers

FLAGS = [*SHAPE, "--data=synthetic", "--micro-batch=2", "--global-batch=8", "--lr=1e-2", "--warmup=2",
         "--steps=6", "--log-every=1", "--eval-every=0", "--save-every=0", "--no-plot"]


def clean_env():
    """-> the environment without a launcher's variables: pytest itself may run under one."""
    prefixes = ("PMI", "MPI", "OMPI", "PALS", "SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_",
                "TORCHELASTIC", "HYD")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}


def test_python_mpiexec_and_torchrun_train_alike(tmp_path):
    """With the same global batch: every loss, and --dump-grads' weights and gradients, to 1e-5 in fp32."""
    from safetensors.torch import load_file
    launchers = {"single": [sys.executable],
                 "hydra": [BIN / "mpiexec", "-n", "2", sys.executable],
                 "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]}
    losses, dumps, jobs = {}, {}, {}
    for name, start in launchers.items():  # at the same time: torchrun needs only one core at first
        out = tmp_path / name
        jobs[name] = subprocess.Popen(
            [*start, ROOT / "train.py", *FLAGS, f"--out={out}", f"--dump-grads={out}.st"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env())
    for name, job in jobs.items():
        out = tmp_path / name
        stdout, stderr = job.communicate(timeout=240)
        assert job.returncode == 0, stdout + stderr
        n = 1 if name == "single" else 2
        assert f" {name}: {n} of {n} ranks here" in stdout and stdout.count("[node 1/1 ") == 1
        assert "Traceback" not in stderr, stderr
        assert json.loads((out / "config.json").read_text())["launcher"] == name
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = torch.tensor([[r["loss"], r["grad_norm"]] for r in metrics], dtype=torch.float64)
        dumps[name] = load_file(tmp_path / f"{name}.st")
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
    (tmp_path / "crash.py").write_text(CRASH)
    t0 = time.monotonic()
    command = [BIN / "mpiexec", "-n", "2", sys.executable, tmp_path / "crash.py", *FLAGS]
    job = subprocess.run([*command, f"--out={tmp_path / 'run'}"], capture_output=True, text=True, timeout=240,
                         env={**clean_env(), "PYTHONPATH": str(ROOT)})
    print(f"an exception on rank 1 ended both ranks {time.monotonic() - t0:.1f} s after the start, "
          f"exit code {job.returncode}")
    assert job.returncode not in (0, 2, 85)
    assert "RuntimeError: the rank that breaks" in job.stderr and "in broken" in job.stderr
    # torch wraps sys.excepthook and repeats on stderr, with this prefix, what the hook wrote
    assert job.stderr.count("Traceback") == 1 and "[rank1]:" not in job.stderr


def set_before_launch(flags, result):
    """In a new process: write to the file `result` what train.py has set just before it uses the device."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    train.launch.launch = lambda *_: sys.exit(9)
    try:
        train.main(["tiny", *flags])
    except SystemExit as e:
        settings = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        result.write_text(repr((e.code, *settings)))


@pytest.mark.parametrize("flags,want", [(["--deterministic"], (9, True, ":4096:8")), ([], (9, False, None))])
def test_deterministic_is_set_before_the_first_kernel(tmp_path, flags, want):
    p = context.Process(target=set_before_launch, args=(flags, tmp_path / "result"))
    p.start()
    p.join(240)
    assert p.exitcode == 0 and (tmp_path / "result").read_text() == repr(want)

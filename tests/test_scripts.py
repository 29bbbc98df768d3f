"""The job scripts: generic.pbs runs for real with mpich's mpiexec, those of the sites with stand-ins."""
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from pool import ROOT
from test_launch import BIN, FLAGS, clean_env

SCRIPTS = sorted((ROOT / "scripts").iterdir())
JOBS = {"generic.slurm": 2, "generic.pbs": 4, "polaris.pbs": 4, "aurora.pbs": 12, "perlmutter.sh": 4,
        "frontier.sh": 8}


def test_size_syntax_and_what_must_not_be_in_them():
    assert {*JOBS} < {p.name for p in SCRIPTS}
    for path in SCRIPTS:
        text = path.read_text()
        lines = text.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 110, path
        assert subprocess.run(["bash", "-n", path]).returncode == 0
        assert not re.search(r"/(home|lus|eagle|flare|users|global|work)/|@\w+\.|\$HOME", text), path
        assert not re.search(r"^#(PBS|SBATCH).*(\s-A|--account|--mail)", text, re.M), f"{path}: an account"
        assert not re.search(r"^#(PBS|SBATCH)[^#\n]*#", text, re.M), f"{path}: comment behind a directive"
        assert "xercised" in "\n".join(lines[:14]), f"{path} does not say how it was tested"
        if path.name in JOBS:
            assert "python train.py" in text and "--resume auto" in text and "bin/activate" in text, path
            assert "85" in text or "pbs_start.sh" in text, path


@pytest.fixture
def site(tmp_path):
    """A repository with a venv, and stand-ins that record how they are called -> (folder, environment)"""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    stand_ins, activate = tmp_path / "bin", tmp_path / ".venv/bin/activate"
    stand_ins.mkdir()
    activate.parent.mkdir(parents=True)
    for name in ("srun", "scontrol", "qsub", "mpiexec"):
        (stand_ins / name).write_text(
            f'#!/bin/bash\nsettings="NCCL=$NCCL_CROSS_NIC CCL=$CCL_PROCESS_LAUNCHER"\n'
            f'settings+=" $CCL_KVS_MODE $FI_CXI_DEFAULT_TX_SIZE GPU=$MPICH_GPU_SUPPORT_ENABLED"\n'
            f'echo {name} "$@" $settings >> {tmp_path}/calls\n'
            f"[ {name} = srun -o {name} = mpiexec ] && exit 85\nexit 0\n")
        (stand_ins / name).chmod(0o755)
    # The scripts source `activate` after the login shell has reset PATH. On a site, module and conda are
    # functions.
    activate.write_text(f"export PATH={stand_ins}:$PATH\n")
    (tmp_path / "site.sh").write_text("module() { echo module \"$@\"; }; conda() { :; }\n")
    return tmp_path, {**clean_env(), "BASH_ENV": str(tmp_path / "site.sh")}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_what_each_script_starts(site, name, nodes):
    folder, env = site
    lines = 4 if name == "generic.pbs" else 1  # its mpiprocs
    (folder / "nodes").write_text("".join(f"x{i}\n" * lines for i in range(nodes)))
    (folder / "nccl.sh").write_text("export NCCL_CROSS_NIC=1\n")
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "7", "SLURM_GPUS_PER_NODE": "4",
            "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes"),
            "PBS_JOBID": "7", "ARGS": "gpt2 --steps 9", "NCCL_SETTINGS": str(folder / "nccl.sh")}
    slurm = not name.endswith(".pbs")
    # Bash does not run as a login shell, whose profile would be the site's. All other lines run as they are.
    job = subprocess.run(["bash", ROOT / "scripts" / name, *(["gpt2", "--steps", "9"] * slurm)], env=env,
                         cwd=folder, capture_output=True, text=True)
    assert job.returncode == 85, job.stdout + job.stderr
    start, again = (folder / "calls").read_text().splitlines()
    assert "python train.py gpt2 --steps 9 --resume auto" in start and ("--max-minutes 27" in start) != slurm
    assert ("NCCL=1" in start or "CCL=pmix" in start) == (nodes > 1), start
    if slurm:
        assert start.startswith("srun --wait=60 ") and " -c 7 " in start and " --gpu-bind=none " in start
        assert again.startswith("scontrol requeue 7 ")
    else:
        assert start.startswith(f"mpiexec -n {JOBS[name] * nodes} -") and f"ppn {JOBS[name]} " in start
        assert again.startswith(f"qsub -v ARGS=gpt2 --steps 9,VENV=,MINUTES=27 scripts/{name} ")
        assert f"hostfile {folder}/nodes" in start
    # The sites' documentation asks for these settings. On Polaris, MPI must ignore CUDA even on one node.
    for script, several, words in (("aurora.pbs", True, "CCL=pmix mpi "), ("frontier.sh", True, " 2048 GPU"),
                                   ("polaris.pbs", False, "GPU=0"), ("perlmutter.sh", False, "GPU=0")):
        if name == script:
            assert (words in start) == (nodes > 1 or not several), start


def test_every_script_shows_each_rank_all_gpus():
    """In one order: its own is that of its local rank, on Polaris the one beside its cores."""
    text = "".join(path.read_text() for path in SCRIPTS)
    hiding = r"^[^#\n]*(--gpus-per-task|--gpu-bind=(?!none)|ZE_AFFINITY_MASK=|ROCR_VISIBLE)"
    assert not re.search(hiding, text, re.M)
    got = subprocess.run([ROOT / "scripts/polaris_gpu.sh", "printenv", "CUDA_VISIBLE_DEVICES"], text=True,
                         capture_output=True)
    assert [int(gpu) for gpu in got.stdout.split(",")] == [3 - local for local in range(4)]


def test_generic_pbs_stopped_and_submitted_again(tmp_path):
    """Two hosts and a signal to the job's shell; the second job, on one host, resumes from its save."""
    (tmp_path / "bin").mkdir()
    for name, text in (("activate", f"export PATH={tmp_path}/bin:{BIN}:$PATH\n"),
                       ("qsub", f'#!/bin/bash\necho "$@" >> {tmp_path}/qsub\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    out = tmp_path / "run"

    def job(steps, hosts):
        (tmp_path / "nodes").write_text(hosts)
        flags = [f for f in FLAGS if not f.startswith(("--steps", "--save-every"))]
        env = {**clean_env(), "PBS_O_WORKDIR": str(ROOT), "PBS_NODEFILE": str(tmp_path / "nodes"),
               "PBS_JOBID": "7.x", "HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": "1", "VENV": str(tmp_path),
               "ARGS": " ".join(["tiny", *flags, f"--steps={steps}", f"--out={out}"])}
        script = ROOT / "scripts/generic.pbs"
        return subprocess.Popen(["bash", "-l", script], env=env, cwd=tmp_path, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    first = job(100_000, "localhost\nvm\n")
    end = time.monotonic() + 240
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert first.poll() is None and time.monotonic() < end, first.communicate()[0]
        time.sleep(0.1)
    first.send_signal(signal.SIGUSR1)  # what `qsig -s USR1` does
    said = first.communicate(timeout=240)[0]
    assert first.returncode == 85, said
    step = int(re.search(r"stopped by SIGUSR1 after step (\d+)", said)[1])
    assert re.search(r"hydra: . of 2 ranks here", said)
    again = (tmp_path / "qsub").read_text()
    assert again.startswith("-v ARGS=tiny --n-layer=2 ")
    assert again.endswith("MINUTES=27 scripts/generic.pbs\n")
    second = job(step + 2, "localhost\n")
    said = second.communicate(timeout=240)[0]
    assert second.returncode == 0 and f"resumed {out}/step_{step:06d}" in said, said
    assert f"done after step {step + 2}" in said and (tmp_path / "qsub").read_text() == again
    assert Path(out, f"step_{step + 2:06d}").is_dir()


def test_without_packages_make_slurm_says_so_and_passes(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tests/slurm"))
    import cluster
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 1000)
    cluster.main([])
    assert "NOT RUN: needs root" in capsys.readouterr().out
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster, "missing_programs", lambda: ["slurmd"])
    unreachable = subprocess.CompletedProcess([], 100, "", "E: Failed to fetch slurmd  Could not resolve")
    monkeypatch.setattr(cluster.subprocess, "run", lambda *a, **kw: unreachable)
    monkeypatch.setattr(cluster.shutil, "which", lambda *a, **kw: "/usr/bin/apt-get")
    cluster.main([])
    assert "NOT RUN: apt-get install of slurmctld" in (said := capsys.readouterr().out) and "resolve" in said

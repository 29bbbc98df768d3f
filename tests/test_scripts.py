"""The job scripts: generic.pbs runs for real with mpich's mpiexec, those of the sites with stand-ins. The
stand-ins for qsub and qstat (tests/pbs/stand_in.py) do what a real OpenPBS did."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pool import ROOT
from test_launch import BIN, FLAGS, clean_env

SCRIPTS = sorted((ROOT / "scripts").iterdir())
JOBS = {"generic.slurm": 2, "generic.pbs": 4, "polaris.pbs": 4, "aurora.pbs": 12, "crux.pbs": 8,
        "sophia.pbs": 8, "perlmutter.sh": 4, "frontier.sh": 8, "lumi.sh": 8}
OPEN_MPI = "mpiexec (OpenRTE) 4.1.8"
ORDER = {"polaris.pbs": "3,2,1,0", "perlmutter.sh": "3,2,1,0", "frontier.sh": "4,5,2,3,6,7,0,1"}


def test_syntax_and_what_must_not_be_in_them():
    assert {*JOBS} == {p.name for p in SCRIPTS if re.search("^#(PBS|SBATCH)", p.read_text(), re.M)}
    for path in SCRIPTS:
        text = path.read_text()
        assert subprocess.run(["bash", "-n", path]).returncode == 0
        assert not re.search(r"/(home|lus|eagle|flare|users|global|work)/|@\w+\.\w|\$HOME", text), path
        assert not re.search(r"^#(PBS|SBATCH).*(\s-A|--account|--mail)", text, re.M), f"{path}: an account"
        if path.name in JOBS:
            assert "python train.py" in text and '--resume "$resume"' in text and "\nactivate\n" in text, path
            assert "#PBS" not in text or ("#PBS -r y" in text and "#PBS -l place=scatter" in text), path


@pytest.fixture
def site(tmp_path):
    """A repository with a venv, and stand-ins that record how they are called -> (folder, environment)"""
    for name in ("scripts", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    stand_ins, activate = tmp_path / "bin", tmp_path / ".venv/bin/activate"
    stand_ins.mkdir()
    (tmp_path / "jobs").mkdir()
    activate.parent.mkdir(parents=True)
    settings = ("NCCL_CROSS_NIC", "NCCL_NET", "OFI_NCCL_PROGRESS_MODEL", "CCL_PROCESS_LAUNCHER",
                "CCL_KVS_MODE", "MPICH_GPU_SUPPORT_ENABLED", "MPICH_OFI_NIC_POLICY", "https_proxy",
                "FI_MR_CACHE_MONITOR", "CCL_WORKER_AFFINITY", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
    for name in ("srun", "scontrol", "mpiexec"):
        (stand_ins / name).write_text(
            f'#!/bin/bash\n[ "$1" = --version ] && echo "$VERSION" && exit\n'
            f'printf "%s\\n" {name} "$@" "" >> {tmp_path}/words\n'
            f'echo {name} "$@" {" ".join(f"{s}=${s}" for s in settings)} >> {tmp_path}/calls\n'
            f"[ {name} = scontrol ] || exit ${{CODE:-85}}\n")
        (stand_ins / name).chmod(0o755)
    for name in ("qsub", "qstat"):
        program = f"{sys.executable} -I {ROOT}/tests/pbs/stand_in.py {name}"
        (stand_ins / name).write_text(f'#!/bin/bash\nexec {program} "$@"\n')
        (stand_ins / name).chmod(0o755)
    # The scripts source `activate` after the login shell has reset PATH. On a site, module and conda are
    # functions.
    activate.write_text(f"export PATH={stand_ins}:$PATH\n")
    (tmp_path / "site.sh").write_text('module() { echo module "$@"; }; conda() { :; }\n')
    path = f"{stand_ins}:{os.environ['PATH']}"
    return tmp_path, {**clean_env(), "PATH": path, "BASH_ENV": str(tmp_path / "site.sh"),
                      "PBS_JOBS": str(tmp_path / "jobs")}


def submit(site, *options, script="generic.pbs", env=()):
    folder, environment = site
    return subprocess.run(["qsub", *options, f"scripts/{script}"], env={**environment, **dict(env)},
                          cwd=folder, capture_output=True, text=True)


def record(site, number):
    return json.loads((site[0] / f"jobs/{number}.json").read_text())


def start_job(site, number, hosts=("x0",), index=None, **env):
    """Start job N as PBS would -> Popen. Bash does not run as a login shell, whose profile would be the
    site's; all other lines run as they are."""
    folder, environment = site
    job = record(site, number)
    (folder / "nodes").write_text("".join(f"{host}\n" for host in hosts))
    place = {"PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes"), "PBS_O_QUEUE": "workq",
             "PBS_ACCOUNT": job.get("Account_Name", ""), "PBS_JOBID": f"{number}.stand-in"}
    if index is not None:
        place |= {"PBS_ARRAY_INDEX": str(index), "PBS_JOBID": f"{number}[{index}].stand-in"}
    script = job["Submit_arguments"].split()[-1]
    return subprocess.Popen(["bash", folder / script], cwd=folder, text=True, stdin=subprocess.DEVNULL,
                            env={**environment, **job["Variable_List"], **place, **env},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run_job(*args, code=85, **kwargs):
    process = start_job(*args, **kwargs)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == code, said
    return said


@pytest.mark.parametrize("nodes", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", JOBS)
def test_what_each_script_starts(site, name, nodes):
    folder, env = site
    (folder / "nccl.sh").write_text("export NCCL_CROSS_NIC=1\n")
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "7", "SLURM_GPUS_PER_NODE": "4", "NCCL_SETTINGS": str(folder / "nccl.sh"),
            "ROCM_PATH": "/opt/rocm" if name in ("frontier.sh", "lumi.sh") else ""}
    slurm = not name.endswith(".pbs")
    if slurm:
        job = subprocess.run(["bash", ROOT / "scripts" / name, "gpt2", "--steps", "9"], env=env, cwd=folder,
                             capture_output=True, text=True)
        assert job.returncode == 85, job.stdout + job.stderr
        start, again = (folder / "calls").read_text().splitlines()
        assert start.startswith("srun --wait=60 ") and " --gpu-bind=none " in start
        assert (" -c 7 " in start) == (name != "lumi.sh") and again.startswith("scontrol requeue 7 ")
    else:
        submit(site, "-A", "PROJ", "-v", "ARGS=gpt2 --steps 9", script=name)
        # mpiprocs=4 of generic.pbs: PBS lists each host four times.
        lines = 4 if name == "generic.pbs" else 1
        run_job(site, 1, hosts=[f"x{i}" for i in range(nodes) for _ in range(lines)],
                VERSION=OPEN_MPI if name == "sophia.pbs" else "HYDRA")
        start = (folder / "calls").read_text()
        assert start.startswith(f"mpiexec -n {JOBS[name] * nodes} -")
        assert f"{'npernode' if name == 'sophia.pbs' else 'ppn'} {JOBS[name]} " in start
        assert f"hostfile {folder}/nodes" in start and re.search(" --max-minutes 2[67][.]", start)
        assert f"scripts/{name}" in record(site, 2)["Submit_arguments"]
    order = f"scripts/gpu_order.sh {ORDER[name]} " if name in ORDER else ""
    assert f" {order}python train.py gpt2 --steps 9 --resume auto" in start
    # The sites' documentation asks for these settings. On Polaris, MPI must ignore CUDA even on one node.
    for script, several, words in (("aurora.pbs", True, "CCL_PROCESS_LAUNCHER=pmix CCL_KVS_MODE=mpi "),
                                   ("generic.slurm", True, "NCCL_CROSS_NIC=1"),
                                   ("generic.pbs", True, "NCCL_CROSS_NIC=1"),
                                   ("polaris.pbs", False, "OMP_NUM_THREADS=8\n"),
                                   ("aurora.pbs", False, "OMP_NUM_THREADS=4\n"),
                                   ("polaris.pbs", False, "MPICH_GPU_SUPPORT_ENABLED=0"),
                                   ("polaris.pbs", False, "https_proxy=http://proxy.alcf"),
                                   ("aurora.pbs", False, "https_proxy=http://proxy.alcf"),
                                   ("crux.pbs", False, "OMP_NUM_THREADS=16"),
                                   ("sophia.pbs", False, "OMP_NUM_THREADS=16"),
                                   ("frontier.sh", False, "MPICH_OFI_NIC_POLICY=BLOCK"),
                                   ("perlmutter.sh", False, "MPICH_GPU_SUPPORT_ENABLED=0")):
        if name == script:
            assert (words in start) == (nodes > 1 or not several), start


TCP = "nanoshard: NCCL without a plugin for Slingshot: TCP between the nodes, several times slower"


@pytest.mark.parametrize("given,nodes,settings,over_tcp", [
    ("", 1, "NCCL_CROSS_NIC= NCCL_NET= ", False),
    ("", 2, "NCCL_CROSS_NIC= NCCL_NET= ", True),  # no plugin here: NCCL would not start with NCCL_NET set
    ("v1.6.0/lib", 2, "NCCL_CROSS_NIC=1 NCCL_NET=AWS Libfabric OFI_NCCL_PROGRESS_MODEL= ", False),
    ("v1.14.0/lib", 2, "NCCL_CROSS_NIC=1 NCCL_NET=AWS Libfabric OFI_NCCL_PROGRESS_MODEL=AUTO ", False),
    ("nowhere", 2, "NCCL_CROSS_NIC= NCCL_NET= ", True)])
def test_polaris_takes_the_network_plugin_that_is_there(site, given, nodes, settings, over_tcp):
    for version in ("v1.6.0", "v1.14.0"):
        (site[0] / version / "lib").mkdir(parents=True)
        (site[0] / version / "lib/libnccl-net.so").touch()
    submit(site, script="polaris.pbs")
    said = run_job(site, 1, hosts=["a", "b"][:nodes], NCCL_PLUGIN=given and f"{site[0]}/{given}")
    assert settings in (site[0] / "calls").read_text()
    assert (TCP in said) == over_tcp


PROXY = "https_proxy=http://proxy.alcf"
HERE = {  # environment, GPUs that nvidia-smi lists, the line that is printed, some of the ranks' environment
    "nothing": ({}, 0, "python train.py tiny --prompt a\\ b"),
    "one node": ({}, 4, "mpiexec -n 4 python train.py"),
    "pbs": ({"PBS_NODEFILE": "nodes"}, 0, "mpiexec -n 4 -ppn 2 -hostfile nodes python train.py"),
    "second shell": ({"PBS_JOBID": "nodes", "PBS_HOME": "."}, 0,
                     "mpiexec -n 4 -ppn 2 -hostfile ./aux/nodes python train.py"),
    "open mpi": ({"PBS_NODEFILE": "nodes", "VERSION": OPEN_MPI}, 0,
                 "mpiexec -n 4 --npernode 2 --hostfile nodes --bind-to none -x "),
    "polaris": ({"PBS_NODEFILE": "nodes", "SITE": "polaris"}, 4, "mpiexec -n 8 -ppn 4 -hostfile nodes "
                "--depth 8 --cpu-bind depth scripts/gpu_order.sh 3\\,2\\,1\\,0 python train.py"),
    "salloc": ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}, 0,
               "srun -N 2 --ntasks-per-node=2 -n 4 --wait=60 python train.py"),
    "frontier": ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SITE": "frontier"}, 8,
                 "srun -N 2 --ntasks-per-node=8 -n 16 --wait=60 -c 7 --gpu-bind=none scripts/gpu_order.sh "
                 "4\\,5\\,2\\,3\\,6\\,7\\,0\\,1 python train.py"),
    "crux": ({"PBS_NODEFILE": "nodes", "SITE": "crux", "OMP_NUM_THREADS": "256"}, 0,
             "mpiexec -n 16 -ppn 8 -hostfile nodes --depth 16 --cpu-bind depth python train.py",
             "OMP_NUM_THREADS=16\n", PROXY),
    "sophia": ({"PBS_NODEFILE": "nodes", "SITE": "sophia", "VERSION": OPEN_MPI}, 8,
               "mpiexec -n 16 --npernode 8 --hostfile nodes --bind-to none -x ",
               "OMP_NUM_THREADS=16\n", PROXY),
    "aurora": ({"PBS_NODEFILE": "nodes", "SITE": "aurora"}, 0,
               "mpiexec -n 24 -ppn 12 -hostfile nodes --cpu-bind list:4-7:8-11:", PROXY,
               "CCL_PROCESS_LAUNCHER=pmix ", "CCL_WORKER_AFFINITY=42,43,",
               "FI_MR_CACHE_MONITOR=userfaultfd "),
    "perlmutter": ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SITE": "perlmutter"}, 4,
                   "srun -N 2 --ntasks-per-node=4 -n 8 --wait=60 -c 32 --gpu-bind=none ",
                   "NCCL_SOCKET_IFNAME=hsn", "FI_MR_CACHE_MONITOR=userfaultfd "),
    "lumi, one node": ({"SLURM_JOB_ID": "7", "SITE": "lumi"}, 8,
                       "srun -N 1 --ntasks-per-node=8 -n 8 --wait=60 --cpu-bind=mask_cpu:fe", "https_proxy= ",
                       "NCCL_SOCKET_IFNAME= "),
}


@pytest.mark.parametrize("name", HERE)
def test_here_finds_the_allocation_and_runs_what_it_prints(site, name):
    folder, env = site
    given, gpus, line, *settings = HERE[name]
    (folder / "nodes").write_text("x0\nx0\nx1\nx1\n")
    (folder / "aux").symlink_to(".")
    (folder / "bin/nvidia-smi").write_text(f"#!/bin/bash\nfor i in {{1..{gpus}}}; do echo GPU; done\n" if gpus
                                           else "#!/bin/bash\nexit 9\n")
    (folder / "bin/nvidia-smi").chmod(0o755)
    env = {**env, "VIRTUAL_ENV": "x", "DRY": "1", **given}
    (folder / "scripts").unlink()
    (folder / "scripts").mkdir()
    for script in ("here.sh", "common.sh", "flags.sh", "polaris_nccl.sh", "alcf_proxy.sh"):
        (folder / "scripts" / script).symlink_to(ROOT / "scripts" / script)
    command = ["bash", "scripts/here.sh", "tiny", "--prompt", "a b"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[1].startswith(line), done.stdout + done.stderr
    if line.startswith(("mpiexec", "srun")):
        done = subprocess.run(command, env={**env, "DRY": ""}, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 85, done.stderr  # the stand-in's
        assert "train.py\ntiny\n--prompt\na b\n" in (folder / "words").read_text()
        calls = (folder / "calls").read_text()
        assert all(setting in calls for setting in settings), calls


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_in_a_shared_clone_each_user_has_a_folder_of_runs(tmp_path):
    os.chown(tmp_path, 65534, -1)
    script = f"source {ROOT}/scripts/common.sh; index_flags gpt2 --lr 1; echo \"${{flags[@]}}\"; id -un"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    words, user = done.stdout.splitlines()
    assert words == f"gpt2 --lr 1 --out out/{user}/gpt2", done.stderr


def test_every_script_shows_each_rank_all_gpus():
    """In the order of the ranks' cores; on Frontier cores 0-7 are beside GPU 4 and so on."""
    text = "".join(path.read_text() for path in SCRIPTS)
    hiding = r"^[^#\n]*(--gpus-per-task|--gpu-bind=(?!none)|ZE_AFFINITY_MASK=|ROCR_VISIBLE)"
    assert not re.search(hiding, text, re.M)
    for order, rocm, variable in (("3,2,1,0", "", "CUDA"), (ORDER["frontier.sh"], "/opt/rocm", "HIP")):
        command = [ROOT / "scripts/gpu_order.sh", order, "printenv", f"{variable}_VISIBLE_DEVICES"]
        got = subprocess.run(command, text=True, capture_output=True, env={**os.environ, "ROCM_PATH": rocm})
        gpus = order.split(",")
        assert got.stdout.strip() == order and sorted(map(int, gpus)) == list(range(len(gpus)))


def test_the_job_that_is_submitted_again_has_all_of_the_first(site):
    """Account, queue, select, place, walltime, other resources, -W, -p, modules, flags: up to the third job.
    A site such as ALCF refuses a job without -A."""
    typed = "# a comment\ntiny --data A:0.7,B:0.3 --out 'my runs/a'\n--prompt \"it's  (x\"\n"
    (site[0] / "flags").write_text(typed)
    options = ["-A", "PROJ", "-q", "gpuq", "-N", "mine", "-l", "select=1:ncpus=2:mpiprocs=2",
               "-l", "walltime=3:00:00", "-l", "filesystems=home:eagle", "-W", "umask=027",
               "-W", "depend=afterany:5", "-p", "7", "-v", "ARGS=@flags,MODULES=a b,NOTE"]
    assert submit(site, *options, env={"NOTE": "x,y z"}).stdout == "1.stand-in\n"
    for number in (1, 2):
        run_job(site, number, hosts=["x0", "x0"])
    first, second, third = (record(site, n) for n in (1, 2, 3))
    assert first.pop("Submit_arguments") != second.pop("Submit_arguments") == third.pop("Submit_arguments")
    assert first.pop("Resource_List.walltime") == "3:00:00" == second.pop("Resource_List.walltime")
    assert third.pop("Resource_List.walltime") == "3:00:00" and first == second == third
    assert first["Account_Name"] == "PROJ" and first["Variable_List"]["NOTE"] == "x,y z"
    words = (site[0] / "words").read_text().split("\n\n")
    words = [start.split("\n") for start in words]
    for start in words[:2]:
        assert 169 < float(start.pop()) <= 170  # --max-minutes: what is left of the walltime
    assert words[0] == words[1]  # two starts of the same command
    flags = ["tiny", "--data", "A:0.7,B:0.3", "--out", "my runs/a", "--prompt", "it's  (x"]
    assert words[0][-10:] == [*flags, "--resume", "auto", "--max-minutes"]


@pytest.mark.parametrize("flags,given,minutes", [
    ("--max-minutes 7", {}, "7"), ("--max-minutes=7", {}, "7"), ("--max-minutes 7", {"MINUTES": "5"}, "5")])
def test_minutes_that_are_typed_hold(site, flags, given, minutes):
    submit(site, "-v", f"ARGS=tiny {flags}")
    run_job(site, 1, **given)
    last = (site[0] / "words").read_text().split("\n\n")[0].split("\n")[-1]
    assert last == minutes


@pytest.mark.parametrize("chunk,ncpus,given,threads", [
    ("ncpus=8:mpiprocs=4", 8, 8, 2), ("ncpus=2:mpiprocs=4", 2, 2, 1), ("ncpus=8", 8, 8, 8),
    ("ncpus=8:mpiprocs=2:ompthreads=8", 8, 8, 8), ("ncpus=8:mpiprocs=4", 8, 3, 3)])
def test_ranks_share_the_cores_of_their_chunk(site, chunk, ncpus, given, threads):
    """PBS sets OMP_NUM_THREADS to the cores of the chunk, also where several ranks share it."""
    submit(site, "-l", f"select=2:{chunk}")
    run_job(site, 1, NCPUS=str(ncpus), OMP_NUM_THREADS=str(given))
    assert f"OMP_NUM_THREADS={threads}\n" in (site[0] / "calls").read_text()


def test_quotes_in_the_variable_args_are_refused_and_commas_arrive(site):
    """PBS takes the quotes out and leaves backslashes: no run may begin with such flags."""
    refused = submit(site, "-v", "ARGS=tiny --data A:0.7,B:0.3")
    assert "cannot send environment" in refused.stderr
    submit(site, "-v", "ARGS", env={"ARGS": "tiny --data A:0.7,B:0.3"})
    run_job(site, 1)
    assert "--data\nA:0.7,B:0.3\n" in (site[0] / "words").read_text()
    submit(site, "-v", 'ARGS=tiny --prompt "a b"')
    assert "into a file, -v ARGS=@FILE" in run_job(site, 3, code=2)
    (site[0] / "flags").write_text("tiny --prompt 'a b")
    submit(site, "-v", "ARGS=@flags")
    assert "a quote is not closed" in run_job(site, 4, code=2)
    (site[0] / "flags").unlink()
    assert "no file 'flags'" in run_job(site, 4, code=2)


@pytest.mark.parametrize("given", [["--resume", "out/a/step_000002"], ["--resume=out/a/step_000002"]])
def test_a_job_begins_with_the_checkpoint_that_is_named_and_goes_on_with_its_own(site, given):
    folder, env = site
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}

    def start(*flags):
        job = subprocess.run(["bash", ROOT / "scripts/generic.slurm", "tiny", *flags], env=env, cwd=folder,
                             capture_output=True, text=True)
        return job.returncode, job.stdout + job.stderr

    def resumed():
        return re.findall("--resume (\\S+) NCCL", (folder / "calls").read_text())

    assert start(*given, "--out", "out/b")[0] == 85 and resumed() == ["out/a/step_000002"]
    (folder / "out/b/step_000003.tmp").mkdir(parents=True)
    (folder / "out/b/step_000003.tmp/index.json").touch()
    start(*given, "--out=out/b")
    assert resumed()[1:] == ["out/a/step_000002"]  # a save that was not committed is no checkpoint
    (folder / "out/b/step_000003.tmp").rename(folder / "out/b/step_000003")
    assert "out/b has checkpoints of its own" in start(*given, "--out", "out/b")[1]
    assert resumed()[2:] == ["auto"]
    submit(site, "-v", f"ARGS=tiny {' '.join(given)} --out out/c")
    run_job(site, 1)
    assert resumed()[3:] == []  # mpiexec's line has --max-minutes behind it
    assert "--resume out/a/step_000002 --max-minutes " in (folder / "calls").read_text()
    for flags, say in (([], "in a job needs --out"), (["--out", "./out/a/"], "give another --out")):
        code, said = start(*given, *flags)
        assert code == 2 and say in said and said.count("\n") == 1


def test_a_job_of_an_array(site):
    """{index} is its number; what is submitted again is this job alone."""
    submit(site, "-A", "PROJ", "-J", "1-3", "-v", "ARGS=tiny --out out/{index} --seed {index}")
    run_job(site, 1, index=2)
    again = record(site, 2)
    assert "array" not in again and again["Account_Name"] == "PROJ"
    run_job(site, 2, CODE="0", code=0)
    assert (site[0] / "words").read_text().count("--out\nout/2\n--seed\n2\n") == 2
    submit(site, "-v", "ARGS=tiny --out out/{index}")
    assert "this is no job array" in run_job(site, 3, code=2)


# Environment Modules, of several names of which one is there; Lmod, of a module that needs one which is not
TYPO = '[ "$1 $2" = "is-avail gcc" ]'
COMPLAINS = "[ $1 != load ]"


@pytest.mark.parametrize("script,module,env,code,say", [
    ("polaris.pbs", TYPO, {"MODULES": "gcc typo"}, 2, "module load gcc typo failed: MODULES may name others"),
    ("generic.pbs", TYPO, {"NCCL_SETTINGS": "nothere.sh"}, 2, "no file NCCL_SETTINGS=nothere.sh (from "),
    ("generic.pbs", "", {"MODULES": "gcc"}, 2,
     "no command 'module' here, so gcc cannot be loaded: leave out MODULES\n"),
    ("sophia.pbs", "", {}, 2, "no command 'module' here, so conda/2026-10-01 cannot be loaded\n"),
    ("polaris.pbs", COMPLAINS, {"NO_TORCH": "1"}, 2, "module load conda/2026-10-01 failed, and python finds"),
    ("polaris.pbs", COMPLAINS, {}, 85, "module load conda/2026-10-01 failed, but python finds")])
def test_modules_and_settings_that_are_not_there_stop_a_job(site, script, module, env, code, say):
    folder, _ = site
    (folder / "site.sh").write_text(f"module() {{ {module}; }}\n" if module else "")
    (folder / "bin/python").write_text("#!/bin/bash\nexit $NO_TORCH\n")
    (folder / "bin/python").chmod(0o755)
    submit(site, script=script)
    said = run_job(site, 1, hosts=["a", "b"], code=code, **env)
    assert f"nanoshard: {say}" in said, said
    assert (folder / "calls").exists() == (code != 2)


def test_qdel_and_qrerun_submit_no_second_job(site):
    """PBS sends TERM to all processes of the job: the ranks save and exit with 85. After qrerun PBS itself
    starts the job again, and two jobs would share one --out."""
    submit(site)
    (site[0] / "bin/mpiexec").write_text("#!/bin/bash\n[ $1 = --version ] && exit\n"
                                         f"trap 'exit 85' TERM\ntouch {site[0]}/up\n"
                                         "for i in {1..600}; do sleep 0.1; done\n")
    job = start_job(site, 1)
    while not (site[0] / "up").exists():
        assert job.poll() is None
        time.sleep(0.05)
    ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    for pid in (job.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGTERM)
    said = job.communicate(timeout=30)[0]
    assert job.returncode == 85 and "not submitted again" in said, said
    assert [p.name for p in (site[0] / "jobs").iterdir()] == ["1.json"]


@pytest.mark.long
def test_generic_pbs_stopped_and_submitted_again(site):
    """Two hosts and the file OUT/stop; the second job, on one host, resumes from its save."""
    folder, env = site
    (folder / "bin/mpiexec").unlink()
    (folder / ".venv/bin/activate").write_text(f"export PATH={folder}/bin:{BIN}:$PATH\n")
    out = folder / "my run"

    def write_flags(steps):
        flags = [f for f in FLAGS if not f.startswith(("--steps", "--save-every"))]
        (folder / "flags").write_text(" ".join(["tiny", *flags, f"--steps={steps}", f"--out='{out}'"]))

    write_flags(100_000)
    env |= {"HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": "1"}
    submit(site, "-A", "PROJ", "-v", "ARGS=@flags")
    first = start_job(site, 1, hosts=["localhost", "vm"])
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert first.poll() is None and time.monotonic() < end, first.communicate()[0]
        time.sleep(0.1)
    (out / "stop").touch()
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 85, said
    step = int(re.search(r"stopped by the file stop after step (\d+)", said)[1])
    assert re.search(r"hydra: . of 2 ranks here", said)
    assert record(site, 2)["Account_Name"] == "PROJ"
    write_flags(step + 2)
    said = run_job(site, 2, hosts=["localhost"], code=0)
    assert f"resumed {out}/step_{step:06d}" in said and f"removed {out}/stop" in said, said
    assert f"done after step {step + 2}" in said and len(list((folder / "jobs").iterdir())) == 2
    assert Path(out, f"step_{step + 2:06d}").is_dir()

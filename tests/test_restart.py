"""scripts/restart.sh, which leaves out a lost host and starts again on a spare one, with stand-ins for srun
and mpiexec. `make slurm` kills a node of a real Slurm."""
import os
import shlex
import signal
import subprocess
import time

import pytest
from pool import ROOT

# A line of the launcher does what stands in the file `start`, once per start; `true` works where no file
# down.HOST lies.
LAUNCHER = """#!/bin/bash
cd {folder}
if [ "${{*: -1}}" = true ]; then
    [[ "$*" = *-hostfile* ]] && host=$(cat "${{@: -2:1}}") || host=${{@: -2:1}}
    echo $host >> asked
    [ ! -e down.$host ]
    exit
fi
echo "${{0##*/}} $*" >> lines
[[ "$*" = *-hostfile* ]] && paste -sd' ' "$6" >> lines
source <(sed -n "$(grep -c train.py lines)p" starts)
"""


@pytest.fixture
def job(tmp_path):
    """Return start(launcher, starts, **env) -> Popen of restart.sh in a job of three hosts of two ranks."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in (("srun", LAUNCHER), ("mpiexec", LAUNCHER), ("scancel", "#!/bin/bash\n"),
                       ("sleep", "#!/bin/bash\nexec /bin/sleep 0.05\n"),
                       ("squeue", "#!/bin/bash\nprintf '7.batch\\n7.0\\n'\n"),
                       ("scontrol", "#!/bin/bash\nprintf 'x0\\nx1\\nx2\\n'\n")):
        (stand_ins / name).write_text(text.format(folder=shlex.quote(str(tmp_path))))
        (stand_ins / name).chmod(0o755)
    (tmp_path / "nodes").write_text("".join(f"x{i}.site\n" * 2 for i in range(3)))

    def start(launcher, *starts, flags=(), **env):
        (tmp_path / "starts").write_text("".join(f"{line}\n" for line in starts))
        options = {"srun": ["--wait=60"],
                   "mpiexec": ["-n", "6", "-ppn", "2", "-hostfile", str(tmp_path / "nodes")]}[launcher]
        env = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}", "SPARES": "1",
               "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x[0-2]", "SLURM_NTASKS_PER_NODE": "2",
               "PBS_NODEFILE": str(tmp_path / "nodes"), **env}
        command = [ROOT / "scripts/restart.sh", launcher, *options, "python", "train.py", "tiny",
                   "--max-minutes", "9", *flags]
        return subprocess.Popen(command, env=env, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return start


def end(process, code):
    said = process.communicate(timeout=30)[0]
    assert process.returncode == code, said
    return said


def lines(tmp_path):
    return (tmp_path / "lines").read_text().splitlines()


# The launcher goes on, as srun does for --wait=60: nobody waits for it.
LOST = "touch down.{}; echo 'Traceback: lost a peer' >&2; exec /bin/sleep 60"


def test_a_silent_host_is_left_out(job, tmp_path):
    """And what was left of --max-minutes is the new start's."""
    said = end(job("mpiexec", "echo step=1; " + LOST.format("x1.site"), "echo step=2", SECONDS="120"), 0)
    assert "nanoshard: x1.site does not answer: left out. The run starts again on x0.site x2.site\n" in said
    assert said.count("step=1\n") == 1, f"printed again by the second start: {said}"
    assert said.index("step=1") < said.index("lost a peer") < said.index("left out") < said.index("step=2")
    first, hosts, second, later_hosts = lines(tmp_path)
    assert first.startswith("mpiexec -n 4 -ppn 2 -hostfile ") and hosts == "x0.site x0.site x1.site x1.site"
    assert second.startswith("mpiexec -n 4 -ppn 2 -hostfile ")
    assert later_hosts == "x0.site x0.site x2.site x2.site"
    assert " python train.py tiny --max-minutes " in second and 6.5 < float(second.split()[-1]) <= 7
    assert not (tmp_path / "nodes.hosts").exists()


def test_under_srun(job, tmp_path):
    said = end(job("srun", LOST.format("x1"), "exit 0"), 0)
    assert "nanoshard: x1 does not answer" in said
    assert lines(tmp_path) == [f"srun --overlap -N 2 -n 4 -w {hosts} --wait=60 python train.py tiny "
                               "--max-minutes 9" for hosts in ("x0,x1", "x0,x2")]


def test_the_second_start_goes_on_with_what_the_first_saved(job, tmp_path):
    saves = "mkdir -p out/b/step_000009; touch out/b/step_000009/index.json; "
    flags = ["--resume", "out/a/step_000002", "--out", "out/b"]
    said = end(job("srun", saves + LOST.format("x1"), "exit 0", flags=flags), 0)
    assert "out/b has checkpoints of its own" in said
    first, second = lines(tmp_path)
    assert first.endswith("--out out/b") and second.endswith("--out out/b --resume auto")


def test_without_a_spare_host_the_job_is_queued_again(job, tmp_path):
    said = end(job("srun", LOST.format("x1"), LOST.format("x0; rm down.x0; touch down.x2")), 85)
    assert "x2 does not answer, and no spare host is left: exit code 85" in said
    assert len(lines(tmp_path)) == 2


NAMED = {  # what is printed: the host that it names, the exit code
    "nanoshard: host of ranks 2-3: x1": ("x1", 43),
    "srun: error: x1: task 2: Killed\nsrun: error: x0: task 0: Killed": ("x1", 137),
    "srun: error: x1: tasks 2-3: Exited with exit code 1\nsrun: error: x0: task 0: Killed": (None, 1),
    "=   PID 7 RUNNING AT x1\n=   EXIT CODE: 9": ("x1", 255),
    "Traceback\nRuntimeError: x1": (None, 1)}


@pytest.mark.parametrize("text", NAMED)
def test_a_host_that_answers_and_is_named(job, tmp_path, text):
    host, code = NAMED[text]
    (tmp_path / "text").write_text(text + "\n")
    said = end(job("mpiexec", f"cat text >&2; exit {code}", "exit 0"), code if host is None else 0)
    if host is None:
        assert f"exit code {code}, but all hosts answer and none was named: no restart" in said
    else:
        assert f"{host}.site was named: left out. The run starts again on x0.site x2.site" in said
    assert len(lines(tmp_path)) == (2 if host is None else 4)


@pytest.mark.parametrize("code", [0, 85])
def test_ends_that_are_no_loss(job, tmp_path, code):
    end(job("srun", f"touch down.x1; exit {code}"), code)
    assert len(lines(tmp_path)) == 1 and not (tmp_path / "asked").exists()


def test_signals_of_the_scheduler(job, tmp_path):
    """USR1 goes to the launcher; after TERM, the end of the job, nothing starts again."""
    waits = "trap 'echo got it; exit 9' USR1; touch up; while :; do /bin/sleep 0.02; done"
    process = job("srun", waits)
    while not (tmp_path / "up").exists():
        assert process.poll() is None
        time.sleep(0.02)
    (tmp_path / "down.x1").touch()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
    assert "got it" in end(process, 9)
    assert len(lines(tmp_path)) == 1

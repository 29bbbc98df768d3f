"""Real SLURM on one machine: `make slurm`. Three emulated nodes, train.py under srun, mpiexec and sbatch.

    launchers   srun -N 2 -n 4 train.py tiny; -m cyclic without MPI; mpiexec inside sbatch: the same weights
    limit       sbatch scripts/generic.slurm: SIGUSR1 before the time limit, save, exit 85, requeue, resume,
                end; its final weights equal those of the same job without interruption
    node        SPARES=1: a slurmd and its ranks are killed; the run goes on with the spare node, and its
                final weights equal those of the same run without a loss

--only launchers|limit|node runs one of them. Without root or SLURM's programs it prints so and exits 0. A
SLURM or munge of the machine itself is not changed.
"""
import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from interface.command_line import command_line, wrong_input  # noqa: E402

BIN = Path(sys.executable).parent
NODES = ["n0", "n1", "n2"]
PROGRAMS = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue"]
CONF = """ClusterName=nanoshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=pmi2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
ReturnToService=2
KillWait=30
SlurmdTimeout=15
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 RealMemory=1000
PartitionName=debug Nodes=n[0-2] Default=YES MaxTime=01:00:00 State=UP
"""  # cred_expire: a requeued job waits this long before it starts (120 s by default).
# SlurmdTimeout: a node that is silent this long is down (300 s by default).
MPIEXEC = """#!/bin/bash -l
source {venv}/bin/activate
mpiexec -n 4 -ppn 2 python train.py {flags} --out {out}
"""
# A node has a /dev/shm of its own. On a shared one, MPICH's segments, named after job and step, would meet
# those that a killed job 1 of an earlier cluster has left, and MPI_Init would end in "Out of memory".
OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"'
CYCLIC = """
import sys
import train
launch = train.agree.launch.launch
def launch_and_print(*args, **how):
    world = launch(*args, **how)
    print(f"rank {world.rank}: node {world.nodes[world.rank]} local rank {world.local_rank}", flush=True)
    return world
train.agree.launch.launch = launch_and_print
train.main(sys.argv[1:])
"""


def say(text):
    print(text, flush=True)


def show_lines(text, *patterns):
    """Print the lines of text that match one of the patterns, indented."""
    for line in text.splitlines():
        if any(re.search(p, line) for p in patterns):
            say(f"    {line}")


def check(what, ok, detail=""):
    """Print one result; the first failure ends the run."""
    say(f"  {'ok  ' if ok else 'FAIL'} {what}")
    if not ok:
        raise SystemExit(f"make slurm: failed: {what}\n{detail}")


def until(what, condition, seconds):
    """Wait for condition() to be true -> its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"make slurm: failed: waited {seconds} s for {what}")
        time.sleep(0.3)
    return value


def why_not():
    """Return why no SLURM can run here, or None."""
    if os.geteuid() != 0:
        return "needs root (slurmd starts processes for its users)"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"{', '.join(missing)} not installed" if missing else None


# -----------------------------------------------------------------------------
# The cluster

def dies_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no daemon outlives this process


class Cluster:
    """Three emulated nodes: the daemons, their configuration, and the commands that use them."""

    def __init__(self, folder):
        self.folder, self.daemons, self.slurmd = folder, [], {}
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        with contextlib.ExitStack() as held:  # free ports
            socks = [held.enter_context(socket.socket()) for _ in ("slurmctld", *NODES)]
            for s in socks:
                s.bind(("127.0.0.1", 0))
            ports = [s.getsockname()[1] for s in socks]
        self.conf = folder / "slurm.conf"
        self.conf.write_text(CONF.format(host=socket.gethostname().split(".")[0], ports=ports, folder=folder))
        launchers = ("SLURM", "PMI", "MPI", "OMPI", "PBS", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        self.env |= {"SLURM_CONF": str(self.conf), "VENV": str(BIN.parent),
                     "OMP_NUM_THREADS": "1",  # each node counts all cores as its own
                     "PATH": os.pathsep.join([str(BIN), os.environ["PATH"], "/usr/sbin", "/sbin"])}

    def start(self):
        """Start the daemons and wait for three idle nodes."""
        f, key = self.folder, self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self._daemon("munged", "-F", "--force", f"--key-file={key}", f"--socket={f}/munge.socket",
                     f"--pid-file={f}/munged.pid", f"--log-file={f}/munged.log",
                     f"--seed-file={f}/munged.seed")
        until("munged's socket", (f / "munge.socket").exists, 10)
        self._daemon("slurmctld", "-D", "-c", "-f", self.conf)
        own_shm = ["unshare", "--mount", "sh", "-c", OWN_SHM]
        if subprocess.run([*own_shm, "true"], capture_output=True).returncode:
            say("  this container may not mount: the nodes share one /dev/shm")
            own_shm = []
        for node in NODES:
            self.slurmd[node] = self._daemon(*own_shm, "slurmd", "-D", "-f", self.conf, "-N", node)
        until("three idle nodes", lambda: self.run("sinfo", "-h", "-o", "%D %T", ok=False).stdout.split()
              == ["3", "idle"], 30)

    def _daemon(self, *command):
        with open(self.folder / "daemons.log", "a") as log:
            p = subprocess.Popen([*map(str, command)], env=self.env, stdin=subprocess.DEVNULL, stdout=log,
                                 stderr=log, cwd=self.folder, preexec_fn=dies_with_parent)
        self.daemons.append(p)
        return p

    def run(self, *command, ok=True, seconds=400, **env):
        """Run a command with this cluster's environment in the repository's root -> CompletedProcess."""
        done = subprocess.run([*map(str, command)], env={**self.env, **env}, cwd=ROOT, text=True,
                              capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
        if ok and done.returncode:
            raise SystemExit(f"make slurm: failed: {' '.join(map(str, command))}: exit code "
                             f"{done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def batch(self, *args, **env):
        """sbatch -> the job's number"""
        return self.run("sbatch", "--parsable", *args, **env).stdout.strip()

    def job(self, number):
        """Return {key: value}, what scontrol shows of a job."""
        text = self.run("scontrol", "show", "job", "-o", number, ok=False).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait_for_job(self, number, seconds):
        """Wait for the end of a job -> job(number)."""
        end_states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        until(f"job {number} to end", lambda: self.job(number).get("JobState") in end_states, seconds)
        return self.job(number)

    def kill_node(self, node):
        """Kill a node: its slurmd, its step daemons, its ranks and what they have started."""
        here = {pid: parent for pid, parent, environ in self.processes()
                if f"SLURMD_NODENAME={node}".encode() in environ.split(b"\0")}
        for pid in (self.slurmd[node].pid, *{*here.values()} - {1, os.getpid()}, *here):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.slurmd[node].wait()

    def processes(self):
        """Return (number, parent, environment) of all processes that have this cluster's SLURM_CONF."""
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (proc / "environ").read_bytes()
                if f"SLURM_CONF={self.conf}".encode() in environ:
                    parent = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
                    found.append((int(proc.name), parent, environ))
        return found

    def stop(self):
        """End the jobs, then the daemons in reverse order, then kill their remaining processes -> those."""
        with contextlib.suppress(Exception, SystemExit):  # of run() and until()
            jobs = self.run("squeue", "-h", "-o", "%A", ok=False, seconds=10).stdout.split()
            if jobs:
                self.run("scancel", "--full", "-s", "KILL", *jobs, ok=False, seconds=10)
                self.run("scancel", *jobs, ok=False, seconds=10)
                until("jobs to end", lambda: not self.run("squeue", "-h", seconds=10).stdout.strip(), 20)
        for p in reversed(self.daemons):
            p.terminate()
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        left = []
        for pid, _, _ in self.processes():  # step daemons and ranks
            with contextlib.suppress(OSError):
                left.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")))
                os.kill(pid, signal.SIGKILL)
        return left


# -----------------------------------------------------------------------------
# What runs on it

def rows(out):
    """Return the rows of a run's metrics.jsonl so far."""
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    return []


def check_same_weights(cluster, a, b):
    """Check that two runs ended with equal checkpoints."""
    done = cluster.run("python", "checkpoint.py", "diff", a, b, ok=False)
    show_lines(done.stdout, ".")
    check(f"{a.name} and {b.name}: the same weights and moments, bit for bit", done.returncode == 0,
          done.stderr)


def check_launchers(cluster, flags):
    """Start train.py by srun in block and cyclic order, with and without MPI, and by mpiexec in a batch
    script -> ms per step."""
    say("srun -N 2 -n 4 python train.py tiny: MPI's ranks through pmi2")
    block, cyclic, hydra = (cluster.folder / name for name in ("block", "cyclic", "mpiexec"))
    done = cluster.run("srun", "-N", 2, "-n", 4, "python", "train.py", *flags, "--out", block)
    show_lines(done.stdout, r"^\[node", "^started", r"^step=(1|20) ", "^done")
    check("two nodes of two ranks", re.findall(r"\[node (./2) .*srun: 2 of 4 ranks", done.stdout) in
          (["1/2", "2/2"], ["2/2", "1/2"]), done.stdout)
    check("the loss falls", rows(block)[-1]["loss"] < rows(block)[0]["loss"] - 0.2)
    say("srun --mpi=none -N 2 -n 4 -m cyclic: ranks 0, 2 on the first node, 1, 3 on the second; no MPI")
    done = cluster.run("srun", "--mpi=none", "-N", 2, "-n", 4, "-m", "cyclic", "python", "-c", CYCLIC,
                       *flags, "--out", cyclic, MASTER_ADDR="127.0.0.1")  # n0, n1 are no real host names
    show_lines("\n".join(sorted(done.stdout.splitlines())), "^rank")
    places = sorted(re.findall(r"rank (\d): node (\d) local rank (\d)", done.stdout))
    check("every rank has its node's next device",
          [p[1:] for p in places] == [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")], done.stdout)
    check_same_weights(cluster, block, cyclic)
    say("mpiexec -n 4 -ppn 2 inside sbatch")
    script = cluster.folder / "mpiexec.sh"
    script.write_text(MPIEXEC.format(venv=BIN.parent, flags=" ".join(map(str, flags)), out=hydra))
    number = cluster.batch("-N", 2, "--ntasks-per-node=2", "-o", cluster.folder / "mpiexec.out", script)
    job = cluster.wait_for_job(number, 400)
    text = (cluster.folder / "mpiexec.out").read_text()
    show_lines(text, r"^\[node", "^done")
    check("all ranks are in one world", job["JobState"] == "COMPLETED" and
          text.count("hydra: 2 of 4 ranks here") == 2, f"{job['JobState']}\n{text}")
    check_same_weights(cluster, block, hydra)
    return min(r["ms"] for r in rows(block)[1:])


def check_requeue(cluster, flags, steps):
    """Run scripts/generic.slurm without interruption and interrupted by its time limit: equal weights."""
    run_flags, flags = flags, [*flags, "--steps", steps, "--log-every", 5]
    script = ["scripts/generic.slurm"]  # as it is: 2 nodes of 2 ranks, --signal, --requeue
    whole, cut = (cluster.folder / f"{name}-{steps}" for name in ("whole", "requeued"))
    say(f"sbatch scripts/generic.slurm tiny --steps {steps}, not interrupted")
    job = cluster.wait_for_job(cluster.batch("-o", f"{whole}.out", *script, *flags, "--out", whole), 300)
    show_lines(Path(f"{whole}.out").read_text(), "^started", "^done")
    check("completed", (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"),
          f"{job}\n{Path(f'{whole}.out').read_text()}")
    say("the same job; after 5 steps its time limit becomes a minute from now")
    number = cluster.batch("-o", f"{cut}.out", *script, *flags, "--out", cut)
    until("step 5", lambda: rows(cut)[-1:] and rows(cut)[-1]["step"] >= 5, 120)
    hours, minutes, seconds = map(int, cluster.job(number)["RunTime"].split(":"))
    # SLURM checks within 30 s, and finds less than the 120 s of --signal left
    limit = hours * 60 + minutes + (1 if seconds < 25 else 2)
    cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")
    began = time.monotonic()
    until("the requeued job", lambda: cluster.job(number)["Restarts"] != "0" or
          cluster.job(number)["JobState"] == "COMPLETED", 120)
    if cluster.job(number)["Restarts"] == "0":  # the steps were faster than before
        say("    it ended before SLURM checked the limit: repeat with twice the steps")
        return check_requeue(cluster, run_flags, 2 * steps)
    say(f"    time limit {limit} min; back in the queue {time.monotonic() - began:.0f} s later")
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    job = cluster.wait_for_job(number, 300)
    text = Path(f"{cut}.out").read_text()
    show_lines(text, "^started", "^resumed", "^stopped", "^done")
    check(f"stopped by SIGUSR1, requeued {job['Restarts']} time(s), resumed, completed",
          job["JobState"] == "COMPLETED" and job["Restarts"] != "0" and "stopped by SIGUSR1" in text and
          "resumed" in text, f"{job}\n{text}")
    check_same_weights(cluster, whole, cut)
    steps_cut, steps_whole = ([r["step"] for r in rows(out)] for out in (cut, whole))
    # A resumed run also logs its first step
    check("its metrics have one row per logged step", steps_cut == sorted({*steps_cut, *steps_whole}),
          f"{steps_cut}")


def check_lost_node(cluster, flags, steps=200):
    """Kill the second of three nodes under scripts/generic.slurm with SPARES=1: equal weights."""
    flags = [*flags, "--steps", steps, "--log-every", 5, "--save-every", 40]
    whole, cut = (cluster.folder / name for name in ("no-loss", "lost-node"))
    say(f"srun -N 2 -n 2 python train.py tiny --steps {steps}")
    cluster.run("srun", "-N", 2, "-n", 2, "python", "train.py", *flags, "--out", whole)
    say("SPARES=1 sbatch --no-kill --nodes=3 scripts/generic.slurm: the same; after step 90 n1 is killed")
    number = cluster.batch("--no-kill", "--nodes=3", "--ntasks-per-node=1", "-o", f"{cut}.out",
                           "scripts/generic.slurm", *flags, "--out", cut, SPARES="1")
    until("step 90", lambda: rows(cut) and rows(cut)[-1]["step"] >= 90, 120)
    cluster.kill_node("n1")
    began = time.monotonic()
    until("training", lambda: re.search("^resumed.*^step=", Path(f"{cut}.out").read_text(), re.M | re.S), 120)
    say(f"    the run trains again {time.monotonic() - began:.1f} s after the kill")
    job = cluster.wait_for_job(number, 300)
    text = Path(f"{cut}.out").read_text()
    show_lines(text, "^nanoshard", "^srun: error", "^resumed", "^done")
    check("the run goes on on n0 and n2, in the same start of the job",
          (job["JobState"], job["Restarts"]) == ("COMPLETED", "0") and text.count("resumed") == 1 and
          "n1 does not answer: left out. The run starts again on n0 n2" in text, f"{job}\n{text}")
    check_same_weights(cluster, whole, cut)


@dataclass(frozen=True)
class Flags:
    only: Literal["all", "launchers", "limit", "node"] = "all"  # which part runs


def main(argv=None):
    with wrong_input():
        flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "cluster.py",
                             "Run train.py on a real SLURM of three emulated nodes on this machine.")
    began = time.monotonic()
    if why := why_not():
        say(f"make slurm: NOT RUN: {why}")
        return
    folder = Path(tempfile.mkdtemp(prefix="nanoshard-slurm-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally below
    cluster = Cluster(folder)
    try:
        cluster.start()
        version = cluster.run("sinfo", "-V").stdout.strip()
        say(f"{version}, three emulated nodes on {socket.gethostname()}, {time.monotonic() - began:.1f} s")
        text = folder / "text.txt"
        text.write_text("".join(p.read_text() for p in sorted(ROOT.glob("*.py"))))
        cluster.run("python", "prepare.py", text, "--name", "toy", "--tokenizer", "char", "--out", folder)
        run_flags = ["tiny", "--data", folder / "toy", "--seq-len=64", "--eval-every=0", "--no-plot"]
        ms = 40
        if flags.only in ("all", "launchers"):
            ms = check_launchers(cluster, [*run_flags, "--steps=20", "--log-every=5", "--save-every=20"])
        if flags.only in ("all", "limit"):
            check_requeue(cluster, run_flags, math.ceil(48_000 / ms))  # SLURM checks limits every 30 s
        if flags.only in ("all", "node"):
            check_lost_node(cluster, run_flags)  # last: one node fewer
        say(f"make slurm: {flags.only} passed in {time.monotonic() - began:.0f} s")
    except (SystemExit, subprocess.TimeoutExpired):
        for log in ("slurmctld.log", "slurmd.n0.log", "daemons.log"):
            with contextlib.suppress(OSError):
                say(f"--- end of {log}\n" + "\n".join((folder / log).read_text().splitlines()[-15:]))
        raise
    finally:
        left = cluster.stop()
        if left:
            say(f"make slurm: killed what SLURM had left: {left}")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

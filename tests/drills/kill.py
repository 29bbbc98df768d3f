"""Runs killed with kill -9 and resumed: python tests/drills/kill.py --count 200 --out DIR

Each run trains a tiny model over one layout, is killed one to three times (one rank or all, at any moment or
during a save), is restarted with --resume auto after each kill, and must end equal to a run without a kill:

    equal bits in every weight and moment; one row per step, with equal loss and gradient norm
    each start resumes from the newest committed checkpoint: no earlier step is lost or computed twice
    every step_N that exists at a kill is sound: no partial checkpoint has the name of a complete one

Ranks are forked from a server that has imported torch, which saves the seconds of the import. mpiexec starts
every MPI_EVERY-th run. DIR/log.jsonl has one row per run; a second call continues it.
"""
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])

import pool  # noqa: E402
from runs import rows, same  # noqa: E402

import checkpoint  # noqa: E402
from interface.command_line import command_line, wrong_input  # noqa: E402

STEPS, SAVE_EVERY, MPI_EVERY, LIMIT = 12, 2, 25, 120  # LIMIT: seconds after which a run counts as hung
TINY = ("tiny --n-layer 2 --n-head 2 --n-kv-head 2 --n-embd 16 --ffn-hidden 16 --seq-len 8 --vocab-size 64 "
        f"--data synthetic --micro-batch 2 --global-batch 8 --steps {STEPS} --save-every {SAVE_EVERY} "
        "--log-every 1 --eval-every 0 --no-plot --warmup 2 --dropout 0.1 --keep 2 --timeout 30 "
        "--resume auto").split()
GPT2 = ["--norm", "layer", "--mlp", "gelu", "--pos", "learned", "--bias", "--tied"]
MOE = ["--n-experts", "4", "--router", "sigmoid", "--router-bias-rate", "0.01", "--n-shared-experts", "1"]
LAYOUTS = {  # name: (ranks, flags)
    "zero1": (2, ["--zero", "1"]),
    "tp2": (2, ["--tp", "2"]),
    "pp2-tied": (2, ["--pp", "2", *GPT2]),
    "ep2": (2, ["--ep", "2", *MOE]),
    "one": (1, []),
    "dp2-bf16": (2, ["--dtype", "bf16"]),
    "zero1-split": (2, ["--dtype", "bf16", "--zero", "1", "--moments-dtype", "bf16"]),
    "tp2-zero1": (4, ["--tp", "2", "--zero", "1"]),
    "pp2-ep2-zero1": (4, ["--pp", "2", "--ep", "2", "--zero", "1", *MOE]),
    "zero2": (2, ["--zero", "2"]),
    "zero3-full": (2, ["--zero", "3", "--recompute", "full"]),
    "cp2": (2, ["--cp", "2"]),
    "pp2-chunks": (2, ["--pp", "2", "--pp-chunks", "2", "--n-layer", "4"]),
    "mlm": (2, ["--objective", "mlm", "--zero", "1"]),
    "muon": (2, ["--optimizer", "muon", "--tp", "2"]),
}


def rank_main(rank, size, port, argv, log):
    """In a new process: train.main with the environment that torchrun sets."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1), os.dup2(fd, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    sys.argv[1:] = argv
    import train
    train.main(argv)


class Ranks:
    """The forked processes of one start of a run."""

    def __init__(self, size, argv, log):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.all = []
        for rank in range(size):
            self.all.append(pool.context.Process(target=rank_main, args=(rank, size, port, argv, log)))
            self.all[-1].start()

    def is_running(self):
        return any(p.is_alive() for p in self.all)

    def kill(self, everyone, rng):
        for p in self.all if everyone else [rng.choice(self.all)]:
            p.kill()

    def end(self, grace):
        """As a launcher does after a rank died: wait for `grace` seconds, then kill the remaining ranks."""
        until = time.monotonic() + grace
        for p in self.all:
            p.join(max(0, until - time.monotonic()))
        for p in self.all:
            p.kill()
            p.join()

    def codes(self):
        return [p.exitcode for p in self.all]


class MpiRanks:
    """The processes of one start of a run by mpiexec, which ends the other ranks when one dies."""

    def __init__(self, size, argv, log):
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        command = [mpiexec, "-n", str(size), sys.executable, str(HERE.parent.parent / "train.py"), *argv]
        self.p = subprocess.Popen(command, stdout=open(log, "a"), stderr=subprocess.STDOUT)
        self.words = "\0".join(command[3:])

    def is_running(self):
        return self.p.poll() is None

    def kill(self, everyone, rng):
        ranks = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_text().startswith(self.words):
                    ranks.append(int(path.parent.name))
        for pid in ranks if everyone else ranks and [rng.choice(ranks)]:
            os.kill(pid, signal.SIGKILL)

    def end(self, grace):
        try:
            self.p.wait(max(grace, 20))
        except subprocess.TimeoutExpired:
            self.kill(True, None)
            self.p.kill()
            self.p.wait()

    def codes(self):
        return [self.p.returncode]


def newest(out):
    """Return the newest committed step; 0: there is none. ValueError: a committed checkpoint is not sound."""
    found = checkpoint.steps(out)
    for path in found:
        checkpoint.check(path)
    return int(found[0].name[5:]) if found else 0


def started_from(log, start):
    """Return the step from which the run resumed whose output starts at byte `start` of the log; None: it was
    killed before it resumed."""
    if not Path(log).exists():
        return None  # it was killed before it could open its log
    for line in Path(log).read_text(errors="replace")[start:].splitlines():
        if line.startswith("resumed "):
            return int(line.split("step_")[1].split(":")[0])
        if line.startswith("started: "):
            return 0
    return None


def kill_once(ranks, out, rng, typical):
    """Kill one rank or all at a random moment, or within a save. Return whether it came before their end, and
    whether in a save."""
    begun = time.monotonic()
    moment = begun + rng.uniform(0.1, 1.0) * typical
    in_save = rng.random() < 0.6
    if in_save:  # within the first milliseconds of the n-th save since this start
        moment = begun + 3 * typical
    after = rng.randrange(STEPS // SAVE_EVERY)
    saves = set()
    while time.monotonic() < moment and len(saves) <= after:
        if not ranks.is_running():
            return False, False
        if in_save:
            saves |= set(out.glob("step_*.tmp"))
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.02) if saves else 0)
    in_save = any(path.exists() for path in saves)
    ranks.kill(rng.random() < 0.5, rng)
    ranks.end(rng.choice([0.0, 0.3, 2.0]))
    return True, in_save


def one_run(name, out, kills, rng, launcher=Ranks, typical=3.0):
    """Train to the end with `kills` kills. Return {kills, in_save, starts}.

    AssertionError: one of the statements at the top of this file is false. typical: seconds of a start.
    """
    size, flags = LAYOUTS[name]
    log = out.with_suffix(".txt")
    seen = {"kills": 0, "in_save": 0, "starts": 0}
    expected = 0
    while True:
        at = log.stat().st_size if log.exists() else 0
        ranks = launcher(size, [*TINY, *flags, "--out", str(out)], str(log))
        seen["starts"] += 1
        killed = False
        if kills > seen["kills"]:
            killed, in_save = kill_once(ranks, out, rng, typical)
            seen["kills"] += killed
            seen["in_save"] += in_save
        ranks.end(LIMIT if not killed else 0)
        resumed_at = started_from(log, at)
        assert resumed_at in (None, expected), f"resumed at {resumed_at}, not {expected}"
        try:
            now = newest(out) if out.is_dir() else 0
        except (ValueError, OSError) as e:
            raise AssertionError(f"a committed checkpoint is not sound: {e}") from None
        assert now >= expected, f"step {expected} was committed and is missing"
        expected = now
        if all(c == 0 for c in ranks.codes()):
            break
        assert killed, f"ended without a kill with {ranks.codes()}: {log.read_text()[at:][-2000:]}"
    logged = [r["step"] for r in rows(out)]
    assert logged == list(range(1, STEPS + 1)), f"a step is missing or logged twice: {logged}"
    unfinished = [p.name for p in out.glob("step_*") if not p.name[5:].isdigit()]
    assert not unfinished, f"unfinished checkpoints: {unfinished}"
    return seen


def assert_equal_runs(a, b):
    """Assert that the newest checkpoints of two runs and the rows of their logs have equal bits."""
    newest_a, newest_b = (checkpoint.steps(out)[0] for out in (a, b))
    assert checkpoint.diff(newest_a, newest_b) == 0, "they differ as printed above"
    same(a, b, checkpoint.step_of(newest_a))
    assert rows(a) == rows(b)


def reference(name, folder):
    """Return the folder of a run of this layout without a kill; the first call trains it."""
    out = folder / f"ref-{name}"
    if not (out / f"step_{STEPS:06d}").exists():
        shutil.rmtree(out, ignore_errors=True)
        one_run(name, out, 0, random.Random(0))
    return out


def drill(i, folder, name=None, launcher=Ranks, typical=3.0):
    """Drill number i, whose seed is i -> its row of the log. The files of a failed run are kept."""
    rng = random.Random(i)
    name = name or list(LAYOUTS)[i % len(LAYOUTS)]
    row = {"run": i, "layout": name, "launcher": "mpiexec" if launcher is MpiRanks else "fork"}
    want, out = reference(name, folder), folder / f"run-{i:05d}"
    shutil.rmtree(out, ignore_errors=True)
    out.with_suffix(".txt").unlink(missing_ok=True)
    try:
        row.update(one_run(name, out, rng.randint(1, 3), rng, launcher, typical))
        assert_equal_runs(want, out)
        row["ok"] = True
        shutil.rmtree(out)
        out.with_suffix(".txt").unlink()
    except AssertionError as e:
        row.update(ok=False, why=str(e))
    return row


@dataclass(frozen=True)
class Flags:
    count: int = 200  # kills in total, with those of earlier calls
    out: Path = Path("out/drills")  # directory of the runs and of log.jsonl


def main():
    with wrong_input():
        flags = command_line(Flags, sys.argv[1:], "kill.py", __doc__.splitlines()[0])
    flags.out.mkdir(parents=True, exist_ok=True)
    log = flags.out / "log.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    while sum(row.get("kills", 0) for row in done) < flags.count:
        i = len(done)
        launcher, typical = (MpiRanks, 12.0) if i % MPI_EVERY == MPI_EVERY - 1 else (Ranks, 3.0)
        done.append(drill(i, flags.out, None, launcher, typical))
        with open(log, "a") as f:
            f.write(json.dumps(done[-1]) + "\n")
        print(done[-1], flush=True)
    totals = {key: sum(row.get(key, 0) for row in done) for key in ("ok", "starts", "kills", "in_save")}
    print(f"{len(done)} runs: {totals}")
    return 0 if totals["ok"] == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())

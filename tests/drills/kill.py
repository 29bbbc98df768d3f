"""Runs killed with kill -9 and resumed: python tests/drills/kill.py --count 200 --out DIR

Each run trains a tiny model over one layout, is killed one to three times (one rank or all, at any moment or
during a save), is restarted with --resume auto after each kill, and must end equal to a run without a kill:

    equal bits in every weight and moment; one row per step, with equal loss and gradient norm
    each start resumes from the newest committed checkpoint: no earlier step is lost or computed twice
    every step_N that exists at a kill is sound: no partial checkpoint has the name of a complete one

Ranks are forked from a server that has imported torch, which saves the seconds of the import. mpiexec starts
every MPI_EVERY-th run. --workers N does N runs at a time, each of up to four ranks. DIR/log.jsonl has one row
per run; a second call continues it, and --count 0 only prints what it holds.
"""
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_any
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])

import pool  # noqa: E402

import checkpoint  # noqa: E402
import prepare  # noqa: E402
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
    "chat": (2, ["--data", "{folder}/data/chat", "--seq-len", "48", "--vocab-size", "0"]),
}


def conversations(folder):
    """Make the data set folder/data/chat of 60 short conversations, if it is not there."""
    data = folder / "data"
    if (data / "chat").exists():
        return
    data.mkdir(exist_ok=True)
    sums = (f"{a} + {b}? It is {a + b}.\n" for a in range(40) for b in range(30))
    (data / "text.txt").write_text("".join(sums))
    with open(data / "conversations.jsonl", "w") as lines:
        for i in range(60):
            turns = {"user": f"{i} + {i}?", "assistant": f"It is {2 * i}."}
            messages = [{"role": role, "content": text} for role, text in turns.items()]
            lines.write(json.dumps({"messages": messages}) + "\n")
    for argv in ([data / "text.txt", "--name", "base", "--vocab-size", "300"],
                 ["chat", data / "conversations.jsonl", "--name", "chat", "--tokenizer", data / "base",
                  "--seq-len", "48"]):
        assert prepare.main([*map(str, argv), "--out", str(data)]) == 0


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

    # start() also asks for the exit codes of processes that other threads have started. Python reads each
    # code from a pipe: if two threads read the same one, the second finds it empty and takes 255 for it.
    one_thread = threading.RLock()

    def __init__(self, size, argv, log):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        start = pool.context.Process
        self.all = [start(target=rank_main, args=(r, size, port, argv, log)) for r in range(size)]
        with self.one_thread:
            for p in self.all:
                p.start()

    def alive(self):
        with self.one_thread:
            return [p for p in self.all if p.is_alive()]

    def kill(self, everyone, rng):
        for p in self.alive() if everyone else [rng.choice(self.alive() or self.all)]:
            p.kill()

    def end(self, grace):
        """As a launcher does after a rank died: wait for `grace` seconds, then kill the remaining ranks."""
        until = time.monotonic() + grace
        while (alive := self.alive()) and time.monotonic() < until:  # wait() on an empty list sleeps
            wait([p.sentinel for p in alive], timeout=until - time.monotonic())
        for p in self.alive():
            p.kill()
        while alive := self.alive():
            wait([p.sentinel for p in alive])

    def codes(self):
        with self.one_thread:
            return [p.exitcode for p in self.all]


class MpiRanks:
    """The processes of one start of a run by mpiexec, which ends the other ranks when one dies."""

    def __init__(self, size, argv, log):
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        command = [mpiexec, "-n", str(size), sys.executable, str(HERE.parent.parent / "train.py"), *argv]
        self.size, self.p = size, subprocess.Popen(command, stdout=open(log, "a"), stderr=subprocess.STDOUT)

    def ranks(self):
        """Return pids of the python processes below mpiexec."""
        children = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:
                continue
            name, rest = text[text.index("(") + 1:text.rindex(")")], text[text.rindex(")") + 2:].split()
            children.setdefault(int(rest[1]), []).append((int(stat.parent.name), name))
        found, todo = [], [self.p.pid]
        while todo:
            for pid, name in children.get(todo.pop(), []):
                todo.append(pid)
                found += [pid] * name.startswith("python")
        return found

    def alive(self):
        return [self.p] if self.p.poll() is None else []

    def kill(self, everyone, rng):
        ranks = self.ranks()
        for pid in ranks if everyone else ranks and [rng.choice(ranks)]:
            os.kill(pid, signal.SIGKILL)

    def end(self, grace):
        try:
            self.p.wait(max(grace, 20))
        except subprocess.TimeoutExpired:
            for pid in self.ranks():
                os.kill(pid, signal.SIGKILL)
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


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def one_run(name, out, kills, rng, launcher=Ranks, typical=3.0):
    """Train to the end with `kills` kills -> {kills, in_save, starts, seconds}. AssertionError: one of the
    statements at the top of this file is false."""
    size, flags = LAYOUTS[name]
    flags = [flag.format(folder=out.parent) for flag in flags]
    log = out.with_suffix(".txt")
    seen = {"kills": 0, "in_save": 0, "starts": 0}
    expected, t0 = 0, time.monotonic()
    while True:
        at = log.stat().st_size if log.exists() else 0
        ranks = launcher(size, [*TINY, *flags, "--out", str(out)], str(log))
        seen["starts"] += 1
        t_start = time.monotonic()
        killed = False
        if kills > seen["kills"]:
            in_save = rng.random() < 0.6
            moment, after = t_start + rng.uniform(0.1, 1.0) * typical, rng.randrange(STEPS // SAVE_EVERY)
            saves, last = set(), None
            while ranks.alive() and not killed:
                if in_save:  # within the first milliseconds of the n-th save since this start
                    last = next(iter(out.glob("step_*.tmp")), None) if out.is_dir() else None
                    saves |= {last} - {None}
                    late = time.monotonic() > t_start + 3 * typical
                    killed = last is not None and len(saves) > after or late
                else:
                    killed = time.monotonic() > moment
                if not killed:
                    time.sleep(0.0005)
            if killed:
                time.sleep(rng.uniform(0, 0.02) if last else 0)
                seen["in_save"] += bool(last is not None and last.exists())
                ranks.kill(rng.random() < 0.5, rng)
                ranks.end(rng.choice([0.0, 0.3, 2.0]))
                seen["kills"] += 1
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
    return {**seen, "seconds": round(time.monotonic() - t0, 2)}


def assert_equal_runs(a, b):
    """Assert that the newest checkpoints of two runs and the rows of their logs have equal bits."""
    newest_a, newest_b = (checkpoint.steps(out)[0] for out in (a, b))
    assert checkpoint.diff(newest_a, newest_b) == 0, "they differ as printed above"
    for x, y in zip(rows(a), rows(b), strict=True):
        assert all(x[k] == y[k] for k in ("step", "loss", "grad_norm", "samples", "lr")), f"{x} {y}"


def reference(name, folder):
    """Return the folder of a run of this layout without a kill; the first call trains it."""
    out = folder / f"ref-{name}"
    if not (out / f"step_{STEPS:06d}").exists():
        shutil.rmtree(out, ignore_errors=True)
        if name == "chat":
            conversations(folder)
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
    workers: int = 1  # runs at a time
    first: int = 0  # the number, which is the seed, of the first run: other machines try other moments


def summary(done):
    """Return a line per layout and launcher, and one for all. done: rows of log.jsonl."""
    table = {}
    for row in done:
        total = table.setdefault((row["layout"], row["launcher"]), Counter())
        total.update(runs=1, failures=int(not row["ok"]))
        total.update({k: row.get(k, 0) for k in ("starts", "kills", "in_save")})
    table["all", ""] = sum(table.values(), Counter())
    return [f"{name:14s} {launcher:8s} {t['runs']:5d} runs {t['starts']:5d} starts {t['kills']:5d} kills, "
            f"{t['in_save']:4d} of them in a save, {t['failures']} failures"
            for (name, launcher), t in table.items()]


class Drills:
    """Runs that are not in the log yet, `workers` at a time, until it counts enough kills."""

    def __init__(self, out, workers, first):
        self.out, self.path, self.lock = out, out / "log.jsonl", threading.Lock()
        self.workers, self.first = workers, first
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.done = [json.loads(line) for line in lines]
        self.times = {}  # (layout, launcher): seconds of a start, so that kills fall at any moment of it

    def one(self, i):
        launcher = MpiRanks if i % MPI_EVERY == MPI_EVERY - 1 else Ranks
        name = list(LAYOUTS)[i % len(LAYOUTS)]
        mean = self.times.get((name, launcher), 12.0 if launcher is MpiRanks else 3.0)
        row = drill(i, self.out, name, launcher, mean)
        with self.lock:
            if row["ok"]:
                self.times[name, launcher] = row["seconds"] / row["starts"]
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
            self.done.append(row)
            print(f"{self.kills()} kills, {self.failures()} failures: {row}", flush=True)

    def kills(self):
        return sum(row.get("kills", 0) for row in self.done)

    def failures(self):
        return sum(not row["ok"] for row in self.done)

    def run(self, count):
        if self.kills() >= count:
            return
        for name in LAYOUTS:
            reference(name, self.out)
        logged, i, busy = {row["run"] for row in self.done}, self.first, set()
        with ThreadPoolExecutor(self.workers) as pool:
            while self.kills() < count:
                while len(busy) < self.workers:
                    if i not in logged:
                        busy.add(pool.submit(self.one, i))
                    i += 1
                ended, busy = wait_any(busy, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()


def main():
    with wrong_input():
        args = command_line(Flags, sys.argv[1:], "kill.py", __doc__.splitlines()[0])
    args.out.mkdir(parents=True, exist_ok=True)
    drills = Drills(args.out, args.workers, args.first)
    drills.run(args.count)
    print(*summary(drills.done), sep="\n")
    return 1 if drills.failures() else 0


if __name__ == "__main__":
    sys.exit(main())

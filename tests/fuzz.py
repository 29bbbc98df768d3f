"""Random wrong inputs, drawn from a seed, and what the programs must make of them.

Whatever is mutated, a program ends within a minute: with 0, or with 2 and one line on stderr that names
something. It never raises, prints no escape code, and changes no file of somebody else. CASES lists the
kinds of input and how many of each test_fuzz.py tries.

    make fuzz N=20000                     tries many more, and stops at the first failure
    python tests/fuzz.py --case model/17  repeats one
"""
import argparse
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import zlib
from pathlib import Path
from unittest import mock

if __name__ == "__main__":  # pytest knows the root
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool import run_ranks
from runs import SHAPE, chars, session, text_file, text_of

import checkpoint
import convert
import plan
import prepare
import sample
import train
from config import Config
from runtime import launch, launcher
from runtime.launch import World

CASES = {  # kind of input: how many of the suite
    "flags": 132, "data": 56, "checkpoint": 56, "files": 56,  # of one's own
    "model": 140,  # directories of Hugging Face, for convert.py import and sample.py
    "conversations": 80,  # files of prepare.py chat
    "stdin": 32,  # of sample.py --chat
    "launcher": 50,  # environments in which train.py or sample.py --chat starts
    "foreign": 48,  # directories that hold somebody else's files, too
}
SECONDS = 60  # for one case, which takes a tenth of a second on an idle core
SMALL = [f for f in SHAPE if "vocab" not in f and "n-layer" not in f]
QUICK = [*SMALL, "--n-layer=1", "--micro-batch=2", "--log-every=1", "--eval-every=0", "--save-every=1",
         "--no-plot", "--warmup=1"]
TRAIN = [*QUICK, "--data=data/toy", "--out=out/run"]
MODELS = {  # a directory of Hugging Face in model/: flags of the run that it is exported from
    "llama": [], "mixtral": ["--n-experts=2", "--router=softmax-topk"],
    "glm": ["--n-experts=2", "--top-k=1", "--router=sigmoid"],
    "gpt2": ["--norm=layer", "--mlp=gelu", "--pos=learned", "--n-kv-head=2", "--tied"],
}
HUGE = "9" * 30
VALUES = ["nan", "inf", "-inf", "1e400", "-1", "0", "-0.0", "1.5", "", " ", "x", "True", "None", HUGE,
          "-" + HUGE, "..", "/", "/dev/null", "a:0.5,b", "\x1b[31m", "\u00e9\u2028", "1,2", "--", "[]",
          "0x10", "2"]
# Some flags may wait for input (--pdb) or take minutes (--compile, --steps), so they only get values that are
# never valid for them. --out and --dump-grads write to any path that they are given, so they stay unchanged.
ASKED = {"pdb", "timeout", "compile", "profile", "trace", "wandb", "deterministic",
         "eval_every", "eval_iters", "steps", "max_minutes", "init_from"}
NONSENSE = ["nan", "-inf", "-7", "x", "1,2", "\x1b[31m", "[]"]
JSON = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "../x", "/etc/hostname", [], {},
        [[]], {"x": 1}, [1, 2], "\x1b[31mred", "\ud800"]
OUTSIDE = ("train_00000.bin", "val_00000.bin", "meta.json", "tokenizer.json", "metrics.jsonl", "config.json",
           "step_000001/index.json", "step_000001.tmp/x", ".parts/x")  # what a careless program would touch


# -----------------------------------------------------------------------------
# Mutations

def mutate_json(rng, value):
    """Return value with one random place of its tree replaced, removed or buried."""
    if rng.random() < 0.3 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(JSON)
    value = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.15:
        del value[key]
    else:
        value[key] = mutate_json(rng, value[key])
    return value


def mutate_bytes(rng, data):
    """Return data with a few bytes changed, inserted, cut off or appended."""
    data, at = bytearray(data), rng.randrange(max(1, len(data)))
    how = rng.randrange(6)
    if how == 0:
        data[at:at + 1] = bytes([rng.randrange(256)])
    elif how == 1:
        data[at:at] = rng.choice([b"\0" * 40, b"\xff\xfe", b"\n[]\n", b"\n5\n", b"{}\n", b"[" * 100_000])
    elif how == 2:
        del data[at:]
    elif how == 3:
        data += rng.choice([b"\0" * 4096, b"5\n", b"{}\n", b'{"step": "x"}\n', b'{"step": 1', b"\xff\n"])
    elif how == 4:
        data.clear()
    else:
        del data[at:at + rng.randrange(1, 50)]
    return bytes(data)


def mutate_file(rng, path):
    """Change, remove or replace one file."""
    how = rng.random()
    if how < 0.08:
        path.unlink()
    elif how < 0.12:
        path.unlink()
        path.mkdir()
    elif how < 0.65 and path.suffix == ".json":
        with contextlib.suppress(UnicodeEncodeError):
            path.write_text(json.dumps(mutate_json(rng, json.loads(path.read_text())), ensure_ascii=False))
    else:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))


def mutate_line(rng, line):
    """Return a line of JSON (bytes) with one place of its tree changed, or with bytes that are no JSON."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, line)
    return json.dumps(mutate_json(rng, json.loads(line))).encode()


def mutate_fields(rng, path, others):
    """Set up to three fields of a JSON file to values like theirs, or to those of the file `others`."""
    fields, others = json.loads(path.read_text()), json.loads(others.read_text())
    names = sorted(fields) * 4 + sorted(others.keys() - fields.keys())
    for name in {rng.choice(names) for _ in range(rng.randint(1, 3))}:
        value = fields.get(name)
        if isinstance(value, bool):
            new = rng.choice([not value, None, "true"])
        elif isinstance(value, (int, float)):
            new = rng.choice([value + 1, value * 2, value // 2, -value, 0, str(value), 2**40, 1e-9, [value]])
        else:
            new = others.get(name, rng.choice(JSON))
        fields[name] = new
        if rng.random() < 0.2:
            del fields[name]
    with contextlib.suppress(UnicodeEncodeError):
        path.write_text(json.dumps(fields, ensure_ascii=False))


def mutate_header(rng, path):
    """Change the JSON at the head of a .safetensors file, with a length that fits."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_json(rng, json.loads(data[8:end]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def put_in_place(rng, path):
    """Replace a file by what is no file: a pipe that nobody writes, a directory, a link to itself."""
    path.unlink()
    rng.choice([lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to(path.name),
                lambda: path.symlink_to("/dev/zero")])()


def seal(folder):
    """Give the index of a checkpoint the checksum that it claims, so that its contents are looked at."""
    with contextlib.suppress(ValueError, OSError, AttributeError, TypeError, RecursionError):
        index = json.loads((folder / "index.json").read_text())
        index.pop("crc32", None)
        body = json.dumps(index, sort_keys=True)
        (folder / "index.json").write_text(f'{{"crc32": {zlib.crc32(body.encode())}, {body[1:]}')


# -----------------------------------------------------------------------------
# Cases: each changes the working directory, which holds data/toy and out/run, and returns a program's call

def train_run(world, *flags):
    return lambda: session(world, [*TRAIN, *flags])


def called(main, *argv):
    """A call of another program's main() -> what session() returns."""
    def call():
        out, err = text_file(), text_file()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([str(word) for word in argv])
            except SystemExit as e:
                code = e.code
        code = 0 if code == 1 and argv[0] == "diff" else code  # 1: it found differences
        return {"code": code, "err": text_of(err), "out": text_of(out)}
    return call


def flags_case(world, rng):
    names = [f.name for f in dataclasses.fields(Config) if f.name not in ("preset", "out", "dump_grads")]
    pick = rng.random()
    if pick < 0.7:
        flags = []
        for name in rng.sample(names, rng.randint(1, 3)):
            flags.append(f"--{name}={rng.choice(NONSENSE if name in ASKED else VALUES)}")
        return flags, train_run(world, "--steps=2", *flags)
    value = rng.choice(VALUES)
    if pick < 0.8:
        flag = rng.choice(["name", "vocab-size", "val-fraction", "seed", "shard-tokens", "tokenizer",
                           "text-key"])
        argv = ["text.txt", "--name=new", "--tokenizer=char", f"--{flag}={value}"]
        return argv, called(prepare.main, *argv)
    if pick < 0.9:
        flag = rng.choice(["prompt", "max-new-tokens", "temperature", "top-k", "seed"])
        argv = ["out/run", "--max-new-tokens=2", f"--{flag}={value if value != HUGE else '-7'}"]
        return argv, called(sample.main, *argv)
    flag = rng.choice(["gpus", "gpu", "n-layer", "n-embd", "tp", "micro-batch", "scaling", "global-batch"])
    argv = ["dense-210m", f"--{flag}={value}"]
    return argv, called(plan.main, *argv)


def data_case(world, rng):
    files = sorted(p for p in Path("data/toy").iterdir() if p.is_file())
    path = rng.choice(files)
    mutate_file(rng, path)
    if rng.random() < 0.4 and path.suffix == ".bin" and path.is_file():  # a damage that the checksums hide
        meta = json.loads(Path("data/toy/meta.json").read_text())
        for shard in (s for split in meta["shards"].values() for s in split if s["file"] == path.name):
            shard["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        Path("data/toy/meta.json").write_text(json.dumps(meta))
    programs = [train_run(world, "--steps=1", "--out=out/new"),
                called(prepare.main, "stdlib", "--verify", "--name=toy"),
                called(prepare.main, "text.txt", "--name=toy", "--tokenizer=char", "--workers=1")]
    return path, rng.choice(programs)


def checkpoint_case(world, rng):
    step = Path("out/run/step_000002")
    path = rng.choice([step / "index.json", *sorted(step.glob("*"))])
    mutate_file(rng, path)
    if rng.random() < 0.7:
        seal(step)
    programs = [train_run(world, "--steps=3", "--resume=auto"),
                train_run(world, "--steps=3", f"--resume={step}"),
                called(checkpoint.main, "show", str(step)),
                called(checkpoint.main, "diff", str(step), "out/run/step_000001"),
                called(sample.main, "out/run", "--max-new-tokens=2", "--prompt=a")]
    return path, rng.choice(programs)


def files_case(world, rng):
    files = sorted(p for p in Path("out/run").iterdir() if p.is_file())
    path = rng.choice(files)
    if rng.random() < 0.8:
        mutate_file(rng, path)
    else:  # names that other programs, or a user, leave behind
        path = Path("out/run", rng.choice(["step_\u00b2", "step_1.tmp", "step_000009", "hang", "step_x.old"]))
        rng.choice([path.touch, path.mkdir, lambda: path.symlink_to("../..")])()
    programs = [train_run(world, "--steps=3", "--resume=auto"), train_run(world, "--steps=1"),
                called(sample.main, "out/run", "--max-new-tokens=2", "--prompt=a")]
    return path, rng.choice(programs)


def model_case(world, rng):
    """A directory of Hugging Face with a wrong file, or with the file of another model."""
    folder, other = (Path("model", name) for name in rng.sample(sorted(MODELS), 2))
    config, path = folder / "config.json", rng.choice(sorted(folder.iterdir()))
    weights = sorted(folder.glob("*.safetensors"))
    how = rng.random()
    if how < 0.35:
        path = config
        mutate_fields(rng, config, other / "config.json")
    elif how < 0.5:
        path = rng.choice(weights)
        mutate_header(rng, path)
    elif how < 0.55 and (other / path.name).exists():
        shutil.copy(other / path.name, path)
    elif how < 0.6:
        put_in_place(rng, path)
    else:
        path = rng.choice([path, config, folder / "tokenizer.json", *folder.glob("*index.json")])
        mutate_file(rng, path)
    programs = [called(convert.main, "import", folder, "--out", "out/new")] * 3
    programs.append(called(sample.main, folder, "--max-new-tokens=2", "--prompt=a"))
    return path, rng.choice(programs)


MESSAGES = [  # lines that are no conversations, or odd ones
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"messages": []},
    {"messages": [{"role": "assistant", "content": "a" * 5000}]}, {"prompt": "a", "completion": "b"},
    {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": None}]},
    {"messages": [{"role": "assistant", "content": "<|end|>\0\x1b[31m\u2028\ufeff"}]},
]


def conversations_case(world, rng):
    """A file of conversations of which some lines are wrong, or the whole file."""
    good = Path("qa.jsonl").read_bytes().splitlines()
    lines = list(good)
    for _ in range(rng.choice([0, 0, 1, 2])):
        lines[rng.randrange(len(lines))] = mutate_line(rng, rng.choice(good))
    if rng.random() < 0.3:
        lines[rng.randrange(len(lines))] = json.dumps(rng.choice(MESSAGES)).encode()
    data = rng.choice([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\r"]).join(lines)
    if rng.random() < 0.1:
        data = data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-8-sig", "utf-32"]))
    endings = [".jsonl.gz", ".JSONL", ".json", ".jsonl.zst", ".parquet", ""]
    name = "mutated" + rng.choice([*[".jsonl"] * 9, ".jsonl.gz", ".jsonl.gz", *endings])
    if name.endswith(".gz") and rng.random() < 0.8:
        data = gzip.compress(data)
    Path(name).write_bytes(mutate_bytes(rng, data) if rng.random() < 0.3 else data)
    if rng.random() < 0.05:
        put_in_place(rng, Path(name))
    argv = ["chat", name, "--name=new", f"--tokenizer={rng.choice(['data/base', 'data/base', 'data/toy'])}",
            f"--seq-len={rng.choice([16, 16, 16, 16, 48, 48, 48, 1, 2, 0, 10**9])}"]
    return (name, argv), called(prepare.main, *argv)


class Odd(io.RawIOBase):
    """A stdin with these bytes, and then its end, an error, or no end."""

    def __init__(self, data, after):
        self.data, self.after, self.taken = data, after, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        piece, self.data = self.data[:len(buffer)], self.data[len(buffer):]
        if not piece and isinstance(self.after, int):
            raise OSError(self.after, os.strerror(self.after))
        piece = piece or self.after[:1] * len(buffer)
        self.taken += len(piece)
        if self.taken > MOST_READ:
            raise Fault(f"{self.taken:,} bytes of stdin were read, without an end")
        buffer[:len(piece)] = piece
        return len(piece)


MOST_READ = 16 << 20  # bytes that a program may take from an endless stdin
TYPED = [b"3 + 4?", b"/reset", b"", b"   ", b"\0" * 30, b"\xff\xfe", b"\x1b[31m", b"\xe2\x80\xa8",
         b"\xed\xa0\x80", b"<|end|><|assistant|>", b"x" * 200, b"/reset me", b"\r", b"\x04",
         b"\xf0\x9f\x98"]


def stdin_case(world, rng):
    """Questions of odd bytes; then stdin ends, fails (it is closed, or a directory), or never ends a line."""
    lines = []
    for line in rng.sample(TYPED, rng.randint(0, 4)):
        new = mutate_bytes(rng, line) if rng.random() < 0.3 else line
        lines.append(new[:300])  # a longer question is right, and takes longer
    endless = [b"x", b"\xff", b" ", b"\0"]
    after = rng.choice([b"", b"", b"", errno.EIO, errno.EBADF, errno.EISDIR, *endless])
    data = rng.choice([b"\n", b"\n", b"\r\n", b"\r"]).join(lines) + rng.choice([b"", b"\n"])
    typed = io.TextIOWrapper(io.BufferedReader(Odd(data, after)), encoding="utf-8")
    flags = rng.sample(["--system=Be brief.", "--temperature=0", "--seed=5", "--system=\x1b", "--top-k=1"],
                       rng.randint(0, 2))
    chat = called(sample.main, "out/chat", "--chat", "--max-new-tokens=2", *flags)
    return (data, after), lambda: alone(chat, stdin=typed)


# Starts of a single rank, and where they run.
STARTS = [{name: str(int("SIZE" in name or "NRANKS" in name or "TASKS" in name)) for name in names}
          for names in launcher.LAUNCHERS.values()]
SITE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1",
        "PBS_JOBID": "7.host", "PBS_NODEFILE": "text.txt", "PBS_NODENUM": "0", "PMI_FD": "3",
        "OMPI_COMM_WORLD_NODE_RANK": "0", "PALS_DEPTH": "1"}
CANNOT_BE = ["", " ", "x", "-1", "0", "1", "2", "-0", "+1", " 1", "1.5", "0x1", "1e3", "1(x2)", "(x2)", "1,2",
             "nan", HUGE, "9" * 5000, "65536", "\u0663", "\udcff", "\x1b[31m", "../x", "-" + HUGE]
MPIS = [None, (0, 1), (0, 1), (1, 2)]  # no mpi4py, or MPI's rank and size


def launcher_case(world, rng):
    """The environment of a single rank, in which up to three variables have values that cannot be."""
    env = {**rng.choice(STARTS), **rng.choice([{}, SITE])}
    for name in rng.sample(sorted({*env, *rng.sample(sorted(SITE), 2)}), rng.randint(1, 3)):
        env[name] = rng.choice(CANNOT_BE)
        if rng.random() < 0.15:
            del env[name]
    place = rng.choice(MPIS)
    scontrol = rng.choice([None, "", "node1", "node1\nnode2"])  # what it says
    if scontrol is not None:
        Path("scontrol").write_text(f"#!/bin/sh\nprintf '{scontrol}'\n")
        Path("scontrol").chmod(0o755)
    env["PATH"] = "."
    run = called(train.main, *TRAIN, "--steps=1", "--out=out/new")
    chat = called(sample.main, "out/chat", "--chat", "--max-new-tokens=2")
    call = rng.choice([run, run, chat])

    def start():
        with mock.patch.dict(os.environ, env):
            for name in [name for name in os.environ if name not in env and name in SITE]:
                del os.environ[name]
            return alone(call, place)
    return (env, place, scontrol), start


class Waits(BaseException):
    """Here a start that can be waits for the other ranks, who never come."""


def alone(call, place=None, stdin=None):
    """What call() returns in a process that no launcher has started, with this stdin.

    place: rank and size that MPI gives; None: there is no mpi4py. No socket is opened and no MPI started.
    """
    def meet(*args, **kwargs):
        raise Waits

    def init():
        if place is None:
            raise ImportError("mpi4py")
        import mpi4py
        mpi4py.rc.initialize = False
        comm = types.SimpleNamespace(rank=place[0], size=place[1], bcast=lambda x: x)
        comm.allgather = lambda x: [x]
        comm.Split_type = lambda kind: comm
        return types.SimpleNamespace(COMM_WORLD=comm, Query_thread=lambda: 0, THREAD_MULTIPLE=3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch.mpi, "init", init))
        stack.enter_context(mock.patch.multiple(launch.dist, rendezvous=meet, TCPStore=meet))
        stack.enter_context(mock.patch.multiple(launch, _listen=meet, shutdown=lambda world: None))
        stack.enter_context(mock.patch.multiple(sys, excepthook=sys.excepthook, stdin=stdin or io.StringIO()))
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            return call()
        except Waits:
            return {"code": 0, "err": "", "out": ""}


FOREIGN = ["notes.txt", "photo.jpg", "sub/notes.txt", ".git/HEAD", "step_000001/notes.txt",
           "step_000002/notes.txt", "step_000009/notes.txt", "step_000001.tmp/notes.txt",
           "step_000002.0.tmp/notes.txt", "step_x/notes.txt", "backup.part/notes.txt", ".parts/notes.txt",
           "train_00007.bin", "train.bin", "meta.json.bak", "hang/notes.txt", "tokenizer.tmp/notes.txt",
           "model.gguf", "lost+found/notes.txt", "\x1b[31m.txt", "README", "run.lock"]


def foreign_case(world, rng):
    """A directory of data or of a run, or a new one, in which somebody keeps files; none of them is lost."""
    folder = Path(rng.choice(["data/toy", "data/new", "out/run", "out/run", "out/new", "out"]))
    for name in rng.sample(FOREIGN, rng.randint(1, 4)):
        path = folder / name
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{path} {MINE}")
    if rng.random() < 0.2:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / rng.choice(["pipe", "events.fifo"])).symlink_to(rng.choice(["..", "/nowhere", "pipe"]))
    text = ["text.txt", "--tokenizer=char", "--workers=1"]
    go_on = ["--steps=3", "--resume=auto", "--n-experts=2"]
    programs = [
        train_run(world, *go_on, "--keep=1"), train_run(world, *go_on, "--save-every=3"),
        train_run(world, "--steps=1"), train_run(world, "--steps=2", "--keep=1", "--out=out/new"),
        called(prepare.main, *text, "--name=toy"), called(prepare.main, *text, "--name=new"),
        called(sample.main, "out/run", "--max-new-tokens=2", "--prompt=a"),
        called(train.main, "--list", "out"),
        called(convert.main, "import", "model/llama", "--out", folder),
        called(convert.main, "export", "out/run", "--out", folder)]
    return sorted(map(str, folder.rglob("*"))), rng.choice(programs)


# -----------------------------------------------------------------------------
# A case, from its files to what is wrong

MINE = "of somebody else"
NEEDS = {  # kind: what is copied into its box; the programs may change the runs and the data sets among them
    "model": ["model"], "conversations": ["data/base", "data/toy", "qa.jsonl"], "stdin": ["out/chat"],
    "launcher": ["data/toy", "out/chat"], "foreign": ["data/toy", "out/run", "model/llama"]}
# A line names something: a flag, a file, a variable, a field or a thing that was given.
NAMES = re.compile(r"--\w|\w/\w|\w\.\w|[A-Z]{3}_|'|\w=|_\w|stdin|mpi4py")


class Fault(BaseException):
    """A case does what no program may, or takes too long. No program catches this exception."""


@contextlib.contextmanager
def bounded(seconds):
    """Raise Fault in the body once it has taken this long."""
    def late(*_):
        raise Fault(f"no end after {seconds} s")
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def snapshot(folder, but=()):
    """{path: hash} of every file under folder, except below the folders `but`."""
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() and not p.is_symlink() else ""
            for p in folder.rglob("*") if not any(p.is_relative_to(b) for b in but)}


def somebodys(folder):
    """The contents of all files in folder that somebody else has put there."""
    small = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size < 200]
    return {text for text in (p.read_bytes() for p in small) if text.endswith(MINE.encode())}


def fill(box, kind, good):
    """Write what a case finds in its box. Return the folders that the programs may change."""
    for folder in (".", "work", "work/data", "work/out"):
        for name in OUTSIDE:
            path = Path(box, folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{folder} {MINE}")
    needs = NEEDS.get(kind, ["data/toy", "out/run"])
    for name in [*needs, "text.txt"]:
        there = Path(box, "work", name)
        if (good / name).is_dir():
            shutil.copytree(good / name, there)
        else:
            shutil.copy(good / name, there)
    return [Path(box, "work", name) for name in needs if name.startswith(("data/", "out/"))]


def problem(kind, i, good):
    """Case i of a kind, in a box of its own -> what is wrong, or None."""
    rng = random.Random(f"{kind}/{i}")
    with tempfile.TemporaryDirectory() as box, contextlib.chdir(box):
        own = fill(box, kind, good)
        os.chdir("work")
        what, call = globals()[f"{kind}_case"](World(), rng)
        before, kept = snapshot(Path(box), own), somebodys(Path(box))
        what = f"{kind}/{i} ({what})"
        try:
            with bounded(SECONDS):
                result = call()
        except BaseException:  # a panic of a library in Rust is no Exception
            return f"{what}: {traceback.format_exc()}"
        wrong = wrong_end(result)
        if wrong:
            return f"{what}: {wrong}"
        after = snapshot(Path(box), own)
        new = {p for p in after.keys() - before.keys()  # a folder of its own, a run moved aside, its lock
               if not any(p.is_relative_to(Path(box, "work", f)) for f in ("data", "out"))}
        changed = new | {p for p in before if before[p] != after.get(p)}
        if kind == "foreign":  # a run that is moved aside takes along what lies in its folder
            changed = {p for p in changed if not p.is_relative_to(Path(box, "work", "out"))}
        if changed:
            return f"{what}: changed {sorted(map(str, changed))}"
        lost = kept - somebodys(Path(box))
        if lost and kind == "foreign":
            return f"{what}: lost {sorted(lost)}, and said {result}"


def wrong_end(result):
    """What is wrong with a program's exit code and what it printed, or None."""
    err = result["err"]
    if result["code"] not in (0, None, 2, False) or "Traceback" in err + result["out"]:
        return f"exit code {result['code']}: {err[-600:]}"
    said = [line for line in err.splitlines()
            if line.startswith("nanoshard: ") and not line.endswith("trying the one before it")]
    if result["code"] == 2 and (len(said) != 1 or err.splitlines()[-1] != said[0]):
        return f"exit code 2 without its line: {err[-600:]!r}"
    if result["code"] == 2 and not NAMES.search(re.sub(r"\[Errno \d+\] [^:]*", "", said[0])):
        return f"the line names nothing: {said[0]!r}"
    if "\x1b" in err:
        return f"an escape code is printed: {err[-600:]!r}"


def problems(world, cases, good):
    """The first case of this rank's share of (kind, number) that goes wrong, in a list, or []."""
    for kind, i in cases[world.rank::world.size]:
        found = problem(kind, i, good)
        if found:
            return [found]
    return []


# -----------------------------------------------------------------------------
# What the cases begin with

def make_good(world, folder):
    """In `folder`: text.txt, qa.jsonl, and what NEEDS lists.

    data/toy, and out/run: a run on it with experts and two checkpoints. data/base, data/qa: a small
    vocabulary, and conversations in it. out/chat: a run on them. model/: MODELS, which can be imported.
    """
    (folder / "data").mkdir()
    chars(folder / "data")
    shutil.move(folder / "data" / "text.txt", folder / "text.txt")
    sums = [(i, i % 7) for i in range(40)]
    (folder / "sums.txt").write_text("".join(f"{a} + {b}? It is {a + b}.\n" for a, b in sums * 20))
    with open(folder / "qa.jsonl", "w") as f:
        for a, b in sums:
            print(json.dumps({"messages": [{"role": "user", "content": f"{a} + {b}?"},
                                           {"role": "assistant", "content": f"It is {a + b}."}]}), file=f)

    def ends_well(call):
        result = call()
        assert result["code"] in (0, None), result
    with contextlib.chdir(folder):
        ends_well(train_run(world, "--steps=2", "--n-experts=2"))
        ends_well(called(prepare.main, "sums.txt", "--name=base", "--vocab-size=280", "--workers=1"))
        chat = ["chat", "qa.jsonl", "--name=qa", "--tokenizer=data/base", "--seq-len=16"]
        ends_well(called(prepare.main, *chat))
        for name, flags in {"chat": [], **MODELS}.items():
            argv = [*QUICK, "--data=data/qa", "--steps=1", f"--out=out/{name}", *flags]
            ends_well(lambda argv=argv: session(world, argv))
        for name in MODELS:
            shards = ["--shard-gb=1e-5"] if name == "glm" else []  # several files and their index
            ends_well(called(convert.main, "export", f"out/{name}", "--out", f"model/{name}", *shards))
            ends_well(called(convert.main, "import", f"model/{name}", "--out", f"out/again-{name}"))


# -----------------------------------------------------------------------------
# Many more: make fuzz

AT_ONCE = 64  # cases of a call


def draw_cases(first, count):
    """The next `count` of all kinds as (kind, number), in proportion to CASES; `first` is 0 in the suite."""
    total, rng = sum(CASES.values()), random.Random(first)
    kinds = [kind for kind, n in CASES.items() for _ in range(-(-n * count // total))]
    cases = [(kind, first + kinds[:at].count(kind)) for at, kind in enumerate(kinds)]
    rng.shuffle(cases)
    return cases[:count]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=20000, help="how many inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each kind")
    parser.add_argument("--case", default="", help="KIND/NUMBER: repeat this input alone")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    flags = parser.parse_args(argv)
    cases = draw_cases(flags.first, flags.count)
    if flags.case:
        kind, number = flags.case.split("/")
        cases = [(kind, int(number))]
    start, good = time.monotonic(), Path(tempfile.mkdtemp(prefix="nanoshard-fuzz-"))
    try:
        run_ranks(1, make_good, good)
        for at in range(0, len(cases), AT_ONCE):
            some = cases[at:at + AT_ONCE]
            found = [p for rank in run_ranks(flags.workers, problems, some, good) for p in rank]
            if found:
                name = found[0].split()[0]
                print(*found, f"python tests/fuzz.py --case {name}  repeats it", sep="\n")
                return 1
            seconds = time.monotonic() - start
            print(f"{at + len(some):,} of {len(cases):,} inputs, {seconds:.0f} s, no failure", flush=True)
    finally:
        shutil.rmtree(good)
    return 0


if __name__ == "__main__":
    import fuzz  # the ranks look for its functions in this module, not in __main__
    sys.exit(fuzz.main())

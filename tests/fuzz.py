"""Random wrong inputs, drawn from a seed, and what the programs must make of them.

Whatever is mutated, a program ends within a minute: with 0, or with 2 and one line on stderr that names
something. It never raises, prints no escape code, and loses no file of somebody else.

    make fuzz N=20000                     tries many more, and stops at the first failure
    python tests/fuzz.py --case model/17  repeats one
"""
import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
import zlib
from pathlib import Path

if __name__ == "__main__":  # pytest knows the root
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool import run_ranks
from runs import SHAPE, chars, session, text_file, text_of

import checkpoint
import convert
import plan
import prepare
import sample
from config import Config
from runtime.launch import World

# The kinds of input, and how many of each test_fuzz.py tries
CASES = {"flags": 132, "data": 56, "checkpoint": 56, "model": 84, "conversations": 56}
SECONDS = 60  # for one case, which takes a tenth of a second on an idle core
QUICK = [*(flag for flag in SHAPE if "vocab" not in flag and "n-layer" not in flag), "--n-layer=1",
         "--micro-batch=2", "--log-every=1", "--eval-every=0", "--save-every=1", "--no-plot", "--warmup=1"]
VALUES = ["nan", "inf", "-inf", "1e400", "-1", "0", "1.5", "", " ", "x", "None", "9" * 30, "..", "/dev/null",
          "a:0.5,b", "\x1b[31m", "\u00e9\u2028", "1,2", "--", "[]", "2"]
# These flags wait for input or take minutes, so they get values that none of them takes.
ASKED = ("pdb", "timeout", "compile", "profile", "trace", "wandb", "deterministic", "eval_every",
         "eval_iters", "steps", "max_minutes", "init_from")
NONSENSE = ["nan", "-inf", "-7", "x", "1,2", "\x1b[31m", "[]"]
JSON = [None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "../x", [], {}, [[]], {"x": 1},
        "\x1b[31mred", "\ud800"]
# A line names something: a flag, a file, a variable, a field or a thing that was given.
NAMES = re.compile(r"--\w|\w/\w|\w\.\w|[A-Z]{3}_|'|\w=|_\w|, row \d|stdin|mpi4py")


# -----------------------------------------------------------------------------
# Mutations

def mutate_json(rng, value):
    """Return value with one random place of its tree replaced or removed."""
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
    """Return data with a few bytes replaced, inserted, cut off or appended."""
    data = bytearray(data)
    at = rng.randrange(max(1, len(data)))
    piece = rng.choice([b"", b"\0" * 40, b"\xff\xfe", b"\n[]\n", b"{}\n", b'{"step": 1', b"[" * 100_000])
    end = rng.choice([at, at + 1, at + 50, len(data)])
    data[at:end] = piece
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


def seal(folder):
    """Give the index of a checkpoint the checksum that it claims, so that its contents are looked at."""
    with contextlib.suppress(ValueError, OSError, AttributeError, TypeError, RecursionError):
        index = json.loads((folder / "index.json").read_text())
        index.pop("crc32", None)
        body = json.dumps(index, sort_keys=True)
        (folder / "index.json").write_text(f'{{"crc32": {zlib.crc32(body.encode())}, {body[1:]}')


# -----------------------------------------------------------------------------
# Cases: each changes files of the working directory, and returns what it did and the call of a program

def train_run(world, *flags):
    return lambda: session(world, [*QUICK, "--data=data/toy", "--out=out/run", *flags])


def called(main, *argv):
    """Return a call of another program's main() -> what session() returns."""
    def call():
        out = text_file()
        err = text_file()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([str(word) for word in argv])
            except SystemExit as e:
                code = e.code
        if code == 1 and argv[0] == "diff":  # it found differences
            code = 0
        return {"code": code, "err": text_of(err), "out": text_of(out)}
    return call


def flags_case(world, rng):
    names = [f.name for f in dataclasses.fields(Config) if f.name not in ("preset", "out", "dump_grads")]
    trained = []
    for name in rng.sample(names, rng.randint(1, 3)):
        trained.append(f"--{name}={rng.choice(NONSENSE if name in ASKED else VALUES)}")
    main, argv, names = rng.choice([
        (prepare.main, ["text.txt", "--name=new", "--tokenizer=char", "--workers=1"],
         ["vocab-size", "name", "seed"]),
        (sample.main, ["out/run", "--max-new-tokens=2"], ["prompt", "temperature", "top-k", "seed"]),
        (plan.main, ["dense-210m"], ["gpus", "gpu", "n-layer", "tp", "micro-batch", "scaling"])])
    argv = [*argv, f"--{rng.choice(names)}={rng.choice(VALUES)}"]
    if rng.random() < 0.3:
        return argv, called(main, *argv)
    return trained, train_run(world, "--steps=2", *trained)


def data_case(world, rng):
    path = rng.choice(sorted(p for p in Path("data/toy").iterdir() if p.is_file()))
    mutate_file(rng, path)
    return path, rng.choice([
        train_run(world, "--steps=1", "--out=out/new"),
        called(prepare.main, "stdlib", "--verify", "--name=toy"),
        called(prepare.main, "text.txt", "--name=toy", "--tokenizer=char", "--workers=1")])


def checkpoint_case(world, rng):
    """A file of a checkpoint, or one beside it."""
    step = Path("out/run/step_000002")
    files = sorted(path for path in Path("out/run").iterdir() if path.is_file())
    path = rng.choice([step / "index.json", *sorted(step.glob("*")), *files])
    mutate_file(rng, path)
    if rng.random() < 0.7:
        seal(step)
    return path, rng.choice([
        train_run(world, "--steps=3", "--resume=auto"), train_run(world, "--steps=3", f"--resume={step}"),
        called(checkpoint.main, "show", step), called(checkpoint.main, "diff", step, "out/run/step_000001"),
        called(sample.main, "out/run", "--max-new-tokens=2", "--prompt=a")])


def model_case(world, rng):
    """A directory of Hugging Face."""
    path = rng.choice(["model/config.json", *sorted(Path("model").iterdir())])
    mutate_file(rng, Path(path))
    return path, rng.choice([called(convert.main, "import", "model", "--out", "out/new"),
                             called(sample.main, "model", "--max-new-tokens=2", "--prompt=a")])


def conversations_case(world, rng):
    """A file of conversations of which a line is wrong, or the whole file."""
    lines = Path("qa.jsonl").read_bytes().splitlines()
    lines[0] = json.dumps(mutate_json(rng, json.loads(lines[0]))).encode()
    data = b"\n".join(lines)
    name = "mutated" + rng.choice([".jsonl", ".jsonl", ".jsonl.gz", ".json", ""])
    Path(name).write_bytes(mutate_bytes(rng, data) if rng.random() < 0.3 else data)
    argv = ["chat", name, "--name=new", "--tokenizer=data/base", "--workers=1",
            f"--seq-len={rng.choice([16, 48, 1, 0])}"]
    return argv, called(prepare.main, *argv)


# -----------------------------------------------------------------------------
# A case, from its files to what is wrong

class Fault(BaseException):
    """A case takes too long. No program catches this exception."""


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


def problem(kind, i, good):
    """Return what is wrong with case i of a kind, which runs on a copy of the folder `good`, or None."""
    rng = random.Random(f"{kind}/{i}")
    with tempfile.TemporaryDirectory() as box, contextlib.chdir(box):
        shutil.copytree(good, "work")
        os.chdir("work")
        what, call = globals()[f"{kind}_case"](World(), rng)
        for folder in ("data/toy", "out/run"):
            Path(folder, "notes.txt").write_text(folder)
        try:
            with bounded(SECONDS):
                wrong = wrong_end(call())
        except BaseException:  # a panic of a library in Rust is no Exception
            wrong = traceback.format_exc()
        kept = {path.read_text() for path in Path(box).rglob("notes.txt")}  # a run may be moved aside
        if kept != {"data/toy", "out/run"}:
            wrong = f"of the notes are left: {kept}"
        return f"{kind}/{i} ({what}): {wrong}" if wrong else None


def wrong_end(result):
    """Return what is wrong with a program's exit code and what it printed, or None."""
    err = result["err"]
    if result["code"] not in (0, None, 2, False) or "Traceback" in err + result["out"]:
        return f"exit code {result['code']}: {err[-600:]}"
    if "\x1b" in err:
        return f"an escape code is printed: {err[-600:]!r}"
    if result["code"] != 2:
        return None
    said = [line for line in err.splitlines()
            if line.startswith("nanoshard: ") and not line.endswith("trying the one before it")]
    if len(said) != 1 or err.splitlines()[-1] != said[0]:
        return f"exit code 2 without its line: {err[-600:]!r}"
    if not NAMES.search(re.sub(r"\[Errno \d+\] [^:]*", "", said[0])):
        return f"the line names nothing: {said[0]!r}"
    return None


def problems(world, cases, good):
    """Return the first case of this rank's share of (kind, number) that goes wrong, in a list, or []."""
    for kind, i in cases[world.rank::world.size]:
        if found := problem(kind, i, good):
            return [found]
    return []


def make_good(world, folder):
    """Fill `folder`: text.txt, qa.jsonl, the data toy and base, a run with two checkpoints, a model of it."""
    (folder / "data").mkdir(parents=True)
    chars(folder / "data")
    shutil.move(folder / "data/text.txt", folder / "text.txt")
    messages = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "It is 7."}]
    (folder / "qa.jsonl").write_text(40 * f"{json.dumps({'messages': messages})}\n")
    (folder / "sums.txt").write_text("".join(f"{i} + {i}? It is {2 * i}.\n" for i in range(800)))
    with contextlib.chdir(folder):
        for call in (train_run(world, "--steps=2", "--n-experts=2"),
                     called(prepare.main, "sums.txt", "--name=base", "--vocab-size=280", "--workers=1"),
                     train_run(world, "--data=data/base", "--steps=1", "--out=out/base"),
                     called(convert.main, "export", "out/base", "--out", "model")):
            result = call()
            assert result["code"] in (0, None), result


# -----------------------------------------------------------------------------
# Many more: make fuzz

AT_ONCE = 64  # cases of a call


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=20000, help="how many inputs")
    parser.add_argument("--case", default="", help="KIND/NUMBER: repeat this input alone")
    flags = parser.parse_args()
    cases = [(kind, i) for i in range(flags.count // len(CASES)) for kind in CASES]
    if flags.case:
        kind, number = flags.case.split("/")
        cases = [(kind, int(number))]
    with tempfile.TemporaryDirectory(prefix="nanoshard-fuzz-") as folder:
        good = Path(folder, "good")
        run_ranks(1, make_good, good)
        for at in range(0, len(cases), AT_ONCE):
            some = cases[at:at + AT_ONCE]
            found = [text for rank in run_ranks(2, problems, some, good) for text in rank]
            if found:
                print(*found, f"python tests/fuzz.py --case {found[0].split()[0]}  repeats it", sep="\n")
                return 1
            print(f"{at + len(some):,} of {len(cases):,} inputs, no failure", flush=True)
    return 0


if __name__ == "__main__":
    import fuzz  # the ranks look for its functions in this module, not in __main__
    sys.exit(fuzz.main())

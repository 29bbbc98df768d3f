"""300 random wrong inputs, drawn from a seed: command lines, data sets, checkpoints and files of a run.

Whatever is mutated, a program ends with 0 or, after a line on stderr, with 2. It never raises, and changes no
file outside the folder that it was given. A failure names its case: problem(World(), KIND, NUMBER, good).
"""
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import shutil
import tempfile
import traceback
import zlib
from pathlib import Path

import pytest
from pool import run_ranks
from runs import SHAPE, chars, session

import checkpoint
import plan
import prepare
import sample
from config import Config

CASES, AT_ONCE = {"flags": 132, "data": 56, "checkpoint": 56, "files": 56}, 28  # kind: how many; per test
SMALL = [f for f in SHAPE if "vocab" not in f and "n-layer" not in f]
TRAIN = [*SMALL, "--n-layer=1", "--micro-batch=2", "--log-every=1", "--eval-every=0", "--save-every=1",
         "--no-plot", "--warmup=1", "--data=data/toy", "--out=out/run"]
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


def seal(folder):
    """Give the index of a checkpoint the checksum that it claims, so that its contents are looked at."""
    with contextlib.suppress(ValueError, OSError, AttributeError, TypeError, RecursionError):
        index = json.loads((folder / "index.json").read_text())
        index.pop("crc32", None)
        body = json.dumps(index, sort_keys=True)
        (folder / "index.json").write_text(f'{{"crc32": {zlib.crc32(body.encode())}, {body[1:]}')


# -----------------------------------------------------------------------------
# Cases: each changes the working directory, which holds data/toy and out/run, and returns a program's call

def train(world, *flags):
    return lambda: session(world, [*TRAIN, *flags])


def called(main, *argv):
    """A call of another program's main() -> what session() returns."""
    def call():
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(list(argv))
            except SystemExit as e:
                code = e.code
        code = 0 if code == 1 and argv[0] == "diff" else code  # 1: it found differences
        return {"code": code, "err": err.getvalue(), "out": out.getvalue()}
    return call


def flags_case(world, rng):
    names = [f.name for f in dataclasses.fields(Config) if f.name not in ("preset", "out", "dump_grads")]
    pick = rng.random()
    if pick < 0.7:
        flags = []
        for name in rng.sample(names, rng.randint(1, 3)):
            flags.append(f"--{name}={rng.choice(NONSENSE if name in ASKED else VALUES)}")
        return flags, train(world, "--steps=2", *flags)
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
    programs = [train(world, "--steps=1", "--out=out/new"),
                called(prepare.main, "stdlib", "--verify", "--name=toy"),
                called(prepare.main, "text.txt", "--name=toy", "--tokenizer=char", "--workers=1")]
    return path, rng.choice(programs)


def checkpoint_case(world, rng):
    step = Path("out/run/step_000002")
    path = rng.choice([step / "index.json", *sorted(step.glob("*"))])
    mutate_file(rng, path)
    if rng.random() < 0.7:
        seal(step)
    programs = [train(world, "--steps=3", "--resume=auto"), train(world, "--steps=3", f"--resume={step}"),
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
    programs = [train(world, "--steps=3", "--resume=auto"), train(world, "--steps=1"),
                called(sample.main, "out/run", "--max-new-tokens=2", "--prompt=a")]
    return path, rng.choice(programs)


# -----------------------------------------------------------------------------

def snapshot(folder, but=()):
    """{path: hash} of every file under folder, except below the folders `but`."""
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for p in folder.rglob("*")
            if not any(p.is_relative_to(b) for b in but)}


def problem(world, kind, i, good):
    """Case i of a kind, in a box of its own -> what is wrong, or None."""
    rng = random.Random(f"{kind}/{i}")
    with tempfile.TemporaryDirectory() as box, contextlib.chdir(box):
        for folder in (".", "work", "work/data", "work/out"):
            for name in OUTSIDE:
                path = Path(box, folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{folder} of somebody else")
        for name in ("data/toy", "out/run"):
            shutil.copytree(good / name, Path(box, "work", name))
        shutil.copy(good / "text.txt", Path(box, "work"))
        os.chdir("work")
        what, call = globals()[f"{kind}_case"](world, rng)
        own = [Path(box, "work", name) for name in ("data/toy", "out/run")]
        before = snapshot(Path(box), own)
        try:
            result = call()
        except BaseException:  # a panic of a library in Rust is no Exception
            return f"{kind} {i} ({what}): {traceback.format_exc()}"
        last = (result["err"].splitlines() or [""])[-1]
        if result["code"] not in (0, None, 2, False) or "Traceback" in result["err"] + result["out"]:
            return f"{kind} {i} ({what}): exit code {result['code']}: {result['err'][-600:]}"
        if result["code"] == 2 and not last.startswith("nanoshard: "):
            return f"{kind} {i} ({what}): exit code 2 without its line: {result['err'][-600:]!r}"
        if "\x1b" in result["err"]:
            return f"{kind} {i} ({what}): an escape code is printed: {last!r}"
        after = snapshot(Path(box), own)
        new = {p for p in after.keys() - before.keys()  # a folder of its own, a run moved aside, its lock
               if not any(p.is_relative_to(Path(box, "work", f)) for f in ("data", "out"))}
        changed = new | {p for p in before if before[p] != after.get(p)}
        if changed:
            return f"{kind} {i} ({what}): changed {sorted(map(str, changed))}"


def problems(world, kind, first, count, good):
    return [p for i in range(first, first + count) if (p := problem(world, kind, i, good))]


def make_good(world, folder):
    """In `folder`: text.txt, data/toy, and out/run, a run on them with experts and two checkpoints."""
    (folder / "data").mkdir()
    chars(folder / "data")
    shutil.move(folder / "data" / "text.txt", folder / "text.txt")
    with contextlib.chdir(folder):
        argv = [*TRAIN, "--steps=2", "--n-experts=2"]
        result = session(world, argv)
    assert result["code"] == 0, result


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    run_ranks(1, make_good, folder)
    return folder


@pytest.mark.parametrize("kind,first", [(kind, i) for kind, n in CASES.items() for i in range(0, n, AT_ONCE)])
def test_wrong_input_ends_with_0_or_2(kind, first, good):
    found = run_ranks(1, problems, kind, first, min(AT_ONCE, CASES[kind] - first), good)[0]
    assert not found, "\n".join(found)


def test_the_fuzzer_sees_an_exception_a_foreign_file_and_a_code(good, monkeypatch):
    """Its own check, on programs that do wrong."""
    def raises():
        raise KeyError("x")

    def writes():
        Path("../train_00000.bin").unlink()
        return {"code": 0, "err": "", "out": ""}
    for call, seen in ((raises, "KeyError"), (writes, "changed"),
                       (lambda: {"code": 1, "err": "", "out": ""}, "exit code 1"),
                       (lambda: {"code": 2, "err": "what?", "out": ""}, "without its line")):
        monkeypatch.setitem(globals(), "own_case", lambda world, rng, call=call: ("", call))
        assert seen in problem(None, "own", 0, good)

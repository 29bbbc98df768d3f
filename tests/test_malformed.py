"""Damaged and foreign files, chosen and random, given to every program that reads them.

A program ends within a minute: with 0, or with 2 and one line on stderr that names something. It never
raises, prints no escape code, and loses no file of somebody else.
"""
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import zlib
from pathlib import Path

import pytest
from runs import SHAPE, TINY, assert_refused, chars, refused, session, text_file, text_of

import checkpoint
import convert
import plan
import prepare
import sample
from config import Config
from runtime.launch import World

GONE = object()
BASE = [f for f in TINY if "vocab" not in f]
META, TRAIN, VAL, SHARD = "meta.json", "train_00000.bin", "val_00000.bin", "rank_00000.safetensors"
STEP = "run/step_000002"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """toy/: token files; run/: a run on them with the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("good")
    chars(folder)
    argv = [*BASE, f"--data={folder / 'toy'}", f"--out={folder / 'run'}", "--steps=2", "--save-every=1"]
    result = session(World(), argv)
    assert result["code"] == 0, result
    return folder


@pytest.fixture
def copy(good, tmp_path, monkeypatch):
    for name in ("toy", "run"):
        shutil.copytree(good / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    """{path: content} of every file and directory, except the lock."""
    files = (p for p in sorted(folder.rglob("*")) if p.name != ".lock")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "directory" for p in files}


def called(main, *argv):
    """Return {code, err, out} of a program's main()."""
    out, err = text_file(), text_file()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in argv])
        except SystemExit as e:
            code = e.code
    if code == 1 and argv[0] == "diff":  # it found differences
        code = 0
    return {"code": code, "err": text_of(err), "out": text_of(out)}


# -----------------------------------------------------------------------------
# Damages that are chosen

def change_json(path, **changes):
    """Change keys of a json file; GONE removes a key."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **changes}.items() if v is not GONE}))


def change_shard(meta, split, **changes):
    """Change keys of the first shard of a split in meta.json."""
    shards = json.loads(meta.read_text())["shards"]
    shards[split][0] |= changes
    change_json(meta, shards=shards)


def overwrite(path, at, value, form="<I"):
    """Write a number, in struct's format, over the bytes at position `at`."""
    raw = bytearray(path.read_bytes())
    raw[at:at + struct.calcsize(form)] = struct.pack(form, value)
    path.write_bytes(raw)


DATA = {  # name: (what is done to the data's directory d, a word of the line)
    "meta.json a list": (lambda d: (d / META).write_text("[]"), META),
    "meta.json of version 9": (lambda d: change_json(d / META, version=9), META),
    "vocab_size below the ids": (lambda d: change_json(d / META, vocab_size=2), "vocab_size is 2"),
    "no shards": (lambda d: change_json(d / META, shards=GONE), "shards"),
    "dtype wider": (lambda d: change_json(d / META, dtype="uint32"), TRAIN),
    "train is val": (lambda d: change_shard(d / META, "val", sha256=json.loads(
        (d / META).read_text())["shards"]["train"][0]["sha256"]), "train and val"),
    "val missing": (lambda d: (d / VAL).unlink(), VAL),
    "val cut in the header": (lambda d: os.truncate(d / VAL, 100), VAL),
    "train longer": (lambda d: (d / TRAIN).write_bytes((d / TRAIN).read_bytes() + b"\0\0"), TRAIN),
    "header's tokens": (lambda d: overwrite(d / TRAIN, 16, 1 << 60, "<Q"), TRAIN),
    "a file, not a directory": (lambda d: (shutil.rmtree(d), d.write_text("x")), "toy"),
    "an empty directory": (lambda d: (shutil.rmtree(d), d.mkdir()), "prepare.py"),
}


@pytest.mark.parametrize("name", DATA)
def test_damaged_data_is_refused(name, copy):
    damage, word = DATA[name]
    damage(copy / "toy")
    before = tree(copy)
    result = session(World(), [*BASE, "--data=toy", "--out=run", "--resume=auto", "--steps=3"])
    assert_refused(result, word)
    assert result["steps"] == [] and tree(copy) == before


CHECKPOINT = {  # name: what is done to the checkpoint step_000002, which --resume PATH names
    "missing": lambda d: shutil.rmtree(d),
    "an empty directory": lambda d: (shutil.rmtree(d), d.mkdir()),
    "index cut": lambda d: os.truncate(d / "index.json", 1000),
    "a shard missing": lambda d: (d / SHARD).unlink(),
    "a shard cut": lambda d: os.truncate(d / SHARD, 999),
    "a shard's bit": lambda d: overwrite(d / SHARD, 3000, 0x7FFFFFFF),
    "a shard of step 1": lambda d: shutil.copy(d.parent / "step_000001/rank_00000.safetensors", d),
}


@pytest.mark.parametrize("name", CHECKPOINT)
def test_damaged_checkpoint_is_refused(name, copy):
    CHECKPOINT[name](copy / STEP)
    before = tree(copy)
    argv = [*BASE, "--data=toy", "--out=run", "--steps=3"]
    result = session(World(), [*argv, f"--resume={STEP}"])
    assert_refused(result, "step_000002")
    assert result["steps"] == []
    refused(checkpoint.main, ["show", STEP], "step_000002")
    argv += ["--n-experts=2", f"--init-from={STEP}", "--out=new"]
    assert_refused(session(World(), argv), "step_000002")
    shutil.rmtree(copy / "new", ignore_errors=True)
    assert tree(copy) == before


OTHER = {  # name: (program, its arguments, what is done to the copy d before, a word of the line)
    "sample: another width": (sample, "run", {"n_embd": 64}, "wte.weight"),
    "sample: no experts there": (sample, "run", {"n_experts": 4}, "moe"),
    "sample: a smaller vocabulary": (sample, "run", {"vocab_size_used": 3}, "the model 3 rows"),
    "sample: no vocabulary": (sample, "run", {"vocab_size_used": GONE}, "lacks vocab_size_used"),
    "sample: config cut": (sample, "run", "run/config.json", "config.json"),
    "sample: tokenizer cut": (sample, "run", "run/tokenizer.json", "token"),
    "sample: index cut": (sample, STEP, f"{STEP}/index.json", "json"),
    "sample: shard cut": (sample, STEP, f"{STEP}/{SHARD}", "crc32"),
    "prepare: no such file": (prepare, "none.txt --name=new --out=.", None, "none.txt"),
    "prepare: not utf-8": (prepare, "x.txt --name=new --out=.", b"a\xff" * 99, "utf-8"),
    "prepare: empty": (prepare, "x.txt --name=new --out=.", b"", "none may be 0"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_programs_refuse_wrong_input(name, copy):
    program, argv, damage, word = OTHER[name]
    if isinstance(damage, dict):
        change_json(copy / "run/config.json", **damage)
    elif isinstance(damage, str):
        os.truncate(copy / damage, 9)
    elif damage is not None:
        (copy / "x.txt").write_bytes(damage)
    before = tree(copy)
    refused(program.main, argv.split(), word)
    assert tree(copy) == before


@pytest.mark.parametrize("files", [
    ["train_00000.bin", "meta.json"], ["tiny/metrics.jsonl"], ["model.safetensors", "config.json"], ["a.md"],
    ["x.py"], [".git"]], ids=str)
def test_a_folder_that_was_no_run_is_not_taken_for_one(files, tmp_path):
    """A run would rename it."""
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    flags = [*TINY, "--steps=1", f"--out={tmp_path / 'out'}"]
    assert_refused(session(World(), flags), f"is no run, and holds {Path(files[0]).name}")
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in files)
    (tmp_path / "out/metrics.jsonl").write_text("")  # With it, it was a run, which gets another name.
    went = session(World(), [*flags, "--resume=auto"])
    aside, = tmp_path.glob("out.*")
    assert went["code"] == 0 and f"held another run: it is now {aside}" in " ".join(went["out"].split())
    assert all((aside / name).read_text() == "mine" for name in files)


@pytest.mark.parametrize("most", [100, 3000])
@pytest.mark.parametrize("program", [prepare, convert])
def test_a_full_disk_is_one_line_that_names_path_and_fix(most, program, copy):
    """A limit on the size of files stands in for the disk, as a full quota does."""
    argv = ["text.txt", "--name=new", "--vocab-size=300", "--out=.", "--workers=1"]
    (copy / "text.txt").write_text("".join(f"Line {i * i} of a text.\n\n" for i in range(2000)))
    if program is convert:
        argv = ["export", "run", "--out=new"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        line = refused(program.main, argv, "new cannot be written", "File too large; free space there")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line and called(program.main, *argv)["code"] in (0, None)


# -----------------------------------------------------------------------------
# Random damages: each case changes files of the working directory, and returns (what it did, a call)

KINDS = ("flags", "data", "checkpoint", "model", "conversations")
FEW = 28  # cases of each kind that make test tries; make long twice as many more
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
PIECES = [b"", b"\0" * 40, b"\xff\xfe", b"\n[]\n", b"{}\n", b'{"step": 1', b"[" * 100_000]
# A line names something: a flag, a file, a variable, a field or a thing that was given.
NAMES = re.compile(r"--\w|\w/\w|\.\w|[A-Z]{3}_|'|\w=|_\w|, row \d|stdin|mpi4py")


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
    at = rng.randrange(max(1, len(data)))
    return data[:at] + rng.choice(PIECES) + data[rng.choice([at, at + 1, at + 50, len(data)]):]


def mutate_file(rng, path):
    """Change, remove or replace one file."""
    how = rng.random()
    if how < 0.12:
        path.unlink()
        if how < 0.04:
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


def train_run(*flags):
    return lambda: session(World(), [*QUICK, "--data=data/toy", "--out=out/run", *flags])


def call(program, *argv):
    return lambda: called(program.main, *argv)


def flags_case(rng):
    program, argv, names = rng.choice([
        (prepare, ["text.txt", "--name=new", "--tokenizer=char", "--workers=1"], ["vocab-size", "name"]),
        (sample, ["out/run", "--max-new-tokens=2"], ["prompt", "temperature", "top-k", "seed"]),
        (plan, ["dense-210m"], ["gpus", "gpu", "n-layer", "tp", "micro-batch", "scaling"])])
    if rng.random() < 0.3:
        argv = [*argv, f"--{rng.choice(names)}={rng.choice(VALUES)}"]
        return argv, call(program, *argv)
    names = [f.name for f in dataclasses.fields(Config) if f.name not in ("preset", "out", "dump_grads")]
    argv = [f"--{name}={rng.choice(NONSENSE if name in ASKED else VALUES)}"
            for name in rng.sample(names, rng.randint(1, 3))]
    return argv, train_run("--steps=2", *argv)


def data_case(rng):
    path = rng.choice(sorted(p for p in Path("data/toy").iterdir() if p.is_file()))
    mutate_file(rng, path)
    return path, rng.choice([train_run("--steps=1", "--out=out/new"),
                             call(prepare, "stdlib", "--verify", "--name=toy"),
                             call(prepare, "text.txt", "--name=toy", "--tokenizer=char", "--workers=1")])


def checkpoint_case(rng):
    """A file of a checkpoint, or one beside it."""
    step = Path("out/run/step_000002")
    files = sorted(path for path in Path("out/run").iterdir() if path.is_file())
    path = rng.choice([step / "index.json", *sorted(step.glob("*")), *files])
    mutate_file(rng, path)
    if rng.random() < 0.7:
        seal(step)
    return path, rng.choice([
        train_run("--steps=3", "--resume=auto"), train_run("--steps=3", f"--resume={step}"),
        call(checkpoint, "show", step), call(checkpoint, "diff", step, "out/run/step_000001"),
        call(sample, "out/run", "--max-new-tokens=2", "--prompt=a")])


def model_case(rng):
    """A directory of Hugging Face."""
    path = rng.choice([Path("model/config.json"), *sorted(Path("model").iterdir())])
    mutate_file(rng, path)
    return path, rng.choice([call(convert, "import", "model", "--out", "out/new"),
                             call(sample, "model", "--max-new-tokens=2", "--prompt=a")])


def conversations_case(rng):
    """A file of conversations of which a line is wrong, or the whole file."""
    lines = Path("qa.jsonl").read_bytes().splitlines()
    lines[0] = json.dumps(mutate_json(rng, json.loads(lines[0]))).encode()
    path = Path("mutated" + rng.choice([".jsonl", ".jsonl", ".jsonl.gz", ".json", ""]))
    data = b"\n".join(lines)
    path.write_bytes(mutate_bytes(rng, data) if rng.random() < 0.3 else data)
    argv = ["chat", path, "--name=new", "--tokenizer=data/base", "--workers=1",
            f"--seq-len={rng.choice([16, 48, 1, 0])}"]
    return argv, call(prepare, *argv)


class Fault(BaseException):
    """A case takes too long. No program catches this exception."""


def late(*_):
    raise Fault(f"no end after {SECONDS} s")


def problem(kind, i, good):
    """Return what is wrong with case i of a kind, which runs on a copy of the folder `good`, or None."""
    rng = random.Random(f"{kind}/{i}")
    with tempfile.TemporaryDirectory() as box, contextlib.chdir(box):
        shutil.copytree(good, "work")
        os.chdir("work")
        what, run = globals()[f"{kind}_case"](rng)
        for folder in ("data/toy", "out/run"):
            Path(folder, "notes.txt").write_text(folder)
        try:
            signal.signal(signal.SIGALRM, late)
            signal.alarm(SECONDS)
            wrong = wrong_end(run())
        except BaseException:  # a panic of a library in Rust is no Exception
            wrong = traceback.format_exc()
        signal.alarm(0)
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


def make_good(folder):
    """Fill `folder`: text.txt, qa.jsonl, the data toy and base, a run with two checkpoints, a model of it."""
    (folder / "data").mkdir(parents=True)
    chars(folder / "data")
    shutil.move(folder / "data/text.txt", folder / "text.txt")
    messages = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "It is 7."}]
    (folder / "qa.jsonl").write_text(40 * f"{json.dumps({'messages': messages})}\n")
    (folder / "sums.txt").write_text("".join(f"{i} + {i}? It is {2 * i}.\n" for i in range(800)))
    with contextlib.chdir(folder):
        for run in (train_run("--steps=2", "--n-experts=2"),
                    call(prepare, "sums.txt", "--name=base", "--vocab-size=280", "--workers=1"),
                    train_run("--data=data/base", "--steps=1", "--out=out/base"),
                    call(convert, "export", "out/base", "--out", "model")):
            result = run()
            assert result["code"] in (0, None), result
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("fuzz") / "good")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0])
def test_random_wrong_input_ends_with_0_or_2(kind, first, sound):
    found = [problem(kind, i, sound) for i in range(first, first + max(FEW, 2 * first))]
    assert not any(found), "\n".join(filter(None, found))


def test_the_fuzzer_sees_what_no_program_may_do(sound, monkeypatch):
    """Its own check, on programs that do wrong."""
    def raises():
        raise KeyError("x")

    def loses():
        Path("out/run/notes.txt").unlink()
        return {"out": "", "err": "", "code": 0}

    def hangs():
        while True:
            pass

    def ends(code, err=""):
        return lambda: {"out": "", "err": err, "code": code}
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 1)
    two = "nanoshard: a/b is wrong\n"
    for run, seen in ((raises, "KeyError"), (loses, "of the notes are left"), (hangs, "no end after 1 s"),
                      (ends(1), "exit code 1"), (ends(2, two * 2), "without its line"),
                      (ends(2, "nanoshard: [Errno 5] A/b"), "names nothing"),
                      (ends(0, "\x1b[31m"), "an escape code"), (ends(2, two), None)):
        monkeypatch.setitem(globals(), "own_case", lambda rng, run=run: ("", run))
        found = problem("own", 0, sound)
        assert seen in found if seen else found is None, found

"""Damaged and foreign files, given to every program that reads them: one line, exit code 2, no file changed.

Wrong flags and layouts: test_cli.py; a damaged checkpoint with a sound one before it: test_checkpoint.py.
"""
import contextlib
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from pool import ROOT
from runs import TINY, chars, session

import checkpoint
import prepare
import sample
from runtime import launch
from runtime.launch import World

GONE = object()
BASE = [f for f in TINY if "vocab" not in f]


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
def copy(good, tmp_path):
    for name in ("toy", "run"):
        shutil.copytree(good / name, tmp_path / name)
    (tmp_path / "toy" / ".verified.json").unlink(missing_ok=True)
    return tmp_path


def tree(folder):
    """{path: content} of every file and directory, except the record of which shards were verified."""
    files = (p for p in sorted(folder.rglob("*")) if p.name != ".verified.json")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "directory" for p in files}


def program(main, argv):
    """A script's main() -> {code, err}."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as e:
            code = e.code
    return {"code": code, "err": err.getvalue()}


def refused(result, *words):
    lines = result["err"].splitlines()
    assert result["code"] == 2 and len(lines) == 1 and lines[0].startswith("nanoshard: "), result
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


def put(path, **changes):
    """Change keys of a json file; GONE takes a key away."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **changes}.items() if v is not GONE}))


def shard(meta, split, **changes):
    shards = json.loads(meta.read_text())["shards"]
    shards[split][0] = {k: v for k, v in {**shards[split][0], **changes}.items() if v is not GONE}
    put(meta, shards=shards)


def header(path, at, value, form="<I"):
    raw = bytearray(path.read_bytes())
    raw[at:at + struct.calcsize(form)] = struct.pack(form, value)
    path.write_bytes(raw)


def as_directory(path):
    path.unlink()
    path.mkdir()


META, TRAIN, VAL, SHARD = "meta.json", "train_00000.bin", "val_00000.bin", "rank_00000.safetensors"
DATA = {  # what was done to the data's directory d; the line must name it
    "meta.json empty": (lambda d: (d / META).write_text(""), META),
    "meta.json cut": (lambda d: os.truncate(d / META, 50), META),
    "meta.json a list": (lambda d: (d / META).write_text("[]"), META),
    "meta.json a number": (lambda d: (d / META).write_text("7"), META),
    "meta.json null": (lambda d: (d / META).write_text("null"), META),
    "meta.json binary": (lambda d: (d / META).write_bytes(bytes(range(256))), META),
    "meta.json a directory": (lambda d: as_directory(d / META), META),
    "meta.json of version 9": (lambda d: put(d / META, version=9), META),
    "no vocab_size": (lambda d: put(d / META, vocab_size=GONE), "vocab_size"),
    "vocab_size a word": (lambda d: put(d / META, vocab_size="many"), META),
    "vocab_size negative": (lambda d: put(d / META, vocab_size=-3), META),
    "no shards": (lambda d: put(d / META, shards=GONE), "shards"),
    "shards a word": (lambda d: put(d / META, shards="all"), META),
    "no val split": (lambda d: put(d / META, shards={"train": []}), META),
    "no shard in train": (lambda d: put(d / META, shards={"train": [], "val": []}), META),
    "a shard without file": (lambda d: shard(d / META, "train", file=GONE), META),
    "a shard without tokens": (lambda d: shard(d / META, "train", tokens=GONE), META),
    "a shard without sha256": (lambda d: shard(d / META, "val", sha256=GONE), META),
    "tokens a word": (lambda d: shard(d / META, "train", tokens="x"), META),
    "tokens one too many": (lambda d: shard(d / META, "train", tokens=1), TRAIN),
    "dtype unknown": (lambda d: put(d / META, dtype="int7"), META),
    "dtype wider": (lambda d: put(d / META, dtype="uint32"), TRAIN),
    "another sha256": (lambda d: shard(d / META, "train", sha256="0" * 64), TRAIN),
    "train is val": (lambda d: shard(d / META, "val", sha256=json.loads(
        (d / META).read_text())["shards"]["train"][0]["sha256"]), "train and val"),
    "train missing": (lambda d: (d / TRAIN).unlink(), TRAIN),
    "val missing": (lambda d: (d / VAL).unlink(), VAL),
    "train empty": (lambda d: (d / TRAIN).write_bytes(b""), TRAIN),
    "val cut in the header": (lambda d: os.truncate(d / VAL, 100), VAL),
    "train cut": (lambda d: os.truncate(d / TRAIN, 5000), TRAIN),
    "train longer": (lambda d: open(d / TRAIN, "ab").write(b"\0\0") and None, TRAIN),
    "train is another file": (lambda d: shutil.copy(d / VAL, d / TRAIN), TRAIN),
    "train a directory": (lambda d: as_directory(d / TRAIN), TRAIN),
    "train a text": (lambda d: (d / TRAIN).write_text("hello " * 2000), TRAIN),
    "magic": (lambda d: header(d / TRAIN, 0, 1), TRAIN),
    "header's version": (lambda d: header(d / TRAIN, 8, 2), TRAIN),
    "header's dtype": (lambda d: header(d / TRAIN, 12, 8), TRAIN),
    "header's tokens": (lambda d: header(d / TRAIN, 16, 1 << 60, "<Q"), TRAIN),
    "one token": (lambda d: header(d / VAL, 4100, 77), VAL),
    "tokenizer missing": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "tokenizer changed": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "a file, not a directory": (lambda d: (shutil.rmtree(d), d.write_text("x")), "toy"),
    "an empty directory": (lambda d: (shutil.rmtree(d), d.mkdir()), "prepare.py"),
}


@pytest.mark.parametrize("name", DATA)
def test_damaged_data_is_refused(name, copy):
    damage, word = DATA[name]
    damage(copy / "toy")
    before = tree(copy)
    argv = [*BASE, f"--data={copy / 'toy'}", f"--out={copy / 'run'}", "--resume=auto", "--steps=3"]
    result = session(World(), argv)
    refused(result, word)
    assert result["steps"] == [] and tree(copy) == before


def sealed(path, **changes):
    """Change index.json and write the right checksum: it is not damaged, but written by another program."""
    import zlib
    index = json.loads((path / "index.json").read_text())
    del index["crc32"]
    index = {k: v for k, v in {**index, **changes}.items() if v is not GONE}
    body = json.dumps(index, sort_keys=True)
    (path / "index.json").write_text(json.dumps({"crc32": zlib.crc32(body.encode()), **index}))


def no_tensor(d):
    tensors = json.loads((d / "index.json").read_text())["tensors"]
    del tensors["wte.weight"]
    sealed(d, tensors=tensors)


CHECKPOINT = {  # what was done to the one checkpoint step_000002, given as --resume PATH
    "missing": lambda d: shutil.rmtree(d),
    "a file": lambda d: (shutil.rmtree(d), d.write_text("x")),
    "an empty directory": lambda d: (shutil.rmtree(d), d.mkdir()),
    "index empty": lambda d: (d / "index.json").write_text(""),
    "index cut": lambda d: os.truncate(d / "index.json", 1000),
    "index a number": lambda d: (d / "index.json").write_text("3"),
    "index a word": lambda d: (d / "index.json").write_text('"x"'),
    "index binary": lambda d: (d / "index.json").write_bytes(bytes(range(256))),
    "index a directory": lambda d: as_directory(d / "index.json"),
    "format 9": lambda d: sealed(d, format=9),
    "no format": lambda d: sealed(d, format=GONE),
    "no files": lambda d: sealed(d, files=GONE),
    "no tensors": lambda d: sealed(d, tensors=GONE),
    "no meta": lambda d: sealed(d, meta=GONE),
    "meta of a dump": lambda d: sealed(d, meta={}),
    "one tensor less": no_tensor,
    "a shard missing": lambda d: (d / SHARD).unlink(),
    "a shard empty": lambda d: (d / SHARD).write_bytes(b""),
    "a shard cut": lambda d: os.truncate(d / "rank_00000.safetensors", 999),
    "a shard's bit": lambda d: header(d / SHARD, 3000, 0x7FFFFFFF),
    "a shard of step 1": lambda d: shutil.copy(d.parent / "step_000001/rank_00000.safetensors", d),
    "a shard a directory": lambda d: as_directory(d / SHARD),
}


@pytest.mark.parametrize("name", CHECKPOINT)
def test_damaged_checkpoint_is_refused(name, copy):
    path = copy / "run" / "step_000002"
    CHECKPOINT[name](path)
    before = tree(copy)
    argv = [*BASE, f"--data={copy / 'toy'}", f"--out={copy / 'run'}", "--steps=3"]
    result = session(World(), [*argv, f"--resume={path}"])
    refused(result, "step_000002")
    assert result["steps"] == []
    if name not in ("one tensor less", "meta of a dump"):  # these are sound, but do not fit this model
        refused(program(checkpoint.main, ["show", str(path)]), "step_000002")
        one = str(path.with_name("step_000001"))
        refused(program(checkpoint.main, ["diff", one, str(path)]), "step_000002")
    refused(session(World(), [*argv, "--n-experts=2", f"--init-from={path}", f"--out={copy / 'new'}"]),
            "step_000002")
    shutil.rmtree(copy / "new", ignore_errors=True)
    assert tree(copy) == before


def at(d, *flags, cut=None, text=None):
    """-> arguments that name the run, after one of its files was cut short or replaced."""
    if cut:
        os.truncate(d / cut, 9)
    if text:
        (d / text).write_text("[1]")
    return [str(d / "run"), *flags]


def text(d, *flags, content=b"some text"):
    """-> arguments of prepare.py for a file with this content, as data set `new`."""
    (d / "x.txt").write_bytes(content)
    return [str(d / "x.txt"), *flags, "--name", "new", "--out", str(d)]


STEP = "run/step_000002"
OTHER = {  # program, its arguments in the directory d, a word of the line
    "sample: nothing there": (sample.main, lambda d: [str(d / "none")], "none"),
    "sample: no run": (sample.main, lambda d: [str(d / "toy")], "config.json"),
    "sample: config cut": (sample.main, lambda d: at(d, cut="run/config.json"), "config.json"),
    "sample: foreign config": (sample.main, lambda d: at(d, text="run/config.json"), "config.json"),
    "sample: tokenizer cut": (sample.main, lambda d: at(d, cut="run/tokenizer.json"), "token"),
    "sample: unknown character": (sample.main, lambda d: at(d, "--prompt", "%"), "'%'"),
    "sample: index cut": (sample.main, lambda d: at(d, cut=f"{STEP}/index.json") and [str(d / STEP)], "json"),
    "sample: shard cut": (sample.main, lambda d: at(d, cut=f"{STEP}/{SHARD}") and [str(d / STEP)], "9 bytes"),
    "prepare: no such file": (prepare.main, lambda d: [str(d / "none.txt"), *text(d)[1:]], "none.txt"),
    "prepare: not utf-8": (prepare.main, lambda d: text(d, content=b"a\xff" * 99), "utf-8"),
    "prepare: empty": (prepare.main, lambda d: text(d, content=b""), "new"),
    "prepare: unknown tokenizer": (prepare.main, lambda d: text(d, "--tokenizer", "morse"), "morse"),
    "prepare: a vocabulary of 3": (prepare.main, lambda d: text(d, "--vocab-size", "3"), "vocab"),
    "prepare: a fraction of 2": (prepare.main, lambda d: text(d, "--val-fraction", "2"), "val-fraction"),
    "prepare: no worker": (prepare.main, lambda d: text(d, "--workers", "0"), "workers"),
    "prepare: unknown flag": (prepare.main, lambda d: text(d, "--what"), "--what"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_programs_refuse_wrong_input(name, copy):
    main, argv, word = OTHER[name]
    argv = argv(copy)
    before = tree(copy)
    refused(program(main, argv), word)
    shutil.rmtree(copy / "new", ignore_errors=True)  # prepare.py leaves parts there for its next start
    assert tree(copy) == before


NODES = {  # PBS's node file, made at this path
    "missing": lambda p: None,
    "a directory": lambda p: p.mkdir(),
    "empty": lambda p: p.touch(),
    "blank lines": lambda p: p.write_text("\n  \n\t\n"),
    "not utf-8": lambda p: p.write_bytes(b"x1\nx\xff2\n"),
    "binary": lambda p: p.write_bytes(bytes(range(256))),
    "sentences": lambda p: p.write_text("x1\nno such job\n"),
    "carriage returns": lambda p: p.write_bytes(b"x1\r\nx2\r\n"),
}
SITE = "module() { :; }; conda() { :; }; mpiexec() { echo started \"$@\"; }\n"


def pbs(script, folder):
    """Run a job script with substitutes for the site's commands -> {code, out, err}."""
    (folder / "site.sh").write_text(SITE)
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").touch()
    env = {"PATH": os.environ["PATH"], "BASH_ENV": str(folder / "site.sh"), "VENV": str(folder / "venv"),
           "PBS_O_WORKDIR": str(ROOT), "PBS_NODEFILE": str(folder / "nodes")}
    job = subprocess.run(["bash", ROOT / "scripts" / script], capture_output=True, text=True, cwd=folder,
                         env=env)
    return {"code": job.returncode, "out": job.stdout, "err": job.stderr}


@pytest.mark.parametrize("script", ["generic.pbs", "polaris.pbs", "aurora.pbs"])
@pytest.mark.parametrize("name", NODES)
def test_job_scripts_refuse_a_damaged_node_file(name, script, tmp_path):
    NODES[name](tmp_path / "nodes")
    result = pbs(script, tmp_path)
    refused(result, "node file", str(tmp_path / "nodes"))
    assert result["out"] == "", "no rank was started"


def test_blank_lines_in_a_node_file_are_ignored(tmp_path):
    (tmp_path / "nodes").write_text("x1\nx1 \n\nx2\nx2\n \n")
    result = pbs("generic.pbs", tmp_path)
    assert result["err"] == "" and result["out"].startswith("started -n 4 -ppn 2 -hostfile "), result
    assert launch.count_hosts(tmp_path / "nodes") == 2


@pytest.mark.parametrize("name", NODES)
def test_doctor_says_what_is_wrong_with_a_node_file(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import doctor
    NODES[name](tmp_path / "nodes")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PBS_JOBID", "7.x")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    status, text, fix = doctor.batch()
    assert status == "FAIL" and str(tmp_path / "nodes") in text and "\n" not in text and "qsub" in fix


def test_at_least_sixty_kinds_of_damage():
    assert len(DATA) + len(CHECKPOINT) + len(OTHER) + len(NODES) >= 60


def test_out_that_is_a_file_is_refused(copy):
    (copy / "file").write_text("mine")
    result = session(World(), [*BASE, f"--data={copy / 'toy'}", f"--out={copy / 'file'}", "--steps=1"])
    refused(result, "file")
    assert Path(copy / "file").read_text() == "mine"

"""Damaged and foreign files, given to every program that reads them: code 2 and one line, nothing changed."""
import hashlib
import json
import os
import resource
import shutil
import struct
from pathlib import Path

import pytest
from runs import TINY, assert_refused, chars, refused, session

import checkpoint
import convert
import prepare
import sample
from runtime.launch import World

GONE = object()
BASE = [f for f in TINY if "vocab" not in f]
META, TRAIN, VAL, SHARD = "meta.json", "train_00000.bin", "val_00000.bin", "rank_00000.safetensors"
STEP = "run/step_000002"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
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
    files = (p for p in sorted(folder.rglob("*")) if p.name != ".lock")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "directory" for p in files}


def change_json(path, **changes):
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **changes}.items() if v is not GONE}))


def overwrite(path, at, value, form="<I"):
    """Write a number, in struct's format, over the bytes at position `at`."""
    raw = bytearray(path.read_bytes())
    raw[at:at + struct.calcsize(form)] = struct.pack(form, value)
    path.write_bytes(raw)


DATA = {  # name: (what is done to the data's directory d, a word of the line)
    "meta.json a list": (lambda d: (d / META).write_text("[]"), META),
    "meta.json of version 9": (lambda d: change_json(d / META, version=9), META),
    "no end-of-document": (lambda d: change_json(d / META, eod=GONE), "eod"),
    "another end-of-document": (lambda d: change_json(d / META, eod=10**6), "eod is 1000000, of"),
    "dtype wider": (lambda d: change_json(d / META, dtype="uint32"), TRAIN),
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


CHECKPOINT = {  # name: what is done to the checkpoint step_000002. test_checkpoint.py has the other damages
    "missing": lambda d: shutil.rmtree(d),
    "a shard's bit": lambda d: overwrite(d / SHARD, 3000, 0x7FFFFFFF),
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


SAMPLED = {  # what is read: (argument of sample.py, changes of config.json or a file that is cut, a word)
    "fewer layers": ("run", {"n_layer": 1}, "trained with --n-layer 2"),
    "no experts there": ("run", {"n_experts": 4}, "--n-experts 0"),
    "a smaller vocabulary": ("run", {"vocab_size_used": 3}, "the model 3 rows"),
    "no vocabulary": ("run", {"vocab_size_used": GONE}, "lacks vocab_size_used"),
    "other angles": ("run", {"rope_base": 5.0}, "--rope-base 10000.0 (this run: 5.0)"),
    "a switch for a number": ("run", {"n_layer": True}, "n_layer is True"),
    "config cut": ("run", "run/config.json", "config.json"),
    "tokenizer cut": ("run", "run/tokenizer.json", "token"),
    "index cut": (STEP, f"{STEP}/index.json", "json"),
    "shard cut": (STEP, f"{STEP}/{SHARD}", "crc32"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sample_py_refuses_a_damaged_run(name, copy):
    run, damage, word = SAMPLED[name]
    if isinstance(damage, dict):
        change_json(copy / "run/config.json", **damage)
    else:
        os.truncate(copy / damage, 9)
    before = tree(copy)
    refused(sample.main, [run], word)
    assert tree(copy) == before


@pytest.mark.parametrize("files", [
    ["train_00000.bin", "meta.json"], ["tiny/metrics.jsonl"], ["model.safetensors", "config.json"]], ids=str)
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
def test_a_full_disk_is_one_line(most, program, copy):
    """A limit on the size of files stands in for the disk, as a full quota does."""
    argv = ["text.txt", "--name=new", "--vocab-size=300", "--out=.", "--workers=1"]
    (copy / "text.txt").write_text("".join(f"Line {i * i} of a text.\n\n" for i in range(2000)))
    if program is convert:
        argv = ["export", "run", "--out=new"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        line = refused(program.main, argv, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line and program.main(argv) in (0, None)

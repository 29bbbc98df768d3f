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
from runs import TINY, assert_refused, chars, session

import checkpoint
import prepare
import sample
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
    return tmp_path


def tree(folder):
    """{path: content} of every file and directory, except the lock."""
    files = (p for p in sorted(folder.rglob("*")) if p.name != ".lock")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "directory" for p in files}


def run_program(main, argv):
    """A program's main() -> {code, err}."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as e:
            code = e.code
    return {"code": code, "err": err.getvalue()}


def change_json(path, **changes):
    """Change keys of a json file; GONE removes a key."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **changes}.items() if v is not GONE}))


def change_shard(meta, split, **changes):
    """Change keys of the first shard of a split in meta.json; GONE removes a key."""
    shards = json.loads(meta.read_text())["shards"]
    shards[split][0] = {k: v for k, v in {**shards[split][0], **changes}.items() if v is not GONE}
    change_json(meta, shards=shards)


def overwrite(path, at, value, form="<I"):
    """Write a number, in struct's format, over the bytes at position `at`."""
    raw = bytearray(path.read_bytes())
    raw[at:at + struct.calcsize(form)] = struct.pack(form, value)
    path.write_bytes(raw)


def as_directory(path):
    path.unlink()
    path.mkdir()


META, TRAIN, VAL, SHARD = "meta.json", "train_00000.bin", "val_00000.bin", "rank_00000.safetensors"
DATA = {  # name: (what is done to the data's directory d, a word of the line)
    "meta.json empty": (lambda d: (d / META).write_text(""), META),
    "meta.json cut": (lambda d: os.truncate(d / META, 50), META),
    "meta.json a list": (lambda d: (d / META).write_text("[]"), META),
    "meta.json a number": (lambda d: (d / META).write_text("7"), META),
    "meta.json null": (lambda d: (d / META).write_text("null"), META),
    "meta.json binary": (lambda d: (d / META).write_bytes(bytes(range(256))), META),
    "meta.json a directory": (lambda d: as_directory(d / META), META),
    "meta.json of version 9": (lambda d: change_json(d / META, version=9), META),
    "no vocab_size": (lambda d: change_json(d / META, vocab_size=GONE), "vocab_size"),
    "vocab_size a word": (lambda d: change_json(d / META, vocab_size="many"), META),
    "no shards": (lambda d: change_json(d / META, shards=GONE), "shards"),
    "shards a word": (lambda d: change_json(d / META, shards="all"), META),
    "tokens one too many": (lambda d: change_shard(d / META, "train", tokens=1), TRAIN),
    "dtype wider": (lambda d: change_json(d / META, dtype="uint32"), TRAIN),
    "train is val": (lambda d: change_shard(d / META, "val", sha256=json.loads(
        (d / META).read_text())["shards"]["train"][0]["sha256"]), "train and val"),
    "vocab_size a fraction": (lambda d: change_json(d / META, vocab_size=1.5), "vocab_size is 1.5"),
    "vocab_size below the ids": (lambda d: change_json(d / META, vocab_size=2), "vocab_size is 2"),
    "ids above vocab_size": (lambda d: change_shard(d / META, "train", max_id=999), "has the token id 999"),
    "train missing": (lambda d: (d / TRAIN).unlink(), TRAIN),
    "val missing": (lambda d: (d / VAL).unlink(), VAL),
    "train empty": (lambda d: (d / TRAIN).write_bytes(b""), TRAIN),
    "val cut in the header": (lambda d: os.truncate(d / VAL, 100), VAL),
    "train cut": (lambda d: os.truncate(d / TRAIN, 5000), TRAIN),
    "train longer": (lambda d: open(d / TRAIN, "ab").write(b"\0\0") and None, TRAIN),
    "train is another file": (lambda d: shutil.copy(d / VAL, d / TRAIN), TRAIN),
    "train a directory": (lambda d: as_directory(d / TRAIN), TRAIN),
    "train a text": (lambda d: (d / TRAIN).write_text("hello " * 2000), TRAIN),
    "magic": (lambda d: overwrite(d / TRAIN, 0, 1), TRAIN),
    "header's version": (lambda d: overwrite(d / TRAIN, 8, 2), TRAIN),
    "header's dtype": (lambda d: overwrite(d / TRAIN, 12, 8), TRAIN),
    "header's tokens": (lambda d: overwrite(d / TRAIN, 16, 1 << 60, "<Q"), TRAIN),
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
    assert_refused(result, word)
    assert result["steps"] == [] and tree(copy) == before


CHECKPOINT = {  # name: what is done to the checkpoint step_000002, which --resume PATH names
    "missing": lambda d: shutil.rmtree(d),
    "a file": lambda d: (shutil.rmtree(d), d.write_text("x")),
    "an empty directory": lambda d: (shutil.rmtree(d), d.mkdir()),
    "index cut": lambda d: os.truncate(d / "index.json", 1000),
    "index a number": lambda d: (d / "index.json").write_text("3"),
    "index binary": lambda d: (d / "index.json").write_bytes(bytes(range(256))),
    "a shard missing": lambda d: (d / SHARD).unlink(),
    "a shard cut": lambda d: os.truncate(d / "rank_00000.safetensors", 999),
    "a shard's bit": lambda d: overwrite(d / SHARD, 3000, 0x7FFFFFFF),
    "a shard of step 1": lambda d: shutil.copy(d.parent / "step_000001/rank_00000.safetensors", d),
}


@pytest.mark.parametrize("name", CHECKPOINT)
def test_damaged_checkpoint_is_refused(name, copy):
    path = copy / "run" / "step_000002"
    CHECKPOINT[name](path)
    before = tree(copy)
    argv = [*BASE, f"--data={copy / 'toy'}", f"--out={copy / 'run'}", "--steps=3"]
    result = session(World(), [*argv, f"--resume={path}"])
    assert_refused(result, "step_000002")
    assert result["steps"] == []
    assert_refused(run_program(checkpoint.main, ["show", str(path)]), "step_000002")
    argv += ["--n-experts=2", f"--init-from={path}", f"--out={copy / 'new'}"]
    assert_refused(session(World(), argv), "step_000002")
    shutil.rmtree(copy / "new", ignore_errors=True)
    assert tree(copy) == before


def run_args(d, *flags, cut=None, replace=None):
    """Cut or replace one file -> sample.py's arguments that name the run."""
    if cut:
        os.truncate(d / cut, 9)
    if replace:
        (d / replace).write_text("[1]")
    return [str(d / "run"), *flags]


def text_args(d, *flags, content=b"some text"):
    """Write a file -> prepare.py's arguments that make the data set `new` of it."""
    (d / "x.txt").write_bytes(content)
    return [str(d / "x.txt"), *flags, "--name", "new", "--out", str(d)]


CONFIG = [  # (a change of the run's config.json, a word of sample.py's line)
    ({"n_embd": 64}, "wte.weight"), ({"n_embd": "x"}, "n_embd is 'x'"), ({"norm": "batch"}, "rms, layer"),
    ({"n_experts": 4}, "moe"), ({"pos": "learned"}, "wpe"), ({"vocab_size_used": 3}, "the model 3 rows"),
    ({"vocab_size_used": GONE}, "lacks vocab_size_used"), ({"dropout": float("nan")}, "nan")]


@pytest.mark.parametrize("change,word", CONFIG, ids=lambda v: str(v)[:30])
def test_sample_refuses_a_config_that_is_not_the_checkpoints(change, word, copy):
    change_json(copy / "run/config.json", **change)
    assert_refused(run_program(sample.main, [str(copy / "run")]), word)


def test_sample_reads_a_run_whose_flags_no_longer_matter(copy):
    change_json(copy / "run/config.json", min_lr=9.0, resume="auto", init_from="x", dump_grads=".", x=0,
                resume_changed="x")
    result = run_program(sample.main, [str(copy / STEP), "--max-new-tokens=2"])
    assert result == {"code": None, "err": ""}


STEP = "run/step_000002"
OTHER = {  # name: (program, its arguments in the directory d, a word of the line)
    "sample: no directory": (sample.main, lambda d: [str(d / "none")], "none"),
    "sample: no run": (sample.main, lambda d: [str(d / "toy")], "config.json"),
    "sample: config cut": (sample.main, lambda d: run_args(d, cut="run/config.json"), "config.json"),
    "sample: foreign config": (sample.main, lambda d: run_args(d, replace="run/config.json"), "config.json"),
    "sample: tokenizer cut": (sample.main, lambda d: run_args(d, cut="run/tokenizer.json"), "token"),
    "sample: no prompt": (sample.main, lambda d: run_args(d, "--prompt", ""), "end-of-document"),
    "sample: unknown character": (sample.main, lambda d: run_args(d, "--prompt", "%"), "'%'"),
    "sample: index cut": (
        sample.main, lambda d: run_args(d, cut=f"{STEP}/index.json") and [str(d / STEP)], "json"),
    "sample: shard cut": (
        sample.main, lambda d: run_args(d, cut=f"{STEP}/{SHARD}") and [str(d / STEP)], "crc32"),
    "prepare: no such file": (prepare.main, lambda d: [str(d / "none.txt"), *text_args(d)[1:]], "none.txt"),
    "prepare: not utf-8": (prepare.main, lambda d: text_args(d, content=b"a\xff" * 99), "utf-8"),
    "prepare: empty": (prepare.main, lambda d: text_args(d, content=b""), "none may be 0"),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_programs_refuse_wrong_input(name, copy):
    main, make_argv, word = OTHER[name]
    argv = make_argv(copy)
    before = tree(copy)
    assert_refused(run_program(main, argv), word)
    assert tree(copy) == before


NODES = {  # name: how PBS's node file is made at the path p
    "missing": lambda p: None,
    "blank lines": lambda p: p.write_text("\n  \n\t\n"),
    "not utf-8": lambda p: p.write_bytes(b"x1\nx\xff2\n"),
    "carriage returns": lambda p: p.write_bytes(b"x1\r\nx2\r\n"),
}
SITE = "module() { :; }; conda() { :; }\n"


def run_job_script(script, folder):
    """Run a job script with stand-ins for the site's commands -> {code, out, err}."""
    (folder / "site.sh").write_text(SITE)
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").touch()
    mpiexec = folder / "venv/bin/mpiexec"
    mpiexec.write_text('#!/bin/bash\necho started "$@"\n')
    mpiexec.chmod(0o755)
    path = f"{mpiexec.parent}:{os.environ['PATH']}"
    env = {"PATH": path, "BASH_ENV": str(folder / "site.sh"), "VENV": str(folder / "venv"),
           "PBS_O_WORKDIR": str(ROOT), "PBS_NODEFILE": str(folder / "nodes"), "MINUTES": "27"}
    job = subprocess.run(["bash", ROOT / "scripts" / script], capture_output=True, text=True, cwd=folder,
                         env=env)
    return {"code": job.returncode, "out": job.stdout, "err": job.stderr}


@pytest.mark.parametrize("script", ["generic.pbs", "polaris.pbs"])
@pytest.mark.parametrize("name", NODES)
def test_job_scripts_refuse_a_damaged_node_file(name, script, tmp_path):
    NODES[name](tmp_path / "nodes")
    result = run_job_script(script, tmp_path)
    assert_refused(result, "node file", str(tmp_path / "nodes"))
    assert result["out"] == "", "a rank was started"


def test_blank_lines_in_a_node_file_are_ignored(tmp_path):
    (tmp_path / "nodes").write_text("x1\nx1 \n\nx2\nx2\n \n")
    result = run_job_script("generic.pbs", tmp_path)
    assert result["err"] == "" and result["out"].startswith("started -n 4 -ppn 2 -hostfile "), result


def test_out_that_is_a_file_is_refused(copy):
    (copy / "file").write_text("not a run")
    result = session(World(), [*BASE, f"--data={copy / 'toy'}", f"--out={copy / 'file'}", "--steps=1"])
    assert_refused(result, "file")
    assert Path(copy / "file").read_text() == "not a run"

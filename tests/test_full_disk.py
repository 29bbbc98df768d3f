"""A real disk that is full, and files that are cut, removed or unpack for ever.

test_borders.py fills disks by a limit on the size of files, for machines where nothing can be mounted.
"""
import contextlib
import json
import os
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest
from runs import TINY, assert_refused, go, session
from test_borders import documents, refused_line
from test_data import make_text

import checkpoint
import convert
import plot
import prepare
from corpus import shards
from corpus import text as readers
from runtime.launch import World

# -----------------------------------------------------------------------------
# A disk of one megabyte

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with text.txt, qa.jsonl, data/toy, run, and theirs: the run exported in two files."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text(make_text(9000, 1))
    talks = [[{"role": "user", "content": i // 50 * "a"}, {"role": "assistant", "content": i % 50 * "b"}]
             for i in range(1, 1000)]
    (folder / "qa.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    with contextlib.redirect_stdout(None):
        prepare.main([f"{folder}/text.txt", "--name=toy", f"--out={folder}/data", "--vocab-size=300",
                      "--workers=1", "--val-fraction=0.3"])
        go(1, folder / "run", f"--data={folder}/data/toy", "--vocab-size=0", "--steps=2", "--save-every=1")
        convert.main(["export", f"{folder}/run", f"--out={folder}/theirs", "--shard-gb=5e-5"])
    return folder


@pytest.fixture
def disk(tmp_path):
    """Return the folder of a file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no file system can be mounted here: {getattr(e, 'stderr', '') or e}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk, room):
    """Fill the disk, all but `room` bytes."""
    (disk / "filler").unlink(missing_ok=True)
    status = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - room))


def left(disk):
    """Return the names of all files and folders on the disk, the filler aside."""
    return {path.relative_to(disk).as_posix() for path in disk.rglob("*")} - {"filler"}


PROGRAMS = {  # name: (program, argv, free bytes); ~ is the folder of made(), ^ the disk
    "prepare": (prepare, "~/text.txt --name=x --vocab-size=300 --val-fraction=0.3 --workers=1 --out=^", 8192),
    "chat": (prepare, "chat ~/qa.jsonl --name=x --tokenizer=~/data/toy --seq-len=64 --out=^", 16384),
    "import": (convert, "import ~/theirs --out=^/x", 16384),
    "export": (convert, "export ~/run --out=^/x", 16384),
    "gguf": (convert, "gguf ~/run --out=^/x", 16384),
    "png": (plot, "~/run --png=^/x", 4096),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_full_disk_is_one_line_and_nothing_half_stays_unnamed(name, made, disk, capsys):
    program, words, room = PROGRAMS[name]
    needs = {"gguf": "gguf", "png": "matplotlib"}.get(name)
    if needs:
        pytest.importorskip(needs, reason=f"{needs} is not installed: pip install {needs}")
    argv = [word.replace("~", str(made)).replace("^", str(disk)) for word in words.split()]
    fill(disk, room)
    err = refused_line(capsys, program.main, *argv)
    assert err.startswith(f"nanoshard: {disk}/x cannot be written: "), err
    assert "No space left on device" in err and "; free space there, or give another --" in err, err
    if program is prepare:
        assert err.endswith(f"; the same command goes on from {disk}/x/.parts\n"), err
        assert not [name for name in left(disk) if name.endswith(f".{os.getpid()}")], left(disk)
    else:
        assert left(disk) == set()
    (disk / "filler").unlink()
    assert not program.main(argv)


def test_a_full_disk_under_a_run(made, disk):
    argv = ["--vocab-size=0", f"--data={made}/data/toy", "--steps=2", "--save-every=1"]
    fill(disk, 0)
    result = go(1, disk / "run", *argv, code=2)
    assert_refused(result, f"{disk}/run cannot be written: ", "; free space there, or give another --out")
    fill(disk, 24576)
    result = go(1, disk / "run", *argv, code=1)
    lines = [line for line in result["err"].splitlines() if "was not saved" in line]
    assert len(lines) == 2 and all("No space left on device" in line for line in lines), result["err"]
    assert not [name for name in left(disk) if "step_" in name], left(disk)

    grads = f"--dump-grads={disk}/grads"
    result = go(1, disk.parent / "run", *argv, grads, code=2)
    words = f"{disk}/grads cannot be written: ", "; free space there, or give another --dump-grads"
    assert_refused(result, *words)
    assert not [name for name in left(disk) if "grads" in name]


# -----------------------------------------------------------------------------
# Files that are cut or removed while they are read

def test_a_shard_that_is_cut_while_it_is_verified_is_named(made, tmp_path, monkeypatch):
    """No file is mapped into memory: the process would end by SIGBUS."""
    shutil.copytree(made / "data/toy", tmp_path / "toy")
    path = tmp_path / "toy/train_00000.bin"
    monkeypatch.setattr(np, "memmap", None)

    seen = []  # the header is read first, then the whole file

    def cut_second(opened, mode):
        if opened == path and path in seen:
            os.truncate(path, 5001)
        seen.append(opened)
        return open(opened, mode)
    monkeypatch.setattr(shards, "open", cut_second, raising=False)
    with pytest.raises(ValueError, match=f"^{path} has sha256 "):
        shards.verify(tmp_path / "toy", cache=False)


@pytest.mark.parametrize("program", ["diff", "init-from"])
def test_a_checkpoint_that_is_pruned_is_replaced_by_the_newest_of_that_time(program, made, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    read_index = checkpoint.read_index

    def prune_first(path, *args, **kwargs):
        if (run / "step_000002").exists():
            (run / "step_000002").rename(run / "step_000003")
            shutil.rmtree(run / "step_000001")
        return read_index(path, *args, **kwargs)
    with mock.patch.object(checkpoint, "read_index", prune_first):
        if program == "diff":
            assert checkpoint.main(["diff", str(made / "run/step_000002"), str(run)]) == 0
        else:
            result = session(World(), [*TINY, f"--data={made}/data/toy", "--vocab-size=0", "--steps=1",
                                       f"--out={tmp_path}/new", f"--init-from={run}"])
            assert result["code"] == 0, result["err"]
            assert f"starts from the weights of {run}/step_000003" in result["out"]
    assert capsys.readouterr().err == ""
    (run / "step_000003/index.json").write_text("{}")  # what is damaged stays damaged
    assert "step_000003" in refused_line(capsys, checkpoint.main, "diff", run, run)


# -----------------------------------------------------------------------------
# .parquet files that unpack to more than they may

def test_a_parquet_of_many_row_groups_has_the_room_of_one(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(readers, "MOST_UNPACKED", 1 << 20)
    monkeypatch.setattr(readers, "UNPACKED_TIMES", 2)
    path = tmp_path / "x.parquet"
    table = pa.table({"number": list(range(500)), "text": ["a" * 20_000] * 500})
    parquet.write_table(table, path, compression="zstd", row_group_size=10)
    found, reports = documents(path)
    assert 40 < len(found) <= 52 and len(reports) == 50, (len(found), len(reports))


def test_a_text_that_is_stored_once_and_read_many_times_is_read_in_small_parts(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(readers, "MOST_AT_ONCE", 1 << 20)
    text = np.random.default_rng(1).integers(97, 123, 1 << 17, np.uint8).tobytes().decode()
    parquet.write_table(pa.table({"text": [text] * 64}), tmp_path / "x.parquet", compression="none")
    with readers.open_parquet(tmp_path / "x.parquet") as f:
        rows = readers.rows_at_once(f, [0], "text")
        assert rows * len(text) <= 1 << 20 and rows > 1
    assert documents(tmp_path / "x.parquet") == ([text] * 64, [])

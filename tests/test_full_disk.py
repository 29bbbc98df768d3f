"""A real disk that is full, and files that are cut, removed or unpack for ever.

test_malformed.py fills disks by a limit on the size of files, for machines where nothing can be mounted.
"""
import contextlib
import json
import os
import subprocess

import pytest
from runs import assert_refused, go, refused
from test_data import make_text

import convert
import plot
import prepare

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
def test_a_full_disk_is_one_line_and_nothing_half_stays_unnamed(name, made, disk):
    program, words, room = PROGRAMS[name]
    needs = {"gguf": "gguf", "png": "matplotlib"}.get(name)
    if needs:
        pytest.importorskip(needs, reason=f"{needs} is not installed: pip install {needs}")
    argv = [word.replace("~", str(made)).replace("^", str(disk)) for word in words.split()]
    fill(disk, room)
    err = refused(program.main, argv)
    assert err.startswith(f"nanoshard: {disk}/x cannot be written: "), err
    assert "No space left on device" in err and "; free space there, or give another --" in err, err
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

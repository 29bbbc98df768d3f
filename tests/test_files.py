"""The directory of a run, and whose files are in it: one run at a time, nothing foreign is lost.

test_resume.py has what a run does with its own files; test_checkpoint.py and test_malformed.py fill disks.
"""
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pool import run_ranks
from runs import TINY, assert_refused, go, rows, session
from safetensors.torch import load_file

from interface import files, report
from ops import checksum
from runtime.launch import World

# -----------------------------------------------------------------------------
# One run per --out

def session_in_use(world, argv, wait=0.0, leaves=False):
    """runs.session while another open file of this process holds the lock of --out, as another run would.

    leaves: that run ends as soon as the session waits for it.
    """
    out = next(a for a in argv if a.startswith("--out="))[6:]
    held = None
    if world.rank == 0:
        files.lock(Path(out))
        held, files._held = files._held, None  # the session's own unlock() must not find it

    def sleep(seconds):  # the session sleeps between two looks at the lock
        if leaves:
            held.close()
        time.sleep(seconds)

    clock = SimpleNamespace(**{**vars(time), "sleep": sleep})
    with mock.patch.multiple(files, LOCK_WAIT=wait, time=clock):
        result = session(world, argv)
    assert not leaves or held.closed, "nobody waited for the lock"
    if held is not None:
        held.close()
    return result


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    out = tmp_path / "run"
    go(1, out, "--steps=2")
    before = sorted(p.name for p in out.iterdir())
    (link := tmp_path / "link").symlink_to(out)
    for name in (out, link):  # a link is the same directory
        first, second = run_ranks(2, session_in_use, [*TINY, f"--out={name}", "--steps=4"])
        assert_refused(first, "is in use by another run", "another --out")
        assert second["code"] == 2 and second["err"] == ""
    argv = [*TINY, f"--out={out}", "--steps=4", "--resume=auto"]
    (waited,) = run_ranks(1, session_in_use, argv, 0.3)
    assert_refused(waited, "is in use by")
    assert sorted(p.name for p in out.iterdir()) == before and not list(tmp_path.glob("run.*"))
    (got,) = run_ranks(1, session_in_use, argv, 60.0, True)  # that run is just leaving
    assert got["code"] == 0 and "resumed" in got["out"]


def test_the_lock_ends_with_the_run_and_leaves_no_empty_folder(tmp_path):
    go(1, tmp_path / "run", "--steps=1", "--resume=nowhere", code=2)
    for name in ("run", "new/run"):  # would raise
        files.lock(tmp_path / name)
        files.unlock()
        assert not (tmp_path / name).exists()
    files.lock(tmp_path / "run")
    (tmp_path / "run/kept").touch()
    files.unlock()
    assert (tmp_path / "run/kept").exists() and not files.in_use(tmp_path / "run")


def test_out_may_be_a_link_to_another_disk(tmp_path):
    out, real = tmp_path / "out", tmp_path / "scratch/me"
    out.symlink_to(real)
    real.parent.mkdir()
    go(1, out, "--steps=2")
    said = go(1, out, "--steps=1")["out"]
    [old] = [path for path in real.parent.glob("me.*") if path.is_dir()]
    assert f"{out} held another run: it is now {old} " in said
    assert out.is_symlink() and out.resolve() == real and [path.name for path in tmp_path.glob("out.*")] == []
    assert [len(rows(folder)) for folder in (old, out)] == [2, 1]


def test_what_cannot_be_renamed_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "run"
    go(1, out, "--steps=1", "--save-every=1")
    for source in (out, out / "step_000001"):
        refused = session(World(), [*TINY, f"--out={out}", f"--init-from={source}", "--steps=1"])
        assert_refused(refused, "--init-from is in it", f"--out {out}-tuned")
    assert (out / "step_000001").is_dir() and len(list(tmp_path.iterdir())) == 1
    done = session(World(), [*TINY, f"--out={out}-tuned", f"--init-from={out}", "--steps=1"])
    assert done["code"] == 0, done["err"]
    monkeypatch.chdir(out)
    assert_refused(session(World(), [*TINY, "--out=.", "--steps=1"]), "the working directory is in it")


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path):
    (tmp_path / "index.json").write_text("before")
    with mock.patch.object(files.os, "fsync", side_effect=OSError("no room")), pytest.raises(OSError):
        files.write_whole(tmp_path / "index.json", "after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


# -----------------------------------------------------------------------------
# Whoever replaces or deletes a file has made it

def test_dump_grads_replaces_and_removes_nothing(tmp_path):
    mine = tmp_path / "g.parts/thesis.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    path = tmp_path / "g.safetensors"
    go(2, tmp_path / "run", f"--dump-grads={path}", "--steps=1")
    assert len(load_file(path)) > 10 and mine.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"g.parts", "g.safetensors", "run"}

    before = path.read_bytes()
    link = tmp_path / "link.st"
    link.symlink_to(tmp_path / "nowhere")
    for there in (path, link):
        refused = run_ranks(2, session, [*TINY, f"--out={tmp_path / 'new'}", f"--dump-grads={there}"])
        assert_refused(refused[0], f"--dump-grads {there} is there already and stays; give a new file")
        assert refused[1]["code"] == 2 and refused[1]["err"] == "" and refused[0]["steps"] == []
    assert path.read_bytes() == before
    assert not (tmp_path / "new").exists() and not (tmp_path / "nowhere").exists()


def test_a_run_that_goes_on_writes_no_gradients_and_says_so(tmp_path):
    flags = [*TINY, f"--out={tmp_path / 'run'}", f"--dump-grads={tmp_path / 'g.st'}"]
    first = session(World(), [*flags, "--steps=1", "--save-every=1"])
    assert first["code"] == 0 and "--dump-grads" not in first["out"], first["err"]
    (tmp_path / "g.st").write_text("kept")
    gone = tmp_path / "gone"  # a run whose checkpoints are no more
    gone.mkdir()
    again = session(World(), [*flags, "--steps=2", "--resume=auto", f"--init-from={gone}"])
    assert again["code"] == 0 and (tmp_path / "g.st").read_text() == "kept", again["err"]
    assert "are for a start, and not used" in again["out"]

    for nodes, starts in ((1, "torchrun --nproc-per-node 4"), (2, "mpiexec -n 4 python")):
        config = {"argv": ["train.py", "tiny"], "world": 4, "nodes": nodes, "launcher": "torchrun"}
        assert report.command_of(config, goes_on=True) == f"{starts} train.py tiny --resume auto"
        config["argv"] += ["--resume=auto"]
        assert report.command_of(config, goes_on=True) == f"{starts} train.py tiny --resume=auto"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_checkpoint_of_any_dtype_is_refused_with_nan(dtype):
    good = ("good", torch.full((3,), 1e30, dtype=dtype), (3,), (0,))
    checksum.refuse_not_finite([good])
    bad = torch.tensor([1.0, float("nan")], dtype=dtype)
    with pytest.raises(ValueError, match="bad holds values that are not finite"):
        checksum.refuse_not_finite([good, ("bad", bad, (2,), (0,))])

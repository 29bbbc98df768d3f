"""bench/doctor.py finds what is wrong and says the fix; bench/scaling.py computes what it prints."""
import json
import os
import subprocess
import sys

import pytest
from pool import ROOT, context
from test_launch import BIN

sys.path.insert(0, str(ROOT / "bench"))

import common
import doctor
import scaling

from runtime.launch import World, bare_environment, scheduler


def test_doctor_as_a_command(tmp_path, monkeypatch, capsys):
    """Missing data is a warning, a folder that cannot be written to a failure; --json prints the same."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    code = doctor.main(["--data", str(tmp_path / "none"), "--json", "--out", "/proc/none"])
    said = json.loads(capsys.readouterr().out)
    status = {c["name"]: c["status"] for c in said["checks"]}
    assert code == 1 and said["ok"] is False and said["ranks"] == 1
    assert list(status) == ["packages", "torch", "device", "backend", "mpi", "scheduler", "node disk", "runs",
                            "data"]
    assert status["runs"] == "FAIL" and status["data"] == "WARN"
    assert {status[n] for n in ("packages", "torch", "backend", "mpi", "scheduler")} == {"OK"}, said
    assert all(c["fix"] for c in said["checks"] if c["status"] != "OK")


def print_lines():
    for _ in range(9):
        print("a line", flush=True)


def into_a_closed_pipe(main, said):
    """Run a program whose reader has left, as head does."""
    doctor.examine = lambda *args: [("memory", "OK", "fine", "")] * 9
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["doctor.py"]
    common.start(main)


@pytest.mark.parametrize("main", [doctor.main, print_lines])
def test_a_closed_pipe_ends_a_program_quietly(main, tmp_path):
    p = context.Process(target=into_a_closed_pipe, args=(main, tmp_path / "said"))
    p.start()
    p.join(60)
    assert p.exitcode == 0 and (tmp_path / "said").read_text() == ""


def fake(folder, text):
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("text,status,words", [
    ('echo "rank 0 1 Another MPI 1.0"; echo "rank 0 1 Another MPI 1.0"', "FAIL", "mpi4py sees 1"),
    ("echo no slots >&2; exit 1", "FAIL", "ends with 1: no slots"),
    ('[ "$1" = --allow-run-as-root ] || exit 1; echo rank 0 2 Open MPI; echo rank 1 2 Open MPI', "OK",
     "needs --allow-run-as-root")])
def test_mpiexec_that_does_not_fit(tmp_path, monkeypatch, text, status, words):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    fake(tmp_path, text)
    got = doctor.mpi()
    assert got[0] == status and words in got[1], got


def test_disks_devices_and_data(tmp_path, monkeypatch):
    assert doctor.disk(tmp_path / "new", "fix", True)[0] != "FAIL"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    assert doctor.disk(tmp_path / "file", "fix", True)[::2] == ("FAIL", "fix")
    (tmp_path / "meta.json").write_text("{")
    assert doctor.tokens(tmp_path)[0] == "FAIL" and "prepare.py" in doctor.tokens(tmp_path)[2]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")  # a node with rocm-smi
    assert doctor.device(World())[0] == "FAIL" and "torch does not see them" in doctor.device(World())[1]


def test_surroundings(tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    assert scheduler() is None
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    monkeypatch.setenv("PBS_JOBID", "7.x")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert scheduler() == ("PBS", "7.x", str(tmp_path / "nodes"))
    assert doctor.batch()[:2] == ("OK", "PBS job 7.x, 2 node(s); a script to start from: scripts/generic.pbs")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert scheduler() == ("SLURM", "8", "3")
    for name in ("PMI_RANK", "RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    assert {"PMI_RANK", "RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"}.isdisjoint(
        bare_environment()) and "PATH" in bare_environment()


def run_folder(folder, ranks, batch, ms, rows=4, **more):
    folder.mkdir()
    shape = dict.fromkeys(scaling.MODEL, 1)
    layout = {"world": ranks, "dp": ranks, "tp": 1, "pp": 1, "ep": 1, "zero": 0}
    (folder / "config.json").write_text(json.dumps({**shape, "preset": "tiny", **layout}))
    with open(folder / "metrics.jsonl", "w") as f:
        for step in range(1, rows + 1):
            slow = 100 if step <= rows // 2 else 1  # the start does not count
            tok_s = batch * 1000 / (ms * slow)
            f.write(json.dumps({"step": step, "ms": ms * slow, "tok_s": tok_s, "tok_s_gpu": tok_s / ranks,
                                "global_batch": batch, "loss": 1.0, **more}) + "\n")


def test_scaling(tmp_path, capsys):
    run_folder(tmp_path / "a1", 1, 8, 10.0)
    run_folder(tmp_path / "b2", 2, 16, 12.5, t_grad_sync=2.0, t_pipeline=0.5)
    run_folder(tmp_path / "c4", 4, 8, 4.0)
    run_folder(tmp_path / "dead", 4, 8, 4.0, rows=1)
    scaling.main([str(tmp_path / "a1"), str(tmp_path / "b2/metrics.jsonl"), str(tmp_path / "c4"),
                  str(tmp_path / "dead"), str(tmp_path / "none")])
    said, errors = capsys.readouterr()
    lines = [line.split() for line in said.splitlines()]
    assert lines[1][:1] == ["a1"] and lines[1][7:13] == ["8", "10.0", "800", "800", "100.0", "-"]
    assert lines[2][8:] == ["12.5", "1,280", "640", "80.0", "weak", "-", "20.0", "2"]
    assert lines[3][8:13] == ["4.0", "2,000", "500", "62.5", "strong"]
    assert "tok/s by ranks" in said and "ideal" in said
    assert "no timed row" in errors and errors.count("left out") == 2
    with pytest.raises(SystemExit) as e:
        scaling.main([str(tmp_path / "none")])
    assert e.value.code == 2
    reader, writer = os.pipe()
    os.close(reader)  # | head
    done = subprocess.run([sys.executable, ROOT / "bench/scaling.py", tmp_path / "a1"], stdout=writer,
                          stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")

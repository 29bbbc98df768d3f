"""scripts/stage.sh and scripts/sweep.sh, with stand-ins for mpiexec, srun, sbcast and python."""
import os
import subprocess
import sys

import pytest
from pool import ROOT
from test_launch import clean_env
from test_scripts import record, run_job, site, submit  # noqa: F401

# Runs the command once for each host, on that host's disk. With CUT=HOST the host reads half an archive.
LAUNCHER = """#!/bin/bash
[ "$1" != --version ] || exit 0
for host in x0 x1; do
    words=("${@/#$PWD.disk/$PWD.$host}")
    while [[ ${words[0]} =~ ^(-.*|[0-9]*|.*hosts)$ ]]; do words=("${words[@]:1}"); done
    if [ "$CUT" = $host ]; then
        head -c 9000 "${words[2]}" > "$PWD/short"
        words[2]=$PWD/short
    fi
    SLURMD_NODENAME=$host "${words[@]}" || code=$?
done
exit $code
"""
SBCAST = """#!/bin/bash
[ -z "$FULL" ] || exit 1
for host in x0 x1; do cp "$2" "${3/#$PWD.disk/$PWD.$host}"; done
"""


@pytest.fixture
def nodes(tmp_path):
    folder = tmp_path / "repo"
    (folder / "data/mine").mkdir(parents=True)
    (folder / "data/mine/a file").write_bytes(os.urandom(20_000))
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(f'# comment\nVIRTUAL_ENV="{folder}/.venv"\n')
    (folder / ".venv/bin/tool").write_text(f"#!{folder}/.venv/bin/python\n")
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "bin").mkdir()
    for host in ("disk", "x0", "x1"):
        (tmp_path / f"repo.{host}").mkdir()
    for name, text in (("mpiexec", LAUNCHER), ("srun", LAUNCHER), ("sbcast", SBCAST)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "hosts").write_text("x0\nx0\nx1\nx1\n")
    env = {**clean_env(), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": "x",
           "DISK": f"{folder}.disk"}

    def run(*words, code=0, script="stage.sh", **more):
        done = subprocess.run(["bash", f"scripts/{script}", *words], cwd=folder, env={**env, **more},
                              text=True, capture_output=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        assert not list(folder.glob(".stage*"))
        return done.stdout + done.stderr

    return folder, run


PBS, SLURM = {"PBS_NODEFILE": "../hosts"}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


def copies(folder):
    return [sorted(p.name for p in folder.with_name(f"repo.{host}").iterdir()) for host in ("x0", "x1")]


@pytest.mark.parametrize("scheduler", [PBS, SLURM])
def test_every_node_has_the_same_and_its_programs_find_it(nodes, scheduler):
    folder, run = nodes
    name = "nanoshard-" + subprocess.check_output(["id", "-un"], text=True).strip()
    said = run(".venv", "data/mine", **scheduler)
    assert "x0: copied" in said and "x1: copied" in said and "sums equal" in said
    assert f".venv is {folder}.disk/{name}/.venv" in said
    for host in ("x0", "x1"):
        copy = folder.with_name(f"repo.{host}") / name
        same = (folder / "data/mine/a file").read_bytes()
        assert (copy / "data/mine/a file").read_bytes() == same
        assert (copy / ".venv/bin/tool").read_text() == f"#!{copy}/.venv/bin/python\n"
        assert f'VIRTUAL_ENV="{copy}/.venv"' in (copy / ".venv/bin/activate").read_text()
        assert (copy / ".venv/bin/python").readlink() == (folder / ".venv/bin/python").readlink()
    assert copies(folder) == [[name], [name]]
    assert "x0: has it" in (said := run(".venv", "data/mine", **scheduler)) and "copied" not in said
    (folder / "data/mine/a file").rename(folder / "data/mine/b")
    assert "x1: copied" in run(".venv", "data/mine", **scheduler)
    assert (copy / "data/mine/b").exists() and not (copy / "data/mine/a file").exists()
    run("--remove", **PBS)
    assert copies(folder) == [[], []]


def test_a_copy_that_is_not_the_same_is_no_copy(nodes):
    folder, run = nodes
    said = run("data/mine", code=2, CUT="x1", **PBS)
    assert "x0: copied" in said and "nanoshard: x1: not copied to" in said and "staged" not in said
    assert copies(folder)[1] == []


def test_a_job_script_copies_and_trains_from_the_copy(site):  # noqa: F811
    folder, env = site
    (folder / "data/mine").mkdir(parents=True)
    (folder / "data/mine/train.bin").write_bytes(b"x")
    env["DISK"] = str(folder / "disk")
    (folder / "disk").mkdir()
    submit(site, "-v", f"STAGE=data/mine,DISK={folder}/disk,ARGS=tiny --data {{disk}}/data/mine")
    # BASH_SOURCE of the scripts leads to the real repository; here it is the folder of the stand-ins.
    (folder / "scripts").unlink()
    (folder / "scripts").mkdir()
    for path in (ROOT / "scripts").iterdir():
        (folder / "scripts" / path.name).symlink_to(path)
    said = run_job(site, 1)
    copy = next((folder / "disk").iterdir())
    assert (copy / "data/mine/train.bin").exists() and (copy / ".venv/bin/activate").exists(), said
    assert f"train.py tiny --data {copy}/data/mine --resume auto" in (folder / "calls").read_text()
    again = record(site, 2)["Variable_List"]
    assert again["STAGE"] == "data/mine" and again["DISK"] == env["DISK"]


PYTHON = """#!/bin/bash
printf "%s\\n" "$@" "" >> $WORDS
[ "$2" = --list ] && echo TABLE of $3 && exit
case "$*" in *"$BAD"*) exit ${CODE:-0} ;; esac
"""


@pytest.fixture
def sweep(nodes):
    folder, run = nodes
    (folder / "rates.txt").write_text("# comment\n--lr 0.1 --prompt 'a b'\n\n--lr 0.2\n--lr 0.3 --out=mine\n")
    (folder / "out/rates").mkdir(parents=True)
    python = folder.parent / "bin/python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def go(code=0, bad="nothing", with_code="1"):
        said = run("rates.txt", "tiny", script="sweep.sh", code=code, WORDS=f"{folder}.words", BAD=bad,
                   CODE=with_code)
        return said, folder.with_name("repo.words").read_text().split("\n\n")

    return go


def test_a_sweep_trains_each_line_and_prints_one_table(sweep):
    said, started = sweep()
    common = "\n--resume\nauto"
    assert started[:3] == [f"train.py\ntiny\n--lr\n0.1\n--prompt\na b\n--out\nout/rates/1{common}",
                           f"train.py\ntiny\n--lr\n0.2\n--out\nout/rates/2{common}",
                           f"train.py\ntiny\n--lr\n0.3\n--out=mine{common}"]
    assert "run 2 of 3: --lr 0.2 --out out/rates/2" in said and said.count("TABLE of out/rates") == 1


def test_a_run_that_fails_ends_no_other_and_a_stop_ends_the_sweep(sweep):
    said, started = sweep(code=2, bad="0.1")
    assert len(started) == 5 and said.endswith("with their exit codes: 1 (1)\n") and "TABLE" in said
    said, started = sweep(code=85, bad="0.2", with_code="85")
    assert len(started) == 8 and "stopped in run 2 of 3; type the same to go on" in said and "TABLE" in said


def test_each_job_of_an_array_has_its_line(site):  # noqa: F811
    folder, env = site
    (folder / "rates.txt").write_text("--lr 0.1\n# no\n--lr 0.2 --prompt 'a b'\n")
    submit(site, "-J", "1-2", "-v", "SWEEP=rates.txt,ARGS=tiny --seed {index}")
    for number, index in ((1, 2), (2, None)):  # the second is what the first submitted again
        run_job(site, number, index=index)
    line = "train.py\ntiny\n--seed\n2\n--lr\n0.2\n--prompt\na b\n--out\nout/rates/2\n"
    assert (folder / "words").read_text().count(line) == 2
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7",
             "SWEEP": "rates.txt", "SLURM_ARRAY_TASK_ID": "1"}
    subprocess.run(["bash", ROOT / "scripts/generic.slurm", "tiny"], env={**env, **slurm}, cwd=folder)
    assert "tiny\n--lr\n0.1\n--out\nout/rates/1\n" in (folder / "words").read_text()

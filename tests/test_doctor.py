"""bench/doctor.py finds what is wrong and says the fix; bench/scaling.py computes what it prints."""
import dataclasses
import json
import os
import re
import sys
import time
from unittest import mock

import pytest
import torch
from pool import ROOT, run_ranks
from test_launch import BIN

sys.path.insert(0, str(ROOT / "bench"))

import common
import doctor
import reach
import scaling

import plan
from interface.command_line import parse


def test_doctor_as_a_command(tmp_path, monkeypatch, capsys):
    """Missing data is a warning, a folder that cannot be written to a failure; --json prints the same."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    code = doctor.main(["--data", str(tmp_path / "none"), "--json", "--out", "/proc/none"])
    said = json.loads(capsys.readouterr().out)
    status = {c["name"]: c["status"] for c in said["checks"]}
    assert code == 1 and said["ok"] is False and said["ranks"] == 1
    assert list(status) == ["packages", "torch", "device", "backend", "fast paths", "triton", "mpi",
                            "node disk", "runs", "data"]
    assert status["runs"] == "FAIL" and status["data"] == "WARN"
    assert {status[n] for n in ("packages", "torch", "backend", "mpi")} == {"OK"}, said
    assert all(c["fix"] for c in said["checks"] if c["status"] != "OK")


@pytest.mark.parametrize("devices, env, libraries, status, words", [
    ([], {}, {}, "OK", "no fabric"),
    (["cxi/cxi0"], {}, {}, "WARN", "cxi/cxi0, but NCCL has no plugin"),
    (["cxi/cxi0"], {"LD_LIBRARY_PATH": "/none:{}"}, {}, "OK", "plugin {}/libnccl-net.so"),
    (["infiniband/mlx5_0"], {}, {"ibverbs": "x"}, "OK", "own InfiniBand"),
    (["infiniband/mlx5_0"], {}, {}, "WARN", "no libibverbs")])
def test_a_fabric_that_nccl_does_not_use(tmp_path, devices, env, libraries, status, words):
    (tmp_path / "libnccl-net.so").touch()
    for name in devices:
        (tmp_path / "class" / name).mkdir(parents=True)
    env = {key: value.format(tmp_path) for key, value in env.items()}
    got = reach.network(env, True, tmp_path / "class", libraries.get)
    assert got[0] == status and words.format(tmp_path) in got[1] and bool(got[2]) == (status != "OK"), got
    assert reach.network(env, False, tmp_path / "class", libraries.get)[0] == "OK"


def exchange(world, slow):
    """link_rates, in which messages of a pair of ranks arrive late."""
    real = reach.dist.batch_isend_irecv

    def late(ops):
        works = real(ops)
        time.sleep(0.05 * ({world.rank, ops[0].peer} == slow))
        return works
    with mock.patch.object(reach.dist, "batch_isend_irecv", late):
        return reach.link_rates(world, 3), reach.fast_paths(world), reach.gpus_seen(world)


def test_the_slowest_link_is_named():
    """Three ranks, one of which pauses in each turn; then nodes whose links differ by nature."""
    rates, fast, gpus = run_ranks(3, exchange, {0, 2})[1]
    assert rates.keys() == {(0, 1), (0, 2)} and rates[0, 2] < (4 << 20) / 0.05
    assert "slowest ranks 0 and 2" in reach.links(rates, "aaa")[1]
    assert fast[0] == gpus[0] == "OK" and "none on a CPU" in fast[1]
    hosts = "aaabbb"
    rates = {(a, b): 1e11 if hosts[a] == hosts[b] else 1e10 for a in range(6) for b in range(a + 1, 6)}
    status, text, fix = reach.links(rates, hosts)
    assert status == "OK" and fix == "" and "6 within nodes: median 100 GB/s" in text
    assert "9 between nodes: median 10 GB/s" in text
    status, text, fix = reach.links({**rates, (1, 4): 3e9}, hosts)
    assert status == "WARN" and "slowest ranks 1 and 4 with 3, 70% less" in text and "a and b" in fix


def test_a_command_that_starts_ranks_gets_no_launchers_variables(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for name in ("PMI_RANK", "RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR",
                 "OMPI_ALLOW_RUN_AS_ROOT"):
        monkeypatch.setenv(name, "1")
    assert common.bare_environment()["OMPI_ALLOW_RUN_AS_ROOT"] == "1"  # what the user has set stays
    assert {"PMI_RANK", "RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"}.isdisjoint(
        common.bare_environment()) and "PATH" in common.bare_environment()
    # Inside a step of srun, mpiexec would ask Slurm for another step, and wait for ever.
    assert "SLURM_JOB_ID" in common.bare_environment()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_CONF", "file")
    assert [name for name in common.bare_environment() if name.startswith("SLURM")] == ["SLURM_CONF"]


def test_the_report_for_a_ticket_is_one_file(tmp_path, monkeypatch, capsys):
    """Versions, modules, hosts, NCCL's and the scheduler's variables, all checks; no secret of the shell."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    for name, value in (("NCCL_NET", "AWS Libfabric"), ("PBS_QUEUE", "debug"), ("LOADEDMODULES", "conda/1:a"),
                        ("WANDB_API_KEY", "secret"), ("https_proxy", "http://me:pass@proxy:1")):
        monkeypatch.setenv(name, value)
    doctor.main(["--report", "--out", str(tmp_path / "mine")])
    said = capsys.readouterr().out
    assert f"report: {tmp_path}/mine/doctor.txt" in said
    report = (tmp_path / "mine/doctor.txt").read_text()
    for part in (*said.splitlines()[:3], "NCCL_NET=AWS Libfabric", "PBS_QUEUE=debug",
                 "LOADEDMODULES=conda/1:a", f"torch=={torch.__version__}", "numpy=="):
        assert part in report
    assert "secret" not in report and "pass" not in report


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
    run_folder(tmp_path / ("c4" * 30), 4, 8, 4.0)
    run_folder(tmp_path / "dead", 4, 8, 4.0, rows=1)
    scaling.main([str(tmp_path / "a1"), str(tmp_path / "b2/metrics.jsonl"), str(tmp_path / ("c4" * 30)),
                  str(tmp_path / "dead"), str(tmp_path / "none")])
    said, errors = capsys.readouterr()
    title, head, *lines = [line.split() for line in said.splitlines()[:5]]
    assert title == ["tiny"] and head == ["run", "ranks", "dp", "gbs", "s/it", "ms/sample", "tok/s/GPU",
                                          "eff", "%", "scaling", "comm", "%", "loss"]
    assert lines[0] == ["a1", "1", "1", "8", "0.0100", "1.25", "800", "100.0", "-", "-", "1.0000"]
    assert lines[1] == ["b2", "2", "2", "16", "0.0125", "0.78", "640", "80.0", "weak", "20.0", "1.0000"]
    assert lines[2] == ["c4" * 30, "4", "4", "8", "0.0040", "0.50", "500", "62.5", "strong", "-", "1.0000"]
    assert "tok/s by ranks" in said and "ideal" in said
    assert "no timed row" in errors and errors.count("left out") == 2
    with pytest.raises(SystemExit) as e:
        scaling.main([str(tmp_path / "none")])
    assert e.value.code == 2


def test_a_run_on_several_hosts_stands_beside_its_prediction(tmp_path, capsys):
    """The columns of a table that compares layouts, for a run of any launcher."""
    layout = ["--tp=4", "--pp=2", "--micro-batch=2", "--global-batch=64"]
    cfg = dataclasses.asdict(parse(["smol-1.7b", *layout]))
    run_folder(tmp_path / "a", 8, 64, 900.0, mem_gb=31.25, mem_gb_min=30.5, tflops=101.0, mfu=0.5)
    (tmp_path / "a/config.json").write_text(json.dumps({
        **cfg, "world": 8, "nodes": 2, "dp": 1, "vocab_size_used": 49152,
        "machine": {"device": "NVIDIA A100"}}))
    scaling.main([str(tmp_path / "a")])
    title, head, row = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()[:3]]
    seen = dict(zip(head, row, strict=True))
    planned = plan.estimate(parse(["smol-1.7b", *layout]), 8, "a100-40", 49152)
    assert title == [f"smol-1.7b, {planned['parameters']['total'] / 1e9:.3g} B parameters"]
    assert seen == {
        "run": "a", "nodes": "2", "ranks": "8", "dp": "1", "tp": "4", "pp": "2", "mbs": "2", "gbs": "64",
        "GiB": "31.25",
        "plan GiB": f"{planned['memory']:.2f}", "s/it": "0.9000", "plan s/it": f"{planned['ms'] / 1e3:.4f}",
        "ms/sample": "14.06", "tok/s/GPU": "9", "TFLOP/s": "101", "mfu %": "50.0", "eff %": "100.0",
        "scaling": "-", "loss": "1.0000", "min GiB": "30.50"}

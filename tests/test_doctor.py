"""bench/doctor.py finds what is wrong and says the fix; bench/scaling.py computes what it prints."""
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace
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
import surroundings

import plan
from interface.command_line import parse
from runtime.launch import World


def test_doctor_as_a_command(tmp_path, monkeypatch, capsys):
    """Missing data is a warning, a folder that cannot be written to a failure; --json prints the same."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    code = doctor.main(["--data", str(tmp_path / "none"), "--json", "--out", "/proc/none"])
    said = json.loads(capsys.readouterr().out)
    status = {c["name"]: c["status"] for c in said["checks"]}
    assert code == 1 and said["ok"] is False and said["ranks"] == 1
    assert list(status) == ["packages", "torch", "bytecode", "device", "backend", "fast paths", "triton",
                            "compiler", "open files", "/dev/shm", "mpi", "proxies", "modules",
                            "node disk", "runs", "data"]
    assert status["runs"] == "FAIL" and status["data"] == "WARN"
    assert {status[n] for n in ("packages", "torch", "backend", "mpi")} == {"OK"}, said
    assert all(c["fix"] for c in said["checks"] if c["status"] != "OK")


def fake(folder, text):
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("text,status,words", [
    ('echo "rank 0 1 Another MPI 1.0"; echo "rank 0 1 Another MPI 1.0"', "FAIL", "mpi4py sees 1"),
    ("echo no slots >&2; exit 1", "FAIL", "ends with 1: no slots"),
    ("printf -- '----\\nno slots\\ntry fewer\\n----\\n' >&2; exit 1", "FAIL", "ends with 1: no slots"),
    ("printf '  File x\\nOSError: no MPI\\n--\\na rank ended\\n' >&2; exit 1", "FAIL", "1: OSError: no MPI"),
    ("exit 1", "FAIL", "no output"),
    ('[ $# = 5 ] || { echo what is --allow-run-as-root >&2; exit 9; }; echo no host >&2; exit 4', "FAIL",
     "ends with 4: no host"),
    ('[ "$1" = --allow-run-as-root ] || exit 1; echo rank 0 2 Open MPI; echo rank 1 2 Open MPI', "OK",
     "needs --allow-run-as-root")])
def test_mpiexec_that_does_not_fit(tmp_path, monkeypatch, text, status, words):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    fake(tmp_path, text)
    got = doctor.mpi()
    assert got[0] == status and words in got[1] and "OMPI" not in got[2], got


def test_mpiexec_hears_nothing_of_the_launcher_that_started_the_doctor(tmp_path, monkeypatch):
    """Its two ranks would take themselves for ranks of torchrun, or of the other MPI's job."""
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "TORCHELASTIC_RUN_ID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PRTE_LAUNCHED"):
        monkeypatch.setenv(name, "1")
    theirs = "^(RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|PMI|OMPI_|PRTE)"
    fake(tmp_path, f"env | grep -E '{theirs}' >&2 && exit 1; echo rank 0 2 an MPI; echo rank 1 2 an MPI")
    got = doctor.mpi()
    assert got[0] == "OK", got


def test_root_with_open_mpi_is_told_which_variables_allow_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert common.bare_environment()["OMPI_ALLOW_RUN_AS_ROOT"] == "1"  # what the user has set stays
    assert "OMPI_COMM_WORLD_RANK" not in common.bare_environment()
    told = "echo root is refused, see --allow-run-as-root >&2; exit 1"
    allowed = f"[ $# = 6 ] || {{ {told}; }}; echo rank 0 2 Open MPI; echo rank 1 2 Open MPI"
    for text, status in ((allowed, "OK"), (told, "WARN")):
        (tmp_path / status).mkdir()
        fake(tmp_path / status, text)
        got = doctor.mpi()
        assert got[0] == status and "OMPI_ALLOW_RUN_AS_ROOT=1" in got[2], got
        assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in got[2]


def kinds(path):
    return "lustre" if path == "/env" else "ext4"


@pytest.mark.parametrize("got, status, words", [
    (surroundings.import_time("torch", 12.0, "/env", "/tmp", kinds), "WARN", "from lustre; /tmp is ext4"),
    (surroundings.import_time("torch", 9.0, "/env", "/tmp", kinds), "OK", "imported in 9.0 s"),
    (surroundings.import_time("torch", 12.0, "/tmp", "/tmp", kinds), "OK", "from ext4"),
    (surroundings.import_time("torch", 31.0, "/tmp", "/tmp", kinds), "WARN", "31.0 s"),
    (surroundings.open_files(384, (1024, 4096)), "OK", "384 rank(s) need about 1024"),
    (surroundings.open_files(385, (1024, 4096)), "WARN", "ulimit -n 1024 (hard 4096)"),
    (surroundings.open_files(2048, (1024, 4096)), "FAIL", "need about 4352"),
    (surroundings.open_files(2048, (-1, -1)), "OK", "ulimit -n inf"),
    (surroundings.shared_memory(1, (64 << 20, 0, 64 << 20)), "OK", "64 of 64 MiB free"),
    (surroundings.shared_memory(8, (64 << 20, 0, 64 << 20)), "WARN", "need up to 512"),
    (surroundings.compiler(True, {"PATH": "/none"}), "WARN", "none of cc, gcc, clang"),
    (surroundings.compiler(False, {"PATH": "/none"}), "OK", "none of cc, gcc, clang"),
    (surroundings.compiler(True, {"CC": "/bin/false"}), "WARN", "/bin/false makes no program: exit code 1"),
    (surroundings.compiler(True, {"CC": "/none/gcc"}), "WARN", "No such file"),
    (surroundings.compiler(True, {"CC": "true"}), "OK", "true makes programs"),
    (surroundings.proxies({}), "OK", "none set"),
    (surroundings.proxies({"http_proxy": "http://me:secret@p:3128"}), "WARN", "http_proxy=http://***@p:3128"),
    (surroundings.proxies({"HTTPS_PROXY": "p:1", "no_proxy": "localhost"}), "WARN", "no http_proxy"),
    (surroundings.proxies({"HTTPS_PROXY": "p:1", "http_proxy": "q", "no_proxy": "a, localhost"}), "OK",
     "http_proxy=q, https_proxy=p:1"),
    (surroundings.modules({}), "OK", "none loaded"),
    (surroundings.modules({"LOADEDMODULES": "gcc/12:conda/2025"}), "OK", "gcc/12, conda/2025; "),
    (surroundings.modules({"LOADEDMODULES": "cray-python/3:python/3.11:conda/2025"}), "WARN", "conda/2025"),
    (surroundings.modules({"LOADEDMODULES": "conda/1", "PYTHONPATH": "/p", "VIRTUAL_ENV": "/v"}), "WARN",
     "PYTHONPATH=/p")])
def test_what_surrounds_a_rank(got, status, words):
    assert got[0] == status and words in got[1] and bool(got[2]) == (status != "OK"), got
    assert "secret" not in str(got)


def test_bytecode_that_is_not_kept(tmp_path, monkeypatch):
    """A read-only container without .pyc files costs seconds at each start."""
    file = str(tmp_path / "__init__.py")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert surroundings.bytecode(file, writes=True)[0] == "OK"
    status, text, fix = surroundings.bytecode(file, writes=False)
    assert (status, fix) == ("WARN", "unset PYTHONDONTWRITEBYTECODE") and str(tmp_path) in text
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda folder, mode: False)
        assert surroundings.bytecode(file, writes=True)[2] == "export PYTHONPYCACHEPREFIX=$HOME/.cache/pyc"
    kept = tmp_path / "__pycache__"
    kept.mkdir()
    (kept / os.path.basename(importlib.util.cache_from_source(file))).touch()
    assert surroundings.bytecode(file, writes=False)[0] == "OK"


def test_triton_is_right_only_after_a_kernel_ran(monkeypatch):
    """The kernel itself runs in Triton's interpreter here, in a process of its own."""
    cpu, gpu = torch.device("cpu"), torch.device("meta")  # any device that is no CPU
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert surroundings.triton_kernel(gpu)[0] == "WARN"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert surroundings.triton_kernel(cpu) == ("OK", "no GPU: no kernel is tried", "")

    def broken(device):
        raise RuntimeError("a log\nno C compiler found")
    for adds, status, words in ((broken, "FAIL", "RuntimeError: no C compiler found"),
                                (lambda device: False, "FAIL", "wrongly"),
                                (lambda device: device is gpu, "OK", "triton 9 compiled and ran a kernel")):
        stand_in = SimpleNamespace(adds=adds, triton=SimpleNamespace(__version__="9"))
        monkeypatch.setitem(sys.modules, "triton_add", stand_in)
        got = surroundings.triton_kernel(gpu)
        assert got[0] == status and words in got[1], got
    monkeypatch.setitem(sys.modules, "triton_add", None)
    assert surroundings.triton_kernel(gpu)[0] == "FAIL"
    if find("triton") is None:
        pytest.skip("no triton here: its interpreter is not tried")
    code = "import torch, triton_add; print(triton_add.adds(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "bench",
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout == "True\n", done.stderr


def test_a_failing_check_is_one_line_under_torchrun_too(capsys):
    """torchrun prints forty lines around an exit code other than 0; the others get 1."""
    flags = doctor.Flags()
    codes = {name: doctor.exit_code(World(launcher=name), True, flags)
             for name in ("torchrun", "single", "hydra")}
    assert codes == {"torchrun": 0, "single": 1, "hydra": 1}
    assert capsys.readouterr().out.count("\n") == 1
    assert doctor.exit_code(World(launcher="hydra"), False, flags) == 0
    status, text, _ = doctor.attempt(lambda: 1 / 0)
    assert (status, text) == ("FAIL", "the check itself ends with ZeroDivisionError: division by zero")


@pytest.mark.parametrize("rows, status, words", [
    ([(None, 0, "a", 2), (None, 1, "b", 2)], "OK", "each rank sees the same 2 (CUDA_VISIBLE_DEVICES unset)"),
    ([("1", 0, "b", 2), ("0", 1, "a", 2)], "OK", "shows each rank its own (CUDA_VISIBLE_DEVICES 1; 0)"),
    ([("0", 0, "a", 1), ("0", 0, "b", 1)], "WARN", "GPUs of its own only (CUDA_VISIBLE_DEVICES 0)"),
    ([("0", 0, "a", 1), (None, 1, "b", 2)], "WARN", "GPUs of its own only (CUDA_VISIBLE_DEVICES 0; unset)"),
    ([("0", 0, "a", 1), ("0", 0, "a", 1)], "FAIL", "2 ranks use 1 GPUs")])
def test_which_habit_of_showing_gpus_a_site_has(rows, status, words):
    """The third: a cgroup hides the other GPU from each rank, and calls its own number 0."""
    got = reach.habit(rows)
    assert got[0] == status and words in got[1] and bool(got[2]) == (status != "OK"), got


@pytest.mark.parametrize("devices, env, libraries, status, words", [
    ([], {}, {}, "OK", "no fabric"),
    (["cxi/cxi0"], {}, {}, "WARN", "cxi/cxi0, but NCCL has no plugin"),
    (["cxi/cxi0"], {"LD_LIBRARY_PATH": "/none:{}"}, {}, "OK", "plugin {}/libnccl-net.so"),
    (["cxi/cxi0"], {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "ofi"}, {}, "WARN", "NCCL_NET=Socket"),
    (["infiniband/efa_0"], {}, {"ibverbs": "x"}, "WARN", "no plugin"),
    (["infiniband/mlx5_0"], {}, {"ibverbs": "x"}, "OK", "own InfiniBand"),
    (["infiniband/mlx5_0"], {}, {}, "WARN", "no libibverbs"),
    (["infiniband/mlx5_0"], {"NCCL_IB_DISABLE": "1"}, {"ibverbs": "x"}, "WARN", "NCCL_IB_DISABLE is set"),
    ([f"infiniband/mlx5_{i}" for i in range(6)], {}, {"nccl-net": "y"}, "OK", "and 2 more, NCCL's plugin y")])
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
    assert rates.keys() == {(0, 1), (0, 2), (1, 2)} and rates[0, 2] < (4 << 20) / 0.05
    assert "slowest ranks 0 and 2" in reach.links(rates, "aaa")[1]
    assert fast[0] == gpus[0] == "OK" and "none on a CPU" in fast[1]
    hosts = "aaabbb"
    rates = {(a, b): 1e11 if hosts[a] == hosts[b] else 1e10 for a in range(6) for b in range(a + 1, 6)}
    status, text, fix = reach.links(rates, hosts)
    assert status == "OK" and fix == "" and "6 within nodes: median 100 GB/s" in text
    assert "9 between nodes: median 10 GB/s" in text
    status, text, fix = reach.links({**rates, (1, 4): 3e9}, hosts)
    assert status == "WARN" and "slowest ranks 1 and 4 with 3, 70% less" in text and "a and b" in fix


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 12, 4096])
def test_each_rank_meets_its_neighbours_and_ranks_further_away(size):
    met = [reach.partners(rank, size) for rank in range(size)]
    for turn in zip(*met, strict=True):
        assert all(other is None or turn[other] == rank != other for rank, other in enumerate(turn))
    for rank, others in enumerate(met):
        neighbours = {rank - 1, rank + 1} & {*range(size)}  # for an odd number the ring is open
        assert neighbours <= {*others} and len(others) <= 1 + size.bit_length()
        assert size % 2 or (rank + 1) % size in others
    assert {1, 2, 4, 2048} & {*range(size)} <= {*met[0]}


def test_disks_devices_and_data(tmp_path, monkeypatch):
    assert doctor.disk(tmp_path / "new", "fix", True)[0] != "FAIL"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    assert doctor.disk(tmp_path / "file", "fix", True)[::2] == ("FAIL", "fix")
    (tmp_path / "meta.json").write_text("{")
    assert doctor.tokens(tmp_path)[0] == "FAIL" and "prepare.py" in doctor.tokens(tmp_path)[2]
    status, said, fix = doctor.tokens(f"{tmp_path}:0.5,data/none:0.5")
    assert status == "FAIL" and str(tmp_path) in said and "make it with" not in said
    status, said, fix = doctor.tokens("data/none")
    assert status == "WARN" and fix == "python prepare.py FILE... --name none, in one process"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")  # a node with rocm-smi
    assert doctor.device(World())[0] == "FAIL" and "torch does not see them" in doctor.device(World())[1]


def test_a_command_that_starts_ranks_gets_no_launchers_variables(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for name in ("PMI_RANK", "RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
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


def test_a_run_that_went_on_in_another_layout_has_a_row_for_each(tmp_path, capsys):
    """The start at step 9 was replaced by that at step 6, and the one at step 3 changed nothing."""
    run_folder(tmp_path / "a", 2, 8, 10.0, rows=12)
    cfg = json.loads((tmp_path / "a/config.json").read_text())
    one = {**cfg, "world": 1, "dp": 1}
    starts = [(0, one), (3, one), (9, {**cfg, "tp": 2}), (6, cfg)]
    (tmp_path / "a/history.jsonl").write_text(
        "".join(json.dumps({"step": step, "config": config}) + "\n" for step, config in starts))
    scaling.main([str(tmp_path / "a")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:4]]
    assert [line[:4] for line in lines] == [["a@0", *"118"], ["a@6", *"228"]]
    assert [line[4] for line in lines] == ["1.0000", "0.0100"], "no row has the seconds of both"


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


def test_the_published_table_stands_beside_the_prediction(tmp_path, capsys):
    run_folder(tmp_path / "one", 1, 64, 200.0)
    saved = json.loads((tmp_path / "one/config.json").read_text())
    (tmp_path / "one/config.json").write_text(json.dumps({**saved, "preset": "bert-345m"}))
    scaling.main(["--published", str(tmp_path / "one")])
    out = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row for row in out[3:8]}
    assert table["1"][1:4] == ["22.39", "100.0", "%"] and table["1"][7:] == ["3.12", "100.0", "%"]
    assert table["128"][1:3] == ["0.87", "20.1"] and table["128"][7:] == ["-"]  # 22.39 / 0.87 / 128
    plan.main(["bert-345m", "--micro-batch=4", "--gpu=a100-40", "--scaling=1,8,32,64,128"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[6] for row in rows] == [row[4] for row in table.values()]
    assert [row[8] for row in rows] == [row[5] for row in table.values()]

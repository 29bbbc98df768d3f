"""What is wrong with this machine? bench/doctor.py prints a line per check, OK, WARN or FAIL, and the fix.

    python bench/doctor.py                  this process: packages, torch, device, MPI, disks, data
    mpiexec -n 8 python bench/doctor.py     every node, a sum over all ranks, and links between them, of which
                                            the slowest is named (torchrun and srun, too)
    --network                               NCCL's network, which several nodes check without being asked

The exit code is 0, or 1 if a check FAILs. --json prints the same as one object, with "ok". --report also
writes OUT/doctor.txt, to attach to a ticket. A check returns (status, text, fix).
"""
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

BEGAN = time.perf_counter()
from common import ROOT, bare_environment, read_flags, start
from runtime.launch import launch, shutdown

import torch
import torch.distributed as dist
from reach import fast_paths, gpus_seen, link_rates, links, network

TORCH_SECONDS = time.perf_counter() - BEGAN
from config import Outcome
from corpus import shards
from corpus.samples import parse_blend
from fast.buckets import launch_sum
from ops.accelerator import ask, device_name
from ops.backend import TRITON_DEVICES

SLOW_DISK = 50  # MB/s; a slower disk takes minutes for a checkpoint of a billion parameters
NETWORK = ("lustre", "nfs", "nfs4", "gpfs", "beegfs", "cephfs", "fuse", "9p", "virtiofs")
SHOWS = {"cuda": "rocm-smi" if torch.version.hip else "nvidia-smi", "xpu": "xpu-smi"}  # a device's processes
RANKS = """import sys
from mpi4py import MPI
name = MPI.Get_library_version().splitlines()[0]  # one write per rank: the launcher may mix smaller ones
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} {MPI.COMM_WORLD.size} {name}\\n")
"""


def ok(text):
    return "OK", text, ""


def packages():
    """Are the packages of requirements-site.txt here?"""
    missing, found = [], []
    for line in (ROOT / "requirements-site.txt").read_text().splitlines():
        name = re.split(r"[<>=,]", line)[0].strip()
        if name and not name.startswith("#"):
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
    if missing:
        return "FAIL", f"missing: {', '.join(missing)}", "pip install -r requirements-site.txt"
    return ok(", ".join(found))


def filesystem(path, mounts=Path("/proc/mounts")):
    """Return the type of the file system that holds path: that of the longest mount point above it."""
    best = ("", "?")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        point, kind = line.split()[1:3]
        if Path(path).resolve().is_relative_to(point) and len(point) > len(best[0]):
            best = point, kind
    return best[1]


def torch_import(seconds=TORCH_SECONDS):
    """How long did importing torch take, and from which disk?"""
    text = (f"torch {torch.__version__}, python {sys.version.split()[0]}, imported in {seconds:.1f} s from "
            f"{filesystem(Path(torch.__file__).parent)}")
    if seconds > 30:
        return "WARN", text, "copy the environment to each node's own disk, once per job"
    return ok(text)


def triton_kernel(device):
    """Does Triton compile and run a kernel on this rank's device?"""
    if device.type not in TRITON_DEVICES:
        return ok(f"no kernels for {device.type}: torch's operations take their place")
    try:
        x = torch.arange(1000.0, device=device)
        total = torch.empty_like(x)
        launch_sum(x, x, total, 1, False)
    except Exception as e:  # a compiler's, a driver's, an import's
        lines = str(e).strip().splitlines() or [""]
        return "FAIL", f"a kernel does not run: {type(e).__name__}: {lines[-1][:120]}", \
            "load a C compiler, and install the triton that belongs to this torch"
    if not torch.equal(total, 2 * x):
        return "FAIL", "a kernel adds two vectors wrongly", "use another node; report it to the site"
    return ok("a kernel was compiled and ran")


def device(world):
    """Does this rank's device multiply two matrices, forward and backward? Are all of the node free?"""
    if world.device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        if Path("/proc/driver/nvidia/version").exists() or any(map(shutil.which, ("rocm-smi", "xpu-smi"))):
            return "FAIL", "this node has GPUs, torch does not see them", \
                "load the site's torch, or install the CUDA, ROCm or XPU wheel; in a job, ask for GPUs"
        if cores == 1 < (os.cpu_count() or 1):
            return "WARN", f"cpu: bound to 1 of {os.cpu_count()} cores", \
                "give the launcher --bind-to none, --cpu-bind depth or srun -c"
        return ok(f"cpu: {cores} cores, {torch.get_num_threads()} threads per rank")
    name, count = device_name(world.device), torch.accelerator.device_count()
    try:
        a = torch.randn(256, 256, device=world.device, dtype=torch.bfloat16, requires_grad=True)
        (a @ a).sum().backward()
        a.grad.sum().item()  # waits for the device
    except RuntimeError as e:
        return "FAIL", f"{name}: {str(e).splitlines()[0]}", "install a torch built for this GPU and driver"
    memory = [free_memory(torch.device(world.device.type, i)) for i in range(count)]
    text = f"{count} x {name}"
    if all(total for _, total in memory):
        free = " ".join(f"{free / 2**30:.0f}" for free, _ in memory)
        text += f", {free} of {memory[0][1] / 2**30:.0f} GiB free"
    if any(free < 0.8 * total for free, total in memory):
        return "WARN", f"{text}: another process uses it", \
            f"{SHOWS[world.device.type]} shows which; ask for whole nodes"
    if count < world.local_size:
        return "WARN", f"{text} for {world.local_size} ranks", f"start {count} ranks per node"
    return ok(text)


def free_memory(device):
    """Return (free, all) bytes of a GPU; (0, 0) where its driver does not say, as some of Intel's."""
    try:
        return ask(device, "mem_get_info") or (0, 0)
    except RuntimeError:
        return 0, 0


def backend(world):
    """Is the sum of the rank numbers over all ranks right? A single process makes a group of its own."""
    name = dist.get_default_backend_for_device(world.device)
    alone = world.size == 1
    if alone:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group(name, store=store, rank=0, world_size=1)
    began = time.perf_counter()
    total = torch.tensor(float(world.rank), device=world.device)
    dist.all_reduce(total)  # SUM of one number, over the world
    total, took = total.item(), time.perf_counter() - began
    if alone:
        dist.destroy_process_group()
    version = f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else ""
    text = f"{name}{version}: the sum over {world.size} rank(s), {1e3 * took:.1f} ms the first time"
    if total != world.size * (world.size - 1) / 2:
        return "FAIL", f"{text}, is {total}", "set NCCL_DEBUG=INFO; bench/collectives.py tests more"
    return ok(text)


def mpi():
    """Does mpi4py see the two ranks that mpiexec starts?"""
    try:
        have = importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        return "WARN", "no mpi4py: torchrun and srun work, mpiexec does not", \
            "pip install mpi4py mpich; on a cluster the site's, never both"
    where = shutil.which("mpiexec")
    if where is None:
        return "WARN", f"mpi4py {have} but no mpiexec in PATH: start with torchrun or srun", \
            "pip install mpich, or load the site's MPI"
    try:
        job = subprocess.run([where, "-n", "2", sys.executable, "-c", RANKS], capture_output=True, text=True,
                             timeout=60, env=bare_environment(), stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as e:
        return "FAIL", f"{where} -n 2: {e}", "use another mpiexec; on a login node, try inside a job"
    seen = re.findall(r"^rank (\d) (\d+) (.*)", job.stdout, re.M)
    if sorted(s[:2] for s in seen) == [("0", "2"), ("1", "2")]:
        library = re.sub(r"[\s:]+", " ", seen[0][2]).strip()[:40]
        return ok(f"mpi4py {have} and {where} agree: {library}")
    if seen:
        return "FAIL", f"{where} started 2 ranks, mpi4py sees {seen[0][1]}: their MPIs differ", \
            "use the mpiexec of the MPI that mpi4py was built with"
    said = job.stderr + job.stdout
    if "allow-run-as-root" in said:
        return "WARN", f"{where}: Open MPI refuses root", \
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or do not be root"
    # A rank's exception, or the launcher's first line of text: Open MPI draws lines of dashes around a text.
    lines = [line for line in said.splitlines() if re.search("[a-z]", line)]
    why = next((line for line in lines if re.match(r"[\w.]*Error: ", line)), [*lines, "no output"][0])
    return "FAIL", f"{where} -n 2 ends with {job.returncode}: {why.strip()[:90]}", \
        "try inside a job, or another mpiexec"


def write_speed(folder, megabytes=32):
    """Return the MB/s of a file that is written, synced and renamed, and then read back.

    OSError: why the file cannot be written; ValueError: other bytes came back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(1 << 20)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as tmp:
        part, whole = Path(tmp, "part"), Path(tmp, "whole")
        began = time.perf_counter()
        with open(part, "wb") as f:
            for _ in range(megabytes):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, whole)
        took = time.perf_counter() - began
        if whole.read_bytes() != block * megabytes:
            raise ValueError(f"{folder} returned other bytes than were written")
    return megabytes / took


def disk(folder, fix, local):
    """Can folder be written to, fast enough, and are 2 GB free? local: it should be a disk of this node."""
    folder = Path(folder)
    try:
        speed = write_speed(folder)
        free, kind = shutil.disk_usage(folder).free / 1e9, filesystem(folder)
    except (OSError, ValueError) as e:
        return "FAIL", f"{folder}: {e}", fix
    text = f"{folder}: {kind}, {free:.0f} GB free, {speed:.0f} MB/s written and synced"
    if free < 2:
        return "WARN", text, f"free some space; {fix}"
    if local and kind in NETWORK:
        return "WARN", f"{text}: a network file system", fix
    if speed < SLOW_DISK:
        return "WARN", f"{text}: slow", fix
    return ok(text)


def tokens(data):
    """Are the token files of --data whole?"""
    said = []
    folder = data
    try:
        for folder in parse_blend(str(data)):
            meta = shards.load_meta(folder)
            files = shards.verify(folder)
            n_tokens = meta["tokens"]["train"]
            said.append(f"{folder}: {n_tokens:,} training tokens, {files} files have their sha256")
    except (OSError, ValueError) as e:
        status = "FAIL" if Path(folder).exists() else "WARN"
        return status, " ".join(str(e).split()), f"python prepare.py makes {folder}, in one process"
    return ok("; ".join(said))


def examine(world, flags):
    """Run all checks of this rank's node, and return [(name, status, text, fix)].

    All ranks check the backend together.
    """
    backend_result = backend(world)
    gpus = gpus_seen(world)
    fast = fast_paths(world)
    rates = link_rates(world)
    hosts = world.everyone.gather(socket.gethostname())
    if world.local_rank != 0:
        return []
    nccl = dist.get_default_backend_for_device(world.device) == "nccl"
    checks = [
        ("packages", packages),
        ("torch", torch_import),
        ("device", lambda: device(world)),
        ("backend", lambda: backend_result),
        ("gpus", lambda: gpus),
        ("fast paths", lambda: fast),
        ("triton", lambda: triton_kernel(world.device)),
        ("links", lambda: links(rates, hosts)),
        ("network", lambda: network(bare_environment(), nccl)),
        ("mpi", mpi),
        ("node disk", lambda: disk(tempfile.gettempdir(), "set TMPDIR to the node's own disk", True)),
        ("runs", lambda: disk(flags.out, "give --out on a disk that you may write to", False)),
        ("data", lambda: tokens(flags.data)),
    ]
    left_out = set()
    if world.device.type == "cpu":
        left_out.add("gpus")
    if not (world.n_nodes > 1 or flags.network):
        left_out.add("network")
    if world.size == 1:
        left_out.add("links")
    if world.rank > 0:
        left_out.update(("links", "mpi"))  # rank 0 alone checks these
    checks = [(name, check) for name, check in checks if name not in left_out]
    return [(name, *attempt(check)) for name, check in checks]


def attempt(check):
    """Return what a check of one rank finds, also if it ends in an exception that nobody foresaw."""
    try:
        return check()
    except Exception as e:
        why = " ".join(str(e).split())[:200]
        return "FAIL", f"the check itself ends with {type(e).__name__}: {why}", "report this line"


def as_json(world, nodes, failed):
    """nodes: [{"host", "checks"}], one per rank."""
    rows = [{"host": node["host"], **dict(zip(("name", "status", "text", "fix"), check, strict=True))}
            for node in nodes for check in node["checks"]]
    return json.dumps({"ok": not failed, "launcher": world.launcher, "ranks": world.size, "checks": rows})


REPORTED = ("NCCL_", "OFI_", "FI_", "CCL_", "PBS_", "SLURM_", "CUDA_", "HIP_", "ROCR_", "ZE_", "MPICH_",
            "OMP_", "GLOO_", "LD_LIBRARY_PATH", "LOADEDMODULES")


def write_report(world, nodes, out):
    """Write OUT/doctor.txt. No variable in it holds a password."""
    packages = {f"{found.name}=={found.version}" for found in importlib.metadata.distributions()}
    variables = [f"{name}={value}" for name, value in bare_environment().items()
                 if name.startswith(REPORTED)]
    shown = SHOWS.get(world.device.type)
    gpus = shown and shutil.which(shown) and subprocess.run(  # also the memory that other processes hold
        [shown], capture_output=True, text=True, check=False).stdout
    parts = [as_lines(world, nodes, whole=True), sys.version, *sorted(variables), *sorted(packages)]
    path = Path(out, "doctor.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, gpus or ""]) + "\n", encoding="utf-8")
    print(f"report: {path}", flush=True)


def as_lines(world, nodes, whole=False):
    """A line per check, folded: all of the first node, of the other nodes those that are not OK, or all."""
    lines = [f"{world.launcher}, {world.size} rank(s), {world.n_nodes} node(s), {nodes[0]['host']}"]
    for i, node in enumerate(nodes):
        for name, status, text, fix in node["checks"]:
            if whole or i == 0 or status != "OK":
                where = f"{node['host']}: " if i else ""
                line = f"{status:5s} {name:10s} {where}{text}"
                lines.append(f"{line}; fix: {fix}" if fix else line)
    return "\n".join(lines)


@dataclass(frozen=True)
class Flags:
    data: str = "data/stdlib"  # token files to check
    out: str = "out"  # folder that runs would be written to
    network: bool = False  # check NCCL's network on a single node, too
    json: bool = False  # print one JSON object, no lines
    report: bool = False  # write all that a ticket needs into OUT/doctor.txt


def main(argv=None):
    flags = read_flags(Flags, argv, "doctor.py", "Check this machine, under a launcher every node: packages, "
                       "torch, device, MPI, disks, data, links. One line per check, with the fix.")
    try:
        world = launch(60.0, quiet=True)
    except SystemExit:  # launch() has said what is wrong, for example with mpiexec and mpi4py of two MPIs
        print("FAIL  launch     no rank starts: the line on stderr says why", flush=True)
        return Outcome.FAILED
    # a few lines per rank, over the world
    nodes = world.everyone.gather({"host": socket.gethostname(), "checks": examine(world, flags)})
    shutdown(world)
    failed = any(check[1] == "FAIL" for node in nodes for check in node["checks"])
    if world.rank == 0:
        print(as_json(world, nodes, failed) if flags.json else as_lines(world, nodes))
        if flags.report:
            write_report(world, nodes, flags.out)
    return Outcome.FAILED if failed else Outcome.DONE


if __name__ == "__main__":
    start(main)

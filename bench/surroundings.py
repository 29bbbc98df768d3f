"""What surrounds a rank on its node: limits, memory that processes share, compiler, proxies, modules.

bench/doctor.py calls these checks. A check returns (status, text, fix).
"""
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = 64 << 20  # bytes of /dev/shm per rank; an NCCL communicator between processes takes some MB each
COMPILERS = ("cc", "gcc", "clang")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
NETWORK = ("lustre", "nfs", "nfs4", "gpfs", "beegfs", "cephfs", "fuse", "9p", "virtiofs")


def filesystem(path, mounts=Path("/proc/mounts")):
    """Return the type of the file system that holds path: that of the longest mount point above it."""
    best = ("", "?")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        point, kind = line.split()[1:3]
        if Path(path).resolve().is_relative_to(point) and len(point) > len(best[0]):
            best = point, kind
    return best[1]


def import_time(what, seconds, folder, temporary, kind_of=filesystem):
    """Is torch, in folder, imported from a disk as near as this node's own, the one of `temporary`?"""
    here, own = kind_of(folder), kind_of(temporary)
    text = f"{what}, imported in {seconds:.1f} s from {here}; {temporary} is {own}"
    is_far = here.split(".")[0] in NETWORK and own.split(".")[0] not in NETWORK
    if seconds > 30 or (is_far and seconds > 10):
        disk = f"to {temporary}" if is_far else "to each node's own disk"
        return "WARN", text, f"copy the environment {disk}, once per job: each rank reads it at each start"
    return "OK", text, ""


def bytecode(file, writes=None):
    """Has Python kept what it compiled of torch? file: torch's __init__.py. writes: whether it may."""
    kept = Path(importlib.util.cache_from_source(file))  # It heeds PYTHONPYCACHEPREFIX.
    if kept.exists():
        return "OK", f"Python has compiled torch: {kept.parent}", ""
    if writes is None:
        writes = not sys.dont_write_bytecode
    fixes = [] if writes else ["unset PYTHONDONTWRITEBYTECODE"]
    if not os.access(Path(file).parent, os.W_OK):
        fixes.append("export PYTHONPYCACHEPREFIX=$HOME/.cache/pyc")
    if not fixes:
        return "OK", f"Python compiles torch in this start, and keeps it: {kept.parent}", ""
    text = f"no {kept}: each start compiles torch's Python again, which takes seconds"
    return "WARN", text, "; ".join(fixes)


def open_files(ranks, limits=None):
    """May a rank of a run of so many ranks open all of its connections?

    Rank 0 holds the store, so it has up to two connections per rank. limits: (soft, hard), by default this
    process's.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    need = 256 + 2 * ranks  # libraries, data and checkpoints, and on a CPU gloo's connections, too
    text = f"ulimit -n {soft} (hard {hard}); {ranks} rank(s) need about {need}"
    if soft >= need:
        return "OK", text, ""
    if hard >= need:
        return "WARN", text, f"ulimit -n {need} in the job script, before the launcher"
    return "FAIL", text, f"ask the site for a hard limit of {need} (docker run --ulimit nofile={need})"


def shared_memory(ranks, usage=None):
    """Is /dev/shm large enough for the messages between so many ranks of this node?

    usage: (total, used, free) bytes, by default those of /dev/shm.
    """
    try:
        total, _, free = usage or shutil.disk_usage("/dev/shm")
    except OSError as e:
        return "WARN", f"/dev/shm: {e.strerror}", "mount a tmpfs there; NCCL and data loaders use it"
    need = ranks * SHARED
    text = f"/dev/shm: {free >> 20:,} of {total >> 20:,} MiB free; {ranks} rank(s) need up to {need >> 20}"
    if free >= need:
        return "OK", text, ""
    return "WARN", text, "remove old files in it, " \
        f"or docker run --shm-size={max(1, need >> 29)}g (or --ipc=host)"


def compiler(needed, env, seconds=60):
    """Does a C compiler make a program? needed: whether this node has a GPU, for which Triton calls it."""
    name = env.get("CC") or next((c for c in COMPILERS if shutil.which(c, path=env.get("PATH"))), None)
    fix = "load the site's gcc module, or apt install gcc; export CC=... names another one"
    if name is None:
        text = f"none of {', '.join(COMPILERS)} in PATH"
        if needed:
            return "WARN", f"{text}: Triton and --compile need one", fix
        return "OK", text, ""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        source = Path(folder, "a.c")
        source.write_text("int main(void) { return 0; }\n")
        try:
            job = subprocess.run([*name.split(), str(source), "-o", f"{folder}/a"], capture_output=True,
                                 text=True, timeout=seconds, env=env, stdin=subprocess.DEVNULL)
            why = "" if job.returncode == 0 else (job.stderr.split("\n")[0] or f"exit code {job.returncode}")
        except (OSError, subprocess.TimeoutExpired) as e:
            why = str(e)
    if why:
        text = f"{name} makes no program: {why[:90]}"
        return ("WARN", text, fix) if needed else ("OK", text, "")
    return "OK", f"{name} makes programs", ""


def proxies(env):
    """Through which proxies do downloads and --wandb online go? Passwords in them are not printed."""
    found = {}
    for name in PROXIES:
        value = env.get(name) or env.get(name.upper())
        if value:
            found[name] = re.sub(r"//[^/@]*@", "//***@", value)
    if not found:
        return "OK", "none set: pip, prepare.py and --wandb online need a direct way out", ""
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    local = {"localhost", "127.0.0.1", "*"} & set(re.split(r"[,\s]+", found.get("no_proxy", "")))
    if not local:
        return "WARN", text, "export no_proxy=localhost,127.0.0.1: a notebook's own server is not behind it"
    if ("http_proxy" in found) != ("https_proxy" in found):
        other = "https_proxy" if "http_proxy" in found else "http_proxy"
        return "WARN", f"{text}; no {other}", f"export {other}, too: pip and wandb speak https"
    return "OK", text, ""


def modules(env):
    """Which modules of the site are loaded, and does this python come from one of them?"""
    loaded = [name for name in env.get("LOADEDMODULES", "").split(":") if name]
    if not loaded:
        return "OK", f"none loaded; {sys.executable}", ""
    text = f"{', '.join(loaded)}; {sys.executable}"
    pythons = [name for name in loaded if re.match(r"(ana|mini)?conda|python|pytorch|frameworks", name)]
    if len(pythons) > 1:
        return "WARN", text, f"load one of {', '.join(pythons)} alone: each brings a python with packages"
    home = env.get("PYTHONPATH", "")
    if pythons and home and env.get("VIRTUAL_ENV"):
        return "WARN", f"{text}; PYTHONPATH={home}", \
            "unset PYTHONPATH after activating the venv: its packages come before the venv's"
    return "OK", text, ""


def triton_kernel(device):
    """Does Triton compile and run a kernel on this rank's device? On a CPU nothing is tried."""
    if device.type == "cpu":
        return "OK", "no GPU: no kernel is tried", ""
    if importlib.util.find_spec("triton") is None:
        return "WARN", "not installed: torch's operations take the kernels' place", "pip install triton"
    fix = "load a C compiler, and install the triton that belongs to this torch"
    try:
        import triton_add
        right = triton_add.adds(device)
    except Exception as e:  # a compiler's, a driver's, an import's
        lines = str(e).strip().splitlines() or [""]
        return "FAIL", f"a kernel does not run: {type(e).__name__}: {lines[-1][:120]}", fix
    if not right:
        return "FAIL", "a kernel adds two vectors wrongly", "use another node; report it to the site"
    return "OK", f"triton {triton_add.triton.__version__} compiled and ran a kernel", ""

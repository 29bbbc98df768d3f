"""Who am I? One answer for plain python, torchrun, MPICH/hydra, Open MPI, PALS, Cray PMI and srun.

1) detect()  reads the launcher's variables: rank, size, local rank. The only file that reads the environment.
2) launch()  picks the device, agrees on an address through MPI, makes the process group.
3) agreed()  turns a wrong input on any rank into one line from one rank and exit code 2 on all.
"""
import contextlib
import functools
import gc
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel import MAX, Axis

# launcher: (rank, world size, local rank, local size), first complete family wins. slurm is last: inside a
# batch script SLURM_PROCID and SLURM_NTASKS are set for everybody; only SLURM_STEP_NUM_TASKS says that srun
# started *this* process.
FAMILIES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # mpich and intel mpi
    "cray": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


class CollectiveLog:
    """The collectives that this rank has begun, per axis, and the last one: what the watchdog reports."""

    def __init__(self):
        self.started, self.last = Counter(), None  # axis: how many; (kind, axis, (shape, dtype))
        self.on_next_collective = None  # called once: the end of what a rank does alone

    def record(self, kind, axis, tensor=None):
        if self.on_next_collective is not None:
            self.on_next_collective, callback = None, self.on_next_collective
            callback()
        self.started[axis] += 1
        self.last = kind, axis, None if tensor is None else (tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    n_nodes: int = 1
    launcher: str = "single"
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    threads: int = 1
    calls: CollectiveLog = field(default_factory=CollectiveLog, compare=False)

    @functools.cached_property
    def axis(self):
        """The collectives among all ranks, from before there is a mesh."""
        group = dist.group.WORLD if self.size > 1 else None
        return Axis("world", self.rank, self.size, group, tuple(range(self.size)), self.calls)

    def barrier(self):
        if self.size > 1:
            self.calls.record("barrier", "world")
            dist.barrier()  # moves nothing: all ranks wait for the last one


def detect(env):
    """-> (launcher, rank, size, local rank, local size) from a mapping of environment variables."""
    for launcher, names in FAMILIES.items():
        rank, size, local, local_size = (env.get(name) for name in names)
        if launcher == "pals" and rank is not None and local is not None and size is None:
            size = "-1"  # PALS_PMI=pmix gives no PMI_SIZE: mpi4py says it later
        if rank is None or size is None or local is None:
            continue
        local_size = (local_size or "1").split("(")[0].split(",")[0]  # slurm writes 4(x2)
        return launcher, int(rank), int(size), int(local), int(local_size)
    return "single", 0, 1, 0, 1


def env_rank():
    """This process's rank before launch(): enough to keep every rank but one quiet."""
    return detect(os.environ)[1]


def started_by():
    """-> (launcher, ranks) of this process, before launch()."""
    launcher, _, size, _, _ = detect(os.environ)
    return launcher, size


def as_torchrun(rank, size, port):
    """Make this process what torchrun's rank of this host would be: launch() then finds the others."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def bare_environment():
    """The environment without any launcher's variables: for a command that starts ranks of its own."""
    ours = ("PMI", "MPI_LOCAL", "HYD", "OMPI_", "PRTE_", "PALS_", "TORCHELASTIC_", "SLURM_STEP", "MASTER_")
    names = {name for family in FAMILIES.values() for name in family}
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(ours)}


def scheduler():
    """-> (name, job, number of nodes or None) of the batch system that this process runs in, or None.
    ValueError, in one line: the node file is none."""
    if "SLURM_JOB_ID" in os.environ:
        return "SLURM", os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NUM_NODES")
    if "PBS_JOBID" in os.environ:
        path = os.environ.get("PBS_NODEFILE")
        return "PBS", os.environ["PBS_JOBID"], None if path is None else count_hosts(path)
    return None


def count_hosts(path):
    """-> hosts in a node file of PBS, where each stands once per process. ValueError: why it is none."""
    try:
        with open(path, encoding="ascii", newline="\n") as f:
            hosts = {line.strip(" \t\n") for line in f} - {""}
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"the node file {path} cannot be read: {' '.join(str(e).split())}") from None
    wrong = next((host for host in hosts if not re.fullmatch(r"[\w.-]+", host)), None)
    if wrong is not None or not hosts:
        raise ValueError(f"the node file {path} names no host" if not hosts else
                         f"the node file {path} is no list of hosts: {wrong[:40]!r}")
    return len(hosts)


def _mpi(launcher, rank, size):
    """COMM_WORLD when it agrees with the launcher, None where srun runs without MPI, else a way out."""
    try:
        from mpi4py import MPI
    except ImportError:
        if launcher == "srun":
            return None
        raise SystemExit(f"nanoshard: {launcher} started {size} ranks but mpi4py is missing; pip install "
                         "mpi4py (or load the site's), or start with torchrun") from None
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) == (rank, size) or (size == -1 and comm.rank == rank):
        return comm
    if launcher == "srun":
        return None  # srun --mpi=none: every process is its own MPI world
    raise SystemExit(f"nanoshard: {launcher} started rank {rank} of {size} but mpi4py sees {comm.rank} of "
                     f"{comm.size}; mpiexec and mpi4py come from different MPIs: use the mpiexec of the MPI "
                     "mpi4py was built with")


def _address(n_nodes):
    """A name for this host that the other ranks can reach."""
    if n_nodes == 1:
        return "127.0.0.1"
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    try:  # slingshot machines: the IPv4 address of hsn0 (SIOCGIFADDR), whatever the hostname says
        import fcntl
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            return socket.inet_ntoa(fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", b"hsn0"))[20:24])
    except OSError:
        return socket.gethostname()


def _store(launcher, comm, rank, size, n_nodes, timeout):
    """The key-value store through which the ranks find each other -> TCPStore."""
    if launcher == "torchrun":
        return None  # env://, the agent holds the store
    if comm is not None:  # port 0: the kernel picks a free one, so two jobs on a host never clash
        store = dist.TCPStore(_address(n_nodes), 0, is_master=True, timeout=timeout,
                              wait_for_workers=False) if rank == 0 else None
        host, port = comm.bcast((store.host, store.port) if rank == 0 else None)
        return store or dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    nodes = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]],
                           capture_output=True, text=True, check=True).stdout.split()
    host = os.environ.get("MASTER_ADDR", "127.0.0.1" if len(nodes) == 1 else nodes[0])
    port = 20000 + (int(os.environ["SLURM_JOB_ID"]) * 31 + int(os.environ["SLURM_STEP_ID"])) % 20000
    return dist.TCPStore(host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)


LOST = ("closed by peer", "reset by peer", "remote process exited", "was likely closed", "roken pipe")


def _end_all_on_exception(rank, comm):
    """One rank's exception ends all, with its traceback once: without this, mpiexec waits for the ranks that
    still live, and those that lose their peer print a traceback each. comm: MPI's, or None."""
    def hook(kind, value, tb):
        lost = next((word for word in LOST if word in str(value)), None)
        if lost:  # another rank failed, and says why; the launcher has this long to end me before I speak
            time.sleep(3)
            why = " ".join(str(value).split())[:160]
            print(f"nanoshard: rank {rank} lost a peer ({why}): see its error",
                  file=sys.__stderr__, flush=True)
            os._exit(1)
        # not sys.stderr: torch wraps this hook and holds back what it writes there until after the abort
        traceback.print_exception(kind, value, tb, file=sys.__stderr__)
        sys.__stderr__.flush()
        time.sleep(0.2)  # mpiexec passes the text on before it hears of the abort
        if comm is not None:
            comm.Abort(1)
        os._exit(1)  # the groups are not left in order: no destructors
    sys.excepthook = hook


def _bind(local, local_size):
    """Choose the device, before the process group: a later set_device deadlocks some backends.
    -> (device, threads)"""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        index = local % torch.accelerator.device_count()  # one visible GPU per task also works
        torch.accelerator.set_device_index(index)
        return torch.device(kind, index), torch.get_num_threads()
    # MKL sees an MPI launcher and falls to 1 thread, srun gives every rank all cores: share them ourselves
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // local_size))
    return torch.device("cpu"), torch.get_num_threads()


def deterministic():
    """Only kernels that give the same bits in every run, before the first of them; one that has no such form
    raises an error. A mere warning (warn_only) would not do: cuDNN's attention then adds up in any order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it
    torch.use_deterministic_algorithms(True)


def launch(timeout=600.0, quiet=False):
    """Start this rank -> World. timeout: seconds a collective may wait. Prints one line per node."""
    launcher, rank, size, local, local_size = detect(os.environ)
    if launcher == "single":  # plain python never touches MPI
        device, threads = _bind(0, 1)
        world = World(device=device, threads=threads)
        if not quiet:
            _say(world)
        return world
    comm = None if launcher == "torchrun" else _mpi(launcher, rank, size)
    node, n_nodes = int(os.environ.get("SLURM_NODEID", rank // local_size)), -(-size // local_size)
    if comm is not None:
        from mpi4py import MPI
        size = comm.size
        host = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks that share this host's memory, in any order
        local_size, leader = host.size, host.bcast(rank)
        leaders = sorted(set(comm.allgather(leader)))
        node, n_nodes = leaders.index(leader), len(leaders)
    _end_all_on_exception(rank, comm)
    device, threads = _bind(local, local_size)
    backend = "none"
    if size > 1:
        fast = dist.get_default_backend_for_device(device)  # nccl, xccl or gloo
        backend = fast
        both = "gloo" if fast == "gloo" else f"cpu:gloo,{device.type}:{fast}"  # gloo: small host messages
        wait = timedelta(seconds=timeout)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # flight recorder: the last collectives
        store = _store(launcher, comm, rank, size, n_nodes, wait)
        where = ({"init_method": "env://"} if store is None
                 else {"store": store, "rank": rank, "world_size": size})
        dist.init_process_group(both, timeout=wait,
                                device_id=None if device.type == "cpu" else device, **where)
    world = World(rank, size, local, local_size, node, n_nodes, launcher, device, backend, threads)
    if not quiet and local == 0:
        _say(world)
    return world


def _say(w):
    chip = (torch.cuda.get_device_name(w.device) if w.device.type == "cuda"
            else f"cpu, {w.threads} threads per rank")
    print(f"[node {w.node + 1}/{w.n_nodes} {socket.gethostname()}] {w.launcher}: {w.local_size} of {w.size} "
          f"ranks here, {chip}, {w.backend}, torch {torch.__version__}", flush=True)


def shutdown(world):
    """Leave together. Groups must be gone before the interpreter is, or gloo aborts: call this when nothing
    that holds one (mesh, model, optimizer) is alive any more."""
    gc.collect()
    if dist.is_initialized():
        world.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def agreed(world):
    """Run the body; if it raised ValueError or OSError on any rank, print the first rank's text
    and exit 2 on all."""
    text = None
    try:
        yield
    except (ValueError, OSError) as e:
        text = " ".join(str(e).split())  # one line, whatever the message held
    for rank, t in enumerate(world.axis.gather_objects(text)):  # one short string per rank, over the world
        if t is not None:
            if world.rank == rank:
                print(f"nanoshard: {t}", file=sys.stderr, flush=True)
            raise SystemExit(2)


class Stop:
    """Why to stop early: a signal on any rank, or the wall clock. The handler only sets a flag."""

    def __init__(self, max_minutes):
        self.signal, self.limit, self.began = 0, max_minutes * 60, time.monotonic()
        self.step = self.save = 0.0  # the longest so far, in seconds
        for s in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(s, self._note)

    def _note(self, number, frame):
        self.signal = number

    def step_took(self, seconds):
        self.step = max(self.step, seconds)

    def save_took(self, seconds):
        self.save = max(self.save, seconds)

    def agreed(self, world):
        """-> a reason on all ranks at once, or None. Room is kept for two more steps and two saves."""
        late = self.limit and time.monotonic() - self.began + 2 * (self.step + self.save) > self.limit
        flags = torch.tensor([self.signal, int(bool(late))])
        world.axis.all_reduce(flags, MAX)  # two small integers on the host, over the world
        number, late = flags.tolist()
        return signal.Signals(number).name if number else "max-minutes" if late else None

"""How the ranks of a run start, meet and part, under python, mpiexec, torchrun and srun.

No other file reads the environment. Import this one before torch: it sets how torch's idle threads wait.
Torch itself, which takes seconds, is imported only in launch(), so that wrong flags are answered before.
"""
import contextlib
import fcntl
import functools
import gc
import os
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from config import Outcome
from interface.command_line import wrong_input
from interface.terminal import complain, say
from runtime.everyone import Everyone

# Read when torch is imported: waiting threads sleep, and leave the core to others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # --trace: torch prints lines of its own
# flash-attn-4 keeps what it compiles for the next run.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

NO_TIMEOUT = 30 * 86400.0  # seconds, longer than any run

# Which rank this process is

# Each launcher's variables for (rank, world size, local rank). The first that are set count, srun's last:
# only SLURM_STEP_NUM_TASKS says that srun started *this* process and not the script around it.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH and Intel MPI
    "cray": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


class Start(NamedTuple):
    launcher: str = "single"
    rank: int = 0
    size: int = 1  # -1 where only MPI knows it
    local_rank: int = 0


def started_by(env=os.environ):
    """Return this process's Start, also before launch(). ValueError: the environment describes none."""
    for launcher, names in LAUNCHERS.items():
        rank, size, local_rank = map(env.get, names)
        if launcher == "pals" and size is None:
            size = "-1"  # PALS_PMI=pmix sets no PMI_SIZE
        if None not in (rank, size, local_rank):
            return Start(launcher, int(rank), int(size), int(local_rank))
    if "RANK" in env and env.get("WORLD_SIZE", "1") != "1":  # each rank would train the whole model alone
        raise ValueError(f"RANK={env['RANK']} in the environment has no LOCAL_RANK: unset it, or start the "
                         "ranks with torchrun")
    return Start()


def end_others(start):
    """Let MPICH's mpiexec end the other ranks before they have met, as other launchers do by themselves."""
    if start.launcher == "hydra" and "PMI_FD" in os.environ:
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=2\n")


def job_id():
    """Return the scheduler's name of the job that this process runs in, or None."""
    return os.environ.get("PBS_JOBID") or os.environ.get("SLURM_JOB_ID")


# What a rank knows of the others

class CollectiveLog:
    """The collectives that this rank has started, which the watchdog reports when a run hangs."""

    def __init__(self):
        self.started = Counter()  # {axis: number of collectives}
        self.last = None  # (kind, axis, what it sends) of the newest one
        self.on_next_collective = None  # called once, where this rank's own work in a step ends

    def record(self, axis, kind, tensor=None, nbytes=0.0):
        """Note that this rank starts a collective, such as an "all-reduce", and sends nbytes in it."""
        callback = self.on_next_collective
        if callback is not None:
            self.on_next_collective = None
            callback()
        axis.sent[kind] += nbytes
        self.started[axis.name] += 1
        contents = ("a word",) if tensor is None else (tuple(tensor.shape), tensor.dtype)
        self.last = (kind, axis.name, contents)


def _cpu():
    import torch
    return torch.device("cpu")


@dataclass(frozen=True)
class World:
    """This process among all processes of the run. The default is a single process on a CPU."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = "single"
    device: Any = field(default_factory=_cpu)  # a torch.device
    timeout: timedelta | None = None  # how long a collective may wait; None: as torch does, 10 to 30 minutes
    calls: CollectiveLog = field(default_factory=CollectiveLog, compare=False)
    everyone: Everyone = field(default_factory=Everyone, compare=False)  # what the programs tell each other
    hosts: tuple = ("",)  # the host's name of each rank
    nodes: tuple = (0,)  # the node of each rank, numbered in the order of their first ranks

    @property
    def n_nodes(self):
        return len(set(self.nodes))

    @property
    def local_size(self):
        """The number of ranks on this rank's node."""
        return self.nodes.count(self.nodes[self.rank])

    @functools.cached_property
    def axis(self):
        """All ranks as a parallel.Axis, for collectives before there is a mesh."""
        from parallel import make_mesh
        return make_mesh(self).world


# Start and end

def launch(timeout=600.0, quiet=False):
    """Start this rank and return its World. timeout: seconds that a collective may wait. quiet: no line."""
    with wrong_input():
        start = started_by()
        if start.launcher == "single":  # plain python never touches MPI
            world = World(device=select_device(0, 1))
        else:
            world = _join(start, timedelta(seconds=timeout))
    if world.local_rank == 0 and not quiet:
        print_node(world)
    return world


def _join(start, wait):
    """Meet the other ranks, and return the World."""
    import torch.distributed as dist
    launcher, rank, size, local_rank = start
    comm = None if launcher == "torchrun" else _mpi_world(start)
    if comm is not None:
        size = comm.size
    node, n_nodes = _node(launcher, comm)
    end_all_on_exception(comm)

    calls = CollectiveLog()
    everyone = Everyone(rank, size, calls=calls)
    if size > 1:
        everyone.store = _meet(start, comm, n_nodes, wait)
    # two words from each rank to all, over the world
    hosts, nodes = zip(*everyone.gather((socket.gethostname(), node)), strict=True)
    first = list(dict.fromkeys(nodes))
    nodes = tuple(first.index(node) for node in nodes)
    device = select_device(local_rank, nodes.count(nodes[rank]))
    if size > 1:
        if max(nodes) == 0 and os.path.exists("/sys/class/net/lo"):  # gloo, too, listens on this host alone
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Only the device's own backend: nccl, xccl or, on a CPU, gloo, with a connection to each rank.
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, timeout=wait, store=everyone.store, rank=rank, world_size=size,
                                device_id=None if device.type == "cpu" else device)

    return World(rank, size, local_rank, launcher, device, wait, calls, everyone, hosts, nodes)


def print_node(world):
    """Print one line: this node, the launcher, the number of ranks here, and the device."""
    import torch

    from ops.accelerator import device_name
    chip = device_name(world.device)
    if world.device.type == "cpu":
        n_threads = torch.get_num_threads()
        chip = f"cpu, {n_threads} {'thread' if n_threads == 1 else 'threads'} per rank"
    backend = "" if world.size == 1 else f"{torch.distributed.get_backend()}, "
    place = f"[node {world.nodes[world.rank] + 1}/{world.n_nodes} {socket.gethostname()}]"
    say(f"{place} {world.launcher}: {world.local_size} of {world.size} ranks here, {chip}, "
        f"{backend}torch {torch.__version__}")
    n_gpus = 0 if world.device.type == "cpu" else torch.accelerator.device_count()
    if n_gpus > world.local_size:
        say(f"  uses {world.local_size} of {n_gpus} GPUs")


def shutdown(world):
    """Destroy the process groups, on all ranks at once. No mesh, model or optimizer may refer to one any
    more: gloo aborts if a group outlives the interpreter."""
    import torch.distributed as dist
    gc.collect()
    world.everyone.part()
    if dist.is_initialized():
        dist.destroy_process_group()


def end_all_on_exception(comm):
    """Make an exception on one rank end all ranks, for which mpiexec would wait. comm: MPI's, or None."""
    def hook(kind, value, trace):
        with contextlib.suppress(OSError):  # torch would keep what is written to sys.stderr until the abort
            traceback.print_exception(kind, value, trace, file=sys.__stderr__)
            sys.__stderr__.flush()
        time.sleep(0.2)  # mpiexec must pass the text on before it learns of the abort
        if comm is not None:
            comm.Abort(int(Outcome.FAILED))
        os._exit(int(Outcome.FAILED))  # the destructors of process groups would wait or abort

    sys.excepthook = hook


# The store by which the ranks meet

def _meet(start, comm, n_nodes, wait):
    """Return the TCPStore through which the ranks find each other: torchrun's, or one that rank 0 opens. The
    others learn its address through MPI, or where srun runs without MPI (comm is None) from the job."""
    import torch.distributed as dist
    if start.launcher == "torchrun":
        store, _, _ = next(dist.rendezvous("env://", timeout=wait))
        return store
    host = "127.0.0.1" if n_nodes == 1 else os.environ.get("MASTER_ADDR")
    if comm is None:
        if host is None:
            command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
            host = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]
        job = int(os.environ["SLURM_JOB_ID"]) * 31 + int(os.environ["SLURM_STEP_ID"])
        port = int(os.environ.get("MASTER_PORT", 20000 + job % 20000))
    else:
        host = host or _own_address()
        port = 0  # a free one, so that two jobs on a host never clash

    listener = None
    if start.rank == 0:
        # It listens only where the others connect, as it trusts everybody who reaches it; on all interfaces
        # if this host's name leads only to itself.
        address = socket.gethostbyname(host)
        if n_nodes > 1 and address.startswith("127."):
            address = ""
        server = socket.create_server((address, port), backlog=4096)
        port = server.getsockname()[1]
        listener = server.detach()
        host = address or host  # the other ranks might resolve the name to another address
    if comm is not None:
        host, port = comm.bcast((host, port))
    store = dist.TCPStore(host, port, is_master=start.rank == 0, timeout=wait, wait_for_workers=False,
                          master_listen_fd=listener)
    if comm is not None:
        store.add("met", 1)
        while store.add("met", 0) < comm.size:  # over tcp, MPICH's OFI sends only while a rank is in MPI
            comm.Iprobe()
            time.sleep(0.05)
    return store


def _own_address():
    """Return an address of this host that other nodes can reach: hsn0's on Slingshot machines."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            answer = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", b"hsn0"))  # SIOCGIFADDR
            return socket.inet_ntoa(answer[20:24])
    except OSError:
        return socket.gethostname()


# MPI, by which the ranks only meet: after that, torch's process groups take over

def _mpi_world(start):
    """Return MPI.COMM_WORLD if it agrees with the launcher, or None if srun runs without MPI.
    ValueError, with what to do: mpi4py is missing, or belongs to another MPI than the launcher."""
    # Slurm's pmi2 reads 1,024 bytes of a message and takes the rest for another one. MPICH's addresses of UCX
    # may be longer, those of OFI have 16 bytes.
    if start.launcher == "srun" and "PMI_FD" in os.environ and os.path.exists(f"{sys.prefix}/lib/mpich"):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    try:
        from mpi4py import MPI  # this import is MPI_Init, which waits for all ranks
        comm = MPI.COMM_WORLD
    except ImportError:
        if start.launcher == "srun":
            return None
        raise ValueError(f"{start.launcher} started {start.size} ranks but mpi4py is missing; pip install "
                         "mpi4py (or load the site's), or start with torchrun") from None
    if comm.rank == start.rank and start.size in (comm.size, -1):
        return comm
    if start.launcher == "srun":
        return None  # under srun --mpi=none every process is an MPI world of its own
    raise ValueError(f"{start.launcher} started rank {start.rank} of {start.size} but mpi4py sees "
                     f"{comm.rank} of {comm.size}; mpiexec and mpi4py come from different MPIs: use the "
                     "mpiexec of the MPI that mpi4py was built with")


def _node(launcher, comm):
    """Return (a word that the ranks of this node share, number of nodes, if the ranks have not met yet)."""
    if comm is not None:
        from mpi4py import MPI
        lowest = comm.Split_type(MPI.COMM_TYPE_SHARED).bcast(comm.rank)  # of this host's ranks
        return lowest, len(set(comm.allgather(lowest)))
    if launcher == "srun":
        return int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_STEP_NUM_NODES"])
    return os.environ.get("GROUP_RANK", socket.gethostname()), 1  # torchrun's; a job script sets none


# The device of this rank

def select_device(local_rank, local_size):
    """Return this rank's torch.device, and on a CPU set the number of threads. Call it before the process
    group is made: some backends deadlock when the device is set later."""
    import torch
    kind = "cpu"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
    if kind == "mps":
        kind = "cpu"
        if local_rank == 0:
            complain("nanoshard: Apple's GPU is not used, the CPU trains")
    if kind != "cpu":
        index = local_rank % torch.accelerator.device_count()  # a process may see only one device
        torch.accelerator.set_device_index(index)
        return torch.device(kind, index)

    # MKL uses one thread under an MPI launcher, and srun gives all cores to every rank.
    if "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // local_size))
    return torch.device("cpu")


def deterministic(on):
    """For --deterministic, before the first kernel: use only kernels that give the same bits in every run. An
    operation without one is an error: torch's warn_only would let cuDNN's attention add up in any order."""
    import torch
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it
    if on != torch.are_deterministic_algorithms_enabled():  # it imports torch._inductor, for seconds
        torch.use_deterministic_algorithms(on)

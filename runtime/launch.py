"""Which rank is this process, and how do the ranks start, stop and fail together?

One answer for plain python, torchrun, MPICH and Intel MPI (Hydra), Open MPI, PALS, Cray PMI and srun.

    detect          reads the launcher's variables: rank, size, local rank
    launch          picks the device, agrees on an address through MPI, makes the process group
    exit_together   turns wrong input on any rank into one line from one rank and exit code 2 on all
    attach_stdin, break_on_rank     --pdb RANK: one rank stops in the debugger

No other file reads the environment. Programs import this file before torch, whose threads spin otherwise.
"""
import contextlib
import functools
import gc
import json
import os
import pdb
import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

# OpenMP reads it when torch is imported: threads that wait sleep, and leave their core to whoever has work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist

from config import Outcome
from interface.command_line import one_line
from ops.accelerator import device_name
from parallel import Axis
from runtime import mpi, visible

# launcher: its variables for (rank, world size, local rank, local size); the first whose variables are set is
# taken. srun is last: only SLURM_STEP_NUM_TASKS says that srun started *this* process, not the batch script
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # mpich and intel mpi
    "cray": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


class CollectiveLog:
    """The collectives that this rank has started, counted per axis, and the last of them: what the watchdog
    reports when a run hangs."""

    def __init__(self):
        self.started, self.last = Counter(), None  # axis: how many; (kind, axis, (shape, dtype))
        self.on_next_collective = None  # called once: here the rank's own work in a step ends

    def record(self, kind, axis, tensor=None):
        """This rank is about to start a collective of this kind ("all-reduce") on tensor, over the axis."""
        if self.on_next_collective is not None:
            self.on_next_collective, callback = None, self.on_next_collective
            callback()
        self.started[axis] += 1
        self.last = kind, axis, None if tensor is None else (tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class World:
    """This process among all processes of the run. The default is a single process on a CPU."""
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
    shown: str | None = None  # the launcher's CUDA_VISIBLE_DEVICES for this process
    calls: CollectiveLog = field(default_factory=CollectiveLog, compare=False)
    nodes: list = field(default_factory=list, compare=False)  # of each rank, from launch() of several ranks

    @functools.cached_property
    def axis(self):
        """All ranks as a parallel.Axis, for collectives before there is a mesh."""
        group = dist.group.WORLD if self.size > 1 else None
        return Axis("world", self.rank, self.size, group, tuple(range(self.size)), self.calls)

    def barrier(self):
        if self.size > 1:
            self.calls.record("barrier", "world")
            dist.barrier()  # sends no data: all ranks wait for the last one


def detect(env):
    """-> (launcher, rank, size, local rank, local size) from a mapping of environment variables. size is -1
    where only MPI knows it. ValueError: a variable is not a number."""
    for launcher, names in LAUNCHERS.items():
        rank, size, local, local_size = (env.get(name) for name in names)
        if launcher == "pals" and rank is not None and local is not None and size is None:
            size = "-1"  # PALS_PMI=pmix sets no PMI_SIZE: mpi4py gives the size later
        if rank is None or size is None or local is None:
            continue
        local_size = (local_size or "1").split("(")[0].split(",")[0]  # slurm writes 4(x2)
        values = rank, size, local, local_size
        for name, value in zip(names, values, strict=True):
            if not re.fullmatch("-?[0-9]+", value):
                raise ValueError(f"{name}={value} in the environment is not a number: unset it, or start "
                                 f"the ranks with {launcher}")
        return launcher, *map(int, values)
    return "single", 0, 1, 0, 1


def env_rank():
    """-> this process's rank, before launch(): so that only one rank prints."""
    return detect(os.environ)[1]


def started_by():
    """-> (launcher, ranks) of this process, before launch()."""
    launcher, _, size, _, _ = detect(os.environ)
    return launcher, size


def as_torchrun(rank, size, port):
    """Set torchrun's variables for a rank of this host: launch() then finds the other ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def bare_environment():
    """-> the environment without any launcher's own variables, for a command that starts ranks itself."""
    ours = ("PMI", "MPI_LOCAL", "HYD", "OMPI_", "PRTE_", "PALS_", "TORCHELASTIC_", "SLURM_STEP", "MASTER_")
    names = {name for variables in LAUNCHERS.values() for name in variables}
    return {k: v for k, v in os.environ.items()
            if k.startswith("OMPI_ALLOW_RUN") or not (k in names or k.startswith(ours))}


def scheduler():
    """-> (name, job, number of nodes or PBS's file of hosts or None) of the batch system, or None."""
    if "SLURM_JOB_ID" in os.environ:
        return "SLURM", os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NUM_NODES")
    if "PBS_JOBID" in os.environ:
        return "PBS", os.environ["PBS_JOBID"], os.environ.get("PBS_NODEFILE")
    return None


def _address(n_nodes):
    """-> a name or an address of this host that the other ranks can reach."""
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


def _listen(host, port, n_nodes):
    """-> a socket that listens where the other ranks connect to, and nowhere else: the store trusts whoever
    reaches it. Where no such address is known it listens on all interfaces, and says so."""
    try:
        address = socket.gethostbyname(host)
        if n_nodes == 1 or not address.startswith("127."):
            return socket.create_server((address, port), backlog=4096)
    except OSError as e:
        address = e
    print(f"nanoshard: {host} is no address that {n_nodes} nodes can reach ({address}): the store listens on "
          "all interfaces; set MASTER_ADDR to listen on one", file=sys.stderr, flush=True)
    six = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), backlog=4096, dualstack_ipv6=six,
                                family=socket.AF_INET6 if six else socket.AF_INET)


def _store(launcher, comm, rank, size, n_nodes, timeout):
    """-> the TCPStore through which the ranks find each other: for torchrun, that of its agent."""
    if launcher == "torchrun":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    host, port, store = _address(n_nodes), 0, None  # 0: a free port, so two jobs on a host never clash
    if comm is None:  # srun without MPI: all ranks must guess the same
        nodes = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]],
                               capture_output=True, text=True, check=True).stdout.split()
        host = host if len(nodes) == 1 else os.environ.get("MASTER_ADDR", nodes[0])
        port = 20000 + (int(os.environ["SLURM_JOB_ID"]) * 31 + int(os.environ["SLURM_STEP_ID"])) % 20000
    if rank == 0:
        server = _listen(host, port, n_nodes)
        address, port = server.getsockname()[:2]
        host = host if address in ("0.0.0.0", "::") else address  # the others may resolve the name otherwise
        store = dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False,
                              master_listen_fd=server.detach())
    host, port = (host, port) if comm is None else comm.bcast((host, port))
    return store or dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


PEER_LOST = ("closed by peer", "reset by peer", "remote process exited", "was likely closed", "roken pipe")


def _end_all_on_exception(rank, comm):
    """Make an exception on one rank end all ranks, with one traceback. Otherwise mpiexec waits for the ranks
    that still run, and each rank that loses its connection to the failed one prints a traceback as well.
    comm: MPI's communicator, or None."""
    def hook(kind, value, tb):
        lost = next((text for text in PEER_LOST if text in str(value)), None)
        if lost:  # another rank failed and prints why
            time.sleep(3)  # give the launcher this long to end this rank before it prints, too
            why = " ".join(str(value).split())[:160]
            with contextlib.suppress(OSError):
                print(f"nanoshard: rank {rank} lost a peer ({why}): see its error",
                      file=sys.__stderr__, flush=True)
            os._exit(1)
        # not sys.stderr: torch wraps this hook, and keeps what is written there until after the abort
        with contextlib.suppress(OSError):
            traceback.print_exception(kind, value, tb, file=sys.__stderr__)
            sys.__stderr__.flush()
        time.sleep(0.2)  # mpiexec must pass the text on before it learns of the abort
        if comm is not None:
            comm.Abort(1)
        os._exit(1)  # without destructors: those of the process groups would wait or abort
    sys.excepthook = hook


def show_all_gpus(store, rank, size, local):
    """Let this process see every GPU that some process of its node sees -> (host of each rank, the index of
    the own GPU; None: nothing was changed). Call it before CUDA is initialised. Collective over the world."""
    def tell(key, value, ranks):
        store.set(f"{key}/{rank}", json.dumps(value))
        return [json.loads(text) for text in store.multi_get([f"{key}/{r}" for r in ranks])]

    given, host = os.environ.get(visible.VARIABLE), socket.gethostname()
    mine = host, local, given if visible.cuda_is_untouched() else None
    hosts, places, shown = zip(*tell("shown", mine, range(size)), strict=True)
    here = sorted((r for r in range(size) if hosts[r] == host), key=places.__getitem__)
    if joined := visible.join([shown[r] for r in here]):
        union, own = joined
        os.environ[visible.VARIABLE] = ",".join(union)
        if all(tell("sees all", visible.count_in_new_process() == len(union), here)):
            return hosts, union.index(own[here.index(rank)])
        os.environ[visible.VARIABLE] = given  # a cgroup hides GPUs from a process: choose.peer_access says so
    return hosts, None


def select_device(local, local_size, own=None):
    """Choose this rank's device -> (device, CPU threads). own: its index, if not by local rank. Call it
    before the process group is made: some backends deadlock when the device is set later."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        index = own if own is not None else local % torch.accelerator.device_count()  # it may see only one
        torch.accelerator.set_device_index(index)
        return torch.device(kind, index), torch.get_num_threads()
    # MKL takes 1 thread under an MPI launcher, and srun gives every rank all cores: divide the cores here
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // local_size))
    return torch.device("cpu"), torch.get_num_threads()


def deterministic(on):
    """--deterministic: use only kernels that give the same bits in every run. Call it before the first one.
    An operation without one raises an error; with warn_only, cuDNN's attention adds up in any order."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it
        torch.use_deterministic_algorithms(True)


def launch(timeout=600.0, quiet=False, joining=lambda where, size: None):
    """Start this rank -> World. timeout: seconds that a collective may wait. quiet: no line per node.
    joining: told before this rank waits for all to start, in MPI_Init and in the rendezvous; then ""."""
    launcher, rank, size, local, local_size = detect(os.environ)
    if launcher == "single":  # plain python never touches MPI
        device, threads = select_device(0, 1)
        world = World(device=device, threads=threads)
        if not quiet:
            print_node(world)
        return world
    if launcher == "srun" and "PMI_FD" in os.environ and os.path.exists(f"{sys.prefix}/lib/mpich"):
        # slurm's pmi2 reads 1,024 bytes of a message and takes the rest for another one. pip's MPICH sends
        # the addresses of UCX in pieces whose length depends on what memory holds; those of OFI have 16 bytes
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    joining("MPI_Init", size)
    comm = None if launcher == "torchrun" else mpi.world(launcher, rank, size)
    joining("the rendezvous", size)
    node, n_nodes = int(os.environ.get("SLURM_NODEID", rank // local_size)), -(-size // local_size)
    if comm is not None:
        from mpi4py import MPI
        size = comm.size
        host = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks of this host, in any order
        local_size, leader = host.size, host.bcast(rank)
        leaders = sorted(set(comm.allgather(leader)))
        node, n_nodes = leaders.index(leader), len(leaders)
    _end_all_on_exception(rank, comm)
    backend, hosts, own, shown = "none", [], None, os.environ.get(visible.VARIABLE)
    wait = timedelta(seconds=timeout)
    with mpi.progress(comm):
        if size > 1:
            store = _store(launcher, comm, rank, size, n_nodes, wait)
            hosts, own = show_all_gpus(store, rank, size, local)
        device, threads = select_device(local, local_size, own)
        if size > 1:
            backend = fast = dist.get_default_backend_for_device(device)  # nccl, xccl or gloo
            both = "gloo" if fast == "gloo" else f"cpu:gloo,{device.type}:{fast}"  # gloo: host memory
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's record of its last collectives
            if n_nodes == 1 and os.path.exists("/sys/class/net/lo"):  # gloo, too, listens on this host alone
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(both, timeout=wait, store=store, rank=rank, world_size=size,
                                    device_id=None if device.type == "cpu" else device)
    joining("", size)
    world = World(rank, size, local, local_size, node, n_nodes, launcher, device, backend, threads, shown)
    world.nodes.extend(list(dict.fromkeys(hosts)).index(host) for host in hosts)
    if not quiet and local == 0:
        print_node(world)
    return world


def print_node(w):
    """One line: this node, the launcher, how many ranks are here, the device. w: a World."""
    chip = f"cpu, {w.threads} threads per rank" if w.device.type == "cpu" else device_name(w.device)
    print(f"[node {w.node + 1}/{w.n_nodes} {socket.gethostname()}] {w.launcher}: {w.local_size} of {w.size} "
          f"ranks here, {chip}, {w.backend}, torch {torch.__version__}", flush=True)


def shutdown(world):
    """Destroy the process groups, on all ranks at once. Call it when nothing refers to a group any more: no
    mesh, model or optimizer. gloo aborts where a group outlives the interpreter."""
    gc.collect()
    if dist.is_initialized():
        world.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def exit_together(world):
    """Run the body on every rank. If it raised ValueError or OSError on any rank, the first such rank prints
    its message in one line and all ranks exit with code 2. Collective over the world."""
    text = None
    try:
        yield
    except (ValueError, OSError) as e:
        text = one_line(e)
    for rank, t in enumerate(world.axis.gather_objects(text)):  # one short string per rank, over the world
        if t is not None:
            if world.rank == rank:
                print(f"nanoshard: {t}", file=sys.stderr, flush=True)
            raise SystemExit(Outcome.WRONG_INPUT)


# -----------------------------------------------------------------------------
# --pdb RANK: breakpoint() stops that rank in pdb, anywhere in the code, and does nothing on the other ranks.
# launchers give the terminal to rank 0 (mpiexec, srun) and read it themselves, so the chosen rank cannot open
# /dev/tty. rank 0 passes on what is typed through a socket, protected by a secret that only these two ranks
# know; the debugger's answers come back through the launcher as all output does. torchrun's ranks share the
# terminal already. nothing times out in such a run: the other ranks wait in their next collective

NO_TIMEOUT = 30 * 86400.0  # seconds


def attach_stdin(world, rank):
    """Connect rank's stdin to what is typed at the launcher, and turn breakpoint() off on the other ranks.
    rank -1: do nothing. Collective over the world."""
    if world.rank != rank >= 0:
        sys.breakpointhook = lambda *args, **kw: None
    if world.size == 1 or rank < 0:
        return
    server = address = None
    if world.rank == rank and rank != 0 and not sys.stdin.isatty():
        server = socket.create_server(("127.0.0.1" if world.n_nodes == 1 else "", 0))
        host = "127.0.0.1" if world.n_nodes == 1 else socket.gethostname()
        address = host, server.getsockname()[1], secrets.token_hex(16)
    address = world.axis.broadcast_object(address, rank)  # host, port and secret, over the world
    if world.rank == 0 and address is not None:
        threading.Thread(target=_forward_stdin, args=address, daemon=True).start()
    if server is not None:
        while True:
            typed = server.accept()[0].makefile("r")
            if secrets.compare_digest(typed.readline().strip(), address[2]):
                break  # this is rank 0, not another process that found the open port
        server.close()
        sys.stdin = typed


def _forward_stdin(host, port, secret):
    """Rank 0: send what arrives on stdin to the chosen rank."""
    with socket.create_connection((host, port)) as there:
        there.sendall(f"{secret}\n".encode())
        while data := os.read(0, 1 << 16):  # not sys.stdin: its lock would be held when the interpreter ends
            there.sendall(data)


def break_on_rank(world, rank):
    """Stop the chosen rank in pdb, in the caller's frame; the other ranks go on."""
    if world.rank == rank:
        print(f"nanoshard: rank {rank} of {world.size} stops in pdb, the others wait; n: next line, s: into "
              "a call, c: go on (to a breakpoint() in the code, if any), q: end the run", flush=True)
        pdb.Pdb().set_trace(sys._getframe(1))

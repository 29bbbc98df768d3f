"""How the ranks start, stop and fail together.

    launch          choose the device, agree on an address through MPI, make the process group
    everyone        (runtime/everyone.py) wrong input on any rank: one line from one rank, exit code 2 on all

runtime/launcher.py reads which rank this process is. Programs import this file before torch, so that torch's
idle threads do not spin.
"""
import errno
import functools
import gc
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

# OpenMP reads this variable when torch is imported. With this value, waiting threads sleep and leave the core
# to others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # --trace: torch prints lines of its own
# flash-attn-4 keeps what it compiles for the next run. W1's kernels took 10 s on two cores.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

from runtime.launcher import torch_reads_environment

with torch_reads_environment():
    import torch
    import torch.distributed as dist

from config import Outcome, ceil_div
from interface.terminal import complain, one_line, say
from ops.accelerator import device_name
from parallel import Axis
from runtime import address, limits, mpi, visible
from runtime.abort import end_all_on_exception
from runtime.everyone import Everyone
from runtime.launcher import NO_TIMEOUT, detect, ranks_of_nodes, refuse, wrong_environment  # noqa: F401


class CollectiveLog:
    """The collectives that this rank has started, which the watchdog reports when a run hangs.

    started: {axis: number of collectives}. last: (kind, axis, (shape, dtype)) of the newest one, or None.
    """

    def __init__(self):
        self.started = Counter()
        self.last = None
        self.on_next_collective = None  # called once, where this rank's own work in a step ends

    def record(self, axis, kind, tensor=None, nbytes=0.0):
        """Note that this rank is about to start a collective over an Axis, for example an "all-reduce" of
        tensor, in which it sends nbytes."""
        callback = self.on_next_collective
        if callback is not None:
            self.on_next_collective = None
            callback()

        axis.sent[kind] += nbytes
        self.started[axis.name] += 1
        contents = None if tensor is None else (tensor.shape, tensor.dtype)
        self.last = (kind, axis.name, contents)


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
    timeout: timedelta | None = None  # how long a collective may wait; None: as torch does, 10 to 30 minutes
    calls: CollectiveLog = field(default_factory=CollectiveLog, compare=False)
    everyone: Everyone = field(default_factory=Everyone, compare=False)  # what the programs tell each other
    hosts: list = field(default_factory=list, compare=False)  # the host of each rank; empty for a single rank

    @functools.cached_property
    def axis(self):
        """All ranks as a parallel.Axis, for collectives before there is a mesh."""
        group = dist.group.WORLD if self.size > 1 else None
        return Axis("world", self.rank, self.size, group, tuple(range(self.size)), self.calls, self.everyone)

    @property
    def nodes(self):
        """The node of each rank, numbered in the order of their first ranks; empty for a single rank."""
        order = list(dict.fromkeys(self.hosts))
        return [order.index(host) for host in self.hosts]

    def barrier(self):
        """Wait until all ranks have arrived here. No data is sent."""
        self.everyone.barrier()

    @property
    def tree(self):
        return self.everyone


# -----------------------------------------------------------------------------
# The store through which the ranks find each other

def _address(n_nodes):
    """Return a name or an address of this host that the other ranks can reach."""
    if n_nodes == 1:
        return "127.0.0.1"
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]

    # On Slingshot machines it is the IPv4 address of hsn0, whatever the hostname says.
    try:
        return address.of_interface("hsn0")
    except OSError:
        return socket.gethostname()


def _slurm_address(n_nodes):
    """Return (host, port) of rank 0 where srun runs without MPI: all ranks must derive the same pair.

    ValueError: Slurm's variables or its scontrol are missing.
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        if name not in os.environ:
            refuse("srun", name, "is not set, though srun sets it")
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    try:
        nodes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except FileNotFoundError:
        raise ValueError("srun started the ranks, and scontrol, which knows their hosts, is not on the PATH: "
                         "load Slurm's module, or start the ranks with mpiexec or torchrun") from None
    except (OSError, subprocess.CalledProcessError) as e:
        said = (getattr(e, "stderr", "") or "").strip() or str(e)
        raise ValueError(f"{' '.join(command)} failed ({said.splitlines()[-1]}): set SLURM_CONF, or start "
                         "the ranks with mpiexec or torchrun") from None
    if not nodes:
        refuse("srun", f"SLURM_STEP_NODELIST={command[-1]}", "names no host")
    if len(nodes) == 1:
        host = _address(n_nodes)
    else:
        host = os.environ.get("MASTER_ADDR", nodes[0])

    if "MASTER_PORT" in os.environ:
        return host, int(os.environ["MASTER_PORT"])
    job = int(os.environ["SLURM_JOB_ID"])
    step = int(os.environ["SLURM_STEP_ID"])
    return host, 20000 + (job * 31 + step) % 20000


def _listen(host, port, n_nodes):
    """Return a socket that listens only on the address to which the other ranks connect.

    The store trusts everybody who can reach it. If the address is not known, the socket listens on all
    interfaces, and a printed line says so. ValueError: the port cannot be had.
    """
    try:
        return _server(host, port, n_nodes)
    except OSError as e:
        if e.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is taken" if e.errno == errno.EADDRINUSE else "needs root"
        raise ValueError(f"port {port} of {host}, by which the ranks find each other, {why}: set MASTER_PORT "
                         "to a free one, or start again") from None


def _check_name(host):
    """ValueError: this host knows no address of the name, so a rank would wait there until --timeout."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        raise ValueError(f"{host} has no address here: set MASTER_ADDR to a name or an address of rank 0's "
                         "host that all nodes know") from None


def _server(host, port, n_nodes):
    """Return the socket of _listen(). OSError: the port cannot be had."""
    try:
        address = socket.gethostbyname(host)
        if n_nodes == 1 or not address.startswith("127."):
            return socket.create_server((address, port), backlog=4096)
        problem = address
    except OSError as e:
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        problem = e

    complain(f"nanoshard: {host} is no address that {n_nodes} nodes can reach ({problem}): the store "
             "listens on all interfaces; set MASTER_ADDR to listen on one")
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), backlog=4096, dualstack_ipv6=both, family=family)


def _store(launcher, comm, rank, n_nodes, timeout):
    """Return the TCPStore through which the ranks find each other.

    torchrun's agent has opened one. Otherwise rank 0 opens the store and sends its address to the other ranks
    through comm, MPI's communicator. comm is None where srun runs without MPI. timeout: a timedelta.
    """
    if launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                refuse(launcher, name, "is not set, and by it the ranks find each other")
        _check_name(os.environ["MASTER_ADDR"])
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return store

    if comm is None:
        host, port = _slurm_address(n_nodes)
    else:
        host, port = _address(n_nodes), 0  # 0: a free port, so that two jobs on a host never clash

    store = None
    problem = None
    if rank == 0:
        try:
            store, host, port = _open_store(host, port, n_nodes, timeout)
        except ValueError as e:
            problem = e
            host = None
    if comm is not None:
        host, port = comm.bcast((host, port))  # also where rank 0 has no store: all ranks end together
    if problem is not None:
        raise problem
    if host is None:
        raise SystemExit(Outcome.WRONG_INPUT)  # rank 0 says why
    if store is None:
        _check_name(host)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return store


def _open_store(host, port, n_nodes, timeout):
    """Return rank 0's store, and the host and port by which the other ranks reach it."""
    _check_name(host)
    server = _listen(host, port, n_nodes)
    address, port = server.getsockname()[:2]
    if address not in ("0.0.0.0", "::"):
        host = address  # the other ranks might resolve the name to another address
    store = dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False,
                          master_listen_fd=server.detach())
    return store, host, port


# -----------------------------------------------------------------------------
# The device of this rank

def show_all_gpus(everyone, local_rank):
    """Let this process see every GPU that any process of its node sees.

    Return (host name of each rank, index of this rank's GPU or None if nothing was changed). Call it before
    CUDA is initialised. Collective over the world.
    """
    given = os.environ.get(visible.VARIABLE)
    shown = given if visible.cuda_is_untouched() else None
    told = everyone.gather((socket.gethostname(), local_rank, shown))  # a few words, over the world
    hosts = [host for host, _, _ in told]
    if all(text is None for _, _, text in told):
        return hosts, None

    here = [rank for rank, host in enumerate(hosts) if host == hosts[everyone.rank]]
    here.sort(key=lambda rank: told[rank][1])  # by local rank
    joined = visible.join([told[rank][2] for rank in here])
    sees_all = True
    if joined is not None:
        union, own = joined
        os.environ[visible.VARIABLE] = ",".join(union)
        sees_all = visible.count_in_new_process() == len(union)
    seen = everyone.gather(sees_all)  # one bool from each rank to all, over the world
    if joined is None:
        return hosts, None
    if not all(seen[rank] for rank in here):
        # A cgroup hides some of the GPUs from a process. fast.choose.peer_access reports it.
        os.environ[visible.VARIABLE] = given
        return hosts, None
    return hosts, union.index(own[here.index(everyone.rank)])


def select_device(local_rank, local_size, own=None):
    """Choose this rank's device. Return (device, number of CPU threads).

    own: the index of the device, if the local rank does not determine it. Call this function before the
    process group is made: some backends deadlock when the device is set later.
    """
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        index = own
        if index is None:
            index = local_rank % torch.accelerator.device_count()  # a process may see only one device
        torch.accelerator.set_device_index(index)
        return torch.device(kind, index), torch.get_num_threads()

    # MKL uses one thread under an MPI launcher, and srun gives all cores to every rank. So the cores are
    # divided here.
    if "OMP_NUM_THREADS" not in os.environ:
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count()
        torch.set_num_threads(max(1, cores // local_size))
    return torch.device("cpu"), torch.get_num_threads()


def deterministic(on):
    """For --deterministic: use only kernels that give the same bits in every run.

    Call it before the first kernel. An operation without such a kernel raises an error. torch's warn_only is
    not used, because it lets cuDNN's attention add up in any order.
    """
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it
    torch.use_deterministic_algorithms(on)


# -----------------------------------------------------------------------------
# Start and end

def _tell_nobody(where, size):
    """Ignore where this rank waits: the default of launch()."""


def launch(timeout=600.0, quiet=False, joining=_tell_nobody, waits=False):
    """Start this rank and return its World.

    timeout: seconds that a collective may wait. quiet: print no line per node. waits: where there
    is one node, the caller prints its line, after its own checks. joining(where, size): called
    before this rank waits for all ranks, in MPI_Init and in the rendezvous, and then with "" once all have
    come.
    """
    with wrong_environment():
        start = detect(os.environ)
    if start.launcher == "single":  # plain python never touches MPI
        device, threads = select_device(0, 1)
        world = World(device=device, threads=threads)
    else:
        world = _join(start, timeout, joining)
    later = waits and world.n_nodes == 1
    if not quiet and not later and world.local_rank == 0:
        print_node(world)
    return world


def _join(start, timeout, joining):
    """Meet the other ranks, and return the World. The arguments are those of launch(), after detect()."""
    launcher, rank, size, local_rank, _ = start
    _keep_messages_short_for_pmi2(launcher)
    joining("MPI_Init", size)
    with wrong_environment():
        comm = None if launcher == "torchrun" else mpi.world(launcher, rank, size)
    joining("the rendezvous", size)
    size, local_size, node, n_nodes = _place(start, comm)
    end_all_on_exception(rank, comm)

    shown = os.environ.get(visible.VARIABLE)
    hosts = []
    own = None
    backend = "none"
    wait = timedelta(seconds=timeout)
    calls = CollectiveLog()
    everyone = Everyone(rank, size, calls=calls)
    with mpi.progress(comm):
        if size > 1:
            with wrong_environment():
                limit = limits.raise_limit()
                limits.check(size, size if rank == 0 else 0, limit)  # rank 0's store has one for each rank
                store = _store(launcher, comm, rank, n_nodes, wait)
            everyone.store = store
            hosts, own = show_all_gpus(everyone, local_rank)
        device, threads = select_device(local_rank, local_size, own)
        if size > 1:
            # Only the device's own backend: nccl, xccl or, on a CPU, gloo, with a connection to each rank.
            backend = dist.get_default_backend_for_device(device)
            with everyone.input():
                limits.check(size, size if backend == "gloo" else 0, limit)
                if backend == "gloo":
                    _check_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", ""))
            _prepare_backends(n_nodes)
            dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=size,
                                    device_id=None if device.type == "cpu" else device)
    joining("", size)

    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, node=node,
                 n_nodes=n_nodes, launcher=launcher, device=device, backend=backend, threads=threads,
                 shown=shown, timeout=wait, calls=calls, everyone=everyone, hosts=hosts)


def _keep_messages_short_for_pmi2(launcher):
    """Let pip's MPICH start under Slurm's pmi2, which reads only 1,024 bytes of a message.

    Slurm takes the rest of a longer message for another message. MPICH sends the addresses of UCX in pieces
    whose length depends on what memory holds. The addresses of OFI have 16 bytes.
    """
    if launcher == "srun" and "PMI_FD" in os.environ and os.path.exists(f"{sys.prefix}/lib/mpich"):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


def _place(start, comm):
    """Return (world size, ranks on this node, this node, number of nodes).

    start: from detect(). comm: MPI's communicator, or None.
    """
    if comm is None:
        node = int(os.environ.get("SLURM_NODEID", start.rank // start.local_size))
        n_nodes = ceil_div(start.size, start.local_size)
        if start.launcher == "srun" and "SLURM_STEP_TASKS_PER_NODE" in os.environ:
            n_nodes = len(ranks_of_nodes(os.environ["SLURM_STEP_TASKS_PER_NODE"]))
        return start.size, start.local_size, node, n_nodes

    from mpi4py import MPI
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks of this host, in any order
    leader = host.bcast(start.rank)
    leaders = sorted(set(comm.allgather(leader)))
    return comm.size, host.size, leaders.index(leader), len(leaders)


def _check_interfaces(names):
    """ValueError: gloo cannot take one of these interfaces, NAME or NAME,NAME, for example a misspelt one."""
    for name in filter(None, names.split(",")):
        try:
            dist.ProcessGroupGloo.create_device(interface=name)
        except RuntimeError:
            there = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ValueError(f"GLOO_SOCKET_IFNAME={names[:60]} in the environment: this host has no network "
                             f"interface {name[:60]} with an address; unset it, or give one of {there}"
                             ) from None


def _prepare_backends(n_nodes):
    """Set the variables that torch and gloo read when the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the length of torch's record of collectives
    if n_nodes == 1 and os.path.exists("/sys/class/net/lo"):  # gloo, too, listens on this host alone
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def refuse_alone(world, error):
    """Print an error of one rank's input as one line. Return the exit code, if there is no other rank.

    Otherwise the error is raised: the others wait for this rank, and the hook above ends all of them.
    """
    if world.size > 1:
        raise error
    complain(f"nanoshard: {one_line(error)}")
    return Outcome.WRONG_INPUT


def print_node(world):
    """Print one line: this node, the launcher, the number of ranks here, and the device."""
    if world.device.type == "cpu":
        chip = f"cpu, {world.threads} {'thread' if world.threads == 1 else 'threads'} per rank"
    else:
        chip = device_name(world.device)
    backend = "" if world.size == 1 else f"{world.backend}, "
    place = f"[node {world.node + 1}/{world.n_nodes} {socket.gethostname()}]"
    say(f"{place} {world.launcher}: {world.local_size} of {world.size} ranks here, {chip}, "
        f"{backend}torch {torch.__version__}")


def shutdown(world):
    """Destroy the process groups, on all ranks at once.

    Call it when nothing refers to a group any more: no mesh, model or optimizer. gloo aborts if a group
    outlives the interpreter.
    """
    gc.collect()
    world.everyone.part()
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_together(world):
    return world.everyone.input()

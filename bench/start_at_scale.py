"""How does a start grow with the number of ranks? n forked ranks on one machine, for n = 4 to 64.

    python bench/start_at_scale.py                4 to 64 ranks, fits, and what 400 and 4,096 would need
    python bench/start_at_scale.py --ranks 4 8    these numbers of ranks

Each rank is train.py's own code on a tiny model, as one of 8 ranks of a node, in a process forked from one
that has imported torch. What is counted does not depend on how busy the machine is: bytes and sockets (the
kernel's TCP_INFO), CPU time.
Three kinds of connections are told apart:

    store    between a rank and the store, which is rank 0's
    tree     between the ranks of the host's tree (interface/tree.py)
    device   of the device's process groups, and what they say through the store; on a CPU they are gloo's, a
             connection for each pair of ranks. NCCL makes others.

As root, the ranks run in a network namespace of their own.
"""
import ctypes
import fcntl
import json
import math
import multiprocessing
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import read_flags, start

import torch
import torch.distributed as dist

import train
from config import Outcome
from interface.tree import children_of
from runtime import agree, launch, launcher, session, watch

MODEL = ("--data=synthetic", "--vocab-size=64", "--n-layer=1", "--n-head=2", "--n-kv-head=1", "--n-embd=32",
         "--ffn-hidden=64", "--seq-len=16", "--micro-batch=1", "--no-plot", "--eval-every=0",
         "--log-every=100", "--save-every=100", "--check-every=0", "--timeout=300")
STEPS = 8
PER_NODE = 8  # ranks of a node, as which they take part
PHASES = ("meet", "groups", "agree", "prepare", "step", "leave")
KINDS = ("store", "tree", "device")
LARGE = (400, 4096)  # ranks to extrapolate to
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP, PATIENCE = 0x40000000, 0x8914, 1, 300


@dataclass(frozen=True)
class Flags:
    ranks: tuple[int, ...] = (4, 8, 16, 32, 64)  # how many ranks to start, one number after another
    json: str = ""  # a file that gets all counts


# -----------------------------------------------------------------------------
# What a process counts

def own_network():
    """Give this process and its children a network of their own. Return whether they have one."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s.fileno(), SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


def connections():
    """Return [(own port, other port, bytes both ways)] of this process's open TCP connections."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            try:
                ends = copy.getsockname()[1], copy.getpeername()[1]
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except (OSError, IndexError, TypeError):  # it listens, or it is no TCP socket
                continue
            # From linux/tcp.h: tcpi_bytes_received, and tcpi_bytes_sent with tcpi_bytes_retrans.
            [received] = struct.unpack_from("Q", info, 128)
            sent, again = struct.unpack_from("QQ", info, 200)
            found.append((*ends, sent - again + received))
    return found


class Counts:
    """What one rank counts, by phase. Between two phases, all ranks wait for each other in shared memory."""

    def __init__(self, rank, store_port, barrier):
        self.rank = rank
        self.store_port = store_port
        self.barrier = barrier
        self.tree_ports = set()
        self.rows = {}
        self.before = dict.fromkeys((*KINDS, "cpu"), 0)

    def end(self, phase, steps=1):
        """Add what happened since the last call to a phase. steps: the number by which it is divided."""
        self.barrier.wait(PATIENCE)
        now = self.now()
        row = self.rows.setdefault(phase, dict.fromkeys(now, 0))
        for kind, value in now.items():
            row[kind] += (value - self.before[kind]) / steps
        self.barrier.wait(PATIENCE)
        self.before = {**now, "cpu": time.process_time()}

    def now(self):
        totals = {"cpu": time.process_time(), **dict.fromkeys(KINDS, 0)}
        self.sockets = dict.fromkeys(KINDS, 0)
        for own, other, n_bytes in connections():
            kind = "device"
            if self.store_port in (own, other):
                kind = "store"
            elif own in self.tree_ports:
                kind = "tree"
            totals[kind] += n_bytes
            self.sockets[kind] += 1
        return totals


def counted(function, counts, phase):
    """Return function, what it does counted as a phase of its own: of the device's groups."""
    def call(*args, **kwargs):
        counts.end(phase)
        result = function(*args, **kwargs)
        counts.end("groups")
        return result
    return call


# -----------------------------------------------------------------------------
# A rank

def run_rank(rank, size, port, barrier, folder):
    """Do what train.main() does, and write this rank's counts into folder."""
    launcher.as_torchrun(rank, size, port, min(size, PER_NODE))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    torch.set_num_threads(1)
    counts = Counts(rank, port, barrier)
    counts.end("fork")
    dist.init_process_group = counted(dist.init_process_group, counts, "meet")
    argv = [*MODEL, f"--steps={STEPS}", f"--out={folder / 'out'}"]
    with session.surround():
        cfg, wrong, timeout = session.parse_flags(train.plot.parse_or_list, argv)
        with watch.Watch(rank, timeout) as watchdog:
            world = launch.launch(launch.NO_TIMEOUT, True, watchdog.joining)
            watchdog.world = world
            tree = getattr(world, "tree", None)
            if tree is not None:
                counts.tree_ports = tree.ports()
            counts.end("meet")
            dist.new_group = counted(dist.new_group, counts, "prepare")
            agree.same_start(world, cfg, wrong)
            counts.end("agree")
            run = train.Run(cfg, world, watchdog)
            counts.end("prepare")
            train_and_count(run, counts)
            del run
            sockets = counts.sockets
            launch.shutdown(world)
    (folder / f"{rank}.json").write_text(json.dumps({"phases": counts.rows, "sockets": sockets}))


def train_and_count(run, counts):
    """Train. Between the second step and the last but one, no row is logged: these steps are counted."""
    begin_step = run.begin_step

    def begin(number):
        if number == 3:
            counts.end("first steps")
        if number == STEPS:
            counts.end("step", STEPS - 3)
        begin_step(number)

    run.begin_step = begin
    run.train()
    counts.end("leave")


def run_ranks(size):
    """Fork the ranks, and return [what each counted]. ValueError: a rank failed."""
    folder = Path(tempfile.mkdtemp(prefix="start-"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(size)
    ranks = [context.Process(target=run_rank, args=(rank, size, port, barrier, folder))
             for rank in range(size)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(PATIENCE)
        codes = [process.exitcode for process in ranks]
        if any(codes):
            raise ValueError(f"of {size} ranks these end with another code than 0: "
                             f"{ {rank: code for rank, code in enumerate(codes) if code} }")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    finally:
        for process in ranks:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


# -----------------------------------------------------------------------------
# What it comes to

def summary(ranks):
    """Return {what: number} of one start. ranks: what each rank counted."""
    host = [sum(rank["phases"][phase][kind] for phase in ("meet", "agree", "prepare") for kind in KINDS[:2])
            for rank in ranks]
    found = {"host: MB through one process": max(host) / 1e6,
             "host: MB of a middle rank": sorted(host)[len(host) // 2] / 1e6}
    for kind in KINDS:
        found[f"{kind}: sockets, most of rank 1 on"] = max(rank["sockets"][kind] for rank in ranks[1:])
    found["store: sockets of rank 0"] = ranks[0]["sockets"]["store"]
    for phase in ("meet", "agree", "prepare"):
        found[f"{phase}: CPU ms of rank 0"] = 1e3 * ranks[0]["phases"][phase]["cpu"]
    found["step: host bytes of rank 0"] = sum(ranks[0]["phases"]["step"][kind] for kind in KINDS[:2])
    found["step: host bytes of all"] = sum(rank["phases"]["step"][kind]
                                           for rank in ranks for kind in KINDS[:2])
    found["device: MB through the store for its groups"] = ranks[0]["phases"]["groups"]["store"] / 1e6
    found["device: MB of all, start without groups"] = sum(
        rank["phases"][phase]["device"] for rank in ranks for phase in ("agree", "prepare")) / 1e6
    found["device: bytes of rank 0 per step"] = ranks[0]["phases"]["step"]["device"]
    found["all: CPU s per rank"] = sum(row["cpu"] for rank in ranks for phase, row in rank["phases"].items()
                                       if phase != "fork") / len(ranks)
    return found


TERMS = {"a": lambda n: 1.0, "a + b log n": lambda n: math.log2(n), "a + b n": lambda n: n,
         "a + b n log n": lambda n: n * math.log2(n), "a + b n^2": lambda n: n**2,
         "a + b n^3": lambda n: n**3}


def fit(sizes, values):
    """Return (form, a, b) of the curve that fits best, of those in TERMS, by relative differences.

    A curve with more growth must be better by a fifth, so that noise makes no power.
    """
    best = None
    weights = torch.tensor([1 / max(abs(value), 1e-9) for value in values], dtype=torch.float64)
    for form, term in TERMS.items():
        columns = [[1.0] * len(sizes)]
        if form != "a":
            columns.append([term(n) for n in sizes])
        table = torch.tensor(columns, dtype=torch.float64).T * weights[:, None]
        goal = torch.tensor(values, dtype=torch.float64) * weights
        found = torch.linalg.lstsq(table, goal[:, None]).solution[:, 0]
        error = float((table @ found - goal).norm())
        if len(found) > 1 and found[1] < 0:  # it would be less than nothing for many ranks
            continue
        if best is None or error < 0.8 * best[0] - 1e-3:
            best = error, form, *found.tolist()
    _, form, a, *b = best
    return form, a, b[0] if b else 0.0


def extrapolated(sizes, values, n):
    """Return what a curve through the values would be at n ranks."""
    form, a, b = fit(sizes, values)
    return a + b * TERMS[form](n)


def tree_sockets(n):
    """Return the most connections of the tree that a rank other than 0 has, of n ranks."""
    return max(1 + len(children_of(rank, n, PER_NODE)) for rank in range(1, n))


EXACT = {"tree: sockets, most of rank 1 on": tree_sockets}  # what need not be extrapolated


def as_table(results):
    """Return the results, {ranks: summary()}, as a table."""
    sizes = sorted(results)
    head = ["", *map(str, sizes), "grows", *(f"{n:,}" for n in LARGE)]
    lines = ["| " + " | ".join(head) + " |",
             "|---" * (len(sizes) + 2 + len(LARGE)) + "|"]
    for what in results[sizes[0]]:
        values = [results[n][what] for n in sizes]
        form, large = "", ["" for _ in LARGE]
        if len(sizes) > 2:
            # Bytes have no noise, and nodes are full from 16 ranks on. CPU time needs all points.
            last = 0 if "CPU" in what else -3
            points = sizes[last:], values[last:]
            form = fit(*points)[0]
            far = [EXACT[what](n) if what in EXACT else extrapolated(*points, n) for n in LARGE]
            large = [f"{value:.3g}" for value in far]
            if what in EXACT:
                form = "by the tree's shape"
        cells = [what, *(f"{value:.3g}" for value in values), form, *large]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv=None):
    flags = read_flags(Flags, argv, "start_at_scale.py", "Count what a start of n ranks costs.")
    where = "a network namespace of its own" if own_network() else "this machine's network"
    results = {}
    for size in flags.ranks:
        counted_by_rank = run_ranks(size)
        results[size] = summary(counted_by_rank)
        print(f"{size} ranks in {where}: done", file=sys.stderr, flush=True)
        if flags.json:
            Path(flags.json).write_text(json.dumps(results))
    print(as_table(results))
    return Outcome.DONE


if __name__ == "__main__":
    start(main)

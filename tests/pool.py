"""Real ranks for the tests: a pool of processes that stays alive, gloo between them, torch imported once.

run_ranks(n, fn, *args) calls fn(world, *args) on n ranks, and returns their results as a list. fn must be a
function of a module that a worker can import. If a rank raises, dies or does not answer in time, the call
fails with that rank's traceback, and new workers serve the next one. A collective that the other ranks do not
match times out after COLLECTIVE seconds instead of hanging.
"""
import atexit
import contextlib
import gc
import itertools
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
context = mp.get_context("forkserver")
# torch.nn.attention.bias: the masks of context parallelism, whose import takes each rank longer than all else
context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.functional", "torch.testing",
                                "torch.utils.checkpoint", "torch.nn.attention.bias", "train"])
COLLECTIVE = 20  # seconds that a rank waits for the other ranks in a collective
AFTER_FAILURE = 2  # seconds that the other ranks have to say what they saw, after one has failed
LIMIT = 240  # seconds for a whole call; the longest call on an idle machine takes a small part of this
DYING = 10  # seconds to wait for the exit code of a worker whose pipe has closed

workers = []  # by rank
stores = None  # the folder of the FileStores; it is kept to the end, because a store needs its file
calls = itertools.count()


class Worker:
    """A process that serves one rank of each call. It says True when its imports are over."""

    def __init__(self):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # only the process holds this end, so the pipe closes when it dies
        self.ready = False

    def end(self, patience=0):
        """Wait `patience` seconds for the process, then kill it. Return in words how it ended."""
        self.process.join(patience)
        killed = self.process.exitcode is None
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return "was killed by the pool" if killed else f"died, exit code {code}{name}"


# -----------------------------------------------------------------------------
# The worker's side

def _serve(pipe):
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    gc.freeze()  # without this, each collection below would spend half a second on the imported modules
    pipe.send(True)
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            result, words = _run(pipe.recv_bytes())
            _send(pipe, result)
            pipe.recv_bytes()  # once all ranks have a result, none is still connecting to this rank
            del words
            gc.collect()  # mesh and model hold the groups in a reference cycle, and a group holds its threads
            if dist.is_initialized():
                dist.destroy_process_group()


def _run(job):
    """Run one call's function on this rank. Return ((True, value) or (False, traceback), the store that must
    live until all ranks have a result)."""
    import torch.distributed as dist

    from runtime.everyone import Everyone
    from runtime.launch import CollectiveLog, World
    words = None
    try:
        rank, size, path, fn, args = ForkingPickler.loads(job)  # imports fn's module
        if size > 1:
            store = dist.FileStore(path, size)
            store.set_timeout(timedelta(seconds=COLLECTIVE))  # the default is 300 s
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size,
                                    timeout=timedelta(seconds=COLLECTIVE))
            words = _words(store, rank)
            dist.barrier()  # else one that fails at once would take away what another still connects to
        calls = CollectiveLog()
        everyone = Everyone(rank, size, words, calls)
        world = World(rank=rank, size=size, local_rank=rank, launcher="test", calls=calls,
                      everyone=everyone, hosts=("",) * size, nodes=(0,) * size)
        return (True, fn(world, *args)), words
    except BaseException:
        return (False, traceback.format_exc()), words


def _words(store, rank):
    """Return a TCPStore of rank 0, as in a run; the FileStore `store` says where it is."""
    import torch.distributed as dist
    wait = timedelta(seconds=3 * COLLECTIVE)  # a client of a loaded machine may stall for seconds
    if rank:
        return dist.TCPStore("127.0.0.1", int(store.get("port")), timeout=wait, wait_for_workers=False)
    words = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
    store.set("port", str(words.port))
    return words


def _send(pipe, result):
    try:
        pipe.send(result)
    except Exception:  # a value that cannot be pickled fails the call, not the worker
        pipe.send((False, traceback.format_exc()))


# -----------------------------------------------------------------------------
# The tests' side

def run_ranks(n, fn, *args):
    """Return [fn(world, *args) of rank 0, of rank 1, ...].

    AssertionError: a rank raised, died or did not answer. Then new workers take the places of all n.
    """
    global stores
    if stores is None:
        stores = tempfile.mkdtemp(prefix="nanoshard-stores-")
        atexit.register(_close)
    _fill(n)
    path = f"{stores}/{next(calls)}"
    for rank in range(n):
        with contextlib.suppress(OSError):  # the worker has just died, and _collect will find its pipe closed
            workers[rank].pipe.send_bytes(ForkingPickler.dumps((rank, n, path, fn, args)))
    failed = ["interrupted"]
    try:
        results = _collect(n)
        failed = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(results.items()) if not ok]
    finally:  # also after Ctrl-C: a worker that is still busy would send this call's result to the next call
        for rank in range(n):
            if failed:
                workers[rank].end()
                workers[rank] = Worker()
            else:
                with contextlib.suppress(OSError):  # it has died after its result, and _fill will see it
                    workers[rank].pipe.send_bytes(b"leave")
    if failed:
        raise AssertionError("\n".join(failed))
    return [results[rank][1] for rank in range(n)]


def _fill(n):
    """Bring n workers past their imports, so that in a call no rank waits for another rank's imports."""
    for rank, worker in enumerate(workers):
        if not worker.process.is_alive():
            warnings.warn(f"the worker of rank {rank} {worker.end()}, between two calls", stacklevel=3)
            workers[rank] = Worker()
    while len(workers) < n:
        workers.append(Worker())
    for rank, worker in enumerate(workers[:n]):
        if not worker.ready:
            with contextlib.suppress(EOFError, OSError):
                worker.ready = worker.pipe.poll(LIMIT) and worker.pipe.recv()
            if not worker.ready:
                workers[rank] = Worker()
                raise AssertionError(f"rank {rank}: its worker could not start: it {worker.end(DYING)}")


def _collect(n):
    """Wait for all results, after a failure for a while. Return {rank: (True, value) or (False, text)}."""
    results = {}
    until = time.monotonic() + LIMIT
    while len(results) < n and (left := until - time.monotonic()) > 0:
        pipes = {workers[rank].pipe: rank for rank in range(n) if rank not in results}
        for pipe in connection.wait(list(pipes), left):
            rank = pipes[pipe]
            try:
                results[rank] = pipe.recv()
            except (EOFError, OSError):
                results[rank] = False, f"its worker {workers[rank].end(DYING)}"
        if not all(ok for ok, _ in results.values()):
            until = min(until, time.monotonic() + AFTER_FAILURE)
    for rank in range(n):
        results.setdefault(rank, (False, "it gave no answer, and its worker was killed by the pool"))
    return results


def _close():
    for worker in workers:
        worker.end()
    shutil.rmtree(stores, ignore_errors=True)

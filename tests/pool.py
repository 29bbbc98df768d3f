"""Real ranks for the tests: a pool of processes that stays alive, gloo between them, torch imported once.

run_ranks(n, fn, *args) calls fn(world, *args) on n ranks, and returns their results as a list. fn must be a
function of a module that a worker can import. If a rank raises, the call fails with that rank's traceback. A
collective that the other ranks do not match times out after COLLECTIVE seconds instead of hanging. A worker
that dies or does not answer in time fails the call that it works for, and a new worker replaces it.
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
AFTER_FAILURE = COLLECTIVE + 10  # seconds that the other ranks have to answer after one has failed
LIMIT = 240  # seconds for a whole call; the longest call on an idle machine takes a small part of this
DYING = 10  # seconds to wait for the exit code of a worker whose pipe has closed

# A worker sends READY once, then RESULT and IDLE for each call. Between these two it waits for a message that
# lets it leave its process group: if it left early, it could break connections that other ranks still make.
# GONE stands for a worker whose pipe has closed.
READY, RESULT, IDLE, GONE = "ready", "result", "idle", "gone"

workers = []  # by rank
stores = None  # the folder of the FileStores; it is kept to the end, because a store needs its file
calls = itertools.count()


class Worker:
    """A process that serves one rank of each call."""

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
    torch.set_num_threads(1)
    gc.freeze()  # without this, each collection below would spend half a second on the imported modules
    pipe.send((READY, None))
    problem = ""
    while not problem:
        try:
            job = pipe.recv_bytes()
        except EOFError:  # the tests are over
            return
        joined, result, words = _run(job)
        _send_result(pipe, result)
        try:
            pipe.recv_bytes()  # once all ranks have a result, none is still connecting to this rank
        except EOFError:
            return
        del words
        problem = _destroy_group() if joined else ": it could not join the process group"
        pipe.send((IDLE, problem))


def _run(job):
    """Run one call's function on this rank. Return (joined, (True, value) or (False, traceback), the store
    that must live until all ranks have a result).

    joined is False if the process group could not be made. Such a worker is of no further use: torch counts
    the group that failed, so it would look for its next peers under a name that differs from theirs.
    """
    import torch.distributed as dist

    from runtime.everyone import Everyone
    from runtime.launch import CollectiveLog, World
    joined = True
    words = None
    try:
        rank, size, path, fn, args = ForkingPickler.loads(job)  # imports fn's module
        if size > 1:
            joined = False
            store = dist.FileStore(path, size)
            store.set_timeout(timedelta(seconds=COLLECTIVE))  # the default is 300 s
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size,
                                    timeout=timedelta(seconds=COLLECTIVE))
            joined = True
            words = _words(store, rank)
            dist.barrier()  # else one that fails at once would take away what another still connects to
        calls = CollectiveLog()
        everyone = Everyone(rank, size, words, calls)
        world = World(rank=rank, size=size, local_rank=rank, launcher="test", calls=calls,
                      everyone=everyone, hosts=("",) * size, nodes=(0,) * size)
        return joined, (True, fn(world, *args)), words
    except BaseException:
        return joined, (False, traceback.format_exc()), words


def _words(store, rank):
    """Return a TCPStore of rank 0, as in a run; the FileStore `store` says where it is."""
    import torch.distributed as dist
    wait = timedelta(seconds=3 * COLLECTIVE)  # a client of a loaded machine may stall for seconds
    if rank:
        return dist.TCPStore("127.0.0.1", int(store.get("port")), timeout=wait, wait_for_workers=False)
    words = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
    store.set("port", str(words.port))
    return words


def _send_result(pipe, result):
    try:
        pipe.send((RESULT, result))
    except Exception:  # a value that cannot be pickled fails the call, not the worker
        pipe.send((RESULT, (False, traceback.format_exc())))


def _destroy_group():
    """Leave the process group. Return "", or what went wrong."""
    import torch.distributed as dist
    try:
        gc.collect()  # mesh and model hold the groups in a reference cycle, and each group holds its threads
        if dist.is_initialized():
            dist.destroy_process_group()
        return ""
    except BaseException:
        return f": its process group could not be destroyed:\n{traceback.format_exc()}"


# -----------------------------------------------------------------------------
# The tests' side

def run_ranks(n, fn, *args):
    """Return [fn(world, *args) of rank 0, of rank 1, ...].

    AssertionError: a rank raised, died or did not answer.
    """
    global stores
    if stores is None:
        stores = tempfile.mkdtemp(prefix="nanoshard-stores-")
        atexit.register(_close)
    _fill(n)
    path = f"{stores}/{next(calls)}"
    jobs = [ForkingPickler.dumps((rank, n, path, fn, args)) for rank in range(n)]
    for worker, job in zip(workers, jobs, strict=False):
        with contextlib.suppress(OSError):  # the worker has just died, and _collect will find its pipe closed
            worker.pipe.send_bytes(job)
    results = _collect(n)
    failed = [f"rank {r}: {value}" for r, (ok, value) in sorted(results.items()) if not ok]
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
                worker.ready = worker.pipe.poll(LIMIT) and worker.pipe.recv() == (READY, None)
            if not worker.ready:
                workers[rank] = Worker()
                raise AssertionError(f"rank {rank}: its worker could not start: it {worker.end(DYING)}")


def _collect(n):
    """Wait until every worker is idle again or replaced. Return {rank: (True, value) or (False, text)}."""
    results, busy, start = {}, set(range(n)), time.monotonic()
    until, waiting = start + LIMIT, set()  # waiting: ranks with a result, still in their group
    try:
        while busy and (left := until - time.monotonic()) > 0:
            pipes = {workers[rank].pipe: rank for rank in busy}
            for pipe in connection.wait(list(pipes), left):
                rank = pipes[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    kind, value = GONE, ""
                if kind == RESULT:
                    results[rank] = value
                    waiting.add(rank)
                    continue
                busy.remove(rank)
                if kind == GONE or value:
                    waiting.discard(rank)
                    _replace(rank, results, DYING, value)
            failed = not all(ok for ok, _ in results.values())
            if failed:
                until = min(until, time.monotonic() + AFTER_FAILURE)
            if failed or len(results) == n:
                _leave(waiting)
    finally:  # also after Ctrl-C: a worker that is still busy would send this call's result to the next call
        stuck, seconds = busy - waiting, time.monotonic() - start
        for rank in stuck:
            _replace(rank, results, 0, f" after {seconds:.0f} s without an answer")
        _leave(waiting)
        for rank in busy - stuck:
            idle = False
            with contextlib.suppress(EOFError, OSError):
                idle = workers[rank].pipe.poll(DYING) and workers[rank].pipe.recv() == (IDLE, "")
            if not idle:
                _replace(rank, results, 0, " because it could not leave its process group")
    return results


def _leave(waiting):
    """Tell the ranks that have a result to destroy their process groups."""
    for rank in waiting:
        with contextlib.suppress(OSError):
            workers[rank].pipe.send_bytes(b"leave")
    waiting.clear()


def _replace(rank, results, patience, why):
    text = f"its worker {workers[rank].end(patience)}{why}"
    if results.setdefault(rank, (False, text))[0]:  # keep the result: only what came after it went wrong
        warnings.warn(f"rank {rank}: after its result, {text}", stacklevel=4)
    workers[rank] = Worker()


def _close():
    for worker in workers:
        worker.end()
    shutil.rmtree(stores, ignore_errors=True)

"""Real ranks for the tests: a pool of processes that stays alive, gloo between them, torch imported once.

    run_ranks(n, fn, *args) -> [fn(world, *args) of rank 0, of rank 1, ...]
fn is a function of an importable test module. A rank that raises fails the call with that rank's traceback; a
collective that does not match times out after 20 s instead of hanging.
"""
import gc
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
context = mp.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.functional", "torch.testing",
                                "torch.utils.checkpoint", "train"])
workers = []


def _serve(pipe):
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    import torch.distributed as dist

    from runtime.launch import World
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: each collection below would walk through it for half a second
    while (job := pipe.recv()) is not None:
        rank, size, store, fn, args = job
        try:
            if size > 1:
                dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
                                        timeout=timedelta(seconds=20))
            world = World(rank=rank, size=size, local_rank=rank, local_size=size, launcher="test")
            result = ("ok", fn(world, *args))
        except BaseException:
            result = ("failed", traceback.format_exc())
        pipe.send(result)
        gc.collect()  # mesh and model hold the groups in a cycle, and each group its threads
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(n, fn, *args):
    while len(workers) < n:
        ours, theirs = context.Pipe()
        p = context.Process(target=_serve, args=(theirs,), daemon=True)
        p.start()
        workers.append((p, ours))
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(n):
            workers[rank][1].send((rank, n, f"{folder}/store", fn, args))
        results = [workers[rank][1].recv() for rank in range(n)]
    failed = [f"rank {r}: {text}" for r, (state, text) in enumerate(results) if state == "failed"]
    if failed:
        raise AssertionError("\n".join(failed))
    return [value for _, value in results]

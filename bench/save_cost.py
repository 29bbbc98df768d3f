"""What a checkpoint costs: bench/save_cost.py [PRESET] [train.py's flags] --save-every 10, under any launcher

It trains on synthetic tokens, first without saving, then with --keep saves (3 by default). It prints how
long a step waits when a save starts, the time of a step while a checkpoint is written and of a step alone,
the rates of saving and loading, and whether the loaded state equals the saved one.
"""
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import one_rank_speaks, start
from runtime.launch import launch, shutdown

import torch
from timing import synchronize
from training import Training

import checkpoint
from interface.command_line import parse
from ops.split_master import whole
from runtime import resume
from runtime.saver import Saver


def take_steps(training, count, save=None, every=0):
    """Return the seconds of each step with the start of its save, and the seconds of each such start.

    save(step) starts a save after every `every`-th step.
    """
    device = training.world.device
    seconds, stalls = [], []
    for _ in range(count):
        synchronize(device)
        began = time.perf_counter()
        training.step(training.batches(), full=True)
        synchronize(device)
        if save is not None and training.number % every == 0:
            middle = time.perf_counter()
            save(training.number)
            stalls.append(time.perf_counter() - middle)
        seconds.append(time.perf_counter() - began)
    return seconds, stalls


def timed(world, f):
    """Return the seconds of f() on all ranks together, and its result."""
    world.barrier()
    began = time.perf_counter()
    result = f()
    synchronize(world.device)
    world.barrier()
    return time.perf_counter() - began, result


def load_again(training, path):
    """Check and load a checkpoint.

    Return the seconds of the checksums, the seconds of the loading, and whether the state is as before.
    """
    world = training.world

    def pieces():
        return resume.own_pieces(training.data_parallel, training.opt, owned_only=False)

    crc, index = timed(world, lambda: checkpoint.check(path, world.rank, world.size))
    before = [whole(t).clone() for _, t, _, _ in pieces()]
    load, _ = timed(world, lambda: checkpoint.load(path, pieces(), index, others=index["tensors"]))
    same = all(torch.equal(a, whole(b)) for a, (_, b, _, _) in zip(before, pieces(), strict=True))
    return crc, load, same


def run(cfg, world):
    """Train, save and load, and return whether the loaded state equals the saved one."""
    with world.everyone.input():
        if cfg.save_every < 1 or cfg.keep < 1:
            raise ValueError("--save-every and --keep must be at least 1: they say how often to save")
        training = Training(cfg, world, without=["graph"])
    every, count = cfg.save_every, cfg.keep * cfg.save_every
    # a path from rank 0, over the world
    out = world.everyone.broadcast((cfg.out or tempfile.mkdtemp(dir=".")) if world.rank == 0 else None)
    saver = Saver(Path(out), world.everyone, keep=2, run_id=resume.run_id(world.everyone))

    def save(step):
        resume.save(cfg, training.mesh, training.data_parallel, training.opt, saver, resume.State(step=step))

    take_steps(training, every, save, every)  # warm up: buffers, allocator, the first write
    saver.wait()
    alone, _ = take_steps(training, count)
    saver.seconds = 0.0
    mixed, stalls = take_steps(training, count, save, every)
    began = time.perf_counter()
    assert saver.wait(), "the save failed"
    last = time.perf_counter() - began
    path = Path(out) / f"step_{saver.saved:06d}"
    gb = sum(f["bytes"] for f in checkpoint.read_index(path)["files"].values()) / 1e9
    crc, load, same = load_again(training, path)
    if world.rank == 0:
        mean, saving, stall = (1e3 * statistics.mean(t) for t in (alone, mixed, stalls))
        print(f"step alone {mean:.1f} ms; with {gb:.3f} GB saved over {world.size} ranks every {every} steps"
              f" {saving:.1f} ms: {100 * (saving / mean - 1):+.1f} %\n"
              f"stall at the start of a save {stall:.1f} ms, {100 * stall / mean:.1f} % of a step\n"
              f"copy to commit {saver.seconds:.2f} s, {gb / saver.seconds:.2f} GB/s (waited {last:.2f} s "
              f"at the end)\nchecksums {gb / crc:.2f} GB/s, load {gb / load:.2f} GB/s; same bits: {same}")
        if not cfg.out:
            shutil.rmtree(out)
    return same


def main(argv=None):
    with one_rank_speaks():
        cfg = parse(sys.argv[1:] if argv is None else argv, prog="save_cost.py", about=__doc__,
                    data="synthetic")
    world = launch()
    same = run(cfg, world)
    shutdown(world)
    assert same, "the loaded state differs from the saved one"


if __name__ == "__main__":
    start(main)

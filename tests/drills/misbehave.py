"""python misbehave.py FAULT STEP[,SECONDS] [flags of train.py]: a run whose last rank fails at that step.

    sleep     sleeps for ever                   held   sleeps for ever in C, holding the interpreter's lock
    mismatch  a collective that the other ranks do not call
    raise     an exception                      slow   50 ms more in this step and every later one
    flip      one bit of one weight changes    none   nothing
SECONDS: --timeout from that step on, so that a slow start is no hang. The last rank then fails once the
others have entered their next collective.
"""
import ctypes
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import train
from runtime import watch


def sleep_for_ever():
    time.sleep(10**6)


GRACE = 6.0  # seconds that a rank has to write its report


def hurry(watchdog, step, seconds):
    """Let the watchdog of this rank wait for so many seconds from now on."""
    watchdog.timeout = seconds
    watchdog.grace = GRACE
    watchdog.tick = seconds / 16
    watchdog.heartbeat(step)
    watchdog._set_alarms(seconds)


def hurry_at_the_next_collective(mesh, watchdog, step, seconds, waiting):
    """hurry() as soon as this rank begins to wait for the last one, and say so with a file."""
    calls = mesh.world.calls
    record = calls.record

    def record_and_hurry(*args):
        record(*args)
        calls.record = record
        hurry(watchdog, step, seconds)
        waiting.touch()
    calls.record = record_and_hurry


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def main(fault, at, argv, seconds=None):
    micro_batches, build, watchdog = train.micro_batches, train.build, watch.Watch
    seen = {"step": 0}

    def watch_and_keep(*args):
        seen["watchdog"] = watchdog(*args)
        return seen["watchdog"]

    def build_and_keep(*args):
        model, data_parallel, opt = build(*args)
        seen["model"] = model
        return model, data_parallel, opt

    def micro_batches_with_fault(cfg, mesh, source, first, count, device):
        seen["step"] += 1
        is_last = mesh.world.rank == mesh.world.size - 1
        if seen["step"] == at and seconds is not None:
            waiting = Path(cfg.out) / "waiting"
            if not is_last:
                hurry_at_the_next_collective(mesh, seen["watchdog"], at, seconds, waiting)
            else:
                if mesh.world.size > 1:
                    wait_for(waiting)
                hurry(seen["watchdog"], at, seconds)
        if is_last and (seen["step"] == at or fault == "slow" and seen["step"] > at):
            if fault == "sleep":
                sleep_for_ever()
            elif fault == "held":
                ctypes.PyDLL(None).sleep(10**6)
            elif fault == "mismatch":
                mesh.world.calls.record(mesh.world, "broadcast", torch.zeros(3))
                dist.broadcast(torch.zeros(3), 0)
            elif fault == "raise":
                raise RuntimeError(f"the planted exception of rank {mesh.world.rank}")
            elif fault == "slow":
                time.sleep(0.05)
            elif fault == "flip":
                p = next(p for n, p in seen["model"].named_parameters() if p.ndim == 2)
                p.data.view(torch.int32).view(-1)[3] ^= 1 << 20
        return micro_batches(cfg, mesh, source, first, count, device)

    train.micro_batches, train.build = micro_batches_with_fault, build_and_keep
    watch.Watch = watch_and_keep
    train.main(argv)


if __name__ == "__main__":
    step, _, limit = sys.argv[2].partition(",")
    main(sys.argv[1], int(step), sys.argv[3:], float(limit) if limit else None)

"""python misbehave.py FAULT STEP,SECONDS [flags of train.py]: a run whose last rank fails at that step.

    sleep     sleeps for ever               stop   is suspended, as by SIGSTOP
    none      nothing
SECONDS: --timeout from that step on, so that a slow start is no hang. The last rank then fails once the
others have entered their next collective.
"""
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
from runtime import session, watch

GRACE = 4.0  # seconds that a rank has to write its report


def sleep_for_ever():
    time.sleep(10**6)


FAULTS = {"sleep": sleep_for_ever, "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP), "none": lambda: None}


def hurry(watchdog, step, seconds):
    """Let the watchdog of this rank wait for so many seconds from now on."""
    watchdog.timeout = seconds
    watchdog.grace = GRACE
    watchdog.tick = seconds / 16
    watchdog.heartbeat(step)


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


def main(fault, at, seconds, argv):
    micro_batches, watchdog = train.micro_batches, watch.Watch
    seen = {"step": 0}

    def watch_and_keep(*args):
        seen["watchdog"] = watchdog(*args)
        return seen["watchdog"]

    def micro_batches_with_fault(cfg, mesh, *args):
        seen["step"] += 1
        if seen["step"] == at:
            waiting = Path(cfg.out) / "waiting"
            if mesh.world.rank < mesh.world.size - 1:
                hurry_at_the_next_collective(mesh, seen["watchdog"], at, seconds, waiting)
            else:
                while mesh.world.size > 1 and not waiting.exists():
                    time.sleep(0.01)
                hurry(seen["watchdog"], at, seconds)
                FAULTS[fault]()
        return micro_batches(cfg, mesh, *args)

    train.micro_batches = micro_batches_with_fault
    watch.Watch = watch_and_keep
    session.signals.catch()
    train.main(argv)


if __name__ == "__main__":
    step, _, limit = sys.argv[2].partition(",")
    main(sys.argv[1], int(step), float(limit), sys.argv[3:])

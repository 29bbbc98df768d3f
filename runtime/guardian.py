"""guardian.py PID STEP: the watchdog's last resort, a process beside each rank. PID is the rank's process.

Every few STEP seconds, the rank writes to the guardian's stdin how long the rank may stay silent. If it is
silent for longer, a C call holds its interpreter's lock, none of its threads can act, and the guardian kills
it. Only time in which both processes run counts: a suspended rank (SIGSTOP, SLURM's suspend, a closed lid)
does not hang.
"""
import os
import select
import signal
import sys
import time

STDIN = 0


def main(pid, step):
    # With srun these signals go to all processes of a step, and so to this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    left = float("inf")  # seconds that the rank may stay silent
    last = time.monotonic()
    while left > 0:
        ready, _, _ = select.select([STDIN], [], [], step)
        if ready:
            data = os.read(STDIN, 1 << 16)
            if not data:
                return  # the rank has ended
            left = float(data.split()[-1])

        now = time.monotonic()
        if not is_stopped(pid):
            left -= min(now - last, 2 * step)  # in a longer gap this process was stopped as well
        last = now

    is_our_rank = os.getppid() == pid  # and not another process that has the number of a rank that is gone
    if is_our_rank:
        os.kill(pid, signal.SIGKILL)


def is_stopped(pid):
    """Whether the process is suspended. Without /proc, only what stops both processes is noticed."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            state = f.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

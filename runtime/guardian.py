"""guardian.py PID STEP: the watchdog's last resort, a process beside each rank, whose number is PID.

On stdin the rank writes, every few STEP seconds, how long it may stay silent. If it does for longer, a C call
holds its interpreter's lock, and none of its threads can act: it is killed. Only time in which both processes
run counts: a suspended rank (SIGSTOP, SLURM's suspend, a closed lid) is not a hung one.
"""
import os
import select
import signal
import sys
import time


def is_stopped(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False  # no /proc: then only what stops both processes is noticed


pid, step = int(sys.argv[1]), float(sys.argv[2])
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(s, signal.SIG_IGN)  # srun sends them to all processes of a step
left, last = float("inf"), time.monotonic()
while left > 0:
    if select.select([0], [], [], step)[0]:
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit()  # the rank has ended
        left = float(data.split()[-1])
    if not is_stopped(pid):
        left -= min(time.monotonic() - last, 2 * step)  # a longer gap: this process was stopped as well
    last = time.monotonic()
if os.getppid() == pid:  # not another process with the number of a rank that is gone
    os.kill(pid, signal.SIGKILL)

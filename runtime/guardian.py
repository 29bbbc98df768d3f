"""guardian.py PID STEP STACKS RANK: a process beside each rank. PID is the rank's process.

It is the watchdog's last resort. Every few STEP seconds, the rank writes to the guardian's stdin how long the
rank may stay silent. If it is silent for longer, a C call holds its interpreter's lock, none of its threads
can act, and the guardian kills it. Only time in which both processes run counts: a suspended rank (SIGSTOP,
SLURM's suspend, a closed lid) does not hang.

It also brings the rank's stacks to their place. They are written into STACKS, the descriptor of a file
without a name on the node's own disk. The guardian appends them to the file of this node that the rank names
in a line "> PATH". So a run that does not hang makes no file per rank on the disk that all nodes share.

A rank that is killed says nothing. The guardian of rank 0 notices that its rank ended without the line
"bye", and prints which command goes on, from what the rank wrote in a line "! JSON". A rank that leaves at
once, and has said why, writes "left" before: then the guardian names no cause.
"""
import contextlib
import json
import os
import re
import select
import signal
import sys
import time

STDIN = 0
UNKNOWN = "the run ended before its last step (killed, out of memory, or by an error above): "


def main(pid, step, stacks, rank):
    # With srun these signals go to all processes of a step, and so to this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    left = float("inf")  # seconds that the rank may stay silent
    last = time.monotonic()
    collector = Collector(stacks, rank)
    ended = False
    commands = None  # of if_killed() in runtime/hang.py
    cause = UNKNOWN
    while left > 0 and not ended:
        ready, _, _ = select.select([STDIN], [], [], step)
        if ready:
            data = os.read(STDIN, 1 << 16)
            ended = not data
            for line in data.decode().splitlines():
                if line.startswith("> "):
                    collector.path = json.loads(line[2:])
                elif line.startswith("! "):
                    commands = json.loads(line[2:])
                elif line == "bye":
                    commands = None
                elif line == "left":
                    cause = ""
                else:
                    left = float(line)

        now = time.monotonic()
        if not is_stopped(pid):
            left -= min(now - last, 2 * step)  # in a longer gap this process was stopped as well
        last = now
        collector.collect()

    is_our_rank = os.getppid() == pid  # and not another process that has the number of a rank that is gone
    if is_our_rank and not ended:
        os.kill(pid, signal.SIGKILL)
    collector.collect(unfinished=True)
    if commands is not None:
        say_how_to_go_on(cause, *commands)


def say_how_to_go_on(cause, folder, out, again, anew):
    """Print one line on stderr for a run that was killed: how far its checkpoints go, and what to type.

    cause: how the line begins. folder: its --out as an absolute path; out: as it was typed. again, anew:
    commands.
    """
    steps = []
    with contextlib.suppress(OSError):
        steps = [int(name[5:]) for name in os.listdir(folder) if re.fullmatch("step_[0-9]+", name)]
    if steps:
        what = f"{out} has a checkpoint of step {max(steps)}; to go on from there, type: {again}"
    else:
        what = f"{out} has no checkpoint yet; to start again at step 1, type: {anew}"
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode(f"nanoshard: {cause}{what}\n"))


class Collector:
    """Appends what a rank writes into a file without a name to a file that the ranks of its node share."""

    def __init__(self, stacks, rank):
        self.stacks = stacks  # a descriptor
        self.rank = rank
        self.path = None
        self.size = 0  # bytes of stacks when we looked last
        self.copied = 0  # bytes

    def collect(self, unfinished=False):
        """Append what is new, in one piece, as soon as nothing more has come since the last call."""
        before, self.size = self.size, os.fstat(self.stacks).st_size
        if self.path is None or self.size == self.copied or self.size != before and not unfinished:
            return
        text = os.pread(self.stacks, self.size - self.copied, self.copied)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:
            return  # the next call tries again
        os.write(file, f"--- rank {self.rank}\n".encode() + text)
        os.close(file)
        self.copied = self.size


def is_stopped(pid):
    """Whether the process is suspended. Without /proc, only what stops both processes is noticed."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            state = f.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""Notice what no exception reports: a run that hangs, a rank that is slow.

    Watch        a thread per rank: ends a hung run with code 43 and says which rank it waits for
    Stragglers   compares the time that each rank needs for its own work
"""
import collections
import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from config import Outcome
from interface.terminal import complain, say
from runtime.timing import Stopwatch

# The watchdog. A rank that waits in a collective cannot know for which rank. So each, by its own clock,
# writes to OUT/hang/ its stacks, and how many collectives it has begun on each axis. After a grace the lowest
# rank that wrote reads what all wrote: who began fewer than its partners is waited for.

SLOW_PHASE_FACTOR = 2  # start, compilation, evaluation and saving may take this many times --timeout
UNEQUAL = "pp"  # its stages send different numbers of messages; on any other axis all start the same
ROOT = Path(__file__).resolve().parent.parent


class Watch(contextlib.AbstractContextManager):
    """The watchdog of this rank, from before launch() on. Progress is a heartbeat() or a collective that
    begins. Time in which the process is suspended does not count.
    """

    def __init__(self, rank, timeout):
        self.rank = rank
        self.timeout = timeout  # seconds
        self.grace = min(timeout / 4, 10.0)
        self.world = None
        self.folder = None
        self.main = threading.get_ident()
        self.heartbeat(0, "start")
        # Where a C call holds the interpreter's lock, as in MPI_Init, only this can end the process (code 1).
        # It also counts suspended time, and so it ends with the start.
        faulthandler.dump_traceback_later(self.limit + 2 * self.grace, exit=True, file=sys.__stderr__)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def heartbeat(self, step, what=""):
        """Say that the main thread is alive, and starts a step, or a slow phase of it ("first", "save")."""
        self.last = time.monotonic()  # set first: the thread must not see an old time with a shorter limit
        self.step = step
        self.what = what
        self.limit = self.timeout * (SLOW_PHASE_FACTOR if what else 1)

    def started(self, world):
        """Say that all ranks have met. world: a runtime.launch.World."""
        faulthandler.cancel_dump_traceback_later()
        self.world = world
        self.heartbeat(0, "start")

    def set_run(self, mesh, out, run_id):
        """Write to OUT/hang/RUN_ID from now on, which no restart overwrites. No process group is kept."""
        self.axes = {name: axis.ranks for name, axis in mesh.axes().items() if name != UNEQUAL}
        self.folder = Path(out) / "hang" / run_id

    def __exit__(self, *error):
        self.stopping.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        tick = min(1.0, self.timeout / 16)
        seen = 0
        before = time.monotonic()
        while not self.stopping.wait(tick):
            now = time.monotonic()
            gap = now - before - tick
            if gap > 1 + 2 * tick:  # suspended, or kept from running
                self.last = min(now, self.last + gap)
            before = now
            begun = sum(self.world.calls.started.values()) if self.world else 0
            if begun != seen:
                seen = begun
                self.last = now
            if now - self.last > self.limit:
                self._end_hung_run()

    def _end_hung_run(self):
        # A disk that does not answer must not keep this thread.
        faulthandler.dump_traceback_later(5 * self.grace, exit=True, file=sys.__stderr__)
        with contextlib.suppress(OSError):
            if self.folder is None:
                complain(f"nanoshard: rank {self.rank} waited {self.limit:.0f} s at the start, in "
                         f"{current_place(self.main)}: did all ranks start?")
                faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            else:
                self._report_hang()
        os._exit(Outcome.HUNG)

    def _report_hang(self):
        calls = self.world.calls
        last = "no collective yet"
        if calls.last is not None:
            kind, axis, contents = calls.last
            sent = " ".join(map(str, contents))
            last = f"last collective {calls.started[axis]} over {axis}: {kind} of {sent}"
        mine = {"rank": self.rank, "step": self.step, "what": self.what,
                "silent": time.monotonic() - self.last, "place": current_place(self.main),
                "begun": dict(calls.started), "last": last, "axes": self.axes}
        file = self.folder / f"rank_{self.rank:05d}.json"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(file.with_suffix(".txt"), "w") as stacks:
                faulthandler.dump_traceback(stacks, all_threads=True)
            file.write_text(json.dumps(mine))
        time.sleep(self.grace)  # all ranks must have written: the launcher kills them when the first exits

        reports = {self.rank: mine}
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError, ValueError):
                report = json.loads(path.read_text())
                reports[report["rank"]] = report
        is_first = self.rank == min(reports)
        if is_first:
            complain(verdict(reports, self.world.size, self.timeout, self.world.hosts))
            complain(f"  all stacks: {self.folder}")
        # When a rank exits, the launcher kills the others. MPICH's then takes the exit code of the lowest
        # rank: if that was killed, 9 and not ours. So the others wait for longer.
        time.sleep(self.grace / 2 if is_first else self.grace)


def current_place(thread):
    """Return where a thread is: the innermost line of our own code."""
    for frame, line in traceback.walk_stack(sys._current_frames()[thread]):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f"{frame.f_code.co_name} ({path.name}:{line})"
    return "a library"


# The verdict on the reports of a hung run

def verdict(reports, size, timeout, hosts=()):
    """Return the text to print: the cause, then where each rank is, then the hosts of the ranks to blame.
    reports: {rank: report}. hosts: of all ranks."""
    silent = max(report["silent"] for report in reports.values())
    missing = [rank for rank in range(size) if rank not in reports]
    late = missing or late_ranks(reports)
    why = "all ranks began as many collectives: do they differ below? Else a device or a file is silent"
    if missing:
        why = (f"{format_ranks(missing)} did not answer: suspended, gone, in a C call that holds the "
               "interpreter, or in its first step or a save, which may take twice as long")
    elif late:
        why = f"{format_ranks(late)} began fewer collectives than the others, which wait"
    lines = [f"nanoshard: hung: no progress for {silent:.1f} s (--timeout {timeout:g}); {why}"]
    ranks_at = {}  # description: ranks
    for rank, report in sorted(reports.items()):
        text = f"step {report['step']} {report['what']}".strip()
        ranks_at.setdefault(f"{text}, in {report['place']}, {report['last']}", []).append(rank)
    lines += [f"  {format_ranks(ranks)}: {text}" for text, ranks in ranks_at.items()]
    for host in dict.fromkeys(hosts):  # scripts/restart.sh reads these lines
        ranks = [rank for rank in late if hosts[rank] == host]
        if ranks:
            lines.append(f"nanoshard: host of {format_ranks(ranks)}: {host}")
    return "\n".join(lines)


def late_ranks(reports):
    """Return the ranks that are furthest behind a partner, on any axis, in collectives begun; [] if none."""
    late = {}  # (most that a partner began - begun, axis): ranks
    for rank, report in sorted(reports.items()):
        for axis, partners in report["axes"].items():
            most = max(reports[partner]["begun"].get(axis, 0) for partner in partners)
            late.setdefault((most - report["begun"].get(axis, 0), axis), []).append(rank)
    behind = max(late, default=(0, ""))
    return late[behind] if behind[0] > 0 else []


def format_ranks(numbers):
    """[0, 1, 2, 5] -> "ranks 0, 1, 2, 5"."""
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers))}"


# Slow ranks. All ranks finish a step together, so each rank's own time is compared, from the start of the
# step to its first collective, within its stage of the pipeline. In a CUDA graph only delays before it show.

SLOW_RATIO, SLOW_MARGIN_MS = 1.2, 2.0  # above the stage's median, both: short steps vary
SLOW_STREAK = 3  # intervals in a row after which a rank is reported


class Stragglers:
    """Finds slow ranks. Call begin() at each step and report() at each logged step, on all ranks."""

    def __init__(self, mesh, device):
        self.world = mesh.world
        self.stage = mesh.stage.size
        self.watch = Stopwatch(device)
        self.cuda = device.type == "cuda"
        self.spans = []  # (begin, end) of this rank's own work in each step
        self.slow_streak = collections.Counter()  # {rank: intervals in a row}

    def begin(self):
        """Measure from now, the start of a step, until this rank's first collective."""
        self.start = self.watch.mark()
        self.world.calls.on_next_collective = self.stop

    def stop(self):
        if self.cuda and torch.cuda.is_current_stream_capturing():
            return  # a captured event has no time
        self.spans.append((self.start, self.watch.mark()))

    def report(self):
        """Return {step_ms_min, step_ms_max, slowest_rank} since the last call, and print who is slow.
        Collective over the world."""
        spans = self.spans
        self.spans = []
        if self.world.size == 1 or not spans:
            return {}
        own = sum(self.watch.ms(begin, end) for begin, end in spans) / len(spans)
        ms = self.world.everyone.gather(own)  # one number from each rank, over the world
        if self.world.rank == 0:
            self.say_slow(ms)
        return {"step_ms_min": min(ms), "step_ms_max": max(ms), "slowest_rank": ms.index(max(ms))}

    def say_slow(self, ms):
        """Print a line for each rank that is slow for the SLOW_STREAK-th time. ms: of each rank."""
        for rank, own in enumerate(ms):
            first = rank // self.stage * self.stage
            median = statistics.median(ms[first:first + self.stage])
            if own <= max(SLOW_RATIO * median, median + SLOW_MARGIN_MS):
                self.slow_streak[rank] = 0
                continue
            self.slow_streak[rank] += 1
            if self.slow_streak[rank] == SLOW_STREAK:
                say(f"slow rank {rank}: {own:.1f} ms of its own per step, the median of its "
                    f"stage is {median:.1f} ({SLOW_STREAK} logs running)")

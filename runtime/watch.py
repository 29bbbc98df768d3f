"""Notice what no exception reports: a run that hangs, a rank that is slow.

    Watch        a thread per rank: ends a hung run with code 43 and says which rank it waits for
    Stragglers   compares the time that each rank needs for its own work
"""
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
from runtime.session import signals, write_stacks
from runtime.timing import Stopwatch

# -----------------------------------------------------------------------------
# The watchdog. A rank that waits in a collective cannot know which rank it waits for. So each rank, by its
# own clock, writes to OUT/hang/ its stacks, and how many collectives it has begun on each axis. After a grace
# the lowest rank that wrote reads what all wrote: who began fewer than its partners is waited for.

SLOW_PHASE_FACTOR = 2  # start, compilation, evaluation and saving may take this many times --timeout
# On the other axes all ranks start the same collectives. Over pp, stages send different numbers of messages.
UNEQUAL = ("pp",)
ROOT = Path(__file__).resolve().parent.parent


class Watch(contextlib.AbstractContextManager):
    """The watchdog of this rank. Progress is a heartbeat() or a collective that begins.

    Make it before launch(). Then call started(), and set_mesh() and set_folder() when the mesh and --out
    exist. Time in which the process is suspended does not count.
    """

    def __init__(self, rank, timeout):
        self.rank = rank
        self.timeout = timeout  # seconds
        self.grace = min(timeout / 4, 10.0)
        self.tick = min(1.0, timeout / 16)
        self.world = None
        self.axes = {}  # name: ranks
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

    def set_mesh(self, mesh):
        """Tell which ranks share an axis with this one; no process group is kept, they must end before."""
        self.axes = {name: axis.ranks for name, axis in mesh.axes().items() if name not in UNEQUAL}
        self.heartbeat(0, "start")

    def set_folder(self, out, run_id):
        """Write to OUT/hang/RUN_ID from now on: no restart overwrites it. It is made when it is needed."""
        self.folder = Path(out) / "hang" / run_id
        signals.stacks = self.folder / f"rank_{self.rank:05d}.txt"

    def __exit__(self, *error):
        self.stopping.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        signals.stacks = None

    def _watch(self):
        """End the run when the main thread makes no progress: the watchdog's thread."""
        seen = 0
        before = time.monotonic()
        while not self.stopping.wait(self.tick):
            now = time.monotonic()
            gap = now - before - self.tick
            if gap > 1 + 2 * self.tick:  # suspended, or kept from running
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
        if self.folder is None:
            self._report_hung_start()
        else:
            self._report_hang()
        os._exit(Outcome.HUNG)

    def _report_hung_start(self):
        time.sleep(min(0.3 * self.rank, self.grace))  # one line: the launcher ends the others after it
        with contextlib.suppress(OSError):
            waited = time.monotonic() - self.last
            complain(f"nanoshard: rank {self.rank} waited {waited:.0f} s at the start, in "
                     f"{current_place(self.main)}: did all ranks start? Look for their messages")
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)

    def _report_hang(self):
        reports = {self.rank: self._report()}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_stacks(signals.stacks)
            signals.stacks.with_suffix(".json").write_text(json.dumps(reports[self.rank]))
        time.sleep(self.grace)  # all ranks must have written: the launcher kills them when the first exits

        paths = sorted(self.folder.glob("rank_*.json"))
        is_first = not paths or signals.stacks.stem == paths[0].stem
        if is_first:
            for path in paths:
                with contextlib.suppress(OSError, ValueError):
                    report = json.loads(path.read_text())
                    reports[report["rank"]] = report
            with contextlib.suppress(OSError):
                complain(verdict(reports, self.world.size, self.timeout, self.world.hosts))
                complain(f"  all stacks: {self.folder}")
        # When a rank exits, the launcher kills the others. MPICH's then takes the exit code of the lowest
        # rank: if that was killed, 9 and not ours. So the others wait for longer.
        time.sleep(self.grace / 2 if is_first else self.grace)

    def _report(self):
        """Return what this rank knows about itself."""
        calls = self.world.calls
        last = None
        if calls.last is not None:
            kind, axis, contents = calls.last
            if contents is not None:
                shape, dtype = contents
                kind = f"{kind} of {tuple(shape)} {str(dtype).removeprefix('torch.')}"
            last = axis, kind
        return {"rank": self.rank, "step": self.step, "what": self.what,
                "silent": round(time.monotonic() - self.last, 1), "place": current_place(self.main),
                "begun": dict(calls.started), "last": last, "axes": self.axes}


def current_place(thread):
    """Return where a thread is: the innermost function, and the innermost line of our own code."""
    stack = list(traceback.walk_stack(sys._current_frames()[thread]))
    ours = [(frame, line) for frame, line in stack if is_ours(frame.f_code.co_filename)]
    frame, line = (ours or stack)[0]
    inner, code = stack[0][0].f_code, frame.f_code
    return f"{inner.co_name} ({Path(code.co_filename).name}:{line} {code.co_name})"


def is_ours(path):
    return path.startswith(f"{ROOT}/") and "site-packages" not in path


# -----------------------------------------------------------------------------
# The verdict on the reports of a hung run

def verdict(reports, size, timeout, hosts=()):
    """Return the text to print: the cause, then where each rank is, then the hosts of the ranks to blame.

    reports: {rank: report}. size: the number of ranks. timeout: seconds. hosts: the host of each rank.
    """
    reports = dict(sorted(reports.items()))  # if several ranks are equally late, the lowest is named
    silent = max(report["silent"] for report in reports.values())
    missing = [rank for rank in range(size) if rank not in reports]
    why, late = cause(reports, missing)
    lines = [f"nanoshard: hung: no progress for {silent:.1f} s (--timeout {timeout:g}); {why}"]
    ranks_at = {}  # description: ranks
    for rank, report in reports.items():
        ranks_at.setdefault(describe(report), []).append(rank)
    for text, ranks in ranks_at.items():
        lines.append(f"  {format_ranks(ranks)}: {text}")
    if missing:
        lines.append(f"  {format_ranks(missing)}: no report: suspended, gone, in a C call that holds the "
                     "interpreter, or in its first step or a save, which may take twice as long")
    for host in dict.fromkeys(hosts):  # scripts/restart.sh reads these lines
        ranks = [rank for rank in late if hosts[rank] == host]
        if ranks:
            lines.append(f"nanoshard: host of {format_ranks(ranks)}: {host}")
    return "\n".join(lines)


def describe(report):
    """Return one rank's report in words."""
    where = f"step {report['step']}"
    if report["what"]:
        where += f", {report['what']}"
    last = "no collective yet"
    if report["last"]:
        axis, what = report["last"]
        last = f"last collective {report['begun'][axis]} over {axis}: {what}"
    return f"{where}, in {report['place']}, {last}"


def cause(reports, missing):
    """Return (why the run hangs, the ranks that keep the others waiting; [] if none is known).

    reports: {rank: report}. missing: ranks without a report.
    """
    if missing:
        return f"{format_ranks(missing)} did not answer", missing
    late = late_ranks(reports)
    if late:
        ranks, axis, begun, most = late
        names = format_ranks(ranks)
        return f"{names} began {begun} collectives over {axis}, others {most}: they wait for {names}", ranks
    return "all ranks began as many collectives: do they differ below? Else a device or a file is silent", []


def late_ranks(reports):
    """Return (ranks, axis, collectives that they began on it, the most that a partner began), or None.

    The largest difference counts.
    """
    late = {}  # (most - begun, axis, begun): ranks
    for rank, report in reports.items():
        for axis, partners in report["axes"].items():
            begun = report["begun"].get(axis, 0)
            most = max(reports[partner]["begun"].get(axis, 0) for partner in partners)
            late.setdefault((most - begun, axis, begun), []).append(rank)
    behind, axis, begun = max(late, key=lambda key: key[0], default=(0, "", 0))
    if behind == 0:
        return None
    return late[behind, axis, begun], axis, begun, begun + behind


def format_ranks(numbers):
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs = []  # [first, last]
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(texts)}"


# -----------------------------------------------------------------------------
# Slow ranks. All ranks finish a step together, because they wait for each other. So the comparison uses each
# rank's own time, from the start of the step to its first collective, within its stage of the pipeline. Under
# a CUDA graph, Python starts no collective before the graph's end: only delays before it (data) show.

SLOW_RATIO, SLOW_MARGIN_MS = 1.2, 2.0  # above the stage's median, both: short steps vary
SLOW_STREAK = 3  # intervals in a row after which a rank is reported


class Stragglers:
    """Finds slow ranks. Call begin() at each step and report() at each logged step, on all ranks."""

    def __init__(self, mesh, device):
        self.world = mesh.world
        self.stage = mesh.stage.size
        self.watch = Stopwatch(device)
        self.cuda = device.type == "cuda"
        self.start = None
        self.spans = []  # (begin, end) of this rank's own work in each step
        self.slow_streak = {}  # rank: intervals in a row

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

        The rank that writes the row, rank 0, does so; the others get {}. Collective over the world.
        """
        spans = self.spans
        self.spans = []
        if self.world.size == 1 or not spans:
            return {}
        own = sum(self.watch.ms(begin, end) for begin, end in spans) / len(spans)
        ms = self.world.everyone.collect(own)  # one number from each rank to rank 0, over the world
        if ms is None:
            return {}
        for line in self.flag_slow(ms):
            say(line)
        slowest = max(ms)
        return {"step_ms_min": min(ms), "step_ms_max": slowest, "slowest_rank": ms.index(slowest)}

    def flag_slow(self, ms):
        """Return a line for each rank that is slow for the SLOW_STREAK-th time. ms: of each rank."""
        lines = []
        streak = {}
        for rank, own in enumerate(ms):
            first = rank // self.stage * self.stage
            median = statistics.median(ms[first:first + self.stage])
            if own <= SLOW_RATIO * median or own <= median + SLOW_MARGIN_MS:
                continue
            streak[rank] = self.slow_streak.get(rank, 0) + 1
            if streak[rank] == SLOW_STREAK:
                lines.append(f"slow rank {rank}: {own:.1f} ms of its own per step, the median of its "
                             f"stage is {median:.1f} ({SLOW_STREAK} logs running)")
        self.slow_streak = streak
        return lines

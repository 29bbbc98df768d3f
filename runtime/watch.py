"""Notice what no exception reports: a run that hangs, a rank that is slow.

    Watch        a thread per rank: ends a hung run with code 43 and says which rank it waits for
    Stragglers   compares the time that each rank needs for its own work
"""
import contextlib
import faulthandler
import math
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from config import Outcome
from interface.terminal import say, warn
from runtime import hang, session
from runtime.timing import Stopwatch

# -----------------------------------------------------------------------------
# The watchdog. A rank that waits in a collective cannot know which rank it waits for. So each rank, by its
# own clock, writes what it knows to OUT/hang/: its Python stacks, and how many collectives it has started on
# each axis. The ranks of a node share a file. Then the lowest rank that wrote a report reads all reports. The
# rank that started fewer collectives than its partners is the rank that they wait for. The order of events,
# in seconds after the last progress, with T = --timeout and g = min(T/4, 10 s):
#
#     T         A thread of each rank notices: stacks, report.
#     T + g/2   If a C call holds the interpreter's lock, faulthandler's C thread writes the stacks.
#     T + g     One rank prints the verdict, and all ranks exit.
#     T + 2g    guardian.py, a process beside each rank, kills the rank if its interpreter is still held.
#
# Progress is a heartbeat() of the main thread, or a collective that it starts. Time in which the process is
# suspended does not count: a thread or a process whose own ticks have a gap did not run either.

SLOW_PHASE_FACTOR = 2  # start, compilation, evaluation and saving may take this many times --timeout
# On the other axes all ranks start the same collectives. Over pp, stages send different numbers of messages.
UNEQUAL = ("pp",)


class Phase(NamedTuple):
    """What the main thread is doing, and how long it may take."""
    step: int
    what: str  # "" in a step, else the name of a slow phase: "first", "save", ...
    limit: float  # seconds without progress
    waits_in: tuple[str, int] | None = None  # (where, number of ranks) until all ranks have started


class Watch(contextlib.AbstractContextManager):
    """The watchdog of this rank.

    Make it before launch(). Then set .world, call set_mesh() and set_folder() when the mesh and --out exist,
    and heartbeat() at each step.
    """

    def __init__(self, rank, timeout):
        self.rank = rank
        self.timeout = timeout  # seconds
        self.grace = min(timeout / 4, 10.0)
        self.tick = min(1.0, timeout / 16)
        self.world = None
        self.axes = {}  # name: ranks
        self.files = hang.HangFiles(rank)
        self.main = threading.get_ident()
        self.seen = 0  # the number of started collectives that the thread knows of
        self.heartbeat(0, "start")

        self.guardian = hang.Guardian(self.tick, self.files.private, rank)
        session.signals.guardian = self.guardian
        self._set_alarms(self.phase.limit)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def heartbeat(self, step, what=""):
        """Say that the main thread is alive, and starts a step or a slow phase of a step.

        A step may take timeout seconds. A slow phase (what: "first", "save", ...) may take SLOW_PHASE_FACTOR
        times as long.
        """
        factor = SLOW_PHASE_FACTOR if what else 1
        self.last = time.monotonic()  # set first: the thread must not see an old time with a shorter limit
        self.phase = Phase(step, what, factor * self.timeout)

    def joining(self, where, size):
        """Say that the main thread waits in `where` until all ranks have started; "": they have."""
        if where:
            self.last = time.monotonic()
            self.phase = Phase(0, where, self.timeout, waits_in=(where, size))
        else:
            self.heartbeat(0, "start")

    def set_mesh(self, mesh):
        """Tell which ranks share an axis with this rank.

        Only their numbers are kept, because the process groups must be destroyed at the end.
        """
        self.axes = {name: axis.ranks for name, axis in mesh.axes().items() if name not in UNEQUAL}
        self.heartbeat(0, "start")

    def set_folder(self, out, run_id):
        """Write reports to OUT/hang/ from now on. Their names contain run_id: no restart overwrites them."""
        if not os.access(out, os.W_OK):
            return  # reports stay on stderr
        self.files.open(Path(out) / "hang", run_id, self.world.node if self.world else 0)
        self.guardian.collect_into(self.files.path(".txt"))
        self._set_alarms(self.phase.limit)
        session.dump_on_sigusr2(self.files.stacks)

    def if_killed(self, out, again, anew):
        """Tell which command goes on if this process is killed: from a checkpoint in OUT, or anew."""
        self.guardian.if_killed(out, again, anew)

    def __exit__(self, kind, *error):
        """Stop watching: the run has ended, by itself or by an exception."""
        self.stopping.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        session.signals.guardian = None
        if kind is None or issubclass(kind, SystemExit) or not session.signals.is_program:
            self.guardian.close()
        else:  # it speaks after the traceback, when this process is gone
            self.guardian.allow(math.inf)
        session.dump_on_sigusr2(sys.__stderr__)
        self.files.close()

    def _watch(self):
        """End the run when the main thread makes no progress: the watchdog's thread."""
        before = time.monotonic()
        while not self.stopping.wait(self.tick):
            now = time.monotonic()
            gap = now - before - self.tick
            if gap > 1 + 2 * self.tick:  # suspended, or kept from running
                self._forgive(gap, now)
            started = sum(self.world.calls.started.values()) if self.world else 0
            if started != self.seen:
                self.seen = started
                self.last = now
            left = self.phase.limit - (now - self.last)
            if left < 0:
                self._report_and_exit()
            self._set_alarms(left)
            before = now

    def _forgive(self, gap, now):
        """Do not count a gap of some seconds, in which this process did not run, as lack of progress."""
        if now > self.alarm:  # faulthandler's clock did not stand still
            with contextlib.suppress(OSError):
                print(f"suspended for {gap:.0f} s: the stacks above are of no hang", file=self.files.stacks,
                      flush=True)  # guardian.py collects what is in the file
        self.last = min(now, self.last + gap)

    def _set_alarms(self, left):
        """Set the two alarms that work without this thread: `left` seconds from now, and a grace."""
        faulthandler.cancel_dump_traceback_later()
        self.alarm = time.monotonic() + left + self.grace / 2
        faulthandler.dump_traceback_later(left + self.grace / 2, file=self.files.stacks)
        self.guardian.allow(left + 2 * self.grace)

    def _report_and_exit(self):
        faulthandler.cancel_dump_traceback_later()
        # This thread runs, so the report only needs time: 2 graces, and more on a loaded machine. A
        # rank that the guardian kills would end its launcher with 9.
        self.guardian.allow(5 * self.grace)
        if self.phase.waits_in is None:
            self._report_hang()
        else:
            self._report_missing_ranks()
        os._exit(Outcome.HUNG)

    def _report_missing_ranks(self):
        where, size = self.phase.waits_in
        time.sleep(min(0.3 * self.rank, self.grace))  # one line: the launcher ends the others after it
        with contextlib.suppress(OSError):
            warn(f"rank {self.rank} of {size} waited {time.monotonic() - self.last:.0f} s in {where}: a "
                 "rank did not start; look for its message")

    def _report_hang(self):
        report = self._report()
        with contextlib.suppress(OSError):
            self.files.write(report, describe(report))
        time.sleep(self.grace)  # all ranks must have written: the launcher kills them when the first exits

        reports = {**self.files.read_node(), self.rank: report}
        if self.rank == min(reports):  # of this node. Now the other nodes' files are worth reading
            reports |= self.files.read_all()
        if self.rank == min(reports):
            hosts = self.world.hosts if self.world else []
            text = verdict(reports, self.world.size if self.world else 1, self.timeout, hosts)
            text += f"\n  all stacks: {self.files.folder or 'above'}"
            with contextlib.suppress(OSError):
                print(text, file=sys.__stderr__, flush=True)
        # When a rank exits, the launcher kills the others. MPICH's then takes the exit code of the lowest
        # rank: if that was killed, 9 and not ours. So the others wait for longer.
        time.sleep(self.grace / 2 if self.rank == min(reports) else self.grace)

    def _report(self):
        """Return what this rank knows about itself, for OUT/hang/."""
        started, last = {}, None
        if self.world:
            calls = self.world.calls
            started = dict(calls.started)
            last = describe_collective(calls.last)
        return {"step": self.phase.step, "what": self.phase.what,
                "silent": round(time.monotonic() - self.last, 1), "place": current_place(self.main),
                "begun": started, "last": last, "axes": self.axes}


def current_place(thread):
    """Return where a thread is: "FUNCTION (FILE:LINE FUNCTION)".

    The first function is the innermost one. The second, with its line, is the innermost one of our own code.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "? (?)"
    innermost = frame.f_code.co_name
    libraries = ("site-packages", "/lib/python")
    while frame is not None and any(library in frame.f_code.co_filename for library in libraries):
        frame = frame.f_back
    if frame is None:
        return f"{innermost} (?)"
    code = frame.f_code
    return f"{innermost} ({Path(code.co_filename).name}:{frame.f_lineno} {code.co_name})"


def describe_collective(last):
    """Return [axis, text] of CollectiveLog.last, or None before the first collective."""
    if last is None:
        return None
    kind, axis, contents = last
    if contents is None:
        return [axis, kind]
    shape, dtype = contents
    return [axis, f"{kind} of {tuple(shape)} {str(dtype).removeprefix('torch.')}"]


# -----------------------------------------------------------------------------
# The verdict on the reports of a hung run

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


def verdict(reports, size, timeout, hosts=()):
    """Return the text to print: the cause, then where each rank is, then the hosts of the ranks to blame.

    reports: {rank: report}. size: the number of ranks. timeout: seconds. hosts: the host of each rank.
    """
    reports = dict(sorted(reports.items()))  # if several ranks are equally late, the lowest is named
    silent = max(report["silent"] for report in reports.values())
    missing = [rank for rank in range(size) if rank not in reports]
    lines = [f"nanoshard: hung: no progress for {silent:.1f} s (--timeout {timeout:g}); "
             f"{cause(reports, missing)}"]
    ranks_at = {}  # description: ranks
    for rank, report in reports.items():
        ranks_at.setdefault(describe(report), []).append(rank)
    for text, ranks in ranks_at.items():
        lines.append(f"  {format_ranks(ranks)}: {text}")
    if missing:
        lines.append(f"  {format_ranks(missing)}: no report: a C call holds the interpreter, the process is "
                     "gone, or it is in its first step or saves, which may take twice as long")
    late = blamed(reports, missing)
    for host in dict.fromkeys(hosts):  # scripts/restart.sh reads these lines
        ranks = [rank for rank in late if hosts[rank] == host]
        if ranks:
            lines.append(f"nanoshard: host of {format_ranks(ranks)}: {host}")
    return "\n".join(lines)


def cause(reports, missing):
    """Return which ranks keep the others waiting, by the counts of collectives.

    reports: {rank: report}. missing: ranks without a report.
    """
    if missing:
        return f"{format_ranks(missing)} did not answer"
    return (describe_different_collectives(reports) or describe_late_ranks(reports)
            or "all ranks began the same collectives: a device, a file or a peer does not answer")


def blamed(reports, missing):
    """Return the ranks that keep the others waiting, or [] if that is the program's fault or not known."""
    if missing:
        return missing
    late = late_ranks(reports)
    if late is None or describe_different_collectives(reports):
        return []
    return late[0]


def describe_different_collectives(reports):
    """Name two ranks that are in different collectives of one axis, after equally long histories, or None."""
    for rank, report in reports.items():
        if report["last"] is None:
            continue
        axis, what = report["last"]
        for partner in report["axes"].get(axis, ()):
            other = reports[partner]
            if other["last"] is None or other["begun"].get(axis) != report["begun"].get(axis):
                continue
            other_axis, other_what = other["last"]
            if other_axis == axis and other_what != what:
                return f"mismatch over {axis}: rank {rank} is in {what}, rank {partner} in {other_what}"
    return None


def describe_late_ranks(reports):
    """Name the ranks that started fewer collectives on an axis than their partners, or None."""
    found = late_ranks(reports)
    if found is None:
        return None
    late, axis, have, most = found
    ranks = format_ranks(late)
    return f"{ranks} began {have} collectives over {axis}, others {most}: they wait for {ranks}"


def late_ranks(reports):
    """Return (ranks, axis, collectives that they started on it, the most that a partner started), or None.

    The largest difference counts.
    """
    late = {}  # (axis, collectives started, the most that a partner started): ranks
    for rank, report in reports.items():
        for axis, partners in report["axes"].items():
            most = max(reports[partner]["begun"].get(axis, 0) for partner in partners)
            have = report["begun"].get(axis, 0)
            if have < most:
                late.setdefault((axis, have, most), []).append(rank)
    if not late:
        return None

    def lead(key):
        _, have, most = key
        return most - have

    latest = max(late, key=lead)
    return late[latest], *latest


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
# rank's own time, from the start of the step to its first collective. It is made only within a pipeline
# stage, because stages do different work. Under a CUDA graph, the first collective that Python starts comes
# after those of the graph. Then only delays before the graph (data) show.

# A rank is slow if its time exceeds the stage's median by this factor and, because short steps vary, by these
# ms.
SLOW_RATIO, SLOW_MARGIN_MS = 1.2, 2.0
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
        """Return a line for each rank that is slow for the SLOW_STREAK-th time in a row.

        ms: each rank's own time per step.
        """
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

"""The watchdog of a rank: when nothing moves for --timeout seconds, say where all stand, and end with 43.

A rank that waits in a collective cannot know for whom. So each rank, on its own clock, writes what it knows
to OUT/hang/: its Python stacks, and how many collectives it has begun on each axis. After a grace the lowest
rank that reported reads all reports: who has begun fewer than its partners is the one they wait for.

    T         a thread finds no progress: stacks, report
    T + g/2   the interpreter is held (a C call keeps the lock): faulthandler's C thread writes the stacks
    T + g     verdict, printed once; all ranks leave
    T + 2g    the kernel's alarm ends a rank whose interpreter is still held      g = min(T/4, 10 s)

Progress is a beat() of the main thread or a collective begun. The process group's own timeout lies above.
"""
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

HUNG = 43  # exit code
SLOW = 2  # start, compilation and saving may take so many times --timeout
GROUP = 3 * SLOW / 2  # the process group's timeout, in units of --timeout: above SLOW + the graces
SYMMETRIC = ("world", "stage", "dp", "tp", "ep", "edp", "tied")  # over pp stages send different numbers


class Watch:
    """Make it first; .world and knows() when they exist, into() when OUT is settled, beat() each step."""

    def __init__(self, rank, timeout):
        self.rank, self.timeout, self.grace = rank, timeout, min(timeout / 4, 10.0)
        self.world = self.folder = None
        self.axes = {}  # name: ranks
        self.stacks, self.name, self.seen = sys.__stderr__, f"rank_{rank:05d}", 0
        self.over = threading.Event()
        self.main = threading.main_thread().ident
        self.beat(0, "start", SLOW)
        self._alarms(self.limit)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step, what="", times=1):
        """The main thread is alive: it begins (what of) a step, which may take times * timeout seconds."""
        self.where, self.limit, self.last = (step, what), times * self.timeout, time.monotonic()

    def knows(self, mesh):
        """Who shares an axis with this rank. Keeps ranks only: the groups must be gone at the end."""
        self.axes = {name: getattr(mesh, name).ranks for name in SYMMETRIC}

    def into(self, out, token):
        """From now on reports go to OUT/hang/, named by a word of this run: a restart overwrites nothing."""
        folder = Path(out) / "hang"
        with contextlib.suppress(OSError):  # a read-only directory: reports stay on stderr
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"{self.name}.*.txt"):
                if old.stat().st_size == 0:  # a run that never hung
                    old.unlink()
            self.stacks = open(folder / f"{self.name}.{token}.txt", "a")
            self.folder, self.token = folder, token
            self._alarms(self.limit)

    def close(self):
        """The end of the run: nothing is watched any more."""
        self.over.set()
        self.thread.join()
        self._alarms(0)
        if self.folder is not None:
            self.stacks.close()
            with contextlib.suppress(OSError):
                os.unlink(self.stacks.name)
                self.folder.rmdir()  # the last to leave; not if it holds the reports of an earlier hang

    # -----------------------------------------------------------------------------
    # the thread

    def _watch(self):
        while not self.over.wait(min(1.0, self.timeout / 16)):
            begun = sum(self.world.calls.started.values()) if self.world else 0
            if begun != self.seen:
                self.seen, self.last = begun, time.monotonic()
            left = self.limit - (time.monotonic() - self.last)
            if left < 0:
                self._end()
            self._alarms(left)

    def _alarms(self, left):
        """For the case that this thread never runs again; set anew at each look."""
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, left + 2 * self.grace if left else 0)
        if left:
            faulthandler.dump_traceback_later(left + self.grace / 2, file=self.stacks)

    def _end(self):
        faulthandler.cancel_dump_traceback_later()
        report = self._report()
        with contextlib.suppress(OSError):
            self.stacks.write(f"rank {self.rank}: {standing(report)}\n")
            self.stacks.flush()
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            if self.folder is not None:
                aside = self.folder / f"{self.name}.{self.token}.part"
                aside.write_text(json.dumps(report))
                aside.rename(aside.with_suffix(".json"))
                self._flight_recorder()
        time.sleep(self.grace)  # every rank writes before any leaves: the launcher kills the rest
        reports = {self.rank: report}
        if self.folder is not None:
            for path in self.folder.glob(f"rank_*.{self.token}.json"):
                with contextlib.suppress(OSError, ValueError):
                    reports[int(path.name[5:10])] = json.loads(path.read_text())
        if self.rank == min(reports):
            text = verdict(reports, self.world.size if self.world else 1, self.timeout)
            print(f"{text}\n  all stacks: {self.folder or 'above'}", file=sys.__stderr__, flush=True)
        time.sleep(self.grace / 2)
        os._exit(HUNG)

    def _report(self):
        frame = sys._current_frames().get(self.main)
        inner = frame.f_code.co_name if frame else "?"
        library = ("site-packages", "/lib/python")
        while frame is not None and any(d in frame.f_code.co_filename for d in library):
            frame = frame.f_back  # the innermost line that is not the library's
        code = frame and frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}" if frame else "?"
        begun, last = (dict(self.world.calls.started), self.world.calls.last) if self.world else ({}, None)
        if last is not None:
            kind, axis, tensor = last
            size = "" if tensor is None else f" of {tuple(tensor[0])} {str(tensor[1])[6:]}"
            last = [axis, f"{kind}{size}"]
        silent = round(time.monotonic() - self.last, 1)
        return {"step": self.where[0], "what": self.where[1], "silent": silent, "place": f"{inner} ({place})",
                "begun": begun, "last": last, "axes": self.axes}

    def _flight_recorder(self):
        """What the process group itself remembers; NCCL's says which collectives are done on the device."""
        from torch._C import _distributed_c10d as c10d
        for kind in ("fr", "nccl"):
            dump = getattr(c10d, f"_dump_{kind}_trace_json", None)
            with contextlib.suppress(Exception):  # a courtesy: no version of torch promises it
                text = dump(includeCollectives=True, onlyActive=False)
                text = text.encode() if isinstance(text, str) else text
                (self.folder / f"{self.name}.{self.token}.{kind}_trace").write_bytes(text)


class _Unwatched:
    """In the place of a Watch where nobody watches."""

    def beat(self, *args):
        pass

    into = knows = beat


unwatched = _Unwatched()


# -----------------------------------------------------------------------------
# the verdict

def standing(r):
    """One rank's report in words."""
    where, last = f"step {r['step']}" + f", {r['what']}" * bool(r["what"]), "no collective yet"
    if r["last"]:
        axis, what = r["last"]
        last = f"last collective {r['begun'][axis]} over {axis}: {what}"
    return f"{where}, in {r['place']}, {last}"


def verdict(reports, size, timeout):
    """reports: {rank: report} -> the lines to print: what is wrong, then where each rank stands."""
    silent = max(r["silent"] for r in reports.values())
    missing = [r for r in range(size) if r not in reports]
    lines = [f"nanoshard: hung: no progress for {silent:.1f} s (--timeout {timeout:g}); "
             f"{cause(reports, missing)}"]
    together = {}
    for rank, r in sorted(reports.items()):
        together.setdefault(standing(r), []).append(rank)
    lines += [f"  {ranks(rs)}: {text}" for text, rs in together.items()]
    if missing:
        lines.append(f"  {ranks(missing)}: no report: a C call holds the interpreter, or the process is gone")
    return "\n".join(lines)


def cause(reports, missing):
    """Who keeps the others waiting, as far as the counts tell."""
    if missing:
        return f"{ranks(missing)} did not answer"
    behind, odd = {}, None
    for rank, r in reports.items():
        for axis, partners in r["axes"].items():
            there = {p: reports[p]["begun"].get(axis, 0) for p in partners}
            most = max(there.values())
            if there[rank] < most:
                behind.setdefault((axis, there[rank], most), []).append(rank)
            for p in partners:
                mine, theirs = r["last"], reports[p]["last"]
                if there[p] == there[rank] and mine and theirs and mine != theirs:
                    odd = (p, rank) if mine[0] == theirs[0] == axis else odd
    if odd:
        (a, b), (axis, x) = odd, reports[odd[0]]["last"]
        return f"mismatch over {axis}: {ranks([a])} is in {x}, {ranks([b])} in {reports[b]['last'][1]}"
    if behind:
        (axis, have, most), who = min(behind.items(), key=lambda item: item[0][1] - item[0][2])
        return f"{ranks(who)} began {have} collectives over {axis}, others {most}: they wait for {ranks(who)}"
    return "all ranks began the same collectives: a device, a file or a peer does not answer"


def ranks(numbers):
    """[0, 1, 2, 5] -> ranks 0-2, 5"""
    runs = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return f"rank{'s' * (len(numbers) > 1)} " + ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)

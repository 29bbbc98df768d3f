"""Notice what no exception reports: a run that hangs, replicas that differ, a rank that is slow.

    Watch                 a thread per rank: ends a hung run with code 43 and says which rank it waits for
    replica_differences   compares the parameters that several ranks hold in common (--check-every)
    Stragglers            compares the time that each rank needs for its own work
"""
import contextlib
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from config import Outcome
from ops.checksum import checksum
from runtime import session
from runtime.log import warn
from runtime.timing import Stopwatch

# -----------------------------------------------------------------------------
# the watchdog. a rank that waits in a collective cannot know which rank it waits for. so each rank, by its
# own clock, writes what it knows to OUT/hang/: its python stacks, and how many collectives it has started on
# each axis. then the lowest rank that wrote a report reads all reports: the rank that started fewer
# collectives than its partners is the one they wait for. seconds after the last progress, with T = --timeout
# and g = min(T/4, 10 s):
#
#     T         a thread of each rank notices: stacks, report
#     T + g/2   if a C call holds the interpreter's lock: faulthandler's C thread writes the stacks
#     T + g     one rank prints the verdict; all ranks exit
#     T + 2g    guardian.py, a process beside each rank, kills one whose interpreter is still held
#
# progress is a heartbeat() of the main thread, or a collective that it starts. time in which the process is
# suspended does not count: a thread or a process whose own ticks have a gap did not run either

SLOW_PHASE_FACTOR = 2  # start, compilation, evaluation and saving may take this many times --timeout
# over pp, stages send different numbers
SYMMETRIC = ("world", "stage", "dp", "cp", "dpcp", "tp", "ep", "edp", "tied")


class Watch(contextlib.AbstractContextManager):
    """The watchdog of this rank. Make it before launch(); then set .world, call set_mesh() and
    set_folder() when mesh and --out exist, heartbeat() at each step."""

    def __init__(self, rank, timeout):
        self.rank, self.timeout, self.grace = rank, timeout, min(timeout / 4, 10.0)
        self.world = self.folder = self.waits_in = None
        self.axes = {}  # name: ranks
        self.stacks, self.name, self.seen = sys.__stderr__, f"rank_{rank:05d}", 0
        self.stopping, self.tick = threading.Event(), min(1.0, timeout / 16)
        self.main = threading.get_ident()
        self.heartbeat(0, "start")
        self._start_guardian()
        self._set_alarms(self.limit)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def heartbeat(self, step, what=""):
        """The main thread is alive: it starts a step, which may take timeout seconds, or a slow phase of it:
        what ("first", "save", ...) then, SLOW_PHASE_FACTOR times as long."""
        factor = SLOW_PHASE_FACTOR if what else 1
        self.waits_in = None  # .last comes first: the thread must not see an old one with a shorter limit
        self.last, self.where, self.limit = time.monotonic(), (step, what), factor * self.timeout

    def joining(self, where, size):
        """The main thread waits in MPI_Init or the rendezvous until all ranks have started; "": they have."""
        self.heartbeat(0, where or "start")
        if where:
            self.limit, self.waits_in = self.timeout, (where, size)

    def set_mesh(self, mesh):
        """Tell which ranks share an axis with this one. Only their numbers are kept: the process groups must
        be destroyed at the end."""
        self.axes = {name: getattr(mesh, name).ranks for name in SYMMETRIC}
        self.heartbeat(0, "start")

    def set_folder(self, out, run_id):
        """Write reports to OUT/hang/ from now on. Their names contain run_id: a restart overwrites none."""
        folder = Path(out) / "hang"
        with contextlib.suppress(OSError):  # in a read-only directory reports stay on stderr
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"{self.name}.*.txt"):
                if old.stat().st_size == 0:  # of a run that did not hang
                    old.unlink()
            self.stacks = open(folder / f"{self.name}.{run_id}.txt", "a")
            self.folder, self.run_id = folder, run_id
            self._set_alarms(self.limit)
            session.dump_on_sigusr2(self.stacks)

    def __exit__(self, *error):
        """Stop watching: the run has ended."""
        self.stopping.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.guardian.stdin.close()
        self.guardian.kill()  # also if somebody has stopped it
        self.guardian.wait()
        session.dump_on_sigusr2(sys.__stderr__)
        if self.folder is not None:
            self.stacks.close()
            with contextlib.suppress(OSError):
                if os.path.getsize(self.stacks.name) == 0:
                    os.unlink(self.stacks.name)
                self.folder.rmdir()  # the last rank succeeds, unless somebody asked for stacks (SIGUSR2)

    def _start_guardian(self):
        """The process that kills this one when its threads cannot. It is started before MPI, has a session of
        its own and none of our streams: no launcher waits for it, no Ctrl-C reaches it."""
        script, quiet = Path(__file__).with_name("guardian.py"), subprocess.DEVNULL
        self.guardian = subprocess.Popen(
            [sys.executable, "-S", "-E", script, str(os.getpid()), str(self.tick)], bufsize=0,
            stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
        os.set_blocking(self.guardian.stdin.fileno(), False)  # it may be stopped

    def _watch(self):
        """The thread: end the run when the main thread makes no progress."""
        before = time.monotonic()
        while not self.stopping.wait(self.tick):
            now, started = time.monotonic(), sum(self.world.calls.started.values()) if self.world else 0
            gap = now - before - self.tick
            if gap > 1 + 2 * self.tick:  # suspended, or kept from running
                if now > self.alarm:  # faulthandler's clock did not stand still
                    with contextlib.suppress(OSError):
                        print(f"suspended for {gap:.0f} s: the stacks above are of no hang", file=self.stacks)
                self.last = min(now, self.last + gap)
            if started != self.seen:
                self.seen, self.last = started, now
            left = self.limit - (now - self.last)
            if left < 0:
                self._report_and_exit()
            self._set_alarms(left)
            before = now

    def _set_alarms(self, left):
        """Set the two alarms that work without this thread: `left` seconds from now, and a grace."""
        faulthandler.cancel_dump_traceback_later()
        self.alarm = time.monotonic() + left + self.grace / 2
        faulthandler.dump_traceback_later(left + self.grace / 2, file=self.stacks)
        with contextlib.suppress(OSError):  # somebody killed it
            self.guardian.stdin.write(f"{left + 2 * self.grace}\n".encode())

    def _report_and_exit(self):
        faulthandler.cancel_dump_traceback_later()
        if self.waits_in is not None:
            time.sleep(min(0.3 * self.rank, self.grace))  # one line: the launcher ends the others after it
            where, size = self.waits_in
            with contextlib.suppress(OSError):
                warn(f"rank {self.rank} of {size} waited {time.monotonic() - self.last:.0f} s in {where}: a "
                     "rank did not start; look for its message")
            os._exit(Outcome.HUNG)
        report = self._report()
        with contextlib.suppress(OSError):
            self.stacks.write(f"rank {self.rank}: {describe(report)}\n")
            self.stacks.flush()
            faulthandler.dump_traceback(self.stacks, all_threads=True)
            if self.folder is not None:
                part = self.folder / f"{self.name}.{self.run_id}.part"
                part.write_text(json.dumps(report))
                part.rename(part.with_suffix(".json"))
                self._flight_recorder()
        time.sleep(self.grace)  # all ranks must have written: the launcher kills them when the first exits
        reports = {self.rank: report}
        if self.folder is not None:
            for path in self.folder.glob(f"rank_*.{self.run_id}.json"):
                with contextlib.suppress(OSError, ValueError):
                    reports[int(path.name[5:10])] = json.loads(path.read_text())
        if self.rank == min(reports):
            text = verdict(reports, self.world.size if self.world else 1, self.timeout)
            with contextlib.suppress(OSError):
                print(f"{text}\n  all stacks: {self.folder or 'above'}", file=sys.__stderr__, flush=True)
        time.sleep(self.grace / 2)
        os._exit(Outcome.HUNG)

    def _report(self):
        """-> what this rank knows about itself, for OUT/hang/RANK.json."""
        frame = sys._current_frames().get(self.main)
        inner = frame.f_code.co_name if frame else "?"
        library = ("site-packages", "/lib/python")
        while frame is not None and any(d in frame.f_code.co_filename for d in library):
            frame = frame.f_back  # to the innermost line of our own code
        code = frame and frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}" if frame else "?"
        started, last = (dict(self.world.calls.started), self.world.calls.last) if self.world else ({}, None)
        if last is not None:
            kind, axis, tensor = last
            size = "" if tensor is None else f" of {tuple(tensor[0])} {str(tensor[1])[6:]}"
            last = [axis, f"{kind}{size}"]
        silent = round(time.monotonic() - self.last, 1)
        return {"step": self.where[0], "what": self.where[1], "silent": silent, "place": f"{inner} ({place})",
                "begun": started, "last": last, "axes": self.axes}

    def _flight_recorder(self):
        """Write torch's own record of its collectives; NCCL's tells which are complete on the device."""
        from torch._C import _distributed_c10d as c10d
        for kind in ("fr", "nccl"):
            dump = getattr(c10d, f"_dump_{kind}_trace_json", None)
            with contextlib.suppress(Exception):  # not public: a version of torch may lack or change it
                text = dump(includeCollectives=True, onlyActive=False)
                text = text.encode() if isinstance(text, str) else text
                (self.folder / f"{self.name}.{self.run_id}.{kind}_trace").write_bytes(text)


class _Unwatched:
    """A Watch that does nothing."""

    def heartbeat(self, *args):
        pass

    set_folder = set_mesh = heartbeat


unwatched = _Unwatched()


def describe(r):
    """One rank's report in words."""
    where, last = f"step {r['step']}" + f", {r['what']}" * bool(r["what"]), "no collective yet"
    if r["last"]:
        axis, what = r["last"]
        last = f"last collective {r['begun'][axis]} over {axis}: {what}"
    return f"{where}, in {r['place']}, {last}"


def verdict(reports, size, timeout):
    """{rank: report} of a run of `size` ranks -> the text to print: the cause, then where each rank is."""
    silent = max(r["silent"] for r in reports.values())
    missing = [r for r in range(size) if r not in reports]
    lines = [f"nanoshard: hung: no progress for {silent:.1f} s (--timeout {timeout:g}); "
             f"{cause(reports, missing)}"]
    ranks_at = {}  # description: ranks
    for rank, r in sorted(reports.items()):
        ranks_at.setdefault(describe(r), []).append(rank)
    lines += [f"  {format_ranks(ranks)}: {text}" for text, ranks in ranks_at.items()]
    if missing:
        lines.append(f"  {format_ranks(missing)}: no report: a C call holds the interpreter, or the process "
                     "is gone")
    return "\n".join(lines)


def cause(reports, missing):
    """Which ranks keep the others waiting, by the counts of collectives. missing: ranks without a report."""
    if missing:
        return f"{format_ranks(missing)} did not answer"
    behind, mismatch = {}, None
    for rank, r in reports.items():
        for axis, partners in r["axes"].items():
            started = {p: reports[p]["begun"].get(axis, 0) for p in partners}
            most = max(started.values())
            if started[rank] < most:
                behind.setdefault((axis, started[rank], most), []).append(rank)
            for p in partners:
                mine, theirs = r["last"], reports[p]["last"]
                if started[p] == started[rank] and mine and theirs and mine != theirs:
                    mismatch = (p, rank) if mine[0] == theirs[0] == axis else mismatch
    if mismatch:
        a, b = mismatch
        (axis, x), (_, y) = reports[a]["last"], reports[b]["last"]
        return f"mismatch over {axis}: rank {a} is in {x}, rank {b} in {y}"
    if behind:
        (axis, have, most), ranks = min(behind.items(), key=lambda item: item[0][1] - item[0][2])
        late = format_ranks(ranks)
        return f"{late} began {have} collectives over {axis}, others {most}: they wait for {late}"
    return "all ranks began the same collectives: a device, a file or a peer does not answer"


def format_ranks(numbers):
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return f"rank{'s' * (len(numbers) > 1)} " + ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


# -----------------------------------------------------------------------------
# replicas. memory and links flip bits, and a wrong sum makes replicas drift apart, without an error. so every
# --check-every steps each rank hashes its parameters, and the ranks that must hold equal ones compare

def replica_differences(model, mesh):
    """-> one line per parameter that differs between ranks that must hold equal bits; the same list on every
    rank, empty if all is well. Collective over the world."""
    held = {}  # axis name: {parameter: its hash}
    parts = {f"blocks.{i}": block for i, block in model.blocks.items()}
    parts.update((name, module) for name, module in model.named_children() if name != "blocks")
    for part, module in parts.items():
        model.provide_weights(module)  # none that are still on their way; under ZeRO-3 they are gathered
        for name, p in module.named_parameters(part):
            held.setdefault(p.reduce, {})[name] = checksum(p)
    for name, t in model.named_buffers():  # the routers' biases: equal on a whole stage
        held.setdefault("stage", {})[name] = checksum(t)
    lines = []
    for axis_name, tensors in sorted(held.items()):
        axis = getattr(mesh, axis_name)
        if axis.size == 1:
            continue
        mine = torch.stack([*tensors.values()])  # (n, 2)
        hashes = axis.all_gather(mine).view(axis.size, -1, 2).tolist()  # 2 n int64 from each rank to all
        if axis.rank == 0:
            found = (describe_mismatch(name, rows, axis.ranks)
                     for name, *rows in zip(tensors, *hashes, strict=True))
            lines += [line for line in found if line]
    # a few lines, or none, from each rank, over the world
    return [line for part in mesh.world.gather_objects(lines) for line in part]


def describe_mismatch(name, hashes, ranks):
    """Which ranks hold another `name` than the others, or None. hashes: one per rank. The largest group of
    equal ones is taken to be right."""
    groups = {}  # hash: ranks
    for row, rank in zip(hashes, ranks, strict=True):
        groups.setdefault(tuple(row), []).append(rank)
    if len(groups) == 1:
        return None
    right, *wrong = sorted(groups.values(), key=lambda group: (-len(group), group))
    return f"{name} on {format_ranks(sum(wrong, []))} differs from {format_ranks(right)}"


def differences_message(lines, step, checkpoints):
    """-> the last words of a run whose replicas differ. checkpoints: paths, newest first."""
    newest = f"the newest checkpoint is {checkpoints[0]}" if checkpoints else "no checkpoint was saved"
    more = [f"... and {len(lines) - 8} more"] * (len(lines) > 8)
    return "\n".join([f"nanoshard: replicas differ after step {step}; {newest}", *lines[:8], *more])


# -----------------------------------------------------------------------------
# slow ranks. all ranks finish a step together, because they wait for each other. so what is compared is each
# rank's own time, from the start of the step to its first collective, and only within a pipeline stage:
# stages do different work. under a CUDA graph the first collective that python starts comes after the graph's
# own: then only what delays a rank before the graph (data) shows

SLOW_RATIO, SLOW_MARGIN_MS = 1.2, 2.0  # slow: both times the stage's median and ms above it; short steps vary
SLOW_STREAK = 3  # intervals in a row after which a rank is reported


class Stragglers:
    """Call begin() at each step and report() at each logged step, on all ranks."""

    def __init__(self, mesh, device):
        self.world, self.stage, self.watch = mesh.world, mesh.stage.size, Stopwatch(device)
        self.cuda = device.type == "cuda"
        self.spans, self.slow_streak = [], {}  # slow_streak: {rank: intervals in a row}

    def begin(self):
        """A step starts: measure until this rank's first collective."""
        start = self.watch.mark()

        def first():
            if not (self.cuda and torch.cuda.is_current_stream_capturing()):  # a captured event has no time
                self.spans.append((start, self.watch.mark()))
        self.world.calls.on_next_collective = first

    def report(self):
        """-> ({step_ms_min, step_ms_max, slowest_rank}, lines about slow ranks), of the steps since the last
        call. Collective over the world."""
        spans, self.spans = self.spans, []
        if self.world.size == 1 or not spans:
            return {}, []
        mine = torch.tensor(sum(self.watch.ms(*span) for span in spans) / len(spans))
        ms = self.world.all_gather(mine.view(1)).tolist()  # one number on the host from each rank to all
        keys = {"step_ms_min": min(ms), "step_ms_max": max(ms), "slowest_rank": ms.index(max(ms))}
        return keys, self.flag_slow(ms)

    def flag_slow(self, ms):
        """ms: own time per step of every rank -> a line per rank that is slow SLOW_STREAK times in a row."""
        lines, streak = [], {}
        for rank, own in enumerate(ms):
            first = rank // self.stage * self.stage
            median = statistics.median(ms[first:first + self.stage])
            if own > SLOW_RATIO * median and own > median + SLOW_MARGIN_MS:
                streak[rank] = self.slow_streak.get(rank, 0) + 1
                if streak[rank] == SLOW_STREAK:
                    lines.append(f"slow rank {rank}: {own:.1f} ms of its own per step, the median of its "
                                 f"stage is {median:.1f} ({SLOW_STREAK} logs running)")
        self.slow_streak = streak
        return lines

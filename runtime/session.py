"""What surrounds a run: the signals that stop it, the streams that it prints to, and its flags.

    signals           `with signals:` catches SIGTERM, SIGUSR1, SIGINT, SIGHUP and SIGUSR2
    start_program     what train.py does first when it is run as a program
    surround          the context around every run
    parse_flags       this rank's flags, or what is wrong with them

This file does not import torch, which takes seconds. So a signal that comes during that import is handled,
too, and --help and wrong flags are answered before it.
"""
import contextlib
import difflib
import faulthandler
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import plot
from config import Config, Outcome, typed
from interface import files
from interface.command_line import INTERRUPTED, given, parse, wrong_input
from interface.layout import check_alone, check_flags
from interface.paths import meant_run
from interface.terminal import Stream, clock, one_line, open_streams
from runtime import launch

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
AGAIN = 0.5  # seconds: a terminal and a launcher may both pass on the same Ctrl-C


class Signals:
    """The signals that stop a run, caught in `with signals:`.

    Before can_save is set there is nothing to save, and a signal ends the process with 85. After that the
    first one is kept in .number until the step ends, and a second SIGINT ends the process with 130. SIGUSR2
    writes the stacks. Rank 0 answers each with a line.

    Python runs handlers only when its main thread is back from C code: from MPI_Init perhaps never, on a GPU
    at the end of a step. So in a program a thread answers. A notebook has handlers alone, and gets them back.
    """

    def __init__(self):
        self.rank = None  # not known yet
        self.stacks = None  # path for SIGUSR2; None: stderr
        self.is_program = False
        self.parsed = None  # parse_flags() of a program's arguments
        self._reset()

    def _reset(self):
        self.previous = {}  # {signal: the caller's handler}
        self.came = {}  # {signal: when it came first}
        self.number = 0
        self.can_save = False
        self.leaves = None  # when the run will leave after a signal, by the steps before; None: not known

    def __enter__(self):
        if self.previous or threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set handlers
        for number in (*STOPPING, signal.SIGUSR2):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup, a script's &
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error):
        if self.is_program:
            return  # a late signal must not change how it ends
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self._reset()

    def answer_in_a_thread(self):
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.is_program = True
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()

    def _listen(self, read):
        while number := os.read(read, 1)[0]:
            if signal.getsignal(number) == self._handle:  # pdb may have set its own
                self._answer(number)

    def _handle(self, number, frame):
        if not self.is_program:
            self._answer(number)

    def _answer(self, number):
        name = signal.Signals(number).name
        if number == signal.SIGUSR2:
            write_stacks(self.stacks)
            self._say(f"rank {self.rank or 0}: SIGUSR2: stacks in {self.stacks or 'this stream'}")
            return
        now = time.monotonic()
        since = now - self.came.setdefault(number, now)  # the first time 0
        if not self.can_save:
            self._leave(Outcome.STOPPED, f"stopped by {name} during start-up: there is nothing to save")
        if number == signal.SIGINT and since > AGAIN:
            self._leave(INTERRUPTED, f"a second {name}: left at once, the last checkpoint stands")
        self.number = self.number or number
        if self.rank in (None, 0) and (since == 0 or since > AGAIN):
            again = "; again: leaves at once, without saving" if number == signal.SIGINT else ""
            self._say(f"{name}: finishes this step, saves and leaves{self._wait()}{again}")

    def _wait(self):
        if self.leaves is None:
            return ", however long the first step takes"
        return f", in about {clock(max(1, self.leaves - time.monotonic()))}"

    def _leave(self, code, text):
        time.sleep(min(0.3 * max(self.rank or 0, 0), 3))  # one line: a launcher ends the others after it
        self._say(text if self.rank is None else f"rank {self.rank}: {text}")
        if self.is_program:
            os._exit(code)
        raise SystemExit(int(code))

    def _say(self, text):
        with contextlib.suppress(OSError):
            os.write(2, f"nanoshard: {text}\n".encode())  # the main thread may hold the lock of sys.stderr


signals = Signals()


def write_stacks(path):
    """Append the stacks of all threads to a file, or write them on stderr (None)."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        file = sys.__stderr__
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a"))
        faulthandler.dump_traceback(file, all_threads=True)


def is_program():
    """Whether train.py was started as a program, and not in a notebook."""
    return Path(sys.argv[0]).name == "train.py"


def start_program():
    """Prepare this process, and parse its arguments, before torch is imported."""
    open_streams()
    signals.__enter__()
    signals.answer_in_a_thread()
    with surround():
        signals.parsed = parse_flags(sys.argv[1:])


@contextlib.contextmanager
def surround():
    """Surround a run, and put back what the caller, for example a notebook, had before it."""
    both = [Stream("stdout"), Stream("stderr")]
    try:
        with signals:
            yield
    finally:
        for stream in both:
            stream.flush()
            stream.put_back()
        files.unlock()


# -----------------------------------------------------------------------------
# The flags

def parse_flags(argv):
    """Return (flags, None, timeout), or (None, what is wrong, timeout) on a rank with wrong flags.

    timeout: seconds. All ranks have the same words, so that wrong ones end each rank at once, and rank 0 says
    what is wrong. Only of files that may be missing on one of several nodes do the ranks tell each other.
    So end --help and --list, which only rank 0 prints.
    """
    with wrong_input():
        signals.rank = launch.env_rank()
        name, n_ranks = launch.started_by()
    with wrong_input(quiet=signals.rank != 0), contextlib.ExitStack() as stack:
        if signals.rank != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            if "--list" in argv:
                list_runs(argv)
            cfg = parse(argv)
            if n_ranks == 1:
                check_alone(cfg, argv)
            elif n_ranks > 1:
                check_flags(cfg, n_ranks)
            if launch.is_one_node():
                check_paths(cfg)
        except (ValueError, OSError) as e:
            has_file = given(argv, "config") or given(argv, "init_from")
            if n_ranks > 1 and has_file and not launch.is_one_node():
                return None, one_line(e), Config.timeout
            if signals.rank and name != "hydra":
                # A launcher may kill all ranks when one ends, and rank 0 has to print first.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(2)
            raise
    in_debugger = cfg.pdb >= 0
    return cfg, None, launch.NO_TIMEOUT if in_debugger else cfg.timeout


def check_paths(cfg):
    """Raise FileNotFoundError or ValueError if a path of the flags is not there: before torch is imported."""
    from corpus import samples, shards
    for name, path in (("init_from", cfg.init_from), ("resume", cfg.resume)):
        if path not in ("", "auto", "none") and not Path(path).exists():
            meant = difflib.get_close_matches(path, ("auto", "none"), 1)
            hint = f"perhaps {typed(name)} {meant[0]} is meant" if meant else meant_run(path)
            raise FileNotFoundError(f"{typed(name)} {path} is no checkpoint; {hint}")
    if cfg.data != "synthetic":
        for folder, _ in samples.parse_blend(cfg.data):
            shards.load_meta(folder)


def list_runs(argv):
    """--list [DIR]: print the table of the runs in DIR, and end the process with 0."""
    if argv[0] != "--list" or len(argv) > 2:
        raise ValueError(f"{' '.join(argv)}: beside --list give one folder of runs, such as out, only")
    plot.print_runs(Path(argv[1] if len(argv) > 1 else "out"))
    raise SystemExit(Outcome.DONE)

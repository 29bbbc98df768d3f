"""What surrounds a run: the streams that it prints to and the signals that stop it.

    start_program     what train.py does first when it is run as a program
    surround          the context around every run
    signals           which of SIGTERM, SIGUSR1, SIGINT, SIGHUP has come
    dump_on_sigusr2   SIGUSR2 writes every thread's stack
    parse_flags       this rank's flags, or what is wrong with them

This file does not import torch, which takes seconds. So a signal that comes during that import is handled,
too, and --help and wrong flags are answered before it.
"""
import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import plot
from config import Config, Outcome
from interface import files
from interface.command_line import INTERRUPTED, given, parse, wrong_input
from interface.layout import check_alone, check_flags
from interface.terminal import Stream, one_line, open_streams
from runtime import launcher

# Python runs a signal handler only when its main thread is back from C code, and MPI_Init may never come
# back. So where train.py is the program, a thread learns of a signal from the interpreter's own handler in C
# (set_wakeup_fd), and can end the process. In a notebook, which owns that descriptor, the handler does it.

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
AGAIN = 0.5  # seconds: a terminal and a launcher may both pass on the same Ctrl-C


class Signals:
    """The signals that stop a run.

    Before can_save is set, there is nothing to save, and a signal ends the process. After that, the first
    signal is kept in .number until the step ends, and a second SIGINT ends the process.
    """

    def __init__(self):
        self.rank = None  # not known yet
        self.guardian = None  # a hang.Guardian, while there is one
        self.again = ""  # the command that goes on with this run; "" where nobody types one
        self.is_program = False
        self.parsed = None  # parse_flags() of a program's arguments
        self._reset()

    def _reset(self):
        self.previous = {}  # {signal: the caller's handler}
        self.number = 0
        self.can_save = False
        self.interrupted = None  # when the first SIGINT came
        self.is_acknowledged = False

    def catch(self):
        """Handle STOPPING, except for signals that are ignored (nohup, a script's &)."""
        if self.previous or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self.previous[number] = signal.signal(number, self.handle)

    def release(self):
        """Put back the caller's handlers. A program keeps ours: a late signal must not change how it ends."""
        if self.is_program:
            return
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self._reset()

    def listen(self, read):
        """Take the number of each signal from a pipe, in a thread of its own."""
        while number := os.read(read, 1)[0]:
            if number not in STOPPING or signal.getsignal(number) != self.handle:  # pdb may have set its own
                continue
            try:
                self._leave_at_once(number)
            except BaseException as e:  # without this thread every later signal would be lost
                with contextlib.suppress(OSError):
                    os.write(2, f"nanoshard: signal {number}, then {one_line(repr(e))}\n".encode())
                os._exit(128 + number)

    def handle(self, number, frame):
        self.number = self.number or number
        if not self.is_program:
            self._leave_at_once(number)

    def _leave_at_once(self, number):
        """End the process if this signal cannot wait for the end of the step."""
        name = signal.Signals(number).name
        if not self.can_save:
            if self.guardian is not None:
                self.guardian.bye()
            self._leave(Outcome.STOPPED, f"stopped by {name} during start-up: there is nothing to save")
        elif number == signal.SIGINT and self._is_second_interrupt():
            if self.guardian is not None:
                self.guardian.left()
            self._leave(INTERRUPTED, f"a second {name}: left at once, the last checkpoint stands")
        self._acknowledge(number, name)

    def _acknowledge(self, number, name):
        """Say on rank 0 that the first signal has come, and what follows.

        The command that goes on is printed already here: after a second Ctrl-C, mpiexec kills all ranks and
        their guardians' last words may not arrive.
        """
        if self.is_acknowledged or self.rank not in (None, 0):
            return
        self.is_acknowledged = True
        said = f"nanoshard: {name}: saves after this step"
        if number == signal.SIGINT:
            said += "; again: leaves at once, without saving"
            if self.again:
                said = f"nanoshard: to go on later, type: {self.again}\n{said}"
        with contextlib.suppress(OSError):
            os.write(2, f"{said}\n".encode())

    def _is_second_interrupt(self):
        """Whether a SIGINT came before this one that was not a copy of the same Ctrl-C."""
        now = time.monotonic()
        if self.interrupted is None:
            self.interrupted = now
            return False
        return now - self.interrupted > AGAIN

    def _leave(self, code, text):
        # One line: a launcher ends the others after the first.
        time.sleep(min(0.3 * max(self.rank or 0, 0), 3))
        speaker = "" if self.rank is None else f"rank {self.rank}: "
        with contextlib.suppress(OSError):
            # Not through sys.stderr: the main thread may hold its lock.
            os.write(2, f"nanoshard: {speaker}{text}\n".encode())
        if self.is_program:
            os._exit(code)
        raise SystemExit(int(code))


signals = Signals()


def dump_on_sigusr2(file):
    """Let SIGUSR2 write the stacks of this process to a file. With None, SIGUSR2 does what it did before."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's stderr is not a file
        if file is None:
            faulthandler.unregister(signal.SIGUSR2)
        elif signal.getsignal(signal.SIGUSR2) != signal.SIG_IGN:
            faulthandler.register(signal.SIGUSR2, file, all_threads=True)


def is_program():
    """Whether train.py was started as a program, and not in a notebook."""
    return Path(sys.argv[0]).name == "train.py"


def start_program():
    """Prepare this process, and parse its arguments, before torch is imported."""
    open_streams()
    signals.catch()
    signals.is_program = True
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=signals.listen, args=(read,), name="signals", daemon=True).start()
    dump_on_sigusr2(sys.__stderr__)
    with surround():
        signals.parsed = parse_flags(sys.argv[1:])


def start_seconds():
    """Return {"first_step_s": seconds since the system started this program}, for the row of its first step.

    In a notebook, and where the system does not say (macOS), the row has no such key.
    """
    if not signals.is_program:
        return {}
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22 of proc(5): ticks since boot
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return {}
    return {"first_step_s": round(now - ticks / os.sysconf("SC_CLK_TCK"), 2)}


@contextlib.contextmanager
def surround():
    """Surround a run, and put back what the caller, for example a notebook, had before it."""
    signals.catch()
    both = [Stream("stdout"), Stream("stderr")]
    try:
        yield
    finally:
        for stream in both:
            stream.flush()
            stream.put_back()
        files.unlock()
        signals.release()
        dump_on_sigusr2(sys.__stderr__ if signals.is_program else None)


# -----------------------------------------------------------------------------
# The flags

def parse_flags(argv):
    """Return (flags, None, timeout), or (None, what is wrong, timeout) on a rank with wrong flags.

    timeout: seconds. All ranks have the same words, so that wrong ones end each rank at once, and rank 0 says
    what is wrong. Only if a file gives flags, which may be missing on one node, do the ranks tell each other.
    So end --help and --list, which only rank 0 prints.
    """
    with wrong_input():
        signals.rank = launcher.env_rank()
        name, n_ranks = launcher.started_by()
    with wrong_input(quiet=signals.rank != 0), contextlib.ExitStack() as stack:
        if signals.rank != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            if "--list" in argv:
                list_runs(argv)
            cfg = parse(argv)
            if n_ranks == 1:
                check_alone(cfg, argv)
                check_data(cfg)
            elif n_ranks > 1:
                check_flags(cfg, n_ranks)
        except (ValueError, OSError) as e:
            if n_ranks > 1 and (given(argv, "config") or given(argv, "init_from")):
                return None, one_line(e), Config.timeout
            if signals.rank and name != "hydra":
                # A launcher may kill all ranks when one ends, and rank 0 has to print first.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(2)
            raise
    in_debugger = cfg.pdb >= 0
    return cfg, None, launcher.NO_TIMEOUT if in_debugger else cfg.timeout


def check_data(cfg):
    """Raise FileNotFoundError or ValueError if there is no data: before torch is imported."""
    from corpus import samples, shards
    if cfg.data != "synthetic":
        for folder, _ in samples.parse_blend(cfg.data):
            shards.load_meta(folder)


def list_runs(argv):
    """--list [DIR]: print the table of the runs in DIR, and end the process with 0."""
    if argv[0] != "--list" or len(argv) > 2:
        raise ValueError(f"{' '.join(argv)}: beside --list give one folder of runs, such as out, only")
    plot.print_runs(Path(argv[1] if len(argv) > 1 else "out"))
    raise SystemExit(Outcome.DONE)

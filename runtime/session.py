"""What surrounds a run: the streams that it prints to and the signals that stop it.

    start_program   the first act of train.py as a program;  surround: around every run
    signals         SIGTERM, SIGUSR1, SIGINT, SIGHUP: which one came;  dump_on_sigusr2: every thread's stack
    Stream          sys.stdout and sys.stderr, which may fail

It imports no torch, whose import takes seconds: a signal that comes meanwhile is handled, too.
"""
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time

from config import Outcome
from interface import files

# python runs a handler only when its main thread is back from C code, and MPI_Init may never come back. so
# where train.py is the program, a thread learns of a signal from the interpreter's own handler in C
# (set_wakeup_fd) and can end the process. in a notebook, which owns that descriptor, the handler does it

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = 130  # 128 + SIGINT: a second Ctrl-C; nothing was saved, so no job script may requeue on it
AGAIN = 0.5  # seconds: a terminal and a launcher may both pass on the same Ctrl-C


class Signals:
    """Before can_save there is nothing to save: a signal ends the process. Later the first one is kept in
    .number until the step ends, and a second SIGINT ends the process."""
    rank, is_program, previous = None, False, {}  # rank: None while it is not known
    number, can_save, interrupted = 0, False, None

    def catch(self):
        """Handle STOPPING, except what is ignored (nohup, a script's &). Only the main thread may do so."""
        if not self.previous and threading.current_thread() is threading.main_thread():
            self.previous = {s: signal.signal(s, self.handle) for s in STOPPING
                             if signal.getsignal(s) not in (signal.SIG_IGN, None)}

    def release(self):
        """Put back the caller's handlers. A program keeps ours: a late signal must not change how it ends."""
        if not self.is_program:
            for s, handler in self.previous.items():
                signal.signal(s, handler)
            self.previous, self.number, self.can_save, self.interrupted = {}, 0, False, None

    def listen(self, read):
        """The thread: take the number of each signal from a pipe."""
        while number := os.read(read, 1)[0]:
            if number in STOPPING and signal.getsignal(number) == self.handle:  # pdb may have set its own
                self._leave_at_once(number)

    def handle(self, number, frame):
        self.number = self.number or number
        if not self.is_program:
            self._leave_at_once(number)

    def _leave_at_once(self, number):
        """End the process if this signal cannot wait for the end of the step."""
        name, now = signal.Signals(number).name, time.monotonic()
        if not self.can_save:
            code, text = Outcome.STOPPED, f"stopped by {name} during start-up: there is nothing to save"
        elif number == signal.SIGINT and self.interrupted and now - self.interrupted > AGAIN:
            code, text = INTERRUPTED, f"a second {name}: left at once, the last checkpoint stands"
        else:
            self.interrupted = self.interrupted or (now if number == signal.SIGINT else None)
            return
        time.sleep(min(0.3 * (self.rank or 0), 3))  # a launcher ends the others after the first: one line
        with contextlib.suppress(OSError):  # not sys.stderr: the main thread may hold its lock
            os.write(2, f"nanoshard: {'' if self.rank is None else f'rank {self.rank}: '}{text}\n".encode())
        if self.is_program:
            os._exit(code)
        raise SystemExit(int(code))


signals = Signals()


def dump_on_sigusr2(file):
    """Let SIGUSR2 write the stacks of this process to a file; None: it does what it did before."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's stderr is no file
        if file is None:
            faulthandler.unregister(signal.SIGUSR2)
        elif signal.getsignal(signal.SIGUSR2) != signal.SIG_IGN:
            faulthandler.register(signal.SIGUSR2, file, all_threads=True)


class Stream:
    """sys.stdout or sys.stderr of a run. A reader that leaves (| head) or a full disk costs what is printed,
    not the run: after the first error the output goes nowhere, and OUT/output_lost.txt says so."""
    lost, folder = [], None  # of both streams: lines that wait until OUT is known

    def __init__(self, name):
        self.name, self.stream = name, getattr(sys, name) or open(os.devnull, "w")
        setattr(sys, name, self)

    def __getattr__(self, attribute):
        return getattr(self.stream, attribute)

    def write(self, text):
        return self._try(self.stream.write, text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, function, *args):
        try:
            return function(*args)
        except OSError as e:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())  # also what is buffered or printed by C code
                self.stream.flush()
            self.lost.append(f"{self.name}: {e}")
            self.report(self.folder)

    @classmethod
    def report(cls, folder):
        """Say what was lost: in OUT, as soon as it is known, and on stderr, which may still be read."""
        cls.folder = folder
        while folder is not None and cls.lost:
            line = f"rank {signals.rank}: {cls.lost.pop(0)}; what is printed there is lost, the run goes on\n"
            with contextlib.suppress(OSError), open(folder / "output_lost.txt", "a") as f:
                f.write(time.strftime("%F %T ") + line)
            sys.stderr.write("nanoshard: " + line)

    def close(self):
        self.flush()
        if getattr(sys, self.name) is self:
            setattr(sys, self.name, self.stream)


def start_program():
    """Call it before torch is imported. Where one of the descriptors 0 to 2 is closed it is opened: another
    file would get its number, and what is printed with it."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: fd
            stream = open(fd, mode, closefd=False)
            setattr(sys, name, stream), setattr(sys, f"__{name}__", stream)
            Stream.lost += [f"{name} is closed"] * (fd > 0)
    signals.catch()
    signals.is_program, (read, write) = True, os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=signals.listen, args=(read,), name="signals", daemon=True).start()
    dump_on_sigusr2(sys.__stderr__)


@contextlib.contextmanager
def surround():
    """Around a run. What the caller had, a notebook for example, is put back."""
    signals.catch()
    streams = [Stream(name) for name in ("stdout", "stderr")]
    try:
        yield
    finally:
        for stream in streams:
            stream.close()
        Stream.folder, Stream.lost = None, []
        files.unlock()
        signals.release()
        dump_on_sigusr2(sys.__stderr__ if signals.is_program else None)

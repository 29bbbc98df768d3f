"""What surrounds a run: the signals that stop it, the streams that it prints to, and its flags.

This file does not import torch, which takes seconds: signals, --help and wrong flags are answered before.
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

import checkpoint
import plot
from config import Config, Outcome
from interface import files
from interface.command_line import INTERRUPTED, given, parse, wrong_input
from interface.layout import check_alone, check_flags
from interface.terminal import Stream, clock, complain, one_line, open_streams
from runtime import launch

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
AGAIN = 0.5  # seconds: a terminal and a launcher may both pass on the same Ctrl-C


class Signals:
    """The signals that stop a run, caught in `with signals:`.

    Before can_save is set there is nothing to save, and a signal ends the process with 85. After that the
    first one is kept in .number until the step ends, and a second SIGINT ends the process with 130. SIGUSR2
    writes the stacks on stderr. A notebook gets its handlers back.
    """
    rank = 0
    is_program = False
    parsed = None  # parse_flags() of a program's arguments

    def __init__(self):
        self.previous = {}  # {signal: the caller's handler}
        self.came = {}  # {signal: when it came first}
        self.number = 0
        self.can_save = False
        self.leaves = None  # when the run will leave after a signal, by the steps before; None: not known

    def __enter__(self):
        if self.previous or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup, a script's &
                self.previous[number] = signal.signal(number, self._handle)
        faulthandler.register(signal.SIGUSR2, file=2)

    def __exit__(self, *error):
        if not self.is_program:  # there, a late signal must not change how it ends
            for number, handler in self.previous.items():
                signal.signal(number, handler)
            self.__init__()

    def answer_in_a_thread(self):
        """Answer signals also while the main thread is inside a C call, such as one that waits for others."""
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
        now = time.monotonic()
        since = now - self.came.setdefault(number, now)  # the first time 0
        if not self.can_save:
            self._leave(Outcome.STOPPED, f"stopped by {name} during start-up: there is nothing to save")
        if number == signal.SIGINT and since > AGAIN:
            self._leave(INTERRUPTED, f"a second {name}: left at once, the last checkpoint stands")
        self.number = self.number or number
        if self.rank == 0 and since == 0:
            wait = ", however long the first step takes"
            if self.leaves is not None:
                wait = f", in about {clock(max(1, self.leaves - now))}"
            say_at_once(f"{name}: finishes this step, saves and leaves{wait}")

    def _leave(self, code, text):
        time.sleep(min(0.3 * self.rank, 3))  # one line: a launcher ends the others after it
        say_at_once(f"rank {self.rank}: {text}")
        if self.is_program:
            os._exit(code)
        raise SystemExit(int(code))


signals = Signals()


def say_at_once(text):
    with contextlib.suppress(OSError):
        os.write(2, f"nanoshard: {text}\n".encode())  # the code below may hold the lock of sys.stderr


def start_program():
    """Prepare this process, and parse its arguments, before torch is imported."""
    open_streams()
    signals.answer_in_a_thread()
    with surround():
        signals.parsed = parse_flags(sys.argv[1:])


@contextlib.contextmanager
def surround():
    """Surround a run, and put back what the caller, for example a notebook, had before it."""
    streams = Stream(sys.stdout), Stream(sys.stderr)
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            with signals:
                yield
        finally:
            for stream in streams:
                stream.flush()
            files.unlock()


def parse_flags(argv):
    """Return (flags, None), or (default flags, what is wrong with files) on a rank, which tells the others.

    All ranks have the same words, so that wrong ones end each rank at once, as --help and --list do; rank 0
    prints. Only files may be missing on some ranks alone, where these are on several nodes.
    """
    with wrong_input():
        start = launch.started_by()
    signals.rank = start.rank
    same_files = start.size == 1 or launch.on_one_node(start)
    printed = sys.stdout if start.rank == 0 else io.StringIO()
    with wrong_input(quiet=start.rank != 0), contextlib.redirect_stdout(printed):
        reads_files = given(argv, "config") or given(argv, "init_from")
        try:
            if "--list" in argv:
                list_runs(argv)
            cfg = parse(argv)
            if start.size == 1:
                check_alone(cfg, argv)
            elif start.size > 1:
                check_flags(cfg, start.size)
            reads_files = True
            if start.rank == 0 or same_files:
                check_paths(cfg)
        except (ValueError, OSError) as e:
            if reads_files and not same_files:
                return Config(), one_line(e)
            if start.rank != 0 and reads_files:
                leave_it_to_rank_0(start, e)
            elif start.rank != 0 and start.launcher != "hydra":  # others end all with the first that ends
                signal.signal(signal.SIGTERM, lambda *_: os._exit(Outcome.WRONG_INPUT))
                time.sleep(1)  # rank 0 prints
            raise
    return cfg, None


def leave_it_to_rank_0(start, error):
    """Wait until rank 0, which should see the same files, has said what is wrong and has ended: then torchrun
    ends all ranks, and mpiexec has fewer. If rank 0 goes on, end all."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(Outcome.WRONG_INPUT))
    siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        if siblings.exists() and len(siblings.read_text().split()) < start.size:
            return
        time.sleep(0.05)
    complain(f"nanoshard: rank {start.rank}, unlike rank 0: {one_line(error)}")
    os.kill(os.getpid(), signal.SIGKILL)  # before the ranks have met, an exit code ends no other


def check_paths(cfg):
    """Raise an error if what a flag names is not there, or does not fit: before torch is imported."""
    goes_on = cfg.resume == "auto" and checkpoint.steps(cfg.out or f"out/{cfg.preset}")
    if cfg.init_from and not goes_on:
        checkpoint.read_index(checkpoint.latest(cfg.init_from))
    if cfg.resume not in ("auto", "none"):
        checkpoint.read_index(cfg.resume)
    if Path(cfg.out).is_file():
        raise ValueError(f"--out {cfg.out} is a file; give a folder")
    from corpus import samples, tokenizer
    samples.open_data(cfg)
    tokenizer.prompt_tokenizer(cfg)


def list_runs(argv):
    """--list [DIR]: print the table of the runs in DIR, and end the process with 0."""
    if argv[0] != "--list" or len(argv) > 2:
        raise ValueError(f"{' '.join(argv)}: beside --list give one folder of runs, such as out, only")
    plot.print_runs(Path(argv[1] if len(argv) > 1 else "out"))
    raise SystemExit(Outcome.DONE)

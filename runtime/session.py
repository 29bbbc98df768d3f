"""What surrounds a run: the signals that stop it, and its flags.

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
from interface.command_line import INTERRUPTED, given, parse, wrong_input
from interface.layout import check_alone, check_layout
from interface.terminal import Stream, clock, one_line, warn
from runtime import launch

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
AGAIN = 0.5  # seconds: a terminal and a launcher may both pass on the same Ctrl-C


class Signals:
    """The signals that stop a program's run; in a notebook they do what they always do.

    Before can_save is set there is nothing to save, and a signal ends the process with 85. After that the
    first one is kept in .number until the step ends, and a second SIGINT ends the process with 130. SIGUSR2
    writes the stacks on stderr.
    """
    rank = 0
    parsed = None  # parse_flags() of a program's arguments
    pipe = None  # its end into which a signal writes

    def __init__(self):
        self.came = {}  # {signal: when it came first}
        self.number = 0
        self.can_save = False
        self.leaves = None  # when the run will leave after a signal, by the steps before; None: not known

    def catch(self):
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, a script's &
                signal.signal(number, self._heard)
        if self.pipe is None:
            read, self.pipe = os.pipe()
            os.set_blocking(self.pipe, False)
            # It answers also while the main thread is inside a C call, such as one that waits for others.
            threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        faulthandler.register(signal.SIGUSR2, file=2)

    def _heard(self, number, frame):
        """Leave the answer to the thread."""

    def _listen(self, read):
        while number := os.read(read, 1)[0]:
            if signal.getsignal(number) == self._heard:  # pdb may have set its own
                self._handle(number)

    def _handle(self, number):
        name = signal.Signals(number).name
        now = time.monotonic()
        since = now - self.came.setdefault(number, now)  # the first time 0
        if not self.can_save:
            self._say(f"stopped by {name} during start-up: there is nothing to save")
            os._exit(Outcome.STOPPED)
        elif number == signal.SIGINT and since > AGAIN:
            self._say(f"a second {name}: left at once, the last checkpoint stands")
            os._exit(INTERRUPTED)
        elif since == 0:
            self.number = self.number or number
            wait = "" if self.leaves is None else f", in about {clock(max(1, self.leaves - now))}"
            self._say(f"{name}: finishes this step, saves and leaves{wait}")

    def _say(self, text):
        if self.rank == 0:
            with contextlib.suppress(OSError):
                os.write(2, f"nanoshard: {text}\n".encode())  # a print may have been interrupted


signals = Signals()


def start_program():
    """Prepare this process, and parse its arguments, before torch is imported."""
    signals.catch()
    sys.stdout = Stream(sys.stdout)
    sys.stderr = Stream(sys.stderr)
    signals.parsed = parse_flags(sys.argv[1:])


def parse_flags(argv):
    """Return (flags, None), or (default flags, what is wrong with files) on a rank, which tells the others.

    All ranks have the same words, so that wrong ones end each rank, as --help and --list do; rank 0 prints.
    It alone looks for files. Those may be missing on some ranks alone, but where its end ends all it need not
    meet the others.
    """
    with wrong_input():
        start = launch.started_by()
    signals.rank = start.rank
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
                check_layout(cfg, start.size)
            if start.rank == 0:
                reads_files = True
                check_paths(cfg)
        except (ValueError, OSError) as e:
            if start.rank > 0:  # rank 0 says it first, and most launchers then end this rank
                signal.signal(signal.SIGTERM, lambda *_: os._exit(Outcome.WRONG_INPUT))
                time.sleep(3)
            ends_all = start.rank == 0 and start.launcher in ("single", "hydra")
            if reads_files and not ends_all:
                return Config(), one_line(e)
            if start.rank == 0:
                warn(e)
                launch.end_others(start)
            raise SystemExit(Outcome.WRONG_INPUT) from None
    return cfg, None


def check_paths(cfg):
    """Raise an error if what a flag names is not there, or does not fit: before torch is imported."""
    goes_on = cfg.resume == "auto" and checkpoint.steps(cfg.out or f"out/{cfg.preset}")
    if cfg.init_from and not goes_on:
        checkpoint.read_index(checkpoint.latest(cfg.init_from))
    if cfg.resume not in ("auto", "none"):
        checkpoint.read_index(cfg.resume, "give auto, or OUT/step_N of a run (python train.py --list shows "
                              "the newest of each in out)")
    from corpus import samples, tokenizer
    samples.open_data(cfg)
    tokenizer.prompt_tokenizer(cfg)


def list_runs(argv):
    """--list [DIR]: print the table of the runs in DIR, and end the process with 0."""
    if argv[0] != "--list" or len(argv) > 2:
        raise ValueError(f"{' '.join(argv)}: beside --list give one folder of runs, such as out, only")
    plot.print_runs(Path(argv[1] if len(argv) > 1 else "out"))
    raise SystemExit(Outcome.DONE)

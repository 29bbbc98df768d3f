"""What the ranks decide together: that they have the same flags, code and data, and when to stop early.

    parse_flags     this rank's flags, or what is wrong with them
    same_start      all ranks have the same flags and the same code
    compare         a value that differs between ranks is wrong input
    read_together   if one rank cannot read something, no rank goes on
    Stop            a signal on any rank, the file OUT/stop, or --max-minutes
"""
import contextlib
import dataclasses
import hashlib
import io
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch

from config import Config
from interface.command_line import one_line, wrong_input
from parallel import MAX
from runtime import launch, session, watch

ROOT = Path(__file__).resolve().parent.parent
STOP_FILE = "stop"
LOOK_EVERY = 1.0  # seconds between two looks at OUT/stop


def parse_flags(parse, argv):
    """Return (flags, None, timeout), or (None, what is wrong, timeout) on a rank with wrong flags.

    timeout: seconds. With several ranks, the other ranks must hear what is wrong. A single process with wrong
    flags ends at once. So does --help, which only rank 0 prints.
    """
    argv = sys.argv[1:] if argv is None else argv
    with wrong_input(), contextlib.ExitStack() as stack:
        session.signals.rank = launch.env_rank()
        if session.signals.rank != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            cfg = parse(argv)
        except (ValueError, OSError) as e:
            _, n_ranks = launch.started_by()
            if n_ranks == 1:
                raise
            return None, str(e), _timeout(argv)
    in_debugger = cfg.pdb >= 0
    return cfg, None, launch.NO_TIMEOUT if in_debugger else cfg.timeout


def _timeout(argv):
    """Return the seconds of --timeout in flags that cannot be parsed, or the default."""
    text = " ".join(argv) + " "
    given = re.findall(r"--timeout[= ]([1-9][0-9]*) ", text)
    seconds = float(given[-1]) if given else Config.timeout
    return min(launch.NO_TIMEOUT, seconds)


def same_start(world, cfg, wrong):
    """End all ranks with one line and code 2 if flags are wrong on any rank, or flags or code differ.

    cfg, wrong: from parse_flags(). Collective over the world.
    """
    with launch.exit_together(world):
        texts = world.axis.gather_objects(wrong)
        text = next((text for text in texts if text), None)
        if text is not None:
            ranks = [rank for rank, other in enumerate(texts) if other == text]
            if len(ranks) < world.size:
                text = f"{watch.format_ranks(ranks)} only: {text}"
            raise ValueError(text)

        flags = {f"--{name.replace('_', '-')}": repr(value)
                 for name, value in dataclasses.asdict(cfg).items()}
        compare(world, flags, "start all ranks with the same flags")
        code = {"torch": torch.__version__, **loaded_files()}
        compare(world, code, "give all ranks the same code")


def loaded_files():
    """Return {path below the root: a hash of its text} of our files that this process has loaded."""
    hashes = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if "site-packages" in file or not file.endswith(".py"):
            continue
        if not Path(file).is_absolute():  # some of torch's are not
            continue
        path = Path(file).resolve()
        if path.is_relative_to(ROOT):
            hashes[path.relative_to(ROOT).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return hashes


def compare(world, values, cure):
    """Raise ValueError, on all ranks, if a value of {name: str} differs between ranks.

    Names that only some ranks have are not compared. Collective over the world: each rank sends a digest, and
    sends the values, too, only if the digests differ.
    """
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
    if len(set(world.axis.gather_objects(digest))) == 1:
        return
    everyone = world.axis.gather_objects(values)
    common = set.intersection(*map(set, everyone))
    for name in sorted(common):
        ranks_with = {}  # {value: ranks}
        for rank, theirs in enumerate(everyone):
            ranks_with.setdefault(theirs[name], []).append(rank)
        if len(ranks_with) > 1:
            raise ValueError(f"{_describe_difference(name, ranks_with)}; {cure}")


def _describe_difference(name, ranks_with):
    """Return "rank 1 has NAME VALUE, ranks 0, 2 have NAME VALUE", for at most four values.

    ranks_with: {value: ranks}. The value that the fewest ranks have comes first.
    """
    parts = []
    for value, ranks in sorted(ranks_with.items(), key=lambda item: len(item[1])):
        verb = "has" if len(ranks) == 1 else "have"
        parts.append(f"{watch.format_ranks(ranks)} {verb} {name} {value}")
    if len(parts) > 4:
        parts = [*parts[:4], "..."]
    return ", ".join(parts)


def read_together(axis, read, *args):
    """Return read(*args) of this rank, or raise ValueError on all ranks if one of them cannot read.

    The weights are sent next, and no rank must wait for one that has failed. Collective over the axis.
    """
    result = wrong = None
    try:
        result = read(*args)
    except (ValueError, OSError) as e:
        wrong = one_line(e)
    for text in axis.gather_objects(wrong):  # a short string per rank
        if text:
            raise ValueError(text)
    return result


class Stop:
    """When to stop before the last step: after a signal on any rank, if the file OUT/stop appears, or before
    --max-minutes have passed.

    The step under way is always finished.
    """

    def __init__(self, max_minutes):
        self.limit = max_minutes * 60  # seconds; 0: none
        self.file = None  # None: this rank looks for no file
        self.looked = -math.inf  # when it looked last
        self.started = time.monotonic()
        self.longest_step = 0.0  # seconds, so far
        self.longest_save = 0.0

    def watch_file(self, out):
        """From now on `touch OUT/stop` stops the run, where no signal reaches the ranks. Only one rank
        needs to look. A file that is already there has stopped an earlier run, and is removed.
        """
        self.file = out / STOP_FILE
        if os.path.lexists(self.file):
            try:
                self.file.unlink()
            except OSError as e:
                raise ValueError(f"{self.file} would stop this run and cannot be removed: {e.strerror}; "
                                 "remove it, or give another --out") from e
            print(f"removed {self.file}, which was there before this start", flush=True)

    def step_took(self, seconds):
        self.longest_step = max(self.longest_step, seconds)

    def save_took(self, seconds):
        self.longest_save = max(self.longest_save, seconds)

    def poll(self, world):
        """Return why to stop: a signal's name, "the file stop", "max-minutes", or None to go on; the same on
        all ranks.

        The time for two more steps and two saves is kept in reserve. Collective over the world.
        """
        flags = torch.tensor([session.signals.number, int(self._file_is_there()), int(self._is_late())])
        world.axis.all_reduce(flags, MAX)  # three small integers on the host, over the world
        number, is_asked, is_late = flags.tolist()
        if number:
            return signal.Signals(number).name
        if is_asked:
            return f"the file {STOP_FILE}"
        if is_late:
            return "max-minutes"
        return None

    def _file_is_there(self):
        """Whether OUT/stop exists. This rank looks once per second at most: a shared disk may be slow."""
        now = time.monotonic()
        if self.file is None or now - self.looked < LOOK_EVERY:
            return False
        self.looked = now
        return os.path.lexists(self.file)  # False if the disk does not answer

    def _is_late(self):
        if not self.limit:
            return False
        elapsed = time.monotonic() - self.started
        reserve = 2 * (self.longest_step + self.longest_save)
        return elapsed + reserve > self.limit

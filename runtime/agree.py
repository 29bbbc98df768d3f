"""What the ranks decide together: that they have the same flags, code and data, and when to stop early.

    parse_flags, same_start   this rank's flags, or what is wrong with them; the others' flags and code
    compare                   wrong input where a value differs between ranks
    read_together             what one rank cannot read, no rank goes on with
    Stop                      a signal on any rank, or --max-minutes
"""
import contextlib
import dataclasses
import hashlib
import io
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


def parse_flags(parse, argv):
    """-> (flags, None, --timeout), or among several ranks (None, what is wrong, --timeout): the others must
    hear of it. --help and a single process with wrong flags end at once; rank 0 alone prints the help."""
    with wrong_input(), contextlib.ExitStack() as stack:
        rank = session.signals.rank = launch.env_rank()
        if rank != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            cfg = parse(argv := sys.argv[1:] if argv is None else argv)
            return cfg, None, cfg.timeout if cfg.pdb < 0 else launch.NO_TIMEOUT
        except (ValueError, OSError) as e:
            if launch.started_by()[1] == 1:
                raise
            seconds = re.findall(r"--timeout[= ]([1-9][0-9]*) ", " ".join(argv) + " ")
            return None, str(e), min(launch.NO_TIMEOUT, float([Config.timeout, *seconds][-1]))


def same_start(world, cfg, wrong):
    """Wrong flags on a rank, flags or code that differ: one line, and all ranks exit with code 2. cfg,
    wrong: of parse_flags()."""
    with launch.exit_together(world):
        texts = world.axis.gather_objects(wrong)
        if any(texts):
            text = next(filter(None, texts))
            ranks = [rank for rank, t in enumerate(texts) if t == text]
            raise ValueError(f"{watch.format_ranks(ranks)} only: " * (len(ranks) < world.size) + text)
        flags = {f"--{k.replace('_', '-')}": repr(v) for k, v in dataclasses.asdict(cfg).items()}
        compare(world, flags, "start all ranks with the same flags")
        compare(world, {"torch": torch.__version__, **loaded_files()}, "give all ranks the same code")


def loaded_files():
    """-> {path below the root: a hash of its text} of our files that this process has loaded."""
    paths = {getattr(m, "__file__", None) or "" for m in list(sys.modules.values())}
    ours = (Path(path).resolve() for path in paths if "site-packages" not in path
            and path.endswith(".py") and Path(path).is_absolute())  # some of torch's are not
    return {path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in ours if path.is_relative_to(ROOT)}


def compare(world, values, cure):
    """ValueError, on all ranks, where a value of {name: str} differs between ranks; names that only some have
    are not compared. Collective over the world: a digest from each rank, the values only where it differs."""
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).digest()
    if len(set(world.axis.gather_objects(digest))) == 1:
        return
    everyone = world.axis.gather_objects(values)
    for name in sorted(set.intersection(*map(set, everyone))):
        groups = {}  # value: ranks
        for rank, theirs in enumerate(everyone):
            groups.setdefault(theirs[name], []).append(rank)
        if len(groups) > 1:
            said = [f"{watch.format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {name} {value}"
                    for value, ranks in sorted(groups.items(), key=lambda group: len(group[1]))]
            raise ValueError(f"{', '.join(said[:4])}{', ...' * (len(said) > 4)}; {cure}")


def read_together(world, read, *args):
    """read(*args) on every rank -> its result. What one rank cannot read, no rank goes on with: the weights
    are sent next. Collective; ValueError on all ranks."""
    out = wrong = None
    try:
        out = read(*args)
    except (ValueError, OSError) as e:
        wrong = one_line(e)
    if found := next(filter(None, world.gather_objects(wrong)), None):  # a short string per rank
        raise ValueError(found)
    return out


class Stop:
    """When to stop before the last step: after a signal on any rank, or before --max-minutes have passed. The
    step under way is always finished."""

    def __init__(self, max_minutes):
        self.limit, self.started = max_minutes * 60, time.monotonic()
        self.longest_step = self.longest_save = 0.0  # seconds, so far

    def step_took(self, seconds):
        self.longest_step = max(self.longest_step, seconds)

    def save_took(self, seconds):
        self.longest_save = max(self.longest_save, seconds)

    def poll(self, world):
        """-> why to stop, the same on all ranks: a signal's name, "max-minutes", or None to go on. Collective
        over the world. The time of two more steps and two saves is kept in reserve."""
        elapsed, reserve = time.monotonic() - self.started, 2 * (self.longest_step + self.longest_save)
        late = self.limit and elapsed + reserve > self.limit
        flags = torch.tensor([session.signals.number, int(bool(late))])
        world.axis.all_reduce(flags, MAX)  # two small integers on the host, over the world
        number, late = flags.tolist()
        return signal.Signals(number).name if number else "max-minutes" if late else None


"""One optimizer step, call by call, with each collective where it starts: what to read beside the code.

    mpiexec -n 2 python bench/one_step.py tiny --data synthetic
    mpiexec -n 4 python bench/one_step.py tiny-moe --data synthetic --ep 2 --zero 1

The flags are train.py's. Rank 0 takes a few steps as train.py does, watches the functions of the files that
train, and prints those of the last step in the order of their calls: file, name, and the first sentence of
the function's docstring. Calls that repeat stand once, with their number. A line with an arrow is a
collective or a message: the axis, its ranks, the tensor, and the bytes that rank 0 sends. It runs on CPUs,
where backward runs in the thread that called it and can be watched there. docs/one-step.md holds the output
of the first command.
"""
import functools
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, check_ranks, one_rank_speaks, start
from runtime.launch import launch, shutdown

from training import Training

from interface.command_line import parse

FILES = {str(ROOT / name) for name in (
    "train.py", "pipeline.py", "model.py", "attention.py", "layers.py", "ddp.py", "parallel.py",
    "optim.py", "muon.py", "zero.py", "moe.py", "ops/permute.py")}
STEPS = 3  # the last one is shown: in the first, buffers are made
LONGEST = 3  # calls in a sequence whose repetition is noticed
SMALL = 2  # lines, its docstring left out: a function without calls that is not longer is not shown
# Shown only if they call something: without that, they have nothing to do.
IDLE = {"GPT.provide_weights", "DataParallel.provide_weights", "gather_rows", "scatter_rows", "select_rows",
        "reset_stats", "update_router_bias", "Bucket.after_update", "Bucket.count_factor"}
PASSED_OVER = {"Block.maybe_recompute", "MoE.maybe_recompute"}  # What they call is shown in their place.
OF_MICRO_BATCH = {"several_stages.<locals>.forward", "several_stages.<locals>.backward"}
WIDTH = 110


@dataclass
class Call:
    """A call of a function, or a collective, whose `text` says all."""
    text: str
    small: bool = False
    times: int = 1
    calls: list = field(default_factory=list)

    def same(self, other):
        """Whether both do the same; how many rows go to an expert may differ."""
        mine, others = (call.text.partition("-> all-to-all")[:2] for call in (self, other))
        return (mine == others and len(self.calls) == len(other.calls)
                and all(map(Call.same, self.calls, other.calls)))


@functools.cache
def describe(code):
    """Return (place, sentence, small) of a function: the first sentence of its docstring, or ""."""
    lines = inspect.getsource(code).splitlines()
    text = code.co_consts[0] if isinstance(code.co_consts[0], str) else ""
    sentence = " ".join(inspect.cleandoc(text).split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    place = f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname.replace('.<locals>', '')}"
    small = len(lines) - len(text.splitlines()) <= SMALL or code.co_qualname in IDLE
    return place, sentence, small


class Watcher:
    """What sys.setprofile calls: it builds a tree of calls."""

    def __init__(self):
        self.root = Call("")
        self.path = [self.root]  # from the root to the call that is running
        self.frames = []

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event == "call":
            if code.co_qualname == "CollectiveLog.record":
                self.path[-1].calls.append(Call(collective(**frame.f_locals)))
            elif (code.co_filename in FILES and not code.co_name.startswith("<")
                  and code.co_qualname not in PASSED_OVER):
                place, sentence, small = describe(code)
                place += of_this_call(code.co_qualname, frame.f_locals)
                self._enter(frame, Call(f"{place}: {sentence}" if sentence else place, small))
            elif code.co_qualname == "Tensor.backward":
                self._enter(frame, Call("torch Tensor.backward: it calls what follows, the last layer first"))
        elif event == "return" and self.frames and self.frames[-1] is frame:
            self.frames.pop()
            self.path.pop()

    def _enter(self, frame, call):
        self.path[-1].calls.append(call)
        self.path.append(call)
        self.frames.append(frame)


def of_this_call(name, values):
    if name in OF_MICRO_BATCH:
        return f" of micro-batch {values['i']}"
    if name.startswith("Axis.start_") and values["self"].size == 1:
        return ", one rank, so nothing is sent"
    return ""


def collective(self, axis, kind, tensor=None, nbytes=0.0):
    """Return the line of a collective, from the arguments of CollectiveLog.record."""
    what = "" if tensor is None else f" of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"-> {kind} over {axis.name} {set(axis.ranks)}{what}, {nbytes:,.0f} bytes"


def tidy(calls):
    """Leave out small and idle functions that call nothing; let calls that repeat stand once."""
    kept = []
    for call in calls:
        call.calls = tidy(call.calls)
        if call.calls or not call.small:
            kept.append(call)
    return fold(kept)


def fold(calls):
    """Replace n equal calls, or a sequence of calls that stands n times, by one with its number."""
    folded, i = [], 0
    while i < len(calls):
        length, times = longest_repetition(calls[i:])
        if times == 1:
            length = 1
        block = calls[i:i + length]
        if length > 1:
            block = [Call("these, one after the other", calls=block)]
        block[0].times = times
        folded += block
        i += length * times
    return folded


def longest_repetition(calls):
    """Return (length, times) of the sequence at the beginning of calls that covers the most by repeating."""
    best = 1, 1
    for length in range(1, LONGEST + 1):
        times = 1
        while all(map(Call.same, calls[:length], calls[times * length:])) \
                and len(calls) >= (times + 1) * length:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = length, times
    return best


def lines(calls, depth=0):
    """Yield the lines of a tree of calls."""
    for call in calls:
        times = f" ({call.times} times)" if call.times > 1 else ""
        yield shorten("  " * depth + call.text, WIDTH - len(times)) + times
        yield from lines(call.calls, depth + 1)


def shorten(text, width):
    """Cut text at a word so that it has at most `width` characters."""
    return text if len(text) <= width else text[:width - 3].rpartition(" ")[0].rstrip(" ,:") + "..."


def watch_step(cfg, world):
    """Train for STEPS steps. Return the lines of the last one on this rank. Collective."""
    training = Training(cfg, world)
    for _ in range(STEPS - 1):
        training.step(training.batches(), full=True)
    batches = training.batches()
    watcher = Watcher()
    sys.setprofile(watcher)
    training.step(batches, full=True)
    sys.setprofile(None)
    training.wait()
    return list(lines(tidy(watcher.root.calls)))


def main(argv=None):
    with one_rank_speaks():
        cfg = parse(sys.argv[1:] if argv is None else argv, prog="one_step.py", about=__doc__)
    world = launch(timeout=300)
    with world.everyone.input():
        if world.device.type != "cpu":
            raise ValueError("on a GPU backward runs in a thread of its own, which cannot be watched; type "
                             "CUDA_VISIBLE_DEVICES= in front of the command")
        check_ranks(cfg, world, "one_step.py", argv)
        shown = watch_step(cfg, world)
    if world.rank == 0:
        for line in shown:
            print(line)
    shutdown(world)


if __name__ == "__main__":
    start(main)

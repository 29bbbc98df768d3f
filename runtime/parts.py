"""What a Run of train.py holds: its data, the parts that compute, what watches over it, and how it ends."""
from dataclasses import dataclass
from typing import Any, NamedTuple

from config import Outcome


class Data(NamedTuple):
    """What a run reads."""
    train: Any       # corpus.shards' sources of samples
    val: Any
    vocab_size: int
    identity: str    # words that other data would change, the same on all ranks; checkpoints keep them
    tokenizer: Any   # for samples of text; None if the run prints none


@dataclass
class Parts:
    """The parts that compute: this rank's part of the model, and what trains it."""
    mesh: Any
    choice: Any = None  # fast.choose.Choice
    model: Any = None
    data_parallel: Any = None
    opt: Any = None
    step: Any = None    # a Step, or its fast twin


@dataclass
class Oversight:
    """The objects that watch over a run."""
    watchdog: Any           # ends a run that hangs
    stop: Any               # signals, OUT/stop and --max-minutes
    timers: Any             # --timers
    skip: Any               # the steps of --train-range-to-skip
    progress: Any = None    # the time that is left
    clock: Any = None       # milliseconds per step
    guard: Any = None       # skips spikes and steps that are not finite
    stragglers: Any = None  # slow ranks
    layer_norms: Any = None  # --log-layers
    sent: Any = None        # the bytes that this rank sent in the first step, by axis


@dataclass
class Ending:
    """How a run ends, and why."""
    outcome: Outcome = Outcome.DONE
    stop_reason: str | None = None  # a signal, OUT/stop, or --max-minutes
    skip_reason: str | None = None  # why the last logged step was skipped
    differences: Any = None         # how the replicas differ

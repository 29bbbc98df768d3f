"""Steps that are not taken: asked for (--train-range-to-skip A B [C D ...], 1-based, both ends included),
found (--skip-spikes SIGMA: loss or gradient norm out of proportion), or impossible (a number is not finite).

A spike is data meeting a state of the weights (PaLM, arXiv:2204.02311, section 5.1): the same batches from
another checkpoint do no harm. So the data is passed over, and the run goes on as if it had never been:
    advance     step, tokens, data position, learning rate (all are functions of the step), evaluation, saving
    untouched   weights, Adam's moments and its own t, weight decay, the routers' bias, the detector's window
A range costs no forward and no backward; a spike has cost both when it is seen.
"""
import math
import statistics

import torch

WINDOW = 128  # accepted steps that a new one is compared with; none is skipped before half of them are there
PATIENCE = 8  # steps not taken in a row that end the run: this is no spike any more
GIVEN_UP = 42  # exit code


class Ranges:
    """Which steps to skip. Errors: ValueError when a pair is missing, reversed or not 1-based."""

    def __init__(self, ends):
        ends = list(ends)
        if len(ends) % 2:
            raise ValueError(f"--train-range-to-skip takes pairs A B, got {len(ends)} numbers; "
                             "give the last step of every range")
        pairs = sorted(zip(ends[::2], ends[1::2], strict=True))
        self.pairs = []  # sorted, merged
        for a, b in pairs:
            if not 1 <= a <= b:
                raise ValueError(f"--train-range-to-skip {a} {b}: steps count from 1 and a range runs "
                                 "from low to high")
            if self.pairs and a <= self.pairs[-1][1] + 1:
                self.pairs[-1] = (self.pairs[-1][0], max(b, self.pairs[-1][1]))
            else:
                self.pairs.append((a, b))

    def __contains__(self, step):
        return any(a <= step <= b for a, b in self.pairs)

    def __str__(self):
        return ", ".join(f"{a}-{b}" for a, b in self.pairs)

    def too_late(self, done, known):
        """-> a warning or "". done: the steps of the checkpoint resumed from; known: its own ranges."""
        late = [(a, b) for a, b in self.pairs
                if b <= done and not any(c <= a and b <= d for c, d in known.pairs)]
        if not late:
            return ""
        ends = " ".join(f"{a} {b}" for a, b in late)
        return (f"nanoshard: --train-range-to-skip {ends} has no effect: this run goes on after step {done}; "
                f"--resume a checkpoint before step {late[0][0]}")

    def ends(self):
        """The flat list again, for the checkpoint and for a union with the command line's."""
        return [e for pair in self.pairs for e in pair]


def spike(window, loss, norm, sigma):
    """Why this step is a spike, or None. window: [(loss, gradient norm)] of accepted steps. Median and MAD,
    not mean and deviation: an outlier in it must not hide the next (1.4826 MAD is a normal's deviation)."""
    if len(window) < WINDOW // 2:
        return None
    losses, norms = zip(*window, strict=True)
    for name, value, past in (("loss", loss, losses), ("gradient norm", norm, norms)):
        median = statistics.median(past)
        width = 1.4826 * max(statistics.median(abs(x - median) for x in past), 1e-3 * abs(median))
        if value > median + sigma * width:
            return f"spike: {name} {value:.4g} > {median:.4g} + {sigma:g} * {width:.4g}"
    return None


class Guard:
    """Decides before each update, and counts. Window and counts live in state: the checkpoint holds them.
    fp16's loss scale begins at 2**16: the 16 overflows that may bring it down to 1 are no failures."""

    def __init__(self, cfg, world, state):
        self.sigma, self.world, self.state = cfg.skip_spikes, world, state
        self.patience = PATIENCE + 16 * (cfg.dtype == "fp16")
        self.reason = None  # why the step just done was not taken, if the host knows
        self.taken = []  # since the last settle(), per step: () 1.0 where it was not finite, None for a spike

    def veto(self, totals):
        """Before the update -> True on all ranks if it must not be made. totals: (4,), summed over all ranks.
        Costs nothing without --skip-spikes; with it, one look from the host and one small collective."""
        self.reason = None
        if not self.sigma:
            return False
        loss, norm = totals[:2].tolist()  # sync point
        finite = math.isfinite(loss) and math.isfinite(norm)
        reason = spike(self.state.window, loss, norm, self.sigma) if finite else None
        self.reason = None if finite else not_finite(loss, norm)
        # all ranks computed the same bits; this guards against one that decides otherwise and hangs the rest
        seen = self.world.axis.any(reason is not None)  # MAX of one integer on the host, over the world
        if seen:
            self.reason = reason or "spike: seen by another rank"
        elif finite:  # else the optimizer refuses it, on the device
            self.state.window = [*self.state.window, (loss, norm)][-WINDOW:]
        return seen

    def settle(self):
        """Count what the steps since the last call came to -> True if too many in a row were not taken."""
        on_device = [t for t in self.taken if t is not None]
        flags = iter(torch.stack(on_device).tolist() if on_device else [])  # sync point
        over = False
        for t in self.taken:
            refused = t is not None and next(flags) > 0
            self.state.nan_steps += refused
            self.state.skipped += t is None
            self.state.streak = self.state.streak + 1 if refused or t is None else 0
            over = over or self.state.streak >= self.patience
        self.taken = []
        return over


def not_finite(loss, norm):
    return f"not finite: loss {loss:.4g}, gradient norm {norm:.4g}"


def rewind(checkpoints, state, reason):
    """The last words of a run whose last steps were not taken. checkpoints: paths, newest first."""
    last, first = state.step, state.step - state.streak + 1
    good = [p for p in checkpoints if int(p.name[5:]) < first]
    early = next((p for p in good if int(p.name[5:]) <= first - 100), good[0] if good else None)
    begin = max(int(early.name[5:]) + 1 if early else 1, first - 50)
    where = f"--resume {early} " if early else ""
    newest = f"the last good checkpoint is {good[0]}" if good else "no checkpoint was saved before"
    return (f"nanoshard: gave up: steps {first} to {last} were not taken ({reason}); {newest}\n"
            f"nanoshard: to go round it, the same command with {where}"
            f"--train-range-to-skip {begin} {first + 150}")


def spoil(batches):
    """--inject-spike: every target becomes the token 0. The loss is then large and all gradients
    point one way, which is what a real spike does; a shuffle of the targets would cancel out."""
    return [(x, torch.zeros_like(y)) for x, y in batches]

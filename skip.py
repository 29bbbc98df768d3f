"""Steps that are not taken, for one of three reasons: a range (--train-range-to-skip A B [C D ...], 1-based,
both ends included); a spike (--skip-spikes SIGMA: loss or gradient norm far above the last steps'); a loss or
gradient norm that is not finite.

A spike happens when certain data meets a certain state of the weights: the same batches do no harm to another
checkpoint (PaLM, arXiv:2204.02311, section 5.1). So the data of a skipped step is dropped:
    advance     step, tokens, data position, learning rate (all are functions of the step), evaluation, saving
    unchanged   weights, Adam's moments and its own t, the routers' bias, the detector's window
A range costs no forward and no backward pass; a spike has cost both when it is seen.
"""
import math
import statistics

import torch

WINDOW = 128  # accepted steps that a step is compared with; with less than half as many, nothing is a spike
MAX_REFUSED = 8  # steps in a row that may be refused: so many are no spike, and the run ends with code 42


class Ranges:
    """Which steps to skip. ends: A, B, C, D, ... ValueError: a pair is incomplete, reversed, not 1-based."""

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
        """-> a warning or "". done: steps of the checkpoint that the run resumes; known: its own Ranges."""
        late = [(a, b) for a, b in self.pairs
                if b <= done and not any(c <= a and b <= d for c, d in known.pairs)]
        if not late:
            return ""
        ends = " ".join(f"{a} {b}" for a, b in late)
        return (f"nanoshard: --train-range-to-skip {ends} has no effect: this run goes on after step {done}; "
                f"--resume a checkpoint before step {late[0][0]}")

    def ends(self):
        """-> [A, B, C, D, ...], merged: for the checkpoint, and to be united with the command line's."""
        return [e for pair in self.pairs for e in pair]


def spike(window, loss, norm, sigma):
    """-> why this step is a spike, or None. window: [(loss, gradient norm)] of accepted steps.

    A value is a spike if it exceeds the median by sigma deviations. Median and MAD instead of mean and
    standard deviation, so that one outlier in the window does not hide the next; 1.4826 MAD is the standard
    deviation of a normal distribution."""
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
    """Decides before each update whether it is made, and counts the steps that are refused. Window and counts
    are in state, so checkpoints contain them. The caller appends to refused_flags after every step."""

    def __init__(self, cfg, world, state):
        self.sigma, self.world, self.state = cfg.skip_spikes, world, state
        # fp16's loss scale starts at 2**16: the 16 overflows that may bring it down to 1 are no failures
        self.max_refused = MAX_REFUSED + 16 * (cfg.dtype == "fp16")
        self.reason = None  # why the last step was refused, where the host knows
        # [(step, flag)] since the last count_refused(). flag: () 1.0 on the device if the step was not
        # finite, else 0.0; None for a spike
        self.refused_flags = []
        self.given_up = False  # stays true once too many steps in a row were refused
        self.refused_range = None  # (first, last) of those steps

    def veto(self, stats):
        """Before the update -> True on all ranks if it must not be made. stats: (loss, grad_norm, ...), ()
        fp64 each, the same on all ranks. Without --skip-spikes nothing is read; with it, this costs one
        synchronisation and one small collective over the world."""
        self.reason = None
        if not self.sigma:
            return False
        loss, norm = torch.stack(tuple(stats)).tolist()[:2]  # sync point
        finite = math.isfinite(loss) and math.isfinite(norm)
        reason = spike(self.state.window, loss, norm, self.sigma) if finite else None
        self.reason = None if finite else not_finite(loss, norm)
        # all ranks compute the same bits; if one decided differently, the others would wait for it for ever
        seen = self.world.axis.any(reason is not None)  # MAX of one integer on the host, over the world
        if seen:
            self.reason = reason or "spike: seen by another rank"
        elif finite:  # the optimizer itself refuses a step that is not finite, on the device
            self.state.window = [*self.state.window, (loss, norm)][-WINDOW:]
        return seen

    def count_refused(self):
        """Count the refused steps since the last call -> given_up, which stays true once max_refused steps in
        a row were refused. One synchronisation. Call it before a save: the checkpoint has the counts."""
        on_device = [flag for _, flag in self.refused_flags if flag is not None]
        values = iter(torch.stack(on_device).tolist() if on_device else [])  # sync point
        for step, flag in self.refused_flags:
            not_taken = flag is not None and next(values) > 0
            self.state.nan_steps += not_taken
            self.state.skipped += flag is None
            self.state.streak = self.state.streak + 1 if not_taken or flag is None else 0
            if self.state.streak >= self.max_refused:
                self.given_up, self.refused_range = True, (step - self.state.streak + 1, step)
        self.refused_flags = []
        return self.given_up


def not_finite(loss, norm):
    """-> why a step whose loss or gradient norm is NaN or infinite was not taken."""
    return f"not finite: loss {loss:.4g}, gradient norm {norm:.4g}"


def give_up_message(checkpoints, first, last, reason):
    """-> the last words of a run that gave up, with a command that avoids these steps. checkpoints: paths,
    newest first. first, last: the steps that were refused. reason: of the last one, or None if not known."""
    good = [p for p in checkpoints if int(p.name[5:]) < first]
    early = next((p for p in good if int(p.name[5:]) <= first - 100), good[0] if good else None)
    begin = max(int(early.name[5:]) + 1 if early else 1, first - 50)
    where = f"--resume {early} " if early else ""
    newest = f"the last good checkpoint is {good[0]}" if good else "no checkpoint was saved before"
    return (f"nanoshard: gave up: steps {first} to {last} were not taken ({reason or 'not finite'}); "
            f"{newest}\nnanoshard: to go round them, the same command with {where}"
            f"--train-range-to-skip {begin} {first + 150}")


def corrupt_targets(batches):
    """--inject-spike: [(x, y)] -> the same with token 0 for every target. The loss is then large and all
    gradients point one way, as in a real spike; shuffled targets would give gradients that cancel out."""
    return [(x, y.clamp(max=0)) for x, y in batches]  # IGNORE, which is below 0, stays

"""Steps that are not taken, for one of three reasons.

    a range         --train-range-to-skip A B [C D ...], 1-based, both ends included
    a spike         --skip-spikes SIGMA: loss or gradient norm is far above that of the last steps
    not finite      loss or gradient norm is NaN or infinite

A spike happens when certain data meets a certain state of the weights: the same batches do no harm to another
checkpoint (PaLM, arXiv:2204.02311, section 5.1). So the data of a skipped step is dropped:

    advance     step, tokens, data position, learning rate (all are functions of the step), evaluation, saving
    unchanged   weights, Adam's moments and its own t, the routers' bias, the detector's window

A range costs no forward and no backward pass. A spike has already cost both when it is noticed.
"""
import math
import statistics

import torch

WINDOW = 128  # accepted steps that a step is compared with; no step is a spike before half of them exist
# So many refused steps in a row end the run with code 42: no spike lasts so long. They are counted at each
# row of the log and each checkpoint, with --skip-spikes after each step.
MAX_REFUSED = 8


class Ranges:
    """Which steps to skip. ends: A, B, C, D, ...

    ValueError: a pair is incomplete, reversed or not 1-based.
    """

    def __init__(self, ends):
        ends = list(ends)
        if len(ends) % 2:
            raise ValueError(f"--train-range-to-skip takes pairs A B, got {len(ends)} numbers; "
                             "give the last step of every range")
        self.pairs = []  # [(first step, last step)], sorted and merged
        for first, last in sorted(zip(ends[::2], ends[1::2], strict=True)):
            if not 1 <= first <= last:
                raise ValueError(f"--train-range-to-skip {first} {last}: steps count from 1 and a range runs "
                                 "from low to high")
            if self.pairs and first <= self.pairs[-1][1] + 1:  # no step is between them
                first, before = self.pairs.pop()
                last = max(last, before)
            self.pairs.append((first, last))

    def __str__(self):
        return ", ".join(f"{first}-{last}" for first, last in self.pairs)

    def too_late(self, done, known):
        """Return a warning about ranges that have no effect, or "".

        done: steps of the checkpoint that the run resumes. known: the checkpoint's own Ranges.
        """
        late = [pair for pair in self.pairs if pair[1] <= done and pair not in known.pairs]
        if not late:
            return ""
        ends = " ".join(f"{first} {last}" for first, last in late)
        return (f"nanoshard: --train-range-to-skip {ends} has no effect: this run goes on after step {done}; "
                f"--resume a checkpoint before step {late[0][0]}")

    def ends(self):
        """Return [A, B, C, D, ...], merged: what a checkpoint keeps and a later Ranges takes."""
        return [end for pair in self.pairs for end in pair]


def spike_reason(window, loss, norm, sigma):
    """Return why this step is a spike, or None. window: [(loss, gradient norm)] of accepted steps.

    A value is a spike if it exceeds the median by sigma deviations. The median and the median absolute
    deviation (MAD) take the place of the mean and the standard deviation, so that one outlier in the window
    does not hide the next one. 1.4826 MAD is the standard deviation of a normal distribution. A deviation is
    at least 0.15 % of the median, so that a flat loss has no spikes of rounding.
    """
    if len(window) < WINDOW // 2:
        return None
    losses, norms = zip(*window, strict=True)
    for name, value, past in (("loss", loss, losses), ("gradient norm", norm, norms)):
        median = statistics.median(past)
        mad = statistics.median(abs(x - median) for x in past)
        width = 1.4826 * max(mad, 1e-3 * abs(median))
        if value > median + sigma * width:
            return f"spike: {name} {value:.4g} > {median:.4g} + {sigma:g} * {width:.4g}"
    return None


class Guard:
    """Decides before each update whether it is made, and counts the steps that are refused.

    The window and the counts are in state, so checkpoints contain them. The caller appends to refused_flags
    after every step.
    """

    def __init__(self, cfg, world, state):
        self.sigma = cfg.skip_spikes
        self.world = world
        self.state = state
        self.max_refused = MAX_REFUSED
        if cfg.dtype == "fp16":
            # The loss scale starts at 2**16. The 16 overflows that may bring it down to 1 are not failures.
            self.max_refused += 16
        self.reason = None  # why the last step was refused, if the host knows
        # [(step, flag)] since the last count_refused(). The flag of a spike is None. Otherwise it is () on
        # the device: 1.0 if the step was not finite, else 0.0.
        self.refused_flags = []
        self.given_up = False  # whether too many steps in a row were refused; stays true
        self.refused_range = None  # (first, last) of those steps

    def veto(self, stats):
        """Return True, on all ranks, if --skip-spikes says that the update must not be made.

        stats: (loss, grad_norm, ...), () fp64 each, the same on all ranks. This costs one synchronisation and
        one small collective over the world.
        """
        self.reason = None
        loss, norm = torch.stack(tuple(stats)).tolist()[:2]  # sync point
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        found = None
        if is_finite:
            found = spike_reason(self.state.window, loss, norm, self.sigma)
        else:
            self.reason = not_finite_reason(loss, norm)

        # All ranks compute the same bits. If one rank decided differently, the others would wait for it
        # forever.
        is_spike = self.world.everyone.any(found is not None)  # one bool from each rank, over the world
        if is_spike:
            found = found or "spike: seen by another rank"
            self.reason = f"{found}; its text: sample.py RUN --step {self.state.step + 1}"
        elif is_finite:  # the optimizer itself refuses a step that is not finite, on the device
            self.state.window = [*self.state.window, (loss, norm)][-WINDOW:]
        return is_spike

    def count_refused(self):
        """Count the steps that were refused since the last call. Return given_up. One synchronisation.

        Call this function before a save, so that the checkpoint has the counts.
        """
        state = self.state
        on_device = [flag for _, flag in self.refused_flags if flag is not None]
        values = iter(torch.stack(on_device).tolist() if on_device else [])  # sync point
        for step, flag in self.refused_flags:
            is_spike = flag is None
            is_not_finite = not is_spike and next(values) > 0
            state.skipped += is_spike
            state.nan_steps += is_not_finite
            state.streak = state.streak + 1 if is_spike or is_not_finite else 0
            if state.streak >= self.max_refused:
                self.given_up = True
                self.refused_range = (step - state.streak + 1, step)
        self.refused_flags = []
        return self.given_up


def not_finite_reason(loss, norm):
    """Return why a step whose loss or gradient norm is NaN or infinite was not taken."""
    return f"not finite: loss {loss:.4g}, gradient norm {norm:.4g}"


def give_up_message(checkpoints, first, last, reason, steps, starts_from=""):
    """Return the last words of a run that gave up, with a command that avoids these steps.

    checkpoints: paths, newest first. first, last: the steps that were refused. reason: why the last of them
    was refused, or None if this is not known. steps: those of the whole run. starts_from: --init-from, which
    does not go with --resume PATH.
    """
    good = [path for path in checkpoints if _step(path) < first]
    newest = f"the last good checkpoint is {good[0]}" if good else "no checkpoint was saved before"
    command = "the same command "
    begin = max(1, first - 50)
    if good:
        early = next((path for path in good if _step(path) <= first - 100), good[0])
        command += "without --init-from and " if starts_from else ""
        command += f"with --resume {early} "
        begin = max(_step(early) + 1, begin)
    else:
        command += "with "
    end = last if first + 150 >= steps else first + 150  # A wide range would leave no step to train.
    return (f"nanoshard: gave up: steps {first} to {last} were not taken ({reason or 'not finite'}); "
            f"{newest}\n"
            f"nanoshard: to go round them, {command}--train-range-to-skip {begin} {end}; or try a lower --lr")


def _step(path):
    """Return the step of a checkpoint, whose directory is named step_000123."""
    return int(path.name.removeprefix("step_"))


def corrupt_targets(batches):
    """--inject-spike: return the micro-batches with token 0 for every target.

    The loss is then large and all gradients point one way, as in a real spike. Shuffled targets would give
    gradients that cancel out.
    """
    return [(x, y.clamp(max=0), *places) for x, y, *places in batches]  # IGNORE, which is below 0, stays

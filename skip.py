"""Steps that are not taken, for one of three reasons.

    a range         --train-range-to-skip A B [C D ...], 1-based, both ends included
    a spike         --skip-spikes SIGMA: loss or gradient norm is far above that of the last steps
    not finite      loss or gradient norm is NaN or infinite

A spike happens when certain data meets a certain state of the weights (PaLM, arXiv:2204.02311, section 5.1).
So the data of a skipped step is dropped:

    advance     step, tokens, data position, learning rate (all are functions of the step), evaluation, saving
    unchanged   weights, Adam's moments and its own t, the routers' bias, the detector's window
"""
import math
import statistics

import torch

from checkpoint import step_of

WINDOW = 128  # accepted steps that a step is compared with; no step is a spike before half of them exist
# So many refused steps in a row end the run with code 42: no spike lasts so long. They are counted at each
# row of the log and each checkpoint, with --skip-spikes after each step.
MAX_REFUSED = 8


def skipped_ranges(ends):
    """Return A, B, C, D, ... as [(first step, last step)]."""
    return sorted(set(zip(ends[::2], ends[1::2], strict=True)))


def spike_reason(window, loss, norm, sigma):
    """Return why this step is a spike, or None. window: [(loss, gradient norm)] of accepted steps.

    A value is a spike if it exceeds the median by sigma deviations. One outlier in the window does not hide
    the next from the median absolute deviation (MAD); 1.4826 MAD is the standard deviation of a normal
    distribution. It is at least 0.15 % of the median, so that a flat loss has no spikes of rounding.
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
    """Decides before each update whether it is made, and counts the steps that are refused, in State."""

    def __init__(self, cfg, world, state):
        self.sigma = cfg.skip_spikes
        self.world = world
        self.state = state
        # fp16: 16 overflows more bring the loss scale from 2**16 down to 1
        self.max_refused = MAX_REFUSED + (16 if cfg.dtype == "fp16" else 0)
        self.reason = None  # why the last step was refused, if the host knows
        # [(step, flag)] since the last count_refused(), which the caller appends. The flag of a spike is
        # None. Otherwise it is () on the device: 1.0 if the step was not finite, else 0.0.
        self.refused_flags = []
        self.given_up = None  # (first, last) of too many refused steps in a row; stays

    def veto(self, stats):
        """Return True, on all ranks, if --skip-spikes says that the update must not be made.

        stats: (loss, grad_norm, ...), () fp64 each, the same on all ranks.
        """
        self.reason = None
        loss, norm = torch.stack(tuple(stats)).tolist()[:2]  # sync point
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        found = None
        if is_finite:
            found = spike_reason(self.state.window, loss, norm, self.sigma)
        else:
            self.reason = not_finite_reason(loss, norm)

        # If one rank decided differently, the others would wait for ever.
        is_spike = self.world.everyone.any(found is not None)  # one bool from each rank, over the world
        if is_spike:
            found = found or "spike: seen by another rank"
            self.reason = f"{found}; its text: sample.py RUN --step {self.state.step + 1}"
        elif is_finite:  # the optimizer itself refuses a step that is not finite, on the device
            self.state.window = [*self.state.window, (loss, norm)][-WINDOW:]
        return is_spike

    def count_refused(self):
        """Count the steps that were refused since the last call. Return whether the run must give up."""
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
                self.given_up = (step - state.streak + 1, step)
        self.refused_flags = []
        return self.given_up is not None


def not_finite_reason(loss, norm):
    """Return why a step whose loss or gradient norm is NaN or infinite was not taken."""
    return f"not finite: loss {loss:.4g}, gradient norm {norm:.4g}"


def give_up_message(checkpoints, first, last, reason, steps):
    """Return the last words of a run that gave up, with flags that avoid the steps first to last."""
    good = [path for path in checkpoints if step_of(path) < first]  # newest first
    early = [path for path in good if step_of(path) <= first - 100]
    start = next(iter(early + good), None)
    flags = ""
    begin = max(1, first - 50)
    if start:
        flags = f"--resume {start} "
        begin = max(step_of(start) + 1, begin)
    end = last if first + 150 >= steps else first + 150  # A wide range would leave no step to train.
    return (f"nanoshard: gave up: steps {first} to {last} were not taken ({reason or 'not finite'}); to go "
            f"round them, the same command with {flags}--train-range-to-skip {begin} {end}, or a lower --lr")


def corrupt_targets(batches):
    """--inject-spike: return the micro-batches with token 0 for every target: all gradients point one way."""
    return [(x, y.clamp(max=0), *places) for x, y, *places in batches]  # IGNORE, which is below 0, stays

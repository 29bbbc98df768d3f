"""--rampup-batch-size START INCREMENT SAMPLES, with the meaning that Megatron-LM gave it.

The global batch begins at START sequences and grows by INCREMENT to --global-batch while the first SAMPLES
sequences are consumed, in stages of equal samples. It is a pure function of the samples consumed: a resumed
run, another layout and plan.py all find the same batch. The learning rate stays a function of the step.
Source: Megatron-LM, megatron/core/num_microbatches_calculator.py.
"""
from collections import Counter


def batch_size(samples, full, ramp=()):
    """Sequences of the step that begins after `samples` consumed ones. full: the batch after the ramp."""
    if not ramp:
        return full
    start, increment, over = ramp
    stages = (full - start) // increment
    return min(full, start + increment * (samples * stages // over))


def check_ramp(full, ramp, unit):
    """Every stage must divide by unit = micro-batch * dp, or ValueError before the first step."""
    if not ramp:
        return
    start, increment, over = ramp
    flag = f"--rampup-batch-size {start} {increment} {over}"
    if not 0 < start <= full or (full - start) % increment:
        raise ValueError(f"{flag} does not reach global-batch {full} in whole increments; "
                         f"try --global-batch {start + max(1, -(-(full - start) // increment)) * increment}")
    bad = next((size for size in range(start, full + 1, increment) if size % unit), None)
    if bad is not None:
        raise ValueError(f"{flag} has a stage of {bad}, which does not divide by micro-batch * dp = {unit}; "
                         f"give START and INCREMENT as multiples of {unit}")


def schedule(samples, full, ramp=()):
    """-> {batch: steps of it} of a run that ends with the step in which `samples` sequences are consumed."""
    done, steps = 0, Counter()
    while done < samples and (batch := batch_size(done, full, ramp)) != full:
        steps[batch] += 1
        done += batch
    if done < samples:
        steps[full] = -(-(samples - done) // full)
    return steps


def samples_after(steps, full, ramp=()):
    """Sequences consumed by the first `steps` steps."""
    samples = 0
    for step in range(steps):
        if batch_size(samples, full, ramp) == full:
            return samples + (steps - step) * full
        samples += batch_size(samples, full, ramp)
    return samples

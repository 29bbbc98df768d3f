"""--rampup-batch-size START INCREMENT SAMPLES, as in Megatron-LM (its num_microbatches_calculator.py).

The global batch begins with START sequences and grows by INCREMENT up to --global-batch while the first
SAMPLES sequences are consumed, in stages of the same number of samples. It is a function of the samples
consumed alone: a resumed run, another layout and plan.py get the same batch. The learning rate stays a
function of the step.
"""


def batch_size(samples, full, ramp=()):
    """Return the sequences of the step that starts after `samples` were consumed.

    full: the batch after the ramp. ramp: (START, INCREMENT, SAMPLES), or () for none.
    """
    if not ramp:
        return full
    start, increment, over = ramp
    stages = (full - start) // increment
    return min(full, start + increment * (samples * stages // over))


def check_ramp(full, ramp, unit):
    """ValueError if the batch of some stage of the ramp does not divide by unit = micro-batch * dp."""
    if not ramp:
        return
    start, increment, over = ramp
    flag = f"--rampup-batch-size {start} {increment} {over}"
    if not 0 < start <= full or (full - start) % increment:
        increments = max(1, -(-(full - start) // increment))
        raise ValueError(f"{flag} does not reach global-batch {full} in whole increments; "
                         f"try --global-batch {start + increments * increment}")
    if full - start > 1000 * increment:
        raise ValueError(f"{flag} has {(full - start) // increment} stages, more than 1000; "
                         f"try an INCREMENT of {-(-(full - start) // 1000)} or more")
    for size in start, min(full, start + increment):  # If these two divide, all that follow do.
        if size % unit:
            raise ValueError(f"{flag} has a stage of {size}, which does not divide by micro-batch * dp = "
                             f"{unit}; give START and INCREMENT as multiples of {unit}")

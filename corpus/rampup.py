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

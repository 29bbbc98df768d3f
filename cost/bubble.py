"""How long the ranks of a pipeline wait for each other."""
from pipeline import timetable


def bubble(ranks, chunks, num_micro_batches):
    """Return the time that pipeline ranks idle in a step, over the time that they work."""
    work = chunks * num_micro_batches
    if chunks == 1 or num_micro_batches % ranks == 0:
        return (ranks - 1) / work
    return max(timetable(ranks, chunks, num_micro_batches)) / (3 * work) - 1

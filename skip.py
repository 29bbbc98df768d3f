"""Steps whose data is dropped: --train-range-to-skip A B [C D ...], 1-based, both ends included.

A spike is data meeting a state of the weights (PaLM, arXiv:2204.02311, section 5.1): the same batches from another
checkpoint do no harm. So the data of the range is passed over, and the run goes on as if it had never been:
    advance     step, tokens, data position, learning rate (all are functions of the step), evaluation, saving
    untouched   weights, Adam's moments and its own t, weight decay
"""


class Ranges:
    """Which steps to skip. Errors: ValueError when a pair is missing, reversed or not 1-based."""

    def __init__(self, ends):
        ends = list(ends)
        if len(ends) % 2:
            raise ValueError(f"--train-range-to-skip takes pairs A B, got {len(ends)} numbers; give the last step of every range")
        pairs = sorted(zip(ends[::2], ends[1::2], strict=True))
        self.pairs = []  # sorted, merged
        for a, b in pairs:
            if not 1 <= a <= b:
                raise ValueError(f"--train-range-to-skip {a} {b}: steps count from 1 and a range runs from low to high")
            if self.pairs and a <= self.pairs[-1][1] + 1:
                self.pairs[-1] = (self.pairs[-1][0], max(b, self.pairs[-1][1]))
            else:
                self.pairs.append((a, b))

    def __contains__(self, step):
        return any(a <= step <= b for a, b in self.pairs)

    def __str__(self):
        return ", ".join(f"{a}-{b}" for a, b in self.pairs)

    def ends(self):
        """The flat list again, for the checkpoint and for a union with the command line's."""
        return [e for pair in self.pairs for e in pair]

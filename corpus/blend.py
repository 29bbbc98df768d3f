"""Several data sets by weight, --data A:0.7,B:0.3: the syntax, and which data set gives each sample.

The weights become whole numbers that sum to a period P. Within every P samples each data set gives exactly
its number of them, so one schedule of P entries makes sample i a pure function of (seed, i), as for one data
set; and the j-th sample that a data set gives to a blend is its sample j when it is used alone.
"""

from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np

MAX_PERIOD = 100_000  # entries of a blend's schedule at most; it takes 0.6 s to compute
WEIGHT_STEPS = 10_000  # weights in proportion to the tokens are multiples of 1 / WEIGHT_STEPS


def parse_blend(spec):
    """--data -> [(folder, weight)], a Fraction or, where no weights are given, None. ValueError: syntax."""
    if Path(spec).is_dir() or not any(c in spec for c in ",:"):
        return [(spec, None)]
    folders, weights = [], []
    for item in spec.split(","):
        folder, colon, weight = item.rpartition(":") if ":" in item else (item, "", "")
        try:
            if len(weight.lower().partition("e")[2]) > 3:
                raise ValueError("a Fraction of 1e1000000 would take minutes")
            weights.append(Fraction(weight) if colon else None)
        except (ValueError, ZeroDivisionError) as e:
            raise ValueError(f"--data {spec}: {weight!r} is not a weight; for example A:0.7,B:0.3") from e
        if not folder or (colon and weights[-1] <= 0):
            raise ValueError(f"--data {spec} has an empty name or a weight that is not above 0; for example"
                             " A:0.7,B:0.3")
        if folder in folders:
            raise ValueError(f"--data {spec} names a folder twice; add up its weights")
        folders.append(folder)
    if None in weights and any(weights):
        raise ValueError(f"--data {spec} gives some weights; give each, as in A:0.7,B:0.3, or none")
    return list(zip(folders, weights, strict=True))


def first_folder(spec):
    """-> the first folder of --data; all have its tokenizer."""
    return parse_blend(spec)[0][0]


def samples_per_period(spec, metas, split="train"):
    """-> how many samples each data set gives per period: the smallest whole numbers in the ratio of the
    weights, or of the tokens where no weights are given. ValueError: the period is above MAX_PERIOD."""
    weights = [w for _, w in parse_blend(spec)]
    if None in weights:
        tokens = [meta["tokens"][split] for meta in metas]
        weights = [Fraction(max(1, round(WEIGHT_STEPS * t / sum(tokens)))) for t in tokens]
    fractions = [w / sum(weights) for w in weights]
    period = lcm(*(f.denominator for f in fractions))
    if period > MAX_PERIOD:
        raise ValueError(f"--data {spec}: as whole numbers the weights sum to {period:,}, at most"
                         f" {MAX_PERIOD:,} are possible; round them")
    return [int(f * period) for f in fractions]


def sample_schedule(counts):
    """Samples of each data set per period, (data sets,) -> which data set gives each sample of the period,
    (sum of counts,) int64.

    Of a data set with n of P samples, sample c may come once c P / n samples are given in all and must come
    before (c + 1) P / n are. Of those that may come, the one with the earliest deadline does. No count is
    ever a whole sample off its share (the chairman assignment problem, Tijdeman 1980); with Megatron-LM's
    greedy rule, which takes the data set that is furthest behind, small ones fall up to 1.7 behind."""
    counts = np.array(counts)
    period, given = counts.sum(), np.zeros_like(counts)
    out = np.empty(period, np.int64)
    for i in range(period):
        deadline = -(-(given + 1) * period // counts)
        out[i] = np.argmin(np.where(given * period < (i + 1) * counts, deadline, 2 * period))
        given[out[i]] += 1
    return out

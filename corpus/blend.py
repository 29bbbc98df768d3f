"""Several data sets by weight, --data A:0.7,B:0.3: the syntax, and which data set gives each sample.

The weights become whole numbers that sum to a period P. Within every P samples, each data set gives exactly
its number of them. So one schedule of P entries makes sample i a pure function of (seed, i), as for one data
set. The j-th sample that a data set gives to a blend is its sample j when it is used alone.
"""

from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np

from config import ceil_div

MAX_PERIOD = 100_000  # the most entries of a schedule; that many take 0.6 s to compute
WEIGHT_STEPS = 10_000  # weights in proportion to the tokens are multiples of 1 / WEIGHT_STEPS


def parse_blend(spec):
    """Return the data sets of --data, [(folder, weight)].

    A weight is a Fraction; where none is given, all are None. ValueError: wrong syntax.
    """
    if Path(spec).is_dir() or not ("," in spec or ":" in spec):
        return [(spec, None)]

    blend = {}
    for item in spec.split(","):
        folder, weight = parse_item(spec, item)
        if folder in blend:
            raise ValueError(f"--data {spec} names a folder twice; add up its weights")
        blend[folder] = weight

    weights = list(blend.values())
    if None in weights and any(weights):
        raise ValueError(f"--data {spec} gives some weights; give each, as in A:0.7,B:0.3, or none")
    return list(blend.items())


def parse_item(spec, item):
    """Return (folder, weight) of one item of --data, such as A:0.7. ValueError: wrong syntax."""
    folder, weight = item, None
    if ":" in item:
        folder, _, text = item.rpartition(":")
        weight = parse_weight(spec, text)
    if not folder or (weight is not None and weight <= 0):
        raise ValueError(f"--data {spec} has an empty name or a weight that is not above 0; for example"
                         " A:0.7,B:0.3")
    return folder, weight


def parse_weight(spec, text):
    """Return the Fraction that a text like 0.7 or 1/3 stands for. ValueError: it is no number."""
    exponent = text.lower().partition("e")[2]
    try:
        if len(exponent) > 3:
            raise ValueError("a Fraction of 1e1000000 would take minutes")
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as e:
        raise ValueError(f"--data {spec}: {text!r} is not a weight; for example A:0.7,B:0.3") from e


def first_folder(spec):
    """Return the first folder of --data; all have its tokenizer."""
    return parse_blend(spec)[0][0]


def samples_per_period(spec, metas):
    """Return how many samples each data set of --data gives per period, [int].

    metas: the meta.json of each. These are the smallest whole numbers in the ratio of the weights, or of the
    training tokens where no weights are given. ValueError: the period is above MAX_PERIOD.
    """
    weights = [weight for _, weight in parse_blend(spec)]
    if None in weights:
        tokens = [meta["tokens"]["train"] for meta in metas]
        weights = [Fraction(max(1, round(WEIGHT_STEPS * n / sum(tokens)))) for n in tokens]

    shares = [weight / sum(weights) for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    if period > MAX_PERIOD:
        raise ValueError(f"--data {spec}: as whole numbers the weights sum to {period:,}, at most"
                         f" {MAX_PERIOD:,} are possible; round them")
    return [int(share * period) for share in shares]


def sample_schedule(counts):
    """Return which data set gives each sample of a period P, (P,) int64.

    counts: (data sets,), how many samples each gives per period; they sum to P. Sample c of a data set with
    n of the P samples may come once c P / n samples are given in all, and must come before (c + 1) P / n
    are. Of the samples that may come, the one with the earliest deadline does. No count is ever a whole
    sample off its share (the chairman assignment problem, Tijdeman 1980). Megatron-LM takes the data set
    that is furthest behind; under this greedy rule, small data sets fall up to 1.7 samples behind.
    """
    counts = np.array(counts)
    period = counts.sum()
    given = np.zeros_like(counts)  # by each data set so far
    schedule = np.empty(period, np.int64)
    for i in range(period):
        may_come = given * period < (i + 1) * counts
        deadline = ceil_div((given + 1) * period, counts)
        chosen = np.argmin(np.where(may_come, deadline, 2 * period))
        schedule[i] = chosen
        given[chosen] += 1
    return schedule

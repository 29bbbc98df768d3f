"""One data set or several by weight: --data DIR, --data A:0.7,B:0.3, or A,B in proportion to their tokens.

At every moment each data set has given its share of the samples to within one. (Megatron's greedy rule, the
one furthest behind comes next, lets small ones among three or more fall up to 1.7 samples behind, measured.)
The weights are whole numbers over their sum P, so after P samples all are even and the choice repeats: one
table of P entries makes sample i a pure function of (seed, i), as it is for one data set; and sample j that a
data set gives to a blend is the sample j of that data set alone.
"""

from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np

from corpus import data

PERIOD = 100_000  # at most: the table takes 0.6 s
BY_TOKENS = 10_000  # how finely weights in proportion to the tokens are cut


def parse(spec):
    """--data -> [(folder, weight or None)]; ValueError when that cannot be."""
    if Path(spec).is_dir() or not any(c in spec for c in ",:"):
        return [(spec, None)]
    found = []
    for item in spec.split(","):
        folder, colon, weight = item.rpartition(":") if ":" in item else (item, "", "")
        try:
            found.append((folder, Fraction(weight) if colon else None))
        except (ValueError, ZeroDivisionError) as e:
            raise ValueError(f"--data {spec}: {weight!r} is not a weight; for example A:0.7,B:0.3") from e
    weights, folders = [w for _, w in found], [f for f, _ in found]
    if None in weights and any(w is not None for w in weights):
        raise ValueError(f"--data {spec} gives some weights; give each, as in A:0.7,B:0.3, or none")
    if not all(folders) or any(w is not None and w <= 0 for w in weights):
        raise ValueError(f"--data {spec} has an empty name or a weight that is not above 0; for example"
                         " A:0.7,B:0.3")
    if len(set(folders)) < len(folders):
        raise ValueError(f"--data {spec} names a folder twice; add up its weights")
    return found


def first(spec):
    """A folder that has the tokenizer of --data."""
    return parse(spec)[0][0]


def shares(spec, metas, split="train"):
    """Whole numbers in the ratio of the weights; without weights, of the tokens."""
    weights = [w for _, w in parse(spec)]
    if None in weights:
        tokens = [meta["tokens"][split] for meta in metas]
        weights = [Fraction(max(1, round(BY_TOKENS * t / sum(tokens)))) for t in tokens]
    whole = [w / sum(weights) for w in weights]
    period = lcm(*(w.denominator for w in whole))
    if period > PERIOD:
        raise ValueError(f"--data {spec}: the weights are whole numbers only when multiplied to a sum of"
                         f" {period:,}, at most {PERIOD:,} may be; round them")
    return [int(w * period) for w in whole]


def load_meta(spec):
    """The meta.json of a blend: vocabulary, shards and `identity` of all; ValueError when they do not fit."""
    folders = [folder for folder, _ in parse(spec)]
    metas = [data.load_meta(folder) for folder in folders]
    names = [f"{meta['tokenizer']} {meta['tokenizer_sha256'][:9]}" for meta in metas]
    for folder, meta, name in zip(folders, metas, names, strict=True):
        if meta["tokenizer_sha256"] != metas[0]["tokenizer_sha256"]:
            raise ValueError(f"{folders[0]} and {folder} have different tokenizers ({names[0]}, {name});"
                             f" prepare {folder} with --tokenizer {folders[0]}")
    shards = {split: [s for meta in metas for s in meta["shards"][split]] for split in ("train", "val")}
    equal = {s["sha256"] for s in shards["train"]} & {s["sha256"] for s in shards["val"]}
    if equal:
        raise ValueError(f"--data {spec}: a train and a val shard have equal sha256 {min(equal)[:9]}; one"
                         " data set would be tested on what another trains on: leave one out")
    names = " ".join(s["sha256"][:16] for split in shards.values() for s in split)
    ratio = f" {':'.join(map(str, shares(spec, metas)))}" if len(metas) > 1 else ""
    return {**metas[0], "shards": shards, "identity": names + ratio}


def verify(spec):
    """data.verify() of each."""
    return sum(data.verify(folder) for folder, _ in parse(spec))


def open_tokens(spec, split, seq_len, seed=0):
    """data.Tokens of one data set, or a Blend."""
    kind = data.Tokens if len(parse(spec)) == 1 else Blend
    return kind(spec if kind is Blend else first(spec), split, seq_len, seed)


class Blend:
    """One split of several data sets, as data.Tokens."""

    def __init__(self, spec, split, seq_len, seed=0):
        metas = [data.load_meta(folder) for folder, _ in parse(spec)]
        self.parts = [data.Tokens(folder, split, seq_len, seed) for folder, _ in parse(spec)]
        self.vocab_size, self.shares = metas[0]["vocab_size"], shares(spec, metas)
        self.choice = choose(self.shares)  # (P,) which data set; before: how many samples it gave already
        hits = self.choice[:, None] == np.arange(len(self.parts))
        self.before = (np.cumsum(hits, 0) - hits)[np.arange(len(hits)), self.choice]
        # samples until a data set begins again
        self.n_samples = min(max(1, p.n_samples * sum(self.shares) // share)
                             for p, share in zip(self.parts, self.shares, strict=True))

    def place(self, i):
        """(n,) sample numbers -> the data set of each, and the sample's number in it, (n,) int64."""
        turn, k = np.divmod(i, len(self.choice))
        which = self.choice[k]
        return which, turn * np.array(self.shares)[which] + self.before[k]

    def batch(self, first, n):
        """As data.Tokens.batch."""
        which, number = self.place(np.arange(first, first + n, dtype=np.int64))
        xy = None
        for d in np.unique(which).tolist():  # its samples among these are consecutive
            rows = np.flatnonzero(which == d)
            part = self.parts[d].batch(int(number[rows[0]]), len(rows))
            if len(rows) == n:
                return part
            xy = xy or tuple(p.new_empty((n, p.shape[1])) for p in part)
            for whole, some in zip(xy, part, strict=True):
                whole[rows] = some
        return xy


def choose(shares):
    """Which data set gives each sample of a period, (sum of shares,) int64, in whole numbers: no rounding.

    Sample c of a data set with n of P may come once c P / n is reached and must before (c + 1) P / n is
    passed; of those that may, the one that must soonest. No count is ever a whole sample off its share, for
    any weights (the chairman assignment problem, Tijdeman 1980).
    """
    shares = np.array(shares)
    period, given = shares.sum(), np.zeros_like(shares)
    out = np.empty(period, np.int64)
    for i in range(period):
        due = -(-(given + 1) * period // shares)
        out[i] = np.argmin(np.where(given * period < (i + 1) * shares, due, 2 * period))
        given[out[i]] += 1
    return out

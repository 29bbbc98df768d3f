"""How one_rule.py follows Muon's update: where whole matrices are needed, and which of their sides tp cuts.

An activation is cut by rows (tokens) and features. For a matrix X that Muon orthogonalises, Marks.by_sides
gives these two names to its two sides, so a Gram matrix shows which side it sums over:

    X                cut by rows                X^T X   partial: it wants an all-reduce over tp
                                                X X^T   rows and features: refused
    X                cut by columns             X X^T   partial
    |X|              cut by any side            partial, as a norm: its square wants the all-reduce
    P X, X P         P whole                    cut as X is

Under ZeRO a rank has slices, which begin and end inside matrices. An all-to-all over the shard makes them
matrices of the rank's own, and another one makes slices of their updates. Only whole matrices may be
orthogonalised, and nobody may read an update that has not come back.
"""
from unittest import mock

from marks import around

import muon


class MuonMarks:
    """Follows muon.py. marks: the Marks of a step; tp: the bits of the axis that cuts matrices."""

    def __init__(self, marks, tp):
        self.marks = marks
        self.tp = tp
        self.sides = {}  # of the matrices that are computed: {shape: the sides that tp cuts, None for none}

    def patches(self):
        """Return what is replaced: the three places where something is checked."""
        wrap = mock.patch.object
        group = muon.WholeMatrices
        return [wrap(group, "orthogonalise", around(group.orthogonalise, self.follow_group)),
                wrap(group, "collect", around(group.collect, self.collect)),
                wrap(muon, "orthogonalise", around(muon.orthogonalise, self.follow_batch))]

    def follow_group(self, original, group, vector):
        """All matrices of one axis: each has an owner, and each update comes back to its slice."""
        self.sides = {}
        for bucket in group.buckets:
            for p in bucket.params:
                self.sides.setdefault(tuple(p.shape[-2:]), set()).add(cut_side(p))
        self.check_owners(group)
        before = self.marks.of(vector)
        updates = original(group, vector)
        after = self.marks.of(updates)
        if after[:5] != before[:5]:
            names = self.marks.names
            self.marks.refuse(f"{group.buckets[0].names[0]}: its update differs along {names(after.bits)}, "
                              f"its gradient along {names(before.bits)}")
        return updates

    def check_owners(self, group):
        """Refuse matrices of which a part goes to no owner, or to several, or is not computed there."""
        expected = []
        begin = 0
        for bucket, size in zip(group.buckets, group.sizes, strict=True):
            used = min(size, max(0, bucket.filled - bucket.own_slice.start))  # The rest is padding.
            expected.append((begin, begin + used))
            begin += size
        first = group.buckets[0].names[0]
        computed = [place for batch in group.batches for place in batch.places]
        if group.is_shared:
            if merged(pairs_of(group.outgoing)) != merged(expected):
                self.marks.refuse(f"{first}: not every part of a matrix goes to one owner")
            expected = [(0, sum(group.received))]
        if merged(pairs_of(computed)) != merged(expected):
            self.marks.refuse(f"{first}: not every matrix is orthogonalised once")

    def collect(self, original, group, vector):
        """After the parts have left, the vector has no updates before they come back."""
        received = original(group, vector)
        if group.is_shared and group.outgoing:
            mark = self.marks.of(vector)
            self.marks.set(vector, mark._replace(late="the updates from the owners of the matrices"))
        return received

    def follow_batch(self, original, x, cut=None, *rest, **options):
        """Matrices (k, rows, columns) of one shape. cut: the side that the code believes to be cut."""
        marks = self.marks
        before = marks.of(x)
        shape = tuple(x.shape[1:])
        size = " x ".join(map(str, shape))
        if before.slices:
            marks.refuse(f"matrices ({size}) are orthogonalised where each rank has a slice of them, along "
                         f"{marks.names(before.slices)}")
        if shape not in self.sides:
            marks.refuse(f"({size}) numbers are orthogonalised as one matrix, which no parameter has")
        # Where matrices of this shape are cut by either side, the code is believed.
        sides = self.sides[shape]
        side = cut if cut in sides else next(iter(sides))
        by_sides = before._replace(rows=0, features=0)
        if side == 0:
            by_sides = by_sides._replace(rows=self.tp)
        if side == 1:
            by_sides = by_sides._replace(features=self.tp)
        marks.set(x, by_sides)
        marks.by_sides = True
        try:
            found = original(x, cut, *rest, **options)
            after = marks.of(found)
        finally:
            marks.by_sides = False
        if after[:5] != by_sides[:5]:
            marks.refuse(f"matrices ({size}) differ along {marks.names(by_sides.bits)} before they are "
                         f"orthogonalised, and along {marks.names(after.bits)} afterwards")
        marks.set(x, before)
        return marks.set(found, before)


def cut_side(p):
    """Return the side of a parameter's matrices that tp cuts, 0 or 1, or None."""
    for side in (0, 1):
        if p.shape[-2 + side] < p.full_shape[-2 + side]:
            return side
    return None


def pairs_of(slices):
    return [(part.start, part.stop) for part in slices]


def merged(pairs):
    """Return sorted (begin, end) pairs, with neighbours made one and empty ones left out."""
    found = []
    for begin, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found

"""The ranks as a mesh: which of them belong together, and how many bytes each sends along which axis.

    Axis       the ranks that differ from this one in one coordinate: a group, and a tally of what it sends
    Mesh       all the axes of one rank
    make_mesh  the only place where process groups are made

What travels along the axes is in parallel.py.
"""
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one only along one axis of the mesh. group is None when size is 1.
    sent counts the bytes that this rank sends along it, by the ring algorithms' formulas: (size-1)/size of
    the whole for an all-gather, a reduce-scatter and an all-to-all, twice that for an all-reduce (Thakur et
    al. 2005, section 4)."""
    name: str
    rank: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    calls: Any = None  # launch.Calls of this rank, one for all axes
    sent: Counter = field(default_factory=Counter, compare=False)

    def count(self, kind, whole):
        """kind: the collective; whole: the tensor that all ranks together end with (or reduce)."""
        share = 1 if kind == "send" else (self.size - 1) / self.size * (2 if kind == "all-reduce" else 1)
        self.sent[kind] += share * whole.numel() * whole.element_size()
        self.note(kind, whole)

    def note(self, kind, tensor=None):
        """For the watchdog: this rank is about to begin a collective."""
        if self.calls is not None:
            self.calls.note(kind, self.name, tensor)


@dataclass(frozen=True)
class Mesh:
    world: Axis
    dp: Axis     # replicas of the model: different data, same parameters
    tp: Axis     # one layer over several ranks (and the sequence between the blocks)
    pp: Axis     # stages: different layers
    ep: Axis     # different experts
    edp: Axis    # the ranks that hold the same experts
    stage: Axis  # all ranks of one pipeline stage = dp x tp = edp x ep
    tied: Axis   # dp x {first, last stage}: the two copies of a tied embedding


def make_mesh(world, tp=1, pp=1, ep=1, groups=True, n_experts=0):
    """-> Mesh; without groups, a plan of one. Rank order, slowest first: pp, dp, tp. A stage's ranks are
    viewed again as (edp, ep), ep fastest. n_experts: only for the hint, an ep that divides them too."""
    n = world.size
    if n % (tp * pp):
        fit = max(t for t in range(1, tp + 1) if n % (t * pp) == 0) if n % pp == 0 else 0
        hint = f"try --tp {fit}" if fit else f"start a multiple of {tp * pp} ranks"
        raise ValueError(f"{n} ranks do not divide by tp {tp} * pp {pp}; {hint}")
    dp = n // (tp * pp)
    if (dp * tp) % ep:
        fit = max(e for e in range(1, ep + 1) if (dp * tp) % e == 0 and n_experts % e == 0)
        raise ValueError(f"ep {ep} does not divide dp {dp} * tp {tp} = {dp * tp} ranks of a stage; "
                         f"try --ep {fit}")
    grid = torch.arange(n).view(pp, dp, tp)  # (pp, dp, tp)
    fold = grid.view(pp, dp * tp // ep, ep)  # (pp, edp, ep): the same ranks, seen by the experts
    rows = {
        "world": grid.reshape(1, n), "tp": grid.reshape(-1, tp), "stage": grid.reshape(pp, dp * tp),
        "dp": grid.transpose(1, 2).reshape(-1, dp), "pp": grid.permute(1, 2, 0).reshape(-1, pp),
        "ep": fold.reshape(-1, ep), "edp": fold.transpose(1, 2).reshape(-1, dp * tp // ep),
    }
    ends = grid[[0, -1]] if pp > 1 else grid  # (2 or 1, dp, tp)
    rows["tied"] = ends.permute(2, 0, 1).reshape(tp, -1)
    # every rank creates every group, in the same order; axes with the same ranks share one. but not pp: a
    # stage sends to its neighbour before or after it joins a sum, and NCCL pairs calls on one communicator by
    # their order alone
    made = {}
    axes = {"tied": Axis("tied")}  # the stages between have no part in it
    for name, table in rows.items():
        for row in map(tuple, table.tolist()):
            key = (name == "pp", row)
            if groups and len(row) > 1 and key not in made:
                made[key] = dist.group.WORLD if len(row) == n and name != "pp" else dist.new_group(list(row))
            if world.rank in row:
                axes[name] = Axis(name, row.index(world.rank), len(row), made.get(key), row, world.calls)
    return Mesh(**axes)

"""The ranks as a mesh, and data parallelism written out by hand.

The one rule: the loss is divided once, by the number of tokens of the whole global batch. Every gradient reduction
is then a plain SUM over the ranks that hold the same parameter. No averages, no second division anywhere.

grep -n "dist\\." *.py is the whole communication story; each call says what moves, over which axis, how much.
"""
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


# -----------------------------------------------------------------------------
# the mesh: which ranks belong together

@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one only along one axis of the mesh. group is None when size is 1."""
    name: str
    rank: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Mesh:
    world: Axis
    dp: Axis     # replicas of the model: different data, same parameters
    tp: Axis     # one layer over several ranks (and the sequence between the blocks)
    pp: Axis     # stages: different layers
    ep: Axis     # different experts
    edp: Axis    # the ranks that hold the same experts
    stage: Axis  # all ranks of one pipeline stage = dp x tp = edp x ep


def make_mesh(world, tp=1, pp=1, ep=1):
    """-> Mesh. Rank order, slowest first: pp, dp, tp. A stage's ranks are viewed again as (edp, ep), ep fastest."""
    n = world.size
    if n % (tp * pp):
        fit = max(t for t in range(1, tp + 1) if n % (t * pp) == 0) if n % pp == 0 else 0
        hint = f"try --tp {fit}" if fit else f"start a multiple of {tp * pp} ranks"
        raise ValueError(f"{n} ranks do not divide by tp {tp} * pp {pp}; {hint}")
    dp = n // (tp * pp)
    if (dp * tp) % ep:
        fit = max(e for e in range(1, ep + 1) if (dp * tp) % e == 0)
        raise ValueError(f"ep {ep} does not divide dp {dp} * tp {tp} = {dp * tp} ranks of a stage; try --ep {fit}")
    grid = torch.arange(n).view(pp, dp, tp)  # (pp, dp, tp)
    fold = grid.view(pp, dp * tp // ep, ep)  # (pp, edp, ep): the same ranks, seen by the experts
    rows = {
        "world": grid.reshape(1, n), "tp": grid.reshape(-1, tp), "stage": grid.reshape(pp, dp * tp),
        "dp": grid.transpose(1, 2).reshape(-1, dp), "pp": grid.permute(1, 2, 0).reshape(-1, pp),
        "ep": fold.reshape(-1, ep), "edp": fold.transpose(1, 2).reshape(-1, dp * tp // ep),
    }
    made = {}  # every rank creates every group, in the same order; axes with the same ranks share one
    axes = {}
    for name, table in rows.items():
        for row in map(tuple, table.tolist()):
            if len(row) > 1 and row not in made:
                made[row] = dist.group.WORLD if len(row) == n else dist.new_group(list(row))
            if world.rank in row:
                axes[name] = Axis(name, row.index(world.rank), len(row), made.get(row), row)
    return Mesh(**axes)


# -----------------------------------------------------------------------------
# data parallelism: flat buckets, reduced while backward still runs

class Bucket:
    """Parameters that are reduced together, laid out one after the other in two flat buffers.

    flat (n,) holds the weights in the model's dtype and every p.data is a view of it;
    grad (n,) holds the sum of the gradients in at least fp32. One large all-reduce beats many small ones.
    """

    def __init__(self, names, params, axis, decay):
        self.names, self.params, self.axis, self.decay = names, params, axis, decay
        n = sum(p.numel() for p in params)
        dtype, device = params[0].dtype, params[0].device
        self.flat = torch.empty(n, dtype=dtype, device=device)  # (n,)
        self.grad = torch.zeros(n, dtype=torch.promote_types(dtype, torch.float32), device=device)  # (n,)
        self.grads = []  # per parameter: its window of self.grad, in the parameter's shape
        at = 0
        for p in params:
            window = self.flat[at:at + p.numel()].view_as(p)
            window.copy_(p.data)
            p.data = window
            self.grads.append(self.grad[at:at + p.numel()].view_as(p))
            at += p.numel()
        self.begin()

    def begin(self):
        """A new optimizer step: no gradient has come yet."""
        self.fresh = [True] * len(self.params)
        self.waiting = len(self.params)
        self.work = None

    def add(self, i, last):
        """Take parameter i's gradient of one micro-batch; after the last micro-batch a full bucket leaves at once."""
        p = self.params[i]
        if self.fresh[i]:
            self.grads[i].copy_(p.grad)  # first micro-batch: a copy needs no zeroing before
        else:
            self.grads[i].add_(p.grad)  # fp32 += the model's dtype
        self.fresh[i], p.grad = False, None
        if last:
            self.waiting -= 1
            if self.waiting == 0:
                self.reduce()

    def reduce(self):
        for i, fresh in enumerate(self.fresh):
            if fresh:
                self.grads[i].zero_()  # a parameter that took no part in this step
        if self.axis.size > 1:
            self.work = dist.all_reduce(self.grad, group=self.axis.group, async_op=True)  # SUM over the axis, n fp32
        else:
            self.work = _Done()

    def finish(self):
        """Wait for the reduction (a bucket that never filled is reduced here, on every rank in the same order)."""
        if self.work is None:
            self.reduce()
        self.work.wait()


class _Done:
    """What an asynchronous collective over one rank returns."""

    def wait(self):
        pass


class DataParallel:
    """Sums every gradient over the replicas. Use: begin(); per micro-batch: last = ..., backward; then finish()."""

    def __init__(self, model, mesh, bucket_elements=40_000_000):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.buckets = []
        self.last = True  # the micro-batch in flight is the step's last one: its gradients complete the sums
        # backward reaches the last layers first, so buckets are filled in reverse order. vectors (norms, biases) keep
        # a bucket of their own: they are not decayed, and one bucket is one tensor of the optimizer
        for decay in (True, False):
            names, params, size = [], [], 0
            for name, p in reversed(named):
                if decays(name, p) != decay:
                    continue
                names.append(name)
                params.append(p)
                size += p.numel()
                if size >= bucket_elements:
                    self.buckets.append(Bucket(names, params, mesh.dp, decay))
                    names, params, size = [], [], 0
            if params:
                self.buckets.append(Bucket(names, params, mesh.dp, decay))
        for bucket in self.buckets:
            for i, p in enumerate(bucket.params):
                p.register_post_accumulate_grad_hook(lambda p, b=bucket, i=i: b.add(i, self.last))

    def begin(self):
        for bucket in self.buckets:
            bucket.begin()

    def finish(self):
        for bucket in self.buckets:
            bucket.finish()

    def gradients(self):
        """-> {parameter name: its reduced gradient, in the parameter's shape}"""
        return {n: g for b in self.buckets for n, g in zip(b.names, b.grads, strict=True)}


def decays(name, p):
    """Weight decay is for matrices only: never for norms, biases and other vectors. By shape, not by module class."""
    return p.ndim >= 2


@torch.no_grad()
def broadcast_and_verify(model, axis):
    """Replicas start equal: rank 0 of the axis sends its weights, then every rank checks what it holds."""
    if axis.size == 1:
        return
    for p in model.parameters():
        dist.broadcast(p.data, axis.ranks[0], group=axis.group)  # one parameter from the first replica to all
    mine = torch.stack([fingerprint(p) for p in model.parameters()])  # (n_params, 2)
    all_of_them = [torch.empty_like(mine) for _ in range(axis.size)]
    dist.all_gather(all_of_them, mine, group=axis.group)  # two int64 per parameter, over the axis
    for r, theirs in enumerate(all_of_them):
        assert torch.equal(theirs, mine), f"replica {axis.ranks[r]} differs from {axis.ranks[axis.rank]} after broadcast"


def fingerprint(t):
    """(2,) int64: plain and position-weighted sum of the bit pattern. Equal bits, equal pair; a swap changes the second."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    v = t.detach().reshape(-1).view(bits).long()  # (n,)
    weight = torch.arange(v.numel(), device=v.device) * 2 + 1
    return torch.stack([v.sum(), (v * weight).sum()])

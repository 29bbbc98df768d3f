"""The ranks as a mesh; tensor, sequence, context and expert parallelism by hand.

The one rule: the loss is divided once, by the number of trained tokens of the whole global batch.
Every gradient reduction is then a plain SUM over the ranks that hold the same parameter. The one
exception is the router's loss, a mean over each micro-batch: it is divided by the number of
micro-batches of the global batch. A comment at each collective says what moves and over which axis.
"""
import contextlib
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from interface.layout import check_ranks

# Since torch 2.13 these two functions have new names; older versions have only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MAX = dist.ReduceOp.MAX

# The mesh

class CompletedWork:
    def wait(self):
        """The collective is already complete."""


@dataclass(frozen=True)
class Axis:
    """The ranks along one or several axes of the mesh, and their collectives.

    Over one rank, a collective is the identity; start_reduce_scatter and start_all_gather need two.
    """
    name: str
    rank: int = 0
    size: int = 1
    group: Any = None  # None where size is 1
    ranks: tuple[int, ...] = (0,)
    calls: Any = None  # runtime.launch.CollectiveLog: counts, and tells the watchdog what started
    everyone: Any = None  # the world's Axis has one: runtime.everyone, for what programs agree on
    shard_sharing: Any = None  # the Sharing that --shard makes of these ranks; None: all share

    # No field: in torch 2.8, a graph that gets an axis is compiled anew when a field has changed.
    @functools.cached_property
    def sent(self):
        """The bytes that this rank sent, by the kind of collective."""
        return Counter()

    @functools.cached_property
    def ring(self):
        """The part of a tensor that a rank sends in a ring all-gather (Thakur et al. 2005)."""
        return (self.size - 1) / self.size

    def sharing(self, zero=1):
        """Which ranks split a buffer of the axis, and which copy it. zero: the flag."""
        if zero == 0:
            return Sharing(Axis(self.name), self)  # Axis(name): this rank has the whole buffer
        return self.shard_sharing or Sharing(self, Axis(self.name))

    def all_reduce(self, x, op=dist.ReduceOp.SUM):
        """Replace every rank's x by the ranks' sum (or maximum), in place, and return it."""
        if self.size > 1:
            self.start_all_reduce(x, op, wait=True)
        return x

    def start_all_reduce(self, x, op=dist.ReduceOp.SUM, wait=False):
        """Return a handle, None with wait=True. After its wait(), x is the sum over the ranks."""
        if self.size == 1:
            return CompletedWork()
        # 2: as a reduce-scatter and an all-gather
        self.calls.record(self, "all-reduce", x, 2 * self.ring * x.nbytes)
        return dist.all_reduce(x, op, group=self.group, async_op=not wait)

    def all_gather(self, x):
        """(m, ...) on each rank -> (m*size, ...) on all, in the order of the ranks."""
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) * self.size, *x.shape[1:])
        self.start_all_gather(out, x.contiguous(), wait=True)
        return out

    def start_all_gather(self, out, x, wait=False):
        """Return a handle. After wait(), out (m*size,) holds the x (m,) of all ranks, in order."""
        self.calls.record(self, "all-gather", out, self.ring * out.nbytes)
        return all_gather_single(out, x, group=self.group, async_op=not wait)

    def reduce_scatter(self, x):
        """(m*size, ...) on each rank -> (m, ...): of the sum, rank r's rows r*m to (r+1)*m."""
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) // self.size, *x.shape[1:])
        self.start_reduce_scatter(out, x.contiguous(), wait=True)
        return out

    def start_reduce_scatter(self, out, x, wait=False):
        """Return a handle. After wait(), out (m,) is this rank's slice of x's sum (m*size,)."""
        self.calls.record(self, "reduce-scatter", x, self.ring * x.nbytes)
        return reduce_scatter_single(out, x, group=self.group, async_op=not wait)

    def all_to_all(self, x, send=None, receive=None):
        """(sum(send), ...) -> (sum(receive), ...): block j of x's rows goes to rank j.

        send, receive: the rows of each block, by rank; None for equal blocks.
        """
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) if receive is None else sum(receive), *x.shape[1:])
        kept = x.size(0) // self.size if send is None else send[self.rank]
        row = x[0].numel() * x.element_size() if len(x) else 0
        self.calls.record(self, "all-to-all", x, (x.size(0) - kept) * row)
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def broadcast(self, x, source=0):
        """Replace every rank's x by the x of rank number `source`, in place, and return it."""
        if self.size > 1:
            self.calls.record(self, "broadcast", x, x.nbytes if self.rank == source else 0)
            dist.broadcast(x, self.ranks[source], group=self.group)
        return x

    def own_segments(self, x, dim):
        """Of 2*size segments of x along dim, rank i has the i-th from the front and from the back.

        In causal attention these two see the same number of keys on every rank.
        """
        segments = x.chunk(2 * self.size, dim)
        return torch.cat([segments[self.rank], segments[-1 - self.rank]], dim)


class Sharing(NamedTuple):
    """The two axes of the ranks that need the same buffer."""
    shard: Axis     # its ranks keep different slices: gradients are reduce-scattered over it
    replicas: Axis  # its ranks keep the same slice: that slice is all-reduced over it


@dataclass(frozen=True)
class Mesh:
    """The axes of this rank. README.md draws a mesh of eight ranks."""
    world: Axis
    dp: Axis     # replicas of the model: different data, same parameters
    cp: Axis     # segments of the same sequences, same parameters
    tp: Axis     # one layer over several ranks (and the sequence between the blocks)
    pp: Axis     # stages: different layers
    ep: Axis     # different experts
    edp: Axis    # the ranks that hold the same experts
    dpcp: Axis   # dp x cp: the ranks that hold the same share of every layer
    stage: Axis  # all ranks of one pipeline stage = dp x cp x tp = edp x ep
    tied: Axis   # dp x cp x {first, last stage}: the two copies of a tied embedding

    def axes(self):
        """{name: Axis}: these, and those into which --shard cuts some of them."""
        found = dict(vars(self))
        for axis in vars(self).values():
            found.update({part.name: part for part in axis.shard_sharing or ()})
        return found


def ranks_of_axes(pp, dp, cp, tp, ep):
    """Return for each axis the ranks of its groups: {name: [(rank, ...), ...]}."""
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)  # tp varies fastest
    expert_grid = grid.view(pp, -1, ep)  # (pp, edp, ep)
    ends = grid[::max(1, pp - 1)]  # the first and the last stage: (2, dp, cp, tp), or (1, ...)
    tables = {  # (groups, ranks in a group)
        "world": grid.view(1, -1),
        "tp": grid.view(-1, tp),
        "cp": grid.transpose(2, 3).reshape(-1, cp),
        "stage": grid.view(pp, -1),
        "dp": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "dpcp": grid.permute(0, 3, 1, 2).reshape(-1, dp * cp),
        "pp": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "ep": expert_grid.view(-1, ep),
        "edp": expert_grid.transpose(1, 2).flatten(0, 1),
        "tied": ends.permute(3, 0, 1, 2).reshape(tp, -1),
    }
    return {name: [tuple(ranks) for ranks in table.tolist()] for name, table in tables.items()}


def cut_into_blocks(groups, block, stage):
    """Return the groups (shards, replicas) into which --shard cuts the groups of an axis.

    A block is `block` consecutive ranks of a stage of `stage` ranks. The ranks of a group that are
    in one block keep different slices; those at the same place in their blocks, the same slice.
    """
    shards = []
    replicas = []
    for group in groups:
        in_block = {}
        for rank in group:
            in_block.setdefault(rank % stage // block, []).append(rank)
        shards += map(tuple, in_block.values())
        replicas += zip(*in_block.values(), strict=True)
    return shards, replicas


def make_mesh(world, tp=1, pp=1, ep=1, *, cp=1, shard=0, groups=True):
    """Return this rank's Mesh. ValueError: the sizes do not fit.

    world: a runtime.launch.World. groups=False makes no process groups, for plans: there world has
    only rank, size and calls.
    """
    dp = check_ranks(world.size, tp, pp, ep, cp, shard=shard)
    made = {}  # (is pp, ranks): process group

    # Every rank creates every group, in the same order. Axes with the same ranks share a group, but
    # pp has groups of its own: NCCL matches the calls on a communicator by their order, and the
    # stages mix sends and sums in different orders.
    def axis_of(name, table, sharing=None):
        own = Axis(name, ranks=(world.rank,))  # of ranks in no group: middle stages in tied
        for ranks in table:
            key = (name == "pp", ranks)
            if groups and len(ranks) > 1 and key not in made:
                made[key] = dist.group.WORLD
                if len(ranks) < world.size or name == "pp":
                    made[key] = dist.new_group([*ranks], timeout=world.timeout)
            if world.rank in ranks:
                everyone = world.everyone if groups and name == "world" else None
                own = Axis(name, ranks.index(world.rank), len(ranks), made.get(key), ranks,
                           world.calls, everyone, sharing)
        return own

    axes = {}
    for name, table in ranks_of_axes(pp, dp, cp, tp, ep).items():
        sharing = None
        sums_gradients = name in ("stage", "edp", "tied", "dp" if cp == 1 else "dpcp")
        if sums_gradients and shard not in (0, dp * cp):
            # A block is `shard` neighbours among dp x cp, with their tp.
            shards, replicas = cut_into_blocks(table, shard * tp, dp * cp * tp)
            sharing = Sharing(axis_of(f"{name}.shard", shards),
                              axis_of(f"{name}.replicas", replicas))
        axes[name] = axis_of(name, table, sharing)
    return Mesh(**axes)


# Parameters: which share of the full tensor a rank holds, and which ranks sum its gradient

def reduction_axis(mesh, tp_dim, expert=False, tied=False):
    """Return the name of the Axis over which a parameter's gradient is summed: the one rule.

    A gradient is summed over all ranks that hold the same weights, because each of these ranks has
    only a part of it: from other tokens, from other heads or columns, or from the other use of a
    tied matrix.
    """
    if tied:
        return "tied"  # The first stage has the gradient of the lookup, the last that of the head.
    if expert:
        return "edp"  # Each of these ranks has already received tokens from all ep ranks.
    if tp_dim is None:
        return "stage"  # Under sequence parallelism, its tp ranks see different tokens, too.
    return "dp" if mesh.cp.size == 1 else "dpcp"  # cp ranks see other tokens of the same sequences


_gives_memory = True


@contextlib.contextmanager
def parameters_without_memory():
    """What `parameter` makes in this context has 0 bytes: unusable before ddp.draw_weights."""
    global _gives_memory
    _gives_memory = False
    try:
        yield
    finally:
        _gives_memory = True


def parameter(shape, mesh, tp_dim=None, expert=False, *, used=None, tied=False):
    """Return an empty nn.Parameter: this rank's share of a tensor of `shape`.

    The tensor is cut along tp_dim over tp or, if it belongs to experts, along dim 0 over ep.
    used: the number of rows of dim 0 that are not padding of the vocabulary. tied: whether another
    stage has a copy.
    """
    dim = 0 if expert else tp_dim
    local = list(shape)
    offset = [0] * len(shape)
    if dim is not None:
        axis = mesh.ep if expert else mesh.tp
        assert shape[dim] % axis.size == 0, f"{shape} does not divide by {axis.name} {axis.size}"
        local[dim] = shape[dim] // axis.size
        offset[dim] = local[dim] * axis.rank
    p = torch.nn.Parameter(torch.empty(local))
    if not _gives_memory:
        p.untyped_storage().resize_(0)
    p.full_shape = tuple(shape)
    p.offset = tuple(offset)
    p.used = shape[0] if used is None else used
    p.expert = expert
    p.reduction_axis = reduction_axis(mesh, tp_dim, expert, tied)
    return p


# Tensor and sequence parallelism: the two collectives around attention and around the MLP
#   gather_rows   before: each rank has n of the B*t rows, and its output features need all of them
#   scatter_rows  after: each rank has a partial sum of every row, and keeps n rows of the total
# Source: arXiv:2205.05198, figure 5, where they are called g and g-bar.
# All tp ranks call backward on the same loss, but the gradient counts once: each rank's backward
# covers only its own columns of the logits. Backward of the head's gather_rows adds these parts.

class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n, ...) -> (n*size, ...)
        ctx.axis = axis
        return axis.all_gather(x)  # n rows from each rank to all, over tp or cp

    @staticmethod
    def backward(ctx, grad):
        # SUM of n*size rows, of which each rank gets n, over tp or cp
        return ctx.axis.reduce_scatter(grad), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n*size, ...) partial sums -> (n, ...) sums
        ctx.axis = axis
        return axis.reduce_scatter(x)  # SUM of n*size rows, of which each rank gets n, over tp

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.all_gather(grad), None  # n rows from each rank to all, over tp


def _uncompiled(function, *args):
    return function.apply(*args)  # fast/compile.py keeps this call out of compiled graphs


def gather_rows(x, axis):
    """(n, ...) on each rank -> (n*size, ...) on all."""
    if axis.size == 1:
        return x
    return _uncompiled(_GatherRows, x, axis)


def scatter_rows(x, axis):
    """(n*size, ...) partial sums on each rank -> (n, ...) rows of the total."""
    if axis.size == 1:
        return x
    return _uncompiled(_ScatterRows, x, axis)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return axis.all_reduce(x.clone())  # SUM of x's elements, the same on every rank, over tp

    @staticmethod
    def backward(ctx, grad):
        # Each rank uses the sum for its own heads, so its gradient is a part: SUM of the parts.
        return ctx.axis.all_reduce(grad.clone()), None


def sum_over_ranks(x, axis):
    """Return the sum of the ranks' x, of which every rank uses a copy for its own heads."""
    if axis.size == 1:
        return x
    return _uncompiled(_SumOverRanks, x, axis)


def gather_segments(x, axis):
    """(t, ...) on each rank, its two segments of a sequence -> (T, ...) on all, in order."""
    segments = gather_rows(x, axis).chunk(2 * axis.size)  # t positions from each to all, over cp
    # The front segments arrive in order. The back segments arrive in reverse: read backwards.
    return torch.cat(segments[0::2] + segments[::-2])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, send, receive):
        ctx.axis = axis
        ctx.send = send
        ctx.receive = receive
        return axis.all_to_all(x, send, receive)  # block j to rank j, over ep

    @staticmethod
    def backward(ctx, grad):
        # The gradients of the blocks go back to where the blocks came from, over ep.
        return ctx.axis.all_to_all(grad, ctx.receive, ctx.send), None, None, None


def all_to_all(x, axis, send=None, receive=None):
    """Axis.all_to_all with a gradient."""
    if axis.size == 1:
        return x
    return _AllToAll.apply(x, axis, send, receive)  # Experts are never compiled.

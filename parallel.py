r"""Data, context, tensor and expert parallelism by hand: which ranks belong together, what they send.

    Axis, Mesh, make_mesh       the ranks as a grid; an axis has the collectives as methods
    parameter                   this rank's share of a tensor, and the ranks that sum its gradient
    gather_rows, scatter_rows   tensor and sequence parallelism; gather_chunks: context; all_to_all: experts
    Comm, Bucket, DataParallel  gradients in flat buckets, summed while backward still runs; ZeRO-1

The one rule: the loss is divided once, by the number of tokens of the whole global batch. Every gradient
reduction is then a plain SUM over the ranks that hold the same parameter. No averages, no second division.

Collectives are methods of Axis; pipeline.py sends to neighbours, fast/ copies between GPUs. Calls say what
moves, over which axis, how much: grep -nE "\b(axis|[cetp]p|world|stage)\.[a-z_]+\(|_(rows|all)\(|isend" *.py
"""
import contextlib
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from config import check_ranks
from ops.flat import BUCKET_ELEMENTS, accumulate, assign_buckets, copy_gradients, padded_elements

# torch 2.13 has new names for these two, older versions only the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MAX = dist.ReduceOp.MAX

# -----------------------------------------------------------------------------
# the mesh

class CompletedWork:
    def wait(self):
        """The handle of a collective that is already complete."""


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one only along one axis of the mesh, and the collectives among them.
    Over one rank each is the identity (start_* with `out`: size > 1 only). Each tells the watchdog that it
    starts, and counts in `sent` the bytes it sends, by ring algorithms (Thakur et al. 2005, section 4)."""
    name: str
    rank: int = 0
    size: int = 1
    group: Any = None  # None where size is 1
    ranks: tuple[int, ...] = (0,)
    calls: Any = None  # runtime.launch.CollectiveLog of this rank: what the watchdog reads
    sent: Counter = field(default_factory=Counter, compare=False)

    def record(self, kind, tensor=None, nbytes=0.0):
        """This rank is about to start a collective, in which it sends nbytes."""
        self.sent[kind] += nbytes
        if self.calls is not None:
            self.calls.record(kind, self.name, tensor)

    def ring_bytes(self, whole):
        """Bytes that each rank sends in an all-gather or reduce-scatter of the tensor `whole`."""
        return (self.size - 1) / self.size * whole.numel() * whole.element_size()

    def all_reduce(self, x, op=dist.ReduceOp.SUM):
        """Every rank's x becomes their sum (or maximum), in place -> x."""
        if self.size > 1:
            self._all_reduce(x, op)
        return x

    def _all_reduce(self, x, op, async_op=False):
        self.record("all-reduce", x, 2 * self.ring_bytes(x))  # a reduce-scatter and an all-gather
        return dist.all_reduce(x, op, group=self.group, async_op=async_op)

    def all_gather(self, x):
        """(n, ...) on each rank -> (n*size, ...) on all, by rank."""
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) * self.size, *x.shape[1:])
        self.record("all-gather", out, self.ring_bytes(out))
        all_gather_single(out, x.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x):
        """(n*size, ...) on each rank -> (n, ...): this rank's rows of the sum."""
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) // self.size, *x.shape[1:])
        self.record("reduce-scatter", x, self.ring_bytes(x))
        reduce_scatter_single(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x, send=None, receive=None):
        """Block j of x's rows goes to rank j; received blocks are in the order of their senders. send,
        receive: rows per rank, None for equal blocks. (sum(send), ...) -> (sum(receive), ...)"""
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) if receive is None else sum(receive), *x.shape[1:])
        kept = x.size(0) // self.size if send is None else send[self.rank]
        row = x[0].numel() * x.element_size() if len(x) else 0
        self.record("all-to-all", x, (x.size(0) - kept) * row)
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def broadcast(self, x, source=0):
        """The x of rank number `source` replaces the others', in place -> x."""
        if self.size > 1:
            self.record("broadcast", x, x.numel() * x.element_size() * (self.rank == source))
            dist.broadcast(x, self.ranks[source], group=self.group)
        return x

    def gather_objects(self, value):
        """A small picklable value of each rank -> the list of all, by rank, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            self.record("all-gather")
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value, source=0):
        """A small picklable value of rank number `source` -> the same on every rank."""
        box = [value]
        if self.size > 1:
            self.record("broadcast")
            dist.broadcast_object_list(box, self.ranks[source], group=self.group)
        return box[0]

    def own_chunks(self, x, dim):
        """Of 2*size equal chunks of x along dim: number rank and, to balance causal attention, -1 - rank."""
        chunks = x.chunk(2 * self.size, dim)
        return x if self.size == 1 else torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim)

    def any(self, flag):
        """-> True on every rank if flag is true on any."""
        return bool(self.all_reduce(torch.tensor(int(flag)), MAX))  # one integer, on the host (gloo)

    def start_all_reduce(self, x):
        """-> a handle; after its wait() x is the sum over the ranks."""
        return CompletedWork() if self.size == 1 else self._all_reduce(x, dist.ReduceOp.SUM, async_op=True)

    def start_reduce_scatter(self, out, x):
        """-> a handle; after its wait() out (n,) is this rank's slice of the sum of x (n*size,)."""
        self.record("reduce-scatter", x, self.ring_bytes(x))
        return reduce_scatter_single(out, x, group=self.group, async_op=True)

    def start_all_gather(self, out, x):
        """-> a handle; after its wait() out (n*size,) holds the x (n,) of all ranks, by rank."""
        self.record("all-gather", out, self.ring_bytes(out))
        return all_gather_single(out, x, group=self.group, async_op=True)


@dataclass(frozen=True)
class Mesh:
    world: Axis
    dp: Axis     # replicas of the model: different data, same parameters
    cp: Axis     # chunks of the same sequences, same parameters
    tp: Axis     # one layer over several ranks (and the sequence between the blocks)
    pp: Axis     # stages: different layers
    ep: Axis     # different experts
    edp: Axis    # the ranks that hold the same experts
    dpcp: Axis   # dp x cp: the ranks that hold the same share of every layer
    stage: Axis  # all ranks of one pipeline stage = dp x cp x tp = edp x ep
    tied: Axis   # dp x cp x {first, last stage}: the two copies of a tied embedding


def make_mesh(world, tp=1, pp=1, ep=1, groups=True, n_experts=0, cp=1):
    """world: rank, size and calls of this rank -> Mesh (groups=False: no process groups, for plans). Rank
    order, slowest first: pp, dp, cp, tp; a stage's ranks are also (edp, ep). ValueError: check_ranks."""
    n, dp = world.size, check_ranks(world.size, tp, pp, ep, n_experts, cp)
    grid = torch.arange(n).view(pp, dp, cp, tp)
    expert_grid = grid.view(pp, -1, ep)  # (pp, edp, ep): the same ranks, seen by the experts
    groups_of = {
        "world": grid.view(1, n), "tp": grid.view(-1, tp), "cp": grid.transpose(2, 3).reshape(-1, cp),
        "stage": grid.view(pp, -1), "dp": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "dpcp": grid.permute(0, 3, 1, 2).reshape(-1, dp * cp), "pp": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "ep": expert_grid.view(-1, ep), "edp": expert_grid.transpose(1, 2).flatten(0, 1),
        "tied": grid[::max(1, pp - 1)].permute(3, 0, 1, 2).reshape(tp, -1),  # of the first and last stage
    }
    # every rank creates every group in the same order; axes of equal ranks share one. except pp: NCCL matches
    # the calls on a communicator by their order, and stages mix sends and sums in different orders
    made, axes = {}, {"tied": Axis("tied")}  # the stages between first and last have no part in that
    for name, table in groups_of.items():
        for ranks in map(tuple, table.tolist()):
            key = (name == "pp", ranks)
            if groups and len(ranks) > 1 and key not in made:
                world_group = len(ranks) == n and name != "pp"
                made[key] = dist.group.WORLD if world_group else dist.new_group([*ranks])
            if world.rank in ranks:
                at, group = ranks.index(world.rank), made.get(key)
                axes[name] = Axis(name, at, len(ranks), group, ranks, world.calls)
    return Mesh(**axes)


# -----------------------------------------------------------------------------
# parameters: which share of the full tensor is mine, and over which ranks its gradient is summed

def parameter(shape, mesh, tp_dim=None, expert=False, used=None, reduce=None):
    """An empty nn.Parameter holding this rank's share of a tensor of `shape`: cut along tp_dim over tp, or
    along dim 0 over ep for the experts. used: rows of dim 0 that are not vocabulary padding.
    Each parameter belongs to exactly one reduction group, whose ranks' gradients are summed:
        cut over tp   -> dp      each replica of the same share; under cp dpcp: cp ranks saw other tokens, too
        replicated    -> stage   under sequence parallelism every tp rank saw other tokens, so they count too
        experts       -> edp     the same experts; a rank's gradient already sums the tokens of all ep
        tied          -> tied    dp x cp x {first stage, last stage}: two copies of one embedding"""
    local, offset = list(shape), [0] * len(shape)
    dim, axis = (0, mesh.ep) if expert else (tp_dim, mesh.tp)
    if dim is not None:
        local[dim] = shape[dim] // axis.size
        assert local[dim] * axis.size == shape[dim], f"{shape} does not divide by {axis.name} {axis.size}"
        offset[dim] = local[dim] * axis.rank
    p = torch.nn.Parameter(torch.empty(local))
    p.full_shape, p.offset, p.used = tuple(shape), tuple(offset), shape[0] if used is None else used
    replicas = "dp" if mesh.cp.size == 1 else "dpcp"
    p.expert, p.reduce = expert, reduce or ("edp" if expert else "stage" if tp_dim is None else replicas)
    return p


# -----------------------------------------------------------------------------
# tensor and sequence parallelism: the two pairs of collectives around every sharded layer
#   gather_rows   g of arXiv:2205.05198, figure 5: forward all-gather, backward reduce-scatter
#   scatter_rows  its adjoint g-bar:               forward reduce-scatter, backward all-gather
# they replace Megatron-LM's all-reduces f and g (arXiv:1909.08053, figure 3) at the same number of bytes

class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n, ...) -> (n*tp, ...)
        ctx.axis = axis
        return axis.all_gather(x)  # n rows from each rank to all, over tp or cp

    @staticmethod
    def backward(ctx, g):
        return ctx.axis.reduce_scatter(g), None  # SUM, n of n*tp rows to each rank, over tp or cp


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n*tp, ...) partial sums -> (n, ...) sums
        ctx.axis = axis
        return axis.reduce_scatter(x)  # SUM, n of n*tp rows to each rank, over tp

    @staticmethod
    def backward(ctx, g):
        return ctx.axis.all_gather(g), None  # n rows from each rank to all, over tp


def _uncompiled(function, *args):  # fast/compile.py keeps it out of compiled graphs
    return function.apply(*args)


def gather_rows(x, axis):
    """(n, ...) on each rank -> (n*tp, ...) on all."""
    return x if axis.size == 1 else _uncompiled(_GatherRows, x, axis)


def scatter_rows(x, axis):
    """(n*tp, ...) partial sums on each rank -> (n, ...) rows of the total."""
    return x if axis.size == 1 else _uncompiled(_ScatterRows, x, axis)


def gather_chunks(x, axis):
    """(t, ...) of each rank, its two chunks of a sequence -> (T, ...) on all, in the sequence's order."""
    chunks = gather_rows(x, axis).chunk(2 * axis.size)  # t positions from each rank to all, over cp
    return torch.cat(chunks[0::2] + chunks[::-2])  # by rank: first and last, second and last but one, ...


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, send, receive):
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)  # block j to rank j, over ep

    @staticmethod
    def backward(ctx, g):  # what went there comes back: the same blocks, over ep
        return ctx.axis.all_to_all(g, ctx.receive, ctx.send), None, None, None


def all_to_all(x, axis, send=None, receive=None):
    """Axis.all_to_all with a gradient."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send, receive)


# -----------------------------------------------------------------------------
# data parallelism and ZeRO-1: flat buckets, reduced while backward still runs. zero.py: ZeRO-2 and ZeRO-3

class Comm:
    """How a bucket's gradients and weights travel: NCCL or gloo (fast/peer.py has the other way). grad_dtype
    None is at least fp32; another needs one micro-batch per step: gradients are copied, not accumulated."""

    def __init__(self, grad_dtype=None):
        self.grad_dtype = grad_dtype

    def allocate(self, bucket, weights):
        """weights (n,) in at least fp32 -> flat (n,) in the model's dtype, grad (n,), total (n/shards,)."""
        flat = weights if weights.dtype == bucket.dtype else torch.zeros_like(weights, dtype=bucket.dtype)
        grad = torch.zeros_like(weights, dtype=self.grad_dtype)
        return flat, grad, grad[bucket.shard]

    def start_reduce(self, bucket):
        """Start the sum of bucket.grad over the bucket's axis -> a handle with wait()."""
        if bucket.shards > 1:  # SUM, n/size of n numbers to each rank, over the bucket's axis
            return bucket.axis.start_reduce_scatter(bucket.total, bucket.grad)
        return bucket.axis.start_all_reduce(bucket.grad)  # SUM of n numbers, over the bucket's axis

    def start_gather(self, bucket):
        """Start sending this rank's stepped slice of bucket.flat to the others -> a handle with wait()."""
        # n/size weights from each rank to all, over the bucket's axis
        return bucket.axis.start_all_gather(bucket.flat, bucket.own)


class Bucket:
    """Parameters that are reduced together, one after the other in flat buffers: one large collective beats
    many small ones. The bucket lays them out and counts their gradients; its Comm communicates.
        flat (n,)           the weights in the model's dtype; every p.data is a view of it
        grad (n,)           their gradients
        total (n/shards,)   the ranks' sum, for the slice that this rank updates
        own (n/shards,)     that slice of flat
        master (n/shards,)  the same in at least fp32, initially unrounded: small first updates then change
                            the rounded weights. A view of flat if the model is fp32
    ZeRO-1 (arXiv:1910.02054, section 5.1): each of the axis' ranks owns a slice of n/size elements, updates
    only that, and sends the new weights to the others. Without ZeRO every rank owns all: shards is 1."""

    def __init__(self, names, params, axis, decayed, zero, dtype, comm):
        self.names, self.params, self.axis, self.decayed, self.comm = names, params, axis, decayed, comm
        self.dtype = dtype or params[0].dtype
        self.shards = axis.size if zero else 1
        # a slice that k ranks hold counts 1/k on each of them in sums over the world
        self.replica_weight = 1 / (axis.size // self.shards)
        self.used = sum(p.numel() for p in params)
        n = padded_elements(self.used, self.shards)
        self.shard = self.shard_slice(axis.rank if self.shards > 1 else 0, n)
        wide = torch.promote_types(params[0].dtype, torch.float32)
        weights = torch.zeros(n, dtype=wide, device=params[0].device)  # (n,), the last n - used are padding
        self.flat, self.grad, self.total = comm.allocate(self, weights)
        self.grads, self.starts, start = [], [], 0  # per parameter: its window of self.grad, where it begins
        for p in params:
            weights[start:start + p.numel()].view_as(p).copy_(p.data)
            p.data = self.flat[start:start + p.numel()].view_as(p)
            self.grads.append(self.grad[start:start + p.numel()].view_as(p))
            self.starts.append(start)
            start += p.numel()
        self.master = weights[self.shard] if weights is self.flat else weights[self.shard].clone()
        self.flat.copy_(weights)
        self.own = self.flat[self.shard]
        self.gather_handle = None  # of the running all-gather of new weights, or None
        self.reset()

    def shard_slice(self, rank, n):
        """The slice of a buffer of n elements that the axis' rank number `rank` owns."""
        return slice(rank * n // self.shards, (rank + 1) * n // self.shards)

    def reset(self):
        """A new optimizer step: no gradient has come yet."""
        self.untouched = [True] * len(self.params)
        self.pending_params, self.reduce_handle = len(self.params), None

    def on_grad_ready(self, i, is_last_microbatch):
        """Backward has made parameter i's gradient. With all of the last micro-batch the reduction starts."""
        p = self.params[i]
        if self.comm.grad_dtype is None:
            accumulate(self.grads[i], p.grad, first=self.untouched[i])
            p.grad = None
        else:  # it stays in p.grad until all have come; then they are copied together
            assert self.untouched[i], "a second micro-batch, but grad_dtype promises one"
        self.untouched[i] = False
        if is_last_microbatch:
            self.pending_params -= 1
            if self.pending_params == 0:
                self.start_reduce()

    def start_reduce(self):
        if self.comm.grad_dtype is None:
            for grad, untouched in zip(self.grads, self.untouched, strict=True):
                if untouched:
                    grad.zero_()  # a parameter that took no part in this step
        else:
            copy_gradients([(grad, p.grad) for grad, p in zip(self.grads, self.params, strict=True)])
            for p in self.params:
                p.grad = None
        self.reduce_handle = self.comm.start_reduce(self)

    def wait_grads(self):
        """Wait for the sums. If a parameter got no gradient (on all ranks alike), it starts here."""
        if self.reduce_handle is None:
            self.start_reduce()
        self.reduce_handle.wait()

    def start_gather(self):
        """This rank's slice of the weights is new: send it to the others."""
        if self.shards > 1:
            self.gather_handle = self.comm.start_gather(self)

    def wait_for_weights(self):
        """After this, flat holds the new weights of all ranks."""
        if self.gather_handle is not None:
            handle, self.gather_handle = self.gather_handle, None
            handle.wait()


def untimed(phase):  # in the place of runtime.timing.Timers where nobody wants times
    return contextlib.nullcontext()


class DataParallel:
    """Sums every gradient over the ranks that hold the same parameter, and sends ZeRO-1's new weights.
    Per step: reset(); per micro-batch set is_last_microbatch and run backward; finish_grad_sync(). When the
    optimizer has written a bucket's slice it calls on_updated(bucket). Call wait_for_weights(module) before
    reading weights: the model does, module by module, in every forward.
    dtype: of the weights from now on. comm(axis) -> the Comm of a bucket that is reduced over axis."""
    make_bucket = Bucket

    def __init__(self, model, mesh, zero=0, timers=untimed, dtype=None, comm=lambda axis: Comm(),
                 bucket_elements=BUCKET_ELEMENTS):
        self.mesh, self.zero, self.timers, self.buckets = mesh, zero, timers, []
        self.is_last_microbatch = True  # the micro-batch in flight completes the step's sums
        for axis_name, decayed, names, params in assign_buckets(model.named_parameters(), zero,
                                                               bucket_elements):
            axis = getattr(mesh, axis_name)
            self.buckets.append(self.make_bucket(names, params, axis, decayed, zero, dtype, comm(axis)))
        # weak references: a hook that held the bucket would keep parameter, hook and bucket alive for ever
        dp_ref, bucket_of = weakref.proxy(self), {}
        for bucket in self.buckets:
            bucket_ref = weakref.proxy(bucket)
            for i, p in enumerate(bucket.params):
                bucket_of[p] = bucket
                p.register_post_accumulate_grad_hook(
                    lambda p, b=bucket_ref, i=i: b.on_grad_ready(i, dp_ref.is_last_microbatch))
        self.buffers = dict(model.named_buffers())  # not trained, but part of the model's state
        self.buckets_of = {m: list({bucket_of[p]: None for p in m.parameters()}) for m in model.modules()}
        model.wait_for_weights = self.wait_for_weights

    def reset(self):
        """A new optimizer step begins."""
        for bucket in self.buckets:
            bucket.reset()

    def finish_grad_sync(self):
        """Wait until every bucket's total is the sum over its axis."""
        with self.timers("grad_sync"):  # the time that backward did not hide
            for bucket in self.buckets:
                bucket.wait_grads()

    def on_updated(self, bucket):
        """The optimizer wrote this rank's slice of a bucket (first layers first): send it to the others."""
        bucket.start_gather()

    def wait_for_weights(self, module, x=None):
        """The module's weights are the new ones of all ranks after this. x: its input, see zero.ZeRO3."""
        buckets = [b for b in self.buckets_of[module] if b.gather_handle is not None]
        if buckets:
            with self.timers("param_gather"):  # the time that forward did not hide
                for bucket in buckets:
                    bucket.wait_for_weights()

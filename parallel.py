r"""Tensor, data and expert parallelism written out by hand: which ranks belong together, and what they send.

    Axis, Mesh, make_mesh   the ranks as a grid; an axis has the collectives as methods
    gather_rows ...         tensor and sequence parallelism, all_to_all, the vocabulary: pairs with gradients
    Bucket, DataParallel    gradients in flat buckets, summed while backward still runs; ZeRO-1

The one rule: the loss is divided once, by the number of tokens of the whole global batch. Every gradient
reduction is then a plain SUM over the ranks that hold the same parameter. No averages, no second division.

The whole communication story is one search for Axis' methods: grep -nE "\.(start_)?(all_reduce|all_gather|\
reduce_scatter|broadcast|all_to_all|gather_objects)\(" *.py; each call says what moves, over which axis, how
much. Where the GPUs of one node can reach each other's memory, fast/ replaces some of them by copies.
"""
import contextlib
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ops.fused import accumulate

# torch 2.13 has new names for these two, older versions only the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MAX = dist.ReduceOp.MAX


# -----------------------------------------------------------------------------
# the mesh

class CompletedWork:
    """What an asynchronous collective over one rank returns: there is nothing to wait for."""

    def wait(self):
        pass


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one only along one axis of the mesh, and the collectives among them.

    Over one rank every collective is the identity. Each one counts in `sent` the bytes that this rank sends,
    by the ring algorithms' formulas (of a whole, (size-1)/size for an all-gather, a reduce-scatter and an
    all-to-all, twice that for an all-reduce: Thakur et al. 2005, section 4), and tells the watchdog through
    `calls` that this rank is about to start it. group is None where size is 1."""
    name: str
    rank: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    calls: Any = None  # runtime.launch.CollectiveLog of this rank, one for all axes
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
        self.record("all-reduce", x, 2 * self.ring_bytes(x))
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
        """Rows of x, block j to rank j; the blocks that come back stand by sender. send, receive: rows per
        rank, None for equal blocks. (sum(send), ...) -> (sum(receive), ...)"""
        if self.size == 1:
            return x
        out = x.new_empty(x.size(0) if receive is None else sum(receive), *x.shape[1:])
        stays = x.size(0) // self.size if send is None else send[self.rank]
        row = x[0].numel() * x.element_size() if len(x) else 0
        self.record("all-to-all", x, (x.size(0) - stays) * row)
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def broadcast(self, x, source=0):
        """The x of the axis' rank number `source` on all ranks, in place -> x."""
        if self.size > 1:
            self.record("broadcast", x, x.numel() * x.element_size() * (self.rank == source))
            dist.broadcast(x, self.ranks[source], group=self.group)
        return x

    def gather_objects(self, value):
        """A small picklable value of each rank -> the list of all, by rank, on every rank."""
        if self.size == 1:
            return [value]
        self.record("all-gather")
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value, source=0):
        """A small picklable value of rank number `source` -> the same on every rank."""
        box = [value]
        if self.size > 1:
            self.record("broadcast")
            dist.broadcast_object_list(box, self.ranks[source], group=self.group)
        return box[0]

    def any(self, flag):
        """-> True on every rank if flag is true on any: one integer, on the host."""
        return bool(self.all_reduce(torch.tensor(int(flag)), MAX))

    # started now, waited for later: each returns a handle with wait()

    def start_all_reduce(self, x):
        """x becomes the sum over the ranks, in place, by the time wait() returns."""
        return CompletedWork() if self.size == 1 else self._all_reduce(x, dist.ReduceOp.SUM, async_op=True)

    def start_reduce_scatter(self, out, x):
        """out (n,) becomes this rank's slice of the sum of x (n*size,)."""
        self.record("reduce-scatter", x, self.ring_bytes(x))
        return reduce_scatter_single(out, x, group=self.group, async_op=True)

    def start_all_gather(self, out, x):
        """out (n*size,) becomes the x (n,) of all ranks, by rank."""
        self.record("all-gather", out, self.ring_bytes(out))
        return all_gather_single(out, x, group=self.group, async_op=True)


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


# -----------------------------------------------------------------------------
# parameters: which share of the full tensor is mine, and over which ranks its gradient is summed

def parameter(shape, mesh, tp_dim=None, expert=False, used=None, reduce=None):
    """An empty nn.Parameter holding this rank's share of a tensor of `shape`: cut along tp_dim over tp, or
    along dim 0 over ep for the experts.

    Each parameter belongs to exactly one reduction group, whose ranks' gradients are summed:
        cut over tp   -> dp      each replica of the same share
        replicated    -> stage   under sequence parallelism every tp rank saw other tokens, so they count too
        experts       -> edp     the same experts; a rank's gradient already sums the tokens of all ep
        tied          -> tied    dp x {first stage, last stage}: two copies of one embedding
    used: rows of dim 0 that are not vocabulary padding.
    """
    full, offset = list(shape), [0] * len(shape)
    mine = list(full)
    dim, axis = (0, mesh.ep) if expert else (tp_dim, mesh.tp)
    if dim is not None:
        mine[dim] = full[dim] // axis.size
        assert mine[dim] * axis.size == full[dim], f"{full} does not divide by {axis.name} {axis.size}"
        offset[dim] = mine[dim] * axis.rank
    p = torch.nn.Parameter(torch.empty(mine))
    p.full_shape, p.offset, p.used = tuple(full), tuple(offset), full[0] if used is None else used
    p.expert, p.reduce = expert, reduce or ("edp" if expert else "stage" if tp_dim is None else "dp")
    return p


# -----------------------------------------------------------------------------
# tensor and sequence parallelism: the two pairs of collectives around every sharded layer
#
#   gather_rows   g-bar of Korthikanti et al.: forward all-gather, backward reduce-scatter
#   scatter_rows  its adjoint g:               forward reduce-scatter, backward all-gather
# (arXiv:2205.05198, figure 5). together they replace the all-reduces f and g of Megatron-LM
# (arXiv:1909.08053, figure 3) at the same number of bytes.

class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n, ...) -> (n*tp, ...)
        ctx.axis = axis
        return axis.all_gather(x)  # n rows from each rank to all, over tp

    @staticmethod
    def backward(ctx, g):
        return ctx.axis.reduce_scatter(g), None  # SUM, n of n*tp rows to each rank, over tp


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n*tp, ...) partial sums -> (n, ...) sums
        ctx.axis = axis
        return axis.reduce_scatter(x)  # SUM, n of n*tp rows to each rank, over tp

    @staticmethod
    def backward(ctx, g):
        return ctx.axis.all_gather(g), None  # n rows from each rank to all, over tp


def _uncompiled(function, *args):
    return function.apply(*args)


def disable_compile_for_collectives():
    """From now on torch.compile leaves collectives out of its graphs: python counts their bytes. Called only
    under --compile, because importing torch's compiler takes 2 s."""
    global _uncompiled
    _uncompiled, Axis._all_reduce = map(torch.compiler.disable, (_uncompiled, Axis._all_reduce))


def gather_rows(x, axis):
    """(n, ...) on each rank -> (n*tp, ...) on all."""
    return x if axis.size == 1 else _uncompiled(_GatherRows, x, axis)


def scatter_rows(x, axis):
    """(n*tp, ...) partial sums on each rank -> (n, ...) rows of the total."""
    return x if axis.size == 1 else _uncompiled(_ScatterRows, x, axis)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, send, receive):
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)  # block j to rank j, over ep

    @staticmethod
    def backward(ctx, g):  # what went there comes back: the same blocks, over ep
        return ctx.axis.all_to_all(g, ctx.receive, ctx.send), None, None, None


def all_to_all(x, axis, send=None, receive=None):
    """Rows of x, block j to rank j of the axis; the blocks that come back stand by sender. send, receive:
    rows per rank, None for equal blocks. (sum(send), ...) -> (sum(receive), ...)"""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send, receive)


def vocab_embedding(tokens, weight, axis):
    """tokens (B*T,) int64, weight (v, C) -> (n, C): each rank looks up the ids it holds, their sum goes out
    by rows."""
    if axis.size == 1:
        return F.embedding(tokens, weight)
    local = tokens - axis.rank * weight.size(0)
    mine = (local >= 0) & (local < weight.size(0))  # (B*T,)
    x = F.embedding(local * mine, weight) * mine.unsqueeze(1)  # (B*T, C), zero for other ranks' ids
    return scatter_rows(x, axis)


class _VocabCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target], the vocabulary dealt over tp; backward needs no communication."""

    @staticmethod
    def forward(ctx, z, target, axis):  # (N, v), (N,) -> ()
        low = axis.rank * z.size(1)
        top = z.max(dim=1).values  # (N,)
        axis.all_reduce(top, MAX)  # N maxima, over tp
        mine = (target >= low) & (target < low + z.size(1))
        index = ((target - low) * mine).unsqueeze(1)  # (N, 1)
        picked = z.gather(1, index).squeeze(1).masked_fill(~mine, 0)  # (N,) target's logit; -inf * 0 is NaN
        p = (z - top.unsqueeze(1)).exp_()  # (N, v)
        total = p.sum(1)
        # SUM of exponentials and of target logits: 2 N, over tp
        total, picked = axis.all_reduce(torch.stack([total, picked]))
        p /= total.unsqueeze(1)
        ctx.save_for_backward(p, index, mine)
        return (total.log() + top - picked).sum()

    @staticmethod
    def backward(ctx, g):
        p, index, mine = ctx.saved_tensors
        dz = p.scatter_add(1, index, -mine.to(p.dtype).unsqueeze(1))  # softmax - onehot
        return dz * g, None, None


def vocab_cross_entropy(logits, target, vocab_size, axis):
    """logits (N, v) in the model's dtype, target (N,) -> sum of the cross-entropy in nats, the same on every
    tp rank."""
    low = axis.rank * logits.size(1)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least fp32
    if low + z.size(1) > vocab_size:  # padding rows are no words: they take no probability
        pad = torch.arange(low, low + z.size(1), device=z.device) >= vocab_size
        z = z.masked_fill(pad, -torch.inf)
    if axis.size == 1:
        return F.cross_entropy(z, target, reduction="sum")
    return _VocabCrossEntropy.apply(z, target, axis)


# -----------------------------------------------------------------------------
# data parallelism and ZeRO-1: flat buckets, reduced while backward still runs

LARGE = 2**22  # elements from which a gradient is copied alone


class Bucket:
    """Parameters that are reduced together, laid out one after the other in two flat buffers: one large
    collective beats many small ones.

    flat (n,) holds the weights in the model's dtype and every p.data is a view of it;
    grad (n,) holds the sum of the gradients in at least fp32, or in the model's dtype if `lone`: where
    nothing is ever added to a gradient that is half the memory for the same numbers.
    ZeRO-1 (arXiv:1910.02054, section 5.1): of n each rank owns the slice `mine`, (n/size,), steps only that,
    and sends its new weights to the others. Without ZeRO every rank owns all. total (n/size,) is that slice
    of the ranks' sum. master (n/size,) is that slice of the weights in at least fp32, as it was drawn: from
    the rounded weights, a warmup's small updates would not show in the model for many steps. It is the
    weights themselves where those are wide enough.
    """

    def __init__(self, names, params, axis, decay, zero, dtype=None, lone=False):
        self.names, self.params, self.axis, self.decay, self.lone = names, params, axis, decay, lone
        self.shards = axis.size if zero else 1
        # of what this rank holds, the part it answers for in a sum over the world
        self.share = 1 / (axis.size // self.shards)
        self.used = sum(p.numel() for p in params)
        n = -(-self.used // (self.shards * 128)) * self.shards * 128 if self.shards > 1 else self.used
        dtype, device = dtype or params[0].dtype, params[0].device
        wide = torch.promote_types(params[0].dtype, torch.float32)
        drawn = torch.zeros(n, dtype=wide, device=device)  # (n,)
        self.mine = self.span(axis.rank if self.shards > 1 else 0, n)
        self.flat, self.grad, self.total = self.memory(drawn, dtype)
        self.grads, self.starts = [], []  # per parameter: its window of self.grad, and where that begins
        at = 0
        for p in params:
            drawn[at:at + p.numel()].view_as(p).copy_(p.data)
            p.data = self.flat[at:at + p.numel()].view_as(p)
            self.grads.append(self.grad[at:at + p.numel()].view_as(p))
            self.starts.append(at)
            at += p.numel()
        self.master = drawn[self.mine] if drawn is self.flat else drawn[self.mine].clone()
        self.flat.copy_(drawn)
        self.gather = None
        self.begin()

    def span(self, rank, n):
        """The rank's slice of a buffer of n."""
        return slice(rank * n // self.shards, (rank + 1) * n // self.shards)

    def memory(self, drawn, dtype):
        """-> flat, grad, total; drawn (n,): weights in at least fp32"""
        flat = drawn if drawn.dtype == dtype else torch.zeros_like(drawn, dtype=dtype)
        sums = dtype if self.lone else torch.promote_types(dtype, torch.float32)
        grad = torch.zeros_like(drawn, dtype=sums)
        return flat, grad, grad[self.mine]

    def begin(self):
        """A new optimizer step: no gradient has come yet."""
        self.fresh = [True] * len(self.params)
        self.waiting = len(self.params)
        self.work = None

    def add(self, i, last):
        """Take parameter i's gradient of one micro-batch; after the last one a full bucket leaves at once.
        Lone gradients wait until then, to be copied together."""
        p = self.params[i]
        assert self.fresh[i] or not self.lone, "a second micro-batch where one was announced (once)"
        if not self.lone:
            accumulate(self.grads[i], p.grad, first=self.fresh[i])
            p.grad = None
        self.fresh[i] = False
        if last:
            self.waiting -= 1
            if self.waiting == 0:
                self.reduce()

    def reduce(self):
        if self.lone:
            pairs = [(g, p.grad) for g, p in zip(self.grads, self.params, strict=True) if p.grad is not None]
            many = [pair for pair in pairs if pair[0].numel() < LARGE]
            if many:  # one kernel for all; a copy alone is twice as fast where it is large
                torch._foreach_copy_(*zip(*many, strict=True))
            for g, new in pairs:
                if g.numel() >= LARGE:
                    g.copy_(new)
            for p in self.params:
                p.grad = None
        for i, fresh in enumerate(self.fresh):
            if fresh:
                self.grads[i].zero_()  # a parameter that took no part in this step
        self.work = self.add_up()

    def add_up(self):
        """Start the sum over the axis. -> its end, for which wait() waits"""
        if self.shards > 1:  # SUM, n/size of n fp32 to each rank, over the axis
            return self.axis.start_reduce_scatter(self.total, self.grad)
        return self.axis.start_all_reduce(self.grad)  # SUM, n fp32, over the axis

    def finish(self):
        """Wait for the reduction (a bucket that never filled is reduced here, in one order everywhere)."""
        if self.work is None:
            self.reduce()
        self.work.wait()

    def send_weights(self):
        """Start handing this rank's stepped slice to the others; arrive() waits for it."""
        if self.shards > 1:  # n/size weights from each rank to all, over the axis
            self.gather = self.axis.start_all_gather(self.flat, self.flat[self.mine])

    def arrive(self):
        """Wait for the other ranks' weights."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None


def untimed(phase):
    """In the place of log.Timers where nobody wants times."""
    return contextlib.nullcontext()


BUCKET_ELEMENTS = 16_000_000  # a bucket with so many is full


def assign_buckets(named_parameters, bucket_elements=BUCKET_ELEMENTS):
    """-> [(axis name, decayed, names, parameters)] of each bucket, in the order in which backward fills them.
    Backward reaches the last layers first, so buckets are filled in reverse. Vectors (norms, biases) have
    buckets of their own: they are not decayed, and one bucket is one tensor of the optimizer."""
    full, filling = [], {}  # (axis name, decayed): names, parameters
    for name, p in reversed(list(named_parameters)):
        key = p.reduce, uses_weight_decay(p)
        names, params = filling.setdefault(key, ([], []))
        names.append(name)
        params.append(p)
        if sum(q.numel() for q in params) >= bucket_elements:
            full.append((*key, *filling.pop(key)))
    return full + [(*key, names, params) for key, (names, params) in filling.items()]


class DataParallel:
    """Sums every gradient over the ranks that hold the same parameter.
    Per step: begin(); per micro-batch set .last, backward; finish(). After the optimizer: stepped(bucket)."""

    def __init__(self, model, mesh, zero=0, timers=untimed, bucket_elements=BUCKET_ELEMENTS, dtype=None,
                 once=False, near=None):
        self.timers = timers
        # graph.py: new weights travel at the start of a recorded step, not after the old, but for `early`
        self.lazy = False
        self.owed = False  # new weights have not been sent yet
        self.last = True  # the micro-batch in flight is the step's last one: its gradients complete the sums
        self.buckets, self.dtype = [], dtype  # of the weights from now on; None: as they are
        self.once = once  # one micro-batch per step
        self.near = near  # near.NearBucket, if once and a stage's GPUs reach each other's memory
        for axis, decayed, names, params in assign_buckets(model.named_parameters(), bucket_elements):
            self._add_bucket((axis, decayed), mesh, zero, names, params)
        me = weakref.proxy(self)  # a hook that held us would keep parameter, hook and bucket alive for ever
        owner = {}  # parameter -> bucket
        for bucket in self.buckets:
            it = weakref.proxy(bucket)
            for i, p in enumerate(bucket.params):
                owner[p] = bucket
                p.register_post_accumulate_grad_hook(lambda p, it=it, i=i: it.add(i, me.last))
        self.buffers, self.stage = dict(model.named_buffers()), mesh.stage  # untrained, but state
        self.needs = {m: list(dict.fromkeys(owner[p] for p in m.parameters())) for m in model.modules()}
        # what the next forward would wait for leaves under the optimizer, outside of a recorded step
        self.early = self.needs[model.wte] if near else []
        model.arrive = self.arrive

    def _add_bucket(self, key, mesh, zero, names, params):
        axis = getattr(mesh, key[0])
        near = self.near is not None and zero and axis.size > 1
        lone = self.once and (near or axis.size == 1)
        bucket = self.near if near else Bucket
        self.buckets.append(bucket(names, params, axis, key[1], zero, self.dtype, lone))

    def begin(self):
        for bucket in self.buckets:
            bucket.begin()

    def finish(self):
        with self.timers("grad_sync"):  # what backward did not hide
            for bucket in self.buckets:
                bucket.finish()

    def stepped(self, bucket):
        """The optimizer wrote this rank's slice of a bucket, the first layers' first: the others get it,
        under the next forward."""
        if self.lazy and bucket not in self.early:
            self.owed = True
        else:
            bucket.send_weights()

    def send_owed(self):
        if self.owed:
            self.send_weights()

    def send_weights(self):
        self.owed = False
        for bucket in reversed(self.buckets):  # in the order in which the next forward needs them
            if bucket not in self.early:
                bucket.send_weights()

    def arrive(self, module):
        """Called by the model just before it uses a module: its weights are all here after this."""
        if any(bucket.gather is not None for bucket in self.needs[module]):
            with self.timers("param_gather"):  # what the forward before it did not hide
                for bucket in self.needs[module]:
                    bucket.arrive()


def uses_weight_decay(p):
    """Weight decay is for matrices only, never for norms, biases, vectors: by shape, not by class."""
    return p.ndim >= 2


@torch.no_grad()
def broadcast_and_verify(model, mesh):
    """Replicas start equal: the first rank that holds a parameter sends it, then each checks its own."""
    for name, p in model.named_parameters():
        axis = getattr(mesh, p.reduce)
        if axis.size == 1:
            continue
        axis.broadcast(p.data)  # one parameter, first replica to all
        mine = checksum(p).view(1, 2)
        for rank, theirs in zip(axis.ranks, axis.all_gather(mine), strict=True):  # two int64, over the axis
            assert torch.equal(theirs, mine[0]), f"{name} on rank {rank} differs after the broadcast"


CHUNK = 2**24  # elements that checksum widens at once


def checksum(t):
    """(2,) int64: plain and position-weighted sum of the bit pattern. Equal bits, equal pair; a swap changes
    the second."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    v = t.detach().reshape(-1).view(bits)  # (n,)
    sums = torch.zeros(2, dtype=torch.int64, device=v.device)
    for first in range(0, v.numel(), CHUNK):  # widened, an element takes 8 bytes, more than once
        part = v[first:first + CHUNK].long()
        weight = torch.arange(first, first + part.numel(), device=v.device) * 2 + 1
        sums += torch.stack([part.sum(), (part * weight).sum()])
    return sums

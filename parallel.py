r"""What travels along the axes of mesh.py: tensor and data parallelism written out by hand.

The one rule: the loss is divided once, by the number of tokens of the whole global batch. Every gradient
reduction is then a plain SUM over the ranks that hold the same parameter. No averages, no second division.

grep -n "dist\\.\|_single(" *.py is the whole communication story but for what GPUs of one node read and write
in each other's memory (near.py, window.py); each call says what moves, over which axis, how much.
"""
import contextlib
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mesh import Axis, Mesh, make_mesh  # noqa: F401 read mesh.py first; the others import them from here
from ops.fused import accumulate

# torch 2.13 has new names for these two, 2.11 and 2.12 only the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx, g):
        return reduce_scatter(g, ctx.axis), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # (n*tp, ...) partial sums -> (n, ...) sums
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx, g):
        return all_gather(g, ctx.axis), None


def _between_graphs(function, *args):
    return function.apply(*args)


def outside_graphs():
    """From now on torch.compile leaves these calls out of its graphs: a collective counts itself, a graph
    cannot. Only with --compile, for the import of torch's compiler takes 2 s."""
    global _between_graphs
    _between_graphs, Axis.count = map(torch.compiler.disable, (_between_graphs, Axis.count))


def gather_rows(x, axis):
    """(n, ...) on each rank -> (n*tp, ...) on all."""
    return x if axis.size == 1 else _between_graphs(_GatherRows, x, axis)


def scatter_rows(x, axis):
    """(n*tp, ...) partial sums on each rank -> (n, ...) rows of the total."""
    return x if axis.size == 1 else _between_graphs(_ScatterRows, x, axis)


def all_gather(x, axis):
    out = x.new_empty(x.size(0) * axis.size, *x.shape[1:])
    axis.count("all-gather", out)
    all_gather_single(out, x.contiguous(), group=axis.group)  # n rows from each rank to all, over tp
    return out


def reduce_scatter(x, axis):
    out = x.new_empty(x.size(0) // axis.size, *x.shape[1:])
    axis.count("reduce-scatter", x)
    reduce_scatter_single(out, x.contiguous(), group=axis.group)  # SUM, n of n*tp rows to each rank, over tp
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, send, receive):
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return exchange(x, axis, send, receive)

    @staticmethod
    def backward(ctx, g):
        return exchange(g, ctx.axis, ctx.receive, ctx.send), None, None, None  # what went there comes back


def all_to_all(x, axis, send=None, receive=None):
    """Rows of x, block j to rank j of the axis; the blocks that come back stand by sender. send, receive:
    rows per rank, None for equal blocks. (sum(send), ...) -> (sum(receive), ...)"""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, send, receive)


def exchange(x, axis, send, receive):
    out = x.new_empty(x.size(0) if receive is None else sum(receive), *x.shape[1:])
    stays = x.size(0) // axis.size if send is None else send[axis.rank]
    axis.note("all-to-all", x)
    axis.sent["all-to-all"] += (x.size(0) - stays) * (x[0].numel() if len(x) else 0) * x.element_size()
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=axis.group)  # block j to rank j, over ep
    return out


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
        axis.count("all-reduce", top)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=axis.group)  # N maxima, over tp
        mine = (target >= low) & (target < low + z.size(1))
        index = ((target - low) * mine).unsqueeze(1)  # (N, 1)
        picked = z.gather(1, index).squeeze(1).masked_fill(~mine, 0)  # (N,) target's logit; -inf * 0 is NaN
        p = (z - top.unsqueeze(1)).exp_()  # (N, v)
        total = p.sum(1)
        both = torch.stack([total, picked])
        axis.count("all-reduce", both)
        dist.all_reduce(both, group=axis.group)  # SUM of exponentials, of target logits: 2 N, over tp
        total, picked = both
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
            self.axis.count("reduce-scatter", self.grad)
            return reduce_scatter_single(self.total, self.grad, group=self.axis.group, async_op=True)
        if self.axis.size > 1:
            self.axis.count("all-reduce", self.grad)
            # SUM, n fp32, over the axis
            return dist.all_reduce(self.grad, group=self.axis.group, async_op=True)
        return Done()

    def finish(self):
        """Wait for the reduction (a bucket that never filled is reduced here, in one order everywhere)."""
        if self.work is None:
            self.reduce()
        self.work.wait()

    def send_weights(self):
        """Start handing this rank's stepped slice to the others; arrive() waits for it."""
        if self.shards > 1:  # n/size weights from each rank to all, over the axis
            self.axis.count("all-gather", self.flat)
            mine = self.flat[self.mine]
            self.gather = all_gather_single(self.flat, mine, group=self.axis.group, async_op=True)

    def arrive(self):
        """Wait for the other ranks' weights."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None


class Done:
    """What an asynchronous collective over one rank returns."""

    def wait(self):
        pass


def untimed(phase):
    """In the place of log.Timers where nobody wants times."""
    return contextlib.nullcontext()


class DataParallel:
    """Sums every gradient over the ranks that hold the same parameter.
    Per step: begin(); per micro-batch set .last, backward; finish(). After the optimizer: stepped(bucket)."""

    def __init__(self, model, mesh, zero=0, timers=untimed, bucket_elements=16_000_000, dtype=None,
                 once=False, near=None):
        self.timers = timers
        # graph.py: new weights travel at the start of a recorded step, not after the old, but for `early`
        self.lazy = False
        self.owed = False  # new weights have not been sent yet
        self.last = True  # the micro-batch in flight is the step's last one: its gradients complete the sums
        self.buckets, self.dtype = [], dtype  # of the weights from now on; None: as they are
        self.once = once  # one micro-batch per step
        self.near = near  # near.NearBucket, if once and a stage's GPUs reach each other's memory
        open_ = {}  # (axis, decayed): names and parameters of the bucket being filled
        # backward reaches the last layers first, so buckets are filled in reverse. vectors (norms, biases)
        # keep buckets of their own: they are not decayed, and one bucket is one tensor of the optimizer
        for name, p in reversed(list(model.named_parameters())):
            key = (p.reduce, decays(p))
            names, params = open_.setdefault(key, ([], []))
            names.append(name)
            params.append(p)
            if sum(q.numel() for q in params) >= bucket_elements:
                self._close(key, mesh, zero, *open_.pop(key))
        for key, (names, params) in open_.items():
            self._close(key, mesh, zero, names, params)
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

    def _close(self, key, mesh, zero, names, params):
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


def decays(p):
    """Weight decay is for matrices only, never for norms, biases, vectors: by shape, not by class."""
    return p.ndim >= 2


@torch.no_grad()
def broadcast_and_verify(model, mesh):
    """Replicas start equal: the first rank that holds a parameter sends it, then each checks its own."""
    for name, p in model.named_parameters():
        axis = getattr(mesh, p.reduce)
        if axis.size == 1:
            continue
        axis.note("broadcast", p)
        dist.broadcast(p.data, axis.ranks[0], group=axis.group)  # one parameter, first replica to all
        mine = fingerprint(p)  # (2,)
        theirs = [torch.empty_like(mine) for _ in range(axis.size)]
        axis.note("all-gather", mine)
        dist.all_gather(theirs, mine, group=axis.group)  # two int64, over the same axis
        for rank, print_ in zip(axis.ranks, theirs, strict=True):
            assert torch.equal(print_, mine), f"{name} on rank {rank} differs after the broadcast"


WIDE = 2**24  # elements that fingerprint widens at once


def fingerprint(t):
    """(2,) int64: plain and position-weighted sum of the bit pattern. Equal bits, equal pair; a swap changes
    the second."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    v = t.detach().reshape(-1).view(bits)  # (n,)
    sums = torch.zeros(2, dtype=torch.int64, device=v.device)
    for first in range(0, v.numel(), WIDE):  # widened, an element takes 8 bytes, more than once
        part = v[first:first + WIDE].long()
        weight = torch.arange(first, first + part.numel(), device=v.device) * 2 + 1
        sums += torch.stack([part.sum(), (part * weight).sum()])
    return sums

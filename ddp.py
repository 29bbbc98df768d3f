"""Data parallelism by hand: gradients in flat buckets, summed while backward still runs; ZeRO-1.

    assign_buckets   which parameters share a bucket
    Comm             how a bucket travels: over NCCL or gloo; fast/peer.py has a faster way
    FlatBuffers      the flat buffers of a bucket
    Bucket           a bucket that is summed once in a step; knows which gradients have come
    DataParallel     the buckets of a model, hooked into its backward; zero.py has ZeRO-2 and ZeRO-3

The drawing shows the buffers of one bucket of n elements, on rank 1 of the four ranks that hold the
same parameters. Under ZeRO-1, the slice of each rank is a quarter of the bucket:

             0          n/4        n/2        3n/4        n
    flat     | weights in the model's dtype               |  every p.data is a window of it
    grad     | gradients of this rank, in at least fp32   |  each p.grad goes into its window
             |          |##########|          |           |  ## is bucket.own_slice, of rank 1
    grad_total          | summed   |   = grad[own_slice], summed over the ranks: AdamW reads it
    master              | fp32     |   AdamW updates it; its two moments are as long
    own                 | rounded  |   = flat[own_slice]: the new master, sent to the others

A rank updates only its slice. The table shows what a rank keeps of a bucket under each --zero, and
in brackets what it keeps once for the whole model. A slot is memory for one whole bucket. A part is
the embedding, a block, or the head (zero.py):

              flat (weights)                grad                           master, moments
    zero 0    n                             n, summed by all-reduce        n: the slice is all n
    zero 1    n                             n, summed by reduce-scatter    n/4
    zero 2    n                             grad_total n/4 (+ 2 slots)     n/4
    zero 3    own n/4 (+ flat of 2 parts)   grad_total n/4 (+ 2 slots)     n/4

In an fp32 model, master and own are the same memory.

bucket.axis has the ranks over which the gradients are summed: those that hold the same parameters.
Its ranks form two axes (parallel.Sharing), and one order serves every --zero: gradients are
reduce-scattered over bucket.shard, whose ranks keep different slices. Then the slice is all-reduced
over bucket.replicas, whose ranks keep the same slice.

    without ZeRO    shard is this rank alone, and replicas are all ranks of bucket.axis
    with ZeRO       shard is all ranks of bucket.axis, and replicas is this rank alone
    with --shard    both have several ranks

Four things are different in special cases, which a first reading can leave out. With
--split-masters, a master is own and the 16 bits that own lacks (ops/split_master.py). In bf16 on a
GPU, with one micro-batch per step, a bucket that NCCL does not sum can be a CopyBucket, which keeps
grad in bf16. A LoneBucket has no copy: grad is what backward made. In fast/peer.py grad_total has
memory of its own.
"""
import contextlib
import itertools
import weakref
from collections import Counter, deque
from typing import NamedTuple

import torch

from ops.accelerator import on_side_stream
from ops.flat import accumulate, copy_gradients, padded_elements
from ops.split_master import SplitMaster
from parallel import CompletedWork

# A bucket is closed when it has this many elements. With a vocabulary of 4,096 `tiny` has 1.8
# million, so all its matrices are in one bucket, whose sum starts only at the end of backward.
BUCKET_ELEMENTS = 16_000_000

# -----------------------------------------------------------------------------
# Which parameters share a bucket

class Contents(NamedTuple):
    """Parameters that are reduced together."""
    reduction_axis: str  # the name of the axis that sums their gradients
    decayed: bool        # whether weight decay shrinks them
    names: list
    params: list
    optimizer: str = "adamw"  # which optimizer updates them


def trained_parameters(model):
    """Return [(name, parameter)] of what is trained: all, or with --lora the adapters."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def frozen_parameters(model):
    """Return [(name, parameter)] of what is not trained."""
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def uses_weight_decay(p):
    """Whether weight decay shrinks p: matrices only, never norms, biases or vectors."""
    return p.ndim >= 2


def uses_muon(p, name):
    """Whether Muon updates p, if it may: the matrices inside blocks, experts and router too."""
    return name.startswith("blocks.") and p.ndim >= 2


def block_of(name):
    """Return the block of a parameter, "blocks.3". A name such as "wte.weight" is its own block."""
    return ".".join(name.split(".")[:2])


def assign_buckets(named_parameters, zero=0, bucket_elements=BUCKET_ELEMENTS, optimizer="adamw",
                   lone_axes=()):
    """Return the Contents of each bucket, roughly in the order in which backward fills the buckets.

    Backward reaches the last layers first, so buckets are filled in reverse. Vectors (norms,
    biases) have buckets of their own, because they are not decayed and each bucket is one tensor of
    the optimizer. With Muon, the matrices inside blocks have buckets of their own, too. Buckets
    that are still open at the end come last, in the order of their last parameters.

    lone_axes: the names of the axes of one rank, which has nobody to sum with. Under ZeRO-0 and
    ZeRO-1 a parameter of such an axis that has at least half a bucket gets one of its own, which
    can be a LoneBucket. Another bucket of matrices is closed
        under ZeRO-0 and ZeRO-1   when it has bucket_elements
        under ZeRO-2              at the first end of a block after that: the gradients of a block
                                  come almost at once, and a second bucket would wait for a slot
        under ZeRO-3              at the end of every block: weights are gathered block by block
    """
    closed = []
    filling = {}  # (reduction axis, decayed, optimizer): Contents
    elements = Counter()
    block = ""
    for name, p in reversed(list(named_parameters)):
        previous, block = block, block_of(name)
        if zero > 1 and block != previous:
            for key in list(filling):
                is_full = zero == 3 or elements[key] >= bucket_elements
                if filling[key].decayed and is_full:
                    closed.append(filling.pop(key))
        updated_by = "adamw"
        if optimizer == "muon" and uses_muon(p, name):
            updated_by = "muon"
        key = p.reduction_axis, uses_weight_decay(p), updated_by
        is_large = p.numel() >= bucket_elements / 2
        is_alone = is_large and zero < 2 and p.reduction_axis in lone_axes
        if is_alone and key in filling:
            closed.append(filling.pop(key))
        if key not in filling:
            axis, decayed, updated_by = key
            filling[key] = Contents(axis, decayed, [], [], updated_by)
            elements[key] = 0
        filling[key] = filling.pop(key)  # It is now the last of those that are open.
        filling[key].names.append(name)
        filling[key].params.append(p)
        elements[key] += p.numel()
        closes_only_at_block_end = zero > 1 and filling[key].decayed
        is_full = is_alone or elements[key] >= bucket_elements
        if is_full and not closes_only_at_block_end:
            closed.append(filling.pop(key))
    return closed + list(filling.values())


# -----------------------------------------------------------------------------
# One bucket

class Comm:
    """How a bucket's gradients and weights travel: over NCCL or gloo.

    grad_dtype: the dtype of the gradients while they wait for their sum; None means at least fp32.
    A given dtype allows only one micro-batch per step: see CopyBucket.
    """

    def __init__(self, grad_dtype=None):
        self.grad_dtype = grad_dtype

    def allocate(self, shard, own_slice, weights, dtype):
        """Return a bucket's buffers flat (n,), grad (n,), grad_total (n/n_slices,).

        weights (n,), in at least fp32, will hold the initial weights. dtype: of flat. In an fp32
        model flat is weights itself. shard: the Axis of the ranks that share the buffers.
        own_slice: the slice of grad whose sum becomes grad_total.
        """
        flat = weights if weights.dtype == dtype else torch.zeros_like(weights, dtype=dtype)
        grad = torch.zeros_like(weights, dtype=self.grad_dtype)
        return flat, grad, grad[own_slice]

    def start_reduce(self, bucket):
        """Start to sum bucket.grad over bucket.axis into grad_total, and return a handle."""
        if bucket.n_slices == 1:  # without ZeRO: the replicas are all ranks of bucket.axis
            # SUM of n numbers, over bucket.axis
            return bucket.replicas.start_all_reduce(bucket.grad_total)
        if bucket.replicas.size == 1:  # with ZeRO: the shard is all ranks of bucket.axis
            return self.start_shard_sum(bucket)
        return self.start_both_sums(bucket)  # with --shard

    def start_replica_sum(self, bucket):
        """Start to sum grad_total, this rank's slice, over the ranks that keep the same slice."""
        # SUM of n/n_slices numbers, over bucket.replicas
        return bucket.replicas.start_all_reduce(bucket.grad_total)

    def start_shard_sum(self, bucket):
        """Start to sum bucket.grad over bucket.shard; grad_total becomes this rank's slice.

        This works in place: grad_total is a window of grad.
        """
        # SUM of n numbers, n/size of them to each rank, over bucket.shard
        return bucket.shard.start_reduce_scatter(bucket.grad_total, bucket.grad)

    def start_both_sums(self, bucket):
        """Sum over the shard, then start to sum this rank's slice over the replicas.

        The second sum needs the first. On a GPU a stream of its own waits between them, so that
        neither the host nor backward does.
        """
        with on_side_stream(bucket.grad.device):
            self.start_shard_sum(bucket).wait()
            return self.start_replica_sum(bucket)

    def start_gather(self, bucket):
        """Start to send this rank's new slice of flat to the others, and return a handle.

        This works in place: bucket.own is a window of flat. In a zero.ShardedBucket own is a copy,
        because flat has no memory between two gathers.
        """
        # n/size weights from each rank to all, over bucket.shard
        return bucket.shard.start_all_gather(bucket.flat, bucket.own)


class FlatBuffers:
    """The flat buffers of a bucket: one large collective beats many small ones.

    The drawing at the top of this file shows them. Bucket and zero.SlotBucket track which gradients
    have come, and decide when they are summed. The bucket's Comm communicates. The masters keep the
    fp32 values that were drawn, not the rounded ones, so that updates smaller than a bf16 step add
    up from the start. ZeRO-1: arXiv:1910.02054, section 5.1.
    """

    def __init__(self, contents, axis, zero, dtype, comm):
        self.contents = contents
        self.axis = axis
        self.comm = comm
        self.shard, self.replicas = axis.sharing(zero)
        self.n_slices = self.shard.size
        n = padded_elements(self.filled, self.n_slices)
        self.own_slice = self.slice_of_rank(self.shard.rank, n)
        first = self.params[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        # In an fp32 model one memory has several names: master = own = flat[own_slice] =
        # weights[own_slice]. In a bf16 model flat and own are bf16, and master is a copy.
        weights = torch.zeros(n, dtype=wide, device=first.device)  # The rest is padding.
        self.flat, self.grad, self.grad_total = comm.allocate(
            self.shard, self.own_slice, weights, dtype or first.dtype)
        self.grad_windows = self.windows(self.grad)  # of each parameter
        self.adopt_parameters(weights)
        self.master = weights[self.own_slice]
        if weights is not self.flat:
            self.master = self.master.clone()  # A view would keep the memory of all n weights.
        self.own = self.flat[self.own_slice]
        self.gather_handle = None  # handle of the running all-gather of new weights, or None
        self.reset()

    @property
    def names(self):
        return self.contents.names

    @property
    def params(self):
        return self.contents.params

    @property
    def decayed(self):
        return self.contents.decayed

    @property
    def filled(self):
        """The number of elements that parameters fill. The rest of the buffer is padding."""
        return sum(p.numel() for p in self.params)

    @property
    def count_factor(self):
        """The factor of this rank's slice in sums over the world: 1/k where k ranks hold it."""
        return 1 / self.replicas.size

    def starts(self):
        """Return where each parameter begins in flat."""
        ends = itertools.accumulate(p.numel() for p in self.params)
        return [end - p.numel() for end, p in zip(ends, self.params, strict=True)]

    def windows(self, buffer):
        """Return each parameter's part of a buffer (n,), as a view in the parameter's shape."""
        pairs = zip(self.params, self.starts(), strict=True)
        return [buffer[start:start + p.numel()].view_as(p) for p, start in pairs]

    def slice_of_rank(self, rank, n):
        """Return the slice of a buffer of n elements that belongs to number `rank` of the shard."""
        return slice(rank * n // self.n_slices, (rank + 1) * n // self.n_slices)

    def adopt_parameters(self, weights):
        """Copy the parameters into weights and flat, and make each p.data a window of flat."""
        for p, window in zip(self.params, self.windows(weights), strict=True):
            window.copy_(p.data)
        for p, window in zip(self.params, self.windows(self.flat), strict=True):
            p.data = window
        self.flat.copy_(weights)

    def split_master(self):
        self.master = SplitMaster.of(self.own, self.master)

    def copy_all_gradients(self):
        """Copy all p.grad into their windows of grad, at once. A gradient of None is zero."""
        grads = [p.grad for p in self.params]
        copy_gradients(zip(self.grad_windows, grads, strict=True))
        for p in self.params:
            p.grad = None

    def after_update(self):
        """Start to send this rank's new slice of the weights, if others hold other slices."""
        if self.n_slices > 1:
            self.gather_handle = self.comm.start_gather(self)

    def wait_for_weights(self):
        """Wait until flat holds the new weights of all ranks."""
        if self.gather_handle is not None:
            self.gather_handle.wait()
            self.gather_handle = None


class Bucket(FlatBuffers):
    """A bucket whose gradients are added up over the micro-batches, and summed once in a step."""

    def reset(self):
        """Begin an optimizer step: no gradient has come yet."""
        self.untouched = [True] * len(self.params)
        self.pending_params = len(self.params)
        self.reduce_handle = None

    def on_grad_ready(self, i, completes_grads):
        """Take the gradient that backward made for parameter i.

        completes_grads: whether this is the last micro-batch (with --pp-chunks, of this chunk), so
        that parameter i gets no more gradients in this step. When all parameters of the bucket have
        their last gradient, DataParallel.start_sums() can start the sum over the ranks.
        """
        self.take_gradient(i)
        self.untouched[i] = False
        if completes_grads:
            self.pending_params -= 1

    def sum_starts_in_backward(self):
        """Whether DataParallel.start_sums() starts it. A "tied" sum waits: see wait_grads()."""
        return self.axis.name != "tied"

    def take_gradient(self, i):
        """Put p.grad into its window of grad. The first of the step overwrites it, others add."""
        p = self.params[i]
        accumulate(self.grad_windows[i], p.grad, first=self.untouched[i])
        p.grad = None

    def complete_grad(self):
        """Make grad whole: a parameter that took no part in this step has a gradient of zero."""
        for grad, untouched in zip(self.grad_windows, self.untouched, strict=True):
            if untouched:
                grad.zero_()

    def start_sum(self):
        """Start to sum grad over the ranks of self.axis. Backward may go on meanwhile."""
        self.complete_grad()
        self.reduce_handle = self.comm.start_reduce(self)

    def wait_grads(self):
        """Wait for the sum. It starts only here in two cases.

        A parameter got no gradient, which happens on all ranks alike. Or the axis is "tied", the
        first and the last stage, which hold the same embedding. While the last stage waits in such
        a sum for the first, the first waits for a message of the last. On a GPU a running sum can
        keep that message from starting. So this sum starts after all messages.
        """
        if self.reduce_handle is None:
            self.start_sum()
        self.reduce_handle.wait()
        # The library's handle goes: it must not outlive torch's profiler (runtime/profiles.py).
        self.reduce_handle = CompletedWork()


class CopyBucket(Bucket):
    """A Bucket for one micro-batch per step, so that no gradients are added up on this rank.

    Each gradient stays in p.grad until all have come. Then they are copied into grad.
    """

    def take_gradient(self, i):
        assert self.untouched[i], "a second micro-batch, but grad_dtype promises one"

    def complete_grad(self):
        self.copy_all_gradients()


class LoneBucket(CopyBucket):
    """A CopyBucket of one parameter that no other rank has. Nothing is copied: grad is p.grad.

    So grad is another tensor in each step. Before the first gradient has come it is None.
    """

    def reset(self):
        super().reset()
        self.grad = None  # its memory is free during forward
        self.grad_total = None
        self.grad_windows = []

    def complete_grad(self):
        p, = self.params
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.grad = grad.flatten()  # a view
        self.grad_total = self.grad
        p.grad = None


def is_lone(contents, axis, comm):
    """Whether backward makes the whole sum of a bucket's gradients as one tensor."""
    return comm.grad_dtype is not None and axis.size == 1 and len(contents.params) == 1


# -----------------------------------------------------------------------------
# All buckets of a model

def untimed(phase):
    """Stand in for runtime.timing.Timers where no times are wanted."""
    return contextlib.nullcontext()


def unique(items):
    """Return the items in their order, each once."""
    return list(dict.fromkeys(items))


class DataParallel:
    """Sums every gradient over the ranks that hold the same parameter; sends ZeRO-1's new weights.

    A step calls reset(), then announce_backward() before each micro-batch's backward, then
    finish_grad_sync(). The optimizer calls on_updated(bucket) when it has written a bucket's slice.
    The model calls provide_weights(module) before it reads the weights of that module.
    """

    def __init__(self, model, mesh, zero=0, timers=untimed, *, dtype=None,
                 make_comm=lambda axis: Comm(), bucket_elements=BUCKET_ELEMENTS,
                 optimizer="adamw", split_masters=False, draw=None):
        """Lay out the buckets.

        dtype: of the weights, from now on. make_comm(axis) returns the Comm of a bucket.
        optimizer: the one of --optimizer. split_masters: whether the masters that AdamW updates are
        each an ops.split_master.SplitMaster. The dtype is then bf16. draw(p, name)
        returns the values that a parameter starts from, of its shape; None leaves the model's own.
        """
        self.mesh = mesh
        self.zero = zero
        self.timers = timers
        self.split_masters = split_masters
        self.draw = draw
        self.completes_grads = True  # of the next backward: see announce_backward
        self.buckets = []
        self.to_sum = deque()  # buckets whose sums are to start in this backward, in their order
        trained = trained_parameters(model)
        lone_axes = [name for name, axis in mesh.axes().items() if axis.size == 1]
        for contents in assign_buckets(trained, zero, bucket_elements, optimizer, lone_axes):
            self.draw_weights(zip(contents.names, contents.params, strict=True))
            self.add_bucket(contents, dtype, make_comm)
        self.frozen_buckets = self.freeze(frozen_parameters(model), dtype)
        bucket_of = {}
        for bucket in self.frozen_buckets + self.buckets:
            bucket_of.update(dict.fromkeys(bucket.params, bucket))
        self.buckets_of = {}  # module: the buckets of its parameters
        for module in model.modules():
            own = [bucket_of[p] for p in module.parameters() if p in bucket_of]
            self.buckets_of[module] = unique(own)
        self.draw = None  # All is drawn, and draw may hold the model, which holds this object.
        self.buffers = dict(model.named_buffers())  # not trained, but part of the state
        model.data_parallel = self

    def add_bucket(self, contents, dtype, make_comm):
        """Make a bucket of these parameters. Backward will call its on_grad_ready for each of them.

        contents.reduction_axis is what the one rule (parallel.reduction_axis) says of all of them:
        the name of the axis over which their gradients are summed. On a mesh with dp alone, and
        without experts, it is "stage" (all ranks with the same layers) or "dp". Both have the same
        ranks.
        """
        axis = self.mesh.axes()[contents.reduction_axis]
        bucket = self.make_bucket(contents, axis, dtype, make_comm(axis))
        if self.split_masters and contents.optimizer == "adamw":
            bucket.split_master()
        self.buckets.append(bucket)
        for i, p in enumerate(bucket.params):
            p.register_post_accumulate_grad_hook(self.make_hook(bucket, i))

    def draw_weights(self, named_parameters):
        """Give parameters the values that they start from, unless the model came with its own.

        If they are trained, the bucket that is made next copies them and gives their memory back.
        """
        if self.draw is not None:
            for name, p in named_parameters:
                # A copy, because what is drawn can be a window of a tensor of all tp ranks.
                own = torch.empty(p.shape, dtype=p.dtype, device=p.device)
                p.data = own.copy_(self.draw(p, name))

    def make_hook(self, bucket, i):
        """Return what backward calls when it has written p.grad of the bucket's parameter i.

        A parameter holds its hook. If the hook held the bucket, which holds the parameter, none of
        them would ever be freed. So the hook's references are weak.
        """
        weak_bucket = weakref.proxy(bucket)
        weak_self = weakref.proxy(self)

        def hook(parameter):
            weak_bucket.on_grad_ready(i, weak_self.completes_grads)
            weak_self.start_sums()

        return hook

    def start_sums(self):
        """Start the sum of each bucket that is complete, unless one before it is not.

        Backward can complete the buckets in another order on another rank: a rank computes its
        experts' gradients by other functions if no token has chosen them. But the ranks must start
        their sums in one order, because NCCL adds up what each rank starts first, what each starts
        second, and so on.
        """
        while self.to_sum and self.to_sum[0].pending_params == 0:
            self.to_sum.popleft().start_sum()

    def make_bucket(self, contents, axis, dtype, comm):
        bucket_class = Bucket if comm.grad_dtype is None else CopyBucket
        if is_lone(contents, axis, comm):
            bucket_class = LoneBucket
        return bucket_class(contents, axis, self.zero, dtype, comm)

    def freeze(self, named_parameters, dtype):
        """Give parameters that are not trained their dtype. Return the buckets that they are in.

        Here they are in none: they have no gradient and no moments, and every rank has them whole.
        """
        for name, p in named_parameters:
            self.draw_weights([(name, p)])
            p.data = p.data.to(dtype or p.dtype)
        return []

    def reset(self):
        """Begin an optimizer step."""
        self.to_sum = deque()
        for bucket in self.buckets:
            bucket.reset()
            if bucket.sum_starts_in_backward():
                self.to_sum.append(bucket)

    def announce_backward(self, completes_grads):
        """Say whether the next backward is that of the last micro-batch, so that it completes grad.

        With --pp-chunks each chunk of this rank has a last backward of its own.
        """
        self.completes_grads = completes_grads

    def finish_grad_sync(self):
        """Wait until every bucket's grad_total holds the sum over its axis."""
        with self.timers("grad_sync"):  # the time that backward did not hide
            for bucket in self.buckets:
                bucket.wait_grads()

    def on_updated(self, bucket):
        """Under ZeRO-1 and 2, send the others the slice that the optimizer has just written.

        fast/graph.py replaces this function, because a CUDA graph starts with the gathers.
        """
        bucket.after_update()

    def provide_weights(self, module, x=None):
        """Wait for the module's new weights from all ranks. x: its input, for ZeRO-3."""
        waiting = [bucket for bucket in self.buckets_of[module] if bucket.gather_handle is not None]
        if waiting:
            with self.timers("param_gather"):  # the time that forward did not hide
                for bucket in waiting:
                    bucket.wait_for_weights()

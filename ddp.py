"""Data parallelism by hand: gradients in flat buckets, summed while backward still runs; ZeRO-1.

The buffers of a bucket of n elements under ZeRO-1, on rank 1 of the four ranks that hold the same
parameters. Each rank updates its slice, a quarter of the bucket:

             0          n/4        n/2        3n/4        n
    flat     | weights in the model's dtype               |  every p.data is a window of it
    grad     | gradients of this rank, in at least fp32   |  each p.grad goes into its window
             |          |##########|          |           |  ## is bucket.own_slice, of rank 1
    grad_total          | summed   |   = grad[own_slice], summed over the ranks: AdamW reads it
    master              | fp32     |   AdamW updates it (bf16: see below); its moments are as long
    own                 | rounded  |   = flat[own_slice]: the new master, sent to the others

What a rank keeps of a bucket under each --zero, and in brackets what it keeps once for the whole
model. A slot is memory for one bucket. A part is the embedding, a block, or the head (zero.py):

              flat (weights)                grad                           master, moments
    zero 0    n                             n, summed by all-reduce        n: the slice is all n
    zero 1    n                             n, summed by reduce-scatter    n/4
    zero 2    n                             grad_total n/4 (+ 2 slots)     n/4
    zero 3    own n/4 (+ flat of 2 parts)   grad_total n/4 (+ 2 slots)     n/4

In an fp32 model, master and own are the same memory. In a bf16 model, master is the 16 bits that
own lacks of AdamW's fp32 (ops/split_master.py).

The ranks of bucket.axis hold the same parameters. They form two axes (parallel.Sharing): gradients
are reduce-scattered over bucket.shard, whose ranks keep different slices. Then the slice is
all-reduced over bucket.replicas, whose ranks keep the same slice. Only with --shard do both have
several ranks.

A step calls reset, in backward make_hook's hooks (take, start_sum), finish_grad_sync (wait_sum) and
after_update. The rest lays out the buckets. fast/buckets.py replaces methods, for less waiting.
"""
import contextlib
import itertools
import weakref
from collections import Counter, deque

import torch

from config import ceil_div
from ops.accelerator import on_side_stream
from ops.split_master import SplitMaster
from parallel import CompletedWork

BUCKET_ELEMENTS = 16_000_000  # A bucket is closed when it has this many elements.
ALIGNMENT = 128  # each slice begins at a multiple of this, so that loads are aligned
COPY_ALONE = 2**22  # from this many elements on, a copy by itself is twice as fast as one for all


# Which parameters share a bucket: those of one axis, decayed or not, about 16 million

def trained_parameters(model):
    """Return [(name, parameter)] of what is trained: all, or with --lora the adapters."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def frozen_parameters(model):
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def uses_weight_decay(p):
    return p.ndim >= 2  # matrices only, never norms, biases or vectors


def updated_by(name, p, optimizer):
    """Return "muon" for the matrices inside blocks, experts and router too, if that is chosen."""
    if optimizer == "muon" and name.startswith("blocks.") and p.ndim >= 2:
        return "muon"
    return "adamw"


def assign_buckets(named_parameters, zero=0, bucket_elements=BUCKET_ELEMENTS, optimizer="adamw",
                   lone_axes=()):
    """Return [(name, parameter)] of each bucket, roughly in the order in which backward fills them.

    Backward reaches the last layers first. A bucket is one tensor of the optimizer, so vectors
    (norms, biases), which are not decayed, have buckets of their own, and so have Muon's matrices.

    lone_axes: the names of the axes of one rank. Under ZeRO-0 and ZeRO-1 a parameter of such an
    axis that has at least half a bucket gets one of its own, which needs no copy (fast/buckets.py).
    Another bucket of matrices is closed
        under ZeRO-0 and ZeRO-1   when it has bucket_elements
        under ZeRO-2              at the first end of a block after that: the gradients of a block
                                  come almost at once, and a second bucket would wait for a slot
        under ZeRO-3              at the end of every block: weights are gathered block by block
    """
    closed = []
    filling = {}  # (reduction axis, decayed, optimizer): [(name, parameter)]
    elements = Counter()
    block = []
    for name, p in reversed(list(named_parameters)):
        previous, block = block, name.split(".")[:2]  # "blocks.3"
        if zero > 1 and block != previous:
            for key in list(filling):
                _, decayed, _ = key
                if decayed and (zero == 3 or elements[key] >= bucket_elements):
                    closed.append(filling.pop(key))

        key = p.reduction_axis, uses_weight_decay(p), updated_by(name, p, optimizer)
        is_large = p.numel() >= bucket_elements / 2
        is_alone = is_large and zero < 2 and p.reduction_axis in lone_axes
        if is_alone and key in filling:
            closed.append(filling.pop(key))
        if key not in filling:
            elements[key] = 0
        filling[key] = [*filling.pop(key, ()), (name, p)]  # It is now the last of the open ones.
        elements[key] += p.numel()
        waits_for_block_end = zero > 1 and uses_weight_decay(p)
        if is_alone or elements[key] >= bucket_elements and not waits_for_block_end:
            closed.append(filling.pop(key))
    return closed + list(filling.values())


# One bucket

def padded_elements(n, n_slices):
    """Return the length of a buffer for n elements that has `n_slices` aligned slices."""
    if n_slices == 1:
        return n
    multiple = ALIGNMENT * n_slices
    return ceil_div(n, multiple) * multiple


class Bucket:
    """Parameters whose gradients are summed together: one large collective beats many small ones.

    In a step, hooks call take(i) for every gradient, and start_sum() when all have come. The step
    calls wait_sum(), and the optimizer after_update() when it has written master and own. The
    masters start from the fp32 values that were drawn, not from the rounded ones. ZeRO-1:
    arXiv:1910.02054, section 5.1.
    """

    def __init__(self, named_parameters, axis, zero=0, dtype=None, optimizer="adamw"):
        self.names = [name for name, _ in named_parameters]
        self.params = [p for _, p in named_parameters]
        self.axis = axis
        self.optimizer = optimizer
        first = self.params[0]
        self.decayed = uses_weight_decay(first)
        self.in_turn = axis.name != "tied"  # whether make_hook starts its sum: see wait_sum
        self.shard, self.replicas = axis.sharing(zero)  # without ZeRO: this rank, all ranks
        self.n_slices = self.shard.size
        ends = list(itertools.accumulate(p.numel() for p in self.params))
        self.starts = [0, *ends[:-1]]  # of each parameter in a buffer
        self.filled = ends[-1]  # The rest of a buffer is padding.
        n = padded_elements(self.filled, self.n_slices)
        self.own_slice = self.slice_of_rank(self.shard.rank, n)

        dtype = dtype or first.dtype
        weights = torch.zeros(n, dtype=torch.promote_types(first.dtype, torch.float32),
                              device=first.device)
        for p, window in zip(self.params, self.windows(weights), strict=True):
            window.copy_(p.data)
        self.flat = weights if weights.dtype == dtype else torch.zeros_like(weights, dtype=dtype)
        self.allocate(weights)  # fast/buckets.py may also move flat
        self.flat.copy_(weights)  # rounds; in fp32 nothing: both are the same memory
        for p, window in zip(self.params, self.windows(self.flat), strict=True):
            p.data = window
        self.own = self.flat[self.own_slice]
        self.master = weights[self.own_slice]
        if weights is not self.flat:
            self.master = self.master.clone()  # A view would keep the memory of all n weights.
        self.gather_handle = None  # of the running all-gather of new weights
        self.reset()

    def allocate(self, weights):
        """Make the gradients' buffers. weights: (n,), in at least fp32."""
        self.grad = torch.zeros_like(weights)
        self.grad_total = self.grad[self.own_slice]
        self.grad_windows = self.windows(self.grad)  # of each parameter

    @property
    def count_factor(self):
        """The factor of this rank's slice in sums over the world: 1/k where k ranks hold it."""
        return 1 / self.replicas.size

    def windows(self, buffer):
        """Return each parameter's part of a buffer (n,), as a view in the parameter's shape."""
        pairs = zip(self.params, self.starts, strict=True)
        return [buffer[start:start + p.numel()].view_as(p) for p, start in pairs]

    def slice_of_rank(self, rank, n):
        """Return the slice of a buffer of n elements that belongs to number `rank` of the shard."""
        return slice(rank * n // self.n_slices, (rank + 1) * n // self.n_slices)

    def reset(self):
        """Begin an optimizer step: no gradient has come yet."""
        self.untouched = [True] * len(self.params)
        self.pending = len(self.params)  # parameters that have not had their last gradient
        self.sum_handle = None

    def take(self, i):
        """Put the gradient that backward made for parameter i into its window of grad.

        The first of the step overwrites what is there, and others add. So nothing is set to zero.
        """
        p = self.params[i]
        if self.untouched[i]:
            self.grad_windows[i].copy_(p.grad)
        else:
            self.grad_windows[i].add_(p.grad)
        p.grad = None
        self.untouched[i] = False

    def start_sum(self):
        """Start to sum grad over the ranks of the axis. Backward may go on meanwhile."""
        for window, untouched in zip(self.grad_windows, self.untouched, strict=True):
            if untouched:  # A parameter that took no part in this step has a gradient of zero.
                window.zero_()
        if self.n_slices == 1:  # one slice, as without ZeRO: all that have it are replicas
            # SUM of n numbers, over the axis
            self.sum_handle = self.replicas.start_all_reduce(self.grad_total)
        elif self.replicas.size == 1:  # with ZeRO: the shard is all ranks of the axis
            # SUM of n numbers, n/size to each, over the shard; the rest of grad is then garbage
            self.sum_handle = self.shard.start_reduce_scatter(self.grad_total, self.grad)
        else:  # With --shard, a side stream waits between the sums: host and backward go on.
            with on_side_stream(self.grad.device):
                # SUM of n numbers, n/size of them to each rank, over the shard
                self.shard.start_reduce_scatter(self.grad_total, self.grad).wait()
                # SUM of n/size numbers, over the replicas
                self.sum_handle = self.replicas.start_all_reduce(self.grad_total)

    def wait_sum(self):
        """Wait for the sum. It starts here if a parameter got no gradient, on all ranks alike.

        That of "tied" always does, after all messages. Sooner, the last stage would wait in it for
        the first, and the first for a message of the last, which on a GPU a running sum can keep
        from starting.
        """
        if self.sum_handle is None:
            self.start_sum()
        self.sum_handle.wait()
        # The library's handle goes: it must not outlive torch's profiler (runtime/profiles.py).
        self.sum_handle = CompletedWork()

    def after_update(self):
        """Under ZeRO-1 and 2, send the others the slice that the optimizer has just written."""
        if self.n_slices > 1:
            self.start_gather()

    def start_gather(self):
        """Start to fill flat with the slices `own` of all ranks."""
        # n/size weights from each rank to all, over the shard
        self.gather_handle = self.shard.start_all_gather(self.flat, self.own)

    def wait_weights(self):
        """Wait until flat holds the new weights of all ranks."""
        if self.gather_handle is not None:
            self.gather_handle.wait()
            self.gather_handle = None

    def copy_gradients(self):
        """Copy all p.grad into their windows of grad, at once. A gradient of None is zero."""
        small_windows = []
        small_grads = []
        for p, window in zip(self.params, self.grad_windows, strict=True):
            if p.grad is None:
                window.zero_()
            elif p.grad.numel() >= COPY_ALONE:
                window.copy_(p.grad)
            else:
                small_windows.append(window)
                small_grads.append(p.grad)
            p.grad = None
        if small_grads:
            torch._foreach_copy_(small_windows, small_grads)


def has_split_master(bucket):
    return bucket.optimizer == "adamw" and bucket.own.dtype == torch.bfloat16


# All buckets of a model

def draw_weights(model, named_parameters):
    """Give parameters that have no memory yet memory, and the values that they start from."""
    for name, p in named_parameters:
        if p.untyped_storage().nbytes() == 0:
            # A copy, because what is drawn can be a window of a tensor of all tp ranks.
            own = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            p.data = own.copy_(model.draw(p, name))


class DataParallel:
    """Sums every gradient over the ranks that hold the same parameter; sends ZeRO-1's new weights.

    A step calls reset(), sets completes_grads before each backward, and calls finish_grad_sync().
    The optimizer calls after_update() of each bucket. The model calls provide_weights(module)
    before it reads the weights of that module.
    """

    def __init__(self, model, mesh, zero=0, timers=contextlib.nullcontext, *, dtype=None,
                 bucket_elements=BUCKET_ELEMENTS, optimizer="adamw", faster=None):
        """Lay out the buckets.

        dtype: of the weights, from now on. faster(class, axis, parameters): the class that a
        bucket has in its place, or None.
        """
        self.mesh = mesh
        self.zero = zero
        self.timers = timers
        self.faster = faster
        # Whether the next backward is the last of the step. With --pp-chunks each chunk has one.
        self.completes_grads = True
        self.buckets = []
        self.to_sum = deque()  # buckets whose sums are to start in this backward, in their order
        trained = trained_parameters(model)
        lone_axes = [name for name, axis in mesh.axes().items() if axis.size == 1]
        for group in assign_buckets(trained, zero, bucket_elements, optimizer, lone_axes):
            draw_weights(model, group)
            bucket = self.add_bucket(group, dtype, updated_by(*group[0], optimizer))
            if has_split_master(bucket):
                bucket.master = SplitMaster.of(bucket.own, bucket.master)
        self.frozen_buckets = self.freeze(model, frozen_parameters(model), dtype)
        buckets = self.frozen_buckets + self.buckets
        bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        self.buckets_of = {}  # module: the buckets of its parameters
        for module in model.modules():
            own = [bucket_of[p] for p in module.parameters() if p in bucket_of]
            self.buckets_of[module] = list(dict.fromkeys(own))  # each once, in order
        self.buffers = dict(model.named_buffers())  # not trained, but part of the state
        model.data_parallel = self

    def add_bucket(self, named_parameters, dtype, optimizer):
        """Make a bucket of these parameters, and let backward fill it."""
        params = [p for _, p in named_parameters]
        axis = self.mesh.axes()[params[0].reduction_axis]  # the one rule of parallel.py
        bucket_class = self.bucket_class(axis, params)
        if self.faster is not None:
            bucket_class = self.faster(bucket_class, axis, params)
        bucket = bucket_class(named_parameters, axis, self.zero, dtype, optimizer)
        self.buckets.append(bucket)
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(self.make_hook(bucket, i))
        return bucket

    def bucket_class(self, axis, params):
        return Bucket

    def make_hook(self, bucket, i):
        """Return what backward calls when it has written p.grad of the bucket's parameter i.

        A bucket that is complete waits for those before it. On another rank backward may complete
        them in another order: a rank computes its experts' gradients by other functions if no token
        has chosen them. But NCCL adds up what each rank starts first, what second, and so on.
        """
        # A parameter holds its hook. If the hook held the bucket, which holds the parameter, none
        # of them would ever be freed.
        bucket = weakref.proxy(bucket)
        data_parallel = weakref.proxy(self)

        def hook(parameter):
            if data_parallel.completes_grads:
                bucket.pending -= 1
            bucket.take(i)
            to_sum = data_parallel.to_sum
            while to_sum and to_sum[0].pending == 0:
                to_sum.popleft().start_sum()

        return hook

    def freeze(self, model, named_parameters, dtype):
        """Give parameters that are not trained their dtype. Return their buckets: here none."""
        for name, p in named_parameters:
            draw_weights(model, [(name, p)])
            p.data = p.data.to(dtype or p.dtype)
        return []

    def reset(self):
        """Begin an optimizer step."""
        for bucket in self.buckets:
            bucket.reset()
        self.to_sum = deque(bucket for bucket in self.buckets if bucket.in_turn)

    def finish_grad_sync(self):
        """Wait until every bucket's grad_total holds the sum over its axis."""
        with self.timers("grad_sync"):  # the time that backward did not hide
            for bucket in self.buckets:
                bucket.wait_sum()

    def provide_weights(self, module, x=None):
        """Wait for the module's new weights from all ranks. x: its input, for ZeRO-3."""
        waiting = [bucket for bucket in self.buckets_of[module] if bucket.gather_handle is not None]
        if waiting:
            with self.timers("param_gather"):  # the time that forward did not hide
                for bucket in waiting:
                    bucket.wait_weights()

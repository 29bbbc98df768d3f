"""ZeRO-2 and ZeRO-3 (arXiv:1910.02054, section 5): a rank keeps less of ddp.py's buckets.

The table in ddp.py says what a rank keeps under each --zero. In this file:

    Slot, SlotComm, SlotBucket   ZeRO-2: whole gradients exist only in two buffers, which take turns
    ShardedBucket                ZeRO-3: whole weights exist only while they are needed
    ZeRO2, ZeRO3                 the DataParallel of each; LEVELS maps --zero to its class

On an axis of one rank there is nothing to share, so the bucket is a plain one.
"""
import itertools

import torch

from ddp import (
    BUCKET_ELEMENTS,
    Comm,
    DataParallel,
    FlatBuffers,
    assign_buckets,
    unique,
    untimed,
)
from ops.flat import padded_elements

# -----------------------------------------------------------------------------
# ZeRO-2: a rank keeps only the slice of the summed gradients that it updates

class Slot:
    """One of two flat buffers for whole gradients, which the buckets use in turn.

    While the sum of one bucket is under way in the first slot, backward fills the second with the
    next bucket's gradients.
    """

    def __init__(self, n, dtype, device):
        self.buffer = torch.zeros(n, dtype=dtype, device=device)
        self.user = None  # the bucket whose gradients are in the buffer

    def give_to(self, bucket):
        """Hand the slot to a bucket, after the previous user has taken its sum out."""
        if self.user is not None:
            self.user.take_sum()
        self.user = bucket


class SlotComm(Comm):
    """The Comm of a bucket whose whole gradient is in a Slot; fast/peer.py has a faster one."""

    def __init__(self, slot=None):
        super().__init__()
        self.slot = slot

    def new_slot(self, n, dtype, device, axis):
        """Return a Slot for n gradients of a model in dtype. axis: all ranks of the stage."""
        return Slot(n, torch.promote_types(dtype, torch.float32), device)

    def allocate(self, axis, own_slice, weights, dtype):
        flat = weights if weights.dtype == dtype else torch.zeros_like(weights, dtype=dtype)
        grad = self.slot.buffer[:weights.numel()]
        return flat, grad, torch.zeros_like(weights[own_slice])

    def start_reduce(self, bucket):
        # SUM, n/size of n numbers to each rank, over the bucket's axis
        return bucket.axis.start_reduce_scatter(bucket.grad[bucket.own_slice], bucket.grad)

    def add_sum(self, bucket):
        """Add this rank's slice of a complete sum to the sum of earlier micro-batches."""
        part = bucket.grad[bucket.own_slice]
        if bucket.sum_is_empty:
            bucket.grad_sum.copy_(part)
        else:
            bucket.grad_sum.add_(part)

    def keep(self, own):
        """Return a lasting copy of own (n/size,), a window of weights that will be freed."""
        return own.clone()


class SlotBucket(FlatBuffers):
    """A bucket whose gradients are summed over the ranks after every micro-batch.

    Each gradient waits in p.grad, in the model's dtype, until the last one of the bucket has come.
    Then all are copied into the slot, and the sum starts. This rank's slice of the sum is added to
    grad_sum. grad is a window of the slot: it holds this bucket's gradients only while their sum is
    under way.
    """

    def reset(self):
        self.missing = set(range(len(self.params)))  # no gradient of this micro-batch yet
        self.sum_is_empty = True  # No sum has been added to grad_sum in this step.
        self.reduce_handle = None

    def on_grad_ready(self, i, is_last_microbatch):
        self.missing.discard(i)
        if not self.missing:
            self.start_reduce()

    def start_reduce(self):
        self.comm.slot.give_to(self)
        self.copy_all_gradients()
        self.grad[self.used:].zero_()  # The padding may hold gradients of another bucket.
        self.missing = set(range(len(self.params)))
        self.reduce_handle = self.comm.start_reduce(self)

    def take_sum(self):
        """If a sum is under way, wait for it and add this rank's slice to grad_sum."""
        if self.reduce_handle is not None:
            self.reduce_handle.wait()
            self.comm.add_sum(self)
            self.sum_is_empty = False
            self.reduce_handle = None

    def wait_grads(self):
        # If some parameter got no gradient, on all ranks alike, the sum has not started yet.
        some_wait = len(self.missing) < len(self.params)
        none_summed = self.sum_is_empty and self.reduce_handle is None
        if some_wait or none_summed:
            self.start_reduce()
        self.take_sum()


def uses_slot(axis):
    """Whether a bucket over this axis is summed in every micro-batch.

    Weights that are tied across two stages are summed once a step, as in ZeRO-1. A sum in every
    micro-batch would make each stage wait for the other's backward.
    """
    return axis.size > 1 and axis.name != "tied"


def plain_comm(axis):
    """Return the Comm of a bucket that is reduced over axis by collectives."""
    return SlotComm() if uses_slot(axis) else Comm()


class ZeRO2(DataParallel):
    """A DataParallel that keeps only this rank's slices of the summed gradients."""
    decayed_bucket = SlotBucket

    def __init__(self, model, mesh, zero, timers=untimed, *, dtype=None, comm=plain_comm,
                 bucket_elements=BUCKET_ELEMENTS):
        largest = 0  # elements of the largest bucket that uses a slot
        for contents in assign_buckets(model.named_parameters(), zero, bucket_elements):
            if uses_slot(getattr(mesh, contents.axis_name)):
                largest = max(largest, sum(p.numel() for p in contents.params))
        self.slots = []
        if largest:
            # The slots are long enough for every axis, since every axis's size divides the stage's.
            n = padded_elements(largest, mesh.stage.size)
            weight = next(model.parameters())
            kind = dtype or weight.dtype, weight.device
            for _ in range(2):
                self.slots.append(comm(mesh.stage).new_slot(n, *kind, mesh.stage))
        super().__init__(model, mesh, zero, timers, dtype=dtype, comm=comm,
                         bucket_elements=bucket_elements)

    def make_bucket(self, contents, axis, dtype, comm):
        if not uses_slot(axis):
            return super().make_bucket(contents, axis, dtype, comm)
        # Buckets are made in the order in which backward fills them, so neighbours alternate slots.
        comm.slot = self.slots[len(self.buckets) % 2]
        kind = self.decayed_bucket if contents.decayed else SlotBucket
        return kind(contents, axis, self.zero, dtype, comm)


# -----------------------------------------------------------------------------
# ZeRO-3: weights are gathered where they are needed, and freed

class ShardedBucket(SlotBucket):
    """A SlotBucket whose flat, and with it every p.data, has memory only while it is gathered.

    At rest, the rank has own, its slice in the model's dtype. In an fp32 or fp64 model, own and
    master are the same tensor.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.own = self.comm.keep(self.own)
        if self.own.dtype == self.master.dtype:
            self.master = self.own
        self.storage = self.flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.free()

    def is_whole(self):
        """Whether flat has memory: the weights of all ranks are there, or under way."""
        return self.storage.nbytes() > 0

    def fetch(self):
        """Start to gather the weights of all ranks, unless they are there."""
        if not self.is_whole():
            self.storage.resize_(self.nbytes)
            self.gather_handle = self.comm.start_gather(self)

    def free(self):
        """Give back the memory of flat.

        Autograd's saved views of the weights share this storage. fetch() fills it again before
        backward reads them.
        """
        # A gather that is under way must not write into memory that already has another owner.
        self.wait_for_weights()
        self.storage.resize_(0)

    def publish(self):
        """Free the gathered weights, which are outdated. The next forward fetches the new ones."""
        self.free()


class ZeRO3(ZeRO2):
    """A ZeRO2 that keeps the weights of two parts of the model: the current one and the next.

    The parts are the embedding, each block, and the head. Forward and backward walk along them:

        forward   computes   embedding  block 0   block 1   head
                  fetches    block 0    block 1   head      (block 1 stays)
                  frees                 embedding block 0

        backward  computes   head       block 1   block 0   (embedding: reads no weights)
                  fetches               block 0
                  frees                 head      block 1   block 0

    The last block stays from forward to backward. The output of a part is the input x of the next
    part. So a hook on x, which runs when x's gradient is complete, tells when backward reaches the
    previous part. Norms and biases are small, so they are kept as in ZeRO-2.
    """
    decayed_bucket = ShardedBucket

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        embedding = [model.wte, model.wpe]
        head = [model.norm, model.wte if model.head is None else model.head, model.mlm]
        parts = [embedding, *([block] for block in model.blocks.values()), head]
        self.parts = []  # the modules of each part
        self.sharded = []  # the ShardedBuckets of each part
        for modules in parts:
            modules = [module for module in modules if module is not None]
            self.parts.append(modules)
            self.sharded.append(self.sharded_buckets(modules))
        self.here = 0  # the part that computes

    def sharded_buckets(self, modules):
        """Return the ShardedBuckets that hold the modules' weights."""
        buckets = itertools.chain.from_iterable(self.buckets_of[module] for module in modules)
        return [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]

    def part_of(self, module):
        """Return the next part, counted from self.here, that holds the module, or None."""
        n = len(self.parts)
        for ahead in range(n):  # A tied embedding is in the first part and in the last.
            part = (self.here + ahead) % n
            if module in self.parts[part]:
                return part
        return None

    def provide_weights(self, module, x=None):
        """Gather the weights of a module that forward has reached with the input x.

        Nothing is gathered for a module that is not a part, such as the whole model.
        """
        part = self.part_of(module)
        if part is None:
            super().provide_weights(module)
            return
        self.move_to_part(part)
        if x is not None and x.requires_grad:
            x.register_hook(lambda grad: self.move_to_part(part - 1, backward=True))

    def move_to_part(self, part, backward=False):
        """Fetch the part that computes now and the one after it, and free all others."""
        is_head = part == len(self.parts) - 1
        following = part - 1 if backward or is_head else part + 1
        wanted = []
        for needed in (part, following):
            if backward and needed <= 0:
                continue  # The embedding's backward reads no weights.
            wanted += self.sharded[needed]
        for bucket in unique(itertools.chain.from_iterable(self.sharded)):
            if bucket not in wanted:
                bucket.free()
        for bucket in unique(wanted):
            bucket.fetch()
        for module in self.parts[part]:
            super().provide_weights(module)
        self.here = part


# The DataParallel of each --zero.
LEVELS = {0: DataParallel, 1: DataParallel, 2: ZeRO2, 3: ZeRO3}

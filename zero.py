"""ZeRO-2 and ZeRO-3 (arXiv:1910.02054, section 5): parallel.py's buckets, of which a rank keeps ever less.

n: elements of a bucket, size: ranks of its axis. At rest, and for a moment, a rank holds

              weights                       gradients                     masters, moments
    zero 0    n                             n                             n
    zero 1    n                             n                             n / size
    zero 2    n                             n / size, two buckets whole   n / size
    zero 3    n / size, two parts whole     n / size, two buckets whole   n / size

A bucket over an axis of one rank is an ordinary one. LEVELS[zero] is the DataParallel of each --zero.
"""
import itertools

import torch

from ops.flat import BUCKET_ELEMENTS, assign_buckets, copy_gradients, padded_elements
from parallel import Bucket, Comm, DataParallel, untimed

# -----------------------------------------------------------------------------
# ZeRO-2: a rank keeps the sums of only those gradients that it steps

class Slot:
    """One of two flat buffers in which whole gradients are summed: while the sum of one bucket is on its way
    in the first, backward fills the next bucket's in the second. user: the bucket that was here last."""

    def __init__(self, n, dtype, device):
        self.buffer, self.user = torch.zeros(n, dtype=dtype, device=device), None

    def give_to(self, bucket):
        """The slot is bucket's now, after the sum that was under way in it was taken out."""
        if self.user is not None:
            self.user.take_sum()
        self.user = bucket


class SlotComm(Comm):
    """The Comm of one bucket whose whole gradient is in a Slot (fast/peer.py has another)."""

    def __init__(self, slot=None):
        super().__init__()
        self.slot = slot

    def new_slot(self, n, dtype, device, axis):
        """-> a Slot for n gradients of a model of this dtype; axis: all ranks of the stage."""
        return Slot(n, torch.promote_types(dtype, torch.float32), device)

    def allocate(self, bucket, weights):
        flat = weights if weights.dtype == bucket.dtype else torch.zeros_like(weights, dtype=bucket.dtype)
        return flat, self.slot.buffer[:weights.numel()], torch.zeros_like(weights[bucket.shard])

    def start_reduce(self, bucket):
        # SUM, n/size of n numbers to each rank, over the bucket's axis
        return bucket.axis.start_reduce_scatter(bucket.grad[bucket.shard], bucket.grad)

    def add_sum(self, bucket):
        """The sum has come: add this rank's slice of it to those of earlier micro-batches."""
        part = bucket.grad[bucket.shard]
        bucket.total.copy_(part) if bucket.is_first else bucket.total.add_(part)

    def keep(self, own):
        """own (n/size,), this rank's slice of weights that are about to be freed -> the same in memory of its
        own."""
        return own.clone()


class SlotBucket(Bucket):
    """A Bucket that sums its gradients over the ranks after every micro-batch, and adds this rank's slice of
    the sum to total. A gradient waits in p.grad, in the model's dtype, until the bucket's last one has come:
    then all are copied into the slot together. grad and grads are windows of the slot, so they hold this
    bucket's gradients only while their sum is under way."""

    def reset(self):
        self.missing = set(range(len(self.params)))  # whose gradient of this micro-batch has not come
        self.is_first, self.reduce_handle = True, None

    def on_grad_ready(self, i, is_last_microbatch):
        self.missing.discard(i)
        if not self.missing:
            self.start_reduce()

    def start_reduce(self):
        self.comm.slot.give_to(self)
        copy_gradients([(grad, p.grad) for grad, p in zip(self.grads, self.params, strict=True)])
        self.grad[self.used:].zero_()  # the padding: another bucket's gradients were here
        for p in self.params:
            p.grad = None
        self.missing = set(range(len(self.params)))
        self.reduce_handle = self.comm.start_reduce(self)

    def take_sum(self):
        """If a sum is under way: wait for it, and add this rank's slice to those of earlier micro-batches."""
        if self.reduce_handle is not None:
            self.reduce_handle.wait()
            self.comm.add_sum(self)
            self.is_first, self.reduce_handle = False, None

    def wait_grads(self):
        # if a parameter got no gradient (on all ranks alike), the others' sum has not been started
        if len(self.missing) < len(self.params) or self.is_first and self.reduce_handle is None:
            self.start_reduce()
        self.take_sum()


def uses_slot(axis):
    """Whether a bucket over this axis is summed in every micro-batch. Tied weights of two stages are summed
    once a step, as in ZeRO-1: within a micro-batch each stage would wait for the other's backward."""
    return axis.size > 1 and axis.name != "tied"


def plain_comm(axis):
    """-> the Comm of a bucket that is reduced over axis, with collectives only."""
    return SlotComm() if uses_slot(axis) else Comm()


class ZeRO2(DataParallel):
    """DataParallel with sums of gradients that are as long as this rank's slices."""
    decayed_bucket = SlotBucket

    def __init__(self, model, mesh, zero, timers=untimed, dtype=None, comm=plain_comm,
                 bucket_elements=BUCKET_ELEMENTS):
        sizes = [sum(p.numel() for p in params) for axis, _, _, params in
                 assign_buckets(model.named_parameters(), zero, bucket_elements)
                 if uses_slot(getattr(mesh, axis))]
        self.slots = []
        if sizes:  # long enough for every axis: the number of its ranks divides the stage's
            n, weight = padded_elements(max(sizes), mesh.stage.size), next(model.parameters())
            self.slots = [comm(mesh.stage).new_slot(n, dtype or weight.dtype, weight.device, mesh.stage)
                          for _ in range(2)]
        super().__init__(model, mesh, zero, timers, dtype, comm, bucket_elements)

    def make_bucket(self, names, params, axis, decayed, zero, dtype, comm):
        if not uses_slot(axis):
            return Bucket(names, params, axis, decayed, zero, dtype, comm)
        comm.slot = self.slots[len(self.buckets) % 2]  # in the order in which backward fills them
        kind = self.decayed_bucket if decayed else SlotBucket
        return kind(names, params, axis, decayed, zero, dtype, comm)


# -----------------------------------------------------------------------------
# ZeRO-3: the weights are gathered where they are needed, and freed

class ShardedBucket(SlotBucket):
    """A SlotBucket whose flat, and with it every p.data, has memory only while it is gathered. At rest the
    rank has own, its slice in the model's dtype; in an fp32 or fp64 model master is the same tensor."""

    def __init__(self, *args):
        super().__init__(*args)
        self.storage = self.flat.untyped_storage()
        self.own, self.nbytes = self.comm.keep(self.own), self.storage.nbytes()
        self.master = self.own if self.own.dtype == self.master.dtype else self.master
        self.free()

    def is_whole(self):
        """Whether flat has memory: the weights of all ranks are there, or on their way."""
        return self.storage.nbytes() > 0

    def fetch(self):
        """Start to gather the weights of all ranks, unless they are there."""
        if not self.is_whole():
            self.storage.resize_(self.nbytes)
            self.gather_handle = self.comm.start_gather(self)

    def free(self):
        self.wait_for_weights()  # what is on its way must not be written into memory of somebody else
        self.storage.resize_(0)

    def start_gather(self):
        """This rank's slice is new, so what was gathered before is old. The next forward fetches."""
        self.free()


class ZeRO3(ZeRO2):
    """ZeRO2 that keeps the weights of two parts of the model: of the one that computes and of the one that
    comes next. The parts are the embedding, each block, the head; forward and backward walk along them:

        forward   computes   embedding  block 0  block 1  head      backward  head     block 1  block 0
                  fetches    block 0    block 1  head     (stays)             block 1  block 0
                  frees                 emb.     block 0                               head     block 1

    The last block stays from forward to backward. Backward comes to a part when the gradient of its output is
    complete, which is the input of the part after it. Norms and biases are small: they stay as in ZeRO-2."""
    decayed_bucket = ShardedBucket

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        tail = [model.norm, model.wte if model.head is None else model.head, *filter(None, [model.mlm])]
        self.parts = [[m for m in (model.wte, model.wpe) if m is not None],
                      *([block] for block in model.blocks.values()), tail]
        self.sharded = [[b for m in part for b in self.buckets_of[m] if isinstance(b, ShardedBucket)]
                        for part in self.parts]
        self.here = 0  # the part that computes

    def wait_for_weights(self, module, x=None):
        """Forward comes to module with the input x. Of a module that is no part, such as the whole model,
        nothing is gathered."""
        ahead = (i % len(self.parts) for i in range(self.here, self.here + len(self.parts)))
        part = next((i for i in ahead if module in self.parts[i]), None)  # a tied embedding is in two
        if part is not None:
            self.enter(part)
            if x is not None and x.requires_grad:
                x.register_hook(lambda grad: self.enter(part - 1, backward=True))
        super().wait_for_weights(module)

    def enter(self, part, backward=False):
        """Part number `part` computes next: fetch it and the one after it, free all others."""
        turns = backward or part == len(self.parts) - 1
        window = [part, part - 1 if turns else part + 1]
        # the embedding's backward reads no weights
        wanted = {bucket: None for i in window if i > 0 or not backward for bucket in self.sharded[i]}
        for bucket in itertools.chain(*self.sharded):
            if bucket not in wanted:
                bucket.free()
        for bucket in wanted:
            bucket.fetch()
        for module in self.parts[part]:
            super().wait_for_weights(module)
        self.here = part


LEVELS = {0: DataParallel, 1: DataParallel, 2: ZeRO2, 3: ZeRO3}

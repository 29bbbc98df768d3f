"""ZeRO-2 and ZeRO-3 (arXiv:1910.02054, section 5): a rank keeps less of ddp.py's buckets.

    ZeRO-2   whole gradients exist only in two buffers, the slots, which buckets use in turn
    ZeRO-3   whole weights exist only while they are needed, too: of the current part and the next

The table in ddp.py says what a rank keeps under each --zero. Where a bucket's shard is one rank
there is nothing to share, so the bucket is a plain one.
"""
import itertools

import torch

from ddp import (
    BUCKET_ELEMENTS,
    Comm,
    DataParallel,
    FlatBuffers,
    assign_buckets,
    trained_parameters,
    unique,
    untimed,
)
from ops.flat import padded_elements
from parallel import CompletedWork

# -----------------------------------------------------------------------------
# ZeRO-2

class Slot:
    """A buffer for one bucket's gradients: backward fills it while the other slot is reduced."""

    def __init__(self, n, dtype, device):
        self.buffer = torch.zeros(n, dtype=dtype, device=device)
        self.user = None  # the bucket whose gradients are in the buffer

    def give_to(self, bucket):
        if self.user is not None:
            self.user.finish_reduce()  # it takes its sums out
        self.user = bucket


class SlotComm(Comm):
    """How a SlotBucket's numbers travel over NCCL or gloo; fast/peer.py has a faster one."""

    def __init__(self, slot=None):
        super().__init__()
        self.slot = slot

    def new_slot(self, n, model_dtype, device, axis):
        return Slot(n, torch.promote_types(model_dtype, torch.float32), device)

    def allocate(self, shard, own_slice, weights, dtype):
        flat = weights if weights.dtype == dtype else torch.zeros_like(weights, dtype=dtype)
        return flat, self.slot.buffer[:weights.numel()], torch.zeros_like(weights[own_slice])

    def start_reduce(self, bucket):
        # SUM of n numbers, n/size of them to each rank, over bucket.shard
        return bucket.shard.start_reduce_scatter(bucket.grad[bucket.own_slice], bucket.grad)

    def add_to_total(self, bucket):
        reduced = bucket.grad[bucket.own_slice]
        if bucket.total_is_empty:
            bucket.grad_total.copy_(reduced)
        else:
            bucket.grad_total.add_(reduced)

    def keep(self, own):  # own is a window of weights that will be freed
        return own.clone()


class SlotBucket(FlatBuffers):
    """A bucket that is reduced in every micro-batch.

    Gradients wait in p.grad until the bucket's last one has come. Then all go into the slot, the
    reduce starts, and its result, this rank's slice, is added to grad_total. With --shard, the
    total is summed over the replicas once a step.
    """

    def reset(self):
        self.missing = set(range(len(self.params)))  # gradients of this micro-batch
        self.pending_params = len(self.params)  # gradients of the last micro-batch
        self.total_is_empty = True
        self.reduce_handle = self.replica_handle = None
        self.reduces_last = False  # the reduce under way has the last gradients of this step

    def on_grad_ready(self, i, completes_grads):
        self.missing.discard(i)
        if completes_grads:
            self.pending_params -= 1
        if not self.missing:
            self.start_sum()

    def sum_starts_in_backward(self):
        return False  # on_grad_ready() starts it, and not DataParallel.start_sums()

    def start_sum(self):
        self.comm.slot.give_to(self)
        self.copy_all_gradients()
        self.grad[self.filled:].zero_()  # The padding may hold gradients of another bucket.
        self.missing = set(range(len(self.params)))
        self.reduces_last = self.pending_params == 0
        self.reduce_handle = self.comm.start_reduce(self)

    def finish_reduce(self):
        if self.reduce_handle is not None:
            self.reduce_handle.wait()
            self.comm.add_to_total(self)
            self.total_is_empty = False
            self.reduce_handle = None
            if self.reduces_last:
                self.replica_handle = self.comm.start_replica_sum(self)

    def wait_grads(self):
        # A parameter got no gradient, on all ranks alike: what came is reduced now, with zeros.
        nothing_came = self.total_is_empty and self.reduce_handle is None
        if nothing_came or len(self.missing) < len(self.params):
            self.start_sum()
        self.finish_reduce()
        if self.replica_handle is None:
            self.replica_handle = self.comm.start_replica_sum(self)
        self.replica_handle.wait()
        self.replica_handle = CompletedWork()  # as in ddp.Bucket.wait_grads()


def uses_slot(axis):
    """Whether a bucket over this axis is reduced in every micro-batch.

    Tied weights are not: each stage would wait in every micro-batch for the other's backward.
    """
    return axis.sharing().shard.size > 1 and axis.name != "tied"


def plain_comm(axis):
    return SlotComm() if uses_slot(axis) else Comm()


class ZeRO2(DataParallel):
    """A DataParallel that keeps only this rank's slices of the reduced gradients."""
    matrix_bucket = SlotBucket  # the class of the buckets of matrices

    def __init__(self, model, mesh, zero, timers=untimed, *, dtype=None, make_comm=plain_comm,
                 bucket_elements=BUCKET_ELEMENTS, optimizer="adamw", **options):
        sizes = [sum(p.numel() for p in contents.params)
                 for contents in assign_buckets(trained_parameters(model), zero, bucket_elements,
                                                optimizer)
                 if uses_slot(mesh.axes()[contents.reduction_axis])]
        self.slots = []
        if sizes:
            shard = mesh.stage.sharing().shard  # the size of each other shard divides this one's
            n = padded_elements(max(sizes), shard.size)
            weight = next(model.parameters())
            for _ in range(2):
                comm = make_comm(mesh.stage)  # only to make a slot
                self.slots.append(comm.new_slot(n, dtype or weight.dtype, weight.device, shard))
        super().__init__(model, mesh, zero, timers, dtype=dtype, make_comm=make_comm,
                         bucket_elements=bucket_elements, optimizer=optimizer, **options)

    def make_bucket(self, contents, axis, dtype, comm):
        if not uses_slot(axis):
            return super().make_bucket(contents, axis, dtype, comm)
        # Buckets are made roughly in the order in which backward fills them: neighbours alternate.
        comm.slot = self.slots[len(self.buckets) % 2]
        bucket_class = self.matrix_bucket if contents.decayed else SlotBucket
        return bucket_class(contents, axis, self.zero, dtype, comm)


# -----------------------------------------------------------------------------
# ZeRO-3

class ShardedBucket(SlotBucket):
    """A SlotBucket whose flat, and with it every p.data, has memory only while it is gathered.

    At rest there is own, this rank's slice in the model's dtype. Autograd's saved views of weights
    share flat's storage: fetch() fills it again before backward reads them.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.keep_slice()
        if self.own.dtype == self.master.dtype:
            self.master = self.own

    def keep_slice(self):
        self.own = self.comm.keep(self.own)
        self.storage = self.flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.free()

    def is_whole(self):
        return self.storage.nbytes() > 0

    def fetch(self):
        if not self.is_whole():
            self.storage.resize_(self.nbytes)
            self.gather_handle = self.comm.start_gather(self)

    def free(self):
        self.wait_for_weights()  # A gather must not write into memory that has another owner.
        self.storage.resize_(0)

    def after_update(self):
        self.free()  # What may still be gathered is outdated; forward fetches the new weights.


class FrozenBucket(ShardedBucket):
    """The weights that --lora leaves as they are: gathered and freed, but without gradients."""

    def __init__(self, contents, axis, dtype, comm):
        self.contents = contents
        self.axis = axis
        self.comm = comm
        self.shard, self.replicas = axis.sharing()
        self.n_slices = self.shard.size
        first = self.params[0]
        n = padded_elements(self.filled, self.n_slices)
        self.flat = torch.zeros(n, dtype=dtype or first.dtype, device=first.device)
        self.own_slice = self.slice_of_rank(self.shard.rank, n)
        self.own = self.flat[self.own_slice]
        self.gather_handle = None
        self.adopt_parameters(self.flat)
        self.keep_slice()


class ZeRO3(ZeRO2):
    """A ZeRO2 that keeps the weights of two parts: the one that computes, and the next.

        forward   computes   embedding           block 0   block 1   head
                  fetches    embedding, block 0  block 1   head      (block 1 stays)
                  frees                          embedding block 0

        backward  computes   head       block 1   block 0   (embedding: reads no weights)
                  fetches               block 0
                  frees                 head      block 1   block 0

    The output of a part is the input x of the next. A hook on x runs when x's gradient is complete,
    so it tells when backward reaches the part before. There are no stages (interface/layout.py):
    between micro-batches, a stage would gather its last block and its first all the time.
    """
    matrix_bucket = ShardedBucket

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        head = [model.norm, model.wte if model.head is None else model.head, model.mlm]
        parts = [[model.wte, model.wpe], *([block] for block in model.blocks.values()), head]
        self.parts = [[module for module in part if module is not None] for part in parts]
        self.sharded = [self.sharded_buckets(part) for part in self.parts]
        self.current_part = 0

    def freeze(self, named_parameters, dtype):
        """Share out the matrices that are not trained -> their buckets."""
        rest = dict(named_parameters)
        buckets = []
        for contents in assign_buckets(named_parameters, zero=3):
            axis = self.mesh.axes()[contents.reduction_axis]
            if contents.decayed and uses_slot(axis):
                self.draw_weights(zip(contents.names, contents.params, strict=True))
                buckets.append(FrozenBucket(contents, axis, dtype, SlotComm()))
                for name in contents.names:
                    del rest[name]
        super().freeze(rest.items(), dtype)
        return buckets

    def sharded_buckets(self, modules):
        buckets = itertools.chain.from_iterable(self.buckets_of[module] for module in modules)
        return [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]

    def part_of(self, module):
        """The next part, from the current one on, with this module, or None. A tied embedding is in
        two: after an evaluation the last block is fetched with it, which changes no number."""
        n = len(self.parts)
        order = [(self.current_part + ahead) % n for ahead in range(n)]
        return next((part for part in order if module in self.parts[part]), None)

    def provide_weights(self, module, x=None):
        """Gather what `module`, which forward has reached with the input x, reads.

        x is given for the first module of a part; others are runtime/watch.py's and bench/'s.
        """
        part = self.part_of(module)
        if part is None:
            super().provide_weights(module)
            return
        self.move_to_part(part)
        if x is None or not torch.is_grad_enabled():
            return
        if not x.requires_grad:  # No weight before the first block is trained, with --lora.
            x.requires_grad_()
        # Each matrix of this part is on a way from x to the loss: when x's gradient is complete,
        # backward has multiplied by all of them, and they may go.
        x.register_hook(lambda grad: self.move_to_part(part - 1, backward=True))

    def move_to_part(self, part, backward=False):
        """Fetch the part that computes now and the next one, and free all others."""
        if backward:
            # Part 0 reads no weights.
            needed = [number for number in (part, part - 1) if number > 0]
        elif part == len(self.parts) - 1:
            needed = [part, part - 1]  # Then backward comes: the head, then the last block.
        else:
            needed = [part, part + 1]
        wanted = unique(itertools.chain.from_iterable(self.sharded[number] for number in needed))
        for bucket in unique(itertools.chain.from_iterable(self.sharded)):
            if bucket not in wanted:
                bucket.free()
        for bucket in wanted:
            bucket.fetch()
        for module in self.parts[part]:
            super().provide_weights(module)
        self.current_part = part


# The DataParallel of each --zero.
LEVELS = {0: DataParallel, 1: DataParallel, 2: ZeRO2, 3: ZeRO3}

"""ZeRO-2 and ZeRO-3 (arXiv:1910.02054, section 5): a rank keeps less of ddp.py's buckets.

The table in ddp.py says what a rank keeps under each --zero. In this file:

    Slot, SlotComm, SlotBucket   ZeRO-2: whole fp32 gradients exist only in two buffers, in turns
    ShardedBucket                ZeRO-3: whole weights exist only while they are needed
    FrozenBucket                 the same for weights that --lora does not train
    ZeRO2, ZeRO3                 the DataParallel of each; LEVELS maps --zero to its class

Where a bucket's shard is one rank there is nothing to share, so the bucket is a plain one.
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
# ZeRO-2: a rank keeps only the slice of the summed gradients that it updates

class Slot:
    """One of two flat buffers for whole gradients, which the buckets use in turn.

    While the gradients of one bucket are reduced in the first slot, backward fills the second with
    the next bucket's gradients.
    """

    def __init__(self, n, dtype, device):
        self.buffer = torch.zeros(n, dtype=dtype, device=device)
        self.user = None  # the bucket whose gradients are in the buffer

    def give_to(self, bucket):
        """Hand the slot to a bucket, after the previous user has taken its gradients out."""
        if self.user is not None:
            self.user.finish_reduce()
        self.user = bucket


class SlotComm(Comm):
    """The Comm of a bucket whose whole gradient is in a Slot; fast/peer.py has a faster one."""

    def __init__(self, slot=None):
        super().__init__()
        self.slot = slot

    def new_slot(self, n, model_dtype, device, axis):
        """Return a Slot for n gradients of a model in model_dtype.

        axis: all ranks that share a bucket. Only fast/peer.py uses it, to share the slot's memory.
        """
        return Slot(n, torch.promote_types(model_dtype, torch.float32), device)

    def allocate(self, shard, own_slice, weights, dtype):
        flat = weights if weights.dtype == dtype else torch.zeros_like(weights, dtype=dtype)
        grad = self.slot.buffer[:weights.numel()]
        return flat, grad, torch.zeros_like(weights[own_slice])

    def start_reduce(self, bucket):
        # SUM of n numbers, n/size of them to each rank, over bucket.shard
        return bucket.shard.start_reduce_scatter(bucket.grad[bucket.own_slice], bucket.grad)

    def add_to_total(self, bucket):
        """Add the reduced gradients of one micro-batch to the total of the micro-batches so far."""
        reduced = bucket.grad[bucket.own_slice]
        if bucket.total_is_empty:
            bucket.grad_total.copy_(reduced)
        else:
            bucket.grad_total.add_(reduced)

    def keep(self, own):
        """Return a lasting copy of own (n/size,), a window of weights that will be freed."""
        return own.clone()


class SlotBucket(FlatBuffers):
    """A bucket whose gradients are reduced, summed over the ranks, in every micro-batch.

    Each gradient waits in p.grad, in the model's dtype, until the last one of the bucket has come.
    Then all are copied into the slot, and the reduce starts. Its result, this rank's slice, is
    added to grad_total, the total over the micro-batches. grad is a window of the slot: it holds
    this bucket's gradients only while they are being reduced. With --shard, the total is summed
    over the replicas once a step, after the last micro-batch; without, the replicas are one rank,
    and that sum is complete at once.
    """

    def reset(self):
        self.missing = set(range(len(self.params)))  # whose gradient of this micro-batch is to come
        # How many gradients of the step's last micro-batch are to come; only --shard needs it.
        self.pending_params = len(self.params)
        self.total_is_empty = True  # Nothing has been added to grad_total in this step.
        self.reduce_handle = None
        self.reduces_last = False  # The reduce under way has the last gradients of this step.
        self.replica_handle = None  # handle of the sum over the replicas

    def on_grad_ready(self, i, completes_grads):
        """Note that p.grad of parameter i has come. The last one of a micro-batch starts the sum.

        completes_grads: as in Bucket.on_grad_ready().
        """
        self.missing.discard(i)
        if completes_grads:
            self.pending_params -= 1
        if not self.missing:
            self.start_sum()

    def start_sum(self):
        """Copy this micro-batch's gradients into the slot, and start to sum them over the ranks."""
        self.comm.slot.give_to(self)
        self.copy_all_gradients()
        self.grad[self.filled:].zero_()  # The padding may hold gradients of another bucket.
        self.missing = set(range(len(self.params)))
        self.reduces_last = self.pending_params == 0
        self.reduce_handle = self.comm.start_reduce(self)

    def finish_reduce(self):
        """If a reduce is under way, wait for it and add its result to grad_total."""
        if self.reduce_handle is not None:
            self.reduce_handle.wait()
            self.comm.add_to_total(self)
            self.total_is_empty = False
            self.reduce_handle = None
            if self.reduces_last:
                self.replica_handle = self.comm.start_replica_sum(self)

    def wait_grads(self):
        # Some gradients came, but not all, so the reduce has not started.
        incomplete = len(self.missing) < len(self.params)
        # No gradient came at all in this step.
        nothing_came = self.total_is_empty and self.reduce_handle is None
        # In both cases start it now, with zeros for the missing ones. All ranks do the same: a
        # parameter gets a gradient on all ranks or on none.
        if incomplete or nothing_came:
            self.start_sum()
        self.finish_reduce()
        if self.replica_handle is None:  # A parameter got no gradient in the last micro-batch.
            self.replica_handle = self.comm.start_replica_sum(self)
        self.replica_handle.wait()
        self.replica_handle = CompletedWork()  # as in ddp.Bucket.wait_grads()


def uses_slot(axis):
    """Whether a bucket over this axis is reduced in every micro-batch.

    Weights that are tied across two stages are reduced once a step, as in ZeRO-1. A reduce in every
    micro-batch would make each stage wait for the other's backward.
    """
    return axis.sharing().shard.size > 1 and axis.name != "tied"


def plain_comm(axis):
    """Return the Comm of a bucket that is reduced over axis by collectives."""
    return SlotComm() if uses_slot(axis) else Comm()


class ZeRO2(DataParallel):
    """A DataParallel that keeps only this rank's slices of the reduced gradients."""
    matrix_bucket = SlotBucket  # the class of the buckets of matrices

    def __init__(self, model, mesh, zero, timers=untimed, *, dtype=None, make_comm=plain_comm,
                 bucket_elements=BUCKET_ELEMENTS, optimizer="adamw", split_masters=False,
                 draw=None):
        largest = 0  # elements of the largest bucket that uses a slot
        trained = trained_parameters(model)
        for contents in assign_buckets(trained, zero, bucket_elements, optimizer):
            if uses_slot(mesh.axes()[contents.reduction_axis]):
                largest = max(largest, sum(p.numel() for p in contents.params))
        self.slots = []
        if largest:
            # Every axis that uses slots has a shard whose size divides that of the stage's shard,
            # so padding for the latter is enough for all.
            everyone = mesh.stage.sharing().shard
            n = padded_elements(largest, everyone.size)
            weight = next(model.parameters())
            model_dtype = dtype or weight.dtype
            for _ in range(2):
                comm = make_comm(mesh.stage)  # only to make a slot: fast/peer.py shares its memory
                self.slots.append(comm.new_slot(n, model_dtype, weight.device, everyone))
        super().__init__(model, mesh, zero, timers, dtype=dtype, make_comm=make_comm,
                         bucket_elements=bucket_elements, optimizer=optimizer,
                         split_masters=split_masters, draw=draw)

    def make_bucket(self, contents, axis, dtype, comm):
        if not uses_slot(axis):
            return super().make_bucket(contents, axis, dtype, comm)
        # Buckets are made roughly in the order in which backward fills them: neighbours alternate.
        comm.slot = self.slots[len(self.buckets) % 2]
        bucket_class = self.matrix_bucket if contents.decayed else SlotBucket
        return bucket_class(contents, axis, self.zero, dtype, comm)


# -----------------------------------------------------------------------------
# ZeRO-3: weights are gathered where they are needed, and freed

class ShardedBucket(SlotBucket):
    """A SlotBucket whose flat, and with it every p.data, has memory only while it is gathered.

    At rest, the rank has own, its slice in the model's dtype. In an fp32 or fp64 model, own and
    master are the same tensor.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.keep_slice()
        if self.own.dtype == self.master.dtype:
            self.master = self.own

    def keep_slice(self):
        """Keep this rank's slice of flat, and give back the memory of the rest."""
        self.own = self.comm.keep(self.own)
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

    def after_update(self):
        """Send nothing: forward will fetch. Weights that are still gathered are outdated.

        Backward has freed all, so this is a safeguard.
        """
        self.free()


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
    """A ZeRO2 that keeps the weights of two parts of the model: the current one and the next.

    The parts are the embedding, each block, and the head. Forward and backward walk along them:

        forward   computes   embedding           block 0   block 1   head
                  fetches    embedding, block 0  block 1   head      (block 1 stays)
                  frees                          embedding block 0

        backward  computes   head       block 1   block 0   (embedding: reads no weights)
                  fetches               block 0
                  frees                 head      block 1   block 0

    No computation hides the embedding's gather. The last block stays from forward to
    backward. The output of a part is the input x of the next part. So a hook on x, which runs when
    x's gradient is complete, tells when backward reaches the previous part. Norms and biases are
    small, so they are kept as in ZeRO-2.

    There is no pipeline (interface/layout.py refuses it): between its micro-batches a stage would
    go to and fro between the last block and the first, and gather all the time.
    """
    matrix_bucket = ShardedBucket

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
        self.current_part = 0  # the number of the part that computes

    def freeze(self, named_parameters, dtype):
        """Share out the matrices that are not trained. Return their buckets."""
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
        """Return the ShardedBuckets that hold the modules' weights."""
        buckets = itertools.chain.from_iterable(self.buckets_of[module] for module in modules)
        return [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]

    def part_of(self, module):
        """Return the next part, counted from the current one, that holds the module, or None.

        Only a tied embedding is in two parts, the first and the last. After a backward the current
        part is the first. After an evaluation it is still the last, and the last block is fetched
        with the embedding, which costs a gather but changes no number.
        """
        n = len(self.parts)
        for ahead in range(n):
            part = (self.current_part + ahead) % n
            if module in self.parts[part]:
                return part
        return None

    def provide_weights(self, module, x=None):
        """Gather the weights of a module that forward has reached with the input x.

        Forward gives the x of each block, and that of the norm, which is the first module of the
        last part. The hook for backward is put on these. runtime/watch.py asks for other modules,
        such as a head alone, and bench/ for the whole model. A module that is no part is not
        gathered: only gathers that are under way are waited for.
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
        # The output of part - 1 is x, so backward reaches part - 1 when the gradient of x is
        # complete. Then this part may be freed: each of its matrices is on a way from x to the
        # loss, so backward has multiplied by all of them. The gradients of the weights themselves
        # may still be missing, but they are made without the weights.
        x.register_hook(lambda grad: self.move_to_part(part - 1, backward=True))

    def move_to_part(self, part, backward=False):
        """Fetch the part that computes now and the one that computes next, and free all others."""
        needed = self.needed_in_backward(part) if backward else self.needed_in_forward(part)
        wanted = []
        for number in needed:
            wanted += self.sharded[number]
        for bucket in unique(itertools.chain.from_iterable(self.sharded)):
            if bucket not in wanted:
                bucket.free()
        for bucket in unique(wanted):
            bucket.fetch()
        for module in self.parts[part]:
            super().provide_weights(module)
        self.current_part = part

    def needed_in_forward(self, part):
        """Return the parts whose weights are needed: this one, and the next that computes."""
        is_head = part == len(self.parts) - 1
        if is_head:  # Backward comes next. It begins with the head, then the last block.
            return [part, part - 1]
        return [part, part + 1]

    def needed_in_backward(self, part):
        """Return the same for backward, which goes the other way."""
        # Part 0 is the embedding, whose backward reads no weights.
        return [number for number in (part, part - 1) if number > 0]


# The DataParallel of each --zero.
LEVELS = {0: DataParallel, 1: DataParallel, 2: ZeRO2, 3: ZeRO3}

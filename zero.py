"""ZeRO-2 and ZeRO-3 (arXiv:1910.02054, section 5): a rank keeps less of ddp.py's buckets.

    ZeRO-2   whole gradients exist only in two buffers, the slots, which buckets use in turn
    ZeRO-3   whole weights exist only while they are needed, too: of the current part and the next

The table in ddp.py says what a rank keeps under each --zero. A bucket of one rank is a plain one.
Small methods such as kept_slice stand apart so that fast/buckets.py can replace them.
"""
import torch

import ddp
from ddp import Bucket, DataParallel
from parallel import CompletedWork

# ZeRO-2

class Slot:
    """A buffer for one bucket's gradients: backward fills it while the other slot is reduced."""

    def __init__(self, n, flat, axis):
        """n: elements. flat: that of a bucket. axis: the ranks that share buckets, for fast/."""
        dtype = torch.promote_types(flat.dtype, torch.float32)
        self.buffer = torch.zeros(n, dtype=dtype, device=flat.device)
        self.user = None  # the bucket whose gradients are in the buffer

    def give_to(self, bucket):
        if self.user is not None:
            self.user.finish_reduce()  # it takes its sums out
        self.user = bucket


class SlotBucket(Bucket):
    """A bucket that is reduced in every micro-batch.

    Gradients wait in p.grad until the bucket's last one has come. Then all go into the slot, the
    reduce starts, and its result, this rank's slice, is added to grad_total. With --shard, the
    total is summed over the replicas once a step.
    """
    slot_class = Slot

    def __init__(self, *args):
        super().__init__(*args)
        # take() starts the sums. Buckets end with blocks, so all ranks complete them in one order.
        self.in_turn = False

    def allocate(self, weights):  # no grad yet: use() gives one
        self.grad_total = torch.zeros_like(weights[self.own_slice])

    def use(self, slot):
        self.slot = slot
        self.grad = slot.buffer[:self.flat.numel()]
        self.grad_windows = self.windows(self.grad)

    def reset(self):
        self.missing = set(range(len(self.params)))  # yet to come in a micro-batch
        self.pending = len(self.params)  # yet to come in the last one: the hook counts down
        self.total_is_empty = True
        self.sum_handle = self.replica_handle = None

    def take(self, i):
        self.missing.discard(i)
        if not self.missing:
            self.start_sum()

    def start_sum(self):
        self.slot.give_to(self)
        self.copy_gradients()
        self.grad[self.filled:].zero_()  # The padding may hold gradients of another bucket.
        self.missing = set(range(len(self.params)))
        self.reduces_last = self.pending == 0  # this reduce has the last gradients of the step
        self.start_reduce()

    def start_reduce(self):
        # SUM of n numbers, n/size of them to each rank, over the shard
        self.sum_handle = self.shard.start_reduce_scatter(self.grad[self.own_slice], self.grad)

    def finish_reduce(self):
        if self.sum_handle is not None:
            self.sum_handle.wait()
            self.add_to_total()
            self.total_is_empty = False
            self.sum_handle = None
            if self.reduces_last:
                # SUM of n/size numbers, over the replicas; without --shard they are this rank
                self.replica_handle = self.replicas.start_all_reduce(self.grad_total)

    def add_to_total(self):
        if self.total_is_empty:
            self.grad_total.copy_(self.grad[self.own_slice])
        else:
            self.grad_total.add_(self.grad[self.own_slice])

    def wait_sum(self):
        # A parameter got no gradient, on all ranks alike: what came is reduced now, with zeros.
        nothing_came = self.total_is_empty and self.sum_handle is None
        if nothing_came or len(self.missing) < len(self.params):
            self.start_sum()
        self.finish_reduce()
        if self.replica_handle is None:
            self.replica_handle = self.replicas.start_all_reduce(self.grad_total)  # as above
        self.replica_handle.wait()
        self.replica_handle = CompletedWork()  # as in ddp.Bucket.wait_sum()


def uses_slot(axis):
    # Tied weights do not: in every micro-batch, each stage would wait for the other's backward.
    return axis.sharing().shard.size > 1 and axis.name != "tied"


class ZeRO2(DataParallel):
    """A DataParallel that keeps only this rank's slices of the reduced gradients."""

    def __init__(self, model, mesh, *args, **kwargs):
        super().__init__(model, mesh, *args, **kwargs)
        sliced = [bucket for bucket in self.buckets if isinstance(bucket, SlotBucket)]
        if sliced:
            first = sliced[0]
            shard = mesh.stage.sharing().shard  # its size is a multiple of every other shard's
            n = ddp.padded_elements(max(bucket.filled for bucket in sliced), shard.size)
            slots = [first.slot_class(n, first.flat, shard) for _ in range(2)]
            # Backward fills the buckets roughly in this order: neighbours alternate.
            for i, bucket in enumerate(sliced):
                bucket.use(slots[i % 2])

    def bucket_class(self, axis, params):
        return SlotBucket if uses_slot(axis) else Bucket


# ZeRO-3

class ShardedBucket(SlotBucket):
    """A SlotBucket whose flat, and with it every p.data, has memory only while it is gathered.

    At rest there is own, this rank's slice in the model's dtype. Autograd's saved views of weights
    share flat's storage: fetch() fills it again before backward reads them.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.own = self.kept_slice()
        if self.own.dtype == self.master.dtype:
            self.master = self.own  # in fp32 one memory, as under ZeRO-1
        self.storage = self.flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.free()

    def kept_slice(self):
        return self.own.clone()  # It was a window of flat, which will be freed.

    def fetch(self):
        if self.storage.nbytes() == 0:
            self.storage.resize_(self.nbytes)
            self.start_gather()

    def free(self):
        self.wait_weights()  # A gather must not write into memory that has another owner.
        self.storage.resize_(0)  # On a GPU its next owner writes after its readers are done.

    def after_update(self):
        self.free()  # What may still be gathered is outdated; forward fetches the new weights.


class FrozenBucket(ShardedBucket):
    """The weights that --lora leaves as they are: gathered and freed, but without gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.master = None

    def allocate(self, weights):
        """Make no buffer."""


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

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        head = [model.norm, model.wte if model.head is None else model.head, model.mlm]
        parts = [[model.wte, model.wpe], *([block] for block in model.blocks.values()), head]
        self.parts = [[module for module in part if module is not None] for part in parts]
        self.sharded = []  # the buckets of each part
        for part in self.parts:
            buckets = [bucket for module in part for bucket in self.buckets_of[module]]
            self.sharded.append([bucket for bucket in buckets if isinstance(bucket, ShardedBucket)])
        self.current_part = 0

    def bucket_class(self, axis, params):
        if uses_slot(axis) and ddp.uses_weight_decay(params[0]):
            return ShardedBucket
        return super().bucket_class(axis, params)

    def freeze(self, model, named_parameters, dtype):
        """Share out the matrices that are not trained -> their buckets."""
        rest = []
        buckets = []
        for group in ddp.assign_buckets(named_parameters, zero=3):
            params = [p for _, p in group]
            axis = self.mesh.axes()[params[0].reduction_axis]
            if self.bucket_class(axis, params) is ShardedBucket:
                ddp.draw_weights(model, group)
                buckets.append(FrozenBucket(group, axis, self.zero, dtype))
            else:
                rest += group
        super().freeze(model, rest, dtype)
        return buckets

    def part_of(self, module):
        """The next part, from the current one on, with this module: a tied embedding is in two."""
        n = len(self.parts)
        order = [(self.current_part + ahead) % n for ahead in range(n)]
        return next((part for part in order if module in self.parts[part]), None)

    def provide_weights(self, module, x=None):
        """Gather what `module` reads. x: its input, for the first module of a part in forward."""
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
        wanted = [bucket for number in needed for bucket in self.sharded[number]]
        for part_buckets in self.sharded:
            for bucket in part_buckets:
                if bucket not in wanted:
                    bucket.free()
        for bucket in wanted:
            bucket.fetch()
        for module in self.parts[part]:
            super().provide_weights(module)
        self.current_part = part


# The DataParallel of each --zero.
LEVELS = {0: DataParallel, 1: DataParallel, 2: ZeRO2, 3: ZeRO3}

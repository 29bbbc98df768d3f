"""Over which ranks must each gradient be summed? Derived on one process, without a rank, from any flags.

    python bench/one_rule.py tiny-moe --ranks 8 --tp 2 --ep 4 --zero 1

A rank's step is done once on the CPU, forward, backward, sums and update, by train.py's own code. No message
is sent: marks.py gives each tensor a Mark, which says along which axes of the mesh it differs between the
ranks, and along which it is a part of a sum. Then each parameter's gradient shows over which ranks it must be
summed. The program compares that with the group that parallel.reduction_axis declares.

    1) the ranks     Digits: each axis of the mesh is a set of digits of the rank's number
    2) one rank      Stage: one optimizer step under Marks, and what is checked on the way
    3) the verdict   derive: all stages; a table; exit code 0, or 1 where a group is wrong or a sum is refused

Sizes that no group depends on, such as the width, are made small first. What it cannot see: a wrong factor,
a wrong mask, a wrong order. For these, compare the layout with one rank, as tests/test_layouts.py does.
"""
import contextlib
import dataclasses
import itertools
import sys
import time
from typing import NamedTuple
from unittest import mock

from common import start
from runtime.launch import World

import torch
from marks import (
    DATA,
    FREED,
    ZERO,
    Mark,
    Marks,
    OneRuleError,
    around,
    attention_patches,
    collectives,
    mark_as,
    moved,
    own_memory,
    union,
    with_common_digits,
)
from marks_of_muon import MuonMarks

import ddp
import model
import moe
import pipeline
import train
import zero
from config import Config, Outcome
from corpus import masked
from corpus.synthetic import Synthetic
from interface import nearest
from interface.command_line import parse, wrong_input
from interface.layout import check_layout
from optim import Optimizer
from parallel import Axis, make_mesh

# Of axes with equal digits, the first gives the name. Those of --shard follow.
AXES = "tp", "cp", "dp", "dpcp", "stage", "ep", "edp", "pp", "tied", "world"
CPU = torch.device("cpu")


# -----------------------------------------------------------------------------
# 1) the ranks

def mesh_of(cfg, ranks, rank):
    """Return the mesh of one rank, without process groups."""
    return make_mesh(World(rank=rank, size=ranks), cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp,
                     n_experts=cfg.n_experts, shard=cfg.shard, groups=False)


class Digits:
    """A rank's number in digits: each axis of the mesh is a set of them, and a set is a sum of bits.

    With 8 ranks, tp 2, dp 4 and ep 4, the digits are 2 (tp), 2 and 2 (dp): ep is the two fastest ones, edp
    the slowest. ValueError: the axes have no common digits.
    """

    def __init__(self, mesh, n_experts=0):
        self.mesh = mesh
        tp = mesh.tp.size
        cp = mesh.cp.size
        block = mesh.stage.sharing().shard.size
        borders = sorted({1, tp, tp * cp, block, mesh.stage.size, mesh.world.size, mesh.ep.size})
        self.strides = borders[:-1]
        self.sizes = []
        self.known = {}  # bits of an axis, by its ranks
        for low, high in itertools.pairwise(borders):
            if high % low:
                is_shard = mesh.stage.shard_sharing and block in (low, high)
                part = f"shard {block // tp}" if is_shard else f"ep {mesh.ep.size}"
                raise ValueError(f"one_rule.py cannot follow {part} beside tp {tp} * cp {cp}: "
                                 f"{low} does not divide {high}; try {with_common_digits(mesh, n_experts)}")
            self.sizes.append(high // low)
        # The set of the first and the last stage. With two stages, that is the digit of pp, the slowest one.
        self.ends = 1 << len(self.sizes) + (mesh.pp.size > 2)

    def bits(self, axis):
        """Return the digits in which the ranks of an axis differ."""
        if axis.ranks in self.known:
            return self.known[axis.ranks]
        found = 0
        for rank in axis.ranks:
            for i, (stride, size) in enumerate(zip(self.strides, self.sizes, strict=True)):
                if rank // stride % size != axis.ranks[0] // stride % size:
                    found |= 2 << i
        slowest = 1 << len(self.sizes)
        if self.mesh.pp.size > 2 and found & slowest:
            found |= self.ends
            if axis.name.partition(".")[0] == "tied":
                found &= ~slowest
        self.known[axis.ranks] = found
        return found

    def count(self, bits):
        """Return how many ranks differ in these digits alone."""
        product = 1
        for i, size in enumerate(self.sizes):
            product *= size if bits & 2 << i else 1
        return product

    def names(self, bits):
        """Return the axis that has these digits, or the names of the digits."""
        bits &= ~DATA
        if not bits:
            return "none"
        axes = self.mesh.axes()
        for name in dict.fromkeys((*AXES, *axes)):
            if self.bits(axes[name]) == bits:
                return name
        return " * ".join(self.digit_name(i) for i in range(len(self.sizes)) if bits & 2 << i)

    def digit_name(self, i):
        """Return tp, or dp/2 for a digit of dp whose ranks are dp-neighbours of distance 2."""
        for name in ("tp", "cp", "dp", "pp"):
            axis = getattr(self.mesh, name)
            if self.bits(axis) == 2 << i:
                return name
            if self.bits(axis) & 2 << i:
                return f"{name}/{self.strides[i] // (axis.ranks[1] - axis.ranks[0])}"
        raise AssertionError(f"digit {i} is of no axis")

    def neighbour(self, rank, i):
        """Return a rank that differs in digit i only."""
        digit = rank // self.strides[i] % self.sizes[i]
        return rank + (self.strides[i] if digit == 0 else -digit * self.strides[i])


# -----------------------------------------------------------------------------
# 2) one rank

class Row(NamedTuple):
    """One parameter of the table."""
    name: str
    cut: str       # the axis over which it is cut
    follows: str   # the axis over which its gradient must be summed
    declared: str  # the axis over which it is summed
    right: bool


class Stage:
    """One optimizer step of one rank, under Marks."""

    def __init__(self, cfg, ranks, rank):
        self.cfg = cfg
        self.ranks = ranks
        self.rank = rank
        self.mesh = mesh_of(cfg, ranks, rank)
        self.digits = Digits(self.mesh, cfg.n_experts)
        self.marks = Marks(self.digits.names)
        self.table = {}  # name: Row
        self.refused = ""  # what the first refused operation was
        self.holders = {}

    def bits(self, axis):
        return self.digits.bits(axis)

    def step(self):
        """Do the step; fill table and refused."""
        with contextlib.ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            try:
                self.holders = holders(self.cfg, self.ranks)
                self.check_starts()
                self.model, self.data_parallel, self.opt = train.build(
                    self.cfg, self.mesh, self.cfg.vocab_size, CPU)
                batches = self.marked_batches()
                self.mark_weights()
                with self.marks:
                    train.Step(self.cfg, self.model, self.data_parallel, self.opt)(batches, 1)
                    self.next_forward(batches[0])
                    self.check_weights()
            except OneRuleError as error:
                self.refused = str(error)

    def patches(self):
        """Return what is replaced: messages, attention, and the places where something is checked."""
        wrap = mock.patch.object
        return [
            mock.patch.multiple(Axis, **collectives(self.marks, self.bits)),
            wrap(pipeline.dist, "P2POp", self.message),
            wrap(pipeline.dist, "batch_isend_irecv", arrivals),
            wrap(torch.distributed, "get_rank", lambda: self.rank),
            wrap(moe.MoE, "router_loss", around(moe.MoE.router_loss, self.router_loss)),
            wrap(ddp.Bucket, "on_grad_ready", around(ddp.Bucket.on_grad_ready, self.grad_ready)),
            wrap(zero.SlotBucket, "on_grad_ready", around(zero.SlotBucket.on_grad_ready, self.grad_ready)),
            wrap(ddp.FlatBuffers, "copy_all_gradients",
                 around(ddp.FlatBuffers.copy_all_gradients, self.copy_gradients)),
            wrap(zero.ShardedBucket, "free", around(zero.ShardedBucket.free, self.free)),
            wrap(Optimizer, "stats", around(Optimizer.stats, self.stats)),
            *attention_patches(self.marks, self.bits(self.mesh.tp)),
            *MuonMarks(self.marks, self.bits(self.mesh.tp)).patches(),
        ]

    # -------------------------------------------------------------------------
    # What the step starts from

    def batches(self, rank):
        cfg = self.cfg
        if cfg.objective == "mlm":
            source = masked.Masked(Synthetic(cfg.vocab_size - 1, cfg.seq_len, cfg.seed), cfg.seed)
        else:
            source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
        mesh = mesh_of(cfg, self.ranks, rank)
        return train.micro_batches(cfg, mesh, source, 0, cfg.global_batch, CPU)

    def marked_batches(self):
        """Return this rank's micro-batches. They have rows along the digits whose other ranks read others."""
        batches = self.batches(self.rank)
        rows = DATA
        for i in range(len(self.digits.sizes)):
            other = self.batches(self.digits.neighbour(self.rank, i))
            pairs = zip(batches, other, strict=True)
            if any(not torch.equal(x, other_x) for (x, _), (other_x, _) in pairs):
                rows |= 2 << i
        if rows & ~DATA != self.bits(self.mesh.dpcp):
            raise OneRuleError(f"the ranks of {self.digits.names(rows)} read other data; expected: dp and cp")
        for pair in batches:
            for t in pair:
                self.marks.set(t, Mark(rows))
        return batches

    def cut(self, p):
        """Return the Mark of a parameter: features where it is cut over tp, own for experts."""
        if p.full_shape == tuple(p.shape):
            return Mark()
        if p.expert:
            return Mark(own=self.bits(self.mesh.ep))
        return Mark(features=self.bits(self.mesh.tp))

    def slice_bits(self, bucket):
        """Return the digits in which ranks hold other slices of a bucket."""
        return self.bits(bucket.shard) if bucket.n_slices > 1 else 0

    def slice_mark(self, bucket):
        """Return the Mark of this rank's slice of a bucket's masters."""
        mark = self.cut_of_all(bucket)
        slices = self.slice_bits(bucket)
        return mark._replace(own=mark.own | slices, slices=slices)

    def cut_of_all(self, bucket):
        return union([self.cut(p) for p in bucket.params])._replace(is_zero=False)

    def check_starts(self):
        """Other ranks start with equal weights, except for what is cut; dropout differs where rows do."""
        own = self.starts(self.rank)
        for i in range(len(self.digits.sizes)):
            digit = 2 << i
            if digit & ~self.bits(self.mesh.stage):
                continue
            other = self.starts(self.digits.neighbour(self.rank, i))
            where = self.digits.names(digit)
            seeds = own.get("dropout"), other.get("dropout")
            if seeds[0] is not None and torch.equal(*seeds):
                raise OneRuleError(f"dropout draws the same numbers along {where}")
            for name, p in own.items():
                if name == "dropout":
                    continue
                equal = torch.equal(p, other[name])
                # Vectors start with one number, and one of the two factors of --lora with zeros.
                is_constant = p.ndim == 1 or not p.any()
                if equal == bool(self.cut(p).bits & digit) and not (equal and is_constant):
                    found = "equal numbers, but is cut" if equal else "different numbers, but is not cut"
                    raise OneRuleError(f"{name} starts with {found}, along {where}")

    def starts(self, rank):
        """Return {name: parameter} of a rank as it starts."""
        mesh = mesh_of(self.cfg, self.ranks, rank)
        part = model.GPT(self.cfg, mesh, self.cfg.vocab_size, pipeline.rank_layers(self.cfg, mesh.pp))
        with mock.patch.object(torch.distributed, "get_rank", lambda: rank):
            model.init_weights(part, self.cfg.seed)
        seeds = pipeline.dropout_seeds(self.cfg, mesh, 1, 2)
        found = dict(part.named_parameters())
        if seeds:
            found["dropout"] = torch.tensor(seeds)
        return found

    def mark_weights(self):
        marks = self.marks
        for _, p in ddp.frozen_parameters(self.model):
            marks.set(p.data, self.cut(p))
        for bucket in self.data_parallel.buckets + self.data_parallel.frozen_buckets:
            key = bucket.flat.untyped_storage()._cdata
            ends = [(begin, begin + p.numel(), self.cut(p))
                    for p, begin in zip(bucket.params, bucket.starts(), strict=True)]
            marks.set(bucket.flat, self.cut_of_all(bucket))
            marks.windows[key] = ends
        for bucket in self.data_parallel.frozen_buckets:
            marks.set(bucket.own, self.slice_mark(bucket))
        for bucket in self.data_parallel.buckets:
            marks.set(bucket.grad, ZERO)
            marks.set(bucket.grad_total, ZERO)
        slices = zip(self.data_parallel.buckets, self.opt.masters, *self.opt.moments().values(), strict=True)
        for bucket, *tensors in slices:
            for t in map(own_memory, [bucket.own, *tensors]):
                key = None if t is None else t.untyped_storage()._cdata
                if key not in (None, bucket.flat.untyped_storage()._cdata):
                    marks.set(t, self.slice_mark(bucket))

    # -------------------------------------------------------------------------
    # What is checked on the way

    def message(self, operation, tensor, peer, group):
        """Stand for a send or a receive over pp: rows of this rank's, which are whole."""
        rows = self.bits(self.mesh.stage)
        if operation is torch.distributed.irecv:
            return self.marks.start(tensor.zero_(), Mark(rows | DATA), "a message from another stage")
        mark = self.marks.of(tensor)
        if mark.bits & ~DATA != rows or mark.partial & ~DATA:
            self.marks.refuse(f"a message to the next stage differs along {self.digits.names(mark.bits)} "
                              f"and is a part of a sum over {self.digits.names(mark.partial)}; "
                              "expected: rows of the stage, whole")
        return None

    def router_loss(self, original, layer, logits, probabilities, expert_ids):
        """The one exception: this loss is a mean over a micro-batch, so each one stands for itself."""
        micro_batch = self.bits(self.mesh.dp) | DATA
        own = moved(micro_batch, "rows", "own")
        enter = mark_as(self.marks, own, moved(micro_batch, "own", "rows"))
        expert_ids = self.marks.set(expert_ids.clone(), own(self.marks.of(expert_ids)))
        loss = original(layer, enter(logits), enter(probabilities), expert_ids)

        def leave(mark):
            """Each tp rank has a part, but adds it to a cross-entropy that all tp ranks have whole."""
            if mark.varies & ~micro_batch:
                self.marks.refuse("the router's loss is no sum over the rows of a micro-batch")
            return Mark(partial=self.bits(self.mesh.dpcp) | DATA)
        return mark_as(self.marks, leave, lambda mark: Mark())(loss)

    def grad_ready(self, original, bucket, i, completes_grads):
        """Note what a parameter's gradient says."""
        p = bucket.params[i]
        cut = self.cut(p)
        grad = self.marks.of(p.grad)
        name = bucket.names[i]
        declared = getattr(self.mesh, p.reduction_axis)
        follows = grad.bits & ~cut.bits & ~DATA
        if len(self.holders[name]) > 1:  # Each stage that holds a copy has the gradient of its own use.
            follows |= self.digits.ends
        over = self.bits(declared)
        names = self.digits.names
        right = follows == over
        derived = declared.name if right else names(follows)
        self.table[name] = Row(name, names(cut.bits), derived, declared.name, right)
        # The table has what is wrong here. The rest of the step goes on as declared. Gradients of layers that
        # were one product share memory, so this one gets memory of its own.
        p.grad = self.marks.set(p.grad.clone(), cut._replace(partial=over | DATA))
        original(bucket, i, completes_grads)

    def copy_gradients(self, original, bucket):
        """The slot of a ZeRO-2 bucket held gradients of another one, whose sum must have been taken out."""
        late = self.marks.of(bucket.grad).late
        if late:
            self.marks.refuse(f"{bucket.names[0]}: its slot is filled before {late}, of the previous bucket, "
                              "was waited for")
        self.marks.set(bucket.grad, ZERO)
        original(bucket)

    def free(self, original, bucket):
        """Whoever reads weights that ZeRO-3 has freed reads garbage."""
        original(bucket)
        if not bucket.is_whole():
            self.marks.set(bucket.flat, FREED)

    def check_arrived(self):
        """Every parameter got a gradient, and every sum was waited for."""
        missing = [name for bucket in self.data_parallel.buckets for name in bucket.names
                   if name not in self.table]
        if missing:
            raise OneRuleError(f"{missing[0]}: it got no gradient")
        triples = zip(self.data_parallel.buckets, self.opt.masters, self.opt.grads, strict=True)
        for bucket, master, grad in triples:
            first = bucket.names[0]
            if isinstance(bucket, zero.SlotBucket) and bucket.reduce_handle is not None:
                raise OneRuleError(f"{first}: nobody has waited for the sum of its gradients")
            if not is_same(master, bucket.master) or not is_same(grad, bucket.grad_total):
                raise OneRuleError(f"{first}: the optimizer has another slice than this rank's, which begins "
                                   f"at {bucket.own_slice.start}")

    def stats(self, original, optimizer, loss, *args):
        """Between backward and update: groups, loss, summed gradients, and how often the norm counts them."""
        wrong = [row for row in self.table.values() if not row.right]
        if wrong:
            raise OneRuleError(wrong_group(wrong[0]))
        self.check_arrived()
        if self.model.has_head:
            self.expect("the loss", loss, Mark(partial=self.bits(self.mesh.dpcp) | DATA))
        for bucket in self.data_parallel.buckets:
            first = bucket.names[0]
            mark = self.slice_mark(bucket)
            self.expect(f"{first}: its summed gradient", bucket.grad_total, mark._replace(partial=DATA))
            self.marks.set(bucket.grad_total, mark)
            copies = self.digits.count(self.bits(self.mesh.stage) & ~mark.bits) * len(self.holders[first])
            if bucket.axis.name == "tied" and bucket.n_slices > 1:
                copies = bucket.replicas.size
            if abs(bucket.count_factor * copies - 1) > 1e-9:
                raise OneRuleError(f"{first}: {copies} ranks hold the same slice, but the norm counts "
                                   f"{bucket.count_factor:.4g} of it on each")
        self.marks.windows.clear()
        self.marks.counting = False  # Its parts are divided by the number of ranks that hold them.
        try:
            stats = original(optimizer, loss, *args)
        finally:
            self.marks.counting = True
        for name, number in stats._asdict().items():
            self.expect(f"{name}, a number of the whole model,", number, Mark())
            self.marks.set(number.contiguous(), self.marks.of(number).without(DATA))
        return stats

    def expect(self, what, tensor, mark):
        found = self.marks.of(tensor)
        names = self.digits.names
        if found.partial & ~DATA != mark.partial & ~DATA:
            raise OneRuleError(f"{what} is a part of a sum over {names(found.partial)}; "
                               f"expected: {names(mark.partial)}")
        if found.varies & ~DATA != mark.varies & ~DATA:
            raise OneRuleError(f"{what} differs along {names(found.varies)}; expected: {names(mark.varies)}")

    @torch.no_grad()
    def next_forward(self, batch):
        """Begin the next step, which must wait for the weights that it reads."""
        hidden = None
        if not self.model.is_first:
            rows = batch[0].numel() // self.mesh.tp.size
            hidden = torch.zeros(rows, self.cfg.n_embd, dtype=next(self.model.parameters()).dtype)
            self.marks.set(hidden, Mark(self.bits(self.mesh.stage) | DATA))
        for bucket in self.data_parallel.buckets:
            if isinstance(bucket, zero.ShardedBucket) and bucket.is_whole():
                raise OneRuleError(f"{bucket.names[0]}: the weights from before the update are still there")
        out, _ = self.model(*batch, hidden=hidden)
        if self.marks.of(out).own & ~DATA:
            raise OneRuleError("the next forward reads weights that are new only in this rank's slice")

    def check_weights(self):
        """After the update each weight differs along its cut, and no buffer differs at all."""
        for bucket in self.data_parallel.buckets:
            bucket.wait_for_weights()
            first = bucket.names[0]
            if isinstance(bucket, zero.ShardedBucket):
                self.expect(f"{first}: its new weights", bucket.own, self.slice_mark(bucket))
                continue
            self.expect(f"{first}: its new weights", bucket.flat, self.cut_of_all(bucket))
        for name, buffer in self.data_parallel.buffers.items():
            self.expect(name, buffer, Mark())


def is_same(a, b):
    """Whether two tensors are the same memory."""
    return own_memory(a).data_ptr() == own_memory(b).data_ptr() and a.numel() == b.numel()


def arrivals(operations):
    """Stand for torch.distributed.batch_isend_irecv: return the handles of what is received."""
    return [operation for operation in operations if operation is not None]


def holders(cfg, ranks):
    """Return {name of a parameter: the stages that hold it}. OneRuleError: a message skips blocks."""
    found = {}
    chunks = []  # the blocks of each rank's chunks
    for stage in range(cfg.pp):
        mesh = mesh_of(cfg, ranks, stage * ranks // cfg.pp)
        with torch.device("meta"):
            part = model.GPT(cfg, mesh, cfg.vocab_size, pipeline.rank_layers(cfg, mesh.pp))
        chunks.append(part.chunks)
        for name, _ in part.named_parameters():
            found.setdefault(name, []).append(stage)
    walked = [blocks for chunk in zip(*chunks, strict=True) for blocks in chunk]
    for (_, end), (begin, _) in itertools.pairwise(walked):
        if begin != end:
            raise OneRuleError(f"after block {end - 1} a message goes to the stage that begins at {begin}")
    return found


# -----------------------------------------------------------------------------
# 3) the verdict

def wrong_group(row):
    return f"{row.name}: its gradient must be summed over {row.follows}, and is summed over {row.declared}"


class Verdict(NamedTuple):
    """What all stages say."""
    rows: list    # a Row per parameter
    refused: str  # the first refused operation, or ""

    @property
    def right(self):
        return not self.refused and all(row.right for row in self.rows)


def derive(cfg, ranks, stages=None):
    """Do a step of the last rank of each stage, which has no coordinate 0 that hides a fault.

    stages: which ones; None: all. Return the Verdict. ValueError: the layout does not fit the ranks, or its
    axes have no common digits.
    """
    rows = {}
    refused = ""
    for stage in range(cfg.pp) if stages is None else stages:
        one = Stage(cfg, ranks, (stage + 1) * ranks // cfg.pp - 1)
        check_layout(cfg, one.mesh, cfg.global_batch)
        one.step()
        for name, row in one.table.items():
            if name not in rows or rows[name].right:
                rows[name] = row
        refused = refused or one.refused
    return Verdict(list(rows.values()), refused)


@dataclasses.dataclass(frozen=True)
class Flags(Config):
    ranks: int = 8  # how many ranks the layout has; none of them is started

    RANGES = {"ranks": (1, 4096)}


def small(cfg, dp):
    """Return the flags with small sizes. Heads, layers, experts and the layout stay as they are."""
    tokens = 2 * cfg.cp * cfg.tp
    return dataclasses.replace(
        cfg, n_embd=4 * cfg.n_head, ffn_hidden=8 * cfg.tp, vocab_size=100, micro_batch=2,
        seq_len=tokens * -(-20 // tokens), global_batch=4 * dp, rampup_batch_size=())


def printed(verdict, layers):
    """Return the lines of the table: parameters of equal names in all blocks are one line."""
    lines = {}
    for row in verdict.rows:
        parts = row.name.split(".")
        if parts[0] == "blocks" and row.right:
            parts[1] = "*" if layers > 1 else parts[1]
        key = row._replace(name=".".join(parts))
        lines[key] = None
    width = max([len(row.name) for row in lines] + [9])
    table = [f"{'parameter':{width}}  {'cut over':10}  {'follows':10}  declared"]
    for row in lines:
        mark = "" if row.right else "   WRONG"
        table.append(f"{row.name:{width}}  {row.cut:10}  {row.follows:10}  {row.declared}{mark}")
    return table


def main(argv=None):
    began = time.monotonic()
    with wrong_input():
        flags = parse(sys.argv[1:] if argv is None else argv, Flags, "one_rule.py",
                      "Derive over which ranks each gradient must be summed, for any flags of train.py.",
                      data="synthetic")
        with nearest.with_fix(flags, flags.ranks):
            nearest.check_all(flags, flags.ranks)
        mesh = mesh_of(flags, flags.ranks, 0)
        verdict = derive(small(flags, mesh.dp.size), flags.ranks)
    print("\n".join(printed(verdict, flags.n_layer)))
    wrong = [row for row in verdict.rows if not row.right]
    for row in wrong:
        print(f"wrong: {wrong_group(row)}")
    if verdict.refused and not wrong:
        print(f"refused: {verdict.refused}")
    right = len(verdict.rows) - len(wrong)
    print(f"{right} of {len(verdict.rows)} groups follow from the step, {flags.ranks} ranks, "
          f"{time.monotonic() - began:.1f} s: {'right' if verdict.right else 'WRONG'}")
    return Outcome.DONE if verdict.right else Outcome.FAILED


if __name__ == "__main__":
    start(main)

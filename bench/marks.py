"""Marks in the place of numbers: along which axes does a tensor differ between the ranks, and how?

A Mark has four sets of axes. An axis of the mesh is a set of bits; DATA is one more bit, of all that has to
do with tokens, so that gradients and activations are told apart on one rank, too.

    rows      The ranks have other tokens: rows of one larger tensor.
    features  The ranks have other columns, heads or words: a weight that is cut over tp, and its results.
    own       The ranks have something of their own that is never added up: experts, slices of a bucket.
    partial   The ranks have parts of a sum. Nothing but a SUM over these axes makes the number whole.

`Marks` sees every operation of torch that one rank does, and gives each result its Mark. A tensor that is
in none of the sets along an axis is equal on all of its ranks. A zero fits every Mark.

While `Marks.by_sides` is set, in Muon's iteration, tensors hold matrices: rows and features are then their
two sides, the last two dimensions. marks_of_muon.py sets it.
"""
import contextlib
import itertools
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import layers
import lora
from interface import nearest
from interface.layout import check_ranks
from parallel import Axis

DATA = 1


class OneRuleError(Exception):
    """A number is summed, or used, in a way that does not fit its Mark."""


class Mark(NamedTuple):
    """Sets of bits: how a tensor differs between ranks."""
    rows: int = 0
    features: int = 0
    own: int = 0
    partial: int = 0
    slices: int = 0  # those of `own` along which ranks have slices of a buffer, cut inside matrices
    is_zero: bool = False
    is_root: bool = False  # a norm: not it, but its square is the part of a sum that `partial` speaks of
    late: str = ""  # the collective that brings the numbers and has not been waited for

    @property
    def varies(self):
        """The bits along which ranks have different numbers, parts of sums not counted."""
        return self.rows | self.features | self.own

    @property
    def bits(self):
        return self.varies | self.partial

    def without(self, bits):
        return Mark(*(kind & ~bits for kind in self[:5]))

    def as_rows(self):
        """Return the Mark of integers, which are never whole or partial: they only differ."""
        return self._replace(rows=self.rows | self.partial, partial=0)

    def turned(self):
        """Return the Mark of the transposed matrix."""
        return self._replace(rows=self.features, features=self.rows)


ZERO = Mark(is_zero=True)
FREED = Mark(late="a gather that did not happen: the memory was given back")


def union(marks):
    """Return the Mark of a result in which tensors of these Marks take part."""
    kinds = [0, 0, 0, 0, 0]
    for mark in marks:
        kinds = [kind | more for kind, more in zip(kinds, mark[:5], strict=True)]
    marks = list(marks)
    return Mark(*kinds, is_zero=bool(marks) and all(mark.is_zero for mark in marks),
                is_root=any(mark.is_root for mark in marks))


# Operations that may take part of a sum for the sum itself: f(a + b) = f(a) + f(b).
LINEAR = {"neg", "clone", "_to_copy", "copy_", "index", "index_select", "gather", "slice_backward",
          "select_backward", "scatter", "scatter_", "scatter_add", "scatter_add_", "masked_fill", "cat",
          "stack", "constant_pad_nd", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put",
          "index_add", "index_add_", "flip", "roll", "repeat", "detach", "view", "_unsafe_view", "sort",
          "bincount", "cumsum", "_foreach_copy_", "lift_fresh", "tril", "triu"}
SUMS = {"add", "add_", "sub", "sub_"}
PRODUCTS = {"mul", "mul_", "div", "div_"}
MATRIX_PRODUCTS = {"mm", "bmm", "_grouped_mm"}
REDUCTIONS = {"sum", "mean"}
NORMS = {"norm", "linalg_vector_norm"}
OTHER_REDUCTIONS = {"max", "amax", "min", "amin", "logsumexp", "argmax", "prod", "nll_loss_forward", "norm",
                    "linalg_vector_norm", "count_nonzero", "any", "all"}
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero_"}
FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "ones", "ones_like",
         "full", "full_like", "new_full", "new_ones", "fill_", "arange", "scalar_tensor", "rand_like"}


class Marks(TorchDispatchMode):
    """Gives every tensor of one rank its Mark. names(bits): what a message calls a set of bits."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.known = {}  # of a storage: the storage, so that it stays alive, and its Mark
        self.windows = {}  # of a storage: [(start, end, Mark)] of the parameters in it
        self.counting = True  # whether a wrong sum or a wrong use of a partial sum is refused
        self.by_sides = False  # whether rows and features are the sides of matrices

    # -------------------------------------------------------------------------
    # What is known

    def of(self, tensor):
        mark = self.of_memory(tensor)
        return mark.turned() if self.is_turned(tensor) else mark

    def is_turned(self, tensor):
        """Whether a tensor of matrices is a transposed view of its memory."""
        return self.by_sides and tensor.ndim > 1 and tensor.stride(-2) < tensor.stride(-1)

    def of_memory(self, tensor):
        key = tensor.untyped_storage()._cdata
        begin = tensor.storage_offset()
        whole = self.known.get(key, (None, Mark()))[1]
        for start, end, mark in self.windows.get(key, ()):
            if start <= begin < end and tensor.numel() <= end - start:
                return mark._replace(late=whole.late)
        return whole

    def set(self, tensor, mark):
        storage = tensor.untyped_storage()
        if self.is_turned(tensor):
            mark = mark.turned()
        self.known[storage._cdata] = storage, mark
        return tensor

    def start(self, tensor, mark, kind):
        """Return the handle of a collective that has started: its wait() gives the tensor the Mark."""
        self.set(tensor, mark._replace(late=kind))
        return Started(self, tensor, mark)

    def refuse(self, text):
        if self.counting:
            raise OneRuleError(text)

    # -------------------------------------------------------------------------
    # Operations of torch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name.startswith(("_foreach", "_fused_adam")):
            self.number_by_number(name, out, args, kwargs)
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [t for t, said in zip(args, func._schema.arguments, strict=False)
                   if said.alias_info and said.alias_info.is_write]
        if "out" in kwargs:
            written.append(kwargs["out"])
        shared = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in fresh if t.untyped_storage()._cdata not in shared]
        if not fresh and not written:
            return out  # a view: its storage has a Mark already
        if name == "fill_":
            return out
        if name == "copy_":
            inputs = inputs[1:]
        for t in inputs:
            if self.of(t).late:
                self.refuse(f"{name} reads numbers before they are there: nobody has waited for "
                            f"{self.of(t).late}")
        marks = self.rule(name, inputs, (args, kwargs), fresh or written)
        if marks[0].rows & marks[0].features and (fresh or written)[0].dtype.is_floating_point:
            both = self.names(marks[0].rows & marks[0].features)
            self.refuse(f"{name}: along {both}, each rank has other rows and other columns; one of the two "
                        "must be gathered first")
        for t, mark in zip(fresh, marks, strict=False):
            self.set(t, mark)
        for t in written:
            is_whole = t.numel() * t.element_size() == t.untyped_storage().nbytes()
            replaces = is_whole and name in ("copy_", "zero_", "fill_")
            self.set(t, marks[0] if replaces else union([self.of(t), marks[0]]))
        return out

    def number_by_number(self, name, out, args, kwargs):
        """Mark the results of an operation on lists: the i-th tensors of all lists, and what is no list."""
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
        alone = [self.of(a) for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        results = out if isinstance(out, (list, tuple)) and out else lists[0]
        read = lists[1:] if name == "_foreach_copy_" else lists
        for i, t in enumerate(results):
            mark = union([self.of(a[i]) for a in read if len(a) == len(results)] + alone)
            if name == "_foreach_copy_":
                mark = union([self.of(t), mark])
            self.set(t, mark)
            for a in lists if name.startswith("_fused") else []:
                self.set(a[i], mark)

    def rule(self, name, inputs, arguments, results):
        """Return the Mark of each result. arguments: those of the operation, (args, kwargs)."""
        args, kwargs = arguments
        if name in ZEROS:
            return [ZERO] * len(results)
        if name in FRESH:
            return [Mark()] * len(results)
        marks = [self.of(t) for t in inputs]
        if not any(t.dtype.is_floating_point for t in results):
            mark = self.reduced(name, inputs, args, marks)
            is_sum = name in LINEAR or name in REDUCTIONS
            return [mark if is_sum else mark.as_rows()] * len(results)
        if len(inputs) > 1 and name not in SUMS:  # integers choose: which rows, which words
            marks = [mark if t.dtype.is_floating_point else mark.as_rows()
                     for t, mark in zip(inputs, marks, strict=True)]
        if name in MATRIX_PRODUCTS:
            return [self.matrix_product(*marks[:2])]
        if name in ("addmm", "baddbmm"):
            found = self.matrix_product(*marks[1:3])
            return [found if kwargs.get("beta") == 0 else self.sum("add", [marks[0], found])]
        if name == "pow" and marks[0].is_root and args[1] == 2:
            return [marks[0]._replace(is_root=False)]
        if name == "embedding":
            weight, index = marks
            return [Mark(index.rows | weight.rows, 0, weight.own, weight.features | weight.partial)]
        if name == "embedding_dense_backward":
            return [added_rows(union(marks))]
        if name == "nll_loss_backward":
            marks = marks[:3]  # The last argument is a sum of weights, all of which are 1.
        if name.endswith("norm_backward"):
            whole = self.backward(name, marks)
            return [whole] + [added_rows(whole)] * (len(results) - 1)
        if name.endswith("_backward") and name not in LINEAR or name == "_softmax_backward_data":
            return [self.backward(name, marks)] * len(results)
        if name == "_log_softmax_backward_data":
            return [self.backward(name, marks)]
        if name in SUMS:
            return [self.sum(name, marks, [a for a in args if isinstance(a, (int, float)) and a != 0])]
        if name in PRODUCTS:
            return [self.product(name, marks)]
        if name == "where":
            return [self.sum(name, marks[1:])]
        if name not in LINEAR and name not in REDUCTIONS:
            self.needs_whole(name, marks)
        return [self.reduced(name, inputs, args, marks)] * len(results)

    def needs_whole(self, name, marks):
        """Refuse a function that is not linear of parts of a sum."""
        partial = union(marks).partial & ~DATA
        if partial:
            self.refuse(f"{name} of parts of a sum over {self.names(partial)}, which are not summed yet")

    def sum(self, name, marks, numbers=()):
        """Return the Mark of a sum of tensors: all are parts of sums over the same ranks, or none is."""
        terms = [mark for mark in marks if not mark.is_zero]
        partial = union(terms).partial & ~DATA
        for mark in [*terms, *[Mark()] * len(numbers)]:
            if partial & ~mark.partial:
                missing = self.names(partial & ~mark.partial)
                self.refuse(f"{name}: a part of a sum over {missing}, and a number that is whole, "
                            "which the sum would count once per rank")
        return union(marks)

    def product(self, name, marks):
        """Return the Mark of a product: if one factor is a part of a sum, the other one is equal there."""
        first, *others = marks
        if name.startswith("div") and others:
            self.needs_whole(name, others)
        for other in others:
            clash = first.partial & other.bits | other.partial & first.bits
            if clash & ~DATA:
                self.refuse(f"{name}: a part of a sum over {self.names(clash & ~DATA)} times a number that "
                            "differs on these ranks, or is a part itself")
        return union(marks)

    def backward(self, name, marks):
        """Return the Mark of an input's gradient: a product of grad with what the other arguments say."""
        grad, *others = marks
        self.needs_whole(name, others)
        return self.product(name, [grad, union(others)])

    def matrix_product(self, a, b):
        """Return the Mark of a (.., n) times b (n, ..).

        Two factors with rows are a weight's gradient, a sum over the rows. Else the sum is over features. An
        axis along which both factors have features is cut there, so the result is a part of the sum.
        """
        self.product("a matrix product", [a, b])
        if self.by_sides:
            return self.product_by_sides(a, b)
        apart = (a.own ^ b.own) & ~DATA
        if apart & union([a, b]).own and (a.rows or b.rows):
            self.refuse(f"a matrix product of rows with experts of other ranks of {self.names(apart)}: "
                        "the rows were not sent there")
        partial = a.partial | b.partial
        own = a.own | b.own
        if a.rows and b.rows:
            return Mark(0, a.features | b.features, own, (partial | a.rows | b.rows) & ~own)
        return Mark(a.rows | b.rows, a.features ^ b.features, own, partial | a.features & b.features)

    def product_by_sides(self, a, b):
        """Return the Mark of a matrix (.., n) times a matrix (n, ..), of which tp may cut any side."""
        if a.features != b.rows:
            self.refuse("a matrix product: the side that it sums over is cut along "
                        f"{self.names(a.features ^ b.rows)} in one of the two matrices only")
        whole = union([a, b])
        return whole._replace(rows=a.rows, features=b.features, partial=whole.partial | a.features)

    def reduced(self, name, inputs, args, marks):
        """Return the Mark of a result whose rows or features may have been added up."""
        mark = union(marks)
        if name in ("bincount", "scatter_add_", "scatter_add") and inputs[0].ndim == 1:
            return added_rows(mark)
        if name in ("gather",) and args[1] % inputs[0].ndim == inputs[0].ndim - 1:
            return Mark(mark.rows, 0, mark.own, mark.partial | mark.features)
        if name not in REDUCTIONS and name not in OTHER_REDUCTIONS or not inputs:
            return mark
        ndim = inputs[0].ndim
        at = 2 if name in NORMS else 1  # A norm's first argument says which norm it is.
        dims = args[at] if len(args) > at else None
        if dims is None or name == "nll_loss_forward" or isinstance(dims, torch.Tensor):
            dims = range(ndim)
        dims = [dims] if isinstance(dims, int) else [dim % ndim for dim in dims] or range(ndim)
        dims = [dim % ndim for dim in dims]
        row_dim = ndim - 2 if self.by_sides else 0
        rows = mark.rows if row_dim in dims else 0
        # In (B, t, heads, D) tp cuts the heads, not their columns.
        features = mark.features if ndim - (2 if ndim == 4 else 1) in dims else 0
        partial = mark.partial | rows | features
        return Mark(mark.rows & ~rows, mark.features & ~features, mark.own, partial, mark.slices,
                    is_root=name in NORMS and partial != 0)


def added_rows(mark):
    """Return the Mark of a sum over the rows."""
    return Mark(0, mark.features, mark.own, mark.partial | mark.rows)


# -----------------------------------------------------------------------------
# The collectives of an Axis

class Started:
    """The handle of a collective: its numbers are there when it has been waited for."""

    def __init__(self, marks, tensor, mark):
        self.marks = marks
        self.tensor = tensor
        self.mark = mark

    def wait(self):
        self.marks.set(self.tensor, self.mark)


def collectives(marks, bits):
    """Return methods for parallel.Axis that change Marks. This rank's numbers stand for those of the others.

    bits(axis): the axis as a set of bits.
    """
    return {**sums(marks, bits), **gathers(marks, bits), **sends(marks, bits)}


def sums(marks, bits):
    """Return the collectives that add up: each rank of the axis must have a part of the sum."""
    def mark_of_sum(axis, x, kind):
        mark = marks.of(x)
        over = bits(axis)
        if mark.is_root:
            marks.refuse(f"{kind} over {axis.name} adds norms of parts; only their squares add up")
        missing = over & ~mark.partial & ~mark.own
        if missing & ~mark.bits:
            marks.refuse(f"{kind} over {axis.name} sums numbers that are equal along "
                         f"{marks.names(missing & ~mark.bits)}: it counts them several times")
        if missing and not mark.is_zero and x.dtype.is_floating_point:
            marks.refuse(f"{kind} over {axis.name} sums numbers that are whole: along "
                         f"{marks.names(missing)} the ranks have other rows or columns of a tensor")
        return mark.without(over)

    def mark_of_own_rows(axis, x):
        mark = mark_of_sum(axis, x, "a reduce-scatter")
        return mark._replace(rows=mark.rows | bits(axis))

    def _all_reduce(self, x, op, async_op=False):
        mark = marks.of(x)
        if op == torch.distributed.ReduceOp.SUM:
            mark = mark_of_sum(self, x, "an all-reduce")
        elif mark.varies & bits(self):
            marks.refuse(f"a maximum over {self.name} of numbers that are whole on each of its ranks")
        mark = mark.without(bits(self))
        if async_op:
            return marks.start(x, mark, f"an all-reduce over {self.name}")
        marks.set(x, mark)
        return None

    def reduce_scatter(self, x):
        if self.size == 1:
            return x
        mark = mark_of_own_rows(self, x)
        return marks.set(x.chunk(self.size)[self.rank].clone(), mark)

    def start_reduce_scatter(self, out, x):
        mark = mark_of_own_rows(self, x)
        out.copy_(x.chunk(self.size)[self.rank].clone())
        return marks.start(out, mark, f"a reduce-scatter over {self.name}")

    return {"_all_reduce": _all_reduce, "reduce_scatter": reduce_scatter,
            "start_reduce_scatter": start_reduce_scatter}


def gathers(marks, bits):
    """Return the collectives after which all ranks of the axis have the same."""
    def all_gather(self, x):
        if self.size == 1:
            return x
        mark = marks.of(x)
        if mark.partial & bits(self):
            marks.refuse(f"an all-gather over {self.name} of parts of a sum, as if they were whole")
        if bits(self) & ~mark.varies:
            marks.refuse(f"an all-gather over {self.name} of numbers that are equal on its ranks")
        return marks.set(torch.cat([x] * self.size), mark.without(bits(self)))

    def start_all_gather(self, out, x):
        mark = marks.of(x)
        out.copy_(torch.cat([x] * self.size))
        return marks.start(out, mark.without(bits(self)), f"an all-gather over {self.name}")

    def broadcast(self, x, source=0):
        return marks.set(x, marks.of(x).without(bits(self)))

    return {"all_gather": all_gather, "start_all_gather": start_all_gather, "broadcast": broadcast}


def sends(marks, bits):
    """Return what gives each rank of the axis rows of its own."""
    def all_to_all(self, x, send=None, receive=None):
        """Rows to the experts, or back: what differed by rows differs by experts, and the reverse.

        What has nothing to do with tokens is Muon's: slices of a buffer become the owners' whole matrices,
        and the reverse.
        """
        if self.size == 1:
            return x
        mark = marks.of(x)
        over = bits(self)
        if over & mark.partial and x.dtype.is_floating_point:
            marks.refuse(f"an all-to-all over {self.name} of parts of a sum")
        out = x.new_zeros(x.size(0) if receive is None else sum(receive), *x.shape[1:])
        n = min(len(x), len(out))
        out[:n] = x[:n]
        if over & mark.own and not mark.bits & DATA:
            if over & ~mark.own:
                marks.refuse(f"an all-to-all over {self.name} sends parts of matrices also along "
                             f"{marks.names(over & ~mark.own)}, where the ranks have the same slices")
            return marks.set(out, mark._replace(slices=mark.slices ^ over))
        if over & mark.own:
            return marks.set(out, mark.without(over)._replace(rows=mark.rows | over))
        return marks.set(out, mark.without(over)._replace(own=mark.own | over))

    def own_segments(self, x, dim, original=Axis.own_segments):
        out = original(self, x, dim)
        if self.size == 1:
            return out
        mark = marks.of(x)
        return marks.set(out, mark._replace(rows=mark.rows | bits(self)))

    return {"all_to_all": all_to_all, "own_segments": own_segments}


# -----------------------------------------------------------------------------
# Where no operation of torch says what happens

def attention_of(marks):
    """Return a stand-in for F.scaled_dot_product_attention that has its shapes and Marks only."""
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.marks = [marks.of(t) for t in (q, k, v)]
            ctx.save_for_backward(q, k, v)
            marks.needs_whole("attention", ctx.marks)
            return marks.set(q.clone(), union(ctx.marks))

        @staticmethod
        def backward(ctx, grad):
            """The gradient of keys that several ranks share is a sum over the queries of these ranks."""
            found = union([*ctx.marks, marks.of(grad)])
            grads = []
            for t, mark in zip(ctx.saved_tensors, ctx.marks, strict=True):
                shared = found.varies & ~mark.varies
                grads.append(marks.set(torch.ones_like(t), mark._replace(partial=found.partial | shared)))
            return tuple(grads)

    def attention(q, k, v, *args, **kwargs):
        return Attention.apply(q, k, v)
    return attention


def no_mask(n_queries, n_keys):
    """Stand for attention.lower_right_mask: attention_of() masks nothing."""


def attention_patches(marks, tp):
    """Return what is replaced in attention. tp: the bits of the axis that cuts heads."""
    def own_rows(original, p, rows):
        """Of a weight that all tp ranks have whole, each takes the rows of its own head."""
        if p is None or rows is None:
            return original(p, rows)
        cut = mark_as(marks, lambda mark: mark._replace(features=mark.features | tp), same)
        return cut(original(p, rows))

    def sum_of_heads(original, x, axis):
        """All ranks have this sum. So a gradient of it that differs is a part: that of a rank's own heads."""
        return mark_as(marks, same, moved(tp, "features", "partial"))(original(x, axis))

    wrap = mock.patch.object
    return [wrap(torch.nn.functional, "scaled_dot_product_attention", attention_of(marks)),
            wrap(attention, "lower_right_mask", no_mask),
            wrap(attention, "sum_over_ranks", around(attention.sum_over_ranks, sum_of_heads)),
            *[wrap(module, "select_rows", around(layers.select_rows, own_rows))
              for module in (layers, attention, lora)]]


def around(original, replacement):
    """Return a function or method that calls replacement(original, *arguments)."""
    def call(*args, **kwargs):
        return replacement(original, *args, **kwargs)
    return call


def mark_as(marks, after, backward):
    """Return the identity with a gradient that changes Marks: after(mark) forward, backward(mark) back."""
    class MarkAs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return marks.set(x.clone(), after(marks.of(x)))

        @staticmethod
        def backward(ctx, grad):
            return marks.set(grad.clone(), backward(marks.of(grad)))
    return MarkAs.apply


def same(mark):
    return mark


def moved(bits, source, target):
    """Return a function that moves these bits of a Mark from one kind to another."""
    def move(mark):
        bits_there = getattr(mark, source) & bits
        return mark._replace(**{source: getattr(mark, source) & ~bits,
                                target: getattr(mark, target) | bits_there})
    return move


def own_memory(master):
    """Return the tensor that has a master's memory: with --split-masters, its low bits beside the weight."""
    return getattr(master, "low", master)


# -----------------------------------------------------------------------------
# Layouts without common digits

def with_common_digits(mesh, n_experts):
    """Return the --ep and --shard nearest to the mesh's that have common digits with its other axes."""
    tp = mesh.tp.size
    cp = mesh.cp.size
    ep = mesh.ep.size
    stage = mesh.stage.size
    world = mesh.world.size
    block = mesh.stage.sharing().shard.size
    shard = block // tp if mesh.stage.shard_sharing else 0
    parts = [size for size in range(1, stage + 1) if stage % size == 0]

    def distance(option):
        return (option[0] != ep) + (option[1] != shard), abs(option[0] - ep), abs(option[1] - shard)

    for new_ep, new_shard in sorted(itertools.product(parts, parts if shard else [0]), key=distance):
        borders = sorted({1, tp, tp * cp, tp * new_shard or block, stage, world, new_ep})
        if n_experts % new_ep or any(high % low for low, high in itertools.pairwise(borders)):
            continue
        with contextlib.suppress(ValueError):
            check_ranks(world, tp, mesh.pp.size, new_ep, n_experts, cp, shard=new_shard)
            changed = {"ep": new_ep} if new_ep != ep else {}
            return nearest.as_flags(changed | ({"shard": new_shard} if new_shard != shard else {}))
    return "--ep 1 --shard 1"

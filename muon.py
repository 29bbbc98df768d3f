"""Muon: the matrices inside blocks move along their orthogonalised momentum. AdamW does the rest.

    orthogonalise  the Newton-Schulz iteration, for many matrices at once, cut over tp or whole
    Matrix         where the elements of one matrix are
    WholeMatrices  under ZeRO, brings each matrix to one rank and its update back
    Muon           the update; optim.Optimizer calls it

Sources: kellerjordan.github.io/posts/muon; the size of an update is that of arXiv:2502.16982. The
formula is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw".

A matrix that tp cuts is never gathered. The iteration needs only a Gram matrix, and the Gram matrix
over the side that is not cut is a sum over the ranks:

    X = [X_0, X_1]   cut by columns:  X X^T = X_0 X_0^T + X_1 X_1^T
    X = [X_0; X_1]   cut by rows:     X^T X = X_0^T X_0 + X_1^T X_1

Both are (C, C), because tp cuts the other side of every matrix in a block. So each iteration has
one all-reduce of (C, C), and every rank then multiplies its own share.

Under ZeRO a rank holds a slice of each bucket (ddp.py has a drawing), and slices begin and end
inside matrices. Gradients, momenta and masters stay cut in this way. Only for the iteration, an
all_to_all brings the parts of each matrix to one rank, its owner, and another takes the parts of
the result back. The drawing shows a bucket of three matrices, cut for four ranks:

    slices        | rank 0      | rank 1      | rank 2      | rank 3      |
    matrices      | w2                | w1                | wo        |  - padding
    all_to_all    rank 0 has w2, rank 1 has w1, rank 2 has wo; other buckets' matrices go to rank 3
    all_to_all    each rank has its slice of the update
"""
import itertools
import math
from typing import Any, NamedTuple

import torch

from config import ceil_div
from parallel import Axis

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5
ITERATIONS = 5
EPS = 1e-7  # the least norm by which a matrix is divided
UPDATE_RMS = 0.2  # the root mean square of an update, about that of AdamW's
BATCH_ELEMENTS = 2**26  # matrices of one shape are computed together, up to this many elements
ALONE = Axis("alone")  # the axis of a matrix that is not cut


# -----------------------------------------------------------------------------
# The iteration

def orthogonalise(x, cut=None, axis=ALONE):
    """Set all singular values of each matrix to about 1: (k, rows, columns) -> the same shape.

    With x = U S V^T the result is near U V^T. Each iteration replaces every singular value s by
    a s + b s^3 + c s^5. cut: the dimension of a matrix, 0 or 1, that is cut over `axis`, or None.
    """
    is_turned = x.size(1) > x.size(2) if cut is None else cut == 0
    if is_turned:
        x = x.mT
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    squares = axis.all_reduce(norms.square())  # SUM of k numbers, over tp
    x = (x / squares.sqrt().clamp(min=EPS)).to(x.dtype)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = axis.all_reduce(x @ x.mT)  # SUM of k matrices (C, C), over tp
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, polynomial, x, beta=linear)
    return x.mT if is_turned else x


def update_scale(full_shape):
    """Return the factor that gives an orthogonalised matrix the root mean square UPDATE_RMS.

    full_shape: of the whole matrix, whatever share of it a rank has.
    """
    return UPDATE_RMS * math.sqrt(max(full_shape))


# -----------------------------------------------------------------------------
# Where the matrices are

class Matrix(NamedTuple):
    """A matrix of a bucket: this rank's share of it, if tp cuts it."""
    shape: tuple       # (rows, columns) on this rank
    full_shape: tuple  # (rows, columns) of the whole matrix
    parts: Any         # {rank: slice}: where the elements are in each rank's vector of slices

    @property
    def cut(self):
        """The dimension along which tp cuts the matrix, or None."""
        for dim in (0, 1):
            if self.shape[dim] < self.full_shape[dim]:
                return dim
        return None

    @property
    def work(self):
        """The multiplications of one iteration, up to a factor."""
        rows, columns = self.shape
        return rows * columns * min(self.full_shape)


def shapes_of(params):
    """Return (shape on this rank, full shape) of each matrix among a bucket's parameters.

    The experts of a layer are one parameter, and each of them is a matrix of its own.
    """
    shapes = []
    for p in params:
        shape = tuple(p.shape[-2:])
        n_matrices = p.numel() // math.prod(shape)
        shapes += itertools.repeat((shape, tuple(p.full_shape[-2:])), n_matrices)
    return shapes


def matrices_of(shapes, length, begin):
    """Return the Matrices of a bucket, which is cut into slices of `length` elements.

    shapes: from shapes_of. begin: where the bucket's slice starts in each rank's vector.
    """
    found = []
    start = 0
    for shape, full_shape in shapes:
        end = start + math.prod(shape)
        parts = {}
        for rank in range(start // length, ceil_div(end, length)):
            part_begin = max(start, rank * length)
            part_end = min(end, (rank + 1) * length)
            shift = begin - rank * length
            parts[rank] = slice(part_begin + shift, part_end + shift)
        found.append(Matrix(shape, full_shape, parts))
        start = end
    return found


def owned_matrices(shapes, lengths, n_ranks):
    """Return the Matrices that each rank owns. shapes, lengths: one entry per bucket."""
    matrices = []
    begin = 0
    for shapes_of_bucket, length in zip(shapes, lengths, strict=True):
        matrices += matrices_of(shapes_of_bucket, length, begin)
        begin += length
    return assign_owners(matrices, n_ranks)


def assign_owners(matrices, n_ranks):
    """Return the list of matrices of each rank: the largest first, each to the least busy rank."""
    owned = [[] for _ in range(n_ranks)]
    busy = [0] * n_ranks
    for matrix in sorted(matrices, key=lambda matrix: -matrix.work):
        rank = busy.index(min(busy))
        owned[rank].append(matrix)
        busy[rank] += matrix.work
    return owned


class Batch(NamedTuple):
    """Matrices of one shape that are computed together."""
    matrix: Matrix  # the first of them
    places: list    # slices of the received numbers, which hold the matrices one after the other


class WholeMatrices:
    """The matrices of all buckets of one axis. Each is whole on one rank while it is computed.

    A rank's vector is its slices of all these buckets, joined. Without ZeRO every rank has all
    elements, so nothing is sent. With --shard, each shard computes all matrices by itself.
    """

    def __init__(self, buckets, tp):
        self.buckets = buckets
        self.tp = tp
        self.axis = buckets[0].shard
        self.is_shared = buckets[0].n_slices > 1
        self.sizes = [bucket.master.numel() for bucket in buckets]
        shapes = [shapes_of(bucket.params) for bucket in buckets]
        owned = owned_matrices(shapes, self.sizes, buckets[0].n_slices)
        rank = self.axis.rank
        self.outgoing = []  # slices of this rank's vector, in the order in which they are sent
        self.sent = []      # elements for each rank
        for others in owned:
            parts = [matrix.parts[rank] for matrix in others if rank in matrix.parts]
            self.outgoing += parts
            self.sent.append(sum(map(length_of, parts)))
        self.received = []  # elements from each rank
        self.batches = self.make_batches(owned[rank])

    def make_batches(self, matrices):
        """Return the Batches of this rank's matrices, and fill self.received."""
        places = {id(matrix): [] for matrix in matrices}
        end = 0
        for rank in range(len(self.sent)):
            start = end
            for matrix in matrices:
                if rank in matrix.parts:
                    begin, end = end, end + length_of(matrix.parts[rank])
                    places[id(matrix)].append(slice(begin, end))
            self.received.append(end - start)
        batches = {}
        for matrix in matrices:
            place = places[id(matrix)] if self.is_shared else [matrix.parts[0]]
            alike = batches.setdefault((matrix.shape, matrix.full_shape), [Batch(matrix, [])])
            if sum(map(length_of, alike[-1].places)) >= BATCH_ELEMENTS:
                alike.append(Batch(matrix, []))
            alike[-1].places.extend(place)
        return list(itertools.chain.from_iterable(batches.values()))

    def orthogonalise(self, vector):
        """Replace every matrix in the ranks' vectors by its update. Collective over the axis."""
        received = self.collect(vector)
        for batch in self.batches:
            parts = [received[place] for place in batch.places]
            matrix = batch.matrix
            x = torch.cat(parts).view(-1, *matrix.shape)
            axis = ALONE if matrix.cut is None else self.tp
            update = orthogonalise(x, matrix.cut, axis) * update_scale(matrix.full_shape)
            copy_into(parts, update.reshape(-1))
        if self.is_shared:
            self.hand_back(received, vector)

    def collect(self, vector):
        """Return the elements of this rank's own matrices, which all ranks have sent."""
        if not self.is_shared:
            return vector
        parts = [vector[part] for part in self.outgoing]
        outgoing = torch.cat([vector[:0], *parts])  # A slice that is all padding has no parts.
        # Each rank sends the others their matrices' elements in its slices, over the shard.
        return self.axis.all_to_all(outgoing, self.sent, self.received)

    def hand_back(self, received, vector):
        """Send the updates to where their elements came from, into the ranks' vectors."""
        # The updates go back to the slices, over the shard.
        updates = self.axis.all_to_all(received, self.received, self.sent)
        copy_into([vector[part] for part in self.outgoing], updates)


def copy_into(parts, numbers):
    """Fill the tensors `parts`, (n,) each, one after the other with numbers (sum of n,)."""
    if parts:
        pieces = numbers.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, list(pieces))


def length_of(part):
    """Return the number of elements of a slice."""
    return part.stop - part.start


# -----------------------------------------------------------------------------
# The update

class Muon:
    """What torch.optim.Muon does with Nesterov momentum, with decoupled weight decay.

    state holds the momentum of each bucket's masters. In a 16-bit model the iteration computes in
    bf16, as torch's class always does, and otherwise in the masters' dtype.
    """
    moments = ("momentum",)

    def __init__(self, cfg, data_parallel):
        """Make the state of the matrices inside blocks (ddp.uses_muon)."""
        self.momentum = cfg.momentum
        self.decay = cfg.weight_decay
        self.lr_factor = cfg.muon_lr_factor
        self.buckets = []
        self.state = {}
        of_axis = {}  # name of an axis: buckets
        for bucket in data_parallel.buckets:
            if bucket.contents.optimizer != "muon":
                continue
            self.buckets.append(bucket)
            self.state[bucket.master] = {"momentum": torch.zeros_like(bucket.master)}
            of_axis.setdefault(bucket.contents.reduction_axis, []).append(bucket)
        tp = data_parallel.mesh.tp
        self.groups = [WholeMatrices(alike, tp) for alike in of_axis.values()]

    def step(self, lr, divisor, not_finite):
        """Update the masters. The arguments are those of AdamW.step. Collective."""
        for group in self.groups:
            vector = self.directions(group, divisor, not_finite)
            # All matrices of a shape are computed together, in bf16 in a 16-bit model.
            group.orthogonalise(vector)
            updates = vector.split(group.sizes)
            for bucket, update in zip(group.buckets, updates, strict=True):
                master = bucket.master
                # In a step that is not taken the rate is 0, and the update is finite.
                rate = lr * self.lr_factor * (1 - not_finite).to(master.dtype)
                master.mul_(1 - rate * self.decay)
                master.sub_(rate * update.to(master.dtype))

    def directions(self, group, divisor, not_finite):
        """Add the gradients to the momenta, and return what is to be orthogonalised, as one vector.

        Where not_finite is 1.0, the gradients count as 0 and the momenta stay as they are.
        """
        first = group.buckets[0]
        dtype = iteration_dtype(first.own.dtype)
        vector = torch.empty(sum(group.sizes), dtype=dtype, device=divisor.device)
        directions = vector.split(group.sizes)
        for bucket, direction in zip(group.buckets, directions, strict=True):
            momentum = self.state[bucket.master]["momentum"]
            grad = bucket.grad_total.to(momentum.dtype) / divisor
            grad = torch.where(not_finite > 0, 0.0, grad)
            taken = (1 - not_finite).to(momentum.dtype)
            momentum.lerp_(grad, taken * (1 - self.momentum))
            direction.copy_(grad.lerp(momentum, self.momentum))  # Nesterov's look ahead
        return vector


def iteration_dtype(model_dtype):
    """Return the dtype in which the matrices are orthogonalised; fp16's range is too small."""
    return torch.bfloat16 if model_dtype.itemsize == 2 else model_dtype

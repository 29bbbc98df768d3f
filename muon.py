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

Both are (C, C), because tp cuts the other side of every matrix in a block. So each Gram matrix has
one all-reduce of (C, C), and every rank then multiplies its own share.

One step of the iteration is X -> P X with a polynomial P in the Gram matrix G of X. The Gram matrix
of P X is P G P, which needs no X. So where X is much longer than it is wide, several steps multiply
only matrices (C, C), and X is multiplied once, with the product of their polynomials:

    G_1 = X X^T,  G_2 = P_1 G_1 P_1,  G_3 = P_2 G_2 P_2,  X -> (P_3 P_2 P_1) X

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
from typing import NamedTuple

import torch

from config import ceil_div
from ops import backend
from parallel import Axis

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5
# Steps of the iteration from one Gram matrix. A step multiplies a negative eigenvalue, which comes
# from rounding, by 12, so five steps have two Gram matrices. Three steps and then two have smaller
# errors than two and then three (docs/muon.md). A short matrix is cheaper with five Gram matrices.
STEPS_OF_LONG = 3, 2
STEPS_OF_SHORT = 1, 1, 1, 1, 1
LONG = 1.5  # From this ratio of its sides on, a matrix is long: there both need the same products.
EPS = 1e-7  # the least norm by which a matrix is divided
NORM = 16.0  # of a matrix when the iteration starts: its Gram matrix is no subnormal number in fp16
UPDATE_RMS = 0.2  # the root mean square of an update, about that of AdamW's
BATCH_ELEMENTS = 2**27  # matrices of one shape are computed together, up to this many elements
ALONE = Axis("alone")  # the axis of a matrix that is not cut


# -----------------------------------------------------------------------------
# The iteration

def orthogonalise(x, cut=None, axis=ALONE, *, scale=1.0, out=None):
    """Set all singular values of each matrix to about scale: (k, rows, columns) -> the same shape.

    With x = U S V^T the result is near U V^T. Each of five steps replaces every singular value s by
    a s + b s^3 + c s^5. cut: the dimension of a matrix, 0 or 1, that is cut over `axis`, or None.
    out: the tensor to write, which may share x's memory; in fp16 for an x in bf16.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=iteration_dtype(x.dtype), device=x.device)
    is_tall = x.size(1) > x.size(2) if cut is None else cut == 0
    side = x.size(2 if is_tall else 1)  # of the Gram matrix
    stretches = steps_per_gram(side, x[0].numel() // side)
    # Two tensors take turns as the target of a product, so that the last product writes `out`.
    target = out
    spare = torch.empty_like(out)
    if len(stretches) % 2 == 1:
        target, spare = spare, target

    x = normalised(x, axis, target)
    for i, n_steps in enumerate(stretches):
        gram = x.mT @ x if is_tall else x @ x.mT
        gram = axis.all_reduce(gram)  # SUM of k (C, C), over tp
        polynomial = product_of_polynomials(gram, n_steps)
        pair = (x, polynomial) if is_tall else (polynomial, x)
        target, spare = spare, target
        if i < len(stretches) - 1:
            x = torch.bmm(*pair, out=target)
    # The last product also multiplies by a number: beta=0 leaves out the sum.
    return torch.baddbmm(x, *pair, beta=0, alpha=scale / NORM, out=target)


def normalised(x, axis, out):
    """Write each matrix of x with the norm NORM into out, which may share x's memory."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    squares = axis.all_reduce(norms.square())  # SUM of k numbers, over tp
    return torch.mul(x, NORM / squares.sqrt().clamp(min=EPS), out=out)


def product_of_polynomials(gram, n_steps):
    """Return the product of n_steps polynomials: Gram matrices (k, C, C) -> the same shape.

    The polynomial of a step is a + b G + c G^2. All of them commute, because each is one of G_1.
    """
    linear, cubic, quintic = COEFFICIENTS
    product = None
    for i in range(n_steps):
        polynomial = torch.baddbmm(
            gram, gram, gram, beta=cubic / NORM**2, alpha=quintic / NORM**4)
        polynomial.diagonal(dim1=1, dim2=2).add_(linear)
        product = polynomial if product is None else polynomial @ product
        if i < n_steps - 1:
            gram = polynomial @ (polynomial @ gram)
    return product


def steps_per_gram(side, other):
    """How many steps each Gram matrix serves. side: of the Gram matrix; other: of x."""
    return STEPS_OF_LONG if other >= LONG * side else STEPS_OF_SHORT


def direction_dtype(model_dtype):  # of what is orthogonalised; fp16 is too narrow for momenta
    return torch.bfloat16 if model_dtype.itemsize == 2 else model_dtype


def iteration_dtype(model_dtype):  # as long as that of directions
    return torch.float16 if model_dtype.itemsize == 2 else model_dtype


# -----------------------------------------------------------------------------
# Where the matrices are

class Matrix(NamedTuple):
    """A matrix of a bucket: this rank's share of it, if tp cuts it."""
    shape: tuple       # (rows, columns) on this rank
    full_shape: tuple  # (rows, columns) of the whole matrix
    parts: dict        # {rank: slice}: where the elements are in each rank's vector of slices

    @property
    def cut(self):  # the dimension along which tp cuts the matrix, or None
        for dim in (0, 1):
            if self.shape[dim] < self.full_shape[dim]:
                return dim
        return None

    @property
    def sides(self):  # of the Gram matrix, and the other one, on this rank
        rows, columns = self.shape
        if self.cut is None:
            return min(rows, columns), max(rows, columns)
        return (columns, rows) if self.cut == 0 else (rows, columns)

    @property
    def work(self):  # the multiplications of the iteration
        side, other = self.sides
        work = 0
        for n_steps in steps_per_gram(side, other):
            work += 2 * side * side * other  # the Gram matrix, and the polynomials times the matrix
            work += (4 * n_steps - 3) * side**3  # product_of_polynomials()
        return work


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


def owned_matrices(shapes, lengths, n_ranks):
    """Return the Matrices that each rank owns: the largest first, each to the least busy rank.

    shapes: from shapes_of, for each bucket. lengths: elements of each bucket's slices.
    """
    matrices = []
    vector_begin = 0  # where the bucket's slice starts in each rank's vector
    for bucket_shapes, length in zip(shapes, lengths, strict=True):
        start = 0
        for shape, full_shape in bucket_shapes:
            end = start + math.prod(shape)
            parts = {}
            for rank in range(start // length, ceil_div(end, length)):
                shift = vector_begin - rank * length
                parts[rank] = slice(max(start + shift, vector_begin),
                                    min(end + shift, vector_begin + length))
            matrices.append(Matrix(shape, full_shape, parts))
            start = end
        vector_begin += length

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
    count: int
    places: list    # slices of the received numbers, which hold the matrices one after the other


def iteration_elements(matrix):
    """The elements that the iteration of a Matrix needs: two like it, six like its Gram matrix."""
    side, other = matrix.sides
    return 2 * side * other + 6 * side * side


def matrices_together(matrix, elements, count):
    """How many of `count` matrices like this one are computed together: all, or a power of two.

    elements: those of this rank's slices, in all matrices. The batch needs no more than these, so
    in a 16-bit model directions and batch need no more memory than AdamW's second moment would.
    Experts come in powers of two.
    """
    most = min(BATCH_ELEMENTS // math.prod(matrix.shape), elements // iteration_elements(matrix))
    if count <= most:
        return count
    return 2 ** (max(1, most).bit_length() - 1)


def received_places(matrices, n_ranks):
    """Return where an owner receives the parts of its matrices, and the elements from each rank.

    The first is a list of slices for each matrix.
    """
    places = [[] for _ in matrices]
    received = []
    end = 0
    for rank in range(n_ranks):
        start = end
        for matrix, slices in zip(matrices, places, strict=True):
            if rank in matrix.parts:
                begin, end = end, end + length_of(matrix.parts[rank])
                slices.append(slice(begin, end))
        received.append(end - start)
    return places, received


def batches_of(matrices, places, elements):
    """Return the Batches of an owner's matrices. places: the slices of each matrix."""
    alike = {}  # (shape, full shape): numbers of matrices
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.full_shape), []).append(i)
    batches = []
    for numbers in alike.values():
        first = matrices[numbers[0]]
        size = matrices_together(first, elements, len(numbers))
        for begin in range(0, len(numbers), size):
            chosen = numbers[begin:begin + size]
            in_order = itertools.chain.from_iterable(places[i] for i in chosen)
            batches.append(Batch(first, len(chosen), list(in_order)))
    return batches


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
        # self.received has the number of elements that come from each rank.
        places, self.received = received_places(owned[rank], len(owned))
        if not self.is_shared:
            places = [[matrix.parts[0]] for matrix in owned[rank]]
        self.batches = batches_of(owned[rank], places, sum(self.sizes))

    def orthogonalise(self, vector):
        """Return the updates of this rank's slices, in the memory of vector. Collective.

        In a 16-bit model the vector is in bf16, and the updates are in fp16.
        """
        received = vector
        if self.is_shared:
            parts = [vector[part] for part in self.outgoing]
            outgoing = torch.cat([vector[:0], *parts])  # A slice that is all padding has no parts.
            # Each rank sends the others their matrices' elements in its slices, over the shard.
            received = self.axis.all_to_all(outgoing, self.sent, self.received)
        dtype = iteration_dtype(vector.dtype)
        updates = received.view(dtype)
        for batch in self.batches:
            self.orthogonalise_batch(batch, received, updates)
        if self.is_shared:
            self.hand_back(updates, vector.view(dtype))
        return vector.view(dtype)

    def orthogonalise_batch(self, batch, received, updates):
        """Write a batch's updates where its directions are. Both are (n,).

        This is a function of its own so that its tensors are freed before the next batch.
        """
        matrix = batch.matrix
        x = torch.cat([received[place] for place in batch.places]).view(-1, *matrix.shape)
        scale = UPDATE_RMS * math.sqrt(max(matrix.full_shape))  # of the whole matrix
        found = orthogonalise(x, matrix.cut, ALONE if matrix.cut is None else self.tp,
                              scale=scale, out=x.view(updates.dtype))
        copy_into([updates[place] for place in batch.places], found.view(-1))

    def hand_back(self, found, vector):
        """Send the updates to where their elements came from, into the ranks' vectors."""
        # As many elements go back to the slices, over the shard.
        updates = self.axis.all_to_all(found, self.received, self.sent)
        copy_into([vector[part] for part in self.outgoing], updates)


def copy_into(parts, numbers):
    """Fill the tensors `parts`, (n,) each, one after the other with numbers (sum of n,)."""
    if parts:
        pieces = numbers.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, list(pieces))


def length_of(part):
    return part.stop - part.start


# -----------------------------------------------------------------------------
# The update

class Muon:
    """What torch.optim.Muon does with Nesterov momentum, with decoupled weight decay.

    state holds the momentum of each bucket's masters. In a 16-bit model the directions are in bf16,
    which has the range of fp32. The iteration computes in fp16, which is eight times as precise: it
    first gives every matrix the same norm. In other models everything has the masters' dtype.
    """
    moments = ("momentum",)

    def __init__(self, cfg, data_parallel):
        self.data_parallel = data_parallel
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
        # On a GPU two kernels of ops/kernels.py read and write each number once: 26 bytes per
        # weight, without the iteration. If you change add_gradient or update, change the kernels,
        # or set this to False.
        self.use_triton = any(backend.use_triton(bucket.master) for bucket in self.buckets)
        tp = data_parallel.mesh.tp
        self.groups = [WholeMatrices(alike, tp) for alike in of_axis.values()]

    def step(self, lr, divisor, not_finite):
        """Update masters and weights. The arguments are those of AdamW.step. Collective.

        Where not_finite is 1.0, momenta and masters stay as they are.
        """
        for group in self.groups:
            dtype = direction_dtype(group.buckets[0].own.dtype)
            vector = torch.empty(sum(group.sizes), dtype=dtype, device=divisor.device)
            directions = vector.split(group.sizes)
            for bucket, direction in zip(group.buckets, directions, strict=True):
                momentum = self.state[bucket.master]["momentum"]
                self.add_gradient(momentum, bucket.grad_total, direction, divisor, not_finite)
            updates = group.orthogonalise(vector).split(group.sizes)
            for i in reversed(range(len(updates))):  # Roughly the first layers go first.
                self.update(group.buckets[i], updates[i], lr * self.lr_factor, not_finite)
                self.data_parallel.on_updated(group.buckets[i])

    def add_gradient(self, momentum, grad, direction, divisor, not_finite):
        """Add a gradient to its momentum, and write the direction: (n,) each."""
        if self.use_triton:
            from ops import kernels
            n = momentum.numel()
            grid = (ceil_div(n, 2048),)
            kernels.muon_direction[grid](
                momentum, grad, direction, divisor, not_finite, self.momentum, n, BLOCK=2048,
                num_warps=8)
            return
        grad = grad.to(momentum.dtype) / divisor
        grad = torch.where(not_finite > 0, 0.0, grad)
        taken = (1 - not_finite).to(momentum.dtype)
        momentum.lerp_(grad, taken * (1 - self.momentum))
        direction.copy_(grad.lerp(momentum, self.momentum))  # Nesterov's look ahead

    def update(self, bucket, update, rate, not_finite):
        """Update a bucket's masters with update (n,), and round them into the model's weights."""
        master = bucket.master
        if self.use_triton:
            from ops import kernels
            n = master.numel()
            grid = (ceil_div(n, 2048),)
            kernels.muon_update[grid](
                master, update, bucket.own, not_finite, rate, 1 - rate * self.decay, n,
                OUT=bucket.own.dtype != master.dtype, BLOCK=2048, num_warps=8)
            return
        # In a step that is not taken the rate is 0, and the update is finite.
        rate = rate * (1 - not_finite).to(master.dtype)
        master.mul_(1 - rate * self.decay)
        master.sub_(rate * update.to(master.dtype))
        bucket.own.copy_(master)  # a no-op where master and own are one tensor

"""Muon: the matrices inside blocks move along their orthogonalised momentum. AdamW does the rest.

Sources: kellerjordan.github.io/posts/muon; the size of an update is that of arXiv:2502.16982. The
formula is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw".

A matrix that tp cuts is never gathered. The iteration needs only a Gram matrix, and the Gram matrix
over the side that is not cut is a sum over the ranks:

    X = [X_0, X_1]   cut by columns:  X X^T = X_0 X_0^T + X_1 X_1^T
    X = [X_0; X_1]   cut by rows:     X^T X = X_0^T X_0 + X_1^T X_1

Both are (C, C), because tp cuts the other side of every matrix in a block. Every rank then
multiplies its own share.

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
import math
from typing import NamedTuple

import torch

from config import ceil_div
from parallel import Axis

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5
# Steps of the iteration from one Gram matrix. A step multiplies a negative eigenvalue, which comes
# from rounding, by 12, so five steps have two Gram matrices (docs/muon.md).
STEPS_OF_LONG = 3, 2
STEPS_OF_SHORT = 1, 1, 1, 1, 1
LONG = 1.5  # from this ratio of its sides on, a matrix is long: there both need the same products
EPS = 1e-7  # the least norm by which a matrix is divided
NORM = 16.0  # of a matrix when the iteration starts: its Gram matrix is no subnormal number in fp16
UPDATE_RMS = 0.2  # the root mean square of an update, about that of AdamW's
BATCH_ELEMENTS = 2**27  # matrices of one shape are computed together, up to this many elements
ALONE = Axis("alone")  # the axis of a matrix that is not cut


# The iteration

def orthogonalise(x, cut=None, axis=ALONE, *, scale=1.0):
    """Set all singular values of each matrix to about scale: (k, rows, columns) -> the same shape.

    With x = U S V^T the result is near U V^T. Each of five steps replaces every singular value s by
    a s + b s^3 + c s^5. cut: the dimension of a matrix, 0 or 1, that is cut over `axis`, or None.
    The memory of x is overwritten. For an x in bf16 the result is in fp16.
    """
    is_tall = x.size(1) > x.size(2) if cut is None else cut == 0
    side = x.size(2 if is_tall else 1)  # of the Gram matrix
    stretches = steps_per_gram(side, x[0].numel() // side)

    x = normalised(x, axis)
    spare = torch.empty_like(x)
    for i, n_steps in enumerate(stretches):
        gram = x.mT @ x if is_tall else x @ x.mT
        gram = axis.all_reduce(gram)  # SUM of k (C, C), over tp
        polynomial = product_of_polynomials(gram, n_steps)
        pair = (x, polynomial) if is_tall else (polynomial, x)
        if i < len(stretches) - 1:
            x, spare = torch.bmm(*pair, out=spare), x
    # The last product also multiplies by a number: beta=0 leaves out the sum.
    return torch.baddbmm(x, *pair, beta=0, alpha=scale / NORM, out=spare)


def normalised(x, axis):
    """Give each matrix of x the norm NORM, in the memory of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    squares = axis.all_reduce(norms.square())  # SUM of k numbers, over tp
    factors = NORM / squares.sqrt().clamp(min=EPS)
    return torch.mul(x, factors, out=x.view(iteration_dtype(x.dtype)))


def product_of_polynomials(gram, n_steps):
    """Gram matrices (k, C, C) -> the product of n_steps polynomials a + b G + c G^2, (k, C, C).

    All of them commute, because each is one of G_1.
    """
    linear, cubic, quintic = COEFFICIENTS
    product = None
    for i in range(n_steps):
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic / NORM**2, alpha=quintic / NORM**4)
        polynomial.diagonal(dim1=1, dim2=2).add_(linear)
        product = polynomial if product is None else polynomial @ product
        if i < n_steps - 1:
            gram = polynomial @ (polynomial @ gram)
    return product


def steps_per_gram(side, other):
    """How many steps each Gram matrix serves. side: of the Gram matrix; other: of x."""
    return STEPS_OF_LONG if other >= LONG * side else STEPS_OF_SHORT


def iteration_dtype(model_dtype):  # as long as that of directions
    return torch.float16 if model_dtype.itemsize == 2 else model_dtype


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

    @property
    def workspace(self):  # elements: two tensors like the matrix, six like its Gram matrix
        side, other = self.sides
        return 2 * side * other + 6 * side * side


def shapes_of(params):
    """[(shape on this rank, full shape)] of the matrices of a bucket's parameters."""
    shapes = []
    for p in params:  # (rows, columns), or (experts, rows, columns): each expert is a matrix
        shape = tuple(p.shape[-2:])
        shapes += [(shape, tuple(p.full_shape[-2:]))] * (p.numel() // math.prod(shape))
    return shapes


def owned_matrices(shapes, lengths, n_ranks):
    """[the Matrices that each rank owns]: the largest first, each to the least busy rank.

    shapes: from shapes_of, for each bucket. lengths: elements of each bucket's slices.
    """
    matrices = []
    base = 0  # where the bucket's slice starts in each rank's vector
    for bucket_shapes, length in zip(shapes, lengths, strict=True):
        start = 0
        for shape, full_shape in bucket_shapes:
            end = start + math.prod(shape)
            parts = {}
            for rank in range(start // length, ceil_div(end, length)):
                shift = base - rank * length  # from a place in the bucket to one in the vector
                parts[rank] = slice(max(start + shift, base), min(end + shift, base + length))
            matrices.append(Matrix(shape, full_shape, parts))
            start = end
        base += length

    owned = [[] for _ in range(n_ranks)]
    busy = [0] * n_ranks
    # Of a rank's matrices, those of one shape stand together.
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.work, matrix[:2])):
        rank = busy.index(min(busy))
        owned[rank].append(matrix)
        busy[rank] += matrix.work
    return owned


def batches_of(matrices, elements):
    """Lists of numbers of matrices: those of one shape that are computed together.

    A batch needs no more memory than `elements`, those of this rank's slices. So in a 16-bit model
    directions and batch need no more than AdamW's second moment would.
    """
    batches = []
    for i, matrix in enumerate(matrices):
        most = min(BATCH_ELEMENTS // math.prod(matrix.shape), elements // matrix.workspace)
        if i > 0 and matrix[:2] == matrices[i - 1][:2] and len(batches[-1]) < most:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class WholeMatrices:
    """The matrices of all buckets of one axis. Each is whole on one rank while it is computed.

    A rank's vector is its slices of all these buckets, joined.
    """

    def __init__(self, buckets, tp):
        self.buckets = buckets
        self.tp = tp
        self.axis = buckets[0].shard
        self.sizes = [bucket.master.numel() for bucket in buckets]
        shapes = [shapes_of(bucket.params) for bucket in buckets]
        owned = owned_matrices(shapes, self.sizes, self.axis.size)
        self.matrices = owned[self.axis.rank]
        self.batches = batches_of(self.matrices, sum(self.sizes))
        self.outgoing = []                # slices of this rank's vector, in the order of sending
        self.sent = []                    # elements to each rank
        self.pieces_of = [[] for _ in self.matrices]  # numbers of the pieces that arrive
        self.lengths = []                 # elements of each piece
        self.received = [0] * len(owned)  # elements from each rank
        rank = self.axis.rank
        for other, matrices in enumerate(owned):
            parts = [matrix.parts[rank] for matrix in matrices if rank in matrix.parts]
            self.outgoing += parts
            self.sent.append(sum(length_of(part) for part in parts))
            for i, matrix in enumerate(self.matrices):
                if other in matrix.parts:
                    self.pieces_of[i].append(len(self.lengths))
                    self.lengths.append(length_of(matrix.parts[other]))
                    self.received[other] += self.lengths[-1]

    def orthogonalise(self, vector):
        """The updates of this rank's slices, in the memory of vector. Collective."""
        dtype = iteration_dtype(vector.dtype)
        pieces = [vector[part] for part in self.outgoing]
        if self.axis.size == 1:  # without ZeRO
            self.compute_updates(pieces)
        else:
            # Each rank sends the others their matrices' elements in its slices, over the shard.
            outgoing = torch.cat([vector[:0], *pieces])  # a slice of padding alone has no pieces
            received = self.axis.all_to_all(outgoing, self.sent, self.received)
            self.compute_updates(received.split(self.lengths))
            self.hand_back(received.view(dtype), [piece.view(dtype) for piece in pieces])
        return vector.view(dtype)

    def compute_updates(self, pieces):
        """Write updates where directions are. pieces: (n,) each, parts of matrices."""
        for batch in self.batches:
            matrix = self.matrices[batch[0]]
            of_batch = [pieces[i] for number in batch for i in self.pieces_of[number]]
            x = torch.cat(of_batch).view(-1, *matrix.shape)
            axis = ALONE if matrix.cut is None else self.tp
            scale = UPDATE_RMS * math.sqrt(max(matrix.full_shape))
            update = orthogonalise(x, matrix.cut, axis, scale=scale).view(-1)
            torch._foreach_copy_([piece.view(update.dtype) for piece in of_batch],
                                 update.split([piece.numel() for piece in of_batch]))
            del x, update  # before the next batch needs memory

    def hand_back(self, updates, pieces):
        # As many elements go back to the slices, over the shard.
        updates = self.axis.all_to_all(updates, self.received, self.sent)
        if pieces:
            torch._foreach_copy_(pieces, updates.split([piece.numel() for piece in pieces]))


def length_of(part):
    return part.stop - part.start


# The update

class Muon:
    """Nesterov momentum and decoupled weight decay, as torch.optim.Muon has them.

    In a 16-bit model the directions are in bf16, which has the range of fp32. The iteration
    computes in fp16, which is eight times as precise: it first gives every matrix the same norm.
    """
    moments = ("momentum",)

    def __init__(self, cfg, data_parallel):
        self.momentum = cfg.momentum
        self.decay = cfg.weight_decay
        self.lr_factor = cfg.muon_lr_factor
        self.buckets = [b for b in data_parallel.buckets if b.optimizer == "muon"]
        self.state = {}
        of_axis = {}  # name of an axis: buckets
        for bucket in self.buckets:
            self.state[bucket.master] = {"momentum": torch.zeros_like(bucket.master)}
            of_axis.setdefault(bucket.axis.name, []).append(bucket)
        self.groups = [WholeMatrices(alike, data_parallel.mesh.tp) for alike in of_axis.values()]

    def step(self, lr, divisor, not_finite):
        """Update masters and weights. The arguments are those of AdamW.step. Collective."""
        for group in self.groups:
            dtype = group.buckets[0].own.dtype
            if dtype.itemsize == 2:
                dtype = torch.bfloat16  # fp16 is too narrow for momenta
            vector = torch.empty(sum(group.sizes), dtype=dtype, device=divisor.device)
            for bucket, direction in zip(group.buckets, vector.split(group.sizes), strict=True):
                momentum = self.state[bucket.master]["momentum"]
                add_gradient(momentum, bucket.grad_total, direction, divisor, not_finite,
                             self.momentum)
            updates = group.orthogonalise(vector).split(group.sizes)
            taken = (1 - not_finite).to(group.buckets[0].master.dtype)
            rate = lr * self.lr_factor * taken
            for i in reversed(range(len(updates))):  # Roughly the first layers go first.
                bucket = group.buckets[i]
                update_masters(bucket.master, updates[i], bucket.own, rate, self.decay)
                bucket.after_update()


# The two passes over memory, which --compile makes one kernel each (fast/compile.py)

def add_gradient(momentum, grad, direction, divisor, not_finite, beta):
    """Add a gradient to its momentum, and write the direction: (n,) each."""
    grad = grad.to(momentum.dtype) / divisor
    grad = torch.where(not_finite > 0, 0.0, grad)
    taken = (1 - not_finite).to(momentum.dtype)
    momentum.lerp_(grad, taken * (1 - beta))
    direction.copy_(grad.lerp(momentum, beta))  # Nesterov's look ahead


def update_masters(master, update, own, rate, decay):
    """Update masters with update, and round them into the model's weights own: (n,) each."""
    master.mul_(1 - rate * decay)
    master.sub_(rate * update.to(master.dtype))
    own.copy_(master)  # a no-op where master and own are one tensor

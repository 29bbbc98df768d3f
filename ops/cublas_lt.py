"""Matrix products by cuBLASLt, a library that torch brings.

A product can have the fastest algorithm (fast/products.py), a summand that is not copied first, or GELU and
its gradient (ops/gelu_mlp.py). The library is called by ctypes (docs.nvidia.com/cuda/cublas). It counts in
columns, where a matrix is its transpose, so it computes out^T = b^T a^T.
"""
import ctypes
import functools
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from types import SimpleNamespace
from typing import NamedTuple

import torch

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")  # torch has loaded one of them
# The numbers of its header cublasLt.h
BF16 = 14  # cudaDataType of the matrices: no other was run on a GPU
FP32 = 0  # cudaDataType of the factors of product and summand
SUM_IN_FP32 = 68  # cublasComputeType

# Attributes of a product, whose first factor is b
TRANSPOSE_B = 3
TRANSPOSE_A = 4
EPILOGUE = 7
AUX = 11  # the address of a second matrix, like the result
AUX_WIDTH = 12
# What the library computes besides the product. AUX is what gelu takes: GELU_AUX writes it, DGELU reads it.
PRODUCT_ONLY = 1
GELU_AUX = 160
DGELU = 192

WORKSPACE = 1  # attribute of a preference: the bytes of memory that an algorithm may use
MOST_WORKSPACE = 32 * 2**20
PROPOSALS = 8  # how many algorithms the library is asked for
ALIGNMENT = 256  # bytes: the library expects it of each address
WIDTHS = 8  # it wants widths that are multiples of this
DEVICE = "cuda"  # where the matrices are that it multiplies

settings = SimpleNamespace(measured=False)  # whether the run of this process measures its products
plans = {}  # the Plans that were made, by Shape
choices = {}  # the algorithms that were chosen for that run, by the names of their Shapes; "" is torch


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the bytes of memory that it needs."""
    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]

    def name(self):  # the same on all ranks
        return bytes(self.algorithm).hex()


class Factor(NamedTuple):
    by_column: bool  # its columns are contiguous, and not its rows
    stride: int      # how many numbers lie between the starts of two columns, or two rows


class Shape(NamedTuple):
    """What a Plan is made for: out (m, n) = a (m, k) b (k, n), and what else is computed."""
    m: int
    k: int
    n: int
    a: Factor
    b: Factor
    epilogue: int
    adds: bool  # a matrix (m, n) is added


@functools.cache
def library():
    for name in NAMES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # torch's, and none of the machine's
        except OSError:
            continue
    return None


def call(name, *args):
    status = getattr(library(), f"cublasLt{name}")(*args)
    if status:
        raise RuntimeError(f"cuBLASLt: {name} returned {status}")


@functools.cache
def handle(device):
    made = c_void_p()
    with torch.cuda.device(device):
        call("Create", byref(made))
    return made


def layout(rows, width, factor):
    contiguous, other = (rows, width) if factor.by_column else (width, rows)
    made = c_void_p()
    stride = c_int64(factor.stride)
    call("MatrixLayoutCreate", byref(made), BF16, c_uint64(contiguous), c_uint64(other), stride)
    return made


class Plan:
    """How the library multiplies in one Shape. Two threads must not use one Plan at the same time.

    chosen: the proposal that multiplies, or None where torch does. The device must be the current one.
    """

    def __init__(self, shape, device):
        self.shape = shape
        self.device = device
        self.product = c_void_p()
        call("MatmulDescCreate", byref(self.product), SUM_IN_FP32, FP32)
        self.set(TRANSPOSE_B, c_int32(shape.b.by_column))
        self.set(TRANSPOSE_A, c_int32(shape.a.by_column))
        self.set(EPILOGUE, c_uint32(shape.epilogue))
        if shape.epilogue != PRODUCT_ONLY:
            self.set(AUX_WIDTH, c_int64(shape.n))
        self.a = layout(shape.m, shape.k, shape.a)
        self.b = layout(shape.k, shape.n, shape.b)
        self.out = layout(shape.m, shape.n, Factor(False, shape.n))
        self.proposals = self.ask()  # the one that the library expects to be fastest first
        self.choose()

    def choose(self):
        name = choices.get(str(self.shape))
        self.chosen = next((proposal for proposal in self.proposals if proposal.name() == name), None)
        # A single proposal with GELU took longer than torch, in the one such shape that was looked at.
        if name is None and self.shape.epilogue != PRODUCT_ONLY and len(self.proposals) > 1:
            self.chosen = self.proposals[0]

    def set(self, attribute, value):
        call("MatmulDescSetAttribute", self.product, attribute, byref(value), c_size_t(sizeof(value)))

    def ask(self):
        preference = c_void_p()
        call("MatmulPreferenceCreate", byref(preference))
        most = c_uint64(MOST_WORKSPACE)
        call("MatmulPreferenceSetAttribute", preference, WORKSPACE, byref(most), c_size_t(8))
        found = (Proposal * PROPOSALS)()
        count = c_int()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            handle(self.device), self.product, self.b, self.a, self.out, self.out, preference,
            PROPOSALS, found, byref(count))
        call("MatmulPreferenceDestroy", preference)
        return [] if status else [proposal for proposal in found[:count.value] if proposal.status == 0]

    def multiply(self, a, b, out, other=None):
        """Write the result to out (m, n), by the chosen proposal. other (m, n): the aux or the summand."""
        proposal = self.chosen
        adds = self.shape.adds
        if other is not None and not adds:
            self.set(AUX, c_void_p(other.data_ptr()))
        workspace = torch.empty(proposal.workspace, dtype=torch.uint8, device=self.device)
        added = other if adds else out
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        beta = c_float(adds)  # out = 1 * product + beta * added
        call("Matmul", handle(self.device), self.product, byref(c_float(1.0)), c_void_p(b.data_ptr()), self.b,
             c_void_p(a.data_ptr()), self.a, byref(beta), c_void_p(added.data_ptr()), self.out,
             c_void_p(out.data_ptr()), self.out, byref(proposal.algorithm),
             c_void_p(workspace.data_ptr()), c_size_t(proposal.workspace), stream)


def factor_of(matrix):
    """Return the Factor of a matrix, or None if the library cannot read it."""
    if matrix.dtype != torch.bfloat16 or matrix.data_ptr() % ALIGNMENT or 1 not in matrix.stride():
        return None
    by_column = matrix.stride(1) != 1
    contiguous = matrix.T if by_column else matrix
    stride, length = contiguous.stride(0), contiguous.size(1)
    if stride < length or stride % WIDTHS or length % WIDTHS:
        return None
    return Factor(by_column, stride)


def plan_for(a, b, epilogue=PRODUCT_ONLY, other=None):
    """Return the Plan for a (m, k) times b (k, n), or None where torch multiplies. other: aux or summand."""
    if a.device.type != DEVICE or library() is None or a.numel() == 0 or b.size(1) % WIDTHS:
        return None
    factors = [factor_of(a), factor_of(b)]
    if other is not None:
        # torch also adds a summand that is broadcast.
        if other.shape != (a.size(0), b.size(1)) or not other.is_contiguous():
            return None
        factors.append(factor_of(other))
    if None in factors:
        return None
    adds = other is not None and epilogue == PRODUCT_ONLY
    shape = Shape(*a.shape, b.size(1), factors[0], factors[1], epilogue, adds)
    if shape not in plans:
        plans[shape] = Plan(shape, a.device)
    return plans[shape] if plans[shape].chosen else None


def forget():
    settings.measured = False
    plans.clear()
    choices.clear()


# -----------------------------------------------------------------------------
# Products by the algorithm that was chosen for their shape, or else, as on CPUs, by torch

def multiply(a, b):
    """Return a b, (m, n): a (m, k), b (k, n)."""
    return product(a, b) if settings.measured else a @ b


@torch.library.custom_op("nanoshard::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    plan = plan_for(a, b)
    if plan is None:
        return torch.mm(a, b)
    out = a.new_empty(a.size(0), b.size(1))
    plan.multiply(a, b, out)
    return out


@product.register_fake
def _(a, b):
    return a.new_empty(a.size(0), b.size(1))


@torch.library.custom_op("nanoshard::sum_with_product", mutates_args=())
def sum_with_product(summand: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return summand + a b, (m, n). torch copies the summand first, and adds the product to the copy."""
    plan = plan_for(a, b, other=summand)
    if plan is None:
        return torch.addmm(summand, a, b)
    out = a.new_empty(a.size(0), b.size(1))
    plan.multiply(a, b, out, summand)
    return out


@sum_with_product.register_fake
def _(summand, a, b):
    return a.new_empty(a.size(0), b.size(1))

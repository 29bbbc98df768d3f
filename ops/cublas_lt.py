"""Matrix products by cuBLASLt, a library that torch brings.

torch multiplies by cuBLAS, which chooses among its algorithms by rules. Here a product can have the algorithm
that was measured to be the fastest (fast/products.py), a summand that is not copied first, or GELU and its
gradient (ops/gelu_mlp.py). The library is called by ctypes (docs.nvidia.com/cuda/cublas, "Using the cuBLASLt
API"). The numbers below are those of its header cublasLt.h. It counts in columns, where a matrix is its
transpose, so instead of out = a b it computes out^T = b^T a^T.
"""
import ctypes
import functools
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from types import SimpleNamespace
from typing import NamedTuple

import torch

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")  # torch has loaded one of them
BF16 = 14  # cudaDataType of the matrices: no other was run on a GPU
FP32 = 0  # cudaDataType of the factors of product and summand
SUM_IN_FP32 = 68  # cublasComputeType

# Attributes of a product. The first factor is b, because the library's product is out^T = b^T a^T.
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
choices = {}  # the algorithms that were chosen for that run, by the words of their Shapes; "" is torch


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the bytes of memory that it needs."""
    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]

    def name(self):  # The same version of the library gives the same.
        return bytes(self.algorithm).hex()


class Factor(NamedTuple):
    by_column: bool  # its columns are contiguous, and not its rows
    stride: int      # how many numbers lie between the starts of two columns, or two rows

    def words(self):
        return f"{'columns' if self.by_column else 'rows'} {self.stride}"


class Shape(NamedTuple):
    """What a Plan is made for: out (m, n) = a (m, k) b (k, n), and what else is computed."""
    m: int
    k: int
    n: int
    a: Factor
    b: Factor
    epilogue: int
    adds: bool  # a matrix (m, n) is added
    device: torch.device

    def words(self):
        what = {PRODUCT_ONLY: "plus" if self.adds else "only", GELU_AUX: "gelu", DGELU: "gelu backward"}
        return f"{self.m} x {self.k} x {self.n}, {self.a.words()}, {self.b.words()}, {what[self.epilogue]}"


@functools.cache
def library():
    for name in NAMES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # torch's, and none of the machine's
        except OSError:
            continue
    return None


def version():  # such as 130100
    library().cublasLtGetVersion.restype = c_size_t
    return library().cublasLtGetVersion()


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


class Plan:
    """How the library multiplies in one Shape. Two threads must not use one Plan at the same time.

    chosen: the proposal that multiplies, or None where torch does. Where `choices` says nothing, it is the
    first proposal for a product with GELU, and torch for others. The device must be the current one.
    """

    def __init__(self, shape):
        self.shape = shape
        self.product = c_void_p()
        call("MatmulDescCreate", byref(self.product), SUM_IN_FP32, FP32)
        self.set(TRANSPOSE_B, c_int32(shape.b.by_column))
        self.set(TRANSPOSE_A, c_int32(shape.a.by_column))
        self.set(EPILOGUE, c_uint32(shape.epilogue))
        if shape.epilogue != PRODUCT_ONLY:
            self.set(AUX_WIDTH, c_int64(shape.n))
        self.a = self.layout(shape.m, shape.k, shape.a)
        self.b = self.layout(shape.k, shape.n, shape.b)
        self.out = self.layout(shape.m, shape.n, Factor(False, shape.n))
        self.proposals = self.ask()  # the one that the library expects to be fastest first
        self.chosen = None
        # A single proposal with GELU took longer than torch, in the one such shape that was looked at.
        if shape.epilogue != PRODUCT_ONLY and len(self.proposals) > 1:
            self.chosen = self.proposals[0]
        if shape.words() in choices:
            self.choose(choices[shape.words()])

    def destroy(self):
        for layout in (self.a, self.b, self.out):
            call("MatrixLayoutDestroy", layout)
        call("MatmulDescDestroy", self.product)

    def choose(self, name):
        self.chosen = next((proposal for proposal in self.proposals if proposal.name() == name), None)

    def set(self, attribute, value):
        call("MatmulDescSetAttribute", self.product, attribute, byref(value), c_size_t(sizeof(value)))

    def layout(self, rows, width, factor):
        contiguous, other = (rows, width) if factor.by_column else (width, rows)
        made = c_void_p()
        call("MatrixLayoutCreate", byref(made), BF16, c_uint64(contiguous), c_uint64(other),
             c_int64(factor.stride))
        return made

    def ask(self):
        preference = c_void_p()
        call("MatmulPreferenceCreate", byref(preference))
        most = c_uint64(MOST_WORKSPACE)
        call("MatmulPreferenceSetAttribute", preference, WORKSPACE, byref(most), c_size_t(8))
        found = (Proposal * PROPOSALS)()
        count = c_int()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            handle(self.shape.device), self.product, self.b, self.a, self.out, self.out, preference,
            PROPOSALS, found, byref(count))
        call("MatmulPreferenceDestroy", preference)
        return [] if status else [proposal for proposal in found[:count.value] if proposal.status == 0]

    def multiply(self, a, b, out, *, aux=None, summand=None):
        """Write the result to out (m, n), by the chosen proposal. aux, summand: (m, n)."""
        proposal = self.chosen
        device = self.shape.device
        if aux is not None:
            self.set(AUX, c_void_p(aux.data_ptr()))
        workspace = torch.empty(proposal.workspace, dtype=torch.uint8, device=device)
        added = out if summand is None else summand
        stream = c_void_p(torch.cuda.current_stream(device).cuda_stream)
        # `out = 1 * product + beta * added`
        beta = c_float(0.0 if summand is None else 1.0)
        call("Matmul", handle(device), self.product, byref(c_float(1.0)), c_void_p(b.data_ptr()), self.b,
             c_void_p(a.data_ptr()), self.a, byref(beta), c_void_p(added.data_ptr()), self.out,
             c_void_p(out.data_ptr()), self.out, byref(proposal.algorithm),
             c_void_p(workspace.data_ptr()), c_size_t(proposal.workspace), stream)


def factor_of(matrix):
    """Return the Factor of a matrix, or None if the library cannot read it."""
    if matrix.dtype != torch.bfloat16 or matrix.data_ptr() % ALIGNMENT:
        return None
    row_stride, column_stride = matrix.stride()
    if column_stride == 1:
        factor = Factor(by_column=False, stride=row_stride)
        length = matrix.size(1)  # numbers that stand side by side
    elif row_stride == 1:
        factor = Factor(by_column=True, stride=column_stride)
        length = matrix.size(0)
    else:
        return None
    is_as_wanted = factor.stride >= length and factor.stride % WIDTHS == 0 and length % WIDTHS == 0
    return factor if is_as_wanted else None


def plan_for(a, b, epilogue=PRODUCT_ONLY, aux=None, summand=None):
    """Return the Plan for a (m, k) times b (k, n), or None where torch multiplies. aux, summand: (m, n)."""
    if a.device.type != DEVICE or library() is None or a.numel() == 0 or b.size(1) % WIDTHS:
        return None
    factors = [factor_of(matrix) for matrix in (a, b)]
    if None in factors:
        return None
    for matrix in (aux, summand):
        if matrix is None:
            continue
        # torch also adds a summand that is broadcast.
        if matrix.shape != (a.size(0), b.size(1)) or not matrix.is_contiguous() or factor_of(matrix) is None:
            return None
    shape = Shape(*a.shape, b.size(1), *factors, epilogue, summand is not None, a.device)
    if shape not in plans:
        plans[shape] = Plan(shape)
    return plans[shape] if plans[shape].chosen else None


def forget():
    settings.measured = False
    for plan in plans.values():
        plan.destroy()
    plans.clear()
    choices.clear()


# -----------------------------------------------------------------------------
# Products by the algorithm that was chosen for their shape, or else, as on CPUs, by torch. Eager code calls
# multiply, compiled graphs the operations product and sum_with_product.

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
    plan = plan_for(a, b, summand=summand)
    if plan is None:
        return torch.addmm(summand, a, b)
    out = a.new_empty(a.size(0), b.size(1))
    plan.multiply(a, b, out, summand=summand)
    return out


@sum_with_product.register_fake
def _(summand, a, b):
    return a.new_empty(a.size(0), b.size(1))

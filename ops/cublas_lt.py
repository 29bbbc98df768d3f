"""Matrix products that also compute GELU or its gradient, by cuBLASLt, a library that torch brings.

The library is called by ctypes (docs.nvidia.com/cuda/cublas). It counts in columns, where a matrix is its
transpose, so it computes out^T = b^T a^T.
"""
import ctypes
import functools
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from typing import NamedTuple

import torch

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")  # torch has loaded one of them
# The numbers of its header cublasLt.h
BF16 = 14  # cudaDataType of the matrices: no other was run on a GPU
FP32 = 0  # cudaDataType of the factor of the product
SUM_IN_FP32 = 68  # cublasComputeType

# Attributes of a product, whose first factor is b
TRANSPOSE_B = 3
EPILOGUE = 7
AUX = 11  # the address of a second matrix, like the result
AUX_WIDTH = 12
# What the library computes besides the product. AUX is what gelu takes: GELU_AUX writes it, DGELU reads it.
GELU_AUX = 160
DGELU = 192

WORKSPACE = 1  # attribute of a preference: the bytes of memory that an algorithm may use
MOST_WORKSPACE = 32 * 2**20
PROPOSALS = 8  # how many algorithms the library is asked for
TILE = 1  # attribute of an algorithm: what each block of threads computes
TILE_128_128 = 20
ALIGNMENT = 256  # bytes: the library expects it of each address
WIDTHS = 8  # it wants widths that are multiples of this
DEVICE = "cuda"  # where the matrices are that it multiplies


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the bytes of memory that it needs."""
    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]


class Shape(NamedTuple):
    """What a Plan is made for: out (m, n) = a (m, k) b (k, n), and what else is computed."""
    m: int
    k: int
    n: int
    b_is_transposed: bool  # b is the transpose of a contiguous matrix
    epilogue: int


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


def layout(rows, width):
    """Return the library's description of a contiguous matrix (rows, width)."""
    made = c_void_p()
    call("MatrixLayoutCreate", byref(made), BF16, c_uint64(width), c_uint64(rows), c_int64(width))
    return made


class Plan:
    """How the library multiplies in one Shape. Two threads must not use one Plan at the same time.

    chosen: the proposal that multiplies, or None where torch does. The device must be the current one.
    """

    def __init__(self, shape, device):
        self.device = device
        self.product = c_void_p()
        call("MatmulDescCreate", byref(self.product), SUM_IN_FP32, FP32)
        self.set(TRANSPOSE_B, c_int32(shape.b_is_transposed))
        self.set(EPILOGUE, c_uint32(shape.epilogue))
        self.set(AUX_WIDTH, c_int64(shape.n))
        self.a = layout(shape.m, shape.k)
        self.b = layout(shape.n, shape.k) if shape.b_is_transposed else layout(shape.k, shape.n)
        self.out = layout(shape.m, shape.n)
        proposals = self.ask()  # the one that the library expects to be fastest first
        # A single proposal took longer than torch, in the one such shape that was looked at.
        self.chosen = choose(proposals) if len(proposals) > 1 else None

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

    def multiply(self, a, b, out, aux):
        """Write the result to out (m, n), by the chosen proposal. aux (m, n) is written or read."""
        proposal = self.chosen
        self.set(AUX, c_void_p(aux.data_ptr()))
        workspace = torch.empty(proposal.workspace, dtype=torch.uint8, device=self.device)
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        # out = 1 * product + 0 * out
        call("Matmul", handle(self.device), self.product, byref(c_float(1.0)), c_void_p(b.data_ptr()), self.b,
             c_void_p(a.data_ptr()), self.a, byref(c_float(0.0)), c_void_p(out.data_ptr()), self.out,
             c_void_p(out.data_ptr()), self.out, byref(proposal.algorithm),
             c_void_p(workspace.data_ptr()), c_size_t(proposal.workspace), stream)


def choose(proposals):
    """Return the proposal that multiplies.

    In nine products on an H200 the fastest had tiles of 128 x 128, and of those the most waves, which are
    rounds of blocks over the multiprocessors. It took 1 to 18 % less than the first proposal.
    """
    square = [proposal for proposal in proposals if tile_of(proposal) == TILE_128_128]
    return max(square, key=lambda proposal: proposal.waves) if square else proposals[0]


def tile_of(proposal):
    tile = c_int32()
    call("MatmulAlgoConfigGetAttribute", proposal.algorithm, TILE, byref(tile), c_size_t(sizeof(tile)),
         byref(c_size_t()))
    return tile.value


make_plan = functools.cache(Plan)


def is_readable(matrix):
    """Whether the library can read a matrix in the order of its memory."""
    is_aligned = matrix.data_ptr() % ALIGNMENT == 0 and matrix.size(1) % WIDTHS == 0
    return is_aligned and matrix.dtype == torch.bfloat16 and matrix.is_contiguous()


def plan_for(a, w, epilogue, transposed=False):
    """Return the Plan for a (m, k) times b, or None where torch multiplies.

    b (k, n) is w, or with transposed=True the transpose of w (n, k).
    """
    if a.device.type != DEVICE or library() is None or a.numel() == 0:
        return None
    n = w.size(0) if transposed else w.size(1)
    if n % WIDTHS or not (is_readable(a) and is_readable(w)):
        return None
    plan = make_plan(Shape(*a.shape, n, transposed, epilogue), a.device)
    return plan if plan.chosen else None

"""Matrix products that also compute GELU or its gradient, by cuBLASLt, a library that torch brings.

torch has no function for them, so the library is called here by ctypes, as NVIDIA's manual describes it
(docs.nvidia.com/cuda/cublas, "Using the cuBLASLt API"). The numbers below are those of its header cublasLt.h.
The library counts in columns. A matrix (n, m) in rows is for it a matrix (m, n) in columns, so instead of
out = x W^T it computes out^T = W x^T.
"""
import ctypes
import functools
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof

import torch

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")  # torch has loaded one of them
BF16 = 14  # cudaDataType of the matrices: no other was run on a GPU
FP32 = 0  # cudaDataType of the factors of product and summand
SUM_IN_FP32 = 68  # cublasComputeType

# Attributes of a product. "A" is the weight, because the library's product is out^T = W x^T.
TRANSPOSE_WEIGHT = 3
EPILOGUE = 7
AUX = 11  # the address of a second matrix, like the result
AUX_WIDTH = 12
# What the library computes besides the product. AUX is what gelu takes: GELU_AUX writes it, DGELU reads it.
GELU_AUX = 160
DGELU = 192

WORKSPACE = 1  # attribute of a preference: the bytes of memory that an algorithm may use
MOST_WORKSPACE = 32 * 2**20
PROPOSALS = 8  # how many algorithms the library is asked for
ALIGNMENT = 256  # bytes: the library expects it of each address
WIDTHS = 8  # it wants widths that are multiples of this
DEVICE = "cuda"  # where the matrices are that it multiplies


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the bytes of memory that it needs."""
    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]


@functools.cache
def library():
    """Return the library, or None if there is none in this process."""
    for name in NAMES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # torch's, and none of the machine's
        except OSError:
            continue
    return None


def check(status, what):
    """Raise RuntimeError if a function of the library did not return 0."""
    if status:
        raise RuntimeError(f"cuBLASLt: {what} returned {status}")


@functools.cache
def handle(device):
    """Return the library's handle for a torch device."""
    made = c_void_p()
    with torch.cuda.device(device):
        check(library().cublasLtCreate(byref(made)), "cublasLtCreate")
    return made


class Plan:
    """How the library multiplies rows x (n, n_in) by a weight, in one shape.

    The weight is (n_out, n_in), and for DGELU (n_in, n_out). proposals: the algorithms that the library
    proposes, the one that it expects to be fastest first. A run takes the first, without measuring, so that
    the next run rounds as this one did. The device must be the current one. Two threads must not use one Plan
    at the same time.
    """

    def __init__(self, shape, device, epilogue):
        n, n_in, n_out = shape
        self.device = device
        self.product = c_void_p()
        check(library().cublasLtMatmulDescCreate(byref(self.product), SUM_IN_FP32, FP32), "MatmulDescCreate")
        is_transposed = epilogue != DGELU
        self.set(TRANSPOSE_WEIGHT, c_int32(is_transposed))
        self.set(EPILOGUE, c_uint32(epilogue))
        self.set(AUX_WIDTH, c_int64(n_out))
        self.weight = self.layout(n_out, n_in) if is_transposed else self.layout(n_in, n_out)
        self.x = self.layout(n, n_in)
        self.out = self.layout(n, n_out)
        self.proposals = self.ask()

    def set(self, attribute, value):
        """Set an attribute of the product."""
        check(library().cublasLtMatmulDescSetAttribute(self.product, attribute, byref(value),
                                                       c_size_t(sizeof(value))), "MatmulDescSetAttribute")

    def layout(self, rows, width):
        """Return the library's description of a matrix in rows, in bf16."""
        made = c_void_p()
        check(library().cublasLtMatrixLayoutCreate(byref(made), BF16, c_uint64(width), c_uint64(rows),
                                                   c_int64(width)), "MatrixLayoutCreate")
        return made

    def ask(self):
        """Return the Proposals of the library: none if it cannot multiply so."""
        preference = c_void_p()
        check(library().cublasLtMatmulPreferenceCreate(byref(preference)), "MatmulPreferenceCreate")
        most = c_uint64(MOST_WORKSPACE)
        check(library().cublasLtMatmulPreferenceSetAttribute(preference, WORKSPACE, byref(most), c_size_t(8)),
              "MatmulPreferenceSetAttribute")
        found = (Proposal * PROPOSALS)()
        count = c_int()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            handle(self.device), self.product, self.weight, self.x, self.out, self.out, preference, PROPOSALS,
            found, byref(count))
        check(library().cublasLtMatmulPreferenceDestroy(preference), "MatmulPreferenceDestroy")
        return [] if status else [proposal for proposal in found[:count.value] if proposal.status == 0]

    def multiply(self, x, weight, out, aux):
        """Write the result for rows x (n, n_in) to out, (n, n_out) like aux."""
        chosen = self.proposals[0]
        self.set(AUX, c_void_p(aux.data_ptr()))
        workspace = torch.empty(chosen.workspace, dtype=torch.uint8, device=self.device)
        address = c_void_p(out.data_ptr())
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        # `out = 1 * product + 0 * out`
        check(library().cublasLtMatmul(
            handle(self.device), self.product, byref(c_float(1.0)), c_void_p(weight.data_ptr()), self.weight,
            c_void_p(x.data_ptr()), self.x, byref(c_float(0.0)), address, self.out, address, self.out,
            byref(chosen.algorithm), c_void_p(workspace.data_ptr()), c_size_t(chosen.workspace), stream),
            "Matmul")


make_plan = functools.cache(Plan)


def is_served(matrix):
    """Whether the library multiplies a matrix: bf16, contiguous, and as wide and aligned as it wants."""
    if matrix.dtype != torch.bfloat16 or not matrix.is_contiguous():
        return False
    return matrix.size(1) % WIDTHS == 0 and matrix.data_ptr() % ALIGNMENT == 0


def plan(x, weight, epilogue, aux=None):
    """Return the Plan for rows x (n, n_in) and a weight, or None where torch multiplies.

    aux: what DGELU reads.
    Torch multiplies what is_served() refuses. It also does where the library has one proposal only. In the
    one such shape that was measured, 1024 to 4096 on Hopper, that is a kernel made for Ampere, which takes
    longer than torch's two.
    """
    if x.device.type != DEVICE or library() is None or x.size(0) == 0:
        return None
    if not all(is_served(matrix) for matrix in (x, weight, aux) if matrix is not None):
        return None
    n_out = weight.size(1) if epilogue == DGELU else weight.size(0)
    if n_out % WIDTHS:
        return None
    found = make_plan((*x.shape, n_out), x.device, epilogue)
    return found if len(found.proposals) > 1 else None

"""Whether an operation runs as a Triton kernel or as its torch twin: one answer for all of ops/."""
import torch

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.int64


def use_triton(x):
    """True for tensors on a GPU, of the dtypes that the kernels know; fp64 stays with torch."""
    return x.is_cuda and x.dtype in DTYPES

"""Many matrices divided by their norms: on a GPU one kernel reads them, and one reads and writes them.

muon.py does so before its iteration. Between the two it sums the squared norms of matrices that tp cuts.
"""
import torch

from config import ceil_div
from ops import backend

BLOCK = 2048  # elements that a program of the Triton kernels reads at once
TIMES = 4  # how many times it does so


def has_kernel(x):
    """Whether the kernels serve x (k, rows, columns), of which each matrix has to be contiguous."""
    return backend.use_triton(x) and x.dtype.itemsize == 2 and x[0].is_contiguous()


def squared_norms(x):
    """Return the sum of each matrix's squares: x (k, rows, columns) -> (k, 1, 1), in fp32 or wider."""
    if not has_kernel(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide).square()
    from ops import kernels
    n = x[0].numel()
    parts = ceil_div(n, TIMES * BLOCK)
    sums = torch.empty(len(x), parts, 1, dtype=torch.float32, device=x.device)
    kernels.sum_squares[(len(x) * parts,)](
        x, sums, n, parts, x.stride(0), TIMES=TIMES, BLOCK=BLOCK, num_warps=8)
    return sums.sum(dim=1, keepdim=True)


def divide_by_norms(x, squares, norm, eps, out):
    """Write x, of which each matrix gets the given norm, into out, which may share x's memory; return out.

    x, out (k, rows, columns); squares (k, 1, 1) from squared_norms(); eps: the least norm that divides.
    """
    if not (has_kernel(x) and has_kernel(out)):
        return torch.mul(x, norm / squares.sqrt().clamp(min=eps), out=out)
    from ops import kernels
    n = x[0].numel()
    parts = ceil_div(n, TIMES * BLOCK)
    kernels.divide_by_norms[(len(x) * parts,)](
        x, squares, out, n, parts, x.stride(0), out.stride(0), norm, eps,
        TIMES=TIMES, BLOCK=BLOCK, num_warps=8)
    return out

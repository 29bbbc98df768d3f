"""Products of matrices that are symmetric: on a GPU half of each is computed, and written twice.

muon.py has two kinds of them. A Gram matrix x x^T is symmetric, and so is the product of polynomials in one
Gram matrix, because they commute.
"""
import torch

from config import ceil_div
from ops import backend

# Rows and columns of a tile, its depth, warps and stages of the Triton kernel: the fastest of eleven on an
# H200. They need 64 KiB of shared memory, as much as AMD's GPUs have.
TILE = 128, 32, 4, 4


def symmetric_mm(a, b, c=None, *, alpha=1.0, beta=0.0, diagonal=0.0):
    """Return a b, or with c alpha a b + beta c + diagonal I, of which the caller knows that it is symmetric.

    a (k, m, n), b (k, n, m), c (k, m, m) -> (k, m, m). Of the kernel's product, the elements on both sides of
    the diagonal are the same bits, except within its tiles on the diagonal.
    """
    # Wider numbers take torch's product: there the precision is what --dtype asks for.
    if backend.use_triton(a) and a.dtype.itemsize == 2:
        return symmetric_mm_triton(a, b, c, alpha, beta, diagonal)
    if c is None:
        return a @ b
    product = torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    product.diagonal(dim1=1, dim2=2).add_(diagonal)
    return product


def symmetric_mm_triton(a, b, c, alpha, beta, diagonal):
    """Do what symmetric_mm() does in one kernel, which computes the tiles on and above the diagonal."""
    from ops import product_kernels
    k, m, n = a.shape
    product = torch.empty(k, m, m, dtype=a.dtype, device=a.device)
    side, depth, warps, stages = TILE
    across = ceil_div(m, side)
    grid = (k * across * (across + 1) // 2,)
    product_kernels.symmetric_mm[grid](
        a, b, product if c is None else c, product, m, n, *a.stride(), *b.stride(), alpha, beta, diagonal,
        ADD=c is not None, EVEN=m % side == 0 and n % depth == 0, SIDE=side, DEPTH=depth, num_warps=warps,
        num_stages=stages)
    return product

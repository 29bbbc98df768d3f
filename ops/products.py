"""Products of bf16 matrices by quack-kernels, a library that in narrow models is faster than cuBLAS."""
import torch

quack = None  # the library's functions, where fast/choose.py takes them
# What was faster on an H200, of the products of models of 512, 768 and 2,048 columns
NARROW = 1024  # columns, of the result or of the first factor
LONGEST = 4096  # products that sum over fewer numbers
TILE = 128 * 256  # numbers of the result that a multiprocessor computes at a time
TILES = 2 * 132  # at least: two for each multiprocessor
TILES_OF_SUM = 132  # at least of c + a b, for which torch copies c first


def is_faster(m, k, n, tiles):
    """Whether the library multiplies a (m, k) by b (k, n) faster than torch. tiles: TILES or TILES_OF_SUM."""
    return min(k, n) <= NARROW and k < LONGEST and m * n >= tiles * TILE


def is_readable(matrix):
    """Whether the library can read a matrix, in either order."""
    if matrix.dtype != torch.bfloat16 or not (matrix.is_contiguous() or matrix.T.is_contiguous()):
        return False
    return matrix.data_ptr() % 16 == 0 and all(width % 8 == 0 for width in matrix.shape)


def multiply(a, b):
    """Return a b, (m, n): a (m, k), b (k, n)."""
    return a @ b if quack is None else product(a, b)


@torch.library.custom_op("nanoshard::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if quack is not None and is_faster(*a.shape, b.size(1), TILES) and is_readable(a) and is_readable(b):
        return quack.gemm(a, b, tuned=False)
    return torch.mm(a, b)


@product.register_fake
def _(a, b):
    return a.new_empty(a.size(0), b.size(1))


@torch.library.custom_op("nanoshard::add_product", mutates_args=())
def add_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return c + a b, (m, n)."""
    is_served = quack is not None and is_faster(*a.shape, b.size(1), TILES_OF_SUM)
    if is_served and is_readable(a) and is_readable(b) and is_readable(c):
        return quack.gemm_add(a, b, c, tuned=False)
    return torch.addmm(c, a, b)


@add_product.register_fake
def _(c, a, b):
    return c.new_empty(c.shape)

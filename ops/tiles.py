"""How kernels are launched: their tiles and options.

    product          experts' rows x (R, I) times an expert's matrix (I, O), of ops/tma_kernels.py
    weight_gradient  of the same file: grad (R, O), transposed, times x (R, I)
"""
from typing import NamedTuple

from config import ceil_div

# (ROWS, COLUMNS, DEPTH, warps, stages), and programs per multiprocessor: a wide tile for products, and one
# for the weights' gradient and for products that wide tiles do not fit.
TILES_WIDE = ((128, 256, 64, 8, 3), 1)
TILES_SQUARE = ((128, 128, 64, 8, 3), 2)
WGRAD_ROWS = 4096  # of an expert in the mean, from which on that gradient is faster than torch's


class Launch(NamedTuple):
    """How a kernel is launched."""
    first: list    # the tile that is loaded of the first factor
    second: list   # the tile that is loaded of the second factor
    programs: int  # of each multiprocessor
    options: dict  # what the kernel is compiled for


def product(E, O, by_column, two):
    """Return the Launch of tma_kernels.grouped_mm for E experts and O columns."""
    columns = TILES_WIDE[0][1]
    is_wide = ceil_div(O, columns) * columns <= 1.1 * O  # at most a tenth of what is computed is no column
    tile, programs = TILES_WIDE if is_wide else TILES_SQUARE
    rows, columns, depth, *_ = tile
    of_matrix = [1, columns, depth] if by_column else [1, depth, columns]
    options = {"E": E, "WIDE": next_power_of_2(E), "TWO": two, "BY_COLUMN": by_column}
    return Launch([rows, depth], of_matrix, programs, options | named(tile))


def weight_gradient(E):
    """Return the Launch of tma_kernels.grouped_wgrad for E experts."""
    tile, programs = TILES_SQUARE
    rows, columns, depth, *_ = tile
    return Launch([depth, rows], [depth, columns], programs, {"E": E} | named(tile))


def named(tile):
    """Return {name: value} of a tile, as a kernel takes it."""
    names = ("ROWS", "COLUMNS", "DEPTH", "num_warps", "num_stages")
    return dict(zip(names, tile, strict=True))


def next_power_of_2(n):
    """Return the smallest power of two that is at least n."""
    return 2 ** (n - 1).bit_length()

"""Triton kernels of the experts' products for GPUs that load a tile with one instruction: TMA, on Hopper.

The kernels of the same names in ops/product_kernels.py compute the same on every GPU. When which of the two
runs is decided in ops/grouped_mm.py. A descriptor says where a matrix is, and how large a tile of it is. What
lies outside the matrix is loaded as zero.
"""
import triton
import triton.language as tl

from ops.product_kernels import rows_of_tile, tiles_of_experts


@triton.jit
def add_product(total, x_tiles, w_tiles, mine, first, left, I, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
                DEPTH: tl.constexpr):
    """Return total + rows `first`... of x (R, I) times columns `left`... of the matrix of expert `mine`.

    w is (E, O, I) if BY_COLUMN, which makes each column one piece, else (E, I, O).
    """
    for k in range(0, I, DEPTH):
        x = x_tiles.load([first, k])
        if BY_COLUMN:
            w = w_tiles.load([mine, left, k]).reshape(COLUMNS, DEPTH).T
        else:
            w = w_tiles.load([mine, k, left]).reshape(DEPTH, COLUMNS)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def grouped_mm(x_tiles, w_tiles, more_tiles, more_w_tiles, ends_ptr, y_ptr, I, O, PROGRAMS, E: tl.constexpr,
               WIDE: tl.constexpr, TWO: tl.constexpr, BY_COLUMN: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """product_kernels.grouped_mm through descriptors: y (R, O) = x w, plus more more_w if TWO.

    BY_COLUMN: see add_product.
    """
    expert, begin, end, after = tiles_of_experts(ends_ptr, E, WIDE, ROWS)
    across = (O + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), tl.max(after) * across, PROGRAMS):
        mine, first, stop = rows_of_tile(tile // across, expert, begin, end, after, ROWS)
        left = tile % across * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total = add_product(total, x_tiles, w_tiles, mine, first, left, I, BY_COLUMN, COLUMNS, DEPTH)
        if TWO:
            total = add_product(total, more_tiles, more_w_tiles, mine, first, left, I, BY_COLUMN, COLUMNS,
                                DEPTH)
        # The rows of the tile that belong to the next expert are computed, and not written.
        row = first + tl.arange(0, ROWS)
        column = left + tl.arange(0, COLUMNS)
        y_at = y_ptr + row.to(tl.int64)[:, None] * O + column[None, :]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(row < stop)[:, None] & (column < O)[None, :])


@triton.jit
def grouped_wgrad(grad_tiles, x_tiles, ends_ptr, grad_w_ptr, O, I, PROGRAMS, E: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """product_kernels.grouped_wgrad through descriptors: grad_w (E, O, I) of grad (R, O) and x (R, I)."""
    across = (I + COLUMNS - 1) // COLUMNS
    tiles = (O + ROWS - 1) // ROWS * across  # of an expert
    for tile in range(tl.program_id(0), E * tiles, PROGRAMS):
        mine = tile // tiles
        top = tile % tiles // across * ROWS
        left = tile % tiles % across * COLUMNS
        begin = tl.load(ends_ptr + mine - 1, mask=mine > 0, other=0)
        end = tl.load(ends_ptr + mine)
        last = begin + (end - begin) // DEPTH * DEPTH  # where the steps of DEPTH whole rows end
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(begin, last, DEPTH):
            grad = grad_tiles.load([k, top])
            total = tl.dot(grad.T, x_tiles.load([k, left]), total, input_precision="ieee")
        if last < end:
            # Rows after the end may hold anything, even NaN, so they are masked in both factors.
            inside = (last + tl.arange(0, DEPTH) < end)[:, None]
            grad = grad_tiles.load([last, top])
            x = x_tiles.load([last, left])
            grad = tl.where(inside, grad, 0.0).to(grad.dtype)
            x = tl.where(inside, x, 0.0).to(x.dtype)
            total = tl.dot(grad.T, x, total, input_precision="ieee")
        o = top + tl.arange(0, ROWS)
        i = left + tl.arange(0, COLUMNS)
        grad_w_at = grad_w_ptr + mine.to(tl.int64) * O * I + o[:, None] * I + i[None, :]
        tl.store(grad_w_at, total.to(grad_w_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])

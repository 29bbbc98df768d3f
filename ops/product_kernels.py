"""Triton kernels of the experts' products, which have unequal sizes. ops/grouped_mm.py says when they run."""
import triton
import triton.language as tl


@triton.jit
def grouped_mm(x_ptr, w_ptr, ends_ptr, y_ptr, I, O, w_expert, w_in, w_out, PROGRAMS, E: tl.constexpr,
               WIDE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """y (R, O): each row of x (R, I) times the matrix of its expert in w (E, I, O, of any strides).

    Rows of y after the last end are not written. The rows of a tile of ROWS x COLUMNS belong to one expert.
    ends (E,) int32: where each expert's rows end. WIDE: E rounded up to a power of two.
    """
    expert = tl.arange(0, WIDE)
    end = tl.load(ends_ptr + expert, mask=expert < E, other=0)
    begin = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS  # masked experts have 0
    after = tl.cumsum(tiles, axis=0)  # how many tiles end with each expert's own
    across = (O + COLUMNS - 1) // COLUMNS
    at = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), tl.max(after) * across, PROGRAMS):
        down = tile // across
        # The tile's expert is the number of experts whose tiles all come before this one.
        mine = tl.sum((after <= down).to(tl.int32))
        is_mine = expert == mine
        first = tl.sum(tl.where(is_mine, begin + (down - after + tiles) * ROWS, 0))
        stop = tl.sum(tl.where(is_mine, end, 0))
        row = first + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        # Rows after the expert's last are read as copies of that row, and not written.
        read = tl.minimum(row, stop - 1)
        x_at = x_ptr + read.to(tl.int64)[:, None] * I + at[None, :]
        w_at = w_ptr + mine.to(tl.int64) * w_expert + at[:, None] * w_in + column[None, :] * w_out
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, I, DEPTH):
            if EVEN:  # DEPTH divides I
                x = tl.load(x_at)
                w = tl.load(w_at, mask=(column < O)[None, :], other=0.0)
            else:
                x = tl.load(x_at, mask=(k + at < I)[None, :], other=0.0)
                w = tl.load(w_at, mask=(k + at < I)[:, None] & (column < O)[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision=PRECISION)
            x_at += DEPTH
            w_at += DEPTH * w_in
        y_at = y_ptr + row.to(tl.int64)[:, None] * O + column[None, :]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(row < stop)[:, None] & (column < O)[None, :])


@triton.jit
def grouped_wgrad(grad_ptr, x_ptr, ends_ptr, grad_w_ptr, O, I, PROGRAMS, E: tl.constexpr,
                  PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """grad_w (E, O, I): each expert's rows of grad (R, O), transposed, times its rows of x (R, I)."""
    across = (I + COLUMNS - 1) // COLUMNS
    tiles = (O + ROWS - 1) // ROWS * across  # of an expert
    for tile in range(tl.program_id(0), E * tiles, PROGRAMS):
        mine = tile // tiles
        place = tile % tiles
        begin = tl.load(ends_ptr + mine - 1, mask=mine > 0, other=0)
        end = tl.load(ends_ptr + mine)
        o = place // across * ROWS + tl.arange(0, ROWS)
        i = place % across * COLUMNS + tl.arange(0, COLUMNS)
        row = begin + tl.arange(0, DEPTH)
        grad_at = grad_ptr + row.to(tl.int64)[None, :] * O + o[:, None]
        x_at = x_ptr + row.to(tl.int64)[:, None] * I + i[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(begin, end, DEPTH):
            # Rows after the end may hold anything, even NaN, so they are masked in both factors.
            inside = k + tl.arange(0, DEPTH) < end
            grad = tl.load(grad_at, mask=inside[None, :] & (o < O)[:, None], other=0.0)
            x = tl.load(x_at, mask=inside[:, None] & (i < I)[None, :], other=0.0)
            total = tl.dot(grad, x, total, input_precision=PRECISION)
            grad_at += DEPTH * O
            x_at += DEPTH * I
        grad_w_at = grad_w_ptr + mine.to(tl.int64) * O * I + o[:, None] * I + i[None, :]
        tl.store(grad_w_at, total.to(grad_w_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])

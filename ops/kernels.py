"""Triton kernels, where torch reads or writes memory more often than it must. The other files of ops/,
optim.py and fast/symm_mem.py hold a torch twin of each and decide which of the two runs. This file is
imported on a GPU only, and by tests/test_kernels.py, which runs it in Triton's interpreter.

One program handles one row, or BLOCK elements of a flat buffer, or tiles of a matrix product; rows are
counted in int64. x + 0 * at broadcasts the scalar x to the shape of at.
"""
import triton
import triton.language as tl


@triton.jit
def cross_entropy(z_ptr, target_ptr, loss_ptr, scale_ptr, used, width, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr):
    """One program handles one row of logits z (R, width), and reads and writes each logit once (again where
    the maximum rises by more than 32). It stores the
    loss, in the place of the logits (softmax - onehot) / scale, and that scale: 1 / the sum of the
    exponentials, which is known only when all of them are written. Both are 0 for a target below 0, which
    takes no part."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    target = tl.load(target_ptr + row)
    trained = target >= 0
    target = tl.maximum(target, 0)
    picked = tl.load(z_ptr + target).to(tl.float32)
    # (ROWS, BLOCK) columns in order
    tile = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    top = -1e30  # exponentials are taken relative to this
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, ROWS * BLOCK):
        at = start + tile
        z = tl.load(z_ptr + at, mask=at < used, other=-float("inf")).to(tl.float32)
        best = tl.max(z)
        if best > top + 32:  # true in the first tile and rarely later: scale down what was written
            less = tl.exp(top - best)
            tl.debug_barrier()
            for written in range(0, start, ROWS * BLOCK):
                e = tl.load(z_ptr + written + tile).to(tl.float32) * less
                tl.store(z_ptr + written + tile, e.to(z_ptr.dtype.element_ty))
            total *= less
            top = best
        e = tl.exp(z - top)
        total += tl.sum(e, axis=0)
        tl.store(z_ptr + at, e.to(z_ptr.dtype.element_ty), mask=at < width)
    whole = tl.sum(total)
    tl.store(loss_ptr + row, tl.where(trained, top + tl.log(whole) - picked, 0.0))
    tl.store(scale_ptr + row, tl.where(trained, 1 / whole, 0.0))
    tl.debug_barrier()  # another thread may have written the target's column
    tl.store(z_ptr + target, (tl.exp(picked - top) - whole).to(z_ptr.dtype.element_ty))


@triton.jit
def swiglu(a_ptr, b_ptr, h_ptr, valid_ptr, width, PACKED: tl.constexpr, LIMITED: tl.constexpr,
           BLOCK: tl.constexpr):
    """gate a, up b (R, width), or side by side in a (R, 2 width) if PACKED -> h (R, width) = silu(a) * b.
    LIMITED: only the first *valid_ptr rows hold something; the others are left alone."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * width * (2 if PACKED else 1)
    b_ptr = a_ptr + width if PACKED else b_ptr + row * width
    end = tl.where(row < tl.load(valid_ptr), width, 0) if LIMITED else width
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + row * width + at, (a * tl.sigmoid(a) * b).to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(a_ptr, b_ptr, dh_ptr, da_ptr, db_ptr, valid_ptr, width, PACKED: tl.constexpr,
                    LIMITED: tl.constexpr, RECOMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """dh (R, width) -> da and db, laid out as a and b. RECOMPUTE: h is written in the place of dh."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * width * (2 if PACKED else 1)
    b_ptr = a_ptr + width if PACKED else b_ptr + row * width
    da_ptr += row * width * (2 if PACKED else 1)
    db_ptr = da_ptr + width if PACKED else db_ptr + row * width
    end = tl.where(row < tl.load(valid_ptr), width, 0) if LIMITED else width
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dh_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(a)
        tl.store(da_ptr + at, (d * b * s * (1 + a * (1 - s))).to(da_ptr.dtype.element_ty), mask=inside)
        tl.store(db_ptr + at, (d * a * s).to(da_ptr.dtype.element_ty), mask=inside)
        if RECOMPUTE:
            tl.store(dh_ptr + row * width + at, (a * s * b).to(dh_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rank_within_expert(expert_ptr, rank_ptr, counts_ptr, n, blocks, E: tl.constexpr, WIDE: tl.constexpr,
                       BLOCK: tl.constexpr):
    """One program handles BLOCK copies, expert (n,) each. rank (n,): how many earlier copies of the block
    have the same expert; counts (E, blocks): copies of each expert in each block. WIDE: E rounded up to a
    power of two."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, WIDE)
    expert = tl.load(expert_ptr + at, mask=at < n, other=WIDE)
    wants = (expert[:, None] == one[None, :]).to(tl.int32)  # (BLOCK, WIDE)
    before = tl.cumsum(wants, axis=0) - wants
    tl.store(rank_ptr + at, tl.sum(before * wants, axis=1), mask=at < n)
    tl.store(counts_ptr + one * blocks + tl.program_id(0), tl.sum(wants, axis=0), mask=one < E)


@triton.jit
def slots_from_ranks(expert_ptr, rank_ptr, cumulative_ptr, start_ptr, slot_ptr, n, rows, blocks,
                     EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """slot (n,) = start[expert] + cumulative[expert, block - 1] + rank, by the blocks of rank_within_expert;
    -1 where that lies beyond the end of its buffer, which holds EXPERTS experts in `rows` rows."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ptr + at, mask=at < n, other=0)
    slot = tl.load(start_ptr + expert)
    slot += tl.load(cumulative_ptr + expert * blocks + block - 1, mask=expert * 0 + block > 0, other=0)
    slot += tl.load(rank_ptr + at, mask=at < n, other=0)
    slot = tl.where(slot < (expert // EXPERTS + 1) * rows, slot, -1)
    tl.store(slot_ptr + at, slot, mask=at < n)


@triton.jit
def layout_from_counts(counts_ptr, starts_ptr, offs_ptr, needed_ptr, rank, rows, limit, EP: tl.constexpr,
                       E: tl.constexpr, WIDE: tl.constexpr):
    """Program o lays out the buffer of rank o: of counts (EP, E) those for its E / EP experts, by expert,
    then by sender. starts (E,): where this rank's rows begin; if it is this rank's buffer, also offs (E/EP,),
    the ends of its experts' rows, and *needed, the rows that came. WIDE: E rounded up to a power of two."""
    owner, at = tl.program_id(0), tl.arange(0, WIDE)
    expert, sender = owner * (E // EP) + at // EP, at % EP
    count = tl.load(counts_ptr + sender * E + expert, mask=at < E, other=0)
    stop = tl.cumsum(count, axis=0)
    tl.store(starts_ptr + expert, stop - count + owner * rows, mask=(at < E) & (sender == rank))
    if owner == rank:
        end = tl.minimum(stop, limit).to(tl.int32)
        tl.store(offs_ptr + at // EP, end, mask=(at < E) & (sender == EP - 1))
        tl.store(needed_ptr, tl.maximum(tl.load(needed_ptr), tl.sum(count)))


@triton.jit
def permute(x_ptr, index_ptr, out_ptr, limit, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """out (R, width): row i is row index[i] // K of x, zeros where index[i] is limit or more."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        held = inside & (index + 0 * at < limit)
        x = tl.load(x_ptr + index // K * width + start + at, mask=held, other=0.0)
        tl.store(out_ptr + row * width + start + at, x, mask=inside)


@triton.jit
def unpermute(y_ptr, p_ptr, slot_ptr, out_ptr, limit, width, K: tl.constexpr, GATED: tl.constexpr,
            BLOCK: tl.constexpr):
    """out (n, width): row r is the sum of its K copies y[slot[r, k]], each times p[r, k] if GATED; a slot of
    limit or more holds nothing."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            slot = tl.load(slot_ptr + row * K + k)
            held = inside & (slot + 0 * at < limit)
            y = tl.load(y_ptr + slot * width + start + at, mask=held, other=0.0)
            gate = tl.load(p_ptr + row * K + k).to(tl.float32) if GATED else 1.0
            total += gate * y.to(tl.float32)
        tl.store(out_ptr + row * width + start + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unpermute_backward(y_ptr, p_ptr, perm_ptr, g_ptr, dy_ptr, dp_ptr, limit, width, K: tl.constexpr,
                     BLOCK: tl.constexpr):
    """Slot s holds copy c = perm[s] of row c // K: dy[s] = p[c] g[row], dp[c] = <y[s], g[row]>; zeros where c
    is limit or more."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(perm_ptr + row)
    at = tl.arange(0, BLOCK)
    real = copy + 0 * at < limit  # (BLOCK,), all the same
    gate = tl.load(p_ptr + copy + 0 * at, mask=real, other=0.0).to(tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = (start + at < width) & real
        g = tl.load(g_ptr + copy // K * width + start + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * width + start + at, mask=inside, other=0.0).to(tl.float32)
        dot += g * y
        tl.store(dy_ptr + row * width + start + at, (gate * g).to(dy_ptr.dtype.element_ty),
                 mask=start + at < width)
    tl.store(dp_ptr + copy + at, tl.sum(dot, axis=0).to(dp_ptr.dtype.element_ty), mask=real & (at == 0))


@triton.jit
def put(x_ptr, dst_ptr, peers_ptr, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Program c copies row c // K of x (n, width) to dst[c] = rank * rows + row: row `row` of the buffer
    (rows, width) whose address is peers[rank], in another GPU's memory. A negative dst is skipped."""
    copy = tl.program_id(0).to(tl.int64)
    dst = tl.load(dst_ptr + copy)
    if dst >= 0:
        buffer = tl.load(peers_ptr + dst // rows).to(tl.pointer_type(x_ptr.dtype.element_ty))
        buffer = tl.multiple_of(buffer, 16) + dst % rows * width
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + copy // K * width + at, mask=at < width)
            tl.store(buffer + at, x, mask=at < width)


@triton.jit
def get(out_ptr, dst_ptr, peers_ptr, rows, width, BLOCK: tl.constexpr):
    """out (N, width): row i is read from dst[i], where put() writes it; zeros where dst is negative."""
    row = tl.program_id(0).to(tl.int64)
    dst = tl.load(dst_ptr + row)
    held = tl.maximum(dst, 0)
    buffer = tl.load(peers_ptr + held // rows).to(tl.pointer_type(out_ptr.dtype.element_ty))
    buffer = tl.multiple_of(buffer, 16) + held % rows * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(buffer + at, mask=(at < width) & (dst + 0 * at >= 0), other=0.0)
        tl.store(out_ptr + row * width + at, y, mask=at < width)


@triton.jit
def grouped_mm(x_ptr, w_ptr, offs_ptr, y_ptr, I, O, w_expert, w_in, w_out, PROGRAMS, E: tl.constexpr,
               WIDE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """y (R, O): each row of x (R, I) times the matrix w (E, I, O; any strides) of its expert, whose rows end
    at offs (E,) int32; y's rows after the last end are not written. Each of PROGRAMS programs computes one
    tile of ROWS x COLUMNS after the other; a tile's rows belong to one expert. WIDE: E rounded up to a power
    of two; EVEN: DEPTH divides I."""
    expert = tl.arange(0, WIDE)
    end = tl.load(offs_ptr + expert, mask=expert < E, other=0)
    begin = tl.load(offs_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS  # of rows; masked experts have 0
    after = tl.cumsum(tiles, axis=0)
    across = (O + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), tl.sum(tiles) * across, PROGRAMS):
        down = tile // across
        mine = tl.sum((after <= down).to(tl.int32))  # the expert: how many are done before this tile
        is_mine = expert == mine
        last = tl.sum(tl.where(is_mine, end, 0)) - 1
        first = tl.sum(tl.where(is_mine, begin + (down - after + tiles) * ROWS, 0))
        row, column = first + tl.arange(0, ROWS), tile % across * COLUMNS + tl.arange(0, COLUMNS)
        at = tl.arange(0, DEPTH)
        # rows after the last are read as copies of it, and not written
        x_at = x_ptr + tl.minimum(row, last).to(tl.int64)[:, None] * I + at[None, :]
        w_at = w_ptr + mine.to(tl.int64) * w_expert + at[:, None] * w_in + column[None, :] * w_out
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, I, DEPTH):
            if EVEN:
                x, w = tl.load(x_at), tl.load(w_at, mask=(column < O)[None, :], other=0.0)
            else:
                x = tl.load(x_at, mask=(k + at < I)[None, :], other=0.0)
                w = tl.load(w_at, mask=(k + at < I)[:, None] & (column < O)[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision=PRECISION)
            x_at += DEPTH
            w_at += DEPTH * w_in
        y_at = y_ptr + row.to(tl.int64)[:, None] * O + column[None, :]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(row <= last)[:, None] & (column < O)[None, :])


@triton.jit
def grouped_wgrad(g_ptr, x_ptr, offs_ptr, dw_ptr, O, I, PROGRAMS, E: tl.constexpr, PRECISION: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """dw (E, O, I): each expert's rows of g (R, O), transposed, times its rows of x (R, I), which end at offs
    (E,) int32; zeros for an expert without rows. Tiles of ROWS x COLUMNS as in grouped_mm."""
    across = (I + COLUMNS - 1) // COLUMNS
    tiles = (O + ROWS - 1) // ROWS * across  # of an expert
    for tile in range(tl.program_id(0), E * tiles, PROGRAMS):
        mine, tile = tile // tiles, tile % tiles
        begin = tl.load(offs_ptr + mine - 1, mask=mine > 0, other=0)
        end = tl.load(offs_ptr + mine)
        o, i = tile // across * ROWS + tl.arange(0, ROWS), tile % across * COLUMNS + tl.arange(0, COLUMNS)
        row = begin + tl.arange(0, DEPTH)
        g_at = g_ptr + row.to(tl.int64)[None, :] * O + o[:, None]
        x_at = x_ptr + row.to(tl.int64)[:, None] * I + i[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(begin, end, DEPTH):  # rows after the end may hold anything, also NaN: both are masked
            inside = k + tl.arange(0, DEPTH) < end
            g = tl.load(g_at, mask=inside[None, :] & (o < O)[:, None], other=0.0)
            x = tl.load(x_at, mask=inside[:, None] & (i < I)[None, :], other=0.0)
            total = tl.dot(g, x, total, input_precision=PRECISION)
            g_at += DEPTH * O
            x_at += DEPTH * I
        dw_at = dw_ptr + mine.to(tl.int64) * O * I + o[:, None] * I + i[None, :]
        tl.store(dw_at, total.to(dw_ptr.dtype.element_ty), mask=(o < O)[:, None] & (i < I)[None, :])


@triton.jit
def add_rows(a_ptr, b_ptr, out_ptr, valid_ptr, width, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    """out (R, width) = a, plus b if BOTH, in the first *valid_ptr rows."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.where(row < tl.load(valid_ptr), width, 0)
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(a_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        if BOTH:
            x += tl.load(b_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + at, x.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def accumulate(x_ptr, out_ptr, n, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """out (n,) fp32 = x, or += x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    if ADD:
        x += tl.load(out_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def sum_shards(own_ptr, others_ptr, out_ptr, n, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """out (n,) fp32 = own (n,) + the sum of others (RANKS, n)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(own_ptr + at, mask=at < n).to(tl.float32)
    for _ in tl.static_range(RANKS):
        total += tl.load(others_ptr + at, mask=at < n).to(tl.float32)
        others_ptr += n
    tl.store(out_ptr + at, total, mask=at < n)


@triton.jit
def adamw(w_ptr, g_ptr, m_ptr, v_ptr, out_ptr, scalars_ptr, keep, gain1, gain2, eps, n, OUT: tl.constexpr,
          BLOCK: tl.constexpr):
    """One AdamW update of the fp32 masters w (n,), rounded into the model's weights out if OUT.
    scalars (4,) fp32: lr / (1 - beta1^t), sqrt(1 - beta2^t), the gradients' divisor, 1.0 if nothing may
    change (found_inf). keep = 1 - lr * weight decay, gain = 1 - beta. 28 bytes per weight, 30 with OUT."""
    if tl.load(scalars_ptr + 3) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(g_ptr + at, mask=inside) / tl.load(scalars_ptr + 2)
        m = tl.load(m_ptr + at, mask=inside)
        m += (g - m) * gain1
        v = tl.load(v_ptr + at, mask=inside)
        v += (g * g - v) * gain2
        w = tl.load(w_ptr + at, mask=inside) * keep
        w -= tl.load(scalars_ptr) * m / (tl.sqrt(v) / tl.load(scalars_ptr + 1) + eps)
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(v_ptr + at, v, mask=inside)
        tl.store(w_ptr + at, w, mask=inside)
        if OUT:
            tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=inside)

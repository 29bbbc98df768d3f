"""Triton kernels for operations in which torch reads or writes memory more often than it must.

The files that call them hold a torch twin of each, and decide which of the two runs. Most programs handle one
row, or BLOCK elements of a flat buffer. `x + 0 * at` broadcasts the scalar x to the shape of `at`.
"""
import torch
import triton
import triton.language as tl

from config import ceil_div
from ops.split_master import SplitMaster


@triton.jit
def cross_entropy(z_ptr, target_ptr, loss_ptr, scale_ptr, used, width, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr):
    """The loss of each row of logits z (R, width), which becomes its gradient, (softmax - onehot) / scale.

    The scale of a row, 1 / the sum of the exponentials, is known only when all of them are written. Loss and
    scale are 0 for a target below 0.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    target = tl.load(target_ptr + row)
    trained = target >= 0
    target = tl.maximum(target, 0)
    picked = tl.load(z_ptr + target).to(tl.float32)
    # A tile is (ROWS, BLOCK) columns in order.
    tile = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    top = -1e30  # exponentials are taken relative to this
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, ROWS * BLOCK):
        at = start + tile
        z = tl.load(z_ptr + at, mask=at < used, other=-float("inf")).to(tl.float32)
        best = tl.max(z)
        # True in the first tile, and rarely later: what is already written is scaled down.
        if best > top + 32:
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
    tl.store(loss_ptr + row, tl.where(trained, top - picked + tl.log(whole), 0.0))
    tl.store(scale_ptr + row, tl.where(trained, 1 / whole, 0.0))
    # Another thread may have written the target's column.
    tl.debug_barrier()
    tl.store(z_ptr + target, (tl.exp(picked - top) - whole).to(z_ptr.dtype.element_ty))


@triton.jit
def swiglu(gate_ptr, up_ptr, h_ptr, valid_ptr, width, PACKED: tl.constexpr, LIMITED: tl.constexpr,
           BLOCK: tl.constexpr):
    """h (R, width) = silu(gate) * up. gate, up (R, width), or if PACKED side by side in gate (R, 2 width).

    LIMITED: only the first *valid_ptr rows hold values, and the other rows are left alone.
    """
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * width * (2 if PACKED else 1)
    up_ptr = gate_ptr + width if PACKED else up_ptr + row * width
    end = tl.where(row < tl.load(valid_ptr), width, 0) if LIMITED else width
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + row * width + at, (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty),
                 mask=inside)


@triton.jit
def swiglu_backward(gate_ptr, up_ptr, grad_h_ptr, grad_gate_ptr, grad_up_ptr, valid_ptr, width,
                    PACKED: tl.constexpr, LIMITED: tl.constexpr, RECOMPUTE: tl.constexpr,
                    BLOCK: tl.constexpr):
    """grad_h (R, width) -> grad_gate and grad_up, laid out as gate and up. RECOMPUTE: grad_h becomes h."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * width * (2 if PACKED else 1)
    up_ptr = gate_ptr + width if PACKED else up_ptr + row * width
    grad_gate_ptr += row * width * (2 if PACKED else 1)
    grad_up_ptr = grad_gate_ptr + width if PACKED else grad_up_ptr + row * width
    end = tl.where(row < tl.load(valid_ptr), width, 0) if LIMITED else width
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_h = tl.load(grad_h_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        tl.store(grad_gate_ptr + at,
                 (grad_h * up * s * (1 + gate * (1 - s))).to(grad_gate_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_up_ptr + at, (grad_h * gate * s).to(grad_gate_ptr.dtype.element_ty), mask=inside)
        if RECOMPUTE:
            tl.store(grad_h_ptr + row * width + at, (gate * s * up).to(grad_h_ptr.dtype.element_ty),
                     mask=inside)


@triton.jit
def norm_backward(x_ptr, weight_ptr, grad_y_ptr, grad_x_ptr, out_ptr, sums_ptr, rows, width,
                  EPS: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
                  STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """out (R, width) = grad_x plus the gradient of the rows x of a norm, whose result has grad_y.

    CENTRED: LayerNorm, else RMSNorm. Each program writes its part of the weight's gradient to its row of sums
    (programs, width) fp32. BIAS: the parts of the bias's gradient stand below these. EPS is a constant,
    because torch's compiler would pass a number in fp64.
    """
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        at = row.to(tl.int64) * width + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_x = tl.load(grad_x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(x, axis=1, keep_dims=True) / width
            x = tl.where(inside, x - mean, 0.0)
        # With EPS 0 the scale of a row outside is infinite.
        scale = 1 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + EPS)
        x = tl.where(inside, x * scale, 0.0)
        of_weight += grad_y * x
        if BIAS:
            of_bias += grad_y
        grad = grad_y * weight
        along = tl.sum(grad * x, axis=1, keep_dims=True) / width  # This part would only make x longer.
        if CENTRED:
            grad -= tl.sum(grad, axis=1, keep_dims=True) / width
        grad_x += (grad - x * along) * scale
        tl.store(out_ptr + at, grad_x.to(out_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, BLOCK)
    inside = column < width
    tl.store(sums_ptr + program * width + column, tl.sum(of_weight, axis=0), mask=inside)
    if BIAS:
        tl.store(sums_ptr + (programs + program) * width + column, tl.sum(of_bias, axis=0), mask=inside)


@triton.jit
def place_within_expert(expert_ptr, place_ptr, counts_ptr, n, blocks, E: tl.constexpr, WIDE: tl.constexpr,
                        BLOCK: tl.constexpr):
    """place (n,): how many earlier copies of the same block have the same expert. expert (n,): of each copy.

    counts (E, blocks): the copies of each expert in each block. WIDE: E rounded up to a power of two.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, WIDE)
    expert = tl.load(expert_ptr + at, mask=at < n, other=WIDE)
    wants = (expert[:, None] == one[None, :]).to(tl.int32)  # (BLOCK, WIDE)
    before = tl.cumsum(wants, axis=0) - wants
    tl.store(place_ptr + at, tl.sum(before * wants, axis=1), mask=at < n)
    tl.store(counts_ptr + one * blocks + tl.program_id(0), tl.sum(wants, axis=0), mask=one < E)


@triton.jit
def sort_copies(expert_ptr, place_ptr, cumulative_ptr, perm_ptr, slot_ptr, counts_ptr, ends_ptr, n, blocks,
                E: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Place each copy by place_within_expert's results: slot (n,), and the copy in each slot, perm (n,)."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, WIDE)
    count = tl.load(cumulative_ptr + one * blocks + blocks - 1, mask=one < E, other=0)
    end = tl.cumsum(count, axis=0)
    first = end - count  # the first slot of each expert's copies in this block
    first += tl.load(cumulative_ptr + one * blocks + block - 1, mask=(one < E) & (one * 0 + block > 0),
                     other=0)
    expert = tl.load(expert_ptr + at, mask=at < n, other=WIDE)
    chosen = expert[:, None] == one[None, :]  # (BLOCK, WIDE)
    slot = tl.sum(tl.where(chosen, first[None, :], 0), axis=1)
    slot += tl.load(place_ptr + at, mask=at < n, other=0)
    tl.store(slot_ptr + at, slot, mask=at < n)
    tl.store(perm_ptr + slot, at.to(tl.int64), mask=at < n)
    if block == 0:  # counts (E,) int64, and where each expert's slots end, (E,) int32
        tl.store(counts_ptr + one, count, mask=one < E)
        tl.store(ends_ptr + one, end.to(tl.int32), mask=one < E)


def counting_sort(expert, E):
    """ops.permute.sort_by_expert: each block counts its copies, then each copy is placed."""
    n = expert.numel()
    wide = triton.next_power_of_2(E)
    block = max(8, min(128, 16384 // wide))  # a table of (block, wide) must fit into a multiprocessor
    blocks = triton.cdiv(n, block)
    options = {"E": E, "WIDE": wide, "BLOCK": block, "num_warps": 4 if wide <= 64 else 8}
    place = torch.empty(n, dtype=torch.int32, device=expert.device)
    counts = torch.empty(E, blocks, dtype=torch.int32, device=expert.device)
    place_within_expert[(blocks,)](expert, place, counts, n, blocks, **options)

    perm = torch.empty_like(expert)
    inv_perm = torch.empty_like(expert)
    totals = expert.new_empty(E)
    ends = torch.empty(E, dtype=torch.int32, device=expert.device)
    cumulative = counts.cumsum(1)
    sort_copies[(blocks,)](expert, place, cumulative, perm, inv_perm, totals, ends, n, blocks, **options)
    return perm, inv_perm, totals, ends


@triton.jit
def permute(x_ptr, index_ptr, out_ptr, limit, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Row i of out (R, width) is row index[i] // K of x, or zeros where index[i] is `limit` or more."""
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
    """Row r of out (n, width) is the sum of its K copies y[slot[r, k]], each times p[r, k] if GATED."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            slot = tl.load(slot_ptr + row * K + k)
            held = inside & (slot + 0 * at < limit)
            y = tl.load(y_ptr + slot * width + start + at, mask=held, other=0.0).to(tl.float32)
            gate = tl.load(p_ptr + row * K + k).to(tl.float32) if GATED else 1.0
            total += gate * y
        tl.store(out_ptr + row * width + start + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unpermute_backward(y_ptr, p_ptr, perm_ptr, grad_ptr, grad_y_ptr, grad_p_ptr, limit, width,
                       K: tl.constexpr, BLOCK: tl.constexpr):
    """grad (n, width) -> grad_y[s] = p[c] grad[row] and grad_p[c] = <y[s], grad[row]>, y (slots, width).

    Slot s holds copy c = perm[s] of row c // K. Where c is `limit` or more, grad_y is zero.
    """
    slot = tl.program_id(0).to(tl.int64)
    copy = tl.load(perm_ptr + slot)
    at = tl.arange(0, BLOCK)
    real = copy + 0 * at < limit  # (BLOCK,), all the same
    gate = tl.load(p_ptr + copy + 0 * at, mask=real, other=0.0).to(tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = (start + at < width) & real
        grad = tl.load(grad_ptr + copy // K * width + start + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + slot * width + start + at, mask=inside, other=0.0).to(tl.float32)
        dot += grad * y
        tl.store(grad_y_ptr + slot * width + start + at, (gate * grad).to(grad_y_ptr.dtype.element_ty),
                 mask=start + at < width)
    tl.store(grad_p_ptr + copy + at, tl.sum(dot, axis=0).to(grad_p_ptr.dtype.element_ty),
             mask=real & (at == 0))


@triton.jit
def put(x_ptr, dst_ptr, peers_ptr, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Copy row c // K of x (n, width) to dst[c] in the memory of other GPUs. A negative dst is skipped.

    dst[c] = rank * rows + row means row `row` of the buffer (rows, width) whose address is peers[rank].
    """
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
    """Read row i of out (N, width) from dst[i], where put() writes it; zeros where dst is negative."""
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
def quantise(x_ptr, scale_ptr, rows_ptr, columns_ptr, height, width, first, total, ROWS: tl.constexpr,
             TRANSPOSED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """x (height, width) / *scale in fp8, as rows `first` and on of a matrix (total, width), and transposed.

    rows (total, width) is written if ROWS, columns (width, total) if TRANSPOSED.
    """
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (row < height)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    form = rows_ptr.dtype.element_ty if ROWS else columns_ptr.dtype.element_ty
    narrow = (x * tl.div_rn(1.0, tl.load(scale_ptr))).to(form)  # an exact inverse, of a power of two
    row_of_all = first + row
    if ROWS:
        tl.store(rows_ptr + row_of_all[:, None] * width + column[None, :], narrow, mask=inside)
    if TRANSPOSED:
        inside = (column < width)[:, None] & (row < height)[None, :]
        tl.store(columns_ptr + column[:, None] * total + row_of_all[None, :], tl.trans(narrow), mask=inside)


@triton.jit
def sum_slices(own_ptr, others_ptr, out_ptr, n, RANKS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """out (n,) fp32 = own (n,) + the sum of others (RANKS, n), or += if ADD."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(own_ptr + at, mask=at < n).to(tl.float32)
    for _ in tl.static_range(RANKS):
        total += tl.load(others_ptr + at, mask=at < n).to(tl.float32)
        others_ptr += n
    if ADD:
        total += tl.load(out_ptr + at, mask=at < n)
    tl.store(out_ptr + at, total, mask=at < n)


@triton.jit
def adamw(w_ptr, grad_ptr, m_ptr, v_ptr, out_ptr, scalars_ptr, keep, gain1, gain2, eps, n, OUT: tl.constexpr,
          SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """One AdamW update of the fp32 masters w (n,), rounded into the model's weights `out` if OUT.

    scalars (4,) fp32: lr / (1 - beta1^t); sqrt(1 - beta2^t); the divisor of the gradients; 1.0 if nothing may
    change (not_finite). keep = 1 - lr * weight decay, gain = 1 - beta. The moments m and v (n,) are fp32 or
    bf16. SPLIT: out (n,) has the bits of bf16 weights and w the low bits of ops/split_master.py, both int16.
    """
    if tl.load(scalars_ptr + 3) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        grad = tl.load(grad_ptr + at, mask=inside).to(tl.float32) / tl.load(scalars_ptr + 2)
        m = tl.load(m_ptr + at, mask=inside).to(tl.float32)
        m += (grad - m) * gain1
        v = tl.load(v_ptr + at, mask=inside).to(tl.float32)
        v += (grad * grad - v) * gain2
        w = tl.load(w_ptr + at, mask=inside)
        if SPLIT:
            bits = (tl.load(out_ptr + at, mask=inside).to(tl.int32) << 16) + w.to(tl.int32)
            w = bits.to(tl.float32, bitcast=True)
        w *= keep
        w -= tl.load(scalars_ptr) * m / (tl.sqrt(v) / tl.load(scalars_ptr + 1) + eps)
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=inside)
        if SPLIT:
            bits = w.to(tl.int32, bitcast=True)
            upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # the nearest, the even one at equal distance
            upper = tl.where(w == w, upper, 0x7FC0)  # nan stays nan
            low = tl.minimum(tl.maximum(bits - (upper << 16), -0x7FFF), 0x7FFF)
            tl.store(out_ptr + at, upper.to(tl.int16), mask=inside)
            tl.store(w_ptr + at, low.to(tl.int16), mask=inside)
        else:
            tl.store(w_ptr + at, w, mask=inside)
            if OUT:
                tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=inside)


def step_adamw(adam, lr, divisor, not_finite):
    """AdamW.step of optim.py, for its AdamW: 28 bytes per weight whose master is split."""
    beta1, beta2 = adam.betas
    t = adam.step_count.double()
    step_size = lr / (1 - beta1 ** t)
    correction = (1 - beta2 ** t).sqrt()
    scalars = torch.stack([step_size, correction, divisor, not_finite]).float()
    for bucket in reversed(adam.buckets):
        master = bucket.master
        state = adam.state[master]
        decay = adam.decay if bucket.decayed else 0.0
        is_split = isinstance(master, SplitMaster)
        updated = master.low if is_split else master
        rounded = bucket.own.view(torch.int16) if is_split else bucket.own
        adamw[(ceil_div(master.numel(), 2048),)](
            updated, bucket.grad_total, state["exp_avg"], state["exp_avg_sq"], rounded, scalars,
            1 - lr * decay, 1 - beta1, 1 - beta2, adam.eps, master.numel(),
            OUT=bucket.own.dtype != master.dtype, SPLIT=is_split, BLOCK=2048, num_warps=8)
        bucket.after_update()

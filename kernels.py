"""Three Triton kernels, where torch.compile reads memory more often than it must. fused.py holds their torch
twins and decides; this file is imported on a GPU only."""
import triton
import triton.language as tl


@triton.jit
def cross_entropy(z_ptr, target_ptr, loss_ptr, used, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program, one row of logits z (N, width): the loss, and softmax - onehot in the place of the logits.
    The row stays in the cache between the passes: memory sees one read and one write."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    target = tl.load(target_ptr + row)
    # (ROWS, BLOCK) columns in order
    tile = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # pass 1: each of BLOCK lanes keeps its maximum and its sum of exponentials, rescaled once per ROWS words
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, used, ROWS * BLOCK):
        z = tl.load(z_ptr + start + tile, mask=start + tile < used, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(z, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new[None, :]), axis=0)
        top = new
    best = tl.max(top, axis=0)
    lse = best + tl.log(tl.sum(total * tl.exp(top - best), axis=0))
    tl.store(loss_ptr + row, lse - tl.load(z_ptr + target).to(tl.float32))
    tl.debug_barrier()  # the target's logit is read before pass 2 overwrites it
    for start in range(0, width, ROWS * BLOCK):
        at = start + tile
        z = tl.load(z_ptr + at, mask=at < used, other=-float("inf")).to(tl.float32)
        g = tl.exp(z - lse) - tl.where(at == target, 1.0, 0.0)
        tl.store(z_ptr + at, g.to(z_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def swiglu(a_ptr, b_ptr, h_ptr, width, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """gate a, up b (R, width), or side by side in a (R, 2 width) if PACKED -> h (R, width) = silu(a) * b.
    One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * width * (2 if PACKED else 1)
    b_ptr = a_ptr + width if PACKED else b_ptr + row * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + row * width + at, (a * tl.sigmoid(a) * b).to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(a_ptr, b_ptr, dh_ptr, da_ptr, db_ptr, width, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """dh (R, width) -> da and db, laid out as a and b."""
    row = tl.program_id(0).to(tl.int64)
    a_ptr += row * width * (2 if PACKED else 1)
    b_ptr = a_ptr + width if PACKED else b_ptr + row * width
    da_ptr += row * width * (2 if PACKED else 1)
    db_ptr = da_ptr + width if PACKED else db_ptr + row * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dh_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(a)
        tl.store(da_ptr + at, (d * b * s * (1 + a * (1 - s))).to(da_ptr.dtype.element_ty), mask=inside)
        tl.store(db_ptr + at, (d * a * s).to(da_ptr.dtype.element_ty), mask=inside)

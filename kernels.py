"""Three Triton kernels, where torch.compile reads memory more often than it must. fused.py holds their torch twins and
decides; this file is imported on a GPU only."""
import triton
import triton.language as tl


@triton.jit
def cross_entropy(z_ptr, target_ptr, loss_ptr, used, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program, one row of logits z (N, width): the loss, and softmax - onehot in the place of the logits.
    The row stays in the cache between the passes: memory sees one read and one write."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * width
    target = tl.load(target_ptr + row)
    tile = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # (ROWS, BLOCK) consecutive columns
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
def swiglu(y_ptr, p_ptr, h_ptr, width, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """y (R, 2 width) = gate | up -> h (R, width) = silu(gate) * up, times p (R,) if GATED. One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(p_ptr + row).to(tl.float32) if GATED else 1.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        a = tl.load(y_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(y_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + row * width + at, (a * tl.sigmoid(a) * b * scale).to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(y_ptr, p_ptr, dh_ptr, dy_ptr, dp_ptr, width, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """dh (R, width) -> dy (R, 2 width), and dp (R,) = the row's sum of dh * silu(gate) * up if GATED."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(p_ptr + row).to(tl.float32) if GATED else 1.0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        a = tl.load(y_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(y_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dh_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(a)
        if GATED:
            total += d * a * s * b
            d *= scale
        da = d * b * s * (1 + a * (1 - s))
        tl.store(dy_ptr + row * 2 * width + at, da.to(dy_ptr.dtype.element_ty), mask=inside)
        tl.store(dy_ptr + row * 2 * width + width + at, (d * a * s).to(dy_ptr.dtype.element_ty), mask=inside)
    if GATED:
        tl.store(dp_ptr + row, tl.sum(total, axis=0).to(dp_ptr.dtype.element_ty))

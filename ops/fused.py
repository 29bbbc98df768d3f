"""Where plain autograd moves large tensors too often: the head with its cross-entropy, GELU, SwiGLU, and the
rows that go to the experts and come back.

Each has a Triton kernel (kernels.py, on a GPU) and a torch twin here, which tests compare and CPUs use.
"""
import torch
import torch.nn.functional as F


def on_gpu(x):
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64)


# -----------------------------------------------------------------------------
# head and cross-entropy. at 128,256 words the logits of 16,384 tokens are 4.2 GB in bf16; plain autograd
# writes them, an fp32 copy, the softmax and its gradient. here they are written once, read once, and
# overwritten by their gradient, but for a factor of each row that is known at the row's end only: it is
# applied to the small matrices of backward, together with the scalar that backward brings

def cross_entropy_rows(z, target, used):
    """z (N, V) logits of which `used` columns are words, target (N,) -> (N,) losses and scales, fp32; z
    becomes (softmax - onehot) / scale."""
    if not on_gpu(z) or z.dtype == torch.float16:  # whose range is too short for exponentials
        parts = [cross_entropy_rows_torch(*part, used)
                 for part in zip(z.split(1024), target.split(1024), strict=True)]  # in fp32: not all at once
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    from ops import kernels
    loss, scale = torch.empty(2, z.size(0), dtype=torch.float32, device=z.device)
    kernels.cross_entropy[(z.size(0),)](z, target, loss, scale, used, z.size(1), ROWS=2, BLOCK=2048,
                                        num_warps=4)
    return loss, scale


def cross_entropy_rows_torch(z, target, used):
    wide = z[:, :used].to(torch.promote_types(z.dtype, torch.float32))
    lse = wide.logsumexp(1)  # (N,)
    loss = lse - wide.gather(1, target.unsqueeze(1)).squeeze(1)
    p = (wide - lse.unsqueeze(1)).exp_()
    p.scatter_add_(1, target.unsqueeze(1), -torch.ones_like(p[:, :1]))
    z[:, :used] = p.to(z.dtype)
    z[:, used:] = 0
    return loss, torch.ones_like(loss)


class LinearCrossEntropy(torch.autograd.Function):
    """x (N, C), w (V, C), target (N,) int64, used <= V words -> () sum of the cross-entropy in nats, at least
    fp32."""

    @staticmethod
    def forward(ctx, x, w, target, used):
        z = F.linear(x, w)  # (N, V)
        loss, scale = cross_entropy_rows(z, target, used)
        ctx.save_for_backward(x, w, z, scale)
        return loss.sum()

    @staticmethod
    def backward(ctx, g):
        x, w, z, scale = ctx.saved_tensors  # z is (softmax - onehot) / scale by now
        scale = (g * scale).unsqueeze(1)  # (N, 1)
        return (z @ w).mul_(scale), z.T @ torch.mul(x, scale, out=torch.empty_like(x)), None, None


# -----------------------------------------------------------------------------
# SwiGLU: h = silu(gate) * up. autograd would make the gradients of the halves of a glued product and then
# copy them together

def silu_mul(a, b=None, stop=None):
    """gate a, up b (R, f), or both side by side in a (R, 2f) -> (R, f). No autograd. On a GPU rows from stop
    () int32 on are left as they are: they hold nothing."""
    if not on_gpu(a):
        a, b = a.chunk(2, dim=1) if b is None else (a, b)
        return F.silu(a) * b
    from ops import kernels
    f = a.size(1) // (2 if b is None else 1)
    h = torch.empty(a.size(0), f, dtype=a.dtype, device=a.device)
    two, last = a if b is None else b, a if stop is None else stop
    kernels.swiglu[(a.size(0),)](a, two, h, last, f, PACKED=b is None, STOPS=stop is not None, BLOCK=1024,
                                 num_warps=4)
    return h


def silu_mul_backward(dh, a, b=None, stop=None, again=False):
    """-> the gradients of gate and up as a pair, or of both side by side as one tensor. again: dh becomes h,
    which then need not be kept."""
    if on_gpu(a):
        from ops import kernels
        da, db = torch.empty_like(a), None if b is None else torch.empty_like(b)
        two, d_two = (a, dh) if b is None else (b, db)
        kernels.swiglu_backward[(a.size(0),)](a, two, dh, da, d_two, a if stop is None else stop, dh.size(1),
                                              PACKED=b is None, STOPS=stop is not None, AGAIN=again,
                                              BLOCK=1024, num_warps=4)
        return da if b is None else (da, db)
    gate, up = a.chunk(2, dim=1) if b is None else (a, b)
    s = torch.sigmoid(gate)
    pair = dh * up * s * (1 + gate * (1 - s)), dh * gate * s
    if again:
        dh.copy_(gate * s * up)
    return torch.cat(pair, dim=1) if b is None else pair


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return silu_mul(y)

    @staticmethod
    def backward(ctx, dh):
        return silu_mul_backward(dh.contiguous(), *ctx.saved_tensors)


def swiglu(y):
    """y (R, 2f) = gate | up -> silu(gate) * up, (R, f)"""
    if on_gpu(y):
        return _SwiGLU.apply(y)
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def gelu(x):
    """The tanh form, as GPT-2 has it (arXiv:1606.08415, section 2). Compiled it is written as x times a
    sigmoid, the same function: one exponential instead of a tanh of many branches."""
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    return F.gelu(x, approximate="tanh")


# -----------------------------------------------------------------------------
# gradients into the fp32 sums of parallel.py's buckets

def accumulate(total, g, first):
    """total (fp32) = g of the model's dtype, or += g: a copy first, which needs no zeroing before."""
    if on_gpu(g) and g.dtype != total.dtype and g.numel() >= 2**18 and g.is_contiguous():
        from ops import kernels  # torch's own conversion reaches a third of the memory's speed
        kernels.widen[(-(-g.numel() // 4096),)](g, total, g.numel(), ADD=not first, BLOCK=4096, num_warps=8)
    elif first:
        total.copy_(g)
    else:
        total.add_(g)


def add_up(total, own, others):
    """total (n,) fp32 = own (n,) and each of others (ranks, n), of the model's dtype."""
    if on_gpu(own) and own.dtype != total.dtype:
        from ops import kernels
        n = own.numel()
        kernels.add_up[(-(-n // 2048),)](own, others, total, n, RANKS=len(others), BLOCK=2048, num_warps=4)
        return
    total.copy_(own)
    for part in others:
        total.add_(part)


# -----------------------------------------------------------------------------
# rows to the experts and back. moe.py's dispatch and combine are each other's adjoint, so all four directions
# are gathers (no atomics), by src (the copy in each slot) or by slot (of each copy). before that a counting
# sort: torch's sort launches six kernels, and order among equals is all that is asked

def a_block(E):
    """Copies that tally counts at once: their (copies, E) table has to fit into a multiprocessor. -> with E
    rounded up to a power of two"""
    wide = 1 << (E - 1).bit_length()
    return max(8, min(128, 16384 // wide)), wide


def tally(expert, E):
    """expert (N,) int64, of each copy -> rank (N,): how many before it in its block want the same; upto
    (E, blocks): copies in a block and those before; the last is all of them. A counting sort's first half."""
    N = expert.numel()
    if not on_gpu(expert):  # one block
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=E)
        place = torch.empty_like(expert).scatter_(0, order, torch.arange(N, device=expert.device))
        rank = place - (counts.cumsum(0) - counts)[expert]
        return rank, counts.unsqueeze(1)
    from ops import kernels
    rank, (block, wide) = torch.empty(N, dtype=torch.int32, device=expert.device), a_block(E)
    blocks = -(-N // block)
    counts = torch.empty(E, blocks, dtype=torch.int32, device=expert.device)
    kernels.tally[(blocks,)](expert, rank, counts, N, blocks, E=E, WIDE=wide, BLOCK=block,
                             num_warps=4 if wide <= 64 else 8)
    return rank, counts.cumsum(1)


def settle(expert, rank, upto, start, each, rows):
    """Its second half: place (N,) of each copy, if its expert's copies begin at start (E,); -1 where that is
    over the end of a window of `rows` rows, which `each` experts share (window.py)."""
    if not on_gpu(expert):
        place = start[expert] + rank
        return torch.where(place < (expert // each + 1) * rows, place, -1)
    from ops import kernels
    place = torch.empty_like(expert)
    blocks = upto.size(1)
    kernels.settle[(blocks,)](expert, rank, upto, start, place, expert.numel(), rows, blocks, EACH=each,
                              BLOCK=a_block(len(upto))[0], num_warps=4)
    return place


def meet(runs, rank, rows, room, need):
    """runs (ep, E) int64, each rank's copies for each expert, in windows of `rows` rows by expert, by sender
    -> starts (E,), the places of this rank's first copies; ends (e,) int32, of the runs in this rank's
    window, `room` at most. need () int64 becomes what came here, if that is more."""
    ep, E = runs.shape
    if not on_gpu(runs):
        # by owner (ep, e*ep): each rank's rows for its first expert, ..., for its last
        runs = runs.T.reshape(ep, E)
        stops = runs.cumsum(1)
        torch.maximum(need, stops[rank, -1], out=need)
        starts = stops - runs + rows * torch.arange(ep, device=runs.device).unsqueeze(1)
        ends = stops[rank].view(-1, ep)[:, -1].clamp(max=room)
        return starts.view(E, ep)[:, rank].contiguous(), ends.to(torch.int32)
    from ops import kernels
    starts, ends = runs.new_empty(E), torch.empty(E // ep, dtype=torch.int32, device=runs.device)
    kernels.meet[(ep,)](runs, starts, ends, need, rank, rows, room, EP=ep, E=E, WIDE=a_block(E)[1],
                        num_warps=4)
    return starts, ends


def take(x, index, holes):
    """Rows of x (m, ...) by index; with holes, index m and more stand for a row of zeros."""
    if not holes:
        return x[index]
    outside = index >= x.size(0)
    return x[index.clamp(max=x.size(0) - 1)].masked_fill(outside.view(-1, *[1] * (x.ndim - 1)), 0)


def spread(x, src, K, holes):
    """x (n, C), src (slots,) int64 -> (slots, C): row src // K of x; zeros where src is n*K (holes)."""
    if not on_gpu(x) or not x.numel():
        return take(x, src // K, holes)
    from ops import kernels
    out = x.new_empty(src.numel(), x.size(1))
    kernels.spread[(src.numel(),)](x.contiguous(), src, out, x.size(0) * K, x.size(1), K=K, BLOCK=512,
                                   num_warps=2)
    return out


def collect(y, slot, K, holes, p=None):
    """y (slots, C), slot (n*K,) int64, gates p (n, K) -> (n, C): the sum of a row's K copies, each times its
    gate; nothing where slot is `slots` (holes)."""
    if not on_gpu(y) or not y.numel():
        copies = take(y, slot, holes).unflatten(0, (-1, K))  # (n, K, C)
        return (copies if p is None else copies * p.unsqueeze(2)).sum(1)
    from ops import kernels
    out = y.new_empty(slot.numel() // K, y.size(1))
    kernels.collect[(out.size(0),)](y.contiguous(), y if p is None else p.contiguous(), slot, out, y.size(0),
                                    y.size(1), K=K, GATED=p is not None, BLOCK=512, num_warps=2)
    return out


def collect_backward(y, p, src, K, holes, g):
    """The gradients of collect's y and p, for g (n, C)."""
    if not on_gpu(y) or not y.numel():
        rows = spread(g, src, K, holes)  # (slots, C)
        dp = y.new_zeros(p.numel() + 1).scatter_(0, src, (y * rows).sum(1))[:-1]  # holes: src is n*K
        return rows * take(p.flatten(), src, holes).unsqueeze(1), dp.view_as(p)
    from ops import kernels
    dy, dp = torch.empty_like(y), torch.zeros_like(p)
    y, p = y.contiguous(), p.contiguous()
    kernels.collect_backward[(src.numel(),)](y, p, src, g.contiguous(), dy, dp, p.numel(), y.size(1), K=K,
                                             BLOCK=512, num_warps=2)
    return dy, dp


# -----------------------------------------------------------------------------
# the experts' SwiGLU MLP as one function: its gradients come out in the parameters' own layout, nothing is
# copied or added that need not be

class ExpertMLP(torch.autograd.Function):
    """x (R, C) by expert, runs ending at ends (e,) int32, or (e, rows, C) with ends None; w1, w3 (e, F, C),
    w2 (e, C, F) -> like x; what is in rows after the last run is undefined. bf16 on the GPU, torch's grouped
    GEMM or bmm. into (>= R, C): where the result and, in backward, the gradient of x shall stand, or None.
    moe.ffn is its slow twin."""

    @staticmethod
    def forward(ctx, x, w1, w3, w2, ends, into):
        ctx.ends, ctx.into = ends, into
        a, b = (product(x, w.transpose(1, 2), ends) for w in (w1, w3))  # (R, F) each
        h = silu_mul(a.flatten(0, -2), b.flatten(0, -2), None if ends is None else ends[-1]).view_as(a)
        ctx.save_for_backward(x, a, b, w1, w3, w2)
        y = product(h, w2.transpose(1, 2), ends)
        return y if into is None else add_rows(y, None, into, ends[-1])

    @staticmethod
    def backward(ctx, dy):
        x, a, b, w1, w3, w2 = ctx.saved_tensors
        ends, dy = ctx.ends, dy.contiguous()
        stop = None if ends is None else ends[-1]
        h = product(dy, w2, ends)  # its gradient
        da, db = silu_mul_backward(*(t.flatten(0, -2) for t in (h, a, b)), stop, again=True)
        da, db, dw2 = da.view_as(a), db.view_as(a), outer(dy, h, ends)  # h itself by now
        dx, more = product(da, w1, ends), product(db, w3, ends)
        dx = dx.add_(more) if ctx.into is None else add_rows(dx, more, ctx.into, stop)
        return dx, outer(da, x, ends), outer(db, x, ends), dw2, None, None


def product(x, w, ends):
    """Each expert's rows times its matrix: (R, I), (e, I, O) -> (R, O)"""
    return torch.bmm(x, w) if ends is None else F.grouped_mm(x, w, offs=ends)


def add_rows(a, b, into, stop):
    """into[:stop] = a (R, C), plus b. -> into[:R], of which rows from stop () int32 on are left as they
    were."""
    if on_gpu(a):
        from ops import kernels
        kernels.add_rows[(a.size(0),)](a, a if b is None else b, into, stop, a.size(1), TWO=b is not None,
                                       BLOCK=512, num_warps=2)
    else:
        into[:stop] = a[:stop] if b is None else a[:stop] + b[:stop]
    return into[:a.size(0)]


def outer(g, x, ends):
    """Each expert's weight gradient: (R, O), (R, I) -> (e, O, I); zero for an expert without rows"""
    return torch.bmm(g.transpose(1, 2), x) if ends is None else F.grouped_mm(g.t(), x, offs=ends)

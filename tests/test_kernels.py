"""Each Triton kernel beside its torch twin, on the GPU if there is one, else in Triton's interpreter."""
import dataclasses
import math
import typing
from types import SimpleNamespace as Some

import pytest
import torch
import torch.nn.functional as F
from test_model import random_model

import plan
from config import Config
from ddp import DataParallel
from fast import buckets, symm_mem
from fast.buckets import CopyBucket
from fast.choose import Choice
from layers import NORMS, NormKind
from model import DTYPES
from ops import activations, backend, cross_entropy, grouped_mm, norms, permute
from ops.split_master import SplitMaster, whole
from optim import Optimizer
from parallel import make_mesh
from runtime.launch import World

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton has no wheel for this system")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """ops/ uses its kernels for CPU tensors too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(backend, "use_triton", lambda x: x.dtype in backend.DTYPES)
        count_with_any_numpy(monkeypatch)
    from ops import kernels
    torch.manual_seed(0)
    return kernels


def count_with_any_numpy(monkeypatch):
    """Triton 3.6's interpreter takes int() of an array with one number, which numpy 2.4 refuses."""
    from triton.runtime import interpreter
    real = interpreter._patch_lang_tensor

    def patch(tensor, *rest):
        real(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles in a small product. Triton's interpreter multiplies the bits of bf16 as whole numbers."""
    monkeypatch.setattr(grouped_mm, "use_torch", lambda *_: False)
    monkeypatch.setattr(grouped_mm, "pointer_tiles", lambda *_: ((16, 32, 16, 4, 2), (32, 16, 16, 4, 2)))
    if DEVICE == "cpu":
        from triton.runtime import interpreter
        real = interpreter.InterpreterBuilder.create_dot

        def create_dot(self, a, b, *rest):
            wide = [self.create_fp_ext(t, interpreter.tl.float32) if t.dtype == interpreter.tl.bfloat16 else t
                    for t in (a, b)]
            return real(self, *wide, *rest)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 1e-5}


def torch_twin(f, *args):
    """f on fp64 copies, for which ops/ takes its torch twin."""
    args = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    return f(*args)


def assert_near(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def with_gradients(f, leaves, *grads):
    """Return f's output and the gradients of its leaves, for grads: that of the output, or ones."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, *grads)]


# -----------------------------------------------------------------------------
# Head and cross-entropy

@pytest.mark.parametrize("width, used", [(128, 65), (128, 128), (9984, 9900), (50304, 50257), (70, 65)])
def test_cross_entropy(width, used):
    """The narrowest in fp16, whose exponentials would overflow: it takes the twin."""
    z = (randn(3, width) * 4).to(torch.float16 if width == 70 else torch.bfloat16)
    target = torch.tensor([0, used - 1, used // 3], device=DEVICE)
    reference = z.double()
    want, _ = cross_entropy.cross_entropy_rows_torch(reference, target, used)
    loss, scale = cross_entropy.cross_entropy_rows(z, target, used)
    assert_near(loss, want, 1e-5)
    assert_near(z * scale[:, None], reference, 4e-3)
    assert not z[:, used:].any()


@pytest.mark.parametrize("has_bias, compiler", [(False, None), (True, "eager"), (True, "aot_eager")])
def test_the_head_has_the_loss_and_the_gradients_of_autograd(has_bias, compiler, monkeypatch):
    if compiler:  # as --compile has it
        scale_rows = torch.compile(cross_entropy.scale_rows, dynamic=True, backend=compiler)
        monkeypatch.setattr(cross_entropy, "scale_rows", scale_rows)
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in ((6, 8), (16, 8), (16,))[:2 + has_bias]]
    target = torch.tensor([1, 2, -100, 4, 11, 0])

    def plain_loss(x, w, bias=None):
        return F.cross_entropy(F.linear(x, w, bias)[:, :12], target, reduction="sum")

    def fused_loss(x, w, *bias):
        return cross_entropy.linear_cross_entropy(x, w, target, 12, *bias)
    twice = torch.tensor(2.0, dtype=torch.float64)
    found = [with_gradients(loss, leaves, twice) for loss in (fused_loss, plain_loss)]
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


def test_a_target_that_takes_no_part():
    """Loss and gradients of head and input are exactly 0 there, the others as without it."""
    x, w = randn(4, 16).requires_grad_(), randn(384, 16).requires_grad_()
    target = torch.tensor([5, cross_entropy.IGNORE, 299, cross_entropy.IGNORE], device=DEVICE)
    loss = cross_entropy.linear_cross_entropy(x, w, target, 300)
    dx, dw = torch.autograd.grad(loss, (x, w))
    part = x.detach()[::2].contiguous().requires_grad_()
    want = cross_entropy.linear_cross_entropy(part, w, target[::2].contiguous(), 300)
    assert loss.item() == want.item() and not dx[1::2].any()
    for got, expected in zip((dx[::2], dw), torch.autograd.grad(want, (part, w)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    twin = torch_twin(cross_entropy.cross_entropy_rows, (x @ w.T).detach(), target, 300)
    loss, scale = cross_entropy.cross_entropy_rows((x @ w.T).detach(), target, 300)
    assert not any(t[1::2].any() for t in (loss, scale, *twin))
    assert_near(loss, twin[0], 1e-2)


def test_cross_entropy_of_certain_predictions():
    z = torch.full((2, 9984), -3e4, device=DEVICE, dtype=torch.bfloat16)
    z[0, 7], z[1, 9983] = 3e4, 3e4
    loss, _ = cross_entropy.cross_entropy_rows(z, torch.tensor([7, 9983], device=DEVICE), 9984)
    assert loss.tolist() == [0, 0] and not z.any()

    # Where all logits are large, none is likelier than another.
    z, target = torch.full((2, 128), -9984.0, device=DEVICE), torch.tensor([7, 99], device=DEVICE)
    twin, _ = cross_entropy.cross_entropy_rows_torch(z.clone(), target, 128)
    loss, _ = cross_entropy.cross_entropy_rows(z, target, 128)
    assert [*loss.tolist(), *twin.tolist()] == pytest.approx([math.log(128)] * 4, abs=1e-6)


def test_cross_entropy_of_rising_logits():
    """Later tiles hold the larger logits: what is already written is scaled down, twice."""
    z = (torch.arange(3)[:, None] * torch.arange(12288) // 4096 * 20.0 + torch.rand(3, 12288)).to(DEVICE)
    reference, target = z.double(), torch.tensor([5, 5000, 12000], device=DEVICE)
    z = z.float()
    want, _ = cross_entropy.cross_entropy_rows_torch(reference, target, 12000 + 1)
    loss, scale = cross_entropy.cross_entropy_rows(z, target, 12000 + 1)
    assert_near(loss, want, 1e-5)
    torch.testing.assert_close((z * scale[:, None]).double(), reference, rtol=1e-4, atol=1e-30)


# -----------------------------------------------------------------------------
# SwiGLU, and rows to experts

@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("n_valid", [None, 3])
def test_swiglu(packed, n_valid):
    gate, up, dh = randn(5, 1300), randn(5, 1300), randn(5, 1300)
    pair = (torch.cat([gate, up], 1), None) if packed else (gate, up)
    rows = 5 if n_valid is None else n_valid
    n_valid = None if n_valid is None else torch.tensor(n_valid, dtype=torch.int32, device=DEVICE)
    silu_mul, backward = activations.silu_mul, activations.silu_mul_backward
    assert_near(silu_mul(*pair, n_valid)[:rows], torch_twin(silu_mul, *pair)[:rows], 1e-2)
    got, want = backward(dh, *pair, n_valid), torch_twin(backward, dh, *pair)
    for x, y in zip((got,) if packed else got, (want,) if packed else want, strict=True):
        assert_near(x[:rows], y[:rows], 2e-2)
    recomputed = backward(dh, *pair, n_valid, recompute=True)  # the same, and dh becomes forward's h
    for x, y in zip((got,) if packed else got, (recomputed,) if packed else recomputed, strict=True):
        assert torch.equal(x[:rows], y[:rows])
    assert torch.equal(dh[:rows], silu_mul(*pair, n_valid)[:rows])


def test_swiglu_of_columns_that_follow_each_other():
    pair = randn(12, 5).T.requires_grad_()
    got, want = activations.swiglu_by_kernel(pair), activations.swiglu(pair.double())
    assert_near(got, want, 1e-2)
    found, [wanted] = torch.autograd.grad(got.sum(), pair), torch.autograd.grad(want.sum(), pair)
    assert_near(found[0], wanted, 2e-2)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_permute_and_unpermute(K, padded):
    n, C = 11, 700
    N = n * K
    order = torch.randperm(N, device=DEVICE)
    if padded:  # of N + 4 slots every third is empty, and the last copies have none
        slots = N + 4
        perm = torch.full((slots,), N, device=DEVICE)
        full = torch.tensor([s for s in range(slots) if s % 3], device=DEVICE)[:N]
        perm[full] = order[:len(full)]
    else:
        slots, perm = N, order
    inv_perm = torch.full((N,), slots, device=DEVICE)
    held = (perm < N).nonzero().squeeze(1)
    inv_perm[perm[held]] = held
    x, y, p, g = randn(n, C), randn(slots, C), randn(n, K), randn(n, C)
    forth, back, back_grad = permute.permute, permute.unpermute, permute.unpermute_backward
    assert torch.equal(forth(x, perm, K).double(), torch_twin(forth, x, perm, K))
    for gates in (None, p):
        got = back(y, inv_perm, K, gates)
        assert_near(got, torch_twin(back, y, inv_perm, K, gates), 1e-2)
    for got, want in zip(back_grad(y, p, perm, g), torch_twin(back_grad, y, p, perm, g), strict=True):
        assert_near(got, want, 1e-2)


@pytest.mark.parametrize("E, N", [(3, 1), (3, 128), (64, 300), (64, 128), (384, 100), (1025, 20)])
def test_the_counting_sort_is_a_stable_sort(E, N, monkeypatch):
    expert = (torch.rand(N, device=DEVICE) ** 2 * E).long()  # low numbers are chosen more often
    order = expert.argsort(stable=True)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(N, device=DEVICE)
    counts = torch.bincount(expert, minlength=E)
    for use_triton in (True, False):
        monkeypatch.setattr(backend, "use_triton", lambda x, use_triton=use_triton: use_triton)
        found = permute.sort_by_expert(expert, E)
        for got, want in zip(found, (order, slot, counts, counts.cumsum(0)), strict=True):
            assert torch.equal(got.long(), want)
        place, lengths = permute.queue_by_expert(expert, E)
        assert place.tolist() == [(expert[:i] == expert[i]).sum() for i in range(N)]
        assert torch.equal(lengths, counts)


@pytest.mark.parametrize("K", [1, 2])
def test_put_and_get(kernels, K):
    """Three buffers of 7 rows, all of this process: the kernels write and read what symm_mem.py's torch twins
    do."""
    rows, width = 7, 1040
    x = randn(6, width)
    dst = torch.randperm(3 * rows, device=DEVICE)[:6 * K]
    dst[::5] = -1
    got, want = ([torch.zeros(rows, width, dtype=x.dtype, device=DEVICE) for _ in range(3)] for _ in range(2))
    peer_ptrs = torch.tensor([w.data_ptr() for w in got], device=DEVICE)
    kernels.put[(6 * K,)](x, dst, peer_ptrs, rows, width, K=K, BLOCK=512, num_warps=2)
    on_cpu = Some(peers=[w.cpu() for w in want], rows=rows, local=want[0].cpu(), record=lambda *_: None)
    symm_mem.SymmetricBuffer.put(on_cpu, x.cpu(), dst.cpu(), K)
    for a, b in zip(got, on_cpu.peers, strict=True):
        assert torch.equal(a.cpu(), b)
    out = torch.full((6 * K, width), torch.nan, dtype=x.dtype, device=DEVICE)
    kernels.get[(6 * K,)](out, dst, peer_ptrs, rows, width, BLOCK=512, num_warps=2)
    assert torch.equal(out.cpu(), symm_mem.SymmetricBuffer.get(on_cpu, dst.cpu()))
    assert torch.equal(out[dst >= 0], x.repeat_interleave(K, 0)[dst >= 0]) and not out[dst < 0].any()


# -----------------------------------------------------------------------------
# The experts' matrix products

SIZES = {"one has all": [0, 50, 0, 0, 0], "some have none": [3, 0, 21, 0, 26], "even": [10] * 5,
         "none": [0] * 5}


ODD, EVEN = (17, 33), (16, 32)


@pytest.mark.parametrize("dtype, sizes, widths", [
    *((dtype, sizes, ODD) for dtype in TOLERANCE for sizes in ("one has all", "some have none")),
    *((torch.float32, sizes, EVEN) for sizes in ("one has all", "even", "none"))], ids=str)
def test_grouped_mm(dtype, sizes, widths, small_tiles):
    """Forward, the gradient of x, of w; 3 rows that no expert has hold NaN. Widths may fit no tile."""
    (I, O), n = widths, sum(SIZES[sizes])
    offs = torch.tensor(SIZES[sizes], device=DEVICE).cumsum(0)
    x, w, dy = (randn(*shape, dtype=dtype) for shape in ((n + 3, I), (5, O, I), (n + 3, O)))
    with torch.no_grad():
        x[n:], dy[n:] = torch.nan, torch.nan

    def results(mm, x, w, dy, offs):
        y, dx, dw = with_gradients(lambda x, w: mm(x, w, offs), (x, w), dy)
        return y[:n], dx[:n], dw
    got = results(grouped_mm.grouped_mm, x, w, dy, offs)
    want = torch_twin(results, grouped_mm.grouped_mm_loop, x[:n], w, dy[:n], offs)
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_experts_equal_their_products(dtype, small_tiles):
    """SwiGLUExperts beside MoE.ffn's reference lines in fp64: the output and every gradient."""
    sizes = SIZES["some have none"]
    n, C, width, E = sum(sizes), 16, 48, len(sizes)
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    leaves = [randn(n, C, dtype=dtype), randn(E, width, C, dtype=dtype), randn(E, width, C, dtype=dtype),
              randn(E, C, width, dtype=dtype)]
    grad = randn(n, C, dtype=dtype)

    def reference(x, w1, w3, w2):
        products = [grouped_mm.grouped_mm_loop(x, w, ends) for w in (w1, w3)]
        return grouped_mm.grouped_mm_loop(activations.swiglu(*products), w2, ends)

    def ours(*leaves):
        return grouped_mm.SwiGLUExperts.apply(*leaves, ends)

    got = with_gradients(ours, leaves, grad)
    want = with_gradients(reference, [leaf.double() for leaf in leaves], grad.double())
    for mine, theirs in zip(got, want, strict=True):
        difference = (mine.double() - theirs).norm() / theirs.norm()
        assert difference < (1e-5 if dtype == torch.float32 else 3e-2)


# -----------------------------------------------------------------------------
# Sums and optimizers

@pytest.mark.parametrize("ranks, n", [(0, 9000), (1, 5000), (3, 5000)])
def test_sum_slices(ranks, n):
    """The sum is in fp32: 1 + 2^-8 + ... of bf16 numbers is not rounded."""
    own, others = randn(n), randn(ranks, n)
    want = own.double() + others.double().sum(0)
    for add in (False, True):
        for total in (torch.ones(n, device=DEVICE), torch.ones(n, dtype=torch.float64, device=DEVICE)):
            parts = own.to(total.dtype), others.to(total.dtype)
            if total.dtype == torch.float32:
                parts = own, others
            buckets.sum_slices(total, *parts, add)
            assert_near(total, want + add, 1e-6)


def test_gradients_of_micro_batches_add_up():
    """The first micro-batch overwrites what the last step left, the others add; as many as for the kernel."""
    n = 2**18 + 6
    total = randn(n, dtype=torch.float32)
    parts = [randn(n) for _ in range(3)]
    p = torch.nn.Parameter(torch.empty(n, dtype=torch.bfloat16, device=DEVICE))
    bucket = Some(params=[p], grad_windows=[total], untouched=[True])
    for g in parts:
        p.grad = g
        buckets.KernelBucket.take(bucket, 0)
        assert p.grad is None
    assert_near(total, sum(g.double() for g in parts), 1e-6)


def split_update(kernels, masters, wanted):
    """Return the SplitMaster after an update that moves masters (n,) to wanted (n,), and torch's."""
    n = len(masters)
    split = SplitMaster.of(masters.to(torch.bfloat16), masters)
    m = whole(split) - wanted  # is subtracted as it is: eps is 1 and the second moment 0
    zeros = torch.zeros(2, n, device=DEVICE)
    scalars = torch.tensor([1.0, 1.0, 1.0, 0.0], device=DEVICE)
    kernels.adamw[(-(-n // 128),)](
        split.low, zeros[0], m, zeros[1], split.own.view(torch.int16), scalars, 1.0, 0.0, 0.0, 1.0, n,
        OUT=True, SPLIT=True, BLOCK=128, num_warps=4)
    return split, SplitMaster.of(wanted.to(torch.bfloat16), wanted)


def test_adamw_splits_masters_as_its_twin_does(kernels):
    """To the bit, also at equal distance from two weights."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-2**31, 2**31 - 1, (4000,), generator=generator).to(torch.int32)
    bits[::7] = bits[::7] & -0x10000 | 0x8000  # at equal distance
    wanted = bits.view(torch.float32)
    wanted = wanted[(wanted.abs() < 1e38) & (wanted.abs() > 1e-30)].to(DEVICE)
    found, expected = split_update(kernels, wanted, wanted)
    assert (expected.low.abs() == 2**15 - 1).sum() > 300
    assert torch.equal(found.own, expected.own) and torch.equal(found.low, expected.low)
    # NaN stays: a weight of zero in its place would hide that the run is lost
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32, device=DEVICE)
    found, _ = split_update(kernels, torch.ones(4, device=DEVICE), bits.view(torch.float32))
    assert found.own.isnan().all() and whole(found).isnan().all()


@pytest.mark.parametrize("dtype, moments", [
    ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("keeps_dtype", [False, True])
def test_adamw(kernels, dtype, moments, clip, keeps_dtype):
    """Optimizer.step with the kernel beside torch's fused AdamW, 4 steps, the third refused. keeps_dtype:
    gradients as backward made them beside the same in fp32. moments: --moments-dtype, of both."""
    def optimizer(triton, bucket_class=None):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.LayerNorm(90)).to(DEVICE)
        for p in model.parameters():
            p.data = p.data.to(DTYPES[dtype])
            p.reduction_axis = "dp"
        mesh = make_mesh(World(device=torch.device(DEVICE)))
        data_parallel = DataParallel(model, mesh, faster=lambda plain, *_: bucket_class or plain)
        cfg = Config(dtype=dtype, clip=clip, weight_decay=0.1, moments_dtype=moments)
        opt = Optimizer(cfg, data_parallel)
        opt.adam.use_triton = triton
        return data_parallel, opt
    data_parallel, opt = optimizer(True, CopyBucket if keeps_dtype else None)
    data_parallel2, opt2 = optimizer(False)
    grad_dtype = DTYPES[dtype] if keeps_dtype else torch.float32
    for step in range(4):
        for a, b in zip(data_parallel.buckets, data_parallel2.buckets, strict=True):
            a.grad_total = torch.randn_like(b.grad).to(grad_dtype)
            b.grad.copy_(a.grad_total)
        norm = torch.tensor(float("nan") if step == 2 else 3.0, device=DEVICE)
        assert opt.step(0.01, norm).item() == opt2.step(0.01, norm).item() == float(step == 2)
    ours = zip(data_parallel.buckets, opt.masters, strict=True)
    theirs = zip(data_parallel2.buckets, opt2.masters, strict=True)
    for (a, m), (b, m2) in zip(ours, theirs, strict=True):
        # A moment in bf16 may be rounded to its other neighbour, and the updates have a size of 0.01.
        near = 3e-4 if moments == "bf16" else 1e-6
        assert_near(whole(m), whole(m2), near)
        assert_near(a.flat, b.flat, near if dtype == "fp32" else 1e-2)
        # The interpreter cuts bits off where a GPU rounds. The kernel rounds a SplitMaster by whole numbers.
        is_rounded = dtype == "bf16" or DEVICE == "cuda"
        assert_near(a.flat[a.own_slice], whole(m).to(a.flat.dtype), 0 if is_rounded else 8e-3)
        for key, value in opt2.adam.state[m2].items():
            # Rounded moments are up to two steps of bf16 apart where the interpreter cuts bits off.
            is_narrow = value.dtype == torch.bfloat16
            assert opt.adam.state[m][key].dtype == value.dtype
            assert_near(opt.adam.state[m][key], value, 2**-6 if is_narrow else 1e-6)
    assert opt.adam.step_count == opt2.adam.step_count == 3


def test_adamw_rounds_moments_and_not_what_updates_the_weights(kernels):
    """Gradients of few digits give moments that bf16 has exactly. Others are rounded after the update. What
    stands behind the end stays."""
    n = 1000
    scalars = torch.tensor([0.1, 1.0, 1.0, 0.0], device=DEVICE)
    few_digits = torch.arange(-8, 8, device=DEVICE).repeat(63)[:n] / 8
    for grad, is_exact in ((few_digits.float(), True), (torch.randn(n, device=DEVICE), False)):
        w, out = torch.ones(2, n + 1, device=DEVICE)
        m, v = torch.zeros(2, n + 1, dtype=torch.bfloat16, device=DEVICE)
        kernels.adamw[(-(-n // 128),)](w, grad, m, v, out, scalars, 1.0, 0.5, 0.25, 1e-3, n, OUT=True,
                                       SPLIT=False, BLOCK=128, num_warps=4)
        assert torch.equal(w, out) and w[n] == 1 and m[n] == v[n] == 0
        w, m, v = w[:n], m[:n], v[:n]
        assert_near(w, 1 - 0.1 * (grad / 2) / ((grad.square() / 4).sqrt() + 1e-3), 1e-6)
        for found, expected in ((m, grad / 2), (v, grad.square() / 4)):
            # The interpreter cuts bits off where a GPU rounds.
            step = 0 if is_exact else 2**-8 if DEVICE == "cuda" else 2**-7
            torch.testing.assert_close(found.float(), expected, rtol=step, atol=0)


@pytest.mark.parametrize("use_triton", [False, True])
def test_sums_of_squares(use_triton):
    """Slices of several dtypes and lengths, one of them empty."""
    slices = [randn(40_001), randn(3, dtype=torch.float32), randn(0), randn(20_000, dtype=torch.float16)]
    found = Optimizer.squares(Some(adam=Some(use_triton=use_triton)), slices)
    want = torch.stack([piece.double().square().sum() for piece in slices])
    assert found.dtype == torch.float64
    # Only a GPU sums in blocks.
    torch.testing.assert_close(found, want, rtol=1e-4 if use_triton and DEVICE == "cpu" else 1e-6, atol=0)


# -----------------------------------------------------------------------------
# Norms

KINDS = [(False, False), (True, False), (True, True)]  # RMSNorm, LayerNorm without and with a bias


@pytest.fixture
def few_programs(monkeypatch):
    """Three programs share the rows of a norm: Triton's interpreter runs one after the other."""
    real = norms.launch
    monkeypatch.setattr(norms, "launch", lambda width: (3, real(width)[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_layer_norm, has_bias", KINDS)
@pytest.mark.parametrize("rows, width, eps", [
    (5, 200, 1e-3), (1000, 16, 1e-3), (7, 1300, 1e-3), (6, 2048, 1e-3), (1, 768, 1e-3), (36, 128, 0.0)])
def test_norm_beside_its_input(rows, width, eps, is_layer_norm, has_bias, dtype, few_programs):
    """x itself, its norm and all gradients, beside autograd's in fp64: more rows than programs have at once,
    and fewer; widths that fill a tile, and others.

    Without eps the factor of a row that a program has too many is infinite.
    """
    leaves = [3 * randn(rows, width, dtype=dtype) + 1, randn(width, dtype=dtype)]
    if has_bias:
        leaves.append(randn(width, dtype=dtype))
    # Neither gradient is contiguous.
    grads = [randn(width, rows, dtype=dtype).T, randn(rows, 1, dtype=dtype).expand(rows, width)]

    def both(x, weight, bias=None):
        if x.dtype != torch.float64:
            return norms.InputAndNorm.apply(x, weight, bias, eps, is_layer_norm)
        if is_layer_norm:
            return x.clone(), F.layer_norm(x, weight.shape, weight, bias, eps)
        return x.clone(), F.rms_norm(x, weight.shape, weight, eps)

    def results(*tensors):
        leaves = [t.clone().requires_grad_() for t in tensors[:-2]]
        outputs = both(*leaves)
        return *outputs, *torch.autograd.grad(outputs, leaves, tensors[-2:])
    want = torch_twin(results, *leaves, *grads)
    got = results(*leaves, *grads)
    assert torch.equal(got[0], leaves[0])
    x = leaves[0].clone().requires_grad_()
    assert both(x, *leaves[1:])[0].data_ptr() == x.data_ptr()  # x itself, and no copy
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype
        scale = theirs.abs().max()
        assert_near(mine / scale, theirs / scale, TOLERANCE[dtype])


def test_a_norms_weight_has_a_gradient_that_is_rounded_once(monkeypatch):
    """Each of 60 programs adds up four rows in fp32. Triton's interpreter rounds to fp16, not to bf16."""
    real = norms.launch
    monkeypatch.setattr(norms, "launch", lambda width: (60, real(width)[1]))
    x = randn(240, 200, dtype=torch.float16)
    weight = randn(200, dtype=torch.float16).requires_grad_()
    grad = randn(240, 200, dtype=torch.float16)
    outputs = norms.InputAndNorm.apply(x, weight, None, 1e-3, False)
    found, = torch.autograd.grad(outputs, weight, [torch.zeros_like(x), grad])
    wide = weight.detach().double().requires_grad_()
    y = F.rms_norm(x.double(), wide.shape, wide, 1e-3)
    want, = torch.autograd.grad(y, wide, grad.double())
    assert (found == want.to(found.dtype)).float().mean() > 0.95


def install_kernels(model, devices, monkeypatch):
    monkeypatch.setattr(backend, "TRITON_DEVICES", devices)
    model.cfg = dataclasses.replace(model.cfg, dtype="fp32")
    Choice(False, False, False, False).install(model)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_block_has_the_same_gradients(recompute, few_programs, monkeypatch):
    tokens = torch.randint(64, (2, 17), device=DEVICE)
    found = []
    for how in ("none", recompute):
        torch.manual_seed(0)
        cfg = Config(n_layer=2, n_embd=16, n_head=2, ffn_hidden=24, mlp="gelu", seq_len=16, vocab_size=64,
                     recompute=how, dtype="fp32")
        model = random_model(cfg).float().to(DEVICE).train()
        install_kernels(model, (DEVICE,), monkeypatch)
        assert model.norm.kernel is norms.input_and_rms_norm
        loss, *_ = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for mine, without in zip(*reversed(found), strict=True):
        assert torch.equal(mine, without)


def test_every_name_of_norm_has_a_formula():
    in_one_place = set(typing.get_args(Config.__annotations__["norm"])) ^ set(NORMS)
    assert not in_one_place, f"{in_one_place}: not in NORMS, or not in the list at `norm` in config.py"


def norm_by_largest(x, gain, bias, eps):
    return x / (x.abs().amax(-1, keepdim=True) + eps) * gain


@pytest.mark.parametrize("norm", [*NORMS, "further"])
def test_a_norm_is_trained_by_its_formula_where_kernels_serve(norm, few_programs, monkeypatch):
    """... and it has a plan. A norm that names the kernel of another one has other gradients."""
    monkeypatch.setitem(NORMS, "further", NormKind(norm_by_largest))
    cfg = Config(norm=norm, n_layer=1, n_embd=16, n_head=2, ffn_hidden=24, mlp="gelu", seq_len=16,
                 vocab_size=64, bias=True, global_batch=8)
    tokens = torch.randint(64, (2, 17), device=DEVICE)
    found = []
    for devices in ((), (DEVICE,)):
        model = random_model(cfg).float().to(DEVICE).train()
        install_kernels(model, devices, monkeypatch)
        assert (model.norm.kernel is None) == (devices == () or NORMS[norm].kernel is None)
        loss, _ = model(tokens[:, :-1], tokens[:, 1:])
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for by_torch, by_kernels in zip(*found, strict=True):
        torch.testing.assert_close(by_kernels, by_torch, rtol=1e-4, atol=1e-5 * by_torch.abs().max().item())
    assert plan.estimate(cfg, 1, "h200", 64)["ms"] > 0

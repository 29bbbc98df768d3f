"""Each Triton kernel beside its torch twin, on the GPU if there is one, else in Triton's interpreter."""
from types import SimpleNamespace as Some

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton has no wheel for this system")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """fused.py takes its kernels for CPU tensors too."""
    from ops import fused
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "on_gpu", lambda x: x.dtype != torch.float64)
    from ops import kernels
    torch.manual_seed(0)
    return kernels


def twin(f, *args):
    """f on fp64 copies, where fused.py takes torch."""
    args = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    return f(*args)


def near(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("width, used", [(128, 65), (128, 128), (9984, 9900), (50304, 50257)])
def test_cross_entropy(width, used):
    from ops import fused
    z = randn(3, width) * 4
    target = torch.tensor([0, used - 1, used // 3], device=DEVICE)
    reference = z.double()
    want, _ = fused.cross_entropy_rows_torch(reference, target, used)
    loss, scale = fused.cross_entropy_rows(z, target, used)
    near(loss, want, 1e-5)
    near(z * scale[:, None], reference, 4e-3)
    assert not z[:, used:].any()


def test_cross_entropy_of_sharp_logits():
    from ops import fused
    z = torch.full((2, 9984), -3e4, device=DEVICE, dtype=torch.bfloat16)
    z[0, 7], z[1, 9983] = 3e4, 3e4
    loss, _ = fused.cross_entropy_rows(z, torch.tensor([7, 9983], device=DEVICE), 9984)
    assert loss.tolist() == [0, 0] and not z.any()


def test_fp16_takes_torchs_way_in_pieces():
    """exp(32) is no fp16."""
    from ops import fused
    z, target = randn(2100, 70, dtype=torch.float16), torch.randint(0, 65, (2100,), device=DEVICE)
    reference = z.double()
    want, _ = fused.cross_entropy_rows_torch(reference, target, 65)
    loss, scale = fused.cross_entropy_rows(z, target, 65)
    near(loss, want, 1e-5)
    near(z * scale[:, None], reference, 1e-3)


def test_cross_entropy_of_rising_logits():
    """Later tiles hold the larger logits: what was written is scaled down, twice."""
    from ops import fused
    z = (torch.arange(3)[:, None] * torch.arange(12288) // 4096 * 20.0 + torch.rand(3, 12288)).to(DEVICE)
    reference, target = z.double(), torch.tensor([5, 5000, 12000], device=DEVICE)
    z = z.float()
    want, _ = fused.cross_entropy_rows_torch(reference, target, 12000 + 1)
    loss, scale = fused.cross_entropy_rows(z, target, 12000 + 1)
    near(loss, want, 1e-5)
    torch.testing.assert_close((z * scale[:, None]).double(), reference, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("stop", [None, 3])
def test_swiglu(packed, stop):
    from ops import fused
    a, b, dh = randn(5, 1300), randn(5, 1300), randn(5, 1300)
    pair = (torch.cat([a, b], 1), None) if packed else (a, b)
    rows = 5 if stop is None else stop
    stop = None if stop is None else torch.tensor(stop, dtype=torch.int32, device=DEVICE)
    near(fused.silu_mul(*pair, stop)[:rows], twin(fused.silu_mul, *pair)[:rows], 1e-2)
    got = fused.silu_mul_backward(dh, *pair, stop)
    want = twin(fused.silu_mul_backward, dh, *pair)
    for x, y in zip((got,) if packed else got, (want,) if packed else want, strict=True):
        near(x[:rows], y[:rows], 2e-2)
    again = fused.silu_mul_backward(dh, *pair, stop, again=True)  # the same, and dh becomes forward's h
    for x, y in zip((got,) if packed else got, (again,) if packed else again, strict=True):
        assert torch.equal(x[:rows], y[:rows])
    assert torch.equal(dh[:rows], fused.silu_mul(*pair, stop)[:rows])


@pytest.mark.parametrize("two", [True, False])
def test_add_rows(two):
    """Into a window: what stands behind the rows stays."""
    from ops import fused
    a, b, into = randn(5, 700), randn(5, 700) if two else None, randn(7, 700)
    before, stop = into.clone(), torch.tensor(3, dtype=torch.int32, device=DEVICE)
    y = fused.add_rows(a, b, into, stop)
    assert y.data_ptr() == into.data_ptr() and y.shape == a.shape
    near(into[:3], a[:3].double() + (b[:3].double() if two else 0), 8e-3)
    assert torch.equal(into[3:], before[3:])
    again = before.double()
    twin(fused.add_rows, a, b, again, stop)
    near(into, again, 8e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_add_up(ranks):
    """In fp32: 1 + 2^-8 + ... of bf16 numbers does not round."""
    from ops import fused
    own, others = randn(5000), randn(ranks - 1, 5000)
    total = torch.full((5000,), torch.nan, device=DEVICE)
    fused.add_up(total, own, others)
    near(total, own.double() + others.double().sum(0), 1e-6)
    wide = torch.empty(5000, dtype=torch.float64, device=DEVICE)
    twin(fused.add_up, wide, own, others)
    near(total, wide, 1e-6)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("holes", [False, True])
def test_rows_to_experts_and_back(K, holes):
    from ops import fused
    n, C = 11, 700
    N = n * K
    order = torch.randperm(N, device=DEVICE)
    if holes:  # of N + 4 slots every third is empty, and the last copies have none
        slots = N + 4
        src = torch.full((slots,), N, device=DEVICE)
        full = torch.tensor([s for s in range(slots) if s % 3], device=DEVICE)[:N]
        src[full] = order[:len(full)]
    else:
        slots, src = N, order
    slot = torch.full((N,), slots, device=DEVICE)
    held = (src < N).nonzero().squeeze(1)
    slot[src[held]] = held
    x, y, p, g = randn(n, C), randn(slots, C), randn(n, K), randn(n, C)
    assert torch.equal(fused.spread(x, src, K, holes).double(), twin(fused.spread, x, src, K, holes))
    near(fused.collect(y, slot, K, holes), twin(fused.collect, y, slot, K, holes), 1e-2)
    near(fused.collect(y, slot, K, holes, p), twin(fused.collect, y, slot, K, holes, p), 1e-2)
    for got, want in zip(fused.collect_backward(y, p, src, K, holes, g),
                         twin(fused.collect_backward, y, p, src, K, holes, g), strict=True):
        near(got, want, 1e-2)


def test_twins_of_rows_are_autograd():
    """collect_backward's torch twin against autograd of collect's."""
    from ops import fused
    n, K, C = 7, 2, 5
    src = torch.randperm(n * K)
    slot = torch.empty_like(src).scatter_(0, src, torch.arange(n * K))
    y = torch.randn(n * K, C, dtype=torch.float64, requires_grad=True)
    p = torch.randn(n, K, dtype=torch.float64, requires_grad=True)
    g = torch.randn(n, C, dtype=torch.float64)
    want = torch.autograd.grad(fused.collect(y, slot, K, False, p), (y, p), g)
    for a, b in zip(fused.collect_backward(y.detach(), p.detach(), src, K, False, g), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", [1000, 9000])
def test_widen(kernels, n):
    x, out = randn(n), randn(n, dtype=torch.float32)
    want = out + x.float()
    kernels.widen[(-(-n // 4096),)](x, out, n, ADD=True, BLOCK=4096)
    assert torch.equal(out, want)
    kernels.widen[(-(-n // 4096),)](x, out, n, ADD=False, BLOCK=4096)
    assert torch.equal(out, x.float())


def test_gradients_of_micro_batches_add_up():
    """The first overwrites what the step before left, the others add; large enough for the kernel."""
    from ops import fused
    n = 2**18 + 6
    total = randn(n, dtype=torch.float32)
    parts = [randn(n) for _ in range(3)]
    for i, g in enumerate(parts):
        fused.accumulate(total, g, first=i == 0)
    near(total, sum(g.double() for g in parts), 1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("lone", [False, True])
def test_adamw(kernels, dtype, clip, lone):
    """Optimizer.step with the kernel against torch's fused AdamW, 4 steps, the third refused. lone: bf16
    gradients as they are against the same in fp32."""
    from config import Config
    from optim import Optimizer
    from parallel import DataParallel, make_mesh
    from runtime.launch import World

    def optimizer(triton, once=False):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.LayerNorm(90)).to(DEVICE)
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
            p.reduce = "dp"
        mesh = make_mesh(World(device=torch.device(DEVICE)))
        dp = DataParallel(model, mesh, once=once)
        opt = Optimizer(dp, Config(dtype=dtype, clip=clip, weight_decay=0.1), mesh)
        opt.triton = triton
        for state in opt.adam.state.values():  # torch's kernel counts in each bucket's own tensor
            t = opt.adam.state[opt.masters[0]]["step"]
            state["step"] = t if triton else torch.zeros((), device=DEVICE)
        return dp, opt
    (dp, opt), (dp2, opt2) = optimizer(True, lone), optimizer(False)
    assert {g.dtype for g in opt.grads} == {torch.bfloat16 if lone and dtype == "bf16" else torch.float32}
    for step in range(4):
        for a, b in zip(dp.buckets, dp2.buckets, strict=True):
            a.grad.copy_(torch.randn_like(a.grad))
            b.grad.copy_(a.grad)
        norm = torch.tensor(float("nan") if step == 2 else 3.0, device=DEVICE)
        assert opt.step(0.01, norm).item() == opt2.step(0.01, norm).item() == float(step == 2)
    for a, b, m, m2 in zip(dp.buckets, dp2.buckets, opt.masters, opt2.masters, strict=True):
        near(m, m2, 1e-6)
        near(a.flat, b.flat, 1e-2 if dtype == "bf16" else 1e-6)
        # the interpreter cuts bits off where a GPU rounds
        near(a.flat[a.mine], m.to(a.flat.dtype), 0 if DEVICE == "cuda" else 8e-3)
        for key, value in opt2.adam.state[m2].items():
            near(opt.adam.state[m][key], value, 1e-6)
    assert opt.adam_t() == opt2.adam_t() == 3


@pytest.mark.parametrize("E, N", [(3, 1), (3, 128), (64, 300), (64, 128), (384, 100), (1025, 20)])
def test_a_place_for_each_copy(E, N, monkeypatch):
    """tally and settle: the places that a stable sort gives; none over a window's end."""
    from ops import fused
    expert = (torch.rand(N, device=DEVICE) ** 2 * E).long()  # the first ones crowd
    counts = torch.bincount(expert, minlength=E)
    rank, upto = fused.tally(expert, E)
    assert rank.numel() == N and torch.equal(upto[:, -1], counts)
    place = fused.settle(expert, rank, upto, counts.cumsum(0) - counts, E, N)
    order = expert.argsort(stable=True)
    assert torch.equal(place[order], torch.arange(N, device=DEVICE))
    each, rows = -(-E // 2), max(1, N // 3)  # two windows, too small for all
    start = counts.cumsum(0) - counts
    start = torch.cat([start[:each], start[each:] - counts[:each].sum() + rows])
    got = fused.settle(expert, rank, upto, start, each, rows)
    monkeypatch.setattr(fused, "on_gpu", lambda x: False)
    want = fused.settle(expert, *fused.tally(expert, E), start, each, rows)
    assert torch.equal(got, want) and got.max() < 2 * rows and (N < 3 or (got == -1).any())


@pytest.mark.parametrize("ep, E, rank", [(2, 4, 1), (4, 64, 0), (3, 9, 2), (8, 384, 5)])
def test_meet(ep, E, rank, monkeypatch):
    """Where each rank's copies begin in the windows: written out, the twin, the kernel."""
    from ops import fused
    runs, e, rows = torch.randint(0, 9, (ep, E), device=DEVICE), E // ep, 10_000
    starts, ends = [], []
    for o in range(ep):
        at = 0
        for expert in range(o * e, (o + 1) * e):
            for sender in range(ep):
                if sender == rank:
                    starts.append(o * rows + at)
                at += runs[sender, expert].item()
            if o == rank:
                ends.append(min(at, 50))
        if o == rank:
            here = at
    for twin_only in (False, True):
        if twin_only:
            monkeypatch.setattr(fused, "on_gpu", lambda x: False)
        for before in (0, 10**6):
            need = torch.tensor(before, device=DEVICE)
            got = fused.meet(runs, rank, rows, 50, need)
            assert [got[0].tolist(), got[1].tolist()] == [starts, ends] and got[1].dtype == torch.int32
            assert need.item() == max(before, here)


@pytest.mark.parametrize("K", [1, 2])
def test_push_and_pull(kernels, K):
    """Three windows of 7 rows, all of this process: what window.py's twins write and read."""
    from fast import window
    rows, width = 7, 1040
    x = randn(6, width)
    place = torch.randperm(3 * rows, device=DEVICE)[:6 * K]
    place[::5] = -1
    got, want = ([torch.zeros(rows, width, dtype=x.dtype, device=DEVICE) for _ in range(3)] for _ in range(2))
    addresses = torch.tensor([w.data_ptr() for w in got], device=DEVICE)
    kernels.push[(6 * K,)](x, place, addresses, rows, width, K=K, BLOCK=512, num_warps=2)
    there = Some(all=[w.cpu() for w in want], rows=rows, mine=want[0].cpu())
    window.put(x.cpu(), place.cpu(), there, K)
    for a, b in zip(got, there.all, strict=True):
        assert torch.equal(a.cpu(), b)
    out = torch.full((6 * K, width), torch.nan, dtype=x.dtype, device=DEVICE)
    kernels.pull[(6 * K,)](out, place, addresses, rows, width, BLOCK=512, num_warps=2)
    assert torch.equal(out.cpu(), window.get(place.cpu(), there))
    assert torch.equal(out[place >= 0], x.repeat_interleave(K, 0)[place >= 0]) and not out[place < 0].any()

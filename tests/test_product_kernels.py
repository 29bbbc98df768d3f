"""The experts' matrix products by the kernels of ops/product_kernels.py.

As in test_kernels.py, they run on the GPU if there is one, else in Triton's interpreter.
"""
from types import SimpleNamespace

import pytest
import torch
from test_kernels import (
    DEVICE,
    TOLERANCE,
    assert_near,
    kernels,
    randn,
    small_tiles,
    torch_twin,
)

from ops import activations, grouped_mm

__all__ = ["kernels", "small_tiles"]  # fixtures

SIZES = {"one has all": [0, 50, 0, 0, 0], "some have none": [3, 0, 21, 0, 26], "even": [10] * 5,
         "none": [0] * 5}


@pytest.fixture
def by_ours(small_tiles, monkeypatch):
    """torch multiplies nothing."""
    monkeypatch.setattr(grouped_mm, "use_torch", lambda *_: False)


ODD, EVEN = (17, 33), (16, 32)


@pytest.mark.parametrize("dtype, sizes, widths", [
    *((dtype, sizes, ODD) for dtype in TOLERANCE for sizes in ("one has all", "some have none")),
    *((torch.float32, sizes, EVEN) for sizes in ("one has all", "even", "none"))], ids=str)
def test_grouped_mm(dtype, sizes, widths, by_ours):
    check_grouped_mm(dtype, sizes, widths)


def check_grouped_mm(dtype, sizes, widths):
    """Forward, the gradient of x, of w; 3 rows that no expert has hold NaN. Widths may fit no tile."""
    (I, O), n = widths, sum(SIZES[sizes])
    offs = torch.tensor(SIZES[sizes], device=DEVICE).cumsum(0)
    x, w, dy = (randn(*shape, dtype=dtype) for shape in ((n + 3, I), (5, O, I), (n + 3, O)))
    with torch.no_grad():
        x[n:], dy[n:] = torch.nan, torch.nan

    def results(mm, x, w, dy, offs):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = mm(x, w, offs)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        return y.detach()[:n], dx[:n], dw
    got = results(grouped_mm.grouped_mm, x, w, dy, offs)
    want = torch_twin(results, grouped_mm.grouped_mm_loop, x[:n], w, dy[:n], offs)
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_experts_equal_their_products(dtype, by_ours):
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

    def results(f, leaves, grad):
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        y = f(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    got = results(ours, leaves, grad)
    want = results(reference, [leaf.double() for leaf in leaves], grad.double())
    for mine, theirs in zip(got, want, strict=True):
        difference = (mine.double() - theirs).norm() / theirs.norm()
        assert difference < (1e-5 if dtype == torch.float32 else 3e-2)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("capability, hip, dtype, width, by_torch", [
    ((9, 0), None, HALF, 64, True), ((9, 0), "6.4", HALF, 64, False), ((9, 0), None, FULL, 64, False),
    ((9, 0), None, HALF, 12, False), ((10, 0), None, HALF, 64, True), ((8, 0), None, HALF, 64, False)],
    ids=str)
def test_who_multiplies(capability, hip, dtype, width, by_torch, monkeypatch):
    """By GPU, dtype and width."""
    x = SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(grouped_mm.F, "grouped_mm", lambda *_: None, raising=False)
    assert grouped_mm.use_torch(x, (width, 64)) == by_torch

"""The experts' matrix products by the kernels of ops/product_kernels.py and ops/tma_kernels.py.

As in test_kernels.py, they run on the GPU if there is one, else in Triton's interpreter.
"""
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_kernels import (  # noqa: F401
    DEVICE,
    TOLERANCE,
    assert_near,
    kernels,
    randn,
    small_tiles,
    torch_twin,
)

from ops import activations, backend, grouped_mm, permute, routed_experts, tiles

SIZES = {"one has all": [0, 50, 0, 0, 0], "some have none": [3, 0, 21, 0, 26], "even": [10] * 5,
         "none": [0] * 5}


@pytest.fixture(params=["pointers", "descriptors"])
def how(request, small_tiles, monkeypatch):  # noqa: F811
    """How the experts' products find their tiles: product_kernels.py or tma_kernels.py. torch multiplies
    nothing. Any GPU runs both. One without TMA loads the tiles of tma_kernels.py number by number."""
    by_tma = request.param == "descriptors"
    if by_tma:
        pytest.importorskip("triton.tools.tensor_descriptor", reason="this Triton has no descriptors")
    monkeypatch.setattr(grouped_mm, "use_torch", lambda *_: False)
    monkeypatch.setattr(grouped_mm, "use_tma", lambda *_: by_tma)
    monkeypatch.setattr(tiles, "WGRAD_ROWS", 0)
    return request.param


@pytest.fixture(autouse=True)
def strides_in_bytes(monkeypatch):
    """A GPU wants strides of 16 bytes. Triton 3.4's interpreter, which refuses 40 numbers, counts numbers."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter
    real = interpreter.TensorDescHandle.validate

    def validate(self):
        try:
            real(self)
        except AssertionError as e:
            size = self.base.dtype.element_ty.primitive_bitwidth // 8
            odd = [stride for stride in self.strides[:-1] if stride.data.item() * size % 16]
            if odd or "stride must be" not in str(e):
                raise
    monkeypatch.setattr(interpreter.TensorDescHandle, "validate", validate)


ODD, EVEN = (17, 33), (16, 32)
# The rows of a descriptor begin at multiples of 16 bytes. The test's tiles have 16 columns.
ALIGNED = (24, 40)


@pytest.mark.parametrize("dtype, sizes, widths", [
    *((dtype, sizes, ODD) for dtype in TOLERANCE for sizes in ("one has all", "some have none")),
    *((torch.float32, sizes, EVEN) for sizes in ("one has all", "even", "none"))], ids=str)
def test_grouped_mm(dtype, sizes, widths, how):
    """Forward, the gradient of x, of w; 3 rows that no expert has hold NaN. Widths may fit no tile."""
    if how == "descriptors" and widths == ODD:
        widths = ALIGNED
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


@pytest.mark.parametrize("by_column", [True, False])
def test_the_sum_of_two_products_goes_where_it_is_asked(by_column, how):
    """experts_mm with `plus` and `out`, in which other rows keep what they held."""
    sizes = SIZES["some have none"]
    n = sum(sizes)
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    x, more = (randn(n + 3, 80, dtype=torch.float32) for _ in range(2))
    w, more_w = (randn(5, 80, 48, dtype=torch.float32) for _ in range(2))
    if by_column:
        w, more_w = (matrices.mT.contiguous().mT for matrices in (w, more_w))
    out = randn(n + 5, 48, dtype=torch.float32)
    before = out.clone()
    y = grouped_mm.experts_mm(x, w, ends, (more, more_w), out)
    assert y.data_ptr() == out.data_ptr() and y.size(0) == n + 3
    want = sum(grouped_mm.grouped_mm_loop(a[:n].double(), b.mT.double(), ends)
               for a, b in ((x, w), (more, more_w)))
    assert_near(out[:n], want, 1e-5)
    assert torch.equal(out[n:], before[n:])


def test_torch_and_a_capacity_add_the_second_product_too(monkeypatch):
    """experts_mm where torch multiplies, and with a capacity: `plus`, and `out` where there are ends."""
    sizes = SIZES["some have none"]
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, more, w, more_w = (torch.randn(*shape) for shape in 2 * [(50, 6)] + 2 * [(5, 6, 4)])
    want = sum(grouped_mm.grouped_mm_loop(a, b.mT, ends) for a, b in ((x, w), (more, more_w)))
    monkeypatch.setattr(backend, "use_triton", lambda x: False)
    monkeypatch.setattr(grouped_mm, "use_torch", lambda *_: True)
    monkeypatch.setattr(grouped_mm.F, "grouped_mm",
                        lambda x, w, offs: grouped_mm.grouped_mm_loop(x, w.mT, offs), raising=False)
    out = torch.full((52, 4), 7.0)
    assert_near(grouped_mm.experts_mm(x, w, ends, (more, more_w), out), want, 1e-6)
    assert_near(out[:50], want, 1e-6)
    assert out[50:].eq(7).all()
    with_capacity = [t.view(5, 10, 6) for t in (x, more)]
    got = grouped_mm.experts_mm(with_capacity[0], w, None, (with_capacity[1], more_w))
    assert_near(got, with_capacity[0] @ w + with_capacity[1] @ more_w, 1e-6)


@pytest.mark.parametrize("K, dtype", [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)], ids=str)
def test_routed_experts_equal_dispatch_products_and_combine(K, dtype, how):
    """RoutedSwiGLU beside MoE.experts' reference lines in fp64: the output and every gradient.

    One expert gets no row.
    """
    n, C, width, E = 11, 16, 48, 4
    expert = torch.randint(0, E - 1, (n * K,), device=DEVICE)
    perm, inv_perm, _, ends = permute.sort_by_expert(expert, E)
    leaves = [randn(n, C, dtype=dtype), randn(n, K, dtype=dtype), randn(E, width, C, dtype=dtype),
              randn(E, width, C, dtype=dtype), randn(E, C, width, dtype=dtype)]
    grad = randn(n, C, dtype=dtype)

    def reference(x, gates, w1, w3, w2):
        rows = permute.permute(x, perm, K, False)
        products = [grouped_mm.grouped_mm_loop(rows, w, ends) for w in (w1, w3)]
        y = grouped_mm.grouped_mm_loop(activations.swiglu_torch(*products), w2, ends)
        return permute.unpermute(y, inv_perm, K, False, gates)

    def results(f, leaves, grad):
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        y = f(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    def routed(*leaves):
        return routed_experts.RoutedSwiGLU.apply(*leaves, perm, inv_perm, ends)
    got = results(routed, leaves, grad)
    want = results(reference, [leaf.double() for leaf in leaves], grad.double())
    for mine, theirs in zip(got, want, strict=True):
        difference = (mine.double() - theirs).norm() / theirs.norm()
        assert difference < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("O, columns", [(256, 256), (512, 256), (1408, 256), (1152, 128), (100, 128)])
def test_wide_tiles_are_taken_where_a_tenth_of_them_at_most_is_outside(O, columns):
    for by_column, of_matrix in ((True, [1, columns, 64]), (False, [1, 64, columns])):
        launch = tiles.product(5, O, by_column, two=by_column)
        assert (launch.first, launch.second) == ([128, 64], of_matrix)
        assert launch.options["COLUMNS"] == columns and launch.options["TWO"] == by_column
        assert launch.options["E"] == 5 and launch.options["WIDE"] == 8
        assert launch.programs == (1 if columns == 256 else 2)
    launch = tiles.weight_gradient(5)
    assert (launch.first, launch.second, launch.options["E"]) == ([64, 128], [64, 128], 5)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("capability, hip, tools, dtype, width, by", [
    ((9, 0), None, True, HALF, 64, "tma"), ((9, 0), None, False, HALF, 64, "torch"),
    ((9, 0), "6.4", True, HALF, 64, "pointers"), ((9, 0), None, True, FULL, 64, "pointers"),
    ((9, 0), None, True, HALF, 12, "pointers"), ((10, 0), None, True, HALF, 64, "torch"),
    ((8, 0), None, True, HALF, 64, "pointers")], ids=str)
def test_who_multiplies(capability, hip, tools, dtype, width, by, monkeypatch):
    """By GPU, dtype and width. tools: whether Triton has descriptors."""
    x = SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0))
    w = SimpleNamespace(shape=(4, width, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend, "TRITON_DEVICES", ("cuda",))
    monkeypatch.setattr(grouped_mm.F, "grouped_mm", lambda *_: None, raising=False)
    monkeypatch.setattr(grouped_mm.importlib.util, "find_spec", lambda name: name if tools else None)
    for cached in (grouped_mm.has_grouped_mm, grouped_mm.has_tma):
        cached.cache_clear()
    try:
        assert grouped_mm.use_tma(x, w) == (by == "tma")
        assert grouped_mm.use_torch(x, w) == (by != "pointers")
    finally:
        for cached in (grouped_mm.has_grouped_mm, grouped_mm.has_tma):
            cached.cache_clear()


@pytest.mark.parametrize("rows, is_deterministic, many", [
    (3 * tiles.WGRAD_ROWS, False, True), (3 * tiles.WGRAD_ROWS - 1, False, False),
    (3 * tiles.WGRAD_ROWS, True, False)])
def test_who_makes_the_gradient_of_the_weights(rows, is_deterministic, many, monkeypatch):
    """By the rows of an expert in the mean. They may differ after a resume: --deterministic takes torch."""
    called = []
    monkeypatch.setattr(grouped_mm, "use_torch", lambda *_: True)
    monkeypatch.setattr(grouped_mm, "use_tma", lambda *_: True)
    monkeypatch.setattr(grouped_mm, "wgrad_by_tma", lambda *_: called.append("tma"))
    monkeypatch.setattr(grouped_mm.F, "grouped_mm", lambda *_, offs: called.append("torch"), raising=False)
    ends = torch.tensor([1, 2, rows], dtype=torch.int32)
    x = torch.zeros(1, 8).expand(rows, 8)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    grouped_mm.experts_wgrad(x[:, :4], x, ends)
    assert called == ["tma" if many else "torch"]


def test_copy_rows():
    """Rows of the output buffer after the valid ones keep what they held."""
    x, out = randn(5, 700), randn(7, 700)
    before, n_valid = out.clone(), torch.tensor(3, dtype=torch.int32, device=DEVICE)
    y = grouped_mm.copy_rows(x, out, n_valid)
    assert y.data_ptr() == out.data_ptr() and y.shape == x.shape
    want = before.double()
    torch_twin(grouped_mm.copy_rows, x, want, n_valid)
    for got in (out.double(), want):
        assert torch.equal(got[:3], x[:3].double()) and torch.equal(got[3:], before[3:].double())


def compile_for_hopper():
    """The product and the weights' gradient of bf16 experts, by the tiles of ops/grouped_mm.py."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from ops import tma_kernels
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0))
    real = {name: getattr(tma_kernels, name) for name in ("grouped_mm", "grouped_wgrad")}
    found = []

    class Compiled:
        def __init__(self, name):
            self.kernel = real[name]

        def __getitem__(self, grid):
            return lambda *args, **options: found.append(self.kernel.warmup(*args, grid=grid, **options))
    grouped_mm.multiprocessors = lambda device: 1
    grouped_mm.use_torch = grouped_mm.use_tma = lambda *_: True
    for name in real:
        setattr(tma_kernels, name, Compiled(name))
    x, grad, up = (torch.zeros(4096, width, dtype=torch.bfloat16) for width in (512, 640, 640))
    w, w3 = (torch.zeros(1, 640, 512, dtype=torch.bfloat16) for _ in range(2))
    ends = torch.tensor([4096], dtype=torch.int32)
    grouped_mm.experts_mm(x, w.mT, ends)
    grouped_mm.experts_mm(grad, w, ends, (up, w3))
    grouped_mm.experts_wgrad(grad, x, ends)
    assert len(found) == 3
    for compiled in found:
        code = compiled.asm["ptx"]
        assert "wgmma" in code and "cp.async.bulk.tensor" in code  # whole tiles are multiplied, and loaded
        assert ".local" not in code  # nothing is spilled
        assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.long
def test_the_experts_products_compile_for_hopper(monkeypatch):
    """conftest.py lets this process interpret kernels, so another process compiles them."""
    pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = ("import sys; sys.path[:0] = ['.', 'tests']; "
            "import test_product_kernels; test_product_kernels.compile_for_hopper()")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr

"""Products with GELU inside by cuBLASLt, and products of narrow models by quack-kernels.

Both run on Hopper GPUs only. Here a stand-in takes cuBLASLt's place, which reads the descriptions of the
products by the numbers of the library's header, and multiplies what stands at the addresses.
"""
import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import test_layouts as matrix
import torch
import torch.nn.functional as F

from config import Config
from fast import choose
from fast import compile as compiler_of_blocks
from model import MLP
from ops import backend, cublas_lt, gelu_mlp, products
from ops.activations import ACTIVATIONS
from ops.cross_entropy import linear_cross_entropy
from ops.gelu_mlp import GeluMLP, product_gelu
from ops.products import product
from parallel import make_mesh
from runtime.launch import World

HALF = torch.bfloat16
ON_HOPPER = torch.cuda.is_available() and backend.is_hopper(torch.device("cuda:0"))
only_on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="the library's kernels are of Hopper GPUs")

# Of cublasLt.h and library_types.h
TRANSA, EPILOGUE, AUX, AUX_LD = 3, 7, 11, 12
BF16, COMPUTE_32F = 14, 68


def matrices(dtype=torch.float64, n=24, width=16, hidden=32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return random(n, width), random(hidden, width), random(width, hidden), random(n, width)


def plain(x, w1, w2):
    """If this is not what GeluMLP computes: ops/activations.gelu was changed, and ops/gelu_mlp.py was not."""
    return ACTIVATIONS["gelu"](x @ w1.T) @ w2.T


def gradients(f, arguments, grad):
    leaves = [x.clone().requires_grad_() for x in arguments]
    y = f(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad)]


class StandIn:
    """The functions of cuBLASLt that ops/cublas_lt.py calls, on matrices in a CPU's memory."""

    def __init__(self, proposals=3):
        self.made = {}  # what exists, by its number
        self.n_made = 0
        self.proposals = proposals
        self.multiplied = 0
        self.algorithms = []  # which multiplied, the first of the proposals being 0
        self.tiles, self.waves = [24, 20, 20], [3, 0.9, 1]  # of the proposals; 20 is 128 x 128
        self.preferences = 0  # that exist
        self.refused = False  # whether each proposal says that it cannot be taken

    def keep(self, reference, thing):
        self.n_made += 1
        self.made[self.n_made] = thing
        reference._obj.value = self.n_made
        return 0

    def of(self, pointer):
        return self.made[pointer.value]

    def cublasLtMatmulDescCreate(self, reference, compute, scale):
        assert (compute, scale) == (COMPUTE_32F, 0)
        return self.keep(reference, {TRANSA: bytes(4)})

    def cublasLtMatmulDescSetAttribute(self, product, attribute, reference, size):
        self.of(product)[attribute] = ctypes.string_at(ctypes.addressof(reference._obj), size.value)
        return 0

    def cublasLtMatrixLayoutCreate(self, reference, kind, rows, cols, between):
        assert kind == BF16
        return self.keep(reference, (rows.value, cols.value, between.value))

    def cublasLtMatmulPreferenceCreate(self, reference):
        self.preferences += 1
        return self.keep(reference, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, reference, size):
        assert attribute == 1 and size.value == 8  # the most bytes of workspace, a uint64
        self.of(preference)["workspace"] = reference._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference):
        self.preferences -= 1
        del self.made[preference.value]
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, preference, wanted, found, count):
        assert ctypes.sizeof(found[0]) == 96
        assert self.of(c) == self.of(d)
        for i in range(min(self.proposals, wanted)):
            found[i].workspace = 16
            found[i].status = 15 if self.refused else 0  # CUBLAS_STATUS_NOT_SUPPORTED
            found[i].algorithm[0] = i
            found[i].waves = self.waves[i]
        count._obj.value = min(self.proposals, wanted)
        return 0 if self.proposals else 15

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, attribute, reference, size, written):
        assert (attribute, size.value) == (1, 4)
        reference._obj.value = self.tiles[algorithm[0]]
        return 0

    @staticmethod
    def columns(address, layout):
        """Return a view of the matrix at an address, which is in columns."""
        rows, cols, between = layout
        memory = (ctypes.c_char * (2 * between * cols)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(cols, between)[:, :rows].T

    def cublasLtMatmul(self, handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                       algorithm, workspace, workspace_bytes, stream):
        assert alpha._obj.value == 1 and workspace_bytes.value == 16
        self.algorithms.append(algorithm._obj[0])
        attributes = {k: int.from_bytes(v, "little") for k, v in self.of(product).items()}
        left = self.columns(a.value, self.of(a_layout)).float()
        right = self.columns(b.value, self.of(b_layout)).float()
        z = (left.T if attributes[TRANSA] else left) @ right
        rows, cols, _ = self.of(d_layout)
        self.multiplied += 1
        assert beta._obj.value == 0
        aux = self.columns(attributes[AUX], (rows, cols, attributes[AUX_LD]))
        if attributes[EPILOGUE] == 64 | 128:  # CUBLASLT_EPILOGUE_DGELU
            result = torch.ops.aten.gelu_backward(z, aux.float(), approximate="tanh")
        else:
            assert attributes[EPILOGUE] == 32 | 128  # CUBLASLT_EPILOGUE_GELU_AUX
            aux.copy_(z)
            result = F.gelu(z, approximate="tanh")
        self.columns(d.value, self.of(d_layout)).copy_(result)
        return 0


@pytest.fixture
def stand_in(monkeypatch):
    """Let a StandIn take the library's place, for matrices of the CPU."""
    library = StandIn()
    monkeypatch.setattr(cublas_lt, "library", lambda: library)
    monkeypatch.setattr(cublas_lt, "handle", lambda device: None)
    monkeypatch.setattr(cublas_lt, "DEVICE", "cpu")
    monkeypatch.setattr(cublas_lt, "ALIGNMENT", 64)  # where torch puts matrices in a CPU's memory
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    cublas_lt.make_plan.cache_clear()
    yield library
    cublas_lt.make_plan.cache_clear()


# -----------------------------------------------------------------------------
# GELU inside products

@pytest.mark.parametrize("across", [False, True])
def test_result_and_gradients_are_those_of_autograd(across):
    *arguments, grad = matrices()
    grad = grad.T.contiguous().T if across else grad
    assert grad.is_contiguous() != across
    expected = gradients(plain, arguments, grad)
    for ours, its in zip(gradients(GeluMLP.apply, arguments, grad), expected, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_models_mlp_gives_the_same_either_way(compiled):
    cfg = Config(preset="tiny", mlp="gelu", bias=False, n_embd=16, dtype="fp32")
    mlp = MLP(cfg, make_mesh(World(rank=0, size=1)), 32).double()
    for p in mlp.parameters():
        torch.nn.init.normal_(p)
    assert mlp.products is None  # on a CPU
    x = torch.randn(24, 16, dtype=torch.float64, requires_grad=True)
    results = []
    for in_products in (False, True):
        mlp.products = gelu_mlp.products if in_products else None
        f = torch.compile(mlp, fullgraph=True, backend="aot_eager") if compiled else mlp
        with mock.patch.object(gelu_mlp.cublas_lt, "plan_for", wraps=cublas_lt.plan_for) as asked:
            y = f(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])])
            assert asked.call_count == (2 if in_products else 0)
            with torch.no_grad():
                torch.testing.assert_close(f(x), y)
            assert asked.call_count == (2 if in_products else 0)  # z would be written for nobody
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def in_products(world, *args):
    with mock.patch.object(gelu_mlp, "is_possible", lambda cfg, device: True):
        return matrix.run(world, *args)


@pytest.mark.parametrize("n, layout", [
    (1, {}), (2, {"tp": 2}), (2, {"zero": 3}), (2, {"zero": 3, "recompute": "full"}),
    (4, {"tp": 2, "pp": 2})])
def test_layouts_equal_one_rank_with_gelu_in_the_products(monkeypatch, n, layout):
    base = dict(matrix.GPT2, bias=False, micro_batch=2)
    batch = 8
    matrix.reference(base, batch, *matrix.capacity_ranks(base, layout))  # compare() finds it, and makes none
    monkeypatch.setattr(matrix, "run", in_products)
    matrix.compare(base, n, batch, **layout)


def test_the_library_is_asked_for_what_the_formula_says(stand_in):
    x, w1, w2, grad = matrices(HALF)
    hidden, z = gelu_mlp.product_gelu(x, w1)
    wide_z = x.float() @ w1.float().T
    torch.testing.assert_close(z, wide_z.bfloat16(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(hidden, F.gelu(wide_z, approximate="tanh").bfloat16(), rtol=0.01, atol=0.01)
    grad_z = gelu_mlp.product_gelu_backward(grad, w2, z)
    expected = torch.ops.aten.gelu_backward(grad.float() @ w2.float(), z.float(), approximate="tanh")
    torch.testing.assert_close(grad_z, expected.bfloat16(), rtol=0.01, atol=0.01)
    assert stand_in.algorithms == [2, 2] and stand_in.preferences == 0  # square tiles, most waves
    stand_in.tiles = [24, 23, 31]
    cublas_lt.make_plan.cache_clear()
    gelu_mlp.product_gelu(x, w1)
    assert stand_in.algorithms[2:] == [0]  # the first


@pytest.mark.parametrize("proposals, refused", [(0, False), (1, False), (3, True)])
def test_torch_multiplies_where_the_library_has_no_fast_way(stand_in, proposals, refused):
    x, w1, *_ = matrices(HALF)
    stand_in.proposals = proposals
    stand_in.refused = refused
    hidden, z = product_gelu(x, w1)
    assert stand_in.multiplied == 0
    torch.testing.assert_close(z, x @ w1.T)
    torch.testing.assert_close(hidden, F.gelu(z, approximate="tanh"))


@pytest.mark.parametrize("change", [
    lambda x, w1: (x[:, :12].contiguous(), w1[:, :12].contiguous()), lambda x, w1: (x[:0], w1),
    lambda x, w1: (x.T.contiguous().T, w1), lambda x, w1: (x.half(), w1.half())],
    ids=["12 columns", "no rows", "across", "fp16"])
def test_torch_multiplies_what_the_library_cannot_read(stand_in, change):
    x, w1, *_ = matrices(HALF)
    x, w1 = change(x, w1)
    assert torch.equal(product_gelu(x, w1)[1], x @ w1.T)
    assert stand_in.n_made == 0


def test_torch_knows_the_operations():
    x, w1, w2, grad = matrices(torch.float32)
    hidden = x @ w1.T
    inputs = {"product": (x, w1.T), "add_product": (hidden, x, w1.T),
              "product_gelu": (x, w1), "product_gelu_backward": (grad, w2, hidden)}
    for name, arguments in inputs.items():
        operation = getattr(torch.ops.nanoshard, name).default
        torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))


# -----------------------------------------------------------------------------
# Products by quack-kernels

class Quack:
    """The functions of the library that ops/products.py calls."""

    def __init__(self):
        self.shapes = []  # (m, k, n) of each product

    def gemm(self, a, b, tuned):
        assert not tuned, "it would time every tile"
        self.shapes.append((*a.shape, b.size(1)))
        return (a.float() @ b.float()).bfloat16()

    def gemm_add(self, a, b, c, tuned):
        self.gemm(a, b, tuned)
        return (c.float() + a.float() @ b.float()).bfloat16()


@pytest.fixture
def quack(monkeypatch):
    """Let a stand-in multiply matrices of any size."""
    library = Quack()
    monkeypatch.setattr(products, "quack", library)
    monkeypatch.setattr(products, "TILES", 0)
    monkeypatch.setattr(products, "TILES_OF_SUM", 0)
    return library


@pytest.mark.parametrize("m, k, n, faster", [
    (16384, 512, 768, True), (16384, 512, 3584, True), (4096, 512, 128256, True),  # W1
    (16384, 512, 512, False), (4096, 128256, 512, False), (512, 16384, 1792, False),
    (65536, 3072, 768, True), (768, 65536, 3072, False),  # G2
    (8192, 2048, 16384, False), (8192, 2048, 49152, False)])  # W3
def test_which_products_were_faster(m, k, n, faster):
    assert products.is_faster(m, k, n, products.TILES) == faster
    assert products.is_faster(m, k, n, products.TILES_OF_SUM) == (faster or (k, n) == (512, 512))


def factors():
    """Return the factors of the three products of y = x w^T: y, and the gradients of x and w."""
    x, w, _, _ = matrices(HALF)  # (24, 16), (32, 16)
    grad = (x @ w.T).contiguous()
    return {"y": (x, w.T), "grad_x": (grad, w), "grad_w": (grad.T, x)}


@pytest.mark.parametrize("which", ["y", "grad_x", "grad_w"])
def test_the_library_multiplies(quack, which):
    a, b = factors()[which]
    torch.testing.assert_close(product(a, b), a @ b, rtol=0.02, atol=0.02)
    assert quack.shapes == [(*a.shape, b.size(1))]


def zeros(*shape):
    return torch.zeros(shape, dtype=HALF)


@pytest.mark.parametrize("a, b", [
    (zeros(8, 12), zeros(12, 8)), (zeros(8, 16).half(), zeros(16, 8).half()),
    (zeros(8, 32)[:, ::2], zeros(16, 8)), (zeros(1, 16).expand(8, 16), zeros(16, 8))])
def test_torch_multiplies_what_quack_cannot_read(quack, a, b):
    assert torch.equal(product(a, b), a @ b) and quack.shapes == []


def test_the_head_multiplies_by_the_library(quack):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (24, 64))
    loss = linear_cross_entropy(x, w, torch.arange(24), 64)
    found = [loss.detach(), *torch.autograd.grad(loss, [x, w])]
    assert quack.shapes == [(24, 16, 64), (24, 64, 16), (64, 24, 16)]
    products.quack = None
    loss = linear_cross_entropy(x, w, torch.arange(24), 64)
    for one, other in zip(found, [loss.detach(), *torch.autograd.grad(loss, [x, w])], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype, answer", [("bf16", True), ("fp16", False), ("fp32", False)])
def test_which_runs_take_the_library(monkeypatch, dtype, answer):
    monkeypatch.setattr(backend, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(choose, "version_of", lambda name: choose.QUACK)
    cfg = Config(preset="tiny", dtype=dtype)
    assert choose.quack_possible(cfg, torch.device("cuda:0")) == answer
    for device in ("cpu", "cuda"):  # plan.py's has no index
        assert not choose.quack_possible(cfg, torch.device(device))
    monkeypatch.setattr(choose, "version_of", lambda name: "0.6.4")
    assert not choose.quack_possible(cfg, torch.device("cuda:0"))


# -----------------------------------------------------------------------------
# In compiled blocks

class Residual(torch.nn.Module):
    """x + W x', where x' is the norm of x, and a layer with a bias of the next norm."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(16, 16, bias=False)
        self.last = torch.nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.w(torch.nn.functional.rms_norm(x, (16,)))
        return x, self.last(torch.nn.functional.rms_norm(x, (16,)))


def passes_alone(graph, inputs):
    """Take the compiler's passes over a graph, which then runs in eager mode: no C++ is compiled."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def take_passes(graph, inputs):
        first = next(iter(graph.graph.nodes))
        with V.set_fake_mode(first.meta["val"].fake_mode):
            post_grad_passes(graph, is_inference=False)
        return make_boxed_func(graph.forward)
    return aot_autograd(fw_compiler=take_passes, decompositions=select_decomp_table())(graph, inputs)


@pytest.fixture
def compiler():
    """Let what torch compiled be forgotten, and its settings be as before."""
    from torch._inductor import config
    torch._dynamo.reset()
    yield
    config.post_grad_custom_post_pass = None
    torch._dynamo.reset()


def test_a_compiled_block_by_the_library_has_the_gradients_of_eager(quack, compiler):
    torch.manual_seed(0)
    block = Residual().bfloat16()
    x = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)
    factors_of_sum = [torch.randn(24, 16), torch.randn(24, 8)]

    def results(f):
        both = f(x)
        total = sum((y.float() * factor).sum() for y, factor in zip(both, factors_of_sum, strict=True))
        return [*both, *torch.autograd.grad(total, [x, *block.parameters()])]
    expected = results(block)
    compiler_of_blocks.multiply_by_library(True)
    found = results(torch.compile(block, backend=passes_alone))
    assert len(quack.shapes) == 5  # W x' added to x, and two gradients of each; torch adds the bias
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 0.01


# -----------------------------------------------------------------------------
# The library itself

@only_on_hopper
@pytest.mark.parametrize("shape, calls", [
    ((4096, 768, 3072), {2}), ((2048, 384, 1536), {2}), ((1024, 1024, 4096), {1, 2}),
    ((1, 768, 3072), {0, 1, 2}), ((64, 96, 100), {0})])
def test_the_library_on_a_gpu(shape, calls):
    *arguments, grad = matrices(HALF, *shape)
    arguments = [x.cuda() / x.size(1)**0.5 for x in arguments]
    multiply = cublas_lt.Plan.multiply
    with mock.patch.object(cublas_lt.Plan, "multiply", autospec=True, side_effect=multiply) as called:
        ours = gradients(GeluMLP.apply, arguments, grad.cuda())
    assert called.call_count in calls
    wide = [x.double() for x in arguments]
    for one, other in zip(ours, gradients(plain, wide, grad.cuda().double()), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 6e-3


@only_on_hopper
@pytest.mark.parametrize("n, n_in, n_out", [(8192, 768, 2304), (4096, 512, 1536), (2048, 2048, 8192)])
def test_quack_on_a_gpu(monkeypatch, n, n_in, n_out):
    library = pytest.importorskip("quack.gemm_interface", reason="quack-kernels is not installed")
    monkeypatch.setattr(products, "quack", library)
    monkeypatch.setattr(products, "is_faster", lambda *shape: True)
    x, w, grad = (torch.randn(shape, dtype=HALF, device="cuda:0")
                  for shape in ((n, n_in), (n_out, n_in), (n, n_out)))
    with mock.patch.object(library, "gemm", side_effect=library.gemm) as called:
        found = product(x, w.T), product(grad, w), product(grad.T, x), products.add_product(x, grad, w)
    assert called.call_count == 3
    wide_x, wide_w, wide_grad = x.double(), w.double(), grad.double()
    wide = wide_x @ wide_w.T, wide_grad @ wide_w, wide_grad.T @ wide_x, wide_x + wide_grad @ wide_w
    for one, other in zip(found, wide, strict=True):
        assert (one.double() - other).norm() / other.norm() < 3e-3

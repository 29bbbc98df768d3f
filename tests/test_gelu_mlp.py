"""GELU inside the products of an MLP (ops/gelu_mlp.py), by functions of a library (ops/cublas_lt.py).

The library exists on NVIDIA's GPUs only. Here a stand-in takes its place, which reads the descriptions of the
products by the numbers of the library's header, and multiplies what stands at the addresses.
"""
import contextlib
import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import test_layouts as matrix
import torch
import torch.nn.functional as F

from config import Config
from model import MLP
from ops import backend, cublas_lt, gelu_mlp
from ops.activations import ACTIVATIONS
from ops.gelu_mlp import GeluMLP
from parallel import make_mesh
from runtime.launch import World

# Of cublasLt.h and library_types.h
TRANSA, TRANSB, EPILOGUE, AUX, AUX_LD = 3, 4, 7, 11, 12
BF16, COMPUTE_32F = 14, 68


def matrices(dtype=torch.float64, n=24, width=16, hidden=32):
    """Return x, w1, w2 and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return random(n, width), random(hidden, width), random(width, hidden), random(n, width)


def plain(x, w1, w2):
    """If this is not what GeluMLP computes: ops/activations.gelu was changed, and ops/gelu_mlp.py was not."""
    return ACTIVATIONS["gelu"](x @ w1.T) @ w2.T


def gradients(f, arguments, grad):
    """Return f's result and the gradients of its arguments."""
    leaves = [x.clone().requires_grad_() for x in arguments]
    y = f(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad)]


def test_result_and_gradients_are_those_of_autograd():
    *arguments, grad = matrices()
    expected = gradients(plain, arguments, grad)
    for ours, its in zip(gradients(GeluMLP.apply, arguments, grad), expected, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)


def test_a_gradient_of_other_strides():
    *arguments, grad = matrices()
    across = grad.T.contiguous().T
    assert not across.is_contiguous()
    expected = gradients(plain, arguments, grad)
    for ours, its in zip(gradients(GeluMLP.apply, arguments, across), expected, strict=True):
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


@pytest.mark.parametrize("name", ["product_gelu", "product_gelu_backward"])
def test_torch_knows_the_operations(name):
    x, w1, w2, grad = matrices(torch.float32)
    inputs = (x, w1) if name == "product_gelu" else (grad, w2, x @ w1.T)
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(getattr(torch.ops.nanoshard, name).default, inputs, test_utils=tests)


GOOD = dict(preset="tiny", mlp="gelu", dtype="bf16", bias=False)


@pytest.mark.parametrize("flags, answer", [
    ({}, True), ({"dtype": "fp16"}, False), ({"recompute": "full"}, True), ({"dtype": "fp32"}, False),
    ({"mlp": "swiglu"}, False), ({"bias": True}, False), ({"mlp": "geglu"}, False), ({"lora": 4}, False),
    ({"fp8": True}, False),
    ({"recompute": "selective"}, False)])
def test_which_runs_take_it(monkeypatch, flags, answer):
    monkeypatch.setattr(backend, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(cublas_lt, "library", StandIn)
    cfg = Config(**{**GOOD, **flags})
    assert gelu_mlp.is_possible(cfg, torch.device("cuda")) == answer
    assert not gelu_mlp.is_possible(cfg, torch.device("cpu"))
    monkeypatch.setattr(cublas_lt, "library", lambda: None)
    assert not gelu_mlp.is_possible(cfg, torch.device("cuda"))


def in_products(world, *args):
    """Run what test_layouts.run does, with GELU in the products of every MLP."""
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


# -----------------------------------------------------------------------------
# The library

class StandIn:
    """The functions of cuBLASLt that ops/cublas_lt.py calls, on matrices in a CPU's memory."""

    def __init__(self, proposals=3):
        self.made = {}  # what exists, by its number
        self.n_made = 0
        self.proposals = proposals
        self.multiplied = 0
        self.algorithms = []  # which multiplied, the first of the proposals being 0
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
        return self.keep(reference, {TRANSA: bytes(4), TRANSB: bytes(4)})

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

    def destroy(self, thing):
        del self.made[thing.value]
        return 0

    cublasLtMatrixLayoutDestroy = cublasLtMatmulDescDestroy = destroy

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, preference, wanted, found, count):
        assert ctypes.sizeof(found[0]) == 96
        assert self.of(c) == self.of(d)
        for i in range(self.proposals):
            found[i].workspace = 16
            found[i].status = 15 if self.refused else 0  # CUBLAS_STATUS_NOT_SUPPORTED
            found[i].algorithm[0] = i
        count._obj.value = min(self.proposals, wanted)
        return 0 if self.proposals else 15

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
        z = (left.T if attributes[TRANSA] else left) @ (right.T if attributes[TRANSB] else right)
        rows, cols, _ = self.of(d_layout)
        self.multiplied += 1
        if attributes[EPILOGUE] == 1:  # CUBLASLT_EPILOGUE_DEFAULT
            added = self.columns(c.value, self.of(c_layout)) if beta._obj.value else 0
            assert beta._obj.value in (0, 1) and (c.value == d.value) == (not beta._obj.value)
            self.columns(d.value, self.of(d_layout)).copy_(z + added)
            return 0
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    cublas_lt.forget()
    yield library
    cublas_lt.forget()


def aligned(x):
    """Return a copy of x that begins at a multiple of 256 bytes."""
    memory = torch.empty(x.numel() + 128, dtype=x.dtype)
    skip = -memory.data_ptr() % 256 // x.element_size()
    return memory[skip:skip + x.numel()].view_as(x).copy_(x)


def test_the_library_is_asked_for_what_the_formula_says(stand_in):
    x, w1, w2, grad = map(aligned, matrices(torch.bfloat16))
    hidden, z = gelu_mlp.product_gelu(x, w1)
    wide_z = x.float() @ w1.float().T
    torch.testing.assert_close(z, wide_z.bfloat16(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(hidden, F.gelu(wide_z, approximate="tanh").bfloat16(), rtol=0.01, atol=0.01)
    z = aligned(z)
    grad_z = gelu_mlp.product_gelu_backward(grad, w2, z)
    expected = torch.ops.aten.gelu_backward(grad.float() @ w2.float(), z.float(), approximate="tanh")
    torch.testing.assert_close(grad_z, expected.bfloat16(), rtol=0.01, atol=0.01)
    assert stand_in.algorithms == [0, 0] and stand_in.preferences == 0  # the first proposals


def test_one_plan_serves_all_layers(stand_in):
    for _ in range(3):
        x, w1, *_ = map(aligned, matrices(torch.bfloat16))
        gelu_mlp.product_gelu(x, w1)
    assert len(cublas_lt.plans) == 1
    assert stand_in.multiplied == 3


@pytest.mark.parametrize("why", ["no library", "no proposal", "one proposal", "refused", "address",
                                 "strides", "dtype", "no rows", "width", "hidden width"])
def test_torch_multiplies_where_the_library_has_no_fast_way(stand_in, why, monkeypatch):
    x, w1, *_ = map(aligned, matrices(torch.bfloat16))
    stand_in.proposals = {"no proposal": 0, "one proposal": 1}.get(why, 3)
    if why == "address":
        w1 = torch.cat([w1.flatten()[:8], w1.flatten()])[8:].view_as(w1)
        assert w1.data_ptr() % 256
    stand_in.refused = why == "refused"
    if why == "no library":
        monkeypatch.setattr(cublas_lt, "library", lambda: None)
    if why == "dtype":
        x, w1 = aligned(x.half()), aligned(w1.half())
    if why == "no rows":
        x = x[:0]
    if why == "width":
        x, w1 = aligned(x[:, :12]), aligned(w1[:, :12])
    if why == "hidden width":
        w1 = w1[:12]
    if why == "strides":
        x = torch.cat([x, x], 1)[:, ::2]
    hidden, z = gelu_mlp.product_gelu(x, w1)
    assert stand_in.multiplied == 0
    torch.testing.assert_close(z, x @ w1.T)
    torch.testing.assert_close(hidden, F.gelu(z, approximate="tanh"))


def test_a_device_has_one_handle(monkeypatch):
    made = []

    class Library:
        @staticmethod
        def cublasLtCreate(reference):
            made.append(reference)
            reference._obj.value = 7
            return 0
    monkeypatch.setattr(cublas_lt, "library", Library)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    cublas_lt.handle.cache_clear()
    assert [cublas_lt.handle(torch.device("cuda:0")).value for _ in range(2)] == [7, 7] and len(made) == 1
    cublas_lt.handle.cache_clear()


def test_only_a_library_that_torch_has_loaded_is_taken(monkeypatch):
    for names, is_found in ((("libtorch_cpu.so",), True), (("libnot_here.so",), False)):
        monkeypatch.setattr(cublas_lt, "NAMES", names)
        cublas_lt.library.cache_clear()
        assert (cublas_lt.library() is not None) == is_found
    cublas_lt.library.cache_clear()


def test_a_failure_of_the_library_is_told(stand_in):
    stand_in.cublasLtMatmul = lambda *args: 13
    x, w1, *_ = map(aligned, matrices(torch.bfloat16))
    with pytest.raises(RuntimeError, match="cuBLASLt: Matmul returned 13"):
        gelu_mlp.product_gelu(x, w1)


@pytest.mark.skipif(not torch.cuda.is_available() or not backend.is_hopper(torch.device("cuda:0")),
                    reason="the library's kernels are of NVIDIA's Hopper GPUs")
@pytest.mark.parametrize("shape, calls", [
    ((4096, 768, 3072), {2}), ((2048, 384, 1536), {2}), ((1024, 1024, 4096), {1, 2}),
    ((1, 768, 3072), {0, 1, 2}), ((64, 96, 100), {0})])
def test_the_library_on_a_gpu(shape, calls):
    *arguments, grad = matrices(torch.bfloat16, *shape)
    arguments = [x.cuda() / x.size(1)**0.5 for x in arguments]
    multiply = cublas_lt.Plan.multiply
    with mock.patch.object(cublas_lt.Plan, "multiply", autospec=True, side_effect=multiply) as called:
        ours = gradients(GeluMLP.apply, arguments, grad.cuda())
    assert called.call_count in calls
    wide = [x.double() for x in arguments]
    for one, other in zip(ours, gradients(plain, wide, grad.cuda().double()), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 6e-3

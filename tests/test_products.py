"""Products by cuBLASLt: by the algorithm that was chosen for their shape, and with GELU inside.

The library exists on NVIDIA's GPUs only. Here a stand-in takes its place, which reads the descriptions of the
products by the numbers of the library's header, and multiplies what stands at the addresses.
"""
import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import test_layouts as matrix
import torch
import torch.nn.functional as F
from pool import run_ranks

import train
from config import Config
from fast import graph, products
from fast.choose import Choice
from model import MLP
from ops import backend, cublas_lt, gelu_mlp
from ops.activations import ACTIVATIONS
from ops.cross_entropy import linear_cross_entropy
from ops.cublas_lt import Factor, product, sum_with_product
from ops.gelu_mlp import GeluMLP, product_gelu
from parallel import make_mesh
from runtime.everyone import Everyone
from runtime.launch import World

CPU = torch.device("cpu")
HALF = torch.bfloat16
ON_HOPPER = torch.cuda.is_available() and backend.is_hopper(torch.device("cuda:0"))
only_on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="the library's kernels are of Hopper GPUs")

# Of cublasLt.h and library_types.h
TRANSA, TRANSB, EPILOGUE, AUX, AUX_LD = 3, 4, 7, 11, 12
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
    monkeypatch.setattr(cublas_lt, "ALIGNMENT", 64)  # where torch puts matrices in a CPU's memory
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    cublas_lt.forget()
    yield library
    cublas_lt.forget()


def factors():
    """Return the factors of the three products of y = x w^T: y, and the gradients of x and w."""
    x, w, _, _ = matrices(HALF)  # (24, 16), (32, 16)
    grad = (x @ w.T).contiguous()
    return {"y": (x, w.T), "grad_x": (grad, w), "grad_w": (grad.T, x)}


def choose_proposal(i):
    for shape, plan in cublas_lt.plans.items():
        cublas_lt.choices[str(shape)] = plan.proposals[i].name()
        plan.choose()


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
    assert stand_in.algorithms == [0, 0] and stand_in.preferences == 0  # the first proposals


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("proposals, refused", [(0, False), (1, False), (3, True)])
def test_torch_multiplies_where_the_library_has_no_fast_way(stand_in, proposals, refused):
    x, w1, *_ = matrices(HALF)
    stand_in.proposals = proposals
    stand_in.refused = refused
    hidden, z = product_gelu(x, w1)
    assert stand_in.multiplied == 0
    torch.testing.assert_close(z, x @ w1.T)
    torch.testing.assert_close(hidden, F.gelu(z, approximate="tanh"))


# -----------------------------------------------------------------------------
# Products by a chosen algorithm

@pytest.mark.parametrize("which", ["y", "grad_x", "grad_w"])
@pytest.mark.parametrize("adds", [False, True])
def test_the_chosen_proposal_multiplies(stand_in, which, adds):
    a, b = factors()[which]
    summand = torch.ones(a.size(0), b.size(1), dtype=torch.bfloat16)

    def compute():
        return sum_with_product(summand, a, b) if adds else product(a, b)
    by_torch = torch.addmm(summand, a, b) if adds else a @ b
    assert torch.equal(compute(), by_torch)
    assert stand_in.algorithms == []  # torch multiplies where nothing is chosen
    choose_proposal(2)
    wide = a.float() @ b.float() + (summand.float() if adds else 0)
    assert torch.equal(compute(), wide.bfloat16())
    assert stand_in.algorithms == [2]
    assert torch.equal(summand, torch.ones_like(summand))


def test_rows_of_a_wider_matrix(stand_in):
    wide = torch.randn(24, 128, dtype=torch.bfloat16)
    a = wide[:, :16]
    b = torch.randn(16, 32, dtype=torch.bfloat16)
    across = wide[:, 32:64].T
    product(a, b)
    product(across, a)
    choose_proposal(0)
    assert torch.equal(product(a, b), (a.float() @ b.float()).bfloat16()) and stand_in.multiplied == 1
    assert torch.equal(product(across, a), (across.float() @ a.float()).bfloat16())
    assert stand_in.multiplied == 2
    one, other = cublas_lt.plans
    assert one.a == Factor(by_column=False, stride=128) and one.b == Factor(by_column=False, stride=32)
    assert other.a == Factor(by_column=True, stride=128) and other.b == Factor(by_column=False, stride=128)


@pytest.mark.parametrize("a, b, summand", [
    (zeros(8, 12), zeros(12, 8), None), (zeros(0, 16), zeros(16, 8), None),
    (zeros(8, 32)[:, ::2], zeros(16, 8), None), (zeros(1, 16).expand(8, 16), zeros(16, 8), None),
    (zeros(8, 16), zeros(16, 8), zeros(8, 8).T), (zeros(16, 16), zeros(16, 8), zeros(1, 8))])
def test_torch_multiplies_what_the_library_cannot_read(stand_in, a, b, summand):
    if summand is None:
        assert torch.equal(product(a, b), a @ b)
    else:
        assert torch.equal(sum_with_product(summand, a, b), zeros(a.size(0), 8))
    assert cublas_lt.plans == {}


def test_the_head_multiplies_by_what_was_chosen(stand_in):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (24, 64))
    target = torch.arange(24)

    def results():
        loss = linear_cross_entropy(x, w, target, 64)
        return [loss.detach(), *torch.autograd.grad(loss, [x, w])]
    by_torch = results()
    assert cublas_lt.plans == {}
    cublas_lt.settings.measured = True
    assert all(map(torch.equal, results(), by_torch)) and stand_in.multiplied == 0
    choose_proposal(1)
    for one, other in zip(results(), by_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert stand_in.algorithms == [1, 1, 1]


def test_torch_knows_the_operations():
    x, w1, w2, grad = matrices(torch.float32)
    inputs = {"product": (x, w1.T), "sum_with_product": (x @ w1.T, x, w1.T), "product_gelu": (x, w1),
              "product_gelu_backward": (grad, w2, x @ w1.T)}
    for name, arguments in inputs.items():
        operation = getattr(torch.ops.nanoshard, name).default
        torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))


# -----------------------------------------------------------------------------
# In compiled blocks

class Residual(torch.nn.Module):
    """x + W x', where x' is the norm of x, and the next norm."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(16, 16, bias=False)
        self.last = torch.nn.Linear(16, 8, bias=False)

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


def test_a_compiled_block_with_chosen_products_has_the_gradients_of_eager(stand_in, compiler):
    torch.manual_seed(0)
    block = Residual().bfloat16()
    x = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)
    factors_of_sum = [torch.randn(24, 16), torch.randn(24, 8)]

    def results(f):
        both = f(x)
        total = sum((y.float() * factor).sum() for y, factor in zip(both, factors_of_sum, strict=True))
        return [*both, *torch.autograd.grad(total, [x, *block.parameters()])]
    expected = results(block)
    products.compile_products(True)
    compiled = torch.compile(block, backend=passes_alone)
    results(compiled)
    assert sum(shape.adds for shape in cublas_lt.plans) == 1  # x + W x'
    choose_proposal(1)
    found = results(compiled)
    assert stand_in.algorithms == [1] * 6  # two products, and two gradients of each
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 0.01


# -----------------------------------------------------------------------------
# Which algorithm is chosen

@pytest.mark.parametrize("times, expected", [
    ({None: 4, 0: 3, 1: 2, 2: 5}, 1), ({None: 4, 0: 4.5, 1: 5, 2: 5}, None),
    ({None: 4, 0: 3.97, 1: 5, 2: 5}, None),  # by less than one part in 100
    ({0: 3, 1: 2, 2: 5}, None), ({None: 4}, None)])  # torch's way was refused, or all others were
def test_the_fastest_is_chosen(stand_in, monkeypatch, times, expected):
    product(*factors()["y"])
    [plan] = cublas_lt.plans.values()
    names = {None: None, **{i: proposal.name() for i, proposal in enumerate(plan.proposals)}}
    monkeypatch.setattr(products, "make_candidates", lambda plan: {names[i]: ms for i, ms in times.items()})
    monkeypatch.setattr(products, "milliseconds", lambda graph: graph)
    assert products.fastest(plan) == ("" if expected is None else names[expected])


def choose_on(world):
    """Let each rank measure other times, and one product more than the rank before it."""
    library = StandIn()
    patches = {"library": lambda: library, "handle": lambda device: None, "DEVICE": "cpu", "ALIGNMENT": 64}
    with mock.patch.multiple(cublas_lt, **patches), \
            mock.patch.object(products, "fastest", lambda plan: plan.proposals[world.rank].name()):
        for factor in list(factors().values())[:world.rank + 1]:
            product(*factor)
        products.choose_products(world.everyone)
        chosen = {str(shape): plan.chosen.algorithm[0] for shape, plan in cublas_lt.plans.items()}
        all_choices = dict(cublas_lt.choices)
        cublas_lt.forget()
    return chosen, all_choices


def test_all_ranks_take_the_choice_of_the_lowest():
    results = run_ranks(3, choose_on)
    assert [list(chosen.values()) for chosen, _ in results] == [[0], [0, 1], [0, 1, 2]]
    assert all(choices == results[0][1] and list(choices) == list(results[2][0]) for _, choices in results)


@pytest.mark.parametrize("flags, answer", [
    ({}, True), ({"dtype": "fp16"}, False), ({"dtype": "fp32"}, False), ({"deterministic": True}, False)])
def test_which_runs_measure(stand_in, monkeypatch, flags, answer):
    monkeypatch.setattr(backend, "is_hopper", lambda device: device.type == "cuda")
    cfg = Config(**{"preset": "tiny", "dtype": "bf16", **flags})
    assert products.is_possible(cfg, torch.device("cuda:0")) == answer
    for device in ("cpu", "cuda"):  # plan.py's has no index
        assert not products.is_possible(cfg, torch.device(device))
    monkeypatch.setattr(cublas_lt, "library", lambda: None)
    assert not products.is_possible(cfg, torch.device("cuda:0"))


def step_of(world):
    """Return whether this rank's step measures, where only rank 0 could."""
    cfg = Config(preset="tiny", dtype="fp32")
    choice = Choice(graph=True, symm_mem=False, peer_copies=False, single_microbatch=False,
                    measured=world.rank == 0)
    parts = train.build(cfg, make_mesh(world), 64, CPU, choice=choice)
    graph.make_step(train.Step(cfg, *parts), choice)
    return cublas_lt.settings.measured


def test_all_ranks_measure_or_none():
    assert run_ranks(1, step_of) == [True]
    assert run_ranks(2, step_of) == [False, False]


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
def test_measured_on_a_gpu(n, n_in, n_out):
    x, w, grad, summand = (torch.randn(shape, dtype=HALF, device="cuda:0")
                           for shape in ((n, n_in), (n_out, n_in), (n, n_out), (n, n_out)))

    def compute():
        return product(x, w.T), product(grad, w), product(grad.T, x), sum_with_product(summand, x, w.T)
    cublas_lt.forget()
    compute()
    products.choose_products(Everyone())
    chosen = {str(shape): plan.chosen for shape, plan in cublas_lt.plans.items()}
    assert len(chosen) == 4
    assert cublas_lt.choices == {name: plan.name() if plan else "" for name, plan in chosen.items()}
    wide = x.double() @ w.double().T, grad.double() @ w.double(), grad.double().T @ x.double()
    for one, other in zip(compute(), (*wide, summand.double() + wide[0]), strict=True):
        assert (one.double() - other).norm() / other.norm() < 3e-3
    cublas_lt.forget()

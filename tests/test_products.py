"""Products by the algorithm that was chosen for their shape (ops/cublas_lt.py, fast/products.py).

cuBLASLt is on NVIDIA's GPUs only, so a stand-in multiplies (test_gelu_mlp.py), and times are given.
"""
import json
from unittest import mock

import pytest
import torch
from pool import run_ranks
from test_gelu_mlp import StandIn, matrices, stand_in  # noqa: F401 - a fixture

import train
from config import Config
from fast import graph, products
from fast.choose import Choice
from ops import backend, cublas_lt
from ops.cross_entropy import LinearCrossEntropy
from ops.cublas_lt import Factor, Shape, product, sum_with_product
from ops.gelu_mlp import product_gelu, product_gelu_backward
from parallel import make_mesh
from runtime.everyone import Everyone
from runtime.launch import World

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alignment_of_a_cpu(monkeypatch):
    """Let matrices be served that begin where torch puts them in a CPU's memory."""
    monkeypatch.setattr(cublas_lt, "ALIGNMENT", 64)


def factors():
    """Return the factors of the three products of y = x w^T: y, and the gradients of x and w."""
    x, w, _, _ = matrices(torch.bfloat16)  # (24, 16), (32, 16)
    grad = (x @ w.T).contiguous()
    return {"y": (x, w.T), "grad_x": (grad, w), "grad_w": (grad.T, x)}


def choose_proposal(i):
    """Choose the i-th proposal for each Plan."""
    for plan in cublas_lt.plans.values():
        plan.choose(plan.proposals[i].name())


@pytest.mark.parametrize("which", ["y", "grad_x", "grad_w"])
@pytest.mark.parametrize("adds", [False, True])
def test_the_chosen_proposal_multiplies(stand_in, which, adds):  # noqa: F811
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


def test_rows_of_a_wider_matrix(stand_in):  # noqa: F811
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


def test_the_library_gets_back_what_it_made(stand_in):  # noqa: F811
    for factor in factors().values():
        product(*factor)
    assert len(stand_in.made) == 3 * 4  # for each Plan one of the product, and three of matrices
    cublas_lt.forget()
    assert stand_in.made == {}


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("a, b, summand", [
    (zeros(8, 12), zeros(12, 8), None), (zeros(16, 12).T, zeros(16, 8), None),
    (zeros(8, 16), zeros(16, 12), None), (zeros(0, 16), zeros(16, 8), None),
    (zeros(8, 32)[:, ::2], zeros(16, 8), None), (zeros(1, 16).expand(8, 16), zeros(16, 8), None),
    (zeros(8, 20)[:, :16], zeros(16, 8), None), (zeros(8, 32)[:, 1:17], zeros(16, 8), None),
    (zeros(8, 16).half(), zeros(16, 8).half(), None),
    (zeros(8, 16), zeros(16, 8), zeros(8, 8).T), (zeros(16, 16), zeros(16, 8), zeros(1, 8))])
def test_torch_multiplies_what_the_library_cannot_read(stand_in, a, b, summand):  # noqa: F811
    if summand is None:
        assert torch.equal(product(a, b), a @ b)
    else:
        assert torch.equal(sum_with_product(summand, a, b), zeros(a.size(0), 8))
    assert cublas_lt.plans == {}


def test_the_head_multiplies_by_what_was_chosen(stand_in):  # noqa: F811
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (24, 64))
    target = torch.arange(24)

    def results():
        loss = LinearCrossEntropy.apply(x, w, target, 64)
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
    a, b, summand = torch.randn(8, 16), torch.randn(16, 8), torch.randn(8, 8)
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.nanoshard.product.default, (a, b), test_utils=tests)
    torch.library.opcheck(torch.ops.nanoshard.sum_with_product.default, (summand, a, b), test_utils=tests)


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


@pytest.fixture
def compiler():
    """Let what torch compiled be forgotten, and its settings be as before."""
    from torch._inductor import config
    torch._dynamo.reset()
    yield config
    config.post_grad_custom_post_pass = None
    torch._dynamo.reset()


@pytest.mark.parametrize("on", [True, False])
def test_compiled_blocks_ask_for_their_products(compiler, on):
    torch.manual_seed(0)
    block = Residual().bfloat16()
    x = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)

    def results(f):
        both = f(x)
        return [*both, *torch.autograd.grad([y.float().sum() for y in both], [x, *block.parameters()])]
    expected = results(block)
    asked = []

    def plan(a, b, *args, **kwargs):
        asked.append((tuple(a.shape), tuple(b.shape)))
    products.compile_products(on)
    with mock.patch.object(cublas_lt, "plan_for", plan):
        found = results(torch.compile(block))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    forward = [((24, 16), (16, 16)), ((24, 16), (16, 8))]
    backward = [((24, 8), (8, 16)), ((8, 24), (24, 16)), ((24, 16), (16, 16)), ((16, 24), (24, 16))]
    assert sorted(asked) == (sorted(forward + backward) if on else [])


def test_a_compiled_block_with_chosen_products_has_the_gradients_of_eager(stand_in, compiler):  # noqa: F811
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
    compiled = torch.compile(block)
    results(compiled)
    assert sum(shape.adds for shape in cublas_lt.plans) == 1  # x + W x'
    choose_proposal(1)
    found = results(compiled)
    assert stand_in.algorithms == [1] * 6  # two products, and two gradients of each
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 0.01


def test_a_pass_of_others_is_left(compiler):
    compiler.post_grad_custom_post_pass = "theirs"
    for on in (True, False):
        products.compile_products(on)
        assert compiler.post_grad_custom_post_pass == "theirs"


def test_what_was_compiled_otherwise_is_compiled_again(compiler):
    x = torch.randn(24, 16, dtype=torch.bfloat16)
    counts = []
    for on in (False, True, True, False):
        products.compile_products(on)
        block = Residual().bfloat16()
        block.compile()
        with mock.patch.object(cublas_lt, "plan_for", return_value=None) as asked, torch.no_grad():
            block(x)
        counts.append(asked.call_count)
    assert counts == [0, 2, 2, 0]


@pytest.mark.parametrize("what", ["fp32", "beta", "bias"])
def test_torch_keeps_other_products_of_a_compiled_block(compiler, what):
    dtype = torch.float32 if what == "fp32" else torch.bfloat16
    x, w = torch.randn(16, 16, dtype=dtype), torch.randn(16, 16, dtype=dtype)

    def f(x):
        summand = x[0] if what == "bias" else x
        return torch.addmm(summand, x, w, beta=0.5 if what == "beta" else 1)
    products.compile_products(True)
    with mock.patch.object(cublas_lt, "plan_for", return_value=None) as asked:
        torch.testing.assert_close(torch.compile(f)(x), f(x), rtol=0.05, atol=0.05)
    assert asked.call_count == 0


# -----------------------------------------------------------------------------
# Which algorithm is chosen

class Timed:
    """Stands for products.Candidate: each proposal takes the time of its number in a table.

    tables: times by round of turns: the first rounds' and the last ones'.
    """
    first, last = {}, {}

    def __init__(self, plan):
        self.proposal = plan.chosen
        self.number = None if plan.chosen is None else plan.chosen.algorithm[0]
        self.runs = 0

    def milliseconds(self):
        table = Timed.last if self.runs > products.FIRST_ROUNDS else Timed.first
        return table[self.number]

    def run(self):
        self.runs += 1


def time_as(monkeypatch, first, last):
    """Let torch's way (None) and the proposals 0, 1, 2 take these times, at first and in the last rounds."""
    Timed.first, Timed.last = first, last
    made = []

    def make(plan):
        candidates = []
        for proposal in (None, *plan.proposals):
            plan.chosen = proposal
            candidates.append(Timed(plan))
        made.append(candidates)
        return candidates

    def take_turns(candidates, rounds):
        for candidate in candidates:
            for _ in range(rounds):
                candidate.run()
    monkeypatch.setattr(products, "make_candidates", make)
    monkeypatch.setattr(products, "take_turns", take_turns)
    monkeypatch.setattr(products, "Candidate", Timed)
    monkeypatch.setattr(products, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(cublas_lt, "version", lambda: 130100)
    return made


@pytest.mark.parametrize("first, last, expected", [
    ({None: 4, 0: 3, 1: 2, 2: 5}, {None: 4, 0: 3, 1: 2, 2: 5}, 1),
    ({None: 4, 0: 3, 1: 2, 2: 5}, {None: 4, 0: 1, 1: 2, 2: 5}, 0),  # the last rounds count
    ({None: 4, 0: 4.5, 1: 5, 2: 5}, {None: 4, 0: 4.5, 1: 5, 2: 5}, None),
    ({None: 4, 0: 3.97, 1: 5, 2: 5}, {None: 4, 0: 3.97, 1: 5, 2: 5}, None),  # by less than one part in 100
    ({None: 1, 0: 3, 1: 2, 2: 5}, {None: 4, 0: 3, 1: 2, 2: 5}, 1)])
def test_the_fastest_is_chosen(stand_in, monkeypatch, first, last, expected):  # noqa: F811
    time_as(monkeypatch, first, last)
    product(*factors()["y"])
    [plan] = cublas_lt.plans.values()
    name = products.fastest(plan)
    assert name == ("" if expected is None else plan.proposals[expected].name())
    assert plan.chosen is None  # so far


def test_nothing_is_chosen_where_torchs_way_was_refused(stand_in, monkeypatch):  # noqa: F811
    time_as(monkeypatch, TIMES, TIMES)
    make = products.make_candidates
    product(*factors()["y"])
    [plan] = cublas_lt.plans.values()
    for first in (1, 4):  # the proposals alone; not even one
        monkeypatch.setattr(products, "make_candidates", lambda plan, first=first: make(plan)[first:])
        assert products.fastest(plan) == ""


def test_all_but_torch_and_the_finalists_drop_out(stand_in, monkeypatch):  # noqa: F811
    stand_in.proposals = 6
    times = {None: 9, 0: 1, 1: 8, 2: 2, 3: 7, 4: 3, 5: 6}
    made = time_as(monkeypatch, times, times)
    product(*factors()["y"])
    products.fastest(*cublas_lt.plans.values())
    most = products.FIRST_ROUNDS + products.LAST_ROUNDS
    assert {candidate.number: candidate.runs for candidate in made[0]} == {
        None: most, 0: most, 1: 2, 2: most, 3: 2, 4: most, 5: 2}


@pytest.mark.parametrize("why", ["before", "while"])
def test_without_memory_nothing_is_decided(stand_in, monkeypatch, tmp_path, why):  # noqa: F811
    time_as(monkeypatch, TIMES, TIMES)
    x, w1, _, _ = matrices(torch.bfloat16)
    fast_products = make_products(tmp_path)
    product(x, w1.T)
    product_gelu(x, w1)
    plain, gelu = cublas_lt.plans.values()
    needed = products.bytes_needed(plain.shape)
    assert needed == products.bytes_needed(gelu.shape)
    make = products.make_candidates

    def make_all_but_one(plan):
        plan.chosen = plan.proposals[2]
        raise torch.OutOfMemoryError
    monkeypatch.setattr(products, "free_memory", lambda device: needed - (why == "before"))
    monkeypatch.setattr(products, "make_candidates", make_all_but_one)
    fast_products.choose()
    assert cublas_lt.choices == {} and not list(tmp_path.iterdir())
    assert plain.chosen is None and gelu.chosen is gelu.proposals[0]

    monkeypatch.setattr(products, "free_memory", lambda device: needed)
    monkeypatch.setattr(products, "make_candidates", make)
    fast_products.choose()
    assert [plan.chosen.algorithm[0] for plan in (plain, gelu)] == [1, 1]


class Capture:
    """Stands for torch.cuda.CUDAGraph: it counts the calls that are captured."""

    def __init__(self, library):
        self.library = library

    def capture_begin(self, pool):
        assert pool == "pool"
        self.before = len(self.library.algorithms)

    def capture_end(self):
        self.calls = self.library.algorithms[self.before:]

    def replay(self):
        self.library.replayed.append(self.calls)


class Event:
    """Stands for torch.cuda.Event: the time between two is the number of replays until the second.

    It is known when the second has been waited for.
    """

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = self.known = None

    def record(self):
        self.at = len(Event.library.replayed)

    def synchronize(self):
        self.known = self.at

    def elapsed_time(self, end):
        assert end.known == self.at + 1
        return end.known


@pytest.mark.parametrize("times, calls", [(0.5, 1), (3.5, 3), (9.5, 5)])
def test_the_candidates_are_captured_and_timed_in_turn(stand_in, monkeypatch, times, calls):  # noqa: F811
    """FLOPS: `times` those of the product. 5 calls are the most."""
    product(*factors()["y"])
    [plan] = cublas_lt.plans.values()
    multiply = stand_in.cublasLtMatmul

    def refuse_the_second(*args):
        return 15 if args[12]._obj[0] == 1 else multiply(*args)
    stand_in.cublasLtMatmul = refuse_the_second
    stand_in.replayed = []
    Event.library = stand_in
    monkeypatch.setattr(products, "FLOPS", times * 2 * 24 * 16 * 32)
    monkeypatch.setattr(products, "MOST_CALLS", 5)
    for name, value in {"CUDAGraph": lambda: Capture(stand_in), "Event": Event, "stream": mock.MagicMock(),
                        "graph_pool_handle": lambda: "pool"}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    stream = mock.MagicMock()
    monkeypatch.setattr(products, "side_stream", lambda device: stream)
    candidates = products.make_candidates(plan)
    names = [None, plan.proposals[0].name(), plan.proposals[2].name()]
    assert [candidate.proposal and candidate.proposal.name() for candidate in candidates] == names
    stream.wait_stream.assert_called_once()  # for the matrices
    assert stream.synchronize.call_count == len(candidates)
    products.take_turns(candidates, 1)
    products.take_turns(candidates, 3)
    assert stand_in.replayed == [[], [0] * calls, [2] * calls] * 4
    assert [candidate.milliseconds() for candidate in candidates] == [7, 8, 9]  # the first turn is forgotten


def test_a_capture_ends_and_want_of_memory_is_told(stand_in, monkeypatch):  # noqa: F811
    ended = []
    monkeypatch.setattr(Capture, "capture_end", lambda capture: ended.append(capture))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Capture(stand_in))
    product(*factors()["y"])
    [plan] = cublas_lt.plans.values()

    def call():
        raise torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        products.Candidate(plan, call, "pool")
    assert len(ended) == 1
    for place, name in ((products, "side_stream"), (torch.cuda, "stream"), (torch.cuda, "graph_pool_handle")):
        monkeypatch.setattr(place, name, mock.MagicMock())
    monkeypatch.setattr(products, "example", lambda shape: call)
    with pytest.raises(torch.OutOfMemoryError):
        products.make_candidates(plan)


def test_the_memory_that_measuring_needs():
    """The factors, and five matrices of the result's size, in numbers of two bytes, and twice a workspace."""
    a = Factor(by_column=False, stride=40)
    b = Factor(by_column=True, stride=56)
    shape = Shape(16, 24, 8, a, b, cublas_lt.PRODUCT_ONLY, False, CPU)
    numbers = 16 * 40 + 8 * 56 + 5 * 16 * 8
    assert products.bytes_needed(shape) == 2 * numbers + 2 * 32 * 2**20


@pytest.mark.parametrize("operation", ["product", "sum", "gelu", "gelu backward", "grad_w", "rows of a wider",
                                       "columns of a wider"])
def test_an_example_has_the_shape(stand_in, operation):  # noqa: F811
    x, w1, w2, grad = matrices(torch.bfloat16)
    _, z = product_gelu(x, w1)
    wide = zeros(24, 128)
    cublas_lt.forget()
    {"product": lambda: product(x, w1.T), "sum": lambda: sum_with_product(z, x, w1.T),
     "gelu": lambda: product_gelu(x, w1), "gelu backward": lambda: product_gelu_backward(grad, w2, z),
     "grad_w": lambda: product(z.T, x),
     "rows of a wider": lambda: product(wide[:, 32:48], w1.T),
     "columns of a wider": lambda: product(wide[:, 32:].T, x)}[operation]()
    [shape] = cublas_lt.plans
    state = torch.get_rng_state()
    products.example(shape)()
    assert list(cublas_lt.plans) == [shape]
    assert torch.equal(torch.get_rng_state(), state)


TIMES = {None: 4, 0: 3, 1: 2, 2: 5}


def make_products(folder, everyone=None):
    return products.FastProducts(everyone or Everyone(), CPU, folder)


def test_the_runs_folder_keeps_the_choices(stand_in, monkeypatch, tmp_path):  # noqa: F811
    time_as(monkeypatch, TIMES, TIMES)
    fast_products = make_products(tmp_path)
    for factor in factors().values():
        product(*factor)
    with mock.patch.object(torch.cuda, "empty_cache") as emptied:
        fast_products.choose()
    assert emptied.call_count == 3  # after each product: the next one would have less memory
    assert stand_in.algorithms == [] and cublas_lt.settings.measured
    assert [plan.chosen.algorithm[0] for plan in cublas_lt.plans.values()] == [1, 1, 1]
    kept = json.loads((tmp_path / "products.json").read_text())
    assert list(kept["products"]) == [
        "24 x 16 x 32, rows 16, columns 16, only", "24 x 32 x 16, rows 32, rows 16, only",
        "32 x 24 x 16, columns 32, rows 16, only"]
    assert list(tmp_path.iterdir()) == [tmp_path / "products.json"]

    # A resumed run measures nothing, and multiplies in the same way from its first step on.
    cublas_lt.forget()
    monkeypatch.setattr(products, "fastest", None)
    resumed = make_products(tmp_path)
    for factor in factors().values():
        product(*factor)
    assert stand_in.algorithms == [1, 1, 1]
    resumed.choose()


@pytest.mark.parametrize("text", [
    "", "[]", "{", "7", '{"gpu": "another GPU", "cublaslt": 130100, "products": {"a": "b"}}',
    '{"gpu": "a GPU", "cublaslt": 130200, "products": {"a": "b"}}', '{"gpu": "a GPU", "cublaslt": 130100}',
    '{"gpu": "a GPU", "cublaslt": 130100, "products": ["a"]}'])
def test_a_file_of_another_machine_is_not_taken(stand_in, monkeypatch, tmp_path, text):  # noqa: F811
    time_as(monkeypatch, TIMES, TIMES)
    (tmp_path / "products.json").write_text(text)
    fast_products = make_products(tmp_path)
    assert cublas_lt.choices == {}
    product(*factors()["y"])
    fast_products.choose()
    assert list(json.loads((tmp_path / "products.json").read_text())["products"]) == list(cublas_lt.choices)


def test_a_name_that_the_library_does_not_propose_is_not_run(stand_in, monkeypatch, tmp_path):  # noqa: F811
    time_as(monkeypatch, TIMES, TIMES)
    words = "24 x 16 x 32, rows 16, columns 16, only"
    kept = {"gpu": "a GPU", "cublaslt": 130100, "products": {words: "ff" * 64}}
    (tmp_path / "products.json").write_text(json.dumps(kept))
    make_products(tmp_path)
    a, b = factors()["y"]
    assert torch.equal(product(a, b), a @ b) and stand_in.algorithms == []


def test_a_folder_that_cannot_be_written(stand_in, monkeypatch, tmp_path):  # noqa: F811
    time_as(monkeypatch, TIMES, TIMES)
    for folder in (tmp_path / "gone", None):
        fast_products = make_products(folder)
        product(*factors()["y"])
        fast_products.choose()
        assert len(cublas_lt.choices) == 1
        cublas_lt.forget()


def choose_on(world, folder):
    """Let each rank measure other times, and one product more than the rank before it."""
    library = StandIn()
    patches = {"library": lambda: library, "handle": lambda device: None, "DEVICE": "cpu",
               "version": lambda: 1, "ALIGNMENT": 64}
    with mock.patch.multiple(cublas_lt, **patches), \
            mock.patch.object(products, "fastest", lambda plan: plan.proposals[world.rank].name()):
        fast_products = make_products(folder, world.everyone)
        for factor in list(factors().values())[:world.rank + 1]:
            product(*factor)
        fast_products.choose()
        chosen = {shape.words(): plan.chosen.algorithm[0] for shape, plan in cublas_lt.plans.items()}
        assert cublas_lt.choices.keys() >= chosen.keys()
        all_choices = dict(cublas_lt.choices)
        cublas_lt.forget()
    return chosen, all_choices


def test_all_ranks_take_the_choice_of_the_lowest(tmp_path):
    results = run_ranks(3, choose_on, tmp_path)
    words = list(results[2][0])
    assert [list(chosen.values()) for chosen, _ in results] == [[0], [0, 1], [0, 1, 2]]
    assert all(choices == results[0][1] and choices.keys() == set(words) for _, choices in results)
    assert json.loads((tmp_path / "products.json").read_text())["products"] == results[0][1]


@pytest.mark.parametrize("flags, answer", [
    ({}, True), ({"dtype": "fp16"}, False), ({"dtype": "fp32"}, False),
    ({"deterministic": True}, False)])
def test_which_runs_measure(stand_in, monkeypatch, flags, answer):  # noqa: F811
    monkeypatch.setattr(backend, "is_hopper", lambda device: device.type == "cuda")
    cfg = Config(**{"preset": "tiny", "dtype": "bf16", **flags})
    assert products.is_possible(cfg, torch.device("cuda:0")) == answer
    for device in ("cpu", "cuda"):  # plan.py's has no index
        assert not products.is_possible(cfg, torch.device(device))
    monkeypatch.setattr(cublas_lt, "library", lambda: None)
    assert not products.is_possible(cfg, torch.device("cuda:0"))


@pytest.mark.parametrize("is_graph, is_measured", [(True, True), (True, False), (False, True)])
def test_a_step_measures_once_before_it_is_captured(monkeypatch, is_graph, is_measured):
    called = []

    class Counted:
        def __init__(self, everyone, device, folder):
            called.append(folder)

        def choose(self):
            called.append("choose")
    monkeypatch.setattr(graph, "FastProducts", Counted)
    monkeypatch.setattr(graph, "compile_products", called.append)
    monkeypatch.setattr(graph, "compile_blocks", lambda model: None)
    cublas_lt.choices["of an earlier run"] = ""
    cublas_lt.settings.measured = True
    cfg = Config(preset="tiny", dtype="fp32", compile=True)
    mesh = make_mesh(World())
    choice = Choice(graph=is_graph, symm_mem=False, peer_copies=False, single_microbatch=False,
                    measured=is_measured)
    parts = train.build(cfg, mesh, 64, CPU, choice=choice)
    step = graph.make_step(train.Step(cfg, *parts), choice, "folder")
    on = is_graph and is_measured
    assert called == (["folder", True] if on else [False]) and cublas_lt.choices == {}
    assert not cublas_lt.settings.measured  # A FastProducts would change that.
    if is_graph:
        EmulatedCapture(step, called).run()
        measured = ["choose", "emptied"] if on else []
        assert called[-2 - len(measured):] == ["emptied", *measured, "captured"]


def step_of(world):
    """Return whether this rank's step measures, where only rank 0 could."""
    cfg = Config(preset="tiny", dtype="fp32")
    choice = Choice(graph=True, symm_mem=False, peer_copies=False, single_microbatch=False,
                    measured=world.rank == 0)
    mesh = make_mesh(world)
    parts = train.build(cfg, mesh, 64, CPU, choice=choice)
    return graph.make_step(train.Step(cfg, *parts), choice).products is not None


def test_all_ranks_measure_or_none():
    assert run_ranks(2, step_of) == [False, False]


class EmulatedCapture:
    """The beginning of GraphedStep.capture on a CPU, up to the capture itself."""

    def __init__(self, step, called):
        self.step = step
        self.called = called

    def run(self):
        class Captured(Exception):
            pass

        def graph_begins():
            self.called.append("captured")
            raise Captured
        nothing = mock.MagicMock()
        with mock.patch.object(torch.cuda, "synchronize", nothing), \
                mock.patch.object(torch.cuda, "empty_cache", lambda: self.called.append("emptied")), \
                mock.patch.object(torch.cuda, "CUDAGraph", graph_begins), pytest.raises(Captured):
            self.step.capture([], 0, None)


@pytest.mark.skipif(not torch.cuda.is_available() or not backend.is_hopper(torch.device("cuda:0")),
                    reason="the library's kernels are of NVIDIA's Hopper GPUs")
@pytest.mark.parametrize("n, n_in, n_out", [(8192, 768, 2304), (4096, 512, 1536), (2048, 2048, 8192)])
def test_measured_on_a_gpu(tmp_path, n, n_in, n_out):
    device = torch.device("cuda:0")
    x, w, grad, summand = (torch.randn(shape, dtype=torch.bfloat16, device=device)
                           for shape in ((n, n_in), (n_out, n_in), (n, n_out), (n, n_out)))

    def compute():
        return product(x, w.T), product(grad, w), product(grad.T, x), sum_with_product(summand, x, w.T)
    cublas_lt.forget()
    fast_products = products.FastProducts(Everyone(), device, tmp_path)
    compute()
    assert len(cublas_lt.plans) == 4
    fast_products.choose()
    chosen = {shape.words(): plan.chosen for shape, plan in cublas_lt.plans.items()}
    kept = json.loads((tmp_path / "products.json").read_text())["products"]
    assert kept == {words: plan.name() if plan else "" for words, plan in chosen.items()}
    before = compute()
    wide = x.double() @ w.double().T, grad.double() @ w.double(), grad.double().T @ x.double()
    for one, other in zip(before, (*wide, summand.double() + wide[0]), strict=True):
        assert (one.double() - other).norm() / other.norm() < 3e-3

    cublas_lt.forget()
    products.FastProducts(Everyone(), device, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(compute(), before, strict=True))
    assert chosen.keys() == {shape.words() for shape in cublas_lt.plans}
    cublas_lt.forget()

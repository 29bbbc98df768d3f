"""--fp8: ops/fp8.py beside its definition, its kernel beside the twin, and runs in every kind of layout.

Without a GPU the twins compute: they round to fp8 numbers and multiply them in the dtype of the layer.
"""
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import test_layouts
import torch
import torch.nn.functional as F
from pool import run_ranks
from runs import go, rows, same
from test_layouts import equality

import layers
import plan
import sample
from config import Config, check
from interface.command_line import parse
from model import GPT
from ops import backend, fp8
from parallel import make_mesh
from runtime.launch import World

FORMS = [fp8.FORWARD, fp8.BACKWARD]
STEP = {fp8.FORWARD: 2**-3, fp8.BACKWARD: 2**-2}  # between two neighbours, relative to the smaller power of 2


def spread(*shape, dtype=torch.float64):
    """Numbers of very different sizes."""
    return (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(dtype)


def case(dtype=torch.float64, n=32, n_in=48, outs=(32, 16)):
    torch.manual_seed(0)
    x = torch.randn(n, n_in, dtype=dtype, requires_grad=True)
    weights = [torch.randn(n_out, n_in, dtype=dtype, requires_grad=True) for n_out in outs]
    bias = torch.randn(sum(outs), dtype=dtype, requires_grad=True)
    return x, weights, bias, torch.randn(n, sum(outs), dtype=dtype)


def results(linear, x, weights, bias, grad):
    """The output of a layer, and the gradients of x, of each weight and of the bias."""
    y = linear(x, weights, bias)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights, bias], grad)]


def plain(x, weights, bias):
    return F.linear(x, torch.cat(weights), bias)


def rounded(x, form):
    """x as the format holds it: to the nearest of its numbers, with a scale that is a power of two."""
    largest = x.abs().max().item()
    top = 8 if form == fp8.FORWARD else 15
    scale = 2.0 ** (np.frexp(largest)[1] - top)
    return (x.double() / scale).float().to(form).double() * scale


def by_definition(x, weights, bias, grad):
    x8, w8 = (rounded(t, fp8.FORWARD) for t in (x, torch.cat(weights)))
    g8 = rounded(grad, fp8.BACKWARD)
    gw = (g8.t() @ x8).split([w.size(0) for w in weights])
    return [x8 @ w8.t() + bias, g8 @ w8, *gw, grad.sum(0)]


# -----------------------------------------------------------------------------
# Rounding

@pytest.mark.parametrize("form", FORMS)
def test_a_number_is_rounded_by_half_a_step_at_most(form):
    x = spread(64, 64)
    q = fp8.quantise([x], form, transposed=True)
    got = q.rows.double() * q.scale
    least = 2.0 ** (-13 if form == fp8.FORWARD else -28) * x.abs().max()  # smaller ones have fewer digits
    error = (got - x).abs()
    assert (error <= STEP[form] / 2 * x.abs()).logical_or(x.abs() < least).all()
    assert (error <= STEP[form] / 2 * x.abs().clamp(min=least)).all() and (error > 0).any()
    assert torch.equal(q.columns.view(torch.uint8), q.rows.t().contiguous().view(torch.uint8))
    assert q.rows.is_contiguous() and q.columns.is_contiguous()
    assert q.rows.double().abs().max() >= 2 ** fp8.TOP[form] and torch.isfinite(q.rows.float()).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [4, 2.0**-40, 2.0**60])
def test_a_scale_moves_no_rounding(form, factor):
    """The scale is a power of two: a tensor that is so many times larger has the same fp8 numbers."""
    x = spread(16, 16)
    small, large = (fp8.quantise([t], form) for t in (x, x * factor))
    assert torch.equal(small.rows.view(torch.uint8), large.rows.view(torch.uint8))
    assert small.scale * factor == large.scale and np.frexp(small.scale.item())[0] == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zeros_and_the_smallest_numbers_give_zeros(dtype):
    for tiny in (0.0, torch.finfo(torch.float32).tiny, 1e-40):
        x, weights, bias, grad = case(dtype)
        got = results(fp8.linear, (x * 0 + tiny).detach().requires_grad_(), weights, bias, grad * 0 + tiny)
        assert all(torch.isfinite(t).all() for t in got)
        assert all((t.abs() < 1e-30).all() for t in got[1:])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad):
    """In x all results that depend on it, in the gradient all gradients."""
    for which in ("x", "weight", "grad"):
        x, weights, bias, grad = case(torch.float32)
        with torch.no_grad():
            {"x": x, "weight": weights[0], "grad": grad}[which][3, 5] = bad
        y, gx, gw, _, _ = results(fp8.linear, x, weights, bias, grad)
        assert which == "grad" or not torch.isfinite(y).any()
        assert which == "x" or not torch.isfinite(gx).any()
        assert which == "weight" or not torch.isfinite(gw).any()


# -----------------------------------------------------------------------------
# The layer

@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6),
                                             (torch.bfloat16, 5e-3)])
def test_linear_is_what_its_definition_says(dtype, tolerance):
    arguments = case(dtype)
    for got, want in zip(results(fp8.linear, *arguments), by_definition(*arguments), strict=True):
        assert got.dtype == dtype and (got.double() - want).norm() <= tolerance * want.norm()


def test_linear_is_near_the_plain_product():
    """3 digits in binary: 2.6 % of each number at the root mean square, 4 % of a product of two."""
    arguments = case(n=256, n_in=512, outs=(256,))
    pairs = zip(results(fp8.linear, *arguments), results(plain, *arguments), strict=True)
    errors = [((got - want).norm() / want.norm()).item() for got, want in pairs]
    assert 0.02 < errors[0] < 0.05 and 0.03 < errors[1] < 0.08 and 0.03 < errors[2] < 0.08
    assert errors[3] == 0, "the gradient of the bias is a sum"


@pytest.mark.parametrize("trains_weights,enabled", [(True, False), (False, True), (False, False)])
def test_the_compiler_takes_an_evaluation(trains_weights, enabled):
    """In no_grad(), or where nothing trains, torch 2.11 to 2.13 know no needs_input_grad."""
    x, weights, bias, _ = case(torch.float32)
    weights = [weight.detach().requires_grad_(trains_weights) for weight in weights]
    compiled = torch.compile(fp8.linear, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(enabled):
        y = compiled(x.detach(), weights, bias.detach())
        assert torch.equal(y, fp8.linear(x.detach(), weights, bias.detach())) and not y.requires_grad


@pytest.mark.parametrize("are_frozen", [False, True])
def test_it_is_one_graph_of_the_compiler(are_frozen):
    x, weights, bias, grad = case(torch.float32)
    trained = [x] if are_frozen else [x, *weights, bias]
    if are_frozen:
        weights, bias = [weight.detach() for weight in weights], bias.detach()
    compiled = torch.compile(fp8.linear, backend="aot_eager", fullgraph=True)
    found = []
    for function in (compiled, fp8.linear):
        y = function(x, weights, bias)
        found.append([y, *torch.autograd.grad(y, trained, grad)])
    assert all(map(torch.equal, *found))


# -----------------------------------------------------------------------------
# The kernel

def nearest_fp8(original, builder, value, to, mode):
    """The conversion to fp8 of Triton's interpreter, which rounds some numbers to far ones, as a GPU does it:
    to the nearest number, and to the largest one beyond that."""
    form = {"fp8e4nv": fp8.FORWARD, "fp8e5": fp8.BACKWARD}.get(str(to.scalar))
    if form is None:
        return original(builder, value, to, mode)
    from triton.runtime.interpreter import TensorHandle
    largest = torch.finfo(form).max
    narrow = torch.from_numpy(value.data).clamp(-largest, largest).to(form)
    return TensorHandle(narrow.view(torch.uint8).numpy(), to.scalar)


@pytest.fixture
def interpreter(monkeypatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    if not torch.cuda.is_available():
        from triton.runtime import interpreter
        real = interpreter.InterpreterBuilder.create_fp_to_fp
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp",
                            lambda self, *rest: nearest_fp8(real, self, *rest))
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heights,width", [((64,), 64), ((5, 70, 16), 144), ((130,), 33)], ids=str)
def test_the_kernel_writes_the_bits_of_the_twin(form, heights, width, interpreter):
    torch.manual_seed(0)
    parts = [spread(height, width, dtype=torch.bfloat16).to(interpreter) for height in heights]
    parts[0][0, 0] = 0
    scale = fp8.scale_of(torch.cat(parts).abs().amax(), form)
    with mock.patch.object(backend, "use_triton", lambda x: False):
        want = fp8.quantise(parts, form, scale, transposed=True)
    for rows_too, transposed in ((True, True), (True, False), (False, True)):
        got = fp8.quantise_triton(parts, form, scale, rows_too, transposed)
        for mine, theirs, there in ((got.rows, want.rows, rows_too), (got.columns, want.columns, transposed)):
            assert (mine is not None) == there
            assert not there or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_layer_with_kernel_is_the_layer_without(interpreter, monkeypatch):
    """Every call of quantise() and of the product as on a GPU, but for the product itself."""
    if interpreter == "cuda":
        pytest.skip("a GPU multiplies fp8 numbers itself, and rounds the products otherwise")
    calls = []

    def product(a, b, a_scale, b_scale, bias, out_dtype, use_fast_accum):
        assert a.is_contiguous() and b.t().is_contiguous() and a_scale.dtype == torch.float32
        calls.append((a.dtype, b.dtype, use_fast_accum))
        with mock.patch.object(backend, "use_triton", lambda x: False):
            return fp8.scaled_product((a, a_scale), (b.t(), b_scale), out_dtype, bias)
    arguments = case(torch.bfloat16)
    want = results(fp8.linear, *arguments)
    monkeypatch.setattr(backend, "use_triton", lambda x: x.dtype in backend.DTYPES)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    got = results(fp8.linear, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    forward, backward = fp8.FORWARD, fp8.BACKWARD
    assert calls == [(forward, forward, True), (backward, forward, False), (backward, forward, False)]


# -----------------------------------------------------------------------------
# Models

LLAMA = dict(test_layouts.LLAMA, n_layer=2, n_embd=32, ffn_hidden=64, micro_batch=2, fp8=True)
GPT2 = dict(test_layouts.GPT2, n_layer=2, n_embd=32, ffn_hidden=64, seq_len=16, micro_batch=2, fp8=True)
SHARED = dict(LLAMA, n_experts=4, top_k=2, n_shared_experts=1)


def test_attention_and_mlp_use_it_and_nothing_else_does():
    """Head, experts, adapters and BERT's dense layer are products in the model's dtype."""
    mesh = make_mesh(World(), groups=False)
    for flags, count in ((LLAMA, 4), (GPT2, 4), (SHARED, 4), (dict(SHARED, n_shared_experts=0), 2),
                         (dict(LLAMA, lora=4), 4), (dict(GPT2, objective="mlm"), 4)):
        cfg = Config(**flags)
        model = GPT(cfg, mesh, 100).double()
        tokens = torch.zeros(2, cfg.seq_len, dtype=torch.int64)
        used = mock.Mock(wraps=fp8.linear)
        for module in model.modules():
            if getattr(module, "linear", None) is fp8.linear:
                module.linear = used
        model(tokens, tokens)
        assert used.call_count == count * cfg.n_layer, flags


@pytest.mark.parametrize("base,n,tolerance,layout", [
    (LLAMA, 2, 1e-10, dict(pp=2)), (GPT2, 2, 1e-10, dict(zero=3)), (GPT2, 1, 1e-10, dict(recompute="full")),
    (SHARED, 2, 1e-10, dict(ep=2, zero=1)), (GPT2, 2, 1e-4, dict(tp=2, recompute="selective")),
    *(pytest.param(*place, marks=pytest.mark.long) for place in (
        (LLAMA, 2, 1e-10, dict()), (LLAMA, 2, 1e-10, dict(zero=1)), (LLAMA, 2, 1e-10, dict(zero=2)),
        (LLAMA, 2, 1e-10, dict(zero=3)), (LLAMA, 1, 1e-10, dict(recompute="selective")),
        (LLAMA, 2, 1e-4, dict(tp=2)), (GPT2, 2, 1e-4, dict(cp=2))))],
    ids=lambda x: str(x).replace(" ", "") if isinstance(x, dict) and len(x) < 3 else "")
def test_a_layout_equals_one_process(base, n, tolerance, layout):
    """Losses, norms and every gradient of three steps, fp64. Over tp and cp a rank has scales of its own, and
    the smallest numbers of a tensor may be rounded otherwise."""
    assert distance(base, n, layout) <= tolerance


def distance(base, n, layout):
    (one,) = run_ranks(1, test_layouts.run, base, 8)
    seen = run_ranks(n, test_layouts.run, dict(base, **layout), 8)
    gradients = [{name: t for name, t in equality.assemble(s).items() if "grad" in name}
                 for s in (seen, [one])]
    errors = equality.errors(*gradients, base)
    numbers = equality.stats_errors(seen[0], one)
    assert errors and numbers.keys() >= {"loss", "gradient norm"}
    return max(*errors.values(), numbers["loss"], numbers["gradient norm"])


def test_a_resumed_run_has_the_bits_of_one_without_a_stop(tmp_path):
    flags = ["--fp8", "--n-embd=32", "--n-kv-head=2", "--ffn-hidden=64", "--save-every=2", "--eval-every=2",
             "--eval-iters=1", "--decay-steps=4", "--zero=1", "--steps"]
    go(2, tmp_path / "whole", *flags, 4)
    go(2, tmp_path / "half", *flags, 2)
    go(2, tmp_path / "half", *flags, 4, "--resume=auto")
    same(tmp_path / "whole", tmp_path / "half", 4)
    assert rows(tmp_path / "whole") == rows(tmp_path / "half")


def test_a_model_is_sampled_without_it():
    reader = SimpleNamespace(fill=lambda *_: None)
    cfg = Config(**LLAMA)
    made = sample.load_model(cfg, 100, reader)
    assert cfg.fp8 and not made.cfg.fp8 and made.blocks["0"].mlp.w2.linear is layers.linear


# -----------------------------------------------------------------------------
# What is refused

@pytest.mark.parametrize("kind,hip,capability,dtype,words", [
    ("cuda", None, (8, 0), "bf16", "capability 8.9"), ("cuda", "6.4", (9, 4), "bf16", "NVIDIA"),
    ("xpu", None, None, "bf16", "NVIDIA"), ("cuda", None, (9, 0), "fp32", "--dtype bf16"),
    ("cuda", None, (8, 9), "bf16", ""), ("cuda", None, (12, 0), "bf16", ""), ("cpu", None, None, "fp64", "")])
def test_a_gpu_without_such_products_is_refused(kind, hip, capability, dtype, words, monkeypatch):
    with pytest.raises(ValueError, match="--fp8 does not go with --dtype fp16"):
        check(Config(fp8=True, dtype="fp16"))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device(kind)
    fp8.check_device(Config(dtype=dtype), device)
    if not words:
        fp8.check_device(Config(fp8=True, dtype=dtype), device)
        return
    with pytest.raises(ValueError, match=words):
        fp8.check_device(Config(fp8=True, dtype=dtype), device)


def test_the_plan_knows_it():
    """It takes less time. What it saves of memory is not counted."""
    plans = [plan.estimate(parse(["smol-1.7b", "--global-batch=4", *flag]), 1, "h200", 49152)
             for flag in ([], ["--fp8"])]
    without, with_fp8 = (p["ms"] for p in plans)
    assert 0.15 < 1 - with_fp8 / without < 0.25

"""Norms by the kernels of ops/norms.py in a model; test_kernels.py compares them with their torch twins."""
import dataclasses
import subprocess
import sys
import typing

import pytest
import torch
from pool import ROOT
from test_kernels import DEVICE, few_programs, kernels, randn
from test_model import random_model

import plan
from config import Config
from fast.choose import Choice
from layers import NORMS, NormKind
from ops import backend, norms

__all__ = ["few_programs", "kernels"]  # fixtures


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
    y = torch.nn.functional.rms_norm(x.double(), wide.shape, wide, 1e-3)
    want, = torch.autograd.grad(y, wide, grad.double())
    assert (found == want.to(found.dtype)).float().mean() > 0.95


def install_kernels(model, devices, monkeypatch):
    monkeypatch.setattr(backend, "TRITON_DEVICES", devices)
    model.cfg = dataclasses.replace(model.cfg, dtype="fp32")
    Choice(False, False, False, False).install(model)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_block_has_the_same_gradients(recompute, few_programs, monkeypatch):
    """By the kernel, whose input backward computes again."""
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


LEAST_SHARED_MEMORY = 99 * 1024  # bytes of a block, of GPUs of capability 8.6, 8.9 and 12.0


def compile_norms():
    """The kernel of each width and dtype that it serves fits into a multiprocessor's memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ops.kernels import norm_backward
    for width, itemsize in ((768, 2), (1024, 4), (4096, 4), (5120, 2), (8192, 2)):
        assert backend.next_power_of_2(width) * itemsize <= norms.ROW_BYTES
        _, options = norms.launch(width)
        warps = options.pop("num_warps")
        constants = {**options, "EPS": 1e-5, "CENTRED": True, "BIAS": True}
        numbers = [name for name in norm_backward.arg_names if name not in constants]
        kinds = dict.fromkeys(numbers, "*bf16" if itemsize == 2 else "*fp32")
        kinds |= {"sums_ptr": "*fp32", "rows": "i32", "width": "i32"} | dict.fromkeys(constants, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(numbers))}
        source = ASTSource(fn=norm_backward, signature=kinds, constexprs=constants, attrs=aligned)
        kernel = triton.compile(source, GPUTarget("cuda", 89, 32), {"num_warps": warps})
        assert kernel.metadata.shared <= LEAST_SHARED_MEMORY, (width, itemsize, kernel.metadata.shared)


@pytest.mark.long
def test_the_kernel_of_norms_fits_into_small_gpus(monkeypatch):
    """conftest.py lets this process interpret kernels, so another process compiles them."""
    pytest.importorskip("triton.backends.nvidia", reason="Triton has no wheel for this system")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = "import sys; sys.path[:0] = ['.', 'tests']; import test_norms; test_norms.compile_norms()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

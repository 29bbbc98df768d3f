"""Norms by the kernels of ops/norms.py in a model; test_kernels.py compares them with their torch twins."""
import subprocess
import sys
from unittest import mock

import pytest
import torch
from pool import ROOT
from test_kernels import DEVICE, assert_near, few_programs, kernels, randn
from test_model import random_model

from config import Config
from layers import Norm
from ops import backend, norms
from parallel import make_mesh
from runtime.launch import World

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


@pytest.mark.parametrize("flags", [{"norm": "rms"}, {"norm": "rms1p"}, {"norm": "layer", "bias": True}],
                         ids=str)
def test_a_norm_of_a_model_by_the_kernel_and_without(flags, few_programs, monkeypatch):
    norm = Norm(Config(n_embd=40, norm_eps=0.1, **flags), make_mesh(World())).to(DEVICE)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    x = randn(9, 40, dtype=torch.float32).requires_grad_()
    grads = [randn(9, 40, dtype=torch.float32), randn(9, 40, dtype=torch.float32)]

    def results():
        outputs = norm.input_and_norm(x)
        return [*outputs, *torch.autograd.grad(outputs, [x, *norm.parameters()], grads)]
    with mock.patch.object(norms.InputAndNorm, "backward", wraps=norms.InputAndNorm.backward) as called:
        got = results()
    assert called.call_count == 1
    monkeypatch.setattr(backend, "use_triton", lambda x: False)
    for mine, theirs in zip(got, results(), strict=True):
        assert_near(mine, theirs, 1e-5)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_block_has_the_same_gradients(recompute, few_programs):
    """By the kernel, whose input backward computes again."""
    tokens = torch.randint(64, (2, 17), device=DEVICE)
    found = []
    for how in ("none", recompute):
        torch.manual_seed(0)
        cfg = Config(n_layer=2, n_embd=16, n_head=2, ffn_hidden=24, mlp="gelu", seq_len=16, vocab_size=64,
                     recompute=how)
        model = random_model(cfg).float().to(DEVICE).train()
        loss, *_ = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for mine, without in zip(*reversed(found), strict=True):
        assert torch.equal(mine, without)


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

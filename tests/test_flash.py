"""Libraries of kernels: attention by flash-attn-4, which only GPUs run, and products by quack-kernels.

Here torch computes what the two functions of the library give, in fp64 and with the library's shapes. So
everything but the kernels themselves runs: the two operations, autograd, the compiler, a captured graph.
"""
import dataclasses
import importlib.metadata
import itertools
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from faults import planted
from runs import TINY, rows, session
from test_graph import graphed_session
from test_model import MESH, random_model

import attention
from config import Config
from fast import choose, flash
from fast.flash import FlashAttention
from model import GPT
from ops import activations, grouped_mm
from ops.backend import is_hopper, version_of
from runtime.launch import World

CUDA = torch.device("cuda", 0)


def probabilities(q, k, causal):
    """Softmax and logsumexp of the scores, (B, h, T, T) and (B, h, T) fp64: q and k (B, T, h, D)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.size(3) ** 0.5
    if causal:
        hidden = torch.ones(q.size(1), k.size(1), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def for_each_query_head(q, *others):
    return [t.repeat_interleave(q.size(2) // t.size(2), dim=2).double() for t in others]


def forward(q, k, v, causal, return_lse):
    """The library returns more than the two that are needed."""
    assert return_lse and all(t.stride(-1) == 1 for t in (q, k, v))
    k, v = for_each_query_head(q, k, v)
    p, log_sum_exp = probabilities(q, k, causal)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v).to(q.dtype).contiguous()
    return out, log_sum_exp.float(), None, None, None


def backward(q, k, v, out, grad, log_sum_exp, causal, dq, dk, dv):
    """Autograd does not run inside an operation, so the gradients are written out."""
    heads_of_keys = k.size(2)
    k, v = for_each_query_head(q, k, v)
    p, found = probabilities(q, k, causal)
    torch.testing.assert_close(found.float(), log_sum_exp)  # A compiler adds up in another order.
    grad = grad.double()
    of_p = torch.einsum("bqhd,bkhd->bhqk", grad, v)
    of_scores = p * (of_p - (grad * out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)) / q.size(3) ** 0.5
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", of_scores, k))
    of_k = torch.einsum("bhqk,bqhd->bkhd", of_scores, q.double())
    of_v = torch.einsum("bhqk,bqhd->bkhd", p, grad)
    for written, gradient in ((dk, of_k), (dv, of_v)):
        written.copy_(gradient.unflatten(2, (heads_of_keys, -1)).sum(3))


LIBRARY = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


def is_taken(original, cfg, device):
    return True


CHOSEN = ("fast.flash.is_taken", is_taken)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setattr(flash, "library", lambda: LIBRARY)


def heads(h, g, T=9, D=8):
    """Queries, keys and values as attention.py makes them: views of one product, turned."""
    torch.manual_seed(0)
    x = torch.randn(2, T, h + 2 * g, D, dtype=torch.float64, requires_grad=True)
    return x, [part.transpose(1, 2) for part in x.split([h, g, g], dim=2)]


def results(attend, h, g):
    x, qkv = heads(h, g)
    y = attend(*qkv)
    (grad,) = torch.autograd.grad(y, x, torch.randn(y.shape, dtype=y.dtype))
    return y.detach(), grad


@pytest.mark.parametrize("objective", ["causal", "mlm"])
@pytest.mark.parametrize("h, g", [(4, 4), (4, 2), (3, 1)])
def test_it_attends_as_torch_does(h, g, objective):
    cfg = Config(objective=objective)

    def attend(q, k, v, kernel=None):
        return attention.attend(q, k, v, cfg, flash=kernel)
    got = results(lambda *qkv: attend(*qkv, FlashAttention()), h, g)
    for mine, torchs in zip(got, results(attend, h, g), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


def test_where_a_mask_hides_keys_torch_attends():
    """Windows, documents, and queries that end where their keys end."""
    def kernel(*args):
        raise AssertionError("it knows no masks")
    _, (q, k, v) = heads(4, 4)
    attention.attend(q, k, v, Config(), 3, flash=kernel)
    attention.attend(q, k, v, Config(), places=torch.ones(2, 9, dtype=torch.int64), flash=kernel)
    attention.attend(q[:, :, -4:], k, v, Config(), flash=kernel)
    with pytest.raises(AssertionError, match="no masks"):
        attention.attend(q, k, v, Config(), flash=kernel)


def test_the_compiler_knows_the_shapes_of_both_operations():
    _, (q, k, v) = heads(4, 2)
    q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
    out, log_sum_exp = flash.attention(q, k, v, True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(flash.attention, (q, k, v, True), test_utils=checks)
    torch.library.opcheck(flash.attention_backward, (out, q, k, v, out, log_sum_exp, True),
                          test_utils=checks)


def with_flash(cfg, kernel):
    model = GPT(cfg, MESH, cfg.vocab_size).double()
    for block in model.blocks.values():
        block.attn.flash = kernel
    model.load_state_dict(random_model(cfg).state_dict())
    return model


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.long), "full"])
def test_a_compiled_model_is_the_model_without(recompute):
    """One graph per block, loss and gradients in fp64."""
    cfg = Config(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, ffn_hidden=48, seq_len=16, vocab_size=64,
                 recompute=recompute)
    tokens = torch.randint(64, (2, 17))
    x, y = tokens[:, :-1], tokens[:, 1:]
    found = []
    for kernel in (None, FlashAttention()):
        model = with_flash(cfg, kernel)
        if kernel is not None:
            for block in model.blocks.values():
                block.compile(fullgraph=True, backend="aot_eager")
        loss, *_ = model(x, y)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch._dynamo.reset()
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-10, atol=1e-11)


def test_a_run_with_it_is_the_run_without(tmp_path):
    """On a CPU as on a GPU, with an emulated graph. config.json says who attends."""
    flags = [*TINY, "--steps=5"]
    said = session(World(), [*flags, f"--out={tmp_path}/plain"])
    assert said["code"] == 0 and "flash-attn-4" not in said["out"], said
    with planted(*CHOSEN):
        said, seen = graphed_session(World(), [*flags, f"--out={tmp_path}/flash"])
    assert said["code"] == 0 and seen["captures"] == 1, said["err"]
    assert json.loads((tmp_path / "flash/config.json").read_text())["attention"] == flash.NAME
    for got, want in zip(rows(tmp_path / "flash"), rows(tmp_path / "plain"), strict=True):
        assert got == pytest.approx(want, rel=1e-5)


WIDE = Config(n_embd=256, n_head=4, n_kv_head=4, dtype="bf16", seq_len=128)


@pytest.mark.parametrize("change, is_taken", [
    ({}, True), (dict(dtype="fp16"), False), (dict(deterministic=True), False), (dict(dropout=0.1), False),
    (dict(recompute="selective"), True), (dict(head_dim=32), False), (dict(cp=2), False),
    (dict(doc_mask="on"), False), (dict(window=8), False), (dict(window=8, full_every=2), True),
    (dict(objective="mlm", head_dim=128), False), (dict(seq_len=192), False)], ids=str)
def test_when_it_is_taken(change, is_taken, monkeypatch):
    cfg = dataclasses.replace(WIDE, **change)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: flash.VERSION)
    with mock.patch.multiple(torch.cuda, get_device_capability=lambda device: (9, 0)):
        assert flash.is_taken(cfg, CUDA) == is_taken
        assert not flash.is_taken(cfg, torch.device("cpu"))
        assert not flash.is_taken(cfg, torch.device("cuda"))  # plan.py's
        monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.1")
        assert not flash.is_taken(cfg, CUDA)


def test_the_librarys_own_kernels(monkeypatch):
    """In bf16, output and gradients have no larger errors than torch's attention has."""
    if not torch.cuda.is_available() or not is_hopper(CUDA) or version_of("flash-attn-4") != flash.VERSION:
        pytest.skip(f"{flash.NAME} is not installed here, or there is no Hopper GPU")
    monkeypatch.undo()
    for shape in ((256, 4, 4, 64, True), (200, 4, 1, 128, True), (1024, 6, 2, 64, False),
                  (129, 2, 2, 128, False)):
        check_kernels(*shape)


def check_kernels(T, h, g, D, is_causal):
    x = torch.randn(1, T, h + 2 * g, D, device="cuda")
    grad = torch.randn(1, h, T, D, device="cuda")

    def computed(attend, dtype):
        leaf = x.to(dtype).requires_grad_()
        y = attend(*(part.transpose(1, 2) for part in leaf.split([h, g, g], dim=2)))
        return y.double(), torch.autograd.grad(y, leaf, grad.to(dtype))[0].double()

    def torchs(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    exact = computed(torchs, torch.float64)
    theirs = computed(torchs, torch.bfloat16)
    mine = computed(lambda *qkv: FlashAttention()(*qkv, is_causal), torch.bfloat16)
    for want, a, b in zip(exact, mine, theirs, strict=True):
        assert (a - want).norm() <= 1.2 * (b - want).norm()


def without_mask(original, flash, q, k, v, is_causal):
    return original(flash, q, k, v, False)


def twice(original, ctx, grad, *args):
    return original(ctx, 2 * grad, *args)


@pytest.mark.parametrize("fault", [
    ("fast.flash.FlashAttention.__call__", without_mask), ("fast.flash.backward", twice)],
    ids=["without a mask", "twice the gradient"])
def test_fault_is_detected(fault):
    with planted(*fault), pytest.raises(AssertionError):
        test_it_attends_as_torch_does(4, 2, "causal")


# -----------------------------------------------------------------------------
# Experts' products

def quacks_contract(a, b, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
    """What is asked of the library: each expert's rows of a times its matrix, or times its rows of b."""
    assert not tuned, "it would time every tile of each number of rows"
    bounds = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
    places = [slice(*pair) for pair in itertools.pairwise(bounds.tolist())]
    if cu_seqlens_m is None:
        return torch.stack([a[:, place] @ b[place] for place in places])
    y = a.new_full((a.size(0), b.size(2)), torch.nan)
    for place, w in zip(places, b, strict=True):
        y[place] = a[place] @ w
    return y


def test_products_by_quack_are_those_of_the_loop(monkeypatch):
    """The library itself on a Hopper GPU that has it. One expert has no rows, and 10 rows have no expert."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    C, width = 72, 136

    def randn(*shape):
        return torch.randn(*shape, device=device).bfloat16()
    library = mock.Mock(gemm=mock.Mock(side_effect=quacks_contract))
    here = torch.empty(0, device=device).device
    is_real = choose.quack_possible(Config(preset="tiny", dtype="bf16"), here)
    if is_real:
        from quack import gemm_interface as library
    monkeypatch.setattr(grouped_mm, "quack", library)
    monkeypatch.setattr(grouped_mm, "use_torch", lambda *_: True)
    ends = torch.tensor([40, 40, 103, 200, 246], device=device)
    x, grad = randn(256, C), randn(256, C)
    with torch.no_grad():
        x[246:] = grad[246:] = torch.nan
    weights = [randn(5, width, C), randn(5, width, C), randn(5, C, width)]

    def outputs(mm, x, *weights):
        w1, w3, w2 = weights
        y = mm(x, w1, w3, w2)
        dx, *others = torch.autograd.grad(y, (x, *weights), grad[:len(y)].to(y.dtype))
        return [y[:246], dx[:246], *others]
    got = outputs(lambda *leaves: grouped_mm.SwiGLUExperts.apply(*leaves, ends),
                  *[leaf.clone().requires_grad_() for leaf in (x, *weights)])

    def reference(x, w1, w3, w2):
        products = [grouped_mm.grouped_mm_loop(x, w, ends) for w in (w1, w3)]
        return grouped_mm.grouped_mm_loop(activations.swiglu(*products), w2, ends)
    want = outputs(reference, *[leaf.double().requires_grad_() for leaf in (x[:246], *weights)])
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()
    if not is_real:
        assert library.gemm.call_count == 9, "three products forward, six in backward"

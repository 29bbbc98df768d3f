"""The gradient of a small embedding as a matrix product (ops/embedding.py)."""
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ops.embedding import EmbeddingByProduct, embedding
from vocab import vocab_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gradient(function, tokens, weight, grad):
    """Return the rows and the gradient of the weight, on the GPU if there is one."""
    weight = weight.to(DEVICE, copy=True).requires_grad_()
    rows = function(tokens.to(DEVICE), weight)
    rows.backward(grad.to(DEVICE))
    return rows.detach(), weight.grad


@pytest.mark.parametrize("n, V, C", [(1, 3, 8), (300, 65, 24), (40, 128, 7)])
def test_the_gradient_is_that_of_torch(n, V, C):
    """With tokens that come often, once and never."""
    draw = torch.Generator().manual_seed(0)
    tokens = (torch.rand(n, generator=draw) ** 3 * V).long()
    weight, grad = (torch.randn(rows, C, generator=draw, dtype=torch.float64) for rows in (V, n))
    rows, found = gradient(EmbeddingByProduct.apply, tokens, weight, grad)
    want_rows, want = gradient(F.embedding, tokens, weight, grad)
    assert torch.equal(rows, want_rows)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_not_summed_in_bf16():
    """4,096 times the same token: such a sum would stay at 256. On a GPU cuBLAS may round parts of sums."""
    tokens = torch.zeros(4096, dtype=torch.int64)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16)
    _, found = gradient(EmbeddingByProduct.apply, tokens, weight, torch.ones(4096, 4, dtype=torch.bfloat16))
    assert found[0].tolist() == [4096.0] * 4 and not found[1].any()


@pytest.mark.parametrize("V, dtype, device, by_product", [
    (65, torch.bfloat16, "meta", True), (256, torch.float16, "meta", True),
    (257, torch.bfloat16, "meta", False), (65, torch.float32, "meta", False),
    (65, torch.bfloat16, "cpu", False)], ids=str)
def test_which_embeddings_have_a_product(V, dtype, device, by_product):
    """Those of a small vocabulary in 16 bits, on a GPU. A meta tensor stands for one."""
    weight = torch.zeros(V, 4, dtype=dtype, device=device, requires_grad=True)
    tokens = torch.zeros(5, dtype=torch.int64, device=device)
    for rows in (embedding(tokens, weight), vocab_embedding(tokens, weight, SimpleNamespace(size=1))):
        assert ("EmbeddingByProduct" in rows.grad_fn.name()) == by_product
        assert rows.shape == (5, 4) and rows.device.type == device

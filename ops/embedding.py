"""The embedding of tokens. On a GPU its gradient is a matrix product, if the vocabulary is small.

torch sorts the tokens, and then adds up the gradients of equal ones. For 16,384 characters that takes longer
than a product of the gradients with one-hot rows of the tokens.
"""
import torch
import torch.nn.functional as F

MOST_ROWS = 256  # of an embedding, or of a rank's part of it. Only 128 were measured.
DTYPES = torch.bfloat16, torch.float16  # For fp32 the product was not measured.


def embedding(tokens, weight):
    """Return the rows of the weight (V, C) of these tokens (n,) int64: (n, C)."""
    is_small = weight.size(0) <= MOST_ROWS and weight.dtype in DTYPES
    if is_small and weight.device.type != "cpu":
        return EmbeddingByProduct.apply(tokens, weight)
    return F.embedding(tokens, weight)


class EmbeddingByProduct(torch.autograd.Function):
    """tokens (n,) int64, weight (V, C) -> (n, C)."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.V = weight.size(0)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad):
        tokens, = ctx.saved_tensors
        one_hot = grad.new_zeros(tokens.size(0), ctx.V).scatter_(1, tokens.unsqueeze(1), 1.0)  # (n, V)
        return None, one_hot.T @ grad

"""The vocabulary split over tp: the embedding of tokens, and the cross-entropy of logits.

Rank r holds local_vocab = V/tp tokens, which begin at r*local_vocab: their rows of the embedding,
and their columns of the logits. The names are those of model.py's legend.

    vocab_embedding      looks up the rows of tokens, wherever they are
    vocab_cross_entropy  needs the logits of all ranks, but sends only three numbers per token
"""
import torch
import torch.nn.functional as F

from ops.cross_entropy import IGNORE
from parallel import MAX, scatter_rows


def vocab_embedding(tokens, weight, axis):
    """Return the rows of the embedding: tokens (B*t,) int64, weight (local_vocab, C) -> (n, C).

    Each rank of the axis looks up the ids that it holds, and has rows of zeros for the others. The
    sum over the ranks picks each row from the one rank that has it.
    """
    if axis.size == 1:
        return F.embedding(tokens, weight)
    local = tokens - axis.rank * weight.size(0)
    mine = (local >= 0) & (local < weight.size(0))  # (B*t,)
    x = F.embedding(local * mine, weight) * mine.unsqueeze(1)  # (B*t, C), 0 for other ranks' ids
    return scatter_rows(x, axis)  # SUM, n of B*t rows to each rank, over tp


class _VocabCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target]. Its backward pass needs no communication."""

    @staticmethod
    def forward(ctx, logits, target, axis):  # (B*t, local_vocab), (B*t,) -> ()
        low = axis.rank * logits.size(1)
        largest = logits.max(dim=1).values  # (B*t,)
        axis.all_reduce(largest, MAX)  # MAX of B*t numbers, over tp

        # The target's logit, or 0 if another rank has it. A product would fail: -inf * 0 is NaN.
        mine = (target >= low) & (target < low + logits.size(1))  # (B*t,)
        index = ((target - low) * mine).unsqueeze(1)  # (B*t, 1)
        picked = logits.gather(1, index).squeeze(1).masked_fill(~mine, 0)  # (B*t,)

        exponentials = (logits - largest.unsqueeze(1)).exp_()  # (B*t, local_vocab)
        sums = torch.stack([exponentials.sum(1), picked])  # (2, B*t)
        total, picked = axis.all_reduce(sums)  # SUM of 2*B*t numbers, over tp

        ignored = target == IGNORE
        softmax = exponentials.div_(total.unsqueeze(1)).masked_fill_(ignored.unsqueeze(1), 0)
        ctx.save_for_backward(softmax, index, mine)
        return (total.log() + largest - picked).masked_fill(ignored, 0).sum()

    @staticmethod
    def backward(ctx, grad):
        softmax, index, mine = ctx.saved_tensors
        minus_one_hot = -mine.to(softmax.dtype).unsqueeze(1)  # (B*t, 1), 0 for other ranks' targets
        return softmax.scatter_add(1, index, minus_one_hot) * grad, None, None


def vocab_cross_entropy(logits, target, vocab_size, axis):
    """Return the sum of the cross-entropy in nats, (), the same on every rank of the axis.

    logits (B*t, local_vocab) in the model's dtype; target (B*t,): rows with the target IGNORE take
    no part.
    """
    low = axis.rank * logits.size(1)
    high = low + logits.size(1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least fp32
    if high > vocab_size:  # padding columns are not tokens: they get no probability
        is_padding = torch.arange(low, high, device=logits.device) >= vocab_size
        logits = logits.masked_fill(is_padding, -torch.inf)
    if axis.size == 1:
        return F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)
    return _VocabCrossEntropy.apply(logits, target, axis)

"""The layers that attention, the MLP and the head are made of, in the letters of model.py's legend.

    Norm                                   LayerNorm or RMSNorm over the width
    ColumnLinear, RowLinear                matrices that are cut over tp
    vocab_embedding, vocab_cross_entropy   rows and logits of a vocabulary that is cut over tp
    Adapter                                --lora: two narrow matrices beside one
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops.cross_entropy import IGNORE
from parallel import MAX, parameter, scatter_rows


def rms_norm(x, gain, bias, eps):  # arXiv:1910.07467
    return F.rms_norm(x, gain.shape, gain, eps)


def layer_norm(x, gain, bias, eps):  # arXiv:1607.06450
    return F.layer_norm(x, gain.shape, gain, bias, eps)


class NormKind(NamedTuple):
    """What --norm NAME is."""
    formula: Callable  # (rows x (n, C), gain (C,), bias (C,) or None, eps) -> (n, C)
    takes_bias: bool = False    # with --bias
    has_offset: bool = False    # its parameter is `offset`, from 0, and the gain is 1 + offset
    kernel: str | None = None   # which norm of ops/norms.py computes its gradients on a GPU


# A new name also goes into the list at `norm` in config.py.
NORMS = {"rms": NormKind(rms_norm, kernel="rms"),
         "layer": NormKind(layer_norm, takes_bias=True, kernel="layer"),
         "rms1p": NormKind(rms_norm, has_offset=True, kernel="rms")}


class Gain(nn.Module):
    """What a norm multiplies by, alone in a norm of queries or keys."""

    def __init__(self, cfg, size, mesh, tp_dim=None):
        super().__init__()
        self.weight = self.offset = None
        if NORMS[cfg.norm].has_offset:
            self.offset = parameter((size,), mesh, tp_dim=tp_dim)
        else:
            self.weight = parameter((size,), mesh, tp_dim=tp_dim)

    def gain(self):
        return self.weight if self.offset is None else 1 + self.offset


class Norm(Gain):
    """The norm that --norm names, over the width. Statistics are in at least fp32."""

    def __init__(self, cfg, mesh):
        super().__init__(cfg, cfg.n_embd, mesh)
        kind = NORMS[cfg.norm]
        self.formula = kind.formula  # such as rms_norm
        self.eps = cfg.norm_eps
        self.bias = parameter((cfg.n_embd,), mesh) if kind.takes_bias and cfg.bias else None
        self.kernel = None  # what Choice.install() may give: a function of ops/norms.py

    def forward(self, x):  # (n, C) -> (n, C)
        return self.formula(x, self.gain(), self.bias, self.eps)

    def input_and_norm(self, x):  # (n, C) -> (n, C) twice
        """Return x and its norm. In backward, a kernel adds up the gradients of both."""
        if self.kernel is not None:
            return self.kernel(x, self.gain(), self.bias, self.eps)
        return x, self(x)


# Matrices that are cut over tp (Megatron-LM, arXiv:1909.08053, section 3)

def linear(x, weights, bias=None):
    """x W^T + bias, (B*t, n_out), where W is the weights (rows, n_in), one below the other."""
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x, weight, bias)


def linear_without_copy(x, weights, bias=None):
    """linear() for ZeRO-3: autograd would keep concatenated weights, and none could be freed."""
    biases = [None] * len(weights)
    if bias is not None:
        biases = bias.split([weight.size(0) for weight in weights])
    outputs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class ColumnLinear(nn.Module):
    """Computes y = x W^T, with the rows of W, the output features, split over tp.

    Rank r holds W_r of W = [W_0; W_1; ...] and computes x W_r^T, which is its own columns of y. The
    caller's gather_rows has brought all rows of x; its backward adds the ranks' gradients of x.
    With cut=False every rank holds all of W, and uses `rows` of it, a slice, or all with None.
    """

    def __init__(self, n_in, n_out, bias, mesh, cut=True, rows=None):
        super().__init__()
        tp_dim = 0 if cut else None
        self.weight = parameter((n_out, n_in), mesh, tp_dim=tp_dim)
        self.bias = parameter((n_out,), mesh, tp_dim=tp_dim) if bias else None
        self.rows = rows
        self.linear = linear  # or fp8.linear, or linear_without_copy: see Block

    def forward(self, x, *others):  # (B*t, n_in) -> (B*t, n_out/tp)
        """others: ColumnLinears of the same x, whose outputs stand beside this one's."""
        layers = [self, *others]
        weights = [select_rows(layer.weight, layer.rows) for layer in layers]
        bias = None
        if self.bias is not None:
            biases = [select_rows(layer.bias, layer.rows) for layer in layers]
            bias = torch.cat(biases) if others else self.bias
        return self.linear(x, weights, bias)


class RowLinear(nn.Module):
    """Computes y = x W^T, with the columns of W, the input features, split over tp.

    Rank r holds W_r of W = [W_0, W_1, ...] and its own columns x_r of x. Its product x_r W_r^T is a
    partial sum for every row of y. The bias is added once, after the sum, so it is replicated.
    """

    def __init__(self, n_in, n_out, bias, mesh):
        super().__init__()
        self.tp = mesh.tp
        self.weight = parameter((n_out, n_in), mesh, tp_dim=1)
        self.bias = parameter((n_out,), mesh) if bias else None
        self.linear = linear

    def forward(self, x):  # (B*t, n_in/tp) -> (n, n_out)
        partial_sum = self.linear(x, [self.weight])  # (B*t, n_out)
        y = scatter_rows(partial_sum, self.tp)  # SUM of B*t rows, n of them to each rank, over tp
        return y if self.bias is None else y + self.bias


def select_rows(p, rows):
    return p if rows is None else p[rows]  # backward of p[:] would fill a zero tensor of full size


# The vocabulary. Rank r of tp holds local_vocab = V/tp tokens, which begin at r * local_vocab:
# their rows of the embedding, and their columns of the logits.

def vocab_embedding(tokens, weight, axis):
    """tokens (B*t,) int64, weight (local_vocab, C) -> (n, C)

    Each rank has rows of zeros for the ids that it does not hold. The sum over the ranks picks each
    row from the one rank that has it.
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

    logits (B*t, local_vocab); target (B*t,): rows with the target IGNORE take no part.
    """
    low = axis.rank * logits.size(1)
    high = low + logits.size(1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if high > vocab_size:  # padding columns are not tokens: they get no probability
        is_padding = torch.arange(low, high, device=logits.device) >= vocab_size
        logits = logits.masked_fill(is_padding, -torch.inf)
    if axis.size == 1:
        return F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)
    return _VocabCrossEntropy.apply(logits, target, axis)


class Adapter(nn.Module):
    """LoRA (arXiv:2106.09685, section 4.1): W stays, and two narrow matrices beside it are trained.

        y = x W^T + (alpha / R) x A^T B^T    W (n_out, n_in), A (R, n_in) random, B (n_out, R) zero

    Over tp it is cut as its matrix is; | is a cut between two ranks:

                       W                    A                    B
        ColumnLinear   rows:    [W_0]       whole: [A]           rows:  [B_0]  y_r = x A^T B_r^T
                                [---]                                   [---]
                                [W_1]                                   [B_1]
        RowLinear      columns: [W_0|W_1]   columns: [A_0|A_1]   whole: [B]    y = SUM x_r A_r^T B^T

    It needs no collective of its own: a RowLinear adds its partial sums to those of W. What is
    whole gets only a part of its gradient on each tp rank, and the one rule sums it over the stage.
    """

    def __init__(self, layer, cfg, mesh):
        super().__init__()
        self.scale = cfg.lora_alpha / cfg.lora
        n_out, n_in = layer.weight.full_shape
        is_row = isinstance(layer, RowLinear)
        # Where tp exceeds the number of key/value heads, wk and wv are whole on every rank.
        is_cut = layer.weight.reduction_axis != "stage"
        self.A = parameter((cfg.lora, n_in), mesh, tp_dim=1 if is_cut and is_row else None)
        self.B = parameter((n_out, cfg.lora), mesh, tp_dim=0 if is_cut and not is_row else None)

    def forward(self, x, rows=None):  # (B*t, n_in) -> (B*t, n_out), both as the layer has them
        narrow = F.linear(x, self.A) * self.scale  # (B*t, R)
        return F.linear(narrow, select_rows(self.B, rows))


class AdaptedColumn(ColumnLinear):
    def forward(self, x, *others):
        layers = [self, *others]
        y = super().forward(x, *others)
        return y + torch.cat([layer.lora(x, layer.rows) for layer in layers], dim=-1)


class AdaptedRow(RowLinear):
    def forward(self, x):
        partial_sum = self.linear(x, [self.weight]) + self.lora(x)  # (B*t, n_out)
        y = scatter_rows(partial_sum, self.tp)  # SUM, as in RowLinear
        return y if self.bias is None else y + self.bias


def add_lora(model):
    """Freeze the model, and give every linear layer of its blocks an adapter."""
    for p in model.parameters():
        p.requires_grad_(False)
    adapted = {ColumnLinear: AdaptedColumn, RowLinear: AdaptedRow}
    for layer in list(model.blocks.modules()):
        if type(layer) in adapted:
            layer.lora = Adapter(layer, model.cfg, model.mesh)
            layer.__class__ = adapted[type(layer)]

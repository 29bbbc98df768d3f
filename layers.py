"""The layers that attention, the MLP and the head are made of, in the letters of model.py's legend.

    Norm                      LayerNorm or RMSNorm over the width
    ColumnLinear, RowLinear   matrices that are cut over tp
    vocab_embedding           rows of an embedding that is cut over tp
    vocab_cross_entropy       logits that are cut over tp; three numbers per token are sent
    Adapter                   --lora: two narrow matrices beside one that is not trained
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops import fp8, norms
from ops.cross_entropy import IGNORE
from parallel import MAX, parameter, scatter_rows

# -----------------------------------------------------------------------------
# Norms


class Gain(nn.Module):
    """The factor of a norm of queries or keys: its weight or, with --norm rms1p, 1 + its offset."""

    def __init__(self, cfg, size, mesh, tp_dim=None):
        super().__init__()
        self.weight = self.offset = None
        if cfg.norm == "rms1p":
            self.offset = parameter((size,), mesh, tp_dim=tp_dim)
        else:
            self.weight = parameter((size,), mesh, tp_dim=tp_dim)


def factor(norm):
    return norm.weight if norm.offset is None else 1 + norm.offset


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the width. The kernel computes statistics in at least fp32."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.weight = self.offset = None
        if cfg.norm == "rms1p":
            self.offset = parameter((cfg.n_embd,), mesh)
        else:
            self.weight = parameter((cfg.n_embd,), mesh)
        self.is_layer_norm = cfg.norm == "layer"
        self.eps = cfg.norm_eps
        has_bias = self.is_layer_norm and cfg.bias
        self.bias = parameter((cfg.n_embd,), mesh) if has_bias else None

    def forward(self, x):  # (n, C) -> (n, C)
        if self.is_layer_norm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        gain = factor(self)
        return F.rms_norm(x, gain.shape, gain, self.eps)

    def input_and_norm(self, x):  # (n, C) -> (n, C) twice
        """Return x, with which the caller goes on, and its norm.

        In backward, x has a gradient from each. On a GPU one kernel adds them up: ops/norms.py.
        """
        if norms.has_kernel(x):
            gain = factor(self)
            return norms.InputAndNorm.apply(x, gain, self.bias, self.eps, self.is_layer_norm)
        return x, self(x)


# -----------------------------------------------------------------------------
# Matrices that are cut over tp (Megatron-LM, arXiv:1909.08053, section 3)

class ColumnLinear(nn.Module):
    """Computes y = x W^T, with the rows of W, the output features, split over tp.

    Rank r holds W_r of W = [W_0; W_1; ...] and computes x W_r^T, which is its own columns of y.
    With cut=False every rank holds all of W. in_fp8: see product().
    """

    def __init__(self, n_in, n_out, bias, mesh, cut=True, *, in_fp8=False):
        super().__init__()
        self.in_fp8 = in_fp8
        tp_dim = 0 if cut else None
        self.weight = parameter((n_out, n_in), mesh, tp_dim=tp_dim)
        self.bias = parameter((n_out,), mesh, tp_dim=tp_dim) if bias else None
        self.lora = None  # with --lora, an Adapter

    def forward(self, x):  # (B*t, n_in) -> (B*t, n_out/tp)
        y = product(x, [self.weight], self.bias, self.in_fp8)
        return y if self.lora is None else y + self.lora(x)


class RowLinear(nn.Module):
    """Computes y = x W^T, with the columns of W, the input features, split over tp.

    Rank r holds W_r of W = [W_0, W_1, ...] and its own columns x_r of x. Its product x_r W_r^T is a
    partial sum for every row of y. scatter_rows adds the partial sums and leaves n rows of y on
    each rank. The bias is added once, after the sum, so it is replicated.
    """

    def __init__(self, n_in, n_out, bias, mesh, *, in_fp8=False):
        super().__init__()
        self.in_fp8 = in_fp8
        self.tp = mesh.tp
        self.weight = parameter((n_out, n_in), mesh, tp_dim=1)
        self.bias = parameter((n_out,), mesh) if bias else None
        self.lora = None  # with --lora, an Adapter

    def forward(self, x):  # (B*t, n_in/tp) -> (n, n_out)
        partial_sum = product(x, [self.weight], None, self.in_fp8)  # (B*t, n_out)
        if self.lora is not None:
            partial_sum = partial_sum + self.lora(x)
        return self.add_up(partial_sum)

    def add_up(self, partial_sum):  # (B*t, n_out) -> (n, n_out)
        y = scatter_rows(partial_sum, self.tp)  # SUM of B*t rows, n of them to each rank, over tp
        return y if self.bias is None else y + self.bias


def product(x, weights, bias, in_fp8):
    """Return x W^T + bias, where W is the matrices of a list, one below the other.

    x (B*t, n_in) -> (B*t, n_out). weights: (rows, n_in) each, n_out rows in all. bias (n_out,), or
    None. in_fp8: whether x, W and the gradients are rounded to numbers of 8 bits, with --fp8.
    """
    if in_fp8:
        return fp8.linear(x, weights, bias)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x, weight, bias)


def fused_linear(x, layers, zero):
    """Return the outputs of several ColumnLinears of the same input, side by side.

    x (B*t, n_in) -> (B*t, all rows that are used). layers: pairs of a layer and the rows of its
    weight to use, a slice, or None for all of them.
    """
    y = fused_product(x, layers, zero)
    if layers[0][0].lora is None:
        return y
    return y + torch.cat([layer.lora(x, rows) for layer, rows in layers], dim=-1)


def fused_product(x, layers, zero):
    """Return the products with the weights of several ColumnLinears, plus their biases.

    Arguments and shapes are those of fused_linear(). One product with the concatenated weights
    reads x once. Autograd would keep the concatenated copy alive until backward, so ZeRO-3 could
    free nothing. It concatenates the outputs instead. With --fp8 no copy is kept.
    """
    weights = [select_rows(layer.weight, rows) for layer, rows in layers]
    biases = [select_rows(layer.bias, rows) for layer, rows in layers]
    in_fp8 = layers[0][0].in_fp8
    if zero == 3 and not in_fp8:
        pairs = zip(weights, biases, strict=True)
        return torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], dim=-1)
    bias = None if biases[0] is None else torch.cat(biases)
    return product(x, weights, bias, in_fp8)


def select_rows(p, rows):
    if p is None or rows is None:
        return p  # backward of p[:] would fill and copy a zero tensor of full size
    return p[rows]


# -----------------------------------------------------------------------------
# The vocabulary. Rank r of tp holds local_vocab = V/tp tokens, which begin at r * local_vocab:
# their rows of the embedding, and their columns of the logits.

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


# -----------------------------------------------------------------------------
# --lora

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
        # Where tp exceeds the number of key/value heads, wk and wv are whole on every rank.
        is_cut = layer.weight.reduction_axis != "stage"
        cuts_rows = is_cut and isinstance(layer, ColumnLinear)
        cuts_columns = is_cut and isinstance(layer, RowLinear)
        self.A = parameter((cfg.lora, n_in), mesh, tp_dim=1 if cuts_columns else None)
        self.B = parameter((n_out, cfg.lora), mesh, tp_dim=0 if cuts_rows else None)

    def forward(self, x, rows=None):  # (B*t, n_in) -> (B*t, n_out), both as the layer has them
        narrow = F.linear(x, self.A) * self.scale  # (B*t, R)
        return F.linear(narrow, select_rows(self.B, rows))


def add_adapters(model):
    """Freeze the model, and give every linear layer of its blocks an adapter."""
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in list(model.blocks.modules()):
        if isinstance(layer, (ColumnLinear, RowLinear)):
            layer.lora = Adapter(layer, model.cfg, model.mesh)


def initial_std(role, full_shape):
    """The standard deviation of a new A (that of peft, uniform up to 1/sqrt(n_in)) or B."""
    if role == "B":
        return 0.0
    n_in = full_shape[1]
    return 1 / math.sqrt(3 * n_in)

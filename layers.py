"""The layers that attention, the MLP and the head are made of: norms, and matrices cut over tp.

The shapes are in the letters of model.py's legend.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from ops import fp8, norms
from parallel import parameter, scatter_rows


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
    """Return what a Gain or Norm multiplies by."""
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


class ColumnLinear(nn.Module):
    """Computes y = x W^T, with the rows of W, the output features, split over tp.

    Rank r holds W_r of W = [W_0; W_1; ...] and computes x W_r^T, which is its own columns of y.
    With cut=False every rank holds all of W. in_fp8: see product().
    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """

    def __init__(self, n_in, n_out, bias, mesh, cut=True, *, in_fp8=False):
        super().__init__()
        self.in_fp8 = in_fp8
        tp_dim = 0 if cut else None
        self.weight = parameter((n_out, n_in), mesh, tp_dim=tp_dim)
        self.bias = parameter((n_out,), mesh, tp_dim=tp_dim) if bias else None
        self.lora = None  # with --lora, a lora.Adapter

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
        self.lora = None  # with --lora, a lora.Adapter

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
    """Return these rows of a parameter, or all of it if rows is None."""
    if p is None or rows is None:
        return p  # backward of p[:] would fill and copy a zero tensor of full size
    return p[rows]

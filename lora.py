"""LoRA: the matrices of a model stay as they are, and two narrow ones beside each are trained.

    y = x W^T + (alpha / R) x A^T B^T      W (n_out, n_in) frozen, A (R, n_in), B (n_out, R)

A starts random and B at zero, so a model with new adapters computes what it did without them. R is
--lora, alpha --lora-alpha. Source: arXiv:2106.09685, section 4.1.

Over tp, an adapter is cut as its matrix is. The drawing has two ranks; | is a cut:

                   W                    A                    B
    ColumnLinear   rows:    [W_0]       whole: [A]           rows:  [B_0]      y_r = x A^T B_r^T
                            [---]                                   [---]
                            [W_1]                                   [B_1]
    RowLinear      columns: [W_0|W_1]   columns: [A_0|A_1]   whole: [B]        y = SUM x_r A_r^T B^T

The adapter needs no collective of its own. A RowLinear adds the adapter's partial sums to those of
W before it scatters them. What is whole, A of a ColumnLinear and B of a RowLinear, gets only a part
of its gradient on each tp rank: from the rank's rows of B, or from its columns of x. It is not cut,
so the one rule (parallel.reduction_axis) sums its gradient over the whole stage.

    Adapter        A and B of one layer; layers.py adds what it computes
    add_adapters   gives every linear layer of the blocks an adapter and freezes all other weights
    initial_std    how A and B start
"""
import math

import torch.nn as nn
import torch.nn.functional as F

from layers import ColumnLinear, RowLinear, select_rows
from parallel import parameter


class Adapter(nn.Module):
    """Computes (alpha / R) x A^T B^T for one layer of which this rank has a share."""

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
    """Freeze the model, and give every linear layer of its blocks an adapter that is trained."""
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in list(model.blocks.modules()):
        if isinstance(layer, (ColumnLinear, RowLinear)):
            layer.lora = Adapter(layer, model.cfg, model.mesh)


def initial_std(role, full_shape):
    """Return the standard deviation from which A or B of this shape is drawn.

    That of A is the one of peft, whose numbers are uniform up to 1/sqrt(n_in).
    """
    if role == "B":
        return 0.0
    n_in = full_shape[1]
    return 1 / math.sqrt(3 * n_in)

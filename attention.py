"""Self-attention, in the letters of model.py's legend.

    rope_cache    the angles of the rotary positions; rotate() turns queries and keys by them
    attend        which keys a query sees, in training, under cp and in generation
    Attention     the heads of one layer, split over tp
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import head_width
from layers import ColumnLinear, Gain, RowLinear, select_rows
from parallel import gather_rows, gather_segments, sum_over_ranks


def rope_cache(T, D, base, device, dtype, scaling=()):
    """Return cos and sin of position * frequency, (T, D/2) each: arXiv:2104.09864, 3.4.2."""
    frequency = base ** (-torch.arange(0, D, 2, device=device, dtype=dtype) / D)  # (D/2,)
    if scaling:
        frequency = scaled_frequency(frequency, *scaling)
    position = torch.arange(T, device=device, dtype=dtype)  # (T,)
    angle = torch.outer(position, frequency)  # (T, D/2)
    return angle.cos(), angle.sin()


def scaled_frequency(frequency, slowdown, low, high, trained_length):
    """Return Llama 3's frequencies, (D/2,), for sequences longer than those of the first training.

    A pair that turns `high` times or more within trained_length tokens keeps its frequency. One
    that turns `low` times or less turns `slowdown` times more slowly. Between the two, the share of
    the old frequency rises linearly. Source: arXiv:2407.21783, section 3.4.2, and Meta's code.
    """
    turns = frequency * trained_length / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (share + (1 - share) / slowdown)


def rotate(x, cos, sin):
    """Turn each pair (x_i, x_{i+D/2}) by its position's angle: (B, t, heads, D) -> same."""
    first, second = x.chunk(2, dim=-1)  # (B, t, heads, D/2) each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (t, 1, D/2) each
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.type_as(x)


def attend(q, k, v, cfg, window=0, places=None, *, flex=None, flash=None, dropout=0.0):
    """Attention of queries (B, h, queries, D) to the keys (B, g, keys, D) that they see.

    The last query has the position of the last key. window: the keys that a query sees at most, the
    last of which is its own position; 0 is all. places (B, queries): each query's place in its
    document, from 1; None where nothing separates documents. flex, a fast.flex.FlexAttention,
    attends in the place of a mask, and flash, a fast.flash.FlashAttention, where there is none.
    """
    n_queries = q.size(2)
    if window:  # the first query sees the keys before it that fit into its window, and none earlier
        reach = n_queries + window - 1
        k, v = k[:, :, -reach:], v[:, :, -reach:]
    n_keys = k.size(2)
    mask = None  # (queries, keys) or (B, 1, queries, keys): True where a query sees a key
    is_causal = False  # torch's own causal mask, for as many queries as keys
    if cfg.objective == "mlm":
        pass  # A query sees all keys.
    elif places is not None or 0 < window < n_keys:
        if flex is not None:
            return flex(q, k, v, window, places)
        windows = window or n_keys
        if places is not None:  # as far back as the document goes
            windows = places.clamp(1, windows)[:, None, :, None]  # (B, 1, queries, 1)
        keys = torch.arange(n_keys, device=q.device)
        queries = keys[n_keys - n_queries:].unsqueeze(1)
        mask = (keys <= queries) & (keys > queries - windows)
    elif n_queries == n_keys:
        is_causal = True
    elif n_queries > 1:  # the last query sees all keys so far
        # Imported here, because this import takes as long as all the others together.
        from torch.nn.attention.bias import causal_lower_right
        mask = causal_lower_right(n_queries, n_keys)  # no tensor is made for it on a GPU
    if flash is not None and mask is None:
        return flash(q, k, v, is_causal)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=is_causal,
                                          enable_gqa=q.size(1) != k.size(1))


def attend_segments(q, k, v, cfg, axis, *, places=None, **options):
    """Attention of this rank's two segments (Axis.own_segments) of each sequence to all keys.

    q (B, h, t, D), k and v (B, g, t, D) -> (B, h, t, D). In causal attention the queries of a
    segment get the keys up to the segment's own end. places (B, t), options: those of attend.
    """
    kv = torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=2)  # (t, B, 2g, D)
    kv = gather_segments(kv, axis)  # (T, B, 2g, D): t positions from each rank to all, over cp
    k, v = kv.permute(1, 2, 0, 3).chunk(2, dim=1)  # (B, g, T, D) each
    if cfg.objective == "mlm":
        return attend(q, k, v, cfg, **options)

    # This rank has segment number rank from the start, and segment number rank from the end.
    size = q.size(2) // 2
    ends = [(axis.rank + 1) * size, k.size(2) - axis.rank * size]
    segments = q.chunk(2, dim=2)  # (B, h, t/2, D) each
    places = [None, None] if places is None else places.chunk(2, dim=1)  # (B, t/2) each
    outputs = []
    for queries, end, its_places in zip(segments, ends, places, strict=True):
        y = attend(queries, k[:, :, :end], v[:, :, :end], cfg, places=its_places, **options)
        outputs.append(y)
    return torch.cat(outputs, dim=2)  # (B, h, t, D)


class Attention(nn.Module):
    """Self-attention, causal except in a masked language model. Its heads are split over tp.

    Where tp exceeds the number of key/value heads, wk and wv are replicated, and each rank uses the
    one key/value head that its query heads share. layer: the block's number, counted from 0.
    """

    def __init__(self, cfg, mesh, layer=0):
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.flex = self.flash = None  # what Choice.install() may give: see attend()
        number = layer + 1
        is_full = cfg.full_every > 0 and number % cfg.full_every == 0
        is_unrotated = cfg.no_rope_every > 0 and number % cfg.no_rope_every == 0
        self.rotates = cfg.pos == "rope" and not is_unrotated
        self.window = 0 if is_full else cfg.window

        C = cfg.n_embd
        G = cfg.n_kv_head
        tp = mesh.tp
        self.D = head_width(cfg)
        self.h = cfg.n_head // tp.size
        cuts_kv = G % tp.size == 0
        self.g = G // tp.size if cuts_kv else 1
        head = tp.rank * G // tp.size  # the head that this rank uses of replicated wk and wv
        rows = None if cuts_kv else slice(head * self.D, (head + 1) * self.D)

        has_bias = cfg.bias or cfg.qkv_bias
        self.wq = ColumnLinear(C, cfg.n_head * self.D, has_bias, mesh)
        self.wk = ColumnLinear(C, G * self.D, has_bias, mesh, cuts_kv, rows)
        self.wv = ColumnLinear(C, G * self.D, has_bias, mesh, cuts_kv, rows)
        self.wo = RowLinear(cfg.n_head * self.D, C, cfg.bias, mesh)
        self.q_norm = self.k_norm = None
        if cfg.qk_norm == "head":  # one weight of D numbers for all heads
            self.q_norm, self.k_norm = Gain(cfg, self.D, mesh), Gain(cfg, self.D, mesh)
        elif cfg.qk_norm == "all":  # a weight for each column of wq and wk, cut as they are
            self.q_norm = Gain(cfg, cfg.n_head * self.D, mesh, tp_dim=0)
            self.k_norm = Gain(cfg, G * self.D, mesh, tp_dim=0 if cuts_kv else None)

    def forward(self, x, t, cos, sin, cache=None, places=None):  # (n, C) -> (n, C)
        x = gather_rows(x, self.mesh.tp)  # (B*t, C): n rows from each rank to all, over tp
        x = self.wq(x, self.wk, self.wv)  # (B*t, (h + 2g)*D): one product for all three
        x = x.view(-1, t, self.h + 2 * self.g, self.D)
        if self.rotates and self.q_norm is None:  # queries and keys turn together
            qk, v = x.split([self.h + self.g, self.g], dim=2)
            q, k = rotate(qk, cos, sin).split([self.h, self.g], dim=2)
        else:
            q, k, v = x.split([self.h, self.g, self.g], dim=2)  # (B, t, h, D), twice (B, t, g, D)
        if self.q_norm is not None:
            q, k = self.normed(q, k)
            if self.rotates:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = q.transpose(1, 2)  # (B, h, t, D): a view, as k and v are
        k = k.transpose(1, 2)  # (B, g, t, D)
        v = v.transpose(1, 2)

        options = {"window": self.window, "places": places,
                   "dropout": self.cfg.dropout if self.training else 0.0}
        if cache is not None:  # each cp rank has whole sequences
            k, v = cache.append(self, k, v)  # (B, g, positions so far, D) each
            y = attend(q, k, v, self.cfg, **options)  # (B, h, t, D)
        elif self.mesh.cp.size > 1:
            y = attend_segments(q, k, v, self.cfg, self.mesh.cp, flex=self.flex, flash=self.flash,
                                **options)
        else:
            y = attend(q, k, v, self.cfg, flex=self.flex, flash=self.flash, **options)
        return self.wo(y.transpose(1, 2).reshape(-1, self.h * self.D))  # (B*t, h*D) -> (n, C)

    def normed(self, q, k):
        """Return RMSNorm of queries (B, t, h, D) and keys (B, t, g, D), before they are turned."""
        eps = self.cfg.norm_eps
        if self.cfg.qk_norm == "head":
            q = F.rms_norm(q, (self.D,), self.q_norm.gain(), eps)
            return q, F.rms_norm(k, (self.D,), self.k_norm.gain(), eps)

        # Over all heads of a token together, some of which are on each rank. Where several ranks
        # have a copy of the same key head, all have as many copies, so the mean does not change.
        tp = self.mesh.tp
        wide = torch.promote_types(q.dtype, torch.float32)
        wide_q, wide_k = q.to(wide), k.to(wide)
        means = torch.stack([wide_q.square().mean((2, 3)), wide_k.square().mean((2, 3))])
        means = sum_over_ranks(means, tp) / tp.size  # (2, B, t): SUM of 2*B*t numbers, over tp
        q_scale, k_scale = torch.rsqrt(means + eps)[..., None, None].unbind()  # (B, t, 1, 1) each
        q_gain = self.q_norm.gain().view(self.h, self.D)
        k_gain = select_rows(self.k_norm.gain(), self.wk.rows).view(self.g, self.D)
        return (wide_q * q_scale * q_gain).type_as(q), (wide_k * k_scale * k_gain).type_as(k)

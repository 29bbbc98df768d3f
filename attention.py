"""Self-attention: which keys a query sees, rotary positions, norms of queries and keys.

    Attention       the heads of one layer, split over tp
    visible_keys    which keys a query sees, in training, under cp and in generation
    rope_cache      the angles of the rotary positions; rotate() turns queries and keys by them

The shapes are in the letters of model.py's legend.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import head_width
from layers import ColumnLinear, Gain, RowLinear, factor, fused_linear, select_rows
from parallel import gather_rows, gather_segments, sum_over_ranks

# -----------------------------------------------------------------------------
# Rotary positions

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
    cos = cos.unsqueeze(1)  # (t, 1, D/2)
    sin = sin.unsqueeze(1)  # (t, 1, D/2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.type_as(x)


def is_nth(layer, period):
    """Whether a layer, counted from 0, is the last of `period` layers. With period 0 none is."""
    return period > 0 and (layer + 1) % period == 0


# -----------------------------------------------------------------------------
# Norms of queries and keys

def norm_of_all_heads(q, k, q_gain, k_gain, eps, axis):
    """Return RMSNorm of q over all heads of a token together, and of k: (B, t, heads, D) -> same.

    q_gain (h, D), k_gain (g, D). A rank has some of the heads. Where several ranks have a copy of
    the same key head, all key heads have the same number of copies, so the mean does not change.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_q = q.to(wide)
    wide_k = k.to(wide)
    # Each rank takes the mean over its own columns: (B, t) for queries and for keys.
    means = torch.stack([wide_q.square().mean((2, 3)), wide_k.square().mean((2, 3))])
    means = sum_over_ranks(means, axis) / axis.size  # SUM of 2*B*t numbers, over tp
    q_scale, k_scale = torch.rsqrt(means + eps)[..., None, None].unbind()  # (B, t, 1, 1) each
    return (wide_q * q_scale * q_gain).type_as(q), (wide_k * k_scale * k_gain).type_as(k)


# -----------------------------------------------------------------------------
# Which keys a query sees

def visible_keys(cfg, q, k, window=0, places=None):
    """Return (mask, is_causal) for torch's attention: which keys each query sees.

    Training, generation and context parallelism all ask here.

    q (B, h, queries, D), k (B, g, keys, D): the keys stand side by side in the sequence, and the
    last query has the position of the last key. mask (queries, keys) is True where a query sees a
    key. If mask is None, is_causal chooses between the flash kernel's own causal mask and no mask
    at all. window: the keys that a query of this layer sees at most, the last of which is its own
    position; 0 is all. places (B, queries): each query's place in its document, from 1; None where
    nothing separates documents. A place is also a window: as far back as the document goes. The
    mask is then (B, 1, queries, keys). To add a rule, put it before the lines of --objective mlm,
    which return. Or put it after them, and let config.py refuse the rule's flag together with mlm.
    """
    if cfg.objective == "mlm":
        return None, False
    n_queries = q.size(2)
    n_keys = k.size(2)
    if places is not None:
        windows = places.clamp(max=window or n_keys)[:, None, :, None]  # (B, 1, queries, 1)
        return window_mask(n_queries, n_keys, windows, q.device), False
    if 0 < window < n_keys:
        return window_mask(n_queries, n_keys, window, q.device), False
    if n_queries == n_keys:
        return None, True
    if n_queries == 1:
        return None, False
    return lower_right_mask(n_queries, n_keys), False


def lower_right_mask(n_queries, n_keys):
    """Return the causal mask of a sequence's last tokens, the last of which sees all keys so far.
    No tensor is made for it on a GPU."""
    # Imported here, because this import takes as long as all the others together.
    from torch.nn.attention.bias import causal_lower_right
    return causal_lower_right(n_queries, n_keys)


def window_mask(n_queries, n_keys, window, device):
    """Return the causal mask (queries, keys) in which a query sees `window` keys at most.

    window: an int, or a tensor (B, 1, queries, 1) with a window for each query.
    """
    keys = torch.arange(n_keys, device=device)
    queries = keys[n_keys - n_queries:].unsqueeze(1)
    return (keys <= queries) & (keys > queries - window)


def attend(q, k, v, cfg, window=0, places=None, *, flex=None, flash=None, **options):
    """Attention of queries (B, h, queries, D) to the keys (B, g, keys, D) that they see.

    Two faster functions give the same result: flex, a fast.flex.FlexAttention, in the place of a
    mask, and flash, a fast.flash.FlashAttention, where there is none. Either can be None.
    """
    if window:  # the first query sees the keys before it that fit into its window, and none earlier
        reach = q.size(2) + window - 1
        k = k[:, :, -reach:]
        v = v[:, :, -reach:]
    hides_early_keys = places is not None or 0 < window < k.size(2)
    if flex is not None and hides_early_keys:
        return flex(q, k, v, window, places, options["enable_gqa"])
    mask, is_causal = visible_keys(cfg, q, k, window, places)
    if flash is not None and mask is None:
        return flash(q, k, v, is_causal)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **options)


def attend_segments(q, k, v, cfg, axis, *, window=0, places=None, **options):
    """Attention of this rank's two segments (Axis.own_segments) of each sequence to all keys.

    q (B, h, t, D), k and v (B, g, t, D) -> (B, h, t, D). In causal attention the queries of a
    segment get the keys up to the segment's own end. places (B, t): see visible_keys.
    """
    options["window"] = window
    kv = torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=2)  # (t, B, 2g, D)
    kv = gather_segments(kv, axis)  # (T, B, 2g, D): t positions from each rank to all, over cp
    k, v = kv.permute(1, 2, 0, 3).chunk(2, dim=1)  # (B, g, T, D) each
    if cfg.objective == "mlm":
        return attend(q, k, v, cfg, **options)

    # This rank has segment number rank from the start, and segment number rank from the end.
    early_queries, late_queries = q.chunk(2, dim=2)  # (B, h, t/2, D) each
    segment_size = q.size(2) // 2
    early_end = (axis.rank + 1) * segment_size
    late_end = k.size(2) - axis.rank * segment_size
    early_places = late_places = None
    if places is not None:
        early_places, late_places = places.chunk(2, dim=1)  # (B, t/2) each
    early = attend(early_queries, k[:, :, :early_end], v[:, :, :early_end], cfg,
                   places=early_places, **options)
    late = attend(late_queries, k[:, :, :late_end], v[:, :, :late_end], cfg,
                  places=late_places, **options)
    return torch.cat([early, late], dim=2)  # (B, h, t, D)


# -----------------------------------------------------------------------------
# A layer

class Attention(nn.Module):
    """Self-attention, causal except in a masked language model. Its heads are split over tp.

    Where tp exceeds the number of key/value heads, wk and wv are replicated, and each rank uses the
    one key/value head that its query heads share. layer: the block's number, counted from 0.
    fast.choose.Choice.install() may set flex and flash: see attend().
    """

    def __init__(self, cfg, mesh, layer=0):
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.flex = None
        self.flash = None
        self.rotates = cfg.pos == "rope" and not is_nth(layer, cfg.no_rope_every)
        self.window = 0 if is_nth(layer, cfg.full_every) else cfg.window

        C = cfg.n_embd
        G = cfg.n_kv_head
        tp = mesh.tp
        self.D = head_width(cfg)
        self.h = cfg.n_head // tp.size
        cuts_kv = G % tp.size == 0
        self.g = G // tp.size if cuts_kv else 1
        head = tp.rank * G // tp.size  # the head that this rank uses of replicated wk and wv
        self.kv_rows = None if cuts_kv else slice(head * self.D, (head + 1) * self.D)

        has_bias = cfg.bias or cfg.qkv_bias
        in_fp8 = cfg.fp8
        self.wq = ColumnLinear(C, cfg.n_head * self.D, has_bias, mesh, in_fp8=in_fp8)
        self.wk = ColumnLinear(C, G * self.D, has_bias, mesh, cut=cuts_kv, in_fp8=in_fp8)
        self.wv = ColumnLinear(C, G * self.D, has_bias, mesh, cut=cuts_kv, in_fp8=in_fp8)
        self.wo = RowLinear(cfg.n_head * self.D, C, cfg.bias, mesh, in_fp8=in_fp8)
        self.q_norm = self.k_norm = None
        if cfg.qk_norm == "head":  # one weight of D numbers for all heads
            self.q_norm = Gain(cfg, self.D, mesh)
            self.k_norm = Gain(cfg, self.D, mesh)
        elif cfg.qk_norm == "all":  # a weight for each column of wq and wk, cut as they are
            self.q_norm = Gain(cfg, cfg.n_head * self.D, mesh, tp_dim=0)
            self.k_norm = Gain(cfg, G * self.D, mesh, tp_dim=0 if cuts_kv else None)

    def forward(self, x, t, cos, sin, cache=None, places=None):  # (n, C) -> (n, C)
        # Every rank sees all tokens, for its own heads: n rows from each rank to all, over tp.
        x = gather_rows(x, self.mesh.tp)  # (B*t, C)
        q, k, v = self.project(x, t, cos, sin)  # (B, h, t, D), twice (B, g, t, D)
        if cache is not None:
            k, v = cache.append(self, k, v)  # (B, g, positions so far, D) each
        y = self.attend_own_heads(q, k, v, cache, places)  # (B, h, t, D)
        return self.wo(y.transpose(1, 2).reshape(-1, self.h * self.D))  # (B*t, h*D) -> (n, C)

    def project(self, x, t, cos, sin):  # (B*t, C) -> (B, h, t, D), twice (B, g, t, D)
        layers = [(self.wq, None), (self.wk, self.kv_rows), (self.wv, self.kv_rows)]
        x = fused_linear(x, layers, self.cfg.zero)  # (B*t, (h + 2g)*D)
        x = x.view(-1, t, self.h + 2 * self.g, self.D)
        if self.rotates and self.q_norm is None:  # queries and keys turn together
            qk, v = x.split([self.h + self.g, self.g], dim=2)
            q, k = rotate(qk, cos, sin).split([self.h, self.g], dim=2)
        else:
            q, k, v = x.split([self.h, self.g, self.g], dim=2)  # (B, t, h, D), twice (B, t, g, D)
        if self.q_norm is not None:
            q, k = self.normed(q, k)
            if self.rotates:
                q = rotate(q, cos, sin)
                k = rotate(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # views: nothing is copied

    def normed(self, q, k):
        """Return RMSNorm of queries (B, t, h, D) and keys (B, t, g, D), before they are turned."""
        eps = self.cfg.norm_eps
        if self.cfg.qk_norm == "head":
            q = F.rms_norm(q, (self.D,), factor(self.q_norm), eps)
            return q, F.rms_norm(k, (self.D,), factor(self.k_norm), eps)
        q_gain = factor(self.q_norm).view(self.h, self.D)
        k_gain = select_rows(factor(self.k_norm), self.kv_rows).view(self.g, self.D)
        return norm_of_all_heads(q, k, q_gain, k_gain, eps, self.mesh.tp)

    def attend_own_heads(self, q, k, v, cache, places):
        """Attention of this rank's heads: (B, h, t, D), twice (B, g, keys, D) -> (B, h, t, D)."""
        options = {"enable_gqa": self.h != self.g, "window": self.window, "places": places,
                   "dropout_p": self.cfg.dropout if self.training else 0.0}
        if cache is None:
            options["flex"] = self.flex
            options["flash"] = self.flash
        if cache is None and self.mesh.cp.size > 1:
            return attend_segments(q, k, v, self.cfg, self.mesh.cp, **options)
        return attend(q, k, v, self.cfg, **options)

"""One GPT, two families by flags: GPT-2 (LayerNorm, GELU, learned positions, bias, tied) and Llama-like
(RMSNorm, SwiGLU, RoPE, grouped-query attention, untied). --objective mlm makes an encoder of either: BERT.

Legend for the whole repository. Upper case is the whole model's, lower case this rank's share; N and R are
this rank's, too:
    B T C  sequences in a micro-batch, tokens in a sequence, width; t = T/cp
    n      token rows that this rank keeps between the blocks, B*t/tp
    H D    query heads, head dim        h = H/tp     G g  key/value heads, g of them on this rank
    F      hidden width of the MLP      f = F/tp
    V L    vocabulary (padded), layers  v = V/tp
    E K    experts, top-k               e = E/ep     N = n*K routed copies, R the copies this rank received
Between the blocks the tokens lie flat, (n, C): n = B*T on one rank, and each of tp ranks holds n contiguous
rows. Under cp, T below is t, unless both are named. parallel.py's primitives are the identity on an axis of
one rank; only the vocabulary and attention ask for its size.
"""
import functools
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from config import n_masked, pad_vocab
from moe import MoE, plain_dispatcher
from ops.activations import ACTIVATIONS, GATED, gelu
from ops.cross_entropy import IGNORE, LinearCrossEntropy
from parallel import MAX, gather_chunks, gather_rows, parameter, scatter_rows

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the width; statistics in at least fp32 inside the kernel."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.layer, self.eps = cfg.norm == "layer", cfg.norm_eps
        self.weight = parameter((cfg.n_embd,), mesh)
        self.bias = parameter((cfg.n_embd,), mesh) if self.layer and cfg.bias else None

    def forward(self, x):  # (n, C) -> (n, C)
        if self.layer:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ColumnLinear(nn.Module):
    """y = x W^T, the rows of W (output features) split over tp: Megatron-LM, arXiv:1909.08053, section 3."""

    def __init__(self, n_in, n_out, bias, mesh, shard=True):
        super().__init__()
        dim = 0 if shard else None
        self.weight = parameter((n_out, n_in), mesh, tp_dim=dim)
        self.bias = parameter((n_out,), mesh, tp_dim=dim) if bias else None

    def forward(self, x):  # (B*T, n_in) -> (B*T, n_out/tp)
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """y = x W^T, the columns of W (input features) split over tp: each rank has a partial sum for every row,
    and scatter_rows adds them up. The bias is added after that, once, so it is replicated."""

    def __init__(self, n_in, n_out, bias, mesh):
        super().__init__()
        self.tp = mesh.tp
        self.weight = parameter((n_out, n_in), mesh, tp_dim=1)
        self.bias = parameter((n_out,), mesh) if bias else None

    def forward(self, x):  # (B*T, n_in/tp) -> (n, n_out)
        y = scatter_rows(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


def rope_cache(T, D, base, device, dtype):
    """cos and sin of position * frequency, (T, D/2) each. RoFormer, arXiv:2104.09864, section 3.4.2."""
    freq = base ** (-torch.arange(0, D, 2, device=device, dtype=dtype) / D)  # (D/2,)
    angle = torch.outer(torch.arange(T, device=device, dtype=dtype), freq)  # (T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn each pair (x_i, x_{i+D/2}) by its position's angle: (B, T, heads, D) -> same."""
    a, b = x.chunk(2, dim=-1)  # (B, T, h, D/2) each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (T, 1, D/2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


def fused_linear(x, layers, zero):
    """Several ColumnLinears of the same input, outputs side by side. layers: [(layer, rows of its weight to
    use or None for all)]. One product, of the concatenated weights, reads x once; but backward keeps that
    copy. ZeRO-3, which frees weights in between, concatenates the outputs of several products instead."""
    def rows_of(p, rows):  # backward of p[:] would fill and copy a full-size zero tensor
        return p if rows is None or p is None else p[rows]
    parts = [(rows_of(layer.weight, rows), rows_of(layer.bias, rows)) for layer, rows in layers]
    if zero == 3:
        return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], dim=-1)
    weights, biases = zip(*parts, strict=True)
    return F.linear(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def lower_right_mask(queries, keys):
    """-> the mask of a sequence's last tokens, the last of which sees all keys so far; no tensor on a GPU."""
    from torch.nn.attention.bias import causal_lower_right  # here: it doubles the time that imports take
    return causal_lower_right(queries, keys)


def attend_chunks(q, k, v, axis, causal, **options):
    """Attention of this rank's two chunks of each sequence (Axis.own_chunks): q (B, h, t, D), k and v
    (B, g, t, D) -> (B, h, t, D). A chunk's queries meet the keys of all ranks, causal: up to its own end."""
    kv = torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=2)  # (t, B, 2g, D)
    k, v = gather_chunks(kv, axis).permute(1, 2, 0, 3).chunk(2, dim=1)  # (B, g, T, D) each, gathered over cp
    if not causal:
        return F.scaled_dot_product_attention(q, k, v, **options)
    out, c = [], q.size(2) // 2
    for queries, end in zip(q.chunk(2, dim=2), ((axis.rank + 1) * c, k.size(2) - axis.rank * c), strict=True):
        mask = lower_right_mask(c, end)
        out.append(F.scaled_dot_product_attention(queries, k[:, :, :end], v[:, :, :end], mask, **options))
    return torch.cat(out, dim=2)


class Attention(nn.Module):
    """Self-attention, causal unless it is a masked language model's; query and key/value heads are split over
    tp. Where tp exceeds the number of key/value heads, their weights are replicated and each rank uses the
    head of its queries."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.D, self.h = cfg.n_embd // cfg.n_head, cfg.n_head // mesh.tp.size
        self.dropout, self.mesh, self.rope, self.zero = cfg.dropout, mesh, cfg.pos == "rope", cfg.zero
        self.causal = cfg.objective == "causal"
        G, width = cfg.n_kv_head, cfg.n_kv_head * self.D
        shard_kv = G % mesh.tp.size == 0
        self.g = G // mesh.tp.size if shard_kv else 1
        first = mesh.tp.rank * G // mesh.tp.size * self.D  # row of this rank's head in the replicated wk, wv
        self.kv_rows = None if shard_kv else slice(first, first + self.D)
        self.wq = ColumnLinear(cfg.n_embd, cfg.n_embd, cfg.bias, mesh)
        self.wk = ColumnLinear(cfg.n_embd, width, cfg.bias, mesh, shard=shard_kv)
        self.wv = ColumnLinear(cfg.n_embd, width, cfg.bias, mesh, shard=shard_kv)
        self.wo = RowLinear(cfg.n_embd, cfg.n_embd, cfg.bias, mesh)

    def forward(self, x, T, cos, sin, cache=None):  # (n, C) -> (n, C)
        x = gather_rows(x, self.mesh.tp)  # (B*T, C): every rank sees all tokens, for its own heads
        x = fused_linear(x, [(self.wq, None), (self.wk, self.kv_rows), (self.wv, self.kv_rows)], self.zero)
        x = x.view(-1, T, self.h + 2 * self.g, self.D)  # from (B*T, (h + 2g)*D)
        if self.rope:
            qk, v = x.split([self.h + self.g, self.g], dim=2)
            q, k = rotate(qk, cos, sin).split([self.h, self.g], dim=2)
        else:
            q, k, v = x.split([self.h, self.g, self.g], dim=2)  # (B, T, h, D), twice (B, T, g, D)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # views (B, h, T, D), ...: no copy
        if cache is not None:
            k, v = cache.append(self, k, v)  # (B, g, positions so far, D)
        options = dict(enable_gqa=self.h != self.g, dropout_p=self.dropout if self.training else 0.0)
        if cache is None and self.mesh.cp.size > 1:
            y = attend_chunks(q, k, v, self.mesh.cp, self.causal, **options)  # (B, h, T, D)
        else:  # the last query sees the last key, also where a cache holds earlier keys
            mask = lower_right_mask(T, k.size(2)) if 1 < T < k.size(2) else None
            is_causal = self.causal and k.size(2) == T
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **options)
        return self.wo(y.transpose(1, 2).reshape(-1, self.h * self.D))  # (B*T, h*D) -> (n, C)


class MLP(nn.Module):
    """w2(act(w1 x)), or gated: w2(act(w1 x, w3 x)), arXiv:2002.05202. act: ops/activations.py."""

    def __init__(self, cfg, mesh, hidden):
        super().__init__()
        self.tp, self.zero = mesh.tp, cfg.zero
        self.w1 = ColumnLinear(cfg.n_embd, hidden, cfg.bias, mesh)
        self.w3 = ColumnLinear(cfg.n_embd, hidden, cfg.bias, mesh) if cfg.mlp in GATED else None
        self.act = ACTIVATIONS[cfg.mlp]
        self.w2 = RowLinear(hidden, cfg.n_embd, cfg.bias, mesh)

    def forward(self, x):  # (n, C) -> (n, C)
        x = gather_rows(x, self.tp)  # (B*T, C)
        h = self.w1(x) if self.w3 is None else fused_linear(x, [(self.w1, None), (self.w3, None)], self.zero)
        return self.w2(self.act(h))  # (B*T, f or 2f) -> (B*T, f)


# what --recompute selective keeps: results of matrix products, attention's output and log-sum-exp. norms,
# rotation, activation and the concatenated weights are made again
ATTENTION = [f"_scaled_dot_product_{k}" for k in ("flash_attention", "efficient_attention", "cudnn_attention",
                                                  "flash_attention_for_cpu")]
KEPT = [getattr(torch.ops.aten, op).default for op in ("mm", "addmm", *ATTENTION)]


class Block(nn.Module):
    """Attention, then the MLP or the experts, each added to the residual stream."""

    def __init__(self, cfg, mesh, dispatcher=plain_dispatcher):
        super().__init__()
        self.norm1, self.attn, self.norm2 = Norm(cfg, mesh), Attention(cfg, mesh), Norm(cfg, mesh)
        if cfg.n_experts:
            shared = MLP(cfg, mesh, cfg.n_shared_experts * cfg.ffn_hidden) if cfg.n_shared_experts else None
            self.mlp, self.moe = None, MoE(cfg, mesh, shared, dispatcher)
        else:
            self.mlp, self.moe = MLP(cfg, mesh, cfg.ffn_hidden), None
        self.dropout, self.recomputes = cfg.dropout, cfg.recompute

    def forward(self, x, T, cos, sin, cache=None):
        """x (n, C) -> (n, C), this rank's part of the experts' balancing losses (), or None"""
        if self.moe is None:
            return self.recompute(self.dense_block, x, T, cos, sin, cache), None
        x, normed = self.recompute(self.attention_half, x, T, cos, sin, cache)
        y, aux = self.moe(normed, self.recompute if self.recomputes == "full" else lambda f, *args: f(*args))
        return x + F.dropout(y, self.dropout, self.training), aux

    def recompute(self, f, *args):
        """f(*args); under --recompute only its inputs, and KEPT, are kept, and backward runs it again."""
        if self.recomputes == "none" or not self.training:
            return f(*args)
        keep = functools.partial(create_selective_checkpoint_contexts, KEPT)
        return checkpoint(f, *args, use_reentrant=False, preserve_rng_state=self.dropout > 0,
                          **({"context_fn": keep} if self.recomputes == "selective" else {}))

    def attention_half(self, x, T, cos, sin, cache):  # (n, C) -> (n, C), the same normed
        x = x + F.dropout(self.attn(self.norm1(x), T, cos, sin, cache), self.dropout, self.training)
        return x, self.norm2(x)

    def dense_block(self, x, T, cos, sin, cache):  # (n, C) -> (n, C)
        x, normed = self.attention_half(x, T, cos, sin, cache)
        return x + F.dropout(self.mlp(normed), self.dropout, self.training)


def vocab_embedding(tokens, weight, axis):
    """tokens (B*T,) int64, weight (v, C) -> (n, C): each rank looks up the ids it holds, and their sum is
    scattered by rows."""
    if axis.size == 1:
        return F.embedding(tokens, weight)
    local = tokens - axis.rank * weight.size(0)
    mine = (local >= 0) & (local < weight.size(0))  # (B*T,)
    x = F.embedding(local * mine, weight) * mine.unsqueeze(1)  # (B*T, C), zero for other ranks' ids
    return scatter_rows(x, axis)


class _VocabCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target], the vocabulary split over tp; backward needs no communication."""

    @staticmethod
    def forward(ctx, z, target, axis):  # (B*T, v), (B*T,) -> ()
        low = axis.rank * z.size(1)
        top = z.max(dim=1).values  # (B*T,)
        axis.all_reduce(top, MAX)  # B*T maxima, over tp
        mine = (target >= low) & (target < low + z.size(1))
        index = ((target - low) * mine).unsqueeze(1)  # (B*T, 1)
        picked = z.gather(1, index).squeeze(1).masked_fill(~mine, 0)  # (B*T,) target's logit; -inf * 0 is NaN
        p = (z - top.unsqueeze(1)).exp_()  # (B*T, v)
        total = p.sum(1)
        # SUM of exponentials and of target logits: 2 B*T, over tp
        total, picked = axis.all_reduce(torch.stack([total, picked]))
        ignored = target == IGNORE
        p = p.div_(total.unsqueeze(1)).masked_fill_(ignored.unsqueeze(1), 0)
        ctx.save_for_backward(p, index, mine)
        return (total.log() + top - picked).masked_fill(ignored, 0).sum()

    @staticmethod
    def backward(ctx, g):
        p, index, mine = ctx.saved_tensors
        dz = p.scatter_add(1, index, -mine.to(p.dtype).unsqueeze(1))  # softmax - onehot
        return dz * g, None, None


def vocab_cross_entropy(logits, target, vocab_size, axis):
    """logits (B*T, v) in the model's dtype, target (B*T,), IGNORE takes no part -> sum of the cross-entropy
    in nats, the same on every tp rank."""
    low = axis.rank * logits.size(1)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least fp32
    if low + z.size(1) > vocab_size:  # padding columns are no tokens: they take no probability
        pad = torch.arange(low, low + z.size(1), device=z.device) >= vocab_size
        z = z.masked_fill(pad, -torch.inf)
    if axis.size == 1:
        return F.cross_entropy(z, target, reduction="sum", ignore_index=IGNORE)
    return _VocabCrossEntropy.apply(z, target, axis)


class Weight(nn.Module):
    """A bare matrix with a name: the token embedding, the positions, the head."""

    def __init__(self, shape, mesh, **kwargs):
        super().__init__()
        self.weight = parameter(shape, mesh, **kwargs)


class MaskedHead(nn.Module):
    """What BERT has between the last norm and the vocabulary: a dense layer with GELU and a norm, and a bias
    on the logits (arXiv:1810.04805; google-research/bert, get_masked_lm_output). Every tp rank does all rows:
    its gradient is that of its columns of logits, so the sum over the stage is the whole."""

    def __init__(self, cfg, mesh, V, used):
        super().__init__()
        self.dense = ColumnLinear(cfg.n_embd, cfg.n_embd, cfg.bias, mesh, shard=False)
        self.norm = Norm(cfg, mesh)
        self.bias = parameter((V,), mesh, tp_dim=0, used=used) if cfg.bias else None

    def forward(self, x):  # (rows, C) -> (rows, C)
        return self.norm(gelu(self.dense(x)))

    @staticmethod
    def masked_rows(x, targets, cp):
        """x (B*T, C), targets (B, T) -> those of the masked tokens, the only ones with a target. A sequence
        has n_masked, so shapes are static: the host waits for nothing, and a CUDA graph can hold this. This
        rank of cp may hold them all; where it holds fewer, rows without a target, IGNORE, stand behind."""
        count = targets.size(0) * min(n_masked(targets.size(1) * cp.size), targets.size(1))
        targets = targets.reshape(-1)
        rows = (targets < 0).byte().argsort(stable=True)[:count]  # in their order
        return x.index_select(0, rows), targets[rows]


class GPT(nn.Module):
    """This rank's part of the model: layers [(first, end)] of each of its chunks, pipeline stages, the 1/tp
    share of each layer. dispatcher(cfg, mesh) makes each expert layer's token dispatcher."""

    def __init__(self, cfg, mesh, vocab_size, layers=None, dispatcher=plain_dispatcher):
        super().__init__()
        self.cfg, self.mesh, self.vocab_size = cfg, mesh, vocab_size
        self.chunks = layers or [(0, cfg.n_layer)]
        self.is_first, self.is_last = self.chunks[0][0] == 0, self.chunks[-1][1] == cfg.n_layer
        V, C = pad_vocab(vocab_size), cfg.n_embd
        # a tied head is the embedding; under pp the last stage keeps a copy, reduced with the first stage's
        two_copies = cfg.tied and self.is_first != self.is_last
        self.wte = self.wpe = self.norm = self.head = self.mlm = None
        if self.is_first or cfg.tied and self.is_last:
            self.wte = Weight((V, C), mesh, tp_dim=0, used=vocab_size, tied=two_copies)
        if self.is_first and cfg.pos == "learned":
            self.wpe = Weight((cfg.seq_len, C), mesh)
        self.blocks = nn.ModuleDict({str(i): Block(cfg, mesh, dispatcher)
                                     for chunk in self.chunks for i in range(*chunk)})
        if self.is_last:
            self.norm = Norm(cfg, mesh)
            self.head = None if cfg.tied else Weight((V, C), mesh, tp_dim=0, used=vocab_size)
            self.mlm = MaskedHead(cfg, mesh, V, vocab_size) if cfg.objective == "mlm" else None
        self.rope = None
        self.data_parallel = None  # ddp.DataParallel sets itself: it knows which weights have come

    def provide_weights(self, module, x=None):
        """Wait for the newest weights of a module, before they are read. x: the module's input."""
        if self.data_parallel is not None:
            self.data_parallel.provide_weights(module, x)

    def _positions(self, T, cache, device):
        """-> where T tokens stand in their sequences: an index. With a cache each cp rank has whole ones."""
        start, cp = 0 if cache is None else cache.length, self.mesh.cp
        if cp.size == 1 or cache is not None:
            return slice(start, start + T)
        return cp.own_chunks(torch.arange(T * cp.size, device=device), 0)

    def _rotation(self, positions, like):
        """cos, sin of the positions: (T, D/2) each."""
        if self.cfg.pos != "rope":
            return None, None
        if self.rope is None:
            cfg, wide = self.cfg, torch.promote_types(DTYPES[self.cfg.dtype], torch.float32)
            self.rope = rope_cache(cfg.seq_len, cfg.n_embd // cfg.n_head, cfg.rope_base, like.device, wide)
        return self.rope[0][positions], self.rope[1][positions]

    def forward(self, tokens, targets=None, hidden=None, cache=None, chunk=0):
        """tokens (B, T) int64; hidden (n, C) from the stage before; cache: a Cache, for generation; chunk:
        which of this rank's stages.
        -> on the last stage with targets (B, T): the sum over B*T of the cross-entropy in nats, (), of mlm
        over the masked tokens; without targets: the logits (B*T, v); on every other stage: hidden (n, C). And
        this rank's part of this stage's weighted balancing losses, ()."""
        T, (first, end) = tokens.size(1), self.chunks[chunk]
        positions = self._positions(T, cache, tokens.device)
        cos, sin = self._rotation(positions, tokens)
        x = self._embed(tokens, positions) if first == 0 else hidden
        aux = torch.zeros((), device=tokens.device)
        for block in (self.blocks[str(i)] for i in range(first, end)):
            self.provide_weights(block, x)
            x, block_aux = block(x, T, cos, sin, cache)
            aux = aux if block_aux is None else aux + block_aux
        if end < self.cfg.n_layer:
            return x, aux
        return self._loss_or_logits(x, targets), aux

    def _loss_or_logits(self, x, targets):  # (n, C), (B, T) or None -> () or (B*T, v)
        head, bias = self.wte if self.head is None else self.head, None
        self.provide_weights(self.norm, x)
        self.provide_weights(head)
        x = gather_rows(self.norm(x), self.mesh.tp)  # (B*T, C)
        if self.mlm is not None:
            self.provide_weights(self.mlm)
            if targets is not None:
                x, targets = self.mlm.masked_rows(x, targets, self.mesh.cp)  # (B*n_masked, C), ...
            x, bias = self.mlm(x), self.mlm.bias
        if targets is not None and x.device.type != "cpu" and self.mesh.tp.size == 1:
            return LinearCrossEntropy.apply(x, head.weight, targets.reshape(-1), self.vocab_size, bias)
        logits = F.linear(x, head.weight, bias)  # (B*T, v)
        if targets is None:
            return logits
        return vocab_cross_entropy(logits, targets.reshape(-1), self.vocab_size, self.mesh.tp)

    def _embed(self, tokens, positions):  # (B, T) -> (n, C)
        T = tokens.size(1)
        self.provide_weights(self.wte)
        x = vocab_embedding(tokens.reshape(-1), self.wte.weight, self.mesh.tp)  # (n, C)
        if self.wpe is not None:
            self.provide_weights(self.wpe)
            n, pos = x.size(0), self.wpe.weight[positions]  # (T, C)
            if n % T == 0:
                x = (x.view(-1, *pos.shape) + pos).view(n, -1)
            else:  # this rank's rows start inside a sequence
                first = self.mesh.tp.rank * n
                x = x + F.embedding(torch.arange(first, first + n, device=tokens.device) % T, pos)
        return F.dropout(x, self.cfg.dropout, self.training)


@torch.no_grad()
def init_weights(model, seed):
    """Fill every parameter independently of the layout: the *full* tensor is drawn from a generator seeded by
    (seed, name), then this rank keeps its share. N(0, 0.02), the two matrices that write into the residual
    stream divided by sqrt(2 L) (GPT-2 paper, section 2.3); norms one, biases and padding zero."""
    for name, p in model.named_parameters():
        name_parts = name.rsplit(".", 2)[-2:]
        if p.ndim == 1:
            p.fill_(1.0 if name_parts[1] == "weight" else 0.0)
            continue
        std = 0.02 / math.sqrt(2 * model.cfg.n_layer) if {"wo", "w2"} & set(name_parts) else 0.02
        if p.expert:  # each expert draws for itself: (seed, name, number)
            for i in range(p.size(0)):
                p[i] = normal_from_key(p.shape[1:], std, f"{seed}/{name}/{p.offset[0] + i}", p.device)
            continue
        full = torch.zeros(p.full_shape, dtype=torch.float32, device=p.device)
        full[:p.used] = normal_from_key((p.used, *p.full_shape[1:]), std, f"{seed}/{name}", p.device)
        p.copy_(full[tuple(slice(o, o + s) for o, s in zip(p.offset, p.shape, strict=True))])


def normal_from_key(shape, std, key, device):
    """-> N(0, std) of this shape, fp32, from a generator seeded by the text key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    rng = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=rng)

"""One GPT, two families by flags: GPT-2 (LayerNorm, GELU, learned positions, bias, tied) and Llama-like
(RMSNorm, SwiGLU, RoPE, grouped-query attention, untied).

Legend for the whole repository. Upper case is the model's, lower case is this rank's share of it:
    B T C  sequences in a micro-batch, tokens in a sequence, width
    n      token rows that this rank keeps between the blocks, B*T/tp
    H D    query heads, head dim        h = H/tp     G g  key/value heads, this rank's
    F      hidden width of the MLP      f = F/tp
    V L    vocabulary (padded), layers  v = V/tp
    E K    experts, top-k               e = E/ep     N = n*K routed copies, R the copies this rank received
Between the blocks the tokens lie flat, (n, C): n = B*T on one rank, and each of tp ranks keeps an equal run
of rows. Every primitive of parallel.py is the identity when its axis has one rank: nothing here asks
"if tp > 1".
"""
import contextlib
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from moe import MoE
from ops.fused import LinearCrossEntropy, gelu, swiglu
from parallel import gather_rows, parameter, scatter_rows, vocab_cross_entropy, vocab_embedding


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the width; statistics in at least fp32 inside the kernel."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.layer = cfg.norm == "layer"
        self.weight = parameter((cfg.n_embd,), mesh)
        self.bias = parameter((cfg.n_embd,), mesh) if self.layer and cfg.bias else None

    def forward(self, x):  # (n, C) -> (n, C)
        if self.layer:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class ColumnLinear(nn.Module):
    """y = x W^T with the rows of W (output features) dealt over tp: Megatron-LM, arXiv:1909.08053."""

    def __init__(self, n_in, n_out, bias, mesh, shard=True):
        super().__init__()
        dim = 0 if shard else None
        self.weight = parameter((n_out, n_in), mesh, tp_dim=dim)
        self.bias = parameter((n_out,), mesh, tp_dim=dim) if bias else None

    def forward(self, x):  # (B*T, n_in) -> (B*T, n_out/tp)
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """y = x W^T with the columns of W (input features) dealt over tp: each rank has a partial sum for every
    row, scatter_rows adds them up. The bias is added after that, once, so it is replicated."""

    def __init__(self, n_in, n_out, bias, mesh):
        super().__init__()
        self.tp = mesh.tp
        self.weight = parameter((n_out, n_in), mesh, tp_dim=1)
        self.bias = parameter((n_out,), mesh) if bias else None

    def forward(self, x):  # (B*T, n_in/tp) -> (n, n_out)
        y = scatter_rows(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


def rope_table(T, D, base, device):
    """cos and sin of position * frequency, (T, D/2) each, fp32. RoFormer, arXiv:2104.09864, section 3.4.2."""
    freq = base ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)  # (D/2,)
    angle = torch.outer(torch.arange(T, device=device, dtype=torch.float32), freq)  # (T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn each pair (x_i, x_{i+D/2}) by its position's angle: (B, T, h, D) -> same."""
    a, b = x.chunk(2, dim=-1)  # (B, T, h, D/2) each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (T, 1, D/2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


def together(x, layers):
    """Several column linears of the same input as one matrix product, their outputs side by side. Gluing the
    weights costs their bytes, a fraction of what reading x once more would."""
    def part(p, rows):
        return p if rows is ALL else p[rows]  # a slice of all would cost its gradient a zeroed copy
    weight = torch.cat([part(layer.weight, rows) for layer, rows in layers])
    bias = None
    if layers[0][0].bias is not None:
        bias = torch.cat([part(layer.bias, rows) for layer, rows in layers])
    return F.linear(x, weight, bias)


ALL = slice(None)


class Attention(nn.Module):
    """Causal self-attention; the query heads are dealt over tp, and the key/value heads too. Where tp exceeds
    the key/value heads their weights are replicated and each rank uses the one head its queries belong to."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.D, self.h = cfg.n_embd // cfg.n_head, cfg.n_head // mesh.tp.size
        self.dropout, self.mesh, self.rope = cfg.dropout, mesh, cfg.pos == "rope"
        G, width = cfg.n_kv_head, cfg.n_kv_head * self.D
        deal = G % mesh.tp.size == 0
        self.g = G // mesh.tp.size if deal else 1
        first = mesh.tp.rank * G // mesh.tp.size * self.D  # of this rank's one head among the replicated ones
        self.kv = ALL if deal else slice(first, first + self.D)
        self.wq = ColumnLinear(cfg.n_embd, cfg.n_embd, cfg.bias, mesh)
        self.wk = ColumnLinear(cfg.n_embd, width, cfg.bias, mesh, shard=deal)
        self.wv = ColumnLinear(cfg.n_embd, width, cfg.bias, mesh, shard=deal)
        self.wo = RowLinear(cfg.n_embd, cfg.n_embd, cfg.bias, mesh)

    def forward(self, x, T, cos, sin, cache=None):  # (n, C) -> (n, C)
        x = gather_rows(x, self.mesh.tp)  # (B*T, C): every rank sees all tokens, for its own heads
        x = together(x, [(self.wq, ALL), (self.wk, self.kv), (self.wv, self.kv)])  # (B*T, (h + 2g)*D)
        x = x.view(-1, T, self.h + 2 * self.g, self.D)
        if self.rope:
            qk, v = x.split([self.h + self.g, self.g], dim=2)
            q, k = rotate(qk, cos, sin).split([self.h, self.g], dim=2)
        else:
            q, k, v = x.split([self.h, self.g, self.g], dim=2)  # (B, T, h, D), twice (B, T, g, D)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # of the views only: memory stays by token
        if cache is not None:
            k, v = cache.append(self, k, v)  # (B, g, positions so far, D)
        dropout, causal = self.dropout if self.training else 0.0, cache is None or T > 1
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.h != self.g,
                                           dropout_p=dropout)  # (B, h, T, D)
        return self.wo(y.transpose(1, 2).reshape(-1, self.h * self.D))  # (B*T, h*D) -> (n, C)


class MLP(nn.Module):
    """GELU (tanh form): w2(gelu(w1 x)). SwiGLU: w2(silu(w1 x) * w3 x), arXiv:2002.05202."""

    def __init__(self, cfg, mesh, hidden):
        super().__init__()
        self.tp = mesh.tp
        self.w1 = ColumnLinear(cfg.n_embd, hidden, cfg.bias, mesh)
        self.w3 = ColumnLinear(cfg.n_embd, hidden, cfg.bias, mesh) if cfg.mlp == "swiglu" else None
        self.w2 = RowLinear(hidden, cfg.n_embd, cfg.bias, mesh)

    def forward(self, x):  # (n, C) -> (n, C)
        x = gather_rows(x, self.tp)  # (B*T, C)
        if self.w3 is None:
            return self.w2(gelu(self.w1(x)))
        return self.w2(swiglu(together(x, [(self.w1, ALL), (self.w3, ALL)])))  # (B*T, 2f) -> (B*T, f)


class Block(nn.Module):
    """Attention, then the MLP or the experts, each added to the residual stream. -> (n, C), their losses"""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.norm1, self.attn = Norm(cfg, mesh), Attention(cfg, mesh)
        self.norm2, self.mlp, self.moe = Norm(cfg, mesh), None, None
        if cfg.n_experts:
            shared = MLP(cfg, mesh, cfg.n_shared_experts * cfg.ffn_hidden) if cfg.n_shared_experts else None
            self.moe = MoE(cfg, mesh, shared)
        else:
            self.mlp = MLP(cfg, mesh, cfg.ffn_hidden)
        self.dropout, self.recompute = cfg.dropout, cfg.recompute == "full"

    def forward(self, x, T, cos, sin, cache=None):  # (n, C) -> (n, C), ()
        if self.moe is None:
            return self.again(self.dense, x, T, cos, sin, cache), None
        x, z = self.again(self.attend, x, T, cos, sin, cache)
        y, aux = self.moe(z, self.again)
        return x + F.dropout(y, self.dropout, self.training), aux

    def again(self, f, *args):
        """f(*args); under --recompute only its inputs are kept, and backward runs it again."""
        return checkpoint(f, *args, use_reentrant=False) if self.recompute and self.training else f(*args)

    def attend(self, x, T, cos, sin, cache):  # (n, C) -> (n, C), the same normed
        x = x + F.dropout(self.attn(self.norm1(x), T, cos, sin, cache), self.dropout, self.training)
        return x, self.norm2(x)

    def dense(self, x, T, cos, sin, cache):
        x, z = self.attend(x, T, cos, sin, cache)
        return x + F.dropout(self.mlp(z), self.dropout, self.training)


class Table(nn.Module):
    """A bare matrix with a name: the token embedding, the positions, the head."""

    def __init__(self, shape, mesh, **how):
        super().__init__()
        self.weight = parameter(shape, mesh, **how)


class GPT(nn.Module):
    """This rank's part of the model: layers first..last-1 of stage pp, the 1/tp share of each of them."""

    def __init__(self, cfg, mesh, vocab_size, layers=None):
        super().__init__()
        self.cfg, self.mesh, self.vocab_size = cfg, mesh, vocab_size
        first, last = layers or (0, cfg.n_layer)
        self.is_first, self.is_last = first == 0, last == cfg.n_layer
        V, C = padded(vocab_size), cfg.n_embd
        # a tied head is the embedding; under pp the last stage keeps a copy, reduced with the first stage's
        tied_copy = cfg.tied and self.is_first != self.is_last
        self.wte = self.wpe = self.norm = self.head = None
        if self.is_first or cfg.tied and self.is_last:
            self.wte = Table((V, C), mesh, tp_dim=0, used=vocab_size, reduce="tied" if tied_copy else None)
        if self.is_first and cfg.pos == "learned":
            self.wpe = Table((cfg.seq_len, C), mesh)
        self.blocks = nn.ModuleDict({str(i): Block(cfg, mesh) for i in range(first, last)})  # global numbers
        if self.is_last:
            self.norm = Norm(cfg, mesh)
            self.head = None if cfg.tied else Table((V, C), mesh, tp_dim=0, used=vocab_size)
        self.table = None
        self.arrive = lambda module: None  # ZeRO-1 waits here for the weights of the module about to run

    def _positions(self, start, T, like):
        """cos, sin of positions start..start+T-1: (T, D/2) each."""
        if self.cfg.pos != "rope":
            return None, None
        if self.table is None:
            cfg = self.cfg
            self.table = rope_table(cfg.seq_len, cfg.n_embd // cfg.n_head, cfg.rope_base, like.device)
        return self.table[0][start:start + T], self.table[1][start:start + T]

    def forward(self, tokens, targets=None, hidden=None, cache=None):
        """tokens (B, T) int64; hidden (n, C) from the stage before. -> the sum over B*T of the cross-entropy
        in nats on the last stage with targets (B, T), logits (B*T, v) there without, and hidden (n, C) on
        every other stage; and this rank's part of this stage's weighted balancing losses ()."""
        T = tokens.size(1)
        start = 0 if cache is None else cache.length
        cos, sin = self._positions(start, T, tokens)
        x = self._embed(tokens, start) if self.is_first else hidden
        aux = torch.zeros((), device=tokens.device)
        for block in self.blocks.values():
            self.arrive(block)
            x, more = block(x, T, cos, sin, cache)
            aux = aux if more is None else aux + more
        if cache is not None:
            cache.length += T
        if not self.is_last:
            return x, aux
        head = self.wte if self.head is None else self.head
        self.arrive(self.norm), self.arrive(head)
        x = gather_rows(self.norm(x), self.mesh.tp)  # (B*T, C)
        if targets is not None and x.is_cuda and self.mesh.tp.size == 1:
            return LinearCrossEntropy.apply(x, head.weight, targets.reshape(-1), self.vocab_size), aux
        logits = F.linear(x, head.weight)  # (B*T, v)
        if targets is None:
            return logits, aux
        return vocab_cross_entropy(logits, targets.reshape(-1), self.vocab_size, self.mesh.tp), aux

    def _embed(self, tokens, start):  # (B, T) -> (n, C)
        T = tokens.size(1)
        self.arrive(self.wte)
        x = vocab_embedding(tokens.reshape(-1), self.wte.weight, self.mesh.tp)  # (n, C)
        if self.wpe is not None:
            self.arrive(self.wpe)
            n, where = x.size(0), self.wpe.weight[start:start + T]  # (T, C)
            if n % T == 0:
                x = (x.view(-1, *where.shape) + where).view(n, -1)
            else:  # this rank's run of rows begins or ends inside a sequence
                first = self.mesh.tp.rank * n
                x = x + F.embedding(torch.arange(first, first + n, device=tokens.device) % T, where)
        return F.dropout(x, self.cfg.dropout, self.training)


def padded(vocab_size):
    """The vocabulary rounded up to a multiple of 128, whatever the layout: tiles like it, tp divides it."""
    return -(-vocab_size // 128) * 128


@torch.no_grad()
def initialise(model, seed):
    """Fill every parameter independently of the layout: the *full* tensor is drawn from a generator seeded by
    (seed, name), then this rank keeps its share. N(0, 0.02), the two matrices that write into the residual
    stream divided by sqrt(2 L) (GPT-2 paper, section 2.3); norms one, biases and padding zero."""
    for name, p in model.named_parameters():
        kind = name.rsplit(".", 2)[-2:]
        if p.ndim == 1:
            p.fill_(1.0 if kind[1] == "weight" else 0.0)
            continue
        std = 0.02 / math.sqrt(2 * model.cfg.n_layer) if {"wo", "w2"} & set(kind) else 0.02
        if p.expert:  # each expert draws for itself: (seed, name, number)
            for i in range(p.size(0)):
                p[i] = draw(p.shape[1:], std, f"{seed}/{name}/{p.offset[0] + i}", p.device)
            continue
        full = torch.zeros(p.full_shape, dtype=torch.float32, device=p.device)
        full[:p.used] = draw((p.used, *p.full_shape[1:]), std, f"{seed}/{name}", p.device)
        p.copy_(full[tuple(slice(o, o + s) for o, s in zip(p.offset, p.shape, strict=True))])


def draw(shape, std, key, device):
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    rng = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=rng)


# -----------------------------------------------------------------------------
# how much work is a token

def count_parameters(cfg, vocab_size):
    """-> {total, matmul, embedding}: all parameters; those in a matrix product for one token (the head, of
    the experts only the top-k and the shared ones, no router as in the reports we compare with); those of the
    input tables."""
    C, D, E = cfg.n_embd, cfg.n_embd // cfg.n_head, cfg.n_experts
    matrices = 3 if cfg.mlp == "swiglu" else 2
    attn = 2 * C * C + 2 * C * cfg.n_kv_head * D
    expert = matrices * C * cfg.ffn_hidden
    shared = expert * cfg.n_shared_experts if E else 0
    head = padded(vocab_size) * C
    norms = (2 * cfg.n_layer + 1) * C * (2 if cfg.norm == "layer" and cfg.bias else 1)
    bias = 2 * C + 2 * cfg.n_kv_head * D  # q, o, k, v
    for hidden in [cfg.n_shared_experts * cfg.ffn_hidden] * (shared > 0) if E else [cfg.ffn_hidden]:
        bias += C + hidden * (matrices - 1)
    embedding = head + (cfg.seq_len * C if cfg.pos == "learned" else 0)
    matmul = cfg.n_layer * (attn + expert * (cfg.top_k if E else 1) + shared) + head
    total = (cfg.n_layer * (attn + shared + (E * (expert + C) if E else expert) + (bias if cfg.bias else 0))
             + norms + embedding + (0 if cfg.tied else head))
    return {"total": total, "matmul": matmul, "embedding": embedding}


def flops_per_token(cfg, vocab_size):
    """-> (full, causal) floating-point operations of forward and backward for one token: 6 per parameter in a
    matrix product, plus attention 12 L H D T, halved where the mask halves it (shared formula of
    Megatron-LM's reports)."""
    attention = 12 * cfg.n_layer * cfg.n_embd * cfg.seq_len
    products = 6 * count_parameters(cfg, vocab_size)["matmul"]
    return products + attention, products + attention / 2


# -----------------------------------------------------------------------------
# generation

class Cache:
    """Keys and values of the positions so far, per attention layer: (B, g, length, D)."""

    def __init__(self):
        self.length, self.kv = 0, {}

    def append(self, layer, k, v):
        if layer in self.kv:
            past = self.kv[layer]
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(past, (k, v), strict=True))
        self.kv[layer] = k, v
        return k, v


def generate(model, *args, **more):
    """continue_tokens(), of a compiled model in eager: the shapes change with every token."""
    with torch.compiler.set_stance("force_eager") if model.cfg.compile else contextlib.nullcontext():
        return continue_tokens(model, *args, **more)


@torch.no_grad()
def continue_tokens(model, tokens, max_new_tokens, temperature=1.0, top_k=None, seed=0, next_logits=None):
    """Continue tokens (list of int) by max_new_tokens -> the longer list. temperature 0 takes the likeliest
    token; top_k keeps the k likeliest. A full window starts again from its last half. All ranks call this
    together, and under pp with pipeline.next_logits in the place of one stage's."""
    rng = torch.Generator("cpu").manual_seed(seed)
    was_training, cache, tokens = model.training, Cache(), list(tokens)
    model.eval()
    device = next(model.parameters()).device
    copies = model.mesh.tp.size  # one token cannot be dealt over tp ranks: run tp copies of the sequence
    new = tokens[-model.cfg.seq_len:]
    for _ in range(max_new_tokens):
        if cache.length + len(new) > model.cfg.seq_len:
            cache, new = Cache(), tokens[-(model.cfg.seq_len // 2):]
        x = torch.tensor([new] * copies, device=device)  # (tp, T)
        logits = next_logits(model, x, cache) if next_logits else last_logits(model, x, cache)  # (vocab,)
        new = [sample(logits, temperature, top_k, rng)]
        tokens += new
    model.train(was_training)
    return tokens


def last_logits(model, tokens, cache, hidden=None):
    """(copies, T) -> (vocab,) fp32 on the host: the first copy's last position, all of the vocabulary."""
    logits, _ = model(tokens, hidden=hidden, cache=cache)
    logits = gather_rows(logits[tokens.size(1) - 1], model.mesh.tp)  # (v,) -> (V,)
    return logits[:model.vocab_size].float().cpu()


def sample(logits, temperature, top_k, rng):
    """One token id drawn from logits (vocab,)."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))

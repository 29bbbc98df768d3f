"""The whole model written out in plain tensor operations, from the papers.

It shares no line with model.py and moe.py. Weights come by the names of the model's parameters, at
full size: {name: tensor}.

    forward      tokens -> logits, weighted router losses of the micro-batch
    total_loss   what a step minimizes, over its micro-batches
    val_loss     mean cross-entropy of windows of text, without gradients
"""
import dataclasses
import math

import torch
from test_moe import loop_over_tokens


def undropped(place, x):
    """Return x: dropout that drops nothing."""
    return x


def factor(cfg, weights, name):
    """What a norm multiplies by. Gemma's norms hold by how much it is more than 1."""
    return 1 + weights[name + ".offset"] if cfg.norm == "rms1p" else weights[name + ".weight"]


def norm(cfg, weights, name, x):
    """RMSNorm, arXiv:1910.07467, or LayerNorm, arXiv:1607.06450, over the width: like x."""
    gain = factor(cfg, weights, name)
    if cfg.norm != "layer":
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + 1e-5) * gain
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred ** 2).mean(-1, keepdim=True)
    y = centred / torch.sqrt(variance + 1e-5) * gain
    return y + weights[name + ".bias"] if cfg.bias else y


def linear(cfg, weights, name, x):
    y = x @ weights[name + ".weight"].T
    has_bias = cfg.bias or cfg.qkv_bias and name[-2:] in ("wq", "wk", "wv")
    return y + weights[name + ".bias"] if has_bias else y


def divisor(cfg, i):
    """By what pair i turns more slowly than the papers' RoPE: Llama 3, arXiv:2407.21783, as Meta's code."""
    if not cfg.rope_scaling:
        return 1
    factor, low, high, length = cfg.rope_scaling
    D = cfg.head_dim or cfg.n_embd // cfg.n_head
    wavelength = 2 * math.pi * cfg.rope_base ** (2 * i / D)
    if wavelength > length / low:
        return factor
    if wavelength < length / high:
        return 1
    smooth = (length / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def turned(cfg, x):
    """RoPE: in x (B, T, D) pair (x_i, x_{i+D/2}) of position t is turned by t * base^(-2i/D)."""
    _, T, D = x.shape
    half = D // 2
    angle = torch.zeros(T, half, dtype=torch.float64)
    for t in range(T):
        for i in range(half):
            angle[t, i] = t * cfg.rope_base ** (-2 * i / D) / divisor(cfg, i)
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def root_mean_square(x):
    return torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def normed_heads(cfg, weights, name, x, D):
    """The heads of queries or keys, (B, T, D) each, with their norm."""
    if cfg.qk_norm == "all":
        x = x / root_mean_square(x) * factor(cfg, weights, name)
    heads = x.split(D, -1)
    if cfg.qk_norm == "head":
        heads = [head / root_mean_square(head) * factor(cfg, weights, name) for head in heads]
    return heads


def has_window(cfg, layer):
    is_full = cfg.full_every and layer % cfg.full_every == cfg.full_every - 1
    return cfg.window and not is_full


def seen(cfg, T, layer):
    """Which keys (columns) each query (rows) sees, (T, T)."""
    sees = torch.ones(T, T)
    if cfg.objective == "causal":
        sees = sees.tril()  # no later token
    if has_window(cfg, layer):
        for query in range(T):
            sees[query, :max(0, query + 1 - cfg.window)] = 0
    return sees


def attention(cfg, weights, name, x, drop):
    """Softmax(q k^T / sqrt(D)) v of each head, then wo: x (B, T, C) -> the same shape."""
    layer = int(name.split(".")[1])
    D = cfg.head_dim or cfg.n_embd // cfg.n_head
    q = normed_heads(cfg, weights, name + ".q_norm", linear(cfg, weights, name + ".wq", x), D)
    k = normed_heads(cfg, weights, name + ".k_norm", linear(cfg, weights, name + ".wk", x), D)
    v = linear(cfg, weights, name + ".wv", x).split(D, -1)
    turns = cfg.pos == "rope" and not (cfg.no_rope_every and (layer + 1) % cfg.no_rope_every == 0)
    sees = seen(cfg, x.size(1), layer)
    rope = cfg
    if cfg.window_rope_base and has_window(cfg, layer):
        rope = dataclasses.replace(cfg, rope_base=cfg.window_rope_base, rope_scaling=())
    heads = []
    for h in range(cfg.n_head):
        g = h // (cfg.n_head // cfg.n_kv_head)  # head h shares this key/value head
        query, key, value = q[h], k[g], v[g]  # (B, T, D) each
        if turns:
            query = turned(rope, query)
            key = turned(rope, key)
        score = query @ key.transpose(1, 2) / math.sqrt(D)  # (B, T, T)
        share = torch.where(sees.bool(), score.exp(), 0)
        share = share / share.sum(-1, keepdim=True)
        heads.append(drop("attention", share) @ value)
    return linear(cfg, weights, name + ".wo", torch.cat(heads, -1))


def activation(cfg, gate, up):
    """SwiGLU, GEGLU, arXiv:2002.05202; GELU, arXiv:1606.08415, section 2, and squared ReLU have no `up`."""
    if cfg.mlp == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if cfg.mlp == "relu2":
        return torch.where(gate > 0, gate * gate, 0)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3)
    gelu = gate / 2 * (1 + torch.tanh(inner))
    return gelu * up if cfg.mlp == "geglu" else gelu


def mlp(cfg, weights, name, x):
    gate = linear(cfg, weights, name + ".w1", x)
    up = linear(cfg, weights, name + ".w3", x) if cfg.mlp in ("swiglu", "geglu") else None
    return linear(cfg, weights, name + ".w2", activation(cfg, gate, up))


def experts(cfg, weights, name, x):
    """Return the experts' output, like x (B, T, C), and the micro-batch's weighted router losses."""
    w1, w2, w3 = (weights.get(f"{name}.{matrix}") for matrix in ("w1", "w2", "w3"))

    def expert(i, row):
        up = None if w3 is None else w3[i] @ row
        return w2[i] @ activation(cfg, w1[i] @ row, up)

    def shared(row):
        return mlp(cfg, weights, name + ".shared", row)
    y, balance_loss, z_loss, *_ = loop_over_tokens(
        x.flatten(0, 1), weights[name + ".router.weight"], expert, cfg.top_k, cfg.router,
        weights.get(name + ".router.bias"), cfg.capacity_factor, cfg.drop_policy,
        shared if cfg.n_shared_experts else None)
    return y.view_as(x), cfg.aux_coef * balance_loss + cfg.z_coef * z_loss


def masked_head(cfg, weights, x):
    """BERT's layers after the last norm: arXiv:1810.04805; google-research/bert, get_masked_lm_output."""
    gelu = dataclasses.replace(cfg, mlp="gelu")
    x = activation(gelu, linear(cfg, weights, "mlm.dense", x), None)
    return norm(cfg, weights, "mlm.norm", x)


def forward(cfg, weights, vocab_size, tokens, drop=undropped):
    """Return the logits (B, T, vocab_size) of tokens (B, T), and the weighted router losses.

    drop(place, x): what dropout does, at each of its places.
    """
    x = weights["wte.weight"][tokens]
    if cfg.embed_scale:
        x = x * cfg.n_embd ** 0.5
    aux = torch.zeros((), dtype=torch.float64)
    if cfg.pos == "learned":
        x = x + weights["wpe.weight"][:tokens.size(1)]
    x = drop("embedding", x)
    for i in range(cfg.n_layer):
        name = f"blocks.{i}"
        first, second = f"{name}.norm1", f"{name}.norm2"
        y = x if cfg.norm_place == "after" else norm(cfg, weights, first, x)
        y = attention(cfg, weights, name + ".attn", y, drop)
        y = norm(cfg, weights, first, y) if cfg.norm_place == "after" else y
        y = norm(cfg, weights, f"{name}.out_norm1", y) if cfg.norm_place == "both" else y
        x = x + drop("residual", y)
        y = x if cfg.norm_place == "after" else norm(cfg, weights, second, x)
        if cfg.n_experts:
            y, losses = experts(cfg, weights, name + ".moe", y)
            aux = aux + losses
        else:
            y = mlp(cfg, weights, name + ".mlp", y)
        y = norm(cfg, weights, second, y) if cfg.norm_place == "after" else y
        y = norm(cfg, weights, f"{name}.out_norm2", y) if cfg.norm_place == "both" else y
        x = x + drop("residual", y)
    x = norm(cfg, weights, "norm", x)
    head = weights["wte.weight" if cfg.tied else "head.weight"]
    if cfg.objective == "mlm":
        x = masked_head(cfg, weights, x)
    logits = x @ head[:vocab_size].T
    if cfg.objective == "mlm" and cfg.bias:
        logits = logits + weights["mlm.bias"][:vocab_size]
    if cfg.logit_softcap:
        logits = cfg.logit_softcap * torch.tanh(logits / cfg.logit_softcap)
    return logits, aux


def cross_entropy(logits, targets):
    """Return the sum over all tokens with a target, in nats, ()."""
    has_target = targets >= 0
    logits = logits[has_target]
    targets = targets[has_target]
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(-1).log() - picked).sum()


def total_loss(cfg, weights, vocab_size, batches, drop=undropped):
    """Return the mean cross-entropy of all micro-batches [(x, y)], and what is minimized.

    What is minimized is the same plus the mean of the micro-batches' router losses.
    """
    loss = 0
    aux = 0
    for x, y in batches:
        logits, losses = forward(cfg, weights, vocab_size, x, drop)
        loss = loss + cross_entropy(logits, y) / (y >= 0).sum()
        aux = aux + losses
    return loss / len(batches), (loss + aux) / len(batches)


@torch.no_grad()
def val_loss(cfg, weights, vocab_size, windows):
    """Return the mean cross-entropy in nats per token, a float, of windows (n, T+1) of token ids.

    Experts with a capacity drop rows within a micro-batch.
    """
    windows = torch.as_tensor(windows).split(cfg.micro_batch)
    batches = [(part[:, :-1], part[:, 1:]) for part in windows]
    loss, _ = total_loss(cfg, weights, vocab_size, batches)
    return loss.item()

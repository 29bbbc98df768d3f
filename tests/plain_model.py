"""The whole model written out in plain tensor operations, from the papers: it shares no line with model.py
and moe.py. Weights come by the names of the model's parameters, at full size: {name: tensor}.

    forward      tokens -> logits, weighted balancing losses of the micro-batch
    total_loss   what a step minimizes, over its micro-batches
    val_loss     mean cross-entropy of windows of text, without gradients
"""
import dataclasses
import math

import torch
from test_moe import loop_over_tokens


def undropped(place, x):
    return x


def norm(cfg, w, name, x):
    gain = w[name + ".weight"]
    if cfg.norm == "rms":  # arXiv:1910.07467
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain
    mean = x.mean(-1, keepdim=True)
    y = (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-5) * gain
    return y + w[name + ".bias"] if cfg.bias else y


def linear(cfg, w, name, x):
    y = x @ w[name + ".weight"].T
    return y + w[name + ".bias"] if cfg.bias else y


def turned(x, base):
    """RoPE: x (B, T, D); pair (x_i, x_{i+D/2}) of position t is turned by the angle t * base^(-2i/D)."""
    T, half = x.size(1), x.size(2) // 2
    angle = torch.tensor([[t * base ** (-2 * i / x.size(2)) for i in range(half)] for t in range(T)],
                         dtype=torch.float64)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def attention(cfg, w, name, x, drop):  # x (B, T, C)
    T, D, heads = x.size(1), cfg.n_embd // cfg.n_head, []
    q, k, v = (linear(cfg, w, f"{name}.{which}", x).split(D, -1) for which in ("wq", "wk", "wv"))
    for h in range(cfg.n_head):
        g = h // (cfg.n_head // cfg.n_kv_head)  # head h shares this key/value head
        query, key = (turned(t, cfg.rope_base) if cfg.pos == "rope" else t for t in (q[h], k[g]))
        score = query @ key.transpose(1, 2) / math.sqrt(D)  # (B, T, T)
        sees = torch.ones(T, T) if cfg.objective == "mlm" else torch.ones(T, T).tril()  # no later one
        weight = torch.where(sees.bool(), score.exp(), 0)
        heads.append(drop("attention", weight / weight.sum(-1, keepdim=True)) @ v[g])
    return linear(cfg, w, name + ".wo", torch.cat(heads, -1))


def activation(cfg, gate, up):
    if cfg.mlp == "swiglu":  # arXiv:2002.05202
        return gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3)  # GELU, arXiv:1606.08415, section 2
    return gate / 2 * (1 + torch.tanh(inner))


def mlp(cfg, w, name, x):
    up = linear(cfg, w, name + ".w3", x) if cfg.mlp == "swiglu" else None
    return linear(cfg, w, name + ".w2", activation(cfg, linear(cfg, w, name + ".w1", x), up))


def experts(cfg, w, name, x):
    """x (B, T, C) -> the same; the weighted balancing losses of this micro-batch."""
    w1, w2, w3 = (w.get(f"{name}.{matrix}") for matrix in ("w1", "w2", "w3"))

    def expert(i, row):
        return w2[i] @ activation(cfg, w1[i] @ row, None if w3 is None else w3[i] @ row)
    y, aux, z, *_ = loop_over_tokens(
        x.flatten(0, 1), w[name + ".router.weight"], expert, cfg.top_k, cfg.router,
        w.get(name + ".router.bias"), cfg.capacity_factor, cfg.drop_policy,
        (lambda row: mlp(cfg, w, name + ".shared", row)) if cfg.n_shared_experts else None)
    return y.view_as(x), cfg.aux_coef * aux + cfg.z_coef * z


def forward(cfg, w, vocab_size, tokens, drop=undropped):
    """tokens (B, T) -> logits (B, T, vocab_size), weighted balancing losses. drop(place, x): what dropout
    does, at each of its places."""
    x, balance = w["wte.weight"][tokens], torch.zeros((), dtype=torch.float64)
    if cfg.pos == "learned":
        x = x + w["wpe.weight"][:tokens.size(1)]
    x = drop("embedding", x)
    for i in range(cfg.n_layer):
        name = f"blocks.{i}"
        x = x + drop("residual", attention(cfg, w, name + ".attn", norm(cfg, w, name + ".norm1", x), drop))
        y = norm(cfg, w, name + ".norm2", x)
        if cfg.n_experts:
            y, losses = experts(cfg, w, name + ".moe", y)
            balance = balance + losses
        else:
            y = mlp(cfg, w, name + ".mlp", y)
        x = x + drop("residual", y)
    x, head, bias = norm(cfg, w, "norm", x), w["wte.weight" if cfg.tied else "head.weight"], 0
    if cfg.objective == "mlm":  # arXiv:1810.04805; google-research/bert, get_masked_lm_output
        x = norm(cfg, w, "mlm.norm", activation(dataclasses.replace(cfg, mlp="gelu"),
                                                linear(cfg, w, "mlm.dense", x), None))
        bias = w["mlm.bias"][:vocab_size] if cfg.bias else 0
    return x @ head[:vocab_size].T + bias, balance


def cross_entropy(logits, targets):
    """-> () the sum over all tokens with a target, in nats"""
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(-1).log() - picked).sum()


def total_loss(cfg, w, vocab_size, batches, drop=undropped):
    """-> the mean cross-entropy of all micro-batches [(x, y)], and what is minimized: the same plus the mean
    of their balancing losses."""
    loss = balance = 0
    for x, y in batches:
        logits, losses = forward(cfg, w, vocab_size, x, drop)
        loss, balance = loss + cross_entropy(logits, y) / (y >= 0).sum(), balance + losses
    return loss / len(batches), (loss + balance) / len(batches)


@torch.no_grad()
def val_loss(cfg, w, vocab_size, windows):
    """windows (n, T+1) of token ids -> mean cross-entropy in nats per token, a float. Experts with a capacity
    drop rows within a micro-batch."""
    batches = [(part[:, :-1], part[:, 1:]) for part in torch.as_tensor(windows).split(cfg.micro_batch)]
    return total_loss(cfg, w, vocab_size, batches)[0].item()

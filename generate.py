"""Text from a model, token by token: a cache of keys and values, and sampling.

    generate      continue a list of tokens
    stream        the same, token by token
    next_logits   one forward through all stages
    sample_token  draw a token from logits
"""
import contextlib
import math

import torch

from parallel import gather_rows
from pipeline import Ring, is_last_stage


class Cache:
    """Keys and values of the positions so far, per attention layer, (B, g, length, D) each.

    seen: how many tokens of the list that stream() continues the model has already read.
    """

    def __init__(self):
        self.seen = 0
        self.clear()

    def clear(self):
        """Forget all keys and values."""
        self.length = 0
        self.kv = {}

    def append(self, layer, k, v):
        """Add k, v (B, g, T, D) of new positions. Return all k, v, (B, g, length + T, D) each."""
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k = torch.cat([old_k, k], dim=2)
            v = torch.cat([old_v, v], dim=2)
        self.kv[layer] = k, v
        return k, v


@torch.no_grad()
def next_logits(model, tokens, cache):
    """Return the logits (vocab,) of the first copy's last position, fp32, on every rank's host.

    tokens (copies, t) int64 go through all stages. The last stage sends the logits to all ranks,
    from device to device: NCCL sends nothing that is in the host's memory.
    """
    logits = torch.empty(model.vocab_size, device=tokens.device)

    def forward(i, chunk, hidden):
        out, _ = model(tokens, hidden=hidden, cache=cache, chunk=chunk)
        if is_last_stage(model, chunk):
            # V/tp logits from each rank to all, over tp
            row = gather_rows(out[tokens.size(1) - 1], model.mesh.tp)  # (local_vocab,) -> (V,)
            logits.copy_(row[:model.vocab_size])
        return out

    Ring(model, tokens.numel()).walk(1, forward)
    cache.length += tokens.size(1)
    # vocab fp32 from the last stage to all, over pp
    return model.mesh.pp.broadcast(logits, model.mesh.pp.size - 1).cpu()


@torch.no_grad()
def stream(model, tokens, max_new_tokens, cache, *, temperature, top_k, rng):
    """Append up to max_new_tokens to tokens, a list of int, and yield each of them.

    Temperature 0 takes the likeliest token; top_k keeps the k likeliest. cache: a Cache, new or
    from an earlier call on the same list. Tokens that the caller has appended since then are read
    first. When the window is full, the cache is rebuilt from the last seq_len / 2 tokens. All ranks
    call this together.
    """
    device = next(model.parameters()).device
    window = model.cfg.seq_len
    # One token cannot be split over the tp ranks, so they run `copies` copies of the sequence.
    copies = model.mesh.tp.size
    for _ in range(max_new_tokens):
        new = tokens[cache.seen:][-window:]
        if cache.length + len(new) > window:
            cache.clear()
            new = tokens[-max(1, window // 2):]
        cache.seen = len(tokens)
        x = torch.tensor([new] * copies, device=device)  # (tp, t)
        logits = next_logits(model, x, cache)
        tokens.append(sample_token(logits, temperature, top_k, rng))
        yield tokens[-1]


def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """Return a list of int: tokens, followed by max_new_tokens new ones. See stream().

    A compiled model runs in eager mode, because shapes change with every token.
    """
    rng = torch.Generator("cpu").manual_seed(seed)
    eager = contextlib.nullcontext()
    if model.cfg.compile:
        eager = torch.compiler.set_stance("force_eager")
    tokens = list(tokens)
    was_training = model.training
    model.eval()
    with eager:
        for _ in stream(model, tokens, max_new_tokens, Cache(), temperature=temperature,
                        top_k=top_k, rng=rng):
            pass
    model.train(was_training)
    return tokens


def sample_token(logits, temperature, top_k, rng):
    """Draw one token id from logits (vocab,)."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))

"""One optimizer step's forwards and backwards: a plain loop on one stage, 1F1B over several.

1F1B (PipeDream-flush, arXiv:2104.04473, figure 4): 4 stages, 6 micro-batches, Fi and Bi are forward and
backward of micro-batch i:

    stage 0  F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
    stage 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
    stage 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
             warm-up         steady                 cool-down

A stage keeps at most (stages - stage) micro-batches of activations, however many there are.
"""
import contextlib
import itertools
import math
import zlib

import torch
import torch.distributed as dist

from parallel import gather_rows, untimed

# -----------------------------------------------------------------------------
# stages

def stage_layers(cfg, pp):
    """-> [(first, last + 1)] blocks of each of pp stages. ValueError: --pp-layers does not fit, or a stage
    would be empty."""
    if cfg.n_layer < pp:
        raise ValueError(f"n-layer {cfg.n_layer} is less than pp {pp}, a stage would be empty; "
                         f"try --pp {cfg.n_layer}")
    counts = _balance(cfg.n_layer, pp)
    if cfg.pp_layers:
        tried, asked = ",".join(map(str, counts)), cfg.pp_layers.split(",")
        counts = [int(c) if c.strip().isdecimal() else -1 for c in asked]
        if len(counts) != pp or sum(counts) != cfg.n_layer or min(counts) < 1:
            raise ValueError(f"--pp-layers {cfg.pp_layers} must be {pp} counts of at least 1 that sum to "
                             f"n-layer {cfg.n_layer}; try --pp-layers {tried}")
    ends = list(itertools.accumulate(counts))
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _balance(n_layer, pp):
    """-> number of blocks of each stage, so that the largest stage is as small as possible. Embedding and
    head count as a block each."""
    order = sorted(range(pp), key=lambda s: -min(s, pp - 1 - s))  # the middle first, the ends last
    inner, left, counts = order[:-2], n_layer - pp, [1] * pp
    for s in inner[:left]:  # up to the load of the ends
        counts[s] += 1
    left = max(0, left - len(inner))
    for i, s in enumerate(order):
        counts[s] += left // pp + (i < left % pp)
    return counts


class Link:
    """Point-to-point messages with the stages before and after: (n, C) activations and their gradients."""

    def __init__(self, model, tokens, timers=untimed):  # tokens: B*T of the micro-batch
        weight, axis = next(model.parameters()), model.mesh.pp
        self.axis, self.timers = axis, timers
        shape = tokens // model.mesh.tp.size, model.cfg.n_embd  # (n, C)
        self.new = lambda: torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.prev = axis.ranks[axis.rank - 1] if axis.rank > 0 else None
        self.next = axis.ranks[axis.rank + 1] if axis.rank < axis.size - 1 else None

    def send_recv(self, peer, send=None, receive=False):
        """Send to and receive from one neighbour in one batch: one after the other, two neighbours could wait
        for each other. peer None: there is no neighbour. -> what was received, or None"""
        if peer is None:
            return None
        received = self.new() if receive else None
        ops = []
        if send is not None:
            self.axis.record("send", send, send.numel() * send.element_size())
            ops.append(dist.P2POp(dist.isend, send.contiguous(), peer, self.axis.group))  # n*C to a neighbour
        if receive:
            self.axis.record("receive", received)
            ops.append(dist.P2POp(dist.irecv, received, peer, self.axis.group))  # n*C from it
        with self.timers("pipeline"):
            for work in dist.batch_isend_irecv(ops):  # over pp
                work.wait()
        return received


def dropout_seeds(cfg, mesh, number, n):
    """-> the seeds of this rank's n micro-batches in step `number`; none without dropout. Each is a function
    of (seed, step, micro-batch, stage, tp rank): there is no generator state to save."""
    if cfg.dropout == 0:
        return []
    first = mesh.dp.rank * n
    return [zlib.crc32(f"{cfg.seed}/{number}/{micro}/{mesh.pp.rank}/{mesh.tp.rank}".encode())
            for micro in range(first, first + n)]


def forward_backward(model, dp, batches, tokens, loss_scale=None, before_forward=lambda i: None):
    """All micro-batches of one step. batches: [(x, y)], (B, T) int64 each. tokens: of the whole global batch,
    the one division of the loss. loss_scale: () tensor, fp16 only. before_forward(i) is called ahead of each
    micro-batch's forward (it seeds dropout).
    -> this dp rank's part of the mean loss, () in at least fp32: the same on its tp ranks, zero on all stages
    except the last."""
    n, pp, timers = len(batches), model.mesh.pp, dp.timers
    weight, link = next(model.parameters()), Link(model, batches[0][0].numel(), dp.timers)
    loss = torch.zeros((), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    in_flight = []  # oldest first: (input, output, balancing losses) of micro-batches without their backward
    n_backward = 0

    def forward(i, hidden):
        nonlocal loss
        before_forward(i)
        if hidden is not None:
            hidden.requires_grad_()
        with timers("forward"):
            out, aux = model(*batches[i], hidden)
        if model.is_last:
            out = out / tokens  # the one division
            loss = loss + out.detach()
        in_flight.append((hidden, out, aux / (n * model.mesh.dp.size)))  # a mean over micro-batches
        return out.detach()

    def backward(grad):
        nonlocal n_backward
        n_backward += 1
        dp.is_last_microbatch = n_backward == n  # only the last backward completes the sums
        hidden, out, aux = in_flight.pop(0)
        outputs, grads = [out], [loss_scale if model.is_last else grad]
        if aux.requires_grad:
            outputs = [out, aux]
            grads = [*grads, None if loss_scale is None else loss_scale.to(aux.dtype)]
        with timers("backward"):
            torch.autograd.backward(outputs, grads)
        return None if hidden is None else hidden.grad

    num_warmup = min(pp.size - pp.rank - 1, n)
    for i in range(num_warmup):  # warm-up: fill the stages behind this one
        out = forward(i, link.send_recv(link.prev, receive=True))
        link.send_recv(link.next, send=out)
    if n > num_warmup:
        hidden = link.send_recv(link.prev, receive=True)
    for i in range(num_warmup, n):  # steady: one forward, one backward
        out = forward(i, hidden)
        grad = link.send_recv(link.next, send=out, receive=True)
        grad = backward(grad)
        hidden = link.send_recv(link.prev, send=grad, receive=i < n - 1)
    for _ in range(num_warmup):  # cool-down: the backwards that are left
        grad = backward(link.send_recv(link.next, receive=True))
        link.send_recv(link.prev, send=grad)
    return loss


@torch.no_grad()
def forward_only(model, batches):
    """-> () the sum of the cross-entropy over all tokens of batches; zero on all stages except the last."""
    weight = next(model.parameters())
    total = torch.zeros((), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    for x, y in batches:
        link = Link(model, x.numel())
        out, _ = model(x, y, link.send_recv(link.prev, receive=True))
        if model.is_last:
            total += out
        link.send_recv(link.next, send=out)
    return total


@torch.no_grad()
def next_logits(model, tokens, cache):
    """tokens (copies, T) int64 -> (vocab,) fp32 on every rank's host: the logits of the first copy's last
    position, through all stages and then from the last stage to all. cache: a Cache."""
    link, pp = Link(model, tokens.numel()), model.mesh.pp
    out, _ = model(tokens, hidden=link.send_recv(link.prev, receive=True), cache=cache)
    if model.is_last:
        logits = gather_rows(out[tokens.size(1) - 1], model.mesh.tp)  # (v,) -> (V,)
        logits = logits[:model.vocab_size].float().cpu()
    else:
        link.send_recv(link.next, send=out)
        logits = torch.empty(model.vocab_size)
    return pp.broadcast(logits, pp.size - 1)  # vocab fp32 from the last stage, over pp


# -----------------------------------------------------------------------------
# generation

class Cache:
    """Keys and values of the positions so far, per attention layer, (B, g, length, D) each."""

    def __init__(self):
        self.length, self.kv = 0, {}

    def append(self, layer, k, v):
        """k, v (B, g, T, D) of new positions -> those of all positions, (B, g, length + T, D) each."""
        if layer in self.kv:
            past = self.kv[layer]
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(past, (k, v), strict=True))
        self.kv[layer] = k, v
        return k, v


@torch.no_grad()
def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """Continue tokens (list of int) by max_new_tokens -> the longer list. temperature 0 takes the likeliest
    token; top_k keeps the k likeliest. When the window is full, the cache is rebuilt from the last
    seq_len / 2 tokens. All ranks call this together. A compiled model runs in eager mode, because shapes
    change with every token."""
    with torch.compiler.set_stance("force_eager") if model.cfg.compile else contextlib.nullcontext():
        rng = torch.Generator("cpu").manual_seed(seed)
        was_training, cache, tokens = model.training, Cache(), list(tokens)
        model.eval()
        device = next(model.parameters()).device
        copies = model.mesh.tp.size  # one token cannot be split over tp ranks: run tp copies of the sequence
        new = tokens[-model.cfg.seq_len:]
        for _ in range(max_new_tokens):
            if cache.length + len(new) > model.cfg.seq_len:
                cache, new = Cache(), tokens[-max(1, model.cfg.seq_len // 2):]
            x = torch.tensor([new] * copies, device=device)  # (tp, T)
            new = [sample_token(next_logits(model, x, cache), temperature, top_k, rng)]
            tokens += new
        model.train(was_training)
    return tokens


def sample_token(logits, temperature, top_k, rng):
    """logits (vocab,) -> one token id drawn from them."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))

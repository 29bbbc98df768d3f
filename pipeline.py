"""One optimizer step's forwards and backwards: a plain loop on one stage, 1F1B over several.

1F1B (PipeDream-flush, arXiv:2104.04473, figure 4): 4 stages, 6 micro-batches, Fi and Bi are forward and
backward of micro-batch i:

    stage 0  F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
    stage 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
    stage 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
             warm-up         steady                 cool-down

A stage keeps at most (stages - stage) micro-batches of activations, however many there are.
Interleaved (section 2.2 there, --pp-chunks v): a rank holds v of p * v smaller stages, so ranks idle for
(p - 1) / (v m) of the work of m micro-batches, and v times as many messages travel.
"""
import contextlib
import functools
import itertools
import math
import zlib

import torch
import torch.distributed as dist

from parallel import gather_rows, untimed

# -----------------------------------------------------------------------------
# stages

def stage_layers(cfg, stages):
    """-> [(first, last + 1)] blocks of each stage. ValueError: --pp-layers does not fit, or a stage would be
    empty."""
    if cfg.n_layer < stages:
        p, v = stages // cfg.pp_chunks, cfg.pp_chunks
        fix = f"--pp-chunks {cfg.n_layer // p}" if cfg.n_layer >= p else f"--pp {cfg.n_layer}"
        raise ValueError(f"n-layer {cfg.n_layer} is less than pp {p}{f' * pp-chunks {v}' * (v > 1)}, a stage "
                         f"would be empty; try {fix}")
    counts = _balance(cfg.n_layer, stages)
    if cfg.pp_layers:
        tried, asked = ",".join(map(str, counts)), cfg.pp_layers.split(",")
        counts = [int(c) if c.strip().isdecimal() else -1 for c in asked]
        if len(counts) != stages or sum(counts) != cfg.n_layer or min(counts) < 1:
            raise ValueError(f"--pp-layers {cfg.pp_layers} must be {stages} counts of at least 1 that sum to "
                             f"n-layer {cfg.n_layer}; try --pp-layers {tried}")
    ends = list(itertools.accumulate(counts))
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def rank_layers(cfg, pp):
    """-> [(first, last + 1)] blocks of this rank's stages: rank, rank + pp, rank + 2 pp, ..."""
    return stage_layers(cfg, pp.size * cfg.pp_chunks)[pp.rank::pp.size]


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


# -----------------------------------------------------------------------------
# who does what when

def schedule(rank, p, v, m, backward=True):
    """-> [("F" or "B", micro-batch, chunk)]: what a rank of p does, in this order, with v chunks and m
    micro-batches. They pass a chunk in groups of p: then the first has come around to the next chunk."""
    order = [(first + i, chunk) for first in range(0, m, p) for chunk in range(v) for i in range(p)]
    forwards = [("F", i, chunk) for i, chunk in order]
    backwards = [("B", i, v - 1 - chunk) for i, chunk in order] if backward else []
    # of several chunks twice as many, so that none waits for a message on its way
    num_warmup = (v - 1) * p + (p - rank - 1) * (2 if v > 1 else 1)
    steady = itertools.chain(*itertools.zip_longest(forwards[num_warmup:], backwards))
    return [op for op in (*forwards[:num_warmup], *steady) if op and op[1] < m]  # the last group may be less


@functools.cache
def timetable(p, v, m, backward=True):
    """-> {time: [the op of each rank that ends then, or None]}, first to last, if a forward takes one unit of
    time, a backward two, and messages none."""
    todo = [schedule(rank, p, v, m, backward)[::-1] for rank in range(p)]  # the next op is the last
    ends, free, table = {}, [0] * p, {}  # ends: (kind, micro-batch, stage): when that was done
    while left := sum(map(len, todo)):
        for rank, ops in enumerate(todo):
            while ops:
                kind, i, chunk = ops[-1]
                stage, step = chunk * p + rank, 1 if kind == "F" else -1
                if 0 <= stage - step < p * v and (kind, i, stage - step) not in ends:
                    break
                begin = max(free[rank], ends.get((kind, i, stage - step), 0))
                free[rank] = ends[kind, i, stage] = begin + (1 if kind == "F" else 2)
                table.setdefault(free[rank], [None] * p)[rank] = ops.pop()
        assert sum(map(len, todo)) < left, f"ranks wait for each other: {[ops[-1:] for ops in todo]}"
    return dict(sorted(table.items()))


class Ring:
    """Walks a timetable on this rank. Chunk c of rank r is stage c p + r, so messages, (n, C) activations and
    their gradients, go around a ring of ranks. All that was just made is sent and received in one batch: with
    two ranks previous and next are one peer, and messages are told apart by nothing but their order."""

    def __init__(self, model, tokens, timers=untimed):  # tokens: B*T of the micro-batch, under cp B*t
        weight, self.axis, self.timers = next(model.parameters()), model.mesh.pp, timers
        self.new = lambda: weight.new_empty(tokens // model.mesh.tp.size, model.cfg.n_embd)  # (n, C)
        self.chunks, self.inbox = len(model.chunks), {}  # inbox: op: (what came for it, the batch's number)
        self.batches, self.begun = [], 0  # those not waited for, oldest first; how many there were in all

    def walk(self, m, run, backward=True):
        """The timetable of m micro-batches. run(kind, micro-batch, chunk, what it received or None) does an
        op of this rank -> what it sends. Batches are waited for in order, up to the one that an op needs, so
        a rank only waits for others to reach a time that it has passed: there is no circle of waits."""
        for now in timetable(self.axis.size, self.chunks, m, backward).values():
            op = now[self.axis.rank]
            received, batch = self.inbox.pop(op, (None, 0))
            self.wait(batch)
            self.exchange(now, run(*op, received) if op else None)
            self.wait(self.begun - 2 * self.axis.size)  # else a rank could run ahead and fill its memory
        self.wait(self.begun)

    def exchange(self, now, out):
        """Start to send out, what this rank's op gave, and to receive. now: the ops that end, by rank."""
        axis, size, ops = self.axis, self.axis.size, []
        for sender, (kind, i, chunk) in ((r, op) for r, op in enumerate(now) if op is not None):
            stage = chunk * size + sender + (1 if kind == "F" else -1)  # where it goes
            receiver = stage % size
            if 0 <= stage < size * self.chunks and sender == axis.rank:
                axis.record("send", out, out.numel() * out.element_size())
                peer = axis.ranks[receiver]
                ops.append(dist.P2POp(dist.isend, out.contiguous(), peer, axis.group))  # n*C to a neighbour
            elif 0 <= stage < size * self.chunks and receiver == axis.rank:
                received = self.new()
                self.inbox[kind, i, stage // size] = received, self.begun + 1
                axis.record("receive", received)
                ops.append(dist.P2POp(dist.irecv, received, axis.ranks[sender], axis.group))  # n*C from it
        if ops:
            self.batches.append((dist.batch_isend_irecv(ops), ops))  # over pp; ops keep the tensors alive
            self.begun += 1

    def wait(self, batch):
        """Until all batches up to this number have arrived."""
        while self.begun - len(self.batches) < batch:
            with self.timers("pipeline"):
                for work in self.batches.pop(0)[0]:
                    work.wait()


def is_last(model, chunk):
    """Whether this chunk of the rank's is the last stage, which has the head."""
    return model.chunks[chunk][1] == model.cfg.n_layer


def dropout_seeds(cfg, mesh, number, n, chunk=0):
    """-> the seeds of this rank's n micro-batches in step `number`; none without dropout. Each is a function
    of (seed, step, micro-batch, stage, cp and tp rank): there is no generator state to save."""
    if cfg.dropout == 0:
        return []
    first, stage = mesh.dp.rank * n, chunk * mesh.pp.size + mesh.pp.rank
    part = mesh.cp.rank * mesh.tp.size + mesh.tp.rank  # of a micro-batch's tokens
    return [zlib.crc32(f"{cfg.seed}/{number}/{micro}/{stage}/{part}".encode())
            for micro in range(first, first + n)]


def forward_backward(model, dp, batches, tokens, loss_scale=None, before_forward=lambda i, chunk: None):
    """All micro-batches of one step. batches: [(x, y)], (B, T) int64 each. tokens: the trained ones of the
    whole global batch, an int or () on the device: the one division of the loss. loss_scale: () tensor, fp16
    only. before_forward(i, chunk) is called ahead of each micro-batch's forward (it seeds dropout).
    -> this rank's part of the mean loss, () in at least fp32: the same on all tp ranks, zero on all stages
    except the last."""
    n, timers, weight = len(batches), dp.timers, next(model.parameters())
    loss = torch.zeros((), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    in_flight = {}  # (micro-batch, chunk) without its backward: (input, output, balancing losses)
    n_backward = [0] * len(model.chunks)

    def forward(i, chunk, hidden):
        nonlocal loss
        before_forward(i, chunk)
        if hidden is not None:
            hidden.requires_grad_()
        with timers("forward"):
            out, aux = model(*batches[i], hidden, chunk=chunk)
        if is_last(model, chunk):
            out = out / tokens  # the one division
            loss = loss + out.detach()
        in_flight[i, chunk] = hidden, out, aux / (n * model.mesh.dp.size)  # a mean over micro-batches
        return out.detach()

    def backward(i, chunk, grad):
        n_backward[chunk] += 1
        dp.is_last_microbatch = n_backward[chunk] == n  # only a chunk's last backward completes its sums
        hidden, out, aux = in_flight.pop((i, chunk))
        outputs, grads = [out], [loss_scale if is_last(model, chunk) else grad]
        if aux.requires_grad:
            outputs = [out, aux]
            grads = [*grads, None if loss_scale is None else loss_scale.to(aux.dtype)]
        with timers("backward"):
            torch.autograd.backward(outputs, grads)
        return None if hidden is None else hidden.grad

    Ring(model, batches[0][0].numel(), timers).walk(
        n, lambda kind, *op: forward(*op) if kind == "F" else backward(*op))
    return loss


@torch.no_grad()
def forward_only(model, batches):
    """-> () the sum of the cross-entropy over batches' trained tokens; zero on stages before the last."""
    weight = next(model.parameters())
    total = torch.zeros((), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))

    def forward(_, i, chunk, hidden):
        out, _ = model(*batches[i], hidden, chunk=chunk)
        if is_last(model, chunk):
            total.add_(out)
        return out

    Ring(model, batches[0][0].numel()).walk(len(batches), forward, backward=False)
    return total


@torch.no_grad()
def next_logits(model, tokens, cache):
    """tokens (copies, T) int64 -> (vocab,) fp32 on every rank's host: the logits of the first copy's last
    position, through all stages and then from the last stage to all. cache: a Cache."""
    logits = torch.empty(model.vocab_size)

    def forward(_, i, chunk, hidden):
        out, _ = model(tokens, hidden=hidden, cache=cache, chunk=chunk)
        if is_last(model, chunk):
            row = gather_rows(out[tokens.size(1) - 1], model.mesh.tp)  # (v,) -> (V,)
            logits.copy_(row[:model.vocab_size])
        return out

    Ring(model, tokens.numel()).walk(1, forward, backward=False)
    cache.length += tokens.size(1)
    return model.mesh.pp.broadcast(logits, model.mesh.pp.size - 1)  # vocab fp32 from the last stage, over pp


# -----------------------------------------------------------------------------
# generation

class Cache:
    """Keys and values of the positions so far, per attention layer, (B, g, length, D) each. seen: how many
    tokens of the list that stream() continues came before its next call."""

    def __init__(self):
        self.length, self.seen, self.kv = 0, 0, {}

    def append(self, layer, k, v):
        """k, v (B, g, T, D) of new positions -> those of all positions, (B, g, length + T, D) each."""
        if layer in self.kv:
            past = self.kv[layer]
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(past, (k, v), strict=True))
        self.kv[layer] = k, v
        return k, v


@torch.no_grad()
def stream(model, tokens, max_new_tokens, temperature, top_k, rng, cache):
    """Append up to max_new_tokens to tokens (list of int), and yield each. temperature 0 takes the likeliest
    token; top_k keeps the k likeliest. cache: a Cache, new or of an earlier call on the same list; what the
    caller appends in between, it reads first. When the window is full, the cache is rebuilt from the last
    seq_len / 2 tokens. All ranks call this together."""
    device, window = next(model.parameters()).device, model.cfg.seq_len
    copies = model.mesh.tp.size  # one token cannot be split over tp ranks: run tp copies of the sequence
    for _ in range(max_new_tokens):
        new = tokens[cache.seen:][-window:]
        if cache.length + len(new) > window:
            cache.length, cache.kv, new = 0, {}, tokens[-max(1, window // 2):]
        cache.seen = len(tokens)
        x = torch.tensor([new] * copies, device=device)  # (tp, T)
        tokens.append(sample_token(next_logits(model, x, cache), temperature, top_k, rng))
        yield tokens[-1]


def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """Continue tokens (list of int) by max_new_tokens -> the longer list. See stream(). A compiled model runs
    in eager mode, because shapes change with every token."""
    with torch.compiler.set_stance("force_eager") if model.cfg.compile else contextlib.nullcontext():
        rng = torch.Generator("cpu").manual_seed(seed)
        was_training, tokens = model.training, list(tokens)
        model.eval()
        for _ in stream(model, tokens, max_new_tokens, temperature, top_k, rng, Cache()):
            pass
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

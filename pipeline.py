"""The forwards and backwards of one optimizer step: a plain loop on one stage, 1F1B over several.

1F1B (PipeDream-flush, arXiv:2104.04473, figure 4), 4 stages and 6 micro-batches. Fi and Bi are the
forward and the backward of micro-batch i; a backward takes about twice as long as it is drawn:

    stage 0  F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
    stage 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
    stage 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

Stage s of pp keeps the activations of at most pp - s micro-batches. With --pp-chunks v (section 2.2
of that paper) a rank holds v smaller stages: chunk c of rank r is stage c * pp + r. Ranks then idle
for (pp - 1) / (v n) of n micro-batches' time, and send v times as often.
"""
import contextlib
import functools
import itertools
import math
import zlib
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from interface.layout import stage_layers
from parallel import gather_rows

# One step

def forward_backward(model, data_parallel, batches, n_trained, loss_scale=None, seeds=(),
                     set_seed=torch.manual_seed):
    """Do all micro-batches of a step -> this rank's part of the mean loss, () in at least fp32.

    batches: [(x, y)] or, with --doc-mask, [(x, y, places)], (B, t) int64 each. n_trained: the
    trained tokens of the whole global batch. loss_scale: fp16's, (). seeds: of dropout_seeds(), or
    () to set none. The loss is the same on all tp ranks, and zero on all stages except the last.
    """
    if model.mesh.pp.size > 1:
        return several_stages(model, data_parallel, batches, n_trained, loss_scale, seeds, set_seed)
    total = 0
    for i, (x, y, *places) in enumerate(batches):
        if seeds:
            set_seed(seeds[0][i])
        with data_parallel.timers("forward"):
            loss, router_loss = model(x, y, *places)  # a sum over tokens; of the router a mean
        mean_part = loss / n_trained  # the one division
        total = total + mean_part.detach()
        # The one exception: the router's loss is a mean over each micro-batch, see MoE.route.
        router_part = router_loss / (len(batches) * model.mesh.dp.size)
        # In the last micro-batch, ddp.py's hooks start a bucket's sum when it has all gradients.
        data_parallel.completes_grads = i == len(batches) - 1
        with data_parallel.timers("backward"):
            (mean_part + router_part).backward(loss_scale)  # its gradient; None is 1
    return total


def several_stages(model, data_parallel, batches, n_trained, loss_scale, seeds, set_seed):
    loss_part = zero_loss(model)
    waiting = {}  # (micro-batch, chunk): (input, output, router loss), until its backward

    def forward(i, chunk, hidden):  # -> what the next stage gets
        if seeds:
            set_seed(seeds[chunk][i])
        if hidden is not None:
            hidden.requires_grad_()  # its gradient goes to the previous stage
        with data_parallel.timers("forward"):
            out, router_loss = model(*batches[i], hidden=hidden, chunk=chunk)
        if is_last_stage(model, chunk):
            out = out / n_trained  # the one division
            loss_part.add_(out.detach())
        router_loss = router_loss / (len(batches) * model.mesh.dp.size)
        waiting[i, chunk] = hidden, out, router_loss
        return out.detach()

    def backward(i, chunk, grad):  # -> what the previous stage gets
        hidden, out, router_loss = waiting.pop((i, chunk))
        # The last backward of a chunk completes the sums of its gradients.
        data_parallel.completes_grads = i == len(batches) - 1
        outputs, grads = [out], [loss_scale if is_last_stage(model, chunk) else grad]
        if router_loss.requires_grad:
            outputs.append(router_loss)
            grads.append(loss_scale)
        with data_parallel.timers("backward"):
            torch.autograd.backward(outputs, grads)
        return None if hidden is None else hidden.grad

    Ring(model, batches[0][0].numel(), data_parallel.timers).walk(len(batches), forward, backward)
    return loss_part


@torch.no_grad()
def forward_only(model, batches):
    """The sum of the trained tokens' cross-entropy, (); zero on stages before the last."""
    total = zero_loss(model)

    def forward(i, chunk, hidden):
        out, _ = model(*batches[i], hidden=hidden, chunk=chunk)
        if is_last_stage(model, chunk):
            total.add_(out)
        return out

    Ring(model, batches[0][0].numel()).walk(len(batches), forward)
    return total


def zero_loss(model):
    weight = next(model.parameters())
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.zeros((), device=weight.device, dtype=dtype)


def is_last_stage(model, chunk):
    return model.chunks[chunk][1] == model.cfg.n_layer


def rank_layers(cfg, axis):
    """The blocks of this rank's stages, [(first, last + 1)]: stages rank, rank + pp, ..."""
    return stage_layers(cfg, axis.size * cfg.pp_chunks)[axis.rank::axis.size]


def dropout_seeds(cfg, mesh, step, n_micro_batches):
    """[[the seed of each micro-batch] of each chunk] on this rank: no state is saved."""
    first = mesh.dp.rank * n_micro_batches
    part = mesh.cp.rank * mesh.tp.size + mesh.tp.rank  # which of a micro-batch's tokens
    seeds = []
    for chunk in range(cfg.pp_chunks):
        stage = chunk * mesh.pp.size + mesh.pp.rank
        seeds.append([zlib.crc32(f"{cfg.seed}/{step}/{i}/{stage}/{part}".encode())
                      for i in range(first, first + n_micro_batches)])
    return seeds


# Who does what when

DURATION = {"F": 1, "B": 2}
DIRECTION = {"F": 1, "B": -1}  # where a result goes: to the next stage, or to the previous one


class Op(NamedTuple):
    """The forward ("F") or backward ("B") of one micro-batch through one chunk of a rank."""
    kind: str
    micro_batch: int
    chunk: int


def schedule(rank, pp, chunks, micro_batches, backward=True):
    """The Ops of one of pp ranks in order. Plain 1F1B, 2 ranks and 4 micro-batches:

        rank 0    F0 F1 B0 F2 B1 F3 B2 B3    (warmup 1)
        rank 1    F0 B0 F1 B1 F2 B2 F3 B3    (warmup 0)
    """
    order = []
    # Groups of pp micro-batches go through a chunk, then the next; `return` leaves out extra ones.
    for first in range(0, micro_batches, pp):
        for chunk in range(chunks):
            order += [(i, chunk) for i in range(first, first + pp)]
    forwards = [Op("F", i, chunk) for i, chunk in order]
    backwards = [Op("B", i, chunks - 1 - chunk) for i, chunk in order] if backward else []
    # One forward for each later rank; with several chunks two, so that messages can arrive.
    warmup = (chunks - 1) * pp + (pp - 1 - rank) * (1 if chunks == 1 else 2)
    # One of each in turn. As many backwards as the warm-up had forwards remain: the cool-down.
    steady = itertools.chain(*itertools.zip_longest(forwards[warmup:], backwards))
    ops = [*forwards[:warmup], *steady]
    return [op for op in ops if op is not None and op.micro_batch < micro_batches]


@functools.cache
def timetable(pp, chunks, micro_batches, backward=True):
    """{time: [the Op that ends then on each rank, or None]}; F takes 1, B takes 2, messages 0."""
    todo = [deque(schedule(r, pp, chunks, micro_batches, backward)) for r in range(pp)]
    free = [0] * pp  # when each rank has ended its latest Op
    ended = {}  # (kind, micro-batch, stage): when
    table = {}
    while any(todo):
        n_before = len(ended)
        for rank, ops in enumerate(todo):
            while ops:
                op = ops[0]
                stage = op.chunk * pp + rank
                before = stage - DIRECTION[op.kind]
                needed = op.kind, op.micro_batch, before
                if 0 <= before < pp * chunks and needed not in ended:
                    break  # It waits for its input: the next rank's turn.
                free[rank] = max(free[rank], ended.get(needed, 0)) + DURATION[op.kind]
                ended[op.kind, op.micro_batch, stage] = free[rank]
                table.setdefault(free[rank], [None] * pp)[rank] = ops.popleft()
        assert len(ended) > n_before, f"ranks wait for each other: {[list(q)[:1] for q in todo]}"
    return dict(sorted(table.items()))


def messages_between(ended_ops, chunks):
    """[(sender, receiver, the receiver's Op that waits for it)] when these Ops have ended."""
    pp = len(ended_ops)
    messages = []
    for sender, op in enumerate(ended_ops):
        if op is not None:
            stage = op.chunk * pp + sender + DIRECTION[op.kind]
            if 0 <= stage < pp * chunks:
                messages.append((sender, stage % pp, op._replace(chunk=stage // pp)))
    return messages


class Ring:
    """Walks a timetable on this rank, and sends and receives activations (n, C) and gradients.

    The times only order the calls. All messages of one time go in one batch: in NCCL, two ranks
    that both begin with a send would wait for each other. A rank waits for batches in order,
    counted from 1, and at time t for times up to t, so no circle of waits can arise.
    """

    def __init__(self, model, n_tokens, timers=contextlib.nullcontext):  # n_tokens: B*t
        self.axis = model.mesh.pp
        self.n_chunks = len(model.chunks)
        self.timers = timers
        self.like = next(model.parameters())  # for the dtype and device of messages
        self.shape = n_tokens // model.mesh.tp.size, model.cfg.n_embd
        self.inbox = {}  # Op: (the tensor that it waits for, the number of its batch)
        self.in_flight = deque()  # batches under way, oldest first; they keep their tensors alive
        self.started = 0

    def walk(self, micro_batches, forward, backward=None):
        """forward and backward(i, chunk, received or None) return what is sent on."""
        table = timetable(self.axis.size, self.n_chunks, micro_batches, backward is not None)
        for ended_ops in table.values():
            op = ended_ops[self.axis.rank]
            made = None
            if op is not None:
                run = forward if op.kind == "F" else backward
                made = run(op.micro_batch, op.chunk, self.receive(op))
            self.start_exchange(ended_ops, made)
            # It bounds the messages in memory. Any bound is safe; this one hides a warm-up.
            self.wait(may_remain=2 * self.axis.size)
        self.wait(may_remain=0)

    def receive(self, op):
        tensor, number = self.inbox.pop(op, (None, 0))  # 0: it waits for none
        self.wait(may_remain=self.started - number)
        return tensor

    def wait(self, may_remain):
        while len(self.in_flight) > may_remain:
            works, _ = self.in_flight.popleft()
            with self.timers("pipeline"):
                for work in works:
                    work.wait()

    def start_exchange(self, ended_ops, made):
        """Start all sends and receives of this rank at one time of the table. made: to send."""
        axis = self.axis
        batch = []
        for sender, receiver, op in messages_between(ended_ops, self.n_chunks):
            if sender == axis.rank:
                axis.calls.record(axis, "send", made, made.nbytes)
                # n*C to a neighbour, over pp
                batch.append(dist.P2POp(dist.isend, made.contiguous(), axis.ranks[receiver],
                                        axis.group))
            elif receiver == axis.rank:
                tensor = self.like.new_empty(self.shape)
                self.inbox[op] = tensor, self.started + 1
                axis.calls.record(axis, "receive", tensor)
                # n*C from a neighbour, over pp
                batch.append(dist.P2POp(dist.irecv, tensor, axis.ranks[sender], axis.group))
        if batch:
            self.in_flight.append((dist.batch_isend_irecv(batch), batch))
            self.started += 1


# Text from a model, token by token

class Cache:
    """Keys and values of the positions so far, per attention layer, (B, g, length, D) each."""

    def __init__(self):
        self.length = 0
        self.kv = {}

    def append(self, layer, k, v):
        """Add k, v (B, g, T, D) of new positions -> all k, v, (B, g, length + T, D) each."""
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k = torch.cat([old_k, k], dim=2)
            v = torch.cat([old_v, v], dim=2)
        self.kv[layer] = k, v
        return k, v


@torch.no_grad()
def next_logits(model, tokens, cache):
    """tokens (tp, t) -> fp32 logits (vocab,) of the last position, on every rank's host."""
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


def stream(model, tokens, max_new_tokens, *, temperature, top_k, rng):
    """Append up to max_new_tokens to tokens, a list of int, and yield each of them.

    The caller may put another token in the place of a new one. When the window is full, the cache
    is rebuilt from the last seq_len / 2 tokens. Temperature 0 takes the likeliest token. All ranks
    call this together.
    """
    device = next(model.parameters()).device
    window = model.cfg.seq_len
    cache = Cache()
    new = tokens[-window:]
    for _ in range(max_new_tokens):
        if cache.length + len(new) > window:
            cache = Cache()
            new = tokens[-max(1, window // 2):]
        # One token cannot be split over the tp ranks, so they run a copy of the sequence each.
        x = torch.tensor([new] * model.mesh.tp.size, device=device)  # (tp, t)
        logits = next_logits(model, x, cache)
        tokens.append(sample_token(logits, temperature, top_k, rng))
        yield tokens[-1]
        new = tokens[-1:]


def generate(model, tokens, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """tokens, a list of int, followed by max_new_tokens new ones: see stream()."""
    rng = torch.Generator("cpu").manual_seed(seed)
    eager = contextlib.nullcontext()
    if model.cfg.compile:
        eager = torch.compiler.set_stance("force_eager")  # shapes change with every token
    tokens = list(tokens)
    was_training = model.training
    model.eval()
    with eager:
        for _ in stream(model, tokens, max_new_tokens, temperature=temperature, top_k=top_k,
                        rng=rng):
            pass
    model.train(was_training)
    return tokens


def sample_token(logits, temperature, top_k, rng):
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=rng))

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
import torch
import torch.distributed as dist

from model import last_logits
from parallel import untimed


class Link:
    """Point-to-point messages with the stages before and after: (n, C) activations and their gradients."""

    def __init__(self, axis, shape, dtype, device, timers=untimed):
        self.axis, self.timers = axis, timers
        self.new = lambda: torch.empty(shape, dtype=dtype, device=device)
        self.prev = axis.ranks[axis.rank - 1] if axis.rank > 0 else None
        self.next = axis.ranks[axis.rank + 1] if axis.rank < axis.size - 1 else None

    def swap(self, peer, send=None, receive=False):
        """Send to and/or receive from one neighbour, at once: in two steps both could wait for the other."""
        if peer is None:
            return None
        got = self.new() if receive else None
        ops = []
        if send is not None:
            self.axis.record("send", send, send.numel() * send.element_size())
            ops.append(dist.P2POp(dist.isend, send.contiguous(), peer, self.axis.group))  # n*C to a neighbour
        if receive:
            self.axis.record("receive", got)
            ops.append(dist.P2POp(dist.irecv, got, peer, self.axis.group))  # n*C from it
        with self.timers("pipeline"):
            for work in dist.batch_isend_irecv(ops):  # over pp
                work.wait()
        return got


def forward_backward(model, dp, mesh, batches, tokens, scale=None, before=lambda i: None, timers=untimed):
    """All micro-batches of one step. batches: list of (x, y), (B, T) int64 each. tokens: of the whole global
    batch, the one division of the loss. scale: () tensor, fp16's loss scale. before(i): called ahead of each
    forward (dropout's seed).
    -> this rank's part of the mean loss: () fp32, zero but on the last stage."""
    n, stages, stage = len(batches), mesh.pp.size, mesh.pp.rank
    x, _ = batches[0]
    weight = next(model.parameters())
    link = Link(mesh.pp, (x.numel() // mesh.tp.size, model.cfg.n_embd), weight.dtype, weight.device, timers)
    loss = torch.zeros((), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    flying = []  # oldest first: (input, output, balancing losses) of micro-batches whose backward is to come
    done = 0

    def forward(i, hidden):
        nonlocal loss
        before(i)
        if hidden is not None:
            hidden.requires_grad_()
        with timers("forward"):
            out, aux = model(*batches[i], hidden)
        if model.is_last:
            out = out / tokens  # the one division
            loss = loss + out.detach()
        flying.append((hidden, out, aux / (n * mesh.dp.size)))  # balancing losses: mean of micro-batches
        return out.detach()

    def backward(grad):
        nonlocal done
        done += 1
        dp.last = done == n  # only the last backward completes the sums
        hidden, out, aux = flying.pop(0)
        ends, grads = [out], [scale if model.is_last else grad]
        if aux.requires_grad:
            ends, grads = [out, aux], [*grads, None if scale is None else scale.to(aux.dtype)]
        with timers("backward"):
            torch.autograd.backward(ends, grads)
        return None if hidden is None else hidden.grad

    warm = min(stages - stage - 1, n)
    for i in range(warm):  # warm-up: fill the stages behind me
        out = forward(i, link.swap(link.prev, receive=True))
        link.swap(link.next, send=out)
    if n > warm:
        hidden = link.swap(link.prev, receive=True)
    for i in range(warm, n):  # steady: one forward, one backward
        out = forward(i, hidden)
        grad = link.swap(link.next, send=out, receive=True)
        grad = backward(grad)
        hidden = link.swap(link.prev, send=grad, receive=i < n - 1)
    for _ in range(warm):  # cool-down: empty them
        grad = backward(link.swap(link.next, receive=True))
        link.swap(link.prev, send=grad)
    return loss


@torch.no_grad()
def forward_only(model, mesh, batches):
    """-> sum of the cross-entropy over all tokens of batches, zero but on the last stage: ()"""
    weight = next(model.parameters())
    total = torch.zeros((), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    for x, y in batches:
        link = Link(mesh.pp, (x.numel() // mesh.tp.size, model.cfg.n_embd), weight.dtype, weight.device)
        out, _ = model(x, y, link.swap(link.prev, receive=True))
        if model.is_last:
            total += out
        link.swap(link.next, send=out)
    return total


@torch.no_grad()
def next_logits(model, tokens, cache):
    """(copies, T) -> (vocab,) fp32 on every rank's host: through all stages, then from the last to all."""
    mesh, weight = model.mesh, next(model.parameters())
    link = Link(mesh.pp, (tokens.numel() // mesh.tp.size, model.cfg.n_embd), weight.dtype, weight.device)
    hidden = link.swap(link.prev, receive=True)
    if model.is_last:
        logits = last_logits(model, tokens, cache, hidden)
    else:
        link.swap(link.next, send=model(tokens, hidden=hidden, cache=cache)[0])
        logits = torch.empty(model.vocab_size)
    return mesh.pp.broadcast(logits, mesh.pp.size - 1)  # vocab fp32 from the last stage, over pp

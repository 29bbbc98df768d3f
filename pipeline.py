"""One optimizer step's forwards and backwards: a plain loop on one stage, 1F1B over several.

On one stage, one_stage() does forward and backward of one micro-batch after the other. It needs
only zero_loss() of the rest of this file. Over several stages the order is 1F1B.

1F1B (PipeDream-flush, arXiv:2104.04473, figure 4) with 4 stages and 6 micro-batches. Fi and Bi are
the forward and the backward of micro-batch i. For 2 stages docs/pipeline-schedules.md has a drawing
that is enough:

    stage 0  F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
    stage 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
    stage 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

Stage 0 warms up with three forwards, F0 to F2. Then, in the steady phase, forward and backward take
turns: F3 B0, F4 B1, F5 B2. B3 to B5 are its cool-down. F and B are drawn equally wide, though B
takes about twice as long.

Stage s of pp keeps the activations of at most pp - s micro-batches, however many there are. In
the interleaved schedule (section 2.2 of that paper, --pp-chunks v), each of the pp ranks holds v
smaller stages, its chunks: chunk c of rank r is stage c * pp + r. Then a rank idles for
(pp - 1) / (v n) of the time that n micro-batches take to compute, if pp divides n, and for a little
more if it does not. It sends about v times as many messages.

    forward_backward  all micro-batches of a step: one_stage, or several_stages with a Ring
    schedule          the order in which one rank does its forwards and backwards
    timetable         the schedules of all ranks, with times
    Ring              walks the timetable on one rank, and sends and receives
"""
import collections
import functools
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from config import draws_random_numbers
from ddp import untimed
from interface.layout import stage_layers

# -----------------------------------------------------------------------------
# One step

def nothing(i, chunk):
    """Do nothing before a forward."""


def forward_backward(model, data_parallel, batches, n_trained, loss_scale=None,
                     before_forward=nothing):
    """Do all micro-batches of one step, and return this rank's part of the mean loss.

    batches: [(x, y)] or, with --doc-mask, [(x, y, places)], each (B, t) int64. n_trained: the
    number of trained tokens in the whole global batch, an int or a () tensor; the cross-entropy is
    divided by this number, and by nothing else. loss_scale: a () tensor, for fp16 only; backward
    starts from it instead of from 1. before_forward(i, chunk) is called before each forward; it
    seeds dropout. The loss, () in at least fp32, is the same on all tp ranks, and zero on all
    stages except the last.
    """
    run = one_stage if model.mesh.pp.size == 1 else several_stages
    return run(model, data_parallel, batches, n_trained, loss_scale, before_forward)


def one_stage(model, data_parallel, batches, n_trained, loss_scale, before_forward):
    """Do the forward and the backward of each micro-batch in turn."""
    loss_part = zero_loss(model)  # this rank's part of the mean loss
    for i, (x, y, *places) in enumerate(batches):
        before_forward(i, 0)
        with data_parallel.timers("forward"):
            # The loss is a sum over x's tokens, the same on all tp ranks.
            loss, router_loss = model(x, y, *places)
        mean_part = loss / n_trained  # This is the one division.
        loss_part = loss_part + mean_part.detach()
        # The one exception: the router's loss, 0 without experts, is a mean over each micro-batch,
        # so it is divided by the number of micro-batches of the global batch.
        router_part = router_loss / (len(batches) * model.mesh.dp.size)
        # In the last micro-batch, the sum of a bucket starts as soon as its gradients are complete.
        is_last = i == len(batches) - 1
        data_parallel.announce_backward(completes_grads=is_last)
        with data_parallel.timers("backward"):
            # Without fp16 the loss scale is None, and backward starts from 1.
            (mean_part + router_part).backward(loss_scale)
    return loss_part


def several_stages(model, data_parallel, batches, n_trained, loss_scale, before_forward):
    """Do all micro-batches over several stages: a Ring calls forward and backward in order."""
    loss_part = zero_loss(model)
    awaiting_backward = {}  # (micro-batch, chunk): (input, output, router loss)
    backwards_done = [0] * len(model.chunks)

    def forward(i, chunk, hidden):
        """Return the next stage's input; on the last stage the loss, which nobody receives.

        hidden: the previous stage's output; None on the first.
        """
        before_forward(i, chunk)
        if hidden is not None:
            hidden.requires_grad_()  # Backward leaves hidden.grad, which the previous stage gets.
        with data_parallel.timers("forward"):
            out, router_loss = model(*batches[i], hidden=hidden, chunk=chunk)
        if is_last_stage(model, chunk):
            out = out / n_trained  # the one division
            loss_part.add_(out.detach())
        # The one exception: see one_stage.
        router_loss = router_loss / (len(batches) * model.mesh.dp.size)
        awaiting_backward[i, chunk] = hidden, out, router_loss
        return out.detach()

    def backward(i, chunk, grad):
        """Return the input's gradient. grad: the output's gradient; None on the last stage."""
        hidden, out, router_loss = awaiting_backward.pop((i, chunk))
        backwards_done[chunk] += 1
        # Only a chunk's last backward completes the sums of its gradients.
        data_parallel.announce_backward(completes_grads=backwards_done[chunk] == len(batches))
        outputs = [out]
        # The last stage's output is the loss, whose gradient is the loss scale, or None: 1.
        grads = [loss_scale if is_last_stage(model, chunk) else grad]
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
    """Return the sum of the trained tokens' cross-entropy, (); zero on stages before the last."""
    total = zero_loss(model)

    def forward(i, chunk, hidden):
        out, _ = model(*batches[i], hidden=hidden, chunk=chunk)
        if is_last_stage(model, chunk):
            total.add_(out)
        return out

    Ring(model, batches[0][0].numel()).walk(len(batches), forward)
    return total


def zero_loss(model):
    """Return a loss of 0, () in at least fp32."""
    weight = next(model.parameters())
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.zeros((), device=weight.device, dtype=dtype)


def is_last_stage(model, chunk):
    """Whether this chunk of the rank is the last stage, which has the head."""
    return model.chunks[chunk][1] == model.cfg.n_layer


def dropout_seeds(cfg, mesh, step, n_micro_batches, chunk=0):
    """Return the seeds of this rank's micro-batches in a step; none where nothing is drawn.

    Each seed is a function of (seed, step, micro-batch, stage, cp and tp rank), so no state of a
    generator has to be saved.
    """
    if not draws_random_numbers(cfg):
        return []
    first = mesh.dp.rank * n_micro_batches
    stage = chunk * mesh.pp.size + mesh.pp.rank
    part = mesh.cp.rank * mesh.tp.size + mesh.tp.rank  # which of a micro-batch's tokens
    seeds = []
    for micro_batch in range(first, first + n_micro_batches):
        text = f"{cfg.seed}/{step}/{micro_batch}/{stage}/{part}"
        seeds.append(zlib.crc32(text.encode()))
    return seeds


def dropout_seeder(cfg, mesh, step, n_micro_batches, set_seed):
    """Return the function that seeds dropout before the forward of micro-batch i of a chunk."""
    if not draws_random_numbers(cfg):
        return nothing
    seeds = []  # for each chunk, one seed per micro-batch
    for chunk in range(cfg.pp_chunks):
        seeds.append(dropout_seeds(cfg, mesh, step, n_micro_batches, chunk))

    def seed_dropout(i, chunk):
        set_seed(seeds[chunk][i])

    return seed_dropout


# -----------------------------------------------------------------------------
# Stages

def rank_layers(cfg, axis):
    """Return the blocks of this rank's stages, [(first, last + 1)]. axis: that of the pipeline.

    With pp ranks in the axis, a rank holds the stages rank, rank + pp, rank + 2 * pp, ...
    """
    return stage_layers(cfg, axis.size * cfg.pp_chunks)[axis.rank::axis.size]


# -----------------------------------------------------------------------------
# Who does what when

class Op(NamedTuple):
    """The forward or the backward of one micro-batch through one chunk of a rank."""
    kind: str  # "F" or "B"
    micro_batch: int
    chunk: int

    @property
    def direction(self):
        """1 for a forward, whose result goes to the next stage; for a backward -1, the previous."""
        return 1 if self.kind == "F" else -1

    @property
    def duration(self):
        """The time that it takes: a backward takes twice as long as a forward."""
        return 1 if self.kind == "F" else 2


def schedule(rank, pp, chunks, micro_batches, backward=True):
    """Return the Ops of one rank, in the order in which the rank does them.

    One chunk, plain 1F1B, 2 ranks and 4 micro-batches:

        rank 0    F0 F1 B0 F2 B1 F3 B2 B3    (warmup 1)
        rank 1    F0 B0 F1 B1 F2 B2 F3 B3    (warmup 0)

    pp is the number of ranks. forwards is F0 F1 F2 ... and backwards B0 B1 B2 ..., up to a multiple
    of pp; existing() drops those that are not there. warmup is then pp - 1 - rank. With several
    chunks, micro-batches go through a chunk pp at a time. When rank 0 has sent the last of them on,
    the first has come around the ring of ranks.
    """
    forwards = []
    backwards = []
    for first in range(0, micro_batches, pp):
        for chunk in range(chunks):
            for i in range(first, first + pp):
                forwards.append(Op("F", i, chunk))
                backwards.append(Op("B", i, chunks - 1 - chunk))
    if not backward:
        return existing(forwards, micro_batches)
    # Warm-up: one forward for each later rank. With several chunks, the first pp micro-batches go
    # through all chunks except the last, and each later rank counts for two forwards, as in the
    # paper: a message in flight has that time to arrive.
    per_rank = 1 if chunks == 1 else 2
    warmup = (chunks - 1) * pp + (pp - 1 - rank) * per_rank
    warmup = min(warmup, len(forwards))
    ops = forwards[:warmup]
    # Steady: one forward, one backward, until all forwards are done.
    steady = len(forwards) - warmup
    for one_forward, one_backward in zip(forwards[warmup:], backwards[:steady], strict=False):
        ops += [one_forward, one_backward]
    # Cool-down: the backwards that are left.
    ops += backwards[steady:]
    return existing(ops, micro_batches)


def existing(ops, micro_batches):
    """Return the Ops whose micro-batch exists: the last group may not be full."""
    return [op for op in ops if op.micro_batch < micro_batches]


@functools.cache
def timetable(pp, chunks, micro_batches, backward=True):
    """Return the Ops by the time when they end: {time: [the Op of each rank, or None]}, in order.

    pp is the number of ranks. A forward takes one unit of time, a backward two, and messages none.
    """
    todo = []
    for rank in range(pp):
        todo.append(collections.deque(schedule(rank, pp, chunks, micro_batches, backward)))
    free = [0] * pp  # the time when each rank has ended its latest Op
    ended = {}  # (kind, micro-batch, stage): the time when it ended
    table = {}

    def input_time(rank, op):
        """Return the time when an Op's input is there, or None if it has not been sent yet."""
        source = op.chunk * pp + rank - op.direction  # the stage that sends it
        # Nothing is sent to a forward of the first stage, which reads tokens, or to a backward of
        # the last, which begins at the loss of its own forward, an earlier Op in the rank's list.
        if not 0 <= source < pp * chunks:
            return 0
        return ended.get((op.kind, op.micro_batch, source))

    while any(todo):
        ready = []  # the ranks whose next Op has its input
        for rank, ops in enumerate(todo):
            if ops and input_time(rank, ops[0]) is not None:
                ready.append(rank)
        assert ready, f"ranks wait for each other: {[list(ops)[:1] for ops in todo]}"
        for rank in ready:
            op = todo[rank].popleft()
            free[rank] = max(free[rank], input_time(rank, op)) + op.duration
            ended[op.kind, op.micro_batch, op.chunk * pp + rank] = free[rank]
            ended_ops = table.setdefault(free[rank], [None] * pp)
            ended_ops[rank] = op
    return dict(sorted(table.items()))


# -----------------------------------------------------------------------------
# The ring of ranks: chunk c of rank r is stage c * pp + r, so messages go around a ring

class Message(NamedTuple):
    """What a rank sends when an Op of its own has ended."""
    sender: int
    receiver: int
    receiver_op: Op  # It waits for the message.


def messages_between(ended_ops, chunks):
    """Return the Messages that are sent when these Ops have ended, one Op per rank or None."""
    pp = len(ended_ops)  # the number of ranks
    messages = []
    for sender, op in enumerate(ended_ops):
        if op is None:
            continue
        stage = op.chunk * pp + sender + op.direction
        if 0 <= stage < pp * chunks:
            receiver_op = op._replace(chunk=stage // pp)
            messages.append(Message(sender, stage % pp, receiver_op))
    return messages


class Exchange:
    """All messages that one rank sends and receives at one time of the timetable, in one batch.

    NCCL does the calls between two ranks one after the other. If both ranks began with a send to
    the other, each would wait for the other's receive. In a batch, sends and receives run together.

    Only their order tells the messages from one rank to another apart. With one chunk, all of them
    are of one kind, activations or gradients. With two ranks and --pp-chunks, both kinds go both
    ways, and a batch has at most one message each way, because a rank ends one Op at a time.
    """

    def __init__(self, operations):
        self.operations = operations  # These keep the tensors alive until all have arrived.
        self.works = dist.batch_isend_irecv(operations)
        self.arrived = False

    def wait(self):
        """Wait until all messages have arrived."""
        for work in self.works:
            work.wait()
        self.arrived = True
        self.operations = []


class Ring:
    """Walks a timetable on this rank: does its Ops, sends their results, receives their inputs.

    A message is an activation (n, C) or its gradient. A rank waits for its Exchanges in order, at
    time t of the table only for messages of times up to t, those that it sends included. So no
    circle of waits can arise: docs/pipeline-schedules.md says why.
    """

    def __init__(self, model, n_tokens, timers=untimed):
        """Prepare for micro-batches of n_tokens = B*t tokens on each rank of cp."""
        self.axis = model.mesh.pp
        self.n_chunks = len(model.chunks)
        self.timers = timers
        self.like = next(model.parameters())  # for the dtype and device of messages
        self.shape = n_tokens // model.mesh.tp.size, model.cfg.n_embd  # (n, C)
        self.inbox = {}  # Op: (the tensor that it waits for, the Exchange that brings it)
        self.in_flight = collections.deque()  # the Exchanges that have not arrived, oldest first

    def walk(self, micro_batches, forward, backward=None):
        """Do this rank's part of the timetable: at each time its Op, if one ends then, and after it
        all its sends and receives of that time.

        forward(i, chunk, received) and backward(i, chunk, received) return what is sent on.
        received is None where no message comes.
        """
        table = timetable(self.axis.size, self.n_chunks, micro_batches, backward is not None)
        for ended_ops in table.values():  # Ops that end at the same time, one per rank or None
            op = ended_ops[self.axis.rank]
            made = None
            if op is not None:
                run = forward if op.kind == "F" else backward
                made = run(op.micro_batch, op.chunk, self.receive(op))
            # This rank also starts to receive what others send at this time of the table. The Op
            # that needs it comes later, and waits for it in receive().
            self.start_exchange(ended_ops, made)
            # Without this wait, a rank could run ahead of the others and fill its memory. With NCCL
            # the GPU's stream waits, not the host. Any limit gives the same numbers. This limit
            # lets 2 * pp Exchanges of this rank be in flight.
            self.wait_for_oldest(may_remain=2 * self.axis.size)
        self.wait_for_oldest(may_remain=0)

    def receive(self, op):
        """Return the tensor that came for an Op, or None if no message comes."""
        if op not in self.inbox:
            return None
        received, exchange = self.inbox.pop(op)
        while not exchange.arrived:
            self.wait_for_oldest(may_remain=len(self.in_flight) - 1)
        return received

    def wait_for_oldest(self, may_remain):
        """Wait for the oldest Exchanges, until at most `may_remain` are in flight."""
        while len(self.in_flight) > may_remain:
            with self.timers("pipeline"):
                self.in_flight.popleft().wait()

    def start_exchange(self, ended_ops, made):
        """Start to send and receive all messages of this rank.

        ended_ops: the Op that ends on each rank. made: what this rank's Op has made.
        """
        axis = self.axis
        operations = []
        arriving = {}
        for sender, receiver, receiver_op in messages_between(ended_ops, self.n_chunks):
            if sender == axis.rank:
                axis.record("send", made, made.numel() * made.element_size())
                peer = axis.ranks[receiver]
                # n*C to a neighbour, over pp
                operations.append(dist.P2POp(dist.isend, made.contiguous(), peer, axis.group))
            elif receiver == axis.rank:
                arriving[receiver_op] = self.like.new_empty(self.shape)
                axis.record("receive", arriving[receiver_op])
                peer = axis.ranks[sender]
                # n*C from a neighbour, over pp
                operations.append(dist.P2POp(dist.irecv, arriving[receiver_op], peer, axis.group))
        if operations:
            exchange = Exchange(operations)
            self.in_flight.append(exchange)
            for op, tensor in arriving.items():
                self.inbox[op] = tensor, exchange

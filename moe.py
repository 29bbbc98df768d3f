"""Mixture of Experts: the MLP of a block, E times over, of which each token visits K.

The rows (n, C) of a rank are its own share of the micro-batch already (dp by sequences, tp by rows), so
experts need no tp: the ranks of a stage are viewed a second time as (edp, ep), and expert i lives on ep rank
i // e. Four ranks, ep 4, four experts, every rank with rows for all of them; a letter is the expert a row
wants:

    rank 0   [a a b d]      sort by      [a a|b|.|d]      all_to_all     [aa a . a]   expert a runs on these
    rank 1   [c a d d]      expert       [a|.|c|d d]      send block j   [b . bb .]   expert b
    rank 2   [b b c c]     ---------->   [.|b b|c c|.]    to rank j      [. c cc c]   expert c
    rank 3   [a c d d]                   [a|.|c|d d]     ------------>   [d dd . dd]  expert d
and the same way back, after which each row is where it came from.

    dropless   blocks as long as they are: sort, gather, uneven all_to_all, one grouped GEMM per matrix
    windows    dropless without messages: each rank writes its rows into the memory of the others (window.py).
               static shapes for a CUDA graph (graph.py); a step that brings more rows than there is room for
               is done again, dropless
    capacity   every block padded or cut to the same length: even all_to_all, bmm, static shapes, tokens may
               be dropped. through windows: cut only
"""
import functools
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from fast.window import Pull, Push, open_windows
from ops.fused import ExpertMLP, collect, collect_backward, gelu, meet, settle, spread, tally
from parallel import all_to_all, parameter

# -----------------------------------------------------------------------------
# moving rows: dispatch and combine are each other's adjoint

class _Dispatch(torch.autograd.Function):
    """Copy row i of x (n, C) to every slot that holds one of its K copies. -> (slots, C)"""

    @staticmethod
    def forward(ctx, x, src, slot, K, holes):
        ctx.save_for_backward(slot)
        ctx.K, ctx.holes = K, holes
        return spread(x, src, K, holes)

    @staticmethod
    def backward(ctx, g):
        return collect(g, *ctx.saved_tensors, ctx.K, ctx.holes), None, None, None, None


class _Combine(torch.autograd.Function):
    """Sum the K copies of each row, each times its gate p. (slots, C), (n, K) -> (n, C)"""

    @staticmethod
    def forward(ctx, y, p, src, slot, K, holes):
        ctx.save_for_backward(y, p, src)
        ctx.K, ctx.holes = K, holes
        return collect(y, slot, K, holes, p)

    @staticmethod
    def backward(ctx, g):
        return *collect_backward(*ctx.saved_tensors, ctx.K, ctx.holes, g), None, None, None, None


class Plan(NamedTuple):
    """Where the N = n*K copies go. Copy c is choice c % K of row c // K."""
    src: torch.Tensor     # (slots,) the copy in each slot, N where the slot is empty
    slot: torch.Tensor    # (N,) the slot of each copy, `slots` where the copy has none
    holes: bool = False   # whether slots may be empty and copies without a slot
    ends: torch.Tensor | None = None  # (e,) where each local expert's rows end among the R here; None: holes
    send: list | None = None  # dropless, ep > 1: rows to each ep rank, from each; None for equal blocks
    receive: list | None = None
    regroup: torch.Tensor | None = None  # (R,) received rows (by sender) -> by expert, and back
    ungroup: torch.Tensor | None = None
    place: torch.Tensor | None = None  # (N,) windows: where each copy goes, see window.py


def deal(expert, first, E, room):
    """Each expert has `room` slots and takes the copies that want it: expert (N,) of each copy, who comes
    first (N,), a permutation. -> src (E*room,), slot (N,), () how many found no room"""
    N, slots, wants = expert.numel(), E * room, expert[first]
    rank, upto = tally(wants, E)
    place = settle(wants, rank, upto, torch.zeros_like(upto[:, 0]), E, N)  # (N,) in the expert's queue
    target = torch.where(place < room, wants * room + place, slots)
    slot = torch.empty_like(target).scatter_(0, first, target)
    src = torch.full((slots + 1,), N, device=first.device).scatter_(0, target, first)[:slots]
    return src, slot, (place >= room).sum()


# -----------------------------------------------------------------------------
# the experts' matrix products

def fast(x, w):
    """Whether torch's grouped GEMM takes x times w (e, O, I) as one kernel, which asks the host nothing."""
    return x.is_cuda and x.dtype == torch.bfloat16 and one_kernel(x.device) and aligned(*w.shape[1:])


@functools.cache
def one_kernel(device):
    """On Hopper and Blackwell; elsewhere torch reads the runs' ends on the host."""
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device)[0] in (9, 10)


def aligned(*widths):
    return all(width % 8 == 0 for width in widths)  # rows of 16 bytes


def grouped(x, w, ends):
    """Row r of x (R, I) times the matrix of the expert whose run it is in: w (e, O, I), runs end at ends (e,)
    -> (R, O). torch's grouped GEMM for bf16 on the GPU: one kernel, no synchronisation. Elsewhere an explicit
    loop, the oracle. Capacity's messages have ends None and x (e, rows, I) -> (e, rows, O)."""
    if ends is None:
        return torch.bmm(x, w.transpose(1, 2))
    if x.size(0) == 0:
        return F.linear(x, w[0])  # no token chose this rank: zero rows, and a gradient of zero
    if fast(x, w):
        return F.grouped_mm(x, w.transpose(1, 2), offs=ends.to(torch.int32))
    return grouped_loop(x, w, ends)


def grouped_loop(x, w, ends):
    stops = ends.tolist()  # sync point on a GPU
    runs = zip([0, *stops[:-1]], stops, strict=True)
    after = x.new_zeros(x.size(0) - stops[-1], w.size(1))  # rows after the last run hold nothing
    return torch.cat([*(F.linear(x[a:b], w[i]) for i, (a, b) in enumerate(runs)), after])


# -----------------------------------------------------------------------------

class Router(nn.Module):
    """One score per expert; the bias only steers the choice (loss-free balancing, arXiv:2408.15664)."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.weight = parameter((cfg.n_experts, cfg.n_embd), mesh)
        steers = cfg.router == "sigmoid" and cfg.router_bias_rate > 0
        self.register_buffer("bias", torch.zeros(cfg.n_experts, dtype=torch.float32) if steers else None)


class MoE(nn.Module):
    """In the place of the MLP: (n, C) -> (n, C), and this rank's part of the balancing losses."""

    def __init__(self, cfg, mesh, shared):
        super().__init__()
        E, C, F_ = cfg.n_experts, cfg.n_embd, cfg.ffn_hidden
        self.cfg, self.mesh, self.E, self.K, self.e = cfg, mesh, E, cfg.top_k, E // mesh.ep.size
        self.router = Router(cfg, mesh)
        self.w1 = parameter((E, F_, C), mesh, expert=True)  # (e, F, C)
        self.w3 = parameter((E, F_, C), mesh, expert=True) if cfg.mlp == "swiglu" else None
        self.w2 = parameter((E, C, F_), mesh, expert=True)  # (e, C, F)
        self.shared = shared  # an MLP that every token visits, or None
        # (E + 4,) of the step so far: copies per expert, dropped copies, aux, z, router entropy
        self.stats = torch.zeros(E + 4, dtype=torch.float64)
        self.windows, self.room = None, 0  # see plan_windows; 0: messages of exactly their rows
        self.need = torch.zeros((), dtype=torch.int64)  # most rows that came here in one micro-batch

    def forward(self, x, again):
        """x (n, C); again(f, *args) runs f, and runs it again in backward under --recompute. -> (n, C), ()"""
        p, ids, aux = self.route(x)  # never recomputed: a tie broken otherwise would change the splits
        plan = self.plan(p, ids)
        y = again(self.experts, x, p, plan)
        return (y if self.shared is None else y + again(self.shared, x)), aux

    # ---- who goes where

    def route(self, x):
        """x (n, C) -> gates p (n, K) in x's dtype, experts ids (n, K), this rank's part of the weighted aux
        and z losses. Scores are in at least fp32. A tie goes to the expert with the lower number."""
        cfg, K = self.cfg, self.K
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = x.to(wide) @ self.router.weight.to(wide).T  # (n, E)
        if cfg.router == "sigmoid":
            scores = logits.sigmoid()
            share = scores / scores.sum(1, keepdim=True)  # what the aux loss balances
            ids = top_k(scores if self.router.bias is None else scores + self.router.bias, K)
            p = scores.gather(1, ids)
            p = p / p.sum(1, keepdim=True) if K > 1 else p
        else:
            share = logits.softmax(1)
            ids = top_k(share, K)
            p = share.gather(1, ids) if cfg.router == "softmax" else logits.gather(1, ids).softmax(1)
        return p.to(x.dtype), ids, self.balance(logits, share, ids)

    def balance(self, logits, share, ids):
        """Switch load-balancing loss, arXiv:2101.03961 eq. 4-6, on Megatron-LM's scale: 1 when balanced, E/K
        when all go to K experts; and the z-loss, arXiv:2202.08906 eq. 5. Each tp rank holds a part; the parts
        add up to the micro-batch's. Counted before anything is dropped, without the router's bias."""
        n, E, K, tp = share.size(0), self.E, self.K, self.mesh.tp
        chosen = count(ids if self.router.bias is None else top_k(share, K), E)  # (E,)
        load = chosen if self.router.bias is None else count(ids, E)
        whole = chosen.to(share.dtype)
        tp.all_reduce(whole)  # SUM of E counts, over tp: one micro-batch's ranks
        rows = n * tp.size
        aux = (share.sum(0) * whole).sum() * E / (K * rows * rows)
        z = logits.logsumexp(1).square().sum() / rows
        with torch.no_grad():
            entropy = -(share * share.clamp(min=1e-30).log()).sum() / rows
            self.stats[:E] += load
            self.stats[E + 1:] += torch.stack([aux, z, entropy]).double()
        return self.cfg.aux_coef * aux + self.cfg.z_coef * z

    def plan(self, p, ids):
        if self.cfg.capacity_factor > 0:
            return self.plan_capacity(p, ids)
        if self.mesh.ep.size > 1 and self.room and self.training:
            return self.plan_windows(ids)
        return self.plan_dropless(ids)

    def plan_dropless(self, ids):
        ep, e = self.mesh.ep, self.e
        expert = ids.flatten()
        rank, upto = tally(expert, self.E)
        counts, ends = upto[:, -1].contiguous(), upto[:, -1].cumsum(0)  # (E,)
        slot = settle(expert, rank, upto, ends - counts, self.E, expert.numel())
        order = inverse(slot)
        if ep.size == 1:
            return Plan(order, slot, ends=ends)  # static shapes, no synchronisation
        theirs = ep.all_to_all(counts).view(ep.size, e)  # (ep, e): rows from each rank for each expert here
        torch.maximum(self.need, theirs.sum(), out=self.need)
        splits = torch.stack([counts.view(ep.size, e).sum(1), theirs.sum(1)])
        send, receive = splits.tolist()  # sync point, the only one
        owner = torch.arange(e, device=order.device).repeat(ep.size)  # rows come by sender, by expert within
        run = owner.repeat_interleave(theirs.flatten(), output_size=sum(receive))  # (R,)
        regroup = run.argsort(stable=True)
        return Plan(order, slot, False, theirs.sum(0).cumsum(0), send, receive, regroup, inverse(regroup))

    def plan_windows(self, ids):
        """Dropless without asking the host: static shapes, so that a step with experts is one CUDA graph too.
        Of a window `room` rows are in use. A step that brought some rank more (`need`) is void, and done
        again by plan_dropless (train_step)."""
        expert = ids.flatten()
        rank, upto = tally(expert, self.E)
        starts, ends = self.meet(upto[:, -1])
        return self.through_windows(settle(expert, rank, upto, starts, self.e, self.windows[0].rows), ends)

    def meet(self, counts):
        """counts (E,): this rank's rows for each expert -> starts (E,), the place of the first of them;
        ends (e,), in this rank's window. It is also the barrier before rows are pushed: who counts has read
        what came to it the last time."""
        ep = self.mesh.ep
        runs = ep.all_gather(counts).view(ep.size, self.E)
        return meet(runs, ep.rank, self.windows[0].rows, self.room, self.need)

    def through_windows(self, place, ends):
        mine = torch.arange(place.numel(), device=place.device)  # the copies come back as they went
        return Plan(mine, mine, ends=ends, place=place)

    def plan_capacity(self, p, ids):
        """At most `capacity` copies per expert from this rank: of its own rows, so tp and micro-batch change
        who is dropped (as in Megatron-LM). probs keeps the largest gates, position the first come; ties go to
        the earlier row. Through windows there are no holes: every rank knows who sends less."""
        flat, room = ids.flatten(), self.capacity(ids.size(0))
        first = torch.arange(flat.numel(), device=flat.device)  # the order of the rows
        if self.cfg.drop_policy == "probs":
            first = p.detach().flatten().argsort(descending=True, stable=True)
        src, slot, dropped = deal(flat, first, self.E, room)
        with torch.no_grad():
            self.stats[self.E] += dropped
        if not self.room or not self.training:
            return Plan(src, slot, True)
        starts, ends = self.meet((src < flat.numel()).view(self.E, room).sum(1))
        place = torch.where(slot < src.numel(), starts[flat] + slot - flat * room, -1)  # (N,)
        return self.through_windows(place, ends)

    def capacity(self, n):
        return min(math.ceil(n * self.K / self.E * self.cfg.capacity_factor), n)

    # ---- there, through the experts, and back

    def experts(self, x, p, plan):
        """x (n, C), p (n, K) -> (n, C): sum over the K choices of gate * expert(row)."""
        ep, K = self.mesh.ep, self.K
        if plan.place is not None:
            xs = Push.apply(x, plan.place, K, self.room, self.windows)  # (room, C), by expert
            y = Pull.apply(self.ffn(xs, plan.ends, self.windows[1].mine), plan.place, self.windows)  # (N, C)
            return _Combine.apply(y, p, plan.src, plan.slot, K, False)
        xs = _Dispatch.apply(x, plan.src, plan.slot, K, plan.holes)  # (slots, C), by expert
        if plan.ends is None:  # capacity
            room = xs.size(0) // self.E
            # (E*room, C) -> by sender (ep, e, room, C) -> by expert (e, ep*room, C)
            xs = all_to_all(xs, ep).unflatten(0, (ep.size, self.e, room)).transpose(0, 1).flatten(1, 2)
            y = self.ffn(xs, None).unflatten(1, (ep.size, room)).transpose(0, 1).flatten(0, 2)
            y = all_to_all(y, ep)  # (E*room, C)
        elif ep.size == 1:
            y = self.ffn(xs, plan.ends)  # (N, C)
        else:
            xs = all_to_all(xs, ep, plan.send, plan.receive)  # (R, C), by sender
            xs = _Dispatch.apply(xs, plan.regroup, plan.ungroup, 1, False)  # by expert
            y = _Dispatch.apply(self.ffn(xs, plan.ends), plan.ungroup, plan.regroup, 1, False)
            y = all_to_all(y, ep, plan.receive, plan.send)  # (slots, C)
        return _Combine.apply(y, p, plan.src, plan.slot, K, plan.holes)

    def ffn(self, x, ends, into=None):
        """Each row through its expert: x (R, C) in runs that end at ends, or (e, rows, C) -> like x; into:
        where it may stand, see ExpertMLP"""
        if fast(x, self.w1) and self.w3 is not None and x.numel():
            ends = None if ends is None else ends.to(torch.int32)
            return ExpertMLP.apply(x, self.w1, self.w3, self.w2, ends, into)
        h = grouped(x, self.w1, ends)
        h = gelu(h) if self.w3 is None else F.silu(h) * grouped(x, self.w3, ends)
        return grouped(h, self.w2, ends)


def top_k(scores, K):
    """-> (n, K) columns of the K largest, largest first; among equals the lowest column (torch.topk leaves
    that open)."""
    rest, picked = scores.detach(), []
    for _ in range(K):
        i = rest.max(1).indices  # the first of the largest
        picked.append(i)
        rest = rest.scatter(1, i.unsqueeze(1), -torch.inf)
    return torch.stack(picked, 1)


def count(ids, E):
    """-> (E,) how often each expert stands in ids; bincount would synchronise."""
    flat = ids.flatten()
    return torch.zeros(E, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


def inverse(order):
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


# -----------------------------------------------------------------------------
# before and after a step

def layers(model):
    return {int(i): block.moe for i, block in model.blocks.items() if block.moe is not None}


def capacity_windows(model):
    """With a capacity all rows have room, always: from each rank at most so many for each expert."""
    mine, cfg = list(layers(model).values()), model.cfg
    if not fast(mine[0].w1, mine[0].w1):
        return  # bmm, after an all_to_all
    rows = cfg.n_experts * mine[0].capacity(cfg.micro_batch * cfg.seq_len // model.mesh.tp.size)
    open_windows(mine, rows, mine[0].w1.device)
    for layer in mine:
        layer.room = rows


def begin(model):
    """A new step: nothing has been counted."""
    for moe in layers(model).values():
        moe.stats.zero_()
        moe.need.zero_()


@torch.no_grad()
def steer(model, rate, refused):
    """Auxiliary-loss-free balancing: each expert's bias moves by `rate` towards the mean load of the whole
    global batch. refused: () 1.0 where the step was not taken, then nothing moves."""
    for moe in layers(model).values():
        if moe.router.bias is not None:
            load = moe.stats[:moe.E].clone()
            moe.mesh.stage.all_reduce(load)  # SUM of E counts, over the stage
            moe.router.bias += rate * (load.mean() - load).sign().float() * (1 - refused)


@torch.no_grad()
def summary(model, micro_batches):
    """Per layer, of the step just done: {layer: {load: [E fractions of the copies], dropped, aux, z,
    entropy}}, on every rank. micro_batches: of the whole global batch. One fixed-size tensor, so a stage
    without experts takes part too."""
    cfg, mesh = model.cfg, model.mesh
    E = cfg.n_experts
    table = torch.zeros(cfg.n_layer, E + 4, dtype=torch.float64, device=next(model.parameters()).device)
    for i, moe in layers(model).items():
        table[i] = moe.stats
    mesh.world.all_reduce(table)  # SUM of L*(E+4) numbers, over the world
    out = {}
    for i, row in enumerate(table.tolist()):
        copies = sum(row[:E])
        out[i] = {"load": [c / copies for c in row[:E]], "dropped": row[E] / copies,
                  **{k: v / micro_batches for k, v in zip(("aux", "z", "entropy"), row[E + 1:], strict=True)}}
    return out

"""Mixture of Experts: the MLP of a block, E times over, of which each token visits K.

A row is a token's vector (C,). It travels as K copies, one to each of its experts; a gate is the
factor by which an expert's result is multiplied.

ep adds no ranks: its ranks are those of dp and tp, each with rows of its own and e = E / ep of the
experts, expert i on ep rank i // e. edp has the ranks with the same experts. No two ranks of a
stage hold the same rows, because dp and cp split sequences and tp splits rows; so an expert's
matrices need no tp.

The drawing has two ranks, ep 2, and four experts: a and b on rank 0, c and d on rank 1. K is 1, and
a letter is the expert that a row visits:

                          sort by        all_to_all:       sort by
            rows          expert         block j to j      local expert
    rank 0  c a d b d     [a b|c d d]    [a b|a a a b]     [a a a a|b b]
    rank 1  a a b a       [a a a b|]     [c d d|]          [c|d d]

Here | stands between receivers, then between senders, then between local experts. Rank 0 sends
[2, 3] rows and receives [2, 4], and its experts' rows end at [4, 6]. The results go the same way
back, after which each stands where its row came from.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from config import draws_random_numbers
from ops.activations import ACTIVATIONS, GATED
from ops.grouped_mm import SwiGLUExperts, grouped_mm, use_grouped_mm
from ops.permute import Permute, Unpermute, invert, queue_by_expert, sort_by_expert
from parallel import all_to_all, parameter


class MoE(nn.Module):
    """The layer in place of the MLP. shared: an MLP that every token visits as well, or None."""

    def __init__(self, cfg, mesh, shared=None):
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.E = cfg.n_experts
        self.K = cfg.top_k
        up = (self.E, cfg.ffn_hidden, cfg.n_embd)
        self.router = Router(cfg, mesh)
        self.w1 = parameter(up, mesh, expert=True)  # (e, F, C)
        self.w3 = parameter(up, mesh, expert=True) if cfg.mlp in GATED else None  # (e, F, C)
        self.w2 = parameter((self.E, cfg.n_embd, cfg.ffn_hidden), mesh, expert=True)  # (e, C, F)
        self.shared = shared
        if cfg.capacity_factor:  # fast.choose.Choice.install() may replace it by a faster one
            self.dispatcher = Capacity(cfg, mesh)
        else:
            self.dispatcher = Local(cfg, mesh) if mesh.ep.size == 1 else AllToAll(cfg, mesh)
        # Sums over the step so far: how often each expert was chosen, then this rank's parts of
        # balance loss, z loss and the entropy of the router's probabilities, in nats
        self.stats = torch.zeros(self.E + 3, dtype=torch.float64)

    def forward(self, x, gates, expert_ids):  # (n, C) -> (n, C)
        shared = None if self.shared is None else self.maybe_recompute(self.shared, x)
        plan = self.dispatcher.plan(expert_ids, gates)
        y = self.maybe_recompute(self.experts, x, gates, plan)
        return y if shared is None else y + shared

    def maybe_recompute(self, f, *args):
        """Return f(*args). Under --recompute full, backward calls f again."""
        if self.cfg.recompute != "full" or not self.training:
            return f(*args)
        draws = draws_random_numbers(self.cfg)
        return checkpoint(f, *args, use_reentrant=False, preserve_rng_state=draws)

    def route(self, x, places=None):
        """Choose experts for x (n, C): gates (n, K), expert_ids (n, K), this rank's router loss ().

        The losses of the tp and cp ranks, which share a micro-batch, add up to that of all rows.
        places (B, t), see GPT.forward: padding has gates of 0, and counts in no loss and no load.
        Block calls this before forward, once: a recomputed routing could round to other experts.
        """
        logits = self.router(x)  # (n, E)
        if self.cfg.router == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(1, keepdim=True)  # what the balance loss balances
            bias = self.router.bias
            expert_ids = stable_top_k(scores if bias is None else scores + bias, self.K)
            gates = scores.gather(1, expert_ids)  # of the scores: the bias only affects the choice
            if self.K > 1:
                gates = gates / gates.sum(1, keepdim=True)
        else:
            probabilities = logits.softmax(1)
            expert_ids = stable_top_k(probabilities, self.K)
            if self.cfg.router == "softmax-topk":
                gates = logits.gather(1, expert_ids).softmax(1)
            else:
                gates = probabilities.gather(1, expert_ids)

        tp, cp = self.mesh.tp, self.mesh.cp
        real, rows = 1, x.size(0) * tp.size * cp.size  # rows of the micro-batch, on all its ranks
        if places is not None:  # which of this rank's rows are no padding, (n, 1)
            real = (places.reshape(-1, 1) > 0).chunk(tp.size)[tp.rank].long()
            rows = cp.all_reduce(tp.all_reduce(real.sum()))  # SUM of a number, over tp, then cp
        gates, probabilities = gates * real, probabilities * real

        tokens = count_tokens(expert_ids, self.E, real)
        balance_loss = self.balance_loss(probabilities, tokens, rows, real)
        z_loss = (logits.logsumexp(1, True).square() * real).sum() / rows  # arXiv:2202.08906 eq. 5
        with torch.no_grad():
            entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum() / rows
            self.stats.add_(torch.hstack([tokens.double(), balance_loss, z_loss, entropy]))
        router_loss = self.cfg.aux_coef * balance_loss + self.cfg.z_coef * z_loss
        return gates.to(x.dtype), expert_ids, router_loss

    def balance_loss(self, probabilities, tokens, rows, real):
        """Return this rank's part of E * sum over the experts of f_i * P_i, ().

        f_i is the fraction of the micro-batch's K * rows choices that fall on expert i, and P_i its
        mean probability (Switch Transformer, arXiv:2101.03961 eq. 4-6; with several choices as in
        Megatron-LM). It is 1 when the load is balanced, E/K when all go to the same K experts.
        """
        if self.router.bias is not None:  # then what the router would choose without it counts
            tokens = count_tokens(stable_top_k(probabilities, self.K), self.E, real)
        total = self.mesh.tp.all_reduce(tokens.to(probabilities.dtype))  # SUM of E counts, over tp
        total = self.mesh.cp.all_reduce(total)  # SUM of E counts, over cp
        # f_i is total / (K * rows), and P_i is the ranks' sum of probabilities.sum(0) / rows.
        return (probabilities.sum(0) * total).sum() * self.E / (self.K * rows * rows)

    def experts(self, x, gates, plan):  # (n, C) -> (n, C), the sum of gate * expert(row)
        rows = self.dispatcher.dispatch(x, plan)  # (R, C), by expert
        results = self.ffn(rows, plan.ends)  # (R, C), by expert
        return self.dispatcher.combine(results, gates, plan)

    def ffn(self, x, ends):
        """Send each row through its expert: (R, C) -> (R, C). With Capacity x is (e, rows, C)."""
        # On a GPU, one function does all of this for SwiGLU. The lines below are the reference.
        if self.cfg.mlp == "swiglu" and use_grouped_mm(x, self.w1) and x.numel():
            return SwiGLUExperts.apply(x, self.w1, self.w3, self.w2, ends)
        products = [grouped_mm(x, w, ends) for w in (self.w1, self.w3) if w is not None]
        return grouped_mm(ACTIVATIONS[self.cfg.mlp](*products), self.w2, ends)


class Router(nn.Module):
    """One row of weights per expert, and a bias that only affects the choice (arXiv:2408.15664)."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.weight = parameter((cfg.n_experts, cfg.n_embd), mesh)
        has_bias = cfg.router == "sigmoid" and cfg.router_bias_rate > 0
        bias = torch.zeros(cfg.n_experts, dtype=torch.float32) if has_bias else None
        self.register_buffer("bias", bias)

    def forward(self, x):  # (n, C) -> (n, E) in at least fp32
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.weight.to(wide).T


def stable_top_k(scores, K):
    """Return the columns of each row's K largest scores, the largest first: (n, E) -> (n, K)."""
    rest = scores.detach()
    columns = torch.arange(scores.size(1), device=scores.device)
    picked = []
    for _ in range(K):
        column = rest.max(1).indices  # (n,) the first of equal ones; torch.topk leaves this open
        picked.append(column)
        # The compiler makes one kernel of these rounds, which it cannot do with scatter.
        rest = rest.masked_fill(columns == column.unsqueeze(1), -torch.inf)
    return torch.stack(picked, 1)


def count_tokens(expert_ids, E, real=1):  # (n, K) -> (E,), how often each expert occurs
    ones = torch.ones_like(expert_ids) * real  # 0 for padding
    zeros = torch.zeros(E, dtype=torch.int64, device=ones.device)
    return zeros.scatter_add_(0, expert_ids.flatten(), ones.flatten())  # bincount would wait


class Plan(NamedTuple):
    """Who goes where. A copy stands in a slot, sorted by expert: see ops/permute.py."""
    perm: torch.Tensor      # (slots,) the copy in each slot; N where the slot is empty
    inv_perm: torch.Tensor  # (N,) the slot of each copy; `slots` where the copy was dropped
    ends: torch.Tensor = None       # (e,) where each local expert's rows end; None with Capacity
    # of AllToAll alone
    send: list = None               # rows from here to each ep rank; None: as many to each
    receive: list = None            # rows from each ep rank to here; R is their sum
    by_expert: torch.Tensor = None  # (R,) permutation: received rows, by sender -> by expert
    by_sender: torch.Tensor = None  # (R,) its inverse


class Dispatcher:
    """Brings rows to their experts and back. Each layer has one, of a subclass with these methods:

        plan(expert_ids, gates)  (n, K) each -> Plan of a micro-batch; Capacity reads the gates
        dispatch(x, plan)        rows x (n, C) -> (R, C), on their experts' ranks, by expert
        combine(y, gates, plan)  results y (R, C) -> (n, C), at home: the sum of gate * result
    Capacity has (e, rows, C) instead of (R, C).
    """

    def __init__(self, cfg, mesh):
        self.cfg = cfg
        self.ep = mesh.ep
        self.E = cfg.n_experts
        self.K = cfg.top_k
        self.e = cfg.n_experts // mesh.ep.size
        # Of the step so far, on the device:
        self.n_dropped = torch.zeros((), dtype=torch.float64)  # copies
        self.rows_needed = torch.zeros((), dtype=torch.int64)  # the largest R, for fast/graph.py


class Local(Dispatcher):
    """All experts are on this rank: shapes are static, and nothing is sent."""

    def plan(self, expert_ids, gates):
        perm, inv_perm, _, ends = sort_by_expert(expert_ids.flatten(), self.E)
        return Plan(perm, inv_perm, ends)

    def dispatch(self, x, plan):  # (n, C) -> (N, C)
        return Permute.apply(x, plan.perm, plan.inv_perm, self.K)

    def combine(self, y, gates, plan):  # (N, C) -> (n, C)
        return Unpermute.apply(y, gates, plan.perm, plan.inv_perm)


class AllToAll(Dispatcher):
    """Dropless over ep ranks, as in the drawing. In each layer the host waits for row counts."""

    def plan(self, expert_ids, gates):
        perm, inv_perm, counts, _ = sort_by_expert(expert_ids.flatten(), self.E)
        sent_counts = counts.view(-1, self.e)  # (ep, e), by receiver and expert
        # E counts to the experts' owners, over ep
        received_counts = self.ep.all_to_all(counts).view(-1, self.e)  # by sender and expert
        # fast/graph.py reads it. It comes before the sync point, so that the device computes it
        # while the host waits.
        torch.maximum(self.rows_needed, received_counts.sum(), out=self.rows_needed)

        # The only sync point: all_to_all takes the sizes of its messages from the host.
        send, receive = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()
        R = sum(receive)

        # Received rows stand by sender, and by expert among those of one sender. On the drawing's
        # rank 0 local_expert is [0 1 | 0 0 0 1], and by_expert is [0 2 3 4 | 1 5].
        numbers = torch.arange(self.e, device=expert_ids.device).repeat(self.ep.size)  # (ep*e,)
        local_expert = numbers.repeat_interleave(received_counts.flatten(), output_size=R)  # (R,)
        by_expert = local_expert.argsort(stable=True)
        by_sender = invert(by_expert, R)
        ends = received_counts.sum(0).cumsum(0)
        return Plan(perm, inv_perm, ends, send, receive, by_expert, by_sender)

    def dispatch(self, x, plan):  # (n, C) -> (R, C)
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K)  # (N, C), by expert
        # Block j of the N rows goes to rank j, over ep.
        x = all_to_all(x, self.ep, plan.send, plan.receive)  # (R, C), by sender
        return Permute.apply(x, plan.by_expert, plan.by_sender)  # (R, C), by expert

    def combine(self, y, gates, plan):  # (R, C) -> (n, C)
        y = Permute.apply(y, plan.by_sender, plan.by_expert)  # (R, C), by sender
        # The same blocks, R rows, go back over ep.
        y = all_to_all(y, self.ep, plan.receive, plan.send)  # (N, C), by expert
        return Unpermute.apply(y, gates, plan.perm, plan.inv_perm)


class Capacity(Dispatcher):
    """Each expert takes at most `capacity` copies from this rank, so that messages are even.

    Each rank chooses among its own rows. So which rows are dropped depends on tp, cp and the
    micro-batch, as in Megatron-LM.
    """

    def plan(self, expert_ids, gates):
        expert = expert_ids.flatten()  # (N,)
        gates = gates.detach().flatten()
        # The largest gates are kept, or the first rows; padding, whose gates are 0, comes last.
        order = gates if self.cfg.drop_policy == "probs" else (gates > 0).byte()
        order = order.argsort(descending=True, stable=True)  # of equal ones, the earlier row
        capacity = expert_capacity(self.cfg, expert_ids.size(0))
        slots = self.E * capacity
        served = expert[order]  # (N,) experts of the copies, in the order in which these are served
        place, _ = queue_by_expert(served, self.E)
        slot = torch.where(place < capacity, served * capacity + place, slots)
        self.n_dropped += ((place >= capacity) & (gates[order] > 0)).sum()
        inv_perm = torch.empty_like(slot).scatter_(0, order, slot)
        return Plan(invert(inv_perm, slots), inv_perm)

    def dispatch(self, x, plan):  # (n, C) -> (e, ep*capacity, C)
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K)  # (E*capacity, C), by expert
        x = all_to_all(x, self.ep)  # (E*capacity, C), by sender: even blocks, over ep
        x = x.unflatten(0, (self.ep.size, self.e, -1))  # (ep, e, capacity, C)
        return x.transpose(0, 1).flatten(1, 2)

    def combine(self, y, gates, plan):  # (e, ep*capacity, C) -> (n, C)
        y = y.unflatten(1, (self.ep.size, -1)).transpose(0, 1)  # (ep, e, capacity, C), by sender
        y = all_to_all(y.flatten(0, 2), self.ep)  # (E*capacity, C): the same blocks back, over ep
        return Unpermute.apply(y, gates, plan.perm, plan.inv_perm)


def expert_capacity(cfg, n):
    """Return how many rows each expert takes from a rank that has n rows."""
    rows = n * cfg.top_k / cfg.n_experts * cfg.capacity_factor
    return min(math.ceil(rows * (1 - 1e-9)), n)  # in floats, 50 * 1.1 is a little more than 55


def moe_layers(model):
    """Return {layer number: MoE} of this stage."""
    return {int(i): block.moe for i, block in model.blocks.items() if block.moe is not None}


def reset_stats(model):
    for layer in moe_layers(model).values():
        for total in (layer.stats, layer.dispatcher.n_dropped, layer.dispatcher.rows_needed):
            total.zero_()


@torch.no_grad()
def update_router_bias(model, rate, not_finite):
    """Raise the bias of experts below the global batch's mean load, lower others by rate."""
    for layer in moe_layers(model).values():
        if layer.router.bias is None:
            continue
        load = layer.stats[:layer.E].clone()
        layer.mesh.stage.all_reduce(load)  # SUM of E counts, over the stage
        step = rate * (load.mean() - load).sign().float()
        layer.router.bias += step * (1 - not_finite)  # none where the update was refused


@torch.no_grad()
def expert_stats(model, micro_batches):
    """Return {layer: {name: number}} of the step just done, the same on every rank."""
    device = next(model.parameters()).device
    table = torch.zeros(model.cfg.n_layer, model.cfg.n_experts + 4, dtype=torch.float64,
                        device=device)
    for i, layer in moe_layers(model).items():
        table[i] = torch.hstack([layer.stats, layer.dispatcher.n_dropped])
    model.mesh.world.all_reduce(table)  # SUM of L*(E+4) numbers, over the world
    found = {}
    for i, (*tokens, balance_loss, z_loss, entropy, n_dropped) in enumerate(table.tolist()):
        copies = sum(tokens)
        found[i] = {"load": [count / copies for count in tokens],
                    "dropped": n_dropped / copies,
                    "aux": balance_loss / micro_batches,
                    "z": z_loss / micro_batches,
                    "entropy": entropy / micro_batches}
    return found

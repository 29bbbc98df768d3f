"""Mixture of Experts: the MLP of a block, E times over, of which each token visits K.

A row is a token's vector (C,). It travels as K copies, one to each of its experts; a gate is the
factor by which an expert's result is multiplied.

With two ranks, --ep 2 and E = 8, rank 0 holds the experts 0 to 3 and rank 1 the experts 4 to 7, and
each rank has sequences of its own: ep adds no ranks. For rank 0, dp is {0, 1}, ep is {0, 1}, and
edp, the ranks with the same experts, is {0}: ep and edp count the ranks of a stage again, by their
experts. Each rank holds e = E / ep experts, and expert i lives on ep rank i // e. No two ranks of a
stage hold the same rows, because dp and cp split sequences and tp splits rows; so an expert's
matrices need no tp.

The drawing has four ranks, ep 4, four experts, K = 1; a letter is the expert that a row visits:

    rank 0   [a a b d]      sort by     [a a|b|.|d]     all_to_all     [aa a . a]   expert a's rows
    rank 1   [c a d d]      expert      [a|.|c|d d]     block j goes   [b . bb .]   expert b's
    rank 2   [b b c c]     --------->   [.|b b|c c|.]   to rank j      [. c cc c]   expert c's
    rank 3   [a c d d]                  [a|.|c|d d]     ----------->   [d dd . dd]  expert d's
and the same way back, after which each row stands where it came from.

    MoE               the layer: route, plan, dispatch, the experts' matrices, combine; its losses
    Router            one logit per expert
    token dispatcher  plan: who goes where; dispatch: rows to their experts; combine: the way back
        Local         one rank holds all experts: a sort and a gather
        AllToAll      dropless over ep ranks: uneven all_to_all; each message holds exactly the rows
                      that go to its rank
        Capacity      each expert takes equal numbers of rows, others are dropped: even all_to_all
fast/symm_mem.py has the dispatchers that write rows directly into other GPUs' memory. The shapes
are in the letters of model.py's legend.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn

from ops.activations import ACTIVATIONS, GATED
from ops.grouped_mm import SwiGLUExperts, grouped_mm, use_grouped_mm
from ops.permute import Permute, Unpermute, assign_slots, invert_permutation, sort_by_expert
from parallel import all_to_all, parameter

# -----------------------------------------------------------------------------
# The layer

class Routing(NamedTuple):
    """What is known of n rows before they visit their experts."""
    gates: torch.Tensor        # (n, K) in the model's dtype
    expert_ids: torch.Tensor   # (n, K) int64
    router_loss: torch.Tensor  # () this rank's part
    shared: torch.Tensor       # (n, C) the shared MLP's output; None without one


class MoE(nn.Module):
    """The layer that takes the place of a block's MLP. make_dispatcher(cfg, mesh) makes its token
    dispatcher.

    shared: an MLP that every token visits besides its K experts, or None.
    """

    def __init__(self, cfg, mesh, shared, make_dispatcher):
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.E = cfg.n_experts
        self.K = cfg.top_k
        up = (cfg.n_experts, cfg.ffn_hidden, cfg.n_embd)
        down = (cfg.n_experts, cfg.n_embd, cfg.ffn_hidden)
        self.router = Router(cfg, mesh)
        self.w1 = parameter(up, mesh, expert=True)  # (e, F, C)
        self.w3 = parameter(up, mesh, expert=True) if cfg.mlp in GATED else None  # (e, F, C)
        self.w2 = parameter(down, mesh, expert=True)  # (e, C, F)
        self.shared = shared
        self.dispatcher = make_dispatcher(cfg, mesh)
        # (E + 3,), summed over the step so far: tokens per expert, balance loss, z-loss, entropy
        self.stats = torch.zeros(self.E + 3, dtype=torch.float64)

    def forward(self, x, routing, maybe_recompute):
        """Send the rows x (n, C) to the experts that before_experts chose: (n, C), without shared.

        maybe_recompute(f, *args) returns f(*args). It is Block.around_experts, so that under
        --recompute full backward calls f again.
        """
        plan = self.dispatcher.plan(routing.expert_ids, routing.gates)
        return maybe_recompute(self.experts, x, routing.gates, plan)

    def before_experts(self, x, maybe_recompute):
        """Return the Routing of the rows x (n, C).

        All shapes are static here, so fast/compile.py compiles this together with attention.
        """
        # The routing is never recomputed, because rounding could lead to other experts.
        gates, expert_ids, router_loss = self.route(x)
        shared = None
        if self.shared is not None:
            shared = maybe_recompute(self.shared, x)
        return Routing(gates, expert_ids, router_loss, shared)

    def route(self, x):
        """Return the gates (n, K) in x's dtype, the experts' numbers (n, K), the router loss ().

        x (n, C). Scores are in at least fp32. Among equal scores, the expert with the lower number
        is chosen. The router loss is this rank's part of the total.
        """
        K = self.K
        logits = self.router(x)  # (n, E)
        if self.cfg.router == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(1, keepdim=True)  # what the balance loss balances
            bias = self.router.bias
            expert_ids = stable_top_k(scores if bias is None else scores + bias, K)
            gates = scores.gather(1, expert_ids)  # of the scores: the bias only affects the choice
            if K > 1:
                gates = gates / gates.sum(1, keepdim=True)
        else:
            probabilities = logits.softmax(1)
            expert_ids = stable_top_k(probabilities, K)
            if self.cfg.router == "softmax-topk":
                gates = logits.gather(1, expert_ids).softmax(1)
            else:
                gates = probabilities.gather(1, expert_ids)
        gates = gates.to(x.dtype)
        return gates, expert_ids, self.router_loss(logits, probabilities, expert_ids)

    def router_loss(self, logits, probabilities, expert_ids):
        """Return this rank's part of aux_coef * balance loss + z_coef * z-loss, ().

        The balance loss is E * sum over the experts of f_i * P_i. f_i is the fraction of the
        micro-batch's K * rows choices that fall on expert i, and P_i is the mean probability of
        expert i over the micro-batch's rows (Switch Transformer, arXiv:2101.03961 eq. 4-6; with
        several choices as in Megatron-LM). The balance loss is 1 when the load is balanced, and E/K
        when all tokens go to the same K experts. The z-loss is the mean of logsumexp(logits)^2
        (arXiv:2202.08906 eq. 5). The balance loss counts what the router would choose without its
        bias, before any row is dropped. The z-loss depends on the logits alone. The parts of the
        cp x tp ranks add up to the losses of the micro-batch, because each rank sums P_i over its
        own rows.
        """
        n, E = logits.shape
        K = self.K
        cp = self.mesh.cp
        tp = self.mesh.tp
        num_tokens_per_expert = count_tokens(expert_ids, E)  # (E,)
        if self.router.bias is None:
            chosen = num_tokens_per_expert
        else:
            chosen = count_tokens(stable_top_k(probabilities, K), E)

        # The ranks of tp and cp share one micro-batch.
        total = tp.all_reduce(chosen.to(probabilities.dtype))  # SUM of E counts, over tp
        total = cp.all_reduce(total)  # SUM of E counts, over cp
        rows = n * tp.size * cp.size  # of the micro-batch
        # f_i is total / (K * rows), and P_i is the ranks' sum of probabilities.sum(0) / rows.
        balance_loss = (probabilities.sum(0) * total).sum() * E / (K * rows * rows)
        z_loss = logits.logsumexp(1).square().sum() / rows
        with torch.no_grad():
            entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum() / rows
            self.stats[:E] += num_tokens_per_expert
            self.stats[E:] += torch.stack([balance_loss, z_loss, entropy]).double()
        return self.cfg.aux_coef * balance_loss + self.cfg.z_coef * z_loss

    def experts(self, x, gates, plan):
        """Return the sum of gate * expert(row) over a row's K choices: x (n, C) -> (n, C).

        gates (n, K). plan: what the dispatcher's plan() returned.
        """
        rows = self.dispatcher.dispatch(x, plan)  # (R, C), by expert
        results = self.ffn(rows, plan.ends)  # (R, C), by expert
        return self.dispatcher.combine(results, gates, plan)

    def ffn(self, x, ends):
        """Send each row through its expert: (R, C) -> (R, C). An expert's rows end at ends (e,).

        From Capacity: (e, rows, C) -> (e, rows, C), and ends is None.
        """
        # On a GPU one function does all of this for SwiGLU. The lines below its call are the
        # reference.
        if self.cfg.mlp == "swiglu" and use_grouped_mm(x, self.w1) and x.numel():
            ends = None if ends is None else ends.to(torch.int32)
            return SwiGLUExperts.apply(x, self.w1, self.w3, self.w2, ends)
        products = [grouped_mm(x, w, ends) for w in (self.w1, self.w3) if w is not None]
        return grouped_mm(ACTIVATIONS[self.cfg.mlp](*products), self.w2, ends)


class Router(nn.Module):
    """The router's weights, one row per expert, and its bias. MoE.route computes the scores.

    The bias only affects the choice: loss-free balancing, arXiv:2408.15664.
    """

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
    """Return the columns of the K largest scores of each row, the largest first: (n, E) -> (n, K).

    Among equal scores, the lowest column comes first. torch.topk leaves this open.
    """
    rest = scores.detach()
    columns = torch.arange(scores.size(1), device=scores.device)
    picked = []
    for _ in range(K):
        column = rest.max(1).indices  # (n,) the first of the largest
        picked.append(column)
        # The compiler makes one kernel of these rounds, which it cannot do with scatter.
        rest = rest.masked_fill(columns == column.unsqueeze(1), -torch.inf)
    return torch.stack(picked, 1)


def count_tokens(expert_ids, E):
    """Return how often each expert occurs: expert_ids (n, K) -> (E,).

    bincount would synchronise with the host.
    """
    flat = expert_ids.flatten()
    zeros = torch.zeros(E, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat))


# -----------------------------------------------------------------------------
# The token dispatchers

class Dispatcher:
    """Brings rows to their experts and back. Each layer has one and makes a plan per micro-batch.

    Its subclasses have these methods:
        plan(expert_ids, gates)  (n, K) each -> who goes where; backward uses the same plan. Only
                                 Capacity reads the gates
        dispatch(x, plan)        rows x (n, C) -> (R, C), on their experts' ranks, by expert
        combine(y, gates, plan)  results y (R, C) -> (n, C), at home: the sum of gate * result
    Capacity has (e, rows, C) instead of (R, C).

    A row has K copies, one for each expert that it visits. A slot is a place in the order by
    expert. The perm of this file's plans says which copy stands in each slot, and inv_perm in which
    slot each copy stands: see ops/permute.py.
    """

    def __init__(self, cfg, mesh):
        self.cfg = cfg
        self.ep = mesh.ep
        self.E = cfg.n_experts
        self.K = cfg.top_k
        self.e = cfg.n_experts // mesh.ep.size
        # Counts of the step so far. They are on the device, so that the host need not wait for it.
        self.n_dropped = torch.zeros((), dtype=torch.float64)  # copies
        # The largest R of a micro-batch. Only fast/graph.py reads it.
        self.rows_needed = torch.zeros((), dtype=torch.int64)

    def reset_stats(self):
        self.n_dropped.zero_()
        self.rows_needed.zero_()


class LocalPlan(NamedTuple):
    perm: torch.Tensor      # (N,) the copy in each slot
    inv_perm: torch.Tensor  # (N,) the slot of each copy
    ends: torch.Tensor      # (E,) int32, where each expert's slots end


class Local(Dispatcher):
    """All experts are on this rank: shapes are static, and nothing is sent."""

    def plan(self, expert_ids, gates):
        copies = sort_by_expert(expert_ids.flatten(), self.E)
        return LocalPlan(copies.perm, copies.inv_perm, copies.ends)

    def dispatch(self, x, plan):  # (n, C) -> (N, C)
        return Permute.apply(x, plan.perm, plan.inv_perm, self.K)

    def combine(self, y, gates, plan):  # (N, C) -> (n, C)
        return Unpermute.apply(y, gates, plan.perm, plan.inv_perm)


class AllToAllPlan(NamedTuple):
    perm: torch.Tensor       # (N,) as in LocalPlan, for the copies of this rank
    inv_perm: torch.Tensor   # (N,)
    send: list               # rows from here to each ep rank; N is their sum
    receive: list            # rows from each ep rank to here; R is their sum
    by_expert: torch.Tensor  # (R,) permutation: received rows, which stand by sender -> by expert
    by_sender: torch.Tensor  # (R,) its inverse
    ends: torch.Tensor       # (e,) where each local expert's rows end, by expert


class AllToAll(Dispatcher):
    """Dropless over ep ranks. The host needs the row counts, so it waits for the GPU in each layer.

    dispatch has three steps. The drawing has two ranks, experts a and b on rank 0, c and d on rank
    1, and K = 1:

                           Permute:      all_to_all:     Permute:
                           by expert     by sender       by local expert
        rank 0  c a d b d  [a b|c d d]   [a b|a a a b]   [a a a a|b b]   send [2, 3], receive [2, 4]
        rank 1  a a b a    [a a a b|]    [c d d|]        [c|d d]         send [4, 0], receive [3, 0]
    Here | stands between receivers, then between senders, then between local experts. The ends are
    [4, 6] on rank 0 and [1, 3] on rank 1. combine does the same steps backwards.
    """

    def plan(self, expert_ids, gates):
        ep = self.ep
        copies = sort_by_expert(expert_ids.flatten(), self.E)
        # Tables of rows: sent_counts (ep, e) by receiver and expert, received_counts by sender.
        sent_counts = copies.counts.view(ep.size, self.e)
        # E counts to the experts' owners, over ep. Counts take this method. Rows take the function
        # all_to_all, which has a gradient.
        received_counts = ep.all_to_all(copies.counts).view(ep.size, self.e)
        # rows_needed is no part of the plan: fast/graph.py reads it. This line stands before the
        # sync point, so the device computes it while the host waits.
        torch.maximum(self.rows_needed, received_counts.sum(), out=self.rows_needed)

        # Sync point, the only one here: all_to_all takes the sizes of its messages from the host.
        send, receive = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()
        R = sum(receive)

        # Received rows stand by sender, and by expert among those of one sender. A local expert has
        # a number from 0 to e - 1, on each rank. With the counts [[2, 1], [1, 2]], local_expert is
        # [0 0 1 | 0 1 1], and by_expert is [0 1 3 | 2 4 5].
        numbers = torch.arange(self.e, device=expert_ids.device).repeat(ep.size)  # (ep*e,)
        row_counts = received_counts.flatten()  # (ep*e,)
        local_expert = numbers.repeat_interleave(row_counts, output_size=R)  # (R,)
        by_expert = local_expert.argsort(stable=True)
        by_sender = invert_permutation(by_expert)
        ends = received_counts.sum(0).cumsum(0)
        return AllToAllPlan(copies.perm, copies.inv_perm, send, receive, by_expert, by_sender, ends)

    def dispatch(self, x, plan):  # (n, C) -> (R, C)
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K)  # (N, C), by expert
        # Block j of the N rows goes to rank j, over ep.
        x = all_to_all(x, self.ep, plan.send, plan.receive)  # (R, C), by sender
        # Each of the R rows stands there once, so this is a plain permutation.
        return Permute.apply(x, plan.by_expert, plan.by_sender)  # (R, C), by expert

    def combine(self, y, gates, plan):  # (R, C) -> (n, C)
        y = Permute.apply(y, plan.by_sender, plan.by_expert)  # (R, C), by sender
        # The same blocks, R rows, go back over ep.
        y = all_to_all(y, self.ep, plan.receive, plan.send)  # (N, C), by expert
        return Unpermute.apply(y, gates, plan.perm, plan.inv_perm)


class CapacityPlan(NamedTuple):
    perm: torch.Tensor      # (E*capacity,) the copy in each slot, N where the slot is empty
    inv_perm: torch.Tensor  # (N,) the slot of each copy, E*capacity where the copy was dropped
    ends = None             # a class attribute, not a field of the tuple: experts have equal rows


class Capacity(Dispatcher):
    """Each expert takes at most `capacity` copies from this rank. Shapes are static, and messages
    are even.

    Each rank chooses among its own rows. So which rows are dropped depends on tp, cp and the
    micro-batch, as in Megatron-LM.
    """
    padded = True  # what Permute and Unpermute are told: slots can be empty, and copies dropped

    def plan(self, expert_ids, gates):
        perm, inv_perm, _ = self.assign(expert_ids, gates)
        return CapacityPlan(perm, inv_perm)

    def assign(self, expert_ids, gates):
        """Return perm, inv_perm and the capacity.

        --drop-policy probs keeps the largest gates, position keeps the first rows. Among equal
        gates, the earlier row is kept.
        """
        expert = expert_ids.flatten()  # (N,)
        capacity = expert_capacity(self.cfg, expert_ids.size(0))
        priority = torch.arange(expert.numel(), device=expert.device)  # the order of the rows
        if self.cfg.drop_policy == "probs":
            priority = gates.detach().flatten().argsort(descending=True, stable=True)
        perm, inv_perm, n_dropped = assign_slots(expert, priority, self.E, capacity)
        self.n_dropped += n_dropped
        return perm, inv_perm, capacity

    def dispatch(self, x, plan):  # (n, C) -> (e, ep*capacity, C)
        # (E*capacity, C), by expert
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K, self.padded)
        x = all_to_all(x, self.ep)  # (E*capacity, C), by sender: even blocks, over ep
        x = x.unflatten(0, (self.ep.size, self.e, -1))  # (ep, e, capacity, C)
        return x.transpose(0, 1).flatten(1, 2)

    def combine(self, y, gates, plan):  # (e, ep*capacity, C) -> (n, C)
        y = y.unflatten(1, (self.ep.size, -1)).transpose(0, 1)  # (ep, e, capacity, C), by sender
        y = all_to_all(y.flatten(0, 2), self.ep)  # (E*capacity, C): the same blocks back, over ep
        return Unpermute.apply(y, gates, plan.perm, plan.inv_perm, self.padded)


def expert_capacity(cfg, n):
    """Return how many rows each expert takes from a rank that has n token rows."""
    rows = n * cfg.top_k / cfg.n_experts * cfg.capacity_factor
    return min(math.ceil(rows * (1 - 1e-9)), n)  # in floats, 50 * 1.1 is a little more than 55


def plain_dispatcher(cfg, mesh):
    """Return the dispatcher for these flags that needs only collectives."""
    if cfg.capacity_factor:
        return Capacity(cfg, mesh)
    if mesh.ep.size == 1:
        return Local(cfg, mesh)
    return AllToAll(cfg, mesh)


# -----------------------------------------------------------------------------
# Before and after a step

def moe_layers(model):
    """Return {layer number: MoE} of this stage."""
    return {int(i): block.moe for i, block in model.blocks.items() if block.moe is not None}


def reset_stats(model):
    """Begin a new step: nothing has been counted yet."""
    for layer in moe_layers(model).values():
        layer.stats.zero_()
        layer.dispatcher.reset_stats()


@torch.no_grad()
def update_router_bias(model, rate, not_finite):
    """Balance without a loss: raise the bias of experts below the mean load, lower others.

    The load is that of the global batch, and a bias changes by `rate`. not_finite: () 1.0 where the
    update was refused; then no bias changes. Collective over the stage.
    """
    for layer in moe_layers(model).values():
        if layer.router.bias is None:
            continue
        load = layer.stats[:layer.E].clone()
        layer.mesh.stage.all_reduce(load)  # SUM of E counts, over the stage
        step = rate * (load.mean() - load).sign().float()
        layer.router.bias += step * (1 - not_finite)


@torch.no_grad()
def expert_stats(model, micro_batches):
    """Return the statistics of the step just done, on every rank: {layer: see layer_stats}.

    micro_batches: those of the whole global batch. Collective: each stage fills its layers' rows.
    """
    E = model.cfg.n_experts
    device = next(model.parameters()).device
    table = torch.zeros(model.cfg.n_layer, E + 4, dtype=torch.float64, device=device)
    for i, layer in moe_layers(model).items():
        table[i] = torch.cat([layer.stats, layer.dispatcher.n_dropped.view(1)])
    model.mesh.world.all_reduce(table)  # SUM of L*(E+4) numbers, over the world
    return {i: layer_stats(row, E, micro_batches) for i, row in enumerate(table.tolist())}


def layer_stats(row, E, micro_batches):
    """Return {load: the experts' fractions of the copies, dropped: a fraction, aux, z, entropy}."""
    num_tokens_per_expert = row[:E]
    copies = sum(num_tokens_per_expert)
    balance_loss, z_loss, entropy = row[E:E + 3]
    n_dropped = row[E + 3]
    return {"load": [count / copies for count in num_tokens_per_expert],
            "dropped": n_dropped / copies,
            "aux": balance_loss / micro_batches,
            "z": z_loss / micro_batches,
            "entropy": entropy / micro_batches}

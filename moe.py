"""Mixture of Experts: the MLP of a block, E times over, of which each token visits K.

The rows (n, C) of a rank are already its own share of the micro-batch (cp splits sequences, tp splits rows),
so experts need no tp. The ranks of a stage are viewed a second time as (edp, ep), and expert i lives on ep
rank i // e. Four ranks, ep 4, four experts, K = 1; a letter is the expert that a row visits:

    rank 0   [a a b d]      sort by      [a a|b|.|d]      all_to_all     [aa a . a]   expert a runs on these
    rank 1   [c a d d]      expert       [a|.|c|d d]      block j goes   [b . bb .]   expert b
    rank 2   [b b c c]     ---------->   [.|b b|c c|.]    to rank j      [. c cc c]   expert c
    rank 3   [a c d d]                   [a|.|c|d d]     ------------>   [d dd . dd]  expert d
and the same way back, after which each row stands where it came from.

    Router            one logit per expert
    token dispatcher  plan: who goes where; dispatch: rows to their experts; combine: back, times their gates
        Local         one rank holds all experts: a sort and a gather
        AllToAll      dropless over ep ranks: blocks as long as they are, uneven all_to_all
        Capacity      every expert takes the same number of rows, the rest is dropped: even all_to_all, bmm
    MoE               top-k, gates, balancing losses; the experts' matrices; in the place of a block's MLP
fast/symm_mem.py has the dispatchers that write rows directly into other GPUs' memory.
"""
import math
from typing import NamedTuple

import torch
import torch.nn as nn

from ops.activations import ACTIVATIONS, GATED
from ops.grouped_mm import SwiGLUExperts, grouped_mm, use_grouped_mm
from ops.permute import Permute, Unpermute, assign_capacity_slots, invert_permutation, sort_by_expert
from parallel import all_to_all, parameter

# -----------------------------------------------------------------------------
# token dispatchers. a row of x has K copies, one for each expert that it visits; perm and inv_perm say which
# copy stands in which slot and back (ops/permute.py), offs where each local expert's rows end

class Dispatcher:
    """One per MoE layer; its plan is made once per micro-batch and never recomputed in backward.
        plan(ids, p)         experts ids (n, K), gates p (n, K) -> who goes where
        dispatch(x, plan)    rows x (n, C) -> (R, C), by expert, on their ranks; Capacity: (e, rows, C)
        combine(y, p, plan)  the experts' results, likewise -> (n, C): back home, the sum of gate * result"""

    def __init__(self, cfg, mesh):
        self.cfg, self.ep = cfg, mesh.ep
        self.E, self.K, self.e = cfg.n_experts, cfg.top_k, cfg.n_experts // mesh.ep.size
        # of the step so far; on the device, so that the host need not wait for it
        self.n_dropped = torch.zeros((), dtype=torch.float64)
        self.rows_needed = torch.zeros((), dtype=torch.int64)  # the most rows that came here in a micro-batch

    def reset_stats(self):
        self.n_dropped.zero_()
        self.rows_needed.zero_()

    def output_buffer(self):
        """The tensor that receives the experts' results (at least R, C), or None to allocate one."""
        return None


class LocalPlan(NamedTuple):
    perm: torch.Tensor      # (N,) the copy in each slot
    inv_perm: torch.Tensor  # (N,) the slot of each copy
    offs: torch.Tensor      # (E,)


class Local(Dispatcher):
    """All experts are on this rank: shapes are static, nothing is sent."""

    def plan(self, ids, p):
        perm, inv_perm, counts = sort_by_expert(ids.flatten(), self.E)
        return LocalPlan(perm, inv_perm, counts.cumsum(0))

    def dispatch(self, x, plan):  # (n, C) -> (N, C)
        return Permute.apply(x, plan.perm, plan.inv_perm, self.K, False)

    def combine(self, y, p, plan):  # (N, C) -> (n, C)
        return Unpermute.apply(y, p, plan.perm, plan.inv_perm, False)


class AllToAllPlan(NamedTuple):
    perm: torch.Tensor       # (N,) as in LocalPlan, for the copies of this rank
    inv_perm: torch.Tensor   # (N,)
    send: list               # rows from here to each ep rank
    receive: list            # rows from each ep rank to here; R is their sum
    by_expert: torch.Tensor  # (R,) permutation: received rows, which stand by sender -> by expert
    by_sender: torch.Tensor  # (R,) its inverse
    offs: torch.Tensor       # (e,)


class AllToAll(Dispatcher):
    """Dropless over ep ranks: the host must know the row counts, so it waits for the GPU in each layer."""

    def plan(self, ids, p):
        ep, e = self.ep, self.e
        perm, inv_perm, counts = sort_by_expert(ids.flatten(), self.E)
        # (ep, e) rows from each sender for each of this rank's experts: E counts to their owners, over ep
        received = ep.all_to_all(counts).view(ep.size, e)
        torch.maximum(self.rows_needed, received.sum(), out=self.rows_needed)
        splits = torch.stack([counts.view(ep.size, e).sum(1), received.sum(1)])
        send, receive = splits.tolist()  # sync point, the only one
        local = torch.arange(e, device=perm.device).repeat(ep.size)  # rows come by sender, then by expert
        expert = local.repeat_interleave(received.flatten(), output_size=sum(receive))  # (R,)
        by_expert = expert.argsort(stable=True)
        return AllToAllPlan(perm, inv_perm, send, receive, by_expert, invert_permutation(by_expert),
                            received.sum(0).cumsum(0))

    def dispatch(self, x, plan):
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K, False)  # (N, C), by expert
        x = all_to_all(x, self.ep, plan.send, plan.receive)  # (R, C), by sender: block j to rank j, over ep
        return Permute.apply(x, plan.by_expert, plan.by_sender, 1, False)  # (R, C), by expert

    def combine(self, y, p, plan):
        y = Permute.apply(y, plan.by_sender, plan.by_expert, 1, False)  # (R, C), by sender
        y = all_to_all(y, self.ep, plan.receive, plan.send)  # (N, C): the same blocks back, over ep
        return Unpermute.apply(y, p, plan.perm, plan.inv_perm, False)


class CapacityPlan(NamedTuple):
    perm: torch.Tensor      # (E*capacity,) the copy in each slot, N where the slot is empty
    inv_perm: torch.Tensor  # (N,) the slot of each copy, E*capacity where the copy was dropped
    offs = None             # of the class, no field: every expert has the same number of rows


class Capacity(Dispatcher):
    """Each expert takes at most `capacity` copies from this rank, chosen among the rank's own rows: tp and
    micro-batch decide which rows are dropped, as in Megatron-LM. Shapes are static, messages are even."""

    def plan(self, ids, p):
        perm, inv_perm, _ = self.assign(ids, p)
        return CapacityPlan(perm, inv_perm)

    def assign(self, ids, p):
        """-> perm, inv_perm, capacity. --drop-policy probs keeps the largest gates, position keeps the first
        rows; among equals the earlier row is kept."""
        expert, capacity = ids.flatten(), expert_capacity(self.cfg, ids.size(0))
        priority = torch.arange(expert.numel(), device=expert.device)  # the order of the rows
        if self.cfg.drop_policy == "probs":
            priority = p.detach().flatten().argsort(descending=True, stable=True)
        perm, inv_perm, dropped = assign_capacity_slots(expert, priority, self.E, capacity)
        self.n_dropped += dropped
        return perm, inv_perm, capacity

    def dispatch(self, x, plan):
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K, True)  # (E*capacity, C), by expert
        x = all_to_all(x, self.ep).unflatten(0, (self.ep.size, self.e, -1))  # even blocks, over ep
        return x.transpose(0, 1).flatten(1, 2)  # by sender (ep, e, capacity, C) -> (e, ep*capacity, C)

    def combine(self, y, p, plan):
        y = y.unflatten(1, (self.ep.size, -1)).transpose(0, 1)  # back to by sender: (ep, e, capacity, C)
        y = all_to_all(y.flatten(0, 2), self.ep)  # (E*capacity, C): the same blocks back, over ep
        return Unpermute.apply(y, p, plan.perm, plan.inv_perm, True)


def expert_capacity(cfg, n):
    """Rows that each expert takes from a rank that has n token rows."""
    return min(math.ceil(n * cfg.top_k / cfg.n_experts * cfg.capacity_factor), n)


def plain_dispatcher(cfg, mesh):
    """-> the dispatcher for these flags that needs nothing but collectives."""
    kind = Capacity if cfg.capacity_factor else Local if mesh.ep.size == 1 else AllToAll
    return kind(cfg, mesh)


# -----------------------------------------------------------------------------

class Router(nn.Module):
    """Its parameters: one row of weights per expert, and the bias, which only affects the choice (loss-free
    balancing, arXiv:2408.15664). MoE.route computes the scores."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.weight = parameter((cfg.n_experts, cfg.n_embd), mesh)
        steers = cfg.router == "sigmoid" and cfg.router_bias_rate > 0
        self.register_buffer("bias", torch.zeros(cfg.n_experts, dtype=torch.float32) if steers else None)

    def forward(self, x):
        """x (n, C), in at least fp32 -> logits (n, E)"""
        return x @ self.weight.to(x.dtype).T


class MoE(nn.Module):
    """In the place of the MLP: (n, C) -> (n, C), and this rank's part of the balancing losses ()."""

    def __init__(self, cfg, mesh, shared=None, dispatcher=plain_dispatcher):
        super().__init__()
        E, C = cfg.n_experts, cfg.n_embd
        self.cfg, self.mesh, self.E, self.K = cfg, mesh, E, cfg.top_k
        self.router = Router(cfg, mesh)
        self.w1 = parameter((E, cfg.ffn_hidden, C), mesh, expert=True)  # (e, F, C)
        self.w3 = parameter((E, cfg.ffn_hidden, C), mesh, expert=True) if cfg.mlp in GATED else None
        self.w2 = parameter((E, C, cfg.ffn_hidden), mesh, expert=True)  # (e, C, F)
        self.shared = shared  # an MLP that every token visits, or None
        self.dispatcher = dispatcher(cfg, mesh)
        # (E + 3,) of the step so far: copies per expert; aux loss, z-loss, router entropy
        self.stats = torch.zeros(E + 3, dtype=torch.float64)

    def forward(self, x, recompute):
        """x (n, C); recompute(f, *args) runs f, and under --recompute runs it again in backward."""
        p, ids, aux = self.route(x)  # never recomputed: rounding could choose other experts
        plan = self.dispatcher.plan(ids, p)
        y = recompute(self.experts, x, p, plan)
        return (y if self.shared is None else y + recompute(self.shared, x)), aux

    def experts(self, x, p, plan):
        """x (n, C), gates p (n, K) -> (n, C): the sum over the K choices of gate * expert(row)."""
        rows = self.dispatcher.dispatch(x, plan)  # (R, C), by expert
        return self.dispatcher.combine(self.ffn(rows, plan.offs), p, plan)

    def ffn(self, x, offs):
        """Each row through its expert: x (R, C) with offs (e,), or (e, rows, C) with offs None -> like x."""
        if self.cfg.mlp == "swiglu" and use_grouped_mm(x, self.w1) and x.numel():
            offs = None if offs is None else offs.to(torch.int32)
            out = self.dispatcher.output_buffer()
            return SwiGLUExperts.apply(x, self.w1, self.w3, self.w2, offs, out)
        products = [grouped_mm(x, w, offs) for w in (self.w1, self.w3) if w is not None]
        return grouped_mm(ACTIVATIONS[self.cfg.mlp](*products), self.w2, offs)

    def route(self, x):
        """x (n, C) -> gates p (n, K) in x's dtype, experts ids (n, K), this rank's part of the weighted aux
        and z losses (). Scores are in at least fp32. A tie goes to the expert with the lower number."""
        cfg, K = self.cfg, self.K
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = self.router(x.to(wide))
        if cfg.router == "sigmoid":
            scores = logits.sigmoid()
            probs = scores / scores.sum(1, keepdim=True)  # what the aux loss balances
            ids = stable_top_k(scores if self.router.bias is None else scores + self.router.bias, K)
            p = scores.gather(1, ids)
            p = p / p.sum(1, keepdim=True) if K > 1 else p
        else:
            probs = logits.softmax(1)
            ids = stable_top_k(probs, K)
            p = logits.gather(1, ids).softmax(1) if cfg.router == "softmax-topk" else probs.gather(1, ids)
        return p.to(x.dtype), ids, self.balance(logits, probs, ids)

    def balance(self, logits, probs, ids):
        """The Switch load-balancing loss, arXiv:2101.03961 eq. 4-6, on Megatron-LM's scale (1 when balanced,
        E/K when all tokens go to K experts), and the z-loss, arXiv:2202.08906 eq. 5. Each rank of cp x tp
        holds a part; the parts add up to the micro-batch's loss. Counted before anything is dropped, and
        without the router's bias."""
        n, E, K, cp, tp = probs.size(0), self.E, self.K, self.mesh.cp, self.mesh.tp
        # (E,) without the bias, for the aux loss; and with it, the rows that each expert gets
        chosen = count_tokens(ids if self.router.bias is None else stable_top_k(probs, K), E)
        load = chosen if self.router.bias is None else count_tokens(ids, E)
        # SUM of E counts, over tp and over cp: their ranks share one micro-batch
        total = cp.all_reduce(tp.all_reduce(chosen.to(probs.dtype)))
        rows = n * tp.size * cp.size
        aux = (probs.sum(0) * total).sum() * E / (K * rows * rows)
        z = logits.logsumexp(1).square().sum() / rows
        with torch.no_grad():
            entropy = -(probs * probs.clamp(min=1e-30).log()).sum() / rows
            self.stats[:E] += load
            self.stats[E:] += torch.stack([aux, z, entropy]).double()
        return self.cfg.aux_coef * aux + self.cfg.z_coef * z


def stable_top_k(scores, K):
    """scores (n, E) -> (n, K) columns of the K largest, the largest first; among equals the lowest column,
    which torch.topk leaves open."""
    rest, picked = scores.detach(), []
    for _ in range(K):
        i = rest.max(1).indices  # the first of the largest
        picked.append(i)
        rest = rest.scatter(1, i.unsqueeze(1), -torch.inf)
    return torch.stack(picked, 1)


def count_tokens(ids, E):
    """-> (E,) how often each expert occurs in ids; bincount would synchronise with the host."""
    flat = ids.flatten()
    return torch.zeros(E, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))


# -----------------------------------------------------------------------------
# before and after a step

def moe_layers(model):
    """-> {layer number: MoE} of this stage."""
    return {int(i): block.moe for i, block in model.blocks.items() if block.moe is not None}


def reset_stats(model):
    """A new step begins: nothing has been counted."""
    for moe in moe_layers(model).values():
        moe.stats.zero_()
        moe.dispatcher.reset_stats()


@torch.no_grad()
def update_router_bias(model, rate, found_inf):
    """Auxiliary-loss-free balancing: an expert's bias rises by `rate` if its load is below the mean of the
    global batch, and falls if above. found_inf: () 1.0 where the update was refused; then no bias changes.
    Collective over the stage."""
    for moe in moe_layers(model).values():
        if moe.router.bias is not None:
            load = moe.stats[:moe.E].clone()
            moe.mesh.stage.all_reduce(load)  # SUM of E counts, over the stage
            moe.router.bias += rate * (load.mean() - load).sign().float() * (1 - found_inf)


@torch.no_grad()
def expert_stats(model, micro_batches):
    """Of the step just done, on every rank: {layer: {load: [E fractions of the copies], dropped, aux, z,
    entropy}}. micro_batches: of the whole global batch. Collective: each stage fills its layers' rows."""
    cfg, E = model.cfg, model.cfg.n_experts
    table = torch.zeros(cfg.n_layer, E + 4, dtype=torch.float64, device=next(model.parameters()).device)
    for i, moe in moe_layers(model).items():
        table[i] = torch.cat([moe.stats, moe.dispatcher.n_dropped.view(1)])
    model.mesh.world.all_reduce(table)  # SUM of L*(E+4) numbers, over the world
    out = {}
    for i, row in enumerate(table.tolist()):
        copies, (aux, z, entropy, dropped) = sum(row[:E]), row[E:]
        out[i] = {"load": [c / copies for c in row[:E]], "dropped": dropped / copies,
                  "aux": aux / micro_batches, "z": z / micro_batches, "entropy": entropy / micro_batches}
    return out

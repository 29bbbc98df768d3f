"""Rows to the experts over a network without asking the host: messages of a fixed size.

moe.AllToAll has to know on the host how many rows travel: the GPU idles in every layer. Here each pair of
ranks exchanges as many rows as the fullest pair needed lately and a tenth more (graph.BufferSizer); the rest
of a message is zeros. A step in which some pair has more is void and done again with exact messages
(GraphedStep). The price is bytes: slack - 1 times those that are needed.
"""
from typing import NamedTuple

import torch

from moe import AllToAll
from ops.permute import Permute, Unpermute, occupants, rank_within_expert, slots_from_ranks
from parallel import all_to_all


class PaddedPlan(NamedTuple):
    perm: torch.Tensor       # (rows,) the copy in each slot of the messages, N where the slot is empty
    inv_perm: torch.Tensor   # (N,) the slot of each copy, `rows` where it has no place
    by_expert: torch.Tensor  # (rows,) received slots by expert, then by sender; `rows` where there is none
    by_sender: torch.Tensor  # (rows,) where each received slot then stands, `rows` if it is empty
    ends: torch.Tensor       # (e,)


class PaddedAllToAll(AllToAll):
    """Twin of moe.AllToAll: the same rows in the same order. rows_in_use: rows of a rank's ep messages
    together, the same on every rank; if it is 0, or without gradients (evaluation, generation), the messages
    are exact. rows_needed: ep times the rows of the fullest pair."""
    rows_in_use = 0

    def plan(self, ids, p):
        ep, e, expert = self.ep.size, self.e, ids.flatten()
        rank, cumulative = rank_within_expert(expert, self.E)
        counts = cumulative[:, -1].reshape(ep, e)
        torch.maximum(self.rows_needed, ep * counts.sum(1).max(), out=self.rows_needed)
        if not self.rows_in_use or not torch.is_grad_enabled():
            return super().plan(ids, p)
        pair = -(-self.rows_in_use // (8 * ep)) * 8  # rows of a message
        rows, message = ep * pair, torch.arange(ep, device=ids.device).unsqueeze(1)  # (ep, 1)
        starts = (message * pair + counts.cumsum(1) - counts).flatten()  # (E,) where an expert's copies begin
        inv_perm = slots_from_ranks(expert, rank, cumulative, starts, e, pair)
        inv_perm = torch.where(inv_perm < 0, rows, inv_perm)
        # (ep, e) each sender's rows for each of this rank's experts: E counts to their owners, over ep
        stops = self.ep.all_to_all(counts.flatten()).view(ep, e).cumsum(1).clamp(max=pair)
        kept = stops.diff(dim=1, prepend=torch.zeros_like(message))
        moved = (kept.T.flatten().cumsum(0).view(e, ep).T - stops).flatten()  # by expert less in the message
        at = torch.arange(pair, device=ids.device).repeat(ep, 1)  # (ep, pair) place in the message
        local = torch.searchsorted(stops, at, right=True)  # the expert whose row stands there; e: nobody's
        by_sender = at + moved[(message * e + local).clamp(max=self.E - 1)]
        by_sender = torch.where(local < e, by_sender, rows).flatten()
        return PaddedPlan(occupants(inv_perm, rows), inv_perm, occupants(by_sender, rows), by_sender,
                          kept.sum(0).cumsum(0))

    def dispatch(self, x, plan):
        if not isinstance(plan, PaddedPlan):
            return super().dispatch(x, plan)
        x = Permute.apply(x, plan.perm, plan.inv_perm, self.K, True)  # (rows, C), by receiver
        x = all_to_all(x, self.ep)  # (rows, C), by sender: even blocks, over ep
        return Permute.apply(x, plan.by_expert, plan.by_sender, 1, True)  # (rows, C), by expert

    def combine(self, y, p, plan):
        if not isinstance(plan, PaddedPlan):
            return super().combine(y, p, plan)
        y = all_to_all(Permute.apply(y, plan.by_sender, plan.by_expert, 1, True), self.ep)  # likewise, back
        return Unpermute.apply(y, p, plan.perm, plan.inv_perm, True)

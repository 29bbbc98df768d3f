"""Rows to the experts over a network without asking the host: messages of a fixed size.

Each pair of ranks exchanges the same number of rows, which follows what the fullest pair needs
(graph.BufferSizer). The rest of a message is zeros. A step with more rows is void, and is repeated.
"""
import torch

from config import ceil_div
from moe import AllToAll, Plan
from ops.permute import invert, queue_by_expert


class PaddedAllToAll(AllToAll):
    """The twin of moe.AllToAll, with the same rows in the same order."""
    rows_in_use = 0  # of all ep messages of a rank, the same on every rank; 0: exact messages

    def active(self):
        return self.rows_in_use > 0 and torch.is_grad_enabled()

    def plan(self, expert_ids, gates):
        ep = self.ep.size
        expert = expert_ids.flatten()  # (N,)
        place, counts = queue_by_expert(expert, self.E)
        counts = counts.view(ep, self.e)  # rows from here for each expert, by its owner
        torch.maximum(self.rows_needed, ep * counts.sum(1).max(), out=self.rows_needed)  # of the fullest pair
        if not self.active():
            return super().plan(expert_ids, gates)

        message_rows = ceil_div(self.rows_in_use, 8 * ep) * 8  # per pair of ranks: a multiple of 8
        rows = ep * message_rows
        message = torch.arange(ep, device=expert_ids.device).unsqueeze(1)  # (ep, 1) its number

        # What leaves: copies stand by expert in the message to the expert's owner.
        starts = (message * message_rows + counts.cumsum(1) - counts).flatten()  # (E,) of an expert's copies
        inv_perm = starts[expert] + place
        message_end = (expert // self.e + 1) * message_rows
        inv_perm = torch.where(inv_perm < message_end, inv_perm, rows)

        by_sender, ends = self.received_slots(counts, message, message_rows)
        by_expert = invert(by_sender, rows)
        return Plan(invert(inv_perm, rows), inv_perm, ends, by_expert=by_expert, by_sender=by_sender)

    def received_slots(self, counts, message, message_rows):
        """Return by_sender (rows,) and ends of a Plan. by_sender is `rows` where a message has no row.

        counts (ep, e): rows from here for each expert. message (ep, 1): 0, 1, ...
        """
        ep, e = counts.shape
        # (ep, e) each sender's rows for each of this rank's experts: E counts to their owners, over ep
        received = self.ep.all_to_all(counts.flatten()).view(ep, e)
        stops = received.cumsum(1).clamp(max=message_rows)  # where each expert's rows end in a message
        kept = stops.diff(dim=1, prepend=torch.zeros_like(message))  # a full message has no more rows
        # How far a row moves from its place in its message to its place by expert, per sender and expert.
        moved = (kept.T.flatten().cumsum(0).view(e, ep).T - stops).flatten()

        place = torch.arange(message_rows, device=counts.device).repeat(ep, 1)  # (ep, message_rows)
        local = torch.searchsorted(stops, place, right=True)  # the expert of the row there; e: there is none
        by_sender = place + moved[(message * e + local).clamp(max=self.E - 1)]
        by_sender = torch.where(local < e, by_sender, ep * message_rows).flatten()
        return by_sender, kept.sum(0).cumsum(0)

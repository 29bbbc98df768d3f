"""Forward, backward and gradient sums as one CUDA graph: a thousand kernel launches become one.

A small model's kernels are done before python can start the next. Where every shape is static the work of a
step is the same list of kernels each time: it is recorded once and replayed on the same addresses
(pytorch.org, CUDA graphs). Experts without dropping, over ep, are recorded with some room to spare
(moe.plan_windows); a step whose rows did not fit is done again without the graph.
"""
import gc
import math

import torch

import moe
from fast.window import open_windows
from parallel import MAX

WARM = 3  # steps without a graph first: compilation, autotuning and NCCL's set-up must not be recorded


def static_shapes(cfg, mesh, device):
    """Whether every step launches the same kernels on the same shapes, without asking the host anything."""
    if cfg.n_experts and not cfg.capacity_factor:
        here = not torch.cuda.is_available() or moe.one_kernel(device)  # plan.py asks where there is no GPU
        if not (here and cfg.dtype == "bf16" and moe.aligned(cfg.n_embd, cfg.ffn_hidden)):
            return False  # moe.grouped_loop asks the host
    return (device.type == "cuda" and cfg.cuda_graph and not cfg.timers and mesh.pp.size == 1
            and cfg.dropout == 0 and cfg.recompute == "none" and (cfg.ep_slack > 0 or not bounded(cfg, mesh)))


def bounded(cfg, mesh):
    """Whether the shapes are static only within moe.plan_windows' room."""
    return cfg.n_experts > 0 and cfg.capacity_factor == 0 and mesh.ep.size > 1


class Graph:
    """f(batches) -> tensor, replayed. batches: list of (x, y); other numbers or shapes record anew.
    rooms: Rooms if the shapes depend on them."""

    def __init__(self, f, rooms=None):
        self.f, self.rooms, self.calls, self.shape, self.graph = f, rooms, 0, None, None

    def __call__(self, batches):
        shape = [x.shape for x, _ in batches]
        if shape != self.shape:
            self.calls, self.shape, self.graph = 0, shape, None
        if self.rooms is not None:
            self.rooms.open(self.rooms.slack > 0)
            if not self.rooms.slack:
                return self.f(batches)
        self.calls += 1
        if self.calls <= WARM:
            return self.f(batches)
        if self.graph is None:
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()  # the graph has its own memory: the warm steps' is not needed again
            self.inputs = [tuple(t.clone() for t in pair) for pair in batches]
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = self.f(self.inputs)
        for mine, theirs in zip(self.inputs, batches, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b, non_blocking=True)
        self.graph.replay()
        return self.output

    def fits(self, loss):
        """loss () of the step just done, of all ranks -> False if it is void: rows found no room."""
        void = not math.isfinite(loss.item())  # sync point
        if self.rooms.changed(void):
            self.output = self.graph = None  # recorded anew at the next call; the memory is free until then
            gc.collect()
            torch.cuda.empty_cache()
        self.rooms.open(False)
        return not void


class Rooms:
    """How many rows of the windows (moe.plan_windows) are in use: what the fullest rank needed and a tenth
    more, at most --ep-slack times the balanced number, for that is memory. The same on all ranks and, unlike
    the rows of a step, for many steps; closed (slack 0) while more is needed, and in the first step."""

    def __init__(self, model, limit, every=50):
        cfg, mesh = model.cfg, model.mesh
        self.layers, self.world, self.ep = list(moe.layers(model).values()), mesh.world, mesh.ep.size
        self.every, self.steps, self.redone, self.slack = every, every - 1, 0, 0.0
        self.limit = min(limit, float(self.ep))  # at ep all ranks' copies can go to one
        self.copies = cfg.micro_batch * cfg.seq_len // mesh.tp.size * cfg.top_k  # of a rank and micro-batch
        # () most rows that came to this rank, since the last choice
        self.need = torch.zeros_like(self.layers[0].need)
        open_windows(self.layers, self.rows(self.limit), self.need.device)

    def rows(self, slack):
        return -(-int(self.copies * slack) // 8) * 8

    def open(self, yes):
        for layer in self.layers:
            layer.room = self.rows(self.slack) if yes else 0

    def judge(self, loss):
        """loss () of this rank's part -> NaN if rows found no room here; the sum tells all ranks."""
        need = torch.stack([layer.need for layer in self.layers]).max()
        torch.maximum(self.need, need, out=self.need)
        room = self.layers[0].room
        return torch.where(need > room, torch.nan, loss) if room else loss

    def changed(self, void):
        """Chosen again after a void step, and now and then, for it needs less once the load is balanced."""
        self.steps, self.redone = self.steps + 1, self.redone + void
        if not void and self.steps < self.every:
            return False
        self.world.all_reduce(self.need, MAX)  # MAX of one number, over the world
        wanted = max(1.1 * self.need.item() / self.copies, 1.0)
        self.steps = self.need.zero_().item()
        if wanted > self.limit:
            wanted = self.limit if self.limit == self.ep else 0.0
        elif void:  # it grows: a new recording takes as long as some steps
            wanted = min(1.2 * wanted, self.limit)
        if 0.85 * self.slack < wanted <= self.slack:
            return False
        self.slack, before = wanted, self.slack
        return self.slack != before

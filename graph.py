"""Forward, backward and gradient sums as one CUDA graph: a thousand kernel launches become one.

A small model's kernels are done before python can start the next. Where every shape is static the work of a
step is the same list of kernels each time: it is recorded once and replayed on the same addresses
(pytorch.org, CUDA graphs).
"""
import gc

import torch

WARM = 3  # steps without a graph first: compilation, autotuning and NCCL's set-up must not be recorded


def static_shapes(cfg, mesh, device):
    """Whether every step launches the same kernels on the same shapes, without asking the host anything."""
    uneven = cfg.n_experts > 0 and cfg.capacity_factor == 0 and mesh.ep.size > 1  # row counts go by the host
    return (device.type == "cuda" and cfg.cuda_graph and not cfg.timers and mesh.pp.size == 1
            and cfg.dropout == 0 and cfg.recompute == "none" and not uneven)


class Graph:
    """f(batches) -> tensor, replayed. batches: list of (x, y); other numbers or shapes record anew."""

    def __init__(self, f):
        self.f, self.calls, self.shape = f, 0, None

    def __call__(self, batches):
        shape = [x.shape for x, _ in batches]
        if shape != self.shape:
            self.calls, self.shape, self.graph = 0, shape, None
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

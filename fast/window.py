"""Memory of a rank that the other ranks of its node read and write themselves, with no message in between.

An all_to_all asks the host how many rows go where, and who asks the host cannot be recorded in a CUDA graph.
With windows each rank writes its rows to where they belong on the others, over NVLink, and reads them there
when they are done; nobody but the GPUs knows how many there are. What a message gave for nothing must be said
here: a barrier before the others' rows are read, and before a window is written anew. (One-sided
communication, MPI-3 chapter 11; torch's symmetric memory makes the addresses. Experts over it: DeepSeek-AI's
DeepEP.)

A place is where a row goes: rank * rows + row of that rank's window; -1 where it goes nowhere.

Gradients and weights take the same way where they can, as plain copies: near.py.
"""
import socket
import weakref

import torch

from ops.fused import collect


class Window:
    """mine (rows, width) on each rank of an axis of GPUs; all: those of all ranks, by rank. Made by all ranks
    of the axis together, and not by torch's allocator. ValueError: these GPUs do not reach each other."""

    open = weakref.WeakSet()  # all of this process

    def __init__(self, axis, rows, width, dtype, device):
        import torch.distributed._symmetric_memory as symmetric
        self.axis, self.rows = axis, rows
        try:
            self.mine = symmetric.empty(rows, width, dtype=dtype, device=device)
            self.handle = symmetric.rendezvous(self.mine, axis.group)
        except RuntimeError as e:
            why = str(e).splitlines()[0]
            if "out of memory" in why:
                raise
            raise ValueError(f"the GPUs of {axis.name} {axis.size} cannot reach each other's memory ({why}); "
                             "try --no-cuda-graph --zero 0") from None
        Window.open.add(self)
        self.all = [self.handle.get_buffer(r, (rows, width), dtype) for r in range(axis.size)]
        self.addresses = torch.tensor([w.data_ptr() for w in self.all], device=device)

    def barrier(self):
        """The axis' ranks wait for each other, on the GPU: what they wrote before is seen after."""
        self.axis.record("barrier")
        self.handle.barrier()

    def _count(self, kind, place):
        """As if the places were dealt evenly: only the GPU knows."""
        row = self.mine.size(1) * self.mine.element_size()
        self.axis.record(kind, self.mine, place.numel() * row * (self.axis.size - 1) / self.axis.size)

    def push(self, x, place, K=1):
        """Write row c // K of x (n, width) to place[c], c < n*K. Read behind a barrier."""
        self._count("push", place)
        put(x.contiguous(), place, self, K)

    def pull(self, place):
        """-> (len(place), width): the rows at place, zeros where it is -1."""
        self._count("pull", place)
        return get(place, self)

    def offer(self, x):
        """This rank's rows x (R, width), R <= rows, for the others to pull; they may stand here already."""
        if x.data_ptr() != self.mine.data_ptr():
            self.mine[:x.size(0)].copy_(x)
        self.barrier()


def in_use():
    """Bytes of this process' windows, which torch's allocator does not count."""
    return sum(w.mine.nbytes for w in Window.open)


def together(mesh, axis, device):
    """Whether the ranks of each group of axis reach each other's memory: they stand on one node, each on a
    GPU of its own that all of them see, and a first window opens. One answer for all ranks, who ask
    together."""
    world, gpu = mesh.world, device.index  # None: a CPU
    reach = [p for p in range(torch.cuda.device_count() if gpu is not None else 0)
             if p == gpu or torch.cuda.can_device_access_peer(gpu, p)]
    seen = world.gather_objects((axis.ranks[0], socket.gethostname(), gpu, reach))
    for group in {group for group, *_ in seen}:
        hosts, gpus, reached = zip(*(rest for first, *rest in seen if first == group), strict=True)
        alike = gpu is not None and (len(set(gpus)) < len(gpus) or any(set(gpus) - set(r) for r in reached))
        if len(set(hosts)) > 1 or alike:
            return False
    opened = True
    if gpu is not None:
        try:
            Window(axis, 1, 128, torch.float32, device)
        except ValueError:
            opened = False
    return all(world.gather_objects(opened))


def put(x, place, window, K):
    if x.is_cuda:
        from ops import kernels
        kernels.push[(place.numel(),)](x, place, window.addresses, window.rows, x.size(1), K=K, BLOCK=512,
                                       num_warps=2)
        return
    for rank, theirs in enumerate(window.all):
        mask = (place >= 0) & (place // window.rows == rank)
        theirs[place[mask] % window.rows] = x[mask.nonzero().squeeze(1) // K]


def get(place, window):
    out = window.mine.new_empty(place.numel(), window.mine.size(1))
    if out.is_cuda:
        from ops import kernels
        kernels.pull[(place.numel(),)](out, place, window.addresses, window.rows, out.size(1), BLOCK=512,
                                       num_warps=2)
        return out
    out.zero_()
    for rank, theirs in enumerate(window.all):
        mask = (place >= 0) & (place // window.rows == rank)
        out[mask] = theirs[place[mask] % window.rows]
    return out


# -----------------------------------------------------------------------------
# rows to the experts and back: each other's adjoint, as moe.py's dispatch and combine are

class Push(torch.autograd.Function):
    """Copy row c // K of x (n, C) to place[c]. -> (R, C) what came here, by expert."""

    @staticmethod
    def forward(ctx, x, place, K, room, windows):
        ctx.save_for_backward(place)
        ctx.K, ctx.windows = K, windows
        into = windows[0]
        into.push(x, place, K)
        into.barrier()
        return into.mine[:room]

    @staticmethod
    def backward(ctx, g):
        (place,), (_, out, _) = ctx.saved_tensors, ctx.windows
        out.offer(g)
        g = out.pull(place)  # (N, C)
        if ctx.K > 1:
            g = collect(g, torch.arange(g.size(0), device=g.device), ctx.K, False)
        return g, None, None, None, None


class Pull(torch.autograd.Function):
    """Rows y (R, C), by expert, go back to whom they belong. -> (N, C), this rank's copies."""

    @staticmethod
    def forward(ctx, y, place, windows):
        ctx.save_for_backward(place)
        ctx.room, ctx.windows = y.size(0), windows
        windows[1].offer(y)
        return windows[1].pull(place)

    @staticmethod
    def backward(ctx, g):
        (place,), (_, _, back) = ctx.saved_tensors, ctx.windows
        back.push(g, place)
        back.barrier()
        return back.mine[:ctx.room], None, None


def open_windows(layers, rows, device):
    """Of each layer three (rows, C): rows come in one of its own, for backward needs them once more; results
    leave by the second and gradients come in the third, which all layers share. A window is used anew when
    its readers are known to be done: of the first by the next counts, of the others since a barrier on
    another window, which each rank passes after its reading, lies between any two uses."""
    cfg, ep, dtype = layers[0].cfg, layers[0].mesh.ep, layers[0].w1.dtype
    out, back = (Window(ep, rows, cfg.n_embd, dtype, device) for _ in range(2))
    for layer in layers:
        layer.windows = Window(ep, rows, cfg.n_embd, dtype, device), out, back

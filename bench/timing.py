"""How long the device takes for a collective on the slowest of all ranks, or for a kernel on one GPU."""
import time

import torch

from parallel import MAX
from runtime.timing import Stopwatch


def synchronize(device):
    """Wait until the device has done all its work. A CPU has no queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def slowest(world, f, iters):
    """Return the seconds of one call of f() on the slowest rank.

    They are the mean of `iters` calls, which all ranks start together.
    """
    synchronize(world.device)  # sync point: nothing is left to do
    world.everyone.barrier()  # start together
    began = time.perf_counter()
    for _ in range(iters):
        f()
    synchronize(world.device)  # sync point: a true time needs the work to be over
    seconds = torch.tensor((time.perf_counter() - began) / iters, device=world.device)
    return world.axis.all_reduce(seconds, MAX).item()  # one number, over the world


def gpu_milliseconds(f, n=20):
    """Return the milliseconds of one call of f() on the GPU: the mean of n calls after three, by events."""
    for _ in range(3):
        f()
    watch = Stopwatch(torch.accelerator.current_accelerator())
    begin = watch.mark()
    for _ in range(n):
        f()
    return watch.ms(begin, watch.mark()) / n


def graphed(f):
    """Record f() as a CUDA graph after three calls, and return the function that replays it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay

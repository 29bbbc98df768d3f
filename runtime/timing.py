"""Milliseconds on the device: between any two points (Stopwatch), of a step (Clock), of its phases (Timers).

    slow_on_cpu   says before a run starts what makes it slow without a GPU
"""
import contextlib
import time

import torch

from model import DTYPES


class Stopwatch:
    """Points in time on the device.

    On a GPU the points are events, because a host clock would time only the launches. On a CPU the host's
    clock is used.
    """

    def __init__(self, device):
        self.device = device
        self.cpu = device.type == "cpu"

    def mark(self):
        """Return the point in time when the device has done what was launched so far."""
        if self.cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def ms(self, begin, end):
        """Return the milliseconds between two marks. Wait until the device has reached the second."""
        if self.cpu:
            return (end - begin) * 1e3
        end.synchronize()  # sync point
        return begin.elapsed_time(end)


class Clock:
    """Mean milliseconds of a training step, without pauses (evaluation, saving)."""

    def __init__(self, device):
        self.watch = Stopwatch(device)
        self._start_counts()
        self.resume()

    def _start_counts(self):
        self.steps = 0
        self.samples = 0
        self.total = 0.0  # milliseconds

    def resume(self):
        self.started = self.watch.mark()

    def pause(self):
        end = self.watch.mark()
        self.total += self.watch.ms(self.started, end)
        self.started = end

    def count(self, samples):
        """Count a step that was computed on this number of sequences."""
        self.steps += 1
        self.samples += samples

    def per_step(self):
        """Return the mean milliseconds per step since the last call. All counts start again at zero."""
        self.pause()
        ms = self.total / max(1, self.steps)
        self._start_counts()
        return ms


class Timers:
    """--timers: milliseconds per step in each phase, measured by `with timers("forward"): ...`.

    The time of forward contains that of param_gather. pipeline is the time spent waiting for neighbouring
    stages.
    """
    PHASES = ("data", "forward", "backward", "pipeline", "grad_sync", "norm", "optimizer", "param_gather")

    def __init__(self, device, on):
        self.watch = Stopwatch(device)
        self.on = on
        self.spans = []  # (phase, begin, end)

    @contextlib.contextmanager
    def __call__(self, phase):
        if not self.on:
            yield
            return
        begin = self.watch.mark()
        yield
        self.spans.append((phase, begin, self.watch.mark()))

    def per_step(self, steps):
        """Return {phase: ms per step} since the last call, in which `steps` steps were computed."""
        total = dict.fromkeys(self.PHASES, 0.0)
        for phase, begin, end in self.spans:
            total[phase] += self.watch.ms(begin, end) / max(1, steps)
        self.spans = []
        return total


# -----------------------------------------------------------------------------
# What makes a run slow on a CPU

FP32_RATE = 2e10  # roughly, FLOP/s of one CPU thread in training
LONG = 60  # seconds: a run announces a step that takes longer


def times_slower(dtype, size=256, tries=3):
    """Return how many times longer than in fp32 a product of matrices takes on this CPU. Both are run.

    A CPU with instructions for bf16 is faster in it than in fp32, others are several times slower.
    """
    def seconds(dtype):
        x = torch.ones((size, size), dtype=dtype)
        x @ x  # the first product also prepares the kernel
        found = []
        for _ in range(tries):
            begun = time.perf_counter()
            x @ x
            found.append(time.perf_counter() - begun)
        return min(found)

    return seconds(dtype) / seconds(torch.float32)


def slow_on_cpu(cfg, mesh, flops, device):
    """Return lines that say what makes this run slow on a CPU, and what helps. flops: the FLOP per token."""
    if device.type != "cpu":
        return []
    lines = []
    factor = 1
    if cfg.dtype != "fp32":
        factor = times_slower(DTYPES[cfg.dtype])
    if cfg.dtype in ("bf16", "fp16") and factor > 1.2:
        lines.append(f"{cfg.dtype} is about {factor:.1f} times slower than fp32 on this CPU, by one product: "
                     "--dtype fp32")

    sequences = cfg.global_batch or cfg.micro_batch * mesh.dp.size
    rate = FP32_RATE * torch.get_num_threads() * mesh.world.size / factor  # FLOP/s of the whole run
    seconds = sequences * cfg.seq_len * flops / rate
    if seconds > LONG:
        hours = seconds * cfg.steps / 3600
        lines.append(f"a step takes about {seconds:.0f} seconds on this CPU, and {cfg.steps:,} of them "
                     f"{hours:,.1f} hours, less with a smaller batch or --seq-len")
    return lines

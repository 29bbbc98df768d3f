"""Milliseconds on the device: of anything (Stopwatch), of a step (Clock), of its phases (Timers).

    slow_on_cpu   what makes a run slow where there is no GPU, before it starts
"""
import contextlib
import time

import torch


class Stopwatch:
    """Points in time on the device: events on a GPU, where a host clock would time the launches; the host's
    clock on a CPU."""

    def __init__(self, device):
        self.cpu, self.device = device.type == "cpu", device

    def mark(self):
        """-> the point in time when the device has done what was launched so far."""
        if self.cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def ms(self, begin, end):
        """-> milliseconds between two marks. Waits until the device has reached the second."""
        if self.cpu:
            return (end - begin) * 1e3
        end.synchronize()  # sync point
        return begin.elapsed_time(end)


class Clock:
    """Mean milliseconds of a training step, without pauses (evaluation, saving)."""

    def __init__(self, device):
        self.watch, self.steps, self.samples, self.total = Stopwatch(device), 0, 0, 0.0
        self.resume()

    def resume(self):
        self.started = self.watch.mark()

    def pause(self):
        end = self.watch.mark()
        self.total += self.watch.ms(self.started, end)
        self.started = end

    def count(self, samples):
        """A step of so many sequences was computed."""
        self.steps, self.samples = self.steps + 1, self.samples + samples

    def per_step(self):
        """-> mean ms per step since the last call; all counts start again at zero."""
        self.pause()
        ms = self.total / max(1, self.steps)
        self.steps, self.samples, self.total = 0, 0, 0.0
        return ms


class Timers:
    """--timers: milliseconds per step in each phase: with timers("forward"): ... The time of forward contains
    that of param_gather; pipeline is the time spent waiting for neighbouring stages."""
    PHASES = ("data", "forward", "backward", "pipeline", "grad_sync", "norm", "optimizer", "param_gather")

    def __init__(self, device, on):
        self.watch, self.on = Stopwatch(device), on
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
        """-> [ms per step of each of PHASES] since the last call, in which `steps` steps were computed."""
        total = dict.fromkeys(self.PHASES, 0.0)
        for phase, begin, end in self.spans:
            total[phase] += self.watch.ms(begin, end) / max(1, steps)
        self.spans = []
        return list(total.values())


# -----------------------------------------------------------------------------

FP32_RATE = 2e10  # FLOP/s of one thread of a CPU in training, about
SLOWER = {"bf16": 3, "fp16": 10, "fp64": 2}  # times, about, on a CPU whose instructions have bf16
LONG = 60  # seconds of a step before which a run says so


def slow_on_cpu(cfg, mesh, flops, device):
    """-> what makes this run slow where its device is a CPU, and the fix, in lines. flops: per token."""
    if device.type != "cpu":
        return []
    lines, times = [], SLOWER.get(cfg.dtype, 1)
    if cfg.dtype in ("bf16", "fp16"):
        lines.append(f"{cfg.dtype} is about {times} times slower than fp32 on a CPU: --dtype fp32")
    tokens = (cfg.global_batch or cfg.micro_batch * mesh.dp.size) * cfg.seq_len
    seconds = tokens * flops * times / FP32_RATE / mesh.world.size / torch.get_num_threads()
    if seconds > LONG:
        lines.append(f"a step takes about {seconds:.0f} seconds on this CPU, {cfg.steps:,} steps "
                     f"take {seconds * cfg.steps / 3600:,.0f} hours, less with a smaller batch or --seq-len")
    return lines

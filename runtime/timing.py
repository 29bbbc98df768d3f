"""Milliseconds on the device: between two points (Stopwatch), of a step and its phases (Clock)."""
import contextlib
import time

import torch


class Stopwatch:
    """Points in time on the device: on a GPU events, because a host clock would time only the launches."""

    def __init__(self, device):
        self.device = device

    def mark(self):
        """Return the point in time when the device has done what was launched so far."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def ms(self, begin, end):
        """Return the milliseconds between two marks. Wait until the device has reached the second."""
        if self.device.type == "cpu":
            return (end - begin) * 1e3
        end.synchronize()  # sync point
        return begin.elapsed_time(end)


class Clock:
    """Mean milliseconds of a training step, "step", without pauses (evaluation, saving), and for --timers of
    its phases, measured by `with clock("forward"): ...`. The loop counts steps."""
    # forward contains param_gather; pipeline is the wait for neighbouring stages
    PHASES = ("data", "forward", "backward", "pipeline", "grad_sync", "norm", "optimizer", "param_gather")

    def __init__(self, device):
        self.watch = Stopwatch(device)
        self.steps = 0  # that were computed
        self.samples = 0  # sequences in them
        self.spans = []  # (phase, begin, end)
        self.resume()

    def resume(self):
        self.started = self.watch.mark()

    def pause(self):
        end = self.watch.mark()
        self.spans.append(("step", self.started, end))
        self.started = end

    @contextlib.contextmanager
    def __call__(self, phase):
        begin = self.watch.mark()
        yield
        self.spans.append((phase, begin, self.watch.mark()))

    def per_step(self):
        """Return {phase: ms per step} since the last call. All counts start again at zero."""
        self.pause()
        total = dict.fromkeys(("step", *self.PHASES), 0.0)
        for phase, begin, end in self.spans:
            total[phase] += self.watch.ms(begin, end) / max(1, self.steps)
        self.steps = self.samples = 0
        self.spans = []
        return total

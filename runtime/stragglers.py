"""Which rank is slow? All end a step together, so the time that tells is each rank's own: from the start of
the step to its first collective. It is compared within a pipeline stage: stages do different work. Where a
CUDA graph replays the collectives, the first that python starts comes after it: only what delays a rank
before its step (data) shows then.
"""
import statistics

import torch

from runtime.log import Stopwatch

SLOW, LEAST_MS = 1.2, 2.0  # times the stage's median, and at least so much more: short steps jitter
RUNNING = 3  # intervals in a row before a rank is named


class Stragglers:
    """begin() each step; read() at each log interval, on all ranks."""

    def __init__(self, mesh, device):
        self.world, self.stage, self.clock = mesh.world, mesh.stage.size, Stopwatch(device)
        self.cuda = device.type == "cuda"
        self.spans, self.running = [], {}  # rank: intervals in a row

    def begin(self):
        start = self.clock.mark()

        def first():
            if not (self.cuda and torch.cuda.is_current_stream_capturing()):  # a recorded event has no time
                self.spans.append((start, self.clock.mark()))
        self.world.calls.on_next_collective = first

    def read(self):
        """-> ({step_ms_min, step_ms_max, slowest_rank}, lines that name ranks slow for RUNNING intervals)"""
        spans, self.spans = self.spans, []
        if self.world.size == 1 or not spans:
            return {}, []
        mine = torch.tensor(sum(self.clock.ms(*span) for span in spans) / len(spans))
        # one number on the host from each rank, over the world
        ms = self.world.all_gather(mine.view(1)).tolist()
        keys = {"step_ms_min": min(ms), "step_ms_max": max(ms), "slowest_rank": ms.index(max(ms))}
        return keys, self.name(ms)

    def name(self, ms):
        """ms: own time per step of every rank -> lines."""
        lines, running = [], {}
        for rank, own in enumerate(ms):
            first = rank // self.stage * self.stage
            median = statistics.median(ms[first:first + self.stage])
            if own > SLOW * median and own > median + LEAST_MS:
                running[rank] = self.running.get(rank, 0) + 1
                if running[rank] == RUNNING:
                    lines.append(f"slow rank {rank}: {own:.1f} ms of its own per step, the median of its "
                                 f"stage is {median:.1f} ({RUNNING} logs running)")
        self.running = running
        return lines

"""How far a run is: the time that is left, and a line before anything that keeps it silent for long."""
import contextlib
import sys
import threading
import time

from interface.terminal import clock, say

SILENT = 5.0  # seconds: what takes longer is announced
FORWARD = 1 / 3  # of a step's time, roughly: an evaluation does forwards only


class Progress:
    """What rank 0 prints about time. Other ranks print nothing.

    first_step: the number of the first step of this start, which also compiles and warms up.
    """

    def __init__(self, cfg, is_main, first_step):
        self.cfg = cfg
        self.is_main = is_main
        self.first_step = first_step
        self.began = None      # when the first step was done
        self.evaluation = 0.0  # seconds that the last one took
        self.evaluation_began = 0.0
        self.first = None      # a timer, during the first step

    def first_step_begins(self):
        """Announce the first step if it is not done after SILENT seconds: nothing was measured before."""
        if not self.is_main:
            return
        self.first = threading.Timer(SILENT, self._first_step_is_slow, [sys.stdout])
        self.first.daemon = True
        self.first.start()

    def _first_step_is_slow(self, stdout):
        with contextlib.suppress(OSError, ValueError):  # the run has ended, and its stdout is closed
            print("  first step: still at work; it prints its line when it is done", file=stdout, flush=True)

    def first_step_ends(self):
        if self.first is not None:
            self.first.cancel()
            self.first = None

    def left(self, number):
        """Return the seconds until the last step, by the mean of all since the first, or None."""
        now = time.monotonic()
        if self.began is None:
            self.began = now
        if number == self.first_step:
            return None
        per_step = (now - self.began) / (number - self.first_step)
        return per_step * (self.cfg.steps - number)

    def step_took(self, number, seconds):
        """Announce the next line if it comes late. seconds: what this step took."""
        if number != self.first_step + 1:
            return
        next_line = self.next_line(number)
        wait = (next_line - number) * seconds
        if wait > SILENT:
            hint = "; --log-every 1 prints each step" if self.cfg.log_every != 1 else ""
            self.say(f"  a step takes about {seconds:.1f} s: the next line comes at step {next_line}, in "
                     f"about {clock(wait)}{hint}")

    def next_line(self, number):
        """Return the next step after `number` that is logged."""
        every = [n for n in (self.cfg.log_every, self.cfg.eval_every) if n]
        return min(self.cfg.steps, *(number // n * n + n for n in every))

    def evaluation_begins(self, number, n_batches, ms):
        """Announce an evaluation that takes long, by the one before or else by the steps.

        number: the step before it. ms: a step's milliseconds since the row before, or None. Those of the
        first step say only that it may take long.
        """
        self.evaluation_began = time.monotonic()
        seconds = self.evaluation or n_batches * (ms or 0.0) / 1e3 * FORWARD
        if seconds > SILENT:
            is_known = self.evaluation or number != self.first_step
            about = f", about {clock(seconds)}" if is_known else ""
            self.say(f"  evaluates {n_batches} batches{about}; --eval-iters says how many")

    def evaluation_ends(self):
        self.evaluation = time.monotonic() - self.evaluation_began

    def say(self, text):
        if self.is_main:
            say(text)

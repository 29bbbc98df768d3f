"""Samples with targets that take no part, documents or padding; a model in one process;
fast.symm_mem.SymmetricBuffer between processes on a CPU, shared memory in the place of NVLink.
"""
import contextlib
import os
import shutil
import sys
import tempfile
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from pool import COLLECTIVE

from corpus.samples import Synthetic, document_places
from fast import symm_mem
from model import GPT
from ops.cross_entropy import IGNORE
from parallel import make_mesh
from runtime.launch import World

EOD = 0  # the symbol that begins a document of Documents


def parameters(table, quick):
    """Return a table's names as pytest's parameters: make test has those in `quick`, make long the others."""
    assert {*quick} <= {*table}
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.long]) for name in table]


def one_process_model(cfg):
    """Return the whole model in fp64, with the weights that train.py starts from."""
    model = GPT(cfg, make_mesh(World()), cfg.vocab_size).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(model.draw(p, name))
    return model


class Masked(Synthetic):
    """Synthetic samples; of sample i the first 3 i % T targets take no part."""

    def __init__(self, *args):
        super().__init__(*args)
        self.all_trained = False

    def n_masked(self, i):
        return 3 * i % self.seq_len

    def batch(self, first, n):
        x, y = super().batch(first, n)
        for i, row in enumerate(y, first):
            row[: self.n_masked(i)] = IGNORE
        return x, y

    def n_targets(self, first, n):
        return sum(self.seq_len - self.n_masked(i) for i in range(first, first + n))


class Documents(Synthetic):
    """Synthetic samples in documents of 1 to 5 tokens, whose first tokens are EOD. Not all begin with one."""

    def __init__(self, *args):
        super().__init__(*args)
        self.has_documents = True

    def batch(self, first, n):
        tokens, last = super().batch(first, n)
        tokens = torch.cat([tokens, last[:, -1:]], dim=1).clamp(min=1)  # (n, T+1)
        for number, row in enumerate(tokens, first):
            draw = torch.Generator().manual_seed(number)
            row[torch.rand(len(row), generator=draw) < 0.35] = EOD
        return tokens[:, :-1], tokens[:, 1:], document_places(tokens[:, :-1], EOD)


class Padded(Documents):
    """Synthetic samples of one document each; sample i ends with 1 + i % 3 tokens of padding."""

    def batch(self, first, n):
        x, y = Synthetic.batch(self, first, n)
        places = document_places(x, -1)  # no token has this id
        for number, row in enumerate(places, first):
            row[-1 - number % 3:] = 0
        return x, y, places


def shared_folder(axis):
    """Return the name of a new folder in memory, the same on all ranks of an axis."""
    box = [tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)]
    dist.broadcast_object_list(box, axis.ranks[0], group=axis.group)
    return box[0]


class LateRank:
    """Keeps the last rank behind the one before it, so that a missing barrier between these two shows,
    however fast each of them runs.

    All count the barriers, all-reduces and all-gathers that they begin, in memory that all read. When the
    last rank falls behind, it waits until its neighbour has begun one more than it has itself: from there the
    neighbour cannot go on alone.
    """

    def __init__(self, world):
        folder = shared_folder(world)
        self.rank = world.rank
        self.is_late = world.rank == world.size - 1
        self.begun = torch.from_file(f"{folder}/begun", shared=True, size=world.size, dtype=torch.int64)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)  # the mapping stays

    def begin(self):
        self.begun[self.rank] += 1

    def fall_behind(self):
        if self.is_late:
            deadline = time.monotonic() + COLLECTIVE
            while self.begun[-2] <= self.begun[-1]:
                assert time.monotonic() < deadline, "the neighbour waits for nothing of this rank"
                time.sleep(0.0002)

    def counted(self, collective):
        """The method of Axis, which begins a collective."""
        def counted_collective(axis, *args, **options):
            if axis.size > 1:
                self.begin()
            return collective(axis, *args, **options)
        return counted_collective


class CapturedStreams:
    """torch.cuda's streams on a CPU, where everything runs in line. They follow the rules of a capture.

    A stream that waits for an event of the capture is captured too, from then on. A captured stream cannot
    wait for an event from outside of the capture, and no other stream for one of the inside, also later. When
    the capture ends, the stream that computes has waited for all that the others do.
    """

    def __init__(self):
        self.n_captures = 0
        self.all = []
        self.compute = self.now = self.Stream()

    def Stream(self, device=None, priority=0):
        self.all.append(CapturedStream(self))
        return self.all[-1]

    def current_stream(self):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        stream.work += 1
        self.now = before

    @contextlib.contextmanager
    def captured(self):
        self.n_captures += 1
        self.compute.capture = self.n_captures
        yield
        for stream in self.all:
            assert stream is self.compute or not stream.capture or stream.seen == stream.work, \
                "the capture ends before the stream that computes has waited for all that another one does"
            stream.capture = None


class CapturedStream:
    def __init__(self, streams):
        self.streams = streams
        self.capture = None  # the number of the capture of which its work is a part
        self.work = 0  # how often something was done on it
        self.seen = 0  # for how much of its work the stream that computes has waited

    def record_event(self):
        return CapturedEvent(self, self.capture, self.work)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        if self.capture is None and event.capture == self.streams.compute.capture:
            self.capture = event.capture  # None, or it joins the capture
        assert event.capture == self.capture, f"capture {self.capture} waits for an event of {event.capture}"
        if self is self.streams.compute:
            event.stream.seen = max(event.stream.seen, event.work)


class CapturedEvent(NamedTuple):
    stream: CapturedStream
    capture: int | None
    work: int

    def wait(self):
        self.stream.streams.now.wait_event(self)


class SharedBuffer(symm_mem.SymmetricBuffer):
    late = None  # the run's LateRank; None: no rank is kept behind
    without = ""  # name of a function whose barrier is left out

    def __init__(self, axis, rows, width, dtype, device):
        shared = shared_folder(axis)
        self.axis, self.rows = axis, rows
        self.peers = [torch.from_file(f"{shared}/{r}", shared=True, size=rows * width, dtype=dtype)
                      .view(rows, width) for r in range(axis.size)]
        self.local = self.peers[axis.rank]
        self.local.fill_(torch.nan)  # rows that nobody wrote hold garbage
        dist.barrier(axis.group)
        if axis.rank == 0:
            shutil.rmtree(shared)  # the mappings stay

    def fall_behind(self):
        if self.late is not None:
            self.late.fall_behind()

    def put(self, *args):
        self.fall_behind()
        super().put(*args)

    def publish(self, x):
        self.fall_behind()
        super().publish(x)

    def get(self, dst):
        self.fall_behind()
        return super().get(dst)

    def barrier(self):
        self.fall_behind()
        if sys._getframe(1).f_code.co_name != self.without:
            if self.late is not None:
                self.late.begin()
            dist.barrier(self.axis.group)

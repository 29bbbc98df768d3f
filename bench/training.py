"""What the benchmarks time: train.py's own model, optimizer and step, without its log and checkpoints."""
import time

from runtime.launch import deterministic

import torch

import train
from corpus.samples import Synthetic, document_places, open_data
from fast.choose import choose
from fast.graph import make_step
from fast.symm_mem import bytes_allocated
from interface.layout import check_layout
from ops import grouped_mm
from ops.accelerator import peak_memory
from parallel import make_mesh
from runtime.timing import Stopwatch


def portable():
    """Let our Triton kernels multiply the experts' rows, as on GPUs for which torch has no kernel."""
    grouped_mm.use_torch = lambda x, w: False


class Documents(Synthetic):
    """Synthetic samples in documents of `mean` tokens in the mean."""

    def __init__(self, vocab_size, seq_len, seed, mean):
        super().__init__(vocab_size, seq_len, seed)
        self.has_documents = True
        self.mean = mean

    def batch(self, first, n):
        x, y = super().batch(first, n)
        draw = torch.Generator().manual_seed(first)
        is_first = torch.rand(x.shape, generator=draw) < 1 / self.mean
        return x, y, document_places(is_first.long(), 1)


class Training:
    """One model in training on this rank. Collective: all ranks of the world make it together.

    without: fields of fast.choose.Choice that are off where train.py would choose them, such as "graph".
    """
    attention = None  # what attends without a mask, in words; another trainer does not say
    quack = False  # whether quack-kernels multiplies

    def __init__(self, cfg, world, without=()):
        self.cfg, self.world = cfg, world
        self.number = 0  # steps taken
        deterministic(cfg.deterministic)
        self.mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
        self.batch = cfg.global_batch or cfg.micro_batch * self.mesh.dp.size  # sequences per step
        check_layout(cfg, world.size)
        self.source, _, self.vocab, _ = open_data(cfg)
        self.began = time.perf_counter()
        self.build(without)

    def build(self, without):
        cfg, mesh = self.cfg, self.mesh
        device = self.world.device
        choice = choose(cfg, mesh, device)._replace(**dict.fromkeys(without, False))
        self.model, self.data_parallel, self.opt = train.build(cfg, mesh, self.vocab, device, choice=choice)
        self.train_step = make_step(train.Step(cfg, self.model, self.data_parallel, self.opt), choice)
        self.graph = choice.graph
        self.quack = choice.quack
        self.attention = choice.attention_by()

    def batches(self):
        """This rank's micro-batches of the next step."""
        first = self.number * self.batch
        return train.micro_batches(self.cfg, self.mesh, self.source, first, self.batch, self.world.device)

    def step(self, batches, full=False):
        """Train on batches and return their mean loss, () fp64 on the device.

        full: also compute the count of zeros and the norm of the weights, as a logged step does.
        """
        first, self.number = self.number * self.batch, self.number + 1
        tokens = train.trained_tokens(self.source, first, self.batch, self.world.device)
        stats, _ = self.train_step(batches, self.number, full, n_trained=tokens)
        return stats.loss

    def run(self, steps):
        """Take steps.

        Return the milliseconds of each, the losses of the first and the last, the seconds from the start of
        the build to the first loss, and the path of each step: "graph", "plain", or "redone" if it was done
        twice (fast/graph.py).
        """
        paths = []
        watch = Stopwatch(self.world.device)
        marks = [watch.mark()]
        for _ in range(steps):
            loss = self.step(self.batches())
            paths.append(getattr(self.train_step, "path", "plain"))
            if len(marks) == 1:
                first = loss.item()  # sync point: compilation and the first step are over
                seconds = time.perf_counter() - self.began
            marks.append(watch.mark())
        self.wait()
        times = [watch.ms(a, b) for a, b in zip(marks, marks[1:], strict=False)]
        return times, [first, loss.item()], seconds, paths

    def wait(self):
        """Wait until this rank holds all new weights, before anything outside a step reads them."""
        self.model.provide_weights(self.model)

    def overflows(self):
        """Return the steps redone because the experts' receive buffers overflowed, and the buffers' slack.

        The slack is their rows over the balanced number. (None, None) where nothing can overflow.
        """
        sizer = getattr(self.train_step, "sizer", None)
        return (sizer.n_retries, sizer.rows / sizer.balanced) if sizer else (None, None)


def gpu_memory(device):
    """Return (allocated, reserved, symmetric memory) of this GPU in GiB; None where torch does not count.

    The first two are the maxima of torch's allocator. Symmetric memory does not go through the allocator.
    """
    peaks = peak_memory(device)
    return peaks and tuple(n / 2**30 for n in (*peaks, bytes_allocated()))

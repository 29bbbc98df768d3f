"""Forward, backward and gradient sums as one CUDA graph: the fast twin of train.py's Step.

The kernels of a small model finish before Python can start the next ones. Where every shape is static, the
same launches are captured once, and replayed on the same addresses. The update stays outside the graph,
because its learning rate changes.
"""
import gc
import math

import torch

from config import ceil_div
from fast.choose import needs_row_limit
from fast.compile import compile_blocks
from fast.symm_mem import allocate
from moe import moe_layers
from parallel import MAX
from pipeline import dropout_seeds

WARMUP_STEPS = 3  # steps without a graph: compilation, autotuning and NCCL's set-up must not be captured
INTERVAL = 50  # steps after which the experts' buffers may shrink


def make_step(plain, choice):
    """Return the step to train with: the train.Step `plain`, or a GraphedStep around it. Collective."""
    cfg = plain.cfg
    model = plain.model
    if cfg.compile:
        compile_blocks(model)
    if not choice.graph:
        return plain

    sizer = None
    if needs_row_limit(cfg, model.mesh):
        sizer = BufferSizer(model, cfg.ep_slack, choice.symm_mem)
        sizer.allocate()
    return GraphedStep(plain, choice, sizer)


class DeferredGather:
    """A gather that the next graph starts, unless all ranks call wait() before, as evaluation does."""

    def __init__(self, bucket):
        self.bucket = bucket

    def defer(self):
        self.bucket.gather_handle = self

    def wait(self):
        self.bucket.start_gather()
        self.bucket.gather_handle.wait()


class GraphedStep:
    """Called like train.Step, with the same results.

    The buffers of dropless experts over several ranks hold as many rows as a BufferSizer says. A step that
    brings more rows to some rank is void, and is repeated:
      1. In the graph, a rank whose buffer overflowed makes its loss NaN, which the all-reduce of the
         statistics brings to every rank.
      2. The update is launched before the host looks. With a NaN norm it is a no-op, and the GPU stays busy.
      3. The host reads the loss. If it is not finite, whatever the cause, the plain step repeats the same
         batches with exact messages. The next step is captured again.
    ZeRO-1's new weights are gathered by the first nodes of the graph. With peer copies, the bucket of the
    embedding, which the forward needs first, is gathered right after its update.
    """

    def __init__(self, plain, choice, sizer=None):
        self.plain = plain
        self.sizer = sizer
        self.data_parallel = plain.data_parallel
        self.eager_buckets = self.data_parallel.buckets_of[plain.model.wte] if choice.peer_copies else []
        self.deferred_buckets = []  # in the order in which the forward needs them
        for bucket in reversed(self.data_parallel.buckets):
            if bucket.n_slices > 1 and bucket not in self.eager_buckets:
                bucket.after_update = DeferredGather(bucket).defer
                self.deferred_buckets.append(bucket)
        self.calls = 0
        self.made_for = None  # the shapes of the batches
        self.graph = None
        self.path = "plain"  # how the last step was done: "graph", "plain", or "redone" if it was void

    def __call__(self, batches, number, full=True, guard=None, n_trained=None):
        plain = self.plain
        for bucket in self.eager_buckets:
            bucket.wait_weights()  # outside the graph, where their gather was started
        loss = self.gradients(batches, number, n_trained)
        stats = plain.opt.stats(loss, full)
        if self.sizer is None:
            return stats, plain.update(stats, number, guard)

        if self.host_looks_first(guard):
            is_void = not math.isfinite(stats.loss.item())  # sync point
            result = None if is_void else (stats, plain.update(stats, number, guard))
        else:
            norm_or_nan = stats.grad_norm + 0 * stats.loss  # NaN in a void step
            result = stats, plain.update(stats._replace(grad_norm=norm_or_nan), number)
            is_void = not math.isfinite(stats.loss.item())  # sync point
        self.resize_buffers(is_void)  # It may drop the graph's gradients, which the update has read.
        if is_void:
            self.path = "redone"
            return plain(batches, number, full, guard, n_trained)
        return result

    def host_looks_first(self, guard):
        guard_may_veto = guard is not None and guard.sigma > 0
        scales = self.plain.opt.loss_scale is not None
        return guard_may_veto or scales or self.plain.before_update is not None

    def gradients(self, batches, number, n_trained=None):
        """Return this rank's part of the mean loss, (), replayed where there is a graph. See train.Step."""
        made_for = [x.shape for x, *_ in batches]
        if made_for != self.made_for:
            if self.graph is not None:
                self.drop_graph()
            self.calls = 0
            self.made_for = made_for
        self.path = "plain"
        if self.sizer is not None:
            self.sizer.enable(True)
        self.calls += 1
        if self.calls <= WARMUP_STEPS:
            return self.body(batches, number, n_trained)
        seeds = []
        if self.plain.draws_random_numbers:  # a graph is of one stage
            [seeds] = dropout_seeds(self.plain.cfg, self.plain.model.mesh, number, len(batches))
        if self.graph is None:
            self.capture(batches, len(seeds), n_trained)
        self.fill_inputs(batches, seeds, n_trained)
        self.path = "graph"
        self.graph.replay()
        for bucket, grad_total in zip(self.data_parallel.buckets, self.grad_totals, strict=True):
            bucket.gather_handle = None  # the graph gathered the weights, and its forward waited for them
            bucket.grad_total = grad_total  # where the graph writes
        return self.output

    def body(self, batches, number, n_trained, set_seed=torch.manual_seed):
        for bucket in self.deferred_buckets:
            bucket.start_gather()
        loss = self.plain.gradients(batches, number, set_seed, n_trained)
        return loss if self.sizer is None else self.sizer.nan_on_overflow(loss)

    def capture(self, batches, n_seeds, n_trained):
        """Capture body(). n_seeds: how many seeds dropout needs. Each replay sets the values."""
        # torch frees no memory while it captures: that of the warm-up steps is freed first.
        self.data_parallel.reset()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        self.inputs = [tuple(t.clone() for t in pair) for pair in batches]
        self.n_trained = n_trained.clone() if torch.is_tensor(n_trained) else n_trained
        self.graph = torch.cuda.CUDAGraph()

        # torch.manual_seed cannot be captured: each micro-batch has a generator, which fill_inputs() seeds.
        device = batches[0][0].device
        self.generators = [torch.Generator(device) for _ in range(n_seeds)]
        for generator in self.generators:
            self.graph.register_generator_state(generator)
        default = torch.cuda.default_generators[device.index]
        remaining = iter(self.generators)

        def use_next_generator(_):
            default.graphsafe_set_state(next(remaining))

        before = default.graphsafe_get_state()
        with torch.cuda.graph(self.graph):
            self.output = self.body(self.inputs, 0, self.n_trained, use_next_generator)
        default.graphsafe_set_state(before)
        self.grad_totals = [bucket.grad_total for bucket in self.data_parallel.buckets]

    def fill_inputs(self, batches, seeds, n_trained):
        if torch.is_tensor(n_trained):
            self.n_trained.copy_(n_trained)
        for captured, new in zip(self.inputs, batches, strict=True):
            for captured_tensor, tensor in zip(captured, new, strict=True):
                captured_tensor.copy_(tensor, non_blocking=True)
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)

    def resize_buffers(self, is_void):
        is_other_size = self.sizer.resize(is_void)
        if is_other_size or is_void:
            self.drop_graph()
        if is_other_size:
            self.sizer.allocate()
        self.sizer.enable(False)

    def drop_graph(self):
        """Free the graph's memory, for a step without it. The next step that can is captured again."""
        self.output = None
        self.graph = None
        self.grad_totals = None
        self.data_parallel.reset()  # the update has used the gradients, some of which the graph made
        gc.collect()
        torch.cuda.empty_cache()


class BufferSizer:
    """How many rows the experts' buffers (or messages: fast/padded.py) hold, alike on all ranks.

    They begin with --ep-slack times the balanced number. After a void step they hold a third more than was
    needed: at most ep times the balanced number, with which nothing can overflow. Every INTERVAL steps they
    shrink to what was needed and a tenth more, because routing settles, and a message is sent whole.
    """

    def __init__(self, model, slack, symm_mem=False):
        cfg = model.cfg
        mesh = model.mesh
        self.layers = list(moe_layers(model).values())
        self.world = mesh.world
        self.symm_mem = symm_mem  # whether the rows need allocated buffers
        self.balanced = cfg.micro_batch * cfg.seq_len // (mesh.cp.size * mesh.tp.size) * cfg.top_k  # rows
        self.most = mesh.ep.size * self.balanced
        self.rows = self.whole(slack * self.balanced)
        self.wait = INTERVAL  # steps until the next choice
        self.n_retries = 0
        # (): the most rows that came to this rank since the last choice
        self.rows_needed = torch.zeros_like(self.layers[0].dispatcher.rows_needed)

    def whole(self, rows):
        return ceil_div(int(min(rows, self.most)), 8) * 8

    def enable(self, on):
        for layer in self.layers:
            layer.dispatcher.rows_in_use = self.rows if on else 0

    def nan_on_overflow(self, loss):
        needed = torch.stack([layer.dispatcher.rows_needed for layer in self.layers]).max()
        torch.maximum(self.rows_needed, needed, out=self.rows_needed)
        return torch.where(needed > self.rows, torch.nan, loss)

    def resize(self, is_void):
        """Choose the number of rows after a step. Return whether it is another one."""
        self.n_retries += is_void
        self.wait -= 1
        if self.wait > 0 and not is_void:
            return False

        self.wait = INTERVAL
        before = self.rows
        self.world.all_reduce(self.rows_needed, MAX)  # MAX of one number, over the world
        needed = self.rows_needed.item()
        self.rows_needed.zero_()
        if needed > before:  # a third more: a new capture costs as much as several steps
            self.rows = self.whole(4 / 3 * needed)
        elif not is_void and needed < 0.75 * before:
            self.rows = self.whole(1.1 * needed)
        return self.rows != before

    def allocate(self):
        """Allocate buffers of this size. Collective over ep. No graph may use the old ones."""
        if not self.symm_mem:
            return
        for layer in self.layers:
            layer.dispatcher.buffers = None
        gc.collect()
        allocate(self.layers, self.rows)

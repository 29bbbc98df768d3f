"""Forward, backward and gradient sums as one CUDA graph: the fast twin of train.py's Step, the same numbers.

A small model's kernels are done before python can start the next. Where every shape is static, these parts
are the same list of kernels in every step: a thousand launches are captured once and replayed on the same
addresses (pytorch.org, CUDA graphs). The update stays outside: its learning rate changes.
"""
import gc
import math

import torch

from fast.choose import needs_row_limit
from fast.compile import compile_blocks
from fast.symm_mem import allocate, allocate_for_capacity
from moe import moe_layers
from parallel import MAX
from pipeline import dropout_seeds

WARMUP_STEPS = 3  # without a graph: compilation, autotuning and NCCL's set-up must not be captured


def make_step(plain, choice):
    """plain: a train.Step; choice: a fast.choose.Choice -> the step to train with: plain itself, or a
    GraphedStep around it. Compiles the model if asked. Collective: it allocates symmetric memory."""
    cfg, mesh, sizer = plain.cfg, plain.model.mesh, None
    if cfg.compile:
        compile_blocks(plain.model)
    if not choice.graph:
        return plain
    if needs_row_limit(cfg, mesh):
        sizer = BufferSizer(plain.model, cfg.ep_slack)
        if choice.symm_mem:
            allocate(sizer.layers, sizer.rows(sizer.limit))
    elif choice.symm_mem:
        allocate_for_capacity(list(moe_layers(plain.model).values()))
    return GraphedStep(plain, choice, sizer)


class DeferredGather:
    """Stands for a gather that the next captured step starts. Waiting earlier (evaluation, --check-every)
    starts it here, so nobody reads stale weights."""

    def __init__(self, bucket):
        self.bucket = bucket

    def wait(self):
        self.bucket.comm.start_gather(self.bucket).wait()


class GraphedStep:
    """Called as train.Step is, with the same results.

    Dropless experts over several ranks have no static number of rows. Their buffers hold rows_in_use rows
    (BufferSizer), and a step that brings some rank more is void and done again:
      1. in the graph, a rank whose buffer overflowed makes its loss NaN; the all-reduce of the statistics
         makes it NaN on every rank, so all decide alike
      2. the update is launched before the host looks: with a NaN norm it is a no-op, and the GPU stays busy
      3. the host reads the loss; if it is not finite, whatever the cause, the plain step does the same
         batches with all_to_all, whose messages have the exact size, and the buffers grow for the next step
    ZeRO-1's new weights are gathered by the first nodes of the graph. With peer copies the embedding's
    bucket, which the forward needs first, is gathered right after its update."""

    def __init__(self, plain, choice, sizer=None):
        self.plain, self.sizer, self.dp = plain, sizer, plain.dp
        self.eager_buckets = self.dp.buckets_of[plain.model.wte] if choice.peer_copies else []
        self.dp.on_updated = self.on_updated
        self.calls, self.shape, self.graph = 0, None, None

    def on_updated(self, bucket):
        """DataParallel.on_updated under a graph."""
        if bucket in self.eager_buckets:
            bucket.start_gather()
        elif bucket.shards > 1:
            bucket.gather_handle = DeferredGather(bucket)

    def __call__(self, batches, number, full=True, guard=None, tokens=None):
        plain, sizer = self.plain, self.sizer
        for bucket in self.eager_buckets:
            bucket.wait_for_weights()  # outside of the graph, where their gather was started
        loss = self.gradients(batches, number, tokens)
        with self.dp.timers("norm"):
            stats = plain.opt.stats(loss, full)
        if sizer is None:
            return plain.update_unless_vetoed(stats, number, guard)
        # the host looks first where a guard may veto the update, or a void one would change the loss scale
        look_first = plain.opt.loss_scale is not None or (guard is not None and guard.sigma > 0)
        if not look_first:
            found_inf = plain.update(stats._replace(grad_norm=stats.grad_norm + 0 * stats.loss), number)
        if self.overflowed(stats.loss):
            return plain(batches, number, full, guard, tokens)
        return plain.update_unless_vetoed(stats, number, guard) if look_first else (stats, found_inf)

    def gradients(self, batches, number, tokens=None):
        """batches [(x, y)] of step `number`, tokens: see train.Step -> this rank's part of the mean loss (),
        replayed where there is a graph. Another number of micro-batches, or shape, captures again."""
        shape = [*(x.shape for x, _ in batches), type(tokens)]
        if shape != self.shape:
            self.calls, self.shape, self.graph = 0, shape, None
        if self.sizer is not None:
            self.sizer.enable(True)
            if not self.sizer.slack:
                return self.body(batches, number, tokens)
        self.calls += 1
        if self.calls <= WARMUP_STEPS:
            return self.body(batches, number, tokens)
        seeds = dropout_seeds(self.plain.cfg, self.plain.model.mesh, number, len(batches))
        if self.graph is None:
            self.capture(batches, seeds, tokens)
        if torch.is_tensor(tokens):
            self.tokens.copy_(tokens)
        for static, new in zip(self.inputs, batches, strict=True):
            for a, b in zip(static, new, strict=True):
                a.copy_(b, non_blocking=True)
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)
        self.graph.replay()
        for bucket in self.dp.buckets:
            bucket.gather_handle = None  # the graph gathered the weights, and its forward waited for them
        return self.output

    def body(self, batches, number, tokens, set_seed=torch.manual_seed):
        """What the graph holds. tokens, set_seed: see train.Step."""
        for bucket in reversed(self.dp.buckets):  # in the order in which the forward needs them
            if bucket not in self.eager_buckets:
                bucket.start_gather()
        loss = self.plain.gradients(batches, number, set_seed, tokens)
        return loss if self.sizer is None else self.sizer.nan_on_overflow(loss)

    def capture(self, batches, seeds, tokens):
        """Capture body(). seeds: as many as dropout needs; their values are set before each replay."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # the graph has its own memory: the warm-up steps' is not needed again
        self.inputs = [tuple(t.clone() for t in pair) for pair in batches]
        self.tokens = tokens.clone() if torch.is_tensor(tokens) else tokens
        self.graph = torch.cuda.CUDAGraph()
        # torch.manual_seed cannot be captured. Each micro-batch draws from a generator of its own instead;
        # replay() puts their seeds where the captured kernels read them
        device = batches[0][0].device
        self.generators = [torch.Generator(device) for _ in seeds]
        for generator in self.generators:
            self.graph.register_generator_state(generator)
        default, next_generator = torch.cuda.default_generators[device.index], iter(self.generators)
        before = default.graphsafe_get_state()

        def seed(_):
            default.graphsafe_set_state(next(next_generator))
        with torch.cuda.graph(self.graph):
            self.output = self.body(self.inputs, 0, self.tokens, seed)
        default.graphsafe_set_state(before)

    def overflowed(self, loss):
        """loss () of the step just done, over all ranks -> True if the step is void."""
        void = not math.isfinite(loss.item())  # sync point
        if self.sizer.resize(void):
            self.output = self.graph = None  # captured again at the next call; the memory is free until then
            gc.collect()
            torch.cuda.empty_cache()
        self.sizer.enable(False)
        return void


class BufferSizer:
    """How many rows of the experts' buffers (or messages: fast/padded.py) are in use: what the fullest rank
    (pair) needed and a tenth more. The same on all ranks and for many steps: a captured graph holds it. For
    160 rows per rank (160 copies, balanced) and --ep-slack 2.5:
        the first step has no buffers; the fullest rank needed 200 rows  -> 224 rows: slack 1.38
        a step needs 300: void, done again                               -> 400 rows: a fifth more than 330
        50 steps later the most was 180: the load is balanced now        -> 200 rows, captured again
        a step needs 440, over 2.5 * 160 = 400 rows                      -> no buffers until steps need less
    """

    def __init__(self, model, limit, interval=50):
        cfg, mesh = model.cfg, model.mesh
        self.layers, self.world, self.ep = list(moe_layers(model).values()), mesh.world, mesh.ep.size
        self.interval, self.steps, self.n_retries, self.slack = interval, interval - 1, 0, 0.0
        self.limit = min(limit, float(self.ep))  # at slack ep, the copies of all ranks can go to one
        self.copies = cfg.micro_batch * cfg.seq_len // (mesh.cp.size * mesh.tp.size) * cfg.top_k  # of a rank
        # () the most rows that came to this rank since the last choice
        self.rows_needed = torch.zeros_like(self.layers[0].dispatcher.rows_needed)

    def rows(self, slack):
        """slack: rows as a multiple of the balanced number -> rows, rounded up to a multiple of 8."""
        return -(-int(self.copies * slack) // 8) * 8

    def enable(self, on):
        """The dispatchers use the buffers from now on, or all_to_all."""
        for layer in self.layers:
            layer.dispatcher.rows_in_use = self.rows(self.slack) if on else 0

    def nan_on_overflow(self, loss):
        """loss () of this rank -> the same, or NaN if rows had no place in this rank's buffer."""
        needed = torch.stack([layer.dispatcher.rows_needed for layer in self.layers]).max()
        torch.maximum(self.rows_needed, needed, out=self.rows_needed)
        rows = self.layers[0].dispatcher.rows_in_use
        return torch.where(needed > rows, torch.nan, loss) if rows else loss

    def resize(self, overflowed):
        """Choose again after an overflow, and every `interval` steps, because a balanced load needs less.
        -> whether the number of rows changed, alike on all ranks."""
        self.steps, self.n_retries = self.steps + 1, self.n_retries + overflowed
        if not overflowed and self.steps < self.interval:
            return False
        self.world.all_reduce(self.rows_needed, MAX)  # MAX of one number, over the world
        slack = max(1.1 * self.rows_needed.item() / self.copies, 1.0)
        self.rows_needed.zero_()
        self.steps = 0
        if slack > self.limit:  # at limit ep nothing can overflow; below it, do without the buffers
            slack = self.limit if self.limit == self.ep else 0.0
        elif overflowed:  # a fifth more: the need grows, and a new capture costs as much as several steps
            slack = min(1.2 * slack, self.limit)
        # a little less is not worth a new capture
        changed = slack != self.slack and not 0.85 * self.slack < slack <= self.slack
        self.slack = slack if changed else self.slack
        return changed

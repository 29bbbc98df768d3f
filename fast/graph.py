"""Forward, backward and gradient sums as one CUDA graph: the fast twin of train.py's Step.

It gives the same numbers. The kernels of a small model finish before Python can start the next ones. Where
every shape is static, every step launches the same list of kernels. So about a thousand launches are captured
once, and replayed on the same addresses (pytorch.org, CUDA graphs). The update stays outside the graph,
because its learning rate changes.

    make_step     the step that a run trains with, plain or graphed
    GraphedStep   captures and replays, and repeats a void step
    BufferSizer   how many rows the experts' buffers hold
"""
import gc
import math

import torch

from config import ceil_div
from fast.choose import needs_row_limit
from fast.compile import compile_blocks
from fast.symm_mem import allocate, allocate_for_capacity
from moe import moe_layers
from parallel import MAX
from pipeline import dropout_seeds

WARMUP_STEPS = 3  # steps without a graph: compilation, autotuning and NCCL's set-up must not be captured


def make_step(plain, choice):
    """Return the step to train with: the train.Step `plain`, or a GraphedStep around it.

    choice: a fast.choose.Choice. The model is compiled if the flags ask for it. Collective: symmetric memory
    is allocated.
    """
    cfg = plain.cfg
    model = plain.model
    if cfg.compile:
        compile_blocks(model)
    if not choice.graph:
        return plain

    sizer = None
    if needs_row_limit(cfg, model.mesh):
        sizer = BufferSizer(model, cfg.ep_slack)
        if choice.symm_mem:
            allocate(sizer.layers, sizer.rows(sizer.limit))
    elif choice.symm_mem:
        allocate_for_capacity(list(moe_layers(model).values()))
    return GraphedStep(plain, choice, sizer)


class DeferredGather:
    """The handle of a gather that the next captured step starts.

    A reader that cannot wait for that step (evaluation, --check-every) calls wait(), which gathers at once,
    so that no reader sees stale weights.
    """

    def __init__(self, bucket):
        self.bucket = bucket

    def wait(self):
        self.bucket.comm.start_gather(self.bucket).wait()


class GraphedStep:
    """Called like train.Step, with the same results.

    Dropless experts over several ranks have no static number of rows. Their buffers hold rows_in_use rows
    (BufferSizer). A step that brings more rows to some rank is void, and is repeated:
      1. In the graph, a rank whose buffer overflowed makes its loss NaN. The all-reduce of the statistics
         makes the loss NaN on every rank, so all ranks make the same decision.
      2. The update is launched before the host looks. With a NaN norm it is a no-op, and the GPU stays busy.
      3. The host reads the loss. If it is not finite, whatever the cause, the plain step repeats the same
         batches with all_to_all, whose messages have the exact size, and the buffers grow for the next step.
    ZeRO-1's new weights are gathered by the first nodes of the graph. With peer copies, the bucket of the
    embedding, which the forward needs first, is gathered right after its update.
    """

    def __init__(self, plain, choice, sizer=None):
        self.plain = plain
        self.sizer = sizer
        self.data_parallel = plain.data_parallel
        self.eager_buckets = self.data_parallel.buckets_of[plain.model.wte] if choice.peer_copies else []
        self.data_parallel.on_updated = self.on_updated
        self.calls = 0
        self.shape = None
        self.graph = None

    def on_updated(self, bucket):
        """Replace DataParallel.on_updated: the next graph gathers the weights of most buckets."""
        if bucket in self.eager_buckets:
            bucket.after_update()
        elif bucket.n_slices > 1:
            bucket.gather_handle = DeferredGather(bucket)

    def __call__(self, batches, number, full=True, guard=None, n_trained=None):
        plain = self.plain
        for bucket in self.eager_buckets:
            bucket.wait_for_weights()  # outside the graph, where their gather was started
        loss = self.gradients(batches, number, n_trained)
        with self.data_parallel.timers("norm"):
            stats = plain.opt.stats(loss, full)
        if self.sizer is None:
            return plain.update_unless_vetoed(stats, number, guard)

        if self.host_looks_first(guard):
            if self.overflowed(stats.loss):
                return plain(batches, number, full, guard, n_trained)
            return plain.update_unless_vetoed(stats, number, guard)

        norm_or_nan = stats.grad_norm + 0 * stats.loss  # NaN in a void step
        refused = plain.update(stats._replace(grad_norm=norm_or_nan), number)
        if self.overflowed(stats.loss):
            return plain(batches, number, full, guard, n_trained)
        return stats, refused

    def host_looks_first(self, guard):
        """Whether the update waits until the host has read the loss.

        It does if a guard may veto the update, or if a void update would change the loss scale.
        """
        guard_may_veto = guard is not None and guard.sigma > 0
        return guard_may_veto or self.plain.opt.loss_scale is not None

    def gradients(self, batches, number, n_trained=None):
        """Return this rank's part of the mean loss, (), replayed where there is a graph.

        batches: those of step `number`; n_trained: see train.Step. A new number of micro-batches, or a new
        shape, captures again.
        """
        shape = [*(x.shape for x, *_ in batches), type(n_trained)]
        if shape != self.shape:
            self.calls = 0
            self.shape = shape
            self.graph = None
        if self.sizer is not None:
            self.sizer.enable(True)
            if not self.sizer.slack:
                return self.body(batches, number, n_trained)

        self.calls += 1
        if self.calls <= WARMUP_STEPS:
            return self.body(batches, number, n_trained)
        seeds = dropout_seeds(self.plain.cfg, self.plain.model.mesh, number, len(batches))
        if self.graph is None:
            self.capture(batches, len(seeds), n_trained)
        self.fill_inputs(batches, seeds, n_trained)
        self.graph.replay()
        for bucket in self.data_parallel.buckets:
            bucket.gather_handle = None  # the graph gathered the weights, and its forward waited for them
        return self.output

    def body(self, batches, number, n_trained, set_seed=torch.manual_seed):
        """Do the work that the graph holds. n_trained, set_seed: see train.Step."""
        for bucket in reversed(self.data_parallel.buckets):  # in the order in which the forward needs them
            if bucket not in self.eager_buckets:
                bucket.after_update()
        loss = self.plain.gradients(batches, number, set_seed, n_trained)
        return loss if self.sizer is None else self.sizer.nan_on_overflow(loss)

    def capture(self, batches, n_seeds, n_trained):
        """Capture body(). n_seeds: how many seeds dropout needs. Each replay sets the values."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # the graph has memory of its own: the warm-up steps' is not needed again
        self.inputs = [tuple(t.clone() for t in pair) for pair in batches]
        self.n_trained = n_trained.clone() if torch.is_tensor(n_trained) else n_trained
        self.graph = torch.cuda.CUDAGraph()

        # torch.manual_seed cannot be captured. Each micro-batch draws from a generator of its own instead.
        # Before a replay, fill_inputs() puts the generators' seeds where the captured kernels read them.
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

    def fill_inputs(self, batches, seeds, n_trained):
        """Copy a step's inputs to the addresses from which the captured kernels read."""
        if torch.is_tensor(n_trained):
            self.n_trained.copy_(n_trained)
        for captured, new in zip(self.inputs, batches, strict=True):
            for captured_tensor, tensor in zip(captured, new, strict=True):
                captured_tensor.copy_(tensor, non_blocking=True)
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)

    def overflowed(self, loss):
        """Return whether the last step is void, and choose the buffers' size. loss: (), over all ranks."""
        void = not math.isfinite(loss.item())  # sync point
        if self.sizer.resize(void):
            self.output = None  # captured again at the next call; the memory is free until then
            self.graph = None
            gc.collect()
            torch.cuda.empty_cache()
        self.sizer.enable(False)
        return void


class BufferSizer:
    """How many rows of the experts' buffers (or messages: fast/padded.py) are in use.

    The number is what the fullest rank (or pair of ranks) needed, and a tenth more. All ranks use the same
    number, for many steps, because a captured graph holds it. An example with 160 copies of rows per rank
    (160 rows if balanced) and --ep-slack 2.5:
        the first step has no buffers; the fullest rank needed 200 rows  -> 224 rows: slack 1.38
        a step needs 300: void, done again                               -> 400 rows: a fifth more than 330
        50 steps later the most was 180: the load is balanced now        -> 200 rows, captured again
        a step needs 440, over 2.5 * 160 = 400 rows                      -> no buffers until steps need less
    """

    def __init__(self, model, limit, interval=50):
        cfg = model.cfg
        mesh = model.mesh
        self.layers = list(moe_layers(model).values())
        self.world = mesh.world
        self.ep = mesh.ep.size
        self.limit = min(limit, float(self.ep))  # at slack ep, the copies of all ranks can go to one
        self.copies = cfg.micro_batch * cfg.seq_len // (mesh.cp.size * mesh.tp.size) * cfg.top_k  # of a rank

        self.slack = 0.0  # rows in use, over the balanced number; 0: no buffers
        self.n_retries = 0
        self.interval = interval
        self.steps = interval - 1  # since the last choice; the first step chooses
        # (): the most rows that came to this rank since the last choice
        self.rows_needed = torch.zeros_like(self.layers[0].dispatcher.rows_needed)

    def rows(self, slack):
        """Return the number of rows, a multiple of 8, for `slack` times the balanced number."""
        return ceil_div(int(self.copies * slack), 8) * 8

    def enable(self, on):
        """From now on, let the dispatchers use the buffers, or else all_to_all."""
        for layer in self.layers:
            layer.dispatcher.rows_in_use = self.rows(self.slack) if on else 0

    def nan_on_overflow(self, loss):
        """Return the loss () of this rank, or NaN if some rows had no place in this rank's buffer."""
        needed = torch.stack([layer.dispatcher.rows_needed for layer in self.layers]).max()
        torch.maximum(self.rows_needed, needed, out=self.rows_needed)
        rows = self.layers[0].dispatcher.rows_in_use
        return torch.where(needed > rows, torch.nan, loss) if rows else loss

    def resize(self, overflowed):
        """Choose the number of rows, and return whether it changed, alike on all ranks.

        The number changes after an overflow, or every `interval` steps, because a balanced load needs fewer
        rows.
        """
        self.steps += 1
        self.n_retries += overflowed
        if not overflowed and self.steps < self.interval:
            return False

        slack = self.slack_for_rows_needed(overflowed)
        self.steps = 0
        # A slightly smaller buffer is not worth a new capture.
        suffices = 0.85 * self.slack < slack <= self.slack
        if slack == self.slack or suffices:
            return False
        self.slack = slack
        return True

    def slack_for_rows_needed(self, overflowed):
        """Return the slack for the most rows that any rank needed since the last choice."""
        self.world.all_reduce(self.rows_needed, MAX)  # MAX of one number, over the world
        slack = max(1.1 * self.rows_needed.item() / self.copies, 1.0)
        self.rows_needed.zero_()
        if slack > self.limit:
            nothing_can_overflow = self.limit == self.ep
            return self.limit if nothing_can_overflow else 0.0
        if overflowed:  # a fifth more: the need grows, and a new capture costs as much as several steps
            return min(1.2 * slack, self.limit)
        return slack

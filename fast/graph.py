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
from collections import Counter

import torch

from config import ceil_div
from fast.choose import needs_row_limit
from fast.compile import compile_blocks
from fast.products import FastProducts, compile_products
from fast.symm_mem import allocate, allocate_for_capacity
from interface.terminal import say
from moe import moe_layers
from ops import cublas_lt
from ops.accelerator import free_memory
from parallel import MAX
from pipeline import dropout_seeds

WARMUP_STEPS = 3  # steps without a graph: compilation, autotuning and NCCL's set-up must not be captured
FREE_SHARE = 0.5  # the part of the free memory that the experts' buffers may take beyond --ep-slack


def make_step(plain, choice, folder=None):
    """Return the step to train with: the train.Step `plain`, or a GraphedStep around it.

    choice: a fast.choose.Choice. folder: of the run, where it keeps what it measured, or None. The model is
    compiled if the flags ask for it. Collective: symmetric memory is allocated.
    """
    cfg = plain.cfg
    model = plain.model
    products = None
    cublas_lt.forget()
    tree = model.mesh.world.tree
    if choice.graph and not tree.any(not choice.measured):  # one bool from each rank, over the world
        products = FastProducts(tree, next(model.parameters()).device, folder)
    if cfg.compile:
        compile_products(products is not None)
        compile_blocks(model)
    if not choice.graph:
        return plain

    sizer = None
    if needs_row_limit(cfg, model.mesh):
        sizer = BufferSizer(model, cfg.ep_slack, choice.symm_mem)
        sizer.allocate()
    elif choice.symm_mem:
        allocate_for_capacity(list(moe_layers(model).values()))
    return GraphedStep(plain, choice, sizer, products)


class DeferredGather:
    """The handle of a gather that the next captured step starts.

    A reader that cannot wait for that step (evaluation, --check-every) calls wait() on every rank, which
    gathers at once, so that no reader sees stale weights.
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
         batches with all_to_all, whose messages have the exact size. Before that the graph gives its memory
         back. If rows had no place, the buffers grow. The next step is captured again.
    ZeRO-1's new weights are gathered by the first nodes of the graph. With peer copies, the bucket of the
    embedding, which the forward needs first, is gathered right after its update.
    """

    def __init__(self, plain, choice, sizer=None, products=None):
        self.plain = plain
        self.sizer = sizer
        self.products = products
        self.data_parallel = plain.data_parallel
        self.eager_buckets = self.data_parallel.buckets_of[plain.model.wte] if choice.peer_copies else []
        self.data_parallel.on_updated = self.on_updated
        self.calls = 0
        self.made_for = None  # the shapes of the batches, and the kind of n_trained
        self.graph = None
        self.path = "plain"  # how the last step was done: "graph", "plain", or "redone" if it was void
        self.paths = Counter()  # steps since the last row of the log, by path

    def path_shares(self):
        """See train.Step."""
        counts = self.paths
        self.paths = Counter()
        total = max(1, counts.total())
        shares = {"graph_share": counts["graph"] / total}
        if self.sizer is not None:
            shares["redone_share"] = counts["redone"] / total
        return shares

    def on_updated(self, bucket):
        """Replace DataParallel.on_updated: the next graph gathers the weights of most buckets."""
        if bucket in self.eager_buckets:
            bucket.after_update()
        elif bucket.n_slices > 1:
            bucket.gather_handle = DeferredGather(bucket)

    def __call__(self, batches, number, full=True, guard=None, n_trained=None):
        result = self.take_step(batches, number, full, guard, n_trained)
        self.paths[self.path] += 1
        return result

    def take_step(self, batches, number, full, guard, n_trained):
        """Do step `number` as train.Step does, and note its path."""
        plain = self.plain
        for bucket in self.eager_buckets:
            bucket.wait_for_weights()  # outside the graph, where their gather was started
        loss = self.gradients(batches, number, n_trained)
        with self.data_parallel.timers("norm"):
            stats = plain.opt.stats(loss, full)
        if self.sizer is None:
            return plain.update_unless_vetoed(stats, number, guard)

        if self.host_looks_first(guard):
            is_void = not math.isfinite(stats.loss.item())  # sync point
            result = None if is_void else plain.update_unless_vetoed(stats, number, guard)
        else:
            norm_or_nan = stats.grad_norm + 0 * stats.loss  # NaN in a void step
            result = stats, plain.update(stats._replace(grad_norm=norm_or_nan), number)
            is_void = not math.isfinite(stats.loss.item())  # sync point
        self.resize_buffers(is_void, number)  # It may drop the graph's gradients, which the update has read.
        if is_void:
            self.path = "redone"
            return plain(batches, number, full, guard, n_trained)
        return result

    def host_looks_first(self, guard):
        """Whether the update waits until the host has read the loss.

        It does if a guard may veto the update, or if a void update would change the loss scale. It also does
        if functions are called before the update, such as that of --dump-grads, which writes a file once.
        """
        guard_may_veto = guard is not None and guard.sigma > 0
        opt = self.plain.opt
        return guard_may_veto or opt.loss_scale is not None or len(opt.before_update) > 0

    def gradients(self, batches, number, n_trained=None):
        """Return this rank's part of the mean loss, (), replayed where there is a graph.

        batches: those of step `number`; n_trained: see train.Step. A new number of micro-batches, or a new
        shape, captures again.
        """
        # A graph reads n_trained where it is a tensor, and holds it as a constant where it is a number.
        made_for = [x.shape for x, *_ in batches], torch.is_tensor(n_trained)
        if made_for != self.made_for:
            if self.graph is not None:
                self.drop_graph()
            self.calls = 0
            self.made_for = made_for
        self.path = "plain"
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
        self.path = "graph"
        self.graph.replay()
        for bucket, grad_total in zip(self.data_parallel.buckets, self.grad_totals, strict=True):
            bucket.gather_handle = None  # the graph gathered the weights, and its forward waited for them
            bucket.grad_total = grad_total  # where the graph writes
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
        # The graph has memory of its own, and torch frees none while it captures. So the memory of the
        # warm-up steps, and of their gradients, is freed first.
        self.data_parallel.reset()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        if self.products is not None:
            self.products.choose()
            torch.cuda.empty_cache()
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
        self.grad_totals = [bucket.grad_total for bucket in self.data_parallel.buckets]

    def fill_inputs(self, batches, seeds, n_trained):
        """Copy a step's inputs to the addresses from which the captured kernels read."""
        if torch.is_tensor(n_trained):
            self.n_trained.copy_(n_trained)
        for captured, new in zip(self.inputs, batches, strict=True):
            for captured_tensor, tensor in zip(captured, new, strict=True):
                captured_tensor.copy_(tensor, non_blocking=True)
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)

    def resize_buffers(self, is_void, number):
        """Choose the buffers' size after step `number`.

        is_void: whether the step is done again, because some rows had no place, or the loss is not finite.
        """
        is_other_size = self.sizer.resize(is_void, number)
        if is_other_size or is_void:
            self.drop_graph()
        if is_other_size:
            self.sizer.grow()
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
    """How many rows of the experts' buffers (or messages: fast/padded.py) are in use.

    The number is what the fullest rank (or pair of ranks) needed, and a tenth more. All ranks use the same
    number, for many steps, because a captured graph holds it. An example with 160 copies of rows per rank
    (160 rows if balanced), ep 4 and --ep-slack 2.5:
        the first step has no buffers; the fullest rank needed 200 rows  -> 224 rows: slack 1.38
        a step needs 300: void, done again                               -> 400 rows: a fifth more than 330
        50 steps later the most was 180: the load is balanced now        -> 200 rows, captured again
        a step needs 440, for which 2.5 * 160 = 400 rows are allocated   -> 584 rows are, if memory is free

    So --ep-slack is where the buffers begin, and the free memory bounds them. With ep times the balanced rows
    nothing can overflow. Where the memory is too small for that, the buffers keep the rows that fit, and a
    step that needs more is done again without them. If such steps are frequent, trying the buffers first
    costs more than it brings: after the second void step in a row one step goes without buffers, then 2, 4
    and so on up to `interval`, and `interval` steps without a void one start again at none.
    """

    def __init__(self, model, slack, symm_mem=False, interval=50):
        cfg = model.cfg
        mesh = model.mesh
        self.layers = list(moe_layers(model).values())
        self.world = mesh.world
        self.ep = mesh.ep.size
        self.symm_mem = symm_mem  # whether the rows need allocated buffers
        self.limit = min(slack, float(self.ep))  # the slack for which there is memory
        self.copies = cfg.micro_batch * cfg.seq_len // (mesh.cp.size * mesh.tp.size) * cfg.top_k  # of a rank

        self.slack = 0.0  # rows in use, over the balanced number; 0: no buffers
        self.n_retries = 0
        self.n_misses = 0  # choices in a row for which there was too little memory
        self.told = False  # whether a line about such a choice was printed
        self.interval = interval
        self.wait = 1  # steps until the next choice; the first step chooses
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

    def resize(self, overflowed, number=0):
        """Choose the number of rows after step `number`, alike on all ranks.

        Return whether the number changed, or memory is short for a void step that is done again. The number
        changes after an overflow, or every `interval` steps, because a balanced load needs fewer rows.
        """
        self.wait -= 1
        self.n_retries += overflowed
        if not overflowed and self.wait > 0:
            return False

        needed, room = self.needed_and_room()
        slack = max(1.1 * needed / self.copies, 1.0)
        if overflowed:  # a fifth more: the need grows, and a new capture costs as much as several steps
            slack *= 1.2
        slack = min(slack, float(self.ep))
        before = self.limit
        self.limit = max(before, min(slack, room / self.copies))

        fits = needed <= self.rows(self.limit)
        if fits:
            self.wait = self.interval
            if self.slack and not overflowed:
                self.n_misses = 0
            slack = min(slack, self.limit)
        else:
            slack = self.miss()
        self.tell(number, needed, before)
        # A slightly smaller buffer is not worth a new capture.
        suffices = 0.85 * self.slack < slack <= self.slack
        if fits and (slack == self.slack or suffices):
            return False
        self.slack = slack
        return True

    def miss(self):
        """Return the slack for the next steps, where the last ones needed more rows than memory can hold."""
        self.n_misses += 1
        if self.n_misses == 1:
            self.wait = self.interval
            return self.limit
        self.wait = min(2**(self.n_misses - 2), self.interval)
        return 0.0

    def needed_and_room(self):
        """Return two numbers of rows: what the fullest rank needed, and what fits into every memory."""
        device = self.rows_needed.device
        own = self.rows_needed.item()
        in_use = int(self.copies * self.slack) or own  # the rows of the steps that left this much memory free
        room = in_use + int(FREE_SHARE * free_memory(device) / self.bytes_per_row())
        numbers = torch.tensor([own, -room], device=device)
        self.world.all_reduce(numbers, MAX)  # MAX of two numbers, over the world
        needed, minus_room = numbers.tolist()
        self.rows_needed.zero_()
        return needed, -minus_room

    def bytes_per_row(self):
        """Return the bytes that a row more costs at most: what each layer keeps of it for backward, and what
        two layers more would keep, for the buffers that all layers share."""
        w = self.layers[0].w1  # (e, F, C)
        return (len(self.layers) + 2) * 4 * (w.size(1) + w.size(2)) * w.element_size()

    def allocate(self):
        """Allocate the buffers. Collective over ep."""
        if self.symm_mem:
            allocate(self.layers, self.rows(self.limit))
        self.allocated = self.limit

    def grow(self):
        """Allocate larger buffers if the limit has grown. Collective over ep. No graph may use the old
        ones."""
        if self.limit == self.allocated:
            return
        for layer in self.layers:
            layer.dispatcher.buffers = None
        gc.collect()
        self.allocate()

    def tell(self, number, needed, before):
        """Print on rank 0 that the buffers grow, or, once, that they cannot. before: the limit before."""
        if self.world.rank != 0:
            return
        times = needed / self.copies
        brought = f"note: step {number} brought {times:.2f} times the balanced rows to a rank's experts"
        if self.limit > before:
            grown = f"{brought}: the buffers grow from {before:.2f} to {self.limit:.2f} times"
            say(grown)
        if needed > self.rows(self.limit) and not self.told:
            self.told = True
            short = (f"{brought}, and memory is free for {self.limit:.2f} times: such a step is done again "
                     "without buffers; a smaller --micro-batch leaves more memory")
            say(short)

"""Buckets, ZeRO and shares within groups (--shard): which part of each tensor a slice covers, the order of
sums, masters, replicas after many steps, which weights are whole when.
"""
import contextlib
import itertools
import math
import random
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import test_layouts
import torch
from faults import with_faults
from pool import run_ranks
from test_checkpoint import read, write
from test_layouts import LLAMA, MOE, assemble, flags_of, run, sequences
from test_moe import owned

import layers
import model as model_module
import train
from config import Config
from corpus.samples import Synthetic
from cost.memory import state_bytes
from cost.parameters import Rank
from ddp import Bucket, DataParallel, assign_buckets
from fast.choose import choose
from ops import accelerator
from ops.split_master import whole
from parallel import make_mesh
from pipeline import generate
from runtime import agree
from runtime.launch import CollectiveLog
from runtime.pieces import rectangles
from runtime.resume import make_replicas_equal
from zero import ShardedBucket, ZeRO2

# -----------------------------------------------------------------------------
# The part of each tensor that a slice of a bucket covers

def test_rectangles_cover_every_element_once():
    rng = random.Random(0)
    for _ in range(2000):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        n = math.prod(shape)
        a, b = sorted(rng.randint(0, n) for _ in range(2))
        count, at, found = np.zeros(shape, int), a, rectangles(shape, a, b)
        flat = np.arange(n).reshape(shape)
        for offset, size in found:
            where = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
            count[where] += 1
            assert (flat[where].reshape(-1) == np.arange(at, at + math.prod(size))).all()
            at += math.prod(size)
        assert at == b if a < b else not found
        assert count.sum() == b - a and len(found) <= max(1, 2 * len(shape) - 1)


# -----------------------------------------------------------------------------
# The order of the sums

def three_matrices():
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(32, 32)) for name in "abc"})
    for p in model.parameters():
        p.reduction_axis = "stage"
    return model


def sums_of_two_orders(world, zero):
    """Rank 1's backward makes the gradients in another order, and no rank's makes one of the first parameter.

    Return the names of the sums that this rank starts in backward, of all that it starts, and {name: sum}.
    """
    model = three_matrices()
    data_parallel = DataParallel(model, make_mesh(world), zero, bucket_elements=1)
    assert len(data_parallel.buckets) == 3
    data_parallel.reset()
    for bucket in data_parallel.buckets:
        bucket.grad.fill_(9)  # of an earlier step
    uses = [(2 * model["b"]).sum(), (3 * model["c"]).sum()]
    if world.rank == 1:
        uses = [(3 * model["c"]).sum(), (2 * model["b"]).sum()]
    order = []
    start_sum = Bucket.start_sum

    def noted(bucket):
        order.append(bucket.names[0])
        start_sum(bucket)
    with mock.patch.object(Bucket, "start_sum", noted):
        sum(uses).backward()
        in_backward = list(order)
        data_parallel.finish_grad_sync()
    totals = {bucket.names[0]: bucket.grad_total.mean().item() for bucket in data_parallel.buckets}
    return in_backward, order, totals


@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_start_their_sums_in_one_order(zero):
    """In whichever order backward makes the gradients: else other buckets would be added up."""
    for in_backward, order, totals in run_ranks(2, sums_of_two_orders, zero):
        assert in_backward == ["c", "b"] and order == ["c", "b", "a"]
        assert totals == {"a": 0.0, "b": 4.0, "c": 6.0}


def sums_of_two_backwards(world):
    """Under ZeRO-2, the second backward makes no gradient of a. Return {name: sum}."""
    model = three_matrices()
    data_parallel = ZeRO2(model, make_mesh(world), 2)
    data_parallel.reset()
    for factor, names in (2, "abc"), (3, "bc"):
        data_parallel.completes_grads = factor == 3
        sum((factor * model[name]).sum() for name in names).backward()
    data_parallel.finish_grad_sync()
    [bucket] = data_parallel.buckets
    totals = bucket.windows(bucket.shard.all_gather(bucket.grad_total))
    return {name: total.mean().item() for name, total in zip(bucket.names, totals, strict=True)}


def test_zero_2_adds_nothing_for_a_gradient_that_does_not_come():
    assert run_ranks(2, sums_of_two_backwards) == [{"a": 4.0, "b": 10.0, "c": 10.0}] * 2


# -----------------------------------------------------------------------------
# Masters

def initial_masters(world, dtype, zero):
    """Return {"pieces": the masters that this rank owns before the first step}."""
    cfg = Config(**dict(test_layouts.MOE, dtype=dtype, zero=zero, ep=world.size))
    mesh = make_mesh(world, ep=cfg.ep)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    make_replicas_equal(model)
    opt.masters_from_model()
    assert all(p.dtype == train.DTYPES[dtype] for p in model.parameters())
    assert all(torch.equal(whole(m).to(b.own.dtype), b.own) for m, b in
               zip(opt.masters, data_parallel.buckets, strict=True))
    return owned(data_parallel, opt)


@pytest.mark.parametrize("dtype,n,zero", [("bf16", 1, 0), ("fp16", 2, 1), ("bf16", 2, 3)])
def test_masters_keep_the_digits_that_16_bit_weights_round_away(dtype, n, zero):
    """A master that equals its rounded weight is in the middle of the interval that rounds to this weight:
    the small updates of the warmup's first steps would change no weight."""
    want = assemble(run_ranks(1, initial_masters, "fp32", 0))
    got = assemble(run_ranks(n, initial_masters, dtype, zero))
    for name, t in want.items():  # a bf16 master at equal distance from two weights moves by one digit
        np.testing.assert_allclose(got[name], t, rtol=2**-23 if dtype == "bf16" else 0, err_msg=name)


# -----------------------------------------------------------------------------
# Replicas after many steps

def run_8(world, flags, batch):
    with mock.patch.object(test_layouts, "STEPS", 8):
        return run(world, flags, batch)


def assert_replicas_equal(results):
    found = {}
    for seen in results:
        for name, local in seen["replicas"].items():
            found.setdefault((name, seen["offsets"][name][1]), []).append(local)
    for (name, _), copies in found.items():
        for copy in copies:
            error = np.abs(copy - copies[0]).max()
            assert copy.tobytes() == copies[0].tobytes(), f"replicas of {name} differ by {error}"
    return sum(len(copies) > 1 for copies in found.values())


@pytest.mark.parametrize("family,n,layout", [
    ("one-kv-head", 4, dict(tp=2, zero=1)), ("gpt2", 4, dict(pp=2)),
    ("dropless", 4, dict(cp=2, ep=2, zero=1)),
    pytest.param("dropless", 4, dict(tp=2, ep=2, zero=1), marks=pytest.mark.long)], ids=str)
def test_replicas_have_equal_bits_after_8_steps(family, n, layout):
    flags = dict(flags_of(family), **layout, dtype="fp32", steps=8)
    results = run_ranks(n, run_8, flags, sequences(n, layout))
    assert assert_replicas_equal(results) > 0, "no piece is on several ranks"
    losses = [row[0] for row in results[0]["stats"]]
    assert len(set(losses)) == 8 and np.isfinite(losses).all()


# -----------------------------------------------------------------------------
# Tied embeddings: their sum must not stand between the messages of a pipeline

def calls_of_a_step(world, flags):
    """Return [(axis, kind)] of this rank's collectives and messages in one training step."""
    cfg = Config(**flags)
    mesh = make_mesh(world, pp=cfg.pp)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    batches = train.micro_batches(cfg, mesh, source, 0, cfg.global_batch, world.device)
    seen = []

    def record(log, axis, kind, *_):
        seen.append((axis.name, kind))
    with mock.patch.object(CollectiveLog, "record", record):
        train.Step(cfg, model, data_parallel, opt)(batches, 1)
    return seen


@pytest.mark.parametrize("zero", [0, 2])
def test_a_tied_embedding_is_summed_after_the_last_message(zero):
    flags = dict(flags_of("gpt2"), pp=2, zero=zero, global_batch=4)
    for seen in run_ranks(2, calls_of_a_step, flags):
        reduce = "all-reduce" if zero == 0 else "reduce-scatter"
        messages = [i for i, (axis, _) in enumerate(seen) if axis == "pp"]
        assert seen.count(("tied", reduce)) == 1 and messages
        assert seen.index(("tied", reduce)) > max(messages)


def test_a_bucket_is_full_when_it_has_its_elements():
    def named(*sizes):
        parameters = []
        for i, n in enumerate(sizes):
            p = torch.nn.Parameter(torch.zeros(n, 1))
            p.reduction_axis = "dp"
            parameters.append((f"blocks.{i}.w", p))
        return parameters

    for zero in (0, 2, 3):
        assert [[name for name, _ in group] for group in assign_buckets(named(5, 5, 5), zero, 5)] == [
            ["blocks.2.w"], ["blocks.1.w"], ["blocks.0.w"]]
    assert list(map(len, assign_buckets(named(5, 5, 5), 2, 6))) == [2, 1]

    def sizes(zero, *lone_axes):
        """Of a model of 3 + 8 + 2 + 7 + 1 elements, in buckets of 16. Backward begins with the last."""
        found = assign_buckets(named(3, 8, 2, 7, 1), zero, 16, lone_axes=lone_axes)
        return [[p.numel() for _, p in group] for group in found]

    for zero in (0, 1):  # Half a bucket is alone, where no other rank has it.
        assert sizes(zero, "dp") == [[1, 7, 2], [8], [3]]
        assert sizes(zero, "edp") == sizes(zero) == [[1, 7, 2, 8], [3]]
    assert sizes(2, "dp") == [[1, 7, 2, 8], [3]] and sizes(3, "dp") == [[1], [7], [2], [8], [3]]


# -----------------------------------------------------------------------------
# ZeRO-3: which parts of the model have whole weights when

def parts_alive(world, flags):
    """Train a step, evaluate and generate under ZeRO-3 -> {"forward", "backward" of the step, "evaluation",
    "generation": [(number of the block that computes, numbers of the parts whose weights are whole)]}, the
    same after the step, the most bytes of weights, the bytes predicted. Parts: embedding 0, blocks, head."""
    cfg = Config(**flags, zero=3, eval_iters=1)
    mesh = make_mesh(world, cfg.tp, ep=cfg.ep)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    seen, bytes_seen, kind = {}, [], "forward"

    def alive():
        whole = [i for i, part in enumerate(data_parallel.sharded) if any(b.storage.nbytes() for b in part)]
        at_rest = sum(b.own.nbytes if isinstance(b, ShardedBucket) else b.flat.nbytes
                      for b in data_parallel.buckets)
        sharded = {*itertools.chain(*data_parallel.sharded)}
        bytes_seen.append(at_rest + sum(b.storage.nbytes() for b in sharded))
        return whole

    def note(kind, i):
        seen.setdefault(kind, []).append((i, alive()))
    for i, block in enumerate(model.blocks.values(), 1):
        for module in block.modules():
            module.register_forward_pre_hook(lambda *_, i=i: note(kind, i))
        for p in block.parameters():
            p.register_hook(lambda grad, i=i: note("backward", i))
    source, batch = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), 2 * cfg.micro_batch * mesh.dp.size
    batches = train.micro_batches(cfg, mesh, source, 0, batch, world.device)
    train.Step(cfg, model, data_parallel, opt)(batches, 1)
    after, kind = alive(), "evaluation"
    train.evaluate(cfg, model, source, batch, world.device)
    kind = "generation"
    generate(model, [1, 2, 3], 2)
    predicted = state_bytes(Rank(cfg, mesh, cfg.vocab_size, choose(cfg, mesh, world.device)))["weights"]
    return seen, after, max(bytes_seen), predicted


def check_parts(results, n_layer, recompute):
    """AssertionError unless at every hook the whole weights were those of the block that computes and of the
    part that comes next."""
    ahead = {i: {i, i + 1} for i in range(1, n_layer + 1)}
    turned = {i: {i, i - 1} - {0} for i in range(1, n_layer + 1)}  # the embedding's are not needed
    for seen, after, most, predicted in results:
        assert seen.keys() == {"forward", "backward", "evaluation", "generation"} and after == []
        for kind, events in seen.items():
            for part, alive in events:
                wants = [turned[part] if kind == "backward" else ahead[part]]
                wants += [turned[part]] * (recompute and kind == "forward")
                assert {*alive} in wants, f"{kind} of block {part}: {alive} are whole, not one of {wants}"
        assert most == pytest.approx(predicted, rel=0.15), "bytes of weights"


@pytest.mark.parametrize("n, flags", [
    (2, dict(LLAMA, micro_batch=2)), (2, dict(MOE, micro_batch=2, recompute="full"))],
    ids=["llama", "moe-recompute"])
def test_two_parts_have_whole_weights_at_most(n, flags):
    check_parts(run_ranks(n, parts_alive, flags), flags["n_layer"], "recompute" in flags)


def always_forward(original, zero, part, backward=False):
    original(zero, part)


def test_weights_in_memory_that_should_not_be_there():
    fault = "zero.ZeRO3.move_to_part", always_forward
    results = run_ranks(2, with_faults, [fault], parts_alive, dict(LLAMA, n_layer=2, micro_batch=2))
    with pytest.raises(AssertionError, match="are whole, not"):
        check_parts(results, 2, False)


def bytes_at_start(world, flags):
    """Build a model under ZeRO-3. Return the most bytes that its parameters have when one is drawn, and the
    bytes of the largest part and of all vectors. Each parameter is drawn once."""
    cfg = Config(**flags, zero=3)
    most, drawn, all_values = 0, Counter(), []

    def draw(p, name, model, seed):
        nonlocal most
        storages = {q.untyped_storage().data_ptr(): q.untyped_storage().nbytes() for q in model.parameters()}
        values = initial_weights(p, name, model, seed)
        assert all(drawn_before() is None for drawn_before in all_values)  # It was copied, and is gone.
        all_values.append(weakref.ref(values))
        most = max(most, sum(storages.values()) + values.nbytes)
        drawn[name] += 1
        return values
    mesh = make_mesh(world, cfg.tp, ep=cfg.ep)
    initial_weights = model_module.initial_weights
    with mock.patch.object(model_module, "initial_weights", draw):
        model, *_ = train.build(cfg, mesh, cfg.vocab_size, world.device)
    parts = [model.wte, model.head, *model.blocks.values()]
    largest = max(sum(p.numel() for p in part.parameters() if p.ndim > 1) for part in parts)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert drawn == Counter(dict.fromkeys(dict(model.named_parameters()), 1))
    return most, 8 * (largest + vectors)


@pytest.mark.parametrize("flags", [dict(MOE, n_layer=8), dict(LLAMA, n_layer=8, lora=2)], ids=str)
def test_no_rank_ever_has_the_whole_model(flags):
    """Not even while weights are drawn: one part of the model after the other, in fp64 here."""
    for most, part in run_ranks(2, bytes_at_start, flags):
        assert part / 2 < most <= part


def losses(world, zero, dtype, products=None):
    """The losses of five steps on a random text. products: 3 if ZeRO-3's way to multiply is taken."""
    cfg = Config(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=80, vocab_size=100, seq_len=16,
                 micro_batch=2, warmup=0, zero=zero, dtype=dtype, bias=True)
    mesh, source = make_mesh(world), Synthetic(100, cfg.seq_len, 1)
    taken = layers.linear if products is None else layers.linear_without_copy
    with mock.patch.object(layers, "linear", taken), mock.patch("ddp.COPY_ALONE", 2000):
        step = train.Step(cfg, *train.build(cfg, mesh, cfg.vocab_size, world.device))
        return [step(train.micro_batches(cfg, mesh, source, 4 * i, 4, world.device), i + 1)[0].loss.item()
                for i in range(5)]


@pytest.mark.parametrize("dtype, rounding", [("bf16", 1e-3), ("fp64", 1e-14)])
def test_zero_3_differs_from_zero_1_by_its_several_products_alone(dtype, rounding):
    zero_1, split, zero_3 = (run_ranks(2, losses, zero, dtype, products)[0]
                             for zero, products in ((1, None), (1, 3), (3, None)))
    assert split == zero_3 and zero_3 == pytest.approx(zero_1, rel=rounding)
    if dtype == "bf16":
        assert zero_3 != zero_1
        assert run_ranks(2, losses, 0, dtype)[0] == run_ranks(2, losses, 2, dtype)[0] == zero_1


# -----------------------------------------------------------------------------
# --shard: checkpoints, the start, the check of the replicas

READERS = [(4, dict(zero=2, shard=2)), (4, dict(zero=3, shard=1)), (1, {}), (4, dict(zero=1)),
           (2, dict(zero=3)), (4, dict(tp=2, zero=1, shard=1)), (4, dict(pp=2, zero=2, shard=1))]


def check_resume(family, writer, readers, folder):
    """Assert that each reader has the bits of the writer's state, and computes the next step."""
    base = dict(flags_of(family), global_batch=16)
    del base["micro_batch"]  # read() and write() have their own
    n, layout = writer
    want = assemble(run_ranks(n, write, dict(base, **layout), folder))
    for m, other in readers:
        got = assemble(run_ranks(m, read, dict(base, **other), folder))
        assert got.keys() == want.keys()
        for name, t in want.items():
            if name.startswith("saved ") or (m, other) == writer:
                np.testing.assert_array_equal(got[name], t, err_msg=f"{writer} -> {other}: {name}")
            else:
                worst = 1e-10 * max(1e-4, np.abs(t).max())
                np.testing.assert_allclose(got[name], t, rtol=0, atol=worst, err_msg=f"{other}: {name}")


def test_another_shard_size_reads_the_same_bits(tmp_path):
    check_resume("llama", READERS[0], READERS[:2], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family, writer", [
    ("llama", READERS[1]), ("gpt2", READERS[5]), ("muon-llama", READERS[0]), ("gpt2", READERS[6]),
    ("llama", READERS[2])])
def test_any_layout_reads_what_shards_wrote(family, writer, tmp_path):
    check_resume(family, writer, READERS, tmp_path)


def replicas_that_differ(world, dtype):
    """Give the second group other weights under ZeRO-3 -> the differences before and after a start."""
    cfg = Config(n_layer=1, n_embd=16, n_head=2, n_kv_head=2, ffn_hidden=32, seq_len=8, zero=3, shard=2,
                 micro_batch=1, dtype=dtype)
    mesh = make_mesh(world, shard=cfg.shard)
    model, data_parallel, opt = train.build(cfg, mesh, 64, world.device)
    if world.rank >= 2:
        for bucket in data_parallel.buckets:
            bucket.own.mul_(2)  # not the padding, which is 0
            bucket.master.copy_(bucket.own)

    def differences():
        found = agree.replica_differences(model, mesh)
        for bucket in data_parallel.buckets:
            if isinstance(bucket, ShardedBucket):
                bucket.free()
        return found
    before = differences()
    make_replicas_equal(model)
    opt.masters_from_model()
    masters = [bucket.replicas.all_gather(whole(bucket.master)[None]) for bucket in data_parallel.buckets]
    return before, differences(), all(torch.equal(row, rows[0]) for rows in masters for row in rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])  # split masters, and whole ones
def test_groups_start_equal_and_are_compared(dtype):
    for before, after, masters_equal in run_ranks(4, replicas_that_differ, dtype):
        assert any(line.startswith("wte.weight on ranks 2, 3 differs") for line in before), before
        assert after == [] and masters_equal, "the groups differ after the start"


class Streams:
    """A device's module of streams, which notes what is issued on which stream."""

    def __init__(self):
        self.seen = []
        self.now = "compute"

    def Stream(self, device):
        note = self.seen.append
        return SimpleNamespace(wait_stream=lambda other: note(f"side waits for {other}"))

    def current_stream(self):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        self.now = "side"
        yield
        self.now = "compute"


def test_on_a_gpu_a_second_stream_waits_between_the_two_sums():
    """Neither the host nor backward waits for the first sum."""
    streams = Streams()

    def axis(name):
        def start(*tensors):
            streams.seen.append(f"{name} on {streams.now}")
            return SimpleNamespace(wait=lambda: streams.seen.append(f"{streams.now} waits for {name}"))
        return SimpleNamespace(size=2, start_reduce_scatter=start, start_all_reduce=start)
    bucket = SimpleNamespace(n_slices=2, shard=axis("shard"), replicas=axis("replicas"), grad_windows=[],
                             untouched=[], grad=torch.zeros(4), grad_total=torch.zeros(2))
    accelerator.side_stream.cache_clear()
    with mock.patch.object(accelerator, "stream_module", lambda device: streams):
        Bucket.start_sum(bucket)
    accelerator.side_stream.cache_clear()
    bucket.sum_handle.wait()
    assert streams.seen == ["side waits for compute", "shard on side", "side waits for shard",
                            "replicas on side", "compute waits for replicas"]

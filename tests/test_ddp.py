"""Buckets: which part of each tensor a slice covers, fp32 masters, and replicas after many steps.

test_layouts.py compares the sums of gradients with one rank's; test_faults.py has the faults of them.
"""
import math
import random
from unittest import mock

import numpy as np
import pytest
import test_layouts
import torch
from faults import GPT2, LLAMA, MOE, group, sequences, with_faults
from pool import run_ranks
from test_layouts import assemble, run

import train
from config import Config
from corpus.samples import Synthetic
from ddp import Bucket, DataParallel, assign_buckets
from fast.buckets import CopyBucket, LoneBucket
from fast.choose import choose
from ops.split_master import whole
from parallel import make_mesh
from runtime.launch import CollectiveLog, World
from runtime.pieces import own_pieces, rectangles
from runtime.resume import broadcast_and_verify

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

def sums_of_two_orders(world, zero):
    """Rank 1's backward makes the gradients in another order, and no rank's makes one of the first parameter.

    Return the names of the sums that this rank starts in backward, of all that it starts, and {name: sum}.
    """
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(32, 32)) for name in "abc"})
    for p in model.parameters():
        p.reduction_axis = "stage"
    data_parallel = DataParallel(model, make_mesh(world), zero, bucket_elements=1)
    assert len(data_parallel.buckets) == 3
    data_parallel.reset()
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


# -----------------------------------------------------------------------------
# Masters

def initial_masters(world, dtype, zero):
    """Return {"pieces": the masters that this rank owns before the first step}."""
    cfg = Config(**dict(test_layouts.MOE, dtype=dtype, zero=zero, ep=world.size))
    mesh = make_mesh(world, ep=cfg.ep)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    broadcast_and_verify(model)
    opt.masters_from_model()
    assert all(p.dtype == train.DTYPES[dtype] for p in model.parameters())
    assert all(torch.equal(whole(m).to(b.own.dtype), b.own) for m, b in
               zip(opt.masters, data_parallel.buckets, strict=True))
    pieces = own_pieces(data_parallel, opt)
    to_numpy = test_layouts.equality.to_numpy
    return {"pieces": [(name, to_numpy(t), full, offset) for name, t, full, offset in pieces]}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("n, zero", [(1, 0), (2, 0), (2, 1), (2, 3)])
def test_masters_keep_the_digits_that_16_bit_weights_round_away(dtype, n, zero):
    """A master that equals its rounded weight is in the middle of the interval that rounds to this weight:
    the small updates of the warmup's first steps would change no weight."""
    want = assemble(run_ranks(1, initial_masters, "fp32", 0))
    got = assemble(run_ranks(n, initial_masters, dtype, zero))
    for name, t in want.items():  # a bf16 master at equal distance from two weights moves by one digit
        np.testing.assert_allclose(got[name], t, rtol=2**-23 if dtype == "bf16" else 0, err_msg=name)


def masters_after_different_draws(world):
    """Return this rank's masters after rank 1 has drawn slightly different initial weights.

    They differ in their last digits, like the weights that another kind of GPU draws.
    """
    cfg = Config(**dict(test_layouts.MOE, dtype="fp16"))
    mesh = make_mesh(world)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    if world.rank:
        for m in opt.masters:
            m.mul_(1 + 1e-6)
    broadcast_and_verify(model)
    opt.masters_from_model()
    pairs = zip(opt.masters, data_parallel.buckets, strict=True)
    assert all(torch.equal(m.to(b.flat.dtype), b.flat) for m, b in pairs)
    return [m.numpy() for m in opt.masters]


def test_replicas_start_with_equal_masters():
    one, two = run_ranks(2, masters_after_different_draws)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


# -----------------------------------------------------------------------------
# Replicas after many steps

def run_20(world, flags, batch):
    with mock.patch.object(test_layouts, "STEPS", 20):
        return run(world, flags, batch)


def assert_replicas_equal(results):
    """Assert that all ranks' copies of a piece have the same bits -> number of pieces with several copies."""
    found = {}
    for seen in results:
        for name, local in seen["replicas"].items():
            found.setdefault((name, seen["offsets"][name][1]), []).append(local)
    for (name, _), copies in found.items():
        for copy in copies:
            error = np.abs(copy - copies[0]).max()
            assert copy.tobytes() == copies[0].tobytes(), f"replicas of {name} differ by {error}"
    return sum(len(copies) > 1 for copies in found.values())


@pytest.mark.parametrize("base,n,layout", [
    (LLAMA, 4, dict(tp=2)), (LLAMA, 4, dict(tp=2, zero=1)), (GPT2, 2, dict(pp=2)),
    (GPT2, 4, dict(pp=2, zero=1)), (dict(LLAMA, n_kv_head=1), 2, dict(tp=2)),
    (MOE, 4, dict(tp=2, ep=2, zero=1)), (MOE, 4, dict(cp=2, ep=2, zero=1)),
], ids=["dp2tp2", "dp2tp2zero1", "pp2tied", "dp2pp2tiedzero1", "tp2kv1", "dp2tp2ep2zero1", "dp2cp2ep2zero1"])
def test_replicas_have_equal_bits_after_20_steps(base, n, layout):
    results = run_ranks(n, run_20, dict(base, **layout, dtype="fp32", steps=20), sequences(n, layout))
    assert assert_replicas_equal(results) > 0, "no piece is on several ranks"
    losses = [row[0] for row in results[0]["stats"]]
    assert len(set(losses)) == 20 and np.isfinite(losses).all()


def test_a_drifting_replica_is_detected():
    fault = group("stage", "dp")
    results = run_ranks(2, with_faults, [fault], run_20, dict(LLAMA, tp=2, dtype="fp32", steps=20), 4)
    with pytest.raises(AssertionError, match="replicas of .*norm"):
        assert_replicas_equal(results)


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


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_embedding_is_summed_after_the_last_message(zero):
    flags = dict(GPT2, n_layer=2, pp=2, zero=zero, micro_batch=2, global_batch=4)
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


@pytest.mark.parametrize("ranks, single, width, kinds", [
    (1, True, 8, [LoneBucket] * 3), (1, False, 8, [Bucket] * 3), (2, True, 8, [Bucket] * 2),
    (1, True, 4, [CopyBucket])])
def test_a_matrix_of_half_a_bucket_is_alone_where_nobody_sums(ranks, single, width, kinds):
    """Three matrices of 64 elements in buckets of 128. On two ranks two of them share one, as three small
    ones do on one rank. single: each step has one micro-batch."""
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(3)])
    for p in model.parameters():
        p.reduction_axis = "dp"
    mesh = make_mesh(World(size=ranks), groups=False)
    choice = choose(Config(), mesh, torch.device("cpu"))._replace(single_microbatch=single)
    data_parallel = DataParallel(model, mesh, faster=choice.bucket_class, bucket_elements=128)
    assert [type(bucket) for bucket in data_parallel.buckets] == kinds

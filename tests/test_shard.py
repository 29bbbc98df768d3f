"""--shard N: ZeRO shares within groups of N neighbours, and the groups are replicas of each other.

make test has a few layouts and faults, make long all of them, against the numbers of one rank.
"""
import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from faults import assert_caught, nothing, with_faults
from pool import run_ranks
from test_checkpoint import read, write
from test_layouts import CAPACITY, GPT2, LLAMA, MOE, SIGMOID, assemble, compare

import plan
import train
from config import Config, check
from cost import plan_flags
from cost.parameters import Rank
from cost.traffic import bytes_between_nodes, share_between_nodes, traffic
from ddp import Bucket
from fast.buckets import PeerBucket
from fast.choose import choose
from interface.layout import check_ranks
from ops import accelerator
from ops.split_master import whole
from parallel import Axis, CompletedWork, make_mesh
from runtime import agree, log
from runtime.launch import World
from runtime.resume import broadcast_and_verify
from zero import ShardedBucket

# -----------------------------------------------------------------------------
# Who shares with whom

def test_which_ranks_share_and_which_are_replicas():
    """Rank 11 of 16 with tp 2 and ep 4: its block has the ranks 8 to 11."""
    mesh = make_mesh(World(rank=11, size=16), tp=2, ep=4, shard=2, groups=False)
    cut = {name: axis.ranks for name, axis in mesh.axes().items() if "." in name}
    assert cut == {
        "dp.shard": (9, 11), "dp.replicas": (3, 7, 11, 15), "stage.shard": (8, 9, 10, 11),
        "stage.replicas": (3, 7, 11, 15), "edp.shard": (11,), "edp.replicas": (3, 7, 11, 15),
        "tied.shard": (9, 11), "tied.replicas": (3, 7, 11, 15)}
    assert mesh.dp.sharing(zero=0).shard.size == 1 and mesh.dp.sharing(zero=0).replicas is mesh.dp
    everyone = make_mesh(World(rank=11, size=16), tp=2, ep=4, shard=8, groups=False)
    assert everyone.dp.shard_sharing is None and everyone.dp.sharing().shard is everyone.dp
    both_ends = make_mesh(World(rank=13, size=16), pp=4, shard=2, groups=False)
    tied = both_ends.tied.shard_sharing
    assert tied.shard.ranks == (0, 1, 12, 13) and tied.replicas.ranks == (13, 15)


def test_in_every_layout_a_shard_is_in_one_block_and_the_replicas_hold_the_same_slice():
    n, layouts = 8, 0
    for tp, cp, ep, shard in itertools.product(range(1, n + 1), repeat=4):
        try:
            check_ranks(n, tp, 1, ep, 0, cp, shard=shard)
        except ValueError:
            continue
        layouts += 1
        meshes = [make_mesh(World(rank=rank, size=n), tp, ep=ep, cp=cp, shard=shard, groups=False)
                  for rank in range(n)]
        for name in ("dp" if cp == 1 else "dpcp", "stage", "edp"):
            for rank, mesh in enumerate(meshes):
                axis = getattr(mesh, name)
                mine, same = axis.sharing()
                if axis.shard_sharing is None:
                    assert (mine, same.size) == (axis, 1)
                    continue
                assert sorted({r for other in same.ranks for r in
                               getattr(meshes[other], name).sharing().shard.ranks}) == sorted(axis.ranks)
                assert len({r // (shard * tp) for r in mine.ranks}) == 1
                assert {getattr(meshes[r], name).sharing().shard.rank for r in same.ranks} == {mine.rank}
                assert mine.ranks[mine.rank] == same.ranks[same.rank] == rank
    assert layouts > 40


@pytest.mark.parametrize("n, tp, ep, shard, words", [
    (8, 1, 1, 3, "shard 3 does not divide the 8 data-parallel ranks, dp * cp; try --shard 2"),
    (8, 2, 1, 16, "shard 16 does not divide the 4 data-parallel ranks, dp * cp; try --shard 4"),
    (12, 2, 4, 3, "ep 4 and the 6 ranks of a group, shard 3 * tp 2, do not divide each other; leave "
     "out --shard"),
    (6, 2, 3, 1, "ep 3 and the 2 ranks of a group, shard 1 * tp 2, do not divide each other; leave out "
     "--shard")])
def test_groups_that_do_not_fit_are_refused(n, tp, ep, shard, words):
    with pytest.raises(ValueError) as refused:
        check_ranks(n, tp, 1, ep, shard=shard)
    assert str(refused.value) == words


def test_a_shard_without_zero_is_refused():
    with pytest.raises(ValueError, match="--shard 2 is a group of --zero.*add --zero 1"):
        check(Config(shard=2))


# -----------------------------------------------------------------------------
# The numbers of one process

LAYOUTS = [  # family, ranks, sequences per step, layout; micro-batch 2
    ("llama", 4, 16, dict(zero=1, shard=2)), ("llama", 4, 16, dict(zero=2, shard=2)),
    ("gpt2", 4, 16, dict(zero=3, shard=2)), ("llama", 4, 16, dict(zero=3, shard=1)),
    ("gpt2", 4, 16, dict(tp=2, zero=1, shard=1)), ("llama", 4, 16, dict(cp=2, zero=2, shard=2)),
    ("gpt2", 4, 8, dict(pp=2, zero=1, shard=1)), ("gpt2", 8, 16, dict(pp=2, zero=1, shard=2)),
    ("gpt2", 8, 16, dict(pp=2, zero=2, shard=2)), ("llama", 8, 16, dict(pp=2, pp_chunks=2, zero=1, shard=2)),
    ("llama", 8, 16, dict(tp=2, cp=2, zero=3, shard=1)), ("llama", 8, 32, dict(cp=2, zero=3, shard=4)),
    ("llama", 8, 16, dict(tp=2, zero=3, shard=2)), ("dropless", 4, 16, dict(ep=2, zero=1, shard=2)),
    ("dropless", 4, 16, dict(ep=4, zero=2, shard=2)), ("capacity", 4, 8, dict(tp=2, ep=2, zero=3, shard=1)),
    ("dropless", 8, 16, dict(tp=2, ep=2, zero=3, shard=2)), ("sigmoid", 8, 16, dict(ep=2, zero=2, shard=4)),
    ("capacity", 8, 16, dict(cp=2, ep=4, zero=1, shard=2)),
    ("muon", 4, 16, dict(zero=1, shard=2)), ("muon", 4, 16, dict(zero=3, shard=2)),
    ("muon", 8, 16, dict(tp=2, zero=2, shard=2)), ("muon-moe", 4, 16, dict(ep=2, zero=2, shard=2)),
    ("muon-moe", 8, 16, dict(ep=2, zero=3, shard=2, recompute="full"))]
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "dropless": MOE, "capacity": CAPACITY, "sigmoid": SIGMOID,
            "muon": dict(LLAMA, optimizer="muon"), "muon-moe": dict(MOE, optimizer="muon")}
FAST = (0, 14)


@pytest.mark.parametrize("family, n, batch, layout", [
    pytest.param(*case, marks=[] if i in FAST else [pytest.mark.long],
                 id=f"{case}".replace(" ", "")) for i, case in enumerate(LAYOUTS)])
def test_a_layout_with_shards_equals_one_rank(family, n, batch, layout):
    compare(dict(FAMILIES[family], micro_batch=2), n, batch, **layout)


# -----------------------------------------------------------------------------
# Planted faults

def no_sum_over_replicas(original, axis, *args, **kwargs):
    return CompletedWork() if axis.name.endswith(".replicas") else original(axis, *args, **kwargs)


def slice_of_the_replica(original, bucket, rank, n):
    return original(bucket, bucket.replicas.rank % bucket.n_slices, n)


def another_seed(original, p, name, model, seed):
    """initial_weights that draws other weights in each group."""
    return original(p, name, model, seed + model.mesh.dp.shard_sharing.replicas.rank)


FAULTS = {  # name: (--zero, a fault as arguments of planted)
    "summed over the shard only": (1, "parallel.Axis.start_all_reduce", no_sum_over_replicas),
    "the slice of another rank": (1, "ddp.Bucket.slice_of_rank", slice_of_the_replica),
    "another seed per group, ZeRO-3": (3, "model.initial_weights", another_seed)}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_changes_the_numbers(name):
    zero, *fault = FAULTS[name]
    assert_caught(dict(LLAMA, micro_batch=2), (4, dict(zero=zero, shard=2)), fault, batch=16)


# -----------------------------------------------------------------------------
# Checkpoints, the start, the check of the replicas

READERS = [(4, dict(zero=2, shard=2)), (4, dict(zero=3, shard=1)), (1, {}), (4, dict(zero=1)),
           (2, dict(zero=3)), (4, dict(tp=2, zero=1, shard=1)), (4, dict(pp=2, zero=2, shard=1))]


def check_resume(family, writer, readers, folder):
    """Assert that each reader has the bits of the writer's state, and computes the next step."""
    base = dict(FAMILIES[family], global_batch=16, n_layer=2)
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
@pytest.mark.parametrize("family, writer", [("llama", READERS[1]), ("gpt2", READERS[5]), ("muon", READERS[0]),
                                            ("gpt2", READERS[6]), ("llama", READERS[2])])
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
    broadcast_and_verify(model)
    opt.masters_from_model()
    masters = [bucket.replicas.all_gather(whole(bucket.master)[None]) for bucket in data_parallel.buckets]
    return before, differences(), all(torch.equal(row, rows[0]) for rows in masters for row in rows)


def check_start(dtype, *faults):
    """Assert that the groups differ before a start, which is seen, and that they are equal after it."""
    for before, after, masters_equal in run_ranks(4, with_faults, faults, replicas_that_differ, dtype):
        assert any(line.startswith("wte.weight on ranks 2-3 differs") for line in before), before
        assert after == [] and masters_equal, "the groups differ after the start"


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
def test_groups_start_equal_and_are_compared(dtype):
    check_start(dtype)


def test_a_start_without_the_broadcast_is_seen():
    with pytest.raises(AssertionError, match="the groups differ after the start"):
        check_start("bf16", ("runtime.resume.broadcast_and_verify", nothing))


# -----------------------------------------------------------------------------
# Bytes between nodes, the planner

def test_the_share_of_the_bytes_that_leave_a_node():
    mesh = make_mesh(World(rank=0, size=8), shard=4, groups=False)
    shares = {name: share_between_nodes(mesh.axes()[name], lambda rank: rank // 4)
              for name in ("dp", "dp.shard", "dp.replicas", "ep")}
    assert shares == {"dp": 1 / 4, "dp.shard": 0, "dp.replicas": 1, "ep": 0}
    ep = Axis("ep", 1, 4, ranks=(0, 1, 2, 3))
    assert share_between_nodes(ep, lambda rank: rank // 2) == 2 / 3
    pp = Axis("pp", 1, 4, ranks=(0, 1, 2, 3))
    assert share_between_nodes(pp, lambda rank: rank // 2) == 1 / 2


def test_a_run_prints_what_leaves_its_node(capsys):
    """ZeRO-3 of two nodes of two ranks: the weights stay inside, and so do most of the bytes."""
    leaving = {}
    for shard in (0, 2):
        cfg = Config(zero=3, shard=shard, global_batch=64)
        mesh = make_mesh(World(rank=0, size=4), shard=shard, groups=False)
        sent = traffic(Rank(cfg, mesh, 256), 64)
        found = log.report_traffic(sent, sent, mesh, [0, 0, 1, 1])
        leaving[shard], _ = found["to other nodes"]
        assert bytes_between_nodes(mesh, sent, lambda rank: rank // 2) == leaving[shard]
        assert "\n  to other nodes" in capsys.readouterr().out
    assert 0 < leaving[2] < leaving[0] / 2
    assert "to other nodes" not in log.report_traffic(sent, sent, mesh, [0, 0, 0, 0])


def test_the_search_shares_within_a_node_where_there_are_several():
    cfg = plan_flags.PlanFlags(**dict(LLAMA, dtype="bf16", seq_len=64), micro_batch=2, global_batch=64)
    found = [(layout.zero, layout.shard, layout.tp) for layout in plan.layouts(cfg, 16, "h200")]
    assert {(1, 8, 1), (3, 8, 1), (2, 4, 2), (1, 0, 1)} <= {*found}
    assert all(zero for zero, shard, _ in found if shard)
    assert not any(layout.shard for layout in plan.layouts(cfg, 8, "h200"))
    everyone, groups = (plan.estimate(dataclasses.replace(cfg, zero=3, shard=shard), 16, "h200", 256)
                        for shard in (0, 8))
    assert groups["between_nodes_mb"] < everyone["between_nodes_mb"] / 2
    assert groups["memory_gib"]["optimizer"] == 2 * everyone["memory_gib"]["optimizer"]


def test_gpus_of_a_node_copy_within_a_shard():
    """Over two nodes ZeRO's messages go through NCCL; within a shard of one node they are copies."""
    cfg = Config(zero=1, dtype="bf16")
    for shard, copies in ((0, False), (8, True), (16, False)):
        mesh = make_mesh(World(size=32), shard=shard, groups=False)
        choice = choose(cfg, mesh, torch.device("cuda"), lambda mesh, axis, device: axis.size <= 8)
        assert choice.peer_copies == copies
        assert (choice.bucket_class(Bucket, mesh.dp, [torch.zeros(1)]) is PeerBucket) == copies


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

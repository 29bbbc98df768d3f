"""The mesh and its collectives: what each rank receives, the bytes that it counts as sent, which ranks form
each axis, and with --shard, which share and which are replicas.
"""
import dataclasses
import itertools
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pool import run_ranks
from test_layouts import LLAMA

import plan
from config import Config
from cost import plan_flags
from cost.traffic import share_between_nodes
from ddp import Bucket
from fast.buckets import PeerBucket
from fast.choose import choose, head_loss
from interface.layout import check_ranks
from ops import cross_entropy
from ops.cross_entropy import IGNORE
from parallel import MAX, Axis, all_to_all, gather_rows, make_mesh, scatter_rows
from runtime.launch import World
from zero import ShardedBucket

SEND = [[1, 2, 0], [3, 0, 2], [0, 1, 4]]  # rows from rank i to rank j
E, W = 8, 5  # bytes of an fp64, columns


def rows_of(rank, n):
    """Return (n, W) fp64, other numbers on each rank."""
    return (torch.arange(n * W, dtype=torch.float64) + 1000 * rank).view(n, W)


def every_collective(world):
    """Return {name: (what this rank received, {kind: bytes counted})}."""
    axis, r = world.axis, world.rank
    send, receive = SEND[r], [row[r] for row in SEND]

    def started(start, size, n):
        out = torch.empty(size, dtype=torch.float64)
        start(out, rows_of(r, n).flatten()).wait()
        return out

    def waited(x):
        axis.start_all_reduce(x).wait()
        return x

    def gradient(f, n, *more):
        x = rows_of(r, n).requires_grad_()
        (f(x, axis, *more) * (r + 1)).sum().backward()
        return x.grad
    calls = {
        "all_reduce": lambda: axis.all_reduce(rows_of(r, 4)),
        "max": lambda: axis.all_reduce(rows_of(r, 4), MAX),
        "start_all_reduce": lambda: waited(rows_of(r, 4)),
        "all_gather": lambda: axis.all_gather(rows_of(r, 2)),
        "start_all_gather": lambda: started(axis.start_all_gather, 3 * 2 * W, 2),
        "reduce_scatter": lambda: axis.reduce_scatter(rows_of(r, 6)),
        "start_reduce_scatter": lambda: started(axis.start_reduce_scatter, 2 * W, 6),
        "all_to_all": lambda: axis.all_to_all(rows_of(r, 3)),
        "uneven": lambda: axis.all_to_all(rows_of(r, sum(send)), send, receive),
        "broadcast": lambda: axis.broadcast(rows_of(r, 4), 1),
        "gather_rows": lambda: gradient(gather_rows, 2),
        "scatter_rows": lambda: gradient(scatter_rows, 3),
        "gradient uneven": lambda: gradient(all_to_all, sum(send), send, receive)}
    out = {}
    for name, call in calls.items():
        axis.sent.clear()
        out[name] = call().numpy(), {k: v for k, v in axis.sent.items() if v}
    return out


def test_what_each_collective_gives_and_counts():
    results = run_ranks(3, every_collective)
    whole = torch.stack([rows_of(r, 6) for r in range(3)])  # (rank, 6, W)
    row = W * E
    for r, got in enumerate(results):
        send, receive = SEND[r], [s[r] for s in SEND]
        four = whole[:, :4]
        uneven = [rows_of(j, sum(SEND[j])).split(SEND[j])[r] for j in range(3)]
        ring = {"all-gather": 2 / 3 * 6 * row, "reduce-scatter": 2 / 3 * 6 * row}
        # (what a rank receives, {kind: bytes}): of n ranks, each sends (n-1)/n of the whole tensor in a ring
        # all-gather or reduce-scatter, twice that in an all-reduce; in an all-to-all what it does not keep
        gathered, scattered = whole[:, :2].reshape(6, W), whole.sum(0)[2 * r:2 * r + 2]
        to_rank = torch.repeat_interleave(torch.tensor([1.0, 2, 3]), torch.tensor(send))
        want = {
            "all_reduce": (four.sum(0), {"all-reduce": 4 / 3 * 4 * row}),
            "max": (four.amax(0), {"all-reduce": 4 / 3 * 4 * row}),
            "start_all_reduce": (four.sum(0), {"all-reduce": 4 / 3 * 4 * row}),
            "all_gather": (gathered, {"all-gather": ring["all-gather"]}),
            "start_all_gather": (gathered.flatten(), {"all-gather": ring["all-gather"]}),
            "reduce_scatter": (scattered, {"reduce-scatter": ring["reduce-scatter"]}),
            "start_reduce_scatter": (scattered.flatten(), {"reduce-scatter": ring["reduce-scatter"]}),
            "all_to_all": (whole[:, r], {"all-to-all": 2 * row}),
            "uneven": (torch.cat(uneven), {"all-to-all": (sum(send) - send[r]) * row}),
            "broadcast": (four[1], {"broadcast": 4 * row} if r == 1 else {}),
            # Backward of gather_rows sums what all ranks did with a row; of scatter_rows, what its owner did
            "gather_rows": (torch.full((2, W), 6.0), ring),
            "scatter_rows": (torch.tensor([1.0, 2, 3])[:, None].expand(3, W),
                             {k: v / 2 for k, v in ring.items()}),
            "gradient uneven": (to_rank[:, None].expand(-1, W),
                                {"all-to-all": (sum(send) - send[r] + sum(receive) - receive[r]) * row})}
        assert got.keys() == want.keys()
        for name, (value, counted) in want.items():
            seen = torch.from_numpy(got[name][0])
            assert torch.equal(seen.double(), value.double()), f"rank {r}: {name}"
            assert got[name][1] == pytest.approx(counted), f"rank {r}: {name}"


def timeouts(world):
    """Return {name of an axis: how long its collectives may wait} of a mesh with every kind of group."""
    world = dataclasses.replace(world, timeout=timedelta(days=3))
    axes = make_mesh(world, tp=2, pp=2, shard=1).axes()
    cpu = torch.device("cpu")
    return {name: axis.group._get_backend(cpu).options._timeout for name, axis in axes.items()
            if axis.size > 1 and axis.size < world.size}


def test_no_group_ends_a_wait_before_the_watchdog_does():
    for found in run_ranks(8, timeouts):
        assert {"tp", "pp", "dp", "stage", "stage.replicas", "dp.replicas"} <= set(found)
        assert set(found.values()) == {timedelta(days=3)}


def test_over_one_rank_nothing_is_sent():
    axis, x = Axis("alone"), rows_of(0, 4)
    for same in (axis.all_reduce(x), axis.all_gather(x), axis.reduce_scatter(x), axis.all_to_all(x, [4], [4]),
                 axis.broadcast(x)):
        assert same is x
    axis.start_all_reduce(x).wait()
    assert sum(axis.sent.values()) == 0


def test_which_ranks_form_each_axis():
    """Rank order, slowest first: pp, dp, cp, tp; a stage's ranks are seen again as (edp, ep)."""
    mesh = make_mesh(World(rank=11, size=16), tp=2, pp=2, ep=4, groups=False)
    assert {name: axis.ranks for name, axis in vars(mesh).items()} == {
        "world": tuple(range(16)), "tp": (10, 11), "dp": (9, 11, 13, 15), "pp": (3, 11),
        "cp": (11,), "dpcp": (9, 11, 13, 15), "stage": tuple(range(8, 16)), "ep": (8, 9, 10, 11),
        "edp": (11, 15), "tied": (1, 3, 5, 7, 9, 11, 13, 15)}
    for name, axis in vars(mesh).items():
        assert (axis.name, axis.size, axis.ranks[axis.rank]) == (name, len(axis.ranks), 11)
    mesh = make_mesh(World(rank=11, size=16), tp=2, pp=2, ep=4, groups=False, cp=2)
    assert {name: axis.ranks for name, axis in vars(mesh).items()} == {
        "world": tuple(range(16)), "tp": (10, 11), "cp": (9, 11), "dp": (11, 15), "pp": (3, 11),
        "dpcp": (9, 11, 13, 15), "stage": tuple(range(8, 16)), "ep": (8, 9, 10, 11), "edp": (11, 15),
        "tied": (1, 3, 5, 7, 9, 11, 13, 15)}
    middle = make_mesh(World(rank=1, size=3), pp=3, groups=False)
    assert middle.tied.size == 1 and middle.pp.ranks == (0, 1, 2)


# -----------------------------------------------------------------------------
# Several nodes

@pytest.mark.parametrize("n, here", [(8, 4), (8, 2), (12, 6), (16, 8)])
def test_no_group_of_tp_or_ep_spans_nodes_unless_it_must(n, here):
    """Every layout of n ranks on nodes of `here`: groups that divide a node stay inside it."""
    layouts = 0
    for tp, pp, ep in itertools.product(range(1, n + 1), repeat=3):
        if n % (tp * pp) or (n // pp) % ep:
            continue
        layouts += 1
        for rank in range(n):
            mesh = make_mesh(World(rank=rank, size=n), tp, pp, ep, groups=False)
            for axis in (mesh.tp, mesh.ep):
                assert here % axis.size or len({r // here for r in axis.ranks}) == 1
    assert layouts > 20


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_segments_of_cp_ranks_are_the_sequence_and_equal_causal_work(cp):
    sequence = torch.arange(3 * 8 * cp).view(3, 8 * cp)
    own = [Axis("cp", rank, cp).own_segments(sequence, 1) for rank in range(cp)]
    assert torch.equal(torch.cat(own, 1).sort(1).values, sequence)
    positions = [Axis("cp", rank, cp).own_segments(torch.arange(8 * cp), 0) for rank in range(cp)]
    assert len({int((p + 1).sum()) for p in positions}) == 1, "pairs of a query and a key that it sees"
    assert cp == 1 or positions[1].tolist() == [4, 5, 6, 7, *range(8 * cp - 8, 8 * cp - 4)]
    for x, p in zip(own, positions, strict=True):
        assert torch.equal(x, sequence[:, p])


# -----------------------------------------------------------------------------
# Shares within groups

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
            check_ranks(n, tp, 1, ep, cp, shard=shard)
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
                    assert (mine, same.size, shard) == (axis, 1, n // tp), "all of dp x cp share"
                    continue
                assert sorted({r for other in same.ranks for r in
                               getattr(meshes[other], name).sharing().shard.ranks}) == sorted(axis.ranks)
                assert len({r // (shard * tp) for r in mine.ranks}) == 1
                assert {getattr(meshes[r], name).sharing().shard.rank for r in same.ranks} == {mine.rank}
                assert mine.ranks[mine.rank] == same.ranks[same.rank] == rank
    assert layouts > 40


@pytest.mark.parametrize("n, tp, ep, shard, words", [
    (8, 1, 1, 3, "by shard 3"), (8, 2, 1, 16, "by shard 16"), (12, 2, 4, 3, "leave out --shard")])
def test_groups_that_do_not_fit_are_refused(n, tp, ep, shard, words):
    with pytest.raises(ValueError, match=words):
        check_ranks(n, tp, 1, ep, shard=shard)


def test_the_share_of_the_bytes_that_leave_a_node():
    mesh = make_mesh(World(rank=0, size=8), shard=4, groups=False)
    shares = {name: share_between_nodes(mesh.axes()[name], lambda rank: rank // 4)
              for name in ("dp", "dp.shard", "dp.replicas", "ep")}
    assert shares == {"dp": 1 / 4, "dp.shard": 0, "dp.replicas": 1, "ep": 0}
    ep = Axis("ep", 1, 4, ranks=(0, 1, 2, 3))
    assert share_between_nodes(ep, lambda rank: rank // 2) == 2 / 3
    pp = Axis("pp", 1, 4, ranks=(0, 1, 2, 3))
    assert share_between_nodes(pp, lambda rank: rank // 2) == 1 / 2


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
        params = [mock.Mock(device=torch.device("cuda"))]
        assert (choice.bucket_class(Bucket, mesh.dp, params) is PeerBucket) == copies
        assert (choice.bucket_class(ShardedBucket, mesh.dp, params) is ShardedBucket) == (not copies)


# -----------------------------------------------------------------------------
# The head of GPUs, whose vocabulary is cut over tp

def head_of_a_share(world, x, w, bias, target, used):
    """Return the loss of GPUs in blocks of 1,024 rows, and the gradients of x, this rank's w and bias."""
    mesh = make_mesh(world, tp=world.size)
    own = [part.chunk(world.size)[world.rank].clone().requires_grad_() for part in (w, bias)]
    x = x.clone().requires_grad_()
    with mock.patch.object(cross_entropy, "LOGITS_BYTES", 1):
        loss = head_loss(mesh.tp)(x, own[0], target, used, own[1])
        with torch.no_grad():
            assert head_loss(mesh.tp)(x, own[0], target, used, own[1]) == loss
    return loss.item(), *torch.autograd.grad(loss / 3000, (x, *own))


@pytest.mark.parametrize("n, dtype, rel", [(1, torch.float64, 1e-12), (2, torch.float64, 1e-12),
                                           (1, torch.float16, 1e-2), (2, torch.float16, 1e-2)], ids=str)
def test_the_head_in_blocks_of_rows_is_torchs(n, dtype, rel):
    """Most targets are one token, so that in fp16 the sum of its gradients over the rows is out of range."""
    rng = torch.Generator().manual_seed(1)
    x, w, bias = (torch.randn(*shape, generator=rng).to(dtype) for shape in ((3000, 8), (128, 8), (128,)))
    x[:, 0], w[:, 0] = 100, 0
    target = torch.full((3000,), 7)
    target[::5] = torch.randint(0, 100, (600,), generator=rng)
    target[::3] = IGNORE
    wide = [part.double().requires_grad_() for part in (x, w, bias)]
    want = F.cross_entropy(F.linear(*wide)[:, :100], target, ignore_index=IGNORE, reduction="sum")
    results = run_ranks(n, head_of_a_share, x, w, bias, target, 100)
    by_x = sum(grad_x.double() for _, grad_x, *_ in results)
    cut = [torch.cat(parts).double() for parts in zip(*(rest for _, _, *rest in results), strict=True)]
    for loss, *_ in results:
        assert loss == pytest.approx(want.item(), rel=rel)
    for got, expected in zip((by_x, *cut), torch.autograd.grad(want / 3000, wide), strict=True):
        torch.testing.assert_close(got, expected, rtol=rel, atol=rel * expected.abs().max().item())

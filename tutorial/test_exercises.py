"""Are the exercises solved? One test per function, against nanoshard's own function if there is one.

    python -m pytest tutorial -k chapter_03                the test of chapter 3
    python -m pytest tutorial -k chapter_03 --solutions    the same test for solutions.py
"""
import itertools
import math
import random
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pool import ROOT, run_ranks

from config import Config
from corpus.chat import MARKERS, Template
from corpus.tokenizer import train_char
from ddp import Bucket, Comm, Contents
from parallel import Axis, make_mesh
from pipeline import schedule
from skip import spike
from zero import Slot, SlotBucket, SlotComm

sys.path.append(str(ROOT / "bench"))
import one_rule


def test_chapter_00(yours):
    fine = ["OK    torch      torch 2.13.0, imported in 1.9 s", "OK    disk       /FAIL: ext4, 84 GB free"]
    warned = [*fine, "WARN  data       none; fix: python prepare.py stdlib"]
    broken = [*warned, "FAIL  mpi        two MPIs; fix: one mpiexec", "OK    scheduler  not in a job"]
    assert yours.doctor_verdict(fine) == (0, [])
    assert yours.doctor_verdict(warned) == (0, ["python prepare.py stdlib"])
    assert yours.doctor_verdict(broken) == (1, ["python prepare.py stdlib", "one mpiexec"])


def test_chapter_01(yours):
    text = "to be, or not to be: that is the question\n" * 3 + "été"
    symbols, train, val = yours.char_tokens(text, 0.1)
    theirs = train_char([text])
    assert symbols == theirs.chars
    assert list(train) + list(val) == theirs.encode(text)
    assert len(train) == int(len(text) * 0.9)
    assert theirs.decode(val) == text[len(train):]


def test_chapter_02(yours):
    q, k, v = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    torch.testing.assert_close(yours.causal_attention(q, k, v), want)
    v[3:] += 100  # The later values change; the results before them must not.
    torch.testing.assert_close(yours.causal_attention(q, k, v)[:3], want[:3])


def all_reduce_bytes(world):
    """Return the bytes that this rank sent in an all-reduce of 1000 fp32 numbers, as train.py counts them."""
    axis = make_mesh(world).dp
    axis.all_reduce(torch.zeros(1000))
    return axis.sent["all-reduce"]


def test_chapter_03(yours):
    from collectives import FACTOR
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        for ranks in (1, 2, 8):
            got = yours.bus_bandwidth(kind, ranks, 4_194_304, 0.005)
            want = 4_194_304 / 0.005 * 1e-9 * FACTOR[kind](ranks)
            assert got == pytest.approx(want), (kind, ranks)
    sent = yours.bus_bandwidth("all-reduce", 4, 4000, 1e-9)  # GB/s are bytes per nanosecond.
    assert run_ranks(4, all_reduce_bytes) == [pytest.approx(sent)] * 4
    with pytest.raises(ValueError):
        yours.bus_bandwidth("gossip", 2, 1, 1)


ROWS = (5, 2, 1)  # of each rank, uneven like the rows of three experts


def gradient_of_rank(world, name):
    """Return global_gradient of this rank's rows. name: the module whose function is called."""
    import importlib
    module = importlib.import_module(name)
    x, y, w = regression()
    first = sum(ROWS[:world.rank])
    mine = slice(first, first + ROWS[world.rank])
    return module.global_gradient(x[mine], y[mine], w, sum(ROWS))


def regression():
    """Return x (rows, 4), y (rows,) and w (4,) with the rows of all ranks."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(ROWS), 4, dtype=torch.float64, generator=draw)
    y = torch.randn(sum(ROWS), dtype=torch.float64, generator=draw)
    return x, y, torch.ones(4, dtype=torch.float64, requires_grad=True)


def test_chapter_04(yours):
    x, y, w = regression()
    (x @ w - y).square().mean().backward()  # One process has all rows.
    for got in run_ranks(len(ROWS), gradient_of_rank, yours.__name__):
        torch.testing.assert_close(got, w.grad)


def test_chapter_05(yours):
    block = ("forward", 3.0, [("matmul", 1.0, []), ("rotate", 1.5, [])])
    tree = ("run", 10.0, [("train_step", 6.5, [block, ("backward", 3.0, [])]),
                          ("evaluate", 3.4, [("forward", 3.3, [("matmul", 3.2, [])])])])
    name, seconds = yours.hot_spot(tree)
    assert (name, seconds) == ("matmul", pytest.approx(4.2)), "matmul is called in two places: 1.0 + 3.2"
    assert yours.hot_spot(("run", 2.0, [("read", 0.5, [])])) == ("run", pytest.approx(1.5))


def test_chapter_06(yours):
    for n in (1, 300, 1024, 5000):
        for size in (2, 3, 4):
            for rank in range(size):
                p = torch.nn.Parameter(torch.zeros(n))
                contents = Contents("dp", True, ["w"], [p])
                bucket = Bucket(contents, Axis("dp", rank, size), zero=1, dtype=p.dtype, comm=Comm())
                assert yours.zero1_slice(n, rank, size) == bucket.own_slice, (n, rank, size)


N_EXPERTS = 8


def choices(rank):
    """Return the experts that the rows of a rank want.

    The higher the rank, the more its rows want the experts with low numbers. All rows of rank 2 want
    expert 0.
    """
    if rank == 2:
        return torch.zeros(4, dtype=torch.int64)
    draw = random.Random(rank)
    return torch.tensor([int(N_EXPERTS * draw.random() ** (rank + 1)) for _ in range(6 + rank)])


def row_splits_of_rank(world, name, ep):
    """Return row_splits of this rank's choices. name: the module whose function is called."""
    import importlib
    module = importlib.import_module(name)
    mesh = make_mesh(world, ep=ep)
    return module.row_splits(choices(world.rank), N_EXPERTS, mesh.ep)


def test_chapter_07(yours):
    for ep in (2, 4):
        got = run_ranks(4, row_splits_of_rank, yours.__name__, ep)
        for rank, (send, receive) in enumerate(got):
            first = rank // ep * ep
            group = range(first, first + ep)  # the ranks of its ep group
            owners = (choices(rank) // (N_EXPERTS // ep)).tolist()
            sent_to_it = [got[other][0][rank % ep] for other in group]
            assert list(send) == [owners.count(i) for i in range(ep)], f"rank {rank} of ep {ep}"
            assert list(receive) == sent_to_it, f"rank {rank} of ep {ep}"


def test_chapter_08(yours):
    draw = random.Random(0)
    calm = [2.0 + draw.gauss(0, 0.05) for _ in range(128)]
    shaken = [*calm[:120], *[1000.0] * 8]  # With a mean, the 8 outliers would hide a spike.
    for past in (calm, shaken, [2.0] * 128):
        for value in (1.0, 2.0, 2.005, 2.2, 2.35, 2.6, 5.0, math.inf):
            want = spike([(x, 1.0) for x in past], value, 1.0, 6.0) is not None
            assert yours.is_spike(past, value, 6.0) == want, (value, past[-1])


def test_chapter_09(yours):
    cases = [(0, 0, 400, "done"), (0, 400, 400, "done"), (85, 0, 120, "requeue"), (85, 120, 121, "requeue"),
             (85, 120, 120, "look"), (85, 0, 0, "look")]
    cases += [(code, 0, 100, "look") for code in (1, 2, 42, 43, 44)]
    for code, before, after, word in cases:
        assert yours.after_job(code, before, after) == word, (code, before, after)


def test_chapter_10(yours):
    def rows(*speeds):
        steps = [1, *range(10, 10 * len(speeds), 10)]
        return [{"step": step, "tok_s": speed} for step, speed in zip(steps, speeds, strict=True)]

    # Step 1 is slow. In the last step another program used the machine.
    one = rows(5, 100, 90, 110, 100, 1)
    assert yours.efficiency({1: one}) == {1: 1.0}
    assert yours.efficiency({2: rows(10, 160, 160), 1: one}) == {1: 1.0, 2: pytest.approx(0.8)}
    got = yours.efficiency({4: rows(1, 400, 400, 380), 8: rows(1, 900, 720, 720, 720)})
    assert got == {4: 1.0, 8: pytest.approx(720 / 8 / (390 / 4))}


def test_chapter_11(yours):
    for rank, on_node, visible, gpu in (
            (0, 4, "0,1,2,3", "0"), (3, 4, "0,1,2,3", "3"), (5, 4, "0,1,2,3", "1"), (5, 4, "3,2,1,0", "2"),
            (5, 4, "1", "1"), (7, 4, "2,0", "0"), (3, 2, "0,1,2,3", "1"),
            (6, 4, "GPU-a,GPU-b,MIG-c", "MIG-c")):
        assert yours.gpu_of_rank(rank, on_node, visible) == gpu, (rank, on_node, visible)


def test_chapter_12_is_better(yours):
    before = [2.30, 2.20, 2.25]  # three seeds, which differ more than the change helps
    assert yours.is_better(before, [x - 0.01 for x in before])
    assert yours.is_better(before, [2.28, 2.19, 2.235])
    assert not yours.is_better(before, before)
    assert not yours.is_better(before, [x + 0.01 for x in before])
    assert not yours.is_better(before, [2.20, 2.21, 2.26]), "better with one seed, worse with two"


MESHES = [dict(tp=2), dict(tp=2, cp=2), dict(tp=2, ep=4, n_experts=4)]  # of 8 ranks
OUTSIDE = {"dp", "cp"}  # along these, the rows of every activation differ; between the blocks, along tp too
LAYERS = {  # weight: (along which axes the input differs, along which the gradient of the output, cut over)
    "attn.wq.weight": (OUTSIDE, OUTSIDE | {"tp"}, {"tp"}),
    "attn.wo.weight": (OUTSIDE | {"tp"}, OUTSIDE, {"tp"}),
    "norm1.weight": (OUTSIDE | {"tp"}, OUTSIDE | {"tp"}, set()),
    "moe.router.weight": (OUTSIDE | {"tp"}, OUTSIDE | {"tp"}, set()),
}


def test_chapter_12_axes_to_sum(yours):
    for flags in MESHES:
        cfg = Config(n_layer=1, n_embd=16, ffn_hidden=16, seq_len=8, vocab_size=100, micro_batch=2, **flags)
        cfg = replace(cfg, global_batch=2 * 8 // (cfg.tp * cfg.cp))
        mesh = one_rule.mesh_of(cfg, 8, 0)
        digits = one_rule.Digits(mesh)
        for row in one_rule.derive(cfg, 8).rows:
            name = row.name.removeprefix("blocks.0.")
            if name in LAYERS:
                asked = yours.axes_to_sum(*map(set, LAYERS[name]))
                bits = sum(digits.bits(getattr(mesh, axis)) for axis in asked)
                assert bits == digits.bits(getattr(mesh, row.follows)), (flags, name, asked)


SLOT = 256  # elements of the slot
SHAPES = [(20, 8), (40,)], [(31, 8), (8,)]  # of two buckets: the first has 56 elements of padding


def gradients(rank, bucket, micro_batch):
    """Return one rank's gradients of one micro-batch."""
    draw = torch.Generator().manual_seed(100 * rank + 10 * bucket + micro_batch)
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in SHAPES[bucket]]


def slices_of_rank(world, name):
    """Return [(total of reduce_in_slot, total of zero.SlotBucket)] of three buckets that share one slot.

    Bucket 0, bucket 1 and bucket 0 again go through the slot with two micro-batches each. name: the module
    whose reduce_in_slot is called.
    """
    import importlib
    module = importlib.import_module(name)
    axis = make_mesh(world).dp
    totals = []
    slot = torch.zeros(SLOT, dtype=torch.float64)
    shared = Slot(SLOT, torch.float64, "cpu")
    for number in (0, 1, 0):
        total = torch.full((SLOT // axis.size,), 7.0, dtype=torch.float64)  # 7.0 is an old number.
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients(0, number, 0)]
        contents = Contents("dp", True, ["a", "b"], params)
        theirs = SlotBucket(contents, axis, 2, torch.float64, SlotComm(shared))
        for micro_batch in range(2):
            grads = gradients(world.rank, number, micro_batch)
            module.reduce_in_slot(axis, grads, slot, total, micro_batch == 0)
            for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
                p.grad = grad
                theirs.on_grad_ready(i, micro_batch == 1)
        theirs.wait_grads()
        totals.append((total, theirs.grad_total.clone()))
    return totals


def test_chapter_13_reduce_in_slot(yours):
    got = run_ranks(2, slices_of_rank, yours.__name__)
    for i, number in enumerate((0, 1, 0)):
        whole = torch.zeros(SLOT, dtype=torch.float64)
        for rank, micro_batch in itertools.product(range(2), range(2)):
            flat = torch.cat([grad.flatten() for grad in gradients(rank, number, micro_batch)])
            whole[:len(flat)] += flat
        for rank, part in enumerate(whole.chunk(2)):
            mine, theirs = got[rank][i]
            torch.testing.assert_close(theirs, part)
            torch.testing.assert_close(mine, part, msg=lambda text, i=i: f"bucket {i} of three: {text}")


def test_chapter_13_interleaved_order(yours):
    got = [f"{kind}{i}{'ab'[chunk]}" for kind, i, chunk in yours.interleaved_order(1, 2, 2, 4)]
    assert " ".join(got) == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    for p, v, groups in itertools.product((2, 3, 4), (2, 3), (1, 2)):
        for rank in range(p):
            got = yours.interleaved_order(rank, p, v, groups * p)
            assert got == schedule(rank, p, v, groups * p), f"rank {rank} of {p}, v {v}, m {groups * p}"


def test_chapter_13_zigzag(yours):
    for T, cp in ((16, 1), (16, 2), (48, 3), (64, 4)):
        held = [yours.zigzag(T, cp, rank) for rank in range(cp)]
        assert sorted(sum(held, [])) == list(range(T)), (T, cp)
        assert len({sum(t + 1 for t in positions) for positions in held}) == 1, "unequal numbers of pairs"
        for rank, positions in enumerate(held):
            assert positions == Axis("cp", rank, cp).own_segments(torch.arange(T), 0).tolist(), (T, cp, rank)


def test_chapter_13_keys_end(yours):
    assert yours.keys_end(16, 2, 0) == [4, 16]
    assert yours.keys_end(16, 2, 1) == [8, 12]
    for T, cp in ((16, 1), (48, 3), (64, 4)):
        for rank in range(cp):
            segments = Axis("cp", rank, cp).own_segments(torch.arange(T), 0).chunk(2)
            assert yours.keys_end(T, cp, rank) == [c[-1].item() + 1 for c in segments], (T, cp, rank)


def test_chapter_14_answer_mask(yours):
    vocab = train_char(["abc"]).with_special(MARKERS)
    template = Template(vocab)
    ids = vocab.special
    for said in ("user assistant", "system user assistant user assistant", "assistant", "assistant user"):
        messages = [{"role": role, "content": "abc"[:i % 4]} for i, role in enumerate(said.split())]
        tokens, trained = template.conversation(messages)
        mask = yours.answer_mask(tokens, ids["<|assistant|>"], ids["<|end|>"])
        assert [int(m) for m in mask] == trained, vocab.decode(tokens)

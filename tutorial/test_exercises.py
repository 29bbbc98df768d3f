"""Are the exercises solved? One test per function, against nanoshard's own function if there is one.

    python -m pytest tutorial -k chapter_03                the test of chapter 3
    python -m pytest tutorial -k chapter_03 --solutions    the same test for solutions.py

If your answers are those of a usual mistake, the test says which one it is (grader.py).
"""
import contextlib
import functools
import itertools
import math
import random
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from pool import ROOT, run_ranks

from config import Config
from corpus.chat import MARKERS, Template
from corpus.tokenizer import train_char
from ddp import Bucket
from parallel import Axis, make_mesh
from pipeline import schedule
from plan import check_gpus
from skip import spike_reason
from tutorial import solutions
from tutorial.grader import check, grade
from zero import Slot, SlotBucket

sys.path.append(str(ROOT / "bench"))
from collectives import FACTOR

ranks_once = functools.cache(run_ranks)  # for what does not depend on your function


def test_chapter_00(yours):
    fine = ["OK    torch      torch 2.13.0, imported in 1.9 s", "OK    disk       /FAIL: ext4, 84 GB free"]
    warned = [*fine, "WARN  data       none; fix: python prepare.py stdlib"]
    broken = [*warned, "FAIL  mpi        two MPIs; fix: one mpiexec", "OK    scheduler  not in a job"]
    twice = [*broken, "FAIL  device     none; fix: a driver"]
    check(yours, "doctor_verdict", [
        ([fine], (0, [])), ([warned], (0, ["python prepare.py stdlib"])),
        ([broken], (1, ["python prepare.py stdlib", "one mpiexec"])),
        ([twice], (1, ["python prepare.py stdlib", "one mpiexec", "a driver"]))])


def test_chapter_01(yours):
    text = "to be, or not to be: that is the question\n" * 3 + "été"
    theirs = train_char([text])
    cases = []
    for val_fraction in (0.1, 0.25):
        ids = theirs.encode(text)
        cut = int(len(text) * (1 - val_fraction))
        cases.append(((text, val_fraction), (theirs.chars, ids[:cut], ids[cut:])))
    check(yours, "char_tokens", cases)


def test_chapter_02(yours):
    q, k, v = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    later = v + 100 * (torch.arange(5) > 2)[:, None]  # They do not change the results before them.
    cases = []
    for values in (v, later):
        want = F.scaled_dot_product_attention(q[None], k[None], values[None], is_causal=True)[0]
        cases.append(((q, k, values), want))
    check(yours, "causal_attention", cases)


def all_reduce_bytes(world):
    """Return the bytes that this rank sent in an all-reduce of 1000 fp32 numbers, as train.py counts them."""
    axis = make_mesh(world).dp
    axis.all_reduce(torch.zeros(1000))
    return axis.sent["all-reduce"]


def test_chapter_03(yours):
    cases = []
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        for ranks in (1, 2, 8):
            want = 4_194_304 / 0.005 * 1e-9 * FACTOR[kind](ranks)
            cases.append(((kind, ranks, 4_194_304, 0.005), want))
    (sent,) = set(ranks_once(4, all_reduce_bytes))
    cases.append((("all-reduce", 4, 4000, 1e-9), float(sent)))  # GB/s are bytes per nanosecond.
    cases.append((("gossip", 2, 1, 1), ValueError()))
    check(yours, "bus_bandwidth", cases)


ROWS = (5, 2, 1)  # of each rank, uneven like the rows of three experts


def gradient_of_rank(world, function):
    """Return global_gradient of this rank's rows. function: the one that is tested."""
    x, y, w = regression()
    first = sum(ROWS[:world.rank])
    mine = slice(first, first + ROWS[world.rank])
    return function(x[mine], y[mine], w, sum(ROWS)).detach()


def gradients(function):
    return run_ranks(len(ROWS), gradient_of_rank, function)


def regression():
    """Return x (rows, 4), y (rows,) and w (4,) with the rows of all ranks."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(ROWS), 4, dtype=torch.float64, generator=draw)
    y = torch.randn(sum(ROWS), dtype=torch.float64, generator=draw)
    return x, y, torch.ones(4, dtype=torch.float64, requires_grad=True)


def test_chapter_04(yours):
    x, y, w = regression()
    (x @ w - y).square().mean().backward()  # One process has all rows.
    asked = [f"global_gradient on rank {rank}, which has {n} rows," for rank, n in enumerate(ROWS)]
    grade(yours, "global_gradient", gradients, asked, [w.grad] * len(ROWS))


def test_chapter_05(yours):
    block = ("forward", 3.0, [("matmul", 1.0, []), ("rotate", 1.5, [])])
    tree = ("run", 10.0, [("train_step", 6.5, [block, ("backward", 3.0, [])]),
                          ("evaluate", 3.4, [("forward", 3.3, [("matmul", 3.2, [])])])])
    check(yours, "hot_spot", [([tree], ("matmul", 4.2)),  # It is called in two places: 1.0 + 3.2.
                              ([("run", 2.0, [("read", 0.5, [])])], ("run", 1.5))])


def test_chapter_06(yours):
    cases = []
    for n, size in itertools.product((1, 300, 1024, 5000), (2, 3, 4)):
        for rank in range(size):
            p = torch.nn.Parameter(torch.zeros(n))
            bucket = Bucket([("w", p)], Axis("dp", rank, size), zero=1)
            cases.append(((n, rank, size), bucket.own_slice))
    check(yours, "zero1_slice", cases)


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


def row_splits_of_rank(world, function):
    """Return row_splits of this rank's choices, with ep 2 and with ep 4. function: the one that is tested."""
    meshes = [make_mesh(world, ep=ep) for ep in (2, 4)]
    return [function(choices(world.rank), N_EXPERTS, mesh.ep) for mesh in meshes]


def splits(function):
    """Return the rows to send and to receive of 4 ranks with ep 2, then with ep 4."""
    of_ranks = run_ranks(4, row_splits_of_rank, function)
    return [got[i] for i in range(2) for got in of_ranks]


def test_chapter_07(yours):
    asked = []
    right = []
    for ep in (2, 4):
        wanted = []  # of each rank: the rows for each rank of its ep group
        for rank in range(4):
            owners = (choices(rank) // (N_EXPERTS // ep)).tolist()
            wanted.append([owners.count(i) for i in range(ep)])
        for rank in range(4):
            first = rank // ep * ep
            right.append((wanted[rank], [wanted[other][rank % ep] for other in range(first, first + ep)]))
            asked.append(f"row_splits on rank {rank} of 4, with ep {ep},")
    grade(yours, "row_splits", splits, asked, right)


def test_chapter_08(yours):
    draw = random.Random(0)
    calm = [2.0 + draw.gauss(0, 0.05) for _ in range(128)]
    shaken = [*calm[:120], *[1000.0] * 8]  # With a mean, the 8 outliers would hide a spike.
    cases = []
    for past in (calm, shaken, [2.0] * 128):
        for value in (1.0, 2.0, 2.005, 2.015, 2.2, 2.23, 2.29, 2.325, 2.37, 2.6, 5.0, math.inf):
            is_spike = spike_reason([(x, 1.0) for x in past], value, 1.0, 6.0) is not None
            cases.append(((past, value, 6.0), is_spike))
    check(yours, "is_spike", cases)


def test_chapter_09(yours):
    cases = [((0, 0, 400), "done"), ((0, 400, 400), "done"), ((85, 0, 120), "requeue"),
             ((85, 120, 121), "requeue"), ((85, 120, 120), "look"), ((85, 0, 0), "look"),
             ((85, 120, 100), "look")]
    cases += [((code, 0, 100), "look") for code in (1, 2, 42, 43, 44)]
    check(yours, "after_job", cases)


def test_chapter_10(yours):
    def rows(*speeds):
        steps = [1, *range(10, 10 * len(speeds), 10)]
        return [{"step": step, "tok_s": speed} for step, speed in zip(steps, speeds, strict=True)]

    # Step 1 is slow. In the last step another program used the machine.
    one = rows(5, 100, 90, 110, 100, 1)
    fast = rows(1, 400, 400, 380)
    faster = rows(1, 900, 720, 720, 720)
    check(yours, "efficiency", [
        ([{1: one}], {1: 1.0}), ([{2: rows(10, 160, 160), 1: one}], {1: 1.0, 2: 0.8}),
        ([{4: fast, 8: faster}], {4: 1.0, 8: 720 / 8 / (390 / 4)}),
        ([{1: rows(1, 50, 90, 100, 104), 2: rows(1, 180, 180)}], {1: 1.0, 2: 90 / 102})])


def test_chapter_11(yours):
    check(yours, "gpu_of_rank", [
        ((0, 4, "0,1,2,3"), "0"), ((3, 4, "0,1,2,3"), "3"), ((5, 4, "0,1,2,3"), "1"),
        ((5, 4, "3,2,1,0"), "2"), ((5, 4, "1"), "1"), ((7, 4, "2,0"), "0"), ((6, 4, "2,0"), "2"),
        ((3, 2, "0,1,2,3"), "1"), ((6, 4, "GPU-a,GPU-b,MIG-c"), "MIG-c")])


def test_chapter_12(yours):
    before = [2.30, 2.20, 2.25]  # three seeds, which differ more than the change helps

    def after(*gains):
        return [loss - gain for loss, gain in zip(before, gains, strict=True)]

    better = [after(0.01, 0.01, 0.01), after(0.02, 0.01, 0.015), after(0.1, 0.1, 0.11),
              after(0.02, 0.03, 0.08)]
    others = [before, after(-0.01, -0.01, -0.01), after(0.1, -0.01, -0.01), after(0.01, 0.01, 0.05),
              after(0.001, 0.001, 0.05)]
    cases = [((before, losses), True) for losses in better]
    cases += [((before, losses), False) for losses in others]
    five = [2.30, 2.20, 2.25, 2.28, 2.22]
    cases += [((five, [2.20, 2.10, 2.15, 2.18, 2.221]), True)]  # one of five seeds loses a little
    check(yours, "is_better", cases)


SLOT = 256  # elements of the slot
SHAPES = [(20, 8), (40,)], [(31, 8), (8,)]  # of two buckets: the first has 56 elements of padding


def grads_of(rank, bucket, micro_batch):
    """Return one rank's gradients of one micro-batch."""
    draw = torch.Generator().manual_seed(100 * rank + 10 * bucket + micro_batch)
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in SHAPES[bucket]]


def slices_of_rank(world, function):
    """Return [(total of function, total of zero.SlotBucket)] of three buckets that share one slot.

    Bucket 0, bucket 1 and bucket 0 again go through the slot with two micro-batches each.
    """
    axis = make_mesh(world).dp
    totals = []
    slot = torch.zeros(SLOT, dtype=torch.float64)
    shared = Slot(SLOT, slot, axis)
    for number in (0, 1, 0):
        total = torch.full((SLOT // axis.size,), 7.0, dtype=torch.float64)  # 7.0 is an old number.
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads_of(0, number, 0)]
        theirs = SlotBucket(list(zip("ab", params, strict=True)), axis, 2)
        theirs.use(shared)
        for micro_batch in range(2):
            grads = grads_of(world.rank, number, micro_batch)
            function(axis, grads, slot, total, micro_batch == 0)
            for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
                p.grad = grad
                theirs.pending -= micro_batch == 1
                theirs.take(i)
        theirs.wait_sum()
        totals.append((total, theirs.grad_total.clone()))
    return totals


def totals(function):
    """Return the totals of 2 ranks and 3 buckets. function: the reduce_in_slot that is tested."""
    return [mine for rank in run_ranks(2, slices_of_rank, function) for mine, _ in rank]


def test_chapter_13_reduce_in_slot(yours):
    asked = []
    right = []
    for rank, buckets in enumerate(ranks_once(2, slices_of_rank, solutions.reduce_in_slot)):
        for i, (_, theirs) in enumerate(buckets):
            asked.append(f"reduce_in_slot on rank {rank}, with bucket {i} of three,")
            right.append(theirs)
    for i, number in enumerate((0, 1, 0)):
        whole = torch.zeros(SLOT, dtype=torch.float64)
        for rank, micro_batch in itertools.product(range(2), range(2)):
            flat = torch.cat([grad.flatten() for grad in grads_of(rank, number, micro_batch)])
            whole[:len(flat)] += flat
        for rank, part in enumerate(whole.chunk(2)):
            torch.testing.assert_close(right[3 * rank + i], part)
    grade(yours, "reduce_in_slot", totals, asked, right)


def test_chapter_13_interleaved_order(yours):
    cases = []
    for p, v, groups in [(2, 2, 2), *itertools.product((2, 3, 4), (2, 3), (1, 2))]:
        for rank in range(p):
            cases.append(((rank, p, v, groups * p), schedule(rank, p, v, groups * p)))
    got = " ".join(f"{kind}{i}{'ab'[chunk]}" for kind, i, chunk in cases[1][1])  # rank 1 of 2
    assert got == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    check(yours, "interleaved_order", cases)


def test_chapter_13_zigzag(yours):
    cases = []
    for T, cp in ((16, 1), (16, 2), (48, 3), (64, 4)):
        for rank in range(cp):
            positions = Axis("cp", rank, cp).own_segments(torch.arange(T), 0).tolist()
            assert 2 * sum(t + 1 for t in positions) * cp == T * (T + 1), "unequal numbers of pairs"
            cases.append(((T, cp, rank), positions))
    check(yours, "zigzag", cases)


def test_chapter_13_keys_end(yours):
    cases = [((16, 2, 0), [4, 16]), ((16, 2, 1), [8, 12])]
    for T, cp in ((16, 1), (48, 3), (64, 4)):
        for rank in range(cp):
            segments = Axis("cp", rank, cp).own_segments(torch.arange(T), 0).chunk(2)
            cases.append(((T, cp, rank), [c[-1].item() + 1 for c in segments]))
    check(yours, "keys_end", cases)


def test_chapter_14_answer_mask(yours):
    vocab = train_char(["abc"]).with_special(MARKERS)
    template = Template(vocab)
    ids = vocab.special
    cases = []
    for said in ("user assistant", "system user assistant user assistant", "assistant", "assistant user"):
        messages = [{"role": role, "content": "abc"[:i % 4]} for i, role in enumerate(said.split())]
        tokens, trained = template.conversation(messages)
        cases.append(((tokens, ids["<|assistant|>"], ids["<|end|>"]), [bool(m) for m in trained]))
    check(yours, "answer_mask", cases)


def test_chapter_15_training_days(yours):
    check(yours, "training_days", [((1e9, 86_400e9, 400, 500), 30.0), ((7e9, 140e9, 8, 350), 2.1e6 / 86_400)])


@functools.cache
def possible_layouts(gpus, per_node, heads, blocks, batch):
    """Return [(dp, tp, pp)] that plan.py would accept, with tp inside a node."""
    cfg = Config(n_layer=blocks, n_head=heads, n_embd=16 * heads, ffn_hidden=1024, micro_batch=1,
                 global_batch=batch)
    found = []
    for tp, pp in itertools.product(range(1, per_node + 1), range(1, gpus + 1)):
        if gpus % (tp * pp) == 0 and per_node % tp == 0:
            with contextlib.suppress(ValueError):
                _, mesh = check_gpus(replace(cfg, tp=tp, pp=pp), gpus)
                found.append((mesh.dp.size, tp, pp))
    return found


def test_chapter_15_layouts(yours):
    """Of (GPUs, GPUs of a node, heads, blocks, sequences of a step)."""
    asked = (400, 8, 112, 70, 2048), (384, 8, 112, 70, 2048), (400, 4, 12, 12, 800), (8, 8, 4, 4, 16)
    check(yours, "layouts", [(arguments, possible_layouts(*arguments)) for arguments in asked])

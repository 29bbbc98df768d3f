"""Every collective that training uses, written by hand from send and receive, beside the library's.

    1) by hand      each in a few lines, with a drawing of which rank sends what
    2) the mesh     which ranks form a group along each axis; every group sums its rank ids
    3) measure      both versions against the exact answer; time, algbw and busbw by message size

mpiexec -n 4 python bench/collectives.py --tp 2     (torchrun and srun: the same)

All of them work along one axis of the mesh: n = axis.size ranks, this one is r = axis.rank. Ranks in an axis
count from 0; axis.ranks[r] is the number of rank r in the world. Tensors are flat, inputs may be overwritten.
algbw = bytes / time. busbw = algbw * FACTOR is comparable with the speed of one link for any number of ranks
(github.com/NVIDIA/nccl-tests: doc/PERFORMANCE.md, for scatter src/scatter.cu).
"""
import functools
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from common import gather_objects, read_flags, start
from runtime.launch import launch, shutdown

import torch
import torch.distributed as dist
from timing import slowest

from config import Outcome, ceil_div
from parallel import all_gather_single, make_mesh, reduce_scatter_single

AXES = ("world", "dp", "tp", "cp", "pp", "ep", "edp", "stage")


# -----------------------------------------------------------------------------
# 1) by hand

def exchange(axis, sends=(), receives=()):
    """Send and receive tensors in one batch, which cannot deadlock. The collectives below use nothing else.

    sends: (to, tensor), receives: (from, tensor), in ranks of the axis.
    """
    ops = [dist.P2POp(dist.isend, t, axis.ranks[rank], axis.group) for rank, t in sends]
    ops += [dist.P2POp(dist.irecv, t, axis.ranks[rank], axis.group) for rank, t in receives]
    for work in dist.batch_isend_irecv(ops) if ops else ():  # one message per pair, over the axis
        work.wait()


def reduce_scatter(x, axis):
    """(S,) -> (S/n,): the sum of all ranks' part r.

    n sums travel around the ring at once and grow on the way, in n-1 steps of S/n each. This is the sum that
    ends at rank 2 of 3:     0 --[x0]--> 1 --[x0+x1]--> 2 adds x2
    """
    n, r = axis.size, axis.rank
    parts = x.tensor_split(n)
    total = parts[(r - 1) % n]  # the left neighbour's sum, which has the longest way: n-1 steps
    for step in range(2, n + 1):
        own = parts[(r - step) % n]
        received = torch.empty_like(own)
        exchange(axis, [((r + 1) % n, total)], [((r - 1) % n, received)])
        total = received.add_(own)
    return total


def pass_around(blocks, axis):
    """Fill all blocks of a rank that has blocks[r], in n-1 steps around the ring.

    0 --[b0]--> 1 --[b0]--> 2 --[b0]--> 3
    """
    n, r = axis.size, axis.rank
    for step in range(n - 1):
        exchange(axis, [((r + 1) % n, blocks[(r - step) % n])], [((r - 1) % n, blocks[(r - step - 1) % n])])


def all_gather(x, axis):
    """(m,) -> (n*m,): the blocks of all ranks, by rank."""
    out = x.new_empty(axis.size * x.numel())
    blocks = out.chunk(axis.size)
    blocks[axis.rank].copy_(x)
    pass_around(blocks, axis)
    return out


def all_reduce(x, axis):
    """(S,) -> (S,): each rank sums one part, then the ring passes the parts on, in 2 (n-1) steps of S/n."""
    blocks = x.tensor_split(axis.size)  # S need not divide by n
    blocks[axis.rank].copy_(reduce_scatter(x, axis))
    pass_around(blocks, axis)
    return x


def tree(axis, root):
    """Return the log2(n) rounds of a binomial tree: [(partner, whether this rank is nearer the root)].

    0 -> 1;     0 -> 2, 1 -> 3;     0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7;     ...
    """
    n = axis.size
    v = (axis.rank - root) % n  # the rank, counted from the root
    rounds = []
    for have in (1 << k for k in range((n - 1).bit_length())):  # n=5: 1, 2, 4 ranks have the data
        if v < have and v + have < n:
            rounds.append(((v + have + root) % n, True))
        elif have <= v < 2 * have:
            rounds.append(((v - have + root) % n, False))
    return rounds


def broadcast(x, axis, root=0):
    """(S,) of the root -> (S,) on all ranks: a rank that has the data sends it on, down the tree."""
    for partner, nearer in tree(axis, root):
        if nearer:
            exchange(axis, sends=[(partner, x)])
        else:
            exchange(axis, receives=[(partner, x)])
    return x


def reduce(x, axis, root=0):
    """(S,) on all ranks -> their sum at the root, up the tree. The other ranks end with partial sums."""
    for partner, nearer in reversed(tree(axis, root)):
        if nearer:
            received = torch.empty_like(x)
            exchange(axis, receives=[(partner, received)])
            x.add_(received)
        else:
            exchange(axis, sends=[(partner, x)])
    return x


def scatter(x, axis, root=0):
    """(S,) of the root -> (S/n,): part r goes to rank r.     root --[part 0]--> 0, --[part 1]--> 1, ..."""
    parts = x.chunk(axis.size)
    if axis.rank == root:
        exchange(axis, sends=[(to, parts[to]) for to in range(axis.size) if to != root])
        return parts[root]
    out = torch.empty_like(parts[axis.rank])
    exchange(axis, receives=[(root, out)])
    return out


def all_to_all(x, axis):
    """(S,) -> (S,): block j of rank i becomes block i of rank j, a transpose. All messages go at once.

        rank 0 [a0 a1 a2]           rank 0 [a0 b0 c0]
        rank 1 [b0 b1 b2]    -->    rank 1 [a1 b1 c1]
        rank 2 [c0 c1 c2]           rank 2 [a2 b2 c2]
    """
    out = torch.empty_like(x)
    source, target = x.chunk(axis.size), out.chunk(axis.size)
    target[axis.rank].copy_(source[axis.rank])
    others = [(axis.rank + d) % axis.size for d in range(1, axis.size)]  # not all to rank 0 first
    exchange(axis, [(j, source[j]) for j in others], [(j, target[j]) for j in others])
    return out


HAND = {"all-reduce": all_reduce, "reduce": reduce, "broadcast": broadcast, "all-gather": all_gather,
        "reduce-scatter": reduce_scatter, "scatter": scatter, "all-to-all": all_to_all}
FACTOR = {"all-reduce": lambda n: 2 * (n - 1) / n, "reduce": lambda n: 1, "broadcast": lambda n: 1,
          **dict.fromkeys(("all-gather", "reduce-scatter", "scatter", "all-to-all"), lambda n: (n - 1) / n)}


def library(name, x, axis, root=0):
    """Return the output of the same collective of torch.distributed, where roots are ranks of the world."""
    n, group = axis.size, axis.group
    src = axis.ranks[root]
    length = {"all-gather": x.numel() * n, "reduce-scatter": x.numel() // n, "scatter": x.numel() // n}
    out = x if name in ("all-reduce", "reduce", "broadcast") else x.new_empty(length.get(name, x.numel()))
    parts = list(x.chunk(n)) if name == "scatter" and axis.rank == root else None
    {"all-reduce": lambda: dist.all_reduce(x, group=group),  # SUM, S to all; all seven over the axis
     "reduce": lambda: dist.reduce(x, src, group=group),  # SUM, S to the root
     "broadcast": lambda: dist.broadcast(x, src, group=group),  # S from the root to all
     "all-gather": lambda: all_gather_single(out, x, group=group),  # S/n from each to all
     "reduce-scatter": lambda: reduce_scatter_single(out, x, group=group),  # SUM, S/n to each
     "scatter": lambda: dist.scatter(out, parts, src, group=group),  # S/n from the root to each
     "all-to-all": lambda: dist.all_to_all_single(out, x, group=group),  # S/n from each to each
     }[name]()
    return out


def answer(name, axis, count, device, root=0):
    """Return this rank's input, and its exact output or None where that is undefined. n must divide count."""
    n, r = axis.size, axis.rank
    m = count // n
    # Element i of rank q holds n * (i % 61) + q: a wrong sender and a wrong place both show. Sums are exact.
    i, q = torch.arange(count, device=device), torch.arange(n, device=device).unsqueeze(1)  # (S,), (n, 1)
    x = (n * (i % 61) + q).float()  # (n, S): the inputs of all ranks
    part = slice(r * m, (r + 1) * m)
    want = {"all-reduce": x.sum(0), "reduce": x.sum(0) if r == root else None, "broadcast": x[root],
            "all-gather": x[:, :m].flatten(), "reduce-scatter": x[:, part].sum(0), "scatter": x[root, part],
            "all-to-all": x[:, part].flatten()}[name]
    return x[r, :m if name == "all-gather" else count].clone(), want


# -----------------------------------------------------------------------------
# 2) the mesh

def mesh_table(world, mesh, say):
    """Sum the rank ids over each group of each axis.

    Return {axis: {ranks of a group: the sum, as each member got it}}, and whether every sum is right.
    """
    own = {}
    for name in AXES:
        axis = getattr(mesh, name)
        total = axis.all_reduce(torch.tensor([world.rank], device=world.device))  # one number, over the axis
        own[name] = axis.ranks, total.item()
    table = {name: {} for name in AXES}
    right = True
    for theirs in gather_objects(world, own):  # a few numbers per rank, over the world
        for name, (ranks, total) in theirs.items():
            table[name].setdefault(ranks, []).append(total)
            right &= total == sum(ranks)
    say(f"{'axis':<6} {'groups':<40} sums")
    for name, groups in table.items():
        few = list(groups.items())[:8]
        shown = " ".join(str(list(ranks)) for ranks, _ in few)
        say(f"{name:<6} {shown:<40} {' '.join(str(totals[0]) for _, totals in few)}")
    say("each rank has the sum of its group" if right else "WRONG: a rank has another sum")
    return table, right


# -----------------------------------------------------------------------------
# 3) measure

def is_right(world, axis, name, collective, count):
    """Whether collective(x, axis) gives the exact answer for count numbers, on every rank of the world."""
    x, want = answer(name, axis, count, world.device)
    got = collective(x, axis)
    good = torch.tensor(float(want is None or torch.equal(got, want)), device=world.device)
    return bool(world.axis.all_reduce(good, dist.ReduceOp.MIN))  # one number, over the world


def measure(world, axis, sizes, iters, say):
    """Return a row for each collective, size and version.

    sizes are in bytes, rounded up to n floats; messages up to 1 MiB are compared with the answer. Times are
    the slowest rank's. All groups of the axis work at the same time, as they do in training.
    """
    rows = []
    for name, size in itertools.product(HAND, sizes):
        count = ceil_div(size, 4 * axis.size) * axis.size
        text = f"{name:<14} {4 * count:>10}"
        for version, collective in (("hand", HAND[name]), ("library", functools.partial(library, name))):
            good = is_right(world, axis, name, collective, min(count, 2**18 // axis.size * axis.size))
            x = torch.zeros(count // axis.size if name == "all-gather" else count, device=world.device)
            collective(x, axis)  # warm up at this size
            seconds = slowest(world, lambda: collective(x, axis), iters)
            algbw = 4e-9 * count / seconds
            busbw = algbw * FACTOR[name](axis.size)
            rows.append({"axis": axis.name, "ranks": axis.size, "collective": name, "bytes": 4 * count,
                         "version": version, "ok": good, "us": seconds * 1e6, "algbw": algbw, "busbw": busbw})
            text += f" | {seconds * 1e6:>11.0f} {algbw:>7.3f} {busbw:>7.3f} {'ok' if good else 'WRONG':>5}"
        say(text)
    return rows


def bytes_of(text):
    """Return the bytes of 64, 4K, 16M or 1G. ValueError: text is no size."""
    k = "BKMG".find(text[-1:].upper())
    digits = text if k < 0 else text[:-1]
    if not digits.isdigit() or int(digits) < 1:
        raise ValueError(f"--sizes {text} is not a whole number of at least 1, alone or with K, M or G")
    return int(digits) * 1024 ** max(k, 0)


@dataclass(frozen=True)
class Flags:
    tp: int = 1  # size of this axis: ranks that share each layer
    cp: int = 1  # size of this axis: ranks that share each sequence
    pp: int = 1  # size of this axis: pipeline stages
    ep: int = 1  # size of this axis: ranks that share the experts
    sizes: tuple[str, ...] = ("4K", "256K", "4M")  # bytes of the messages
    iters: int = 10  # repetitions per measurement
    json: Path | None = None  # also write all numbers to this file

    RANGES = {"iters": (1, 10**6)}

    def check(self):
        if not self.sizes:
            raise ValueError("--sizes needs at least one size, such as 4K")
        for text in self.sizes:
            bytes_of(text)


def run(world, flags, say=print):
    """Return the mesh table, the rows, and whether everything is right. Rank 0 says them."""
    say = say if world.rank == 0 else [].append
    with world.everyone.input():
        mesh = make_mesh(world, flags.tp, flags.pp, flags.ep, cp=flags.cp)
        if flags.json and world.rank == 0:
            flags.json.touch()  # a wrong path is reported now, not after the measurement
    table, right = mesh_table(world, mesh, say)
    rows = []
    for name in AXES:
        axis, same = getattr(mesh, name), [a for a in AXES if table[a].keys() == table[name].keys()]
        if axis.size > 1 and name == same[0]:  # the same ranks under another name are measured once
            say("")
            say(f"{' = '.join(same)}: {len(table[name])} x {axis.size} ranks at once, bandwidths in GB/s")
            titles = [f" | {version:>7}: us   algbw   busbw check" for version in ("hand", "library")]
            say(f"{'collective':<19} bytes" + "".join(titles))
            rows += measure(world, axis, [bytes_of(text) for text in flags.sizes], flags.iters, say)
    return table, rows, right and all(row["ok"] for row in rows)


def main(argv=None):
    flags = read_flags(Flags, argv, "collectives.py", "Measure the collectives of training, written by hand "
                       "and by the library, along each axis of the mesh.")
    world = launch()
    if world.size == 1:
        print("one rank: nothing to measure; try mpiexec -n 2 python bench/collectives.py")
        return Outcome.DONE
    table, rows, right = run(world, flags)
    if flags.json and world.rank == 0:
        report = {"backend": dist.get_backend(), "mesh": {k: list(v) for k, v in table.items()}, "rows": rows}
        flags.json.write_text(json.dumps(report))
    shutdown(world)
    if not right and world.rank == 0:
        print("nanoshard: WRONG results, see above", file=sys.stderr, flush=True)
    return Outcome.DONE if right else Outcome.FAILED


if __name__ == "__main__":
    start(main)

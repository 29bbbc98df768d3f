"""Every collective we use, written by hand from send and receive, beside the library's.

    1) by hand      each a few lines, with a drawing of who sends what
    2) the mesh     which ranks form a group along each axis; every group sums its rank ids
    3) measure      both versions against the exact answer; time, algbw and busbw by message size

mpiexec -n 4 python bench/collectives.py --tp 2     (torchrun and srun: the same)

All work along one axis of the mesh: n = axis.size ranks, this one is r = axis.rank. Ranks in an axis count
from 0, the network knows the global ones, axis.ranks[r]. Tensors are flat, inputs may be overwritten.
algbw = bytes / time; busbw = algbw * FACTOR compares with the speed of one link, however many ranks there are
(github.com/NVIDIA/nccl-tests: doc/PERFORMANCE.md, for scatter src/scatter.cu).
"""
import functools
import itertools
import json
import sys
import time
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])  # bench/ and the root: starts from anywhere

import torch
import torch.distributed as dist
from smoke import Parser, at_least_one

from parallel import all_gather_single, make_mesh, reduce_scatter_single
from runtime.launch import agreed, launch, shutdown

AXES = ("world", "dp", "tp", "pp", "ep", "edp", "stage")


def exchange(axis, sends=(), receives=()):
    """The only tool. sends: (to, tensor), receives: (from, tensor). One batch: no order can deadlock."""
    ops = [dist.P2POp(dist.isend, t, axis.ranks[rank], axis.group) for rank, t in sends]
    ops += [dist.P2POp(dist.irecv, t, axis.ranks[rank], axis.group) for rank, t in receives]
    for work in dist.batch_isend_irecv(ops) if ops else ():  # one message per pair, over the axis
        work.wait()


def reduce_scatter(x, axis):
    """(S,) -> (S/n,): the sum of everybody's part r. n sums travel the ring at once and grow on the way,
    n-1 steps of S/n each; the one that ends at rank 2 of 3:     0 --[x0]--> 1 --[x0+x1]--> 2 adds x2"""
    n, r = axis.size, axis.rank
    parts = x.tensor_split(n)
    total = parts[(r - 1) % n]  # starts here, for the left neighbour: the longest way round
    for step in range(2, n + 1):
        mine = parts[(r - step) % n]
        arriving = torch.empty_like(mine)
        exchange(axis, [((r + 1) % n, total)], [((r - 1) % n, arriving)])
        total = arriving.add_(mine)
    return total


def pass_around(blocks, axis):
    """blocks[r] is filled; after n-1 steps to the right all are.     0 --[b0]--> 1 --[b0]--> 2 --[b0]--> 3"""
    n, r = axis.size, axis.rank
    for step in range(n - 1):
        exchange(axis, [((r + 1) % n, blocks[(r - step) % n])], [((r - 1) % n, blocks[(r - step - 1) % n])])


def all_gather(x, axis):
    """(m,) -> (n*m,): everybody's block, in the order of ranks."""
    out = x.new_empty(axis.size * x.numel())
    blocks = out.chunk(axis.size)
    blocks[axis.rank].copy_(x)
    pass_around(blocks, axis)
    return out


def all_reduce(x, axis):
    """(S,) -> (S,): each rank sums one part, then the parts go round: 2 (n-1) ring steps of S/n."""
    blocks = x.tensor_split(axis.size)  # S need not divide by n
    blocks[axis.rank].copy_(reduce_scatter(x, axis))
    pass_around(blocks, axis)
    return x


def tree(axis, root):
    """Rounds of a binary tree, log2(n) -> [(partner of this rank, am I the one nearer to the root)]:
    0 -> 1;     0 -> 2, 1 -> 3;     0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7;     ..."""
    n, v, rounds = axis.size, (axis.rank - root) % axis.size, []  # v: rank counted from the root
    for have in (1 << k for k in range((n - 1).bit_length())):  # n=5: 1, 2, 4 ranks have it
        if v < have and v + have < n:
            rounds.append(((v + have + root) % n, True))
        elif have <= v < 2 * have:
            rounds.append(((v - have + root) % n, False))
    return rounds


def broadcast(x, axis, root=0):
    """(S,) of the root -> (S,) everywhere: down the tree, who has it gives it on."""
    for partner, nearer in tree(axis, root):
        if nearer:
            exchange(axis, sends=[(partner, x)])
        else:
            exchange(axis, receives=[(partner, x)])
    return x


def reduce(x, axis, root=0):
    """(S,) everywhere -> their sum at the root: up the tree. The others keep partial sums."""
    for partner, nearer in reversed(tree(axis, root)):
        if nearer:
            arriving = torch.empty_like(x)
            exchange(axis, receives=[(partner, arriving)])
            x.add_(arriving)
        else:
            exchange(axis, sends=[(partner, x)])
    return x


def scatter(x, axis, root=0):
    """(S,) of the root -> (S/n,): part r to rank r.     root --[part 0]--> 0, --[part 1]--> 1, ..."""
    parts = x.chunk(axis.size)
    if axis.rank == root:
        exchange(axis, sends=[(to, parts[to]) for to in range(axis.size) if to != root])
        return parts[root]
    out = torch.empty_like(parts[axis.rank])
    exchange(axis, receives=[(root, out)])
    return out


def all_to_all(x, axis):
    """(S,) -> (S,): block j of rank i becomes block i of rank j, a transpose. All at once:
        rank 0 [a0 a1 a2]           rank 0 [a0 b0 c0]
        rank 1 [b0 b1 b2]    -->    rank 1 [a1 b1 c1]
        rank 2 [c0 c1 c2]           rank 2 [a2 b2 c2]"""
    out = torch.empty_like(x)
    source, target = x.chunk(axis.size), out.chunk(axis.size)
    target[axis.rank].copy_(source[axis.rank])
    others = [(axis.rank + d) % axis.size for d in range(1, axis.size)]  # next first: no jam
    exchange(axis, [(j, source[j]) for j in others], [(j, target[j]) for j in others])
    return out


HAND = {"all-reduce": all_reduce, "reduce": reduce, "broadcast": broadcast, "all-gather": all_gather,
        "reduce-scatter": reduce_scatter, "scatter": scatter, "all-to-all": all_to_all}
FACTOR = {"all-reduce": lambda n: 2 * (n - 1) / n, "reduce": lambda n: 1, "broadcast": lambda n: 1,
          **dict.fromkeys(("all-gather", "reduce-scatter", "scatter", "all-to-all"), lambda n: (n - 1) / n)}


def library(name, x, axis, root=0):
    """The library's version of each, in the same form; roots are global ranks there."""
    n, group, src = axis.size, axis.group, axis.ranks[root]
    length = {"all-gather": x.numel() * n, "reduce-scatter": x.numel() // n, "scatter": x.numel() // n}
    out = x if name in ("all-reduce", "reduce", "broadcast") else x.new_empty(length.get(name, x.numel()))
    parts = list(x.chunk(n)) if name == "scatter" and axis.rank == root else None
    {"all-reduce": lambda: dist.all_reduce(x, group=group),  # SUM, S to all; these seven over the axis
     "reduce": lambda: dist.reduce(x, src, group=group),  # SUM, S to the root
     "broadcast": lambda: dist.broadcast(x, src, group=group),  # S from the root to all
     "all-gather": lambda: all_gather_single(out, x, group=group),  # S/n from each to all
     "reduce-scatter": lambda: reduce_scatter_single(out, x, group=group),  # SUM, S/n to each
     "scatter": lambda: dist.scatter(out, parts, src, group=group),  # S/n from the root to each
     "all-to-all": lambda: dist.all_to_all_single(out, x, group=group),  # S/n from each to each
     }[name]()
    return out


def answer(name, axis, count, device, root=0):
    """-> (this rank's input, its exact output or None where that is undefined). n divides count."""
    n, r, m = axis.size, axis.rank, count // axis.size
    # element i of rank q holds n * (i % 61) + q: a wrong sender and a wrong place both show, sums are exact
    i, q = torch.arange(count, device=device), torch.arange(n, device=device).unsqueeze(1)  # (S,), (n, 1)
    x = (n * (i % 61) + q).float()  # (n, S): what every rank holds
    part = slice(r * m, (r + 1) * m)
    want = {"all-reduce": x.sum(0), "reduce": x.sum(0) if r == root else None, "broadcast": x[root],
            "all-gather": x[:, :m].flatten(), "reduce-scatter": x[:, part].sum(0), "scatter": x[root, part],
            "all-to-all": x[:, part].flatten()}[name]
    return x[r, :m if name == "all-gather" else count].clone(), want


def mesh_table(world, mesh, say):
    """-> ({axis: {ranks of a group: the sum of its rank ids, as each member got it}}, is every sum right).
    The DP x SHARD x TP experiment: our replicas are dp, ZeRO shards over that dp, ep shards the experts."""
    mine = {}
    for name in AXES:
        axis, x = getattr(mesh, name), torch.tensor([world.rank], device=world.device)
        if axis.size > 1:
            dist.all_reduce(x, group=axis.group)  # SUM of one number, over the axis
        mine[name] = axis.ranks, x.item()
    everybody = [None] * world.size
    dist.all_gather_object(everybody, mine)  # a few numbers per rank, over the world
    table, right = {name: {} for name in AXES}, True
    say(f"{'axis':<6} {'groups':<40} check")
    for name, groups in table.items():
        for theirs in everybody:
            groups.setdefault(theirs[name][0], []).append(theirs[name][1])
        good = all(got == [sum(ranks)] * len(ranks) for ranks, got in groups.items())
        right &= good
        shown = " ".join(str(list(ranks)) for ranks in list(groups)[:8]) + " ..." * (len(groups) > 8)
        sums = " ".join(str(got[0]) for got in list(groups.values())[:8])
        say(f"{name:<6} {shown:<40} sums {sums}: {'ok' if good else 'WRONG'}")
    return table, right


def measure(world, axis, sizes, iters, say):
    """-> rows. sizes in bytes, rounded up to n floats; messages up to 1 MiB are compared with the answer.
    Times are the slowest rank's; all groups of the axis work at the same time, as they do in training."""
    sync = torch.accelerator.synchronize if world.device.type != "cpu" else lambda: None
    rows = []
    for name, size in itertools.product(HAND, sizes):
        count = -(-size // (4 * axis.size)) * axis.size
        text = f"{name:<14} {4 * count:>10}"
        for version, fn in (("hand", HAND[name]), ("library", functools.partial(library, name))):
            x, want = answer(name, axis, min(count, 2**18 // axis.size * axis.size), world.device)
            got = fn(x, axis)
            good = torch.tensor(float(want is None or torch.equal(got, want)), device=world.device)
            dist.all_reduce(good, dist.ReduceOp.MIN)  # one number, over the world: right on every rank
            x = torch.zeros(count // axis.size if name == "all-gather" else count, device=world.device)
            fn(x, axis)  # warm up at this size
            world.barrier()
            sync()  # sync point: start together
            began = time.perf_counter()
            for _ in range(iters):
                fn(x, axis)
            sync()  # sync point: a true time needs the work to be over
            t = torch.tensor((time.perf_counter() - began) / iters, device=world.device)
            dist.all_reduce(t, dist.ReduceOp.MAX)  # one number, over the world
            t, algbw = t.item(), 4e-9 * count / t.item()
            busbw = algbw * FACTOR[name](axis.size)
            rows.append({"axis": axis.name, "ranks": axis.size, "collective": name, "bytes": 4 * count,
                         "version": version, "ok": bool(good), "us": t * 1e6, "algbw": algbw, "busbw": busbw})
            text += f" | {t * 1e6:>11.0f} {algbw:>7.3f} {busbw:>7.3f} {'ok' if good else 'WRONG':>5}"
        say(text)
    return rows


def run(world, args, say=print):
    """-> (mesh table, rows, is everything right)"""
    with agreed(world):
        mesh = make_mesh(world, args.tp, args.pp, args.ep)
        if args.json and world.rank == 0:
            args.json.touch()  # a wrong path is said now, not after the measurement
    table, right = mesh_table(world, mesh, say)
    rows = []
    for name in AXES:
        axis, same = getattr(mesh, name), [a for a in AXES if table[a].keys() == table[name].keys()]
        if axis.size > 1 and name == same[0]:  # the same ranks under another name are measured once
            say(f"\n{' = '.join(same)}: {len(table[name])} x {axis.size} ranks at once, bandwidths in GB/s")
            say(f"{'collective':<19} bytes" + "".join(f" | {who:>11}   algbw   busbw check" for who in
                                                      ("hand: us", "library: us")))
            rows += measure(world, axis, args.sizes, args.iters, say)
    return table, rows, right and all(row["ok"] for row in rows)


def bytes_of(text):
    """64, 4K, 16M, 1G -> bytes."""
    k = "BKMG".find(text[-1:].upper())
    return at_least_one(text if k < 0 else text[:-1]) * 1024 ** max(k, 0)


def main(argv=None):
    p = Parser("collectives.py", allow_abbrev=False, description="collectives: by hand, by library")
    for axis in ("tp", "pp", "ep"):
        p.add_argument(f"--{axis}", type=at_least_one, default=1, help="size of this axis (default 1)")
    p.add_argument("--sizes", type=bytes_of, nargs="+", default=[4096, 2**18, 2**22], help="e.g. 4K 256K 4M")
    p.add_argument("--iters", type=at_least_one, default=10, help="repetitions per measurement (default 10)")
    p.add_argument("--json", type=Path, help="also write all numbers to this file")
    args = p.parse_args(argv)
    world = launch()
    if world.size == 1:
        print("one rank: nothing to measure; try mpiexec -n 2 python bench/collectives.py")
        return
    table, rows, right = run(world, args, print if world.rank == 0 else lambda text: None)
    if args.json and world.rank == 0:
        report = {"backend": world.backend, "mesh": {k: list(v) for k, v in table.items()}, "rows": rows}
        args.json.write_text(json.dumps(report))
    shutdown(world)
    if not right:
        raise SystemExit("nanoshard: WRONG results, see above" if world.rank == 0 else 1)


if __name__ == "__main__":
    main()

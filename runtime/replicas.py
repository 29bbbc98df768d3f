"""Are the ranks that should hold equal parameters equal? --check-every steps, before a difference spreads.

Memory and links flip bits, and a wrong sum makes replicas drift apart without a sound. Each rank hashes what
it holds; the ranks of one reduction axis compare. All parameters of an axis go in one small all-gather.
"""
import torch

from parallel import checksum

DIFFER = 44  # exit code


def differences(model, mesh):
    """-> one line per parameter that differs, the same list on every rank. After opt.wait()."""
    held = {}  # axis name: {parameter: tensor}
    for name, p in model.named_parameters():
        held.setdefault(p.reduce, {})[name] = p
    for name, t in model.named_buffers():  # routers' bias: the same on a whole stage
        held.setdefault("stage", {})[name] = t
    lines = []
    for axis_name, tensors in sorted(held.items()):
        axis = getattr(mesh, axis_name)
        if axis.size == 1:
            continue
        mine = torch.stack([checksum(t) for t in tensors.values()])  # (n, 2)
        prints = axis.all_gather(mine).view(axis.size, -1, 2).tolist()  # 2 n int64 from each rank to all
        if axis.rank == 0:
            found = (odd(name, rows, axis.ranks) for name, *rows in zip(tensors, *prints, strict=True))
            lines += [line for line in found if line]
    # nothing, if all is well: a few bytes per rank, over the world
    return [line for part in mesh.world.gather_objects(lines) for line in part]


def odd(name, rows, ranks):
    """rows: one hash per rank. -> who differs from whom, or None. The larger party is taken to be right."""
    parties = {}
    for row, rank in zip(rows, ranks, strict=True):
        parties.setdefault(tuple(row), []).append(rank)
    if len(parties) == 1:
        return None
    right, *wrong = sorted(parties.values(), key=lambda party: (-len(party), party))
    return f"{name} on {plural(sorted(sum(wrong, [])))} differs from {plural(right)}"


def report(lines, step, checkpoints):
    """The last words of a run whose replicas differ. checkpoints: paths, newest first."""
    newest = f"the newest checkpoint is {checkpoints[0]}" if checkpoints else "no checkpoint was saved"
    more = [f"... and {len(lines) - 8} more"] * (len(lines) > 8)
    return "\n".join([f"nanoshard: replicas differ after step {step}; {newest}", *lines[:8], *more])


def plural(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

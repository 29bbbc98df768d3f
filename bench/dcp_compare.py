"""Our checkpoint through torch.distributed.checkpoint and back: bench/dcp_compare.py STEP_DIR, or --gb 0.5

Under mpiexec -n N every rank holds the N-th part of each tensor's rows, as a DTensor of N shards. Ours is
loaded, DCP saves it, DCP loads it into tensors full of NaN, and both must be equal in every bit; then ours
is written again. DCP has no checksum and a pickled index, which is why it is here and not in train.py.
"""
import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint
from runtime.launch import agreed, launch, shutdown


def rows(shape, world):
    """This rank's share of dim 0, as torch.chunk deals it -> (first, past the last)."""
    each = -(-shape[0] // world.size)
    return min(shape[0], world.rank * each), min(shape[0], (world.rank + 1) * each)


def made_up(root, gb, world):
    """A checkpoint of about gb: 24 matrices of weights and moments."""
    side = int(math.sqrt(gb * 1e9 / 24 / 4))
    pieces = []
    for i in range(24):
        low, high = rows((side,), world)
        pieces.append((f"w{i}", torch.randn(high - low, side), (side, side), (low, 0)))
    return timed("ours, save, fsync and crc32", world, gb, lambda: checkpoint.save(
        root, 1, world.rank, world.size, pieces, {}))


def timed(what, world, gb, fn):
    world.barrier()
    began = time.perf_counter()
    result = fn()
    world.barrier()
    seconds = time.perf_counter() - began
    if world.rank == 0:
        print(f"{what:32s} {seconds:8.3f} s  {gb / seconds:6.2f} GB/s", flush=True)
    return result


def compare(path, folder, world):
    index = timed("ours, crc32 of all files", world, size(path), lambda: checkpoint.check(
        path, world.rank, world.size, patience=30))
    gb, pieces, state = size(path), [], {}
    for name, entry in index["tensors"].items():
        full, low, high = entry["shape"], 0, None
        if full:
            low, high = rows(full, world)
        mine = torch.full([high - low, *full[1:]] if full else [], math.nan)
        mine = mine.to(getattr(torch, entry["dtype"]))
        pieces.append((name, mine, tuple(full), [low, *[0] * (len(full) - 1)] if full else []))
    timed("ours, load", world, gb, lambda: checkpoint.load(path, [p for p in pieces if p[1].numel()], index))

    def wrapped(tensors):
        if world.size == 1:
            return tensors
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        mesh = init_device_mesh("cpu", (world.size,))
        out = {}
        for (name, _, full, _), t in zip(pieces, tensors.values(), strict=True):
            whole = torch.empty(full, device="meta")
            out[name] = DTensor.from_local(t, mesh, [Shard(0)] if full else [Replicate()], run_check=False,
                                           shape=whole.shape, stride=whole.stride())
        return out
    state = {name: t for name, t, _, _ in pieces}
    timed("dcp, save", world, gb, lambda: dcp.save(wrapped(state), checkpoint_id=folder / "dcp"))
    back = {name: torch.full_like(t, math.nan) for name, t in state.items()}
    timed("dcp, load", world, gb, lambda: dcp.load(wrapped(back), checkpoint_id=folder / "dcp"))
    wrong = [name for name, t in state.items() if not torch.equal(t, back[name])]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(state)} tensors came back from DCP changed: {wrong[:3]}")
    owned = [p for p in pieces if p[1].numel() and (p[2] or world.rank == 0)]  # scalars: once
    again = timed("ours, save again", world, gb, lambda: checkpoint.save(
        folder / "again", 1, world.rank, world.size, owned, index["meta"]))
    if world.rank == 0:
        said = []
        if checkpoint.diff(path, again, said.append):
            raise ValueError(f"the checkpoint written back differs: {said[0]}")
        print(f"all {len(state)} tensors equal in every bit: ours -> dcp -> ours, {world.size} ranks")


def size(path):
    return sum(f["bytes"] for f in checkpoint.read_index(path, 30)["files"].values()) / 1e9


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", help="a step_N of ours; without one, made-up tensors")
    parser.add_argument("--gb", type=float, default=0.5, help="of the made-up checkpoint")
    parser.add_argument("--scratch", default=None, help="where to write; removed at the end")
    args = parser.parse_args(argv)
    world = launch(quiet=True)
    box = [tempfile.mkdtemp(dir=args.scratch) if world.rank == 0 else None]
    if world.size > 1:
        dist.broadcast_object_list(box)  # one path from rank 0, over the world
    folder = Path(box[0])
    try:
        with agreed(world):
            path = Path(args.checkpoint) if args.checkpoint else made_up(folder / "ours", args.gb, world)
            compare(path, folder, world)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    shutdown(world)


if __name__ == "__main__":
    main()

"""Our checkpoint through torch.distributed.checkpoint (DCP) and back: dcp_compare.py STEP_DIR, or --gb 0.5

Under mpiexec -n N every rank holds 1/N of each tensor's rows, as a DTensor of N shards. Our checkpoint is
loaded. DCP saves its tensors and loads them into others full of NaN, and both must be equal in every bit.
Then our code writes the checkpoint again.

DCP has no checksum and a pickled index, so train.py does not use it.
"""
import math
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import read_flags, start
from runtime.launch import exit_together, launch, shutdown

import torch
import torch.distributed.checkpoint as dcp
from tyro.conf import Positional

import checkpoint
from config import ceil_div


@dataclass(frozen=True)
class Flags:
    checkpoint: Positional[str] = ""  # a step_N of a run; without one, random tensors
    gb: float = 0.5  # size of the random tensors
    scratch: str | None = None  # folder to write to; what is written is removed at the end

    RANGES = {"gb": (1e-6, 10**5)}


def rows(shape, world):
    """Return this rank's rows of a tensor, (first, last + 1), cut as torch.chunk does."""
    each = ceil_div(shape[0], world.size)
    return min(shape[0], world.rank * each), min(shape[0], (world.rank + 1) * each)


def save_random(root, gb, world):
    """Save a checkpoint of about gb gigabytes, 24 random matrices, and return its path."""
    side = int(math.sqrt(gb * 1e9 / 24 / 4))
    pieces = []
    for i in range(24):
        low, high = rows((side,), world)
        pieces.append((f"w{i}", torch.randn(high - low, side), (side, side), (low, 0)))
    return timed("ours, save, fsync and crc32", world, gb, lambda: checkpoint.save(
        root, 1, pieces, {}, checkpoint.Writers(world.rank, world.size)))


def timed(what, world, gb, fn):
    """Print the time of fn() on all ranks together, and return its result."""
    world.barrier()
    began = time.perf_counter()
    result = fn()
    world.barrier()
    seconds = time.perf_counter() - began
    if world.rank == 0:
        print(f"{what:32s} {seconds:8.3f} s  {gb / seconds:6.2f} GB/s", flush=True)
    return result


def own_rows(index, world):
    """Return [(name, this rank's rows full of NaN, full shape, offset)] of the tensors in a checkpoint."""
    pieces = []
    for name, entry in index["tensors"].items():
        full, low, high = entry["shape"], 0, None
        if full:
            low, high = rows(full, world)
        local = torch.full([high - low, *full[1:]] if full else [], math.nan)
        local = local.to(getattr(torch, entry["dtype"]))
        pieces.append((name, local, tuple(full), [low, *[0] * (len(full) - 1)] if full else []))
    return pieces


def as_dtensors(pieces, tensors, world):
    """Turn {name: this rank's rows} into {name: DTensor}, by which DCP knows the part that each rank has."""
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


def compare(path, folder, world):
    """Take our checkpoint at path through DCP, and write it again. ValueError: a tensor differs."""
    gb = size(path)
    index = timed("ours, crc32 of all files", world, gb, lambda: checkpoint.check(
        path, world.rank, world.size, patience=30))
    pieces = own_rows(index, world)
    asked = [p for p in pieces if p[1].numel()]
    timed("ours, load", world, gb, lambda: checkpoint.load(path, asked, index, others=index["tensors"]))
    state = {name: t for name, t, _, _ in pieces}
    timed("dcp, save", world, gb, lambda: dcp.save(as_dtensors(pieces, state, world),
                                                   checkpoint_id=folder / "dcp"))
    back = {name: torch.full_like(t, math.nan) for name, t in state.items()}
    timed("dcp, load", world, gb, lambda: dcp.load(as_dtensors(pieces, back, world),
                                                   checkpoint_id=folder / "dcp"))
    wrong = [name for name, t in state.items() if not torch.equal(t, back[name])]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(state)} tensors came back from DCP changed: {wrong[:3]}")
    owned = [p for p in pieces if p[1].numel() and (p[2] or world.rank == 0)]  # rank 0 writes the scalars
    again = timed("ours, save again", world, gb, lambda: checkpoint.save(
        folder / "again", 1, owned, index["meta"], checkpoint.Writers(world.rank, world.size)))
    if world.rank == 0:
        differences = []
        if checkpoint.diff(path, again, differences.append):
            raise ValueError(f"the checkpoint written back differs: {differences[0]}")
        print(f"all {len(state)} tensors equal in every bit: ours -> dcp -> ours, {world.size} ranks")


def size(path):
    """Return the gigabytes of a checkpoint's files."""
    return sum(f["bytes"] for f in checkpoint.read_index(path, 30)["files"].values()) / 1e9


def main(argv=None):
    flags = read_flags(Flags, argv, "dcp_compare.py [STEP_DIR]", "Take a checkpoint through "
                       "torch.distributed.checkpoint and back: time, and equality in every bit.")
    world = launch(quiet=True)
    folder = None
    try:
        with exit_together(world):
            folder = Path(tempfile.mkdtemp(dir=flags.scratch)) if world.rank == 0 else None
        folder = world.tree.broadcast_object(folder)  # one path from rank 0, over the world
        with exit_together(world):
            path = Path(flags.checkpoint) if flags.checkpoint else \
                save_random(folder / "ours", flags.gb, world)
            compare(path, folder, world)
    finally:
        if world.rank == 0 and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    shutdown(world)


if __name__ == "__main__":
    start(main)

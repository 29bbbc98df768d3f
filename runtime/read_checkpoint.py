"""A checkpoint that all ranks read together: its index travels once, and each file is verified once."""
from pathlib import Path

import checkpoint
from runtime.agree import read_by_first, read_together


def newest_under(world, path):
    """Return the newest checkpoint under a path, or the path if it is one or holds none. Collective."""
    if not (Path(path) / "index.json").exists():
        path = next(iter(checkpoint.steps(path)), path)
    return Path(world.everyone.broadcast(str(path)))  # that run may still be saving, so rank 0 chooses


def sent_index(everyone, path):
    """Return the index of a checkpoint, which rank 0 reads and sends. Collective over the world.

    ValueError, on all ranks: it is missing or damaged.
    """
    return read_by_first(everyone, checkpoint.read_index, path)


def check_together(everyone, path):
    """Raise ValueError, on all ranks, if a checkpoint is damaged. Collective over the world.

    Rank 0 reads the index. Each file is looked at and read by one rank.
    """
    files = read_by_first(everyone, lambda: checkpoint.read_index(path)["files"])
    checkpoint.wait_for_folder(path, patience=30.0)  # another node may see it later than rank 0 (NFS)
    read_together(everyone, checkpoint.check_files, path, files, everyone.rank, everyone.size)


def load_tensors(world, path, index, requested, unused=()):
    """Fill this rank's rectangles `requested` from a checkpoint. Collective over the world.

    unused: names of the checkpoint's tensors that no rank need ask for.
    ValueError: a tensor is missing or damaged, or no rank asks for it.
    """
    own = {name for name, *_ in requested} | set(unused)
    names = sorted(index["tensors"])
    bits = sum(1 << i for i, name in enumerate(names) if name in own)
    asked = world.everyone.either(bits)  # one bit per tensor of the checkpoint, over the world
    others = [name for i, name in enumerate(names) if asked >> i & 1]
    read_together(world.everyone, checkpoint.load, path, requested, index, others)

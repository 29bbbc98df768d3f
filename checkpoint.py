"""Checkpoints: step_000123/ has one safetensors file per writing rank and index.json. No pickle.

    python checkpoint.py show A       what is in A: a step_N directory, or a run, then its newest
    python checkpoint.py diff A B     which tensors differ, and by how much

Every tensor has one global name and one full shape, whatever the layout. A rank writes its pieces: rectangles
of tensors, as (name, data, full shape, offset of the rectangle). index.json lists the pieces of all files. A
reader copies what overlaps with the rectangle that it asks for: every layout reads what any other wrote.

    step_000123.RUN_ID.tmp/rank_00000.safetensors   each rank writes its pieces,
    step_000123.RUN_ID.tmp/rank_00000.json          then their list: its part is complete
    step_000123.RUN_ID.tmp/index.json               rank 0, when the lists of all ranks are there
    step_000123/                                    the commit is a rename: complete, or absent
"""
import json
import os
import re
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path

import interface.packages  # noqa: F401  isort: skip (it says in one line which package is missing)
from interface.command_line import wrong_input
from interface.files import best_effort, load_json, remove_folder, sync, write_whole
from interface.paths import meant_run, steps
from interface.terminal import one_line, say

OUR_FILES = re.compile(r"index\.json|rank_[0-9]+\.(json|safetensors)")  # all that a save writes


# A safetensors file: 8 bytes with the length of the header, the header in JSON, then all elements

SAFETENSORS_DTYPE = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64",
                     "int32": "I32", "uint8": "U8", "bool": "BOOL"}  # {torch's name: that of the format}
BLOCK = 1 << 24  # bytes read at once


def dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def write_safetensors(path, tensors):
    """Write {key: tensor}. Return (bytes, crc32) of the file.

    The library's function would copy all tensors, compute no checksum, and hold the interpreter's lock.
    """
    import torch
    # The widest elements come first: so all are aligned.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header = {"__metadata__": {"format": "pt"}}  # which transformers 4 asks for
    begin = 0
    for key, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[key] = {"dtype": SAFETENSORS_DTYPE[dtype_name(tensor)], "shape": list(tensor.shape),
                       "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    crc = zlib.crc32(head)
    with open(path, "wb") as f:
        f.write(head)
        for tensor in tensors.values():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            crc = zlib.crc32(data, crc)
            f.write(data)
        f.flush()
        os.fsync(f.fileno())
        return f.tell(), crc


# Writing a checkpoint

def save(root, step, pieces, meta, rank=0, size=1, run_id="0"):
    """Write this rank's part of a checkpoint, and on rank 0 commit it. Return its directory.

    pieces: [(name, tensor, full shape, offset)]; over all ranks each element is there exactly once.
    meta: any JSON value; rank 0's is stored. run_id: a word that all ranks share and no other run has, so
    that files of a killed run are no part. No collective is called. OSError: it was not saved.
    """
    tmp = Path(root) / f"step_{step:06d}.{run_id}.tmp"
    write_part(tmp, rank, pieces)
    if rank == 0:
        commit(tmp, step, meta, size)
    return Path(root) / f"step_{step:06d}"


def write_part(tmp, rank, pieces):
    """Write this rank's pieces, then their list, which says that the part is complete."""
    tmp.mkdir(parents=True, exist_ok=True)
    file = f"rank_{rank:05d}.safetensors"
    tensors = {}
    records = []
    for i, (name, tensor, full, offset) in enumerate(pieces):
        key = name if tuple(tensor.shape) == tuple(full) else f"{name}#{i}"
        tensors[key] = tensor
        records.append([name, key, dtype_name(tensor), list(full), list(offset), list(tensor.shape)])
    size, crc = write_safetensors(tmp / file, tensors)
    part = {"file": file, "bytes": size, "crc32": crc, "records": records}
    write_whole(tmp / f"rank_{rank:05d}.json", json.dumps(part))


def commit(tmp, step, meta, size, timeout=600.0, stopped=lambda: False):
    """Wait `timeout` seconds for the parts of `size` ranks, write the index, rename the directory.

    stopped: a function that says whether a part will never come. OSError: parts are missing, or this step is
    there already, and stays.
    """
    names = [f"rank_{rank:05d}.json" for rank in range(size)]
    until = time.monotonic() + timeout
    while missing := set(names) - set(os.listdir(tmp)):
        if time.monotonic() > until or stopped():
            raise TimeoutError(f"{tmp.name}: no {min(missing)}, of {len(missing)} ranks; not committed")
        time.sleep(0.02)
    tensors = {}
    files = {}
    for part in map(load_json, [tmp / name for name in names]):
        files[part["file"]] = {"bytes": part["bytes"], "crc32": part["crc32"]}
        for name, key, dtype, full, offset, shape in part["records"]:
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": full, "pieces": []})
            entry["pieces"].append({"file": part["file"], "key": key, "offset": offset, "size": shape})
    index = {"format": 2, "step": step, "meta": meta, "files": files, "tensors": tensors}
    write_whole(tmp / "index.json", json.dumps({"crc32": crc_of(index), **index}, sort_keys=True))
    for name in names:
        (tmp / name).unlink()
    sync(tmp)
    os.rename(tmp, tmp.with_name(f"step_{step:06d}"))
    sync(tmp.parent)


def crc_of(index):
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def discard(folder):
    """Delete the directory of a checkpoint. If somebody put a file of his own there, both stay."""
    with suppress(OSError):
        remove_folder(folder, OUR_FILES)


def prune(root, keep, best=None):
    """Delete all checkpoints under root except the `keep` newest and that of step `best`."""
    for old in steps(root)[keep:]:
        if step_of(old) != best:
            doomed = old.with_name(old.name + ".del")  # a half-deleted directory never has a valid name
            with best_effort(f"{old} could not be removed"):
                os.rename(old, doomed)
            discard(doomed)


def recover(root):
    """Delete what a killed save or prune left behind. Call it on one rank, before any rank saves."""
    for path in [*Path(root).glob("step_*.tmp"), *Path(root).glob("step_*.del")]:
        discard(path)


# Finding and verifying

def step_of(path):
    return int(path.name.removeprefix("step_"))


def latest(path):
    """Return the newest committed checkpoint of a run, or path itself if it is one or holds none."""
    return next(iter(steps(path)), Path(path))


def read_index(path, give=""):
    """Return the index of the checkpoint at path. FileNotFoundError, ValueError: it is missing or damaged.
    give: what to type instead, as meant_run() takes it."""
    path = Path(path)
    if not (path / "index.json").is_file():
        raise FileNotFoundError(f"{path} is no checkpoint, a step_N in a run; {meant_run(path, give)}")
    index = load_json(path / "index.json")
    if not isinstance(index, dict) or index.pop("crc32", None) != crc_of(index):
        raise ValueError(damaged(path, "index.json differs from its crc32"))
    return index


def damaged(path, what):
    return f"checkpoint {path} was damaged: {what}; use an older step_N"


def check(path, rank=0, size=1):
    """Compare the checksum of every size-th file. Return the index. ValueError, OSError: what is wrong."""
    index = read_index(path)
    for name in sorted(index["files"])[rank::size]:
        crc = 0
        with open(Path(path, name), "rb", buffering=0) as f:
            while block := f.read(BLOCK):
                crc = zlib.crc32(block, crc)
        if crc != index["files"][name]["crc32"]:
            raise ValueError(damaged(path, f"{name} differs from its crc32"))
    return index


def damage(path, rank=0, size=1):
    """Return what check() finds wrong with the checkpoint, or None."""
    try:
        check(path, rank, size)
    except (ValueError, OSError) as e:
        return one_line(e)
    return None


class Reader:
    """A checkpoint of which any rectangle of any tensor can be read."""

    def __init__(self, path, index=None):
        self.path = Path(path)
        self.index = index or read_index(path)
        self.handles = {}  # {file name: the open file}

    def fill(self, name, out, full, offset):
        """Copy into out the rectangle of its shape at offset of tensor `name`, whose full shape is `full`."""
        from safetensors import safe_open
        entry = self.index["tensors"].get(name, {"shape": None})
        if list(full) != entry["shape"]:
            raise ValueError(f"checkpoint {self.path}: the shape of {name} is {entry['shape']} there, in "
                             f"this model {list(full)}; give the flags of the run that wrote it")
        copied = 0
        for piece in entry["pieces"]:
            both = overlap(offset, out.shape, piece["offset"], piece["size"])
            if both is None:
                continue
            here, there = both
            file = piece["file"]
            if file not in self.handles:
                self.handles[file] = safe_open(self.path / file, framework="pt")
            source = self.handles[file].get_slice(piece["key"])[there]
            out[here].copy_(source)
            copied += source.numel()
        if copied != out.numel():
            raise ValueError(damaged(self.path, f"{name} covers {copied} of {out.numel()} elements"))

    def whole(self, name):
        import torch
        entry = self.index["tensors"][name]
        out = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        self.fill(name, out, entry["shape"], [0] * out.ndim)
        return out


def overlap(offset, shape, other_offset, other_shape):
    """Return (slices of one rectangle, slices of the other) that are the same elements, or None."""
    here = []
    there = []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        low = max(a, b)
        high = min(a + n, b + m)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)


def full_tensors(path):
    """Return {name: tensor at full size}."""
    reader = Reader(path)
    return {name: reader.whole(name) for name in reader.index["tensors"]}


def show(path):
    """Say which counters and tensors a checkpoint has."""
    index = check(path)
    megabytes = sum(file["bytes"] for file in index["files"].values()) / 1e6
    say(f"{path}: step {index['step']}, {len(index['tensors'])} tensors in {len(index['files'])} files, "
        f"{megabytes:.1f} MB, all checksums right")
    counters = {key: value for key, value in index["meta"].items() if not isinstance(value, dict)}
    say("  " + " ".join(f"{key}={value}" for key, value in counters.items()))
    for name, entry in sorted(index["tensors"].items()):
        say(f"  {name:45} {entry['dtype']:8} {tuple(entry['shape'])!s:16} {len(entry['pieces'])} piece(s)")


def diff(path_a, path_b):
    """Say which counters and tensors differ, and by how much. Return their number."""
    a = Reader(path_a, check(path_a))
    b = Reader(path_b, check(path_b))
    found = 0
    for key in sorted(a.index["meta"].keys() - {"world", "flags", "best"}):
        if a.index["meta"][key] != b.index["meta"].get(key):
            found += 1
            say(f"  {key} differs")
    both = a.index["tensors"].keys() & b.index["tensors"].keys()
    for name in sorted(a.index["tensors"].keys() | b.index["tensors"].keys()):
        text = difference(a.whole(name), b.whole(name)) if name in both else "only in one of them"
        if text:
            found += 1
            say(f"  {name:45} {text}")
    say(f"{found} differences" if found else f"equal: all {len(both)} tensors, step {a.index['step']}")
    return found


def difference(x, y):
    """Return in words how two tensors differ, or "". -0.0 and 0.0 differ; NaN equals NaN."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{dtype_name(x)} {tuple(x.shape)} -> {dtype_name(y)} {tuple(y.shape)}"
    apart = ((x != y) | (x.signbit() != y.signbit())) & ~(x.isnan() & y.isnan())
    if not apart.any():
        return ""
    most = (x.double() - y.double()).abs()[apart].max()
    return f"{int(apart.sum())} of {x.numel()} elements, max abs {most:.3g}"


@wrong_input()
def main(argv):
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    command, *paths = argv or [""]
    paths = [latest(path) for path in paths]
    if (command, len(paths)) == ("show", 1):
        show(*paths)
        return 0
    if (command, len(paths)) == ("diff", 2):
        return 1 if diff(*paths) else 0
    raise ValueError("usage: python checkpoint.py show A, or diff A B; --help says more")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

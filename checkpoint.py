"""Checkpoints: step_000123/ has one safetensors file per writing rank and index.json. No pickle; no rank ever
needs the memory for a whole tensor.

    python checkpoint.py show A       what is in A: a step_N directory, or a run, then its newest
    python checkpoint.py diff A B     which tensors differ, and by how much

Every tensor has one global name and one full shape, whatever the layout. A rank writes its pieces: rectangles
of tensors, as (name, data, full shape, offset of the rectangle). index.json lists the pieces of all files. A
reader copies what overlaps with the rectangle that it asks for: every layout reads what any other wrote.

    step_000123.RUN_ID.tmp/rank_00000.safetensors   each rank writes its pieces,
    step_000123.RUN_ID.tmp/rank_00000.json          then their list: its part is complete
    step_000123.RUN_ID.tmp/index.json               rank 0, when the lists of all ranks are there
    step_000123/                                    the commit is a rename: complete, or absent

runtime/resume.py decides which tensors are saved, and saves while training goes on.
"""
import json
import math
import os
import re
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from interface.command_line import wrap, wrong_input
from interface.files import (
    check_schema,
    load_json,
    new_part,
    remove_folder,
    remove_parts,
    set_aside,
    sync,
    write_whole,
)
from interface.paths import meant_run
from interface.tensor_file import BLOCK, dtype_name, write_safetensors
from interface.terminal import one_line, printable, say

FORMAT = 2
HINT = "use an older step_N"
LEFT_BEHIND = re.compile(r"step_[0-9]+(\.[0-9a-z]+)?\.(tmp|del|old)")  # by a save or prune that was killed
# All that a save writes, and node_HOST.jsonl, which older ones wrote. A commit removes all lists of pieces.
OUR_FILES = re.compile(r"index\.json|failed|rank_[0-9]+\.(json|safetensors|part)|node_[\w.-]*\.jsonl")


# -----------------------------------------------------------------------------
# Writing

class Writers(NamedTuple):
    """The ranks that write a checkpoint together."""
    rank: int = 0           # this one
    size: int = 1           # the number of writers
    run_id: str = "0"       # a word that all of them share and no other run has, so that files of a run that
                            # was killed are never taken for a part of this one
    timeout: float = 600.0  # seconds that rank 0 waits for the parts of the others


ALONE = Writers()


def save(root, step, pieces, meta, writers=ALONE):
    """Write this rank's part of a checkpoint, and on rank 0 commit it. Return its directory.

    pieces: [(name, tensor, full shape, offset)]; over all ranks each element is there exactly once.
    meta: any JSON value; rank 0's is stored.
    No collective is called: rank 0 waits for the other ranks' files, so a dead rank prevents the commit, but
    hangs nobody.
    OSError: the disk is full or read-only. TimeoutError, an OSError: a rank's part did not come.
    """
    tmp = Path(root) / f"step_{step:06d}.{writers.run_id}.tmp"
    write_part(tmp, writers.rank, pieces)
    if writers.rank == 0:
        commit(tmp, step, meta, writers)
    return Path(root) / f"step_{step:06d}"


def write_part(tmp, rank, pieces):
    """Write this rank's pieces as rank_R.safetensors, then their list, rank_R.json, which ends the part."""
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / f"rank_{rank:05d}.json").unlink(missing_ok=True)  # of a save of this step that failed
    file = f"rank_{rank:05d}.safetensors"
    tensors = {}
    records = []
    for i, (name, tensor, full, offset) in enumerate(pieces):
        key = name if tuple(tensor.shape) == tuple(full) else f"{name}#{i}"
        tensors[key] = tensor
        records.append([name, key, dtype_name(tensor), list(full), list(offset), list(tensor.shape)])
    part = {"file": file if tensors else None, "records": records}
    if tensors:
        part["bytes"], part["crc32"] = write_safetensors(tmp / file, tensors)
    with new_part(tmp / f"rank_{rank:05d}.json") as path:
        path.write_text(json.dumps(part))


def commit(tmp, step, meta, writers, stopped=None):
    """Wait for the parts of all ranks, write the index, rename the directory.

    stopped: a function that says whether a part will never come.
    TimeoutError: parts are missing.
    """
    parts = wait_for_parts(tmp, writers, stopped)
    tensors = {}
    for part in parts:
        for name, key, dtype, full, offset, size in part["records"]:
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": full, "pieces": []})
            entry["pieces"].append({"file": part["file"], "key": key, "offset": offset, "size": size})
    files = {part["file"]: {"bytes": part["bytes"], "crc32": part["crc32"]} for part in parts if part["file"]}
    index = {"format": FORMAT, "step": step, "meta": meta, "files": files, "tensors": tensors}
    body = json.dumps(index, sort_keys=True)
    write_whole(tmp / "index.json", json.dumps({"crc32": zlib.crc32(body.encode()), **index}, sort_keys=True))
    for path in list(tmp.glob("rank_*.json")):
        path.unlink()
    sync(tmp)
    rename_to_final(tmp, tmp.with_name(f"step_{step:06d}"))


def wait_for_parts(tmp, writers, stopped):
    """Return the parts of all ranks when their lists are in tmp. TimeoutError: some did not come."""
    parts = {}
    started = time.monotonic()
    while True:
        began = time.monotonic()
        there = set(os.listdir(tmp))
        for rank in range(writers.size):
            if rank not in parts and f"rank_{rank:05d}.json" in there:
                parts[rank] = load_json(tmp / f"rank_{rank:05d}.json")
        missing = [rank for rank in range(writers.size) if rank not in parts]
        if not missing:
            return [parts[rank] for rank in range(writers.size)]
        waited = time.monotonic() - started
        gives_up = waited > writers.timeout or "failed" in there
        if gives_up or (stopped is not None and stopped()):
            names = ", ".join(f"rank_{rank:05d}" for rank in missing)
            raise TimeoutError(f"{tmp.name}: no part from {names} after {waited:.0f} s; not committed")
        # On a disk that hundreds of hosts share, a look is work: it takes a tenth of the time at most.
        time.sleep(max(0.005 if waited < 1 else 0.05, 9 * (time.monotonic() - began)))


def rename_to_final(tmp, final):
    """Commit: rename tmp. If this step was saved before, the old directory is kept until the new one is
    there."""
    backup = final.with_name(final.name + ".old")
    if final.exists():
        discard(backup)
        os.rename(final, backup)
    try:
        os.rename(tmp, final)
    except OSError:
        if backup.exists():
            os.rename(backup, final)
        raise
    sync(final.parent)
    discard(backup)


def discard(folder):
    """Delete the directory of a checkpoint. What is not ours in it stays."""
    with suppress(OSError):  # it cannot be deleted now: recover() tries again
        remove_folder(folder, OUR_FILES)


def prune(root, keep, best=None):
    """Delete all checkpoints under root except the `keep` newest and that of step `best`."""
    for old in steps(root)[keep:]:
        if step_of(old) == best:
            continue
        doomed = old.with_name(old.name + ".del")  # so that a half-deleted directory never has a valid name
        discard(doomed)
        if not doomed.exists():  # it keeps somebody's files of an earlier time: then this one stays, too
            os.rename(old, doomed)
            discard(doomed)


def recover(root):
    """Repair what a killed save or prune left behind.

    Call it on one rank, before any rank saves. Files and directories with other names stay, also within
    these directories. Of a symbolic link, only the link is deleted.
    """
    remove_parts(root)
    left = [path for path in Path(root).glob("step_*") if LEFT_BEHIND.fullmatch(path.name) and path.is_dir()]
    for path in left:
        if path.suffix == ".old" and not path.with_suffix("").exists():
            os.rename(path, path.with_suffix(""))  # killed between the two renames of a commit
        elif path.is_symlink():
            path.unlink()
        else:
            discard(path)


def archive_later(root, step):
    """Rename the checkpoints that are newer than `step`, where the run resumes. Return their new names.

    So neither --resume auto nor --keep counts them.
    """
    moved = []
    for path in steps(root):
        if step_of(path) <= step:
            continue
        moved.append(set_aside(path, f"{path.name}.aside").name)
    return moved


# -----------------------------------------------------------------------------
# Finding and verifying

def steps(root):
    """Return the paths of the committed checkpoints under root, newest first.

    check() says whether they are sound.
    """
    found = (path for path in Path(root).glob("step_*")
             if re.fullmatch("step_[0-9]+", path.name) and path.is_dir())
    return sorted(found, key=step_of, reverse=True)


def step_of(path):
    """Return the step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def read_index(path, patience=0.0):
    """Return the index of the checkpoint at path.

    patience: seconds to wait for a directory that another node has just committed (NFS).
    FileNotFoundError, ValueError: the checkpoint is missing or damaged. The message says what to do.
    """
    path = Path(path)
    wait_for_folder(path, patience)
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint {path}, a step_N in a run; {meant_run(path)}")
    try:
        index = load_json(path / "index.json")
        check_index(index)
    except (OSError, ValueError, RecursionError) as e:
        if not path.name.startswith("step_") and not (path / "index.json").exists():
            raise ValueError(f"{path} holds no checkpoint, a step_N; {meant_run(path)}") from None
        raise ValueError(f"checkpoint {path} has no readable index.json: {e}; {HINT}") from None
    return index


def wait_for_folder(path, patience):
    """Wait, `patience` seconds at most, for a directory that another node has just committed."""
    until = time.monotonic() + patience
    while not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.1)


def check_index(index):
    """Raise ValueError unless the content of an index.json is sound. Remove the crc32 from it."""
    check_schema(index, {"format": int}, "index.json")
    if index["format"] != FORMAT:
        raise ValueError(f"it has format {index['format']}, this code reads {FORMAT}; read it with the "
                         "code that wrote it")
    crc = index.pop("crc32", None)
    if zlib.crc32(json.dumps(index, sort_keys=True).encode()) != crc:
        raise ValueError("index.json differs from its crc32, it was damaged")
    check_schema(index, {"step": int, "meta": dict, "files": dict, "tensors": dict}, "index.json")
    for name, tensor in index["tensors"].items():
        left = math.prod(tensor["shape"]) - sum(math.prod(piece["size"]) for piece in tensor["pieces"])
        if left:
            raise ValueError(f"the pieces of {name} lack {left} of its elements")
        if pieces_overlap(tensor["pieces"]):
            raise ValueError(f"two pieces of {name} overlap")


def pieces_overlap(pieces):
    """Whether two rectangles of a tensor have an element in common.

    Together with the sum of their sizes this says that they cover the tensor: no gap, nothing twice.
    """
    not_empty = [piece for piece in pieces if math.prod(piece["size"])]
    ordered = sorted(not_empty, key=lambda piece: piece["offset"])
    under_way = []  # pieces whose rows go on below the first row of the piece at hand
    for piece in ordered:
        if not piece["offset"]:
            return len(ordered) > 1  # a scalar
        row = piece["offset"][0]
        under_way = [other for other in under_way if other["offset"][0] + other["size"][0] > row]
        for other in under_way:
            if overlap(piece["offset"], piece["size"], other["offset"], other["size"]):
                return True
        under_way.append(piece)
    return False


def check(path, rank=0, size=1, patience=0.0):
    """Verify the sizes and the checksums of every size-th file. Return the index.

    Together, `size` ranks verify all files. ValueError: what is damaged.
    """
    index = read_index(path, patience)
    check_files(path, index["files"], rank, size)
    return index


def check_files(path, files, rank=0, size=1):
    """Verify every size-th of the files, which are those of an index. ValueError: what is damaged."""
    for name in sorted(files)[rank::size]:
        wrong = damage_of_file(Path(path, name), files[name])
        if wrong:
            raise ValueError(f"checkpoint {path}: {name} {wrong}; {HINT}")


def damage_of_file(file, want):
    """Return what is wrong with a file that should be as `want` says, or ""."""
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != want["bytes"]:
        return f"has {file.stat().st_size} bytes, index.json says {want['bytes']}"
    if _crc(file) != want["crc32"]:
        return "differs from its crc32, it was damaged"
    return ""


def _crc(path):
    crc = 0
    with open(path, "rb", buffering=0) as f:
        while block := f.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def damage(path):
    """Return what check() finds wrong with the checkpoint, or None."""
    try:
        check(path)
    except (ValueError, OSError) as e:
        return one_line(e)
    return None


def newest(root, say=say):
    """Return the newest sound checkpoint under root, or None. Say what is wrong with newer ones."""
    for path in steps(root):
        wrong = damage(path)
        if wrong is None:
            return path
        if not path.exists():  # the run that goes on has removed it (--keep): another one is there now
            return newest(root, say)
        say(wrong)
    return None


# -----------------------------------------------------------------------------
# Reading

class Reader:
    """A checkpoint of which any rectangle of any tensor can be read."""

    def __init__(self, path, index=None):
        self.path = Path(path)
        self.index = index or read_index(path)
        self.handles = {}  # {file name: the open file}

    def open_all(self):
        """Open all files, so that they can be read also after somebody removed them. Return the Reader."""
        for file in self.index["files"]:
            self._open(file)
        return self

    def _open(self, file):
        from safetensors import SafetensorError, safe_open
        if file not in self.handles:
            try:
                self.handles[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as e:
                raise ValueError(f"checkpoint {self.path}: {file} is damaged ({e}); {HINT}") from None
        return self.handles[file]

    def fill(self, name, out, full, offset):
        """Copy into out the rectangle of its shape at offset of tensor `name`, whose full shape is `full`.

        ValueError: there is no such tensor, it has another shape, or elements are missing.
        """
        entry = self.index["tensors"].get(name)
        if entry is None:
            raise ValueError(f"checkpoint {self.path} holds no {name}; it was written by another model")
        if list(full) != entry["shape"]:
            raise ValueError(f"checkpoint {self.path}: {name} is {tuple(entry['shape'])} there, {tuple(full)}"
                             " in this model; give the flags of the run that wrote it")
        copied = 0
        for piece in entry["pieces"]:
            both = overlap(offset, out.shape, piece["offset"], piece["size"])
            if both is None:
                continue
            here, there = both
            source = self._read(piece["file"], piece["key"], there)
            target = out[here] if here else out  # a scalar has no dimension to cut
            target.copy_(source)
            copied += source.numel()
        if copied != out.numel():
            raise ValueError(f"checkpoint {self.path}: {name} covers {copied} of {out.numel()} elements; "
                             f"{HINT}")

    def check_finite(self, name, weight):
        """Raise ValueError if a weight that was read, the tensor `name`, holds nan or infinity."""
        if not is_finite(weight):
            raise ValueError(f"checkpoint {self.path}: {name} holds nan or infinite weights; {HINT}")

    def blocks(self, name, limit=1 << 24):
        """Yield (first index, block) for a tensor's blocks of whole rows, of about `limit` elements each."""
        import torch
        entry = self.index["tensors"][name]
        full = entry["shape"]
        dtype = getattr(torch, entry["dtype"])
        if not full:
            block = torch.empty([], dtype=dtype)
            self.fill(name, block, full, [])
            yield 0, block
            return
        row = math.prod(full[1:])
        rows = full[0]
        if row > 0 and limit != math.inf:
            rows = max(1, limit // row)
        for i in range(0, full[0], max(1, rows)):
            block = torch.empty([min(rows, full[0] - i), *full[1:]], dtype=dtype)
            self.fill(name, block, full, [i] + [0] * (len(full) - 1))
            yield i * row, block

    def _read(self, file, key, where):
        from safetensors import SafetensorError
        handle = self._open(file)
        damaged = f"checkpoint {self.path}: {file} is damaged"
        try:
            got = handle.get_slice(key)[where] if where else handle.get_tensor(key)
        except (SafetensorError, OSError, IndexError, ValueError) as e:
            raise ValueError(f"{damaged} ({e}); {HINT}") from None
        if list(got.shape) != [s.stop - s.start for s in where]:
            raise ValueError(f"{damaged} ({key} is {tuple(got.shape)} there); {HINT}")
        return got


def is_finite(tensor):
    """Whether a tensor holds neither nan nor infinity; in one pass, without a copy."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # nan if one element is
    return math.isfinite(low) and math.isfinite(high)


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


def load(path, requested, index=None, others=()):
    """Fill tensors in place.

    requested: [(name, tensor, full shape, offset)], this rank's rectangles.
    others: names of tensors that other ranks ask for, or that are left out on purpose.
    ValueError: a name is missing, a full shape differs, elements are missing, a weight is nan or infinite, or
        the checkpoint has a tensor that no rank asks for.
    """
    reader = Reader(path, index)
    for name, out, full, offset in requested:
        reader.fill(name, out, full, offset)
        if "/" not in name:  # no moment of the optimizer
            reader.check_finite(name, out)
    names = {name for name, *_ in requested}
    unasked = sorted(reader.index["tensors"].keys() - names - set(others))
    if unasked:
        more = f" and {len(unasked) - 1} more" if len(unasked) > 1 else ""
        raise ValueError(f"checkpoint {path} holds {unasked[0]}{more}, for which this model has no place; it "
                         "was written by another model: give the flags of the run that wrote it")


def full_tensors(path):
    """Return {name: tensor at full size}, assembled from all pieces."""
    reader = Reader(path)
    out = {}
    for name in reader.index["tensors"]:
        for _, block in reader.blocks(name, math.inf):
            out[name] = block
    return out


# -----------------------------------------------------------------------------
# The command line

def show(path):
    """Say which counters and tensors a checkpoint has."""
    index = check(path)
    megabytes = sum(file["bytes"] for file in index["files"].values()) / 1e6
    say(printable(f"{path}: step {index['step']}, {len(index['tensors'])} tensors in {len(index['files'])} "
                  f"files, {megabytes:.1f} MB, all checksums right"))
    counters = {key: value for key, value in index["meta"].items() if not isinstance(value, dict)}
    say(printable("  " + " ".join(f"{key}={str(value)[:80]}" for key, value in counters.items())))
    for name, entry in sorted(index["tensors"].items()):
        say(printable(f"  {name:45} {entry['dtype']:8} {tuple(entry['shape'])!s:16} "
                      f"{len(entry['pieces'])} piece(s)"))


def diff(path_a, path_b, say=say):
    """Say which tensors and counters differ, and by how much. Return the number of differences.

    Layouts may differ; tensors are read block by block. Other flags or another number of ranks do not count.
    """
    a = read_newest(path_a, open_checked)
    b = read_newest(path_b, open_checked)
    found = 0
    meta_a = a.index["meta"]
    meta_b = b.index["meta"]
    for key in sorted(meta_a.keys() | meta_b.keys()):
        x = meta_a.get(key, "absent")
        y = meta_b.get(key, "absent")
        if x != y:
            if isinstance(x, dict) and isinstance(y, dict):
                x, y = ({k: values[k] for k in values if x.get(k) != y.get(k)} for values in (x, y))
            found += key not in ("world", "flags", "best")
            say(printable(f"  meta {key}: {str(x)[:80]} -> {str(y)[:80]}"))
    tensors = a.index["tensors"]
    for name in sorted(tensors.keys() | b.index["tensors"].keys()):
        text = difference(a, b, name)
        if text:
            found += 1
            say(printable(f"  {name:45} {text}"))
    say(f"{found} differences" if found else f"equal: all {len(tensors)} tensors, step {a.index['step']}")
    return found


def difference(a, b, name):
    """Return in words how a tensor of two Readers differs, or "". -0.0 and 0.0 differ; NaN equals NaN."""
    x = a.index["tensors"].get(name)
    y = b.index["tensors"].get(name)
    if x is None or y is None:
        return f"only in {b.path if x is None else a.path}"
    if x["shape"] != y["shape"]:
        return f"shape {tuple(x['shape'])} -> {tuple(y['shape'])}"
    said = []
    if x["dtype"] != y["dtype"]:
        said.append(f"{x['dtype']} -> {y['dtype']}")
    count = 0
    most = 0.0
    for (_, p), (_, q) in zip(a.blocks(name), b.blocks(name), strict=True):
        p = p.double()
        q = q.double()
        apart = ((p != q) | (p.signbit() != q.signbit())) & ~(p.isnan() & q.isnan())
        if apart.any():
            count += int(apart.sum())
            most = max(most, (p - q).abs().nan_to_num(math.inf)[apart].max().item())
    if count:
        said.append(f"{count} of {math.prod(x['shape'])} elements, max abs {most:.3g}")
    return ", ".join(said)


def open_checked(path):
    """Return the Reader of a sound checkpoint. Its files are open, so it is read also if it is removed."""
    return Reader(path, check(path)).open_all()


def read_newest(root, read):
    """Return read(path) of root if it is a checkpoint or holds none, else of the newest one under root.

    A run that goes on may remove it (--keep) while it is read: then the newest one of that time is read.
    """
    path = Path(root)
    if not (path / "index.json").exists():
        path = next(iter(steps(root)), path)
    try:
        return read(path)
    except (ValueError, OSError):
        newer = next(iter(steps(root)), path)
        if newer == path or path.exists():
            raise
        return read(newer)


@wrong_input()
def main(argv):
    """Run show A, or diff A B. Return the exit code: 1 if diff found differences, else 0."""
    if {"-h", "--help"} & set(argv):
        print(wrap(__doc__))
        return 0
    command, *paths = argv or [""]
    if (command, len(paths)) not in (("show", 1), ("diff", 2)):
        raise ValueError("usage: python checkpoint.py show A, or diff A B; --help says more")
    if command == "show":
        read_newest(paths[0], show)
        return 0
    return 1 if diff(*paths) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

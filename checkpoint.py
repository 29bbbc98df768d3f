"""Checkpoints: step_000123/ has one safetensors file per writing rank and index.json. No pickle; no rank ever
needs the memory for a whole tensor.

    python checkpoint.py show A       what is in A: a step_N directory, or a run, then its newest
    python checkpoint.py diff A B     which tensors differ, and by how much

Every tensor has one global name and one full shape, whatever the layout. A rank writes its shards: rectangles
of tensors, as (name, data, full shape, offset of the rectangle). index.json lists the shards of all files. A
reader copies what overlaps with the rectangle that it asks for: every layout reads what any other wrote.

    step_000123.RUN_ID.tmp/rank_00000.safetensors   each rank writes its shards,
    step_000123.RUN_ID.tmp/rank_00000.json          then their list: its part is complete
    step_000123.RUN_ID.tmp/index.json               rank 0, when the lists of all ranks are there
    step_000123/                                    the commit is a rename: complete, or absent

runtime/resume.py decides which tensors are saved, and saves while training goes on.
"""
import json
import math
import os
import re
import reprlib
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Literal

from interface.command_line import one_line, printable, wrap, wrong_input
from interface.files import folded, sync, write_whole
from interface.schema import Range, check_schema, load_json

FORMAT = 2
SAFETENSORS_DTYPE = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64",
                     "int32": "I32", "uint8": "U8", "bool": "BOOL"}  # by torch's names
BLOCK = 1 << 24  # bytes written, or read, at once
HINT = "use an older step_N"
COUNT, SIZES = Range(0, 10**12), [Range(0, 2**48)]
PIECE = {"file": str, "key": str, "offset": SIZES, "size": SIZES}
INDEX = {"step": COUNT, "meta": dict, "files": {"*": {"bytes": Range(), "crc32": Range()}},
         "tensors": {"*": {"dtype": Literal[tuple(SAFETENSORS_DTYPE)], "shape": SIZES, "pieces": [PIECE]}}}
RUN = {"step": COUNT, "samples": Range(), "skipped": COUNT, "nan_steps": COUNT, "world": COUNT, "seed": int,
       "adam_t": COUNT, "data": str, "skip": [COUNT], "window?": [[float, float]], "streak?": COUNT,
       "shape": {"n_experts": int, "bias": bool}, "best?": {"step?": COUNT, "val_loss?": float}}  # of a run
LEFT_BEHIND = re.compile(r"step_[0-9]+(\.[0-9a-z]+)?\.(tmp|del|old)")  # of a save or prune that was killed


# -----------------------------------------------------------------------------
# writing

def save(root, step, rank, writers, shards, meta, keep=0, timeout=600.0, run_id="0"):
    """Write this rank's part; on rank 0 also commit -> the directory, when that is done.

    shards: [(name, tensor, full shape, offset)]; over all ranks each element is there exactly once. writers:
    number of ranks that call this. meta: any JSON; rank 0's is stored. keep: newest checkpoints to keep
    afterwards, 0 for all. run_id: a word that all ranks share and no other run has, so that files of a run
    that was killed are never taken for a part of this one.
    No collective is called: rank 0 waits for the other ranks' files, so a dead rank means no commit, no hang.
    Errors: OSError (disk full, read-only), TimeoutError (an OSError) when a rank's part did not come.
    """
    tmp = Path(root) / f"step_{step:06d}.{run_id}.tmp"
    write_part(tmp, rank, shards)
    if rank == 0:
        commit(tmp, step, writers, meta, timeout)
        if keep:
            prune(root, keep)
    return Path(root) / f"step_{step:06d}"


def write_part(tmp, rank, shards):
    """Write this rank's shards as rank_R.safetensors, then their list as rank_R.json: the part is done."""
    tmp.mkdir(parents=True, exist_ok=True)
    file = f"rank_{rank:05d}.safetensors"
    tensors, records = {}, []
    for i, (name, tensor, full, offset) in enumerate(shards):
        key = name if tuple(tensor.shape) == tuple(full) else f"{name}#{i}"
        tensors[key] = tensor
        records.append([name, key, str(tensor.dtype)[6:], list(full), list(offset), list(tensor.shape)])
    part = {"file": file if tensors else None, "records": records}
    if tensors:
        part["bytes"], part["crc32"] = write_safetensors(tmp / file, tensors)
    write_whole(tmp / f"rank_{rank:05d}.json", json.dumps(part))


def write_safetensors(path, tensors, metadata=None):
    """Write {key: tensor} and metadata {str: str} -> (bytes, crc32). Unlike the library's function, this one
    writes block by block without a copy, computes the checksum on the way, and releases the interpreter's
    lock, so that training goes on beside it."""
    import torch
    tensors = dict(sorted(tensors.items(), key=lambda kt: -kt[1].element_size()))  # widest first: all aligned
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for key, t in tensors.items():
        n = t.numel() * t.element_size()
        header[key] = {"dtype": SAFETENSORS_DTYPE[str(t.dtype)[6:]], "shape": list(t.shape),
                       "data_offsets": [at, at + n]}
        at += n
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    crc = 0
    with open(path, "wb", buffering=0) as f:
        def put(block):
            nonlocal crc
            crc = zlib.crc32(block, crc)
            while len(block):  # an unbuffered write may write a part only
                block = block[f.write(block):]
        put(memoryview(len(head).to_bytes(8, "little") + head))
        for t in tensors.values():
            data = memoryview(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            for i in range(0, len(data), BLOCK):
                put(data[i:i + BLOCK])
        os.fsync(f.fileno())
    return 8 + len(head) + at, crc


def commit(tmp, step, writers, meta, timeout=600.0, stopped=lambda: False):
    """Wait for the parts of all ranks, write the index, rename the directory. stopped(): true if a part will
    not come any more. TimeoutError: parts are missing."""
    lists = {f"rank_{r:05d}.json" for r in range(writers)}
    started = time.monotonic()
    while missing := lists - set(os.listdir(tmp)):  # not exists(): over NFS it may answer from a cache
        waited = time.monotonic() - started
        if waited > timeout or stopped() or (tmp / "failed").exists():
            names = ", ".join(sorted(m[:-5] for m in missing))
            raise TimeoutError(f"{tmp.name}: no part from {names} after {waited:.0f} s; not committed")
        time.sleep(0.005 if waited < 1 else 0.05)
    parts = [json.loads((tmp / name).read_text()) for name in sorted(lists)]
    tensors = {}
    for p in parts:
        for name, key, dtype, full, offset, size in p["records"]:
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": full, "pieces": []})
            entry["pieces"].append({"file": p["file"], "key": key, "offset": offset, "size": size})
    files = {p["file"]: {"bytes": p["bytes"], "crc32": p["crc32"]} for p in parts if p["file"]}
    index = {"format": FORMAT, "step": step, "meta": meta, "files": files, "tensors": tensors}
    body = json.dumps(index, sort_keys=True)
    write_whole(tmp / "index.json", f'{{"crc32": {zlib.crc32(body.encode())}, {body[1:]}')
    for name in lists:
        (tmp / name).unlink()
    sync(tmp)
    final, backup = (tmp.with_name(f"step_{step:06d}{end}") for end in ("", ".old"))
    if final.exists():  # this step was saved before: keep the old one until the new one is there
        shutil.rmtree(backup, ignore_errors=True)
        os.rename(final, backup)
    try:
        os.rename(tmp, final)  # the commit
    except OSError:
        if backup.exists():
            os.rename(backup, final)
        raise
    sync(final.parent)
    shutil.rmtree(backup, ignore_errors=True)


def prune(root, keep, best=None):
    """Delete all checkpoints under root except the `keep` newest and that of step `best`."""
    for old in (p for p in steps(root)[keep:] if int(p.name[5:]) != best):
        doomed = old.with_name(old.name + ".del")  # so that a half-deleted directory never has a valid name
        os.rename(old, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def recover(root):
    """Repair what a killed save or prune left behind. Call it on one rank, before any rank saves. Files and
    directories with other names than ours stay; of a symbolic link only the link goes."""
    for path in [p for p in Path(root).glob("step_*") if LEFT_BEHIND.fullmatch(p.name) and p.is_dir()]:
        if path.suffix == ".old" and not path.with_suffix("").exists():
            os.rename(path, path.with_suffix(""))  # killed between the two renames of a commit
        elif path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def archive_later(root, step):
    """Rename the checkpoints of steps after `step`, from which the run resumes: neither --resume auto nor
    --keep must count them. -> their new names."""
    moved = []
    for path in (p for p in steps(root) if int(p.name[5:]) > step):
        names = (path.with_name(f"{path.name}.aside{i or ''}") for i in range(10**6))
        new = next(p for p in names if not p.exists())
        os.rename(path, new)
        moved.append(new.name)
    return moved


# -----------------------------------------------------------------------------
# reading

def steps(root):
    """-> paths of the committed checkpoints under root, newest first. check() says whether they are sound."""
    found = (p for p in Path(root).glob("step_*") if re.fullmatch("step_[0-9]+", p.name) and p.is_dir())
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def read_index(path, patience=0.0):
    """-> the index of the checkpoint at path. patience: seconds to wait for a directory that another node has
    just committed (NFS). FileNotFoundError, ValueError: it is missing or damaged, and what to do."""
    path, until = Path(path), time.monotonic() + patience
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint {path}; give the directory of a run, or a step_N in it")
    try:
        index = load_json(path / "index.json")
        check_schema(index, {"format": int}, "index.json")
        if index["format"] != FORMAT:
            raise ValueError(f"it has format {index['format']}, this code reads {FORMAT}; read it with the "
                             "code that wrote it")
        crc = index.pop("crc32", None)
        if zlib.crc32(json.dumps(index, sort_keys=True).encode()) != crc:
            raise ValueError("index.json differs from its crc32, it was damaged")
        check_schema(index, INDEX, "index.json")
        if "shape" in (meta := index["meta"]):
            check_schema(meta, RUN, "its meta")
            if meta.get("scaler") is not None:
                check_schema(meta["scaler"], [float, int], "its meta", "scaler")
            if meta["step"] != index["step"]:
                raise ValueError(f"it is of step {index['step']}, its meta of step {meta['step']}")
        check_pieces(index)
    except (OSError, ValueError, RecursionError) as e:
        hint = "use python convert.py import for models of others" if any(path.glob("model*")) else HINT
        raise ValueError(f"checkpoint {path} has no readable index.json: {e}; {hint}") from None
    return index


def check_pieces(index):
    """ValueError unless every file is one of the directory, and the pieces of each tensor lie in it, are as
    large together as it is, and not larger than their files."""
    room = {name: f["bytes"] for name, f in index["files"].items()}
    if odd := next((name for name in room if not re.fullmatch(r"rank_[0-9]+\.safetensors", name)), None):
        raise ValueError(f"it names the file {odd!r}, no rank_R.safetensors")
    for name, t in index["tensors"].items():
        left = math.prod(t["shape"])
        for p in t["pieces"]:
            n, inside = math.prod(p["size"]), len(p["offset"]) == len(p["size"]) == len(t["shape"]) and all(
                o + s <= full for o, s, full in zip(p["offset"], p["size"], t["shape"], strict=True))
            room[p["file"]], left = room.get(p["file"], 0) - n, left - n
            if not inside or room[p["file"]] < 0:
                raise ValueError(f"a piece of {name} lies outside of the tensor or of {p['file']}")
        if left:
            raise ValueError(f"the pieces of {name} lack {left} of its elements")


def check(path, rank=0, size=1, patience=0.0):
    """Verify the sizes of all files and the checksums of every size-th one -> the index: `size` ranks verify
    all. ValueError: what is damaged."""
    index = read_index(path, patience)
    for i, (name, want) in enumerate(sorted(index["files"].items())):
        f, wrong = Path(path, name), ""
        if not f.is_file():
            wrong = "is missing"
        elif f.stat().st_size != want["bytes"]:
            wrong = f"has {f.stat().st_size} bytes, index.json says {want['bytes']}"
        elif i % size == rank and _crc(f) != want["crc32"]:
            wrong = "differs from its crc32, it was damaged"
        if wrong:
            raise ValueError(f"checkpoint {path}: {name} {wrong}; {HINT}")
    return index


def _crc(path):
    crc = 0
    with open(path, "rb", buffering=0) as f:
        while block := f.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def damage(path, rank=0, size=1):
    """-> what check() finds wrong with the checkpoint, or None. Ranks other than 0 wait for a directory that
    rank 0 sees already."""
    try:
        check(path, rank, size, patience=30.0 if rank else 0.0)
    except (ValueError, OSError) as e:
        return one_line(e)


def newest(root, say=print):
    """-> the newest sound checkpoint under root, or None. What is wrong with newer ones is said."""
    for path in steps(root):
        wrong = damage(path)
        if wrong is None:
            return path
        say(wrong)


class Reader:
    """A checkpoint of which any rectangle of any tensor can be read."""

    def __init__(self, path, index=None):
        self.path, self.index, self.handles = Path(path), index or read_index(path), {}

    def fill(self, name, out, full, offset):
        """Copy into out the rectangle of its shape at offset of tensor `name`, whose full shape is `full`.
        ValueError: there is no such tensor, it has another shape, or elements are missing."""
        entry = self.index["tensors"].get(name)
        if entry is None:
            raise ValueError(f"checkpoint {self.path} holds no {name}; it was written by another model")
        if list(full) != entry["shape"]:
            raise ValueError(f"checkpoint {self.path}: {name} is {tuple(entry['shape'])} there, {tuple(full)}"
                             " in this model; give the flags of the run that wrote it")
        copied = 0
        for shard in entry["pieces"]:
            begin, size = shard["offset"], shard["size"]
            low = [max(a, b) for a, b in zip(offset, begin, strict=True)]
            high = [min(a + s, b + t) for a, s, b, t in zip(offset, out.shape, begin, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            source = self._read(shard["file"], shard["key"], there)
            (out[here] if here else out).copy_(source)
            copied += source.numel()
        if copied != out.numel():
            raise ValueError(f"checkpoint {self.path}: {name} covers {copied} of {out.numel()} elements; "
                             f"{HINT}")

    def _read(self, file, key, where):
        from safetensors import SafetensorError, safe_open
        try:
            if file not in self.handles:
                self.handles[file] = safe_open(self.path / file, framework="pt")
            got = self.handles[file].get_slice(key)[where] if where else self.handles[file].get_tensor(key)
            if list(got.shape) != [s.stop - s.start for s in where]:
                raise OSError(f"{key} is {tuple(got.shape)} there")
            return got
        except (SafetensorError, OSError, IndexError, ValueError) as e:
            raise ValueError(f"checkpoint {self.path}: {file} is damaged ({e}); {HINT}") from None


def load(path, requested, index=None):
    """Fill tensors in place. requested: [(name, tensor, full shape, offset)], this rank's rectangles.
    ValueError: a name is missing, a full shape differs, or elements are missing."""
    reader = Reader(path, index)
    for name, out, full, offset in requested:
        reader.fill(name, out, full, offset)


def full_tensors(path):
    """-> {name: tensor at full size}, assembled from all shards."""
    reader = Reader(path)
    return {n: block for n in reader.index["tensors"] for _, block in _blocks(reader, n, math.inf)}


# -----------------------------------------------------------------------------
# the command line

def _blocks(reader, name, limit=1 << 24):
    """Read a tensor in blocks of whole rows, of about `limit` elements: yields (first index, block)."""
    import torch
    entry = reader.index["tensors"][name]
    full, dtype = entry["shape"], getattr(torch, entry["dtype"])
    row = math.prod(full[1:])
    rows = full[0] if not full or row == 0 or limit == math.inf else max(1, limit // row)
    for i in range(0, full[0] if full else 1, max(1, rows)):
        block = torch.empty([min(rows, full[0] - i), *full[1:]] if full else [], dtype=dtype)
        reader.fill(name, block, full, [i, *[0] * (len(full) - 1)] if full else [])
        yield i * row, block


def compare(a, b, name):
    """-> (number of elements that differ, largest absolute difference, the same relative to the largest |a|,
    index of the first), or None if all are equal. a, b: Readers; `name` has the same shape in both. -0.0 and
    0.0 differ; NaN equals NaN."""
    import torch
    count, most, top, first = 0, 0.0, 0.0, None
    for (at, x), (_, y) in zip(_blocks(a, name), _blocks(b, name), strict=True):
        x, y = x.reshape(-1).double(), y.reshape(-1).double()
        top = max(top, x.abs().nan_to_num(0.0).max().item())
        apart = ((x != y) | (x.signbit() != y.signbit())) & ~(x.isnan() & y.isnan())
        if apart.any():
            count += int(apart.sum())
            first = at + int(apart.to(torch.uint8).argmax()) if first is None else first
            most = max(most, (x - y).abs().nan_to_num(math.inf)[apart].max().item())
    if not count:
        return None
    where = torch.unravel_index(torch.tensor(first), a.index["tensors"][name]["shape"])
    return count, most, most / top if top else math.inf, tuple(int(i) for i in where)


def print_folded(text):
    print(folded(printable(text)))


def brief(value):
    """-> a value of the meta as text; of a long list, such as the losses of --skip-spikes, the first six."""
    short = reprlib.Repr()
    short.maxdict = short.maxstring = short.maxother = 1000
    return str(value) if isinstance(value, str) else short.repr(value)


def diff(path_a, path_b, say=print_folded):
    """Say which tensors and counters differ, and by how much -> number of differences. Layouts may differ;
    tensors are read block by block."""
    a, b = (Reader(p, check(p)) for p in (path_a, path_b))
    found = 0
    for key in sorted(a.index["meta"].keys() | b.index["meta"].keys()):
        x, y = (r.index["meta"].get(key, "absent") for r in (a, b))
        if x != y:
            if isinstance(x, dict) and isinstance(y, dict):
                apart = {k for k in x.keys() | y.keys() if x.get(k) != y.get(k)}
                x, y = ({k: v for k, v in sorted(d.items()) if k in apart} for d in (x, y))
            note = {"world": ", of the layout", "flags": ", of the run", "best": ", of the run"}.get(key, "")
            found += not note  # other flags or another number of ranks do not make it another model
            say(f"  meta {key}: {brief(x)} -> {brief(y)}{note}")
    names_a, names_b = a.index["tensors"], b.index["tensors"]
    for name in sorted(names_a.keys() | names_b.keys()):
        if name not in names_a or name not in names_b:
            text = f"only in {path_a if name in names_a else path_b}"
        elif names_a[name]["shape"] != names_b[name]["shape"]:
            text = f"shape {tuple(names_a[name]['shape'])} -> {tuple(names_b[name]['shape'])}"
        else:
            apart = compare(a, b, name)
            text = apart and "{} of {} elements, max abs {:.3g}, relative {:.3g}, first at {}".format(
                apart[0], math.prod(names_a[name]["shape"]), *apart[1:])
            if names_a[name]["dtype"] != names_b[name]["dtype"]:
                text = f"{names_a[name]['dtype']} -> {names_b[name]['dtype']}" + (f", {text}" if text else "")
        if text:
            found += 1
            say(f"  {name:40s} {text}")
    say(f"{found} differences" if found else f"equal: all {len(names_a)} tensors, step {a.index['step']}")
    return found


def show(path, say=print_folded):
    """Say what a checkpoint's counters and tensors are."""
    index = check(path)
    say(f"{path}: step {index['step']}, {len(index['tensors'])} tensors in {len(index['files'])} files, "
        f"{sum(f['bytes'] for f in index['files'].values()) / 1e6:.1f} MB, all checksums right")
    say("  " + " ".join(f"{k}={brief(v)}" for k, v in index["meta"].items() if not isinstance(v, dict)))
    for name, entry in sorted(index["tensors"].items()):
        say(f"  {name:48s} {entry['dtype']:8s} {tuple(entry['shape'])!s:20s} {len(entry['pieces'])} pieces")


@wrong_input()
def main(argv):
    """show A, or diff A B -> exit code: 1 if diff found differences, else 0."""
    if {"-h", "--help"} & set(argv):
        return print(wrap(__doc__))
    command, *paths = argv or [""]
    if (command, len(paths)) not in (("show", 1), ("diff", 2)):
        raise ValueError("usage: python checkpoint.py show A, or diff A B; --help says more")
    paths = [next(iter(steps(p)), p) if not (Path(p) / "index.json").exists() else p for p in paths]
    return int(bool({"show": show, "diff": diff}[command](*paths)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checkpoints: step_000123/ holds one safetensors file per writing rank and index.json. No pickle, no gather.

Every tensor has one global name and one full shape, whatever the layout. A rank writes the rectangular
pieces that it owns, as (name, where it begins, its data); index.json lists all pieces of all files. A reader
asks for any rectangle of any tensor and copies what overlaps, so every layout can read what every other
layout wrote.

    step_000123.TOKEN.tmp/rank_00000.safetensors, rank_00000.json   each rank writes its own, then says so
    step_000123.TOKEN.tmp/index.json                                rank 0, when all have
    step_000123/                                                    the commit: whole or not there

This file is the format: writing a part, committing, checking, reading, comparing. saver.py saves while
training goes on.
"""
import json
import math
import os
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path

FORMAT = 2
KINDS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64",
         "int32": "I32", "uint8": "U8", "bool": "BOOL"}  # torch's names -> safetensors'
BLOCK = 1 << 24  # bytes written, or read, at once
OLDER = "use an older step_N"


# -----------------------------------------------------------------------------
# pieces

def rectangles(shape, a, b):
    """Cut elements a..b-1 of a row-major tensor into rectangles -> [(offset, size)], at most 2 ndim - 1.
    A ZeRO slice is such a run: it begins and ends in the middle of a row."""
    if a >= b:
        return []
    if len(shape) == 0:
        return [((), ())]
    row = 1
    for s in shape[1:]:
        row *= s
    out = []
    first, last = -(-a // row), b // row  # whole rows
    if first > last:  # inside one row
        last = first = first - 1
        return [((first, *o), (1, *s)) for o, s in rectangles(shape[1:], a - first * row, b - first * row)]
    if a < first * row:
        out += [((first - 1, *o), (1, *s)) for o, s in rectangles(shape[1:], a - (first - 1) * row, row)]
    if first < last:
        out.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < b:
        out += [((last, *o), (1, *s)) for o, s in rectangles(shape[1:], 0, b - last * row)]
    return out


# -----------------------------------------------------------------------------
# writing

def save(root, step, rank, writers, pieces, meta, keep=0, timeout=600.0, token="0"):
    """Write this rank's part; on rank 0 also commit. Returns when that is done -> the directory.

    pieces: [(name, tensor, full shape, offset)], each element of the model on exactly one rank. writers:
    number of ranks that call this. meta: JSON-able, rank 0's is kept. keep: newest checkpoints left
    afterwards, 0 = all. token: one word on all ranks of a run and on no other run's: what a dead run left is
    never a part of this one.
    No collective: rank 0 waits for the other ranks' files, so a dead rank means no commit, not a hang.
    Errors: OSError (disk full, read-only), TimeoutError (an OSError) when a rank's part never came.
    """
    tmp = Path(root) / f"step_{step:06d}.{token}.tmp"
    write_part(tmp, rank, pieces)
    if rank == 0:
        commit(tmp, step, writers, meta, timeout)
        if keep:
            prune(root, keep)
    return Path(root) / f"step_{step:06d}"


def write_part(tmp, rank, pieces):
    """This rank's tensors as rank_R.safetensors, and rank_R.json that says they are complete."""
    tmp.mkdir(parents=True, exist_ok=True)
    file = f"rank_{rank:05d}.safetensors"
    tensors, records = {}, []
    for i, (name, tensor, full, offset) in enumerate(pieces):
        key = name if tuple(tensor.shape) == tuple(full) else f"{name}#{i}"
        tensors[key] = tensor
        records.append([name, key, str(tensor.dtype)[6:], list(full), list(offset), list(tensor.shape)])
    part = {"file": None, "records": records}
    if tensors:
        size, crc = write_safetensors(tmp / file, tensors)
        part = {"file": file, "records": records, "bytes": size, "crc32": crc}
    _write(tmp / f"rank_{rank:05d}.json", json.dumps(part))


def write_safetensors(path, tensors):
    """{key: tensor} -> (bytes, crc32). Written here and not by the library: block by block from where the
    tensor lies, with the checksum on the way, and without the interpreter's lock, so that training goes on
    beside it."""
    import torch
    tensors = dict(sorted(tensors.items(), key=lambda kt: -kt[1].element_size()))  # widest first: aligned
    header, at = {}, 0
    for key, t in tensors.items():
        n = t.numel() * t.element_size()
        header[key] = {"dtype": KINDS[str(t.dtype)[6:]], "shape": list(t.shape), "data_offsets": [at, at + n]}
        at += n
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    crc = 0
    with open(path, "wb", buffering=0) as f:
        def put(block):
            nonlocal crc
            crc = zlib.crc32(block, crc)
            while len(block):  # an unbuffered write may take a part only
                block = block[f.write(block):]
        put(memoryview(len(head).to_bytes(8, "little") + head))
        for t in tensors.values():
            data = memoryview(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            for i in range(0, len(data), BLOCK):
                put(data[i:i + BLOCK])
        os.fsync(f.fileno())
    return 8 + len(head) + at, crc


def commit(tmp, step, writers, meta, timeout=600.0, stopped=lambda: False):
    """Wait for all ranks' parts, write the index, rename. stopped(): a part will not come, give up."""
    wanted = {f"rank_{r:05d}.json" for r in range(writers)}
    began = time.monotonic()
    while missing := wanted - set(os.listdir(tmp)):  # over NFS exists() may answer from memory
        waited = time.monotonic() - began
        if waited > timeout or stopped() or (tmp / "failed").exists():
            names = ", ".join(sorted(m[:-5] for m in missing))
            raise TimeoutError(f"{tmp.name}: no part from {names} after {waited:.0f} s; not committed")
        time.sleep(0.005 if waited < 1 else 0.05)
    parts = [json.loads((tmp / name).read_text()) for name in sorted(wanted)]
    tensors = {}
    for p in parts:
        for name, key, dtype, full, offset, size in p["records"]:
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": full, "pieces": []})
            entry["pieces"].append({"file": p["file"], "key": key, "offset": offset, "size": size})
    files = {p["file"]: {"bytes": p["bytes"], "crc32": p["crc32"]} for p in parts if p["file"]}
    index = {"format": FORMAT, "step": step, "meta": meta, "files": files, "tensors": tensors}
    body = json.dumps(index, sort_keys=True)
    _write(tmp / "index.json", f'{{"crc32": {zlib.crc32(body.encode())}, {body[1:]}')
    for name in wanted:
        (tmp / name).unlink()
    _sync(tmp)
    final = tmp.with_name(f"step_{step:06d}")
    aside = final.with_name(final.name + ".old")
    if final.exists():  # the same step again: the old one leaves when the new one is there
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(final, aside)
    try:
        os.rename(tmp, final)  # the commit
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def prune(root, keep):
    for old in steps(root)[keep:]:
        gone = old.with_name(old.name + ".del")  # never a half-deleted directory under a valid name
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


def clean(root):
    """Mend what a killed save or prune left behind. Call on one rank, before any rank saves."""
    for old in Path(root).glob("step_*.old"):  # killed between the two renames of a commit
        if not old.with_suffix("").exists():
            os.rename(old, old.with_suffix(""))
    for left in [p for kind in ("tmp", "del", "old") for p in Path(root).glob(f"step_*.{kind}")]:
        shutil.rmtree(left)


def set_aside(root, step):
    """Checkpoints after `step` belong to a run that nobody goes on with: rename them, so that neither
    --resume auto nor --keep sees them. -> their new names."""
    moved = []
    for path in steps(root):
        if int(path.name[5:]) > step:
            names = (path.with_name(f"{path.name}.aside{i or ''}") for i in range(10**6))
            new = next(p for p in names if not p.exists())
            os.rename(path, new)
            moved.append(new.name)
    return moved


def _write(path, text):
    aside = path.with_suffix(".part")
    aside.write_text(text)
    _sync(aside)
    os.replace(aside, path)


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -----------------------------------------------------------------------------
# reading

def steps(root):
    """Committed checkpoints under root, newest first (by name; whether they are sound, check() says)."""
    return sorted((p for p in Path(root).glob("step_*") if p.is_dir() and p.name[5:].isdigit()),
                  key=lambda p: int(p.name[5:]), reverse=True)


def read_index(path, patience=0.0):
    """-> the index. patience: seconds to wait for a directory that another node has just committed (NFS)."""
    path, until = Path(path), time.monotonic() + patience
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint {path}; give a step_N directory, or --resume auto")
    try:
        index = json.loads((path / "index.json").read_text())
        crc = index.pop("crc32", None)
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise ValueError(f"checkpoint {path} has no readable index.json ({e}); {OLDER}") from None
    if index.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has format {index.get('format')}, this code reads {FORMAT}; "
                         "read it with the code that wrote it")
    if zlib.crc32(json.dumps(index, sort_keys=True).encode()) != crc:
        raise ValueError(f"checkpoint {path}: index.json differs from its crc32, it was damaged; {OLDER}")
    if missing := {"step", "meta", "files", "tensors"} - index.keys():
        raise ValueError(f"checkpoint {path}: index.json lacks {', '.join(sorted(missing))}; {OLDER}")
    return index


def check(path, rank=0, size=1, patience=0.0):
    """Sizes of all files, checksums of this rank's share of them -> index. ValueError: what is damaged."""
    path = Path(path)
    index = read_index(path, patience)
    for i, (name, want) in enumerate(sorted(index["files"].items())):
        f = path / name
        if not f.is_file():
            raise ValueError(f"checkpoint {path}: {name} is missing; {OLDER}")
        if f.stat().st_size != want["bytes"]:
            raise ValueError(f"checkpoint {path}: {name} has {f.stat().st_size} bytes, index.json says "
                             f"{want['bytes']}; {OLDER}")
        if i % size == rank and _crc(f) != want["crc32"]:
            raise ValueError(f"checkpoint {path}: {name} differs from its crc32, it was damaged; {OLDER}")
    return index


def _crc(path):
    crc = 0
    with open(path, "rb", buffering=0) as f:
        while block := f.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def fault(path, rank=0, size=1):
    """-> what is wrong with it, or None. For the rank of a run that waits for what another node wrote."""
    try:
        check(path, rank, size, patience=30.0 if rank else 0.0)
    except (ValueError, OSError) as e:
        return str(e)


def newest(root, say=print):
    """The newest sound checkpoint under root, or None. A damaged one is named, the one before it is tried."""
    for path in steps(root):
        wrong = fault(path)
        if wrong is None:
            return path
        say(wrong)


class Reader:
    """A checkpoint from which any rectangle of any tensor can be asked."""

    def __init__(self, path, index=None):
        self.path, self.index, self.handles = Path(path), index or read_index(path), {}

    def fill(self, name, out, full, offset):
        """Copy the rectangle at offset into out. ValueError: no such name, another full shape, a hole."""
        entry = self.index["tensors"].get(name)
        if entry is None:
            raise ValueError(f"checkpoint {self.path} holds no {name}; it was written by another model")
        if list(full) != entry["shape"]:
            raise ValueError(f"checkpoint {self.path}: {name} is {tuple(entry['shape'])} there, {tuple(full)}"
                             " in this model; give the flags of the run that wrote it")
        copied = 0
        for piece in entry["pieces"]:
            begin, size = piece["offset"], piece["size"]
            low = [max(a, b) for a, b in zip(offset, begin, strict=True)]
            high = [min(a + s, b + t) for a, s, b, t in zip(offset, out.shape, begin, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            source = self._read(piece["file"], piece["key"], there)
            (out[here] if here else out).copy_(source)
            copied += source.numel()
        if copied != out.numel():
            raise ValueError(f"checkpoint {self.path}: {name} covers {copied} of {out.numel()} elements; "
                             f"{OLDER}")

    def _read(self, file, key, where):
        from safetensors import SafetensorError, safe_open
        try:
            if file not in self.handles:
                self.handles[file] = safe_open(self.path / file, framework="pt")
            return self.handles[file].get_slice(key)[where] if where else self.handles[file].get_tensor(key)
        except (SafetensorError, OSError) as e:
            raise ValueError(f"checkpoint {self.path}: {file} is damaged ({e}); {OLDER}") from None


def load(path, wanted, index=None):
    """Fill tensors in place. wanted: [(name, tensor, full shape, offset)]: this rank's rectangles.
    Errors: ValueError when a name is missing, a full shape differs, or the pieces leave a hole."""
    reader = Reader(path, index)
    for name, out, full, offset in wanted:
        reader.fill(name, out, full, offset)


def full_tensors(path, names=None):
    """{name: whole tensor} as stored, assembled from all pieces (for one process: sampling, inspection)."""
    reader = Reader(path)
    return {n: block for n in names or reader.index["tensors"] for _, block in _blocks(reader, n, math.inf)}


# -----------------------------------------------------------------------------
# looking

def _blocks(reader, name, limit=1 << 24):
    """A tensor in blocks of whole rows, of about `limit` elements -> (index of the first element, block)."""
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
    """-> (elements that differ, largest absolute difference, that over the largest |a|, first differing
    index), or None where all are equal. a, b: Readers whose `name` has the same shape. -0.0 is not 0.0; NaN
    is NaN."""
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
    where = []
    for s in reversed(a.index["tensors"][name]["shape"]):
        first, i = divmod(first, s)
        where.append(i)
    return count, most, most / top if top else math.inf, tuple(reversed(where))


def diff(path_a, path_b, say=print):
    """Which tensors differ, and by how much -> number of differences. Any two layouts, a block at a time."""
    a, b = (Reader(p, check(p)) for p in (path_a, path_b))
    found = 0
    for key in sorted(a.index["meta"].keys() | b.index["meta"].keys()):
        x, y = (r.index["meta"].get(key, "absent") for r in (a, b))
        if x != y:
            note = ", of the layout" if key == "world" else ""
            found += not note  # another number of ranks is no other model
            say(f"  meta {key}: {x} -> {y}{note}")
    names_a, names_b = a.index["tensors"], b.index["tensors"]
    for name in sorted(names_a.keys() | names_b.keys()):
        if name not in names_a or name not in names_b:
            text = f"only in {path_a if name in names_a else path_b}"
        elif names_a[name]["shape"] != names_b[name]["shape"]:
            text = f"shape {tuple(names_a[name]['shape'])} -> {tuple(names_b[name]['shape'])}"
        else:
            apart = compare(a, b, name)
            total = math.prod(names_a[name]["shape"])
            text = apart and "{} of {} elements, max abs {:.3g}, relative {:.3g}, first at {}".format(
                apart[0], total, *apart[1:])
            if names_a[name]["dtype"] != names_b[name]["dtype"]:
                text = f"{names_a[name]['dtype']} -> {names_b[name]['dtype']}" + (f", {text}" if text else "")
        if text:
            found += 1
            say(f"  {name:48s} {text}")
    say(f"{found} differences" if found else f"equal: all {len(names_a)} tensors, step {a.index['step']}")
    return found


def show(path):
    index = check(path)
    print(f"{path}: step {index['step']}, {len(index['tensors'])} tensors in {len(index['files'])} files, "
          f"{sum(f['bytes'] for f in index['files'].values()) / 1e6:.1f} MB, all checksums right")
    print("  " + " ".join(f"{k}={v}" for k, v in index["meta"].items() if not isinstance(v, dict)))
    for name, entry in sorted(index["tensors"].items()):
        print(f"  {name:48s} {entry['dtype']:8s} {tuple(entry['shape'])!s:20s} {len(entry['pieces'])} pieces")


def main(argv):
    """show A, or diff A B, each a step_N or a run whose newest is meant -> 0 equal, 1 different"""
    command, *paths = argv or [""]
    if (command, len(paths)) not in (("show", 1), ("diff", 2)):
        raise ValueError("usage: python checkpoint.py show A, or diff A B")
    paths = [next(iter(steps(p)), p) if not (Path(p) / "index.json").exists() else p for p in paths]
    if command == "show":
        return show(paths[0])
    return int(diff(*paths) > 0)


def program(argv):
    """main() with wrong input as one line -> exit code."""
    try:
        return main(argv)
    except (ValueError, OSError) as e:
        print(f"nanoshard: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(program(sys.argv[1:]))

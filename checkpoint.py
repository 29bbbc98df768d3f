"""Checkpoints: step_000123/ holds one safetensors file per writing rank and index.json. No pickle, no gather.

Every tensor has one global name and one full shape, whatever the layout. A rank writes the rectangular pieces that it
owns, as (name, where it begins, its data); index.json lists all pieces of all files. A reader asks for any rectangle of
any tensor and copies what overlaps, so every layout can read what every other layout wrote.

    step_000123.tmp/rank_00000.safetensors, rank_00000.json     each rank writes its own, then says so
    step_000123.tmp/index.json                                  rank 0, when all have
    step_000123/                                                the rename is the commit: complete or not there
"""
import json
import os
import shutil
import sys
import time
import zlib
from pathlib import Path

FORMAT = 1


# -----------------------------------------------------------------------------
# pieces

def rectangles(shape, a, b):
    """Cut elements a..b-1 of a row-major tensor into rectangles -> [(offset, size)], at most 2 ndim - 1 of them.
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

def save(root, step, rank, writers, pieces, meta, keep=0, timeout=600.0):
    """Write this rank's part; on rank 0 also commit.

    pieces: [(name, tensor, full shape, offset)], each element of the model on exactly one rank. writers: number of ranks
    that call this. meta: JSON-able, rank 0's is kept. keep: newest checkpoints left afterwards, 0 = all.
    No collective: rank 0 waits for the other ranks' files, so a dead rank means no commit, not a hang. -> the directory.
    Errors: OSError (disk full, read-only), TimeoutError (an OSError) when a rank's part never came.
    """
    from safetensors.torch import save_file
    root, final = Path(root), Path(root) / f"step_{step:06d}"
    tmp = root / f"step_{step:06d}.tmp"
    tmp.mkdir(parents=True, exist_ok=True)
    file = f"rank_{rank:05d}.safetensors"
    tensors, records = {}, []
    for i, (name, tensor, full, offset) in enumerate(pieces):
        key = name if tuple(tensor.shape) == tuple(full) else f"{name}#{i}"
        tensors[key] = tensor.detach().cpu().contiguous()
        records.append([name, key, str(tensor.dtype)[6:], list(full), list(offset), list(tensor.shape)])
    if tensors:
        save_file(tensors, tmp / file)
        _sync(tmp / file)
    part = {"file": file if tensors else None, "records": records, "bytes": 0, "crc32": 0}
    if tensors:
        part.update(bytes=(tmp / file).stat().st_size, crc32=_crc(tmp / file))
    _write(tmp / f"rank_{rank:05d}.json", part)
    if rank == 0:
        _commit(tmp, final, step, writers, meta, timeout)
        if keep:
            _prune(root, keep)
    return final


def _commit(tmp, final, step, writers, meta, timeout):
    reports = [tmp / f"rank_{r:05d}.json" for r in range(writers)]
    began = time.monotonic()
    while not all(r.exists() for r in reports):
        if time.monotonic() - began > timeout:
            missing = [r.stem for r in reports if not r.exists()]
            raise TimeoutError(f"{tmp.name}: no part from {', '.join(missing)} within {timeout:.0f} s; not committed")
        time.sleep(0.005)
    parts = [json.loads(r.read_text()) for r in reports]
    tensors = {}
    for p in parts:
        for name, key, dtype, full, offset, size in p["records"]:
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": full, "pieces": []})
            entry["pieces"].append({"file": p["file"], "key": key, "offset": offset, "size": size})
    files = {p["file"]: {"bytes": p["bytes"], "crc32": p["crc32"]} for p in parts if p["file"]}
    _write(tmp / "index.json", {"format": FORMAT, "step": step, "meta": meta, "files": files, "tensors": tensors})
    for r in reports:
        r.unlink()
    if final.exists():  # the same step again (a resumed run): the old one leaves only when the new one is whole
        shutil.rmtree(final)
    os.rename(tmp, final)  # the commit
    _sync(final.parent)


def _prune(root, keep):
    for old in steps(root)[keep:]:
        gone = old.with_name(old.name + ".del")  # never a half-deleted directory under a valid name
        os.rename(old, gone)
        shutil.rmtree(gone)


def clean(root):
    """Remove what a killed save or prune left behind. Call on one rank, before any rank saves."""
    for left in [*Path(root).glob("step_*.tmp"), *Path(root).glob("step_*.del")]:
        shutil.rmtree(left)


def _write(path, obj):
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(obj))
    _sync(aside)
    os.replace(aside, path)


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _crc(path):
    crc = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


# -----------------------------------------------------------------------------
# reading

def steps(root):
    """Committed checkpoints under root, newest first (by name; whether they are sound, check() says)."""
    return sorted((p for p in Path(root).glob("step_*") if p.is_dir() and p.name[5:].isdigit()),
                  key=lambda p: int(p.name[5:]), reverse=True)


def read_index(path):
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint {path}; give a step_N directory, or --resume auto")
    try:
        index = json.loads((path / "index.json").read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise ValueError(f"checkpoint {path} has no readable index.json ({e}); use an older step_N") from None
    if index.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has format {index.get('format')}, this code reads {FORMAT}")
    return index


def check(path):
    """Sizes and checksums of every file -> index. ValueError names the first file that is damaged."""
    path = Path(path)
    index = read_index(path)
    for name, want in index["files"].items():
        f = path / name
        if not f.exists():
            raise ValueError(f"checkpoint {path}: {name} is missing; use an older step_N")
        if f.stat().st_size != want["bytes"]:
            raise ValueError(f"checkpoint {path}: {name} has {f.stat().st_size} bytes, index.json says {want['bytes']}; "
                             "use an older step_N")
        if _crc(f) != want["crc32"]:
            raise ValueError(f"checkpoint {path}: {name} differs from its crc32, it was damaged; use an older step_N")
    return index


def newest(root, say=print):
    """The newest sound checkpoint under root, or None. A damaged one is named and the one before it is tried."""
    for path in steps(root):
        try:
            check(path)
            return path
        except (ValueError, OSError) as e:
            say(f"{e}")
    return None


def load(path, wanted, index=None):
    """Fill tensors in place. wanted: [(name, tensor, full shape, offset)]: this rank's rectangles.
    Errors: ValueError when a name is missing, a full shape differs, or the pieces leave a hole."""
    from safetensors import safe_open
    path = Path(path)
    index = index or read_index(path)
    handles = {}
    for name, out, full, offset in wanted:
        entry = index["tensors"].get(name)
        if entry is None:
            raise ValueError(f"checkpoint {path} holds no {name}; it was written by another model")
        if list(full) != entry["shape"]:
            raise ValueError(f"checkpoint {path}: {name} is {tuple(entry['shape'])} there and {tuple(full)} in this model; "
                             "give the flags of the run that wrote it")
        copied = 0
        for piece in entry["pieces"]:
            low = [max(a, b) for a, b in zip(offset, piece["offset"], strict=True)]
            high = [min(a + s, b + t) for a, s, b, t in zip(offset, out.shape, piece["offset"], piece["size"], strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            file = piece["file"]
            if file not in handles:
                handles[file] = safe_open(path / file, framework="pt")
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece["offset"], strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            source = handles[file].get_slice(piece["key"])[there] if there else handles[file].get_tensor(piece["key"])
            (out[here] if here else out).copy_(source)
            copied += source.numel()
        if copied != out.numel():
            raise ValueError(f"checkpoint {path}: {name} covers {copied} of {out.numel()} elements; it is incomplete")


def full_tensors(path, names=None):
    """{name: whole tensor} as stored, assembled from all pieces (for one process: sampling, inspection)."""
    import torch
    index = read_index(path)
    entries = {n: index["tensors"][n] for n in names or index["tensors"]}
    out = {n: torch.empty(e["shape"], dtype=getattr(torch, e["dtype"])) for n, e in entries.items()}
    load(path, [(n, t, t.shape, [0] * t.ndim) for n, t in out.items()], index)
    return out


def main(argv):
    """python checkpoint.py show PATH"""
    if len(argv) != 2 or argv[0] != "show":
        raise ValueError("usage: python checkpoint.py show CHECKPOINT")
    index = check(argv[1])
    meta = index["meta"]
    print(f"{argv[1]}: step {index['step']}, {len(index['tensors'])} tensors in {len(index['files'])} files, "
          f"{sum(f['bytes'] for f in index['files'].values()) / 1e6:.1f} MB, all checksums right")
    print("  " + " ".join(f"{k}={v}" for k, v in meta.items() if not isinstance(v, dict)))
    for name, entry in sorted(index["tensors"].items()):
        print(f"  {name:48s} {str(tuple(entry['shape'])):20s} {len(entry['pieces'])} pieces")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        print(f"nanoshard: {e}", file=sys.stderr)
        sys.exit(2)

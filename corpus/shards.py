"""Token files. A data set is a folder: meta.json, tokenizer.json, shards train_00000.bin, val_00000.bin, ...

Each shard is a header of 4096 bytes, then token ids as little-endian uint16 or uint32. The shards of a split
form one stream, which corpus/samples.py cuts into windows. Conversations also have masks, shards of a byte
per token: 1 where it is trained. Errors are ValueError or OSError, and say which command repairs the data.
"""
import hashlib
import json
import shlex
import struct
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from interface import paths
from interface.command_line import given
from interface.files import Range, check_schema, load_json, write_whole

SPLITS = ("train", "val")
MAGIC = b"nanoshrd"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes per token, number of tokens; zeros follow
HEADER_BYTES = 4096  # a whole page, so that the tokens can be memory-mapped
BLOCK = 1 << 24  # bytes that are read, or tokens that are written, at a time


def pack_header(itemsize, tokens):
    return HEADER.pack(MAGIC, VERSION, itemsize, tokens).ljust(HEADER_BYTES, b"\0")


SHARD = {"file": str, "tokens": Range(1, 1 << 62), "sha256": str, "max_id?": Range(0, 1 << 32)}
META = {
    "version": Range(VERSION, VERSION),
    "tokenizer": str,
    "tokenizer_sha256": str,
    "dtype": Literal["uint16", "uint32"],
    "vocab_size": Range(1, 1 << 32),
    "tokens": dict.fromkeys(SPLITS, Range(1, 1 << 62)),
    "eod": (int, type(None)),
    "shards": dict.fromkeys(SPLITS, [SHARD]),
    "command?": str,  # that made it
    "replaced?": str,  # that made the data set whose place this one took
}
CHAT = {"seq_len": Range(1, 1 << 24), "masks": dict.fromkeys(SPLITS, [SHARD])}  # of conversations, besides


def how_to_fix(folder, meta=None):
    """Return the end of an error message: the command that makes the data again, and where."""
    command = (meta or {}).get("command")
    if not isinstance(command, str) or not command.startswith("python prepare.py "):
        return paths.make_data(folder)
    words = shlex.split(command)
    made = Path(given(words, "out") or "data") / (given(words, "name") or "stdlib")
    is_copy = made.resolve() != Path(folder).resolve()
    return f"make it with: {command}" + (f", then --data {made}" if is_copy else "")


def load_meta(folder):
    """Return the meta.json of one data set as a dict, its fields checked.

    FileNotFoundError: no such data set. ValueError: damaged, another version, or train and val share a shard.
    """
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no prepared data (no meta.json); {paths.meant_data(folder)}")
    meta = None
    try:
        meta = load_json(path)
        check_schema(meta, META, path)
        if "masks" in meta:
            check_schema(meta, CHAT, path)
        if not all(meta["shards"].values()):
            raise ValueError(f"{path} names no shards of train or of val")
        shared = shared_sha256(meta["shards"])
        if shared:
            raise ValueError(f"{path}: train and val have equal sha256 {shared[:9]}, expected different text")
    except ValueError as e:
        fix = how_to_fix(folder, meta if isinstance(meta, dict) else None)
        raise ValueError(f"{e}; move {folder} away, then {fix}") from e
    return meta


def shared_sha256(shards):
    """Return a sha256 that a train and a val shard have in common, else ""."""
    train = {shard["sha256"] for shard in shards["train"]}
    val = {shard["sha256"] for shard in shards["val"]}
    return min(train & val, default="")


def open_shards(folder, split, meta, kind="shards"):
    """Return the tokens of each shard of a split, (tokens,) uint16 or uint32, memory-mapped.

    kind: "masks" opens the shards that say which tokens are trained, uint8. FileNotFoundError, ValueError:
    files, headers and meta.json do not agree, or ids are above the vocabulary. Data sets that were made
    before max_id was kept hide such ids from this function; verify() finds them.
    """
    fix = how_to_fix(folder, meta)
    itemsize = 1 if kind == "masks" else np.dtype(meta["dtype"]).itemsize
    opened = []
    for shard in meta[kind][split]:
        path = Path(folder) / shard["file"]
        max_id = shard.get("max_id", 0)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {fix}")
        if max_id >= meta["vocab_size"]:
            raise ValueError(f"{path} has the token id {max_id}, vocab_size is {meta['vocab_size']}; {fix}")

        with open(path, "rb") as f:
            found = HEADER.unpack(f.read(HEADER.size).ljust(HEADER.size, b"\0"))
        expected = (MAGIC, VERSION, itemsize, shard["tokens"])
        if found != expected:
            raise ValueError(f"{path} has the header {found} (magic, version, bytes per token, tokens),"
                             f" expected {expected}; {fix}")
        size = path.stat().st_size
        expected_size = HEADER_BYTES + itemsize * shard["tokens"]
        if size != expected_size:
            raise ValueError(f"{path} has {size} bytes, expected {expected_size}; {fix}")
        opened.append(np.asarray(np.memmap(path, f"<u{itemsize}", "r", HEADER_BYTES)))
    return opened


def write_shards(folder, split, tokens, most):
    """Write tokens, (n,), as shards of at most `most` tokens; return meta.json's entries."""
    return [write_shard(folder / f"{split}_{first // most:05d}.bin", tokens[first : first + most])
            for first in range(0, len(tokens), most)]


def write_shard(path, tokens):
    """Write tokens, (n,), as one shard that is on the disk then; return what meta.json says of it."""
    header = pack_header(tokens.itemsize, len(tokens))
    digest = hashlib.sha256(header)
    max_id = 0
    with open(path, "wb") as f:
        f.write(header)
        for first in range(0, len(tokens), BLOCK):
            block = np.ascontiguousarray(tokens[first : first + BLOCK])
            f.write(block)
            digest.update(block)
            max_id = max(max_id, int(block.max()))
    return {"file": path.name, "tokens": len(tokens), "sha256": digest.hexdigest(), "max_id": max_id}


def verify(folder, cache=True):
    """Compare all files with their sha256 and all token ids with the vocabulary; return the number of files.

    It reads 1-2 GB/s, so a run does it once per node. cache: a file whose size and mtime_ns are those of an
    earlier success (folder/.verified.json) is not read again. ValueError, OSError: the first difference.
    """
    folder = Path(folder)
    meta = load_meta(folder)
    record = folder / ".verified.json"
    seen = None
    if cache:
        with suppress(OSError, ValueError):
            seen = load_json(record)

    good = {}
    for shard, dtype in files_of(folder, meta):
        path = folder / shard["file"]
        stat = path.stat()
        good[path.name] = [stat.st_size, stat.st_mtime_ns, shard["sha256"], meta["vocab_size"]]
        is_known = isinstance(seen, dict) and seen.get(path.name) == good[path.name]
        if not is_known:
            verify_file(path, shard, dtype, meta)
    if good != seen:
        with suppress(OSError):  # in a read-only folder the files are read each time
            write_whole(record, json.dumps(good))
    return len(good)


def files_of(folder, meta):
    """Return the files of a data set: [(its entry in meta.json, dtype of its ids or None)]."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {how_to_fix(folder, meta)}")
    files = [({"file": path.name, "sha256": meta["tokenizer_sha256"]}, None)]
    for split in SPLITS:
        for kind in [kind for kind in ("shards", "masks") if kind in meta]:
            types = [tokens.dtype for tokens in open_shards(folder, split, meta, kind)]
            files += zip(meta[kind][split], types, strict=True)
    return files


def verify_file(path, shard, dtype, meta):
    """Raise ValueError unless a file has its sha256 and no id above the largest that meta.json allows."""
    fix = how_to_fix(path.parent, meta)
    digest = hashlib.sha256()
    largest = 0
    with open(path, "rb") as f:
        digest.update(f.read(HEADER_BYTES))
        while block := f.read(BLOCK):
            digest.update(block)
            if dtype is not None:
                ids = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
                largest = max(largest, int(ids.max(initial=0)))
    found = digest.hexdigest()
    if found != shard["sha256"]:
        raise ValueError(f"{path} has sha256 {found[:9]}, expected {shard['sha256'][:9]}; {fix}")
    max_id = shard.get("max_id", meta["vocab_size"] - 1)
    if largest > max_id:
        raise ValueError(f"{path} has the token id {largest}, expected at most {max_id}; {fix}")

"""Token files. A data set is a folder: meta.json, tokenizer.json, shards train_00000.bin, val_00000.bin, ...

Each shard is a header of 4096 bytes, then token ids as little-endian uint16 or uint32. The shards of a split
form one stream, which corpus/samples.py cuts into windows. Conversations also have masks, shards of a byte
per token: 1 where it is trained. Errors are ValueError or OSError, and say which command repairs the data.
"""
import contextlib
import hashlib
import struct
from pathlib import Path
from typing import Literal

import numpy as np

from interface import paths
from interface.files import check_schema, load_json

SPLITS = ("train", "val")
MAGIC = b"nanoshrd"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes per token, number of tokens; zeros follow
HEADER_BYTES = 4096  # a whole page, so that the tokens can be memory-mapped


def pack_header(itemsize, tokens):
    return HEADER.pack(MAGIC, VERSION, itemsize, tokens).ljust(HEADER_BYTES, b"\0")


def how_to_fix(meta):
    """Return the end of an error message."""
    return f"copy the folder again, or make it again: {meta.get('command', 'python prepare.py')} --replace"


def load_meta(folder):
    """Return the meta.json of one data set as a dict."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no prepared data (no meta.json); {paths.meant_data(folder)}")
    meta = load_json(path)
    shards = {split: [{"file": str, "tokens": int, "sha256": str}] for split in SPLITS}
    check_schema(meta, {"version": Literal[VERSION], "vocab_size": int, "dtype": Literal["uint16", "uint32"],
                        "eod": int | None, "tokenizer_sha256": str, "shards": shards}, path)
    if not 0 <= (meta["eod"] or 0) < meta["vocab_size"]:
        raise ValueError(f"{path}: eod is {meta['eod']}, of {meta['vocab_size']} symbols; {how_to_fix(meta)}")
    return meta


def open_shards(folder, split, meta, kind="shards"):
    """Return the tokens of each shard of a split, (tokens,) uint16 or uint32, memory-mapped.

    kind: "masks" opens the shards that say which tokens are trained, uint8.
    """
    itemsize = 1 if kind == "masks" else np.dtype(meta["dtype"]).itemsize
    opened = []
    for shard in meta[kind][split]:
        path = Path(folder) / shard["file"]
        with open(path, "rb") as f:
            header = f.read(HEADER_BYTES)
        size = HEADER_BYTES + itemsize * shard["tokens"]
        if header != pack_header(itemsize, shard["tokens"]) or path.stat().st_size != size:
            raise ValueError(f"{path} has another header or size than meta.json says; {how_to_fix(meta)}")
        opened.append(np.asarray(np.memmap(path, f"<u{itemsize}", "r", HEADER_BYTES)))
    return opened


def write_shards(folder, tokens, most, kind=""):
    """Write {split: tokens, (n,)} as shards of at most `most` tokens; return what meta.json says of them."""
    shards = {split: [] for split in SPLITS}
    for split in SPLITS:
        for first in range(0, len(tokens[split]), most):
            part = tokens[split][first : first + most]
            content = pack_header(part.itemsize, len(part)) + part.tobytes()
            name = f"{split}{kind}_{first // most:05d}.bin"
            (folder / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            shards[split].append({"file": name, "tokens": len(part), "sha256": digest})
    return shards


def verify_once(folder):
    """verify(), unless no file of the folder has changed since it last found no difference."""
    stamp = Path(folder) / ".verified"
    newest = max(path.stat().st_ctime_ns for path in Path(folder).iterdir() if path != stamp)
    if not stamp.exists() or stamp.stat().st_ctime_ns <= newest:
        verify(folder)
        with contextlib.suppress(OSError):  # a folder that is read-only is read each time
            stamp.touch()


def verify(folder):
    """Compare all files with their sha256, and return the number of files. It reads 1-2 GB/s."""
    meta = load_meta(folder)
    files = [{"file": "tokenizer.json", "sha256": meta["tokenizer_sha256"]}]
    for split in SPLITS:
        files += meta["shards"][split]
        if "masks" in meta:
            files += meta["masks"][split]
    for file in files:
        path = Path(folder) / file["file"]
        with open(path, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != file["sha256"]:
            raise ValueError(f"{path} has another sha256 than meta.json says; {how_to_fix(meta)}")
    return len(files)

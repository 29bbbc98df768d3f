"""Token files, and the order in which a run reads them.

On disk: DIR/meta.json and shards train_00000.bin, val_00000.bin, ...: a 4096-byte header, then little-endian
uint16 or uint32. The shards of a split form one stream, cut into windows of seq_len tokens. Sample i of a run
is a pure function of (seed, i): any number of ranks, and a resumed run, see the same samples.
"""

import hashlib
import json
import struct
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import numpy as np

MAGIC, VERSION = b"nanoshrd", 1
HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes per token, tokens; then zeros
HEADER_BYTES = 4096  # a whole page, so that the tokens can be mapped
META_KEYS = ["version", "tokenizer", "tokenizer_sha256", "vocab_size", "dtype", "tokens", "eod", "shards"]


def pack_header(itemsize, tokens):
    """The first 4096 bytes of a shard."""
    return HEADER.pack(MAGIC, VERSION, itemsize, tokens).ljust(HEADER_BYTES, b"\0")


def fix(folder, meta=None):
    """The end of every error message here: the command that makes the data again."""
    name = "stdlib" if Path(folder).name == "stdlib" else f"FILE... --name {Path(folder).name}"
    return f"make it with: {(meta or {}).get('command', f'python prepare.py {name}')}"


def load_meta(folder):
    """meta.json as a dict; FileNotFoundError or ValueError say what is wrong and how to mend it."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no prepared data (no meta.json); {fix(folder)}")
    try:
        meta = json.loads(path.read_bytes())
        missing = [key for key in META_KEYS if key not in meta]
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path} is not valid json ({e}); {fix(folder)}") from e
    if missing or meta["version"] != VERSION:
        raise ValueError(f"{path} lacks {missing} or has not version {VERSION}; {fix(folder)}")
    try:
        shards = [s for split in ("train", "val") for s in meta["shards"][split] or [{}]]
        sound = meta["dtype"] in ("uint16", "uint32") and meta["vocab_size"] > 0
        for s in shards:
            sound = sound and isinstance(s["file"], str) and isinstance(s["sha256"], str) and s["tokens"] > 0
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise ValueError(f"{path} has no sound vocab_size, dtype or shards of train and val; {fix(folder)}")
    train, val = ({s["sha256"] for s in meta["shards"][split]} for split in ("train", "val"))
    if train & val:
        raise ValueError(f"{path}: train and val have equal sha256 {min(train & val)[:9]}, expected different"
                         f" text; {fix(folder, meta)}")
    return meta


def open_shards(folder, split, meta):
    """The shards of `split` as mapped arrays; files, headers and `meta` are checked against each other."""
    arrays, itemsize = [], np.dtype(meta["dtype"]).itemsize
    for shard in meta["shards"][split]:
        path = Path(folder) / shard["file"]
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {fix(folder, meta)}")
        with open(path, "rb") as f:
            found = HEADER.unpack(f.read(HEADER.size).ljust(HEADER.size, b"\0"))
        want = (MAGIC, VERSION, itemsize, shard["tokens"])
        if found != want:
            raise ValueError(f"{path} has the header {found} (magic, version, bytes per token, tokens),"
                             f" expected {want}; {fix(folder, meta)}")
        size, expected = path.stat().st_size, HEADER_BYTES + itemsize * shard["tokens"]
        if size != expected:
            raise ValueError(f"{path} has {size} bytes, expected {expected}; {fix(folder, meta)}")
        # a plain array over the mapped memory: its slices cost less than a memmap's
        arrays.append(np.asarray(np.memmap(path, f"<u{itemsize}", "r", HEADER_BYTES)))
    return arrays


def verify(folder, cache=True):
    """Compare the sha256 of the shards and the tokenizer with meta.json; returns the number of files.

    Reads 1-2 GB/s, so once per node. With `cache`, a file of the size and mtime_ns of an earlier success
    (DIR/.verified.json) is not read again. ValueError or FileNotFoundError at the first difference.
    """
    folder, meta = Path(folder), load_meta(folder)
    want = {s["file"]: s["sha256"] for split in ("train", "val") for s in meta["shards"][split]}
    want["tokenizer.json"] = meta["tokenizer_sha256"]
    for name in want:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; {fix(folder, meta)}")
    try:
        seen = json.loads((folder / ".verified.json").read_bytes()) if cache else {}
    except (OSError, ValueError):
        seen = {}
    good = {}
    for name, sha in want.items():
        path = folder / name
        good[name] = [path.stat().st_size, path.stat().st_mtime_ns, sha]
        if seen.get(name) != good[name]:
            with open(path, "rb") as f:
                found = hashlib.file_digest(f, "sha256").hexdigest()
            if found != sha:
                raise ValueError(f"{path} has sha256 {found[:9]}, expected {sha[:9]}; {fix(folder, meta)}")
    with suppress(OSError):  # a read-only folder is read again; half a json is no json, so no rename
        (folder / ".verified.json").write_text(json.dumps(good))
    return len(want)


def mix(z):
    """splitmix64's finaliser (Steele et al. 2014): every bit of the uint64 `z` spreads over the result."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_keys(*what):
    """Eight uint64, the same on every machine for the same `what`."""
    return np.frombuffer(hashlib.blake2b(repr(what).encode(), digest_size=64).digest(), "<u8")


def permute(i, n, keys):
    """Where a random permutation of [0, n) sends the numbers `i`, (m,) to (m,) uint64: no table, no state.

    A Feistel network, one round per key, permutes the smallest 2^(2h) >= n; what lands outside [0, n) goes
    round again until it falls inside (cycle walking, Black and Rogaway 2002), at most 4 times on average.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out, todo = np.array(i, np.uint64), np.arange(len(i))
    while len(todo):
        left, right = out[todo] >> half, out[todo] & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out


def inputs_and_targets(windows):
    """(n, T+1) token ids -> x, y (n, T): fresh int64 tensors, y one token ahead of x."""
    import torch  # here: prepare.py and its workers read this file, and should start without torch

    return tuple(torch.from_numpy(w.astype(np.int64)) for w in (windows[:, :-1], windows[:, 1:]))


class Tokens:
    """One split of prepared data as numbered samples; ValueError or OSError when the files do not match.

    train: an epoch is a permutation of all windows keyed by (seed, epoch); after the first, the windows also
    start at another offset, so that the text is cut elsewhere. val: in order. Both go on without end.
    """

    def __init__(self, folder, split, seq_len, seed=0):
        meta = load_meta(folder)
        self.shards, self.vocab_size = open_shards(folder, split, meta), meta["vocab_size"]
        self.split, self.seq_len, self.seed = split, seq_len, seed
        *self.starts, self.n_tokens = np.cumsum([0] + [len(s) for s in self.shards]).tolist()
        self.n_samples = (self.n_tokens - 1) // seq_len  # windows per epoch
        if self.n_samples < 1:
            raise ValueError(f"{folder}: {split} has {self.n_tokens} tokens, one window needs {seq_len + 1};"
                             f" use --seq-len {max(1, self.n_tokens - 1)} or prepare more text")
        self.rows = np.empty((0, seq_len + 1), self.shards[0].dtype)

    def batch(self, first, n):
        """Samples first .. first+n-1, counted over the whole run: x, y (n, T) int64, fresh tensors."""
        if len(self.rows) != n:
            self.rows = np.empty((n, self.seq_len + 1), self.shards[0].dtype)
        for row, start in zip(self.rows, self.window_starts(first, n).tolist(), strict=True):
            filled = 0
            while filled < len(row):  # once, unless the window crosses into the next shard or past the end
                at = (start + filled) % self.n_tokens
                shard = bisect_right(self.starts, at) - 1
                piece = self.shards[shard][at - self.starts[shard] :][: len(row) - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
        return inputs_and_targets(self.rows)

    def window_starts(self, first, n):
        """Positions in the stream where samples first .. first+n-1 start, (n,) int64."""
        epoch, k = np.divmod(np.arange(first, first + n, dtype=np.int64), self.n_samples)
        starts = k * self.seq_len
        if self.split == "train":
            for e in np.unique(epoch).tolist():  # one or two, unless the text is shorter than the batch
                keys, now = draw_keys("order", self.seed, e), epoch == e
                starts[now] = permute(k[now], self.n_samples, keys[:4]) * np.uint64(self.seq_len)
                starts[now] += int(keys[4]) % self.seq_len if e else 0
        return starts


class Synthetic:
    """Samples without files: each sequence counts up by its own stride of 1 to 4, one token in 8 is noise.
    The rule is the same for every seed: another seed serves as validation."""

    def __init__(self, vocab_size, seq_len, seed=0):
        self.vocab_size, self.seq_len, self.n_samples = vocab_size, seq_len, 1 << 40
        self.key = draw_keys("synthetic", seed)[0]

    def batch(self, first, n):
        """As Tokens.batch."""
        i, t = (np.arange(a, a + b, dtype=np.uint64) for a, b in ((first, n), (0, self.seq_len + 1)))
        drawn = mix(mix(i[:, None] + self.key))  # (n, 1), per sequence: where it starts and its stride
        count = (drawn >> np.uint64(8)) + t * (np.uint64(1) + drawn % np.uint64(4))
        noise = mix(drawn + mix(t + np.uint64(1)))  # (n, T+1), per token
        tokens = np.where(noise % np.uint64(8) == 0, noise >> np.uint64(8), count)
        return inputs_and_targets(tokens % np.uint64(self.vocab_size))

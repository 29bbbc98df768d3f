"""Token files, and the order in which a run reads them.

A data set is a folder: meta.json, tokenizer.json and shards train_00000.bin, val_00000.bin, ... Each shard is
a header of 4096 bytes, then token ids as little-endian uint16 or uint32. The shards of a split form one
stream, which is cut into windows of seq_len tokens: the samples. Sample i of a run is a pure function of
(seed, i), so any number of ranks, and a resumed run, see the same samples.

    1) the files       load_meta, open_shards, verify
    2) samples         Tokens (one data set), Synthetic (no files)
    3) blends          Blend: several data sets by weight, --data A:0.7,B:0.3
    4) a run's data    open_data, trained_tokens, micro_batches

Errors are ValueError or OSError, and say which command repairs the data.
"""

import hashlib
import json
import re
import shlex
import struct
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import numpy as np

from corpus.blend import first_folder, parse_blend, sample_schedule, samples_per_period
from corpus.masked import mask_sources
from corpus.order import draw_keys, permute, splitmix64
from interface.schema import Range, check_schema, load_json

SPLITS = ("train", "val")
MAGIC, VERSION = b"nanoshrd", 1
HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes per token, number of tokens; zeros follow
HEADER_BYTES = 4096  # a whole page, so that the tokens can be memory-mapped


# -----------------------------------------------------------------------------
# 1) the files

def pack_header(itemsize, tokens):
    """-> the first 4096 bytes of a shard of `tokens` tokens of `itemsize` bytes each."""
    return HEADER.pack(MAGIC, VERSION, itemsize, tokens).ljust(HEADER_BYTES, b"\0")


def shard_name(name):
    """a name like train_00000.bin or train_mask_00000.bin"""
    return isinstance(name, str) and re.fullmatch(r"(train|val)(_mask)?_[0-9]{5,}\.bin", name)


def dtype_name(name):
    """uint16 or uint32"""
    return name in ("uint16", "uint32")


SHARD = {"file": shard_name, "tokens": Range(1, 1 << 62), "sha256": str, "max_id?": Range(0, 1 << 32)}
META = {"version": Range(VERSION, VERSION), "tokenizer": str, "tokenizer_sha256": str, "dtype": dtype_name,
        "vocab_size": Range(1, 1 << 32), "tokens": dict.fromkeys(SPLITS, Range(1, 1 << 62)),
        "eod": (int, type(None)), "shards": dict.fromkeys(SPLITS, [SHARD]), "command?": str}
# of conversations: the windows' length, and shards that say which tokens are trained (corpus/chat.py)
CHAT = {"seq_len": Range(1, 1 << 24), "masks": dict.fromkeys(SPLITS, [SHARD])}


def how_to_fix(folder, meta=None):
    """-> the end of an error message: the command that makes the data again. That of meta.json is shown only
    if it is as prepare.py writes it, nothing more: a file cannot offer `curl X | sh`."""
    name = "stdlib" if Path(folder).name == "stdlib" else f"FILE... --name {Path(folder).name}"
    command = (meta or {}).get("command", "")
    with suppress(ValueError):  # an open quotation
        words = shlex.split(command)
        if words[:2] == ["python", "prepare.py"] and shlex.join(words) == command and command.isprintable():
            return f"make it with: {command}"
    return f"make it with: python prepare.py {name}"


def load_meta(folder):
    """-> meta.json of one data set as a dict, its fields checked. FileNotFoundError: no such data set.
    ValueError: damaged, another version, or train and val share a shard."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no prepared data (no meta.json); {how_to_fix(folder)}")
    try:
        meta = load_json(path)
        check_schema(meta, META, path)
        check_schema(meta, CHAT if "masks" in meta else {}, path)
        if not all(meta["shards"].values()):
            raise ValueError(f"{path} names no shards of train or of val")
    except ValueError as e:
        raise ValueError(f"{e}; {how_to_fix(folder)}") from e
    if equal := shared_sha256(meta["shards"]):
        raise ValueError(f"{path}: train and val have equal sha256 {equal[:9]}, expected different text;"
                         f" {how_to_fix(folder, meta)}")
    return meta


def shared_sha256(shards):
    """-> a sha256 that a train and a val shard have in common, else ""."""
    return min({s["sha256"] for s in shards["train"]} & {s["sha256"] for s in shards["val"]}, default="")


def open_shards(folder, split, meta, kind="shards"):
    """-> the shards of `split` as memory-mapped arrays, (tokens of the shard,) uint16 or uint32 each; of kind
    "masks" uint8.

    FileNotFoundError, ValueError: files, headers and `meta` do not agree, or ids are above the vocabulary; of
    data sets that were made before max_id was kept, verify() sees those."""
    arrays, fix = [], how_to_fix(folder, meta)
    itemsize = 1 if kind == "masks" else np.dtype(meta["dtype"]).itemsize
    for shard in meta[kind][split]:
        path, max_id = Path(folder) / shard["file"], shard.get("max_id", 0)
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
        size, expected = path.stat().st_size, HEADER_BYTES + itemsize * shard["tokens"]
        if size != expected:
            raise ValueError(f"{path} has {size} bytes, expected {expected}; {fix}")
        # a plain array over the mapped memory: slicing it costs less than slicing a memmap
        arrays.append(np.asarray(np.memmap(path, f"<u{itemsize}", "r", HEADER_BYTES)))
    return arrays


def verify(folder, cache=True):
    """Compare the sha256 of the shards and the tokenizer with meta.json, and the token ids with the
    vocabulary -> the number of files.
    It reads 1-2 GB/s, so a run does it once per node. cache: a file whose size and mtime_ns are those of an
    earlier success (folder/.verified.json) is not read again. ValueError, OSError: the first difference."""
    folder, meta, seen, good = Path(folder), load_meta(folder), None, {}
    fix, record = how_to_fix(folder, meta), folder / ".verified.json"
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder / 'tokenizer.json'} is missing; {fix}")
    files = [({"file": "tokenizer.json", "sha256": meta["tokenizer_sha256"]}, np.zeros(1))]
    for split in SPLITS:
        for kind in ("shards", "masks")[: 1 + ("masks" in meta)]:
            files += zip(meta[kind][split], open_shards(folder, split, meta, kind), strict=True)
    with suppress(OSError, ValueError):
        seen = load_json(record) if cache else None
    for shard, ids in files:
        path, sha = folder / shard["file"], shard["sha256"]
        good[path.name] = [path.stat().st_size, path.stat().st_mtime_ns, sha, meta["vocab_size"]]
        if isinstance(seen, dict) and seen.get(path.name) == good[path.name]:
            continue
        with open(path, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != sha:
            raise ValueError(f"{path} has sha256 {found[:9]}, expected {sha[:9]}; {fix}")
        if ids.max() > (limit := shard.get("max_id", meta["vocab_size"] - 1)):
            raise ValueError(f"{path} has the token id {ids.max()}, expected at most {limit}; {fix}")
    if good != seen:
        with suppress(OSError):  # in a read-only folder the files are read each time
            record.unlink(missing_ok=True)  # a link is not followed
            with open(record, "x") as f:  # not aside: a half-written cache is not valid json, and is ignored
                json.dump(good, f)
    return len(files)


# -----------------------------------------------------------------------------
# 2) samples

def inputs_and_targets(windows):
    """Token ids (n, T+1) -> x, y, (n, T) each: new int64 tensors, y one token ahead of x."""
    import torch  # not at the top: prepare.py and its workers import this file and should start without torch

    return tuple(torch.from_numpy(w.astype(np.int64)) for w in (windows[:, :-1], windows[:, 1:]))


class Tokens:
    """One split of one data set as numbered samples. They never end: after an epoch the next one begins.

    train: an epoch is a permutation of all windows, keyed by (seed, epoch). From the second epoch on the
    windows also start at another offset, so that the text is cut elsewhere. val: in order, each epoch alike.
    Windows of conversations stay as prepare.py packed them, and what is not trained has the target IGNORE.
    ValueError, OSError: the files are damaged or too short for one window."""

    def __init__(self, folder, split, seq_len, seed=0):
        meta = load_meta(folder)
        self.shards, self.vocab_size = open_shards(folder, split, meta), meta["vocab_size"]
        self.split, self.seq_len, self.seed = split, seq_len, seed
        # position in the stream where each shard starts, and the length of the stream
        *self.starts, self.n_tokens = np.cumsum([0] + [len(s) for s in self.shards]).tolist()
        # windows per epoch; from one's start to the next's: those of text overlap by a token
        self.n_samples, self.stride, self.masks = (self.n_tokens - 1) // seq_len, seq_len, None
        if "masks" in meta:
            self.open_masks(folder, meta)
        self.all_trained = self.masks is None
        if self.n_samples < 1:
            raise ValueError(f"{folder}: {split} has {self.n_tokens} tokens, one window needs {seq_len + 1};"
                             f" use --seq-len {max(1, self.n_tokens - 1)} or prepare more text")

    def open_masks(self, folder, meta):
        """Of conversations: which tokens are trained, and how many of each window, (windows,) int64."""
        self.masks, self.stride = open_shards(folder, self.split, meta, "masks"), self.seq_len + 1
        if meta["seq_len"] != self.seq_len:
            raise ValueError(f"{folder} has windows of {meta['seq_len']} tokens, --seq-len is {self.seq_len};"
                             f" give --seq-len {meta['seq_len']}, or prepare the conversations again")
        self.n_samples = self.n_tokens // self.stride
        if [m.size for m in self.masks] != [s.size for s in self.shards] or self.n_tokens % self.stride:
            raise ValueError(f"{folder}: the masks of {self.split} do not fit its tokens;"
                             f" {how_to_fix(folder, meta)}")
        self.counts = np.concatenate(self.masks).reshape(-1, self.stride)[:, 1:].sum(1, dtype=np.int64)

    def batch(self, first, n):
        """Samples first .. first+n-1, numbered over the whole run -> x, y, (n, T) int64 each: new tensors."""
        starts = self.window_starts(first, n).tolist()
        x, y = inputs_and_targets(self.read(self.shards, starts))
        if self.masks is not None:
            from ops.cross_entropy import IGNORE  # not at the top: it imports torch
            y.masked_fill_(inputs_and_targets(self.read(self.masks, starts))[1] == 0, IGNORE)
        return x, y

    def read(self, shards, starts):
        """-> the windows at these positions of a stream, (n, T+1), from its shards."""
        rows = np.empty((len(starts), self.seq_len + 1), shards[0].dtype)
        for row, start in zip(rows, starts, strict=True):
            filled = 0
            while filled < len(row):  # one pass, unless the window crosses into the next shard or the start
                at = (start + filled) % self.n_tokens
                shard = bisect_right(self.starts, at) - 1
                piece = shards[shard][at - self.starts[shard] :][: len(row) - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
        return rows

    def n_targets(self, first, n):
        """-> int: the trained tokens of samples first .. first+n-1; every rank knows those of all."""
        if self.masks is None:
            return n * self.seq_len
        return int(self.counts[self.window_starts(first, n) // self.stride].sum())

    def window_starts(self, first, n):
        """-> the positions in the stream where samples first .. first+n-1 start, (n,) int64."""
        epoch, k = np.divmod(np.arange(first, first + n, dtype=np.int64), self.n_samples)
        starts = k * self.stride
        if self.split == "train":
            for e in np.unique(epoch).tolist():  # one or two, unless the text is shorter than the batch
                keys, in_epoch = draw_keys("order", self.seed, e), epoch == e
                order = permute(k[in_epoch], self.n_samples, keys[:4])
                starts[in_epoch] = order * np.uint64(self.stride)
                starts[in_epoch] += int(keys[4]) % self.seq_len if e and self.masks is None else 0
        return starts


class Synthetic:
    """Samples without files: each sequence counts up with its own stride of 1 to 4, one token in 8 is noise.

    The rule is the same for every seed, so another seed serves as validation."""

    def __init__(self, vocab_size, seq_len, seed=0):
        self.vocab_size, self.seq_len, self.n_samples, self.all_trained = vocab_size, seq_len, 1 << 40, True
        self.key = draw_keys("synthetic", seed)[0]

    def batch(self, first, n):
        """Samples first .. first+n-1 -> x, y, (n, T) int64 each, as Tokens.batch."""
        i = np.arange(first, first + n, dtype=np.uint64)
        t = np.arange(self.seq_len + 1, dtype=np.uint64)
        random = splitmix64(splitmix64(i[:, None] + self.key))  # (n, 1), gives the first token and the stride
        count = (random >> np.uint64(8)) + t * (np.uint64(1) + random % np.uint64(4))  # (n, T+1)
        noise = splitmix64(random + splitmix64(t + np.uint64(1)))  # (n, T+1)
        tokens = np.where(noise % np.uint64(8) == 0, noise >> np.uint64(8), count)
        return inputs_and_targets(tokens % np.uint64(self.vocab_size))

    def n_targets(self, first, n):
        """-> int: the trained tokens of samples first .. first+n-1: here all."""
        return n * self.seq_len


# -----------------------------------------------------------------------------
# 3) blends: several data sets by weight. --data DIR, --data A:0.7,B:0.3, or --data A,B in proportion to their
# tokens; corpus/blend.py says which data set gives each sample

def load_blend_meta(spec):
    """--data -> the meta.json of the first data set with the shards of all, and `identity`: a str that other
    data or other weights would change; checkpoints keep it. ValueError, OSError: a data set is damaged, the
    tokenizers differ, or one trains on another's val shard."""
    folders = [folder for folder, _ in parse_blend(spec)]
    metas = [load_meta(folder) for folder in folders]
    names = [f"{m['tokenizer']} {m['tokenizer_sha256'][:9]} of {m['vocab_size']} symbols" for m in metas]
    for folder, meta, name in zip(folders, metas, names, strict=True):
        if any(meta[key] != metas[0][key] for key in ("tokenizer_sha256", "vocab_size")):
            raise ValueError(f"{folders[0]} and {folder} have different tokenizers ({names[0]}, {name});"
                             f" prepare {folder} with --tokenizer {folders[0]}")
    shards = {split: [s for meta in metas for s in meta["shards"][split]] for split in SPLITS}
    if equal := shared_sha256(shards):
        raise ValueError(f"--data {spec}: a train and a val shard have equal sha256 {equal[:9]}; one data set"
                         " would be tested on what another trains on: leave one out")
    masks = [s for meta in metas if "masks" in meta for split in SPLITS for s in meta["masks"][split]]
    identity = " ".join(s["sha256"][:16] for s in (*shards["train"], *shards["val"], *masks))
    if len(metas) > 1:
        identity += f" {':'.join(map(str, samples_per_period(spec, metas)))}"
    return {**metas[0], "shards": shards, "identity": identity}


def open_tokens(spec, split, seq_len, seed=0):
    """--data -> the samples of one split: Tokens of one data set, or a Blend of several."""
    if len(parse_blend(spec)) == 1:
        return Tokens(first_folder(spec), split, seq_len, seed)
    return Blend(spec, split, seq_len, seed)


class Blend:
    """One split of several data sets by weight, with the interface of Tokens."""

    def __init__(self, spec, split, seq_len, seed=0):
        self.seq_len = seq_len
        metas = [load_meta(folder) for folder, _ in parse_blend(spec)]
        self.parts = [Tokens(folder, split, seq_len, seed) for folder, _ in parse_blend(spec)]
        self.vocab_size, self.all_trained = metas[0]["vocab_size"], all(p.all_trained for p in self.parts)
        self.per_period = np.array(samples_per_period(spec, metas))  # (data sets,)
        self.schedule = sample_schedule(self.per_period)  # (P,) which data set gives each sample
        gives = self.schedule[:, None] == np.arange(len(self.parts))  # (P, data sets)
        # (P,) how many samples that data set gave earlier in the period
        self.given = (np.cumsum(gives, 0) - gives)[np.arange(len(gives)), self.schedule]
        # samples until the first data set begins its second epoch
        self.n_samples = min(max(1, part.n_samples * len(self.schedule) // count)
                             for part, count in zip(self.parts, self.per_period.tolist(), strict=True))

    def n_targets(self, first, n):
        """-> int: the trained tokens of samples first .. first+n-1."""
        which, number = self.locate(np.arange(first, first + n, dtype=np.int64))
        return sum(self.parts[d].n_targets(int(number[which == d][0]), int((which == d).sum()))
                   for d in np.unique(which).tolist())

    def locate(self, i):
        """Sample numbers (n,) -> the data set of each, and the sample's number in it, (n,) int64 both."""
        period, k = np.divmod(i, len(self.schedule))
        which = self.schedule[k]
        return which, period * self.per_period[which] + self.given[k]

    def batch(self, first, n):
        """Samples first .. first+n-1 -> x, y, (n, T) int64 each, as Tokens.batch."""
        which, number = self.locate(np.arange(first, first + n, dtype=np.int64))
        xy = None
        for d in np.unique(which).tolist():  # the samples that data set d gives here are consecutive
            rows = np.flatnonzero(which == d)
            part = self.parts[d].batch(int(number[rows[0]]), len(rows))
            xy = xy or tuple(p.new_empty((n, p.shape[1])) for p in part)
            for both, some in zip(xy, part, strict=True):
                both[rows] = some
        return xy


# -----------------------------------------------------------------------------
# 4) a run's data

def open_data(cfg, local_rank):
    """The data of a run -> (train, val, vocab_size, identity of the data: str). Every rank checks headers;
    local rank 0, one per node, also the checksums. vocab_size is that of cfg or, where it is 0, of the data,
    and [MASK]. ValueError, OSError: see load_meta."""
    mask = int(cfg.objective == "mlm")  # [MASK] is one id past the data's: corpus/masked.py
    if cfg.data == "synthetic":
        vocab_size = cfg.vocab_size or 256 + mask
        train, val = (Synthetic(vocab_size - mask, cfg.seq_len, cfg.seed + i) for i in (0, 1))
        train, val = mask_sources(cfg, train, val)
        return train, val, vocab_size, f"synthetic-{vocab_size}"
    meta = load_blend_meta(cfg.data)
    if local_rank == 0:
        for folder, _ in parse_blend(cfg.data):
            verify(folder)
    needed = meta["vocab_size"] + mask
    vocab_size = cfg.vocab_size or needed
    if vocab_size < needed:
        raise ValueError(f"--vocab-size {vocab_size} is less than the {needed} symbols of {cfg.data}"
                         f"{' with [MASK]' * mask}; try --vocab-size {needed}")
    train, val = mask_sources(cfg, *(open_tokens(cfg.data, split, cfg.seq_len, cfg.seed) for split in SPLITS))
    return train, val, vocab_size, meta["identity"]


def trained_tokens(source, first, count, device):
    """-> what the loss of the `count` samples from `first` on is divided by, the trained tokens of them all,
    with no message: an int if the source trains every token, a constant of a recorded CUDA graph; else ()
    int64 on the device, also in a step that trains all: a graph recorded with one does not hold the other."""
    n = source.n_targets(first, count)
    if source.all_trained:
        return n
    import torch

    return torch.full((), n, device=device)


def micro_batches(cfg, mesh, source, first, count, device):
    """This rank's micro-batches of the `count` samples from `first` on -> [(x, y)], (B, T/cp) int64 each.
    Micro-batch j holds samples j*mb..(j+1)*mb-1; dp rank d takes micro-batches d*n..(d+1)*n-1, and its cp
    ranks their chunks of each sample."""
    n = count // (cfg.micro_batch * mesh.dp.size)
    start = first + mesh.dp.rank * n * cfg.micro_batch
    pairs = [source.batch(start + j * cfg.micro_batch, cfg.micro_batch) for j in range(n)]
    pairs = [tuple(mesh.cp.own_chunks(t, 1) for t in pair) for pair in pairs]
    if device.type == "cpu":
        return pairs
    return [tuple(t.pin_memory().to(device, non_blocking=True) for t in pair) for pair in pairs]

"""Token files, and the order in which a run reads them.

A data set is a folder: meta.json, tokenizer.json and shards train_00000.bin, val_00000.bin, ... Each shard is
a header of 4096 bytes, then token ids as little-endian uint16 or uint32. The shards of a split form one
stream, which is cut into windows of seq_len tokens: the samples. Sample i of a run is a pure function of
(seed, i), so any number of ranks, and a resumed run, see the same samples.

    1) the files       load_meta, open_shards, verify
    2) samples         Tokens (one data set); corpus/synthetic.py has those without files
    3) blends          Blend: several data sets by weight, --data A:0.7,B:0.3

Errors are ValueError or OSError, and say which command repairs the data.
"""

import hashlib
import json
import os
import re
import shlex
import struct
import weakref
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import numpy as np

from corpus.blend import first_folder, parse_blend, sample_schedule, samples_per_period
from corpus.documents import document_places, masks_documents
from corpus.synthetic import draw_keys, inputs_and_targets, permute
from interface import paths
from interface.schema import ChangedFile, Range, check_schema, load_json

SPLITS = ("train", "val")
MAGIC = b"nanoshrd"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes per token, number of tokens; zeros follow
HEADER_BYTES = 4096  # a whole page, so that the tokens can be memory-mapped


# -----------------------------------------------------------------------------
# 1) the files

def pack_header(itemsize, tokens):
    """Return the first 4096 bytes of a shard of `tokens` tokens of `itemsize` bytes each."""
    return HEADER.pack(MAGIC, VERSION, itemsize, tokens).ljust(HEADER_BYTES, b"\0")


def shard_name(name):
    """a name like train_00000.bin or train_mask_00000.bin"""
    return isinstance(name, str) and re.fullmatch(r"(train|val)(_mask)?_[0-9]{5,}\.bin", name)


def dtype_name(name):
    """uint16 or uint32"""
    return name in ("uint16", "uint32")


# Schemas of meta.json. The docstrings of the two predicates above end the messages about a wrong value.
SHARD = {
    "file": shard_name,
    "tokens": Range(1, 1 << 62),
    "sha256": str,
    "max_id?": Range(0, 1 << 32),
}
META = {
    "version": Range(VERSION, VERSION),
    "tokenizer": str,
    "tokenizer_sha256": str,
    "dtype": dtype_name,
    "vocab_size": Range(1, 1 << 32),
    "tokens": dict.fromkeys(SPLITS, Range(1, 1 << 62)),
    "eod": (int, type(None)),
    "shards": dict.fromkeys(SPLITS, [SHARD]),
    "command?": str,
    "replaced?": str,  # the command of the data set whose place this one took
}
# Conversations also have the length of their windows, and shards that say which tokens are trained
# (corpus/chat.py).
CHAT = {
    "seq_len": Range(1, 1 << 24),
    "masks": dict.fromkeys(SPLITS, [SHARD]),
}


def as_prepare_writes_it(command):
    """Return a command of a meta.json if prepare.py writes it in exactly this form, else ""."""
    with suppress(ValueError):  # an open quotation
        words = shlex.split(command)
        is_ours = words[:2] == ["python", "prepare.py"] and shlex.join(words) == command
        if is_ours and command.isprintable():
            return command
    return ""


def how_to_fix(folder, meta=None, is_damaged=False):
    """Return the end of an error message: the command that makes the data again.

    is_damaged: meta.json is not as it should be, and prepare.py does not replace the files of the folder.

    The command in meta.json is shown only if it is exactly as prepare.py writes it, so that a file cannot
    offer `curl X | sh`.
    """
    command = as_prepare_writes_it((meta or {}).get("command", ""))
    first = f"move {folder} away, then " if is_damaged else ""
    if command:
        return f"{first}make it with: {command}"
    return first + paths.make_data(folder)


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
    except ValueError as e:
        is_read = isinstance(meta, dict) and isinstance(meta.get("command"), str)
        fix = how_to_fix(folder, meta if is_read else None, is_damaged=True)
        raise ValueError(f"{e}; {fix}") from e

    shared = shared_sha256(meta["shards"])
    if shared:
        raise ValueError(f"{path}: train and val have equal sha256 {shared[:9]}, expected different text;"
                         f" {how_to_fix(folder, meta)}")
    return meta


def shared_sha256(shards):
    """Return a sha256 that a train and a val shard have in common, else ""."""
    train = {shard["sha256"] for shard in shards["train"]}
    val = {shard["sha256"] for shard in shards["val"]}
    return min(train & val, default="")


def open_shards(folder, split, meta, kind="shards"):
    """Return the shards of a split, a Shard each, uint16 or uint32.

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

        limit = 2 if kind == "masks" else meta["vocab_size"]
        opened.append(Shard(path, f"<u{itemsize}", shard["tokens"], limit, fix))
    return opened


class Shard:
    """The tokens of one open file, (size,).

    A window is read, not memory-mapped: a file that somebody cuts while a run reads it is an error with its
    name then, and a mapping would end the process by a signal.
    """

    def __init__(self, path, dtype, size, limit, fix):
        self.path = path
        self.dtype = np.dtype(dtype)
        self.size = size
        self.limit = limit  # ids are below it
        self.fix = fix
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def __len__(self):
        return self.size

    def all(self):
        """Return all tokens in a new array. ChangedFile: as read_into."""
        out = np.empty(self.size, self.dtype)
        self.read_into(out, 0)
        return out

    def read_into(self, out, first):
        """Fill out, (n,), with the tokens from `first` on. ChangedFile: the file is not what it was."""
        start = HEADER_BYTES + first * self.dtype.itemsize
        size = os.preadv(self.fd, [out], start)
        while size < out.nbytes:
            more = os.pread(self.fd, out.nbytes - size, start + size)
            if not more:
                raise ChangedFile(f"{self.path} was cut while this run reads it: it ends before token "
                                  f"{first + len(out)} of {self.size}; {self.fix}")
            out.view(np.uint8)[size : size + len(more)] = np.frombuffer(more, np.uint8)
            size += len(more)
        largest = out.max()
        if largest >= self.limit:
            raise ChangedFile(f"{self.path} was changed while this run reads it: near token {first} is the id"
                              f" {largest}, expected less than {self.limit}; {self.fix}")


def verify(folder, cache=True):
    """Compare all files with their sha256 and all token ids with the vocabulary; return the number of files.

    It reads 1-2 GB/s, so a run does it once per node. cache: a file whose size and mtime_ns are those of an
    earlier success (folder/.verified.json) is not read again. ValueError, OSError: the first difference.
    """
    folder = Path(folder)
    meta = load_meta(folder)
    files = files_of(folder, meta)
    record = folder / ".verified.json"
    seen = None
    if cache:
        with suppress(OSError, ValueError):
            seen = load_json(record)

    good = {}
    for shard, dtype in files:
        path = folder / shard["file"]
        stat = path.stat()
        good[path.name] = [stat.st_size, stat.st_mtime_ns, shard["sha256"], meta["vocab_size"]]
        is_known = isinstance(seen, dict) and seen.get(path.name) == good[path.name]
        if not is_known:
            verify_file(path, shard, dtype, meta)
    if good != seen:
        with suppress(OSError):  # in a read-only folder the files are read each time
            record.unlink(missing_ok=True)  # a link is not followed
            with open(record, "x") as f:  # not written aside: half of it is no valid JSON, and is ignored
                json.dump(good, f)
    return len(files)


def files_of(folder, meta):
    """Return the files of a data set: [(its entry in meta.json, dtype of its ids or None)]."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {how_to_fix(folder, meta)}")
    files = [({"file": path.name, "sha256": meta["tokenizer_sha256"]}, None)]
    for split in SPLITS:
        for kind in [kind for kind in ("shards", "masks") if kind in meta]:
            types = [shard.dtype for shard in open_shards(folder, split, meta, kind)]
            files += zip(meta[kind][split], types, strict=True)
    return files


def verify_file(path, shard, dtype, meta):
    """Raise ValueError unless a file has its sha256 and no id above the largest that meta.json allows.

    It is read once, in blocks, and not memory-mapped: see Shard.
    """
    fix = how_to_fix(path.parent, meta)
    digest = hashlib.sha256()
    largest = 0
    with open(path, "rb") as f:
        digest.update(f.read(HEADER_BYTES))
        while block := f.read(1 << 24):
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


# -----------------------------------------------------------------------------
# 2) samples

class Tokens:
    """One split of one data set as numbered samples. They never end: after an epoch the next one begins.

    train: an epoch is a permutation of all windows, keyed by (seed, epoch). From the second epoch on the
    windows also start at another offset, so that the text is cut elsewhere. val: in order, each epoch alike.
    Windows of conversations stay as prepare.py packed them, and a token that is not trained has the target
    IGNORE. doc_mask: the flag. ValueError, OSError: the files are damaged or too short for one window.
    """

    def __init__(self, folder, split, seq_len, seed=0, doc_mask="auto"):
        meta = load_meta(folder)
        self.split = split
        self.seq_len = seq_len
        self.seed = seed
        self.vocab_size = meta["vocab_size"]
        self.eod = meta["eod"]
        self.has_documents = masks_documents(doc_mask, folder, meta)
        self.shards = open_shards(folder, split, meta)
        ends = np.cumsum([len(shard) for shard in self.shards]).tolist()
        self.starts = [0, *ends[:-1]]  # the position in the stream where each shard starts
        self.n_tokens = ends[-1]  # the length of the stream
        # From a window's start to the next window's: windows of text overlap by one token.
        self.stride = seq_len
        self.n_samples = (self.n_tokens - 1) // seq_len  # windows per epoch
        self.masks = None
        if "masks" in meta:
            self.open_masks(folder, meta)
        self.all_trained = self.masks is None
        if self.n_samples < 1:
            raise ValueError(f"{folder}: {split} has {self.n_tokens} tokens, one window needs {seq_len + 1};"
                             f" use --seq-len {max(1, self.n_tokens - 1)} or prepare more text")

    def open_masks(self, folder, meta):
        """Open the masks of conversations and count the trained tokens of each window, (windows,) int64."""
        self.masks = open_shards(folder, self.split, meta, "masks")
        if meta["seq_len"] != self.seq_len:
            raise ValueError(f"{folder} has windows of {meta['seq_len']} tokens, --seq-len is {self.seq_len};"
                             f" give --seq-len {meta['seq_len']}, or prepare the conversations again")
        self.stride = self.seq_len + 1
        self.n_samples = self.n_tokens // self.stride
        same_sizes = [mask.size for mask in self.masks] == [shard.size for shard in self.shards]
        if not same_sizes or self.n_tokens % self.stride:
            raise ValueError(f"{folder}: the masks of {self.split} do not fit its tokens;"
                             f" {how_to_fix(folder, meta)}")
        trained = np.concatenate([mask.all() for mask in self.masks])
        trained = trained.reshape(-1, self.stride)  # (windows, T+1)
        self.counts = trained[:, 1:].sum(1, dtype=np.int64)

    def batch(self, first, n):
        """Return samples first .. first+n-1 as x, y, (n, T) int64 each: new tensors.

        Samples are numbered over the whole run.
        """
        starts = self.window_starts(first, n).tolist()
        x, y = inputs_and_targets(self.read(self.shards, starts))
        if self.masks is not None:
            from ops.cross_entropy import IGNORE  # not at the top: it imports torch
            _, trained = inputs_and_targets(self.read(self.masks, starts))
            y.masked_fill_(trained == 0, IGNORE)
        return x, y

    def places(self, first, x):
        """Return document_places() of x, the inputs of the samples from `first` on: (n, T) -> (n, T)."""
        return document_places(x, self.eod)

    def read(self, shards, starts):
        """Return the windows at these positions of the stream of `shards`, (n, T+1)."""
        windows = np.empty((len(starts), self.seq_len + 1), shards[0].dtype)
        for window, start in zip(windows, starts, strict=True):
            filled = 0
            # One pass, unless the window goes on in the next shard or at the start of the stream.
            while filled < len(window):
                at = (start + filled) % self.n_tokens
                shard = bisect_right(self.starts, at) - 1
                at_in_shard = at - self.starts[shard]
                piece = window[filled : filled + shards[shard].size - at_in_shard]
                shards[shard].read_into(piece, at_in_shard)
                filled += len(piece)
        return windows

    def n_targets(self, first, n):
        """Return how many tokens of samples first .. first+n-1 are trained; a rank may ask about any."""
        if self.masks is None:
            return n * self.seq_len
        windows = self.window_starts(first, n) // self.stride
        return int(self.counts[windows].sum())

    def window_starts(self, first, n):
        """Return the positions in the stream where samples first .. first+n-1 start, (n,) int64."""
        epochs, windows = np.divmod(np.arange(first, first + n, dtype=np.int64), self.n_samples)
        starts = windows * self.stride
        if self.split == "train":
            for epoch in np.unique(epochs).tolist():  # one or two, unless the text is shorter than the batch
                in_epoch = epochs == epoch
                starts[in_epoch] = self.shuffled_starts(epoch, windows[in_epoch])
        return starts

    def shuffled_starts(self, epoch, windows):
        """Return where windows 0, 1, .. of a training epoch start in the stream: (n,) -> (n,) uint64."""
        keys = draw_keys("order", self.seed, epoch)
        starts = permute(windows, self.n_samples, keys[:4]) * np.uint64(self.stride)
        cut_elsewhere = epoch > 0 and self.masks is None
        if cut_elsewhere:
            starts += keys[4] % np.uint64(self.seq_len)
        return starts


# -----------------------------------------------------------------------------
# 3) blends: several data sets by weight. --data DIR, --data A:0.7,B:0.3, or --data A,B in proportion to their
# tokens. corpus/blend.py says which data set gives each sample.

def load_blend_meta(spec):
    """Return the meta.json of the first data set of --data, with the shards of all and their `identity`.

    identity: a str that other data or other weights would change; checkpoints keep it. ValueError, OSError:
    a data set is damaged, the tokenizers differ, or one data set trains on the val shard of another.
    """
    folders = [folder for folder, _ in parse_blend(spec)]
    metas = [load_meta(folder) for folder in folders]
    for folder, meta in zip(folders, metas, strict=True):
        check_same_tokenizer(folders[0], metas[0], folder, meta)

    shards = {split: [] for split in SPLITS}
    masks = []
    for meta in metas:
        for split in SPLITS:
            shards[split] += meta["shards"][split]
            if "masks" in meta:
                masks += meta["masks"][split]
    shared = shared_sha256(shards)
    if shared:
        raise ValueError(f"--data {spec}: a train and a val shard have equal sha256 {shared[:9]}; one data"
                         " set would be tested on what another trains on: leave one out")

    identity = [shard["sha256"][:16] for shard in (*shards["train"], *shards["val"], *masks)]
    if len(metas) > 1:
        identity.append(":".join(map(str, samples_per_period(spec, metas))))
    return {**metas[0], "shards": shards, "identity": " ".join(identity)}


def check_same_tokenizer(first, first_meta, folder, meta):
    """Raise ValueError unless a data set of a blend has the tokenizer of the first one."""
    if all(meta[key] == first_meta[key] for key in ("tokenizer_sha256", "vocab_size")):
        return

    def name(meta):
        return f"{meta['tokenizer']} {meta['tokenizer_sha256'][:9]} of {meta['vocab_size']} symbols"

    # A vocabulary of characters spells only the text that it was made of.
    base, other = (folder, first) if first_meta["tokenizer"] == "char" else (first, folder)
    raise ValueError(f"{first} and {folder} have different tokenizers ({name(first_meta)},"
                     f" {name(meta)}); prepare the text of {other} again, with --tokenizer {base} and "
                     "another --name")


def settled_doc_mask(spec, doc_mask):
    """Return what --doc-mask does with --data: "on" or "off", or "auto" if its data sets differ."""
    if spec == "synthetic":
        return "off"
    answers = {masks_documents(doc_mask, folder, load_meta(folder)) for folder, _ in parse_blend(spec)}
    if len(answers) > 1:
        return "auto"
    return "on" if answers.pop() else "off"


def open_tokens(spec, split, seq_len, seed=0, doc_mask="auto"):
    """Return the samples of one split of --data: Tokens of one data set, or a Blend of several."""
    if len(parse_blend(spec)) == 1:
        return Tokens(first_folder(spec), split, seq_len, seed, doc_mask)
    return Blend(spec, split, seq_len, seed, doc_mask)


class Blend:
    """One split of several data sets by weight, with the interface of Tokens."""

    def __init__(self, spec, split, seq_len, seed=0, doc_mask="auto"):
        self.seq_len = seq_len
        folders = [folder for folder, _ in parse_blend(spec)]
        metas = [load_meta(folder) for folder in folders]
        self.parts = [Tokens(folder, split, seq_len, seed, doc_mask) for folder in folders]
        self.vocab_size = metas[0]["vocab_size"]
        self.all_trained = all(part.all_trained for part in self.parts)
        self.has_documents = any(part.has_documents for part in self.parts)

        self.per_period = np.array(samples_per_period(spec, metas))  # (data sets,)
        self.schedule = sample_schedule(self.per_period)  # (P,) which data set gives each sample
        period = len(self.schedule)
        gives = self.schedule[:, None] == np.arange(len(self.parts))  # (P, data sets)
        given_before = np.cumsum(gives, 0) - gives  # (P, data sets)
        # (P,) how many samples the data set of each sample gave earlier in the period
        self.given = given_before[np.arange(period), self.schedule]

        # Samples until the first data set begins its second epoch.
        self.n_samples = min(max(1, part.n_samples * period // count)
                             for part, count in zip(self.parts, self.per_period.tolist(), strict=True))

    def locate(self, i):
        """Return the data set of each sample, and the sample's number in it: (n,) -> (n,) int64 both."""
        period, k = np.divmod(i, len(self.schedule))
        which = self.schedule[k]
        return which, period * self.per_period[which] + self.given[k]

    def pieces(self, first, n):
        """Yield what each data set gives to samples first .. first+n-1: (Tokens, its first sample, its rows).

        The samples that one data set gives are consecutive. rows: their places among the n samples.
        """
        which, numbers = self.locate(np.arange(first, first + n, dtype=np.int64))
        for i in np.unique(which).tolist():
            rows = np.flatnonzero(which == i)
            yield self.parts[i], int(numbers[rows[0]]), rows

    def batch(self, first, n):
        """Return samples first .. first+n-1 as x, y, (n, T) int64 each, as Tokens.batch."""
        import torch

        x = torch.empty(n, self.seq_len, dtype=torch.int64)
        y = torch.empty_like(x)
        for part, start, rows in self.pieces(first, n):
            x[rows], y[rows] = part.batch(start, len(rows))
        return x, y

    def places(self, first, x):
        """Return the place of each token in its document, as Tokens.places.

        A window is one document if --doc-mask does not separate those of its data set.
        """
        places = document_places(x, -1)  # no token has this id
        for part, start, rows in self.pieces(first, len(x)):
            if part.has_documents:
                places[rows] = part.places(start, x[rows])
        return places

    def n_targets(self, first, n):
        """Return how many tokens of samples first .. first+n-1 are trained."""
        return sum(part.n_targets(start, len(rows)) for part, start, rows in self.pieces(first, n))

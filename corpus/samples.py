"""Samples: what a run reads, in which order, and which of it each rank reads.

Sample i of a run is a pure function of (seed, i), so any number of ranks, and a resumed run, see the same
samples. A split of a data set is one stream of tokens (corpus/shards.py), cut into windows of seq_len tokens.

    1) one data set       Tokens; Synthetic has samples without files
    2) --data             Blend: A, or A:0.7,B:0.3 by weight
    3) a run              open_data, batch_size, trained_tokens, micro_batches
"""
import json
from bisect import bisect_right
from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np

from config import ceil_div
from corpus.chat import END
from corpus.masked import Masked
from corpus.order import draw_keys, permute, splitmix64
from corpus.shards import how_to_fix, load_meta, open_shards

MAX_PERIOD = 100_000  # the most entries of a blend's schedule; that many take 0.6 s to compute


# 1) One data set

def inputs_and_targets(windows):
    """Return x, y of token ids, (n, T+1) -> (n, T) each: new int64 tensors, y one token ahead of x."""
    import torch  # not at the top: prepare.py and its workers start without torch
    x = torch.from_numpy(windows[:, :-1].astype(np.int64))
    y = torch.from_numpy(windows[:, 1:].astype(np.int64))
    return x, y


def document_places(tokens, eod):
    """Return each token's place in its document, which begins with eod, from 1 on: (n, T) -> (n, T) int64."""
    import torch
    positions = torch.arange(tokens.size(1))
    starts = torch.where(tokens == eod, positions, 0).cummax(1).values  # of each token's document
    return positions - starts + 1


class Synthetic:
    """Samples without files: a sequence counts up with its own stride of 1 to 4, one token in 8 is noise."""

    def __init__(self, vocab_size, seq_len, seed=0):
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.n_samples = 1 << 40
        self.all_trained = True
        self.has_documents = False
        self.key = draw_keys("synthetic", seed)[0]

    def batch(self, first, n):
        samples = np.arange(first, first + n, dtype=np.uint64)[:, None]  # (n, 1)
        positions = np.arange(self.seq_len + 1, dtype=np.uint64)  # (T+1,)
        random = splitmix64(splitmix64(samples + self.key))  # (n, 1), gives the first token and the stride
        stride = np.uint64(1) + random % np.uint64(4)
        count = (random >> np.uint64(8)) + positions * stride  # (n, T+1)
        noise = splitmix64(random + splitmix64(positions + np.uint64(1)))  # (n, T+1)
        tokens = np.where(noise % np.uint64(8) == 0, noise >> np.uint64(8), count)
        return inputs_and_targets(tokens % np.uint64(self.vocab_size))

    def n_targets(self, first, n):
        return n * self.seq_len


class Tokens:
    """One split of one data set as numbered samples. They never end: after an epoch the next one begins.

    train: an epoch is a permutation of all windows, keyed by (seed, epoch). From the second epoch on the
    windows also start at another offset, so that the text is cut elsewhere. val: in order, each epoch alike.
    Windows of conversations stay as prepare.py packed them; what is not trained has the target IGNORE.
    """

    def __init__(self, folder, split, seq_len, seed=0, doc_mask="auto"):
        meta = load_meta(folder)
        self.split = split
        self.seq_len = seq_len
        self.seed = seed
        self.vocab_size = meta["vocab_size"]
        self.eod = meta["eod"]
        self.all_trained = "seq_len" not in meta  # else they are conversations
        if doc_mask == "on" and self.eod is None:
            raise ValueError(f"--doc-mask on: the vocabulary of {folder} has no <|endoftext|> to separate "
                             "its documents; leave it out, or prepare the text with another --tokenizer")
        is_asked = doc_mask == "on" or (doc_mask == "auto" and not self.all_trained)
        self.has_documents = self.eod is not None and is_asked
        self.shards = open_shards(folder, split, meta)
        ends = np.cumsum([len(shard) for shard in self.shards]).tolist()
        self.starts = [0, *ends[:-1]]  # the position in the stream where each shard starts
        self.n_tokens = ends[-1]  # the length of the stream
        # From a window's start to the next window's: windows of text overlap by one token.
        self.stride = seq_len
        self.n_samples = (self.n_tokens - 1) // seq_len  # windows per epoch
        if self.n_samples < 1 and self.all_trained:
            raise ValueError(f"{folder}: {split} has {self.n_tokens} tokens, one window needs {seq_len + 1};"
                             f" use --seq-len {max(1, self.n_tokens - 1)} or prepare more text")
        if self.all_trained:
            return

        if meta["seq_len"] != seq_len:
            raise ValueError(f"{folder} has windows of {meta['seq_len']} tokens, --seq-len is {seq_len};"
                             f" give --seq-len {meta['seq_len']}, or prepare the conversations again")
        self.stride = seq_len + 1
        self.n_samples = self.n_tokens // self.stride
        self.masks = open_shards(folder, split, meta, "masks")
        if [*map(len, self.masks)] != [*map(len, self.shards)]:
            raise ValueError(f"{folder}: the masks of {split} do not fit its tokens; {how_to_fix(meta)}")
        spec = json.loads(Path(folder, "tokenizer.json").read_text())
        theirs = spec.get("json", {}).get("added_tokens", [])  # of Hugging Face, which may have END itself
        self.end = ({token["content"]: token["id"] for token in theirs} | spec.get("special", {}))[END]

    def batch(self, first, n):
        """Return samples first .. first+n-1 of the run as x, y, (n, T) int64 each: new tensors.

        Where documents are apart, also the place of each token in its document; 0 for what fills a window.
        """
        starts = self.window_starts(first, n).tolist()
        x, y = inputs_and_targets(self.read(self.shards, starts))
        if not self.all_trained:
            from ops.cross_entropy import IGNORE  # not at the top: it imports torch
            _, trained = inputs_and_targets(self.read(self.masks, starts))
            y.masked_fill_(trained == 0, IGNORE)
        if not self.has_documents:
            return x, y
        places = document_places(x, self.eod)
        if not self.all_trained:  # conversations: every <|end|> after another one
            places[:, 1:].masked_fill_((x[:, 1:] == self.end) & (x[:, :-1] == self.end), 0)
        return x, y, places

    def read(self, shards, starts):
        """Return the windows at these positions of the stream of `shards`, (n, T+1)."""
        windows = np.empty((len(starts), self.seq_len + 1), shards[0].dtype)
        for window, start in zip(windows, starts, strict=True):
            filled = 0
            # One pass, unless the window goes on in the next shard or at the start of the stream.
            while filled < len(window):
                at = (start + filled) % self.n_tokens
                number = bisect_right(self.starts, at) - 1
                at_in_shard = at - self.starts[number]
                piece = shards[number][at_in_shard : at_in_shard + len(window) - filled]
                window[filled : filled + len(piece)] = piece
                filled += len(piece)
        return windows

    def n_targets(self, first, n):
        """Return how many tokens of samples first .. first+n-1 are trained; a rank may ask about any."""
        if self.all_trained:
            return n * self.seq_len
        starts = self.window_starts(first, n).tolist()
        return int(self.read(self.masks, starts)[:, 1:].sum())

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
        if epoch > 0 and self.all_trained:
            starts += keys[4] % np.uint64(self.seq_len)
        return starts


# 2) One data set, or several by weight. The weights become whole numbers that sum to a period P. Within every
# P samples, each data set gives exactly its number of them. The j-th sample that a data set gives to a blend
# is its sample j when it is used alone.

def parse_blend(spec):
    """Return {folder: its samples per period}: the smallest whole numbers in the ratio of the weights."""
    if "," not in spec and ":" not in spec:
        return {spec: 1}

    weights = {}
    for item in spec.split(","):
        folder, _, weight = item.partition(":")
        try:
            weight = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            weight = 0
        if not folder or folder in weights or weight <= 0:
            raise ValueError(f"--data {spec}: write it as A:0.7,B:0.3, each folder once with a weight "
                             "above 0")
        weights[folder] = weight
    total = sum(weights.values())
    period = lcm(*((weight / total).denominator for weight in weights.values()))
    if period > MAX_PERIOD:
        raise ValueError(f"--data {spec}: as whole numbers the weights sum to {period:,}, at most"
                         f" {MAX_PERIOD:,} are possible; round them")
    return {folder: int(weight / total * period) for folder, weight in weights.items()}


def first_folder(spec):
    return next(iter(parse_blend(spec)))


def sample_schedule(counts):
    """Return which data set gives each sample of a period P, and how many it gave before: (2, P) int64.

    counts: the samples of each data set, whose sum is P.
    Sample c of a data set with n of the P samples may come once c P / n samples are given in all, and must
    come before (c + 1) P / n are. The one with the earliest deadline comes. So no count is ever a whole
    sample off its share (the chairman assignment problem, Tijdeman 1980).
    """
    counts = np.array(counts)
    period = counts.sum()
    given = np.zeros_like(counts)  # by each data set so far
    schedule = np.empty((2, period), np.int64)
    for i in range(period):
        may_come = given * period < (i + 1) * counts
        deadline = ceil_div((given + 1) * period, counts)
        chosen = np.argmin(np.where(may_come, deadline, 2 * period))
        schedule[:, i] = chosen, given[chosen]
        given[chosen] += 1
    return schedule


def identify(spec):
    """Return a str that other data or other weights would change; checkpoints keep it."""
    counts = parse_blend(spec)
    metas = {folder: load_meta(folder) for folder in counts}
    first = metas[first_folder(spec)]
    masks = []
    for folder, meta in metas.items():
        if meta["tokenizer_sha256"] != first["tokenizer_sha256"]:
            raise ValueError(f"{folder} has another tokenizer than {first_folder(spec)}; prepare it again "
                             f"with --tokenizer {first_folder(spec)} and another --name")
        if "masks" in meta:
            masks += meta["masks"]["train"] + meta["masks"]["val"]
    train = [file for meta in metas.values() for file in meta["shards"]["train"]]
    val = [file for meta in metas.values() for file in meta["shards"]["val"]]
    if {file["sha256"] for file in train} & {file["sha256"] for file in val}:
        raise ValueError(f"--data {spec}: a train and a val shard have equal sha256; one data set would be "
                         "tested on what another trains on: leave one out")
    identity = [file["sha256"][:16] for file in train + val + masks]
    if len(counts) > 1:
        identity.append(":".join(map(str, counts.values())))
    return " ".join(identity)


class Blend:
    """One split of the data sets of --data, by weight, with the interface of Tokens."""

    def __init__(self, spec, split, seq_len, seed=0, doc_mask="auto"):
        self.seq_len = seq_len
        counts = parse_blend(spec)
        self.parts = [Tokens(folder, split, seq_len, seed, doc_mask) for folder in counts]
        self.vocab_size = self.parts[0].vocab_size
        self.all_trained = all(part.all_trained for part in self.parts)
        self.has_documents = any(part.has_documents for part in self.parts)
        self.per_period = list(counts.values())
        self.schedule, self.given = sample_schedule(self.per_period)
        # Until the first data set begins its second epoch.
        self.n_samples = min(max(1, part.n_samples * len(self.schedule) // count)
                             for part, count in zip(self.parts, self.per_period, strict=True))

    def pieces(self, first, n):
        """Yield what each data set gives to n samples: (Tokens, its first sample, their rows among the n)."""
        period, k = np.divmod(np.arange(first, first + n), len(self.schedule))
        which = self.schedule[k]
        for i in np.unique(which).tolist():
            rows = np.flatnonzero(which == i)
            row = rows[0]
            start = period[row] * self.per_period[i] + self.given[k[row]]
            yield self.parts[i], int(start), rows

    def batch(self, first, n):
        """Return Tokens.batch; a window is one document where its data set does not separate them."""
        import torch
        whole = torch.arange(1, self.seq_len + 1).repeat(2 + self.has_documents, n, 1)  # x, y, places
        for part, start, rows in self.pieces(first, n):
            for tensor, read in zip(whole, part.batch(start, len(rows)), strict=False):
                tensor[rows] = read
        return tuple(whole)

    def n_targets(self, first, n):
        return sum(part.n_targets(start, len(rows)) for part, start, rows in self.pieces(first, n))


# 3) A run

def open_data(cfg):
    """Return the data of a run: train, val, vocab_size (of cfg or, where it is 0, of the data), identity."""
    n_mask = 1 if cfg.objective == "mlm" else 0  # [MASK] is one id past the data's
    if cfg.data == "synthetic":
        if cfg.doc_mask == "on":
            raise ValueError("--doc-mask on: --data synthetic has no documents; leave out --doc-mask")
        vocab_size = cfg.vocab_size or 256 + n_mask
        train = Synthetic(vocab_size - n_mask, cfg.seq_len, cfg.seed)
        val = Synthetic(vocab_size - n_mask, cfg.seq_len, cfg.seed + 1)
        identity = f"synthetic-{vocab_size}"
    else:
        identity = identify(cfg.data)
        train = Blend(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.doc_mask)
        val = Blend(cfg.data, "val", cfg.seq_len, cfg.seed, cfg.doc_mask)
        needed = train.vocab_size + n_mask
        vocab_size = cfg.vocab_size or needed
        if vocab_size < needed:
            raise ValueError(f"--vocab-size {vocab_size} is less than the {needed} symbols that {cfg.data} "
                             f"needs; try --vocab-size {needed}")
    if cfg.objective == "mlm":
        if not train.all_trained:
            raise ValueError(f"--data {cfg.data} has conversations, --objective mlm would mask their "
                             "padding; prepare them as text")
        train = Masked(train, cfg.seed)
        val = Masked(val, cfg.seed + 1)
    return train, val, vocab_size, identity


def batch_size(samples, full, ramp=()):
    """Return the sequences of the step that starts after `samples` were consumed.

    full: the batch after the ramp. ramp: () or (START, INCREMENT, SAMPLES), as in Megatron-LM: the batch
    begins with START sequences and grows by INCREMENT while the first SAMPLES are consumed.
    """
    if not ramp:
        return full
    start, increment, over = ramp
    stages = (full - start) // increment
    return min(full, start + increment * (samples * stages // over))


def trained_tokens(source, first, count, device):
    """Return the trained tokens of the `count` samples from `first` on, by which their loss is divided.

    An int, a constant of a CUDA graph, if the source trains every token; otherwise () int64 on the device.
    """
    n = source.n_targets(first, count)
    if source.all_trained:
        return n
    import torch
    return torch.full((), n, device=device)


def micro_batches(cfg, mesh, source, first, count, device):
    """Return this rank's micro-batches of the `count` samples from `first` on, [(x, y)].

    x, y: (B, T/cp) int64. With micro-batches of mb samples, micro-batch j holds samples j*mb .. (j+1)*mb-1.
    Rank d of dp takes n_batches of them, from d*n_batches on, and its cp ranks their segments of each sample.
    Where --doc-mask separates documents, a micro-batch is (x, y, places), each cut over cp.
    """
    n_batches = count // (cfg.micro_batch * mesh.dp.size)
    start = first + mesh.dp.rank * n_batches * cfg.micro_batch
    batches = []
    for number in range(start, start + n_batches * cfg.micro_batch, cfg.micro_batch):
        batch = source.batch(number, cfg.micro_batch)  # x, y and maybe places, (B, T) each
        if mesh.cp.size > 1:
            batch = tuple(mesh.cp.own_segments(tensor, 1) for tensor in batch)
        if device.type != "cpu":
            batch = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
        batches.append(batch)
    return batches

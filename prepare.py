"""Text, or conversations, to token files.

    python prepare.py stdlib
    python prepare.py FILE... --name NAME
    python prepare.py chat FILE.jsonl... --name NAME --tokenizer data/stdlib --seq-len 128

FILE is text or .jsonl, either packed as .gz or .zst, or .parquet (the last two need pyarrow), or a data set
on the Hugging Face hub (needs datasets): fineweb_edu_10bt (28 GB), fineweb_edu, dclm_baseline_1.0 (several
TB), dclm_baseline_1.0_10prct, hf:OWNER/NAME::PATTERN.

A document is a file of the standard library, a record, or about 4,000 characters of other text. An
end-of-document follows it, and the hash of its text alone decides between train and val, so duplicates stay
together. `char` has no documents: its text is one stream, and the last tenth is val. docs/chat.md tells of
conversations.
"""
import functools
import itertools
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import interface.packages  # noqa: F401  isort: skip (it says in one line which package is missing)
import numpy as np
import tyro

from corpus import chat, shards, text, tokenizer
from corpus.order import draw_keys, permute, split_of
from corpus.shards import SPLITS
from interface.command_line import command_line, wrong_input
from interface.files import set_aside, whole_folder
from interface.terminal import say, warn

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TRAINING_BYTES = 64 << 20  # amount of text to train a vocabulary on
ENDS = re.compile(r"<\|end_?of_?text\|>|</s>|<eos>")  # how texts of others spell the end of a document
# `encodings` and `pydoc_data` are tables and help texts, 18 % of the text, and hardly programs.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
Sources = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE...")]]
Switch = tyro.conf.FlagCreatePairsOff[bool]  # a flag without its --no- twin


@dataclass(frozen=True)
class Flags:
    """The command line of prepare.py."""
    # stdlib; files; chat and files of conversations; or data sets on the hub, by the names above
    sources: Sources = ()
    name: str = ""  # the folder under --out; the default is stdlib for stdlib
    out: str = "data"  # where that folder goes
    val: str = ""  # a file of its own for val; else it is a share of the sources
    val_fraction: float = 0.1  # that share
    # char, bpe (trained on the sources), gpt2, o200k_base..., a prepared folder, or hf:FOLDER of Hugging Face
    tokenizer: str = "bpe"
    vocab_size: int = 4096  # bpe: number of ids, end-of-document included
    text_key: str = "text"  # the column or json key of the text
    split_at: str = ""  # words that end a document in the text, such as "<|endoftext|>"
    shuffle: Switch = False  # put the documents of all sources in one random order, as records without a flag
    no_shuffle: Switch = False  # keep the order of the sources, as texts without a flag
    seed: int = 1337  # of the shuffle
    shard_tokens: int = 1 << 28  # tokens per file; 2**28 are 512 MB as uint16
    seq_len: int = 128  # chat: tokens of a window; a longer conversation is cut
    workers: int = min(8, os.cpu_count() or 1)  # processes
    with_tests: bool = False  # stdlib: its test suites too, 3 times the text
    replace: Switch = False  # make it also where something stands, which becomes NAME.old
    verify: bool = False  # only read the prepared files and compare their sha256
    # at least the 256 bytes and end-of-document
    RANGES = {"vocab_size": (257, 1 << 31), "workers": (1, 1024), "shard_tokens": (1, 1 << 40),
              "val_fraction": (0, 1)}


def parse(argv):
    """Return the Flags of argv (list of str). ValueError: one line that says what is wrong."""
    flags = command_line(Flags, argv, "prepare.py", __doc__)
    if not flags.sources and not flags.verify:
        raise ValueError("no SOURCE is given: stdlib, files, or names on the hub; see prepare.py --help")
    if flags.sources[:1] == ("chat",) and (len(flags.sources) == 1 or flags.tokenizer in ("char", "bpe")):
        raise ValueError("chat needs FILE.jsonl, with a conversation on each line, and --tokenizer, that of "
                         "the model: --tokenizer data/stdlib")
    if flags.sources[:1] == ("chat",) and (flags.shuffle or flags.no_shuffle or flags.split_at):
        raise ValueError("--shuffle, --no-shuffle and --split-at are for texts, not for conversations")
    if {"shakespeare", "tinyshakespeare"} & set(flags.sources) and not Path(flags.sources[0]).exists():
        raise ValueError(f"Shakespeare is fetched by: curl -LO {SHAKESPEARE}; then type: python prepare.py "
                         "input.txt --tokenizer char --name shakespeare")
    if flags.val in flags.sources:
        raise ValueError(f"--val {flags.val} is a source, too, so a model would be tested on what it learned")
    if flags.sources != ("stdlib",) and not flags.name:
        raise ValueError(f"--name NAME is missing, the folder under {flags.out}/")
    if flags.vocab_size != Flags.vocab_size and flags.tokenizer != "bpe":
        raise ValueError("--vocab-size is for --tokenizer bpe")
    return flags


def list_files(sources, flags):
    """Return the text.Files of sources, in order."""
    if sources == ("stdlib",):
        root = Path(sysconfig.get_path("stdlib"))
        skip = NOT_STDLIB if flags.with_tests else NOT_STDLIB | {"test", "tests", "idle_test"}
        names = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix)
        return [text.File("whole", str(root / name)) for name in names if not skip & set(name.parts)]
    return [file for source in sources for file in text.list_files(source, flags.text_key)]


# The tokenizer

def training_texts(files, flags):
    """Yield what a vocabulary is trained on: all of a small input, each file's beginning of a large one."""
    size = sum(os.path.getsize(file.path) for file in files)
    most = TRAINING_BYTES if size <= TRAINING_BYTES else TRAINING_BYTES // len(files)
    for file in files:
        left = most
        for document in text.documents([file], flags.text_key, flags.split_at):
            yield document
            left -= len(document.encode())
            if left < 0:
                break


def make_tokenizer(flags, files):
    """Return the tokenizer that --tokenizer names. ValueError: it is unknown or has no end-of-document."""
    if flags.tokenizer == "char":
        return tokenizer.train_char(text.documents(files, flags.text_key, flags.split_at))
    if flags.tokenizer == "bpe":
        return tokenizer.train_bpe(training_texts(files, flags), flags.vocab_size)
    folder = Path(flags.tokenizer.removeprefix("hf:"))
    if not (folder / "tokenizer.json").is_file():
        return tokenizer.from_tiktoken(flags.tokenizer)
    found = tokenizer.load(folder)
    if found.eod is None and found.kind != "char":
        raise ValueError(f"{folder}/tokenizer_config.json names no eos_token, which ends each document")
    return found


# Documents to tokens

@functools.lru_cache(1)  # a vocabulary of 100,000 takes 0.1 s
def load_tokenizer(folder, sha256):
    return tokenizer.load(folder)


def encode(folder, sha256, jobs):
    """Return [(a document's split, its tokens and their end, its characters, the ENDS that it spells)].

    folder, sha256: of the tokenizer. jobs: [(the share of val, the document)].
    """
    vocab = load_tokenizer(folder, sha256)
    encoded = []
    for val_fraction, document in jobs:
        tokens = vocab.encode_numpy(document)
        if vocab.eod is not None:
            tokens = np.append(tokens, vocab.eod)
        encoded.append((split_of(document, val_fraction), tokens.astype(token_dtype(vocab)), len(document),
                        ENDS.findall(document)))
    return encoded


def token_dtype(vocab):
    return np.dtype("<u2" if vocab.n_vocab <= 1 << 16 else "<u4")


def encode_all(jobs, workers, encode_part):
    """Yield what encode_part() returns for each job, in order."""
    parts = iter(lambda: list(itertools.islice(jobs, 64)), [])
    if workers == 1:
        yield from itertools.chain.from_iterable(map(encode_part, parts))
        return
    context = multiprocessing.get_context("spawn")
    # At Ctrl-C this process ends its workers, which ignore it.
    with context.Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        encoded = pool.imap(encode_part, parts)
        try:
            while True:
                yield from encoded.next(timeout=600)
        except StopIteration:
            return
        except multiprocessing.TimeoutError:
            raise ValueError("no worker has answered for 600 s: was one killed, out of memory?") from None


def write_tokens(encoded, work):
    """Write encoded documents to work/SPLIT. Return {split: their lengths}, {what they hold: how often}."""
    lengths = {split: [] for split in SPLITS}
    total = Counter()
    shown = time.time()
    with open(work / "train", "wb") as train, open(work / "val", "wb") as val:
        files = {"train": train, "val": val}
        for split, tokens, characters, spelled in encoded:
            lengths[split].append(len(tokens))
            files[split].write(tokens)
            total.update(spelled, characters=characters)
            if time.time() - shown > 2:
                shown = time.time()
                say(f"encoded {total['characters'] / 1e6:,.1f} M characters")
    return lengths, total


def read_tokens(path, dtype):
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def shuffle(path, lengths, dtype, seed):
    """Put the documents of a file of tokens in an order that only the seed determines."""
    tokens = read_tokens(path, dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    keys = draw_keys("documents", seed)[:4]
    with open(path.with_suffix(".shuffled"), "wb") as f:
        for i in permute(np.arange(len(ends)), len(ends), keys).tolist():
            f.write(tokens[ends[i] - lengths[i] : ends[i]])
    os.replace(f.name, path)


# Making the data

def prepare_text(flags, files, val_files, work):
    """Make tokens of text. Return (tokenizer, {split: tokens}, no masks, what meta.json says besides)."""
    vocab = make_tokenizer(flags, files + val_files)
    vocab.save(work / "tokenizer.json")
    fraction = 0 if val_files or vocab.eod is None else flags.val_fraction
    jobs = ((share, document) for share, some in ((fraction, files), (1, val_files))
            for document in text.documents(some, flags.text_key, flags.split_at))
    encode_part = functools.partial(encode, work, vocab.sha256)
    lengths, total = write_tokens(encode_all(jobs, flags.workers, encode_part), work)

    are_records = any(file.kind not in ("whole", "text") for file in files)
    shuffled = flags.shuffle or (are_records and vocab.eod is not None and not flags.no_shuffle)
    tokens = {}
    for split in SPLITS:
        if shuffled:
            shuffle(work / split, lengths[split], token_dtype(vocab), flags.seed)
        tokens[split] = read_tokens(work / split, token_dtype(vocab))
        (work / split).unlink()
    if vocab.eod is None and not val_files:  # characters: train and val are the two ends of one stream
        cut = int(len(tokens["train"]) * (1 - flags.val_fraction))
        tokens = {"train": tokens["train"][:cut], "val": tokens["train"][cut:]}
    about = {"sources": {"characters": total.pop("characters", 0)},
             "documents": None if vocab.eod is None else {split: len(lengths[split]) for split in SPLITS}}
    for end, count in total.items():
        if vocab.eod is not None:
            warn(f"the text spells {end} {count:,} times, which are characters to the model; "
                 f"--split-at '{end}' ends a document there")
    return vocab, tokens, {}, about


def prepare_chat(flags, files, val_files, work):
    """Make tokens of conversations, like prepare_text(), but all in memory and in one process."""
    conversations = chat.read_conversations(files)
    val = chat.read_conversations(val_files)
    vocab = make_tokenizer(flags, ()).with_special(chat.MARKERS)
    vocab.save(work / "tokenizer.json")
    fraction = 0 if val_files else flags.val_fraction
    packed, counts = chat.pack(conversations, val, chat.Template(vocab), flags.seq_len, fraction, flags.seed)
    tokens = {split: ids.astype(token_dtype(vocab)).reshape(-1) for split, (ids, _) in packed.items()}
    masks = {split: trained.reshape(-1) for split, (_, trained) in packed.items()}
    about = {"sources": {"conversations": len(conversations + val), "cut": counts["cut"],
                         "dropped": counts["dropped"]},
             "seq_len": flags.seq_len, "documents": {split: counts[split] for split in SPLITS}}
    return vocab, tokens, masks, about


def make_data(flags, files, val_files, command, work):
    """Make the data set in the folder `work`. Return a line to print."""
    make = prepare_chat if flags.sources[0] == "chat" else prepare_text
    vocab, tokens, masks, about = make(flags, files, val_files, work)
    read = ", ".join(f"{count:,} {what}" for what, count in about["sources"].items())
    sizes = {split: len(tokens[split]) for split in SPLITS}
    if not all(sizes.values()):
        raise ValueError(f"{read}: train would have {sizes['train']} tokens and val {sizes['val']}, none may "
                         "be 0; give more text, another --val-fraction, --seq-len, or --tokenizer char")
    meta = {
        "version": shards.VERSION,
        "tokenizer": vocab.kind,
        "tokenizer_sha256": vocab.sha256,
        "vocab_size": vocab.n_vocab,
        "dtype": token_dtype(vocab).name,
        "tokens": sizes,
        "eod": vocab.eod,
        **about,
        "sources": {"paths": flags.sources, **about["sources"]},
        "shards": shards.write_shards(work, tokens, flags.shard_tokens),
        "command": command,
    }
    if masks:
        meta["masks"] = shards.write_shards(work, masks, flags.shard_tokens, "_mask")
    (work / "meta.json").write_text(json.dumps(meta, indent=1))
    return f"{read}, {vocab.n_vocab:,} symbols, {sizes['train']:,} + {sizes['val']:,} tokens (train + val)"


@wrong_input()
def main(argv=None):
    """Make the data and return 0. SystemExit(2) after one line on stderr: wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    start = time.time()
    flags = parse(argv)
    folder = Path(flags.out) / (flags.name or "stdlib")
    if flags.verify:
        say(f"{folder}: {shards.verify(folder)} files have their sha256")
        return 0
    sources = flags.sources[1:] if flags.sources[0] == "chat" else flags.sources
    files = list_files(sources, flags)
    val_files = text.list_files(flags.val, flags.text_key) if flags.val else []
    # What made a data set, but for what changes no byte of it.
    command = re.sub(r" --(workers[ =]\d+|replace\b)", "", shlex.join(["python", "prepare.py", *argv]))
    if folder.exists() and not flags.replace:
        if not (folder / "meta.json").is_file():
            raise ValueError(f"{folder} is there, and is no data set; give another --name")
        made_by = shards.load_meta(folder).get("command", "an older prepare.py")
        newest = max(os.path.getmtime(file.path) for file in files + val_files)
        if made_by != command or newest > os.path.getmtime(folder / "meta.json"):
            raise ValueError(f"{folder} is there, made by: {made_by}; for other flags or changed files give "
                             "another --name, or --replace it")
        shards.verify(folder)
        say(f"{folder} is up to date")
        return 0
    with whole_folder(folder) as work:
        said = make_data(flags, files, val_files, command, work)
        if folder.exists():
            set_aside(folder.resolve(), f"{folder.resolve().name}.old")
    say(f"{folder}: {said}, {time.time() - start:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Text, or conversations, to token files.

    python prepare.py stdlib
    python prepare.py FILE... --name NAME
    python prepare.py chat FILE.jsonl... --name NAME --tokenizer data/stdlib --seq-len 128

FILE is text, .jsonl or .ndjson, .jsonl.gz, .jsonl.zst (needs zstandard), .parquet (needs pyarrow), or a data
set on the Hugging Face hub (needs datasets): fineweb_edu_10bt, fineweb_edu, dclm_baseline_1.0,
dclm_baseline_1.0_10prct, hf:OWNER/NAME::PATTERN. The code that finds, fetches and reads those is tested on
small files; the download itself was never run here. fineweb_edu_10bt is about 28 GB compressed,
dclm_baseline_1.0 several TB.

1) list the sources and cut them into units of 16 MB of text
2) get the tokenizer: trained on the sources, taken from a folder, or published
3) encode the units in parallel, one part each
4) merge the parts into shards: the same bytes for any --workers
5) rename everything into data/NAME, meta.json last

The same call again finds that the data are made, and says so; where another data set stands, it changes
nothing without --replace. After a kill, it goes on from the finished
parts (data/NAME/.parts, about as large as the result) and makes the same bytes. Only files that prepare.py
made are ever replaced or removed: a folder data/NAME with anything else in their place is refused and left as
it is.

The documents are the files of the standard library, or the records. Other text is cut at blank lines into
documents of about 4,000 characters. End-of-document follows each, and the hash of its text alone decides
between train and val, so duplicates have the same split. `char` has no documents: its text is one stream, and
the last tenth is val. A record that cannot be read is named on stderr and counted, here and in meta.json.

A line of a file of conversations is {"messages": [{"role": "user", "content": "..."}, ...]}, with the roles
system, user and assistant. Only what the assistant says is trained, except with "weight": 0: docs/chat.md.
"""
import hashlib
import os
import platform
import shlex
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))
if __name__ == "__main__":  # It says what to type where they are not installed.
    from interface.packages import check_packages
    check_packages()

import numpy as np
import tyro

from config import ceil_div
from corpus import build, chat, shards, text, tokenizer
from corpus.folder import KeptWork, install, locked, owned_files
from corpus.shards import SPLITS
from interface.command_line import change_words, command_line, wrong_input
from interface.files import must_write
from interface.terminal import say

UNIT_BYTES = 16 << 20  # of text per unit of work; the number of workers does not change it
VOCAB_SIZE = 4096  # for bpe: an id stands for 3.5 characters of Python, and does not dwarf a small model
TRAINING_BYTES = 64 << 20  # amount of text to train a vocabulary on
LONG = 4  # MB of text: what takes seconds is announced
TRAINING_UNITS = 256  # the text is taken from at most this many units
# `encodings` and `pydoc_data` are tables of code points and help texts: they make up 18 % of the text, and
# are hardly programs.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
TESTS = {"test", "tests", "idle_test"}
LIMITS = {
    "workers": (1, 1024),
    "shard_tokens": (1, 1 << 40),
    "vocab_size": (tokenizer.MIN_VOCAB, tokenizer.MAX_ID),
}
MAX_SHARDS = 100_000  # files of a split
Sources = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE...")]]
Switch = tyro.conf.FlagCreatePairsOff[bool]  # a flag without its --no- twin


@dataclass(frozen=True)
class Flags:
    """The command line of prepare.py."""
    # stdlib; files; chat and files of conversations; or data sets on the hub, by the names above
    sources: Sources = ()
    name: str = ""  # the folder under --out; the default is stdlib for stdlib
    out: str = "data"  # where that folder goes
    # char, bpe (trained on the sources), gpt2, o200k_base..., a prepared folder, or hf:FOLDER of Hugging Face
    tokenizer: str = "bpe"
    vocab_size: int | None = None  # bpe: number of ids, end-of-document included; None is 4096
    text_key: str = "text"  # the column or json key of the text
    shuffle: Switch = False  # put the documents of all sources in one random order; the default for records
    no_shuffle: Switch = False  # keep the order of the sources; the default for text
    seed: int = 1337  # of the shuffle
    shard_tokens: int = 1 << 28  # tokens per file; 512 MB as uint16
    val_fraction: float = 0.1  # share of the text for val
    seq_len: int = 128  # chat: tokens of a window; a longer conversation is cut
    workers: int = min(8, os.cpu_count() or 1)  # processes, at most one per 16 MB of text
    with_tests: bool = False  # stdlib: its test suites too, 3 times the text
    replace: Switch = False  # make it also where another data set stands, which is lost
    verify: bool = False  # only read the prepared files and compare their sha256
    RANGES = LIMITS

    @property
    def stdlib(self):
        """Whether the source is the standard library."""
        return self.sources == ("stdlib",)

    @property
    def chat(self):
        """Whether the sources are conversations."""
        return self.sources[:1] == ("chat",)

    @property
    def folder(self):
        """Where the data set goes, a Path."""
        return Path(self.out) / (self.name or "stdlib")

    @property
    def order(self):
        """Whether to shuffle, or None: the kind of the sources decides."""
        if self.shuffle:
            return True
        if self.no_shuffle:
            return False
        return None


def parse(argv):
    """Return the Flags of argv (list of str). ValueError: one line that says what is wrong."""
    flags = command_line(Flags, argv, "prepare.py", __doc__)
    wrong = what_is_wrong(flags, argv)
    if wrong:
        raise ValueError(f"{wrong}; prepare.py --help lists all flags")
    return flags


def what_is_wrong(flags, argv):
    """Return what is wrong with the flags of the command line argv, or None."""
    reads_only = flags.verify and flags.name
    if not flags.sources and not reads_only:
        return "no SOURCE is given: stdlib, files, or names on the hub"
    if "stdlib" in flags.sources and not flags.stdlib:
        return "stdlib and other sources do not mix"
    if flags.chat and missing_for_chat(flags, argv):
        return missing_for_chat(flags, argv)
    if flags.chat and (flags.shuffle or flags.no_shuffle or flags.text_key != Flags.text_key):
        return ("--shuffle, --no-shuffle and --text-key are for text; conversations always come in an order "
                "of --seed, and their key is messages")
    if not flags.stdlib and not flags.name:
        for source in flags.sources:  # another misspelt word is told now, not after the name was given
            text.check_source(source)
        return f"--name NAME is missing, the folder under {flags.out}/: {command_with_name(flags, argv)}"
    if flags.name and not is_plain(flags.name):
        return f"--name {flags.name!r} is no plain name, as my-text is; --out says where that folder goes"
    if flags.with_tests and not flags.stdlib:
        return "--with-tests belongs to stdlib"
    if flags.vocab_size is not None and flags.tokenizer != "bpe":
        return "--vocab-size is for --tokenizer bpe"
    if not 0 < flags.val_fraction < 1:
        return f"--val-fraction {flags.val_fraction:g} is not between 0 and 1"
    if flags.shuffle and flags.no_shuffle:
        return "--shuffle and --no-shuffle exclude each other"
    if flags.shuffle and flags.tokenizer == "char":
        return "--shuffle needs documents, char has one text"
    return None


def missing_for_chat(flags, argv):
    """Return all that `chat` lacks, with the whole command, or ""."""
    missing = []
    changes = {}
    words = list(argv)
    if len(flags.sources) < 2:
        missing.append("FILE.jsonl, with a conversation on each line")
        words.insert(words.index("chat") + 1, "FILE.jsonl")
    if not flags.name:
        missing.append(f"--name NAME, the folder under {flags.out}/")
        changes["name"] = "NAME"
    if flags.tokenizer in ("char", "bpe"):
        missing.append("--tokenizer, that of the model (data/stdlib, or a published one)")
        changes["tokenizer"] = "data/stdlib"
    if not missing:
        return ""
    for source in flags.sources[1:]:  # a misspelt file is told first
        text.check_source(source)
    typed = ["python", "prepare.py", *change_words(words, changes)]
    return f"chat needs {'; '.join(missing)}: {shlex.join(typed)}"


def command_with_name(flags, argv):
    """Return the command line argv with a --name that the sources propose."""
    stem = Path(flags.sources[0]).name.split(".")[0].split("::")[0]
    name = stem if stem and is_plain(stem) and not set(stem) & set("*?[]") else "my-text"
    return shlex.join(["python", "prepare.py", *argv, "--name", name])


def is_plain(name):
    """Whether a name stays in its folder and is not a flag for a program: not "..", "/x", ".x" or "-x"."""
    return Path(name).name == name and name[0] not in ".-" and name.isprintable() and "\\" not in name


def list_sources(flags):
    """Return the spans of all sources (text.Span), in an order that only the sources determine."""
    sources = flags.sources[1:] if flags.chat else flags.sources
    if flags.stdlib:
        sources = list_stdlib(flags.with_tests)
    spans = []
    for source in sources:
        spans += text.list_spans(source, UNIT_BYTES, flags.text_key, whole=flags.stdlib)
    return spans


def list_stdlib(with_tests):
    """Return the paths of the standard library's files, in order."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = NOT_STDLIB if with_tests else NOT_STDLIB | TESTS
    names = sorted((path.relative_to(root) for path in root.rglob("*.py")), key=Path.as_posix)
    paths = [str(root / name) for name in names if not skip & set(name.parts)]
    if not paths:
        raise ValueError(f"no .py files under {root}: give text files instead of stdlib")
    return paths


def fingerprint(flags, spans):
    """Return a hash of all that determines the result. The hash tells whether a data set is up to date."""
    settings = [shards.VERSION, text.DOC_CHARS, borrowed_tokenizer(flags), spans,
                flags.seed, flags.shard_tokens, flags.order, flags.stdlib, flags.text_key, flags.tokenizer,
                flags.val_fraction, flags.vocab_size]
    if flags.chat:
        settings.append(flags.seq_len)
    return hashlib.sha256(repr(settings).encode()).hexdigest()


# -----------------------------------------------------------------------------
# The tokenizer

def borrowed_tokenizer(flags):
    """Return the tokenizer of the folder that --tokenizer names as bytes, or b"" if it names none.

    The folder is another data set, or one of Hugging Face.
    """
    folder = Path(flags.tokenizer.removeprefix("hf:"))
    if not (folder / "tokenizer.json").is_file():
        return b""
    content = (folder / "tokenizer.json").read_bytes()
    config = folder / "tokenizer_config.json"
    if config.is_file():
        content += config.read_bytes()
    return content


def training_texts(units, key):
    """Yield texts to train a vocabulary on.

    These are all texts of a small input, and the beginnings of some units of a large one.
    """
    step = ceil_div(len(units), TRAINING_UNITS)
    some = units[::step]
    for unit in some:
        left = TRAINING_BYTES // len(some)
        for document in all_documents([unit], key):
            yield document
            left -= len(document.encode(errors="replace"))
            if left < 0:
                break


def all_documents(units, key):
    """Yield the documents of all units in order. What cannot be read is reported later, by the encoding."""
    def ignore(kind, line):
        pass

    for unit in units:
        for span in unit:
            yield from text.documents(span, key, ignore)


def make_tokenizer(flags, units):
    """Return the tokenizer that --tokenizer names. ValueError: there is none, or it has no end-of-document.

    The tokenizer is trained on the sources (char, bpe), taken from another data set or from Hugging Face (a
    folder), or published (any other name).
    """
    if flags.tokenizer == "char":
        return tokenizer.train_char(all_documents(units, flags.text_key))
    if flags.tokenizer == "bpe":
        return tokenizer.train_bpe(training_texts(units, flags.text_key), flags.vocab_size or VOCAB_SIZE)
    if borrowed_tokenizer(flags) or flags.tokenizer.startswith("hf:"):
        folder = flags.tokenizer.removeprefix("hf:")
        if not (Path(folder) / "tokenizer.json").is_file():
            raise ValueError(f"--tokenizer {flags.tokenizer}: {folder} holds no tokenizer.json; give "
                             "hf:FOLDER of a downloaded model, or a published tokenizer such as gpt2")
        borrowed = tokenizer.load(Path(folder) / "tokenizer.json")
        if borrowed.eod is None and borrowed.kind != "char":
            raise ValueError(f"{folder}/tokenizer_config.json names no eos_token of its vocabulary,"
                             " which ends each document; add one there")
        return borrowed
    return tokenizer.from_tiktoken(flags.tokenizer)


def keep_tokenizer(flags, units, path):
    """Return the tokenizer that a stopped run left at `path`; otherwise make one and save it there."""
    try:
        return tokenizer.load(path)
    except (ValueError, OSError):
        size = sum(span.size for unit in units for span in unit) / 1e6
        if size > LONG and flags.tokenizer == "bpe":
            some = min(size, TRAINING_BYTES / 1e6)
            say(f"trains a vocabulary on {some:,.0f} MB of {size:,.0f} MB of text, then encodes all of it")
        new = make_tokenizer(flags, units)
        new.save(path.with_name("tokenizer.tmp"))
        os.replace(path.with_name("tokenizer.tmp"), path)
        return new


def token_dtype(vocab):
    """Return the dtype of the token files of a vocabulary, as numpy writes it."""
    return "<u2" if vocab.n_vocab <= 1 << 16 else "<u4"


# -----------------------------------------------------------------------------
# Making the data

def prepare_text(flags, spans, about):
    """Make a data set of text in folder/.parts, then rename it into place; return a line that says so.

    Steps 2) to 5) are those at the top of this file. about: {"fingerprint", "command"} for meta.json.
    ValueError, OSError: the sources cannot be read, or are too short. In that case an older data set in the
    folder is unchanged.
    """
    start = time.time()
    work = flags.folder / ".parts"
    units = text.group_spans(spans, UNIT_BYTES)
    owned_files(flags.folder)  # a foreign folder is refused now, not after hours of work
    with locked(work):
        # 2) The tokenizer, and all that the parts depend on.
        vocab_path = work / f"{about['fingerprint']}.json"
        vocab = keep_tokenizer(flags, units, vocab_path)
        seed = flags.seed if is_shuffled(flags, spans, vocab) else None
        settings = build.Settings(str(vocab_path), vocab.sha256, token_dtype(vocab), flags.text_key,
                                  flags.val_fraction, seed)

        # 3) The parts, and what could not be read.
        results, paths = build.encode_all(units, flags.workers, work, settings, say)
        total = {name: sum(result["counts"][name] for result in results) for name in build.COUNTS}
        problems = {kind: total[kind] for kind in build.PROBLEMS}
        left_out = ", ".join(f"{count:,} {kind}" for kind, count in problems.items() if count)
        build.print_problems(results, total, left_out)

        # 4) The shards.
        tokens, streams = open_streams(results, paths, settings, vocab, total)
        check_amount(flags, tokens, total, left_out)
        files = {}
        for split in SPLITS:
            files[split] = write_shards(work, split, settings.dtype, streams[split], tokens[split],
                                        flags.shard_tokens)

        # 5) The folder.
        text_sha256 = hashlib.sha256("".join(result["sha256"] for result in results).encode()).hexdigest()
        n_files = len({span.path for span in spans})
        sources = {"paths": flags.sources, "python": platform.python_version(), "files": n_files,
                   "sha256": text_sha256, "bytes": total["bytes"], **problems}
        documents = None if vocab.eod is None else {split: total[split] for split in SPLITS}
        meta = common_meta(vocab, tokens, documents, sources)
        meta |= {"shuffle_seed": seed, "shards": files, **about}
        install(work, flags.folder, vocab, meta)
    return (f"{flags.folder}: {total['chars']:,} characters, {vocab.n_vocab:,} symbols,"
            f" {tokens['train']:,} + {tokens['val']:,} tokens (train + val),"
            f" {n_files} files ({left_out or 'nothing'} left out), {time.time() - start:.1f} s")


def is_shuffled(flags, spans, vocab):
    """Whether the documents are put in a random order: as the flags say. By default, records are."""
    if flags.order is not None:
        return flags.order
    return vocab.eod is not None and any(span.kind in text.RECORDS for span in spans)


def open_streams(results, paths, settings, vocab, total):
    """Return {split: number of tokens} and {split: TokenStream} of the encoded parts."""
    if vocab.eod is None:  # char: train and val are the two ends of one stream
        cut = int(total["chars"] * (1 - settings.val_fraction))
        stream = TokenStream(build.merge(results, paths, "train", settings))
        return {"train": cut, "val": total["chars"] - cut}, {"train": stream, "val": stream}
    tokens = {}
    streams = {}
    for split in SPLITS:
        tokens[split] = sum(run[split][1] for result in results for run in result["runs"])
        streams[split] = TokenStream(build.merge(results, paths, split, settings))
    return tokens, streams


def check_amount(flags, tokens, total, left_out):
    """Raise ValueError if a split would be empty, or would have too many files."""
    if not all(tokens.values()):
        without = f" ({left_out})" if left_out else ""
        documents = total["train"] + total["val"]
        if not documents:
            key = ", or the --text-key of theirs" if left_out else ""
            raise ValueError(f"{shlex.join(flags.sources)}: no text is in it{without}; give files that have "
                             f"some{key}")
        raise ValueError(f"{flags.folder} would have {tokens['train']:,} + {tokens['val']:,} tokens (train + "
                         f"val) of {documents:,} documents{without}, none may be 0; give more text,"
                         " another --val-fraction, or --tokenizer char")
    most = max(tokens.values())
    if most > MAX_SHARDS * flags.shard_tokens:
        raise KeptWork(f"{most:,} tokens of a split by {flags.shard_tokens} are more than {MAX_SHARDS} "
                       f"files; give --shard-tokens {most // MAX_SHARDS + 1} or more")


def prepare_chat(flags, spans, about):
    """Make a data set of conversations, like prepare_text(), but all in memory and in one process."""
    start = time.time()
    work = flags.folder / ".parts"
    owned_files(flags.folder)
    with locked(work):
        conversations = chat.read_conversations(spans)
        vocab = make_tokenizer(flags, ()).with_special(chat.MARKERS)
        packed = chat.pack(conversations, chat.Template(vocab), flags.seq_len, flags.val_fraction, flags.seed)
        dtype = token_dtype(vocab)
        files = {}
        masks = {}
        for split in SPLITS:
            ids = packed.ids[split].astype(dtype).reshape(-1)
            mask = packed.trained[split].reshape(-1)
            files[split] = write_shards(work, split, dtype, TokenStream([ids]), ids.size, flags.shard_tokens)
            masks[split] = write_shards(work, f"{split}_mask", "u1", TokenStream([mask]), mask.size,
                                        flags.shard_tokens)

        tokens = {split: packed.ids[split].size for split in SPLITS}
        sources = {"paths": flags.sources, "cut": packed.cut, "dropped": packed.dropped}
        meta = common_meta(vocab, tokens, packed.count, sources)
        meta |= {"seq_len": flags.seq_len, "shards": files, "masks": masks, **about}
        install(work, flags.folder, vocab, meta)
    return f"{flags.folder}: {packed.describe(vocab, flags.seq_len)}, {time.time() - start:.1f} s"


def common_meta(vocab, tokens, documents, sources):
    """Return the first fields of meta.json, which text and conversations have in common."""
    return {
        "version": shards.VERSION,
        "tokenizer": vocab.kind,
        "tokenizer_sha256": vocab.sha256,
        "vocab_size": vocab.n_vocab,
        "dtype": np.dtype(token_dtype(vocab)).name,
        "tokens": tokens,
        "eod": vocab.eod,
        "documents": documents,
        "sources": sources,
    }


class TokenStream:
    """Tokens from an iterator of arrays; the caller says how many to take at a time."""

    def __init__(self, arrays):
        self.arrays = iter(arrays)
        self.rest = ()  # what is left of the current array

    def take(self, n):
        """Yield the next n tokens as arrays."""
        while n:
            if not len(self.rest):
                self.rest = next(self.arrays)
            piece = self.rest[:n]
            self.rest = self.rest[n:]
            n -= len(piece)
            yield piece


def write_shards(folder, split, dtype, stream, tokens, shard_tokens):
    """Write the next `tokens` tokens of a TokenStream as shards; return what meta.json says of each."""
    made = []
    for first in range(0, tokens, shard_tokens):
        path = folder / f"{split}_{len(made):05d}.bin"
        made.append(write_shard(path, dtype, stream, min(shard_tokens, tokens - first)))
    return made


def write_shard(path, dtype, stream, n):
    """Write the next n tokens of a TokenStream as one shard; return what meta.json says of it."""
    header = shards.pack_header(np.dtype(dtype).itemsize, n)
    digest = hashlib.sha256(header)
    max_id = 0
    with open(path, "wb") as f:
        f.write(header)
        for piece in stream.take(n):
            f.write(piece)
            digest.update(piece)
            max_id = max(max_id, int(piece.max(initial=0)))
        f.flush()
        os.fsync(f.fileno())
    return {"file": path.name, "tokens": n, "sha256": digest.hexdigest(), "max_id": max_id}


def words_of_command(argv):
    """Return argv without --replace, which says nothing about the data that are made."""
    return [word for word in argv if word != "--replace"]


def same_data(command):
    """Return the words of a command without --workers, which changes no byte: equal ones make the same."""
    words = iter(shlex.split(command))
    kept = []
    for word in words:
        if word == "--workers":
            next(words, None)
        elif not word.startswith("--workers="):
            kept.append(word)
    return kept


def refuse_another(flags, command):
    """Return the command of the data set that this one replaces, or "" where there is none.

    The same command may always replace its own work: its sources have changed, or the files are damaged.
    ValueError: another data set stands there, and --replace is not given.
    """
    owned_files(flags.folder)  # what prepare.py did not make is refused by its name
    try:
        meta = shards.load_meta(flags.folder)
    except (ValueError, OSError):  # there is none, or none that train.py reads
        return ""
    made_by = shards.as_prepare_writes_it(meta.get("command", ""))
    if same_data(made_by) == same_data(command):
        return shards.as_prepare_writes_it(meta.get("replaced", ""))
    if not flags.replace:
        counts = " + ".join(f"{meta['tokens'][split]:,}" for split in SPLITS)
        sources = meta.get("sources")
        paths = sources.get("paths") if isinstance(sources, dict) else None
        of = ", ".join(map(str, paths[:3])) if isinstance(paths, list) else "unknown sources"
        raise ValueError(f"{flags.folder} holds another data set, {counts} tokens of {of}, made with: "
                         f"{made_by or 'an unknown command'}; give another --name, or --replace to lose it")
    return made_by


def is_up_to_date(folder, wanted):
    """Whether the folder holds a sound data set with this fingerprint."""
    try:
        meta = shards.load_meta(folder)
        return meta.get("fingerprint") == wanted and shards.verify(folder) > 0
    except (ValueError, OSError):  # absent or damaged: the data set is made
        return False


def main(argv=None):
    """Make the data and return 0. SystemExit(2) after one line on stderr: wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    with wrong_input():
        flags = parse(argv)
        if flags.verify:
            n_files = shards.verify(flags.folder, cache=False)
            say(f"{flags.folder}: {n_files} files have their sha256")
            return 0
        spans = list_sources(flags)
        about = {"fingerprint": fingerprint(flags, spans),
                 "command": shlex.join(["python", "prepare.py", *words_of_command(argv)])}
        if is_up_to_date(flags.folder, about["fingerprint"]):
            say(f"{flags.folder} is up to date")
            return 0
        replaced = refuse_another(flags, about["command"])
        if replaced:
            about["replaced"] = replaced
        with must_write(flags.folder, reads=True, left=flags.folder / ".parts"):
            make = prepare_chat if flags.chat else prepare_text
            say(make(flags, spans, about))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

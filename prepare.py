"""Text to token files:   python prepare.py stdlib   |   python prepare.py FILE... --name NAME
Conversations:   python prepare.py chat FILE.jsonl... --name NAME --tokenizer data/stdlib --seq-len 128

FILE is text, .jsonl, .jsonl.gz, .jsonl.zst (needs zstandard), .parquet (needs pyarrow), or a data set on the
Hugging Face hub (needs datasets): fineweb_edu_10bt, fineweb_edu, dclm_baseline_1.0, dclm_baseline_1.0_10prct,
hf:OWNER/NAME::PATTERN. The code that finds, fetches and reads those is tested on small files; the download
itself was never run here. fineweb_edu_10bt is about 28 GB compressed, dclm_baseline_1.0 several TB.

1) list the sources and cut them into units of 16 MB of text
2) get the tokenizer: trained on the sources, taken from a folder, or published
3) encode the units in parallel, one part each
4) merge the parts into shards: the same bytes for any --workers
5) rename everything into data/NAME, meta.json last

The same call again finds the data made and says so. After a kill it goes on from the finished parts
(data/NAME/.parts, about as large as the result) and makes the same bytes. Only files that it made are ever
replaced or removed: a folder data/NAME with anything else in their place is refused and left as it is.

The documents are the files of the standard library, or the records; other text is cut at blank lines into
documents of about 4,000 characters. End-of-document follows each, and the hash of its text alone decides
between train and val, so duplicates have the same split. `char` has no documents: its text is one stream, and
the last tenth is val. A record that cannot be read is named on stderr and counted, here and in meta.json.

A line of a conversations' file is {"messages": [{"role": "user", "content": "..."}, ...]}, roles system, user
and assistant. Only what the assistant says is trained: docs/chat.md.
"""
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from corpus import build, chat, shards, text, tokenizer
from corpus.shards import SPLITS
from interface.command_line import command_line, wrong_input
from interface.schema import check_schema, load_json

UNIT_BYTES = 16 << 20  # of text per unit of work; the workers' number does not change it
VOCAB_SIZE = 4096  # of bpe: an id stands for 3.5 characters of python, a small model is not dwarfed by them
TRAINING_BYTES = 64 << 20  # of text to train a vocabulary on
# encodings and pydoc_data are tables of code points and help texts: 18 % of the text, and hardly programs
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
TESTS = {"test", "tests", "idle_test"}
LIMITS = {"workers": (1, 1024), "shard_tokens": (1, 1 << 40),
          "vocab_size": (tokenizer.MIN_VOCAB, tokenizer.MAX_ID)}
MAX_SHARDS = 100_000  # files of a split
Sources = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE...")]]
Switch = tyro.conf.FlagCreatePairsOff[bool]  # a flag without its --no- twin


@dataclass(frozen=True)
class Flags:
    """The command line of prepare.py."""
    sources: Sources = ()  # stdlib, files, chat and files, or names on the hub (see above)
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
        """True: shuffle, False: do not, None: as the kind of the sources says."""
        return True if self.shuffle else False if self.no_shuffle else None


def parse(argv):
    """argv (list of str) -> Flags. ValueError: one line that says what is wrong."""
    flags = command_line(Flags, argv, "prepare.py", __doc__)
    for wrong, message in [
        (not flags.sources, "no SOURCE is given: stdlib, files, or names on the hub"),
        (not flags.stdlib and "stdlib" in flags.sources, "stdlib and other sources do not mix"),
        (not flags.stdlib and not flags.name, "sources other than stdlib need --name NAME, the folder under"
                                              " data/"),
        (flags.name and not plain(flags.name), f"--name {flags.name!r} is no plain name, as my-text is; --out"
                                               " says where that folder goes"),
        (flags.chat and len(flags.sources) < 2, "chat needs FILE.jsonl, with a conversation on each line"),
        (flags.chat and flags.tokenizer in ("char", "bpe"), "chat needs the tokenizer that the model knows:"
                                                            " --tokenizer data/stdlib, or a published one"),
        (flags.with_tests and not flags.stdlib, "--with-tests belongs to stdlib"),
        (flags.vocab_size is not None and flags.tokenizer != "bpe", "--vocab-size is for --tokenizer bpe"),
        (not 0 < flags.val_fraction < 1, f"--val-fraction {flags.val_fraction:g} is not between 0 and 1"),
        (flags.shuffle and flags.no_shuffle, "--shuffle and --no-shuffle exclude each other"),
        (flags.shuffle and flags.tokenizer == "char", "--shuffle needs documents, char has one text"),
    ]:
        if wrong:
            raise ValueError(f"{message} (prepare.py --help lists all flags)")
    return flags


def plain(name):
    """Whether a name stays in its folder and is no flag for another program: not "..", "/x", ".x" or "-x"."""
    return Path(name).name == name and name[0] not in ".-" and name.isprintable() and "\\" not in name


def list_sources(flags):
    """-> the spans of all sources (text.Span), in an order that only the sources determine."""
    sources = flags.sources[flags.chat:]
    if flags.stdlib:
        root = Path(sysconfig.get_path("stdlib"))
        skip = NOT_STDLIB if flags.with_tests else NOT_STDLIB | TESTS
        names = sorted((p.relative_to(root) for p in root.rglob("*.py")), key=Path.as_posix)
        sources = [str(root / name) for name in names if not skip & set(name.parts)]
        if not sources:
            raise ValueError(f"no .py files under {root}: give text files instead of stdlib")
    return [span for source in sources
            for span in text.list_spans(source, UNIT_BYTES, flags.text_key, flags.stdlib)]


def fingerprint(flags, spans):
    """-> a hash of all that determines the result: it tells whether a data set is up to date."""
    settings = [shards.VERSION, text.DOC_CHARS, borrowed_tokenizer(flags), spans,
                flags.seed, flags.shard_tokens, flags.order, flags.stdlib, flags.text_key, flags.tokenizer,
                flags.val_fraction, flags.vocab_size, *[flags.seq_len] * flags.chat]
    return hashlib.sha256(repr(settings).encode()).hexdigest()


# -----------------------------------------------------------------------------
# the tokenizer

def borrowed_tokenizer(flags):
    """-> the tokenizer of another data set or of Hugging Face as bytes where --tokenizer names its folder,
    else b""."""
    folder = Path(flags.tokenizer.removeprefix("hf:"))
    paths = [folder / f"{name}.json" for name in ("tokenizer", "tokenizer_config")]
    return b"".join(path.read_bytes() for path in paths if paths[0].is_file() and path.is_file())


def training_texts(units, key):
    """Yield texts to train a vocabulary on: all of a small input, the beginnings of some units of a large."""
    some = units[:: -(-len(units) // 256)]
    for unit in some:
        left = TRAINING_BYTES // len(some)
        for document in all_documents([unit], key):
            yield document
            left -= len(document)
            if left < 0:
                break


def all_documents(units, key):
    """Yield the documents of all units in order; encoding reports what cannot be read, not this."""
    for unit in units:
        for span in unit:
            yield from text.documents(span, key, lambda *_: None)


def make_tokenizer(flags, units):
    """-> trained on the sources (char, bpe), another data set's or Hugging Face's (a folder), or published
    (any other name). ValueError: there is none, or it has no end-of-document."""
    if flags.tokenizer == "char":
        return tokenizer.train_char(all_documents(units, flags.text_key))
    if flags.tokenizer == "bpe":
        return tokenizer.train_bpe(training_texts(units, flags.text_key), flags.vocab_size or VOCAB_SIZE)
    if borrowed_tokenizer(flags) or flags.tokenizer.startswith("hf:"):
        folder = flags.tokenizer.removeprefix("hf:")
        made = tokenizer.load(Path(folder) / "tokenizer.json")
        if made.eod is None and made.kind != "char":
            raise ValueError(f"{folder}/tokenizer_config.json names no eos_token of its vocabulary,"
                             " which ends each document; add one there")
        return made
    return tokenizer.from_tiktoken(flags.tokenizer)


def keep_tokenizer(flags, units, path):
    """-> the tokenizer at `path`, of an earlier run that was stopped; else a new one, saved there."""
    try:
        return tokenizer.load(path)
    except (ValueError, OSError):
        made = make_tokenizer(flags, units)
        made.save(path.with_name("tokenizer.tmp"))
        os.replace(path.with_name("tokenizer.tmp"), path)
        return made


# -----------------------------------------------------------------------------
# the folder

FILES = dict.fromkeys(SPLITS, [{"file": shards.shard_name}])
OURS = {"tokenizer_sha256": str, "shards": FILES, "masks?": FILES}
RENAMED_LAST = ["tokenizer.json", "meta.json"]


def listed_files(path):
    """-> the files of the data set that a meta.json describes. ValueError: it is not prepare.py's."""
    meta = load_json(path)
    check_schema(meta, OURS, path)
    return [shard["file"] for kind in ("shards", "masks") for split in SPLITS
            for shard in meta.get(kind, {}).get(split, ())] + RENAMED_LAST


def owned_files(folder):
    """-> the names in `folder` that may be replaced or removed: those that its meta.json lists, or that the
    lists in .parts do, which a killed install() leaves. ValueError: prepare.py did not make the folder, or
    something else stands where its files go. It only reads."""
    if not os.path.lexists(folder):
        return set()
    if not folder.is_dir() or (folder.is_symlink() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is a file, or a link to an empty folder; give another --name")
    there, work, owned = {path.name: path for path in folder.iterdir()}, folder / ".parts", set()
    for path in (work / "meta.json", work / "old.json"):
        with suppress(ValueError, OSError):  # one that is cut was being written: before any file was renamed
            owned.update(listed_files(path))
    try:
        if (folder / "meta.json").is_file():
            owned.update(listed_files(folder / "meta.json"))
    except ValueError as e:
        raise ValueError(f"{e}; prepare.py did not write that and changes nothing: give another --name, or"
                         f" move {folder} away") from None
    inside = list(work.iterdir()) if work.is_dir() else []
    made_here = owned or work / "lock" in inside or there.keys() <= {".parts"}
    foreign = set() if made_here else set(there)
    for name, path in there.items():
        if name == ".parts":  # no link may lead out of it: it is written to, and removed as a whole
            sound = path.is_dir() and not any(p.is_symlink() for p in [path, *inside])
            sound = sound and (not inside or path / "lock" in inside)
        else:
            sound = name in owned and path.is_file() and not path.is_symlink()
            sound = sound or not (shards.shard_name(name) or name in RENAMED_LAST)
        if not sound:
            foreign.add(name)
    if foreign:
        raise ValueError(f"{folder} holds {', '.join(sorted(foreign)[:3])}, which prepare.py did not make;"
                         " nothing is changed: give another --name, or move that away")
    return owned


@contextmanager
def locked(folder):
    """Only one prepare.py works in `folder`, else ValueError. The lock ends when its process does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(f"another prepare.py is at work on {folder.parent}; wait for it") from e
        except OSError:  # a file system without locks
            pass
        yield


# -----------------------------------------------------------------------------
# making the data

def prepare(flags, spans, about):
    """Make everything in folder/.parts, then rename it into place -> a line that says what was made.

    about: {"fingerprint", "command"} for meta.json. ValueError, OSError: the sources cannot be read, or are
    too short; an older data set in the folder is unchanged then.
    """
    start, work, units = time.time(), flags.folder / ".parts", text.group_spans(spans, UNIT_BYTES)
    owned_files(flags.folder)  # now, not after hours of work
    with locked(work):
        path = work / f"{about['fingerprint']}.json"
        vocab = keep_tokenizer(flags, units, path)
        shuffle = flags.order
        if shuffle is None:
            shuffle = vocab.eod is not None and any(span.kind in text.RECORDS for span in spans)
        dtype = "<u2" if vocab.n_vocab <= 1 << 16 else "<u4"
        settings = build.Settings(str(path), vocab.sha256, dtype, flags.text_key, flags.val_fraction,
                                  flags.seed if shuffle else None)
        results, paths = build.encode_all(units, flags.workers, work, settings,
                                          lambda line: print(line, flush=True))
        total = {name: sum(r["counts"][name] for r in results) for name in build.COUNTS}
        left_out = ", ".join(f"{total[kind]:,} {kind}" for kind in build.PROBLEMS if total[kind])
        build.print_problems(results, total, left_out)
        tokens, streams = open_streams(results, paths, settings, vocab, total)
        if not all(tokens.values()):
            raise ValueError(f"{flags.folder} would have {tokens} tokens of {total['train'] + total['val']}"
                             f" documents{left_out and f' ({left_out})'}, none may be 0; give more text,"
                             " another --val-fraction, or --tokenizer char")
        if max(tokens.values()) > MAX_SHARDS * flags.shard_tokens:
            raise ValueError(f"{tokens} tokens by {flags.shard_tokens} are more than {MAX_SHARDS} files; give"
                             f" --shard-tokens {max(tokens.values()) // MAX_SHARDS + 1} or more")
        files = {s: write_shards(work, s, dtype, streams[s], tokens[s], flags.shard_tokens)
                 for s in SPLITS}
        n_files = len({span.path for span in spans})
        sha = hashlib.sha256("".join(r["sha256"] for r in results).encode()).hexdigest()
        sources = {"paths": flags.sources, "python": platform.python_version(), "files": n_files,
                   "sha256": sha, "bytes": total["bytes"], **{kind: total[kind] for kind in build.PROBLEMS}}
        install(work, flags.folder, vocab, {
            "version": shards.VERSION, "tokenizer": vocab.kind, "tokenizer_sha256": vocab.sha256,
            "vocab_size": vocab.n_vocab, "dtype": "uint16" if dtype == "<u2" else "uint32", "tokens": tokens,
            "eod": vocab.eod, "documents": None if vocab.eod is None else {s: total[s] for s in SPLITS},
            "sources": sources, "shuffle_seed": settings.seed, "shards": files, **about})
    return (f"{flags.folder}: {total['chars']:,} characters, {vocab.n_vocab:,} symbols,"
            f" {tokens['train']:,} + {tokens['val']:,} tokens (train + val),\n"
            f"  {n_files} files ({left_out or 'nothing'} left out), {time.time() - start:.1f} s")


def prepare_chat(flags, spans, about):
    """prepare() for conversations: all are in memory, in one process -> a line that says what was made.
    ValueError, OSError: as prepare()."""
    start, work, size, masks = time.time(), flags.folder / ".parts", flags.shard_tokens, {}
    owned_files(flags.folder)
    with locked(work):
        conversations = chat.read_conversations(spans)
        vocab = make_tokenizer(flags, ()).with_special(chat.MARKERS)
        packed = chat.pack(conversations, chat.Template(vocab), flags.seq_len, flags.val_fraction, flags.seed)
        dtype, files = "<u2" if vocab.n_vocab <= 1 << 16 else "<u4", {}
        for split in SPLITS:
            ids, mask = packed.ids[split].astype(dtype).reshape(-1), packed.trained[split].reshape(-1)
            files[split] = write_shards(work, split, dtype, TokenStream([ids]), ids.size, size)
            masks[split] = write_shards(work, f"{split}_mask", "u1", TokenStream([mask]), mask.size, size)
        install(work, flags.folder, vocab, {
            "version": shards.VERSION, "tokenizer": vocab.kind, "tokenizer_sha256": vocab.sha256,
            "vocab_size": vocab.n_vocab, "dtype": "uint16" if dtype == "<u2" else "uint32",
            "tokens": {s: packed.ids[s].size for s in SPLITS}, "eod": vocab.eod, "documents": packed.count,
            "sources": {"paths": flags.sources, "cut": packed.cut, "dropped": packed.dropped},
            "seq_len": flags.seq_len, "shards": files, "masks": masks, **about})
    return f"{flags.folder}: {packed.describe(vocab, flags.seq_len)}, {time.time() - start:.1f} s"


def open_streams(results, paths, settings, vocab, total):
    """-> ({split: number of tokens}, {split: TokenStream}) of the encoded parts."""
    tokens = {s: sum(run[s][1] for result in results for run in result["runs"]) for s in SPLITS}
    streams = {s: TokenStream(build.merge(results, paths, s, settings)) for s in SPLITS}
    if vocab.eod is None:  # char: train and val are the two ends of one stream
        cut = int(total["chars"] * (1 - settings.val_fraction))
        tokens = {"train": cut, "val": total["chars"] - cut}
        streams["val"] = streams["train"]
    return tokens, streams


class TokenStream:
    """Tokens from an iterator of arrays, as many at a time as asked for."""

    def __init__(self, arrays):
        self.arrays, self.rest = iter(arrays), ()

    def take(self, n):
        """Yield the next n tokens as arrays."""
        while n:
            if not len(self.rest):
                self.rest = next(self.arrays)
            piece, self.rest = self.rest[:n], self.rest[n:]
            n -= len(piece)
            yield piece


def write_shards(folder, split, dtype, stream, tokens, shard_tokens):
    """Write the next `tokens` tokens of a TokenStream as shards -> what meta.json says of each."""
    made = []
    for first in range(0, tokens, shard_tokens):
        n, max_id = min(shard_tokens, tokens - first), 0
        header = shards.pack_header(np.dtype(dtype).itemsize, n)
        digest = hashlib.sha256(header)
        with open(folder / f"{split}_{len(made):05d}.bin", "wb") as f:
            f.write(header)
            for piece in stream.take(n):
                f.write(piece)
                digest.update(piece)
                max_id = max(max_id, int(piece.max(initial=0)))
            f.flush()
            os.fsync(f.fileno())
        made.append({"file": Path(f.name).name, "tokens": n, "sha256": digest.hexdigest(), "max_id": max_id})
    return made


def install(work, folder, vocab, meta):
    """Rename the shards from `work` into `folder`, then tokenizer.json and meta.json; delete `work`.

    There is no data set without meta.json: a kill between the renames leaves a folder that train.py refuses,
    and in `work` the lists of the old files and the new, so that the next call knows them as ours.
    """
    old, replaces = owned_files(folder), (folder / "meta.json").exists()
    if not replaces:
        remove(folder, old)  # what a killed install left: its list is about to be written over
    vocab.save(work / "tokenizer.json")
    (work / "meta.json").write_text(json.dumps(meta, indent=1))
    for split in SPLITS:  # the reader's own checks, before anything is replaced
        shards.open_shards(work, split, shards.load_meta(work))
    if replaces:
        os.replace(folder / "meta.json", work / "old.json")
        remove(folder, old)
    for name in listed_files(work / "meta.json"):
        os.replace(work / name, folder / name)
    shutil.rmtree(work)


def remove(folder, names):
    """Remove those files of `folder` that are there."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def main(argv=None):
    """-> 0, the data are there. SystemExit(2) after one line on stderr: wrong input."""
    argv = sys.argv[1:] if argv is None else argv
    with wrong_input():
        flags = parse(argv)
        folder = flags.folder
        if flags.verify:
            print(f"{folder}: {shards.verify(folder, cache=False)} files have their sha256")
            return 0
        spans = list_sources(flags)
        about = {"fingerprint": fingerprint(flags, spans),
                 "command": shlex.join(["python", "prepare.py", *argv])}
        try:
            made = shards.load_meta(folder).get("fingerprint") == about["fingerprint"]
            up_to_date = made and shards.verify(folder)
        except (ValueError, OSError):
            up_to_date = False  # absent or damaged: make it
        make = prepare_chat if flags.chat else prepare
        print(f"{folder} is up to date" if up_to_date else make(flags, spans, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())

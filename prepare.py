"""Text to token files:   python prepare.py stdlib   |   python prepare.py FILE... --name NAME

1) list the sources   2) get the tokenizer, trained on them if need be   3) encode, one part file per unit of
16 MB of text, in parallel   4) join the parts into shards, in order: the bytes are the same for any --workers
5) rename everything into data/NAME, meta.json last. The same call again finds it done and says so.

Documents are the files of the standard library; a FILE is cut at blank lines into documents of about 4,000
characters. End-of-document follows each, and the hash of its text alone decides between train and val:
duplicates land on one side. `char` has neither: its text is cut once, and the last tenth is val.
"""

import argparse
import difflib
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import sys
import sysconfig
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np

import data
import tokenizer as tok

UNIT_BYTES = 16 << 20  # of text per work unit; never a function of the worker count
SHARD_TOKENS = 1 << 28  # 512 MB as uint16
DOC_CHARS = 4_000  # of a FILE per document: small texts still fall on both sides of the split
BPE_SAMPLE_BYTES = 64 << 20  # of text are enough to train a vocabulary on
NOT_OURS, TESTS = {"site-packages", "dist-packages", "__pycache__"}, {"test", "tests", "idle_test"}


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print the usage too; main() prints one line
        raise ValueError(f"{message}; see python prepare.py --help")


def parse(argv):
    p = Parser("prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sources", nargs="+", metavar="SOURCE", help="stdlib, or utf-8 text files")
    p.add_argument("--name", help="the folder under --out (default: stdlib for stdlib)")
    p.add_argument("--out", default="data", help="where that folder goes (default: data)")
    p.add_argument("--tokenizer", default="bpe", help="char, bpe (trained on the input), gpt2, o200k_base...")
    p.add_argument("--vocab-size", type=int,
                   help="bpe: ids, end-of-document included (default: 4096, 3.5 characters of python each,"
                        " and the embeddings do not dwarf the tiny preset's layers)")
    p.add_argument("--val-fraction", type=float, default=0.1, help="share of the text for val (default: 0.1)")
    p.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1),
                   help="processes, at most one per 16 MB of text (default: the cores, up to 8)")
    p.add_argument("--with-tests", action="store_true", help="stdlib: its test suites too, 3x the text")
    p.add_argument("--verify", action="store_true", help="only read the prepared files and compare sha256")
    args, unknown = p.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], p._option_string_actions, 1)
        p.error(f"unknown flag {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
    args.stdlib = args.sources == ["stdlib"]
    args.name = args.name or "stdlib" * args.stdlib
    for wrong, message in [
        (not args.stdlib and "stdlib" in args.sources, "stdlib and text files do not mix"),
        (not args.name, "text files need --name NAME, the folder under data/"),
        (Path(args.name).name != args.name, f"--name {args.name} has a path in it; --out says where it goes"),
        (args.with_tests and not args.stdlib, "--with-tests belongs to stdlib"),
        (args.vocab_size and args.tokenizer != "bpe", "--vocab-size belongs to --tokenizer bpe"),
        (not 0 < args.val_fraction < 1, f"--val-fraction {args.val_fraction:g} is not between 0 and 1"),
        (args.workers < 1, f"--workers {args.workers} is below 1"),
    ]:
        if wrong:
            p.error(message)
    return args


def list_sources(args):
    """The files, in a fixed order."""
    if not args.stdlib:
        for name in args.sources:
            if not Path(name).is_file():
                raise FileNotFoundError(f"{name} is not a file; give stdlib or utf-8 text files")
        return [Path(name) for name in args.sources]
    root = Path(sysconfig.get_path("stdlib"))
    skip = NOT_OURS if args.with_tests else NOT_OURS | TESTS
    names = sorted((p.relative_to(root) for p in root.rglob("*.py")), key=Path.as_posix)
    files = [root / name for name in names if not skip & set(name.parts)]
    if not files:
        raise ValueError(f"no .py files under {root}: give text files instead of stdlib")
    return files


def documents(path, whole):
    """The documents of one file, none of them empty: the `whole` file, or pieces of it (see the top)."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as e:
        if whole:  # the standard library has a few, to test its decoders: encode_unit() counts them
            return
        raise ValueError(f"{path} is not utf-8 at byte {e.start}; convert it: iconv -t UTF-8 {path}") from e
    start = 0
    while start < len(text):
        end = len(text)
        if not whole and end - start > DOC_CHARS:
            blank = text.find("\n\n", start + DOC_CHARS, start + 2 * DOC_CHARS)
            end = blank + 2 if blank >= 0 else text.find("\n", start + DOC_CHARS) + 1 or end
        yield text[start:end]
        start = end


def get_tokenizer(args, files):
    """Trained on the files (char, bpe) or published (any other name)."""
    texts = (text for path in files for text in documents(path, args.stdlib))
    if args.tokenizer == "char":
        return tok.train_char(texts)
    if args.tokenizer == "bpe":
        stride = 1 + sum(p.stat().st_size for p in files) // BPE_SAMPLE_BYTES
        return tok.train_bpe(itertools.islice(texts, 0, None, stride), args.vocab_size or 4096)
    return tok.from_tiktoken(args.tokenizer)


def encode_unit(numbered, folder, whole, dtype, share):
    """Work of one process: encode the files of unit k into folder/part_k.train and .val; returns statistics.

    Only paths and counts travel between processes. char puts everything into .train: the cut comes later.
    """
    (k, files), t, sha = numbered, tok.load(folder), hashlib.sha256()
    eod = b"" if t.eod is None else np.array(t.eod, dtype).tobytes()
    stats = {"bytes": 0, "chars": 0, "train": 0, "val": 0, "skipped": 0}
    with open(folder / f"part_{k}.train", "wb") as train, open(folder / f"part_{k}.val", "wb") as val:
        for path in files:
            chars = stats["chars"]
            for text in documents(path, whole):
                raw = text.encode()
                sha.update(raw)
                chance = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") / 2**64
                split, out = ("val", val) if eod and chance < share else ("train", train)
                out.write(t.encode_numpy(text).astype(dtype).tobytes() + eod)
                stats[split] += 1
                stats["bytes"] += len(raw)
                stats["chars"] += len(text)
            stats["skipped"] += stats["chars"] == chars and path.stat().st_size > 0
    return stats, sha.hexdigest()


def encode_all(units, workers, work):
    """What `work` returns for each unit, in order, with a line of progress each few seconds."""
    results, done, began, said = [], 0.0, time.time(), time.time()
    with multiprocessing.get_context("spawn").Pool(workers) if workers > 1 else nullcontext() as pool:
        for result in (pool.imap if pool else map)(work, enumerate(units)):
            results.append(result)
            done += result[0]["bytes"] / 1e6
            if time.time() - said > 2:
                said = time.time()
                print(f"encoded {done:,.0f} MB, {len(results)} of {len(units)} units, {workers} workers,"
                      f" {done / (said - began):.1f} MB/s", flush=True)
    return results


def write_shards(folder, split, dtype, parts, start, stop):
    """Tokens start .. stop of the joined `parts` (arrays) as shards; returns what meta.json says of each."""
    shards = []
    for first in range(start, stop, SHARD_TOKENS):
        last, at, digest = min(first + SHARD_TOKENS, stop), 0, hashlib.sha256()
        pieces = [data.pack_header(np.dtype(dtype).itemsize, last - first)]
        for part in parts:
            pieces.append(part[max(first - at, 0) : max(last - at, 0)])
            at += len(part)
        with open(folder / f"{split}_{len(shards):05d}.bin", "wb") as f:
            for piece in pieces:
                f.write(piece)
                digest.update(piece)
            f.flush()
            os.fsync(f.fileno())
        shards.append({"file": Path(f.name).name, "tokens": last - first, "sha256": digest.hexdigest()})
    return shards


def build(args, files, folder, about):
    """Make everything in a temporary folder inside `folder`, then rename it into place; returns a summary."""
    began = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as tmp:
        tmp, t, spans = Path(tmp), get_tokenizer(args, files), {}
        t.save(tmp / "tokenizer.json")
        dtype = "<u2" if t.n_vocab <= 1 << 16 else "<u4"
        ends = zip(files, itertools.accumulate(p.stat().st_size for p in files), strict=True)
        units = [[p for p, _ in unit] for _, unit in itertools.groupby(ends, lambda e: e[1] // UNIT_BYTES)]
        work = partial(encode_unit, folder=tmp, whole=args.stdlib, dtype=dtype, share=args.val_fraction)
        stats, hashes = zip(*encode_all(units, min(args.workers, len(units)), work), strict=True)
        size, chars, *docs, skipped = (sum(column) for column in zip(*map(dict.values, stats), strict=True))
        for split in ("train", "val"):
            paths = [tmp / f"part_{k}.{split}" for k in range(len(units))]
            parts = [np.memmap(p, dtype, "r") for p in paths if p.stat().st_size]  # empty: cannot be mapped
            spans[split] = (parts, 0, sum(map(len, parts)))
        if t.eod is None:  # char: one cut through the text
            parts, cut = spans["train"][0], int(chars * (1 - args.val_fraction))
            spans = {"train": (parts, 0, cut), "val": (parts, cut, chars)}
        tokens = {split: stop - start for split, (_, start, stop) in spans.items()}
        if not all(tokens.values()):
            raise ValueError(f"{folder} would have {tokens} tokens of {sum(docs)} documents, none may be 0;"
                             " give more text, another --val-fraction, or --tokenizer char")
        shards = {split: write_shards(tmp, split, dtype, *span) for split, span in spans.items()}
        sha = hashlib.sha256("".join(hashes).encode()).hexdigest()
        sources = {"paths": args.sources, "python": platform.python_version(), "files": len(files),
                   "skipped": skipped, "bytes": size, "sha256": sha}
        meta = {"version": data.VERSION, "tokenizer": t.kind, "tokenizer_sha256": t.sha256,
                "vocab_size": t.n_vocab, "dtype": np.dtype(dtype).name, "tokens": tokens, "eod": t.eod,
                "documents": None if t.eod is None else dict(zip(tokens, docs, strict=True)),
                "sources": sources, "shards": shards, **about}
        (tmp / "meta.json").write_text(json.dumps(meta, indent=1))
        data.load_meta(tmp)  # the reader's own checks, before anything is replaced
        # no meta.json, no data set: a kill between the renames leaves a folder that train.py refuses
        (folder / "meta.json").unlink(missing_ok=True)
        for old in [*folder.glob("train_*.bin"), *folder.glob("val_*.bin")]:
            old.unlink()
        for name in [s["file"] for split in shards.values() for s in split] + ["tokenizer.json", "meta.json"]:
            os.replace(tmp / name, folder / name)
    return (f"{folder}: {chars:,} characters, {t.n_vocab:,} symbols, {tokens['train']:,} + {tokens['val']:,}"
            f" tokens (train + val), {len(files)} files ({skipped} skipped), {time.time() - began:.1f} s")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse(argv)
        folder = Path(args.out) / args.name
        if args.verify:
            return print(f"{folder}: {data.verify(folder, cache=False)} files have their sha256") or 0
        files = list_sources(args)
        settings = [data.VERSION, SHARD_TOKENS, DOC_CHARS, args.tokenizer, args.vocab_size, args.val_fraction]
        settings += [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        about = {"fingerprint": hashlib.sha256(repr(settings).encode()).hexdigest(),
                 "command": shlex.join(["python", "prepare.py", *argv])}
        try:
            done = data.load_meta(folder).get("fingerprint") == about["fingerprint"] and data.verify(folder)
        except (ValueError, OSError):
            done = False  # absent or damaged: make it
        print(f"{folder} is up to date" if done else build(args, files, folder, about))
    except (ValueError, OSError) as e:
        print("nanoshard:", " ".join(str(e).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Text to token files:   python prepare.py stdlib   |   python prepare.py FILE... --name NAME

FILE: text, .jsonl, .jsonl.gz, .jsonl.zst (needs zstandard), .parquet (needs pyarrow), or a data set on the
Hugging Face hub (needs datasets): fineweb_edu_10bt, fineweb_edu, dclm_baseline_1.0, dclm_baseline_1.0_10prct,
hf:OWNER/NAME::PATTERN. The code that finds, fetches and reads those is tested on small files; the download
itself was never run here. fineweb_edu_10bt is about 28 GB packed, dclm_baseline_1.0 several TB.

1) list the sources, cut them into units of 16 MB of text   2) get the tokenizer, trained on them if need be
3) encode, one part per unit, in parallel   4) join the parts into shards: the same bytes for any --workers
5) rename everything into data/NAME, meta.json last. The same call again finds it done and says so; after a
kill it goes on from the finished parts (data/NAME/.parts, about as large as the result) to the same bytes.

Documents are the files of the standard library, or records; text is cut at blank lines into documents of
about 4,000 characters. End-of-document follows each, and the hash of its text alone decides between train and
val: duplicates land on one side. `char` has neither: its text is cut once, and the last tenth is val.
A record that cannot be read is named on stderr and counted, here and in meta.json.
"""

import argparse
import difflib
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from corpus import data, parts
from corpus import text as corpus
from corpus import tokenizer as tok

UNIT_BYTES = 16 << 20  # of text per work unit; never a function of the worker count
SHARD_TOKENS = 1 << 28  # 512 MB as uint16
BPE_SAMPLE_BYTES = 64 << 20  # of text are enough to train a vocabulary on
NOT_OURS, TESTS = {"site-packages", "dist-packages", "__pycache__"}, {"test", "tests", "idle_test"}


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print the usage too; main() prints one line
        raise ValueError(f"{message}; see python prepare.py --help")


def parse(argv):
    p = Parser("prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sources", nargs="+", metavar="SOURCE", help="stdlib, files, or names (see above)")
    p.add_argument("--name", help="the folder under --out (default: stdlib for stdlib)")
    p.add_argument("--out", default="data", help="where that folder goes (default: data)")
    p.add_argument("--tokenizer", default="bpe", help="char, bpe (trained on the input),"
                   " gpt2, o200k_base..., or a prepared folder, whose tokenizer is used again")
    p.add_argument("--vocab-size", type=int,
                   help="bpe: ids, end-of-document included (default: 4096, 3.5 characters of python each,"
                        " and the embeddings do not dwarf the tiny preset's layers)")
    p.add_argument("--text-key", default="text", help="the column or json key of the text (default: text)")
    p.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=None,
                   help="put the documents of all sources in one random order (default: records, not text)")
    p.add_argument("--seed", type=int, default=1337, help="of the shuffle (default: 1337)")
    p.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="per file (default: 2^28)")
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
        (not args.stdlib and "stdlib" in args.sources, "stdlib and other sources do not mix"),
        (not args.name, "anything but stdlib needs --name NAME, the folder under data/"),
        (Path(args.name).name != args.name, f"--name {args.name} has a path in it; --out says where it goes"),
        (args.with_tests and not args.stdlib, "--with-tests belongs to stdlib"),
        (args.vocab_size and args.tokenizer != "bpe", "--vocab-size belongs to --tokenizer bpe"),
        (not 0 < args.val_fraction < 1, f"--val-fraction {args.val_fraction:g} is not between 0 and 1"),
        (args.workers < 1, f"--workers {args.workers} is below 1"),
        (args.shard_tokens < 1, f"--shard-tokens {args.shard_tokens} is below 1"),
        (args.shuffle and args.tokenizer == "char", "--shuffle needs documents, char has one text"),
    ]:
        if wrong:
            p.error(message)
    return args


def list_sources(args):
    """The spans of the input, in a fixed order."""
    sources = args.sources
    if args.stdlib:
        root = Path(sysconfig.get_path("stdlib"))
        skip = NOT_OURS if args.with_tests else NOT_OURS | TESTS
        names = sorted((p.relative_to(root) for p in root.rglob("*.py")), key=Path.as_posix)
        sources = [str(root / name) for name in names if not skip & set(name.parts)]
        if not sources:
            raise ValueError(f"no .py files under {root}: give text files instead of stdlib")
    return [span for s in sources for span in corpus.spans_of(s, UNIT_BYTES, args.text_key, args.stdlib)]


def sample_texts(units, key):
    """Texts to train a vocabulary on: all of a small input, a bit of every so many units of a large one."""
    some = units[:: -(-len(units) // 256)]
    for unit in some:
        left = BPE_SAMPLE_BYTES // len(some)
        for text in (text for span in unit for text in corpus.documents(span, key, lambda *_: None)):
            yield text
            left -= len(text)
            if left < 0:
                break


def borrowed(args):
    """The tokenizer of another data set as bytes, where --tokenizer names its folder."""
    path = Path(args.tokenizer) / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""


def get_tokenizer(args, units):
    """Trained on the input (char, bpe), another data set's (a folder), or published (any other name)."""
    if args.tokenizer == "char":
        return tok.train_char(text for unit in units for span in unit
                              for text in corpus.documents(span, args.text_key, lambda *_: None))
    if args.tokenizer == "bpe":
        return tok.train_bpe(sample_texts(units, args.text_key), args.vocab_size or 4096)
    if borrowed(args):
        return tok.load(args.tokenizer)
    return tok.from_tiktoken(args.tokenizer)


def build(args, spans, folder, about):
    """Make everything in folder/.parts, then rename it into place; returns a summary."""
    began, work, units = time.time(), folder / ".parts", corpus.units_of(spans, UNIT_BYTES)
    with parts.locked(work):
        kept = work / f"{about['fingerprint']}.json"
        try:  # by an earlier run that was stopped
            t = tok.load(kept)
        except (ValueError, OSError):
            t = get_tokenizer(args, units)
            t.save(work / "tokenizer.tmp")
            os.replace(work / "tokenizer.tmp", kept)
        dtype = "<u2" if t.n_vocab <= 1 << 16 else "<u4"
        shuffle = args.shuffle if args.shuffle is not None else t.eod is not None and any(
            span.kind in corpus.KINDS.values() for span in spans)
        settings = parts.Settings(str(kept), t.sha256, dtype, args.text_key, args.val_fraction,
                                  args.seed if shuffle else None)
        results, paths = parts.encode_all(units, args.workers, work, settings, lambda s: print(s, flush=True))
        total = {name: sum(r["counts"][name] for r in results) for name in parts.COUNTS}
        notes = [line for r in results for line in r["notes"]]
        lost = ", ".join(f"{total[kind]:,} {kind}" for kind in parts.LOST if total[kind])
        notes, n_lost = notes[: parts.NOTES], sum(total[kind] for kind in parts.LOST) - total["empty"]
        for line in notes + [f"... all in all {lost}"] * (n_lost > len(notes)):
            print("nanoshard:", line, file=sys.stderr)
        tokens = {s: sum(run[s][1] for r in results for run in r["runs"]) for s in ("train", "val")}
        streams = {s: parts.Stream(parts.join(results, paths, s, settings)) for s in tokens}
        if t.eod is None:  # char: one cut through the text
            cut = int(total["chars"] * (1 - args.val_fraction))
            tokens = {"train": cut, "val": total["chars"] - cut}
            streams["val"] = streams["train"]
        if not all(tokens.values()):
            raise ValueError(f"{folder} would have {tokens} tokens of {total['train'] + total['val']}"
                             f" documents{lost and f' ({lost})'}, none may be 0; give more text, another"
                             " --val-fraction, or --tokenizer char")
        shards = {s: parts.write_shards(work, s, dtype, streams[s], tokens[s], args.shard_tokens)
                  for s in tokens}
        sha = hashlib.sha256("".join(r["sha256"] for r in results).encode()).hexdigest()
        n_files = len({span.path for span in spans})
        sources = {"paths": args.sources, "python": platform.python_version(), "files": n_files,
                   "sha256": sha, "bytes": total["bytes"], **{kind: total[kind] for kind in parts.LOST}}
        meta = {"version": data.VERSION, "tokenizer": t.kind, "tokenizer_sha256": t.sha256,
                "vocab_size": t.n_vocab, "dtype": "uint16" if dtype == "<u2" else "uint32", "tokens": tokens,
                "eod": t.eod, "documents": None if t.eod is None else {s: total[s] for s in tokens},
                "sources": sources, "shuffle_seed": settings.seed, "shards": shards, **about}
        t.save(work / "tokenizer.json")
        (work / "meta.json").write_text(json.dumps(meta, indent=1))
        data.load_meta(work)  # the reader's own checks, before anything is replaced
        # no meta.json, no data set: a kill between the renames leaves a folder that train.py refuses
        (folder / "meta.json").unlink(missing_ok=True)
        for old in [*folder.glob("train_*.bin"), *folder.glob("val_*.bin")]:
            old.unlink()
        for name in [s["file"] for split in shards.values() for s in split] + ["tokenizer.json", "meta.json"]:
            os.replace(work / name, folder / name)
        shutil.rmtree(work)
    return (f"{folder}: {total['chars']:,} characters, {t.n_vocab:,} symbols, {tokens['train']:,} +"
            f" {tokens['val']:,} tokens (train + val), {n_files} files ({lost or 'nothing'} left out),"
            f" {time.time() - began:.1f} s")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse(argv)
        folder = Path(args.out) / args.name
        if args.verify:
            return print(f"{folder}: {data.verify(folder, cache=False)} files have their sha256") or 0
        spans = list_sources(args)
        settings = [data.VERSION, corpus.DOC_CHARS, borrowed(args), spans]
        settings += [value for name, value in sorted(vars(args).items())
                     if name not in ("sources", "name", "out", "workers", "verify", "with_tests")]
        about = {"fingerprint": hashlib.sha256(repr(settings).encode()).hexdigest(),
                 "command": shlex.join(["python", "prepare.py", *argv])}
        try:
            done = data.load_meta(folder).get("fingerprint") == about["fingerprint"] and data.verify(folder)
        except (ValueError, OSError):
            done = False  # absent or damaged: make it
        print(f"{folder} is up to date" if done else build(args, spans, folder, about))
    except (ValueError, OSError) as e:
        print("nanoshard:", " ".join(str(e).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

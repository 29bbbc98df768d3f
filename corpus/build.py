"""Between text and token files: each unit of work becomes a part, then the parts are merged into a stream.

A part is two files. NAME.bin holds runs of about 16 M tokens each: an index (key, number of tokens) with one
row per document, then the tokens, both sorted by (split, key). NAME.json is renamed into place last: a part
that has it is finished, and survives when prepare.py is killed.

The key of a document is its place in the result: (unit << 32 | number in the unit), or with a shuffle this
number sent through a 64-bit permutation that the seed determines. Keys are known before anything is read, so
the result is the same for any number of workers and of kills. merge() holds about 32 M tokens in memory.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus import tokenizer
from corpus.order import draw_keys, splitmix64
from corpus.shards import SPLITS, VERSION
from corpus.text import DOC_CHARS, documents
from interface.command_line import one_line
from interface.schema import load_json

RUN_TOKENS = 1 << 24  # tokens that a worker holds in memory
MERGE_TOKENS = 1 << 25  # tokens that merge() holds in memory, about
MAX_REPORTS = 20  # lines about unreadable records that a part keeps
PROBLEMS = ("broken", "damaged", "skipped", "empty")  # records, files, files, documents
COUNTS = ("bytes", "chars", *SPLITS, *PROBLEMS)


class Settings(NamedTuple):
    """What the tokens of a part depend on, besides its unit."""
    tokenizer: str  # path of its tokenizer.json
    tokenizer_sha256: str
    dtype: str  # of a token: "<u2" or "<u4"
    key: str  # column or json key of the text in a record
    val_fraction: float
    seed: int | None  # of the shuffle; None keeps the order of the sources


# -----------------------------------------------------------------------------
# a unit -> a part

# 0.1 s for a vocabulary of 100,000: once per process, not per unit
load_tokenizer = functools.lru_cache(1)(tokenizer.load)


def part_name(k, unit, settings):
    """-> the name of unit k's part: a hash of all that determines its content, a file's mtime included."""
    what = repr((k, unit, settings[1:], VERSION, DOC_CHARS, RUN_TOKENS))
    return f"{k:06d}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


class PartWriter:
    """Encodes the documents of unit k and writes them to file f, one run at a time."""

    def __init__(self, f, k, settings):
        self.f, self.k, self.settings = f, k, settings
        self.tokenizer, self.dtype = load_tokenizer(settings.tokenizer), np.dtype(settings.dtype)
        eod = self.tokenizer.eod
        self.eod = np.array([] if eod is None else [eod], self.dtype)
        self.sha = hashlib.sha256()  # of all text of the unit
        self.counts, self.reports, self.runs = dict.fromkeys(COUNTS, 0), [], []
        self.docs, self.in_val, self.n_tokens = [], [], 0  # of the run in memory

    def report(self, kind, line):
        """Count a problem and keep its line. ValueError: most of the first records are broken."""
        counts = self.counts
        counts[kind] += 1
        if line and len(self.reports) < MAX_REPORTS:
            self.reports.append(line)
        if counts["broken"] > 10 + counts["train"] + counts["val"]:
            raise ValueError(f"{counts['broken']} of the first records are broken, the last: {line};"
                             " --text-key says where a record has its text")

    def add(self, text):
        """Encode one document. The hash of its text alone decides its split: equal texts stay together."""
        raw, counts = text.encode(), self.counts
        self.sha.update(raw)
        uniform = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") / 2**64
        # without end-of-document (char) the whole text is one stream, which is cut in two at the end
        in_val = bool(len(self.eod)) and uniform < self.settings.val_fraction
        doc = np.concatenate((self.tokenizer.encode_numpy(text).astype(self.dtype), self.eod))
        self.docs.append(doc)
        self.in_val.append(in_val)
        self.n_tokens += len(doc)
        counts["val" if in_val else "train"] += 1
        counts["bytes"] += len(raw)
        counts["chars"] += len(text)
        if self.n_tokens >= RUN_TOKENS:
            self.write_run()

    def write_run(self):
        """Write the documents held in memory as one run, sorted by (split, key)."""
        first = self.k << 32 | sum(run[split][0] for run in self.runs for split in SPLITS)
        index = np.empty((len(self.docs), 2), "<u8")  # (key, tokens) of each document
        index[:, 0] = np.arange(first, first + len(self.docs), dtype=np.uint64)
        if self.settings.seed is not None:  # addition and splitmix64 are permutations: no two keys are equal
            index[:, 0] = splitmix64(index[:, 0] + draw_keys("documents", self.settings.seed)[0])
        index[:, 1] = [len(doc) for doc in self.docs]
        order = np.lexsort((index[:, 0], self.in_val))
        run, in_val = {"at": self.f.tell()}, np.array(self.in_val, bool)
        for split, rows in zip(SPLITS, (~in_val, in_val), strict=True):
            run[split] = [int(rows.sum()), int(index[rows, 1].sum())]  # documents, tokens
        self.f.write(index[order])
        self.f.write(np.concatenate([self.docs[i] for i in order]))
        self.runs.append(run)
        self.docs, self.in_val, self.n_tokens = [], [], 0


def encode_unit(job, folder, settings):
    """The work of one process: encode a unit into a part -> what NAME.json says.
    job: (number of the unit, NAME, its spans). Only paths and counts travel between processes.
    ValueError, OSError: the unit cannot be read, or most of its records are broken."""
    k, name, unit = job
    path = Path(folder) / name
    with open(f"{path}.{os.getpid()}", "wb") as f:
        writer = PartWriter(f, k, settings)
        for span in unit:
            for text in documents(span, settings.key, writer.report):
                writer.add(text)
        if writer.docs:
            writer.write_run()
        f.flush()
        os.fsync(f.fileno())
    os.replace(f.name, f"{path}.bin")
    result = {"counts": writer.counts, "sha256": writer.sha.hexdigest(), "runs": writer.runs,
              "notes": writer.reports}
    Path(f.name).write_text(json.dumps(result))
    os.replace(f.name, f"{path}.json")
    return result


def read_result(folder, name):
    """-> what NAME.json says; None where the part is not finished."""
    with suppress(OSError, ValueError):
        return load_json(Path(folder) / f"{name}.json")


# -----------------------------------------------------------------------------
# all units, in parallel

def die_with_parent():
    """Make a worker end when its parent ends, kill -9 included."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextmanager
def parallel_map(workers):
    """A map() over that many processes, or over this one. ChildProcessError: a worker was killed."""
    if workers < 2:
        yield map
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), die_with_parent) as pool:
        try:
            yield pool.map
        except BrokenProcessPool as e:
            raise ChildProcessError("a worker was killed, perhaps for its memory: the same command goes on"
                                    " from the finished units; fewer --workers need less") from e
        finally:
            pool.shutdown(cancel_futures=True)  # after an error the units that wait are not begun


def encode_all(units, workers, folder, settings, show):
    """Encode each unit into a part of `folder` -> (what each NAME.json says, the path of each NAME.bin).
    Parts that an earlier run finished are kept, parts of other settings are deleted. show(line) prints it."""
    names = [part_name(k, unit, settings) for k, unit in enumerate(units)]
    keep = {f"{name}.{end}" for name in names for end in ("bin", "json")}
    for path in folder.glob("[0-9]*-*.*"):
        if path.name not in keep:
            path.unlink()
    results = [read_result(folder, name) for name in names]
    todo = [(k, names[k], unit) for k, unit in enumerate(units) if results[k] is None]
    n_kept = len(units) - len(todo)
    if n_kept:
        show(f"{n_kept} of {len(units)} units are kept from an earlier run")
    sizes = [sum(span.size for span in unit) for unit in units]
    size_todo, size_done, megabytes = sum(sizes[k] for k, _, _ in todo), 0, 0
    start, last_shown = time.time(), time.time()
    workers = max(1, min(workers, len(todo)))
    work = functools.partial(encode_unit, folder=folder, settings=settings)
    with parallel_map(workers) as run:
        for done, ((k, _, _), result) in enumerate(zip(todo, run(work, todo), strict=True), 1):
            results[k], size_done = result, size_done + sizes[k]
            megabytes += result["counts"]["bytes"] / 1e6
            if time.time() - last_shown > 2:
                last_shown = time.time()
                seconds = last_shown - start
                left = int(seconds * (size_todo - size_done) / max(1, size_done))
                show(f"encoded {megabytes:,.0f} MB, {n_kept + done} of {len(units)} units, {workers} workers,"
                     f" {megabytes / seconds:.1f} MB/s, {left // 60}:{left % 60:02d} left")
    return results, [folder / f"{name}.bin" for name in names]


def print_problems(results, total, left_out):
    """Name the first records and files that could not be read on stderr, and count the rest in one line."""
    lines = [line for result in results for line in result["notes"]][: MAX_REPORTS]
    n_problems = sum(total[kind] for kind in PROBLEMS) - total["empty"]  # empty texts have no line
    if n_problems > len(lines):
        lines.append(f"... all in all {left_out}")
    for line in lines:
        print("nanoshard:", one_line(line), file=sys.stderr)


# -----------------------------------------------------------------------------
# parts -> one stream of tokens per split

class Run(NamedTuple):
    """Where the documents of one split are in one run of a part."""
    path: Path
    index_at: int  # byte of the first row of the index, 16 bytes per document
    n_docs: int
    tokens_at: int  # byte of the first token
    n_tokens: int


def find_runs(results, paths, split, itemsize):
    """Yield the Runs of all parts, in order, that have documents of `split`."""
    for result, path in zip(results, paths, strict=True):
        for run in result["runs"]:
            (docs, tokens), before = run[split], run["train"] if split == "val" else (0, 0)
            tokens_at = run["at"] + 16 * (run["train"][0] + run["val"][0]) + itemsize * before[1]
            if docs:
                yield Run(path, run["at"] + 16 * before[0], docs, tokens_at, tokens)


def merge(results, paths, split, settings):
    """Yield the tokens of a split, (n,) arrays, in the order of their documents' keys.

    results, paths: of encode_all. In order, the runs follow each other as they are. Shuffled, the keys are
    uniform over 64 bits: equal stretches of them have about MERGE_TOKENS tokens, each read from all runs."""
    dtype = np.dtype(settings.dtype)
    runs = list(find_runs(results, paths, split, dtype.itemsize))
    if settings.seed is None:
        for run in runs:
            yield np.fromfile(run.path, dtype, run.n_tokens, offset=run.tokens_at)
        return
    n = 1 + sum(run.n_tokens for run in runs) // MERGE_TOKENS
    edges = np.array([(b << 64) // n for b in range(1, n)], np.uint64)  # between stretches
    bounds = []  # of each run: (n + 1,) its first document, and first token, of each stretch
    for run in runs:
        keys, lengths = np.fromfile(run.path, "<u8", 2 * run.n_docs, offset=run.index_at).reshape(-1, 2).T
        rows = np.array([0, *np.searchsorted(keys, edges), run.n_docs])
        bounds.append((rows, np.cumsum([0, *lengths], dtype=np.int64)[rows]))
    for b in range(n):
        index, tokens = [], []
        for run, (rows, ends) in zip(runs, bounds, strict=True):
            (r, r_end), (t, t_end) = rows[b : b + 2].tolist(), ends[b : b + 2].tolist()
            if r_end > r:
                index.append(np.fromfile(run.path, "<u8", 2 * (r_end - r), offset=run.index_at + 16 * r))
                at = run.tokens_at + dtype.itemsize * t
                tokens.append(np.fromfile(run.path, dtype, t_end - t, offset=at))
        if index:
            yield sort_documents(np.concatenate(index).reshape(-1, 2), np.concatenate(tokens))


def sort_documents(index, tokens):
    """index: (documents, 2), key and number of tokens; tokens: (n,) -> (n,) the documents sorted by key."""
    keys, lengths = index.T
    docs = np.split(tokens, np.cumsum(lengths)[:-1].astype(np.int64))
    return np.concatenate([docs[i] for i in np.argsort(keys).tolist()])

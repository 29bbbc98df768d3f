"""Between text and token files: each unit of work becomes a part, then the parts are merged into a stream.

A part is two files. NAME.bin holds runs of about 16 M tokens each: an index (key, number of tokens) with one
row per document, then the tokens, both sorted by (split, key). NAME.json is renamed into place last: a part
that has it, with the checksum of its NAME.bin, is finished, and survives when prepare.py is killed.

The key of a document is its place in the result: (unit << 32 | number in the unit), or with a shuffle this
number sent through a 64-bit permutation that the seed determines. Keys are known before anything is read, so
the result is the same for any number of workers and of kills. merge() holds about 32 M tokens in memory.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
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
from interface.files import load_json
from interface.terminal import complain, one_line

RUN_TOKENS = 1 << 24  # tokens that a worker holds in memory
MERGE_TOKENS = 1 << 25  # tokens that merge() holds in memory, about
INDEX_BYTES = 16  # of a document's row in an index: two uint64, key and number of tokens
MAX_REPORTS = 20  # lines about unreadable records that a part keeps
PROBLEMS = ("broken", "damaged", "skipped", "empty")  # records, files, files, documents
COUNTS = ("bytes", "chars", *SPLITS, *PROBLEMS)
SHOW_SECONDS = 2  # encode_all() shows its progress this often


class Settings(NamedTuple):
    """What the tokens of a part depend on, besides its unit."""
    tokenizer: str  # path of its tokenizer.json
    tokenizer_sha256: str
    dtype: str  # of a token: "<u2" or "<u4"
    key: str  # column or json key of the text in a record
    val_fraction: float
    seed: int | None  # of the shuffle; None keeps the order of the sources


# -----------------------------------------------------------------------------
# A unit -> a part

# Loading takes 0.1 s for a vocabulary of 100,000: it is done once per process, not once per unit.
load_tokenizer = functools.lru_cache(1)(tokenizer.load)


def part_name(number, unit, settings):
    """Return the name of a unit's part, a hash of all that determines its content, also a file's mtime."""
    what = repr((number, unit, settings[1:], VERSION, DOC_CHARS, RUN_TOKENS))
    return f"{number:06d}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


class PartWriter:
    """Encodes the documents of one unit and writes them to a file, one run at a time.

    number: of the unit. counts, sha256, reports and runs are what NAME.json keeps.
    """

    def __init__(self, file, number, settings):
        self.file = file
        self.number = number
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer)
        self.dtype = np.dtype(settings.dtype)
        eod = self.tokenizer.eod
        self.eod = np.array([] if eod is None else [eod], self.dtype)
        self.sha256 = hashlib.sha256()  # of all text of the unit
        self.counts = dict.fromkeys(COUNTS, 0)
        self.reports = []
        self.runs = []
        self.start_run()

    def start_run(self):
        """Begin a run in memory: its documents, whether each is in val, and the number of their tokens."""
        self.docs = []
        self.in_val = []
        self.n_tokens = 0

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
        raw = text.encode()
        self.sha256.update(raw)
        ids = self.tokenizer.encode_numpy(text).astype(self.dtype)
        doc = np.concatenate((ids, self.eod))
        in_val = self.is_val(raw)
        self.docs.append(doc)
        self.in_val.append(in_val)
        self.n_tokens += len(doc)
        self.counts["val" if in_val else "train"] += 1
        self.counts["bytes"] += len(raw)
        self.counts["chars"] += len(text)
        if self.n_tokens >= RUN_TOKENS:
            self.write_run()

    def is_val(self, raw):
        """Whether a document, as bytes, is in val."""
        if len(self.eod) == 0:  # without end-of-document (char) the text is one stream, cut in two at the end
            return False
        uniform = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") / 2**64
        return uniform < self.settings.val_fraction

    def write_run(self):
        """Write the documents held in memory as one run, sorted by (split, key)."""
        in_val = np.array(self.in_val, bool)
        index = np.empty((len(self.docs), 2), "<u8")  # (key, tokens) of each document
        index[:, 0] = self.keys()
        index[:, 1] = [len(doc) for doc in self.docs]

        run = {"at": self.file.tell()}
        for split, rows in (("train", ~in_val), ("val", in_val)):
            run[split] = [int(rows.sum()), int(index[rows, 1].sum())]  # documents, tokens
        order = np.lexsort((index[:, 0], in_val))
        self.file.write(index[order])
        self.file.write(np.concatenate([self.docs[i] for i in order]))
        self.runs.append(run)
        self.start_run()

    def keys(self):
        """Return the keys of the documents held in memory, (documents,) uint64."""
        n_before = sum(run[split][0] for run in self.runs for split in SPLITS)
        first = self.number << 32 | n_before
        keys = np.arange(first, first + len(self.docs), dtype=np.uint64)
        if self.settings.seed is None:
            return keys
        # Addition and splitmix64 are permutations, so that no two keys are equal.
        return splitmix64(keys + draw_keys("documents", self.settings.seed)[0])


def encode_unit(job, folder, settings):
    """Encode a unit into a part and return what NAME.json says: the work of one process.

    job: (number of the unit, NAME, its spans). Only paths and counts travel between processes. ValueError,
    OSError: the unit cannot be read, or most of its records are broken.
    """
    number, name, unit = job
    path = Path(folder) / name
    begun = Path(f"{path}.{os.getpid()}")
    try:
        with open(begun, "wb") as f:
            writer = PartWriter(f, number, settings)
            for span in unit:
                for text in documents(span, settings.key, writer.report):
                    writer.add(text)
            if writer.docs:
                writer.write_run()
            f.flush()
            os.fsync(f.fileno())
        result = {"counts": writer.counts, "sha256": writer.sha256.hexdigest(), "runs": writer.runs,
                  "notes": writer.reports, "crc32": crc32_of(begun)}
        os.replace(begun, f"{path}.bin")

        begun.write_text(json.dumps(result))
        os.replace(begun, f"{path}.json")
    except (OSError, ValueError):  # a full disk gets its room back
        begun.unlink(missing_ok=True)
        raise
    return result


def read_result(folder, name):
    """Return what NAME.json says, or None where the part is not finished, or is not as it was written."""
    path = Path(folder) / name
    with suppress(OSError, ValueError):
        result = load_json(f"{path}.json")
        if isinstance(result, dict) and result.get("crc32") == crc32_of(f"{path}.bin"):
            return result
    return None


def crc32_of(path):
    """Return the CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


# -----------------------------------------------------------------------------
# All units, in parallel

def die_with_parent():
    """Make a worker end when its parent ends, kill -9 included, and without a word at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def wait_and_exit():
        parent.join()
        os._exit(1)
    threading.Thread(target=wait_and_exit, daemon=True).start()


@contextmanager
def parallel_map(workers):
    """Give a map() over several processes, or over this one. ChildProcessError: a worker was killed."""
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


class Progress:
    """What encode_all() shows while it runs. show(line) prints; size: bytes of text to encode, about."""

    def __init__(self, show, workers, n_units, n_kept, size):
        self.show = show
        self.workers = workers
        self.n_units = n_units
        self.n_done = n_kept
        self.size = size
        self.size_done = 0
        self.megabytes = 0  # of text, counted
        self.start = time.time()
        self.last_shown = self.start

    def unit_done(self, size, n_bytes):
        """Count a unit of this size, which had n_bytes of text, and show a line now and then."""
        self.n_done += 1
        self.size_done += size
        self.megabytes += n_bytes / 1e6
        now = time.time()
        if now - self.last_shown <= SHOW_SECONDS:
            return
        self.last_shown = now
        seconds = now - self.start
        left = int(seconds * (self.size - self.size_done) / max(1, self.size_done))
        self.show(f"encoded {self.megabytes:,.0f} MB, {self.n_done} of {self.n_units} pieces, {self.workers}"
                  f" workers, {self.megabytes / seconds:.1f} MB/s, {left // 60}:{left % 60:02d} left")


def encode_all(units, workers, folder, settings, show):
    """Encode each unit into a part of `folder`; return what each NAME.json says, and the paths of NAME.bin.

    Parts that an earlier run finished are kept, parts of other settings are deleted. show(line) prints it.
    """
    names = [part_name(i, unit, settings) for i, unit in enumerate(units)]
    remove_other_parts(folder, names)
    results = [read_result(folder, name) for name in names]
    todo = [i for i, result in enumerate(results) if result is None]
    n_kept = len(units) - len(todo)
    if n_kept:
        show(f"{n_kept} of {len(units)} pieces are kept from an earlier run")

    sizes = [sum(span.size for span in unit) for unit in units]
    workers = max(1, min(workers, len(todo)))
    progress = Progress(show, workers, len(units), n_kept, sum(sizes[i] for i in todo))
    jobs = [(i, names[i], units[i]) for i in todo]
    work = functools.partial(encode_unit, folder=folder, settings=settings)
    with parallel_map(workers) as parallel:
        for i, result in zip(todo, parallel(work, jobs), strict=True):
            results[i] = result
            progress.unit_done(sizes[i], result["counts"]["bytes"])
    return results, [folder / f"{name}.bin" for name in names]


def remove_other_parts(folder, names):
    """Delete the parts of `folder` that have none of these names."""
    keep = {f"{name}.{end}" for name in names for end in ("bin", "json")}
    for path in folder.glob("[0-9]*-*.*"):
        if path.name not in keep:
            path.unlink()


def print_problems(results, total, left_out):
    """Name the first records and files that could not be read on stderr, and count the rest in one line."""
    lines = [line for result in results for line in result["notes"]][:MAX_REPORTS]
    n_problems = sum(total[kind] for kind in PROBLEMS if kind != "empty")  # empty texts have no line
    if n_problems > len(lines):
        lines.append(f"... all in all {left_out}")
    for line in lines:
        complain(f"nanoshard: {one_line(line)}")


# -----------------------------------------------------------------------------
# Parts -> one stream of tokens per split

class Run(NamedTuple):
    """Where the documents of one split are in one run of a part."""
    path: Path
    index_at: int  # byte of the first row of the index
    n_docs: int
    tokens_at: int  # byte of the first token
    n_tokens: int

    def read_index(self, first, stop):
        """Return rows first .. stop-1 of the index, (stop - first, 2) uint64: key and number of tokens."""
        at = self.index_at + INDEX_BYTES * first
        return np.fromfile(self.path, "<u8", 2 * (stop - first), offset=at).reshape(-1, 2)

    def read_tokens(self, first, stop, dtype):
        """Return tokens first .. stop-1, (stop - first,) of dtype."""
        return np.fromfile(self.path, dtype, stop - first, offset=self.tokens_at + dtype.itemsize * first)


def find_runs(results, paths, split, itemsize):
    """Yield the Runs of all parts, in order, that have documents of `split`."""
    for result, path in zip(results, paths, strict=True):
        for run in result["runs"]:
            n_docs, n_tokens = run[split]
            # The documents of train come before those of val, in the index and in the tokens.
            docs_before, tokens_before = run["train"] if split == "val" else (0, 0)
            all_docs = run["train"][0] + run["val"][0]
            index_at = run["at"] + INDEX_BYTES * docs_before
            tokens_at = run["at"] + INDEX_BYTES * all_docs + itemsize * tokens_before
            if n_docs:
                yield Run(path, index_at, n_docs, tokens_at, n_tokens)


def merge(results, paths, split, settings):
    """Yield the tokens of a split, (n,) arrays, in the order of their documents' keys.

    results, paths: of encode_all. Where the order of the sources is kept, the runs follow each other as they
    are.
    """
    dtype = np.dtype(settings.dtype)
    runs = list(find_runs(results, paths, split, dtype.itemsize))
    if settings.seed is not None:
        yield from merge_shuffled(runs, dtype)
        return
    for run in runs:
        yield run.read_tokens(0, run.n_tokens, dtype)


def merge_shuffled(runs, dtype):
    """Yield the tokens of runs, (n,) arrays, in the order of their documents' keys.

    The keys are uniform over 64 bits: equal stretches of them have about MERGE_TOKENS tokens. The documents
    of one stretch are read from all runs and sorted.
    """
    n = 1 + sum(run.n_tokens for run in runs) // MERGE_TOKENS
    edges = np.array([(i << 64) // n for i in range(1, n)], np.uint64)  # between the n stretches
    bounds = [stretch_bounds(run, edges) for run in runs]
    for i in range(n):
        index = []
        tokens = []
        for run, (docs_at, tokens_at) in zip(runs, bounds, strict=True):
            if docs_at[i + 1] > docs_at[i]:
                index.append(run.read_index(docs_at[i], docs_at[i + 1]))
                tokens.append(run.read_tokens(tokens_at[i], tokens_at[i + 1], dtype))
        if index:
            yield sort_documents(np.concatenate(index), np.concatenate(tokens))


def stretch_bounds(run, edges):
    """Return the first document of each stretch of keys in a run, and its first token: two lists of n + 1.

    edges: (n - 1,) uint64, the keys at which the 2nd .. nth stretch begins. The last entry is the end.
    """
    keys, lengths = run.read_index(0, run.n_docs).T
    docs_at = np.array([0, *np.searchsorted(keys, edges), run.n_docs])
    tokens_at = np.cumsum([0, *lengths], dtype=np.int64)[docs_at]
    return docs_at.tolist(), tokens_at.tolist()


def sort_documents(index, tokens):
    """Return the documents, one after the other and sorted by key, (n,).

    index: (documents, 2), key and number of tokens. tokens: (n,).
    """
    keys, lengths = index.T
    docs = np.split(tokens, np.cumsum(lengths)[:-1].astype(np.int64))
    return np.concatenate([docs[i] for i in np.argsort(keys).tolist()])

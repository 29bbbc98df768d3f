"""Between text and token files: each unit of work becomes a part, the parts become shards.

A part is NAME.bin, runs of about 16 M tokens: an index (key, tokens) per document, then the tokens, both
sorted by (split, key); and NAME.json, which is renamed into place last: a part that has it is finished, and
is kept when prepare.py is killed. The key is a document's place: in order (unit << 32 | number), or that
number sent through a 64-bit permutation keyed by the seed. So the shuffle sorts all documents by numbers that
are known before anything is read: the same for any number of workers, and for any number of kills. Joining
takes one stretch of keys at a time, of about 32 M tokens, from all runs: memory is bounded for any input.
"""

import fcntl
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus import data
from corpus import text as corpus
from corpus import tokenizer as tok

RUN_TOKENS = 1 << 24  # tokens that a worker holds at a time
BUCKET_TOKENS = 1 << 25  # tokens that the joining holds at a time, about
NOTES = 20  # lines about broken records that a part keeps, and that are printed
LOST = ("broken", "damaged", "skipped", "empty")  # records, files, files, documents
COUNTS = ("bytes", "chars", "train", "val", *LOST)


class Settings(NamedTuple):
    """What the tokens of a part depend on, besides its unit."""
    tokenizer: str  # path
    tokenizer_sha256: str
    dtype: str
    key: str  # of the text in a record
    val_fraction: float
    seed: int | None  # of the shuffle; None: in order


@functools.lru_cache(1)  # 0.1 s for a vocabulary of 100,000: once per process, not per unit
def load_tokenizer(path):
    return tok.load(path)


def part_name(k, unit, settings):
    """Named by all that is in it: another setting, or a file that changed, and it is another part."""
    what = repr((k, unit, settings[1:], data.VERSION, corpus.DOC_CHARS, RUN_TOKENS))
    return f"{k:06d}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def encode_unit(job, folder, settings):
    """Work of one process: encode the unit of `job` into a part; returns what NAME.json says.

    Only paths and counts travel between processes.
    """
    (k, name, unit), t, sha = job, load_tokenizer(settings.tokenizer), hashlib.sha256()
    dtype, eod = np.dtype(settings.dtype), np.array([] if t.eod is None else [t.eod], settings.dtype)
    counts, notes, runs = dict.fromkeys(COUNTS, 0), [], []
    docs, in_val, n_tokens = [], [], 0

    def note(kind, line):
        counts[kind] += 1
        if line and len(notes) < NOTES:
            notes.append(line)
        if counts["broken"] > 10 + counts["train"] + counts["val"]:
            raise ValueError(f"{counts['broken']} of the first records are broken, the last: {line};"
                             " --text-key says where a record has its text")

    def flush(f):
        first = k << 32 | sum(r["train"][0] + r["val"][0] for r in runs)
        index = np.empty((len(docs), 2), "<u8")
        index[:, 0] = np.arange(first, first + len(docs), dtype=np.uint64)
        if settings.seed is not None:  # addition and mix() are permutations: no two keys are equal
            index[:, 0] = data.mix(index[:, 0] + data.draw_keys("documents", settings.seed)[0])
        index[:, 1] = [len(doc) for doc in docs]
        order = np.lexsort((index[:, 0], in_val))
        at, side = f.tell(), np.array(in_val, bool)
        f.write(index[order])
        f.write(np.concatenate([docs[i] for i in order]))
        runs.append({"at": at, **{split: [int((side == v).sum()), int(index[side == v, 1].sum())]
                                  for v, split in enumerate(("train", "val"))}})

    path = Path(folder) / name
    with open(f"{path}.{os.getpid()}", "wb") as f:
        for span in unit:
            for text in corpus.documents(span, settings.key, note):
                raw = text.encode()
                sha.update(raw)
                chance = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") / 2**64
                val = bool(len(eod)) and chance < settings.val_fraction
                docs.append(np.concatenate((t.encode_numpy(text).astype(dtype), eod)))
                in_val.append(val)
                counts["val" if val else "train"] += 1
                counts["bytes"] += len(raw)
                counts["chars"] += len(text)
                n_tokens += len(docs[-1])
                if n_tokens >= RUN_TOKENS:
                    flush(f)
                    docs, in_val, n_tokens = [], [], 0
        if docs:
            flush(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f.name, f"{path}.bin")
    result = {"counts": counts, "sha256": sha.hexdigest(), "runs": runs, "notes": notes}
    Path(f.name).write_text(json.dumps(result))
    os.replace(f.name, f"{path}.json")
    return result


def finished(folder, name):
    """What NAME.json says, None where the part is not finished."""
    with suppress(OSError, ValueError):
        return json.loads((Path(folder) / f"{name}.json").read_bytes())


def follow_parent():
    """A worker ends when its parent does, kill -9 included."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextmanager
def executor(workers):
    """A map() over that many processes: over this one, for one."""
    if workers < 2:
        yield map
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), follow_parent) as pool:
        try:
            yield pool.map
        except BrokenProcessPool as e:
            raise ChildProcessError("a worker was killed, perhaps for its memory: the same command goes on"
                                    " from the finished units; fewer --workers need less") from e
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, not the other units first


def encode_all(units, workers, folder, settings, say):
    """A part for each unit, those of an earlier run kept; -> (what each says, in order, their paths)."""
    names = [part_name(k, unit, settings) for k, unit in enumerate(units)]
    wanted = {f"{name}.{end}" for name in names for end in ("bin", "json")}
    for path in folder.glob("[0-9]*-*.*"):
        if path.name not in wanted:
            path.unlink()
    results = [finished(folder, name) for name in names]
    todo = [(k, name, unit) for k, (name, unit) in enumerate(zip(names, units, strict=True))
            if results[k] is None]
    if len(todo) < len(units):
        say(f"{len(units) - len(todo)} of {len(units)} units are kept from an earlier run")
    sizes = [sum(span.size for span in unit) for unit in units]
    left, text, began, said = sum(sizes[k] for k, _, _ in todo), 0, time.time(), time.time()
    whole, workers = left, max(1, min(workers, len(todo)))
    work = functools.partial(encode_unit, folder=folder, settings=settings)
    with executor(workers) as run:
        for done, ((k, _, _), result) in enumerate(zip(todo, run(work, todo), strict=True), 1):
            results[k], left, text = result, left - sizes[k], text + result["counts"]["bytes"] / 1e6
            if time.time() - said > 2:
                said = time.time()
                seconds = (said - began) * left / max(1, whole - left)
                say(f"encoded {text:,.0f} MB, {len(units) - len(todo) + done} of {len(units)} units,"
                    f" {workers} workers, {text / (said - began):.1f} MB/s, {int(seconds) // 60}:"
                    f"{int(seconds) % 60:02d} left")
    return results, [folder / f"{name}.bin" for name in names]


class Stream:
    """Tokens from an iterator of arrays, as many as asked for."""

    def __init__(self, pieces):
        self.pieces, self.rest = iter(pieces), ()

    def take(self, n):
        while n:
            if not len(self.rest):
                self.rest = next(self.pieces)
            piece, self.rest = self.rest[:n], self.rest[n:]
            n -= len(piece)
            yield piece


def join(results, paths, split, settings):
    """The tokens of a split in the order of their documents' keys: an iterator of arrays."""
    dtype, runs = np.dtype(settings.dtype), []
    for result, path in zip(results, paths, strict=True):
        for run in result["runs"]:
            (docs, tokens), before = run[split], run["train"] if split == "val" else (0, 0)
            index = run["at"] + 16 * before[0]
            at = run["at"] + 16 * (run["train"][0] + run["val"][0]) + dtype.itemsize * before[1]
            runs += [(path, index, docs, at, tokens)] if docs else []
    if settings.seed is None:  # the runs are in order, and so are the documents in each
        for path, _, _, at, tokens in runs:
            yield np.fromfile(path, dtype, tokens, offset=at)
        return
    n = 1 + sum(tokens for *_, tokens in runs) // BUCKET_TOKENS
    edges, cuts = np.array([(b << 64) // n for b in range(1, n)], np.uint64), []
    for path, index, docs, _, _ in runs:  # where each stretch of keys begins and ends in each run
        keys, lengths = np.fromfile(path, "<u8", 2 * docs, offset=index).reshape(docs, 2).T
        rows = np.array([0, *np.searchsorted(keys, edges), docs])
        cuts.append((rows, np.cumsum([0, *lengths], dtype=np.int64)[rows]))
    for b in range(n):
        found, pieces = [], []
        for (path, index, _, at, _), (rows, ends) in zip(runs, cuts, strict=True):
            (r, r_end), (t, t_end) = rows[b : b + 2].tolist(), ends[b : b + 2].tolist()
            if r_end > r:
                found.append(np.fromfile(path, "<u8", 2 * (r_end - r), offset=index + 16 * r).reshape(-1, 2))
                pieces.append(np.fromfile(path, dtype, t_end - t, offset=at + dtype.itemsize * t))
        if found:
            (keys, lengths), tokens = np.concatenate(found).T, np.concatenate(pieces)
            ends = np.cumsum(lengths).astype(np.int64)
            starts, out, filled = ends - lengths.astype(np.int64), np.empty_like(tokens), 0
            for i in np.argsort(keys).tolist():
                doc = tokens[starts[i] : ends[i]]
                out[filled : filled + len(doc)] = doc
                filled += len(doc)
            yield out


def write_shards(folder, split, dtype, stream, tokens, shard_tokens):
    """The next `tokens` of a Stream as shards; returns what meta.json says of each."""
    shards = []
    for first in range(0, tokens, shard_tokens):
        n, digest = min(shard_tokens, tokens - first), hashlib.sha256()
        with open(folder / f"{split}_{len(shards):05d}.bin", "wb") as f:
            for piece in itertools.chain([data.pack_header(np.dtype(dtype).itemsize, n)], stream.take(n)):
                f.write(piece)
                digest.update(piece)
            f.flush()
            os.fsync(f.fileno())
        shards.append({"file": Path(f.name).name, "tokens": n, "sha256": digest.hexdigest()})
    return shards


@contextmanager
def locked(folder):
    """Only one prepare.py works in `folder`; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(f"another prepare.py is at work on {folder.parent}; wait for it") from e
        except OSError:  # a file system without locks
            pass
        yield

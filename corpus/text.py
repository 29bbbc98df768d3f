"""Readers: the inputs of prepare.py -> spans (units of reading) -> documents (str).

    input                      a span of it                a document
    stdlib                     a file                      the file
    text (any other name)      a file, or 16 MB of it      about 4,000 characters, cut at a blank line
    .jsonl                     a file, or 16 MB of it      the value of --text-key on each line
    .jsonl.gz, .jsonl.zst      a file, read as a stream    the value of --text-key on each line
    .parquet                   a row group                 each row of the column --text-key
    fineweb_edu_10bt, ...      the files of that name on the Hugging Face hub, each read as above

What cannot be read is passed to report(kind, line), never dropped in silence: `broken` records, `damaged`
files, `skipped` files (some of the standard library are not utf-8, to test its decoders), `empty` texts.
"""

import importlib
import itertools
import json
import zlib
from pathlib import Path
from typing import NamedTuple

from interface.command_line import one_line

DOC_CHARS = 4_000  # characters of a text file per document: so small that a small text has both splits
# how a file is read, by the end of its name. these words enter the fingerprint in meta.json: they must not
# change, or every data set would be made again
KINDS = {".jsonl": "jsonl", ".jsonl.gz": "packed", ".jsonl.zst": "packed", ".parquet": "parquet"}
HUB = {  # name -> repository, files in it
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "data/*/*.parquet"),
    "fineweb_edu_10bt": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
    "dclm_baseline_1.0": ("mlfoundations/dclm-baseline-1.0", "**/*.jsonl.zst"),
    "dclm_baseline_1.0_10prct": ("mlfoundations/dclm-baseline-1.0", "global-shard_01_of_10/**/*.jsonl.zst"),
}


class Span(NamedTuple):
    """A stretch of one file. Its repr enters the fingerprint in meta.json, so the fields keep their names."""
    kind: str  # whole, text, jsonl, packed (compressed json lines) or parquet
    path: str
    start: int  # first byte; parquet: row group
    stop: int  # one after the last byte; parquet: row group
    size: int  # bytes of text in it, about
    mtime: int  # of the file, ns: a file that changed is encoded again


def require(module, user):
    """Import an optional dependency -> the module. ValueError with the pip command: `user` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.split(".")[0]
        raise ValueError(f"{user} needs the package {package} ({e}): pip install {package}") from e


# -----------------------------------------------------------------------------
# sources -> spans -> documents

def fetch_from_hub(name):
    """A data set on the Hugging Face hub -> [(name in the repository, local path)]. ValueError: not fetched.

    `datasets` finds the files and caches them; its own format is not used, because that would be a second
    copy. A download that was stopped goes on at the next file."""
    datasets = require("datasets", f"the data set {name}")
    repo, pattern = HUB[name] if name in HUB else (name[3:].split("::") + ["**"])[:2]
    try:
        found = datasets.load_dataset_builder(repo, data_files={"train": pattern}).config.data_files["train"]
        return list(zip(map(str, found), datasets.DownloadManager().download(list(found)), strict=True))
    except Exception as e:  # errors of the network, http, the hub and the pattern; some have several lines
        why = one_line(f"{type(e).__name__}: {e}")[:200]
        raise ValueError(f"{name}: {pattern} of {repo} could not be fetched ({why}); fetch the files by other"
                         " means and give their paths instead") from e


def list_spans(source, unit_bytes, key, whole=False):
    """One source, a path or a name on the hub -> its Spans in order.
    key: the column or json key of the text. whole: each file is one document, whatever its name.
    ValueError, OSError: absent, no such column, a package is missing: found now, not hours later."""
    if source in HUB or source.startswith("hf:"):
        files = fetch_from_hub(source)
    elif Path(source).is_file():
        files = [(source, source)]
    else:
        raise FileNotFoundError(f"{source} is not a file; give stdlib, files, or one of {', '.join(HUB)}")
    spans = []
    for name, path in files:
        stat, by_name = Path(path).stat(), (KINDS[end] for end in KINDS if name.lower().endswith(end))
        kind = "whole" if whole else next(by_name, "text")
        if kind == "parquet":
            pieces = list_row_groups(path, key)
        elif kind == "packed":
            if name.lower().endswith(".zst"):
                require("zstandard", path)
            pieces = [(0, stat.st_size, 4 * stat.st_size)]  # text shrinks to about a quarter
        else:
            size = stat.st_size
            step = unit_bytes if kind in CUT else max(size, 1)
            pieces = [(at, min(at + step, size), min(step, size - at)) for at in range(0, max(size, 1), step)]
        spans += [Span(kind, str(path), *piece, stat.st_mtime_ns) for piece in pieces]
    return spans


def group_spans(spans, unit_bytes):
    """-> the units of work, lists of consecutive spans with about unit_bytes of text each."""
    ends = zip(spans, itertools.accumulate(span.size for span in spans), strict=True)
    return [[span for span, _ in unit] for _, unit in itertools.groupby(ends, lambda e: e[1] // unit_bytes)]


def documents(span, key, report):
    """Yield the texts of one span (str), none of them empty. report(kind, line) hears of what is left out."""
    for text in READERS[span.kind](span, key, report):
        if text:
            yield text
        else:
            report("empty", "")


# -----------------------------------------------------------------------------
# plain text

def cut_point(f, at, size):
    """-> where file f may be cut, at byte `at` or later: after a blank line, a line, else at a character."""
    if at == 0 or at >= size:
        return min(at, size)
    f.seek(at)
    block = f.read(1 << 16)
    for mark in (b"\n\n", b"\n"):
        if mark in block:
            return at + block.index(mark) + len(mark)
    return at + next((i for i, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)


def read_text(span, key, report):
    """Yield a whole file, or the documents of a stretch of it. ValueError: a stretch is not utf-8."""
    with open(span.path, "rb") as f:
        size = f.seek(0, 2)
        start, stop = (cut_point(f, at, size) for at in (span.start, span.stop))
        f.seek(start)
        raw = f.read(stop - start)
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        if span.kind == "whole":
            return report("skipped", f"{span.path} is not utf-8 at byte {e.start}")
        raise ValueError(f"{span.path} is not utf-8 at byte {start + e.start}; convert it:"
                         f" iconv -t UTF-8 {span.path}") from e
    if span.kind == "whole" or not text:
        return (yield from [text] if text else [])
    at = 0
    while at < len(text):
        end = len(text)
        if end - at > DOC_CHARS:
            blank = text.find("\n\n", at + DOC_CHARS, at + 2 * DOC_CHARS)
            end = blank + 2 if blank >= 0 else text.find("\n", at + DOC_CHARS) + 1 or end
        yield text[at:end]
        at = end


# -----------------------------------------------------------------------------
# json lines, plain or compressed

def read_json_lines(span, key, report):
    """Yield the value of `key` of each line. A line without such a text is reported as broken."""
    for at, line in (plain_lines if span.kind == "jsonl" else decompressed_lines)(span, report):
        if line.isspace():
            continue
        try:
            text = json.loads(line)[key]
            text.encode()  # half of a surrogate pair cannot be encoded
        except (KeyError, IndexError, TypeError, AttributeError):
            report("broken", f"{span.path} at byte {at:,}: no text under {key!r}")
        except (ValueError, RecursionError) as e:
            report("broken", f"{span.path} at byte {at:,}: {one_line(e)[:120]}")
        else:
            yield text


def plain_lines(span, report):
    """Yield (position in the file, line: bytes) of the lines that start in the span."""
    with open(span.path, "rb") as f:
        if span.start:  # skip the end of a line that belongs to the span before
            f.seek(span.start - 1)
            f.readline()
        while (at := f.tell()) < span.stop and (line := f.readline()):
            yield at, line


def decompressed_lines(span, report):
    """Yield (position in the text, line: bytes) of a .gz or .zst file; lines before a damage are kept."""
    at, rest = 0, b""
    try:
        for block in decompress(span.path):
            *complete, rest = (rest + block).split(b"\n")
            for line in complete:
                yield at, line + b"\n"
                at += len(line) + 1
    except EOFError as e:
        return report("damaged", f"{span.path} {e} after {at:,} bytes of text, the rest is lost:"
                                 " get it again")
    if rest:
        yield at, rest


def decompress(path):
    """Yield the text of a .gz or .zst file in blocks (bytes). EOFError: cut short, or damaged from there."""
    if str(path).lower().endswith(".gz"):
        start, error = (lambda: zlib.decompressobj(wbits=31)), zlib.error
    else:
        zstd = require("zstandard", path)
        decompressor = zstd.ZstdDecompressor(max_window_size=1 << 31)
        start, error = decompressor.decompressobj, zstd.ZstdError
    with open(path, "rb") as f:
        member = None  # both formats allow several members, one after the other
        while block := f.read(1 << 16):
            # between members there may be zeros, the padding that tapes need
            while block := block if member else block.lstrip(b"\0"):
                member = member or start()
                try:
                    yield member.decompress(block)
                except error as e:
                    raise EOFError(f"does not unpack ({e})") from e
                member, block = (None, member.unused_data) if member.eof else (member, b"")
    if member is not None:
        raise EOFError("is cut short")


# -----------------------------------------------------------------------------
# parquet

def open_parquet(path):
    """-> a pyarrow ParquetFile. ValueError: damaged, or pyarrow is missing."""
    parquet = require("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} is not a whole parquet file ({one_line(e)[:120]})") from e


def list_row_groups(path, key):
    """-> [(group, group + 1, bytes of column `key`)]. ValueError: there is no such column of strings."""
    with open_parquet(path) as f:
        schema, meta = f.schema_arrow, f.metadata
        types = {name: str(schema.field(name).type) for name in schema.names}
        if "string" not in types.get(key, ""):
            has = ", ".join(f"{name} ({kind})" for name, kind in types.items())
            raise ValueError(f"{path} has no column {key!r} of strings, it has {has[:300]}; give --text-key")
        paths = [meta.schema.column(i).path for i in range(meta.num_columns)]
        sizes = (meta.row_group(g).column(paths.index(key)).total_uncompressed_size
                 for g in range(meta.num_row_groups))
        return [(g, g + 1, size) for g, size in enumerate(sizes)]


def read_rows(span, key, report):
    """Yield the strings of column `key`. A null is reported as broken, a damaged page ends the row group."""
    with open_parquet(span.path) as f:
        row, groups, place = 0, range(span.start, span.stop), f"{span.path} row group {span.start} row"
        batches = f.iter_batches(256, row_groups=groups, columns=[key], use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (ValueError, OSError) as e:
                lost = sum(f.metadata.row_group(g).num_rows for g in groups) - row
                return report("damaged", f"{place} {row + 1:,} does not unpack ({one_line(e)[:120]}),"
                                         f" {lost:,} rows are lost: get it again")
            if batch is None:
                return
            for value in batch.column(0):
                row, text, why = row + 1, None, f"no text under {key!r}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError as e:
                    why = str(e)
                if text is None:
                    report("broken", f"{place} {row:,}: {why}")
                else:
                    yield text


READERS = {"whole": read_text, "text": read_text, "jsonl": read_json_lines, "packed": read_json_lines,
           "parquet": read_rows}
CUT = "text", "jsonl"  # kinds whose large files are cut into spans
RECORDS = "jsonl", "packed", "parquet"  # kinds that are shuffled by default

"""The inputs of prepare.py: which bytes of which files make a unit of work, and the documents in them.

    input                    a span of it                  a document
    stdlib                   a file                        the file
    text (any other name)    a file, or 16 MB of it        about 4,000 characters, cut at a blank line
    .jsonl                   a file, or 16 MB of it        the value of --text-key on each line
    .jsonl.gz .jsonl.zst     a file, read as a stream      the same
    .parquet                 a row group                   the column --text-key, row by row
    fineweb_edu_10bt, ...    the files of that name on the Hugging Face hub, each as above

What cannot be read is passed to note(kind, line), never dropped in silence: `broken` records, `damaged`
files (cut short, bad bytes in the middle), `skipped` files (the standard library has some that are not utf-8
to test its decoders), `empty` texts.
"""

import importlib
import itertools
import json
import zlib
from pathlib import Path
from typing import NamedTuple

DOC_CHARS = 4_000  # of a text file per document: small texts still fall on both sides of the split
KINDS = {".jsonl": "jsonl", ".jsonl.gz": "packed", ".jsonl.zst": "packed", ".parquet": "parquet"}
HUB = {  # name -> repository, files in it
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "data/*/*.parquet"),
    "fineweb_edu_10bt": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
    "dclm_baseline_1.0": ("mlfoundations/dclm-baseline-1.0", "**/*.jsonl.zst"),
    "dclm_baseline_1.0_10prct": ("mlfoundations/dclm-baseline-1.0", "global-shard_01_of_10/**/*.jsonl.zst"),
}


class Span(NamedTuple):
    kind: str  # whole, text, jsonl, packed or parquet
    path: str
    start: int  # first byte; parquet: row group
    stop: int
    size: int  # bytes of text in it, about
    mtime: int  # of the file, ns: a changed file is encoded again


def need(module, what):
    """An optional dependency, imported where it is used; ValueError with the command when it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.split(".")[0]
        raise ValueError(f"{what} needs the package {package} ({e}): pip install {package}") from e


def kind_of(name):
    """The kind of a file by the end of its name; whatever is not known is text."""
    return next((kind for end, kind in KINDS.items() if str(name).lower().endswith(end)), "text")


def hub_files(name):
    """[(name in the repository, local path)] of a data set on the Hugging Face hub, fetched where need be.

    Only the files travel: `datasets` finds and caches them, and they are read as any other file here. So
    there is no second copy in its own format, and a download that was stopped goes on at the next file.
    """
    datasets = need("datasets", f"the data set {name}")
    repo, pattern = HUB[name] if name in HUB else (name[3:].split("::") + ["**"])[:2]
    try:
        found = datasets.load_dataset_builder(repo, data_files={"train": pattern}).config.data_files["train"]
        return list(zip(map(str, found), datasets.DownloadManager().download(list(found)), strict=True))
    except Exception as e:  # network, http, hub and glob errors alike, some of several lines
        why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise ValueError(f"{name}: {pattern} of {repo} could not be fetched ({why}); fetch the files by other"
                         " means and give their paths instead") from e


def spans_of(source, unit_bytes, key, whole=False):
    """The spans of one source, in order: a path, or a name on the hub. Errors that the files' ends and
    headers can tell (absent, no such column, a package missing) come now, not hours later."""
    if source in HUB or source.startswith("hf:"):
        files = hub_files(source)
    elif Path(source).is_file():
        files = [(source, source)]
    else:
        raise FileNotFoundError(f"{source} is not a file; give stdlib, files, or one of {', '.join(HUB)}")
    out = []
    for name, path in files:
        kind, stat = "whole" if whole else kind_of(name), Path(path).stat()
        if kind == "parquet":
            pieces = row_groups(path, key)
        elif kind == "packed":
            if name.lower().endswith(".zst"):
                need("zstandard", path)
            pieces = [(0, stat.st_size, 4 * stat.st_size)]
        else:
            step = max(stat.st_size, 1) if whole else unit_bytes
            ends = ((at, min(at + step, stat.st_size)) for at in range(0, max(stat.st_size, 1), step))
            pieces = [(start, stop, stop - start) for start, stop in ends]
        out += [Span(kind, str(path), *piece, stat.st_mtime_ns) for piece in pieces]
    return out


def units_of(spans, unit_bytes):
    """Consecutive spans in lists of about unit_bytes of text; never a function of the worker count."""
    ends = zip(spans, itertools.accumulate(span.size for span in spans), strict=True)
    return [[span for span, _ in unit] for _, unit in itertools.groupby(ends, lambda e: e[1] // unit_bytes)]


def documents(span, key, note):
    """The texts of one span, none of them empty."""
    read = {"whole": texts, "text": texts, "jsonl": records, "packed": records, "parquet": rows}[span.kind]
    for text in read(span, key, note):
        if text:
            yield text
        else:
            note("empty", "")


# -----------------------------------------------------------------------------
# plain text

def cut(f, at, size):
    """The first place at or after `at` where text may be cut: a blank line, else a line, else a character."""
    if at == 0 or at >= size:
        return min(at, size)
    f.seek(at)
    block = f.read(1 << 16)
    for mark in (b"\n\n", b"\n"):
        if mark in block:
            return at + block.index(mark) + len(mark)
    return at + next((i for i, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)


def texts(span, key, note):
    """A whole file, or the pieces of a stretch of it."""
    with open(span.path, "rb") as f:
        size = f.seek(0, 2)
        start, stop = (cut(f, at, size) for at in (span.start, span.stop))
        f.seek(start)
        raw = f.read(stop - start)
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        if span.kind == "whole":
            return note("skipped", f"{span.path} is not utf-8 at byte {e.start}")
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
# json lines

def records(span, key, note):
    """The texts of json lines, plain or packed."""
    for at, line in (lines if span.kind == "jsonl" else packed_lines)(span, note):
        if line.isspace():
            continue
        why = f"no text under {key!r}"
        try:
            text = json.loads(line)[key]
            text.encode()  # half a surrogate pair is no text
        except (KeyError, IndexError, TypeError, AttributeError):
            note("broken", f"{span.path} at byte {at:,}: {why}")
        except (ValueError, RecursionError) as e:
            note("broken", f"{span.path} at byte {at:,}: {' '.join(str(e).split())[:120]}")
        else:
            yield text


def lines(span, note):
    """(position, line) of the lines that start in the span."""
    at = span.start
    with open(span.path, "rb") as f:
        if at:  # the end of a line that belongs to the span before
            f.seek(at - 1)
            at += len(f.readline()) - 1
        while at < span.stop and (line := f.readline()):
            yield at, line
            at += len(line)


def packed_lines(span, note):
    """(position in the text, line) of a .gz or .zst file; what comes before a damage is kept."""
    at, rest = 0, b""
    try:
        for block in unpacked(span.path):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield at, line + b"\n"
                at += len(line) + 1
    except Damage as e:
        return note("damaged", f"{span.path} {e} after {at:,} bytes of text, the rest is lost: get it again")
    if rest:
        yield at, rest


class Damage(Exception):
    pass


def unpacked(path):
    """The text of a packed file in blocks; Damage where it ends early or does not unpack."""
    if str(path).lower().endswith(".gz"):
        start, wrong = (lambda: zlib.decompressobj(wbits=31)), zlib.error
    else:
        zstd = need("zstandard", path)
        unpacker = zstd.ZstdDecompressor(max_window_size=1 << 31)
        start, wrong = unpacker.decompressobj, zstd.ZstdError
    with open(path, "rb") as f:
        member = None  # both formats may hold several, one after the other
        while block := f.read(1 << 16):
            while block := block if member else block.lstrip(b"\0"):  # between members, a tape's padding
                member = member or start()
                try:
                    yield member.decompress(block)
                except wrong as e:
                    raise Damage(f"does not unpack ({e})") from e
                member, block = (None, member.unused_data) if member.eof else (member, b"")
    if member is not None:
        raise Damage("is cut short")


# -----------------------------------------------------------------------------
# parquet

def open_parquet(path):
    parquet = need("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} is not a whole parquet file ({' '.join(str(e).split())[:120]})") from e


def row_groups(path, key):
    """(group, group + 1, bytes) of each row group; ValueError when there is no such column of text."""
    with open_parquet(path) as f:
        schema, meta = f.schema_arrow, f.metadata
        kinds = {name: str(schema.field(name).type) for name in schema.names}
        if "string" not in kinds.get(key, ""):
            has = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise ValueError(f"{path} has no column {key!r} of strings, it has {has[:300]}; give --text-key")
        paths = [meta.schema.column(i).path for i in range(meta.num_columns)]
        sizes = (meta.row_group(g).column(paths.index(key)).total_uncompressed_size
                 for g in range(meta.num_row_groups))
        return [(g, g + 1, size) for g, size in enumerate(sizes)]


def rows(span, key, note):
    """The values of the column; a null is a broken row."""
    with open_parquet(span.path) as f:
        row, groups = 0, range(span.start, span.stop)
        batches = f.iter_batches(256, row_groups=groups, columns=[key], use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (ValueError, OSError) as e:
                lost, why = sum(f.metadata.row_group(g).num_rows for g in groups) - row, str(e).split()
                return note("damaged", f"{where(span, row + 1)} does not unpack ({' '.join(why)[:120]}),"
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
                    note("broken", f"{where(span, row)}: {why}")
                else:
                    yield text


def where(span, row):
    return f"{span.path} row group {span.start} row {row:,}"

"""Readers: the inputs of prepare.py -> spans (units of reading) -> documents (str).

    input                      a span of it                a document
    stdlib                     a file                      the file
    text (any other name)      a file, or 16 MB of it      about 4,000 characters, cut at a blank line
    .jsonl                     a file, or 16 MB of it      the value of --text-key on each line
    .jsonl.gz, .jsonl.zst      a file, read as a stream    the value of --text-key on each line
    .ndjson                    another name of .jsonl; a .json is refused
    .parquet                   a row group                 each row of the column --text-key
    fineweb_edu_10bt, ...      the files of that name on the Hugging Face hub, each read as above

What cannot be read is passed to report(kind, line), never dropped in silence: `broken` records, `damaged`
files, `skipped` files (some of the standard library are not utf-8, to test its decoders), `empty` texts.
"""

import functools
import importlib
import json
import os
import shlex
import zlib
from pathlib import Path
from typing import NamedTuple

from interface import paths
from interface.terminal import one_line

DOC_CHARS = 4_000  # characters of a text file per document: so few that a small text has both splits
MOST_LINE = 1 << 26  # bytes of a json line
MOST_UNPACKED = 1 << 30  # characters of a small compressed file
UNPACKED_TIMES = 1000  # characters of a large one, over its bytes
MOST_AT_ONCE = 1 << 28  # bytes of the rows of a .parquet file that are unpacked together
# How a file is read, by the end of its name. These words enter the fingerprint in meta.json: they must not
# change, or every data set would be made again.
KINDS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "packed",
    ".jsonl.zst": "packed",
    ".ndjson": "jsonl",
    ".ndjson.gz": "packed",
    ".ndjson.zst": "packed",
    ".parquet": "parquet",
}
# The first bytes of a packed file: the program that unpacks it, and how it wants the name to end.
PACKED = {
    b"\x1f\x8b": ("gunzip -k", ".gz"),
    b"\x28\xb5\x2f\xfd": ("unzstd", ".zst"),
    b"BZh": ("bunzip2 -k", ".bz2"),
    b"\xfd7zXZ\0": ("unxz -k", ".xz"),
    b"PK\x03\x04": ("unzip", ""),
}
BOM = "\ufeff"  # some editors, most of them on Windows, write it before a text; it is no part of the text
MOST_BEGIN = 8  # bytes of a file that tell what it is
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
    """Import an optional dependency and return the module.

    ValueError: it is not installed; the message has the pip command, and says that `user` needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.split(".")[0]
        raise ValueError(f"{user} needs the package {package} ({e}): pip install {package}") from e


# -----------------------------------------------------------------------------
# Sources -> spans -> documents

def fetch_from_hub(name):
    """Fetch a data set from the Hugging Face hub; return [(name in the repository, local path)].

    `datasets` finds the files and caches them. Its own format is not used, because that would be a second
    copy. A download that was stopped goes on at the next file. ValueError: the files cannot be fetched.
    """
    datasets = require("datasets", f"the data set {name}")
    if name in HUB:
        repo, pattern = HUB[name]
    else:
        words = name.removeprefix("hf:").split("::")
        repo = words[0]
        pattern = words[1] if len(words) > 1 else "**"
    try:
        builder = datasets.load_dataset_builder(repo, data_files={"train": pattern})
        found = list(builder.config.data_files["train"])
        paths = datasets.DownloadManager().download(found)
        return list(zip(map(str, found), paths, strict=True))
    except Exception as e:  # errors of the network, http, the hub and the pattern; some have several lines
        why = one_line(f"{type(e).__name__}: {e}")[:200]
        raise ValueError(f"{name}: {pattern} of {repo} could not be fetched ({why}); fetch the files by other"
                         " means and give their paths instead") from e


def is_on_hub(source):
    """Whether a source is the name of a data set on the Hugging Face hub."""
    return source in HUB or source.startswith("hf:")


def check_source(source):
    """Raise FileNotFoundError, with what is meant, if a source is neither a file nor on the hub."""
    if not is_on_hub(source) and not Path(source).is_file():
        meant = paths.meant_file(source)
        raise FileNotFoundError(f"{source} is not a file{meant}; give stdlib, files, or one of "
                                f"{', '.join(HUB)}")


def list_spans(source, unit_bytes, key, whole=False):
    """Return the Spans of one source, a path or a name on the hub, in order.

    key: the column or json key of the text. whole: each file is one document, whatever its name. ValueError,
    OSError: the source is absent, has no such column, or needs a missing package. So these are found now,
    not hours later.
    """
    check_source(source)
    files = fetch_from_hub(source) if is_on_hub(source) else [(source, source)]
    spans = []
    for name, path in files:
        stat = Path(path).stat()
        kind = "whole" if whole else kind_of(name)
        if kind == "text" and name.lower().endswith(".json"):
            raise ValueError(f"{name} would be trained on as it stands, with its brackets; {to_lines(path)}")
        if kind == "parquet":
            pieces = list_row_groups(path, key)
        elif kind == "packed":
            if name.lower().endswith(".zst"):
                require("zstandard", path)
            pieces = [(0, stat.st_size, 4 * stat.st_size)]  # text shrinks to about a quarter
        else:
            step = unit_bytes if kind in CUT else max(stat.st_size, 1)
            pieces = list_stretches(stat.st_size, step)
        spans += [Span(kind, str(path), *piece, stat.st_mtime_ns) for piece in pieces]
    return spans


def to_lines(path):
    """Return what to type for a .json file, so that each of its records is a line of a .jsonl."""
    with open(path, "rb") as f:
        begin = f.read(1 << 10).removeprefix(BOM.encode()).lstrip()
    source = shlex.quote(str(path))
    lines = shlex.quote(f"{str(path)[:-len('.json')]}.jsonl")
    if begin.startswith(b"["):
        return f"write each record on a line: jq -c '.[]' {source} > {lines}"
    return f"if each of its lines is a record, name it so: mv {source} {lines}"


def kind_of(name):
    """Return how a file is read, by its name."""
    for end, kind in KINDS.items():
        if name.lower().endswith(end):
            return kind
    return "text"


def list_stretches(size, step):
    """Return the stretches of a file of `size` bytes: [(start, stop, bytes)]; an empty file has one."""
    starts = range(0, max(size, 1), step)
    return [(start, min(start + step, size), min(step, size - start)) for start in starts]


def group_spans(spans, unit_bytes):
    """Return the units of work, lists of consecutive spans with about unit_bytes of text each."""
    units = []
    last_number = None
    end = 0
    for span in spans:
        end += span.size
        number = end // unit_bytes
        if number != last_number:
            units.append([])
        units[-1].append(span)
        last_number = number
    return units


def documents(span, key, report):
    """Yield the texts of one span (str), none of them empty; report(kind, line) is told what is left out.

    A file that unpacks to far more than its size is cut there: it was made to fill a disk.
    """
    room = max(MOST_UNPACKED, UNPACKED_TIMES * os.path.getsize(span.path))
    if span.kind == "parquet":  # a file of many row groups has no more room than one of a single group
        room *= shares_of_groups(span.path, span.mtime, key)[span.start]
    for text in READERS[span.kind](span, key, report):
        room -= len(text) + 64  # what an empty one takes in memory, about
        if room < 0 and span.kind in ("packed", "parquet"):
            report("damaged", f"{span.path} unpacks to more than {UNPACKED_TIMES:,} times its size, the rest"
                              " is left out: get it from somewhere else")
            return
        if text:
            yield text
        else:
            report("empty", "")


# -----------------------------------------------------------------------------
# Plain text

def cut_point(f, at, size):
    """Return where file f may be cut, at byte `at` or later: after a blank line, a line, else a character."""
    if at == 0 or at >= size:
        return min(at, size)
    f.seek(at)
    block = f.read(1 << 16)
    for mark in (b"\n\n", b"\n"):
        if mark in block:
            return at + block.index(mark) + len(mark)
    for i, byte in enumerate(block):
        if byte & 0xC0 != 0x80:  # it is no continuation byte of utf-8
            return at + i
    return at + len(block)  # the last character of the file


def read_text(span, key, report):
    """Yield a whole file, or the documents of a stretch of it. ValueError: a stretch is not utf-8."""
    with open(span.path, "rb") as f:
        size = f.seek(0, 2)
        start = cut_point(f, span.start, size)
        stop = cut_point(f, span.stop, size)
        f.seek(start)
        raw = f.read(stop - start)
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        if span.kind == "whole":
            report("skipped", f"{span.path} is not utf-8 at byte {e.start}")
            return
        begin = raw[:MOST_BEGIN] if start == 0 else b""
        raise ValueError(f"{span.path} is not utf-8 at byte {start + e.start}; "
                         f"{converted(span.path, begin)}") from e
    if start == 0:
        text = text.removeprefix(BOM)
    if span.kind == "text":
        yield from cut_documents(text)
    elif text:
        yield text


def converted(path, begin):
    """Return what to type for a file that is not utf-8. begin: its first bytes, if they were read."""
    source = shlex.quote(path)
    if begin.startswith(b"PAR1"):
        return f"it is a parquet file, name it so: mv {source} {shlex.quote(path + '.parquet')}"
    for start, (program, end) in PACKED.items():
        if begin.startswith(start):
            return unpacked(path, program, end)
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        kind = "UTF-16"
        note = ""
    else:  # each text is one in Latin-1, so nothing tells it from its relatives
        kind = "LATIN1"
        note = " (if its encoding is another one, give that for LATIN1: file -i names it)"
    return f"convert it: iconv -f {kind} -t UTF-8 {source} > {shlex.quote(path + '.utf8')}{note}"


def unpacked(path, program, end):
    """Return what to type for a packed file. program: what unpacks it if its name ends in `end`."""
    source = shlex.quote(path)
    for wrong in (".json.gz", ".json.zst"):
        if path.lower().endswith(wrong):
            right = path[:-len(wrong)] + wrong.replace("json", "jsonl")
            return f"if each of its lines is a record, name it so: mv {source} {shlex.quote(right)}"
    if path.lower().endswith(end):
        return f"unpack it: {program} {source}, and give what that writes"
    named = shlex.quote(path + end)
    return f"unpack it: mv {source} {named} && {program} {named}, and give what that writes"


def cut_documents(text):
    """Yield a text in documents of about DOC_CHARS characters."""
    start = 0
    while start < len(text):
        end = document_end(text, start)
        yield text[start:end]
        start = end


def document_end(text, start):
    """Return where the document that begins at `start` ends: after a blank line, a line, or with the text."""
    if len(text) - start <= DOC_CHARS:
        return len(text)
    blank = text.find("\n\n", start + DOC_CHARS, start + 2 * DOC_CHARS)
    if blank >= 0:
        return blank + 2
    line = text.find("\n", start + DOC_CHARS)
    if line >= 0:
        return line + 1
    return len(text)


# -----------------------------------------------------------------------------
# JSON lines, plain or compressed

def read_json_lines(span, key, report):
    """Yield the value of `key` of each line. A line without such a text is reported as broken."""
    for at, line in read_lines(span, report):
        if line.isspace():
            continue
        try:
            text = json.loads(line)[key]
            check_characters(text)
        except (KeyError, IndexError, TypeError, AttributeError):
            report("broken", f"{span.path} at byte {at:,}: no text under {key!r}")
        except (ValueError, RecursionError) as e:
            report("broken", f"{span.path} at byte {at:,}: {one_line(e)[:120]}")
        else:
            yield text


def check_characters(text):
    """Raise ValueError if a text has half of a surrogate pair, which JSON can say and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"\\u{ord(text[e.start]):04x} is half of a surrogate pair, which is no character; "
                         "write both halves, or leave it out") from None


def read_lines(span, report):
    """Yield (position, line: bytes) of the lines of a span of json lines, plain or compressed."""
    if span.kind == "jsonl":
        return plain_lines(span, report)
    return decompressed_lines(span, report)


def plain_lines(span, report):
    """Yield (position in the file, line: bytes) of the lines that start in the span."""
    with open(span.path, "rb") as f:
        if span.start:  # skip the end of a line that belongs to the span before
            f.seek(span.start - 1)
            line = f.readline(MOST_LINE)
            while line and not line.endswith(b"\n"):
                line = f.readline(MOST_LINE)
        at = f.tell()
        while at < span.stop:
            line = f.readline(MOST_LINE + 1)
            if not line:
                return
            if len(line) > MOST_LINE:
                report("broken", too_long(span, at))
                while line and not line.endswith(b"\n"):
                    line = f.readline(MOST_LINE)
            else:
                yield at, line
            at = f.tell()


def decompressed_lines(span, report):
    """Yield (position in the text, line: bytes) of a .gz or .zst file; lines before a damage are kept."""
    at = 0
    begun = []  # pieces of a line whose end is in a later block
    size = 0  # bytes of these pieces, also where they are too many to be kept
    try:
        for block in decompress(span.path):
            *ends, rest = block.split(b"\n")
            for end in ends:
                size += len(end)
                if size > MOST_LINE:
                    report("broken", too_long(span, at))
                else:
                    yield at, b"".join([*begun, end, b"\n"])
                at += size + 1
                begun = []
                size = 0
            size += len(rest)
            if size > MOST_LINE:
                begun = []
            else:
                begun.append(rest)
    except EOFError as e:
        report("damaged", f"{span.path} {e} after {at:,} bytes of text, the rest is lost: get it again")
        return
    if size > MOST_LINE:
        report("broken", too_long(span, at))
    elif size:
        yield at, b"".join(begun)


def too_long(span, at):
    return f"{span.path} at byte {at:,}: a line of more than {MOST_LINE >> 20} MB; cut that text into records"


def decompress(path):
    """Yield the text of a .gz or .zst file in blocks (bytes). EOFError: cut short, or damaged from there."""
    if str(path).lower().endswith(".gz"):
        new_member = gzip_member
        error = zlib.error
        step = 1 << 16
    else:
        zstandard = require("zstandard", path)
        new_member = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        error = zstandard.ZstdError
        step = 1 << 10  # of a block that repeats one byte 4 bytes of a file are 128 kB of text

    member = None  # both formats allow several members, one after the other
    with open(path, "rb") as f:
        while block := f.read(step):
            while block:
                if member is None:
                    block = block.lstrip(b"\0")  # zeros between members are the padding that tapes need
                    if not block:
                        break
                    member = new_member()
                try:
                    yield member.decompress(block)
                except error as e:
                    raise EOFError(f"does not unpack ({e})") from e
                if not member.eof:
                    break
                block = member.unused_data
                member = None
    if member is not None:
        raise EOFError("is cut short")


def gzip_member():
    """Return a decompressor of one member of a .gz file."""
    return zlib.decompressobj(wbits=31)


# -----------------------------------------------------------------------------
# Parquet

def open_parquet(path):
    """Return a pyarrow ParquetFile. ValueError: damaged, or pyarrow is missing."""
    parquet = require("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} is not a whole parquet file ({one_line(e)[:120]}); download it again, or "
                         "leave it out") from e


def list_row_groups(path, key):
    """Return [(group, group + 1, bytes of column `key`)].

    ValueError: there is no such column of strings, or there are several.
    """
    with open_parquet(path) as f:
        fields = list(f.schema_arrow)
        has = ", ".join(f"{field.name} ({field.type})" for field in fields)
        named = [field for field in fields if field.name == key]
        if len(named) > 1:
            raise ValueError(f"{path} has {len(named)} columns {key!r}, it has {has[:300]}; give --text-key, "
                             "or rename one of them")
        if not named or not is_text(named[0].type):
            raise ValueError(f"{path} has no column {key!r} of strings, it has {has[:300]}; give --text-key")

        meta = f.metadata
        column = column_number(f, key)
        sizes = [meta.row_group(i).column(column).total_uncompressed_size for i in range(meta.num_row_groups)]
        return [(i, i + 1, size) for i, size in enumerate(sizes)]


def is_text(kind):
    """Whether a type of arrow is one of strings, also of strings that are stored once."""
    from pyarrow import types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


@functools.lru_cache(8)
def shares_of_groups(path, mtime, key):
    """Return the share of each row group in the stored bytes of column `key`. mtime: of the file, ns."""
    with open_parquet(path) as f:
        number = column_number(f, key)
        groups = [f.metadata.row_group(i).column(number) for i in range(f.metadata.num_row_groups)]
        stored = [1 + max(0, group.total_compressed_size) for group in groups]
    return [size / sum(stored) for size in stored]


def column_number(f, key):
    """Return the place of the column `key` in the lists of a ParquetFile."""
    return [f.metadata.schema.column(i).path for i in range(f.metadata.num_columns)].index(key)


def rows_at_once(f, groups, key):
    """Return how many rows of a ParquetFile to read at once: few, if what they unpack to may be huge.

    A text that is stored once may stand in every row.
    """
    number = column_number(f, key)
    longest = max(f.metadata.row_group(i).column(number).total_uncompressed_size for i in groups)
    return min(256, max(1, MOST_AT_ONCE // max(1, longest)))


def read_rows(span, key, report):
    """Yield the strings of column `key`. A null is reported as broken, a damaged page ends the row group."""
    groups = range(span.start, span.stop)
    place = f"{span.path} row group {span.start} row"
    row = 0  # the number of rows read so far
    with open_parquet(span.path) as f:
        rows = rows_at_once(f, groups, key)
        batches = f.iter_batches(rows, row_groups=groups, columns=[key], use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (ValueError, OSError) as e:
                lost = sum(f.metadata.row_group(i).num_rows for i in groups) - row
                report("damaged", f"{place} {row + 1:,} does not unpack ({one_line(e)[:120]}),"
                                  f" {lost:,} rows are lost: get it again")
                return
            if batch is None:
                return
            for value in batch.column(0):
                row += 1
                text = None
                why = f"no text under {key!r}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError as e:
                    why = str(e)
                if text is not None and len(text) > MOST_LINE:
                    text = None
                    why = f"a text of more than {MOST_LINE >> 20} MB; cut it into records"
                if text is None:
                    report("broken", f"{place} {row:,}: {why}")
                else:
                    yield text


READERS = {
    "whole": read_text,
    "text": read_text,
    "jsonl": read_json_lines,
    "packed": read_json_lines,
    "parquet": read_rows,
}
CUT = ("text", "jsonl")  # kinds whose large files are cut into spans
RECORDS = ("jsonl", "packed", "parquet")  # kinds that are shuffled by default

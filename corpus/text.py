"""Readers: the inputs of prepare.py -> documents (str).

    stdlib                       each file is a document
    records: .jsonl, .ndjson     the value of --text-key on each line
    .parquet                     each row of the column --text-key (needs pyarrow)
    fineweb_edu_10bt, hf:...     files on the Hugging Face hub, read as above (needs datasets)
    text: any other name         about 4,000 characters, cut at a blank line, or what --split-at separates

Files packed as .gz, or records as .zst (needs zstandard), are known by their first bytes, records and tables
of another name by their first line. What cannot be read is a ValueError with its file and row.
"""
import codecs
import contextlib
import gzip
import importlib
import io
import json
import re
import shlex
import zlib
from pathlib import Path
from typing import NamedTuple

from interface import paths
from interface.terminal import one_line, say, warn

DOC_CHARS = 4_000  # characters of a text file per document: so few that a small text has both splits
MOST_LINE = 1 << 26  # bytes of a json line, characters of a document
GZIP = b"\x1f\x8b"  # the first bytes of such a file
ZSTD = b"\x28\xb5\x2f\xfd"
RECORDS = (".jsonl", ".jsonlines", ".jl", ".ndjson")
HUB = {  # name -> repository, files in it
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "data/*/*.parquet"),
    "fineweb_edu_10bt": ("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"),
    "dclm_baseline_1.0": ("mlfoundations/dclm-baseline-1.0", "**/*.jsonl.zst"),
    "dclm_baseline_1.0_10prct": ("mlfoundations/dclm-baseline-1.0", "global-shard_01_of_10/**/*.jsonl.zst"),
}


class File(NamedTuple):
    kind: str  # whole (one document), text, records or parquet
    path: str


def require(module, user):
    """Import an optional dependency. ValueError: it is not installed; the message has the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.split(".")[0]
        raise ValueError(f"{user} needs the package {package} ({e}): pip install {package}") from e


# -----------------------------------------------------------------------------
# Which files, and how each is read

def check_source(source):
    """Return whether a source is a name on the hub. FileNotFoundError, with what is meant: nor a file."""
    if Path(source).is_dir():
        raise FileNotFoundError(f"{source} is a folder; give its files, as {shlex.quote(source)}/*")
    on_hub = source in HUB or source.startswith("hf:")
    if not on_hub and not Path(source).is_file():
        raise FileNotFoundError(f"{source} is not a file{paths.meant_file(source)}; give stdlib, files, or"
                                f" one of {', '.join(HUB)}")
    return on_hub


def list_files(source, key):
    """Return the Files of one source, a path or a name on the hub, in order.

    key: the column or json key of the text. ValueError, OSError: a file is absent, would be trained on with
    its brackets, or needs a missing package. So these are found now, not hours later.
    """
    found = fetch_from_hub(source) if check_source(source) else [(source, source)]
    return [File(kind_of(name, path, key), str(path)) for name, path in found]


def fetch_from_hub(name):
    """Fetch a data set from the Hugging Face hub; return [(name in the repository, local path)].

    `datasets` finds the files and caches them, and a download that was stopped goes on at the next file.
    ValueError: they cannot be fetched.
    """
    datasets = require("datasets", f"the data set {name}")
    repo, _, pattern = name.removeprefix("hf:").partition("::")
    if name in HUB:
        repo, pattern = HUB[name]
    try:
        builder = datasets.load_dataset_builder(repo, data_files={"train": pattern or "**"})
        found = list(builder.config.data_files["train"])
        return list(zip(map(str, found), datasets.DownloadManager().download(found), strict=True))
    except Exception as e:  # errors of the network, http, the hub and the pattern; some have several lines
        why = one_line(f"{type(e).__name__}: {e}")[:200]
        raise ValueError(f"{name}: {pattern or '**'} of {repo} could not be fetched ({why}); fetch the files "
                         "by other means and give their paths instead") from e


def kind_of(name, path, key):
    """Return how a file is read. name: what it was called before it came into a cache."""
    name = re.sub(r"\.(gz|zst)$", "", str(name).lower())
    with open(path, "rb") as f:
        begin = f.read(4)
    if begin == b"PAR1" or name.endswith(".parquet"):
        open_parquet(path, key).close()
        return "parquet"
    with open_bytes(path) as f:
        first = f.readline(MOST_LINE).removeprefix(codecs.BOM_UTF8)
    if name.endswith(RECORDS):
        return "records"
    record = {}
    if first.startswith(b"{"):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(first)
    if key in record or "messages" in record:
        say(f"{path}: its first line is a JSON object, so each line is read as one")
        return "records"
    if not name.endswith(".txt"):
        refuse_records(name, path, key, first, record)
    if begin == ZSTD:  # zstandard does not tell that a text is cut short; a record is broken then
        raise ValueError(f"{path} is no .jsonl.zst; unpack it: unzstd {shlex.quote(str(path))}")
    return "text"


def refuse_records(name, path, key, first, record):
    """Raise ValueError if a file is JSON of another form, or a table, of which no line is a text.

    first: its first line; record: the JSON object on it, or {}.
    """
    source = shlex.quote(str(path))
    if record:
        raise ValueError(f"{path}: its first line is a JSON object without {key!r}, it has "
                         f"{', '.join(record)[:200]}; give --text-key, or name it .txt to train on it so")
    if name.endswith(".json") or re.match(rb'\s*\[?\s*\{\s*("|$)', first):
        raise ValueError(f"{path} would be trained on with its brackets; {to_lines(path, first)}")
    separator = b"\t" if b"\t" in first else b","
    names = [field.strip(b'"') for field in first.strip().split(separator)]
    is_header = len(names) > 1 and key.encode() in names and all(re.fullmatch(rb"\w+", n) for n in names)
    if is_header or name.endswith((".csv", ".tsv")):
        delimiter = r", delimiter='\t'" if separator == b"\t" else ""
        raise ValueError(f"{path} is a table, which would be trained on with its separators; make records of "
                         'it: python -c "import csv, json, sys; [print(json.dumps(row)) for row in '
                         f'csv.DictReader(sys.stdin{delimiter})]" < {source} > {source}.jsonl')


def to_lines(path, begin):
    """Return what to type so that each record of a JSON file is on a line of its own."""
    pattern = "'.[]'" if begin.lstrip().startswith(b"[") else "."
    source = shlex.quote(str(path))
    return f"write each record on a line: jq -c {pattern} {source} > {source}.jsonl"


@contextlib.contextmanager
def open_bytes(path):
    """Open a file, unpacked as its first bytes say. ValueError: its packing is damaged or cut short."""
    damage = [EOFError, zlib.error, gzip.BadGzipFile]
    with open(path, "rb") as raw:
        begin = raw.peek(4)
        f = raw
        if begin.startswith(GZIP):
            f = gzip.open(raw)
        if begin.startswith(ZSTD):
            zstandard = require("zstandard", path)
            damage.append(zstandard.ZstdError)
            unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
            f = io.BufferedReader(unpacker.stream_reader(raw, read_across_frames=True))
        try:
            yield f
        except tuple(damage) as e:
            raise ValueError(f"{path} is damaged or cut short ({one_line(e)[:120]}); get it again") from e


# -----------------------------------------------------------------------------
# Documents

def documents(file, key, split_at=""):
    """Yield the texts of a File, none of them empty. split_at: what ends a document in a text, or ""."""
    if file.kind == "text":
        yield from read_text(file.path, split_at)
        return
    read = {"whole": read_whole, "records": read_records, "parquet": read_parquet}[file.kind]
    for text in read(file.path, key):
        parts = filter(str.strip, text.split(split_at)) if split_at else [text]
        yield from filter(None, parts)


def read_whole(path, key):
    """Yield the text of a file. Some of the standard library have none: they test its decoders."""
    try:
        yield Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        warn(f"{path} is not utf-8 at byte {e.start}: it is left out")


def read_text(path, split_at):
    """Yield the documents of a text. ValueError: it is not utf-8."""
    rest = ""
    for piece in decoded(path):
        rest += piece
        if split_at:
            *parts, rest = rest.split(split_at)
            yield from filter(str.strip, parts)
            continue
        start = 0
        end = document_end(rest, start)
        while end < len(rest) - DOC_CHARS:  # what follows changes no end before this
            yield rest[start:end]
            start = end
            end = document_end(rest, start)
        rest = rest[start:]
    if split_at:
        yield from filter(str.strip, [rest])
        return
    while rest:
        end = document_end(rest, 0)
        yield rest[:end]
        rest = rest[end:]


def document_end(text, start):
    """Return where the document that begins at `start` ends: after a blank line, a line, or with the text."""
    blank = text.find("\n\n", start + DOC_CHARS, start + 2 * DOC_CHARS)
    if blank >= 0:
        return blank + 2
    line = text.find("\n", start + DOC_CHARS)
    if line >= 0:
        return line + 1
    return min(len(text), start + MOST_LINE)


def decoded(path):
    """Yield the characters of a text, without the mark that some editors write before it."""
    with open_bytes(path) as f:
        text = io.TextIOWrapper(f, "utf-8-sig", newline="")
        try:
            while piece := text.read(1 << 20):
                yield piece
        except UnicodeDecodeError as e:
            source = shlex.quote(str(path))
            raise ValueError(f"{path} is not utf-8, it has the byte {e.object[e.start]:#x}; convert it: "
                             f"iconv -f LATIN1 -t UTF-8 {source} > {source}.utf8 (file -i names its encoding)"
                             ) from None


def read_records(path, key):
    for where, record in json_lines(path):
        yield text_of(record.get(key), where, key, ", ".join(record))


def json_lines(path):
    """Yield (its file and row, the JSON object) of each line that is not blank. ValueError: it is none."""
    row = 0
    with open_bytes(path) as f:
        while line := f.readline(MOST_LINE + 1):
            row += 1
            where = f"{path}, row {row:,}"
            if len(line) > MOST_LINE:
                raise ValueError(f"{where} has more than {MOST_LINE >> 20} MB; cut that text into records")
            if line.isspace():
                continue
            try:
                record = json.loads(line.removeprefix(codecs.BOM_UTF8))
            except (ValueError, RecursionError) as e:
                is_begun = row == 1 and line.lstrip()[:1] in (b"{", b"[")
                fix = to_lines(path, line) if is_begun else "mend it, or leave it out"
                raise ValueError(f"{where} is no JSON ({one_line(e)[:120]}); {fix}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} is no JSON object; {to_lines(path, line)}")
            yield where, record


def text_of(text, where, key, keys):
    """Return a text. ValueError: it is none, or has half of a surrogate pair. keys: what its record has."""
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text under {key!r}, it has {keys[:200] or 'nothing'}; mend it, or "
                         "say by --text-key where the text is")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{where} has half of a surrogate pair, which is no character ({e}); mend it, or "
                         "leave it out") from None
    return text


def open_parquet(path, key):
    """Return a ParquetFile with a column `key`. ValueError: damaged, no such column, or no pyarrow."""
    parquet = require("pyarrow.parquet", path)
    try:
        f = parquet.ParquetFile(path)
    except (ValueError, OSError) as e:
        raise ValueError(f"{path} is not a whole parquet file ({one_line(e)[:120]}); get it again") from e
    names = f.schema_arrow.names
    if names.count(key) != 1:
        raise ValueError(f"{path} has not one column {key!r}, but {', '.join(names)[:300]}; give --text-key")
    return f


def read_parquet(path, key):
    """Yield the strings of column `key`. ValueError: a row without one, a damaged page."""
    row = 0
    with open_parquet(path, key) as f:
        keys = ", ".join(f.schema_arrow.names)
        try:
            for batch in f.iter_batches(256, columns=[key]):
                for value in batch.column(0):
                    row += 1
                    yield text_of(value.as_py(), f"{path}, row {row:,}", key, keys)
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{path}, row {row + 1:,} does not unpack ({one_line(e)[:120]}); get it "
                             "again") from e

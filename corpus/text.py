"""Readers: the sources of prepare.py, whose docstring names them -> documents (str).

Packed files are known by their first bytes, records of another name by their first words. What cannot be read
is a ValueError with its file and row.
"""
import contextlib
import gzip
import importlib
import io
import itertools
import json
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from interface.terminal import warn

# A document of a text file: 4,000 characters, so few that a small text has both splits, and on to a blank
# line that comes soon, or to the end of the line, or to that of the text
PIECE = re.compile(r"(?s).{4000}.{0,3998}?\n\n|.{4000}[^\n]*\n|.+")
GZIP = b"\x1f\x8b"  # the first bytes of such a file
ZSTD = b"\x28\xb5\x2f\xfd"
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


def list_files(source, key):
    """Return the Files of one source, a path or a name on the hub, in order. key: --text-key."""
    names = [source]
    paths = names
    if source in HUB or source.startswith("hf:"):
        datasets = require("datasets", f"the data set {source}")
        repo, _, pattern = source.removeprefix("hf:").partition("::")
        repo, pattern = HUB.get(source, (repo, pattern or "**"))
        builder = datasets.load_dataset_builder(repo, data_files={"train": pattern})
        names = list(builder.config.data_files["train"])  # in the repository
        paths = datasets.DownloadManager().download(names)
    elif not Path(source).is_file():
        raise FileNotFoundError(f"{source} is not a file; give stdlib, files, or one of {', '.join(HUB)}")
    return [File(kind_of(name, path, key), str(path)) for name, path in zip(names, paths, strict=True)]


def kind_of(name, path, key):
    """Return how a file is read. name: what it was called before it came into a cache."""
    name = str(name).lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".jsonl"):
        return "records"
    with open_bytes(path) as f:
        lines = filter(bytes.strip, f)
        first = next(lines, b"").strip().removeprefix(b"\xef\xbb\xbf")
        second = next(lines, b"").strip()
    if kind_of_line(first, key) == "records":
        return "records"
    is_json = re.match(rb'\[?\s*\{\s*("|$)|\[$', first)
    is_foreign = is_json or kind_of_line(first, key) == "table" or name.endswith((".json", ".csv", ".tsv"))
    if is_foreign and not name.endswith(".txt"):
        raise ValueError(f"{path} would be trained on with its brackets or separators; write a JSON object "
                         f"per line (jq -c '.[]'), its text under --text-key {key}, or name it .txt")
    if is_foreign or kind_of_line(second, key) != "text":
        warn(f"{path} has JSON, records or a table, whose signs are trained on as well")
    return "text"


def kind_of_line(line, key):
    """Return what a line begins, by its keys: records, a table or text."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        if {key, "messages"} & json.loads(line).keys():
            return "records"
    fields = re.split(rb'"?(?:[,\t]|[;|](?! ))"?', line.strip(b'"'))
    return "table" if len(fields) > 1 and key.encode() in fields else "text"


@contextlib.contextmanager
def open_bytes(path):
    """Open a file to be read, unpacked as its first bytes say. ValueError: a .gz that was cut or damaged."""
    with open(path, "rb") as f:
        if f.peek(4).startswith(GZIP):
            f = gzip.open(f)
        elif f.peek(4).startswith(ZSTD):
            f = io.BufferedReader(require("pyarrow", path).input_stream(path, compression="zstd"))
        try:
            yield f
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise ValueError(f"{path}: {e}") from None


def documents(files, key, split_at=""):
    """Yield the documents of Files, none of them empty. split_at: what ends one in a text, or ""."""
    for file in files:
        for text in texts(file, key):
            if split_at:
                yield from filter(str.strip, text.split(split_at))
            elif file.kind == "text":
                yield from (piece[0] for piece in PIECE.finditer(text))
            elif text:
                yield text


def texts(file, key):
    """Yield the text of a File, or those of its records. ValueError: it cannot be read."""
    if file.kind in ("records", "parquet"):
        rows = json_lines(file.path) if file.kind == "records" else parquet_rows(file.path, key)
        for where, record in rows:
            if not isinstance(record.get(key), str):
                raise ValueError(f"{where} has no text under {key!r}, it has {', '.join(record)[:200]}; mend "
                                 "it, or say by --text-key where the text is")
            yield record[key]
    else:
        try:
            with open_bytes(file.path) as f:
                text = f.read().decode("utf-8-sig")
            if file.kind == "text" and "\0" in text:
                raise ValueError(f"{file.path} holds zeros, and no text does; unpack it, or use iconv")
            yield text
        except UnicodeDecodeError as e:
            if file.kind == "text":
                raise ValueError(f"{file.path} is not utf-8 ({e}); convert it with iconv") from None
            warn(f"{file.path} is not utf-8 at byte {e.start}: it is left out")  # it tests Python's decoders


def json_lines(path):
    """Yield (its file and row, the JSON object) of each line that is not blank. ValueError: it is none."""
    with open_bytes(path) as f:
        for row, line in enumerate(f, 1):
            record = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict):
                yield f"{path}, row {row:,}", record
            elif not line.isspace():
                raise ValueError(f"{path}, row {row:,} is no JSON object; mend it or leave it out")


def parquet_rows(path, key):
    """Yield (its file and row, {key: value}) of each row; where the key is no column, all columns."""
    parquet = require("pyarrow.parquet", path)
    with parquet.ParquetFile(path) as f:
        columns = [key] if key in f.schema_arrow.names else None
        batches = (batch.to_pylist() for batch in f.iter_batches(256, columns=columns))
        for row, record in enumerate(itertools.chain.from_iterable(batches), 1):
            yield f"{path}, row {row:,}", record

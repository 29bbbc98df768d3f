"""Files that are whole, JSON that is checked, and OUT, the directory of a run, in which one run works."""
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import time
import typing
from pathlib import Path

from interface.terminal import say, warn

LOCK_WAIT = 60.0  # seconds that --resume auto waits for a run that is just leaving


def write_whole(path, content):
    """Write a small file, str or bytes, so that a reader finds all of it."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(out, only=""):
    """Give the new folder OUT.tmp to write into. At the end it, or the file `only` in it, becomes `out`."""
    out = out.resolve()
    folder = out.with_name(f"{out.name}.tmp")
    if folder.exists():
        raise ValueError(f"{folder} is there: another command writes it, or one was killed: then delete it")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in [*folder.rglob("*"), folder]:
            sync(path)
        os.rename(folder / only, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_folder(folder, names):
    """Delete the files in a folder whose names match a pattern, and the folder, if it is empty then."""
    for path in Path(folder).iterdir():
        ours = names.fullmatch(path.name) or re.fullmatch(r"\..+\.[0-9a-f]{8}\.part", path.name)
        if ours and path.is_file():
            path.unlink()
    if not os.listdir(folder):
        os.rmdir(folder)


def set_aside(path, name, how=os.rename):
    """Rename a file or a folder to `name`, or that with a number if it is taken. Return the new path."""
    new = path.with_name(name)
    number = 0
    while os.path.lexists(new):
        number += 1
        new = path.with_name(f"{name}.{number}")
    how(path, new)
    return new


@contextlib.contextmanager
def best_effort(what, errors=OSError):
    """Run the body. If it fails, one line says so, and the run goes on without what it writes."""
    try:
        yield
    except errors as e:
        warn(f"{what}: {e}; going on without it")


# JSON, which may be cut, or of another program

def load_json(path):
    """Return what a UTF-8 JSON file holds. ValueError: it is no JSON; the line names it."""
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} holds no sound JSON: {e}") from None


def check_schema(value, schema, where, name="the content"):
    """Raise ValueError, one line that starts with `where`, unless a value from JSON is as the schema says.

    schema: a type, a union or a Literal, [schema] for each element, or {key: schema}, where "key?" may be
    missing; other keys are free.
    """
    if typing.get_origin(schema) is tuple:  # of a flag with several values
        schema = [typing.get_args(schema)[0]]
    choices = typing.get_args(schema) or (schema,)
    if isinstance(schema, (dict, list)):
        choices = (type(schema),)
    if not any(is_a(value, choice) for choice in choices):
        wanted = " or ".join(getattr(choice, "__name__", str(choice)) for choice in choices)
        raise ValueError(f"{where}: {name} is {repr(value)[:60]}, not {wanted}")
    if isinstance(schema, list):
        for element in value:
            check_schema(element, schema[0], where, f"an element of {name}")
    if isinstance(schema, dict):
        for key, inner in schema.items():
            asked = key.removesuffix("?")
            if asked in value:
                check_schema(value[asked], inner, where, asked)
            elif asked == key:
                raise ValueError(f"{where}: {name} lacks {key}")


def is_a(value, kind):
    """Whether a value is of a type, or equal to a choice: true is no number, 1 is a finite number."""
    if not isinstance(kind, type):
        return value == kind
    if kind in (int, float):
        return type(value) in (int, kind) and -math.inf < value < math.inf
    return isinstance(value, kind)


# The lock: a flock on OUT/.lock. The kernel ends it with the process. Rank 0 takes it for all ranks.

_held = None  # the open file that this process has locked


def lock(out, wait=0.0):
    """Claim OUT for this process until unlock(). ValueError: another run works there after `wait` seconds."""
    global _held
    folder = out.resolve()  # a link may lead to a folder that comes later
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")
    except OSError as e:
        raise ValueError(f"--out {out}: {e.strerror}; give a folder that can be written") from None
    until = time.monotonic() + wait
    if wait and in_use(out):
        say(f"{out} is in use by another run: waiting up to {wait:.0f} s")
    while in_use(out) and time.monotonic() < until:
        time.sleep(0.1)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{out} is in use by another run; stop it, or give another --out") from None
    except OSError as e:
        warn(f"{out}: the disk has no file locks ({e.strerror}); start no second run in this folder")
    _held = file


def in_use(out):
    """Whether a run has locked OUT."""
    try:
        with open(Path(out) / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as e:
        return isinstance(e, BlockingIOError)
    return False


def unlock():
    """Give back what lock() took, if anything. A directory that nothing came into goes, too."""
    global _held
    if _held is None:
        return
    folder = Path(_held.name).parent
    with contextlib.suppress(OSError):  # somebody renamed or removed it
        if os.listdir(folder) == [".lock"]:
            shutil.rmtree(folder)
    _held.close()
    _held = None


# Rows

def sound_rows(path):
    """Return the rows of a .jsonl file, without lines that are none. A missing file has no rows."""
    rows = []
    text = Path(path).read_text(errors="replace") if Path(path).exists() else ""
    for line in filter(None, text.split("\n")):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            range(row["step"])  # an integer
            rows.append(row)
    return rows


class Rows:
    """Appends rows to a .jsonl file, of which those up to the step `until` stay. create: make it at once."""
    is_full = False  # the disk: one of the files says so, once

    def __init__(self, path, until, create=False):
        self.path = Path(path)
        self.waiting = b""  # rows that could not be written yet
        Rows.is_full = False
        if create or self.path.exists():
            kept = [json.dumps(row) + "\n" for row in sound_rows(path) if row["step"] <= until]
            write_whole(self.path, "".join(kept))

    def add(self, row):
        self.waiting += (json.dumps(row) + "\n").encode()
        try:
            self._write()
        except OSError as e:
            if not Rows.is_full:
                warn(f"{self.path}: {e}; rows wait in memory")
            Rows.is_full = True

    def _write(self):
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            if file.write(self.waiting) < len(self.waiting):  # the disk is full
                file.truncate(size)  # no part of a row stays
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.waiting = b""  # closed, which NFS may refuse, too

    def close(self):
        with best_effort(f"{self.path} is not complete"):
            if self.waiting:
                self._write()

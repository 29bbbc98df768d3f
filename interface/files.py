"""Files that are whole, JSON that is checked, and OUT, the directory of a run, in which one run works.

    write_whole     write a small file so that a reader finds all of it; new_part: a large one
    load_json       what a file of JSON holds; check_schema: whether it is as it should be
    Rows            appends rows to a .jsonl file; those that a full disk does not take wait in memory
    sound_rows      the rows of such a file, without the lines that a kill damaged
    lock, unlock    claim OUT for this process
    set_aside       rename what is in the way; move_aside: OUT, by what the run in it was
"""
import contextlib
import errno
import fcntl
import json
import os
import re
import reprlib
import secrets
import shutil
import socket
import sys
import time
import typing
from pathlib import Path
from typing import Literal, NamedTuple

from interface.terminal import say, warn

PART = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # the names of new_part()
LOCK_WAIT = 60.0  # seconds that --resume auto waits for a run that is just leaving
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


# -----------------------------------------------------------------------------
# Whole files

def write_whole(path, content):
    """Write a small file, str or bytes, under another name and rename it."""
    with new_part(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(part)


@contextlib.contextmanager
def new_part(path):
    """Yield the path of a new, empty file beside `path`, whose name it gets if the body succeeds.

    A reader finds all of it, or the file as it was before.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    part.touch(exist_ok=False)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def whole_folder(out, only=""):
    """Give the folder OUT.tmp to write into. At the end it, or the file `only` in it, is renamed to `out`.

    After an error nothing stays. If the process is killed, OUT.tmp stays.
    ValueError: OUT.tmp is there already.
    """
    out = out.resolve()
    folder = out.with_name(f"{out.name}.tmp")
    if folder.exists():
        raise ValueError(f"{folder} is there: another command writes it, or one was killed; in that case "
                         "delete it, or give another --out")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in [*folder.rglob("*"), folder]:
            sync(path)
        os.rename(folder / only, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(out.parent)


def remove_folder(folder, names):
    """Delete the files in a folder whose names match a pattern, and then the folder, if it is empty."""
    with contextlib.suppress(FileNotFoundError):
        for path in Path(folder).iterdir():
            if path.is_file() and (names.fullmatch(path.name) or PART.fullmatch(path.name)):
                path.unlink()
        try:
            os.rmdir(folder)
        except OSError as e:
            warn(f"{folder} stays: {e.strerror}")


def remove_parts(folder):
    """Remove the files that new_part() made and that a killed process left."""
    for path in Path(folder).glob(".*.part"):
        if PART.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def sync(path):
    """Wait until the file or directory is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def best_effort(what, errors=OSError):
    """Run the body. If a disk is full or a directory is missing, the run goes on without what is written."""
    try:
        yield
    except errors as e:
        warn(f"{what}: {e}; going on without it")


@contextlib.contextmanager
def must_write(path, flag="--out", reads=False):
    """Let an OSError of the body say that the path cannot be written, and what to do.

    reads: the body reads other files, too, so that only a full or read-only disk is meant.
    """
    try:
        yield
    except OSError as e:
        is_ours = e.errno is None  # an error of ours says what to do
        if is_ours or reads and e.errno not in NO_ROOM:
            raise
        room = "free space there, or " if e.errno in NO_ROOM else ""
        raise OSError(f"{path} cannot be written: {e}; {room}give another {flag}") from None


# -----------------------------------------------------------------------------
# JSON, read and checked: it may be cut, or of another program

KINDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", list: "a list",
         dict: "an object", type(None): "null"}


class Range(NamedTuple):
    """For check_schema: a number from low to high; a whole one where both are whole."""
    low: float = 0
    high: float = 2**63 - 1


def load_json(path):
    """Return what a UTF-8 JSON file holds. ValueError: it is no JSON; the line names it."""
    data = Path(path).read_bytes()
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} holds no sound JSON: {e}") from None


def check_schema(value, schema, where, path=""):
    """Raise ValueError, one line that starts with `where`, unless a value from JSON is as the schema says.

    A schema is
        a type, or a tuple of types    a value of one of them; float takes an int, too
        a Range                        a number
        a Literal                      one of its values
        {key: schema}                  an object: "key?" may be missing, "*" is every key, others are free
        [schema]                       a list
        a predicate                    what its docstring says
    """
    def refuse(text):
        raise ValueError(f"{where}: {path.removeprefix('.') or 'the content'} {text}")

    wanted = unlike(value, schema)
    if wanted:
        refuse(f"is {reprlib.repr(value)[:60]}, not {wanted}")
    if isinstance(schema, list):
        for i, element in enumerate(value):
            check_schema(element, schema[0], where, f"{path}[{i}]")
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            name = key.removesuffix("?")
            if name == key != "*" and name not in value:
                refuse(f"lacks {name}")
            for found in value if key == "*" else [name]:
                if found in value:
                    check_schema(value[found], inner, where, f"{path}.{found}")


def unlike(value, schema):
    """Return what a value should be, or "" if it is that, but for what is inside a list or an object."""
    if isinstance(schema, (dict, list)):
        schema = type(schema)
    if isinstance(schema, type):
        schema = (schema,)
    if isinstance(schema, Range):
        kind = type(schema.low) if type(schema.low) is type(schema.high) else float
        is_right = is_a(value, kind) and schema.low <= value <= schema.high
        wanted = f"{KINDS[kind]} from {schema.low} to {schema.high}"
    elif isinstance(schema, tuple):
        is_right = any(is_a(value, kind) for kind in schema)
        wanted = " or ".join(KINDS[kind] for kind in schema)
    elif typing.get_origin(schema) is Literal:
        choices = typing.get_args(schema)
        is_right = value in choices
        wanted = f"one of {', '.join(map(str, choices))}"
    else:
        is_right = schema(value)
        wanted = schema.__doc__
    return "" if is_right else wanted


def is_a(value, kind):
    """Whether a value is of a type of KINDS: true is no number, 1 is a finite number, 1e400 is none."""
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


# -----------------------------------------------------------------------------
# What is in the way is renamed

def set_aside(path, name):
    """Rename a file or a folder to `name`, or that with a number if it is taken. Return the new path."""
    new = free_name(path.with_name(name))
    os.rename(path, new)
    return new


def free_name(path):
    """Return a path, with a number behind it if it is taken."""
    new = path
    number = 0
    while os.path.lexists(new):
        number += 1
        new = path.with_name(f"{path.name}.{number}")
    return new


def move_aside(out):
    """Rename the directory of a run, and return its new name, NAME.DATE_TIME_stepN. A lock stays on OUT.

    It says when the run last wrote a row, and of which step. Where OUT is a symbolic link, the folder that it
    leads to gets the new name, and the link stays: the next run goes to the same disk.
    """
    out = out.resolve()
    metrics = out / "metrics.jsonl"
    last_file = metrics if metrics.exists() else out
    when = time.strftime("%Y-%m-%d_%H%M", time.localtime(last_file.stat().st_mtime))
    step = max((row["step"] for row in sound_rows(metrics)[0]), default=0)
    new = set_aside(out, f"{out.name}.{when}_step{step}")
    if _held is not None:
        lock(out)
    return new


def copy_rows(out):
    """Copy the rows of a run as NAME.jsonl.aside: the next run removes some. Return the names."""
    names = []
    for name in ("metrics.jsonl", "experts.jsonl", "notes.jsonl"):
        if (out / name).exists():
            new = shutil.copy2(out / name, free_name(out / f"{name}.aside"))
            names.append(new.name)
    return names


# -----------------------------------------------------------------------------
# The lock: a flock on OUT/.lock. The kernel ends it with the process. Rank 0 takes it for all ranks.

_held = None  # the open file that this process has locked
_made = None  # the directory that lock() made, if it did


def lock(out, wait=0.0):
    """Claim OUT, which is made if it is not there, for this process until unlock().

    wait: seconds that another run has to leave.
    ValueError: another run works in OUT. OSError: it cannot be written.
    """
    global _held, _made
    folder = out.resolve()
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _made = folder
    file = open(folder / ".lock", "a+")
    until = time.monotonic() + wait
    if wait and in_use(out):
        say(f"{out} is in use by {in_use(out)}: waiting up to {wait:.0f} s for it to leave")
    while not is_taken(file, folder):
        if time.monotonic() >= until:
            raise ValueError(f"{out} is in use by {in_use(out) or 'another run'}; wait for it, stop it, "
                             "or give another --out")
        time.sleep(0.1)
    if _held is not None:  # of a directory that has another name now
        _held.close()
    _held = file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")
    file.flush()


def is_taken(file, folder):
    """Lock the file .lock of a folder, and return True; False: another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        warn(f"{folder} has no file locks ({e.strerror}): start no second run in it")
    return True


def in_use(out):
    """Return in words who has locked OUT, or ""."""
    with contextlib.suppress(OSError), open(Path(out) / ".lock", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200) or "another run"
    return ""


def unlock():
    """Give back what lock() took, if anything. A directory that it made goes too, if nothing else came."""
    global _held, _made
    if _held is not None:
        if _made is not None and os.listdir(_made) == [".lock"]:
            (_made / ".lock").unlink()
            _made.rmdir()
        with contextlib.suppress(OSError):  # a full disk
            _held.close()
    _held = _made = None


# -----------------------------------------------------------------------------
# Rows

def sound_rows(path):
    """Return (the rows of a .jsonl file, how many of its lines are none).

    A row is an object with its step; a missing file has no rows.
    """
    rows = []
    damaged = 0
    text = Path(path).read_bytes() if Path(path).exists() else b""
    for line in text.split(b"\n"):
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line.decode())
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif line:
            damaged += 1
    return rows, damaged


class Rows:
    """Appends rows to the .jsonl file at path.

    An earlier part's rows stay up to the step `until`; later ones will be written again.
    create: make the file, also where there is no row yet.
    """
    is_full = False  # the disk: one of the files says so, once

    def __init__(self, path, until, create=False):
        self.path = Path(path)
        self.waiting = b""  # rows that could not be written yet
        Rows.is_full = False
        rows, damaged = sound_rows(path)
        rows = [row for row in rows if row["step"] <= until]
        if damaged and until >= 0:
            last = f"the last sound row is that of step {rows[-1]['step']}" if rows else "no row is sound"
            warn(f"{path}: {damaged} damaged line(s) removed; {last}")
        if create or self.path.exists():
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def add(self, row):
        """Append a row. If it cannot be written now, it waits in memory."""
        self.waiting += (json.dumps(row) + "\n").encode()
        try:
            self._write()
        except OSError as e:
            if not Rows.is_full:
                warn(f"{self.path}: {e}; rows wait in memory")
            Rows.is_full = True

    def _write(self):
        """Append the rows that wait, all of them or none. OSError: the disk is full."""
        with open(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                if file.write(self.waiting) < len(self.waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # no part of a row stays
                raise
        self.waiting = b""

    def close(self):
        """Try once more to write the rows that wait. Those for which there is no room go to stderr."""
        try:
            if self.waiting:
                self._write()
        except OSError as e:
            warn(f"{self.path} is not complete: {e}; its last rows:")
            print(self.waiting.decode(), end="", file=sys.stderr, flush=True)

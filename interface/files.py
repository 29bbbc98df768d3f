"""The directory of a run, OUT: one run at a time works in it, and a torn line in its files ends no later run.

    write_whole     write a small file so that a reader finds all of it
    lock, unlock    claim OUT for this process, by a lock on a file next to it; read_holder: who has it
    move_aside      rename OUT by what the run in it was
    sound_rows      the rows of a .jsonl file, without the lines that a kill or a full disk damaged
    Rows            appends rows to such a file; those that cannot be written wait in memory
"""
import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import textwrap
import time
from pathlib import Path

from interface.command_line import one_line

LOCK_WAIT = 60.0  # seconds that --resume auto waits for a run that is just leaving


def warn(text):
    """Print one line on stderr, whatever the text contains."""
    print(f"nanoshard: {one_line(text)}", file=sys.stderr, flush=True)


def folded(text):
    """Return text as lines of at most 100 columns; a longer word, such as a path, gets a line of its own."""
    return textwrap.fill(text, 100, subsequent_indent=6 * " ", break_long_words=False, break_on_hyphens=False)


def write_whole(path, text):
    """Write a small text file under another name and rename it.

    A reader finds all of it, or the file as it was before.
    """
    part = path.with_suffix(".part")
    part.write_text(text)
    sync(part)
    os.replace(part, path)


def sync(path):
    """Wait until the file or directory is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


@contextlib.contextmanager
def must_write(path, flag="--out", reads=False):
    """Let an OSError of the body say that the path cannot be written, and what to do.

    reads: the body reads other files, too, so that only a full or read-only disk is meant.
    """
    try:
        yield
    except OSError as e:
        if reads and e.errno not in NO_ROOM:
            raise
        raise OSError(f"{path} cannot be written: {e}; free space there, or give another {flag}") from None


def move_aside(out):
    """Rename the directory of a run, and return its new name, NAME.DATE_TIME_stepN.

    It says when the run last wrote a row, and of which step.
    """
    metrics = out / "metrics.jsonl"
    last_file = metrics if metrics.exists() else out
    when = time.strftime("%Y-%m-%d_%H%M", time.localtime(last_file.stat().st_mtime))
    step = max((row["step"] for row in sound_rows(metrics)[0]), default=0)
    name = f"{out.name}.{when}_step{step}"
    new = out.with_name(name)
    number = 1
    while new.exists():
        number += 1
        new = out.with_name(f"{name}.{number}")
    os.rename(out, new)
    return new


# -----------------------------------------------------------------------------
# The lock

# It is a flock on OUT's sibling .NAME.lock, so that renaming OUT does not carry it away. Rank 0 takes it for
# all ranks; the kernel ends it with the process. Programs that only read OUT never take it.

_held = {}  # {file descriptor: path}: the locks of this process


def _forget():
    """Close the locks' files in a forked child: it shares them, and the locks must not outlive the parent."""
    while _held:
        fd, _ = _held.popitem()
        os.close(fd)


os.register_at_fork(after_in_child=_forget)


def lock(out, wait=0.0):
    """Claim OUT for this process until unlock().

    wait: seconds that another run has to leave.
    ValueError: another run works in OUT. OSError: the lock file cannot be written.
    """
    until = time.monotonic() + wait
    waits = False
    for path in _lock_files(Path(out)):
        while (holder := _claim(path)) is not None:
            if time.monotonic() >= until:
                raise ValueError(f"{out} is in use by {holder}; wait for that run, stop it, or give another "
                                 "--out")
            if not waits:
                waits = True
                print(f"{out} is in use by {holder}: waiting up to {wait:.0f} s for it to leave", flush=True)
            time.sleep(0.1)


def unlock():
    """Give back what lock() took, if anything."""
    while _held:
        fd, path = _held.popitem()
        with contextlib.suppress(OSError):
            if _is_at(path, os.fstat(fd)):
                # The file goes before the lock ends: who has just opened it sees that it lost its name.
                path.unlink()
        os.close(fd)


def _lock_files(out):
    """Return the lock file next to OUT and, where OUT is a symbolic link, also the one next to its target."""
    real = out.resolve()
    named = real if out.name in ("", "..") else out.parent.resolve() / out.name
    found = set()
    for path in (real, named):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK | os.X_OK):
            found.add(path.with_name(f".{path.name}.lock"))
        else:  # where the parent takes no file, nobody can rename OUT either: then the lock may lie in it
            found.add(path / ".lock")
    return sorted(found)


def _claim(path):
    """Lock the file at path for this process. Return None, or in words who has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_EXCL, 0o666)
        is_new = True
    except FileExistsError:
        fd = os.open(path, flags)
        is_new = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        holder, is_gone = read_holder(fd)
        if isinstance(e, BlockingIOError):  # the file system has locks, and another process holds this one
            os.close(fd)
            return holder
        if not (is_new or is_gone):
            os.close(fd)
            return f"{holder} (if that run has ended, delete {path})"
        warn(f"{path.parent} has no file locks ({e.strerror}): while {path} exists, no other run of this "
             f"--out starts")
    if not _is_at(path, os.fstat(fd)):  # its holder left and deleted it between our two calls
        os.close(fd)
        return _claim(path)
    _held[fd] = path
    me = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(me).encode(), 0)
    return None


def _is_at(path, stat):
    """Whether the open file with this stat still has this name."""
    try:
        return os.path.samestat(os.stat(path), stat)
    except FileNotFoundError:
        return False


def read_holder(fd):
    """Return (in words who wrote the lock file, whether that was a process of this host which has ended)."""
    try:
        said = json.loads(os.pread(fd, 4096, 0))
        host = str(said["host"])
        pid = int(said["pid"])
        since = str(said["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # it is being written
        return "another process", False
    is_gone = host == socket.gethostname() and has_ended(pid)
    return f"process {pid} on {ascii(host)[1:-1]} since {ascii(since)[1:-1]}", is_gone


def has_ended(pid):
    """Whether this host has no process of this number."""
    try:
        os.kill(pid, 0)  # sends no signal: asks whether the process exists
    except PermissionError:  # another user's process
        return False
    except (OSError, OverflowError):
        return True
    return False


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

    def __init__(self, path, until, create=False):
        self.path = Path(path)
        self.file = None  # open for appending, and its stat; None until there is something to write
        self.stat = None
        self.waiting = b""  # what could not be written yet
        rows, damaged = sound_rows(path)
        rows = [row for row in rows if row["step"] <= until]
        if damaged and until >= 0:
            last = f"the last sound row is that of step {rows[-1]['step']}" if rows else "no row is sound"
            warn(f"{path}: {damaged} damaged line(s) removed; {last}")
        if create or self.path.exists():
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))
            self.open()

    def open(self):
        """Open the file for appending, and its directory if that is gone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)
        self.stat = os.stat(self.path)

    def is_lost(self):
        """Whether somebody removed or renamed the file while it is open."""
        return self.file is not None and not _is_at(self.path, self.stat)

    def add(self, row):
        """Append a row, and those that wait. If it cannot be written now, it waits in memory."""
        self.waiting += (json.dumps(row) + "\n").encode()
        try:
            lost = self.is_lost()
            if lost or self.file is None:
                self.open()
            if lost:
                warn(f"{self.path} was removed or renamed: its rows are gone from there, a new one begins")
            # The file is unbuffered: bytes that were not written stay here and go with the next row.
            while self.waiting:
                written = self.file.write(self.waiting)
                self.waiting = self.waiting[written:]
        except OSError as e:
            warn(f"{self.path}: {e}; its rows wait in memory")

    def close(self):
        """Close the file. If somebody removed it, say so."""
        if self.is_lost():
            warn(f"{self.path} was removed or renamed: its rows are gone from there")
        if self.file is not None:
            self.file.close()

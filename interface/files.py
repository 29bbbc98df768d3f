"""The directory of a run, OUT: one run at a time works in it, and what is in it is whole.

    write_whole     write a small file so that a reader finds all of it; new_part: a large one
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
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path

from interface.command_line import one_line
from interface.terminal import complain, say

PART = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # the names of new_part()
LOCK_WAIT = 60.0  # seconds that --resume auto waits for a run that is just leaving


def warn(text):
    """Print one line on stderr, whatever the text contains."""
    complain(f"nanoshard: {one_line(text)}")


@contextlib.contextmanager
def best_effort(what, errors=OSError):
    """Run the body. If a disk is full or a directory is missing, the run goes on without what is written."""
    try:
        yield
    except errors as e:
        warn(f"{what}: {e}; going on without it")


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


def remove_folder(folder, names):
    """Delete the files in a folder whose names match, and then the folder, if it is empty.

    Other files stay, the folder with them, and one line says so. names: a compiled pattern of the names that
    our programs write there.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in Path(folder).iterdir():
            if names.fullmatch(path.name) or PART.fullmatch(path.name):
                with contextlib.suppress(OSError):  # a folder of this name is not ours
                    path.unlink()
        try:
            os.rmdir(folder)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            warn(f"{folder} stays: it holds files that no program of ours wrote; move them away")


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
def whole_folder(out, only=""):
    """Give the folder OUT.tmp to write into. At the end it, or the file `only` in it, is renamed to `out`.

    After an error nothing stays. If the process is killed, OUT.tmp stays.
    ValueError: OUT.tmp is there already.
    """
    out = out.resolve()
    folder = out.with_name(f"{out.name}.tmp")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"{folder} is there: another command writes it, or one was killed; in that case "
                         "delete it, or give another --out") from None
    try:
        yield folder
        for path in [*folder.rglob("*"), folder]:
            sync(path)
        os.rename(folder / only, out)
        if only:
            folder.rmdir()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync(out.parent)


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# How a fix begins, by the number of the error that keeps something from being written
ROOM = {errno.ENOSPC: "free space there, or ", errno.EDQUOT: "free space there, or ",
        errno.EFBIG: "raise the limit of a file's size (ulimit -f), or ",
        errno.ENOENT: "make its folder, or "}


@contextlib.contextmanager
def must_write(path, flag="--out", reads=False, left=None):
    """Let an OSError of the body say that the path cannot be written, and what to do.

    reads: the body reads other files, too, so that only a full or read-only disk is meant.
    left: a folder with what is done so far, where the same command goes on.
    """
    try:
        yield
    except OSError as e:
        # None: one of ours, which says what to do. one_line() says it of a name that is too long.
        if e.errno in (None, errno.ENAMETOOLONG) or reads and e.errno not in NO_ROOM:
            raise
        stays = ""
        if left is not None and left.exists():
            stays = f"; the same command goes on from {left}"
        fix = f"{ROOM.get(e.errno, '')}give another {flag}"
        raise OSError(f"{path} cannot be written: {e}; {fix}{stays}") from None


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
    if out.is_symlink() or out.name == "..":
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
    """Copy the rows of a run, NAME.jsonl, as NAME.jsonl.aside. Return the new names.

    So the curve of the checkpoints that are moved aside stays, which the run that goes on removes.
    """
    names = []
    for name in ("metrics.jsonl", "experts.jsonl", "notes.jsonl"):
        if (out / name).exists():
            new = free_name(out / f"{name}.aside")
            write_whole(new, (out / name).read_bytes())
            names.append(new.name)
    return names


# -----------------------------------------------------------------------------
# The lock: a flock on OUT/.lock. The kernel ends it with the process. Rank 0 takes it for all ranks.

_held = None  # the open file that this process has locked
_made = None  # the directory that lock() made, if it did


def lock(out, wait=0.0):
    """Claim OUT for this process until unlock(). OUT is made if it is not there.

    wait: seconds that another run has to leave.
    ValueError: another run works in OUT, or a foreign file stands where the lock goes. OSError: it cannot be
        written.
    """
    global _held, _made
    path = out.resolve() / ".lock"
    until = time.monotonic() + wait
    file = _try(path)
    if file is None and wait:
        say(f"{out} is in use by {in_use(out)}: waiting up to {wait:.0f} s for it to leave")
    while file is None:
        if time.monotonic() >= until:
            raise ValueError(f"{out} is in use by {in_use(out) or 'another run'}; wait for it, stop it, "
                             "or give another --out")
        time.sleep(0.1)
        file = _try(path)
    if _held is not None:  # of a directory that has another name now
        _held.close()
    _held = file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}".encode())


def _try(path):
    """Return the lock file, open and locked by this process; None: another process has it."""
    global _made
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
        _made = path.parent
    file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "ab+", 0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as e:
        warn(f"{path.parent} has no file locks ({e.strerror}): start no second run in it")
    file.seek(0)
    written = file.read(200)
    if written and not written.startswith((b"process ", b'{"host"', b"\0")):  # also one of an older version
        raise ValueError(f"{path} is where the lock of a run goes, and was not written by one; move it away, "
                         "or give another --out")
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        file.close()  # its holder has just removed it, in unlock()
        return _try(path)
    return file


def in_use(out):
    """Return in words who has locked OUT, or ""."""
    path = Path(out) / ".lock"
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return one_line(path.read_text(errors="replace")[:200]) or "another run"
    except OSError:  # there is no such file, or there are no locks
        pass
    return ""


def unlock():
    """Give back what lock() took, if anything. A directory that it made goes too, if nothing else came."""
    global _held, _made
    if _held is not None:
        with contextlib.suppress(OSError):
            if _made is not None and os.listdir(_made) == [".lock"]:
                (_made / ".lock").unlink()
                _made.rmdir()
        _held.close()
    _held = _made = None


def _forget():
    """Close the lock's file in a forked child: it shares the lock, which must not outlive the parent."""
    global _made
    _made = None
    unlock()


os.register_at_fork(after_in_child=_forget)


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
        self.waiting = b""  # rows that could not be written yet
        rows, damaged = sound_rows(path)
        rows = [row for row in rows if row["step"] <= until]
        if damaged and until >= 0:
            last = f"the last sound row is that of step {rows[-1]['step']}" if rows else "no row is sound"
            warn(f"{path}: {damaged} damaged line(s) removed; {last}")
        if create or self.path.exists():
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def add(self, row):
        """Append a row. If it cannot be written now, it waits in memory.

        TypeError: a value is no number, text, list or dict, for example a tensor.
        """
        for key, value in row.items():
            if not isinstance(value, (bool, int, float, str, list, dict, type(None))):
                raise TypeError(f"{self.path.name}: {key} is a {type(value).__name__}; give a number, as "
                                "tensor.item() is")
        is_first = not self.waiting
        self.waiting += (json.dumps(row) + "\n").encode()
        try:
            self._write()
        except OSError as e:
            if is_first:
                warn(f"{self.path}: {e}; its rows wait in memory")

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

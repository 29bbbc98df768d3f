"""The directory of a run, OUT: one run at a time works in it, and a torn line in its files ends no later run.

    write_whole     write a small file so that a reader finds all of it
    lock, unlock    claim OUT for this process, by locks on files next to it and in it; read_holder: its owner
    move_aside      rename OUT by what the run in it was
    sound_rows      the rows of a .jsonl file, without the lines that a kill or a full disk damaged
    Rows            appends rows to such a file; those that cannot be written wait in memory
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
import stat
import time
from pathlib import Path

from interface.command_line import one_line
from interface.schema import read_file
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


def write_whole(path, content):
    """Write a small file, str or bytes, under another name and rename it.

    A reader finds all of it, or the file as it was before. Other names of the old file, such as a hard link
    in a backup, keep the old content.
    """
    with new_part(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(part)


@contextlib.contextmanager
def new_part(path):
    """Yield the path of a new, empty file beside `path`, whose name it gets if the body succeeds.

    Its own name is random and is made here: nothing that lay there before is written to, or through.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
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


def move_aside(out):
    """Rename the directory of a run, and return its new name, NAME.DATE_TIME_stepN.

    It says when the run last wrote a row, and of which step. Where OUT is a symbolic link, the folder that it
    leads to gets the new name, and the link stays: the next run goes to the same disk.
    """
    named = out
    if out.is_symlink() or out.name == "..":
        out = out.resolve()
    metrics = out / "metrics.jsonl"
    last_file = metrics if metrics.exists() else out
    when = time.strftime("%Y-%m-%d_%H%M", time.localtime(last_file.stat().st_mtime))
    step = max((row["step"] for row in sound_rows(metrics)[0]), default=0)
    name = f"{out.name}.{when}_step{step}"
    try:
        new = set_aside(out, name)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        raise ValueError(f"--out {named} holds another run and is a mount point, which cannot be renamed; "
                         "give another --out, or --resume auto to go on") from None
    hold_inside(out, new)
    return new


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


def copy_rows(out):
    """Copy the rows of a run, NAME.jsonl, as NAME.jsonl.aside. Return the new names.

    So the curve of the checkpoints that are moved aside stays, which the run that goes on removes.
    """
    names = []
    for name in ("metrics.jsonl", "experts.jsonl", "notes.jsonl"):
        if not (out / name).exists():
            continue
        new = free_name(out / f"{name}.aside")
        write_whole(new, read_file(out / name))
        names.append(new.name)
    return names


# -----------------------------------------------------------------------------
# The lock

# Each lock is a flock on a small file. OUT's sibling .NAME.lock stays where it is when OUT is renamed.
# OUT/.lock is seen by all containers that mount OUT itself: each of them sees other siblings. Rank 0 takes
# both for all ranks; the kernel ends them with the process. Programs that only read OUT never take them.

_held = {}  # {file descriptor: path}: the locks of this process
_made = []  # directories that lock() made
_start = None  # lock()'s start


def _forget():
    """Close the locks' files in a forked child: it shares them, and the locks must not outlive the parent."""
    _made.clear()
    while _held:
        fd, _ = _held.popitem()
        os.close(fd)


os.register_at_fork(after_in_child=_forget)


def lock(out, wait=0.0, start=None):
    """Claim OUT for this process until unlock(). OUT is made if it is not there.

    wait: seconds that another run has to leave. start: [job, start] in a batch system, whose earlier starts
        have ended. Where the file system has no locks, the files of those are taken over.
    ValueError: another run works in OUT, or a foreign file stands where the lock goes. OSError: the lock file
        cannot be written.
    """
    global _start
    _start = start
    out = Path(out)
    until = time.monotonic() + wait
    waits = False
    for path in _lock_files(out):
        if path.parent == out.resolve() and not out.is_dir():
            path.parent.mkdir()  # A link that leads to no folder yet is no name for a new one.
            _made.append(path.parent)
        while (holder := _claim(path)) is not None:
            if time.monotonic() >= until:
                raise ValueError(f"{out} is in use by {holder}; wait for that run, stop it, or give another "
                                 "--out")
            if not waits:
                waits = True
                say(f"{out} is in use by {holder}: waiting up to {wait:.0f} s for it to leave")
            time.sleep(0.1)


def unlock():
    """Give back what lock() took, if anything. A directory that it made goes too, if it is still empty."""
    for fd in list(_held):
        _give_back(fd)
    while _made:
        with contextlib.suppress(OSError):
            _made.pop().rmdir()


def hold_inside(out, moved_to=None):
    """Move the lock that lies in OUT to the directory that has this name now, if this process holds OUT.

    Somebody renamed or removed OUT since lock(). moved_to: its new name, if it was this process.
    OSError, ValueError: as in lock().
    """
    path = out.resolve() / ".lock"
    for fd, held in list(_held.items()):
        if held != path or _is_at(path, os.fstat(fd)):
            continue
        path.parent.mkdir(exist_ok=True)
        holder = _claim(path)
        if holder is not None:
            raise ValueError(f"{out} is in use by {holder}")
        if moved_to is not None:
            _held[fd] = moved_to / ".lock"
        _give_back(fd)


def _give_back(fd):
    """End one lock, and remove its file where that has still its name."""
    path = _held.pop(fd)
    with contextlib.suppress(OSError):
        if _is_at(path, os.fstat(fd)):
            # The file goes before the lock ends: who has just opened it sees that it lost its name.
            path.unlink()
    os.close(fd)


def _lock_files(out):
    """Return the lock files of OUT in the order in which they are taken.

    One lies next to OUT, one next to its target where OUT is a symbolic link, and the last one in OUT. Where
    a parent takes no file, nobody can rename OUT either, and there is none next to it.
    """
    real = out.resolve()
    named = real if out.name in ("", "..") else out.parent.resolve() / out.name
    siblings = set()
    for path in (real, named):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK | os.X_OK):
            siblings.add(path.with_name(f".{path.name}.lock"))
    return [*sorted(siblings), real / ".lock"]


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
        if not (is_new or is_gone or _is_of_earlier_start(fd)):
            os.close(fd)
            return f"{holder} (if that run has ended, delete {path})"
        if not (_held or is_new or is_gone):
            warn(f"{path} is of {holder}, an earlier start of this job, {_start[0]}: taken over")
        elif not _held:
            warn(f"{path.parent} has no file locks ({e.strerror}): while {path} exists, no other run of this "
                 f"--out starts")
    if not _is_at(path, os.fstat(fd)):  # its holder left and deleted it between our two calls
        os.close(fd)
        return _claim(path)
    if not _may_be_lock(fd):
        os.close(fd)
        raise ValueError(f"{path} is where the lock of a run goes, and was not written by one; move it away, "
                         "or give another --out")
    _held[fd] = path
    me = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    if _start is not None:
        me["start"] = _start
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(me).encode(), 0)
    return None


def _may_be_lock(fd):
    """Whether an open file is empty, or has what a run writes into its lock."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    written = os.pread(fd, 4096, 0).strip(b"\0")  # zeros: the machine went down before it wrote the file
    return not written or _holder(written) is not None


def _is_at(path, status):
    """Whether the open file with this status still has this name."""
    try:
        return os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        return False


def read_holder(fd):
    """Return (in words who wrote the lock file, whether that was a process of this host which has ended)."""
    holder = _holder(os.pread(fd, 4096, 0))
    if holder is None:  # it is being written
        return "another process", False
    host, pid, since = holder
    is_gone = host == socket.gethostname() and has_ended(pid)
    return f"process {pid} on {ascii(host)[1:-1]} since {ascii(since)[1:-1]}", is_gone


def _holder(written):
    """Return (host, process, since when) from the bytes of a lock file; None if they have not all of it."""
    try:
        said = json.loads(written)
        return str(said["host"]), int(said["pid"]), str(said["time"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _is_of_earlier_start(fd):
    """Whether another start of the batch job of this process wrote the lock file."""
    try:
        job, start = json.loads(os.pread(fd, 4096, 0))["start"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return _start is not None and job == _start[0] and start != _start[1]


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
    text = read_file(path) if Path(path).exists() else b""
    for line in text.split(b"\n"):
        row = _sound_row(line)
        if row is not None:
            rows.append(row)
        elif line:
            damaged += 1
    return rows, damaged


def _sound_row(line):
    """Return the row of a line of a .jsonl file, or None."""
    row = None
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line.decode())
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


class Rows:
    """Appends rows to the .jsonl file at path.

    An earlier part's rows stay up to the step `until`; later ones will be written again.
    create: make the file, also where there is no row yet.
    """

    def __init__(self, path, until, create=False):
        self.path = Path(path)
        self.file = None  # open for appending, and its status; None until there is something to write
        self.status = None
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
        self.status = os.stat(self.path)

    def is_lost(self):
        """Whether somebody removed or renamed the file while it is open."""
        return self.file is not None and not _is_at(self.path, self.status)

    def leave_links(self):
        """If somebody gave the open file a second name, as cp -al does, go on in a copy: it is a backup."""
        if self.file is not None and os.fstat(self.file.fileno()).st_nlink > max(1, self.status.st_nlink):
            write_whole(self.path, self.path.read_bytes())
            self.file.close()
            self.open()

    def add(self, row):
        """Append a row, and those that wait. If it cannot be written now, it waits in memory.

        TypeError: a value is no number, text, list or dict, for example a tensor.
        """
        for key, value in row.items():
            if not isinstance(value, (bool, int, float, str, list, dict, type(None))):
                raise TypeError(f"{self.path.name}: {key} is a {type(value).__name__}; give a number, as "
                                "tensor.item() is")
        self.waiting += (json.dumps(row) + "\n").encode()
        try:
            lost = self.is_lost()
            if not lost:
                self.leave_links()
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

"""A result that appears under its name only when it is whole: until then it lies in the folder NAME.half.

    unfinished   the folder to write into. At the end of the `with` it becomes the result

If the program is killed, NAME.half stays, and the same command replaces it. A file in it, MARKER, proves that
a program of ours made the folder. After wrong input or on a full disk, a ValueError or an OSError, nothing
stays. Two programs that write one result meet a lock.
"""
import contextlib
import os
import re
from pathlib import Path

from interface.files import lock, sync, unlock

MARKER = "UNFINISHED.txt"
TEXT = (b"A program of nanoshard is writing this folder, or it was stopped on the way.\n"
        b"The same command deletes the folder and writes it again.\n")
LOCK = ".lock"  # interface/files.py may put a file of this name into a locked folder


@contextlib.contextmanager
def unfinished(out, names, only=""):
    """Give an empty folder. At the end of the body it is renamed to `out`, or the file `only` in it is.

    out: a Path where nothing is, or an empty folder. names: a regular expression for everything that the body
    writes: paths from the folder on, with a slash behind those of folders.
    ValueError: another process writes `out`, or a foreign folder stands where this one goes. OSError: it
    cannot be written.
    """
    out = out.resolve()
    if out.is_mount():
        raise ValueError(f"--out {out} is a mount point, and nothing can be renamed to it; "
                         f"try --out {out}/model")
    half = out.with_name(f"{out.name}.half")
    check_is_folder(half)
    lock(half)
    try:
        discard(half, names)
        half.mkdir(exist_ok=True)
        (half / MARKER).write_bytes(TEXT)
        try:
            yield half
        except (ValueError, OSError):
            with contextlib.suppress(OSError):  # a broken disk: the first error is told
                discard(half, names)
                (half / LOCK).unlink(missing_ok=True)
                half.rmdir()
            raise
        finish(half, out, only)
    finally:
        unlock()


def check_is_folder(half):
    """Raise ValueError if something else than a folder stands where one goes."""
    if half.is_symlink() or half.exists() and not half.is_dir():
        raise foreign(half)


def discard(half, names):
    """Delete what is left of an earlier try, if there is something.

    ValueError: it is not all ours, and nothing was deleted.
    """
    check_is_folder(half)  # again: this process holds the lock now
    marker = half / MARKER
    left = [path for path in half.rglob("*") if path not in (marker, half / LOCK)]
    for path in left:
        name = path.relative_to(half).as_posix()
        if path.is_dir():
            name += "/"
        elif not path.is_file():
            raise foreign(path)
        if path.is_symlink() or not re.fullmatch(names, name):
            raise foreign(path)
    if left and not is_ours(marker):
        raise foreign(half)
    for path in reversed(left):  # what is in a folder comes behind it in the list
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    if os.path.lexists(marker):
        if not is_ours(marker):
            raise foreign(marker)
        marker.unlink()


def is_ours(marker):
    """Whether a marker has the text that unfinished() writes."""
    if marker.is_symlink() or not marker.is_file():
        return False
    return marker.stat().st_size == len(TEXT) and marker.read_bytes() == TEXT


def foreign(path):
    """Return the ValueError for a file or folder that no program of ours left there."""
    return ValueError(f"{path} is in the way, and no command that was stopped left it there; move it away, "
                      "or give another --out")


def finish(half, out, only):
    """Rename the folder, or the file `only` in it, and take the marker away."""
    for path in [*half.rglob("*"), half]:
        sync(path)
    if only:
        if os.path.lexists(out):
            raise ValueError(f"{out} was made meanwhile; the result is {half / only}")
        os.rename(half / only, out)
        clear(half)
        half.rmdir()
    else:
        os.rename(half, out)  # also in the place of an empty folder
        clear(out)
    sync(out.parent)


def clear(folder: Path):
    """Remove the marker, and the lock, which is held until unlock()."""
    (folder / MARKER).unlink()
    (folder / LOCK).unlink(missing_ok=True)

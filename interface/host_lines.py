"""Lines that processes of several hosts leave in a folder for one reader: node_HOST.jsonl, a file per host.

If each of thousands of processes left a file, the reader would open and remove thousands. A write with
O_APPEND goes behind those of the other processes of its host. The appends of two hosts may overwrite each
other on a disk that they share (NFS), so each host has its own file. HOST is its name and, on Linux, the
number of its boot, because containers on two hosts may have one name.
"""
import contextlib
import errno
import fnmatch
import json
import os
import re
import socket
from pathlib import Path

PATTERN = "node_*.jsonl"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def append(folder, value):
    """Append a line of JSON to the file of this host.

    The line break comes first, so that the line of a writer that was killed cannot spoil this one.
    OSError: the disk is full.
    """
    line = b"\n" + json.dumps(value).encode()
    file = os.open(folder / f"node_{host()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        if os.write(file, line) < len(line):  # the rest would not be in one piece with it
            raise OSError(errno.ENOSPC, "only a part of a line could be written", str(folder))
    finally:
        os.close(file)


def host():
    """Return a word that all processes of this host share, and no process of another."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):  # another system, or a container that hides it
        words.append(BOOT.read_text()[:8])
    return re.sub(r"[^\w.-]", "-", ".".join(words))


def read_new(folder, ends):
    """Return the values of the lines that came since the last look.

    ends: {file: the byte where the next look begins}, {} at first; this function changes it. A line that
    cannot be parsed is left out, and the next look begins with it: another process is just writing it, or was
    killed. The lines behind it may therefore be returned again.
    """
    values = []
    for name in fnmatch.filter(os.listdir(folder), PATTERN):
        is_sound = True
        with open(folder / name, "rb") as file:
            file.seek(ends.setdefault(name, 0))
            for line in file:
                if line != b"\n":
                    try:
                        values.append(json.loads(line))
                    except ValueError:
                        is_sound = False
                if is_sound:
                    ends[name] += len(line)
    return values


def remove(folder):
    """Remove the files of all hosts."""
    for path in list(folder.glob(PATTERN)):
        path.unlink()

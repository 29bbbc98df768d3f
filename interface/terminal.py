"""What people read: lines that appear at once, numbers and times in few characters, streams that may fail."""
import contextlib
import os
import re
import sys

# What a terminal obeys, what turns the direction of a line, and halves of characters, which no file takes
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def say(line):
    print(line, flush=True)


def complain(line):
    print(line, file=sys.stderr, flush=True)


def warn(text):
    complain(f"nanoshard: {one_line(text)}")


def one_line(text):
    """Return a message, a text or an error, as one line that a terminal only prints."""
    return printable(" ".join(str(text).split()))


def printable(text):
    """Return text, which may come from a file, with what a terminal would obey escaped."""
    return OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text):
    """Print a piece of a text of others, for example a model's. A file or a pipe gets it as it is."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def drop_what_fails(stream):
    """Flush a stream. If that fails, it leads nowhere from now on."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


class Stream:
    """Stands before stdout or stderr: if the reader leaves (| head), or lacks a character, a run goes on."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, attribute):
        return getattr(self.stream, attribute)

    def write(self, text):
        with contextlib.suppress(OSError):
            try:
                self.stream.write(text)
            except UnicodeError:
                self.stream.write(text.encode("ascii", "replace").decode())

    def flush(self):
        drop_what_fails(self.stream)


def short(number):
    """Return a count in few characters: 950, 12.3k, 4.6M, 7.8B, 9.0T."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def clock(seconds):
    """Return seconds as m:ss or h:mm:ss."""
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{rest // 60}:{rest % 60:02d}"

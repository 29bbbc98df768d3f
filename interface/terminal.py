"""What people read: lines that appear at once, numbers and times in few characters, streams that may fail.

    say, complain   print a line on stdout, on stderr
    show            print a piece of a text of others; visible: what a terminal gets of it
    open_streams    streams that take every character, and lead nowhere where they were closed
    Stream          sys.stdout or sys.stderr of a run, which goes on when they fail
    short           1,234,567 as 1.2M;  clock: seconds as 1:23;  counted: says how much of a list is done
"""
import contextlib
import os
import re
import shutil
import sys
import time

PROGRESS = 5.0  # seconds between two lines of counted()
# What a terminal obeys, and what turns the direction of a line; not tabs and the ends of lines
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def columns():
    """Return the columns of the terminal, 120 at most; a file or a pipe has 120."""
    return min(shutil.get_terminal_size((120, 24)).columns, 120)


def say(line):
    print(line, flush=True)


def complain(line):
    print(line, file=sys.stderr, flush=True)


def visible(text):
    """Return text with what a terminal would obey escaped."""
    return OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text):
    """Print a piece of a text of others, for example a model's. A file or a pipe gets it as it is."""
    if sys.stdout.isatty():
        text = visible(text)
    print(text, end="", flush=True)


def open_streams():
    """Let the streams lead nowhere that were closed (>&-), and take characters that their encoding lacks.

    Otherwise another file gets the number of a closed stream, and what C code prints there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, mode)  # it gets the lowest free number
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if name != "stdin" and hasattr(stream, "reconfigure"):  # a notebook's has not
            with contextlib.suppress(OSError):  # somebody let it lead elsewhere
                stream.reconfigure(errors="replace")


def drop_what_fails(stream):
    """Print what waits in a stream. If that fails, the stream leads nowhere from now on."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


class Stream:
    """Takes the place of sys.stdout or sys.stderr.

    If its reader leaves (| head) or its disk is full, what is printed is lost. One line says so.
    """

    def __init__(self, name):
        self.name = name
        self.stream = getattr(sys, name)
        setattr(sys, name, self)

    def __getattr__(self, attribute):
        return getattr(self.stream, attribute)

    def write(self, text):
        try:
            self.stream.write(text)
        except OSError as e:
            self._fails(e)

    def flush(self):
        try:
            self.stream.flush()
        except OSError as e:
            self._fails(e)

    def _fails(self, error):
        drop_what_fails(self.stream)
        if self.name == "stdout":
            complain(f"nanoshard: stdout: {error}; what is printed there is lost, the run goes on")

    def put_back(self):
        """Give the stream its place back."""
        if getattr(sys, self.name) is self:
            setattr(sys, self.name, self.stream)


def short(number):
    """Return a count in few characters: 950, 12.3k, 4.6M, 7.8B, 9.0T."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def clock(seconds):
    """Return seconds as m:ss, h:mm:ss, or in days from two days on."""
    seconds = round(seconds)
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f}d"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"


def counted(items):
    """Yield the items of a list, and say on stderr every PROGRESS seconds how many of them are done."""
    said = began = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said > PROGRESS:
            said = now
            left = (now - began) * (len(items) / number - 1)
            complain(f"{number:,} of {len(items):,}, left={clock(left)}")

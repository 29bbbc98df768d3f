"""The streams of a program may be closed, full or a terminal, which obeys some of what it is sent.

    open_closed    streams that were closed lead nowhere
    Printed        sys.stdout of a program whose result is what it prints
    Stream         sys.stdout or sys.stderr of a program that goes on when they fail
    guarded        both, around a program
"""
import contextlib
import errno
import os
import sys
import unicodedata

STANDARD_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor
# They turn the direction of a line, so that a terminal shows it in another order than it has.
TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
# What plots are drawn with, in ASCII: the dots of a cell of Braille are the eight low bits of its number, and
# 0x1b are those of its upper half.
PLAIN = {**dict.fromkeys(range(0x2801, 0x2900), ":"), 0x2800: " ", ord("│"): "|", ord("─"): "-",
         **dict.fromkeys(map(ord, "┌┐└┘├┤┬┴┼"), "+")}
PLAIN.update({0x2800 + dots: "'" for dots in range(1, 256) if not dots & ~0x1B})
PLAIN.update({0x2800 + dots: "." for dots in range(1, 256) if not dots & 0x1B})

# How a fix begins, by the number of the error that keeps something from being written
ROOM = {errno.ENOSPC: "free space there, or ", errno.EDQUOT: "free space there, or ",
        errno.EFBIG: "raise the limit of a file's size (ulimit -f), or ",
        errno.ENOENT: "make its folder, or "}


def visible(text):
    """Return text with what a terminal would obey escaped. Tabs and the ends of lines stay."""
    if text.isprintable():
        return text
    return "".join(map(visible_character, text))


def visible_character(c):
    """Return a character, or its escape if a terminal would obey it."""
    if c in "\n\t":
        return c
    if unicodedata.category(c) == "Cc" or ord(c) in TURNING:
        return c.encode("unicode_escape").decode()
    return c


def drawn_plainly(text, encoding):
    """Return text in the characters of an encoding: curves and frames as ASCII draws them, ? for others."""
    return text.translate(PLAIN).encode(encoding, "replace").decode(encoding)


def open_closed():
    """Let the streams lead nowhere that were closed (>&-), and return their names.

    Otherwise another file gets the number of the stream, and what is printed there.
    """
    names = []
    for descriptor, (name, mode) in enumerate(STANDARD_STREAMS):
        try:
            os.fstat(descriptor)
            if getattr(sys, f"__{name}__") is not None:
                continue
            stream = open(os.devnull, mode)  # another file has the number already
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
            stream = open(descriptor, mode, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        names.append(name)
    return names


def send_nowhere(stream):
    """Let a stream's descriptor lead nowhere, also for what is buffered and for what C code prints."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
        stream.flush()


class Printed:
    """Takes the place of sys.stdout or sys.stderr until close().

    A terminal gets what visible() gives. A stream without the characters of a text gets drawn_plainly().
    """

    def __init__(self, name):
        self.name = name
        self.stream = getattr(sys, name) or open(os.devnull, "w")
        self.to_terminal = False
        with contextlib.suppress(AttributeError, ValueError, OSError):  # a closed file, or no file
            self.to_terminal = self.stream.isatty()
        setattr(sys, name, self)

    def __getattr__(self, attribute):
        return getattr(self.stream, attribute)

    def write(self, text):
        if self.to_terminal:
            text = visible(text)
        try:
            return self._try(self.stream.write, text)
        except UnicodeEncodeError:
            text = drawn_plainly(text, self.stream.encoding)
        return self._try(self.stream.write, text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, function, *args):
        try:
            return function(*args)
        except OSError as e:
            send_nowhere(self.stream)
            return self.fails(e)

    def fails(self, error):
        """Say that the stream fails. BrokenPipeError: its reader has left (| head)."""
        if isinstance(error, BrokenPipeError):
            raise error
        fix = f"{ROOM.get(error.errno, '')}send it elsewhere"
        raise OSError(f"{self.name} cannot be written: {error}; {fix}")

    def close(self):
        self.flush()
        self.put_back()

    def put_back(self):
        """Give the stream its place back."""
        if getattr(sys, self.name) is self:
            setattr(sys, self.name, self.stream)


class Stream(Printed):
    """A stream whose loss is said once, on stderr, and ends nothing."""

    def fails(self, error):
        if self.name != "stderr":
            say_lost(f"{self.name}: {error}")


def say_lost(why):
    print(f"nanoshard: {why}; what is printed there is lost", file=sys.stderr, flush=True)


@contextlib.contextmanager
def guarded(prints=True):
    """Guard the streams of a program. prints: its result is what it prints, so it ends when stdout fails."""
    if isinstance(sys.stdout, Printed):  # they are guarded already
        yield
        return
    closed = open_closed()
    stderr = Stream("stderr")
    kind = Printed if prints else Stream
    stdout = kind("stdout")
    if "stdout" in closed:
        say_lost("stdout is closed")
    try:
        yield
        stdout.flush()
    finally:
        with contextlib.suppress(OSError):  # or the interpreter would print it at its end
            stdout.flush()
        stdout.put_back()
        stderr.put_back()

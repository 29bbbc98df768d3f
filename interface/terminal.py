"""How wide the terminal is, and what is printed for people: numbers and times in few characters.

    width     the columns of the terminal that shows what is printed; columns: to which prose is folded
    folded    text as lines of that width
    say       print a line on stdout, folded on a terminal;  complain: the same on stderr
    short     1,234,567 as 1.2M;  clock: seconds as 1:23;  counted: says how much of a list is done
"""
import os
import re
import shutil
import stat
import sys
import textwrap
import time
from pathlib import Path

NO_TERMINAL = 10**6  # columns of a file or a pipe that no terminal shows: its lines are not folded
LEAST, MOST = 40, 120  # columns of folded prose
PROGRESS = 5.0  # seconds between two lines of counted()
LAUNCHERS = "mpiexec", "mpirun", "hydra", "orte", "prte"  # their names begin so
MOST_ANCESTORS = 6
INDENT = 6 * " "  # of the lines that follow the first
# A command stays in one piece, because it is copied. It ends before a semicolon or ", then".
BEGINS = "mpiexec|srun|torchrun|python|pip install|source|wandb sync|mv|command with"
COMMAND = re.compile(rf"\b(?:{BEGINS}) (?:(?!, then)[^;])+")
HELD = "\0"  # stands for a space at which no line ends


def width():
    """Return the columns of the terminal that shows what is printed, or NO_TERMINAL if none does.

    They are those of the variable COLUMNS or of stdout's terminal. Behind mpiexec, stdout is a pipe to it,
    and the terminal is the one to which mpiexec writes. A file, or a pipe to another program, has no columns.
    """
    found = shutil.get_terminal_size((0, 0)).columns or _columns_behind_launcher(sys.__stdout__, 1)
    return max(found or NO_TERMINAL, LEAST)


def columns():
    """Return the columns to which prose is folded; NO_TERMINAL: it is not."""
    found = width()
    return found if found == NO_TERMINAL else min(found, MOST)


def folded(text, most=None, indent=INDENT):
    """Return text as lines of the terminal's width, or of `most` columns. indent: of all but the first.

    A longer word, such as a path, and a command get a line of their own.
    """
    text = COMMAND.sub(lambda command: unbroken(command[0]), text)
    lines = textwrap.fill(text, most or columns(), subsequent_indent=indent, break_long_words=False,
                          break_on_hyphens=False)
    return lines.replace(HELD, " ")


def unbroken(text):
    """Return text for folded(), which ends no line inside of it."""
    return text.replace(" ", HELD)


def say(line):
    """Print a line on stdout at once. On a terminal it is folded; a pipe or a file gets one line."""
    print(folded(line), flush=True)


def complain(line):
    """Print a line on stderr. On a terminal it is folded; a pipe or a file gets one line."""
    most = _columns_of_stderr()
    if most:
        line = folded(line, max(LEAST, min(most, MOST)))
    print(line, file=sys.stderr, flush=True)


def _columns_of_stderr():
    """Return the columns of the terminal that shows stderr, or 0."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):  # it is no terminal, or a notebook's
        return _columns_behind_launcher(sys.stderr, 2)


def _columns_behind_launcher(stream, number):
    """Return the columns of the terminal to which the launcher of this process writes, or 0.

    stream: ours, of which the launcher reads; number: the launcher's descriptor.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return 0
        shown = _stream_of_launcher(number)
        if shown is None:
            return 0
        terminal = os.open(shown, os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(terminal).columns
        finally:
            os.close(terminal)
    except (OSError, ValueError, AttributeError):  # there is none, or stdout is a notebook's
        return 0


def _stream_of_launcher(number):
    """Return the path of a descriptor of the launcher of this process, or None. OSError: no /proc."""
    found = None
    pid = os.getppid()
    for _ in range(MOST_ANCESTORS):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        if not name.startswith(LAUNCHERS):
            break
        found = Path(f"/proc/{pid}/fd/{number}")
        pid = int(rest.split()[1])  # its parent
    # A pipe or a file is not opened: it is not the terminal.
    return found if found is not None and found.is_char_device() else None


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
            print(f"{number:,} of {len(items):,}, left={clock(left)}", file=sys.stderr, flush=True)


"""How wide the terminal is, and what is printed for people: numbers and times in few characters.

    columns   the width to which lines are folded
    short     1,234,567 as 1.2M;  clock: seconds as 1:23
"""
import os
import shutil
import stat
import sys

NO_TERMINAL = 120  # columns of a file or a pipe that no terminal reads
LEAST, MOST = 40, 120


def columns():
    """Return the columns to fold lines to.

    They are those of the variable COLUMNS or of stdout's terminal. Where stdout is a pipe, as behind mpiexec,
    the terminal of the process is asked. A file gets NO_TERMINAL.
    """
    found = shutil.get_terminal_size((0, 0)).columns or _columns_behind_pipe() or NO_TERMINAL
    return min(max(found, LEAST), MOST)


def _columns_behind_pipe():
    """Return the columns of this process's terminal if its stdout is a pipe, else 0."""
    try:
        if not stat.S_ISFIFO(os.fstat(sys.__stdout__.fileno()).st_mode):
            return 0
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(terminal).columns
        finally:
            os.close(terminal)
    except (OSError, ValueError, AttributeError):  # there is none, or stdout is a notebook's
        return 0


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

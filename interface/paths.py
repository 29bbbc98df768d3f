"""A path that is not there, or not what it should be: which one is meant, and the command that makes it.

    meant_data     a data set of prepare.py
    meant_run      the directory of a run of train.py; meant_checkpoint: a step_N in it
    meant_file     a file
    program        how a program is typed from here

meant_... return the end of an error message. Names of other folders are printed: the caller escapes them
(command_line.one_line does).
"""
import difflib
import os
import re
import shlex
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1]  # the folder of train.py and the others
MOST_NAMES = 3  # paths that a message names
FROM_HUB = ("a model of the Hugging Face hub: hf download OWNER/NAME --local-dir NAME, then python "
            "convert.py import NAME --out out/NAME")


def is_data(folder):
    return os.path.isfile(folder / "meta.json")


def has_flags(folder):
    """Whether a folder has the flags of a model: it is a run, or what convert.py imported."""
    return os.path.isfile(folder / "config.json")


def entries(folder):
    """Return the paths in a folder; [] if it cannot be read."""
    try:
        return sorted(Path(folder).iterdir())
    except OSError:
        return []


def steps_of(run):
    """Return the checkpoints of a run, the newest last."""
    return [entry for entry in entries(run) if re.fullmatch("step_[0-9]+", entry.name)]


def is_run(folder):
    """Whether a folder has what a run writes: rows, or checkpoints. OSError: it is there and not readable."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    return "metrics.jsonl" in names or bool(steps_of(folder))


def close_paths(path, home, test):
    """Return the paths that pass a test: those in `path`, or like it, beside it or in the folder home."""
    inside = list(filter(test, entries(path)))
    if inside:
        return inside[:MOST_NAMES]
    path = Path(path)
    around = {entry.name: entry for entry in (*entries(home), *entries(path.parent)) if entry != path}
    close = difflib.get_close_matches(path.name, [name for name in around if test(around[name])], MOST_NAMES)
    return [around[name] for name in close]


def listed(paths):
    """Return paths as they are offered: A or B."""
    return " or ".join(shlex.quote(str(path)) for path in paths)


def program(name):
    """Return the path by which a program can be started from here: in the programs' folder its name."""
    is_below = Path.cwd().is_relative_to(PROGRAMS)
    return os.path.relpath(PROGRAMS / name) if is_below else str(PROGRAMS / name)


def make_data(folder, source="FILE..."):
    """Return the command that makes the data set `folder`, and the --data to give where that is another."""
    folder = Path(folder)
    home = Path("data") if str(folder.parent) == "." else folder.parent
    words = f"{source} --name {shlex.quote(folder.name or 'my-text')}"
    if folder.name == "stdlib" and source == "FILE...":
        words = "stdlib"
    if str(home) != "data":
        words += f" --out {shlex.quote(str(home))}"
    made = home / (folder.name or "my-text")
    then = "" if made == folder else f", then --data {shlex.quote(str(made))}"
    return f"make it with: python prepare.py {words}{then}"


def meant_data(folder):
    """Return what to type for the data set `folder`, which is not there."""
    path = Path(folder)
    if path.is_file():
        return f"it is a file: {make_data(path.stem, shlex.quote(str(path)))}"
    text = path / "input.txt"
    if text.is_file():  # as nanoGPT has it
        return f"{make_data(f'{path}-tokens', shlex.quote(str(text)))}, then --data {path}-tokens"
    close = close_paths(path, "data", is_data)
    offer = f"give --data {listed(close)}, or " if close else ""
    return offer + make_data(path)


def meant_run(run):
    """Return what to type for the run `run`, which is not there."""
    path = Path(run)
    steps = steps_of(path.parent)
    if path in steps:
        return f"give {shlex.quote(str(path.parent))}"
    if path.name.startswith("step_") and steps:
        return f"that run has {listed(steps[-MOST_NAMES:])}"
    close = close_paths(path, "out", has_flags)
    if close:
        return f"perhaps {listed(close)} is meant"
    runs = list(filter(has_flags, entries("out")))[:MOST_NAMES]
    offer = f", such as {listed(runs)}" if runs else ""
    return f"give the --out directory of a run of train.py{offer}; {FROM_HUB}"


def meant_checkpoint(path):
    """Return what to type for a directory that is there and is no checkpoint of a run; or ""."""
    if steps_of(path):
        return f"give {steps_of(path)[-1]}, or --resume auto --out {path}"
    if any(Path(path).glob("model*")):
        return "use python convert.py import for models of others"
    return ""


def meant_file(path):
    """Return "; perhaps X is meant" for a file that is not there, or ""."""
    close = close_paths(path, ".", os.path.isfile)
    return f"; perhaps {listed(close)} is meant" if close else ""

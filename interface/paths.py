"""A path that is not there: which one is meant, and the command that makes it, as the end of a message."""
import difflib
import os
import re
import shlex
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1]  # the folder of train.py and the others
FROM_HUB = ("a model of the Hugging Face hub: hf download OWNER/NAME --local-dir NAME, then python "
            "convert.py import NAME --out out/NAME")


def is_run(folder):
    """Whether a folder has what a run writes: rows, or checkpoints."""
    return (folder / "metrics.jsonl").exists() or bool(steps_of(folder))


def steps_of(run):
    """Return the checkpoints of a run, the newest last."""
    return sorted(path for path in Path(run).glob("step_*") if re.fullmatch("step_[0-9]+", path.name))


def program(name):
    """Return the path by which a program can be started from here: in the programs' folder its name."""
    is_below = Path.cwd().is_relative_to(PROGRAMS)
    return os.path.relpath(PROGRAMS / name) if is_below else str(PROGRAMS / name)


def close_paths(path, home, file):
    """Return "A or B", the folders that hold `file` and are called like path, beside it or in `home`."""
    found = [*Path(home).glob(f"*/{file}"), *path.parent.glob(f"*/{file}")]
    known = {other.parent.name: shlex.quote(str(other.parent)) for other in found if other.parent != path}
    return " or ".join(known[name] for name in difflib.get_close_matches(path.name, known))


def make_data(folder, source="FILE..."):
    """Return the command that makes the data set `folder`."""
    folder = Path(folder)
    words = f"python prepare.py {source} --name {shlex.quote(folder.name)}"
    if folder.name == "stdlib":
        words = "python prepare.py stdlib"
    if str(folder.parent) not in ("data", "."):
        words += f" --out {shlex.quote(str(folder.parent))}"
    return f"make it with: {words}"


def meant_data(folder):
    """Return what to type for the data set `folder`, which is not there."""
    path = Path(folder)
    if path.is_file():
        how = make_data(path.stem, shlex.quote(str(path)))
        return f"it is a file: {how}, then --data data/{path.stem}"
    close = close_paths(path, "data", "meta.json")
    return f"give --data {close}, or {make_data(path)}" if close else make_data(path)


def meant_run(run):
    """Return what to type for the run, or the checkpoint of one, `run`, which is not there."""
    path = Path(run)
    if steps_of(path):
        return f"its newest checkpoint is {steps_of(path)[-1]}"
    close = close_paths(path, "out", "config.json")
    if close:
        return f"perhaps {close} is meant"
    return f"give the --out directory of a run of train.py; {FROM_HUB}"

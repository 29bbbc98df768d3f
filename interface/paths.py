"""A path that is not there, or not what it should be: which one is meant, and the command that makes it.

meant_... return the end of an error message.
"""
import difflib
import os
import re
import shlex
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1]  # the folder of train.py and the others
FROM_HUB = ("a model of the Hugging Face hub: hf download OWNER/NAME --local-dir NAME, then python "
            "convert.py import NAME --out out/NAME")


def is_data(folder):
    return os.path.isfile(folder / "meta.json")


def is_model(folder):
    """Whether a folder is a run, a checkpoint of one, or what convert.py imported."""
    return os.path.isfile(folder / "config.json") or os.path.isfile(folder / "index.json")


def is_run(folder):
    """Whether a folder has what a run writes: rows, or checkpoints."""
    return (folder / "metrics.jsonl").exists() or bool(steps_of(folder))


def steps_of(run):
    """Return the checkpoints of a run, the newest last."""
    return sorted(path for path in Path(run).glob("step_*") if re.fullmatch("step_[0-9]+", path.name))


def close_paths(path, home, test):
    """Return the paths that pass a test and are called like `path`, beside it or in the folder home."""
    path = Path(path)
    around = {other.name: other for other in (*Path(home).glob("*"), *path.parent.glob("*")) if other != path}
    close = difflib.get_close_matches(path.name, [name for name in around if test(around[name])])
    return [around[name] for name in close]


def listed(paths):
    """Return paths as they are offered: A or B."""
    return " or ".join(shlex.quote(str(path)) for path in paths)


def program(name):
    """Return the path by which a program can be started from here: in the programs' folder its name."""
    is_below = Path.cwd().is_relative_to(PROGRAMS)
    return os.path.relpath(PROGRAMS / name) if is_below else str(PROGRAMS / name)


def make_data(folder, source="FILE..."):
    """Return the command that makes the data set `folder`."""
    folder = Path(folder)
    words = ["python", "prepare.py", source, "--name", shlex.quote(folder.name)]
    if folder.name == "stdlib":
        words = ["python", "prepare.py", "stdlib"]
    if str(folder.parent) not in ("data", "."):
        words += ["--out", shlex.quote(str(folder.parent))]
    return f"make it with: {' '.join(words)}"


def meant_data(folder):
    """Return what to type for the data set `folder`, which is not there."""
    path = Path(folder)
    if path.is_file():
        return f"it is a file: {make_data(path.stem, shlex.quote(str(path)))}, then --data data/{path.stem}"
    close = close_paths(path, "data", is_data)
    offer = f"give --data {listed(close)}, or " if close else ""
    return offer + make_data(path)


def meant_run(run):
    """Return what to type for the run, or the checkpoint of one, `run`, which is not there."""
    path = Path(run)
    steps = steps_of(path)
    if steps:
        return f"its newest checkpoint is {steps[-1]}"
    if path.is_dir() and path.name.startswith("step_"):
        return f"give {path.parent}"
    close = close_paths(path, "out", is_model)
    if close:
        return f"perhaps {listed(close)} is meant"
    return f"give the --out directory of a run of train.py; {FROM_HUB}"


def meant_file(path):
    """Return "; perhaps X is meant" for a file that is not there, or ""."""
    close = close_paths(path, ".", os.path.isfile)
    return f"; perhaps {listed(close)} is meant" if close else ""

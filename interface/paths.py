"""A path that is not there, or not what it should be: which one is meant, and the command that makes it.

    meant_data     a data set of prepare.py
    meant_run      the directory of a run of train.py; meant_checkpoint: a step_N in it
    meant_file     a file
    is_run         whether a folder is a run's; has_flags: whether it tells its model, too
    download       a model of the Hugging Face hub
    elsewhere      a path that is in the programs' folder
    program        how a program is typed from here
    after_import   what can be typed with an imported model

The last two return what is typed, and the others the end of an error message, beginning with what to type.
Names of other folders are printed: the caller escapes them (command_line.one_line does).
"""
import difflib
import itertools
import os
import re
import shlex
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1]  # the folder of train.py and the others
MOST_NAMES = 3  # paths that a message names
MOST_ENTRIES = 2000  # of a folder that is looked through
# The names of what prepare.py makes
OURS = re.compile(r"(train|val)_.*\.bin|tokenizer\.json|meta\.json|\.verified\.json|\.parts")
# Models that are named without their owner
OWNERS = dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2"), "openai-community")


def entries(folder):
    """Return the paths in a folder, at most MOST_ENTRIES; [] if it cannot be read."""
    found = []
    try:
        for path in Path(folder).iterdir():
            found.append(path)
            if len(found) == MOST_ENTRIES:
                break
    except OSError:
        return []
    return sorted(found)


def is_data(folder):
    """Whether a folder holds a data set."""
    return (folder / "meta.json").is_file() and (folder / "tokenizer.json").is_file()


def has_flags(folder):
    """Whether a folder has the flags of a model: it is a run, or what convert.py imported."""
    return (folder / "config.json").is_file()


def safe(test, path):
    """Return test(path), or False where the path cannot be looked at."""
    try:
        return test(path)
    except OSError:
        return False


def close_paths(path, home, test):
    """Return the paths that pass a test and resemble `path`, the most similar first.

    home: the folder in which such paths lie by default. What lies in `path` itself comes first.
    """
    path = Path(path)
    inside = [entry for entry in entries(path) if safe(test, entry)] if path.is_dir() else []
    if inside:
        return inside[:MOST_NAMES]
    around = {}
    for folder in (path.parent, Path(home)):
        for entry in entries(folder):
            around.setdefault(entry.name, entry)
    close = difflib.get_close_matches(path.name, around, 20, 0.6)
    exact = [path.name] if path.name in around else []
    found = [around[name] for name in dict.fromkeys([*exact, *close])]
    return [entry for entry in found if entry != path and safe(test, entry)][:MOST_NAMES]


def elsewhere(path, test):
    """Return what to type if a relative path passes a test in the programs' folder, which is not this one."""
    path = Path(path)
    if path.is_absolute() or Path.cwd() == PROGRAMS or not safe(test, PROGRAMS / path):
        return ""
    up = os.path.relpath(PROGRAMS) if Path.cwd().is_relative_to(PROGRAMS) else str(PROGRAMS)
    return f"it is in the programs' folder: cd {shlex.quote(up)}"


def program(name):
    """Return the path by which a program can be started from here: in the programs' folder its name."""
    try:
        here = Path.cwd()
    except OSError:  # Somebody has deleted this folder.
        return str(PROGRAMS / name)
    if here == PROGRAMS or not (PROGRAMS / name).is_file():
        return name
    return os.path.relpath(PROGRAMS / name) if here.is_relative_to(PROGRAMS) else str(PROGRAMS / name)


def after_import(out, step):
    """Return lines with what can be typed with an imported model: its folder, and its step in there."""
    sample = shlex.join(["python", program("sample.py"), str(out)])
    train = shlex.join(["python", program("train.py"), "--data", "data/NAME", "--init-from", str(step)])
    return f"write text:   {sample} --prompt ...\ntrain on:     {train}"


def programs_first():
    """Return `cd .. && ` or the like in a folder below the programs' one, where they cannot be typed."""
    if Path.cwd() == PROGRAMS or not Path.cwd().is_relative_to(PROGRAMS) or Path("prepare.py").is_file():
        return ""
    return f"cd {shlex.quote(os.path.relpath(PROGRAMS))} && "


def listed(paths):
    """Return paths as they are offered: A, B or C."""
    names = [shlex.quote(str(path)) for path in paths]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def make_data(folder, source=None, is_damaged=False):
    """Return the command that makes the data set `folder`, and the --data to give where that is another.

    prepare.py does not write into a folder that has files outside its list. Where such files are ours, they
    are to be moved away; beside files of others, the data set gets another name. is_damaged: nobody can read
    the list.
    """
    folder = Path(folder)
    made = folder.parent / (folder.name or "my-text")
    if str(folder.parent) == ".":  # a bare name: prepare.py makes data/NAME
        made = Path("data") / made.name
    first = ""
    if made.is_dir() and (is_damaged or is_taken(made)):
        first = move_away(made)
        if not first:
            made = made.with_name(f"{made.name}-tokens")
    words = [source or "FILE...", "--name", made.name]
    if made.name == "stdlib" and source is None:
        words = ["stdlib"]
    home = made.parent
    if programs_first() and home.parts[:1] == ("..",):  # The command is typed there.
        home = Path(os.path.relpath(home, PROGRAMS))
    if home != Path("data"):
        words += ["--out", str(home)]
    typed = " ".join(word if word == "FILE..." else shlex.quote(word) for word in words)
    then = "" if made == folder else f", then --data {shlex.quote(str(made))}"
    return f"{first}make it with: {programs_first()}python prepare.py {typed}{then}"


def is_taken(folder):
    """Whether prepare.py would not fill a folder: it has no list of files there, and others are in it."""
    is_ours = (folder / "meta.json").is_file() or (folder / ".parts/lock").exists()
    return not is_ours and any(entry.name != ".parts" for entry in entries(folder))


def move_away(folder):
    """Return the command that makes room for a data set; "" if the folder holds files of others."""
    if any(not OURS.fullmatch(entry.name) for entry in entries(folder)):
        return ""
    endings = itertools.chain([".old"], (f".old{number}" for number in itertools.count(2)))
    old = next(f"{folder}{ending}" for ending in endings if not Path(f"{folder}{ending}").exists())
    return f"move it away: mv {shlex.quote(str(folder))} {shlex.quote(old)}, then "


def meant_data(folder):
    """Return what to type for the data set `folder`, which is not there."""
    path = Path(folder)
    if path.is_file():
        name = path.stem if path.stem and path.stem[0].isalnum() else "my-text"
        return f"it is a file: {make_data(name, str(folder))}"
    there = elsewhere(path, is_data)
    if there:
        return there
    close = close_paths(path, "data", is_data)
    if close and path.is_dir():
        return f"give --data {listed(close)}"
    if close:
        return f"give --data {listed(close)}, or {make_data(path)}"
    if path.is_dir() and str(path) in ("data", "."):
        return make_data("data/stdlib") + ", then --data data/stdlib"
    for text in (path.with_suffix(".txt"), path / "input.txt", Path("data", path.name, "input.txt")):
        if text.is_file():
            return make_data(path, str(text))
    return make_data(path)


def meant_run(run):
    """Return what to type for the run `run`, which is not there."""
    path = Path(run)
    if path in steps_of(path.parent) and path.is_dir():
        return f"give {shlex.quote(str(path.parent))}"
    if path.name.startswith("step_") and steps_of(path.parent):
        return f"that run has {listed(steps_of(path.parent)[-MOST_NAMES:])}"
    if (path / "adapter_config.json").is_file():
        return f"it holds adapters: python convert.py import {shlex.quote(run)} --base RUN --out out/NAME"
    there = elsewhere(path, has_flags)
    if there:
        return there
    close = close_paths(path, "out", has_flags)
    if close:
        return f"perhaps {listed(close)} is meant"
    asked = download(run, "python sample.py {}")
    if asked:
        return asked
    runs = [entry for entry in entries("out") if safe(has_flags, entry)]
    runs.sort(key=lambda entry: (bool(steps_of(entry)), when_changed(entry)))
    if runs:  # those with checkpoints, and of these the newest, are named last
        return f"give the --out directory of a run of train.py: {listed(runs[-MOST_NAMES:])}"
    return "give the --out directory of a run of train.py"


def when_changed(folder):
    """Return when something was last made or removed in a folder, in seconds; 0 if it cannot be read."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def meant_checkpoint(path):
    """Return what to type for a directory that is there and is no checkpoint of a run; or ""."""
    path = Path(path)
    if steps_of(path):
        return f"give {steps_of(path)[-1]}, or --resume auto --out {path}"
    if any(path.glob("model*")):
        return "use python convert.py import for models of others"
    return ""


def is_run(folder):
    """Whether a folder has what a run writes: rows, or checkpoints. OSError: it is there and not readable."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    return "metrics.jsonl" in names or bool(steps_of(folder))


def steps_of(run):
    """Return the checkpoints of a run, the newest last."""
    return [entry for entry in entries(run) if re.fullmatch("step_[0-9]+", entry.name)]


def meant_file(path):
    """Return "; perhaps X is meant" for a file that is not there, or ""."""
    there = elsewhere(path, Path.is_file)
    if there:
        return f"; {there}"
    close = close_paths(path, ".", Path.is_file)
    return f"; perhaps {listed(close)} is meant" if close else ""


def download(name, then):
    """Return what to say about the name of a model of the Hugging Face hub; "" if it is no such name.

    then: the command that follows the download, with {} in the place of the directory. A name whose first
    part is a folder here is a path.
    """
    owner, slash, model = str(name).partition("/")
    if not slash:
        owner, model = OWNERS.get(owner, ""), owner
    is_name = re.fullmatch(r"\w[\w.-]*", owner) and re.fullmatch(r"\w[\w.-]*", model)
    if not is_name or owner in ("out", "data") or Path(name).exists() or slash and Path(owner).is_dir():
        return ""
    return (f"{name} is a model of the Hugging Face hub: hf download {owner}/{model} --local-dir {model} "
            f"(pip install huggingface_hub), then {then.format(model)}")


def imported(name):
    """Return where the model of a name on the hub goes when convert.py imports it."""
    return f"out/{Path(name).name}"

"""A path that is not there: which one is meant, and the command that makes it, as the end of a message."""
import re
import shlex
from pathlib import Path

FROM_HUB = ("a model of the Hugging Face hub: hf download OWNER/NAME --local-dir NAME, then python "
            "convert.py import NAME --out out/NAME")
GIVE_RUN = "give the --out of a run (python train.py --list shows those in out)"


def is_run(folder):
    return (folder / "metrics.jsonl").exists() or bool(steps(folder))


def steps(run):
    """Return the committed checkpoints of a run, newest first."""
    found = [path for path in Path(run).glob("step_*") if re.fullmatch("step_[0-9]+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def meant_data(folder):
    """Return what to type for the data set `folder`, which is not there."""
    path = Path(folder)
    if path.is_file():
        name = shlex.quote(path.stem)
        return (f"it is a file: make it with: python prepare.py {shlex.quote(str(path))} --name {name}, "
                f"then --data data/{name}")
    if Path("data", path.name, "meta.json").exists():
        return f"give --data data/{path.name}"
    if path.name == "stdlib":
        return "make it with: python prepare.py stdlib"
    return f"make it with: python prepare.py FILE... --name {shlex.quote(path.name)}"


def meant_run(run, give=""):
    """Return what to type for the run, or the checkpoint of one, `run`, which is not there. give: what it is
    if no checkpoint is near; by default a run, or a model of the hub."""
    if steps(run):
        return f"its newest checkpoint is {steps(run)[0]}"
    return give or f"{GIVE_RUN}; {FROM_HUB}"

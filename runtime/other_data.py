"""A run that goes on with other data than those of its checkpoint: what to say, and what to type.

    refuse_vocabulary   another vocabulary, with which no run can go on
    fix                 what brings the run's own data back
"""
import contextlib
import shlex
from pathlib import Path

from corpus.samples import first_folder
from corpus.shards import load_meta
from interface.terminal import one_line


def path_of_data(meta):
    """Return the --data of a checkpoint's meta, or ""."""
    return one_line(meta.get("flags", {}).get("data", ""))


def fix(cfg, meta):
    """Return the --data of the checkpoint, or what makes it again where other data took its place; or ""."""
    theirs = path_of_data(meta)
    if theirs in ("", cfg.data):
        replaced = what_was_replaced(cfg.data)
        return f"its --data{replaced}" if replaced or not theirs else ""
    return f"its --data {shlex.quote(theirs)}"


def refuse_vocabulary(cfg, path, meta, changed):
    """Raise ValueError if other data brought another vocabulary: the model's symbols would mean other text.

    The run keeps the tokenizer of its data.
    """
    before = Path(path).parent / "tokenizer.json"
    now = Path(first_folder(cfg.data)) / "tokenizer.json"
    is_other = "vocab_size" in changed and not cfg.vocab_size
    if before.is_file() and now.is_file():
        is_other = is_other or Path(before).read_bytes() != Path(now).read_bytes()
    if not is_other:
        return
    sizes = ""
    if "vocab_size" in changed:
        there, here = changed["vocab_size"]
        sizes = f" ({there:,} symbols then, {here:,} now)"
    theirs = path_of_data(meta)
    if theirs in ("", cfg.data):
        raise ValueError(f"{cfg.data} was prepared again since checkpoint {path}, and its vocabulary "
                         f"differs{sizes}, so this run cannot go on; start anew with another --out"
                         f"{what_was_replaced(cfg.data)}")
    raise ValueError(f"checkpoint {path} was trained with other data, {theirs}, whose vocabulary is not that "
                     f"of {cfg.data}{sizes}; give --data {shlex.quote(theirs)}, or start anew with another "
                     "--out")


def what_was_replaced(data):
    """Return in words which data set stood where --data names one, if prepare.py --replace took its place."""
    folder = first_folder(data)
    with contextlib.suppress(ValueError, OSError):
        if command := load_meta(folder).get("replaced"):
            return f" (in {folder} stood what this makes: {command})"
    return ""

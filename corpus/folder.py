"""The folder of a data set: which files prepare.py may replace or remove, a lock, and the final renames.

    owned_files   the names that may be replaced; a folder with anything else in their place is refused
    locked        only one prepare.py works in a folder
    install       the finished files, from .parts into the folder
"""
import fcntl
import json
import os
import shutil
from contextlib import contextmanager, suppress

from corpus import shards
from corpus.shards import SPLITS
from interface.files import check_schema, load_json, must_write

FILES = dict.fromkeys(SPLITS, [{"file": shards.shard_name}])
OURS = {"tokenizer_sha256": str, "shards": FILES, "masks?": FILES}
RENAMED_LAST = ["tokenizer.json", "meta.json"]


def listed_files(path):
    """Return the files of the data set that a meta.json describes. ValueError: it is not prepare.py's."""
    meta = load_json(path)
    check_schema(meta, OURS, path)
    names = []
    for kind in ("shards", "masks"):
        for split in SPLITS:
            names += [shard["file"] for shard in meta.get(kind, {}).get(split, ())]
    return names + RENAMED_LAST


def owned_files(folder):
    """Return the names in `folder` that may be replaced or removed. It only reads.

    These are the names that its meta.json lists, or that the lists in .parts do, which a killed install()
    leaves. ValueError: prepare.py did not make the folder, or something else stands where its files go.
    """
    if not os.path.lexists(folder):
        return set()
    if not folder.is_dir() or (folder.is_symlink() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is a file, or a link to an empty folder; give another --name")

    owned = names_of_lists(folder)
    paths = list(folder.iterdir())
    work = folder / ".parts"
    nothing_else = all(path == work for path in paths)
    if owned or os.path.lexists(work / "lock") or nothing_else:
        foreign = {path.name for path in paths if not may_stay(path, owned)}
    else:  # prepare.py made none of it
        foreign = {path.name for path in paths}
    if foreign:
        raise ValueError(f"{folder} holds {', '.join(sorted(foreign)[:3])}, which prepare.py did not make;"
                         " nothing is changed: give another --name, or move that away")
    return owned


def names_of_lists(folder):
    """Return the names that the meta.json of a folder and the lists in its .parts have."""
    names = set()
    for path in (folder / ".parts/meta.json", folder / ".parts/old.json"):
        with suppress(ValueError, OSError):  # a list that is cut was being written: no file was renamed yet
            names.update(listed_files(path))
    try:
        if (folder / "meta.json").is_file():
            names.update(listed_files(folder / "meta.json"))
    except ValueError as e:
        raise ValueError(f"{e}; prepare.py did not write that and changes nothing: give another --name, or"
                         f" move {folder} away") from None
    return names


def may_stay(path, owned):
    """Whether a path in the folder of a data set is no obstacle: a file of ours, or none with such a name."""
    if path.name == ".parts":
        return is_ours(path)
    if path.name in owned:
        return path.is_file() and not path.is_symlink()
    return not (shards.shard_name(path.name) or path.name in RENAMED_LAST)


def is_ours(work):
    """Whether prepare.py made this folder .parts.

    No link may lead out of it, because it is written to, and removed as a whole. A pipe in it would be waited
    for.
    """
    if work.is_symlink() or not work.is_dir():
        return False
    inside = list(work.iterdir())
    if any(path.is_symlink() or not path.is_file() for path in inside):
        return False
    return not inside or work / "lock" in inside


@contextmanager
def locked(folder):
    """Let only one prepare.py work in `folder`. ValueError: another one does.

    The lock ends when its process does. What the body began stays for the same command, after a kill or on a
    full disk. After wrong input (ValueError, or a file that is not there) the same command would fail again:
    the folders that were made here are removed, unless the error is a KeptWork.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with must_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        try:
            yield
        except (ValueError, FileNotFoundError) as e:
            if made and not isinstance(e, KeptWork):
                shutil.rmtree(folder)
                with suppress(OSError):  # something else came into one of them
                    for path in made[1:]:
                        path.rmdir()
            raise


class KeptWork(ValueError):
    """Wrong input, with which other flags go on from the work that was done."""


@contextmanager
def held(folder):
    """Hold the lock of a folder. ValueError: another prepare.py does, or has just removed the folder."""
    taken = f"another prepare.py is at work on {folder.parent}; wait for it"
    lock = folder / "lock"
    try:
        file = open(lock, "w")
    except FileNotFoundError:
        raise ValueError(taken) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ValueError(taken) from e
        except OSError:  # a file system without locks
            pass
        if not lock.exists() or not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            raise ValueError(taken)
        yield


def install(work, folder, vocab, meta):
    """Rename the shards from `work` into `folder`, then tokenizer.json and meta.json; delete `work`.

    There is no data set without meta.json. A kill between the renames leaves a folder that train.py refuses,
    and in `work` the lists of the old files and of the new ones, so that the next call knows them as ours.
    """
    old = owned_files(folder)
    replaces = (folder / "meta.json").exists()
    if not replaces:
        remove(folder, old)  # what a killed install left: its list is about to be written over
    vocab.save(work / "tokenizer.json")
    (work / "meta.json").write_text(json.dumps(meta, indent=1))
    for split in SPLITS:  # the reader's own checks, before anything is replaced
        shards.open_shards(work, split, shards.load_meta(work))
    if replaces:
        os.replace(folder / "meta.json", work / "old.json")
        remove(folder, old)
    for name in listed_files(work / "meta.json"):
        os.replace(work / name, folder / name)
    shutil.rmtree(work)


def remove(folder, names):
    """Remove those files of `folder` that are there."""
    for name in names:
        (folder / name).unlink(missing_ok=True)

"""Reference outputs that a test compares with, and how a failing test names the numbers that differ.

    python tests/test_estimates.py --write      for each test that has such a file
"""
import difflib
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a test that runs as a program

DIGITS = 12  # significant digits of a number in the file


def plain(value):
    """Return a value as its JSON holds it: names and lists, and numbers of DIGITS digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


def differences(stored, found, path=""):
    """Return a line for each place in which two values from plain() differ."""
    if isinstance(stored, dict) and isinstance(found, dict):
        keys = [*stored, *(key for key in found if key not in stored)]
        pairs = [(f"{path}/{key}", stored.get(key, "absent"), found.get(key, "absent")) for key in keys]
    elif isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(stored, found, strict=True))]
    elif same(stored, found):
        return []
    else:
        return [f"{path}: {stored!r} -> {found!r}"]
    return [line for pair in pairs for line in differences(pair[1], pair[2], pair[0])]


def same(a, b):
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=10 ** (1 - DIGITS))
    return a == b and type(a) is type(b)


def compare(file, found):
    """Fail unless `found` is what the JSON file holds, and say what differs."""
    lines = differences(json.loads(Path(file).read_text()), plain(found))
    shown = "\n".join(lines[:20])
    assert not lines, f"{len(lines)} differences from {Path(file).name}, the first of them:\n{shown}"


def write(file, found):
    """Write the file: a line per entry of the second level, so that a diff of two versions can be read."""
    rows = []
    for name, entries in plain(found).items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        rows.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    Path(file).write_text("{\n" + ",\n".join(rows) + "\n}\n")


# -----------------------------------------------------------------------------
# Printed pages: a text file, a section for each

def write_pages(file, pages):
    """Write {title: text} as a text file."""
    sections = [f"== {title}\n" + text.strip("\n") + "\n\n" for title, text in pages.items()]
    Path(file).write_text("".join(sections))


def compare_pages(file, pages):
    """Fail unless the text file holds these pages, and show where they differ."""
    sections = Path(file).read_text().removeprefix("== ").split("\n\n== ")
    stored = {title: text.strip("\n") for title, _, text in (section.partition("\n") for section in sections)}
    found = {title: text.strip("\n") for title, text in pages.items()}
    lines = []
    for title in [*stored, *(title for title in found if title not in stored)]:
        before = stored.get(title, "absent").splitlines()
        lines += difflib.unified_diff(before, found.get(title, "absent").splitlines(), title, "now",
                                      n=0, lineterm="")
    shown = "\n".join(lines[:30])
    assert not lines, f"other lines than in {Path(file).name}:\n{shown}"

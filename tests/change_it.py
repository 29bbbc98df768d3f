"""Make changes of docs/change-it.md in this tree: python tests/change_it.py activation [router ...]

A change is a section of the page, known by the last word of its heading. Its diff has blocks without line
numbers:

    @@ FILE, NAME     the function, class or table of the file in which to look; no NAME means the whole file
     line             stays, and shows the place
    -line             goes
    +line             comes

The lines that stay or go must stand there exactly once. The lines around them do not matter. A block whose
lines that stay or come stand there already has been made.
"""
import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/change-it.md"
FIX = "make the change by hand, or change this block of docs/change-it.md"


class Edit(NamedTuple):
    """One block of a diff."""
    file: str
    name: str  # dotted, as in MoE.route; "" is the whole file
    old: list  # lines that stay or go
    new: list  # lines that stay or come


def diffs():
    """Return {last word of a section's heading: its diff}."""
    sections = re.findall(r"^## .*?(\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return {name: re.search(r"^```diff\n(.*?)^```$", body, re.M | re.S)[1] for name, body in sections}


def edits(diff):
    """Return the Edits of a diff."""
    found = []
    for line in diff.splitlines():
        sign = line[:1]
        text = line[1:]
        if line.startswith("@@"):
            file, _, name = line[2:].strip().partition(", ")
            found.append(Edit(file, name, [], []))
            continue
        if sign != "+":
            found[-1].old.append(text)
        if sign != "-":
            found[-1].new.append(text)
    return found


def names_of(node):
    """Return the names that a statement defines, as far as an Edit can ask for them."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [getattr(node, "name", "")]


def place(text, name):
    """Return (first, stop): which lines of a text define a name. LookupError: none do."""
    first = 0
    stop = len(text.splitlines())
    nodes = ast.parse(text).body
    for part in name.split(".") if name else []:
        named = [node for node in nodes if part in names_of(node)]
        if not named:
            raise LookupError
        node = named[0]
        starts = [node, *getattr(node, "decorator_list", [])]
        first = min(start.lineno for start in starts) - 1
        stop = node.end_lineno
        nodes = getattr(node, "body", [])
    return first, stop


def find(wanted, lines, first, stop):
    """Return each i at which the wanted lines stand in lines[first:stop], one below the other."""
    n = len(wanted)
    return [i for i in range(first, stop - n + 1) if lines[i:i + n] == wanted]


def changed(text, edit):
    """Return the text of a file after an edit, the same text if the edit has been made.

    ValueError: the old lines do not stand there exactly once.
    """
    where = f"{edit.file}, {edit.name}" if edit.name else edit.file
    try:
        first, stop = place(text, edit.name)
    except LookupError:
        raise ValueError(f"{where} is not defined; {FIX}") from None

    lines = text.splitlines()
    if find(edit.new, lines, first, stop):
        return text
    starts = find(edit.old, lines, first, stop)
    if len(starts) != 1:
        raise ValueError(f"{where}: `{edit.old[0].strip()}` of docs/change-it.md stands there {len(starts)} "
                         f"times, expected once; {FIX}")
    lines[starts[0]:starts[0] + len(edit.old)] = edit.new
    return "".join(f"{line}\n" for line in lines)


def changed_files(diff):
    """Return {file: its text after the change}. Nothing is written."""
    texts = {}
    for edit in edits(diff):
        text = texts.get(edit.file) or (ROOT / edit.file).read_text()
        texts[edit.file] = changed(text, edit)
    return texts


def main(names):
    known = diffs()
    if not names or not set(names) <= set(known):
        print(f"nanoshard: give names of changes: {', '.join(known)}", file=sys.stderr)
        raise SystemExit(2)
    for name in names:
        try:
            texts = changed_files(known[name])
        except ValueError as e:
            print(f"nanoshard: {e}", file=sys.stderr)
            raise SystemExit(2) from e
        files = [file for file, text in texts.items() if text != (ROOT / file).read_text()]
        for file in files:
            (ROOT / file).write_text(texts[file])
        print(f"{name}: changed {', '.join(files) or 'nothing, it has been made'}")


if __name__ == "__main__":
    main(sys.argv[1:])

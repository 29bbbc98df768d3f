"""bench/one_step.py: the calls and collectives of one optimizer step, and the page that shows them."""
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from change_it import place
from pool import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "bench"))
PAGE = ROOT / "docs/one-step.md"
COMMAND = "<!-- mpiexec -n 2 python bench/one_step.py tiny --data synthetic -->\n```\n"


def watched(world, *flags):
    sys.path.insert(0, str(ROOT / "bench"))
    import one_step

    from interface.command_line import parse
    return one_step.watch_step(parse(flags), world)


def parts_of(page):
    """Return (text before the output, the output, text after it)."""
    before, rest = page.split(COMMAND)
    shown, after = rest.split("```\n", 1)
    return before + COMMAND, shown, "```\n" + after


def test_the_page_shows_what_the_command_prints():
    lines = run_ranks(2, watched, "tiny", "--data=synthetic")[0]
    shown = parts_of(PAGE.read_text())[1].splitlines()
    assert shown == lines, "docs/one-step.md: python tests/test_one_step.py --write"


class Reading(NamedTuple):
    """A table of a page that names what to read, in order."""
    built: list   # [(file, name)] of what runs once, before the first step
    called: list  # [(file, name)] of what runs in each step


LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)")


def names_in(cell):
    """Return [(file, name)] of what a cell says to read: links, or `NAME`, `NAME` in FILE."""
    found = [(file, name) for name, file in LINK.findall(cell)]
    for names, file in re.findall(r"(.*?) in ([\w/]+\.py)(?:, )?", cell):
        found += [(file, name) for name in re.findall(r"`([\w.]+)`", names)]
    return found


def readings(page):
    """Return the Readings of a page of docs/."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(), re.M):
        reading = Reading([], [])
        for when, cell in re.findall(r"^\| (once|step) \| (.*?) \|", table, re.M):
            part = reading.built if when == "once" else reading.called
            part += names_in(cell)
        if reading.built or reading.called:
            found.append(reading)
    return found


@pytest.mark.parametrize("page,n", [
    ("one-step.md", 2), ("collectives.md", 1), ("zero.md", 2), ("experts.md", 1),
    ("pipeline-schedules.md", 1)])
def test_what_a_page_says_to_read_is_there(page, n):
    found = readings(page)
    assert len(found) == n
    named = [(file, name) for name, file in LINK.findall((ROOT / "docs" / page).read_text())]
    for reading in found:
        named += reading.built + reading.called
    for file, name in named:
        place((ROOT / file).read_text(), name)


def assert_called(named, lines):
    """A function that is named is called in these lines, and one that runs once, at the start, is not."""
    calls = {tuple(line.replace(":", " ").split()[:2]) for line in lines}
    for reading in named:
        assert not {*reading.called} - calls, "this is not called in a step, or is too small to be shown"
        assert not {*reading.built} & calls, "this is called in each step"


def test_every_function_that_the_page_names_is_called():
    _, shown, _ = parts_of(PAGE.read_text())
    assert_called(readings("one-step.md"), shown.splitlines())


SHARED = ["-> reduce-scatter over dp {0, 1}", "-> all-gather over dp {0, 1}"]


@pytest.mark.parametrize("flags,expected,page,table", [
    (["tiny", "--tp=2"], ["-> all-gather over tp {0, 1}", "-> reduce-scatter over tp {0, 1}"],
     "collectives.md", 0),
    (["tiny", "--zero=1"], SHARED, "zero.md", 0),
    (["tiny", "--zero=3", "--n-layer=2"], SHARED, "zero.md", 1),
    (["tiny-moe", "--ep=2", "--n-layer=2"], ["-> all-to-all over ep {0, 1}"], "experts.md", 0),
    (["tiny", "--pp=2"], ["-> send over pp {0, 1}", "-> receive over pp {0, 1}"],
     "pipeline-schedules.md", 0)])
def test_each_collective_stands_where_it_starts(flags, expected, page, table):
    """And what a page says to read is called."""
    small = ["--data=synthetic", "--n-embd=32", "--ffn-hidden=32", "--n-head=2", "--n-kv-head=2",
             "--seq-len=16"]
    lines = run_ranks(2, watched, *flags, *small)[0]
    for text in expected:
        (depth, _), *_ = [(len(line) - len(line.lstrip()), line) for line in lines if text in line]
        assert depth > 4, lines
    assert_called([readings(page)[table]], lines)


def test_what_repeats_stands_once():
    import one_step
    a, b = one_step.Call("a"), one_step.Call("b")
    calls = one_step.fold([one_step.Call(c) for c in "xababaabb"])
    assert [(c.text, c.times, [x.text for x in c.calls]) for c in calls] == [
        ("x", 1, []), ("these, one after the other", 2, ["a", "b"]), ("a", 2, []), ("b", 2, [])]
    assert a.same(one_step.Call("a")) and not a.same(b)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    first, _, last = parts_of(PAGE.read_text())
    Path(PAGE).write_text(first + "".join(f"{line}\n" for line in run_ranks(
        2, watched, "tiny", "--data=synthetic")[0]) + last)

"""docs/change-it.md: its changes fit this tree; with them its tests pass, and its commands train."""
import ast
import re
import shutil
import subprocess
import sys

import change_it
import pytest
from pool import ROOT

PAGE = change_it.PAGE.read_text()
DIFFS = change_it.diffs()
TESTS = re.findall(r'^python -m pytest -q "?(tests/[^"\n]+)"?$', PAGE, re.M)
TRAIN = [line.split() for line in re.findall(r"^python train.py (.+)$", PAGE, re.M)]
TYPED = f"""
import pytest
import train
from runs import TINY

@pytest.mark.parametrize("argv", {TRAIN}, ids=" ".join)
def test_typed(argv, tmp_path, capsys):
    train.main([argv[0], *TINY, "--steps=2", f"--out={{tmp_path}}/run", *argv[1:]])
    assert "done after step 2" in capsys.readouterr().out
"""


def test_the_page_shows_six_changes():
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == len(DIFFS) == 6
    for section in sections:
        assert section.count("```diff\n") == 1 and "python -m pytest" in section, section[:40]
    assert PAGE.count("python -m pytest") == len(TESTS) and PAGE.count("\npython train.py") == len(TRAIN)


NAME = r"`([A-Za-z_][\w.]*)(?:\(\))?`"
FILE = r"([\w/]+\.py)"
NAMED = re.compile(rf"{NAME} (?:in|of) {FILE}|{FILE} \({NAME}\)")


def missing_names(page):
    """Return the `name` in FILE and the FILE (`name`) of a page that the file does not define."""
    missing = []
    for name, file, other_file, other_name in NAMED.findall(" ".join(page.split())):
        path = ROOT / (file or other_file)
        name = name or other_name
        if not path.exists() or not is_defined(path.read_text(), name):
            missing.append(f"`{name}` in {path.relative_to(ROOT)}")
    return missing


def is_defined(text, name):
    """Whether a file defines a dotted name, or anywhere, as a method, a name without a dot."""
    if "." not in name:
        return any(name in change_it.names_of(node) for node in ast.walk(ast.parse(text)))
    try:
        change_it.place(text, name)
    except LookupError:
        return False
    return True


PAGES = [page for folder in ("", "docs/", "bench/", "tutorial/") for page in ROOT.glob(f"{folder}*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_name_with_its_file_beside_it_exists(page):
    assert missing_names(page.read_text()) == []


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout[-3000:]}"
    return done.stdout


def count_violations(folder, files):
    command = [sys.executable, "tests/laws.py", *files]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return int(re.search(r"(\d+) violations", printed)[1]), printed


FILES = {file for diff in DIFFS.values() for file in change_it.changed_files(diff)}
CODE = [file for file in FILES if not file.startswith("tests/")]


@pytest.mark.long
def test_the_changes_are_right(tmp_path):
    """Each fits the tree as it is. All together pass the page's tests and train, and they keep the laws."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "data", "out"))
    before, _ = count_violations(copy, CODE)
    printed = run(copy, "tests/change_it.py", *DIFFS)
    run(copy, "-m", "ruff", "check", *FILES)
    assert [line.split(":")[0] for line in printed.splitlines()] == list(DIFFS)
    after, printed = count_violations(copy, CODE)
    assert after <= before, printed

    (copy / "tests/test_typed.py").write_text(TYPED)
    printed = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "tests/test_typed.py")
    assert int(re.search(r"(\d+) passed", printed)[1]) >= len(TESTS) + len(TRAIN)

"""What keeps the code readable: short files, lines of a screen's width, one reader of the environment."""
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ops", "fast", "runtime", "corpus", "cost")
OURS = sorted(p for room in (".", "bench", *ROOMS) for p in ROOT.glob(f"{room}/*.py"))
TESTS = sorted(ROOT.glob("tests/**/*.py"))


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", OURS + TESTS, ids=name)
def test_length_and_width(path):
    lines = path.read_text().splitlines()
    most = 750 if path in TESTS else 450
    assert len(lines) <= most, f"{name(path)} has {len(lines)} lines, {most} are allowed: split it"
    wide = [i for i, line in enumerate(lines, 1) if len(line) > 110]
    assert not wide, f"{name(path)}: lines {wide} are wider than 110 columns"


def test_only_launch_reads_the_environment():
    for path in OURS:
        reads = re.findall(r".*os\.(?:environ|getenv).*|.*from os import.*", path.read_text())
        assert not reads or name(path) == "runtime/launch.py", f"{name(path)} reads the environment: {reads}"


def test_nothing_is_left_to_do():
    words = "|".join(("TO" + "DO", "FIX" + "ME"))
    found = subprocess.run(["git", "grep", "-nE", words], cwd=ROOT, capture_output=True, text=True)
    if found.returncode > 1:
        pytest.skip("this is no git checkout")
    assert found.stdout == ""

"""docs/change-it.md: its diffs apply to this tree; with them its tests pass and its commands train."""
import re
import shutil
import subprocess
import sys

from pool import ROOT

PAGE = (ROOT / "docs/change-it.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
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


def apply(diff, folder, *flags):
    done = subprocess.run(["git", "apply", *flags], input=diff, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{diff}\nmake docs/change-it.md fit the tree again"


def test_the_page_shows_five_changes():
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == len(DIFFS) == 5
    for section in sections:
        assert section.count("```diff\n") == 1 and "python -m pytest" in section, section[:40]
    assert PAGE.count("python -m pytest") == len(TESTS) and PAGE.count("\npython train.py") == len(TRAIN)


def test_the_diffs_apply_and_are_right(tmp_path):
    """Each to the tree as it is; then all of them together."""
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "data", "out")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for diff in DIFFS:
        apply(diff, copy, "--check")
    for diff in DIFFS:
        apply(diff, copy)
    (copy / "tests/test_typed.py").write_text(TYPED)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS,
                           "tests/test_typed.py"], cwd=copy, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and int(passed[1]) >= len(TESTS) + len(TRAIN), done.stdout[-3000:]

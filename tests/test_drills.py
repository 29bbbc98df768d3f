"""A few of the kill drills: runs that are killed and resumed. More of them: make long. All: make drills."""
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "drills"))
import kill


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drills")


@pytest.mark.parametrize("i,name", [
    (8, "zero1"), pytest.param(11, "pp2-tied", marks=pytest.mark.long),
    pytest.param(15, "ep2", marks=pytest.mark.long)])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(i, name, folder):
    row = kill.drill(i, folder, name, typical=1.5)
    assert row["ok"], row["why"]
    assert row["kills"] > 0 or row["starts"] == 1


def test_the_drill_detects_a_duplicate_row_and_another_loss(folder):
    a, b = kill.reference("one", folder), folder / "second"
    kill.one_run("one", b, 0, random.Random(0))
    kill.assert_equal_runs(a, b)
    rows = (b / "metrics.jsonl").read_text().splitlines()
    (b / "metrics.jsonl").write_text("\n".join([*rows, rows[-1]]))
    with pytest.raises(ValueError, match="zip"):
        kill.assert_equal_runs(a, b)
    (b / "metrics.jsonl").write_text("\n".join(rows).replace('"loss": 4', '"loss": 5', 1))
    with pytest.raises(AssertionError):
        kill.assert_equal_runs(a, b)


@pytest.mark.long
def test_a_killed_rank_under_mpiexec_ends_all_and_the_run_resumes(folder):
    row = kill.drill(43, folder, "tp2", kill.MpiRanks, typical=6.0)  # kills one rank in the fourth save
    assert row["ok"], row["why"]
    assert row["kills"] == 1 and row["starts"] == 2

"""The fast set of the drills: a few runs killed and gone on with. All of it: make drills."""
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "drills"))
import kill


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drills")


@pytest.mark.parametrize("i,name", [(8, "zero1"), (11, "pp2-tied"), (15, "ep2")])
def test_killed_runs_end_with_the_same_bits(i, name, folder):
    row = kill.drill(i, folder, name, typical=1.5)
    assert row["ok"], row["why"]
    assert row["kills"] > 0 or row["starts"] == 1


def test_the_drill_sees_a_lost_step(folder):
    """A drill that cannot fail shows nothing: a row that is twice in the log, another loss."""
    a, b = kill.reference("one", folder), folder / "again"
    kill.one_run("one", b, 0, random.Random(0))
    kill.equal(a, b)
    rows = (b / "metrics.jsonl").read_text().splitlines()
    (b / "metrics.jsonl").write_text("\n".join([*rows, rows[-1]]))
    with pytest.raises(ValueError, match="zip"):
        kill.equal(a, b)
    (b / "metrics.jsonl").write_text("\n".join(rows).replace('"loss": 4', '"loss": 5', 1))
    with pytest.raises(AssertionError):
        kill.equal(a, b)


def test_a_rank_that_ends_while_it_is_asked_for_is_not_waited_for():
    """Alive at the first question, gone at the second: now and then that took the whole of LIMIT."""
    read, write = os.pipe()
    os.close(write)  # as a process's sentinel after its end
    answers = iter([True])
    rank = SimpleNamespace(is_alive=lambda: next(answers, False), sentinel=read, join=lambda: None)
    ranks, began = kill.Ranks.__new__(kill.Ranks), time.monotonic()
    ranks.all = [rank]
    ranks.end(120.0)
    os.close(read)
    assert time.monotonic() - began < 60


def test_mpiexec_ends_all_ranks_and_goes_on(folder):
    row = kill.drill(43, folder, "tp2", kill.MpiRanks, typical=6.0)  # one rank, in its fourth save
    assert row["ok"], row["why"]
    assert row["kills"] == 1 and row["starts"] == 2

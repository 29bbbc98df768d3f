"""Random wrong inputs, drawn by fuzz.py, which says how each must end and how many there are of each kind."""
from pathlib import Path

import fuzz
import pytest
from pool import run_ranks

AT_ONCE = 28  # cases of a test
CALLS = [pytest.param(kind, i, marks=[pytest.mark.long] if i else [])  # make test: the first of each kind
         for kind, n in fuzz.CASES.items() for i in range(0, n, AT_ONCE)]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "good"
    run_ranks(1, fuzz.make_good, folder)
    return folder


@pytest.mark.parametrize("kind,first", CALLS)
def test_wrong_input_ends_with_0_or_2(kind, first, good):
    cases = [(kind, i) for i in range(first, min(first + AT_ONCE, fuzz.CASES[kind]))]
    found = [text for rank in run_ranks(2, fuzz.problems, cases, good) for text in rank]
    assert not found, "\n".join(found)


def test_the_fuzzer_sees_what_no_program_may_do(good, monkeypatch):
    """Its own check, on programs that do wrong."""
    def raises():
        raise KeyError("x")

    def loses():
        Path("out/run/notes.txt").unlink()
        return {"out": "", "err": "", "code": 0}

    def hangs():
        while True:
            pass

    def ends(code, err=""):
        return lambda: {"out": "", "err": err, "code": code}
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    two = "nanoshard: a/b is wrong\n"
    for call, seen in ((raises, "KeyError"), (loses, "of the notes are left"), (hangs, "no end after 1 s"),
                       (ends(1), "exit code 1"), (ends(2, "what?"), "without its line"),
                       (ends(2, two * 2), "without its line"),
                       (ends(2, "nanoshard: it is wrong"), "names nothing"),
                       (ends(2, "nanoshard: [Errno 5] A/b"), "names nothing"),
                       (ends(0, "\x1b[31m"), "an escape code"), (ends(2, two), None)):
        monkeypatch.setattr(fuzz, "own_case", lambda world, rng, call=call: ("", call), raising=False)
        found = fuzz.problem("own", 0, good)
        assert seen in found if seen else found is None, found

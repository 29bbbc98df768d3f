"""Random wrong inputs, drawn by fuzz.py, which says how each must end and how many there are of each kind.

A failure names its case: python tests/fuzz.py --case KIND/NUMBER repeats it.
"""
import io
import sys
from pathlib import Path
from unittest import mock

import fuzz
import pytest
from pool import run_ranks

AT_ONCE = 28  # cases of a test


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    run_ranks(1, fuzz.make_good, folder)
    return folder


CALLS = [pytest.param(kind, i, marks=[pytest.mark.long] if i else [])  # make test: the first of each kind
         for kind, n in fuzz.CASES.items() for i in range(0, n, AT_ONCE)]


@pytest.mark.parametrize("kind,first", CALLS)
def test_wrong_input_ends_with_0_or_2(kind, first, good):
    cases = [(kind, i) for i in range(first, min(first + AT_ONCE, fuzz.CASES[kind]))]
    found = [text for rank in run_ranks(2, fuzz.problems, cases, good) for text in rank]
    assert not found, "\n".join(found)


END = {"out": "", "err": ""}


def test_the_fuzzer_sees_what_no_program_may_do(good, monkeypatch):
    """Its own check, on programs that do wrong."""
    def raises():
        raise KeyError("x")

    def writes():
        Path("../train_00000.bin").unlink()
        return {**END, "code": 0}

    def hangs():
        while True:
            pass
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    two = "nanoshard: a/b is wrong\n"
    for call, seen in ((raises, "KeyError"), (writes, "changed"), (hangs, "no end after 1 s"),
                       (lambda: {**END, "code": 1}, "exit code 1"),
                       (lambda: {**END, "code": 2, "err": "what?"}, "without its line"),
                       (lambda: {**END, "code": 2, "err": two * 2}, "without its line"),
                       (lambda: {**END, "code": 2, "err": "nanoshard: it is wrong"}, "names nothing"),
                       (lambda: {**END, "code": 2, "err": "nanoshard: [Errno 5] A/b"}, "names nothing"),
                       (lambda: {**END, "code": 0, "err": "\x1b[31m"}, "an escape code"),
                       (lambda: {**END, "code": 2, "err": two}, None)):
        monkeypatch.setattr(fuzz, "own_case", lambda world, rng, call=call: ("", call), raising=False)
        found = fuzz.problem("own", 0, good)
        assert seen in found if seen else found is None, found


def test_an_endless_stdin_and_a_lost_file_are_seen(good, monkeypatch):
    def read():
        endless = io.TextIOWrapper(io.BufferedReader(fuzz.Odd(b"a", b"b")))
        with mock.patch.object(sys, "stdin", endless):
            sys.stdin.readline()

    def lose():
        Path("out/run/notes.txt").unlink()
        return {**END, "code": 0}

    def own(call):
        def case(world, rng):
            Path("out/run/notes.txt").write_text(f"mine, {fuzz.MINE}")
            return "", call
        return case
    for call, seen in ((read, "bytes of stdin were read"), (lose, "lost")):
        monkeypatch.setattr(fuzz, "foreign_case", own(call))
        assert seen in fuzz.problem("foreign", 0, good)

"""The generator of mutants (mutants.py): each is another program, and has test files that must notice it."""
import ast
import json
import re

import mutants
import pytest

TEXT = """
def f(a, b):
    if a < b and not a:
        check(a)
    return [min(a, b) + 1, True, f"{a < b}"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(TEXT)
    return path


def test_each_mutant_changes_one_line_into_another_program(module):
    found = mutants.mutants_of(module)
    assert {mutant.mutated.strip() for mutant in found} == {
        "if a <= b and not a:", "if a < b or not a:", "if a < b and a:", "if (not (a < b and (not a))):",
        "pass",
        'return [max(a, b) + 1, True, f"{a < b}"]', 'return [min(a, b) - 1, True, f"{a < b}"]',
        'return [min(a, b) + 2, True, f"{a < b}"]', 'return [min(a, b) + 1, False, f"{a < b}"]'}
    for mutant in found:
        lines = TEXT.split("\n")
        lines[mutant.row] = mutant.mutated
        ast.parse("\n".join(lines))


def test_what_changes_no_result_is_no_mutant(module):
    module.write_text("TILES_OF = {1: 2}\nMOST = 2**20\nprint(text, flush=True)\n"
                      "kernel(x, num_warps=4, BLOCK=64)\nzip(a, b, strict=True)\n"
                      "x.copy_(y, non_blocking=True)\n")
    assert {mutant.mutated for mutant in mutants.mutants_of(module)} == {"pass"}


@pytest.mark.parametrize("code,said,verdict", [
    (0, "3 passed, 1 skipped in 1 s", "survived"), (1, "1 failed, 3 passed", "caught"),
    (2, "1 error", "caught"), (0, "3 skipped in 1 s", "undecided"),
    (5, "3 deselected in 1 s", "undecided"), (None, "", "caught")])
def test_a_mutant_survives_only_tests_that_ran(code, said, verdict):
    assert mutants.verdict_of(code, said) == verdict


def test_a_survivor_is_decided_where_its_tests_run():
    assert mutants.decides("moe.py", {"tests/test_moe.py": ["a test"]}, gpu=False)
    assert [mutants.decides("ops/kernels.py", {}, gpu) for gpu in (False, True)] == [False, True]
    assert mutants.decides("runtime/debugger.py", {"tests/test_pdb.py": []}, gpu=False)
    assert not mutants.decides("runtime/debugger.py", {"tests/test_pdb.py": ["a test"]}, gpu=True)


def test_the_house_has_mutants_and_tests_for_them():
    chosen = mutants.choose(600, [], gpu=False)
    assert len(chosen) >= 600
    assert len({mutant.file for mutant in chosen}) > 60
    for mutant in chosen:
        assert all((mutants.ROOT / test).is_file() for test in mutants.tests_for(mutant.file)), mutant.file
    gpu = {mutant.file for mutant in mutants.choose(600, [], gpu=True)}
    assert gpu <= mutants.GPU and "fast/graph.py" in gpu


def test_reasons_belong_to_mutants_that_exist():
    keys = {mutant.key for path in mutants.house() for mutant in mutants.mutants_of(path)}
    keys |= {mutant.key for mutant in mutants.by_hand()}
    reasons = json.loads(mutants.REASONS.read_text())
    assert not [key for key in reasons if key not in keys], "the line has changed: judge the mutant again"
    assert all(reason.startswith(mutants.WHY) and len(reason) > 20 for reason in reasons.values())


def test_the_verdict_is_that_of_the_tests(module, capsys):
    a, b, c, *rest = mutants.mutants_of(module)
    verdicts = {a.key: "caught", b.key: "survived", c.key: "survived"}
    share = mutants.report([a, b, c, *rest], verdicts, {b.key: "equivalent: the same number"})
    assert share == pytest.approx(1 / 3)
    said = capsys.readouterr().out
    assert f"survived: {c.key}\n          NO REASON" in said
    assert said.split("\nall ")[1].split()[:4] == ["1", "1", "1", str(len(rest))]


def test_each_file_of_the_house_has_tests_that_name_it():
    """In its own row of the map, or in that of its room."""
    files = {str(path.relative_to(mutants.ROOT)): path for path in mutants.house()}
    for file in files.keys() - mutants.TESTS.keys():
        room, _, name = file.rpartition("/")
        if name == "__init__.py":
            continue
        tests = [(mutants.ROOT / test).read_text() for test in mutants.tests_for(file)] if room else []
        named = re.compile(rf"\b{name.removesuffix('.py')}\b")
        assert any(map(named.search, tests)), f"{file} has no row in mutants.TESTS"
    assert mutants.TESTS.keys() - set(mutants.ROOMS) <= files.keys()
    for row in (*mutants.TESTS.values(), *mutants.QUICK.values()):
        assert all((mutants.ROOT / f"tests/test_{name}.py").is_file() for name in row.split()), row


def test_a_test_is_named_whole_and_a_hang_takes_longer_than_the_tests(module, tmp_path, monkeypatch):
    said = "FAILED tests/test_a.py::test_b[one has all-(1, 2)] - assert 1 == 2 - 3\nERROR tests/test_c.py\n"
    assert mutants.failed_tests(said) == ["tests/test_a.py::test_b[one has all-(1, 2)]", "tests/test_c.py"]
    worker = object.__new__(mutants.Worker)
    worker.tree, limits = tmp_path, []

    def run(files, deselect, seconds):
        limits.append(seconds)
        return None, ""
    worker.pytest = run
    monkeypatch.setattr(mutants, "tests_for", lambda file: ["a", "b"])
    for seconds in (1, 100):
        assert worker.judge(mutants.mutants_of(module)[0], {}, {"a": seconds, "b": 5}) == ("caught", "a hang")
    assert limits == [mutants.SLOWEST, 3 * 105] and module.read_text() == TEXT

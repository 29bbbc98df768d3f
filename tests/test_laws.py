"""The laws of laws.py hold, and each of them can be broken."""
import ast

import laws
import pytest
from laws import LIMITS, ROOT

FOLDERS = ["", "bench/**/", "tests/**/", "tutorial/", "scripts/", *(f"{room}/" for room in laws.ROOMS)]
FILES = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in ROOT.glob(f"{folder}*.py"))


@pytest.mark.parametrize("path", FILES)
def test_a_file_keeps_the_laws(path):
    found = [f"{path}:{line} {wrong}" for line, wrong in laws.violations(path)]
    assert not found, "\n".join(found)


def test_every_file_has_its_level():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    modules = {path.stem for path in ROOT.glob("*.py")}
    assert rooms == set(laws.ROOMS) and rooms | modules <= laws.LEVEL.keys(), "add it to ROOMS and to ORDER"


# -----------------------------------------------------------------------------
# Sizes

@pytest.fixture(scope="module")
def sizes():
    paths = laws.tracked_files()
    if not paths:
        pytest.skip("git lists no files here: this is no checkout")
    return laws.sizes(paths)


def too_large(part, lines, files):
    """Return what is wrong with the size of a part, or None."""
    most_lines, most_files = LIMITS[part]
    if lines > most_lines or files > most_files:
        return f"{part}: {lines} lines, {files} files; {most_lines} and {most_files} at most: an idea must go"
    return None


@pytest.mark.parametrize("part", LIMITS)
def test_no_part_is_too_large(part, sizes):
    assert too_large(part, *sizes[part]) is None


# -----------------------------------------------------------------------------
# What breaks a law, and what does not

@pytest.mark.parametrize("wrong,squeezed,plain", [
    ("a second statement", "a = 1; b = 2", "a = 1\nb = 2"),
    ("three and more assignments", "a, b, c = 1, f(), x", "a, b = f(), x\nB, T, C = 2, 8, 16"),
    ("a conditional inside another", "x = a if b else c if d else e", "x = f(a if b else c, d if e else g)"),
    ("a text or a list times", "x = 's' * (n > 1)", "x = '-' * width"),
    ("a condition chooses", "x = ('', 's')[n > 1]", "x = y[n > 1]"),
    ("a lambda with a branch", "f(lambda x: 1 if x else 2)", "f(key=lambda x: (x.a, x.b))"),
    ("a comprehension with more", "[x for a in b for c in a for x in c].f()", "f(x for a in b for x in a)"),
    ("`:=` in a comprehension", "f(y for x in z if (y := g(x)))", "while x := f():\n    g(x)"),
    ("a condition as a statement", "f() if a else g()", "x = f() if a else g()"),
    ("several calls as one", "f(), g()", "return_value = f(), g()"),
    ("a comprehension as a statement", "[f(x) for x in y]", "z = [f(x) for x in y]")])
def test_a_squeezed_line_is_found(wrong, squeezed, plain):
    (_, found), *more = laws.squeezed(ast.parse(squeezed))
    assert found.startswith(wrong) and not more
    assert laws.squeezed(ast.parse(plain)) == []


def test_long_functions_and_lines_are_found():
    line = "    x = 1\n"
    assert laws.long_functions(ast.parse("def f():\n" + 59 * line)) == []
    assert laws.long_functions(ast.parse("def f():\n" + 60 * line)) == [(1, "f has 61 lines, 60 are allowed")]
    assert laws.long_lines(["", "a" * 101, "a" * 100], 100) == [(2, "101 columns, 100 are allowed")]


@pytest.mark.parametrize("path,up,down", [
    ("model.py", "def f():\n    import fast.graph", "from ops import permute"),
    ("runtime/log.py", "from plan import estimate", "import runtime.launch\nimport cost.memory")])
def test_an_import_that_goes_up_is_found(path, up, down):
    (_, found), *more = laws.imports_that_go_up(ast.parse(up), path)
    assert found.startswith("imports ") and not more
    assert laws.imports_that_go_up(ast.parse(down), path) == []

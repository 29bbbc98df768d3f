"""The laws of the house: which files there are, who may import whom, and how a line reads (laws.py).

    python tests/test_laws.py FILE...   every violation in these files; exit code 1 if there is one
    python tests/test_laws.py --count   the number of violations of each law
    python tests/test_laws.py --write   law_exceptions.json with today's numbers; --raise lets one rise

law_exceptions.json counts, for a law and a file, the violations that are still there. A number only falls.
The file is {} when nothing breaks a law. A new law may begin with the numbers that --raise writes for it, and
authors who mend lines lower them with --write.
"""
import argparse
import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import laws
import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {"train.py", "model.py", "attention.py", "layers.py", "lora.py",
         "vocab.py", "parallel.py", "pipeline.py", "moe.py", "zero.py", "optim.py",
         "skip.py", "config.py", "checkpoint.py", "prepare.py", "sample.py", "plan.py", "plot.py",
         "convert.py"}
PLANNED = {"ddp.py", "generate.py", "muon.py"}  # these may come
ROOMS = {"ops", "fast", "runtime", "corpus", "cost", "interface"}
MAINLINE = ["train.py", "model.py", "attention.py", "layers.py", "lora.py",
            "vocab.py", "parallel.py", "ddp.py", "zero.py", "pipeline.py",
            "generate.py", "moe.py", "optim.py", "muon.py", "ops/flat.py", "ops/permute.py"]

# An import goes from a line to one further down. `config` is below everything: each program and each room
# parses its command line there, so it has to be importable from everywhere, and imports none of us itself.
ORDER = ["train",
         "sample plot prepare",
         "convert",  # below sample, which reads directories of Hugging Face through it
         "runtime plan",
         "cost",
         "fast",
         "generate",
         "pipeline",
         "model",
         "attention",
         "lora",
         "layers",
         "moe optim",
         "muon",  # below optim: an Optimizer has a Muon, as it has an AdamW
         "zero",
         "ddp",
         "vocab",
         "parallel",
         "skip checkpoint corpus",
         "ops interface",
         "config"]
LEVEL = {unit: level for level, line in enumerate(ORDER) for unit in line.split()}
OUTSIDE = {"bench", "tests", "tutorial", "scripts"}  # above the house: it imports nothing of theirs

HOUSE = sorted([*ROOT.glob("*.py"), *(path for room in ROOT.glob("*/__init__.py")
                                      for path in room.parent.glob("*.py"))])
BENCH, TUTORIAL = sorted(ROOT.glob("bench/**/*.py")), sorted(ROOT.glob("tutorial/**/*.py"))
TESTS = sorted(ROOT.glob("tests/**/*.py"))
MAIN = [ROOT / name for name in MAINLINE if (ROOT / name).exists()]
EVERYTHING = HOUSE + BENCH + TUTORIAL + TESTS

# Each law of form: its function, and the files that it holds for.
LAWS = {
    "statement": (laws.statement, HOUSE),
    "nested-conditional": (laws.nested_conditional, HOUSE),
    "product": (laws.product, HOUSE),
    "tuple-assignment": (laws.tuple_assignment, HOUSE),
    "comprehension": (laws.comprehension, HOUSE),
    "lambda": (laws.lambda_, HOUSE),
    "walrus": (laws.walrus, HOUSE),
    "function-length": (laws.function_length, HOUSE),
    "parameters": (laws.parameters, HOUSE),
    "arguments-in-all": (laws.arguments_in_all, [ROOT / "checkpoint.py", ROOT / "runtime/log.py"]),
    "attributes": (laws.attributes, HOUSE),
    "run-attributes": (laws.run_attributes, [ROOT / "train.py"]),
    "columns": (laws.columns, EVERYTHING),
    "mainline-columns": (laws.mainline_columns, MAIN),
    "mainline-tuple": (laws.mainline_tuple, MAIN),
    "mainline-comprehension": (laws.mainline_comprehension, MAIN),
    "names": (laws.names, MAIN),
    "parameter-name": (laws.parameter_name, MAIN),
    "gradient": (laws.gradient, MAIN),
    "docstring": (laws.docstring, MAIN),
    "arrow": (laws.arrow, EVERYTHING),
    "comment": (laws.comment, EVERYTHING),
    "size": (laws.size, HOUSE + BENCH + TUTORIAL),
    "tests-size": (laws.tests_size, TESTS),
    "outside-function-length": (laws.outside_function_length, BENCH + TUTORIAL + TESTS),
    "readme": (laws.readme, [ROOT / "README.md"])}

# "file:a text that stands on one line of it": why this line stays as it is. Ten in the whole house at most.
STAYS = {}
EXCEPTIONS = Path(__file__).with_name("law_exceptions.json")


def name(path):
    return path.relative_to(ROOT).as_posix()


def unit(path):
    """The room that a file belongs to, or the module that it is."""
    return path.parent.name if path.parent != ROOT else path.stem


def module(path):
    return name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def lines(path):
    return path.read_text().splitlines()


@cache
def tree(path):
    return ast.parse(path.read_text() if path.suffix == ".py" else "", name(path))


def none(problems):
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# -----------------------------------------------------------------------------
# Which files there are

def test_the_root_and_the_rooms():
    there = {p.name for p in ROOT.glob("*.py")}
    none([f"{n} is missing in the root" for n in sorted(FILES - there)]
         + [f"{n} does not belong in the root: add it to FILES, with its line in the README's tree, or put "
            "it into a room" for n in sorted(there - FILES - PLANNED)])
    rooms = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert rooms == ROOMS, f"the rooms are {sorted(ROOMS)}, there are {sorted(rooms)}"
    none([f"{room}/__init__.py has {len(lines(ROOT / room / '__init__.py'))} lines, 1 is allowed: its sign"
          for room in sorted(ROOMS) if len(lines(ROOT / room / "__init__.py")) != 1])


def test_a_reader_is_told_what_each_file_of_the_root_and_each_room_is_for():
    pages = [path.read_text() for path in (ROOT / "README.md", ROOT / "docs/README.md") if path.exists()]
    wanted = sorted(p.name for p in ROOT.glob("*.py")) + [f"{room}/" for room in sorted(ROOMS)]
    none([f"{n} has no line in the README's tree (or docs/README.md) that says what it is for"
          for n in wanted if not any(re.search(rf"(?<![\w/]){re.escape(n)}", page) for page in pages)])


def test_the_files_of_the_rooms_are_listed():
    page = (ROOT / "docs/README.md").read_text()
    none([f"{name(path)} has no line in docs/README.md that says what it is for" for path in HOUSE
          if path.parent != ROOT and path.name != "__init__.py" and name(path) not in page])


def total_lines(files):
    return sum(len(lines(file)) for file in files)


def length_of(file, name):
    """Return the number of lines of a function or a class; "AdamW.step" is the `step` of AdamW.

    "the drawing" is what the docstring of a file shows from `The drawing` to the end of the table below it.
    """
    if name == "the drawing":
        text = ast.get_docstring(ast.parse((ROOT / file).read_text())).partition("The drawing")[2]
        drawing, table = re.split(r"\n\n(?=\S)", text)[:2]
        return len(drawing.splitlines()) + 1 + len(table.splitlines())
    scopes = [ast.parse((ROOT / file).read_text())]
    for part in name.split("."):
        scopes = [node for scope in scopes for node in scope.body
                  if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part]
    node, = scopes
    return node.end_lineno - node.lineno + 1


NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
           "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
SENTENCE = r"These\s+(\w+)\s+passages\s+are\s+(\d+)\s+lines\s+in\s+(\w+)\s+files?"


class Reading(NamedTuple):
    """A table of a page that names what to read, in order, and what the sentence above it says of it."""
    says: tuple   # (functions, lines, files)
    built: list   # [(file, name)] of what runs once, before the first step
    called: list  # [(file, name)] of what runs in each step

    def measured(self):
        """Return (functions, lines, files) as they are."""
        found = self.built + self.called
        total = sum(length_of(*function) for function in found)
        return len(found), total, len({file for file, _ in found})


def readings(page):
    """Return the Readings of a page of docs/, each below "These two passages are 20 lines in one file"."""
    text = (ROOT / "docs" / page).read_text()
    found = []
    for sentence in re.finditer(SENTENCE, text):
        count, total, files = sentence.groups()
        reading = Reading((NUMBERS.index(count), int(total), NUMBERS.index(files)), [], [])
        table = re.search(r"(?:^\|.*\n)+", text[sentence.end():], re.M)[0]
        for when, row in re.findall(r"^\| (once|step) \| (.*?) \|", table, re.M):
            for names, file in re.findall(r"(.*?) in ([\w/]+\.py)(?:, )?", row):
                part = reading.built if when == "once" else reading.called
                part += [(file, name.strip("`")) for name in re.findall(r"`[\w.]+`|the drawing", names)]
        found.append(reading)
    return found


@pytest.mark.parametrize("page,n", [
    ("one-step.md", 2), ("collectives.md", 1), ("zero.md", 2), ("experts.md", 1),
    ("pipeline-schedules.md", 1)])
def test_a_reading_is_as_long_as_its_page_says(page, n):
    found = readings(page)
    assert len(found) == n
    for reading in found:
        says, measured = reading.says, reading.measured()
        is_near = abs(says[1] - measured[1]) <= 0.05 * measured[1]
        assert says[::2] == measured[::2] and is_near, f"docs/{page} says {says}, there are {measured}"


def test_one_step_can_be_read_in_twenty_minutes():
    functions, total, files = readings("one-step.md")[0].measured()
    assert functions <= 14 and total <= 180 and files <= 4, "shorten a function, or take one out of the table"
    page = (ROOT / "docs/one-step.md").read_text().partition("## Second reading")[0]
    minutes = len(re.findall(r"\w[\w.'`-]*", page)) / 220 + total / 15
    said = int(re.search(r"takes\s+about\s+(\d+)\s+minutes", page)[1])
    assert abs(said - minutes) <= 1 and minutes <= 20, f"docs/one-step.md says {said}, it takes {minutes:.1f}"


def test_the_reading_path_is_as_long_as_the_readme_says():
    page = (ROOT / "README.md").read_text()
    first = [ROOT / f for f in re.findall(r"^(\w+\.py)  ", page, re.M)]
    path = [*first, ROOT / "ops/flat.py", ROOT / "ops/permute.py"]
    said = re.search(r"names (\w+)\s+passages,\s+(\d+)\s+lines\s+in\s+(\w+)\s+files", page).groups()
    training = re.search(r"flat\.py and permute\.py, about ([\d,]+)\s+lines", page)[1]
    compared = re.search(r"\| ([\d,]+) of ([\d,]+) \|", page)
    assert said == re.search(SENTENCE, (ROOT / "docs/one-step.md").read_text()).groups()
    of_path = total_lines(path)
    of_house = total_lines(HOUSE)
    for said, found in ((training, of_path), (compared[1], of_path), (compared[2], of_house)):
        said = int(said.replace(",", ""))
        assert abs(said - found) <= 0.05 * found, f"README.md says {said} lines, there are {found}"


# -----------------------------------------------------------------------------
# Who may import whom

def imports(path, nodes=None):
    """[(line, module)] of each import of a file, also inside functions. `from a import b` gives a and a.b."""
    found = []
    for node in ast.walk(tree(path)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module(path).split(".")[:-node.level] if node.level else []
            if node.module:
                base = [*base, node.module]
            found.append((node.lineno, ".".join(base)))
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def uses(path, nodes=None):
    """[(line, room or root module or package)]: the first name of each import."""
    return sorted({(line, target.split(".")[0]) for line, target in imports(path, nodes)})


def outside_functions(node):
    """The nodes that run when a file is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from outside_functions(child)


def test_an_import_only_goes_down():
    problems = []
    for path in HOUSE:
        me = unit(path)
        for line, other in uses(path):
            if other in OUTSIDE:
                problems.append(f"{name(path)}:{line} imports {other}: the house knows nothing of it")
            elif other != me and {me, other} <= LEVEL.keys() and LEVEL[other] <= LEVEL[me]:
                where = "beside" if LEVEL[other] == LEVEL[me] else "above"
                problems.append(f"{name(path)}:{line} imports {other}: that is {where} {me} in ORDER (level "
                                f"{LEVEL[other]}), only levels > {LEVEL[me]} are allowed: move what both "
                                "need down, or hand it over as an argument")
    none(problems)


def test_every_file_has_its_level():
    none([f"{name(path)}: {unit(path)} has no line in ORDER" for path in HOUSE if unit(path) not in LEVEL])


def test_no_circle_within_a_room():
    for room in ROOMS:
        files = {module(p): p for p in HOUSE if unit(p) == room}
        needs = {m: {t for _, t in imports(p) if t in files and t != m} for m, p in files.items()}
        while free := [m for m, wants in needs.items() if not wants & needs.keys()]:
            for m in free:
                del needs[m]
        assert not needs, f"{room}/: 0 circles of imports are allowed, there is one among {sorted(needs)}"


def test_the_mainline_knows_nothing_of_speed_runs_text_and_plans():
    none([f"{name(path)}:{line} imports {other}: of the mainline only train.py knows that room; let train.py "
          "hand the function down" for path in MAIN if path.name != "train.py" for line, other in uses(path)
          if other in ("fast", "runtime", "corpus", "cost")])


def test_a_run_needs_no_planner():
    none([f"{name(path)}:{line} imports plan: runtime/ may not"
          for path in HOUSE if unit(path) == "runtime" for line, other in uses(path) if other == "plan"])


def test_corpus_imports_no_torch_at_the_top_of_a_file():
    """Preparing text starts many processes, and torch takes each of them seconds to import."""
    none([f"{name(path)}:{line} imports torch at the top: import it in the function that needs it"
          for path in HOUSE if unit(path) == "corpus"
          for line, other in uses(path, outside_functions(tree(path))) if other == "torch"])


# -----------------------------------------------------------------------------
# How a line reads

def places(path, line):
    """The places of STAYS that name this line."""
    text = lines(path)[line - 1] if line <= len(lines(path)) else ""
    return [place for place in STAYS
            if place.split(":", 1)[0] == name(path) and place.split(":", 1)[1] in text]


@cache
def violations(law, path):
    """[(line, what is wrong, instead)] by line."""
    function, _ = LAWS[law]
    return sorted(found for found in function(tree(path), lines(path)) if not places(path, found[0]))


def said(law, path, found):
    line, wrong, instead = found
    return f"{name(path)}:{line} {law}: {wrong}. Instead: {instead}"


def allowed():
    """{(file, law): violations that are still there}."""
    return read_exceptions(EXCEPTIONS.read_text()) if EXCEPTIONS.exists() else {}


def read_exceptions(text):
    """Both sides of a merge conflict are read, and the lower number of a line holds."""
    found = {}
    for file, law, digits in re.findall(r'"(\S+) (\S+)": (\d+)', text):
        count = int(digits)
        found[file, law] = min(count, found.get((file, law), count))
    return found


def counted():
    """{(file, law): violations of today}."""
    counts = {(name(path), law): len(violations(law, path))
              for law, (_, paths) in LAWS.items() for path in paths}
    return {place: count for place, count in counts.items() if count}


@pytest.mark.parametrize("law", LAWS)
def test_law(law):
    problems, most = [], allowed()
    for path in LAWS[law][1]:
        found, limit = violations(law, path), most.get((name(path), law), 0)
        if len(found) > limit:
            problems += [said(law, path, each) for each in found]
            problems.append(f"{name(path)} has {len(found)} of these, {limit} are allowed")
        elif len(found) < limit:
            problems.append(f"{name(path)} has {len(found)} violations of {law}, law_exceptions.json says "
                            f"{limit}: lower it to {len(found)} (python tests/test_laws.py --write)")
    none(problems)


def test_exceptions_are_of_laws_and_files_that_there_are():
    places = {(name(path), law) for law, (_, paths) in LAWS.items() for path in paths}
    none([f"law_exceptions.json: {law} does not look at {file}: python tests/test_laws.py --write"
          for file, law in sorted(allowed().keys() - places)])
    text = EXCEPTIONS.read_text()
    numbers = {f"{file} {law}": count for (file, law), count in sorted(allowed().items())}
    assert text == as_text(numbers), "law_exceptions.json was merged: python tests/test_laws.py --write"


def test_a_number_only_falls(monkeypatch, tmp_path):
    file = tmp_path / "exceptions.json"
    monkeypatch.setitem(globals(), "EXCEPTIONS", file)
    monkeypatch.setitem(globals(), "counted", lambda: {("a.py", "walrus"): 2})
    assert write(may_raise=False) == 1 and not file.exists()
    assert write(may_raise=True) == 0 and json.loads(file.read_text()) == {"a.py walrus": 2}
    file.write_text('<<<<<<<\n"a.py walrus": 3,\n"b.py walrus": 1\n=======\n"a.py walrus": 1,\n>>>>>>>\n')
    assert allowed() == {("a.py", "walrus"): 1, ("b.py", "walrus"): 1}
    assert write(may_raise=False) == 1


def test_at_most_ten_lines_stay():
    found = [place for function, paths in LAWS.values() for path in paths for line, *_ in
             function(tree(path), lines(path)) for place in places(path, line)] if STAYS else []
    assert len(STAYS) <= 10, f"{len(STAYS)} lines stay, 10 are allowed: mend one"
    for place in STAYS:
        file, text = place.split(":", 1)
        assert sum(text in line for line in lines(ROOT / file)) == 1, f"{place} is not one line"
        assert place in found, f"{place} breaks no law: take it out of STAYS"


def set_attributes(number, value="1"):
    return "".join(f"        self.a{i} = {value}\n" for i in range(number))


# What breaks a law, and what holds it.
BREAKS = {
    "statement": ["f() if a else g()", "a and f()", "a or f()", "f(), g()", "[f(x) for x in y]"],
    "nested-conditional": ["x = a if b else c if d else e", "x = f(a if b else c) if d else e"],
    "product": ["'s' * (n > 1)", "[x] * bool(n)", "x = [1] * is_first", "f'{a}' * (not b)",
                "(a,) * (b or not c)", "def f(x, quiet=False):\n    return 's' * quiet",
                "done = a > b\nx = ['a'] * done",
                "('', 's')[n > 1]", "bool(n) * 'x'", "'s' * int(a > b)",
                "class A:\n    chat: bool = False\nchat = 1\nx = [y] * flags.chat", "'a' * cfg.bias",
                "def f():\n    x = 1\ndef g(n):\n    x = n > 1\n    return 'a' * x",
                "class A:\n    @property\n    def ok(self):\n        return a == b\nx = 'a' * self.ok"],
    "tuple-assignment": ["a, b, c = 1, 2, 3", "a, (b, c) = 1, f()", "a, b, c = (1, 2, 3) if x else y"],
    "comprehension": ["[x for a in b for c in a for x in c]"],
    "lambda": ["f = lambda: 1", "self.f = lambda x: x", "f, g = lambda: 1, 2", "f = g if a else lambda: 1",
               "f(lambda x: 1 if x else 2)", "f(lambda x: [y for y in x])", "f(lambda: lambda: 1)"],
    "walrus": ["x = [y := 1]", "if a and (b := f()):\n    pass", "if not (a := f()):\n    pass",
               "if (n := f()) > 3:\n    pass", "[y for x in z if (y := f(x))]"],
    "function-length": ["def f():\n" + "    x = 1\n" * 50],
    "parameters": ["def f(a, b, c, d, e, f, g): pass", "def f(self, a, b, c, d, e, f, g): pass"],
    "arguments-in-all": ["def save(a, *, b, c, d, e, f, g): pass",
                         "def metrics_row(a, b, c, d, e, f, g): pass"],
    "attributes": ["class A:\n    def f(self):\n" + set_attributes(17)],
    "run-attributes": ["class Run:\n    def f(self):\n" + set_attributes(13),
                       "@dataclass\nclass Run:\n" + "".join(f"    a{i}: int\n" for i in range(13))],
    "columns": ["x = " + "1" * 107],
    "mainline-columns": ["x = " + "1" * 97],
    "mainline-tuple": ["a, b = 1, 2", "a, b, c, d = f()", "a, b = (1, 2) if x else y", "a, b, c = b, 1, 2"],
    "mainline-comprehension": ["[x for y in z for x in y]", "[[x for x in y] for y in z]",
                               "f(sum(x for x in y) for y in z)"],
    "names": ["def f():\n" + "    a = 1\n" * 20, "def f(w):\n" + "    x = 1\n" * 20,
              "def f():\n" + "    x = 1\n" * 20 + "    for s in x: pass", "def f():\n" + "    w0 = 1\n" * 20],
    "parameter-name": ["p = axis.size", "p, k = 1, 2", "for p in range(3): pass",
                       "def f(ids, p): pass", "def f(p): return range(p)",
                       "def f(p): return 2 * p"],
    "gradient": ["def f(ctx, g): pass", "g = x.grad", "dx, dw = f()", "for g in grads: pass"],
    "docstring": ['"""-> x."""', '"""the sum."""', '"""A sum"""', '"""One\ntwo\nthree."""',
                  'def f():\n    """Sum\n    of\n\n    all."""'],
    "arrow": ['"""-> x."""', 'def f():\n    """-> x."""'],
    "comment": ["# the sum of all ranks", "# The sum. it is small", "# x is\n# the sum",
                "x = 1\n# this one here too",
                "x = 1\n# the sum of all ranks\nf(x)", "# the other ranks would wait\naxis.any(x)",
                "x = 1  # the sum\n# this one is a new comment",
                "class A:\n    # the number of all\n    x: int = 1",
                "# The sum of it (all ranks). then the rest"],
    "size": ["x = 1\n" * 601],
    "tests-size": ["x = 1\n" * 751],
    "outside-function-length": ["def f():\n" + "    x = 1\n" * 60],
    "readme": ["a\n" * 119, "a\n" * 151, "a\n" * 119 + "```\n" + "a\n" * 9 + "```", "a" * 101 + "\na" * 130]}
HOLDS = {
    "statement": ["if a:\n    f()", "x = f() if a else g()", "f(a and b)", "f()", "'text'", "x = a or b"],
    "nested-conditional": ["x = a if b else c", "x = f(a if b else c, d if e else f)"],
    "product": ["'-' * width", "[x] * n", "3 * (a > b)", "['a'] * len(b)", "x * is_first", "[0] * axis.size",
                "'-' * int(width)",
                "'%d' % (a > b)", "x[a > b]"],
    "tuple-assignment": ["a, b, c = f()", "a, b = 1, 2", "a, *b, c = x", "a, b, c = x.shape",
                         "a, b, c = (f(x) for x in y)", "for a, b, c in x: pass"],
    "comprehension": ["[x for a in b for x in a]"],
    "lambda": ["f(key=lambda x: x[1])", "sorted(x, key=lambda a: (a.b, a.c))", "x = f(lambda: 1)"],
    "walrus": ["if x := f():\n    pass", "while x := f():\n    pass", "if (x := f()) is not None:\n    pass",
               "if a:\n    pass\nelif b := f():\n    pass"],
    "function-length": ["def f():\n" + "    x = 1\n" * 49, "@triton.jit\ndef f():\n" + "    x = 1\n" * 60,
                        "@a\n" * 9 + "def f():\n" + "    x = 1\n" * 49],
    "parameters": ["def f(a, b, c, d, e, f, *, g): pass", "def f(self, a, b, c, d, e, f): pass",
                   "class A(Function):\n    def forward(ctx, a, b, c, d, e, f, g): pass",
                   "@triton.jit\ndef f(a, b, c, d, e, f, g): pass"],
    "arguments-in-all": ["def save(a, b, *, c, d, e, f): pass", "def other(a, b, c, d, e, f, g): pass"],
    "attributes": ["class A:\n    def f(self):\n" + "        self.a = 1\n" * 17,
                   "class A(nn.Module):\n    def f(self):\n" + set_attributes(17, "nn.Linear(1, 1)"),
                   "@dataclass\nclass A:\n    def f(self):\n"
                   + set_attributes(17)],
    "run-attributes": ["class Run:\n    def f(self):\n" + set_attributes(12)],
    "columns": ["x = " + "1" * 106],
    "mainline-columns": ["x = " + "1" * 96],
    "mainline-tuple": ["a, b, c = f()", "a, b = b, a", "last, x = x, new", "B, T, h, D = x.shape",
                       "B, *_, D = x.size()", "a, b = b, a + b", "a, b, c, d = x.shape[:4]"],
    "mainline-comprehension": ["[x for x in y]", "[f(x) for x in sorted(y)]"],
    "names": ["def f():\n    a = 1", "def f(B, x, q):\n" + "    i = 1\n" * 20,
              "def f():\n" + "    _ = x1 = 1\n" * 20,
              "def f():\n" + "    rows = 1\n" * 20],
    "parameter-name": ["for p in model.parameters(): pass", "p = nn.Parameter(x)", "p = bucket.params[0]",
                       "for p, share in zip(params, shares): pass", "[p for p in params]", "f(p=1)",
                       "def f(self, p): return p.numel() * 2"],
    "gradient": ["def f(grad): pass", "g = n_kv_head // tp", "grad_x = 1", "self.g = 2", "h, g = x.heads"],
    "docstring": ['"""Return the sum."""', '"""(n, C) -> (T, C)."""', '"""The sum of\nall:\n\n    a  b\n"""',
                  '"""1F1B."""', '"""`x` is it. Is it?"""', "x = 1", '"""\nThe sum of\nall.\n\nMore."""'],
    "arrow": ['"""(n, C) -> (n, C)."""', '"""Return x."""', "'-> x'.strip()"],
    "comment": ["# The sum of all ranks", "# the sum", "x = 1  # the sum of it all", "# --tp 4 is one more",
                "# -----------------\n# the mesh", "# noqa: E501 because of it all",
                "# x_y is the sum. Of all", "# The sum, e.g. of all ranks",
                "# `out` is the sum. `in` is not", "# (n, C) is it all",
                "# train.py is the sum. train.py is", "# The sum of all,\n# over ranks. It is",
                "@dataclass\nclass A:\n    # the number of all\n    x: int = 1",
                "# the sum over the axis, n bytes\naxis.all_reduce(x)", "x = '''\n# the sum of all\n'''",
                "# Thakur et al. write so, vs. others", "# 1) the sum of it",
                "x = 1  # the sum of it\n       # and of what else there is"],
    "size": ["x = 1\n" * 600],
    "tests-size": ["x = 1\n" * 750],
    "outside-function-length": ["def f():\n" + "    x = 1\n" * 59],
    "readme": ["a\n" * 120, "a\n" * 150, "a\n" * 150 + "```\n" + "a\n" * 50 + "```"]}


def found_by(law, code):
    return LAWS[law][0](ast.parse(code) if law != "readme" else None, code.splitlines())


@pytest.mark.parametrize("law", LAWS)
def test_a_law_can_break(law):
    for code in BREAKS[law]:
        found = found_by(law, code)
        assert found, f"{law} says nothing about:\n{code}"
        assert all(line and wrong and instead for line, wrong, instead in found)


@pytest.mark.parametrize("law", LAWS)
def test_a_law_can_hold(law):
    for code in HOLDS[law]:
        assert not found_by(law, code), f"{law} is against:\n{code}\n{found_by(law, code)}"


# -----------------------------------------------------------------------------
# One reader of the environment, nothing left to do

def test_only_two_files_read_the_environment():
    names, problems = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}, []
    for path in HOUSE + BENCH + TUTORIAL:
        for node in ast.walk(tree(path)):
            used = set()
            if isinstance(node, ast.Attribute):
                used = {node.attr} & names
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                used = {alias.name for alias in node.names} & (names | {"*"})
            if used and name(path) not in ("runtime/launch.py", "runtime/launcher.py"):
                problems.append(f"{name(path)}:{node.lineno} uses os.{used.pop()}: 2 files read the "
                                "environment, runtime/launcher.py and runtime/launch.py")
    none(problems)


CUDA_ONLY = {  # place: why it names CUDA. Everything else asks the device's module (ops/accelerator.py)
    "ops/backend.py triton_devices": "which of torch's devices each of Triton's vendors serves",
    "ops/cublas_lt.py DEVICE": "a library of NVIDIA's",
    "ops/cublas_lt.py handle": "the library's handle is of the current device",
    "ops/cublas_lt.py Plan": "the library takes CUDA's stream",
    "ops/wide_product.py use_wide_mm": "a product that torch has for NVIDIA's GPUs",
    "ops/grouped_mm.py has_grouped_mm": "a kernel of Hopper and Blackwell",
    "ops/backend.py is_hopper": "a generation of NVIDIA's GPUs",
    "ops/fp8.py check_device": "which GPUs multiply fp8 numbers",
    "fast/library_kernels.py compile_call": "kernels for NVIDIA's Hopper GPUs",
    "ops/grouped_mm.py pointer_tiles": "its table names NVIDIA's architectures",
    "fast/products.py FastProducts": "memory is given back between two CUDA graphs",
    "fast/products.py Candidate": "the CUDA graph of the calls that are timed",
    "fast/products.py make_candidates": "the same",
    "fast/choose.py has_cuda_api": "the one answer for graphs and peer access",
    "fast/choose.py place_of": "peer access between GPUs",
    "fast/ahead.py Driver": "the name by which Triton knows NVIDIA's GPUs",
    "fast/graph.py GraphedStep": "the CUDA graph",
    "runtime/watch.py Stragglers": "whether a CUDA graph is being recorded",
    "cost/step_time.py expected_choice": "its table of GPUs is NVIDIA's",
    "bench/doctor.py SHOWS": "nvidia-smi", "bench/doctor.py backend": "NCCL's version",
    "bench/floor.py by_library": "it compares cuBLAS and cuBLASLt",
    "bench/floor.py ways": "it compares cuBLAS and cuBLASLt",
    "bench/gpu_matrix.py run_layer": "torch finds hidden synchronisations on CUDA only",
    "bench/moe_layer.py main": "it times CUDA graphs", "bench/timing.py graphed": "the CUDA graph"}


def names_cuda(node):
    """Whether this is torch.cuda, x.is_cuda, "cuda", an import of torch.cuda, or x.cuda()."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("cuda", "is_cuda") and ast.unparse(node) != "self.cuda"
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "torch.cuda" in ast.unparse(node) or getattr(node, "module", "") == "torch" and any(
            alias.name == "cuda" for alias in node.names)
    return isinstance(node, ast.Constant) and str(node.value).split(":")[0] == "cuda"


def test_cuda_is_named_only_where_nothing_else_will_do():
    found = {}  # "file function": line
    for path in HOUSE + BENCH + TUTORIAL:
        for part in tree(path).body:
            where = getattr(part, "name", None) or ast.unparse(getattr(part, "targets", [part])[0])
            for node in ast.walk(part):
                if names_cuda(node):
                    found[f"{name(path)} {where}"] = node.lineno
    none([f"{place}, line {line}, names CUDA: ask the device's module (ops/accelerator.py), or say in "
          "CUDA_ONLY why it cannot" for place, line in found.items() if place not in CUDA_ONLY]
         + [f"{place} names CUDA no more: take it out of CUDA_ONLY"
            for place in sorted(CUDA_ONLY.keys() - found.keys())])


# The model is built within the context of its device, so what __init__ makes is on it.
FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "randperm"}
WITHOUT_DEVICE = {  # place: why a tensor is made on no named device. NCCL sends none in the host's memory
    "moe.py Router": "in __init__", "moe.py MoE": "in __init__", "moe.py Dispatcher": "in __init__",
    "parallel.py parameter": "in __init__ of its module", "parallel.py ranks_of_axes": "for the host"}


def test_a_tensor_of_the_model_is_made_on_a_device():
    found = {}
    for path in MAIN:
        for part in tree(path).body:
            for node in ast.walk(part):
                if is_factory(node) and not {key.arg for key in node.keywords} & {"device", "out"}:
                    found[f"{name(path)} {getattr(part, 'name', '')}"] = node.lineno
    none([f"{place}, line {line}, makes a tensor on no named device: give device=, or say in WITHOUT_DEVICE "
          "why not" for place, line in found.items() if place not in WITHOUT_DEVICE]
         + [f"{place} makes none any more" for place in sorted(WITHOUT_DEVICE.keys() - found.keys())])


def is_factory(node):
    """Whether this calls a function of torch that makes a tensor of numbers."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}


@pytest.mark.parametrize("code,is_one", [
    ("torch.cuda.synchronize()", True), ("x.is_cuda", True), ("d.type == 'cuda'", True), ("x.cuda()", True),
    ("torch.device('cuda:0')", True), ("from torch import cuda", True), ("import torch.cuda as c", True),
    ("torch.accelerator.synchronize()", False), ("cfg.cuda_graph", False), ("'on cuda'", False)])
def test_what_names_cuda(code, is_one):
    assert any(map(names_cuda, ast.walk(ast.parse(code)))) == is_one


def test_nothing_is_left_to_do():
    words = "|".join(("TO" + "DO", "FIX" + "ME"))
    found = subprocess.run(["git", "grep", "-nE", words], cwd=ROOT, capture_output=True, text=True)
    if found.returncode > 1:  # no git checkout, such as a release's archive
        for path in HOUSE + BENCH + TUTORIAL + TESTS:
            assert not re.findall(words, path.read_text()), f"{name(path)}: 0 such words are allowed"
    assert found.stdout == "", f"0 lines are allowed:\n{found.stdout}"


# -----------------------------------------------------------------------------
# The command line

def show(files):
    """Print the violations of these files, and return how many there are."""
    total = 0
    for file in files:
        path = Path(file).resolve()
        found = [(each, law) for law, (_, paths) in LAWS.items() if path in paths
                 for each in violations(law, path)]
        total += len(found)
        for each, law in sorted(found):
            print(said(law, path, each))
    print(f"{total} violations")
    return total


def print_counts():
    counts, totals = counted(), dict.fromkeys(LAWS, 0)
    for (_, law), count in counts.items():
        totals[law] += count
    for law, total in totals.items():
        files = len({file for file, other in counts if other == law})
        print(f"{law:24} {total:5} in {files:3} files")
    print(f"{'all':24} {sum(totals.values()):5}")
    for what, paths in (("house", HOUSE), ("mainline", MAIN)):
        print(f"{sum(len(lines(path)) for path in paths)} lines in {len(paths)} files of the {what}")


def as_text(numbers):
    return json.dumps(numbers, indent=0) + "\n"


def write(may_raise):
    """Write today's numbers, and return the exit code."""
    counts, before = counted(), allowed()
    higher = [f"{file} {law}: {before.get((file, law), 0)} -> {count}" for (file, law), count
              in sorted(counts.items()) if count > before.get((file, law), 0)]
    if higher and not may_raise:
        print("\n".join(higher))
        print("refused: a number only falls (mend the lines, or --raise what was moved)")
        return 1
    numbers = {f"{file} {law}": count for (file, law), count in sorted(counts.items())}
    EXCEPTIONS.write_text(as_text(numbers))
    return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--raise", action="store_true", dest="may_raise")
    arguments = parser.parse_args()
    if arguments.count:
        print_counts()
    if arguments.write:
        sys.exit(write(arguments.may_raise))
    if arguments.files and show(arguments.files):
        sys.exit(1)


if __name__ == "__main__":
    main()

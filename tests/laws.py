"""The laws of this repository: no squeezed line, imports that go down, no part larger than its limit.

    python tests/laws.py FILE...   what these files break; exit code 1 if there is something

test_laws.py holds every file to them. A law of form is a function of a file's tree that returns
[(line, what is wrong)].
"""
import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["ops", "fast", "runtime", "interface", "corpus", "cost", "hub"]
READING_PATH = ["train.py", "model.py", "layers.py", "attention.py", "moe.py", "parallel.py", "ddp.py",
                "zero.py", "pipeline.py", "optim.py", "muon.py", "ops/permute.py"]
LAUNCH_FILES = ["runtime/launch.py", "bench/common.py"]  # the second gives it to commands, without a launcher
COLUMNS, READING_COLUMNS, FUNCTION_LINES, FILE_LINES = 110, 100, 60, 600

# An import goes from a line to one further down. `config` is below everything: each program and each room
# parses its command line there, so it has to be importable from everywhere, and imports none of us itself.
ORDER = ["train",
         "sample prepare",
         "convert",  # below sample, which reads directories of Hugging Face through it
         "hub",
         "runtime plan",
         "plot",  # below runtime: a run draws its curves at its end
         "cost",
         "fast",
         "pipeline",
         "model",
         "attention",
         "layers",
         "moe optim",
         "muon",  # below optim: an Optimizer has a Muon, as it has an AdamW
         "zero",
         "ddp",
         "parallel skip",
         "checkpoint corpus",
         "ops interface",
         "config"]
LEVEL = {unit: level for level, line in enumerate(ORDER) for unit in line.split()}

# A part of the repository: how many lines and files it may have, in all
LIMITS = {
    "reading path": (3600, 12), "ops, fast": (3000, 24), "runtime, interface": (4000, 30),
    "corpus, cost, programs": (5600, 34), "house": (16000, 100), "bench": (4200, 30),
    "tests": (21000, 85), "pages": (3200, 18), "tutorial": (4450, 15), "scripts": (950, 20)}
HOUSE = list(LIMITS)[:4]  # the parts of the house
TEXTS = {"bench": (".py", ".sh", ".js", ".html", ".pbs", ".slurm"),
         "tests": (".py", ".sh", ".json", ".txt", ".toml", ".md")}


# -----------------------------------------------------------------------------
# Nothing is squeezed

COMPREHENSION = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef


def inside(node, kinds):
    """Whether a node of these kinds stands below a node."""
    return any(isinstance(child, kinds) for child in ast.walk(node) if child is not node)


def is_condition(node):
    """Whether an expression is true or false, as far as it shows."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "bool"
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negated or isinstance(node, (ast.Compare, ast.BoolOp))


def is_text_or_list(node):
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp))


def count_values(value):
    """Return how many values a right side lists, in the longer branch. Constants count as one value."""
    if isinstance(value, ast.IfExp):
        return max(count_values(value.body), count_values(value.orelse))
    if not isinstance(value, ast.Tuple) or all(isinstance(x, ast.Constant) for x in value.elts):
        return 1
    return sum(count_values(x) for x in value.elts)


def squeezed_expression(node):
    """Return what is squeezed in an expression, or None."""
    if isinstance(node, ast.IfExp) and inside(node, ast.IfExp):
        return "a conditional inside another: a function or a statement with an `if` per case"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for thing, factor in ((node.left, node.right), (node.right, node.left)):
            if is_text_or_list(thing) and is_condition(factor):
                return "a text or a list times a condition: `if`"
    is_literal = isinstance(node, ast.Subscript) and (
        is_text_or_list(node.value) or isinstance(node.value, ast.Dict))
    if is_literal and is_condition(node.slice):
        return "a condition chooses from a literal: `if`"
    if isinstance(node, ast.Lambda) and inside(node, (ast.IfExp, ast.Lambda)):
        return "a lambda with a branch: a function with a name"
    if isinstance(node, COMPREHENSION):
        if len(node.generators) > 2:
            return "a comprehension with more than two `for`: a loop"
        if inside(node, ast.NamedExpr):
            return "`:=` in a comprehension: a loop"
    return None


def squeezed_statement(node):
    """Return what is squeezed in a statement, or None."""
    if isinstance(node, ast.Expr):
        if isinstance(node.value, (ast.IfExp, ast.BoolOp)):
            return "a condition as a statement: `if`"
        if isinstance(node.value, (ast.Tuple, ast.List)):
            return "several calls as one statement: a line each"
        if isinstance(node.value, COMPREHENSION):
            return "a comprehension as a statement: a loop"
    is_unpacked = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Tuple, ast.List))
    if is_unpacked and count_values(node.value) > 2:
        return "three and more assignments in one: a line each"
    return None


def second_statements(tree):
    """Return the lines on which a second statement begins, after a `;` or a `:`."""
    starts = Counter(node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return [line for line, count in starts.items() if count > 1]


def squeezed(tree):
    """Every statement has its line, and a name or a loop stands for a clever expression."""
    found = [(line, "a second statement on a line") for line in second_statements(tree)]
    for node in ast.walk(tree):
        wrong = squeezed_expression(node) or squeezed_statement(node)
        if wrong:
            found.append((node.lineno, wrong))
    return found


# -----------------------------------------------------------------------------
# Length

def long_functions(tree):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            n = node.end_lineno - node.lineno + 1
            if n > FUNCTION_LINES:
                found.append((node.lineno, f"{node.name} has {n} lines, {FUNCTION_LINES} are allowed"))
    return found


def long_lines(lines, most):
    return [(number, f"{len(line)} columns, {most} are allowed")
            for number, line in enumerate(lines, 1) if len(line) > most]


def part_of(path):
    """Return the part of the repository in which a file counts, or None: it is data."""
    top = path.split("/")[0]
    if top == "docs" or path.endswith(".md") and ("/" not in path or top == "bench"):
        return "pages"
    if top in ("tutorial", "scripts"):
        return top
    if top in TEXTS:
        return top if path.endswith(TEXTS[top]) else None
    if not path.endswith((".py", ".html")):
        return None
    if path in READING_PATH:
        return "reading path"
    rooms = {"ops": "ops, fast", "fast": "ops, fast",
             "runtime": "runtime, interface", "interface": "runtime, interface"}
    return rooms.get(top, "corpus, cost, programs")


def sizes(paths):
    """Return {part: (lines, files)} of these files."""
    found = {part: (0, 0) for part in LIMITS}
    for path in paths:
        part = part_of(path)
        if part is None or not (ROOT / path).exists():
            continue
        n = len((ROOT / path).read_text(errors="replace").splitlines())
        for name in (part, "house") if part in HOUSE else (part,):
            lines, files = found[name]
            found[name] = lines + n, files + 1
    return found


def tracked_files():
    """Return the files that git tracks, or [] where this is no checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return listed.stdout.splitlines()


# -----------------------------------------------------------------------------
# Imports and the environment

def imports(tree):
    """Return [(line, module)] of each import, also inside functions. `from a import b` is a and a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def imports_that_go_up(tree, path):
    """An import goes down in ORDER. Of the reading path, only train.py knows of speed, runs and text."""
    me = path.split("/")[0].removesuffix(".py")
    found = []
    for line, other in sorted({(line, module.split(".")[0]) for line, module in imports(tree)}):
        if other in ("bench", "tests", "tutorial", "scripts"):
            found.append((line, f"imports {other}, which is above all of the house"))
        elif other != me and other in LEVEL and LEVEL[other] <= LEVEL[me]:
            found.append((line, f"imports {other}, which is not below {me} in ORDER"))
        elif other in ("fast", "runtime", "corpus", "cost") and path in READING_PATH and me != "train":
            found.append((line, f"imports {other}: train.py hands it down"))
    return found


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment(tree):
    """Return the lines that read or change the environment."""
    found = []
    for node in ast.walk(tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        if ENVIRONMENT & set(names):
            found.append((node.lineno, "reads the environment: " + " and ".join(LAUNCH_FILES) + " do"))
    return found


# -----------------------------------------------------------------------------
# Which files a law holds for

def is_house(path):
    return "/" not in path or path.split("/")[0] in ROOMS


def violations(path):
    """Return [(line, what is wrong)] of a file, by line. The path is relative to ROOT."""
    text = (ROOT / path).read_text()
    tree, lines = ast.parse(text), text.splitlines()
    found = long_functions(tree)
    found += long_lines(lines, READING_COLUMNS if path in READING_PATH else COLUMNS)
    if len(lines) > FILE_LINES:
        found.append((len(lines), f"the file has {len(lines)} lines, {FILE_LINES} are allowed"))
    if is_house(path):
        found += imports_that_go_up(tree, path)
    if not path.startswith("tests/"):
        found += squeezed(tree)
    if not path.startswith("tests/") and path not in LAUNCH_FILES:
        found += environment(tree)
    return sorted(found)


def main(paths):
    found = [f"{path}:{line} {wrong}" for path in paths for line, wrong in violations(path)]
    for line in found:
        print(line)
    print(f"{len(found)} violations")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

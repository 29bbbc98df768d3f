"""The laws of the house: which files there are, who may import whom, and how long things may be."""
import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# of the root, with the lines that each may have. model.py has a rank's own chunks of layers and of sequences,
# and attends over gathered keys, and has the masked language model's head; pipeline.py walks 1F1B of several
# chunks, and continues a conversation
FILES = {
    "train.py": 350, "model.py": 430, "moe.py": 350, "parallel.py": 450, "pipeline.py": 305, "optim.py": 350,
    "skip.py": 150, "config.py": 450, "checkpoint.py": 450, "prepare.py": 450, "sample.py": 450,
    "plan.py": 450, "plot.py": 250}
# may come, need not. convert.py also finds what a directory holds, a run of ours or a model of theirs, which
# sample.py and the export share, and writes the model card
PLANNED = {"zero.py": 250, "muon.py": 250, "convert.py": 430}
# lines of a room. interface/ holds what several rooms share and none owns: without it ops/ would hold
# JSON schemas, runtime/ the files that plot.py and checkpoint.py write too, and config.py the parser of every
# program's command line. fast/ had 800 before ZeRO-2 and 3 travelled as peer copies, too. cost/ had 700 lines
# before it predicted what ZeRO-2 and 3, stages of several chunks and context parallelism hold and send, 820
# before it knew the masked language model, whose head sees few rows and whose attention sees all; ops/ had
# 1,000 before a target could take no part in the cross-entropy, corpus/ 1,200 before it read and wrote
# tokenizers, config.json and chat templates of Hugging Face, conversations and masks, runtime/ 1,920 before a
# run could start from any checkpoint of the same shape, 1,970 before MPI's part of the start had its own file
ROOMS = {"ops": 1100, "fast": 880, "runtime": 2200, "corpus": 1840, "cost": 855, "interface": 700}
READING_PATH, PATH_LINES = ("train.py", "model.py", "moe.py", "parallel.py", "pipeline.py", "optim.py"), 2100
COMMENTS = 15, 25  # percent of the reading path's lines that are not blank
FILE_LINES, TEST_LINES, FUNCTION_LINES, COLUMNS = 450, 750, 60, 110
README = 220, 100  # lines, columns

# an import goes from a line to one further down. config is below everything: each program and each room
# parses its command line there, so it has to be importable from everywhere, and imports none of us itself
ORDER = ["train",
         "sample plot prepare",
         "convert",  # below sample, which reads directories of Hugging Face through it
         "runtime plan",
         "cost",
         "fast",
         "pipeline",
         "model",
         "moe optim",
         "zero muon",
         "parallel",
         "skip checkpoint corpus",
         "ops interface",
         "config"]
LEVEL = {unit: level for level, line in enumerate(ORDER) for unit in line.split()}
OUTSIDE = {"bench", "tests", "tutorial", "scripts"}  # above the house: it imports nothing of theirs

HOUSE = sorted(p for room in (".", *ROOMS) for p in ROOT.glob(f"{room}/*.py"))
BENCH, TUTORIAL = sorted(ROOT.glob("bench/**/*.py")), sorted(ROOT.glob("tutorial/**/*.py"))
TESTS = sorted(ROOT.glob("tests/**/*.py"))


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
    return ast.parse(path.read_text(), name(path))


def imports(path, nodes=None):
    """[(line, module)] of each import of a file, also inside functions. `from a import b` gives a and a.b."""
    found = []
    for node in ast.walk(tree(path)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module(path).split(".")[:-node.level] if node.level else []
            base = ".".join([*package, *[node.module] * bool(node.module)])
            found += [(node.lineno, base)] + [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
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


def none(problems):
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# -----------------------------------------------------------------------------
# which files there are

def test_the_root_and_the_rooms():
    there = {p.name for p in ROOT.glob("*.py")}
    none([f"{n} is missing in the root" for n in sorted(FILES.keys() - there)]
         + [f"{n} does not belong in the root: its {len(FILES)} files are above, the rest lives in rooms"
            for n in sorted(there - FILES.keys() - PLANNED.keys())])
    rooms = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert rooms == ROOMS.keys(), f"the rooms are {sorted(ROOMS)}, there are {sorted(rooms)}"
    none([f"{room}/__init__.py has {len(lines(ROOT / room / '__init__.py'))} lines, 1 is allowed: its sign"
          for room in ROOMS if len(lines(ROOT / room / "__init__.py")) != 1])


# -----------------------------------------------------------------------------
# who may import whom

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
                                f"{LEVEL[other]}), only levels > {LEVEL[me]} are allowed")
    none(problems)


def test_no_circle_within_a_room():
    for room in ROOMS:
        files = {module(p): p for p in HOUSE if unit(p) == room}
        needs = {m: {t for _, t in imports(p) if t in files and t != m} for m, p in files.items()}
        while free := [m for m, wants in needs.items() if not wants & needs.keys()]:
            for m in free:
                del needs[m]
        assert not needs, f"{room}/: 0 circles of imports are allowed, there is one among {sorted(needs)}"


def test_the_model_knows_nothing_of_speed_runs_text_and_plans():
    none([f"{name(path)}:{line} imports {other}: of the reading path only train.py knows that room"
          for path in (ROOT / f for f in READING_PATH if f != "train.py") for line, other in uses(path)
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
# how long things may be

def test_files():
    limits = {**dict.fromkeys(HOUSE + BENCH + TUTORIAL, FILE_LINES), **dict.fromkeys(TESTS, TEST_LINES),
              **{ROOT / n: most for n, most in {**FILES, **PLANNED}.items()}}
    none([f"{name(path)} has {len(lines(path))} lines, {most} are allowed"
          for path, most in limits.items() if path.exists() and len(lines(path)) > most])


def test_columns():
    none([f"{name(path)}:{i} has {len(line)} columns, {COLUMNS} are allowed"
          for path in HOUSE + BENCH + TUTORIAL + TESTS for i, line in enumerate(lines(path), 1)
          if len(line) > COLUMNS])


def test_rooms():
    total = {room: sum(len(lines(p)) for p in HOUSE if unit(p) == room) for room in ROOMS}
    none([f"{room}/ has {total[room]} lines, {most} are allowed"
          for room, most in ROOMS.items() if total[room] > most])


def test_functions():
    problems = []
    for path in HOUSE + BENCH + TUTORIAL:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    problems.append(f"{name(path)}:{node.lineno} {node.name} has {length} lines, "
                                    f"{FUNCTION_LINES} are allowed")
    none(problems)


def test_the_reading_path():
    each = {n: len(lines(ROOT / n)) for n in READING_PATH}
    assert sum(each.values()) <= PATH_LINES, f"{each}: {sum(each.values())} lines, {PATH_LINES} are allowed"


def explained(path):
    """-> (lines of comments and docstrings, lines that are not blank). Comments behind code do not count."""
    found = {i for i, line in enumerate(lines(path), 1) if line.strip().startswith("#")}
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False):
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    written = {i for i, line in enumerate(lines(path), 1) if line.strip()}
    return len(found & written), len(written)


def test_the_reading_path_is_explained():
    each, (least, most) = {n: explained(ROOT / n) for n in READING_PATH}, COMMENTS
    share = 100 * sum(few for few, _ in each.values()) / sum(all_ for _, all_ in each.values())
    shares = ", ".join(f"{n} {100 * few / all_:.1f}" for n, (few, all_) in each.items())
    assert least <= share <= most, (f"{share:.1f} % of the reading path's lines are comments and docstrings, "
                                    f"{least} to {most} are allowed ({shares})")


def test_readme():
    text, (most, columns) = lines(ROOT / "README.md"), README
    wide = [i for i, line in enumerate(text, 1) if len(line) > columns]
    none([f"README.md has {len(text)} lines, {most} are allowed"] * (len(text) > most)
         + [f"README.md: {len(wide)} lines have more than {columns} columns: {wide}"] * bool(wide))


# -----------------------------------------------------------------------------
# one reader of the environment, nothing left to do

def test_only_launch_reads_the_environment():
    names, problems = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}, []
    for path in HOUSE + BENCH + TUTORIAL:
        for node in ast.walk(tree(path)):
            used = set()
            if isinstance(node, ast.Attribute):
                used = {node.attr} & names
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                used = {alias.name for alias in node.names} & (names | {"*"})
            if used and name(path) != "runtime/launch.py":
                problems.append(f"{name(path)}:{node.lineno} uses os.{used.pop()}: 1 file reads the "
                                "environment, runtime/launch.py")
    none(problems)


CUDA_ONLY = {  # place: why it names CUDA. everything else asks the device's module (ops/accelerator.py)
    "ops/backend.py triton_devices": "which of torch's devices each of Triton's vendors serves",
    "ops/grouped_mm.py has_grouped_mm": "a kernel of Hopper and Blackwell",
    "ops/grouped_mm.py tiles": "its table names NVIDIA's architectures",
    "fast/choose.py has_cuda_api": "the one answer for graphs and peer access",
    "fast/choose.py peer_access": "peer access between GPUs",
    "fast/graph.py GraphedStep": "the CUDA graph",
    "runtime/watch.py Stragglers": "whether a CUDA graph is being recorded",
    "cost/step_time.py expected_choice": "its table of GPUs is NVIDIA's",
    "bench/doctor.py SHOWS": "nvidia-smi", "bench/doctor.py backend": "NCCL's version",
    "bench/gpu_matrix.py no_hidden_sync": "torch finds hidden synchronisations on CUDA only",
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

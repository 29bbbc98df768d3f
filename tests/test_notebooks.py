"""The notebooks of tutorial/: their commands and flags exist, they hold no output; `make long` runs them."""
import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from pool import ROOT
from test_recipes import check_command, commands_in, commands_of

import config
from interface.command_line import parse

NOTEBOOKS = ["first_steps.ipynb", "parallelism.ipynb"]
MAGIC = "%%bash\n"


def read(name):
    return json.loads((ROOT / "tutorial" / name).read_text())


def code_of(notebook):
    """Return [source] of the cells with code."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def calls(name):
    """Return [(ranks, [program, argument, ...])] of the notebook's %%bash cells."""
    cells = [source for source in code_of(read(name)) if source.startswith(MAGIC)]
    lines = "\n".join(cells).replace("\\\n", " ").splitlines()
    return [(ranks, [program, *argv]) for ranks, program, argv in commands_in(lines)]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_holds_no_output_its_python_is_python_and_its_links_exist(name):
    notebook = read(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    for source in code_of(notebook):
        if not source.startswith(MAGIC):
            ast.parse(source)
    text = "".join(line for cell in notebook["cells"] for line in cell["source"])
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "tutorial" / link).exists(), link


def test_their_commands_are_taken():
    runs = [call for name in NOTEBOOKS for call in calls(name)]
    programs = {"prepare.py", "train.py", "plot.py", "sample.py", "checkpoint.py", "plan.py", "out/broken.py",
                "bench/equal_one.py"}
    assert {argv[0] for _, argv in runs} == programs
    trained = set()
    for ranks, argv in runs:
        program, *flags = [word for word in argv if word != "out/broken.py"]
        check_command(ranks, program, flags)
        if program == "train.py":
            trained.add(parse(flags).out)
        elif program != "prepare.py":
            assert {word for word in flags if word.startswith("out/")} <= trained, argv


SHOWN = {
    "first_steps.ipynb": ["lowest validation loss", "┌──", "as if it chose among", "equal: all 117 tensors"],
    "parallelism.ipynb": ["dp 2 tp 2", "predicted / measured", "NOT EQUAL: 4 ranks", "equal: 4 ranks"]}


@pytest.mark.parametrize("program", ["smoke", "collectives", "equal_one"])
def test_the_flags_of_other_programs_are_in_their_help(program, monkeypatch, capsys):
    """Of the notebooks and of the tutorial's text."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    with pytest.raises(SystemExit):
        importlib.import_module(program).main(["--help"])
    text = capsys.readouterr().out
    typed = [argv for name in NOTEBOOKS for _, argv in calls(name)]
    typed += [[name, *argv] for _, name, argv in commands_of("tutorial/README.md")]
    files = {f"{program}.py", f"bench/{program}.py"}
    flags = {word for argv in typed if argv[0] in files for word in argv if word.startswith("--")}
    assert flags
    for flag in flags:
        assert flag in text or flag[2:].replace("-", "_") in config.Config.__dataclass_fields__, flag


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, tmp_path):
    pytest.importorskip("nbconvert", reason="pip install -r requirements-notebooks.txt")
    pytest.importorskip("ipykernel", reason="pip install -r requirements-notebooks.txt")
    clone = tmp_path / "nanoshard"
    leave = shutil.ignore_patterns(".git", ".venv", "data", "out", "__pycache__", "results")
    shutil.copytree(ROOT, clone, ignore=leave)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", f"--output-dir={tmp_path}",
               f"tutorial/{name}"]
    environment = {**os.environ, "JUPYTER_PLATFORM_DIRS": "1", "HOME": str(tmp_path),
                   "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads((tmp_path / name).read_text())["cells"]
    printed = "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))
    for words in SHOWN[name]:
        assert words in printed, words

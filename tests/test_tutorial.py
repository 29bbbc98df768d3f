"""The tutorial: each exercise fails until it is solved; the commands, files and names in the text exist."""
import inspect
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import change_it
import pytest
import torch
from pool import ROOT, run_ranks
from runs import chars, session
from test_recipes import commands_of

import plan
from cost.step_time import GPUS
from interface.command_line import parse
from tutorial import exercises, solutions, test_exercises
from tutorial.grader import equal
from tutorial.mistakes import MISTAKES
from tutorial.run import BLOCK

TEXT = (ROOT / "tutorial/README.md").read_text()
BLOCKS = BLOCK.findall(TEXT)
TESTS = [name for name in vars(test_exercises) if name.startswith("test_chapter_")]


def test_every_file_that_the_text_names_exists():
    names = set(re.findall(r"`([\w/]+\.(?:py|md|slurm|pbs|sh))`", TEXT))
    assert {"train.py", "corpus/tokenizer.py", "runtime/launch.py", "bench/doctor.py"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_class_and_function_to_read_is_in_the_files_beside_it():
    """Each `name` in a paragraph that begins with Read is a class or function of a file in that paragraph."""
    paragraphs = re.findall(r"^\*\*Read\*\* (.*?)\n\n", TEXT, re.M | re.S)
    assert len(paragraphs) == 16
    for paragraph in paragraphs:
        quoted = re.findall(r"`([^`]+)`", paragraph)
        code = "\n".join((ROOT / name).read_text() for name in quoted if name.endswith(".py"))
        for name in quoted:
            if re.fullmatch(r"[A-Za-z_.]+(\(\))?", name) and not (ROOT / name).exists():
                for part in name.removesuffix("()").split("."):
                    assert re.search(rf"^\s*(def|class) {part}\b", code, re.M), (name, paragraph)


@pytest.mark.parametrize("flags, outcome", [
    ([], "1 failed"), pytest.param(["--solutions"], "1 passed", marks=pytest.mark.long)])
def test_the_command_that_the_reader_types(flags, outcome):
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tutorial", "-k", "chapter_09"]
    done = subprocess.run([sys.executable, *command, *flags], cwd=ROOT, capture_output=True, text=True)
    assert outcome in done.stdout.splitlines()[-1] and done.returncode == (not flags), done.stdout[-3000:]


@pytest.mark.parametrize("name", TESTS)
def test_each_exercise_fails_at_first_and_passes_with_its_solution(name):
    test, chapter = getattr(test_exercises, name), int(name.split("_")[2])
    with pytest.raises((NotImplementedError, AssertionError), match=f"chapter {chapter}: "):
        test(exercises)  # run_ranks makes an AssertionError of a rank's NotImplementedError
    test(solutions)


EXERCISE = re.compile(r'(?:check|grade)\(yours, "(\w+)"')  # the exercise that a test grades
TEST_OF = {EXERCISE.search(inspect.getsource(getattr(test_exercises, name)))[1]: name for name in TESTS}


@pytest.mark.parametrize("name", [name for name, value in vars(exercises).items() if inspect.isfunction(value)
                                  and value.__module__ == exercises.__name__])
def test_each_exercise_has_a_test_that_recognises_its_usual_mistakes(name):
    test = getattr(test_exercises, TEST_OF[name])
    for wrong, sentence in MISTAKES[name]:
        with pytest.raises(pytest.fail.Exception) as failure:
            test(SimpleNamespace(**{name: wrong}))
        said, place = str(failure.value).splitlines()
        assert said == sentence and place.startswith(f"  ({wrong.__name__}) {name}"), wrong.__name__


def test_a_mistake_that_nobody_knows_is_shown_with_its_first_wrong_answer():
    def two_mistakes(code, step_before, step_after):
        return "requeue" if code else "look"

    with pytest.raises(pytest.fail.Exception, match=r"^after_job\(0, 0, 400\) -> 'look'; right is 'done'$"):
        test_exercises.test_chapter_09(SimpleNamespace(after_job=two_mistakes))
    with pytest.raises(ZeroDivisionError):
        test_exercises.test_chapter_09(SimpleNamespace(after_job=lambda *_: 1 // 0))


def test_answers_are_equal_but_for_rounding_and_the_kind_of_sequence():
    nan = torch.tensor([1.0, math.nan])
    for a, b in ((0.1 + 0.2, 0.3), ([1, (2.0,)], (1, [2])), (nan, nan.clone()), ({1: 0.3}, {1: 0.1 + 0.2})):
        assert equal(a, b)
    for a, b in ((0.3, 0.301), ([1], [1, 2]), (nan, nan[:1]), ({1: 1.0}, {2: 1.0}), (None, 0), (nan, 1.0),
                 (ValueError(), 1), (ValueError(), KeyError())):
        assert not equal(a, b) and not equal(b, a)


# -----------------------------------------------------------------------------
# The commands of the text

@pytest.mark.long
def test_the_training_commands_run(tmp_path):
    """Each command, two steps long and on a small text: train.main in as many processes as it has ranks.
    Commands that differ in what is made small, or only in names and seeds, run once."""
    less = ["--data", str(chars(tmp_path)), "--steps=2", "--log-every=1", "--eval-every=0", "--n-embd=16",
            "--n-layer=4", "--seq-len=16", "--seed=1"]
    runs = [(n, argv) for n, program, argv in commands_of("tutorial/README.md")
            if program == "train.py" and {"--steps", "--out"} <= {*argv}]  # the others need GPUs
    seen = set()
    for i, (n, argv) in enumerate(runs):
        what = n, parse([*argv, *less, "--out=same"])
        # The prompt has letters that the small text lacks. What --init-from reads has another size.
        if what in seen or {"--prompt", "--init-from"} & set(argv):
            continue
        seen.add(what)
        for got in run_ranks(n, session, [*argv, *less, f"--out={tmp_path}/{i}"]):
            assert got["code"] == 0, (argv, got["err"])
        rows = [json.loads(line) for line in (tmp_path / str(i) / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
    assert len(seen) >= 14


def test_the_answers_of_chapter_15(capsys):
    def printed(command):
        plan.main(command.split())
        return capsys.readouterr().out

    text = printed("bloom-176b --gpus 384 --gpu h200 --tp 4 --pp 6 --pp-chunks 2 --zero 1 --tokens 366e9")
    assert round(int(re.search(r"GPU-hours +([\d,]+)$", text)[1].replace(",", "")), -4) == 220_000
    layout = "--tp 4 --pp 4 --zero 1 --global-batch 2000"
    text = printed(f"bloom-176b --gpus 400 --gpu h200 {layout} --tokens 366e9")
    assert "dp 25" in text and re.search(r"days +23\.39\n", text)
    text = printed("llama-7b --gpus 400 --gpu h200 --dtype fp32")
    assert 138.8 < float(re.search(r"sum +([\d.]+)\n", text)[1]) < 139.8
    assert 541_165.9e6 / GPUS["h200"].net == pytest.approx(13.5, abs=0.05)


def test_the_change_of_chapter_12_is_the_one_that_is_tested():
    assert [body for kind, body in BLOCKS if kind == "diff"] == [change_it.diffs()["activation"]]

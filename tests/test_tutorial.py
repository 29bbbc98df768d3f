"""The tutorial: each exercise fails until it is solved; the commands, files and names in the text exist."""
import importlib
import itertools
import json
import operator
import os
import re
import shlex
import statistics
import sys
from pathlib import Path

import change_it
import pytest
import torch
import torch.distributed as dist
from pool import ROOT, context, run_ranks
from runs import chars, session

import config
import prepare
import train
from interface.command_line import parse
from interface.layout import check_layout
from parallel import make_mesh
from runtime import launch
from tutorial import exercises, solutions, test_exercises
from tutorial.run import BLOCK, FILL, LONG, commands, refresh

TEXT = (ROOT / "tutorial/README.md").read_text()
BLOCKS = BLOCK.findall(TEXT)
COMMANDS = [line for kind, body in BLOCKS if kind == "sh" for line in commands(body)]
NOT_RUN = [line for kind, body in BLOCKS if kind == "bash" for line in commands(body)]  # they need GPUs
CHAPTERS = [f"{i:02d}" for i in range(15)]
TESTS = [name for name in vars(test_exercises) if name.startswith("test_chapter_")]


def test_every_chapter_has_its_parts():
    parts = re.split(r"^## (?=\d)", TEXT.split("## And then")[0], flags=re.M)[1:]
    assert [part.split()[0] for part in parts] == [str(int(i)) for i in CHAPTERS]
    for i, part in enumerate(parts):
        for needed in ("```sh\n", "**Read** ", "**Exercise** ", f"-k chapter_{i:02d}`"):
            assert needed in part, f"chapter {i} lacks {needed!r}"
        for name in re.findall(r"\*\*Exercise\*\* `(\w+)`", part):
            assert callable(getattr(exercises, name)) and callable(getattr(solutions, name))


def test_lines_have_at_most_100_columns():
    """The lines of a diff may be longer, because they are code."""
    diffs = "".join(body for kind, body in BLOCKS if kind == "diff").splitlines()
    assert [x for x in TEXT.splitlines() if len(x) > 100 and x not in diffs] == []


def test_every_file_that_the_text_names_exists():
    names = set(re.findall(r"`([\w/]+\.(?:py|md|slurm|pbs|sh))`", TEXT))
    assert {"train.py", "corpus/tokenizer.py", "runtime/launch.py", "bench/doctor.py"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_class_and_function_to_read_is_in_the_files_beside_it():
    """Each `name` in a paragraph that begins with Read is a class or function of a file in that paragraph."""
    paragraphs = re.findall(r"^\*\*Read\*\* (.*?)\n\n", TEXT, re.M | re.S)
    assert len(paragraphs) == len(CHAPTERS)
    for paragraph in paragraphs:
        quoted = re.findall(r"`([^`]+)`", paragraph)
        code = "\n".join((ROOT / name).read_text() for name in quoted if name.endswith(".py"))
        for name in quoted:
            if re.fullmatch(r"[A-Za-z_.]+(\(\))?", name) and not (ROOT / name).exists():
                for part in name.removesuffix("()").split("."):
                    assert re.search(rf"^\s*(def|class) {part}\b", code, re.M), (name, paragraph)


def test_the_functions_that_grep_looks_for_in_the_profile_exist():
    patterns = re.findall(r'^grep -oE "\[0-9.\]\+ \((.*)\)" out/ch05/profile.txt$', TEXT, re.M)
    assert len(patterns) == 2
    for name in {name for pattern in patterns for name in pattern.split("|")}:
        assert callable(operator.attrgetter(name)(train)), name


def pytest_in_a_new_process(argv, output):
    """Run python -m pytest ARGV in the root, with its stdout in the file output.

    torch is imported already, but the modules of tests/ and tutorial/ must be imported again.
    """
    os.chdir(ROOT)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p) not in (ROOT, ROOT / "tests"))]
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if name == "tutorial" or file.parent in (ROOT / "tests", ROOT / "tutorial"):
            del sys.modules[name]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *argv]))


@pytest.mark.parametrize("flags, outcome", [([], "2 failed"), (["--solutions"], "2 passed")])
def test_the_command_that_the_reader_types(flags, outcome, tmp_path):
    argv, output = ["tutorial", "-k", "chapter_05 or chapter_09", *flags], tmp_path / "output"
    p = context.Process(target=pytest_in_a_new_process, args=(argv, output))
    p.start()
    p.join(120)
    text = output.read_text()
    assert outcome in text.splitlines()[-1] and p.exitcode == (not flags), text[-3000:]


def test_every_chapter_has_a_test():
    assert sorted({name.split("_")[2] for name in TESTS}) == CHAPTERS


@pytest.mark.parametrize("name", TESTS)
def test_each_exercise_fails_at_first_and_passes_with_its_solution(name):
    test, chapter = getattr(test_exercises, name), int(name.split("_")[2])
    with pytest.raises((NotImplementedError, AssertionError), match=f"chapter {chapter}: "):
        test(exercises)  # run_ranks makes an AssertionError of a rank's NotImplementedError
    test(solutions)


# -----------------------------------------------------------------------------
# The mistake that each chapter warns of, under the name of its exercise: the chapter's test must fail

def doctor_verdict(lines):  # takes FAIL and "fix: " anywhere in a line for a status and a fix
    failed = any("FAIL" in line for line in lines)
    return int(failed), [line.split("fix: ")[1] for line in lines if "fix: " in line]


def char_tokens(text, val_fraction):  # symbols in the order of appearance, not sorted
    symbols = "".join(dict.fromkeys(text))
    ids = [symbols.index(c) for c in text]
    cut = int(len(text) * (1 - val_fraction))
    return symbols, ids[:cut], ids[cut:]


def causal_attention(q, k, v):  # without the mask
    return (q @ k.T / q.size(1) ** 0.5).softmax(1) @ v


def bus_bandwidth(kind, ranks, nbytes, seconds):  # size by time: algbw
    return nbytes / seconds / 1e9


def global_gradient(x, y, w, rows_of_all_ranks):  # the mean of the ranks' means
    (grad,) = torch.autograd.grad((x @ w - y).square().mean(), w)
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def hot_spot(tree):  # by total time
    return max(tree[2], key=lambda child: child[1])[:2] if tree[2] else tree[:2]


def zero1_slice(n, rank, size):  # without padding
    return slice(rank * n // size, (rank + 1) * n // size)


def row_splits(ids, n_experts, ep):  # does not ask the other ranks
    send = torch.bincount(ids // (n_experts // ep.size), minlength=ep.size).tolist()
    return send, send


def is_spike(past, value, sigma):  # mean and standard deviation
    return value > statistics.mean(past) + sigma * statistics.pstdev(past)


def after_job(code, step_before, step_after):  # requeues for ever a job that gains no step
    return {0: "done", 85: "requeue"}.get(code, "look")


def gpu_of_rank(rank, ranks_per_node, visible):  # by the rank among all ranks, not among the node's
    names = visible.split(",")
    return names[rank % len(names)]


def is_better(before, after):  # the means alone
    return statistics.mean(after) < statistics.mean(before)


def efficiency(runs):  # of all ranks together, not per rank; and with the first step
    speed = {n: statistics.mean(row["tok_s"] for row in rows) for n, rows in runs.items()}
    return {n: s / speed[min(speed)] for n, s in speed.items()}


def reduce_in_slot(axis, grads, slot, total, first):  # leaves another bucket's numbers in the padding
    flat = torch.cat([grad.flatten() for grad in grads])
    slot[:len(flat)] = flat
    part = axis.reduce_scatter(slot)
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def interleaved_order(rank, p, v, m):  # warms up as 1F1B without chunks does
    order = [(first + i, chunk) for first in range(0, m, p) for chunk in range(v) for i in range(p)]
    forwards = [("F", i, chunk) for i, chunk in order]
    backwards = [("B", i, v - 1 - chunk) for i, chunk in order]
    n = p - rank - 1
    pairs = zip(forwards[n:], backwards, strict=False)
    return [*forwards[:n], *(op for pair in pairs for op in pair), *backwards[len(order) - n:]]


def zigzag(T, cp, rank):  # the sequence cut into cp parts as it is: the last rank has the most to do
    return list(range(rank * T // cp, (rank + 1) * T // cp))


def keys_end(T, cp, rank):  # as many keys as the segment has queries
    return [T // (2 * cp)] * 2


def answer_mask(ids, assistant, end):  # the end is not trained: the model never stops
    mask = []
    in_answer = False
    for token in ids:
        if token == end:
            in_answer = False
        mask.append(in_answer)
        if token == assistant:
            in_answer = True
    return mask


def axes_to_sum(x, grad, cut):
    return x | grad  # also over ranks that hold other parts of the weight


@pytest.mark.parametrize("name", TESTS)
def test_each_test_rejects_the_usual_mistake(name):
    with pytest.raises(AssertionError):
        getattr(test_exercises, name)(sys.modules[__name__])


# -----------------------------------------------------------------------------
# The commands of the text

def unroll(command):
    """Return the command with the body of each `for NAME in WORDS; do BODY; done` once per word."""
    def bodies(loop):
        name, words, body = loop.groups()
        return "; ".join(body.replace(f"${name}", word) for word in words.split())

    return re.sub(r"for (\w+) in ([^;]+); do (.*?); done", bodies, command)


def pieces(command):
    """Return [(ranks, [program, argument, ...])] of a shell command, one for each python command in it."""
    command = re.sub(r" \(.*?\)\)'", "'", unroll(command))
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    parts = [[]]
    for word in lexer:
        if set(word) <= set(";|&"):
            parts.append([])
        else:
            parts[-1].append(word)
    found = []
    for words in parts:
        ranks = 1
        if words[:2] == ["mpiexec", "-n"]:
            ranks, words = int(words[2]), words[3:]
        if words[:2] == ["torchrun", "--nproc-per-node"]:
            ranks, words = int(words[2]), ["python", *words[3:]]
        if words[:1] == ["python"]:
            found.append((ranks, words[1:]))
    return found


def programs(name):
    """Return [(ranks, [argument, ...])], every call of the program in the text.

    tests/test_change_it.py tests the activation that chapter 12 adds; here another one stands in for it.
    """
    return [(n, ["gelu" if word == "rootplus" else word for word in words[1:]])
            for line in COMMANDS for n, words in pieces(line) if words[0] == name]


def test_every_program_of_the_text_is_one_that_is_checked_below():
    known = {"train.py", "prepare.py", "plan.py", "sample.py", "checkpoint.py", "bench/doctor.py",
             "bench/smoke.py", "bench/collectives.py", "bench/scaling.py", "plot.py", "-c", "-m",
             "tutorial/questions.py", "tests/change_it.py"}
    assert {words[0] for line in COMMANDS for _, words in pieces(line)} == known
    others = {line.split()[0] for line in COMMANDS if not pieces(line)}
    assert others == {"grep", "cat", "tail", "git"}, others


def test_the_flags_of_the_text_exist_and_its_layouts_fit_the_ranks():
    runs = programs("train.py")
    assert len(runs) >= 15
    for n, argv in runs:
        cfg = parse(argv)
        mesh = make_mesh(launch.World(size=n), cfg.tp, cfg.pp, cfg.ep, groups=False, cp=cfg.cp)
        check_layout(cfg, mesh, cfg.global_batch or cfg.micro_batch * mesh.dp.size)
        assert cfg.steps <= 2000 and cfg.data in ("data/chars", "data/py", "data/qa") and cfg.wandb == "off"
    for n, argv in (piece for line in NOT_RUN for piece in pieces(line)):
        if argv[0] == "train.py":
            check_layout(parse(argv[1:]), make_mesh(launch.World(size=n), groups=False), 64 * n)
    for _, argv in programs("prepare.py"):
        assert prepare.parse(argv).tokenizer in ("char", "bpe", "data/py")


@pytest.mark.parametrize("name", ["smoke", "collectives", "plan", "plot", "sample"])
def test_the_flags_of_other_programs_are_in_their_help(name, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(["--help"])
    text = capsys.readouterr().out
    commands = [argv for folder in ("", "bench/") for _, argv in programs(f"{folder}{name}.py")]
    assert commands
    for flag in (word for argv in commands for word in argv if word.startswith("--")):
        # plan.py takes train.py's flags too
        passed_on = name == "plan" and flag[2:].replace("-", "_") in config.Config.__dataclass_fields__
        assert passed_on or flag in text, f"{name} has no {flag}"


def test_every_folder_that_a_command_reads_was_written_by_an_earlier_one():
    made = set()
    for line in COMMANDS:
        for _, (program, *argv) in pieces(line):
            if program in ("sample.py", "checkpoint.py", "bench/scaling.py", "plot.py"):
                assert {w for w in argv if w.startswith("out/")} <= made, line
            if program == "train.py":
                made.add(argv[argv.index("--out") + 1])
        if line.startswith(("grep", "cat", "tail")):
            names = re.search(r"out/\{?([\w,-]+)\}?/", line)[1]
            assert {f"out/{name}" for name in names.split(",")} <= made, line


def test_the_training_commands_run(tmp_path):
    """Each command, two steps long and on a small text: train.main in as many processes as it has ranks.
    Commands that differ in what is made small, or only in names and seeds, run once."""
    less = ["--data", str(chars(tmp_path)), "--steps=2", "--log-every=1", "--eval-every=0", "--n-embd=16",
            "--n-layer=4", "--seq-len=16", "--seed=1"]
    seen = set()
    for i, (n, argv) in enumerate(programs("train.py")):
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


# -----------------------------------------------------------------------------
# `make tutorial`

def printed_by(chapter):
    """Return what each command of the chapter prints, if it prints what the chapter shows."""
    blocks = [(kind, body) for kind, body in BLOCK.findall(chapter) if kind in ("sh", *FILL)]
    outputs = []
    for i, (kind, body) in enumerate(blocks):
        if kind != "sh":
            continue
        following = itertools.takewhile(lambda block: block[0] != "sh", blocks[i + 1:])
        shown = [text for _, text in following]
        n = len(commands(body))
        if len(shown) != n:
            shown = ["".join(shown)] + [""] * (n - 1)
        outputs += shown
    return outputs


def test_a_text_that_is_true_stays_as_it_is():
    chapters = re.split(r"^(?=## \d)", TEXT, flags=re.M)[1:]
    for chapter in chapters:
        assert refresh(chapter, printed_by(chapter)) == (chapter, [])


def test_long_numbers_of_the_text_stand_in_an_output_of_the_chapter():
    """So `make tutorial` changes them. Shakespeare's are those of a file that is not in the repository."""
    for chapter in re.split(r"^(?=## \d)", TEXT, flags=re.M)[1:]:
        shown = re.findall(LONG, "".join(body for kind, body in BLOCK.findall(chapter) if kind in FILL))
        text = set(re.findall(LONG, BLOCK.sub("", chapter))) - {"1,115,394", "1,003,854", "111,540"}
        assert text <= set(shown), (chapter[:20], text - set(shown))


def test_the_change_of_chapter_12_is_the_one_that_is_tested():
    assert [body for kind, body in BLOCKS if kind == "diff"] == [change_it.diffs()["activation"]]


def test_plots_and_texts_are_replaced_whole():
    chapter = "```sh\none\n```\nText.\n```text\nloss\n3|*\n...\n```\n```\nend=1\n```\n"
    new, lost = refresh(chapter, ["first line\n  loss  \n 9|  *\n 8| *\nend=2\n"])
    assert (new, lost) == (chapter.replace("\nloss\n3|*", "\n  loss\n 9|  *").replace("=1", "=2"), [])
    assert refresh(chapter, ["end=1\n"]) == (chapter, ["loss"])


def test_new_numbers_replace_the_old_ones():
    chapter = """Text: 1,234 of 2.5033, and 42.
```sh
first
second
```
```
...
step=20 loss=2.5033 dt=1.0ms
rank 1: 1,234 letters, made ...
step=40 loss=1.9
```
```
sum: 42 in out/dp2
```
The end of 42.
"""
    new, lost = refresh(chapter, [
        "step=1 loss=9.9\nstep=20 loss=2.4791 dt=13.5ms\nrank 2: 77,777 letters, made by me\n",
        "sum: 1 in out/dp1\nsum: 43 in out/dp2\n"])
    assert lost == ["step=40 loss=1.9"]
    for before, now in (("2.5033", "2.4791"), ("1.0ms", "13.5ms"), ("rank 1:", "rank 2:"),
                        ("1,234", "77,777"), ("sum: 42", "sum: 43")):
        chapter = chapter.replace(before, now)
    assert new == chapter

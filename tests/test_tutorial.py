"""The tutorial: its exercises fail until solved, and its commands are commands that exist."""
import importlib
import json
import os
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import test_budget
import torch
import torch.distributed as dist
from pool import ROOT, context, run_ranks
from runs import chars, session

import config
import prepare
from parallel import make_mesh
from runtime import launch
from tutorial import exercises, solutions, test_exercises

TEXT = (ROOT / "tutorial/README.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
CHAPTERS = [f"{i:02d}" for i in range(11)]


def test_every_chapter_has_its_parts():
    parts = re.split(r"^## (?=\d)", TEXT.split("## And then")[0], flags=re.M)[1:]
    assert [part.split()[0] for part in parts] == [str(i) for i in range(11)]
    for i, part in enumerate(parts):
        for needed in ("```sh\n", "**Read** ", "**Exercise** ", f"-k chapter_{i:02d}`"):
            assert needed in part, f"chapter {i} lacks {needed!r}"
        name = re.search(r"\*\*Exercise\*\* `(\w+)`", part)[1]
        assert callable(getattr(exercises, name)) and callable(getattr(solutions, name))
    for name in re.findall(r"`((?:bench|scripts|tests)/[\w.]+|\w+\.py)`", TEXT):
        assert any((ROOT / folder / name).exists() for folder in (".", "tutorial", "scripts")), name


def typed(argv, said):
    """python -m pytest ARGV in the root; torch is there already. Our own files must be found anew."""
    os.chdir(ROOT)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p) not in (ROOT, ROOT / "tests"))]
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if name == "tutorial" or file.parent in (ROOT / "tests", ROOT / "tutorial"):
            del sys.modules[name]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *argv]))


@pytest.mark.parametrize("flags, outcome", [([], "2 failed"), (["--solutions"], "2 passed")])
def test_the_readers_command(flags, outcome, tmp_path):
    p = context.Process(target=typed, args=(["tutorial", "-k", "chapter_03 or chapter_05", *flags],
                                            tmp_path / "said"))
    p.start()
    p.join(60)
    said = (tmp_path / "said").read_text()
    assert outcome in said.splitlines()[-1] and p.exitcode == (not flags), said[-3000:]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_exercise_is_open_and_can_be_solved(chapter):
    test = getattr(test_exercises, f"test_chapter_{chapter}")
    with pytest.raises((NotImplementedError, AssertionError), match=f"chapter {int(chapter)}: "):
        test(exercises)  # a rank's NotImplementedError comes as the pool's AssertionError, with its text
    test(solutions)


@pytest.mark.parametrize("path", sorted((ROOT / "tutorial").glob("*.py")), ids=lambda p: p.name)
def test_short_and_narrow(path):
    test_budget.test_length_and_width(path)
    assert "os.environ" not in path.read_text()


# -----------------------------------------------------------------------------
# the mistakes that each chapter warns of: its test must see them. the names are the exercises'

def doctor_verdict(lines):
    return int(any("FAIL" in line for line in lines)), [x.split("fix: ")[1] for x in lines if "fix: " in x]


def char_tokens(text, val_fraction):  # in the order of appearance
    symbols = "".join(dict.fromkeys(text))
    ids, cut = [symbols.index(c) for c in text], int(len(text) * (1 - val_fraction))
    return symbols, ids[:cut], ids[cut:]


def causal_attention(q, k, v):  # the present is hidden too, or the future is not
    return (q @ k.T / q.size(1) ** 0.5).softmax(1) @ v


def bus_bandwidth(kind, ranks, nbytes, seconds):  # what "bandwidth" says at first
    return nbytes / seconds / 1e9


def global_gradient(x, y, w, rows_of_all_ranks):  # the mean of means
    (g,) = torch.autograd.grad((x @ w - y).square().mean(), w)
    dist.all_reduce(g)
    return g / dist.get_world_size()


def hot_spot(tree):  # total time
    return max(tree[2], key=lambda child: child[1])[:2] if tree[2] else tree[:2]


def zero1_slice(n, rank, size):  # no padding
    return slice(rank * n // size, (rank + 1) * n // size)


def row_splits(ids, n_experts, ep):  # nobody was asked
    send = torch.bincount(ids // (n_experts // ep.size), minlength=ep.size).tolist()
    return send, send


def is_spike(past, value, sigma):  # mean and deviation
    return value > statistics.mean(past) + sigma * statistics.pstdev(past)


def after_job(code, step_before, step_after):  # for ever
    return {0: "done", 85: "requeue"}.get(code, "look")


def efficiency(runs):  # of the total, not per rank; the first step counts
    speed = {n: statistics.mean(row["tok_s"] for row in rows) for n, rows in runs.items()}
    return {n: s / speed[min(speed)] for n, s in speed.items()}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_usual_mistake_is_seen(chapter):
    with pytest.raises(AssertionError):
        getattr(test_exercises, f"test_chapter_{chapter}")(sys.modules[__name__])


# -----------------------------------------------------------------------------
# the commands of the text

def pieces(command):
    """A line of the shell -> [(ranks, [program, argument, ...])] of its python commands."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    parts = [[]]
    for word in lexer:
        if set(word) <= set(";|&"):
            parts.append([])
        elif parts[-1] or not (word in ("while", "do") or re.match(r"[A-Z_]+=", word)):
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
    return [(n, words[1:]) for line in COMMANDS for n, words in pieces(line) if words[0] == name]


def test_nothing_escapes_the_checks():
    known = {"train.py", "prepare.py", "plan.py", "sample.py", "checkpoint.py", "bench/doctor.py",
             "bench/smoke.py", "bench/collectives.py", "bench/scaling.py"}
    assert {words[0] for line in COMMANDS for _, words in pieces(line)} == known
    others = {line.split()[0] for line in COMMANDS if not pieces(line)}
    assert others == {"grep", "cat"}, others


def test_flags_exist_and_layouts_fit():
    runs = programs("train.py")
    assert len(runs) >= 15
    for n, argv in runs:
        cfg = config.parse(argv)
        mesh = make_mesh(launch.World(size=n), cfg.tp, cfg.pp, cfg.ep, groups=False)
        config.check_layout(cfg, mesh, cfg.global_batch or cfg.micro_batch * mesh.dp.size)
        assert cfg.steps <= 2000 and cfg.data == "data/chars" and cfg.wandb == "off"
    for _, argv in programs("prepare.py"):
        assert prepare.parse(argv).tokenizer in ("char", "bpe")


@pytest.mark.parametrize("name", ["smoke", "collectives", "plan", "sample"])
def test_flags_are_in_the_help(name, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(["--help"])
    said = capsys.readouterr().out
    commands = [argv for folder in ("", "bench/") for _, argv in programs(f"{folder}{name}.py")]
    assert commands
    for flag in (word for argv in commands for word in argv if word.startswith("--")):
        ours = name == "plan" and flag == "--zero"  # one of train.py's, which plan.py takes too
        assert ours or flag in said, f"{name} has no {flag}"


def test_what_a_later_chapter_reads_an_earlier_one_made():
    made = set()
    for line in COMMANDS:
        for _, (program, *argv) in pieces(line):
            if program in ("sample.py", "checkpoint.py", "bench/scaling.py"):
                assert {w for w in argv if w.startswith("out/")} <= made, line
            if program == "train.py":
                made.add(config.parse(argv).out)
        if line.startswith(("grep", "cat")):
            assert line.split()[-1].rsplit("/", 1)[0] in made, line


def test_the_training_commands_run(tmp_path):
    """Each of them, two steps long and on a small text, by train.main in as many real processes."""
    toy, seen = chars(tmp_path), set()
    for i, (n, argv) in enumerate(programs("train.py")):
        if (n, *argv) in seen or "--prompt" in argv:  # its prompt has letters that the toy text lacks
            continue
        seen.add((n, *argv))
        less = ["--data", toy, "--out", tmp_path / str(i), "--steps", "2", "--log-every", "1",
                "--eval-every", "0", "--n-embd", "16", "--n-layer", "2", "--seq-len", "16"]
        for got in run_ranks(n, session, [*argv, *map(str, less)]):
            assert got["code"] == 0, (argv, got["err"])
        rows = [json.loads(line) for line in (tmp_path / str(i) / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
    assert len(seen) >= 14

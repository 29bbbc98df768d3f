"""What a person sees around a run: lines that fit the terminal, what to type next, and after a kill."""
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pool import ROOT
from runs import TINY, session

sys.path.insert(0, str(ROOT / "bench"))


import plan
import prepare
from config import Config
from interface.command_line import parse
from interface.presets import PRESETS
from runtime import ending, launch, log
from runtime.launch import World
from skip import Ranges

# -----------------------------------------------------------------------------
# Lines and terminals

def test_the_time_left_is_the_mean_of_the_steps_so_far(monkeypatch):
    """The first step of a start, here 11, compiles: it does not count."""
    clock = iter([1000.0, 1003.0, 1008.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    run_log = SimpleNamespace(first_done=None)
    left = [log.Log.seconds_left(run_log, number, 20) for number in (11, 12, 13)]
    assert left == [None, 3.0 * 8, 4.0 * 7]


# -----------------------------------------------------------------------------
# The first lines of a run, and the last

def test_the_line_of_a_node_stands_before_a_run_and_before_no_error(tmp_path, capsys):
    launch.launch(waits=True)
    assert capsys.readouterr().out == ""
    launch.launch()
    assert capsys.readouterr().out.startswith("[node 1/1 ")
    flags = [*TINY, "--steps=1", "--save-every=0", "--eval-every=0", "--no-report", "--resume=auto"]
    got = session(World(), [*flags, "--data=nowhere", f"--out={tmp_path / 'a'}"])
    assert got["code"] == 2 and got["out"] == "" and got["err"].count("\n") == 1
    got = session(World(), [*flags, f"--out={tmp_path / 'b'}"])
    assert got["code"] == 0 and got["out"].count("[node 1/1 ") == 1
    assert (f"--resume auto: {tmp_path / 'b'} has no checkpoint, so the run starts at step 1"
            in " ".join(got["out"].split()))


@pytest.mark.parametrize("flags, said", [
    (["--top-k=3"], "--top-k 3 has no effect without --n-experts"),
    (["--momentum=0.9"], "--momentum 0.9 has no effect without --optimizer muon"),
    (["--rope-scaling", "8", "1", "4", "64", "--pos=learned"],
     "--rope-scaling (8.0, 1.0, 4.0, 64.0) has no effect without --pos rope"),
    (["--top-k=1", "--n-experts=2"], ""), ([], "")])
def test_a_flag_that_changes_nothing_is_named_and_the_run_goes_on(flags, said, tmp_path):
    got = session(World(), [*TINY, "--steps=1", "--save-every=0", *flags, f"--out={tmp_path / 'run'}"])
    assert got["code"] == 0
    lines = [line.strip() for line in got["out"].splitlines() if "has no effect" in line]
    assert lines == ([said] if said else [])


def test_what_a_preset_sets_is_not_named(capsys):
    """Only flags that differ from the preset's: each preset alone says nothing."""
    for name in PRESETS:
        cfg = dataclasses.replace(parse([name], data="synthetic"), zero=0)
        log.say_what_has_no_effect(cfg)
        assert capsys.readouterr().out == "", name


def test_the_first_line_of_adapters_says_how_many_parameters_train(capsys):
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    model.mesh = SimpleNamespace(world=SimpleNamespace(size=1), dp=SimpleNamespace(size=1))
    source = SimpleNamespace(n_samples=5, has_documents=False)
    for rank, words in ((8, "8 parameters, of which 2 train, dp 1"), (0, "8 parameters, dp 1")):
        log.started(Config(lora=rank), model, None, 8, source, Ranges([]))
        assert capsys.readouterr().out.startswith(f"started: {words}")


def test_a_run_that_is_done_says_what_can_be_typed_next(tmp_path, monkeypatch, capsys):
    config = {"data": "data/stdlib", "objective": "causal", "prompt": "def main(", "steps": 400, "world": 2,
              "launcher": "hydra", "argv": ["train.py", "tiny", "--prompt", "def main("]}
    (tmp_path / "report.html").touch()
    text, curves, page, more = ending.next_commands(tmp_path, config, 400)
    for line, command in ((text, f"python sample.py {tmp_path} --prompt 'def main('"),
                          (curves, f"python plot.py {tmp_path}"),
                          (more, "mpiexec -n 2 python train.py tiny --prompt 'def main(' --steps 800 "
                                 "--resume auto")):
        assert line.partition(":")[2].strip() == command
    assert str(tmp_path / "report.html") in page
    assert len(ending.next_commands(tmp_path, {**config, "data": "synthetic"}, 0)) == 2
    fill = ending.next_commands(tmp_path, {**config, "objective": "mlm"}, 400)[0]
    assert fill == f"fill gaps:    python sample.py {tmp_path} --fill 'a [MASK] in a text'"
    (tmp_path / "meta.json").write_text('{"masks": {}}')  # of conversations, as prepare.py chat writes it
    talk = ending.next_commands(tmp_path, config, 400)[0]
    assert talk == f"talk to it:   python sample.py {tmp_path} --chat"
    (tmp_path / "meta.json").write_text("[]")
    assert ending.next_commands(tmp_path, config, 400)[0] == text
    # From another folder, the programs are named by their paths.
    for folder, path in ((tmp_path, f"{ROOT}/"), (ROOT / "docs", "../")):
        monkeypatch.chdir(folder)
        elsewhere = "\n".join(ending.next_commands(tmp_path, config, 400))
        for program in ("sample.py", "plot.py", "train.py"):
            assert f"python {path}{program} " in elsewhere
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", *TINY])
    flags = [*TINY, "--steps=1", "--eval-every=0", f"--out={tmp_path / 'run'}"]
    got = session(World(), flags)
    assert got["code"] == 0 and f"python plot.py {tmp_path / 'run'}" in got["out"]
    first_run = (ROOT / "Makefile").read_text().split("\ntrain:")[1].split("\n\n")[0]
    assert "source .venv/bin/activate" in first_run.splitlines()[-1]


# -----------------------------------------------------------------------------
# plan.py and prepare.py

def test_a_plan_does_not_depend_on_what_lies_in_data(monkeypatch, capsys):
    monkeypatch.setattr(plan, "load_blend_meta", lambda data: {"vocab_size": 77})
    plan.main(["gpt2"])
    assert capsys.readouterr().out.startswith("vocabulary of 50,257 symbols: GPT-2's; --data DIR or ")
    monkeypatch.setattr(plan, "settled_doc_mask", lambda data, doc_mask: doc_mask)
    plan.main(["gpt2", "--data", "data/chars", "--doc-mask=off"])
    assert capsys.readouterr().out.startswith("vocabulary of 77 symbols: data/chars")


def test_a_plan_in_json_has_no_line_beside_it(capsys):
    plan.main(["gpt2", "--gpus=8", "--micro-batch=30", "--json"])
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize("flags", [
    "text.txt --tokenizer nothere", "text.txt --tokenizer hf:nothere", "text.txt --tokenizer data/nothere",
    "short.jsonl --text-key body", "short.jsonl", "empty.txt", "nothere.txt",
    "chat short.jsonl --tokenizer nothere"])
def test_a_refused_prepare_leaves_no_folder(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A text of some words.\n" * 400)
    Path("short.jsonl").write_text('{"text": "hi"}\n')
    Path("empty.txt").touch()
    with pytest.raises(SystemExit) as end:
        prepare.main([*shlex.split(flags), "--name", "x"])
    assert end.value.code == 2 and not list(Path(".").glob("data/*"))


# -----------------------------------------------------------------------------
# Before anything else

@pytest.mark.parametrize("program", ["train", "sample", "prepare", "plan", "plot", "convert", "bench/doctor"])
def test_a_program_without_its_packages_says_what_to_type(program):
    """-S leaves out the packages of an environment, as a shell does in which none is activated."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", f"{program}.py"], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("nanoshard: this python has no numpy, torch, tyro; in the ")

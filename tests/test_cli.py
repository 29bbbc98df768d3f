"""The command line: wrong input gives one line with the fix and exit code 2; every right form is read."""
import ast
import contextlib
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import typing
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool import ROOT, run_ranks
from runs import TINY, assert_refused, chars, go, rows, session

import config
import plan
import sample
from config import Config
from cost import memory
from cost.parameters import Rank
from cost.plan_flags import PlanFlags
from fast.choose import choose
from interface.command_line import command_line, parse, wrong_input
from interface.files import Range, check_schema, load_json
from interface.presets import PRESETS
from parallel import make_mesh
from runtime.launch import World

MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return chars(tmp_path_factory.mktemp("toy"))


CRC = 4242786993  # of defaults, ranges and presets


def refused_run(tmp_path, *argv, words=(), base=TINY):
    """Start a run with wrong flags and assert that it is refused before its first step -> the line."""
    result = session(World(), [*base, f"--out={tmp_path / 'run'}", *map(str, argv)])
    assert result["steps"] == [], "a run must be refused before its first step"
    assert_refused(result, *words)
    return result["err"]


FLAGS = [  # wrong flags, and words that the line must contain: both numbers, and the fix
    (["--stepz=3"], ["--stepz", "--steps"]),
    (["--steps", "many"], ["--steps", "many"]),
    (["--norm", "batch"], ["--norm", "batch", "rms", "layer"]),
    (["--bias", "--tied=maybe"], ["maybe"]),
    (["--n-embd=18", "--n-head=4"], ["18", "4", "--n-head 3"]),
    (["--n-embd=6", "--n-head=2", "--pos=rope"], ["3", "--pos learned"]),
    (["--n-head=0"], ["--n-head 0", "at least 1"]),
    (["--dropout=1"], ["--dropout 1", "[0, 1)"]),
    (["--global-batch=7"], ["global-batch 7", "micro-batch 2", "dp 1", "--global-batch 8"]),
    (["--cp=2", "--tp=2"], ["--tp 2 --cp 2 needs 4 ranks", "mpiexec -n 4 python train.py"]),
    (["--pp-layers=1,1"], ["1,1", "try --pp-layers 2"]),
    (["--train-range-to-skip", "3", "5", "9"], ["--train-range-to-skip", "3 numbers"]),
    (["--train-range-to-skip", "5", "3"], ["5 3", "low to high"]),
    (["--resume=auot"], ["auot is no checkpoint"]),
    (["--out=/"], ["--out / is no folder for a run"]),
    (["--resume-changed=seed"], ["--resume-changed seed", "add --resume auto"]),
    (["--prompt=a"], ["--prompt", "synthetic"]),
]


@pytest.mark.parametrize("argv,words", FLAGS, ids=[" ".join(argv) for argv, _ in FLAGS])
def test_wrong_flags_are_refused(argv, words, tmp_path):
    refused_run(tmp_path, *argv, words=words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


TWO_RANKS = [
    (["--tp=2", "--n-embd=18", "--n-head=3"], ["n-head 3", "tp 2", "--tp 1"]),
    (["--tp=2", "--ffn-hidden=33"], ["ffn-hidden 33", "tp 2", "--tp 1"]),
    (["--tp=2", "--micro-batch=1", "--seq-len=15"], ["15", "tp 2", "--micro-batch 2"]),
    (["--cp=2", "--seq-len=18"], ["seq-len 18", "2 * cp 2", "--seq-len 20"]),
    (["--tp=2", "--pp=2"], ["2 ranks", "tp 2", "pp 2", "a multiple of 4 ranks"]),
    (["--pp=2", "--n-layer=1"], ["n-layer 1", "--n-layer 2"]),
    (["--pp=2", "--pp-layers=1,2"], ["1,2", "n-layer 2", "--pp-layers 1,1"]),
    (["--pp=2", "--pp-layers=1,a,1"], ["1,a,1", "--pp-layers 1,1"]),
    (["--global-batch=6"], ["global-batch 6", "micro-batch 2", "dp 2"]),
]


@pytest.mark.parametrize("argv,words", TWO_RANKS, ids=[" ".join(argv) for argv, _ in TWO_RANKS])
def test_wrong_layouts_are_refused_by_one_line_of_rank_0(argv, words, tmp_path):
    """Rank 0 prints the line; every rank ends with exit code 2."""
    results = run_ranks(2, session, [*TINY, f"--out={tmp_path}", "--steps=1", *argv])
    assert_refused(results[0], *words)
    assert (results[1]["code"], results[1]["err"]) == (2, "")


def test_the_suggested_ep_divides_ranks_and_experts():
    for argv, say in (("--n-experts=4 --ep=4", "--ep 2"), ("--n-experts=9 --ep=4", "--ep 3")):
        with pytest.raises(ValueError, match=say):
            plan.plan_one(plan.arguments([*argv.split(), "--gpus=6"])[0], 256)
    with pytest.raises(ValueError, match="n-experts 6 .* ep 4; try --ep 2"):
        plan.plan_one(plan.arguments(["--n-experts=6", "--ep=4", "--gpus=8"])[0], 256)


def test_wrong_data_is_refused(tmp_path, good):
    base = [f for f in TINY if "vocab" not in f]

    def toy():
        shutil.rmtree(tmp_path / "toy", ignore_errors=True)
        return Path(shutil.copytree(good, tmp_path / "toy"))

    def data_error(*words, flags=()):
        refused_run(tmp_path, f"--data={tmp_path / 'toy'}", "--steps=1", *flags, words=words, base=base)

    data_error("toy", "prepare.py")  # the directory is missing
    refused_run(tmp_path, "--data=nowhere/stdlib", base=base,
                words=["nowhere/stdlib", "python prepare.py stdlib"])
    file = toy() / "train_00000.bin"
    raw = file.read_bytes()
    file.write_bytes(raw[:-2])
    data_error("train_00000.bin", "prepare.py")
    file.write_bytes(raw[:3])
    data_error("train_00000.bin", "prepare.py")
    file.unlink()
    data_error("train_00000.bin", "prepare.py")
    (toy() / "meta.json").write_text("{")
    data_error("meta.json", "json", "prepare.py")
    vocab = json.loads((toy() / "meta.json").read_text())["vocab_size"]
    data_error(str(vocab), "--vocab-size 3", flags=["--vocab-size=3"])
    data_error("--seq-len", flags=["--seq-len=100000"])
    data_error("'%'", flags=["--prompt=%"])


def test_wrong_checkpoint_is_refused(tmp_path, good):
    step = tmp_path / "good" / "step_000001"
    go(1, tmp_path / "good", "--steps=1")
    for flag, words in [
        ("--n-layer=3", ["--n-layer 2 (this run: 3)"]),
        ("--bias", ["--bias False (this run: True)"]),
        ("--seq-len=8", ["--seq-len 16 (this run: 8)"]),
    ]:
        refused_run(tmp_path, f"--resume={step}", flag, words=[str(step), *words])
    other = [f"--data={good}", "--vocab-size=0"]
    refused_run(tmp_path, f"--resume={step}", *other, words=["--data synthetic", "--resume-changed"])
    refused_run(tmp_path, f"--resume={step}", "--vocab-size=99", words=["--data synthetic"])
    assert parse(["--bias", "False", "--n-layer", "2"]).bias is False  # what a message names can be typed


def test_one_rank_prints_the_error_under_mpiexec(tmp_path):
    """Each rank finds it, before it imports torch."""
    for n, argv, words in [
        (2, ["--stepz=3"], ["--steps"]),
        (2, [*TINY, f"--out={tmp_path}", "--global-batch=6"], ["dp 2", "--global-batch 8"]),
        (2, ["--data=nowhere"], ["nowhere holds no prepared data"]),
    ]:
        job = subprocess.run([MPIEXEC, "-n", str(n), sys.executable, str(ROOT / "train.py"), *argv],
                             capture_output=True, text=True, timeout=240)
        assert_refused({"code": job.returncode, "err": job.stderr}, *words)


# -----------------------------------------------------------------------------
# Right forms

def test_switches_are_read_in_every_form():
    for argv in (["--bias"], ["--bias", "True"], ["--bias", "true"], ["--bias=True"], ["--bias=true"]):
        assert parse(argv).bias is True, argv
        assert parse([*argv, "--steps", "7"]).steps == 7
    for argv in (["--no-bias"], ["--bias", "False"], ["--bias=False"], ["--bias=false"], []):
        assert parse(argv).bias is False, argv
    assert parse(["gpt2", "--no-bias"]).bias is False and parse(["gpt2"]).bias is True
    assert parse(["gpt2", "--tied", "False", "--bias=True"]).tied is False
    assert parse(["--dump_grads=x", "--no-plot"]).plot is False


def test_names_and_values_are_read_in_every_form():
    want = dataclasses.replace(Config(), n_layer=3, micro_batch=4, lr=1e-4, pp_layers="1,2",
                               train_range_to_skip=(3, 5, 8, 9))
    tail = ["--train-range-to-skip", "3", "5", "8", "9"]
    words = ["--n-layer", "3", "--micro-batch", "4", "--lr", "1e-4", "--pp-layers", "1,2"]
    assert parse([*words, *tail]) == want
    assert parse(["--n_layer", "3", "--micro_batch", "4", "--lr=1e-4", "--pp_layers=1,2", *tail]) == want
    assert parse(["tiny", "--n_layer=3", "--micro-batch=4", "--lr=.0001", *tail, "--pp-layers=1,2"]) == want
    assert parse(["--n-layer=3", "--n-layer=5"]).n_layer == 5  # a script's "$@" overrides the flags before it
    assert parse(["--min-lr=0"]).min_lr == 0.0 and parse([]).min_lr is None


def test_presets_set_their_values():
    assert parse([]) == parse(["tiny"]) == Config()
    for name, values in PRESETS.items():
        cfg = parse([name])
        assert cfg.preset == name and (cfg.tp, cfg.pp, cfg.zero) == (1, 1, 0)
        assert all(getattr(cfg, k) == v for k, v in values.items())
    assert parse(["shakespeare-char", "--dropout=0"]).dropout == 0.0


def test_defaults_ranges_and_presets_are_pinned():
    """Another default is another run for everybody who gives no flag: change the number here, on purpose."""
    said = json.dumps([dataclasses.asdict(Config()), PRESETS, config.RANGES], sort_keys=True)
    assert zlib.crc32(said.encode()) == CRC, f"now {zlib.crc32(said.encode())}"
    assert {o.name: o.value for o in config.Outcome} == {
        "DONE": 0, "FAILED": 1, "WRONG_INPUT": 2, "GAVE_UP": 42, "HUNG": 43, "REPLICAS_DIFFER": 44,
        "STOPPED": 85}


@pytest.mark.parametrize("name,value", [("n_layer", 0), ("steps", 0), ("tp", -1), ("lr", -1.0), ("beta2", 1),
                                        ("dropout", 1), ("timeout", 0.5), ("global_batch", -4)])
def test_a_value_below_the_least_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{config.typed(name)} {value}"):
        config.check(dataclasses.replace(Config(), **{name: value}))


def test_the_programs_start_without_torchs_compiler():
    """Its import, which torch.nn.attention.bias needs, takes as long as that of torch."""
    code = "import sys, train, plan, sample; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as e:
        parse(["gpt2", "--help-all"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config)[:-1]:
        assert re.search(rf"\n  --(no-)?{config.typed(field.name)[2:]} .*\w", text), field.name
    assert "--steps 100000 " in text and "--preset" not in text and all(p in text for p in PRESETS)
    assert "\n\nmixture of experts\n  --n-experts 0 " in text and text.count("--no-bias") == 1
    assert max(map(len, text.splitlines())) <= 100


def test_config_json_is_what_was_given(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse([]).steps = 3
    argv = [*TINY, f"--out={tmp_path}", "--steps=2", "--train-range-to-skip", "2", "2"]
    assert session(World(), argv)["code"] == 0
    saved = json.loads((tmp_path / "config.json").read_text())
    want = json.loads(json.dumps(dataclasses.asdict(parse(argv))))
    assert {key: saved[key] for key in want} == want and want["min_lr"] is None
    assert {"git", "argv", "world", "nodes", "launcher"} <= saved.keys()


@pytest.mark.parametrize("flags", [["--train-range-to-skip", 5, 3], ["--tp=2"], ["--data=nowhere"]], ids=str)
def test_a_refused_command_leaves_an_earlier_run_alone(flags, tmp_path):
    """It ends before --out is touched: nothing is renamed, nothing is written."""
    out = tmp_path / "run"
    go(1, out, "--steps=2", "--save-every=1")
    before = {p.relative_to(tmp_path): p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    go(1, out, "--steps=2", *flags, code=2)
    assert {p.relative_to(tmp_path): p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


# -----------------------------------------------------------------------------
# Numbers: finite, in their range, and small enough for the machine

FLOATS = [(cls, f.name) for cls in (Config, PlanFlags, sample.Flags) for f in dataclasses.fields(cls)
          if f.type in (float, float | None) and (cls is Config or f.name not in Config.__annotations__)]


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "1e400"])
def test_no_program_takes_a_number_that_is_not_finite(word):
    assert FLOATS
    for cls, name in FLOATS:
        argv = [f"--{name.replace('_', '-')}={word}", *["run"] * (cls is sample.Flags)]
        with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} -?(nan|inf) must be at least"):
            command_line(cls, argv, "x.py", "", None if cls is sample.Flags else cls())


def test_a_step_that_exceeds_the_nodes_memory_is_refused(tmp_path, monkeypatch):
    """The kernel would kill the run without a line."""
    flags = ["--n-embd=64", "--n-head=2", "--n-layer=2"]
    monkeypatch.setattr(memory, "host_memory", lambda: 2**16)
    said = refused_run(tmp_path, *flags, words=("--tp or --pp on more devices", "smaller --micro-batch"))
    assert re.search(r"takes at least [\d.]+ GiB of cpu, where rank 0 has 0.0 GiB", said), said
    pair = SimpleNamespace(rank=0, size=2, calls=None, local_rank=0, local_size=2, device=World().device)
    cases = ((2.0, [], ""), (1.9, [], "--zero 1 or 3"), (1.9, ["--zero=1"], "--zero 1 or 3"),
             (2.0, ["--micro-batch=300"], "micro-batches of 300"))
    monkeypatch.setattr(memory, "host_memory", lambda: 2**40)
    cfg = parse(flags)
    choice = choose(cfg, make_mesh(pair, groups=False), pair.device)
    parts = memory.memory(Rank(cfg, make_mesh(pair, groups=False), 100, choice))
    need = memory.PROCESS + sum(parts[part] for part in ("weights", "gradients", "optimizer", "activations"))
    need += 3 * parts["logits"]
    for enough, more, words in cases:
        monkeypatch.setattr(memory, "host_memory", lambda enough=enough: enough * need)
        this = parse([*flags, *more])
        mesh = make_mesh(pair, pp=this.pp, groups=False)
        with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
            memory.check_memory(this, mesh, 100, pair)


SCHEMAS = [  # value, schema, and how the message goes on; "" if the value is right
    (5, int, ""), (True, int, "the content is True, not a whole number"), (5, float, ""), (0.5, int, "0.5"),
    (math.inf, float, "inf, not a finite number"), (None, (str, type(None)), ""),
    ({}, {"a": int}, "the content lacks a"), ({}, {"a?": int}, ""), ({"a": None}, {"a?": int}, "a is None"),
    ({"x": {"n": -1}}, {"*": {"n": Range(0, 9)}}, "x.n is -1, not a whole number from 0 to 9"),
    (0.5, Range(0.0, 1), ""), (1.0, Range(0, 9), "1.0"), ([1, "a"], [int], "[1] is 'a'"),
    (3, {}, "3, not an object"), ("rms", typing.Literal["rms", "layer"], ""),
    (["rms"], typing.Literal["rms", "layer"], "not one of rms, layer"), ("x" * 999, int, "...")]


@pytest.mark.parametrize("value,schema,say", SCHEMAS, ids=lambda v: getattr(v, "__name__", str(v)[:30]))
def test_a_schema_names_the_first_wrong_value(value, schema, say):
    with pytest.raises(ValueError) if say else contextlib.nullcontext() as e:
        check_schema(value, schema, "f.json")
    assert not say or str(e.value).startswith("f.json: ") and say in str(e.value) and len(str(e.value)) < 120


@pytest.mark.parametrize("raw", [b"[" * 200_000, b"\xff", b"{", b""])
def test_what_is_no_json_is_one_line(raw, tmp_path):
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(ValueError, match="x.json holds no sound JSON: "):
        load_json(tmp_path / "x.json")


def test_control_characters_of_a_file_are_printed_escaped(capsys):
    with pytest.raises(SystemExit), wrong_input():
        raise ValueError("a\x1b]0;evil\x07 \n \u202eb \xe9 \x9b2J")
    assert capsys.readouterr().err == "nanoshard: a\\x1b]0;evil\\x07 \\u202eb \xe9 \\x9b2J\n"


# -----------------------------------------------------------------------------
# --config FILE

def test_a_run_is_repeated_by_its_config_json(tmp_path):
    flags = [*TINY, "--steps=3", "--save-every=0", "--seed=7", "--no-report"]
    first = session(World(), [*flags, f"--out={tmp_path / 'a'}"])
    again = session(World(), [f"--config={tmp_path / 'a'}", f"--out={tmp_path / 'b'}"])
    other = session(World(), ["--config", str(tmp_path / "b" / "config.json"), "--seed", "8", "--steps=2",
                              f"--out={tmp_path / 'c'}"])
    assert [got["code"] for got in (first, again, other)] == [0, 0, 0], again["err"] + other["err"]
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert a == b and len(a) == 3 and len(c) == 2 and a[0]["loss"] != c[0]["loss"]
    saved = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    differ = {key for key in saved[0] if saved[0][key] != saved[1][key]}
    assert differ - {"argv"} == {"out", "config"}


def test_a_config_json_is_read_whole_or_refused_by_name(tmp_path):
    path = tmp_path / "config.json"

    def written(**flags):
        path.write_text(json.dumps(flags))
        return parse([f"--config={path}", "--lr=0.5"])

    cfg = Config(n_layer=7, min_lr=0.25, rampup_batch_size=(1, 2, 3), bias=True, dtype="bf16", lr=0.5,
                 preset="gpt2", config=str(path))
    beside = {"resume": "auto", "resume_changed": "seed", "config": "x", "git": "y", "argv": [], "world": 4,
              "machine": {}, "vocab_size_used": 65, "mask_token": 3, "launcher": "srun", "dp": 2,
              "torch": "z"}
    assert written(**{**dataclasses.asdict(cfg), "lr": 1.0, **beside}) == cfg
    assert parse(["--steps=3", "--config", str(path)]).lr == 1.0
    for flags, words in (({"n_layers": 3}, "has --n-layers 3, which this code"),
                         ({"n_layer": "3"}, "n_layer is '3', not a whole"),
                         ({"bias": 1}, "bias is 1"), ({"zero": 4}, "zero is 4"),
                         ({"n_layer": 0}, "at least 1"), ({"preset": "x"}, "no preset 'x'"),
                         ({"rampup_batch_size": 3}, "rampup_batch_size")):
        with pytest.raises(ValueError, match=words):
            written(**flags)
    path.write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    for argv in ([f"--config={path}"], ["tiny", f"--init-from={tmp_path}"]):
        with pytest.raises(ValueError, match=f"a model of Hugging Face.*convert.py import {tmp_path} --out"):
            parse(argv)
    path.write_text("some words")
    with pytest.raises(ValueError, match="no sound JSON"):
        parse([f"--config={path}"])
    for argv, words in ((["tiny", f"--config={path}"], "give one of them"), (["--config"], "--config"),
                        (["--config=none"], "is not there")):
        with pytest.raises(ValueError, match=words):
            parse(argv)


WITHOUT_TORCH = """import contextlib, io, runpy, sys
said = {}
programs = ("plan", "sample", "plot", "convert", "prepare", "train")
lines = [[program, flag] for program in programs for flag in ("--help", "--no-such-flag")]
lines += [["train", f"--{flag}=nowhere"] for flag in ("data", "init-from", "resume")]
for program, flag in lines:
    sys.argv = [f"{program}.py", flag]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            runpy.run_path(f"{program}.py", run_name="__main__")
        except SystemExit as e:
            said[" ".join(sys.argv)] = int(e.code), "torch" in sys.modules
print(said)
"""


def test_help_wrong_flags_and_paths_are_answered_without_torch():
    """Its import takes seconds."""
    job = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True)
    said = ast.literal_eval(job.stdout)
    assert len(said) == 15, job.stderr
    for command, (code, has_torch) in said.items():
        assert not has_torch and code == (0 if "--help" in command else 2), (command, code)

"""The command line: a wrong one gives one line with the fix and exit code 2; every right form is read.

The wrong commands are typed into the programs' main() in one process, in a folder with a text, a data set and
a run; a few are typed into a shell.
"""
import ast
import contextlib
import dataclasses
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pool import ROOT
from runs import TINY, assert_refused, called, rows, session

import config
import convert
import plan
import plot
import prepare
import sample
from config import Config
from cost import memory
from cost.parameters import Rank
from cost.plan_flags import PlanFlags
from fast.choose import choose
from interface import words
from interface.command_line import command_line, parse, wrong_input
from interface.layout import check_alone, check_layout
from interface.presets import PRESETS
from parallel import make_mesh
from runtime.launch import World

MPIEXEC = Path(sys.executable).with_name("mpiexec")
CRC = 542908609  # of defaults, ranges and presets
SMALL = "--n-layer=1 --n-embd=16 --ffn-hidden=16 --seq-len=16 --no-plot --no-report --eval-iters=1"


def read_flags(argv):
    """Do what train.py does first with the flags of one process."""
    with wrong_input():
        check_alone(parse(argv), argv)


MAIN = {"train.py": read_flags, "prepare.py": prepare.main, "sample.py": sample.main, "plot.py": plot.main,
        "convert.py": convert.main, "plan.py": plan.main}
RESUME = "train.py --data data/chars --resume out/run/step_000002"

# The command without python, and words that its line must have
WRONG = [
    # A launcher that was forgotten, or that stands behind the program
    ("train.py --tp 2", "this layout needs 2 ranks: mpiexec -n 2 python train.py --tp 2"),
    ("train.py --cp 2 --tp 2", "this layout needs 4 ranks: mpiexec -n 4 python train.py --cp 2 --tp 2"),
    ("train.py tiny-moe --ep 4", "mpiexec -n 4 python train.py tiny-moe --ep 4"),
    ("train.py --shard 2", "a group of --zero, which is 0; add --zero 1"),
    ("train.py --shard 2 --zero 1", "this layout needs 2 ranks: mpiexec -n 2"),
    ("train.py --nproc_per_node=2 --tp 2", "it belongs to the launcher, mpiexec -n N python train.py; in"),
    # nanoGPT and wordplay
    ("train.py config/train_shakespeare_char.py", "nearest first: shakespeare-char, "),
    ("train.py --block_size=64 --batch_size=12", "python train.py --seq-len 64 --micro-batch 12"),
    ("train.py --device=cpu", "CUDA_VISIBLE_DEVICES=-1 in front hides it"),
    ("train.py --init_from=resume", "python train.py --resume auto"),
    ("train.py --init_from gpt2 --data data/chars", "hf download"),
    ("train.py --dtype=float16", "python train.py --dtype fp16"),
    ("sample.py out/run --out_dir=out/run --start=hi", "python sample.py out/run out/run --prompt hi"),
    ("train.py train.backend=DDP data=x train.dtype=bf16 train.compile=false",
     "train.backend: leave it out, it is done, derived or logged without a flag; in our words: "
     "python train.py --data x --dtype bf16 --compile false"),
    # Hugging Face, Megatron-LM, a flag of earlier versions
    ("train.py --per_device_train_batch_size 4 --fp16 True", "python train.py --micro-batch 4 --dtype fp16"),
    ("train.py --bf16 False --report_to wandb", "python train.py --wandb online"),
    ("convert.py import gpt2 --out x", "hf download"),
    ("train.py --use-distributed-optimizer --sequence-parallel", "python train.py --zero 1"),
    ("train.py --kernels plain", "--kernels: leave it out"), ("plan.py gpt2 --kernels=x", "leave it out"),
    # Slips
    ("train.py tinny", "one of these, nearest first: tiny, tiny-moe"),
    ("train.py n_layer=3", "python train.py --n-layer 3"), ("train.py --stepz 3", "meant --steps"),
    ("train.py --no-plots", "perhaps you meant --plot"),
    ("train.py --steps 1e3", "--steps: invalid literal for int() with base 10: '1e3'"),
    ("train.py --norm batch", "rms1p"), ("train.py --compile=maybe", "Unrecognized options: maybe"),
    ("train.py --resume", "--resume"), ("sample.py", "Missing from sample.py: RUN_DIR"),
    ("plot.py", "no RUN is given"), ("prepare.py", "no SOURCE is given"),
    # Values
    ("train.py --n-embd 190 --n-head 6", "n-embd 190 does not divide by n-head 6; try"),
    ("train.py --n-head=0", "--n-head 0 must be at least 1"), ("train.py --dropout=1", "at most 0.99999"),
    ("train.py --n-experts 4 --top-k 9", "try --top-k 4"), ("train.py --pp-layers=1,1", "try --pp-layers 4"),
    ("train.py --train-range-to-skip 3 5 9", "--train-range-to-skip must be pairs"),
    ("train.py --dump-grads g --train-range-to-skip 1 1", "--dump-grads writes step 1, which is skipped"),
    ("train.py --rampup-batch-size 4 2 0", "START INCREMENT SAMPLES"),
    ("train.py --data synthetic --prompt=a", "--prompt"), (f"{RESUME} --data synthetic", "--resume-changed"),
    (f"{RESUME} --n-layer=3", "--n-layer 1 (this run: 3)"), (f"{RESUME} --bias", "--bias False (this run:"),
    ("train.py --data data/chars --vocab-size=3", "--vocab-size 3"),
    ("train.py --data data/chars --seq-len=1000000", "--seq-len"),
    ("train.py --data data/chars --prompt=%", "'%'"), ("convert.py export out/run", "--out is missing"),
    ("convert.py export out/run --out data", "a new directory"),
    ("convert.py export data/chars --out x", "config.json"),
    ("convert.py import out/run --out x", "model.safetensors is not there"),
    ("convert.py export out/run --out x --base x --seq-len 8", "export does not read --base, --seq-len"),
    ("plot.py out/run --metric x", "grad_norm, loss"), ("plot.py out/run --steps 3", "--steps"),
    ("plot.py out/run --every nan", "--every"), ("plot.py out/run --width 1", "20"),
    ("train.py --data synthetic --pdb 3", "--pdb 3: the ranks are 0 to 0"),
    ("plan.py tiny --gpus 2 --pp 2 --zero 3", "--zero 3 gathers a stage anew for each micro-batch of --pp 2"),
    ("plan.py tiny-moe --gpus 4 --tp 2 --ep 4 --pp 2", "a stage, 2 does not divide by ep 4"),
    ("plan.py tiny --gpu a100", "'a100-40x4'"), ("plan.py tiny --scaling 1,x", "numbers of GPUs"),
    ("plan.py tiny --search --scaling 1,2", "give one of them"), ("train.py out/run", "no preset 'out/run'"),
    # Paths
    ("train.py --data chars", "data/chars"), ("train.py --data=nowhere/stdlib", "python prepare.py stdlib"),
    ("train.py --data input.txt", "python prepare.py input.txt --name input"),
    ("train.py --data data/chars --resume out/rum", "give auto, or OUT/step_N"),
    ("sample.py out/rum", "python train.py --list"), ("plot.py out/rum", "give the --out of a run"),
    ("prepare.py inptu.txt --name x", "inptu.txt is not a file"),
    ("prepare.py a --val a", "--val a is a source, too"),
    ("prepare.py fineweb_edu", "--name NAME is missing"), ("prepare.py shakespeare", "curl -LO https"),
    ("prepare.py fineweb --name x", "fineweb_edu_10bt"), ("prepare.py stdlib a --name x", "stdlib is not"),
    ("train.py --data synthetic --out input.txt", "--out input.txt: File exists; give a folder"),
    ("prepare.py stdlib --vocab-size 256", "--vocab-size 256 must be at least 257"),
    ("prepare.py stdlib --tokenizer gtp2", "gpt2"), ("prepare.py stdlib --verify --name y", "no prepared"),
    ("prepare.py stdlib --tokenizer char --vocab-size 300", "--vocab-size"),
    ("prepare.py input.txt --name x --tokenizer hf:nothere", "'hf:nothere'"),
    ("prepare.py input.txt --name x --out input.txt", "Not a directory"),
    ("prepare.py chat input.txt --name x --tokenizer data/chars", "row 1 is no JSON object"),
]
TWO_RANKS = [
    ("--tp=3", "n-head 4 does not divide by tp 3; try --tp 2"),
    ("--tp=2 --ffn-hidden=33", "ffn-hidden 33 does not divide by tp 2"),
    ("--tp=2 --micro-batch=1 --seq-len=15", "of a micro-batch, 15 does not divide by tp 2"),
    ("--cp=2 --seq-len=18", "seq-len 18 does not divide by 2 * cp 2 segments; try --seq-len 20"),
    ("--tp=2 --pp=2", "2 ranks do not divide by tp 2 * cp 1 * pp 2; start a multiple of 4 ranks"),
    ("--pp=8", "try --n-layer 8"), ("--pp=2 --pp-layers=1,2", "try --pp-layers 2,2"),
    ("--pp-chunks=8", "try --pp 2"),
    ("--pp=2 --pp-layers=1,a,1", "try --pp-layers 2,2"), ("--pp=2 --zero=3", "try --zero 2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with contextlib.chdir(home), contextlib.redirect_stdout(io.StringIO()):
        lines = [f"Line {i * i} of a text, which is {i % 7} lines from here.\n\n" for i in range(2000)]
        Path("input.txt").write_text("".join(lines))
        prepare.main(["input.txt", "--name=chars", "--tokenizer=char"])
        done = session(World(), f"--data=data/chars --steps=2 --out=out/run {SMALL}".split())
        assert done["code"] == 0, done["err"]
    return home


def typed(command):
    program, *argv = shlex.split(command)
    done = called(MAIN[program], argv)
    if program == "train.py" and done["code"] == 0:  # the flags are right: what they name is not
        small = SMALL.split() if "--resume" in argv else []
        return session(World(), [*small, *argv])
    return done


def test_wrong_commands_of_a_first_hour_name_their_fix(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = {path: path.is_file() and path.stat().st_mtime_ns for path in Path().rglob("*")}
    failed = []
    for command, fix in WRONG:
        try:
            assert_refused(typed(command), fix)
        except AssertionError as e:
            failed.append(f"{command}: {e}")
    assert not failed, "\n".join(failed)
    after = {path: path.is_file() and path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert before == after, "a refused command leaves nothing behind, and out/run as it was"


@pytest.mark.parametrize("flags,words", TWO_RANKS)
def test_layouts_that_do_not_fit_two_ranks_are_refused(flags, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_layout(parse(flags.split()), 2)


def test_one_rank_prints_the_error_under_mpiexec():
    for program, argv, said in (("train.py", "--data=nowhere", "no prepared data"), ("sample.py", "x", "one"),
                                ("train.py", "--global-batch=9", "dp 2; try --global-batch 16")):
        command = [MPIEXEC, "-n", "2", sys.executable, ROOT / program, argv]
        job = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert_refused({"code": job.returncode, "err": job.stderr}, said)


# -----------------------------------------------------------------------------
# Right forms

def test_switches_are_read_in_every_form():
    for argv in (["--bias"], ["--bias", "True"], ["--bias", "true"], ["--bias=True"], ["--bias=true"]):
        cfg = parse([*argv, "--steps", "7"])
        assert cfg.bias is True and cfg.steps == 7, argv
    for argv in (["--no-bias"], ["--bias", "False"], ["--bias=False"], ["--bias=false"], []):
        assert parse(argv).bias is False, argv
    assert parse(["gpt2", "--no-bias"]).bias is False and parse(["gpt2"]).bias is True
    assert parse(["gpt2", "--tied", "False", "--bias=True"]).tied is False


@pytest.mark.parametrize("argv", [["--out", "~/x"], ["--out=~/x"]])
def test_a_tilde_is_the_home(argv, monkeypatch):
    monkeypatch.setenv("HOME", "/of/me")
    assert parse(argv).out == "/of/me/x"


def test_names_and_values_are_read_in_every_form():
    want = dataclasses.replace(Config(), n_layer=3, micro_batch=4, lr=1e-4, pp_layers="1,2",
                               train_range_to_skip=(3, 5, 8, 9))
    tail = ["--train-range-to-skip", "3", "5", "8", "9"]
    given = ["--n-layer", "3", "--micro-batch", "4", "--lr", "1e-4", "--pp-layers", "1,2"]
    assert parse([*given, *tail]) == want
    assert parse(["--n_layer", "3", "--micro_batch", "4", "--lr=1e-4", "--pp_layers=1,2", *tail]) == want
    assert parse(["--n-layer=3", "--n-layer=5"]).n_layer == 5  # a script's "$@" overrides the flags before it
    assert parse(["--min-lr=0"]).min_lr == 0.0 and parse([]).min_lr is None
    cfg = parse(["--prompt", "model.x=3", "--pdb", "-1", *tail])  # they look foreign, and are values
    assert (cfg.prompt, cfg.pdb, cfg.train_range_to_skip) == ("model.x=3", -1, (3, 5, 8, 9))


def test_presets_and_defaults_are_pinned():
    """Another default is another run for everybody who gives no flag: change the number here, on purpose."""
    assert parse([]) == parse(["tiny"]) == Config()
    for name, values in PRESETS.items():
        cfg = parse([name])
        assert cfg.preset == name and (cfg.tp, cfg.pp, cfg.zero) == (1, 1, 0)
        assert all(getattr(cfg, k) == v for k, v in values.items())
    said = json.dumps([dataclasses.asdict(Config()), PRESETS, config.RANGES], sort_keys=True)
    assert zlib.crc32(said.encode()) == CRC, f"a flag or preset changed: CRC is {zlib.crc32(said.encode())}"
    assert {o.name: o.value for o in config.Outcome} == {
        "DONE": 0, "FAILED": 1, "WRONG_INPUT": 2, "GAVE_UP": 42, "HUNG": 43, "REPLICAS_DIFFER": 44,
        "STOPPED": 85}


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as e:
        parse(["gpt2", "--help-all"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config)[:-1]:
        assert re.search(rf"\n  {config.typed(field.name)} .*\w", text), field.name
    assert "--steps 100000 " in text and "--preset" not in text and all(p in text for p in PRESETS)
    assert "\n\nmixture of experts\n  --n-experts 0 " in text and "\n  --bias True " in text
    assert max(map(len, text.splitlines())) <= 100


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
            said[" ".join(sys.argv)] = int(e.code or 0), bool({"torch", "torch._dynamo"} & sys.modules.keys())
print(said)
"""


def test_help_wrong_flags_and_paths_are_answered_without_torch():
    """Its import takes seconds."""
    job = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True)
    said = ast.literal_eval(job.stdout)
    assert len(said) == 15, job.stderr
    for command, (code, has_torch) in said.items():
        assert not has_torch and code == (0 if "--help" in command else 2), (command, code)


# -----------------------------------------------------------------------------
# Words of others

# What train.py is given by scripts of Megatron-LM: a mixture of experts, and BERT
MEGATRON = """
--seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope --rotary-base 100000
--num-layers 24 --hidden-size 512 --num-attention-heads 4 --group-query-attention --num-query-groups 1
--ffn-hidden-size 1792 --swiglu --normalization RMSNorm --attention-dropout 0.0 --hidden-dropout 0.0
--num-experts 64 --moe-router-topk 1 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-router-pre-softmax --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
--virtual-pipeline-model-parallel-size 3 --expert-model-parallel-size 4 --sequence-parallel
--use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer --tokenizer-model llama --train-data-path
data/x --valid-data-path data/y --micro-batch-size 8 --global-batch-size 64 --train-iters 40000
--lr-decay-iters 38000 --lr-warmup-iters 1000 --lr 0.0006 --min-lr 0.00006 --lr-decay-style cosine
--weight-decay 0.1 --clip-grad 1.0 --bf16 --use-flash-attn --no-gradient-accumulation-fusion --save out/x
--load out/x --save-interval 1000000 --log-interval 20 --log-params-norm --log-num-zeros-in-grad
--eval-interval 1000 --eval-iters 10 --log-timers-to-tensorboard --no-load-optim --no-load-rng
--wandb-project megatron --wandb-exp-name x --lr-warmup-fraction 0.01 --vocab-file v.txt --split 949,50,1
--fp16 --checkpoint-activations --data-path x --pp-partition-method type:transformer --nproc_per_node 8
--nnodes 1 --node_rank 0 --master_addr localhost --master_port 23456 --hostfile h
"""
WORDPLAY = """
train.backend=DDP train.eval_interval=100 train.dtype=bf16 model.batch_size=64 model.block_size=1024
train.max_iters=1000 train.log_interval=10 train.device=cpu train.ds_config_path=x train.precision=bf16
train.ngpus=4 train.use_wandb=true train.eval_only=false train.always_save_checkpoint=false
train.init_from=scratch train.wandb_project=x train.warmup_iters=100 train.framework=pytorch
model.activation=gelu data.dataset=x data.out_dir=y optimizer.gas=1 optimizer.learning_rate=0.0006
optimizer.grad_clip=1.0 optimizer.decay_lr=true optimizer.lr_decay_iters=600 optimizer.min_lr=0.00006
"""
NANOGPT = """
--out_dir=x --eval_interval=1 --log_interval=1 --eval_only=True --always_save_checkpoint=True
--init_from=scratch --wandb_log=True --wandb_project=x --wandb_run_name=x --dataset=x
--gradient_accumulation_steps=1 --batch_size=1
--block_size=8 --learning_rate=1e-3 --max_iters=1 --decay_lr=True --warmup_iters=1 --lr_decay_iters=1
--grad_clip=1.0 --backend=nccl --device=cpu --dtype=float16
"""
HUGGING_FACE = """
--model_name_or_path x --dataset_name x --output_dir x --do_train --do_eval --per_device_train_batch_size 4
--gradient_accumulation_steps 2 --learning_rate 1e-4 --max_grad_norm 1 --num_train_epochs 3 --max_steps 5
--warmup_steps 3 --warmup_ratio 0.1 --lr_scheduler_type cosine --bf16 --fp16 --logging_steps 5 --save_steps
5 --save_total_limit 2 --eval_steps 2 --gradient_checkpointing True --optim adamw --adam_beta1 0.9
--adam_beta2 0.95 --torch_compile --report_to wandb --run_name x --fsdp full_shard --deepspeed x.json
--resume_from_checkpoint x --dataloader_num_workers 2 --load_best_model_at_end --torch_dtype bfloat16
"""
PREPROCESS = """
--input a.jsonl --input_dir a --output-prefix x --output_file_name x --valid_file_name y --append-eod
--tokenizer-model llama --tokenizer-type HuggingFaceTokenizer --merge-file m.txt
"""


def word_and_value(text):
    group = []
    for word in text.replace("\n--", " --").split():
        if group and (word.startswith("--") or "=" in word):
            yield group
            group = []
        group.append(word)
    yield group


def test_all_words_of_a_command_are_answered_at_once():
    for text in (WORDPLAY, NANOGPT, MEGATRON):
        with pytest.raises(ValueError, match="in our words: ") as e:
            parse(text.split())
        command = re.search("in our words: python train.py (.*)$", str(e.value))
        cfg = parse([*shlex.split(command[1]), "--dtype", "bf16"])
    assert (cfg.tp, cfg.pp, cfg.pp_chunks, cfg.ep, cfg.n_experts, cfg.top_k) == (1, 2, 3, 4, 64, 1)


@pytest.mark.parametrize("text", [MEGATRON, WORDPLAY, NANOGPT, HUGGING_FACE, PREPROCESS])
def test_each_word_is_answered(text):
    cls, prog = (prepare.Flags, "prepare.py") if text == PREPROCESS else (Config, "train.py")
    for group in word_and_value(text):
        if words.key_of(group[0]) in cls.__dataclass_fields__ and "." not in group[0]:
            continue  # it is ours, too
        with pytest.raises(ValueError, match="in our words: "):
            command_line(cls, group, prog, "")


# -----------------------------------------------------------------------------
# Numbers: finite, in their range, and small enough for the machine

FLOATS = [(cls, f.name) for cls in (Config, PlanFlags, sample.Flags) for f in dataclasses.fields(cls)
          if f.type in (float, float | None) and (cls is Config or f.name not in Config.__annotations__)]


def test_no_program_takes_a_number_that_is_not_finite():
    assert FLOATS
    for (cls, name), word in zip(FLOATS, itertools.cycle(["nan", "-inf", "1e400"])):
        argv = [f"--{name.replace('_', '-')}={word}", *["run"] * (cls is sample.Flags)]
        with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} -?(nan|inf) must be at least"):
            command_line(cls, argv, "x.py", "", None if cls is sample.Flags else cls())


def test_a_step_that_exceeds_the_nodes_memory_is_refused(tmp_path, monkeypatch):
    """The kernel would kill the run without a line."""
    flags = ["--n-embd=64", "--n-head=2", "--n-layer=2"]
    monkeypatch.setattr(memory, "total_memory", lambda device: 2**16)
    got = session(World(), [*TINY, f"--out={tmp_path / 'run'}", *flags])
    assert_refused(got, "smaller --micro-batch")
    pair = SimpleNamespace(rank=0, size=4, calls=None, local_rank=0, local_size=2, device=World().device)
    monkeypatch.setattr(memory, "total_memory", lambda device: 2**40)
    cfg = parse(flags)
    choice = choose(cfg, make_mesh(pair, groups=False), pair.device)
    parts = memory.memory(Rank(cfg, make_mesh(pair, groups=False), 100, choice))
    need = sum(parts.values()) - parts["overhead"]
    for enough, more, fits in ((2.0, [], True), (1.9, [], False), (2.0, ["--micro-batch=300"], False)):
        monkeypatch.setattr(memory, "total_memory", lambda device, enough=enough: enough * need)
        this = parse([*flags, *more])
        mesh = make_mesh(pair, pp=this.pp, groups=False)
        refused = pytest.raises(ValueError, match="smaller --micro-batch")
        with contextlib.nullcontext() if fits else refused:
            memory.check_memory(this, mesh, 100, pair)
    pair.device = torch.device("cuda")
    for bytes_of_gpu in (2**20, 2**30):
        monkeypatch.setattr(memory, "total_memory", lambda device, there=bytes_of_gpu: there)
        refused = pytest.raises(ValueError, match=r"at least 0.0 GiB, and 0.0 are there; try --zero")
        with refused if bytes_of_gpu == 2**20 else contextlib.nullcontext():
            memory.check_memory(cfg, make_mesh(pair, groups=False), 100, pair)


# -----------------------------------------------------------------------------
# The config.json of a run

def test_a_run_is_repeated_by_its_config_json(tmp_path):
    flags = [*TINY, "--steps=3", "--save-every=0", "--seed=7", "--no-report"]
    first = session(World(), [*flags, f"--out={tmp_path / 'a'}"])
    saved = json.loads((tmp_path / "a/config.json").read_text())
    want = json.loads(json.dumps(dataclasses.asdict(parse([*flags, f"--out={tmp_path / 'a'}"]))))
    assert {key: saved[key] for key in want} == want
    assert {"git", "argv", "world", "nodes", "launcher"} <= saved.keys()
    again = session(World(), [f"--config={tmp_path / 'a'}", f"--out={tmp_path / 'b'}"])
    other = session(World(), ["--config", str(tmp_path / "b/config.json"), "--seed", "8", "--steps=2",
                              f"--out={tmp_path / 'c'}"])
    assert [got["code"] for got in (first, again, other)] == [0, 0, 0], again["err"] + other["err"]
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert a == b and len(a) == 3 and len(c) == 2 and a[0]["loss"] != c[0]["loss"]


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
    for flags, said in (({"n_layers": 3}, "has --n-layers 3, which"), ({"n_layer": "3"}, "'3', not int"),
                        ({"bias": 1}, "bias is 1"), ({"n_layer": 0}, "at least 1"),
                        ({"rampup_batch_size": 3}, "rampup_batch_size")):
        with pytest.raises(ValueError, match=said):
            written(**flags)
    path.write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))  # a model of Hugging Face
    done = session(World(), [f"--init-from={tmp_path}", "--data=synthetic"])
    assert_refused(done, "python convert.py import NAME --out")


def test_init_from_takes_the_shape_of_the_checkpoint(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for source in ("out/run", "out/run/step_000002"):
        cfg = parse([f"--init-from={source}", "--ffn-hidden=32"])
        assert (cfg.n_layer, cfg.n_embd, cfg.ffn_hidden, cfg.seq_len) == (1, 16, 32, 128)
        assert (cfg.steps, cfg.data, cfg.out) == (Config.steps, Config.data, Config.out)  # they are no shape
    assert parse(["tiny-moe", "--init_from", "out/run"]).n_experts == 8
    argv = "--init-from out/run --data data/chars --seq-len 16 --steps 1 --out fine --no-plot --no-report"
    done = session(World(), [*argv.split(), "--eval-every=0", "--micro-batch=2"])
    assert done["code"] == 0 and "starts from the weights of out/run" in done["out"], done["err"]

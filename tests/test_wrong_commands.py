"""Wrong commands of a first hour: one line that names the fix, exit code 2, and nothing is left behind.

Each is typed into the program's main() in one process, in a folder with a text, a data set and a run. The
lines for a launcher are typed into a shell.
"""
import contextlib
import io
import itertools
import os
import random
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pool import ROOT
from runs import assert_refused, session

import convert
import plan
import plot
import prepare
import sample
from config import Config
from cost.plan_flags import PlanFlags
from interface import words
from interface.command_line import change_words, command_line, parse, wrong_input
from interface.layout import check_alone, check_flags
from runtime.launch import World


def read_flags(argv):
    """Do what train.py does first with the flags of one process."""
    with wrong_input():
        check_alone(parse(argv), argv)


MAIN = {"train.py": read_flags, "prepare.py": prepare.main, "sample.py": sample.main, "plot.py": plot.main,
        "convert.py": convert.main, "plan.py": plan.main}

# The command without python, and words that its line must have
WRONG = [
    # A launcher that was forgotten, or that stands behind the program
    ("train.py --tp 2", "--tp 2 needs 2 ranks: mpiexec -n 2 python train.py --tp 2"),
    ("train.py --tp 2 --pp 2 --steps 5", "mpiexec -n 4 python train.py --tp 2 --pp 2 --steps 5"),
    ("train.py tiny-moe --ep 4", "mpiexec -n 4 python train.py tiny-moe --ep 4"),
    ("train.py --shard 2 --zero 1", "--shard 2 needs 2 ranks: mpiexec -n 2"),
    ("train.py -n 3", "mpiexec -n 3 python train.py"),
    ("train.py --nproc_per_node=2 --tp 2", "mpiexec -n 2 python train.py --tp 2"),
    ("train.py --nnodes 2 --node_rank 0", "--nnodes: it belongs to the launcher, before the program"),
    # nanoGPT and wordplay
    ("train.py config/train_shakespeare_char.py", "perhaps shakespeare-char is meant"),
    ("train.py --block_size=64 --batch_size=12 --max_iters=20",
     "python train.py --seq-len 64 --micro-batch 12 --steps 20"),
    ("train.py --device=cpu", "CUDA_VISIBLE_DEVICES=-1 in front hides it"),
    ("train.py --init_from=resume", "python train.py --resume auto"),
    ("train.py --init_from gpt2 --data data/chars", "hf download"),
    ("train.py --dtype=float16", "python train.py --dtype fp16"),
    ("train.py --gradient_accumulation_steps 5", "give --global-batch"),
    ("sample.py --out_dir=out/run", "python sample.py out/run"),
    ("sample.py out/run --start=hi --num_samples=3", "python sample.py out/run --prompt hi --n 3"),
    ("train.py train.backend=DDP data=shakespeare train.dtype=bf16 model.batch_size=64 model.block_size=1024 "
     "train.max_iters=1000 train.log_interval=10 train.compile=false",
     "train.backend: leave it out, it is done or chosen without a flag; in our words: python train.py --data "
     "shakespeare --dtype bf16 --micro-batch 64 --seq-len 1024 --steps 1000 --log-every 10 --compile false"),
    # Hugging Face
    ("train.py --per_device_train_batch_size 4 --fp16 True --gradient_checkpointing",
     "python train.py --micro-batch 4 --dtype fp16 --recompute full"),
    ("train.py --num_train_epochs 3", "give --steps"),
    ("train.py --bf16 False --report_to wandb", "python train.py --wandb online"),
    ("train.py --model_name_or_path out/run", "python train.py --init-from out/run"),
    ("convert.py import gpt2 --out x", "hf download"),
    # Megatron-LM
    ("train.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "train.py --tp 2 --pp 2"),
    ("train.py --use-distributed-optimizer --sequence-parallel", "python train.py --zero 1"),
    ("train.py --swiglu --normalization RMSNorm", "give --norm rms or --norm layer; in our words: python "
     "train.py --mlp swiglu"),
    # Slips
    ("train.py tinny", "perhaps tiny is meant, of tiny, tiny-moe"),
    ("train.py --n-layer 3 gpt2", "a preset is the first word"),
    ("train.py n_layer=3", "python train.py --n-layer 3"),
    ("train.py --stepz 3", "perhaps you meant --steps"),
    ("train.py --no-plots", "perhaps you meant --plot"),
    ("train.py --steps 1e3", "--steps: invalid literal for int() with base 10: '1e3'"),
    ("train.py --resume", "python train.py --resume auto"),
    ("train.py --compile=maybe", "Unrecognized options: maybe"),
    # Sizes
    ("train.py --n-embd 190 --n-head 6", "try --n-head 5"),
    ("train.py --global-batch 15", "try --global-batch 16"),
    ("train.py --n-experts 4 --top-k 9", "try --top-k 4"),
    # Paths
    ("train.py --data chars", "data/chars"),
    ("train.py --data input.txt", "python prepare.py input.txt --name input"),
    ("train.py input.txt", "python prepare.py input.txt --name input"),
    ("train.py out/run", "--config out/run"),
    ("train.py --data data/chars --resume out/rum", "out/run"),
    ("sample.py out/rum", "out/run"),
    ("plot.py out/rum", "out/run"),
    ("prepare.py inptu.txt --name x", "input.txt"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, config/train_shakespeare_char.py, the data set data/chars and the run out/run."""
    home = tmp_path_factory.mktemp("home")
    with contextlib.chdir(home), contextlib.redirect_stdout(io.StringIO()):
        lines = [f"Line {i * i} of a text, which is {i % 7} lines from here.\n\n" for i in range(2000)]
        Path("input.txt").write_text("".join(lines))
        Path("config").mkdir()
        Path("config/train_shakespeare_char.py").write_text("out_dir = 'x'\n")
        prepare.main(["input.txt", "--name=chars", "--tokenizer=char"])
        small = ("--data=data/chars --steps=2 --n-layer=1 --n-embd=16 --ffn-hidden=16 --seq-len=16 "
                 "--out=out/run --no-plot --no-report --eval-iters=1")
        done = session(World(), small.split())
        assert done["code"] == 0, done["err"]
    return home


def typed(command):
    """Return {"code", "err"} of a command, which runs in this process."""
    program, *argv = shlex.split(command)
    code = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            MAIN[program](argv)
        except SystemExit as leaving:
            code = leaving.code
    if program == "train.py" and code == 0:  # the flags are right: what they name is not
        return session(World(), argv)
    return {"code": code, "err": err.getvalue()}


def test_wrong_commands_of_a_first_hour_name_their_fix(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(Path().rglob("*"))
    failed = []
    for command, fix in WRONG:
        try:
            assert_refused(typed(command), fix)
        except AssertionError as e:
            failed.append(f"{command}: {e}")
    assert not failed, "\n".join(failed)
    assert len(WRONG) == 44
    assert sorted(Path().rglob("*")) == before, "a refused command leaves nothing behind"


def test_the_line_of_a_launcher_works_when_it_is_typed(tmp_path):
    """The fix is the line that the wrong command prints."""
    small = (" --n-layer=1 --n-embd=16 --ffn-hidden=16 --seq-len=16 --steps=1 --eval-every=0 "
             "--data=synthetic --no-plot --no-report")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    shell = dict(shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    refused = subprocess.run("python train.py --tp 2" + small, **shell)
    assert refused.returncode == 2
    done = subprocess.run(re.search("mpiexec .*", refused.stderr)[0], **shell)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 ranks here" in done.stdout and "step=1/" in done.stdout


# -----------------------------------------------------------------------------
# Words of others

# What train.py is given by scripts of Megatron-LM: a mixture of experts, and BERT
MEGATRON = """
--disable-bias-linear --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope
--rotary-base 100000 --num-layers 24 --hidden-size 512 --num-attention-heads 4 --group-query-attention
--num-query-groups 1 --ffn-hidden-size 1792 --swiglu --normalization RMSNorm --init-method-std 0.02
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --num-experts 64
--moe-router-topk 1 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-token-dispatcher-type alltoall --moe-router-pre-softmax --moe-grouped-gemm
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4
--sequence-parallel --use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer --tokenizer-model llama
--train-data-path data/x --valid-data-path data/y --micro-batch-size 8 --global-batch-size 64
--train-iters 40000 --lr-decay-iters 38000 --lr-warmup-iters 1000 --lr 0.0006 --min-lr 0.00006
--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-flash-attn
--accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce --overlap-param-gather
--no-gradient-accumulation-fusion --save out/x --load out/x --save-interval 1000000 --use-dist-ckpt
--auto-detect-ckpt-format --dist-ckpt-format zarr --ckpt-fully-parallel-save
--use-checkpoint-opt_param-scheduler --log-interval 20 --log-throughput --log-params-norm
--log-num-zeros-in-grad --log-progress --eval-interval 1000 --eval-iters 10 --tensorboard-dir t
--tensorboard-log-interval 20 --log-timers-to-tensorboard --log-memory-to-tensorboard
--log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --no-load-optim --no-load-rng
--wandb-project megatron --wandb-exp-name x --lr-warmup-fraction 0.01 --vocab-file v.txt --split 949,50,1
--fp16 --checkpoint-activations --data-path x --embed-layernorm --pp-partition-method type:transformer
--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 23456 --hostfile h
"""
WORDPLAY = """
train.backend=DDP train.eval_interval=100 train.dtype=bf16 model.batch_size=64 model.block_size=1024
train.max_iters=1000 train.log_interval=10 train.device=cpu train.ds_config_path=x train.precision=bf16
train.ngpus=4 train.use_wandb=true train.eval_only=false train.always_save_checkpoint=false
train.init_from=scratch train.wandb_project=x train.warmup_iters=100 train.framework=pytorch
model.activation=gelu data.dataset=x data.out_dir=y optimizer.gas=1 optimizer.learning_rate=0.0006
optimizer.grad_clip=1.0 optimizer.decay_lr=true optimizer.lr_decay_iters=600 optimizer.min_lr=0.00006
"""
PREPROCESS = """
--input a.jsonl --input_dir a --output-prefix x --output_file_name x --valid_file_name y --append-eod
--tokenizer-model llama --tokenizer-type HuggingFaceTokenizer --merge-file m.txt
"""


def test_all_words_of_a_command_are_answered_at_once():
    """What is left of a command of others is made of flags that train.py knows."""
    for text in (MEGATRON, WORDPLAY):
        with pytest.raises(ValueError, match="in our words: ") as e:
            parse(text.split())
        command = re.search("in our words: mpiexec -n [48] python train.py (.*)$", str(e.value))
        parse([*shlex.split(command[1]), "--dtype", "bf16"])


def word_and_value(text):
    """Yield ([word, its value]) for each flag of a text."""
    group = []
    for word in text.split():
        if group and (word.startswith("--") or "=" in word):
            yield group
            group = []
        group.append(word)
    yield group


@pytest.mark.parametrize("cls,text", [(Config, MEGATRON), (Config, WORDPLAY), (prepare.Flags, PREPROCESS)])
def test_each_word_is_answered(cls, text):
    prog = "train.py" if cls is Config else "prepare.py"
    for group in word_and_value(text):
        if words.key_of(group[0]) in cls.__dataclass_fields__ and "." not in group[0]:
            continue  # it is ours, too
        with pytest.raises(ValueError, match="in our words: "):
            command_line(cls, group, prog, "")


def test_each_word_leads_to_a_flag_of_ours():
    """A word of the table is none of our flags, and its answer is one."""
    ours = {"train.py": Config, "prepare.py": prepare.Flags, "sample.py": sample.Flags, "plot.py": plot.Flags,
            "convert.py": convert.Flags}
    for prog, table in {"train.py": words.TRAIN, **words.OTHERS}.items():
        fields = ours.get(prog, PlanFlags).__dataclass_fields__
        for word, answer in words.read_table(table).items():
            flag = re.fullmatch("(--[a-z0-9-]+)( [a-z0-9]+)?", answer)
            assert word not in fields or word == "preset", word
            if flag:
                assert words.key_of(flag[1]) in fields, word
                allowed = typing.get_args(fields[words.key_of(flag[1])].type)
                value = (flag[2] or "").strip()
                assert not value or not allowed or value in map(str, allowed), word


def test_words_that_look_foreign_and_are_values_stay():
    cfg = parse(["--prompt", "model.x=3", "--lr=1e-3", "--train-range-to-skip", "1", "2", "3", "4"])
    assert (cfg.prompt, cfg.lr, cfg.train_range_to_skip) == ("model.x=3", 1e-3, (1, 2, 3, 4))
    assert parse(["--n_layer", "3", "--pdb", "-1"]).n_layer == 3


# -----------------------------------------------------------------------------
# Each check says what to try

# Values of which random misfits are made: many do not fit each other, or one process
RANDOM = {
    "--n-embd": (64, 96, 100, 130, 250), "--n-head": (2, 3, 6, 8, 12), "--n-kv-head": (1, 2, 3, 4),
    "--seq-len": (30, 64, 100), "--n-layer": (2, 3, 7), "--ffn-hidden": (100, 129, 256),
    "--tp": (2, 3, 4, 8), "--cp": (2, 3, 4), "--pp": (2, 3, 5), "--ep": (2, 3, 4), "--pp-chunks": (2, 3),
    "--zero": (1, 2, 3), "--shard": (2, 3, 4), "--n-experts": (2, 4, 6, 8), "--top-k": (1, 2, 5, 9),
    "--n-shared-experts": (1,), "--router": ("softmax-topk", "sigmoid"), "--lora": (4,),
    "--global-batch": (8, 15, 48, 100), "--micro-batch": (1, 3, 8), "--recompute": ("selective", "full"),
    "--rampup-batch-size": ("4 4 100", "5 7 100")}
MOST_MESSAGES = 10


def refusal(argv, ranks):
    """Return what train.py says of flags on a number of ranks, or ""."""
    try:
        cfg = parse(argv)
        if ranks == 1:
            check_alone(cfg, argv)
        check_flags(cfg, ranks)
    except ValueError as e:
        return str(e)
    return ""


def followed(argv, ranks, said):
    """Return (argv, ranks) as a message says."""
    launched = re.search("(?:needs|start a multiple of) ([0-9]+) ranks", said)
    if launched:
        return argv, int(launched[1])
    tried = re.search(r"(?:try|add) --([\w-]+) ([^,;]+)(?:, or .*)?$", said)
    left_out = re.search(r"leave out --([\w-]+)", said)
    assert tried or left_out, f"{argv} on {ranks} ranks: {said}"
    if tried:
        changed = change_words(argv, {words.key_of(tried[1]): None})
        return [*changed, f"--{tried[1]}", *tried[2].split()], ranks
    return change_words(argv, {words.key_of(left_out[1]): None}), ranks


def test_who_follows_the_hints_is_never_stuck():
    """Each message of a random misfit names the next thing to type, until the flags fit."""
    draw = random.Random(6)
    messages = []
    while len(messages) < 100:
        argv = []
        for name in draw.sample(sorted(RANDOM), draw.randint(1, 6)):
            argv += [name, *str(draw.choice(RANDOM[name])).split()]
        ranks = draw.choice([1, 1, 2, 4])
        for count in itertools.count():
            said = refusal(argv, ranks)
            if not said:
                break
            assert count < MOST_MESSAGES, f"{argv} on {ranks}: {said}"
            argv, ranks = followed(argv, ranks, said)
        if count:
            messages.append(count)


# -----------------------------------------------------------------------------
# Paths, and words that stay

def test_a_home_folder_is_expanded_behind_an_equals_sign(tmp_path, monkeypatch):
    """A shell leaves ~ there as it is, and a folder of that name would hold the run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["--out=~/run", "--data", "~/data"]).out == f"{tmp_path}/run"
    assert parse(["--out=~run", "--prompt=a ~/b"]).out == "~run"
    flags = command_line(prepare.Flags, ["a.txt", "--name=x", "--out=~/data"], "prepare.py", "")
    assert flags.out == f"{tmp_path}/data"


def test_init_from_takes_the_shape_of_the_checkpoint(folder, monkeypatch):
    """The run has another width and length than the preset; flags that are typed win."""
    monkeypatch.chdir(folder)
    for source in ("out/run", "out/run/step_000002"):
        cfg = parse([f"--init-from={source}", "--ffn-hidden=32"])
        assert (cfg.n_layer, cfg.n_embd, cfg.ffn_hidden, cfg.seq_len) == (1, 16, 32, 128)
        assert (cfg.steps, cfg.data, cfg.out) == (Config.steps, Config.data, Config.out)  # they are no shape
    assert parse(["tiny-moe", "--init_from", "out/run"]).n_experts == 8
    argv = "--init-from out/run --data data/chars --seq-len 16 --steps 1 --out fine --no-plot --no-report"
    done = session(World(), [*argv.split(), "--eval-every=0", "--micro-batch=2"])
    assert done["code"] == 0 and "starts from the weights of out/run" in done["out"], done["err"]
    Path("bare").mkdir()
    assert parse(["--init-from=bare"]).n_embd == 128


def test_changed_words_keep_the_others():
    argv = ["gpt2", "--steps", "5", "--train-range-to-skip", "1", "2", "--no-plot", "--resume=auto"]
    changed = change_words(argv, {"resume": "auto", "train_range_to_skip": None, "plot": None, "steps": 9})
    assert changed == ["gpt2", "--resume", "auto", "--steps", "9"]

"""A hundred wrong commands of people who come from nanoGPT, nanochat, Hugging Face, Megatron-LM and torchrun.

Each is typed into the program's main() in one process, in a folder with a text, a data set and a run. It must
end with exit code 2 and one line that names the fix. `make test` asks whether the flags of the fixes fit each
other. `make long` types every fix, with flags appended that make the model small, and each must end with exit
code 0: those of one process run in this one, and a shell starts lines for mpiexec or torchrun as they are
printed. Some rows have no fix that could be typed; NOT_TYPED says why.
"""
import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
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
from cost import plan_flags
from interface import nearest, paths, words
from interface.command_line import hint_of, parse, wrong_input
from runtime.launch import World


def read_flags(argv):
    """Do what train.py does first with the flags of one process."""
    with wrong_input():
        nearest.check_alone(parse(argv), argv)


MAIN = {"train.py": read_flags, "prepare.py": prepare.main, "sample.py": sample.main, "plot.py": plot.main,
        "convert.py": convert.main, "plan.py": plan.main}
MPI = "mpiexec -n"

# The command without python; words that its line must have; the fixed command of train.py, or ""
WRONG = [
    # A launcher that was forgotten, or that stands behind the program
    ("train.py --tp 2", f"{MPI} 2 python train.py --tp 2", ""),
    ("train.py --pp 2 --steps 5", f"{MPI} 2 python train.py --pp 2 --steps 5", ""),
    ("train.py --cp 2", f"{MPI} 2 python train.py --cp 2", ""),
    ("train.py --tp 2 --pp 2", f"{MPI} 4 python train.py --tp 2 --pp 2", ""),
    ("train.py tiny-moe --ep 4", f"{MPI} 4 python train.py tiny-moe --ep 4", ""),
    ("train.py --tp 3", f"n-head 4 does not divide by tp 3; start 4: {MPI} 4 python train.py --tp 4", ""),
    ("train.py --pp 5", f"{MPI} 4 python train.py --pp 4", ""),
    ("train.py -n 3", f"{MPI} 3 python train.py", "train.py"),
    ("train.py -np 2 --tp 2", f"{MPI} 2 python train.py --tp 2", ""),
    ("train.py --nproc_per_node=2 --tp 3", f"{MPI} 2 python train.py --tp 2", ""),
    ("train.py --nproc-per-node 8 --zero 1", f"{MPI} 8 python train.py --zero 1", "train.py --zero 1"),
    ("train.py --nnodes 2 --node_rank 0", f"before the program: {MPI} 1 python train.py", ""),
    ("train.py --standalone --nproc_per_node 4", f"{MPI} 4 python train.py", "train.py"),
    ("train.py --local_rank 0", "before the program", "train.py"),
    ("train.py --num_processes 2 --steps 3", f"{MPI} 2 python train.py --steps 3", ""),
    ("train.py -n 2 --fp16", f"{MPI} 2 python train.py --dtype fp16", ""),
    # nanoGPT
    ("train.py config/train_shakespeare_char.py",
     "python prepare.py input.txt --name shakespeare --tokenizer char, then python train.py shakespeare-char "
     "--data data/shakespeare; it wants a GPU", ""),
    ("train.py config/train_shakespeare_char.py --batch_size=32 --device=cpu",
     "then python train.py shakespeare-char --micro-batch 32 --data data/shakespeare; it wants a GPU, a step "
     "takes a minute and more on a CPU; --device is no flag", ""),
    ("train.py config/train_gpt2.py", "--tokenizer gpt2, then python train.py gpt2 --data data/NAME; it",
     "train.py gpt2"),
    ("train.py --block_size=64", "--seq-len", "train.py --seq-len 64"),
    ("train.py --batch_size=12", "--micro-batch", "train.py --micro-batch 12"),
    ("train.py --max_iters 20", "--steps", "train.py --steps 20"),
    ("train.py --device=cpu", "CUDA_VISIBLE_DEVICES=-1", ""),
    ("train.py --eval_interval 10", "--eval-every", "train.py --eval-every 10"),
    ("train.py --eval_only=True", "python sample.py RUN --score FILE.txt", ""),
    ("train.py --out_dir=out-x", "--out", "train.py --out out-x"),
    ("train.py --dataset=chars", "--data", "train.py --data data/chars"),
    ("train.py --gradient_accumulation_steps 5", "--global-batch", "train.py --global-batch 40"),
    ("train.py --learning_rate=1e-3 --lr_decay_iters=9", "--decay-steps",
     "train.py --lr 1e-3 --decay-steps 9"),
    ("train.py --init_from=resume", "--resume auto", "train.py --resume auto"),
    ("train.py --init_from gpt2", "convert.py import gpt2 --out out/gpt2", ""),
    ("train.py --init_from=scratch", "leave it out", "train.py"),
    ("train.py --decay_lr False", "--min-lr", "train.py --lr 1e-3 --min-lr 1e-3"),
    ("train.py --wandb_log=True", "--wandb online", "train.py --wandb online"),
    ("train.py --dtype=float16", "--dtype fp16", "train.py --dtype fp16"),
    ("train.py --always_save_checkpoint", "leave it out", "train.py"),
    ("train.py --n_layers 3", "--n-layer", "train.py --n-layer 3"),
    ("train.py --backend nccl", "leave it out", "train.py"),
    ("train.py --grad_clip=0.5", "--clip", "train.py --clip 0.5"),
    ("sample.py --out_dir=out/run", "python sample.py out/run", ""),
    ("sample.py out/run --start=hi --num_samples=3", "--start is --prompt here; --num_samples is --n here",
     ""),
    ("sample.py out/run --temp 0.5", "--temperature", ""),
    ("sample.py out/run --max_tokens 5", "--max-new-tokens", ""),
    ("sample.py out/run --top_p 0.9", "--top-k", ""),
    ("sample.py out/run --device cpu", "leave it out", ""),
    ("train.py --start hi", "--prompt", "train.py --prompt hi --data data/chars"),
    ("train.py --num_samples 3", "sample.py RUN --prompt", ""),
    # nanochat
    ("train.py --depth 4", "--n-layer", "train.py --n-layer 4"),
    ("train.py --device_batch_size=4", "--micro-batch", "train.py --micro-batch 4"),
    ("train.py --total_batch_size 4096", "--global-batch", "train.py --global-batch 32"),
    ("train.py --num_iterations=9", "--steps", "train.py --steps 9"),
    ("train.py --matrix_lr 0.02", "--muon-lr-factor", "train.py --optimizer muon --muon-lr-factor 2"),
    ("train.py --run=dummy", "--wandb online", ""),
    ("train.py --target_param_data_ratio 20", "--steps", ""),
    ("sample.py --model_tag d20", "python sample.py RUN", ""),
    # Hugging Face
    ("train.py --fp16", "--dtype fp16", "train.py --dtype fp16"),
    ("train.py --bf16 True", "--dtype bf16", "train.py --dtype bf16"),
    ("train.py --num_train_epochs 3", "--steps", ""),
    ("train.py --per_device_train_batch_size 4", "--micro-batch", "train.py --micro-batch 4"),
    ("train.py --per_device_eval_batch_size 4", "leave it out", "train.py"),
    ("train.py --gradient_checkpointing", "--recompute full", "train.py --recompute full"),
    ("train.py --resume_from_checkpoint out/run", "--resume", ""),
    ("train.py --model_name_or_path x", "--init-from", ""),
    ("train.py --report_to wandb", "--wandb online", "train.py --wandb online"),
    ("train.py --warmup_ratio 0.1", "--warmup", "train.py --warmup 40"),
    ("train.py --fsdp full_shard", "--zero 3", "train.py --zero 3"),
    ("train.py --deepspeed ds.json", "--zero 1, 2 or 3", "train.py --zero 2"),
    ("train.py --torch_dtype bfloat16", "--dtype bf16", "train.py --dtype bf16"),
    ("train.py --save_total_limit 2", "--keep", "train.py --keep 2"),
    ("train.py --optim adamw_torch", "--optimizer adamw", "train.py --optimizer adamw"),
    ("train.py --lr_scheduler_type constant", "--min-lr", "train.py --lr 1e-3 --min-lr 1e-3"),
    ("train.py --lr_scheduler_type linear", "--decay-ratio 1", "train.py --lr-schedule wsd --decay-ratio 1"),
    ("train.py gpt2-medium", "perhaps gpt2 is", "train.py gpt2"),
    ("train.py gpt2-large", "perhaps gpt2 is", "train.py gpt2"),
    ("train.py llama3", "perhaps llama-3.2-1b is", ""),
    ("train.py llama-3", "perhaps llama-3.2-1b is", ""),
    ("train.py --init-from meta-llama/Llama-3.2-1B",
     "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B (pip install huggingface_hub), then "
     "python convert.py import Llama-3.2-1B --out out/Llama-3.2-1B, then --init-from out/Llama-3.2-1B", ""),
    ("convert.py import openai-community/gpt2",
     "hf download openai-community/gpt2 --local-dir gpt2 (pip install huggingface_hub), then python "
     "convert.py import gpt2 --out out/gpt2", ""),
    ("convert.py import gpt2 --out x", "then python convert.py import gpt2 --out x", ""),
    ("sample.py gpt2", "then python sample.py gpt2", ""),
    ("convert.py export out/run --out x --format safetensors", "--format is no flag: export writes", ""),
    ("train.py --strategy ddp", "--zero 3 is fsdp", "train.py --zero 3"),
    ("train.py --accelerator gpu", "a GPU is taken if there is one", "train.py"),
    ("train.py --devices 2", f"{MPI} 2 python train.py", ""),
    ("train.py --num_nodes 2", f"before the program: {MPI} 1 python train.py", ""),
    ("train.py --version", "git log -1", "train.py"),
    ("train.py --no-plots", "perhaps you meant --no-plot;", "train.py --no-plot"),
    ("sample.py out/run --version", "git log -1", ""),
    ("train.py --dataloader_num_workers 2", "leave it out", "train.py"),
    ("train.py --use_cache", "leave it out", "train.py"),
    ("train.py --attention_bias", "--qkv-bias", "train.py --qkv-bias"),
    ("train.py --moe", "python train.py tiny-moe", "train.py tiny-moe"),
    ("train.py --zero_optimization", "--zero 1, 2 or 3", "train.py --zero 1"),
    ("train.py --use_muon", "--optimizer muon", "train.py --optimizer muon"),
    ("train.py --muon", "--optimizer muon", "train.py --optimizer muon"),
    ("sample.py -p hi", "-p is --prompt here", ""),
    ("sample.py out/run -n 2", "-n is --n here", ""),
    ("sample.py out/run --stream", "--chat and --serve", ""),
    ("sample.py out/run --num_beams 3", "--top-k", ""),
    ("sample.py out/run --use_cache", "leave it out", ""),
    ("plot.py out/run --title x", "leave it out", ""),
    ("plot.py out/run --smooth 3", "leave it out", ""),
    ("plot.py out/run --format png", "--png FILE", ""),
    ("convert.py --model_name_or_path x", "convert.py import MODEL_DIR --out DIR", ""),
    ("prepare.py --train_file input.txt", "python prepare.py input.txt --name input", ""),
    # Megatron-LM
    ("train.py --tensor-model-parallel-size 2", "--tp", ""),
    ("train.py --pipeline-model-parallel-size 2", "--pp", ""),
    ("train.py --use-distributed-optimizer", "--zero 1", "train.py --zero 1"),
    ("train.py --sequence-parallel", "leave it out", "train.py"),
    ("train.py --micro-batch-size 4 --global-batch-size 8", "--global-batch-size is --global-batch here",
     "train.py --micro-batch 4 --global-batch 8"),
    ("train.py --seq-length 64 --hidden-size 64", "--hidden-size is --n-embd",
     "train.py --seq-len 64 --n-embd 64"),
    ("train.py --num-layers-per-virtual-pipeline-stage 1", "--pp-chunks", ""),
    ("train.py --recompute-granularity selective", "--recompute", "train.py --recompute selective"),
    ("train.py --num-experts 8 --moe-router-topk 2", "--moe-router-topk is --top-k",
     "train.py --n-experts 8 --top-k 2"),
    ("train.py --swiglu", "--mlp swiglu", "train.py --mlp swiglu"),
    ("train.py --normalization RMSNorm", "--norm rms", "train.py --norm rms"),
    ("train.py --vocab-file v.json", "prepare.py FILE... --name NAME --tokenizer", ""),
    ("train.py --data-path data/chars", "--data", "train.py --data data/chars"),
    ("train.py --exit-duration-in-mins 5", "--max-minutes", "train.py --max-minutes 5"),
    # paths
    ("train.py --data chars", "--data data/chars", "train.py --data data/chars"),
    ("train.py --data data/chras", "--data data/chars", "train.py --data data/chars"),
    ("train.py --data data/", "--data data/chars", "train.py --data data/chars"),
    ("train.py --data input.txt", "python prepare.py input.txt --name input, then --data data/input", ""),
    ("train.py --data nowhere", "python prepare.py FILE... --name nowhere, then --data data/nowhere", ""),
    ("train.py --data data/chars --resume out/rum", "out/run", ""),
    ("train.py --data data/chars --resume out/run", "out/run/step_000002", ""),
    ("train.py input.txt", "python prepare.py input.txt --name input, then --data data/input", ""),
    ("train.py data/chars", "--data data/chars", "train.py --data data/chars"),
    ("train.py out/run", "--config out/run", ""),
    ("train.py out/run/config.json", "--config out/run/config.json", ""),
    ("train.py --config out/rum", "out/run", ""),
    ("sample.py out/rum", "out/run", ""),
    ("sample.py run", "out/run", ""),
    ("sample.py out", "out/run", ""),
    ("plot.py out/rum", "out/run", ""),
    ("convert.py export out/rum --out x", "out/run", ""),
    ("prepare.py inptu.txt --name x", "input.txt", ""),
    ("prepare.py input.txt --name x --tokenizer data/chras", "data/chars", ""),
    # sizes and shapes
    ("train.py --n-embd 190 --n-head 6", "--n-embd 192", "train.py --n-embd 192 --n-head 6"),
    ("train.py --n-embd 100", "--n-embd 104", "train.py --n-embd 104"),
    ("train.py --n-head 5", "--n-head 4", "train.py --n-head 4"),
    ("train.py --n-head 8 --n-kv-head 3", "--n-kv-head 4", "train.py --n-head 8 --n-kv-head 4"),
    ("train.py --global-batch 15", "--global-batch 16", "train.py --global-batch 16"),
    ("train.py --n-experts 4 --top-k 9", "--top-k 4", "train.py --n-experts 4 --top-k 4"),
    ("train.py --pp-chunks 2", "--pp-chunks 1", "train.py --pp-chunks 1"),
    ("train.py --n-embd 100 --shard 2", f"{MPI} 2 python train.py --shard 2 --n-embd 104 --zero 1", ""),
    ("train.py --shard 2 --zero 1", f"needs 2 ranks, and one process is started; start 2: {MPI} 2", ""),
    ("train.py --n-head 6 --tp 4 --ep 4 --pp-chunks 2",
     f"try --n-head 8 --n-experts 8 --pp-chunks 1, on 4 ranks: {MPI} 4 python train.py --tp 4 --ep 4", ""),
    ("train.py --ep 2", f"try --n-experts 8, on 2 ranks: {MPI} 2 python train.py --ep 2 --n-experts 8", ""),
    ("plan.py gpt2 --gpus 8 --tp 8", "--tp 4", ""),
    ("plan.py tiny --nnodes 2", "--gpus", ""),
    ("plan.py tiny --num_gpus 2", "--gpus", ""),
    # slips
    ("train.py shakespeare_char", "shakespeare-char", "train.py shakespeare-char"),
    ("train.py tinny", "tiny", "train.py tiny"),
    ("train.py --n-layer 3 gpt2", "a preset is the first word: python train.py gpt2",
     "train.py gpt2 --n-layer 3"),
    ("train.py n_layer=3", "--n-layer 3", "train.py --n-layer 3"),
    ("train.py --resume", "--resume auto", "train.py --resume auto"),
    ("train.py --stepz 3", "--steps", "train.py --steps 3"),
    ("train.py --blocksize 64", "--seq-len", "train.py --seq-len 64"),
    ("prepare.py input.txt --name x --seed 1 --batch_size 3", "flag of train.py", ""),
    ("plot.py out/run --logy", "--log", ""),
    ("prepare.py input.txt", "python prepare.py input.txt --name input", ""),
    ("prepare.py shakespeare", "shakespeare is not a file", ""),
    ("prepare.py latin1.txt --name x", "iconv -f LATIN1 -t UTF-8 latin1.txt > latin1.txt.utf8 (if its", ""),
    ("prepare.py empty.jsonl --name x", "empty.jsonl: no text is in it; give files that have some", ""),
    ("prepare.py chat", "chat needs FILE.jsonl, with a conversation on each line; --name NAME, the folder "
     "under data/; --tokenizer, that of the model (data/stdlib, or a published one): python prepare.py chat "
     "FILE.jsonl --name NAME --tokenizer data/stdlib", ""),
    ("prepare.py chat --seq-len 64 --out other", "the folder under other/; --tokenizer, that of the model "
     "(data/stdlib, or a published one): python prepare.py chat FILE.jsonl --seq-len 64 --out other --name "
     "NAME --tokenizer data/stdlib", ""),
    ("sample.py out/run --chat --n 3", "leave out --n", ""),
    ("sample.py", "no RUN is given: the --out directory of a run of train.py, for example python", ""),
    ("convert.py", "for example python convert.py export out/tiny --out hf/tiny", ""),
    ("train.py --steps 1e3", "it takes a whole number: --steps 1000", ""),
    ("train.py --steps 2k", "--steps 2000", ""),
    ("train.py --steps 1.5", "it takes a whole number, for example --steps 1000", ""),
    ("train.py --lr fast", "it takes a number, for example --lr 0.001", "train.py --lr 0.001"),
    ("train.py --lr 1,5", "it takes a number, for", "train.py --lr 1.5"),
    ("prepare.py input.txt --name x --tokenizer nothere", "choose char, bpe", ""),
    ("convert.py import nowhere --out x", "downloaded model", ""),
]

# What the answers to other rows say to type: commands of one process, one after the other
ALSO = {
    "train.py --device=cpu": "train.py",
    "sample.py --out_dir=out/run": "sample.py out/run",
    "sample.py out/run --start=hi --num_samples=3": "sample.py out/run --prompt hi --n 3",
    "sample.py out/run --temp 0.5": "sample.py out/run --temperature 0.5",
    "sample.py out/run --max_tokens 5": "sample.py out/run --max-new-tokens 5",
    "sample.py out/run --top_p 0.9": "sample.py out/run --temperature 0.9 --top-k 5",
    "sample.py out/run --device cpu": "sample.py out/run",
    "train.py --num_samples 3": "sample.py out/run --prompt hi",
    "train.py --run=dummy": "train.py --wandb online --out dummy",
    "train.py --target_param_data_ratio 20": "plan.py tiny --tokens 16e6; train.py --steps 3",
    "sample.py --model_tag d20": "sample.py out/run",
    "train.py --num_train_epochs 3": "train.py --steps 3",
    "train.py --resume_from_checkpoint out/run": "train.py --data data/chars --resume out/run/step_000002",
    "train.py --model_name_or_path x": "train.py --data data/chars --init-from out/run",
    "prepare.py --train_file input.txt": "prepare.py input.txt --name input",
    "train.py --vocab-file v.json": "prepare.py input.txt --name x --tokenizer bpe; train.py --data data/x",
    "train.py --data input.txt": "prepare.py input.txt --name input; train.py --data data/input",
    "train.py --data nowhere": "prepare.py input.txt --name nowhere; train.py --data data/nowhere",
    "train.py --data data/chars --resume out/rum": "train.py --data data/chars --resume out/run/step_000002",
    "train.py --data data/chars --resume out/run": "train.py --data data/chars --resume auto --out out/run",
    "train.py input.txt": "prepare.py input.txt --name input; train.py --data data/input",
    "train.py out/run": "train.py --config out/run",
    "train.py out/run/config.json": "train.py --config out/run/config.json",
    "train.py --config out/rum": "train.py --config out/run",
    "sample.py out/rum": "sample.py out/run",
    "sample.py run": "sample.py out/run",
    "sample.py out": "sample.py out/run",
    "plot.py out/rum": "plot.py out/run",
    "convert.py export out/rum --out x": "convert.py export out/run --out x",
    "prepare.py inptu.txt --name x": "prepare.py input.txt --name x",
    "prepare.py input.txt --name x --tokenizer data/chras":
        "prepare.py input.txt --name x --tokenizer data/chars",
    "plan.py gpt2 --gpus 8 --tp 8": "plan.py gpt2 --gpus 8 --micro-batch 30 --tp 4",
    "plan.py tiny --nnodes 2": "plan.py tiny --gpus 2",
    "plan.py tiny --num_gpus 2": "plan.py tiny --gpus 2",
    "prepare.py input.txt --name x --seed 1 --batch_size 3": "prepare.py input.txt --name x --seed 1",
    "plot.py out/run --logy": "plot.py out/run --log",
    "prepare.py input.txt": "prepare.py input.txt --name input",
    "prepare.py shakespeare": "prepare.py input.txt --name shakespeare",
    "prepare.py empty.jsonl --name x": "prepare.py input.txt --name x",
    "prepare.py chat": "prepare.py chat chat.jsonl --name talk --tokenizer data/chars --seq-len 64",
    "prepare.py chat --seq-len 64 --out other":
        "prepare.py chat chat.jsonl --seq-len 64 --out other --name talk --tokenizer data/chars",
    "sample.py out/run --chat --n 3": "sample.py out/run",
    "train.py config/train_shakespeare_char.py":
        "prepare.py input.txt --name shakespeare --tokenizer char; train.py shakespeare-char --data "
        "data/shakespeare",
    "train.py config/train_shakespeare_char.py --batch_size=32 --device=cpu":
        "prepare.py input.txt --name shakespeare --tokenizer char; train.py shakespeare-char --data "
        "data/shakespeare --micro-batch 32 --global-batch 32",
    "train.py llama3": "train.py llama-3.2-1b --n-head 4 --n-kv-head 4 --vocab-size 0",
    "train.py llama-3": "train.py llama-3.2-1b --n-head 4 --n-kv-head 4 --vocab-size 0",
    "train.py --steps 1e3": "train.py --steps 2",
    "train.py --steps 2k": "train.py --steps 2",
    "train.py --steps 1.5": "train.py --steps 2",
    "sample.py": "sample.py out/run",
    "sample.py -p hi": "sample.py out/run --prompt hi",
    "sample.py out/run -n 2": "sample.py out/run --n 2",
    "sample.py out/run --version": "sample.py out/run",
    "sample.py out/run --stream": "sample.py out/run",
    "sample.py out/run --num_beams 3": "sample.py out/run --top-k 5",
    "sample.py out/run --use_cache": "sample.py out/run",
    "plot.py out/run --title x": "plot.py out/run",
    "plot.py out/run --smooth 3": "plot.py out/run",
    "plot.py out/run --format png": "plot.py out/run --html page.html",
    "convert.py": "convert.py export out/run --out hf",
    "convert.py export out/run --out x --format safetensors": "convert.py export out/run --out x",
    "prepare.py input.txt --name x --tokenizer nothere": "prepare.py input.txt --name x --tokenizer char",
}
# Rows whose answer names flags or a file that only their reader can know, and why no fix is typed for them
NOT_TYPED = {
    "train.py --init_from gpt2": "it is a download",
    "convert.py --model_name_or_path x": "it is a download",
    "train.py --init-from meta-llama/Llama-3.2-1B": "it is a download",
    "convert.py import openai-community/gpt2": "it is a download",
    "convert.py import gpt2 --out x": "it is a download",
    "sample.py gpt2": "it is a download",
    "prepare.py latin1.txt --name x": "test_the_printed_iconv_converts types it",
    "convert.py import nowhere --out x": "it is a download",
    "train.py --tensor-model-parallel-size 2": "with --tp 2 it is the first row",
    "train.py --pipeline-model-parallel-size 2": "with --pp 2 it is the second row",
    "train.py --num-layers-per-virtual-pipeline-stage 1": "it needs --pp, too",
    "train.py --eval_only=True": "RUN and FILE.txt stand for what only the user knows",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, config/train_*.py, the data set data/chars and the run out/run."""
    home = tmp_path_factory.mktemp("home")
    with contextlib.chdir(home), contextlib.redirect_stdout(io.StringIO()):
        lines = [f"Line {i * i} of a text, which is {i % 7} lines from here.\n\n" for i in range(2000)]
        Path("input.txt").write_text("".join(lines))
        Path("latin1.txt").write_bytes("Un caf\u00e9 au lait.\n\n".encode("latin-1") * 900)
        Path("empty.jsonl").touch()
        talk = [{"role": "user", "content": "Line"}, {"role": "assistant", "content": "of a text"}]
        talks = [[{**talk[0], "content": f"Line {i}"}, talk[1]] for i in range(40)]
        Path("chat.jsonl").write_text("".join(f"{json.dumps({'messages': each})}\n" for each in talks))
        Path("config").mkdir()
        for name in ("train_shakespeare_char", "train_gpt2"):
            Path("config", f"{name}.py").write_text("out_dir = 'x'\n")
        for program in MAIN:
            Path(program).symlink_to(ROOT / program)
        prepare.main(["input.txt", "--name=chars", "--tokenizer=char"])
        small = ("--data=data/chars --steps=2 --n-layer=1 --n-embd=16 --ffn-hidden=16 --seq-len=16 "
                 "--out=out/run --no-plot --no-report --eval-iters=1")
        done = session(World(), small.split())
        assert done["code"] == 0, done["err"]
    return home


def typed(command):
    """Return {"code", "err"} of a command, which runs in this process."""
    program, *argv = command.split()
    code = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            MAIN[program](argv)
        except SystemExit as leaving:
            code = leaving.code
    if program == "train.py" and code == 0:  # the flags are right: what they name is not
        return session(World(), argv)
    return {"code": code, "err": err.getvalue()}


@pytest.mark.parametrize("rows", [WRONG[::5], pytest.param(WRONG, marks=pytest.mark.long)],
                         ids=["some", "all"])
def test_a_hundred_wrong_commands_name_their_fix(rows, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = files_here()
    failed = []
    for command, fix, _ in rows:
        try:
            assert_refused(typed(command), fix)
        except AssertionError as e:
            failed.append(f"{command}: {e}")
    assert not failed, "\n".join(failed)
    assert len(WRONG) >= 100
    assert files_here() == before, "a refused command leaves nothing behind"


def files_here():
    """Return all paths."""
    return sorted(str(path) for path in Path().rglob("*"))


FIXED = [fix for _, _, fix in WRONG if fix]


@pytest.mark.parametrize("commands", [FIXED[::12], pytest.param(FIXED, marks=pytest.mark.long)],
                         ids=["some", "all"])
def test_the_fixes_are_accepted(commands, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len(FIXED) > 50
    for command in commands:
        argv = command.split()[1:]
        cfg = parse(argv)
        nearest.check_alone(cfg, argv)
        assert nearest.fits(cfg, 1), command


# Flags that make a run small, appended where the fix does not name them. The run of `folder` has those of
# SMALL.
SMALL = {"--n-layer": 1, "--n-embd": 16, "--ffn-hidden": 16, "--seq-len": 16, "--steps": 1, "--eval-iters": 1,
         "--data": "synthetic"}
GPT2 = {**SMALL, "--n-embd": 48, "--micro-batch": 1, "--global-batch": 2}
PARALLEL = {**SMALL, "--n-layer": 4, "--n-embd": 32, "--ffn-hidden": 64, "--seq-len": 32}


def made_small(command, flags):
    """Return a command of train.py with flags appended that it does not name."""
    named = {word.partition("=")[0] for word in command.split()}
    more = [f"{flag} {value}" for flag, value in flags.items() if flag not in named]
    return " ".join([command, *more, "--no-plot", "--no-report"])


def small(command):
    """Return a fix of one process with flags appended that make it quick."""
    program, *argv = command.split()
    if program == "sample.py" and "--max-new-tokens" not in argv:
        return f"{command} --max-new-tokens 3"
    if program != "train.py":
        return command
    if argv and not argv[0].startswith("-"):
        return made_small(f"{command} --no-compile", GPT2)  # compiling takes a minute and more
    if "--resume out/run" in command or "--out out/run" in command or "--config" in argv:
        return made_small(command, {**SMALL, "--data": "data/chars", "--steps": 3})
    return made_small(command, SMALL)


ONE_PROCESS = [(wrong, fix or ALSO[wrong]) for wrong, _, fix in WRONG if fix or wrong in ALSO]


@pytest.mark.long
@pytest.mark.parametrize("wrong,fix", ONE_PROCESS, ids=[wrong for wrong, _ in ONE_PROCESS])
def test_a_fix_works_when_it_is_typed(wrong, fix, folder, tmp_path, monkeypatch):
    here = shutil.copytree(folder, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(here)
    for command in fix.split("; "):
        done = typed(small(command))
        assert not done["code"], f"{command}: {done['err']}"


LAUNCHED = [f"python {wrong}" for wrong, said, _ in WRONG if said.find(MPI) >= 0]
MISFITS = ["mpiexec -n 3 python train.py --tp 2", "torchrun --nproc-per-node 3 train.py --tp 2"]
MOST_RANKS = 8


@pytest.mark.long
@pytest.mark.parametrize("wrong", [*LAUNCHED, *MISFITS])
def test_the_line_of_a_launcher_works_when_it_is_typed(wrong, folder, tmp_path):
    """The fix is the line that the wrong command prints. Both are typed into a shell."""
    here = shutil.copytree(folder, tmp_path / "here", symlinks=True)
    refused = in_a_shell(wrong, here)
    assert refused.returncode == (1 if wrong.startswith("torchrun") else 2), refused.stderr  # 1 is its own
    line = re.search("(?:mpiexec|torchrun) [^;]*", refused.stderr)[0].strip()
    ranks = int(re.search("(?:-n|--nproc-per-node) ([0-9]+)", line)[1])
    if ranks > MOST_RANKS:
        pytest.skip(f"{line}: {ranks} ranks are too many for a test")
    done = in_a_shell(made_small(line, PARALLEL), here)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    assert f"{ranks} of {ranks} ranks here" in done.stdout and "step=1/" in done.stdout


def in_a_shell(command, here):
    """Return the finished process of a command that is typed in a folder, with the tests' python."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return subprocess.run(command, shell=True, cwd=here, env=env, capture_output=True, text=True, timeout=300)


def test_each_row_has_a_fix_that_is_typed_or_says_why_not():
    kinds = {"one process": {wrong for wrong, _ in ONE_PROCESS}, "not": set(NOT_TYPED),
             "launcher": {line.removeprefix("python ") for line in LAUNCHED}}
    rows = {wrong for wrong, _, _ in WRONG}
    assert set().union(*kinds.values()) == rows and len(rows) == len(WRONG)
    assert not kinds["not"] & (kinds["one process"] | kinds["launcher"])
    assert (len(ONE_PROCESS), len(LAUNCHED) + len(MISFITS), len(NOT_TYPED)) == (147, 23, 12)


def test_a_fixed_command_trains_and_the_run_goes_on(folder, monkeypatch):
    """The fixes of two rows, typed."""
    monkeypatch.chdir(folder)
    small = "--n-layer=1 --seq-len=16 --micro-batch=2 --no-plot --no-report --eval-every=0"
    flags = [*small.split(), "--data", "data/chars", "--n-embd", "104", "--out=new"]
    first = session(World(), [*flags, "--steps=1"])
    again = session(World(), [*flags, "--steps=2", "--resume", "auto"])
    assert [first["code"], again["code"]] == [0, 0], first["err"] + again["err"]
    assert "step=2/2 " in again["out"]


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


def test_each_word_leads_to_a_flag_of_ours():
    """A word of the table is none of our flags, and its answer is one."""
    ours = {name for names in words.PROGRAMS.values() for name in names.split()} | set(words.config.FLAGS)
    for word, flag in words.FLAGS.items():
        assert flag in ours and word not in words.config.FLAGS, word
    for program, flags in {"prepare.py": prepare.Flags, "sample.py": sample.Flags, "plot.py": plot.Flags,
                           "convert.py": convert.Flags, "plan.py": plan_flags.PlanFlags}.items():
        assert set(words.PROGRAMS[program].split()) <= flags.__dataclass_fields__.keys(), program
    free = {"wandb": ("online", "off"), "resume": ("auto", "none")}
    for flag, values in words.VALUES.items():
        allowed = typing.get_args(Config.__annotations__[flag]) or free[flag]
        assert set(values.values()) <= set(allowed), flag


@pytest.mark.parametrize("ranks,argv,fix", [
    (3, "--tp 2", "start 4: mpiexec -n 4 python train.py"), (3, "--tp 2", "try --tp 1"),
    (2, "--global-batch 15", "try --global-batch 16"), (2, "--tp 2 --ffn-hidden 33", "try --ffn-hidden 34"),
    (2, "--pp 2 --zero 3", "try --zero 2"), (4, "--ep 3 --n-experts 6", "try --ep 2"),
    (6, "--tp 4 --n-layer 5", "try --tp 2"), (8, "gpt2 --tp 8 --micro-batch 7", "--tp 4")])
def test_the_nearest_layout_fits_everything(ranks, argv, fix):
    flags = argv.split()
    cfg = parse(flags)
    with pytest.raises(ValueError) as e, \
            nearest.with_fix(cfg, ranks, again=lambda n: nearest.command(n, flags)):
        nearest.check_all(cfg, ranks)
    said = str(e.value)
    assert fix in said
    assert nearest.fits(parse(nearest.change_words(flags, nearest.search(cfg, ranks))), ranks)


# Values of which random misfits are made: many do not fit each other, or one process
RANDOM = {
    "--n-embd": (64, 96, 100, 130, 250), "--n-head": (2, 3, 6, 8, 12), "--n-kv-head": (1, 2, 3, 4),
    "--seq-len": (30, 64, 100), "--n-layer": (2, 3, 7), "--ffn-hidden": (100, 129, 256),
    "--tp": (2, 3, 4, 8), "--cp": (2, 3, 4), "--pp": (2, 3, 5), "--ep": (2, 3, 4), "--pp-chunks": (2, 3),
    "--zero": (1, 2, 3), "--shard": (2, 3, 4), "--n-experts": (2, 4, 6, 8), "--top-k": (1, 2, 5, 9),
    "--n-shared-experts": (1,), "--router": ("softmax-topk", "sigmoid"), "--lora": (4,),
    "--global-batch": (8, 15, 48, 100), "--micro-batch": (1, 3, 8), "--recompute": ("selective", "full")}


def misfits(count, seed):
    """Yield (argv, what is said) of random flags that train.py refuses in one process."""
    import random
    draw = random.Random(seed)
    while count:
        names = draw.sample(sorted(RANDOM), draw.randint(1, 6))
        argv = [word for name in names for word in (name, str(draw.choice(RANDOM[name])))]
        said = refusal(argv)
        if said:
            count -= 1
            yield argv, said


def refusal(argv, ranks=1):
    """Return what train.py says of flags on a number of ranks, or ""."""
    try:
        cfg = parse(argv)
        if ranks == 1:
            nearest.check_alone(cfg, argv)
        with nearest.with_fix(cfg, ranks):
            nearest.check_all(cfg, ranks)
    except ValueError as e:
        return str(e)
    return ""


def fixed(argv, said):
    """Return (words, ranks) of the command that a message prints, or of the flags that it says to try."""
    whole = re.search(r"(?:mpiexec .*?-n (\d+) )?python train.py (.*)$", said)
    if whole:
        return whole[2].split(), int(whole[1] or 1)
    without = re.search(r"; leave out (--[\w-]+)", said)
    tried = re.search("try (--[^;]*)$", said)
    assert tried or without, f"{argv}: {said}"
    changes = dict(re.findall(r"--([\w-]+) (\S+)", tried[1])) if tried else {without[1][2:]: None}
    return nearest.change_words(argv, {name.replace("-", "_"): value for name, value in changes.items()}), 1


@pytest.mark.parametrize("count,seed", [(20, 5), pytest.param(400, 6, marks=pytest.mark.long)])
def test_the_fixes_of_random_misfits_are_complete(count, seed):
    """No fix that is printed leads to the next misfit."""
    for argv, said in misfits(count, seed):
        again = refusal(*fixed(argv, said))
        assert not again, f"{' '.join(argv)}: {said}, and then: {again}"


@pytest.mark.parametrize("flags,ranks", [
    ({"window": 8, "objective": "mlm", "shard": 3, "doc_mask": "on", "n_embd": 100, "pdb": 3}, None),
    ({"n_embd": 100, "pp_chunks": 3, "top_k": 9, "n_shared_experts": 1, "shard": 2}, None),
    ({"global_batch": 1, "micro_batch": 7, "tp": 8, "pp_layers": "3,3", "shard": 5}, 6)])
def test_where_many_flags_do_not_fit_the_line_says_so_and_is_complete(flags, ranks):
    cfg = dataclasses.replace(parse([]), **flags)
    with pytest.raises(ValueError) as e, nearest.with_fix(cfg, ranks, argv=None if ranks else []):
        nearest.check_all(cfg, ranks or nearest.needed(cfg))
    assert str(e.value).startswith("several flags do not fit: ")
    changes = nearest.search(cfg, ranks)
    assert len(changes) > 3 and nearest.fits(nearest.applied(cfg, changes), ranks)


def test_flags_that_exclude_each_other_are_not_tried_one_after_the_other():
    assert refusal(["--n-shared-experts=1", "--lora=4"]).endswith("needs experts; try --n-shared-experts 0")
    assert refusal(["--ep=2"]).startswith("--ep 2 needs experts; try ")
    assert "leave out --lora, which" in refusal(["--n-experts=4", "--lora=4"])


def test_no_fix_is_printed_where_the_preset_itself_does_not_fit(monkeypatch):
    cfg = dataclasses.replace(parse([]), pdb=3)
    with pytest.raises(ValueError, match="the ranks are 0 to 1$"), nearest.with_fix(cfg, 2):
        nearest.check_all(cfg, 2)
    monkeypatch.setattr(nearest, "MOST_TRIES", 0)
    cfg = parse(["gpt2"])
    with pytest.raises(ValueError, match="dp 7; no flags that are near fit 7 ranks, start"), \
            nearest.with_fix(cfg, 7):
        nearest.check_all(cfg, 7)


@pytest.mark.parametrize("argv,ranks", [
    ("--num_processes 2", 2), ("--np=3", 3), ("--ntasks 4", 4), ("--nnodes 2", None)])
def test_some_flags_of_launchers_count_the_ranks(argv, ranks):
    name = argv.replace("=", " ").split()[0]
    assert words.without_launcher([*argv.split(), "--tp", "2"], "train.py", ()) == ([name], ranks,
                                                                                   ["--tp", "2"])


def test_the_values_that_are_tried_near_a_flags_own():
    """Of a large one: the multiples below and above it of all that must divide it."""
    cfg = parse(["--n-embd=1000", "--tp=4", "--n-head=4", "--n-kv-head=4", "--micro-batch=1"])
    near = nearest.values_near(cfg, "n_embd", 12)
    assert near == {768, 896, 960, 976, 984, 992, 996, 998, 999, 1000, 1001, 1002, 1004, 1008, 1024}
    assert 998 in nearest.values_near(dataclasses.replace(cfg, cp=2), "n_embd", 24)
    assert nearest.values_near(cfg, "tp", 24) == {1, 2, 3, 4, 6, 8}
    assert nearest.values_near(cfg, "n_head", 24) == set(range(1, 9))
    assert not {"n_experts", "top_k"} & nearest.candidates(cfg, 4).keys()
    assert "top_k" in nearest.candidates(dataclasses.replace(cfg, n_experts=4), 4)
    assert "n_experts" in nearest.candidates(dataclasses.replace(cfg, ep=2), 4)


def test_a_start_of_more_than_twice_the_ranks_is_not_proposed():
    flags = ["--tp=8", "--n-head=8", "--n-kv-head=8"]
    for ranks, starts in ((3, False), (4, True)):
        with pytest.raises(ValueError, match="try --tp") as e, \
                nearest.with_fix(parse(flags), ranks, again=lambda n: nearest.command(n, flags)):
            nearest.check_all(parse(flags), ranks)
        assert ("start 8: " in str(e.value)) == starts and str(e.value).count("start") == starts


@pytest.mark.parametrize("argv,line", [
    ("--nproc_per_node 2 --tp 2", "mpiexec -n 2 python train.py --tp 2"),
    ("--nproc_per_node 3 --tp 2", "mpiexec -n 3 python train.py --tp 1")])
def test_a_line_for_a_launcher_keeps_the_flags_that_fit(argv, line):
    assert typed(f"train.py {argv}")["err"].rstrip().endswith(f"before the program: {line}")


def test_a_folder_of_checkpoints_is_no_misspelt_step(folder, monkeypatch):
    """Only a name like step_N asks for the steps beside it."""
    monkeypatch.chdir(folder)
    assert "out/run/step_000002" in paths.meant_run("out/run/step_7")
    assert "step_" not in paths.meant_run("out/run/weights")
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").touch()
    assert "python convert.py import adapters --base RUN --out out/NAME" in paths.meant_run("adapters")
    assert paths.make_data("data/stdlib") == "make it with: python prepare.py stdlib"
    assert paths.make_data("data/mine") == "make it with: python prepare.py FILE... --name mine"


def test_the_printed_iconv_converts(folder, tmp_path, monkeypatch):
    here = shutil.copytree(folder, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(here)
    line = re.search("iconv .* > latin1.txt.utf8", typed("prepare.py latin1.txt --name x")["err"])[0]
    assert in_a_shell(line, here).returncode == 0
    assert typed("prepare.py latin1.txt.utf8 --name x --tokenizer char")["code"] == 0
    Path("bom.txt").write_bytes("caf\u00e9".encode("utf-16"))
    assert "iconv -f UTF-16 -t UTF-8 bom.txt > bom.txt.utf8" in typed("prepare.py bom.txt --name y")["err"]


def test_a_proposed_name_needs_no_quotes_and_fill_takes_no_flags_of_a_draw(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert "--name my-text" in typed("prepare.py hf:a/b::data/*.parquet")["err"]
    fill = typed("sample.py out/run --fill [MASK] --n 3 --temperature 1")
    assert fill["code"] == 2 and "leave out --n, --temperature" in fill["err"]


@pytest.mark.parametrize("begin, program", [(b"\x1f\x8b\x08", "gunzip -k"), (b"\x28\xb5\x2f\xfd", "unzstd")])
def test_a_packed_text_is_to_be_unpacked_and_not_converted(begin, program, tmp_path, monkeypatch):
    """As Latin-1 it would be text, too: of compressed bytes."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt.packed").write_bytes(begin + b"\xff" * 900)
    assert f" && {program} text.txt.packed." in typed("prepare.py text.txt.packed --name x")["err"]


def test_of_many_runs_those_with_checkpoints_are_proposed(tmp_path, monkeypatch):
    """The newest last. A run without a checkpoint is proposed where there are not enough others."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("first", "second", "third", "a", "fourth", "z")):
        run = Path("out", name)
        (run / "step_000002" if len(name) > 1 else run).mkdir(parents=True)
        (run / "config.json").touch()
        os.utime(run, (age + 1, age + 1))
    assert paths.meant_run("nowhere").endswith("out/second, out/third or out/fourth")


@pytest.mark.parametrize("word,hint", [
    ("stepz", "--steps"), ("block-sizes", "--seq-len"), ("optimiser", "--optimizer"), ("n-embed", "--n-embd"),
    ("no-plots", "--no-plot"), ("no-cuda-graphs", "--no-cuda-graph"), ("no-zebra", ""), ("ev", ""),
    ("eval", "--eval-every or --eval-iters"), ("zebra", ""), ("strategies", ""), ("titles", ""), ("moes", ""),
    ("numbers", ""), ("versions", "")])
def test_a_flag_is_only_proposed_for_a_word_that_is_like_it(word, hint):
    said = hint_of(f"--{word}", Config)
    assert said == (f"; perhaps you meant {hint}" if hint else "")


def test_the_beginning_of_a_flag_and_a_flag_of_train_are_answered_by_other_programs():
    for command, line in (("prepare.py stdlib --val 0.1", "perhaps you meant --val-fraction;"),
                          ("plan.py --list nothere", "type python train.py --list out")):
        said = typed(command)
        assert said["code"] == 2 and line in said["err"]


@pytest.mark.parametrize("name,owner", [
    ("gpt2-xl", "openai-community"), ("Qwen/Qwen3-0.6B", "Qwen"), ("out/run", ""), ("here/model", ""),
    ("mine", ""), ("a/b/c", ""), ("../x", ""), ("here", "")])
def test_what_a_model_on_the_hub_is_called(name, owner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    said = paths.download(name, "")
    assert bool(said) == bool(owner) and f"hf download {owner}" * bool(owner) in said

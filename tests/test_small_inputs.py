"""Small inputs with a known answer, for what reads and writes files: data, models of others, checkpoints.
"""
import dataclasses
import errno
import json
import math
import os

import numpy as np
import pytest
import torch
from test_borders import refused_line

import checkpoint
import prepare
from config import Config
from corpus.order import permute
from hub import families, gguf
from interface import command_line, files

# -----------------------------------------------------------------------------
# Data sets

def test_the_order_of_a_few_samples_is_that_of_every_version():
    """A run that is resumed by a later version reads on in the same order."""
    keys = np.arange(1, 5, dtype=np.uint64)
    assert [permute(range(n), n, keys).tolist() for n in (1, 2, 3, 4, 5)] == [
        [0], [0, 1], [2, 1, 0], [2, 1, 0, 3], [4, 3, 0, 1, 2]]




# -----------------------------------------------------------------------------
# prepare.py

@pytest.mark.parametrize("number,said", [
    (errno.ENOSPC, "a cannot be written: [Errno 28] No space left on device"),
    (errno.EIO, "nanoshard: [Errno 5] Input/output error")])
def test_a_source_that_cannot_be_read_is_not_called_a_full_disk(number, said, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(prepare, "prepare_text", fail)
    (tmp_path / "a.txt").write_text("some words")
    err = refused_line(capsys, prepare.main, f"{tmp_path}/a.txt", "--name=a", f"--out={tmp_path}")
    assert said in err and ("cannot be written" in err) == (number == errno.ENOSPC)


# -----------------------------------------------------------------------------
# Models of others

def read_theirs(folder, seq_len=0, **theirs):
    (folder / "config.json").write_text(json.dumps(theirs))
    return families.read_config(folder / "config.json", "fp32", seq_len)


def test_what_a_config_json_leaves_out_is_transformers_default(hf, tmp_path):
    """The numbers of the model cards of Llama 7B, Mistral 7B, Mixtral 8x7B and GPT-2."""
    for name, want in {"llama": (32000, 4096, 32, 32, 32, 11008, 2048, 1e4),
                       "mistral": (32000, 4096, 32, 32, 8, 14336, 131072, 1e4),
                       "mixtral": (32000, 4096, 32, 32, 8, 14336, 131072, 1e6)}.items():
        _, cfg, vocab_size = read_theirs(tmp_path, model_type=name)
        assert want == (vocab_size, cfg.n_embd, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.ffn_hidden,
                        cfg.seq_len, cfg.rope_base)
    _, cfg, vocab_size = read_theirs(tmp_path, model_type="gpt2")
    assert (vocab_size, cfg.n_embd, cfg.n_layer, cfg.n_head, cfg.seq_len) == (50257, 768, 12, 12, 1024)
    assert (cfg.ffn_hidden, cfg.rope_base) == (3072, Config.rope_base)
    assert read_theirs(tmp_path, model_type="gpt2", n_inner=100)[1].ffn_hidden == 100
    assert read_theirs(tmp_path, model_type="gpt2", hidden_size=96, n_head=3)[1].ffn_hidden == 384


# -----------------------------------------------------------------------------
# GGUF

def test_rows_of_a_head_are_paired_as_llama_cpp_turns_them():
    rows = torch.arange(2 * 4 * 3).reshape(8, 3)  # 2 heads of 4 rows
    assert gguf.pair_rows(rows, 2)[:, 0].div(3).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf.pair_rows(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# -----------------------------------------------------------------------------
# Checkpoints

def test_weights_that_are_not_finite_are_refused_and_moments_are_not(tmp_path):
    sound, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    for step, weight, moment in ((1, sound, nan), (2, nan, sound)):
        pieces = [("w", weight, (2,), (0,)), ("w/m", moment, (2,), (0,)), ("e", sound[:0], (0,), (0,))]
        path = checkpoint.save(tmp_path, step, pieces, {})
        requested = [(name, torch.zeros(full), full, at) for name, _, full, at in pieces]
        if step == 2:
            with pytest.raises(ValueError, match="w holds nan or infinite weights"):
                checkpoint.load(path, requested)
        else:
            checkpoint.load(path, requested)
            assert requested[0][1].tolist() == [1, 1] and requested[1][1].isnan().tolist() == [False, True]
    for values, finite in (([], True), ([1.0, -2.0], True), ([math.inf], False), ([0.0, -math.inf], False)):
        assert checkpoint.is_finite(torch.tensor(values)) == finite


# -----------------------------------------------------------------------------
# Files and command lines

def test_only_files_that_we_began_are_removed(tmp_path):
    ours = tmp_path / ".metrics.jsonl.0123abcd.part"
    others = [tmp_path / name for name in (".notes.part", ".a.0123abcg.part", ".link.0123abcd.part")]
    ours.touch()
    for path in others[:2]:
        path.touch()
    others[2].symlink_to(others[0])
    (tmp_path / ".folder.0123abcd.part").mkdir()
    files.remove_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / ".folder.0123abcd.part"])


@dataclasses.dataclass(frozen=True)
class More(Config):
    """Flags of a program that trains, and more."""
    rounds: int = 3  # how often it trains


def test_help_lists_the_flags_of_a_program_and_of_those_that_it_adds_to():
    said = command_line.format_help(More, "more.py", "It trains.", More(), everything=False)
    assert "--rounds 3" in said and "how often it trains" in said and "--n-layer" in said

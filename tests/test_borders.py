"""At the borders of the programs: full disks, bombs, another data set, folders of other users."""
import contextlib
import json
import resource
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from forks import run_forks
from pool import ROOT
from runs import TINY, assert_refused, session
from safetensors.torch import save_file
from test_data import make_text, run

import convert
import plan
import plot
from corpus import chat, tokenizer
from runtime.launch import World


@pytest.fixture
def sources(tmp_path):
    for k in range(2):
        (tmp_path / f"{k}.txt").write_text(make_text(9000, k))
    return [str(tmp_path / f"{k}.txt") for k in range(2)]


@contextlib.contextmanager
def files_of_at_most(most):
    """Let every write past this many bytes fail with "File too large", as a full quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("most", [100, 9000])
def test_a_full_disk_is_one_line_that_names_path_and_fix(most, tmp_path, sources, capsys):
    """A limit on the size of files stands in for the disk: it fails at the tokenizer, or at the tokens."""
    argv = [sources[0], "--name", "a", "--out", tmp_path, "--vocab-size", 300, "--workers", 1]
    with files_of_at_most(most):
        code, _, err = run(capsys, *argv)
    assert code == 2 and err.count("\n") == 1, err
    assert "File too large; free space there, or give another --out" in err
    assert f"nanoshard: {tmp_path}/a cannot be written" in err
    assert run(capsys, *argv)[0] == 0


def write_foreign(folder):
    """Write a llama of one layer as Hugging Face would, with a tokenizer of characters and conversations."""
    vocabulary = tokenizer.train_char(["some words of a text\n"]).with_special(chat.MARKERS)
    width, hidden, n_vocab = 16, 24, vocabulary.n_vocab
    square = (width, width)
    shapes = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": (width, hidden), "input_layernorm.weight": (width,),
               "post_attention_layernorm.weight": (width,)}
    shapes = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens.weight": (n_vocab, width), "model.norm.weight": (width,),
               "lm_head.weight": (n_vocab, width)}
    torch.manual_seed(1)
    folder.mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors",
              {"format": "pt"})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1,
              "hidden_size": width, "intermediate_size": hidden, "num_attention_heads": 2,
              "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": n_vocab,
              "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary.save(folder / "tokenizer.json")
    return folder


def refused_line(capsys, main, *argv):
    """Return the one line with which a program refuses its input."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main(list(map(str, argv)))
    err = capsys.readouterr().err
    assert leaving.value.code == 2 and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("most", [200, 3000])
def test_a_full_disk_at_an_import(most, tmp_path, capsys):
    argv = ["import", write_foreign(tmp_path / "theirs"), "--out", tmp_path / "run"]
    with files_of_at_most(most):
        err = refused_line(capsys, convert.main, *argv)
    assert f"nanoshard: {tmp_path}/run cannot be written: " in err
    assert "File too large; free space there, or give another --out" in err
    convert.main(["import", str(argv[1]), "--out", str(tmp_path / "other")])


def test_a_full_disk_at_a_picture(tmp_path, capsys, monkeypatch):
    """A stand-in draws, as matplotlib need not be there."""
    class Figure:
        def __init__(self, **_):
            pass

        def subplots(self, *_, **__):
            return np.array([[mock.Mock()]], dtype=object)

        def savefig(self, path, **_):
            Path(path).write_bytes(b"Matplotlib" * 1000)

    monkeypatch.setitem(sys.modules, "matplotlib", mock.MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", mock.MagicMock(Figure=Figure))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
    argv = [tmp_path, "--png", tmp_path / "a.png"]
    assert plot.main(list(map(str, argv))) == 0
    before = (tmp_path / "a.png").read_bytes()
    with files_of_at_most(2000):
        err = refused_line(capsys, plot.main, *argv)
    assert f"nanoshard: {tmp_path}/a.png cannot be written: " in err
    assert "File too large; free space there, or give another --png" in err
    assert (tmp_path / "a.png").read_bytes() == before and not list(tmp_path.glob(".*.part"))


def test_messages_name_the_fix(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"conversations": [{"from": "human", "value": "hi"}]}\n')
    _, _, err = run(capsys, "chat", tmp_path / "x.jsonl", "--name", "x", "--out", tmp_path,
                    "--tokenizer", "gpt2")
    assert 'lacks messages; write {"messages": [{"role": "user"' in err, err
    with pytest.raises(SystemExit):
        plan.main([f"--seed={10**30}"])
    assert "1000000000000000000," not in capsys.readouterr().err.replace("-", "")


PROGRAMS = ["train.py", "prepare.py", "sample.py", "plan.py", "plot.py", "convert.py", "checkpoint.py"]


@pytest.fixture(scope="module")
def isolated(tmp_path_factory):
    """Return {program: (exit code, what it prints)} of each one's --help, under -I and -O at once."""
    folder = tmp_path_factory.mktemp("isolated")
    nothing = "/dev/null"
    jobs = [([f"{ROOT}/{name}", "--help"], nothing, f"{folder}/{name}", f"{folder}/{name}.err")
            for name in PROGRAMS]
    codes = run_forks(jobs, ["-I", "-O"])
    return {name: (code, Path(out).read_text() + Path(err).read_text())
            for name, code, (_, _, out, err) in zip(PROGRAMS, codes, jobs, strict=True)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_starts_in_isolation_and_without_asserts(name, isolated):
    code, out = isolated[name]
    assert code == 0 and "Traceback" not in out and len(out) > 300, out


@pytest.mark.parametrize("files", [
    ["train_00000.bin", "meta.json"], ["tiny/metrics.jsonl"], ["model.safetensors", "config.json"], ["a.md"],
    ["x.py"], [".git"]], ids=str)
def test_a_folder_that_was_no_run_is_not_taken_for_one(files, tmp_path):
    """Prepared data lost their meta.json, and folders of sources and of all runs were renamed."""
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    flags = [*TINY, "--steps=1", f"--out={tmp_path / 'out'}"]
    assert_refused(session(World(), flags), f"--out {tmp_path / 'out'} is no run, and holds {files[0]}")
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in files)
    (tmp_path / "out/metrics.jsonl").write_text("")  # With it, it was a run, which gets another name.
    went = session(World(), [*flags, "--resume=auto"])
    aside, = tmp_path.glob("out.*")
    assert went["code"] == 0 and f"held another run: it is now {aside}" in " ".join(went["out"].split())
    assert all((aside / name).read_text() == "mine" for name in files)

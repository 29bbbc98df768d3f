"""At the borders of the programs: full disks, bombs, another data set, folders of other users."""
import contextlib
import gzip
import json
import os
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
from corpus import chat, shards, tokenizer
from corpus import text as readers
from runtime import other_data
from runtime.launch import World


@pytest.fixture
def sources(tmp_path):
    for k in range(2):
        (tmp_path / f"{k}.txt").write_text(make_text(9000, k))
    return [str(tmp_path / f"{k}.txt") for k in range(2)]


def test_another_data_set_stays_unless_replace(tmp_path, sources, capsys):
    argv = [sources[0], "--name", "a", "--out", tmp_path, "--tokenizer", "char"]
    other = [sources[1], "--name", "a", "--out", tmp_path, "--tokenizer", tmp_path / "a"]
    assert run(capsys, *argv)[0] == 0
    made_by = shards.load_meta(tmp_path / "a")["command"]
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    code, out, err = run(capsys, *other)
    assert code == 2 and out == "" and err.count("\n") == 1, err
    for word in (f"{tmp_path}/a holds another data set, ", " tokens of ", sources[0], made_by, "--replace"):
        assert word in err, err
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert "up to date" in run(capsys, *argv, "--workers=1")[1]
    os.utime(sources[0])  # the same command makes its own work again
    assert run(capsys, *argv, "--workers", 2)[0] == 0
    assert run(capsys, *other, "--replace")[0] == 0
    meta = shards.load_meta(tmp_path / "a")
    assert meta["replaced"].startswith(made_by) and "--replace" not in meta["command"]
    assert "up to date" in run(capsys, *other)[1]
    assert f"stood what this makes: {made_by}" in other_data.what_was_replaced(str(tmp_path / "a"))
    assert other_data.what_was_replaced(str(tmp_path / "b")) == ""


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


@pytest.mark.parametrize("most", [100, 600])
def test_a_full_disk_at_conversations(most, tmp_path, sources, capsys):
    talks = [[{"role": "user", "content": i % 6 * "a" + i // 10 * "b"}, {"role": "assistant", "content": "a"}]
             for i in range(60)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    assert run(capsys, sources[0], "--name", "a", "--out", tmp_path, "--tokenizer", "char")[0] == 0
    argv = ["chat", tmp_path / "talks.jsonl", "--name", "talks", "--out", tmp_path, "--seq-len", 16,
            "--val-fraction", 0.2, "--tokenizer", tmp_path / "a"]
    with files_of_at_most(most):
        code, _, err = run(capsys, *argv)
    assert code == 2 and err.count("\n") == 1, err
    assert f"nanoshard: {tmp_path}/talks cannot be written: " in err
    assert "File too large; free space there, or give another --out" in err
    assert run(capsys, *argv)[0] == 0


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


def documents(path):
    """Return the documents of a file of records, and what is reported about it."""
    reports = []
    found = []
    for span in readers.list_spans(str(path), 1 << 24, "text"):
        found += readers.documents(span, "text", lambda kind, line: reports.append((kind, line)))
    return found, reports


@pytest.mark.parametrize("end", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_line_without_end_is_left_out(end, tmp_path, monkeypatch):
    """A file of a few kilobytes that unpacks to one line of any length."""
    monkeypatch.setattr(readers, "MOST_LINE", 1 << 20)
    raw = b'{"text": "one"}\n{"text": "' + b"a" * (1 << 22)
    raw += b'"}\n{"text": "two"}\n{"text": "' + b"b" * (1 << 21)
    path = tmp_path / f"x{end}"
    if end == ".jsonl.zst":
        raw = pytest.importorskip("zstandard").compress(raw)
    path.write_bytes(gzip.compress(raw) if end == ".jsonl.gz" else raw)
    found, reports = documents(path)
    assert found == ["one", "two"] and [kind for kind, _ in reports] == ["broken", "broken"]
    assert "at byte 16: a line of more than 1 MB; cut that text" in reports[0][1]


def test_a_zst_file_never_unpacks_at_once(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "x.zst").write_bytes(zstandard.ZstdCompressor(level=1).compress(bytes(300 << 20)))
    assert max(map(len, readers.decompress(tmp_path / "x.zst"))) <= 1 << 26


@pytest.mark.parametrize("end", [".jsonl.gz", ".parquet"])
def test_a_small_file_gives_no_endless_text(end, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MOST_UNPACKED", 1 << 20)
    monkeypatch.setattr(readers, "UNPACKED_TIMES", 2)
    texts = ["a" * 20_000] * 500
    path = tmp_path / f"x{end}"
    if end == ".parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"text": texts}), path, compression="zstd")
        with readers.open_parquet(path) as f:
            assert readers.rows_at_once(f, [0], "text") == 256
    else:
        path.write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()))
    found, reports = documents(path)
    assert 40 < len(found) < 60 and len(reports) == 1
    kind, line = reports[0]
    assert kind == "damaged" and "unpacks to more than 2 times its size, the rest is left out" in line


def test_a_huge_text_of_a_parquet_is_left_out(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(readers, "MOST_LINE", 1 << 20)
    texts = ["one", "a" * (1 << 21), "two"]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", compression="zstd")
    found, reports = documents(tmp_path / "x.parquet")
    assert found == ["one", "two"] and [kind for kind, _ in reports] == ["broken"]
    assert "row 2: a text of more than 1 MB; cut it into records" in reports[0][1]


def test_of_huge_texts_few_are_read_at_once(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["a" * (8 << 20)]}), tmp_path / "x.parquet", compression="zstd")
    with readers.open_parquet(tmp_path / "x.parquet") as f:
        assert readers.rows_at_once(f, [0], "text") <= 32


@pytest.mark.parametrize("argv", [
    ["--pp", "2", "--gpus", "2", "--global-batch", "1000000", "--micro-batch", "1"],
    ["--pp", "2", "--gpus", "2", "--n-layer", "8", "--pp-chunks", "4", "--global-batch", "1000001",
     "--micro-batch", "1"],
])
def test_a_schedule_that_is_too_long_is_one_line(argv, capsys):
    with pytest.raises(SystemExit) as e:
        plan.main(argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and "give a smaller --global-batch" in err, err


def test_messages_name_the_fix(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("some text", encoding="utf-16")
    _, _, err = run(capsys, tmp_path / "x.txt", "--name", "x", "--out", tmp_path, "--tokenizer", "char")
    assert "iconv -f UTF-16 -t UTF-8" in err, err
    (tmp_path / "x.jsonl").write_text('{"conversations": [{"from": "human", "value": "hi"}]}\n')
    _, _, err = run(capsys, "chat", tmp_path / "x.jsonl", "--name", "x", "--out", tmp_path,
                    "--tokenizer", "gpt2")
    assert "form of ShareGPT" in err and '"messages": [{"role": "user"' in err, err
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


@pytest.mark.parametrize("files, words", [
    (["train_00000.bin", "meta.json"], "holds prepared data"),
    (["tiny/metrics.jsonl"], "holds other runs, such as tiny"),
    (["a.md"], "holds a.md, which is no file of a run"), (["x.py"], "holds x.py"),
    ([".git"], "holds .git")], ids=str)
def test_a_folder_that_was_no_run_is_not_taken_for_one(files, words, tmp_path):
    """Prepared data lost their meta.json, and folders of sources and of all runs were renamed."""
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    flags = [*TINY, "--steps=1", f"--out={tmp_path / 'out'}"]
    assert_refused(session(World(), flags), f"--out {tmp_path / 'out'} {words}")
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in files)
    (tmp_path / "out/metrics.jsonl").write_text("")
    assert session(World(), [*flags, "--resume=auto"])["code"] == 0  # It was a run before.

"""Small inputs with a known answer, for what reads and writes files: data, models of others, checkpoints.
"""
import dataclasses
import errno
import gzip
import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_borders import refused_line

import checkpoint
import prepare
from config import Config
from corpus import build, chat, shards, text, tokenizer
from corpus.order import permute
from hub import families, gguf
from interface import command_line, files

# -----------------------------------------------------------------------------
# Data sets

def test_a_part_has_another_name_if_anything_but_the_place_of_its_tokenizer_changes():
    settings = build.Settings("here/tokenizer.json", "abc", "<u2", "text", 0.1, 5)
    unit = [text.Span("text", "a.txt", 0, 9, 9, 1)]
    name = build.part_name(3, unit, settings)
    assert name == build.part_name(3, unit, settings._replace(tokenizer="there/tokenizer.json"))
    changed = [settings._replace(tokenizer_sha256="abd"), settings._replace(dtype="<u4"),
               settings._replace(key="content"), settings._replace(val_fraction=0.2),
               settings._replace(seed=None)]
    names = [build.part_name(3, unit, one) for one in changed]
    names.append(build.part_name(3, [unit[0]._replace(mtime=2)], settings))
    assert len({name, *names}) == 7


def test_the_time_that_is_left_follows_from_the_sizes_of_the_units(tmp_path, monkeypatch):
    lines = []
    progress = build.Progress(lines.append, workers=1, n_units=3, n_kept=0, size=4)
    progress.start = progress.last_shown = build.time.time() - 100
    monkeypatch.setattr(build.time, "time", lambda: progress.start + 100)
    progress.unit_done(1, 10**6)
    assert lines == ["encoded 1 MB, 1 of 3 pieces, 1 workers, 0.0 MB/s, 5:00 left"]

    made = []

    class Recorder:
        def __init__(self, *args):
            made.append(args[-1])

        def unit_done(self, size, n_bytes):
            made.append(size)

    monkeypatch.setattr(build, "Progress", Recorder)
    monkeypatch.setattr(build, "encode_unit", lambda job, folder, settings: {"counts": {"bytes": 0}})
    spans = [text.Span("text", "a.txt", 0, 9, size, 1) for size in (5, 7, 2)]
    build.encode_all([spans[:2], spans[2:]], 1, tmp_path, build.Settings("", "", "", "", 0.1, 5), print)
    assert made == [14, 12, 2]


def test_stretches_without_documents_are_left_out_of_a_merge(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MERGE_TOKENS", 1)  # 6 stretches of keys for 2 documents
    index = np.array([[1, 2], [2**64 - 1, 3]], "<u8")  # key, number of tokens
    (tmp_path / "part").write_bytes(index.tobytes() + np.arange(5, dtype="<u2").tobytes())
    run = build.Run(tmp_path / "part", 0, 2, 32, 5)
    pieces = build.merge_shuffled([run], np.dtype("<u2"))
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("line,is_sharegpt", [
    (b'{"conversations": [{"from": "human"}]}', True), (b'{"conversations": []}', False),
    (b'{"from": "human"}', False), (b"{}", False)])
def test_the_form_of_sharegpt_is_named(line, is_sharegpt):
    with pytest.raises(ValueError, match="lacks messages") as e:
        chat.read_conversation(line, "here")
    assert ("ShareGPT" in str(e.value)) == is_sharegpt


def test_equal_conversations_are_in_one_split_wherever_they_stand():
    vocab = tokenizer.train_char(["ab 0123456789"]).with_special(chat.MARKERS)
    different = [[{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": f"b {i}"}]
                 for i in range(20)]
    packed = chat.pack([*different, *different[::-1]], chat.Template(vocab), 16, 0.4, seed=1)
    found = {}
    for split in shards.SPLITS:
        one_each = packed.ids[split]  # a conversation fills more than half of a window
        found[split] = sorted(vocab.decode(row) for row in one_each)
        assert found[split][::2] == found[split][1::2] and len(found[split]) == packed.count[split]
    assert len(found["train"]) + len(found["val"]) == 40 and not {*found["train"]} & {*found["val"]}


def test_the_order_of_a_few_samples_is_that_of_every_version():
    """A run that is resumed by a later version reads on in the same order."""
    keys = np.arange(1, 5, dtype=np.uint64)
    assert [permute(range(n), n, keys).tolist() for n in (1, 2, 3, 4, 5)] == [
        [0], [0, 1], [2, 1, 0], [2, 1, 0, 3], [4, 3, 0, 1, 2]]


def test_empty_texts_take_room_too(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    monkeypatch.setattr(text, "MOST_UNPACKED", 64 * 3 + 6)
    monkeypatch.setattr(text, "shares_of_groups", lambda *args: [1.0])
    said = []
    monkeypatch.setitem(text.READERS, "parquet", lambda span, key, report: ["", "abc", "", "de", "f"])
    span = text.Span("parquet", str(path), 0, 1, 0, 0)
    found = list(text.documents(span, "text", lambda kind, line: said.append(kind)))
    assert found == ["abc"] and said == ["empty", "empty", "damaged"]


def test_lines_that_are_too_long_are_named_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MOST_LINE", 10)
    path = tmp_path / "a.jsonl.gz"
    said = []
    long = b"x" * 11
    for content, at in ((long + b"\nabc\n", [12]), (b"abc\n" + long, [0]), (b"x" * 10 + b"\n", [0])):
        path.write_bytes(gzip.compress(content))
        span = text.Span("packed", str(path), 0, 1, 0, 0)
        assert [at for at, _ in text.read_lines(span, lambda kind, line: said.append((kind, line)))] == at
    assert [(kind, line.split(": ")[0]) for kind, line in said] == [
        ("broken", f"{path} at byte 0"), ("broken", f"{path} at byte 4")]


@pytest.mark.parametrize("content,at,cut", [
    (b"ab\ncd\n\nefgh\n\n", 1, 7), (b"ab\ncdef", 1, 3), ("aäb".encode(), 2, 3), ("aä".encode(), 2, 3),
    (b"abc", 0, 0), (b"abc", 9, 3)])
def test_a_text_is_cut_behind_a_blank_line_a_line_or_a_character(content, at, cut, tmp_path):
    (tmp_path / "a").write_bytes(content)
    with open(tmp_path / "a", "rb") as f:
        assert text.cut_point(f, at, len(content)) == cut


def test_the_largest_id_of_a_token_is_that_of_tiktoken():
    assert tokenizer.token_ids({"a": 0, "b": 2**32 - 2})
    for wrong in ({"a": 2**32 - 1}, {"a": -1}, {"a": 1, "b": 1}, {"a": True}, ["a"]):
        assert not tokenizer.token_ids(wrong)


META = {"version": 1, "tokenizer": "char", "tokenizer_sha256": "a", "dtype": "uint16", "vocab_size": 9,
        "tokens": {"train": 8, "val": 8}, "eod": None,
        "shards": {split: [{"file": f"{split}_00000.bin", "tokens": 8, "sha256": split}]
                   for split in shards.SPLITS}}
MASKS = {split: [{"file": f"{split}_mask_00000.bin", "tokens": 8, "sha256": split + "m"}]
         for split in shards.SPLITS}


# -----------------------------------------------------------------------------
# prepare.py

def test_only_the_same_command_replaces_a_data_set_unasked(tmp_path):
    made_by = "python prepare.py a.txt --name a"
    (tmp_path / "meta.json").write_text(json.dumps({**META, "command": made_by, "replaced": made_by + "b"}))
    (tmp_path / "tokenizer.json").write_text("")
    for split in shards.SPLITS:
        (tmp_path / f"{split}_00000.bin").write_text("")
    flags = SimpleNamespace(folder=tmp_path, replace=False)
    assert prepare.refuse_another(flags, made_by + " --workers 3") == made_by + "b"
    with pytest.raises(ValueError, match=f"made with: {made_by}; give another --name, or --replace"):
        prepare.refuse_another(flags, made_by + " --seed 3")
    assert prepare.refuse_another(SimpleNamespace(folder=tmp_path, replace=True), made_by + "c") == made_by


def test_data_whose_list_is_damaged_or_gone_can_be_made_by_what_is_named(tmp_path, monkeypatch, capsys):
    """prepare.py replaces no file without a list of its own. So the fix makes room for them first."""
    monkeypatch.chdir(tmp_path)
    words = ["a.txt", "--name", "toy", "--tokenizer", "char"]
    (tmp_path / "a.txt").write_text("some words\n\n" * 9)
    room = "; move data/toy away, then make it with: python prepare.py "

    assert prepare.main(words) == 0
    meta = json.loads((tmp_path / "data/toy/meta.json").read_text())
    unknown = "FILE... --name toy"
    for content, command in (("{", unknown), ("[]", unknown), (None, unknown),
                             (json.dumps({**meta, "vocab_size": 0}), " ".join(words))):
        path = tmp_path / "data/toy/meta.json"
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises((ValueError, OSError)) as e:
            shards.load_meta("data/toy")
        assert str(e.value).endswith(room + command) or content is None
        os.rename("data/toy", "data/toy.old")
        assert prepare.main(words) == 0
        shutil.rmtree("data/toy.old")


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

def test_parts_that_are_there_are_not_waited_for(tmp_path):
    """This test comes before those that save: they would wait ten minutes."""
    (tmp_path / "rank_00000.json").write_text('{"rank": 0}')
    assert checkpoint.wait_for_parts(tmp_path, checkpoint.Writers(size=1, timeout=0.0), None) == [{"rank": 0}]
    with pytest.raises(TimeoutError, match="no part from rank_00001 after 0 s; not committed"):
        checkpoint.wait_for_parts(tmp_path, checkpoint.Writers(size=2, timeout=0.0), None)


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


def test_each_file_is_read_by_one_of_the_ranks(tmp_path):
    tensor = torch.ones(4)
    folder = tmp_path / "step_000001"
    for rank in (1, 2, 3, 0):  # rank 0 commits
        writers = checkpoint.Writers(rank, 4, "a")
        checkpoint.save(tmp_path, 1, [(f"w{rank}", tensor, (4,), (0,))], {}, writers)
    for rank in range(4):
        file = folder / f"rank_{rank:05d}.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + b"\1")
        files = checkpoint.read_index(folder)["files"]
        with pytest.raises(ValueError, match=f"{file.name} differs from its crc32"):
            checkpoint.check_files(folder, files, rank % 2, 2)
        checkpoint.check_files(folder, files, 1 - rank % 2, 2)  # the other one does not read it
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name} is missing; use an older step_N"):
            checkpoint.check(folder)
        file.write_bytes(whole)
    assert checkpoint.damage(folder) is None


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

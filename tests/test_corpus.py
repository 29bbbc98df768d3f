"""prepare.py: formats, other names, malformed input, shuffle, kills; and blends of data sets.

test_data.py has its other tests.
"""
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import go, rows, same
from test_data import done, make_text, refused, run

import prepare
from corpus import samples, shards
from corpus import text as readers
from corpus import tokenizer as tok

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [make_text(20 + 7 * k % 300, k) for k in range(700)]  # 1 to 4 kB each


def jsonl(texts, key="text"):
    return "".join(json.dumps({"id": k, key: t}) + "\n" for k, t in enumerate(texts)).encode()


def make(capsys, folder, *argv, code=0):
    got, out, err = run(capsys, *argv, "--name", "x", "--out", folder, "--replace", "--vocab-size", 300,
                        "--workers", 1)
    assert got == code, err
    if code:
        assert err.count("\n") == 1 and not {"x", "x.tmp"} & {p.name for p in Path(folder).glob("*")}, err
        return err
    meta, t = shards.load_meta(folder / "x"), tok.load(folder / "x")
    docs = []
    for split in ("train", "val"):
        ids = shards.open_shards(folder / "x", split, meta)
        docs.append(t.decode(np.concatenate(ids)).split(tok.EOD))
        assert docs[-1].pop() == "" and len(docs[-1]) == meta["documents"][split]
    return docs, meta, err


def write(path, texts):
    """`texts` as a file of the kind that its name says; compressed files have two members."""
    half = len(texts) // 2
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(jsonl(texts[:half])) + gzip.compress(jsonl(texts[half:])))
    elif path.suffix == ".zst":
        pack = pytest.importorskip("pyarrow", reason="pyarrow is not installed").compress
        parts = texts[:half], texts[half:]
        path.write_bytes(b"".join(pack(jsonl(part), "zstd", asbytes=True) for part in parts))
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = arrow.table({"id": range(len(texts)), "text": texts})
        parquet.write_table(table, path, row_group_size=100)
    else:
        path.write_bytes(jsonl(texts))
    return path


@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "ndjson", "ndjson.gz"])
def test_every_format_gives_the_same_documents(end, tmp_path, capsys):
    paths = [write(tmp_path / f"a.{end}", TEXTS[:500]), write(tmp_path / f"b.{end}", TEXTS[500:])]
    (train, val), meta, err = make(capsys, tmp_path, *paths, "--no-shuffle")
    assert err == "" and len(train) > 500 and len(val) > 40
    place = {text: k for k, text in enumerate(TEXTS)}
    assert sorted(train + val, key=place.get) == TEXTS, "each once, whole"
    for docs in (train, val):
        assert [place[d] for d in docs] == sorted(place[d] for d in docs), "in the order of the files"
    # Shuffled, each side holds the same documents in a different order, across all files
    (train2, val2), meta2, _ = make(capsys, tmp_path, *paths)
    assert Counter(train2) == Counter(train) and Counter(val2) == Counter(val) and train2 != train
    assert meta["tokenizer_sha256"] == meta2["tokenizer_sha256"]
    at = np.array([place[d] for d in train2])
    assert abs(np.corrcoef(at, np.arange(len(at)))[0, 1]) < 0.15, "no trace of the old order"
    assert len(set(np.abs(np.diff(at)) == 1)) == 2 and (np.abs(np.diff(at)) == 1).mean() < 0.02


def test_shuffle_is_a_function_of_the_seed_alone(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", TEXTS)
    seen = {}
    for name, *more in (("one",), ("two", "--workers", 2), ("seed", "--seed", 7)):
        done(capsys, path, "--name", "x", "--out", tmp_path / name, "--vocab-size", 300, "--shard-tokens",
             100_000, "--workers", 1, *more)
        seen[name] = shards.load_meta(tmp_path / name / "x")["shards"]
        assert {s["tokens"] for s in seen[name]["train"][:-1]} == {100_000}
    assert len(seen["one"]["train"]) > 2 and seen["one"] == seen["two"] != seen["seed"]


# -----------------------------------------------------------------------------
# What a file is, whatever its name

@pytest.mark.parametrize("name", ["x.jl", "part-00000", "x.jsonl.txt", "x.json", "x.txt.gz"])
def test_records_under_another_name_are_read_as_records(name, tmp_path, capsys):
    raw = b"\n\n" + jsonl(TEXTS[:40])
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    (train, val), *_ = make(capsys, tmp_path, tmp_path / name)
    assert Counter(train + val) == Counter(TEXTS[:40])


@pytest.mark.parametrize("name,first", [
    ("x.txt", "Title, text and more"), ("x.txt", '{"a": 1}'), ("x.js", "{ return 1 }"), ("x.py", "[1, 2]"),
    ("x.md", "| text | more |"), ("poem", "text"), ("x.txt", "Mine\n\nid,text"),
    ("part-0", 'Mine\n{"text": ""}')])
def test_a_text_whose_first_line_only_looks_like_one_is_read(name, first, tmp_path, capsys):
    text = "\ufeff" + first + "\n\n" + make_text(9000)
    (tmp_path / name).write_text(text)
    (train, val), _, err = make(capsys, tmp_path, tmp_path / name)
    assert sum(map(len, train + val)) == len(text) - 1
    assert ("signs are trained on as well" in err) == (first == '{"a": 1}' or first.startswith("Mine"))


GOOD = jsonl(TEXTS[:60])
TABLE = b'id,text\n1,"a, b"\n2,"c\n\nd"\n' + b"3,e\n" * 40
PRETTY = json.dumps({"text": TEXTS[0]}, indent=1).encode()
WHOLE = json.dumps([{"text": text} for text in TEXTS[:40]]).encode()
BROKEN = {  # what: (name, content, words of the one line)
    "a table": ("x.csv", TABLE, "with its brackets or separators"),
    "a table, other name": ("part-00000", TABLE.replace(b",", b"\t"), "with its brackets or separators"),
    "one list": ("x.json", WHOLE, "with its brackets"), "a list, other name": ("x.data", WHOLE, "brackets"),
    "indented": ("f", PRETTY, "with its brackets"),
    "empty": ("a.txt", b"", "none may be 0"), "no text": ("a.jsonl", b'{"text": ""}', "none may be 0"),
    "latin-1": ("a.txt", b"caf\xe9\n", "not utf-8 ('utf-8' codec can't decode byte 0xe9 in position 3"),
    "zeros": ("a", b"a\0b\n", "holds zeros"), "cut zst": ("a.txt.zst", readers.ZSTD + b" ", "Truncated"),
    "cut gz": ("a.jsonl.gz", gzip.compress(jsonl(TEXTS))[:-9], "a.jsonl.gz: Compressed file ended"),
    "other key": ("a.jsonl", GOOD + b'{"words": "x"}\n', "row 61 has no text under 'text', it has words;"),
    "NaN": ("a.jsonl", GOOD + b'{"text": NaN}\n', "row 61 has no text under 'text'"),
    "bad utf-8": ("a.jsonl", GOOD + b'{"text": "\xff\xfe"}\n', "row 61 is no JSON"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_malformed_input_is_one_line_and_makes_nothing(what, tmp_path, capsys):
    name, content, words = BROKEN[what]
    (tmp_path / name).write_bytes(content)
    err = make(capsys, tmp_path, tmp_path / name, code=2)
    assert words in err and err.startswith("nanoshard: ") and len(err) < 700, err


def test_rows_of_parquet_that_are_no_texts_end_with_their_file_and_row(tmp_path, capsys):
    path = write(tmp_path / "a.parquet", TEXTS)
    err = make(capsys, tmp_path, path, "--text-key=words", code=2)
    assert "row 1 has no text under 'words', it has id," in err
    assert "row 1 has no text under 'id'" in make(capsys, tmp_path, path, "--text-key=id", code=2)
    path.write_bytes(path.read_bytes()[:-99])
    make(capsys, tmp_path, path, code=2)


def test_missing_packages_are_one_line(tmp_path, capsys, monkeypatch):
    for name, start, package in (("a.jsonl.zst", readers.ZSTD, "pyarrow"),
                                 ("a.parquet", b"PAR1", "pyarrow"), ("fineweb_edu_10bt", b"", "datasets")):
        if start:
            (tmp_path / name).write_bytes(start)
            name = tmp_path / name
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
        assert f"pip install {package}\n" in make(capsys, tmp_path, name, code=2)


# -----------------------------------------------------------------------------
# Text

def test_a_text_is_cut_after_a_blank_line_or_a_line():
    for text, end in ((make_text(9000), "\n\n"), (make_text(9000).replace("\n\n", "\n"), "\n")):
        *found, last = readers.PIECE.findall(text)
        assert "".join(found) + last == text and len(found) > 5
        assert all(4000 <= len(piece) <= 8002 and piece.endswith(end) for piece in found)
    assert readers.PIECE.findall("字" * 20_000) == ["字" * 20_000]


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<eos>"])
def test_end_of_document_that_is_spelled_is_said_and_splits_by_a_flag(end, tmp_path, capsys):
    stories = [text.strip() for text in TEXTS[:80]]
    path = tmp_path / "a.txt"
    path.write_text(end.join(stories) + end + "\n")
    code, _, err = run(capsys, path, "--name", "y", "--out", tmp_path, "--vocab-size", 300, "--workers", 1,
                       "--val-fraction", 0.4)
    assert code == 0 and err.count("\n") == 1 and f"spells {end} 80 times" in err
    (train, val), _, err = make(capsys, tmp_path, path, "--split-at", end)
    assert Counter(train + val) == Counter(stories) and err == ""


@pytest.mark.parametrize("kind", ["char", "bpe", "chat"])
def test_val_is_a_file_of_its_own(kind, tmp_path, capsys):
    argv = ["--name", "x", "--out", tmp_path, "--workers", 1]
    if kind == "chat":
        (tmp_path / "t.txt").write_text(make_text(9000))
        assert run(capsys, tmp_path / "t.txt", "--name", "t", "--out", tmp_path, "--vocab-size", 300)[0] == 0
        for name, n in (("a.jsonl", 30), ("b.jsonl", 5)):
            talks = [{"messages": [{"role": "user", "content": f"{name} {i}"},
                                   {"role": "assistant", "content": name}]} for i in range(n)]
            (tmp_path / name).write_text("".join(json.dumps(talk) + "\n" for talk in talks))
        code, _, err = run(capsys, "chat", tmp_path / "a.jsonl", "--val", tmp_path / "b.jsonl", *argv,
                           "--tokenizer", tmp_path / "t", "--seq-len", 64)
        assert code == 0 and shards.load_meta(tmp_path / "x")["documents"] == {"train": 30, "val": 5}, err
        return
    (tmp_path / "a.txt").write_text(make_text(9000, 1))
    (tmp_path / "b.txt").write_text(make_text(900, 2))
    done(capsys, tmp_path / "a.txt", "--val", tmp_path / "b.txt", "--tokenizer", kind, *argv)
    meta, t = shards.load_meta(tmp_path / "x"), tok.load(tmp_path / "x")
    for split, name in (("train", "a.txt"), ("val", "b.txt")):
        [tokens] = shards.open_shards(tmp_path / "x", split, meta)
        assert t.decode(tokens).replace(tok.EOD, "") == (tmp_path / name).read_text()


def test_a_vocabulary_is_trained_on_an_amount_of_bytes(tmp_path, monkeypatch):
    """A character can have three of them. Of a large input each file gives its beginning."""
    flags = prepare.parse(["stdlib"])
    paths = [write(tmp_path / f"{k}.jsonl", ["\u3042" * 3] * 10) for k in range(3)]
    files = [file for path in paths for file in readers.list_files(str(path), "text")]
    assert len(list(prepare.training_texts(files, flags))) == 30
    monkeypatch.setattr(prepare, "TRAINING_BYTES", 60)
    assert len(list(prepare.training_texts(files, flags))) == 9  # 3 of each: 27 bytes are above 20


# -----------------------------------------------------------------------------
# The hub

def stub_hub(monkeypatch):
    """A stand-in for the package datasets as corpus/text.py uses it: the repository is a folder."""
    def load_dataset_builder(repo, data_files):
        found = sorted(f"hf://{p}" for p in Path(repo).glob(data_files["train"]))
        if not found:
            raise FileNotFoundError(f"Unable to find\n'{data_files}'")
        return types.SimpleNamespace(config=types.SimpleNamespace(data_files={"train": found}))

    manager = types.SimpleNamespace(download=lambda urls: [url.removeprefix("hf://") for url in urls])
    stub = types.SimpleNamespace(load_dataset_builder=load_dataset_builder, DownloadManager=lambda: manager)
    monkeypatch.setitem(sys.modules, "datasets", stub)


def test_names_on_the_hub(tmp_path, capsys, monkeypatch):
    stub_hub(monkeypatch)
    repo = tmp_path / "repo"
    (repo / "sample/10BT").mkdir(parents=True)
    (repo / "global-shard_01_of_10/local-shard_0_of_10").mkdir(parents=True)
    write(repo / "sample/10BT/000_00000.parquet", TEXTS[:100])
    write(repo / "sample/10BT/001_00000.parquet", TEXTS[100:200])
    write(repo / "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst",
          TEXTS[200:400])
    for name, texts in (("fineweb_edu_10bt", TEXTS[:200]), ("dclm_baseline_1.0", TEXTS[200:400])):
        monkeypatch.setitem(readers.HUB, name, (str(repo), readers.HUB[name][1]))
        (train, val), meta, err = make(capsys, tmp_path, name)
        assert Counter(train + val) == Counter(texts) and err == "" and meta["sources"]["paths"] == [name]
    (train, val), *_ = make(capsys, tmp_path, f"hf:{repo}::sample/10BT/001*")
    assert Counter(train + val) == Counter(TEXTS[100:200])
    assert "'nothing/*'" in make(capsys, tmp_path / "y", f"hf:{repo}::nothing/*", code=2)


# -----------------------------------------------------------------------------
# Processes

WAITING = """import sys, prepare
def wait_after_one(encoded, work):
    next(encoded)
    print("encoded", flush=True)
    sys.stdin.read()
prepare.write_tokens = wait_after_one
prepare.main(sys.argv[1:])"""


def test_the_workers_of_a_killed_prepare_end_and_the_old_data_stay(tmp_path, capsys):
    write(tmp_path / "a.jsonl", TEXTS[:100])
    argv = [tmp_path / "a.jsonl", "--name", "x", "--out", tmp_path, "--vocab-size", 300]
    assert run(capsys, *argv, "--workers", 1)[0] == 0
    before = (tmp_path / "x/train_00000.bin").read_bytes()
    argv += ["--seed", 3, "--replace", "--workers", 2]
    process = subprocess.Popen([sys.executable, "-c", WAITING, *map(str, argv)], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "encoded\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{child}/exe").exists() for child in children):
        assert time.monotonic() < until, "a worker lives on"
        time.sleep(0.01)
    assert len(children) > 1 and (tmp_path / "x/train_00000.bin").read_bytes() == before
    code, _, err = run(capsys, *argv)
    assert code == 2 and "x.tmp is there: another command writes it, or one was killed" in err


# -----------------------------------------------------------------------------
# Blends: shares, order, errors, and a run on a blend that is stopped and resumed

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = tmp_path_factory.mktemp("blend")
    for k, (name, words) in enumerate((("a", 12000), ("b", 6000), ("c", 5000), ("other", 9000))):
        (out / f"{name}.txt").write_text(make_text(words, k))
        how = ["--vocab-size", "300"] if name in ("a", "other") else ["--tokenizer", str(out / "a")]
        argv = [str(out / f"{name}.txt"), "--name", name, "--out", str(out), "--val-fraction", "0.4", *how]
        assert prepare.main(argv) == 0
    return out


def test_shares_are_exact_within_one_sample_at_every_moment():
    rng = np.random.default_rng(0)
    for k in range(2, 14):
        w = rng.integers(1, 40, k)
        w[: k // 2] *= 30  # two small ones among large ones: here the greedy rule falls more than one behind
        w //= np.gcd.reduce(w)
        given = np.cumsum(samples.sample_schedule(w)[0][:, None] == np.arange(k), 0)
        off = given - np.arange(1, w.sum() + 1)[:, None] * w / w.sum()
        assert np.abs(off).max() < 1 and (given[-1] == w).all()
    pinned = [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert samples.sample_schedule([7, 3])[0].tolist() == pinned, "resumed runs rely on it"


def test_sample_i_is_a_pure_function_of_seed_and_i(folders):
    spec = f"{folders}/a:0.5,{folders}/b:0.3,{folders}/c:0.2"
    ds = samples.Blend(spec, "train", 16, seed=3)
    alone = [samples.Tokens(folders / name, "train", 16, seed=3) for name in "abc"]
    n = 50 * max(one.n_samples for one in alone)  # each begins another epoch
    which, number = np.empty((2, n), np.int64)
    for at in (0, n // 3):  # sample j that a data set gives is its sample j alone
        for part, start, its in ds.pieces(at, n - at):
            assert start == (number[at + its[0]] if at else 0)
            which[at + its], number[at + its] = ds.parts.index(part), start + np.arange(len(its))
    assert Counter(which.tolist()) == {0: n // 10 * 5, 1: n // 10 * 3, 2: n // 10 * 2}
    x, y = ds.batch(0, 40)
    for i in range(40):
        one = alone[which[i]].batch(int(number[i]), 1)
        assert torch.equal(x[i], one[0][0]) and torch.equal(y[i], one[1][0])
    for first, count in ((37, 1), (n - 9, 9), (1, 2), (3, 30)):  # backwards too: there is no state
        x = ds.batch(first, count)[0]
        assert ds.n_targets(first, count) == x.numel()
        ones = [ds.batch(first + k, 1)[0] for k in range(count)]
        assert x.shape == (count, 16) and torch.equal(x, torch.cat(ones))
    assert not torch.equal(samples.Blend(spec, "train", 16, seed=4).batch(0, 40)[0], ds.batch(0, 40)[0])
    # n_samples: until the first one begins its second epoch
    counts = [Counter(which[: ds.n_samples].tolist())[d] / one.n_samples for d, one in enumerate(alone)]
    assert 0.97 < max(counts) <= 1.03


def test_blend_of_one_is_that_data_set(folders):
    for spec in (f"{folders}/a", f"{folders}/a:1"):
        ds, alone = samples.Blend(spec, "val", 16, 5), samples.Tokens(folders / "a", "val", 16, 5)
        assert ds.n_samples == alone.n_samples and torch.equal(ds.batch(3, 9)[0], alone.batch(3, 9)[0])
    meta = shards.load_meta(folders / "a")
    want = " ".join(s["sha256"][:16] for split in meta["shards"].values() for s in split)
    assert samples.identify(f"{folders}/a") == want, "checkpoints know their data by it"
    assert samples.first_folder(f"{folders}/a:1") == f"{folders}/a"
    assert samples.parse_blend("data/x") == {"data/x": 1}


def test_other_weights_are_other_data(folders):
    identity = {samples.identify(f"{folders}/a:{w},{folders}/b:1") for w in (1, 2, "0.5")}
    assert len(identity) == 3


@pytest.mark.parametrize("spec, say", [
    ("{0}/a:0.7,{0}/other:0.3", ["another tokenizer than", "--tokenizer {0}/a"]),
    *((spec, ["each folder once with a weight"]) for spec in (
        "{0}/a:0.7,{0}/b", "{0}/a,{0}/b", "{0}/a:x,{0}/b:1", "{0}/a:1/0,{0}/b:1", "{0}/a:0,{0}/b:1",
        "{0}/a:1,:1", "{0}/a:1,{0}/a:2")),
    ("{0}/a:0.12345678,{0}/b:1", ["round them"]), ("{0}/a:1,{0}/none:1", ["no prepared data"])])
def test_wrong_blends_are_refused(spec, say, folders):
    say = [s.format(folders) for s in say]
    refused((ValueError, OSError), lambda: samples.identify(spec.format(folders)), *say)


def test_train_and_val_of_two_data_sets_must_not_be_equal(folders, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for path in (folders / name).glob("*.*"):
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    meta = json.loads((tmp_path / "b/meta.json").read_text())
    meta["shards"]["val"] = shards.load_meta(folders / "a")["shards"]["train"]
    (tmp_path / "b/meta.json").write_text(json.dumps(meta))
    spec = f"{tmp_path}/a:1,{tmp_path}/b:1"
    refused(ValueError, lambda: samples.identify(spec), "equal sha256", "leave one out")


def test_training_on_a_blend_stopped_and_resumed(folders, tmp_path):
    flags = ["--vocab-size=0", "--save-every=3", "--eval-every=3", "--eval-iters=2", "--decay-steps=6"]
    spec = f"--data={folders}/a:0.7,{folders}/b:0.3"
    seen = [s["data"] for s in go(1, tmp_path / "whole", *flags, spec, "--steps=6")["steps"]]
    go(2, tmp_path / "two", *flags, spec, "--steps=6")
    first = go(1, tmp_path / "half", *flags, spec, "--steps=3")["steps"]
    other = go(1, tmp_path / "half", *flags, spec.replace("0.3", "0.4"), "--steps=6", "--resume=auto", code=2)
    assert f"was trained with --data {folders}/a:0.7," in other["err"] and other["err"].count("\n") == 1
    rest = go(1, tmp_path / "half", *flags, spec, "--steps=6", "--resume=auto", "--prompt=ba")["steps"]
    assert [s["data"] for s in first + rest] == seen
    same(tmp_path / "whole", tmp_path / "half", 6)
    whole, two = rows(tmp_path / "whole"), rows(tmp_path / "two")
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in whole], rel=1e-5)
    assert whole[-1]["val_loss"] and (tmp_path / "whole/tokenizer.json").is_file()

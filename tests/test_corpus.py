"""prepare.py: formats, other names, malformed input, shuffle, kills. test_data.py has its other tests."""
import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_data import make_text, refused, run

import prepare
from corpus import shards
from corpus import text as readers
from corpus import tokenizer as tok

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [make_text(20 + 7 * k % 300, k) for k in range(700)]  # 1 to 4 kB each


def jsonl(texts, key="text"):
    return "".join(json.dumps({"id": k, key: t}) + "\n" for k, t in enumerate(texts)).encode()


def make(capsys, folder, *argv, code=0):
    """prepare.py under a small vocabulary -> (documents of train and of val in order, meta, stderr)."""
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
        path.write_bytes(gzip.compress(jsonl(texts[:half])) + gzip.compress(jsonl(texts[half:])) + b"\0" * 9)
    elif path.suffix == ".zst":
        pack = pytest.importorskip("zstandard", reason="zstandard is not installed").ZstdCompressor().compress
        path.write_bytes(pack(jsonl(texts[:half])) + pack(jsonl(texts[half:])))
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
    assert err == "" and len(train) > 500 and len(val) > 40 and meta["sources"]["files"] == 2
    place = {text: k for k, text in enumerate(TEXTS)}
    assert sorted(train + val, key=place.get) == TEXTS, "each once, whole"
    for docs in (train, val):
        assert [place[d] for d in docs] == sorted(place[d] for d in docs), "in the order of the files"
    # Shuffled, each side holds the same documents in a different order, across all files
    (train2, val2), meta2, _ = make(capsys, tmp_path, *paths)
    assert Counter(train2) == Counter(train) and Counter(val2) == Counter(val) and train2 != train
    assert meta["shuffle_seed"] is None and meta2["shuffle_seed"] == 1337
    assert meta["tokenizer_sha256"] == meta2["tokenizer_sha256"]
    at = np.array([place[d] for d in train2])
    assert abs(np.corrcoef(at, np.arange(len(at)))[0, 1]) < 0.15, "no trace of the old order"
    assert len(set(np.abs(np.diff(at)) == 1)) == 2 and (np.abs(np.diff(at)) == 1).mean() < 0.02


def test_shuffle_is_a_function_of_the_seed_alone(tmp_path, capsys, monkeypatch):
    """It does not depend on the workers, nor on what each of them encodes at a time."""
    path = write(tmp_path / "a.jsonl", TEXTS)
    seen = {}
    for name, batch, *more in (("one", 1 << 20), ("two", 20_000, "--workers", 2), ("small", 5_000),
                               ("seed", 1 << 20, "--seed", 7)):
        monkeypatch.setattr(prepare, "BATCH", batch)
        code, _, err = run(capsys, path, "--name", "x", "--out", tmp_path / name, "--vocab-size", 300,
                           "--shard-tokens", 100_000, "--workers", 1, *more)
        assert code == 0, err
        seen[name] = shards.load_meta(tmp_path / name / "x")["shards"]
        assert {s["tokens"] for s in seen[name]["train"][:-1]} == {100_000}
    assert len(seen["one"]["train"]) > 2 and seen["one"] == seen["two"] == seen["small"] != seen["seed"]


# -----------------------------------------------------------------------------
# What a file is, whatever its name

@pytest.mark.parametrize("name", ["x.jl", "x.jsonlines", "part-00000", "x.jsonl.txt", "x.json", "f",
                                  "x.txt.gz"])
def test_records_under_another_name_are_read_as_records(name, tmp_path, capsys):
    raw = jsonl(TEXTS[:40])
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    (train, val), meta, _ = make(capsys, tmp_path, tmp_path / name)
    assert Counter(train + val) == Counter(TEXTS[:40]) and meta["shuffle_seed"] == 1337


TABLE = 'id,text\n1,"a, b"\n2,"c\n\nd"\n' + "3,e\n" * 40
PRETTY = "".join(json.dumps({"text": text}, indent=1) + "\n" for text in TEXTS[:40])
WHOLE = json.dumps([{"text": text} for text in TEXTS[:40]])


@pytest.mark.parametrize("name,content,texts", [
    ("x.csv", TABLE, ["a, b", "c\n\nd", "e"]), ("part-00000", TABLE, ["a, b", "c\n\nd", "e"]),
    ("x.tsv", TABLE.replace(",", "\t"), ["a\t b", "c\n\nd", "e"]), ("x.json", WHOLE, TEXTS[:40]),
    ("x.jsonl", WHOLE, TEXTS[:40]), ("x.data", WHOLE, TEXTS[:40]), ("x.json", PRETTY, TEXTS[:40]),
    ("x.jsonl", PRETTY, TEXTS[:40]), ("f", PRETTY, TEXTS[:40])])
def test_what_is_no_text_is_refused_with_a_command_that_makes_records_of_it(name, content, texts, tmp_path,
                                                                          capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    err = make(capsys, tmp_path, name, code=2)
    start = "jq" if "jq -c" in err else "python -c"
    command = err[err.index(start):].replace("python -c", f"{shlex.quote(sys.executable)} -c").rstrip()
    if start == "jq" and subprocess.run(["which", "jq"], capture_output=True).returncode:
        pytest.skip("jq is not installed")
    subprocess.run(command, shell=True, check=True)
    found = [json.loads(line)["text"] for line in Path(f"{name}.jsonl").read_text().splitlines()]
    assert found[:3] == texts[:3]


@pytest.mark.parametrize("name,first", [
    ("x.txt", "Title, text and more"), ("x.txt", '{"a": 1}'), ("x.js", "{ return 1 }"), ("x.py", "[1, 2]"),
    ("x.md", "| text | more |"), ("poem", "text")])
def test_a_text_whose_first_line_only_looks_like_one_is_read(name, first, tmp_path, capsys):
    text = first + "\n\n" + make_text(9000)
    (tmp_path / name).write_text(text)
    (train, val), *_ = make(capsys, tmp_path, tmp_path / name)
    assert sum(map(len, train + val)) == len(text)


# what: (name, content, words of the one line)
GOOD = jsonl(TEXTS[:60])
FIRST = len(GOOD.splitlines(keepends=True)[0])
BROKEN = {
    "empty": ("a.txt", b"", "no text is in it"),
    "empty records": ("a.jsonl", b"\n\n", "no text is in it"),
    "only empty texts": ("a.jsonl", b'{"text": ""}\n' * 9, "no text is in it"),
    "one document": ("a.txt", b"only one\n", "of 1 documents"),
    "latin-1": ("a.txt", b"caf\xe9\n", "not utf-8, it has the byte 0xe9; convert it"),
    "latin-1 later": ("a.txt", b"a" * (3 << 20) + b"\xe9", "not utf-8, it has the byte 0xe9"),
    "utf-8 that is cut": ("a.txt", "abcé".encode()[:-1], "not utf-8, it has the byte 0xc3"),
    "bytes": ("a.bin", bytes(range(256)) * 9, "not utf-8"),
    "zip": ("a.zip", b"PK\x03\x04" + bytes(range(128, 256)), "not utf-8"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(GOOD)[:-60], "a.jsonl.gz is damaged or cut short"),
    "cut text": ("a.txt.gz", gzip.compress(make_text(9000).encode())[:-60], "damaged or cut short"),
    "bad gzip": ("a.jsonl.gz", gzip.compress(GOOD)[:200] + b"\xff" * 900, "damaged or cut short"),
    "gzip of gzip": ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD)), "row 1 is no JSON"),
    "cut line": ("a.jsonl", GOOD + b'{"text": "cut off\n', "row 61 is no JSON"),
    "list": ("a.jsonl", GOOD + b"[1, 2]\n", "row 61 is no JSON object"),
    "other key": ("a.jsonl", GOOD + b'{"words": "x"}\n', "row 61 has no text under 'text', it has words;"),
    "null": ("a.jsonl", GOOD + b'{"text": null}\n', "row 61 has no text under 'text'"),
    "number": ("a.jsonl", GOOD + b'{"text": 5}\n', "row 61 has no text under 'text'"),
    "bad utf-8": ("a.jsonl", GOOD + b'{"text": "\xff\xfe"}\n', "row 61 is no JSON"),
    "half a pair": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "row 61 has half of a surrogate pair"),
    "deep": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "row 61 is no JSON"),
    "endless line": ("a.jsonl", GOOD + b'{"text": "' + b"a" * 5000, "row 61 has more than 0 MB; cut that"),
    "endless line in gzip": ("a.jsonl.gz", gzip.compress(GOOD + b"a" * 5000), "row 61 has more than 0 MB"),
    "wrong key": ("a.jsonl", jsonl(TEXTS[:60], "content"), "it has id, content; mend it, or say by"),
    "wrong key, other name": ("a.jl.x", jsonl(TEXTS[:60], "content"), "it has id, content; give --text-key"),
    "parquet that is none": ("a.parquet", b"PAR1 and no more", "not a whole parquet file"),
    "zst that is none": ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 99, "damaged or cut short"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_malformed_input_is_one_line_and_makes_nothing(what, tmp_path, capsys, monkeypatch):
    name, content, words = BROKEN[what]
    if name.endswith((".parquet", ".zst")):
        pytest.importorskip({"parquet": "pyarrow", "zst": "zstandard"}[name.split(".")[-1]])
    monkeypatch.setattr(readers, "MOST_LINE", 1 << 12 if "endless" in what else readers.MOST_LINE)
    (tmp_path / name).write_bytes(content)
    err = make(capsys, tmp_path, tmp_path / name, code=2)
    assert words in err and err.startswith("nanoshard: ") and len(err) < 700, err


def test_a_folder_or_no_file_in_the_place_of_a_file(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    for source, words in (("a", "is a folder; give its files"), ("b", "is not a file")):
        assert words in make(capsys, tmp_path, tmp_path / source, code=2)


@pytest.mark.parametrize("part,words", [(0.99, "not a whole parquet file"), (0.2, "does not unpack")])
def test_a_damaged_parquet_ends_with_its_row(part, words, tmp_path, capsys):
    path = write(tmp_path / "a.parquet", TEXTS)
    raw = path.read_bytes()
    at = int(len(raw) * part)
    path.write_bytes(raw[:at] if part > 0.5 else raw[:at] + b"\xaa" * 2000 + raw[at + 2000 :])
    assert words in make(capsys, tmp_path, path, code=2)


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_every_column_of_strings_is_read(kind, tmp_path, capsys):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = arrow.array(TEXTS[:40])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(arrow, kind)())
    parquet.write_table(arrow.table({"id": list(range(40)), "text": column}), tmp_path / "a.parquet")
    (train, val), _, err = make(capsys, tmp_path, tmp_path / "a.parquet")
    assert Counter(train + val) == Counter(TEXTS[:40]) and err == ""
    assert "but id, text; give --text-key" in make(capsys, tmp_path / "y", tmp_path / "a.parquet",
                                                   "--text-key", "words", code=2)


def test_missing_packages_are_one_line(tmp_path, capsys, monkeypatch):
    for name, start, package in (("a.jsonl.zst", readers.ZSTD, "zstandard"),
                                 ("a.parquet", b"PAR1", "pyarrow"), ("fineweb_edu_10bt", b"", "datasets")):
        if start:
            (tmp_path / name).write_bytes(start)
            name = tmp_path / name
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
        assert f"pip install {package}\n" in make(capsys, tmp_path, name, code=2)


# -----------------------------------------------------------------------------
# Text

def cut_by_paragraphs(text):
    """The documents of a text as read_text() makes them, from the whole of it."""
    found, start = [], 0
    while start < len(text):
        end = readers.document_end(text, start)
        found.append(text[start:end])
        start = end
    return found


@pytest.mark.parametrize("block", [7, 777, 4000, 1 << 20])
def test_the_documents_of_a_text_do_not_depend_on_how_it_is_read(block, tmp_path, monkeypatch):
    """It is cut at a blank line, else at a line; three bytes of a mark are text but at the beginning."""
    for text in (make_text(9000), make_text(9000).replace("\n\n", "\n"), "字" * 20_000, "a\ufeffb\n\n" * 900):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
        assert "".join(readers.decoded(tmp_path / "a.txt")) == text
        pieces = [text[at : at + block] for at in range(0, len(text), block)]
        with monkeypatch.context() as m:
            m.setattr(readers, "decoded", lambda path, pieces=pieces: pieces)
            assert list(readers.read_text("a.txt", "")) == cut_by_paragraphs(text)


def test_end_of_document_that_is_spelled_is_said_and_splits_by_a_flag(tmp_path, capsys):
    stories = [text.strip() for text in TEXTS[:80]]
    path = tmp_path / "a.txt"
    path.write_text("<|endoftext|>".join(stories) + "<|endoftext|>\n")
    code, _, err = run(capsys, path, "--name", "y", "--out", tmp_path, "--vocab-size", 300, "--workers", 1)
    assert code == 0 and err.count("\n") == 1 and "spells <|endoftext|> 80 times" in err
    (train, val), meta, err = make(capsys, tmp_path, path, "--split-at", "<|endoftext|>")
    assert Counter(train + val) == Counter(stories) and err == "" and meta["shuffle_seed"] is None


@pytest.mark.parametrize("kind", ["char", "bpe", "chat"])
def test_val_is_a_file_of_its_own(kind, tmp_path, capsys):
    if kind == "chat":
        (tmp_path / "t.txt").write_text(make_text(9000))
        assert run(capsys, tmp_path / "t.txt", "--name", "t", "--out", tmp_path, "--vocab-size", 300)[0] == 0
        for name, n in (("a.jsonl", 30), ("b.jsonl", 5)):
            talks = [{"messages": [{"role": "user", "content": f"{name} {i}"},
                                   {"role": "assistant", "content": name}]} for i in range(n)]
            (tmp_path / name).write_text("".join(json.dumps(talk) + "\n" for talk in talks))
        code, _, err = run(capsys, "chat", tmp_path / "a.jsonl", "--val", tmp_path / "b.jsonl", "--name", "x",
                           "--out", tmp_path, "--tokenizer", tmp_path / "t", "--seq-len", 64)
        assert code == 0 and shards.load_meta(tmp_path / "x")["documents"] == {"train": 30, "val": 5}, err
        return
    (tmp_path / "a.txt").write_text(make_text(9000, 1))
    (tmp_path / "b.txt").write_text(make_text(900, 2))
    code, _, err = run(capsys, tmp_path / "a.txt", "--val", tmp_path / "b.txt", "--name", "x", "--out",
                       tmp_path, "--tokenizer", kind, "--workers", 1)
    assert code == 0, err
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

def stub_hub(monkeypatch, calls):
    """A stand-in for the package datasets as corpus/text.py uses it: the repository is a folder."""

    class DownloadManager:
        def download(self, urls):
            calls.append(urls)
            return [u.removeprefix("hf://") for u in urls]

    def load_dataset_builder(repo, data_files):
        found = sorted(f"hf://{p}" for p in Path(repo).glob(data_files["train"]))
        if not found:
            raise FileNotFoundError(f"Unable to find\n'{data_files}'")
        return types.SimpleNamespace(config=types.SimpleNamespace(data_files={"train": found}))

    stub = types.SimpleNamespace(load_dataset_builder=load_dataset_builder, DownloadManager=DownloadManager)
    monkeypatch.setitem(sys.modules, "datasets", stub)


@pytest.mark.parametrize("real", [False, True])
def test_names_on_the_hub(real, tmp_path, capsys, monkeypatch):
    """The loading code of fineweb_edu_10bt and dclm_baseline_1.0, on a folder laid out as theirs."""
    if real:
        pytest.importorskip("datasets", reason="the package datasets is not installed (not pinned: large)")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    calls, repo = [], tmp_path / "repo"
    (repo / "sample/10BT").mkdir(parents=True)
    (repo / "global-shard_01_of_10/local-shard_0_of_10").mkdir(parents=True)
    write(repo / "sample/10BT/000_00000.parquet", TEXTS[:100])
    write(repo / "sample/10BT/001_00000.parquet", TEXTS[100:200])
    write(repo / "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst",
          TEXTS[200:400])
    if not real:
        stub_hub(monkeypatch, calls)
    for name, texts, end in (("fineweb_edu_10bt", TEXTS[:200], ".parquet"),
                             ("dclm_baseline_1.0", TEXTS[200:400], ".jsonl.zst")):
        monkeypatch.setitem(readers.HUB, name, (str(repo), readers.HUB[name][1]))
        (train, val), meta, err = make(capsys, tmp_path, name)
        assert Counter(train + val) == Counter(texts) and err == "" and meta["sources"]["paths"] == [name]
        assert real or all(u.endswith(end) for u in calls[-1])
    (train, val), *_ = make(capsys, tmp_path, f"hf:{repo}::sample/10BT/001*")
    assert Counter(train + val) == Counter(TEXTS[100:200])
    err = make(capsys, tmp_path / "y", f"hf:{repo}::nothing/*", code=2)
    assert "could not be fetched" in err and "give their paths" in err


# -----------------------------------------------------------------------------
# The folder

@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_prepare_begins_again_and_its_workers_end(workers, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS * 30))
    argv = [path, "--name", "x", "--out", tmp_path, "--vocab-size", 300, "--workers", workers]
    process = subprocess.Popen([sys.executable, ROOT / "prepare.py", *map(str, argv)],
                               stdout=subprocess.DEVNULL)
    tokens, until = tmp_path / "x.tmp/train", time.monotonic() + 240
    while not (tokens.exists() and tokens.stat().st_size) and time.monotonic() < until:
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert tokens.exists() and not (tmp_path / "x").exists()
    while any(Path(f"/proc/{child}/exe").exists() for child in children) and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until, "a worker lives on"
    for out in (tmp_path, tmp_path / "whole"):
        argv[4] = out
        code, _, err = run(capsys, *argv)
        assert code == 0, err
    for file in (tmp_path / "whole/x").glob("*.bin"):
        assert file.read_bytes() == (tmp_path / "x" / file.name).read_bytes()
    assert sorted(p.name for p in tmp_path.glob("x*")) == ["x"]


def test_only_one_prepare_works_in_a_folder(tmp_path, capsys):
    write(tmp_path / "a.jsonl", TEXTS[:100])
    argv = [tmp_path / "a.jsonl", "--name", "x", "--out", tmp_path, "--vocab-size", 300]
    with prepare.new_folder(tmp_path / "x") as work:
        (work / "train").touch()
        program = f"import sys, prepare; sys.exit(prepare.main({list(map(str, argv))}))"
        second = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert second.returncode == 2 and "another prepare.py is at work on" in second.stderr
        assert (work / "train").exists()


def test_preparing_needs_no_torch():
    code = "import sys, prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("words", ["--vocab-size 300 --shard-tokens 9", "--vocab_size=300 --shard_tokens=9"])
def test_flags_in_both_spellings(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    flags = prepare.parse(["a.jsonl", "--name", "x", "--shuffle", *words.split()])
    assert (flags.sources, flags.folder) == (("a.jsonl",), Path("data/x"))
    assert (flags.vocab_size, flags.shard_tokens, flags.shuffle) == (300, 9, True)


@pytest.mark.parametrize("argv, say", [
    (["a.jsonl", "--name", "x", "--shard-tokens", "0"], "--shard-tokens 0"),
    (["a.jsonl", "--name", "x", "--tokenizer", "char", "--shuffle"], "need documents"),
    (["a.jsonl", "--name", "x", "--tokenizer", "char", "--split-at", "x"], "need documents"),
    (["fineweb_edu"], "--name"), (["my text.jsonl"], "--name my"),
    (["chat", "a.jsonl", "--name", "x", "--tokenizer", "data/x", "--no-shuffle"], "are for text"),
    (["chat", "a.jsonl", "--name", "x", "--tokenizer", "data/x", "--text-key", "y"], "are for text"),
    (["fineweb", "--name", "x"], "fineweb_edu_10bt")])
def test_wrong_flags(argv, say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "my text.jsonl"):
        Path(name).touch()
    refused((ValueError, OSError), lambda: prepare.list_files(prepare.parse(argv)), say)

"""prepare.py: formats, damaged input, shuffle, kills. test_data.py has its other tests."""

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import make_text, refused, run

import prepare
from corpus import build, folder, shards
from corpus import text as readers
from corpus import tokenizer as tok

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [make_text(20 + 7 * k % 300, k) for k in range(700)]  # 1 to 4 kB each


def jsonl(texts):
    return "".join(json.dumps({"id": k, "text": t}) + "\n" for k, t in enumerate(texts)).encode()


def make(capsys, folder, *argv, code=0):
    """prepare.py under a small vocabulary -> (documents of train and of val in order, meta, stderr)."""
    got, out, err = run(capsys, *argv, "--name", "x", "--out", folder, "--replace", "--vocab-size", 300)
    assert got == code, err
    if code:
        return err
    meta, t = shards.load_meta(folder / "x"), tok.load(folder / "x")
    docs = []
    for split in ("train", "val"):
        ids = shards.open_shards(folder / "x", split, meta)
        docs.append(t.decode(np.concatenate(ids)).split(tok.EOD))
        assert docs[-1].pop() == "" and len(docs[-1]) == meta["documents"][split]
    return docs, meta, err


def write_parquet(path, texts, group=100, **more):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": range(len(texts)), "text": texts, **more})
    parquet.write_table(table, path, row_group_size=group)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_column_of_strings_is_read(kind, tmp_path, capsys):
    """Whatever else the file has, as two columns of one name."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.array(TEXTS[:40])
    if kind == "dictionary":
        column = column.dictionary_encode()
    elif kind != "string":
        column = column.cast(getattr(arrow, kind)())
    numbers = arrow.array(range(40))
    table = arrow.Table.from_arrays([numbers, column, numbers], names=["id", "text", "id"])
    try:
        parquet.write_table(table, tmp_path / "a.parquet")
    except arrow.ArrowNotImplementedError:
        if kind != "string_view":
            raise
        pytest.skip(f"pyarrow {arrow.__version__} writes no string_view")
    (train, val), _, err = make(capsys, tmp_path, tmp_path / "a.parquet")
    assert Counter(train + val) == Counter(TEXTS[:40]) and err == ""


@pytest.mark.parametrize("first,value,said", [
    ("text", "a", "has 2 columns 'text', it has text (string), text (string); give --text-key, or"),
    ("id", ["a"], "no column 'text' of strings, it has id (string), text (list<"),
    ("id", {"a": "a"}, "no column 'text' of strings, it has id (string), text (struct<")])
def test_a_column_that_is_no_text_is_refused(first, value, said, tmp_path, capsys):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array(["a"] * 40), arrow.array([value] * 40)]
    parquet.write_table(arrow.Table.from_arrays(columns, names=[first, "text"]), tmp_path / "a.parquet")
    err = make(capsys, tmp_path, tmp_path / "a.parquet", code=2)
    assert err.count("\n") == 1 and said in err, err


def write(path, texts):
    """`texts` as a file of the kind that its name says; compressed files have two members."""
    half = len(texts) // 2
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(jsonl(texts[:half])) + gzip.compress(jsonl(texts[half:])) + b"\0" * 9)
    elif path.suffix == ".zst":
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
        path.write_bytes(pack(jsonl(texts[:half])) + pack(jsonl(texts[half:])))
    elif path.suffix == ".parquet":
        write_parquet(path, texts)
    else:
        path.write_bytes(jsonl(texts))
    return path


@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "ndjson", "ndjson.gz"])
def test_every_format_gives_the_same_documents(end, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "UNIT_BYTES", 100_000)
    paths = [write(tmp_path / f"a.{end}", TEXTS[:500]), write(tmp_path / f"b.{end}", TEXTS[500:])]
    (train, val), meta, err = make(capsys, tmp_path, *paths, "--no-shuffle", "--workers", 1)
    assert err == "" and len(train) > 500 and len(val) > 40 and meta["sources"]["files"] == 2
    place = {text: k for k, text in enumerate(TEXTS)}
    assert sorted(train + val, key=place.get) == TEXTS, "each once, whole"
    for docs in (train, val):
        assert [place[d] for d in docs] == sorted(place[d] for d in docs), "in the order of the files"
    # Shuffled, each side holds the same documents in a different order, across all files
    (train2, val2), meta2, _ = make(capsys, tmp_path, *paths, "--workers", 1)
    assert Counter(train2) == Counter(train) and Counter(val2) == Counter(val) and train2 != train
    assert meta["shuffle_seed"] is None and meta2["shuffle_seed"] == 1337
    assert meta["tokenizer_sha256"] == meta2["tokenizer_sha256"]
    at = np.array([place[d] for d in train2])
    assert abs(np.corrcoef(at, np.arange(len(at)))[0, 1]) < 0.15, "no trace of the old order"
    assert len(set(np.abs(np.diff(at)) == 1)) == 2 and (np.abs(np.diff(at)) == 1).mean() < 0.02


def test_shuffle_is_a_function_of_the_seed_alone(tmp_path, capsys, monkeypatch):
    """It does not depend on the workers, on the runs that they hold, or on the stretches that are merged."""
    path = write(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(prepare, "UNIT_BYTES", 300_000)
    seen = {}
    for name, more, run_tokens, bucket in (
            ("one", ["--workers", 1], 1 << 24, 1 << 25), ("two", ["--workers", 2], 1 << 24, 1 << 25),
            ("small", ["--workers", 1], 5_000, 20_000),
            ("seed", ["--workers", 1, "--seed", 7], 1 << 24, 1 << 25)):
        monkeypatch.setattr(build, "RUN_TOKENS", run_tokens)
        monkeypatch.setattr(build, "MERGE_TOKENS", bucket)
        _, meta, _ = make(capsys, tmp_path / name, path, "--shard-tokens", 100_000, *more)
        seen[name] = meta["shards"]
        assert {s["tokens"] for s in meta["shards"]["train"][:-1]} == {100_000}
    assert len(seen["one"]["train"]) > 2 and seen["one"] == seen["two"] == seen["small"] != seen["seed"]


def test_broken_records_are_named_and_counted(tmp_path, capsys):
    """Each broken line gives one clear line and is counted; all other records are kept."""
    lines = jsonl(TEXTS[:200]).splitlines(keepends=True)
    bad = [b'{"text": "cut off\n', b"[1, 2]\n", b'{"words": "x"}\n', b'{"text": null}\n', b"\xff\xfe\n",
           b'{"text": "\\ud800"}\n', b"[" * 100_000 + b"\n"]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:100] + bad + lines[100:] + [b'{"text": ""}\n', b"\n"]))
    (train, val), meta, err = make(capsys, tmp_path, tmp_path / "a.jsonl")
    assert Counter(train + val) == Counter(TEXTS[:200])
    assert meta["sources"]["broken"] == len(bad) == err.count("\n") and meta["sources"]["empty"] == 1
    at = len(b"".join(lines[:100]))
    for k, line in enumerate(err.splitlines()):
        assert line.startswith(f"nanoshard: {tmp_path}/a.jsonl at byte {at:,}: ") and len(line) < 300, line
        at += len(bad[k])
    assert "no text under 'text'" in err and "recursion" in err
    assert r"\ud800 is half of a surrogate pair, which is no" in err
    _, out, _ = run(capsys, tmp_path / "a.jsonl", "--name", "y", "--out", tmp_path, "--vocab-size", 300)
    assert "(7 broken, 1 empty left out)" in out
    # After MAX_REPORTS lines, one more line gives the total. A wrong key is an error, not an empty data set
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines + [b"{}\n"] * 35))
    _, meta, err = make(capsys, tmp_path, tmp_path / "b.jsonl")
    assert err.count("\n") == build.MAX_REPORTS + 1 and err.endswith("all in all 35 broken\n")
    assert meta["sources"]["broken"] == 35
    err = make(capsys, tmp_path, tmp_path / "a.jsonl", "--text-key", "content", code=2)
    assert err.count("\n") == 1 and "no text under 'content'" in err and "--text-key" in err
    assert shards.load_meta(tmp_path / "x") == meta, "what was there stays"


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_compressed_file_cut_short_or_with_bad_bytes(end, tmp_path, capsys):
    good = write(tmp_path / f"a.jsonl.{end}", TEXTS)
    raw = good.read_bytes()
    second = raw.rindex(raw[:4])  # the second member's magic number
    for name, content in (("cut", raw[: len(raw) * 3 // 4]), ("bad", raw[:second] + b"\xff" * 4000)):
        path = tmp_path / f"{name}.jsonl.{end}"
        path.write_bytes(content)
        (train, val), meta, err = make(capsys, tmp_path, path)
        assert err.count("\n") == 1 and str(path) in err and "the rest is lost: get it again" in err
        assert ("is cut short after" if name == "cut" else "does not unpack") in err
        assert meta["sources"]["damaged"] == 1 and set(train + val) <= set(TEXTS)
        assert 350 <= len(train + val) < 700, "what comes before is kept"
    path.write_bytes(raw)  # the whole file, under the same name: made again
    (train, val), meta, err = make(capsys, tmp_path, path)
    assert len(train + val) == 700 and err == "" and meta["sources"]["damaged"] == 0


def test_broken_rows_and_damaged_parquet(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    texts = [*TEXTS[:150], None, "", *TEXTS[150:200]]
    write_parquet(path, texts, content=TEXTS[: len(texts)])
    (train, val), meta, err = make(capsys, tmp_path, path)
    assert Counter(train + val) == Counter(TEXTS[:200])
    assert err == f"nanoshard: {path} row group 1 row 51: no text under 'text'\n"
    assert (meta["sources"]["broken"], meta["sources"]["empty"]) == (1, 1)
    for key in ("words", "id"):
        err = make(capsys, tmp_path, path, "--text-key", key, code=2)
        assert err.count("\n") == 1 and f"no column '{key}' of strings, it has id (int64), text (" in err, err
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    err = make(capsys, tmp_path, path, code=2)
    assert err.count("\n") == 1 and "not a whole parquet file" in err
    assert err.endswith("; download it again, or leave it out\n")
    middle = len(raw) // 5  # in the first row group's pages
    path.write_bytes(raw[:middle] + b"\xaa" * 2000 + raw[middle + 2000 :])
    (train, val), meta, err = make(capsys, tmp_path, path)
    lost = 100 - (len(train + val) + 2 - 102)
    assert meta["sources"]["damaged"] == 1 and f"{lost} rows are lost" in err and lost > 0


@pytest.mark.parametrize("is_list", [False, True])
def test_a_json_is_refused_with_the_command_that_makes_lines_of_it(is_list, tmp_path, capsys):
    records = [{"text": text} for text in TEXTS[:40]]
    (tmp_path / "a.json").write_bytes(json.dumps(records).encode() if is_list else jsonl(TEXTS[:40]))
    err = make(capsys, tmp_path, tmp_path / "a.json", code=2)
    command = err.strip().split(": ")[-1]
    assert err.count("\n") == 1 and ("jq -c '.[]'" in command) == is_list
    if shutil.which("jq") or not is_list:
        subprocess.run(command, shell=True, check=True)
        (train, val), *_ = make(capsys, tmp_path, tmp_path / "a.jsonl")
        assert Counter(train + val) == Counter(TEXTS[:40])


@pytest.mark.parametrize("whole", [False, True])
def test_the_mark_before_a_text_is_no_part_of_it(whole, tmp_path, monkeypatch):
    """The same three bytes later in a file are a character of the text."""
    text = "a\u00e9\ufeffb\n\n" * 9
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
    spans = readers.list_spans(str(tmp_path / "a.txt"), 20, "text", whole)
    assert len(spans) == 1 if whole else len(spans) > 3
    read = [document for span in spans for document in readers.documents(span, "text", pytest.fail)]
    assert "".join(read) == text


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
UNPACKS = {"gz": "gunzip", "bz2": "bunzip2", "xz": "unxz", "zst": "unzstd", "zip": "unzip"}


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst", "zip"])
def test_a_packed_text_is_unpacked_by_the_command_that_is_named(kind, tmp_path, capsys, monkeypatch):
    """Whatever the file is called; the command is run where its program is installed."""
    monkeypatch.chdir(tmp_path)
    text = "\n\n".join(TEXTS[:40]).encode()
    if kind == "zip":
        with zipfile.ZipFile("a.txt", "w") as f:
            f.writestr("b.txt", text)
    elif kind == "zst":
        Path("a.txt").write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(text))
    else:
        Path("a.txt").write_bytes(PACK[kind](text))
    shutil.copy("a.txt", f"c.txt.{kind}")
    for name, there in (f"c.txt.{kind}", "c.txt"), ("a.txt", "a.txt"):
        err = make(capsys, tmp_path, name, code=2)
        assert err.count("\n") == 1 and "; unpack it: " in err, err
        command = err.split("unpack it: ")[1].split(", and give")[0]
        assert ("mv" in command) == (name == "a.txt" and kind != "zip")
        assert UNPACKS[kind] in command
        if shutil.which(UNPACKS[kind]) and kind != "zip":
            subprocess.run(command, shell=True, check=True, capture_output=True)
            assert Path(there).read_bytes() == text


@pytest.mark.parametrize("name,end", [("a.json.gz", ".jsonl.gz"), ("a.JSON.zst", ".jsonl.zst"),
                                      ("a.data", ".parquet")])
def test_a_file_under_a_wrong_name_is_read_after_the_command_that_is_named(name, end, tmp_path, capsys):
    good = write(tmp_path / f"good{end}", TEXTS[:40])
    good.rename(tmp_path / name)
    err = make(capsys, tmp_path, tmp_path / name, code=2)
    command = err.strip().split(", name it so: ")[1]
    assert err.count("\n") == 1 and command.endswith(end)
    subprocess.run(command, shell=True, check=True)
    (train, val), *_ = make(capsys, tmp_path, command.split()[-1])
    assert Counter(train + val) == Counter(TEXTS[:40])


def test_missing_packages_are_one_line(tmp_path, capsys, monkeypatch):
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow"),
                          ("fineweb_edu_10bt", "datasets")):
        if "." in name:
            (tmp_path / name).write_bytes(b"x")
            name = tmp_path / name
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
        err = make(capsys, tmp_path, name, code=2)
        assert err.count("\n") == 1 and f"pip install {package}\n" in err, err


def test_large_text_is_read_in_several_spans(tmp_path, capsys, monkeypatch):
    """It is cut at a blank line, else at a line, else at a character; the pieces together are the text."""
    monkeypatch.setattr(prepare, "UNIT_BYTES", 100_000)
    for k, text in enumerate((make_text(50_000), make_text(50_000).replace("\n", " "), "字" * 200_000)):
        path = tmp_path / f"{k}.txt"
        path.write_text(text)
        spans = readers.list_spans(str(path), 100_000, "text")
        pieces = ["".join(readers.documents(span, "text", None)) for span in spans]
        assert len(pieces) > 3 and "".join(pieces) == text and max(map(len, pieces)) < 200_000
    _, meta, _ = make(capsys, tmp_path, tmp_path / "0.txt", tmp_path / "1.txt")
    assert meta["shuffle_seed"] is None, "pieces of one text stay in order unless --shuffle says so"
    (tmp_path / "1.txt").write_bytes((make_text(50_000) + "caf").encode() + b"\xe9")
    err = make(capsys, tmp_path, tmp_path / "1.txt", code=2)
    assert f"not utf-8 at byte {(tmp_path / '1.txt').stat().st_size - 1};" in err


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
    err = make(capsys, tmp_path, f"hf:{repo}::nothing/*", code=2)
    assert err.count("\n") == 1 and "could not be fetched" in err and "give their paths" in err
    with pytest.raises(SystemExit):
        prepare.parse(["--help"])
    assert "was never run here" in " ".join(capsys.readouterr().out.split())


SMALL = "import prepare, sys; prepare.UNIT_BYTES = {}; sys.exit(prepare.main())"


def start(folder, sources, unit_bytes, workers):
    argv = [sys.executable, "-c", SMALL.format(unit_bytes), *sources, "--name", "x", "--out", folder,
            "--replace", "--vocab-size", 300, "--workers", workers]
    return subprocess.Popen([str(a) for a in argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def a_worker_of(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes())


def finished_parts(folder):
    return len(list((folder / "x/.parts").glob("[0-9]*-*.json")))


def test_killed_and_resumed_is_byte_identical(tmp_path, capsys, monkeypatch):
    """kill -9 after a random number of parts, more each time: the parts stay, the result has equal bytes."""
    sources = [write(tmp_path / "a.jsonl", TEXTS), write(tmp_path / "b.jsonl.gz", TEXTS[::2])]
    monkeypatch.setattr(prepare, "UNIT_BYTES", 5_000)  # many units: enough are left to be killed in
    _, meta, _ = make(capsys, tmp_path / "whole", *sources, "--workers", 1)
    rng, kept = random.Random(os.environ.get("PYTEST_SEED", "1")), []
    folder, before = tmp_path / "killed", 0
    for who in ("worker", "all"):
        process = start(folder, sources, 5_000, 2 if who == "worker" else 1)
        target, until = before + rng.randint(1, 12), time.monotonic() + 240
        while finished_parts(folder) < target and time.monotonic() < until and process.poll() is None:
            time.sleep(0.002)
        os.kill(a_worker_of(process.pid) if who == "worker" else process.pid, signal.SIGKILL)
        out, err = process.communicate()
        if who == "worker":
            assert process.returncode == 2 and err.count("\n") == 1, err
            assert "a worker was killed" in err and "goes on" in err
        kept.append(finished_parts(folder))
        assert kept[-1] > before and not (folder / "x/meta.json").exists()
        before = kept[-1]
    process = start(folder, sources, 5_000, 1)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and err == "" and " pieces are kept from an earlier run" in out
    assert kept[-1] <= int(out.split(" of ")[0]) < 200  # of 211
    again = shards.load_meta(folder / "x")
    assert again["shards"] == meta["shards"] and again["tokenizer_sha256"] == meta["tokenizer_sha256"]
    for path in (tmp_path / "whole/x").glob("*.bin"):
        assert path.read_bytes() == (folder / "x" / path.name).read_bytes()
    assert sorted(p.name for p in (folder / "x").iterdir()) == [
        "meta.json", "tokenizer.json", "train_00000.bin", "val_00000.bin"]


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_vocabulary_is_trained_on_an_amount_of_bytes(monkeypatch):
    """A character can have three of them, so the number of characters would announce too little."""
    monkeypatch.setattr(prepare, "TRAINING_BYTES", 20)
    monkeypatch.setattr(prepare, "all_documents", lambda units, key: ["\u3042" * 3] * 10)
    assert len(list(prepare.training_texts(["unit"], "text"))) == 3  # 27 bytes: the first sum above 20


def test_parts_are_kept_only_while_they_fit(tmp_path, capsys, monkeypatch):
    """After a late failure the same call encodes nothing; after a change of a file, only its units."""
    a, b = write(tmp_path / "a.jsonl", TEXTS[:300]), write(tmp_path / "b.jsonl", TEXTS[300:600])
    monkeypatch.setattr(prepare, "UNIT_BYTES", 100_000)
    encoded, encode_unit = [], build.encode_unit
    monkeypatch.setattr(build, "encode_unit", lambda *a, **kw: encoded.append(1) or encode_unit(*a, **kw))

    def encoded_by(fail, *argv):
        encoded.clear()
        with monkeypatch.context() as m:
            if fail:
                m.setattr(prepare, "write_shards", no_space)
            make(capsys, tmp_path, a, b, "--tokenizer", tmp_path / "t", "--workers", 1, *argv, code=2 * fail)
        return len(encoded)

    (tmp_path / "t").mkdir()
    tok.train_bpe(TEXTS[:50], 300).save(tmp_path / "t/tokenizer.json")
    monkeypatch.setattr(prepare, "parse", lambda argv, parse=prepare.parse: parse(
        [w for w in argv if w not in ("--vocab-size", "300")]))
    n = encoded_by(True)
    assert n > 5 and encoded_by(True) == 0
    first, second, third, fourth, *_ = sorted((tmp_path / "x/.parts").glob("[0-9]*-*.bin"))
    tokens = bytearray(first.read_bytes())
    tokens[-3] ^= 1
    first.write_bytes(tokens)
    second.write_bytes(second.read_bytes()[:-100])
    third.unlink()
    fourth.with_suffix(".json").write_text("{}")
    assert encoded_by(True) == 4, "parts that are not as they were written"
    assert encoded_by(False) == 0 and not (tmp_path / "x/.parts").exists()
    assert encoded_by(True, "--seed", 2) == n == encoded_by(True, "--val-fraction", 0.2)
    assert len(list((tmp_path / "x/.parts").glob("*.bin"))) == n, "the parts of other settings are gone"
    write(b, TEXTS[301:601])
    assert 1 < encoded_by(False, "--val-fraction", 0.2) < n


def test_only_one_prepare_works_in_a_folder(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", TEXTS[:100])
    with prepare.locked(tmp_path / "x/.parts"):
        err = make(capsys, tmp_path, path, code=2)
        assert err.count("\n") == 1 and "another prepare.py is at work" in err
    make(capsys, tmp_path, path)


def test_progress_says_rate_and_time_left(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(prepare, "UNIT_BYTES", 100_000)
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(build, "time", types.SimpleNamespace(time=lambda: next(clock)))
    _, out, _ = run(capsys, path, "--name", "x", "--out", tmp_path, "--replace", "--vocab-size", 300,
                    "--workers", 1)
    lines = [line for line in out.splitlines() if line.endswith(" left")]
    assert len(lines) > 5 and " MB/s, " in lines[0] and lines[-1].endswith(" 0:00 left")
    left = [int(m) * 60 + int(s) for m, s in (line.split()[-2].split(":") for line in lines)]
    assert left[1] > left[-2] > 0


def test_fingerprint_is_pinned():
    """Another fingerprint for the same settings would make every prepared data set again."""
    span = readers.Span("packed", "a.jsonl.gz", 0, 100, 400, 7)
    for more, want in (([], "2099d40c5515"),
                       (["--no-shuffle", "--vocab-size", "300", "--seed", "2"], "278c30052d20")):
        flags = prepare.parse(["a.jsonl.gz", "--name", "x", *more])
        assert prepare.fingerprint(flags, [span]).startswith(want)


@pytest.mark.parametrize("words", ["--vocab-size 300 --shard-tokens 9", "--vocab_size=300 --shard_tokens=9"])
def test_flags_in_both_spellings(words):
    flags = prepare.parse(["a.jsonl", "b.txt", "--name", "x", "--shuffle", *words.split()])
    assert (flags.sources, flags.folder) == (("a.jsonl", "b.txt"), Path("data/x"))
    assert (flags.vocab_size, flags.shard_tokens, flags.order) == (300, 9, True)
    assert prepare.parse(["stdlib", "--no_shuffle"]).order is False
    assert prepare.parse(["stdlib"]).order is None


def test_preparing_needs_no_torch():
    code = "import sys, prepare, corpus.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("argv, say", [
    (["a.jsonl", "--name", "x", "--shard-tokens", "0"], "--shard-tokens 0"),
    (["a.jsonl", "--name", "x", "--tokenizer", "char", "--shuffle"], "--shuffle needs documents"),
    (["fineweb_edu"], "--name"),
    (["chat", "a.jsonl", "--name", "x", "--tokenizer", "data/x", "--no-shuffle"], "are for text"),
    (["chat", "a.jsonl", "--name", "x", "--tokenizer", "data/x", "--text-key", "y"], "are for text"),
    (["fineweb", "--name", "x"], "fineweb_edu_10bt"),
])
def test_wrong_flags(argv, say):
    def call():
        prepare.list_sources(prepare.parse(argv))
    refused((ValueError, OSError), call, say)


def test_who_comes_second_removes_nothing(tmp_path, monkeypatch):
    """Both came while there was no folder. The first may also have removed it again."""
    work = tmp_path / "x/.parts"
    with folder.locked(work):
        (work / "part.bin").touch()
        with monkeypatch.context() as late:
            late.setattr(Path, "exists", lambda path: False)
            with pytest.raises(ValueError, match="another prepare.py is at work"), folder.locked(work):
                pass
        assert (work / "part.bin").exists()
    real = folder.fcntl.flock

    def removed(file, how):
        shutil.rmtree(work)
        real(file, how)
    monkeypatch.setattr(folder.fcntl, "flock", removed)
    with pytest.raises(ValueError, match="another prepare.py is at work"), folder.locked(work):
        pass


def test_folders_that_wrong_input_made_are_removed_and_others_stay(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("new/a/b", "there/a"):
        with pytest.raises(ValueError, match="wrong"), folder.locked(tmp_path / name):
            raise ValueError("wrong")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_each_line_belongs_to_one_span_wherever_a_file_is_cut(tmp_path):
    path = tmp_path / "a.txt"
    whole = b"a\n\n\nbc\n\nd\n"
    path.write_bytes(whole)
    for cut in range(1, len(whole)):
        spans = [SimpleNamespace(path=path, start=0, stop=cut),
                 SimpleNamespace(path=path, start=cut, stop=len(whole))]
        lines = [line for span in spans for line in readers.plain_lines(span, pytest.fail)]
        assert b"".join(line for _, line in lines) == whole
        assert [at for at, _ in lines] == [0, 2, 3, 4, 7, 8]


def test_a_shard_is_on_the_disk_when_it_is_named(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    stream = SimpleNamespace(take=lambda n: [np.arange(n, dtype=np.uint16)])
    prepare.write_shard(tmp_path / "train_00000.bin", np.uint16, stream, 5)
    assert synced == [4096 + 5 * 2]

"""Token files, data order, tokenizers and prepare.py. Every message that a user can see is one line."""
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
from config import Config
from corpus import order, samples, shards
from corpus import text as readers
from corpus import tokenizer as tok
from corpus.samples import micro_batches, open_data
from parallel import make_mesh
from runtime import agree
from runtime.launch import World

SOUNDS = ["ba", "co", "du", "fe", "gi", "ho", "ja", "ki", "lu", "me", "no", "pi", "ta", "vé", "wö", "字", "€"]
WORDS = [a + b + c for a in SOUNDS for b in SOUNDS for c in ("", "n", "st\n")]


def make_text(n, seed=0):
    picks = np.random.default_rng(seed).integers(0, len(WORDS), n)
    return " ".join(WORDS[i] + ("\n\n" if k % 40 == 39 else "") for k, i in enumerate(picks))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for k in range(6):
        (folder / f"{k}.txt").write_text(make_text(9000, k))
    return sorted(map(str, folder.glob("*.txt")))


def run(capsys, *argv):
    capsys.readouterr()
    try:
        code = prepare.main([str(a) for a in argv])
    except SystemExit as e:
        code = e.code
    return code, *capsys.readouterr()


def done(capsys, *argv):
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out


@pytest.fixture
def toy(tmp_path, texts, capsys):
    """Characters in shards of 1,000 tokens, so that much happens at a boundary -> (folder, [token id])."""
    done(capsys, texts[0], "--name", "toy", "--tokenizer", "char", "--out", tmp_path, "--shard-tokens", 1000)
    return tmp_path / "toy", tok.load(tmp_path / "toy").encode(Path(texts[0]).read_text())


def keys(seed, epoch=0):
    return order.draw_keys("order", seed, epoch)[:4]


def test_permutation_is_bijective():
    for n in [*range(1, 300), *range(300, 4100, 37), 1023, 1024, 1025, 4095, 4096, 4097, 9973, 65537]:
        assert np.array_equal(np.sort(order.permute(np.arange(n), n, keys(n))), np.arange(n)), n


def test_permutation_of_large_n():
    """[0, n) is too large to list: results are in range, differ and are nearly uniform."""
    for n in (99_999_989, 2**31 + 11, 3 * 2**40 + 1):
        i = np.random.default_rng(0).choice(10**8 - 11, 50_000, replace=False)
        out, other = order.permute(i, n, keys(1)), order.permute(i, n, keys(2))
        assert out.max() < n and len(np.unique(out)) == len(i) and (out == other).mean() < 0.01
        share = np.bincount((out * 16 // n).astype(int), minlength=16) / len(i)
        assert np.abs(share - 1 / 16).max() < 0.01
        assert np.array_equal(order.permute(i[:512], n, keys(1)), out[:512]), "a piece gives the same piece"


def test_order_is_pinned():
    """Another order would silently give every resumed run other data: change VERSION together with it."""
    assert order.permute(np.arange(6), 1000, keys(1337)).tolist() == [402, 888, 629, 373, 659, 53]
    assert order.permute(np.arange(3), 10**9, keys(1, epoch=2)).tolist() == [13667878, 511182942, 119998667]
    few = [order.permute(range(n), n, np.arange(1, 5, dtype=np.uint64)).tolist() for n in (1, 2, 3, 4, 5)]
    assert few == [[0], [0, 1], [2, 1, 0], [2, 1, 0, 3], [4, 3, 0, 1, 2]]
    assert samples.Synthetic(1000, 5, seed=1).batch(7, 1)[0].tolist() == [[984, 987, 990, 993, 451]]
    x, y = samples.Synthetic(1000, 300, seed=1).batch(0, 8)
    assert (int(x.sum()), int((x * y).sum() % 10007)) == (1095906, 9505)


def test_the_windows_of_later_epochs_are_pinned(tmp_path, capsys):
    (tmp_path / "x.txt").write_text(make_text(500)[:1000])
    assert run(capsys, tmp_path / "x.txt", "--name", "x", "--out", tmp_path, "--tokenizer", "char")[0] == 0
    starts = samples.Tokens(tmp_path / "x", "train", 150, seed=3).window_starts(0, 15).reshape(3, 5)
    assert starts.tolist() == [[150, 450, 0, 300, 600], [265, 415, 715, 115, 565], [359, 209, 659, 509, 59]]


def test_each_epoch_has_all_windows_in_another_order(toy):
    folder, stream = toy
    ds, T = samples.Tokens(folder, "train", 33, seed=3), 33
    n, N = ds.n_samples, ds.n_tokens
    assert n == (N - 1) // T
    first = ds.window_starts(0, n)
    assert sorted(first) == [k * T for k in range(n)] and list(first) != sorted(first)
    x, y = ds.batch(0, n)
    assert Counter(x[:, 0].tolist()) == Counter(stream[k * T] for k in range(n))
    second = ds.window_starts(n, n)
    offset = min(second)
    assert 0 < offset < T and sorted(second) == [offset + k * T for k in range(n)], "cut elsewhere, each once"
    assert list(second - offset) != list(first), "and in another order"
    assert list(samples.Tokens(folder, "train", 33, seed=4).window_starts(0, n)) != list(first)
    val = samples.Tokens(folder, "val", 33)  # in order, every epoch alike
    x, _ = val.batch(0, val.n_samples + 2)
    assert x[:-2].flatten().tolist() == stream[N : N + 33 * val.n_samples] and torch.equal(x[-2:], x[:2])


@pytest.mark.parametrize("split, T, windows", [
    ("train", 30, 29), ("train", 31, 29), ("train", 32, 28), ("val", 20, 4), ("val", 33, 3), ("val", 99, 1)])
def test_the_last_window_has_its_last_target(split, T, windows, tmp_path, capsys):
    """n windows need n*T + 1 tokens. Of 1000 characters 900 are for training: they hold 29 windows of 30."""
    text = make_text(500)[:1000]
    (tmp_path / "x.txt").write_text(text)
    done(capsys, tmp_path / "x.txt", "--name", "x", "--out", tmp_path, "--tokenizer", "char")
    stream = tok.load(tmp_path / "x").encode(text)
    stream = stream[:900] if split == "train" else stream[900:]
    ds = samples.Tokens(tmp_path / "x", split, T, seed=2)
    assert (ds.n_tokens, ds.n_samples) == (len(stream), windows)
    starts = ds.window_starts(0, windows).tolist()
    assert sorted(starts) == [T * i for i in range(windows)]
    x, y = ds.batch(0, windows)
    for row, at in enumerate(starts):  # no window leaves its split, or begins it again
        assert x[row].tolist() == stream[at : at + T] and y[row].tolist() == stream[at + 1 : at + T + 1]


class Numbers:
    has_documents = False
    def batch(self, first, n):
        return (torch.arange(first, first + n)[:, None],) * 2


@pytest.mark.parametrize("layout, of_rank", [  # ranks, tp, pp -> the dp rank of each rank
    ((1, 1, 1), [0]), ((3, 1, 1), [0, 1, 2]), ((4, 2, 1), [0, 0, 1, 1]), ((4, 1, 2), [0, 1, 0, 1]),
    ((8, 2, 2), [0, 0, 1, 1, 0, 0, 1, 1])])
def test_each_replica_takes_its_part_of_the_samples(layout, of_rank):
    (n, tp, pp), cfg, dp = layout, Config(micro_batch=2), max(of_rank) + 1
    for rank, d in enumerate(of_rank):
        mesh = make_mesh(World(rank=rank, size=n), tp, pp, groups=False)
        for first, each in ((0, 1), (40, 3)):
            got = micro_batches(cfg, mesh, Numbers(), first, each * dp * 2, torch.device("cpu"))
            start = first + d * each * 2
            assert [x.flatten().tolist() for x, _ in got] == [
                [start + 2 * j, start + 2 * j + 1] for j in range(each)]


def test_windows_cross_shards_and_the_end_of_the_stream(toy):
    folder, stream = toy
    ds, T = samples.Tokens(folder, "train", 2500, seed=1), 2500  # every window spans three shards or four
    N, n = ds.n_tokens, ds.n_samples
    assert len(ds.shards) > 10 and all(len(s) == 1000 for s in ds.shards[:-1])
    circle = torch.tensor(stream[:N] * 2)
    round_the_end = [i for i, at in enumerate(ds.window_starts(0, 20 * n)) if at + T + 1 > N]
    assert round_the_end and round_the_end[0] >= n, "only later epochs, whose grid is moved, go round the end"
    for first, count in ((0, n), (7 * n - 1, 3), (round_the_end[0], 1), (round_the_end[-1] - 1, 2)):
        x, y = ds.batch(first, count)
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (count, T) and x.is_contiguous()
        for row, at in enumerate(ds.window_starts(first, count).tolist()):
            assert torch.equal(x[row], circle[at : at + T])
            assert torch.equal(y[row], circle[at + 1 : at + 1 + T])


def test_a_sample_does_not_depend_on_the_batch_that_reads_it(toy):
    """So every layout, and every resumed run, sees the same samples."""
    for ds in (samples.Tokens(toy[0], "train", 40, seed=5), samples.Synthetic(1000, 40, seed=5)):
        for first in (0, ds.n_samples - 3 if ds.n_samples < 10**6 else 10**6):  # also across an epoch
            x, y = ds.batch(first, 8)  # stays as it is: later batches are fresh tensors
            parts = [ds.batch(first, 4), ds.batch(first + 4, 4)]
            assert torch.equal(x, torch.cat([p[0] for p in parts]))
            assert torch.equal(y, torch.cat([p[1] for p in parts]))
            ones = [ds.batch(first + k, 1)[0] for k in (7, 2)]  # backwards too: there is no state
            assert torch.equal(torch.cat(ones), x[[7, 2]])


def test_synthetic_is_learnable():
    ds = samples.Synthetic(50, 200, seed=0)
    x, y = ds.batch(0, 100)
    assert x.min() >= 0 and x.max() < 50 and torch.equal(x[:, 1:], y[:, :-1])
    step = (y - x) % 50
    assert ((step >= 1) & (step <= 4)).float().mean() > 0.7, "the next token is one of four, mostly"
    assert len(torch.unique(x[:, 0])) > 30 and len(torch.unique(step.mode(1).values)) == 4
    train, val = ({tuple(row) for row in samples.Synthetic(10**9, 16, seed).batch(0, 2000)[0].tolist()}
                  for seed in (0, 1))
    assert len(train) == len(val) == 2000 and not train & val, "validation is other text"


def refused(kind, call, *say):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and all(s in text for s in say), text


def opens(folder, seq_len=32):
    return lambda: samples.Tokens(folder, "train", seq_len)


def edit(path, at, new):
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(new)


def test_edited_files_are_caught_by_verify(toy, capsys):
    folder, _ = toy
    shard = folder / "train_00003.bin"
    assert shards.verify(folder) == len(list(folder.glob("*.bin"))) + 1
    edit(shard, 4096 + 77, b"\1")
    opens(folder)()  # headers and sizes are right; a run also compares the sha256, once per node
    cfg = Config(data=str(folder))
    for world in (World(), World(rank=1, size=2)):  # each is the first rank of a node
        refused(ValueError, lambda world=world: agree.open_data(cfg, world, None), f"{shard} has another sha")
    code, out, err = run(capsys, "--name", "toy", "--out", folder.parent, "--verify")  # without a SOURCE
    assert code == 2 and err.count("\n") == 1 and f"nanoshard: {shard} has another sha256" in err
    shard.unlink()
    for call in (opens(folder), lambda: shards.verify(folder)):
        with pytest.raises(FileNotFoundError, match=shard.name):
            call()
    edit(folder / "tokenizer.json", 12, b"!")
    refused(ValueError, lambda: shards.verify(folder), "tokenizer.json", "sha256")


def test_a_start_reads_files_again_once_they_have_changed(toy, monkeypatch):
    folder, _ = toy
    shards.verify_once(folder)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "verify", None)
        shards.verify_once(folder)
    edit(folder / "val_00000.bin", 4096, b"\1")
    refused(ValueError, lambda: shards.verify_once(folder), "val_00000.bin has another sha256")


def test_the_data_of_a_run(toy):
    folder, stream = toy
    cfg = Config(data=str(folder), seq_len=32, seed=3)
    train, val, vocab_size, identity = open_data(cfg)
    want = samples.Tokens(folder, "train", 32, 3)
    assert torch.equal(train.batch(0, 50)[0], want.batch(0, 50)[0]) and train.seq_len == 32
    want = samples.Tokens(folder, "val", 32)
    assert vocab_size == tok.load(folder).n_vocab and torch.equal(val.batch(0, 9)[1], want.batch(0, 9)[1])
    assert open_data(replace(cfg, vocab_size=500))[2:] == (500, identity)
    refused(ValueError, lambda: open_data(replace(cfg, vocab_size=3)), f"--vocab-size {vocab_size}")
    train, val, vocab_size, identity = open_data(Config(data="synthetic"))
    assert (vocab_size, identity) == (256, "synthetic-256")
    assert not torch.equal(train.batch(0, 1)[0], val.batch(0, 1)[0])


def test_char_round_trip(tmp_path):
    t = tok.train_char(["hello ", "wörld€"])
    assert t.n_vocab == 10 and t.eod is None and t.chars == "".join(sorted(set("hello wörld€")))
    t.save(tmp_path / "tokenizer.json")
    again = tok.load(tmp_path)
    assert again.decode(again.encode("hello wörld€")) == "hello wörld€" and again.sha256 == t.sha256
    assert again.encode("") == [] and again.decode([99, 0]) == "\ufffd "
    refused(ValueError, lambda: t.encode("hello Q"), "'Q'", "U+0051", "10", "bpe")


def test_characters_of_several_bytes_are_given_whole():
    t = tok.train_bpe(["plain text"], 257)
    text = "a\u00e4\u20ac\U0001f600b"
    assert list(t.whole_characters(t.encode(text))) == list(text)
    assert list(t.whole_characters([97, 0xE2, 0x82])) == ["a", "\ufffd"]


def test_bpe_round_trip(tmp_path):
    t = tok.train_bpe((make_text(2000, k) for k in range(3)), 300)
    assert t.n_vocab == 300 and t.eod == 299
    t.save(tmp_path / "tokenizer.json")
    again = tok.load(tmp_path)
    for text in (make_text(500, 9), "other 字 \r\n\t  x" + tok.EOD, ""):
        ids = again.encode(text)
        assert again.decode(ids) == text and ids == t.encode(text) and t.eod not in ids
    assert len(t.encode(make_text(500, 9))) < 0.6 * len(make_text(500, 9)), "it merges"
    assert again.decode([t.eod]) == tok.EOD and again.decode([10**6]) == "\ufffd"
    refused(FileNotFoundError, lambda: tok.load(tmp_path / "none"), "none")
    (tmp_path / "tokenizer.json").write_text('{"kind": "bp')
    refused(ValueError, lambda: tok.load(tmp_path), "tokenizer.json")


def test_published_encoding_is_saved_whole(tmp_path, monkeypatch):
    """A stand-in that, like cl100k_base, does not use the id before end-of-document: no network, no cache."""
    import tiktoken
    fake = tiktoken.Encoding("gpt2", pat_str=r"\S+|\s+", mergeable_ranks={bytes([b]): b for b in range(256)},
                             special_tokens={tok.EOD: 257, "<|fim|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: fake)
    tok.from_tiktoken("gpt2").save(tmp_path / "tokenizer.json")
    t = tok.load(tmp_path)
    assert (t.kind, t.n_vocab, t.eod) == ("gpt2", 259, 257)
    assert t.encode("a<|fim|>") == list(b"a<|fim|>") and t.decode([97, 256, 257]) == "a\ufffd" + tok.EOD


@pytest.mark.parametrize("symbols, dtype", [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_above_65535_are_stored_in_four_bytes(symbols, dtype, tmp_path, capsys):
    text = "".join(map(chr, [*range(0x100, 0xD800), *range(0xE000, 0x20000)][:symbols]))
    (tmp_path / "x.txt").write_text(text)
    done(capsys, tmp_path / "x.txt", "--name", "x", "--out", tmp_path, "--tokenizer", "char")
    meta = shards.load_meta(tmp_path / "x")
    assert (meta["dtype"], meta["vocab_size"]) == (dtype, symbols)
    opened = [shards.open_shards(tmp_path / "x", split, meta)[0] for split in shards.SPLITS]
    ids = [i for shard in opened for i in shard.tolist()]
    assert ids == list(range(symbols))
    x, y = samples.Tokens(tmp_path / "x", "val", 100).batch(0, 65)
    assert torch.equal(y, x + 1) and y.max() > 65400


def test_shakespeare(tmp_path, capsys):
    path = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
    if not path.is_file():
        assert os.environ.get("CI") != "true", f"{path} is missing, and CI=true"
        pytest.skip(f"{path} is missing: the text is no part of the repository")
    out = done(capsys, path, "--name", "s", "--tokenizer", "char", "--out", tmp_path)
    for say in ("1,115,394 characters", "65 symbols", "1,003,854 + 111,540 tokens"):
        assert say in out
    text, t = path.read_text(), tok.load(tmp_path / "s")
    for name, want in (("train", text[:1_003_854]), ("val", text[1_003_854:])):
        assert t.decode(np.fromfile(tmp_path / f"s/{name}_00000.bin", "<u2", offset=4096)) == want
    meta = shards.load_meta(tmp_path / "s")
    assert meta["vocab_size"] == 65 and meta["eod"] is None and meta["documents"] is None


def test_same_bytes_for_any_number_of_workers(tmp_path, texts, capsys):
    for workers in (1, 2):
        done(capsys, *texts, "--name", "same", "--out", tmp_path / str(workers), "--vocab-size", 400,
             "--workers", workers)
    one, two = (shards.load_meta(tmp_path / w / "same") for w in "12")
    for key in ("shards", "tokenizer_sha256", "tokens", "documents", "sources"):
        assert one[key] == two[key], key
    for name in ("train_00000.bin", "val_00000.bin", "tokenizer.json"):
        assert (tmp_path / "1/same" / name).read_bytes() == (tmp_path / "2/same" / name).read_bytes()
    # The files contain each document once and whole, in one split, with its end
    t, folder = tok.load(tmp_path / "1/same"), tmp_path / "1/same"
    assert one["eod"] == t.eod == 399 and one["vocab_size"] == 400 and one["dtype"] == "uint16"
    found = []
    for split in ("train", "val"):
        ids = shards.open_shards(folder, split, one)[0]
        docs = t.decode(ids).split(tok.EOD)
        assert docs.pop() == "" and len(docs) == one["documents"][split] == (ids == t.eod).sum()
        found += docs
    wanted = list(readers.documents([readers.File("text", path) for path in texts], "text"))
    assert Counter(found) == Counter(wanted) and len(wanted) > 10
    assert "".join(wanted) == "".join(Path(path).read_text() for path in texts)
    assert sorted(p.name for p in folder.iterdir()) == [
        "meta.json", "tokenizer.json", "train_00000.bin", "val_00000.bin"]  # nothing left of the making


def test_duplicates_land_on_one_side(tmp_path, texts, capsys, monkeypatch):
    monkeypatch.setattr("time.time", iter(range(0, 10**6, 3)).__next__)  # 3 s from one call to the next
    assert "encoded 0." in done(capsys, *texts, *texts, "--name", "d", "--out", tmp_path,
                                "--vocab-size", 300, "--val-fraction", 0.5)
    t, meta = tok.load(tmp_path / "d"), shards.load_meta(tmp_path / "d")
    opened = [shards.open_shards(tmp_path / "d", split, meta)[0] for split in ("train", "val")]
    train, val = (Counter(t.decode(shard).split(tok.EOD)[:-1]) for shard in opened)
    assert train and val and not set(train) & set(val) and set(train.values()) == {2}


def test_second_call_does_nothing_unless_something_changed(tmp_path, texts, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text(Path(texts[0]).read_text())
    argv = [mine, "--name", "a", "--out", tmp_path, "--vocab-size", 300, "--val-fraction", 0.5,
            "--workers", 1]

    def made(*more):
        return "up to date" not in done(capsys, *argv, *more)

    assert made() and not made() and not made("--workers", 2)
    mine.write_text(mine.read_text() + "more\n")
    assert "for other flags or changed files" in run(capsys, *argv)[2]
    assert made("--replace") and not made()
    edit(tmp_path / "a/train_00000.bin", 5000, b"\1\1\1")
    assert "or make it again: python prepare.py" in run(capsys, *argv)[2]
    assert made("--replace") and shards.verify(tmp_path / "a") and not made()  # repaired
    assert made("--shard-tokens", 5000, "--replace") and (tmp_path / "a/train_00001.bin").exists()
    assert made("--replace") and not (tmp_path / "a/train_00001.bin").exists(), "no stale shard stays"
    assert run(capsys, *argv, "--verify")[:2] == (0, f"{tmp_path}/a: 3 files have their sha256\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a", "a.old", "a.old.1", "a.old.2", "a.old.3", "mine.txt"]


def tree(folder):
    return [(p, p.is_file() and p.read_bytes()) for p in sorted(folder.rglob("*"))]


def test_a_failure_leaves_the_old_data(tmp_path, texts, capsys, monkeypatch):
    argv = [texts[0], "--name", "a", "--out", tmp_path, "--tokenizer", "char"]
    assert run(capsys, *argv)[0] == 0
    before = tree(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_shards", full)
    code, _, err = run(capsys, *argv, "--val-fraction", 0.3, "--replace")
    assert code == 2 and "No space left" in err and err.count("\n") == 1 and tree(tmp_path) == before


@pytest.mark.parametrize("what,words", [
    ("another data set", "x is there, made by: python prepare.py"), ("a damaged meta.json", "no sound JSON"),
    ("a folder", "x is there, and is no data set"), ("a file", "x is there, and is no data set"),
    ("x.tmp", "x.tmp is there: another command writes it, or one was killed")])
def test_nothing_is_replaced_unasked(what, words, tmp_path, texts, capsys):
    argv = [texts[0], "--name", "x", "--out", tmp_path, "--tokenizer", "char"]
    if what in ("another data set", "a damaged meta.json"):
        assert run(capsys, *argv)[0] == 0
        if what == "a damaged meta.json":
            os.truncate(tmp_path / "x/meta.json", 50)
    elif what == "a file":
        (tmp_path / "x").write_text("mine")
    else:
        folder = tmp_path / ("x.tmp" if what == "x.tmp" else "x")
        folder.mkdir()
        (folder / "train_00000.bin").write_text("mine")
    before = tree(tmp_path)
    code, out, err = run(capsys, *argv, "--val-fraction", 0.3)
    assert code == 2 and err.count("\n") == 1 and words in err, err
    assert out == "" and tree(tmp_path) == before


def test_the_old_data_set_stays_when_it_is_replaced(tmp_path, texts, capsys):
    (tmp_path / "disk").mkdir()
    (tmp_path / "x").symlink_to("disk/x")
    argv = [texts[0], "--name", "x", "--out", tmp_path, "--tokenizer", "char"]
    assert run(capsys, *argv)[0] == 0
    (tmp_path / "x/notes.txt").write_text("mine")
    before = [content for _, content in tree(tmp_path / "disk/x")]
    assert run(capsys, *argv, "--val-fraction", 0.3, "--replace")[0] == 0 and (tmp_path / "x").is_symlink()
    assert [content for _, content in tree(tmp_path / "disk/x.old")] == before
    assert "--replace" not in shards.load_meta(tmp_path / "x")["command"]


def test_stdlib_sources_and_undecodable_files(tmp_path, capsys, monkeypatch):
    flags = prepare.parse(["stdlib"])
    lib = tmp_path / "lib"
    names = ("b.py", "a/z.py", "a.py", "a/tests/t.py", "test/u.py", "site-packages/s.py", "x.txt",
             "encodings/cp037.py", "encodings.py")
    for k, name in enumerate(names):
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / name).write_text(make_text(3000, k))
    (lib / "test/latin.py").write_bytes(b"# caf\xe9\n")
    (lib / "empty.py").write_text("")
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda name: str(lib))
    found = prepare.list_files(flags.sources, flags)
    assert [Path(file.path).relative_to(lib).as_posix() for file in found] == [
        "a.py", "a/z.py", "b.py", "empty.py", "encodings.py"]
    argv = ["stdlib", "--out", tmp_path, "--vocab-size", 300, "--val-fraction", 0.5, "--with-tests"]
    code, out, err = run(capsys, *argv)
    assert code == 0 and "latin.py is not utf-8 at byte 5: it is left out" in err, err
    meta = shards.load_meta(tmp_path / "stdlib")
    assert sum(meta["documents"].values()) == 6, "one document a file, none for the empty and the skipped"

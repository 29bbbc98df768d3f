"""Blends: shares, order, errors, and a run on a blend that is stopped and resumed."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from runs import go, rows, same
from test_data import make_text, refused

import prepare
from corpus import samples, shards


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three data sets of different size and text, with one tokenizer; "other" has its own."""
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
        given = np.cumsum(samples.sample_schedule(w)[:, None] == np.arange(k), 0)
        off = given - np.arange(1, w.sum() + 1)[:, None] * w / w.sum()
        assert np.abs(off).max() < 1 and (given[-1] == w).all()
    pinned = [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert samples.sample_schedule([7, 3]).tolist() == pinned, "resumed runs rely on it"


def test_sample_i_is_a_pure_function_of_seed_and_i(folders):
    spec = f"{folders}/a:0.5,{folders}/b:0.3,{folders}/c:0.2"
    ds = samples.open_tokens(spec, "train", 16, seed=3)
    alone = [samples.Tokens(folders / name, "train", 16, seed=3) for name in "abc"]
    n = 50 * max(one.n_samples for one in alone)  # each begins another epoch
    which, number = ds.locate(np.arange(n))
    assert Counter(which.tolist()) == {0: n // 10 * 5, 1: n // 10 * 3, 2: n // 10 * 2}
    for d in range(3):  # sample j that it gives is its sample j alone
        assert np.array_equal(number[which == d], np.arange((which == d).sum()))
    x, y = ds.batch(0, 40)
    for i in range(40):
        one = alone[which[i]].batch(int(number[i]), 1)
        assert torch.equal(x[i], one[0][0]) and torch.equal(y[i], one[1][0])
    for first, count in ((37, 1), (n - 9, 9), (1, 2), (3, 30)):  # backwards too: there is no state
        x = ds.batch(first, count)[0]
        assert ds.n_targets(first, count) == x.numel()
        ones = [ds.batch(first + k, 1)[0] for k in range(count)]
        assert x.shape == (count, 16) and torch.equal(x, torch.cat(ones))
    assert not torch.equal(samples.open_tokens(spec, "train", 16, seed=4).batch(0, 40)[0], ds.batch(0, 40)[0])
    # n_samples: until the first one begins its second epoch
    counts = [Counter(which[: ds.n_samples].tolist())[d] / one.n_samples for d, one in enumerate(alone)]
    assert 0.97 < max(counts) <= 1.03


def test_blend_of_one_is_that_data_set(folders):
    for spec in (f"{folders}/a", f"{folders}/a:1"):
        ds, alone = samples.open_tokens(spec, "val", 16, 5), samples.Tokens(folders / "a", "val", 16, 5)
        assert type(ds) is samples.Tokens and torch.equal(ds.batch(3, 9)[0], alone.batch(3, 9)[0])
    meta = shards.load_meta(folders / "a")
    want = " ".join(s["sha256"][:16] for split in meta["shards"].values() for s in split)
    assert samples.load_blend_meta(f"{folders}/a")["identity"] == want, "checkpoints know their data by it"
    assert samples.first_folder(f"{folders}/a:1") == f"{folders}/a"
    assert samples.parse_blend("data/x") == [("data/x", None)]


def test_without_weights_shares_follow_the_tokens(folders):
    spec = f"{folders}/a,{folders}/b"
    tokens = [shards.load_meta(folders / name)["tokens"]["train"] for name in "ab"]
    counts = samples.open_tokens(spec, "train", 16).per_period
    assert abs(counts[0] / sum(counts) - tokens[0] / sum(tokens)) < 1e-3
    identity = {samples.load_blend_meta(f"{folders}/a:{w},{folders}/b:1")["identity"] for w in (1, 2, "0.5")}
    assert len(identity | {samples.load_blend_meta(spec)["identity"]}) == 4, "other weights are other data"


@pytest.mark.parametrize("spec, say", [
    ("{0}/a:0.7,{0}/other:0.3", ["different tokenizers", "--tokenizer {0}/a"]),
    ("{0}/a:0.7,{0}/b", ["or none"]), ("{0}/a:x,{0}/b:1", ["above 0"]), ("{0}/a:1/0,{0}/b:1", ["above 0"]),
    ("{0}/a:0,{0}/b:1", ["above 0"]), ("{0}/a:1,:1", ["A:0.7,B:0.3"]), ("{0}/a:1,{0}/a:2", ["twice"]),
    ("{0}/a:0.12345678,{0}/b:1", ["round them"]), ("{0}/a:1,{0}/none:1", ["no prepared data"])])
def test_wrong_blends_are_refused(spec, say, folders):
    say = [s.format(folders) for s in say]
    refused((ValueError, OSError), lambda: samples.load_blend_meta(spec.format(folders)), *say)


def test_train_and_val_of_two_data_sets_must_not_be_equal(folders, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for path in (folders / name).glob("*.*"):
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    meta = json.loads((tmp_path / "b/meta.json").read_text())
    meta["shards"]["val"] = shards.load_meta(folders / "a")["shards"]["train"]
    (tmp_path / "b/meta.json").write_text(json.dumps(meta))
    spec = f"{tmp_path}/a:1,{tmp_path}/b:1"
    refused(ValueError, lambda: samples.load_blend_meta(spec), "equal sha256", "leave one out")


def test_training_on_a_blend_stopped_and_resumed(folders, tmp_path):
    """On 1 rank, on 2, and stopped between: the same samples; other weights are refused by a checkpoint."""
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

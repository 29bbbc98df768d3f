"""Masks of tokens. --objective mlm: its masks, its head, runs, --fill; test_export.py has MegatronBert.
--doc-mask: a token attends to its own document alone; the oracle is each document alone through the model.

test_layouts.py has the layouts of both, test_model.py compares BERT with the model that is written out.
"""
import contextlib
import dataclasses
import io
import json

import numpy as np
import plain_model
import pytest
import torch
import torch.nn.functional as F
from faults import with_faults
from pool import run_ranks
from runs import assert_refused, chars, final, go, model_of, refused, rows, session
from safetensors.torch import load_file
from shared import Documents
from test_layouts import flags_of
from test_model import MESH, randomize

import plan
import prepare
import sample
import train
from config import Config
from corpus import samples, shards, tokenizer
from corpus.masked import Masked
from corpus.samples import Synthetic, document_places, open_data
from model import GPT
from ops.cross_entropy import IGNORE
from runtime import init_from
from runtime.launch import World

T = 128

# -----------------------------------------------------------------------------
# BERT's masks

def test_masks_are_berts():
    for words in (1000, 7):
        source, n = Masked(Synthetic(words, T, 1), 1), 2000 * 19  # round(0.15 * 128)
        (x, y), before = source.batch(5, 2000), Synthetic(words, T, 1).batch(5, 2000)[0]
        chosen = y != IGNORE
        assert source.mask_token == words and source.n_targets(5, 2000) == n
        assert (chosen.sum(1) == 19).all(), "19 of 128 in each sequence"
        assert torch.equal(y[chosen], before[chosen]) and torch.equal(x[~chosen], before[~chosen])
        new, old = x[chosen], before[chosen]
        changed = new[(new != words) & (new != old)]
        assert ((new >= 0) & (new <= words)).all()
        # Of the random replacements, one in `words` is the old token again
        shares = {0.8: (new == words).sum(), 0.1 * (1 - 1 / words): changed.numel(),
                  0.1 * (1 + 1 / words): (new == old).sum()}
        for share, count in shares.items():
            assert abs(count - n * share) < 3 * (n * share * (1 - share)) ** 0.5, (words, count, n * share)
        # All positions of a sequence are equally likely, and so are all tokens as replacements
        counts = torch.bincount(changed, minlength=words).double()
        assert (chosen.sum(0) - n / T).abs().max() < 4.5 * (n / T) ** 0.5
        assert (counts - counts.mean()).abs().max() < 5 * counts.mean() ** 0.5


def test_a_sample_has_the_same_masks_in_every_batch():
    """Masks are a function of the seed and the sample's number, and of nothing else."""
    source = Masked(Synthetic(1000, T, 1), 1)
    x, y = source.batch(0, 64)
    for first, n in (0, 1), (3, 5), (63, 1):
        for whole, part in zip((x, y), source.batch(first, n), strict=True):
            assert torch.equal(whole[first:first + n], part)
    places = {tuple(row.nonzero().flatten().tolist()) for row in y != IGNORE}
    assert len(places) == 64  # no two sequences are masked alike
    assert not torch.equal(Masked(Synthetic(1000, T, 1), 2).batch(0, 64)[1] != IGNORE, y != IGNORE)


def test_the_masks_of_a_sample_are_those_of_every_version():
    """A run that is resumed by a later version goes on with the same masks."""
    x, y = Masked(Synthetic(50, 20, 1337), 1337).batch(7, 2)
    places = (y != IGNORE).nonzero().tolist()
    assert [(i, j, int(y[i, j]), int(x[i, j])) for i, j in places] == [
        (0, 1, 49, 49), (0, 3, 12, 50), (0, 10, 39, 39), (1, 4, 11, 50), (1, 6, 17, 50), (1, 15, 44, 33)]


# -----------------------------------------------------------------------------
# Runs of a masked language model

BASE = ["--objective=mlm", "--n-layer=2", "--n-embd=16", "--n-head=2", "--n-kv-head=2", "--ffn-hidden=32",
        "--seq-len=16", "--norm=layer", "--mlp=gelu", "--pos=learned", "--bias", "--tied", "--dtype=fp64",
        "--micro-batch=2", "--global-batch=4", "--lr=1e-2", "--warmup=2", "--log-every=1", "--eval-every=3",
        "--eval-iters=2", "--save-every=3", "--keep=0", "--steps=6", "--decay-steps=6", "--no-plot"]


@pytest.fixture(scope="module")
def mlm(tmp_path_factory):
    """Return the folder of a run of one process on characters. Its parent has dump.safetensors and data."""
    folder = tmp_path_factory.mktemp("bert")
    go(1, folder / "run", f"--data={chars(folder)}", f"--dump-grads={folder / 'dump.safetensors'}", base=BASE)
    return folder / "run"


def check_first_step(run):
    """AssertionError unless the first step's loss and gradients are plain code's of the samples' masks."""
    cfg, vocab, *_ = sample.read_run(run)
    train_data, _, vocab_size, _ = open_data(cfg)
    dump = load_file(run.parent / "dump.safetensors")
    w = {k: v.clone().requires_grad_() for k, v in dump.items() if not k.startswith("grad/")}
    assert vocab == vocab_size == train_data.mask_token + 1 and w["mlm.bias"].shape == (vocab,)
    loss, total = plain_model.total_loss(cfg, w, vocab, [train_data.batch(i, 2) for i in (0, 2)])
    total.backward()
    np.testing.assert_allclose(rows(run)[0]["loss"], loss.item(), rtol=1e-12)
    for name, p in w.items():
        torch.testing.assert_close(dump[f"grad/{name}"], p.grad, rtol=0, atol=1e-10, msg=name)


def every_token(original, masked, first, n):
    return n * masked.seq_len


def test_the_loss_is_the_mean_over_the_masked_tokens(mlm, tmp_path):
    """And the validation loss is that of the checkpoint."""
    check_first_step(mlm)
    fault = "corpus.masked.Masked.n_targets", every_token
    argv = [*BASE, f"--data={mlm.parent / 'toy'}", f"--out={tmp_path / 'run'}", "--steps=1",
            f"--dump-grads={tmp_path / 'dump.safetensors'}"]
    run_ranks(1, with_faults, [fault], session, argv)
    with pytest.raises(AssertionError):
        check_first_step(tmp_path / "run")
    cfg, vocab, *_ = sample.read_run(mlm)
    _, val_data, _, _ = open_data(cfg)
    seen = {row["step"]: row["val_loss"] for row in rows(mlm) if "val_loss" in row}
    for step in (3, 6):
        with torch.no_grad():
            want, _ = plain_model.total_loss(cfg, final(mlm, step)[0], vocab, [val_data.batch(0, 8)])
        assert seen[step] == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.parametrize("layout", [["--tp=2"], ["--pp=2", "--zero=1"]], ids=str)
def test_a_checkpoint_goes_on_in_any_layout(mlm, tmp_path, layout):
    """... and its own goes on in one process."""
    data = f"--data={mlm.parent / 'toy'}"
    go(2, tmp_path / "other", data, f"--resume={mlm}/step_000003", *layout, "--steps=5", "--save-every=5",
       base=BASE)
    go(1, tmp_path / "last", data, f"--resume={tmp_path}/other/step_000005", base=BASE)
    want, got = final(mlm, 6)[0], final(tmp_path / "last", 6)[0]
    for name in want.keys() - {f"{k}blocks.{i}.attn.wk.bias" for i in (0, 1)  # rounding errors only
                               for k in ("", "exp_avg/", "exp_avg_sq/")}:
        torch.testing.assert_close(got[name], want[name], rtol=1e-8, atol=1e-11, msg=name)
    losses = [rows(out)[-1]["val_loss"] for out in (mlm, tmp_path / "last")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_what_no_run_can_have_is_refused(mlm, tmp_path):
    argv = [*BASE, f"--data={mlm.parent / 'toy'}", f"--out={tmp_path / 'new'}"]
    for flags, *words in [
            (["--prompt=a"], "--prompt"), (["--vocab-size=1"], "symbols"),
            (["--vocab-size=200", f"--init-from={mlm}"], "a vocabulary of"),
            (["--objective=causal", f"--resume={mlm}/step_000003"], "--objective mlm")]:
        assert_refused(session(World(), [*argv, *flags]), *words)


def test_fill_prints_the_likeliest_tokens(mlm, capsys):
    sample.main([str(mlm), "--fill", "be[MASK]d f[MASK]ce"])
    text, *gaps = capsys.readouterr().out.splitlines()
    model = model_of(mlm)
    words, mask = tokenizer.load(mlm), json.loads((mlm / "config.json").read_text())["mask_token"]
    ids = torch.tensor([[*words.encode("be"), mask, *words.encode("d f"), mask, *words.encode("ce")]])
    with torch.no_grad():
        named = dict(model.named_parameters())
        p = plain_model.forward(model.cfg, named, model.vocab_size, ids)[0][0].softmax(1)
    want, filled = [], ids[0].clone()
    for number, at in enumerate((2, 6), 1):
        best = p[at, :mask].argsort(descending=True)[:5].tolist()
        filled[at] = best[0]
        likeliest = (f"{words.decode([i])!r} {100 * p[at, i]:.1f} %" for i in best)
        want.append(f"[MASK] {number}: {', '.join(likeliest)}")
    assert gaps == want and text == words.decode(filled.tolist())
    for argv, word in (([], "--fill"), (["--fill", "ab"], "[MASK]"), (["--fill", "[MASK]" * 17], "17 tokens"),
                       (["--fill", "[MASK]Q"], "'Q'")):
        refused(sample.main, [mlm, *argv], word)


def test_a_plan_counts_the_symbol_of_the_mask():
    assert plan.vocabulary(Config(data="synthetic")) == 256
    assert plan.vocabulary(Config(data="synthetic", objective="mlm")) == 257


# -----------------------------------------------------------------------------
# Each document alone

def documents_of(row, eod=0):
    firsts = sorted({0, *(i for i, token in enumerate(row) if token == eod)})
    return list(zip(firsts, [*firsts[1:], len(row)], strict=True))


def alone(model, x, first, end):
    """Return the logits (end - first, V) of a document, through the model without anything around it.

    x (T,). Learned positions go on from the window's start, so the document meets the rows of its place.
    """
    weights = {}
    if model.wpe is not None:
        weights["wpe.weight"] = model.wpe.weight.roll(-first, 0)
    logits, _ = torch.func.functional_call(model, weights, (x[None, first:end],))
    return logits


def check_against_documents_alone(family, **flags):
    """The loss of every token and every gradient, to 1e-10."""
    cfg = Config(**dict(flags_of(family), seq_len=24, **flags))
    model = GPT(cfg, MESH, cfg.vocab_size).double()
    randomize(model)
    source = Documents(cfg.vocab_size, cfg.seq_len, 1)
    x, y, places = source.batch(0, 3)
    parts = [(row, *span) for row in x for span in documents_of(row.tolist())]
    lengths = [end - first for _, first, end in parts]
    assert len(parts) > 12 and max(lengths) > 4 and min(lengths) == 1

    def losses_and_gradients(logits):
        losses = F.cross_entropy(logits, y.flatten(), reduction="none")
        grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
        return losses.detach(), grads

    together = losses_and_gradients(model(x, None, places)[0])
    each = losses_and_gradients(torch.cat([alone(model, *part) for part in parts]))
    torch.testing.assert_close(together[0], each[0], rtol=0, atol=1e-10)
    for name, got, want in zip(dict(model.named_parameters()), together[1], each[1], strict=True):
        largest = max(want.abs().max().item(), 1e-4)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10 * largest, msg=name)
    unmasked = F.cross_entropy(model(x)[0], y.flatten(), reduction="none").detach()
    assert (together[0] - unmasked).abs().max() > 0.01, "without the mask the losses are others"


@pytest.mark.parametrize("family,flags", [
    ("gpt2-documents", {}), ("windows-documents", {}),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("llama-documents", {}), ("nanochat-documents", {}), ("experts-documents", {}),
        ("llama-documents", dict(recompute="full")), ("llama-documents", dict(recompute="selective"))))],
    ids=str)
def test_a_window_of_documents_is_each_document_alone(family, flags):
    check_against_documents_alone(family, **flags)


# Data sets

WIDTH = 96  # of a window: it has room for several conversations
TINY = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_hidden=32, seq_len=WIDTH, dtype="fp64",
            micro_batch=2, eval_iters=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with the data sets text, chat, and characters, which has no <|endoftext|>."""
    folder = tmp_path_factory.mktemp("documents")
    texts = [f"{a} + {a}? It is {a + a}." for a in range(300)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    lines = []
    for text in texts[:200]:
        question, answer = text.split("? ")
        lines.append(json.dumps({"messages": [{"role": "user", "content": question + "?"},
                                              {"role": "assistant", "content": answer}]}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    common = ["--out", str(folder)]
    for argv in (["text.jsonl", "--name=text", "--vocab-size=300"],
                 ["text.jsonl", "--name=characters", "--tokenizer=char"],
                 ["chat", "chat.jsonl", "--name=chat", f"--tokenizer={folder}/text", f"--seq-len={WIDTH}"],
                 ["text.jsonl", "--name=more", f"--tokenizer={folder}/chat", "--val-fraction=0.2"]):
        argv = [str(folder / word) if word.endswith(".jsonl") else word for word in argv]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert not prepare.main([*argv, *common])
    return folder


def opened(folder, names, doc_mask="auto"):
    return samples.Blend(",".join(f"{folder / name}:1" for name in names), "train", WIDTH, 3, doc_mask)


def test_conversations_have_documents_and_text_has_on_demand(data, tmp_path):
    for name, doc_mask, has_documents in [
            ("chat", "auto", True), ("chat", "off", False), ("chat", "on", True), ("text", "auto", False),
            ("text", "on", True), ("characters", "auto", False)]:
        assert opened(data, [name], doc_mask).has_documents == has_documents
    for name in ("synthetic", f"{data}/characters"):
        said = session(World(), [f"--data={name}", "--doc-mask=on", f"--out={tmp_path}/x"])
        assert_refused(said, "--doc-mask on", "leave")
    eod = shards.load_meta(data / "chat")["eod"]
    source = opened(data, ["chat"])
    x, _, places = source.batch(0, 8)
    for row, found in zip(x.tolist(), places.tolist(), strict=True):
        assert row[0] == eod and row.count(eod) > 2, "several conversations in a window"
        expected = [place for first, end in documents_of(row, eod) for place in range(1, end - first + 1)]
        for i in range(1, len(row)):
            if row[i] == row[i - 1] == source.parts[0].end:
                expected[i] = 0  # padding
        assert found == expected


def test_a_blend_separates_the_documents_of_its_conversations_alone(data):
    source = opened(data, ["chat", "more"])
    assert source.has_documents
    x, y, places = source.batch(5, 24)
    whole = [*range(1, WIDTH + 1)]
    for row, targets, found in zip(x.tolist(), y.tolist(), places.tolist(), strict=True):
        is_chat = IGNORE in targets
        assert (found == whole) != is_chat and row.count(source.parts[0].eod) > 2
    everywhere = opened(data, ["chat", "more"], "on")
    _, _, places = everywhere.batch(5, 24)
    expected = document_places(x, source.parts[0].eod)
    assert torch.equal(places, expected.masked_fill(places == 0, 0)) and (places > 0).float().mean() > 0.5


def test_steps_and_evaluations_see_each_conversation_alone(data):
    cfg = Config(**TINY, data=str(data / "chat"))
    source, val, vocab_size, _ = open_data(cfg)
    model, data_parallel, opt = train.build(cfg, MESH, vocab_size, CPU)
    randomize(model)

    def loop(source, n):
        total, count = 0.0, 0
        for x, y, _ in zip(*source.batch(0, n), strict=True):
            for first, end in documents_of(x.tolist(), source.parts[0].eod):
                total += model(x[None, first:end], y[None, first:end])[0].item()
                count += (y[first:end] != IGNORE).sum().item()
        return total / count

    with torch.no_grad():
        want = loop(source, 6)
        n = 2 * min(cfg.eval_iters, val.n_samples // 2)
        assert train.evaluate(cfg, model, val, 2, CPU) == pytest.approx(loop(val, n), rel=1e-12)
    batches = train.corrupt_targets(train.micro_batches(cfg, MESH, source, 0, 6, CPU))
    assert [len(batch) for batch in batches] == [3, 3, 3], "a spike keeps the documents"
    batches = train.micro_batches(cfg, MESH, source, 0, 6, CPU)
    step = train.Step(cfg, model, data_parallel, opt)
    stats, _ = step(batches, 1, n_trained=train.trained_tokens(source, 0, 6, CPU))
    assert stats.loss.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name,there,here,is_refused", [
    ("chat", None, "auto", True),  # a checkpoint from before the flag
    ("chat", None, "off", False), ("text", None, "auto", True), ("text", None, "on", True),
    ("chat", "auto", "on", True), ("chat", "auto", "off", True), ("chat", "auto", "auto", False),
    ("chat,more", None, "auto", True), ("chat,more", "auto", "auto", False)])
def test_a_resume_goes_on_with_the_same_attention(name, there, here, is_refused, data):
    """With None the checkpoint does not name the flag."""
    spec = ",".join(str(data / part) for part in name.split(","))
    cfg = Config(**TINY, data=spec, doc_mask=here)
    before = dataclasses.asdict(cfg)
    before["doc_mask"] = there
    if there is None:
        del before["doc_mask"]
    meta = {"shape": {}, "flags": before, "seed": cfg.seed, "world": 1, "data": "hash"}
    compared = (cfg, "step_1", json.loads(json.dumps(meta)), 1, "hash", 300)
    if not is_refused:
        assert init_from.changed_flags(*compared) == {}
        return
    with pytest.raises(ValueError, match="--resume-changed doc-mask"):
        init_from.changed_flags(*compared)
    compared = (dataclasses.replace(cfg, resume_changed="doc-mask"), *compared[1:])
    assert list(init_from.changed_flags(*compared)) == ["doc_mask"]

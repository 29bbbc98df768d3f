"""The masked language model: its masks, head, transformers' MegatronBert, runs, --fill.

The layouts are in test_layouts.py; faults that only one process's comparison with plain code shows are here.
"""
import json
import shutil

import numpy as np
import plain_model
import pytest
import torch
import torch.nn.functional as F
from faults import planted, with_faults
from pool import run_ranks
from runs import assert_refused, chars, final, go, rows, same, session
from safetensors.torch import load_file
from shared import one_process_model
from test_layouts import BERT

import plan
import prepare
import sample
from config import Config
from corpus import tokenizer
from corpus.masked import Masked
from corpus.samples import Synthetic, open_data, trained_tokens
from ops.cross_entropy import IGNORE, LinearCrossEntropy
from runtime.launch import World

T = 128


# -----------------------------------------------------------------------------
# Masks

def check_masks():
    """AssertionError unless 2,000 sequences have the masks that BERT's have."""
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


def test_masks_are_berts():
    check_masks()


def check_samples():
    """AssertionError unless masks are a function of the seed and the sample's number, and of nothing else."""
    source = Masked(Synthetic(1000, T, 1), 1)
    x, y = source.batch(0, 64)
    for first, n in (0, 1), (3, 5), (63, 1):
        for whole, part in zip((x, y), source.batch(first, n), strict=True):
            assert torch.equal(whole[first:first + n], part)
    places = {tuple(row.nonzero().flatten().tolist()) for row in y != IGNORE}
    assert len(places) == 64  # no two sequences are masked alike
    assert not torch.equal(Masked(Synthetic(1000, T, 1), 2).batch(0, 64)[1] != IGNORE, y != IGNORE)


def test_a_sample_has_the_same_masks_in_every_batch():
    check_samples()


def test_the_masks_of_a_sample_are_those_of_every_version():
    """A run that is resumed by a later version goes on with the same masks."""
    x, y = Masked(Synthetic(50, 20, 1337), 1337).batch(7, 2)
    places = (y != IGNORE).nonzero().tolist()
    assert [(i, j, int(y[i, j]), int(x[i, j])) for i, j in places] == [
        (0, 1, 49, 49), (0, 3, 12, 50), (0, 10, 39, 39), (1, 4, 11, 50), (1, 6, 17, 50), (1, 15, 44, 33)]


# -----------------------------------------------------------------------------
# The model

def make_model(**flags):
    """Return (Config, model, x, y): fp64, no weight zero or one."""
    cfg = Config(**{**BERT, "n_layer": 3, "n_embd": 32, "vocab_size": 99, **flags})
    torch.manual_seed(1)
    model = one_process_model(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p[:p.used] += 0.1 * torch.randn_like(p[:p.used])
    return cfg, model, *Masked(Synthetic(98, cfg.seq_len, 1), 1).batch(0, 4)


def gradients(model, x, y):
    """Return the mean loss of the masked tokens, {name: gradient}."""
    model.zero_grad()
    loss = model(x, y)[0] / (y >= 0).sum()
    loss.backward()
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                         for n, p in model.named_parameters()}


LIKE_LLAMA = dict(norm="rms", mlp="swiglu", pos="rope")


def check_against_plain_code(**flags):
    cfg, model, x, y = make_model(**flags)
    loss, grads = gradients(model, x, y)
    w = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    want, total = plain_model.total_loss(cfg, w, 99, [(x, y)])
    total.backward()
    np.testing.assert_allclose(loss, want.item(), rtol=1e-12)
    for name, p in w.items():
        torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("flags", [{}, dict(tied=False, bias=False), LIKE_LLAMA],
                         ids=["bert", "untied", "llama"])
def test_loss_and_gradients_are_plain_codes(flags):
    check_against_plain_code(**flags)


# Our names, and those of MegatronBertForMaskedLM in transformers. A block's names begin with blocks.i here,
# and with bert.encoder.layer.i there.
NAMES = {"wte": "bert.embeddings.word_embeddings", "wpe": "bert.embeddings.position_embeddings",
         "norm": "bert.encoder.ln", "mlm.dense": "cls.predictions.transform.dense",
         "mlm.norm": "cls.predictions.transform.LayerNorm", "mlm": "cls.predictions"}
BLOCK = {"norm1": "attention.ln", "attn.wq": "attention.self.query", "attn.wk": "attention.self.key",
         "attn.wv": "attention.self.value", "attn.wo": "attention.output.dense", "norm2": "ln",
         "mlp.w1": "intermediate.dense", "mlp.w2": "output.dense"}


def theirs(name):
    module, kind = name.rsplit(".", 1)
    if not module.startswith("blocks"):
        return f"{NAMES[module]}.{kind}"
    _, number, part = module.split(".", 2)
    return f"bert.encoder.layer.{number}.{BLOCK[part]}.{kind}"


def test_hidden_states_loss_and_gradients_are_transformers():
    transformers = pytest.importorskip("transformers", reason="pip install transformers: it is the oracle")
    cfg, model, x, y = make_model()
    bert = transformers.MegatronBertForMaskedLM(transformers.MegatronBertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
        hidden_act="gelu_pytorch_tanh", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=cfg.seq_len, layer_norm_eps=1e-5, pad_token_id=None,
        tie_word_embeddings=True)).double()
    named = dict(bert.named_parameters())
    with torch.no_grad():
        named["bert.embeddings.token_type_embeddings.weight"].zero_()
        for name, p in model.named_parameters():
            named[theirs(name)].copy_(p)
        named["cls.predictions.bias"][99:] = -1e9  # our padding takes no probability
    hidden = {}
    for module in (model.blocks["0"], model.blocks["1"], model.norm):
        module.register_forward_hook(
            lambda module, _, out: hidden.update({module: out[0] if isinstance(out, tuple) else out}))
    loss, grads = gradients(model, x, y)
    out = bert(input_ids=x, labels=y, output_hidden_states=True)
    out.loss.backward()
    # The other model returns the embedding and each block's output, the last one after the final norm
    for got, want in zip(hidden.values(), out.hidden_states[1:], strict=True):
        torch.testing.assert_close(got, want.flatten(0, 1), rtol=0, atol=1e-10)
    np.testing.assert_allclose(loss, out.loss.item(), rtol=1e-12)
    unused = set(named) - {theirs(n) for n in grads}
    assert unused == {"bert.embeddings.token_type_embeddings.weight"}, unused
    for name, grad in grads.items():
        used = model.get_parameter(name).used
        torch.testing.assert_close(grad[:used], named[theirs(name)].grad[:used], rtol=0, atol=1e-10, msg=name)


def test_a_target_that_is_not_masked_changes_nothing():
    _, model, x, y = make_model()
    loss, grads = gradients(model, x, y)
    again, others = gradients(model, x, torch.where(y < 0, -7, y))
    assert loss == again and all(torch.equal(grads[n], others[n]) for n in grads)


def test_attention_looks_both_ways():
    _, model, x, _ = make_model()
    with torch.no_grad():
        before = model(x)[0].view(4, -1, 128)
        after = model(torch.cat([x[:, :-1], (x[:, -1:] + 1) % 98], 1))[0].view(4, -1, 128)
    assert ((before - after).abs().amax(2) > 1e-6).all()


def test_the_fused_head_adds_the_bias():
    """ops.cross_entropy.LinearCrossEntropy, which a GPU runs, in torch: loss and gradients as of autograd."""
    torch.manual_seed(1)
    x, w, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True)
                  for shape in ((6, 8), (128, 8), (128,)))
    target = torch.randint(99, (6,))
    want = F.cross_entropy(F.linear(x, w, bias)[:, :99], target, reduction="sum")
    got = LinearCrossEntropy.apply(x, w, target, 99, bias)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for a, b in zip(torch.autograd.grad(2 * got, (x, w, bias)), torch.autograd.grad(2 * want, (x, w, bias)),
                    strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# -----------------------------------------------------------------------------
# Planted faults

def draws_of_first(original, masked, first, n):
    """Masked.draw that counts samples from the start of the batch."""
    return original(masked, 0, n)


def every_token(original, masked, first, n):
    """Masked.n_targets that counts all tokens."""
    return n * masked.seq_len


def test_masks_drawn_from_the_place_in_the_batch_are_caught():
    with planted("corpus.masked.Masked.draw", draws_of_first), pytest.raises(AssertionError):
        check_samples()


# -----------------------------------------------------------------------------
# Runs of train.py

BASE = ["--objective=mlm", "--n-layer=2", "--n-embd=16", "--n-head=2", "--n-kv-head=2", "--ffn-hidden=32",
        "--seq-len=16", "--norm=layer", "--mlp=gelu", "--pos=learned", "--bias", "--tied", "--dtype=fp64",
        "--micro-batch=2", "--global-batch=4", "--lr=1e-2", "--warmup=2", "--log-every=1", "--eval-every=3",
        "--eval-iters=2", "--save-every=3", "--keep=0", "--steps=6", "--decay-steps=6", "--no-plot"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
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


def test_the_loss_is_the_mean_over_the_masked_tokens(run, tmp_path):
    check_first_step(run)
    fault = "corpus.masked.Masked.n_targets", every_token
    argv = [*BASE, f"--data={run.parent / 'toy'}", f"--out={tmp_path / 'run'}", "--steps=1",
            f"--dump-grads={tmp_path / 'dump.safetensors'}"]
    run_ranks(1, with_faults, [fault], session, argv)
    with pytest.raises(AssertionError):
        check_first_step(tmp_path / "run")


def test_the_validation_loss_is_that_of_the_checkpoint(run):
    cfg, vocab, *_ = sample.read_run(run)
    _, val_data, _, _ = open_data(cfg)
    seen = {row["step"]: row["val_loss"] for row in rows(run) if "val_loss" in row}
    for step in (3, 6):
        with torch.no_grad():
            want, _ = plain_model.total_loss(cfg, final(run, step)[0], vocab, [val_data.batch(0, 8)])
        assert seen[step] == pytest.approx(want.item(), rel=1e-12)


def test_a_resumed_run_has_the_same_bits(run, tmp_path):
    data = f"--data={run.parent / 'toy'}"
    go(1, tmp_path / "again", data, f"--resume={run}/step_000003", base=BASE)
    same(run, tmp_path / "again", 6)


@pytest.mark.parametrize("n,layout", [(2, ["--tp=2"]), (2, ["--pp=2", "--zero=1"]), (2, ["--cp=2"])],
                         ids=["tp", "pp-zero1", "cp"])
def test_a_checkpoint_goes_on_in_any_layout(run, tmp_path, n, layout):
    """... and its own goes on in one process."""
    data = f"--data={run.parent / 'toy'}"
    go(n, tmp_path / "other", data, f"--resume={run}/step_000003", *layout, "--steps=5", "--save-every=5",
       base=BASE)
    go(1, tmp_path / "last", data, f"--resume={tmp_path}/other/step_000005", base=BASE)
    want, got = final(run, 6)[0], final(tmp_path / "last", 6)[0]
    for name in want.keys() - {f"{k}blocks.{i}.attn.wk.bias" for i in (0, 1)  # rounding errors only
                               for k in ("", "exp_avg/", "exp_avg_sq/")}:
        torch.testing.assert_close(got[name], want[name], rtol=1e-8, atol=1e-11, msg=name)
    losses = [rows(out)[-1]["val_loss"] for out in (run, tmp_path / "last")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_what_no_run_can_have_is_refused(run, tmp_path):
    data = f"--data={run.parent / 'toy'}"
    for flags, *words in [
            (["--prompt=a"], "--prompt", "mlm", "--fill"),
            (["--seq-len=3"], "--seq-len 3", "no token"), (["--vocab-size=1"], "--vocab-size 1", "[MASK]"),
            (["--vocab-size=200", f"--init-from={run}"], "a vocabulary of", "the data 200"),
            ([f"--vocab-size={(most := json.loads((run / 'config.json').read_text())['mask_token'])}"],
             f"--vocab-size {most + 1}", "[MASK]"),
            (["--objective=causal", f"--resume={run}/step_000003"], "objective mlm", "--objective mlm")]:
        assert_refused(session(World(), [*BASE, data, f"--out={tmp_path / 'new'}", *flags]), *words)


def test_data_with_more_special_tokens_would_move_mask(run, tmp_path):
    words = tokenizer.load(run).with_special(["<|user|>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(words.spec))
    text = f"{run.parent / 'text.txt'}"
    prepare.main([text, "--name=more", f"--tokenizer={tmp_path}", f"--out={tmp_path}"])
    flags = [*BASE, f"--data={tmp_path / 'more'}", f"--init-from={run}", f"--out={tmp_path / 'new'}"]
    assert_refused(session(World(), flags), "are others than those of the run")
    tokenizer.refuse_other_tokens(run, tmp_path / "more")  # a causal model may have rows for them


# -----------------------------------------------------------------------------
# sample.py --fill

def test_fill_prints_the_likeliest_tokens(run, capsys):
    sample.main([str(run), "--fill", "be[MASK]d f[MASK]ce"])
    text, *gaps = capsys.readouterr().out.splitlines()
    cfg, vocab, weights, _, _ = sample.read_run(run)
    words, mask = tokenizer.load(run), json.loads((run / "config.json").read_text())["mask_token"]
    ids = torch.tensor([[*words.encode("be"), mask, *words.encode("d f"), mask, *words.encode("ce")]])
    named = dict(sample.load_model(cfg, vocab, weights).named_parameters())
    with torch.no_grad():
        p = plain_model.forward(cfg, named, vocab, ids)[0][0].softmax(1)
    want, filled = [], ids[0].clone()
    for number, at in enumerate((2, 6), 1):
        best = p[at, :mask].argsort(descending=True)[:5].tolist()
        filled[at] = best[0]
        likeliest = (f"{words.decode([i])!r} {100 * p[at, i]:.1f} %" for i in best)
        want.append(f"[MASK] {number}: {', '.join(likeliest)}")
    assert gaps == want and text == words.decode(filled.tolist())


def test_a_gap_has_the_space_in_front_of_its_word(run, tmp_path):
    """... of byte pairs, which begin with it; a character is a gap by itself."""
    class Words:
        kind, n_vocab = "bpe", 7

        def encode(self, text):
            return [text]
    (tmp_path / "config.json").write_text('{"mask_token": 7, "vocab_size_used": 8}')
    words, cfg = Words(), Config(seq_len=8)
    assert sample.read_gaps(cfg, words, tmp_path, "a [MASK] b[MASK]") == (["a", 7, " b", 7, ""], 7)
    words.kind = "char"
    assert sample.read_gaps(cfg, words, tmp_path, "a [MASK] b")[0] == ["a ", 7, " b"]


@pytest.mark.parametrize("argv,words", [
    ([], ["mlm", "--fill"]), (["--prompt", "ab"], ["mlm", "--fill"]),
    (["--fill", "[MASK]", "--prompt", "ab"], ["does not read --fill"]), (["--fill", "ab"], ["no [MASK]"]),
    (["--fill", "[MASK]" * 17], ["17 tokens", "16"]), (["--fill", "[MASK]Q"], ["'Q'", "not among"])], ids=str)
def test_fill_refuses(run, argv, words, capsys):
    with pytest.raises(SystemExit) as e:
        sample.main([str(run), *argv])
    assert_refused({"code": e.value.code, "err": capsys.readouterr().err}, *words)


def test_a_causal_model_fills_nothing(run, tmp_path, capsys):
    saved = json.loads((run / "config.json").read_text())
    shutil.copytree(run, tmp_path / "causal")
    (tmp_path / "causal/config.json").write_text(json.dumps({**saved, "objective": "causal"}))
    with pytest.raises(SystemExit) as e:
        sample.main([str(tmp_path / "causal"), "--fill", "[MASK]"])
    assert_refused({"code": e.value.code, "err": capsys.readouterr().err}, "causal", "--prompt")


def test_a_source_that_trains_every_token_has_a_constant_number_of_them():
    """It stands in a recorded CUDA graph; a source with a mask gives a tensor."""
    source = Synthetic(64, 8)
    found = trained_tokens(source, 0, 4, torch.device("cpu"))
    assert type(found) is int and found == 32


def test_a_plan_counts_the_symbol_of_the_mask(monkeypatch):
    assert plan.from_data(Config(data="synthetic"))[1] == 256
    assert plan.from_data(Config(data="synthetic", objective="mlm"))[1] == 257
    monkeypatch.setattr(plan, "load_blend_meta", lambda data: {"vocab_size": 1000})
    monkeypatch.setattr(plan, "settled_doc_mask", lambda data, doc_mask: doc_mask)
    assert plan.from_data(Config(data="x"))[1] == 1000
    assert plan.from_data(Config(data="x", objective="mlm"))[1] == 1001

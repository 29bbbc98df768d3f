"""The masked language model: its masks, head, transformers' MegatronBert, runs, filling, the published table.

The layouts are in test_layouts.py; faults that only one process's comparison with plain code shows are here.
"""
import numpy as np
import plain_model
import pytest
import torch
import torch.nn.functional as F
from test_layouts import BERT

from config import Config
from corpus.masked import Masked
from corpus.shards import Synthetic
from model import GPT, init_weights
from ops.cross_entropy import IGNORE, LinearCrossEntropy
from parallel import make_mesh
from runtime.launch import World

T, VOCAB = 128, 1000


# -----------------------------------------------------------------------------
# masks

def masked(seed=1, seq_len=T):
    source = Synthetic(VOCAB, seq_len, seed)
    return Masked(source, seed), source.batch


def check_masks():
    """AssertionError unless 2,000 sequences have the masks that BERT's have."""
    source, plain = masked()
    (x, y), n, M = source.batch(5, 2000), 2000 * 19, 19  # round(0.15 * 128)
    before, chosen = plain(5, 2000)[0], y != IGNORE
    assert source.mask_token == VOCAB and source.n_targets(5, 2000) == n
    assert (chosen.sum(1) == M).all(), "19 of 128 in each sequence"
    assert torch.equal(y[chosen], before[chosen]) and torch.equal(x[~chosen], before[~chosen])
    new, old = x[chosen], before[chosen]
    other = new[new != VOCAB]
    assert ((new >= 0) & (new <= VOCAB)).all()
    # a random token is the old one once in 1000
    counts = [(new == VOCAB).sum(), (other != old[new != VOCAB]).sum(), (new == old).sum()]
    for count, share in zip(counts, (0.8, 0.1 * (1 - 1 / VOCAB), 0.1 * (1 + 1 / VOCAB)), strict=True):
        assert abs(count - n * share) < 3 * (n * share * (1 - share)) ** 0.5, (count, share)
    # each position of a sequence is as likely as any other, and each token as a replacement
    at, tokens = chosen.sum(0), torch.bincount(other[other != old[new != VOCAB]], minlength=VOCAB).double()
    assert (at - n / T).abs().max() < 4.5 * (n / T) ** 0.5 and tokens.numel() == VOCAB
    assert tokens.var() / tokens.mean() < 1.3 and tokens.max() < 20


def test_masks_are_berts():
    check_masks()


def test_a_sample_has_the_same_masks_in_every_batch_and_others_in_every_epoch():
    source, _ = masked()
    x, y = source.batch(0, 64)
    for first, n in (0, 1), (3, 5), (63, 1):
        for whole, part in zip((x, y), source.batch(first, n), strict=True):
            assert torch.equal(whole[first:first + n], part)
    places = {tuple(row.nonzero().flatten().tolist()) for row in y != IGNORE}
    assert len(places) == 64  # no two sequences are masked alike
    assert not torch.equal(masked(seed=2)[0].batch(0, 64)[1] != IGNORE, y != IGNORE)


# -----------------------------------------------------------------------------
# the model

def make_model(**flags):
    """-> (Config, model, x, y): fp64, no weight zero or one."""
    cfg = Config(**{**BERT, "n_layer": 3, "n_embd": 32, "vocab_size": 99, **flags})
    torch.manual_seed(1)
    model = GPT(cfg, make_mesh(World(rank=0, size=1)), 99).double()
    init_weights(model, 1)
    with torch.no_grad():
        for p in model.parameters():
            p[:p.used] += 0.1 * torch.randn_like(p[:p.used])
    return cfg, model, *Masked(Synthetic(98, cfg.seq_len, 1), 1).batch(0, 4)


def gradients(model, x, y):
    """-> the mean loss of the masked tokens, {name: gradient}."""
    model.zero_grad()
    loss = model(x, y)[0] / (y >= 0).sum()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


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


# our name: transformers' in MegatronBertForMaskedLM; a block's begin with blocks.i and bert.encoder.layer.i
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
    cfg, model, x, y = make_model(vocab_size=128)
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
    # theirs: the embedding, the blocks, the last one normed
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

"""The model in one process: written out, generation, counting, first weights, activations; and dropout.

test_layouts.py has the layouts, dropout over dp among them.
"""
import dataclasses
import hashlib
import inspect
import itertools
import math
import typing
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from plain_model import forward, total_loss
from pool import run_ranks
from shared import parameters
from test_layouts import FAMILIES as ALL
from test_layouts import mask_synthetic
from test_moe import whole_layer

import moe
import train
from attention import rope_cache, rotate
from config import Config, head_width, pad_vocab
from corpus.samples import Synthetic, micro_batches
from cost.parameters import Rank, count_parameters, flops_per_token
from interface.presets import PRESETS
from layers import vocab_cross_entropy
from model import GPT, MLP
from moe import MoE
from ops.activations import ACTIVATIONS, GATED
from ops.cross_entropy import IGNORE
from parallel import make_mesh
from pipeline import Cache, generate
from runtime.launch import World

SMALL = dict(n_layer=2, n_head=4, n_embd=16, ffn_hidden=24, seq_len=8, vocab_size=100, micro_batch=2,
             steps=20, lr=1e-2, warmup=0)
FAMILIES = {
    "llama": Config(**SMALL, n_kv_head=2),
    "gpt2": Config(**SMALL, n_kv_head=4, norm="layer", mlp="gelu", pos="learned", bias=True, tied=True)}
MOE = dataclasses.replace(FAMILIES["llama"], n_experts=4, top_k=2, n_shared_experts=1)
MESH = make_mesh(World())
family = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)


def built(cfg, mesh=MESH):
    return train.build(cfg, mesh, cfg.vocab_size, torch.device("cpu"))


def steps(cfg, model, data_parallel, opt, numbers):
    """Optimizer steps of these numbers, two micro-batches each -> [(StepStats, refused)]"""
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    step = train.Step(cfg, model, data_parallel, opt)
    return [step([source.batch(4 * s, 2), source.batch(4 * s + 2, 2)], s) for s in numbers]


def random_model(cfg, dtype=torch.float64):
    """A model whose next token depends on the tokens before it: weights far larger than at the start."""
    model = GPT(dataclasses.replace(cfg, dtype="fp64"), MESH, cfg.vocab_size).to(dtype)
    rng = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=rng, dtype=dtype)
        one = "norm" in name and name.endswith("weight")
        p.data = 1.5 * noise if p.ndim > 1 else 0.1 * noise + float(one)
        if name in ("wte.weight", "head.weight"):
            p.data = F.normalize(p.data)  # otherwise the longest rows win, whatever came before
        p.data[p.used:] = 0
    return model.eval()


# -----------------------------------------------------------------------------
# The whole model, written out plainly

WIDE = dict(SMALL, n_kv_head=2, dtype="fp64", rope_base=500.0, n_layer=3)
EXPERTS_OF = dict(WIDE, n_experts=4, top_k=2, aux_coef=0.05, z_coef=0.01, n_layer=2)
LIKE_GPT2 = dict(n_kv_head=4, norm="layer", mlp="gelu", pos="learned")
FORMS = {
    "llama": dict(),
    "gpt2": dict(LIKE_GPT2, bias=True, tied=True),
    "llama-bias-tied": dict(bias=True, tied=True, n_kv_head=1, recompute="full"),
    "gpt2-no-bias": LIKE_GPT2,
    "layer-swiglu-rope-bias": dict(norm="layer", bias=True, vocab_size=128),
    "qwen3": dict(head_dim=6, qk_norm="head"),
    "olmo2": dict(qk_norm="all", norm_place="after"),
    "qwen2, a soft-cap": dict(qkv_bias=True, logit_softcap=2.0),
    "llama3": dict(rope_scaling=(4.0, 0.5, 2.0, 8.0)),
    "windows": dict(window=3, full_every=2, no_rope_every=2, qk_norm="head"),
    "gemma3": dict(norm="rms1p", mlp="geglu", norm_place="both", qk_norm="head", embed_scale=True, window=3,
                   full_every=2, window_rope_base=20.0, tied=True, rope_scaling=(4.0, 0.5, 2.0, 8.0)),
    "learned positions and norms of heads": dict(
        pos="learned", qk_norm="head", norm="layer", norm_place="after", mlp="relu2", window=2),
    "softmax": dict(EXPERTS_OF),
    "experts with norms after": dict(EXPERTS_OF, norm_place="after", qk_norm="all", mlp="relu2"),
    "softmax-topk": dict(EXPERTS_OF, router="softmax-topk", recompute="full"),
    "experts of geglu between norms": dict(EXPERTS_OF, norm_place="both", norm="rms1p", qk_norm="all",
                                           mlp="geglu", n_shared_experts=1, router="softmax-topk"),
    "sigmoid": dict(EXPERTS_OF, router="sigmoid", router_bias_rate=0.1, n_shared_experts=2, mlp="gelu"),
    "sigmoid-top-1": dict(EXPERTS_OF, router="sigmoid", top_k=1, n_shared_experts=1, bias=True),
    "probs-dropped": dict(EXPERTS_OF, capacity_factor=0.75),
    "position-dropped": dict(EXPERTS_OF, capacity_factor=0.5, drop_policy="position", top_k=1),
    "bert": dict(LIKE_GPT2, bias=True, tied=True, objective="mlm"),
    "bert, untied": dict(LIKE_GPT2, objective="mlm"),
    "mlm": dict(objective="mlm"),
}


def config_of(form, **flags):
    return Config(**{**WIDE, **FORMS[form], **flags})


def randomize(model):
    """Weights at which every part matters: attention is far from even, gains and biases are their own; the
    vocabulary's padding stays zero. -> {name: a copy that wants its gradient}, with the routers' biases"""
    rng = torch.Generator().manual_seed(2)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, p in tensors.items():
            noise = torch.randn(p.shape, generator=rng, dtype=torch.float64)
            gain = p.ndim == 1 and name.endswith("weight")
            p.copy_(gain + 0.3 * noise if p.ndim == 1 else noise / math.sqrt(p.size(-1)))
            p[getattr(p, "used", p.size(0)):] = 0
    return {n: t.detach().double().requires_grad_() for n, t in tensors.items()}


def gradients(cfg, model, data_parallel, opt):
    make = mask_synthetic if cfg.objective == "mlm" else Synthetic
    source = make(cfg.vocab_size, cfg.seq_len, 1)
    batches = [source.batch(0, cfg.micro_batch), source.batch(cfg.micro_batch, cfg.micro_batch)]
    n_trained = sum(int((y >= 0).sum()) for _, y in batches)
    loss = train.Step(cfg, model, data_parallel, opt).gradients(batches, 1, n_trained=n_trained)
    return batches, loss, {name: grad for bucket in data_parallel.buckets
                           for name, grad in zip(bucket.names, bucket.grad_windows, strict=True)}


def shifts_all_scores(cfg, name):
    """Softmax ignores a shift. So without RoPE, the gradient of a key bias is rounding error."""
    return cfg.pos == "learned" and name.endswith("wk.bias")


def check_against_the_written_out_model(cfg, drop=lambda place, x: x):
    """Two micro-batches: logits, loss, router losses, every gradient relative to its largest, to 1e-12."""
    model, data_parallel, opt = built(cfg)
    w = randomize(model)
    batches, loss, seen = gradients(cfg, model, data_parallel, opt)
    want, minimized = total_loss(cfg, w, cfg.vocab_size, batches, drop)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    minimized.backward()
    assert seen.keys() == dict(model.named_parameters()).keys()
    for n, g in seen.items():
        largest = 1e-2 if shifts_all_scores(cfg, n) else w[n].grad.abs().max().item()
        assert largest > 1e-6, f"{n} has no gradient: the comparison would prove nothing"
        torch.testing.assert_close(g, w[n].grad, rtol=0, atol=1e-12 * largest, msg=n)
    x = batches[0][0][:, : cfg.seq_len - 3]  # shorter than the window
    with torch.no_grad():
        got, router_loss = model.eval()(x)
        logits, balance = forward(cfg, w, cfg.vocab_size, x)
    torch.testing.assert_close(got.view(*x.shape, -1)[..., : cfg.vocab_size], logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(router_loss, dtype=torch.float64), balance, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["qk_norm", "norm_place", "pos", "objective"])
def test_every_value_is_written_out(name):
    values = {getattr(config_of(form), name) for form in FORMS}
    missing = {*typing.get_args(Config.__annotations__[name])} - values
    assert not missing, f"{missing}: give FORMS a model of it, and tests/plain_model.py its formula"


@pytest.mark.parametrize("form", FORMS)
def test_one_process_equals_the_model_written_out(form):
    check_against_the_written_out_model(config_of(form))


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_learns_from_the_first_step_on(form):
    cfg = config_of(form, micro_batch=4)
    *_, seen = gradients(cfg, *built(cfg))
    for name, grad in seen.items():
        assert grad.abs().max() > 1e-9 or shifts_all_scores(cfg, name), (
            f"{name} starts where it has no gradient, and never learns; see initial_weights in model.py")


def test_a_bf16_model_computes_in_fp32_what_bf16_would_ruin():
    """RoPE's angles and the router's scores; the bf16 inputs are exact numbers."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(2, 40, 3, 8, generator=rng).bfloat16()
    got, want = (rotate(t, *rope_cache(40, 8, 500.0, "cpu", wide)) for t, wide in
                 ((x, torch.float32), (x.double(), torch.float64)))
    assert got.dtype == torch.bfloat16 and ((got - want).abs() <= want.abs() / 2**8 + 1e-5).all()
    layer = MoE(dataclasses.replace(MOE, dtype="bf16"), MESH)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, 1.0, generator=rng)
        x = torch.randn(64, 16, generator=rng).bfloat16()
        p, ids, router_loss = layer.bfloat16().route(x)
        wide_p, wide_ids, wide_aux = layer.double().route(x.double())
    assert torch.equal(ids, wide_ids) and router_loss.item() == pytest.approx(wide_aux.item(), rel=1e-6)
    assert p.dtype == torch.bfloat16 and ((p - wide_p).abs() <= wide_p / 2**8).all()
    for dtype, wide in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.float32)):
        model, _, _ = built(dataclasses.replace(FAMILIES["llama"], dtype=dtype))
        model(torch.zeros(1, 8, dtype=torch.int64))
        assert {(t.dtype, t.shape) for t in model.rope[False]} == {(wide, (8, 2))}, "the table of RoPE"


# -----------------------------------------------------------------------------
# The loss

def cross_entropy_of_a_share(world, logits, target, used):
    """Return the loss of this rank's columns of the logits with the other ranks', its gradient."""
    mesh = make_mesh(world, tp=world.size)
    own = logits.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    loss = vocab_cross_entropy(own, target, used, mesh.tp)
    (3 * loss).backward()
    return loss.dtype, loss.item(), own.grad


@pytest.mark.parametrize("n,dtype,rel", [
    (1, torch.float64, 1e-12), (2, torch.float64, 1e-12), (1, torch.bfloat16, 1e-6),
    (2, torch.bfloat16, 1e-6), (2, torch.float16, 1e-6)], ids=str)
def test_the_cross_entropy_is_torchs_and_computed_in_fp32(n, dtype, rel):
    """A third of the targets take no part; they have no gradient, nor has the vocabulary's padding."""
    rng = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(96, 128, generator=rng)).to(dtype)
    target, used = torch.randint(0, 100, (96,), generator=rng), 100
    target[::3] = IGNORE
    wide = logits.double()[:, :used].requires_grad_()
    want = F.cross_entropy(wide, target, ignore_index=IGNORE, reduction="sum")
    (3 * want).backward()
    results = run_ranks(n, cross_entropy_of_a_share, logits, target, used)
    for kind, loss, _ in results:
        assert kind == torch.promote_types(dtype, torch.float32)
        assert loss == pytest.approx(want.item(), rel=rel)
    grad = torch.cat([g for *_, g in results], 1).double()
    assert not grad[:, used:].any() and not grad[::3].any()
    # The gradient is rounded to the logits' dtype at the end only; fp16's smallest number is 6e-8
    atol = 1e-12 if dtype == torch.float64 else 1e-7
    torch.testing.assert_close(grad[:, :used], wide.grad, rtol=torch.finfo(dtype).eps, atol=atol)


# -----------------------------------------------------------------------------
# Generation

def without_cache(model, tokens, n):
    """Greedy, the slow way: the whole window through the model for every token."""
    T, tokens = model.cfg.seq_len, list(tokens)
    window = tokens[-T:]
    for _ in range(n):
        if len(window) > T:
            window = tokens[-(T // 2):]
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0][-1, : model.vocab_size]
        tokens.append(int(logits.argmax()))
        window = [*window, tokens[-1]]
    return tokens


@pytest.mark.parametrize("name", [
    "llama", "gpt2", "qwen3", "qwen2", "olmo2", "llama3", "windows", "gemma3", "nanochat"])
def test_a_cache_of_keys_changes_nothing(name):
    """Greedy, past the end of the window several times; and in pieces of several lengths."""
    model = random_model(Config(**dict(ALL[name], n_layer=2, micro_batch=2)))
    for prompt in (2, 8, 19):
        tokens = [(7 * i + 3) % 100 for i in range(prompt)]
        got = generate(model, tokens, 20, temperature=0)
        assert got == without_cache(model, tokens, 20)
        assert got[:prompt] == tokens
        assert name == "gemma3" or len(set(got[prompt:])) > 2, "only a scaled, tied embedding repeats itself"
    tokens = torch.randint(100, (1, 8), generator=torch.Generator().manual_seed(2))
    cache, pieces = Cache(), []
    with torch.no_grad():
        for piece in tokens.split([1, 3, 1, 1, 2], dim=1):
            pieces.append(model(piece, cache=cache)[0])
            cache.length += piece.size(1)
        torch.testing.assert_close(torch.cat(pieces), model(tokens)[0], rtol=0, atol=1e-12)


@family
def test_generate_draws(cfg):
    model = random_model(dataclasses.replace(cfg, dropout=0.5))
    model.train()
    runs = {seed: generate(model, [1, 2], 40, temperature=1.5, seed=seed) for seed in (1, 2)}
    assert runs[1] == generate(model, [1, 2], 40, temperature=1.5, seed=1) != runs[2]
    greedy = generate(model, [1, 2], 20, temperature=0)
    assert generate(model, [1, 2], 20, temperature=2.0, top_k=1) == greedy
    assert greedy == generate(random_model(cfg), [1, 2], 20, temperature=0), "without dropout"
    assert model.training, "generate leaves the model as it was"
    with torch.no_grad():
        top = model.eval()(torch.tensor([[1, 2]]))[0][-1, : cfg.vocab_size].topk(3).indices.tolist()
    drawn = {generate(model, [1, 2], 1, temperature=5.0, top_k=3, seed=s)[-1] for s in range(30)}
    assert drawn == set(top)
    assert max(generate(model, [1], 300, temperature=1e6)) < cfg.vocab_size, "padding is no word"


# -----------------------------------------------------------------------------
# Counting

COUNTED = {
    "llama": FAMILIES["llama"], "gpt2-tiny": FAMILIES["gpt2"], "moe": MOE,
    "moe-bias": dataclasses.replace(MOE, bias=True, mlp="gelu", norm="layer"),
    "moe-router-bias": dataclasses.replace(MOE, router="sigmoid", router_bias_rate=0.1, n_shared_experts=2),
    "bias": dataclasses.replace(FAMILIES["llama"], bias=True, norm="layer"),
    "tied": dataclasses.replace(FAMILIES["llama"], tied=True, pos="learned")}
PINNED = {"dense-210m": 213_148_160, "moe-4b": 4_375_732_736, "llama-3.2-1b": 1_235_814_400,
          "qwen3-0.6b": 596_049_920, "olmo-2-1b": 1_484_916_736, "qwen3-30b-a3b": 30_532_122_624,
          "gemma-3-1b": 999_885_952, "bloom-176b": 176_276_602_880,
          "gpt2": 124_439_808 + (pad_vocab(50257) - 50257) * 768}  # its vocabulary is padded


@pytest.mark.parametrize("name", [*PRESETS, *COUNTED])
def test_count_parameters(name):
    cfg = COUNTED.get(name) or Config(**PRESETS[name])
    vocab = cfg.vocab_size or 50257
    with torch.device("meta"):
        model = GPT(cfg, MESH, vocab)
    counted = count_parameters(cfg, vocab)
    assert counted["total"] == sum(p.numel() for p in model.parameters())
    assert counted["total"] == Rank(cfg, MESH, vocab).parameters()
    assert counted["total"] == PINNED.get(name, counted["total"])
    head = model.wte if cfg.tied else model.head
    matmul = 0  # of the experts' matrices, (E, out, in), a token meets top-k; the router is not counted
    for n, p in model.named_parameters():
        if n.startswith("blocks.") and p.ndim > 1 and "router" not in n:
            matmul += p.numel() if p.ndim == 2 else p.numel() * cfg.top_k // cfg.n_experts
    heads = head.weight.numel() + (model.mlm.dense.weight.numel() if cfg.objective == "mlm" else 0)
    assert counted["matmul"] == matmul + heads
    full, causal = flops_per_token(cfg, vocab)
    keys = cfg.n_layer * cfg.seq_len  # of the last token, over all layers
    if cfg.window:  # of gemma-3-1b 22 of 26 layers see 512 of 2,048 tokens, in the first 512 half of them
        seen_by_all = cfg.n_layer // cfg.full_every if cfg.full_every else 0
        in_window = 2 * cfg.window - cfg.window**2 / cfg.seq_len
        keys = seen_by_all * cfg.seq_len + (cfg.n_layer - seen_by_all) * in_window
    attention = 12 * cfg.n_head * head_width(cfg) * keys
    seen = 77 / 512 if cfg.objective == "mlm" else 1  # share of the tokens that the head sees: the masked
    assert full == pytest.approx(6 * (matmul + seen * heads) + attention, rel=1e-12)
    assert full - causal == (0 if cfg.objective == "mlm" else attention / 2)


def test_padded_vocabulary():
    assert [pad_vocab(v) for v in (1, 127, 128, 129, 50257, 128256)] == [128, 128, 128, 256, 50304, 128256]


# -----------------------------------------------------------------------------
# First weights

@pytest.mark.parametrize("cfg", [*FAMILIES.values(), MOE], ids=[*FAMILIES, "moe"])
def test_init_statistics(cfg):
    """N(0, 0.02), residual writers / sqrt(2 L), norms one, biases zero; another seed is another draw."""
    wide = dataclasses.replace(cfg, n_layer=3, n_embd=128, ffn_hidden=256)
    model, _, _ = built(wide)
    other, _, _ = built(dataclasses.replace(wide, seed=1))
    draws = []
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if p.ndim == 1:
            assert (p == (1.0 if name.endswith("weight") else 0.0)).all(), name
            continue
        assert not p[p.used:].any(), name
        std = 0.02 / math.sqrt(2 * 3) if name.removesuffix(".weight").split(".")[-1] in ("wo", "w2") else 0.02
        for i, each in enumerate(p if p.ndim == 3 else [p[: p.used]]):  # each expert is a draw of its own
            z, near = each / std, 5 / math.sqrt(each.numel())  # five standard errors
            assert abs(z.mean()) < near and abs(z.square().mean() - 1) < 1.5 * near, (name, i)
            assert 0.02 < (z.abs() > 2).double().mean() < 0.07 and z.abs().max() > 2.5, f"{name}: not normal"
            draws.append(z.flatten()[:500])
        assert not torch.equal(p, q), name
    assert torch.stack(draws).corrcoef().fill_diagonal_(0).abs().max() < 0.3, "every matrix draws its own"
    x, y = Synthetic(cfg.vocab_size, cfg.seq_len, 5).batch(0, 64)
    small, _, _ = built(cfg)
    with torch.no_grad():
        assert abs(small(x, y)[0].item() / y.numel() - math.log(cfg.vocab_size)) < 0.02


# -----------------------------------------------------------------------------
# An activation of one's own

ONE_EXPERT = dict(SMALL, n_kv_head=2, n_experts=1, top_k=1, router="sigmoid")


def test_every_name_of_mlp_has_a_function():
    in_one_place = set(typing.get_args(Config.__annotations__["mlp"])) ^ set(ACTIVATIONS)
    assert not in_one_place, f"{in_one_place}: not in ACTIVATIONS, or not in the list at `mlp` in config.py"
    assert set(ACTIVATIONS) > GATED


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_function_of_two_products_is_gated(name):
    takes = len(inspect.signature(ACTIVATIONS[name]).parameters)
    gives = 2 if name in GATED else 1
    assert takes == gives, f"ACTIVATIONS[{name!r}] takes {takes} products, by GATED it gets {gives}"


@pytest.mark.parametrize("capacity_factor", [0.0, 2.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_expert_computes_what_the_mlp_computes(name, capacity_factor):
    cfg = Config(**dict(ONE_EXPERT, mlp=name, capacity_factor=capacity_factor))
    mlp = MLP(cfg, MESH, cfg.ffn_hidden).double()
    layer = MoE(cfg, MESH).double()
    x = torch.randn(12, cfg.n_embd, dtype=torch.float64)
    layer.router.weight.data.zero_()  # the gate is sigmoid(0)
    for p in (mlp.w1, mlp.w3, mlp.w2):
        if p is not None:
            torch.nn.init.normal_(p.weight)
    with torch.no_grad():
        for own, theirs in ((layer.w1, mlp.w1), (layer.w3, mlp.w3), (layer.w2, mlp.w2)):
            if own is not None:
                own.copy_(theirs.weight.unsqueeze(0))
    products = [x @ w.weight.T for w in (mlp.w1, mlp.w3) if w is not None]
    want = ACTIVATIONS[name](*products) @ mlp.w2.weight.T
    y, _ = whole_layer(layer, x)
    torch.testing.assert_close(mlp(x), want)
    torch.testing.assert_close(2 * y, want)


@pytest.mark.parametrize("gated", [False, True])
def test_a_new_activation_trains_in_mlp_and_experts_on_every_path(gated, monkeypatch, request):
    """Two steps with experts and a shared one: where GPUs have one kernel for SwiGLU, it is not taken."""
    called = []

    def mine(gate, up=None):
        called.append(up is None)
        gate, up = gate.chunk(2, dim=1) if gated and up is None else (gate, up)
        return gate.relu().square() * (up if gated else 1)
    monkeypatch.setitem(ACTIVATIONS, "mine", mine)
    if gated:
        GATED.add("mine")
    request.addfinalizer(lambda: GATED.discard("mine"))
    monkeypatch.setattr(moe, "use_grouped_mm", lambda x, w: True)
    cfg = Config(**dict(ONE_EXPERT, n_experts=4, n_shared_experts=1, mlp="mine"))
    stats = steps(cfg, *built(cfg), (1, 2))
    assert all(s.loss.isfinite() for s, _ in stats)
    assert set(called) == ({True, False} if gated else {True}) and len(called) == 2 * 2 * 2 * cfg.n_layer


# -----------------------------------------------------------------------------
# Dropout: where it is

P = 0.3
FACTORS = {"embedding": 1.5, "residual": 1.5, "attention": 2.0}  # stand for the masks: they leave traces
REAL_DROPOUT, REAL_ATTENTION = F.dropout, F.scaled_dot_product_attention


def traced_dropout(x, p, training):
    assert p == P
    return x * FACTORS["residual"] if training else x


def traced_attention(*args, dropout_p, **kwargs):
    return REAL_ATTENTION(*args, **kwargs) * {0.0: 1.0, P: FACTORS["attention"]}[dropout_p]


@pytest.mark.parametrize("form", parameters(FORMS, [
    "llama", "gpt2", "llama-bias-tied", "gemma3", "softmax-topk", "experts with norms after", "bert"]))
def test_dropout_is_at_each_of_its_places_in_training_only(form):
    """On the embedding, attention weights and what each half of a block adds: once and with p, forward and
    backward, also under recompute; nowhere in eval mode."""
    with mock.patch.object(F, "dropout", traced_dropout), \
            mock.patch.object(F, "scaled_dot_product_attention", traced_attention):
        check_against_the_written_out_model(config_of(form, dropout=P), lambda place, x: x * FACTORS[place])


# Masks: a mask is a function of the generator's state, which is noted whenever one is drawn

SHAPE = dict(WIDE, n_layer=2, dropout=P, vocab_size=60)
STEPS, BATCH = (1, 2), 8


def masks(world, flags):
    """Forward and backward of two steps -> [(step, generator's state as a hash)] of each mask drawn here."""
    from torch.nn.attention.bias import CausalBias  # its import takes longer than torch's
    cfg, drawn = Config(**flags), []
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    step = train.Step(cfg, *train.build(cfg, mesh, cfg.vocab_size, world.device))

    def note(p):
        assert p == P
        drawn.append((number, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()))

    def dropout(x, p, training):
        note(p * training)
        return REAL_DROPOUT(x, p, training)

    def attention(*args, dropout_p, **kwargs):
        note(dropout_p)
        if isinstance(args[-1], CausalBias):  # it would not know the mock
            args = *args[:-1], args[-1]._materialize()
        return REAL_ATTENTION(*args, dropout_p=dropout_p, **kwargs)
    with mock.patch.object(F, "dropout", dropout), \
            mock.patch.object(F, "scaled_dot_product_attention", attention):
        for number in STEPS:
            torch.manual_seed(world.rank)  # what was drawn before must not matter
            step.gradients(micro_batches(cfg, mesh, source, 0, BATCH, world.device), number)
    return drawn


@pytest.mark.parametrize("n,layout", [
    (2, dict(n_experts=4, top_k=2, ep=2)), (4, dict(tp=2, pp=2)), (4, dict(tp=2, cp=2)),
    pytest.param(4, dict(tp=2), marks=pytest.mark.long)], ids=str)
def test_no_two_masks_are_equal(n, layout):
    """Every rank has its own sequences, rows, heads or layers; a mask depends on no number of ranks but those
    that split its sequence or its layers."""
    flags = {**SHAPE, **layout}
    ranks = run_ranks(n, masks, flags)
    stages, tp, cp = (layout.get(axis, 1) for axis in ("pp", "tp", "cp"))
    micro = BATCH // 2 // (n // stages // tp // cp)
    # Each block draws a mask for each of its two residual branches and one for attention. Under cp, attention
    # draws one for each of its two chunks. The first stage also draws one for the embedding.
    places = [(2 + min(cp, 2)) * SHAPE["n_layer"] // stages + (rank < n // stages) for rank in range(n)]
    assert [len(drawn) for drawn in ranks] == [len(STEPS) * micro * each for each in places]
    drawn = [mask for rank in ranks for mask in rank]
    assert len({state for _, state in drawn}) == len(drawn)
    if (stages, tp, cp) == (1, 1, 1):
        alone, = run_ranks(1, masks, {**flags, "ep": 1})  # all micro-batches, all experts
        assert sorted(drawn) == sorted(alone)
    again = run_ranks(n, masks, {**flags, "recompute": "full"})  # also in the order of 1F1B
    for kept, twice in zip(ranks, again, strict=True):
        assert set(kept) == set(twice) and len(twice) > 1.5 * len(kept), "the same masks, drawn again"


def seeds(world, seed, steps, n):
    """Return the seeds that train.Step gives its generator, without a model.

    They are {(seed, rank, step, number of the chunk and micro-batch): the generator's seed}.
    """
    out, drawn, cfg = {}, [], Config(dropout=P, seed=seed, pp_chunks=2)
    model = SimpleNamespace(mesh=make_mesh(world, tp=2, pp=2, groups=False, cp=2), blocks={})
    step = train.Step(cfg, model, mock.Mock(), mock.Mock())

    def no_forward(model, data_parallel, batches, tokens, scale, seeds, set_seed):
        for chunk, i in itertools.product(range(2), range(len(batches))):
            set_seed(seeds[chunk][i])
    with mock.patch.object(train, "forward_backward", no_forward):
        for number in steps:
            step.gradients([None] * n, number, drawn.append)
            out.update({(seed, world.rank, number, i): drawn[i] for i in range(2 * n)})
            assert len(drawn) == 2 * n, "one seed for each chunk and micro-batch"
            drawn.clear()
    return out


def test_no_two_seeds_are_equal():
    """16 ranks, two runs' seeds, steps of three micro-batches; numbers whose digits could run together."""
    found = {}
    for rank, seed in itertools.product(range(16), (1, 11)):
        found.update(seeds(World(rank=rank, size=16), seed, [*range(1, 13), 111, 1111], 3))
    assert len(found) == 16 * 2 * 14 * 2 * 3 and len(set(found.values())) == len(found)

"""The model beyond its layouts: written out, decay groups, generation, counting, init, RoPE, GQA, AdamW."""

import dataclasses
import inspect
import math
import typing

import pytest
import test_layouts
import torch
import torch.nn.functional as F
from faults import planted, with_faults
from plain_model import forward, total_loss
from pool import run_ranks
from test_moe import whole_layer

import moe
import train
from attention import Attention, rope_cache, rotate
from config import Config, head_width, pad_vocab
from corpus.masked import Masked
from corpus.samples import Synthetic
from cost.parameters import count_parameters, flops_per_token
from interface.presets import PRESETS
from layers import vocab_cross_entropy
from model import GPT, MLP, VECTOR_STARTS
from moe import MoE
from ops.activations import ACTIVATIONS, GATED
from ops.cross_entropy import IGNORE
from parallel import make_mesh, parameter
from pipeline import Cache, generate
from runtime.launch import World

SMALL = dict(
    n_layer=2,
    n_head=4,
    n_embd=16,
    ffn_hidden=24,
    seq_len=8,
    vocab_size=100,
    micro_batch=2,
    steps=20,
    lr=1e-2,
    warmup=0,
)
FAMILIES = {
    "llama": Config(**SMALL, n_kv_head=2),
    "gpt2": Config(**SMALL, n_kv_head=4, norm="layer", mlp="gelu", pos="learned", bias=True, tied=True),
}
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
        p.data[p.used :] = 0
    return model.eval()


# -----------------------------------------------------------------------------
# The whole model, written out plainly

WIDE = dict(SMALL, n_kv_head=2, dtype="fp64", rope_base=500.0, n_layer=3)
EXPERTS_OF = dict(WIDE, n_experts=4, top_k=2, aux_coef=0.05, z_coef=0.01, n_layer=2)
FORMS = {
    "llama": dict(),
    "gpt2": dict(n_kv_head=4, norm="layer", mlp="gelu", pos="learned", bias=True, tied=True),
    "llama-bias-tied": dict(bias=True, tied=True, n_kv_head=1, recompute="full"),
    "gpt2-no-bias": dict(n_kv_head=4, norm="layer", mlp="gelu", pos="learned"),
    "layer-swiglu-rope-bias": dict(norm="layer", bias=True, vocab_size=128),
    "qwen3": dict(head_dim=6, qk_norm="head"),
    "olmo2": dict(qk_norm="all", norm_place="after"),
    "qwen2, a soft-cap": dict(qkv_bias=True, logit_softcap=2.0),
    "llama3": dict(rope_scaling=(4.0, 0.5, 2.0, 8.0)),
    "windows": dict(window=3, full_every=2, no_rope_every=2),
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
}


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
            p[getattr(p, "used", p.size(0)) :] = 0
    return {n: t.detach().double().requires_grad_() for n, t in tensors.items()}


def gradients(data_parallel):
    """Return {name of a parameter: its gradient}."""
    return {name: grad for bucket in data_parallel.buckets
            for name, grad in zip(bucket.names, bucket.grad_windows, strict=True)}


def check_against_the_written_out_model(cfg, drop=lambda place, x: x):
    """Two micro-batches: logits, loss, router losses, every gradient relative to its largest, to 1e-12."""
    model, data_parallel, opt = built(cfg)
    w, source = randomize(model), Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    batches = [source.batch(0, cfg.micro_batch), source.batch(cfg.micro_batch, cfg.micro_batch)]
    loss = train.Step(cfg, model, data_parallel, opt).gradients(batches, 1)
    want, minimized = total_loss(cfg, w, cfg.vocab_size, batches, drop)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    minimized.backward()
    seen = gradients(data_parallel)
    assert seen.keys() == dict(model.named_parameters()).keys()
    for n, g in seen.items():
        # Softmax ignores a shift of all scores. So without RoPE, the gradient of a key bias is rounding error
        largest = 1e-2 if cfg.pos == "learned" and n.endswith("wk.bias") else w[n].grad.abs().max().item()
        assert largest > 1e-6, f"{n} has no gradient: the comparison would prove nothing"
        torch.testing.assert_close(g, w[n].grad, rtol=0, atol=1e-12 * largest, msg=n)
    x = batches[0][0][:, : cfg.seq_len - 3]  # shorter than the window
    with torch.no_grad():
        got, router_loss = model.eval()(x)
        logits, balance = forward(cfg, w, cfg.vocab_size, x)
    torch.testing.assert_close(got.view(*x.shape, -1)[..., : cfg.vocab_size], logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(router_loss, dtype=torch.float64), balance, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_one_process_equals_the_model_written_out(name):
    check_against_the_written_out_model(Config(**{**WIDE, **FORMS[name]}))


MASKED_FORMS = {
    "bert": dict(FORMS["gpt2"], objective="mlm"),
    "mlm": dict(objective="mlm")}


def check_that_all_learn(cfg):
    """As it starts, a model has a gradient for each of its parameters. AssertionError: one has none."""
    model, data_parallel, opt = built(cfg)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, 1)
    if cfg.objective == "mlm":
        source = Masked(Synthetic(cfg.vocab_size - 1, cfg.seq_len, 1), 1)
    train.Step(cfg, model, data_parallel, opt).gradients([source.batch(0, 4)], 1)
    for name, grad in gradients(data_parallel).items():
        if name.endswith("wk.bias") and cfg.pos == "learned":  # softmax ignores it, as above
            continue
        assert grad.abs().max() > 1e-9, (
            f"{name} starts where it has no gradient, and never learns; see initial_weights in model.py")


@pytest.mark.parametrize("form", [*FORMS, *MASKED_FORMS])
def test_every_parameter_learns_from_the_first_step_on(form):
    flags = {**FORMS, **MASKED_FORMS}[form]
    check_that_all_learn(Config(**{**WIDE, **flags}))


class NormedAttention(Attention):
    """Attention with a norm of queries and keys, which share its weight."""

    def __init__(self, cfg, mesh, *args):
        super().__init__(cfg, mesh, *args)
        self.qk_norm = parameter((cfg.n_embd // cfg.n_head,), mesh)
        self.q_norm = torch.nn.Identity()  # normed() is called

    def normed(self, *qk):
        return [F.rms_norm(x, self.qk_norm.shape, self.qk_norm) for x in qk]


def test_a_parameter_that_starts_dead_is_found(monkeypatch):
    """Its start must be given, and a start at which nothing has a gradient is named."""
    cfg = Config(**WIDE)
    monkeypatch.setattr("model.Attention", NormedAttention)
    with pytest.raises(ValueError, match=r"nothing says where blocks.\d.attn.qk_norm starts; give 'qk_norm'"):
        built(cfg)
    monkeypatch.setitem(VECTOR_STARTS, "qk_norm", 1.0)
    check_that_all_learn(cfg)
    monkeypatch.setitem(VECTOR_STARTS, "qk_norm", 0.0)
    with pytest.raises(AssertionError, match=r"attn\.(qk_norm|w[qk])\b.* no gradient"):
        check_that_all_learn(cfg)


def loss_of_bf16_logits(world, logits, target):
    """Return the loss of logits whose columns are split over all ranks."""
    tp = make_mesh(world, tp=world.size).tp
    return vocab_cross_entropy(logits.chunk(tp.size, 1)[tp.rank], target, 100, tp).item()


def test_a_bf16_model_computes_in_fp32_what_bf16_would_ruin():
    """The cross-entropy, RoPE's angles and the router's scores; the bf16 inputs are exact numbers."""
    rng = torch.Generator().manual_seed(3)
    logits, target = torch.randn(64, 128, generator=rng).bfloat16(), torch.randint(100, (64,), generator=rng)
    want = F.cross_entropy(logits[:, :100].double(), target, reduction="sum").item()
    for n in (1, 2):
        losses = run_ranks(n, loss_of_bf16_logits, logits, target)
        assert losses == pytest.approx([want] * n, rel=1e-6)
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


def test_the_rope_table_is_as_exact_as_the_model():
    for dtype, wide in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.float32)):
        model, _, _ = built(dataclasses.replace(FAMILIES["llama"], dtype=dtype))
        model(torch.zeros(1, 8, dtype=torch.int64))
        cos, sin = model.rope[False]
        assert cos.dtype == sin.dtype == wide and cos.shape == (8, 2)


# -----------------------------------------------------------------------------
# Generation

def without_cache(model, tokens, n):
    """Greedy, the slow way: the whole window through the model for every token."""
    T, tokens = model.cfg.seq_len, list(tokens)
    window = tokens[-T:]
    for _ in range(n):
        if len(window) > T:
            window = tokens[-(T // 2) :]
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0][-1, : model.vocab_size]
        tokens.append(int(logits.argmax()))
        window = [*window, tokens[-1]]
    return tokens


@family
@pytest.mark.parametrize("prompt", [1, 5, 8, 19], ids="prompt{}".format)
def test_generate_with_cache_equals_without(cfg, prompt):
    """Greedy, past the end of the window several times; the prompt shorter, as long, longer than a window."""
    model = random_model(cfg)
    tokens = [(7 * i + 3) % cfg.vocab_size for i in range(prompt)]
    got = generate(model, tokens, 30, temperature=0)
    assert got == without_cache(model, tokens, 30)
    assert got[:prompt] == tokens and len(got) == prompt + 30 and len(set(got[prompt:])) > 5, (
        "it must not be one token"
    )


@family
def test_generate_draws(cfg):
    model = random_model(cfg)
    model.train()
    runs = {seed: generate(model, [1, 2], 40, temperature=1.5, seed=seed) for seed in (1, 2)}
    assert runs[1] == generate(model, [1, 2], 40, temperature=1.5, seed=1) != runs[2]
    assert generate(model, [1, 2], 20, temperature=2.0, top_k=1) == generate(model, [1, 2], 20, temperature=0)
    assert model.training, "generate leaves the model as it was"
    with torch.no_grad():
        top = model(torch.tensor([[1, 2]]))[0][-1, : cfg.vocab_size].topk(3).indices.tolist()
    drawn = {generate(model, [1, 2], 1, temperature=5.0, top_k=3, seed=s)[-1] for s in range(30)}
    assert drawn == set(top)
    assert max(generate(model, [1], 300, temperature=1e6)) < cfg.vocab_size, "padding is no word"


# -----------------------------------------------------------------------------
# What a query sees is said in one place

WINDOW = "attention.attend"


def window_mask(original, q, k, v, cfg, *args, **options):
    """attend in a sliding window: a query sees its own position and the two before it."""
    keys = torch.arange(k.size(2))
    back = keys[-q.size(2) :].unsqueeze(1) - keys
    return F.scaled_dot_product_attention(q, k, v, (back >= 0) & (back < 3), enable_gqa=True)


@family
def test_a_window_in_attend_reaches_training_and_generation(cfg):
    """On one rank it is the window of the written-out model, whether or not keys come from a cache."""
    model = random_model(cfg)
    tokens = torch.randint(100, (1, 8), generator=torch.Generator().manual_seed(2))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    pieces = []
    cache = Cache()
    with torch.no_grad():
        causal = model(tokens)[0]
        with planted(WINDOW, window_mask):
            whole = model(tokens)[0]
            for piece in tokens.split([1, 3, 1, 1, 2], dim=1):
                pieces.append(model(piece, cache=cache)[0])
                cache.length += piece.size(1)
        with planted("plain_model.seen", lambda original, *args: original(*args).triu(-2)):
            want, _ = forward(cfg, weights, cfg.vocab_size, tokens)
    assert (whole - causal).abs().max() > 1e-3
    torch.testing.assert_close(whole[:, : cfg.vocab_size], want[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-10)


def window_to_both_sides(original, q, k, v, cfg, *args, **options):
    """attend that shows a query its own position and one on each side."""
    keys = torch.arange(k.size(2))
    near = (keys - keys.unsqueeze(1)).abs() <= 1
    return F.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)


def test_a_window_in_attend_reaches_a_masked_model():
    cfg = dataclasses.replace(FAMILIES["llama"], objective="mlm")
    model = random_model(cfg)
    tokens = torch.randint(99, (2, 8), generator=torch.Generator().manual_seed(2))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        whole = model(tokens)[0]
        with planted(WINDOW, window_to_both_sides):
            got = model(tokens)[0]
        with planted("plain_model.seen", lambda original, *args: original(*args).tril(1).triu(-1)):
            want, _ = forward(cfg, weights, cfg.vocab_size, tokens)
    assert (whole - got).abs().max() > 1e-3
    torch.testing.assert_close(got.view(2, 8, -1)[..., : cfg.vocab_size], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_window_in_attend_reaches_cp(recompute):
    flags = dict(test_layouts.LLAMA, micro_batch=2, seq_len=16, recompute=recompute)
    fault = [(WINDOW, window_mask)]
    causal = run_ranks(1, test_layouts.run, flags, 4)
    one = run_ranks(1, with_faults, fault, test_layouts.run, flags, 4)
    two = run_ranks(2, with_faults, fault, test_layouts.run, dict(flags, cp=2), 4)
    assert abs(causal[0]["stats"][0][0] - one[0]["stats"][0][0]) > 1e-6
    want = test_layouts.assemble(one)
    for name, got in test_layouts.assemble(two).items():
        difference = abs(got - want[name]).max()
        assert difference < 1e-10 * test_layouts.equality.scale(name, want[name], flags), name


# -----------------------------------------------------------------------------
# Counting

@pytest.mark.parametrize("name", [*PRESETS, "llama", "moe", "moe-bias", "gpt2-tiny", "bias", "tied"])
def test_count_parameters(name):
    small = {
        "llama": FAMILIES["llama"],
        "moe": MOE,
        "moe-bias": dataclasses.replace(MOE, bias=True, mlp="gelu", norm="layer"),
        "gpt2-tiny": FAMILIES["gpt2"],
        "bias": dataclasses.replace(FAMILIES["llama"], bias=True, norm="layer"),
        "tied": dataclasses.replace(FAMILIES["llama"], tied=True, pos="learned"),
    }
    cfg = small.get(name) or Config(**PRESETS[name])
    vocab = cfg.vocab_size or 50257
    with torch.device("meta"):
        model = GPT(cfg, MESH, vocab)
    assert count_parameters(cfg, vocab)["total"] == sum(p.numel() for p in model.parameters())
    head = model.wte if cfg.tied else model.head
    matmul = 0  # of the experts' matrices, (E, out, in), a token meets top-k; the router is not counted
    for n, p in model.named_parameters():
        if n.startswith("blocks.") and p.ndim > 1 and "router" not in n:
            matmul += p.numel() if p.ndim == 2 else p.numel() * cfg.top_k // cfg.n_experts
    heads = head.weight.numel() + (model.mlm.dense.weight.numel() if cfg.objective == "mlm" else 0)
    assert count_parameters(cfg, vocab)["matmul"] == matmul + heads
    if name == "dense-210m":
        assert count_parameters(cfg, vocab)["total"] == 213_148_160
    if name == "gpt2":  # 124,439,808 with the vocabulary unpadded
        assert count_parameters(cfg, vocab)["total"] - (pad_vocab(vocab) - vocab) * cfg.n_embd == 124_439_808
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
# Padding, loss, init

@family
def test_padding_stays_zero_and_gets_no_probability(cfg):
    model, data_parallel, opt = built(dataclasses.replace(cfg, weight_decay=0.5))
    head = model.wte if cfg.tied else model.head
    assert head.weight.shape == model.wte.weight.shape == (128, 16)
    before = head.weight.detach().clone()
    steps(cfg, model, data_parallel, opt, range(1, 5))
    assert not head.weight[100:].any() and not model.wte.weight[100:].any()
    assert (head.weight[:100] != before[:100]).any(dim=1).all()
    x, y = Synthetic(100, cfg.seq_len, 5).batch(0, 3)
    model.eval()
    with torch.no_grad():
        logits = model(x)[0]
        want = F.cross_entropy(logits[:, :100], y.reshape(-1), reduction="sum")
        torch.testing.assert_close(model(x, y)[0], want, rtol=1e-6, atol=0)


def masked_loss(world, logits, target):
    """Return the loss of this rank's columns of the logits with the other ranks', its gradient."""
    tp = make_mesh(world, tp=world.size).tp
    own = logits.chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    loss = vocab_cross_entropy(own, target, 100, tp)
    loss.backward()
    return loss.item(), own.grad


@pytest.mark.parametrize("n", [1, 2])
def test_a_target_that_takes_no_part_has_no_loss_and_no_gradient(n):
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 128, generator=rng, dtype=torch.float64)
    target = torch.randint(100, (12,), generator=rng)
    target[::3] = IGNORE
    rows = [(z[:100].log_softmax(0)[t].item(), i) for i, (z, t) in enumerate(zip(logits, target, strict=True))
            if t != IGNORE]  # a loop over tokens
    losses, grads = zip(*run_ranks(n, masked_loss, logits, target), strict=True)
    grad, softmax = torch.cat(grads, 1), logits[:, :100].softmax(1)
    assert losses == pytest.approx([-sum(loss for loss, _ in rows)] * n, rel=1e-12)
    assert not grad[::3].any() and not grad[:, 100:].any()
    for _, i in rows:
        want = softmax[i].index_add(0, target[i : i + 1], torch.tensor([-1.0], dtype=torch.float64))
        torch.testing.assert_close(grad[i, :100], want, rtol=0, atol=1e-12)


@family
def test_loss_at_the_start_is_that_of_a_guess(cfg):
    model, _, _ = built(cfg)
    x, y = Synthetic(cfg.vocab_size, cfg.seq_len, 5).batch(0, 64)
    with torch.no_grad():
        loss = model(x, y)[0].item() / y.numel()
    assert abs(loss - math.log(cfg.vocab_size)) < 0.02


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
        assert not p[p.used :].any(), name
        std = 0.02 / math.sqrt(2 * 3) if name.removesuffix(".weight").split(".")[-1] in ("wo", "w2") else 0.02
        for i, each in enumerate(p if p.ndim == 3 else [p[: p.used]]):  # each expert is a draw of its own
            z, near = each / std, 5 / math.sqrt(each.numel())  # five standard errors
            assert abs(z.mean()) < near and abs(z.square().mean() - 1) < 1.5 * near, (name, i)
            assert 0.02 < (z.abs() > 2).double().mean() < 0.07 and z.abs().max() > 2.5, f"{name}: not normal"
            draws.append(z.flatten()[:500])
        assert not torch.equal(p, q), name
    assert torch.stack(draws).corrcoef().fill_diagonal_(0).abs().max() < 0.3, "every matrix draws its own"


def parameter_shards(world, cfg):
    model, _, _ = train.build(cfg, make_mesh(world, cfg.tp, cfg.pp), cfg.vocab_size, world.device)
    world.everyone.barrier()  # a rank that left now would close connections that another one is still making
    return {n: (p.detach().clone().numpy(), p.offset) for n, p in model.named_parameters()}


@family
@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2), dict(zero=1)], ids=str)
def test_init_is_independent_of_the_layout(cfg, layout):
    """Bit for bit: every shard is a part of what one rank draws, and the shards cover all of it."""
    whole = dict(built(cfg)[0].named_parameters())
    seen = {n: torch.zeros(p.shape) for n, p in whole.items()}
    for rank in run_ranks(2, parameter_shards, dataclasses.replace(cfg, **layout)):
        for n, (shard, offset) in rank.items():
            cut = tuple(slice(o, o + s) for o, s in zip(offset, shard.shape, strict=True))
            assert torch.equal(whole[n][cut], torch.from_numpy(shard)), n
            seen[n][cut] = 1
    assert all(t.all() for t in seen.values())


# -----------------------------------------------------------------------------
# Attention

def test_rope_sees_relative_positions_only():
    D, T = 8, 40
    cos, sin = rope_cache(T, D, 10000.0, "cpu", torch.float64)
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, D, generator=rng, dtype=torch.float64).expand(1, 1, T, D) for _ in range(2))
    rq, rk = (rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))  # (1, 1, T, D)
    dots = (rq @ rk.transpose(-1, -2))[0, 0]  # (T, T): the same q at every row, the same k at every column
    for delta in range(-T + 1, T):
        diagonal = dots.diagonal(delta)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert (dots[0] - dots[0, 0]).abs().max() > 0.5, "and positions do matter"
    torch.testing.assert_close(rq.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(rq[0, 0, 0], q[0, 0, 0])  # position 0 is not turned
    # The oracle multiplies each pair (i, i + D/2), as a complex number, by exp(i * position * base^(-2i/D))
    z = torch.complex(q[..., : D // 2], q[..., D // 2 :])
    angle = torch.arange(T).double()[:, None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    turned = z * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rq, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("G", [1, 2])
def test_gqa_equals_full_attention_with_repeated_heads(G):
    """And both equal attention written out: softmax(q k^T / sqrt(D)) v under the causal mask."""
    H, D, T, B = 4, 4, 8, 3
    cfg = dataclasses.replace(FAMILIES["llama"], n_kv_head=G)
    torch.manual_seed(0)
    few, full = Attention(cfg, MESH), Attention(dataclasses.replace(cfg, n_kv_head=H), MESH)
    with torch.no_grad():
        for p in few.parameters():
            p.normal_(0, 0.5)
        for name in ("wq", "wo"):
            getattr(full, name).weight.copy_(getattr(few, name).weight)
        for name in ("wk", "wv"):  # head j of H uses key/value head j // (H/G)
            rows = getattr(few, name).weight.view(G, D, -1).repeat_interleave(H // G, dim=0)
            getattr(full, name).weight.copy_(rows.reshape(H * D, -1))
        x = torch.randn(B * T, cfg.n_embd)
        cos, sin = rope_cache(T, D, cfg.rope_base, "cpu", torch.float32)
        got, want = few(x, T, cos, sin), full(x, T, cos, sin)
        torch.testing.assert_close(got, want)
        q, k, v = (getattr(full, n)(x).view(B, T, H, D) for n in ("wq", "wk", "wv"))
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        score = q @ k.transpose(-1, -2) / math.sqrt(D)
        score = score.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        slow = full.wo((score.softmax(-1) @ v).transpose(1, 2).reshape(B * T, H * D))
        torch.testing.assert_close(got, slow)


@family
def test_the_future_is_not_seen(cfg):
    model = random_model(cfg)
    x = torch.randint(0, 100, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 5] = (x[0, 5] + 1) % 100
    with torch.no_grad():
        same = (model(x)[0] == model(changed)[0]).all(dim=1)
    assert same.tolist() == [True] * 5 + [False] * 3


# -----------------------------------------------------------------------------
# Schedule, bad gradients

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
    """... with the same weights, for every activation; and both what its function says."""
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

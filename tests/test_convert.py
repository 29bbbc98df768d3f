"""convert.py: models and tokenizers of Hugging Face, in and out, against transformers itself.

transformers computes norms, rotary positions and routers in fp32 whatever the model's dtype is. Inside Wide()
it computes them in fp64, so that logits and gradients can be compared to 1e-10.
"""
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from runs import go
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

import convert
import sample
from corpus import hugging_face

VOCAB, T = 100, 16


@pytest.fixture(scope="module")
def hf():
    """-> transformers, silent."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -r requirements-test.txt")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


class Wide(TorchFunctionMode):
    """Whatever asks for fp32 gets fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x):
            return torch.float64 if x is torch.float32 else x
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{k: widen(v) for k, v in (kwargs or {}).items()})


def tokens():
    """-> inputs and targets, (2, T) each."""
    ids = torch.randint(VOCAB, (2, T + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def close(a, b, what):
    scale = max(a.abs().max().item(), b.abs().max().item(), 1e-30)
    assert a.shape == b.shape and (a - b).abs().max().item() <= 1e-10 * scale, what


def theirs(hf, folder, out):
    """A directory of Hugging Face, run by transformers -> logits (2T, V), gradients by their names."""
    x, y = tokens()
    with Wide():
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
        logits = model.eval()(x).logits.flatten(0, 1)
        F.cross_entropy(logits, y.flatten(), reduction="sum").backward()
        for p in model.parameters():
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
        model.save_pretrained(out)
    return logits.detach(), load_file(out / "model.safetensors")


def ours(folder):
    """A run, or a directory of Hugging Face, by our model -> logits (2T, V), gradients by their names."""
    cfg, vocab_size, weights, _, _ = convert.read_run(folder)
    cfg = dataclasses.replace(cfg, dtype="fp64", dropout=0.0, capacity_factor=0.0)
    torch.set_default_dtype(torch.float64)
    try:
        model = sample.load_model(cfg, vocab_size, weights).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    x, y = tokens()
    logits = model(x)[0][:, :vocab_size]
    model(x, y)[0].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}

    class Gradients:
        def fill(self, name, out, full, offset):
            out.copy_(grads[name][tuple(slice(o, o + s) for o, s in zip(offset, out.shape, strict=True))])
    layout = convert.tensors(cfg, hugging_face.family_of(cfg), vocab_size)
    return logits.detach(), {
        name: convert.read_whole(Gradients(), grads, transposed, parts, torch.float64)
        for name, (transposed, parts) in layout.items() if parts[0].name in grads}


def assert_same_function(hf, theirs_at, ours_at, out, zeros=()):
    """Logits and gradients of both are equal, none is missing. zeros: names that only theirs has."""
    (a, grads), (b, own) = theirs(hf, theirs_at, out), ours(ours_at)
    close(a, b, "logits")
    left = {name for name in grads.keys() - own.keys() if not any(z in name for z in zeros)}
    assert left <= {"lm_head.weight"} and not own.keys() - grads.keys(), left
    for name, g in own.items():
        close(grads[name], g, name)


# -----------------------------------------------------------------------------
# out: checkpoints of any layout

GPT2 = ["--norm=layer", "--mlp=gelu", "--pos=learned", "--n-kv-head=2", "--tied"]
MOE = ["--n-experts=4", "--top-k=2"]
OUT = {  # name: (ranks, flags, what theirs has and ours has not)
    "llama, tp 2 pp 2": (4, ["--tp=2", "--pp=2", "--norm-eps=1e-3", "--rope-base=500"], ()),
    "llama tied with biases, zero 3": (2, ["--zero=3", "--tied", "--bias"], ()),
    "gpt2, tp 2": (2, [*GPT2, "--bias", "--tp=2", "--norm-eps=1e-4"], ()),
    "gpt2 without biases": (1, GPT2, ("bias",)),
    "mixtral, ep 2": (2, [*MOE, "--router=softmax-topk", "--ep=2"], ()),
    "glm, ep 2": (2, [*MOE, "--router=sigmoid", "--router-bias-rate=0.2", "--n-shared-experts=2", "--ep=2"],
                  ("correction_bias",)),
    "glm, top 1": (1, ["--n-experts=3", "--top-k=1", "--router=sigmoid"], ("correction_bias", "shared")),
    "qwen": (1, [*MOE, "--capacity-factor=1"], ("shared",)),
}


@pytest.mark.parametrize("name", OUT)
def test_an_exported_run_is_the_same_function(name, hf, tmp_path):
    ranks, flags, zeros = OUT[name]
    go(ranks, tmp_path / "run", "--steps=2", "--save-every=2", "--lr=0.3", *flags)
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--dtype=fp64"])
    assert_same_function(hf, tmp_path / "hf", tmp_path / "run", tmp_path / "grads", zeros)


# -----------------------------------------------------------------------------
# in: models that transformers made

SHAPE = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, max_position_embeddings=32, vocab_size=VOCAB, initializer_range=0.3)
EXPERTS = dict(num_experts_per_tok=2, rms_norm_eps=1e-5)
IN = {  # name: (class of its config, values)
    "llama tied": ("LlamaConfig", dict(SHAPE, tie_word_embeddings=True, rms_norm_eps=1e-3,
                                       rope_parameters={"rope_type": "default", "rope_theta": 300.0})),
    "llama biases": ("LlamaConfig", dict(SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral": ("MistralConfig", dict(SHAPE, sliding_window=32)),
    "gpt2": ("GPT2Config", dict(n_layer=2, n_embd=16, n_head=4, n_positions=32, vocab_size=VOCAB, n_inner=24,
                                initializer_range=0.3, layer_norm_epsilon=1e-4)),
    "gpt2 untied": ("GPT2Config", dict(n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=VOCAB,
                                       tie_word_embeddings=False, activation_function="gelu_pytorch_tanh")),
    "mixtral": ("MixtralConfig", dict(SHAPE, **EXPERTS, num_local_experts=4)),
    "glm": ("Glm4MoeConfig", dict(SHAPE, **EXPERTS, moe_intermediate_size=8, n_routed_experts=4,
                                  n_shared_experts=2, first_k_dense_replace=0, num_nextn_predict_layers=0,
                                  rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                   "partial_rotary_factor": 1.0})),
}


def make(hf, name, folder, **change):
    """A random model of IN, written by transformers; norms and biases are drawn, too -> folder."""
    kind, values = IN[name]
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, kind)(**{**values, **change}))
    for p in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
        if p.ndim == 1:
            p.data += 0.3 * torch.randn_like(p)
    model.save_pretrained(folder)
    return folder


def test_every_tensor_keeps_its_type(hf, tmp_path):
    """The bias of a router stays fp32 in a model in bf16."""
    there = make(hf, "glm", tmp_path / "there", dtype=torch.bfloat16)
    convert.main(["import", str(there), "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["dtype"] == "bf16"
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--dtype=bf16"])
    same_bytes(there, tmp_path / "back")
    assert {t.dtype for t in load_file(tmp_path / "back/model.safetensors").values()} == {
        torch.bfloat16, torch.float32}


def same_bytes(a, b):
    """Two directories have the same tensors: names, types, shapes, bits."""
    x, y = ({k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
            for folder in (a, b))
    assert x.keys() == y.keys() and len(x) > 5
    for name in x:
        assert x[name].dtype == y[name].dtype and torch.equal(x[name], y[name]), name


@pytest.mark.parametrize("name", IN)
def test_an_imported_model_is_the_same_function_and_exports_the_same_bytes(name, hf, tmp_path):
    there = make(hf, name, tmp_path / "there")
    convert.main(["import", str(there), "--out", str(tmp_path / "run")])
    assert_same_function(hf, there, tmp_path / "run", tmp_path / "grads", ("correction_bias",))
    convert.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "back"), "--shard-gb=1e-5"])
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    same_bytes(there, tmp_path / "back")

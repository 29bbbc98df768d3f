"""convert.py gguf: the file that it writes, read back by PyPI's gguf; what cannot be written is refused.

test_gguf_long.py runs such files in llama.cpp.
"""
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import TINY, final, go, refused

import convert
import prepare
from config import Config
from corpus import chat, tokenizer
from hub import families
from hub import gguf as gguf_file
from interface.command_line import parse

NO_VOCAB = [f for f in TINY if "vocab" not in f]
GPT2 = ["--norm=layer", "--mlp=gelu", "--pos=learned", "--n-kv-head=2"]
GEMMA3 = ["--norm=rms1p", "--mlp=geglu", "--norm-place=both", "--qk-norm=head", "--embed-scale", "--tied",
          "--rope-base=500"]
MODELS = {  # name: (its flags, llama.cpp's architecture)
    "llama": (["--n-head=4", "--n-kv-head=2", "--rope-base=500", "--norm-eps=1e-3"], "llama"),
    "llama tied with biases": (["--n-head=2", "--n-kv-head=2", "--tied", "--bias"], "llama"),
    "gpt2": ([*GPT2, "--tied"], "gpt2"),
    "qwen2": (["--n-head=4", "--n-kv-head=2", "--qkv-bias"], "qwen2"),
    "qwen3, tied": (["--n-head=4", "--n-kv-head=2", "--qk-norm=head", "--tied", "--rope-base=500"], "qwen3"),
    "mixtral": (["--n-experts=3", "--router=softmax-topk"], "llama"),
    "glm": (["--n-experts=4", "--router=sigmoid", "--router-bias-rate=0.1", "--n-shared-experts=2"],
            "glm4moe"),
    "glm, top 1": (["--n-experts=3", "--router=sigmoid", "--top-k=1"], "glm4moe"),
    "qwen3 moe": (["--n-experts=4", "--router=softmax-topk", "--qk-norm=head", "--head-dim=16"], "qwen3moe"),
    "olmo2": (["--qk-norm=all", "--norm-place=after"], "olmo2"),
    "smollm3": (["--no-rope-every=4", "--n-layer=4", "--tied"], "smollm3"),
    "gemma3": ([*GEMMA3, "--window=4", "--full-every=2", "--window-rope-base=20"], "gemma3"),
    "gemma3, all windows, untied": ([*GEMMA3, "--window=5", "--no-tied", "--head-dim=16"], "gemma3"),
    "gemma3, no window": (GEMMA3, "gemma3"),
}
ENUM = {"glm4moe": "GLM4_MOE"}  # gguf.MODEL_ARCH has it under another name


@pytest.fixture(scope="module")
def gguf():
    return pytest.importorskip("gguf", reason="gguf is not installed: pip install -r requirements-test.txt")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a folder with text/, byte pairs of this file."""
    folder = tmp_path_factory.mktemp("gguf")
    source = Path(__file__).read_text()
    (folder / "text.txt").write_text("\n\n".join([source.replace("\n\n", "\n")] * 3))
    prepare.main([f"{folder}/text.txt", "--name=text", f"--out={folder}", "--vocab-size=400", "--workers=1",
                  "--val-fraction=0.4"])
    return folder


def train(folder, data, *flags, steps=2):
    """Train a tiny model with large steps; return its folder."""
    go(1, folder, f"--data={data}", f"--steps={steps}", f"--save-every={steps}", "--lr=0.03", *flags,
       base=NO_VOCAB)
    return folder


def read(gguf, path):
    """Return {key: value} and {tensor: (type, values in our order of dimensions)} of a GGUF file."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    found = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = tensor.data
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            values = gguf.dequantize(values, tensor.tensor_type)
        found[tensor.name] = tensor.tensor_type.name, np.asarray(values).reshape(shape)
    return keys, found


def unpaired(rows, heads):
    """The rows of a query or key matrix as ours has them: row 2i of a head is row i, 2i + 1 is i + D/2."""
    D = len(rows) // heads
    out = np.empty_like(rows)
    for row in range(len(rows)):
        head, i = divmod(row, D)
        out[head * D + i // 2 + i % 2 * (D // 2)] = rows[row]
    return out


def expected_keys(architecture, cfg):
    """Return the keys that say what the model computes, {key: value}."""
    keys = {"context_length": cfg.seq_len, "embedding_length": cfg.n_embd, "block_count": cfg.n_layer,
            "feed_forward_length": cfg.ffn_hidden, "attention.head_count": cfg.n_head,
            "attention.head_count_kv": cfg.n_kv_head}
    if architecture != "gpt2":
        keys |= {"rope.freq_base": cfg.rope_base,
                 "attention.layer_norm_rms_epsilon": np.float32(cfg.norm_eps)}
    if cfg.head_dim:
        keys["attention.key_length"] = cfg.head_dim
    if cfg.window:
        keys |= {"attention.sliding_window": cfg.window, "attention.sliding_window_pattern": cfg.full_every,
                 "rope.freq_base_swa": cfg.window_rope_base or cfg.rope_base}
    if cfg.n_experts:
        keys |= {"expert_count": cfg.n_experts, "expert_used_count": cfg.top_k}
    if architecture == "glm4moe":  # 2: sigmoid
        keys |= {"expert_shared_count": cfg.n_shared_experts or 1, "leading_dense_block_count": 0,
                 "expert_gating_func": 2, "expert_weights_norm": cfg.top_k > 1, "expert_weights_scale": 1}
    return keys


# -----------------------------------------------------------------------------
# The file

@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_and_key_is_there(name, gguf, text, tmp_path):
    """Names and shapes are those that the package gguf lists for the architecture; values are the run's."""
    flags, architecture = MODELS[name]
    run = train(tmp_path / "run", text / "text", *flags)
    convert.main(["gguf", f"{run}/step_000002", f"--out={tmp_path}/m.gguf"])
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "run"]
    keys, tensors = read(gguf, tmp_path / "m.gguf")
    cfg, vocab_size, _, _, _ = convert.read_run(run)
    kind = families.family_of(cfg)

    assert keys["general.architecture"] == architecture
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH[ENUM.get(architecture, architecture.upper())]]
    possible = {gguf.TENSOR_NAMES[kind].format(bid=i) for kind in known for i in range(cfg.n_layer)}
    assert {tensor.removesuffix(".weight").removesuffix(".bias") for tensor in tensors} <= possible

    ours = {name: values.numpy() for name, values in final(run, 2)[0].items() if "/" not in name}
    full = convert.full_config(cfg, kind)
    for theirs, made_of in gguf_file.read_from(None, full, kind, vocab_size, "fp32").items():
        dtype, have = tensors.pop(theirs)
        want = np.concatenate([ours.pop(part.name, np.zeros(part.full, np.float32))[:part.size[0]]
                               for part in made_of.parts])
        pairs = architecture in ("llama", "smollm3")
        if pairs and "attn_q." in theirs:
            have = unpaired(have, cfg.n_head)
        elif pairs and "attn_k." in theirs:
            have = unpaired(have, cfg.n_kv_head)
        if architecture == "gemma3" and "norm" in theirs:
            want = want + np.float32(1)
        assert dtype == "F32"
        np.testing.assert_array_equal(have, want, theirs)
    assert not tensors and not ours

    want = expected_keys(architecture, cfg)
    everything = expected_keys("glm4moe", Config(window=4, head_dim=8, n_experts=2))
    possible = {f"{architecture}.{key}" for key in everything}
    assert keys.keys() & possible == {f"{architecture}.{key}" for key in want}
    assert all(keys[f"{architecture}.{key}"] == value for key, value in want.items())
    vocabulary = tokenizer.load(run)
    assert len(keys["tokenizer.ggml.tokens"]) == vocab_size and keys["tokenizer.ggml.pre"] == "llama-bpe"
    assert keys["tokenizer.ggml.eos_token_id"] == vocabulary.eod and keys["general.file_type"] == 0


@pytest.mark.parametrize("dtype,name,number", [("fp16", "F16", 1), ("bf16", "BF16", 32)])
def test_matrices_are_rounded_and_vectors_are_not(dtype, name, number, gguf, text, tmp_path):
    run = train(tmp_path / "run", text / "text", "--n-experts=2", "--router=softmax-topk")
    for how in dtype, "fp32":
        convert.main(["gguf", str(run), f"--out={tmp_path}/{how}.gguf", f"--dtype={how}"])
    keys, rounded = read(gguf, tmp_path / f"{dtype}.gguf")
    _, exact = read(gguf, tmp_path / "fp32.gguf")
    assert keys["general.file_type"] == number and rounded.keys() == exact.keys()
    for tensor, (kind, values) in rounded.items():
        want = torch.tensor(exact[tensor][1])
        if values.ndim > 1 and "ffn_gate_inp" not in tensor:
            assert kind == name, tensor
            want = want.to({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]).float()
        assert torch.equal(torch.tensor(values.astype(np.float32)), want), tensor


def tokenizer_keys(vocabulary, vocab_size):
    """Return {key: value} that GGUFWriter was given for a tokenizer."""
    from gguf import GGUFWriter
    writer = GGUFWriter(None, "llama")
    gguf_file.add_tokenizer(writer, vocabulary, vocab_size)
    return {key: value.value for key, value in writer.kv_data[0].items()}


def test_tokens_of_conversations_and_unused_ids(gguf, tmp_path):
    """Special tokens are found in no text; ids without a token have a name that no token has."""
    pattern, ranks = tokenizer.PATTERN, {bytes([b]): b for b in range(256)}
    made = tokenizer.BpeTokenizer.make("own", pattern, {**ranks, b"ab": 300}, {tokenizer.EOD: 310})
    vocabulary = made.with_special(chat.MARKERS)
    keys = tokenizer_keys(vocabulary, 320)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(set(tokens)) == len(types) == 320
    assert (tokens[300], types[300], keys["tokenizer.ggml.merges"]) == ("ab", gguf.TokenType.NORMAL, ["a b"])
    for token, i in vocabulary.special.items():
        assert (tokens[i], types[i]) == (token, gguf.TokenType.CONTROL)
    assert {types[i] for i in (256, 299, 301, 319)} == {gguf.TokenType.UNUSED}
    assert tokens[32] == "\u0120" and tokens[10] == "\u010a"
    for name, i in {"bos": 310, "eos": 310, "padding": 310, "eot": vocabulary.special[chat.END]}.items():
        assert keys[f"tokenizer.ggml.{name}_token_id"] == i
    assert "<|assistant|>" in keys["tokenizer.chat_template"]
    assert "tokenizer.chat_template" not in tokenizer_keys(made, 320)


# -----------------------------------------------------------------------------
# How a text is cut into words

def test_the_patterns_are_tiktokens(monkeypatch):
    from tiktoken_ext import openai_public
    for function in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, function, lambda *_, **__: {})
    patterns = {name: getattr(openai_public, name)()["pat_str"]
                for name in ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")}
    assert {patterns[name] for name in ("gpt2", "r50k_base", "p50k_base")} == {gguf_file.GPT2_PATTERN}
    assert patterns["cl100k_base"] == tokenizer.PATTERN
    assert patterns["o200k_base"] not in gguf_file.PRE_TOKENIZERS


# -----------------------------------------------------------------------------
# Refused, in one line

def test_what_llama_cpp_has_not_is_refused(gguf, text, tmp_path, monkeypatch):
    out = f"--out={tmp_path}/m.gguf"
    run = train(tmp_path / "run", text / "text")
    refused(convert.main, ["gguf", run, out, "--dtype=fp64"], "--dtype fp64", "fp16")
    (run / "tokenizer.json").unlink()
    refused(convert.main, ["gguf", run, out], "holds no tokenizer.json")
    tokenizer.train_char(["abc"]).save(run / "tokenizer.json")
    refused(convert.main, ["gguf", run, out], "this tokenizer, char", "bpe")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(convert.main, ["gguf", run, out], "pip install gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("flags,word", [
    (["--n-experts=2"], "the family qwen2_moe"),
    ([*GPT2[:3], "--n-kv-head=4", "--objective=mlm"], "the family megatron-bert"),
    (["--qkv-bias", "--window=4"], "--window"), (["--head-dim=8", "--qkv-bias"], "--head-dim"),
    (["--rope-scaling", "4", "0.5", "2", "16"], "--rope-scaling"),
    (["--no-rope-every=2"], "--no-rope-every other than 4"),
    (["--qk-norm=all", "--norm-place=after", "--tied"], "--tied with --qk-norm all"),
    (["--n-experts=2", "--qk-norm=head"], "--router softmax with --qk-norm head"),
    ([*GEMMA3, "--n-layer=62"], "a Gemma 3 of 62 layers")])
def test_a_model_that_llama_cpp_has_not_is_refused(flags, word, gguf):
    cfg = parse(["tiny", *flags])
    with pytest.raises(ValueError, match=word):
        gguf_file.open_writer(None, cfg, families.family_of(cfg))


def test_a_weight_that_fp16_cannot_hold_is_refused_and_leaves_nothing(gguf, text, tmp_path, monkeypatch):
    run = train(tmp_path / "run", text / "text")
    with monkeypatch.context() as planted:
        planted.setattr(gguf_file, "pair_rows", lambda rows, heads: (rows.float() + 1e5).to(rows.dtype))
        refused(convert.main, ["gguf", run, f"--out={tmp_path}/m.gguf", "--dtype=fp16"],
                "attn_q.weight", "--dtype fp32")
    assert os.listdir(tmp_path) == ["run"]
    convert.main(["gguf", str(run), f"--out={tmp_path}/m.gguf", "--dtype=fp16"])
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "run"]


def test_rows_of_a_head_are_paired_as_llama_cpp_turns_them():
    rows = torch.arange(2 * 4 * 3).reshape(8, 3)  # 2 heads of 4 rows
    assert gguf_file.pair_rows(rows, 2)[:, 0].div(3).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_file.pair_rows(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

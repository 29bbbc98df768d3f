"""A model of ours as one GGUF file, the format of llama.cpp, for convert.py gguf.

    Gguf             an architecture of llama.cpp: its name, and its names of our tensors
    model_keys       the numbers of the model, as llama.cpp calls them
    tokenizer_keys   the tokenizer: tokens, merges, how a text is cut into words
    write            writes them and the tensors, by PyPI's package gguf

llama.cpp knows ways to cut a text by name, not by pattern. PRE_TOKENIZERS has the names of those that cut as
a pattern of ours does.
"""
import errno
import os
import re
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from config import head_width
from corpus import chat, tokenizer_json
from corpus.tokenizer import PATTERN

FILE_TYPES = {"fp32": 0, "fp16": 1, "bf16": 32}  # {--dtype: general.file_type}
NORMAL = 1  # types of tokens
CONTROL = 3  # is not found in a text
UNUSED = 5


class Gguf(NamedTuple):
    """An architecture of llama.cpp. names: {our module or parameter: its}."""
    architecture: str
    names: dict
    pairs_rows: bool = False  # rotary positions turn the rows (2i, 2i + 1) of a head


# -----------------------------------------------------------------------------
# Tensors

BLOCK_NAMES = {
    "blocks": "blk",
    "wte": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "attn.wo": "attn_output",
}
ATTENTION_NAMES = {"attn.wq": "attn_q", "attn.wk": "attn_k", "attn.wv": "attn_v"}
EXPERT_NAMES = {
    "moe.router": "ffn_gate_inp",
    "moe.w1": "ffn_gate_exps",
    "moe.w3": "ffn_up_exps",
    "moe.w2": "ffn_down_exps",
}

LLAMA = Gguf(
    architecture="llama",
    names={
        **BLOCK_NAMES,
        **ATTENTION_NAMES,
        **EXPERT_NAMES,
        "mlp.w1": "ffn_gate",
        "mlp.w3": "ffn_up",
        "mlp.w2": "ffn_down",
    },
    pairs_rows=True)

GPT2 = Gguf(
    architecture="gpt2",
    names={
        **BLOCK_NAMES,
        "wpe": "position_embd",
        "attn.wq": "attn_qkv",
        "attn.wk": "attn_qkv",
        "attn.wv": "attn_qkv",
        "mlp.w1": "ffn_up",
        "mlp.w2": "ffn_down",
    })

GLM4_MOE = Gguf(
    architecture="glm4moe",
    names={
        **BLOCK_NAMES,
        **ATTENTION_NAMES,
        **EXPERT_NAMES,
        "norm2": "post_attention_norm",
        "moe.router.bias": "exp_probs_b.bias",
        "moe.shared.w1": "ffn_gate_shexp",
        "moe.shared.w3": "ffn_up_shexp",
        "moe.shared.w2": "ffn_down_shexp",
    })

DENSE_NAMES = {name: LLAMA.names[name] for name in LLAMA.names if not name.startswith("moe.")}
QWEN2 = Gguf(architecture="qwen2", names=DENSE_NAMES)
QWEN3 = Gguf(
    architecture="qwen3",
    names={**DENSE_NAMES, "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"})

# {family of transformers: Gguf}
KINDS = {"llama": LLAMA, "mixtral": LLAMA, "gpt2": GPT2, "glm4_moe": GLM4_MOE, "qwen2": QWEN2, "qwen3": QWEN3}
# llama.cpp computes these families and flags. This file does not write them.
UNWRITTEN = ("qwen3_moe", "olmo2", "smollm3", "gemma3_text")
UNWRITTEN_FLAGS = ("head_dim", "rope_scaling", "window")  # a mistral has --window
OWN_KINDS = {"bpe": "byte pairs of prepare.py", "char": "characters"}
REFUSED = {
    "qwen2_moe": "llama.cpp divides by the gate of the shared expert, which --router softmax has not; "
                 "--router softmax-topk and sigmoid can be written",
    "megatron-bert": "llama.cpp has no BERT with its norms before attention and MLP, as --objective mlm has",
}


def of_family(kind):
    """Return the Gguf of a family of transformers. ValueError: llama.cpp does not compute it."""
    if kind not in KINDS:
        raise ValueError(f"no GGUF for this model: {REFUSED[kind]}")
    return KINDS[kind]


def check_written(cfg, kind, vocabulary):
    """Raise ValueError if the model has a part that llama.cpp computes and that this file does not write."""
    parts = [f"--{flag.replace('_', '-')}" for flag in UNWRITTEN_FLAGS if getattr(cfg, flag)]
    if kind in UNWRITTEN:
        parts.append(f"the family {kind}")
    if parts:
        raise ValueError(f"no GGUF for this model: {' and '.join(parts)} cannot be written; "
                         f"{other_way(vocabulary)}")


def other_way(vocabulary):
    """Return words on llama.cpp's own program, which writes more models and knows fewer tokenizers."""
    if vocabulary.kind == "hf":
        return ("export it, and take llama.cpp's own convert_hf_to_gguf.py, which knows the tokenizers of "
                "released models")
    if vocabulary.kind in OWN_KINDS:
        return (f"with the tokenizer of this run, {OWN_KINDS[vocabulary.kind]}, there is no other way yet: "
                "llama.cpp's own convert_hf_to_gguf.py writes more models, but does not know this tokenizer")
    return ("export it, and try llama.cpp's own convert_hf_to_gguf.py; whether it knows the tokenizer of "
            f"this run, {vocabulary.kind}, was not tried")


def stays_wide(name, shape):
    """Whether a tensor is in fp32 in every file, as in llama.cpp's own: vectors, routers, positions."""
    return len(shape) == 1 or name.endswith("ffn_gate_inp.weight") or name == "position_embd.weight"


def pair_rows(tensor, heads):
    """Return the rows of a query or key matrix, (heads * D, C), or of its bias, in llama.cpp's order.

    Our positions turn the rows i and i + D/2 of a head together. llama.cpp expects them side by side.
    """
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])  # (heads, 2, D/2, C)
    return halves.transpose(1, 2).reshape(tensor.shape)


# -----------------------------------------------------------------------------
# Keys

def model_keys(cfg, kind, vocab_size, name, dtype):
    """Return the keys that say what the model computes, {key: value}, without the architecture."""
    architecture = KINDS[kind].architecture
    sizes = {
        "context_length": cfg.seq_len,
        "embedding_length": cfg.n_embd,
        "block_count": cfg.n_layer,
        "feed_forward_length": cfg.ffn_hidden,
        "vocab_size": vocab_size,
        "attention.head_count": cfg.n_head,
        "attention.head_count_kv": cfg.n_kv_head,
    }
    if cfg.pos == "rope":
        sizes["rope.dimension_count"] = head_width(cfg)
        sizes["rope.freq_base"] = float(cfg.rope_base)
    norm = "layer_norm_rms_epsilon" if cfg.norm == "rms" else "layer_norm_epsilon"
    sizes[f"attention.{norm}"] = float(cfg.norm_eps)
    if cfg.n_experts:
        sizes["expert_count"] = cfg.n_experts
        sizes["expert_used_count"] = cfg.top_k
    if kind == "glm4_moe":
        sizes["expert_feed_forward_length"] = cfg.ffn_hidden
        sizes["expert_shared_count"] = cfg.n_shared_experts
        sizes["leading_dense_block_count"] = 0
        sizes["expert_gating_func"] = 2  # sigmoid
        sizes["expert_weights_norm"] = cfg.top_k > 1
        sizes["expert_weights_scale"] = 1.0
    own = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return {"general.name": name, "general.file_type": FILE_TYPES[dtype], **own}


def tokenizer_keys(vocabulary, vocab_size):
    """Return the keys of a tokenizer of ours, {key: value}. vocab_size: rows of the embedding.

    ValueError: llama.cpp has no such tokenizer.
    """
    pre_tokenizer = name_of_pattern(vocabulary)
    model = tokenizer_json.byte_pairs(vocabulary)
    if pre_tokenizer == "gpt-2" and len(model["merges"]) < len(vocabulary.encoding._mergeable_ranks) - 256:
        raise ValueError("no GGUF for this tokenizer: some of its tokens come from no merge, and llama.cpp's "
                         "gpt-2 knows no others")
    names = {i: token for token, i in model["vocab"].items()}
    if len(names) < len(vocabulary.ids):
        raise ValueError("no GGUF for this tokenizer: a token has the characters of a special token")

    tokens = []
    types = []
    for i in range(vocab_size):
        tokens.append(names.get(i, f"<unused {i}>"))  # no token of bytes has a space in its name
        types.append(NORMAL if i in names else UNUSED)
    for i in vocabulary.special.values():
        types[i] = CONTROL
    keys = {
        "model": "gpt2",
        "pre": pre_tokenizer,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": vocabulary.eod,
        "eos_token_id": vocabulary.eod,
        "padding_token_id": vocabulary.eod,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    if chat.END in vocabulary.special:
        keys["eot_token_id"] = vocabulary.special[chat.END]
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if set(chat.MARKERS) <= vocabulary.special.keys():
        begin = vocabulary.decode(chat.Template(vocabulary).begin)
        named["tokenizer.chat_template"] = tokenizer_json.jinja(begin)
    return named


# -----------------------------------------------------------------------------
# How a text is cut into words

# The encodings gpt2, r50k_base and p50k_base of tiktoken have this pattern.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PRE_TOKENIZERS = {PATTERN: "llama-bpe", GPT2_PATTERN: "gpt-2"}

# PATTERN and llama-bpe differ in two places. PATTERN takes all blanks at the end of a text as one word;
# llama-bpe ends a word at the last line break among them. After an apostrophe PATTERN takes the long s for an
# s; llama-bpe takes it for the first letter of a word. It makes a difference only if a token crosses such a
# place.
BLANK = (rb"[\t\x0b\x0c ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f"
         rb"|\xe3\x80\x80")
PART_OF_BLANK = rb"\xc2|\xe1\x9a?|\xe2[\x80\x81]?|\xe3\x80?"
CROSSES_END = re.compile(rb"[\s\S]*[\r\n](?:(?:" + BLANK + rb")+(?:" + PART_OF_BLANK + rb")?|" + PART_OF_BLANK
                         + rb")")
CROSSES_LONG_S = re.compile(rb"'?(?:\xc5\xbf|\xbf)[A-Za-z\xc2-\xf4][\s\S]*")


def name_of_pattern(vocabulary):
    """Return llama.cpp's name for how a tokenizer cuts a text. ValueError: it has none."""
    if vocabulary.kind == "hf":
        raise ValueError("no GGUF for a tokenizer of Hugging Face: llama.cpp's own convert_hf_to_gguf.py "
                         "knows those of released models; run it on what convert.py export writes")
    if vocabulary.kind == "char":
        raise ValueError("no GGUF for a tokenizer of characters: llama.cpp has none; prepare the data with "
                         "--tokenizer bpe")
    pattern = vocabulary.spec["pattern"]
    if pattern not in PRE_TOKENIZERS:
        raise ValueError("no GGUF for this tokenizer: llama.cpp cuts no text by its pattern, "
                         f"{pattern[:40]!r}; it knows those of --tokenizer bpe, gpt2 and cl100k_base")
    return PRE_TOKENIZERS[pattern]


def different_texts(vocabulary):
    """Return a line that says which texts have other tokens in llama.cpp, or "" where none has."""
    if name_of_pattern(vocabulary) != "llama-bpe":
        return ""
    tokens = vocabulary.encoding._mergeable_ranks
    kinds = {"end with a line break and blanks": CROSSES_END,
             "have a long s after an apostrophe": CROSSES_LONG_S}
    said = []
    for which, pattern in kinds.items():
        token = next((token for token in tokens if pattern.fullmatch(token)), None)
        if token is not None:
            said.append(f"{which} (by the token {token!r})")
    if not said:
        return ""
    return (f"note: in llama.cpp texts may have other tokens that {' or '.join(said)}; all other texts have "
            "the same\n")


# -----------------------------------------------------------------------------
# The file

def open_writer(path, architecture):
    """Return the writer of the package gguf. FileNotFoundError: the package is not installed."""
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise FileNotFoundError("convert.py gguf needs: pip install gguf") from None
    return GGUFWriter(path, architecture)


def write(writer, keys, tensors):
    """Write the file. keys: {key: value}; tensors: {name: convert.Lazy}, each read when it is written."""
    import torch
    from gguf import GGMLQuantizationType
    types = {torch.float32: GGMLQuantizationType.F32, torch.float16: GGMLQuantizationType.F16,
             torch.bfloat16: GGMLQuantizationType.BF16}
    for key, value in keys.items():
        add_key(writer, key, value)
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, types[tensor.dtype])
    try:
        write_data(writer, tensors)
    except BaseException:
        with suppress(OSError):  # the first error is told
            writer.close()
        raise
    writer.close()


def write_data(writer, tensors):
    """Write what was announced to the writer, and the tensors. ValueError: one is not finite."""
    import torch
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        values = tensor.detach().contiguous()
        if not values.isfinite().all():
            raise ValueError(f"{name} has values that are not finite in this --dtype; try --dtype fp32")
        try:
            writer.write_tensor_data(values.view(torch.uint8).numpy())
        except OSError as e:  # numpy's tofile says how much was written, and not why
            if e.errno is None:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {e}") from None
            raise


def add_key(writer, key, value):
    """Add a key with the type that llama.cpp expects of it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

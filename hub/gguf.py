"""A model of ours as one GGUF file, the format of llama.cpp, by PyPI's package gguf: it knows the names."""
from config import head_width
from corpus import chat
from corpus.text import require
from corpus.tokenizer import PATTERN
from hub import tokenizer
from hub.weights import Lazy, named_parts

FILE_TYPES = {"fp32": 0, "fp16": 1, "bf16": 32}  # {--dtype: general.file_type}
ARCHITECTURES = {  # {family of transformers: a name in gguf.MODEL_ARCH}
    "llama": "LLAMA", "mixtral": "LLAMA", "gpt2": "GPT2", "glm4_moe": "GLM4_MOE", "qwen2": "QWEN2",
    "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "olmo2": "OLMO2", "smollm3": "SMOLLM3",
    "gemma3_text": "GEMMA3"}
PAIRS_ROWS = ("llama", "mixtral", "smollm3")  # there, rotary positions turn the rows (2i, 2i + 1) of a head
FREE_HEAD_DIM = ("llama", "qwen3", "qwen3_moe", "smollm3", "gemma3_text")

# llama.cpp knows ways to cut a text into words by name. tiktoken's gpt2 and r50k_base have the second one.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PRE_TOKENIZERS = {PATTERN: "llama-bpe", GPT2_PATTERN: "gpt-2"}


def open_writer(path, cfg, kind):
    """Return a GGUFWriter. ValueError: llama.cpp computes no such model, or gguf is not installed."""
    gguf = require("gguf", "convert.py gguf")
    refused = {
        f"the family {kind}": kind not in ARCHITECTURES,
        "--rope-scaling": bool(cfg.rope_scaling),
        "--window": cfg.window and kind != "gemma3_text",
        "--head-dim": cfg.head_dim and kind not in FREE_HEAD_DIM,
        "a --no-rope-every other than 4": kind == "smollm3" and cfg.no_rope_every != 4,
        "--tied with --qk-norm all": kind == "olmo2" and cfg.tied,
        "--router softmax with --qk-norm head": kind == "qwen3_moe" and cfg.router == "softmax",
        "a Gemma 3 of 62 layers": kind == "gemma3_text" and cfg.n_layer == 62,  # scores are scaled otherwise
    }
    for part, is_there in refused.items():
        if is_there:
            raise ValueError(f"no GGUF for this model: llama.cpp computes something else for {part}; "
                             "convert.py export writes it for transformers")
    return gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[kind]]])


def pair_rows(tensor, heads):
    """Put the rows i and i + D/2 of each head of a query or key matrix, or its bias, side by side."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])  # (heads, 2, D/2, C)
    return halves.transpose(1, 2).reshape(tensor.shape)


def read_from(weights, cfg, kind, vocab_size, dtype):
    """Return {llama.cpp's name: Lazy}, read from a Reader of our weights."""
    import gguf

    from model import DTYPES
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[kind]], cfg.n_layer)
    tensors = {}
    for theirs, part in named_parts(cfg, kind, vocab_size):
        # All experts are one tensor there, under the name of one without its number.
        theirs = theirs.replace(".{}", "").replace("e_score_correction_bias", "e_score_correction.bias")
        name = table.get_name(theirs, (".weight", ".bias"))
        # In fp32 in every file, as in llama.cpp's own: vectors, routers, positions.
        is_wide = len(part.size) == 1 or name.endswith(("ffn_gate_inp.weight", "position_embd.weight"))
        new = Lazy([], weights=weights, dtype=DTYPES["fp32" if is_wide else dtype])
        tensors.setdefault(name, new).parts.append(part)
    return tensors


def add_model(writer, cfg, kind, vocab_size, dtype):
    from gguf import ExpertGatingFuncType
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_context_length(cfg.seq_len)
    writer.add_embedding_length(cfg.n_embd)
    writer.add_block_count(cfg.n_layer)
    writer.add_feed_forward_length(cfg.ffn_hidden)
    writer.add_vocab_size(vocab_size)
    writer.add_head_count(cfg.n_head)
    writer.add_head_count_kv(cfg.n_kv_head)
    if cfg.pos == "rope":
        writer.add_rope_dimension_count(head_width(cfg))
        writer.add_rope_freq_base(float(cfg.rope_base))
    if cfg.head_dim:
        writer.add_key_length(cfg.head_dim)
        writer.add_value_length(cfg.head_dim)
    if cfg.norm == "layer":
        writer.add_layer_norm_eps(float(cfg.norm_eps))
    else:
        writer.add_layer_norm_rms_eps(float(cfg.norm_eps))
    if cfg.window:
        writer.add_sliding_window(cfg.window)
        writer.add_sliding_window_pattern(cfg.full_every)  # 0: every layer has it
        writer.add_rope_freq_base_swa(float(cfg.window_rope_base or cfg.rope_base))
    if cfg.n_experts:
        writer.add_expert_count(cfg.n_experts)
        writer.add_expert_used_count(cfg.top_k)
    if kind in ("glm4_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(cfg.ffn_hidden)
    if kind == "glm4_moe":
        writer.add_expert_shared_count(cfg.n_shared_experts)
        writer.add_leading_dense_block_count(0)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(cfg.top_k > 1)
        writer.add_expert_weights_scale(1.0)


def add_tokenizer(writer, vocabulary, vocab_size):
    """Add the keys of a tokenizer of ours. ValueError: llama.cpp has no such tokenizer."""
    from gguf import TokenType
    pattern = vocabulary.spec.get("pattern")
    if pattern not in PRE_TOKENIZERS:
        raise ValueError(f"no GGUF for this tokenizer, {vocabulary.kind}: llama.cpp cuts a text as those of "
                         "--tokenizer bpe, gpt2 and cl100k_base do")
    vocab, merges = tokenizer.byte_pairs(vocabulary)
    types = dict.fromkeys(vocab.values(), TokenType.NORMAL)
    types |= dict.fromkeys(vocabulary.special.values(), TokenType.CONTROL)  # is not found in a text
    names = {i: token for token, i in {**vocab, **vocabulary.special}.items()}
    ids = range(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[pattern])
    writer.add_token_list([names.get(i, f"<unused {i}>") for i in ids])  # no token of bytes has a space
    writer.add_token_types([types.get(i, TokenType.UNUSED) for i in ids])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    for add_id in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add_id(vocabulary.eod)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if template := tokenizer.chat_template(vocabulary):
        writer.add_eot_token_id(vocabulary.special[chat.END])
        writer.add_chat_template(template)


def write(writer, tensors, cfg, kind):
    """Write the file. tensors: {name: Lazy}. ValueError: one is not finite."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    types = {torch.float32: GGMLQuantizationType.F32, torch.float16: GGMLQuantizationType.F16,
             torch.bfloat16: GGMLQuantizationType.BF16}
    for name, tensor in tensors.items():
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, types[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"wq": cfg.n_head, "wk": cfg.n_kv_head} if kind in PAIRS_ROWS else {}
    for name, tensor in tensors.items():
        values = tensor.detach()
        module, leaf = tensor.parts[0].name.split(".")[-2:]
        if module in heads:
            values = pair_rows(values, heads[module])
        if leaf == "offset":
            values = values + 1  # the factor itself
        if not torch.stack(values.aminmax()).isfinite().all():
            raise ValueError(f"{name} has values that are not finite in this --dtype; try --dtype fp32")
        writer.write_tensor_data(values.contiguous().view(torch.uint8).numpy())

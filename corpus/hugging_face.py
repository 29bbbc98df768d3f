"""What Hugging Face calls things, for convert.py: fields of config.json, tensors, tokenizer.json."""
import json
import re
from typing import NamedTuple

from config import as_typed, flags_beyond
from corpus import chat
from corpus.tokenizer import EOD, BpeTokenizer, CharTokenizer


class Family(NamedTuple):
    """An architecture of transformers. A field in `fixed` has the one value that our model computes."""
    architecture: str
    flags: dict   # of our model, always
    fields: dict  # {flag: field of config.json}
    fixed: dict   # {field: value}
    names: dict   # {our module or parameter: theirs}; {} stands for an expert's number
    only_out: bool = False  # it can be exported, not imported


# -----------------------------------------------------------------------------
# The families

LLAMA_FLAGS = {"norm": "rms", "mlp": "swiglu", "pos": "rope"}
LLAMA_FIELDS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_hidden": "intermediate_size",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
SILU = {"hidden_act": "silu"}
LLAMA_NAMES = {  # without the MLP
    "blocks": "model.layers",
    "wte": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
}
EXPERT_NAMES = {
    "moe.router": "mlp.gate",
    "moe.w1": "mlp.experts.{}.gate_proj",
    "moe.w3": "mlp.experts.{}.up_proj",
    "moe.w2": "mlp.experts.{}.down_proj",
}

LLAMA = Family(
    architecture="LlamaForCausalLM",
    flags=LLAMA_FLAGS,
    fields={**LLAMA_FIELDS, "bias": "attention_bias"},
    fixed={**SILU, "rope_interleaved": False},
    names={
        **LLAMA_NAMES,
        "mlp.w1": "mlp.gate_proj",
        "mlp.w3": "mlp.up_proj",
        "mlp.w2": "mlp.down_proj",
    })

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    flags={"norm": "layer", "mlp": "gelu", "pos": "learned", "bias": True},
    fields={
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_kv_head": "n_head",
        "n_embd": "n_embd",
        "ffn_hidden": "n_inner",
        "seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    names={
        "blocks": "transformer.h",
        "wte": "transformer.wte",
        "wpe": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.wq": "attn.c_attn",
        "attn.wk": "attn.c_attn",
        "attn.wv": "attn.c_attn",
        "attn.wo": "attn.c_proj",
        "mlp.w1": "mlp.c_fc",
        "mlp.w2": "mlp.c_proj",
    })

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    flags={**LLAMA_FLAGS, "router": "softmax-topk"},
    fields={**LLAMA_FIELDS, "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    fixed=SILU,
    names={
        **LLAMA_NAMES,
        "moe.router": "block_sparse_moe.gate",
        "moe.w1": "block_sparse_moe.experts.{}.w1",
        "moe.w3": "block_sparse_moe.experts.{}.w3",
        "moe.w2": "block_sparse_moe.experts.{}.w2",
    })

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    # The bias that steers a sigmoid router exists where its rate is not 0.
    flags={**LLAMA_FLAGS, "router": "sigmoid", "router_bias_rate": 1e-3},
    fields={
        **LLAMA_FIELDS,
        "ffn_hidden": "moe_intermediate_size",
        "n_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "n_shared_experts": "n_shared_experts",
    },
    fixed={
        **SILU,
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 0,
    },
    names={
        **LLAMA_NAMES,
        **EXPERT_NAMES,
        "moe.router.bias": "mlp.gate.e_score_correction_bias",
        "moe.shared.w1": "mlp.shared_experts.gate_proj",
        "moe.shared.w3": "mlp.shared_experts.up_proj",
        "moe.shared.w2": "mlp.shared_experts.down_proj",
    })

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    flags={**LLAMA_FLAGS, "router": "softmax", "n_shared_experts": 1},
    fields={
        **LLAMA_FIELDS,
        "ffn_hidden": "moe_intermediate_size",
        "n_experts": "num_experts",
        "top_k": "num_experts_per_tok",
    },
    fixed={
        **SILU,
        "qkv_bias": False,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    },
    names={
        **LLAMA_NAMES,
        **EXPERT_NAMES,
        # Its shared expert has a gate of its own. Ours has none, so the gate is written as zeros.
        "gate": "mlp.shared_expert_gate",
        "moe.shared.w1": "mlp.shared_expert.gate_proj",
        "moe.shared.w3": "mlp.shared_expert.up_proj",
        "moe.shared.w2": "mlp.shared_expert.down_proj",
    },
    only_out=True)

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "glm4_moe": GLM4_MOE, "qwen2_moe": QWEN2_MOE}
# Flags of the model that every family's config.json has, besides those of its Family.
WRITTEN = ("vocab_size", "rope_base")
# Flags that say how a model is trained. The function of the exported model does not depend on them.
TRAINING_ONLY = ("capacity_factor", "drop_policy", "router_bias_rate")
FAMILY_OF_ROUTER = {"softmax-topk": "mixtral", "sigmoid": "glm4_moe", "softmax": "qwen2_moe"}



# -----------------------------------------------------------------------------
# config.json

def family_of(cfg):
    """Return the key of FAMILIES that computes what a model with these flags does. ValueError: none does."""
    if cfg.objective == "mlm":
        raise ValueError("--objective mlm: a masked language model is not exported; train with --objective "
                         "causal for a model that goes out")
    kind = nearest_family(cfg)
    wanted = wanted_flags(cfg, kind)
    different = [flag for flag, value in wanted.items() if getattr(cfg, flag) != value]
    if different:
        have = as_typed({flag: getattr(cfg, flag) for flag in different})
        want = as_typed({flag: wanted[flag] for flag in different})
        hint = "; --router sigmoid may have shared experts" if kind == "qwen2_moe" else ""
        raise ValueError(f"no model of transformers has {have} in this combination; the nearest, {kind}, has "
                         f"{want}{hint}")
    family = FAMILIES[kind]
    unknown = flags_beyond({*family.flags, *family.fields, *WRITTEN, *TRAINING_ONLY}, cfg)
    if unknown:
        raise ValueError(f"{as_typed(unknown)}: {kind}'s config.json has no field for it, so only a model "
                         "without it is exported; declare a new field in FAMILIES of "
                         "corpus/hugging_face.py, a flag that matters in training alone in TRAINING_ONLY")
    return kind


def nearest_family(cfg):
    """Return the key of the family whose router or MLP is that of a model with these flags."""
    if cfg.n_experts:
        return FAMILY_OF_ROUTER[cfg.router]
    if cfg.mlp == "swiglu":
        return "llama"
    return "gpt2"


def wanted_flags(cfg, kind):
    """Return the flags that a model must have to be of a family: {flag: value}."""
    flags = FAMILIES[kind].flags
    wanted = {flag: flags[flag] for flag in ("norm", "mlp", "pos")}
    if kind == "gpt2":
        wanted["n_kv_head"] = cfg.n_head
    if cfg.n_experts:
        wanted["bias"] = False
        if kind != "glm4_moe":
            wanted["n_shared_experts"] = 0
    return wanted


def fixed_fields(cfg, kind):
    """Return what config.json must say, where it says it, for the function of our model: {field: value}."""
    fixed = dict(FAMILIES[kind].fixed)
    if kind == "llama":
        fixed["mlp_bias"] = cfg.bias
    if kind == "glm4_moe":
        fixed["norm_topk_prob"] = cfg.top_k > 1
    if cfg.pos == "rope":
        fixed["head_dim"] = cfg.n_embd // cfg.n_head
    return fixed


def config_json(cfg, kind, vocab_size, eod, dtype):
    """Return the config.json of a model of ours, a dict.

    The id of end-of-document is given where it is None, too: the defaults are ids of other models.
    """
    family = FAMILIES[kind]
    out = {
        "model_type": kind,
        "architectures": [family.architecture],
        "torch_dtype": dtype,
        "vocab_size": vocab_size,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        **fixed_fields(cfg, kind),
    }
    for flag, field in family.fields.items():
        out[field] = getattr(cfg, flag)

    if cfg.pos != "rope":
        for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            out[field] = cfg.dropout
        return out
    if cfg.n_experts:
        out["intermediate_size"] = cfg.ffn_hidden  # of layers without experts
    if kind == "qwen2_moe":
        out["shared_expert_intermediate_size"] = cfg.ffn_hidden
    rope = {"rope_theta": cfg.rope_base}
    if kind == "glm4_moe":
        rope["partial_rotary_factor"] = 1.0
    # Version 4 of transformers reads rope_theta, version 5 reads rope_parameters.
    return {**out, **rope, "rope_parameters": {"rope_type": "default", **rope}}


# -----------------------------------------------------------------------------
# tokenizer.json

def export_tokenizer(tokenizer, seq_len):
    """Return a tokenizer of ours as transformers reads it, {file: content}.

    The same text gives the same ids, except that the characters of a special token give that token.
    """
    if tokenizer.kind == "hf":
        return export_theirs(tokenizer)
    if isinstance(tokenizer, CharTokenizer):
        steps = character_steps(tokenizer)
    else:
        steps = byte_pair_steps(tokenizer)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, token) for token, i in tokenizer.special.items()],
        "normalizer": None,
        "post_processor": None,
        **steps,
    }
    ends = {} if tokenizer.eod is None else {"eos_token": EOD, "bos_token": EOD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ends,
        **chat_template(tokenizer),
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": whole, "tokenizer_config.json": settings}


def export_theirs(tokenizer):
    """Return the files of an HfTokenizer, as they were read; its further special tokens are added."""
    whole = tokenizer.spec["json"]
    if tokenizer.spec.get("special"):
        whole = json.loads(tokenizer.library.to_str())
    settings = {**tokenizer.spec["config"], **chat_template(tokenizer)}
    return {"tokenizer.json": whole, "tokenizer_config.json": settings}


def added_token(i, token):
    """Return the entry of a special token in tokenizer.json."""
    return {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def character_steps(tokenizer):
    """Return how tokenizer.json cuts, encodes and decodes for a CharTokenizer."""
    vocab = {character: i for i, character in enumerate(tokenizer.chars)}
    return {
        "pre_tokenizer": split("[\\s\\S]"),
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {**vocab, **tokenizer.special}, "unk_token": ""},
    }


def byte_pair_steps(tokenizer):
    """Return how tokenizer.json cuts, encodes and decodes for a BpeTokenizer."""
    model = byte_pairs(tokenizer)
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = split(for_oniguruma(tokenizer.spec["pattern"]))
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, to_bytes]},
        "decoder": to_bytes,
        "model": model,
    }


def chat_template(tokenizer):
    """Return {"chat_template": Jinja by which transformers writes a conversation as chat.Template does}.

    It is {} where the tokenizer has no such tokens, or where it reads the text behind one of them otherwise
    than a text alone.
    """
    if not set(chat.MARKERS) <= tokenizer.special.keys():
        return {}
    template = chat.Template(tokenizer)
    begin = tokenizer.decode(template.begin)
    if tokenizer.kind == "hf" and not reads_messages(tokenizer, template, begin):
        return {}
    message = "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    refuse = "{{ raise_exception(m['role'] + ' is no role of this model') }}"
    return {"chat_template": f"{{{{ {json.dumps(begin)} }}}}{{% for m in messages %}}"
                             f"{{% if m['role'] in {chat.ROLES} %}}{message}{{% else %}}{refuse}{{% endif %}}"
                             "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"}


def reads_messages(tokenizer, template, begin):
    """Whether the library encodes a message that is written as one text as Template does."""
    text_ids = set(range(tokenizer.n_vocab)) - set(tokenizer.special.values())
    text = tokenizer.decode(sorted(text_ids)[-3:]).strip()  # a text that the tokenizer knows
    # A copy of the library finds special tokens in a text.
    library = type(tokenizer.library).from_str(tokenizer.library.to_str())
    ids = library.encode(f"{begin}<|user|>{text}{chat.END}", add_special_tokens=False).ids
    return ids == [*template.begin, *template.message("user", text)]


def split(pattern):
    """Return the pre-tokenizer that cuts a text into the matches of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def for_oniguruma(pattern):
    """Return a regular expression of tiktoken as the library tokenizers needs it.

    There, `$` is also the end of a line, and the + of {1,3}+ is not possessive: it would repeat. ValueError:
    this + cannot be dropped.
    """
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+(?=\||$|\))", r"\1", pattern)
    if re.search(r"\{\d+(,\d*)?\}\+", pattern):
        raise ValueError(f"the pattern of this tokenizer, {pattern[:60]!r}, has a possessive interval inside "
                         "of a word: it has no counterpart in tokenizer.json")
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)


def byte_pairs(tokenizer: BpeTokenizer):
    """Return the model of tokenizer.json for our ranks.

    A merge is the pair of tokens from which tiktoken makes a token: the pair that stays when all merges of
    lower ranks were applied to the token's bytes. ignore_merges: a whole word that is a token is taken at
    once, as tiktoken does.
    """
    ranks = tokenizer.encoding._mergeable_ranks
    printable = printable_bytes()

    def text(token):
        return "".join(printable[byte] for byte in token)

    vocab = {text(token): i for token, i in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        pair = last_pair(token, rank, ranks)
        if pair:
            merges.append([text(pair[0]), text(pair[1])])
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        # Special tokens too: the library itself numbers those that it does not find here.
        "vocab": {**vocab, **tokenizer.special},
        "merges": merges,
    }


def printable_bytes():
    """Return a printable character for each byte, as in GPT-2: bytes that print stand for themselves."""
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    characters = []
    for byte in range(256):
        code_point = byte if byte in own else next(others)
        characters.append(chr(code_point))
    return characters


def last_pair(token, rank, ranks):
    """Return the two parts of a token's bytes that its merge joins.

    It is None for one byte, and for a token that no merge makes: it stands for a whole word only.
    """
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
        lowest = min(joined)
        if lowest >= rank:
            return None
        i = joined.index(lowest)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts if len(parts) == 2 else None

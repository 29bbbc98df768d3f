"""What Hugging Face calls things, for convert.py: fields of config.json, tensors, tokenizer.json."""
import dataclasses
import json
import re
from typing import NamedTuple

import config
from corpus import chat
from corpus.tokenizer import EOD, BpeTokenizer, CharTokenizer
from interface.schema import Range, check_schema, load_json


class Family(NamedTuple):
    """An architecture of transformers. Fields in fixed have the one value that our model computes."""
    architecture: str
    flags: dict   # of our model, always
    fields: dict  # {flag: field of config.json}
    fixed: dict   # {field: value}
    names: dict   # {our module or parameter: theirs}; {} stands for an expert's number
    only_out: bool = False


ROPE = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_kv_head="num_key_value_heads",
            n_embd="hidden_size", ffn_hidden="intermediate_size", seq_len="max_position_embeddings",
            norm_eps="rms_norm_eps", tied="tie_word_embeddings")
LLAMA = dict(norm="rms", mlp="swiglu", pos="rope")
BLOCK = {"blocks": "model.layers", "wte": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
         "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
         **{f"attn.w{x}": f"self_attn.{x}_proj" for x in "qkvo"}}
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
EXPERTS = {"moe.router": "mlp.gate", **{f"moe.{w}": f"mlp.experts.{{}}.{p}" for w, p in PROJECTIONS.items()}}
SILU = {"hidden_act": "silu"}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", LLAMA, dict(ROPE, bias="attention_bias"),
                    {**SILU, "rope_interleaved": False},
                    BLOCK | {f"mlp.{w}": f"mlp.{p}" for w, p in PROJECTIONS.items()}),
    "gpt2": Family("GPT2LMHeadModel", dict(norm="layer", mlp="gelu", pos="learned", bias=True),
                   dict(n_layer="n_layer", n_head="n_head", n_kv_head="n_head", n_embd="n_embd",
                        ffn_hidden="n_inner", seq_len="n_positions", norm_eps="layer_norm_epsilon",
                        tied="tie_word_embeddings"),
                   {"activation_function": "gelu_new", "scale_attn_weights": True,
                    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
                   {"blocks": "transformer.h", "wte": "transformer.wte", "wpe": "transformer.wpe",
                    "norm": "transformer.ln_f", "head": "lm_head", "norm1": "ln_1", "norm2": "ln_2",
                    **{f"attn.w{x}": "attn.c_attn" for x in "qkv"}, "attn.wo": "attn.c_proj",
                    "mlp.w1": "mlp.c_fc", "mlp.w2": "mlp.c_proj"}),
    "mixtral": Family("MixtralForCausalLM", dict(LLAMA, router="softmax-topk"),
                      dict(ROPE, n_experts="num_local_experts", top_k="num_experts_per_tok"), SILU,
                      {**BLOCK, "moe.router": "block_sparse_moe.gate",
                       **{f"moe.{w}": f"block_sparse_moe.experts.{{}}.{w}" for w in PROJECTIONS}}),
    # the bias that steers a sigmoid router exists where its rate is not 0
    "glm4_moe": Family("Glm4MoeForCausalLM", dict(LLAMA, router="sigmoid", router_bias_rate=1e-3),
                       dict(ROPE, ffn_hidden="moe_intermediate_size", n_experts="n_routed_experts",
                            top_k="num_experts_per_tok", n_shared_experts="n_shared_experts"),
                       {**SILU, "attention_bias": False, "first_k_dense_replace": 0, "n_group": 1,
                        "topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
                        "num_nextn_predict_layers": 0},
                       {**BLOCK, **EXPERTS, "moe.router.bias": "mlp.gate.e_score_correction_bias",
                        **{f"moe.shared.{w}": f"mlp.shared_experts.{p}" for w, p in PROJECTIONS.items()}}),
    # its shared expert has a gate of its own, ours has none: it is written as zeros
    "qwen2_moe": Family("Qwen2MoeForCausalLM", dict(LLAMA, router="softmax", n_shared_experts=1),
                        dict(ROPE, ffn_hidden="moe_intermediate_size", n_experts="num_experts",
                             top_k="num_experts_per_tok"),
                        {**SILU, "qkv_bias": False, "norm_topk_prob": False, "decoder_sparse_step": 1,
                         "use_sliding_window": False},
                        {**BLOCK, **EXPERTS, "gate": "mlp.shared_expert_gate",
                         **{f"moe.shared.{w}": f"mlp.shared_expert.{p}" for w, p in PROJECTIONS.items()}},
                        only_out=True)}
ALSO = {"mistral": "llama"}  # the same tensors; read_config looks at its sliding window
SAME = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}  # two names of one function
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
OPTIONAL = dict.fromkeys(("rope_parameters?", "rope_scaling?"), (dict, type(None)))


# -----------------------------------------------------------------------------
# config.json

def family_of(cfg):
    """-> the key of FAMILIES that computes what a model with these flags does. ValueError: none does."""
    if cfg.objective == "mlm":
        raise ValueError("--objective mlm: a masked language model is not exported; train with --objective "
                         "causal for a model that goes out")
    routers = {"softmax-topk": "mixtral", "sigmoid": "glm4_moe", "softmax": "qwen2_moe"}
    kind = routers[cfg.router] if cfg.n_experts else "llama" if cfg.mlp == "swiglu" else "gpt2"
    flags = {k: v for k, v in FAMILIES[kind].flags.items() if k in ("norm", "mlp", "pos")}
    if kind == "gpt2":
        flags["n_kv_head"] = cfg.n_head
    elif cfg.n_experts:
        flags |= {"bias": False} if kind == "glm4_moe" else {"bias": False, "n_shared_experts": 0}
    if apart := [k for k, v in flags.items() if getattr(cfg, k) != v]:
        have, want = (", ".join(f"--{k.replace('_', '-')} {of(k)}" for k in apart)
                      for of in (lambda k: getattr(cfg, k), flags.get))
        raise ValueError(f"no model of transformers has {have} in this combination; the nearest, {kind}, has "
                         f"{want}" + "; --router sigmoid may have shared experts" * (kind == "qwen2_moe"))
    return kind


def fixed_fields(cfg, kind):
    """-> {field: value}: what config.json must say, where it says it, for the function of our model."""
    own = {"llama": {"mlp_bias": cfg.bias}, "glm4_moe": {"norm_topk_prob": cfg.top_k > 1}}.get(kind, {})
    head_dim = {"head_dim": cfg.n_embd // cfg.n_head} if cfg.pos == "rope" else {}
    return {**FAMILIES[kind].fixed, **own, **head_dim}


def config_json(cfg, kind, vocab_size, eod, dtype):
    """-> config.json of a model of ours, a dict. rope_theta is read by transformers 4, rope_parameters by 5.
    The id of end-of-document is given where it is None, too: the defaults are ids of other models."""
    family = FAMILIES[kind]
    out = {"model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype,
           "vocab_size": vocab_size, "bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
    out |= fixed_fields(cfg, kind) | {theirs: getattr(cfg, ours) for ours, theirs in family.fields.items()}
    if cfg.pos == "rope":
        rope = {"rope_theta": cfg.rope_base, **({"partial_rotary_factor": 1.0} if kind == "glm4_moe" else {})}
        if cfg.n_experts:  # of layers without experts, and of Qwen2Moe's shared one
            out |= dict.fromkeys(("intermediate_size", "shared_expert_intermediate_size"), cfg.ffn_hidden)
        return {**out, **rope, "rope_parameters": {"rope_type": "default", **rope}}
    return out | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), cfg.dropout)


def read_config(path, dtype, seq_len=0):
    """Their config.json -> (key of FAMILIES, Config, vocabulary size). ValueError names the field by which
    it would be another function than our model's."""
    theirs = load_json(path)
    check_schema(theirs, {"model_type": str, "vocab_size": Range(1, 2**24), **OPTIONAL}, path)
    name = theirs["model_type"]
    kind = ALSO.get(name, name)
    if kind not in FAMILIES or FAMILIES[kind].only_out:
        known = [*(k for k, f in FAMILIES.items() if not f.only_out), *ALSO]
        raise ValueError(f"{path}: model_type {name!r} is none of {', '.join(known)}")
    fields, types = FAMILIES[kind].fields, {f.name: f.type for f in dataclasses.fields(config.Config)}
    given = {"tie_word_embeddings": kind == "gpt2", "attention_bias": False}  # the defaults of transformers
    given |= {"num_key_value_heads": theirs.get("num_attention_heads")}
    given |= {"n_inner": 4 * theirs["n_embd"]} if type(theirs.get("n_embd")) is int else {}
    given |= {k: v for k, v in theirs.items() if v is not None}
    check_schema(given, {field: types[flag] for flag, field in fields.items()}, path)
    flags = FAMILIES[kind].flags | {flag: given[field] for flag, field in fields.items()}
    if seq_len > flags["seq_len"]:
        raise ValueError(f"--seq-len {seq_len} exceeds {fields['seq_len']} {flags['seq_len']} of {path}")
    flags["seq_len"] = seq_len or flags["seq_len"]
    cfg = config.Config(**flags, dtype=dtype, rope_base=read_rope_base(path, theirs, kind))
    config.check(cfg)
    if "n_experts" in fields and not cfg.n_experts:
        raise ValueError(f"{path}: {fields['n_experts']} is 0, {name} has experts")
    must = fixed_fields(cfg, kind) | {"quantization_config": None,
                                      "layer_types": ["full_attention"] * cfg.n_layer}
    for field, value in must.items():
        have = SAME.get(given[field], given[field]) if type(given.get(field)) is str else given.get(field)
        if have not in (None, value):
            raise ValueError(f"{path}: {field} is {have!r}, our model computes {value!r} only")
    window = theirs.get("sliding_window", 4096 if name == "mistral" else None)
    check_schema({"sliding_window": window}, {"sliding_window": (int, type(None))}, path)
    if kind != "gpt2" and window and window < cfg.seq_len:
        raise ValueError(f"{path}: sliding_window {window} is shorter than the sequence, {cfg.seq_len}; give "
                         f"--seq-len {window}")
    return kind, cfg, theirs["vocab_size"]


def read_rope_base(path, theirs, kind):
    """-> theta of the rotary positions. ValueError: frequencies are scaled, or not all dimensions turn."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = theirs.get(field) or {}
        if rope.keys() - ROPE_KEYS or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{path}: {field} is {rope}, our rotary positions are not scaled")
    rope = {**theirs, **(theirs.get("rope_scaling") or theirs.get("rope_parameters") or {})}
    rope = {"rope_theta": 1e6 if kind == "mixtral" else 1e4, **rope}  # the defaults of transformers
    factor = rope.get("partial_rotary_factor", 0.5 if kind == "glm4_moe" else 1)
    if factor != 1:
        raise ValueError(f"{path}: partial_rotary_factor is {factor!r}, our positions turn all dimensions")
    check_schema(rope, {"rope_theta": Range(1.0, 1e12)}, path)
    return rope["rope_theta"]


# -----------------------------------------------------------------------------
# tokenizer.json

def export_tokenizer(tokenizer, seq_len):
    """-> {file: content} of a tokenizer of ours as transformers reads it: the same text gives the same ids,
    except that the characters of a special token give that token."""
    spec, special, talk = tokenizer.spec, tokenizer.spec.get("special", {}), chat_template(tokenizer)
    if tokenizer.kind == "hf":
        whole = json.loads(tokenizer.library.to_str()) if special else spec["json"]
        return {"tokenizer.json": whole, "tokenizer_config.json": {**spec["config"], **talk}}
    if isinstance(tokenizer, CharTokenizer):
        vocab = {c: i for i, c in enumerate(tokenizer.chars)}
        model = {"type": "WordLevel", "vocab": {**vocab, **special}, "unk_token": ""}
        parts = {"pre_tokenizer": split("[\\s\\S]"), "decoder": {"type": "Fuse"}}
    else:
        model = byte_pairs(tokenizer)
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        steps = [split(for_oniguruma(spec["pattern"])), to_bytes]
        parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "decoder": to_bytes}
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for token, i in special.items()]
    eos = {"eos_token": EOD, "bos_token": EOD} if tokenizer.eod is not None else {}
    return {"tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
                               "normalizer": None, "post_processor": None, **parts, "model": model},
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **eos, **talk,
                                      "model_max_length": seq_len, "clean_up_tokenization_spaces": False}}


def chat_template(tokenizer):
    """-> {"chat_template": Jinja by which transformers writes a conversation as chat.Template does}. {}: the
    tokenizer has no such tokens, or it reads the text behind one of them otherwise than a text alone."""
    if not set(chat.MARKERS) <= tokenizer.special.keys():
        return {}
    template, special = chat.Template(tokenizer), {*tokenizer.special.values()}
    begin = tokenizer.decode(template.begin)
    if tokenizer.kind == "hf":
        library = type(tokenizer.library).from_str(tokenizer.library.to_str())  # finds them in a text
        text = tokenizer.decode(sorted({*range(tokenizer.n_vocab)} - special)[-3:]).strip()  # it knows it
        ids = library.encode(f"{begin}<|user|>{text}{chat.END}", add_special_tokens=False).ids
        if ids != [*template.begin, *template.message("user", text)]:
            return {}
    message = "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    refuse = "{{ raise_exception(m['role'] + ' is no role of this model') }}"
    return {"chat_template": f"{{{{ {json.dumps(begin)} }}}}{{% for m in messages %}}"
                             f"{{% if m['role'] in {chat.ROLES} %}}{message}{{% else %}}{refuse}{{% endif %}}"
                             "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"}


def split(pattern):
    """-> the pre-tokenizer that cuts a text into the matches of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def for_oniguruma(pattern):
    """A regular expression of tiktoken -> the same for the library tokenizers. There `$` is also the end of a
    line, and the + of {1,3}+ is no possessive one: it would repeat. ValueError: it cannot be dropped."""
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+(?=\||$|\))", r"\1", pattern)
    if re.search(r"\{\d+(,\d*)?\}\+", pattern):
        raise ValueError(f"the pattern of this tokenizer, {pattern[:60]!r}, has a possessive interval inside "
                         "of a word: it has no counterpart in tokenizer.json")
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)


def byte_pairs(tokenizer: BpeTokenizer):
    """-> their model of our ranks. A merge is the pair of tokens from which tiktoken makes a token: the one
    that stays when all merges of lower ranks were applied to its bytes. ignore_merges: a whole word that is
    a token is taken at once, as tiktoken does."""
    ranks = tokenizer.encoding._mergeable_ranks
    # a printable character for each byte, as in GPT-2: those that print stand for themselves
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    char = [chr(b) if b in own else chr(next(rest)) for b in range(256)]

    def text(token):
        return "".join(char[b] for b in token)
    pairs = [last_pair(token, rank, ranks) for token, rank in sorted(ranks.items(), key=lambda item: item[1])]
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            # special tokens too: the library numbers those that it does not find here by itself
            "vocab": {**{text(token): i for token, i in ranks.items()}, **tokenizer.spec["special"]},
            "merges": [[text(a), text(b)] for a, b in filter(None, pairs)]}


def last_pair(token, rank, ranks):
    """-> the two parts of a token's bytes that its merge joins. None: it is one byte, or no merge makes it,
    and it stands for a whole word only."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
        i = min(range(len(joined)), key=joined.__getitem__)
        if joined[i] >= rank:
            return None
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts if len(parts) == 2 else None

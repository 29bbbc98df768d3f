"""Families of models in transformers: their config.json, in and out, and their names of our tensors.

    read_config   their config.json -> our flags
    family_of     our flags -> the family that computes the same
    config_json   our flags -> their config.json

A config.json is read by the class of transformers for its model_type. What our flags make of it is written as
a config.json of ours and read by the same class. A field that then differs is a part that our model has not.
"""
import copy
import dataclasses
import reprlib
from typing import Literal, NamedTuple

import config
from config import Config, as_typed, flags_beyond, head_width
from interface.files import Range, check_schema, load_json

# -----------------------------------------------------------------------------
# The families

LLAMA_FLAGS = {"norm": "rms", "mlp": "swiglu", "pos": "rope"}
LLAMA_FIELDS = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size", "ffn_hidden": "intermediate_size", "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings",
}
LLAMA_NAMES = {  # without the MLP
    "blocks": "model.layers", "wte": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj", "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
}
DENSE_NAMES = {
    **LLAMA_NAMES, "mlp.w1": "mlp.gate_proj", "mlp.w3": "mlp.up_proj", "mlp.w2": "mlp.down_proj",
}
EXPERT_NAMES = {
    **LLAMA_NAMES, "moe.router": "mlp.gate", "moe.w1": "mlp.experts.{}.gate_proj",
    "moe.w3": "mlp.experts.{}.up_proj", "moe.w2": "mlp.experts.{}.down_proj",
}
EXPERT_FIELDS = {**LLAMA_FIELDS, "ffn_hidden": "moe_intermediate_size", "top_k": "num_experts_per_tok"}
QK_NORM_NAMES = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
SILU = {"hidden_act": "silu"}


class Family(NamedTuple):
    """An architecture of transformers; the defaults are those of a dense model like Llama."""
    architecture: str
    flags: dict = LLAMA_FLAGS  # of our model, always
    fields: dict = LLAMA_FIELDS  # {flag: field of config.json}
    names: dict = DENSE_NAMES  # {our module or parameter: theirs}; {} stands for an expert's number
    fixed: dict = {**SILU, "attention_bias": False}  # {field: its one value}
    # the window of its attention: none; plain: sliding_window; switch: and use_sliding_window says whether;
    # layers: and layer_types says in which layers; always: without use_sliding_window
    window: Literal["none", "plain", "switch", "layers", "always"] = "none"
    only_out: bool = False  # it can be exported, not imported


LLAMA = Family(
    "LlamaForCausalLM", fields={**LLAMA_FIELDS, "bias": "attention_bias"}, fixed=SILU)
MISTRAL = Family(
    "MistralForCausalLM", window="plain")
QWEN2 = Family(
    "Qwen2ForCausalLM", flags={**LLAMA_FLAGS, "qkv_bias": True}, fixed=SILU, window="layers")
QWEN3 = Family(
    "Qwen3ForCausalLM", flags={**LLAMA_FLAGS, "qk_norm": "head"}, names={**DENSE_NAMES, **QK_NORM_NAMES},
    window="layers")
SMOLLM3 = Family(
    "SmolLM3ForCausalLM", fields={**LLAMA_FIELDS, "no_rope_every": "no_rope_layer_interval"},
    fixed={**SILU, "attention_bias": False, "mlp_bias": False}, window="layers")
OLMO2 = Family(
    "Olmo2ForCausalLM", flags={**LLAMA_FLAGS, "qk_norm": "all", "norm_place": "after"},
    names={**DENSE_NAMES, **QK_NORM_NAMES, "norm1": "post_attention_layernorm",
           "norm2": "post_feedforward_layernorm"})

GEMMA3 = Family(
    "Gemma3ForCausalLM",
    flags={"norm": "rms1p", "mlp": "geglu", "pos": "rope", "qk_norm": "head", "norm_place": "both",
           "embed_scale": True},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
           "use_bidirectional_attention": False, "attn_logit_softcapping": None,
           "final_logit_softcapping": None},
    names={**DENSE_NAMES, "norm.offset": "model.norm", "norm1.offset": "input_layernorm",
           "out_norm1.offset": "post_attention_layernorm", "norm2.offset": "pre_feedforward_layernorm",
           "out_norm2.offset": "post_feedforward_layernorm", "attn.q_norm.offset": "self_attn.q_norm",
           "attn.k_norm.offset": "self_attn.k_norm"},
    window="always")

GPT2 = Family(
    "GPT2LMHeadModel",
    flags={"norm": "layer", "mlp": "gelu", "pos": "learned", "bias": True},
    fields={"n_layer": "n_layer", "n_head": "n_head", "n_kv_head": "n_head", "n_embd": "n_embd",
            "ffn_hidden": "n_inner", "seq_len": "n_positions", "norm_eps": "layer_norm_epsilon",
            "tied": "tie_word_embeddings"},
    fixed={"activation_function": "gelu_new", "scale_attn_weights": True,
           "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names={"blocks": "transformer.h", "wte": "transformer.wte", "wpe": "transformer.wpe",
           "norm": "transformer.ln_f", "head": "lm_head", "norm1": "ln_1", "norm2": "ln_2",
           "attn.wq": "attn.c_attn", "attn.wk": "attn.c_attn", "attn.wv": "attn.c_attn",
           "attn.wo": "attn.c_proj", "mlp.w1": "mlp.c_fc", "mlp.w2": "mlp.c_proj"})

MIXTRAL = Family(
    "MixtralForCausalLM",
    flags={**LLAMA_FLAGS, "router": "softmax-topk"},
    fields={**LLAMA_FIELDS, "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"},
    fixed=SILU,
    names={**LLAMA_NAMES, "moe.router": "block_sparse_moe.gate",
           "moe.w1": "block_sparse_moe.experts.{}.w1", "moe.w3": "block_sparse_moe.experts.{}.w3",
           "moe.w2": "block_sparse_moe.experts.{}.w2"},
    window="plain")

GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    # The bias that steers a sigmoid router exists where its rate is not 0.
    flags={**LLAMA_FLAGS, "router": "sigmoid", "router_bias_rate": 1e-3},
    fields={**EXPERT_FIELDS, "n_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts"},
    fixed={**SILU, "attention_bias": False, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
           "routed_scaling_factor": 1.0, "use_qk_norm": False, "num_nextn_predict_layers": 0},
    names={**EXPERT_NAMES, "moe.router.bias": "mlp.gate.e_score_correction_bias",
           "moe.shared.w1": "mlp.shared_experts.gate_proj", "moe.shared.w3": "mlp.shared_experts.up_proj",
           "moe.shared.w2": "mlp.shared_experts.down_proj"})

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    flags={**LLAMA_FLAGS, "qk_norm": "head"},
    fields={**EXPERT_FIELDS, "n_experts": "num_local_experts"},
    fixed={**SILU, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    names={**EXPERT_NAMES, **QK_NORM_NAMES},
    window="switch")

QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    flags={**LLAMA_FLAGS, "router": "softmax", "n_shared_experts": 1},
    fields={**EXPERT_FIELDS, "n_experts": "num_experts"},
    fixed={**SILU, "qkv_bias": False, "norm_topk_prob": False, "decoder_sparse_step": 1,
           "use_sliding_window": False},
    # Its shared expert has a gate of its own. Ours has none, so the gate is written as zeros.
    names={**EXPERT_NAMES, "gate": "mlp.shared_expert_gate", "moe.shared.w1": "mlp.shared_expert.gate_proj",
           "moe.shared.w3": "mlp.shared_expert.up_proj", "moe.shared.w2": "mlp.shared_expert.down_proj"},
    only_out=True)

MEGATRON_BERT = Family(  # its norms are before attention and MLP, as ours; BertForMaskedLM has them behind
    "MegatronBertForMaskedLM",
    flags={"norm": "layer", "mlp": "gelu", "pos": "learned", "bias": True, "objective": "mlm"},
    fields={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_kv_head": "num_attention_heads", "n_embd": "hidden_size", "ffn_hidden": "intermediate_size",
            "seq_len": "max_position_embeddings", "norm_eps": "layer_norm_eps",
            "tied": "tie_word_embeddings"},
    fixed={"hidden_act": "gelu_pytorch_tanh", "is_decoder": False, "type_vocab_size": 2},
    names={"blocks": "bert.encoder.layer", "wte": "bert.embeddings.word_embeddings",
           "wpe": "bert.embeddings.position_embeddings", "norm": "bert.encoder.ln",
           "head": "cls.predictions.decoder", "mlm.dense": "cls.predictions.transform.dense",
           "mlm.norm": "cls.predictions.transform.LayerNorm", "mlm.bias": "cls.predictions.bias",
           "norm1": "attention.ln", "norm2": "ln", "attn.wq": "attention.self.query",
           "attn.wk": "attention.self.key", "attn.wv": "attention.self.value",
           "attn.wo": "attention.output.dense", "mlp.w1": "intermediate.dense", "mlp.w2": "output.dense"},
    only_out=True)

FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "gpt2": GPT2, "mixtral": MIXTRAL, "glm4_moe": GLM4_MOE,
            "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "olmo2": OLMO2, "smollm3": SMOLLM3,
            "gemma3_text": GEMMA3, "qwen2_moe": QWEN2_MOE, "megatron-bert": MEGATRON_BERT}
FAMILY_OF_ROUTER = {"softmax-topk": "mixtral", "sigmoid": "glm4_moe", "softmax": "qwen2_moe"}
# What a flag of a Family must be for a model to be of it.
DEFINING = ("norm", "mlp", "pos", "qk_norm", "norm_place", "qkv_bias", "embed_scale")
# Flags that say how a model is trained. The function of the exported model does not depend on them.
TRAINING_ONLY = ("capacity_factor", "drop_policy", "router_bias_rate")
DROPOUT = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
           "megatron-bert": ("hidden_dropout_prob", "attention_probs_dropout_prob")}


# -----------------------------------------------------------------------------
# Our flags: of which family, as config.json

def family_of(cfg):
    """Return the key of FAMILIES that computes what a model with these flags does. ValueError: none does."""
    kind = nearest_family(cfg)
    family = FAMILIES[kind]
    wanted = {flag: family.flags[flag] for flag in DEFINING if flag in family.flags}
    if kind in ("gpt2", "megatron-bert"):
        wanted["n_kv_head"] = cfg.n_head
    if kind == "megatron-bert":
        wanted["n_experts"] = 0
    elif cfg.n_experts:
        wanted["bias"] = False
        if kind != "glm4_moe":
            wanted["n_shared_experts"] = 0
    for flag in flags_beyond(written_flags(cfg, kind), cfg):
        wanted[flag] = getattr(Config(), flag)

    different = [flag for flag, value in wanted.items() if getattr(cfg, flag) != value]
    if different:
        have = as_typed({flag: getattr(cfg, flag) for flag in different})
        want = as_typed({flag: wanted[flag] for flag in different})
        raise ValueError(f"no model of transformers has {have} in this combination; the nearest, {kind}, has "
                         f"{want} (FAMILIES in hub/families.py)")
    return kind


def nearest_family(cfg):
    """Return the key of the family whose router or MLP is that of a model with these flags."""
    if cfg.objective == "mlm":
        return "megatron-bert"
    if cfg.n_experts and cfg.router not in FAMILY_OF_ROUTER:
        raise ValueError(f"--router {cfg.router}: no family of transformers has it; only models with "
                         f"{', '.join(FAMILY_OF_ROUTER)} are exported (FAMILY_OF_ROUTER in hub/families.py)")
    if cfg.n_experts and cfg.qk_norm == "head" and cfg.router != "sigmoid":
        return "qwen3_moe"
    if cfg.n_experts:
        return FAMILY_OF_ROUTER[cfg.router]
    if cfg.mlp == "geglu" or cfg.norm == "rms1p" or cfg.norm_place == "both":
        return "gemma3_text"
    if cfg.mlp != "swiglu":
        return "gpt2"
    if cfg.qk_norm == "all" or cfg.norm_place == "after":
        return "olmo2"
    if cfg.qk_norm == "head":
        return "qwen3"
    if cfg.no_rope_every:
        return "smollm3"
    if cfg.qkv_bias:
        return "qwen2"
    return "mistral" if cfg.window else "llama"


def written_flags(cfg, kind):
    """Return the flags that the config.json of a family expresses, or that change no function."""
    family = FAMILIES[kind]
    written = {"vocab_size", "rope_base", *family.flags, *family.fields, *TRAINING_ONLY}
    if cfg.pos == "rope":
        written.update(("head_dim", "rope_scaling"))
    if family.window != "none":
        written.add("window")
    if family.window in ("layers", "always"):
        written.add("full_every")
    if kind == "gemma3_text":
        written.remove("rope_scaling")
        written.add("window_rope_base")
    if kind == "qwen3_moe":
        written.add("router")
    return written


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
        **family.fixed,
        **window_fields(cfg, family.window),
    }
    for flag, field in family.fields.items():
        out[field] = getattr(cfg, flag)
    for field in DROPOUT.get(kind, ()):
        out[field] = cfg.dropout
    if cfg.pos == "rope":
        out["head_dim"] = head_width(cfg)
        out |= rope_fields(cfg, kind)
        if cfg.n_experts:
            out["intermediate_size"] = cfg.ffn_hidden  # of layers without experts

    if kind == "llama":
        out["mlp_bias"] = cfg.bias
    elif kind == "gpt2":
        out["n_ctx"] = cfg.seq_len  # an older name of n_positions, which other programs still read
    elif kind == "glm4_moe":
        out["norm_topk_prob"] = cfg.top_k > 1
    elif kind == "qwen2_moe":
        out["shared_expert_intermediate_size"] = cfg.ffn_hidden
    elif kind == "qwen3_moe":
        out["norm_topk_prob"] = cfg.router == "softmax-topk"
        out["num_experts"] = cfg.n_experts  # version 4 of transformers reads this name
    elif kind == "smollm3":
        every = cfg.no_rope_every
        out["no_rope_layers"] = [int(not every or (i + 1) % every > 0) for i in range(cfg.n_layer)]
    elif kind == "gemma3_text":
        out["query_pre_attn_scalar"] = head_width(cfg)
    return out


def window_fields(cfg, form):
    """Return the fields of config.json that say which keys a query sees. form: the window of a Family."""
    window = cfg.window or None
    if form == "none":
        return {}
    if form == "plain":
        return {"sliding_window": window}
    if form == "always":
        return {"sliding_window": cfg.window or cfg.seq_len, "layer_types": layer_types(cfg)}
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    if form == "layers" and window is not None:
        # Versions of transformers without layer_types have windows from this layer on.
        fields.update(layer_types=layer_types(cfg), max_window_layers=0)
    return fields


def layer_types(cfg):
    """Return what config.json calls the attention of each layer."""
    types = []
    for i in range(cfg.n_layer):
        has_window = cfg.window and not (cfg.full_every and (i + 1) % cfg.full_every == 0)
        types.append("sliding_attention" if has_window else "full_attention")
    return types


def rope_fields(cfg, kind):
    """Return the fields of rotary positions.

    Version 4 of transformers reads rope_theta and rope_scaling, version 5 reads rope_parameters.
    """
    rope = {"rope_theta": cfg.rope_base}
    if kind == "gemma3_text":
        local = cfg.window_rope_base or cfg.rope_base
        both = {"full_attention": {"rope_type": "default", **rope},
                "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        return {**rope, "rope_local_base_freq": local, "rope_parameters": both}
    if kind == "glm4_moe":
        rope["partial_rotary_factor"] = 1.0
    if not cfg.rope_scaling:
        return {**rope, "rope_parameters": {"rope_type": "default", **rope}}
    scaled = {"rope_type": "llama3", **dict(zip(LLAMA3_KEYS, cfg.rope_scaling, strict=True)), **rope}
    scaled["original_max_position_embeddings"] = int(scaled["original_max_position_embeddings"])
    return {**rope, "rope_parameters": scaled, "rope_scaling": scaled}


# -----------------------------------------------------------------------------
# Their config.json

MOST_BYTES = 2**22  # of a config.json: that of a model with 1,000 labels has 60,000
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SAME = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}  # two names of one function
# What no class of transformers checks: it makes lists as long as some of these say.
UNCHECKED = {"model_type": str, "num_hidden_layers?": Range(1, 2**12), "n_layer?": Range(1, 2**12),
             "num_attention_heads?": Range(1, 2**12), "num_labels?": Range(0, 2**12),
             "head_dim?": (int, type(None))}
# Logits do not depend on these, nor on what PreTrainedConfig has for every model and GenerationConfig for
# text: how a model was saved and is to be run, heads of other tasks; training; what another field decides.
HARMLESS = """
    is_decoder tie_encoder_decoder tie_last_hidden_states cross_attention_hidden_size tokenizer_class prefix
    sep_token_id torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing finetuning_task
    task_specific_params classifier_dropout transformers.js_config unsloth_version unsloth_fixed
    is_llama_config n_special output_past predict_special_tokens _num_labels _flash_attn_2_enabled
    _attn_implementation_autoset summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout
    initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop output_router_logits
    router_aux_loss_coef router_jitter_noise pretraining_tp reorder_and_upcast_attn
    n_ctx max_window_layers sliding_window_pattern _sliding_window_pattern no_rope_layer_interval
    num_nextn_predict_layers shared_expert_intermediate_size
"""


def read_config(path, dtype, seq_len=0):
    """Return (key of FAMILIES, Config, vocabulary size, number of layers behind the last) of a config.json.

    Layers behind the last one guess tokens after the next one. seq_len: a shorter sequence than theirs.
    ValueError names the fields by which the model would be another function than ours.
    """
    given = load_json(path)
    check_schema(given, UNCHECKED, path)
    kind = read_kind(path, given)
    family = FAMILIES[kind]
    theirs = by_transformers(path, kind, given)
    if seq_len:
        shorten(path, theirs, family, seq_len)
    theirs = in_one_spelling(theirs, family)
    flags = our_flags(path, kind, theirs)
    for field, flag in {"rope_theta": "rope_base", "rope_local_base_freq": "window_rope_base"}.items():
        if flag in flags and given.get(field) not in (None, flags[flag]):
            raise ValueError(f"{path}: {field} is {reprlib.repr(given[field])} and {flags[flag]} in "
                             "rope_parameters or rope_scaling; delete the one that is wrong")
    cfg = Config(**flags, dtype=dtype)
    try:
        config.check(cfg)
    except ValueError as e:  # it speaks of our flags
        raise ValueError(f"{path} is no model of ours: {e}") from None
    ours = by_transformers(path, kind, config_json(cfg, kind, theirs["vocab_size"], None, dtype))
    check_same(path, given, theirs, in_one_spelling(ours, family))
    return kind, cfg, theirs["vocab_size"], theirs.get("num_nextn_predict_layers") or 0


def read_kind(path, given):
    """Return the key of FAMILIES for their config.json. ValueError: none is imported from it."""
    kind = given["model_type"]
    imported = [name for name, family in FAMILIES.items() if not family.only_out]
    if kind not in imported:
        raise ValueError(f"{path}: model_type {kind[:60]!r} is none of {', '.join(imported)}")
    architecture = FAMILIES[kind].architecture
    if given.get("architectures") not in (None, [], [architecture]):
        raise ValueError(f"{path}: architectures is {reprlib.repr(given['architectures'])}, only "
                         f"[{architecture!r}] is imported")
    return kind


def by_transformers(path, kind, fields):
    """Return the fields that a class of transformers has after it has read a config.json.

    FileNotFoundError: transformers is not there. ValueError: it refuses a field.
    """
    try:
        from transformers import CONFIG_MAPPING
        from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin  # noqa: F401  of version 5
        from transformers.utils import logging
    except ImportError:
        raise FileNotFoundError("a model of Hugging Face is read with transformers: pip install "
                                "'transformers>=5'") from None
    logging.set_verbosity(logging.CRITICAL)
    fields = copy.deepcopy(fields)  # the class changes what is in them
    for field in ("dtype", "torch_dtype"):
        fields.pop(field, None)  # the files have a dtype of their own
    try:
        return CONFIG_MAPPING[kind].from_dict(fields).to_dict()
    except Exception as e:  # whatever its validators raise, and its arithmetic on odd values
        raise ValueError(f"{path}: transformers refuses it: {' '.join(str(e).split())[:300]}") from None


def shorten(path, theirs, family, seq_len):
    """Give their model shorter sequences. ValueError: they are longer, or positions are learned."""
    field = family.fields["seq_len"]
    longest = theirs[field]
    if seq_len > longest:
        raise ValueError(f"--seq-len {seq_len} exceeds {field} {longest} of {path}")
    if family.flags["pos"] == "learned" and seq_len < longest:
        raise ValueError(f"--seq-len {seq_len} shortens rotary positions; {path} has a learned one for each "
                         f"of {longest} tokens; leave out --seq-len")
    theirs[field] = seq_len


def in_one_spelling(fields, family):
    """Return the fields of a model, where several values mean the same with one of them, mostly None."""
    fields = dict(fields)
    for field, value in fields.items():
        if isinstance(value, str):
            fields[field] = SAME.get(value, value)
    fields.setdefault("is_causal", True)
    if fields.get("head_dim") is None and "hidden_size" in fields:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    if "n_inner" in fields and fields["n_inner"] is None:
        fields["n_inner"] = 4 * fields["n_embd"]
    if isinstance(fields.get("rope_parameters"), dict):
        fields["rope_parameters"] = plain_rope(fields["rope_parameters"])

    window = fields.get("sliding_window")
    if family.window in ("plain", "switch", "layers") and (window or 0) >= fields["max_position_embeddings"]:
        fields.update(sliding_window=None, layer_types=None)  # no sequence reaches it
    types = fields.get("layer_types")
    is_full = isinstance(types, list) and types == ["full_attention"] * len(types)
    if is_full and family.window in ("layers", "always"):
        fields["sliding_window"] = None
        fields["rope_parameters"].pop("sliding_attention", None)
    if is_full and fields.get("sliding_window") is None:
        fields["layer_types"] = None
    if fields.get("sliding_window") is None:
        fields["use_sliding_window"] = None
    if "moe_intermediate_size" in fields:
        fields["intermediate_size"] = None  # of layers without experts, of which it has none here
    return fields


def plain_rope(rope):
    """Return rope_parameters, or a dict of them for each kind of layer, without what has no effect."""
    plain = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            plain[key] = plain_rope(value)
        elif key != "type" and (key, value) != ("partial_rotary_factor", 1):
            plain[key] = value
    if plain.get("rope_type") in ("linear", "default") and plain.get("factor") == 1:
        plain["rope_type"] = "default"
        plain.pop("factor")
    return plain


def our_flags(path, kind, theirs):
    """Return our flags for their model, {flag: value}; check_same says whether they are all of it."""
    family = FAMILIES[kind]
    types = {field.name: field.type for field in dataclasses.fields(Config)}
    check_schema(theirs, {"vocab_size": Range(1, 2**24), **{
        field: types[flag] for flag, field in family.fields.items()}}, path)
    flags = dict(family.flags)
    for flag, field in family.fields.items():
        flags[flag] = theirs[field]
    if family.flags["pos"] == "rope":
        flags |= rope_flags(path, kind, theirs["rope_parameters"])
        if theirs["head_dim"] * flags["n_head"] != flags["n_embd"]:
            flags["head_dim"] = theirs["head_dim"]
    if family.window != "none" and theirs["sliding_window"]:
        flags["window"] = theirs["sliding_window"]
        layers = theirs.get("layer_types") or []
        if "full_attention" in layers:
            flags["full_every"] = layers.index("full_attention") + 1
    if kind == "qwen3_moe":
        flags["router"] = "softmax-topk" if theirs["norm_topk_prob"] else "softmax"
    return flags


def rope_flags(path, kind, rope):
    """Return our flags of rotary positions, {flag: value}. rope: rope_parameters."""
    base = {"rope_theta": Range(1.0, 1e12)}
    flags = {}
    if kind == "gemma3_text":
        check_schema(rope, {"full_attention": base, "sliding_attention?": base}, f"{path}: rope_parameters")
        if "sliding_attention" in rope:
            flags["window_rope_base"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    check_schema(rope, base, f"{path}: rope_parameters")
    flags["rope_base"] = rope["rope_theta"]
    if rope.get("rope_type") == "llama3":
        check_schema(rope, {key: Range(0.0, 1e9) for key in LLAMA3_KEYS}, f"{path}: rope_parameters")
        flags["rope_scaling"] = tuple(float(rope[key]) for key in LLAMA3_KEYS)
    return flags


def check_same(path, given, theirs, ours):
    """Raise ValueError if two models of a class differ in a field on which the logits depend."""
    from transformers import GenerationConfig, PreTrainedConfig
    harmless = {*HARMLESS.split(), *GenerationConfig().to_dict(), *PreTrainedConfig().to_dict()}
    harmless.remove("is_encoder_decoder")
    wrong = []
    for field in sorted((theirs.keys() | ours.keys()) - harmless):
        have = theirs.get(field)
        want = ours.get(field)
        if have == want or is_absent(have) and is_absent(want):
            continue
        source = "" if field in given else " by default"
        wrong.append(f"{field} is {reprlib.repr(have)}{source}, in our model {reprlib.repr(want)}")
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)[:600]}")


def is_absent(value):
    """Whether a field with this value says as much as no such field."""
    return value is None or value is False or value in ({}, [])

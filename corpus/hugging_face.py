"""What Hugging Face calls things, for convert.py: fields of config.json, and tensors."""
from typing import Literal, NamedTuple

from config import as_typed, flags_beyond, head_width


class Family(NamedTuple):
    """An architecture of transformers. A field in `fixed` has the one value that our model computes."""
    architecture: str
    flags: dict   # of our model, always
    fields: dict  # {flag: field of config.json}
    fixed: dict   # {field: value}
    names: dict   # {our module or parameter: theirs}; {} stands for an expert's number
    only_out: bool = False  # it can be exported, not imported
    derived: tuple = ()  # more flags that its config.json has, in other words: see fixed_fields
    # the window of its attention: none; plain: sliding_window; switch: and use_sliding_window says whether;
    # layers: and layer_types says in which layers; always: without use_sliding_window
    window: Literal["none", "plain", "switch", "layers", "always"] = "none"


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

DENSE_NAMES = {
    **LLAMA_NAMES,
    "mlp.w1": "mlp.gate_proj",
    "mlp.w3": "mlp.up_proj",
    "mlp.w2": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}

LLAMA = Family(
    architecture="LlamaForCausalLM",
    flags=LLAMA_FLAGS,
    fields={**LLAMA_FIELDS, "bias": "attention_bias"},
    fixed={**SILU, "rope_interleaved": False},
    names=DENSE_NAMES)

MISTRAL = Family(
    architecture="MistralForCausalLM",
    flags=LLAMA_FLAGS,
    fields=LLAMA_FIELDS,
    fixed={**SILU, "attention_bias": False},
    names=DENSE_NAMES,
    window="plain")

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    flags={**LLAMA_FLAGS, "qkv_bias": True},
    fields=LLAMA_FIELDS,
    fixed=SILU,
    names=DENSE_NAMES,
    window="layers")

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    flags={**LLAMA_FLAGS, "qk_norm": "head"},
    fields=LLAMA_FIELDS,
    fixed={**SILU, "attention_bias": False},
    names={**DENSE_NAMES, **QK_NORM_NAMES},
    window="layers")

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    flags={**LLAMA_FLAGS, "qk_norm": "all", "norm_place": "after"},
    fields=LLAMA_FIELDS,
    fixed={**SILU, "attention_bias": False},
    names={
        **DENSE_NAMES,
        **QK_NORM_NAMES,
        "norm1": "post_attention_layernorm",
        "norm2": "post_feedforward_layernorm",
    })

SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    flags=LLAMA_FLAGS,
    fields={**LLAMA_FIELDS, "no_rope_every": "no_rope_layer_interval"},
    fixed={**SILU, "attention_bias": False, "mlp_bias": False},
    names=DENSE_NAMES,
    window="layers")

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    flags={"norm": "rms1p", "mlp": "geglu", "pos": "rope", "qk_norm": "head", "norm_place": "both",
           "embed_scale": True},
    fields=LLAMA_FIELDS,
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    names={
        **DENSE_NAMES,
        "norm.offset": "model.norm",
        "norm1.offset": "input_layernorm",
        "out_norm1.offset": "post_attention_layernorm",
        "norm2.offset": "pre_feedforward_layernorm",
        "out_norm2.offset": "post_feedforward_layernorm",
        "attn.q_norm.offset": "self_attn.q_norm",
        "attn.k_norm.offset": "self_attn.k_norm",
    },
    derived=("window_rope_base",),
    window="always")

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
    },
    window="plain")

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

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    flags={**LLAMA_FLAGS, "qk_norm": "head"},
    fields={
        **LLAMA_FIELDS,
        "ffn_hidden": "moe_intermediate_size",
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
    },
    fixed={
        **SILU,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    names={**LLAMA_NAMES, **EXPERT_NAMES, **QK_NORM_NAMES},
    derived=("router",),
    window="switch")

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

MEGATRON_BERT = Family(  # its norms are before attention and MLP, as ours; BertForMaskedLM has them behind
    architecture="MegatronBertForMaskedLM",
    flags={"norm": "layer", "mlp": "gelu", "pos": "learned", "bias": True, "objective": "mlm"},
    fields={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "ffn_hidden": "intermediate_size",
        "seq_len": "max_position_embeddings",
        "norm_eps": "layer_norm_eps",
        "tied": "tie_word_embeddings",
    },
    fixed={"hidden_act": "gelu_pytorch_tanh", "is_decoder": False, "type_vocab_size": 2},
    names={
        "blocks": "bert.encoder.layer",
        "wte": "bert.embeddings.word_embeddings",
        "wpe": "bert.embeddings.position_embeddings",
        "norm": "bert.encoder.ln",
        "head": "cls.predictions.decoder",
        "mlm.dense": "cls.predictions.transform.dense",
        "mlm.norm": "cls.predictions.transform.LayerNorm",
        "mlm.bias": "cls.predictions.bias",
        "norm1": "attention.ln",
        "norm2": "ln",
        "attn.wq": "attention.self.query",
        "attn.wk": "attention.self.key",
        "attn.wv": "attention.self.value",
        "attn.wo": "attention.output.dense",
        "mlp.w1": "intermediate.dense",
        "mlp.w2": "output.dense",
    },
    only_out=True)

FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "gpt2": GPT2, "mixtral": MIXTRAL, "glm4_moe": GLM4_MOE,
            "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "olmo2": OLMO2, "smollm3": SMOLLM3,
            "gemma3_text": GEMMA3, "qwen2_moe": QWEN2_MOE, "megatron-bert": MEGATRON_BERT}
# Flags of the model that every family's config.json has, besides those of its Family.
WRITTEN = ("vocab_size", "rope_base")
WITH_ROPE = ("head_dim", "rope_scaling")  # those that every config.json with rotary positions has, too
# What a flag of a Family must be for a model to be of it.
DEFINING = ("norm", "mlp", "pos", "qk_norm", "norm_place", "qkv_bias", "embed_scale")
# Flags that say how a model is trained. The function of the exported model does not depend on them.
TRAINING_ONLY = ("capacity_factor", "drop_policy", "router_bias_rate")
FAMILY_OF_ROUTER = {"softmax-topk": "mixtral", "sigmoid": "glm4_moe", "softmax": "qwen2_moe"}
DROPOUT = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
           "megatron-bert": ("hidden_dropout_prob", "attention_probs_dropout_prob")}


# -----------------------------------------------------------------------------
# config.json

def family_of(cfg):
    """Return the key of FAMILIES that computes what a model with these flags does. ValueError: none does."""
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
    known = {*family.flags, *family.fields, *family.derived, *WRITTEN, *TRAINING_ONLY}
    if cfg.pos == "rope":
        known.update(WITH_ROPE)
    if family.window != "none":
        known.add("window")
    if family.window in ("layers", "always"):
        known.add("full_every")
    if kind == "gemma3_text":
        known.remove("rope_scaling")
    unknown = flags_beyond(known, cfg)
    if unknown:
        raise ValueError(f"{as_typed(unknown)}: {kind}'s config.json has no field for it, so only a model "
                         "without it is exported; declare a new field in FAMILIES of "
                         "corpus/hugging_face.py, a flag that matters in training alone in TRAINING_ONLY")
    return kind


def nearest_family(cfg):
    """Return the key of the family whose router or MLP is that of a model with these flags."""
    if cfg.objective == "mlm":
        return "megatron-bert"
    if cfg.n_experts and cfg.router not in FAMILY_OF_ROUTER:
        raise ValueError(f"--router {cfg.router}: no family of transformers has it, so only a model with "
                         f"{', '.join(FAMILY_OF_ROUTER)} is exported; declare it in FAMILY_OF_ROUTER of "
                         "corpus/hugging_face.py")
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


def wanted_flags(cfg, kind):
    """Return the flags that a model must have to be of a family: {flag: value}."""
    flags = FAMILIES[kind].flags
    wanted = {flag: flags[flag] for flag in DEFINING if flag in flags}
    if kind in ("gpt2", "megatron-bert"):
        wanted["n_kv_head"] = cfg.n_head
    if kind == "megatron-bert":
        wanted["n_experts"] = 0
    elif cfg.n_experts:
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
    if kind == "qwen3_moe":
        fixed["norm_topk_prob"] = cfg.router == "softmax-topk"
    if kind == "smollm3":
        every = cfg.no_rope_every
        fixed["no_rope_layers"] = [int(not every or (i + 1) % every > 0) for i in range(cfg.n_layer)]
    if cfg.pos == "rope":
        fixed["head_dim"] = head_width(cfg)
    if kind == "gemma3_text":
        fixed["query_pre_attn_scalar"] = head_width(cfg)
    return fixed


def layer_types(cfg):
    """Return what config.json calls the attention of each layer."""
    types = []
    for i in range(cfg.n_layer):
        has_window = cfg.window and not (cfg.full_every and (i + 1) % cfg.full_every == 0)
        types.append("sliding_attention" if has_window else "full_attention")
    return types


def window_fields(cfg, kind):
    """Return the fields of config.json that say which keys a query sees."""
    form = FAMILIES[kind].window
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
        **window_fields(cfg, kind),
    }
    for flag, field in family.fields.items():
        out[field] = getattr(cfg, flag)

    for field in DROPOUT.get(kind, ()):
        out[field] = cfg.dropout
    if kind == "gpt2":
        out["n_ctx"] = cfg.seq_len  # an older name of n_positions, which other programs still read
    if cfg.pos != "rope":
        return out
    if cfg.n_experts:
        out["intermediate_size"] = cfg.ffn_hidden  # of layers without experts
    if kind == "qwen2_moe":
        out["shared_expert_intermediate_size"] = cfg.ffn_hidden
    if kind == "qwen3_moe":
        out["num_experts"] = cfg.n_experts  # version 4 of transformers reads this name
    rope = {"rope_theta": cfg.rope_base}
    if kind == "glm4_moe":
        rope["partial_rotary_factor"] = 1.0
    if kind == "gemma3_text":
        local = cfg.window_rope_base or cfg.rope_base
        both = {"full_attention": {"rope_type": "default", **rope},
                "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        return {**out, **rope, "rope_local_base_freq": local, "rope_parameters": both}
    # Version 4 of transformers reads rope_theta and rope_scaling, version 5 reads rope_parameters.
    if not cfg.rope_scaling:
        return {**out, **rope, "rope_parameters": {"rope_type": "default", **rope}}
    factor, low, high, length = cfg.rope_scaling
    scaled = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
              "original_max_position_embeddings": int(length), **rope}
    return {**out, **rope, "rope_parameters": scaled, "rope_scaling": scaled}

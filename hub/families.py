"""Families of models in transformers: their config.json, in and out, and their names of our tensors.

    read_config   their config.json -> our flags
    family_of     our flags -> the family that computes the same
    config_json   our flags -> their config.json

A config.json is read by the class of transformers for its model_type. What our flags make of it is written as
a config.json of ours and read by the same class. A field that then differs is a part that our model has not.
A new family is another entry of FAMILIES.
"""
import copy
import dataclasses
import reprlib
from typing import NamedTuple

import config
from config import Config, as_typed, flags_beyond, head_width
from interface.files import check_schema, load_json

# -----------------------------------------------------------------------------
# The families


def table(text):
    """Return {word: the word behind it}."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


class Family(NamedTuple):
    """An architecture of transformers."""
    architecture: str
    flags: dict  # those by which our model is of this family
    fields: dict  # {flag: field of config.json}
    names: dict  # {our module or parameter: theirs}; {} stands for an expert's number
    fixed: dict  # {field: its one value}
    also: dict = {}  # {further field: the flag whose value it has}
    routers: tuple = ()  # values of --router; none: it has no experts
    extra: dict = {}  # flags for tensors that all its models have; zeros stand for those that a run lacks
    # the window of its attention: none; plain: sliding_window; switch: and use_sliding_window says whether;
    # layers: and layer_types says in which layers; always: without use_sliding_window
    window: str = "none"
    only_out: bool = False  # it can be exported, not imported


ATTENTION = table("""
    blocks  model.layers           wte  model.embed_tokens    norm  model.norm    head  lm_head
    norm1   input_layernorm        norm2    post_attention_layernorm
    attn.wq self_attn.q_proj       attn.wk  self_attn.k_proj
    attn.wv self_attn.v_proj       attn.wo  self_attn.o_proj""")
DENSE = ATTENTION | table("mlp.w1 mlp.gate_proj   mlp.w3 mlp.up_proj   mlp.w2 mlp.down_proj")
EXPERTS = ATTENTION | table("""
    moe.router  mlp.gate                       moe.w1  mlp.experts.{}.gate_proj
    moe.w3      mlp.experts.{}.up_proj         moe.w2  mlp.experts.{}.down_proj""")
QK_NORM = table("attn.q_norm self_attn.q_norm   attn.k_norm self_attn.k_norm")
FIELDS = table("""
    n_layer     num_hidden_layers     n_head       num_attention_heads    n_kv_head  num_key_value_heads
    n_embd      hidden_size           ffn_hidden   intermediate_size      seq_len    max_position_embeddings
    norm_eps    rms_norm_eps          tied         tie_word_embeddings""")
EXPERT_FIELDS = FIELDS | table("ffn_hidden moe_intermediate_size   top_k num_experts_per_tok")
SILU = {"hidden_act": "silu"}
NO_BIAS = {**SILU, "attention_bias": False}

DEFAULT = Family("", {"norm": "rms", "mlp": "swiglu", "pos": "rope"}, FIELDS, DENSE, NO_BIAS)
LLAMA = DEFAULT._replace(
    architecture="LlamaForCausalLM", fields={**FIELDS, "bias": "attention_bias"}, fixed=SILU,
    also={"mlp_bias": "bias"})
MISTRAL = DEFAULT._replace(
    architecture="MistralForCausalLM", window="plain")
QWEN2 = DEFAULT._replace(
    architecture="Qwen2ForCausalLM", flags={**DEFAULT.flags, "qkv_bias": True}, fixed=SILU, window="layers")
QWEN3 = DEFAULT._replace(
    architecture="Qwen3ForCausalLM", flags={**DEFAULT.flags, "qk_norm": "head"}, names=DENSE | QK_NORM,
    window="layers")
SMOLLM3 = DEFAULT._replace(
    architecture="SmolLM3ForCausalLM", fields={**FIELDS, "no_rope_every": "no_rope_layer_interval"},
    fixed={**NO_BIAS, "mlp_bias": False}, window="layers")
OLMO2 = DEFAULT._replace(
    architecture="Olmo2ForCausalLM", flags={**DEFAULT.flags, "qk_norm": "all", "norm_place": "after"},
    names=DENSE | QK_NORM | table("norm1 post_attention_layernorm   norm2 post_feedforward_layernorm"))

GEMMA3 = DEFAULT._replace(
    architecture="Gemma3ForCausalLM",
    flags={"norm": "rms1p", "mlp": "geglu", "pos": "rope", "qk_norm": "head", "norm_place": "both",
           "embed_scale": True},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
           "use_bidirectional_attention": False, "attn_logit_softcapping": None,
           "final_logit_softcapping": None},
    names=DENSE | table("""
        norm1.offset        input_layernorm               norm2.offset        pre_feedforward_layernorm
        out_norm1.offset    post_attention_layernorm      out_norm2.offset    post_feedforward_layernorm
        attn.q_norm.offset  self_attn.q_norm              attn.k_norm.offset  self_attn.k_norm
        norm.offset         model.norm"""),
    window="always")

GPT2 = Family(
    "GPT2LMHeadModel",
    flags={"norm": "layer", "mlp": "gelu", "pos": "learned"}, extra={"bias": True},
    fields=table("""n_layer n_layer     n_head n_head       n_kv_head n_head                n_embd n_embd
                    ffn_hidden n_inner  seq_len n_positions  norm_eps layer_norm_epsilon
                    tied tie_word_embeddings"""),
    also={"n_ctx": "seq_len",  # an older name, which other programs still read
          "resid_pdrop": "dropout", "embd_pdrop": "dropout", "attn_pdrop": "dropout"},
    fixed={"activation_function": "gelu_new", "scale_attn_weights": True,
           "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names=table("""
        blocks  transformer.h    wte  transformer.wte    wpe  transformer.wpe    norm  transformer.ln_f
        head    lm_head          norm1  ln_1             norm2  ln_2             attn.wo  attn.c_proj
        attn.wq attn.c_attn      attn.wk  attn.c_attn    attn.wv  attn.c_attn
        mlp.w1  mlp.c_fc         mlp.w2  mlp.c_proj"""))

MIXTRAL = DEFAULT._replace(
    architecture="MixtralForCausalLM", routers=("softmax-topk",),
    fields={**FIELDS, "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"}, fixed=SILU,
    names=ATTENTION | table("""
        moe.router  block_sparse_moe.gate              moe.w1  block_sparse_moe.experts.{}.w1
        moe.w3      block_sparse_moe.experts.{}.w3     moe.w2  block_sparse_moe.experts.{}.w2"""),
    window="plain")

GLM4_MOE = DEFAULT._replace(
    architecture="Glm4MoeForCausalLM", routers=("sigmoid",),
    # The bias that steers a sigmoid router exists where its rate is not 0.
    extra={"router_bias_rate": 1e-3, "n_shared_experts": 1},
    fields={**EXPERT_FIELDS, "n_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts"},
    fixed={**NO_BIAS, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
           "routed_scaling_factor": 1.0, "use_qk_norm": False, "num_nextn_predict_layers": 0},
    also={"intermediate_size": "ffn_hidden"},
    names=EXPERTS | table("""
        moe.router.bias  mlp.gate.e_score_correction_bias    moe.shared.w1  mlp.shared_experts.gate_proj
        moe.shared.w3    mlp.shared_experts.up_proj          moe.shared.w2  mlp.shared_experts.down_proj"""))

QWEN3_MOE = DEFAULT._replace(
    architecture="Qwen3MoeForCausalLM", routers=("softmax-topk", "softmax"),
    flags={**DEFAULT.flags, "qk_norm": "head"},
    fields={**EXPERT_FIELDS, "n_experts": "num_local_experts"},
    fixed={**NO_BIAS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    also={"intermediate_size": "ffn_hidden", "num_experts": "n_experts"},
    names=EXPERTS | QK_NORM, window="switch")

QWEN2_MOE = DEFAULT._replace(
    architecture="Qwen2MoeForCausalLM", routers=("softmax",), extra={"n_shared_experts": 1},
    fields={**EXPERT_FIELDS, "n_experts": "num_experts"},
    fixed={**SILU, "qkv_bias": False, "norm_topk_prob": False, "decoder_sparse_step": 1,
           "use_sliding_window": False},
    also={"intermediate_size": "ffn_hidden", "shared_expert_intermediate_size": "ffn_hidden"},
    # Its shared expert has a gate of its own. Ours has none, so the gate is written as zeros.
    names=EXPERTS | table("""
        gate           mlp.shared_expert_gate        moe.shared.w1  mlp.shared_expert.gate_proj
        moe.shared.w3  mlp.shared_expert.up_proj     moe.shared.w2  mlp.shared_expert.down_proj"""),
    only_out=True)

MEGATRON_BERT = Family(  # its norms are before attention and MLP, as ours; BertForMaskedLM has them behind
    "MegatronBertForMaskedLM",
    flags={"norm": "layer", "mlp": "gelu", "pos": "learned", "objective": "mlm"}, extra={"bias": True},
    fields={**FIELDS, "n_kv_head": "num_attention_heads", "norm_eps": "layer_norm_eps"},
    also={"hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "dropout"},
    fixed={"hidden_act": "gelu_pytorch_tanh", "is_decoder": False, "type_vocab_size": 2},
    names=table("""
        blocks     bert.encoder.layer                     norm       bert.encoder.ln
        wte        bert.embeddings.word_embeddings        wpe        bert.embeddings.position_embeddings
        mlm.dense  cls.predictions.transform.dense        mlm.norm   cls.predictions.transform.LayerNorm
        head       cls.predictions.decoder                mlm.bias   cls.predictions.bias
        norm1      attention.ln                           norm2      ln
        attn.wq    attention.self.query                   attn.wk    attention.self.key
        attn.wv    attention.self.value                   attn.wo    attention.output.dense
        mlp.w1     intermediate.dense                     mlp.w2     output.dense"""),
    only_out=True)

FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "gpt2": GPT2, "mixtral": MIXTRAL, "glm4_moe": GLM4_MOE,
            "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "olmo2": OLMO2, "smollm3": SMOLLM3,
            "gemma3_text": GEMMA3, "qwen2_moe": QWEN2_MOE, "megatron-bert": MEGATRON_BERT}
# Flags that say how a model is trained. The function of the exported model does not depend on them.
TRAINING_ONLY = ("capacity_factor", "drop_policy", "router_bias_rate")
# Flags that the fields of a window express
WINDOW_FLAGS = {"none": (), "plain": ("window",), "switch": ("window",), "layers": ("window", "full_every"),
                "always": ("window", "full_every", "window_rope_base")}


# -----------------------------------------------------------------------------
# Our flags: of which family, as config.json

def family_of(cfg):
    """Return the key of FAMILIES that computes what a model with these flags does. ValueError: none does."""
    found = {}
    for kind, family in FAMILIES.items():
        if bool(family.routers) == bool(cfg.n_experts):
            found[kind] = differences(cfg, kind)
    kind = min(found, key=lambda kind: len(found[kind]))
    if found[kind]:
        have = as_typed({flag: getattr(cfg, flag) for flag in found[kind]})
        raise ValueError(f"no model of transformers has {have} in this combination; the nearest, {kind}, has "
                         f"{as_typed(found[kind])} (FAMILIES in hub/families.py)")
    return kind


def differences(cfg, kind):
    """Return {flag: what it would have to be} for a model of the family to compute what one of ours does."""
    family = FAMILIES[kind]
    wanted = dict(family.flags)
    flag_of = {}
    for flag, field in family.fields.items():
        # Two flags that one field expresses are equal.
        wanted[flag] = getattr(cfg, flag_of.setdefault(field, flag))
    if family.routers and cfg.router not in family.routers:
        wanted["router"] = family.routers[0]
    if "gate" in family.names:
        wanted["n_shared_experts"] = 0  # the gate halves what a shared expert gives
    written = {"vocab_size", "rope_base", "router", *TRAINING_ONLY, *family.flags, *family.extra,
               *family.fields, *WINDOW_FLAGS[family.window]}
    if cfg.pos == "rope":
        written.add("head_dim")
    if kind != "gemma3_text":
        written.add("rope_scaling")
    for flag in flags_beyond(written, cfg):
        wanted[flag] = getattr(Config(), flag)
    return {flag: value for flag, value in wanted.items() if getattr(cfg, flag) != value}


def full_config(cfg, kind):
    """Return cfg with the flags that give our model all tensors of the family."""
    extra = {flag: value for flag, value in FAMILIES[kind].extra.items() if not getattr(cfg, flag)}
    return dataclasses.replace(cfg, **extra)


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
    for field, flag in family.also.items():
        out[field] = getattr(cfg, flag)
    if cfg.pos == "rope":
        out["head_dim"] = head_width(cfg)
        out |= rope_fields(cfg, kind)

    if kind == "glm4_moe":
        out["norm_topk_prob"] = cfg.top_k > 1
    elif kind == "qwen3_moe":
        out["norm_topk_prob"] = cfg.router == "softmax-topk"
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

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
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
    shared_expert_intermediate_size
"""


def read_config(path, dtype, seq_len=0):
    """Return (key of FAMILIES, Config, vocabulary size) of a config.json. seq_len: a shorter sequence.

    ValueError names the fields by which the model would be another function than ours.
    """
    given = load_json(path)
    check_schema(given, {"model_type": str}, path)
    kind = given["model_type"]
    imported = [name for name, family in FAMILIES.items() if not family.only_out]
    if kind not in imported:
        raise ValueError(f"{path}: model_type {kind[:60]!r} is none of {', '.join(imported)}")
    theirs = by_transformers(path, kind, given)
    if seq_len:
        theirs[FAMILIES[kind].fields["seq_len"]] = seq_len
    try:
        flags = our_flags(kind, theirs)
        types = Config.__annotations__
        check_schema(flags, {name: types[name] for name in flags if name != "rope_scaling"}, "our flags")
        cfg = Config(**flags, dtype=dtype)
        config.check(cfg)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as e:  # it speaks of our flags
        raise ValueError(f"{path} is no model of ours: {type(e).__name__} {e}") from None
    ours = by_transformers(path, kind, config_json(cfg, kind, theirs["vocab_size"], None, dtype))
    architecture = FAMILIES[kind].architecture
    theirs["architectures"] = given.get("architectures") or [architecture]
    check_same(path, given, theirs, ours)
    return kind, cfg, theirs["vocab_size"]


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


def our_flags(kind, theirs):
    """Return our flags for their model, {flag: value}; check_same says whether they are all of it."""
    family = FAMILIES[kind]
    flags = {**family.flags, **family.extra}
    for flag, field in family.fields.items():
        flags[flag] = theirs[field]
    if kind == "gpt2" and theirs["n_inner"] is None:
        flags["ffn_hidden"] = theirs["n_inner"] = 4 * theirs["n_embd"]
    if family.routers:
        flags["router"] = family.routers[0]
    if kind == "qwen3_moe" and not theirs["norm_topk_prob"]:
        flags["router"] = "softmax"
    if family.flags["pos"] == "rope":
        flags |= rope_flags(kind, theirs["rope_parameters"])
        if theirs.get("head_dim") is None:
            theirs["head_dim"] = flags["n_embd"] // flags["n_head"]
        if theirs["head_dim"] * flags["n_head"] != flags["n_embd"]:
            flags["head_dim"] = theirs["head_dim"]
    layers = theirs.get("layer_types") or ["sliding_attention"]
    if family.window != "none" and "sliding_attention" in layers:
        flags["window"] = theirs["sliding_window"] or 0
        if "full_attention" in layers:
            flags["full_every"] = layers.index("full_attention") + 1
    return flags


def rope_flags(kind, rope):
    """Return our flags of rotary positions, {flag: value}. rope: rope_parameters."""
    flags = {}
    if kind == "gemma3_text":
        if "sliding_attention" in rope:
            flags["window_rope_base"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    flags["rope_base"] = rope["rope_theta"]
    if rope.get("rope_type") == "llama3":
        flags["rope_scaling"] = tuple(float(rope[key]) for key in LLAMA3_KEYS)
    return flags


def check_same(path, given, theirs, ours):
    """Raise ValueError if two models of a class differ in a field on which the logits depend."""
    from transformers import GenerationConfig, PreTrainedConfig
    harmless = {*HARMLESS.split(), *GenerationConfig().to_dict(), *PreTrainedConfig().to_dict()}
    harmless -= {"is_encoder_decoder", "architectures"}
    if "moe_intermediate_size" in theirs:
        harmless.add("intermediate_size")  # of layers without experts
    for fields in (theirs, ours):
        fields.setdefault("is_causal", True)
    wrong = []
    for field in sorted((theirs.keys() | ours.keys()) - harmless):
        have = plain(theirs.get(field))
        want = plain(ours.get(field))
        if have == want:
            continue
        source = "" if field in given else " by default"
        wrong.append(f"{field} is {reprlib.repr(have)}{source}, in our model {reprlib.repr(want)}")
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)[:600]}")


def plain(value):
    """Return the value of a field; None for what says as much as no such field."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items()
                 if key != "type" and (key, inner) != ("partial_rotary_factor", 1)}
    return None if value is False or value in ({}, []) else value

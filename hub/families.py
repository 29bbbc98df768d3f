"""Families of models in transformers: their config.json, in and out, and their names of our tensors.

    read_config   their config.json -> our flags
    family_of     our flags -> the family that computes the same
    config_json   our flags -> their config.json

A config.json is read by the class of transformers for its model_type. Our flags of it are written as a
config.json and read by the same class: a field that then differs is a part that our model has not.
"""
import dataclasses
from typing import Literal, NamedTuple

import config
from config import Config, as_typed, flags_beyond, head_width
from corpus.text import require
from interface.files import check_schema, load_json


def table(text):
    """Return {word: the word behind it}."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


ATTENTION = table("""
    blocks  model.layers           wte  model.embed_tokens    norm  model.norm    head  lm_head
    norm1   input_layernorm        norm2    post_attention_layernorm
    attn.wq self_attn.q_proj  attn.wk self_attn.k_proj  attn.wv self_attn.v_proj  attn.wo self_attn.o_proj""")
DENSE = ATTENTION | table("mlp.w1 mlp.gate_proj   mlp.w3 mlp.up_proj   mlp.w2 mlp.down_proj")
EXPERTS = ATTENTION | table("""
    moe.router  mlp.gate                       moe.w1  mlp.experts.{}.gate_proj
    moe.w3      mlp.experts.{}.up_proj         moe.w2  mlp.experts.{}.down_proj""")
QK_NORM = table("attn.q_norm self_attn.q_norm   attn.k_norm self_attn.k_norm")
FLAGS = {"norm": "rms", "mlp": "swiglu", "pos": "rope"}
FIELDS = table("""
    n_layer     num_hidden_layers     n_head       num_attention_heads    n_kv_head  num_key_value_heads
    n_embd      hidden_size           ffn_hidden   intermediate_size      seq_len    max_position_embeddings
    norm_eps    rms_norm_eps          tied         tie_word_embeddings""")
EXPERT_FIELDS = FIELDS | table("ffn_hidden moe_intermediate_size   top_k num_experts_per_tok")
WINDOW = {"sliding_window": "window"}
SWITCHED = {**WINDOW, "use_sliding_window": "window"}
LAYERED = {**SWITCHED, "layer_types": "full_every"}


class Family(NamedTuple):
    """An architecture of transformers."""
    architecture: str
    flags: dict = FLAGS  # those by which our model is of this family
    fields: dict = FIELDS  # {flag: field of config.json}
    names: dict = DENSE  # {our module or parameter: theirs}; {} stands for an expert's number
    fixed: dict = {}  # {field: its one value, which is not the default of transformers}
    also: dict = {}  # {further field: the flag whose value it has}
    window: dict = {}  # {field of its windows: the flag that it expresses}
    routers: tuple = ()  # values of --router; none: it has no experts
    extra: dict = {}  # flags for tensors that all its models have; zeros stand for those that a run lacks


FAMILIES = {
    "llama": Family("LlamaForCausalLM", fields={**FIELDS, "bias": "attention_bias"},
                    also={"mlp_bias": "bias"}),
    "mistral": Family("MistralForCausalLM", window=WINDOW),
    "gpt2": Family(
        "GPT2LMHeadModel", flags={"norm": "layer", "mlp": "gelu", "pos": "learned"}, extra={"bias": True},
        fields=table("""
            n_layer n_layer     n_head  n_head       n_kv_head n_head                n_embd n_embd
            ffn_hidden n_inner  seq_len n_positions  norm_eps  layer_norm_epsilon    tied tie_word_embeddings
            """),
        also={"resid_pdrop": "dropout", "embd_pdrop": "dropout", "attn_pdrop": "dropout"},
        names=table("""
            blocks  transformer.h    wte  transformer.wte    wpe  transformer.wpe    norm  transformer.ln_f
            head    lm_head          norm1  ln_1             norm2  ln_2             attn.wo  attn.c_proj
            attn.wq attn.c_attn      attn.wk  attn.c_attn    attn.wv  attn.c_attn
            mlp.w1  mlp.c_fc         mlp.w2  mlp.c_proj""")),
    "mixtral": Family(
        "MixtralForCausalLM", routers=("softmax-topk",), window=WINDOW,
        fields={**FIELDS, "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"},
        names=ATTENTION | table("""
            moe.router  block_sparse_moe.gate              moe.w1  block_sparse_moe.experts.{}.w1
            moe.w3      block_sparse_moe.experts.{}.w3     moe.w2  block_sparse_moe.experts.{}.w2""")),
    "glm4_moe": Family(
        # The bias that steers a sigmoid router exists where its rate is not 0.
        "Glm4MoeForCausalLM", routers=("sigmoid",), extra={"router_bias_rate": 1e-3, "n_shared_experts": 1},
        fields={**EXPERT_FIELDS, "n_experts": "n_routed_experts", "n_shared_experts": "n_shared_experts"},
        fixed={"first_k_dense_replace": 0, "num_nextn_predict_layers": 0},
        names=EXPERTS | table("""
            moe.router.bias  mlp.gate.e_score_correction_bias    moe.shared.w1  mlp.shared_experts.gate_proj
            moe.shared.w3    mlp.shared_experts.up_proj          moe.shared.w2  mlp.shared_experts.down_proj
            """)),
    "qwen2": Family("Qwen2ForCausalLM", flags={**FLAGS, "qkv_bias": True}, window=LAYERED),
    "qwen3": Family("Qwen3ForCausalLM", flags={**FLAGS, "qk_norm": "head"}, names=DENSE | QK_NORM,
                    window=LAYERED),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", routers=("softmax-topk", "softmax"), flags={**FLAGS, "qk_norm": "head"},
        fields={**EXPERT_FIELDS, "n_experts": "num_local_experts"}, also={"num_experts": "n_experts"},
        names=EXPERTS | QK_NORM, window=SWITCHED),
    "olmo2": Family(
        "Olmo2ForCausalLM", flags={**FLAGS, "qk_norm": "all", "norm_place": "after"},
        names=DENSE | QK_NORM | table("norm1 post_attention_layernorm   norm2 post_feedforward_layernorm")),
    "smollm3": Family("SmolLM3ForCausalLM", fields={**FIELDS, "no_rope_every": "no_rope_layer_interval"},
                      window=LAYERED),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        flags={"norm": "rms1p", "mlp": "geglu", "pos": "rope", "qk_norm": "head", "norm_place": "both",
               "embed_scale": True},
        names=DENSE | table("""
            norm1.offset        input_layernorm             norm2.offset        pre_feedforward_layernorm
            out_norm1.offset    post_attention_layernorm    out_norm2.offset    post_feedforward_layernorm
            attn.q_norm.offset  self_attn.q_norm            attn.k_norm.offset  self_attn.k_norm
            norm.offset         model.norm"""),
        window={**WINDOW, "layer_types": "full_every", "rope_local_base_freq": "window_rope_base"}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", routers=("softmax",), extra={"n_shared_experts": 1},
        fields={**EXPERT_FIELDS, "n_experts": "num_experts"},
        fixed={"qkv_bias": False}, also={"shared_expert_intermediate_size": "ffn_hidden"},
        # Its shared expert has a gate of its own. Ours has none, so the gate is written as zeros.
        names=EXPERTS | table("""
            gate           mlp.shared_expert_gate        moe.shared.w1  mlp.shared_expert.gate_proj
            moe.shared.w3  mlp.shared_expert.up_proj     moe.shared.w2  mlp.shared_expert.down_proj""")),
    "megatron-bert": Family(  # its norms are before attention and MLP; BertForMaskedLM has them behind
        "MegatronBertForMaskedLM", extra={"bias": True}, fixed={"hidden_act": "gelu_pytorch_tanh"},
        flags={"norm": "layer", "mlp": "gelu", "pos": "learned", "objective": "mlm"},
        fields={**FIELDS, "n_kv_head": "num_attention_heads", "norm_eps": "layer_norm_eps"},
        also={"hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "dropout"},
        names=table("""
            blocks     bert.encoder.layer                     norm       bert.encoder.ln
            wte        bert.embeddings.word_embeddings        wpe        bert.embeddings.position_embeddings
            mlm.dense  cls.predictions.transform.dense        mlm.norm   cls.predictions.transform.LayerNorm
            head       cls.predictions.decoder                mlm.bias   cls.predictions.bias
            attn.wq    attention.self.query    attn.wk  attention.self.key    attn.wv  attention.self.value
            attn.wo    attention.output.dense  mlp.w1   intermediate.dense    mlp.w2   output.dense
            norm1      attention.ln            norm2    ln""")),
}
ONLY_OUT = {"qwen2_moe", "megatron-bert"}  # they are exported, not imported
# Flags that say how a model is trained. The function of the exported model does not depend on them.
TRAINING_ONLY = ("capacity_factor", "drop_policy", "router_bias_rate")
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


# Our flags: of which family, as config.json

def family_of(cfg):
    """Return the key of FAMILIES that computes what a model with these flags does. ValueError: none does."""
    found = {kind: differences(cfg, kind) for kind, family in FAMILIES.items()
             if bool(family.routers) == bool(cfg.n_experts)}
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
    if family.fields.get("n_kv_head") == family.fields.get("n_head"):
        wanted["n_kv_head"] = cfg.n_head
    if family.routers and cfg.router not in family.routers:
        wanted["router"] = family.routers[0]
    if "gate" in family.names:
        wanted["n_shared_experts"] = 0  # the gate halves what a shared expert gives
    written = {"vocab_size", "rope_base", "router", *TRAINING_ONLY, *family.flags, *family.extra,
               *family.fields, *family.window.values()}
    if cfg.pos == "rope":
        written |= {"head_dim"} if kind == "gemma3_text" else {"head_dim", "rope_scaling"}
    wanted |= {flag: getattr(Config(), flag) for flag in flags_beyond(written, cfg)}
    return {flag: value for flag, value in wanted.items() if getattr(cfg, flag) != value}


def full_config(cfg, kind):
    """Return cfg with the flags that give our model all tensors of the family."""
    extra = {flag: value for flag, value in FAMILIES[kind].extra.items() if not getattr(cfg, flag)}
    return dataclasses.replace(cfg, **extra)


def config_json(cfg, kind, vocab_size, eod, dtype):
    """Return the config.json of a model of ours, a dict. eod: None, too, is written: a default is an id."""
    family = FAMILIES[kind]
    out = {"model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype,
           "vocab_size": vocab_size, "bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None,
           **family.fixed}
    out |= {field: getattr(cfg, flag) for flag, field in family.fields.items()}
    out |= {field: getattr(cfg, flag) for field, flag in family.also.items()}
    if cfg.pos == "rope":
        out |= {"head_dim": head_width(cfg), "rope_theta": cfg.rope_base}
    if cfg.rope_scaling:
        scaled = dict(zip(LLAMA3_KEYS, cfg.rope_scaling, strict=True))
        scaled["original_max_position_embeddings"] = int(scaled["original_max_position_embeddings"])
        out["rope_scaling"] = {"rope_type": "llama3", **scaled}
    types = ["full_attention"] * cfg.n_layer
    for i in range(cfg.n_layer):
        if cfg.window and not (cfg.full_every and (i + 1) % cfg.full_every == 0):
            types[i] = "sliding_attention"
    window = {"sliding_window": cfg.window or None, "use_sliding_window": cfg.window > 0,
              "layer_types": types,
              "rope_local_base_freq": cfg.window_rope_base or cfg.rope_base}
    out |= {field: window[field] for field in family.window}

    if kind == "glm4_moe":
        out |= {"norm_topk_prob": cfg.top_k > 1, "partial_rotary_factor": 1.0}
    elif kind == "smollm3" and not cfg.no_rope_every:
        out["no_rope_layers"] = [1] * cfg.n_layer
    elif kind == "qwen3_moe":
        out["norm_topk_prob"] = cfg.router == "softmax-topk"
    elif kind == "gemma3_text":
        out |= {"query_pre_attn_scalar": head_width(cfg), "sliding_window": cfg.window or cfg.seq_len}
    return out


# Their config.json

# Logits do not depend on these, nor on what PreTrainedConfig has for every model and GenerationConfig for
# text: how a model was saved and is to be run, heads of other tasks; training; what another field decides.
HARMLESS = """
    tokenizer_class gradient_checkpointing task_specific_params transformers.js_config unsloth_version
    unsloth_fixed is_llama_config n_special output_past predict_special_tokens _num_labels
    _attn_implementation_autoset summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout is_decoder initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop
    output_router_logits router_aux_loss_coef router_jitter_noise pretraining_tp reorder_and_upcast_attn
    n_ctx max_window_layers sliding_window_pattern _sliding_window_pattern no_rope_layer_interval
"""


def read_config(path, seq_len=0):
    """Return (key of FAMILIES, Config, vocabulary size) of a config.json. seq_len: a shorter sequence.

    ValueError names the fields by which the model would be another function than ours.
    """
    given = load_json(path)
    imported = [kind for kind in FAMILIES if kind not in ONLY_OUT]
    check_schema(given, {"model_type": Literal[*imported]}, path)
    kind = given["model_type"]
    theirs = by_transformers(path, kind, given)
    if seq_len:
        theirs[FAMILIES[kind].fields["seq_len"]] = seq_len
    cfg = Config(**our_flags(kind, theirs), dtype="fp32")
    check_schema({"rope_base": cfg.rope_base}, {"rope_base": float}, path)
    config.check(cfg)
    ours = by_transformers(path, kind, config_json(cfg, kind, theirs["vocab_size"], None, ""))
    theirs["architectures"] = given.get("architectures") or ours["architectures"]

    from transformers import GenerationConfig, PreTrainedConfig
    harmless = {*HARMLESS.split(), *GenerationConfig().to_dict(), *PreTrainedConfig().to_dict()}
    harmless -= {"is_encoder_decoder", "architectures"}
    if "moe_intermediate_size" in theirs:
        harmless.add("intermediate_size")  # of layers without experts
    wrong = []
    for field in sorted((theirs.keys() | ours.keys()) - harmless):
        default = field == "is_causal"  # no field of the classes, but the attention reads it
        have = plain(theirs.get(field, default))
        want = plain(ours.get(field, default))
        if have != want:
            wrong.append(f"{field} is {have!r}, in our model {want!r}")
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)[:600]}")
    return kind, cfg, theirs["vocab_size"]


def require_transformers():
    transformers = require("transformers", "a model or a tokenizer of Hugging Face")
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ValueError("models and tokenizers of Hugging Face need: pip install 'transformers>=5'")
    return transformers


def by_transformers(path, kind, fields):
    """Return the fields that a class of transformers has after it has read a config.json."""
    transformers = require_transformers()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    fields = {**fields, "dtype": None, "torch_dtype": None}
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(fields).to_dict()
    except Exception as e:  # whatever its validators raise, and its arithmetic on odd values
        raise ValueError(f"{path}: transformers refuses it: {' '.join(str(e).split())[:300]}") from None


def our_flags(kind, theirs):
    """Return our flags for their model, {flag: value}; read_config says whether they are all of it."""
    family = FAMILIES[kind]
    if kind == "gpt2" and theirs["n_inner"] is None:
        theirs["n_inner"] = 4 * theirs["n_embd"]
    read = {flag: theirs[field] for flag, field in family.fields.items()}
    flags = {**family.flags, **family.extra, **read}
    if family.routers:
        flags["router"] = family.routers[0]
    if kind == "qwen3_moe" and not theirs["norm_topk_prob"]:
        flags["router"] = "softmax"
    if family.flags["pos"] == "rope":
        if theirs.get("head_dim") is None:
            theirs["head_dim"] = flags["n_embd"] // flags["n_head"]
        if theirs["head_dim"] * flags["n_head"] != flags["n_embd"]:
            flags["head_dim"] = theirs["head_dim"]
        rope = theirs["rope_parameters"]
        if kind == "gemma3_text":
            flags["window_rope_base"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        flags["rope_base"] = rope["rope_theta"]
        if rope.get("rope_type") == "llama3":
            flags["rope_scaling"] = tuple(float(rope[key]) for key in LLAMA3_KEYS)
    layers = theirs.get("layer_types") or ["sliding_attention"]
    if family.window and "sliding_attention" in layers:
        flags["window"] = theirs["sliding_window"] or 0
        if "full_attention" in layers:
            flags["full_every"] = layers.index("full_attention") + 1
    return flags


def plain(value):
    """Return the value of a field; None for what says as much as no such field."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items()
                 if key != "type" and (key, inner) != ("partial_rotary_factor", 1)}
    return None if value is False or value in ({}, []) else value

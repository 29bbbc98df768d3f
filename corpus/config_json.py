"""config.json of a model of others, for convert.py: what transformers makes of it, and whether it is ours.

A field that config.json lacks has the default of transformers for that model_type, DEFAULTS. The tests
compare DEFAULTS with the classes of transformers. Every field that is there is one of these:

    a flag of ours         `fields` of its Family, and rope_theta
    one fixed value        `fixed` of its Family, and EVERYWHERE: the model computes something else otherwise
    without an effect      HARMLESS: the logits do not depend on it
    refused by name        whatever else there is
"""
import dataclasses
import reprlib
from typing import Literal, NamedTuple

import config
from corpus.hugging_face import FAMILIES, fixed_fields, layer_types
from interface.schema import Range, check_schema, load_json_of_others

MOST_BYTES = 2**22  # of a config.json: that of a model with 1,000 labels has 60,000
SAME = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}  # two names of one function
NOT_OURS = {  # model_types that many people try first, and what they have and our model has not
    "qwen2_moe": "a gate before its shared expert",
    "gemma3": "images; models of text alone are gemma3_text",
    "phi3": "queries, keys and values in one matrix",
}

# -----------------------------------------------------------------------------
# What transformers takes where config.json has no such field

DECODER = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "sliding_window": None,
    "rope_parameters": None,
}
QWEN = {
    **DECODER,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
DEFAULTS = {
    "llama": {
        **DECODER,
        "intermediate_size": 11008,
        "num_key_value_heads": None,  # as many as num_attention_heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "mlp_bias": False,
    },
    "mistral": {
        **DECODER,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "mixtral": {
        **DECODER,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        **DECODER,
        "vocab_size": 151552,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
    },
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
    "qwen3_moe": {
        **DECODER,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,  # []
        "norm_topk_prob": False,
    },
    "olmo2": {
        **DECODER,
        "vocab_size": 50304,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    "smollm3": {
        **DECODER,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "no_rope_layers": None,  # as no_rope_layer_interval says
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **DECODER,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,  # as sliding_window_pattern says
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,  # 4 n_embd
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
}
ROPE_THETA = {"llama": 1e4, "mistral": 1e4, "mixtral": 1e6, "glm4_moe": 1e4, "qwen2": 1e4, "qwen3": 1e4,
              "qwen3_moe": 1e4, "olmo2": 1e4, "smollm3": 2e6, "gemma3_text": 1e6}
WINDOW_ROPE_THETA = 1e4  # of gemma3_text, in its layers with a window
PARTIAL_ROTARY = {"glm4_moe": 0.5}  # 1 elsewhere
# A second name of a field, which transformers takes as well.
SECOND_NAMES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "glm4_moe": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
# The one value that a field of any model may have; the field may be absent.
EVERYWHERE = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "per_layer_config": None,
    "auto_map": None,
    "pruned_heads": {},
    "use_mrope": False,  # Qwen 2.5 and models made from it say so; true is Qwen2-VL's positions of images
}
MAY_BE_NULL = {"head_dim", "quantization_config", "per_layer_config", "auto_map", "pruned_heads", "use_mrope",
               "layer_types", "use_bidirectional_attention", "mlp_only_layers", "no_rope_layers"}

# Logits do not depend on these. How the model was saved, and is to be run; heads of other tasks:
SAVED = """
    model_type architectures transformers_version torch_dtype dtype name_or_path _name_or_path _commit_hash
    _attn_implementation attn_implementation _attn_implementation_autoset _experts_implementation
    experts_implementation _flash_attn_2_enabled output_hidden_states output_attentions return_dict
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward gradient_checkpointing tokenizer_class
    prefix bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id is_decoder
    cross_attention_hidden_size tie_encoder_decoder tie_last_hidden_states finetuning_task
    task_specific_params id2label label2id num_labels problem_type classifier_dropout transformers.js_config
    cache_implementation unsloth_version unsloth_fixed
    is_llama_config n_ctx summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout
"""
# How text is made from logits:
GENERATION = """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
    min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p use_cache
"""
# What training adds; rounding (pretraining_tp, reorder_and_upcast_attn):
TRAINING = """
    initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop output_router_logits
    router_aux_loss_coef router_jitter_noise pretraining_tp reorder_and_upcast_attn
"""
HARMLESS = {*SAVED.split(), *GENERATION.split(), *TRAINING.split()}
# intermediate_size is of layers without experts, of which it has none here. The other field is of another
# family: earlier versions of convert.py export wrote it.
HARMLESS_IN = {"glm4_moe": {"intermediate_size", "shared_expert_intermediate_size"},
               "mixtral": {"shared_expert_intermediate_size"},
               "smollm3": {"max_window_layers"},
               # What old versions of transformers wrote: outputs to return, heads of other tasks
               "gpt2": {"_num_labels", "n_special", "predict_special_tokens", "output_past"},
               "gemma3_text": {"_sliding_window_pattern"},  # sliding_window_pattern is read
               "qwen3_moe": {"intermediate_size", "max_window_layers"}}
ROPE_FIELDS = ("rope_scaling", "rope_parameters")
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
OPTIONAL_DICT = (dict, type(None))
OPTIONAL = dict.fromkeys(("rope_parameters?", "rope_scaling?"), (dict, type(None)))


class Found(NamedTuple):
    """What read_config found."""
    kind: str  # the key of FAMILIES
    cfg: config.Config
    vocab_size: int
    extra_layers: int  # behind the last one; they guess tokens after the next one


def read_config(path, dtype, seq_len=0):
    """Return what their config.json says, as Found.

    ValueError names the field by which the model would be another function than ours.
    """
    theirs = load_json_of_others(path, MOST_BYTES)
    check_schema(theirs, {"model_type": str, **OPTIONAL}, path)
    kind = read_family(path, theirs)
    family = FAMILIES[kind]
    given = with_defaults(path, theirs)
    types = {field.name: field.type for field in dataclasses.fields(config.Config)}
    check_schema(given, {"vocab_size": Range(1, 2**24), "num_nextn_predict_layers?": Range(0, 2**12),
                         **{field: types[flag] for flag, field in family.fields.items()}}, path)

    flags = dict(family.flags)
    for flag, field in family.fields.items():
        flags[flag] = given[field]
    if seq_len > flags["seq_len"]:
        raise ValueError(f"--seq-len {seq_len} exceeds {family.fields['seq_len']} {flags['seq_len']} of"
                         f" {path}")
    if seq_len and flags["pos"] == "learned" and seq_len < flags["seq_len"]:
        raise ValueError(f"--seq-len {seq_len} shortens rotary positions; {kind} has a learned one for each "
                         f"of {flags['seq_len']} tokens; leave out --seq-len")
    if seq_len:
        flags["seq_len"] = seq_len
    if kind == "qwen3_moe":
        flags["router"] = "softmax-topk" if given["norm_topk_prob"] else "softmax"
    flags |= read_head_dim(path, given)
    flags |= read_rope(path, theirs) if kind != "gemma3_text" else read_two_ropes(path, theirs)
    flags |= read_window(path, given, flags, kind)
    cfg = config.Config(**flags, dtype=dtype)
    try:
        config.check(cfg)
    except ValueError as e:  # it speaks of our flags
        raise ValueError(f"{path} is no model of ours: {e}") from None
    check_experts(path, theirs, cfg, kind)
    check_fixed(path, theirs, given, cfg, kind)
    return Found(kind, cfg, given["vocab_size"], given.get("num_nextn_predict_layers", 0))


def read_family(path, theirs):
    """Return the key of FAMILIES for their config.json. ValueError: none is imported from it."""
    name = theirs["model_type"]
    if name not in FAMILIES or name not in DEFAULTS:
        why = f" (it has {NOT_OURS[name]})" if name in NOT_OURS else ""
        raise ValueError(f"{path}: model_type {name[:60]!r} is none of {', '.join(DEFAULTS)}{why}")
    family = FAMILIES[name].architecture
    architectures = theirs.get("architectures")
    if architectures not in (None, [], [family]):
        raise ValueError(f"{path}: architectures is {reprlib.repr(architectures)}, only [{family!r}] is "
                         "imported: other classes compute something else with these weights")
    return name


def with_defaults(path, theirs):
    """Return the fields of their config.json, those that are absent with transformers' defaults.

    ValueError: a field is unknown, or given under two names with two values.
    """
    name = theirs["model_type"]
    theirs = dict(theirs)
    for second, first in SECOND_NAMES.get(name, {}).items():
        if second in theirs and theirs.setdefault(first, theirs[second]) != theirs[second]:
            raise ValueError(f"{path}: {second} is {reprlib.repr(theirs[second])} and {first} "
                             f"{reprlib.repr(theirs[first])}: they are two names of one field")
    known = {*DEFAULTS[name], *EVERYWHERE, *HARMLESS, *HARMLESS_IN.get(name, ()), *SECOND_NAMES.get(name, ()),
             *FAMILIES[name].fixed, "layer_types"}
    if name in ROPE_THETA:
        known.update({*ROPE_FIELDS, "rope_theta", "partial_rotary_factor"})
    if name == "gemma3_text":
        known.add("rope_local_base_freq")
    for field, value in theirs.items():
        if field not in known and value is not None:
            raise ValueError(f"{path}: {field[:60]} is {reprlib.repr(value)}, and no {name} that we know has "
                             "this field; if the logits do not depend on it, delete it from config.json")

    given = {**DEFAULTS[name], **theirs}
    if "num_key_value_heads" in given and given["num_key_value_heads"] is None and name != "glm4_moe":
        given["num_key_value_heads"] = given["num_attention_heads"]
    if name == "gpt2" and given["n_inner"] is None and type(given["n_embd"]) is int:
        given["n_inner"] = 4 * given["n_embd"]
    return given


def check_experts(path, theirs, cfg, kind):
    """Raise ValueError if a model of a family with experts has none."""
    field = FAMILIES[kind].fields.get("n_experts")
    if field and not cfg.n_experts:
        raise ValueError(f"{path}: {field} is 0, {theirs['model_type']} has experts")


def check_fixed(path, theirs, given, cfg, kind):
    """Raise ValueError if a field has another value than the one that our model computes."""
    must = {**EVERYWHERE, **fixed_fields(cfg, kind), "layer_types": ["full_attention"] * cfg.n_layer}
    if uses_window(given, kind):
        must.pop("layer_types")  # read_window has read them
    must.pop("num_nextn_predict_layers", None)  # convert.py leaves those layers out
    for field, value in must.items():
        if field not in given:
            continue
        have = given[field]
        if isinstance(have, str):
            have = SAME.get(have, have)
        computed = SAME.get(value, value) if isinstance(value, str) else value
        if have == computed or have is None and field in MAY_BE_NULL:
            continue
        source = "" if field in theirs else ", transformers' default where config.json has no such field"
        raise ValueError(f"{path}: {field} is {reprlib.repr(have)}{source}; {ours(field, value, cfg)}")


def ours(field, value, cfg):
    """Return what our model computes in the place of a field's other value."""
    if field == "mlp_bias":
        return f"attention_bias is {cfg.bias}, and our model has biases in attention and MLP, or in neither"
    if field == "norm_topk_prob" and value:
        return f"our sigmoid router divides the gates of {cfg.top_k} experts by their sum"
    if field == "norm_topk_prob":
        return "our sigmoid router does not divide the gate of a single expert by itself"
    if field == "layer_types":
        return "every layer of our model attends to all positions before it"
    if field == "auto_map":
        return "such a model brings code of its own, which is not read; without it, delete auto_map"
    if value in (None, {}):
        return "our model has no such thing"
    return f"our model computes {value!r} only"


def uses_window(given, kind):
    """Whether a model has a window, in some of its layers."""
    form = FAMILIES[kind].window
    is_on = form in ("plain", "always") or form != "none" and given["use_sliding_window"]
    return is_on and given["sliding_window"] is not None


def read_window(path, given, flags, kind):
    """Return our flags {"window", "full_every"} of a model's windows; {} where none cuts a sequence.

    ValueError: the layers with a window do not come as --full-every has them.
    """
    form = FAMILIES[kind].window
    if form in ("switch", "layers"):
        check_schema(given, {"use_sliding_window": bool}, path)
    window = given.get("sliding_window")
    if window is None and form == "always":
        raise ValueError(f"{path}: sliding_window is null; the layers with a window need a number")
    if window is None or form != "none" and not uses_window(given, kind):
        return {}
    check_schema(given, {"sliding_window": Range(1, 2**24)}, path)
    seq_len = flags["seq_len"]
    if form == "none":
        if window < seq_len:
            raise ValueError(f"{path}: sliding_window {window} is shorter than the sequence, {seq_len}; give "
                             f"--seq-len {window}")
        return {}
    if given.get("layer_types") is not None:
        check_schema(given, {"layer_types": [Literal["full_attention", "sliding_attention"]]}, path)
    if window >= seq_len and form != "always":  # There it has positions of its own, too.
        return {}
    full_every = read_full_every(path, given, flags, kind)
    if full_every == 1:  # no layer has a window
        return {"window_rope_base": 0.0} if form == "always" else {}
    return {"window": window, "full_every": full_every}


def read_full_every(path, given, flags, kind):
    """Return --full-every of a model with a window: 0 if all layers have it, 1 if none has."""
    n_layer = flags["n_layer"]
    field = "layer_types"
    types = given.get(field)
    periods = range(n_layer + 1) if FAMILIES[kind].window in ("layers", "always") else [0]
    if types is None:
        field, types = default_layer_types(path, given, flags, kind)
    for period in periods:
        cfg = config.Config(n_layer=n_layer, window=1, full_every=period)
        if types == layer_types(cfg):
            return period
    raise ValueError(f"{path}: {field} is {reprlib.repr(given[field])}; every layer of our model has the "
                     "window, or all but every N-th (--full-every N)")


def default_layer_types(path, given, flags, kind):
    """Return (the field that decides which layers have a window, layer_types by it)."""
    n_layer = flags["n_layer"]
    field = "sliding_window"
    first = 0  # the first layer with a window
    if kind in ("qwen2", "qwen3"):
        field = "max_window_layers"
        check_schema(given, {field: Range(0, 2**24)}, path)
        first = min(given[field], n_layer)
    types = ["full_attention"] * first + ["sliding_attention"] * (n_layer - first)
    if kind == "gemma3_text":
        field = "sliding_window_pattern"
        check_schema(given, {field: Range(1, 2**24)}, path)
        for i in range(given[field] - 1, n_layer, given[field]):
            types[i] = "full_attention"
    if kind == "smollm3":
        field = "use_sliding_window"  # Layers that turn see all keys.
        for i in range(n_layer):
            if not flags["no_rope_every"] or (i + 1) % flags["no_rope_every"]:
                types[i] = "full_attention"
    return field, types


def read_head_dim(path, given):
    """Return {"head_dim": the width of a head}; {} where it is hidden_size / num_attention_heads."""
    width = given.get("head_dim")
    if width is None:
        return {}
    check_schema({"head_dim": width}, {"head_dim": Range(1, 2**16)}, path)
    if width * given["num_attention_heads"] == given["hidden_size"]:
        return {}
    return {"head_dim": width}


def read_rope(path, theirs):
    """Return our flags {"rope_base", "rope_scaling"} of the rotary positions; {} where there are none.

    ValueError: the frequencies are scaled in a way that is not Llama 3's, or not all dimensions turn.
    """
    name = theirs["model_type"]
    if name not in ROPE_THETA:
        return {}
    outside = {"rope_theta": ROPE_THETA[name], "partial_rotary_factor": PARTIAL_ROTARY.get(name, 1)}
    outside |= {key: theirs[key] for key in outside if key in theirs}
    given = [field for field in ROPE_FIELDS if theirs.get(field)]
    found = []  # (rope_theta, partial_rotary_factor, --rope-scaling) by each of these fields
    for field in given or ROPE_FIELDS[:1]:
        inside = theirs.get(field) or {}
        check_theta(path, theirs, "rope_theta", inside, field)
        check_equal(path, theirs, "partial_rotary_factor", inside, field)
        rope = {**outside, **inside}
        check_schema(rope, {"rope_theta": Range(1.0, 1e12)}, path)
        found.append((rope["rope_theta"], rope["partial_rotary_factor"], read_scaling(path, field, inside)))
    if found[0] != found[-1]:
        raise ValueError(contradiction(path, *((field, theirs[field]) for field in ROPE_FIELDS)))
    theta, factor, scaling = found[0]
    if factor != 1:
        raise ValueError(f"{path}: partial_rotary_factor is {reprlib.repr(factor)}, our positions turn all "
                         "dimensions")
    return {"rope_base": theta, "rope_scaling": scaling}


def check_theta(path, theirs, field, inside, name):
    """Raise ValueError if a base of rotary positions is no number, or another one than that of a dict.

    field: where the base stands outside the dict. inside: a dict with a rope_theta, or without one.
    name: that of the dict.
    """
    if theirs.get(field) is not None:
        check_schema(theirs, {field: Range(1.0, 1e12)}, path)
    check_equal(path, theirs, field, inside, name, "rope_theta")


def check_equal(path, theirs, field, inside, name, key=""):
    """Raise ValueError if a field and a key of a dict, by default of the same name, have two values.

    transformers 5 takes the one inside, transformers 4 the one outside.
    """
    key = key or field
    if theirs.get(field) is not None and key in inside and theirs[field] != inside[key]:
        raise ValueError(contradiction(path, (field, theirs[field]), (f"{name}.{key}", inside[key])))


def contradiction(path, first, second):
    """Return the line about two fields, each (name, value), that say the same thing in two ways."""
    told = " and ".join(f"{name} is {reprlib.repr(value)}" for name, value in (first, second))
    return (f"{path}: {told}, of which versions of transformers take different ones; delete the one that is "
            "wrong")


def read_two_ropes(path, theirs):
    """Return our flags {"rope_base", "window_rope_base"} of Gemma 3. ValueError: its positions are scaled.

    The bases stand in rope_parameters, one dict for each kind of layer, or in fields of their own.
    """
    both = theirs.get("rope_parameters") or {}
    check_schema(both, {"full_attention?": OPTIONAL_DICT, "sliding_attention?": OPTIONAL_DICT}, path)
    found = {}
    for flag, layers, field, theta in (
            ("rope_base", "full_attention", "rope_theta", ROPE_THETA["gemma3_text"]),
            ("window_rope_base", "sliding_attention", "rope_local_base_freq", WINDOW_ROPE_THETA)):
        inside = both.get(layers) or {}
        check_theta(path, theirs, field, inside, f"rope_parameters.{layers}")
        rope = {"rope_theta": theirs.get(field, theta), **inside}
        read_rope_alone(path, f"rope_parameters.{layers}", rope)
        found[flag] = rope["rope_theta"]
    if scaling := theirs.get("rope_scaling"):
        check_equal(path, {"rope_theta": found["rope_base"]}, "rope_theta", scaling, "rope_scaling")
        read_rope_alone(path, "rope_scaling", {"rope_theta": 1.0, **scaling})
    if more := both.keys() - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{path}: rope_parameters has {min(more)}, which is no kind of layer that we know")
    if theirs.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{path}: partial_rotary_factor is {reprlib.repr(theirs['partial_rotary_factor'])}, "
                         "our positions turn all dimensions")
    return found


def read_rope_alone(path, field, rope):
    """Raise ValueError unless these positions are turned by rope_theta alone."""
    check_schema(rope, {"rope_theta": Range(1.0, 1e12)}, f"{path}: {field}")
    if read_scaling(path, field, rope) or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{path}: {field} is {reprlib.repr(rope)}; the positions of our Gemma 3 are not "
                         "scaled, and all dimensions turn")


def read_scaling(path, field, rope):
    """Return --rope-scaling, () for none: linear scaling by a factor of 1 is none. ValueError: another."""
    check_equal(path, rope, "type", rope, field, "rope_type")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    more = rope.keys() - ROPE_KEYS
    if rope_type == "llama3" and more == set(LLAMA3_KEYS):
        check_schema(rope, {key: Range(0.0, 1e9) for key in LLAMA3_KEYS}, f"{path}: {field}")
        return tuple(float(rope[key]) for key in LLAMA3_KEYS)
    is_linear_by_one = rope_type == "linear" and more == {"factor"} and rope["factor"] == 1
    if not is_linear_by_one and (more or rope_type != "default"):
        raise ValueError(f"{path}: {field} is {reprlib.repr(rope)}; our rotary positions are scaled as those "
                         "of Llama 3, or not at all")
    return ()

"""What comes in from Hugging Face: each model is the function that transformers computes, or is refused.

transformers itself is the oracle: of its defaults, of the fields of config.json that change the logits, and
of the logits. test_convert.py has the proofs in fp64.
"""
import dataclasses
import json
import os
import random
import shutil

import pytest
import torch
from faults import planted
from runs import model_of
from safetensors.torch import load_file, save_file

import config
from hub import families, weights
from interface.presets import PRESETS

VOCAB = 50
SHAPE = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, max_position_embeddings=32, vocab_size=VOCAB, initializer_range=0.3)
SMALL = {  # {model_type: values of a small model that is imported}
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": 32},
    "mixtral": {**SHAPE, "num_local_experts": 4},
    "glm4_moe": {**SHAPE, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 2,
                 "num_experts_per_tok": 2, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0,
                 "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 8},
    "qwen3_moe": {**SHAPE, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4,
                  "num_experts_per_tok": 2},
    "olmo2": {**SHAPE, "pad_token_id": None},
    "smollm3": {**SHAPE, "pad_token_id": None},
    "gemma3_text": {**SHAPE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5,
                    "num_hidden_layers": 3, "sliding_window_pattern": 2, "pad_token_id": None},
    "gpt2": dict(n_layer=2, n_embd=16, n_head=4, n_positions=32, vocab_size=VOCAB, n_inner=24,
                 initializer_range=0.3, bos_token_id=0, eos_token_id=0),
}


def make(hf, folder, name, **values):
    """Write a random model by transformers; its norms and biases are random, too. Return folder."""
    torch.manual_seed(1)
    model = hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[name](**{**SMALL[name], **values}))
    for parameter in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def change(folder, without=(), **fields):
    """Change fields of a config.json, and take some out."""
    path = folder / "config.json"
    changed = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({field: value for field, value in changed.items() if field not in without}))


def change_tensors(folder, **tensors):
    """Change tensors of a model.safetensors; `__` in a name stands for a dot."""
    held = load_file(folder / "model.safetensors")
    held.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return held


def our_logits(folder, ids):
    model = model_of(folder)
    return model(ids)[0][:, :model.vocab_size].detach()


def same_logits(hf, folder):
    """The logits of a directory of Hugging Face are those of transformers, to 1e-5 of the largest."""
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(2))
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = model.eval()(ids).logits.flatten(0, 1)
    have = our_logits(folder, ids)
    wrong = ((have - want).abs().max() / want.abs().max()).item()
    assert wrong < 1e-5, (wrong, (folder / "config.json").read_text())


# -----------------------------------------------------------------------------
# The fields of config.json

OTHER = {"chunk_size_feed_forward": 5, "is_decoder": True, "torch_dtype": "float32", "dtype": "float32",
         "pretraining_tp": 2, "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression",
         "summary_type": "last", "summary_activation": "tanh", "bos_token_id": 7, "eos_token_id": [3, 4],
         "n_ctx": 5, "attention_dropout": 0.5, "is_llama_config": True, "pad_token_id": 1, "n_special": 3,
         "predict_special_tokens": True, "output_past": True, "unsloth_version": "1", "unsloth_fixed": True,
         "transformers.js_config": {"dtype": "q4"}}


@pytest.mark.parametrize("name", SMALL)
def test_harmless_fields_change_nothing(name, hf, tmp_path):
    """All of them have other values at once, and transformers computes the same logits as before."""
    folder = make(hf, tmp_path / "a", name)
    before = our_logits(folder, torch.arange(16)[None])
    made = hf.CONFIG_MAPPING[name]().to_dict()
    harmless = {*families.HARMLESS.split(), *hf.GenerationConfig().to_dict()} - {"num_nextn_predict_layers"}
    fields = {field: value for field, value in OTHER.items() if field in harmless | {"torch_dtype", "dtype"}}
    for field in harmless & made.keys() - OTHER.keys():
        if isinstance(made[field], bool):
            fields[field] = not made[field]
        elif isinstance(made[field], float):
            fields[field] = made[field] + 0.5
    assert len(fields) >= 12
    change(folder, **fields)
    assert torch.equal(our_logits(folder, torch.arange(16)[None]), before)
    same_logits(hf, folder)


ONLY = {  # {model_type: {field: a value by which the model is another one}}
    "llama": {"hidden_act": "gelu", "head_dim": 0, "attention_bias": True, "mlp_bias": True,
              "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window": 8},
    "qwen2": {"hidden_act": "gelu", "use_sliding_window": 1, "attention_multiplier": 2.0,
              "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
    "qwen3": {"attention_bias": True, "use_sliding_window": 1, "hidden_act": "relu"},
    "qwen3_moe": {"attention_bias": True, "decoder_sparse_step": 2, "mlp_only_layers": [0],
                  "use_sliding_window": "yes"},
    "olmo2": {"attention_bias": True, "hidden_act": "gelu", "sliding_window": 8, "clip_qkv": 8.0},
    "smollm3": {"no_rope_layers": [0, 1], "use_sliding_window": None, "mlp_bias": True,
                "attention_bias": True},
    "mistral": {"hidden_act": "gelu", "head_dim": 8.5, "sliding_window": 0, "layer_types": ["chunked"] * 2,
                "attention_bias": True},
    "mixtral": {"hidden_act": "gelu", "sliding_window": -8},
    "glm4_moe": {"use_qk_norm": True, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "n_group": 2,
                 "topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True, "hidden_act": "relu",
                 "partial_rotary_factor": None, "num_experts_per_tok": 1},
    "gemma3_text": {"hidden_activation": "gelu", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
                    "final_logit_softcapping": 30.0, "use_bidirectional_attention": True,
                    "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "gpt2": {"activation_function": "relu", "scale_attn_weights": False, "add_cross_attention": True,
             "scale_attn_by_inverse_layer_idx": True},
}
SAID = {"num_experts_per_tok": "norm_topk_prob", "rope_scaling": "rope_parameters",
        "attention_bias": "(attention|mlp)_bias", "sliding_window": "window"}
ALL = {"is_causal": False, "is_encoder_decoder": True, "quantization_config": {"bits": 4}, "attn_scale": 2.0,
       "per_layer_config": {"0": {"vocab_size": 7}}, "auto_map": {"AutoModelForCausalLM": "m.X"},
       "pruned_heads": {"0": [1]},
       "architectures": ["LlamaBiModel"], "layer_types": ["chunked_attention"] * 2, "vocab_size": None,
       "use_mrope": True}


@pytest.mark.parametrize("name", SMALL)
def test_a_field_of_another_function_is_refused_by_name(name, hf, tmp_path):
    path = tmp_path / "config.json"
    hf.CONFIG_MAPPING[name](**SMALL[name]).save_pretrained(tmp_path)
    families.read_config(path)
    good = path.read_text()
    for field, value in {**ALL, **ONLY[name]}.items():
        change(tmp_path, **{field: value})
        if field == "partial_rotary_factor":
            change(tmp_path, [field, "rope_parameters"])  # then transformers takes 0.5
        with pytest.raises(ValueError, match=SAID.get(field, field)):
            families.read_config(path)
        path.write_text(good)


def test_what_is_absent_is_no_value_of_ours(hf, tmp_path):
    """Without them, transformers normalizes one gate of a Glm4Moe, and has a layer without experts."""
    folder = make(hf, tmp_path / "a", "glm4_moe", num_experts_per_tok=1)
    change(folder, ["norm_topk_prob"])
    with pytest.raises(ValueError, match="norm_topk_prob is True, in our model None"):
        weights.HuggingFace(folder)
    folder = make(hf, tmp_path / "b", "glm4_moe", num_experts_per_tok=1, norm_topk_prob=False)
    same_logits(hf, folder)
    change(folder, ["first_k_dense_replace"])
    with pytest.raises(ValueError, match="first_k_dense_replace is 1"):
        weights.HuggingFace(folder)
    folder = make(hf, tmp_path / "c", "llama", num_key_value_heads=4, rms_norm_eps=1e-6)
    change(folder, ["num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
                    "hidden_act", "max_position_embeddings", "architectures"])
    same_logits(hf, folder)
    assert weights.HuggingFace(folder).cfg.seq_len == 2048


LLAMA3_POSITIONS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16}
TWICE = [  # (model_type, fields, words of the refusal; "": the function is the one of transformers)
    ("gemma3_text", {"hidden_act": "relu"}, "hidden_act is 'relu', in our model None"),
    ("mixtral", {"num_experts": 8}, "experts.4.* is not there"),
    ("qwen3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "layer_types is"),
    ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_types is"),
    ("smollm3", {"no_rope_layers": [1, 0], "no_rope_layer_interval": 4}, "no_rope_layers is"),
    ("llama", {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, ""),
    ("llama", {"rope_scaling": {"type": "default"}, "rope_parameters": LLAMA3_POSITIONS}, ""),
    ("llama", {"rope_scaling": {"type": "llama3", "rope_type": "default"}, "rope_parameters": None}, ""),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, ""),
    ("glm4_moe", {"partial_rotary_factor": 0.5}, ""),  # rope_parameters say 1
    ("gemma3_text", {"rope_scaling": {"rope_theta": 7.0}}, ""),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
               "layer_types": ["sliding_attention"] * 2}, ""),
    ("gemma3_text", {"sliding_window_pattern": 3,
                     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, ""),
]


@pytest.mark.parametrize("name,fields,words", TWICE)
def test_what_is_said_twice_is_refused_or_read_as_transformers_does(name, fields, words, hf, tmp_path):
    folder = make(hf, tmp_path / "a", name)
    change(folder, **fields)
    if words:
        with pytest.raises(ValueError, match=words):
            weights.HuggingFace(folder)
    else:
        same_logits(hf, folder)


# -----------------------------------------------------------------------------
# Released checkpoints: their config.json as published, or the fields that decide the function

def sizes(layers, width, heads, kv_heads, ffn, seq_len, vocab, eps, theta, **more):
    return dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                num_key_value_heads=kv_heads, intermediate_size=ffn, max_position_embeddings=seq_len,
                vocab_size=vocab, rms_norm_eps=eps, rope_theta=theta, **more)


LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}
RELEASED = {  # name: (class, fields, preset)
    "SmolLM2-135M": ("LlamaConfig", sizes(
        30, 576, 9, 3, 1536, 8192, 49152, 1e-5, 100000, rope_scaling=None, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, is_llama_config=True, rope_interleaved=False, pretraining_tp=1,
        torch_dtype="bfloat16"), ""),
    "Llama-3.2-1B": ("LlamaConfig", sizes(
        16, 2048, 32, 8, 8192, 131072, 128256, 1e-5, 500000.0, attention_bias=False, attention_dropout=0.0,
        bos_token_id=128000, eos_token_id=128001, head_dim=64, hidden_act="silu", initializer_range=0.02,
        mlp_bias=False, pretraining_tp=1, rope_scaling=LLAMA3, tie_word_embeddings=True,
        torch_dtype="bfloat16", transformers_version="4.45.0.dev0", use_cache=True), "llama-3.2-1b"),
    "Qwen2.5-0.5B": ("Qwen2Config", sizes(
        24, 896, 14, 2, 4864, 32768, 151936, 1e-6, 1000000.0, max_window_layers=24, sliding_window=32768,
        use_sliding_window=False, tie_word_embeddings=True, use_mrope=False), ""),
    "Qwen3-0.6B": ("Qwen3Config", sizes(
        28, 1024, 16, 8, 3072, 40960, 151936, 1e-6, 1000000, head_dim=128, tie_word_embeddings=True),
        "qwen3-0.6b"),
    "Qwen3-30B-A3B": ("Qwen3MoeConfig", sizes(
        48, 2048, 32, 4, 6144, 40960, 151936, 1e-6, 1000000.0, moe_intermediate_size=768, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], max_window_layers=48), "qwen3-30b-a3b"),
    "SmolLM3-3B": ("SmolLM3Config", sizes(
        36, 2048, 16, 4, 11008, 65536, 128256, 1e-6, 5000000.0, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, max_window_layers=28, use_sliding_window=False, sliding_window=None,
        mlp_bias=False, pretraining_tp=2), ""),
    "Mistral-7B-v0.1": ("MistralConfig", sizes(
        32, 4096, 32, 8, 14336, 32768, 32000, 1e-5, 10000.0, sliding_window=4096), ""),
    "Mixtral-8x7B-v0.1": ("MixtralConfig", sizes(
        32, 4096, 32, 8, 14336, 32768, 32000, 1e-5, 1000000.0, sliding_window=None, num_local_experts=8,
        num_experts_per_tok=2, router_aux_loss_coef=0.02, output_router_logits=False), ""),
    "distilgpt2": ("GPT2Config", dict(
        _num_labels=1, activation_function="gelu_new", attn_pdrop=0.1, bos_token_id=50256, embd_pdrop=0.1,
        eos_token_id=50256, gradient_checkpointing=False, id2label={"0": "LABEL_0"}, initializer_range=0.02,
        label2id={"LABEL_0": 0}, layer_norm_epsilon=1e-5, n_ctx=1024, n_embd=768, n_head=12, n_inner=None,
        n_layer=6, n_positions=1024, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
        summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True, use_cache=True,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
        transformers_version="4.5.0.dev0"), ""),
    "OLMo-2-1B": ("Olmo2Config", sizes(16, 2048, 16, 16, 8192, 4096, 100352, 1e-6, 500000), "olmo-2-1b"),
    "gemma-3-1b": ("Gemma3TextConfig", sizes(
        26, 1152, 4, 1, 6912, 32768, 262144, 1e-6, 1000000.0, head_dim=256, sliding_window=512,
        sliding_window_pattern=6, query_pre_attn_scalar=256, rope_local_base_freq=10000.0, rope_scaling=None,
        cache_implementation="hybrid"), "gemma-3-1b"),
    "gemma-3-270m": ("Gemma3TextConfig", sizes(
        18, 640, 4, 1, 2048, 32768, 262144, 1e-6, 1000000.0, _sliding_window_pattern=6, attention_bias=False,
        attn_logit_softcapping=None, bos_token_id=2, final_logit_softcapping=None, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rope_local_base_freq=10000.0,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3, sliding_window=512,
        use_bidirectional_attention=False), ""),
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_config_of_a_released_model(name, hf, tmp_path):
    """As it was published, and as transformers of today saves it; by the preset; and as a small model."""
    kind, fields, preset = RELEASED[name]
    made = getattr(hf, kind)
    architecture = hf.AutoModelForCausalLM._model_mapping[made].__name__
    published = {"model_type": made.model_type, "architectures": [architecture], **fields}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published))
    made.from_pretrained(tmp_path).save_pretrained(tmp_path / "today")
    found = families.read_config(path)
    assert found == families.read_config(tmp_path / "today" / "config.json")
    _, cfg, vocab_size = found
    assert vocab_size == fields["vocab_size"] and cfg.n_embd == fields.get("hidden_size", 768)
    assert cfg.rope_base == fields.get("rope_theta", 1e4)
    assert cfg.window == {"Mistral-7B-v0.1": 4096, "gemma-3-1b": 512, "gemma-3-270m": 512}.get(name, 0)
    if preset:
        preset = config.Config(**PRESETS[preset])
        of_the_model = {*config.SHAPE, *config.flags_of_kind("meaning")} - {"vocab_size", "seq_len"}
        assert not {flag for flag in of_the_model if getattr(preset, flag) != getattr(cfg, flag)}
        assert preset.vocab_size == vocab_size

    small = {field: value for field, value in SMALL[made.model_type].items() if field != "sliding_window"}
    if "head_dim" in fields:
        small.setdefault("head_dim", 4)
    # Lists are of as many layers as the released model has
    lists = {field: None for field in ("layer_types", "no_rope_layers") if field in fields}
    folder = make(hf, tmp_path / "a", made.model_type)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    change(folder, **{**fields, **small, **lists, **ends}, rope_parameters=None)
    if fields.get("tie_word_embeddings"):
        held = load_file(folder / "model.safetensors")
        change_tensors(folder, lm_head__weight=held["model.embed_tokens.weight"].clone())
    same_logits(hf, folder)


# -----------------------------------------------------------------------------
# Windows

WINDOWS = dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=4,
               layer_types=["sliding_attention", "full_attention", "sliding_attention"])


def wider_window(original, *args):
    """our_flags that gives a window of one key more."""
    found = original(*args)
    return dict(found, window=found["window"] + 1)


def test_a_wrong_window_is_found(hf, tmp_path):
    words = "sliding_window is 4, in our model 5"
    with planted("hub.families.our_flags", wider_window), pytest.raises(ValueError, match=words):
        weights.HuggingFace(make(hf, tmp_path / "there", "qwen3", **WINDOWS))


def test_layers_whose_windows_have_no_period_are_refused(hf, tmp_path):
    """Qwen 2's first layers without a window, SmolLM3's windows of the layers that do not turn."""
    on = dict(SHAPE, use_sliding_window=True, sliding_window=4)
    smollm3 = hf.SmolLM3Config(**{**on, "num_hidden_layers": 4}, no_rope_layer_interval=2)
    for made in smollm3, hf.Qwen2Config(**on, max_window_layers=1):
        made.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="layer_types is .*, in our model"):
            families.read_config(tmp_path / "config.json")


# -----------------------------------------------------------------------------
# Any model

def fields_of(name):
    """Return the fields that the class of a family has."""
    import transformers
    return [field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[name])]


def draw(rng):
    """Return (model_type, values, fields to take out, fields to change) of a random model."""
    name = rng.choice(list(SMALL))
    common = {"tie_word_embeddings": [True, False]}
    decoder = {**common, "num_key_value_heads": [1, 2, 4], "rms_norm_eps": [1e-6, 1e-3],
               "num_attention_heads": [4, 8], "hidden_act": ["silu", "swish", "silu", "gelu"]}
    windows = {"use_sliding_window": [True, True, False], "sliding_window": [None, 1, 5, 32],
               "max_window_layers": [0, 1, 2, 3],
               "layer_types": [None, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"],
                               ["full_attention", "sliding_attention"]]}
    choices = {
        "llama": {**decoder, "attention_bias": [True, False], "mlp_bias": [True, False]},
        "mistral": {**decoder, "sliding_window": [None, 8, 32, 64]},
        "mixtral": {**decoder, "sliding_window": [None, 8], "num_experts_per_tok": [1, 2, 3]},
        "qwen2": {**decoder, **windows},
        "qwen3": {**decoder, **windows, "head_dim": [2, 4, 8], "attention_bias": [False, False, True]},
        "qwen3_moe": {**decoder, **windows, "norm_topk_prob": [True, False], "num_experts_per_tok": [1, 2, 3],
                      "decoder_sparse_step": [1, 1, 2]},
        "olmo2": {**decoder, "attention_bias": [False, False, True]},
        "gemma3_text": {**common, "rms_norm_eps": [1e-6, 1e-3], "sliding_window": [1, 5, 32, 64],
                        "num_key_value_heads": [1, 2, 4], "sliding_window_pattern": [1, 2, 3, 6],
                        "query_pre_attn_scalar": [8, 8, 16], "num_hidden_layers": [2, 3]},
        "smollm3": {**decoder, **windows, "no_rope_layer_interval": [1, 2, 3, 4],
                    "no_rope_layers": [None, [1, 0], [0, 1]], "mlp_bias": [False, False, True]},
        "glm4_moe": {**decoder, "norm_topk_prob": [True, False], "num_experts_per_tok": [1, 2, 3],
                     "n_shared_experts": [0, 1, 2], "routed_scaling_factor": [1.0, 1.0, 2.0],
                     "first_k_dense_replace": [0, 0, 1], "use_qk_norm": [False, False, True]},
        "gpt2": {**common, "n_inner": [None, 8], "layer_norm_epsilon": [1e-5, 1e-3],
                 "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu"],
                 "scale_attn_by_inverse_layer_idx": [False, False, True], "n_head": [2, 4]},
    }[name]
    values = {field: rng.choice(of) for field, of in choices.items() if rng.random() < 0.5}
    absent = [field for field in fields_of(name) if rng.random() < 0.1
              and field not in ("hidden_size", "n_embd", "vocab_size")]
    changed = {"rope_theta": rng.choice([500.0, 1e6]), "is_causal": rng.random() < 0.9,
               "rope_scaling": {"type": "linear", "factor": rng.choice([1.0, 1.0, 2.0])}}
    return name, values, absent, {field: value for field, value in changed.items()
                                  if rng.random() < 0.15 and (name != "gpt2" or field == "is_causal")}


@pytest.mark.parametrize("seed", range(int(os.environ.get("IMPORTS", "10"))))
def test_a_random_model_is_the_same_function_or_refused(seed, hf, tmp_path):
    """IMPORTS=500 pytest tests/test_import.py -k random tries more."""
    rng = random.Random(seed)
    while True:  # the next one, after those that are refused
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        name, values, absent, changed = draw(rng)
        folder = make(hf, tmp_path / "a", name, **values)
        change(folder, absent, **changed)
        try:
            weights.HuggingFace(folder)
        except ValueError as e:
            assert "\n" not in str(e)
            continue
        break
    same_logits(hf, folder)


# -----------------------------------------------------------------------------
# Heads, weights, files

def test_a_head_beside_a_tied_embedding_is_compared(hf, tmp_path):
    folder = make(hf, tmp_path / "a", "llama", tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lm_head__weight=embedding.clone())
    same_logits(hf, folder)
    change_tensors(folder, lm_head__weight=embedding + torch.eye(VOCAB, 16))
    with pytest.raises(ValueError, match="lm_head.weight is another matrix than model.embed_tokens.weight"):
        weights.HuggingFace(folder)
    change(folder, tie_word_embeddings=False)
    same_logits(hf, folder)


def read_theirs(folder, **theirs):
    (folder / "config.json").write_text(json.dumps(theirs))
    return families.read_config(folder / "config.json")


def test_what_a_config_json_leaves_out_is_transformers_default(hf, tmp_path):
    """The numbers of the model cards of Llama 7B, Mistral 7B, Mixtral 8x7B and GPT-2."""
    for name, want in {"llama": (32000, 4096, 32, 32, 32, 11008, 2048, 1e4),
                       "mistral": (32000, 4096, 32, 32, 8, 14336, 131072, 1e4),
                       "mixtral": (32000, 4096, 32, 32, 8, 14336, 131072, 1e6)}.items():
        _, cfg, vocab_size = read_theirs(tmp_path, model_type=name)
        assert want == (vocab_size, cfg.n_embd, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.ffn_hidden,
                        cfg.seq_len, cfg.rope_base)
    _, cfg, vocab_size = read_theirs(tmp_path, model_type="gpt2")
    assert (vocab_size, cfg.n_embd, cfg.n_layer, cfg.n_head, cfg.seq_len) == (50257, 768, 12, 12, 1024)
    assert (cfg.ffn_hidden, cfg.rope_base) == (3072, config.Config.rope_base)
    assert read_theirs(tmp_path, model_type="gpt2", n_inner=100)[1].ffn_hidden == 100
    assert read_theirs(tmp_path, model_type="gpt2", hidden_size=96, n_head=3)[1].ffn_hidden == 384

"""Adapters in peft's format: adapter_config.json and the names in adapter_model.safetensors.

    adapter_config   our flags -> adapter_config.json
    read_adapter     adapter_config.json -> rank and alpha; what would be another function is refused
    layer_names      {our matrix: the name of its module in transformers}

peft computes x A^T B^T alpha/r as layers.Adapter does, so no number changes.
"""
import math

from config import as_typed
from interface.schema import check_schema, load_json_of_others

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MOST_BYTES = 1 << 20
KNOWN = {"peft_type": str, "r": int, "lora_alpha": float}
# Values that change the function, and the ones that ours computes.
PLAIN = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False, "lora_bias": False,
         "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layer_replication": None,
         "trainable_token_indices": None, "target_parameters": None, "use_qalora": False}
# Ways to start that leave the base's weights as they are; others, such as pissa, change them too.
STARTS = (True, False, "gaussian")
# Fields that change nothing in what a model with its adapters computes, whatever their value is.
OTHERS = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
          "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
          "revision", "target_modules", "task_type", "init_lora_weights", "use_rslora", *KNOWN}


def layer_names(cfg, kind, layout):
    """Return {name of our matrix: name of its module there} of the matrices that have an adapter.

    layout: {their name: Theirs}, from runtime.model_tensors. ValueError: the family joins or
    transposes them.
    """
    found = {}
    for theirs, made_of in layout.items():
        parts = [part.name for part in made_of.parts]
        if not parts[0].startswith("blocks.") or len(made_of.shape()) != 2:
            continue
        if len(parts) > 1 or made_of.transposed:
            raise ValueError(f"{as_typed({'mlp': cfg.mlp, 'pos': cfg.pos})}: {kind} joins or transposes the "
                             "matrices, so peft has no such adapters; convert.py export merges them")
        found[parts[0]] = theirs.removesuffix(".weight")
    return found


def tensor_names(module):
    """Return peft's names of A and B of a module."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def adapter_config(cfg, modules, base):
    """Return adapter_config.json. modules: the names of all modules with an adapter. base: a model's name."""
    alpha = cfg.lora_alpha
    is_causal = cfg.objective == "causal"
    # By the last part of their names peft would also find modules of the head of a masked model.
    names = {module.split(".")[-1] for module in modules} if is_causal else set(modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_causal else None,
        "base_model_name_or_path": base,
        "r": cfg.lora,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": sorted(names),
    }


def read_adapter(folder):
    """Return (rank, alpha) of a directory of peft's. ValueError: it is none, or computes something else."""
    path = folder / CONFIG
    found = load_json_of_others(path, MOST_BYTES)
    check_schema(found, KNOWN, path)
    if found["peft_type"] != "LORA":
        raise ValueError(f"{path}: peft_type is {found['peft_type']!r}, not LORA; ours are LoRA adapters")
    alpha = float(found["lora_alpha"])
    if alpha <= 0:
        raise ValueError(f"{path}: lora_alpha is {alpha:g}, with which adapters have no effect; it must be "
                         "above 0")
    plain = dict(PLAIN)
    if found.get("use_rslora"):  # it divides by the root of the rank
        alpha *= math.sqrt(found["r"])
        plain.pop("use_rslora")
    for field, value in plain.items():
        if found.get(field, value) not in (value, None):
            raise ValueError(f"{path}: {field} is {found[field]!r}; ours are plain LoRA adapters, with "
                             f"{value!r}")
    if found.get("init_lora_weights", True) not in STARTS:
        raise ValueError(f"{path}: init_lora_weights is {found['init_lora_weights']!r}, with which peft "
                         "changes the base's weights, too; convert the adapters to plain LoRA with peft")
    for field, value in found.items():
        if value and field not in PLAIN and field not in OTHERS:
            raise ValueError(f"{path}: {field} is {value!r}; ours are plain LoRA adapters, without it")
    return found["r"], alpha

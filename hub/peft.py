"""Adapters in peft's format, out and in: adapter_config.json and adapter_model.safetensors.

peft computes x A^T B^T alpha/r as layers.Adapter does, so no number changes.
"""
from hub.families import family_of
from hub.weights import Lazy, Part, check_finite, open_slices, read_from, tensors
from interface.files import check_schema, load_json
from runtime.adapters import adapter_names

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# The values of fields with which the adapters are plain ones. Ways to start that are not here, such as pissa,
# change the base's weights, too.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian")}
# Fields that change nothing in what a model with its adapters computes. Any other field must be empty.
HARMLESS = {"r", "lora_alpha", "auto_mapping", "base_model_name_or_path", "exclude_modules",
            "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
            "peft_version", "qalora_group_size", "revision", "target_modules", "task_type"}


def factors(cfg, rank, vocab_size):
    """Return {peft's name: (our name, shape)} of A and B of all matrices with an adapter.

    cfg: of the model without adapters. ValueError: no model of transformers has such modules.
    """
    kind = family_of(cfg)
    found = {}
    for theirs, made_of in tensors(cfg, kind, vocab_size).items():
        ours = made_of.parts[0].name
        if not ours.startswith("blocks.") or len(made_of.shape) != 2:
            continue
        if len(made_of.parts) > 1 or made_of.transposed:
            raise ValueError(f"{kind} of transformers joins or transposes the matrices, so peft has no such "
                             "adapters; convert.py export merges them")
        module = PREFIX + theirs.removesuffix(".weight")
        n_out, n_in = made_of.shape
        a_name, b_name = adapter_names(ours)
        found[f"{module}.lora_A.weight"] = a_name, (rank, n_in)
        found[f"{module}.lora_B.weight"] = b_name, (n_out, rank)
    return found


def to_peft(merged, cfg, vocab_size, dtype):
    """Return {peft's name: Lazy} of a runtime.adapters.Merged. cfg: of its whole model."""
    found = factors(cfg, merged.cfg.lora, vocab_size).items()
    layout = {theirs: Lazy([Part(ours, shape, (0, 0), shape)]) for theirs, (ours, shape) in found}
    return read_from(merged.own, layout, dtype)


def adapter_config(cfg, names, base):
    """Return adapter_config.json. names: of peft's tensors. base: a model's name."""
    modules = {name.removeprefix(PREFIX).split(".lora_")[0] for name in names}
    return {"peft_type": "LORA", "task_type": {"causal": "CAUSAL_LM", "mlm": None}[cfg.objective],
            "r": cfg.lora, "base_model_name_or_path": base, "lora_alpha": cfg.lora_alpha, "lora_dropout": 0.0,
            "bias": "none", "inference_mode": True, "target_modules": sorted(modules)}


def read_adapter(folder):
    """Return (rank, alpha) of a directory of peft's. ValueError: it is none, or computes something else."""
    path = folder / CONFIG
    found = load_json(path)
    check_schema(found, {"peft_type": str, "r": int, "lora_alpha": float}, path)
    for field, value in found.items():
        if value and field not in HARMLESS and value not in PLAIN.get(field, ()):
            raise ValueError(f"{path}: {field} is {value!r}; only plain LoRA adapters, without it, are read")
    return found["r"], float(found["lora_alpha"])


def from_peft(folder, cfg, rank, vocab_size):
    """Return [(our name, tensor, full shape, offset)] of peft's file of weights, for checkpoint.save.

    cfg: of the model without adapters. A matrix without an adapter there gets one of zeros, which no training
    moves. ValueError: a tensor has no place in the model, or another shape.
    """
    import torch
    slices = open_slices(folder / WEIGHTS)
    for name in slices:
        if not {name.replace("lora_A", "lora_B"), name.replace("lora_B", "lora_A")} <= slices.keys():
            raise ValueError(f"{folder}: {name} has no partner; an adapter is two matrices, A and B")
    pieces = []
    for theirs, (ours, shape) in factors(cfg, rank, vocab_size).items():
        tensor = slices.pop(theirs)[:] if theirs in slices else torch.zeros(shape)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{folder}: {theirs} is {tensor.dtype} {tuple(tensor.shape)}, no floats {shape}")
        check_finite(folder, theirs, tensor)
        pieces.append((ours, tensor, shape, (0, 0)))
    if slices:
        raise ValueError(f"{folder}: our adapters have no place for {min(slices)}; they are beside the "
                         "matrices of attention and MLP alone")
    return pieces

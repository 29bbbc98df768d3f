"""Adapters of --lora: merged into their base, and in peft's format, out and in.

peft computes x A^T B^T alpha/r as layers.Adapter does, so no number changes.
"""
import dataclasses

import checkpoint
from config import Config
from hub.families import family_of
from hub.weights import Lazy, Part, check_finite, open_slices, read_from, tensors
from interface.files import check_schema, load_json

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


def check_import(given, step):
    """Return the index of the checkpoint `step` of the run or checkpoint `given`, as a base of adapters."""
    newest = checkpoint.latest(given)
    if step != newest:
        raise ValueError(f"--base {given} has {step.name}, of the lowest validation loss, and {newest.name}, "
                         f"the newest; say to which of them the adapters belong, such as --base {newest}")
    index = checkpoint.check(step)
    if index["meta"]["shape"].get("lora"):
        raise ValueError(f"--base {step} holds adapters itself; give {index['meta']['base']['path']}")
    return index


def adapter_names(name):
    """Return the names of A and B of a matrix, such as blocks.0.attn.wq.weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora.A", f"{layer}.lora.B"


class Merged(checkpoint.Reader):
    """A Reader of W + scale B A. own: a Reader of A and B, of a run with --lora and the flags cfg."""

    def __init__(self, own, base, cfg):
        weights = {name: entry for name, entry in base.index["tensors"].items() if "/" not in name}
        super().__init__(own.path, {**own.index, "tensors": weights})
        self.own = own
        self.base = base
        self.cfg = cfg
        self.scale = cfg.lora_alpha / cfg.lora

    def fill(self, name, out, full, offset):
        import torch
        a_name, b_name = adapter_names(name)
        if a_name not in self.own.index["tensors"] or not out.numel():
            self.base.fill(name, out, full, offset)
            return
        # The sum is rounded once, to the dtype of out.
        dtype = torch.promote_types(out.dtype, torch.float32)
        merged = torch.empty(out.shape, dtype=dtype)
        self.base.fill(name, merged, full, offset)
        rows, columns = (slice(at, at + n) for at, n in zip(offset, out.shape, strict=True))
        a = self.own.whole(a_name).to(dtype)[:, columns]
        b = self.own.whole(b_name).to(dtype)[rows]
        out.copy_(merged.addmm_(b, a, alpha=self.scale))


def open_merged(cfg, own):
    """Return (Config, Reader) of the whole model whose adapters `own`, a Reader, holds. cfg: of the run."""
    from runtime.init_from import base_path  # not at the top: it imports torch
    path = base_path(own.index["meta"]["base"])
    merged = Merged(own, checkpoint.Reader(path, checkpoint.check(path)), cfg)
    return dataclasses.replace(cfg, lora=0, lora_alpha=Config.lora_alpha), merged


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
    """Return {peft's name: Lazy} of a Merged. cfg: of its whole model."""
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

"""Adapters of ours as peft's files, and back: for convert.py. corpus/peft_files.py knows peft's names."""
from functools import partial

import checkpoint
from corpus import hugging_face as hf
from corpus import peft_files
from runtime.adapters import adapter_names
from runtime.model_tensors import Lazy, tensors


def modules_of(cfg, vocab_size):
    """Return {name of our matrix: (name of its module there, its shape)} of the matrices with an adapter.

    cfg: of the model without adapters. ValueError: no model of transformers has such modules.
    """
    kind = hf.family_of(cfg)
    layout = tensors(cfg, kind, vocab_size)
    names = peft_files.layer_names(cfg, kind, layout)
    return {name: (module, layout[f"{module}.weight"].shape()) for name, module in names.items()}


def to_peft(merged, cfg, vocab_size, dtype, base):
    """Return ({their name: Lazy}, adapter_config.json) of a checkpoint of adapters.

    merged: a runtime.adapters.Merged. cfg: of its whole model. base: the name of that model for peft.
    """
    lazy = {}
    modules = modules_of(cfg, vocab_size)
    for name, (module, _) in modules.items():
        for ours, theirs in zip(adapter_names(name), peft_files.tensor_names(module), strict=True):
            shape = merged.own.index["tensors"][ours]["shape"]
            lazy[theirs] = Lazy(shape, dtype, partial(read_whole, merged.own, ours, shape, dtype))
    names = [module for module, _ in modules.values()]
    return lazy, peft_files.adapter_config(merged.cfg, names, base)


def read_whole(weights, name, shape, dtype):
    """Return a tensor of ours, read from a Reader."""
    import torch
    out = torch.empty(shape, dtype=dtype)
    weights.fill(name, out, shape, (0,) * len(shape))
    return out


def from_peft(folder, cfg, rank, vocab_size):
    """Return [(our name, Lazy, full shape, offset)] of peft's adapter_model.safetensors, for checkpoint.save.

    cfg: of the model without adapters. A matrix without an adapter there gets one of zeros, which no training
    moves. ValueError: a tensor has no place in the model, or another shape.
    """
    slices = open_weights(folder)
    pieces = []
    for name, (module, (n_out, n_in)) in modules_of(cfg, vocab_size).items():
        wanted = zip(adapter_names(name), peft_files.tensor_names(module), ((rank, n_in), (n_out, rank)),
                     strict=True)
        for ours, theirs, shape in wanted:
            part = slices.pop(theirs, None)
            if part is not None and tuple(part.get_shape()) != shape:
                raise ValueError(f"{folder}: {theirs} is {tuple(part.get_shape())}, for this base it should "
                                 f"be {shape}")
            pieces.append((ours, as_lazy(part, theirs, shape), shape, (0, 0)))
    if slices:
        raise ValueError(f"{folder}: our adapters have no place for {min(slices)}; they are beside the "
                         "matrices of attention and MLP alone")
    return pieces


def open_weights(folder):
    """Return {name: slice} of peft's tensors. ValueError, OSError: there are none, or they are damaged."""
    from safetensors import SafetensorError, safe_open
    path = folder / peft_files.WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {path.name}; save the adapters again with peft")
    try:
        handle = safe_open(path, framework="pt")
        return {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path} is damaged ({e}); download it again") from None


def as_lazy(part, name, shape):
    """Return a Lazy of a slice of a file, zeros where it is None. ValueError: it is nan or infinite."""
    import torch
    if part is None:
        return Lazy(shape, torch.float32, partial(torch.zeros, shape))

    def read():
        tensor = part[:]
        if not checkpoint.is_finite(tensor):
            raise ValueError(f"{name} holds nan or infinite weights; take an earlier state of these adapters")
        return tensor
    return Lazy(shape, part[:0].dtype, read)

"""Tensors of other programs, made of ours: for convert.py.

    tensors, gguf_tensors   all tensors of a model in transformers, in llama.cpp, and what each is made of
    read_whole              reads one of them from a checkpoint of ours
    Lazy                    a tensor that is read when it is written
"""
import math
import re
from typing import NamedTuple

from corpus import gguf_file
from corpus import hugging_face as hf


class Part(NamedTuple):
    """A rectangle of one of our tensors."""
    name: str  # our tensor's
    full: tuple  # our tensor's shape
    offset: tuple  # where the rectangle begins in our tensor
    size: tuple


class Theirs(NamedTuple):
    """One of their tensors, made of parts of our tensors."""
    transposed: bool  # stored as (in, out), as in GPT-2 of transformers; ours is (out, in)
    parts: list  # of Part, from top to bottom

    def shape(self):
        """Return the shape in which the tensor is stored."""
        size = self.parts[0].size
        if len(size) == 3 and size[0] == 1:
            return size[1:]  # (1, rows, columns): one of our experts, which is a matrix of theirs
        rows = sum(part.size[0] for part in self.parts)
        shape = (rows, *size[1:])
        return shape[::-1] if self.transposed else shape


def shapes(cfg, vocab_size):
    """Return {name: (full shape, rows without padding)} of our model's parameters and buffers."""
    from runtime.launch import World  # isort: skip (before torch: it sets how idle threads wait)
    import torch

    from model import GPT
    from parallel import make_mesh
    mesh = make_mesh(World())
    with torch.device("meta"):
        model = GPT(cfg, mesh, vocab_size)
    found = {name: (p.full_shape, p.used) for name, p in model.named_parameters()}
    for name, t in model.named_buffers():
        found[name] = tuple(t.shape), len(t)
    return found


def tensors(cfg, kind, vocab_size):
    """Return {their name: Theirs} of the model of family `kind` that has our model's weights."""
    names = hf.FAMILIES[kind].names
    found = {}
    for name, (full, rows) in shapes(cfg, vocab_size).items():
        theirs = their_name(name, names)
        if "{}" in theirs:
            # Our tensor is (E, rows, columns). They have one tensor per expert.
            for expert in range(full[0]):
                part = Part(name, full, (expert, 0, 0), (1, *full[1:]))
                found[theirs.format(expert)] = Theirs(False, [part])
        else:
            # Several of our tensors may have one name there: queries, keys and values of GPT-2.
            transposed = ".c_" in theirs and len(full) == 2
            part = Part(name, full, (0,) * len(full), (rows, *full[1:]))
            found.setdefault(theirs, Theirs(transposed, [])).parts.append(part)

    if "gate" in names:
        # Qwen2Moe's shared expert has a gate of its own. Ours has none, so none of our tensors is this part.
        gate = Part("gate", (1, cfg.n_embd), (0, 0), (1, cfg.n_embd))
        for i in range(cfg.n_layer):
            found[f"{names['blocks']}.{i}.{names['gate']}.weight"] = Theirs(False, [gate])
    if kind == "megatron-bert":
        types = Part("token types", (2, cfg.n_embd), (0, 0), (2, cfg.n_embd))  # ours has none either
        found["bert.embeddings.token_type_embeddings.weight"] = Theirs(False, [types])
        if not cfg.tied:
            found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"]  # they add the former
    return found


def gguf_tensors(cfg, kind, vocab_size):
    """Return {llama.cpp's name: Theirs} of the model that has the weights of ours."""
    names = gguf_file.of_family(kind).names
    found = {}
    for name, (full, rows) in shapes(cfg, vocab_size).items():
        part = Part(name, full, (0,) * len(full), (rows, *full[1:]))
        found.setdefault(their_name(name, names), Theirs(False, [])).parts.append(part)
    return found


def their_name(name, names):
    """Return their name for one of our parameters, with {} for the number of an expert.

    names: those of a Family. There, a parameter has a name of its own, or that of its module.
    ValueError: it has none.
    """
    block, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    leaf = leaf or ".weight"
    if module + leaf in names:
        theirs = names[module + leaf]
    elif module in names:
        theirs = names[module] + leaf
    else:
        raise ValueError(f"{name} has no name in this family of models; the model cannot be converted until "
                         "FAMILIES in corpus/hugging_face.py, or KINDS in corpus/gguf_file.py, has one")
    if not block:
        return theirs
    return f"{names['blocks']}.{block}.{theirs}"


class Lazy:
    """Stands for a tensor in checkpoint.write_safetensors, which reads the values when it writes them."""

    def __init__(self, shape, dtype, read):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.detach = read  # write_safetensors calls tensor.detach() for the values

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return self.dtype.itemsize


def read_whole(weights, own, theirs, dtype):
    """Return one of their tensors, read from a Reader of our weights.

    theirs: a Theirs. A part that is none of our tensors, `own`, is zero.
    """
    import torch
    blocks = []
    for part in theirs.parts:
        block = torch.zeros(part.size, dtype=dtype)
        if part.name in own:
            weights.fill(part.name, block, part.full, part.offset)
        blocks.append(block)
    # One block is not copied.
    whole = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    if theirs.transposed:
        return whole.T
    return whole.view(theirs.shape())


def read_paired(weights, own, theirs, dtype, heads):
    """Return a tensor of llama.cpp's. heads: of a query or key matrix whose rows are paired there, else 0."""
    whole = read_whole(weights, own, theirs, dtype)
    return gguf_file.pair_rows(whole, heads) if heads else whole

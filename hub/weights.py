"""Tensors of others as rectangles of ours, each read when it is written.

    tensors       all tensors of a model in transformers, and what of ours each is made of
    HuggingFace   a directory of transformers, read as if it were a checkpoint of ours
    read          a rectangle of a tensor of ours; read_whole: a tensor of theirs
    Lazy          a tensor that is read when it is written
"""
import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import checkpoint
from hub.families import FAMILIES, read_config
from interface.files import check_schema, load_json
from interface.paths import FROM_HUB


class Part(NamedTuple):
    """A rectangle of one of our tensors, of its first rows or of one expert."""
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
    """Return {their name: Theirs} of the model of family `kind` that has our model's weights.

    Parts that are none of our tensors are zeros.
    """
    names = FAMILIES[kind].names
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
        gate = Part("gate", (1, cfg.n_embd), (0, 0), (1, cfg.n_embd))
        for i in range(cfg.n_layer):
            found[f"{names['blocks']}.{i}.{names['gate']}.weight"] = Theirs(False, [gate])
    if kind == "megatron-bert":
        types = Part("token types", (2, cfg.n_embd), (0, 0), (2, cfg.n_embd))
        found["bert.embeddings.token_type_embeddings.weight"] = Theirs(False, [types])
        if not cfg.tied:
            found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"]  # they add the former
    return found


def their_name(name, names):
    """Return their name for one of our parameters, with {} for the number of an expert.

    names: those of a Family. There, a parameter has a name of its own, or that of its module.
    """
    block, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    leaf = leaf or ".weight"
    if module + leaf in names:
        theirs = names[module + leaf]
    elif module in names:
        theirs = names[module] + leaf
    else:
        raise ValueError(f"{name} has no name in this family of models; the model cannot be converted until "
                         "FAMILIES in hub/families.py has one")
    return f"{names['blocks']}.{block}.{theirs}" if block else theirs


# -----------------------------------------------------------------------------
# Reading one tensor

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


def read(weights, part, dtype):
    """Return a rectangle of one of our tensors, read from a Reader; zeros if it has no such tensor."""
    import torch
    block = torch.zeros(part.size, dtype=dtype)
    if part.name in weights.index["tensors"]:
        weights.fill(part.name, block, part.full, part.offset)
    return block


def read_whole(weights, theirs, dtype):
    """Return one of their tensors, read from a Reader of our weights. theirs: a Theirs."""
    import torch
    blocks = [read(weights, part, dtype) for part in theirs.parts]
    # One block is not copied.
    whole = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return whole.T if theirs.transposed else whole.view(theirs.shape())


def lazy_tensors(weights, layout, dtype):
    """Return {their name: Lazy} of a layout of tensors(), read from a Reader of our weights."""
    import torch
    lazy = {}
    for name, theirs in layout.items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        lazy[name] = Lazy(theirs.shape(), kept, partial(read_whole, weights, theirs, kept))
    return lazy


# -----------------------------------------------------------------------------
# The files of a directory

BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # not weights: masks, frequencies
FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}  # {safetensors' name: that of --dtype}


def open_slices(path):
    """Return {name: slice} of a .safetensors file; a slice reads from it. ValueError: it is damaged."""
    from safetensors import SafetensorError, safe_open
    try:
        handle = safe_open(path, framework="pt")
        return {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    except FileNotFoundError:
        if not Path(path).parent.exists():
            raise FileNotFoundError(f"{Path(path).parent} is not there; {FROM_HUB}") from None
        raise FileNotFoundError(f"{path} is not there; files of other kinds (.bin, .pt) can run code and are "
                                "not read: save the model again with transformers") from None
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path} is damaged ({e}); download it again") from None


def open_folder(folder):
    """Return {name: slice} of the tensors in a directory of Hugging Face. ValueError, OSError: none."""
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    # An index beside model.safetensors may belong to an older save.
    if index.exists() and not (folder / names[0]).exists():
        listed = load_json(index)
        check_schema(listed, {"weight_map": {"*": str}}, index)
        names = sorted(set(listed["weight_map"].values()))
    slices = {}
    for name in names:
        slices.update(open_slices(folder / name))
    for name, part in slices.items():
        if part.get_dtype() not in FLOATS:
            raise ValueError(f"{folder}: {name} is {part.get_dtype()}, none of {', '.join(FLOATS)}")
    return {name: part for name, part in slices.items() if not BUFFERS.fullmatch(f".{name}")}


class HuggingFace(checkpoint.Reader):
    """The weights of a directory of Hugging Face, read as if they were a checkpoint of ours.

    fill() reads any rectangle of any of our tensors. cfg, vocab_size: the model that config.json describes.
    """

    def __init__(self, folder, seq_len=0):
        self.path = Path(folder)
        self.slices = open_folder(self.path)
        kind, self.cfg, self.vocab_size = read_config(self.path / "config.json", "fp32", seq_len)
        if "wte.weight" in self.slices:  # GPT-2 on the hub was saved without the prefix of its names
            self.slices = {f"transformer.{name}": part for name, part in self.slices.items()}
        names = FAMILIES[kind].names
        self.layout = tensors(self.cfg, kind, self.vocab_size)
        embedding = f"{names['wte']}.weight"
        self.check(embedding)
        self.cfg = dataclasses.replace(self.cfg, dtype=FLOATS[self.slices[embedding].get_dtype()])
        self.index = {"tensors": {}}
        self.sources = {}  # {our name: [(their name, first row of the part there, Part)]}
        self.list_tensors()

    def check(self, embedding):
        """Raise ValueError, with the tensor's name, unless the files hold the tensors of the model."""
        import torch
        for name, theirs in self.layout.items():
            want = theirs.shape()
            have = tuple(self.slices[name].get_shape()) if name in self.slices else "not there"
            if have != want:
                raise ValueError(f"{self.path}: {name} is {have}, by config.json it should be {want}")
        more = self.slices.keys() - self.layout.keys()
        if self.cfg.tied and "lm_head.weight" in more:  # some files hold the head although it is tied
            if not torch.equal(self.slices[embedding][:], self.slices["lm_head.weight"][:]):
                raise ValueError(f"{self.path}: tie_word_embeddings is true, but lm_head.weight is another "
                                 f"matrix than {embedding}; set it to false in config.json for the model "
                                 "with both, or delete lm_head.weight from the file")
            more.remove("lm_head.weight")
        if more:
            raise ValueError(f"{self.path}: our model has no place for {min(more)}; it is of another kind")

    def list_tensors(self):
        """Fill index, as that of a checkpoint, and sources."""
        for theirs, (_, parts) in self.layout.items():
            dtype = self.slices[theirs][:0].dtype
            first = 0
            for part in parts:
                entry = {"shape": list(part.full), "dtype": str(dtype).removeprefix("torch.")}
                self.index["tensors"][part.name] = entry
                self.sources.setdefault(part.name, []).append((theirs, first, part))
                first += part.size[0]

    def fill(self, name, out, full, offset):
        """Copy into out the rectangle of its shape at offset of our tensor `name`, of the shape `full`."""
        if list(full) != self.index["tensors"][name]["shape"]:
            raise ValueError(f"{self.path}: {name} has another shape than in this model")
        if out.numel():
            part = tuple(slice(a, a + n) for a, n in zip(offset, out.shape, strict=True))
            out.copy_(self.whole(name)[part])

    def whole(self, name):
        """Return one of our tensors, with zeros as the padding of the vocabulary.

        ValueError: a file is damaged, or a weight is not finite.
        """
        import torch
        entry = self.index["tensors"][name]
        whole = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for theirs, first, part in self.sources[name]:
            rows = slice(first, first + part.size[0])
            if len(part.size) == 3:
                rows = slice(None)  # one expert: a matrix there
            try:
                if self.layout[theirs].transposed:
                    block = self.slices[theirs][:, rows].T
                else:
                    block = self.slices[theirs][rows]
            except Exception as e:  # of the library: the file was cut or changed after it was opened
                raise ValueError(f"{self.path}: {theirs} is damaged ({e}); download it again") from None
            check_finite(self.path, theirs, block)
            begin = part.offset[0]
            whole[begin:begin + part.size[0]] = block
        return whole

    def pieces(self):
        """Return [(name, Lazy, full shape, offset)] of all tensors, for checkpoint.save."""
        import torch
        found = []
        for name, entry in self.index["tensors"].items():
            lazy = Lazy(entry["shape"], getattr(torch, entry["dtype"]), partial(self.whole, name))
            found.append((name, lazy, entry["shape"], [0] * len(entry["shape"])))
        return found


def check_finite(folder, name, block):
    """Raise ValueError if a tensor of others holds nan or infinity."""
    if not checkpoint.is_finite(block):
        raise ValueError(f"{folder}: {name} holds nan or infinite weights; download it again, or take an "
                         "earlier state of that model")

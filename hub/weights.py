"""Tensors of others as rectangles of ours, each read when it is written.

    tensors       all tensors of a model in transformers, and what of ours each is made of
    HuggingFace   a directory of transformers, read as if it were a checkpoint of ours
"""
import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint
from hub.families import FAMILIES, read_config
from interface.files import load_json
from interface.paths import FROM_HUB


class Part(NamedTuple):
    """A rectangle of one of our tensors, of its first rows or of one expert."""
    name: str  # our tensor's
    full: tuple  # our tensor's shape
    offset: tuple  # where the rectangle begins in our tensor
    size: tuple


@dataclass
class Lazy:
    """A tensor made of rectangles of ours, read when it is written. What the Reader lacks is zeros."""
    parts: list  # of Part, from top to bottom
    transposed: bool = False  # stored as (in, out), as in GPT-2 of transformers; ours is (out, in)
    expert: bool = False  # one of our experts, (1, rows, columns), is a matrix of theirs
    weights: checkpoint.Reader = None
    dtype: Any = None

    @property
    def shape(self):
        columns = self.parts[0].size[1:]
        if self.expert:
            return columns
        shape = (sum(part.size[0] for part in self.parts), *columns)
        return shape[::-1] if self.transposed else shape

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

    def detach(self):
        import torch
        blocks = []
        for part in self.parts:
            block = torch.zeros(part.size, dtype=self.dtype)
            if part.name in self.weights.index["tensors"]:
                self.weights.fill(part.name, block, part.full, part.offset)
            blocks.append(block)
        whole = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return whole.T if self.transposed else whole.view(self.shape)


# Ours, as theirs

def build(cfg, vocab_size, device, world=None):
    """Return the model on a device, cut over the world if there is one."""
    from runtime.launch import World  # isort: skip (before torch: it sets how idle threads wait)
    import torch

    from model import GPT
    from parallel import make_mesh
    mesh = make_mesh(world, cfg.tp, ep=cfg.ep) if world else make_mesh(World())
    with torch.device(device):
        return GPT(cfg, mesh, vocab_size)


def named_parts(cfg, kind, vocab_size):
    """Return [(their name, with {} for the number of an expert; Part without padding)] of our tensors."""
    model = build(cfg, vocab_size, "meta")
    shapes = {name: (p.full_shape, p.used) for name, p in model.named_parameters()}
    shapes |= {name: (tuple(t.shape), len(t)) for name, t in model.named_buffers()}
    names = FAMILIES[kind].names
    found = []
    for name, (full, rows) in shapes.items():
        block, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name).groups("")
        leaf = leaf or ".weight"
        # A parameter has a name of its own there, or that of its module.
        theirs = names[module + leaf] if module + leaf in names else names[module] + leaf
        if block:
            theirs = f"{names['blocks']}.{block}.{theirs}"
        found.append((theirs, Part(name, full, (0,) * len(full), (rows, *full[1:]))))
    return found


def tensors(cfg, kind, vocab_size):
    """Return {their name: Lazy} of the model of family `kind` that has our model's weights."""
    names = FAMILIES[kind].names
    found = {}
    for theirs, part in named_parts(cfg, kind, vocab_size):
        if "{}" in theirs:
            # Our tensor is (E, rows, columns). They have one tensor per expert.
            for expert in range(part.full[0]):
                one = part._replace(offset=(expert, 0, 0), size=(1, *part.full[1:]))
                found[theirs.format(expert)] = Lazy([one], expert=True)
        else:
            # Several of our tensors may have one name there: queries, keys and values of GPT-2.
            transposed = ".c_" in theirs and len(part.full) == 2
            found.setdefault(theirs, Lazy([], transposed)).parts.append(part)

    if "gate" in names:
        gate = Part("gate", (1, cfg.n_embd), (0, 0), (1, cfg.n_embd))
        for i in range(cfg.n_layer):
            found[f"{names['blocks']}.{i}.{names['gate']}.weight"] = Lazy([gate])
    if kind == "megatron-bert":
        types = Part("token types", (2, cfg.n_embd), (0, 0), (2, cfg.n_embd))
        found["bert.embeddings.token_type_embeddings.weight"] = Lazy([types])
        if not cfg.tied:
            found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"]  # they add the former
    return found


def read_from(weights, layout, dtype):
    """Return a layout, {name: Lazy}, whose tensors are read from a Reader of our weights, as --dtype."""
    from model import DTYPES
    for name, lazy in layout.items():
        lazy.weights = weights
        lazy.dtype = DTYPES["fp32" if name.endswith("e_score_correction_bias") else dtype]
    return layout


# Theirs, as ours

BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # not weights: masks, frequencies
FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}  # {safetensors' name: that of --dtype}


def open_slices(path):
    """Return {name: slice} of a .safetensors file; a slice reads from it."""
    from safetensors import SafetensorError, safe_open
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there (.bin and .pt are not read); {FROM_HUB}")
    try:
        handle = safe_open(path, framework="pt")
        return {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged ({e}); download it again") from None


class HuggingFace(checkpoint.Reader):
    """The weights of a directory of Hugging Face, read as if they were a checkpoint of ours."""

    def __init__(self, folder, seq_len=0):
        import torch
        self.path = Path(folder)
        files = {"model.safetensors"}
        index = self.path / "model.safetensors.index.json"
        if index.exists() and not (self.path / "model.safetensors").exists():  # as transformers does
            files = set(load_json(index)["weight_map"].values())
        self.slices = {}
        for file in files:
            self.slices |= open_slices(self.path / file)
        if "wte.weight" in self.slices:  # GPT-2 on the hub was saved without the prefix of its names
            self.slices = {f"transformer.{name}": found for name, found in self.slices.items()}
        kind, cfg, self.vocab_size = read_config(self.path / "config.json", seq_len)
        self.layout = tensors(cfg, kind, self.vocab_size)
        embedding = f"{FAMILIES[kind].names['wte']}.weight"
        self.index = {"tensors": {}}
        self.sources = {}  # {our name: [(their name, first row of the part there, Part)]}
        for name, theirs in self.layout.items():
            found = self.slices.get(name)
            have = (tuple(found.get_shape()), found.get_dtype()) if found else "not there"
            if not found or have[0] != theirs.shape or have[1] not in FLOATS:
                raise ValueError(f"{self.path}: {name} is {have}, by config.json it should be {theirs.shape}")
            dtype = str(found[:0].dtype).removeprefix("torch.")
            first = 0
            for part in theirs.parts:
                self.index["tensors"][part.name] = {"shape": list(part.full), "dtype": dtype}
                self.sources.setdefault(part.name, []).append((name, first, part))
                first += part.size[0]

        more = {name for name in self.slices.keys() - self.layout.keys() if not BUFFERS.fullmatch(name)}
        if cfg.tied and "lm_head.weight" in more:  # some files hold the head although it is tied
            if not torch.equal(self.slices[embedding][:], self.slices["lm_head.weight"][:]):
                raise ValueError(f"{self.path}: tie_word_embeddings is true, but lm_head.weight is another "
                                 f"matrix than {embedding}")
            more.remove("lm_head.weight")
        if more:
            raise ValueError(f"{self.path}: our model has no place for {min(more)}; it is of another kind")
        self.cfg = dataclasses.replace(cfg, dtype=FLOATS[self.slices[embedding].get_dtype()])

    def fill(self, name, out, full, offset):
        """Copy into out the rectangle of its shape at offset of our tensor `name`; its padding is zeros."""
        out.zero_()
        for theirs, first, part in self.sources[name]:
            both = checkpoint.overlap(offset, out.shape, part.offset, part.size)
            if both is None:
                continue
            here, there = both
            whole = self.slices[theirs][:]
            check_finite(self.path, theirs, whole)
            if self.layout[theirs].transposed:
                whole = whole.T
            out[here] = whole.reshape(-1, *part.size[1:])[first:first + part.size[0]][there]

    def pieces(self):
        """Return [(name, Lazy, full shape, offset)] of all tensors, for checkpoint.save."""
        import torch
        found = []
        for name, entry in self.index["tensors"].items():
            zeros = (0,) * len(entry["shape"])
            whole = Part(name, entry["shape"], zeros, tuple(entry["shape"]))
            lazy = Lazy([whole], weights=self, dtype=getattr(torch, entry["dtype"]))
            found.append((name, lazy, entry["shape"], zeros))
        return found


def check_finite(folder, name, block):
    """Raise ValueError if a tensor of others holds nan or infinity."""
    if not all(map(math.isfinite, block.aminmax())):  # block.isfinite() takes 30 times as long
        raise ValueError(f"{folder}: {name} holds nan or infinite weights; download it again")

"""Tensors of others as rectangles of ours, each read when it is written.

    tensors       all tensors of a model in transformers, and what of ours each is made of
    HuggingFace   a directory of transformers, read as if it were a checkpoint of ours
    read          a rectangle of a tensor of ours; read_whole: a tensor of theirs
    Lazy          a tensor that is read when it is written
"""
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

    # Parts that are none of our tensors are zeros.
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


def lazy_pieces(weights):
    """Return [(name, Lazy, full shape, offset)] of all tensors of a Reader, for checkpoint.save."""
    import torch
    pieces = []
    for name, entry in weights.index["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        for piece in entry["pieces"]:
            part = Part(name, entry["shape"], piece["offset"], piece["size"])
            pieces.append((name, Lazy(part.size, dtype, partial(read, weights, part, dtype)), part.full,
                           part.offset))
    return pieces


# -----------------------------------------------------------------------------
# The files of a directory

MOST_INDEX_BYTES = 2**27  # of model.safetensors.index.json: a model of 70,000 tensors has 8 MB
BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # not weights: masks, frequencies


def open_slices(path):
    """Return {name: slice} of a .safetensors file; a slice reads from it. ValueError: it is damaged."""
    from safetensors import SafetensorError, safe_open
    try:
        handle = safe_open(path, framework="pt")
        return {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path} is damaged ({e}); download it again") from None


def list_safetensors(folder):
    """Return the .safetensors files of a directory of Hugging Face.

    ValueError, OSError: a file is missing, or a name leads out of the directory.
    """
    paths = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    # An index beside model.safetensors may belong to an older save.
    if index.exists() and not paths[0].exists():
        listed = load_json(index)
        check_schema(listed, {"weight_map": {"*": str}}, index)
        paths = [folder / name for name in sorted(set(listed["weight_map"].values()))]
    for path in paths:
        if path.parent != folder or path.suffix != ".safetensors":
            raise ValueError(f"{index} names the file {str(path)!r}, no .safetensors beside it")
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no directory; {FROM_HUB}")
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file; files of other kinds (.bin, .pt) can run code and "
                                    "are not read: save the model again with transformers")
    return paths


class HuggingFace(checkpoint.Reader):
    """The weights of a directory of Hugging Face, read as if they were a checkpoint of ours.

    fill() reads any rectangle of any of our tensors. cfg, vocab_size: the model that config.json describes.
    left_out: the names of tensors that have no part in the logits.
    """
    # safetensors' names, the narrowest first: (torch's, that of --dtype)
    FLOATS = {"BF16": ("bfloat16", "bf16"), "F16": ("float16", "fp16"), "F32": ("float32", "fp32"),
              "F64": ("float64", "fp64")}
    NARROWEST_FIRST = list(FLOATS)

    def __init__(self, folder, seq_len=0):
        self.path = Path(folder)
        slices = {}
        for file in list_safetensors(self.path):
            slices.update(open_slices(file))
        self.slices = {name: part for name, part in slices.items() if not BUFFERS.fullmatch(f".{name}")}
        kind, self.cfg, self.vocab_size, extra_layers = read_config(
            self.path / "config.json", self.narrowest_dtype(), seq_len)
        if self.cfg.n_layer * max(1, self.cfg.n_experts) > len(self.slices):
            raise ValueError(f"{folder}/config.json has {self.cfg.n_layer} layers and {self.cfg.n_experts} "
                             f"experts, the files have {len(self.slices)} tensors: they are of two models")
        if kind == "gpt2" and "wte.weight" in self.slices:
            # The files on the hub were saved without the head, and so without the prefix of the rest.
            bare = self.slices
            self.slices = {}
            for name, part in bare.items():
                self.slices[name if name == "lm_head.weight" else f"transformer.{name}"] = part
        names = FAMILIES[kind].names
        self.left_out = self.leave_out(names["blocks"], extra_layers)
        self.layout = tensors(self.cfg, kind, self.vocab_size)
        self.check_shapes()
        if self.cfg.tied and "lm_head.weight" in self.slices:
            self.check_head(f"{names['wte']}.weight")
        self.index = {"tensors": self.list_pieces()}

    def narrowest_dtype(self):
        """Return the narrowest dtype of the tensors, as --dtype names it. ValueError: one is not a float."""
        for name, part in self.slices.items():
            if part.get_dtype() not in self.FLOATS:
                raise ValueError(f"{self.path}: {name} is {part.get_dtype()}, none of "
                                 f"{', '.join(self.FLOATS)}")
        stored = {part.get_dtype() for part in self.slices.values()}
        return self.FLOATS[min(stored, key=self.NARROWEST_FIRST.index, default="F32")][1]

    def leave_out(self, blocks, extra_layers):
        """Drop the tensors of layers behind the last one, and those without elements. Return their names.

        blocks: what the name of a layer's tensor begins with.
        """
        found = []
        for name, part in self.slices.items():
            layer = re.match(rf"{re.escape(blocks)}\.(\d+)\.", name)
            is_extra = layer and 0 <= int(layer[1]) - self.cfg.n_layer < extra_layers
            if is_extra or 0 in part.get_shape():
                found.append(name)
        for name in found:
            del self.slices[name]
        return sorted(found)

    def check_shapes(self):
        """Raise ValueError, with the tensor's name, unless the files hold the tensors of the model."""
        known = set(self.layout)
        if self.cfg.tied:
            known.add("lm_head.weight")  # some files hold the head although it is tied
        if more := sorted(self.slices.keys() - known):
            raise ValueError(f"{self.path}: our model has no place for {more[0]}; it is another architecture")
        for name, theirs in self.layout.items():
            want = theirs.shape()
            have = tuple(self.slices[name].get_shape()) if name in self.slices else "not there"
            if have != want:
                raise ValueError(f"{self.path}: {name} is {have}, by config.json it should be {want}")

    def check_head(self, embedding):
        """Raise ValueError unless lm_head.weight, which config.json ties to the embedding, has its values."""
        import torch
        if not torch.equal(self.slices[embedding][:], self.slices["lm_head.weight"][:]):
            raise ValueError(f"{self.path}: tie_word_embeddings is true, but lm_head.weight is another matrix"
                             f" than {embedding}; for the model with two matrices (as transformers 5 reads "
                             "it) set tie_word_embeddings to false in config.json, for the tied one (as "
                             "transformers 4 reads it) delete lm_head.weight from the file")

    def list_pieces(self):
        """Return {our name: {"shape", "dtype", "pieces"}}, as a checkpoint's index.json lists tensors.

        A piece's "file" is the name of their tensor, "" for zeros. Its "key" is its first row there.
        """
        entries = {}
        widest = {}
        for name, (full, _) in shapes(self.cfg, self.vocab_size).items():
            entries[name] = {"shape": list(full), "pieces": []}
        for theirs, (_, parts) in self.layout.items():
            stored = self.slices[theirs].get_dtype()
            first = 0
            for name, full, offset, size in parts:
                widest[name] = max(widest.get(name, stored), stored, key=self.NARROWEST_FIRST.index)
                pieces = entries[name]["pieces"]
                pieces.append({"file": theirs, "key": first, "offset": offset, "size": size})
                first += size[0]
                if name in ("wte.weight", "head.weight"):
                    # The padding of the vocabulary is zero.
                    padding = full[0] - size[0], full[1]
                    pieces.append({"file": "", "key": 0, "offset": (size[0], 0), "size": padding})
        for name, entry in entries.items():
            entry["dtype"] = self.FLOATS[widest[name]][0]
        return entries

    def _read(self, theirs, first, where):
        """Return a rectangle of their tensor that begins at row `first`. where: slices of our tensor's piece.

        ValueError: the file is damaged.
        """
        import torch
        if not theirs:
            return torch.zeros([s.stop - s.start for s in where])
        is_expert = len(where) == 3  # (1, rows, columns) here, (rows, columns) there
        rows, *columns = where[1:] if is_expert else where
        rows = slice(first + rows.start, first + rows.stop)
        try:
            if self.layout[theirs].transposed:
                block = self.slices[theirs][(*columns, rows)].T
            else:
                block = self.slices[theirs][(rows, *columns)]
        except Exception as e:  # of the library: the file was cut or changed after it was opened
            raise ValueError(f"{self.path}: {theirs} is damaged ({e}); download it again") from None
        check_finite(self.path, theirs, block)
        return block.unsqueeze(0) if is_expert else block


def check_finite(folder, name, block):
    """Raise ValueError if a tensor of others holds nan or infinity."""
    if not checkpoint.is_finite(block):
        raise ValueError(f"{folder}: {name} holds nan or infinite weights; download it again, or take an "
                         "earlier state of that model")

"""Models of Hugging Face, in and out: config.json, *.safetensors, tokenizer.json, as transformers reads them.

    python convert.py import MODEL_DIR --out DIR  then: sample.py DIR, or train.py --init-from DIR/step_000000
    python convert.py export RUN --out DIR        RUN: of train.py, one of its step_N, or what import wrote

docs/hugging-face.md says what maps to what, and what is refused. A tensor is read when it is written, so no
more than two tensors are in memory.
"""
import dataclasses
import json
import math
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

import checkpoint
from config import SHAPE
from corpus import config_json, tokenizer
from corpus import hugging_face as hf
from corpus.chat import END, MARKERS
from corpus.safetensors_files import open_safetensors, same_matrix
from interface.command_line import command_line, printable, read_run_config, wrong_input
from interface.files import must_write
from interface.schema import load_json_of_others
from runtime.model_card import flag_words, model_card

Command = tyro.conf.Positional[Literal["import", "export"]]
Folder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of convert.py."""
    command: Command  # import a model of Hugging Face, or export one of ours
    model: Folder  # import: its directory; export: a run, or one of its step_N
    out: str = ""  # a new directory for the result
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"  # export: of the weights; the masters are fp32
    shard_gb: float = 5.0  # export: the most GB of a file
    seq_len: int = 0  # import: a shorter sequence than the model's; 0 keeps the model's
    RANGES = {"shard_gb": (1e-6, 10**6), "seq_len": (0, 2**24)}


# -----------------------------------------------------------------------------
# tensors

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}  # safetensors' names: --dtype
NARROWEST_FIRST = list(FLOATS)
TORCH_DTYPE = {short: name for name, short in checkpoint.SAFETENSORS_DTYPE.items()}


class Part(NamedTuple):
    """A rectangle of one of our tensors."""
    name: str  # our tensor's
    full: tuple  # our tensor's shape
    offset: tuple  # where the rectangle begins in our tensor
    size: tuple


class Theirs(NamedTuple):
    """One of their tensors, made of parts of our tensors."""
    transposed: bool  # stored as (in, out), as in GPT-2; ours is (out, in)
    parts: list  # of Part, from top to bottom

    def shape(self):
        """Return the shape in which the tensor is stored."""
        size = self.parts[0].size
        if len(size) == 3:
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
        raise ValueError(f"{name} has no name in this family of Hugging Face's models; the model cannot be "
                         "converted until FAMILIES in corpus/hugging_face.py has one")
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


class HuggingFace(checkpoint.Reader):
    """The weights of a directory of Hugging Face, read as if they were a checkpoint of ours.

    fill() reads any rectangle of any of our tensors. cfg, vocab_size: the model that config.json describes.
    left_out: the names of tensors that have no part in the logits.
    """

    def __init__(self, folder, seq_len=0):
        self.path = Path(folder)
        self.slices = open_safetensors(self.path)
        found = config_json.read_config(self.path / "config.json", self.narrowest_dtype(), seq_len)
        kind, self.cfg, self.vocab_size, extra_layers = found
        if self.cfg.n_layer * max(1, self.cfg.n_experts) > len(self.slices):
            raise ValueError(f"{folder}/config.json has {self.cfg.n_layer} layers and {self.cfg.n_experts} "
                             f"experts, the files have {len(self.slices)} tensors: they are of two models")
        if kind == "gpt2" and "wte.weight" in self.slices:
            # The files on the hub were saved without the head, and so without the prefix of the rest.
            bare = self.slices
            self.slices = {}
            for name, part in bare.items():
                self.slices[name if name == "lm_head.weight" else f"transformer.{name}"] = part
        self.left_out = self.leave_out(hf.FAMILIES[kind].names["blocks"], extra_layers)
        self.layout = tensors(self.cfg, kind, self.vocab_size)
        self.check_shapes()
        if self.cfg.tied and "lm_head.weight" in self.slices:
            self.check_head(hf.FAMILIES[kind].names["wte"] + ".weight")
        self.index = {"tensors": self.list_pieces()}

    def narrowest_dtype(self):
        """Return the narrowest dtype of the tensors, as --dtype names it. ValueError: one is not a float."""
        for name, part in self.slices.items():
            if part.get_dtype() not in FLOATS:
                raise ValueError(f"{self.path}: {name} is {part.get_dtype()}, none of {', '.join(FLOATS)}")
        stored = {part.get_dtype() for part in self.slices.values()}
        return FLOATS[min(stored, key=NARROWEST_FIRST.index, default="F32")]

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

    def leave_out(self, blocks, extra_layers):
        """Drop the tensors of layers behind the last one, and those without elements. Return their names.

        blocks: what the name of a layer's tensor begins with.
        """
        extra = tuple(f"{blocks}.{self.cfg.n_layer + i}." for i in range(extra_layers))
        found = [name for name, part in self.slices.items()
                 if name.startswith(extra) or 0 in part.get_shape()]
        for name in found:
            del self.slices[name]
        return sorted(found)

    def check_head(self, embedding):
        """Raise ValueError unless lm_head.weight, which config.json ties to the embedding, has its values.

        embedding: its name.
        """
        if not same_matrix(self.slices[embedding], self.slices["lm_head.weight"]):
            raise ValueError(f"{self.path}: tie_word_embeddings is true, but lm_head.weight is another matrix"
                             f" than {embedding}; for the model with two matrices (as transformers 5 reads "
                             "it) set tie_word_embeddings to false in config.json, for the tied one (as "
                             "transformers 4 reads it) delete lm_head.weight from the file")

    def list_pieces(self):
        """Return {our name: {"shape", "dtype", "pieces"}}, as a checkpoint's index.json lists tensors.

        A piece's "file" is the name of their tensor, "" for zeros. Its "key" is its first row there.
        """
        dtypes = self.widest_dtypes()
        entries = {}
        for name, (full, _) in shapes(self.cfg, self.vocab_size).items():
            entries[name] = {"shape": list(full), "dtype": dtypes[name], "pieces": []}
        for theirs, (_, parts) in self.layout.items():
            first = 0
            for name, full, offset, size in parts:
                pieces = entries[name]["pieces"]
                pieces.append({"file": theirs, "key": first, "offset": offset, "size": size})
                first += size[0]
                if name in ("wte.weight", "head.weight"):
                    # The padding of the vocabulary is zero.
                    padding = full[0] - size[0], full[1]
                    pieces.append({"file": "", "key": 0, "offset": (size[0], 0), "size": padding})
        return entries

    def widest_dtypes(self):
        """Return {our name: torch's name of the widest dtype among the tensors that it is made of}."""
        found = {}
        for theirs, (_, parts) in self.layout.items():
            stored = self.slices[theirs].get_dtype()
            for part in parts:
                before = found.get(part.name, stored)
                found[part.name] = max(before, stored, key=NARROWEST_FIRST.index)
        return {name: TORCH_DTYPE[dtype] for name, dtype in found.items()}

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
        if not checkpoint.is_finite(block):
            raise ValueError(f"{self.path}: {theirs} holds nan or infinite weights; download it again, or "
                             "take an earlier state of that model")
        return block.unsqueeze(0) if is_expert else block


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


# -----------------------------------------------------------------------------
# A run, or a directory of Hugging Face

def read_run(run_dir):
    """Read a run, one of its checkpoints, or a directory of Hugging Face.

    Return (Config, vocabulary size, Reader, directory of the run, line). The line says which checkpoint was
    taken, or is "". ValueError, OSError: there is no run, or no sound checkpoint.
    """
    run = Path(run_dir)
    step = None
    if run.name.startswith("step_") and not (run / "config.json").exists():
        step = run
        run = step.parent
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no config.json; give the --out directory of a run of train.py")
    if is_theirs(run):
        weights = HuggingFace(run)
        return weights.cfg, weights.vocab_size, weights, run, ""
    if step is None:
        step, said = choose_step(run)
        index = None
    else:
        index = checkpoint.check(step)
        said = ""
    cfg, vocab_size = read_run_config(run / "config.json")
    return cfg, vocab_size, checkpoint.Reader(step, index), run, said


def is_theirs(folder):
    """Whether the config.json of a directory comes from Hugging Face."""
    with suppress(ValueError):
        found = load_json_of_others(folder / "config.json", config_json.MOST_BYTES)
        return isinstance(found, dict) and "model_type" in found and "vocab_size_used" not in found
    return False


def choose_step(run):
    """Return the checkpoint of a run to take, and a line that says which it is and why.

    It is the checkpoint with the lowest validation loss, if that is known and the checkpoint is sound.
    Otherwise it is the newest sound one.
    """
    newest = checkpoint.newest(run)
    if newest is None:
        raise FileNotFoundError(f"{run} holds no sound checkpoint; train with --save-every N")
    chosen = newest
    why = "the newest checkpoint"
    lowest = checkpoint.read_index(newest)["meta"].get("best", {})
    best = run / f"step_{lowest.get('step', 0):06d}"
    if "val_loss" in lowest and best.is_dir() and checkpoint.damage(best) is None:
        chosen = best
        why = f"lowest validation loss {lowest['val_loss']:.4f}"
    return chosen, f"{chosen}: {why} (sample.py RUN/step_N takes another)\n"


# -----------------------------------------------------------------------------
# in

def load_tokenizer(folder, vocab_size):
    """Return the tokenizer of a directory, ours or theirs, or None if there is none.

    ValueError: it has more ids than the model.
    """
    if not (folder / "tokenizer.json").exists():
        return None
    vocabulary = tokenizer.load(folder)
    if vocabulary.n_vocab > vocab_size:
        raise ValueError(f"{folder}/config.json has a vocabulary of {vocab_size}, tokenizer.json "
                         f"{vocabulary.n_vocab} symbols: they are of two models")
    return vocabulary


def import_model(flags):
    """Write a Hugging Face model as one of our runs that has made no step; return lines that say so."""
    weights = HuggingFace(flags.model, flags.seq_len)
    vocabulary = load_tokenizer(weights.path, weights.vocab_size)
    out = Path(flags.out)
    cfg = dataclasses.replace(weights.cfg, vocab_size=weights.vocab_size)
    was_there = out.exists()
    try:
        step = checkpoint.save(out, 0, lazy_pieces(weights), meta_of_no_step(cfg))
    except ValueError:  # a tensor is damaged: nothing stays behind
        shutil.rmtree(out / "step_000000.0.tmp")
        if not was_there:
            out.rmdir()
        raise
    if vocabulary:
        vocabulary.save(out / "tokenizer.json")
        data = f"python prepare.py FILE... --name NAME --tokenizer {out}"
    else:
        data = f"{flags.model} holds no tokenizer.json; make it with the tokenizer of the model's training"
    saved = dataclasses.asdict(cfg)
    write_json(out / "config.json", {**saved, "vocab_size_used": weights.vocab_size})
    left_out = ""
    if weights.left_out:
        left_out = (f"left out, as the logits do not depend on them: {len(weights.left_out)} tensors, "
                    f"{printable(weights.left_out[0])} first\n")
    return (f"{left_out}{step}\nsample.py {out} --prompt ..., or train.py --data data/NAME --init-from "
            f"{step} {flag_words(cfg)}\ndata/NAME: {data}")


def lazy_pieces(weights):
    """Return [(name, Lazy, full shape, offset)] of all tensors of a HuggingFace, for checkpoint.save."""
    import torch
    pieces = []
    for name, entry in weights.index["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        for piece in entry["pieces"]:
            read = partial(read_piece, weights, name, entry["shape"], piece, dtype)
            pieces.append((name, Lazy(piece["size"], dtype, read), entry["shape"], piece["offset"]))
    return pieces


def read_piece(weights, name, full, piece, dtype):
    """Return one piece of our tensor `name`, whose full shape is `full`."""
    import torch
    block = torch.empty(piece["size"], dtype=dtype)
    weights.fill(name, block, full, piece["offset"])
    return block


def meta_of_no_step(cfg):
    """Return what index.json says of a run that has made no step."""
    saved = dataclasses.asdict(cfg)
    return {"step": 0, "samples": 0, "skipped": 0, "nan_steps": 0, "adam_t": 0, "world": 1, "seed": cfg.seed,
            "data": "", "skip": [], "scaler": None, "best": {}, "vocab_size": cfg.vocab_size,
            "shape": {flag: saved[flag] for flag in SHAPE}, "flags": saved}


# -----------------------------------------------------------------------------
# out

def export_model(flags):
    """Write one of our runs as a directory of Hugging Face; return a line that says so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if isinstance(weights, HuggingFace):
        raise ValueError(f"{run} is a model of Hugging Face already; export takes a run of train.py")
    kind = hf.family_of(cfg)
    full = full_config(cfg, kind)
    vocabulary = load_tokenizer(run, vocab_size)
    own = shapes(cfg, vocab_size)
    lazy = lazy_tensors(weights, own, tensors(full, kind, vocab_size), DTYPES[flags.dtype])
    out = Path(flags.out)
    with must_write(out):
        out.mkdir(parents=True, exist_ok=True)
        write_weights(out, lazy, flags.shard_gb * 1e9)

    eod = vocabulary.eod if vocabulary else None
    dtype = str(DTYPES[flags.dtype]).removeprefix("torch.")
    # In transformers, generate() stops at the tokens of generation_config.json. config.json names only
    # end-of-document, and import finds it there.
    files = {"config.json": hf.config_json(full, kind, vocab_size, eod, dtype),
             "generation_config.json": {"bos_token_id": eod, "eos_token_id": end_tokens(vocabulary)}}
    if vocabulary:
        files |= hf.export_tokenizer(vocabulary, cfg.seq_len)
    for name, content in files.items():
        write_json(out / name, content)
    talks = "chat_template" in files.get("tokenizer_config.json", {})
    card = model_card(cfg, kind, weights, run, flags.dtype, talks)
    (out / "README.md").write_bytes(card.encode())
    return f"{said}{out}: {hf.FAMILIES[kind].architecture}, {len(lazy)} tensors in {flags.dtype}"


def full_config(cfg, kind):
    """Return cfg with the flags that give our model all tensors of the family."""
    full = dataclasses.replace(cfg, **hf.FAMILIES[kind].flags)
    if kind == "glm4_moe" and not cfg.n_shared_experts:
        full = dataclasses.replace(full, n_shared_experts=1)
    return full


def lazy_tensors(weights, own, layout, dtype):
    """Return {their name: Lazy} of a layout of tensors(), read from a Reader of our weights.

    own: the names of our model's tensors.
    """
    import torch
    lazy = {}
    for name, theirs in layout.items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        lazy[name] = Lazy(theirs.shape(), kept, partial(read_whole, weights, own, theirs, kept))
    return lazy


def write_weights(out, lazy, most):
    """Write {name: Lazy} as files of at most `most` bytes. A larger tensor has a file of its own."""
    groups = []  # {name: Lazy} for each file
    room = 0
    for name, tensor in lazy.items():
        size = tensor.numel() * tensor.element_size()
        if not groups or size > room:
            groups.append({})
            room = most
        groups[-1][name] = tensor
        room -= size

    if len(groups) == 1:
        checkpoint.write_safetensors(out / "model.safetensors", groups[0], {"format": "pt"})
        return
    file_of = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        checkpoint.write_safetensors(out / file, group, {"format": "pt"})
        file_of.update(dict.fromkeys(group, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in lazy.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    write_json(out / "model.safetensors.index.json", index)


def end_tokens(vocabulary):
    """Return the ids after which a text ends: end-of-document, and <|end|> of a conversation.

    The result is a list if the vocabulary has the tokens of conversations; otherwise one id or None.
    """
    if vocabulary is None:
        return None
    if not set(MARKERS) <= vocabulary.special.keys():
        return vocabulary.eod
    ends = [vocabulary.special[END]]
    if vocabulary.eod is not None:
        ends.insert(0, vocabulary.eod)
    return ends


def write_json(path, content):
    """Write a JSON file in UTF-8, whatever the terminal's encoding is."""
    path.write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


@wrong_input()
def main(argv=None):
    """Import or export. SystemExit(2) after one line on stderr: wrong input."""
    flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "convert.py", __doc__)
    out = Path(flags.out)
    is_new = not out.exists() or out.is_dir() and not any(out.iterdir())
    if not flags.out or not is_new:
        raise ValueError(f"--out {flags.out or 'is missing'}: give a new directory, or an empty one")
    if flags.command == "import":
        print(import_model(flags))
    else:
        print(export_model(flags))


if __name__ == "__main__":
    main()

"""Models of Hugging Face, in and out, as transformers reads them; a GGUF file, as llama.cpp reads it.

    python convert.py import MODEL_DIR --out DIR  then: sample.py DIR, or train.py --init-from DIR/step_000000
    python convert.py export RUN --out DIR        RUN: of train.py, one of its step_N, or what import wrote
    python convert.py gguf RUN --out MODEL.gguf   the same RUN, with a tokenizer of byte pairs
    python convert.py peft RUN --out DIR          a run with --lora: its adapters alone, as peft reads them

Of a run with --lora, export and gguf write the whole model, with the adapters merged into it. Adapters of
peft come in with: python convert.py import ADAPTER_DIR --base RUN --out DIR

docs/hugging-face.md says what maps to what, and what is refused. A tensor is read when it is written, so no
more than two tensors are in memory.
"""
import dataclasses
import json
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))
if __name__ == "__main__":  # It says what to type where they are not installed.
    from interface.packages import check_packages
    check_packages()

import tyro

import checkpoint
from config import SHAPE, check
from corpus import config_json, gguf_file, peft_files, tokenizer, tokenizer_json
from corpus import hugging_face as hf
from corpus.chat import END, MARKERS
from corpus.masked import MASK
from corpus.safetensors_files import open_safetensors, same_matrix
from interface import paths
from interface.command_line import (
    as_program,
    command_line,
    given_flags,
    printable,
    read_run_config,
    wrong_input,
)
from interface.files import must_write
from interface.half import unfinished
from interface.schema import load_json, load_json_of_others
from runtime import adapters
from runtime.model_card import model_card
from runtime.model_tensors import Lazy, gguf_tensors, read_paired, read_whole, shapes, tensors
from runtime.peft_adapters import from_peft, to_peft

Command = tyro.conf.Positional[Literal["import", "export", "gguf", "peft"]]
Folder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of convert.py."""
    # import a model of Hugging Face; export one of ours, write it as gguf, or its adapters for peft
    command: Command
    model: Folder  # import: its directory; export, gguf, peft: a run, or one of its step_N
    out: str = ""  # a new directory for the result; gguf: a new file
    # export, gguf: of the weights; the masters are fp32
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    shard_gb: float = 5.0  # export: the most GB of a file
    seq_len: int = 0  # import, rotary positions: a shorter sequence than the model's; 0 keeps the model's
    # import of peft's adapters: the run, or its step_N, whose weights they belong to; peft: the name under
    # which peft finds the model that they belong to
    base: str = ""
    RANGES = {"shard_gb": (1e-6, 10**6), "seq_len": (0, 2**24)}
    # Which flags a command reads, of those that not all commands read
    READ = {"export": {"dtype", "shard_gb"}, "gguf": {"dtype"}, "peft": {"dtype", "base"},
            "import": {"seq_len"}, "import of adapters": {"base"}}
    MISSING = ("import, export, gguf or peft and a directory are needed, for example python convert.py "
               "export out/tiny --out hf/tiny, or python convert.py import MODEL_DIR --out out/NAME")


# -----------------------------------------------------------------------------
# Tensors of Hugging Face

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}  # safetensors' names: --dtype
NARROWEST_FIRST = list(FLOATS)
TORCH_DTYPE = {short: name for name, short in checkpoint.SAFETENSORS_DTYPE.items()}


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
        raise FileNotFoundError(f"{run} holds no config.json; {paths.meant_run(run)}")
    if is_theirs(run):
        weights = HuggingFace(run)
        return weights.cfg, weights.vocab_size, weights, run, ""
    if step is None:
        weights, said = open_chosen(run)
    else:
        weights = checkpoint.Reader(step, checkpoint.check(step))
        said = ""
    cfg, vocab_size = read_run_config(run / "config.json")
    if cfg.lora:
        cfg, weights = adapters.open_merged(cfg, weights)
    return cfg, vocab_size, weights, run, said


def open_chosen(run):
    """Return (the Reader of choose_step(), its line).

    A run that goes on may remove that checkpoint meanwhile: then it is chosen once more. Files that are open
    stay readable.
    """
    step, said = choose_step(run)
    try:
        return checkpoint.Reader(step).open_all(), said
    except (ValueError, OSError):
        if step.exists():
            raise
    step, said = choose_step(run)
    return checkpoint.Reader(step).open_all(), said


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
# Import

def import_adapter(flags):
    """Write adapters of peft as one of our runs that has made no step; return lines that say so."""
    folder = Path(flags.model)
    if not flags.base:
        raise ValueError(f"{folder} holds adapters; give --base RUN, the run or what import wrote to whose "
                         "weights they belong")
    rank, alpha = peft_files.read_adapter(folder)
    step = Path(flags.base)
    if not step.name.startswith("step_"):
        step, _ = choose_step(step)
    index = adapters.check_import(flags.base, step)
    cfg, vocab_size = read_run_config(step.parent / "config.json")
    pieces = from_peft(folder, dataclasses.replace(cfg, lora=0), rank, vocab_size)
    cfg = dataclasses.replace(cfg, lora=rank, lora_alpha=alpha, vocab_size=vocab_size)
    check(cfg)
    vocabulary = (tokenizer.load_if_there(folder, vocab_size)
                  or tokenizer.load_if_there(step.parent, vocab_size))
    out = Path(flags.out)
    meta = {**meta_of_no_step(cfg), "base": adapters.reference(step, index)}
    with must_write(out, reads=True), unfinished(out, IMPORTED) as half:
        saved = out / checkpoint.save(half, 0, pieces, meta).name
        if vocabulary:
            vocabulary.save(half / "tokenizer.json")
        write_json(half / "config.json", {**dataclasses.asdict(cfg), "vocab_size_used": vocab_size})
    return (f"{saved}: adapters of rank {rank}, alpha {alpha:g}, on top of {step}\n"
            f"{paths.after_import(out, saved)}")


# What an import writes. If it is stopped, the next one replaces these files.
IMPORTED = (r"(tokenizer|config)\.json|step_000000(\.0\.tmp)?/"
            r"(rank_00000\.safetensors|node_[\w.-]*\.jsonl|(rank_00000|index)\.json|"
            r"\.(rank_00000|index)\.json\.\w{8}\.part)?")


def import_model(flags):
    """Write a Hugging Face model as one of our runs that has made no step; return lines that say so."""
    if paths.steps_of(flags.model):
        raise ValueError(f"{flags.model} is a run of train.py, which sample.py and --init-from read as it "
                         f"is; python convert.py export {flags.model} --out DIR writes it for transformers")
    weights = HuggingFace(flags.model, flags.seq_len)
    vocabulary = tokenizer.load_if_there(weights.path, weights.vocab_size)
    out = Path(flags.out)
    cfg = dataclasses.replace(weights.cfg, vocab_size=weights.vocab_size)
    saved = dataclasses.asdict(cfg)
    with must_write(out, reads=True), unfinished(out, IMPORTED) as half:
        step = out / checkpoint.save(half, 0, lazy_pieces(weights), meta_of_no_step(cfg)).name
        if vocabulary:
            vocabulary.save(half / "tokenizer.json")
        write_json(half / "config.json", {**saved, "vocab_size_used": weights.vocab_size})
    if vocabulary:
        prepare = shlex.quote(paths.program("prepare.py"))
        data = f"python {prepare} FILE... --name NAME --tokenizer {shlex.quote(str(out))}"
    else:
        data = f"{flags.model} holds no tokenizer.json; make it with the tokenizer of the model's training"
    left_out = ""
    if weights.left_out:
        left_out = (f"left out, as the logits do not depend on them: {len(weights.left_out)} tensors, "
                    f"{printable(weights.left_out[0])} first\n")
    return f"{left_out}{step}\n{paths.after_import(out, step)}\ndata/NAME:    {data}"


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
# Export

# What an export writes. If it is stopped, the next one replaces these files.
ADAPTERS = r"adapter_(config\.json|model\.safetensors)|tokenizer(_config)?\.json"
EXPORTED = r"((generation_|tokenizer_)?config|tokenizer)\.json|README\.md|model[\w.-]*\.(safetensors|json)"


def export_model(flags):
    """Write one of our runs as a directory of Hugging Face; return a line that says so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if isinstance(weights, HuggingFace):
        raise ValueError(f"{run} is a model of Hugging Face already; export takes a run of train.py")
    kind = hf.family_of(cfg)
    full = full_config(cfg, kind)
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary and cfg.objective == "mlm":
        vocabulary = with_mask(vocabulary, run)
    layout = tensors(full, kind, vocab_size)
    lazy = lazy_tensors(weights, shapes(cfg, vocab_size), layout, DTYPES[flags.dtype])

    eod = vocabulary.eod if vocabulary else None
    dtype = str(DTYPES[flags.dtype]).removeprefix("torch.")
    files = {"config.json": hf.config_json(full, kind, vocab_size, eod, dtype)}
    if cfg.objective == "causal":
        # In transformers, generate() stops at the tokens of generation_config.json. config.json names only
        # end-of-document, and import finds it there.
        ends = end_tokens(vocabulary)
        files["generation_config.json"] = {"bos_token_id": eod, "eos_token_id": ends, "pad_token_id": eod}
    if vocabulary:
        files |= tokenizer_json.export_tokenizer(vocabulary, cfg.seq_len)
    settings = files.get("tokenizer_config.json", {})
    card = model_card(cfg, kind, weights, run, flags.dtype, settings)

    out = Path(flags.out)
    with must_write(out), unfinished(out, EXPORTED) as half:
        write_weights(half, lazy, flags.shard_gb * 1e9)
        for name, content in files.items():
            write_json(half / name, content)
        (half / "README.md").write_bytes(card.encode())
    return (f"{said}{out}: {hf.FAMILIES[kind].architecture}, {len(lazy)} tensors in {flags.dtype}\n"
            f"to publish it: hf upload YOUR_NAME/{shlex.quote(run.name)} {shlex.quote(flags.out)}")


def with_mask(vocabulary, run):
    """Return the tokenizer of a masked language model with the token [MASK], which is one id past the data's.

    ValueError: config.json has another id.
    """
    found = load_json(run / "config.json").get("mask_token")
    vocabulary = vocabulary.with_special([MASK])
    if vocabulary.special[MASK] != found:
        raise ValueError(f"{run}/config.json has {MASK} as {found!r}, by tokenizer.json it is "
                         f"{vocabulary.special[MASK]}: they are of two runs")
    return vocabulary


def export_adapter(flags):
    """Write the adapters of a run with --lora as peft's files; return a line that says so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if not isinstance(weights, adapters.Merged):
        raise ValueError(f"{run} has no adapters; convert.py export writes the whole model")
    lazy, adapter_config = to_peft(weights, cfg, vocab_size, DTYPES[flags.dtype], flags.base)
    files = {peft_files.CONFIG: adapter_config}
    if vocabulary := tokenizer.load_if_there(run, vocab_size):
        files |= tokenizer_json.export_tokenizer(vocabulary, cfg.seq_len)
    out = Path(flags.out)
    with must_write(out), unfinished(out, ADAPTERS) as half:
        checkpoint.write_safetensors(half / peft_files.WEIGHTS, lazy, {"format": "pt"})
        for name, content in files.items():
            write_json(half / name, content)
    return f"{said}{out}: {len(lazy)} tensors of adapters in {flags.dtype}, for peft"


def write_gguf(flags):
    """Write a run of ours as a file that llama.cpp reads; return lines that say so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if flags.dtype not in gguf_file.FILE_TYPES:
        raise ValueError(f"--dtype {flags.dtype}: llama.cpp has none; give one of "
                         f"{', '.join(gguf_file.FILE_TYPES)}")
    kind = hf.family_of(cfg)
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary is None:
        raise ValueError(f"{run} holds no tokenizer.json, and llama.cpp reads no model without one; train on "
                         "data of prepare.py")
    gguf_file.check_written(cfg, kind, vocabulary)
    architecture, _, pairs_rows = gguf_file.of_family(kind)
    full = full_config(cfg, kind)
    keys = gguf_file.model_keys(full, kind, vocab_size, run.name, flags.dtype)
    keys |= gguf_file.tokenizer_keys(vocabulary, vocab_size)
    own = shapes(cfg, vocab_size)
    lazy = {}
    for name, theirs in gguf_tensors(full, kind, vocab_size).items():
        shape = theirs.shape()
        wide = gguf_file.stays_wide(name, shape)
        dtype = DTYPES["fp32"] if wide else DTYPES[flags.dtype]
        heads = 0
        if pairs_rows:
            heads = {"wq": cfg.n_head, "wk": cfg.n_kv_head}.get(theirs.parts[0].name.split(".")[-2], 0)
        lazy[name] = Lazy(shape, dtype, partial(read_paired, weights, own, theirs, dtype, heads))

    out = Path(flags.out)
    with must_write(out), unfinished(out, r".*\.gguf", only="model.gguf") as half:
        gguf_file.write(gguf_file.open_writer(half / "model.gguf", architecture), keys, lazy)
    return (f"{said}{out}: {architecture}, {len(lazy)} tensors in {flags.dtype}\n"
            f"{gguf_file.different_texts(vocabulary)}llama-cli -m {shlex.quote(flags.out)} -p ...")


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


def refuse_unread(flags):
    """ValueError: a flag is given that this command does not read."""
    what = flags.command
    if what == "import" and (Path(flags.model) / peft_files.CONFIG).exists():
        what = "import of adapters"
    unread = given_flags(flags, set().union(*Flags.READ.values()) - Flags.READ[what])
    if unread:
        raise ValueError(f"{what} does not read {', '.join(unread)}; leave it out")


@wrong_input()
def main(argv=None):
    """Import or export. SystemExit(2) after one line on stderr: wrong input."""
    flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "convert.py", __doc__)
    refuse_unread(flags)
    out = Path(flags.out)
    if flags.command == "gguf":
        if not flags.out or out.exists():
            raise ValueError(f"--out {flags.out or 'is missing'}: give a new file, such as model.gguf")
        print(write_gguf(flags))
        return
    if flags.command == "import":
        into = flags.out or paths.imported(flags.model)
        asked = paths.download(flags.model, f"python convert.py import {{}} --out {shlex.quote(into)}")
        if asked:
            raise ValueError(asked)
    is_new = not out.exists() or out.is_dir() and not any(out.iterdir())
    if not flags.out or not is_new:
        raise ValueError(f"--out {flags.out or 'is missing'}: give a new directory, or an empty one")
    if flags.command == "import" and (Path(flags.model) / peft_files.CONFIG).exists():
        print(import_adapter(flags))
    elif flags.command == "import":
        print(import_model(flags))
    elif flags.command == "peft":
        print(export_adapter(flags))
    else:
        print(export_model(flags))


if __name__ == "__main__":
    as_program(main)

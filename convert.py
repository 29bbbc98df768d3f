"""Models of Hugging Face, in and out, as transformers reads them; a GGUF file, as llama.cpp reads it.

    python convert.py import MODEL_DIR --out DIR  then: sample.py DIR, or train.py --init-from DIR/step_000000
    python convert.py export RUN --out DIR        RUN: of train.py, one of its step_N, or what import wrote
    python convert.py gguf RUN --out MODEL.gguf   the same RUN, with a tokenizer of byte pairs
    python convert.py peft RUN --out DIR          a run with --lora: its adapters alone, as peft reads them

Of a run with --lora, export and gguf write the whole model, with the adapters merged into it. Adapters of
peft come in with: python convert.py import ADAPTER_DIR --base RUN --out DIR

docs/hugging-face.md says what maps to what, and what is refused.
"""
import dataclasses
import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import interface.packages  # noqa: F401  isort: skip (it says in one line which package is missing)
import tyro

import checkpoint
from config import SHAPE, check, flags_of_kind
from corpus import tokenizer
from corpus.chat import END, MARKERS
from corpus.masked import MASK
from corpus.text import require
from hub import gguf, peft
from hub.families import FAMILIES, config_json, family_of, full_config
from hub.tokenizer import export_tokenizer
from hub.weights import HuggingFace, read_from, tensors
from interface import paths
from interface.command_line import command_line, read_run_config, refuse_unread, wrong_input
from interface.files import load_json, whole_folder

Command = tyro.conf.Positional[Literal["import", "export", "gguf", "peft"]]
Folder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DIR")]]


@dataclass(frozen=True)
class Flags:
    """The command line of convert.py."""
    # import a model of Hugging Face; export one of ours, write it as gguf, or its adapters for peft
    command: Command
    model: Folder  # import: its directory; export, gguf, peft: a run, or one of its step_N
    out: str = ""  # a new directory for the result; gguf: a new file
    # export, gguf, peft: of the weights; the masters are fp32
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    shard_gb: float = 5.0  # export: the most GB of a file
    seq_len: int = 0  # import, rotary positions: a shorter sequence than the model's; 0 keeps the model's
    # import of peft's adapters: the run, or its step_N, whose weights they belong to; peft: the name under
    # which peft finds the model that they belong to
    base: str = ""
    RANGES = {"shard_gb": (1e-6, 10**6), "seq_len": (0, 2**24)}


def read_run(run_dir):
    """Return (Config, vocabulary size, Reader, folder, tokenizer) of a run, a step_N, or one of theirs."""
    run = Path(run_dir)
    if run.name.startswith("step_") and not (run / "config.json").exists():
        run = run.parent
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no config.json; {paths.meant_run(run)}")
    found = load_json(run / "config.json")
    if isinstance(found, dict) and "model_type" in found:
        weights = HuggingFace(run)
        return weights.cfg, weights.vocab_size, weights, run, tokenizer.load_if_there(run, weights.vocab_size)
    step = choose_step(Path(run_dir))
    weights = checkpoint.Reader(step, checkpoint.check(step))
    cfg, vocab_size = read_run_config(run / "config.json")
    from runtime.init_from import flags_of, refuse_other_model  # not at the top: it imports torch
    meta = weights.index["meta"]
    there = {**meta.get("flags", flags_of(cfg)), **meta["shape"]}
    refuse_other_model(cfg, step, there, names=SHAPE + flags_of_kind("meaning"))
    if cfg.lora:
        cfg, weights = peft.open_merged(cfg, weights)
    return cfg, vocab_size, weights, run, tokenizer.load_if_there(run, vocab_size)


def choose_step(run):
    """Return a run's checkpoint with the lowest validation loss, or else the newest; a checkpoint itself."""
    newest = checkpoint.latest(run)
    if newest == run and (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no checkpoint; train with --save-every N")
    lowest = checkpoint.read_index(newest)["meta"].get("best", {})
    best = run / f"step_{lowest.get('step', 0):06d}"
    return best if best.is_dir() else newest


# Each command writes into a folder that becomes --out, and returns a line that says what it wrote.

def import_adapter(flags, folder):
    from runtime.init_from import reference  # not at the top: it imports torch
    theirs = Path(flags.model)
    if not flags.base:
        raise ValueError(f"{theirs} holds adapters; give --base RUN, the run or what import wrote to whose "
                         "weights they belong")
    rank, alpha = peft.read_adapter(theirs)
    step = choose_step(Path(flags.base))
    base = reference(step, peft.check_import(flags.base, step))
    cfg, vocab_size = read_run_config(step.parent / "config.json")
    pieces = peft.from_peft(theirs, dataclasses.replace(cfg, lora=0), rank, vocab_size)
    cfg = dataclasses.replace(cfg, lora=rank, lora_alpha=alpha, vocab_size=vocab_size)
    check(cfg)
    vocabulary = tokenizer.load_if_there(step.parent, vocab_size)
    return save_run(flags.out, folder, cfg, pieces, vocabulary, {"base": base})


def import_model(flags, folder):
    weights = HuggingFace(flags.model, flags.seq_len)
    vocabulary = tokenizer.load_if_there(weights.path, weights.vocab_size)
    cfg = dataclasses.replace(weights.cfg, vocab_size=weights.vocab_size)
    return save_run(flags.out, folder, cfg, weights.pieces(), vocabulary, {})


def save_run(out, folder, cfg, pieces, vocabulary, more):
    """Write a run that has made no step, and say what starts from it. more: what index.json says besides."""
    saved = dataclasses.asdict(cfg)
    meta = {"step": 0, "vocab_size": cfg.vocab_size, "shape": {flag: saved[flag] for flag in SHAPE},
            "flags": saved, **more}
    step = Path(out, checkpoint.save(folder, 0, pieces, meta).name)
    if vocabulary:
        vocabulary.save(folder / "tokenizer.json")
    write_json(folder, {"config.json": {**saved, "vocab_size_used": cfg.vocab_size}})
    return f"{step}, for train.py --init-from"


def write_json(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


def export_model(flags, folder):
    from model import DTYPES  # not at the top: it imports torch
    cfg, vocab_size, weights, _, vocabulary = read_run(flags.model)
    kind = family_of(cfg)
    full = full_config(cfg, kind)
    if vocabulary and cfg.objective == "mlm":
        vocabulary = vocabulary.with_special([MASK])  # one id past the data's
    eod = vocabulary.eod if vocabulary else None
    dtype = str(DTYPES[flags.dtype]).removeprefix("torch.")
    files = {"config.json": config_json(full, kind, vocab_size, eod, dtype)}
    if cfg.objective == "causal":
        # In transformers, generate() stops at these tokens; import finds end-of-document in config.json.
        ends = eod
        if vocabulary and set(MARKERS) <= vocabulary.special.keys():
            ends = [i for i in (eod, vocabulary.special[END]) if i is not None]
        files["generation_config.json"] = {"bos_token_id": eod, "eos_token_id": ends, "pad_token_id": eod}
    if vocabulary:
        files |= export_tokenizer(vocabulary, cfg.seq_len)
    write_json(folder, files)

    layout = read_from(weights, tensors(full, kind, vocab_size), flags.dtype)
    sizes = {name: tensor.nbytes for name, tensor in layout.items()}
    # A larger tensor has a file of its own.
    split = require("huggingface_hub", "convert.py export").split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors",
        max_shard_size=flags.shard_gb * 1e9)
    for file, names in split.filename_to_tensors.items():
        checkpoint.write_safetensors(folder / file, {name: layout[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder, {"model.safetensors.index.json": index})
    return f"{flags.out}: {FAMILIES[kind].architecture} of {weights.path}"


def export_adapter(flags, folder):
    cfg, vocab_size, weights, run, vocabulary = read_run(flags.model)
    if not isinstance(weights, peft.Merged):
        raise ValueError(f"{run} has no adapters; convert.py export writes the whole model")
    layout = peft.to_peft(weights, cfg, vocab_size, flags.dtype)
    write_json(folder, {peft.CONFIG: peft.adapter_config(weights.cfg, layout, flags.base)})
    if vocabulary:
        write_json(folder, export_tokenizer(vocabulary, cfg.seq_len))
    checkpoint.write_safetensors(folder / peft.WEIGHTS, layout)
    return f"{flags.out}: adapters of {weights.path}"


def write_gguf(flags, folder):
    cfg, vocab_size, weights, run, vocabulary = read_run(flags.model)
    if flags.dtype not in gguf.FILE_TYPES:
        raise ValueError(f"--dtype {flags.dtype}: llama.cpp has only {', '.join(gguf.FILE_TYPES)}")
    if vocabulary is None:
        raise ValueError(f"{run} holds no tokenizer.json, and llama.cpp reads no model without one")
    kind = family_of(cfg)
    full = full_config(cfg, kind)
    with closing(gguf.open_writer(folder / "model.gguf", full, kind)) as writer:
        gguf.add_model(writer, full, kind, vocab_size, flags.dtype)
        gguf.add_tokenizer(writer, vocabulary, vocab_size)
        gguf.write(writer, gguf.read_from(weights, full, kind, vocab_size, flags.dtype), full, kind)
    return f"{flags.out}: {writer.arch} of {weights.path}"


COMMANDS = {"import": import_model, "import of adapters": import_adapter, "export": export_model,
            "gguf": write_gguf, "peft": export_adapter}
READS = {  # {command: the flags that it reads, of those that not all commands read}
    "import": {"seq_len"}, "import of adapters": {"base"}, "export": {"dtype", "shard_gb"},
    "gguf": {"dtype"}, "peft": {"dtype", "base"}}


@wrong_input()
def main(argv=None):
    """Import or export. SystemExit(2) after one line on stderr: wrong input."""
    flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "convert.py", __doc__)
    command = flags.command
    if command == "import" and Path(flags.model, peft.CONFIG).exists():
        command = "import of adapters"
    refuse_unread(flags, command, READS)
    out = Path(flags.out)
    if not flags.out or out.exists():
        raise ValueError(f"--out {flags.out or 'is missing'}: give a new directory, or for gguf a new file")
    only = "model.gguf" if command == "gguf" else ""
    with whole_folder(out, only) as folder:
        said = COMMANDS[command](flags, folder)
    print(said)


if __name__ == "__main__":
    raise SystemExit(main())

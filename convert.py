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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))
if __name__ == "__main__":  # It says what to type where they are not installed.
    from interface.packages import check_packages
    check_packages()

import tyro

import checkpoint
from config import SHAPE, SILENT, as_typed, check
from corpus import tokenizer
from corpus.chat import END, MARKERS
from corpus.masked import MASK
from hub import gguf, peft
from hub.families import FAMILIES, config_json, family_of, full_config
from hub.tokenizer import export_tokenizer
from hub.weights import HuggingFace, lazy_tensors, tensors
from interface import paths
from interface.command_line import command_line, given_flags, read_run_config, wrong_input
from interface.files import load_json, must_write, sound_rows, whole_folder
from runtime import adapters

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
    MISSING = ("import, export, gguf or peft and a directory are needed, for example python convert.py "
               "export out/tiny --out hf/tiny, or python convert.py import MODEL_DIR --out out/NAME")


# -----------------------------------------------------------------------------
# A run, or a directory of Hugging Face

def read_run(run_dir):
    """Read a run, one of its checkpoints, or a directory of Hugging Face.

    Return (Config, vocabulary size, Reader, directory of the run, line). The line says which checkpoint was
    taken, or is "". ValueError, OSError: there is no run, or no sound checkpoint.
    """
    run = Path(run_dir)
    step = None
    said = ""
    if run.name.startswith("step_") and not (run / "config.json").exists():
        step = run
        run = step.parent
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no config.json; {paths.meant_run(run)}")
    if is_theirs(run):
        weights = HuggingFace(run)
        return weights.cfg, weights.vocab_size, weights, run, ""
    if step is None:
        step, said = choose_step(run)
    else:
        checkpoint.check(step)
    weights = checkpoint.Reader(step)
    cfg, vocab_size = read_run_config(run / "config.json")
    if cfg.lora:
        cfg, weights = adapters.open_merged(cfg, weights)
    return cfg, vocab_size, weights, run, said


def is_theirs(folder):
    """Whether the config.json of a directory comes from Hugging Face."""
    with suppress(ValueError):
        found = load_json(folder / "config.json")
        return isinstance(found, dict) and "model_type" in found and "vocab_size_used" not in found
    return False


def choose_step(run):
    """Return the checkpoint of a run to take, and a line that says which it is and why.

    It is the checkpoint with the lowest validation loss, if that is known and the checkpoint is sound.
    Otherwise it is the newest sound one.
    """
    chosen = checkpoint.newest(run)
    if chosen is None:
        raise FileNotFoundError(f"{run} holds no sound checkpoint; train with --save-every N")
    why = "the newest checkpoint"
    lowest = checkpoint.read_index(chosen)["meta"].get("best", {})
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
    rank, alpha = peft.read_adapter(folder)
    step = Path(flags.base)
    if not step.name.startswith("step_"):
        step, _ = choose_step(step)
    index = adapters.check_import(flags.base, step)
    cfg, vocab_size = read_run_config(step.parent / "config.json")
    pieces = peft.from_peft(folder, dataclasses.replace(cfg, lora=0), rank, vocab_size)
    cfg = dataclasses.replace(cfg, lora=rank, lora_alpha=alpha, vocab_size=vocab_size)
    check(cfg)
    vocabulary = (tokenizer.load_if_there(folder, vocab_size)
                  or tokenizer.load_if_there(step.parent, vocab_size))
    said = save_run(flags.out, cfg, pieces, vocabulary, {"base": adapters.reference(step, index)})
    return f"adapters of rank {rank}, alpha {alpha:g}, on top of {step}\n{said}"


def import_model(flags):
    """Write a Hugging Face model as one of our runs that has made no step; return lines that say so."""
    if paths.steps_of(flags.model):
        raise ValueError(f"{flags.model} is a run of train.py, which sample.py and --init-from read as it "
                         f"is; python convert.py export {flags.model} --out DIR writes it for transformers")
    weights = HuggingFace(flags.model, flags.seq_len)
    vocabulary = tokenizer.load_if_there(weights.path, weights.vocab_size)
    cfg = dataclasses.replace(weights.cfg, vocab_size=weights.vocab_size)
    said = save_run(flags.out, cfg, weights.pieces(), vocabulary, {})
    data = f"{flags.model} holds no tokenizer.json; make it with the tokenizer of the model's training"
    if vocabulary:
        data = (f"python {paths.program('prepare.py')} FILE... --name NAME "
                f"--tokenizer {shlex.quote(flags.out)}")
    return f"{said}\ndata/NAME:    {data}"


def save_run(out, cfg, pieces, vocabulary, meta):
    """Write a run that has made no step; return lines that say what can be typed with it.

    meta: what index.json says besides.
    """
    saved = dataclasses.asdict(cfg)
    meta = {"step": 0, "samples": 0, "skipped": 0, "nan_steps": 0, "adam_t": 0, "world": 1, "seed": cfg.seed,
            "data": "", "skip": [], "scaler": None, "best": {}, "vocab_size": cfg.vocab_size,
            "shape": {flag: saved[flag] for flag in SHAPE}, "flags": saved, **meta}
    with must_write(out, reads=True), whole_folder(Path(out)) as folder:
        step = Path(out, checkpoint.save(folder, 0, pieces, meta).name)
        if vocabulary:
            vocabulary.save(folder / "tokenizer.json")
        write_json(folder / "config.json", {**saved, "vocab_size_used": cfg.vocab_size})
    sample = shlex.join(["python", paths.program("sample.py"), out])
    train = shlex.join(["python", paths.program("train.py"), "--data", "data/NAME", "--init-from", str(step)])
    return f"{step}\nwrite text:   {sample} --prompt ...\ntrain on:     {train}"


# -----------------------------------------------------------------------------
# Export

def export_model(flags):
    """Write one of our runs as a directory of Hugging Face; return a line that says so."""
    cfg, vocab_size, weights, run, said, dtype = read_ours(flags)
    kind = family_of(cfg)
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary and cfg.objective == "mlm":
        # [MASK] is one id past the data's.
        vocabulary = vocabulary.with_special([MASK])
    full = full_config(cfg, kind)
    lazy = lazy_tensors(weights, tensors(full, kind, vocab_size), dtype)

    eod = vocabulary.eod if vocabulary else None
    files = {"config.json": config_json(full, kind, vocab_size, eod, str(dtype).removeprefix("torch."))}
    if cfg.objective == "causal":
        # In transformers, generate() stops at the tokens of generation_config.json. config.json names only
        # end-of-document, and import finds it there.
        ends = eod
        if vocabulary and set(MARKERS) <= vocabulary.special.keys():
            ends = [i for i in (eod, vocabulary.special[END]) if i is not None]
        files["generation_config.json"] = {"bos_token_id": eod, "eos_token_id": ends, "pad_token_id": eod}
    if vocabulary:
        files |= export_tokenizer(vocabulary, cfg.seq_len)

    with written(flags.out, files) as folder:
        write_weights(folder, lazy, flags.shard_gb * 1e9)
        card = model_card(cfg, kind, weights, run, flags.dtype)
        (folder / "README.md").write_bytes(card.encode())
    return (f"{said}{flags.out}: {FAMILIES[kind].architecture}, {len(lazy)} tensors in {flags.dtype}\n"
            f"to publish it: hf upload YOUR_NAME/{shlex.quote(run.name)} {shlex.quote(flags.out)}")


def read_ours(flags):
    """Return read_run() of a run of ours, and torch's dtype of --dtype."""
    from model import DTYPES
    found = read_run(flags.model)
    if isinstance(found[2], HuggingFace):
        raise ValueError(f"{flags.model} is a model of Hugging Face already; give a run of train.py")
    return *found, DTYPES[flags.dtype]


@contextmanager
def written(out, files):
    """Give the folder that becomes `out`, with the files {name: content as JSON} in it."""
    with must_write(out), whole_folder(Path(out)) as folder:
        for name, content in files.items():
            write_json(folder / name, content)
        yield folder


def write_weights(out, lazy, most):
    """Write {name: Lazy} as files of at most `most` bytes. A larger tensor has a file of its own."""
    groups = []  # {name: Lazy} for each file
    room = 0
    total = 0
    for name, tensor in lazy.items():
        size = tensor.numel() * tensor.element_size()
        total += size
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
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    write_json(out / "model.safetensors.index.json", index)


def export_adapter(flags):
    """Write the adapters of a run with --lora as peft's files; return a line that says so."""
    cfg, vocab_size, weights, run, said, dtype = read_ours(flags)
    if not isinstance(weights, adapters.Merged):
        raise ValueError(f"{run} has no adapters; convert.py export writes the whole model")
    lazy = peft.to_peft(weights, cfg, vocab_size, dtype)
    files = {peft.CONFIG: peft.adapter_config(weights.cfg, lazy, flags.base)}
    if vocabulary := tokenizer.load_if_there(run, vocab_size):
        files |= export_tokenizer(vocabulary, cfg.seq_len)
    with written(flags.out, files) as folder:
        checkpoint.write_safetensors(folder / peft.WEIGHTS, lazy, {"format": "pt"})
    return f"{said}{flags.out}: {len(lazy)} tensors of adapters in {flags.dtype}, for peft"


def write_gguf(flags):
    """Write a run of ours as a file that llama.cpp reads; return lines that say so."""
    cfg, vocab_size, weights, run, said, dtype = read_ours(flags)
    if flags.dtype not in gguf.FILE_TYPES:
        raise ValueError(f"--dtype {flags.dtype}: llama.cpp has only {', '.join(gguf.FILE_TYPES)}")
    kind = family_of(cfg)
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary is None:
        raise ValueError(f"{run} holds no tokenizer.json, and llama.cpp reads no model without one; train on "
                         "data of prepare.py")
    full = full_config(cfg, kind)
    with (must_write(flags.out), whole_folder(Path(flags.out), "model.gguf") as folder,
          closing(gguf.open_writer(folder / "model.gguf", full, kind)) as writer):
        gguf.add_model(writer, full, kind, vocab_size, run.name, flags.dtype)
        gguf.add_tokenizer(writer, vocabulary, vocab_size)
        lazy = gguf.lazy_tensors(weights, full, kind, vocab_size, dtype)
        gguf.write(writer, lazy)
    return (f"{said}{flags.out}: {writer.arch}, {len(lazy)} tensors in {flags.dtype}\n"
            f"llama-cli -m {shlex.quote(flags.out)} -p ...")


def write_json(path, content):
    """Write a JSON file in UTF-8, whatever the terminal's encoding is."""
    path.write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


# -----------------------------------------------------------------------------
# The README.md of an exported model

def model_card(cfg, kind, weights, run, dtype):
    """Return README.md: what was trained, on what, and how far."""
    meta = weights.index["meta"]
    task = {"causal": "text-generation", "mlm": "fill-mask"}[cfg.objective]
    facts = [f"sequences trained on: {meta.get('samples')} of {cfg.seq_len} tokens",
             f"data: {meta.get('data') or 'not known'}"]
    flags = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != field.default and field.name not in (*SILENT, "data", "init_from"):
            flags[field.name] = value
    facts.append(f"flags that differ from the defaults: {as_typed(flags) or 'none'}")
    rows = [row for row in sound_rows(run / "metrics.jsonl")[0] if row["step"] <= meta["step"]]
    for key in ("loss", "val_loss"):
        known = [row for row in rows if row.get(key)]
        if known:
            facts.append(f"{key} {known[-1][key]:.4f} at step {known[-1]['step']}")
    if cfg.capacity_factor:
        facts.append(f"training dropped what exceeded a capacity of {cfg.capacity_factor} per expert; here "
                     "no token is dropped")
    said = "\n".join(f"- {fact}" for fact in facts)
    return (f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- nanoshard\n---\n"
            f"# {run.name}, step {meta['step']}\n\n{FAMILIES[kind].architecture} in {dtype}, exported from "
            f"nanoshard's {weights.path.name}.\n\n{said}\n")


# -----------------------------------------------------------------------------
# The command line

COMMANDS = {  # {command: (its function, the flags that it reads, of those that not all commands read)}
    "import": (import_model, {"seq_len"}), "import of adapters": (import_adapter, {"base"}),
    "export": (export_model, {"dtype", "shard_gb"}), "gguf": (write_gguf, {"dtype"}),
    "peft": (export_adapter, {"dtype", "base"})}


@wrong_input()
def main(argv=None):
    """Import or export. SystemExit(2) after one line on stderr: wrong input."""
    flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "convert.py", __doc__)
    command = flags.command
    if command == "import" and Path(flags.model, peft.CONFIG).exists():
        command = "import of adapters"
    run, reads = COMMANDS[command]
    unread = given_flags(flags, {"dtype", "shard_gb", "seq_len", "base"} - reads)
    if unread:
        raise ValueError(f"{command} does not read {', '.join(unread)}; leave it out")
    out = Path(flags.out)
    is_new = not out.exists() or command != "gguf" and out.is_dir() and not any(out.iterdir())
    if not flags.out or not is_new:
        wanted = "a new file, such as model.gguf" if command == "gguf" else "a new directory, or an empty one"
        raise ValueError(f"--out {flags.out or 'is missing'}: give {wanted}")
    print(run(flags))


if __name__ == "__main__":
    raise SystemExit(main())

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
from pathlib import Path
from typing import Annotated, Literal

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))
if __name__ == "__main__":  # It says what to type where they are not installed.
    from interface.packages import check_packages
    check_packages()

import tyro

import checkpoint
from config import SHAPE, SILENT, check
from corpus import tokenizer
from corpus.chat import END, MARKERS
from corpus.masked import MASK
from hub import gguf, peft
from hub.families import FAMILIES, config_json, family_of
from hub.tokenizer import export_tokenizer
from hub.weights import HuggingFace, lazy_pieces, lazy_tensors, tensors
from interface import paths
from interface.command_line import command_line, given_flags, read_run_config, wrong_input
from interface.files import load_json, must_write, sound_rows, whole_folder
from interface.terminal import printable
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


def is_theirs(folder):
    """Whether the config.json of a directory comes from Hugging Face."""
    with suppress(ValueError):
        found = load_json(folder / "config.json")
        return isinstance(found, dict) and "model_type" in found and "vocab_size_used" not in found
    return False


def open_chosen(run):
    """Return (the Reader of choose_step(), its line). Files that are open stay readable."""
    while True:
        step, said = choose_step(run)
        try:
            return checkpoint.Reader(step).open_all(), said
        except (ValueError, OSError):
            if step.exists():
                raise
            # The run goes on and has removed it: there is another one.


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
    saved = save_run(flags, cfg, pieces, vocabulary, {"base": adapters.reference(step, index)})
    return (f"{saved}: adapters of rank {rank}, alpha {alpha:g}, on top of {step}\n"
            f"{after_import(saved.parent, saved)}")


def after_import(out, step):
    """Return lines with what can be typed with an imported model: its folder, and its step in there."""
    sample = shlex.join(["python", paths.program("sample.py"), str(out)])
    train = shlex.join(["python", paths.program("train.py"), "--data", "data/NAME", "--init-from", str(step)])
    return f"write text:   {sample} --prompt ...\ntrain on:     {train}"


def import_model(flags):
    """Write a Hugging Face model as one of our runs that has made no step; return lines that say so."""
    if paths.steps_of(flags.model):
        raise ValueError(f"{flags.model} is a run of train.py, which sample.py and --init-from read as it "
                         f"is; python convert.py export {flags.model} --out DIR writes it for transformers")
    weights = HuggingFace(flags.model, flags.seq_len)
    vocabulary = tokenizer.load_if_there(weights.path, weights.vocab_size)
    cfg = dataclasses.replace(weights.cfg, vocab_size=weights.vocab_size)
    step = save_run(flags, cfg, lazy_pieces(weights), vocabulary, {})
    if vocabulary:
        data = (f"python {paths.program('prepare.py')} FILE... --name NAME "
                f"--tokenizer {shlex.quote(flags.out)}")
    else:
        data = f"{flags.model} holds no tokenizer.json; make it with the tokenizer of the model's training"
    left_out = ""
    if weights.left_out:
        left_out = (f"left out, as the logits do not depend on them: {len(weights.left_out)} tensors, "
                    f"{printable(weights.left_out[0])} first\n")
    return f"{left_out}{step}\n{after_import(step.parent, step)}\ndata/NAME:    {data}"


def save_run(flags, cfg, pieces, vocabulary, meta):
    """Write a run that has made no step; return its checkpoint. meta: what index.json says besides."""
    saved = dataclasses.asdict(cfg)
    meta = {"step": 0, "samples": 0, "skipped": 0, "nan_steps": 0, "adam_t": 0, "world": 1, "seed": cfg.seed,
            "data": "", "skip": [], "scaler": None, "best": {}, "vocab_size": cfg.vocab_size,
            "shape": {flag: saved[flag] for flag in SHAPE}, "flags": saved, **meta}
    out = Path(flags.out)
    with must_write(out, reads=True), whole_folder(out) as folder:
        step = out / checkpoint.save(folder, 0, pieces, meta).name
        if vocabulary:
            vocabulary.save(folder / "tokenizer.json")
        write_json(folder / "config.json", {**saved, "vocab_size_used": cfg.vocab_size})
    return step


# -----------------------------------------------------------------------------
# Export

def export_model(flags):
    """Write one of our runs as a directory of Hugging Face; return a line that says so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if isinstance(weights, HuggingFace):
        raise ValueError(f"{run} is a model of Hugging Face already; export takes a run of train.py")
    kind = family_of(cfg)
    full = full_config(cfg, kind)
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary and cfg.objective == "mlm":
        vocabulary = with_mask(vocabulary, run)
    lazy = lazy_tensors(weights, tensors(full, kind, vocab_size), DTYPES[flags.dtype])

    eod = vocabulary.eod if vocabulary else None
    dtype = str(DTYPES[flags.dtype]).removeprefix("torch.")
    files = {"config.json": config_json(full, kind, vocab_size, eod, dtype)}
    if cfg.objective == "causal":
        # In transformers, generate() stops at the tokens of generation_config.json. config.json names only
        # end-of-document, and import finds it there.
        ends = eod
        if vocabulary and set(MARKERS) <= vocabulary.special.keys():
            ends = [i for i in (eod, vocabulary.special[END]) if i is not None]
        files["generation_config.json"] = {"bos_token_id": eod, "eos_token_id": ends, "pad_token_id": eod}
    if vocabulary:
        files |= export_tokenizer(vocabulary, cfg.seq_len)
    card = model_card(cfg, kind, weights, run, flags.dtype, files.get("tokenizer_config.json", {}))

    out = Path(flags.out)
    with must_write(out), whole_folder(out) as folder:
        write_weights(folder, lazy, flags.shard_gb * 1e9)
        for name, content in files.items():
            write_json(folder / name, content)
        (folder / "README.md").write_bytes(card.encode())
    return (f"{said}{out}: {FAMILIES[kind].architecture}, {len(lazy)} tensors in {flags.dtype}\n"
            f"to publish it: hf upload YOUR_NAME/{shlex.quote(run.name)} {shlex.quote(flags.out)}")


def full_config(cfg, kind):
    """Return cfg with the flags that give our model all tensors of the family."""
    full = dataclasses.replace(cfg, **FAMILIES[kind].flags)
    if kind == "glm4_moe" and not cfg.n_shared_experts:
        full = dataclasses.replace(full, n_shared_experts=1)
    return full


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


def export_adapter(flags):
    """Write the adapters of a run with --lora as peft's files; return a line that says so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if not isinstance(weights, adapters.Merged):
        raise ValueError(f"{run} has no adapters; convert.py export writes the whole model")
    lazy, adapter_config = peft.to_peft(weights, cfg, vocab_size, DTYPES[flags.dtype], flags.base)
    files = {peft.CONFIG: adapter_config}
    if vocabulary := tokenizer.load_if_there(run, vocab_size):
        files |= export_tokenizer(vocabulary, cfg.seq_len)
    out = Path(flags.out)
    with must_write(out), whole_folder(out) as folder:
        checkpoint.write_safetensors(folder / peft.WEIGHTS, lazy, {"format": "pt"})
        for name, content in files.items():
            write_json(folder / name, content)
    return f"{said}{out}: {len(lazy)} tensors of adapters in {flags.dtype}, for peft"


def write_gguf(flags):
    """Write a run of ours as a file that llama.cpp reads; return lines that say so."""
    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if flags.dtype not in gguf.FILE_TYPES:
        raise ValueError(f"--dtype {flags.dtype}: llama.cpp has none; give one of "
                         f"{', '.join(gguf.FILE_TYPES)}")
    kind = family_of(cfg)
    vocabulary = tokenizer.load_if_there(run, vocab_size)
    if vocabulary is None:
        raise ValueError(f"{run} holds no tokenizer.json, and llama.cpp reads no model without one; train on "
                         "data of prepare.py")
    full = full_config(cfg, kind)
    out = Path(flags.out)
    with must_write(out), whole_folder(out, "model.gguf") as folder:
        writer = gguf.open_writer(folder / "model.gguf", full, kind)
        gguf.add_model(writer, full, kind, vocab_size, run.name, flags.dtype)
        gguf.add_tokenizer(writer, vocabulary, vocab_size)
        lazy = gguf.lazy_tensors(weights, full, kind, vocab_size, DTYPES[flags.dtype])
        gguf.write(writer, lazy)
    return (f"{said}{out}: {writer.arch}, {len(lazy)} tensors in {flags.dtype}\n"
            f"llama-cli -m {shlex.quote(flags.out)} -p ...")


def write_json(path, content):
    """Write a JSON file in UTF-8, whatever the terminal's encoding is."""
    path.write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


# -----------------------------------------------------------------------------
# The README.md of an exported model

CONTINUE = """from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
text = {text}
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))"""
PLAIN = 'tokenizer("Once", return_tensors="pt")'
CHAT = """tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], return_tensors="pt",
                                     return_dict=True, add_generation_prompt=True)"""
FILL = """from transformers import pipeline
for found in pipeline("fill-mask", ".")("a[MASK] in a text"):
    print(found["score"], repr(found["sequence"]))"""


def model_card(cfg, kind, weights, run, dtype, settings):
    """Return README.md: what was trained, on what, and how far. settings: of tokenizer_config.json."""
    meta = weights.index["meta"]
    data = meta.get("data") or "not known"
    losses = "; ".join(last_losses(run, meta["step"])) or "no losses are known"
    # Of the flags that say nothing about the training, only the skipped steps are interesting here.
    flags = flag_words(cfg, {"data", *SILENT} - {"train_range_to_skip"})
    began = ""
    if source := load_json(run / "config.json").get("init_from"):  # a resume empties it
        began = f"- started from the weights of {Path(source).name}; what follows counts this run alone\n"
    note = ""
    if cfg.capacity_factor:
        note = (f"Training dropped what exceeded a capacity of {cfg.capacity_factor} per expert; here no "
                "token is dropped, so the losses above are not quite this model's.\n\n")
    if cfg.objective == "mlm":
        code = FILL
    else:
        code = CONTINUE.replace("{text}", CHAT if "chat_template" in settings else PLAIN)
    return f"""{yaml_head(cfg, run)}
# {run.name}, step {meta['step']}

{FAMILIES[kind].architecture} in {dtype}, exported from nanoshard's {weights.path.name}.

{began}- sequences trained on: {meta.get('samples')} of {cfg.seq_len} tokens; data: {data}
- {losses}
- flags that differ from the defaults: `{flags or 'none'}`

{note}```python
{code}
```
"""


def yaml_head(cfg, run):
    """Return the first lines of a model card, from which the hub knows what the model is for."""
    task = "fill-mask" if cfg.objective == "mlm" else "text-generation"
    # A text in JSON is the same text in YAML, whatever characters the name has.
    return (f"---\nlibrary_name: transformers\npipeline_tag: {task}\nmodel_name: {json.dumps(run.name)}\n"
            "tags:\n- nanoshard\n---")


def last_losses(run, step):
    """Return a list of text: the last training loss and the last validation loss of a run up to `step`."""
    rows = [row for row in sound_rows(run / "metrics.jsonl")[0] if row["step"] <= step]
    losses = []
    for word, key in (("training", "loss"), ("validation", "val_loss")):
        known = [row for row in rows if row.get(key)]
        if known:
            losses.append(f"{word} loss {known[-1][key]:.4f} at step {known[-1]['step']}")
    return losses


def flag_words(cfg, left_out=()):
    """Return the flags that differ from the defaults, as train.py reads them."""
    words = []
    for field in dataclasses.fields(cfg):
        flag = field.name.replace("_", "-")
        value = getattr(cfg, field.name)
        if value == field.default or field.name in left_out:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else [value]
            words.append(f"--{flag}")
            words.extend(shlex.quote(str(v)) for v in values)
    return " ".join(words)


# -----------------------------------------------------------------------------
# The command line

def refuse_unread(flags):
    """ValueError: a flag is given that this command does not read."""
    what = flags.command
    if what == "import" and (Path(flags.model) / peft.CONFIG).exists():
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
    is_new = not out.exists() or out.is_dir() and not any(out.iterdir())
    if not flags.out or not is_new:
        raise ValueError(f"--out {flags.out or 'is missing'}: give a new directory, or an empty one")
    if flags.command == "import" and (Path(flags.model) / peft.CONFIG).exists():
        print(import_adapter(flags))
    elif flags.command == "import":
        print(import_model(flags))
    elif flags.command == "peft":
        print(export_adapter(flags))
    else:
        print(export_model(flags))


if __name__ == "__main__":
    raise SystemExit(main())

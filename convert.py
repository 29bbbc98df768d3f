"""Models of Hugging Face, in and out: config.json, *.safetensors and tokenizer.json, as transformers reads.

    python convert.py import MODEL_DIR --out DIR  then: sample.py DIR, or train.py --init-from DIR/step_000000
    python convert.py export RUN --out DIR        RUN: of train.py, one of its step_N, or what import wrote

docs/hugging-face.md says what maps to what, and what is refused. Tensors are read when they are written: no
more than two are in memory.
"""
import dataclasses
import json
import math
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

import checkpoint
from corpus import hugging_face as hf
from corpus import tokenizer
from corpus.chat import END, MARKERS
from interface.command_line import command_line, read_run_config, wrong_input
from interface.files import must_write, sound_rows
from interface.schema import check_schema, load_json

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
    seq_len: int = 0  # import: a shorter one than the model's; 0 takes the model's
    RANGES = {"shard_gb": (1e-6, 10**6), "seq_len": (0, 2**24)}


# -----------------------------------------------------------------------------
# tensors

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}  # narrowest first
BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # no weights: masks, frequencies


class Part(NamedTuple):
    """A rectangle of a tensor of ours."""
    name: str
    full: tuple  # its tensor's shape
    offset: tuple
    size: tuple


def shapes(cfg, vocab_size):
    """-> {name: (full shape, rows without padding)} of our model's parameters and buffers."""
    from runtime.launch import World  # isort: skip (before torch: it sets how idle threads wait)
    import torch

    from model import GPT
    from parallel import make_mesh
    mesh = make_mesh(World())
    with torch.device("meta"):
        model = GPT(cfg, mesh, vocab_size)
    return {**{name: (p.full_shape, p.used) for name, p in model.named_parameters()},
            **{name: (tuple(t.shape), len(t)) for name, t in model.named_buffers()}}


def tensors(cfg, kind, vocab_size):
    """-> {their name: (whether it is transposed, its Parts from top to bottom)}. GPT-2 stores (in, out)."""
    names, out = hf.FAMILIES[kind].names, {}
    for name, (full, rows) in shapes(cfg, vocab_size).items():
        block, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name).groups("")
        own = module + (leaf or ".weight")  # a name of its own, or that of its module
        if own not in names and module not in names:
            raise ValueError(f"{name} has no name in a {kind} model of Hugging Face; this model cannot be "
                             "converted until FAMILIES in corpus/hugging_face.py has one")
        theirs = names[own] if own in names else names[module] + (leaf or ".weight")
        theirs = f"{names['blocks']}.{block}.{theirs}" if block else theirs
        if "{}" in theirs:  # (E, rows, columns): each expert is a tensor
            for j in range(full[0]):
                out[theirs.format(j)] = False, [Part(name, full, (j, 0, 0), (1, *full[1:]))]
        else:
            part = Part(name, full, (0,) * len(full), (rows, *full[1:]))
            out.setdefault(theirs, (".c_" in theirs and len(full) == 2, []))[1].append(part)
    for i in range(cfg.n_layer if "gate" in names else 0):
        gate = Part("gate", (1, cfg.n_embd), (0, 0), (1, cfg.n_embd))
        out[f"{names['blocks']}.{i}.{names['gate']}.weight"] = False, [gate]
    return out


class Lazy:
    """Stands for a tensor in checkpoint.write_safetensors, which reads one when it writes it."""

    def __init__(self, shape, dtype, read):
        self.shape, self.dtype, self.detach = tuple(shape), dtype, read

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return self.dtype.itemsize


def open_safetensors(folder):
    """-> {name: slice, which reads from the file} of all tensors of a directory of Hugging Face. ValueError,
    OSError: it has no such files, or they are damaged."""
    from safetensors import SafetensorError, safe_open
    files, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / files[0]).is_file():  # an index may be of an older save
        check_schema(listed := load_json(index), {"weight_map": {"*": str}}, index)
        files = sorted(set(listed["weight_map"].values()))
    found = {}
    for name in files:
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise ValueError(f"{index} names the file {name!r}, no .safetensors beside it")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; files of other kinds (.bin, .pt) can run "
                                    "code and are not read: save the model again with transformers")
        try:
            handle = safe_open(folder / name, framework="pt")
            found |= {key: handle.get_slice(key) for key in handle.keys()  # noqa: SIM118
                      if not BUFFERS.fullmatch(f".{key}")}
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{folder / name} is damaged ({e}); download it again") from None
    return found


class HuggingFace(checkpoint.Reader):
    """The weights of a directory of Hugging Face, read as if they were a checkpoint of ours: fill() gives any
    rectangle of any tensor of ours. cfg, vocab_size: the model of its config.json."""

    def __init__(self, folder, seq_len=0):
        self.path, self.slices = Path(folder), open_safetensors(Path(folder))
        for name, part in self.slices.items():
            if part.get_dtype() not in FLOATS:
                raise ValueError(f"{folder}: {name} is {part.get_dtype()}, none of {', '.join(FLOATS)}")
        stored = {part.get_dtype() for part in self.slices.values()}
        narrowest = min(stored, key=[*FLOATS].index, default="F32")
        found = hf.read_config(self.path / "config.json", FLOATS[narrowest], seq_len)
        kind, self.cfg, self.vocab_size = found
        if self.cfg.n_layer * max(1, self.cfg.n_experts) > len(self.slices):
            raise ValueError(f"{folder}/config.json has {self.cfg.n_layer} layers and {self.cfg.n_experts} "
                             f"experts, the files have {len(self.slices)} tensors: they are of two models")
        if kind == "gpt2" and "wte.weight" in self.slices:  # as on the hub: saved without the head around it
            self.slices = {f"transformer.{name}": part for name, part in self.slices.items()}
        self.layout = tensors(self.cfg, kind, self.vocab_size)
        self.check_shapes()
        types = {short: name for name, short in checkpoint.SAFETENSORS_DTYPE.items()}
        self.index = {"tensors": {name: {"shape": list(full), "pieces": []}
                                  for name, (full, _) in shapes(self.cfg, self.vocab_size).items()}}
        for theirs, (_, parts) in self.layout.items():
            first = 0
            for name, full, offset, size in parts:
                stored = self.slices[theirs].get_dtype()
                before = self.index["tensors"][name].get("dtype", "")  # parts may differ: the widest
                widest = max(stored, checkpoint.SAFETENSORS_DTYPE.get(before, stored), key=[*FLOATS].index)
                self.index["tensors"][name]["dtype"] = types[widest]
                pieces = self.index["tensors"][name]["pieces"]
                pieces.append({"file": theirs, "key": first, "offset": offset, "size": size})
                first += size[0]
                if name in ("wte.weight", "head.weight"):  # the padding of the vocabulary is zero
                    pad = full[0] - size[0], full[1]
                    pieces.append({"file": "", "key": 0, "offset": (size[0], 0), "size": pad})

    def check_shapes(self):
        """ValueError, with the tensor's name, unless the files hold the tensors of the model."""
        tied = {"lm_head.weight"} if self.cfg.tied else set()  # some files have it although it is tied
        if more := sorted(self.slices.keys() - self.layout.keys() - tied):
            raise ValueError(f"{self.path}: our model has no place for {more[0]}; it is another architecture")
        for name, (transposed, parts) in self.layout.items():
            want = their_shape(transposed, parts)
            have = tuple(self.slices[name].get_shape()) if name in self.slices else "not there"
            if have != want:
                raise ValueError(f"{self.path}: {name} is {have}, by config.json it should be {want}")

    def _read(self, theirs, first, where):
        import torch
        if not theirs:
            return torch.zeros([s.stop - s.start for s in where])
        rows, *columns = where[1:] if len(where) == 3 else where
        rows = slice(first + rows.start, first + rows.stop)
        try:
            if self.layout[theirs][0]:
                return self.slices[theirs][(*columns, rows)].T
            got = self.slices[theirs][(rows, *columns)]
        except Exception as e:  # of the library; the file was cut or changed after it was opened
            raise ValueError(f"{self.path}: {theirs} is damaged ({e}); download it again") from None
        return got.unsqueeze(0) if len(where) == 3 else got


def their_shape(transposed, parts):
    """-> the shape of a tensor of theirs that consists of these Parts."""
    size = parts[0].size
    shape = size[1:] if len(size) == 3 else (sum(p.size[0] for p in parts), *size[1:])
    return shape[::-1] if transposed else shape


def read_whole(weights, own, transposed, parts, dtype):
    """-> a tensor of theirs, from a Reader of ours; zeros where a part is none of our tensors `own`."""
    import torch
    blocks = [torch.zeros(part.size, dtype=dtype) for part in parts]
    for part, block in zip(parts, blocks, strict=True):
        if part.name in own:
            weights.fill(part.name, block, part.full, part.offset)
    whole = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
    return whole.T if transposed else whole.view(their_shape(False, parts))


# -----------------------------------------------------------------------------
# a run, or a directory of Hugging Face

def read_run(run_dir):
    """A run, one of its checkpoints, or a directory of Hugging Face -> (Config, vocabulary size, Reader,
    directory of the run, a line that says which checkpoint was taken, or ""). ValueError, OSError: no run,
    or no sound checkpoint."""
    run = Path(run_dir)
    step = run if run.name.startswith("step_") and not (run / "config.json").exists() else None
    run = run.parent if step else run
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} holds no config.json; give the --out directory of a run of train.py")
    if is_theirs(run):
        weights = HuggingFace(run)
        return weights.cfg, weights.vocab_size, weights, run, ""
    index, said = checkpoint.check(step) if step else None, ""
    if step is None:
        step, said = choose_step(run)
    cfg, vocab_size = read_run_config(run / "config.json")
    return cfg, vocab_size, checkpoint.Reader(step, index), run, said


def is_theirs(folder):
    """Whether the config.json of a directory is one of Hugging Face."""
    with suppress(ValueError):
        found = load_json(folder / "config.json")
        return isinstance(found, dict) and "model_type" in found and "vocab_size_used" not in found
    return False


def choose_step(run):
    """-> (of a run's checkpoints the one with the lowest validation loss, where it is known and sound, else
    the newest sound one; a line that says which and why)."""
    newest = checkpoint.newest(run)
    if newest is None:
        raise FileNotFoundError(f"{run} holds no sound checkpoint; train with --save-every N")
    found = checkpoint.read_index(newest)["meta"].get("best", {})
    best, why = run / f"step_{found.get('step', 0):06d}", "the newest checkpoint"
    if "val_loss" in found and best.is_dir() and checkpoint.damage(best) is None:
        newest, why = best, f"lowest validation loss {found['val_loss']:.4f}"
    return newest, f"{newest}: {why} (sample.py RUN/step_N takes another)\n"


# -----------------------------------------------------------------------------
# in and out

def load_tokenizer(folder, vocab_size):
    """-> the tokenizer of a directory, ours or theirs, or None where there is none. ValueError: it has more
    ids than the model."""
    if not (folder / "tokenizer.json").exists():
        return None
    vocabulary = tokenizer.load(folder)
    if vocabulary.n_vocab > vocab_size:
        raise ValueError(f"{folder}/config.json has a vocabulary of {vocab_size}, tokenizer.json "
                         f"{vocabulary.n_vocab} symbols: they are of two models")
    return vocabulary


def import_model(flags):
    """Write a model of Hugging Face as a run of ours that has made no step -> a line that says so."""
    import torch

    from runtime.resume import SHAPE
    weights, out, shards = HuggingFace(flags.model, flags.seq_len), Path(flags.out), []
    cfg, vocabulary = weights.cfg, load_tokenizer(weights.path, weights.vocab_size)

    def read(name, entry, piece):
        block = torch.empty(piece["size"], dtype=getattr(torch, entry["dtype"]))
        weights.fill(name, block, entry["shape"], piece["offset"])
        return block
    for name, entry in weights.index["tensors"].items():
        for piece in entry["pieces"]:
            lazy = Lazy(piece["size"], getattr(torch, entry["dtype"]), partial(read, name, entry, piece))
            shards.append((name, lazy, entry["shape"], piece["offset"]))
    cfg = dataclasses.replace(cfg, vocab_size=weights.vocab_size)
    saved = dataclasses.asdict(cfg)
    zero = dict.fromkeys(("step", "samples", "skipped", "nan_steps", "adam_t"), 0)
    step = checkpoint.save(out, 0, shards, {
        **zero, "world": 1, "seed": cfg.seed, "data": "", "skip": [], "scaler": None, "best": {},
        "vocab_size": weights.vocab_size, "shape": {k: saved[k] for k in SHAPE}, "flags": saved})
    if vocabulary:
        vocabulary.save(out / "tokenizer.json")
    write_json(out / "config.json", {**saved, "vocab_size_used": weights.vocab_size})
    by = (f"python prepare.py FILE... --name NAME --tokenizer {out}" if vocabulary else
          f"{flags.model} holds no tokenizer.json; make it with the tokenizer of the model's training")
    return (f"{step}\nsample.py {out} --prompt ..., or train.py --data data/NAME --init-from {step} "
            f"{flag_words(cfg)}\ndata/NAME: {by}")


def flag_words(cfg, left_out=()):
    """-> the flags that differ from the defaults, as train.py reads them."""
    words = []
    for f in dataclasses.fields(cfg):
        name, value = f.name.replace("_", "-"), getattr(cfg, f.name)
        if value == f.default or f.name in left_out:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, tuple) else [value]
            words += [f"--{name}", *(shlex.quote(str(v)) for v in values)]
    return " ".join(words)


def export_model(flags):
    """Write a run of ours as a directory of Hugging Face -> a line that says so."""
    import torch

    from model import DTYPES
    cfg, vocab_size, weights, run, said = read_run(flags.model)
    if isinstance(weights, HuggingFace):
        raise ValueError(f"{run} is a model of Hugging Face already; export takes a run of train.py")
    kind, dtype, out = hf.family_of(cfg), DTYPES[flags.dtype], Path(flags.out)
    vocabulary, own = load_tokenizer(run, vocab_size), shapes(cfg, vocab_size)
    full = dataclasses.replace(cfg, **hf.FAMILIES[kind].flags)  # has all tensors of the family
    if kind == "glm4_moe" and not cfg.n_shared_experts:
        full = dataclasses.replace(full, n_shared_experts=1)
    lazy = {}
    for name, (transposed, parts) in tensors(full, kind, vocab_size).items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        lazy[name] = Lazy(their_shape(transposed, parts), kept,
                          partial(read_whole, weights, own, transposed, parts, kept))
    with must_write(out):
        out.mkdir(parents=True, exist_ok=True)
        write_weights(out, lazy, flags.shard_gb * 1e9)
    ends = eod = vocabulary and vocabulary.eod
    if vocabulary and set(MARKERS) <= vocabulary.special.keys():
        ends = [i for i in (eod, vocabulary.special[END]) if i is not None]
    # generate() stops at the ends; config.json has end-of-document alone, import finds it there
    files = {"config.json": hf.config_json(full, kind, vocab_size, eod, str(dtype)[6:]),
             "generation_config.json": {"bos_token_id": eod, "eos_token_id": ends}}
    files |= hf.export_tokenizer(vocabulary, cfg.seq_len) if vocabulary else {}
    for name, content in files.items():
        write_json(out / name, content)
    talks = "chat_template" in files.get("tokenizer_config.json", {})
    (out / "README.md").write_bytes(model_card(cfg, kind, weights, run, flags.dtype, talks).encode())
    return f"{said}{out}: {hf.FAMILIES[kind].architecture}, {len(lazy)} tensors in {flags.dtype}"


def write_weights(out, lazy, most):
    """Write {name: Lazy} as files of at most `most` bytes, or of one tensor."""
    parts, room = [], 0
    for name, t in lazy.items():
        size = t.numel() * t.element_size()
        if not parts or size > room:
            parts.append({})
            room = most
        parts[-1][name], room = t, room - size
    files = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    files = ["model.safetensors"] if len(parts) == 1 else files
    for file, part in zip(files, parts, strict=True):
        checkpoint.write_safetensors(out / file, part, {"format": "pt"})
    if len(parts) > 1:
        total = sum(t.numel() * t.element_size() for t in lazy.values())
        names = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": names}
        write_json(out / "model.safetensors.index.json", index)


def write_json(path, content):
    """Write a JSON file; in UTF-8, whatever the terminal has."""
    path.write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


def model_card(cfg, kind, weights, run, dtype, talks):
    """-> README.md: what was trained, on what, how far. talks: transformers has its chat_template."""
    from runtime.resume import SILENT
    meta = weights.index["meta"]
    data = meta.get("data") or "not known"
    rows = [row for row in sound_rows(run / "metrics.jsonl")[0] if row["step"] <= meta["step"]]
    losses = []
    for word, key in (("training", "loss"), ("validation", "val_loss")):
        losses += [f"{word} loss {row[key]:.4f} at step {row['step']}" for row in rows if row.get(key)][-1:]
    # of what says nothing about the training, only the skipped steps do
    flags = flag_words(cfg, {"data", *SILENT} - {"train_range_to_skip"})
    # a resume empties init_from in config.json; of several starts at step 0 the last one counts
    starts = [row.get("config") for row in sound_rows(run / "history.jsonl")[0] if row["step"] == 0]
    start = starts[-1] if starts and isinstance(starts[-1], dict) else load_json(run / "config.json")
    before = Path(str(start.get("init_from") or ""))
    name = "/".join(before.parts[-2:]) if before.name.startswith("step_") else before.name
    began = f"- started from the weights of {name}; what follows counts this run alone\n" if name else ""
    note = (f"Training dropped what exceeded a capacity of {cfg.capacity_factor} per expert; here no token "
            "is dropped, so the losses above are not quite this model's.\n\n" if cfg.capacity_factor else "")
    text = """tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], return_tensors="pt",
                                     return_dict=True, add_generation_prompt=True)""" if talks else (
        'tokenizer("Once", return_tensors="pt")')
    return f"""# {run.name}, step {meta['step']}

{hf.FAMILIES[kind].architecture} in {dtype}, exported from nanoshard's {weights.path.name}.

{began}- sequences trained on: {meta.get('samples')} of {cfg.seq_len} tokens; data: {data}
- {'; '.join(losses) or 'no losses are known'}
- flags that differ from the defaults: `{flags or 'none'}`

{note}```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
text = {text}
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))
```
"""


@wrong_input()
def main(argv=None):
    """Import or export. SystemExit(2) after one line on stderr: wrong input."""
    flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "convert.py", __doc__)
    out = Path(flags.out)
    if not flags.out or out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {flags.out or 'is missing'}: give a new directory, or an empty one")
    print({"import": import_model, "export": export_model}[flags.command](flags))


if __name__ == "__main__":
    main()

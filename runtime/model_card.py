"""The README.md of an exported model, for convert.py: what was trained, on what, and how far."""
import dataclasses
import shlex
from pathlib import Path

from config import SILENT
from corpus import hugging_face as hf
from interface.files import sound_rows
from interface.schema import load_json

CHAT = """tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], return_tensors="pt",
                                     return_dict=True, add_generation_prompt=True)"""


def model_card(cfg, kind, weights, run, dtype, talks):
    """Return README.md: what was trained, on what, and how far. talks: transformers has its chat_template."""
    meta = weights.index["meta"]
    data = meta.get("data") or "not known"
    losses = "; ".join(last_losses(run, meta["step"])) or "no losses are known"
    # Of the flags that say nothing about the training, only the skipped steps are interesting here.
    flags = flag_words(cfg, {"data", *SILENT} - {"train_range_to_skip"})
    began = ""
    if name := first_weights(run):
        began = f"- started from the weights of {name}; what follows counts this run alone\n"
    note = ""
    if cfg.capacity_factor:
        note = (f"Training dropped what exceeded a capacity of {cfg.capacity_factor} per expert; here no "
                "token is dropped, so the losses above are not quite this model's.\n\n")
    text = CHAT if talks else 'tokenizer("Once", return_tensors="pt")'
    return f"""# {run.name}, step {meta['step']}

{hf.FAMILIES[kind].architecture} in {dtype}, exported from nanoshard's {weights.path.name}.

{began}- sequences trained on: {meta.get('samples')} of {cfg.seq_len} tokens; data: {data}
- {losses}
- flags that differ from the defaults: `{flags or 'none'}`

{note}```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))
text = {text}
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))
```
"""


def last_losses(run, step):
    """Return a list of text: the last training loss and the last validation loss of a run up to `step`."""
    rows = [row for row in sound_rows(run / "metrics.jsonl")[0] if row["step"] <= step]
    losses = []
    for word, key in (("training", "loss"), ("validation", "val_loss")):
        known = [row for row in rows if row.get(key)]
        if known:
            losses.append(f"{word} loss {known[-1][key]:.4f} at step {known[-1]['step']}")
    return losses


def first_weights(run):
    """Return the name of the run, or of its checkpoint, whose weights a run started from, or ""."""
    # A resume empties init_from in config.json. history.jsonl keeps the flags of every start. If a run
    # started at step 0 several times, the last start counts.
    starts = [row.get("config") for row in sound_rows(run / "history.jsonl")[0] if row["step"] == 0]
    if starts and isinstance(starts[-1], dict):
        config = starts[-1]
    else:
        config = load_json(run / "config.json")
    path = Path(str(config.get("init_from") or ""))
    if path.name.startswith("step_"):
        return "/".join(path.parts[-2:])
    return path.name


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

"""What the page of plan.py --serve begins with, and the pipeline that it draws. interface/plan.html draws."""
import dataclasses
import typing

from config import typed
from cost.parameters import micro_batches, stage_mesh
from cost.step_time import bubble
from interface.command_line import help_comments
from interface.presets import PRESETS
from pipeline import DURATION, timetable

FORM = {  # the flags that the page asks for, in groups
    "where": ("gpus", "gpu", "tokens"),
    "layout": ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard"),
    "training": ("micro_batch", "global_batch", "seq_len", "recompute", "dtype", "fp8", "optimizer", "lora"),
    "model": ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "vocab_size", "mlp", "norm", "pos",
              "tied"),
    "experts": ("n_experts", "top_k", "n_shared_experts", "capacity_factor")}
IN_FORM = [name for names in FORM.values() for name in names]
MOST_MICRO_BATCHES, MOST_RANKS = 24, 32  # that are drawn


def settings(cfg):
    """Return what the page begins with. cfg: the PlanFlags of the command line."""
    comments = {}
    for cls in reversed(type(cfg).__mro__[:-1]):
        comments |= help_comments(cls)
    fields = {}
    for field in dataclasses.fields(cfg):
        choices = typing.get_args(field.type)  # of a Literal
        if field.type is bool:
            choices = ("true", "false")
        if field.name in IN_FORM:
            _, text = comments[field.name]
            fields[field.name] = {"help": text, "choices": choices, "value": as_word(field.default)}

    presets = {}
    for preset, values in PRESETS.items():
        presets[preset] = {name: as_word(values[name]) for name in values.keys() & fields}
    start = {name: as_word(getattr(cfg, name)) for name in IN_FORM}
    groups = {group: {name: fields[name] for name in names} for group, names in FORM.items()}
    return {"fields": groups, "presets": presets,
            "start": {**start, "preset": cfg.preset, "more": " ".join(other_words(cfg))}}


def as_word(value):
    """Return a flag's value as a form has it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def other_words(cfg):
    """Return the words of the command line that the form has no field for."""
    usual = type(cfg)(**PRESETS[cfg.preset], preset=cfg.preset, data="")
    words = []
    for name, value in vars(cfg).items():
        if name in (*IN_FORM, "serve", "port") or value == getattr(usual, name):
            continue
        if isinstance(value, bool):
            words.append(typed(name if value else f"no_{name}"))
        else:
            words += [typed(name), as_word(value)]
    return words


def schedule(cfg):
    """Return what each rank of a pipeline does when, or None where there is one stage. A forward takes 1."""
    if cfg.pp == 1:
        return None
    count = micro_batches(cfg, stage_mesh(cfg, cfg.gpus, 0))
    drawn = []
    for end, ops in timetable(cfg.pp, cfg.pp_chunks, min(count, MOST_MICRO_BATCHES)).items():
        for rank, op in enumerate(ops[:MOST_RANKS]):
            if op is not None:
                drawn.append({"rank": rank, "begin": end - DURATION[op.kind], "end": end, "kind": op.kind,
                              "micro_batch": op.micro_batch, "chunk": op.chunk})
    return {"ranks": min(cfg.pp, MOST_RANKS), "chunks": cfg.pp_chunks, "micro_batches": count,
            "idle": bubble(cfg.pp, cfg.pp_chunks, count), "ops": drawn}

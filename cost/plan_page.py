"""The form of the page of plan.py --serve, and the pipeline that it draws. interface/plan.html draws."""
import typing

from config import typed
from cost.parameters import micro_batches, stage_mesh
from cost.plan_flags import PlanFlags
from cost.step_time import bubble
from interface.presets import PRESETS
from pipeline import DURATION, timetable

FORM = {  # the flags that the page asks for, in groups
    "where": ("gpus", "gpu", "tokens"),
    "layout": ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard"),
    "training": ("micro_batch", "global_batch", "seq_len", "recompute", "dtype", "fp8", "optimizer", "lora"),
    "model": ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "vocab_size", "mlp", "norm", "pos",
              "tied"),
    "experts": ("n_experts", "top_k", "n_shared_experts", "capacity_factor")}


def settings(cfg):
    """Return what the page begins with. fields: {group: {flag: its values, none where any number is one}}."""
    choices = {name: ("false", "true") if field.type is bool else typing.get_args(field.type)
               for name, field in PlanFlags.__dataclass_fields__.items()}
    fields = {group: {typed(name): choices[name] for name in names} for group, names in FORM.items()}
    return {"fields": fields, "presets": list(PRESETS), "words": filled(cfg)["words"]}


def filled(cfg):
    """Return the words of a command line that gives these flags, and {flag: value} of the form."""
    usual = PlanFlags(**{**PRESETS[cfg.preset], "preset": cfg.preset, "data": ""})
    asked = sum(FORM.values(), ())
    words = [cfg.preset]
    for name in dict.fromkeys([*asked, *vars(cfg)]):
        value = getattr(cfg, name)
        if value != getattr(usual, name) and name not in ("serve", "port", "config"):
            words += [typed(name), *map(str, value if isinstance(value, tuple) else [value])]
    values = {typed(name): str(getattr(cfg, name)).lower() for name in asked}
    return {"words": words, "values": {"preset": cfg.preset, **values}}


def timeline(ranks, chunks, num_micro_batches):
    """Return what ranks do when: [{rank, begin, end, kind, micro_batch, chunk}]. A forward takes 1."""
    drawn = []
    for end, ops in timetable(ranks, chunks, num_micro_batches).items():
        for rank, op in enumerate(ops):
            if op is not None:
                drawn.append({"rank": rank, "begin": end - DURATION[op.kind], "end": end, **op._asdict()})
    return drawn


def schedule(cfg):
    """Return the timeline of a pipeline and its numbers, or None where there is one stage."""
    if cfg.pp == 1:
        return None
    count = micro_batches(cfg, stage_mesh(cfg, cfg.gpus, 0))
    return {"ranks": cfg.pp, "chunks": cfg.pp_chunks, "micro_batches": count,
            "idle": bubble(cfg.pp, cfg.pp_chunks, count),
            "ops": timeline(cfg.pp, cfg.pp_chunks, min(count, 24))}  # more would be too narrow to read

"""What the page of plan.py --serve begins with, and the pipeline that it draws. interface/plan.html draws."""
import typing

from config import Config
from cost.parameters import micro_batches, stage_mesh
from cost.plan_flags import PlanFlags
from cost.step_time import bubble
from interface.command_line import change_words, help_comments
from interface.presets import PRESETS
from pipeline import DURATION, timetable

FORM = {  # the flags that the page asks for, in groups
    "where": ("gpus", "gpu", "tokens"),
    "layout": ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard"),
    "training": ("micro_batch", "global_batch", "seq_len", "recompute", "dtype", "fp8", "optimizer", "lora"),
    "model": ("n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "vocab_size", "mlp", "norm", "pos",
              "tied"),
    "experts": ("n_experts", "top_k", "n_shared_experts", "capacity_factor")}
MOST_MICRO_BATCHES = 24  # that are drawn


def settings(cfg, argv):
    """Return what the page begins with: the words argv of a command line, which are cfg."""
    comments = help_comments(Config) | help_comments(PlanFlags)
    fields = {}
    start = {"preset": cfg.preset}
    for name in sum(FORM.values(), ()):
        field = PlanFlags.__dataclass_fields__[name]
        choices = typing.get_args(field.type)  # of a Literal
        if field.type is bool:
            choices = ("true", "false")
        _, text = comments[name]
        fields[name] = {"help": text, "choices": choices, "value": as_word(field.default)}
        start[name] = as_word(getattr(cfg, name))

    words = argv[1:] if argv[:1] == [cfg.preset] else argv
    start["more"] = " ".join(change_words(words, dict.fromkeys([*fields, "serve", "port"])))
    presets = {preset: {name: as_word(values[name]) for name in values.keys() & fields}
               for preset, values in PRESETS.items()}
    groups = {group: {name: fields[name] for name in names} for group, names in FORM.items()}
    return {"fields": groups, "presets": presets, "start": start}


def as_word(value):  # as a field of the form has it
    return str(value).lower()


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
            "ops": timeline(cfg.pp, cfg.pp_chunks, min(count, MOST_MICRO_BATCHES))}

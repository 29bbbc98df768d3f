"""Which flags may differ between a checkpoint and the run that starts from it.

    check_shape    refuses another model
    changed_flags  what else differs; it refuses what changes the training, unless --resume-changed names it
"""
import dataclasses
import json

import checkpoint
from config import (
    FLAGS,
    MEANING,
    SHAPE,
    SILENT,
    Config,
    as_typed,
    flags_of_kind,
    has_effect,
    unknown_flags,
)
from corpus.samples import settled_doc_mask
from runtime import other_data


def allowed_changes(cfg, there=None):
    """Return the flags that --resume-changed names. ValueError: it cannot allow one of them.

    there: the names of the checkpoint's flags, of which this code may not know one; None if they are not read
    yet.
    """
    typed = [name.strip().lstrip("-").replace("-", "_") for name in cfg.resume_changed.split(",")]
    names = [name for name in typed if name]
    for name in names:
        may_be_theirs = name not in FLAGS and (there is None or name in there)
        if name not in MEANING and not may_be_theirs:
            raise ValueError(f"--resume-changed {name.replace('_', '-')}: give flags among "
                             f"{', '.join(MEANING).replace('_', '-')}; no other one needs it or could change")
    return names


def flexible_shapes(shape):
    """Return the flags of kind "shape or meaning" whose tensors fit all values. shape: of the checkpoint.

    With RoPE no tensor depends on seq_len.
    """
    return ["seq_len"] if shape.get("pos", Config.pos) == "rope" else []


def check_shape(cfg, path, shape, may_differ=()):
    """Raise ValueError, with all flags to give, if the shape of the checkpoint's model differs from cfg's.

    Flags that this code does not know are not compared: see refuse_unknown.
    """
    # An older checkpoint does not name flags that were added later. It has their defaults.
    later = {name: getattr(Config, name) for name in SHAPE if name not in shape}
    apart = {}
    for name, there in {**shape, **later}.items():
        here = getattr(cfg, name, there)
        if here != there and name not in may_differ:
            apart[name.replace("_", "-")] = there, here
    if apart:
        theirs = ", ".join(f"{flag} {there}" for flag, (there, _) in apart.items())
        ours = ", ".join(f"{flag} {here}" for flag, (_, here) in apart.items())
        fix = " ".join(f"--{flag} {there}" for flag, (there, _) in apart.items())
        raise ValueError(f"checkpoint {path} has {theirs}, the flags say {ours}; give {fix}")


def refuse_unknown(path, unknown, allowed=None):
    """Raise ValueError if a checkpoint has flags {name: value} that this code does not know.

    allowed: those of --resume-changed, which can allow them; None without a resume.
    """
    if not unknown:
        return
    text = (f"checkpoint {path} was trained with {as_typed(unknown)}, which this code does not know; use the "
            "code that wrote it (git in config.json)")
    if allowed is not None:
        names = ",".join([*allowed, *unknown]).replace("_", "-")
        text += f", or, if the model is the same, give --resume-changed {names}"
    raise ValueError(text)


def changed_flags(cfg, path, meta, world_size, data_id, vocab_size):
    """Return {flag: [the checkpoint's value, cfg's]} where they differ, if it matters to the training.

    meta: from the checkpoint; an older checkpoint lacks some flags.
    ValueError: --resume-changed has to allow it.
    """
    before, now = compared_flags(cfg, path, meta, world_size, data_id, vocab_size)
    allowed = allowed_changes(cfg, before)
    refuse_unknown(path, unknown_flags(before, [*now, *allowed]), allowed)
    changed = {}
    for name, value in now.items():
        there = before.get(name, value)
        if there == value or name in SILENT:
            continue
        if name == "ranks" or has_effect(name, cfg):
            changed[name] = [there, value]
    asked = [name for name in MEANING if name in changed and name not in allowed]
    if "data" in asked:
        other_data.refuse_vocabulary(cfg, path, meta, changed)
    if asked:
        names = ",".join([*allowed, *asked]).replace("_", "-")
        theirs = []
        ours = []
        fixes = []
        for name in asked:
            there, here = changed[name]
            flag = name.replace("_", "-")
            is_data = name == "data"
            theirs.append(f"other data, {there}" if is_data else f"{flag} {there}")
            ours.append(f"{flag} {here}" if len(asked) > 1 else str(here))
            fixes.append(other_data.fix(cfg, meta) if is_data else f"--{flag} {there}")
        back = f"{' '.join(fixes)}, or " if all(fixes) else ""  # what was replaced may be gone
        raise ValueError(f"checkpoint {path} was trained with {', '.join(theirs)}, this run has "
                         f"{', '.join(ours)}; give {back}--resume-changed {names} to go on with "
                         f"{', '.join(ours)}")
    return changed


def compared_flags(cfg, path, meta, world_size, data_id, vocab_size):
    """Return ({flag: the checkpoint's value}, {flag: cfg's}), and in both the number of `ranks`.

    ValueError: the meta does not come from a run.
    """
    now = json.loads(json.dumps(dataclasses.asdict(cfg)))
    now["ranks"] = world_size
    now["data"] = data_id
    try:
        before = {**meta["shape"], **meta.get("flags", {})}
        if "flags" in meta:
            # A flag that was added later had its default when the weights were trained.
            later = [name for name in flags_of_kind("meaning") if name not in before]
            before.update({name: getattr(Config, name) for name in later})
        before.setdefault("doc_mask", "off")  # This flag's default is not what older checkpoints had.
        if before["doc_mask"] != now["doc_mask"]:
            for flags in (before, now):
                if flags["doc_mask"] == "auto":
                    flags["doc_mask"] = settled_doc_mask(cfg.data, "auto")
        before["seed"] = meta["seed"]
        before["ranks"] = meta["world"]
        before["data"] = meta["data"]
        before["vocab_size"] = meta.get("vocab_size") or vocab_size
        now["vocab_size"] = vocab_size or before["vocab_size"]
        for flags in (before, now):
            if not flags.get("global_batch", 1):  # one micro-batch per replica: it follows from the layout
                replica = flags["tp"] * flags["pp"] * flags.get("cp", 1)
                flags["global_batch"] = flags["micro_batch"] * (flags["ranks"] // replica)
    except (KeyError, TypeError, ZeroDivisionError) as e:
        raise ValueError(f"checkpoint {path}: its meta is no run's ({e!r}); {checkpoint.HINT}") from None
    for name, value in before.items():
        if isinstance(value, str):  # values of a file are printed: no escape codes for the terminal
            before[name] = value.encode("unicode_escape").decode()
    return before, now


# -----------------------------------------------------------------------------
# The directory of the run, and the checkpoint to start from

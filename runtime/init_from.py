"""What a run takes from another one: its weights (--init-from), and which of its flags may differ."""
import dataclasses
import hashlib
import json
from pathlib import Path

import checkpoint
from config import FLAGS, MEANING, SHAPE, Config, flags_of_kind, has_effect, pad_vocab, typed, unknown_flags
from corpus.samples import first_folder
from corpus.tokenizer import refuse_other_tokens
from ddp import frozen_parameters
from runtime.pieces import bucket_pieces, first_sound, load_pieces, own_pieces

VOCABULARY = "wte.weight", "head.weight", "mlm.bias"  # their rows are symbols and padding
UNKNOWN = "no such flag"


# Flags that differ

def flags_of(cfg):
    """Return {flag: value} of a Config, as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def differences(cfg, names, before, now=None):
    """Return {flag: [the checkpoint's value, this run's]} of those flags that differ and have an effect.
    before: {flag: value} of the checkpoint; a flag that it does not name had its default. now: of cfg."""
    now = now or flags_of(cfg)
    before = {**flags_of(Config()), **before}
    return {name: [before[name], now[name]] for name in names
            if before[name] != now[name] and (name not in FLAGS or has_effect(name, cfg))}


def refuse(path, changed, allow=""):
    """Raise ValueError if there are differences(). allow: what goes on with them."""
    said = [f"{typed(name)} {there} (this run: {here})" for name, (there, here) in changed.items()]
    if said:
        raise ValueError(f"checkpoint {path} was trained with {', '.join(said)}; give the same{allow}")


def refuse_other_model(cfg, path, before, may_differ=(), names=SHAPE):
    """Raise ValueError, with all flags to give, if the model of a checkpoint has another shape than cfg's.
    before: {flag: value} of the checkpoint. With RoPE no tensor depends on seq_len."""
    if before.get("pos", Config.pos) == "rope":
        may_differ = (*may_differ, "seq_len")
    refuse(path, differences(cfg, [name for name in names if name not in may_differ], before))


def changed_flags(cfg, path, meta, n_ranks, data_id, vocab_size):
    """Return {flag: [the checkpoint's value, cfg's]} where they differ, if it matters to the training.
    meta: from the checkpoint. ValueError: --resume-changed has to allow it, or nothing can."""
    # The default of --doc-mask is not what older checkpoints had.
    before = {**flags_of(Config()), "doc_mask": "off", **meta["shape"], **meta.get("flags", {})}
    # The moments of one optimizer are not those of the other.
    refuse_other_model(cfg, path, before, ["norm"], (*SHAPE, "optimizer"))
    now = flags_of(cfg)
    before.update(seed=meta["seed"], ranks=meta["world"], vocab_size=meta.get("vocab_size") or vocab_size)
    now.update(ranks=n_ranks, vocab_size=vocab_size or before["vocab_size"])
    if meta["data"] == data_id:
        before["data"] = now["data"]
    else:  # the same folder may hold other data now
        before["data"] += f" ({meta['data']})"
        now["data"] += f" ({data_id})"
    counted = [name for name in (*FLAGS, "ranks") if name not in flags_of_kind("silent")]
    changed = differences(cfg, counted, before, now)
    if "data" in changed and cfg.data != "synthetic":
        refuse_other_tokens(Path(path), first_folder(cfg.data), more=False)

    allowed = [name.strip().lstrip("-").replace("-", "_") for name in cfg.resume_changed.split(",")]
    asked = {name: [value, UNKNOWN] for name, value in unknown_flags(before, now).items()}
    asked.update({name: changed[name] for name in MEANING if name in changed})
    names = ",".join(asked).replace("_", "-")
    asked = {name: values for name, values in asked.items() if name not in allowed}
    refuse(path, asked, f", or --resume-changed {names}, which goes on with this run's")
    return changed


# --init-from

def init_from(model, opt, path):
    """For --init-from: load the weights of a checkpoint, or of a run's newest one, and nothing else. Rows of
    symbols that the checkpoint lacks keep their random start. From a dense model, every expert gets the MLP,
    and routers keep their random start (sparse upcycling, arXiv:2212.05055).
    Return one line that says so. Collective; ValueError: the checkpoint does not fit.
    """
    cfg = model.cfg
    world = model.mesh.world
    path, index = read(world, path)
    meta = index["meta"]
    upcycles = cfg.n_experts > 0 and not meta["shape"]["n_experts"]
    check_source(cfg, path, meta["shape"], upcycles)
    symbols = meta.get("vocab_size") or model.vocab_size
    if symbols > model.vocab_size or symbols < model.vocab_size and (cfg.objective == "mlm" or cfg.lora):
        # The last symbol of a masked language model is [MASK], and --lora trains no embedding.
        raise ValueError(f"--init-from {path} has a vocabulary of {symbols}, the data {model.vocab_size}; "
                         f"prepare the data with that run's tokenizer, or give --vocab-size {symbols}")
    if cfg.lora and not meta["shape"].get("lora"):
        load_base(model, reference(path, index))
        notes = [f"adapters start on top of {path}, which stays as it is"]
    else:
        # The checkpoint's moments are not read. A router's bias is not a weight: its rate may differ here.
        unused = [name for name in index["tensors"] if "/" in name or name.endswith(".router.bias")]
        load_pieces(world, path, index, weights_to_read(opt, symbols, upcycles), unused)
        opt.masters_to_model()
        notes = [f"starts from the weights of {path}, with a fresh optimizer"]
        if cfg.lora:
            load_base(model, meta["base"])
    if model.vocab_size > symbols:
        notes.append(f"{model.vocab_size - symbols} symbols are new")
    names = [name for name in flags_of_kind("meaning") if name != "vocab_size"]
    for name, (there, here) in differences(cfg, names, meta.get("flags", {})).items():
        notes.append(f"{name.replace('_', '-')} {there} -> {here}")
    return "; ".join(notes)


def read(world, path):
    """Return path, or the newest checkpoint under it, and its index. Collective; ValueError: damaged."""
    found = str(checkpoint.latest(path)) if world.rank == 0 else None
    found = world.everyone.broadcast(found)  # a path: that run may go on, so rank 0 chooses
    first_sound(world.everyone, [found])
    return found, checkpoint.read_index(found)


def check_source(cfg, path, shape, upcycles):
    """Raise ValueError unless a model of this shape can be the start of cfg's."""
    if upcycles and shape["bias"]:
        raise ValueError(f"--init-from {path} is a dense model with biases, and experts have none")
    refuse(path, {name: [value, UNKNOWN] for name, value in unknown_flags(shape).items()})
    may_differ = ["n_experts", "n_shared_experts"] if upcycles else []
    if cfg.lora and not shape.get("lora"):
        may_differ.append("lora")
    refuse_other_model(cfg, path, shape, may_differ)


def weights_to_read(opt, symbols, upcycles):
    """Return this rank's rectangles of the weights of a run whose vocabulary has so many symbols."""
    requested = []
    for name, own, full, where in own_pieces(opt.data_parallel, opt, {"": opt.masters}, owned_only=False):
        if name in VOCABULARY:
            rows = own[:max(0, symbols - where[0])]
            requested.append((name, rows, (pad_vocab(symbols), *full[1:]), where))
        elif not upcycles or ".moe." not in name:
            requested.append((name, own, full, where))
        elif len(full) == 3:  # (E, rows, columns) of w1, w2 or w3: a rectangle of one or several experts
            dense = name.replace(".moe.", ".mlp.") + ".weight"
            for part in own:
                requested.append((dense, part, full[1:], where[1:]))
    return requested


# --lora: the base's weights, which stay as they are

def reference(path, index):
    """Return what a checkpoint of adapters says of its base: its path, and a hash of what it holds."""
    content = json.dumps([index["tensors"], index["files"]], sort_keys=True).encode()
    return {"path": str(Path(path).resolve()), "hash": hashlib.blake2b(content, digest_size=16).hexdigest()}


def base_path(base, moved_to=""):
    """Return where the base of this reference() is: there, or in moved_to, a checkpoint or a run.
    FileNotFoundError, with the fix: nowhere."""
    path = Path(base["path"])
    places = [path]
    if moved_to:
        places += [*checkpoint.steps(moved_to), Path(moved_to)]
    for place in places:
        is_there = (place / "index.json").exists()
        if is_there and reference(place, checkpoint.read_index(place))["hash"] == base["hash"]:
            return place
    raise FileNotFoundError(f"the base of these adapters, {path}, is not there, or has other weights; put it "
                            "back, or a link to where it is, or tell train.py that with --init-from")


def load_base(model, base, moved_to=""):
    """Fill the weights that --lora freezes. Collective; ValueError, OSError: the base is not there.
    base: its reference(). moved_to: --init-from, where the base is now if that is another place."""
    world = model.mesh.world
    path = base_path(base, moved_to) if world.rank == 0 else None
    path, index = read(world, path)
    frozen = []  # this rank's share
    sliced = set()
    for bucket in model.data_parallel.frozen_buckets:
        frozen += bucket_pieces(bucket, bucket.own, "", owned_only=False)
        sliced.update(bucket.names)
    for name, p in frozen_parameters(model):
        if name not in sliced:
            frozen.append((name, p.data, p.full_shape, p.offset))
    unused = [name for name in index["tensors"] if "/" in name]
    load_pieces(world, path, index, frozen, unused)
    model.base = reference(path, index)

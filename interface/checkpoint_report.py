"""What `python checkpoint.py show` and `diff` print: a checkpoint's content, and how two checkpoints differ.

    describe   the counters and tensors of one checkpoint
    compare    the counters and tensors in which two differ, whatever their layouts

checkpoint.py opens the checkpoints: a Reader has their index, and reads a tensor block by block.
"""
import math
import reprlib
from typing import NamedTuple

from interface.command_line import printable
from interface.terminal import say


def print_folded(text):
    say(printable(text))


def brief(value):
    """Return a value of the meta as text.

    Of a long list, such as the losses of --skip-spikes, it has the first six.
    """
    if isinstance(value, str):
        return value
    short = reprlib.Repr()
    short.maxdict = 1000
    short.maxstring = 1000
    short.maxother = 1000
    return short.repr(value)


def describe(path, index, say):
    """Say what a checkpoint's counters and tensors are. index: the content of its index.json."""
    megabytes = sum(file["bytes"] for file in index["files"].values()) / 1e6
    say(f"{path}: step {index['step']}, {len(index['tensors'])} tensors in {len(index['files'])} files, "
        f"{megabytes:.1f} MB, all checksums right")
    say("  " + " ".join(f"{k}={brief(v)}" for k, v in index["meta"].items() if not isinstance(v, dict)))
    rows = []
    for name, entry in sorted(index["tensors"].items()):
        pieces = len(entry["pieces"])
        rows.append((name, entry["dtype"], str(tuple(entry["shape"])),
                     f"{pieces} {'piece' if pieces == 1 else 'pieces'}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, dtype, shape, pieces in rows:
        say(f"  {name:{widths[0]}s} {dtype:{widths[1]}s} {shape:{widths[2]}s} {pieces}")


def compare(a, b, say):
    """Say in what two checkpoints differ. Return the number of differences. a and b: their Readers."""
    found = compare_meta(a.index["meta"], b.index["meta"], say)
    names_a = a.index["tensors"]
    names_b = b.index["tensors"]
    for name in sorted(names_a.keys() | names_b.keys()):
        if name not in names_b:
            text = f"only in {a.path}"
        elif name not in names_a:
            text = f"only in {b.path}"
        else:
            text = compare_tensor(a, b, name)
        if text:
            found += 1
            say(f"  {name:40s} {text}")
    say(f"{found} differences" if found else f"equal: all {len(names_a)} tensors, step {a.index['step']}")
    return found


def compare_meta(a, b, say):
    """Say which counters differ. Return their number.

    Other flags or another number of ranks do not make it another model: they do not count.
    """
    notes = {"world": ", of the layout", "flags": ", of the run", "best": ", of the run"}
    found = 0
    for key in sorted(a.keys() | b.keys()):
        x = a.get(key, "absent")
        y = b.get(key, "absent")
        if x == y:
            continue
        if isinstance(x, dict) and isinstance(y, dict):
            apart = sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k))
            x, y = ({k: values[k] for k in apart if k in values} for values in (x, y))
        if key not in notes:
            found += 1
        say(f"  meta {key}: {brief(x)} -> {brief(y)}{notes.get(key, '')}")
    return found


def compare_tensor(a, b, name):
    """Return in words how a tensor of two Readers differs, or ""."""
    x = a.index["tensors"][name]
    y = b.index["tensors"][name]
    if x["shape"] != y["shape"]:
        return f"shape {tuple(x['shape'])} -> {tuple(y['shape'])}"
    said = []
    if x["dtype"] != y["dtype"]:
        said.append(f"{x['dtype']} -> {y['dtype']}")
    apart = difference(a, b, name)
    if apart:
        said.append(f"{apart.count} of {math.prod(x['shape'])} elements, max abs {apart.most:.3g}, "
                    f"relative {apart.relative:.3g}, first at {apart.first}")
    return ", ".join(said)


class Difference(NamedTuple):
    """How two tensors differ."""
    count: int       # of elements that differ
    most: float      # largest absolute difference
    relative: float  # the same, relative to the largest absolute value of the first tensor
    first: tuple     # index of the first element that differs


def difference(a, b, name):
    """Return the Difference of a tensor of two Readers, in which it has the same shape; None: they are equal.

    -0.0 and 0.0 differ; NaN equals NaN.
    """
    import torch
    count = 0
    most = 0.0
    top = 0.0
    first = None
    for (at, x), (_, y) in zip(a.blocks(name), b.blocks(name), strict=True):
        x = x.reshape(-1).double()
        y = y.reshape(-1).double()
        top = max(top, x.abs().nan_to_num(0.0).max().item())
        apart = ((x != y) | (x.signbit() != y.signbit())) & ~(x.isnan() & y.isnan())
        if apart.any():
            count += int(apart.sum())
            most = max(most, (x - y).abs().nan_to_num(math.inf)[apart].max().item())
            if first is None:
                first = at + int(apart.to(torch.uint8).argmax())
    if not count:
        return None
    where = torch.unravel_index(torch.tensor(first), a.index["tensors"][name]["shape"])
    return Difference(count, most, most / top if top else math.inf, tuple(int(i) for i in where))

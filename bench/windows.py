"""Windows and documents: attention alone in the flash kernel and with a mask, and what a step gains by them.

    python bench/windows.py --json rows.jsonl      (what bench/README.md has of them, on one GPU)
    python bench/windows.py steps
    python bench/windows.py --tiny                 (a rehearsal on a CPU)

    attention   forward and backward of attention alone over 8,192 tokens, without the lists of
                blocks; the lists alone, not compiled; the worst difference of output and
                gradients from the mask's
    steps       W1's step, compiled, with two sequences of 8,192 tokens: all keys, windows,
                documents

Documents have 1,024 tokens in the mean. On a CPU torch computes the kernel's function without a compiler, and
the steps take the mask.
"""
import gc
import json
import statistics
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from common import read_flags, start
from runtime.launch import exit_together, launch, shutdown

import torch
from training import Documents, Training, gpu_memory
from tyro.conf import Positional

from attention import attend
from config import Config
from corpus.documents import document_places
from fast.flex import FlexAttention, block_mask
from interface.command_line import parse
from runtime.timing import Stopwatch

PARTS = ("attention", "steps")
SHAPES = ((1, 16, 128), (2, 16, 64), (2, 32, 128))  # sequences, heads, their width
LENGTH, WINDOW, MEAN = 8192, 1024, 1024  # tokens of a sequence, of a window, of a document in the mean
STEPS = (  # title, flags, whether the tokens have documents, parts of fast.choose.Choice that are off
    ("full attention", "", False, ()),
    ("window", "--window {window}", False, ()),
    ("window but for every sixth layer", "--window {window} --full-every 6", False, ()),
    ("documents", "", True, ()),
    ("documents by mask", "", True, ("flex",)))
MODEL = "dense-210m --micro-batch 2 --seq-len {length}"
TINY = ("--n-layer 2 --n-embd 32 --n-head 2 --n-kv-head 1 --ffn-hidden 64 --vocab-size 256 --dtype fp32 "
        "--no-compile")


@dataclass(frozen=True)
class Flags:
    parts: Positional[tuple[Literal[PARTS], ...]] = PARTS  # which tables; default: both
    steps: int = 16  # of each row of the second table, of which the second half counts
    tiny: bool = False  # a rehearsal, also on a CPU: short sequences and a tiny model
    json: str = ""  # file to which each row is appended, one line each

    RANGES = {"steps": (4, 10**6)}


def unfused(*args, **options):
    """Compute torch's flex_attention with gradients on a CPU, which torch refuses if it is not asked so."""
    from torch.nn.attention import flex_attention as module
    with mock.patch.object(module, "_validate_device"):
        return module.flex_attention(*args, **options)


def milliseconds(f, device, n):
    """Return the milliseconds of one call of f(): the median of n calls after three."""
    watch = Stopwatch(device)
    marks = []
    for _ in range(n + 3):
        begin = watch.mark()
        f()
        marks.append((begin, watch.mark()))
    return statistics.median([watch.ms(*pair) for pair in marks[3:]])


# -----------------------------------------------------------------------------
# Attention alone

def random_places(n, length, mean, device):
    """Return each token's place in its document, (n, length); documents have `mean` tokens in the mean."""
    draw = torch.Generator().manual_seed(1)
    is_first = torch.rand(n, length, generator=draw) < 1 / mean
    return document_places(is_first.long(), 1).to(device)


class Alone:
    """Attention of random queries to random keys. run(): forward and backward once."""

    def __init__(self, shape, length, device):
        n, heads, width = shape
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        draw = torch.Generator(device).manual_seed(2)
        sizes = (n, heads, length, width)
        *self.qkv, self.grad = (torch.randn(sizes, generator=draw, device=device, dtype=dtype)
                                for _ in range(4))
        for x in self.qkv:
            x.requires_grad_()
        self.cfg = Config()

    def run(self, window, places, flex):
        """Return output and gradients of queries, keys and values."""
        y = attend(*self.qkv, self.cfg, window, places, flex=flex, enable_gqa=False, dropout_p=0.0)
        return y.detach(), *torch.autograd.grad(y, self.qkv, self.grad)


def difference(found, expected):
    """Return the worst difference of tensors, relative to the largest number of each."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def attention_row(shape, length, window, mean, device, n):
    """Return {column: milliseconds, or the worst difference} of one shape."""
    alone = Alone(shape, length, device)
    flex = FlexAttention()
    if device.type == "cpu":
        flex.kernel = unfused
    row = {"full": milliseconds(lambda: alone.run(0, None, flex), device, n)}
    places = random_places(shape[0], length, mean, device)
    for name, args in (("window", (window, None)), ("documents", (0, places))):
        found = alone.run(*args, flex)
        row[name] = milliseconds(lambda args=args: alone.run(*args, flex), device, n)
        expected = alone.run(*args, None)
        row[f"{name} by mask"] = milliseconds(lambda args=args: alone.run(*args, None), device, n)
        row[f"{name} difference"] = difference(found, expected)
        lists = [*alone.qkv[:2], *args]
        row[f"{name} lists"] = milliseconds(lambda lists=lists: block_mask(*lists), device, n)
    return row


def attention(world, flags):
    """Yield the rows of the first table."""
    length, window, mean = sizes(flags)
    shapes = ((2, 2, 16),) if flags.tiny else SHAPES
    for shape in shapes:
        row = attention_row(shape, length, window, mean, world.device, 3 if flags.tiny else 20)
        n, heads, width = shape
        yield {"sequences": n, "heads": heads, "width": width, "tokens": length, **row}


# -----------------------------------------------------------------------------
# Whole steps

def step_row(world, train_flags, mean, without, steps):
    """Return what a row of the second table shows. mean: tokens of a document, 0 without documents."""
    cfg = parse(train_flags.split(), data="synthetic")
    torch._dynamo.reset()  # else what differs between two rows would be compiled for all values
    training = Training(cfg, world, without)
    if mean:
        training.source = Documents(training.vocab, cfg.seq_len, cfg.seed, mean)
    times, losses, first_step, _ = training.run(steps)
    memory = gpu_memory(world.device) or (0, 0, 0)
    row = {"ms": statistics.median(times[steps // 2:]), "loss": losses, "first_step_s": first_step,
           "reserved_gib": memory[1], "graph": training.graph,
           "flex": training.model.blocks["0"].attn.flex is not None}
    del training
    gc.collect()
    if world.device.type != "cpu":
        torch.get_device_module(world.device).empty_cache()
        torch.get_device_module(world.device).reset_peak_memory_stats()
    return row


def steps(world, flags):
    """Yield the rows of the second table."""
    length, window, mean = sizes(flags)
    full = None
    for title, layer_flags, has_documents, without in STEPS:
        words = [MODEL.format(length=length), layer_flags.format(window=window), TINY if flags.tiny else ""]
        row = step_row(world, " ".join(words), mean if has_documents else 0, without, flags.steps)
        full = full or row["ms"]
        yield {"step": title, "flags": " ".join(words).strip(), **row, "of full": row["ms"] / full}


# -----------------------------------------------------------------------------

def sizes(flags):
    """Return the tokens of a sequence, of a window, and of a document in the mean."""
    return (300, 40, 50) if flags.tiny else (LENGTH, WINDOW, MEAN)


def shown(row):
    """Return a row in one line: milliseconds with two places, differences and losses with more."""
    words = []
    for name, value in row.items():
        if name == "flags":
            continue
        if isinstance(value, list):
            words.append(f"{name} {' -> '.join(f'{x:.4f}' for x in value)}")
        elif isinstance(value, float):
            words.append(f"{name} {value:.1e}" if "difference" in name else f"{name} {value:.2f}")
        else:
            words.append(f"{name} {value}")
    return ", ".join(words)


def main(argv=None):
    flags = read_flags(Flags, argv, "windows.py [attention] [steps]", __doc__)
    world = launch(timeout=300)
    with exit_together(world):
        if world.size > 1:
            raise ValueError("bench/windows.py is for one process; start it without a launcher")
        if world.device.type == "cpu" and not flags.tiny:
            raise ValueError("bench/windows.py needs a GPU; --tiny rehearses it on a CPU")
    for part in flags.parts:
        for row in (attention if part == "attention" else steps)(world, flags):
            print(shown(row), flush=True)
            if flags.json:
                with open(flags.json, "a") as f:
                    f.write(json.dumps({"part": part, **row, "torch": torch.__version__}) + "\n")
    shutdown(world)
    return 0


if __name__ == "__main__":
    start(main)

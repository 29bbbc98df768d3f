"""Plots of runs as text:   python plot.py RUN [RUN ...] [--metric loss,val_loss] [--log] [--steps A B]

RUN is the --out directory of a run of train.py, or its metrics.jsonl. All runs share one plot per metric,
with the legend below it. --follow draws again while the runs train; --png FILE also writes a picture. A point
is a logged row: train with --log-every 1 to see every step.

train.py calls at_end() for the plots that a run leaves, parse_or_list() for --list, the table of runs.
"""
import contextlib
import itertools
import json
import math
import os
import socket
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import checkpoint
import config
from interface.command_line import command_line, parse, print_quietly, printable, wrong_input
from interface.files import folded, read_holder, sound_rows
from interface.schema import load_json
from runtime.log import best_effort

AT_END = ("loss", "val_loss", "grad_norm", "lr", "tok_s", "ms", "mem_gb")  # a text file of each, in OUT
NO_PLOTEXT = "plotext is not installed: no plots (pip install 'plotext<6')"
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # marks of several runs, without colours
Runs = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN...")]]


@dataclass(frozen=True)
class Flags:
    """The command line of plot.py."""
    runs: Runs = ()  # directories of runs of train.py
    metric: str = "loss,val_loss"  # keys of metrics.jsonl; val_loss is drawn into the plot of loss
    log: bool = False  # logarithmic vertical axis
    steps: tuple[int, ...] = ()  # FIRST LAST step to draw; default all
    follow: bool = False  # draw again every few seconds, until Ctrl-C
    every: float = 5.0  # seconds between two drawings of --follow
    png: str = ""  # FILE: also write the plots as a picture (needs matplotlib)
    width: int = 90  # columns
    height: int = 24  # lines of each plot
    RANGES = {"steps": (0, 10**15), "every": (0.1, 3600), "width": (20, 1000), "height": (8, 500)}


# -----------------------------------------------------------------------------
# drawing

def points(rows, metric, steps=()):
    """-> [(step, value)] of the rows that have a finite value of the metric. rows may be foreign."""
    first, last = steps or (0, 10**15)
    return [(r["step"], r[metric]) for r in rows if first <= r["step"] <= last
            and type(r.get(metric)) in (int, float) and abs(r[metric]) < 1e300]


def draw(title, series, size=(90, 24), log=False):
    """series: [(label, mark, [(step, value)])] -> a plot as text, its legend below; "" without a value. mark:
    a character, in capitals or x as dots, else as a line; "" is a thin line."""
    import plotext as plt
    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(*size)
    legend = []
    for label, mark, values in series:
        if values := [(x, y) for x, y in values if y > 0 or not log]:
            plot = plt.scatter if mark == "x" or mark.isupper() else plt.plot
            plot(*zip(*values, strict=True), marker=mark or "braille")
            legend.append(f"{mark or chr(0x28c0)} {label}")
    if not legend:
        return ""
    if log:
        plt.yscale("log")
    plt.title(title)
    plt.xlabel("step")
    return f"{plt.uncolorize(plt.build())}\n{folded('  ' + '   '.join(legend))}\n"


def load_bars(layers, width=40):
    """-> one bar per expert: its rows over the balanced number, the mean over layers and the largest."""
    loads = [layer["load"] for layer in layers.values()]  # L x E
    E = len(loads[0])
    mean = [sum(load[e] for load in loads) / len(loads) * E for e in range(E)]
    worst = [max(load[e] for load in loads) * E for e in range(E)]
    top = max(*mean, 1.0)
    bars = [f"expert {e:3d} {'#' * round(width * m / top):{width}s} {m:.2f}  (heaviest layer {w:.2f})"
            for e, (m, w) in enumerate(zip(mean, worst, strict=True))]
    return "\n".join(["expert load, 1.00 is balanced", *bars])


def at_end(out, experts, show):
    """Write the plots that a run leaves in its directory, a Path: a file of each metric of AT_END, and the
    experts' loads, {layer: {"load": [a share per expert]}} or None. show (--plot): print loss and loads."""
    if experts is not None:
        text = load_bars(experts)
        if show:
            print(text, flush=True)
        with best_effort(out / "expert_load.txt"):
            (out / "expert_load.txt").write_text(text + "\n", encoding="utf-8")
    rows, _ = sound_rows(out / "metrics.jsonl")
    try:
        with best_effort(f"plots in {out}"):
            for name in AT_END:
                series = [(name, "", points(rows, name))]
                if name == "loss":
                    series.append(("val_loss", "x", points(rows, "val_loss")))
                if text := draw(name, series):
                    (out / f"{name}.txt").write_text(text, encoding="utf-8")
                if name == "loss" and show:
                    print(text, end="", flush=True)
    except ImportError:
        print(NO_PLOTEXT, flush=True)


# -----------------------------------------------------------------------------
# train.py --list: nothing is written, and what is no run, or foreign, is left out or shown as far as it goes

ROW = "{:41s} {:>16s} {:>13s} {:>8s} {:>8s} {:>8s}"  # with the flags below it, because both are long


def parse_or_list(argv):
    """train.py's argv -> Config. --list [DIR]: print the table of the runs in DIR and end with 0."""
    if "--list" not in argv:
        return parse(argv)
    folder = Path(*argv[1:2] or ["out"])
    if argv[0] != "--list" or len(argv) > 2 or not folder.is_dir():
        raise ValueError(f"{' '.join(argv)}: beside --list give one folder of runs, such as out, only")
    found = sorted(p for p in [folder, *folder.iterdir()] if p.is_dir() and is_run(p))
    table = [ROW.format("run", "state", "steps", "loss", "val_loss", "size"), *map(describe, found)]
    print_quietly("\n".join(table if found else [f"no runs in {folder}"]) + "\n")
    raise SystemExit(config.Outcome.DONE)


def is_run(path):
    return (path / "metrics.jsonl").is_file() or bool(checkpoint.steps(path))


def describe(run):
    """-> the lines of one run: state, last step and losses, size; then preset, ranks, flags unlike it has."""
    rows, saved, config_json, size = [], checkpoint.steps(run), None, 0
    with contextlib.suppress(ValueError, OSError):
        rows = sound_rows(run / "metrics.jsonl")[0]
        config_json = load_json(run / "config.json")
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(Path(folder, name)).st_size
    flags = config_json if isinstance(config_json, dict) else {}
    asked, preset, world = (flags.get(key, "?") for key in ("steps", "preset", "world"))
    last, name = max((r["step"] for r in rows), default=0), printable(run.name)
    state = in_use(run) or ("done" if last == asked else f"stopped at {int(saved[0].name[5:])}" if saved else
                            "no checkpoint")
    losses = [f"{([(0, math.nan)] + points(rows, key))[-1][1]:.5g}" for key in ("loss", "val_loss")]
    line = ROW.format(name if len(name) <= 41 else f"{name}\n{'':41s}", state, f"{last}/{asked}"[:13],
                      *losses, f"{size / 1e6:.1f} MB").replace(" nan", "   -")
    default = vars(config.Config(**config.PRESETS.get(str(preset), {})))
    other = [f"--{k.replace('_', '-')}={flags[k]}" for k, v in json.loads(json.dumps(default)).items()
             if k not in ("out", "resume", "preset") and flags.get(k, v) != v]
    text = printable(" ".join([f"{preset} on {world} rank(s)", *other]))
    return "\n".join([line, textwrap.indent(textwrap.fill(text, 96, break_on_hyphens=False), "    ")])


def in_use(run):
    """-> "running", with a question mark where another machine has to know; "" if no process holds it."""
    path = run.resolve().with_name(f".{run.resolve().name}.lock")
    with contextlib.suppress(OSError), open(path, "rb") as f:
        holder, is_gone = read_holder(f.fileno())
        return "" if is_gone else "running" if f" on {socket.gethostname()} " in holder else "running?"
    return ""


# -----------------------------------------------------------------------------
# the command

def read(flags):
    """-> {metric: [(label, mark, [(step, value)])]} of all runs. ValueError: there is nothing to draw."""
    found, metrics, several = {}, flags.metric.split(","), len(flags.runs) > 1
    for run, letter in zip(flags.runs, itertools.cycle(LETTERS), strict=False):
        path = Path(run) if Path(run).is_file() else Path(run) / "metrics.jsonl"
        if not path.exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the --out directory of a run of train.py")
        rows = sound_rows(path)[0]
        for metric in metrics:
            if not flags.follow and metric != "val_loss" and not any(metric in r for r in rows):
                keys = sorted({k for r in rows for k, v in r.items() if type(v) in (int, float)} - {"step"})
                raise ValueError(f"{path} has no {metric}; it has {', '.join(keys) or 'no rows'}")
            is_val = metric == "val_loss" and "loss" in metrics  # it shares the plot of the loss
            mark = (letter.upper() if is_val else letter) if several else "x" if is_val else ""
            label = f"{run} {metric}" if several else metric
            found.setdefault("loss" if is_val else metric, []).append(
                (label, mark, points(rows, metric, flags.steps)))
    return found


def picture(found, path, log):
    """Write the plots to a file of matplotlib's kinds (png, svg, pdf). ValueError: it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--png needs matplotlib (pip install matplotlib)") from None
    figure = Figure(figsize=(9, 4 * len(found)), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(len(found), squeeze=False)[:, 0], found.items(),
                                     strict=True):
        for label, mark, values in series:
            line = "x" if mark == "x" or mark.isupper() else "-"
            axes.plot([x for x, _ in values], [y for _, y in values], line, label=label)
        axes.set(title=title, xlabel="step", yscale="log" if log else "linear")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


def read_flags(argv):
    """argv (list of str) -> Flags. ValueError: one line that says what is wrong."""
    flags = command_line(Flags, argv, "plot.py", __doc__)
    if not flags.runs:
        raise ValueError("no RUN is given: --out directories of runs, for example python plot.py out/tiny")
    if len(flags.steps) not in (0, 2):
        raise ValueError("--steps takes FIRST LAST, for example --steps 100 200")
    return flags


def main(argv=None):
    """-> 0. SystemExit(2) after one line on stderr: wrong input."""
    with wrong_input():
        flags = read_flags(sys.argv[1:] if argv is None else argv)
        try:
            while True:
                found = read(flags)
                size = flags.width, flags.height
                text = "".join(draw(title, series, size, flags.log) for title, series in found.items())
                clear = "\x1b[H\x1b[J" * (flags.follow and sys.stdout.isatty())
                print(clear, text or "no rows yet\n", sep="", end="", flush=True)
                if flags.png:
                    picture(found, flags.png, flags.log)
                if not flags.follow:
                    return 0
                time.sleep(flags.every)
        except ImportError:
            raise ValueError(NO_PLOTEXT) from None
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plots of runs as text:   python plot.py RUN [RUN ...] [--metric loss,val_loss] [--log] [--steps A B]

RUN is the --out directory of a run of train.py. All runs share one plot per metric, with the legend below
it. A point is a logged row: train with --log-every 1 to see every step.
"""
import contextlib
import itertools
import string
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import interface.packages  # noqa: F401  isort: skip (it says in one line which package is missing)
import tyro

from config import ceil_div
from interface import paths, report
from interface.command_line import command_line, wrong_input
from interface.files import best_effort, in_use, load_json, sound_rows, write_whole
from interface.report import points
from interface.terminal import printable

AT_END = ("loss", "val_loss", "grad_norm", "lr", "tok_s", "ms", "mem_gb")  # a text file for each, in OUT


@dataclass(frozen=True)
class Flags:
    """The command line of plot.py."""
    runs: tyro.conf.Positional[tuple[str, ...]]  # --out directories of runs of train.py
    metric: str = "loss,val_loss"  # keys of metrics.jsonl; val_loss is drawn into the plot of loss
    log: bool = False  # logarithmic vertical axis
    steps: tuple[int, float] = (0, float("inf"))  # first and last step to draw
    follow: bool = False  # draw again every few seconds, until Ctrl-C
    every: float = 5.0  # seconds between two drawings of --follow
    html: str = ""  # FILE: also write a page of all runs: curves, samples, flags
    width: int = 90  # columns
    height: int = 24  # lines of each plot
    RANGES = {"steps": (0, float("inf")), "every": (0.1, 3600), "width": (20, 1000), "height": (8, 500)}


# Drawing

def round_ticks(first, last):
    """Return at most six round steps from `first` to `last`."""
    widths = (digit * 10**power for power in range(16) for digit in (1, 2, 5))
    width = next(width for width in widths if last - first <= 5 * width)
    return list(range(ceil_div(first, width) * width, last + 1, width))


def draw(title, series, size=(90, 24), log=False):
    """Return a plot as text, with its legend below; "" if there is no value.

    series: [(label, mark, [(step, value)])]. mark: a character; x and capitals are dots, "" is a thin line.
    log: the vertical axis is logarithmic, and values that are not positive are left out.
    """
    import plotext as plt
    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(*size)
    legend = []
    steps = []
    for label, mark, values in series:
        values = [(step, value) for step, value in values if value > 0 or not log]
        if not values:
            continue
        plot = plt.scatter if mark == "x" or mark.isupper() else plt.plot
        plot(*zip(*values, strict=True), marker=mark or "braille")
        legend.append(f"{mark or '⣀'} {label}")  # a piece of plotext's finest line
        steps += [step for step, _ in values]
    if not legend:
        return ""
    if log:
        plt.yscale("log")
    plt.xticks(round_ticks(min(steps), max(steps)))
    plt.title(title)
    plt.xlabel("step")
    return f"{plt.uncolorize(plt.build())}\n  {'   '.join(legend)}\n"


def load_bars(layers, width=40):
    """Return a line per expert with a bar: its rows over the balanced number, the mean over layers."""
    by_expert = list(zip(*(layer["load"] for layer in layers.values()), strict=True))  # E x L
    means = [sum(load) / len(load) * len(by_expert) for load in by_expert]
    lines = ["expert load, 1.00 is balanced"]
    for expert, (mean, load) in enumerate(zip(means, by_expert, strict=True)):
        bar = "#" * round(width * mean / max(*means, 1.0))
        lines.append(f"expert {expert:3d} {bar:{width}s} {mean:.2f}  "
                     f"(heaviest layer {max(load) * len(by_expert):.2f})")
    return "\n".join(lines)


def at_end(out, show):
    """Write the plots that a run leaves in OUT, a Path. show (--plot): print those of loss and loads, too."""
    drawn = {}
    loads = sound_rows(out / "experts.jsonl")
    if loads:
        drawn["expert_load"] = load_bars(loads[-1]["layers"]) + "\n"
    rows = sound_rows(out / "metrics.jsonl")
    with best_effort(f"plots in {out}", (ImportError, OSError)):
        for name in AT_END:
            curves = [(name, "", points(rows, name))]
            if name == "loss":
                curves.append(("val_loss", "x", points(rows, "val_loss")))
                curves.append(("refused", "S", points(rows, "spike_loss")))
            drawn[name] = draw(name, curves)
        for name, text in drawn.items():
            if text:
                write_whole(out / f"{name}.txt", text)
    if show:
        print(drawn.get("expert_load", "") + drawn.get("loss", ""), end="", flush=True)


# train.py --list writes nothing. A folder that is not a run is left out.

ROW = "{:>16s} {:>13s} {:>8s} {:>8s}  {}"


def print_runs(folder):
    """Print the table of the runs in a folder, a Path."""
    folders = [folder, *sorted(folder.iterdir())]
    print(ROW.format("state", "steps", "loss", "val_loss", "run"))
    for path in folders:
        with contextlib.suppress(OSError):
            if path.is_dir() and paths.is_run(path):
                print(describe(path))


def describe(run):
    """Return the line of one run: whether it runs, else its newest checkpoint; last step and losses."""
    rows = sound_rows(run / "metrics.jsonl")
    asked = "?"
    with contextlib.suppress(Exception):  # some other program's file
        asked = load_json(run / "config.json")["steps"]
    last = max((row["step"] for row in rows), default=0)
    saved = paths.steps(run)
    state = saved[0].name if saved else "no checkpoint"
    if in_use(run):
        state = "running"
    losses = [f"{values[-1][1]:.5g}" if values else "-"
              for values in (points(rows, "loss"), points(rows, "val_loss"))]
    return printable(ROW.format(state, f"{last}/{asked}", *losses, run.name))


# The command

def read(flags):
    """Return {metric: [(label, mark, [(step, value)])]} of all runs. ValueError: a run has no such metric."""
    metrics = flags.metric.split(",")
    found = {}
    for run, letter in zip(flags.runs, itertools.cycle(string.ascii_lowercase), strict=False):
        path = Path(run) / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{run} holds no metrics.jsonl; {paths.meant_run(run, paths.GIVE_RUN)}")
        rows = sound_rows(path)
        for metric in metrics:
            if not flags.follow and metric != "val_loss" and not any(metric in row for row in rows):
                known = sorted({key for row in rows for key in row})
                raise ValueError(f"{path} has no {metric}; it has {', '.join(known) or 'no rows'}")
            title = label = metric
            mark = ""
            if len(flags.runs) > 1:
                mark, label = letter, f"{run} {metric}"
            if metric == "val_loss" and "loss" in metrics:  # it shares the plot of the loss
                title, mark = "loss", mark.upper() or "x"
            found.setdefault(title, []).append((label, mark, points(rows, metric, flags.steps)))
    return found


def show_once(flags):
    """Print the plots of all runs as they are now, and write the page of --html."""
    found = read(flags)
    if flags.follow and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[J")  # clears the screen
    for title, series in found.items():
        text = draw(title, series, (flags.width, flags.height), flags.log)
        print(text or f"no {title} to draw\n", end="", flush=True)
    if flags.html:
        page = Path(flags.html)
        if page.exists() and report.GENERATOR.encode() not in page.read_bytes():
            raise ValueError(f"--html {page} is there already and is no page of ours; give a new file")
        report.write_report(flags.html, [report.Run(run) for run in flags.runs])


def main(argv=None):
    """Return 0. SystemExit(2) after one line on stderr: wrong input."""
    with wrong_input():
        flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "plot.py", __doc__)
        if not flags.runs:
            raise ValueError("no RUN is given: --out directories of runs, such as python plot.py out/tiny")
        show_once(flags)
        with contextlib.suppress(KeyboardInterrupt):
            while flags.follow:
                time.sleep(flags.every)
                show_once(flags)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

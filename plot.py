"""Plots of runs as text:   python plot.py RUN [RUN ...] [--metric loss,val_loss] [--log] [--steps A B]

RUN is the --out directory of a run of train.py, or its metrics.jsonl. All runs share one plot per metric,
with the legend below it. --follow draws again while the runs train; --png FILE also writes a picture, and
--html FILE a page with the runs side by side. A point is a logged row: train with --log-every 1 to see every
step.
"""
# runtime/ calls at_end() for the plots that a run leaves, and print_runs() for train.py --list.
import contextlib
import itertools
import json
import os
import shlex
import string
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if sys.flags.safe_path:  # python -I leaves out the program's own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))
if __name__ == "__main__":  # It says what to type where they are not installed.
    from interface.packages import check_packages
    check_packages()

import tyro

import checkpoint
import config
from interface import paths, report
from interface.command_line import command_line, wrong_input
from interface.files import best_effort, in_use, load_json, must_write, new_part, sound_rows, write_whole
from interface.presets import PRESETS
from interface.terminal import columns, printable

AT_END = ("loss", "val_loss", "grad_norm", "lr", "tok_s", "ms", "mem_gb")  # a text file for each, in OUT
NO_PLOTEXT = "plotext is not installed: no plots (pip install 'plotext<6')"
THIN_LINE = "\u28c0"  # in the legend: a piece of plotext's finest line
CLEAR_SCREEN = "\x1b[H\x1b[J"
Runs = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN...")]]


@dataclass(frozen=True)
class Flags:
    """The command line of plot.py."""
    runs: Runs = ()  # --out directories of runs of train.py, or their metrics.jsonl
    metric: str = "loss,val_loss"  # keys of metrics.jsonl; val_loss is drawn into the plot of loss
    log: bool = False  # logarithmic vertical axis
    steps: tuple[int, ...] = ()  # FIRST LAST step to draw; default all
    follow: bool = False  # draw again every few seconds, until Ctrl-C
    every: float = 5.0  # seconds between two drawings of --follow
    png: str = ""  # FILE: also write the plots as a picture (needs matplotlib)
    html: str = ""  # FILE: also write a page of all runs: curves, samples, flags
    width: int = 90  # columns
    height: int = 24  # lines of each plot
    RANGES = {"steps": (0, 10**15), "every": (0.1, 3600), "width": (20, 1000), "height": (8, 500)}


# -----------------------------------------------------------------------------
# Drawing

def points(rows, metric, steps=()):
    """Return [(step, value)] of the rows that have a finite value of the metric.

    rows may come from another program. steps: the first and the last step to take; by default all.
    """
    first, last = steps or (0, 10**15)
    found = []
    for row in rows:
        value = row.get(metric)
        is_finite = type(value) in (int, float) and abs(value) < 1e290
        if is_finite and first <= row["step"] <= last:
            found.append((row["step"], value))
    return found


def is_dots(mark):
    """Whether a mark is drawn as dots and not as a line, as x and capitals are."""
    return mark == "x" or mark.isupper()


def draw(title, series, size=(90, 24), log=False):
    """Return a plot as text, with its legend below; "" if there is no value.

    series: [(label, mark, [(step, value)])]. mark: a character, or "" for a thin line. log: the
    vertical axis is logarithmic, and values that are not positive are left out.
    """
    import plotext as plt
    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(*size)
    legend = []
    for label, mark, values in series:
        if log:
            values = [(step, value) for step, value in values if value > 0]
        if not values:
            continue
        plot = plt.scatter if is_dots(mark) else plt.plot
        plot(*zip(*values, strict=True), marker=mark or "braille")
        legend.append(f"{mark or THIN_LINE} {label}")
    if not legend:
        return ""
    if log:
        plt.yscale("log")
    plt.title(title)
    plt.xlabel("step")
    return f"{plt.uncolorize(plt.build())}\n  {'   '.join(legend)}\n"


def load_bars(layers, width=40):
    """Return one bar per expert, a line each: the expert's rows over the balanced number.

    A bar and the number beside it are the mean over layers. The layer with the most load follows them.
    layers: {layer: {"load": [a share per expert]}}.
    """
    loads = [layer["load"] for layer in layers.values()]  # L x E
    n_experts = len(loads[0])
    by_expert = list(zip(*loads, strict=True))  # E x L
    means = [sum(load) / len(load) * n_experts for load in by_expert]
    longest = max(*means, 1.0)
    lines = ["expert load, 1.00 is balanced"]
    for expert, (mean, load) in enumerate(zip(means, by_expert, strict=True)):
        bar = "#" * round(width * mean / longest)
        lines.append(f"expert {expert:3d} {bar:{width}s} {mean:.2f}  "
                     f"(heaviest layer {max(load) * n_experts:.2f})")
    return "\n".join(lines)


def at_end(out, experts, show):
    """Write the plots that a run leaves: a file for each metric of AT_END, and one for the experts' loads.

    out: the run's directory, a Path. experts: {layer: {"load": [a share per expert]}}, or None. show
    (--plot): print the plots of loss and loads, too.
    """
    if experts is not None:
        text = load_bars(experts)
        if show:
            print(text, flush=True)
        with best_effort(out / "expert_load.txt"):
            write_whole(out / "expert_load.txt", text + "\n")
    rows, _ = sound_rows(out / "metrics.jsonl")
    try:
        with best_effort(f"plots in {out}"):
            write_plots(out, rows, show)
    except ImportError:
        print(NO_PLOTEXT, flush=True)


def write_plots(out, rows, show):
    """Write a file for each metric of AT_END that the rows have. show: print the plot of the loss."""
    for name in AT_END:
        series = [(name, "", points(rows, name))]
        if name == "loss":
            series.append(("val_loss", "x", points(rows, "val_loss")))
        text = draw(name, series)
        if text:
            write_whole(out / f"{name}.txt", text)
        if show and name == "loss":
            print(text, end="", flush=True)


# -----------------------------------------------------------------------------
# train.py --list writes nothing. A folder that is not a run is left out.

ROW = "{:31s} {:>16s} {:>13s} {:>8s} {:>8s}"  # 80 columns, with the flags below it, because both are long


def print_runs(folder):
    """Print the table of the runs in a folder, a Path. ValueError: there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"--list {folder}: there is no such folder; give one folder of runs, such as out")
    table = []
    for path in [folder, *sorted(folder.iterdir())]:
        with contextlib.suppress(OSError):
            if path.is_dir() and paths.is_run(path):
                table.append(describe(path))
    if not table:
        print(f"no runs in {printable(str(folder))}")
    else:
        print("\n".join([ROW.format("run", "state", "steps", "loss", "val_loss"), *table]))


def describe(run):
    """Return the lines of one run: state, last step and losses; below them its flags."""
    rows = []
    flags = {}
    with contextlib.suppress(ValueError, OSError):
        rows, _ = sound_rows(run / "metrics.jsonl")
        flags = load_json(run / "config.json")
    if not isinstance(flags, dict):
        flags = {}
    asked = flags.get("steps", "?")
    last = max((row["step"] for row in rows), default=0)
    name = printable(run.name)
    if len(name) > 31:
        name += "\n" + 31 * " "
    line = ROW.format(name, state(run, last, asked), printable(f"{last}/{asked}")[:13],
                      last_value(rows, "loss"), last_value(rows, "val_loss"))
    text = textwrap.fill(describe_flags(flags), min(96, columns() - 4), break_on_hyphens=False)
    return line + "\n" + textwrap.indent(text, "    ")


def state(run, last, asked):
    """Return a run's state in words. last: the last step that it logged. asked: --steps."""
    if in_use(run):
        return "running"
    if last == asked:
        return "done"
    saved = checkpoint.steps(run)
    if not saved:
        return "no checkpoint"
    step = int(saved[0].name[5:])
    return f"stopped at {step}" if step else "imported"


def last_value(rows, metric):
    values = points(rows, metric)
    return f"{values[-1][1]:.5g}" if values else "-"


def words_of_flag(name, value):
    """Return a flag of config.json as it is typed into a shell."""
    if isinstance(value, bool):
        return config.typed(name if value else f"no_{name}")
    if isinstance(value, list):
        return " ".join([config.typed(name), *map(str, value)])
    return f"{config.typed(name)}={shlex.quote(str(value))}"


def describe_flags(flags):
    """Return a run's preset, its number of ranks, and the flags that differ from the preset's."""
    preset = flags.get("preset", "?")
    defaults = vars(config.Config(**PRESETS.get(str(preset), {})))
    world = flags.get("world", "?")
    words = [f"{preset} on {world} {'rank' if world == 1 else 'ranks'}"]
    for name, default in json.loads(json.dumps(defaults)).items():  # as config.json holds them
        if name not in ("out", "resume", "preset") and flags.get(name, default) != default:
            words.append(words_of_flag(name, flags[name]))
    return printable(" ".join(words))


# -----------------------------------------------------------------------------
# The command

def read(flags):
    """Return {metric: [(label, mark, [(step, value)])]} of all runs. ValueError: nothing to draw."""
    metrics = flags.metric.split(",")
    found = {}
    for run, letter in zip(flags.runs, itertools.cycle(string.ascii_lowercase), strict=False):
        path = metrics_file(run)
        rows, _ = sound_rows(path)
        for metric in metrics:
            if not flags.follow and metric != "val_loss" and not any(metric in row for row in rows):
                keys = {key for row in rows for key, value in row.items() if type(value) in (int, float)}
                raise ValueError(f"{path} has no {metric}; it has {', '.join(sorted(keys)) or 'no rows'}")
            shares_plot = metric == "val_loss" and "loss" in metrics  # with the loss
            mark, label = "x" if shares_plot else "", metric
            if len(flags.runs) > 1:
                mark, label = letter.upper() if shares_plot else letter, f"{run} {metric}"
            values = points(rows, metric, flags.steps)
            found.setdefault("loss" if shares_plot else metric, []).append((label, mark, values))
    return found


def metrics_file(run):
    """Return the path of a run's metrics. run: its directory, or the file. ValueError: there is none."""
    path = Path(run)
    if not path.is_file():
        path = path / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{run} holds no metrics.jsonl; {paths.meant_run(run)}")
    return path


def picture(found, path, log):
    """Write the plots to a file of matplotlib's kinds (png, svg, pdf). ValueError: no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--png needs matplotlib (pip install matplotlib)") from None
    figure = Figure(figsize=(9, 4 * len(found)), layout="constrained")
    column = figure.subplots(len(found), squeeze=False)[:, 0]
    for axes, (title, series) in zip(column, found.items(), strict=True):
        for label, mark, values in series:
            axes.plot([step for step, _ in values], [value for _, value in values],
                      "x" if is_dots(mark) else "-", label=label)
        axes.set(title=title, xlabel="step", yscale="log" if log else "linear")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    with must_write(path, "--png"), new_part(path) as part:
        figure.savefig(part, format=path.suffix[1:])


def check_file(flag, name, kinds, mark):
    """ValueError unless a flag names a new file of these kinds, or one of ours, which has the mark."""
    path = Path(name)
    if name and path.suffix not in kinds:
        raise ValueError(f"{flag} {name} is no {' or '.join(kinds)}; give such a name")
    if name and os.path.lexists(path) and (path.is_symlink() or mark not in path.read_bytes()):
        raise ValueError(f"{flag} {name} is there already and is none of ours; give a new file")


def read_flags(argv):
    """Return the Flags of argv, a list of str. ValueError: one line that says what is wrong."""
    flags = command_line(Flags, argv, "plot.py", __doc__)
    if not flags.runs:
        raise ValueError("no RUN is given: --out directories of runs, for example python plot.py out/tiny")
    if len(flags.steps) not in (0, 2):
        raise ValueError("--steps takes FIRST LAST, for example --steps 100 200")
    if flags.steps and flags.steps[0] > flags.steps[1]:
        first, last = flags.steps
        raise ValueError(f"--steps {first} {last} ends before it begins; try --steps {last} {first}")
    check_file("--png", flags.png, (".png", ".svg", ".pdf"), b"atplotlib")
    check_file("--html", flags.html, (".html",), report.GENERATOR.encode())
    return flags


def show_once(flags):
    """Print the plots of all runs as they are now, and write those of --png and --html."""
    found = read(flags)
    text = "".join(draw(title, series, (flags.width, flags.height), flags.log)
                   for title, series in found.items())
    if flags.follow and sys.stdout.isatty():
        sys.stdout.write(CLEAR_SCREEN)
    print(text or "nothing to draw yet: no row has a number of these metrics, of a step in --steps\n", end="",
          flush=True)
    if flags.png:
        picture(found, Path(flags.png), flags.log)
    if flags.html:
        with must_write(flags.html, "--html"):
            report.write_report(flags.html, [report.read_run(metrics_file(run).parent) for run in flags.runs])


def main(argv=None):
    """Return 0. SystemExit(2) after one line on stderr: wrong input."""
    with wrong_input():
        flags = read_flags(sys.argv[1:] if argv is None else argv)
        try:
            show_once(flags)
            while flags.follow:
                time.sleep(flags.every)
                show_once(flags)
        except ImportError:
            raise ValueError(NO_PLOTEXT) from None
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

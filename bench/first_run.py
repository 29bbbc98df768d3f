"""The README's pictures: the first run's curve and text, five layouts' losses, and the code of a step.

    make train && make picture          take them from out/tiny, and write them into the README
    python bench/first_run.py           write them again from results/first-run.json
    python bench/first_run.py RUN       take the first run from RUN, the --out of `make train`
    python bench/first_run.py --layouts run the five layouts, too (some minutes)

Each stands in the README below a line <!-- make picture: NAME -->. tests/test_plot.py compares.
"""
import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import pipeline
import plot
from interface.files import sound_rows

README, RESULTS = ROOT / "README.md", ROOT / "bench/results/first-run.json"
KEYS = ("step", "loss", "val_loss", "lr", "grad_norm")
RUN = "train.py tiny --global-batch 16 --steps 100"
LAYOUTS = ("python $RUN", "mpiexec -n 2 python $RUN", "mpiexec -n 2 python $RUN --tp 2",
           "mpiexec -n 2 python $RUN --pp 2", "mpiexec -n 2 python $RUN --zero 1")
STEPS = (1, 20, 100)  # of the table
TERMINAL = os.terminal_size((80, 11))


def take(run):
    """Return what the README shows of a run: the rows that it logged, and its texts by step."""
    rows = sound_rows(Path(run) / "metrics.jsonl")
    notes = sound_rows(Path(run) / "notes.jsonl")
    return {"rows": [{key: row[key] for key in KEYS if key in row} for row in rows],
            "texts": {str(note["step"]): note["sample"] for note in notes if "sample" in note}}


def run_layouts():
    """Return {command: its rows} of the five layouts, which run here one after the other."""
    found = {}
    for command in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            words = command.replace("$RUN", f"{RUN} --no-plot --no-report --out {folder}/run").split()
            subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            found[command] = take(f"{folder}/run")["rows"]
    return found


def printed(rows):
    """Return the end of what `make train` prints: the last step, and the curve."""
    row = rows[-1]
    lines = [f"step={row['step']}/{row['step']} loss={row['loss']:.4f} lr={row['lr']:.2e} "
             f"gnorm={row['grad_norm']:.3f} ... val_loss={row['val_loss']:.4f} "
             f"val_ppl={math.exp(row['val_loss']):.5g}"]
    series = [("loss", "", plot.points(rows, "loss")), ("val_loss", "x", plot.points(rows, "val_loss"))]
    with mock.patch("shutil.get_terminal_size", lambda *fallback: TERMINAL):
        lines += [line.rstrip() for line in plot.draw("loss", series).splitlines()]
    return lines


def text(found):
    """Return the beginning of the last text that a run wrote."""
    *_, last = found
    lines = [f"--- step {last}", *found[last].splitlines()[:4]]
    return [line.rstrip() for line in lines]


def step():
    """Return the loop over the micro-batches of a step, as pipeline.py has it."""
    code = inspect.getsource(pipeline.forward_backward)
    loop = code[code.index("    total = 0"):].rstrip()
    return fenced(textwrap.dedent(loop).splitlines(), "python")


def fenced(lines, language=""):
    return "\n".join([f"```{language}", *lines, "```"])


def table(layouts):
    """Return the table of the losses that the layouts print."""
    heads = ["command", *(f"loss at step {step}" for step in STEPS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for command, rows in layouts.items():
        by_step = {row["step"]: row["loss"] for row in rows}
        losses = " | ".join(f"{by_step[step]:.4f}" for step in STEPS)
        lines.append(f"|{f'`{command}`':35s}| {losses} |")  # 100 columns
    return "\n".join(lines)


def with_pictures(page, results):
    """Return a page (str) in which each picture is the one of the results."""
    first = results["first"]
    pictures = {"curve": fenced([*printed(first["rows"]), *text(first["texts"])]),
                "layouts": table(results["layouts"]), "step": step()}
    for name, picture in pictures.items():
        before, marker, after = page.partition(f"<!-- make picture: {name} -->\n")
        if not marker:
            raise ValueError(f"the README has no line <!-- make picture: {name} -->")
        end = "\n\n"  # of a table
        if after.startswith("```"):
            end = "\n```\n"
        _, _, rest = after.partition(end)
        page = before + marker + picture + end.removeprefix("\n```") + rest
    return page


def main():
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("run", nargs="?", help="the --out directory of `make train`")
    parser.add_argument("--layouts", action="store_true", help="run the five layouts of the table")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.run:
        results["first"] = take(args.run)
    if args.layouts:
        results["layouts"] = run_layouts()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    README.write_text(with_pictures(README.read_text(), results))


if __name__ == "__main__":
    main()

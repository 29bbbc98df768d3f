"""report.html: what a run was and how it went, as one file that needs no network; also several runs together.

    write_report  one page from the files of one or several runs
    page          its text; the pictures come from interface/svg.py

train.py writes OUT/report.html when a run ends, and plot.py --html the page of several runs. A large file of
rows is read in part, and long curves are thinned, so that a page takes at most 2 MB and 2 s.
"""
import contextlib
import math
import shlex
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from config import Config
from interface import paths
from interface.command_line import OF_THE_RUN
from interface.files import sound_rows, spaced_rows, write_whole
from interface.nearest import change_words, command
from interface.presets import PRESETS
from interface.schema import load_json
from interface.svg import NORMS, chart, escape, heat_map, number, spaced
from interface.terminal import clock

CURVES = (("loss", "Loss, nats per token"), ("lr", "Learning rate"), ("grad_norm", "Gradient norm"),
          ("ms", "Milliseconds per step"), ("tok_s", "Tokens per second"), ("mem_gb", "Memory, GB"))
MOST_SAMPLES = 12
MOST_LETTERS = 2000  # of a sample
STYLE = """
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#68707a;--line:#d5dae0;--paper:#fff;
  --c0:#1667c2;--c1:#c2410c;--c2:#15803d;--c3:#8b2fc9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#98a1ac;--line:#3a414a;--paper:#15181c;
  --c0:#6cb0ff;--c1:#ff9a62;--c2:#6bd08c;--c3:#d09bff}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1500px;
  margin:0 auto;padding:16px;overflow-wrap:anywhere}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:28px 0 8px}h3{font-size:15px;margin:12px 0 4px}
.grid{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr))}
.grid>*{min-width:0}.scroll{overflow-x:auto}.soft{color:var(--soft);margin:8px 0 0}
svg{width:100%;max-width:520px;height:auto;display:block}
text{font:14px system-ui,sans-serif;fill:var(--soft)}
@media(max-width:480px){text{font-size:16px}}.title{fill:var(--ink);font-weight:600}
.axis{stroke:var(--line)}.curve{fill:none;stroke-width:1.6}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--line);border-radius:6px;
  padding:8px;margin:4px 0;font-size:13px}
table{border-collapse:collapse}
td,th{padding:2px 14px 2px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}
"""
GENERATOR = '<meta name="generator" content="nanoshard"/>'
FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
{generator}<title>{title}</title><style>{style}</style></head>
<body>{body}</body></html>
"""


class Run(NamedTuple):
    """What the files of a run say."""
    path: str
    rows: list     # of metrics.jsonl
    is_whole: bool  # whether these are all its rows
    experts: list  # rows of experts.jsonl
    starts: list   # rows of history.jsonl, one for each start
    notes: list    # rows of notes.jsonl: samples of text, bytes sent
    config: dict
    ending: str    # how the run ended, in words; "" if that is not known


def read_run(path, ending=""):
    """Return the Run in a directory. Files that are not there count as empty."""
    path = Path(path)
    rows, is_whole = spaced_rows(path / "metrics.jsonl")
    experts, _ = spaced_rows(path / "experts.jsonl")
    starts, _ = sound_rows(path / "history.jsonl")
    notes, _ = sound_rows(path / "notes.jsonl")
    config = load_json(path / "config.json") if (path / "config.json").exists() else {}
    if not isinstance(config, dict):
        config = {}
    return Run(str(path), rows, is_whole, experts, starts, notes, config, ending)


def write_report(path, runs):
    """Write the page of Runs to a file."""
    write_whole(Path(path), page(runs))


def values_of(rows, key):
    """Return [(step, value)] of the rows that have a finite value."""
    found = [(row["step"], row.get(key)) for row in rows]
    return [(step, value) for step, value in found
            if type(value) in (int, float) and abs(value) < 1e290 and step < 10**15]


# -----------------------------------------------------------------------------
# The page

def page(runs):
    """Return the page of one or several Runs, a text of HTML that is XML, too."""
    names = [Path(run.path).name or run.path for run in runs]
    title = " and ".join(names)
    parts = [f"<h1>{escape(title)}</h1>"]
    if len(runs) > 1:
        legend = [f'<span style="color:var(--c{colour_of(i)})">&#9632;</span> {escape(run.path)}'
                  for i, run in enumerate(runs)]
        parts.append(f"<p>{' &#160; '.join(legend)}</p>")
    parts.append(columns(runs, summary, has_names=len(runs) > 1))
    parts.append(f'<h2>Curves</h2><div class="grid">{"".join(pictures(runs))}</div>')
    for heading, part in (("Bytes sent per step", traffic), ("Samples", samples),
                          ("How it was started, and how it goes on", commands)):
        if any(part(run) for run in runs):
            parts.append(f"<h2>{heading}</h2>{columns(runs, part, has_names=len(runs) > 1)}")
    parts.append(f"<h2>Configuration</h2>{configuration(runs)}")
    return FRAME.format(title=escape(title), generator=GENERATOR, style=STYLE, body="\n".join(parts))


def colour_of(i):
    return i % 4


def columns(runs, part, has_names):
    """Return part(run) of each Run, side by side where there is room."""
    found = []
    for run in runs:
        name = f"<h3>{escape(run.path)}</h3>" if has_names else ""
        found.append(f"<div>{name}{part(run) or 'none'}</div>")
    return f'<div class="grid">{"".join(found)}</div>'


def pictures(runs):
    """Return the SVGs of all curves that some run has, and heat maps of each run's layers."""
    found = []
    for key, title in CURVES:
        series = [(colour_of(i), False, values_of(run.rows, key)) for i, run in enumerate(runs)]
        if key == "loss":
            series += [(colour_of(i), True, values_of(run.rows, "val_loss")) for i, run in enumerate(runs)]
            title += "; dots: validation"
        found.append(chart(title, series))
    for i, run in enumerate(runs):
        of_run = f", {Path(run.path).name}" if len(runs) > 1 else ""
        found.append(heat_map(f"Load of the busiest expert{of_run}", run.experts, colour_of(i)))
        found.append(heat_map(f"Gradient norm of a layer{of_run}", layer_norms(run), colour_of(i), NORMS))
    return [f"<div>{picture}</div>" for picture in found if picture]


def layer_norms(run):
    """Return the rows of --log-layers for a heat map: each norm over the mean of its row."""
    found = []
    for row in run.rows:
        norms = {key.rpartition(".")[2].rpartition("/")[2]: value for key, value in row.items()
                 if key.startswith("grad_norm/") and type(value) in (int, float)}
        mean = sum(norms.values()) / max(len(norms), 1)
        if 0 < mean < 1e290 and row["step"] < 10**15:
            layers = {layer: norm / mean for layer, norm in norms.items()}
            found.append({"step": row["step"], "layers": layers})
    return found


def summary(run):
    """Return how far a run came, as a paragraph."""
    steps = max((row["step"] for row in run.rows), default=0)
    said = [run.ending or f"step {steps} of {run.config.get('steps', '?')}"]
    for key, word in (("loss", "loss"), ("tokens", "tokens"), ("tok_s", "tokens/s"), ("mfu", "MFU")):
        values = values_of(run.rows, key)
        if values:
            said.append(f"{word} {number(values[-1][1])}")
    validation = values_of(run.rows, "val_loss")
    if validation:
        step, lowest = min(validation, key=lambda point: point[1])
        said.append(f"lowest validation loss {lowest:.4f} at step {step}")
    for key, word in (("skipped", "skipped steps"), ("nan_steps", "steps that were not finite")):
        values = values_of(run.rows, key)
        if values and values[-1][1]:
            said.append(f"{values[-1][1]} {word}")
    said += when(run)
    if not run.is_whole:
        said.append(f"the curves show {len(run.rows)} rows of a longer file")
    return f"<p>{escape(' · '.join(said))}</p>"


def when(run):
    """Return, in words, when a run began and how long it ran. Without times the list is empty."""
    times = times_of(run.rows)
    starts = times_of(run.starts)
    if not times or not starts:
        return []
    seconds = 0.0
    for begun, next_begun in pairwise([*starts, math.inf]):
        seconds += max((t - begun for t in times if begun <= t < next_begun), default=0.0)
    often = f" in {len(starts)} starts" if len(starts) > 1 else ""
    return [time.strftime("begun %Y-%m-%d %H:%M", time.localtime(starts[0])), f"ran {clock(seconds)}{often}"]


def times_of(rows):
    """Return the seconds since 1970 of the rows that have them, in order."""
    times = [row.get("time") for row in rows]
    return sorted(seconds for seconds in times if type(seconds) in (int, float) and 0 < seconds < 1e11)


def traffic(run):
    """Return the table of the bytes that rank 0 sent in a step, or "" if it sent none."""
    known = [row for row in run.notes if isinstance(row.get("traffic"), dict)]
    if not known:
        return ""
    rows = [("over", "MB predicted", "MB measured")]
    for axis, pair in known[-1]["traffic"].items():
        if isinstance(pair, list) and all(type(nbytes) in (int, float) for nbytes in pair):
            rows.append((axis, *(f"{nbytes / 1e6:.4g}" for nbytes in pair)))
    return f'<p class="soft">by rank 0 in step {known[-1]["step"]}</p>{table(rows)}'


def samples(run):
    """Return the texts that a run wrote while it trained, or "" if it wrote none."""
    known = [row for row in run.notes if isinstance(row.get("sample"), str)]
    found = []
    for row in spaced(known, MOST_SAMPLES):
        found.append(f'<p class="soft">step {row["step"]}</p>'
                     f"<pre>{escape(row['sample'][:MOST_LETTERS].rstrip())}</pre>")
    return "".join(found)


def command_of(config, changes=None):
    """Return the command line that a config.json tells, with {flag: value} in the place of its own values."""
    program, *argv = map(str, config["argv"])
    changes = dict(changes or {})
    if "resume" in changes:
        changes["dump_grads"] = None  # the first step is behind a run that goes on
        changes["max_minutes"] = None  # a job script gave what was left of its own job
    argv = change_words(argv, changes)
    program = paths.program(Path(program).name)
    world = config.get("world")
    if not isinstance(world, int) or world == 1:
        return shlex.join(["python", program, *argv])
    nodes = config.get("nodes")
    nodes = nodes if type(nodes) is int and nodes > 0 else 1
    return command(world, argv, config.get("launcher"), program, nodes)


def sample_command(out, config):
    """Return the command that lets the model of a run write text, or talk; "" if its data is no text."""
    if config.get("data") == "synthetic":
        return ""
    words = ["python", paths.program("sample.py"), str(out)]
    if config.get("objective") == "mlm":
        words += ["--fill", "a [MASK] in a text"]
    elif is_of_conversations(out):
        words += ["--chat"]
    elif config.get("prompt"):
        words += ["--prompt", str(config["prompt"])]
    return shlex.join(words)


def curves_command(out):
    """Return the command that draws the curves of a run in the terminal."""
    return shlex.join(["python", paths.program("plot.py"), str(out)])


def is_of_conversations(out):
    """Whether a run was trained on conversations: its meta.json, which is the data's, names their masks."""
    with contextlib.suppress(OSError, ValueError):
        meta = load_json(Path(out) / "meta.json")
        return isinstance(meta, dict) and "masks" in meta
    return False


def commands(run):
    """Return the machine and what starts, resumes, repeats and uses a run; "" without config.json."""
    argv = run.config.get("argv")
    if not isinstance(argv, list) or not argv:
        return ""
    changes = {"resume": "auto"}
    steps = run.config.get("steps")
    is_done = bool(run.rows) and run.rows[-1]["step"] == steps
    if is_done:
        changes["steps"] = 2 * steps
    again = ["train.py", "--config", f"{run.path}/config.json", "--out", f"{run.path}-again"]
    said = {"The command:": command_of(run.config),
            f"To resume it{', for as many steps again' if is_done else ''}:": command_of(run.config, changes),
            "To repeat it:": command_of({**run.config, "argv": again})}
    if any(Path(run.path).glob("step_*")):
        does = "talk" if is_of_conversations(run.path) else "write text"
        said[f"To {does} with it:"] = sample_command(run.path, run.config)
    said["To draw its curves in the terminal:"] = curves_command(run.path)
    found = [f'<p class="soft">{name}</p><pre>{escape(text)}</pre>' for name, text in said.items() if text]
    machine = run.config.get("machine")
    if isinstance(machine, dict):
        text = ", ".join(f"{name} {value}" for name, value in machine.items())
        found.append(f"<p>{escape(text)}; torch {escape(run.config.get('torch'))}; "
                     f"{escape(run.config.get('world'))} rank(s) by {escape(run.config.get('launcher'))}; "
                     f"code {escape(run.config.get('git'))}</p>")
    return "".join(found)


def configuration(runs):
    """Return the flags of all runs: first those that differ from a preset or between runs, then all."""
    names = dict.fromkeys(name for run in runs for name in run.config
                          if name not in OF_THE_RUN and name != "preset")
    told = []
    every = []
    for name in names:
        values = [run.config.get(name) for run in runs]
        row = (name.replace("_", "-"), *map(shown, values))
        every.append(row)
        is_usual = all(value == usual(run, name) for run, value in zip(runs, values, strict=True))
        if not is_usual or any(value != values[0] for value in values):
            told.append(row)
    head = ("flag", *(run.path for run in runs))
    presets = " and ".join(dict.fromkeys(str(run.config.get("preset", "?")) for run in runs))
    return (f"<p>Flags that are not those of {escape(presets)}:</p>{table([head, *told])}"
            f"<details><summary>All flags</summary>{table([head, *every])}</details>")


def shown(value):
    """Return the value of a flag as a command line has it; a dash if it is empty or unknown."""
    if isinstance(value, str):
        return shlex.quote(value) if value else "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def usual(run, name):
    """Return the value of a flag in the preset of a run, as JSON has it."""
    values = {**vars(Config()), **PRESETS.get(str(run.config.get("preset")), {})}
    value = values.get(name)
    return list(value) if isinstance(value, tuple) else value


def table(rows):
    """Return a table; the first row is its head."""
    lines = []
    for i, row in enumerate(rows):
        kind = "td" if i else "th"
        cells = "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'

"""report.html: what a run was and how it went, in one file that needs no network; or several runs."""
import html
import itertools
import shlex
from pathlib import Path

from config import typed
from interface.command_line import OF_THE_RUN, given
from interface.files import load_json, sound_rows, write_whole
from interface.layout import command
from interface.terminal import printable

CURVES = (("loss", "Loss, nats per token; dots: validation, refused steps"), ("lr", "Learning rate"),
          ("grad_norm", "Gradient norm"), ("ms", "Milliseconds per step"), ("tok_s", "Tokens per second"),
          ("mem_gb", "Memory, GB"))
LEFT, RIGHT, TOP, BOTTOM = 60, 468, 30, 204  # of the curves in a picture of 480 x 230
MOST_POINTS = 1000  # of a curve
COLOURS = "#3f8ae0", "#e0662a", "#2fa05a", "#a05ad8"  # of the runs, on white and on black
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1500px;margin:0 auto;padding:16px;overflow-wrap:anywhere}
.grid{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr))}
.grid>*{min-width:0}.scroll{overflow-x:auto}.soft,text{color:#808890;fill:#808890}
svg{width:100%;max-width:520px;display:block}polyline{fill:none;stroke-width:1.6}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #8888;padding:8px;margin:4px 0}
td{padding:2px 14px 2px 0;text-align:left;white-space:nowrap}
"""
GENERATOR = '<meta name="generator" content="nanoshard"/>'
FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
{generator}<title>{title}</title><style>{style}</style></head>
<body>{body}</body></html>
"""


class Run:
    """What the files of a run say; those that are not there are empty. ending: how it ended, in words."""

    def __init__(self, path, ending=""):
        path = Path(path)
        self.path = str(path)
        self.ending = ending
        self.config = load_json(path / "config.json") if (path / "config.json").exists() else {}
        self.rows = sound_rows(path / "metrics.jsonl")
        self.notes = sound_rows(path / "notes.jsonl")


def write_report(path, runs):
    title = escape(" and ".join(run.path for run in runs))
    legend = [f'<b style="color:{colour_of(i)}">&#9632;</b> {escape(run.path)}' for i, run in enumerate(runs)]
    body = [f"<h1>{title}</h1><p>{' &#160; '.join(legend)}</p>", grid(map(summary, runs))]
    dots = [points(run.rows, "val_loss") + points(run.rows, "spike_loss") for run in runs]
    curves = [chart(heading, [points(run.rows, key) for run in runs], dots if key == "loss" else ())
              for key, heading in CURVES]
    body += [f"<h2>Curves</h2>{grid(curves)}", f"<h2>Samples</h2>{grid(map(samples, runs))}",
             f"<h2>Flags</h2>{flags(runs)}"]
    write_whole(Path(path), FRAME.format(title=title, generator=GENERATOR, style=STYLE, body="\n".join(body)))


def escape(text):
    return html.escape(printable(str(text)))


def colour_of(i):
    return COLOURS[i % len(COLOURS)]


def grid(parts):
    return f'<div class="grid">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


# Curves

def points(rows, key, steps=(0, 10**15)):
    """Return [(step, value)] of the rows, between two steps, that have a finite number under the key."""
    found = [(row["step"], row.get(key)) for row in rows if steps[0] <= row["step"] <= steps[1]]
    return [(step, value) for step, value in found if type(value) in (int, float) and abs(value) < 1e290]


def chart(title, lines, dots=()):
    """Return the SVG of values over steps, "" without a value. lines, dots: [[(step, value)] of each run]."""
    every = [point for values in (*lines, *dots) for point in values]
    if not every:
        return ""
    steps, heights = zip(*every, strict=True)
    first, last = min(steps), max(steps)
    low, high = min(heights), max(heights)

    def place(step, value):
        x = LEFT + (step - first) / max(last - first, 1) * (RIGHT - LEFT)
        return x, BOTTOM - (value - low) / ((high - low) or 1) * (BOTTOM - TOP)

    drawn = []
    for i, values in enumerate(lines):
        shown = values[::1 + len(values) // MOST_POINTS]
        text = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in shown)
        drawn.append(f'<polyline stroke="{colour_of(i)}" points="{text}"/>')
    for i, values in enumerate(dots):
        for x, y in itertools.starmap(place, values):
            drawn.append(f'<circle fill="{colour_of(i)}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
    for x, y, word in ((LEFT - 5, TOP + 4, f"{high:.4g}"), (LEFT - 5, BOTTOM + 4, f"{low:.4g}"),
                       (LEFT + 40, BOTTOM + 20, f"step {first}"), (RIGHT, BOTTOM + 20, last)):
        drawn.append(f'<text x="{x}" y="{y}" text-anchor="end">{word}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 230" role="img">'
            f'<text class="title" x="4" y="16">{escape(title)}</text>{"".join(drawn)}</svg>')


# Words

def summary(run):
    last = run.rows[-1] if run.rows else {"step": 0}
    said = [run.ending or f"step {last['step']} of {run.config.get('steps', '?')}"]
    if "loss" in last:
        said.append(f"loss {last['loss']:.4f}")
    if validation := points(run.rows, "val_loss"):
        step, lowest = min(validation, key=lambda point: point[1])
        said.append(f"lowest validation loss {lowest:.4f} at step {step}")
    said += [f"{name} {run.config.get(name)}" for name in ("world", "launcher", "machine", "torch", "git")]
    line = command_of(run.config) if "argv" in run.config else ""
    return f"<p>{escape(' · '.join(said))}</p><pre>{escape(line)}</pre>"


def samples(run):
    rows = [row for row in run.notes if "sample" in row]
    return "".join(f'<p class="soft">step {row["step"]}</p><pre>{escape(row["sample"].rstrip())}</pre>'
                   for row in rows[-12:])


def flags(runs):
    lines = [("", "flag", *(run.path for run in runs))]
    for name in dict.fromkeys(name for run in runs for name in run.config if name not in OF_THE_RUN):
        values = [run.config.get(name) for run in runs]
        star = "* " if any(value != values[0] for value in values) else ""  # they differ
        lines.append((star, typed(name), *values))
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    return f'<div class="scroll"><table><tr>{"</tr><tr>".join(rows)}</tr></table></div>'


# Commands

def command_of(config, goes_on=False):
    """Return the command line that a config.json tells, or the one that goes on."""
    program, *argv = map(str, config["argv"])
    if goes_on and given(argv, "resume") != "auto":
        argv += ["--resume", "auto"]
    if config.get("world", 1) == 1:
        return shlex.join(["python", program, *argv])
    return command(config["world"], argv, config.get("launcher"), program, config.get("nodes", 1))

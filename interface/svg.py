"""Pictures as SVG, without a library: curves over steps, and heat maps of layers.

    chart     curves and dots over steps, thinned
    heat_map  a number of each layer, over layers and steps: LOADS, NORMS

The page around them (interface/report.py) has the colours: classes s0 to s3 of lines, f0 to f3 of areas.
"""
import html
import math
from typing import Any, NamedTuple

from interface.command_line import printable

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT = 60, 468  # of the curves in a picture
TOP, BOTTOM = 30, 204
MOST_POINTS = 600  # of a curve
MOST_COLUMNS, MOST_LAYERS = 100, 64  # of a heat map
def escape(text):
    """Return text for HTML and XML: markup is escaped, and so is what no page may hold."""
    return "\n".join(html.escape(printable(line)) for line in str(text).split("\n"))


def number(value):
    """Return a number in few letters."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def thinned(points):
    """Return at most MOST_POINTS points: of each part of the curve its lowest and its highest."""
    if len(points) <= MOST_POINTS:
        return points
    kept = []
    parts = MOST_POINTS // 2
    for i in range(parts):
        part = points[len(points) * i // parts:len(points) * (i + 1) // parts]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def ticks(low, high, most=5):
    """Return round numbers from low to high, at most `most` and one."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step * (1 + 1e-9)) + 1)]


def top_of(values, title):
    """Return (the top of the vertical axis, a note). A few values that are far above the others stay out."""
    ordered = sorted(values)
    usual = ordered[9 * (len(ordered) - 1) // 10]
    if title.startswith("Loss") or usual <= 0 or ordered[-1] <= 4 * usual:
        return ordered[-1], ""
    top = 1.5 * usual
    above = sum(value > top for value in ordered)
    return top, f"{above} above, up to {number(ordered[-1])}"


def svg(title, note, parts):
    """Return a picture with its title."""
    head = f'<text class="title" x="4" y="16">{escape(title)}</text>'
    if note:
        head += f'<text x="{RIGHT}" y="16" text-anchor="end">{escape(note)}</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{head}{"".join(parts)}</svg>')


def chart(title, series):
    """Return the SVG of curves over steps, or "" without a value.

    series: [(number of its colour, whether it is dots, [(step, value)])].
    """
    points = [point for _, _, values in series for point in values]
    if not points:
        return ""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low = min(value for _, value in points)
    high, note = top_of([value for _, value in points], title)
    if high <= low:
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10

    def place(step, value):
        x = LEFT + (step - first) / max(last - first, 1) * (RIGHT - LEFT)
        return x, BOTTOM - (min(value, high) - low) / (high - low) * (BOTTOM - TOP)

    parts = []
    for value in ticks(low, high):
        _, y = place(first, value)
        parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
                     f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    parts.append(name_of_axis(BOTTOM + 18))
    for step in ticks(first, last):
        x, _ = place(step, low)
        if x > LEFT + 20:  # otherwise the number touches the name
            parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{number(step)}</text>')
    for colour, is_dots, values in series:
        if is_dots:
            for step, value in thinned(values):
                x, y = place(step, value)
                parts.append(f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2">'
                             f'<title>validation, step {step}: {value:.4f}</title></circle>')
        elif values:
            drawn = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in thinned(values))
            parts.append(f'<polyline class="curve s{colour}" points="{drawn}"/>')
    return svg(title, note, parts)


def name_of_axis(y):
    """Return the word in front of the numbers of steps."""
    return f'<text x="{LEFT - 5}" y="{y}" text-anchor="end">step</text>'


def busiest(layer):
    """Return the load of a layer's busiest expert over the balanced load; None if the row is none of ours."""
    load = layer.get("load") if isinstance(layer, dict) else None
    if not isinstance(load, list) or not load or not all(type(x) in (int, float) for x in load):
        return None
    return max(load) * len(load)


def plain_number(layer):
    """Return what a row holds of a layer; None if it is no number."""
    return layer if type(layer) in (int, float) else None


class Scale(NamedTuple):
    """What a heat map shows."""
    value: Any      # a function: what a row holds of a layer -> a number, or None
    levels: tuple   # numbers at which a cell takes the next darker shade
    lowest: float   # what the lightest shade stands for
    note: str


LOADS = Scale(busiest, (1.1, 1.25, 1.5, 1.75, 2, 2.5, 3), 1, "1 is balanced")
NORMS = Scale(plain_number, (.25, .5, .75, 1, 1.5, 2, 3), 0, "1 is the mean of a step")


def heat_map(title, rows, colour, scale=LOADS):
    """Return the SVG of a number over layers, from top to bottom, and steps; "" without rows.

    rows: [{"step", "layers": {layer: what scale.value reads}}].
    """
    rows = [row for row in rows if isinstance(row.get("layers"), dict) and row["layers"]]
    rows = spaced(rows, MOST_COLUMNS)
    if not rows:
        return ""
    layers = spaced(list(rows[0]["layers"]), MOST_LAYERS)
    cells = {}  # shade: the rectangles that have it
    highest = 0.0
    w, h = (RIGHT - LEFT) / len(rows), (BOTTOM - TOP - 18) / len(layers)
    for i, row in enumerate(rows):
        for j, layer in enumerate(layers):
            value = scale.value(row["layers"].get(layer))
            if value is None:
                continue
            highest = max(highest, value)
            cell = f"M{LEFT + i * w:.1f} {TOP + j * h:.1f}h{w + .1:.2f}v{h + .1:.2f}h-{w + .1:.2f}z"
            cells.setdefault(sum(value >= level for level in scale.levels), []).append(cell)
    parts = []
    for shade, drawn in sorted(cells.items()):
        parts.append(f'<path class="f{colour}" fill-opacity="{opacity(shade)}" d="{"".join(drawn)}"/>')
    for j in {0, len(layers) - 1}:
        y = TOP + (j + .5) * h + 4
        name = f"layer {layers[j]}" if layers[j].isdigit() else layers[j]
        parts.append(f'<text x="{LEFT - 5}" y="{y:.1f}" text-anchor="end">{escape(name[:15])}</text>')
    parts += heat_map_axis(rows, w)
    for shade, level in enumerate((scale.lowest, *scale.levels)):
        x = LEFT + shade * 51
        parts.append(f'<rect class="f{colour}" fill-opacity="{opacity(shade)}" x="{x}" y="{BOTTOM + 8}" '
                     f'width="12" height="12"/><text x="{x + 16}" y="{BOTTOM + 18}">{level}</text>')
    return svg(title, f"{scale.note}, highest {highest:.2f}", parts)


def heat_map_axis(rows, width):
    """Return the numbers of steps below a heat map whose columns have this width."""
    labels = [name_of_axis(BOTTOM - 2)]
    for i in sorted({0, len(rows) // 2, len(rows) - 1}):
        labels.append(f'<text x="{LEFT + (i + .5) * width:.1f}" y="{BOTTOM - 2}" text-anchor="middle">'
                      f'{number(rows[i]["step"])}</text>')
    return labels


def opacity(shade):
    return round(0.06 + 0.94 * shade / len(LOADS.levels), 2)


def spaced(items, most):
    """Return at most `most` items, from the first to the last at equal distances."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]

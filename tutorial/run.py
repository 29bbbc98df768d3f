"""Run the tutorial's commands in order and write what they print into its text:   make tutorial

The commands run in a fresh clone in a temporary folder, so nothing of out/ and data/ is touched. It takes
about eleven minutes on two idle cores. The kinds of blocks in tutorial/README.md:

    ```sh      commands, one per line; a backslash at the end of a line continues it
    ```        lines of their output. Each is replaced by the line of the new output that says the same with
               other numbers. A line that ends with ... is cut there; between lines, ... stands for others
    ```text    a plot, or what a model writes: as many lines as the block has, from the first line of the
               output that begins with the same word
    others     no command and no output: left as they are

Times of a step (dt=... tok/s=...) are cut where the block shows none: they tell of the machine. Long numbers
of the text that stood in a replaced line change with it. A line without a match is named at the end and left
as it is.
"""
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"(?<![A-Za-z\d.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"  # no part of a name, such as dp2
LONG = r"\d+\.\d{3,}|\d{1,3}(?:,\d{3})+"  # a number that hardly stands for two things in one chapter
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TIMES = re.compile(r" dt=\S+ms tok/s=\S+")


def commands(body):
    """A block of commands -> [each in one line]."""
    return re.sub(r" *\\\n *", " ", body).splitlines()


def without_numbers(line):
    """-> the line with # for each number and bar; but the line of a step or an expert keeps of which."""
    which = re.match(r"(?:step|iter)=\d+ |expert +\d+ |", line)[0]
    return which + " ".join(re.sub("#+", "#", re.sub(NUMBER, "#", line[len(which):])).split())


def find(line, printed):
    """-> (the first of the printed lines that says the same as `line` with other numbers, the lines after
    it), or (None, printed). Where `line` is cut by ... at its end, so is what is found."""
    wanted, cut = without_numbers(line.removesuffix("...")), line.endswith("...")
    for i, other in enumerate(printed):
        if cut and without_numbers(other).startswith(wanted):  # as many words as before
            return " ".join(other.split(" ")[: len(line.split(" ")) - 1]) + " ...", printed[i + 1:]
        if without_numbers(other) == wanted:
            return other, printed[i + 1:]
    return None, printed


def new_lines(body, printed, changed, lost):
    """-> a block of output with the lines of `printed`. changed: {long number before: now}, lost: the lines
    that have no match; both are added to."""
    lines, shows_times = [], TIMES.search(body)
    printed = (printed if shows_times else TIMES.sub(" ...", printed)).splitlines()
    for line in body.splitlines():
        new = line
        if line not in ("...", ""):
            new, printed = find(line, printed)
        if new is None:
            lost.append(line)
        else:
            changed.update(zip(re.findall(LONG, line), re.findall(LONG, new), strict=False))
        lines.append(f"{line if new is None else new}\n")
    return "".join(lines)


def new_text(body, printed, changed, lost):
    """-> as many lines of `printed` as the block has, from the first that begins with the block's first
    word. The last line stays if it is `...`."""
    lines, printed = body.splitlines(), printed.splitlines()
    cut = lines[-1] == "..."
    for i, line in enumerate(printed):
        if line.split()[:1] == lines[0].split()[:1]:
            n = len(lines) - cut
            lines[:n] = [x.rstrip().replace("```", "...") for x in printed[i:i + n]]
            break
    else:
        lost.append(lines[0])
    return "".join(f"{line}\n" for line in lines)


FILL = {"": new_lines, "text": new_text}  # kind of block -> how the output comes into it


def refresh(chapter, outputs):
    """A chapter's text, what each of its commands printed -> (the text with that, lines without a match).

    Where a block of commands has as many blocks of output, each command has its own; else one has them all.
    """
    parts = re.split(BLOCK, chapter)  # text, kind, block, text, kind, block, ..., text
    changed, lost, left = {}, [], list(outputs)
    for i in range(1, len(parts), 3):
        if parts[i] == "sh":
            n = len(commands(parts[i + 1]))
            mine, left = left[:n], left[n:]
            after = [*parts[i + 3::3], "sh"]
            n_blocks = sum(kind in FILL for kind in after[:after.index("sh")])
            printed = iter(mine if n_blocks == n else ["".join(mine)] * n_blocks)
        elif parts[i] in FILL:
            parts[i + 1] = FILL[parts[i]](parts[i + 1], next(printed), changed, lost)
    for i in range(0, len(parts), 3):
        parts[i] = re.sub(LONG, lambda m: changed.get(m[0], m[0]), parts[i])
    text = parts[0] + "".join(f"```{kind}\n{body}```{after}"
                              for kind, body, after in zip(*(parts[j::3] for j in (1, 2, 3)), strict=True))
    return text, lost


def run(command, folder):
    """-> what the command prints. A chapter shows exit codes other than 0, so they are no error."""
    start = time.time()
    done = subprocess.run(["bash", "-c", f"export OMP_NUM_THREADS=1 PATH=$PWD/.venv/bin:$PATH; {command}"],
                          cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{time.time() - start:6.1f} s  {command}", flush=True)
    return done.stdout


def main():
    path = ROOT / "tutorial/README.md"
    chapters = re.split(r"^(?=## \d)", path.read_text(), flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "nanoshard"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        (clone / ".venv").symlink_to(ROOT / ".venv")
        for i, chapter in enumerate(chapters[1:], 1):
            typed = [line for kind, body in BLOCK.findall(chapter) if kind == "sh" for line in commands(body)]
            chapters[i], lost = refresh(chapter, [run(line, clone) for line in typed])
            path.write_text("".join(chapters))
            for line in lost:
                print(f"nanoshard: chapter {i - 1} no longer prints: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()

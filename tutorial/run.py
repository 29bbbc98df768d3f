"""Run the tutorial's commands in order and write what they print into its text:   make tutorial

The commands run in a fresh clone in a temporary folder, so nothing of out/ and data/ is touched. It takes
about ten minutes on two idle cores. In tutorial/README.md a block of output keeps its choice of lines: each
one is replaced by the line of the new output that says the same with other numbers. `...` stands for what was
cut. Long numbers of the text that stood in such a line change with it. A line without a match is named at the
end and left as it is. The text that a model writes, plots, and wall times in the text are left as they are.
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
BLOCK = re.compile(r"^```(sh)?\n(.*?)^```$", re.M | re.S)


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


def new_block(body, printed, changed, lost):
    """-> a block of output with the lines of `printed`. changed: {long number before: now}, lost: the lines
    that have no match; both are added to."""
    lines, printed = [], printed.splitlines()
    for line in body.splitlines():
        new = line
        if re.search(NUMBER, line):
            new, printed = find(line, printed)
        if new is None:
            lost.append(line)
        else:
            changed.update(zip(re.findall(LONG, line), re.findall(LONG, new), strict=False))
        lines.append(f"{line if new is None else new}\n")
    return "".join(lines)


def refresh(chapter, outputs):
    """A chapter's text, what each of its commands printed -> (the text with that, lines without a match).

    Where a block of commands has as many blocks of output, each command has its own; else one has them all.
    """
    parts = re.split(BLOCK, chapter)  # text, "sh" or None, block, text, "sh" or None, block, ..., text
    changed, lost, left = {}, [], list(outputs)
    for i in range(1, len(parts), 3):
        if parts[i] == "sh":
            n = len(parts[i + 1].splitlines())
            mine, left = left[:n], left[n:]
            n_blocks = [*parts[i + 3::3], "sh"].index("sh")
            printed = iter(mine if n_blocks == n else ["".join(mine)] * n_blocks)
        else:
            parts[i + 1] = new_block(parts[i + 1], next(printed), changed, lost)
    for i in range(0, len(parts), 3):
        parts[i] = re.sub(LONG, lambda m: changed.get(m[0], m[0]), parts[i])
    text = parts[0] + "".join(f"```{kind or ''}\n{body}```{after}"
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
            commands = [line for sh, body in BLOCK.findall(chapter) if sh for line in body.splitlines()]
            chapters[i], lost = refresh(chapter, [run(command, clone) for command in commands])
            path.write_text("".join(chapters))
            for line in lost:
                print(f"nanoshard: chapter {i - 1} no longer prints: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Run the tutorial's commands in order and write what they print into its text:   make tutorial

The commands run in a fresh clone in a temporary folder, so nothing of out/ and data/ is touched. It takes
about ten minutes on two idle cores. These are the kinds of blocks in tutorial/README.md:

    ```sh      commands, one per line; a backslash at the end of a line continues it
    ```        lines of their output. Each line is replaced by the line of the new output that says the same
               with other numbers. A line that ends with ... is cut there; between lines, ... stands for
               other lines
    ```text    a plot, or what a model writes. The block gets as many lines as it has, from the first line of
               the output that begins with the same word
    others     no command and no output: they stay as they are

The times of a step (dt=... to left=...) depend on the machine. They are cut in each block that shows none.
If a long number of a replaced line stands in the text as well, it changes there, too. A line without a match
stays as it is and is named at the end. The table's minutes for reading are counted again, by words.
"""
import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"(?<![A-Za-z\d.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"  # no part of a name, such as dp2
LONG = r"\d+\.\d{3,}|\d{1,3}(?:,\d{3})+"  # a number that hardly stands for two things in one chapter
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TIMES = re.compile(r"( dt=\S+ms tok/s=\S+)? tokens=\S+( left=\S+)?")  # a step that is not taken has no dt


def commands(body):
    """Return the commands of a block, each on one line."""
    return re.sub(r" *\\\n *", " ", body).splitlines()


def without_numbers(line):
    """Return a line with # for each number and for each bar of #.

    The number of a step, an iteration or an expert stays, because it says which line this is.
    """
    which = re.match(r"(?:step|iter)=\d+(?:/\d+)? |expert +\d+ |", line)[0]
    rest = re.sub(NUMBER, "#", line[len(which):])
    rest = re.sub("#+", "#", rest)
    return which + " ".join(rest.split())


def find(line, printed):
    """Find the first of the printed lines that says the same as `line` with other numbers.

    Return this line and the lines after it, or (None, printed). If `line` is cut by ... at its end, the line
    that is returned is cut after as many words.
    """
    is_cut = line.endswith("...")
    wanted = without_numbers(line.removesuffix("..."))
    n_words = len(line.split(" ")) - 1
    for i, other in enumerate(printed):
        said = without_numbers(other)
        if is_cut and said.startswith(wanted):
            words = other.split(" ")[:n_words]
            return " ".join([*words, "..."]), printed[i + 1:]
        if said == wanted:
            return other, printed[i + 1:]
    return None, printed


def new_lines(body, printed, changed, lost):
    """Return a block of output with the lines of `printed`.

    Long numbers are added to changed, {before: now}; lines that have no match are added to lost.
    """
    printed = re.sub(r"(?<=\S) +(?=[\w/]+=)", " ", printed)  # of columns
    if " dt=" not in body:
        printed = TIMES.sub(" ...", printed)
    left = printed.splitlines()
    lines = []
    for line in body.splitlines():
        new = line
        if line not in ("...", ""):
            new, left = find(line, left)
        if new is None:
            lost.append(line)
            lines.append(line)
        else:
            changed.update(zip(re.findall(LONG, line), re.findall(LONG, new), strict=False))
            lines.append(new)
    return "".join(f"{line}\n" for line in lines)


def new_text(body, printed, changed, lost):
    """Return a block of text with as many lines of `printed` as it has.

    They start at the first line that begins with the block's first word. A last line `...` stays. If no line
    begins with this word, the block stays as it is, and its first line is added to lost.
    """
    lines = body.splitlines()
    printed = printed.splitlines()
    n = len(lines)
    if lines[-1] == "...":
        n -= 1
    word = lines[0].split()[:1]
    starts = [i for i, line in enumerate(printed) if line.split()[:1] == word]
    if not starts:
        lost.append(lines[0])
        return body
    start = starts[0]
    new = [line.rstrip().replace("```", "...") for line in printed[start:start + n]]
    return "".join(f"{line}\n" for line in new + lines[n:])


FILL = {"": new_lines, "text": new_text}  # kind of block: the function that fills it with output


def count_outputs(kinds):
    """Return how many blocks of output stand before the next block of commands. kinds: those that follow."""
    before_commands = itertools.takewhile(lambda kind: kind != "sh", kinds)
    return sum(kind in FILL for kind in before_commands)


def refresh(chapter, outputs):
    """Return (a chapter's text with the new outputs, the lines that have no match).

    outputs: what each command printed. If a block of commands has as many blocks of output as commands, each
    command fills its own block. Otherwise each block is filled from the outputs of all of them.
    """
    parts = re.split(BLOCK, chapter)  # text, kind, block, text, kind, block, ..., text
    texts = parts[::3]
    kinds = parts[1::3]
    blocks = parts[2::3]
    changed = {}
    lost = []
    left = list(outputs)
    for i, kind in enumerate(kinds):
        if kind == "sh":
            n = len(commands(blocks[i]))
            n_blocks = count_outputs(kinds[i + 1:])
            printed = left[:n]
            left = left[n:]
            if n_blocks != n:
                printed = ["".join(printed)] * n_blocks
            printed = iter(printed)
        elif kind in FILL:
            blocks[i] = FILL[kind](blocks[i], next(printed), changed, lost)

    def number_now(match):
        return changed.get(match[0], match[0])

    text = re.sub(LONG, number_now, texts[0])
    for kind, block, after in zip(kinds, blocks, texts[1:], strict=True):
        text += f"```{kind}\n{block}```" + re.sub(LONG, number_now, after)
    return text, lost


WORDS_PER_MINUTE = 200
ROW = re.compile(r"^(\| \[(\d+) .*\| )\d+( \| [^|]+ \|)$", re.M)  # of the table of chapters


def reading_minutes(chapter):
    """Return the minutes that a chapter's text takes at 200 words a minute, at least 1.

    Its blocks of code and output are left out, and so are the files that it sends the reader to.
    """
    return max(1, round(len(BLOCK.sub("", chapter).split()) / WORDS_PER_MINUTE))


def with_reading_minutes(chapters):
    """Return the first of [what comes before the chapters, chapter 0, ...] with new minutes in its table."""
    def row(match):
        return f"{match[1]}{reading_minutes(chapters[int(match[2]) + 1])}{match[3]}"

    return re.sub(ROW, row, chapters[0])


def run(command, folder):
    """Return what a command prints. An exit code other than 0 is no error: some chapters show one."""
    start = time.time()
    environment = "export OMP_NUM_THREADS=1 PATH=$PWD/.venv/bin:$PATH"
    done = subprocess.run(["bash", "-c", f"{environment}; {command}"], cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{time.time() - start:6.1f} s  {command}", flush=True)
    return done.stdout


TOGETHER = "python plan.py ", "for seed in "  # such commands use one core and read no file of each other


def run_block(lines, folder):
    """Return what each command prints. They run one by one, or two at a time if all are of TOGETHER."""
    with ThreadPoolExecutor(2 if all(line.startswith(TOGETHER) for line in lines) else 1) as pool:
        return list(pool.map(lambda line: run(line, folder), lines))


def main():
    argparse.ArgumentParser(description="Run all commands of the tutorial, and write what they print into "
                                        "tutorial/README.md.").parse_args()
    path = ROOT / "tutorial/README.md"
    chapters = re.split(r"^(?=## )", path.read_text(), flags=re.M)
    chapters[0] = with_reading_minutes(chapters)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "nanoshard"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        (clone / ".venv").symlink_to(ROOT / ".venv")
        for i, chapter in enumerate(chapters[1:], 1):
            outputs = []
            for kind, body in BLOCK.findall(chapter):
                if kind == "sh":
                    outputs += run_block(commands(body), clone)
            chapters[i], lost = refresh(chapter, outputs)
            path.write_text("".join(chapters))
            for line in lost:
                print(f"nanoshard: chapter {i - 1} no longer prints: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()

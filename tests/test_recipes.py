"""Every command of the pages has flags that its program takes, and ranks that its layout fits. A link of a
page leads to a file, and to a heading of it.

test_tutorial.py runs the commands of the tutorial, test_change_it.py those of change-it.md.
"""
import re
import shlex

import pytest
from pool import ROOT

import checkpoint
import convert
import plot
import prepare
import sample
from cost import plan_flags
from interface.command_line import command_line, parse
from interface.layout import check_layout

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "change-it.md")
PAGES = ["README.md", "tutorial/README.md", *DOCS]
LAUNCHERS = {"mpiexec": "-n", "torchrun": "--nproc-per-node", "srun": "-n"}
# Page: commands that the search below finds there at least.
FEWEST = {"docs/hugging-face.md": 8, "docs/chat.md": 27, "docs/muon.md": 3, "README.md": 6,
          "tutorial/README.md": 40}
ENDS = "|", "&&", "&", ";", ">", "2>", "<"  # of a command


def lines_of(page):
    """Return what is typed: the lines of a page's code blocks, and commands in its sentences.

    A variable of the shell is replaced by what it holds, that of a loop by its first value.
    """
    text = (ROOT / page).read_text().replace("rootplus", "gelu")  # the activation that chapter 12 adds
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
    blocks = [block for language, block in fence.findall(text) if language in ("", "bash", "sh")]
    known = {}
    found = []
    for inline in re.findall(r"`([^`]+)`", fence.sub("", text)):
        words = " ".join(inline.split())
        if re.match(r"(train|plan)\.py [a-z]", words):
            words = f"mpiexec -n N python {words}"
        found.append(words)
    for block in blocks:
        text = re.sub(r"<<'END'\n.*?^END$", "", block, flags=re.M | re.S)
        for line in text.replace("\\\n", " ").splitlines():
            for name, value in re.findall(r"\bfor (\w+) in (\S+)", line):
                known[name] = value.strip(";")
            line = re.sub(r"\$(\w+)", lambda name: known.get(name[1], name[0]), line.removeprefix("$ "))
            if set_here := re.fullmatch(r'(\w+)="(.*)"', line):
                known[set_here[1]] = set_here[2]
            found.append(line)
    return found


def commands_of(page):
    """Return [(ranks, program, [argument, ...])] of a page, without those that are drawn or explained."""
    return commands_in(lines_of(page))


def commands_in(lines):
    found = []
    for line in lines:
        try:
            words = shlex.split(line.replace(";", " ; "), comments=True)
        except ValueError:  # a drawing, or a sentence
            continue
        parts = [[]]
        for word in words:
            if word in ENDS:
                parts.append([])
            elif word not in ("do", "then"):
                parts[-1].append(word)
        found += [command for command in map(command_of, parts) if command]
    return found


def command_of(words):
    """Return (ranks, program, [argument, ...]), or None if no program of ours is called."""
    ranks = 1
    if words[1:2] and words[1] == LAUNCHERS.get(words[0]):
        ranks = int(words[2]) if words[2].isdecimal() else 0
        words = ["python", *words[3:]] if words[0] == "torchrun" else words[3:]
    if len(words) < 2 or words[0] != "python" or not words[1].endswith(".py"):
        return None
    return None if {"...", "PRESET"} & set(words) else (ranks, words[1], words[2:])


def check_command(ranks, program, argv):
    """Raise ValueError unless the program takes the arguments."""
    assert (ROOT / program).is_file(), program
    if program == "train.py" and "--list" not in argv:
        cfg = parse(argv)
        if ranks:
            check_layout(cfg, ranks)
    elif program == "plan.py":
        plan_flags.arguments(argv)
    elif program == "prepare.py":
        prepare.parse(argv)
    elif program in ("sample.py", "convert.py", "plot.py"):
        flags = {"sample.py": sample.Flags, "convert.py": convert.Flags, "plot.py": plot.Flags}[program]
        command_line(flags, argv, program, "")
    elif program == "checkpoint.py":
        assert argv[0] in ("show", "diff") and callable(checkpoint.main)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_taken(page):
    commands = commands_of(page)
    assert len(commands) >= FEWEST.get(page, 0), commands
    for ranks, program, argv in commands:
        try:
            check_command(ranks, program, argv)
        except (ValueError, SystemExit) as error:
            if f"nanoshard: {error}\n" not in (ROOT / page).read_text():  # a page may show what is refused
                pytest.fail(f"{page}: python {program} {' '.join(argv)}: {error}")


FOLDERS = ("", "docs/", "bench/", "tutorial/")
LINKED = [page for folder in FOLDERS for page in sorted(ROOT.glob(f"{folder}*.md"))]


def without_code(page):
    return re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.M | re.S)


def anchors(page):
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ (.+)$", text, re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in path:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []

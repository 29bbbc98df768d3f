"""Do the tests pass with other versions of torch? Each gets a venv, a fixed list of tests, a row of a table.

    python bench/torch_versions.py                           2.8, 2.10, 2.11, 2.13, and PyPI's newest
    python bench/torch_versions.py --versions 2.9 newest     these two
    python bench/torch_versions.py --versions 2.8 --suite    all tests, not only those of TESTS

    1) a venv       torch X.Y in its last release with all that it needs (PyPI's torch for Linux does not
                    import without its CUDA libraries: 7 GB), then the other packages; deleted at the end
    2) its tests    pytest, in this tree, whatever this machine has: the GPU tests are bench/gpu_matrix.py
    3) its row      in docs/torch-versions.md

That page is also the list of what is done: a version that has a row of this commit is not run again. To
repeat it, delete the row. The commit is the last that changed more than text; a + says that the tree differs
from it, and such a row is always run again.
"""
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from common import ROOT, start

from config import Outcome
from interface.command_line import command_line, wrong_input

PAGE = ROOT / "docs/torch-versions.md"
TESTS = ("layouts", "moe", "parallel", "checkpoint", "resume", "launch", "graph", "symm_mem", "compile",
         "kernels", "product_kernels", "muon", "model_flags", "flash", "flex", "doc_mask", "lora", "shard",
         "equal_one", "sample", "data")
# A torch that is older than that of requirements.txt runs with the lowest versions of requirements-site.txt.
SITE = {"mpi4py": "4.1.0", "mpich": "4.3.1",  # older ones have no wheels
        "pyarrow": "18.1.0"}  # a newer one refuses the lowest numpy
HEAD = ("torch", "tests", "triton", "others", "passed", "failed", "skipped", "seconds", "commit",
        "which failed")
CODE = ".", ":!docs", ":!*.md", ":!bench/torch_versions.py"  # what a commit must have changed to count


@dataclass(frozen=True)
class Flags:
    versions: tuple[str, ...] = ("2.8", "2.10", "2.11", "2.13", "newest")  # of torch
    suite: bool = False  # run the whole suite, not only the list
    work: Path = ROOT / "out/torch-versions"  # folder of the venvs and of what pip and pytest print
    keep: bool = False  # do not delete the venvs


def last_releases(wanted):
    """Return releases such as ["2.8.0", "2.15.0"] for ("2.8", "newest").

    ValueError: PyPI does not answer, or has no such version.
    """
    job = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True,
                         text=True)
    found = re.search(r"^Available versions: (.*)", job.stdout, re.M)
    if not found:
        raise ValueError("pip index versions torch finds none: connect to PyPI or set PIP_INDEX_URL")
    known = [v for v in found[1].split(", ") if "+" not in v]  # the newest first
    releases = [next((v for v in known if name == "newest" or f"{v}.".startswith(f"{name}.")), None)
                for name in wanted]
    if None in releases:
        raise ValueError(f"--versions {wanted[releases.index(None)]}: for this Python PyPI has torch "
                         f"{known[-1]} to {known[0]}; give X.Y or newest")
    return releases


def commit():
    """Return the last commit that changed more than text, with a + where the tree differs from it."""
    def git(*words):
        return subprocess.run(["git", *words, "--", *CODE], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()
    last = git("log", "-1", "--format=%h")
    return f"{last}+" if git("status", "--porcelain") else last


# -----------------------------------------------------------------------------
# one version

def packages(lowest):
    """Return the requirements other than torch, as a list of str.

    lowest: each in the oldest version that is allowed, without transformers, which needs newer ones. Triton
    comes with torch, and no test needs ruff or wandb.
    """
    files = f"requirements{'-site' * lowest}.txt", "requirements-test.txt"
    lines = [re.match(r"(?!torch|triton|ruff|wandb)(\w+)[>=]=([\d.]+)", line) for name in files
             for line in (ROOT / name).read_text().splitlines()]
    found = dict(line.groups() for line in lines if line)
    if lowest:
        found = {k: v for k, v in found.items() if k != "transformers"} | SITE
    return [f"{name}=={version}" for name, version in found.items()]


def run_in(venv, log, *words):
    """Run a command with the venv's programs first in PATH and its output in a file; return its exit code."""
    return subprocess.run(["sh", "-c", 'PATH="$0:$PATH" exec "$@"', venv / "bin", *words], cwd=ROOT,
                          stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode


def install(version, lowest, venv, log):
    """Make the venv, unless it is complete. ChildProcessError: pip failed."""
    done = venv / "complete"
    if done.exists():
        return
    # The CPU build of torch comes without Triton, whose interpreter the tests need. Then Triton is that of
    # requirements-test.txt.
    triton = re.search(r"^triton==[\d.]+", (ROOT / "requirements-test.txt").read_text(), re.M)[0]
    for words in ([sys.executable, "-m", "venv", venv], ["pip", "install", f"torch=={version}"],
                  ["pip", "install", *packages(lowest)],
                  ["sh", "-c", f"python -c 'import triton' || pip install {triton}"]):
        if run_in(venv, log, *words):
            raise ChildProcessError(f"{' '.join(map(str, words[-3:]))} failed")
    done.touch()


def run_tests(venv, suite, log):
    """Return (tests, names of those that failed, number skipped, seconds).

    ChildProcessError: pytest crashed.
    """
    report = venv.with_suffix(".xml")
    report.unlink(missing_ok=True)
    files = ["tests"] if suite else [f"tests/test_{name}.py" for name in TESTS]
    code = run_in(venv, log, "python", "-m", "pytest", "-qrs", "-p", "no:cacheprovider",
                  f"--junitxml={report}", *files)
    if not report.exists():
        raise ChildProcessError(f"pytest ended with {code} and no report")
    found = ElementTree.parse(report).getroot().find("testsuite")
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in found.iter("testcase")
              if case.find("failure") is not None or case.find("error") is not None]
    return int(found.get("tests")), failed, int(found.get("skipped")), float(found.get("time"))


def numbers(version):
    """Return [2, 10, 0] for "2.10.0"."""
    return [int(n) for n in version.split(".")]


def try_version(version, flags):
    """Install, test, delete, and return the row of the table, a str for each of HEAD.

    ChildProcessError: pip failed, or pytest crashed.
    """
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    folder, lowest, code = flags.work / version, numbers(version) < numbers(pinned), commit()
    venv, what = folder / "venv", "suite" if flags.suite else "list"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{what}.log", "w") as log:
        install(version, lowest, venv, log)
        total, failed, skipped, seconds = run_tests(venv, flags.suite, log)
    ask = "import torch, triton; print(torch.__version__, triton.__version__)"
    torch, triton = subprocess.run([venv / "bin/python", "-c", ask], cwd=folder, capture_output=True,
                                   text=True, check=True).stdout.split()
    if not flags.keep:
        shutil.rmtree(venv)
    return [torch, what, triton, "lowest" if lowest else "pinned", str(total - len(failed) - skipped),
            str(len(failed)), str(skipped), f"{seconds:.0f}", code,
            ", ".join(failed).replace("|", "/") or "none"]


# -----------------------------------------------------------------------------
# the page

def read_rows():
    """Return {(torch without its +build, tests): row} of the page's table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return {(row[0].split("+")[0], row[1]): row for row in rows[2:]}  # after the head and its rule


def write_rows(rows):
    """Replace the rows of the page by these, the oldest torch first."""
    def age(item):
        (torch, what), _ = item
        return numbers(torch), what
    table = [HEAD, ["---"] * len(HEAD), *(row for _, row in sorted(rows.items(), key=age))]
    lines = PAGE.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("|"))
    text = [line for line in lines if not line.startswith("|")]
    text[at:at] = [f"| {' | '.join(row)} |" for row in table]
    PAGE.write_text("\n".join(text) + "\n")


@wrong_input()
def main(argv=None):
    flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "torch_versions.py",
                         "Run the tests with several versions of torch, each in a venv of its own. "
                         "docs/torch-versions.md gets a row for each.")
    outcome = Outcome.DONE
    for version in last_releases(flags.versions):
        key = version, "suite" if flags.suite else "list"
        row = read_rows().get(key)
        if row and row[HEAD.index("commit")] == commit() and not row[HEAD.index("commit")].endswith("+"):
            print(f"torch {version}: done at this commit: delete its row to repeat it", flush=True)
        else:
            print(f"torch {version}: {flags.work / version / key[1]}.log grows", flush=True)
            try:
                row = try_version(version, flags)
            except ChildProcessError as e:
                print(f"torch {version}: {e}: see its log", flush=True)
                outcome = Outcome.FAILED
                continue
            write_rows({**read_rows(), key: row})
        print(", ".join(f"{title} {cell}" for title, cell in zip(HEAD, row, strict=True)), flush=True)
        if row[HEAD.index("failed")] != "0":
            outcome = Outcome.FAILED
    return outcome


if __name__ == "__main__":
    start(main)

"""What is said where numpy, torch or tyro is not installed, as before the virtual environment is activated.

    check_packages   called by a program before it imports any of them: one line, and exit code 2
    version_of       the version of any package

This file and config.py import the standard library alone.
"""
import importlib.util
import shlex
import sys
from pathlib import Path

from config import Outcome

NEEDED = ("numpy", "torch", "tyro")


def check_packages(home=None):
    """Print what to type, and end the process with 2, if a package is not installed for this python.

    home: the folder with the virtual environment; by default, that of the program.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    home = Path(home or Path(__file__).resolve().parents[1])
    environment = home / ".venv"
    if home != Path.cwd():
        fix = f"make -C {shlex.quote(str(home))} .venv/ready"
    else:
        environment = Path(".venv")
        fix = "make .venv/ready"
    if (environment / "bin/python").exists() and Path(sys.prefix).resolve() != environment.resolve():
        fix = f"source {shlex.quote(str(environment / 'bin/activate'))}"
    print(f"nanoshard: this python has no {', '.join(missing)}; type: {fix}", file=sys.stderr)
    raise SystemExit(Outcome.WRONG_INPUT)


def version_of(package):
    """Return the version of a package that is installed, or ""."""
    import importlib.metadata  # takes a tenth of a second
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

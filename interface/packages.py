"""Imported first, it says in one line where Python is too old, or the environment is not activated."""
import importlib.util
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    print(f"nanoshard: this is Python {sys.version.split()[0]}, and 3.11 or newer is needed; with such a "
          "one type: make .venv/ready PYTHON=python3.11", file=sys.stderr)
    raise SystemExit(2)
missing = [name for name in ("numpy", "torch", "tyro") if importlib.util.find_spec(name) is None]
if missing:
    print(f"nanoshard: this python has no {', '.join(missing)}; in the folder of train.py type: "
          "make .venv/ready && source .venv/bin/activate", file=sys.stderr)
    raise SystemExit(2)

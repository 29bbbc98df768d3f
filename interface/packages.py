"""What is said where numpy, torch or tyro is not installed, as before the environment is activated."""
import importlib.util
import sys


def check_packages():
    missing = [name for name in ("numpy", "torch", "tyro") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"nanoshard: this python has no {', '.join(missing)}; in the folder of train.py type: "
              "make .venv/ready && source .venv/bin/activate", file=sys.stderr)
        raise SystemExit(2)


def version_of(package):
    import importlib.metadata  # takes a tenth of a second
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

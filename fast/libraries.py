"""Libraries that a run may take: in the version that was tried, or not at all."""
import importlib.metadata


def version_of(package):
    """Return the version of a package that is installed, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def problem_of(package, version, tested, load):
    """Return why a library cannot be taken, or "". version: version_of(). load() imports what is called."""
    if version != tested:
        found = f"version {version} was not tried, {tested} was" if version else "it is not installed"
        return f"{found}; pip install {package}=={tested}"
    try:
        load()
    except Exception as e:
        return f"it cannot be imported: {e}"
    return ""

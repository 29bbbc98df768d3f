import importlib

import pytest


def pytest_addoption(parser):
    parser.addoption("--solutions", action="store_true", help="test solutions.py instead of exercises.py")


@pytest.fixture
def yours(request):
    """Return the module whose functions are tested: exercises.py, or solutions.py with --solutions."""
    name = "solutions" if request.config.getoption("--solutions") else "exercises"
    return importlib.import_module(f"tutorial.{name}")

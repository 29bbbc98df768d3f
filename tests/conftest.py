import os
import shutil
import threading
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pool  # noqa: F401 sets what the server imports
import pytest

os.environ["COLUMNS"] = "100"  # the terminal to whose width lines are folded
# The files that take longest start first, so that none of them is left for the end.
LONGEST = ["test_watch", "test_resume", "test_plan", "test_export", "test_launch", "test_layouts",
           "test_faults", "test_graph", "test_symm_mem", "test_bench", "test_convert", "test_compile",
           "test_kernels", "test_corpus", "test_checkpoint", "test_validation", "test_import", "test_model",
           "test_new_flag", "test_fp8", "test_guard"]


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        return  # this process hands the tests to others, and needs no torch
    import torch
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # for test_kernels.py; Triton reads it at its first import
    with mock.patch.object(os, "cpu_count", lambda: 1):
        import prepare  # noqa: F401 its --workers is 1 by default: no process for a test's text
    forkserver.ensure_running()  # it forks the pool's ranks, and imports torch while pytest collects tests


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))  # tests of one file keep their order


@pytest.fixture(autouse=True)
def no_watchdog_stays():
    """Fail a test that leaves a watchdog behind: it would end this process in the middle of another test."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name == "watchdog"]
    assert not left, "this test made a watch.Watch and did not leave its `with` block"


@pytest.fixture(scope="module")
def hf():
    """Return transformers, silent."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -r requirements-test.txt")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    from runs import chars
    return chars(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def view():
    """A page of a headless Chromium; view.wrong are the errors of its scripts."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with playwright.sync_playwright() as context:
        paths = [context.chromium.executable_path, shutil.which("chromium"), shutil.which("google-chrome")]
        path = next((path for path in paths if path and Path(path).exists()), None)
        if path is None:
            pytest.skip("there is no Chromium: playwright install chromium, or apt install chromium")
        made = context.chromium.launch(executable_path=path, args=["--no-sandbox"]).new_page()
        made.wrong = []
        made.on("pageerror", lambda error: made.wrong.append(str(error)))
        yield made
        assert not made.wrong

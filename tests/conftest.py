import os
import threading
from multiprocessing import forkserver
from unittest import mock

import pool  # noqa: F401 sets what the server imports
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for test_kernels.py; Triton reads it at its first import
os.environ["COLUMNS"] = "100"  # the terminal to whose width lines are folded
with mock.patch.object(os, "cpu_count", lambda: 1):
    import prepare  # noqa: F401 its --workers is 1 by default: a text of a test needs no process of its own
forkserver.ensure_running()  # it forks the pool's ranks, and imports torch while pytest collects the tests
# Seconds that the tests of the longest files take on a busy machine, those marked long included. These files
# start first, so that none of them is left for the end.
LONGEST = {
    "test_cli": 160, "test_muon": 155, "test_bench": 150,
    "test_layouts": 300, "test_bench_peers": 103, "test_resume": 123,
    "test_symm_mem": 75, "test_launch": 71, "test_split_master": 70,
    "test_scripts": 58, "test_change_it": 57, "test_plan": 52,
    "test_metrics": 51, "test_faults": 51, "test_graph": 48,
    "test_flex": 46, "test_malformed": 45, "test_tutorial": 43, "test_convert": 42,
    "test_watch": 28,
}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: -LONGEST.get(item.path.stem, 0))  # tests of one file keep their order


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

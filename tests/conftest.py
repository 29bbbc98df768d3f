import os
import threading
from multiprocessing import forkserver

import pool  # noqa: F401 sets what the server imports
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for test_kernels.py; Triton reads it at its first import
os.environ["COLUMNS"] = "100"  # the terminal to whose width lines are folded
forkserver.ensure_running()  # it forks the pool's ranks, and imports torch while pytest collects the tests
# Seconds of CPU of the longest files, with their tests marked long, on a busy machine. These files start
# first, so that none of them is left for the end.
LONGEST = {
    "test_layouts": 123, "test_resume": 74, "test_gpu_matrix": 47, "test_fuzz": 40, "test_plan": 39,
    "test_faults": 38, "test_launch": 35, "test_graph": 29, "test_drills": 25, "test_dropout": 25,
    "test_checkpoint": 23, "test_ddp": 23, "test_guard": 20, "test_borders": 19, "test_tutorial": 18,
    "test_cli": 18, "test_bench": 18, "test_watch": 17, "test_convert": 16, "test_fp16": 16,
}


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:  # mutants.py asks for its own order
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

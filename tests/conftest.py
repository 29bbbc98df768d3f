import os
from multiprocessing import forkserver

import pool  # noqa: F401 sets what the server imports
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for test_kernels.py; Triton reads it at its first import
forkserver.ensure_running()  # it forks the pool's ranks, and imports torch while pytest collects the tests


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that are too slow for every run")

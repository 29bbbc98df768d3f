import os
from multiprocessing import forkserver

import pool  # noqa: F401 says what the server imports
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # test_kernels.py; read at Triton's first import
forkserver.ensure_running()  # the pool's ranks come from it; it imports torch while the tests are collected


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that are too slow for every run")

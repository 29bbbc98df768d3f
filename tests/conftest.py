import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # test_kernels.py; read at Triton's first import


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that are too slow for every run")

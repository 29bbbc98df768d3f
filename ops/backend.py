"""Whether an operation runs as a Triton kernel or as its torch twin: one answer for all of ops/."""
import importlib.util
from pathlib import Path

import torch

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.int64


def triton_devices():
    """Return the kinds of torch devices that the installed Triton compiles for."""
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        return ()
    vendors = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel"}
    kinds = []  # by folders, one for each vendor: importing Triton takes a second
    for kind, vendor in vendors.items():
        folders = [Path(place, "backends", vendor) for place in found.submodule_search_locations]
        if any(folder.is_dir() for folder in folders):
            kinds.append(kind)
    return tuple(kinds)


TRITON_DEVICES = triton_devices()


def is_hopper(device):
    """Whether a torch device is a GPU of NVIDIA's Hopper. AMD's MI250X and MI300X report 9, too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def use_triton(x):
    """Whether x is on a device that Triton serves and has a dtype that the kernels know (not fp64)."""
    return x.device.type in TRITON_DEVICES and x.dtype in DTYPES


def next_power_of_2(n):
    return 2 ** (n - 1).bit_length()

"""Whether an operation runs as a Triton kernel or as its torch twin: one answer for all of ops/."""
import importlib.util
from pathlib import Path

import torch

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.int64


def triton_devices():
    """-> the kinds of torch devices that the installed Triton compiles for. It has a folder for each vendor;
    ROCm's torch calls an AMD GPU "cuda". Looks at the folders only: importing Triton takes a second."""
    found = importlib.util.find_spec("triton")
    places = found.submodule_search_locations if found else ()
    vendors = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel"}
    return tuple(kind for kind, vendor in vendors.items()
                 if any(Path(place, "backends", vendor).is_dir() for place in places))


TRITON_DEVICES = triton_devices()


def use_triton(x):
    """True for tensors on a device that Triton serves, of the dtypes that the kernels know: not fp64."""
    return x.device.type in TRITON_DEVICES and x.dtype in DTYPES

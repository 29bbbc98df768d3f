"""What decides whether a kernel or its torch twin runs: the device, the dtype, the packages that are here."""
import importlib.util

import torch

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.int64
# The kinds of torch devices with Triton: GPUs of NVIDIA and AMD, and of Intel
TRITON_DEVICES = ("cuda", "xpu") if importlib.util.find_spec("triton") else ()


def is_hopper(device):
    """Whether a torch device is a GPU of NVIDIA's Hopper. AMD's MI250X and MI300X report 9, too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def version_of(package):
    import importlib.metadata  # takes a tenth of a second
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def use_triton(x):
    """Whether x is on a device that Triton serves and has a dtype that the kernels know (not fp64)."""
    return x.device.type in TRITON_DEVICES and x.dtype in DTYPES


def next_power_of_2(n):
    return 2 ** (n - 1).bit_length()

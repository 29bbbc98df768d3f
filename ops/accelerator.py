"""What torch says about a device, asked in the same way for every kind of accelerator."""
import contextlib
import os
import resource
import sys
from functools import cache

import torch


def ask(device, question):
    """Return the answer of a function of the device's module. None for a CPU, or without such a function."""
    if device.type == "cpu":
        return None
    function = getattr(torch.get_device_module(device), question, None)
    if function is None:
        return None
    return function(device)


def device_name(device):
    return ask(device, "get_device_name") or device.type  # such as "NVIDIA H200"


def total_memory(device):
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = ask(device, "get_device_properties")
    return getattr(properties, "total_memory", 0)  # bytes


def peak_memory(device):
    """Return the most bytes (allocated, reserved) of torch's allocator; None where it does not count."""
    allocated = ask(device, "max_memory_allocated")
    reserved = ask(device, "max_memory_reserved")
    if allocated is None or reserved is None:
        return None
    return allocated, reserved


def peak_resident():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def stream_module(device):
    """Return the module with the device's streams (torch.cuda, torch.xpu); None where copies run in line."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "Stream"):
        return None
    return module


@cache
def side_stream(device):
    module = stream_module(device)
    return None if module is None else module.Stream(device)


@contextlib.contextmanager
def on_side_stream(device):
    """Start operations on a stream next to the one that computes, after all that was issued so far."""
    stream = side_stream(device)
    if stream is None:
        yield
        return
    module = stream_module(device)
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        yield

"""What torch says of a device, asked alike for every kind of accelerator: NVIDIA's and AMD's (torch calls
both "cuda", torch.version.hip tells them apart), Intel's ("xpu"), Apple's ("mps")."""
import torch


def ask(device, question):
    """-> the answer of a function of the device's module, such as torch.xpu.get_device_name; None where the
    module has no such function, and for a CPU."""
    function = None if device.type == "cpu" else getattr(torch.get_device_module(device), question, None)
    return function and function(device)


def device_name(device):
    """-> such as "NVIDIA H200"; the device's kind where torch knows no name."""
    return ask(device, "get_device_name") or device.type


def total_memory(device):
    """-> bytes of the device's memory; 0 where torch does not know."""
    return getattr(ask(device, "get_device_properties"), "total_memory", 0)


def peak_memory(device):
    """-> (allocated, reserved): the most bytes that torch's allocator has held; None where it does not count
    (a CPU)."""
    peaks = ask(device, "max_memory_allocated"), ask(device, "max_memory_reserved")
    return None if None in peaks else peaks


def stream_module(device):
    """-> the module with the device's streams (torch.cuda, torch.xpu); None where copies run in line."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None

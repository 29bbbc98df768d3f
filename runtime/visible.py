"""Which GPUs the processes of a node see, and how each process comes to see all of them.

GPUs reach each other's memory only in a process that sees both. Some sites show each process only the GPU
next to its cores (CUDA_VISIBLE_DEVICES). The driver reads this variable once, in cuInit. Before that,
launch() sets it to the union of what the processes of the node were shown, and keeps each process's own GPU
as its current one. MIG devices are not changed, because CUDA lets a process use only one of them. Nor are the
variables of AMD and Intel, for which this was never tried.
"""
import ctypes
import re
import subprocess
import sys

VARIABLE = "CUDA_VISIBLE_DEVICES"
COUNT = ("import ctypes, signal; signal.alarm(60); driver, count = ctypes.CDLL('libcuda.so.1'), "
         "ctypes.c_int(); driver.cuInit(0); driver.cuDeviceGetCount(ctypes.byref(count)); print(count.value)")
CUDA_ERROR_NOT_INITIALIZED = 3


def join(shown):
    """Return (union, own): all entries without repetition, and the entry of each process.

    shown: the text of VARIABLE of each process of a node (None: unset), by local rank. The result is None if
    nothing should change: all processes see the same GPUs, some are not restricted, two would use the same
    GPU, or the entries are neither all indices nor all UUIDs.
    """
    lists = [[entry.strip() for entry in (text or "").split(",")] for text in shown]
    union = list(dict.fromkeys(entry for entries in lists for entry in entries))
    own = [entries[local_rank % len(entries)] for local_rank, entries in enumerate(lists)]

    if not (_all_match("[0-9]+", union) or _all_match("GPU-.+", union)):
        return None
    if all(entries == lists[0] for entries in lists):
        return None
    if len(set(own)) < len(own):
        return None
    return union, own


def _all_match(pattern, entries):
    return all(re.fullmatch(pattern, entry) for entry in entries)


def cuda_is_untouched():
    """Whether there is a CUDA driver that nobody has initialised. A GPU-aware MPI does so in MPI_Init."""
    try:
        error = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):
        return False
    return error == CUDA_ERROR_NOT_INITIALIZED


def count_in_new_process():
    """Return how many GPUs a process with this environment sees: a cgroup may hide some. 0 if that fails."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", COUNT], capture_output=True)
    return int(done.stdout or 0)

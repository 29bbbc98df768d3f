"""Which GPUs the processes of a node see, and how each of them comes to see all.

GPUs reach each other's memory only in a process that sees both, and some sites show each process one: that
beside its cores (CUDA_VISIBLE_DEVICES). The driver reads this variable once, in cuInit. Before, launch() sets
it to the union of what the processes of the node were shown; the own GPU stays the current one. Left as they
are: MIG devices, of which CUDA lets a process use one, and, never tried, AMD's and Intel's variables.
"""
import ctypes
import re
import subprocess
import sys

VARIABLE = "CUDA_VISIBLE_DEVICES"
COUNT = ("import ctypes, signal; signal.alarm(60); driver, count = ctypes.CDLL('libcuda.so.1'), "
         "ctypes.c_int(); driver.cuInit(0); driver.cuDeviceGetCount(ctypes.byref(count)); print(count.value)")


def join(shown):
    """shown: VARIABLE of each process of a node (None: unset), by local rank -> (union, own): the entries of
    all without repetition and each process's own entry. None: nothing to change. All see the same; some are
    not restricted; two would use the same GPU; or the entries are not all indices, not all UUIDs."""
    lists = [[entry.strip() for entry in (text or "").split(",")] for text in shown]
    union = list(dict.fromkeys(entry for entries in lists for entry in entries))
    own = [entries[local % len(entries)] for local, entries in enumerate(lists)]
    one_kind = any(all(re.fullmatch(kind, entry) for entry in union) for kind in ("[0-9]+", "GPU-.+"))
    distinct = len(set(own)) == len(own) and any(entries != lists[0] for entries in lists)
    return (union, own) if one_kind and distinct else None


def cuda_is_untouched():
    """Whether there is a CUDA driver that nobody has initialised yet. MPI_Init of a GPU-aware MPI has."""
    try:
        error = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
        return error == 3  # CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):
        return False


def count_in_new_process():
    """-> how many GPUs a process with this environment sees: a cgroup may hide some. 0 if that fails."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", COUNT], capture_output=True)
    return int(done.stdout or 0)

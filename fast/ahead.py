"""Compiles kernels before they are launched, in processes beside the run. runtime/early.py starts it.

    python fast/ahead.py triton KERNELS         those of ops/: the list of early.kernels_of, as JSON
    python fast/ahead.py libraries FLAGS ENDED  those of fast/library_kernels.py, if the GPU is a Hopper. If
                                                that ends well, the file ENDED is written
    start               starts one of the two
    wait_for_libraries  what a run does before it asks flash-attn-4 for a kernel that may be in the making

Triton keeps what it compiles on the disk, under a key made of the kernel's source, the types of its arguments
and the kind of GPU. The run makes the same key, and finds the kernel. Neither torch nor memory of a GPU is
needed for that, so this process starts at once. Triton also compiles a little C for each kernel, which starts
it, and some for the driver. A kernel that nobody launches costs nothing but the time of an idle core.
"""
import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Numbers of cuDeviceGetAttribute
CAPABILITY = (75, 76)  # major and minor
MULTIPROCESSORS = 16
HOPPER = 90  # the compute capability of NVIDIA's Hopper

HOME = Path(__file__).resolve().parents[1]
LONGEST_WAIT = 60  # seconds for the kernels of libraries

started = []  # the processes that this one has started here
awaited = []  # the files that this process waits for: each says that kernels of libraries are compiled


class Dtype(str):
    """Stands for a dtype of torch by its name, such as "bfloat16"."""
    itemsize = 2  # only descriptors ask for it, and theirs is bf16


class Tensor:
    """Stands for a tensor. Triton asks for its dtype and its address, which is aligned."""

    def __init__(self, dtype):
        self.dtype = Dtype(dtype)

    @staticmethod
    def data_ptr():
        return 0


class Driver:
    """Stands for Triton's driver of a GPU with this compute capability, such as 90."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", self.capability, 32)

    @staticmethod
    def get_current_device():
        return 0

    @staticmethod
    def get_current_stream(device=None):
        return 0


def capability_of_gpu():
    """Return the compute capability of the first GPU, such as 90. OSError: there is no driver."""
    major, minor = attributes_of_gpu(*CAPABILITY)
    return 10 * major + minor


def attributes_of_gpu(*numbers):
    """Return what the driver says of the first GPU. OSError: there is no driver, or no GPU."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    found = []
    for number in numbers:
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0) != 0:
            raise OSError("the driver sees no GPU")
        found.append(value.value)
    return found


def with_tensors(arguments):
    """Return the arguments with a Tensor in the place of each name of a dtype.

    In the place of a name with a tile, such as ["bfloat16", 128, 64], stands a descriptor.
    """
    return [stand_in(value) for value in arguments]


def stand_in(value):
    if isinstance(value, str):
        return Tensor(value)
    if isinstance(value, list):
        from triton.tools.tensor_descriptor import TensorDescriptor
        dtype, *tile = value
        strides = [*tile[1:], 1]
        return TensorDescriptor(Tensor(dtype), tile, strides, tile)
    return value


def compile_driver():
    """Compile the C through which Triton talks to the driver."""
    from triton.backends.nvidia.driver import CudaUtils
    CudaUtils()


def compile_kernel(name, arguments, options):
    """Compile one kernel, and the C that launches it. name: such as "kernels.swiglu" of ops/kernels.py."""
    module, _, function = name.partition(".")
    kernel = getattr(importlib.import_module(f"ops.{module}"), function)
    compile_launcher(kernel.warmup(*with_tensors(arguments), grid=(1,), **options))


def compile_launcher(compiled):
    """Compile the C that launches a kernel, where this version of Triton compiles that."""
    with contextlib.suppress(AttributeError):  # Triton 3.7 and later have one launcher for all kernels.
        from triton.backends.nvidia.driver import CudaLauncher
        CudaLauncher(compiled.src, compiled.metadata)


def fork(function, *args):
    """Call a function in a fork of this process, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*args)
        code = 0
    finally:
        os._exit(code)


def compile_all(kernels, capability):
    """Compile kernels, each in a process of its own. One that fails is left out.

    Those of ops/tma_kernels.py are for Hopper. The first kernel is compiled before the others: they share
    what it imports and reads.
    """
    from triton.runtime import driver
    children = [fork(compile_driver)]
    driver.set_active(Driver(capability))
    if capability != HOPPER:
        kernels = [kernel for kernel in kernels if not kernel[0].startswith("tma_kernels.")]
    first, *others = kernels
    with contextlib.suppress(Exception):
        compile_kernel(*first)
    children += [fork(compile_kernel, *kernel) for kernel in others]
    for pid in children:
        os.waitpid(pid, 0)


def compile_for_libraries(flags, ended):
    """Compile what fast/library_kernels.py does for the first GPU. If that ends well, write the file `ended`.

    subprocess.TimeoutExpired: it took too long, and was ended.
    """
    if capability_of_gpu() != HOPPER:
        return
    multiprocessors, = attributes_of_gpu(MULTIPROCESSORS)
    # These tell the libraries for which GPU they compile, and that there is none to launch a kernel on.
    environment = ["CUDA_VISIBLE_DEVICES=", "CUTE_DSL_ARCH=sm_90a", "QUACK_ARCH=90",
                   "FLASH_ATTENTION_ARCH=sm_90", f"FLASH_ATTENTION_NUM_SMS={multiprocessors}"]
    program = ["PYTHONSAFEPATH=", sys.executable, "-m", "fast.library_kernels", flags]
    # In a session of its own, so that all its processes end with it.
    process = subprocess.Popen(["env", *environment, *program], cwd=HOME, start_new_session=True)
    try:
        has_failed = process.wait(LONGEST_WAIT)
    finally:
        with contextlib.suppress(ProcessLookupError):  # All have ended.
            os.killpg(process.pid, signal.SIGKILL)
    if not has_failed:
        ended.touch()


def main():
    task, *arguments = sys.argv[1:]
    os.nice(5)  # The run itself comes first.
    if sys.flags.safe_path:  # Python left out this file's folder.
        sys.path.insert(0, str(HOME))
    else:
        sys.path[0] = str(HOME)
    if task == "triton":
        kernels, = arguments
        compile_all(json.loads(kernels), capability_of_gpu())
    else:
        flags, ended = arguments
        ended = Path(ended)
        # The end of a job, too, ends what this process has started.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        try:
            compile_for_libraries(flags, ended)
        finally:
            begun(ended).unlink(missing_ok=True)


# -----------------------------------------------------------------------------
# In the run

def start(*arguments):
    """Start this program beside the run, which does without it where that fails. Return whether it runs."""
    try:
        started.append(subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    except OSError:
        return False
    return True


def begun(ended):
    """Return the file that says that somebody is at it: ranks that do not see it wait for nobody."""
    return ended.with_suffix(".begun")


def wait_for_libraries():
    """Wait until the kernels of libraries are compiled, if a process of this node is at it.

    flash-attn-4 would compile beside that process. quack-kernels waits by itself.
    """
    until = time.monotonic() + LONGEST_WAIT
    while awaited and time.monotonic() < until and not all_have_ended():
        if awaited[-1].exists() or not begun(awaited[-1]).exists():
            awaited.pop()
        else:
            time.sleep(0.02)
    awaited.clear()


def all_have_ended():
    """Whether this rank has started processes, and none of them is running."""
    return bool(started) and all(process.poll() is not None for process in started)


if __name__ == "__main__":
    main()

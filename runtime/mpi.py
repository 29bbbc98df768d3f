"""MPI, which the ranks need only to meet and to agree on an address. After that, torch's process groups take
over.

    world       MPI's communicator of all ranks, if it agrees with the launcher
    progress    keeps MPI's messages going while a rank waits elsewhere
"""
import atexit
import contextlib
import ctypes
import threading


def init():
    """Return mpi4py's MPI, initialised.

    mpi4py itself would hold the interpreter's lock during MPI_Init, which waits for all ranks. Then neither
    the watchdog nor a signal could end a start that hangs. ctypes releases the lock.
    """
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        try:
            init_thread = ctypes.CDLL(MPI.__file__).MPI_Init_thread  # of the MPI that mpi4py is linked to
            init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does: an error is an exception
        except (OSError, AttributeError):
            MPI.Init_thread()
        atexit.register(_finalize, MPI)
    return MPI


def _finalize(MPI):
    if not MPI.Is_finalized():
        MPI.Finalize()


def world(launcher, rank, size):
    """Return MPI.COMM_WORLD if it agrees with the launcher, or None if srun runs without MPI.

    SystemExit, with what to do: mpi4py is missing, or belongs to another MPI than the launcher.
    """
    try:
        MPI = init()
    except ImportError:
        if launcher == "srun":
            return None
        raise SystemExit(f"nanoshard: {launcher} started {size} ranks but mpi4py is missing; pip install "
                         "mpi4py (or load the site's), or start with torchrun") from None

    comm = MPI.COMM_WORLD
    if comm.rank == rank and size in (comm.size, -1):  # -1: the launcher does not say
        return comm
    if launcher == "srun":
        return None  # under srun --mpi=none every process is an MPI world of its own
    raise SystemExit(f"nanoshard: {launcher} started rank {rank} of {size} but mpi4py sees {comm.rank} of "
                     f"{comm.size}; mpiexec and mpi4py come from different MPIs: use the mpiexec of the MPI "
                     "mpi4py was built with")


@contextlib.contextmanager
def progress(comm):
    """Keep sending this rank's messages that MPI still holds, while the body waits outside MPI.

    Over tcp, MPICH's OFI sends only inside MPI's functions. All ranks have received the messages by the time
    the process group is made. comm: MPI's communicator, or None.
    """
    MPI = None if comm is None else init()
    if MPI is None or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        yield
        return

    done = threading.Event()

    def look_for_messages():
        with contextlib.suppress(MPI.Exception):  # a peer is lost: the store's wait ends and says so
            while not done.wait(0.01):
                comm.Iprobe()

    thread = threading.Thread(target=look_for_messages, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

"""MPI, which the ranks need only to meet: to agree on an address. Then torch's process groups take over.

    world       -> MPI's communicator of all ranks, where it agrees with the launcher
    progress    keeps its messages going while a rank waits elsewhere
"""
import atexit
import contextlib
import ctypes
import threading


def init():
    """-> mpi4py's MPI, initialised. mpi4py itself would hold the interpreter's lock in MPI_Init, which waits
    for all ranks: then neither watchdog nor signals could end a start that hangs. ctypes gives it up."""
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
        atexit.register(lambda: MPI.Is_finalized() or MPI.Finalize())
    return MPI


def world(launcher, rank, size):
    """-> MPI.COMM_WORLD where it agrees with the launcher, None where srun runs without MPI. SystemExit, with
    what to do: mpi4py is missing, or belongs to another MPI than the launcher."""
    try:
        MPI = init()
    except ImportError:
        if launcher == "srun":
            return None
        raise SystemExit(f"nanoshard: {launcher} started {size} ranks but mpi4py is missing; pip install "
                         "mpi4py (or load the site's), or start with torchrun") from None
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) == (rank, size) or (size == -1 and comm.rank == rank):
        return comm
    if launcher == "srun":
        return None  # srun --mpi=none: every process is its own MPI world
    raise SystemExit(f"nanoshard: {launcher} started rank {rank} of {size} but mpi4py sees {comm.rank} of "
                     f"{comm.size}; mpiexec and mpi4py come from different MPIs: use the mpiexec of the MPI "
                     "mpi4py was built with")


@contextlib.contextmanager
def progress(comm):
    """While the body waits outside of MPI, go on sending what MPI holds of this rank: over tcp, MPICH's OFI
    does so inside of MPI's functions only. All ranks have it when the process group is made."""
    if comm is None or (MPI := init()).Query_thread() != MPI.THREAD_MULTIPLE:
        yield
        return
    done = threading.Event()

    def look_for_messages():
        with contextlib.suppress(MPI.Exception):  # a peer is lost: the store's wait ends, and says so
            while not done.wait(0.01):
                comm.Iprobe()

    thread = threading.Thread(target=look_for_messages, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

"""An exception on one rank ends all ranks."""
import contextlib
import os
import sys
import time
import traceback

from config import Outcome
from interface.files import ChangedFile
from interface.terminal import one_line, visible

PEER_LOST = ("closed by peer", "reset by peer", "remote process exited", "was likely closed", "roken pipe")


def end_all_on_exception(rank, comm):
    """Make an exception on one rank end all ranks, with one traceback. comm: MPI's communicator, or None.

    For a file that was changed under the run it is one line, and exit code 2.
    Otherwise mpiexec waits for the ranks that still run, and each rank that loses its connection to the
    failed one prints a traceback as well. The hook ends the process without destructors, because the
    destructors of the process groups would wait or abort. The hook does not write to sys.stderr, because
    torch wraps this hook and keeps what is written there until after the abort.
    """
    def hook(kind, value, trace):
        text = str(value)
        if any(words in text for words in PEER_LOST):  # another rank has failed and prints why
            time.sleep(3)  # the launcher has this long to end this rank before it prints, too
            why = " ".join(text.split())[:160]
            with contextlib.suppress(OSError):
                print(f"nanoshard: rank {rank} lost a peer ({why}): see its error; without one it was killed",
                      file=sys.__stderr__, flush=True)
            os._exit(1)

        code = 1
        with contextlib.suppress(OSError):
            if issubclass(kind, ChangedFile):
                code = int(Outcome.WRONG_INPUT)
                print(f"nanoshard: rank {rank}: {one_line(text)}", file=sys.__stderr__)
            else:
                text = "".join(traceback.format_exception(kind, value, trace))
                sys.__stderr__.write(visible(text))
            sys.__stderr__.flush()
        time.sleep(0.2)  # mpiexec must pass the text on before it learns of the abort
        if comm is not None:
            comm.Abort(code)
        os._exit(code)

    sys.excepthook = hook

"""What every program of this folder begins with: the repository's root on sys.path, and its flags.

Import this module before any module of the root: the programs then start from any folder.
"""
import contextlib
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime.launch import LAUNCHERS, started_by  # its package says what is not installed

from interface.command_line import command_line, wrong_input
from interface.layout import check_alone, check_layout


@contextlib.contextmanager
def one_rank_speaks():
    """Let rank 0 alone print the help, or one line about wrong input before exit code 2.

    This context holds the reading of flags, before launch(). All ranks read the same flags, so no rank needs
    to ask another one.
    """
    with wrong_input():
        rank = started_by().rank
    with contextlib.ExitStack() as stack:
        if rank != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(wrong_input())
        yield


def read_flags(cls, argv, prog, about):
    """Return an instance of cls, read from argv, or from this process's arguments where argv is None.

    One rank reports wrong flags.
    """
    with one_rank_speaks():
        flags = command_line(cls, sys.argv[1:] if argv is None else argv, prog, about)
        if hasattr(flags, "check"):
            flags.check()
        return flags


def check_ranks(cfg, world, prog, argv=None):
    """Raise ValueError unless the flags, a Config, fit these ranks. """
    if world.size == 1:
        check_alone(cfg, sys.argv[1:] if argv is None else argv, f"bench/{prog}")
    check_layout(cfg, world.size)


def bare_environment():
    """Return the environment without any launcher's own variables, for a command that starts ranks itself."""
    foreign = [name for names in LAUNCHERS.values() for name in names]
    foreign += ["PMI", "MPI_LOCAL", "HYD", "OMPI_", "PRTE_", "PALS_", "TORCHELASTIC_", "MASTER_"]
    foreign.append("SLURM_STEP")
    if "SLURM_STEP_ID" in os.environ:
        # A launcher would ask Slurm for another step, which waits until the step that asks has ended.
        foreign.append("SLURM_")
    kept = ("OMPI_ALLOW_RUN", "SLURM_CONF")
    return {name: value for name, value in os.environ.items()
            if name.startswith(kept) or not name.startswith(tuple(foreign))}


def gather_objects(world, value):
    """Return the values of all ranks, which may hold tensors, as a list. Collective over the world."""
    import torch.distributed as dist
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def start(main):
    """Run a program and exit with what main() returns.

    If the output of a single process is closed (| head), the program ends quietly. Among several ranks the
    exception passes, because it must end the other ranks too, which would wait in a collective.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if started_by().launcher != "single":
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the interpreter flushes at its end
        code = 0
    raise SystemExit(code)

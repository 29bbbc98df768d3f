"""How this process was started, as its environment says: read before torch is imported.

    detect             the launcher's variables -> Start: rank, size, local rank
    wrong_environment  turns variables that can start no rank into one line and exit code 2

This file covers plain python, torchrun, MPICH and Intel MPI (Hydra), Open MPI, PALS, Cray PMI and srun.
runtime/launch.py starts the rank. No third file reads the environment.
"""
import contextlib
import os
import re
from typing import NamedTuple

from config import Outcome
from interface.terminal import complain, one_line

# Each launcher, with its variables for (rank, world size, local rank, local size). The first launcher whose
# variables are set is taken, and srun is the last one: only SLURM_STEP_NUM_TASKS says that srun started
# *this* process and not the batch script around it.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    "cray": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


STARTED_WITH = {"hydra": "mpiexec", "openmpi": "mpiexec", "pals": "mpiexec", "cray": "srun or aprun"}

NO_TIMEOUT = 30 * 86400.0  # seconds, longer than any run


class Start(NamedTuple):
    """How this process was started, as far as its environment says."""
    launcher: str
    rank: int
    size: int  # -1 where only MPI knows it
    local_rank: int
    local_size: int


def detect(env):
    """Return the Start that a mapping of environment variables describes.

    ValueError: the variables of the launcher describe no rank that can be.
    """
    for launcher, names in LAUNCHERS.items():
        texts = [env.get(name) for name in names]
        rank, size, local_rank, local_size = texts
        if launcher == "pals" and rank is not None and local_rank is not None and size is None:
            # PALS_PMI=pmix sets no PMI_SIZE. mpi4py gives the size later.
            return Start(launcher, *check_ranks(launcher, names, [rank, None, local_rank, local_size]))
        if rank is not None and size is not None and local_rank is not None:
            check_site(launcher, env)
            if launcher == "srun" and local_size is not None:
                counts = ranks_of_nodes(local_size)
                node = int(env.get("SLURM_NODEID", "0"))
                texts[3] = str(counts[node] if node < len(counts) else counts[0])
            return Start(launcher, *check_ranks(launcher, names, texts))
    rank, size = env.get("RANK"), env.get("WORLD_SIZE")
    if rank is not None and size not in (None, "1"):  # each rank would train the whole model alone
        refuse("torchrun", f"RANK={rank[:40]} of WORLD_SIZE={size[:40]}", "has no LOCAL_RANK")
    return Start("single", rank=0, size=1, local_rank=0, local_size=1)


def ranks_of_nodes(text):
    """Return the number of ranks on each node of a step. Slurm writes 4(x2),3 for 4, 4 and 3.

    ValueError: Slurm does not write this.
    """
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,5})\))?", part)
        if found is None:
            refuse("srun", f"SLURM_STEP_TASKS_PER_NODE={text[:40]}", "is no list such as 4(x2),3")
        ranks, nodes = found.groups(default="1")
        for _ in range(int(nodes)):
            counts.append(int(ranks))
    return counts


def check_ranks(launcher, names, texts):
    """Return (rank, size, local rank, local size) of a launcher's variables, whose texts may be None.

    The size is -1 if it is not given. ValueError: they are not whole numbers, or no rank has such numbers.
    """
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, size, local_rank, local_size = texts
    local_size = local_size or "1"
    rank = whole_number(launcher, rank_name, rank, 0)
    local_rank = whole_number(launcher, local_rank_name, local_rank, 0)
    local_size = whole_number(launcher, local_size_name, local_size, 1)
    if size is None:
        return rank, -1, local_rank, local_size

    size = whole_number(launcher, size_name, size, 1)
    for name, value in ((rank_name, rank), (local_rank_name, local_rank)):
        if value >= size:
            refuse(launcher, f"{name}={value}", f"is no rank of {size_name}={size}")
    if local_size > size:
        refuse(launcher, f"{local_size_name}={local_size}", f"is more than {size_name}={size}")
    return rank, size, local_rank, local_size


def check_site(launcher, env):
    """ValueError: a variable that only some starts read is set, and is none that can be."""
    numbers = {"torchrun": ("MASTER_PORT", "SLURM_NODEID"),
               "srun": ("MASTER_PORT", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")}
    for name in numbers.get(launcher, ()):
        if name not in env:
            continue
        number = whole_number(launcher, name, env[name], 0)
        if name == "MASTER_PORT" and not 0 < number <= 65535:
            refuse(launcher, f"{name}={env[name]}", "is no port, the last is 65535")


def whole_number(launcher, name, text, low):
    """Return the whole number of an environment variable. ValueError: it is none, or less than low.

    Ten digits are enough for all of Slurm's numbers. The step of salloc's shell has the number 4294967290.
    """
    if not re.fullmatch("[+-]?[0-9]{1,10}", text):
        refuse(launcher, f"{name}={text[:40]}", "is not a number")
    number = int(text)
    if number < low:
        refuse(launcher, f"{name}={text}", f"is less than {low}")
    return number


def refuse(launcher, what, why):
    """ValueError, the one line about an environment that can start no rank."""
    raise ValueError(f"{what} in the environment {why}: unset it, or start the ranks with "
                     f"{STARTED_WITH.get(launcher, launcher)}")


def env_rank():
    """Return this process's rank before launch(), for example so that only one rank prints."""
    return detect(os.environ).rank


def started_by():
    """Return (launcher, number of ranks) of this process before launch()."""
    start = detect(os.environ)
    return start.launcher, start.size


def is_first_of_node():
    """Whether this process does before launch() what one process of each node does."""
    return detect(os.environ).local_rank == 0


def bare_environment():
    """Return the environment without any launcher's own variables, for a command that starts ranks itself."""
    names = {name for variables in LAUNCHERS.values() for name in variables}
    prefixes = ("PMI", "MPI_LOCAL", "HYD", "OMPI_", "PRTE_", "PALS_", "TORCHELASTIC_", "SLURM_STEP",
                "MASTER_")

    if "SLURM_STEP_ID" in os.environ:
        # A launcher would ask Slurm for another step, which waits until the step that asks has ended.
        prefixes += ("SLURM_",)

    def belongs_to_a_launcher(name):
        if name.startswith(("OMPI_ALLOW_RUN", "SLURM_CONF")):
            return False
        return name in names or name.startswith(prefixes)

    return {name: value for name, value in os.environ.items() if not belongs_to_a_launcher(name)}


def scheduler():
    """Return (name, job, nodes) of the batch system, or None without one.

    nodes: the number of nodes under SLURM, the path of the host file under PBS, or None if the system does
    not say.
    """
    if "SLURM_JOB_ID" in os.environ:
        return "SLURM", os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NUM_NODES")
    if "PBS_JOBID" in os.environ:
        return "PBS", os.environ["PBS_JOBID"], os.environ.get("PBS_NODEFILE")
    return None


@contextlib.contextmanager
def torch_reads_environment():
    """Turn torch's error about a variable that it reads when it is imported into one line and exit code 2.

    Of the ranks of a launcher, the first of each node says it. TORCH_LOGS may name a module, which torch then
    looks for.
    """
    try:
        yield
    except (ValueError, ImportError) as e:
        module = getattr(e, "name", None)
        for name, value in sorted(os.environ.items()):
            is_named = re.search(rf"\b{name}\b", str(e)) or module in re.findall(r"\w+", value)
            if name.startswith("TORCH") and is_named:
                break
        else:
            raise
        if is_first_of_node():
            why = str(e).strip().splitlines()[0][:120]
            complain(one_line(f"nanoshard: {name}={value[:60]} in the environment is nothing that torch "
                              f"knows ({why}): unset it"))
        raise SystemExit(Outcome.WRONG_INPUT) from None


@contextlib.contextmanager
def wrong_environment():
    """Turn a ValueError, of variables that can start no rank, into one line and exit code 2."""
    try:
        yield
    except ValueError as e:
        complain(f"nanoshard: {one_line(e)}")
        raise SystemExit(Outcome.WRONG_INPUT) from None

"""How many files and connections a rank may have open, and how many it needs."""
import os
import resource

OWN_FILES = 256  # files that a rank has open besides its connections: libraries, data shards, checkpoints
SPARE = 64  # files that a rank opens later, and its connections to the tree


def needed(n_ranks):
    """Return how many files a rank needs at most in a run of so many ranks.

    The store of rank 0 has a connection to each rank. On a CPU the process groups have one to each rank, too.
    """
    return OWN_FILES + 2 * n_ranks


def open_now():
    """Return how many files and connections this process has open. Without /proc, none is counted."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def raise_limit():
    """Let this process open as many files as its hard limit allows, and return that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # the system's own limit is lower
            hard = soft
    return float("inf") if hard == resource.RLIM_INFINITY else hard


def check(n_ranks, connections, limit):
    """Raise ValueError, with the number needed, if a rank may not open so many connections as well.

    n_ranks: of the run. limit: what raise_limit() returned.
    """
    if open_now() + connections + SPARE > limit:
        need = needed(n_ranks)
        raise ValueError(f"{n_ranks} ranks need ulimit -n {need}, and the hard limit is {limit}: raise it "
                         f"(ask the site, or docker run --ulimit nofile={need}), or start fewer ranks")

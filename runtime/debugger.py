"""--pdb RANK: breakpoint() stops that rank in pdb, anywhere in the code, and does nothing on the other ranks.

    attach_stdin    the chosen rank reads what is typed at the launcher; the others ignore breakpoint()

Launchers give the terminal to rank 0 (mpiexec, srun) and read it themselves, so the chosen rank cannot open
/dev/tty. Rank 0 passes on what is typed, through a socket that is protected by a secret of these two ranks.
The debugger's answers come back through the launcher, as all output does. torchrun's ranks share the terminal
already. Nothing times out in such a run.
"""
import os
import secrets
import socket
import sys
import threading

from interface.terminal import say


def attach_stdin(world, rank):
    """Connect the chosen rank's stdin to what is typed, and turn breakpoint() off on the other ranks.

    rank: the chosen rank, or -1 to do nothing. Collective over the world.
    """
    if rank < 0:
        return
    if world.rank != rank:
        sys.breakpointhook = _ignore_breakpoint
    else:
        say(f"nanoshard: rank {rank} of {world.size} stops in pdb, the others wait; n: next line, s: into "
            "a call, c: go on (to a breakpoint() in the code, if any), q: end the run")
    if world.size == 1:
        return

    server = address = None
    if world.rank == rank and rank != 0 and not sys.stdin.isatty():
        is_alone = world.n_nodes == 1
        server = socket.create_server(("127.0.0.1" if is_alone else "", 0))
        host = "127.0.0.1" if is_alone else socket.gethostname()
        port = server.getsockname()[1]
        address = host, port, secrets.token_hex(16)
    # host, port and secret, from the chosen rank to all, over the world
    address = world.everyone.first(address)

    if world.rank == 0 and address is not None:
        threading.Thread(target=_forward_stdin, args=address, daemon=True).start()
    if server is not None:
        _, _, secret = address
        sys.stdin = _accept(server, secret)


def _ignore_breakpoint(*args, **kwargs):
    """Do nothing: the breakpoint() of a rank that was not chosen."""


def _accept(server, secret):
    """Return the stream from rank 0, which sends the secret first. Other processes may find the open port."""
    with server:
        while True:
            connection, _ = server.accept()
            typed = connection.makefile("r")
            if secrets.compare_digest(typed.readline().strip(), secret):
                return typed


def _forward_stdin(host, port, secret):
    """Send what arrives on the stdin of rank 0 to the chosen rank."""
    with socket.create_connection((host, port)) as there:
        there.sendall(f"{secret}\n".encode())
        # Not sys.stdin: its lock would be held when the interpreter ends.
        while data := os.read(0, 1 << 16):
            there.sendall(data)

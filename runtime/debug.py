"""--pdb RANK: breakpoint() stops that rank in pdb, wherever it stands in the code; the others pass it by.

Launchers give the terminal to rank 0 (mpiexec, srun) and read it themselves, so that the chosen rank cannot
open /dev/tty beside them. Rank 0 hands what is typed on to the chosen rank, through a socket that asks for a
word only these two know; its answers come through the launcher as all output does. torchrun's ranks
have the terminal already. Nothing times out in such a run: the others wait in their next collective.
"""
import os
import pdb
import secrets
import socket
import sys
import threading

FOR_EVER = 30 * 86400.0  # seconds


def attend(world, rank):
    """Make rank's stdin what is typed at the launcher, and breakpoint() nothing on all others. Collective."""
    if world.rank != rank:
        sys.breakpointhook = lambda *args, **kw: None
    if world.size == 1:
        return
    server = meeting = None
    if world.rank == rank and rank != 0 and not sys.stdin.isatty():
        server = socket.create_server(("127.0.0.1" if world.n_nodes == 1 else "", 0))
        host = "127.0.0.1" if world.n_nodes == 1 else socket.gethostname()
        meeting = host, server.getsockname()[1], secrets.token_hex(16)
    # an address and a word from the chosen rank, over the world
    address = world.axis.broadcast_object(meeting, rank)
    if world.rank == 0 and address is not None:
        threading.Thread(target=_hand_on, args=address, daemon=True).start()
    if server is not None:
        while True:
            line = server.accept()[0].makefile("r")
            if secrets.compare_digest(line.readline().strip(), meeting[2]):
                break  # rank 0, and not somebody who found an open port
        server.close()
        sys.stdin = line


def _hand_on(host, port, word):
    """Rank 0: what arrives on its stdin, to the chosen rank."""
    with socket.create_connection((host, port)) as there:
        there.sendall(f"{word}\n".encode())
        while data := os.read(0, 1 << 16):  # not sys.stdin: its lock would be held when the interpreter ends
            there.sendall(data)


def stop_here(world, rank):
    """The chosen rank's prompt, in the caller's frame."""
    if world.rank == rank:
        print(f"nanoshard: rank {rank} of {world.size} stops in pdb, the others wait; n: next line, s: into "
              "a call, c: go on (to a breakpoint() in the code, if any), q: end the run", flush=True)
        pdb.Pdb().set_trace(sys._getframe(1))

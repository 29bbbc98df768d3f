"""By which address the ranks of other nodes reach this host."""
import contextlib
import socket
import struct

SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


def of_interface(name):
    """Return the IPv4 address of a network interface. OSError: it has none."""
    import fcntl
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        answer = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])


def on_route(store, interface):
    """Return the address of this host from which it reaches the store: the other ranks reach it there.

    store: a TCPStore. interface: the name of the one to take, or "".
    """
    with contextlib.suppress(OSError):
        return of_interface(interface)

    while hasattr(store, "underlying_store"):  # torchrun's store has a prefix
        store = store.underlying_store
    family, kind, _, _, where = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(where)  # sends nothing
        address = s.getsockname()[0]
    if not address.startswith("127."):
        return address

    # The store is here, under a name that leads to the loopback. The host's own name may lead elsewhere.
    try:
        own = socket.gethostbyname(socket.gethostname())
        socket.create_server((own, 0)).close()
        return own
    except OSError:
        return address

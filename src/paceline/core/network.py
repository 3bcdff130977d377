"""The addresses and network interfaces of this host."""

import ipaddress
import socket
import struct
from collections.abc import Iterator

_SIOCGIFADDR = 0x8915
#: A documentation address (RFC 5737): any route that leaves this host.
_ANYWHERE = "192.0.2.1"


def source_address(towards: str | None = None, port: int = 9) -> str:
    """Return the address of this host from which packets to ``towards`` (default: any other host)
    are sent. Nothing is sent.

    Raises:
        OSError: the name does not resolve, or there is no route.
    """
    address = (towards or _ANYWHERE, port)
    family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def is_local_address(address: str) -> bool:
    """Return whether the address is one of this host's."""
    is_loopback = ipaddress.ip_address(address.split("%")[0]).is_loopback
    return is_loopback or interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return str(name)
    return None


def interfaces() -> Iterator[tuple[str, str | None]]:
    """Yield the name and the IPv4 address (None: it has none) of each interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                yield name, None
            else:
                yield name, socket.inet_ntoa(answer[20:24])

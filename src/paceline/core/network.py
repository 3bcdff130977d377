"""The addresses and network interfaces of this host."""

import ipaddress
import socket
from collections.abc import Iterator

#: An address for documentation (RFC 5737), which stands for any other host.
_OTHER_HOST = "192.0.2.1"


def source_address(towards: str | None = None, port: int = 9) -> str:
    """Return the address of this host from which packets to ``towards`` (default: any other host)
    would be sent. Sends nothing.

    Raises:
        OSError: the name does not resolve, or there is no route.
    """
    host = towards or _OTHER_HOST
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_local_address(address: str) -> bool:
    """Return whether the address belongs to this host."""
    return _is_loopback(address) or interface_of(address) is not None


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return str(name)
    return None


def network_address() -> str | None:
    """Return an address of this host that other hosts may reach; None without a network. The first
    interface that has one decides if there is no route to other hosts."""
    try:
        return source_address()
    except OSError:
        pass
    addresses = (address for _, address in interfaces() if address is not None)
    return next((each for each in addresses if not _is_loopback(each)), None)


def names_loopback(name: str, address: str) -> bool:
    """Return whether a host name resolves to an address that other hosts cannot reach. Debian gives
    a host's own name the address 127.0.1.1."""
    try:
        ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return _is_loopback(address) and name.lower() not in ("localhost", "localhost.localdomain")
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def interfaces() -> Iterator[tuple[str, str | None]]:
    """Yield the name and the IPv4 address (None if it has none) of each interface."""
    import psutil

    addresses = psutil.net_if_addrs()
    for _, name in socket.if_nameindex():
        ipv4 = [
            entry.address for entry in addresses.get(name, []) if entry.family == socket.AF_INET
        ]
        yield name, ipv4[0] if ipv4 else None

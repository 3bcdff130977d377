"""How this host is found by others: its name, its interface, a port."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from paceline.doctor.check import Check, broken, doubtful, well

_SIOCGIFADDR = 0x8915
_CHOSEN_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check_host_name(several_hosts: bool = False) -> Check:
    """The host's own name leads to an address: gloo looks it up."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        advice = (
            f"add a line for {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface's"
            " name"
        )
        return (broken if several_hosts else doubtful)(
            "host_name", f"{name} does not resolve", advice
        )
    if several_hosts and str(address).startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        advice = (
            f"let {name} lead to the address that the other hosts see, or set GLOO_SOCKET_IFNAME"
        )
        return doubtful("host_name", f"{name} is {address}, which no other host reaches", advice)
    return well("host_name", f"{name} is {address}")


def check_interface(head: str | None = None) -> Check:
    """The interface that traffic takes, and that those which the environment names are there.
    ``head``: the host to be reached; else any outside."""
    known = dict(interfaces())
    for variable in _CHOSEN_BY:
        given = os.environ.get(variable)
        names = [one.lstrip("=^") for one in (given or "").split(",") if one]
        if (
            names
            and not (given or "").startswith("^")
            and not any(name.startswith(tuple(names)) for name in known)
        ):
            return broken(
                "interface",
                f"{variable}={given}, and there is no such interface",
                f"one of {', '.join(known)}; or unset {variable}",
            )
    address = own_address(head)
    if address is None:
        return well(
            "interface",
            "no way out of this host: loopback alone"
            + (f"; {head} cannot be reached" if head else ""),
        )
    name = next((name for name, one in known.items() if one == address), "of unknown name")
    return well("interface", f"{name} ({address})")


def own_address(towards: str | None = None) -> str | None:
    """The address that this host has on the way to another. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # by default a documentation address (RFC 5737): any way out
            probe.connect((towards or "192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def interfaces() -> Iterator[tuple[str, str | None]]:
    """Name and IPv4 address (None: it has none) of each."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                yield name, None
            else:
                yield name, socket.inet_ntoa(answer[20:24])


def check_port() -> Check:
    """Ranks of this host can meet: a port of the loopback can be had."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return broken(
            "port",
            f"127.0.0.1: {error.strerror or error}",
            "bring the loopback interface up: `ip link set lo up`",
        )
    return well("port", "a free port answers on 127.0.0.1")

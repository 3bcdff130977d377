"""How this host is found by others: its name and its interface."""

import os
import socket

from paceline.core.check import Check, broken, doubtful, well
from paceline.core.network import interfaces, source_address

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
    try:
        address = source_address(head)
    except OSError:
        return well(
            "interface",
            "no way out of this host: loopback alone"
            + (f"; {head} cannot be reached" if head else ""),
        )
    name = next((name for name, one in known.items() if one == address), "of unknown name")
    return well("interface", f"{name} ({address})")

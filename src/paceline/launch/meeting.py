"""Where the hosts of a run meet, and which of them is the head."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.launch.board import DEFAULT_PORT, answers, interface_of, is_own, own_address
from paceline.world.host import host_name

Say = Callable[[str, str], None]


@dataclass(frozen=True)
class Meeting:
    """Where the hosts meet.

    Args:
        own: this host's address, on the way to the head.
        leads: this host is the head.
    """

    address: str
    port: int
    own: str
    interface: str
    leads: bool
    node_rank: int | None


def meet(config: Config, say: Say) -> Meeting:
    """Where this host meets the others, and whether it is the head.

    Raises:
        ConfigError: what is said of the hosts does not go together, or no way leads to the head.
    """
    parallel = config.parallel
    if parallel.rdzv_endpoint is None:
        raise ConfigError(
            f"`parallel.nnodes: {parallel.nnodes}` needs the address by which the hosts meet",
            fix="set `parallel.rdzv_endpoint` to an address of one of them, e.g. `parallel.rdzv_endpoint=10.0.0.1`",
        )
    node_rank = None if parallel.node_rank == "auto" else int(parallel.node_rank)
    if node_rank is not None and node_rank >= parallel.hosts[1]:
        raise ConfigError(
            f"`parallel.node_rank: {node_rank}` with `parallel.nnodes: {parallel.nnodes}`",
            allowed=f"0 to {parallel.hosts[1] - 1}, or auto",
        )
    name, port = _split(parallel.rdzv_endpoint)
    try:
        address = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
        own = own_address(address, port)
    except OSError as error:
        raise ConfigError(
            f"`parallel.rdzv_endpoint: {parallel.rdzv_endpoint}` cannot be reached from here: {error.strerror or error}",
            fix="give an address, or a name that resolves on every host, and see `paceline doctor`",
        ) from error
    local = is_own(address)
    if node_rank == 0 and not local:
        raise ConfigError(
            f"this host is `parallel.node_rank: 0`, and `rdzv_endpoint: {parallel.rdzv_endpoint}` is not an address of it",
            fix="set `parallel.rdzv_endpoint` to an address of node 0, or leave `parallel.node_rank` out",
        )
    if local:
        own = address
    leads = local and node_rank in (None, 0) and not (node_rank is None and answers(address, port, within_s=1.0))
    if leads and answers(address, port, within_s=1.0):
        raise ConfigError(
            f"port {port} of {address} is in use: another run, or another program, listens there",
            fix=f"set another port, the same on every host: `parallel.rdzv_endpoint={name}:{port + 1}`",
        )
    interface = parallel.interface or interface_of(own)
    if interface is None or interface not in dict(socket.if_nameindex()).values():
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"`parallel.interface: {interface}` is none of this host's", allowed=names)
    say("info", f"{'head' if leads else 'host'} {host_name()}: {own} on {interface}, the head is {address}:{port}")
    return Meeting(address, port, own, interface, leads, 0 if leads else node_rank)


def _split(head: str) -> tuple[str, int]:
    name, colon, port = head.rpartition(":")
    if not colon or (":" in name and not head.startswith("[")):
        return head.strip("[]"), DEFAULT_PORT
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"`parallel.rdzv_endpoint: {head}`: {port!r} is no port", allowed="ADDRESS or ADDRESS:PORT, with 1 to 65535"
        )
    return name.strip("[]"), int(port)

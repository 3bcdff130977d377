"""The rendezvous endpoint of a run over several hosts: its address, whether it is this host, the
interface that leads to it."""

import ipaddress
import socket
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.core.network import interface_of, is_local_address, source_address

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Endpoint:
    """The rendezvous endpoint as this host reaches it.

    Args:
        name, port: as in `parallel.rdzv_endpoint`.
        address: what ``name`` resolves to.
        local_address: of this host, on the way to the endpoint.
        interface: the network interface that has ``local_address``.
        is_local: ``address`` is an address of this host.
    """

    name: str
    port: int
    address: str
    local_address: str
    interface: str
    is_local: bool

    def __str__(self) -> str:
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"{host}:{self.port}"


def check_endpoint(parallel: Parallel) -> None:
    """Check what can be known without a network.

    Raises:
        ConfigError: no endpoint, a port that is not a number, a `node_rank` that does not exist, an
            unknown interface.
    """
    if parallel.rdzv_endpoint is None:
        raise ConfigError(
            f"`parallel.nnodes: {parallel.nnodes}` needs the address at which the hosts meet",
            fix=(
                "set `parallel.rdzv_endpoint` to an address of one of the hosts, the same on every"
                " host, e.g. `parallel.rdzv_endpoint=10.0.0.1`"
            ),
        )
    parse_endpoint(parallel.rdzv_endpoint)
    node_rank = parallel.node_rank
    if node_rank != "auto" and int(node_rank) >= parallel.hosts[1]:
        raise ConfigError(
            f"`parallel.node_rank: {node_rank}` does not exist with `parallel.nnodes:"
            f" {parallel.nnodes}`",
            allowed=f"0 to {parallel.hosts[1] - 1}, or auto",
        )
    names = [name for _, name in socket.if_nameindex()]
    if parallel.interface is not None and parallel.interface not in names:
        raise ConfigError(
            f"this host has no network interface `{parallel.interface}` (`parallel.interface`)",
            allowed=", ".join(names),
        )


def parse_endpoint(text: str) -> tuple[str, int]:
    """``HOST`` or ``HOST:PORT`` as (host, port). IPv6 addresses with a port are in brackets.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    name, colon, port = text.rpartition(":")
    if not colon or (":" in name and not name.startswith("[")):
        return text.strip("[]"), DEFAULT_PORT
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"`parallel.rdzv_endpoint: {text}` has no valid port: {port!r}",
            allowed="HOST or HOST:PORT, with 1 to 65535",
        )
    return name.strip("[]"), int(port)


def resolve_endpoint(config: Config) -> Endpoint:
    """Resolve the endpoint's name now. Names may change their address during a run, so it is
    resolved before each rendezvous.

    Raises:
        OSError: the name does not resolve (yet), or there is no route to its address; or this host
            is node 0, and the name has another host's address (still).
        ConfigError: this host is node 0, and the address in the config is another host's.
    """
    parallel = config.parallel
    name, port = parse_endpoint(str(parallel.rdzv_endpoint))
    address = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
    is_local = is_local_address(address)
    local_address = address if is_local else source_address(address, port)
    if parallel.node_rank == 0 and not is_local and not _is_literal(name):
        # A host or a pod that came back has another address, and its name may still have the old
        # one for a while.
        raise OSError(
            f"{name} is {address}, which is not an address of this host, although it is node 0"
        )
    if parallel.node_rank == 0 and not is_local:
        raise ConfigError(
            "this host is `parallel.node_rank: 0`, but `parallel.rdzv_endpoint:"
            f" {parallel.rdzv_endpoint}` is the address of another host",
            fix=(
                "set `parallel.rdzv_endpoint` to an address of node 0, or leave"
                " `parallel.node_rank` out"
            ),
        )
    interface = parallel.interface or interface_of(local_address)
    if interface is None:
        raise OSError(f"no network interface has the address {local_address}")
    return Endpoint(name, port, address, local_address, interface, is_local)


def _is_literal(name: str) -> bool:
    try:
        ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return False
    return True


def is_listening(address: str, port: int, timeout_s: float) -> bool:
    """Return whether something accepts connections there."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False

"""The rendezvous endpoint of a run on several hosts: resolve its address, warn if it is public,
serve or find its store, and watch the connection to it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import psutil

from paceline.cluster.clock import ClockServer, check_clock
from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.network import (
    interface_of,
    interfaces,
    is_local_address,
    names_loopback,
    network_address,
    source_address,
)
from paceline.core.processes import host_name
from paceline.distributed.environment import scheduled_host

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Endpoint:
    """The rendezvous endpoint and this host's route to it.

    Args:
        name: host name or address in `parallel.rdzv_endpoint`.
        port: port in `parallel.rdzv_endpoint`, or the default.
        address: IP address that ``name`` resolves to.
        local_address: IP address of this host from which it connects to the endpoint.
        interface: network interface with ``local_address``.
        is_local: whether ``address`` is an address of this host.
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
    """Check the settings of the rendezvous without using the network.

    Raises:
        ConfigError: if the endpoint is missing, the port is invalid, the `node_rank` is out of
            range, or the network interface does not exist.
    """
    if parallel.rdzv_endpoint is None:
        raise ConfigError(
            "`parallel.nnodes: {nnodes}` requires `parallel.rdzv_endpoint`",
            code="missing-endpoint",
            fix="set `parallel.rdzv_endpoint` to an address of one of the hosts, the same on every"
            " host, e.g. `parallel.rdzv_endpoint=10.0.0.1`",
            nnodes=parallel.nnodes,
        )
    parse_endpoint(parallel.rdzv_endpoint)
    node_rank = parallel.node_rank
    if node_rank != "auto" and int(node_rank) >= parallel.hosts[1]:
        raise ConfigError(
            "`parallel.node_rank: {node_rank}` does not exist with `parallel.nnodes: {nnodes}`",
            code="node-rank-out-of-range",
            allowed="0 to {last_hosts}, or auto",
            node_rank=node_rank,
            nnodes=parallel.nnodes,
            last_hosts=parallel.hosts[1] - 1,
        )
    names = [name for _, name in socket.if_nameindex()]
    if parallel.network_interface is not None and parallel.network_interface not in names:
        raise ConfigError(
            "`parallel.network_interface: {network_interface}`: this host has no such network"
            " interface",
            code="unknown-network-interface",
            allowed=", ".join(names),
            network_interface=parallel.network_interface,
        )


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse ``HOST`` or ``HOST:PORT``. IPv6 addresses with a port are in brackets.

    Raises:
        ConfigError: if the port is not a number from 1 to 65535.
    """
    name, colon, port = text.rpartition(":")
    if not colon or (":" in name and not name.startswith("[")):
        return text.strip("[]"), DEFAULT_PORT
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            "`parallel.rdzv_endpoint: {text}`: invalid port {port}",
            code="invalid-port",
            allowed="HOST or HOST:PORT, with a port from 1 to 65535",
            text=text,
            port=f"{port!r}",
        )
    return name.strip("[]"), int(port)


def resolve_endpoint(config: Config) -> Endpoint:
    """Resolve the name of the endpoint. Its address may change during a run, so it is resolved
    before each rendezvous.

    Raises:
        OSError: if the name does not resolve (yet), if there is no route to its address, or if this
            host is node 0 but the name (still) resolves to the address of another host.
        ConfigError: if this host is node 0 but the configured address belongs to another host.
    """
    parallel = config.parallel
    name, port = parse_endpoint(str(parallel.rdzv_endpoint))
    address = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
    if names_loopback(name, address):  # the name of this host
        address = _address_on(parallel.network_interface) or address
    is_local = is_local_address(address)
    local_address = address if is_local else source_address(address, port)
    if parallel.node_rank == 0 and not is_local:
        if _parse_address(name) is None:
            # A host or pod that was replaced has a new address, but its name may resolve to the old
            # one for a while.
            raise OSError(f"{name} is {address}, not an address of this host, which is node 0")
        raise ConfigError(
            "this host is `parallel.node_rank: 0`, but `parallel.rdzv_endpoint: {rdzv_endpoint}`"
            " is the address of another host",
            code="endpoint-of-another-host",
            fix="set `parallel.rdzv_endpoint` to an address of node 0, or remove"
            " `parallel.node_rank`",
            rdzv_endpoint=parallel.rdzv_endpoint,
        )
    interface = parallel.network_interface or interface_of(local_address)
    if interface is None:
        raise OSError(f"no network interface has the address {local_address}")
    return Endpoint(name, port, address, local_address, interface, is_local)


def _address_on(interface: str | None) -> str | None:
    """Return this host's address on a network interface (default: towards other hosts), or None."""
    if interface is None:
        return network_address()
    return dict(interfaces()).get(interface)


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address. Return None for a host name."""
    try:
        return ip_address(text.partition("%")[0].strip("[]"))
    except ValueError:
        return None


def is_listening(address: str, port: int, timeout_s: float) -> bool:
    """Return whether a program accepts connections at this address and port."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False


_CONSEQUENCE = (
    "Anyone who reaches this port can run code on your hosts. Use a private network, or block the"
    " port for all other addresses."
)


def is_public(address: str) -> bool:
    """Return whether this is a global unicast address; False for a host name."""
    parsed = _parse_address(address)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed is not None and parsed.is_global and not parsed.is_multicast


def public_address_warning(address: str) -> str | None:
    """Return a warning if the rendezvous endpoint's address is public."""
    if not is_public(address):
        return None
    return (
        f"The rendezvous endpoint {address} is a public address, and the rendezvous has no"
        f" authentication. {_CONSEQUENCE}"
    )


def public_listener_warning(port: int, local_addresses: list[str] | None = None) -> str | None:
    """Return a warning if the rendezvous store of this host also listens on a public address.

    torch's TCPStore listens on all addresses of its host, even if the endpoint is a private one.

    Args:
        local_addresses: addresses of this host; default: the addresses of its interfaces.
    """
    if local_addresses is None:
        entries = itertools.chain.from_iterable(psutil.net_if_addrs().values())
        local_addresses = [entry.address for entry in entries]
    public = [address for address in local_addresses if is_public(address)]
    if not public:
        return None
    return (
        f"The rendezvous store listens on port {port} of all addresses of this host, including the"
        f" public {', '.join(public)}. {_CONSEQUENCE}"
    )


_CHECK_INTERVAL_S = 2.0
_CONNECT_TIMEOUT_S = 3.0
#: Time without an answer after which the endpoint is considered lost. (Accepting a connection is
#: not an answer: the kernel does that even if all processes of the host are paused.)
_LOST_AFTER_S = 30.0


class EndpointWatch:
    """A context manager that closes this process's connections to the endpoint once the endpoint is
    unreachable, or once its name resolves to another address that answers. Does nothing on the
    endpoint's host."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EndpointWatch:
        if not self.endpoint.is_local:
            self._thread = threading.Thread(target=self._run, name="endpoint-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        answered_at = time.monotonic()
        while not self._ended.wait(_CHECK_INTERVAL_S):
            if is_listening(self.endpoint.address, self.endpoint.port, _CONNECT_TIMEOUT_S):
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > _LOST_AFTER_S or self._has_moved():
                close_connections(self.endpoint.address, self.endpoint.port)
                answered_at = time.monotonic()

    def _has_moved(self) -> bool:
        """Return whether the endpoint answers at another address of its name."""
        try:
            resolved = socket.getaddrinfo(
                self.endpoint.name, self.endpoint.port, type=socket.SOCK_STREAM
            )
        except OSError:
            return False
        addresses = {str(entry[4][0]) for entry in resolved} - {self.endpoint.address}
        return any(
            is_listening(address, self.endpoint.port, _CONNECT_TIMEOUT_S) for address in addresses
        )


def close_connections(address: str, port: int) -> None:
    """Shut down all TCP connections of this process to this address, so that code that is waiting
    for an answer gets an error."""
    for descriptor in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed in the meantime
            peer = descriptor.getpeername()
            if (str(peer[0]).removeprefix("::ffff:"), peer[1]) == (address, port):
                descriptor.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process, and close it afterwards."""
    try:
        numbers = os.listdir("/dev/fd")
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            # Check before duplicating: a duplicate that cannot become a socket object would remain
            # open, with its locks.
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as duplicate:
                if (
                    duplicate.family in (socket.AF_INET, socket.AF_INET6)
                    and duplicate.type == socket.SOCK_STREAM
                ):
                    yield duplicate


logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 15.0
_STORE_TIMEOUT_S = 20.0
_JOB_KEY = "paceline/job"


class EndpointStore:
    """The rendezvous store of the hosts.

    Attributes:
        is_host: whether this process serves the store, or None if that is not known yet.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.is_host: bool | None = None
        self._announced: str | None = None
        self._store: Any = None
        self._clock: Any = None

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def find(self, left_s: float, limit_s: float) -> Endpoint | None:
        """Wait until the endpoint answers or this host serves it. Return None if that takes longer
        than ``left_s``. The name is resolved at each attempt, because it may not resolve yet or may
        get another address."""
        deadline, logged_at, problem = time.monotonic() + left_s, time.monotonic(), ""
        while True:
            try:
                endpoint = resolve_endpoint(self.config)
                is_host = self._opens_store(endpoint)
                self._announce(endpoint, is_host)
                if is_host or is_listening(endpoint.address, endpoint.port, timeout_s=2.0):
                    self.is_host = is_host
                    return endpoint
                problem = "does not answer"
            except OSError as error:
                problem = f"cannot be resolved or reached ({error.strerror or error})"
            now = time.monotonic()
            if now > deadline:
                return None
            if now - logged_at > _LOG_INTERVAL_S:
                logged_at = now
                waited_s = limit_s - (deadline - now)
                logger.info(
                    "the endpoint %s %s; waiting for it (%.0f of %.0f s)",
                    self.config.parallel.rdzv_endpoint,
                    problem,
                    waited_s,
                    limit_s,
                    extra=CONSOLE_ONLY,
                )
            time.sleep(0.3)

    def _opens_store(self, endpoint: Endpoint) -> bool:
        """Return whether this process serves the rendezvous store, and open it the first time. If
        there are two processes on one host, the first one or the one with `node_rank: 0` serves it.
        A negative result is not final: the name of a host that was replaced may still resolve to
        its old address."""
        from torch.distributed import DistError, TCPStore

        if self.is_host is not None:
            return self.is_host
        node_rank = self.config.parallel.node_rank
        if not endpoint.is_local or node_rank not in ("auto", 0):
            return False
        if is_listening(endpoint.address, endpoint.port, timeout_s=1.0):
            if node_rank == 0:
                raise _in_use(endpoint)
            return False
        try:
            # elastic opens a store in this process at the same port, which shares this one.
            self._store = TCPStore(
                endpoint.address, endpoint.port, is_master=True, wait_for_workers=False,
                multi_tenant=True, timeout=timedelta(seconds=60),
            )  # fmt: skip
        except (DistError, OSError, RuntimeError) as error:
            raise _in_use(endpoint) from error
        self._store.set(_JOB_KEY, _job())
        return True

    def _announce(self, endpoint: Endpoint, is_host: bool) -> None:
        """Log the role of this host once."""
        role = (
            f"{'endpoint' if is_host else 'host'} {host_name()}: {endpoint.local_address} on"
            f" {endpoint.interface}; the rendezvous is at {endpoint}"
        )
        if role == self._announced:
            return
        self._announced = role
        logger.info(role, extra=CONSOLE_ONLY)
        warnings = [public_address_warning(endpoint.address)]
        if is_host:
            warnings.append(public_listener_warning(endpoint.port))
        for warning in warnings:
            if warning is not None:
                logger.warning(warning, extra=CONSOLE_ONLY)

    def check_run(self, endpoint: Endpoint) -> None:
        """Check that the store belongs to the same job, and that the clocks of the hosts agree,
        because elastic compares heartbeat times with the local wall clock.

        Raises:
            ConfigError: if another job has opened the store, or if the clock of this host differs
                from the clock of another host.
        """
        from torch.distributed import TCPStore

        if self.is_host:
            self._clock = self._clock or ClockServer(self._store)
            return
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
        )
        check_clock(store, timeout_s=_STORE_TIMEOUT_S)
        # Two jobs whose first hosts are the same can have the same port.
        owner, job = store.get(_JOB_KEY).decode() if store.check([_JOB_KEY]) else "", _job()
        if owner and job and owner != job:
            raise _in_use(endpoint, f"{owner} (this is {job})")


def _job() -> str:
    host = scheduled_host()
    return "" if host is None else host.job


def _in_use(endpoint: Endpoint, user: str = "another run or program") -> ConfigError:
    return ConfigError(
        "port {port} of {address} is already in use by {user}",
        code="port-in-use",
        fix="set another port, the same on every host:"
        " `parallel.rdzv_endpoint={endpoint}:{next_port}`",
        port=endpoint.port,
        address=endpoint.address,
        user=user,
        endpoint=endpoint.name,
        next_port=endpoint.port + 1,
    )

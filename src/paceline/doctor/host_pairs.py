"""The preflight checks between hosts: one process per host, which needs only a store that all of
them can reach.

They run before a process group exists, so that they can tell what would prevent one from forming.
Messages in the store are JSON.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from paceline.core.errors import RunError
from paceline.core.formatting import counted
from paceline.core.processes import host_name
from paceline.doctor.checks import nvidia_driver
from paceline.doctor.host_probe import TOKEN_BYTES, HostProbe, Responder, probe, try_port
from paceline.launch.passes.host_checks import CheckResult
from paceline.version import __version__

logger = logging.getLogger(__name__)

_PREFIX = "paceline/preflight"
#: Rounds of measurements. In each of them a host measures with at most one other host.
MAX_ROUNDS = 8
_STEP_TIMEOUT_S = 120.0
#: How long the endpoint host waits for more hosts once the minimum number has joined.
_LAST_CALL_S = 10.0
_POLL_S = 0.2

#: (source host, target host) → port → result of :func:`try_port`
Reach = dict[tuple[int, int], dict[int, str]]


@dataclass(frozen=True)
class Findings:
    """The measurements of all hosts; equal on all of them.

    Args:
        facts: facts about each host, the endpoint host first.
        num_expected: maximum number of hosts.
        probes: (measuring host, other host) → its measurements, or the error.
        num_unmeasured: pairs left out because there are too many hosts.
    """

    facts: list[HostFacts]
    num_expected: int
    reach: Reach = field(default_factory=dict)
    probes: dict[tuple[int, int], HostProbe | str] = field(default_factory=dict)
    num_unmeasured: int = 0


def inspect_hosts(
    store: Store,
    facts: HostFacts,
    *,
    is_endpoint: bool,
    hosts: tuple[int, int],
    wait_s: float,
) -> Findings:
    """Measure between all hosts; each of them calls this once.

    Args:
        store: clients of one store.
        is_endpoint: True on exactly one host.
        hosts: the minimum and the maximum number of hosts.
        wait_s: how long the endpoint host waits for the others.

    Raises:
        RunError: a host stopped responding.
    """
    exchange = _Exchange(store)
    token = os.urandom(TOKEN_BYTES)
    with Responder(facts.address, token) as responder:
        message = {
            "facts": asdict(facts),
            "token": token.hex(),
            "tcp": responder.tcp_ports,
            "udp": responder.udp_port,
        }
        index, count = exchange.join(message, is_endpoint, hosts, wait_s)
        peers = [exchange.read(f"facts/{number}") for number in range(count)]
        everyone = [HostFacts.from_dict(dict(peer["facts"])) for peer in peers]
        if count == 1:
            return Findings(everyone, hosts[1])
        names = ", ".join(host.name for host in everyone)
        logger.info("measuring between %s: %s", counted(count, "host"), names)
        reach = _reach(exchange, index, peers)
        probes, num_unmeasured = _probe_all(exchange, index, peers, reach)
        exchange.barrier("done", index, count)
    return Findings(everyone, hosts[1], reach, probes, num_unmeasured)


class _Exchange:
    """Values in the store that each host writes once and all hosts read."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(_PREFIX, store)

    def write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def read(self, key: str, timeout_s: float = _STEP_TIMEOUT_S) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as error:  # torch's DistError
            raise RunError(
                "another host stopped responding during the checks between hosts (no {key} within"
                " {timeout_s} s)",
                code="host-stopped-responding",
                fix="read the output of `paceline doctor` on the other hosts",
                key=f"{key!r}",
                timeout_s=f"{timeout_s:.0f}",
            ) from error
        return json.loads(self._store.get(key))

    def join(
        self, message: Any, is_endpoint: bool, hosts: tuple[int, int], wait_s: float
    ) -> tuple[int, int]:
        """Return this host's index (0: the endpoint host) and the number of hosts."""
        if not is_endpoint:
            index = self._store.add("joined", 1)
            self.write(f"facts/{index}", message)
            count = int(self.read("count", wait_s + _STEP_TIMEOUT_S))
            if index >= count:
                raise RunError(
                    "this host joined after the checks between {count:host} started",
                    code="joined-too-late",
                    fix="start the command on all hosts within {wait_s} s, and set"
                    " `parallel.nnodes` to their number",
                    count=count,
                    wait_s=f"{wait_s:.0f}",
                )
            return index, count
        self.write("facts/0", message)
        until = time.monotonic() + wait_s
        last_call: float | None = None
        while (count := 1 + self._store.add("joined", 0)) < hosts[1] and time.monotonic() < until:
            if count >= hosts[0]:
                last_call = last_call or time.monotonic()
                until = min(until, last_call + _LAST_CALL_S)
            time.sleep(_POLL_S)
        count = min(count, hosts[1])
        self.write("count", count)
        return 0, count

    def barrier(self, name: str, index: int, count: int) -> None:
        self.write(f"{name}/{index}", True)
        for number in range(count):
            self.read(f"{name}/{number}")
        # The endpoint host serves the store, so it leaves last.
        if index:
            self._store.add(f"{name}/left", 1)
            return
        until = time.monotonic() + _LAST_CALL_S
        while self._store.add(f"{name}/left", 0) < count - 1 and time.monotonic() < until:
            time.sleep(0.01)


def _reach(exchange: _Exchange, index: int, peers: list[Any]) -> Reach:
    """Test which ports of each host accept a connection from each other host."""
    targets = [
        (number, port, peer)
        for number, peer in enumerate(peers)
        if number != index
        for port in peer["tcp"]
    ]
    with ThreadPoolExecutor(max_workers=min(32, len(targets))) as pool:
        outcomes = pool.map(
            lambda target: try_port(
                target[2]["facts"]["address"], target[1], bytes.fromhex(target[2]["token"])
            ),
            targets,
        )
        exchange.write(
            f"reach/{index}",
            [
                [number, port, text]
                for (number, port, _), text in zip(targets, outcomes, strict=True)
            ],
        )
    reach: Reach = {}
    for source in range(len(peers)):
        for number, port, text in exchange.read(f"reach/{source}"):
            reach.setdefault((source, number), {})[port] = text
    return reach


def _probe_all(
    exchange: _Exchange, index: int, peers: list[Any], reach: Reach
) -> tuple[dict[tuple[int, int], HostProbe | str], int]:
    rounds = schedule(len(peers))
    probes: dict[tuple[int, int], HostProbe | str] = {}
    for pairs in rounds[:MAX_ROUNDS]:
        directions = [
            direction for pair in pairs if (direction := _direction(pair, reach)) is not None
        ]
        for source, target in directions:
            if source == index:
                exchange.write(
                    f"probe/{source}/{target}",
                    _probe(peers[source], peers[target], reach[source, target]),
                )
        for source, target in directions:
            outcome = exchange.read(f"probe/{source}/{target}")
            probes[source, target] = (
                outcome["error"] if "error" in outcome else HostProbe(**outcome)
            )
    return probes, sum(map(len, rounds[MAX_ROUNDS:]))


def _probe(source: Any, target: Any, ports: dict[int, str]) -> dict[str, float | str | None]:
    port = next(port for port, text in ports.items() if text == "open")
    mtus = (source["facts"]["mtu_bytes"], target["facts"]["mtu_bytes"])
    try:
        token = bytes.fromhex(target["token"])
        return asdict(probe(target["facts"]["address"], port, target["udp"], token, mtus))
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _direction(pair: tuple[int, int], reach: Reach) -> tuple[int, int] | None:
    """Return (source, target) such that the source can connect to the target; None if neither host
    can connect to the other."""
    for direction in (pair, pair[::-1]):
        if "open" in reach.get(direction, {}).values():
            return direction
    return None


def schedule(count: int) -> list[list[tuple[int, int]]]:
    """Divide all pairs into rounds in which each host occurs at most once (the circle method of
    round-robin tournaments)."""
    players = list(range(count + count % 2))
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

#: rtnetlink(7)
_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLMSG_ERROR = 20, 22, 3, 2
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL, _IFA_CACHEINFO = 1, 2, 6
_INFINITE = 0xFFFFFFFF


@dataclass(frozen=True)
class HostFacts:
    """What the hosts need to know about each other.

    Args:
        address: the one that the other hosts connect to.
        mtu_bytes: MTU of the interface; None if it is not known.
        lease_s: seconds until the address expires (a DHCP lease, or an IPv6 router's prefix); None
            for a static address, or if the kernel does not report it.
        ephemeral_ports: the range from which the kernel takes the ports of Gloo and NCCL; None if
            it is not known.
        versions: name → version; "none" if it is not installed.
        checks: results of the checks of this host alone.
        gradient_bytes: size of the config's gradients; None if it is not known.
    """

    name: str
    address: str
    interface: str
    mtu_bytes: int | None
    lease_s: int | None
    ephemeral_ports: tuple[int, int] | None
    versions: dict[str, str]
    checks: list[CheckResult]
    gradient_bytes: int | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HostFacts:
        """Build from the JSON of ``asdict``."""
        ports = values["ephemeral_ports"]
        values["ephemeral_ports"] = None if ports is None else (ports[0], ports[1])
        values["checks"] = [CheckResult(**check) for check in values["checks"]]
        return cls(**values)


def collect_facts(
    address: str, interface: str, checks: list[CheckResult], gradient_bytes: int | None = None
) -> HostFacts:
    return HostFacts(
        host_name(),
        address,
        interface,
        interface_mtu(interface),
        address_lease_s(address),
        ephemeral_ports(),
        versions(),
        checks,
        gradient_bytes,
    )


def interface_mtu(interface: str) -> int | None:
    import psutil

    stats = psutil.net_if_stats().get(interface)
    return None if stats is None else int(stats.mtu)


def ephemeral_ports() -> tuple[int, int] | None:
    """Return the first and the last port that the kernel assigns to sockets that do not request
    one."""
    try:
        low, high = _PORT_RANGE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(low), int(high)


def versions() -> dict[str, str]:
    """Return the versions that must or should be equal on all hosts."""
    nccl = "none"
    if (
        torch.version.cuda
        and torch.distributed.is_available()
        and torch.distributed.is_nccl_available()
    ):
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "Paceline": __version__,
        "NCCL": nccl,
        "NVIDIA driver": nvidia_driver() or "none",
    }


def address_lease_s(address: str) -> int | None:
    """Return for how many seconds an address of this host is valid; None if it does not expire, or
    if the kernel does not report it."""
    try:
        messages = _address_messages()
    except OSError:
        return None
    ip_address = address.partition("%")[0]
    for family, attributes in messages:
        raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        cache_info = attributes.get(_IFA_CACHEINFO)
        if raw is None or cache_info is None or socket.inet_ntop(family, raw) != ip_address:
            continue
        _, valid_s = struct.unpack_from("=II", cache_info)
        return None if valid_s == _INFINITE else int(valid_s)
    return None


def _address_messages() -> list[tuple[socket.AddressFamily, dict[int, bytes]]]:
    """Return family and attributes of all addresses, as `ip address show` does. Linux only."""
    netlink = getattr(socket, "AF_NETLINK", None)
    if netlink is None:
        raise OSError("netlink is not available")
    addresses: list[tuple[socket.AddressFamily, dict[int, bytes]]] = []
    with socket.socket(netlink, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(2.0)
        request = struct.pack("=IHHII", 24, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + struct.pack(
            "=BBBBI", 0, 0, 0, 0, 0
        )
        kernel.sendto(request, (0, 0))
        while True:
            data = kernel.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return addresses
                if kind == _RTM_NEWADDR and data[16] in (socket.AF_INET, socket.AF_INET6):
                    addresses.append((socket.AddressFamily(data[16]), _attributes(data[24:length])))
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    attributes = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        attributes[kind] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return attributes

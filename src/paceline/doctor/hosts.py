"""The checks of `paceline doctor` on several hosts before any rank starts: one process per host."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from pydantic import JsonValue
from torch.distributed import PrefixStore, Store, TCPStore

from paceline.cluster.clock import MAX_SKEW_S
from paceline.cluster.endpoint import public_address_warning, public_listener_warning
from paceline.core.errors import ConfigError, RunError, first_line
from paceline.core.network import interface_of, source_address
from paceline.distributed.environment import RankEnv
from paceline.doctor.host_pairs import collect_facts, inspect_hosts
from paceline.doctor.host_probe import try_port
from paceline.doctor.host_report import HostLink, evaluate, host_links, local_checks
from paceline.launch.passes.host_checks import CheckResult

#: How long a host may take to start.
WAIT_S = 120.0
#: How long a port may leave packets unanswered before a firewall is assumed.
_SILENT_S = 15.0
_TRY_TIMEOUT_S = 3.0
#: Ports on which a running host often answers, if only by refusing: SSH, HTTP, HTTPS, and one that
#: nothing listens on.
_OTHER_PORTS = (22, 80, 443, 9)


@dataclass(frozen=True)
class HostEndpoint:
    """The rendezvous endpoint as this host reaches it.

    Args:
        address: resolved.
        local_address, interface: address and interface of this host on the route to ``address``.
        is_host: this host serves the rendezvous store.
    """

    address: str
    port: int
    local_address: str
    interface: str
    is_host: bool


@dataclass(frozen=True)
class HostsReport:
    """Result of the checks between hosts; equal on all hosts.

    Args:
        is_first: this host prints it.
        gradient_bytes: size of the config's gradients; None if it is not known.
        blocks_ranks: ranks on these hosts could not form a process group, or a run would refuse the
            hosts.
    """

    checks: list[CheckResult]
    is_first: bool
    links: list[HostLink] = field(default_factory=list)
    hosts: list[dict[str, JsonValue]] = field(default_factory=list)
    gradient_bytes: int | None = None
    blocks_ranks: bool = True


def inspect_endpoint_and_hosts(
    endpoint: HostEndpoint,
    hosts: tuple[int, int],
    checks: list[CheckResult],
    gradient_bytes: int | None,
) -> HostsReport:
    """Connect to the endpoint, then measure between the hosts. ``checks``: of this host alone."""
    unreachable = check_own_port(endpoint) if endpoint.is_host else reach_endpoint(endpoint)
    if unreachable is not None:
        return HostsReport([*checks, unreachable], is_first=True)
    store = open_endpoint_store(endpoint)
    rendezvous = CheckResult.passed(
        "rendezvous_port", f"{endpoint.address} accepts connections on port {endpoint.port}"
    )
    warning = public_address_warning(endpoint.address)
    if warning is None and endpoint.is_host:
        warning = public_listener_warning(endpoint.port)
    if warning is not None:
        rendezvous = CheckResult.warning(
            "rendezvous_port", warning, "in the firewall, let only the hosts of the run reach it"
        )
    report = inspect_over_store(store, endpoint, hosts, [*checks, rendezvous], gradient_bytes)
    del store  # the launcher of the ranks opens its own on the same port
    _wait_until_closed(endpoint)
    return report


def inspect_over_store(
    store: Store,
    endpoint: HostEndpoint,
    hosts: tuple[int, int],
    checks: list[CheckResult],
    gradient_bytes: int | None,
) -> HostsReport:
    """Run the checks between hosts over a store that all hosts can reach."""
    facts = collect_facts(endpoint.local_address, endpoint.interface, checks, gradient_bytes)
    try:
        findings = inspect_hosts(
            store, facts, is_endpoint=endpoint.is_host, hosts=hosts, wait_s=WAIT_S
        )
    except RunError as error:
        advice = error.fix or "read the output on the other hosts"
        return HostsReport([CheckResult.error("hosts", error.what, advice)], is_first=True)
    between = evaluate(findings, MAX_SKEW_S)
    return HostsReport(
        [*local_checks(findings.facts), *between],
        endpoint.is_host,
        host_links(findings),
        [
            {key: value for key, value in asdict(host).items() if key != "checks"}
            for host in findings.facts
        ],
        findings.facts[0].gradient_bytes,
        any(check.fatal for check in between),
    )


# -- under an outer launcher
def inspect_from_ranks(
    env: RankEnv, examine: Callable[[str], tuple[list[CheckResult], int | None]]
) -> tuple[HostsReport | None, bool]:
    """Run the checks between hosts from ranks that an outer launcher started, before they form a
    process group. Every rank calls this.

    Args:
        examine: runs the checks of this host alone; its argument is the endpoint's address.

    Returns:
        The report (on local rank 0 of each host), and whether it blocks the ranks.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        address, port, is_master=serves, multi_tenant=True, timeout=timedelta(seconds=5 * WAIT_S)
    )
    verdicts = PrefixStore("paceline/preflight", store)
    report = None
    if env.local_rank == 0:
        local = _address_towards(address)
        interface = interface_of(local) or "an unknown interface"
        endpoint = HostEndpoint(address, port, local, interface, env.rank == 0)
        num_hosts = int(os.environ.get("GROUP_WORLD_SIZE", env.world_size // env.local_world_size))
        checks, gradient_bytes = examine(address)
        report = inspect_over_store(store, endpoint, (num_hosts, num_hosts), checks, gradient_bytes)
        if env.rank == 0:
            verdicts.set("verdict", json.dumps(report.blocks_ranks))
    return report, bool(json.loads(verdicts.get("verdict")))


# -- the endpoint
def check_own_port(endpoint: HostEndpoint) -> CheckResult | None:
    """Check on the endpoint host that it can listen on the endpoint's port and connect to it. None
    without a problem."""
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    try:
        with socket.create_server((endpoint.address, endpoint.port), family=family):
            outcome = try_port(endpoint.address, endpoint.port, timeout_s=_TRY_TIMEOUT_S)
    except OSError as error:
        return CheckResult.error(
            "rendezvous_port",
            f"this host cannot listen on port {endpoint.port} of {endpoint.address}:"
            f" {error.strerror or error}",
            "stop the program that uses the port, or set another port on every host:"
            " `parallel.rdzv_endpoint=HOST:PORT`",
        )
    if outcome == "open":
        return None
    return CheckResult.error(
        "rendezvous_port",
        f"this host cannot connect to its own port {endpoint.port} of {endpoint.address}"
        f" ({outcome}): a firewall on this host blocks it",
        f"allow it: `nft add rule inet filter input tcp dport {endpoint.port} accept`, or `iif lo"
        " accept` before the rule that drops it",
    )


def reach_endpoint(
    endpoint: HostEndpoint, wait_s: float = WAIT_S, silent_s: float = _SILENT_S
) -> CheckResult | None:
    """Wait until the endpoint's port accepts connections. None if it does, else the diagnosis.

    Args:
        wait_s: how long the port may refuse connections, because the endpoint host has not started.
        silent_s: how long it may not answer at all, as behind a firewall.
    """
    start = time.monotonic()
    silent_since: float | None = None
    while True:
        outcome = try_port(endpoint.address, endpoint.port, timeout_s=_TRY_TIMEOUT_S)
        now = time.monotonic()
        if outcome == "open":
            return None
        silent_since = None if outcome == "refused" else silent_since or now
        if now - start > wait_s or (silent_since is not None and now - silent_since > silent_s):
            return diagnose_endpoint(endpoint, outcome)
        time.sleep(0.5)


def diagnose_endpoint(endpoint: HostEndpoint, outcome: str) -> CheckResult:
    """Explain why the rendezvous port cannot be reached. ``outcome``: of
    :func:`~paceline.doctor.host_probe.try_port`."""
    target = f"port {endpoint.port} of {endpoint.address}"
    if outcome == "refused":
        return CheckResult.error(
            "rendezvous_port",
            f"{target} refuses connections: nothing listens there, or a firewall rejects them",
            f"start the same command on {endpoint.address}; if it runs there, allow TCP from"
            f" {endpoint.local_address} to port {endpoint.port} there",
        )
    answering = [
        port
        for port in _OTHER_PORTS
        if try_port(endpoint.address, port, timeout_s=1.0) in ("open", "refused")
    ]
    if answering:
        return CheckResult.error(
            "rendezvous_port",
            f"{target} does not answer ({outcome}), but port {answering[0]} of the same host does:"
            f" a firewall drops the packets from {endpoint.local_address}",
            f"allow it on {endpoint.address}: `nft add rule inet filter input ip saddr"
            f" {endpoint.local_address} tcp dport {endpoint.port} accept`",
        )
    return CheckResult.error(
        "rendezvous_port",
        f"{target} does not answer ({outcome}), and no other tested port of that host does",
        f"check that {endpoint.address} is the right address, that the host is up, and that `ping"
        f" {endpoint.address}` answers",
    )


def open_endpoint_store(endpoint: HostEndpoint) -> Store:
    """Open the store that the endpoint host serves.

    Raises:
        ConfigError: the port is in use, or another program answers there.
    """
    try:
        return TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=endpoint.is_host,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )
    except RuntimeError as error:
        raise ConfigError(
            "cannot open the rendezvous store at {address}:{port}: {reason}",
            code="rendezvous-not-opened",
            fix="set another port, the same on every host: `parallel.rdzv_endpoint=HOST:PORT`",
            address=endpoint.address,
            port=endpoint.port,
            reason=first_line(error),
        ) from error


def _wait_until_closed(endpoint: HostEndpoint) -> None:
    """On the other hosts, wait until the endpoint host has closed this store, because the ranks use
    a new one on the same port."""
    until = time.monotonic() + 5.0
    while not endpoint.is_host and time.monotonic() < until:
        if try_port(endpoint.address, endpoint.port, timeout_s=1.0) != "open":
            return
        time.sleep(0.05)


def _address_towards(endpoint: str) -> str:
    """Return this host's address on the route to the endpoint."""
    # On the endpoint host itself, its name may resolve to the loopback address.
    for target in (endpoint, None):
        with contextlib.suppress(OSError):
            address = source_address(target)
            if not address.startswith("127."):
                return address
    return "127.0.0.1"

"""Test the preflight checks between hosts in network namespaces, with typical problems of real
networks."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from namespaces import create_network, create_two_host_network
from not_run import record_not_run, skip_with_summary

from paceline.doctor.host_pairs import Findings, HostFacts, schedule
from paceline.doctor.host_probe import HostProbe
from paceline.doctor.host_report import evaluate
from paceline.launch.passes.host_checks import CheckResult

_HOST = """
import json, sys
from dataclasses import asdict
from paceline.doctor.hosts import HostEndpoint, check_own_port, inspect_endpoint_and_hosts
from paceline.doctor.hosts import reach_endpoint

address, is_host, blocked_port = sys.argv[1], sys.argv[2] == "0", int(sys.argv[3])
result = {}
if blocked_port and not is_host:
    endpoint = HostEndpoint("192.0.2.1", blocked_port, address, "eth0", False)
    dropped = reach_endpoint(endpoint, silent_s=0.0)
    endpoint = HostEndpoint("192.0.2.1", blocked_port + 1, address, "eth0", False)
    refused = reach_endpoint(endpoint, wait_s=0.0)
    result["endpoint"] = [asdict(dropped), asdict(refused)]
if blocked_port and is_host:
    endpoint = HostEndpoint("192.0.2.1", blocked_port, address, "eth0", True)
    result["own"] = asdict(check_own_port(endpoint))
endpoint = HostEndpoint("192.0.2.1", 29500, address, "eth0", is_host)
report = inspect_endpoint_and_hosts(endpoint, (2, 2), [], None)
result["checks"] = [asdict(check) for check in report.checks]
result |= {"links": report.links, "blocks": report.blocks_ranks}
print(json.dumps(result))
"""


@pytest.fixture
def network(pytestconfig: pytest.Config) -> Iterator[Any]:
    with create_two_host_network(pytestconfig) as network:
        yield network


def _run_hosts(
    network: Any, blocked_port: int = 0, prefix: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Run the checks on both hosts; return their results. ``prefix``: prefix of the second host's
    command."""
    processes = []
    for number, address in enumerate(network.addresses):
        arguments = [sys.executable, "-c", _HOST, address, str(number), str(blocked_port)]
        command = network.on(number, [*(prefix if number else ()), *arguments])
        environment = {**os.environ, "PACELINE_HOST": f"host{number}"}
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            results.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return results


def _by_name(checks: list[dict[str, Any]]) -> dict[str, CheckResult]:
    return {check["name"]: CheckResult(**check) for check in checks}


def _run_on(network: Any, number: int, *command: str) -> None:
    subprocess.run(network.on(number, list(command)), check=True)


@pytest.mark.soak
@pytest.mark.alone
def test_detects_firewall_small_mtu_address_lease_and_clock_skew(
    network: Any, pytestconfig: pytest.Config
) -> None:
    if shutil.which("nft") is None:
        skip_with_summary(
            pytestconfig,
            "nft",
            "with a firewall between namespaces: nft not found (apt install nftables)",
        )
    for number in (0, 1):
        _run_on(network, number, "nft", "add table inet t")
        _run_on(
            network, number, "nft", "add chain inet t input { type filter hook input priority 0; }"
        )
    # Host 0 drops packets to one port; host 1 drops new connections to all ephemeral ports.
    _run_on(network, 0, "nft", "add rule inet t input tcp dport 29511 drop")
    _run_on(
        network,
        1,
        "nft",
        "add rule inet t input tcp dport 32768-60999 tcp flags & (syn|ack) == syn drop",
    )
    # The switch only forwards packets smaller than the MTU of the interfaces, and sends no ICMP
    # message.
    subprocess.run(["ip", "-n", network.switch, "link", "set", "p1", "mtu", "1400"], check=True)
    _run_on(network, 1, "ip", "addr", "flush", "dev", "eth0")
    _run_on(
        network,
        1,
        "ip",
        "addr",
        "add",
        "192.0.2.2/24",
        "dev",
        "eth0",
        "valid_lft",
        "3600",
        "preferred_lft",
        "3600",
    )
    has_faketime = shutil.which("faketime") is not None
    if not has_faketime:
        record_not_run(
            pytestconfig,
            "faketime",
            "NOT RUN: the doctor with a shifted clock: faketime not found (apt install faketime).",
        )
    first, second = _run_hosts(network, 29511, ("faketime", "-f", "+8s") if has_faketime else ())

    dropped, refused = (CheckResult(**check) for check in second["endpoint"])
    assert dropped.fatal
    assert (
        "port 29511 of 192.0.2.1 does not answer (no answer), but port 22 of the same host does: a"
        " firewall" in dropped.value
    )
    assert "ip saddr 192.0.2.2 tcp dport 29511 accept" in str(dropped.advice)
    assert "port 29512 of 192.0.2.1 refuses connections" in refused.value
    assert (
        "cannot connect to its own port 29511 of 192.0.2.1 (no answer): a firewall on this host"
        in first["own"]["value"]
    )

    assert first["blocks"]
    assert second["blocks"]
    checks = _by_name(first["checks"])
    assert checks["ports"].fatal
    assert "host0 → host1: 3 of 3 ports blocked: " in checks["ports"].value
    assert "host1 → host0" not in checks["ports"].value
    assert "tcp dport 32768-60999 accept" in str(checks["ports"].advice)
    assert not checks["mtu"].ok
    assert (
        "host0 → host1: eth0 of host0 has MTU 1500, but only packets of up to 1400 bytes arrive"
        in checks["mtu"].value
    )
    assert not checks["address"].ok
    assert checks["address"].value.startswith("192.0.2.2 of host1 expires in ")
    if has_faketime:
        assert checks["clock_skew"].fatal
        # Measured by host 1, because host 0 cannot connect to it.
        assert "the clock of host0 is 8.0 s behind that of host1" in checks["clock_skew"].value
    assert checks["versions"].ok
    assert checks["packet_loss"].ok
    assert {(link["from"], link["to"]) for link in first["links"]} == {
        ("host0", "host1"),
        ("host1", "host0"),
    }
    for link in first["links"]:
        # the kernel's bridge permits an additional VLAN header
        assert link["path_mtu_bytes"] in range(1400, 1405)


@pytest.mark.soak
@pytest.mark.alone
def test_detects_packet_loss_and_latency(pytestconfig: pytest.Config) -> None:
    with create_network(pytestconfig, 2, loss=0.02, delay_s=0.01) as network:
        first, _ = _run_hosts(network)
    checks = _by_name(first["checks"])
    assert not checks["packet_loss"].ok
    assert "host0 → host1: " in checks["packet_loss"].value
    assert not checks["round_trip"].ok
    assert not checks["bandwidth"].ok
    assert not first["blocks"]
    for link in first["links"]:
        assert 0.003 < link["loss"] < 0.06  # 400 packets at 2 %
        assert 0.02 <= link["round_trip_s"] < 0.2


# -- evaluation of the measurements
A = HostFacts(
    "a",
    "10.0.0.1",
    "eth0",
    1500,
    None,
    (32768, 60999),
    {"Python": "3.11.7", "torch": "2.13.0", "NCCL": "2.29"},
    [],
)
B = replace(
    A,
    name="b",
    address="10.0.0.2",
    versions={"Python": "3.11.9", "torch": "2.13.0", "NCCL": "2.29"},
)
GOOD = Findings(
    [A, B],
    2,
    {(0, 1): {40000: "open"}, (1, 0): {50000: "open"}},
    {(0, 1): HostProbe(1e-4, 0.0, 1e9, 1e9, 0.0, 0.0, 1500, 1500)},
)


def _evaluate(findings: Findings) -> dict[str, CheckResult]:
    return {check.name: check for check in evaluate(findings, 5.0)}


def test_healthy_hosts_pass() -> None:
    checks = _evaluate(GOOD)
    assert all(check.ok for check in checks.values()), checks
    assert set(checks) == {
        *(
            "hosts",
            "versions",
            "address",
            "ports",
            "clock_skew",
            "round_trip",
            "bandwidth",
            "packet_loss",
            "mtu",
        ),
    }


@pytest.mark.parametrize(
    ("versions", "fatal", "text"),
    [
        ({"torch": "2.12.0"}, True, "torch: 2.13.0 on a, 2.12.0 on b"),
        ({"Python": "3.12.1"}, True, "Python: 3.11.7 on a, 3.12.1 on b"),
        ({"NCCL": "2.28"}, False, "NCCL: 2.29 on a, 2.28 on b"),
    ],
)
def test_reports_different_versions(versions: dict[str, str], fatal: bool, text: str) -> None:
    check = _evaluate(replace(GOOD, facts=[A, replace(B, versions={**B.versions, **versions})]))[
        "versions"
    ]
    assert (check.ok, check.fatal) == (False, fatal)
    assert check.value == text


def test_evaluation_of_measurements() -> None:
    def evaluate_with(**changes: Any) -> dict[str, CheckResult]:
        return _evaluate(replace(GOOD, probes={(0, 1): replace(GOOD.probes[0, 1], **changes)}))  # type: ignore[type-var]

    assert "b → a" in evaluate_with(bandwidth_from_bytes_s=None)["bandwidth"].value
    assert evaluate_with(bandwidth_from_bytes_s=None)["bandwidth"].fatal
    assert "duplex" in str(evaluate_with(bandwidth_from_bytes_s=1e8)["bandwidth"].advice)
    assert evaluate_with(clock_offset_s=-5.5)["clock_skew"].fatal
    assert (
        "b is 5.5 s behind the clock of a" in evaluate_with(clock_offset_s=-5.5)["clock_skew"].value
    )
    assert not evaluate_with(clock_offset_s=2.0)["clock_skew"].ok
    # within the measurement error
    assert evaluate_with(clock_offset_s=2.0, round_trip_s=4.0)["clock_skew"].ok
    assert evaluate_with(loss_to=None, loss_from=None, mtu_to_bytes=None, mtu_from_bytes=None)[
        "mtu"
    ].ok
    assert evaluate_with(mtu_from_bytes=1400)["mtu"].advice is not None
    jumbo = replace(
        GOOD,
        facts=[replace(A, mtu_bytes=9000), B],
        probes={(0, 1): replace(GOOD.probes[0, 1], mtu_to_bytes=9000)},
    )  # type: ignore[type-var]
    assert "interfaces differ: 1500, 9000" in _evaluate(jumbo)["mtu"].value
    missing = _evaluate(replace(GOOD, facts=[A]))
    assert missing["hosts"].fatal
    assert "1 of 2 connected" in missing["hosts"].value


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 16])
def test_schedule_measures_every_pair_once(count: int) -> None:
    rounds = schedule(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))


def test_address_lease_mtu_and_ephemeral_ports() -> None:
    from paceline.doctor.host_pairs import address_lease_s, ephemeral_ports, interface_mtu

    assert address_lease_s("127.0.0.1") is None
    assert interface_mtu("lo") is not None
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert ephemeral_ports() == (int(low), int(high))

"""Judge the measurements between hosts, with one sentence of advice for each problem. No I/O."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypedDict

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_duration
from paceline.doctor.host_pairs import Findings, HostFacts
from paceline.doctor.host_probe import HostProbe
from paceline.launch.passes.host_checks import CheckResult

#: Warn of a larger offset of two clocks, because logs are hard to compare. The limit of a run is in
#: ``cluster.clock``.
_SKEW_WARNING_S = 1.0
#: Three of 400 packets: one or two may be lost by chance.
_LOSS_WARNING = 0.006
_ROUND_TRIP_WARNING_S = 0.01
#: 80 % of 1 Gbit/s.
_BANDWIDTH_WARNING_BYTES_S = 1e8
_ASYMMETRY = 3.0
#: The launchers compare these before a run starts, and a difference ends it.
_MUST_BE_EQUAL = ("Python", "torch", "Paceline")


def evaluate(findings: Findings, max_skew_s: float) -> list[CheckResult]:
    """Return all checks between hosts."""
    checks = [_hosts(findings), _versions(findings.facts), _addresses(findings.facts)]
    if len(findings.facts) > 1:
        checks.append(_ports(findings))
        probes = list(_measured(findings))
        failed = [(pair, text) for pair, text in findings.probes.items() if isinstance(text, str)]
        checks += [_not_measured(findings, failed)] if failed or findings.num_unmeasured else []
        if probes:
            checks += [
                _clocks(probes, max_skew_s),
                _round_trips(probes),
                _bandwidth(probes),
                _loss(probes),
                _mtu(probes),
            ]
    return checks


#: One direction between two hosts, as JSON.
HostLink = TypedDict(
    "HostLink",
    {
        "from": str,
        "to": str,
        "round_trip_s": float,
        "bandwidth_bytes_s": float | None,
        "loss": float | None,
        "path_mtu_bytes": int | None,
        "clock_offset_s": float,
    },
)


def host_links(findings: Findings) -> list[HostLink]:
    """Return the measurements as JSON: an entry for each direction of each pair of hosts."""
    links: list[HostLink] = []
    for source, target, probe in _measured(findings):
        links.append(
            {
                "from": source.name,
                "to": target.name,
                "round_trip_s": probe.round_trip_s,
                "bandwidth_bytes_s": probe.bandwidth_to_bytes_s,
                "loss": probe.loss_to,
                "path_mtu_bytes": probe.mtu_to_bytes,
                "clock_offset_s": probe.clock_offset_s,
            }
        )
        links.append(
            {
                "from": target.name,
                "to": source.name,
                "round_trip_s": probe.round_trip_s,
                "bandwidth_bytes_s": probe.bandwidth_from_bytes_s,
                "loss": probe.loss_from,
                "path_mtu_bytes": probe.mtu_from_bytes,
                "clock_offset_s": -probe.clock_offset_s,
            }
        )
    return links


def local_checks(facts: list[HostFacts]) -> list[CheckResult]:
    """Return the checks that each host ran alone, prefixed with its name."""
    return [
        replace(check, name=f"{host.name}: {check.name}") for host in facts for check in host.checks
    ]


_Measured = tuple[HostFacts, HostFacts, HostProbe]


def _measured(findings: Findings) -> Iterator[_Measured]:
    for (source, target), result in findings.probes.items():
        if isinstance(result, HostProbe):
            yield findings.facts[source], findings.facts[target], result


def _hosts(findings: Findings) -> CheckResult:
    names = ", ".join(
        f"{host.name} ({host.address} on {host.interface})" for host in findings.facts
    )
    if len(findings.facts) < findings.num_expected:
        return CheckResult.error(
            "hosts",
            f"{len(findings.facts)} of {findings.num_expected} connected: {names}",
            "start the same command on every host; a host that cannot connect prints the reason",
        )
    return CheckResult.passed("hosts", f"{counted(len(findings.facts), 'host')}: {names}")


def _versions(facts: list[HostFacts]) -> CheckResult:
    fatal, different = False, []
    for name in facts[0].versions:
        values = [_comparable(name, host.versions.get(name, "none")) for host in facts]
        if len(set(values)) > 1:
            fatal |= name in _MUST_BE_EQUAL
            by_host = ", ".join(
                f"{host.versions.get(name, 'none')} on {host.name}" for host in facts
            )
            different.append(f"{name}: {by_host}")
    if not different:
        return CheckResult.passed(
            "versions",
            ", ".join(
                f"{name} {value}" for name, value in facts[0].versions.items() if value != "none"
            ),
        )
    make_result = CheckResult.error if fatal else CheckResult.warning
    return make_result(
        "versions",
        "; ".join(different),
        "install the same versions on all hosts, for example from one container image",
    )


def _comparable(name: str, version: str) -> str:
    """Drop the patch release of Python: hosts may differ in it."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _addresses(facts: list[HostFacts]) -> CheckResult:
    leased = [(host, float(host.lease_s)) for host in facts if host.lease_s is not None]
    if not leased:
        return CheckResult.passed(
            "address", "no address that a run uses expires, as far as the kernels report it"
        )
    text = "; ".join(
        f"{host.address} of {host.name} expires in {short_duration(lease_s)}"
        for host, lease_s in leased
    )
    return CheckResult.warning(
        "address",
        f"{text} (a DHCP lease or a router's prefix)",
        "reserve the address in the DHCP server, assign a static one, or give a DNS name as"
        " `parallel.rdzv_endpoint`",
    )


def _ports(findings: Findings) -> CheckResult:
    blocked, advice = [], ""
    for (source, target), ports in sorted(findings.reach.items()):
        problems = [f"{port} ({text})" for port, text in ports.items() if text != "open"]
        if not problems:
            continue
        sender, receiver = findings.facts[source], findings.facts[target]
        blocked.append(
            f"{sender.name} → {receiver.name}: {len(problems)} of {len(ports)} ports blocked:"
            f" {', '.join(problems)}"
        )
        low, high = receiver.ephemeral_ports or (32768, 60999)
        advice = advice or (
            f"allow TCP from {sender.address} to ports {low}-{high} on {receiver.name}, and the"
            " same between all hosts, because Gloo and NCCL take their ports from this range: `nft"
            f" add rule inet filter input ip saddr {sender.address} tcp dport {low}-{high} accept`"
        )
    if blocked:
        return CheckResult.error("ports", "; ".join(blocked), advice)
    low, high = findings.facts[0].ephemeral_ports or (32768, 60999)
    return CheckResult.passed(
        "ports",
        f"the tested ports (from {low}-{high}) accept connections in every direction",
    )


def _not_measured(findings: Findings, failed: list[tuple[tuple[int, int], str]]) -> CheckResult:
    if failed:
        text = "; ".join(
            f"{findings.facts[source].name} → {findings.facts[target].name}: {error}"
            for (source, target), error in failed
        )
        return CheckResult.error(
            "host_links",
            f"the measurement failed: {text}",
            "check whether a host stopped or its network went down",
        )
    return CheckResult.passed(
        "host_links",
        f"{findings.num_unmeasured} pairs of hosts were not measured, because there are many hosts",
    )


def _clocks(probes: list[_Measured], max_skew_s: float) -> CheckResult:
    source, target, worst = max(probes, key=lambda entry: abs(entry[2].clock_offset_s))
    skew_s = abs(worst.clock_offset_s)
    certain_s = skew_s - worst.round_trip_s / 2
    order = "ahead of" if worst.clock_offset_s > 0 else "behind"
    text = f"the clock of {target.name} is {skew_s:.1f} s {order} the clock of {source.name}"
    advice = (
        "synchronize the clocks of all hosts with chrony or systemd-timesyncd; `chronyc makestep`"
        " corrects a clock at once"
    )
    if certain_s > max_skew_s:
        return CheckResult.error(
            "clock_skew", f"{text}; a run allows at most {max_skew_s:g} s", advice
        )
    if certain_s > _SKEW_WARNING_S:
        return CheckResult.warning("clock_skew", text, advice)
    return CheckResult.passed(
        "clock_skew", f"at most {short_duration(max(skew_s, worst.round_trip_s / 2))}"
    )


def _round_trips(probes: list[_Measured]) -> CheckResult:
    source, target, worst = max(probes, key=lambda entry: entry[2].round_trip_s)
    text = f"at most {short_duration(worst.round_trip_s)} ({source.name} ↔ {target.name})"
    if worst.round_trip_s > _ROUND_TRIP_WARNING_S:
        return CheckResult.warning(
            "round_trip",
            text,
            "use `parallel.mode: local_sgd`, which exchanges weights seldom",
        )
    return CheckResult.passed("round_trip", text)


def _directions(
    probes: list[_Measured], read: Callable[[HostProbe], tuple[Any, Any]]
) -> list[tuple[str, Any, HostFacts, HostFacts]]:
    """Return (``a → b``, value, sender, receiver) for each direction of each pair."""
    entries = []
    for source, target, probe in probes:
        value_to, value_from = read(probe)
        entries.append((f"{source.name} → {target.name}", value_to, source, target))
        entries.append((f"{target.name} → {source.name}", value_from, target, source))
    return entries


def _bandwidth(probes: list[_Measured]) -> CheckResult:
    rates = _directions(
        probes, lambda probe: (probe.bandwidth_to_bytes_s, probe.bandwidth_from_bytes_s)
    )
    stalled = [name for name, rate, *_ in rates if rate is None]
    if stalled:
        return CheckResult.error(
            "bandwidth",
            f"a TCP stream stalled: {', '.join(stalled)}",
            "set a smaller MTU on both hosts (`ip link set DEVICE mtu 1400`), because usually only"
            " large packets are lost",
        )
    slowest, rate, *_ = min(rates, key=lambda entry: entry[1])
    text = f"at least {human_bytes(rate)}/s ({slowest})"
    for source, target, probe in probes:
        rate_to, rate_from = probe.bandwidth_to_bytes_s or 0.0, probe.bandwidth_from_bytes_s or 0.0
        if max(rate_to, rate_from) > _ASYMMETRY * min(rate_to, rate_from):
            return CheckResult.warning(
                "bandwidth",
                f"{source.name} → {target.name}: {human_bytes(rate_to)}/s,"
                f" {target.name} → {source.name}: {human_bytes(rate_from)}/s",
                "check the cable, the duplex setting and the traffic shaping of the slower"
                " direction",
            )
    if rate < _BANDWIDTH_WARNING_BYTES_S:
        return CheckResult.warning(
            "bandwidth",
            text,
            "choose a faster interface with `parallel.network_interface`, or reduce the"
            " traffic with `parallel.compression` or `parallel.mode: local_sgd`",
        )
    return CheckResult.passed("bandwidth", text)


def _loss(probes: list[_Measured]) -> CheckResult:
    losses = _directions(probes, lambda probe: (probe.loss_to, probe.loss_from))
    known = [entry for entry in losses if entry[1] is not None]
    if not known:
        return CheckResult.passed(
            "packet_loss", "not measured: UDP is blocked (a run does not need it)"
        )
    lossy = [f"{name}: {100 * share:.1f} %" for name, share, *_ in known if share > _LOSS_WARNING]
    if lossy:
        return CheckResult.warning(
            "packet_loss",
            "; ".join(lossy),
            "check cables, switch ports and `ip -s link` for errors, because TCP slows down sharply"
            " with every lost packet",
        )
    unknown = "" if len(known) == len(losses) else "; not measured where UDP is blocked"
    return CheckResult.passed(
        "packet_loss", f"at most {100 * max(entry[1] for entry in known):.1f} %{unknown}"
    )


def _mtu(probes: list[_Measured]) -> CheckResult:
    sizes = _directions(probes, lambda probe: (probe.mtu_to_bytes, probe.mtu_from_bytes))
    known = [entry for entry in sizes if entry[1] is not None]
    if not known:
        return CheckResult.passed("mtu", "not measured: UDP is blocked (a run does not need it)")
    blocked = [
        f"{name}: {sender.interface} of {sender.name} has MTU {sender.mtu_bytes}, but only packets"
        f" of up to {size} bytes arrive"
        for name, size, sender, _ in known
        if sender.mtu_bytes is not None and size < min(sender.mtu_bytes, 65535)
    ]
    smallest = min(size for _, size, *_ in known)
    if blocked:
        return CheckResult.warning(
            "mtu",
            "; ".join(blocked),
            "set the same MTU on all hosts and switches between them, for example `ip link set"
            f" DEVICE mtu {smallest}`",
        )
    mtus = Counter(size for _, size, *_ in known)
    if len(mtus) > 1:
        return CheckResult.warning(
            "mtu",
            f"interfaces differ: {', '.join(map(str, sorted(mtus)))}",
            "set the same MTU on the interfaces of all hosts",
        )
    return CheckResult.passed(
        "mtu", f"packets of {smallest} bytes, the interfaces' MTU, arrive in every direction"
    )

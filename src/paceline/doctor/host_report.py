"""What the measurements between hosts mean for a run, with one sentence of advice for each problem.
No input or output here."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypedDict

from paceline.core.files import human_bytes
from paceline.core.formatting import counted, short_duration
from paceline.doctor.host_pairs import Findings, HostFacts
from paceline.doctor.host_probe import Probe
from paceline.launch.host_checks import CheckResult

#: Clocks further apart than this are named, because logs are hard to compare; the limit of a run is
#: in ``cluster.clock``.
_SKEW_WARNING_S = 1.0
#: Three packets of four hundred: one or two may be lost by chance.
_LOSS_WARNING = 0.006
_ROUND_TRIP_WARNING_S = 0.01
#: 80 % of 1 Gbit/s.
_BANDWIDTH_WARNING_BYTES_S = 1e8
_ASYMMETRY = 3.0
#: What the hosts compare before a run starts: a difference ends it.
_MUST_BE_EQUAL = ("Python", "torch", "Paceline")


def evaluate(findings: Findings, max_skew_s: float) -> list[CheckResult]:
    """All checks between hosts."""
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
    """The measurements for scripts: an entry for each direction of each pair of hosts."""
    links: list[HostLink] = []
    for (source, target), one in findings.probes.items():
        if isinstance(one, str):
            continue
        names = findings.facts[source].name, findings.facts[target].name
        links.append(
            {
                "from": names[0],
                "to": names[1],
                "round_trip_s": one.round_trip_s,
                "bandwidth_bytes_s": one.bandwidth_to_bytes_s,
                "loss": one.loss_to,
                "path_mtu_bytes": one.mtu_to_bytes,
                "clock_offset_s": one.clock_offset_s,
            }
        )
        links.append(
            {
                "from": names[1],
                "to": names[0],
                "round_trip_s": one.round_trip_s,
                "bandwidth_bytes_s": one.bandwidth_from_bytes_s,
                "loss": one.loss_from,
                "path_mtu_bytes": one.mtu_from_bytes,
                "clock_offset_s": -one.clock_offset_s,
            }
        )
    return links


def local_checks(facts: list[HostFacts]) -> list[CheckResult]:
    """The checks that each host made of itself, under its name."""
    return [
        replace(check, name=f"{host.name}: {check.name}") for host in facts for check in host.checks
    ]


_Measured = tuple[HostFacts, HostFacts, Probe]


def _measured(findings: Findings) -> Iterator[_Measured]:
    for (source, target), one in findings.probes.items():
        if not isinstance(one, str):
            yield findings.facts[source], findings.facts[target], one


def _hosts(findings: Findings) -> CheckResult:
    names = ", ".join(f"{one.name} ({one.address} on {one.interface})" for one in findings.facts)
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
        values = [_comparable(name, one.versions.get(name, "none")) for one in facts]
        if len(set(values)) > 1:
            fatal |= name in _MUST_BE_EQUAL
            by_host = ", ".join(f"{one.versions.get(name, 'none')} on {one.name}" for one in facts)
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
    """Patch releases of Python work together."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _addresses(facts: list[HostFacts]) -> CheckResult:
    leased = [one for one in facts if one.lease_s is not None]
    if not leased:
        return CheckResult.passed(
            "address", "no address of a run's interface expires, as far as the kernels report it"
        )
    text = "; ".join(
        f"{one.address} of {one.name} expires in {short_duration(float(one.lease_s or 0))}"
        for one in leased
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
        wrong = {port: text for port, text in ports.items() if text != "open"}
        if not wrong:
            continue
        one, other = findings.facts[source], findings.facts[target]
        which = ", ".join(f"{port} ({text})" for port, text in wrong.items())
        blocked.append(
            f"{one.name} → {other.name}: {len(wrong)} of {len(ports)} ports blocked: {which}"
        )
        low, high = other.ephemeral_ports or (32768, 60999)
        advice = advice or (
            f"allow TCP from {one.address} to ports {low}-{high} on {other.name}, and the same"
            " between all hosts, because Gloo and NCCL take their ports from this range: `nft add"
            f" rule inet filter input ip saddr {one.address} tcp dport {low}-{high} accept`"
        )
    if blocked:
        return CheckResult.error("ports", "; ".join(blocked), advice)
    low, high = findings.facts[0].ephemeral_ports or (32768, 60999)
    return CheckResult.passed(
        "ports",
        f"the ports that were tried (from {low}-{high}) accept connections in every direction",
    )


def _not_measured(findings: Findings, failed: list[tuple[tuple[int, int], str]]) -> CheckResult:
    if failed:
        text = "; ".join(
            f"{findings.facts[a].name} → {findings.facts[b].name}: {why}" for (a, b), why in failed
        )
        return CheckResult.error(
            "host_links",
            f"the measurement failed: {text}",
            "check whether a host stopped or its network went down",
        )
    return CheckResult.passed(
        "host_links",
        f"{findings.num_unmeasured} of the pairs were not measured, because there are many hosts",
    )


def _clocks(probes: list[_Measured], max_skew_s: float) -> CheckResult:
    one, other, worst = max(probes, key=lambda entry: abs(entry[2].clock_offset_s))
    skew_s = abs(worst.clock_offset_s)
    certain_s = skew_s - worst.round_trip_s / 2
    order = "ahead of" if worst.clock_offset_s > 0 else "behind"
    text = f"the clock of {other.name} is {skew_s:.1f} s {order} that of {one.name}"
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
    one, other, worst = max(probes, key=lambda entry: entry[2].round_trip_s)
    text = f"at most {short_duration(worst.round_trip_s)} ({one.name} ↔ {other.name})"
    if worst.round_trip_s > _ROUND_TRIP_WARNING_S:
        return CheckResult.warning(
            "round_trip",
            text,
            "for hosts this far from each other use `parallel.mode: local_sgd`"
            " (docs/how-to/local-sgd.md)",
        )
    return CheckResult.passed("round_trip", text)


def _directions(
    probes: list[_Measured], read: Callable[[Probe], tuple[Any, Any]]
) -> list[tuple[str, Any, HostFacts, HostFacts]]:
    """A value for each direction: (``a → b``, value, sender, receiver)."""
    entries = []
    for one, other, measured in probes:
        there, back = read(measured)
        entries.append((f"{one.name} → {other.name}", there, one, other))
        entries.append((f"{other.name} → {one.name}", back, other, one))
    return entries


def _bandwidth(probes: list[_Measured]) -> CheckResult:
    rates = _directions(probes, lambda one: (one.bandwidth_to_bytes_s, one.bandwidth_from_bytes_s))
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
    for one, other, measured in probes:
        there, back = measured.bandwidth_to_bytes_s or 0.0, measured.bandwidth_from_bytes_s or 0.0
        if max(there, back) > _ASYMMETRY * min(there, back):
            return CheckResult.warning(
                "bandwidth",
                f"{one.name} → {other.name}: {human_bytes(there)}/s, {other.name} → {one.name}:"
                f" {human_bytes(back)}/s",
                "check the cable, the duplex setting and the traffic shaping of the slower"
                " direction",
            )
    if rate < _BANDWIDTH_WARNING_BYTES_S:
        return CheckResult.warning(
            "bandwidth",
            text,
            "choose a faster interface with `parallel.interface`, or send less"
            " (docs/how-to/slow-network.md)",
        )
    return CheckResult.passed("bandwidth", text)


def _loss(probes: list[_Measured]) -> CheckResult:
    losses = _directions(probes, lambda one: (one.loss_to, one.loss_from))
    known = [entry for entry in losses if entry[1] is not None]
    if not known:
        return CheckResult.passed(
            "packet_loss", "not measured: no UDP packet arrives (a run sends none)"
        )
    named = [f"{name}: {100 * share:.1f} %" for name, share, *_ in known if share > _LOSS_WARNING]
    if named:
        return CheckResult.warning(
            "packet_loss",
            "; ".join(named),
            "check cables, switch ports and `ip -s link` for errors, because TCP slows down sharply"
            " with every lost packet",
        )
    unknown = "" if len(known) == len(losses) else "; not measured where no UDP packet arrives"
    return CheckResult.passed(
        "packet_loss", f"at most {100 * max(entry[1] for entry in known):.1f} %{unknown}"
    )


def _mtu(probes: list[_Measured]) -> CheckResult:
    passing = _directions(probes, lambda one: (one.mtu_to_bytes, one.mtu_from_bytes))
    known = [entry for entry in passing if entry[1] is not None]
    if not known:
        return CheckResult.passed("mtu", "not measured: no UDP packet arrives (a run sends none)")
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

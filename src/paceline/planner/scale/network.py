"""Networks between hosts with several levels of switches (``paceline plan --network``). Imports no
torch."""

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError

Kind = Literal["rail", "fat-tree"]

#: Ports of a leaf switch that lead to hosts: half of 64.
_DOWN_PORTS = 32


@dataclass(frozen=True)
class Network:
    """The switches between hosts.

    In a fat tree, all network cards of a host lead to the same leaf switch. With rails, card i of
    each host leads to leaf switch i, so that as many hosts as the switch has ports share a group of
    switches; ranks in the same position of their hosts are one switch apart, and NVLink connects
    the others.

    Args:
        hosts_per_switch: hosts that reach each other without the upper levels.
        oversubscription: ports to the hosts in units of ports to the upper levels, through which
            groups of more hosts communicate; 1: none.
    """

    kind: Kind
    hosts_per_switch: int
    oversubscription: float = 1.0

    def text(self) -> str:
        upper = (
            "at full rate beyond them"
            if self.oversubscription == 1
            else f"at 1/{self.oversubscription:g} of the rate beyond them"
        )
        return f"network: {self.kind}, {self.hosts_per_switch} hosts per group of switches, {upper}"


def parse_network(text: str, devices_per_host: int = 8) -> Network:
    """Parse ``KIND[:HOSTS[:OVERSUBSCRIPTION]]``, such as ``rail``, ``fat-tree:4:2``.

    The default number of hosts is for leaf switches with 64 ports, half of them to hosts.

    Raises:
        ConfigError: the kind is unknown, or a number is out of range.
    """
    kind, *rest = text.split(":")
    error = ConfigError(
        "`--network {text}` is not a network",
        code="invalid-network",
        allowed="rail or fat-tree, then the hosts per group of leaf switches (at least 1) and the"
        " oversubscription above them (at least 1), separated by colons",
        fix="write e.g. `--network rail:32` or `--network fat-tree:4:2`",
        text=text,
    )
    if kind not in ("rail", "fat-tree") or len(rest) > 2:
        raise error
    hosts = _DOWN_PORTS if kind == "rail" else max(1, _DOWN_PORTS // devices_per_host)
    try:
        hosts = int(rest[0]) if rest else hosts
        oversubscription = float(rest[1]) if len(rest) > 1 else 1.0
    except ValueError:
        raise error from None
    if hosts < 1 or not 1 <= oversubscription < float("inf"):
        raise error
    return Network("rail" if kind == "rail" else "fat-tree", hosts, oversubscription)

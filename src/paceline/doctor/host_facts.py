"""What a host reports about itself to the other hosts of a run."""

from __future__ import annotations

import platform
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.processes import host_name
from paceline.doctor.software import nvidia_driver

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: rtnetlink(7)
_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLMSG_ERROR = 20, 22, 3, 2
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL, _IFA_CACHEINFO = 1, 2, 6
_INFINITE = 0xFFFFFFFF


@dataclass(frozen=True)
class HostFacts:
    """Args: address: the one that the other hosts connect to. mtu_bytes: of the interface; None if
    it is not known. lease_s: seconds until the address expires (a DHCP lease, or an IPv6 router's
    prefix); None for a static address, or where
        the kernel does not report it.
    ephemeral_ports: the range from which the kernel takes the ports of Gloo and NCCL; None if it is
    not known.
    versions: name → version; "none" for what is not installed.
    checks: results of the checks of this host alone, as :meth:`Check.as_dict
    <paceline.core.check.Check.as_dict>`.
    gradient_bytes: size of the config's gradients; None if it is not known.
    """

    name: str
    address: str
    interface: str
    mtu_bytes: int | None
    lease_s: int | None
    ephemeral_ports: tuple[int, int] | None
    versions: dict[str, str]
    checks: list[dict[str, Any]]
    gradient_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HostFacts:
        ports = values["ephemeral_ports"]
        return cls(**{**values, "ephemeral_ports": None if ports is None else (ports[0], ports[1])})


def collect_facts(
    address: str, interface: str, checks: list[dict[str, Any]], gradient_bytes: int | None = None
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
    """The first and last of the ports that the kernel hands out to sockets without a port of their
    choice."""
    try:
        low, high = _PORT_RANGE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(low), int(high)


def versions() -> dict[str, str]:
    """Versions that must be equal, or should be, on all hosts. Imports torch."""
    import torch

    from paceline.version import __version__

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
    """Seconds for which an address of this host is valid; None if it does not expire, or if the
    kernel does not report it."""
    try:
        parts = _address_messages()
    except OSError:
        return None
    text = address.partition("%")[0]
    for family, attributes in parts:
        raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        cache_info = attributes.get(_IFA_CACHEINFO)
        if raw is None or cache_info is None or socket.inet_ntop(family, raw) != text:
            continue
        _, valid_s = struct.unpack_from("=II", cache_info)
        return None if valid_s == _INFINITE else int(valid_s)
    return None


def _address_messages() -> list[tuple[socket.AddressFamily, dict[int, bytes]]]:
    """All addresses, as `ip address show` reads them: family and attributes of each. Linux only."""
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
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found

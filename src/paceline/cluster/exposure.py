"""Warnings for ports of a run that the public internet may be able to reach.

Whoever reaches the rendezvous store can run code on the hosts: torch elastic unpickles its state
from it without authentication (``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py``). See
docs/security.md.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address

_CONSEQUENCE = (
    "Anyone who reaches this port can run code on your hosts. Use a private network, or block the"
    " port for all other addresses (docs/security.md)."
)


def is_public(address: str) -> bool:
    """Whether this is a global unicast address of IPv4 or IPv6. False for a host name: resolve it
    first."""
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.is_global and not parsed.is_multicast


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

    torch's TCPStore listens on all addresses of its host, also where the endpoint is a private one.

    Args:
        local_addresses: those of this host; by default those of its interfaces.
    """
    addresses = _local_addresses() if local_addresses is None else local_addresses
    public = [address for address in addresses if is_public(address)]
    if not public:
        return None
    return (
        f"The rendezvous store listens on port {port} of all addresses of this host, including the"
        f" public {', '.join(public)}. {_CONSEQUENCE}"
    )


def _local_addresses() -> list[str]:
    import psutil

    return [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]

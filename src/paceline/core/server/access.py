"""Which requests a server answers, by their headers.

- The Host header is checked, so that a page of another site cannot reach the server through a name
  of its own that resolves to this machine (DNS rebinding).
- The Origin header is checked, so that such a page cannot use the user's browser either.
"""

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence

from paceline.core.server.binding import is_loopback

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
_WILDCARD = {"0.0.0.0", "::", ""}
#: Of a request body.
MAX_BODY_BYTES = 8 << 20


class OwnAddress:
    """The address by which a server may be asked.

    Args:
        host: the address that the server listens on.
        port: the port that the server listens on.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host.lower(), port
        self.is_private = is_loopback(host)

    @property
    def url(self) -> str:
        """The address for messages."""
        return f"http://{'localhost' if self.is_private else self.host}:{self.port}/"

    def is_named_by(self, hosts: Sequence[str]) -> bool:
        """Return whether the Host headers of a request name this server.

        Args:
            hosts: the values of all Host headers.
        """
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None or int(match[2] or 80) != self.port:
            return False
        name = match[1].lower()
        if name in (self.host, f"[{self.host}]"):
            return self.host not in _WILDCARD
        if self.is_private:
            return name in _LOOPBACK
        # A server that is bound to all addresses accepts every numeric one: another site's name
        # can resolve to this machine, but cannot be a number.
        host_name = socket.gethostname().lower()
        names = _LOOPBACK | {host_name, f"{host_name}.local"}
        return self.host in _WILDCARD and (name in names or _is_address(name))


def is_same_origin(origins: Sequence[str], host: str) -> bool:
    """Return whether a request comes from a page of the server itself, or from no page.

    Args:
        origins: the values of all Origin headers.
        host: the Host header.
    """
    return [origin.lower() for origin in origins] in ([], [f"http://{host.lower()}"])


def is_token(values: Sequence[str], token: str) -> bool:
    """Return whether a request has the token, in constant time.

    Args:
        values: the values of all headers that can carry it.
    """
    return len(values) == 1 and hmac.compare_digest(values[0].encode(), token.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

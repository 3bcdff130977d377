"""Which address and port a server listens on."""

import errno
import ipaddress
import os
import socket

from paceline.core.errors import ConfigError, RunError
from paceline.core.network import source_address

PORT = 8765
_TRIES = 50  # ports after the one asked for


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on ``port``, or on the next one that is free (0: any)."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"`--host {host}` is not known here", fix="leave it out (127.0.0.1), or give an address"
        ) from error
    for number in range(port, min(port + _TRIES, 65536)):
        found = socket.socket(family, kind)
        if os.name == "posix":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((address[0], number, *address[2:]))
            found.listen(256)
            return found
        except OSError as error:
            found.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                what = f"`--host {host}` is no address of this machine ({error.strerror})"
                raise ConfigError(
                    what, fix="leave it out (127.0.0.1), or give one of its addresses"
                ) from error
    raise RunError(
        f"no port from {port} to {min(port + _TRIES, 65536) - 1} is free on {host}",
        fix="give another with --port",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def shown_host(host: str) -> str:
    """How a browser reaches a server bound to ``host``."""
    if host in ("0.0.0.0", "::", ""):
        try:
            return source_address()
        except OSError:
            return socket.gethostname()
    return f"[{host}]" if ":" in host else host

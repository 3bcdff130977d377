"""The address and port that a server listens on."""

import errno
import ipaddress
import os
import socket

from paceline.core.errors import ConfigError, RunError
from paceline.core.network import source_address

#: Of the panel.
PORT = 8765
_MAX_TRIES = 50


def bind(host: str, port: int, max_tries: int = _MAX_TRIES) -> socket.socket:
    """Return a listening socket on ``port``, or on the next one that is free (0: any).

    Args:
        max_tries: number of ports to try.

    Raises:
        ConfigError: ``host`` is not an address of this machine, or the only port is in use.
        RunError: no port is free.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "`--host {host}`: this name cannot be resolved",
            code="host-not-resolved",
            fix="omit --host to listen on 127.0.0.1, or use an IP address",
            host=host,
        ) from error
    end = min(port + max_tries, 65536)
    for number in range(port, end):
        listener = socket.socket(family, kind)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], number, *address[2:]))
            listener.listen(256)
            return listener
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(
                    "`--host {host}` is not an address of this machine ({reason})",
                    code="host-not-local",
                    fix="omit --host to listen on 127.0.0.1, or use one of this machine's"
                    " addresses",
                    host=host,
                    reason=error.strerror,
                ) from error
    if max_tries == 1:
        raise ConfigError(
            "port {port} on {host} is in use, or not permitted",
            code="chosen-port-in-use",
            fix="choose another with --port, or 0 for any free port",
            port=port,
            host=host,
        )
    raise RunError(
        "no port from {port} to {last_end} is free on {host}",
        code="no-free-port",
        fix="choose another with --port",
        port=port,
        last_end=end - 1,
        host=host,
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that is bound to ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def shown_host(host: str) -> str:
    """Return the host part of the URL of a server that is bound to ``host``."""
    if host in ("0.0.0.0", "::", ""):
        try:
            return source_address()
        except OSError:
            return socket.gethostname()
    return f"[{host}]" if ":" in host else host

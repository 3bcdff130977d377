"""``paceline ui``: bind, say where, serve until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import webbrowser
from pathlib import Path

import uvicorn

from paceline.core.errors import EXIT_DONE, ConfigError, RunError
from paceline.web.app import create_app
from paceline.web.panel import Panel
from paceline.web.security import is_loopback
from paceline.web.viewer import LinkedProtocol

PORT = 8765
DEFAULT_FOLDER = Path("output")
_TRIES = 50  # ports after the one asked for


def serve(folder: Path | None, port: int = PORT, host: str = "127.0.0.1", browser: bool = True, as_json: bool = False) -> int:
    """Serve the runs below ``folder`` (``./output`` by default, made where it is not there) until Ctrl-C.

    Raises:
        ConfigError: there is no such folder, or ``host`` is no address of this machine.
        RunError: no port is free.
    """
    place = _folder(folder)
    bound = bind(host, port)
    own = bound.getsockname()[1]
    panel = Panel(place, own, host)
    url = f"http://{_shown_host(host)}:{own}/?token={panel.token}"
    if own != port and port != 0:
        _say(f"port {port} is in use; this is {own}.")
    if not is_loopback(host):
        _say(
            f"warning: bound to {host}: everyone in this network who has the link can see the runs of {panel.shown_folder}, "
            "start and stop them. The link holds the token, and nothing is encrypted: who listens in the network reads it. "
            "To keep the panel to this machine: leave out --host."
        )
    if as_json:
        print(json.dumps({"url": url, "token": panel.token, "folder": panel.shown_folder}), flush=True)
    else:
        print(f"The panel for {panel.shown_folder}: {url}", flush=True)
        print("Ctrl-C ends it; runs go on.", flush=True)
    server = PanelServer(panel)
    if browser and not as_json:
        _open(url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn passes the signal on once it has ended
        server.run(sockets=[bound])
    _say("the panel has ended; runs go on.")
    return EXIT_DONE


class PanelServer(uvicorn.Server):
    """Ends its streams first: they would be waited for."""

    def __init__(self, panel: Panel) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(panel), http=LinkedProtocol, ws="none", log_level="warning", access_log=False, server_header=False,
                timeout_graceful_shutdown=3,
            )
        )  # fmt: skip
        self.panel = panel

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.panel.streams.close()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on ``port``, or on the next one that is free (0: any)."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"`--host {host}` is not known here", fix="leave it out (127.0.0.1), or give an address") from error
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
                raise ConfigError(what, fix="leave it out (127.0.0.1), or give one of its addresses") from error
    raise RunError(f"no port from {port} to {min(port + _TRIES, 65536) - 1} is free on {host}", fix="give another with --port")


def check_port(text: str) -> int:
    """``--port``.

    Raises:
        ValueError: it is no port.
    """
    port = int(text)
    if not 0 <= port <= 65535:
        raise ConfigError(f"`--port {text}` is no port", allowed="0 (any that is free) to 65535")
    return port


def _folder(given: Path | None) -> Path:
    folder = given if given is not None else DEFAULT_FOLDER
    if folder.is_dir():
        return folder
    if given is not None:
        what = "is no folder" if folder.exists() else "is not there"
        raise ConfigError(f"`{folder}` {what}", allowed="a folder below which runs are, or will be", fix=f"mkdir -p {folder}")
    folder.mkdir()
    _say(f"made the folder {folder}: runs that are started from the panel go there.")
    return folder


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return _own_address() or socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _own_address() -> str | None:
    """The address under which others reach this machine, as far as its routes tell. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def _open(url: str) -> None:
    """Show it, where there is a screen; a browser in the terminal would take it over."""
    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if screen:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    else:
        _say("there is no screen here: open the link in a browser (from another machine through `ssh -L`, with the same port).")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

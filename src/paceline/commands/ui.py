"""``paceline ui``: bind, say where, serve until Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.web.binding import PORT, bind, is_loopback, shown_host
from paceline.web.files import shown

if TYPE_CHECKING:
    from paceline.web.server import PanelServer

DEFAULT_FOLDER = Path("output")


def serve(
    folder: Path | None,
    port: int = PORT,
    host: str = "127.0.0.1",
    browser: bool = True,
    as_json: bool = False,
) -> int:
    """Serve the runs below ``folder`` (``./output`` by default, made where it is not there) until
    Ctrl-C.

    Raises:
        ConfigError: there is no such folder, or ``host`` is no address of this machine.
        RunError: no port is free.
    """
    place = _folder(folder)
    bound = bind(host, port)
    own, token, place_text = (
        bound.getsockname()[1],
        secrets.token_urlsafe(24),
        shown(os.path.realpath(place)),
    )
    url = f"http://{shown_host(host)}:{own}/?token={token}"
    if own != port and port != 0:
        _say(f"port {port} is in use; this is {own}.")
    if not is_loopback(host):
        _say(
            f"warning: bound to {host}: everyone in this network who has the link can see the runs"
            f" of {place_text}, start and stop them. The link holds the token, and nothing is"
            " encrypted: who listens in the network reads it. To keep the panel to this machine:"
            " leave out --host."
        )
    if as_json:
        print(json.dumps({"url": url, "token": token, "folder": place_text}), flush=True)
    else:
        print(f"The panel for {place_text}: {url}", flush=True)
        print("Ctrl-C ends it; runs go on.", flush=True)
    if browser and not as_json:
        _open(url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn passes the signal on once it has ended
        _server(place, own, host, token).run(sockets=[bound])
    _say("the panel has ended; runs go on.")
    return EXIT_DONE


def _server(folder: Path, port: int, host: str, token: str) -> PanelServer:
    """Loads what a server is made of, while the browser starts; who connects meanwhile waits in the
    socket's queue."""
    gc.disable()  # nothing of it is garbage; to look for some takes a tenth of the time
    from paceline.web.server import PanelServer
    from paceline.web.state import AppState

    found = PanelServer(AppState(folder, port, host, token))
    gc.freeze()
    gc.enable()
    return found


def _folder(given: Path | None) -> Path:
    folder = given if given is not None else DEFAULT_FOLDER
    if folder.is_dir():
        return folder
    if given is not None:
        what = "is no folder" if folder.exists() else "is not there"
        raise ConfigError(
            f"`{folder}` {what}",
            allowed="a folder below which runs are, or will be",
            fix=f"mkdir -p {folder}",
        )
    folder.mkdir()
    _say(f"made the folder {folder}: runs that are started from the panel go there.")
    return folder


def _open(url: str) -> None:
    """Show it, where there is a screen; a browser in the terminal would take it over."""
    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if screen:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    else:
        _say(
            "there is no screen here: open the link in a browser (from another machine through `ssh"
            " -L`, with the same port)."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

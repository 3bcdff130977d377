"""`paceline ui`: see and start runs in a browser."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import secrets
import sys
import threading
import webbrowser
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.options import AnyPath, OptionParser, Text, WholeNumber
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.web.binding import PORT, bind, is_loopback, shown_host
from paceline.web.files import shown

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from paceline.web.server import PanelServer

DEFAULT_FOLDER = Path("output")


def add_arguments(parser: OptionParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=AnyPath("a folder below which runs are, or will be"),
        metavar="FOLDER",
        help="default: ./output, which is created",
    )
    parser.add_argument(
        "--port",
        type=WholeNumber(0, 65535, "0 (any that is free) to 65535"),
        default=PORT,
        metavar="P",
        help="port, or the next one that is free",
    )
    parser.add_argument(
        "--host",
        type=Text("an address of this machine"),
        default="127.0.0.1",
        metavar="H",
        help="address to listen at",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.example = "paceline ui output --port 8080"


def run(args: Namespace) -> int:
    """Serve the runs below the folder until Ctrl-C.

    Raises:
        ConfigError: there is no such folder, or ``--host`` is not an address of this machine.
        RunError: no port is free.
    """
    folder = _existing_folder(args.folder)
    listener = bind(args.host, args.port)
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    folder_text = shown(os.path.realpath(folder))
    url = f"http://{shown_host(args.host)}:{port}/?token={token}"
    if args.port not in (0, port):
        logger.info(f"port {args.port} is in use; this is {port}.")
    if not is_loopback(args.host):
        logger.warning(
            f"bound to {args.host}: everyone in this network who has the link can see the"
            f" runs of {folder_text}, start and stop them. The link holds the token, and nothing is"
            " encrypted: who listens in the network reads it. To keep the panel to this machine:"
            " leave out --host."
        )
    if args.json:
        print(json.dumps({"url": url, "token": token, "folder": folder_text}), flush=True)
    else:
        print(f"The panel for {folder_text}: {url}", flush=True)
        print("Ctrl-C ends it; runs go on.", flush=True)
    if not args.no_browser and not args.json:
        _open(url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn passes the signal on once it has ended
        _server(folder, port, args.host, token).run(sockets=[listener])
    logger.info("the panel has ended; runs go on.")
    return EXIT_DONE


def _server(folder: Path, port: int, host: str, token: str) -> PanelServer:
    """Loads what a server is made of, while the browser starts; who connects meanwhile waits in the
    socket's queue."""
    gc.disable()  # nothing of it is garbage; to look for some takes a tenth of the time
    from paceline.web.server import PanelServer
    from paceline.web.state import AppState

    server = PanelServer(AppState(folder, port, host, token))
    gc.freeze()
    gc.enable()
    return server


def _existing_folder(requested: Path | None) -> Path:
    folder = requested if requested is not None else DEFAULT_FOLDER
    if folder.is_dir():
        return folder
    if requested is not None:
        what = "is no folder" if folder.exists() else "is not there"
        raise ConfigError(
            f"`{folder}` {what}",
            allowed="a folder below which runs are, or will be",
            fix=f"mkdir -p {folder}",
        )
    folder.mkdir()
    logger.info(f"made the folder {folder}: runs that are started from the panel go there.")
    return folder


def _open(url: str) -> None:
    """Show it, where there is a screen; a browser in the terminal would take it over."""
    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if screen:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    else:
        logger.info(
            "there is no screen here: open the link in a browser (from another machine through `ssh"
            " -L`, with the same port)."
        )

"""`paceline ui`: view and start runs in the browser."""

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

from paceline.commands.options import AnyPath, AnyText, Integer, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.core.server.binding import PORT, bind, is_loopback, shown_host
from paceline.sweep.state import STATE_FILE
from paceline.web.files import shown

if TYPE_CHECKING:
    from paceline.web.server import PanelServer

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = Path("output")


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "folder",
        AnyPath("a folder for runs"),
        "FOLDER",
        "folder with the runs (default: ./output, which is created)",
        nargs="?",
    )
    parser.add_option(
        "--port",
        Integer(0, 65535, "0 (any free port) to 65535"),
        "P",
        "port, or the next free one",
        default=PORT,
    )
    parser.add_option(
        "--host",
        AnyText("an address of this machine"),
        "H",
        "address to listen on",
        default="127.0.0.1",
    )
    parser.add_flag("--no-browser", "do not open a browser")
    parser.example = "paceline ui output --port 8080"


def run(args: Namespace) -> int:
    """Serve the runs in the folder until Ctrl-C.

    Raises:
        ConfigError: there is no such folder, or ``--host`` is not an address of this machine.
        RunError: no port is free.
    """
    folder = _existing_folder(args.folder)
    listener = bind(args.host, args.port)
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    folder_text = shown(os.path.realpath(folder))
    url = f"http://{shown_host(args.host)}:{port}/?token={token}"
    if (folder / STATE_FILE).is_file():  # the folder of a sweep: compare its runs
        url += "#/compare/all"
    if args.port not in (0, port):
        logger.info("port %d is in use; using port %d", args.port, port)
    if not is_loopback(args.host):
        logger.warning(
            f"listening on {args.host}: everyone in this network who has the link can view, start"
            f" and stop the runs in {folder_text}. The link contains the token, and the connection"
            " is not encrypted. To restrict the panel to this machine, omit --host."
        )
    if args.json:
        print(json.dumps({"url": url, "token": token, "folder": folder_text}), flush=True)
    else:
        print(f"The panel for {folder_text}: {url}", flush=True)
        print("Press Ctrl-C to stop the panel. Runs continue without it.", flush=True)
    if not args.no_browser and not args.json:
        _open(url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it ends
        _server(folder, port, args.host, token).run(sockets=[listener])
    logger.info("the panel has stopped; runs continue")
    return EXIT_DONE


def _server(folder: Path, port: int, host: str, token: str) -> PanelServer:
    """Import and create the server while the browser starts. Connections wait in the socket's queue
    until then."""
    gc.disable()  # collecting during these imports takes a tenth of their time and frees nothing
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
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(
            "`{folder}` {problem}",
            code="invalid-runs-folder",
            allowed="a folder for runs",
            fix="run `mkdir -p {folder}`",
            folder=folder,
            problem=problem,
        )
    folder.mkdir()
    logger.info("created the folder %s for runs that are started in the panel", folder)
    return folder


def _open(url: str) -> None:
    """Open the browser if there is a display: a text browser would take over the terminal."""
    has_display = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if has_display:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    else:
        logger.info(
            "no display found: open the link in a browser (on another machine through `ssh -L`,"
            " with the same port)"
        )

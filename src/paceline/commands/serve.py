"""`paceline serve`: an OpenAI-compatible server for the model of a run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
from argparse import Namespace
from pathlib import Path

from paceline.commands.options import AnyPath, AnyText, Choice, Integer, OptionParser
from paceline.core.errors import ConfigError
from paceline.core.server.access import OwnAddress
from paceline.core.server.binding import bind, is_loopback, shown_host
from paceline.core.texts import UserText

logger = logging.getLogger(__name__)

_KEY_VARIABLE = "PACELINE_API_KEY"


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("run_dir", AnyPath("its output_dir"), "RUN", "run")
    parser.add_option(
        "--adapter",
        AnyText("NAME=RUN"),
        "NAME=RUN",
        "adapter of another run with the same base model, and the name by which requests choose"
        " it; may be repeated",
        action="append",
    )
    parser.add_option(
        "--engine",
        Choice(("auto", "transformers", "vllm")),
        "NAME",
        "what generates: auto (transformers), transformers, or vllm (untested)",
        default="auto",
    )
    parser.add_option(
        "--host",
        AnyText("an address of this machine"),
        "H",
        "address to listen on",
        default="127.0.0.1",
    )
    parser.add_option(
        "--port", Integer(0, 65535, "0 (any free port) to 65535"), "P", "port", default=8000
    )
    parser.add_option(
        "--max-queue",
        Integer(0),
        "N",
        "number of requests that may wait; further ones are refused",
        default=32,
    )
    parser.add_flag("--no-token", "answer requests without a token; only on the loopback interface")
    parser.example = "paceline serve output/demo --adapter formal=output/formal"


def run(args: Namespace) -> int:
    """Answer requests until a signal.

    Raises:
        ConfigError: a model cannot be served, or the port is in use.
    """
    from paceline.inference.serving.server import end_at_signals

    token = _token(args.no_token, args.host)
    adapters = _adapters(args.adapter or [])
    listener = bind(args.host, args.port, max_tries=1)
    end_at_signals()
    port = listener.getsockname()[1]
    # The output of libraries is not part of the result.
    with contextlib.redirect_stdout(sys.stderr):
        from paceline.inference.engine.choice import load_engine
        from paceline.inference.serving.app import create_app
        from paceline.inference.serving.server import ApiServer

        engine = load_engine(args.engine, args.run_dir, adapters)
        app = create_app(engine, OwnAddress(args.host, port), token, args.max_queue)
    if not is_loopback(args.host):
        logger.warning(
            UserText(
                "listening on {host}: everyone in this network who has the token can use the"
                " models. The connection is not encrypted. To restrict the server to this machine,"
                " omit --host.",
                code="serve-open-address",
                host=args.host,
            )
        )
    url = f"http://{shown_host(args.host)}:{port}"
    _print_start(args.json, url, token, [*engine.models], engine.name)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return ApiServer(app).serve_until_signal(listener)
    finally:
        engine.close()


def _print_start(
    as_json: bool, url: str, token: str | None, models: list[str], engine: str
) -> None:
    if as_json:
        start = {"url": url, "token": token, "models": models, "engine": engine, "pid": os.getpid()}
        print(json.dumps(start), flush=True)
        return
    print(f"OpenAI-compatible server: {url}/v1", flush=True)
    print(f"Models: {', '.join(models)} (engine: {engine})", flush=True)
    print(f"Token: {token or 'none is needed'}", flush=True)
    print("Press Ctrl-C to stop the server.", flush=True)


def _token(has_none: bool, host: str) -> str | None:
    """Return the token of the server, which the programs that it starts do not see."""
    api_key = os.environ.pop(_KEY_VARIABLE, None)
    if has_none:
        if not is_loopback(host):
            raise ConfigError(
                "`--no-token` is not supported with `--host {host}`",
                code="no-token-on-network",
                allowed="--no-token on the loopback interface (127.0.0.1)",
                fix="omit one of them",
                host=host,
            )
        return None
    if api_key is None:
        return secrets.token_urlsafe(24)
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError(
            "the environment variable {variable} cannot be a token",
            code="invalid-api-key",
            allowed="visible ASCII characters without spaces, at least one",
            fix="set another value, or unset it to get a random token",
            variable=_KEY_VARIABLE,
        )
    return api_key


def _adapters(options: list[str]) -> dict[str, Path]:
    adapters: dict[str, Path] = {}
    for option in options:
        name, _, run = option.partition("=")
        if not name or not run or name in adapters:
            raise ConfigError(
                "`--adapter {option}` is not a name and a run, or repeats a name",
                code="invalid-adapter-option",
                allowed="NAME=RUN, such as `formal=output/formal`, with a name of its own",
                option=option,
            )
        adapters[name] = Path(run).expanduser()
    return adapters

"""Run Paceline commands in child processes. The server itself never imports torch."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from pydantic import JsonValue

from paceline.core.errors import (
    ERROR_FILE,
    EXIT_USAGE,
    ConfigError,
    ErrorRecord,
    PacelineError,
    RunError,
    read_error,
)
from paceline.core.processes import end_with_parent
from paceline.web.files import JSONObject

_CONFIG = "config.yaml"
_NICE = 10  # training runs have priority over these commands


class Superseded(ConfigError):
    """A newer request of the same kind has replaced this one."""


class CommandRunner:
    """Runs commands with ``--json``, one of each kind at a time: a newer one ends the older.

    Args:
        folder: the folder that commands run in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def run(
        self,
        kind: str,
        args: Sequence[str],
        yaml: str | None = None,
        timeout_s: float = 120.0,
        cwd: Path | None = None,
    ) -> JSONObject:
        """Return the JSON object that ``python -m paceline ARGS… --json`` prints.

        Args:
            kind: requests of the same kind supersede each other.
            args: the command and its arguments. ``CONFIG`` stands for a file with the text
                ``yaml``.
            yaml: the text of the config.
            timeout_s: seconds after which the command is ended.
            cwd: the folder that the command runs in; default: ``folder``.

        Raises:
            ConfigError: exit code 2, with the message of the command; :class:`Superseded`.
            RunError: the command ended without a result in any other way.
        """
        self._cancel(kind)
        with TemporaryDirectory(prefix="paceline-panel-") as scratch:
            path, record = Path(scratch) / _CONFIG, Path(scratch) / "error.json"
            if yaml is not None:
                path.write_text(yaml, encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "paceline"),
                *(str(path) if arg == "CONFIG" else arg for arg in args),
                "--json", cwd=cwd or self.folder, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "NO_COLOR": "1", ERROR_FILE: str(record)},
                start_new_session=True,
                preexec_fn=lower_priority,
            )  # fmt: skip
            self._running[kind] = process
            try:
                out, err = await asyncio.wait_for(process.communicate(), timeout_s)
            except TimeoutError:
                command = " ".join(args).replace("CONFIG", _CONFIG)
                raise RunError(
                    "`paceline {args}` was ended because it took longer than {timeout_s} s",
                    code="command-too-slow",
                    fix="run `paceline {command}` in a terminal",
                    args=args[0],
                    timeout_s=f"{timeout_s:.0f}",
                    command=command,
                ) from None
            finally:
                is_superseded = self._running.get(kind) is not process
                if not is_superseded:
                    del self._running[kind]
                end(process)
            otherwise = f"`paceline {args[0]}` ended with exit code {process.returncode}"
            output = err.decode("utf-8", "replace")
            error = error_of(record, process.returncode, otherwise, output)
        if is_superseded:
            raise Superseded(
                "a newer request has replaced this one",
                code="superseded",
                fix="wait for the result of the newer one",
            )
        if process.returncode == 0:
            with contextlib.suppress(ValueError):
                return dict(json.loads(out))
        raise _without(path, error)

    def _cancel(self, kind: str) -> None:
        running = self._running.pop(kind, None)
        if running is not None:
            end(running)

    def close(self) -> None:
        for kind in list(self._running):
            self._cancel(kind)


def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that leads its own session, with all processes of the session."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def lower_priority() -> None:
    """Give this process a low priority, and end it with its parent."""
    os.nice(_NICE)
    end_with_parent()


def error_of(path: Path, code: int | None, otherwise: str, output: str) -> PacelineError:
    """Return the error that a process has recorded in the file that :data:`ERROR_FILE` named; if it
    recorded none, ``otherwise`` with the last lines of its output."""
    return read_error(path, code) or ended_without_error(code, otherwise, output)


def ended_without_error(code: int | None, otherwise: str, output: str) -> PacelineError:
    """Return the error of a process that ended without naming one."""
    last_lines = "\n".join(output.strip().splitlines()[-3:])
    ended = RunError(
        "{otherwise}: {lines}" if last_lines else "{otherwise}",
        code="ended-without-error",
        fix="run the same command in a terminal with --debug",
        otherwise=otherwise,
        lines=last_lines,
    )
    return ConfigError.from_record(ended.record()) if code == EXIT_USAGE else ended


def _without(path: Path, error: PacelineError) -> PacelineError:
    """Return the error with the name of the config instead of its path in the scratch folder."""

    def shown(content: JsonValue) -> JsonValue:
        if isinstance(content, str):
            for text, name in ((f"{path}: ", ""), (f"{path} ", ""), (str(path), _CONFIG)):
                content = content.replace(text, name)
        elif isinstance(content, dict):
            return {key: shown(value) for key, value in content.items()}
        return content

    return type(error).from_record(cast(ErrorRecord, shown(cast(JsonValue, error.record()))))

"""Verbs of the command line as processes of their own: what needs torch is never done by the server
itself."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.core.errors import EXIT_USAGE, ConfigError, RunError
from paceline.core.processes import end_with_parent
from paceline.web.files import JSONObject

_CONFIG = "config.yaml"
_NICE = 10  # these stand back behind the runs


class Superseded(ConfigError):
    """A newer request of the same kind has taken this one's place."""


class CommandRunner:
    """Runs verbs with ``--json``, one of a kind at a time: a newer one ends the older."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def run(
        self, kind: str, words: Sequence[str], yaml: str | None = None, timeout_s: float = 120.0
    ) -> JSONObject:
        """The JSON object that ``python -m paceline WORDS… --json`` prints, and as ``said`` the
        lines that it prints beside it.

        Args:
            kind: requests of a kind supersede each other.
            words: the verb and its arguments. ``CONFIG`` in them stands for a file with the text
                ``yaml``.

        Raises:
            ConfigError: exit code 2, with the verb's own words; :class:`Superseded`.
            RunError: any other end without a result.
        """
        self.cancel(kind)
        with TemporaryDirectory(prefix="paceline-panel-") as scratch:
            path = Path(scratch) / _CONFIG
            if yaml is not None:
                path.write_text(yaml, encoding="utf-8")
            given = [str(path) if word == "CONFIG" else word for word in words]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "paceline", *given, "--json"),
                cwd=self.folder, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "NO_COLOR": "1"}, start_new_session=True, preexec_fn=_stand_back,
            )  # fmt: skip
            self._running[kind] = process
            try:
                out, err = await asyncio.wait_for(process.communicate(), timeout_s)
            except TimeoutError:
                raise RunError(
                    f"`paceline {words[0]}` took longer than {timeout_s:.0f} s, and was ended",
                    fix=(
                        "run it in a terminal: paceline"
                        f" {' '.join(words).replace('CONFIG', _CONFIG)}"
                    ),
                ) from None
            finally:
                superseded = self._running.get(kind) is not process
                if not superseded:
                    del self._running[kind]
                end(process)
        if superseded:
            raise Superseded(
                "a newer request has taken this one's place", fix="wait for the newer one"
            )
        said = (
            err.decode("utf-8", "replace")
            .replace(f"{path}: ", "")
            .replace(f"{path} ", "")
            .replace(str(path), _CONFIG)
        )
        return _result(words[0], process.returncode, out, said)

    def cancel(self, kind: str) -> None:
        """End what runs of this kind."""
        running = self._running.pop(kind, None)
        if running is not None:
            end(running)

    def close(self) -> None:
        for kind in list(self._running):
            self.cancel(kind)


def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process that leads a session of its own, and all in it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _stand_back() -> None:
    os.nice(_NICE)
    end_with_parent()


def _result(verb: str, code: int | None, out: bytes, said: str) -> JSONObject:
    if code == 0:
        with contextlib.suppress(ValueError):
            return {**json.loads(out), "said": [line for line in said.splitlines() if line.strip()]}
    raise error_of(said, code, f"`paceline {verb}` ended with exit code {code}")


def error_of(said: str, code: int | None, otherwise: str) -> ConfigError | RunError:
    """The error that a verb has printed, as it is; ``otherwise`` where it printed none."""
    _, found, told = said.rpartition("error: ")
    kind = ConfigError if code == EXIT_USAGE else RunError
    if not found or not told.strip():
        last = "\n".join(said.strip().splitlines()[-3:])
        return kind(
            f"{otherwise}: {last}" if last else otherwise,
            fix="run the same in a terminal, with --debug",
        )
    what, _, fix = (
        told.strip().partition(" To fix: ")
        if told.count(" To fix: ") == 1
        else (told.strip(), "", "")
    )
    what, _, allowed = (
        what.partition(" Allowed: ") if what.count(" Allowed: ") == 1 else (what, "", "")
    )
    return kind(what, allowed=allowed or None, fix=fix or None)

"""Chat with a run's model: a worker process that holds it, one at a time, and ends by itself when
nobody asks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.processes import end_with_parent
from paceline.web.jobs.commands import end, error_of

IDLE_S = 300.0
_LINE_BYTES = 1 << 20


class Chat:
    """Holds at most one model. ``idle_s``: so long after the last answer its worker ends."""

    def __init__(self, idle_s: float | None = None) -> None:
        self.idle_s = IDLE_S if idle_s is None else idle_s
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0

    async def answer(
        self, run: Path, request: dict[str, Any], device: str
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Events of one answer: ``state`` {state: loading | ready, device, base}, ``token`` {text},
        ``end`` {num_tokens, wall_s, stopped}, ``error`` {what, allowed, fix}. To leave the iterator
        stops the answer.

        Raises:
            ConfigError: another answer is being given.
        """
        if self._turn.locked():
            raise ConfigError(
                "the model is answering somebody already",
                fix="wait for the end of that answer, or stop it",
            )
        async with self._turn:
            self._rest()
            try:
                worker = self._worker
                if worker is None or not worker.serves(run, device):
                    yield "state", {"state": "loading"}
                    self.close()
                    self._worker = worker = await _Worker.start(run, device)
                yield "state", {"state": "ready", **await worker.ready()}
                self._number += 1
                async for event in worker.ask(self._number, request):
                    yield event
            except PacelineError as error:
                yield "error", {"what": error.what, "allowed": error.allowed, "fix": error.fix}
            finally:
                self._timer = asyncio.get_running_loop().call_later(self.idle_s, self.close)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> asyncio.subprocess.Process | None:
        """End the worker. Returns its process, where there was one."""
        self._rest()
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.close()
        return worker.process


class _Worker:
    """``paceline generate RUN --serve``. What it prints beside its answers goes to a file without a
    name."""

    def __init__(
        self, run: Path, device: str, process: asyncio.subprocess.Process, said: Any
    ) -> None:
        self.run, self.device, self.process, self._said = run, device, process, said
        self._about: dict[str, Any] | None = None

    @staticmethod
    async def start(run: Path, device: str) -> _Worker:
        said = tempfile.TemporaryFile()  # noqa: SIM115  (the worker's, until it ends)
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "paceline",
                "generate",
                str(run),
                "--serve",
                "--device",
                device,
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            limit=_LINE_BYTES,
            env={**os.environ, "NO_COLOR": "1"},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return _Worker(run, device, process, said)

    def serves(self, run: Path, device: str) -> bool:
        return self.process.returncode is None and (self.run, self.device) == (run, device)

    async def ready(self) -> dict[str, Any]:
        """Wait for the model to be loaded: on which device, and whether its base can be asked
        too."""
        while self._about is None:
            self._about = (await self._next()).get("ready")
        return self._about

    async def ask(
        self, number: int, request: dict[str, Any]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        ended = False
        try:
            await self._send({**request, "id": number})
            while not ended:
                said = await self._next()
                if said.get("id") != number:
                    continue  # of an answer that was left
                ended = "token" not in said
                if not ended:
                    yield "token", {"text": said["token"]}
                else:
                    yield ("error", said["error"]) if "error" in said else ("end", said["end"])
        finally:
            if not ended and self.process.returncode is None:
                await self._send({"stop": number})

    async def _send(self, words: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            await self.process.stdin.drain()
        except (ConnectionError, OSError):
            raise await self._gone() from None

    async def _next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise await self._gone()
        found: dict[str, Any] = json.loads(line)
        return found

    async def _gone(self) -> ConfigError | RunError:
        code = await self.process.wait()
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace")
        return error_of(said, code, f"the model's process ended (exit code {code})")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # its sign to end
        end(self.process)
        self._said.close()

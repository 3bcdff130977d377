"""Chat with a run's model: a worker process that holds it, one at a time, and ends by itself when
nobody asks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import IO

from pydantic import JsonValue

from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.processes import end_with_parent
from paceline.web.files import JSONObject, as_object
from paceline.web.jobs.commands import end, error_of

IDLE_S = 300.0
_LINE_BYTES = 1 << 20


#: Name and data of an event of an answer.
ChatEvent = tuple[str, Mapping[str, JsonValue]]


class Chat:
    """Holds at most one model, whose worker ends ``IDLE_S`` after the last answer."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0

    async def answer(
        self, run: Path, request: JSONObject, device: str
    ) -> AsyncGenerator[ChatEvent]:
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
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.close)

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
        self, run: Path, device: str, process: asyncio.subprocess.Process, output: IO[bytes]
    ) -> None:
        self.run, self.device, self.process, self._output = run, device, process, output
        self._about: JSONObject | None = None

    @staticmethod
    async def start(run: Path, device: str) -> _Worker:
        output = tempfile.TemporaryFile()  # noqa: SIM115  (the worker's, until it ends)
        words = ("generate", str(run), "--serve", "--device", device)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            limit=_LINE_BYTES,
            env={**os.environ, "NO_COLOR": "1"},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return _Worker(run, device, process, output)

    def serves(self, run: Path, device: str) -> bool:
        return self.process.returncode is None and (self.run, self.device) == (run, device)

    async def ready(self) -> JSONObject:
        """Wait for the model to be loaded: on which device, and whether its base can be asked
        too."""
        while self._about is None:
            message = await self._next()
            self._about = as_object(message["ready"]) if "ready" in message else None
        return self._about

    async def ask(self, number: int, request: JSONObject) -> AsyncGenerator[ChatEvent]:
        ended = False
        try:
            await self._send({**request, "id": number})
            while not ended:
                message = await self._next()
                if message.get("id") != number:
                    continue  # of an answer that was left
                ended = "token" not in message
                if not ended:
                    yield "token", {"text": message["token"]}
                elif "error" in message:
                    yield "error", as_object(message["error"])
                else:
                    yield "end", as_object(message["end"])
        finally:
            if not ended and self.process.returncode is None:
                await self._send({"stop": number})

    async def _send(self, message: JSONObject) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            await self.process.stdin.drain()
        except (ConnectionError, OSError):
            raise await self._gone() from None

    async def _next(self) -> JSONObject:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise await self._gone()
        return as_object(json.loads(line))

    async def _gone(self) -> ConfigError | RunError:
        code = await self.process.wait()
        self._output.seek(0)
        output = self._output.read().decode("utf-8", "replace")
        return error_of(output, code, f"the model's process ended (exit code {code})")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # its sign to end
        end(self.process)
        self._output.close()

"""Chat with the model of a run. One worker process holds one model, and ends after five minutes
without a question."""

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

from paceline.core.errors import ERROR_FILE, ConfigError, PacelineError
from paceline.core.processes import end_with_parent
from paceline.web.files import JSONObject, as_object
from paceline.web.jobs.commands import end, error_of

IDLE_S = 300.0
_LINE_BYTES = 1 << 20


#: Name and data of a server-sent event.
ChatEvent = tuple[str, Mapping[str, JsonValue]]


class ChatModel:
    """Holds at most one model, whose worker ends ``IDLE_S`` after the last answer."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._last_id = 0

    async def answer(
        self, run: Path, request: JSONObject, device: str, cwd: Path
    ) -> AsyncGenerator[ChatEvent]:
        """Yield the events of one answer: ``state`` {state: loading | ready, device, base},
        ``token`` {text}, ``end`` {num_tokens, wall_s, stopped}, ``error``, the record of
        an error.
        Closing the iterator stops the answer.

        Args:
            run: the folder of the run.
            request: the chat, as ``paceline generate --serve`` reads it.
            device: ``auto`` or ``cpu``.
            cwd: the folder at which relative paths of the run's config start.

        Raises:
            ConfigError: another answer is being generated.
        """
        if self._turn.locked():
            raise ConfigError(
                "the model is answering another question",
                code="model-busy",
                fix="wait for that answer, or stop it",
            )
        async with self._turn:
            self._stop_timer()
            try:
                worker = self._worker
                if worker is None or not worker.serves(run, device):
                    yield "state", {"state": "loading"}
                    self.close()
                    self._worker = worker = await _Worker.start(run, device, cwd)
                yield "state", {"state": "ready", **await worker.ready()}
                self._last_id += 1
                async for event in worker.ask(self._last_id, request):
                    yield event
            except PacelineError as error:
                yield "error", as_object(error.record())
            finally:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> asyncio.subprocess.Process | None:
        """End the worker. Return its process, if there was one."""
        self._stop_timer()
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.close()
        return worker.process


class _Worker:
    """A process ``paceline generate RUN --serve``. What it prints to standard error goes to an
    unnamed file."""

    def __init__(
        self,
        run: Path,
        device: str,
        process: asyncio.subprocess.Process,
        output: IO[bytes],
        scratch: tempfile.TemporaryDirectory[str],
    ) -> None:
        self.run, self.device, self.process, self._output = run, device, process, output
        self._scratch = scratch
        self._ready: JSONObject | None = None

    @staticmethod
    async def start(run: Path, device: str, cwd: Path) -> _Worker:
        output = tempfile.TemporaryFile()  # noqa: SIM115  (open until the worker ends)
        scratch = tempfile.TemporaryDirectory(prefix="paceline-panel-")
        record = Path(scratch.name) / "error.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline"),
            *("generate", str(run), "--serve", "--device", device),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            cwd=cwd,
            limit=_LINE_BYTES,
            env={**os.environ, "NO_COLOR": "1", ERROR_FILE: str(record)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return _Worker(run, device, process, output, scratch)

    def serves(self, run: Path, device: str) -> bool:
        return self.process.returncode is None and (self.run, self.device) == (run, device)

    async def ready(self) -> JSONObject:
        """Wait until the model is loaded. Return its device, and whether the base model is
        available too."""
        while self._ready is None:
            message = await self._receive()
            self._ready = as_object(message["ready"]) if "ready" in message else None
        return self._ready

    async def ask(self, id: int, request: JSONObject) -> AsyncGenerator[ChatEvent]:
        has_ended = False
        try:
            await self._send({**request, "id": id})
            while not has_ended:
                message = await self._receive()
                if message.get("id") != id:
                    continue  # the rest of an answer that was stopped
                has_ended = "token" not in message
                if not has_ended:
                    yield "token", {"text": message["token"]}
                elif "error" in message:
                    yield "error", as_object(message["error"])
                else:
                    yield "end", as_object(message["end"])
        finally:
            if not has_ended and self.process.returncode is None:
                await self._send({"stop": id})

    async def _send(self, message: JSONObject) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            await self.process.stdin.drain()
        except OSError:
            raise await self._exit_error() from None

    async def _receive(self) -> JSONObject:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise await self._exit_error()
        return as_object(json.loads(line))

    async def _exit_error(self) -> PacelineError:
        code = await self.process.wait()
        self._output.seek(0)
        output = self._output.read().decode("utf-8", "replace")
        otherwise = f"the process of the model ended with exit code {code}"
        return error_of(Path(self._scratch.name) / "error.json", code, otherwise, output)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # the worker ends when its input does
        end(self.process)
        self._output.close()
        self._scratch.cleanup()

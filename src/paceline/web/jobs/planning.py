"""Plan configs in one process that has imported everything. The server itself never imports torch,
and starting a process for each edit would take seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, cast

from paceline.core.errors import (
    EXIT_USAGE,
    ConfigError,
    ErrorRecord,
    PacelineError,
    RunError,
)
from paceline.web.files import JSONObject, as_object
from paceline.web.jobs.commands import Superseded, end, ended_without_error, lower_priority

_LINE_BYTES = 1 << 26
_TIMEOUT_S = 120.0


class _Request:
    """A config to plan. ``answer``: what its page waits for."""

    def __init__(self, content: JSONObject) -> None:
        self.content = content
        self.answer: asyncio.Future[JSONObject] = asyncio.get_running_loop().create_future()

    def fail(self, error: PacelineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Planner:
    """Sends configs to one process ``paceline plan --serve``, which is started on first use and
    ends with the server. A newer request supersedes an older one of the same page; requests of
    different pages wait for each other.

    Args:
        folder: the folder that the process is started in.

    Attributes:
        process: the process, running or not; None before the first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._last_id = 0
        #: The latest request of each page, the one that waits longest first.
        self._waiting: dict[str, _Request] = {}
        self._sent: _Request | None = None

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process if it is not running. Returns before it has imported everything."""
        async with self._starting:
            process = self.process
            if process is None or process.returncode is not None:
                process = self.process = await self._start()
                self._sent = None  # what waits for a process that has ended is sent to this one
            return process

    async def _start(self) -> asyncio.subprocess.Process:
        output = tempfile.TemporaryFile()  # noqa: SIM115  (open until the process ends)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline", "plan", "--serve"),
            cwd=self.folder, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=output, limit=_LINE_BYTES, env={**os.environ, "NO_COLOR": "1"},
            start_new_session=True, preexec_fn=lower_priority,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(process, output))
        return process

    async def plan(
        self,
        yaml: str,
        world_size: int | None = None,
        device: str | None = None,
        cwd: Path | None = None,
        page: str = "",
    ) -> JSONObject:
        """Return the JSON of ``paceline plan --json``, with ``max_steps``.

        Args:
            yaml: the text of the config.
            world_size, device: devices to plan for; default: this machine's devices.
            cwd: the folder at which relative paths of the config start; default: ``folder``.
            page: identifies the page that requests the plan.

        Raises:
            ConfigError: the message of the command; :class:`Superseded`.
            RunError: the plan failed for another reason, or took too long.
        """
        self._last_id += 1
        request = _Request(
            {
                "id": self._last_id,
                "yaml": yaml,
                "world_size": world_size,
                "device": device,
                "cwd": None if cwd is None else str(cwd),
            }
        )
        if (older := self._waiting.pop(page, None)) is not None:
            older.fail(_superseded())
        self._waiting[page] = request
        try:
            process = await self.start()
            await self._send_next(process)
            return await asyncio.wait_for(request.answer, _TIMEOUT_S)
        except TimeoutError:
            end(process)
            raise RunError(
                "the plan was ended because it took longer than {timeout_s} s",
                code="plan-too-slow",
                fix="run `paceline plan CONFIG.yaml` in a terminal",
                timeout_s=f"{_TIMEOUT_S:.0f}",
            ) from None
        finally:
            if self._waiting.get(page) is request:
                del self._waiting[page]

    async def _send_next(self, process: asyncio.subprocess.Process) -> None:
        """Send the request that waits longest, unless the process still plans for one that a page
        waits for."""
        if self._sent is not None and not self._sent.answer.done():
            return
        waiting = [each for each in self._waiting.values() if not each.answer.done()]
        self._sent = waiting[0] if waiting else None
        if self._sent is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the end of the process is reported by `_read`
            process.stdin.write(json.dumps(self._sent.content).encode() + b"\n")
            await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process, output: IO[bytes]) -> None:
        """Hand each answer to the request that waits for it, until the process ends."""
        assert process.stdout is not None
        with output:
            while line := await process.stdout.readline():
                message = as_object(json.loads(line))
                sent = self._sent
                if sent is None or sent.answer.done() or message.get("id") != sent.content["id"]:
                    continue
                if "error" in message:
                    sent.fail(_error(message))
                else:
                    plan = as_object(message["plan"])
                    sent.answer.set_result({**plan, "max_steps": message["max_steps"]})
                await self._send_next(process)
            code = await process.wait()
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        if self.process is process:
            otherwise = f"the process that plans ended with exit code {code}"
            for request in self._waiting.values():
                request.fail(ended_without_error(code, otherwise, text))

    def close(self) -> asyncio.subprocess.Process | None:
        """End the process. Return it, if there was one."""
        process, self.process = self.process, None
        if process is not None:
            end(process)
        return process


def _superseded() -> PacelineError:
    return Superseded(
        "a newer request has replaced this one",
        code="superseded",
        fix="wait for the result of the newer one",
    )


def _error(message: JSONObject) -> PacelineError:
    kind = ConfigError if message["exit_code"] == EXIT_USAGE else RunError
    return kind.from_record(cast(ErrorRecord, message["error"]))

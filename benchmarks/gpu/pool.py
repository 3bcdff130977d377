"""Run cases in warm processes. A process that hangs or whose case fails is replaced."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import Case, Result, Section, Status

WORKER = Path(__file__).with_name("worker.py")
#: How long a process may take for its imports. The limits of cases do not include them.
START_LIMIT_S = 180.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Settings:
    """Settings of the processes.

    Args:
        num_slots: number of ranks that run at the same time. A case with more ranks runs alone.
        environment: environment variables of the processes.
        device: type of the device, ``cuda`` or ``cpu``; ``none`` for cases that use neither torch
            nor Paceline, so that the processes do not import them in advance.
    """

    prepared: Path
    output: Path
    num_slots: int
    is_simulated: bool
    environment: Mapping[str, str]
    device: str = "cuda"


class Worker:
    """A process, and the case that it runs."""

    def __init__(self, settings: Settings, number: int) -> None:
        logs = settings.output / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"worker-{number:02d}.txt"
        read_end, write_end = os.pipe()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), str(write_end), settings.device],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True,
                pass_fds=[write_end], env=dict(settings.environment), start_new_session=True,
            )  # fmt: skip
        os.close(write_end)
        self._channel = os.fdopen(read_end, "rb", buffering=0)
        self._unread = b""
        self.started_at = time.monotonic()
        self.is_ready = False

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def read_message(self) -> dict[str, Any] | None:
        """Read what there is; return a message once it is complete. A process that has ended gives
        an error."""
        content = os.read(self.fileno(), 1 << 16)
        if not content:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            return {"error": f"the process ended with code {self.process.returncode}"}
        self._unread += content
        line, separator, rest = self._unread.partition(b"\n")
        if not separator:
            return None
        self._unread = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def kill(self) -> None:
        """Kill the process with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._channel.close()


@dataclass
class Running:
    """A case that runs."""

    section: Section
    case: Case
    workers: list[Worker]
    scratch: Path
    started_at: float
    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ends_at(self) -> float:
        return self.started_at + self.case.limit_s


class Pool:
    """Runs sections in warm processes until a deadline.

    Args:
        report: called with each result, as soon as it is known.
        deadline: time of :func:`time.monotonic` at which everything is ended.
    """

    def __init__(
        self, settings: Settings, report: Callable[[Result], None], deadline: float
    ) -> None:
        self.settings, self.report, self.deadline = settings, report, deadline
        self.card = ""
        #: Processes that run cases together. They stay together, because ranks must have made the
        #: same calls: torch and Paceline number groups and phases.
        self._idle: list[list[Worker]] = []
        self._running: list[Running] = []
        self._num_workers = self._num_cases = 0
        self._section_starts: dict[str, float] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            self._kill(running.workers)
        for workers in self._idle:
            self._kill(workers)

    def run(self, sections: list[Section]) -> None:
        """Run all cases in their order, and report a result for each."""
        waiting = [(section, case) for section in sections for case in section.cases]
        while waiting or self._running:
            if time.monotonic() >= self.deadline:
                self._end_all(waiting)
                return
            while waiting and self._start_or_drop(*waiting[0]):
                waiting.pop(0)
            self._read_messages()
            self._end_late_cases()

    # -- start
    def _start_or_drop(self, section: Section, case: Case) -> bool:
        """Start a case if there is room for it, or report that it is not run. Return False if it
        has to wait."""
        if case.why_skipped:
            self._report(section, case, "skipped", 0.0, reason=case.why_skipped)
            return True
        if not self._has_room(case):
            return False
        now = time.monotonic()
        start = self._section_starts.setdefault(section.name, now)
        if now - start >= section.limit_s:
            reason = f"not started: the section's limit of {section.limit_s:.0f} s was reached"
            self._report(section, case, "timeout", 0.0, reason=reason)
            return True
        self._start(section, case)
        return True

    def _has_room(self, case: Case) -> bool:
        if not self._running:
            return True
        if case.is_timing or any(running.case.is_timing for running in self._running):
            return False
        num_ranks = sum(running.case.num_ranks for running in self._running)
        return num_ranks + case.num_ranks <= self.settings.num_slots

    def _start(self, section: Section, case: Case) -> None:
        workers = self._take_workers(case)
        scratch = self.settings.output / "scratch" / f"{self._num_cases:03d}"
        self._num_cases += 1
        scratch.mkdir(parents=True, exist_ok=True)
        running = Running(section, case, workers, scratch, time.monotonic())
        self._running.append(running)
        if all(worker.is_ready for worker in workers):
            self._send(running)

    def _take_workers(self, case: Case) -> list[Worker]:
        """Return the processes of a case. Idle ones that cannot run it are ended if it needs new
        ones, or if it is timed, because they hold memory of the device."""
        suitable = [workers for workers in self._idle if len(workers) == case.num_ranks]
        chosen = suitable[0] if suitable else None
        if chosen is None or case.is_timing:
            for workers in self._idle:
                if workers is not chosen and (case.is_timing or len(workers) != case.num_ranks):
                    self._kill(workers)
            self._idle = [] if case.is_timing else suitable
        if chosen is not None:
            self._idle = [workers for workers in self._idle if workers is not chosen]
            return chosen
        first = self._num_workers
        self._num_workers += case.num_ranks
        return [Worker(self.settings, first + rank) for rank in range(case.num_ranks)]

    def _send(self, running: Running) -> None:
        """Send a case to its processes, which are all ready."""
        running.started_at = time.monotonic()
        case, port = running.case, _free_port()
        for rank, worker in enumerate(running.workers):
            request = {
                "name": f"{running.section.name}/{case.name}",
                "function": case.function,
                "arguments": case.arguments | ({"port": port} if case.num_ranks > 1 else {}),
                "rank": rank,
                "num_ranks": case.num_ranks,
                "is_timing": case.is_timing,
                "is_simulated": self.settings.is_simulated,
                "prepared": str(self.settings.prepared),
                "scratch": str(running.scratch),
                "lock": str(self.settings.output / ".device-lock"),
            }
            with contextlib.suppress(BrokenPipeError):  # reported when its messages are read
                worker.send(request)

    # -- results
    def _read_messages(self) -> None:
        workers = {
            worker: running
            for running in self._running
            for rank, worker in enumerate(running.workers)
            if rank not in running.outcomes
        }
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker, selectors.EVENT_READ)
            for key, _ in selector.select(_POLL_S):
                worker = key.fileobj
                assert isinstance(worker, Worker)
                if workers[worker] in self._running:
                    self._take_message(workers[worker], worker)

    def _take_message(self, running: Running, worker: Worker) -> None:
        message = worker.read_message()
        if message is None:
            return
        if "error" in message:
            reason = f"{message['error']}; see {worker.log.relative_to(self.settings.output)}"
            self._finish(running, "failed", reason)
        elif not worker.is_ready:
            worker.is_ready = True
            prefix = "simulated " if self.settings.is_simulated else ""
            self.card = self.card or prefix + message["card"]
            if all(each.is_ready for each in running.workers):
                self._send(running)
        else:
            rank = running.workers.index(worker)
            running.outcomes[rank] = message
            if message["status"] == "failed":  # the other ranks may wait for it
                where = f"rank {rank}: " if running.case.num_ranks > 1 else ""
                self._finish(running, "failed", where + message["reason"])
            elif len(running.outcomes) == running.case.num_ranks:
                first = running.outcomes[0]
                self._finish(running, first["status"], first["reason"], first["figures"])

    def _finish(
        self,
        running: Running,
        status: Status,
        reason: str = "",
        figures: dict[str, Any] | None = None,
    ) -> None:
        """Report the result of a case. Its processes are used again, unless the case failed, which
        can leave the device of the process unusable."""
        self._running.remove(running)
        seconds = time.monotonic() - running.started_at
        self._report(running.section, running.case, status, seconds, figures, reason)
        if status in ("failed", "timeout"):
            self._kill(running.workers)
        else:
            self._idle.append(running.workers)
            shutil.rmtree(running.scratch, ignore_errors=True)

    def _report(
        self,
        section: Section,
        case: Case,
        status: Status,
        seconds: float,
        figures: dict[str, Any] | None = None,
        reason: str = "",
    ) -> None:
        self.report(
            Result(
                section.name, case.name, status, round(seconds, 3), self.card, figures or {},
                reason, case.is_timing,
            )
        )  # fmt: skip

    # -- limits
    def _end_late_cases(self) -> None:
        now = time.monotonic()
        for running in list(self._running):
            section_end = self._section_starts[running.section.name] + running.section.limit_s
            late = [worker for worker in running.workers if not worker.is_ready]
            if late:
                if now - late[0].started_at > START_LIMIT_S:
                    reason = f"the imports took longer than {START_LIMIT_S:.0f} s"
                    self._finish(running, "timeout", reason)
            elif now >= running.ends_at:
                reason = f"ended at its limit of {running.case.limit_s:g} s"
                self._finish(running, "timeout", reason)
            elif now >= section_end:
                reason = f"ended at the section's limit of {running.section.limit_s:g} s"
                self._finish(running, "timeout", reason)

    def _end_all(self, waiting: list[tuple[Section, Case]]) -> None:
        """Report a result for each case that runs or waits at the deadline."""
        for running in list(self._running):
            self._finish(running, "timeout", "ended at the deadline of the benchmark")
        for section, case in waiting:
            if case.why_skipped:
                self._report(section, case, "skipped", 0.0, reason=case.why_skipped)
            else:
                reason = "not started before the deadline of the benchmark"
                self._report(section, case, "timeout", 0.0, reason=reason)

    def _kill(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The requests that wait for the engine, and the threads that generate their answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque

from paceline.inference.engine.engine import AnswerEnd, AnswerPart, Engine, GenerationRequest
from paceline.inference.serving.refusals import RequestRefused

#: Longest time that an answer takes, and longest time that a request waits before.
TIME_LIMIT_S = 600.0
_LONGEST_RETRY_S = 60

JobEvent = AnswerPart | AnswerEnd | Exception


class GenerationJob:
    """A request that waits for its answer or gets it.

    Attributes:
        events: the parts of the answer, and then its end or an error.
        expiry: what ends the job if it still waits.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self.cancelled = threading.Event()
        self.expiry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, event: JobEvent) -> None:
        """Add an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # the server has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class GenerationQueue:
    """Generates answers in the order of their requests.

    Args:
        engine: what generates them.
        max_waiting: number of requests that may wait.
        wait_limit_s: time after which a request that waits is refused.
    """

    def __init__(
        self, engine: Engine, max_waiting: int, wait_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self._engine, self._max_waiting = engine, max_waiting
        self._wait_limit_s = wait_limit_s
        self._condition = threading.Condition()
        self._waiting: deque[GenerationJob] = deque()
        self._num_running = 0
        self._last_duration_s = 1.0
        # An interpreter that ends does not wait for these threads.
        for number in range(engine.num_parallel):
            threading.Thread(target=self._work, name=f"generate-{number}", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        with self._condition:
            return len(self._waiting)

    def check_space(self) -> None:
        """Raise RequestRefused if no more requests may wait."""
        with self._condition:
            num_ahead = self._num_running + len(self._waiting)
        if num_ahead < self._engine.num_parallel + self._max_waiting:
            return
        expected_s = self._last_duration_s * num_ahead / self._engine.num_parallel
        raise RequestRefused(
            "{num_waiting} requests wait already",
            http_status=429,
            code="too-many-requests",
            fix="ask again later, or start the server with a larger --max-queue",
            retry_after_s=min(max(1, math.ceil(expected_s)), _LONGEST_RETRY_S),
            num_waiting=self._max_waiting,
        )

    def submit(self, request: GenerationRequest) -> GenerationJob:
        """Add a request.

        Raises:
            RequestRefused: no more requests may wait.
        """
        job = GenerationJob(request)
        with self._condition:
            self.check_space()
            self._waiting.append(job)
            self._condition.notify()
        loop = asyncio.get_running_loop()
        job.expiry = loop.call_later(self._wait_limit_s, self._expire, job)
        return job

    def cancel(self, job: GenerationJob) -> None:
        """End a job whose answer nobody wants any more."""
        job.cancelled.set()
        if job.expiry is not None:
            job.expiry.cancel()  # it would keep the job in memory
        if self._is_taken_out(job):  # otherwise the thread that generates the answer ends it
            job.put(AnswerEnd("cancelled", 0))

    def _expire(self, job: GenerationJob) -> None:
        """End a job if it still waits."""
        if self._is_taken_out(job):
            job.put(
                RequestRefused(
                    "the request has waited for {limit} seconds",
                    http_status=503,
                    code="request-waited-too-long",
                    fix="ask again later",
                    limit=int(self._wait_limit_s),
                )
            )

    def _is_taken_out(self, job: GenerationJob) -> bool:
        with self._condition:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._waiting:
                    self._condition.wait()
                job = self._waiting.popleft()
                self._num_running += 1
            started = time.monotonic()
            try:
                end: JobEvent = self._engine.generate(job.request, job.put, job.cancelled.is_set)
            except Exception as error:  # the server continues
                end = error
            with self._condition:
                self._num_running -= 1
                self._last_duration_s = time.monotonic() - started
            job.put(end)

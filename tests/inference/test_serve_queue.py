"""The queue of `paceline serve`, with an engine whose answers end when the test wants."""

import asyncio
import threading
from collections.abc import Callable

from paceline.inference.engine.engine import (
    AnswerEnd,
    Emit,
    EncodedPrompt,
    Engine,
    GenerationRequest,
)
from paceline.inference.serving.queue import GenerationQueue
from paceline.inference.serving.refusals import RequestRefused


class HeldEngine(Engine):
    """Ends its answers after :attr:`released` is set."""

    models = ("one",)

    def __init__(self) -> None:
        self.released = threading.Event()

    def encoder(self, model: str) -> None:  # type: ignore[override]
        return

    def token_limit(self, model: str) -> None:
        return

    def generate(
        self, request: GenerationRequest, emit: Emit, is_cancelled: Callable[[], bool]
    ) -> AnswerEnd:
        assert self.released.wait(30)
        return AnswerEnd("stop", 1)


def test_request_that_waits_too_long_is_refused_while_another_runs() -> None:
    async def wait() -> None:
        engine = HeldEngine()
        queue = GenerationQueue(engine, max_waiting=1, wait_limit_s=0.2)
        request = GenerationRequest("one", EncodedPrompt({}, None), 1)
        running = queue.submit(request)
        while queue.num_waiting:
            await asyncio.sleep(0.01)
        refused = await queue.submit(request).events.get()
        assert isinstance(refused, RequestRefused)
        assert (refused.http_status, refused.code) == (503, "request-waited-too-long")
        assert running.events.empty()  # its time to wait is over, but it does not wait
        engine.released.set()
        assert isinstance(await running.events.get(), AnswerEnd)

    asyncio.run(wait())

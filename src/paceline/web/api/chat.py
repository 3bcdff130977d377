"""Routes for the trained model: chat."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from paceline.web.jobs.chat import ChatEvent
from paceline.web.responses import encode
from paceline.web.state import Panel, RunId

router = APIRouter()


class Message(BaseModel):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=1 << 18)


class Question(BaseModel):
    """A chat that wants its next answer."""

    messages: list[Message] = Field(min_length=1, max_length=200)
    model: Literal["tuned", "base"] = "tuned"
    max_new_tokens: int = Field(256, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0, le=5)
    seed: int = Field(0, ge=0, lt=1 << 31)


@router.post("/api/runs/{id}/chat", response_class=StreamingResponse)
async def chat(id: RunId, body: Question, panel: Panel) -> StreamingResponse:
    """The model's answer as server-sent events: ``state``, ``token``, ``end``, ``error``. To close
    the connection stops it."""
    run = panel.run_folder(id)
    live = any(entry["status"] == "live" for entry in panel.runs.summaries())
    # A model loaded beside a run could take the memory of its device.
    answer = panel.chat.answer(run, body.model_dump(), "cpu" if live else "auto")
    name, data = await anext(answer)
    return StreamingResponse(
        _send((name, {**data, "beside_run": live}), answer),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


async def _send(first: ChatEvent, answer: AsyncGenerator[ChatEvent]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(answer):
        yield _encode(first)
        async for event in answer:
            yield _encode(event)


def _encode(event: ChatEvent) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event[0].encode(), encode(event[1]))

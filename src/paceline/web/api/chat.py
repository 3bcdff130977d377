"""Route for chatting with a trained model."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from paceline.web.jobs.chat import ChatEvent
from paceline.web.responses import encode
from paceline.web.state import Panel, RunId

router = APIRouter()


class ChatTurn(BaseModel):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=1 << 18)
    #: Data URLs. Paths are not read: a request must not choose a file of this machine.
    images: list[Annotated[str, Field(pattern=r"^data:image/[\w.+-]+;base64,")]] = Field(
        default=[], max_length=64
    )


class Question(BaseModel):
    """A chat to continue with the model's next answer."""

    messages: list[ChatTurn] = Field(min_length=1, max_length=200)
    model: Literal["tuned", "base"] = "tuned"
    max_new_tokens: int = Field(256, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0, le=5)
    seed: int = Field(0, ge=0, lt=1 << 31)


@router.post("/api/runs/{id}/chat", response_class=StreamingResponse)
async def chat(id: RunId, body: Question, panel: Panel) -> StreamingResponse:
    """Return the model's answer as server-sent events: ``state``, ``token``, ``end``, ``error``.
    Closing the connection stops the answer."""
    run = panel.run_folder(id)
    is_training = any(entry["status"] == "live" for entry in panel.runs.entries())
    # A model on the device of a run could take the memory that the run needs.
    events = panel.chat.answer(
        run, body.model_dump(), "cpu" if is_training else "auto", panel.config_folder(id)
    )
    # An error before the first event is answered with a status code.
    name, data = await anext(events)
    return StreamingResponse(
        _send((name, {**data, "beside_run": is_training}), events),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


async def _send(first: ChatEvent, events: AsyncGenerator[ChatEvent]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(events):
        yield _encode(first)
        async for event in events:
            yield _encode(event)


def _encode(event: ChatEvent) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event[0].encode(), encode(event[1]))

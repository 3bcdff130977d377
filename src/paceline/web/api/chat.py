"""Routes for the trained model: chat."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from paceline.web.jobs.context import LaunchContext, run_folder
from paceline.web.responses import encode

router = APIRouter()

Id = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$")]


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
async def chat(id: Id, body: Question, request: Request) -> StreamingResponse:
    """The model's answer as server-sent events: ``state``, ``token``, ``end``, ``error``. To close
    the connection stops it."""
    run = run_folder(request, id)
    live = any(one["status"] == "live" for one in request.app.state.panel.runs.summaries())
    # A model loaded beside a run could take the memory of its device.
    answer = LaunchContext.of(request).chat.answer(
        run, body.model_dump(), "cpu" if live else "auto"
    )
    first = await anext(answer)
    return StreamingResponse(
        _events(first, answer, live),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


async def _events(
    first: tuple[str, dict[str, Any]], answer: AsyncIterator[tuple[str, dict[str, Any]]], live: bool
) -> AsyncIterator[bytes]:
    try:
        yield _event(first[0], {**first[1], "beside_run": live})
        async for name, data in answer:
            yield _event(name, data)
    finally:
        await answer.aclose()  # type: ignore[attr-defined]  # it is a generator


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(data))

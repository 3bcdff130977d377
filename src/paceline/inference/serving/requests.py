"""The fields of a request, in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
)
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from paceline.core.server.access import MAX_BODY_BYTES
from paceline.inference.engine.engine import MAX_NEW_TOKENS
from paceline.inference.serving.refusals import RequestRefused, unsupported_field

#: Time for the whole body of a request.
_BODY_LIMIT_S = 60.0
_MAX_DEPTH = 64
#: Of an object in a request. Each one that is not supported is a mistake to report.
_MAX_NAMES = 1000
#: Fields of OpenAI's API that have only these values, with which they change nothing.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": (),
    "function_call": (),
    "logit_bias": ({},),
    "n": (1,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
_MAX_STOPS = 16

Text = Annotated[str, Field(max_length=MAX_BODY_BYTES)]
Object = dict[str, JsonValue]
ItemT = TypeVar("ItemT")
#: A list whose first mistake is the only one that is reported: a request may have millions.
Items = Annotated[list[ItemT], Field(fail_fast=True)]


class Fields(BaseModel):
    """Fields of a request. Other ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Fields):
    """Whether the last chunk of a stream has the number of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SamplingFields(Fields):
    """The fields of both endpoints."""

    model: str = Field(max_length=1000)
    max_tokens: int | None = Field(None, ge=1, le=MAX_NEW_TOKENS)
    temperature: float = Field(1.0, ge=0, le=5)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[
        Items[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=_MAX_STOPS),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionFields(SamplingFields):
    """A request to continue a text."""

    prompt: Text | Items[int] | Items[Text] | Items[Items[int]]
    logprobs: int | None = Field(None, ge=0, le=20)


class ImageAddress(Fields):
    """An image, in the request itself."""

    url: str
    detail: str | None = None


class TextPart(Fields):
    """A text in the content of a message."""

    type: Literal["text"]
    text: str


class ImagePart(Fields):
    """An image in the content of a message."""

    type: Literal["image_url"]
    image_url: ImageAddress


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """The function that an earlier answer has called. ``arguments`` is JSON text."""

    name: str
    arguments: str


class EarlierCall(Fields):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[EarlierCall] = []
    tool_call_id: str | None = None


class FunctionTool(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: Literal[False] | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class ResponseFormat(Fields):
    """The form of the answer."""

    type: Literal["text"]


class ChatFields(SamplingFields):
    """A request to continue a chat."""

    messages: Items[Message] = Field(min_length=1, max_length=2000)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_NEW_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Items[Tool] = Field(default=[], max_length=256)
    tool_choice: Literal["none", "auto"] = "auto"
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Object = {}


FieldsT = TypeVar("FieldsT", bound=SamplingFields)


async def read_body(request: Request) -> dict[str, JsonValue]:
    """Return the object in the body of a request.

    Raises:
        RequestRefused: the body is too long, takes too long, or is not a JSON object.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestRefused(
            "the body of the request is not JSON",
            http_status=415,
            code="body-without-type",
            fix="send the header `Content-Type: application/json`",
        )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        content = await asyncio.wait_for(_received(request), _BODY_LIMIT_S)
    except TimeoutError:
        raise RequestRefused(
            "the body of the request did not arrive within {limit} seconds",
            http_status=408,
            code="body-too-slow",
            limit=int(_BODY_LIMIT_S),
        ) from None
    except ClientDisconnect:
        raise RequestRefused("the connection was closed", code="connection-closed") from None
    return await run_in_threadpool(_parsed, content)  # others are answered meanwhile


async def _received(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(content)


def _too_large() -> RequestRefused:
    return RequestRefused(
        "the body of the request is too large",
        http_status=413,
        code="body-too-large",
        allowed="at most {limit} bytes",
        limit=f"{MAX_BODY_BYTES:,}",
    )


def _parsed(content: bytes) -> dict[str, JsonValue]:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(content.decode("utf-8"), parse_constant=refuse_constant)
        _check_values(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestRefused(
            "the body of the request is not valid JSON: {reason}",
            code="invalid-body",
            reason=reason[:200],
        ) from error
    if not isinstance(body, dict):
        raise RequestRefused("the body of the request is not a JSON object", code="not-an-object")
    return body


def _check_values(body: JsonValue) -> None:
    """Check that a body is not nested too deeply, that its objects do not have too many names, and
    that its texts are Unicode.

    Raises:
        RecursionError, ValueError: it is not so.
    """
    level: list[JsonValue] = [body]
    for _ in range(_MAX_DEPTH):
        for value in level:
            if isinstance(value, str):
                value.encode("utf-8")  # fails if there is half of a surrogate pair
            elif isinstance(value, dict):
                "".join(value).encode("utf-8")
                if len(value) > _MAX_NAMES:
                    raise ValueError(f"an object has more than {_MAX_NAMES} names")
        level = [item for value in level for item in _items(value)]
        if not level:
            return
    raise RecursionError


def _items(value: JsonValue) -> Iterator[JsonValue]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def validated(kind: type[FieldsT], body: Mapping[str, JsonValue]) -> FieldsT:
    """Return the fields of a request.

    Raises:
        RequestRefused: a field is not supported, or has a value that is not.
    """
    given: dict[str, JsonValue] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name not in kind.model_fields and name not in _NEUTRAL:
            raise unsupported_field(name[:200])
        if name in kind.model_fields:
            given[name] = _without_null(value) if name == "messages" else value
        elif value not in _NEUTRAL[name] or isinstance(value, bool) != isinstance(
            _NEUTRAL[name][0], bool
        ):
            raise unsupported_field(name, ", ".join(map(json.dumps, _NEUTRAL[name])) or "null")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _invalid(error) from error


def _without_null(messages: JsonValue) -> JsonValue:
    """Return messages without fields that are null: clients send back the answers that they got."""
    if not isinstance(messages, list):
        return messages
    return [
        {name: value for name, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def _invalid(error: ValidationError) -> RequestRefused:
    mistakes = error.errors(include_url=False, include_input=False, include_context=False)
    # of the alternatives of a value, the one that fits best
    mistake: Any = max(mistakes, key=lambda each: len(each["loc"]))
    name = _field_name(mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        return unsupported_field(name)
    return RequestRefused(
        "`{field}`: {reason}",
        code="invalid-field",
        param=name,
        field=name,
        reason=str(mistake["msg"])[:500],
    )


def _field_name(place: Iterable[str | int]) -> str:
    """Return the name of a field by its place, which also has the types of alternatives."""
    parts: list[str] = []
    for part in map(str, place):
        is_type = not part.isdigit() and (not part.isidentifier() or part in ("str", "int"))
        if not is_type and parts[-1:] != [part]:
            parts.append(part)
    return ".".join(parts)[:200]

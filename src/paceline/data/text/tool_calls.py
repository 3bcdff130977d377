"""Tools and tool calls in the spellings of OpenAI, ShareGPT, LLaMA-Factory and ms-swift, as chat
templates expect them."""

import ast
import json
from typing import Any, NotRequired, TypedDict

from pydantic import JsonValue

from paceline.data.sources.rows import MalformedRow, Row, holds_nothing, without_nulls


class CalledFunction(TypedDict):
    """``arguments``: a mapping, or the text of a tool that takes plain text."""

    name: str
    arguments: JsonValue


class ToolCall(TypedDict):
    """A call as chat templates expect it."""

    type: str
    function: CalledFunction
    id: NotRequired[str]


class Message(TypedDict, total=False):
    """One turn of a chat, which always has a role and a content. ``thinking`` is the reasoning
    under its other name."""

    role: str
    content: str
    name: JsonValue
    tool_calls: list[ToolCall]
    tool_call_id: JsonValue
    reasoning_content: str
    thinking: str


class Arguments(Row):
    """Arguments of a call: a mapping that prints as JSON, for templates that write them without
    ``tojson``."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    __repr__ = __str__


def read_tools(value: JsonValue) -> list[Row]:
    """The tools of a row, each as ``{"type": "function", "function": {...}}``.

    Args:
        value: a list of mappings, the same as JSON text, or a list of JSON texts. Null and ``[]``
            are no tools.

    Raises:
        MalformedRow: it is something else.
    """
    if holds_nothing(value):
        return []
    parsed = _json(value, "tools that are not valid JSON") if isinstance(value, str) else value
    tools = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        tool = _json(item, "tools that are not valid JSON") if isinstance(item, str) else item
        if not isinstance(tool, dict):
            raise MalformedRow("tools that are not a list of mappings")
        tool = without_nulls(tool)
        if "function" not in tool and tool.get("type", "function") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            tool = {"type": "function", "function": function}
        tools.append(tool)
    return tools


def read_calls(value: JsonValue) -> list[ToolCall]:
    """The calls of one turn, each as ``{"type": "function", "function": {"name", "arguments"}}``
    with its ``id`` if any.

    Args:
        value: a call or a list of calls, as mappings or as JSON text; the function may be nested as
            OpenAI does or not, and its arguments may be a mapping or JSON text.

    Raises:
        MalformedRow: it is not a call.
    """
    parsed = _calls_of_text(value) if isinstance(value, str) else value
    calls = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        call = _json(item, "a tool call that is not valid JSON") if isinstance(item, str) else item
        if not isinstance(call, dict):
            raise MalformedRow("a tool call that is not a mapping")
        nested = call.get("function")
        function = nested if isinstance(nested, dict) else call
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise MalformedRow("a tool call without a name")
        arguments = function.get("arguments", function.get("parameters"))
        tool_call: ToolCall = {
            "type": "function",
            "function": {"name": name, "arguments": _arguments(arguments)},
        }
        identifier = call.get("id")
        if isinstance(identifier, str) and identifier:
            tool_call["id"] = identifier
        calls.append(tool_call)
    return calls


def _calls_of_text(text: str) -> Any:
    """One JSON value, or several, one a line."""
    try:
        return _json(text, "a tool call that is not valid JSON")
    except MalformedRow:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [_json(line, "a tool call that is not valid JSON") for line in lines]


def _arguments(value: Any) -> Any:
    if value is None:
        return Arguments()
    if isinstance(value, str):
        try:
            parsed = _json(value, "") if value.strip() else {}
        except MalformedRow:
            return value  # a tool that takes plain text
        return Arguments(parsed) if isinstance(parsed, dict) else value
    return Arguments(without_nulls(value)) if isinstance(value, dict) else value


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:  # some published files write the mapping as Python does, with single quotes
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise MalformedRow(reason) from None


def name_calls(messages: list[Message]) -> None:
    """Give every call without an ``id`` one of nine letters and digits, and the tool messages that
    follow the ids of their calls: some templates require them."""
    number = 0
    waiting: list[str] = []
    for message in messages:
        if message.get("tool_calls"):
            waiting = []
            for call in message["tool_calls"]:
                call.setdefault("id", f"call{number:05d}")
                waiting.append(call["id"])
                number += 1
        elif message["role"] == "tool" and waiting:
            identifier = waiting.pop(0)
            message.setdefault("tool_call_id", identifier)


def with_short_ids(messages: list[Message]) -> list[Message]:
    """The messages with ids of nine letters and digits, which Mistral's templates insist on."""
    short: dict[str, str] = {}
    out = []
    for message in messages:
        message = message.copy()
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "id": short.setdefault(call.get("id", ""), f"call{len(short):05d}")}
                for call in message["tool_calls"]
            ]
        identifier = message.get("tool_call_id")
        if isinstance(identifier, str):
            message["tool_call_id"] = short.get(identifier, identifier)
        out.append(message)
    return out


def with_arguments_as_text(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of each call as JSON text, as templates that concatenate them
    expect."""

    def as_text(call: ToolCall) -> ToolCall:
        function = call["function"]
        arguments = function["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        return {**call, "function": {**function, "arguments": text}}

    return [
        (
            {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
        )
        for message in messages
    ]

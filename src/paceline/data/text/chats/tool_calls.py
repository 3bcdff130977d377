"""Convert tools and tool calls from the formats of OpenAI, ShareGPT, LLaMA-Factory and ms-swift to
the form that chat templates expect."""

import ast
import json
from collections import Counter
from typing import Any, NotRequired, TypedDict

from pydantic import JsonValue

from paceline.data.sources.rows import (
    MalformedRow,
    RepeatedKey,
    Row,
    holds_nothing,
    parse_cell,
    repeated_in_cell,
)


class CalledFunction(TypedDict):
    """``arguments``: a mapping, or the text of a tool that takes plain text."""

    name: str
    arguments: JsonValue


class ToolCall(TypedDict):
    """A tool call in the form that chat templates expect."""

    type: str
    function: CalledFunction
    id: NotRequired[str]


class ChatMessage(TypedDict, total=False):
    """One turn of a chat, always with a role and a content. ``thinking`` equals
    ``reasoning_content``, for templates that use this name."""

    role: str
    content: str
    name: JsonValue
    tool_calls: list[ToolCall]
    tool_call_id: JsonValue
    reasoning_content: str
    thinking: str


class ToolCallArguments(Row):
    """Arguments of a call: a mapping whose ``str`` is JSON, for templates that do not use
    ``tojson``."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    __repr__ = __str__


def read_tools(value: JsonValue) -> list[Row]:
    """Return the tools of a row, each as ``{"type": "function", "function": {...}}``.

    Args:
        value: a list of mappings, the same as JSON text, or a list of JSON texts. Null and ``[]``
            mean no tools.

    Raises:
        MalformedRow: the value has another form.
    """
    if holds_nothing(value):
        return []
    parsed = _json(value, "tools that are not valid JSON") if isinstance(value, str) else value
    tools = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        tool = _json(item, "tools that are not valid JSON") if isinstance(item, str) else item
        if not isinstance(tool, dict):
            raise MalformedRow("tools that are not a list of mappings")
        if "function" not in tool and tool.get("type") in (None, "function"):
            function = {key: value for key, value in tool.items() if key != "type"}
            tool = {"type": "function", "function": function}
        tools.append(tool)
    return tools


def read_calls(value: JsonValue) -> list[ToolCall]:
    """Return the calls of one turn, each as ``{"type": "function", "function": {"name",
    "arguments"}}`` with its ``id`` if any.

    Args:
        value: a call or a list of calls, as mappings or as JSON text. The function may be nested,
            as in OpenAI's format, and its arguments may be a mapping or JSON text.

    Raises:
        MalformedRow: the value is not a call.
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
    """Parse one JSON value, or several with one per line."""
    try:
        return _json(text, "a tool call that is not valid JSON")
    except MalformedRow:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [_json(line, "a tool call that is not valid JSON") for line in lines]


def _arguments(value: Any) -> Any:
    if value is None:
        return ToolCallArguments()
    if isinstance(value, str):
        try:
            parsed = _json(value, "") if value.strip() else {}
        except MalformedRow:
            return value  # arguments of a tool that takes plain text
        return ToolCallArguments(parsed) if isinstance(parsed, dict) else value
    return ToolCallArguments(value) if isinstance(value, dict) else value


def _json(text: str, reason: str) -> Any:
    try:
        return parse_cell(text)
    except (ValueError, RecursionError):
        pass
    try:  # some published files contain Python literals with single quotes
        tree = ast.parse(text.strip(), mode="eval")
        value = ast.literal_eval(tree)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise MalformedRow(reason) from None
    for node in ast.walk(tree):
        keys = [each.value for each in getattr(node, "keys", ()) if isinstance(each, ast.Constant)]
        for key, count in Counter(keys).items():
            if count > 1:
                raise repeated_in_cell(RepeatedKey(str(key)))
    return value


def name_calls(messages: list[ChatMessage]) -> None:
    """Assign an ``id`` of nine characters to every call without one, and the ids of the calls to
    the tool messages that follow. Some templates require both."""
    number = 0
    unanswered: list[str] = []
    for message in messages:
        if message.get("tool_calls"):
            unanswered = []
            for call in message["tool_calls"]:
                call.setdefault("id", f"call{number:05d}")
                unanswered.append(call["id"])
                number += 1
        elif message["role"] == "tool" and unanswered:
            message.setdefault("tool_call_id", unanswered.pop(0))


def with_short_ids(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with ids of nine characters, which Mistral's templates require."""
    short: dict[str, str] = {}
    renamed = []
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
        renamed.append(message)
    return renamed


def with_arguments_as_text(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with the arguments of each call as JSON text, for templates that
    concatenate them."""

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

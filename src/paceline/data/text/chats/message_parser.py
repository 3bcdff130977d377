"""Separate the text of an answer into reasoning, content and tool calls while it is generated, with
transformers' parser. The chat template of the model decides which form they have."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from pydantic import JsonValue


class RegionFormat(TypedDict, total=False):
    """How transformers' parser finds and reads one part of an answer."""

    open: str
    open_pattern: str
    close: str
    close_pattern: str
    repeats: bool
    content: str
    content_args: dict[str, JsonValue]
    transform: dict[str, JsonValue]


class ResponseFormatting(TypedDict):
    """How transformers' parser separates an answer: a `response_template`."""

    start_anchor: str | list[str]
    fields: dict[str, RegionFormat]


class ParserEvent(TypedDict, total=False):
    """What transformers' parser has found. ``value`` is a tool call, or a list of them."""

    type: str
    field: str
    text: str
    dirty: bool
    value: Any


_REASONING: RegionFormat = {"open": "<think>", "close": "</think>", "content": "text"}
_CONTENT: RegionFormat = {"content": "text"}
_TURN = "<|im_start|>assistant\n"
_JSON_CALLS: RegionFormat = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_XML_CALLS: RegionFormat = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
    },
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_GEMMA_CALLS: RegionFormat = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
    "close": "<tool_call|>",
    "repeats": True,
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
#: What transformers' parser raises for a call that it cannot read, such as one without an end of
#: brackets.
_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
#: What a chat template contains, and the form of the answers that it then formats: the reasoning
#: and the tool calls. The first one counts.
_FORMS: tuple[tuple[str, RegionFormat, RegionFormat], ...] = (
    (
        "<|tool_call>",
        {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        _GEMMA_CALLS,
    ),
    ("<function=", _REASONING, _XML_CALLS),
    ("<tool_call>", _REASONING, _JSON_CALLS),
    ("<think>", _REASONING, _JSON_CALLS),
    ("</think>", _REASONING, _JSON_CALLS),
)


@dataclass(frozen=True)
class CalledTool:
    """A tool that an answer calls. ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass
class MessagePart:
    """The next part of a message of the assistant."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[CalledTool] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)


class MessageParser:
    """Separates the text of one answer.

    Args:
        template: result of :func:`response_template`.
        special: texts of the special tokens.
        prompt: the chat as text.
        tools: the tools that the answer may call.

    Attributes:
        kept_tokens: special tokens that the text must contain.
    """

    def __init__(
        self,
        template: ResponseFormatting | None,
        special: Iterable[str],
        prompt: str,
        tools: Sequence[Mapping[str, JsonValue]],
    ) -> None:
        self._parser: Any = None
        self._call_end: re.Pattern[str] | None = None
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._unread = ""
        self.kept_tokens = _markers(template, special)
        if template is not None:
            from transformers.utils.chat_parsing import ResponseParser

            listed: list[Any] = [*tools]
            form: Any = template
            self._parser = ResponseParser(form, _prefix(template, prompt), tools=listed)
            self._call_end = _end_of_calls(template)

    def push(self, text: str) -> MessagePart:
        """Return what the next text adds to the message."""
        if self._parser is None:
            return self._as_content(text)
        self._unread += text
        try:
            return self._read(self._parser.feed(text))
        except _UNREADABLE:
            return self._unparsed()

    def finish(self) -> MessagePart:
        """Return what the end of the text adds to the message."""
        if self._parser is None:
            return MessagePart()
        try:
            return self._read(self._parser.finalize()[1])
        except _UNREADABLE:
            return self._unparsed()

    def _unparsed(self) -> MessagePart:
        """Return the text since the last content: a call that cannot be read is content."""
        self._parser = None
        text, self._unread = self._unread, ""
        return self._as_content(text)

    def _as_content(self, text: str) -> MessagePart:
        return MessagePart(content=self._content.push(text))

    def _read(self, events: Sequence[ParserEvent]) -> MessagePart:
        part = MessagePart()
        for event in events:
            name = event.get("field")
            if event["type"] == "region_chunk" and not event["dirty"]:
                if name == "content":
                    part.content += self._content.push(event["text"])
                elif name in ("reasoning_content", "thinking"):
                    part.reasoning += self._reasoning.push(event["text"])
                _, found, rest = self._unread.rpartition(event["text"])
                self._unread = rest if found else ""
            elif event["type"] == "region_close" and name == "tool_calls":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                part.tool_calls += map(_called_tool, values)
                end = self._call_end and self._call_end.search(self._unread)
                self._unread = self._unread[end.end() :] if end else ""
        return part


class _Trimmed:
    """Removes the white space at the beginning and the end of a text."""

    def __init__(self) -> None:
        self._has_begun = False
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._has_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown


def _called_tool(value: Any) -> CalledTool:
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError("the name of a tool is not a text")
    text = arguments
    if not isinstance(arguments, str):
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{text}".encode()  # fails if there is half of a surrogate pair, which no answer can have
    return CalledTool(name, text)


def response_template(
    own: ResponseFormatting | None, source: str | None, has_tools: bool
) -> ResponseFormatting | None:
    """Return how transformers' parser reads answers; None if all text is content.

    Args:
        own: the response template of the tokenizer, if it has one.
        source: the chat template, if there is one.
        has_tools: whether answers may call tools. Without them, the text of a call is content.
    """
    if own is not None:
        removed = set() if has_tools else {"tool_calls"}
        fields = {name: value for name, value in own["fields"].items() if name not in removed}
        return {**own, "fields": fields}
    for mark, reasoning, calls in _FORMS:
        if mark in (source or ""):
            fields = {
                "reasoning_content": reasoning,
                **({"tool_calls": calls} if has_tools else {}),
            }
            return {"start_anchor": _TURN, "fields": {**fields, "content": _CONTENT}}
    return None


def _end_of_calls(template: ResponseFormatting) -> re.Pattern[str] | None:
    """Return what ends a tool call; None if that is unknown."""
    calls = template["fields"].get("tool_calls", {})
    mark = calls.get("close")
    with contextlib.suppress(re.error):  # the module `regex` reads more patterns
        if isinstance(mark, str):
            return re.compile(re.escape(mark))
        if "close_pattern" in calls:
            return re.compile(calls["close_pattern"])
    return None


def _prefix(template: ResponseFormatting, prompt: str) -> str:
    """Return the beginning of the answer that the prompt already has, after the anchor of the
    response template."""
    anchor = template.get("start_anchor", [])
    anchors = [anchor] if isinstance(anchor, str) else anchor
    if not anchors or any(anchor in prompt for anchor in anchors):
        return prompt
    # Another template, which may begin the reasoning in the prompt.
    return f"{anchors[0]}<think>\n" if prompt.rstrip().endswith("<think>") else ""


def _markers(template: ResponseFormatting | None, special: Iterable[str]) -> frozenset[str]:
    """Return the special tokens that mark the parts of an answer, besides the end of the
    content."""
    if template is None:
        return frozenset()
    marks = " ".join(
        str(field.get(name, ""))
        for region, field in template["fields"].items()
        if region != "content"
        for name in ("open", "open_pattern", "close", "close_pattern", "content_args")
    ).replace("\\", "")
    return frozenset(token for token in special if token in marks)

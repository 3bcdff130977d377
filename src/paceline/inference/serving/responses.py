"""Answers in the form of OpenAI's API."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from paceline.data.text.chats.message_parser import CalledTool, MessageParser, MessagePart
from paceline.inference.engine.answer_text import TokenSpelling
from paceline.inference.engine.engine import AnswerEnd, AnswerPart, GeneratedToken

Json = dict[str, JsonValue]


@dataclass
class AnswerFormat(ABC):
    """How an answer is written, as chunks of a stream or as a whole.

    Args:
        model: name of the model.
        num_prompt: number of tokens of the prompt.
        spelling: texts of the tokens of the model, if log-probabilities are wanted.
        has_usage: whether a stream ends with the number of tokens.
    """

    model: str
    num_prompt: int
    spelling: TokenSpelling | None
    has_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    prefix = ""
    whole_object = chunk_object = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"

    def usage(self, end: AnswerEnd) -> Json:
        """Return the numbers of tokens."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": end.num_tokens,
            "total_tokens": self.num_prompt + end.num_tokens,
        }

    def _object(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [*choices],
        }

    def _chunk(self, choices: Sequence[Json], usage: Json | None = None) -> bytes:
        chunk = self._object(self.chunk_object, choices)
        if self.has_usage:
            chunk["usage"] = usage
        return event(chunk)

    # -- of each kind of answer
    def start(self) -> bytes:
        """Return what precedes the answer in a stream."""
        return b""

    @abstractmethod
    def part(self, part: AnswerPart) -> bytes:
        """Return a part of the answer for a stream."""

    @abstractmethod
    def end(self, end: AnswerEnd) -> bytes:
        """Return the end of a stream."""

    @abstractmethod
    def whole(self, parts: Sequence[AnswerPart], end: AnswerEnd) -> Json:
        """Return an answer that is not streamed."""

    def _end(self, choice: Json, end: AnswerEnd) -> bytes:
        usage = self._chunk([], self.usage(end)) if self.has_usage else b""
        return self._chunk([choice]) + usage + b"data: [DONE]\n\n"


class TextFormat(AnswerFormat):
    """The answer of ``/v1/completions``."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    _offset = 0

    def part(self, part: AnswerPart) -> bytes:
        return self._chunk([self._choice(part.text, part.tokens, None)])

    def end(self, end: AnswerEnd) -> bytes:
        return self._end(self._choice("", [], end.reason), end)

    def whole(self, parts: Sequence[AnswerPart], end: AnswerEnd) -> Json:
        text = "".join(part.text for part in parts)
        choice = self._choice(text, _tokens_of(parts), end.reason)
        return {**self._object(self.whole_object, [choice]), "usage": self.usage(end)}

    def _choice(self, text: str, tokens: Sequence[GeneratedToken], reason: str | None) -> Json:
        return {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
        }

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> Json | None:
        if self.spelling is None:
            return None
        texts = [self.spelling.text(token.id) for token in tokens]
        offsets: list[JsonValue] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [self._named(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._named(id): logprob for id, logprob in token.likeliest} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _named(self, id: int) -> str:
        """Return the text of a token, or its bytes if they are not a text: several tokens would
        have the same name otherwise."""
        assert self.spelling is not None
        content = self.spelling.bytes(id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


@dataclass
class ChatFormat(AnswerFormat):
    """The answer of ``/v1/chat/completions``.

    Args:
        parser: what separates reasoning, content and tool calls.
    """

    parser: MessageParser | None = None
    num_calls: int = 0
    unsent: list[GeneratedToken] = field(default_factory=list)
    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def start(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""}, [])

    def part(self, part: AnswerPart) -> bytes:
        assert self.parser is not None
        self.unsent += part.tokens
        return self._sent(self.parser.push(part.text))

    def end(self, end: AnswerEnd) -> bytes:
        assert self.parser is not None
        rest = self._sent(self.parser.finish())
        tokens, self.unsent = self.unsent, []
        choice: Json = {
            "index": 0,
            "delta": {},
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": self._reason(end),
        }
        return rest + self._end(choice, end)

    def whole(self, parts: Sequence[AnswerPart], end: AnswerEnd) -> Json:
        assert self.parser is not None
        read = [*(self.parser.push(part.text) for part in parts), self.parser.finish()]
        calls = [call for part in read for call in part.tool_calls]
        self.num_calls = len(calls)
        content = "".join(part.content for part in read)
        message: Json = {
            "role": "assistant",
            "content": content if content or not calls else None,
        }
        reasoning = "".join(part.reasoning for part in read)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice: Json = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(_tokens_of(parts)),
            "finish_reason": self._reason(end),
        }
        return {**self._object(self.whole_object, [choice]), "usage": self.usage(end)}

    def _sent(self, part: MessagePart) -> bytes:
        if part.is_empty:
            return b""
        tokens, self.unsent = self.unsent, []
        delta: Json = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        if part.tool_calls:
            delta["tool_calls"] = [
                {"index": self.num_calls + number, **_call(call)}
                for number, call in enumerate(part.tool_calls)
            ]
            self.num_calls += len(part.tool_calls)
        return self._delta(delta, tokens)

    def _delta(self, delta: Json, tokens: Sequence[GeneratedToken]) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        choice: Json = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._chunk([choice])

    def _reason(self, end: AnswerEnd) -> str:
        return "tool_calls" if self.num_calls and end.reason == "stop" else end.reason

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> Json | None:
        if self.spelling is None:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: GeneratedToken) -> Json:
        return {
            **self._spelled(token.id, token.logprob),
            "top_logprobs": [self._spelled(id, logprob) for id, logprob in token.likeliest],
        }

    def _spelled(self, id: int, logprob: float | None) -> Json:
        assert self.spelling is not None
        return {
            "token": self.spelling.text(id),
            "logprob": logprob,
            "bytes": [*self.spelling.bytes(id)],
        }


def _call(call: CalledTool) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _tokens_of(parts: Sequence[AnswerPart]) -> list[GeneratedToken]:
    return [token for part in parts for token in part.tokens]


def event(content: Mapping[str, JsonValue]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def model_list(names: Sequence[str], created: int) -> Json:
    """Return the answer of ``/v1/models``."""
    return {"object": "list", "data": [model_entry(name, created) for name in names]}


def model_entry(name: str, created: int) -> Json:
    """Return the description of a model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "paceline"}

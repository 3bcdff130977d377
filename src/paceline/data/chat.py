"""Chat templates: a chat as the model sees it, and where in it the answers stand."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.data.formats import Message

Span = tuple[int, int]

# Unicode noncharacters: no text holds them, so they can stand for the ends of a {% generation %} block while rendering.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class TemplateRefused(Exception):
    """The template raised on a chat (roles out of order, no system message allowed…)."""


@dataclass
class Rendered:
    """A chat as text. ``spans`` are [start, end) in characters of what carries loss, in order; ``unplaced`` is the number of
    assistant turns that could not be found in the text and so carry none."""

    text: str
    spans: list[Span]
    unplaced: int = 0


class ChatTemplate:
    """A Jinja chat template, rendered as transformers does.

    Args:
        source: the template.
        special_tokens: name to text, given to the template as variables.

    Raises:
        ConfigError: the template is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _compile(source)
        self._variables = {"bos_token": "", "eos_token": "", **special_tokens}
        self._marked = re.search(r"{%-?\s*generation\b", source) is not None
        self._has_prompt: bool | None = None

    def render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """The chat as text.

        Raises:
            TemplateRefused: the template raised.
        """
        return self._raw(messages, add_generation_prompt).replace(_OPEN, "").replace(_CLOSE, "")

    def _raw(self, messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except Exception as error:  # templates are programs: undefined variables, wrong types, their own raise_exception
            raise TemplateRefused(str(error).strip() or type(error).__name__) from error

    def answers(self, messages: list[Message]) -> Rendered:
        """The chat as text, with the spans of every assistant turn: its content and its end-of-turn token.

        A template's own ``{% generation %}`` marks are taken where it has them. Else a turn begins where the chat before it,
        rendered with the generation prompt, ends, and ends where the chat up to it ends. Where that is no prefix of the whole
        (templates that rewrite history), the turn's content is looked for in the text.

        Raises:
            TemplateRefused: the template raised on the whole chat.
        """
        if self._marked and not any(_OPEN in one["content"] or _CLOSE in one["content"] for one in messages):
            raw = self._raw(messages, False)
            if _OPEN in raw:
                return _from_marks(raw, self._variables["eos_token"], sum(one["role"] == "assistant" for one in messages))
        full = self.render(messages)
        spans: list[Span] = []
        unplaced = 0
        cursor = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                span = self._place(full, messages, index, cursor)
                if span is None:
                    unplaced += 1
                    continue
                spans.append(span)
                cursor = span[1]
            elif (at := full.find(message["content"].strip(), cursor)) >= 0:
                cursor = at + len(message["content"].strip())
        return Rendered(full, spans, unplaced)

    def _place(self, full: str, messages: list[Message], index: int, cursor: int) -> Span | None:
        text = messages[index]["content"]
        upto = full if index == len(messages) - 1 else self._try(messages[: index + 1], False)
        before = self._try(messages[:index], True)
        prefix = len(before) if before and full.startswith(before) else None
        content = self._find_content(full, upto, text, max(cursor, prefix or 0))
        if before and prefix is not None and (content is None or self._prompts(messages[:index], before)):
            start = prefix
        elif content is not None:
            start = content[0]
        else:
            return None
        if upto is not None and len(upto) > start and full.startswith(upto):
            return start, _trimmed(full, start, len(upto), text)
        return (start, content[1]) if content else None

    def _try(self, messages: list[Message], add_generation_prompt: bool) -> str | None:
        try:
            return self.render(messages, add_generation_prompt) if messages else None
        except TemplateRefused:
            return None

    def _prompts(self, messages: list[Message], with_prompt: str) -> bool:
        """Whether the template has a generation prompt; without one the assistant's header would count as its answer."""
        if self._has_prompt is None:
            self._has_prompt = self._try(messages, False) != with_prompt
        return self._has_prompt

    def _find_content(self, full: str, upto: str | None, content: str, cursor: int) -> Span | None:
        without_thoughts = content.split("</think>")[-1].strip()
        for piece in (content, content.strip(), without_thoughts):
            at = full.find(piece, cursor) if piece else -1
            if at < 0:
                continue
            end = at + len(piece)
            # What follows the content where the chat ends with it is the end of turn; it does here too.
            tail = upto[upto.rfind(piece) + len(piece) :].rstrip() if upto and piece in upto else ""
            return at, end + len(tail) if tail and full.startswith(tail, end) else end
        return None


def _trimmed(full: str, start: int, end: int, content: str) -> int:
    """The end of a turn without the white space that follows its end-of-turn token; where there is no such token, with it."""
    turn = full[start:end].rstrip()
    return end if turn.endswith(content.strip()) else start + len(turn)


def _from_marks(raw: str, eos: str, num_answers: int) -> Rendered:
    text = ""
    spans: list[Span] = []
    for number, part in enumerate(re.split(f"[{_OPEN}{_CLOSE}]", raw)):
        if number % 2 and part:
            spans.append((len(text), len(text) + len(part)))
        elif spans and eos and part.startswith(eos) and spans[-1][1] == len(text):
            # Marks that leave the end of turn out would give a model that never stops.
            spans[-1] = (spans[-1][0], len(text) + len(eos))
        text += part
    return Rendered(text, spans, max(0, num_answers - len(spans)))


def _compile(source: str) -> Callable[..., str]:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` marks what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012  (jinja reads it from the class)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

        def _wrap(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own filter escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        return environment.from_string(source).render
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is no valid Jinja: {error.message} at its line {error.lineno}") from error

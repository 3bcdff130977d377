"""Chat templates: a chat as the model sees it, and where in it the answers stand."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError
from paceline.data.sources.rows import Row
from paceline.data.text.tool_calls import Message, with_arguments_as_text, with_short_ids

Span = tuple[int, int]
Tools = list[Row] | None

# Unicode noncharacters: no text holds them, so they can stand for the ends of a {% generation %}
# block while rendering.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class TemplateRefused(Exception):
    """The template raised on a chat (roles out of order, no system message allowed…)."""


@dataclass
class Rendered:
    """A chat as text.

    Args:
        spans: [start, end) in characters of what carries loss, in order.
        unplaced: assistant turns that could not be found in the text and so carry no loss.
        excluded: [start, end) of assistant turns on which the loss is switched off.
        excluded_turns: the number of those turns, also those that could not be found.
    """

    text: str
    spans: list[Span]
    unplaced: int = 0
    excluded: list[Span] = field(default_factory=list)
    excluded_turns: int = 0


class ChatTemplate:
    """A Jinja chat template, rendered as transformers does.

    Args:
        source: the template.
        special_tokens: name to text, given to the template as variables.
        for_tools: another template, for chats with tools, tool calls or reasoning that this one
            does not write.

    Raises:
        ConfigError: the template is no valid Jinja.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], for_tools: str | None = None
    ) -> None:
        self._for_tools = None if for_tools is None else ChatTemplate(for_tools, special_tokens)
        self._template, self._words = _compile(source)
        self._variables = {"bos_token": "", "eos_token": "", **special_tokens}
        self._marked = re.search(r"{%-?\s*generation\b", source) is not None
        self._has_prompt: bool | None = None

    def uses(self, name: str) -> bool:
        """Whether the template, or the one for chats with tools, looks at `tools`, `tool_calls` or
        `reasoning_content`."""
        is_used = name in self._words or (name == "reasoning_content" and "thinking" in self._words)
        return is_used or (self._for_tools is not None and self._for_tools.uses(name))

    def chosen(self, messages: list[Message], tools: Tools) -> ChatTemplate:
        """The template that writes this chat: this one, or the one for chats with tools."""
        if self._for_tools is None:
            return self
        needs: set[str] = {
            key
            for message in messages
            for key in ("tool_calls", "reasoning_content")
            if key in message
        }
        needs |= {"tools"} if tools else set()
        return self._for_tools if needs - self._words else self

    def render(
        self, messages: list[Message], add_generation_prompt: bool = False, tools: Tools = None
    ) -> str:
        """The chat as text.

        Raises:
            TemplateRefused: the template raised.
        """
        template = self.chosen(messages, tools)
        return (
            template._raw(messages, add_generation_prompt, tools)
            .replace(_OPEN, "")
            .replace(_CLOSE, "")
        )

    def _raw(self, messages: list[Message], add_generation_prompt: bool, tools: Tools) -> str:
        try:
            return self._template(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        # Templates are programs: undefined variables, wrong types, their own raise_exception.
        except Exception as error:
            raise TemplateRefused(str(error).strip() or type(error).__name__) from error

    def _accepted(self, messages: list[Message], tools: Tools) -> list[Message]:
        """The messages in the first spelling of their tool calls that the template takes.

        Raises:
            TemplateRefused: it takes none.
        """
        refusal: TemplateRefused | None = None
        for change in (
            None,
            with_short_ids,
            with_arguments_as_text,
            lambda chat: with_arguments_as_text(with_short_ids(chat)),
        ):
            changed = messages if change is None else change(messages)
            try:
                self._raw(changed, False, tools)
            except TemplateRefused as error:
                refusal = refusal or error
            else:
                return changed
        assert refusal is not None
        raise refusal

    def answers(
        self, messages: list[Message], tools: Tools = None, off: Collection[int] = ()
    ) -> Rendered:
        """The chat as text, with the spans of every assistant turn: its content and its end-of-turn
        token.

        A template's own ``{% generation %}`` marks are taken where it has them. Else a turn begins
        where the chat before it, rendered with the generation prompt, ends, and ends where the chat
        up to it ends. Where that is no prefix of the whole (templates that rewrite history), the
        turn's content is looked for in the text.

        Args:
            tools: what the template gets as `tools`.
            off: indices of assistant messages that carry no loss; their spans are in ``excluded``.

        Raises:
            TemplateRefused: the template raised on the whole chat.
        """
        if (template := self.chosen(messages, tools)) is not self:
            return template.answers(messages, tools, off)
        has_calls = has_marks = False
        for message in messages:
            content = message["content"]
            has_calls = has_calls or "tool_calls" in message
            has_marks = has_marks or _OPEN in content or _CLOSE in content
        if has_calls:
            messages = self._accepted(messages, tools)
        if self._marked and not has_marks:
            raw = self._raw(messages, False, tools)
            if _OPEN in raw:
                num_answers = sum(message["role"] == "assistant" for message in messages)
                rendered = _from_marks(raw, self._variables["eos_token"], num_answers)
                if not off:
                    return rendered
                if (owners := self._owners(messages, tools, raw)) is not None:
                    return _without(rendered, [owner in off for owner in owners], len(off))
        full = self.render(messages, tools=tools)
        spans: list[Span] = []
        excluded: list[Span] = []
        unplaced = 0
        cursor = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                span = self._place(full, messages, index, cursor, tools)
                if span is None:
                    unplaced += index not in off
                    continue
                (excluded if index in off else spans).append(span)
                cursor = span[1]
            elif (at := full.find(message["content"].strip(), cursor)) >= 0:
                cursor = at + len(message["content"].strip())
        return Rendered(full, spans, unplaced, excluded, len(off))

    def _owners(self, messages: list[Message], tools: Tools, raw: str) -> list[int] | None:
        """For every marked part of ``raw`` that is not empty, the index of its message; None where
        that cannot be told."""
        answers = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        number = _num_marked(raw)
        if number == len(answers):
            return answers
        owners: list[int] = []
        for index in answers:
            try:
                upto = (
                    raw
                    if index == len(messages) - 1
                    else self._raw(messages[: index + 1], False, tools)
                )
            except TemplateRefused:
                return None
            owners += [index] * (_num_marked(upto) - len(owners))
        return owners if len(owners) == number else None

    def _place(
        self, full: str, messages: list[Message], index: int, cursor: int, tools: Tools
    ) -> Span | None:
        text = messages[index]["content"]
        upto = (
            full if index == len(messages) - 1 else self._try(messages[: index + 1], False, tools)
        )
        before = self._try(messages[:index], True, tools)
        prefix = len(before) if before and full.startswith(before) else None
        if (
            "tool_calls" in messages[index]
            and prefix is None
            and before
            and upto
            and upto.startswith(before)
        ):
            text = upto[len(before) :].rstrip()  # a call's text is the template's
        content = self._find_content(full, upto, text, max(cursor, prefix or 0))
        if (
            before
            and prefix is not None
            and (content is None or self._prompts(messages[:index], before, tools))
        ):
            start = prefix
        elif content is not None:
            start = content[0]
        else:
            return None
        if upto is not None and len(upto) > start and full.startswith(upto):
            return start, _trimmed(full, start, len(upto), messages[index]["content"])
        return (start, content[1]) if content else None

    def _try(
        self, messages: list[Message], add_generation_prompt: bool, tools: Tools
    ) -> str | None:
        try:
            return self.render(messages, add_generation_prompt, tools) if messages else None
        except TemplateRefused:
            return None

    def _prompts(self, messages: list[Message], with_prompt: str, tools: Tools) -> bool:
        """Whether the template has a generation prompt; without one the assistant's header would
        count as its answer."""
        if self._has_prompt is None:
            self._has_prompt = self._try(messages, False, tools) != with_prompt
        return self._has_prompt

    def _find_content(self, full: str, upto: str | None, content: str, cursor: int) -> Span | None:
        without_thoughts = content.split("</think>")[-1].strip()
        for piece in (content, content.strip(), without_thoughts):
            at = full.find(piece, cursor) if piece else -1
            if at < 0:
                continue
            end = at + len(piece)
            # What follows the content where the chat ends with it is the end of turn; it does here
            # too.
            tail = upto[upto.rfind(piece) + len(piece) :].rstrip() if upto and piece in upto else ""
            return at, end + len(tail) if tail and full.startswith(tail, end) else end
        return None


def _trimmed(full: str, start: int, end: int, content: str) -> int:
    """The end of a turn without the white space that follows its end-of-turn token; where there is
    no such token, with it."""
    turn = full[start:end].rstrip()
    return end if content.strip() and turn.endswith(content.strip()) else start + len(turn)


def _num_marked(raw: str) -> int:
    return len(re.findall(f"{_OPEN}[^{_CLOSE}]", raw))


def _without(rendered: Rendered, is_off: list[bool], excluded_turns: int) -> Rendered:
    spans = [span for span, off in zip(rendered.spans, is_off, strict=True) if not off]
    excluded = [span for span, off in zip(rendered.spans, is_off, strict=True) if off]
    return Rendered(rendered.text, spans, rendered.unplaced, excluded, excluded_turns)


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


def _compile(source: str) -> tuple[Callable[..., str], frozenset[str]]:
    """The template's render function, and the names and texts in its code."""
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
        # jinja's own filter escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        words = {
            str(value).strip("'\"")
            for _, kind, value in environment.lex(source)
            if kind in ("name", "string")
        }
        return environment.from_string(source).render, frozenset(words)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is no valid Jinja: {error.message} at its line {error.lineno}"
        ) from error

"""Render chats with a chat template, and find the spans of the answers in the text."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import JsonValue

from paceline.data.sources.rows import Row
from paceline.data.text.chats.jinja import CLOSE, OPEN, compile_template
from paceline.data.text.chats.tool_calls import ChatMessage, with_arguments_as_text, with_short_ids
from paceline.data.text.chats.turn_ends import PROBE, TurnEnds, shared_length, tokens_in

Span = tuple[int, int]
Tools = list[Row] | None

#: Limit of the sets of arguments of rows that a template remembers.
_MAX_VARIANTS = 256


class TemplateRefused(Exception):
    """The template raised an error on a chat (roles out of order, no system message allowed…)."""


@dataclass
class Rendered:
    """A chat as text.

    Args:
        spans: [start, end) in characters of the parts that carry loss, in order.
        unplaced: number of assistant turns not found in the text, which therefore carry no loss.
        excluded: [start, end) of the assistant turns whose loss is disabled.
        excluded_turns: the number of those turns, including those not found.
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
            does not support.
        control_tokens: the texts of the tokenizer's special tokens, among which are those that end
            a turn.
        arguments: further variables, such as ``enable_thinking``.

    Raises:
        ConfigError: the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        for_tools: str | None = None,
        control_tokens: Collection[str] = (),
        arguments: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self._for_tools = None
        if for_tools is not None:
            self._for_tools = ChatTemplate(for_tools, special_tokens, None, control_tokens)
        self._source = source
        self._control_tokens = {*control_tokens, special_tokens.get("eos_token", "")} - {""}
        self._last_characters = frozenset(token[-1] for token in self._control_tokens)
        self._compiled = compile_template(source)
        self._variables = {"bos_token": "", "eos_token": "", **special_tokens, **(arguments or {})}
        self._special_names = frozenset({"bos_token", "eos_token", *special_tokens})
        self._variants: dict[str, ChatTemplate] = {}
        self._marked = has_generation_blocks(source)
        self._has_prompt: bool | None = None

    def uses(self, name: str) -> bool:
        """Return whether the template, or the one for chats with tools, uses `tools`, `tool_calls`
        or `reasoning_content`."""
        names = {name, "thinking"} if name == "reasoning_content" else {name}
        if names & self._compiled.identifiers:
            return True
        return self._for_tools is not None and self._for_tools.uses(name)

    @property
    def argument_names(self) -> list[str]:
        """Names of the variables that the template reads and that a user may set."""
        return sorted(self._compiled.variables - self._special_names)

    def with_arguments(self, arguments: Mapping[str, JsonValue]) -> ChatTemplate:
        """Return the template with these variables in place of its own of the same names."""
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            variant = copy.copy(self)
            variant._variables = {**self._variables, **arguments}
            variant._variants, variant._has_prompt = {}, None
            vars(variant).pop("_turn_ends", None)
            self._variants[key] = variant
        return self._variants[key]

    def select(self, messages: list[ChatMessage], tools: Tools) -> ChatTemplate:
        """Return the template for this chat: this one, or the one for chats with tools."""
        if self._for_tools is None:
            return self
        needs: set[str] = {
            key
            for message in messages
            for key in ("tool_calls", "reasoning_content")
            if key in message
        }
        needs |= {"tools"} if tools else set()
        return self._for_tools if needs - self._compiled.identifiers else self

    def render(
        self, messages: list[ChatMessage], add_generation_prompt: bool = False, tools: Tools = None
    ) -> str:
        """Return the chat as text.

        Raises:
            TemplateRefused: the template raised an error.
        """
        template = self.select(messages, tools)
        return template._plain(template._without_ends(messages), add_generation_prompt, tools)

    def _plain(self, messages: list[ChatMessage], add_generation_prompt: bool, tools: Tools) -> str:
        raw = self._raw(messages, add_generation_prompt, tools)
        return raw.replace(OPEN, "").replace(CLOSE, "")

    def _raw(self, messages: list[ChatMessage], add_generation_prompt: bool, tools: Tools) -> str:
        return self._run(self._converted(messages), add_generation_prompt, tools)

    def _without_ends(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages without end-of-turn tokens of their own; the template writes
        one in their place."""
        return [
            {**message, "content": self._without_end(message["content"])}
            if message["role"] == "assistant"
            and message["content"].rstrip()[-1:] in self._last_characters
            else message
            for message in messages
        ]

    def _without_end(self, content: str) -> str:
        stripped = content.rstrip()
        token = next(filter(stripped.endswith, self._turn_ends.added), "")
        return stripped.removesuffix(token) if token else content

    def is_formatted(self, messages: list[ChatMessage]) -> bool:
        """Return whether a question has tokens with which the template begins turns, so that it may
        be formatted already."""
        tokens = self._turn_ends.before_turns
        return any(
            message["role"] == "user" and any(token in message["content"] for token in tokens)
            for message in messages
        )

    def _converted(self, messages: list[ChatMessage]) -> Sequence[object]:
        """Return the messages as the template gets them."""
        return messages

    def _run(self, messages: Sequence[object], add_generation_prompt: bool, tools: Tools) -> str:
        try:
            return self._compiled.render(
                {"documents": None, **self._variables},
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        # Templates are programs: they may use undefined variables or raise errors of their own.
        except Exception as error:
            raise TemplateRefused(str(error).strip() or type(error).__name__) from error

    def _accepted(self, messages: list[ChatMessage], tools: Tools) -> list[ChatMessage]:
        """Return the messages in the first form of tool calls that the template accepts.

        Raises:
            TemplateRefused: the template accepts none of them.
        """
        refusals = []
        for convert in (
            lambda chat: chat,
            with_short_ids,
            with_arguments_as_text,
            lambda chat: with_arguments_as_text(with_short_ids(chat)),
        ):
            converted = convert(messages)
            try:
                self._raw(converted, False, tools)
            except TemplateRefused as error:
                refusals.append(error)
            else:
                return converted
        raise refusals[0]

    def render_with_spans(
        self, messages: list[ChatMessage], tools: Tools = None, excluded: Collection[int] = ()
    ) -> Rendered:
        """Return the chat as text, with the span of every assistant turn: its content and its
        end-of-turn token.

        Uses the template's ``{% generation %}`` marks if it has them. Otherwise a turn starts at
        the end of the chat before it, rendered with the generation prompt, and ends at the end of
        the chat up to it. If these are not prefixes of the full text (templates that rewrite
        history), the turn's content is searched for in the text.

        Args:
            tools: passed to the template as `tools`.
            excluded: indices of assistant messages without loss.

        Raises:
            TemplateRefused: the template raised an error on the full chat.
        """
        if (template := self.select(messages, tools)) is not self:
            return template.render_with_spans(messages, tools, excluded)
        messages = self._without_ends(messages)
        has_calls = has_marks = False
        for message in messages:
            content = message["content"]
            has_calls = has_calls or "tool_calls" in message
            has_marks = has_marks or OPEN in content or CLOSE in content
        if has_calls:
            messages = self._accepted(messages, tools)
        if self._marked and not has_marks:
            raw = self._raw(messages, False, tools)
            if OPEN in raw:
                num_answers = sum(message["role"] == "assistant" for message in messages)
                rendered = self._from_marks(raw, num_answers)
                if not excluded:
                    return rendered
                indices = self._marked_indices(messages, tools, raw)
                if indices is not None:
                    turns = zip(indices, rendered.spans, strict=True)
                    return _separate(rendered.text, turns, rendered.unplaced, excluded)
        full = self._plain(messages, False, tools)
        found: dict[int, Span] = {}
        unplaced = cursor = 0
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                span = self._find_turn(full, messages, index, cursor, tools)
                if span is None:
                    unplaced += index not in excluded
                    continue
                found[index] = span
                cursor = span[1]
            elif (at := full.find(message["content"].strip(), cursor)) >= 0:
                cursor = at + len(message["content"].strip())
        return _separate(full, found.items(), unplaced, excluded)

    def _marked_indices(
        self, messages: list[ChatMessage], tools: Tools, raw: str
    ) -> list[int] | None:
        """Return the index of the message for each marked part of ``raw`` that is not empty, or
        None if it cannot be determined."""
        answers = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        num_marked = _num_marked(raw)
        if num_marked == len(answers):
            return answers
        indices: list[int] = []
        for index in answers:
            try:
                text = raw
                if index < len(messages) - 1:
                    text = self._raw(messages[: index + 1], False, tools)
            except TemplateRefused:
                return None
            indices += [index] * (_num_marked(text) - len(indices))
        return indices if len(indices) == num_marked else None

    def _find_turn(
        self, full: str, messages: list[ChatMessage], index: int, cursor: int, tools: Tools
    ) -> Span | None:
        text = messages[index]["content"]
        upto = (
            full if index == len(messages) - 1 else self._try(messages[: index + 1], False, tools)
        )
        before = self._try(messages[:index], True, tools)
        prefix = self._prompt_end(full, before, messages[:index], tools)
        if (
            "tool_calls" in messages[index]
            and before
            and upto
            and upto.startswith(before)
            and not full.startswith(before)
        ):
            text = upto[len(before) :].rstrip()  # the template determines the text of a call
        content = self._find_content(full, upto, text, max(cursor, prefix or 0))
        if (
            before
            and prefix is not None
            and (
                content is None
                or not full[prefix : content[0]].strip()
                or self._has_generation_prompt(messages[:index], before, tools)
            )
        ):
            start = prefix
        elif content is not None:
            # The prompt is not in the text if the template writes earlier turns in another way.
            start = self._turn_ends.after_header(full, cursor, content[0])
        else:
            return None
        end = content[1] if content else None
        if upto is not None and len(upto) > start:
            if full.startswith(upto):
                end = _trimmed(full, start, len(upto), messages[index]["content"])
            elif full.startswith(body := self._turn_ends.without_end(upto)) and len(body) > start:
                end = len(body)
        return None if end is None else (start, self._turn_ends.end_of(full, start, end))

    def _prompt_end(
        self, full: str, prompt: str | None, earlier: list[ChatMessage], tools: Tools
    ) -> int | None:
        """Return the number of characters that a chat shares with the prompt of one of its answers,
        or None if it shares nothing of the generation prompt.

        The generation prompt of reasoning models may begin the reasoning, ``<think>\\n``, where an
        answer without reasoning has ``<think></think>``."""
        if not prompt:
            return None
        if full.startswith(prompt):
            return len(prompt)
        before = self._try(earlier, False, tools) or ""
        shared = shared_length(prompt, full)
        return shared if shared > len(before) and full.startswith(before) else None

    def end_tokens(self) -> list[str]:
        """Return the special tokens with loss that end answers: the first one after the content of
        each answer."""
        for chat in (_probe(), _probe()[:2]):
            try:
                rendered = self.render_with_spans(chat)
            except TemplateRefused:  # a template of one answer
                continue
            turns = [rendered.text[start:end] for start, end in rendered.spans]
            return sorted(set(map(self._turn_ends.end_token_of, turns)) - {""})
        return []

    @cached_property
    def _turn_ends(self) -> TurnEnds:
        chat = _probe()
        texts = (self._try(chat[:length], False, None) for length in (len(chat), 2))
        probe, question = next(filter(None, texts), ""), self._try(chat[:1], False, None) or ""
        tokens = tokens_in(self._control_tokens, self._source, probe)
        prompt = self._try(chat[:1], True, None) or ""
        # Some templates end a chat with an end-of-text token unless they add a generation prompt.
        if not prompt.startswith(question):
            question = question.removesuffix(next(filter(question.endswith, tokens), ""))
        return TurnEnds(tokens, probe, prompt.removeprefix(question))

    def _from_marks(self, raw: str, num_answers: int) -> Rendered:
        text, eos = "", str(self._variables["eos_token"])
        spans: list[Span] = []
        for number, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", raw)):
            if number % 2 and part:
                spans.append((len(text), len(text) + len(part)))
            elif spans and eos and part.startswith(eos) and spans[-1][1] == len(text):
                # A model trained without the end of turn would never stop.
                spans[-1] = (spans[-1][0], len(text) + len(eos))
            text += part
        spans = [(start, self._turn_ends.end_of(text, start, end)) for start, end in spans]
        return Rendered(text, spans, max(0, num_answers - len(spans)))

    def _try(
        self, messages: list[ChatMessage], add_generation_prompt: bool, tools: Tools
    ) -> str | None:
        try:
            return self._plain(messages, add_generation_prompt, tools) if messages else None
        except TemplateRefused:
            return None

    def _has_generation_prompt(
        self, messages: list[ChatMessage], with_prompt: str, tools: Tools
    ) -> bool:
        """Return whether the template has a generation prompt. Without one, the assistant's header
        would be part of its answer."""
        if self._has_prompt is None:
            self._has_prompt = self._try(messages, False, tools) != with_prompt
        return self._has_prompt

    def _find_content(self, full: str, upto: str | None, content: str, cursor: int) -> Span | None:
        without_reasoning = content.split("</think>")[-1].strip()
        for piece in (content, content.strip(), without_reasoning):
            at = full.find(piece, cursor) if piece else -1
            if at < 0:
                continue
            end = at + len(piece)
            # The text after the content is the end of turn if the chat up to this turn has it too.
            tail = upto[upto.rfind(piece) + len(piece) :].rstrip() if upto and piece in upto else ""
            return at, end + len(tail) if tail and full.startswith(tail, end) else end
        return None


def has_generation_blocks(source: str) -> bool:
    """Return whether a template marks its answers with ``{% generation %}``."""
    return re.search(r"{%-?\s*generation\b", source) is not None


def num_without_reasoning(messages: list[ChatMessage], text: str) -> int:
    """Return the number of answers whose reasoning the template has left out of the text."""
    count = 0
    for message in messages:
        if message["role"] != "assistant":
            continue
        reasoning = message.get("reasoning_content")
        if reasoning is None and "</think>" in message["content"]:
            reasoning = message["content"].partition("</think>")[0].rpartition("<think>")[2]
        count += bool(reasoning and reasoning.strip() not in text)
    return count


def given_arguments(arguments: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the arguments that have a value. Tables have null for those that a row lacks."""
    return {name: value for name, value in arguments.items() if value is not None}


def listed_arguments(names: Collection[str]) -> str:
    """Return which arguments a template reads, for error messages."""
    return ", ".join(f"`{name}`" for name in names) or "no argument: this template reads none"


def _probe() -> list[ChatMessage]:
    roles = ("user", "assistant") * (len(PROBE) // 2)
    return [{"role": role, "content": text} for role, text in zip(roles, PROBE, strict=True)]


def _trimmed(full: str, start: int, end: int, content: str) -> int:
    """Return the end of a turn without the white space after its end-of-turn token, or with it if
    there is no such token."""
    turn = full[start:end].rstrip()
    return end if content.strip() and turn.endswith(content.strip()) else start + len(turn)


def _num_marked(raw: str) -> int:
    return len(re.findall(f"{OPEN}[^{CLOSE}]", raw))


def _separate(
    text: str, turns: Iterable[tuple[int, Span]], unplaced: int, excluded: Collection[int]
) -> Rendered:
    """Return a rendered chat, with the spans of the turns whose index is ``excluded`` apart."""
    rendered = Rendered(text, [], unplaced, excluded_turns=len(excluded))
    for index, span in turns:
        (rendered.excluded if index in excluded else rendered.spans).append(span)
    return rendered

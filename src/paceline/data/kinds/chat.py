"""Chats, prompts with their completions, and texts, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.config.chat_names import TEMPLATE_NAMES
from paceline.core.errors import ConfigError
from paceline.data.kinds.base import Encoded, KindSetup, RowCounts
from paceline.data.kinds.document import DocumentKind, Encoder
from paceline.data.sources.resolve import Place
from paceline.data.text.chat_template import Rendered, num_without_reasoning
from paceline.data.text.positions import TokenizedText, tokenize
from paceline.data.text.sample import ChatSample, as_chat

#: Number of last tokens of a turn among which to look for an end-of-turn token. Only white space
#: may follow it.
_END_TOKENS = 8


class ChatKind(DocumentKind):
    """Chats, whose answers carry loss. Prompts with completions become chats if there is a chat
    template. Plain text is a sample in which every token carries loss."""

    has_answers = True

    def __init__(self, setup: KindSetup) -> None:
        super().__init__(setup)
        args = setup.config.train_args
        self.train_on_inputs = args.train_on_inputs
        self.last_turn_only = args.train_on_turns == "last"

    # -- tokens
    def _prepare(self, sample: ChatSample) -> tuple[Encoder, Any] | str:
        if sample.text is not None:
            return self._encode_texts, (self._as_text(sample), sample.is_document)
        if sample.pair is not None and self.template is None:
            return self._encode_pairs, sample.pair
        rendered = self._render(sample)
        return self._rejection(rendered) or (self._encode_chats, rendered)

    def _render(self, sample: ChatSample) -> Rendered:
        """Return a chat as text.

        Raises:
            ConfigError: there is no chat template.
            TemplateRefused: the chat template raised an error.
        """
        messages = (
            sample.messages if sample.messages is not None else as_chat(sample, self.config.system)
        )
        if self.template is None:
            raise ConfigError(
                "no chat template: the dataset contains chats (or instructions), and the tokenizer"
                " does not define how to format them",
                code="no-chat-template",
                allowed=(
                    ("`chat_template: chatml`, or another of " + ", ".join(TEMPLATE_NAMES))
                    + ", or a file with a Jinja template"
                ),
                fix="for a base model set `chat_template: chatml`; or use a chat model's tokenizer"
                " with `tokenizer: ...`; or train on plain text with `task: pretrain`, or on a"
                " dataset with prompt and completion",
            )
        excluded = sample.excluded
        if self.last_turn_only:
            answers = [
                index for index, message in enumerate(messages) if message["role"] == "assistant"
            ]
            excluded = excluded.union(answers[:-1])
        self.tally.facts["formatted"] += self.template.is_formatted(messages)
        template = self.template.with_arguments(sample.template_arguments)
        selected = template.select(messages, sample.tools)
        self.tally.facts["other_template"] += selected is not template
        rendered = selected.render_with_spans(messages, sample.tools, excluded)
        self.tally.facts["dropped_reasoning"] += num_without_reasoning(messages, rendered.text)
        self.tally.facts["unplaced"] += rendered.unplaced
        return rendered

    def _rejection(self, rendered: Rendered) -> str | None:
        """Return why a chat with excluded turns cannot be used, or None."""
        if not rendered.excluded_turns:
            return None
        if self.train_on_inputs:
            if len(rendered.excluded) < rendered.excluded_turns:
                return "a turn without loss was not found in the rendered chat"
        elif not rendered.spans and not rendered.unplaced:
            return "the loss is disabled for every turn"
        return None

    def _encode_chats(self, chats: list[Rendered]) -> list[Encoded]:
        texts = tokenize(self.tokenizer, [chat.text for chat in chats])
        return [self._encode_chat(chat, text) for chat, text in zip(chats, texts, strict=True)]

    def _encode_chat(self, chat: Rendered, text: TokenizedText) -> Encoded:
        ids = np.array(text.ids, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for span in sorted(chat.spans):
            first, end = text.tokens_of(span)
            mask[first:end] = True
        self._check_end_of_turn(ids, mask)
        if self.train_on_inputs:
            mask[:] = True
            for span in chat.excluded:
                first, end = text.tokens_of(span)
                mask[first:end] = False
        return Encoded(ids, mask, {"excluded_turns": chat.excluded_turns})

    def _check_end_of_turn(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Count the chats whose last turn with loss has no end-of-turn token. Only white space may
        follow it."""
        for index in np.flatnonzero(mask)[:-_END_TOKENS:-1]:
            token = int(ids[index])
            if token in self.tokenizer.special_ids or token == self.tokenizer.eos_token_id:
                return
            if self.tokenizer.decode([token]).strip():
                self.tally.facts["no_end_of_turn"] += 1
                return

    def _encode_pairs(self, pairs: list[tuple[str, str]]) -> list[Encoded]:
        """Tokenize each prompt with its completion. A token that has characters of both carries
        loss."""
        samples = []
        complete = (prompt + answer for prompt, answer in pairs)
        texts = tokenize(self.tokenizer, [*map(self.tokenizer.without_space_after_end, complete)])
        for (prompt, _), text in zip(pairs, texts, strict=True):
            ids, start = self._complete(text, len(prompt))
            mask = np.arange(len(ids)) >= start
            samples.append(Encoded(np.array(ids, dtype=np.int32), mask | self.train_on_inputs))
        return samples

    def _complete(self, text: TokenizedText, char: int) -> tuple[list[int], int]:
        """Return the tokens of a text with the special tokens before and after it, and the index of
        the token at a character."""
        start = self.tokenizer.missing_start(text.ids)
        ids = [*start, *text.ids, *self._missing_end(text.ids)]
        return ids, len(start) + text.token_at(char)

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        for part in super().fit(encoded, counts, place):
            counts.excluded_turns += encoded.values.get("excluded_turns", 0)
            yield part

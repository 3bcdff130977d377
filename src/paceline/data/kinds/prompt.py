"""Prompts, for which a model in training generates the completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.data.kinds.base import TOO_LONG, Encoded, KindSetup, RowCounts
from paceline.data.kinds.document import DocumentKind
from paceline.data.sources.resolve import Place, ResolvedSource
from paceline.data.sources.rows import MalformedRow, Row, is_missing
from paceline.data.text.chat_template import TemplateRefused
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.chats.turns import unpack_list
from paceline.data.text.columns import check_columns, rename_columns
from paceline.data.text.messages import MessageReader, read_text, role_names
from paceline.data.text.positions import tokenize
from paceline.data.text.token_columns import BlobColumn, Column
from paceline.data.text.token_dataset import TokenDataset

PROMPT = "prompt"
#: The row of each prompt as JSON, see :class:`PromptRow`.
ROW = BlobColumn("row")


@dataclass(frozen=True)
class PromptRow:
    """A row with a prompt.

    Args:
        prompt: the text, or the messages of a chat.
        columns: the other columns, which reward functions receive.
        place: the file and the number of the row, for messages.
    """

    prompt: str | list[ChatMessage]
    columns: dict[str, JsonValue]
    place: str = ""


class PromptKind(DocumentKind):
    """Prompts as text or as the messages of a chat, with any other columns.

    A prompt is a sample of its own, without an answer, so no token carries loss. A text becomes the
    turn of a user if there is a chat template.
    """

    columns: ClassVar[Sequence[Column]] = (ROW,)
    formats: ClassVar[dict[str, str]] = {
        "prompt": "prompt: a text, or a list of {role, content}; and any columns for the rewards"
    }
    mapping: ClassVar[dict[str, str]] = {PROMPT: "YOURS"}
    has_answers = True

    def __init__(self, setup: KindSetup) -> None:
        super().__init__(setup)
        args = setup.config.train_args
        #: A prompt is never truncated: it would ask something else.
        self.longest = args.max_length - setup.config.grpo.max_completion_length

    # -- rows
    def open(self, source: ResolvedSource) -> None:
        spec = self._spec = source.spec
        # Reward functions name the other columns, so any name can be expected.
        check_columns(source.label, spec.columns, spec.ignore_columns, {PROMPT, *spec.columns})
        self._read = MessageReader(
            spec.columns,
            role_names(spec.roles, source.label),
            spec.ignore_columns,
            lambda name: True,
            self.tally,
        )

    def convert(self, row: Any) -> PromptRow:
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        row = rename_columns(row, self._spec.columns, self._spec.ignore_columns, self.tally)
        if PROMPT not in row:
            self.tally.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow("columns match no format")
        self.tally.seen["prompt"] += 1
        columns = {name: value for name, value in row.items() if name != PROMPT}
        return PromptRow(self._prompt_of(row), columns)

    def _prompt_of(self, row: Row) -> str | list[ChatMessage]:
        value = row[PROMPT]
        turns = unpack_list(value)
        if not isinstance(turns, list):
            return read_text(row, (PROMPT,), "prompt")
        messages = self._read(turns).messages
        if not messages or is_missing(messages[-1].get("content")):
            raise MalformedRow("empty prompt")
        if messages[-1]["role"] == "assistant":
            raise MalformedRow("the prompt ends with an answer")
        return messages

    # -- tokens
    def encode(self, samples: list[Any]) -> list[Encoded | str]:
        results: list[Encoded | str] = ["rejected by the chat template"] * len(samples)
        texts: dict[int, str] = {}
        for number, sample in enumerate(samples):
            try:
                texts[number] = self._text_of(sample)
            except TemplateRefused as error:
                self.tally.refusals[str(error).splitlines()[0][:200]] += 1
        tokenized = tokenize(self.tokenizer, [*texts.values()])
        for number, text in zip(texts, tokenized, strict=True):
            # The tokenizer's special tokens are in the text of a chat already.
            start = self.tokenizer.missing_start(text.ids) if self.template is None else []
            ids = np.array([*start, *text.ids], dtype=np.int32)
            has_loss, values = np.zeros(len(ids), dtype=np.bool_), {"sample": samples[number]}
            results[number] = Encoded(ids, has_loss, values) if len(ids) else "no tokens"
        return results

    def _text_of(self, sample: PromptRow) -> str:
        prompt = sample.prompt
        if isinstance(prompt, str):
            if self.template is None:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.template is None:
            raise _no_template()
        system = self.config.system
        if system and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *prompt]
        tools = [*self.setup.tools] or None
        return self.template.render(prompt, add_generation_prompt=True, tools=tools)

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        """Yield a prompt with its row, unless it is too long."""
        length = len(encoded.input_ids)
        if length > self.longest:
            counts.note_overlong(length)
            counts.drop(TOO_LONG, place)
            return
        counts.kept += 1
        sample = encoded.values["sample"]
        row = {"prompt": sample.prompt, "columns": sample.columns, "place": str(place)}
        content = json.dumps(row, default=str).encode()
        yield Encoded(encoded.input_ids, encoded.labels_mask, {"row": [content]})


def read_row(dataset: TokenDataset, index: int) -> PromptRow:
    """Return the row of a prompt."""
    (content,) = dataset.value(ROW.name, index)
    return PromptRow(**json.loads(content))


def _no_template() -> ConfigError:
    return ConfigError(
        "no chat template: the prompts are chats, and the tokenizer does not define how to format"
        " them",
        code="no-chat-template-for-prompts",
        allowed="prompts as text, or a chat template",
        fix="set `chat_template: chatml`, or use a chat model's tokenizer with `tokenizer: …`",
    )

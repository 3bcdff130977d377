"""Encode samples as token ids with a mask of the tokens that carry loss, in batches through the
Rust tokenizer."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config.chat_names import TEMPLATE_NAMES
from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate, Rendered, Span, TemplateRefused
from paceline.data.text.sample import Sample, as_chat
from paceline.data.text.token_dataset import Label
from paceline.data.text.tokenizer import LoadedTokenizer

#: Documents are tokenized in pieces of about this many characters, split at line ends, to bound
#: memory use.
_PIECE_CHARS = 1 << 18
_PIECES_PER_BATCH = 32
#: Number of last tokens of a turn among which to look for an end-of-turn token. Only white space
#: may follow it.
_END_TOKENS = 8


@dataclass
class Encoded:
    """One sample: ``input_ids`` int32 [tokens], ``labels_mask`` bool [tokens].

    Args:
        is_document: the sample is to be cut, never truncated.
        excluded_turns: number of assistant turns whose loss is disabled.
        labels: of a labeled text, which has no label tokens.
        is_truncated: the sample was longer before it was encoded.
        images: those of a chat.
        min_length: number of tokens up to the last one of an image; a sample that is truncated to
            fewer is dropped.
        weight: that of :class:`paceline.data.text.formats.Sample`.
        chosen_length: number of tokens of the sequence with the preferred answer, which comes first
            in a pair; of a single answer 0 if it is undesirable. None without preferences.
        margin: that of :class:`paceline.data.text.sample.Sample`.
    """

    input_ids: np.ndarray
    labels_mask: np.ndarray
    is_document: bool = False
    excluded_turns: int = 0
    labels: tuple[Label, ...] | None = None
    is_truncated: bool = False
    images: tuple[str | bytes, ...] = ()
    min_length: int = 0
    weight: float | None = None
    chosen_length: int | None = None
    margin: float = 0.0


@dataclass
class Encoder:
    """Encode samples for one task.

    Args:
        tokenizer: see :func:`paceline.data.text.tokenizer.load_tokenizer`.
        template: the chat template, or None.
        pretrain: every sample is text, and every token carries loss.
        train_on_inputs: every token carries loss, except those of turns whose loss is disabled.
        last_turn_only: of a chat's assistant turns only the last one carries loss.
        system: system message for prompts and completions that are converted to chats.

    Attributes:
        facts: counts to report to the user.
        refusals: error messages of the chat template, with their counts.
    """

    tokenizer: LoadedTokenizer
    template: ChatTemplate | None
    pretrain: bool = False
    train_on_inputs: bool = False
    last_turn_only: bool = False
    system: str | None = None
    facts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def __call__(self, samples: list[Sample]) -> list[Encoded | str]:
        """Return the tokens of each sample, or the reason why it is dropped.

        Raises:
            ConfigError: a sample is a chat, and there is no chat template.
        """
        results: dict[int, Encoded | str] = {}
        chats: dict[int, Rendered] = {}
        pairs: dict[int, tuple[str, str]] = {}
        for index, sample in enumerate(samples):
            self.facts["trailing_turns"] += sample.trailing_turns > 0
            try:
                if self.pretrain or sample.text is not None:
                    is_document = self.pretrain or sample.is_document
                    results[index] = self._encode_text(self._as_text(sample), is_document)
                elif sample.pair is not None and self.template is None:
                    pairs[index] = sample.pair
                else:
                    rendered = self._render(sample)
                    if reason := self._rejection(rendered):
                        results[index] = reason
                    else:
                        chats[index] = rendered
            except TemplateRefused as error:
                self.refusals[str(error).splitlines()[0][:200]] += 1
                results[index] = "rejected by the chat template"
        results.update(zip(chats, self._encode_chats(list(chats.values())), strict=True))
        results.update(zip(pairs, self._encode_pairs(list(pairs.values())), strict=True))
        for index, result in results.items():
            if isinstance(result, Encoded):
                result.weight = samples[index].weight
        return [results[index] for index in range(len(samples))]

    def _render(self, sample: Sample) -> Rendered:
        messages = sample.messages if sample.messages is not None else as_chat(sample, self.system)
        if self.template is None:
            raise ConfigError(
                "no chat template: the dataset contains chats (or instructions), and the tokenizer"
                " does not define how to format them",
                allowed="`chat_template: chatml`, or another of "
                + ", ".join(TEMPLATE_NAMES)
                + ", or a file with a Jinja template",
                fix=(
                    "for a base model set `chat_template: chatml`; or use a chat model's tokenizer"
                    " with `tokenizer: ...`; or train on plain text with `task: pretrain`, or on a"
                    " dataset with prompt and completion"
                ),
            )
        excluded = sample.excluded
        if self.last_turn_only:
            answers = [
                index for index, message in enumerate(messages) if message["role"] == "assistant"
            ]
            excluded = excluded.union(answers[:-1])
        selected = self.template.select(messages, sample.tools)
        self.facts["other_template"] += selected is not self.template
        rendered = selected.render_with_spans(messages, sample.tools, excluded)
        self.facts["unplaced"] += rendered.unplaced
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

    def _as_text(self, sample: Sample) -> str:
        if sample.text is not None:
            return sample.text
        if self.template is not None and sample.messages is not None:
            return self.template.render(sample.messages, tools=sample.tools)
        messages = sample.messages or []
        return "\n\n".join(sample.pair or [message["content"] for message in messages])

    def _encode_chats(self, chats: list[Rendered]) -> list[Encoded]:
        backend = self.tokenizer.backend
        if backend is None:
            return [self._encode_segments(chat) for chat in chats]
        samples = []
        encodings = backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        for chat, encoding in zip(chats, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.bool_)
            for span in chat.spans:
                first, end = _token_span(encoding, span, len(ids), len(chat.text))
                mask[first:end] = True
            self._check_end_of_turn(ids, mask)
            if self.train_on_inputs:
                mask[:] = True
                for span in chat.excluded:
                    first, end = _token_span(encoding, span, len(ids), len(chat.text))
                    mask[first:end] = False
            samples.append(Encoded(ids, mask, excluded_turns=chat.excluded_turns))
        return samples

    def _encode_segments(self, chat: Rendered) -> Encoded:
        """Encode a chat with a tokenizer that has no offsets: tokenize the text before, in and
        after each span separately."""
        ids: list[int] = []
        kinds: list[int] = []
        cursor = 0
        spans = sorted(
            [*((span, 1) for span in chat.spans), *((span, 2) for span in chat.excluded)]
        )
        for (start, end), kind in [*spans, ((len(chat.text), len(chat.text)), 0)]:
            for text, text_kind in ((chat.text[cursor:start], 0), (chat.text[start:end], kind)):
                piece = self._ids(text, add_special_tokens=False)
                ids += piece
                kinds += [text_kind] * len(piece)
            cursor = end
        array, mask = np.array(ids, dtype=np.int32), np.array(kinds, dtype=np.int8) == 1
        self._check_end_of_turn(array, mask)
        if self.train_on_inputs:
            mask = np.array(kinds, dtype=np.int8) != 2
        return Encoded(array, mask, excluded_turns=chat.excluded_turns)

    def _check_end_of_turn(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Count the chats whose last turn with loss has no end-of-turn token. Only white space may
        follow it."""
        for index in np.flatnonzero(mask)[:-_END_TOKENS:-1]:
            token = int(ids[index])
            if token in self.tokenizer.special_ids or token == self.tokenizer.eos_token_id:
                return
            if self.tokenizer.decode([token]).strip():
                self.facts["no_end_of_turn"] += 1
                return

    def _encode_pairs(self, pairs: list[tuple[str, str]]) -> list[Encoded]:
        """Tokenize prompts and completions separately, as in inference, so that the edge of the
        mask is exact."""
        prompts = self.tokenizer.encode_batch(
            [prompt for prompt, _ in pairs], add_special_tokens=True
        )
        answers = self.tokenizer.encode_batch(
            [answer for _, answer in pairs], add_special_tokens=False
        )
        eos = self._eos()
        samples = []
        for prompt, answer in zip(prompts, answers, strict=True):
            while prompt and eos and prompt[-1] == eos[0]:
                prompt = prompt[:-1]
            ids = np.array([*prompt, *answer, *eos], dtype=np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            samples.append(Encoded(ids, mask | self.train_on_inputs))
        return samples

    def _encode_text(self, text: str, is_document: bool) -> Encoded:
        ids: list[int] = []
        eos = self._eos()
        for piece_ids in self._encode_pieces(_pieces(text)):
            ids += piece_ids
            if eos and ids[-1:] == eos:
                ids.pop()
        array = np.array(ids + eos, dtype=np.int32)
        return Encoded(array, np.ones(len(array), dtype=np.bool_), is_document)

    def _encode_pieces(self, pieces: list[str]) -> Iterator[list[int]]:
        """Yield the ids of each piece. The tokenizer's first special token, if any, is added once,
        at the start. The tokenizer encodes several pieces at a time, on all cores."""
        start, has_begun = 0, False
        while start < len(pieces) and not has_begun:
            ids = self._ids(pieces[start], add_special_tokens=True)
            start, has_begun = start + 1, bool(ids)
            yield ids
        for first in range(start, len(pieces), _PIECES_PER_BATCH):
            batch = pieces[first : first + _PIECES_PER_BATCH]
            yield from self.tokenizer.encode_batch(batch, add_special_tokens=False)

    def _eos(self) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            self.facts["no_eos"] += 1
            return []
        return [self.tokenizer.eos_token_id]

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if not text:
            return []
        return self.tokenizer.encode_batch([text], add_special_tokens)[0]


def _token_span(encoding: Any, span: Span, num_tokens: int, num_chars: int) -> tuple[int, int]:
    """Return the first token that overlaps the characters [start, end), and one past the last."""
    start, end = span
    first = _token_at(encoding, start, num_tokens, num_chars)
    past = _token_at(encoding, end, num_tokens, num_chars)
    if past < num_tokens:
        token_start, _ = encoding.token_to_chars(past)
        past += token_start < end  # a token that extends past the end
    return first, past


def _token_at(encoding: Any, char: int, num_tokens: int, num_chars: int) -> int:
    # Characters that the tokenizer drops (some drop spaces) belong to no token. Use the next
    # character that does.
    for index in range(char, num_chars):
        token = encoding.char_to_token(index)
        if token is not None:
            return int(token)
    return num_tokens


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = text.rfind("\n", start, start + _PIECE_CHARS) + 1
        end = end if end > start else start + _PIECE_CHARS
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]

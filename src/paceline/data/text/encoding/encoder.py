"""Encode samples as token ids with a mask of the tokens that carry loss, in batches through the
Rust tokenizer."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paceline.config.chat_names import TEMPLATE_NAMES
from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate, Rendered, TemplateRefused
from paceline.data.text.encoding.positions import TokenizedText, tokenize
from paceline.data.text.sample import Sample, as_chat
from paceline.data.text.token_dataset import Label
from paceline.data.text.tokenizer import LoadedTokenizer

#: Documents are tokenized in pieces of about this many characters, split at line ends, to bound
#: memory use.
_PIECE_CHARS = 1 << 18
_PIECES_PER_BATCH = 32
#: A piece is tokenized after up to this many characters of the piece before.
_CONTEXT_CHARS = 64
#: Two lines, to find out whether a tokenizer gives the same tokens for each of them alone.
_LINES = ("One two\n", "three four")
#: Number of last tokens of a turn among which to look for an end-of-turn token. Only white space
#: may follow it.
_END_TOKENS = 8


@dataclass
class Encoded:
    """One sample: ``input_ids`` int32 [tokens], ``labels_mask`` bool [tokens].

    Args:
        is_document: the sample is to be cut, never truncated.
        excluded_turns: number of assistant turns whose loss is disabled.
        labels: labels of a labeled text, which has no label tokens.
        is_truncated: the sample was longer before it was encoded.
        images: images of a chat.
        min_length: number of tokens up to the last one of an image; a sample that is truncated to
            fewer is dropped.
        weight: factor of the loss; None if the data has none.
        chosen_length: number of tokens of the sequence with the preferred answer, which comes first
            in a pair; of a single answer 0 if it is undesirable. None without preferences.
        margin: difference that the scores of the answers should have at least.
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
        train_on_inputs: every token carries loss, except in turns whose loss is disabled.
        last_turn_only: whether only the last assistant turn of a chat carries loss.
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
        texts: dict[int, tuple[str, bool]] = {}
        for index, sample in enumerate(samples):
            self.facts["trailing_turns"] += sample.trailing_turns > 0
            try:
                if self.pretrain or sample.text is not None:
                    texts[index] = self._as_text(sample), self.pretrain or sample.is_document
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
        results.update(zip(texts, self._encode_texts(list(texts.values())), strict=True))
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
        self.facts["formatted"] += self.template.is_formatted(messages)
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
            if sample.is_document:
                return sample.text
            return self.tokenizer.without_space_after_end(sample.text)
        if self.template is not None and sample.messages is not None:
            return self.template.render(sample.messages, tools=sample.tools)
        messages = sample.messages or []
        return "\n\n".join(sample.pair or [message["content"] for message in messages])

    def _encode_chats(self, chats: list[Rendered]) -> list[Encoded]:
        samples = []
        texts = tokenize(self.tokenizer, [chat.text for chat in chats])
        for chat, text in zip(chats, texts, strict=True):
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
            samples.append(Encoded(ids, mask, excluded_turns=chat.excluded_turns))
        return samples

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

    def _encode_texts(self, texts: list[tuple[str, bool]]) -> list[Encoded]:
        """Encode texts, some of them documents. Short texts are tokenized in one call."""
        short = [text for text, _ in texts if len(text) <= _PIECE_CHARS]
        tokens = iter(self.tokenizer.encode_batch(short, add_special_tokens=False))
        samples = []
        for text, is_document in texts:
            if len(text) <= _PIECE_CHARS:
                ids = next(tokens)
            else:
                ids = [token for piece in self._encode_pieces(_pieces(text)) for token in piece]
            ids = [*self.tokenizer.missing_start(ids), *ids, *self._missing_end(ids)]
            array = np.array(ids, dtype=np.int32)
            samples.append(Encoded(array, np.ones(len(array), dtype=np.bool_), is_document))
        return samples

    def _encode_pieces(self, pieces: list[str]) -> Iterator[list[int]]:
        """Yield the ids of each piece. The tokenizer encodes several pieces at a time, on all
        cores."""
        contexts = [""] * len(pieces)
        if not self._splits_at_lines:
            contexts[1:] = [_last_line(piece) for piece in pieces[:-1]]
        for first in range(0, len(pieces), _PIECES_PER_BATCH):
            part = slice(first, first + _PIECES_PER_BATCH)
            batch = list(zip(contexts[part], pieces[part], strict=True))
            ids = self._encode([context + piece for context, piece in batch])
            starts = self._encode([context for context, _ in batch])
            for (_, piece), tokens, start in zip(batch, ids, starts, strict=True):
                is_prefix = tokens[: len(start)] == start
                yield tokens[len(start) :] if is_prefix else self._encode([piece])[0]

    @property
    def _splits_at_lines(self) -> bool:
        """Whether the tokenizer gives each line the same tokens alone as after another line.
        Tokenizers of the SentencePiece type write a space before a text."""
        full, first, second = self._encode(["".join(_LINES), *_LINES])
        return full == first + second

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def _missing_end(self, ids: list[int]) -> list[int]:
        self.facts["no_eos"] += self.tokenizer.eos_token_id is None
        return self.tokenizer.missing_end(ids)


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = _line_start(text, start, start + _PIECE_CHARS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _line_start(text: str, start: int, end: int) -> int:
    """Return the start of the last line in ``text[start:end]``, or else of the last word; ``end``
    if there is none. A line that begins with a character is preferred to one that begins with a
    space: a token may have the line end and the space."""
    last = place = text.rfind("\n", start, end) + 1
    if last <= start:
        space = text.rfind(" ", start, end)
        return space if space > start else end
    while place > start and text[place : place + 1].isspace():
        place = text.rfind("\n", start, place - 1) + 1
    return place if place > start else last


def _last_line(piece: str) -> str:
    """Return the end of a piece, with the line end that it ends with."""
    tail = piece[-_CONTEXT_CHARS:]
    return tail[tail[:-1].rfind("\n") + 1 :]

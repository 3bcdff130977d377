"""Answers with preferences: pairs, or single answers that are marked as good or bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NotRequired

import numpy as np

from paceline.data.kinds.base import EQUAL_PAIRS, NO_ANSWER, NO_LABELS, TOO_LONG, Encoded, RowCounts
from paceline.data.kinds.chat import ChatKind
from paceline.data.kinds.document import Encoder
from paceline.data.sources.resolve import Place
from paceline.data.text.chat_template import num_without_reasoning
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.chats.turn_ends import shared_length
from paceline.data.text.positions import TokenizedText, tokenize
from paceline.data.text.preferences import (
    AnswerConverter,
    MarginConverter,
    PairConverter,
    RatedChat,
)
from paceline.data.text.sample import as_chat
from paceline.data.text.token_columns import Column, NumberColumn
from paceline.data.text.token_dataset import TokenDataset, TokenSample


class PreferenceSample(TokenSample):
    """A pair of token sequences, one after the other, or a single one. ``labels_mask`` is true for
    the tokens of the answers.

    Args:
        chosen_length: number of tokens of the first sequence, which has the preferred answer; of a
            single sequence 0 if its answer is undesirable.
        margin: difference that the scores of a pair should have at least.
        index: index of the sample in the dataset.
        mismatched: the prompt of this sample with the answer of another one, if the dataset has
            such pairs.
        reference: log-probabilities of the reference model, float32, once they are known.
    """

    chosen_length: int
    margin: float
    index: int
    mismatched: NotRequired[TokenSample]
    reference: NotRequired[np.ndarray]


class PairKind(ChatKind):
    """Pairs of a preferred and a rejected answer. Every token after the prompt carries loss.

    The prompt of a chat is the text that its prompt, with the generation prompt, has in common with
    the chat. A token that has characters of both carries loss, in all answers of the sample.
    """

    columns: ClassVar[Sequence[Column]] = (
        NumberColumn("chosen_length"),
        NumberColumn("margin", "float32"),
    )
    formats = PairConverter.formats
    mapping = PairConverter.mapping
    converter: ClassVar[Callable[..., Any]] = PairConverter

    # -- tokens
    def _prepare(self, sample: Any) -> tuple[Encoder, Any] | str:
        """As the method of :class:`DocumentKind`. ``_encode_answers`` takes the sample, the text of
        the prompt, and the texts of the prompt with each answer."""
        answers = [sample] if sample.rejected is None else [sample, sample.rejected]
        if self.template is None and sample.pair is not None:
            texts = ["".join(answer.pair or ()) for answer in answers]
            texts = [*map(self.tokenizer.without_space_after_end, texts)]
            return self._encode_answers, (sample, sample.pair[0], texts)
        if self.template is None:
            self._render(sample)  # raises: there is no chat template
        chats = [
            as_chat(answer, self.config.system) if answer.messages is None else answer.messages
            for answer in answers
        ]
        assert self.template is not None
        self.tally.facts["formatted"] += self.template.is_formatted(chats[0])
        template = self.template.with_arguments(sample.template_arguments)
        template = template.select(chats[0], sample.tools)
        prompt_turns = chats[0][: _num_prompt_turns(chats)]
        prompt = template.render(prompt_turns, add_generation_prompt=True, tools=sample.tools)
        texts = [template.render(chat, tools=sample.tools) for chat in chats]
        self.tally.facts["dropped_reasoning"] += sum(map(num_without_reasoning, chats, texts))
        return self._encode_answers, (sample, prompt, texts)

    def _encode_answers(self, contents: list[tuple[RatedChat, str, list[str]]]) -> list[Encoded]:
        """Return the tokens of each sample; of a pair, both sequences one after the other."""
        tokenized = iter(
            tokenize(self.tokenizer, [text for *_, texts in contents for text in texts])
        )
        results = []
        for sample, prompt, texts in contents:
            answers = [(next(tokenized), shared_length(prompt, text)) for text in texts]
            results.append(self._join(answers, sample))
        return results

    def _join(self, texts: list[tuple[TokenizedText, int]], sample: RatedChat) -> Encoded:
        """Return the tokens of the texts, one after the other.

        Args:
            texts: the text of each answer, with the number of characters of its prompt.
        """
        # The tokenizer's special tokens are in the text of a chat already.
        is_chat = self.template is not None
        parts = [
            (text.ids, text.token_at(length)) if is_chat else self._complete(text, length)
            for text, length in texts
        ]
        answers, start = [ids for ids, _ in parts], min(start for _, start in parts)
        masks = [np.arange(len(answer)) >= start for answer in answers]
        chosen_length = len(answers[0])
        if len(answers) == 1:
            chosen_length = chosen_length if sample.is_desirable else 0
        values = {"chosen_length": chosen_length, "margin": sample.margin or None}
        tokens = [token for answer in answers for token in answer]
        return Encoded(np.array(tokens, dtype=np.int32), np.concatenate(masks), values)

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        """Yield an answer, or a pair of them as one sample. Each is truncated on its own; a pair is
        dropped if one of them is."""
        answers = [answer for _, answer in self.sequences(encoded)]
        longest = max(len(answer.input_ids) for answer in answers)
        limit = self.max_length or longest
        if longest > limit:
            counts.note_overlong(longest)
            if self.drops_overlong:
                counts.drop(TOO_LONG, place)
                return
        answers = [answer.part(0, limit) for answer in answers]
        if not all(answer.labels_mask[1:].any() for answer in answers):
            counts.drop(NO_ANSWER if longest > limit else NO_LABELS, place)
            return
        counts.kept += 1
        counts.truncated += longest > limit
        ids = [answer.input_ids for answer in answers]
        if len(ids) == 2 and np.array_equal(ids[0], ids[1]):
            self.tally.facts[EQUAL_PAIRS] += 1
            counts.first.setdefault(EQUAL_PAIRS, place)
        masks = [answer.labels_mask for answer in answers]
        chosen_length = min(encoded.values["chosen_length"], limit)
        values = {**encoded.values, "chosen_length": chosen_length}
        yield Encoded(np.concatenate(ids), np.concatenate(masks), values)

    def sequences(self, encoded: Encoded) -> list[tuple[str, Encoded]]:
        chosen_length, length = encoded.values["chosen_length"], len(encoded.input_ids)
        if chosen_length in (0, length):
            return [("desirable" if chosen_length else "undesirable", encoded)]
        bounds = pairwise((0, chosen_length, length))
        names = ("chosen", "rejected")
        return [(name, encoded.part(*bound)) for name, bound in zip(names, bounds, strict=True)]


class MarginKind(PairKind):
    """Pairs for a reward model, with the margin of those that have one."""

    converter = MarginConverter


class AnswerKind(PairKind):
    """Single answers that are marked as good or bad."""

    formats = AnswerConverter.formats
    mapping = AnswerConverter.mapping
    converter = AnswerConverter


@dataclass
class PreferenceTransform:
    """Complete a sample: add its index, its margin if no sample has one, and the answer of another
    sample.

    Args:
        mismatch_size: size of the groups of consecutive samples within which each prompt is also
            paired with the answer of the sample before it, and the first prompt with the answer of
            the last sample; 0 for none. A last group of a single sample takes the answer of the
            sample before it.
        max_length: number of tokens to which these sequences are truncated.
    """

    mismatch_size: int = 0
    max_length: int = 0

    def __call__(self, sample: Any, index: int, dataset: TokenDataset) -> PreferenceSample:
        sample["index"] = index
        sample.setdefault("margin", 0.0)
        if self.mismatch_size:
            sample["mismatched"] = self._mismatched(sample, index, dataset)
        return sample  # type: ignore[no-any-return]

    def _mismatched(self, sample: TokenSample, index: int, dataset: TokenDataset) -> TokenSample:
        first = index - index % self.mismatch_size
        last = min(first + self.mismatch_size, len(dataset)) - 1
        number = last if index == first != last else max(index - 1, 0)
        other = dataset.piece(number, 0, int(dataset.lengths[number]))
        prompt = sample["input_ids"][~sample["labels_mask"]]
        answer = other["input_ids"][other["labels_mask"]]
        ids = np.concatenate([prompt, answer])[: self.max_length]
        return {"input_ids": ids, "labels_mask": np.arange(len(ids)) >= len(prompt)}


def _num_prompt_turns(chats: Sequence[list[ChatMessage]]) -> int:
    """Return how many turns the chats have in common, or all but the last of a single chat."""
    count = min(map(len, chats)) - 1
    for number in range(count):
        if any(chat[number] != chats[0][number] for chat in chats[1:]):
            return number
    return count

"""Encode answers with preferences as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.data.text.chat_template import TemplateRefused
from paceline.data.text.encoding.encoder import Encoded, Encoder
from paceline.data.text.encoding.positions import TokenizedText, tokenize
from paceline.data.text.sample import Sample, as_chat
from paceline.data.text.tool_calls import ChatMessage


@dataclass
class PreferenceEncoder(Encoder):
    """Encode answers with preferences. Every token after the prompt carries loss.

    The prompt of a chat is the text that its prompt, with the generation prompt, has in common with
    the chat. A token that has characters of both carries loss, in all answers of the sample.

    Args:
        has_pairs: whether samples are pairs.
    """

    has_pairs: bool = True

    def __call__(self, samples: list[Sample]) -> list[Encoded | str]:
        """Return the tokens of each sample (of a pair, both sequences one after the other), or the
        reason why it is dropped.

        Raises:
            ConfigError: a sample is a chat, and there is no chat template.
        """
        results: list[Encoded | str] = []
        texts: list[str] = []
        kept: list[tuple[int, Sample, list[int]]] = []
        for index, sample in enumerate(samples):
            results.append("rejected by the chat template")
            try:
                prompt, answers = self._texts_of(sample)
            except TemplateRefused as error:
                self.refusals[str(error).splitlines()[0][:200]] += 1
                continue
            kept.append((index, sample, [_shared_length(prompt, answer) for answer in answers]))
            texts += answers
        tokenized = iter(tokenize(self.tokenizer, texts))
        for index, sample, lengths in kept:
            answered = [(next(tokenized), length) for length in lengths]
            results[index] = self._join(answered, sample)
        return results

    def _texts_of(self, sample: Sample) -> tuple[str, list[str]]:
        """Return the text of the prompt, and the texts of the prompt with each answer."""
        answers = [sample] if sample.rejected is None else [sample, sample.rejected]
        self.facts["trailing_turns"] += any(answer.trailing_turns > 0 for answer in answers)
        if self.template is None and sample.pair is not None:
            prompt = sample.pair[0]
            texts = ["".join(answer.pair or ()) for answer in answers]
            return prompt, [*map(self.tokenizer.without_space_after_end, texts)]
        if self.template is None:
            self._render(sample)  # raises: there is no chat template
        chats = [
            as_chat(answer, self.system) if answer.messages is None else answer.messages
            for answer in answers
        ]
        assert self.template is not None
        self.facts["formatted"] += self.template.is_formatted(chats[0])
        template = self.template.select(chats[0], sample.tools)
        prompt_turns = chats[0][: _num_prompt_turns(chats)]
        return (
            template.render(prompt_turns, add_generation_prompt=True, tools=sample.tools),
            [template.render(chat, tools=sample.tools) for chat in chats],
        )

    def _join(self, texts: list[tuple[TokenizedText, int]], sample: Sample) -> Encoded:
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
        return Encoded(
            np.array([token for answer in answers for token in answer], dtype=np.int32),
            np.concatenate(masks),
            chosen_length=chosen_length,
            margin=sample.margin,
        )


def _num_prompt_turns(chats: Sequence[list[ChatMessage]]) -> int:
    """Return how many turns the chats have in common, or all but the last of a single chat."""
    count = min(map(len, chats)) - 1
    for number in range(count):
        if any(chat[number] != chats[0][number] for chat in chats[1:]):
            return number
    return count


def _shared_length(first: str, second: str) -> int:
    """Return the number of characters that two texts begin with."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((number for number, (left, right) in pairs if left != right), shorter)

"""The built-in rewards. Each is called as a function of the user is, with keyword arguments."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from pydantic import JsonValue

from paceline.config.schema.rewards import (
    MATH_REWARDS,
    OF_ENVIRONMENT,
    THINK_PATTERN,
    RewardEntry,
)
from paceline.rewards.answers import chosen_letter, final_answer, is_same_answer, letter_of
from paceline.rewards.group import Content, text_of

Scores = list[float | None]
BuiltinReward = Callable[..., object]
AnswerScores = Callable[..., Scores]
#: The share of the time limit that the completions of a group may use together.
_TIME_SHARE = 0.8


class OwnReward(Protocol):
    """An environment that computes the reward of its completion."""

    def get_reward(self) -> object: ...


def build_reward(entry: RewardEntry, max_completion_length: int, timeout_s: float) -> BuiltinReward:
    """Return the function of a built-in reward.

    Args:
        timeout_s: seconds that it may take for the completions of a prompt.
    """
    if entry.name in _OF_THE_TEXT:
        return _OF_THE_TEXT[entry.name](entry)
    limit = entry.max_length or max_completion_length
    if entry.name == "soft_overlong":
        return SoftOverlong(limit, entry.cache or 0)
    if entry.name == OF_ENVIRONMENT:
        return EnvironmentReward()
    score_answers = _answer_reward(entry, timeout_s)
    if entry.name == "cosine":
        return CosineReward(score_answers, limit, entry)
    return LengthReward(score_answers) if entry.name == "length" else score_answers


def _answer_reward(entry: RewardEntry, timeout_s: float) -> AnswerScores:
    """Return the function that compares answers with the right one."""
    column = entry.answer_column
    assert column is not None
    reward: AnswerScores
    if entry.name in MATH_REWARDS:
        from paceline.rewards.math_answers import MathReward

        reward = MathReward(column, _TIME_SHARE * timeout_s)
    else:
        compare = {"exact": exact_score, "choice": choice_score}[str(entry.name)]
        reward = AnswerReward(column, compare)
    return reward if entry.after is None else AnswerAfter(entry.after, reward)


class AnswerReward:
    """Compares the answer of each completion with the right one in a column.

    Args:
        compare: returns the score of a text for a right answer, or None if it cannot tell.
    """

    def __init__(self, column: str, compare: Callable[[str, str], float | None]) -> None:
        self.column, self.compare = column, compare

    def __call__(self, *, completions: Sequence[Content], **columns: Sequence[JsonValue]) -> Scores:
        golds = columns.get(self.column, [None] * len(completions))
        return [
            None if gold is None else self.compare(text_of(completion), str(gold))
            for completion, gold in zip(completions, golds, strict=True)
        ]


def exact_score(text: str, gold: str) -> float:
    """Return 1 if the final answer of a text equals the right one, otherwise 0."""
    return float(is_same_answer(final_answer(text), final_answer(gold)))


def choice_score(text: str, gold: str) -> float | None:
    """Return 1 if a text chooses the right letter, otherwise 0; None if the right answer has no
    letter."""
    letter = letter_of(gold)
    return None if letter is None else float(chosen_letter(text) == letter)


class AnswerAfter:
    """Gives only the text after the last occurrence of a mark to another reward, such as the answer
    after ``</think>``. A completion without the mark has the wrong answer."""

    def __init__(self, mark: str, reward: AnswerScores) -> None:
        self.mark, self.reward = mark, reward

    def __call__(self, *, completions: Sequence[Content], **columns: object) -> Scores:
        parts = [text_of(completion).rpartition(self.mark) for completion in completions]
        scores = self.reward(completions=[part[2] for part in parts], **columns)
        return [
            score if score is None or part[1] else 0.0
            for part, score in zip(parts, scores, strict=True)
        ]


class EnvironmentReward:
    """What the method ``get_reward`` of each completion's environment returns."""

    def __call__(self, *, environments: Sequence[OwnReward], **columns: object) -> object:
        values = [environment.get_reward() for environment in environments]
        return _gather(values) if any(map(inspect.isawaitable, values)) else values


async def _gather(values: Sequence[object]) -> list[object]:
    return [await value if inspect.isawaitable(value) else value for value in values]


class FormatReward:
    """1 for a completion that a regular expression matches as a whole, otherwise 0."""

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, *, completions: Sequence[Content], **columns: object) -> Scores:
        return [float(bool(self.pattern.fullmatch(text_of(each)))) for each in completions]


class SoftOverlong:
    """0 for a completion of up to ``max_length - cache`` tokens, from there on falling to -1 at
    ``max_length`` tokens, and -1 for longer ones (equation 13 of the paper on DAPO)."""

    def __init__(self, max_length: int, cache: int) -> None:
        self.max_length, self.cache = max_length, cache

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: object) -> Scores:
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, length: int) -> float:
        start = self.max_length - self.cache
        if length <= start:
            return 0.0
        return (start - length) / self.cache if length <= self.max_length else -1.0


class CountReward:
    """The share of a number of matches of a regular expression that a completion has, at most 1."""

    def __init__(self, pattern: str, count: int) -> None:
        self.pattern, self.count = re.compile(pattern, re.MULTILINE), count

    def __call__(self, *, completions: Sequence[Content], **columns: object) -> Scores:
        numbers = [sum(1 for _ in self.pattern.finditer(text_of(each))) for each in completions]
        return [min(1.0, number / self.count) for number in numbers]


class TagsReward:
    """The share of texts that occur exactly once in a completion."""

    def __init__(self, tags: Sequence[str]) -> None:
        self.tags = tags

    def __call__(self, *, completions: Sequence[Content], **columns: object) -> Scores:
        texts = [text_of(completion) for completion in completions]
        return [sum(text.count(tag) == 1 for tag in self.tags) / len(self.tags) for text in texts]


class RepetitionPenalty:
    """The largest penalty times the share of n-grams of words that have occurred before in the
    completion (Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs", 2025)."""

    def __init__(self, ngram_size: int, max_penalty: float) -> None:
        self.ngram_size, self.max_penalty = ngram_size, max_penalty

    def __call__(self, *, completions: Sequence[Content], **columns: object) -> Scores:
        return [self._score(text_of(completion).lower().split()) for completion in completions]

    def _score(self, words: list[str]) -> float:
        starts = range(len(words) - self.ngram_size + 1)
        if not starts:
            return 0.0
        different = {tuple(words[start : start + self.ngram_size]) for start in starts}
        return self.max_penalty * (1 - len(different) / len(starts))


class CosineReward:
    """Falls or rises with the length of a completion along half a cosine, for right answers from
    and to other values than for wrong ones (Yeo et al., 2025). None without a right answer.

    Args:
        score_answers: reward that is 1 for a right answer.
        max_length: length at which the last value is reached; longer completions have it too.
        entry: the values and the unit of the length.
    """

    def __init__(self, score_answers: AnswerScores, max_length: int, entry: RewardEntry) -> None:
        self.score_answers, self.max_length = score_answers, max_length
        self.counts_characters = entry.unit == "characters"
        self.correct, self.wrong = entry.correct or [1.0, 0.5], entry.wrong or [-0.5, 0.0]

    def __call__(
        self,
        *,
        completions: Sequence[Content],
        completion_ids: Sequence[Sequence[int]],
        **columns: object,
    ) -> Scores:
        scores = self.score_answers(completions=completions, **columns)
        sized = map(text_of, completions) if self.counts_characters else completion_ids
        return [
            None if score is None else self._scale(score >= 1, len(each))
            for score, each in zip(scores, sized, strict=True)
        ]

    def _scale(self, is_correct: bool, length: int) -> float:
        first, last = self.correct if is_correct else self.wrong
        progress = min(1.0, length / self.max_length)
        return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


class LengthReward:
    """0.5 for the shortest completion of a prompt, falling to -0.5 for the longest one; for wrong
    answers at most 0 (Kimi Team, "Kimi k1.5", 2025, section 2.3.3)."""

    def __init__(self, score_answers: AnswerScores) -> None:
        self.score_answers = score_answers

    def __call__(self, *, completions: Sequence[Content], **columns: object) -> Scores:
        scores = self.score_answers(completions=completions, **columns)
        lengths = [len(text_of(completion)) for completion in completions]
        shortest, spread = min(lengths), max(lengths) - min(lengths)
        values = [0.5 - (length - shortest) / spread if spread else 0.0 for length in lengths]
        return [
            None if score is None else value if score >= 1 else min(0.0, value)
            for score, value in zip(scores, values, strict=True)
        ]


#: Rewards that need nothing but the text.
_OF_THE_TEXT: dict[str | None, Callable[[RewardEntry], BuiltinReward]] = {
    "format": lambda entry: FormatReward(entry.pattern or THINK_PATTERN),
    "count": lambda entry: CountReward(str(entry.pattern), entry.count or 1),
    "tags": lambda entry: TagsReward(entry.tags or []),
    "repetition": lambda entry: RepetitionPenalty(
        entry.ngram_size or 3, -1.0 if entry.max_penalty is None else entry.max_penalty
    ),
}

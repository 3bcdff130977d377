"""The built-in rewards. Each is called as a function of the user is, with keyword arguments."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from pydantic import JsonValue

from paceline.config.schema.grpo import OF_ENVIRONMENT, THINK_PATTERN, RewardEntry
from paceline.rewards.answers import chosen_letter, final_answer, is_same_answer, letter_of
from paceline.rewards.group import Content, text_of

Scores = list[float | None]
BuiltinReward = Callable[..., object]
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
    if entry.name == "format":
        return FormatReward(entry.pattern or THINK_PATTERN)
    if entry.name == "soft_overlong":
        return SoftOverlong(entry.max_length or max_completion_length, entry.cache or 0)
    if entry.name == OF_ENVIRONMENT:
        return EnvironmentReward()
    column = entry.answer_column
    assert column is not None
    if entry.name == "math":
        from paceline.rewards.math_answers import MathReward

        return MathReward(column, _TIME_SHARE * timeout_s)
    compare = {"exact": exact_score, "choice": choice_score}[str(entry.name)]
    return AnswerReward(column, compare)


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

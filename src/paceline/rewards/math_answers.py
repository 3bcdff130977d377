"""The built-in reward ``math``: mathematical answers, compared by the package math-verify."""

import logging
from collections.abc import Sequence
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from pydantic import JsonValue

from paceline.core.texts import UserText
from paceline.rewards.answers import final_answer
from paceline.rewards.group import Content, text_of
from paceline.rewards.isolation import score_isolated

logger = logging.getLogger(__name__)
#: The limits of TRL for one text.
_PARSE_S, _VERIFY_S = 10, 5


class MathReward:
    """1 for a completion whose answer equals the right one as an expression, otherwise 0; None if
    the right answer is not an expression, as TRL's ``accuracy_reward``.

    A completion that takes too long, such as a power of powers, has a wrong answer.

    Args:
        column: column with the right answer.
        timeout_s: seconds for the completions of a prompt together.
    """

    def __init__(self, column: str, timeout_s: float) -> None:
        self.column, self.timeout_s = column, timeout_s

    def __call__(
        self, *, completions: Sequence[Content], **columns: Sequence[JsonValue]
    ) -> list[float | None]:
        gold_text = columns.get(self.column, [None])[0]
        gold = [] if gold_text is None else _parse_gold(str(gold_text))
        if not gold:
            return [None] * len(completions)
        texts = [text_of(completion) for completion in completions]
        limit_s = min(_PARSE_S + _VERIFY_S + 1.0, self.timeout_s / len(texts))
        scores = score_isolated(lambda text: _score(gold, text), texts, limit_s)
        for text, score in zip(texts, scores, strict=True):
            if score is None:
                logger.warning(
                    UserText(
                        "the reward math is 0 for a completion that could not be compared within"
                        " {limit_s} s: {end}",
                        code="math-not-compared",
                        limit_s=f"{limit_s:.1f}",
                        end=repr(text[-200:]),
                    )
                )
        return [0.0 if score is None else score for score in scores]


def _parse_gold(text: str) -> list[Any]:
    # As in GSM8K, the answer follows "####" after an explanation.
    marked = final_answer(text) if "####" in text else text
    parsed: list[Any] = parse(marked, parsing_timeout=_PARSE_S)
    return parsed


def _score(gold: list[Any], text: str) -> float:
    # Only LaTeX counts as an answer, and \boxed{} comes first.
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = parse(
        text,
        extraction_config=[latex],
        extraction_mode="first_match",
        parsing_timeout=_PARSE_S,
    )
    return float(verify(gold, answer, timeout_seconds=_VERIFY_S))

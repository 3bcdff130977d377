"""Built-in questions that a small model learns to answer within two minutes on two CPU cores: sums
of two-digit numbers, times of day, and metric units.

The rows are the same on every machine. Held-out questions show that the model has learned to
calculate: none of them is in the training data, and a sum isn't there in the other order either.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: A row as a dataset has it: ``{"messages": [{role, content}, …]}``.
ChatRow = dict[str, list[dict[str, str]]]
HELD_OUT_PER_KIND = 200
_UNITS = (
    ("millimeters", "cm", 10),
    ("centimeters", "m", 100),
    ("meters", "km", 1000),
    ("grams", "kg", 1000),
    ("milliliters", "l", 1000),
)
_LARGEST_QUANTITY = 400


@dataclass(frozen=True)
class SmallQuestion:
    """A question and its answer. Questions with the same ``key`` are held out together."""

    text: str
    answer: str
    key: str

    def as_row(self) -> ChatRow:
        return {
            "messages": [
                {"role": "user", "content": self.text},
                {"role": "assistant", "content": self.answer},
            ]
        }


def small_questions() -> Iterator[ChatRow]:
    """Yield the training questions."""
    for make in _KINDS:
        questions = list(make())
        held_out = {question.key for question in _held_out(questions)}
        yield from (question.as_row() for question in questions if question.key not in held_out)


def held_out_questions() -> Iterator[ChatRow]:
    """Yield 200 questions of each kind that are not in :func:`small_questions`."""
    for make in _KINDS:
        yield from (question.as_row() for question in _held_out(list(make())))


def _held_out(questions: list[SmallQuestion]) -> list[SmallQuestion]:
    """Choose questions by a hash, one for each key."""
    by_key = {question.key: question for question in questions}
    keys = sorted(by_key, key=lambda key: (zlib.crc32(key.encode()), key))
    return [by_key[key] for key in keys[:HELD_OUT_PER_KIND]]


def _sums() -> Iterator[SmallQuestion]:
    for a in range(10, 100):
        for b in range(10, 100):
            key = f"{min(a, b)} + {max(a, b)}"
            yield SmallQuestion(f"What is {a} + {b}?", str(a + b), key)


def _times() -> Iterator[SmallQuestion]:
    for hour in range(24):
        for minute in range(60):
            half = "am" if hour < 12 else "pm"
            text = f"What is {hour % 12 or 12}:{minute:02} {half} in 24-hour time?"
            yield SmallQuestion(text, f"{hour:02}:{minute:02}", text)


def _conversions() -> Iterator[SmallQuestion]:
    for small, large, factor in _UNITS:
        for quantity in range(1, _LARGEST_QUANTITY + 1):
            text = f"How many {small} are {quantity} {large}?"
            yield SmallQuestion(text, str(quantity * factor), text)


_KINDS: tuple[Callable[[], Iterator[SmallQuestion]], ...] = (_sums, _times, _conversions)

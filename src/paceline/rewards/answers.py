"""Find the final answer in a text and compare it with the right one. Texts are never executed."""

import re
from collections.abc import Iterator
from decimal import Decimal

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
#: A number with commas between groups of three digits, or without.
_NUMBER = re.compile(
    r"([+-]?)[$€£¥]?([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.I
)
_MAX_DIGITS = 1000
#: A letter at the start of an answer, possibly in parentheses or formatted.
_LETTER = re.compile(r"\W*(?:\\?(?:text|textbf|mathrm|mathbf)\s*\{)?\W*([A-Za-z])(?![A-Za-z0-9'])")
_ANSWER_IS = re.compile(
    r"\b(?:answer|option|choice)\b[ \t]*(?:is|:|=)[ \t:]*[*_(\[$\"'`]*([A-Z])(?![A-Za-z0-9'])",
    re.IGNORECASE,
)
#: A capital letter that stands alone on its line, begins it as an item, or ends it.
_LONE_LETTER = re.compile(
    r"^[*_(\[ \t]*([A-Z])[*_]*(?:[)\].:](?=\s|$)|[ \t]*$)"
    r"|(?<![\w'])\(?([A-Z])\)?[*_]*[.:,;!)]*[ \t]*$",
    re.MULTILINE,
)


def final_answer(text: str) -> str:
    r"""Return the final answer in a text: what the last ``\boxed{}``, ``<answer>`` tag or ``####``
    contains, or the whole text if it has none of them."""
    marked = max(_marked(text), default=None)
    return (text if marked is None else marked[1]).strip()


def _marked(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start of each marked answer and its content."""
    for pattern in (_TAG, _HASHES):
        for match in pattern.finditer(text):
            yield match.start(), match[1]
    for match in _BOXED.finditer(text):
        end = _closing_brace(text, match.end())
        if end is not None:
            yield match.start(), text[match.end() : end]


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one before ``start``; None if it is
    missing."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def is_same_answer(answer: str, gold: str) -> bool:
    """Return whether two answers are equal as numbers, or else as texts, in which runs of white
    space count as one space."""
    numbers = number_in(answer), number_in(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return " ".join(answer.split()) == " ".join(gold.split())


def number_in(text: str) -> Decimal | None:
    """Return the number that a text is, such as ``-1,234.50`` or ``$3.``; None for other texts."""
    stripped = text.strip().strip("$").strip()
    match = _NUMBER.fullmatch(stripped) if len(stripped) <= _MAX_DIGITS else None
    if match is None or (match[1] and match[2][0] in "+-"):
        return None
    return Decimal(f"{match[1]}{match[2]}{match[3] or ''}".replace(",", ""))


def chosen_letter(text: str) -> str | None:
    r"""Return the letter that a text chooses: in the last ``\boxed{}``, ``<answer>`` tag, ``####``
    or "answer is X", or else the last letter that stands alone; None if there is none."""
    marked = [
        (start, letter)
        for start, content in _marked(text)
        if (letter := _LETTER.match(content)) is not None
    ]
    marked += [(match.start(), match) for match in _ANSWER_IS.finditer(text)]
    if marked:
        return max(marked, key=lambda item: item[0])[1][1].upper()
    letters = [match[1] or match[2] for match in _LONE_LETTER.finditer(text)]
    return letters[-1] if letters else None


def letter_of(gold: str) -> str | None:
    """Return the letter of a right answer, such as ``B``, ``(b)`` or ``B. Paris``."""
    found = _LETTER.match(final_answer(gold))
    return found[1].upper() if found else None

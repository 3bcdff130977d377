"""Find the final answer in a text and compare it with the right one. Texts are never executed."""

import re
from collections.abc import Iterator
from decimal import Decimal

_OPEN_TAG, _CLOSE_TAG = "<answer>", "</answer>"
#: What opens and closes braces, in a single pass: a text may repeat it thousands of times.
_BRACES = re.compile(r"(\\boxed\s*+\{)|\\.|([{}])", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
#: A number with commas between groups of three digits, or without.
_NUMBER = re.compile(
    r"([+-]?)[$€£¥]?([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(e[+-]?\d{1,3})?", re.I
)
_MAX_DIGITS = 1000
#: A letter at the start of an answer, possibly in parentheses or formatted. Possessive, because a
#: text may be a long run of other characters.
_LETTER = re.compile(
    r"[\W_]*+(?:(?:text|textbf|mathrm|mathbf)\b[\W_]*+)?([A-Za-z])(?![A-Za-z0-9'])"
)
#: A small letter only at the end of a line: "the answer is a number" chooses nothing.
_ANSWER_IS = re.compile(
    r"(?i:\b(?:answer|option|choice)\b[ \t]*+(?:is|:|=))[ \t:]*+[*_(\[$\"'`]*+"
    r"([A-Z](?![A-Za-z0-9'])|[a-z](?=[)\].*_`\"']*+[ \t]*+$))",
    re.MULTILINE,
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
    """Yield the start of marked answers and their content, among them the last one of each kind."""
    end = text.rfind(_CLOSE_TAG)
    start = text.rfind(_OPEN_TAG, 0, end) if end >= 0 else -1
    if start >= 0:
        yield start, text[start + len(_OPEN_TAG) : end]
    for match in _HASHES.finditer(text):
        yield match.start(), match[1]
    yield from _boxed(text)


def _boxed(text: str) -> Iterator[tuple[int, str]]:
    r"""Yield the start and the content of each ``\boxed{}`` whose brace is closed."""
    opened: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        if match[1]:
            opened.append((match.start(), match.end()))
        elif match[2] == "{":
            opened.append(None)
        elif match[2] == "}" and opened:
            box = opened.pop()
            if box is not None:
                yield box[0], text[box[1] : match.start()]


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
    letter = _LETTER.match(final_answer(gold))
    return letter[1].upper() if letter else None

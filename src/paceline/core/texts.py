"""Texts for users that other languages can express: a template with named fields, and its values.

An error or a notice is written in English where it is raised, as a template with fields such as
``{key}``. Its code and its values go along with the text, so that the panel fills the template of
another language, which it finds by the code. See :mod:`paceline.messages`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, TypedDict

from paceline.core.formatting import counted

#: What a text contains, by name.
Values = Mapping[str, str | int | float | bool | None]
#: ``{name}``, or ``{name:noun}`` for a number with its noun.
FIELD = re.compile(r"\{([a-z_]\w*)(?::([a-z][a-z -]*))?\}")


def fill(template: str, values: Values) -> str:
    """Return a template with its fields replaced. Other braces remain, and so do those in values.

    ``{steps:step}`` becomes "1 step" or "2 steps".
    """

    def replace(field: re.Match[str]) -> str:
        name, noun = field.groups()
        if name not in values:
            return field[0]
        return counted(values[name], noun) if noun else str(values[name])  # type: ignore[arg-type]

    return FIELD.sub(replace, template)


def plain_values(**values: object) -> dict[str, str | int | float | bool | None]:
    """Return the values as JSON can hold them: paths and other objects become text.

    The code and the values of a text within a text are added under its name, as ``reason.code`` and
    ``reason.limit``, so that it is translated too.
    """
    plain: dict[str, str | int | float | bool | None] = {}
    for name, value in values.items():
        plain[name] = value if isinstance(value, int | float | bool | None) else str(value)
        if isinstance(value, UserText):
            plain[f"{name}.code"] = value.code
            plain |= {f"{name}.{key}": each for key, each in value.values.items()}
    return plain


class UserText(str):
    """A text in English with its code and its values, for a notice or a reason.

    Args:
        template: the text, with fields such as ``{name}``.
        code: the kind of text in a few words, such as ``rows-dropped``.
        values: what replaces the fields.
    """

    code: str
    values: dict[str, str | int | float | bool | None]

    def __new__(cls, template: str, /, *, code: str, **values: object) -> UserText:
        plain = plain_values(**values)
        return cls.of(fill(template, plain), code, plain)

    @classmethod
    def of(cls, text: str, code: str, values: Values) -> UserText:
        """Return a text that was filled before, perhaps in another process."""
        self = super().__new__(cls, text)
        self.code, self.values = code, dict(values)
        return self

    def __reduce__(self) -> Any:
        return UserText.of, (str(self), self.code, self.values)


def join_texts(texts: Iterable[UserText]) -> str:
    """Return texts as one, separated by semicolons; empty if there are none."""
    listed = list(texts)
    return reduce(_join_two, listed) if listed else ""


def _join_two(first: UserText, rest: UserText) -> UserText:
    return UserText("{first}; {rest}", code="two-texts", first=first, rest=rest)


class TextCode(TypedDict, total=False):
    """What a translation of a text needs; empty for a text without a code."""

    code: str
    values: Values


def translatable(text: str) -> TextCode:
    """Return the fields ``code`` and ``values`` of a text, for a record; none of a plain string."""
    return {"code": text.code, "values": text.values} if isinstance(text, UserText) else {}


class NoticeRecord(TextCode):
    """A notice as JSON."""

    level: str
    text: str


def notice_record(level: str, text: str) -> NoticeRecord:
    """Return a notice for JSON, with its code and its values if it has them."""
    return {"level": level, "text": text, **translatable(text)}


def with_translations(report: Any) -> Any:
    """Return a report for JSON in which every mapping with texts also has ``translations``: their
    codes and values, by key, from which the panel makes texts in its language."""
    if isinstance(report, Mapping):
        translations = {key: found for key, value in report.items() if (found := _codes(value))}
        content = {key: with_translations(value) for key, value in report.items()}
        return content | ({"translations": translations} if translations else {})
    return [with_translations(each) for each in report] if isinstance(report, list) else report


def _codes(value: Any) -> Any:
    """Return the code and the values of a text, or a list of them for a list of texts."""
    if isinstance(value, UserText):
        return translatable(value)
    is_list = isinstance(value, list) and any(isinstance(each, UserText) for each in value)
    return [_codes(each) for each in value] if is_list else None

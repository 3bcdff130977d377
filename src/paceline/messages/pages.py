"""The texts of the pages that commands write, such as ``report.html``, in English and Chinese.

A page is written in English, and every text that has a Chinese one carries it in an attribute. A
script puts the Chinese texts in place if the panel or the browser is in Chinese, so that one file
serves readers of both languages. Errors, notices and reasons are translated by their codes, as in
the panel; the fixed words of a page by ``pages_zh.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paceline.core.texts import FIELD, UserText, Values, fill
from paceline.messages.catalogue import chinese

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_FOLDER = Path(__file__).parent
#: Ends an English text that has no Chinese one.
_IN_ENGLISH = "（英文）"


class PageText(str):
    """A text of a page with values.

    Args:
        template: the English text, with fields such as ``{name}``, by which the Chinese one is
            found.
        values: what replaces the fields. Texts among them are translated too.
    """

    template: str
    values: Values

    def __new__(cls, template: str, /, **values: Any) -> PageText:
        self = super().__new__(cls, fill(template, values))
        self.template, self.values = template, values
        return self

    def __reduce__(self) -> Any:
        return _restore, (self.template, self.values)


def _restore(template: str, values: Values) -> PageText:
    return PageText(template, **values)


@cache
def page_words() -> dict[str, str]:
    """Return the Chinese texts of pages by their English ones."""
    words: dict[str, str] = yaml.safe_load((_FOLDER / "pages_zh.yaml").read_text("utf-8"))
    return words


def in_chinese(text: object) -> str | None:
    """Return a text in Chinese; None if it is the same in both languages, such as a name."""
    if isinstance(text, PageText):
        template = page_words().get(text.template)
        return None if template is None else fill(template, _values_in_chinese(text.values))
    if isinstance(text, UserText):
        return _by_code(text.code, text.values) or f"{text}{_IN_ENGLISH}"
    return page_words().get(text) if isinstance(text, str) else None


def _values_in_chinese(values: Values) -> Values:
    return {name: in_chinese(value) or value for name, value in values.items()}


def _by_code(code: str, values: Values) -> str | None:
    """Return the first Chinese template of a code whose values are all present, filled."""
    filled = {**values, **dict(_texts_among(values))}
    templates = chinese().get(code, {}).get("what", [])
    for template in [templates] if isinstance(templates, str) else templates:
        names = [field[1] for field in FIELD.finditer(template)]
        if all(filled.get(name) not in (None, "") for name in names):
            return fill(template, filled)
    return None


def _texts_among(values: Values) -> Iterable[tuple[str, str]]:
    """Yield the values that are texts with a code of their own, in Chinese."""
    for key, code in values.items():
        name, _, last = key.rpartition(".")
        if last == "code" and name and "." not in name:
            start = f"{name}."
            own = {
                each.removeprefix(start): value
                for each, value in values.items()
                if each.startswith(start)
            }
            yield name, _by_code(str(code), own) or f"{values[name]}{_IN_ENGLISH}"


def add_languages(environment: Environment) -> None:
    """Let the templates of an environment write texts in both languages.

    ``{{ text | t }}`` is the content of an element, ``{{ text | t_attribute("title") }}`` an
    attribute, and ``{{ texts | chinese_of }}`` a table for scripts. ``{{ language_script }}``
    follows the content of the page.
    """
    from markupsafe import Markup

    environment.filters |= {"t": _content, "t_attribute": _attribute, "chinese_of": _table}
    style = "html:not([lang|=zh]) [lang|=zh],html[lang|=zh] [lang=en]{display:none}"
    environment.globals |= {
        "language_style": Markup(f"<style>{style}</style>"),
        "language_script": Markup(f"<script>\n{(_FOLDER / 'language.js').read_text()}</script>"),
    }


def _content(text: object) -> Markup:
    from markupsafe import Markup, escape

    other = in_chinese(text)
    if other is None:
        return escape(str(text))
    return Markup('<span data-zh="{}">{}</span>').format(other, str(text))


def _attribute(text: object, name: str) -> Markup:
    from markupsafe import Markup

    other = in_chinese(text)
    shown = Markup('{}="{}"').format(Markup(name), str(text))
    return shown if other is None else shown + Markup(' data-zh-{}="{}"').format(name, other)


def _table(texts: Iterable[object]) -> dict[str, str]:
    return {str(text): other for text in texts if (other := in_chinese(text)) is not None}

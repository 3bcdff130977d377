"""Chat templates in the language of Go's text/template, which Ollama's ``TEMPLATE`` is.

Ollama gives a template ``.Messages`` (each with ``.Role``, ``.Content``, ``.Thinking`` and
``.ToolCalls``) and ``.Tools``, and the function ``json``
(https://github.com/ollama/ollama/blob/main/docs/template.mdx).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from paceline.data.text.chats.named_templates import BOS, EOS, FORMATS, Format, template_source
from paceline.data.text.qwen_tokenizer import CHATML_TEMPLATE, TURN_END
from paceline.models.builtin import CHAT_TEMPLATE

_QWEN_SYSTEM = "You are a helpful assistant."
#: Names of the templates that are not among the formats.
BUILTIN, QWEN = "builtin", "qwen-7b"


@dataclass(frozen=True)
class GoTemplate:
    """A chat template for Ollama.

    Args:
        source: text of the template.
        system: system message of chats without one; empty for none.
        stops: texts that end an answer, besides the tokenizer's end token.
    """

    source: str
    system: str
    stops: tuple[str, ...]


@cache
def _names_by_source() -> dict[str, str]:
    """Return the name of each template that is available for Ollama, by its Jinja source."""
    names = {template_source(name).strip(): name for name in reversed(FORMATS)}
    return names | {CHAT_TEMPLATE.strip(): BUILTIN, CHATML_TEMPLATE.strip(): QWEN}


def template_name(source: str) -> str | None:
    """Return the name of a Jinja template that is available for Ollama, or None."""
    return _names_by_source().get(source.strip())


def go_template(name: str, start: str, end: str, adds_start: bool) -> GoTemplate:
    """Return a template by its name.

    Args:
        start: the tokenizer's first token.
        end: its end token.
        adds_start: whether the tokenizer adds the first token to a text.
    """
    if name == BUILTIN:
        source = files(__package__).joinpath("builtin.gotmpl").read_text(encoding="utf-8")
        return GoTemplate(_joined(source), "", (TURN_END,))
    form = FORMATS["qwen2" if name == QWEN else name]
    prefix = form.prefix.removeprefix(BOS) if adds_start else form.prefix
    writer = _FormatWriter({BOS: start, EOS: end})
    stop = form.answer.partition("{}")[2].replace(EOS, "").strip()
    return GoTemplate(writer.write(form, prefix), form.default_system, (stop,) if stop else ())


def _joined(source: str) -> str:
    """Return a template without the line breaks and spaces between its actions."""
    return re.sub(r"\}\}\s+\{\{", "}}{{", source.strip())


class _FormatWriter:
    """Writes formats in Go's language.

    Args:
        tokens: texts of the first and of the end token.
    """

    def __init__(self, tokens: dict[str, str]) -> None:
        self._tokens = tokens

    def write(self, form: Format, prefix: str) -> str:
        """Return the template of a format.

        Args:
            prefix: start of a chat.
        """
        has_system = bool(form.system)
        system = self._text(form.system) if has_system else self._hold(form.system_in_user)
        user = self._text(form.user, has_system=has_system)
        before = f"{{{{ if $later }}}}{self._text(form.before_user)}{{{{ end }}}}"
        answer = self._text(form.header) + self._text(form.answer + form.after)
        default = self._text(form.system.replace("{}", form.default_system))
        parts = [
            '{{ $system := "" }}{{ $later := false }}',
            self._text(prefix),
            self._without_system(default) if form.default_system else "",
            "{{ range .Messages }}",
            f'{{{{ if eq .Role "system" }}}}{system}',
            f'{{{{ else if eq .Role "user" }}}}{before if form.before_user else ""}{user}',
            '{{ $system = "" }}{{ $later = true }}',
            f'{{{{ else if eq .Role "tool" }}}}{self._text(form.tool or form.user)}',
            f'{{{{ else if eq .Role "assistant" }}}}{answer}',
            "{{ end }}{{ end }}",
            self._text(form.header),
        ]
        return "".join(parts)

    def _text(self, text: str, has_system: bool = True) -> str:
        """Return the actions that write a text with the content of a message.

        Args:
            has_system: whether the content is not preceded by the system message.
        """
        content = "{{ .Content }}" if has_system else "{{ $system }}{{ .Content }}"
        return "".join(
            content if part == "{}" else f"{{{{ {_quoted(self._filled(part))} }}}}"
            for part in re.split(r"(\{\})", text)
            if part
        )

    def _hold(self, text: str) -> str:
        """Return the action that keeps a system message for the next user's turn."""
        pattern = self._filled(text).replace("%", "%%").replace("{}", "%s")
        return f"{{{{ $system = printf {_quoted(pattern)} .Content }}}}"

    def _filled(self, text: str) -> str:
        for mark, token in self._tokens.items():
            text = text.replace(mark, token)
        return text

    @staticmethod
    def _without_system(text: str) -> str:
        """Return the actions that write a text if the first message is no system message."""
        first = '{{ if ne (index .Messages 0).Role "system" }}'
        return f"{{{{ if .Messages }}}}{first}{text}{{{{ end }}}}{{{{ else }}}}{text}{{{{ end }}}}"


def _quoted(text: str) -> str:
    """Return a text as Go's string literal, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)
